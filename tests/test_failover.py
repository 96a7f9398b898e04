"""The server is lost, and the one that follows it takes its place: what was answered is there if the first waited."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from flow import audit
from flow.database import Connection, connect
from tests.bank import Bank
from tests.command import Terminal
from tests.drives import assert_each_paid_once, assert_never_two_drivers, until_settled
from tests.postgres import PostgresServer
from tests.rows import all_rows, until, value
from tests.services import Claim, Town

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="the server is stopped Linux's way"),
    pytest.mark.timeout(300),
]

CLAIMS = 30
HEARD_BEFORE = 10


class Pair:
    """Two servers and one database on them, by a URL that leads to whichever takes writes."""

    def __init__(self, first: PostgresServer, second: PostgresServer, name: str) -> None:
        self.first, self.second, self._name = first, second, name
        hosts, ports = f"{first.folder},{second.folder}", f"{first.port},{second.port}"
        self.url = f"postgresql://postgres@/{name}?host={hosts}&port={ports}&target_session_attrs=read-write"

    async def fail_over(self) -> None:
        """The first one is killed. Returns when the second takes writes."""
        await asyncio.to_thread(self.first.stop, "immediate")
        await asyncio.to_thread(self.second.promote)

    @asynccontextmanager
    async def writer(self) -> AsyncIterator[Connection]:
        async with await connect(self.url, "drive") as conn:
            yield conn


@pytest.fixture
def pair() -> Iterator[Pair]:
    with PostgresServer() as first:
        first.execute("CREATE DATABASE claims TEMPLATE ready")
        with PostgresServer(follows=first) as second:
            yield Pair(first, second, "claims")


async def heard(conn: Connection) -> set[str]:
    return {row["interrupt_id"] for row in await all_rows(conn, "SELECT interrupt_id FROM decisions")}


async def test_what_was_answered_survives_the_loss_of_a_server_that_another_one_follows_in_step(
    pair: Pair, tmp_path: Path
) -> None:
    pair.first.wait_for_each_commit_of(pair.second)
    async with Town(pair.url, Terminal(tmp_path)) as town, town.service("serve", STAND_BY="2") as serve:
        async with pair.writer() as conn:
            claims = await town.waiting(conn, [f"t{number:02}" for number in range(CLAIMS)])
            await town.until_posted(claims)
        with pair.second.frozen():
            # Nobody is told of what only one server has, for as long as a click waits; nor whoever clicks again.
            for _ in range(2):
                assert await town.click(claims[0].approve) != 200
        await town.click_until_heard(claims[0].approve)
        answered: set[str] = {claims[0].interrupt_id}
        enough = asyncio.Event()

        async def approve(claim: Claim) -> None:
            await town.click_until_heard(claim.approve)
            answered.add(claim.interrupt_id)
            if len(answered) >= HEARD_BEFORE:
                enough.set()

        async with asyncio.TaskGroup() as group:
            for claim in claims[1:]:
                group.create_task(approve(claim))
            await enough.wait()
            before, began = set(answered), time.monotonic()
            await pair.fail_over()
            took_s = time.monotonic() - began
            async with pair.writer() as conn:
                lost = before - await heard(conn)
        async with pair.writer() as conn:
            await until_settled(conn)
            await assert_each_paid_once(conn)
            await assert_never_two_drivers(conn)
            assert await heard(conn) == {claim.interrupt_id for claim in claims}
            assert (await audit.verify(conn)).wrong is None
        await town.assert_shown_as_paid([claim.thread_id for claim in claims])
        assert not serve.ended
    sys.stderr.write(
        f"\nfail-over: the second server took writes after {took_s:.1f} s; of {len(before)} clicks answered before it"
        f" {len(lost)} were lost, and {len(claims)} claims were paid once\n"
    )
    assert len(before) >= HEARD_BEFORE
    assert not lost


async def test_without_that_a_click_can_be_lost_and_an_outside_payment_is_still_made_once(
    pair: Pair, tmp_path: Path
) -> None:
    async with (
        Bank() as bank,
        Town(pair.url, Terminal(tmp_path)) as town,
        town.service("serve", STAND_BY="2", PAYMENT_PROVIDER="http", PAYMENT_URL=bank.url),
    ):
        async with pair.writer() as conn:
            [claim] = await town.waiting(conn, ["t1"])
            pair.first.wait_until_followed()
            pair.second.stop_listening()
            await town.click_until_heard(claim.approve)

            async def paid() -> bool:
                return bool(await value(conn, "SELECT status = 'paid' FROM threads"))

            await until(paid)
        await pair.fail_over()
        async with pair.writer() as conn:
            assert await heard(conn) == set()
            assert await value(conn, "SELECT status FROM threads") == "waiting"
            await town.click_until_heard(claim.approve)
            await until_settled(conn)
            await assert_each_paid_once(conn)
        assert (len(bank.keys), len(set(bank.keys)), len(bank.paid)) == (2, 1, 1)
