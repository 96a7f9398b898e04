"""Copies of a card in direct messages: one for each approver, true like the others, whatever Slack refuses."""

from __future__ import annotations

import asyncio
import collections
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from bot import outlet
from bot.deliver import Deliverer
from bot.places import is_served
from flow import notices
from flow.approvals import approval_of, decide
from flow.changes import refresh
from flow.database import Connection, connect
from flow.deadlines import expire_overdue
from flow.drive import drive
from flow.flows import Flows
from flow.model import Claim
from flow.policy import LIMITS, OneTier, Rule, Tier, Tiers
from tests.block_kit import SETTLED, WAITING, buttons_of
from tests.delivering import OPS_CHANNEL, deliverer_at
from tests.fault_proxy import FaultKind, FaultProxy
from tests.local_slack import CHANNEL, LocalSlack, skip_reason
from tests.people import ALICE, BOB, CAROL, YES, ask, slack_person, stand_in, start_claim
from tests.rows import one_row, value

pytestmark = pytest.mark.skipif(skip_reason() is not None, reason=skip_reason() or "")

RANDOM = "C02RND"
PLACES = (CHANNEL, "U01ALICE", "U02BOB", "U99EVE")


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
        yield running


@pytest.fixture
async def deliverer(proxy: FaultProxy) -> AsyncIterator[Deliverer]:
    async with deliverer_at(proxy) as made:
        yield made


def tier(*approvers: str, **rules: Any) -> Tier:
    return Tier(**{"name": "approval", "approvers": approvers, "post_to": "direct", **rules})


async def cards(slack: LocalSlack, place: str) -> list[list[str]]:
    """The buttons of each message there that is no reply."""
    return [buttons_of(each) for each in await slack.messages(place) if "thread_ts" not in each]


async def make_due(conn: Connection, deliverer: Deliverer) -> None:
    deliverer._quiet_until.clear()
    await conn.execute("UPDATE notices SET due_at = clock_timestamp() WHERE due_at IS NOT NULL")


# Where they go


@pytest.mark.parametrize(
    ("rules", "in_channel", "in_random", "with_alice"),
    [
        ({"post_to": "channel"}, 1, 0, 0),
        ({"post_to": "channel", "channel": RANDOM}, 0, 1, 0),
        ({"post_to": "direct"}, 0, 0, 1),
        ({"post_to": "direct", "channel": RANDOM}, 0, 0, 1),
        ({"post_to": "both"}, 1, 0, 1),
        ({"post_to": "both", "channel": RANDOM}, 0, 1, 1),
    ],
)
async def test_a_card_goes_where_its_tier_says(
    slack: LocalSlack,
    deliverer: Deliverer,
    conn: Connection,
    *,
    rules: dict[str, Any],
    in_channel: int,
    in_random: int,
    with_alice: int,
) -> None:
    interrupt_id = await ask(conn, tier=tier("U01ALICE", "@finance", "carol@example.com", **rules))
    assert await deliverer.sweep(conn) == (1, 0)
    for place, count in ((CHANNEL, in_channel), (RANDOM, in_random), ("U01ALICE", with_alice)):
        assert await cards(slack, place) == [WAITING] * count
    assert len(await notices.messages_of(conn, interrupt_id)) == in_channel + in_random + with_alice


async def test_only_members_of_ours_who_did_not_ask_get_a_direct_message(
    slack: LocalSlack, proxy: FaultProxy, deliverer: Deliverer, conn: Connection
) -> None:
    approvers = ("U01ALICE", "slack:T01TEST/U02BOB", "slack:T0OTHER/U99EVE", "webhook:acme:carol")
    await ask(conn, tier=tier(*approvers), requested_by="slack:T01TEST/U01ALICE")
    assert await deliverer.sweep(conn) == (1, 0)
    assert [each["users"] for each in proxy.calls_of("conversations.open")] == ["U02BOB"]
    # The same id in another team is another person.
    await ask(conn, "t2", tier=tier("U01ALICE"), requested_by="slack:T0OTHER/U01ALICE")
    assert await deliverer.sweep(conn) == (1, 0)
    assert await cards(slack, "U01ALICE") == [WAITING]
    assert await cards(slack, CHANNEL) == []


