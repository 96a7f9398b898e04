"""A fault at every boundary of a click: deciding, and what goes on after the answer.

Alice approves on a copy of the card whose posting nobody heard of, which is the longest way there is. A click that was
not answered with 200 she repeats; then Bob rejects what she approved.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import sys
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from multiprocessing import Pipe
from pathlib import Path

import aiohttp
import pytest
from slack_sdk.web.async_client import AsyncWebClient

from bot import outlet
from bot.deliver import Deliverer
from bot.outlet import Outlet
from flow.database import Connection
from flow.flows import Flows
from tests.boundaries import assert_all_is_well, assert_shown_once, deliver_all, few_at_once, traps, until_sprung
from tests.command import Terminal, worker
from tests.drives import until_settled
from tests.driving import waiting_claim
from tests.fault_proxy import FaultProxy
from tests.local_slack import CHANNEL, LocalSlack, skip_reason
from tests.pg_proxy import STALL_S, FaultingProxy, Trap, When
from tests.processes import end_of, start_process
from tests.rows import all_rows, until, value
from tests.slack_door import Answered, Caller, bot_in_process, client_of, errors_in
from tests.victims import bot

pytestmark = [
    pytest.mark.skipif(skip_reason() is not None, reason=skip_reason() or ""),
    pytest.mark.skipif(sys.platform != "linux", reason="who is at the end of a socket is asked Linux's way"),
    pytest.mark.timeout(300),
]

# Slack shows an error then.
_SLACKS_PATIENCE_S = 3.0


@dataclass(frozen=True, kw_only=True)
class Card:
    """A card in the channel that its poster never heard of."""

    interrupt_id: str
    ts: str


@dataclass(frozen=True, kw_only=True)
class Office:
    """The workspace, the database, and a bot that works."""

    url: str
    conn: Connection
    flows: Flows
    slack: FaultProxy
    client: AsyncWebClient
    bot_url: str
    folder: Path

    async def cards(self, count: int, prefix: str = "t") -> list[Card]:
        """New claims that wait, each with a card."""
        asked = [await waiting_claim(self.conn, self.flows, f"{prefix}{number:02}") for number in range(count)]
        self.slack.fail("chat.postMessage", "lost_reply", times=count)
        _sent, unheard = await Deliverer(Outlet(self.client, CHANNEL)).sweep(self.conn)
        assert unheard == count
        posted = await self.client.conversations_history(channel=CHANNEL, include_all_metadata=True, limit=200)
        ts_of = {each["metadata"]["event_payload"]["interrupt_id"]: each["ts"] for each in posted["messages"]}
        return [Card(interrupt_id=each, ts=ts_of[each]) for each in asked]

    async def click_again(self, card: Card) -> int:
        """Alice repeats her click, where everything works: the status of the answer, within Slack's patience."""
        async with Caller(self.bot_url) as alice:
            return (await self.press(alice, card)).status

    async def press(self, caller: Caller, card: Card, verdict: str = "approve", *, by: str = "U01ALICE") -> Answered:
        """Press a button. What was answered with 200 is committed."""
        body = await caller.body_of(self.conn, card.interrupt_id, verdict, by=by, ts=card.ts)
        begun = time.monotonic()
        answered = await caller.click(body)
        assert time.monotonic() - begun < _SLACKS_PATIENCE_S
        if answered.status == 200:
            status = "SELECT status FROM approvals WHERE interrupt_id = %s"
            assert await value(self.conn, status, card.interrupt_id) == "approved"
        return answered

    async def decisions(self) -> list[dict[str, object]]:
        """What is decided, by whom, and when."""
        decided = "SELECT * FROM approvals LEFT JOIN decisions USING (interrupt_id) ORDER BY interrupt_id, person"
        return await all_rows(self.conn, decided)

    async def assert_well_in_the_end(self, cards: list[Card]) -> int:
        """Bob comes too late; the threads are driven, and everything is shown. Gives the number of messages."""
        decided = await self.decisions()
        for card in cards:
            async with Caller(self.bot_url) as bob:
                rejected = await bob.click(await bob.rejection_of(self.conn, card.interrupt_id, by="U02BOB"))
                assert rejected.status == 200
                assert errors_in(rejected)["reason"].startswith("Already approved by ")
        async with worker(Terminal(self.folder, DATABASE_URL=self.url), self.conn):
            await until_settled(self.conn)
        await deliver_all(self.conn, Deliverer(Outlet(self.client, CHANNEL)))
        assert await self.decisions() == decided
        await assert_all_is_well(self.conn)
        return await assert_shown_once(self.conn, self.client)


@pytest.fixture
def workspace() -> Iterator[LocalSlack]:
    with LocalSlack(request_url="http://127.0.0.1:9/") as running:
        yield running


