"""A fault at every boundary of a whole `start`: filing the claim, the test of locks, its own drive, the report."""

from __future__ import annotations

import asyncio
import collections
import signal
import sys
from pathlib import Path
from unittest.mock import ANY

import pytest

from flow.audit import record_policy
from flow.database import Connection
from flow.policy import policy_of
from flow.settings import Settings
from tests.boundaries import assert_all_is_well, few_at_once, traps, until_sprung
from tests.command import Done, Terminal, worker
from tests.drives import until_settled
from tests.pg_proxy import FaultingProxy, Trap, When
from tests.processes import end_of, start_process
from tests.rows import all_rows, value
from tests.victims import command

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="who is at the end of a socket is asked Linux's way"),
    pytest.mark.timeout(300),
]


class Desk:
    """Where `start` is typed, a folder and a proxy for each."""

    def __init__(self, folder: Path, url: str) -> None:
        self.terminal, self._url = Terminal(folder, DATABASE_URL=url), url

    async def start(self, thread_id: str, trap: Trap | None = None) -> tuple[Done, list[str]]:
        """What it left behind, and the round trips that it asked for. The trap has sprung."""
        async with FaultingProxy(self._url) as proxy:
            asked = proxy.arm(trap)
            out, err = self.terminal.folder / f"{thread_id}.out", self.terminal.folder / f"{thread_id}.err"
            settings = self.terminal.environment | {"DATABASE_URL": proxy.url}
            process = start_process(command, ["start", "--thread", thread_id, "--amount", "20"], settings, out, err)
            try:
                done = Done(code=await end_of(process), out=out.read_text(), err=err.read_text())
            finally:
                process.kill()
            await until_sprung(proxy, 1 if trap else 0)
        return done, asked

    async def heal(self, conn: Connection) -> None:
        async with worker(self.terminal, conn):
            await until_settled(conn)


@pytest.fixture
async def desk(tmp_path: Path, database_url: str, conn: Connection) -> Desk:
    # The first command of all records its policy: then every start asks for as many round trips as the probe.
    await record_policy(conn, policy_of(Settings()), by="cli:ann")
    return Desk(tmp_path, database_url)


@pytest.mark.parametrize("when", ["before", "after"])
async def test_a_start_killed_at_any_boundary_pays_once(
    desk: Desk, conn: Connection, tally: collections.Counter[str], when: When
) -> None:
    async def kill(trap: Trap) -> None:
        done, _ = await desk.start(f"t{trap.at:02}", trap)
        assert done == Done(code=-signal.SIGKILL, out="", err="")

    probe, asked = await desk.start("probe")
    assert probe == paid("probe")
    await few_at_once(kill(trap) for trap in traps(asked, "kill", when))
    await type_again(desk, await unfiled(conn, asked, when))
    await desk.heal(conn)
    await assert_all_is_well(conn)
    await count(tally, conn, asked)


@pytest.mark.parametrize("when", ["before", "after"])
async def test_a_start_cut_off_at_any_boundary_pays_once_and_never_says_so_too_early(
    desk: Desk, conn: Connection, tally: collections.Counter[str], when: When
) -> None:
    async def cut(trap: Trap) -> None:
        thread_id = f"t{trap.at:02}"
        done, _ = await desk.start(thread_id, trap)
        if done.code:
            assert (done.code, done.out) == (1, ""), done
            assert "error: the database refused or went away" in done.err or "error: no connection" in done.err, done
        else:
            assert done == paid(thread_id)
            assert await value(conn, "SELECT count(*) FROM payments WHERE thread_id = %s", thread_id) == 1

    _, asked = await desk.start("probe")
    await few_at_once(cut(trap) for trap in traps(asked, "cut", when))
    await type_again(desk, await unfiled(conn, asked, when))
    await desk.heal(conn)
    await assert_all_is_well(conn)
    await count(tally, conn, asked)


async def test_a_start_stalled_at_any_boundary_pays_once(
    desk: Desk, conn: Connection, tally: collections.Counter[str]
) -> None:
    async def stall(trap: Trap) -> None:
        done, _ = await desk.start(f"t{trap.at:02}", trap)
        if trap.at in filing:
            # No door may keep a transaction open for so long.
            assert (done.code, done.out) == (1, "")
            assert "IdleInTransactionSessionTimeout" in done.err
        else:
            assert done == paid(f"t{trap.at:02}")

    _, asked = await desk.start("probe")
    filing = range(asked.index("BEGIN") + 2, asked.index("COMMIT") + 2)
    # Each has three connections while it tests the locks: so many at once fit below the 100 of a server's default.
    for part in range(3):
        await asyncio.gather(*map(stall, traps(asked, "stall")[part::3]))
    await type_again(desk, [f"t{at:02}" for at in filing])
    await assert_all_is_well(conn)
    await count(tally, conn, asked)


def paid(thread_id: str) -> Done:
    return Done(code=0, out=f"{thread_id}: 20.00 USD is paid, reference L-{thread_id}\n", err="")


async def unfiled(conn: Connection, asked: list[str], when: When) -> list[str]:
    """The threads of which there is nothing, after a fault at each boundary: a claim is filed whole, with the first
    COMMIT."""
    filed = asked.index("COMMIT") + 1
    missing = [f"t{at:02}" for at in range(1, filed + 1 if when == "before" else filed)]
    there = {row["thread_id"] for row in await all_rows(conn, "SELECT thread_id FROM threads")}
    assert there == {"probe", *(f"t{at:02}" for at in range(1, len(asked) + 1))} - set(missing)
    return missing


async def type_again(desk: Desk, thread_ids: list[str]) -> None:
    """As whoever saw it fail does."""

    async def start(thread_id: str) -> None:
        assert await desk.start(thread_id) == (paid(thread_id), ANY)

    await few_at_once(map(start, thread_ids))


async def count(tally: collections.Counter[str], conn: Connection, asked: list[str]) -> None:
    """One mode has been visited at each point."""
    tally["boundaries"] = len(asked)
    tally["modes"] += 1
    tally["faults"] += len(asked)
    tally["payments"] += await value(conn, "SELECT count(*) FROM payments")
