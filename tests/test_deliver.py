"""Cards and replies reach the channel once and stay true, whatever Slack or the way to it does."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from typing import Any

import psycopg
import pytest
from pydantic import SecretStr

from bot import outlet
from bot.deliver import Deliverer
from bot.outlet import Outlet
from flow import notices, threads
from flow.approvals import approval_of, decide
from flow.database import Connection, connect
from flow.deadlines import expire_overdue
from flow.drive import drive
from flow.errors import Tampered
from flow.flows import Flows
from flow.reminders import remind_overdue
from flow.settings import Settings
from tests.block_kit import SETTLED, WAITING, buttons_of, findings
from tests.delivering import OPS_CHANNEL, deliverer_at, interrupt_of, running
from tests.fault_proxy import FaultKind, FaultProxy
from tests.local_slack import BOT_TOKEN, CHANNEL, SIGNING_SECRET, LocalSlack, skip_reason
from tests.people import ALICE, ANN, BOB, EVE, NO, ONE_OF_THREE, POLICY, TWO_OF_THREE, YES, ask, start_claim
from tests.rows import all_rows, one_row, until, value
from tests.slack_door import client_of

pytestmark = pytest.mark.skipif(skip_reason() is not None, reason=skip_reason() or "")

_BETWEEN_POSTS_S = outlet._BETWEEN_POSTS_S


@pytest.fixture(autouse=True)
def _no_pace(monkeypatch: pytest.MonkeyPatch) -> None:
    """One message a second is a wait that only one fact here is about."""
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


# Faults that leave it open whether Slack acted: afterwards it had in the first two, and not in the others.
OPEN: list[FaultKind] = ["lost_reply", "slow", "drop", "hang", "500", "503"]

# Changed past us


async def test_a_card_that_was_changed_past_us_says_so_within_five_seconds(
    slack: LocalSlack, deliverer: Deliverer, conn: Connection, database_url: str
) -> None:
    interrupt_id = await ask(conn)

    async def card() -> dict[str, Any] | None:
        found = await slack.messages(CHANNEL)
        return found[0] if found else None

    async def marked() -> bool:
        found = await card()
        return found is not None and "changed outside of the bot: nobody can decide it" in str(found["blocks"])

    async def told() -> list[str]:
        return [each["text"] for each in await slack.messages(OPS_CHANNEL)]

    async with running(deliverer, database_url):
        await until(card)
        await conn.execute("UPDATE approvals SET approvers = '{U66EVE}'")
        await until(marked, within_s=5)
        marked_card = await card()
        assert marked_card is not None and buttons_of(marked_card) == []
        [alarm] = await until(told)
        assert f"Its request {interrupt_id} was changed in the database" in alarm
        # Each time, and back again.
        await conn.execute("UPDATE approvals SET approvers = %s", (list(POLICY.approvers),))

        async def whole() -> bool:
            found = await card()
            return found is not None and buttons_of(found) == WAITING

        await until(whole, within_s=5)
        await conn.execute("UPDATE approvals SET request = '{}'")
        await until(marked, within_s=5)

        async def told_again() -> bool:
            return len(await told()) == 2

        await until(told_again)
    assert await value(conn, "SELECT count(*) FROM audit WHERE kind = 'approval.tampered'") == 2


async def told_to_operators(slack: LocalSlack) -> list[str]:
    return [each["text"] for each in await slack.messages(OPS_CHANNEL)]


async def test_that_a_request_was_changed_past_us_is_told_though_it_was_put_back(
    slack: LocalSlack, deliverer: Deliverer, conn: Connection
) -> None:
    interrupt_id = await ask(conn)
    await deliverer.sweep(conn)
    for _ in range(2):
        await conn.execute("UPDATE approvals SET approvers = '{U66EVE}'")
        await conn.execute("UPDATE approvals SET approvers = %s", (list(POLICY.approvers),))
    await deliverer.sweep(conn)
    [said] = await told_to_operators(slack)
    assert f"Its request {interrupt_id} was changed in the database after it was asked, and changed back" in said
    [card] = await slack.messages(CHANNEL)
    assert buttons_of(card) == WAITING
    assert await value(conn, "SELECT count(*) FROM audit WHERE kind = 'approval.tampered'") == 2
    # Said once: another trouble of the thread does not say it again.
    await notices.raise_alarm(conn, "t1")
    await deliverer.sweep(conn)
    assert len(await told_to_operators(slack)) == 1


async def test_a_request_without_its_fingerprint_is_told_of(
    slack: LocalSlack, deliverer: Deliverer, conn: Connection
) -> None:
    interrupt_id = await ask(conn)
    await deliverer.sweep(conn)
    await conn.execute("UPDATE approvals SET fingerprint = NULL")
    await deliverer.sweep(conn)
    [said] = await told_to_operators(slack)
    assert f"Its request {interrupt_id} was changed in the database after it was asked, and nobody can" in said
    [card] = await slack.messages(CHANNEL)
    assert buttons_of(card) == []


async def test_what_is_changed_past_us_where_the_database_does_not_look_is_told_at_the_decision(
    slack: LocalSlack, deliverer: Deliverer, conn: Connection
) -> None:
    interrupt_id = await ask(conn)
    await conn.execute("ALTER TABLE approvals DISABLE TRIGGER approvals_not_whole")
    await conn.execute("UPDATE approvals SET approvers = '{U66EVE}'")
    for person in (EVE, ALICE):
        with pytest.raises(Tampered):
            await decide(conn, interrupt_id, person, YES)
    await deliverer.sweep(conn)
    assert len(await told_to_operators(slack)) == 1


async def test_nobody_is_called_to_what_was_changed_past_us(
    slack: LocalSlack, deliverer: Deliverer, conn: Connection
) -> None:
    """Whoever did it may have put in anybody, and any place."""
    await ask(conn, tier=replace(ONE_OF_THREE, remind_every_s=60.0))
    await deliverer.sweep(conn)
    await conn.execute("UPDATE approvals SET remind_at = clock_timestamp()")
    assert await remind_overdue(conn) == 1
    await conn.execute("UPDATE approvals SET approvers = '{U66EVE}', post_to = 'direct', remind_at = clock_timestamp()")
    assert await remind_overdue(conn) == 0
    await deliverer.sweep(conn)
    assert await slack.messages("U66EVE") == []
    [card] = await slack.messages(CHANNEL)
    assert not card.get("reply_count") and "U66EVE" not in str(card)
    # Nor is it posted anew, where it had not been shown before.
    await ask(conn, "t2")
    await conn.execute("UPDATE approvals SET approvers = '{U66EVE}' WHERE thread_id = 't2'")
    await deliverer.sweep(conn)
    assert len(await slack.messages(CHANNEL)) == 1


async def test_what_we_change_ourselves_is_whole_at_each_commit(conn: Connection, deliverer: Deliverer) -> None:
    escalating = replace(TWO_OF_THREE, on_expiry="escalate", escalate_to=("U66EVE",), expires_after_s=60.0)
    interrupt_id = await ask(conn, tier=escalating)
    await deliverer.sweep(conn)
    await conn.execute("UPDATE approvals SET expires_at = clock_timestamp()")
    assert await expire_overdue(conn) == 1
    await deliverer.sweep(conn)
    assert (await approval_of(conn, interrupt_id)).whole
    assert await all_rows(conn, "SELECT FROM audit WHERE kind = 'approval.tampered'") == []


# Posting once


@pytest.mark.parametrize("kind", OPEN)
async def test_a_card_whose_posting_failed_is_in_the_channel_once(
    slack: LocalSlack, proxy: FaultProxy, conn: Connection, kind: FaultKind
) -> None:
    interrupt_id = await ask(conn)
    proxy.fail("chat.postMessage", kind, delay_s=3600)
    async with deliverer_at(proxy, patience_s=0.5) as impatient:
        assert await impatient.sweep(conn) == (0, 1)
    row = await notice(conn)
    assert (row["status"], row["ambiguous"], row["due"]) == ("pending", True, False)
    assert row["error"]

    await make_due(conn, impatient)
    async with deliverer_at(proxy) as patient:
        assert await patient.sweep(conn) == (1, 0)

    [message] = await slack.messages(CHANNEL)
    assert buttons_of(message) == WAITING
    assert await notices.messages_of(conn, interrupt_id) == [(CHANNEL, message["ts"])]
    row = await notice(conn)
    assert (row["status"], row["ambiguous"], row["error"]) == ("sent", False, None)


async def test_the_services_own_client_does_not_post_again_behind_our_back(
    slack: LocalSlack, proxy: FaultProxy, conn: Connection
) -> None:
    await ask(conn)
    proxy.fail("chat.postMessage", "lost_reply")
    settings = Settings(
        slack_api_url=proxy.api_url,
        slack_bot_token=SecretStr(BOT_TOKEN),
        slack_signing_secret=SecretStr(SIGNING_SECRET),
        slack_channel=CHANNEL,
    )
    async with Deliverer.of(settings) as deliverer:
        assert await deliverer.sweep(conn) == (0, 1)
    assert len(await slack.messages(CHANNEL)) == 1


async def test_a_failed_posting_is_tried_again_without_anybodys_doing(
    slack: LocalSlack, proxy: FaultProxy, deliverer: Deliverer, conn: Connection, database_url: str
) -> None:
    proxy.fail("chat.postMessage", "drop")
    async with running(deliverer, database_url):
        await ask(conn)
        await proxy.wait_for_calls("chat.postMessage", 2)
        await until_sent(conn)
    assert len(await slack.messages(CHANNEL)) == 1


async def test_a_rate_limited_card_waits_as_long_as_slack_says(
    slack: LocalSlack, proxy: FaultProxy, deliverer: Deliverer, conn: Connection
) -> None:
    await ask(conn)
    proxy.fail("chat.postMessage", "429", retry_after_s=47)
    assert await deliverer.sweep(conn) == (0, 1)
    assert 45 < await value(conn, "SELECT extract(epoch FROM due_at - clock_timestamp()) FROM notices") <= 47
    assert await deliverer.sweep(conn) == (0, 0)
    assert await slack.messages(CHANNEL) == []

    await make_due(conn, deliverer)
    assert await deliverer.sweep(conn) == (1, 0)
    assert len(await slack.messages(CHANNEL)) == 1
    # Slack said that it did nothing: there was nothing to search for.
    assert proxy.calls_of("conversations.history") == []


async def test_a_card_whose_deliverer_lost_the_database_after_posting_it_is_found_again(
    slack: LocalSlack, proxy: FaultProxy, deliverer: Deliverer, conn: Connection, database_url: str
) -> None:
    interrupt_id = await ask(conn)
    # The database's clock may be ahead of Slack's.
    await conn.execute("UPDATE approvals SET requested_at = requested_at + interval '1 minute'")
    proxy.fail("chat.postMessage", "slow", delay_s=0.5)
    async with await connect(database_url, "door") as own:
        sweeping = asyncio.create_task(deliverer.sweep(own))
        await proxy.wait_for_calls("chat.postMessage")
        await conn.execute("SELECT pg_terminate_backend(%s, 5000)", (own.info.backend_pid,))
        with pytest.raises(psycopg.OperationalError):
            await sweeping
    assert await notices.messages_of(conn, interrupt_id) == []
    assert (await notice(conn))["status"] == "sending"

    await make_due(conn, deliverer)
    assert await deliverer.sweep(conn) == (1, 0)
    [message] = await slack.messages(CHANNEL)
    assert await notices.messages_of(conn, interrupt_id) == [(CHANNEL, message["ts"])]


async def test_a_deliverer_that_is_stopped_finishes_what_it_is_sending(
    slack: LocalSlack, proxy: FaultProxy, deliverer: Deliverer, conn: Connection, database_url: str
) -> None:
    interrupt_id = await ask(conn)
    proxy.fail("chat.postMessage", "slow", delay_s=0.5)
    async with running(deliverer, database_url):
        await proxy.wait_for_calls("chat.postMessage")
    [message] = await slack.messages(CHANNEL)
    assert await notices.messages_of(conn, interrupt_id) == [(CHANNEL, message["ts"])]
    assert (await notice(conn))["status"] == "sent"


async def test_a_card_is_found_again_below_hundreds_of_newer_messages(
    slack: LocalSlack, proxy: FaultProxy, deliverer: Deliverer, conn: Connection
) -> None:
    interrupt_id = await ask(conn)
    proxy.fail("chat.postMessage", "lost_reply")
    assert await deliverer.sweep(conn) == (0, 1)
    [card] = await slack.messages(CHANNEL)
    async with client_of(slack.api_url) as somebody:
        for _ in range(201):
            await somebody.chat_postMessage(channel=CHANNEL, text="something else")

    await make_due(conn, deliverer)
    assert await deliverer.sweep(conn) == (1, 0)
    assert await notices.messages_of(conn, interrupt_id) == [(CHANNEL, card["ts"])]
    assert len(await slack.messages(CHANNEL)) == 202


async def test_two_deliverers_side_by_side_post_each_card_once(
    slack: LocalSlack, proxy: FaultProxy, conn: Connection, database_url: str
) -> None:
    asked = [await ask(conn, f"t{number}") for number in range(8)]
    async with (
        deliverer_at(proxy) as one,
        deliverer_at(proxy) as two,
        await connect(database_url, "door") as first,
        await connect(database_url, "door") as second,
    ):
        swept = await asyncio.gather(one.sweep(first), two.sweep(second))
    assert [sum(counts) for counts in zip(*swept, strict=True)] == [8, 0]
    shown = [interrupt_of(message) for message in await slack.messages(CHANNEL)]
    assert sorted(shown) == sorted(asked)


async def test_two_messages_to_a_channel_are_a_second_apart(
    proxy: FaultProxy, deliverer: Deliverer, conn: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(outlet, "_BETWEEN_POSTS_S", _BETWEEN_POSTS_S)
    await ask(conn, "t1")
    await ask(conn, "t2")
    sweeping = asyncio.create_task(deliverer.sweep(conn))
    await proxy.wait_for_calls("chat.postMessage")
    began = time.monotonic()
    await proxy.wait_for_calls("chat.postMessage", 2)
    # Both calls take their way: a little less than a second may lie between their arrivals.
    assert time.monotonic() - began > 0.9
    assert await sweeping == (2, 0)


# Refusals


@pytest.mark.parametrize(
    ("error", "fix"),
    [
        ("not_in_channel", "invite the bot to SLACK_CHANNEL"),
        ("channel_not_found", "set SLACK_CHANNEL"),
        ("is_archived", "set SLACK_CHANNEL"),
        ("token_revoked", "set SLACK_BOT_TOKEN"),
        ("missing_scope", "manifest.yml"),
        ("invalid_blocks", "api.slack.com"),
        ("msg_blocks_too_long", "decide it on its page"),
        ("message_not_found", "api.slack.com"),
    ],
)
async def test_a_card_that_slack_refuses_fails_with_the_fix_and_its_request_stays_open(
    slack: LocalSlack, proxy: FaultProxy, deliverer: Deliverer, conn: Connection, *, error: str, fix: str
) -> None:
    interrupt_id = await ask(conn)
    proxy.fail("chat.postMessage", "error", error=error)
    # The operators are told at once.
    assert await deliverer.sweep(conn) == (1, 1)
    [told] = await slack.messages(OPS_CHANNEL)
    assert told["text"].startswith(f"🚨 Thread t1 needs somebody.\nSlack refuses its card: {error}: ")
    row = await notice(conn)
    assert row["status"] == "failed"
    assert row["error"].startswith(f"{error}: ")
    assert fix in row["error"]
    assert await deliverer.sweep(conn) == (0, 0)
    assert (await approval_of(conn, interrupt_id)).status == "pending"
    assert (await decide(conn, interrupt_id, ALICE, YES)).approval.status == "approved"
    assert await slack.messages(CHANNEL) == []


@pytest.mark.parametrize(
    ("error", "fix"),
    [
        ("is_inactive", "claim_flow.py resume"),
        ("cant_update_message", "set SLACK_BOT_TOKEN"),
        ("not_in_channel", "invite the bot to SLACK_CHANNEL"),
        ("is_archived", "not archived"),
        ("token_revoked", "set SLACK_BOT_TOKEN"),
        ("invalid_blocks", "api.slack.com"),
    ],
)
async def test_a_change_that_slack_refuses_fails_with_the_fix_and_its_request_stays_open(
    slack: LocalSlack, proxy: FaultProxy, deliverer: Deliverer, conn: Connection, *, error: str, fix: str
) -> None:
    interrupt_id = await ask(conn)
    assert await deliverer.sweep(conn) == (1, 0)
    await notices.change_card(conn, interrupt_id)
    proxy.fail("chat.update", "error", error=error)
    # The operators are told at once.
    assert await deliverer.sweep(conn) == (1, 1)
    row = await notice(conn)
    assert row["status"] == "failed"
    assert row["error"].startswith(f"{error}: ")
    assert fix in row["error"]
    assert (await approval_of(conn, interrupt_id)).status == "pending"
    assert (await decide(conn, interrupt_id, ALICE, YES)).approval.status == "approved"
    assert await deliverer.sweep(conn) == (1, 0)
    [message] = await slack.messages(CHANNEL)
    assert "Approved by Alice" in message["text"]
    assert buttons_of(message) == SETTLED


async def test_a_refused_card_is_posted_once_its_cause_is_mended(
    slack: LocalSlack, proxy: FaultProxy, deliverer: Deliverer, conn: Connection
) -> None:
    await ask(conn)
    proxy.fail("chat.postMessage", "error", error="not_in_channel")
    assert await deliverer.sweep(conn) == (1, 1)
    assert await notices.retry_failed(conn) == 1
    assert await deliverer.sweep(conn) == (1, 0)
    assert len(await slack.messages(CHANNEL)) == 1
    row = await notice(conn)
    assert (row["status"], row["error"]) == ("sent", None)


async def test_a_copy_that_was_deleted_does_not_keep_the_others_from_the_truth(
    slack: LocalSlack, proxy: FaultProxy, deliverer: Deliverer, conn: Connection
) -> None:
    interrupt_id = await ask(conn)
    await deliverer.sweep(conn)
    [first] = await slack.messages(CHANNEL)
    async with client_of(slack.api_url) as somebody:
        copy = await somebody.chat_postMessage(channel=CHANNEL, text=first["text"], blocks=first["blocks"])
    await notices.remember_message(conn, interrupt_id, CHANNEL, copy["ts"])
    proxy.fail("chat.update", "error", error="message_not_found")

    await decide(conn, interrupt_id, ALICE, YES)
    assert await deliverer.sweep(conn) == (1, 0)
    deleted, kept = await slack.messages(CHANNEL)
    assert (buttons_of(deleted), buttons_of(kept)) == (WAITING, SETTLED)
    assert await notices.messages_of(conn, interrupt_id) == [(CHANNEL, copy["ts"])]


async def test_a_card_that_was_deleted_while_its_request_waits_is_posted_anew(
    slack: LocalSlack, proxy: FaultProxy, deliverer: Deliverer, conn: Connection
) -> None:
    interrupt_id = await ask(conn)
    await deliverer.sweep(conn)
    proxy.fail("chat.update", "error", error="message_not_found")
    await notices.change_card(conn, interrupt_id)
    assert await deliverer.sweep(conn) == (1, 0)
    _, anew = await slack.messages(CHANNEL)
    assert await notices.messages_of(conn, interrupt_id) == [(CHANNEL, anew["ts"])]


async def test_told_to_wait_the_deliverer_waits_with_everything(
    proxy: FaultProxy, deliverer: Deliverer, conn: Connection
) -> None:
    await ask(conn)
    await ask(conn, "t2")
    proxy.fail("chat.postMessage", "429", retry_after_s=47)
    assert await deliverer.sweep(conn) == (0, 1)
    assert len(proxy.calls_of("chat.postMessage")) == 1


# Staying true


@pytest.mark.parametrize("kind", [*OPEN, "429"])
async def test_a_change_whose_update_failed_shows_in_the_end_and_its_request_stays_open(
    slack: LocalSlack, proxy: FaultProxy, conn: Connection, kind: FaultKind
) -> None:
    interrupt_id = await ask(conn, tier=TWO_OF_THREE)
    async with deliverer_at(proxy) as patient, deliverer_at(proxy, patience_s=0.5) as impatient:
        assert await patient.sweep(conn) == (1, 0)
        await decide(conn, interrupt_id, ALICE, YES)
        proxy.fail("chat.update", kind, delay_s=3600)
        assert await impatient.sweep(conn) == (0, 1)
        await make_due(conn, impatient)
        assert await patient.sweep(conn) == (1, 0)
        [message] = await slack.messages(CHANNEL)
        assert "Approved by Alice" in message["text"]
        assert buttons_of(message) == WAITING

        proxy.fail("chat.update", kind, delay_s=3600)
        assert (await decide(conn, interrupt_id, BOB, YES)).approval.status == "approved"
        assert await impatient.sweep(conn) == (0, 1)
        await make_due(conn, impatient)
        assert await patient.sweep(conn) == (1, 0)
    [message] = await slack.messages(CHANNEL)
    assert "Approved by Bob" in message["text"]
    assert buttons_of(message) == SETTLED


async def test_a_decision_that_comes_while_the_card_is_posted_shows_on_it(
    slack: LocalSlack, proxy: FaultProxy, deliverer: Deliverer, conn: Connection, database_url: str
) -> None:
    interrupt_id = await ask(conn)
    proxy.fail("chat.postMessage", "slow", delay_s=0.5)
    async with await connect(database_url, "door") as own:
        sweeping = asyncio.create_task(deliverer.sweep(own))
        await proxy.wait_for_calls("chat.postMessage")
        await decide(conn, interrupt_id, ALICE, YES)
        assert not sweeping.done()
        await sweeping
    [message] = await slack.messages(CHANNEL)
    assert "Approved by Alice" in message["text"]
    assert buttons_of(message) == SETTLED
    assert (await notice(conn))["status"] == "sent"


async def test_a_decision_that_comes_while_the_posting_is_uncertain_shows_on_the_card(
    slack: LocalSlack, proxy: FaultProxy, deliverer: Deliverer, conn: Connection
) -> None:
    interrupt_id = await ask(conn)
    proxy.fail("chat.postMessage", "lost_reply")
    assert await deliverer.sweep(conn) == (0, 1)
    await decide(conn, interrupt_id, BOB, NO)
    assert await deliverer.sweep(conn) == (1, 0)
    [message] = await slack.messages(CHANNEL)
    assert "Rejected by Bob" in message["text"]
    assert buttons_of(message) == SETTLED


async def test_a_decision_during_an_update_shows_although_the_older_update_lands_last(
    slack: LocalSlack, proxy: FaultProxy, deliverer: Deliverer, conn: Connection, database_url: str
) -> None:
    interrupt_id = await ask(conn)
    await deliverer.sweep(conn)
    await notices.change_card(conn, interrupt_id)
    proxy.fail("chat.update", "slow", delay_s=0.5)
    async with await connect(database_url, "door") as own:
        sweeping = asyncio.create_task(deliverer.sweep(own))
        await proxy.wait_for_calls("chat.update")
        await decide(conn, interrupt_id, ALICE, YES)
        await sweeping
    [message] = await slack.messages(CHANNEL)
    assert "Approved by Alice" in message["text"]


async def test_a_request_that_was_settled_before_it_was_posted_is_never_posted(
    slack: LocalSlack, proxy: FaultProxy, deliverer: Deliverer, conn: Connection, flows: Flows
) -> None:
    await paid(conn, flows)
    await deliverer.sweep(conn)
    assert await slack.messages(CHANNEL) == []
    assert proxy.calls_of("chat.postMessage") == []
    assert await all_rows(conn, "SELECT kind FROM notices WHERE status <> 'sent'") == []


async def test_every_change_says_all_of_the_card_and_slack_takes_it(
    slack: LocalSlack, proxy: FaultProxy, deliverer: Deliverer, conn: Connection, flows: Flows
) -> None:
    await start_claim(conn)
    await drive(conn, "t1", flows=flows, policy=POLICY)
    await deliverer.sweep(conn)
    await decide(conn, await value(conn, "SELECT interrupt_id FROM approvals"), ALICE, YES)
    await deliverer.sweep(conn)
    await drive(conn, "t1", flows=flows, policy=POLICY)
    await deliverer.sweep(conn)

    [posted, reply] = proxy.calls_of("chat.postMessage")
    changes = proxy.calls_of("chat.update")
    assert [findings(call["text"], call["blocks"]) for call in (posted, *changes)] == [[]] * 3
    assert [call["unfurl_links"] for call in (posted, reply)] == [False, False]
    card, below = await slack.messages(CHANNEL)
    assert "Paid: 250.00 USD" in card["text"]
    assert (below["thread_ts"], below["text"]) == (card["ts"], "💸 *250.00 USD paid*, reference L-t1")


# Replies


@pytest.mark.parametrize("kind", [*OPEN, "429"])
async def test_the_outcome_is_said_below_the_card_once(
    slack: LocalSlack, proxy: FaultProxy, deliverer: Deliverer, conn: Connection, *, flows: Flows, kind: FaultKind
) -> None:
    await posted_and_paid(conn, flows, deliverer)
    proxy.fail("chat.postMessage", kind, delay_s=3600)
    async with deliverer_at(proxy, patience_s=0.5) as impatient:
        assert await impatient.sweep(conn) == (1, 1)
    await make_due(conn, deliverer)
    assert await deliverer.sweep(conn) == (1, 0)
    card, below = await slack.messages(CHANNEL)
    assert (below["thread_ts"], below["text"]) == (card["ts"], "💸 *250.00 USD paid*, reference L-t1")


@pytest.mark.parametrize(
    "error",
    ["invalid_blocks", "not_in_channel", "is_archived", "message_not_found", "cant_update_message", "token_revoked"],
)
async def test_an_outcome_that_slack_refuses_to_say_stands_on_the_card_and_is_said_once_that_is_mended(
    slack: LocalSlack, proxy: FaultProxy, deliverer: Deliverer, conn: Connection, *, flows: Flows, error: str
) -> None:
    await posted_and_paid(conn, flows, deliverer)
    proxy.fail("chat.postMessage", "error", error=error)
    # The change of the card, and the alarm.
    assert await deliverer.sweep(conn) == (2, 1)
    row = await notice(conn, "reply")
    assert (row["status"], row["error"].split(": ")[0]) == ("failed", error)
    [card] = await slack.messages(CHANNEL)
    assert "Paid: 250.00 USD" in card["text"]
    assert buttons_of(card) == SETTLED

    assert await notices.retry_failed(conn) == 1
    assert await deliverer.sweep(conn) == (1, 0)
    _, below = await slack.messages(CHANNEL)
    assert (below["thread_ts"], below["text"]) == (card["ts"], "💸 *250.00 USD paid*, reference L-t1")


async def test_the_outcome_is_said_once_below_each_copy_although_the_second_was_refused_at_first(
    slack: LocalSlack, proxy: FaultProxy, deliverer: Deliverer, conn: Connection, flows: Flows
) -> None:
    interrupt_id = await posted_and_paid(conn, flows, deliverer)
    [first] = await slack.messages(CHANNEL)
    async with client_of(slack.api_url) as somebody:
        copy = await somebody.chat_postMessage(channel=CHANNEL, text=first["text"], blocks=first["blocks"])
        await notices.remember_message(conn, interrupt_id, CHANNEL, copy["ts"])
        # The first reply gets through, the second is put off.
        await somebody.chat_postMessage(channel=CHANNEL, text="unrelated")
    before = len(await slack.messages(CHANNEL))
    proxy.fail("chat.postMessage", "slow", delay_s=0)
    proxy.fail("chat.postMessage", "429")
    assert await deliverer.sweep(conn) == (1, 1)
    assert len(await slack.messages(CHANNEL)) == before + 1

    await make_due(conn, deliverer)
    assert await deliverer.sweep(conn) == (1, 0)
    replies = [message["thread_ts"] for message in await slack.messages(CHANNEL) if "thread_ts" in message]
    assert sorted(replies) == sorted([first["ts"], copy["ts"]])


async def test_a_reply_waits_until_its_card_is_posted(
    slack: LocalSlack, proxy: FaultProxy, deliverer: Deliverer, conn: Connection, flows: Flows
) -> None:
    await start_claim(conn)
    await drive(conn, "t1", flows=flows, policy=POLICY)
    proxy.fail("chat.postMessage", "lost_reply")
    assert await deliverer.sweep(conn) == (0, 1)
    await decide(conn, await value(conn, "SELECT interrupt_id FROM approvals"), ALICE, NO)
    await conn.execute("UPDATE notices SET due_at = clock_timestamp() + interval '1 hour' WHERE kind = 'card'")
    await drive(conn, "t1", flows=flows, policy=POLICY)
    await conn.execute("UPDATE notices SET due_at = clock_timestamp() + interval '1 hour' WHERE kind = 'card'")
    await deliverer.sweep(conn)
    assert len(await slack.messages(CHANNEL)) == 1

    await make_due(conn, deliverer)
    await deliverer.sweep(conn)
    await make_due(conn, deliverer)
    await deliverer.sweep(conn)
    card, below = await slack.messages(CHANNEL)
    assert "Rejected by Alice" in card["text"]
    assert (below["thread_ts"], below["text"]) == (card["ts"], "Nothing was paid: rejected.")


# Alarms


@pytest.mark.parametrize("status", ["stuck", "unknown"])
async def test_the_operators_are_told_of_a_thread_that_needs_them_and_what_to_do(
    slack: LocalSlack, deliverer: Deliverer, conn: Connection, status: str
) -> None:
    await troubled(conn, status)
    assert await deliverer.sweep(conn) == (1, 0)
    [told] = await slack.messages(OPS_CHANNEL)
    assert told["text"].startswith("🚨 Thread t1 needs somebody.\n")
    assert "the &lt;bank&gt; is closed" in told["text"]
    fix = "claim_flow.py retry --thread t1" if status == "stuck" else "claim_flow.py payments resolve t1 --paid REF"
    assert fix in told["text"]
    assert await slack.messages(CHANNEL) == []


@pytest.mark.parametrize("kind", ["lost_reply", "drop", "503", "429"])
async def test_an_alarm_is_said_once_whatever_happens_to_it(
    slack: LocalSlack, proxy: FaultProxy, deliverer: Deliverer, conn: Connection, kind: FaultKind
) -> None:
    await troubled(conn)
    proxy.fail("chat.postMessage", kind)
    assert await deliverer.sweep(conn) == (0, 1)
    await make_due(conn, deliverer)
    assert await deliverer.sweep(conn) == (1, 0)
    assert len(await slack.messages(OPS_CHANNEL)) == 1


async def test_a_second_trouble_of_a_thread_is_told_too(
    slack: LocalSlack, deliverer: Deliverer, conn: Connection
) -> None:
    await troubled(conn)
    await deliverer.sweep(conn)
    await notices.raise_alarm(conn, "t1")
    await deliverer.sweep(conn)
    assert len(await slack.messages(OPS_CHANNEL)) == 2


async def test_nobody_is_called_for_a_thread_that_needs_nobody_any_more(
    slack: LocalSlack, deliverer: Deliverer, conn: Connection
) -> None:
    await troubled(conn)
    await threads.wake(conn, "t1")
    assert await deliverer.sweep(conn) == (1, 0)
    assert await slack.messages(OPS_CHANNEL) == []


async def test_an_alarm_that_slack_refuses_raises_none(
    proxy: FaultProxy, deliverer: Deliverer, conn: Connection
) -> None:
    await troubled(conn)
    proxy.fail("chat.postMessage", "error", error="not_in_channel", times=2)
    assert await deliverer.sweep(conn) == (0, 1)
    assert await deliverer.sweep(conn) == (0, 0)
    assert (await notice(conn, "alarm"))["status"] == "failed"


async def test_an_alarm_that_the_operators_channel_does_not_take_is_told_where_the_cards_are(
    slack: LocalSlack, proxy: FaultProxy, deliverer: Deliverer, conn: Connection
) -> None:
    await troubled(conn)
    proxy.fail("chat.postMessage", "error", error="is_archived")
    assert await deliverer.sweep(conn) == (1, 0)
    assert len(await slack.messages(CHANNEL)) == 1


async def test_without_a_channel_of_their_own_the_operators_are_told_where_the_cards_are(
    slack: LocalSlack, proxy: FaultProxy, conn: Connection
) -> None:
    await troubled(conn)
    async with client_of(proxy.api_url) as client:
        assert await Deliverer(Outlet(client, CHANNEL)).sweep(conn) == (1, 0)
    assert len(await slack.messages(CHANNEL)) == 1


# What the tests share


async def troubled(conn: Connection, status: str = "stuck") -> None:
    """The thread t1, as a drive leaves it that needs a person."""
    thread = await start_claim(conn)
    async with conn.transaction():
        await threads.leave(conn, thread, status=status, reason="the <bank> is closed")
        await notices.raise_alarm(conn, "t1")


async def notice(conn: Connection, kind: str = "card") -> dict[str, Any]:
    return await one_row(
        conn, "SELECT status, ambiguous, error, due_at <= clock_timestamp() AS due FROM notices WHERE kind = %s", kind
    )


async def make_due(conn: Connection, deliverer: Deliverer) -> None:
    """Time has passed: what was put off is due, leases have run out, and Slack's own wait is over."""
    deliverer._quiet_until.clear()
    await conn.execute("UPDATE notices SET due_at = clock_timestamp() WHERE due_at IS NOT NULL")


async def until_sent(conn: Connection) -> None:
    async def sent() -> bool:
        return bool((await notice(conn))["status"] == "sent")

    await until(sent)


async def paid(conn: Connection, flows: Flows) -> str:
    """The interrupt id of a claim that waited, was approved at the command line, and paid."""
    await start_claim(conn)
    await drive(conn, "t1", flows=flows, policy=POLICY)
    interrupt_id = str(await value(conn, "SELECT interrupt_id FROM approvals"))
    await decide(conn, interrupt_id, ANN, YES)
    await drive(conn, "t1", flows=flows, policy=POLICY)
    assert await value(conn, "SELECT count(*) FROM payments") == 1
    return interrupt_id


async def posted_and_paid(conn: Connection, flows: Flows, deliverer: Deliverer) -> str:
    """The same, with the card posted in between; its change and its reply are due."""
    await start_claim(conn)
    await drive(conn, "t1", flows=flows, policy=POLICY)
    await deliverer.sweep(conn)
    return await paid(conn, flows)
