"""The database is away, stands still, is full, refuses or deadlocks: people are told, and nothing is half done.

Whoever clicks gets their answer within Slack's three seconds: 200 for what is recorded, or else an error and a private
note. When the cause is gone, the same processes go on.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path
from typing import LiteralString

import pytest
from psycopg import errors, sql

from flow.approvals import decide
from flow.database import Connection, connect
from flow.errors import DriveFailed
from flow.flows import Flows
from tests.command import Running, Terminal
from tests.drives import approve_all, assert_each_paid_once, assert_never_two_drivers, everything, until_settled
from tests.driving import run, waiting_claim
from tests.people import ALICE, YES, start_claim
from tests.postgres import PostgresServer, full
from tests.rows import all_rows, break_table, mend_table, one_row, until, value
from tests.services import CLICK_S, Claim, QuietSlack, Town, held, is_ready, standbys_are_ready, until_held_up
from tests.slack_door import Caller, bot_in_process, client_of
from tests.wire import Wire, _pump, _read_message

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="the server's processes are watched and stopped Linux's way"),
    pytest.mark.timeout(300),
]

# As long as a managed database takes to fail over.
AWAY_S = 45.0


@pytest.fixture(scope="module")
def server() -> Iterator[PostgresServer]:
    with PostgresServer() as server:
        yield server


@pytest.fixture
def own_database(server: PostgresServer) -> Iterator[str]:
    """The URL of a database on a server that may be stopped."""
    with server.database() as url:
        yield url


@pytest.fixture
async def town(tmp_path: Path, own_database: str) -> AsyncIterator[Town]:
    async with Town(own_database, Terminal(tmp_path)) as town:
        yield town


# Away


async def test_clicks_while_the_database_is_away_are_told_to_wait_and_are_paid_once_when_it_is_back(
    town: Town, own_database: str, server: PostgresServer
) -> None:
    thread_ids = [f"t{number}" for number in range(4)]
    async with town.service("serve") as serve:
        zygote = await serve.zygote()
        async with await connect(own_database, "drive") as conn, await connect(own_database, "listen") as holder:
            claims = await town.waiting(conn, thread_ids)
            await town.until_posted(claims)
            await until(lambda: all_are_sent(conn))
            before = await everything(conn)
            # Each click is in the midst of its decision when the database goes.
            await holder.execute("BEGIN")
            await holder.execute("SELECT FROM approvals FOR UPDATE")
            clicking = [asyncio.create_task(told_to_wait(town, claim)) for claim in claims]
            await until_held_up(conn, len(claims), by=holder.info.backend_pid)
            away_since = time.monotonic()
            await asyncio.to_thread(server.stop)
            await holder.close()
        await asyncio.gather(*clicking)
        # Nobody is left without an answer, however long it lasts.
        while time.monotonic() < away_since + AWAY_S:
            await told_to_wait(town, claims[0])
        await asyncio.to_thread(server.start)
        async with await connect(own_database, "drive") as conn:
            assert await everything(conn) == before
            for claim in claims:
                await town.click_until_heard(claim.approve)
            await until_settled(conn)
            await town.assert_shown_as_paid(thread_ids)
            await assert_each_paid_once(conn)
            assert await value(conn, "SELECT count(*) FROM decisions") == len(thread_ids)
        assert not serve.ended
        assert await serve.zygote() == zygote


async def test_a_click_is_taken_as_soon_as_the_database_is_back(
    town: Town, own_database: str, server: PostgresServer
) -> None:
    async with town.service("serve"):
        async with await connect(own_database, "drive") as conn:
            [claim] = await town.waiting(conn, ["t1"])
        away_since = time.monotonic()
        await asyncio.to_thread(server.stop)
        # After 7 s there is a pause of 8 s, if each is twice the last.
        while time.monotonic() < away_since + 8:
            await told_to_wait(town, claim)
        await asyncio.to_thread(server.start)
        await town.click_until_heard(claim.approve, within_s=2)


async def test_a_click_while_the_database_stands_still_is_told_to_click_again_and_recorded_once(
    town: Town, own_database: str, server: PostgresServer
) -> None:
    async with town.service("serve") as serve, await connect(own_database, "drive") as conn:
        claims = await town.waiting(conn, ["t1", "t2"])
        await town.until_posted(claims)
        with server.frozen():
            for claim in claims * 2:
                await told_to_wait(town, claim)
        for claim in claims:
            await town.click_until_heard(claim.approve)
        await until_settled(conn)
        await town.assert_shown_as_paid(["t1", "t2"])
        await assert_each_paid_once(conn)
        assert await value(conn, "SELECT count(*) FROM decisions") == 2
        assert not serve.ended


# All connections are taken


async def test_a_click_that_finds_every_connection_taken_is_told_to_click_again(
    own_database: str, flows: Flows
) -> None:
    thread_ids = [f"t{number}" for number in range(9)]
    async with small_town(own_database) as (conn, caller, _):
        interrupt_ids = [await waiting_claim(conn, flows, each) for each in thread_ids]
        clicks = [await caller.body_of(conn, each) for each in interrupt_ids]
        async with held(own_database, interrupt_ids[:8]) as holder:
            slow = [asyncio.create_task(answer_in_time(caller, click)) for click in clicks[:8]]
            await until_held_up(conn, 8, by=holder)
            # They would give up in time, each for itself, and make room: so none of them can say that it did.
            blocked = await all_rows(
                conn, "SELECT pid FROM pg_stat_activity WHERE %s = ANY(pg_blocking_pids(pid))", holder
            )
            with standing_still([row["pid"] for row in blocked]):
                assert await answer_in_time(caller, clicks[8]) == 503
                assert await asyncio.gather(*slow) == [503] * 8
            assert {await caller.note() for _ in clicks} == {
                "⚠️ Your click could not be confirmed in time. If the buttons stay, please click again."
            }
        for click in clicks:
            assert await answer_in_time(caller, click) == 200
        assert await value(conn, "SELECT count(*) FROM decisions") == 9
        for thread_id in thread_ids:
            assert await run(conn, flows, thread_id) == "over"
        await assert_each_paid_once(conn)


@contextmanager
def standing_still(pids: Sequence[int]) -> Iterator[None]:
    try:
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        yield
    finally:
        for pid in pids:
            # One that has ended meanwhile must not leave the others standing: they would hold up the whole server.
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)


# Full


FULL: LiteralString = "RAISE EXCEPTION 'No space left on device' USING ERRCODE = 'disk_full'"


@pytest.mark.parametrize(
    ("table", "event"),
    [("decisions", "INSERT"), ("approvals", "UPDATE"), ("notices", "UPDATE"), ("threads", "UPDATE")],
)
async def test_a_click_on_a_full_disk_is_told_to_click_again_and_records_nothing(
    database_url: str, flows: Flows, table: str, event: LiteralString
) -> None:
    async with small_town(database_url) as (conn, caller, _):
        click = await caller.body_of(conn, await waiting_claim(conn, flows))
        before = await everything(conn)
        await break_table(conn, table, event, FULL)
        assert await answer_in_time(caller, click) == 503
        assert (await caller.note()).startswith("⚠️ Your click was not recorded: ")
        assert await everything(conn) == before
        await mend_table(conn)
        assert await answer_in_time(caller, click) == 200
        assert await run(conn, flows) == "over"
        await assert_each_paid_once(conn)


@pytest.mark.parametrize("amount", ["20", "250"])
@pytest.mark.parametrize(
    ("table", "event"),
    [
        ("threads", "UPDATE"),
        ("checkpoints", "INSERT OR UPDATE"),
        ("checkpoint_writes", "INSERT OR UPDATE"),
        ("approvals", "INSERT"),
        ("notices", "INSERT OR UPDATE"),
        ("payments", "INSERT"),
    ],
)
async def test_a_drive_on_a_full_disk_does_nothing_by_halves_and_goes_on_when_there_is_room(
    conn: Connection, flows: Flows, table: str, event: LiteralString, amount: str
) -> None:
    await start_claim(conn, amount=amount)
    await drive_on_a_full_disk(conn, flows, table, event)
    if amount == "250":
        [approval] = await all_rows(conn, "SELECT interrupt_id FROM approvals")
        await decide(conn, approval["interrupt_id"], ALICE, YES)
        await drive_on_a_full_disk(conn, flows, table, event)
    await assert_each_paid_once(conn)
    assert await value(conn, "SELECT count(*) FROM notices") == (2 if amount == "250" else 0)


async def drive_on_a_full_disk(conn: Connection, flows: Flows, table: str, event: LiteralString) -> None:
    """A drive, and if it failed, another one when there is room."""
    await break_table(conn, table, event, FULL)
    try:
        await run(conn, flows)
    except (DriveFailed, errors.DiskFull) as exc:
        assert "No space left on device" in str(exc)
        row = await one_row(conn, "SELECT status, reason, due_at FROM threads")
        assert (row["status"], row["due_at"] is None) == ("running", False)
        # Where not even the reason can be written, the thread is as it was.
        assert "No space left on device" in (row["reason"] or "No space left on device")
        # A payment that was committed before the step that failed stands, and is found by the next drive.
        assert await value(conn, "SELECT count(*) FROM payments") <= 1
        shown = "SELECT count(*) FROM notices WHERE kind = 'card'"
        assert await value(conn, "SELECT count(*) FROM approvals") == await value(conn, shown)
        await mend_table(conn)
        await run(conn, flows)
    else:
        await mend_table(conn)
    assert await value(conn, "SELECT due_at IS NULL FROM threads")


async def test_a_claim_that_cannot_be_filed_on_a_full_disk_is_refused_and_not_there(
    tmp_path: Path, database_url: str, conn: Connection
) -> None:
    terminal = Terminal(tmp_path, DATABASE_URL=database_url)
    await break_table(conn, "threads", "INSERT", FULL)
    done = await terminal.run_meanwhile("start", "--thread", "t1", "--amount", "20")
    assert (done.code, done.out) == (1, "")
    assert done.err == (
        "error: the database refused or went away (DiskFull: No space left on device CONTEXT: PL/pgSQL function"
        " breakage() line 1 at RAISE): nothing is half done\n"
    )
    assert await all_rows(conn, "SELECT * FROM threads") == []
    await mend_table(conn)
    done = await terminal.run_meanwhile("start", "--thread", "t1", "--amount", "20")
    assert (done.code, done.out) == (0, "t1: 20.00 USD is paid, reference L-t1\n")


@pytest.mark.parametrize(("table", "event"), [("notices", "UPDATE"), ("messages", "INSERT")])
async def test_a_card_is_posted_once_although_the_disk_was_full(
    town: Town, own_database: str, flows: Flows, table: str, event: LiteralString
) -> None:
    """It cannot be leased; or it stands in the channel, and that cannot be written down."""
    async with await connect(own_database, "drive") as conn:
        await break_table(conn, table, event, FULL)
        async with town.service("bot") as bot:
            await waiting_claim(conn, flows)
            await bot.until(lambda: has_written(bot, "the database is away: No space left on device"))
            assert len(town.slack.messages) == (table == "messages")
            await mend_table(conn)
            await until(lambda: all_are_sent(conn))
            assert [*town.slack.cards()["t1"]] == [
                "Approval needed: 250.00 USD to ACME, requested by cli:ann (thread t1)"
            ]
            assert len(town.slack.messages) == await value(conn, "SELECT count(*) FROM messages") == 1


async def test_on_a_disk_that_is_really_full_people_are_told_and_all_goes_on_when_there_is_room(
    server: PostgresServer, tmp_path: Path
) -> None:
    try:
        small = server.small_tablespace(32)
        name, place = small.__enter__()
    except PermissionError as exc:
        pytest.skip(f"no small disk can be mounted here: {exc}")
    try:
        with server.database(name) as url:
            await live_on_a_full_disk(url, place, Terminal(tmp_path))
    finally:
        small.__exit__(*sys.exc_info())


async def live_on_a_full_disk(url: str, place: Path, terminal: Terminal) -> None:
    thread_ids = [f"large-{number:02}" for number in range(20)]
    async with (
        Town(url, terminal) as town,
        town.service("serve") as serve,
        await connect(url, "drive") as conn,
    ):
        claims = await town.waiting(conn, thread_ids)
        await town.until_posted(claims)
        # A page is room for fifty decisions, so they get larger: four fill one.
        await conn.execute("ALTER TABLE decisions ADD COLUMN padding text DEFAULT repeat('x', 1900)")
        await conn.execute("ALTER TABLE decisions ALTER COLUMN padding SET STORAGE PLAIN")
        # Also what rehearsals have written and taken back is room.
        await conn.execute("VACUUM FULL decisions")
        with full(place):
            filed = []
            with pytest.raises(errors.DiskFull):
                # There is room in pages that the tables have already.
                for number in range(1000):
                    await start_claim(conn, f"small-{number:03}", "20")
                    filed.append(f"small-{number:03}")
            answers = [await town.click(claim.approve) for claim in claims]
            told = [await town.caller.note() for answer in answers if answer != 200]
            recorded = {row["interrupt_id"] for row in await all_rows(conn, "SELECT interrupt_id FROM decisions")}
        assert set(answers) <= {200, 503}
        assert 503 in answers
        assert all("Please click again" in note for note in told)
        assert recorded == {claim.interrupt_id for claim, answer in zip(claims, answers, strict=True) if answer == 200}
        for claim in claims:
            assert await town.click_until_heard(claim.approve) == 0
        await conn.execute("UPDATE threads SET due_at = clock_timestamp() WHERE due_at IS NOT NULL")
        await until_settled(conn)
        await town.assert_shown_as_paid(thread_ids)
        await assert_each_paid_once(conn)
        assert await value(conn, "SELECT count(*) FROM payments") == len(filed) + len(thread_ids)
        assert not serve.ended


# Refused for now: serialization failures and deadlocks

REFUSALS = ["serialization_failure", "deadlock_detected"]


@pytest.mark.parametrize("refusal", REFUSALS)
@pytest.mark.parametrize(("table", "event"), [("decisions", "INSERT"), ("approvals", "UPDATE"), ("threads", "UPDATE")])
async def test_a_decision_that_is_refused_is_tried_once_more_and_then_told_to_click_again(
    database_url: str, flows: Flows, table: str, event: LiteralString, refusal: str
) -> None:
    async with small_town(database_url) as (conn, caller, _):
        clicks = [await caller.body_of(conn, await waiting_claim(conn, flows, each)) for each in ("t1", "t2")]
        await refuse(conn, table, event, refusal, times=1)
        assert await answer_in_time(caller, clicks[0]) == 200
        await mend_table(conn)
        await refuse(conn, table, event, refusal, times=2)
        assert await answer_in_time(caller, clicks[1]) == 503
        assert "Please click again" in await caller.note()
        assert await value(conn, "SELECT count(*) FROM decisions") == 1
        assert await answer_in_time(caller, clicks[1]) == 200
        for thread_id in ("t1", "t2"):
            assert await run(conn, flows, thread_id) == "over"
        await assert_each_paid_once(conn)
        assert await value(conn, "SELECT count(*) FROM decisions") == 2


async def test_a_click_that_is_the_victim_of_a_deadlock_is_recorded(database_url: str, flows: Flows) -> None:
    async with small_town(database_url) as (conn, caller, _), await connect(database_url, "listen") as other:
        interrupt_id = await waiting_claim(conn, flows)
        # The server looks for deadlocks when somebody has waited for so long: the click finds it first.
        await other.execute("SET deadlock_timeout = '60s'")
        async with other.transaction():
            await other.execute("SELECT FROM threads FOR UPDATE")
            clicking = asyncio.create_task(answer_in_time(caller, await caller.body_of(conn, interrupt_id)))
            await until_held_up(conn, 1, by=other.info.backend_pid)
            await other.execute("SELECT FROM approvals FOR UPDATE")
        assert await clicking == 200
        deadlocks = "SELECT deadlocks FROM pg_stat_database WHERE datname = current_database()"
        await until(lambda: is_positive(conn, deadlocks))
        assert await run(conn, flows) == "over"
        await assert_each_paid_once(conn)


@pytest.mark.parametrize(
    ("table", "event", "refusal"),
    [
        ("threads", "UPDATE", "serialization_failure"),
        ("checkpoints", "INSERT OR UPDATE", "deadlock_detected"),
        ("approvals", "INSERT", "deadlock_detected"),
        ("payments", "INSERT", "serialization_failure"),
    ],
)
async def test_a_drive_that_is_refused_is_tried_again_by_itself(
    town: Town, own_database: str, table: str, event: LiteralString, refusal: str
) -> None:
    async with await connect(own_database, "drive") as conn, town.worker(conn, STAND_BY="2") as worker:
        await refuse(conn, table, event, refusal, times=2)
        for thread_id, amount in (("t1", "20"), ("t2", "250")):
            await start_claim(conn, thread_id, amount)
        await until_settled(conn)
        await approve_all(conn)
        await until_settled(conn)
        # It did hurt.
        assert f"told to refuse: {refusal}" in worker.err
        await assert_each_paid_once(conn)
        await assert_never_two_drivers(conn)


@pytest.mark.parametrize("refusal", REFUSALS)
async def test_a_notice_whose_lease_is_refused_is_delivered_once(
    town: Town, own_database: str, flows: Flows, refusal: str
) -> None:
    async with await connect(own_database, "drive") as conn, town.service("bot") as bot:
        await refuse(conn, "notices", "UPDATE", refusal, times=3)
        await waiting_claim(conn, flows)
        await until(lambda: all_are_sent(conn))
        assert f"told to refuse: {refusal}" in bot.err
        assert len(town.slack.cards()["t1"]) == len(town.slack.messages) == 1


async def test_a_claims_life_is_the_same_where_every_transaction_is_serializable(town: Town, own_database: str) -> None:
    async with await connect(own_database, "drive") as conn:
        await conn.execute(
            sql.SQL("ALTER DATABASE {} SET default_transaction_isolation = 'serializable'").format(
                sql.Identifier(conn.info.dbname)
            )
        )
    thread_ids = [f"t{number:02}" for number in range(12)]
    async with town.service("serve", STAND_BY="3") as serve, await connect(own_database, "drive") as conn:
        assert await value(conn, "SHOW transaction_isolation") == "serializable"
        claims = await town.waiting(conn, thread_ids)
        await town.until_posted(claims)
        for number in range(12):
            await start_claim(conn, f"small-{number:02}", "20")
        # Two people at once: both approve, or one of them rejects.
        for number, claim in enumerate(claims):
            say = town.caller.rejection_of if number % 3 == 0 else town.caller.body_of
            other = await say(conn, claim.interrupt_id, by="U02BOB")
            answers = await asyncio.gather(town.click(claim.approve), town.click(other))
            for click, answer in zip((claim.approve, other), answers, strict=True):
                if answer != 200:
                    # Refused twice in a row. Those who came second are told that, too.
                    # A form says so itself.
                    while say == town.caller.body_of and "Please click again" not in await town.caller.note():
                        pass
                    await town.click_until_heard(click)
        await until_settled(conn)
        ends = await all_rows(
            conn,
            "SELECT t.thread_id, t.status, d.verdict, p.reference FROM threads t JOIN approvals a USING (thread_id)"
            " JOIN decisions d USING (interrupt_id) LEFT JOIN payments p USING (thread_id)",
        )
        assert len(ends) == 12
        for end in ends:
            paid = ("paid", f"L-{end['thread_id']}")
            assert (end["status"], end["reference"]) == (paid if end["verdict"] == "approve" else ("rejected", None))
        assert await value(conn, "SELECT count(*) FROM payments WHERE thread_id LIKE 'small-%%'") == 12
        await town.assert_shown_as_paid([end["thread_id"] for end in ends if end["status"] == "paid"])
        await assert_never_two_drivers(conn)
        assert not serve.ended


# Read only: what a managed database becomes when its disk fills up, or when it fails over to a replica


async def test_a_click_while_the_database_is_read_only_is_told_to_click_again(database_url: str, flows: Flows) -> None:
    async with await connect(database_url, "drive") as writer:
        interrupt_id = await waiting_claim(writer, flows)
        await read_only(writer, True)
        async with small_town(database_url) as (conn, caller, _):
            assert await answer_in_time(caller, await caller.body_of(conn, interrupt_id)) == 503
            assert "Please click again" in await caller.note(timeout_s=3)


async def test_a_service_outlives_a_database_that_is_read_only_for_a_while(town: Town, own_database: str) -> None:
    async with await connect(own_database, "drive") as conn, town.service("serve") as serve:
        claims = await town.waiting(conn, ["t1"])
        await town.until_posted(claims)
        await start_claim(conn, "t2", "20")
        await until_settled(conn)
        await read_only(conn, True)
        await terminate_others(conn)
        # Work that nobody can begin now.
        await start_claim(conn, "t3", "20")
        async with await connect(own_database, "drive") as look:
            with pytest.raises(errors.ReadOnlySqlTransaction):
                await look.execute("UPDATE threads SET due_at = NULL")
        assert await town.click(claims[0].approve) == 503
        await read_only(conn, False)
        await terminate_others(conn)
        await serve.until(lambda: is_ready(town.port))
        await town.click_until_heard(claims[0].approve)
        await until_settled(conn)
        await assert_each_paid_once(conn)


async def test_a_worker_that_is_behind_does_not_wear_out_a_database_that_is_read_only(
    town: Town, own_database: str
) -> None:
    """Each stand-by that is not rehearsed would take a thread, and lose it at once, without a pause."""
    async with await connect(own_database, "drive") as conn, town.service("serve", STAND_BY="2") as serve:
        await serve.until(lambda: standbys_are_ready(conn, 2))
        await read_only(conn, True)
        await terminate_others(conn)
        async with conn.transaction():
            for number in range(20):
                await start_claim(conn, f"t{number:02}", "20")

        async def has_tried() -> bool:
            return serve.err.count("no stand-by: ") >= 8

        await serve.until(has_tried)
        assert serve.err.count("driving it again") <= 2
        await read_only(conn, False)
        await terminate_others(conn)
        await until_settled(conn)
        await assert_each_paid_once(conn)


# Nobody knows whether it was committed


async def test_a_click_whose_commit_was_never_confirmed_is_answered_once_and_recorded_once(
    database_url: str, flows: Flows
) -> None:
    async with (
        CutAtCommit(database_url) as wire,
        small_town(wire.url) as (_, caller, _slack),
        await connect(database_url, "drive") as conn,
    ):
        click = await caller.body_of(conn, await waiting_claim(conn, flows))
        wire.armed = True
        assert await answer_in_time(caller, click) == 200
        # The server had committed it before the connection was lost.
        assert wire.decisions_at_the_cut == 1
        assert await caller.note() == "Already approved by u01alice."
        assert await value(conn, "SELECT count(*) FROM decisions") == 1
        assert await value(conn, "SELECT wakes FROM threads") == 1
        assert await run(conn, flows) == "over"
        await assert_each_paid_once(conn)


class CutAtCommit(Wire):
    """Once `armed`, loses every connection at the next COMMIT: the server has done it, the client never hears of it."""

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self.armed = False
        self.decisions_at_the_cut = 0

    async def _serve(self, startup: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        up_reader, up_writer = await self._dial(startup)
        async with asyncio.TaskGroup() as pumps:
            pumps.create_task(_pump(reader, up_writer, self._on_question))
            pumps.create_task(self._answer(up_reader, writer))

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                kind, message = await _read_message(reader)
                if self.armed and kind == b"C" and message[5:] == b"COMMIT\0":
                    self.armed = False
                    async with await connect(self._upstream_url, "drive") as conn:
                        self.decisions_at_the_cut = await value(conn, "SELECT count(*) FROM decisions")
                    self.cut()
                    raise ConnectionAbortedError
                writer.write(message)
        except (ConnectionError, asyncio.IncompleteReadError):
            writer.transport.abort()


# What the tests share


async def told_to_wait(town: Town, claim: Claim) -> None:
    """One click that is not recorded: an error in time, and a note that says what to do."""
    assert await town.click(claim.approve) == 503
    note = await town.caller.note()
    assert note.startswith(("⚠️ Your click was not recorded", "⚠️ Your click could not be confirmed"))
    assert "please click again" in note.lower()


@asynccontextmanager
async def small_town(url: str) -> AsyncIterator[tuple[Connection, Caller, QuietSlack]]:
    """The bot in this process, without a worker: the test drives."""
    async with (
        await connect(url, "drive") as conn,
        QuietSlack() as slack,
        client_of(slack.url) as client,
        bot_in_process(url, client) as bot_url,
        Caller(bot_url) as caller,
    ):
        yield conn, caller, slack


async def answer_in_time(caller: Caller, click: bytes) -> int:
    async with asyncio.timeout(CLICK_S):
        return (await caller.click(click)).status


async def refuse(conn: Connection, table: str, event: LiteralString, condition: str, *, times: int) -> None:
    """The first so many rows of this table that are written fail; a sequence counts also what is rolled back."""
    await conn.execute("DROP SEQUENCE IF EXISTS refusals")
    await conn.execute("CREATE SEQUENCE refusals")
    body = (
        f"IF NEW.thread_id NOT LIKE 'rehearsal-%' AND nextval('refusals') <= {times} THEN"
        f" RAISE EXCEPTION 'told to refuse: {condition}' USING ERRCODE = '{condition}'; END IF"
    )
    if table == "decisions":
        body = body.replace("NEW.thread_id NOT LIKE 'rehearsal-%' AND ", "")
    await break_table(conn, table, event, body)


async def read_only(conn: Connection, is_so: bool) -> None:
    """New sessions cannot write, or can again. This one always can."""
    await conn.execute(
        sql.SQL("ALTER DATABASE {} SET default_transaction_read_only = {}").format(
            sql.Identifier(conn.info.dbname), sql.Literal(is_so)
        )
    )


async def terminate_others(conn: Connection) -> None:
    await conn.execute(
        "SELECT pg_terminate_backend(pid, 5000) FROM pg_stat_activity"
        " WHERE datname = current_database() AND pid <> pg_backend_pid()"
    )


async def all_are_sent(conn: Connection) -> bool:
    return bool(await value(conn, "SELECT count(*) > 0 AND bool_and(status = 'sent') FROM notices"))


async def is_positive(conn: Connection, query: LiteralString) -> bool:
    return bool(await value(conn, query) > 0)


async def has_written(running: Running, words: str) -> bool:
    return words in running.err
