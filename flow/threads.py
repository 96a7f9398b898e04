"""The table that is also the queue: one row per thread, due when it wants to be driven.

The caller owns the transaction. Whoever drives holds the thread's advisory lock on the same connection.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from psycopg import sql
from psycopg.types.json import Json, Jsonb

from flow import notices
from flow.audit import door_of, record
from flow.database import RINGS, Connection, Page, is_present, newest, ring
from flow.errors import FlowError, ThreadExists, UnknownThread
from flow.model import CLAIM_FLOW, OVER, Claim, Person, Thread, flow_key
from flow.spans import NONE, WRITTEN
from flow.text import digest
from flow.workspaces import check_open, reaches

# With the back-off below the last of them is about two hours after the first.
MAX_ATTEMPTS = 20

_COLUMNS = sql.SQL(
    "thread_id, flow, flow_version, input, requested_by, status, reason, wakes, attempts, due_at, created_at,"
    " coalesce(due_at > clock_timestamp() AND reason IS NOT NULL, false) AS put_off, result, progress_done,"
    " progress_total, changed, workspace"
)
# From 1 s to 10 min, and a quarter of jitter either way: failures that came together do not return together.
_BACKOFF = sql.SQL(
    "clock_timestamp() + least(600, power(2, least(attempts, 10) - 1)) * (0.75 + random() / 2) * interval '1 second'"
)


async def insert_thread(
    conn: Connection,
    *,
    thread_id: str,
    flow: str,
    flow_version: str,
    input: dict[str, Any],
    requested_by: str,
    filed_by: str | None = None,
    traceparent: str | None = None,
    workspace: str | None = None,
) -> Thread:
    """Start a thread: its row is due at once. The same input again returns the row as it is now.

    `filed_by`: the key of whoever files it for the one who asks; None: that is the caller's own code, in Python.
    `traceparent`: the caller's trace context (`spans.parse_traceparent`), which the thread's trace goes on.
    `workspace`: in which of several it is started. Raises ThreadExists if the id was used with another flow, input or
    workspace; UnknownWorkspace, or WorkspaceClosed where nothing is filed.
    """
    query = sql.SQL(
        "INSERT INTO threads (thread_id, flow, flow_version, input, requested_by, traceparent, workspace)"
        " VALUES (%s, %s, %s, %s, %s, %s, %s) ON CONFLICT (thread_id) DO NOTHING RETURNING {}"
    ).format(_COLUMNS)
    async with conn.transaction():
        if workspace is not None:
            await check_open(conn, workspace)
        values = (thread_id, flow, flow_version, Jsonb(input), requested_by, traceparent, workspace)
        inserted = await conn.execute(query, values)
        if row := await inserted.fetchone():
            thread = _thread(row)
            await _audit_start(conn, thread, filed_by or "python")
        else:
            thread = await thread_of(conn, thread_id)
            if thread.workspace != workspace:
                # What it is, is for those of its own to know.
                raise ThreadExists(thread_id, "another workspace")
            if thread.flow != flow or not await _is_input(conn, thread, input):
                raise ThreadExists(thread_id, _what_it_was(thread, flow, input))
        await ring(conn)
    return thread


async def _audit_start(conn: Connection, thread: Thread, filed_by: str) -> None:
    """What was filed is told by its hash: the log never forgets, and a note or another flow's input may be private."""
    shown = {name: said for name in ("amount", "currency", "payee") if isinstance(said := thread.input.get(name), str)}
    await record(
        conn,
        "thread.started",
        who=filed_by,
        door=door_of(filed_by),
        thread_id=thread.thread_id,
        for_whom=None if thread.requested_by == filed_by else thread.requested_by,
        data={"flow": thread.flow, "version": thread.flow_version, "input_sha256": digest(thread.input), **shown},
    )


async def _is_input(conn: Connection, thread: Thread, input: dict[str, Any]) -> bool:
    """Whether the thread was started with this. As Postgres compares: it gives some numbers back in another form."""
    if thread.input == input:
        return True
    query = "SELECT input = %s AS same FROM threads WHERE thread_id = %s"
    row = await (await conn.execute(query, (Jsonb(input), thread.thread_id))).fetchone()
    return row is not None and bool(row["same"])


