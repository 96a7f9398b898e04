"""What forms say, checked: each field once, each value one that a page of ours could have sent."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from bot.answers import Misfilled, Typed, answer_of, sentence, was_filled_in
from flow import inputs
from flow.errors import FlowError
from flow.model import Verdict, VerdictName
from flow.questions import Question

_ODD = "The form is not as it was sent from here."

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


@dataclass(frozen=True, kw_only=True)
class Filled:
    """A request's forms as one of them was filled in: shown again, with what is wrong, if it cannot be taken."""

    reason: str = ""
    amount: str = ""
    option: str = ""
    typed: Sequence[Typed] = ()
    errors: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, form: Form, question: Question, wrong: FlowError) -> Filled:
        errors = wrong.errors if isinstance(wrong, Misfilled) else {"form": sentence(wrong)}
        return cls(reason=form.one("reason"), option=form.one("option"), typed=typed_in(form, question), errors=errors)


def verdict_of(form: Form, question: Question, *, door: Literal["web", "link"]) -> Verdict:
    """What the form says. Raises Refused for what no page of ours sends, Misfilled for what a person can mend."""
    verdict, request_hash = form.one("verdict"), hash_of(form)
    if verdict not in (*_VERDICTS, "change"):
        raise Refused(400, "Not understood", _ODD)
    name, answer = _said(form, question, verdict)
    return Verdict(verdict=name, door=door, reason=reason_of(form), request_hash=request_hash, answer=answer)


def _said(form: Form, question: Question, verdict: str) -> tuple[VerdictName, dict[str, Any] | None]:
    typed = typed_in(form, question)
    if verdict == "change":
        return answer_of(question, typed)
    if was_filled_in(question, typed):
        raise Misfilled({"form": "You filled in answers, and pressed another button: send them, or clear them."})
    if verdict == "approve" and question.options:
        option = form.one("option")
        if option not in question.options:
            raise Misfilled({"option": "Choose one."})
        return "approve", {"option": option}
    return _VERDICTS[verdict], None


def hash_of(form: Form) -> str:
    """Of the request that the page has shown. Raises Refused."""
    request_hash = form.one("request_hash")
    if not re.fullmatch(r"[0-9a-f]{64}", request_hash):
        raise Refused(400, "Not understood", _ODD)
    return request_hash


def typed_in(form: Form, question: Question) -> list[Typed]:
    """What was filled in for each action. Browsers send line ends as CRLF."""
    return [
        Typed(
            step=form.one(f"step-{number}"),
            args=form.one(f"args-{number}").replace("\r\n", "\n"),
            message=form.one(f"message-{number}").replace("\r\n", "\n").strip(),
        )
        for number in range(len(question.actions))
    ]


def reason_of(form: Form) -> str:
    # Browsers send line ends as CRLF.
    return inputs.parse_text("reason", form.one("reason").replace("\r\n", "\n").strip(), inputs.MAX_NOTE)
