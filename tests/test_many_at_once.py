"""Many threads, two workers, and decisions at every moment: each thread is driven by one process at a time."""

from __future__ import annotations

import asyncio
import collections
import contextlib
import json
import re
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from psycopg.conninfo import make_conninfo

from flow import threads
from flow.approvals import decide
from flow.database import Connection, connect, listen, wait_for_bell
from flow.drive import drive
from flow.flows import Flows
from tests.chance import seeded
from tests.command import Running, Terminal, worker
from tests.drives import approve_all, assert_each_paid_once, assert_never_two_drivers, held_at_payment, until_settled
from tests.people import ANN, NO, POLICY, YES, start_claim
from tests.pg_proxy import FaultingProxy, Sprung, Trap
from tests.rows import all_rows, break_table, until, value
from tests.services import standbys_are_ready

ROUNDS = 50


@pytest.fixture
def terminal(tmp_path: Path, database_url: str) -> Terminal:
    return Terminal(tmp_path, DATABASE_URL=database_url)


@pytest.fixture
async def bell(database_url: str) -> AsyncIterator[Connection]:
    """A connection that hears the bell: it rings when a drive has ended."""
    async with await connect(database_url, "listen") as bell:
        await listen(bell)
        yield bell


async def test_two_workers_drive_each_of_thirty_threads_once(terminal: Terminal, conn: Connection) -> None:
    async with worker(terminal, conn) as one, worker(terminal, conn, present=2) as two:
        for number in range(30):
            await start_claim(conn, f"t{number:02}", "20" if number % 2 else "250")
        await until_settled(conn)
        asked = await all_rows(conn, "SELECT thread_id FROM approvals ORDER BY 1")
        assert [row["thread_id"] for row in asked] == [f"t{number:02}" for number in range(0, 30, 2)]
        await approve_all(conn)
        await until_settled(conn)
        # Both had their share.
        await until(lambda: both_drove(one, two, 30))
    await assert_each_paid_once(conn)
    await assert_never_two_drivers(conn)
    # Nobody did a step again: as many checkpoints as a thread has that was alone.
    steps = await all_rows(conn, "SELECT thread_id, count(*) AS steps FROM checkpoints GROUP BY 1")
    counted = collections.Counter((int(row["thread_id"][1:]) % 2, row["steps"]) for row in steps)
    assert sorted(counted.values()) == [15, 15], counted


async def test_stand_bys_rehearse_while_nothing_waits_for_them(terminal: Terminal, conn: Connection) -> None:
    """A rehearsal costs more than it saves, and only who waits has something of what it saves."""
    await count_rehearsals(conn)
    terminal.environment["STAND_BY"] = "2"
    async with worker(terminal, conn) as working:
        await working.until(lambda: standbys_are_ready(conn, 2))
        before = await rehearsals(conn)
        # All at once: whoever drives one is behind with the rest.
        async with conn.transaction():
            for number in range(30):
                await start_claim(conn, f"t{number:02}", "20")
        await until_settled(conn)
        # The first two, and whatever was made between two looks.
        assert await rehearsals(conn) - before < 10
        # Whoever is left of that rush makes place for one that has.
        await working.until(lambda: standbys_are_ready(conn, 2))
    await assert_each_paid_once(conn)
    await assert_never_two_drivers(conn)


async def count_rehearsals(conn: Connection) -> None:
    """Also those that are rolled back: a sequence forgets nothing."""
    await conn.execute("CREATE SEQUENCE rehearsals")
    body = "IF NEW.thread_id LIKE 'rehearsal-%' THEN PERFORM nextval('rehearsals'); END IF"
    await break_table(conn, "threads", "INSERT", body)


async def rehearsals(conn: Connection) -> int:
    count: int = await value(conn, "SELECT last_value FROM rehearsals")
    return count


async def test_workers_that_are_behind_seldom_reach_for_the_same_thread(terminal: Terminal, conn: Connection) -> None:
    """Each that comes too late is a fresh process used up for nothing."""
    terminal.environment["STAND_BY"] = "2"
    async with contextlib.AsyncExitStack() as stack:
        working = [await stack.enter_async_context(worker(terminal, conn, present=number)) for number in range(1, 4)]
        async with conn.transaction():
            for number in range(100):
                await start_claim(conn, f"t{number:02}", "20")
        await until_settled(conn)
        too_late = sum(each.err.count(": locked") for each in working)
    # More than twenty, where each takes the oldest.
    assert too_late < 12
    await assert_each_paid_once(conn)