async def test_the_copy_is_known_by_the_conversation_not_by_the_member(
    slack: LocalSlack, proxy: FaultProxy, deliverer: Deliverer, conn: Connection
) -> None:
    interrupt_id = await ask(conn, tier=tier("U01ALICE", "U02BOB"))
    assert await deliverer.sweep(conn) == (1, 0)
    copies = await notices.messages_of(conn, interrupt_id)
    assert [channel[0] for channel, _ in copies] == ["D", "D"]
    await decide(conn, interrupt_id, ALICE, YES)
    assert await deliverer.sweep(conn) == (1, 0)
    assert sorted((call["channel"], call["ts"]) for call in proxy.calls_of("chat.update")) == sorted(copies)
    # A conversation is opened once.
    await ask(conn, "t2", tier=tier("U01ALICE", "U02BOB"))
    await deliverer.sweep(conn)
    assert len(proxy.calls_of("conversations.open")) == 2


@pytest.mark.parametrize("requester", ["U01ALICE", "slack:T01TEST/U01ALICE"])
async def test_where_nobody_can_be_reached_the_channel_is_told(
    slack: LocalSlack, deliverer: Deliverer, conn: Connection, requester: str
) -> None:
    interrupt_id = await ask(conn, tier=tier("U01ALICE"), requested_by=requester)
    assert await deliverer.sweep(conn) == (1, 0)
    assert (await cards(slack, CHANNEL), await cards(slack, "U01ALICE")) == ([WAITING], [])
    await notices.change_card(conn, interrupt_id)
    assert await deliverer.sweep(conn) == (1, 0)
    assert await cards(slack, CHANNEL) == [WAITING]


async def test_whoever_is_asked_later_gets_a_copy_and_nobody_a_second_one(
    slack: LocalSlack, deliverer: Deliverer, conn: Connection
) -> None:
    escalating = tier("U01ALICE", on_expiry="escalate", escalate_to=("U02BOB",), expires_after_s=3600.0, post_to="both")
    await ask(conn, tier=escalating)
    assert await deliverer.sweep(conn) == (1, 0)
    assert await cards(slack, "U02BOB") == []
    await conn.execute("UPDATE approvals SET expires_at = clock_timestamp()")
    assert await expire_overdue(conn) == 1
    await deliverer.sweep(conn)
    assert [await cards(slack, place) for place in (CHANNEL, "U01ALICE", "U02BOB")] == [[WAITING]] * 3


# Staying true


async def test_every_copy_shows_the_outcome_and_the_reply_stands_below_each(
    slack: LocalSlack, deliverer: Deliverer, conn: Connection, flows: Flows
) -> None:
    policy = _Direct(approvers=("U01ALICE", "U02BOB"), limits=LIMITS, rules={"post_to": "both"})
    await start_claim(conn)
    await drive(conn, "t1", flows=flows, policy=policy)
    assert await deliverer.sweep(conn) == (1, 0)
    await decide(conn, await value(conn, "SELECT interrupt_id FROM approvals"), BOB, YES)
    await drive(conn, "t1", flows=flows, policy=policy)
    await deliverer.sweep(conn)
    for place in (CHANNEL, "U01ALICE", "U02BOB"):
        card, below = await slack.messages(place)
        assert "Paid: 250.00 USD" in card["text"]
        assert buttons_of(card) == SETTLED
        assert (below["thread_ts"], below["text"]) == (card["ts"], "💸 *250.00 USD paid*, reference L-t1")


async def test_every_copy_shows_that_the_time_is_over(
    slack: LocalSlack, deliverer: Deliverer, conn: Connection
) -> None:
    await ask(conn, tier=tier("U01ALICE", "U02BOB", post_to="both", expires_after_s=3600.0))
    await deliverer.sweep(conn)
    await conn.execute("UPDATE approvals SET expires_at = clock_timestamp()")
    assert await expire_overdue(conn) == 1
    assert await deliverer.sweep(conn) == (1, 0)
    assert [await cards(slack, place) for place in (CHANNEL, "U01ALICE", "U02BOB")] == [[SETTLED]] * 3


