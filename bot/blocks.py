"""Approvals as Block Kit, and clicks on them as values: pure functions, no network, no database.

Text that a claimant, or a flow, wrote goes into `plain_text` with `emoji: false`, or is escaped; characters that hide
or reorder are shown as escapes. Formats: https://api.slack.com/reference/block-kit/blocks and
https://api.slack.com/reference/interaction-payloads/block-actions
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC
from typing import Any

from bot.answers import answer_in_words
from bot.kit import (
    CONFIRM,
    FIELD,
    HEADER,
    SECTION_TEXT,
    Block,
    as_dict,
    as_id,
    as_text,
    button,
    cut,
    date,
    first_of,
    fitted,
    fitting,
    is_hex,
    label,
    length_of,
    mention,
    mrkdwn,
    one_line,
    page_button,
    plain,
    safe,
    told,
)
from bot.outcomes import TAMPERED, asked_amount, decision_line, outcome_lines, progress_lines, title_of
from bot.people import Asked
from bot.questions import amount_of, ending_of, has_form, question_blocks, subject_of
from flow.advice import advice_in_words
from flow.model import Advice, Approval, Payment, Thread
from flow.policy import is_member
from flow.questions import Question, question_of
from flow.text import visible

# Slack takes some 12,000 characters in all texts of a message, does not say how it counts them, and has refused 11,341:
# https://github.com/slackapi/bolt-js/issues/2509 and https://github.com/slackapi/bolt-js/issues/2867
_CARD = 10_000
# Of these, kept free for what is yet to be said on it: the outcome (1,600), the answer and the reasons.
_SAID = 4_100
# What Slack asks back stands at each of the buttons.
_ASKS = 1_500

# Our own: a card is read at a glance.
_NAME = 120
_NOTE = 600
# Fits beside its label.
_SHORT_NOTE = 60
_REASON = 300
_REASONS = 5
_MENTIONS = 20
_ADVICE = 600
_ANSWER = 1000
_OUTCOME = 1500
_WHY = 500


@dataclass(frozen=True, kw_only=True)
class Press:
    """Somebody at a card, or at the form that it opened. `team_id` is their own team; `enterprise_id` their grid."""

    user_id: str
    user_name: str
    team_id: str
    enterprise_id: str | None
    interrupt_id: str
    request_hash: str
    channel_id: str | None
    message_ts: str | None


@dataclass(frozen=True, kw_only=True)
class Click(Press):
    """One press of Approve, or of an option."""

    answer: dict[str, Any] | None = None


def card(
    approval: Approval,
    thread: Thread,
    payment: Payment | None,
    advice: Advice | None = None,
    *,
    public_url: str | None = None,
) -> tuple[str, list[Block]]:
    """The request, or its outcome: the text for notifications and screen readers, and the blocks.

    `public_url` is where the pages are: what a press cannot approve is approved there.
    """
    if approval.tampered:
        return _changed_past_us(approval, thread)
    question = question_of(approval.request)
    header = f"{title_of(approval, thread)}: {subject_in(approval)}"
    last = [*_buttons(approval, question, public_url), _origin(approval)]
    if question.kind == "claim":
        first = [_header(header), *_claim_blocks(approval, thread, advice)]
        lines = outcome_lines(approval, thread, payment)
    else:
        header = subject_in(approval) if approval.status == "pending" else header
        first = [_header(header), *facts_of(approval, amount_of(question))]
        first += question_blocks(question, _CARD - _SAID - length_of([*first, *last]))
        lines = ending_of(approval, thread)
    return _summary(approval, thread), [*first, *_said_blocks(approval, question, lines), *last]


def _header(text: str) -> Block:
    return {"type": "header", "text": told(text, HEADER)}


def _said_blocks(approval: Approval, question: Question, lines: list[str]) -> list[Block]:
    """The decisions, what came of them, what was answered, and why: at most `_SAID` characters."""
    blocks: list[Block] = []
    lines = [*progress_lines(approval), *lines]
    outcome = [*fitting([*map(decision_line, approval.decisions)], _OUTCOME - len("\n".join(lines))), *lines]
    if outcome:
        blocks += [{"type": "divider"}, {"type": "section", "text": mrkdwn("\n".join(outcome), SECTION_TEXT)}]
    if answer := _answer(approval, question):
        blocks.append({"type": "section", "text": told("\n".join(answer), _ANSWER)})
    return blocks + [
        {"type": "section", "text": plain(one_line(f"💬 {decision.who}: {decision.reason}"), _REASON)}
        for decision in [decision for decision in approval.decisions if decision.reason][-_REASONS:]
    ]


def _changed_past_us(approval: Approval, thread: Thread) -> tuple[str, list[Block]]:
    """The card of what nobody can decide, without what it says by now: nobody was asked that, and it may be absurd."""
    title = title_of(approval, thread)
    return f"{title}: thread {approval.thread_id}. {TAMPERED}", [
        _header(title),
        {"type": "section", "text": mrkdwn(TAMPERED, SECTION_TEXT)},
        _origin(approval),
    ]


def reply(approval: Approval, thread: Thread, payment: Payment | None) -> str:
    """The short word below the card once the thread is over, or asks for something else."""
    question = question_of(approval.request)
    if question.kind == "claim":
        lines = outcome_lines(approval, thread, payment)
        if approval.changed_to and is_member(approval.requested_by):
            # Whoever filed it is asked for less, or more, than they filed, and is told so.
            lines = [mention(approval.requested_by, _NAME), *lines]
    else:
        by, answer = approval.settled_by, _answer(approval, question)
        said = f", {safe('; '.join(answer), _REASON)}" if answer else ""
        who = [f"{title_of(approval, thread)} by {safe(by.who, _NAME)}{said}."] if by else []
        lines = [*who, *ending_of(approval, thread)]
    return " ".join(lines) or f"Thread {thread.thread_id} is {thread.status}."


def reminder(approval: Approval, missing: Sequence[Asked], group_ids: Mapping[str, str]) -> str:
    """The word below the card to those whose vote is missing. `group_ids` has the ids of user groups by handle."""
    names = [_called(each, group_ids) for each in missing[:_MENTIONS]]
    names += [f"{len(missing) - _MENTIONS} more"] if len(missing) > _MENTIONS else []
    return f"⏰ Since {date(approval.requested_at)} this waits for {', '.join(names) or 'the command line'}."


def _called(asked: Asked, group_ids: Mapping[str, str]) -> str:
    name = mention(group_ids.get(asked.name, asked.name), _NAME)
    return f"{name} (away: {mention(asked.stand_in, _NAME)} decides)" if asked.stand_in else name


def told_outcome(approval: Approval, thread: Thread, payment: Payment | None) -> str:
    """The same as `reply` for whoever asked, where no card stands above it."""
    payee = approval.request.get("payee")
    to = f" to {safe(str(payee), _NAME)}" if payee else ""
    about = f"{safe(subject_in(approval), HEADER)}{to} (thread {thread.thread_id})"
    return f"📬 {about}: {reply(approval, thread, payment)}"


def alarm(thread: Thread, failures: Sequence[tuple[str, str]]) -> str | None:
    """What the operators are told of a thread that needs them; None if it does not, or not any more.

    `failures` are what `notices.failures_of` has.
    """
    id_, why = thread.thread_id, safe(thread.reason or "", _WHY)
    lines = []
    if thread.status == "stuck":
        lines.append(f"It is stuck: {why}. Once that is mended: `claim_flow.py retry --thread {id_}`")
    elif thread.status == "unavailable":
        lines.append(f"It waits, and so does every thread like it: {why}. Then they go on by themselves.")
    elif thread.status == "unknown":
        lines.append(f"Nobody knows whether it was paid: {why}.")
        lines.append(f"Ask the provider, then `claim_flow.py payments resolve {id_} --paid REF` or `--not-paid`")
    for kind, error in failures:
        if kind == "tampered":
            lines.append(
                f"Its request {safe(error, _WHY)} was changed in the database after it was asked, and nobody can decide"
                f" it: `claim_flow.py withdraw --thread {id_}`, then find out who has such access"
            )
        elif kind == "mended":
            lines.append(
                f"Its request {safe(error, _WHY)} was changed in the database after it was asked, and changed back or"
                " ended since: find out who has such access"
            )
        elif kind == "trace":
            lines.append(f"Traces do not get out, this one first ({safe(error, _WHY)}): see `claim_flow.py doctor`")
        elif kind == "mail":
            lines.append(f"A mail cannot be delivered ({safe(error, _WHY)}): give them a link by `claim_flow.py link`")
        else:
            lines.append(f"Slack refuses its {kind}: {safe(error, _WHY)}. Then `claim_flow.py deliver`")
    return "\n".join([f"🚨 Thread {id_} needs somebody.", *lines]) if lines else None


def parse_click(body: dict[str, Any]) -> Click | None:
    """The click in a `block_actions` payload; None if it is none of ours or lacks what one needs."""
    action = first_of(body.get("actions"))
    name, _, number = as_text(action.get("action_id")).partition("-")
    value = value_in(as_text(action.get("value")))
    press, option = _press(body, value), value.get("option")
    if name != "approve" or press is None or (number and not isinstance(option, str)):
        return None
    return Click(**press, answer={"option": option} if number else None)


def parse_button(body: dict[str, Any]) -> Press | None:
    """The same for the buttons that decide nothing by themselves."""
    return parse_press(body, as_text(first_of(body.get("actions")).get("value")))


def parse_press(body: dict[str, Any], value: str) -> Press | None:
    """Who sent this payload, about the approval that a value of ours names; None if either is not to be found."""
    press = _press(body, value_in(value))
    return Press(**press) if press else None


def value_of(approval: Approval, **more: str | None) -> str:
    """What a button, or a form, carries: the approval, and the hash of what is asked."""
    return json.dumps({"interrupt": approval.interrupt_id, "hash": approval.request_hash, **more})


def value_in(text: str) -> dict[str, Any]:
    """What a button, or a form, carried, as it comes back; empty for whatever is none of ours."""
    try:
        return as_dict(json.loads(text))
    except (ValueError, RecursionError):
        return {}


def _press(body: dict[str, Any], value: dict[str, Any]) -> dict[str, Any] | None:
    """The fields of a Press. Where it was is in the payload, or for a form in its value."""
    user, container = as_dict(body.get("user")), as_dict(body.get("container"))
    user_id, interrupt_id, digest = as_id(user.get("id")), value.get("interrupt"), value.get("hash")
    if user_id is None or not is_hex(interrupt_id, 32) or not is_hex(digest, 64):
        return None
    # Not the payload's team: in a shared channel that is ours, and the person may not be.
    team_id = as_id(user.get("team_id")) or ""
    places = (container.get("channel_id"), as_dict(body.get("channel")).get("id"), value.get("channel"))
    stamps = (container.get("message_ts"), as_dict(body.get("message")).get("ts"), value.get("ts"))
    return {
        "user_id": user_id,
        "user_name": cut(visible(as_text(user.get("name")) or as_text(user.get("username")) or user_id), _NAME),
        "team_id": team_id,
        "enterprise_id": as_id(as_dict(body.get("enterprise")).get("id")) if team_id else None,
        "interrupt_id": interrupt_id,
        "request_hash": digest,
        "channel_id": next(filter(None, map(as_id, places)), None),
        "message_ts": next(filter(None, map(as_id, stamps)), None),
    }


def subject_in(approval: Approval) -> str:
    """What it is about, in a line."""
    question = question_of(approval.request)
    return asked_amount(approval) if question.kind == "claim" else subject_of(question)


def facts_of(approval: Approval, amount: str = "", note: str = "") -> list[Block]:
    """Label and value side by side, in a section; only a label of ours is mrkdwn, so a value shows as what it is."""
    deadline = approval.expires_at if approval.status == "pending" else None
    values = {
        "Amount": plain(amount, _NAME),
        "Payee": plain(one_line(str(approval.request.get("payee") or "")), _NAME),
        "Requested by": _requester(approval.requested_by),
        "Note": plain(one_line(note), _NAME),
        "Decide by": mrkdwn(date(deadline) if deadline else "", FIELD),
    }
    fields = [field for name, value in values.items() if value["text"] for field in (mrkdwn(f"*{name}*", FIELD), value)]
    return [{"type": "section", "fields": fields}] if fields else []


def _requester(name: str) -> Block:
    """Slack shows a member by the name that everybody knows; whatever else was written is only text."""
    return mrkdwn(mention(name, _NAME), FIELD) if is_member(name) else plain(one_line(name), _NAME)


def _is_short(note: str) -> bool:
    return len(note) <= _SHORT_NOTE and "\n" not in note


def _claim_blocks(approval: Approval, thread: Thread, advice: Advice | None) -> list[Block]:
    note = str(thread.input.get("note") or "").strip()
    blocks = facts_of(approval, asked_amount(approval), note if _is_short(note) else "")
    if not _is_short(note):
        blocks += [label("*Note*"), {"type": "section", "text": plain(note, _NOTE)}]
    if advice is not None and advice.status == "given":
        said = plain(one_line(advice_in_words(advice)), _ADVICE)
        blocks += [label("🤖 *Advice of a language model, to be doubted*"), {"type": "context", "elements": [said]}]
    return blocks


def _buttons(approval: Approval, question: Question, public_url: str | None) -> list[Block]:
    """Whatever one press can say, and the ways to the forms for the rest."""
    details = button("details", "Details", value_of(approval))
    if approval.status != "pending":
        return [{"type": "actions", "block_id": f"details-{approval.interrupt_id}", "elements": [details]}]
    hint = []
    buttons = [] if approval.step_up else _approve_buttons(approval, question)
    if approval.step_up and public_url:
        buttons.append(page_button("Approve on the page…", page_of(approval, public_url)))
    elif approval.step_up:
        hint.append(label("This much is approved on its web page only, and PUBLIC_URL, which leads there, is not set."))
    if question.can_reject:
        buttons.append(button("reject", "Reject", value_of(approval), "danger"))
    if question.kind == "claim":
        buttons.append(button("change-amount", "Change amount…", value_of(approval)))
    if has_form(question) and not approval.step_up:
        buttons.append(button("change", "Change…", value_of(approval)))
    if not buttons and not hint:
        hint.append(label("There is too much to say here: see the page."))
    return [*hint, {"type": "actions", "block_id": f"decide-{approval.interrupt_id}", "elements": [*buttons, details]}]


def _approve_buttons(approval: Approval, question: Question) -> list[Block]:
    """Above the first tier Slack asks back: what stands there is what nobody wants to have pressed by mistake."""
    payee = f" to {one_line(question.payee)}" if question.payee else ""
    room = min(CONFIRM, _ASKS // max(len(question.options), 1))
    said = fitted(one_line(f"{subject_in(approval)}{payee}. An approval is final."), room)
    ask = said if approval.rank > 0 else None
    buttons = []
    if question.can_approve:
        buttons.append(button("approve", "Approve", value_of(approval), "primary", ask=ask))
    for number, option in enumerate(question.options):
        buttons.append(button(f"approve-{number}", option, value_of(approval, option=option), "primary", ask=ask))
    return buttons


def page_of(approval: Approval, public_url: str) -> str:
    """Where the request is on the web."""
    return f"{public_url}/approvals/{approval.interrupt_id}"


def _answer(approval: Approval, question: Question) -> list[str]:
    """What was said beyond yes: those who approve say the same."""
    by = approval.settled_by or next((vote for vote in approval.votes if vote.answer), None)
    return answer_in_words(question, by.answer) if by else []


def _origin(approval: Approval) -> Block:
    parts = (f"thread {approval.thread_id}", f"interrupt {approval.interrupt_id}", f"hash {approval.request_hash[:12]}")
    return {"type": "context", "elements": [plain(" · ".join(parts), FIELD)]}


def _summary(approval: Approval, thread: Thread) -> str:
    """The whole card in a sentence, for notifications and screen readers: no markup, and times in UTC."""
    payee = approval.request.get("payee")
    to = f" to {safe(str(payee), _NAME)}" if payee else ""
    by = f", requested by {safe(approval.requested_by, _NAME)} (thread {approval.thread_id})"
    decided = [
        f". {'Approved' if d.verdict == 'approve' else 'Rejected'} by {safe(d.who, _NAME)}"
        f"{' (void)' if d.void else ''} at {d.decided_at.astimezone(UTC):%Y-%m-%d %H:%M} UTC"
        for d in approval.decisions
    ]
    waits = approval.status == "pending" and approval.expires_at is not None
    until = f", to be decided by {approval.expires_at:%Y-%m-%d %H:%M} UTC" if waits else ""
    head = f"{title_of(approval, thread)}: {safe(subject_in(approval), HEADER)}"
    return f"{head}{to}{by}{until}{''.join(fitting(decided, _OUTCOME))}"