@pytest.fixture
async def office(
    workspace: LocalSlack,
    database_url: str,
    conn: Connection,
    flows: Flows,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> AsyncIterator[Office]:
    monkeypatch.setattr(outlet, "_BETWEEN_POSTS_S", 0.0)
    async with (
        FaultProxy(workspace.ui_url) as slack,
        client_of(slack.api_url) as client,
        bot_in_process(database_url, client) as bot_url,
    ):
        yield Office(
            url=database_url, conn=conn, flows=flows, slack=slack, client=client, bot_url=bot_url, folder=tmp_path
        )


@pytest.mark.parametrize("when", ["before", "after"])
async def test_a_click_whose_bot_is_killed_at_any_boundary_is_decided_once(
    office: Office, tally: collections.Counter[str], when: When
) -> None:
    async def kill(card: Card, trap: Trap) -> None:
        async with FaultingProxy(office.url) as proxy, bot_process(office, proxy) as caller:
            proxy.arm(trap)
            status = None
            with contextlib.suppress(aiohttp.ClientError):
                status = (await office.press(caller, card)).status
            await until_sprung(proxy)
        # The answer follows the commit; it may die before that has left it.
        assert status is None or (status == 200 and trap.at > decided), trap
        if status is None:
            assert await office.click_again(card) == 200

    asked, decided = await asked_undisturbed(office)
    cards = await office.cards(len(asked))
    await few_at_once(map(kill, cards, traps(asked, "kill", when)))
    await count(tally, office, asked, await office.assert_well_in_the_end(cards))


@pytest.mark.parametrize("when", ["before", "after"])
async def test_a_click_whose_connection_is_cut_at_any_boundary_is_decided_once_and_answered(
    office: Office, tally: collections.Counter[str], when: When
) -> None:
    async def cut(card: Card, trap: Trap) -> None:
        async with bot_behind(office) as (proxy, caller):
            proxy.arm(trap)
            # The pool has another connection.
            assert (await office.press(caller, card)).status == 200
            await until_sprung(proxy)

    asked, _ = await asked_undisturbed(office)
    cards = await office.cards(len(asked))
    await few_at_once(map(cut, cards, traps(asked, "cut", when)))
    await count(tally, office, asked, await office.assert_well_in_the_end(cards))


async def test_a_click_stalled_at_any_boundary_is_answered_in_time_and_decided_once(
    office: Office, tally: collections.Counter[str]
) -> None:
    async def again(card: Card) -> None:
        assert await office.click_again(card) in (200, 503)

    asked, decided = await asked_undisturbed(office)
    cards = await office.cards(len(asked))
    async with contextlib.AsyncExitStack() as stack:
        bots = [await stack.enter_async_context(bot_behind(office)) for _ in cards]
        clicks = []
        for (proxy, caller), card, trap in zip(bots, cards, traps(asked, "stall"), strict=True):
            proxy.arm(trap)
            clicks.append(asyncio.create_task(office.press(caller, card)))
            await until_sprung(proxy)
        unanswered = []
        for at, (click, (_, caller), card) in enumerate(zip(clicks, bots, cards, strict=True), 1):
            if at > decided:
                assert (await click).status == 200
            else:
                assert await click == Answered(status=503, body="not recorded")
                assert "could not be confirmed in time" in await caller.note()
                unanswered.append(card)
        assert all(proxy.stalling for proxy, _ in bots)
        # While the first click is stalled and may hold what the second one needs; a few at once, as each is timed.
        await few_at_once(map(again, unanswered))
        await until(lambda: none_stalls([proxy for proxy, _ in bots]), within_s=2 * STALL_S)
    for card in unanswered:
        assert await office.click_again(card) == 200
    await count(tally, office, asked, await office.assert_well_in_the_end(cards))


@asynccontextmanager
async def bot_behind(office: Office) -> AsyncIterator[tuple[FaultingProxy, Caller]]:
    """A bot in this process behind a proxy, and somebody who clicks at it."""
    async with (
        FaultingProxy(office.url) as proxy,
        bot_in_process(proxy.url, office.client) as bot_url,
        Caller(bot_url) as caller,
    ):
        await until(lambda: is_connected(proxy))
        yield proxy, caller


@asynccontextmanager
async def bot_process(office: Office, proxy: FaultingProxy) -> AsyncIterator[Caller]:
    """Somebody who clicks at a bot that is a process of its own, behind this proxy."""
    ours, theirs = Pipe()
    process = start_process(bot, proxy.url, office.slack.api_url, theirs)
    theirs.close()
    try:
        async with Caller(await asyncio.to_thread(ours.recv)) as caller:
            await until(lambda: is_connected(proxy))
            yield caller
    finally:
        process.kill()
        await end_of(process)


async def asked_undisturbed(office: Office) -> tuple[list[str], int]:
    """The round trips of a click on a new bot, and which of them commits the decision."""
    [card] = await office.cards(1, "probe")
    async with bot_behind(office) as (proxy, caller):
        asked = proxy.arm()
        assert (await office.press(caller, card)).status == 200

        async def both_committed() -> bool:
            return asked.count("COMMIT") == 2

        await until(both_committed)
    return asked, asked.index("COMMIT") + 1


async def is_connected(proxy: FaultingProxy) -> bool:
    """Whether a bot's pool has filled: deciding and remembering each have a connection."""
    return proxy.logged_in >= 2


async def none_stalls(proxies: Sequence[FaultingProxy]) -> bool:
    return not any(proxy.stalling for proxy in proxies)


async def count(tally: collections.Counter[str], office: Office, asked: list[str], messages: int) -> None:
    """One mode has been visited at each point."""
    tally["boundaries"] = len(asked)
    tally["modes"] += 1
    tally["faults"] += len(asked)
    tally["payments"] += await value(office.conn, "SELECT count(*) FROM payments")
    tally["messages"] += messages
