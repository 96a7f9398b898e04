"""A fault at every boundary of a delivery: posting a card; changing it to its outcome and saying that below it."""

from __future__ import annotations

import asyncio
import collections
import signal
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Literal

import psycopg
import pytest
from slack_sdk.web.async_client import AsyncWebClient

from bot import outlet
from bot.deliver import Deliverer
from bot.outlet import Outlet
from flow.database import Connection, connect
from flow.drive import drive
from flow.flows import Flows
from tests import victims
from tests.boundaries import assert_all_is_well, assert_shown_once, deliver_all, traps, until_sprung
from tests.drives import approve_all
from tests.driving import waiting_claim
from tests.fault_proxy import FaultProxy
from tests.local_slack import CHANNEL, LocalSlack, skip_reason
from tests.people import POLICY
from tests.pg_proxy import FaultingProxy, Trap, When
from tests.processes import end_of, start_process
from tests.rows import all_rows, value
from tests.slack_door import client_of

pytestmark = [
    pytest.mark.skipif(skip_reason() is not None, reason=skip_reason() or ""),
    pytest.mark.skipif(sys.platform != "linux", reason="who is at the end of a socket is asked Linux's way"),
    pytest.mark.timeout(300),
]

# What is to be delivered: a new card; or a changed one, and the reply below it.
Kind = Literal["card", "outcome"]
KINDS: tuple[Kind, ...] = ("card", "outcome")
_DELIVERIES: dict[Kind, int] = {"card": 1, "outcome": 2}


@dataclass(frozen=True, kw_only=True)
class Office:
    """The workspace, the database, and a deliverer that works."""

    url: str
    conn: Connection
    flows: Flows
    slack: FaultProxy
    client: AsyncWebClient
    deliverer: Deliverer

    async def prepare(self, kind: Kind, thread_id: str) -> None:
        """Have a delivery of this kind wait."""
        await waiting_claim(self.conn, self.flows, thread_id)
        if kind == "outcome":
            await self.deliverer.sweep(self.conn)
            await self.finish(thread_id)

    async def finish(self, thread_id: str) -> None:
        """Approve and pay."""
        await approve_all(self.conn, thread_id)
        assert await drive(self.conn, thread_id, flows=self.flows, policy=POLICY) == "over"

    async def asked_undisturbed(self, kind: Kind) -> list[str]:
        """What a deliverer asks for one delivery, a round trip each."""
        await self.prepare(kind, f"{kind}-probe")
        async with FaultingProxy(self.url) as proxy:
            asked = proxy.arm()
            async with await connect(proxy.url, "door") as conn:
                assert await self.deliverer.sweep(conn) == (_DELIVERIES[kind], 0)
        return asked

    async def assert_well_in_the_end(self) -> int:
        """Every claim is paid, and everything is shown. Gives the number of messages."""
        for row in await all_rows(self.conn, "SELECT thread_id FROM threads WHERE status = 'waiting'"):
            await self.finish(row["thread_id"])
        await deliver_all(self.conn, self.deliverer)
        assert await value(self.conn, "SELECT count(*) FROM notices WHERE status <> 'sent'") == 0
        await assert_all_is_well(self.conn)
        return await assert_shown_once(self.conn, self.client)


@pytest.fixture
def workspace() -> Iterator[LocalSlack]:
    with LocalSlack(request_url="http://127.0.0.1:9/") as running:
        yield running


@pytest.fixture
async def office(
    workspace: LocalSlack, database_url: str, conn: Connection, flows: Flows, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Office]:
    monkeypatch.setattr(outlet, "_BETWEEN_POSTS_S", 0.0)
    async with FaultProxy(workspace.ui_url) as slack, client_of(slack.api_url) as client:
        deliverer = Deliverer(Outlet(client, CHANNEL))
        yield Office(url=database_url, conn=conn, flows=flows, slack=slack, client=client, deliverer=deliverer)