async def test_a_thread_that_is_held_keeps_no_other_thread_waiting(
    terminal: Terminal, conn: Connection, database_url: str
) -> None:
    async with worker(terminal, conn) as busy, held_at_payment(conn, database_url, ["held"]) as until_held:
        await until_held()
        for number in range(5):
            await start_claim(conn, f"t{number}", "20")

        async def others_are_paid() -> bool:
            return bool(await value(conn, "SELECT count(*) = 5 FROM threads WHERE status = 'paid'"))

        await busy.until(others_are_paid)
        assert await value(conn, "SELECT status FROM threads WHERE thread_id = 'held'") == "running"


async def test_ten_commands_that_resume_one_thread_at_once_pay_it_once(
    terminal: Terminal, conn: Connection, flows: Flows
) -> None:
    """With a worker, so that they meet in the database and not one after the other in their imports."""
    await start_claim(conn, "t1", "250")
    await drive(conn, "t1", flows=flows, policy=POLICY)
    async with worker(terminal, conn):
        resumed = await asyncio.gather(
            *(terminal.run_meanwhile("resume", "--thread", "t1", "--approve", "--by", f"N{n}") for n in range(10))
        )
    assert {(done.code, done.err) for done in resumed} == {(0, "")}
    # They all name the one whose word it was.
    [said] = {done.out for done in resumed}
    assert re.fullmatch(r"t1: 250.00 USD is paid, reference L-t1 \(approved by N\d \(cli:ann\) at .*\)\n", said)
    await assert_each_paid_once(conn)
    await assert_never_two_drivers(conn)
    assert await value(conn, "SELECT count(*) FROM decisions") == 1


async def test_ten_commands_that_start_one_thread_at_once_pay_it_once(terminal: Terminal, conn: Connection) -> None:
    async with worker(terminal, conn):
        started = await asyncio.gather(
            *(terminal.run_meanwhile("start", "--thread", "t0", "--amount", "20") for _ in range(10))
        )
    assert {(done.code, done.out, done.err) for done in started} == {(0, "t0: 20.00 USD is paid, reference L-t0\n", "")}
    await assert_each_paid_once(conn)
    await assert_never_two_drivers(conn)


async def test_a_decision_right_after_the_request_is_never_forgotten(
    terminal: Terminal, conn: Connection, bell: Connection
) -> None:
    """The request is committed, the drive that wrote it still holds the thread: its worker must look again."""
    random = seeded()
    async with worker(terminal, conn):
        for number in range(ROUNDS):
            await start_claim(conn, f"t{number:02}", "250")
            while not (pending := await pending_of(conn, f"t{number:02}")):
                await wait_for_bell(bell, timeout_s=1)
            await asyncio.sleep(random.choice([0, random.uniform(0, 0.004)]))
            await decide(conn, pending, ANN, YES)
        await until_settled(conn)
    await assert_each_paid_once(conn)
    await assert_never_two_drivers(conn)


@pytest.mark.skipif(sys.platform != "linux", reason="who is at the end of a socket is asked Linux's way")
async def test_a_decision_at_any_step_of_a_drive_is_never_forgotten(
    tmp_path: Path, conn: Connection, database_url: str
) -> None:
    """A drive that only looks at the request is held up at each of its steps, until a decision there is committed or
    has to wait for the drive."""

    async def decide_meanwhile(sprung: Sprung) -> None:
        deciding = asyncio.create_task(decide_on_its_own(sprung.thread_id))
        decisions.append(deciding)
        await until(lambda: done_or_blocked(conn, deciding, sprung.thread_id))

    async def decide_on_its_own(thread_id: str) -> None:
        pending = await pending_of(conn, thread_id)
        assert pending is not None
        async with await connect(make_conninfo(database_url, application_name=thread_id), "door") as door:
            await decide(door, pending, ANN, YES)

    decisions: list[asyncio.Task[None]] = []
    async with (
        FaultingProxy(database_url, decide_meanwhile) as proxy,
        worker(Terminal(tmp_path, DATABASE_URL=proxy.url), conn),
    ):
        proxy.lay("probe")
        await start_claim(conn, "probe", "250")
        await until_settled(conn)
        await wake_all(conn)
        await until(lambda: has_looked(proxy, "probe"))
        asking, looking = proxy.asked["probe", "drive"]

        # From the moment when the request can be seen: at whatever follows its COMMIT.
        seen = max(at for at, statement in enumerate(asking, 1) if statement.startswith("COMMIT"))
        asked = {f"asked-{at:02}": at for at in range(seen + 1, len(asking) + 1)}
        assert asked
        for thread_id, at in asked.items():
            proxy.lay(thread_id, Trap(at=at, fault="look"))
        for at in range(1, len(looking) + 1):
            proxy.lay(f"looked-{at:02}", None, Trap(at=at, fault="look"))
        planned = [*asked, *(f"looked-{at:02}" for at in range(1, len(looking) + 1))]
        for thread_id in planned:
            await start_claim(conn, thread_id, "250")
        await until_settled(conn)
        await wake_all(conn)
        await approve_all(conn, "probe")
        await until(lambda: have_sprung(proxy, planned), within_s=60)
        await asyncio.gather(*decisions)
        await until_settled(conn)
    await assert_each_paid_once(conn)
    await assert_never_two_drivers(conn)