async def thread_of(conn: Connection, thread_id: str) -> Thread:
    """The thread as it is now. Raises UnknownThread."""
    query = sql.SQL("SELECT {} FROM threads WHERE thread_id = %s").format(_COLUMNS)
    row = await (await conn.execute(query, (thread_id,))).fetchone()
    if row is None:
        raise UnknownThread(thread_id)
    return _thread(row)


async def thread_for(conn: Connection, person: Person, thread_id: str) -> Thread:
    """The same for somebody who says the id. What is of another workspace is as unknown to them as what is not there.

    Raises UnknownThread.
    """
    thread = await thread_of(conn, thread_id)
    if not reaches(person, thread.workspace):
        raise UnknownThread(thread_id)
    return thread


async def threads_of(conn: Connection, thread_ids: Sequence[str]) -> dict[str, Thread]:
    """Those of these threads that exist, by thread id."""
    query = sql.SQL("SELECT {} FROM threads WHERE thread_id = ANY(%s)").format(_COLUMNS)
    rows = await conn.execute(query, (list(thread_ids),))
    return {row["thread_id"]: _thread(row) for row in await rows.fetchall()}


async def latest_threads(
    conn: Connection,
    *,
    status: str | None,
    limit: int,
    before: tuple[datetime, str] | None = None,
    only: Page | None = None,
) -> list[Thread]:
    """The newest threads first, by index whatever the table's size; those after `before` (created_at, thread_id), and
    only such as `only` says."""
    page = newest(("created_at", "thread_id"), before, only)
    query = sql.SQL(
        "SELECT {} FROM threads WHERE {} AND {} ORDER BY created_at DESC, thread_id LIMIT %(limit)s"
    ).format(_COLUMNS, sql.SQL("status = %(status)s" if status else "true"), page.where)
    rows = await conn.execute(query, {"status": status, "limit": limit, **page.values})
    return [_thread(row) for row in await rows.fetchall()]


# Locks


async def try_lock(conn: Connection, thread_id: str) -> bool:
    """Become the thread's only driver for as long as this connection lives, or until `unlock`."""
    row = await (
        await conn.execute("SELECT pg_try_advisory_lock(hashtextextended(%s, 0)) AS got", (thread_id,))
    ).fetchone()
    assert row is not None
    return bool(row["got"])


async def unlock(conn: Connection, thread_id: str) -> None:
    await conn.execute("SELECT pg_advisory_unlock(hashtextextended(%s, 0))", (thread_id,))


# Driving


async def take(conn: Connection, thread_id: str) -> Thread | None:
    """Begin a drive, under the thread's lock: committed before the graph runs, so that a killed drive is counted.

    From the second attempt on the thread is also put off by the back-off. None if it is over, used up, or left to a
    person.
    """
    query = sql.SQL(
        "UPDATE threads SET driver_pid = pg_backend_pid(), driven_at = clock_timestamp(), attempts = attempts + 1,"
        " reason = NULL, due_at = CASE WHEN attempts > 0 THEN {backoff} ELSE due_at END"
        " WHERE thread_id = %s AND status <> ALL(%s) AND attempts < %s"
        # Nobody has woken it since it was left to a person.
        " AND (due_at IS NOT NULL OR status NOT IN ('stuck', 'unknown', 'unavailable')) RETURNING {columns},"
        # As the row was: a driver that ended, however it did, has left it.
        " (SELECT was.driver_pid FROM threads was WHERE was.thread_id = threads.thread_id) IS NOT NULL AS taken_over,"
        " (SELECT was.driven_at FROM threads was WHERE was.thread_id = threads.thread_id) IS NOT NULL AS driven_before"
    ).format(backoff=_BACKOFF, columns=_COLUMNS)
    row = await (await conn.execute(query, (thread_id, list(OVER), MAX_ATTEMPTS))).fetchone()
    return _thread(row) if row else None


