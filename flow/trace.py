"""The run of a thread as its rows tell it: what happened when, and what was said to the outside."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Any

from flow.database import Connection
from flow.model import Approval
from flow.show import Story


@dataclass(frozen=True, kw_only=True)
class Event:
    """One line of the timeline. `tone` is how it ended, if it ended anything: good, bad, or neither."""

    at: datetime
    what: str
    detail: str = ""
    tone: str = ""


@dataclass(frozen=True, kw_only=True)
class Telling:
    """One notice to the outside, and where its delivery is."""

    kind: str
    status: str
    attempts: int
    error: str | None


@dataclass(frozen=True, kw_only=True)
class Trace:
    """The timeline, oldest first; the drives since the last that succeeded; and what the outside was told."""

    events: tuple[Event, ...]
    attempts: int
    driven_at: datetime | None
    tellings: tuple[Telling, ...]


async def trace_of(conn: Connection, story: Story) -> Trace:
    """The trace of the story's thread."""
    thread_id = story.thread.thread_id
    driven = await (
        await conn.execute("SELECT driven_at, attempts FROM threads WHERE thread_id = %s", (thread_id,))
    ).fetchone()
    assert driven is not None
    notices = await (
        await conn.execute(
            "SELECT kind, status, attempt, error FROM notices WHERE thread_id = %s ORDER BY id", (thread_id,)
        )
    ).fetchall()
    events = [
        Event(at=story.thread.created_at, what="Filed", detail=f"by {story.thread.requested_by}"),
        *await _advice(conn, thread_id),
        *[event for approval in story.approvals for event in _of_approval(approval)],
        *await _outside(conn, thread_id),
        *_of_payment(story),
    ]
    return Trace(
        events=tuple(sorted(events, key=lambda event: event.at)),
        attempts=driven["attempts"],
        driven_at=driven["driven_at"],
        tellings=tuple(
            Telling(kind=row["kind"], status=row["status"], attempts=row["attempt"], error=row["error"])
            for row in notices
        ),
    )


async def _advice(conn: Connection, thread_id: str) -> list[Event]:
    rows = await conn.execute("SELECT asked_at, status, model FROM advice WHERE thread_id = %s", (thread_id,))
    return [
        Event(at=row["asked_at"], what="A model was asked for advice", detail=f"{row['model']}: {row['status']}")
        for row in await rows.fetchall()
    ]


async def _outside(conn: Connection, thread_id: str) -> list[Event]:
    """Posted messages, and links."""
    rows = await conn.execute(
        "SELECT 'message' AS kind, m.channel AS who, m.posted_at AS made, NULL AS mailed, NULL AS revoked"
        " FROM messages m JOIN approvals a USING (interrupt_id) WHERE a.thread_id = %(id)s"
        " UNION ALL SELECT CASE l.made_by WHEN 'policy' THEN 'mail' ELSE 'link' END, substr(l.person, 6),"
        " l.made_at, l.mailed_at, l.revoked_at"
        " FROM links l JOIN approvals a USING (interrupt_id) WHERE a.thread_id = %(id)s",
        {"id": thread_id},
    )
    return [event for row in await rows.fetchall() for event in _of_outside(row)]


def _of_outside(row: dict[str, Any]) -> list[Event]:
    if row["kind"] == "message":
        return [Event(at=row["made"], what="Posted in Slack", detail=f"channel {row['who']}")]
    # A link that only waits to be mailed is not there yet for anybody.
    events = [Event(at=row["made"], what="Link made", detail=f"for {row['who']}")] if row["kind"] == "link" else []
    if row["mailed"]:
        events.append(Event(at=row["mailed"], what="Link mailed", detail=f"to {row['who']}"))
    if row["revoked"] and events:
        events.append(Event(at=row["revoked"], what="Link revoked", detail=f"of {row['who']}"))
    return events


def _of_approval(approval: Approval) -> list[Event]:
    who = f"{approval.required} of {len(approval.approvers)} must approve"
    events = [Event(at=approval.requested_at, what="Approval asked for", detail=who)]
    for decision in approval.decisions:
        good = decision.verdict == "approve"
        events.append(
            Event(
                at=decision.decided_at,
                what=f"{'Approved' if good else 'Rejected'} by {decision.who}{' (void)' if decision.void else ''}",
                detail=f"through {decision.door}" + (f": {decision.reason}" if decision.reason else ""),
                tone="" if decision.void else "good" if good else "bad",
            )
        )
    if approval.escalated_at:
        others = f"{', '.join(approval.escalate_to)} asked, too"
        events.append(Event(at=approval.escalated_at, what="Escalated", detail=others))
    if approval.settled_at and approval.status in ("expired", "withdrawn", "superseded"):
        what = approval.status.capitalize()
        events.append(Event(at=approval.settled_at, what=what, detail=_by_whom(approval), tone="bad"))
    return events


def _by_whom(approval: Approval) -> str:
    """Who ended it, and why, or what they ask for instead; empty if nobody did."""
    if approval.withdrawn_by:
        return f"by {approval.withdrawn_by}: {approval.withdrawn_why}".rstrip(": ")
    if approval.changed_to and approval.changed_by:
        amount = approval.changed_to.get("amount")
        wanted = f"{amount} instead of {approval.request['amount']}" if amount else "the same, by the policy of then"
        return f"by {approval.changer(str)}, who asks for {wanted}: {approval.changed_why}".rstrip(": ")
    return ""


def _of_payment(story: Story) -> list[Event]:
    payment = story.payment
    if payment is None:
        return []
    events = []
    if payment.provider != "ledger":
        times = f"asked {payment.attempts} times" if payment.attempts > 1 else "asked"
        events.append(Event(at=payment.intended_at, what="Payment begun", detail=f"{payment.provider}, {times}"))
    if payment.paid_at:
        events.append(Event(at=payment.paid_at, what="Paid", detail=f"reference {payment.reference}", tone="good"))
    return events