async def test_a_decision_while_a_drive_is_ending_is_never_forgotten(
    terminal: Terminal, conn: Connection, database_url: str
) -> None:
    """A drive has looked at the request, found it undecided, and is about to let the thread wait."""
    random = seeded()
    async with await connect(database_url, "door") as door, worker(terminal, conn):
        for number in range(ROUNDS):
            await start_claim(conn, f"t{number:02}", "250")
        await until_settled(conn)
        for number in range(ROUNDS):
            pending = await pending_of(conn, f"t{number:02}")
            assert pending is not None
            # A drive that has nothing to do but to look; 10 ms, of which any is where the decision may fall.
            async with conn.transaction():
                await threads.wake(conn, f"t{number:02}")
            await asyncio.sleep(random.uniform(0, 0.02))
            await decide(door, pending, ANN, NO if number % 5 == 0 else YES)
        await until_settled(conn)
    statuses = {row["thread_id"]: row["status"] for row in await all_rows(conn, "SELECT * FROM threads")}
    assert statuses == {f"t{n:02}": "rejected" if n % 5 == 0 else "paid" for n in range(ROUNDS)}
    paid = {row["thread_id"] for row in await all_rows(conn, "SELECT thread_id FROM payments")}
    assert paid == {thread_id for thread_id, status in statuses.items() if status == "paid"}
    await assert_never_two_drivers(conn)


async def test_a_burst_beyond_one_look_is_driven_to_the_end(terminal: Terminal, conn: Connection) -> None:
    """More threads than a worker looks at in one go."""
    async with conn.transaction():
        for number in range(120):
            await start_claim(conn, f"t{number:03}", "20")
    terminal.environment["STAND_BY"] = "3"
    async with worker(terminal, conn):
        await until_settled(conn)
    await assert_each_paid_once(conn)
    await assert_never_two_drivers(conn)


async def both_drove(one: Running, two: Running, threads: int) -> bool:
    """Whether these two workers drove this many threads, and each some of them."""
    ones, twos = driven_by(one), driven_by(two)
    return bool(ones and twos) and len(ones | twos) == threads


def driven_by(running: Running) -> set[str]:
    """The threads of which this worker says that a drive came through."""
    said = (json.loads(line)["message"] for line in running.err.splitlines() if line.startswith("{"))
    return {found[1] for message in said if (found := re.fullmatch(r"thread (\S+): (?:waiting|over)", message))}


async def wake_all(conn: Connection) -> None:
    """Have every thread that waits looked at, for no reason."""
    async with conn.transaction():
        for row in await all_rows(conn, "SELECT thread_id FROM threads WHERE status = 'waiting'"):
            await threads.wake(conn, row["thread_id"])


async def has_looked(proxy: FaultingProxy, thread_id: str) -> bool:
    """Whether a second drive of this thread has ended."""
    drives = proxy.asked[thread_id, "drive"]
    return len(drives) == 2 and all(drive[-1].startswith("SELECT pg_advisory_unlock") for drive in drives)


async def have_sprung(proxy: FaultingProxy, planned: list[str]) -> bool:
    return sorted(sprung.thread_id for sprung in proxy.sprung) == sorted(planned)


async def done_or_blocked(conn: Connection, task: asyncio.Task[None], application: str) -> bool:
    """Whether a task is done, or its session waits for a lock of another one."""
    blocked = "SELECT count(*) > 0 FROM pg_stat_activity WHERE application_name = %s AND wait_event_type = 'Lock'"
    return task.done() or bool(await value(conn, blocked, application))


async def pending_of(conn: Connection, thread_id: str) -> str | None:
    rows = await all_rows(
        conn, "SELECT interrupt_id FROM approvals WHERE status = 'pending' AND thread_id = %s", thread_id
    )
    return rows[0]["interrupt_id"] if rows else None
