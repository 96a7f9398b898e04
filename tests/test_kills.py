"""SIGKILL, anywhere: a payment is made once or not at all, and whoever is there afterwards finishes the thread.

Every place where a drive can die is visited once with a proxy that kills between two round trips; random moments are
tried besides. The processes are those of users: the command line, a worker with its stand-bys.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import os
import re
import signal
import sys
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest

from flow.database import Connection
from flow.drive import Graph, drive
from tests.chance import seeded
from tests.command import Done, Terminal, members_of, worker
from tests.drives import (
    SETTLING_S,
    approve_all,
    assert_each_paid_once,
    assert_never_two_drivers,
    everything,
    held_at_payment,
    until_settled,
)
from tests.people import POLICY, start_claim
from tests.pg_proxy import FaultingProxy, Sprung, Trap
from tests.rows import all_rows, until, value

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="who is at the end of a socket is asked Linux's way"),
    # A minute each for the largest, if nothing else keeps the machine busy.
    pytest.mark.timeout(300),
]

# Whole commands at once: each is busy for a second with its imports.
_COMMANDS_AT_ONCE = 3


@pytest.fixture(scope="module")
def tally(request: pytest.FixtureRequest) -> Iterator[collections.Counter[str]]:
    """Counts kills, and at the end says how many there were and what became of the threads."""
    counted: collections.Counter[str] = collections.Counter()
    yield counted
    capture = request.config.pluginmanager.get_plugin("capturemanager")
    with capture.global_and_fixture_disabled() if capture else contextlib.nullcontext():
        # Not stdout: under pytest-xdist that is no terminal.
        sys.stderr.write(f"\n{', '.join(f'{count} {what}' for what, count in counted.items())}\n")


@pytest.fixture
async def proxy(database_url: str, conn: Connection) -> AsyncIterator[Witnessed]:
    async with Witnessed(database_url, conn) as proxy:
        yield proxy


class Witnessed(FaultingProxy):
    """A proxy that looks, at each kill, at what is paid at that moment."""

    def __init__(self, url: str, conn: Connection) -> None:
        super().__init__(url, self._look)
        self._conn = conn
        self.paid: dict[str, list[dict[str, Any]]] = {}

    async def _look(self, sprung: Sprung) -> None:
        self.paid[sprung.thread_id] = await payments_of(self._conn, sprung.thread_id)


# A drive in a stand-by


async def test_a_standby_killed_anywhere_in_its_drive_pays_once(
    tmp_path: Path, proxy: Witnessed, conn: Connection, tally: collections.Counter[str]
) -> None:
    terminal = Terminal(tmp_path, DATABASE_URL=proxy.url, STAND_BY="3")
    async with worker(terminal, conn):
        small, asking, resumed = await drives_undisturbed(proxy, conn)
        for number, trap in enumerate(everywhere(resumed)):
            # Its first drive is let through.
            proxy.lay(f"resumed-{number:03}", None, trap)
            await start_claim(conn, f"resumed-{number:03}", "250")
        await until_settled(conn)
        for kind, statements, amount in (("small", small, "20"), ("asking", asking, "250")):
            for number, trap in enumerate(everywhere(statements)):
                proxy.lay(f"{kind}-{number:03}", trap)
                await start_claim(conn, f"{kind}-{number:03}", amount)
        await approve_all(conn, "resumed-%")
        planned = sum(len(everywhere(statements)) for statements in (small, asking, resumed))
        await assert_killed_as_planned(proxy, planned)
        await until_settled(conn)
        assert {row["status"] for row in await all_rows(conn, "SELECT status FROM threads")} == {"paid", "waiting"}
        await approve_all(conn, "asking-%")
        await until_settled(conn)
    await assert_all_is_well(conn, proxy)
    await count(tally, conn, kills=planned)


async def test_a_standby_killed_twice_in_one_drive_pays_once(
    tmp_path: Path, proxy: Witnessed, conn: Connection, tally: collections.Counter[str]
) -> None:
    """The drive that picks up what a dead one left dies too, at the same place and at the next."""
    async with worker(Terminal(tmp_path, DATABASE_URL=proxy.url, STAND_BY="3"), conn):
        small, _, _ = await drives_undisturbed(proxy, conn)
        places = [trap.at for trap in everywhere(small) if trap.when == "before"][::3]
        for at in places:
            proxy.lay(f"twice-{at:03}", Trap(at=at), Trap(at=max(1, at // 2)))
            await start_claim(conn, f"twice-{at:03}", "20")
        await until_settled(conn)
    # The second drive of those that had all but ended may have been shorter than its trap is deep.
    assert len(proxy.sprung) > len(places) * 3 // 2
    await assert_all_is_well(conn, proxy)
    await count(tally, conn, kills=len(proxy.sprung))


async def test_standbys_killed_at_random_moments_pay_once(
    tmp_path: Path, database_url: str, conn: Connection, graph: Graph, tally: collections.Counter[str]
) -> None:
    random = seeded()
    threads, kills = 60, 0
    for number in range(0, threads, 2):
        await start_claim(conn, f"large-{number:02}", "250")
        await drive(conn, f"large-{number:02}", graph=graph, policy=POLICY)
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


async def test_a_start_killed_between_any_two_steps_pays_once(
    tmp_path: Path, database_url: str, proxy: Witnessed, conn: Connection, tally: collections.Counter[str]
) -> None:
    terminal = Terminal(tmp_path, DATABASE_URL=proxy.url)
    proxy.lay("probe")
    assert (await terminal.run_meanwhile("start", "--thread", "probe", "--amount", "20")).code == 0
    [door], [steps] = proxy.asked["probe", "door"], proxy.asked["probe", "drive"]
    written = [at for at, statement in enumerate(steps, 1) if re.match("INSERT|UPDATE|COMMIT", statement)]
    filed = door.index("COMMIT") + 1
    traps = [
        *(Trap(at=at) for at in written),
        *(Trap(at=at, when="after") for at in written if steps[at - 1] == "COMMIT"),
        *(Trap(at=filed, when=when, role="door") for when in ("before", "after")),
    ]
    for number, trap in enumerate(traps):
        proxy.lay(f"start-{number:02}", trap)
    commands = [["start", "--thread", f"start-{number:02}", "--amount", "20"] for number in range(len(traps))]
    for done in await run_all(terminal, commands):
        assert (done.code, done.out, done.err) == (-signal.SIGKILL, "", "")
    await assert_killed_as_planned(proxy, len(traps))

    # Whoever died before its claim was filed has left nothing at all.
    assert await value(conn, "SELECT count(*) FROM threads") == len(traps)
    async with worker(Terminal(tmp_path, DATABASE_URL=database_url), conn):
        await until_settled(conn)
    await assert_all_is_well(conn, proxy)
    await count(tally, conn, kills=len(traps))


async def test_commands_killed_at_random_moments_pay_once(
    tmp_path: Path, database_url: str, conn: Connection, graph: Graph, tally: collections.Counter[str]
) -> None:
    random = seeded()
    terminal = Terminal(tmp_path, DATABASE_URL=database_url)
    commands = []
    for number in range(4):
        await start_claim(conn, f"resume-{number}", "250")
        await drive(conn, f"resume-{number}", graph=graph, policy=POLICY)
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
    tmp_path: Path, database_url: str, proxy: Witnessed, conn: Connection
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
    await assert_all_is_well(conn, proxy)
    assert (await terminal.run_meanwhile(*words)).out == "t1: 20.00 USD is paid, reference L-t1\n"


async def test_a_worker_that_stood_still_for_too_long_writes_nothing_more(
    tmp_path: Path, database_url: str, proxy: Witnessed, conn: Connection
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
    await assert_all_is_well(conn, proxy)


async def test_a_standby_that_stands_still_is_killed_by_its_worker(
    tmp_path: Path, proxy: Witnessed, conn: Connection
) -> None:
    async with worker(Terminal(tmp_path, DATABASE_URL=proxy.url, DRIVE_TIMEOUT="2"), conn) as busy:
        small, _, _ = await drives_undisturbed(proxy, conn)
        proxy.lay("t1", still_at_the_payment(small))
        await start_claim(conn, "t1", "20")
        await until_settled(conn)
        [sprung] = proxy.sprung
        assert f"thread t1: process {sprung.pid} took longer than 2 s and was killed" in busy.err
        await until(lambda: is_gone(sprung.pid))
    await assert_all_is_well(conn, proxy)


# Helpers


def everywhere(statements: Sequence[str]) -> list[Trap]:
    """Traps at each round trip of a drive that asks this; and after those whose success may go unheard."""
    places = [at for at, statement in enumerate(statements, 1) if not statement.startswith("PREPARE ")]
    unheard = [at for at in places if re.match("COMMIT|INSERT INTO payments", statements[at - 1])]
    return [*(Trap(at=at) for at in places), *(Trap(at=at, when="after") for at in [*unheard, places[-1]])]


def still_at_the_payment(statements: Sequence[str]) -> Trap:
    """SIGSTOP once the payment is written but not committed."""
    [at] = [at for at, statement in enumerate(statements, 1) if statement.startswith("INSERT INTO payments")]
    return Trap(at=at, when="after", fault="stop")


async def drives_undisturbed(proxy: FaultingProxy, conn: Connection) -> tuple[list[str], list[str], list[str]]:
    """What drives ask: for a small claim, for a large one until its request, and for that after the approval."""
    for thread_id, amount in (("probe-small", "20"), ("probe-large", "250")):
        proxy.lay(thread_id)
        await start_claim(conn, thread_id, amount)
    await until_settled(conn)
    await approve_all(conn, "probe-large")
    await until_settled(conn)
    [small], [asking, resumed] = proxy.asked["probe-small", "drive"], proxy.asked["probe-large", "drive"]

    async def all_ended() -> bool:
        return all(drive[-1].startswith("SELECT pg_advisory_unlock") for drive in (small, asking, resumed))

    await until(all_ended)
    return small, asking, resumed


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


async def assert_killed_as_planned(proxy: Witnessed, planned: int) -> None:
    """Each trap springs, and at that moment there was one payment if it had been committed, else none."""

    async def all_sprung() -> bool:
        return len(proxy.sprung) == planned

    await until(all_sprung, within_s=SETTLING_S)
    assert {len(proxy.paid[sprung.thread_id]) for sprung in proxy.sprung} == {0, 1}
    for sprung in proxy.sprung:
        assert len(proxy.paid[sprung.thread_id]) == sprung.has_paid, sprung


async def assert_all_is_well(conn: Connection, proxy: Witnessed | None = None) -> None:
    """Every thread is paid, once, nobody drove it beside another, and what was paid at a kill is what stands."""
    await assert_each_paid_once(conn)
    await assert_never_two_drivers(conn)
    for thread_id, rows in proxy.paid.items() if proxy else ():
        assert rows in ([], await payments_of(conn, thread_id))


async def count(tally: collections.Counter[str], conn: Connection, *, kills: int) -> None:
    tally["kills"] += kills
    tally["payments"] += await value(conn, "SELECT count(*) FROM payments")
    tally["threads"] += await value(conn, "SELECT count(*) FROM threads")


async def members_are(group: int, count: int) -> bool:
    return len(members_of(group)) == count


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
