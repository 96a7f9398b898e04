"""The outbox: what the outside must be told, written in the transaction that makes it true.

A `card` is one standing row per approval: it is due whenever what it shows has changed. A `reply` is said once, below
the card. An `alarm` tells the operators that a thread needs them.

Any process may deliver: it leases a due row with a committed UPDATE, sends with no transaction open, and records the
outcome only where the attempt is still its own.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from datetime import datetime
from typing import Literal

from psycopg import sql

from flow.database import RINGS, Connection, ring
from flow.model import Notice
from flow.spans import NONE, WRITTEN


@dataclass(frozen=True, kw_only=True)
class Copy:
    """A message that shows a request. `place` is for what it was posted: a tier's channel, OWN_CHANNEL, or the member
    whose conversation it is in; None: nobody noted it.

    `shown` is id and version of the notice that it was last seen to show, `said` the same of what was last said below
    it; None: nobody noted that, be it so or not.
    """

    channel: str
    ts: str
    place: str | None = None
    shown: list[int] | None = None
    said: list[int] | None = None

    def has(self, notice: Notice) -> bool:
        """Whether this version of the notice is known to have reached it."""
        return (self.shown if notice.kind == "card" else self.said) == [notice.id, notice.version]


# The bot's own channel, wherever that is by now.
OWN_CHANNEL = ""

# New messages go out at one a second and channel; changes of posted ones need not wait behind them, nor alarms.
Lane = Literal["posts", "changes", "alarms"]

# A card a second goes out: what one person does keeps the others' waiting for a few minutes at most.
MOST_CHANGED = 200

# Longer than a delivery can take (two calls of 10 s), short enough that a dead deliverer is not missed for long.
LEASE_S = 30.0


# The queues of each lane, as `notice_lane` has them in SQL: what waits in the first goes before all of the second.
_QUEUES: dict[Lane, tuple[str, ...]] = {
    "posts": ("posts", "reminders"),
    "changes": ("changes",),
    "alarms": ("alarms",),
}

# One more version to show: now, or after the delivery that is under way.
_DUE_AGAIN = (
    " SET version = n.version + 1,"
    " waits_since = CASE WHEN n.due_at IS NULL THEN clock_timestamp() ELSE n.waits_since END,"
    " due_at = CASE WHEN n.status = 'sending' THEN n.due_at ELSE clock_timestamp() END,"
    " status = CASE WHEN n.status = 'sending' THEN n.status ELSE 'pending' END"
)


async def post_card(conn: Connection, interrupt_id: str, thread_id: str) -> None:
    """The approval must be shown."""
    await conn.execute(
        "INSERT INTO notices (kind, interrupt_id, thread_id) VALUES ('card', %s, %s)"
        f" ON CONFLICT (interrupt_id, kind) DO NOTHING RETURNING {RINGS}",
        (interrupt_id, thread_id),
    )


async def change_card(conn: Connection, interrupt_id: str) -> None:
    """What the approval's card shows has changed: it must be shown again, after the delivery under way if any."""
    await conn.execute(
        f"UPDATE notices n {_DUE_AGAIN} WHERE interrupt_id = %s AND kind = 'card' RETURNING {RINGS}",
        (interrupt_id,),
    )


async def show_card(conn: Connection, interrupt_id: str) -> None:
    """The same for a card whose notice may be deleted by now: a copy has turned up that nobody knew of."""
    await conn.execute(
        "INSERT INTO notices AS n (kind, interrupt_id, thread_id)"
        " SELECT 'card', interrupt_id, thread_id FROM approvals WHERE interrupt_id = %s"
        f" ON CONFLICT (interrupt_id, kind) DO UPDATE {_DUE_AGAIN}",
        (interrupt_id,),
    )
    await ring(conn)


async def change_cards(conn: Connection, thread_id: str) -> None:
    """The same for all cards of the thread."""
    await conn.execute(
        f"UPDATE notices n {_DUE_AGAIN} WHERE kind = 'card'"
        " AND interrupt_id IN (SELECT interrupt_id FROM approvals WHERE thread_id = %s)",
        (thread_id,),
    )
    await ring(conn)


async def change_direct_cards(conn: Connection, names: Collection[str], *, workspace: str | None) -> None:
    """The same for what waits in this workspace and is shown in direct messages to those whom it lists by one of these
    names: another is to read it, too. Of more than MOST_CHANGED the oldest: whoever reads has a list of the rest."""
    await conn.execute(
        f"UPDATE notices n {_DUE_AGAIN} WHERE kind = 'card' AND interrupt_id IN (SELECT interrupt_id FROM approvals"
        " WHERE status = 'pending' AND post_to <> 'channel' AND approvers && %s::text[]"
        " AND workspace IS NOT DISTINCT FROM %s ORDER BY requested_at LIMIT %s)",
        (list(names), workspace, MOST_CHANGED),
    )
    await ring(conn)


