"""Approvals as Block Kit, and clicks on them as values: pure functions, no network, no database.

Text that a claimant wrote goes into `plain_text` with `emoji: false`, or is escaped; characters that hide or reorder
are shown as escapes. Formats: https://api.slack.com/reference/block-kit/blocks and
https://api.slack.com/reference/interaction-payloads/block-actions
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from decimal import Decimal
from typing import Any

from flow.advice import advice_in_words
from flow.model import Advice, Approval, Decision, Payment, Thread, VerdictName
from flow.text import visible

Block = dict[str, Any]

# Block Kit's limits, in characters: https://api.slack.com/reference/block-kit/blocks
_HEADER = 150
_SECTION_TEXT = 3000
_FIELD = 2000
# Our own: a card is read at a glance. Slack counts after escaping, which makes five characters of an "&".
_NAME = 120
_NOTE = 600
# Fits beside its label.
_SHORT_NOTE = 60
_REASON = 300
_REASONS = 10
_ADVICE = 600
_REFERENCE = 255
_OUTCOME = 2000
_WHY = 500

_VERDICTS: dict[str, VerdictName] = {"approve": "approve", "reject": "reject"}


@dataclass(frozen=True, kw_only=True)
class Click:
    """One press of Approve or Reject. `team_id` is the presser's own team; `enterprise_id` their grid, if any."""

    user_id: str
    user_name: str
    team_id: str
    enterprise_id: str | None
    verdict: VerdictName
    interrupt_id: str
    request_hash: str
    channel_id: str | None
    message_ts: str | None


def card(
    approval: Approval, thread: Thread, payment: Payment | None, advice: Advice | None = None
) -> tuple[str, list[Block]]:
    """The request, or its outcome: the text for notifications and screen readers, and the blocks."""
    amount = _amount(approval)
    note = str(thread.input.get("note") or "").strip()
    lines = _outcome_lines(approval, thread, payment)
    outcome = [*_fitting([*map(_decision_line, approval.decisions)], _OUTCOME - len("\n".join(lines))), *lines]
    blocks: list[Block] = [
        {"type": "header", "text": _plain(f"{_title(approval, thread)}: {amount}", _HEADER)},
        {"type": "section", "fields": _fields(approval, amount, note if _is_short(note) else "")},
    ]
    if not _is_short(note):
        blocks += [_label("*Note*"), {"type": "section", "text": _plain(note, _NOTE)}]
    if advice is not None and advice.status == "given":
        said = _plain(_one_line(advice_in_words(advice)), _ADVICE)
        blocks += [_label("🤖 *Advice of a language model, to be doubted*"), {"type": "context", "elements": [said]}]
    if outcome:
        blocks += [{"type": "divider"}, {"type": "section", "text": _mrkdwn("\n".join(outcome), _SECTION_TEXT)}]
    blocks += [
        {"type": "context", "elements": [_plain(_one_line(f"{decision.person_name}: {decision.reason}"), _REASON)]}
        for decision in [decision for decision in approval.decisions if decision.reason][-_REASONS:]
    ]
    if approval.status == "pending":
        blocks.append(_buttons(approval))
    blocks.append({"type": "context", "elements": [_plain(_origin(approval), _FIELD)]})
    return _summary(approval, thread, amount), blocks


def reply(approval: Approval, thread: Thread, payment: Payment | None) -> str:
    """The short word below the card once the thread is over."""
    lines = _outcome_lines(approval, thread, payment)
    return " ".join(lines) or f"Thread {thread.thread_id} is {thread.status}."