async def leave(
    conn: Connection,
    thread: Thread,
    *,
    status: str,
    reason: str | None = None,
    result: Any = None,
    spans: str = NONE,
) -> bool:
    """End a drive: the thread waits or is over. False if a reason to drive was added since it was taken.

    `result` is for the status `done`; `spans` are the drive's. It rings: somebody may be watching the row.
    """
    rows = await conn.execute(
        "WITH ended AS (UPDATE threads SET status = %(status)s, reason = %(reason)s, result = %(result)s,"
        " due_at = NULL, attempts = 0, driver_pid = NULL WHERE thread_id = %(thread_id)s AND wakes = %(wakes)s"
        f" RETURNING thread_id), {WRITTEN} SELECT {RINGS} FROM ended",
        {
            "status": status,
            "reason": reason,
            "result": Json(result) if status == "done" else None,
            "thread_id": thread.thread_id,
            "wakes": thread.wakes,
            "spans": spans,
        },
    )
    return await rows.fetchone() is not None


async def put_off(conn: Connection, thread_id: str, reason: str, *, spans: str = NONE) -> Thread:
    """A drive failed: keep the reason and try again later, or give up as `stuck` after MAX_ATTEMPTS."""
    query = sql.SQL(
        "WITH ended AS (UPDATE threads SET reason = %(reason)s, driver_pid = NULL,"
        " status = CASE WHEN attempts >= %(most)s THEN 'stuck' WHEN status = 'unavailable' THEN 'running'"
        " ELSE status END,"
        " due_at = CASE WHEN attempts >= %(most)s THEN NULL ELSE {} END"
        " WHERE thread_id = %(thread_id)s RETURNING {}), {} SELECT * FROM ended"
    ).format(_BACKOFF, _COLUMNS, sql.SQL(WRITTEN))
    values = {"reason": reason, "most": MAX_ATTEMPTS, "thread_id": thread_id, "spans": spans}
    row = await (await conn.execute(query, values)).fetchone()
    if row is None:
        raise UnknownThread(thread_id)
    await ring(conn)
    return _thread(row)


async def hand_on(conn: Connection, thread_id: str, *, spans: str = NONE) -> None:
    """A drive has done some steps and leaves the rest to the next: due now, and nothing has failed."""
    await conn.execute(
        "WITH ended AS (UPDATE threads SET status = 'running', due_at = clock_timestamp(), attempts = 0, reason = NULL,"
        f" driver_pid = NULL WHERE thread_id = %(thread_id)s RETURNING thread_id), {WRITTEN} SELECT",
        {"thread_id": thread_id, "spans": spans},
    )
    await ring(conn)


async def keep_progress(conn: Connection, thread_id: str, done: int, total: int) -> None:
    """How many steps of a long flow are done. It rings: somebody may be watching."""
    await conn.execute(
        "UPDATE threads SET progress_done = %s, progress_total = %s WHERE thread_id = %s", (done, total, thread_id)
    )
    await ring(conn)


async def mark_unknown(conn: Connection, thread_id: str) -> None:
    """It was given up, and nobody knows whether it was paid."""
    await conn.execute("UPDATE threads SET status = 'unknown' WHERE thread_id = %s", (thread_id,))


async def wake(conn: Connection, thread_id: str) -> None:
    """Add a reason to drive the thread now. Belongs in the transaction that made the reason true."""
    rows = await conn.execute(
        "UPDATE threads t SET wakes = wakes + 1, due_at = clock_timestamp(), status = 'running', attempts = 0,"
        " reason = NULL FROM (SELECT thread_id, status FROM threads WHERE thread_id = %s FOR NO KEY UPDATE) was"
        f" WHERE t.thread_id = was.thread_id AND was.status <> ALL(%s) RETURNING was.status, {RINGS}",
        (thread_id, list(OVER)),
    )
    row = await rows.fetchone()
    if row is not None and row["status"] in ("stuck", "unknown"):
        # Its cards say that somebody must look at it.
        await notices.change_cards(conn, thread_id)


async def retry(conn: Connection, thread_id: str, *, by: str) -> None:
    """Let a thread that is stuck or put off be driven once more, in a transaction of its own. Raises UnknownThread, and
    FlowError if there is nothing to try again."""
    async with conn.transaction():
        thread = await thread_of(conn, thread_id)
        if thread.due_at is None and thread.status not in ("stuck", "unavailable"):
            raise FlowError(f"thread {thread_id} is {thread.status}: there is nothing to try again")
        was = {"status": thread.status, "reason": thread.reason}
        await record(conn, "thread.retried", who=by, door=door_of(by), thread_id=thread_id, data=was)
        await wake(conn, thread_id)


