"""What went wrong in other people's approval bots in Slack, tried here. Each docstring says what happened to them.

Only what no other test tries: most of these cases are facts of test_slack_clicks.py, test_deliver.py and their like.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from zoneinfo import ZoneInfo

import psycopg
import pytest
from aiohttp import web
from psycopg import sql

from bot import outlet, socket_mode
from bot.deliver import Deliverer
from bot.kit import date
from bot.slack_api import RATE_LIMITS
from bot.socket_mode import SlackIsSilent
from flow import notices, threads
from flow.approvals import approval_of, decide
from flow.changes import change_amount, withdraw
from flow.database import Connection, connect
from flow.deadlines import expire_overdue
from flow.flows import Flows
from flow.model import Approval
from flow.policy import Tier
from tests.api_door import Program, api_in_process
from tests.block_kit import buttons_of, words_of
from tests.conftest import _database, _url_of
from tests.delivering import OPS_CHANNEL, deliverer_at
from tests.driving import money, run
from tests.fault_proxy import FaultKind, FaultProxy
from tests.local_slack import CHANNEL, SIGNING_SECRET, LocalSlack, skip_reason
from tests.people import ALICE, ANN, BOB, NO, YES, ask, start_claim
from tests.rows import all_rows, rewrite, until, value
from tests.slack_door import Caller, bot_in_process, client_of
from tests.slack_requests import SlackRequest, button, sign
from tests.test_drive import TwoTiers
from tests.test_socket_mode import ALICES, Office, card_of, decisions, socket_of, wait_for_claim

pytestmark = pytest.mark.skipif(skip_reason() is not None, reason=skip_reason() or "")


@pytest.fixture(autouse=True)
def _no_pace(monkeypatch: pytest.MonkeyPatch) -> None:
    """One message a second is a wait that no fact here is about."""
    monkeypatch.setattr(outlet, "_BETWEEN_POSTS_S", 0.0)


@pytest.fixture
def slack() -> Iterator[LocalSlack]:
    with LocalSlack(request_url="http://127.0.0.1:9/") as started:
        yield started


@pytest.fixture
async def proxy(slack: LocalSlack) -> AsyncIterator[FaultProxy]:
    async with FaultProxy(slack.ui_url) as started:
        yield started


@pytest.fixture
async def deliverer(proxy: FaultProxy) -> AsyncIterator[Deliverer]:
    async with deliverer_at(proxy) as made:
        yield made


@pytest.fixture
async def bot(database_url: str, proxy: FaultProxy) -> AsyncIterator[Caller]:
    async with client_of(proxy.api_url) as client, bot_in_process(database_url, client) as url, Caller(url) as caller:
        yield caller


# A click and the request that it is about


async def test_an_old_cards_click_leaves_the_next_request_of_its_thread_alone(
    bot: Caller, conn: Connection, flows: Flows
) -> None:
    """A click was taken for the answer to whatever the thread asked at that time: the second question got the first
    one's."""
    policy = TwoTiers(approvers=(), limits={})
    await start_claim(conn)
    assert await run(conn, flows, policy=policy) == "waiting"
    first = await pending(conn)
    click = await bot.body_of(conn, first.interrupt_id)
    assert (await bot.click(click)).status == 200
    assert await run(conn, flows, policy=policy) == "waiting"
    second = await pending(conn)

    assert {answer.status for answer in await asyncio.gather(*(bot.click(click) for _ in range(4)))} == {200}
    assert {await bot.note() for _ in range(4)} == {"Already approved by u01alice."}
    # What the first card carries, as if it were about the second one.
    mixed = json.dumps({"interrupt": second.interrupt_id, "hash": first.request_hash})
    forged = await bot.body_of(conn, first.interrupt_id, by="U02BOB", actions=[button("approve", mixed)])
    assert (await bot.click(forged)).status == 200
    assert "has changed since it was shown" in await bot.note()

    assert await run(conn, flows, policy=policy) == "waiting"
    assert await pending(conn) == second
    assert await money(conn) == []
    assert (await bot.click(await bot.body_of(conn, second.interrupt_id, by="U02BOB"))).status == 200
    assert await run(conn, flows, policy=policy) == "over"
    assert len(await money(conn)) == 1