async def post_reply(conn: Connection, interrupt_id: str, thread_id: str) -> None:
    """The outcome must be said below the card; a later outcome (of a thread that was stuck) once more."""
    await _say_below(conn, "reply", interrupt_id, thread_id)


async def remind(conn: Connection, interrupt_id: str, thread_id: str) -> None:
    """Those who have not decided must be reminded, once more."""
    await _say_below(conn, "reminder", interrupt_id, thread_id)


async def _say_below(conn: Connection, kind: str, interrupt_id: str, thread_id: str) -> None:
    await conn.execute(
        "INSERT INTO notices AS n (kind, interrupt_id, thread_id) VALUES (%s, %s, %s)"
        f" ON CONFLICT (interrupt_id, kind) DO UPDATE {_DUE_AGAIN} RETURNING {RINGS}",
        (kind, interrupt_id, thread_id),
    )


async def raise_alarm(conn: Connection, thread_id: str, *, tampered: str | None = None) -> None:
    """The operators must be told that this thread needs them; of a later trouble once more.

    `tampered`: a request of it that was changed past us, which they are told even if it is whole again by then.
    """
    await conn.execute(
        "INSERT INTO notices AS n (kind, thread_id, reasons) VALUES ('alarm', %s, %s)"
        f" ON CONFLICT (thread_id) WHERE kind = 'alarm' DO UPDATE {_DUE_AGAIN},"
        " reasons = n.reasons || EXCLUDED.reasons",
        (thread_id, [tampered] if tampered else []),
    )
    await ring(conn)


async def lease(conn: Connection, lane: Lane, *, but: Collection[str] = ()) -> Notice | None:
    """Take the notice of this lane that has been due for longest, for LEASE_S; None if none is due.

    Those of the workspaces `but` are left to wait. A lease that ran out leaves it open whether the outside was told:
    the next one is `ambiguous`.
    """
    # Looked up row by row, in the order of the index: as a join it might read every thread.
    others = (
        "AND coalesce((SELECT workspace FROM threads t WHERE t.thread_id = notices.thread_id) <> ALL(%(but)s), true)"
        if but
        else ""
    )
    for queue in _QUEUES[lane]:
        rows = await conn.execute(
            # No clock_timestamp() in the condition: the index could not be asked for it.
            "WITH next AS (SELECT id, status FROM notices WHERE notice_lane(kind, version) = %(queue)s"
            f" AND due_at <= statement_timestamp() {others} ORDER BY due_at LIMIT 1 FOR UPDATE SKIP LOCKED)"
            " UPDATE notices n SET status = 'sending', attempt = n.attempt + 1,"
            " due_at = clock_timestamp() + %(lease_s)s * interval '1 second',"
            " ambiguous = n.ambiguous OR next.status = 'sending' FROM next WHERE n.id = next.id"
            " RETURNING n.id, n.kind, n.interrupt_id, n.thread_id, n.version, n.attempt, n.ambiguous",
            {"queue": queue, "lease_s": LEASE_S, "but": list(but)},
        )
        if row := await rows.fetchone():
            return Notice(**row)
    return None


async def renew(conn: Connection, notice: Notice) -> bool:
    """Begin the lease anew, right before the outside is told. False if it has run out, and somebody else may tell."""
    ours = await conn.execute(
        "UPDATE notices SET due_at = clock_timestamp() + %s * interval '1 second'"
        " WHERE id = %s AND attempt = %s AND status = 'sending' AND due_at > clock_timestamp()",
        (LEASE_S, notice.id, notice.attempt),
    )
    return ours.rowcount == 1


async def mark_sent(conn: Connection, notice: Notice, *, spans: str = NONE) -> None:
    """The outside shows `notice.version`. If that is no longer the newest, the notice is due again.

    `spans`, here and below: those of the delivery.
    """
    ours = await conn.execute(
        "WITH ended AS (UPDATE notices SET status = CASE WHEN version = %(version)s THEN 'sent' ELSE 'pending' END,"
        " due_at = CASE WHEN version = %(version)s THEN NULL ELSE clock_timestamp() END,"
        " waits_since = clock_timestamp(),"
        " reasons = CASE WHEN version = %(version)s THEN '{}' ELSE reasons END,"
        " ambiguous = false, error = NULL WHERE id = %(id)s AND attempt = %(attempt)s AND status = 'sending'"
        # What changed meanwhile is due now.
        f" RETURNING thread_id), {WRITTEN} SELECT {RINGS} FROM ended",
        {"version": notice.version, "id": notice.id, "attempt": notice.attempt, "spans": spans},
    )
    if ours.rowcount == 0:
        await show_once_more(conn, notice)


