"""Reminders: of a request that nobody has decided yet, at the hours in which people work.

Each is one row's due time. However long nobody looked at it, an overdue reminder is one reminder, and it waits for
those hours, too.
"""

from __future__ import annotations

from datetime import datetime

from flow import notices
from flow.database import Connection
from flow.hours import next_open, next_reminder


async def schedule(
    conn: Connection, interrupt_id: str, asked_at: datetime, *, every_s: float, hours: str | None
) -> None:
    """The first reminder of a new request."""
    await conn.execute(
        "UPDATE approvals SET remind_every_s = %s, working_hours = %s, remind_at = %s WHERE interrupt_id = %s",
        (every_s, hours, next_reminder(asked_at, every_s, hours), interrupt_id),
    )


async def remind_overdue(conn: Connection, *, limit: int = 100) -> int:
    """Have people reminded of what is due; how many requests. Those that are being decided now are skipped, and those
    whose hours are over wait until they begin."""
    reminded = 0
    async with conn.transaction():
        rows = await conn.execute(
            "SELECT interrupt_id, thread_id, remind_every_s, working_hours, clock_timestamp() AS now FROM approvals"
            # No clock_timestamp() in the condition: the index could not be asked for it.
            " WHERE status = 'pending' AND remind_at <= statement_timestamp()"
            " AND (expires_at IS NULL OR expires_at > statement_timestamp())"
            # Whoever it names by now may be whomever somebody has put in.
            " AND fingerprint = approval_fingerprint(approvals)"
            " ORDER BY remind_at LIMIT %s FOR UPDATE SKIP LOCKED",
            (limit,),
        )
        for row in await rows.fetchall():
            now, every_s, hours = row["now"], row["remind_every_s"], row["working_hours"]
            opens = next_open(now, hours)
            await conn.execute(
                "UPDATE approvals SET remind_at = %s WHERE interrupt_id = %s",
                (opens if opens > now else next_reminder(now, every_s, hours), row["interrupt_id"]),
            )
            if opens > now:
                continue
            await notices.remind(conn, row["interrupt_id"], row["thread_id"])
            reminded += 1
    return reminded