async def by_a_webhook(_: Connection, program: Program, approval: Approval) -> None:
    answered = await program.decide_signed(approval.interrupt_id, {"decision": "approve", "approver": "carol"})
    assert answered.status == 200


async def by_a_webhook_that_rejects(_: Connection, program: Program, approval: Approval) -> None:
    answered = await program.decide_signed(approval.interrupt_id, {"decision": "reject", "approver": "carol"})
    assert answered.status == 200


async def at_the_command_line(conn: Connection, _: Program, approval: Approval) -> None:
    await decide(conn, approval.interrupt_id, ANN, NO)


async def by_a_withdrawal(conn: Connection, _: Program, approval: Approval) -> None:
    await withdraw(conn, approval.thread_id, ANN)


async def by_the_clock(conn: Connection, _: Program, approval: Approval) -> None:
    await rewrite(conn, "expires_at = clock_timestamp() - interval '1 second'")
    assert await expire_overdue(conn) == 1


async def by_another_amount(conn: Connection, _: Program, approval: Approval) -> None:
    digest = approval.request_hash
    await change_amount(conn, approval.interrupt_id, BOB, amount="200", door="slack", request_hash=digest)


@pytest.mark.parametrize(
    ("settle", "status"),
    [
        (by_a_webhook, "approved"),
        (by_a_webhook_that_rejects, "rejected"),
        (at_the_command_line, "rejected"),
        (by_a_withdrawal, "withdrawn"),
        (by_the_clock, "expired"),
        (by_another_amount, "superseded"),
    ],
)
async def test_a_click_on_what_was_settled_elsewhere_is_told_so_and_the_buttons_are_gone(
    bot: Caller,
    slack: LocalSlack,
    deliverer: Deliverer,
    conn: Connection,
    database_url: str,
    *,
    settle: Callable[[Connection, Program, Approval], Awaitable[None]],
    status: str,
) -> None:
    """What was decided through another door kept its buttons in Slack, and a press on them did something."""
    tier = Tier(name="approval", approvers=("U01ALICE", "U02BOB", "webhook:acme:carol"))
    interrupt_id = await ask(conn, tier=tier)
    assert await deliverer.sweep(conn) == (1, 0)
    [card] = await slack.messages(CHANNEL)
    click = await bot.body_of(conn, interrupt_id, ts=card["ts"])
    async with api_in_process(database_url) as url, Program(url) as program:
        await settle(conn, program, await approval_of(conn, interrupt_id))
    before = await state(conn)

    assert (await bot.click(click)).status == 200
    assert status in (await bot.note()).lower()
    assert await state(conn) == before
    await deliverer.sweep(conn)
    [card] = [each for each in await slack.messages(CHANNEL) if each["ts"] == card["ts"]]
    assert not {"approve", "reject", "change"} & set(buttons_of(card))


async def test_of_two_installations_that_share_an_app_only_the_one_that_asked_takes_the_click(
    admin: psycopg.Connection, template: str, server_url: str, database_url: str, conn: Connection, flows: Flows, *,
    tmp_path: Path,
) -> None:  # fmt: skip
    """Two bots were connected as one Slack app; a click that reached the other one was shown as a rejection, or was
    answered by errors for ever."""
    (tmp_path / "ours").mkdir()
    (tmp_path / "theirs").mkdir()
    with LocalSlack() as slack, _database(admin, template) as name:
        other_url = _url_of(server_url, name)
        async with (
            Office(tmp_path / "ours", database_url, slack).service("bot"),
            Office(tmp_path / "theirs", other_url, slack).service("bot"),
            await connect(other_url, "drive") as other,
        ):
            await wait_for_claim(conn, flows)
            card = await card_of(slack)
            # The local Slack hands it to both.
            await slack.click("U01ALICE", CHANNEL, card["ts"], "approve")

            async def notes() -> list[str]:
                return [note["text"] for note in await slack.ephemerals("U01ALICE")]

            [note] = await until(notes)
            assert note.startswith("No approval has the interrupt id ")
            assert "so nothing was done" in note
            assert "another installation" in note
            assert "reject" not in note

            await until(lambda: decisions(conn))
            assert await decisions(conn) == [ALICES]
            assert {answer.status for answer in await slack.answers()} == {200}
            await until(lambda: offers_nothing(slack, card["ts"]))
            for table in ("decisions", "messages", "notices", "approvals"):
                assert await value(other, sql.SQL("SELECT count(*) FROM {}").format(sql.Identifier(table))) == 0  # type: ignore[arg-type]


