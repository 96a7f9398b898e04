"""A request that many are asked about in direct messages, of a Slack that takes only so many calls a minute: whatever
is tried again goes on where it was stopped."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator

import pytest

from bot import outlet
from bot.deliver import Deliverer
from flow import notices
from flow.approvals import decide
from flow.database import Connection, connect
from flow.policy import Tier
from tests.block_kit import SETTLED, WAITING, buttons_of
from tests.delivering import deliverer_at
from tests.fault_proxy import FaultProxy
from tests.local_slack import LocalSlack, skip_reason
from tests.people import YES, ask, slack_person
from tests.rows import all_rows, until, value

pytestmark = pytest.mark.skipif(skip_reason() is not None, reason=skip_reason() or "")

PEOPLE = tuple(f"U1{number:02}APP" for number in range(8))
# A third of them, and one more.
A_MINUTE = 3


@pytest.fixture(autouse=True)
def _no_pace(monkeypatch: pytest.MonkeyPatch) -> None:
    """One message a second in a channel is a wait that no fact here is about."""
    monkeypatch.setattr(outlet, "_BETWEEN_POSTS_S", 0.0)


@pytest.fixture
def slack() -> Iterator[LocalSlack]:
    with LocalSlack(request_url="http://127.0.0.1:9/") as running:
        yield running


@pytest.fixture
async def proxy(slack: LocalSlack) -> AsyncIterator[FaultProxy]:
    async with FaultProxy(slack.ui_url) as running:
        running.members |= {each: {} for each in PEOPLE}
        yield running


@pytest.fixture
async def deliverer(proxy: FaultProxy) -> AsyncIterator[Deliverer]:
    async with deliverer_at(proxy) as made:
        yield made


async def asked_of_all(conn: Connection) -> str:
    tier = Tier(name="approval", approvers=PEOPLE, required=2, post_to="direct", remind_every_s=3600.0)
    return await ask(conn, tier=tier)


async def vote(conn: Connection, interrupt_id: str) -> None:
    """By two of them, which is enough."""
    for each in PEOPLE[:2]:
        await decide(conn, interrupt_id, slack_person(each, each), YES)


def a_few_a_minute(proxy: FaultProxy, method: str, calls: int = A_MINUTE) -> None:
    """Of this method Slack takes so many calls, then it wants a minute of quiet, again and again."""
    for _ in range(9):
        # One that is slow by no time at all is as good as none.
        proxy.fail(method, "slow", delay_s=0, times=calls)
        proxy.fail(method, "429")


async def minutes_until_told(conn: Connection, deliverer: Deliverer, *, at_most: int = 9) -> int:
    """How often Slack is asked until it has all been told."""
    for minute in range(1, at_most + 1):
        deliverer._quiet_until.clear()
        await conn.execute("UPDATE notices SET due_at = clock_timestamp() WHERE due_at IS NOT NULL")
        await deliverer.sweep(conn)
        if await value(conn, "SELECT count(*) = 0 FROM notices WHERE status <> 'sent'"):
            return minute
    raise AssertionError(await all_rows(conn, "SELECT kind, status, error FROM notices"))


async def cards(slack: LocalSlack) -> list[list[list[str]]]:
    """The buttons of each card, for each of them."""
    said = [await slack.messages(each) for each in PEOPLE]
    return [[buttons_of(message) for message in here if "thread_ts" not in message] for here in said]


async def replies(slack: LocalSlack) -> list[int]:
    """How much was said below the card of each of them."""
    return [sum("thread_ts" in message for message in await slack.messages(each)) for each in PEOPLE]


async def test_every_copy_comes_true_although_slack_takes_fewer_changes_a_minute_than_there_are_copies(
    slack: LocalSlack, proxy: FaultProxy, deliverer: Deliverer, conn: Connection
) -> None:
    interrupt_id = await asked_of_all(conn)
    await deliverer.sweep(conn)
    await vote(conn, interrupt_id)
    a_few_a_minute(proxy, "chat.update")
    assert await minutes_until_told(conn, deliverer) == 3
    assert await cards(slack) == [[SETTLED]] * len(PEOPLE)
    # None is changed twice for it; two were refused.
    assert len(proxy.calls_of("chat.update")) == len(PEOPLE) + 2


async def test_everybody_gets_a_copy_although_slack_takes_fewer_messages_a_minute_than_there_are_people(
    slack: LocalSlack, proxy: FaultProxy, deliverer: Deliverer, conn: Connection
) -> None:
    await asked_of_all(conn)
    a_few_a_minute(proxy, "chat.postMessage")
    a_few_a_minute(proxy, "chat.update")
    assert await minutes_until_told(conn, deliverer) == 3
    assert await cards(slack) == [[WAITING]] * len(PEOPLE)
    # What was posted a minute ago is true.
    assert proxy.calls_of("chat.update") == []


async def test_what_is_decided_between_two_tries_is_shown_on_every_copy(
    slack: LocalSlack, proxy: FaultProxy, deliverer: Deliverer, conn: Connection
) -> None:
    interrupt_id = await asked_of_all(conn)
    await deliverer.sweep(conn)
    await decide(conn, interrupt_id, slack_person(PEOPLE[0], "First"), YES)
    a_few_a_minute(proxy, "chat.update", 5)
    assert await deliverer.sweep(conn) == (0, 1)
    await decide(conn, interrupt_id, slack_person(PEOPLE[1], "Second"), YES)
    await minutes_until_told(conn, deliverer)
    assert await cards(slack) == [[SETTLED]] * len(PEOPLE)


async def test_a_copy_whose_change_got_no_answer_is_changed_again(
    slack: LocalSlack, proxy: FaultProxy, deliverer: Deliverer, conn: Connection
) -> None:
    interrupt_id = await asked_of_all(conn)
    await deliverer.sweep(conn)
    await vote(conn, interrupt_id)
    proxy.fail("chat.update", "slow", delay_s=0)
    proxy.fail("chat.update", "drop")
    assert await minutes_until_told(conn, deliverer) == 2
    assert await cards(slack) == [[SETTLED]] * len(PEOPLE)
    changed = [call["channel"] for call in proxy.calls_of("chat.update")]
    assert (changed[1], len(changed)) == (changed[2], len(PEOPLE) + 1)


async def test_a_card_whose_notice_was_pruned_is_shown_anew_on_every_copy(
    slack: LocalSlack, proxy: FaultProxy, deliverer: Deliverer, conn: Connection
) -> None:
    """It begins at the first version again, which is what the copies were posted for."""
    interrupt_id = await asked_of_all(conn)
    await deliverer.sweep(conn)
    await conn.execute("DELETE FROM notices")
    await notices.show_card(conn, interrupt_id)
    assert await deliverer.sweep(conn) == (1, 0)
    assert len(proxy.calls_of("chat.update")) == len(PEOPLE)


async def test_the_outcome_is_said_once_below_every_copy_although_slack_lets_one_be_read_a_minute(
    slack: LocalSlack, proxy: FaultProxy, deliverer: Deliverer, conn: Connection
) -> None:
    interrupt_id = await asked_of_all(conn)
    await deliverer.sweep(conn)
    await notices.post_reply(conn, interrupt_id, "t1")
    proxy.fail("chat.postMessage", "slow", delay_s=0)
    # The second is said below its copy, and nobody hears of it.
    proxy.fail("chat.postMessage", "lost_reply")
    a_few_a_minute(proxy, "conversations.replies", 1)
    # Any of them may have been told by then: one refused does not keep the others from it.
    await minutes_until_told(conn, deliverer, at_most=len(PEOPLE))
    assert await replies(slack) == [1] * len(PEOPLE)


async def test_nobody_is_told_twice_because_an_earlier_copy_was_refused(
    slack: LocalSlack, proxy: FaultProxy, deliverer: Deliverer, conn: Connection
) -> None:
    interrupt_id = await asked_of_all(conn)
    await deliverer.sweep(conn)
    await notices.post_reply(conn, interrupt_id, "t1")
    proxy.fail("chat.postMessage", "error", error="is_archived")
    proxy.fail("chat.postMessage", "lost_reply")
    await minutes_until_told(conn, deliverer)
    assert await replies(slack) == [1] * len(PEOPLE)


@pytest.mark.parametrize("kind", ["reply", "reminder"])
async def test_nobody_is_told_twice_because_slack_takes_fewer_messages_a_minute_than_there_are_copies(
    slack: LocalSlack, proxy: FaultProxy, deliverer: Deliverer, conn: Connection, kind: str
) -> None:
    interrupt_id = await asked_of_all(conn)
    await deliverer.sweep(conn)
    tell = notices.post_reply if kind == "reply" else notices.remind
    await tell(conn, interrupt_id, "t1")
    a_few_a_minute(proxy, "chat.postMessage")
    assert await minutes_until_told(conn, deliverer) == 3
    assert await replies(slack) == [1] * len(PEOPLE)
    # Another one is.
    await tell(conn, interrupt_id, "t1")
    await minutes_until_told(conn, deliverer)
    assert await replies(slack) == [2] * len(PEOPLE)


async def test_what_a_deliverer_wrote_after_its_lease_was_lost_is_put_right(
    slack: LocalSlack, proxy: FaultProxy, deliverer: Deliverer, conn: Connection, database_url: str
) -> None:
    interrupt_id = await asked_of_all(conn)
    await deliverer.sweep(conn)
    await decide(conn, interrupt_id, slack_person(PEOPLE[0], "First"), YES)
    async with deliverer_at(proxy) as late, await connect(database_url, "door") as other:
        async with conn.transaction():
            await conn.execute("LOCK TABLE messages")
            writing = asyncio.create_task(late.sweep(other))
            # It knows what the card is to show, and not yet where that stands.
            await until(lambda: value(conn, "SELECT count(*) > 0 FROM pg_locks WHERE NOT granted"))
            await decide(conn, interrupt_id, slack_person(PEOPLE[1], "Second"), YES)
            await conn.execute("UPDATE notices SET due_at = clock_timestamp() WHERE kind = 'card'")
            assert await deliverer.sweep(conn) == (1, 0)
            assert await cards(slack) == [[SETTLED]] * len(PEOPLE)
        await writing
        await deliverer.sweep(conn)
    assert await cards(slack) == [[SETTLED]] * len(PEOPLE)