# Flows that are here, and flows that are not


async def set_aside(conn: Connection, thread_id: str) -> Thread:
    """Nobody here has its flow: it is `unavailable` until a worker comes that has, unless it waits or is over."""
    await conn.execute(
        f"UPDATE threads SET {_UNAVAILABLE} WHERE thread_id = %s AND due_at IS NOT NULL AND status <> ALL(%s)",
        (thread_id, list(OVER)),
    )
    await ring(conn)
    return await thread_of(conn, thread_id)


_UNAVAILABLE = """status = 'unavailable', due_at = NULL, attempts = 0, driver_pid = NULL,
    reason = 'no worker has the flow ' || flow || ' in version ' || flow_version || ': name its module in FLOWS'"""


async def settle_flows(conn: Connection, flows: Sequence[str]) -> tuple[int, int]:
    """Threads whose flow a worker has again are due, and those that nobody has had for a while are set aside.

    `flows` are the keys of the caller's, which are not missing, even if it does not say that it is here. How many were
    taken up, and how many were set aside. By index, and one small step for each flow that is due, however many threads
    there are.
    """
    async with conn.transaction():
        names, versions = _split(flows)
        taken_up = await conn.execute(
            "UPDATE threads SET status = 'running', due_at = clock_timestamp(), reason = NULL"
            " WHERE status = 'unavailable' AND (flow, flow_version) IN"
            " (SELECT * FROM unnest(%s::text[], %s::text[]))",
            (names, versions),
        )
        due = await conn.execute(_DUE_FLOWS)
        missing = [
            (row["flow"], row["flow_version"])
            for row in await due.fetchall()
            if (key := flow_key(row["flow"], row["flow_version"])) not in flows and not await is_present(conn, key)
        ]
        set_aside = 0
        for name, version in missing:
            rows = await conn.execute(
                f"UPDATE threads SET {_UNAVAILABLE} WHERE thread_id IN (SELECT thread_id FROM threads"
                " WHERE flow = %s AND flow_version = %s AND due_at < statement_timestamp() - %s * interval '1 second'"
                # One that is being driven is not waiting for anybody.
                " AND NOT EXISTS (SELECT FROM pg_stat_activity a WHERE a.pid = threads.driver_pid)"
                " ORDER BY due_at LIMIT %s FOR UPDATE SKIP LOCKED) RETURNING thread_id, workspace",
                (name, version, _GRACE_S, _MOST_SET_ASIDE),
            )
            found = await rows.fetchall()
            set_aside += len(found)
            # One alarm tells of all that wait for the same; in each workspace, whose alarms go to its own channel.
            for thread_id in {row["workspace"]: row["thread_id"] for row in reversed(found)}.values():
                await notices.raise_alarm(conn, thread_id)
        if taken_up.rowcount or set_aside:
            await ring(conn)
    return taken_up.rowcount, set_aside


# A worker that is being replaced is not missed.
_GRACE_S = 10.0
# At each look: the next one goes on.
_MOST_SET_ASIDE = 1000

# Every flow that has a thread which is due: one look into the index for each.
_DUE_FLOWS = """
    WITH RECURSIVE kinds AS (
        (SELECT flow, flow_version FROM threads WHERE due_at IS NOT NULL ORDER BY flow, flow_version LIMIT 1)
        UNION ALL
        SELECT following.flow, following.flow_version FROM kinds, LATERAL (
            SELECT flow, flow_version FROM threads
            WHERE due_at IS NOT NULL AND (flow, flow_version) > (kinds.flow, kinds.flow_version)
            ORDER BY flow, flow_version LIMIT 1
        ) following
    )
    SELECT flow, flow_version FROM kinds
"""


def _split(flows: Sequence[str]) -> tuple[list[str], list[str]]:
    pairs = [key.partition("@") for key in flows]
    return [name for name, _, _ in pairs], [version for _, _, version in pairs]


# What a worker sees