async def test_reminders_go_below_each_copy(slack: LocalSlack, deliverer: Deliverer, conn: Connection) -> None:
    interrupt_id = await ask(conn, tier=tier("U01ALICE", "U02BOB"))
    await deliverer.sweep(conn)
    await notices.remind(conn, interrupt_id, "t1")
    assert await deliverer.sweep(conn) == (1, 0)
    for place in ("U01ALICE", "U02BOB"):
        card, below = await slack.messages(place)
        assert below["thread_ts"] == card["ts"]


async def test_whoever_has_voted_is_reminded_of_nothing(
    slack: LocalSlack, proxy: FaultProxy, deliverer: Deliverer, conn: Connection
) -> None:
    """Nor below the card in their own conversation; whoever decides for somebody who has not, is."""
    interrupt_id = await ask(conn, tier=tier("U01ALICE", "U02BOB", "U03CAROL", required=3, post_to="both"))
    await stand_in(conn, CAROL, "U99EVE")
    proxy.members["U99EVE"] = {}
    await deliverer.sweep(conn)
    await decide(conn, interrupt_id, ALICE, YES)
    await notices.remind(conn, interrupt_id, "t1")
    await deliverer.sweep(conn)
    said = [[each["text"] for each in await slack.messages(place) if "thread_ts" in each] for place in PLACES]
    assert said == [[said[0][0]], [], [said[0][0]], [said[0][0]]]
    assert said[0][0].endswith(" this waits for <@U02BOB>, <@U03CAROL> (away: <@U99EVE> decides).")


# Whoever stands in for somebody


async def test_whoever_decides_for_somebody_who_is_away_gets_a_copy(
    slack: LocalSlack, deliverer: Deliverer, conn: Connection
) -> None:
    await stand_in(conn, ALICE, "U02BOB")
    await ask(conn, tier=tier("U01ALICE"))
    assert await deliverer.sweep(conn) == (1, 0)
    assert [await cards(slack, place) for place in ("U01ALICE", "U02BOB", CHANNEL)] == [[WAITING], [WAITING], []]


@pytest.mark.parametrize(
    ("delegate", "requester"),
    [
        # Nobody decides what they ask for, for whomever; nor lends the voice that they do not have.
        ("U02BOB", "slack:T01TEST/U02BOB"),
        ("U02BOB", "slack:T01TEST/U01ALICE"),
        ("slack:T0OTHER/U02BOB", "cli:ann"),
        ("bob@example.com", "cli:ann"),
    ],
)
async def test_whoever_may_not_decide_for_somebody_gets_none(
    slack: LocalSlack, deliverer: Deliverer, conn: Connection, *, delegate: str, requester: str
) -> None:
    await stand_in(conn, ALICE, delegate)
    await ask(conn, tier=tier("U01ALICE", "U99EVE"), requested_by=requester)
    assert await deliverer.sweep(conn) == (1, 0)
    assert (await cards(slack, "U02BOB"), await cards(slack, "U99EVE")) == ([], [WAITING])


@pytest.mark.parametrize("unsure", ["a guest", "nobody knows"])
async def test_a_delegate_who_may_not_decide_gets_no_copy_and_no_reminder_names_them(
    slack: LocalSlack, proxy: FaultProxy, deliverer: Deliverer, conn: Connection, unsure: str
) -> None:
    await stand_in(conn, ALICE, "U99EVE")
    proxy.members["U99EVE"] = {"is_restricted": True} if unsure == "a guest" else {}
    if unsure == "nobody knows":
        proxy.fail("users.info", "500", times=99)
    interrupt_id = await ask(conn, tier=tier("U01ALICE"))
    await deliverer.sweep(conn)
    await notices.remind(conn, interrupt_id, "t1")
    await deliverer.sweep(conn)
    assert (await cards(slack, "U99EVE"), await cards(slack, "U01ALICE")) == ([], [WAITING])
    [reminder] = [each["text"] for each in await slack.messages("U01ALICE") if "thread_ts" in each]
    assert reminder.endswith(" this waits for <@U01ALICE>.")