# Messages that Slack does not take


@pytest.mark.parametrize(("kind", "error"), [("error", "missing_scope"), ("error", "not_in_channel"), ("500", "")])
async def test_a_card_whose_posting_is_uncertain_is_not_posted_again_while_nobody_can_look(
    slack: LocalSlack, proxy: FaultProxy, deliverer: Deliverer, conn: Connection, *, kind: FaultKind, error: str
) -> None:
    """The answer to a posting was lost, looking for it failed too, and then it was posted a second time."""
    interrupt_id = await ask(conn)
    proxy.fail("chat.postMessage", "lost_reply")
    assert await deliverer.sweep(conn) == (0, 1)
    proxy.fail("conversations.history", kind, error=error)
    await make_due(conn)
    await deliverer.sweep(conn)
    assert len(await slack.messages(CHANNEL)) == 1
    assert await notices.messages_of(conn, interrupt_id) == []

    await notices.retry_failed(conn)
    await make_due(conn)
    await deliverer.sweep(conn)
    [card] = await slack.messages(CHANNEL)
    assert await notices.messages_of(conn, interrupt_id) == [(CHANNEL, card["ts"])]


async def test_a_card_whose_second_posting_is_uncertain_too_is_in_the_channel_once(
    slack: LocalSlack, proxy: FaultProxy, deliverer: Deliverer, conn: Connection
) -> None:
    """A posting that failed was tried once more, the answer to that was lost, and the third one made two."""
    await ask(conn)
    for kind in ("drop", "lost_reply"):
        proxy.fail("chat.postMessage", kind)
        await make_due(conn)
        assert await deliverer.sweep(conn) == (0, 1)
    await make_due(conn)
    assert await deliverer.sweep(conn) == (1, 0)
    assert len(await slack.messages(CHANNEL)) == 1


LATER = [
    "rate_limited", "message_limit_exceeded", "update_failed", "org_login_required", "team_added_to_org",
    "external_channel_migrating",
]  # fmt: skip


@pytest.mark.parametrize("error", LATER)
async def test_what_slack_will_take_later_is_tried_again_by_itself_and_calls_nobody(
    slack: LocalSlack, proxy: FaultProxy, deliverer: Deliverer, conn: Connection, error: str
) -> None:
    """In a burst of messages Slack answered that there were too many, with 200 and a word instead of 429, and they were
    dropped in silence; the same in the hour when a workspace was moved."""
    interrupt_id = await ask(conn)
    for method, shows in (("chat.postMessage", "Approval needed"), ("chat.update", "Approved by Alice")):
        proxy.fail(method, "error", error=error)
        assert await deliverer.sweep(conn) == (0, 1)
        assert await value(conn, "SELECT status FROM notices WHERE kind = 'card'") == "pending"
        assert await all_rows(conn, "SELECT * FROM notices WHERE kind = 'alarm'") == []
        deliverer._quiet_until.clear()
        await make_due(conn)
        assert await deliverer.sweep(conn) == (1, 0)
        [card] = await slack.messages(CHANNEL)
        assert shows in card["text"]
        await decide(conn, interrupt_id, ALICE, YES)
    assert await slack.messages(OPS_CHANNEL) == []


