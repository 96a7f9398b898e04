"""The form in which a claim is filed in Slack: shown, read, and told by field what is wrong. Pure functions."""

from __future__ import annotations

import hashlib
from typing import Any

from bot.kit import plain, safe, text_input, typed_text
from flow.errors import BadInput
from flow.starting import New, filed_claim

# The form's `callback_id`, and the global shortcut's.
FORM = "file_claim"
SHORTCUT = "new_claim"

_FIELDS = ("amount", "currency", "payee", "note")
_NAME = 200


def new_claim_view(metadata: str = "") -> dict[str, Any]:
    """The empty form. `metadata` comes back with it."""
    return {
        "type": "modal",
        "callback_id": FORM,
        "private_metadata": metadata,
        "title": plain("New claim", 24),
        "submit": plain("File it", 24),
        "close": plain("Cancel", 24),
        "blocks": [
            text_input("amount", "Amount", hint="Digits with an optional decimal point, such as 250 or 250.00"),
            text_input("currency", "Currency", initial_value="USD", hint="A code such as USD, EUR or JPY"),
            text_input("payee", "Payee", optional=True, hint="Who is paid"),
            text_input("note", "Note", optional=True, hint="What it is for; approvers read it", multiline=True),
        ],
    }


def new_of(values: dict[str, Any]) -> New:
    """The claim that was filled in, by the submission's `state.values`. Raises BadInput."""
    typed = {name: typed_text(values, name) for name in _FIELDS}
    return filed_claim(typed | {"currency": typed["currency"].upper()})


def field_error(exc: BadInput) -> dict[str, str]:
    """What is wrong, beside its field."""
    where = exc.name if exc.name in _FIELDS else "amount"
    return {where: f"{exc.expected[:1].upper()}{exc.expected[1:]}."}


def thread_id_of(team_id: str, view_id: str) -> str:
    """The same for one form however often it is sent, and nobody else's."""
    return f"slack-{hashlib.sha256(f'{team_id}/{view_id}'.encode()).hexdigest()[:16]}"


def filed_note(thread_id: str, new: New) -> str:
    """What the person is told once it is filed."""
    given = new.input
    payee = f" to {safe(given['payee'], _NAME)}" if given["payee"] else ""
    return (
        f"📨 Filed as {thread_id}: {given['amount']} {given['currency']}{payee}. If it needs approval, that is asked"
        " for now; `/claims mine` says how far it is."
    )