@pytest.mark.parametrize("kind", ["429", "500", "hang"])
async def test_a_delegate_of_whom_slack_does_not_say_who_they_are_gets_a_copy_later_and_nobody_waits_for_that(
    slack: LocalSlack, proxy: FaultProxy, deliverer: Deliverer, conn: Connection, kind: FaultKind
) -> None:
    await stand_in(conn, ALICE, "U99EVE")
    proxy.members["U99EVE"] = {}
    await ask(conn, tier=tier("U01ALICE", "U02BOB"))
    proxy.fail("users.info", kind)
    assert await deliverer.sweep(conn) == (0, 1)
    assert [await cards(slack, place) for place in PLACES] == [[], [WAITING], [WAITING], []]
    await make_due(conn, deliverer)
    assert await deliverer.sweep(conn) == (1, 0)
    assert [await cards(slack, place) for place in PLACES] == [[], [WAITING], [WAITING], [WAITING]]


async def test_where_nobody_listed_can_be_reached_the_channel_has_it_although_a_delegate_is_not_known_yet(
    slack: LocalSlack, proxy: FaultProxy, deliverer: Deliverer, conn: Connection
) -> None:
    await stand_in(conn, ALICE, "U99EVE")
    proxy.members["U99EVE"] = {}
    await ask(conn, tier=tier("U01ALICE"))
    proxy.fail("conversations.open", "error", error="user_disabled")
    proxy.fail("users.info", "500")
    assert await deliverer.sweep(conn) == (0, 1)
    assert await cards(slack, CHANNEL) == [WAITING]


async def test_a_delegate_who_is_named_after_it_was_posted_gets_a_copy(
    slack: LocalSlack, deliverer: Deliverer, conn: Connection
) -> None:
    await ask(conn, tier=tier("U01ALICE"))
    await ask(conn, "t2", tier=tier("U01ALICE", post_to="channel"))
    await ask(conn, "t3", tier=tier("U03CAROL"))
    await deliverer.sweep(conn)
    settled = await ask(conn, "t4", tier=tier("U01ALICE"))
    await deliverer.sweep(conn)
    await decide(conn, settled, ALICE, YES)
    await deliverer.sweep(conn)
    await stand_in(conn, ALICE, "U02BOB")
    assert await deliverer.sweep(conn) == (1, 0)
    assert await cards(slack, "U02BOB") == [WAITING]


# Whoever asked


async def settled(conn: Connection, flows: Flows, deliverer: Deliverer, requested_by: str, **rules: Any) -> None:
    """Asked for, posted, approved by Bob, paid; what is said of it is due."""
    policy = _Direct(approvers=("U01ALICE", "U02BOB"), limits=LIMITS, rules={"post_to": "direct", **rules})
    await start_claim(conn, requested_by=requested_by)
    await drive(conn, "t1", flows=flows, policy=policy)
    await deliverer.sweep(conn)
    await decide(conn, await value(conn, "SELECT interrupt_id FROM approvals"), BOB, YES)
    await drive(conn, "t1", flows=flows, policy=policy)


async def told(slack: LocalSlack, member: str) -> list[str]:
    return [each["text"] for each in await slack.messages(member) if each["text"].startswith("📬")]


PAID = "📬 250.00 USD to ACME (thread t1): 💸 *250.00 USD paid*, reference L-t1"


@pytest.mark.parametrize("kind", [None, "lost_reply", "drop", "hang", "503", "429"])
@pytest.mark.parametrize("nth", [0, 1, 2])
async def test_where_no_channel_says_it_whoever_asked_is_told_once(
    slack: LocalSlack, proxy: FaultProxy, conn: Connection, flows: Flows, *, nth: int, kind: FaultKind | None
) -> None:
    async with deliverer_at(proxy, patience_s=0.5) as impatient:
        await settled(conn, flows, impatient, "slack:T01TEST/U99EVE")
        if nth:
            proxy.fail("chat.postMessage", "slow", delay_s=0, times=nth)
        if kind:
            proxy.fail("chat.postMessage", kind, delay_s=3600)
        await impatient.sweep(conn)
    async with deliverer_at(proxy) as patient:
        for _ in range(2):
            await make_due(conn, patient)
            await patient.sweep(conn)
    assert await told(slack, "U99EVE") == [PAID]
    assert [len(await slack.messages(place)) for place in ("U01ALICE", "U02BOB", CHANNEL)] == [2, 2, 0]
    assert await value(conn, "SELECT status FROM notices WHERE kind = 'reply'") == "sent"


