"""Approvals as Block Kit, and clicks on them as values: pure functions, no network, no database.

Text that a claimant, or a flow, wrote goes into `plain_text` with `emoji: false`, or is escaped; characters that hide
or reorder are shown as escapes. Formats: https://api.slack.com/reference/block-kit/blocks and
https://api.slack.com/reference/interaction-payloads/block-actions
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC
from decimal import Decimal
from typing import Any

from bot.answers import answer_in_words
from bot.kit import (
    BUTTON,
    FIELD,
    HEADER,
    SECTION_TEXT,
    Block,
    as_dict,
    as_id,
    as_text,
    cut,
    date,
    first_of,
    fitting,
    is_hex,
    label,
    mrkdwn,
    one_line,
    plain,
    safe,
    told,
)
from bot.questions import by_whom, ending_of, has_form, question_blocks, subject_of
from flow.advice import advice_in_words
from flow.model import Advice, Approval, Decision, Payment, Thread, VerdictName
from flow.questions import Question, question_of
from flow.text import bare_name, visible

# Our own: a card is read at a glance. Slack counts after escaping, which makes five characters of an "&".
_NAME = 120
_NOTE = 600
# Fits beside its label.
_SHORT_NOTE = 60
_REASON = 300
_REASONS = 10
_MENTIONS = 20
_ADVICE = 600
_ANSWER = 2000
_REFERENCE = 255
_OUTCOME = 2000
_WHY = 500

_VERDICTS: dict[str, VerdictName] = {"approve": "approve", "reject": "reject"}


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
    """One press of Approve or Reject, or of an option."""

    verdict: VerdictName
    answer: dict[str, Any] | None = None


@dataclass(frozen=True, kw_only=True)
class Change(Press):
    """One press of Change: `trigger_id` opens the form, within three seconds."""

    trigger_id: str


def card(
    approval: Approval, thread: Thread, payment: Payment | None, advice: Advice | None = None
) -> tuple[str, list[Block]]:
    """The request, or its outcome: the text for notifications and screen readers, and the blocks."""
    question = question_of(approval.request)
    if question.kind == "claim":
        subject = _amount(approval)
        header, asked = f"{_title(approval, thread)}: {subject}", _claim_blocks(approval, thread, subject, advice)
        lines = _outcome_lines(approval, thread, payment)
    else:
        subject = subject_of(question)
        header = subject if approval.status == "pending" else f"{_title(approval, thread)}: {subject}"
        asked = [{"type": "section", "fields": _fields(approval, "", "")}, *question_blocks(question)]
        lines = ending_of(approval, thread)
    lines = [*_count_line(approval), *lines]
    outcome = [*fitting([*map(_decision_line, approval.decisions)], _OUTCOME - len("\n".join(lines))), *lines]
    blocks: list[Block] = [{"type": "header", "text": told(header, HEADER)}, *asked]
    if outcome:
        blocks += [{"type": "divider"}, {"type": "section", "text": mrkdwn("\n".join(outcome), SECTION_TEXT)}]
    if answer := _answer(approval, question):
        blocks.append({"type": "section", "text": told("\n".join(answer), _ANSWER)})
    blocks += [
        {"type": "context", "elements": [plain(one_line(f"{decision.person_name}: {decision.reason}"), _REASON)]}
        for decision in [decision for decision in approval.decisions if decision.reason][-_REASONS:]
    ]
    if approval.status == "pending":
        blocks += _buttons(approval, question)
    blocks.append({"type": "context", "elements": [plain(_origin(approval), FIELD)]})
    return _summary(approval, thread, subject), blocks


def reply(approval: Approval, thread: Thread, payment: Payment | None) -> str:
    """The short word below the card once the thread is over."""
    question = question_of(approval.request)
    if question.kind == "claim":
        lines = _outcome_lines(approval, thread, payment)
    else:
        by, answer = approval.settled_by, _answer(approval, question)
        said = f", {safe('; '.join(answer), _REASON)}" if answer else ""
        who = [f"{_title(approval, thread)} by {safe(by.person_name, _NAME)}{said}."] if by else []
        lines = [*who, *ending_of(approval, thread)]
    return " ".join(lines) or f"Thread {thread.thread_id} is {thread.status}."


def reminder(approval: Approval) -> str:
    """The word below the card to those who have not decided yet."""
    done = {bare_name(approval.requested_by), *(bare_name(decision.person) for decision in approval.votes)}
    left = [bare_name(name) for name in approval.approvers if bare_name(name) not in done]
    names = [*map(_mention, left[:_MENTIONS]), *([f"{len(left) - _MENTIONS} more"] if len(left) > _MENTIONS else [])]
    return f"⏰ Since {date(approval.requested_at)} this waits for {', '.join(names) or 'the command line'}."


def _mention(name: str) -> str:
    return f"<@{name}>" if re.fullmatch(r"[UW][A-Z0-9]{2,}", name) else safe(name, _NAME)


def alarm(thread: Thread, failures: Sequence[tuple[str, str]]) -> str | None:
    """What the operators are told of a thread that needs them; None if it does not, or not any more.

    `failures` are kind and error of the messages that Slack, or a mail server, refuses.
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
        elif kind == "mail":
            lines.append(f"A mail cannot be delivered ({safe(error, _WHY)}): give them a link by `claim_flow.py link`")
        else:
            lines.append(f"Slack refuses its {kind}: {safe(error, _WHY)}. Then `claim_flow.py deliver`")
    return "\n".join([f"🚨 Thread {id_} needs somebody.", *lines]) if lines else None


