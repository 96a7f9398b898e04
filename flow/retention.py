"""What is kept for how long, and why. Whatever has no rule here is the record, and is kept for good.

The record is the thread with its approvals, decisions, advice, effects and payment, the messages that stand in Slack
(a copy whose place is forgotten could never be put right) and the audit log. Everything that may be asked of a thread
that is over is answered from these rows.

What goes, batch by batch and each batch in a transaction of its own, so that it may be killed at any moment:

    with a thread, CHECKPOINT_RETENTION after its end
        LangGraph's checkpoints    nobody drives a thread that is over; nothing else reads them
        notices                    once sent; or never tried, and with nowhere to be said
        links                      of its requests, all settled: their pages would say no more than that
    EVENT_RETENTION after it happened, whatever its thread is doing
        events, and deliveries     once every endpoint has it: what waits, or is a dead letter, stays
    SPAN_RETENTION after it was recorded, whatever its thread is doing
        spans                      what traces say of drives and calls; the rest of a trace is the record's
    by their own age
        receipts, login links      a month: a sender may repeat itself, and somebody may ask who could sign in
        sessions                   as soon as they are over

But for events and spans, nothing of a thread that is not over is touched, be it waiting, due, stuck, unknown or
unavailable: only an end sets `ended_at`, its row stays locked while its checkpoints are deleted, and whoever drives it
has its lock.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import asdict, dataclass, field
from datetime import datetime
from functools import partial
from typing import Any

import psycopg

from flow.database import Connection
from flow.events import give_positions
from flow.settings import Settings

log = logging.getLogger(__name__)

# Threads, events or rows. Some tens of milliseconds for claims, with some twenty rows each; threads of a thousand steps
# take seconds, in which nobody waits for them: they are over. Few enough locks for the smallest server.
BATCH = 200

_DAY_S = 86_400
_MONTH_S = 30 * _DAY_S

# Of the threads %(threads)s, all of them over.
_WITH_THREADS = {
    "checkpoints": "t.thread_id = ANY(%(threads)s)",
    "checkpoint_blobs": "t.thread_id = ANY(%(threads)s)",
    "checkpoint_writes": "t.thread_id = ANY(%(threads)s)",
    # Without Slack nothing is ever tried. A settled request gets no new card, and what is said below a card is said
    # nowhere if there is none. But operators want to hear of an alarm, and whoever asked of the outcome of what was to
    # be decided in direct messages, whenever Slack is turned on.
    "notices": "t.thread_id = ANY(%(threads)s) AND (t.status = 'sent' OR (t.attempt = 0 AND t.kind <> 'alarm'"
    # Each a look into an index: as EXISTS they might be answered from the whole table, and once for all.
    " AND (SELECT ts FROM messages m WHERE m.interrupt_id = t.interrupt_id LIMIT 1) IS NULL AND (t.kind <> 'reply' OR"
    " (SELECT post_to FROM approvals a WHERE a.interrupt_id = t.interrupt_id) <> 'direct')))",
    "links": "t.interrupt_id IN (SELECT interrupt_id FROM approvals"
    " WHERE thread_id = ANY(%(threads)s) AND status <> 'pending')",
}

# The column with their age, and how long after it they are kept.
_BY_AGE = {
    "receipts": ("received_at", _MONTH_S),
    "login_links": ("expires_at", _MONTH_S),
    "sessions": ("expires_at", 0),
}

# statement_timestamp and not clock_timestamp: an index can be searched for what stays the same meanwhile.
_OLDER = "< statement_timestamp() - %(age)s * interval '1 second'"

# Every endpoint has had it, also those that are turned off: they go on from where they were. One without a position
# comes after all that have one.
_FORGETTABLE = (
    f"t.created_at {_OLDER} AND coalesce(t.position, 9223372036854775807)"
    " <= (SELECT coalesce(min(position), 9223372036854775807) FROM webhook_endpoints) AND NOT EXISTS"
    " (SELECT FROM webhook_deliveries d WHERE d.event_id = t.id AND d.status <> 'sent')"
)


@dataclass(frozen=True, kw_only=True)
class Keep:
    """How long the kinds are kept that have a setting, in seconds; None: for ever."""

    checkpoints_s: int | None
    events_s: int | None
    spans_s: int | None

    @classmethod
    def of(cls, settings: Settings) -> Keep:
        return cls(
            checkpoints_s=settings.checkpoint_retention_s,
            events_s=settings.event_retention_s,
            spans_s=settings.span_retention_s,
        )

    @property
    def by_age(self) -> dict[str, tuple[str, int]]:
        """Tables whose rows go by their own age: the column with it, and how long after it they are kept."""
        if self.spans_s is None:
            return _BY_AGE
        # What was sent of them is of no use without them.
        return _BY_AGE | {"spans": ("started_at", self.spans_s), "trace_exports": ("marked_at", self.spans_s)}


@dataclass(kw_only=True)
class Amount:
    """Rows of one table, and the bytes in them (without what indexes take besides)."""

    rows: int = 0
    bytes: int = 0


@dataclass(kw_only=True)
class Pruned:
    """What was deleted, or would be: of how many threads, and how much of each table; and of what nothing more could
    be deleted, and why."""

    threads: int = 0
    tables: dict[str, Amount] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)

    @property
    def rows(self) -> int:
        return sum(amount.rows for amount in self.tables.values())

    @property
    def bytes(self) -> int:
        return sum(amount.bytes for amount in self.tables.values())

    def add(self, table: str, rows: int, size: int) -> None:
        amount = self.tables.setdefault(table, Amount())
        amount.rows, amount.bytes = amount.rows + rows, amount.bytes + size

    def as_json(self) -> dict[str, Any]:
        tables = {table: asdict(amount) for table, amount in self.tables.items() if amount.rows}
        return {
            "threads": self.threads,
            "rows": self.rows,
            "bytes": self.bytes,
            "tables": tables,
            "failed": self.failed,
        }

    def in_words(self) -> str:
        """A line, and one for each table."""
        each = [f"  {table}: {a.rows:,} rows, {a.bytes:,} bytes" for table, a in self.tables.items() if a.rows]
        head = f"{self.threads:,} finished threads, {self.rows:,} rows, {self.bytes:,} bytes"
        return "\n".join([head, *each])


async def prune(conn: Connection, keep: Keep) -> Pruned:
    """Delete everything whose time is over; what was deleted. Safe to repeat, and beside others who do the same.

    A kind that the database refuses to delete holds no other up: it is logged, and `failed`. What rises is that the
    database has gone away.
    """
    done = Pruned()
    for what, batch, age_s in _kinds(keep):
        try:
            if batch is _prune_events:
                # Without endpoints and readers nobody else gives them any.
                await give_positions(conn)
            await _to_the_end(conn, done, batch, age_s)
        except psycopg.Error as exc:
            if conn.closed:
                raise
            done.failed[what] = f"{type(exc).__name__}: {exc}"
            log.exception("%s that are long over could not be deleted", what)
    return done


_Batch = Callable[[Connection, Pruned, int], Awaitable[bool]]


def _kinds(keep: Keep) -> Iterator[tuple[str, _Batch, int]]:
    """What is deleted, by which batches, and how old it is then."""
    if keep.checkpoints_s is not None:
        yield "threads", _prune_threads, keep.checkpoints_s
    if keep.events_s is not None:
        yield "events", _prune_events, keep.events_s
    for table, (column, age_s) in keep.by_age.items():
        yield table, partial(_prune_by_age, table=table, column=column), age_s


async def overdue(conn: Connection, keep: Keep) -> tuple[str, datetime] | None:
    """The thread that ended first of those that should have been pruned a day ago, and when it ended; None: no such."""
    if keep.checkpoints_s is None:
        return None
    row = await (
        await conn.execute(
            f"{_OVER_FOR_LONG} ORDER BY ended_at, thread_id LIMIT 1".encode(), {"age": keep.checkpoints_s + _DAY_S}
        )
    ).fetchone()
    return (row["thread_id"], row["ended_at"]) if row else None


async def foresee(conn: Connection, keep: Keep) -> Pruned:
    """What `prune` would delete now. It only reads."""
    found = Pruned()
    if keep.checkpoints_s is not None:
        await _foresee_threads(conn, found, keep.checkpoints_s)
    if keep.events_s is not None:
        sent = f"t.status = 'sent' AND t.event_id IN (SELECT t.id FROM events t WHERE {_FORGETTABLE})"
        await _count(conn, found, "webhook_deliveries", sent, age=keep.events_s)
        await _count(conn, found, "events", _FORGETTABLE, age=keep.events_s)
    for table, (column, age_s) in keep.by_age.items():
        await _count(conn, found, table, f"t.{column} {_OLDER}", age=age_s)
    return found


async def _to_the_end(conn: Connection, done: Pruned, batch: _Batch, age_s: int) -> None:
    """Batch after batch, until one says that it was the last."""
    more = True
    while more:
        async with conn.transaction():
            more = await batch(conn, done, age_s)


# Threads


_OVER_FOR_LONG = f"SELECT thread_id, ended_at FROM threads WHERE pruned_at IS NULL AND ended_at {_OLDER}"


async def _prune_threads(conn: Connection, done: Pruned, age_s: int) -> bool:
    """One batch of threads that ended longer ago; whether there may be more. Belongs in a transaction.

    The rows stay locked until its end, so none of these threads can be anything but over meanwhile. Whoever holds a
    thread's lock may be its driver: it is left for another time.
    """
    listed = await conn.execute(
        f"{_OVER_FOR_LONG} ORDER BY ended_at, thread_id LIMIT %(most)s FOR UPDATE SKIP LOCKED",
        {"age": age_s, "most": BATCH},
    )
    found = [row["thread_id"] for row in await listed.fetchall()]
    free = await conn.execute(
        "SELECT thread_id FROM unnest(%s::text[]) AS thread_id"
        " WHERE pg_try_advisory_xact_lock(hashtextextended(thread_id, 0))",
        (found,),
    )
    threads = [row["thread_id"] for row in await free.fetchall()]
    if not threads:
        return False
    for table, where in _WITH_THREADS.items():
        await _delete(conn, done, table, where, threads=threads)
    await conn.execute("UPDATE threads SET pruned_at = clock_timestamp() WHERE thread_id = ANY(%s)", (threads,))
    done.threads += len(threads)
    return len(found) == BATCH


async def _foresee_threads(conn: Connection, found: Pruned, age_s: int) -> None:
    page: dict[str, Any] = {"age": age_s, "most": BATCH, "at": None, "thread": None}
    while True:
        listed = await conn.execute(
            f"{_OVER_FOR_LONG} AND (ended_at, thread_id) > (coalesce(%(at)s::timestamptz, '-infinity'),"
            " coalesce(%(thread)s, '')) ORDER BY ended_at, thread_id LIMIT %(most)s",
            page,
        )
        rows = await listed.fetchall()
        if not rows:
            return
        found.threads += len(rows)
        page |= {"at": rows[-1]["ended_at"], "thread": rows[-1]["thread_id"]}
        for table, where in _WITH_THREADS.items():
            await _count(conn, found, table, where, threads=[row["thread_id"] for row in rows])


# Events


async def _prune_events(conn: Connection, done: Pruned, age_s: int) -> bool:
    """One batch of events that happened longer ago, with their deliveries; whether there may be more.

    Somebody may have had one of them sent again meanwhile: then its delivery is not `sent` any more, and both stay.
    """
    listed = await conn.execute(
        # Readers hear of what is forgotten by its position.
        f"SELECT t.id FROM events t WHERE {_FORGETTABLE} AND t.position IS NOT NULL"
        " ORDER BY t.created_at LIMIT %(most)s FOR UPDATE SKIP LOCKED",
        {"age": age_s, "most": BATCH},
    )
    found = [row["id"] for row in await listed.fetchall()]
    if not found:
        return False
    delivered = "t.event_id = ANY(%(events)s) AND t.status = 'sent'"
    await _delete(conn, done, "webhook_deliveries", delivered, events=found)
    row = await (
        await conn.execute(
            "WITH gone AS (DELETE FROM events t WHERE id = ANY(%(events)s)"
            " AND NOT EXISTS (SELECT FROM webhook_deliveries d WHERE d.event_id = t.id)"
            " RETURNING position, pg_column_size(t) AS size)"
            " SELECT count(*) AS rows, coalesce(sum(size), 0)::bigint AS size, max(position) AS position FROM gone",
            {"events": found},
        )
    ).fetchone()
    assert row is not None
    done.add("events", row["rows"], row["size"])
    # For whoever reads on from an event before these.
    await conn.execute(
        "UPDATE installation SET events_forgotten = greatest(events_forgotten, %s::bigint)", (row["position"],)
    )
    return len(found) == BATCH and row["rows"] > 0


# What they share


async def _prune_by_age(conn: Connection, done: Pruned, age_s: int, table: str, column: str) -> bool:
    oldest = (
        f"t.ctid = ANY(ARRAY(SELECT ctid FROM {table} WHERE {column} {_OLDER}"
        f" ORDER BY {column} LIMIT %(most)s FOR UPDATE SKIP LOCKED))"
    )
    return await _delete(conn, done, table, oldest, age=age_s, most=BATCH) == BATCH


async def _delete(conn: Connection, done: Pruned, table: str, where: str, **values: object) -> int:
    """Delete these rows of the table, which is `t` in `where`, and add them up; how many they are."""
    gone = f"WITH t AS (DELETE FROM {table} t WHERE {where} RETURNING pg_column_size(t) AS size)"
    return await _add_up(conn, done, table, f"{gone} SELECT count(*) AS rows, sum(size) AS size FROM t", values)


async def _count(conn: Connection, found: Pruned, table: str, where: str, **values: object) -> int:
    """Add up these rows, and leave them."""
    query = f"SELECT count(*) AS rows, sum(pg_column_size(t)) AS size FROM {table} t WHERE {where}"
    return await _add_up(conn, found, table, query, values)


async def _add_up(conn: Connection, to: Pruned, table: str, query: str, values: dict[str, object]) -> int:
    row = await (await conn.execute(query.encode(), values)).fetchone()
    assert row is not None
    to.add(table, row["rows"], int(row["size"] or 0))
    return int(row["rows"])