async def show_once_more(conn: Connection, notice: Notice) -> None:
    """Another deliverer was faster, and our older text may have landed after its newer one."""
    if notice.kind == "card" and notice.interrupt_id is not None:
        # Its notice may be deleted by now, if its thread is long over.
        await show_card(conn, notice.interrupt_id)


async def mark_later(
    conn: Connection, notice: Notice, *, wait_s: float, error: str, ambiguous: bool, spans: str = NONE
) -> None:
    """Not delivered, or perhaps delivered (`ambiguous`): try again after `wait_s`."""
    ours = await conn.execute(
        "WITH ended AS (UPDATE notices SET status = 'pending',"
        " due_at = clock_timestamp() + %(wait_s)s * interval '1 second', error = %(error)s,"
        " ambiguous = ambiguous OR %(ambiguous)s WHERE id = %(id)s AND attempt = %(attempt)s AND status = 'sending'"
        f" RETURNING thread_id), {WRITTEN} SELECT FROM ended",
        {
            "wait_s": wait_s,
            "error": error,
            "ambiguous": ambiguous,
            "id": notice.id,
            "attempt": notice.attempt,
            "spans": spans,
        },
    )
    if ours.rowcount == 0 and ambiguous:
        await show_once_more(conn, notice)


async def mark_failed(conn: Connection, notice: Notice, error: str, *, spans: str = NONE) -> None:
    """The outside refuses it for good, which is an alarm; `retry_failed` tries it again once the cause is mended."""
    async with conn.transaction():
        ours = await conn.execute(
            "WITH ended AS (UPDATE notices SET status = 'failed', due_at = NULL, error = %(error)s"
            " WHERE id = %(id)s AND attempt = %(attempt)s AND status = 'sending'"
            f" RETURNING thread_id), {WRITTEN} SELECT FROM ended",
            {"error": error, "id": notice.id, "attempt": notice.attempt, "spans": spans},
        )
        if ours.rowcount and notice.kind != "alarm":
            await raise_alarm(conn, notice.thread_id)


async def failures_of(conn: Connection, thread_id: str) -> list[tuple[str, str]]:
    """Kind and error of what the outside refuses to show of this thread; and ids of its requests that are changed past
    us (`tampered`), or were, which its alarm has not said yet (`mended`)."""
    rows = await conn.execute(
        "SELECT kind, error FROM (SELECT kind, error, id FROM notices"
        " WHERE thread_id = %(id)s AND status = 'failed' AND kind <> 'alarm'"
        " UNION ALL SELECT 'mail', substr(l.person, 6) || ': ' || l.mail_error, l.id"
        " FROM links l JOIN approvals a USING (interrupt_id) WHERE a.thread_id = %(id)s AND a.status = 'pending'"
        " AND l.mail_due_at IS NULL AND l.mail_error IS NOT NULL AND l.used_at IS NULL AND l.revoked_at IS NULL"
        " UNION ALL SELECT 'trace', error, 0 FROM trace_targets WHERE alarm_of = %(id)s AND error IS NOT NULL"
        " UNION ALL SELECT 'trace', error, 0 FROM trace_exports WHERE thread_id = %(id)s AND error IS NOT NULL"
        # Where traces go is the operators' business, and no workspace's.
        " AND (SELECT workspace FROM threads t WHERE t.thread_id = trace_exports.thread_id) IS NULL"
        " UNION ALL SELECT CASE WHEN tampered THEN 'tampered' ELSE 'mended' END, interrupt_id, 0 FROM"
        " (SELECT interrupt_id, status = 'pending' AND fingerprint IS DISTINCT FROM approval_fingerprint(a) AS tampered"
        " FROM approvals a WHERE thread_id = %(id)s) asked WHERE tampered OR interrupt_id IN"
        " (SELECT unnest(reasons) FROM notices WHERE thread_id = %(id)s AND kind = 'alarm'))"
        " refused ORDER BY kind, id",
        {"id": thread_id},
    )
    return [(row["kind"], row["error"]) for row in await rows.fetchall()]