def parse_click(body: dict[str, Any]) -> Click | None:
    """The click in a `block_actions` payload; None if it is none of ours or lacks what one needs."""
    action = first_of(body.get("actions"))
    name, _, number = as_text(action.get("action_id")).partition("-")
    verdict, value = _VERDICTS.get(name), _value(as_text(action.get("value")))
    press = _press(body, value)
    if verdict is None or press is None:
        return None
    if not number:
        return Click(**press, verdict=verdict)
    option = value.get("option")
    if verdict != "approve" or not isinstance(option, str):
        return None
    return Click(**press, verdict=verdict, answer={"option": option})


def parse_change(body: dict[str, Any]) -> Change | None:
    """The same for the button that opens the form."""
    press = _press(body, _value(as_text(first_of(body.get("actions")).get("value"))))
    trigger_id = as_text(body.get("trigger_id"))
    return Change(**press, trigger_id=trigger_id) if press and trigger_id else None


def parse_press(body: dict[str, Any], value: str) -> Press | None:
    """Who sent this payload, about the approval that a value of ours names; None if either is not to be found."""
    press = _press(body, _value(value))
    return Press(**press) if press else None


def value_of(approval: Approval, **more: str | None) -> str:
    """What a button, or a form, carries: the approval, and the hash of what is asked."""
    return json.dumps({"interrupt": approval.interrupt_id, "hash": approval.request_hash, **more})


def _value(text: str) -> dict[str, Any]:
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
    places = (container.get("channel_id"), as_dict(body.get("channel")).get("id"), value.get("channel"))
    stamps = (container.get("message_ts"), as_dict(body.get("message")).get("ts"), value.get("ts"))
    return {
        "user_id": user_id,
        "user_name": cut(visible(as_text(user.get("name")) or as_text(user.get("username")) or user_id), _NAME),
        "team_id": as_id(user.get("team_id")) or as_id(as_dict(body.get("team")).get("id")) or "",
        "enterprise_id": as_id(as_dict(body.get("enterprise")).get("id")),
        "interrupt_id": interrupt_id,
        "request_hash": digest,
        "channel_id": next(filter(None, map(as_id, places)), None),
        "message_ts": next(filter(None, map(as_id, stamps)), None),
    }


def _title(approval: Approval, thread: Thread) -> str:
    if approval.status == "pending":
        return "Approval needed"
    if thread.status == "paid":
        return "✅ Paid"
    return {"approved": "✅ Approved", "rejected": "❌ Rejected", "expired": "⌛ Expired"}.get(
        approval.status, approval.status.capitalize()
    )


def _amount(approval: Approval) -> str:
    """The amount with the currency's decimals, as it was asked for, and thousands set apart: 1,250.00 USD."""
    return f"{Decimal(approval.request['amount']):,} {approval.request['currency']}"


def _fields(approval: Approval, amount: str, note: str) -> list[Block]:
    """Label and value side by side; only a label of ours is mrkdwn, so a value shows as what it is."""
    deadline = approval.expires_at if approval.status == "pending" else None
    values = {
        "Amount": plain(amount, _NAME),
        "Payee": plain(one_line(str(approval.request.get("payee") or "")), _NAME),
        "Requested by": plain(one_line(approval.requested_by), _NAME),
        "Note": plain(one_line(note), _NAME),
        "Decide by": mrkdwn(date(deadline) if deadline else "", FIELD),
    }
    return [field for name, value in values.items() if value["text"] for field in (mrkdwn(f"*{name}*", FIELD), value)]


def _is_short(note: str) -> bool:
    return len(note) <= _SHORT_NOTE and "\n" not in note