def alarm(thread: Thread, failures: Sequence[tuple[str, str]]) -> str | None:
    """What the operators are told of a thread that needs them; None if it does not, or not any more.

    `failures` are kind and error of the messages that Slack, or a mail server, refuses.
    """
    id_, why = thread.thread_id, _safe(thread.reason or "", _WHY)
    lines = []
    if thread.status == "stuck":
        lines.append(f"It is stuck: {why}. Once that is mended: `claim_flow.py retry --thread {id_}`")
    elif thread.status == "unknown":
        lines.append(f"Nobody knows whether it was paid: {why}.")
        lines.append(f"Ask the provider, then `claim_flow.py payments resolve {id_} --paid REF` or `--not-paid`")
    for kind, error in failures:
        if kind == "mail":
            lines.append(f"A mail cannot be delivered ({_safe(error, _WHY)}): give them a link by `claim_flow.py link`")
        else:
            lines.append(f"Slack refuses its {kind}: {_safe(error, _WHY)}. Then `claim_flow.py deliver`")
    return "\n".join([f"🚨 Thread {id_} needs somebody.", *lines]) if lines else None


def parse_click(body: dict[str, Any]) -> Click | None:
    """The click in a `block_actions` payload; None if it is none of ours or lacks what one needs."""
    action, user, container = _first(body.get("actions")), _dict(body.get("user")), _dict(body.get("container"))
    verdict, user_id = _VERDICTS.get(_text(action.get("action_id"))), _id(user.get("id"))
    if verdict is None or user_id is None:
        return None
    try:
        value = json.loads(_text(action.get("value")))
        interrupt_id, digest = value["interrupt"], value["hash"]
    except (ValueError, TypeError, KeyError, RecursionError):
        return None
    if not _is_hex(interrupt_id, 32) or not _is_hex(digest, 64):
        return None
    return Click(
        user_id=user_id,
        user_name=_cut(visible(_text(user.get("name")) or _text(user.get("username")) or user_id), _NAME),
        team_id=_id(user.get("team_id")) or _id(_dict(body.get("team")).get("id")) or "",
        enterprise_id=_id(_dict(body.get("enterprise")).get("id")),
        verdict=verdict,
        interrupt_id=interrupt_id,
        request_hash=digest,
        channel_id=_id(container.get("channel_id")) or _id(_dict(body.get("channel")).get("id")),
        message_ts=_id(container.get("message_ts")) or _id(_dict(body.get("message")).get("ts")),
    )


def is_id(value: object) -> bool:
    """Whether it looks like one of Slack's ids or timestamps."""
    return isinstance(value, str) and re.fullmatch(r"[A-Za-z0-9.]{1,100}", value) is not None


def escape(text: str) -> str:
    """Text with Slack's three control characters disarmed: no mention, no link. Escape last, after cutting."""
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def date(at: datetime) -> str:
    """A time that Slack shows in the reader's own zone (in mrkdwn only)."""
    return f"<!date^{int(at.timestamp())}^{{date_short_pretty}} at {{time}}|{at:%Y-%m-%d %H:%M} UTC>"


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
        "Amount": _plain(amount, _NAME),
        "Payee": _plain(_one_line(str(approval.request.get("payee") or "")), _NAME),
        "Requested by": _plain(_one_line(approval.requested_by), _NAME),
        "Note": _plain(_one_line(note), _NAME),
        "Decide by": _mrkdwn(date(deadline) if deadline else "", _FIELD),
    }
    return [field for name, value in values.items() if value["text"] for field in (_mrkdwn(f"*{name}*", _FIELD), value)]


def _is_short(note: str) -> bool:
    return len(note) <= _SHORT_NOTE and "\n" not in note


def _label(text: str) -> Block:
    return {"type": "context", "elements": [_mrkdwn(text, _FIELD)]}


def _buttons(approval: Approval) -> Block:
    value = json.dumps({"interrupt": approval.interrupt_id, "hash": approval.request_hash})
    return {
        "type": "actions",
        "block_id": f"decide-{approval.interrupt_id}",
        "elements": [
            {"type": "button", "action_id": name, "text": _plain(name.capitalize(), 75), "style": style, "value": value}
            for name, style in (("approve", "primary"), ("reject", "danger"))
        ],
    }


