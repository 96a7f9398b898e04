"""A fault at every boundary of a drive: of a small claim, of a large one until it asks, and of that one once approved.

Killed are stand-bys of a real worker. Cut off and stalled are drives in this process: to Postgres they are the same.
"""

from __future__ import annotations

import asyncio
import collections
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path
from typing import Any, Literal

import psycopg
import pytest

from flow.database import Connection, connect
from flow.drive import drive
from flow.flows import Flows
from tests.boundaries import assert_all_is_well, traps, until_sprung
from tests.command import Terminal, worker
from tests.drives import SETTLING_S, approve_all, drives_undisturbed, until_settled
from tests.people import POLICY, start_claim
from tests.pg_proxy import FaultingProxy, Sprung, Trap, When
from tests.rows import all_rows, value

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="who is at the end of a socket is asked Linux's way"),
    pytest.mark.timeout(300),
]

Kind = Literal["small", "asking", "resumed"]
KINDS: tuple[Kind, ...] = ("small", "asking", "resumed")


class Witness(FaultingProxy):
    """A proxy that looks, at each fault, at what is paid at that moment."""

    def __init__(self, url: str, conn: Connection) -> None:
        super().__init__(url, self._look)
        self._conn = conn
        self._paid: dict[str, list[dict[str, Any]]] = {}

    async def _look(self, sprung: Sprung) -> None:
        self._paid[sprung.thread_id] = await self._payments_of(sprung.thread_id)

    async def _payments_of(self, thread_id: str) -> list[dict[str, Any]]:
        return await all_rows(self._conn, "SELECT * FROM payments WHERE thread_id = %s", thread_id)

    async def assert_all_sprang(self, planned: int) -> None:
        """Each trap sprang, and there was a payment at that moment if it had been committed, else none."""
        for sprung in await until_sprung(self, planned, SETTLING_S):
            assert len(self._paid[sprung.thread_id]) == sprung.has_paid, sprung
        assert {len(paid) for paid in self._paid.values()} == {0, 1}

    async def assert_payments_stand(self) -> None:
        """What was paid at a fault is what is paid now."""
        for thread_id, paid in self._paid.items():
            assert paid in ([], await self._payments_of(thread_id))


@pytest.fixture
async def proxy(database_url: str) -> AsyncIterator[Witness]:
    async with await connect(database_url, "listen") as looking, Witness(database_url, looking) as proxy:
        yield proxy


@pytest.mark.parametrize("when", ["before", "after"])
async def test_a_standby_killed_at_any_boundary_of_its_drive_pays_once(
    tmp_path: Path, proxy: Witness, conn: Connection, tally: collections.Counter[str], when: When
) -> None:
    async with worker(Terminal(tmp_path, DATABASE_URL=proxy.url, STAND_BY="3"), conn):
        small, asking, resumed = await drives_undisturbed(proxy, conn)
        for trap in traps(resumed, "kill", when):
            # Its first drive is let through.
            proxy.lay(f"resumed-{trap.at:03}", None, trap)
            await start_claim(conn, f"resumed-{trap.at:03}", "250")
        await until_settled(conn)
        for kind, asked, amount in (("small", small, "20"), ("asking", asking, "250")):
            for trap in traps(asked, "kill", when):
                proxy.lay(f"{kind}-{trap.at:03}", trap)
                await start_claim(conn, f"{kind}-{trap.at:03}", amount)
        await approve_all(conn, "resumed-%")
        points = len(small) + len(asking) + len(resumed)
        await proxy.assert_all_sprang(points)
        await until_settled(conn)
        assert {row["status"] for row in await all_rows(conn, "SELECT status FROM threads")} == {"paid", "waiting"}
        await approve_all(conn, "asking-%")
        await until_settled(conn)
    await assert_all_is_well(conn)
    await proxy.assert_payments_stand()
    await count(tally, conn, points)


@pytest.mark.parametrize("when", ["before", "after"])
async def test_a_drive_cut_off_at_any_boundary_pays_once(
    tmp_path: Path,
    database_url: str,
    proxy: Witness,
    conn: Connection,
    flows: Flows,
    tally: collections.Counter[str],
    when: When,
) -> None:
    async def cut(kind: Kind, trap: Trap) -> None:
        async with warm_connection(proxy, conn, flows, f"{kind}-{trap.at:03}") as victim:
            await prepare(conn, flows, kind, f"{kind}-{trap.at:03}")
            proxy.lay(f"{kind}-{trap.at:03}", trap)
            # It hears nothing of a connection that is lost when there is nothing left to do.
            with suppress(psycopg.OperationalError):
                await drive(victim, f"{kind}-{trap.at:03}", flows=flows, policy=POLICY)
            assert victim.closed

    asked = {kind: await asked_undisturbed(proxy, conn, flows, kind) for kind in KINDS}
    for kind in KINDS:
        for trap in traps(asked[kind], "cut", when):
            await cut(kind, trap)
    points = sum(map(len, asked.values()))
    await proxy.assert_all_sprang(points)
    await heal(tmp_path, database_url, conn)
    await assert_all_is_well(conn)
    await proxy.assert_payments_stand()
    await count(tally, conn, points)


