"""Set-up by twenty processes at once, the bell, presence, and the self-test of locks, on real servers and wires."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import AbstractAsyncContextManager

import psycopg
import pytest
from psycopg import errors, sql
from psycopg.conninfo import make_conninfo

from flow import database
from flow.database import Connection, Lock, check_locks, connect, ensure_schema, exclusively, is_present, ring, wakes
from flow.drive import ensure_checkpoint_tables
from flow.errors import DatabaseUnavailable, LocksUnusable
from tests.processes import Meet, run_together
from tests.rows import LOCKS_HERE, all_rows, until, value
from tests.wire import TransactionPooler, Wire


@pytest.fixture
async def other(database_url: str) -> AsyncIterator[Connection]:
    async with await connect(database_url, "door") as conn:
        yield conn


# Set-up


def set_up(meet: Meet, url: str) -> str:
    """What every process does first; run in processes of its own."""

    async def both() -> None:
        async with await connect(url, "drive") as conn:
            meet()
            await ensure_schema(url, conn)
            await ensure_checkpoint_tables(url, conn)

    asyncio.run(both())
    return "ok"


def set_up_checkpoints(meet: Meet, url: str) -> str:
    async def one() -> None:
        async with await connect(url, "drive") as conn:
            meet()
            await ensure_checkpoint_tables(url, conn)

    asyncio.run(one())
    return "ok"


async def test_twenty_processes_set_up_an_empty_database_at_once(empty_database_url: str) -> None:
    assert run_together(20, set_up, empty_database_url) == ["ok"] * 20
    async with await connect(empty_database_url, "door") as conn:
        assert await all_rows(conn, "SELECT indexrelid::regclass::text FROM pg_index WHERE NOT indisvalid") == []
        found = await all_rows(conn, "SELECT tablename FROM pg_tables WHERE schemaname = 'public'")
        assert {row["tablename"] for row in found} >= {
            *("threads", "approvals", "decisions", "payments", "notices", "messages"),
            *("checkpoints", "checkpoint_blobs", "checkpoint_writes"),
        }
        versions = await all_rows(conn, "SELECT version FROM claim_flow_migrations ORDER BY version")
        assert [row["version"] for row in versions] == list(range(1, len(versions) + 1))
        repeats = await all_rows(conn, "SELECT indexname FROM pg_indexes WHERE indexname LIKE '%%_thread_id_idx'")
        assert repeats == []


async def test_twenty_processes_set_up_langgraphs_tables_at_once(empty_database_url: str) -> None:
    assert run_together(20, set_up_checkpoints, empty_database_url) == ["ok"] * 20
    async with await connect(empty_database_url, "door") as conn:
        assert await all_rows(conn, "SELECT indexrelid::regclass::text FROM pg_index WHERE NOT indisvalid") == []


async def test_an_up_to_date_database_costs_one_statement_each(database_url: str) -> None:
    async with Wire(database_url) as wire, await connect(wire.url, "drive") as conn:
        # Prepared first, so that each of the two is one round trip.
        await ensure_schema(wire.url, conn)
        await ensure_checkpoint_tables(wire.url, conn)
        before = wire.asked
        await ensure_schema(wire.url, conn)
        assert wire.asked == before + 1
        await ensure_checkpoint_tables(wire.url, conn)
        assert (wire.asked, wire.clients) == (before + 2, 1)


async def test_a_newer_schema_is_left_alone(database_url: str, conn: Connection) -> None:
    await conn.execute("INSERT INTO claim_flow_migrations (version) VALUES (9999)")
    await ensure_schema(database_url, conn)
    assert await value(conn, "SELECT max(version) FROM claim_flow_migrations") == 9999


async def test_a_migration_that_fails_leaves_nothing_behind(empty_database_url: str) -> None:
    async with await connect(empty_database_url, "drive") as conn:
        # Something of this name is there already, so the first migration fails in its middle.
        await conn.execute("CREATE TABLE payments (not_ours text)")
        with pytest.raises(errors.DuplicateTable):
            await ensure_schema(empty_database_url, conn)
        assert await value(conn, "SELECT to_regclass('threads')") is None
        await conn.execute("DROP TABLE payments")
        await ensure_schema(empty_database_url, conn)
        assert await value(conn, "SELECT count(*) FROM threads") == 0


async def test_one_of_our_locks_is_held_by_one_session_at_a_time(conn: Connection, other: Connection) -> None:
    inside = 0

    async def enter(mine: Connection) -> None:
        nonlocal inside
        for _ in range(5):
            async with exclusively(mine, Lock.MIGRATION):
                inside += 1
                assert inside == 1
                await mine.execute("SELECT 1")
                inside -= 1

    await asyncio.gather(enter(conn), enter(other))
    assert await value(conn, LOCKS_HERE) == 0


# Connections


async def test_no_server_is_told_with_the_setting_to_look_at() -> None:
    with pytest.raises(DatabaseUnavailable, match="DATABASE_URL"):
        await connect("postgresql://u@127.0.0.1:1/claims", "door")


async def test_a_session_gives_its_locks_up_soon_after_its_process_is_gone(conn: Connection, other: Connection) -> None:
    assert await value(conn, "SHOW client_connection_check_interval") == "500ms"
    assert await value(conn, "SHOW idle_in_transaction_session_timeout") == "1min"
    assert await value(other, "SHOW lock_timeout") == "2s"
    assert await value(conn, "SHOW lock_timeout") == "0"
    assert {await value(one, "SHOW timezone") for one in (conn, other)} == {"UTC"}


async def test_what_the_url_says_itself_stays(database_url: str) -> None:
    url = make_conninfo(database_url, application_name="mine", options="-c lock_timeout=7s")
    async with await connect(url, "door") as conn:
        assert await value(conn, "SHOW application_name") == "mine"
        assert await value(conn, "SHOW lock_timeout") == "7s"
        assert await value(conn, "SHOW client_connection_check_interval") == "500ms"


# The bell


def bells_of(url: str, *, present_as: tuple[Lock, ...] = ()) -> AbstractAsyncContextManager[AsyncGenerator[bool, None]]:
    """What a worker or a deliverer listens to, for the length of an `async with`."""
    return contextlib.aclosing(wakes(url, present_as=present_as))


@pytest.fixture
def no_poll(monkeypatch: pytest.MonkeyPatch) -> None:
    """The clock alone wakes nobody within a test."""
    monkeypatch.setattr(database, "POLL_S", 600.0)


@pytest.mark.usefixtures("no_poll")
async def test_the_bell_wakes_when_the_transaction_commits(database_url: str, conn: Connection) -> None:
    async with bells_of(database_url) as bells:
        assert await anext(bells) is True
        async with conn.transaction():
            await ring(conn)
            waiting = asyncio.ensure_future(anext(bells))
            await conn.execute("SELECT 1")
            assert not waiting.done()
        async with asyncio.timeout(15):
            assert await waiting is True


async def test_without_any_bell_the_poll_wakes(database_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(database, "POLL_S", 0.05)
    async with bells_of(database_url) as bells, asyncio.timeout(15):
        assert [await anext(bells) for _ in range(3)] == [True, True, True]


@pytest.mark.usefixtures("no_poll")
async def test_wakes_comes_back_after_its_session_is_ended_and_holds_its_locks_again(
    database_url: str, conn: Connection
) -> None:
    async with bells_of(database_url, present_as=(Lock.WORKER, Lock.DELIVERER)) as bells:
        assert await anext(bells) is True
        assert [await is_present(conn, lock) for lock in (Lock.WORKER, Lock.DELIVERER)] == [True, True]
        waiting = asyncio.ensure_future(anext(bells))
        assert await _end_listeners(conn) == 1
        async with asyncio.timeout(15):
            assert await waiting is False
            assert await anext(bells) is True
        assert [await is_present(conn, lock) for lock in (Lock.WORKER, Lock.DELIVERER)] == [True, True]
        waiting = asyncio.ensure_future(anext(bells))
        await ring(conn)
        async with asyncio.timeout(15):
            assert await waiting is True


@pytest.mark.usefixtures("no_poll")
async def test_wakes_says_false_while_the_database_is_away(
    database_url: str, conn: Connection, admin: psycopg.Connection
) -> None:
    name = sql.Identifier(conn.info.dbname)
    async with bells_of(database_url) as bells, asyncio.timeout(15):
        assert await anext(bells) is True
        admin.execute(sql.SQL("ALTER DATABASE {} ALLOW_CONNECTIONS false").format(name))
        assert await _end_listeners(conn) == 1
        assert [await anext(bells) for _ in range(3)] == [False, False, False]
        admin.execute(sql.SQL("ALTER DATABASE {} ALLOW_CONNECTIONS true").format(name))
        while not await anext(bells):
            pass


async def _end_listeners(conn: Connection) -> int:
    ended = await all_rows(
        conn,
        "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
        " WHERE datname = current_database() AND application_name = 'claim_flow listen'",
    )
    return len(ended)


# Presence


async def test_a_process_is_present_only_while_it_holds_its_lock(database_url: str, conn: Connection) -> None:
    assert not await is_present(conn, Lock.WORKER)
    async with bells_of(database_url, present_as=(Lock.WORKER,)) as one:
        await anext(one)
        async with bells_of(database_url, present_as=(Lock.WORKER,)) as two:
            await anext(two)
            assert await is_present(conn, Lock.WORKER)
            assert not await is_present(conn, Lock.DELIVERER)
        # One of two is still there.
        await until(lambda: _holders(conn, 1))
        assert await is_present(conn, Lock.WORKER)
    await until(lambda: _holders(conn, 0))
    assert not await is_present(conn, Lock.WORKER)


async def test_looking_for_somebody_is_seen_by_nobody(conn: Connection, other: Connection) -> None:
    answers = await asyncio.gather(*(is_present(one, Lock.WORKER) for _ in range(20) for one in (conn, other)))
    assert not any(answers)


async def test_presence_in_another_database_does_not_count(empty_database_url: str, conn: Connection) -> None:
    async with bells_of(empty_database_url, present_as=(Lock.WORKER,)) as elsewhere:
        await anext(elsewhere)
        assert not await is_present(conn, Lock.WORKER)


async def test_a_thread_of_any_name_is_no_presence(conn: Connection, other: Connection) -> None:
    # Thread locks use the other key space; the same bits there mean nothing here.
    await other.execute("SELECT pg_advisory_lock((%s::bigint << 32) | %s)", (0x636C666C, int(Lock.WORKER)))
    assert not await is_present(conn, Lock.WORKER)


async def _holders(conn: Connection, count: int) -> bool:
    return bool(await value(conn, LOCKS_HERE) == count)


# The self-test of locks


async def test_locks_hold_through_a_direct_connection(database_url: str, conn: Connection) -> None:
    await check_locks(database_url)
    await until(lambda: _holders(conn, 0))


async def test_locks_hold_through_a_proxy_that_keeps_sessions_apart(database_url: str) -> None:
    async with Wire(database_url) as wire:
        await check_locks(wire.url)
        assert wire.clients == 2


async def test_locks_hold_while_twenty_others_test_them(database_url: str) -> None:
    await asyncio.gather(*(check_locks(database_url) for _ in range(20)))


async def test_locks_do_not_hold_through_a_transaction_pooler(database_url: str) -> None:
    async with TransactionPooler(database_url) as pooler:
        with pytest.raises(LocksUnusable, match=r"DATABASE_URL .* pooler"):
            await check_locks(pooler.url)
        # The pooler's sessions live on, and must not keep what the test took.
        async with asyncio.timeout(5):
            await check_locks(database_url)


async def test_locks_do_not_hold_through_a_pooler_that_loses_prepared_statements(database_url: str) -> None:
    async with TransactionPooler(database_url, prepared=False) as pooler:
        with pytest.raises(LocksUnusable, match=r"DATABASE_URL .* pooler"):
            await check_locks(pooler.url)


async def test_the_pooler_of_these_tests_is_one(database_url: str) -> None:
    """What the tests above lean on: it shares sessions between transactions, and never within one."""
    async with (
        TransactionPooler(database_url) as pooler,
        await connect(pooler.url, "drive") as one,
        await connect(pooler.url, "drive") as two,
    ):
        pid = "SELECT pg_backend_pid() AS pid"
        assert await value(one, pid) == await value(two, pid)
        async with one.transaction():
            first = await value(one, pid)
            assert await value(two, pid) != first
            assert await value(one, pid) == first
