"""Approvals as Block Kit, and clicks on them as values: pure functions, no network, no database.

Text that a claimant wrote goes into `plain_text` with `emoji: false`, or is escaped; characters that hide or reorder
are shown as escapes. Formats: https://api.slack.com/reference/block-kit/blocks and
https://api.slack.com/reference/interaction-payloads/block-actions
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from flow.assess import advice_in_words
from flow.model import Advice, Approval, Decision, Payment, Thread, VerdictName
from flow.text import visible

Block = dict[str, Any]

# Block Kit's limits, in characters: https://api.slack.com/reference/block-kit/blocks
_HEADER = 150
_SECTION_TEXT = 3000
_FIELD = 2000
# Our own: a card is read at a glance.
_NAME = 120
_NOTE = 600
_REASON = 300
_ADVICE = 900

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
    amount = f"{approval.request['amount']} {approval.request['currency']}"
    note = str(thread.input.get("note") or "")
    blocks: list[Block] = [
        {"type": "header", "text": _plain(f"{_title(approval, thread)}: {amount}", _HEADER)},
        {"type": "section", "fields": _fields(approval, amount)},
    ]
    if note:
        blocks.append({"type": "section", "text": _plain(note, _NOTE)})
    if advice is not None and advice.status == "given":
        said = f"Advice of a language model, to be doubted: {advice_in_words(advice)}"
        blocks.append({"type": "context", "elements": [_plain(said, _ADVICE)]})
    outcome = [*map(_decision_line, approval.decisions), *_outcome_lines(approval, thread, payment)]
    if outcome:
        blocks.append({"type": "section", "text": _mrkdwn("\n".join(outcome), _SECTION_TEXT)})
    blocks += [
        {"type": "context", "elements": [_plain(f"{decision.person_name}: {decision.reason}", _REASON)]}
        for decision in approval.decisions
        if decision.reason
    ]
    if approval.status == "pending":
        blocks.append(_buttons(approval))
    blocks.append({"type": "context", "elements": [_plain(_origin(approval), _FIELD)]})
    return _summary(approval, thread, amount, outcome), blocks


def reply(approval: Approval, thread: Thread, payment: Payment | None) -> str:
    """The short word below the card once the thread is over."""
    lines = _outcome_lines(approval, thread, payment)
    return " ".join(lines) or f"Thread {thread.thread_id} is {thread.status}."


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


def escape(text: str) -> str:
    """Text with Slack's three control characters disarmed: no mention, no link. Escape last, after cutting."""
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def date(at: datetime) -> str:
    """A time that Slack shows in the reader's own zone (in mrkdwn only)."""
    return f"<!date^{int(at.timestamp())}^{{date_short_pretty}} at {{time}}|{at:%Y-%m-%d %H:%M} UTC>"


def _title(approval: Approval, thread: Thread) -> str:
    if approval.status == "pending":
        return "Approval needed"
    return "Paid" if thread.status == "paid" else approval.status.capitalize()


def _fields(approval: Approval, amount: str) -> list[Block]:
    """Label and value side by side; only a label of ours is mrkdwn, so a value shows as what it is."""
    values = {
        "Amount": _plain(amount, _NAME),
        "Payee": _plain(str(approval.request.get("payee") or ""), _NAME),
        "Requested by": _plain(approval.requested_by, _NAME),
        "Expires": _mrkdwn(date(approval.expires_at) if approval.expires_at else "", _FIELD),
    }
    return [field for name, value in values.items() if value["text"] for field in (_mrkdwn(f"*{name}*", _FIELD), value)]


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
    return f"{mark} {word} by {_safe(decision.person_name, _NAME)}{door}, {date(decision.decided_at)}"


def _outcome_lines(approval: Approval, thread: Thread, payment: Payment | None) -> list[str]:
    amount = f"{approval.request['amount']} {approval.request['currency']}"
    if payment is not None:
        return [f"💸 {amount} paid, reference {_safe(payment.reference, _FIELD)}"]
    if thread.status == "stuck":
        return ["⚠️ Not paid: the thread is stuck, and somebody must look at it."]
    if approval.status in ("rejected", "expired", "withdrawn", "superseded"):
        return [f"Nothing was paid: {approval.status}."]
    return []


def _origin(approval: Approval) -> str:
    parts = (f"thread {approval.thread_id}", f"interrupt {approval.interrupt_id}", approval.request_hash[:12])
    return " · ".join(parts)


def _summary(approval: Approval, thread: Thread, amount: str, outcome: list[str]) -> str:
    payee = approval.request.get("payee")
    to = f" to {_safe(str(payee), _NAME)}" if payee else ""
    asked = f"{_title(approval, thread)}: {amount}{to}, requested by {_safe(approval.requested_by, _NAME)}"
    return ". ".join([f"{asked} (thread {approval.thread_id})", *outcome])


def _safe(text: str, longest: int) -> str:
    """A stranger's text inside our own sentence: visible, one line, cut, then escaped."""
    return escape(_cut(" ".join(visible(text).split()), longest))


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
    return value if isinstance(value, str) and re.fullmatch(r"[A-Za-z0-9.]{1,100}", value) else None


def _is_hex(value: object, digits: int) -> bool:
    return isinstance(value, str) and re.fullmatch(rf"[0-9a-f]{{{digits}}}", value) is not None


def _first(value: object) -> dict[str, Any]:
    return _dict(value[0]) if isinstance(value, list) and value else {}


def _dict(value: object) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}
