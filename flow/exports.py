"""The traces that go out: of which threads something is still to be sent to which target, and what became of it.

A target is a name; its address and keys are settings of the processes that deliver. Whoever writes spans, or ends a
thread, leaves a mark, and whoever delivers turns marks into exports (`spread`): one standing row per target and thread,
due whenever the thread has more spans than the target. Without a target there are no marks, and what was for one that
is taken out of the settings goes with it.

Leases are those of `flow.notices`: a committed UPDATE, the call with no transaction open, and an outcome that is
recorded only where the attempt is still its own. A span keeps its id, so whatever is sent twice is the same span.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime

from flow.database import Connection
from flow.notices import raise_alarm

# Longer than a request can take (15 s) with the reading before it, short enough that a dead sender is not missed.
LEASE_S = 45.0

# Threads in one request.
MOST_THREADS = 50

# How long a target that took nothing is left alone.
_SHORTEST_WAIT_S, LONGEST_WAIT_S = 5.0, 300.0

_MARKS = 1000


@dataclass(frozen=True, kw_only=True)
class Export:
    """A thread of which something is to be sent to a target, leased. `sent`: the spans that the target has."""

    target: str
    thread_id: str
    version: int
    attempt: int
    sent: frozenset[str]


@dataclass(frozen=True, kw_only=True)
class Part:
    """Spans of one export that went out together, by their ids; `last`: there were no more."""

    export: Export
    spans: Sequence[str]
    last: bool


async def add_targets(conn: Connection, names: Collection[str]) -> None:
    """Hear of these targets: from now on every thread that has something new is sent there. One SELECT if known."""
    known = await conn.execute("SELECT name FROM trace_targets")
    if set(names) <= {row["name"] for row in await known.fetchall()}:
        return
    await conn.execute(
        "INSERT INTO trace_targets (name) SELECT unnest(%s::text[]) ON CONFLICT DO NOTHING", (sorted(names),)
    )


async def keep_targets(conn: Connection, names: Collection[str]) -> None:
    """The same, and every other target goes, with all that was to be sent there."""
    await add_targets(conn, names)
    others = await conn.execute(
        "SELECT FROM trace_targets WHERE name <> ALL(%(names)s)"
        " UNION ALL SELECT FROM trace_marks WHERE cardinality(%(names)s) = 0 LIMIT 1",
        {"names": sorted(names)},
    )
    if await others.fetchone() is None:
        return
    async with conn.transaction():
        # Whoever still sends there locks exports first, and the target after them.
        await conn.execute("LOCK TABLE trace_exports IN EXCLUSIVE MODE")
        await conn.execute("DELETE FROM trace_targets WHERE name <> ALL(%s)", (sorted(names),))
        if not names:
            await conn.execute("DELETE FROM trace_marks")


async def spread(conn: Connection) -> None:
    """Make an export of each mark, for each target; any number of processes may do so at a time."""
    while await _spread_some(conn) == _MARKS:
        pass


async def _spread_some(conn: Connection) -> int:
    row = await (
        await conn.execute(
            "WITH gone AS (DELETE FROM trace_marks WHERE ctid = ANY(ARRAY("
            "SELECT ctid FROM trace_marks LIMIT %s FOR UPDATE SKIP LOCKED)) RETURNING thread_id),"
            " made AS (INSERT INTO trace_exports AS e (target, thread_id)"
            # Everybody changes exports in this order: so nobody waits for somebody who waits for them.
            " SELECT name, thread_id FROM trace_targets, threads WHERE thread_id IN (SELECT thread_id FROM gone)"
            " ORDER BY 1, 2"
            # One that is leased, or put off, is sent after that.
            " ON CONFLICT (target, thread_id) DO UPDATE SET version = e.version + 1, marked_at = clock_timestamp(),"
            " due_at = coalesce(e.due_at, clock_timestamp()))"
            " SELECT count(*) AS count FROM gone",
            (_MARKS,),
        )
    ).fetchone()
    assert row is not None
    return int(row["count"])


async def lease(conn: Connection, target: str) -> list[Export]:
    """Take the threads that have been due for longest at this target, for LEASE_S; none if it may not be asked.

    Those that must be alone come after all others, one at a time.
    """
    for alone, most in ((False, MOST_THREADS), (True, 1)):
        rows = await conn.execute(
            "WITH next AS (SELECT e.thread_id FROM trace_exports e JOIN trace_targets t ON t.name = e.target"
            " WHERE e.target = %(target)s AND e.alone = %(alone)s AND e.due_at <= statement_timestamp()"
            " AND coalesce(t.quiet_until <= statement_timestamp(), true)"
            " ORDER BY e.due_at LIMIT %(most)s FOR UPDATE OF e SKIP LOCKED)"
            " UPDATE trace_exports e SET attempt = e.attempt + 1,"
            " due_at = clock_timestamp() + %(lease)s * interval '1 second'"
            " FROM next WHERE (e.target, e.thread_id) = (%(target)s, next.thread_id)"
            " RETURNING e.target, e.thread_id, e.version, e.attempt, e.sent",
            {"target": target, "alone": alone, "most": most, "lease": LEASE_S},
        )
        if leased := await rows.fetchall():
            return [Export(**(row | {"sent": frozenset(row["sent"])})) for row in leased]
    return []


async def mark_sent(conn: Connection, parts: Collection[Part]) -> None:
    """The target has these. What has something new meanwhile, or more than went out, is due again."""
    async with conn.transaction():
        for part in sorted(parts, key=lambda part: part.export.thread_id):
            await _keep(conn, part, error=None)
        # Where nothing was sent nobody has taken anything.
        if taking := {part.export.target for part in parts if part.spans}:
            await conn.execute(
                "UPDATE trace_targets SET failures = 0, quiet_until = NULL, error = NULL, alarm_of = NULL"
                " WHERE name = ANY(%s) AND failures > 0",
                (sorted(taking),),
            )


async def put_back(conn: Connection, exports: Iterable[Export], *, alone: bool = False) -> None:
    """They did not go out, or perhaps did: due again now, after all others; each by itself from now on, if `alone`."""
    async with conn.transaction():
        for export in sorted(exports, key=lambda export: export.thread_id):
            await conn.execute(
                "UPDATE trace_exports SET due_at = clock_timestamp(), alone = alone OR %s"
                " WHERE target = %s AND thread_id = %s AND attempt = %s",
                (alone, export.target, export.thread_id, export.attempt),
            )


async def put_off(
    conn: Connection,
    exports: Sequence[Export],
    *,
    error: str,
    wait_s: float | None = None,
    alarm: bool = False,
    alone: bool = False,
) -> None:
    """The target takes nothing at present: it is not asked for `wait_s`, else longer after each time that it did not.

    `alarm`: somebody must do something. `alone`: or it may be one of these that it cannot take.
    """
    target = exports[0].target
    async with conn.transaction():
        await put_back(conn, exports, alone=alone and len(exports) > 1)
        await conn.execute(
            "UPDATE trace_targets SET failures = failures + 1, error = %s, quiet_until = clock_timestamp() +"
            " greatest(1, coalesce(%s, least(%s, %s * 2 ^ least(failures, 16)))) * interval '1 second'"
            " WHERE name = %s",
            (error, wait_s, LONGEST_WAIT_S, _SHORTEST_WAIT_S, target),
        )
        if alarm:
            await _raise_once(conn, target, exports[0].thread_id)


async def give_up(conn: Connection, part: Part, *, error: str) -> None:
    """The target refuses these spans for good: they are not sent again. What comes after them is."""
    async with conn.transaction():
        await _keep(conn, part, error=error)
        await conn.execute(
            "UPDATE trace_targets SET failures = failures + 1, error = %s WHERE name = %s", (error, part.export.target)
        )
        await _raise_once(conn, part.export.target, part.export.thread_id)


async def _keep(conn: Connection, part: Part, *, error: str | None) -> None:
    export = part.export
    await conn.execute(
        "UPDATE trace_exports SET sent = sent || %(spans)s::text[], alone = false, error = %(error)s,"
        " due_at = CASE WHEN version > %(version)s OR NOT %(last)s THEN clock_timestamp() END"
        " WHERE target = %(target)s AND thread_id = %(thread)s AND attempt = %(attempt)s",
        {
            "spans": list(part.spans),
            "error": error,
            "version": export.version,
            "last": part.last,
            "target": export.target,
            "thread": export.thread_id,
            "attempt": export.attempt,
        },
    )


async def _raise_once(conn: Connection, target: str, thread_id: str) -> None:
    """Not by a thread of a workspace, whose alarms are told there: the log and `doctor` tell the operators."""
    first = await conn.execute(
        "UPDATE trace_targets SET alarm_of = t.thread_id FROM threads t"
        " WHERE t.thread_id = %s AND t.workspace IS NULL AND name = %s AND alarm_of IS NULL",
        (thread_id, target),
    )
    if first.rowcount:
        await raise_alarm(conn, thread_id)


@dataclass(frozen=True, kw_only=True)
class TargetState:
    """How a target fares: `waiting` threads have something that it has not got, the first of them since `oldest`."""

    name: str
    error: str | None
    waiting: int
    oldest: datetime | None


async def target_states(conn: Connection) -> dict[str, TargetState]:
    """Every target that was heard of, by its name."""
    rows = await conn.execute(
        "SELECT t.name, t.error, count(e.thread_id) AS waiting, min(e.marked_at) AS oldest FROM trace_targets t"
        " LEFT JOIN trace_exports e ON e.target = t.name AND e.due_at IS NOT NULL GROUP BY t.name ORDER BY t.name"
    )
    return {row["name"]: TargetState(**row) for row in await rows.fetchall()}