@dataclass(frozen=True, kw_only=True)
class Undelivered:
    """What should be shown by now and is not: refused for good, or waiting for longer than it should."""

    failed: int
    waiting: int
    # Of the oldest; no `since` if it failed before there was an audit log.
    kind: str
    thread_id: str
    since: datetime | None
    # The newest that there is.
    error: str | None


async def undelivered(conn: Connection, *, patience_s: float) -> Undelivered | None:
    """Every notice that failed, or waits for longer than `patience_s`; None if there is none.

    One that is tried again and again is due only in a moment, always. A card or reply of that kind has waited since the
    newest thing that is recorded of its thread: it tells of that, or of something older.
    """
    row = await (
        await conn.execute(
            "SELECT count(*) FILTER (WHERE status = 'failed') AS failed,"
            " count(*) FILTER (WHERE status <> 'failed') AS waiting,"
            " (array_agg(kind ORDER BY since, id))[1] AS kind,"
            " (array_agg(thread_id ORDER BY since, id))[1] AS thread_id, min(since) AS since,"
            " (array_agg(error ORDER BY since DESC NULLS LAST, id DESC) FILTER (WHERE error IS NOT NULL))[1] AS error"
            " FROM (SELECT n.id, n.kind, n.thread_id, n.status, n.error, CASE"
            " WHEN n.status = 'failed' OR (n.error IS NOT NULL AND n.kind IN ('card', 'reply'))"
            " THEN least(n.due_at, (SELECT max(at) FROM audit a WHERE a.thread_id = n.thread_id)) ELSE n.due_at END"
            " AS since FROM notices n WHERE n.status = 'failed' OR n.due_at IS NOT NULL) undelivered"
            " WHERE status = 'failed' OR since < clock_timestamp() - %s * interval '1 second'",
            (patience_s,),
        )
    ).fetchone()
    return Undelivered(**row) if row and row["failed"] + row["waiting"] else None


async def retry_failed(conn: Connection) -> int:
    """Make every failed notice due again; how many."""
    rows = await conn.execute(
        "UPDATE notices SET status = 'pending', due_at = clock_timestamp() WHERE status = 'failed'"
    )
    return rows.rowcount


async def remember_message(
    conn: Connection,
    interrupt_id: str,
    channel: str,
    ts: str,
    *,
    place: str | None = None,
    showing: Notice | None = None,
) -> None:
    """A copy of the approval's card stands there; `place` is for what it was posted, where that is known, and `showing`
    what it shows, as in `note`."""
    await conn.execute(
        "INSERT INTO messages (channel, ts, interrupt_id, place, shown) VALUES (%s, %s, %s, %s, %s)"
        " ON CONFLICT DO NOTHING",
        (channel, ts, interrupt_id, place, [showing.id, showing.version] if showing else None),
    )


async def note(conn: Connection, notice: Notice, copy: Copy) -> None:
    """Slack has answered: the copy shows this version of the card, or this is said below it. The next attempt at the
    same version leaves it alone.

    The id goes with the version, since a notice that was deleted begins anew at the first.
    """
    column = sql.Identifier("shown" if notice.kind == "card" else "said")
    await conn.execute(
        sql.SQL("UPDATE messages SET {} = %s WHERE channel = %s AND ts = %s AND interrupt_id = %s").format(column),
        ([notice.id, notice.version], copy.channel, copy.ts, notice.interrupt_id),
    )


async def forget_message(conn: Connection, channel: str, ts: str) -> None:
    """That copy was deleted in Slack."""
    await conn.execute("DELETE FROM messages WHERE channel = %s AND ts = %s", (channel, ts))


async def messages_of(conn: Connection, interrupt_id: str) -> list[tuple[str, str]]:
    """Channel and ts of every copy of the approval's card, oldest first."""
    return [(copy.channel, copy.ts) for copy in await copies_of(conn, interrupt_id)]


async def copies_of(conn: Connection, interrupt_id: str) -> list[Copy]:
    """The same, each with its place, and how far it was told."""
    rows = await conn.execute(
        "SELECT channel, ts, place, shown, said FROM messages WHERE interrupt_id = %s ORDER BY posted_at",
        (interrupt_id,),
    )
    return [Copy(**row) for row in await rows.fetchall()]


async def card_status(conn: Connection, interrupt_id: str) -> str | None:
    """The delivery status of the approval's card."""
    row = await (
        await conn.execute("SELECT status FROM notices WHERE interrupt_id = %s AND kind = 'card'", (interrupt_id,))
    ).fetchone()
    return row["status"] if row else None
