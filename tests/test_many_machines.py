"""Two bots and three workers, each on a machine of its own, under load: some are killed, some are cut off."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import sys
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path

import pytest

from flow import audit
from flow.database import Connection, connect
from tests.chance import seeded
from tests.command import Running, Terminal
from tests.drives import assert_each_paid_once, assert_never_two_drivers, held_at_payment, until_settled
from tests.machines import Machine, machines, machines_are_to_be_had
from tests.people import start_claim
from tests.postgres import PostgresServer
from tests.rows import all_rows, one_row, until, value
from tests.services import Claim, Town
from tests.slack_door import Caller

pytestmark = [
    pytest.mark.skipif(not machines_are_to_be_had(), reason="making network namespaces takes root on Linux"),
    pytest.mark.timeout(400),
]

LOAD_S = 40.0
# Keepalives find a vanished machine within 25 s; then its thread is another worker's.
TAKEOVER_S = 40.0


class Company:
    """One database on one machine, and services on others: each finds it at its own cable's other end."""

    def __init__(self, town: Town, server: PostgresServer, database: str, places: list[Machine]) -> None:
        self.town, self.places, self._server, self._database = town, places, server, database
        self._stack = contextlib.AsyncExitStack()
        self._callers: dict[Machine, Caller] = {}

    async def start(self, command: str, place: Machine) -> Running:
        """`bot` or `work`, which ends with the company."""
        settings = {
            "DATABASE_URL": self._server.url(self._database, at=place.outside),
            "SLACK_API_URL": self.town.slack.url_at(place.outside),
            "HOST": place.inside,
            "PORT": "4000",
            "HEALTH_PORT": "4001",
            "STAND_BY": "2",
        }
        return await self._stack.enter_async_context(self.town.service(command, place, **settings))

    async def click_until_heard(self, claim: Claim, *, at: Sequence[Machine] = ()) -> int:
        """Through one bot or the other, as a load balancer does it (or `at` these); how often nobody answered."""
        for unheard, place in enumerate(itertools.cycle(at or self.places[:2])):
            if await self.town.click(claim.approve, caller=await self._caller(place)) == 200:
                return unheard
            assert unheard < 200
            await asyncio.sleep(0.2)
        raise AssertionError

    async def posted(self, conn: Connection, thread_id: str) -> list[Claim]:
        """A claim that waits, with its card."""
        claims = await self.town.waiting(conn, [thread_id])
        await self.town.until_posted(claims)
        return claims

    async def _caller(self, place: Machine) -> Caller:
        if place not in self._callers:
            caller = Caller(f"http://{place.inside}:4000")
            self._callers[place] = await self._stack.enter_async_context(caller)
        return self._callers[place]

    async def aclose(self) -> None:
        await self._stack.aclose()


@pytest.fixture
def places() -> Iterator[list[Machine]]:
    with machines(5) as places:
        yield places


@pytest.fixture
def server(places: list[Machine]) -> Iterator[PostgresServer]:
    with PostgresServer(listens_on=[place.outside for place in places]) as server:
        yield server


@pytest.fixture
async def company(
    places: list[Machine], server: PostgresServer, tmp_path: Path
) -> AsyncIterator[tuple[Company, Connection]]:
    outsides = [place.outside for place in places]
    with server.database() as url:
        async with Town(url, Terminal(tmp_path), *outsides) as town, await connect(url, "drive") as conn:
            name = await value(conn, "SELECT current_database()")
            async with contextlib.aclosing(Company(town, server, name, places)) as company:
                yield company, conn


