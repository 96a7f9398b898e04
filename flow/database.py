"""Connections, migrations, the bell, and the locks that say who is here.

Every connection is autocommit with dict rows, which LangGraph's saver needs; a transaction is always visible as
`async with conn.transaction()`. Knows nothing of threads or approvals.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import re
from collections.abc import AsyncGenerator, AsyncIterator
from dataclasses import dataclass
from datetime import datetime
from enum import IntEnum
from importlib import resources
from typing import Any, Literal

import psycopg
from psycopg import AsyncConnection, errors, sql
from psycopg.conninfo import conninfo_to_dict, make_conninfo
from psycopg.rows import DictRow, dict_row

from flow.embedded import embedded_url
from flow.errors import DatabaseUnavailable, LocksUnusable, SettingError
from flow.settings import Settings

Connection = AsyncConnection[DictRow]
Role = Literal["drive", "door", "listen"]

OLDEST_POSTGRES = 140000

# The truth behind the bell: work that nobody announced is found this late.
POLL_S = 2.0

# Whoever tells the outside lets drives go first for so long: most claims are paid by then, and their cards change once.
OUTSIDE_AFTER_S = 0.1

# A database that does not answer an empty query for so long is away.
_SILENCE_S = 10.0

_CHANNEL = "claim_flow"

# The migration that makes the audit log.
_FIRST_AUDITED = 13

# First half of our two-integer advisory keys ("clfl"); thread locks use the one-bigint space, so they never meet.
_LOCK_CLASS = 0x636C666C
# The same for "I drive this flow" ("clff").
_FLOW_CLASS = 0x636C6666


class Lock(IntEnum):
    """Second half of the key: what the lock says."""

    MIGRATION = 1
    WORKER = 2
    DELIVERER = 3
    SELF_TEST = 4
    EVENTS = 5
    WEBHOOKS = 6
    AUDIT = 7


# What every connection of ours is. LangGraph's saver needs autocommit and dict rows.
CONNECTION: dict[str, Any] = {"autocommit": True, "prepare_threshold": 0, "row_factory": dict_row}

# The database is not there, or is not the one that takes writes: a full disk of a managed server, a failover.
AWAY = (psycopg.OperationalError, errors.ReadOnlySqlTransaction, DatabaseUnavailable)

# A killed process frees its locks within half a second even while its backend runs a statement; a machine that
# vanished frees them within 25 s (libpq's own keepalives only notice a dead server).
_EVERY_SESSION = {
    "client_connection_check_interval": "500ms",
    "tcp_keepalives_idle": "10",
    "tcp_keepalives_interval": "5",
    "tcp_keepalives_count": "3",
    "tcp_user_timeout": "25000",
    "timezone": "UTC",
}
_LIBPQ = {"keepalives_idle": 10, "keepalives_interval": 5, "keepalives_count": 3, "tcp_user_timeout": 25_000}
_SESSION: dict[Role, dict[str, str]] = {
    # A drive that hangs inside a transaction of ours loses it, and its thread lock with it.
    "drive": {"idle_in_transaction_session_timeout": "60s"},
    # Slack gives a click three seconds; a door that cannot lock in two says so in time.
    "door": {"lock_timeout": "2s", "idle_in_transaction_session_timeout": "10s"},
    "listen": {},
}


def database_url(settings: Settings) -> str:
    """DATABASE_URL, checked, or the URL of the embedded server, which is started if need be."""
    if settings.database_url is None:
        return embedded_url(settings.claim_flow_home)
    url = settings.database_url.get_secret_value()
    try:
        conninfo_to_dict(url)
    except psycopg.ProgrammingError:
        # Its own message repeats the URL, password included.
        raise SettingError(
            "DATABASE_URL is not a libpq URL such as postgresql://user@host/name (special characters as %40)"
        ) from None
    return url


def session_conninfo(url: str, role: Role) -> str:
    """The URL with this role's session settings and our defaults added; what the URL says itself stays."""
    given: dict[str, Any] = conninfo_to_dict(url)
    options = " ".join(f"-c {name}={value}" for name, value in (_EVERY_SESSION | _SESSION[role]).items())
    return make_conninfo(
        url,
        options=f"{options} {given.get('options') or ''}".strip(),
        application_name=given.get("application_name") or f"claim_flow {role}",
        connect_timeout=given.get("connect_timeout") or 10,
        # The same the other way round: a server that vanished is missed within 25 s, not within TCP's 15 minutes.
        **{name: given.get(name) or value for name, value in _LIBPQ.items()},
    )


async def connect(url: str, role: Role) -> Connection:
    """A new connection for this role. Raises DatabaseUnavailable."""
    try:
        conn: Connection = await AsyncConnection.connect(session_conninfo(url, role), **CONNECTION)
    except psycopg.OperationalError as exc:
        raise DatabaseUnavailable(f"no connection to the database: {str(exc).strip()} (DATABASE_URL)") from exc
    if wrong := _unusable(conn):
        await conn.close()
        raise DatabaseUnavailable(wrong)
    return conn


