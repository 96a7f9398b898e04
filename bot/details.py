"""Everything about one request in a modal, for whoever wants to know more than a card has room for: a pure view.

All of a stranger's text is plain text, so that no link in it can be clicked.
"""

from __future__ import annotations

from collections.abc import Sequence

from bot.blocks import facts_of, page_of, subject_in, value_of
from bot.kit import (
    FIELD,
    HEADER,
    SECTION_TEXT,
    Block,
    button,
    date,
    fitting,
    in_full,
    label,
    mention,
    page_button,
    plain,
    safe,
    told,
)
from bot.outcomes import TAMPERED, asked_amount, outcome_lines, progress_lines, title_of
from bot.questions import amount_of, ending_of
from bot.views import View, in_words, modal
from flow.advice import advice_in_words
from flow.model import Approval, Person
from flow.policy import is_requester
from flow.questions import Question, question_of
from flow.show import Story
from flow.text import visible_json
from flow.trace import Event, Trace

DETAILS = "details"

# Of Slack's 100 blocks.
_MOST_ASKED = 45
_MOST_OF_HISTORY = 35
_MOST_OF_ADVICE = 6

_NAME = 120
_SHORT = 300
# What stands in the fields of the card, or has a place of its own.
_SHOWN = ("amount", "currency", "payee", "note")


def details_of(
    approval: Approval, story: Story, trace: Trace, person: Person, *, public_url: str | None = None
) -> View:
    """The modal for this person."""
    thread, elsewhere = story.thread, _elsewhere(approval, public_url)
    if approval.tampered:
        return in_words("Details", f"{TAMPERED} Thread {thread.thread_id}, interrupt {approval.interrupt_id}.")
    question = question_of(approval.request)
    is_claim = question.kind == "claim"
    lines = outcome_lines(approval, thread, story.payment) if is_claim else ending_of(approval, thread)
    state = [f"*{title_of(approval, thread)}*", *progress_lines(approval), *lines]
    asked = [*_note(story), *_rest_of(story)] if is_claim else _asked(question)
    blocks: list[Block] = [
        {"type": "header", "text": told(subject_in(approval), HEADER)},
        {"type": "section", "text": _mrkdwn("\n".join(state))},
        *facts_of(approval, asked_amount(approval) if is_claim else amount_of(question)),
        *_within(asked, _MOST_ASKED, elsewhere),
        *_within(_advice(story), _MOST_OF_ADVICE, elsewhere),
        label("*What happened*"),
        *_within([block for event in trace.events for block in _event(event)], _MOST_OF_HISTORY, elsewhere),
        label("*Who decides*"),
        {"type": "section", "text": _mrkdwn("\n".join(_rules(approval)))},
        {"type": "context", "elements": [plain(line, FIELD) for line in _origin(approval)]},
    ]
    actions = _actions(approval, person, public_url)
    if actions:
        blocks.append({"type": "actions", "block_id": f"details-{approval.interrupt_id}", "elements": actions})
    return modal(DETAILS, "Details", blocks, metadata=value_of(approval))


def _note(story: Story) -> list[Block]:
    note = in_full(str(story.thread.asks_for.get("note") or ""))
    return [label("*Note*"), *note] if note else []


def _rest_of(story: Story) -> list[Block]:
    """Whatever else the claim was filed with: links to receipts, for one."""
    blocks = []
    for name, value in story.thread.asks_for.items():
        if name not in _SHOWN and value:
            blocks += _named(name, value if isinstance(value, str) else visible_json(value))
    return blocks


def _asked(question: Question) -> list[Block]:
    """What another flow asks, in full."""
    blocks = [block for name, text in question.fields for block in _named(name, text)]
    for action in question.actions:
        blocks += _named(action.name, visible_json(action.args))
        blocks += in_full(action.description)
    return blocks


def _named(name: str, text: str) -> list[Block]:
    return [{"type": "context", "elements": [told(name, FIELD)]}, *(in_full(text) or in_full("–"))]


def _advice(story: Story) -> list[Block]:
    if story.advice is None:
        return []
    said = in_full(advice_in_words(story.advice))
    return [label("🤖 *Advice of a language model, to be doubted*"), *said] if said else []


def _event(event: Event) -> list[Block]:
    """A line, and below it what somebody wrote, if that is long."""
    line = f"{date(event.at)} *{safe(event.what, _SHORT)}*"
    if len(event.detail) <= _SHORT and "\n" not in event.detail:
        detail = f" {safe(event.detail, _SHORT)}" if event.detail else ""
        return [{"type": "context", "elements": [_mrkdwn(f"{line}{detail}")]}]
    return [{"type": "context", "elements": [_mrkdwn(line)]}, *in_full(event.detail)]


def _rules(approval: Approval) -> list[str]:
    who = fitting([mention(name, _NAME) for name in approval.approvers], SECTION_TEXT // 3)
    listed = ", ".join(who) or "nobody but the command line"
    rules = [f"{approval.required} of: {listed}"]
    if approval.expires_at:
        rules.append(f"Decide by {date(approval.expires_at)}")
    if approval.escalate_to and approval.escalated_at is None:
        others = fitting([mention(name, _NAME) for name in approval.escalate_to], SECTION_TEXT // 3)
        rules.append(f"Then these are asked, too: {', '.join(others)}")
    if approval.step_up:
        rules.append("Approved on its page only")
    if approval.self_approval:
        rules.append("Whoever asked may decide it, too")
    return rules


def _origin(approval: Approval) -> Sequence[str]:
    return (
        f"thread {approval.thread_id} · tier {approval.tier}",
        f"interrupt {approval.interrupt_id}",
        f"hash {approval.request_hash}",
    )


def _actions(approval: Approval, person: Person, public_url: str | None) -> list[Block]:
    actions = []
    if public_url:
        actions.append(page_button("Open the page", page_of(approval, public_url)))
    if approval.status == "pending" and is_requester(approval.requested_by, person):
        ask = f"{subject_in(approval)}: nobody decides it then, and nothing is paid."
        actions.append(button("withdraw", "Withdraw", value_of(approval), "danger", ask=ask))
    return actions


def _elsewhere(approval: Approval, public_url: str | None) -> str:
    if public_url:
        return f"… the rest is on the page: {page_of(approval, public_url)}"
    return f"… the rest: claim_flow.py show --thread {approval.thread_id}"


def _within(blocks: list[Block], most: int, elsewhere: str) -> list[Block]:
    if len(blocks) <= most:
        return blocks
    return [*blocks[: most - 1], {"type": "context", "elements": [plain(elsewhere, FIELD)]}]


def _mrkdwn(text: str) -> Block:
    assert len(text) <= SECTION_TEXT, len(text)
    return {"type": "mrkdwn", "text": text, "verbatim": True}