async def test_two_bots_and_three_workers_lose_and_double_nothing_while_some_of_them_vanish(
    company: tuple[Company, Connection],
) -> None:
    firm, conn = company
    chance = seeded()
    bot, _ = [await firm.start("bot", place) for place in firm.places[:2]]
    workers = [await firm.start("work", place) for place in firm.places[2:]]
    heard: dict[str, int] = {}
    numbers = itertools.count()

    async def a_claims_life(thread_id: str) -> None:
        async def asked() -> list[Claim]:
            rows = await all_rows(conn, "SELECT interrupt_id FROM approvals WHERE thread_id = %s", thread_id)
            body = firm.town.caller.body_of
            return [
                Claim(thread_id=thread_id, interrupt_id=row["interrupt_id"], approve=await body(conn, **row))
                for row in rows
            ]

        [claim] = await until(asked, within_s=TAKEOVER_S + 20)
        # Nobody is shown anew what is settled, so whoever looks for its card below was shown it before.
        await firm.town.until_posted([claim])
        await asyncio.sleep(chance.uniform(0, 3))
        heard[claim.interrupt_id] = await firm.click_until_heard(claim)

    async def trouble() -> None:
        # The pauses are the load.
        await asyncio.sleep(LOAD_S / 8)
        bot.kill()
        await asyncio.sleep(LOAD_S / 8)
        workers[0].kill()
        await firm.start("bot", firm.places[0])
        await asyncio.sleep(LOAD_S / 8)
        firm.places[1].unplug()
        firm.places[3].unplug()
        await asyncio.sleep(LOAD_S / 4)
        firm.places[1].plug()
        await asyncio.sleep(LOAD_S / 8)
        firm.places[3].plug()

    began = time.monotonic()
    async with asyncio.TaskGroup() as group:
        group.create_task(trouble())
        while time.monotonic() < began + LOAD_S:
            thread_id = f"t{next(numbers):03}"
            await start_claim(conn, thread_id)
            group.create_task(a_claims_life(thread_id))
            await asyncio.sleep(chance.uniform(0.2, 0.8))
    await until_settled(conn)
    await assert_each_paid_once(conn)
    await assert_never_two_drivers(conn)
    decided = await all_rows(conn, "SELECT interrupt_id FROM decisions")
    assert sorted(row["interrupt_id"] for row in decided) == sorted(heard)
    await firm.town.assert_shown_as_paid([row["thread_id"] for row in await all_rows(conn, "TABLE threads")])
    assert (await audit.verify(conn)).wrong is None
    # The bot whose cable was pulled takes clicks, and hears the database, as before.
    [last] = await firm.posted(conn, "last")
    await firm.click_until_heard(last, at=[firm.places[1]])
    await until_settled(conn)
    await firm.town.assert_shown_as_paid(["last"])

    async def listens() -> bool:
        here = (
            "SELECT count(*) > 0 FROM pg_stat_activity"
            " WHERE application_name = 'claim_flow listen' AND host(client_addr) = %s"
        )
        return bool(await value(conn, here, firm.places[1].inside))

    await until(listens, within_s=60)
    sys.stderr.write(
        f"\n2 bots and 3 workers on 5 machines, of which a bot and a worker were killed and two were cut off:"
        f" {len(heard)} claims paid once, {sum(heard.values())} clicks repeated\n"
    )


async def test_a_worker_whose_machine_vanishes_in_mid_drive_is_taken_over(
    company: tuple[Company, Connection],
) -> None:
    firm, conn = company
    by_address = {place.inside: place for place in firm.places[2:4]}
    for place in by_address.values():
        await firm.start("work", place)
    async with held_at_payment(conn, firm.town.terminal.environment["DATABASE_URL"], ["t1"]) as until_held:
        await until_held()
        driver = await one_row(
            conn,
            "SELECT host(client_addr) AS address, pid FROM pg_stat_activity"
            " WHERE pid = (SELECT driver_pid FROM threads WHERE thread_id = 't1')",
        )
        vanished = by_address[driver["address"]]
        vanished.unplug()
        began = time.monotonic()

    async def paid() -> bool:
        return bool(await value(conn, "SELECT status = 'paid' FROM threads WHERE thread_id = 't1'"))

    await until(paid, within_s=TAKEOVER_S)
    took_s = time.monotonic() - began
    await assert_each_paid_once(conn)
    vanished.plug()
    # It comes back by itself, and works.
    for number in range(6):
        await start_claim(conn, f"u{number}", "20")
    await until_settled(conn)
    await assert_each_paid_once(conn)

    async def listens_again() -> bool:
        here = (
            "SELECT count(DISTINCT client_addr) = 2 FROM pg_stat_activity"
            " WHERE application_name = 'claim_flow listen' AND client_addr IS NOT NULL"
        )
        return bool(await value(conn, here))

    await until(listens_again, within_s=60)
    sys.stderr.write(f"\na machine vanished in mid-drive: its thread was paid by another worker after {took_s:.1f} s\n")