@pytest.mark.parametrize("when", ["before", "after"])
async def test_a_deliverer_killed_at_any_boundary_shows_everything_once(
    office: Office, tally: collections.Counter[str], when: When
) -> None:
    points = 0
    for kind in KINDS:
        asked = await office.asked_undisturbed(kind)
        points += len(asked)
        for trap in traps(asked, "kill", when):
            await office.prepare(kind, f"{kind}-{trap.at:02}")
            async with FaultingProxy(office.url) as proxy:
                proxy.arm(trap)
                process = start_process(victims.deliver, proxy.url, office.slack.api_url)
                assert await end_of(process) == -signal.SIGKILL
                await until_sprung(proxy)
            await deliver_all(office.conn, office.deliverer)
    await count(tally, office, points)


@pytest.mark.parametrize("when", ["before", "after"])
async def test_a_deliverer_cut_off_at_any_boundary_shows_everything_once(
    office: Office, tally: collections.Counter[str], when: When
) -> None:
    points = 0
    for kind in KINDS:
        asked = await office.asked_undisturbed(kind)
        points += len(asked)
        for trap in traps(asked, "cut", when):
            await office.prepare(kind, f"{kind}-{trap.at:02}")
            async with FaultingProxy(office.url) as proxy, await connect(proxy.url, "door") as conn:
                proxy.arm(trap)
                with pytest.raises(psycopg.OperationalError):
                    await office.deliverer.sweep(conn)
                await until_sprung(proxy)
            await deliver_all(office.conn, office.deliverer)
    await count(tally, office, points)


async def test_a_deliverer_stalled_at_any_boundary_beside_another_one_shows_everything_once(
    office: Office, tally: collections.Counter[str]
) -> None:
    points = 0
    for kind in KINDS:
        asked = await office.asked_undisturbed(kind)
        points += len(asked)
        async with stalled(office, kind, traps(asked, "stall")):
            await office.deliverer.sweep(office.conn)
    await count(tally, office, points)


async def test_a_deliverer_that_outlives_its_lease_at_any_boundary_shows_everything_once(office: Office) -> None:
    """As one does that stood still for longer than a lease: another one has done its work meanwhile."""
    asked = await office.asked_undisturbed("outcome")
    async with stalled(office, "outcome", traps(asked, "stall")):
        await deliver_all(office.conn, office.deliverer)
    await office.assert_well_in_the_end()


@asynccontextmanager
async def stalled(office: Office, kind: Kind, planned: list[Trap]) -> AsyncIterator[None]:
    """Deliverers that stall, all at the same time, for as long as the block; then they come through."""
    for trap in planned:
        await office.prepare(kind, f"{kind}-{trap.at:02}")
        await office.conn.execute("UPDATE notices SET due_at = 'infinity' WHERE due_at IS NOT NULL")
    async with AsyncExitStack() as stack:
        sweeps, proxies = [], []
        # The furthest first: each is to find nothing but its own delivery.
        for trap in reversed(planned):
            proxy = await stack.enter_async_context(FaultingProxy(office.url))
            conn = await stack.enter_async_context(await connect(proxy.url, "door"))
            await office.conn.execute(
                "UPDATE notices SET due_at = clock_timestamp() WHERE thread_id = %s AND due_at = 'infinity'",
                (f"{kind}-{trap.at:02}",),
            )
            proxy.arm(trap)
            sweeps.append(asyncio.create_task(office.deliverer.sweep(conn)))
            proxies.append(proxy)
            await until_sprung(proxy)
        yield
        assert all(proxy.stalling for proxy in proxies)
        assert [failed for _sent, failed in await asyncio.gather(*sweeps)] == [0] * len(planned)


async def count(tally: collections.Counter[str], office: Office, points: int) -> None:
    """One mode has been visited at each point, and all is well in the end."""
    tally["boundaries"] = points
    tally["modes"] += 1
    tally["faults"] += points
    tally["messages"] += await office.assert_well_in_the_end()
    tally["payments"] += await value(office.conn, "SELECT count(*) FROM payments")