def _unusable(conn: Connection) -> str | None:
    """Why this server cannot be used, from what it said on connecting; None if it can."""
    if conn.info.server_version < OLDEST_POSTGRES:
        return f"Postgres {conn.info.server_version // 10000} is too old: 14 is the oldest that works"
    if (encoding := conn.info.parameter_status("server_encoding")) != "UTF8":
        return f"the database {conn.info.dbname} has the encoding {encoding}: create one with ENCODING 'UTF8'"
    return None


@dataclass(frozen=True, kw_only=True)
class Page:
    """A condition, and the values of its parameters."""

    where: sql.Composable
    values: dict[str, Any]


def newest(columns: tuple[str, str], before: tuple[datetime, str] | None, only: Page | None = None) -> Page:
    """The rows that follow `before` in the order (time DESC, name), or all of them, of those that `only` has.

    An index with this order finds them without reading what comes earlier.
    """
    only = only or Page(where=sql.SQL("true"), values={})
    if before is None:
        return only
    where = sql.SQL("({at} <= %(before_at)s AND ({at} < %(before_at)s OR {name} > %(before_name)s))").format(
        at=sql.Identifier(columns[0]), name=sql.Identifier(columns[1])
    )
    values = only.values | {"before_at": before[0], "before_name": before[1]}
    return Page(where=sql.SQL("{} AND {}").format(only.where, where), values=values)


# Migrations


async def ensure_schema(url: str, conn: Connection, *, by: str = "python") -> None:
    """Bring our tables up to date; one SELECT when they are. Safe in any number of processes at once.

    `by`: who is to be named in the audit log.
    """
    known = _migrations()
    if await _schema_version(conn) >= known[-1][0]:
        return
    # It needs a connection itself.
    from flow.audit import door_of, record

    async with await connect(url, "drive") as own, exclusively(own, Lock.MIGRATION):
        await own.execute(
            "CREATE TABLE IF NOT EXISTS claim_flow_migrations ("
            "version integer PRIMARY KEY, applied_at timestamptz NOT NULL DEFAULT clock_timestamp())"
        )
        present = await _schema_version(own)
        for version, statements in known:
            if version > present:
                async with own.transaction():
                    await own.execute(statements.encode(), prepare=False)
                    await own.execute("INSERT INTO claim_flow_migrations (version) VALUES (%s)", (version,))
                    if version >= _FIRST_AUDITED:
                        data = {"version": version}
                        await record(own, "database.migrated", who=by, door=door_of(by), data=data)


@contextlib.asynccontextmanager
async def exclusively(conn: Connection, lock: Lock) -> AsyncIterator[None]:
    """Hold one of our locks alone. It is polled for: a waiter inside a blocking lock function holds a snapshot, and
    CREATE INDEX CONCURRENTLY (in LangGraph's own set-up) waits for that one: a deadlock."""
    for _ in range(1200):
        row = await (await conn.execute("SELECT pg_try_advisory_lock(%s, %s) AS got", (_LOCK_CLASS, lock))).fetchone()
        if row is not None and row["got"]:
            break
        await asyncio.sleep(0.05)
    else:
        raise DatabaseUnavailable("another process has been setting up this database for a minute: look at it, or wait")
    try:
        yield
    finally:
        if not conn.closed:
            await conn.execute("SELECT pg_advisory_unlock(%s, %s)", (_LOCK_CLASS, lock))


async def lock_until_commit(conn: Connection, lock: Lock) -> None:
    """Hold one of our locks alone until the surrounding transaction ends."""
    await conn.execute("SELECT pg_advisory_xact_lock(%s, %s)", (_LOCK_CLASS, lock))


async def try_lock_until_commit(conn: Connection, lock: Lock) -> bool:
    """The same, if nobody has it."""
    row = await (await conn.execute("SELECT pg_try_advisory_xact_lock(%s, %s) AS got", (_LOCK_CLASS, lock))).fetchone()
    assert row is not None
    return bool(row["got"])


def _migrations() -> list[tuple[int, str]]:
    """Every numbered file of flow/migrations, in order."""
    folder = resources.files("flow") / "migrations"
    found = [(int(m[1]), file) for file in folder.iterdir() if (m := re.match(r"(\d{4})_.*\.sql$", file.name))]
    return [(version, file.read_text()) for version, file in sorted(found, key=lambda pair: pair[0])]


async def _schema_version(conn: Connection) -> int:
    try:
        row = await (await conn.execute("SELECT max(version) AS version FROM claim_flow_migrations")).fetchone()
    except errors.UndefinedTable:
        return 0
    return (row and row["version"]) or 0


# The bell


async def ring(conn: Connection) -> None:
    """Wake workers and deliverers when the surrounding transaction commits. It carries nothing."""
    await conn.execute(f"NOTIFY {_CHANNEL}")