@pytest.mark.parametrize(
    ("requester", "rules"),
    [
        ("U99EVE", {"post_to": "both"}),
        ("U99EVE", {"post_to": "channel"}),
        ("slack:T0OTHER/U99EVE", {}),
        ("eve@example.com", {}),
        ("cli:ann", {}),
    ],
)
async def test_whoever_reads_it_elsewhere_or_is_none_of_ours_gets_no_message(
    slack: LocalSlack, deliverer: Deliverer, conn: Connection, flows: Flows, *, requester: str, rules: dict[str, Any]
) -> None:
    await settled(conn, flows, deliverer, requester, **rules)
    await deliverer.sweep(conn)
    assert await slack.messages("U99EVE") == []


async def test_whoever_approved_what_they_asked_for_reads_it_below_their_card(
    slack: LocalSlack, deliverer: Deliverer, conn: Connection, flows: Flows
) -> None:
    await settled(conn, flows, deliverer, "U01ALICE", self_approval=True)
    await deliverer.sweep(conn)
    assert await told(slack, "U01ALICE") == []
    assert len(await slack.messages("U01ALICE")) == 2


async def test_whoever_cannot_be_told_is_nobody_s_alarm(
    slack: LocalSlack, proxy: FaultProxy, deliverer: Deliverer, conn: Connection, flows: Flows
) -> None:
    proxy.members["U07GONE"] = {"deleted": True}
    await settled(conn, flows, deliverer, "U07GONE")
    await deliverer.sweep(conn)
    assert await value(conn, "SELECT status FROM notices WHERE kind = 'reply'") == "sent"
    assert await slack.messages(OPS_CHANNEL) == []


# Where a refreshed policy says


@pytest.mark.parametrize(
    ("before", "after", "there"),
    [
        (None, RANDOM, (1, 1)),
        (RANDOM, None, (1, 1)),
        (None, None, (1, 0)),
        (RANDOM, RANDOM, (0, 1)),
    ],
)
async def test_a_refreshed_channel_gets_the_card_and_the_copy_elsewhere_stays_true(
    slack: LocalSlack,
    deliverer: Deliverer,
    conn: Connection,
    *,
    before: str | None,
    after: str | None,
    there: tuple[int, int],
) -> None:
    interrupt_id = await ask(conn, tier=tier("U01ALICE", post_to="channel", channel=before))
    await conn.execute("UPDATE threads SET flow = 'other'")
    await deliverer.sweep(conn)
    rules = (Rule(tier=tier("U01ALICE", post_to="channel", channel=after), over={}),)
    await refresh(conn, Tiers(rules=rules), "t1", by="cli:ann")
    await deliverer.sweep(conn)
    await notices.change_card(conn, interrupt_id)
    await deliverer.sweep(conn)
    assert [await cards(slack, place) for place in (CHANNEL, RANDOM)] == [[WAITING] * count for count in there]
    await decide(conn, interrupt_id, ALICE, YES)
    await deliverer.sweep(conn)
    assert [await cards(slack, place) for place in (CHANNEL, RANDOM)] == [[SETTLED] * count for count in there]


# Once, and although


@pytest.mark.parametrize("kind", ["lost_reply", "slow", "drop", "hang", "500", "503", "429"])
@pytest.mark.parametrize("nth", [0, 1, 2])
async def test_each_place_has_one_copy_whichever_posting_failed(
    slack: LocalSlack, proxy: FaultProxy, conn: Connection, *, nth: int, kind: FaultKind
) -> None:
    interrupt_id = await ask(conn, tier=tier("U01ALICE", "U02BOB", post_to="both"))
    if nth:
        # Those before it come through.
        proxy.fail("chat.postMessage", "slow", delay_s=0, times=nth)
    proxy.fail("chat.postMessage", kind, delay_s=3600)
    async with deliverer_at(proxy, patience_s=0.5) as impatient:
        assert await impatient.sweep(conn) == (0, 1)
    async with deliverer_at(proxy) as patient:
        await make_due(conn, patient)
        assert await patient.sweep(conn) == (1, 0)
        places = (CHANNEL, "U01ALICE", "U02BOB")
        assert [await cards(slack, place) for place in places] == [[WAITING]] * 3
        assert len(await notices.messages_of(conn, interrupt_id)) == 3
        await decide(conn, interrupt_id, ALICE, YES)
        assert await patient.sweep(conn) == (1, 0)
    assert [await cards(slack, place) for place in places] == [[SETTLED]] * 3


