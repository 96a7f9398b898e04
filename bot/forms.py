"""What forms say, checked: each field once, each value one that a page of ours could have sent."""

from __future__ import annotations

import re
from typing import Literal

from flow import inputs
from flow.model import Verdict, VerdictName

_VERDICTS: dict[str, VerdictName] = {"approve": "approve", "reject": "reject"}


class Refused(Exception):
    """An answer that is a page with an explanation."""

    def __init__(self, status: int, title: str, text: str, *, retry_after_s: int | None = None) -> None:
        super().__init__(text)
        self.status, self.title, self.text, self.retry_after_s = status, title, text, retry_after_s


class Form:
    """The fields of a form, each of which came once, unless it may come often."""

    def __init__(self, fields: dict[str, list[str]]) -> None:
        self._fields = fields

    def one(self, name: str) -> str:
        """The field's only value; empty if it is missing. Raises Refused if it comes twice."""
        values = self._fields.get(name, [""])
        if len(values) != 1:
            raise Refused(400, "Not understood", f"The form has {len(values)} values of {name}.")
        return values[0]

    def all(self, name: str) -> list[str]:
        return self._fields.get(name, [])


def verdict_of(form: Form, *, door: Literal["web", "link"]) -> Verdict:
    """What the form says. Raises Refused."""
    verdict, request_hash = _VERDICTS.get(form.one("verdict")), form.one("request_hash")
    if verdict is None or not re.fullmatch(r"[0-9a-f]{64}", request_hash):
        raise Refused(400, "Not understood", "The form is not as it was sent from here.")
    return Verdict(verdict=verdict, door=door, reason=reason_of(form), request_hash=request_hash)


def reason_of(form: Form) -> str:
    # Browsers send line ends as CRLF.
    return inputs.parse_text("reason", form.one("reason").replace("\r\n", "\n").strip(), inputs.MAX_NOTE)
