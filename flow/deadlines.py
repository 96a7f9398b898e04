"""What happens when the time for a decision is over: the request expires, or others are asked, too, for as long again.

Rows with a due time, settled by the worker's clock. Whoever decides at that moment has the row's lock, and is waited
for by nobody: the clock looks again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from psycopg import sql

from flow import approvals, counts, mails, notices, threads
from flow.database import Connection
from flow.model import Approval
from flow.standing import escalates


async def expire_overdue(conn: Connection, *, limit: int = 100) -> int:
    """Settle what is overdue, or escalate it; how many. Locked ones are being decided: skipped. One SELECT if there is
    nothing."""
    if not await _is_any_overdue(conn):
        return 0
    async with conn.transaction():
        rows = await conn.execute(
            sql.SQL(
                # No clock_timestamp() in the condition: the index could not be asked for it.
                "SELECT {} FROM approvals WHERE status = 'pending' AND expires_at <= statement_timestamp()"
                " ORDER BY expires_at LIMIT %s FOR UPDATE SKIP LOCKED"
            ).format(approvals.COLUMNS),
            (limit,),
        )
        overdue = await approvals.with_decisions(conn, await rows.fetchall())
        # One that was changed past us is never made good by us: it expires.
        going_on = [approval for approval in overdue if escalates(approval) and approval.whole]
        await _expire(conn, [approval for approval in overdue if approval not in going_on])
        for approval in going_on:
            await _escalate(conn, approval)
    for _ in overdue:
        counts.expiries.add()
    return len(overdue)


async def _is_any_overdue(conn: Connection) -> bool:
    query = (
        "SELECT FROM approvals WHERE status = 'pending' AND expires_at <= statement_timestamp()"
        " ORDER BY expires_at LIMIT 1"
    )
    return await (await conn.execute(query)).fetchone() is not None


async def _escalate(conn: Connection, approval: Approval) -> None:
    """Ask the others, too: once, and for as long as the first were asked."""
    asked = (*approval.approvers, *approval.escalate_to)
    rows = await conn.execute(
        "UPDATE approvals SET approvers = %s, escalated_at = clock_timestamp(),"
        " expires_at = clock_timestamp() + expires_after_s * interval '1 second'"
        " WHERE interrupt_id = %s RETURNING escalated_at, expires_at",
        (list(asked), approval.interrupt_id),
    )
    row = await rows.fetchone()
    assert row is not None
    await approvals.renew_fingerprint(conn, approval.interrupt_id)
    escalated = replace(approval, approvers=asked, escalated_at=row["escalated_at"], expires_at=row["expires_at"])
    await notices.change_card(conn, approval.interrupt_id)
    await notices.remind(conn, approval.interrupt_id, approval.thread_id)
    await mails.ask_by_mail(conn, approval, approval.escalate_to)
    await approvals.record_changes(conn, escalated, "approval.escalated", who="clock", door="clock")


async def _expire(conn: Connection, overdue: Sequence[Approval]) -> None:
    for approval in overdue:
        rows = await conn.execute(
            "UPDATE approvals SET status = 'expired', settled_at = clock_timestamp(),"
            " on_expiry = CASE WHEN escalated_at IS NULL THEN 'reject' ELSE on_expiry END WHERE interrupt_id = %s"
            " RETURNING settled_at",
            (approval.interrupt_id,),
        )
        row = await rows.fetchone()
        assert row is not None
        await notices.change_card(conn, approval.interrupt_id)
        expired = replace(approval, status="expired", settled_at=row["settled_at"])
        await approvals.record_changes(conn, expired, "approval.expired", who="clock", door="clock")
        await threads.wake(conn, approval.thread_id)