async def test_a_copy_whose_posting_got_no_answer_shows_what_was_decided_meanwhile(
    slack: LocalSlack, proxy: FaultProxy, deliverer: Deliverer, conn: Connection
) -> None:
    interrupt_id = await ask(conn, tier=tier("U01ALICE", "U02BOB"))
    proxy.fail("chat.postMessage", "slow", delay_s=0)
    proxy.fail("chat.postMessage", "lost_reply")
    assert await deliverer.sweep(conn) == (0, 1)
    await decide(conn, interrupt_id, ALICE, YES)
    await make_due(conn, deliverer)
    assert await deliverer.sweep(conn) == (1, 0)
    assert [await cards(slack, place) for place in ("U01ALICE", "U02BOB")] == [[SETTLED], [SETTLED]]
    assert await slack.messages(CHANNEL) == []


@pytest.mark.parametrize(
    ("who", "words", "error"),
    [
        ("U07GONE", None, "user_not_found"),
        ("U07GONE", {"deleted": True}, "user_disabled"),
        ("U03BOTTY", {}, "cannot_dm_bot"),
    ],
)
async def test_who_cannot_be_sent_one_keeps_nobody_else_from_theirs(
    slack: LocalSlack,
    proxy: FaultProxy,
    deliverer: Deliverer,
    conn: Connection,
    *,
    who: str,
    words: dict[str, Any] | None,
    error: str,
) -> None:
    if words is not None:
        proxy.members[who] = words
    interrupt_id = await ask(conn, tier=tier("U01ALICE", who, "U02BOB"))
    # The operators are told at once.
    assert await deliverer.sweep(conn) == (1, 1)
    assert [await cards(slack, place) for place in ("U01ALICE", "U02BOB", CHANNEL)] == [[WAITING], [WAITING], []]
    row = await one_row(conn, "SELECT status, error FROM notices WHERE kind = 'card'")
    assert row["status"] == "failed"
    assert row["error"].startswith(f"{error}: take ") and row["error"].endswith(f" out of the tier's approvers ({who})")
    [told] = await slack.messages(OPS_CHANNEL)
    assert error in told["text"]

    await decide(conn, interrupt_id, ALICE, YES)
    assert await deliverer.sweep(conn) == (1, 0)
    assert [await cards(slack, place) for place in ("U01ALICE", "U02BOB")] == [[SETTLED], [SETTLED]]


async def test_where_none_of_them_can_be_sent_one_the_channel_is_told_and_the_operators(
    slack: LocalSlack, deliverer: Deliverer, conn: Connection
) -> None:
    await ask(conn, tier=tier("U03BOTTY", "U07GONE"))
    assert await deliverer.sweep(conn) == (1, 1)
    assert await cards(slack, CHANNEL) == [WAITING]
    assert len(await slack.messages(OPS_CHANNEL)) == 1


async def test_a_channel_that_refuses_keeps_nobody_from_their_direct_message(
    slack: LocalSlack, proxy: FaultProxy, deliverer: Deliverer, conn: Connection
) -> None:
    interrupt_id = await ask(conn, tier=tier("U01ALICE", post_to="both", channel=RANDOM))
    proxy.fail("chat.postMessage", "error", error="not_in_channel")
    assert await deliverer.sweep(conn) == (1, 1)
    assert await cards(slack, "U01ALICE") == [WAITING]
    error = await value(conn, "SELECT error FROM notices WHERE kind = 'card'")
    assert error == f"not_in_channel: invite the bot to the channel ({RANDOM})"
    assert await notices.retry_failed(conn) == 1
    await conn.execute("UPDATE approvals SET channel = %s", (CHANNEL,))
    assert await deliverer.sweep(conn) == (1, 0)
    assert len(await notices.messages_of(conn, interrupt_id)) == 2