def _decision_line(decision: Decision) -> str:
    mark, word = ("✅", "Approved") if decision.verdict == "approve" else ("❌", "Rejected")
    door = "" if decision.door == "slack" else f" ({_safe(decision.door, _NAME)})"
    return f"{mark} *{word} by {_safe(decision.person_name, _NAME)}*{door}, {date(decision.decided_at)}"


def _outcome_lines(approval: Approval, thread: Thread, payment: Payment | None) -> list[str]:
    if payment is not None and payment.reference is not None:
        return [f"💸 *{_amount(approval)} paid*, reference {_safe(payment.reference, _REFERENCE)}"]
    if thread.status == "unknown":
        return ["⚠️ It is not known whether this was paid: the payment service did not answer, and somebody must look."]
    if thread.status == "failed":
        why = f": {_safe(payment.reason, _REASON)}" if payment and payment.reason else ""
        return [f"⚠️ Not paid{why}"]
    if thread.status == "stuck":
        return ["⚠️ Not paid: the thread is stuck, and somebody must look at it."]
    if approval.status in ("rejected", "expired", "withdrawn", "superseded"):
        return [f"Nothing was paid: {approval.status}."]
    return []


def _origin(approval: Approval) -> str:
    parts = (f"thread {approval.thread_id}", f"interrupt {approval.interrupt_id}", f"hash {approval.request_hash[:12]}")
    return " · ".join(parts)


def _summary(approval: Approval, thread: Thread, amount: str) -> str:
    """The whole card in a sentence, for notifications and screen readers: no markup, and times in UTC."""
    payee = approval.request.get("payee")
    to = f" to {_safe(str(payee), _NAME)}" if payee else ""
    by = f", requested by {_safe(approval.requested_by, _NAME)} (thread {approval.thread_id})"
    decided = [
        f". {'Approved' if d.verdict == 'approve' else 'Rejected'} by {_safe(d.person_name, _NAME)}"
        f" at {d.decided_at.astimezone(UTC):%Y-%m-%d %H:%M} UTC"
        for d in approval.decisions
    ]
    waits = approval.status == "pending" and approval.expires_at is not None
    until = f", to be decided by {approval.expires_at:%Y-%m-%d %H:%M} UTC" if waits else ""
    return f"{_title(approval, thread)}: {amount}{to}{by}{until}{''.join(_fitting(decided, _OUTCOME))}"


def _safe(text: str, longest: int) -> str:
    """A stranger's text inside our own sentence: visible, one line, cut, then escaped."""
    return escape(_cut(_one_line(text), longest))


def _one_line(text: str) -> str:
    """Visible and without a line of its own, which could pass for one of ours."""
    return " ".join(visible(text).split())


def _fitting(lines: list[str], longest: int) -> list[str]:
    """As many whole lines as there is room for: a cut inside one could leave half an escape."""
    kept = [line for number, line in enumerate(lines) if len("\n".join(lines[: number + 1])) < longest - 20]
    return kept if len(kept) == len(lines) else [*kept, f"… and {len(lines) - len(kept)} more"]


def _plain(text: str, longest: int) -> Block:
    return {"type": "plain_text", "text": _cut(visible(text), longest), "emoji": False}


def _mrkdwn(text: str, longest: int) -> Block:
    assert len(text) <= longest, len(text)
    return {"type": "mrkdwn", "text": text, "verbatim": True}


def _cut(text: str, longest: int) -> str:
    return text if len(text) <= longest else text[: longest - 1] + "…"


def _text(value: object) -> str:
    return value if isinstance(value, str) else ""


def _id(value: object) -> str | None:
    """One of Slack's ids or timestamps; None for whatever else stands in its place."""
    return str(value) if is_id(value) else None


def _is_hex(value: object, digits: int) -> bool:
    return isinstance(value, str) and re.fullmatch(rf"[0-9a-f]{{{digits}}}", value) is not None


def _first(value: object) -> dict[str, Any]:
    return _dict(value[0]) if isinstance(value, list) and value else {}


def _dict(value: object) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}