@pytest.mark.parametrize("error", sorted(RATE_LIMITS))
async def test_where_slack_says_too_many_everything_waits_whatever_the_status(
    proxy: FaultProxy, deliverer: Deliverer, conn: Connection, error: str
) -> None:
    """Apps that heard a limit only in 429 went on posting, and were limited for longer."""
    await ask(conn)
    await ask(conn, "t2")
    proxy.fail("chat.postMessage", "error", error=error)
    assert await deliverer.sweep(conn) == (0, 1)
    rows = await all_rows(conn, "SELECT status, ambiguous, error FROM notices WHERE attempt > 0")
    assert rows == [{"status": "pending", "ambiguous": False, "error": "rate limited"}]


@pytest.mark.parametrize("error", ["restricted_action_read_only_channel", "no_permission", "of_another_year"])
async def test_an_alarm_is_heard_whatever_the_operators_channel_has_against_it(
    slack: LocalSlack, proxy: FaultProxy, deliverer: Deliverer, conn: Connection, error: str
) -> None:
    """The channel for alarms was made read-only; the message that nobody could post was all that would have said so."""
    await stuck(conn)
    proxy.fail("chat.postMessage", "error", error=error)
    assert await deliverer.sweep(conn) == (1, 0)
    [told] = await slack.messages(CHANNEL)
    assert told["text"].startswith("🚨 Thread t1 needs somebody.")


async def test_an_alarm_in_the_other_channel_whose_posting_is_uncertain_is_said_once(
    slack: LocalSlack, proxy: FaultProxy, deliverer: Deliverer, conn: Connection
) -> None:
    """A fallback for messages that must be heard was not looked for where it had gone to, and came again and again."""
    await stuck(conn)
    proxy.fail("chat.postMessage", "error", error="is_archived")
    proxy.fail("chat.postMessage", "lost_reply")
    assert await deliverer.sweep(conn) == (0, 1)
    proxy.fail("conversations.history", "error", error="not_in_channel")
    await make_due(conn)
    assert await deliverer.sweep(conn) == (1, 0)
    assert len(await slack.messages(CHANNEL)) == 1
    assert await slack.messages(OPS_CHANNEL) == []


async def test_a_card_whose_channel_has_another_id_by_now_is_decided_and_comes_true(
    slack: LocalSlack, proxy: FaultProxy, bot: Caller, deliverer: Deliverer, conn: Connection
) -> None:
    """A channel was shared with another workspace and got a new id: clicks in it were none of the bot's any more, and
    the card kept its buttons."""
    interrupt_id = await ask(conn)
    await deliverer.sweep(conn)
    [old] = await slack.messages(CHANNEL)
    async with client_of(slack.api_url) as client:
        moved = await client.chat_postMessage(channel=OPS_CHANNEL, text=old["text"], blocks=old["blocks"])
    container = {"type": "message", "channel_id": OPS_CHANNEL, "message_ts": moved["ts"]}
    assert (await bot.click(await bot.body_of(conn, interrupt_id, container=container))).status == 200

    async def is_known() -> bool:
        return (OPS_CHANNEL, moved["ts"]) in await notices.messages_of(conn, interrupt_id)

    await until(is_known)
    proxy.fail("chat.update", "error", error="channel_not_found")
    await deliverer.sweep(conn)
    [card] = [each for each in await slack.messages(OPS_CHANNEL) if each["ts"] == moved["ts"]]
    assert "Approved by u01alice" in card["text"]
    assert "approve" not in buttons_of(card)