def _claim_blocks(approval: Approval, thread: Thread, amount: str, advice: Advice | None) -> list[Block]:
    note = str(thread.input.get("note") or "").strip()
    blocks: list[Block] = [{"type": "section", "fields": _fields(approval, amount, note if _is_short(note) else "")}]
    if not _is_short(note):
        blocks += [label("*Note*"), {"type": "section", "text": plain(note, _NOTE)}]
    if advice is not None and advice.status == "given":
        said = plain(one_line(advice_in_words(advice)), _ADVICE)
        blocks += [label("🤖 *Advice of a language model, to be doubted*"), {"type": "context", "elements": [said]}]
    return blocks


def _buttons(approval: Approval, question: Question) -> list[Block]:
    """Whatever one press can say, and the way to the form for the rest."""
    buttons = []
    if question.can_approve:
        buttons.append(_button("approve", "Approve", value_of(approval), "primary"))
    for number, option in enumerate(question.options):
        buttons.append(_button(f"approve-{number}", option, value_of(approval, option=option), "primary"))
    if question.can_reject:
        buttons.append(_button("reject", "Reject", value_of(approval), "danger"))
    if has_form(question):
        buttons.append(_button("change", "Change…", value_of(approval), None))
    if not buttons:
        return [label("There is too much to say here: see the page.")]
    return [{"type": "actions", "block_id": f"decide-{approval.interrupt_id}", "elements": buttons}]


def _button(action_id: str, text: str, value: str, style: str | None) -> Block:
    button: Block = {"type": "button", "action_id": action_id, "text": told(text, BUTTON), "value": value}
    return button | ({"style": style} if style else {})


def _answer(approval: Approval, question: Question) -> list[str]:
    """What was said beyond yes: those who approve say the same."""
    by = approval.settled_by or next((each for each in approval.decisions if each.answer), None)
    return answer_in_words(question, by.answer) if by else []


def _decision_line(decision: Decision) -> str:
    mark, word = ("✅", "Approved") if decision.verdict == "approve" else ("❌", "Rejected")
    door = "" if decision.door == "slack" else f" ({safe(decision.door, _NAME)})"
    return f"{mark} *{word} by {safe(decision.person_name, _NAME)}*{door}, {date(decision.decided_at)}"


def _count_line(approval: Approval) -> list[str]:
    """How many have approved, where it takes more than one."""
    if approval.status != "pending" or approval.required == 1:
        return []
    return [f"*{approval.approvals_given} of {approval.required} approvals*"]


def _outcome_lines(approval: Approval, thread: Thread, payment: Payment | None) -> list[str]:
    if payment is not None and payment.reference is not None:
        return [f"💸 *{_amount(approval)} paid*, reference {safe(payment.reference, _REFERENCE)}"]
    if thread.status == "unknown":
        return ["⚠️ It is not known whether this was paid: the payment service did not answer, and somebody must look."]
    if thread.status == "failed":
        why = f": {safe(payment.reason, _REASON)}" if payment and payment.reason else ""
        return [f"⚠️ Not paid{why}"]
    if thread.status == "stuck":
        return ["⚠️ Not paid: the thread is stuck, and somebody must look at it."]
    if approval.status in ("rejected", "expired", "withdrawn", "superseded"):
        return [f"Nothing was paid: {approval.status}{by_whom(approval)}."]
    return []


def _origin(approval: Approval) -> str:
    parts = (f"thread {approval.thread_id}", f"interrupt {approval.interrupt_id}", f"hash {approval.request_hash[:12]}")
    return " · ".join(parts)


def _summary(approval: Approval, thread: Thread, subject: str) -> str:
    """The whole card in a sentence, for notifications and screen readers: no markup, and times in UTC."""
    payee = approval.request.get("payee")
    to = f" to {safe(str(payee), _NAME)}" if payee else ""
    by = f", requested by {safe(approval.requested_by, _NAME)} (thread {approval.thread_id})"
    decided = [
        f". {'Approved' if d.verdict == 'approve' else 'Rejected'} by {safe(d.person_name, _NAME)}"
        f" at {d.decided_at.astimezone(UTC):%Y-%m-%d %H:%M} UTC"
        for d in approval.decisions
    ]
    waits = approval.status == "pending" and approval.expires_at is not None
    until = f", to be decided by {approval.expires_at:%Y-%m-%d %H:%M} UTC" if waits else ""
    return f"{_title(approval, thread)}: {safe(subject, HEADER)}{to}{by}{until}{''.join(fitting(decided, _OUTCOME))}"