async def test_a_drive_stalled_at_any_boundary_is_alone_and_pays_once(
    tmp_path: Path,
    database_url: str,
    proxy: Witness,
    conn: Connection,
    flows: Flows,
    tally: collections.Counter[str],
) -> None:
    asked = {kind: await asked_undisturbed(proxy, conn, flows, kind) for kind in KINDS}
    # All of them would be more than the 100 connections that a server has by default.
    for kind in KINDS:
        await stall(proxy, database_url, conn, flows, kind, asked[kind])
    points = sum(map(len, asked.values()))
    await proxy.assert_all_sprang(points)
    # Nobody has lost anything, so nothing is left to anybody.
    await approve_all(conn, "asking-%")
    await heal(tmp_path, database_url, conn)
    await assert_all_is_well(conn)
    await proxy.assert_payments_stand()
    await count(tally, conn, points)


async def stall(proxy: Witness, url: str, conn: Connection, flows: Flows, kind: Kind, asked: list[str]) -> None:
    """Stall drives of this kind, all at the same time, while another driver tries each of their threads."""
    before = len(proxy.sprung)
    async with AsyncExitStack() as stack:
        victims: dict[str, Connection] = {}
        for trap in traps(asked, "stall"):
            thread_id = f"{kind}-{trap.at:03}"
            warm = warm_connection(proxy, conn, flows, thread_id)
            victims[thread_id] = await stack.enter_async_context(warm)
            await prepare(conn, flows, kind, thread_id)
            proxy.lay(thread_id, trap)
        drives = {
            thread_id: asyncio.create_task(drive(victim, thread_id, flows=flows, policy=POLICY))
            for thread_id, victim in victims.items()
        }
        await until_sprung(proxy, before + len(drives))
        async with await connect(url, "drive") as rival:
            for thread_id in drives:
                outcome = await drive(rival, thread_id, flows=flows, policy=POLICY)
                # Whoever has the thread's lock has the thread; only at its first boundary a drive has not got it yet.
                assert (outcome == "locked") != thread_id.endswith("-001"), thread_id
        assert not any(driving.done() for driving in drives.values())
        for thread_id, driving in drives.items():
            assert await driving == ("waiting" if thread_id.startswith("asking") else "over"), thread_id


async def prepare(conn: Connection, flows: Flows, kind: Kind, thread_id: str) -> None:
    """A thread that is due for a drive of this kind."""
    await start_claim(conn, thread_id, "20" if kind == "small" else "250")
    if kind == "resumed":
        assert await drive(conn, thread_id, flows=flows, policy=POLICY) == "waiting"
        await approve_all(conn, thread_id)


@asynccontextmanager
async def warm_connection(proxy: Witness, conn: Connection, flows: Flows, name: str) -> AsyncIterator[Connection]:
    """A connection that has driven a claim before, as those of stand-bys have: it asks what they ask."""
    async with await connect(proxy.url, "drive") as warm:
        await start_claim(conn, f"warm-{name}", "250")
        await drive(warm, f"warm-{name}", flows=flows, policy=POLICY)
        await approve_all(conn, f"warm-{name}")
        assert await drive(warm, f"warm-{name}", flows=flows, policy=POLICY) == "over"
        yield warm


async def asked_undisturbed(proxy: Witness, conn: Connection, flows: Flows, kind: Kind) -> list[str]:
    """What a drive of this kind asks, a round trip each."""
    async with warm_connection(proxy, conn, flows, f"{kind}-probe") as probe:
        await prepare(conn, flows, kind, f"{kind}-probe")
        proxy.lay(f"{kind}-probe")
        await drive(probe, f"{kind}-probe", flows=flows, policy=POLICY)
    [asked] = proxy.asked[f"{kind}-probe", "drive"]
    return asked


async def heal(folder: Path, url: str, conn: Connection) -> None:
    async with worker(Terminal(folder, DATABASE_URL=url), conn):
        await until_settled(conn)
        await approve_all(conn)
        await until_settled(conn)


async def count(tally: collections.Counter[str], conn: Connection, points: int) -> None:
    """One mode has been visited at each point."""
    tally["boundaries"] = points
    tally["modes"] += 1
    tally["faults"] += points
    tally["payments"] += await value(conn, "SELECT count(*) FROM payments")