@pytest.mark.parametrize("error", ["token_expired", "token_revoked", "account_inactive", "not_authed"])
async def test_a_token_that_is_good_no_more_changes_no_request_and_its_cards_come_true_with_the_next_one(
    slack: LocalSlack, proxy: FaultProxy, deliverer: Deliverer, conn: Connection, *, flows: Flows, error: str
) -> None:
    """A token expired in the background: updates failed, and the requests were given up with them."""
    policy = TwoTiers(approvers=(), limits={})
    await start_claim(conn)
    await run(conn, flows, policy=policy)
    await deliverer.sweep(conn)
    await decide(conn, (await pending(conn)).interrupt_id, ALICE, YES)
    await run(conn, flows, policy=policy)
    for method in ("chat.update", "chat.postMessage"):
        proxy.fail(method, "error", error=error, times=1000)
    for _ in range(3):
        await deliverer.sweep(conn)
    refused = await all_rows(conn, "SELECT DISTINCT status, error FROM notices WHERE kind <> 'alarm'")
    assert [row["status"] for row in refused] == ["failed"]
    assert refused[0]["error"].startswith(f"{error}: ")
    assert "SLACK_BOT_TOKEN" in refused[0]["error"]

    # The other doors are open.
    await decide(conn, (await pending(conn)).interrupt_id, ANN, YES)
    assert await run(conn, flows, policy=policy) == "over"
    assert len(await money(conn)) == 1
    async with FaultProxy(slack.ui_url) as mended, deliverer_at(mended) as anew:
        await notices.retry_failed(conn)
        for _ in range(3):
            await anew.sweep(conn)
    assert await all_rows(conn, "SELECT kind, error FROM notices WHERE status <> 'sent'") == []
    cards = [each for each in await slack.messages(CHANNEL) if each.get("thread_ts") in (None, each["ts"])]
    assert all("Paid: 250.00 USD" in each["text"] and "approve" not in buttons_of(each) for each in cards)
    # The second one was settled before anybody could be shown it.
    assert len(cards) == 1
    assert await slack.messages(OPS_CHANNEL) == []


# Times and clocks


@pytest.mark.parametrize(
    ("at", "said"),
    [
        # The second of two half past twos, an hour after the first.
        (datetime(2026, 10, 25, 2, 30, fold=0, tzinfo=ZoneInfo("Europe/Berlin")), "2026-10-25 00:30"),
        (datetime(2026, 10, 25, 2, 30, fold=1, tzinfo=ZoneInfo("Europe/Berlin")), "2026-10-25 01:30"),
        (datetime(2026, 12, 31, 23, 30, tzinfo=ZoneInfo("America/New_York")), "2027-01-01 04:30"),
        (datetime(2027, 1, 1, 0, 30, tzinfo=ZoneInfo("Pacific/Kiritimati")), "2026-12-31 10:30"),
        (datetime(2026, 12, 31, 23, 59, 59, tzinfo=UTC), "2026-12-31 23:59"),
    ],
    ids=str,
)
def test_a_time_is_the_readers_own_and_where_that_cannot_be_it_is_utc_and_says_so(at: datetime, said: str) -> None:
    """A deadline was shown in the zone of the server, an hour or a day from the one that was meant."""
    assert date(at) == f"<!date^{int(at.timestamp())}^{{date_short_pretty}} at {{time}}|{said} UTC>"


async def test_a_deadline_is_the_same_whatever_zone_the_server_is_in(
    slack: LocalSlack, proxy: FaultProxy, database_url: str, conn: Connection
) -> None:
    """The same, where it was the database's zone."""
    await ask(conn, tier=Tier(name="approval", approvers=("U01ALICE",), expires_after_s=3600))
    deadline = datetime(2031, 12, 31, 23, 45, tzinfo=UTC)
    await rewrite(conn, "expires_at = %s", deadline)
    await conn.execute(
        sql.SQL("ALTER DATABASE {} SET timezone = 'Pacific/Kiritimati'").format(sql.Identifier(conn.info.dbname))
    )
    async with await connect(database_url, "door") as own, deliverer_at(proxy) as deliverer:
        assert await deliverer.sweep(own) == (1, 0)
    [card] = await slack.messages(CHANNEL)
    assert f"<!date^{int(deadline.timestamp())}^" in words_of(card)
    assert "|2031-12-31 23:45 UTC>" in words_of(card)
    assert "2031-12-31 23:45 UTC" in card["text"]


def ahead(secret: str, now: int, body: bytes) -> dict[str, str]:
    return sign(secret, now + 360, body)


