"""Every boundary between two statements: the faults that fall there, how all heals, and what must be true then.

A boundary is a round trip to Postgres. At each there is one run in each of five modes: the process killed before it
and after it, the connection cut before it and after it, and the round trip stalled.
"""

from __future__ import annotations

import asyncio
import collections
from collections.abc import Awaitable, Iterable, Sequence
from contextlib import suppress
from typing import Any

from slack_sdk.web.async_client import AsyncWebClient

from bot import blocks
from bot.deliver import Deliverer
from flow import notices
from flow.approvals import approval_of
from flow.database import Connection
from flow.payments import payments_of
from flow.threads import thread_of
from tests.block_kit import SETTLED, buttons_of
from tests.drives import assert_each_paid_once, assert_never_two_drivers
from tests.local_slack import CHANNEL
from tests.pg_proxy import Fault, FaultingProxy, Sprung, Trap, When
from tests.rows import all_rows, until, value

# As many as find something to do on two cores.
_AT_ONCE = 3


def traps(asked: Sequence[str], fault: Fault, when: When = "before") -> list[Trap]:
    """One at each of these round trips."""
    return [Trap(at=at, fault=fault, when=when) for at in range(1, len(asked) + 1)]


async def few_at_once(runs: Iterable[Awaitable[Any]]) -> None:
    room = asyncio.Semaphore(_AT_ONCE)

    async def one(run: Awaitable[Any]) -> None:
        async with room:
            await run

    await asyncio.gather(*map(one, runs))


async def until_sprung(proxy: FaultingProxy, count: int = 1, within_s: float = 15.0) -> list[Sprung]:
    """The traps that sprang, once there are so many. A run without its fault proves nothing."""

    async def sprung() -> bool:
        return len(proxy.sprung) >= count

    with suppress(AssertionError):
        await until(sprung, within_s)
    assert len(proxy.sprung) == count, f"{len(proxy.sprung)} of {count} sprang; the others asked {proxy.unsprung}"
    return proxy.sprung


# Healing


async def deliver_all(conn: Connection, deliverer: Deliverer) -> None:
    """Deliver until nothing waits to be; leases and waits are over, as after a while."""
    while await value(conn, "SELECT count(*) FROM notices WHERE due_at IS NOT NULL"):
        await conn.execute("UPDATE notices SET due_at = clock_timestamp() WHERE due_at IS NOT NULL")
        await deliverer.sweep(conn)


# What must be true


async def assert_all_is_well(conn: Connection) -> None:
    """Each thread is paid, once, as it was claimed, by one driver at a time, and nothing is left to do or to a person.

    Each was asked about at most once, decided once, with one card to post and one reply.
    """
    await assert_each_paid_once(conn)
    await assert_never_two_drivers(conn)
    assert await all_rows(conn, "SELECT * FROM threads WHERE due_at IS NOT NULL OR reason IS NOT NULL") == []
    assert await all_rows(conn, "SELECT thread_id FROM approvals GROUP BY 1 HAVING count(*) > 1") == []
    asked = (
        "SELECT status, (SELECT array_agg(verdict) FROM decisions d WHERE d.interrupt_id = a.interrupt_id) AS verdicts,"
        " (SELECT array_agg(kind ORDER BY kind) FROM notices n WHERE n.interrupt_id = a.interrupt_id) AS notices"
        " FROM approvals a"
    )
    for row in await all_rows(conn, asked):
        assert row == {"status": "approved", "verdicts": ["approve"], "notices": ["card", "reply"]}


async def assert_shown_once(conn: Connection, client: AsyncWebClient) -> int:
    """Each approval has one card in the channel, which shows its end, and one reply below it; how many messages."""
    cards: dict[str, list[dict[str, Any]]] = collections.defaultdict(list)
    async for page in await client.conversations_history(channel=CHANNEL, include_all_metadata=True, limit=200):
        for message in page["messages"]:
            cards[message["metadata"]["event_payload"]["interrupt_id"]].append(message)
    approvals = [row["interrupt_id"] for row in await all_rows(conn, "SELECT interrupt_id FROM approvals")]
    assert sorted(cards) == sorted(approvals)
    for interrupt_id in approvals:
        approval = await approval_of(conn, interrupt_id)
        thread = await thread_of(conn, approval.thread_id)
        payment = (await payments_of(conn, [thread.thread_id]))[thread.thread_id]
        [card] = cards[interrupt_id]
        assert card["text"] == blocks.card(approval, thread, payment)[0]
        assert buttons_of(card) == SETTLED
        said = (await client.conversations_replies(channel=CHANNEL, ts=card["ts"]))["messages"]
        assert [each["text"] for each in said] == [card["text"], blocks.reply(approval, thread, payment)]
        assert await notices.messages_of(conn, interrupt_id) == [(CHANNEL, card["ts"])]
    return 2 * len(approvals)
