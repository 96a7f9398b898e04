"""SIGKILL, anywhere: a payment is made once or not at all, and whoever is there afterwards finishes the thread.

At random moments, twice in a row, the whole worker, and processes that stand still; `test_boundaries_*.py` visit every
place where there is one. The processes are those of users: the command line, a worker with its stand-bys.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import os
import signal
import statistics
import sys
import time
from collections.abc import AsyncIterator, Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest

from flow.database import POLL_S, Connection
from flow.drive import drive
from flow.flows import Flows
from flow.standby import Zygote
from tests.boundaries import assert_all_is_well
from tests.chance import seeded
from tests.command import Done, Terminal, members_of, worker
from tests.drives import (
    approve_all,
    drives_undisturbed,
    everything,
    held_at_payment,
    until_settled,
)
from tests.people import POLICY, start_claim
from tests.pg_proxy import FaultingProxy, Trap
from tests.rows import all_rows, until, value

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="who is at the end of a socket is asked Linux's way"),
    # A minute each for the largest, if nothing else keeps the machine busy.
    pytest.mark.timeout(300),
]

_TAKEOVERS = 7

# Whole commands at once: each is busy for a second with its imports.
_COMMANDS_AT_ONCE = 3


@pytest.fixture
async def proxy(database_url: str) -> AsyncIterator[FaultingProxy]:
    async with FaultingProxy(database_url) as proxy:
        yield proxy


# A drive in a stand-by


async def test_a_standby_killed_twice_in_one_drive_pays_once(
    tmp_path: Path, proxy: FaultingProxy, conn: Connection, tally: collections.Counter[str]
) -> None:
    """The drive that picks up what a dead one left dies too, at the same place and at the next."""
    async with worker(Terminal(tmp_path, DATABASE_URL=proxy.url, STAND_BY="3"), conn):
        small, _, _ = await drives_undisturbed(proxy, conn)
        places = range(1, len(small) + 1, 3)
        for at in places:
            proxy.lay(f"twice-{at:03}", Trap(at=at), Trap(at=max(1, at // 2)))
            await start_claim(conn, f"twice-{at:03}", "20")
        await until_settled(conn)
    # The second drive of those that had all but ended may have been shorter than its trap is deep.
    assert len(proxy.sprung) > len(places) * 3 // 2
    await assert_all_is_well(conn)
    await count(tally, conn, kills=len(proxy.sprung))


async def test_standbys_killed_at_random_moments_pay_once(
    tmp_path: Path, database_url: str, conn: Connection, flows: Flows, tally: collections.Counter[str]
) -> None:
    random = seeded()
    threads, kills = 60, 0
    for number in range(0, threads, 2):
        await start_claim(conn, f"large-{number:02}", "250")
        await drive(conn, f"large-{number:02}", flows=flows, policy=POLICY)
    async with worker(Terminal(tmp_path, DATABASE_URL=database_url, STAND_BY="3"), conn) as busy:
        zygote = await busy.zygote()
        for number in range(0, threads, 2):
            await busy.until(lambda: has_children(zygote))
            await start_claim(conn, f"small-{number:02}", "20")
            await approve_all(conn, f"large-{number:02}")
            await asyncio.sleep(random.uniform(0, 0.03))
            children = [child.pid for child in zygote.children()]
            kills += signal_all(random.sample(children, min(2, len(children))), signal.SIGKILL)
        await until_settled(conn)
    await assert_all_is_well(conn)
    await count(tally, conn, kills=kills)


# Whole commands


async def test_commands_killed_at_random_moments_pay_once(
    tmp_path: Path, database_url: str, conn: Connection, flows: Flows, tally: collections.Counter[str]
) -> None:
    random = seeded()
    terminal = Terminal(tmp_path, DATABASE_URL=database_url)
    commands = []
    for number in range(4):
        await start_claim(conn, f"resume-{number}", "250")
        await drive(conn, f"resume-{number}", flows=flows, policy=POLICY)
        commands += [
            ["start", "--thread", f"small-{number}", "--amount", "20"],
            ["resume", "--thread", f"resume-{number}", "--approve"],
        ]
    # From the moment when a command has done something until long after its end.
    ended = await run_all(terminal, commands, kill_after_s=lambda: random.uniform(0.3, 2.0))
    for words, done in zip(commands, ended, strict=True):
        assert done.code in (0, -signal.SIGKILL)
        paid = await payments_of(conn, words[2])
        assert len(paid) == 1 or done.code == -signal.SIGKILL
    undecided = "SELECT thread_id FROM threads WHERE status = 'waiting'"
    async with worker(terminal, conn):
        await until_settled(conn)
        for row in await all_rows(conn, undecided):
            await approve_all(conn, row["thread_id"])
        await until_settled(conn)
    await assert_all_is_well(conn)
    await count(tally, conn, kills=[done.code for done in ended].count(-signal.SIGKILL))


# Workers and zygotes


async def test_a_killed_worker_leaves_no_orphan_and_another_one_goes_on(
    tmp_path: Path, database_url: str, conn: Connection, tally: collections.Counter[str]
) -> None:
    terminal = Terminal(tmp_path, DATABASE_URL=database_url, STAND_BY="3")
    async with worker(terminal, conn) as busy:
        zygote = await busy.zygote()
        async with held_at_payment(conn, database_url, ["t1", "t2"]) as until_held:
            await until_held()
            # Two drive, one waits; and the one that forks them.
            await until(lambda: members_are(zygote.pid, 4))
            busy.kill()
            await until(lambda: members_are(zygote.pid, 0))
            # While what they asked last is still being carried out.
            await until(lambda: none_is_held(conn))
        assert await all_rows(conn, "SELECT * FROM payments") == []
    async with worker(terminal, conn):
        await until_settled(conn)
    await assert_all_is_well(conn)
    await count(tally, conn, kills=1)


async def test_a_killed_workers_thread_is_paid_by_another_within_two_seconds(
    tmp_path: Path, database_url: str, conn: Connection, tally: collections.Counter[str]
) -> None:
    """In the median, from the SIGKILL, over moments that are spread evenly over the other one's wait for its next look.

    Nothing rings when a process is killed: the server has to miss it, and the other one has to look.
    """
    terminal = Terminal(tmp_path, DATABASE_URL=database_url, STAND_BY="2")
    took_s = []
    async with contextlib.AsyncExitStack() as stack:
        busy = await stack.enter_async_context(worker(terminal, conn))
        for number in range(_TAKEOVERS):
            thread_id = f"t{number}"
            async with held_at_payment(conn, database_url, [thread_id]) as until_held:
                await until_held()
                other = await stack.enter_async_context(worker(terminal, conn, present=2))
                await asyncio.sleep(POLL_S * (number + 0.5) / _TAKEOVERS)
                killed_at = time.monotonic()
                busy.kill()
                await until(lambda: none_is_held(conn))
            await other.until(partial(is_paid, conn, thread_id))
            took_s.append(time.monotonic() - killed_at)
            busy = other
        await until_settled(conn)
    await assert_all_is_well(conn)
    await count(tally, conn, kills=_TAKEOVERS)
    tally["ms in the median until another worker has paid"] = round(statistics.median(took_s) * 1000)
    assert statistics.median(took_s) < 2.0, took_s


async def test_a_standby_that_is_let_go_in_the_midst_of_its_drive_ends(database_url: str, conn: Connection) -> None:
    """Also while its parent lives: it must not write beside whoever takes the thread over."""
    zygote = Zygote.start(database_url)
    try:
        standby = await zygote.fork(rehearsed=True)
        async with held_at_payment(conn, database_url, ["t1"]) as until_held:
            driving = asyncio.create_task(standby.drive("t1", timeout_s=60))
            await until_held()
            standby.close()
            await until(lambda: is_gone(standby.pid))
            driving.cancel()
        assert await all_rows(conn, "SELECT * FROM payments") == []
        assert zygote.alive
    finally:
        zygote.stop()


async def test_a_killed_zygote_is_replaced(
    tmp_path: Path, database_url: str, conn: Connection, tally: collections.Counter[str]
) -> None:
    async with worker(Terminal(tmp_path, DATABASE_URL=database_url), conn) as busy:
        zygote = await busy.zygote()
        async with held_at_payment(conn, database_url, ["t1"]) as until_held:
            await until_held()
            zygote.kill()
            await until(lambda: members_are(zygote.pid, 0))
        assert await all_rows(conn, "SELECT * FROM payments") == []
        await start_claim(conn, "t2", "20")
        await until_settled(conn)
        assert await busy.zygote() != zygote
    await assert_all_is_well(conn)
    await count(tally, conn, kills=1)


# Processes that stand still


async def test_a_command_that_stood_still_for_too_long_writes_nothing_more(
    tmp_path: Path, database_url: str, proxy: FaultingProxy, conn: Connection
) -> None:
    """As on a laptop whose lid was closed in the midst of the payment."""
    words = ("start", "--thread", "t1", "--amount", "20")
    proxy.lay("probe")
    terminal = Terminal(tmp_path, DATABASE_URL=proxy.url)
    assert (await terminal.run_meanwhile("start", "--thread", "probe", "--amount", "20")).code == 0
    proxy.lay("t1", still_at_the_payment(proxy.asked["probe", "drive"][0]))
    stopped = await terminal.start(*words)
    try:
        await until(lambda: has_sprung(proxy))
        # It holds the lock of its thread.
        async with worker(Terminal(tmp_path, DATABASE_URL=database_url, DRIVE_TIMEOUT="2"), conn) as busy:
            await until_settled(conn)
        assert "thread t1: its driver overstayed 2 s and was cut off" in busy.err
        before = await everything(conn)
        stopped.signal(signal.SIGCONT)
        done = await stopped.end()
    finally:
        stopped.kill()
    # It has lost its drive, and watches what became of the thread.
    assert (done.code, done.out, done.err) == (0, "t1: 20.00 USD is paid, reference L-t1\n", "")
    assert await everything(conn) == before
    await assert_all_is_well(conn)
    assert (await terminal.run_meanwhile(*words)).out == "t1: 20.00 USD is paid, reference L-t1\n"


async def test_a_worker_that_stood_still_for_too_long_writes_nothing_more(
    tmp_path: Path, database_url: str, proxy: FaultingProxy, conn: Connection
) -> None:
    async with worker(Terminal(tmp_path, DATABASE_URL=proxy.url, DRIVE_TIMEOUT="2"), conn) as one:
        small, _, _ = await drives_undisturbed(proxy, conn)
        proxy.lay("t1", still_at_the_payment(small))
        await start_claim(conn, "t1", "20")
        await until(lambda: has_sprung(proxy))
        processes = [one.pid, *members_of((await one.zygote()).pid)]
        try:
            signal_all(processes, signal.SIGSTOP)
            async with worker(Terminal(tmp_path, DATABASE_URL=database_url, DRIVE_TIMEOUT="2"), conn, present=2) as two:
                await until_settled(conn)
                assert "thread t1: its driver overstayed 2 s and was cut off" in two.err
            before = await everything(conn)
        finally:
            signal_all(processes, signal.SIGCONT)
        [sprung] = proxy.sprung
        await one.until(lambda: is_gone(sprung.pid))
        assert await everything(conn) == before
        # It works on as if nothing had been.
        await start_claim(conn, "t2", "20")
        await until_settled(conn)
    await assert_all_is_well(conn)


async def test_a_standby_that_stands_still_is_killed_by_its_worker(
    tmp_path: Path, proxy: FaultingProxy, conn: Connection
) -> None:
    async with worker(Terminal(tmp_path, DATABASE_URL=proxy.url, DRIVE_TIMEOUT="2"), conn) as busy:
        small, _, _ = await drives_undisturbed(proxy, conn)
        proxy.lay("t1", still_at_the_payment(small))
        await start_claim(conn, "t1", "20")
        await until_settled(conn)
        [sprung] = proxy.sprung
        assert f"thread t1: process {sprung.pid} took longer than 2 s and was killed" in busy.err
        await until(lambda: is_gone(sprung.pid))
    await assert_all_is_well(conn)


# Helpers


def still_at_the_payment(statements: Sequence[str]) -> Trap:
    """SIGSTOP once the payment is written but not committed."""
    [at] = [at for at, statement in enumerate(statements, 1) if statement.startswith("INSERT INTO payments")]
    return Trap(at=at, when="after", fault="stop")


async def run_all(
    terminal: Terminal, commands: Sequence[Sequence[str]], kill_after_s: Callable[[], float] | None = None
) -> list[Done]:
    """Run whole commands, a few at a time; those that have not ended by then are killed after `kill_after_s`."""
    room = asyncio.Semaphore(_COMMANDS_AT_ONCE)

    async def run(words: Sequence[str]) -> Done:
        async with room:
            running = await terminal.start(*words)
            if kill_after_s:
                asyncio.get_running_loop().call_later(kill_after_s(), running.kill)
            try:
                return await running.end()
            finally:
                running.kill()

    return await asyncio.gather(*map(run, commands))


async def payments_of(conn: Connection, thread_id: str) -> list[dict[str, Any]]:
    return await all_rows(conn, "SELECT * FROM payments WHERE thread_id = %s", thread_id)


async def count(tally: collections.Counter[str], conn: Connection, *, kills: int) -> None:
    tally["kills"] += kills
    tally["payments"] += await value(conn, "SELECT count(*) FROM payments")
    tally["threads"] += await value(conn, "SELECT count(*) FROM threads")


async def members_are(group: int, count: int) -> bool:
    return len(members_of(group)) == count


async def is_paid(conn: Connection, thread_id: str) -> bool:
    return len(await payments_of(conn, thread_id)) == 1


async def has_children(process: psutil.Process) -> bool:
    return bool(process.children())


async def none_is_held(conn: Connection) -> bool:
    """Whether no thread is locked by a driver."""
    held = "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND objsubid = 1"
    return bool(await value(conn, held) == 0)


async def has_sprung(proxy: FaultingProxy) -> bool:
    return bool(proxy.sprung)


async def is_gone(pid: int) -> bool:
    return not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


def signal_all(pids: Sequence[int], number: signal.Signals) -> int:
    """Send it to all that are still there; how many that were."""
    sent = 0
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)
            sent += 1
    return sent