def of_another_way_to_write_it(secret: str, now: int, body: bytes) -> dict[str, str]:
    """What a proxy does that takes a form apart and writes it anew."""
    return sign(secret, now, body.replace(b"%3A", b":"))


@pytest.mark.parametrize(
    ("signing", "why"), [(ahead, "clock and ours are +360 s apart"), (of_another_way_to_write_it, "changed on the way")]
)
async def test_whoever_looks_for_the_reason_of_a_refused_click_finds_it_in_the_log(
    bot: Caller, conn: Connection, caplog: pytest.LogCaptureFixture, *, signing: Any, why: str
) -> None:
    """A clock was six minutes off, or a proxy wrote bodies anew: every click failed, and nothing said why."""
    body = await bot.body_of(conn, await ask(conn))
    request = SlackRequest(name="click", body=body, expected=range(401, 402), signing=signing)
    assert (await bot.send(request)).status == 401
    [said] = [record.getMessage() for record in caplog.records if "is refused" in record.getMessage()]
    # A second may pass between the two clocks.
    assert why in said.replace("+359", "+360")
    assert SIGNING_SECRET not in said
    assert await all_rows(conn, "SELECT * FROM decisions") == []


# The websocket


async def test_an_app_whose_socket_mode_was_turned_off_is_not_taken_for_a_healthy_one(
    database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Slack closed the websocket and opened no new one; the process stood there for days, and looked well."""
    monkeypatch.setattr(socket_mode, "_PING_INTERVAL_S", 0.4)
    opened = asyncio.Event()
    url = ""

    async def open_(_: web.Request) -> web.Response:
        if opened.is_set():
            return web.json_response({"ok": False, "error": "socket_mode_not_enabled"})
        return web.json_response({"ok": True, "url": f"{url.replace('http', 'ws')}/link"})

    async def link(request: web.Request) -> web.WebSocketResponse:
        socket = web.WebSocketResponse()
        await socket.prepare(request)
        await socket.send_json({"type": "hello", "num_connections": 1})
        opened.set()
        await socket.send_json({"type": "disconnect", "reason": "link_disabled"})
        await socket.close()
        return socket

    app = web.Application()
    app.router.add_route("*", "/api/apps.connections.open", open_)
    app.router.add_get("/link", link)
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    try:
        async with socket_of(database_url, f"{url}/api/") as socket:
            await socket.open()
            async with asyncio.timeout(20):
                with pytest.raises(SlackIsSilent):
                    await socket.watch(silence_s=1.0)
            assert not socket.connected
            await socket.close()
    finally:
        await runner.cleanup()


# What the tests share


async def pending(conn: Connection) -> Approval:
    return await approval_of(conn, await value(conn, "SELECT interrupt_id FROM approvals WHERE status = 'pending'"))


async def state(conn: Connection) -> list[Any]:
    """What a decision would change."""
    return [
        await all_rows(conn, "SELECT interrupt_id, status, settled_at FROM approvals ORDER BY 1"),
        await all_rows(conn, "SELECT interrupt_id, person, verdict FROM decisions ORDER BY 1, 2"),
        await all_rows(conn, "SELECT thread_id, wakes, status FROM threads ORDER BY 1"),
    ]


async def offers_nothing(slack: LocalSlack, ts: str) -> bool:
    """Whether the card there can be decided no more."""
    [message] = [each for each in await slack.messages(CHANNEL) if each["ts"] == ts]
    return "approve" not in buttons_of(message)


async def stuck(conn: Connection) -> None:
    """The thread t1 needs a person."""
    thread = await start_claim(conn)
    async with conn.transaction():
        await threads.leave(conn, thread, status="stuck", reason="the bank is closed")
        await notices.raise_alarm(conn, "t1")


async def make_due(conn: Connection) -> None:
    """Time has passed: what was put off is due, and leases have run out."""
    await conn.execute("UPDATE notices SET due_at = clock_timestamp() WHERE due_at IS NOT NULL")
