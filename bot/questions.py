"""The question of any flow as Block Kit: on a card, and in the form that its Change button opens. Pure functions.

All text of a question is a stranger's. Formats: https://api.slack.com/reference/block-kit/blocks and
https://api.slack.com/reference/surfaces/views
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

from bot.answers import STEPS, Typed
from bot.kit import (
    BUTTON,
    FIELD,
    SECTION_TEXT,
    Block,
    as_dict,
    as_text,
    form_field,
    label,
    length_of,
    money,
    safe,
    text_input,
    told,
)
from flow.model import Approval, Thread
from flow.questions import Action, Question, Step
from flow.text import visible_json

# The form's `callback_id`.
FORM = "change"

# Actions in one form: Slack takes 100 blocks, of which one may need six.
_MOST_ACTIONS = 16
# Of a card's 50 blocks: the rest is for its outcome, reasons and buttons. Its texts have less room, too: see `card`.
_MOST_BLOCKS = 30
# Two texts for each, of Slack's ten in a section.
_PAIRS = 5
# Fits beside its label.
_SHORT = 60
_LABEL = 200
_LONG = 1500
_RESULT = 500
_REASON = 300
# What Slack takes as an input's text.
_INPUT = 3000
_CUT = "… see the page"


def subject_of(question: Question) -> str:
    """What it is about, in a line: "1,250.00 EUR: Refund". The amount is first, as a long line loses its end."""
    return f"{amount_of(question)}: {question.title}" if question.amount else question.title


def amount_of(question: Question) -> str:
    """With thousands set apart; empty if it is about no amount."""
    return money(question.amount, question.currency) if question.amount else ""


def question_blocks(question: Question, room: int) -> list[Block]:
    """Fields and actions as a card shows them, in so many characters; what has no room is said to stand on the page."""
    blocks = [*_field_blocks(question), *(block for action in question.actions for block in _action_blocks(action))]
    if len(blocks) <= _MOST_BLOCKS and length_of(blocks) <= room:
        return blocks
    lengths = itertools.accumulate(map(length_of, blocks))
    fit = [block for block, length in zip(blocks, lengths, strict=True) if length + len(_CUT) <= room]
    return [*fit[: _MOST_BLOCKS - 1], label(_CUT)]


def ending_of(approval: Approval, thread: Thread) -> list[str]:
    """What became of a thread whose flow pays nothing, as far as it is known."""
    if thread.status == "done":
        return [f"Done: {safe(visible_json(thread.result, indent=None), _RESULT)}"]
    if thread.status in ("stuck", "failed", "unknown"):
        why = f": {safe(thread.reason, _REASON)}" if thread.reason else ""
        return [f"⚠️ The thread is {thread.status}, and somebody must look at it{why}"]
    return {
        "expired": ["Nobody decided it in time."],
        "withdrawn": [f"It was withdrawn{by_whom(approval)}."],
        "superseded": ["Its flow no longer waits for it."],
    }.get(approval.status, [])


def by_whom(approval: Approval) -> str:
    """Who took a request back, and why, to follow its status; empty if nobody did."""
    if approval.withdrawn_by is None:
        return ""
    why = f" ({safe(approval.withdrawn_why, _REASON)})" if approval.withdrawn_why else ""
    return f" by {safe(approval.withdrawn_by, _LABEL)}{why}"


def has_form(question: Question) -> bool:
    """Whether there is something to change, and a form can hold it."""
    return question.can_change and len(question.actions) <= _MOST_ACTIONS and all(map(_steps, question.actions))


def form_of(question: Question, value: str) -> dict[str, Any]:
    """The modal in which each action gets an answer of its own; `value` comes back with it."""
    return {
        "type": "modal",
        "callback_id": FORM,
        "private_metadata": value,
        "title": told("Your answer", 24),
        "submit": told("Decide", 24),
        "close": told("Cancel", 24),
        "blocks": [block for number, action in enumerate(question.actions) for block in _form_blocks(action, number)],
    }


def typed_in(values: dict[str, Any], question: Question) -> list[Typed]:
    """What was filled into the form, from the submission's `state.values`, whatever else is in there."""
    return [
        Typed(
            step=as_text(as_dict(_element(values, f"step-{number}").get("selected_option")).get("value")),
            args=as_text(_element(values, f"args-{number}").get("value")),
            message=as_text(_element(values, f"message-{number}").get("value")).strip(),
        )
        for number in range(len(question.actions))
    ]


def _element(values: dict[str, Any], name: str) -> dict[str, Any]:
    return as_dict(as_dict(values.get(name)).get(name))


def _field_blocks(question: Question) -> Iterator[Block]:
    """Short ones side by side with their labels, long ones below theirs."""
    for short, group in itertools.groupby(question.fields, key=_is_short):
        fields = list(group)
        if short:
            for start in range(0, len(fields), _PAIRS):
                pairs = fields[start : start + _PAIRS]
                yield {"type": "section", "fields": [told(text, FIELD) for pair in pairs for text in pair]}
        else:
            for name, text in fields:
                yield {"type": "context", "elements": [told(name, _LABEL)]}
                yield _text(text)


def _is_short(field: tuple[str, str]) -> bool:
    return all(len(text) <= _SHORT and "\n" not in text for text in field)


def _action_blocks(action: Action) -> Iterator[Block]:
    yield _text(f"{action.name}\n{visible_json(action.args)}")
    if action.description:
        yield {"type": "context", "elements": [told(action.description, _LONG, rest=_CUT)]}


def _text(text: str) -> Block:
    return {"type": "section", "text": told(text, _LONG, rest=_CUT)}


def _form_blocks(action: Action, number: int) -> Iterator[Block]:
    args = visible_json(action.args)
    steps = _steps(action)
    yield {"type": "section", "text": told(action.name, SECTION_TEXT)}
    if action.description:
        yield {"type": "context", "elements": [told(action.description, _LONG, rest=_CUT)]}
    if "edit" not in steps:
        yield _text(args)
    if steps != list(action.allowed):
        yield label("Its arguments are too long to be edited here: see the page.")
    choices = [{"text": told(STEPS[step], BUTTON), "value": step} for step in steps]
    select: Block = {"type": "static_select", "options": choices}
    # One of several must be chosen: what nobody chose is no decision.
    only = {"initial_option": choices[0]} if len(choices) == 1 else {}
    yield form_field(f"step-{number}", "What becomes of it?", select | only)
    if "edit" in steps:
        yield text_input(f"args-{number}", "Arguments, as JSON", optional=True, multiline=True, initial_value=args)
    if {"respond", "reject"} & set(steps):
        yield text_input(f"message-{number}", "Message", optional=True, multiline=True)


def _steps(action: Action) -> list[Step]:
    """Those that the form can offer."""
    return [step for step in action.allowed if step != "edit" or len(visible_json(action.args)) <= _INPUT]
