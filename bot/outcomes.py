"""How far a request has come, in words: for cards, replies, modals and private notes. Pure functions.

Five ends without a payment have five words: rejected, expired, withdrawn, superseded, failed.
"""

from __future__ import annotations

from datetime import UTC, datetime

from bot.answers import sentence
from bot.kit import date, fitting, mention, money, safe
from bot.questions import by_whom
from flow.errors import AlreadyDecided, ApprovalExpired, FlowError
from flow.model import Approval, Decision, Payment, Thread
from flow.policy import UNNAMED
from flow.text import bare_name

_NAME = 120
# Of everybody in a list together, escaped.
_NAMES = 500
_REASON = 300
_REFERENCE = 255

_TITLES = {
    "rejected": "❌ Rejected",
    "expired": "⌛ Expired",
    "withdrawn": "↩️ Withdrawn",
    "superseded": "🔁 Superseded",
}

_TROUBLES = {
    "unknown": "It is not known whether this was paid: the payment service did not answer, and somebody must look.",
    "failed": "Failed, nothing was paid",
    "stuck": "Not paid: the thread is stuck, and somebody must look at it.",
}


CHANGED = "changed outside of the bot"
TAMPERED = f"This request was {CHANGED}: nobody can decide it."


def title_of(approval: Approval, thread: Thread) -> str:
    """Where it is, in a word or two."""
    if approval.status == "pending":
        if approval.tampered:
            return f"⛔ {CHANGED.capitalize()}"
        # A name that somebody gave says who is asked, the only tier's does not.
        who = "" if approval.tier == UNNAMED else f" from {safe(approval.tier, _NAME)}"
        step = f", step {approval.step} of {approval.steps}" if approval.step else ""
        return f"Approval needed{who}{step}"
    if approval.status == "approved":
        return {"paid": "✅ Paid", "failed": "⚠️ Failed"}.get(thread.status, "✅ Approved")
    return _TITLES[approval.status]


def asked_amount(approval: Approval) -> str:
    """The amount of a claim as it was asked for, with the currency's decimals and thousands set apart: 1,250.00 USD."""
    return money(approval.request.get("amount"), approval.request.get("currency"))


def decision_line(decision: Decision) -> str:
    """Who, where and when, as mrkdwn; struck out if it does not count any more."""
    mark, word = ("✅", "Approved") if decision.verdict == "approve" else ("❌", "Rejected")
    said = f"{word} by {safe(decision.who, 2 * _NAME)}"
    said = f"~{said}~ (void)" if decision.void else f"*{said}*"
    door = "" if decision.door == "slack" else f" ({safe(decision.door, _NAME)})"
    return f"{mark} {said}{door}, {date(decision.decided_at)}"


def progress_lines(approval: Approval) -> list[str]:
    """How far a pending one is: who has approved, where it takes more than one, and who else is asked by now."""
    if approval.status != "pending":
        return []
    if approval.tampered:
        return [TAMPERED]
    lines = []
    if approval.required > 1:
        names = [safe(vote.who, _NAME) for vote in approval.votes if vote.verdict == "approve"]
        who = f": {_listed(names)}" if names else ""
        lines.append(f"*{approval.approvals_given} of {approval.required} approvals*{who}")
    if approval.escalated_at is not None:
        names = [mention(name, _NAME) for name in approval.escalate_to]
        until = f", decide by {date(approval.expires_at)}" if approval.expires_at else ""
        lines.append(f"⏫ *Escalated to* {_listed(names)}{until}")
    return lines


def outcome_lines(approval: Approval, thread: Thread, payment: Payment | None) -> list[str]:
    """What became of a claim, as mrkdwn; none while that is open."""
    # Its thread goes on, and may pay another amount.
    if approval.status == "superseded":
        return [superseded_line(approval)]
    if payment is not None and payment.reference is not None:
        return [f"💸 *{asked_amount(approval)} paid*, reference {safe(payment.reference, _REFERENCE)}"]
    if approval.status in ("rejected", "expired", "withdrawn") and thread.status not in _TROUBLES:
        when = f" {date(approval.expires_at)}" if approval.status == "expired" and approval.expires_at else ""
        return [f"Nothing was paid: {approval.status}{when}{by_whom(approval)}."]
    why = f": {safe(payment.reason, _REASON)}" if payment and payment.reason and thread.status == "failed" else ""
    return [f"⚠️ {_TROUBLES[thread.status]}{why}"] if thread.status in _TROUBLES else []


def superseded_line(approval: Approval) -> str:
    """What is asked instead, as mrkdwn."""
    if approval.changed_to is None or approval.changed_by is None:
        return "Superseded: its flow asks anew, or no longer waits for it."
    why = f" ({safe(approval.changed_why, _REASON)})" if approval.changed_why else ""
    who = approval.changer(lambda key: mention(key, _NAME))
    return f"Superseded: {who} asks for {_instead(approval)}{why}."


def already(approval: Approval) -> str:
    """Why a vote is not written, though it was no mistake. For a private note, or a modal: no markup."""
    by = approval.settled_by
    if approval.status == "pending":
        counted = f": {approval.approvals_given} of {approval.required} approvals" if approval.required > 1 else ""
        return f"Your vote counts already{counted}."
    if approval.status == "expired":
        return f"Already expired{_at(approval.expires_at or approval.settled_at)}."
    if approval.status == "withdrawn":
        return f"Already withdrawn by {bare_name(approval.withdrawn_by or 'its flow')}."
    if approval.status == "superseded" and approval.changed_to and approval.changed_by:
        return f"Already superseded: {approval.changer(bare_name)} asks for {_instead(approval)}."
    if approval.status == "superseded":
        return _ASKED_ANEW
    return f"Already {approval.status}" + (f" by {by.who}." if by else ".")


def refusal(exc: FlowError) -> str:
    """Why a press did nothing, for whoever pressed."""
    if isinstance(exc, ApprovalExpired):
        return f"Already expired{_at(exc.at)}."
    if isinstance(exc, AlreadyDecided) and exc.status == "superseded":
        return _ASKED_ANEW
    if isinstance(exc, AlreadyDecided) and exc.status == "withdrawn":
        return f"Already withdrawn by {bare_name(exc.by)}{_at(exc.at)}."
    return sentence(exc)


_ASKED_ANEW = "Already superseded: what is asked for now is on a newer card."


def _instead(approval: Approval) -> str:
    changed = approval.changed_to or {}
    if "amount" not in changed:
        return "the same, by the policy of today"
    return f"{money(changed['amount'], approval.request.get('currency'))} instead of {asked_amount(approval)}"


def _at(at: datetime | None) -> str:
    return f" at {at.astimezone(UTC):%Y-%m-%d %H:%M} UTC" if at else ""


def _listed(names: list[str]) -> str:
    return ", ".join(fitting(names, _NAMES))