async def test_a_reply_that_one_copy_refuses_stands_below_the_others(
    slack: LocalSlack, proxy: FaultProxy, deliverer: Deliverer, conn: Connection
) -> None:
    interrupt_id = await ask(conn, tier=tier("U01ALICE", "U02BOB"))
    await deliverer.sweep(conn)
    await notices.post_reply(conn, interrupt_id, "t1")
    proxy.fail("chat.postMessage", "error", error="is_archived")
    assert await deliverer.sweep(conn) == (1, 1)
    assert [len(await slack.messages(place)) for place in ("U01ALICE", "U02BOB")] == [1, 2]
    assert await notices.retry_failed(conn) == 1
    assert await deliverer.sweep(conn) == (1, 0)
    assert [len(await slack.messages(place)) for place in ("U01ALICE", "U02BOB")] == [2, 2]


async def test_twelve_copies_that_take_longer_than_a_lease_are_one_each_with_two_deliverers(
    slack: LocalSlack, proxy: FaultProxy, conn: Connection, database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    people = [f"U1{number:02}APP" for number in range(12)]
    proxy.members |= {each: {} for each in people}
    monkeypatch.setattr(notices, "LEASE_S", 3.0)
    interrupt_id = await ask(conn, tier=tier(*people, required=12))
    proxy.fail("chat.postMessage", "slow", delay_s=0.4, times=12)
    async with (
        deliverer_at(proxy) as one,
        deliverer_at(proxy) as two,
        await connect(database_url, "door") as first,
        await connect(database_url, "door") as second,
    ):
        sweeping = asyncio.create_task(one.sweep(first))
        await proxy.wait_for_calls("chat.postMessage")
        while not sweeping.done():
            # The other one looks all the time, and finds a lease that holds.
            assert await two.sweep(second) == (0, 0)
            await asyncio.wait({sweeping}, timeout=0.05)
        assert await sweeping == (1, 0)
        assert len(proxy.calls_of("chat.postMessage")) == 12
        for number, each in enumerate(people):
            await decide(conn, interrupt_id, slack_person(each, f"Person {number}"), YES)
        assert (await approval_of(conn, interrupt_id)).status == "approved"
        proxy.fail("chat.update", "slow", delay_s=0.4, times=12)
        assert await one.sweep(first) == (1, 0)
    places = collections.Counter(channel for channel, _ in await notices.messages_of(conn, interrupt_id))
    assert sorted(places.values()) == [1] * 12
    assert [await cards(slack, each) for each in people] == [[SETTLED]] * 12


@pytest.mark.parametrize(
    ("place", "channel", "copies", "served"),
    [
        ("", "C1", [], False),
        ("", "C1", [("C1", "")], True),
        # The channel of the settings may have changed, or its id.
        ("", "C1", [("C2", "")], True),
        ("", "C1", [("C2", None)], True),
        ("", "C1", [("D1", "U1")], False),
        ("", "C1", [("D1", None)], False),
        ("", "C1", [("D1", None), ("G2", None)], True),
        # A tier has another channel by now, or none any more.
        ("C1", "C1", [("C2", "C2")], False),
        ("C1", "C1", [("C2", "")], False),
        ("C1", "C1", [("C2", None)], False),
        ("", "C1", [("C2", "C2")], False),
        ("", "C1", [("C1", "C1")], True),
        ("C1", "C1", [("G1", "C1")], True),
        ("U1", "D1", [("C1", "")], False),
        ("U1", "D1", [("D2", "U2")], False),
        ("U1", "D1", [("C1", ""), ("D1", None)], True),
    ],
)
def test_a_channel_is_served_by_what_was_posted_for_it_and_a_conversation_by_itself(
    place: str, channel: str, copies: list[tuple[str, str | None]], *, served: bool
) -> None:
    there = [notices.Copy(channel=at, ts="1.1", place=posted_for) for at, posted_for in copies]
    assert is_served(place, channel, there) == served


@dataclass(frozen=True, kw_only=True)
class _Direct(OneTier):
    """The built-in policy, with these rules beside it."""

    rules: dict[str, Any]

    def tier(self, name: str, claim: Claim | None = None) -> Tier:
        return tier(*self.approvers, name=name, **self.rules)