@dataclass(frozen=True, kw_only=True)
class Due:
    """A thread that wants to be driven. `holder`: the backend pid of the session that holds it, if any; `overdue`: for
    longer than a drive may take."""

    thread_id: str
    holder: int | None
    overdue: bool

    @property
    def held(self) -> bool:
        return self.holder is not None


# The locks of threads that are held: the drives under way.
_LOCKS = """
    locks AS MATERIALIZED (SELECT pid, (classid::bigint << 32) | objid::bigint AS key FROM pg_locks
    WHERE locktype = 'advisory' AND objsubid = 1 AND granted
    AND database = (SELECT oid FROM pg_database WHERE datname = current_database()))
"""
# The session that holds the lock of thread t, if any, and whether it overstays: a drive by when it was taken, and a
# driver that has not taken it yet, or has left it already, by when it last did anything.
_HOLDER = """
    locks l ON l.key = hashtextextended(t.thread_id, 0) LEFT JOIN pg_stat_activity a ON a.pid = l.pid
"""
_OVERSTAYS = """
    CASE WHEN l.pid = t.driver_pid THEN t.driven_at ELSE a.state_change END
    < clock_timestamp() - %(timeout)s * interval '1 second'
"""


async def due_threads(conn: Connection, *, flows: Sequence[str], drive_timeout_s: float, limit: int) -> Sequence[Due]:
    """What is due now of these flows (their keys), oldest first, and who of it is held.

    At most `limit`, and as many more as are being driven: all of these may be the oldest.
    """
    names, versions = _split(flows)
    rows = await conn.execute(
        f"WITH {_LOCKS}, most AS (SELECT %(limit)s + count(*) AS rows FROM locks)"
        f" SELECT t.thread_id, l.pid AS holder, coalesce({_OVERSTAYS}, false) AS overdue"
        " FROM (SELECT due.* FROM unnest(%(names)s::text[], %(versions)s::text[]) AS ours (flow, flow_version),"
        " LATERAL (SELECT thread_id, due_at, driver_pid, driven_at FROM threads WHERE threads.flow = ours.flow"
        # No clock_timestamp() here: the index could not be asked for it, and all that is put off would be read.
        " AND threads.flow_version = ours.flow_version AND due_at <= statement_timestamp()"
        " ORDER BY due_at LIMIT (SELECT rows FROM most)) due ORDER BY due_at LIMIT (SELECT rows FROM most)) t"
        f" LEFT JOIN {_HOLDER} ORDER BY t.due_at",
        {"timeout": drive_timeout_s, "limit": limit, "names": names, "versions": versions},
    )
    return [Due(**row) for row in await rows.fetchall()]


async def evict_driver(conn: Connection, thread_id: str, *, drive_timeout_s: float) -> bool:
    """End the session of a driver that overstayed; its lock and its pen go with it.

    One statement matches lock, pid and time, so a driver that has finished meanwhile is never hit. Raises
    psycopg.errors.InsufficientPrivilege for a session of a role that is not ours to end.
    """
    row = await (
        await conn.execute(
            f"WITH {_LOCKS} SELECT pg_terminate_backend(l.pid, 2000) AS gone FROM threads t JOIN {_HOLDER}"
            f" WHERE t.thread_id = %(thread_id)s AND {_OVERSTAYS}",
            {"thread_id": thread_id, "timeout": drive_timeout_s},
        )
    ).fetchone()
    return bool(row and row["gone"])


def _thread(row: dict[str, Any]) -> Thread:
    done, total = row.pop("progress_done"), row.pop("progress_total")
    return Thread(**row, progress=None if done is None else (done, total))


def _what_it_was(thread: Thread, flow: str, input: dict[str, Any]) -> str:
    """In which way the thread is another one. Fields are named, not shown: whoever starts threads may not read them."""
    if thread.flow != flow:
        return f"flow {thread.flow}"
    if flow != CLAIM_FLOW:
        lacks = object()
        names = sorted(n for n in {*thread.input, *input} if thread.input.get(n, lacks) != input.get(n, lacks))
        return f"flow {flow}: another {', '.join(names)}"
    claim = Claim.of_input(thread.input)
    return f"{claim.amount} {claim.currency}" + (f" to {claim.payee}" if claim.payee else "")