# The same as a value that a statement returns: it rings for each row that there is, without a round trip of its own.
RINGS = f"pg_notify('{_CHANNEL}', '')"


async def listen(conn: Connection) -> None:
    await conn.execute(f"LISTEN {_CHANNEL}")


async def wait_for_bell(conn: Connection, *, timeout_s: float) -> bool:
    """True at the first bell, False after `timeout_s` without one."""
    rang = False
    # To its end: a generator left half-way keeps the connection to itself until it is collected.
    async for _ in conn.notifies(timeout=timeout_s, stop_after=1):
        rang = True
    return rang


async def wakes(
    url: str, *, present_as: tuple[Lock | str, ...] = (), polls: bool = True, after_s: float = 0.0
) -> AsyncGenerator[bool, None]:
    """Yield True at every bell and, with `polls`, every POLL_S, and False while the database is away, for ever.

    The first True comes at once, and again after each reconnect: what happened meanwhile was not announced.
    `after_s`: a bell is heard so much later, and with it all that have rung until then.
    Close it (`contextlib.aclosing`) to let go.
    While connected the process holds `present_as` in share mode, which is how others see that it is here: locks of
    ours, and the keys of flows that it drives.
    """
    pause = 0.1
    while True:
        try:
            async with await connect(url, "listen") as conn:
                for lock in present_as:
                    await conn.execute("SELECT pg_advisory_lock_shared(%s, %s)", advisory_key(lock))
                await listen(conn)
                pause = 0.1
                rang = True
                while not conn.closed:
                    if rang or polls:
                        yield True
                    rang = await wait_for_bell(conn, timeout_s=POLL_S)
                    if rang and after_s:
                        await asyncio.sleep(after_s)
                        await wait_for_bell(conn, timeout_s=0)
                    if not rang:
                        # A connection that died in silence is found only by using it.
                        async with asyncio.timeout(_SILENCE_S):
                            await conn.execute("SELECT")
        except (*AWAY, TimeoutError):
            yield False
            await asyncio.sleep(pause)
            pause = min(pause * 2, POLL_S)


async def is_present(conn: Connection, lock: Lock | str) -> bool:
    """Whether any process holds this lock, or drives the flow with this key. Read, never probed by locking:
    simultaneous probes would see each other."""
    row = await (
        await conn.execute(
            "SELECT EXISTS (SELECT FROM pg_locks WHERE locktype = 'advisory' AND classid = %s AND objid = %s"
            " AND objsubid = 2 AND granted"
            " AND database = (SELECT oid FROM pg_database WHERE datname = current_database())) AS here",
            advisory_key(lock),
        )
    ).fetchone()
    assert row is not None
    return bool(row["here"])


def advisory_key(lock: Lock | str) -> tuple[int, int]:
    """Both halves of an advisory lock's key; a flow's second half is 31 bits of a hash of its name and version."""
    if isinstance(lock, Lock):
        return _LOCK_CLASS, int(lock)
    return _FLOW_CLASS, int.from_bytes(hashlib.sha256(lock.encode()).digest()[:4]) >> 1


# The self-test of locks


async def check_locks(url: str) -> None:
    """Prove that session locks, and our session settings, hold through this connection. Raises LocksUnusable.

    Behind a transaction pooler two clients may share one server session: both would get every lock, or lose it
    between two statements.
    """
    try:
        holds = await _locks_hold(url)
    except (errors.DuplicatePreparedStatement, errors.InvalidSqlStatementName, errors.LockNotAvailable):
        holds = False
    if not holds:
        raise LocksUnusable(
            "session locks do not hold through DATABASE_URL (a transaction pooler such as PgBouncer?):"
            " two processes could pay one thread. Give the server's own address, or a pooler in session mode that"
            " passes `options` on"
        )


async def _locks_hold(url: str) -> bool:
    async with await connect(url, "drive") as one, await connect(url, "drive") as two:
        key = (_LOCK_CLASS, int(Lock.SELF_TEST))
        await one.execute("SET lock_timeout = '5s'", prepare=False)
        await one.execute("SELECT pg_advisory_lock_shared(%s, %s)", key)
        before = await _backend_pid(one)
        async with two.transaction():
            row = await (
                await two.execute(
                    # Gone with its transaction: behind a pooler it would stay with a session that others get.
                    "SELECT pg_try_advisory_xact_lock(%s, %s) AS got,"
                    " current_setting('client_connection_check_interval') AS interval",
                    key,
                )
            ).fetchone()
            other = await _backend_pid(two)
            after = await _backend_pid(one)
        await one.execute("SELECT pg_advisory_unlock_shared(%s, %s)", key)
    assert row is not None
    settings_hold = row["interval"] == _EVERY_SESSION["client_connection_check_interval"]
    return not row["got"] and before == after != other and settings_hold


async def _backend_pid(conn: Connection) -> int:
    row = await (await conn.execute("SELECT pg_backend_pid() AS pid")).fetchone()
    assert row is not None
    return int(row["pid"])
