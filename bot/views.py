"""Small modals as Block Kit: pure functions.

Each begins as a skeleton, since the right to open one is gone after three seconds, and gets its content afterwards.
Formats: https://api.slack.com/reference/surfaces/views
"""

from __future__ import annotations

from typing import Any

from bot.blocks import facts_of, subject_in
from bot.kit import HEADER, SECTION_TEXT, Block, cut, text_input, told
from flow.model import Approval

# The forms' `callback_id`s.
REJECT = "reject"
AMOUNT = "change-amount"

MAX_REASON = 2000
# Fifteen digits, a point and decimals.
_AMOUNT_TEXT = 20

View = dict[str, Any]


def skeleton(title: str) -> View:
    """What stands there until there is more to say; and what to do if that never comes."""
    return in_words(title, "One moment… If nothing appears, close this and click again.")


def in_words(title: str, text: str) -> View:
    """A modal that only says something."""
    return modal("words", title, [{"type": "section", "text": told(text, SECTION_TEXT)}])


def reject_form(approval: Approval, value: str) -> View:
    """Asks for the reason of a rejection; `value` comes back with it."""
    reason = _reason("Whoever asked for it will read this.")
    return modal(REJECT, "Reject", [*_asked(approval), reason], submit="Reject", metadata=value)


def amount_form(approval: Approval, value: str) -> View:
    """Asks for another amount."""
    request = approval.request
    amount = text_input(
        "amount",
        f"Amount in {request['currency']}",
        initial_value=cut(str(request["amount"]), _AMOUNT_TEXT),
        max_length=_AMOUNT_TEXT,
    )
    blocks = [
        *_asked(approval),
        amount,
        _reason("The request is made anew with this amount, and approved anew."),
    ]
    return modal(AMOUNT, "Change amount", blocks, submit="Ask anew", metadata=value)


def modal(
    callback_id: str, title: str, blocks: list[Block], *, submit: str | None = None, metadata: str = "", close: str = ""
) -> View:
    """A modal; without `submit` it cannot be sent."""
    view: View = {
        "type": "modal",
        "callback_id": callback_id,
        "title": told(title, 24),
        "close": told(close or ("Cancel" if submit else "Close"), 24),
        "blocks": blocks,
    }
    if submit:
        view["submit"] = told(submit, 24)
    if metadata:
        view["private_metadata"] = metadata
    return view


def _asked(approval: Approval) -> list[Block]:
    """What it is about, so that nobody decides another request than they think."""
    return [
        {"type": "header", "text": told(subject_in(approval), HEADER)},
        *facts_of(approval),
    ]


def _reason(hint: str) -> Block:
    return text_input("reason", "Why? (optional)", optional=True, hint=hint, multiline=True, max_length=MAX_REASON)
