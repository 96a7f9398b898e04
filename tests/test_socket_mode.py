"""Clicks over a websocket: real processes of ours, the local Slack at the other end, and whatever comes between.

The local Slack looks at no token and never refuses; where it must, a proxy in front of its Web API does.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from functools import partialmethod
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from bot import socket_mode
from bot.groups import OwnTeam
from bot.pool import pool_of
from bot.server import run_services
from bot.slack import Background, build_bolt
from bot.socket_mode import SlackIsSilent, SocketMode
from flow.database import Connection, connect
from flow.drive import drive
from flow.flows import Flows
from flow.settings import read_settings
from tests.block_kit import SETTLED, buttons_of
from tests.command import Done, Running, Terminal
from tests.fault_proxy import FaultKind, FaultProxy
from tests.local_slack import APP_TOKEN, CHANNEL, Answer, LocalSlack, free_port, skip_reason
from tests.people import POLICY, start_claim
from tests.rows import all_rows, until, value
from tests.slack_door import client_of

pytestmark = pytest.mark.skipif(skip_reason() is not None, reason=skip_reason() or "")


@pytest.fixture
def slack() -> Iterator[LocalSlack]:
    with LocalSlack() as running:
        yield running


@dataclass(frozen=True, kw_only=True)
class Service:
    """A process of ours that listens, with its page about its health."""

    running: Running
    port: int

    async def readyz(self) -> tuple[int, dict[str, str]]:
        """The status, and what is said of each part; 0 while nobody listens."""
        async with aiohttp.ClientSession() as session:
            try:
                async with session.get(f"http://127.0.0.1:{self.port}/readyz") as answer:
                    return answer.status, (await answer.json())["checks"]
            except aiohttp.ClientConnectionError:
                return 0, {}

    async def is_ready(self) -> bool:
        return (await self.readyz())[0] == 200

    async def is_not_ready(self) -> bool:
        return (await self.readyz())[0] == 503

    async def is_shut(self) -> bool:
        return (await self.readyz())[0] == 0


class Office:
    """Starts services that work in one workspace and on one database."""

    def __init__(self, folder: Path, database_url: str, slack: LocalSlack, api_url: str | None = None) -> None:
        self._folder = folder
        self._settings = {
            "DATABASE_URL": database_url,
            "APPROVERS": "U01ALICE",
            "STAND_BY": "1",
            **slack.environment(api_url=api_url),
        }
        # Socket Mode does not need it.
        del self._settings["SLACK_SIGNING_SECRET"]

    def terminal(self, port: int) -> Terminal:
        return Terminal(self._folder, PORT=str(port), **self._settings)

    @contextlib.asynccontextmanager
    async def service(self, command: str) -> AsyncIterator[Service]:
        """One that is ready; gone at the end."""
        port = free_port()
        async with self.terminal(port).service(command) as running:
            service = Service(running=running, port=port)
            await running.until(service.is_ready)
            yield service


async def wait_for_claim(conn: Connection, flows: Flows, thread_id: str = "t1") -> None:
    """File a claim of 250 USD, and drive it to where it waits."""
    await start_claim(conn, thread_id)
    assert await drive(conn, thread_id, flows=flows, policy=POLICY) == "waiting"


async def card_of(slack: LocalSlack, thread_id: str = "t1") -> dict[str, Any]:
    """The card of this thread that can be clicked, once it is there."""

    async def posted() -> dict[str, Any]:
        cards = [
            each for each in await slack.messages(CHANNEL) if thread_id in str(each) and "approve" in buttons_of(each)
        ]
        return cards[0] if cards else {}

    return await until(posted)


async def is_settled(slack: LocalSlack, ts: str) -> bool:
    [message] = [each for each in await slack.messages(CHANNEL) if each["ts"] == ts]
    return buttons_of(message) == SETTLED


async def notes_of_alice(slack: LocalSlack) -> list[str]:
    return [note["text"] for note in await slack.ephemerals("U01ALICE")]


async def decisions(conn: Connection) -> list[dict[str, Any]]:
    return await all_rows(conn, "SELECT person, verdict, door FROM decisions")


ALICES = {"person": "slack:T01TEST/U01ALICE", "verdict": "approve", "door": "slack"}


# Clicks


async def test_a_claim_is_approved_over_the_websocket_and_its_card_shows_it(
    slack: LocalSlack, database_url: str, conn: Connection, tmp_path: Path
) -> None:
    async with Office(tmp_path, database_url, slack).service("serve") as service:
        assert (await service.readyz())[1]["socket mode"] == "ok"
        await start_claim(conn)
        card = await card_of(slack)
        await slack.click("U01ALICE", CHANNEL, card["ts"], "approve")
        # An answered click is a committed decision.
        assert await decisions(conn) == [ALICES]
        assert await slack.answers() == [Answer(kind="ack", status=200, body="")]

        await until(lambda: is_settled(slack, card["ts"]))
        await until(lambda: is_paid(conn))
        done = await service.running.stop()
    assert done.code == 0
    assert "Traceback" not in done.err
    assert "Unclosed" not in done.err


async def is_paid(conn: Connection) -> bool:
    return bool(await value(conn, "SELECT status = 'paid' FROM threads"))


async def test_two_bots_that_both_get_each_click_make_one_decision_and_one_payment(
    slack: LocalSlack, database_url: str, conn: Connection, flows: Flows, tmp_path: Path
) -> None:
    office = Office(tmp_path, database_url, slack)
    async with office.service("bot"), office.service("bot"):
        await wait_for_claim(conn, flows)
        card = await card_of(slack)
        await slack.click("U01ALICE", CHANNEL, card["ts"], "approve")

        # The later one tells her so: it got the click too.
        assert await until(lambda: notes_of_alice(slack)) == ["Already approved by alice."]
        assert await decisions(conn) == [ALICES]
        assert await value(conn, "SELECT wakes FROM threads") == 1
        assert await drive(conn, "t1", flows=flows, policy=POLICY) == "over"
        await until(lambda: is_settled(slack, card["ts"]))
    assert len(await all_rows(conn, "SELECT * FROM payments")) == 1


async def test_a_click_that_cannot_be_committed_in_time_is_not_acknowledged_and_can_be_repeated(
    slack: LocalSlack, database_url: str, conn: Connection, flows: Flows, tmp_path: Path
) -> None:
    async with (
        Office(tmp_path, database_url, slack).service("bot"),
        held_approval(database_url, conn, flows, slack) as held,
    ):
        clicking = asyncio.create_task(slack.click("U01ALICE", CHANNEL, held.ts, "approve"))
        assert "please click again" in (await until(lambda: notes_of_alice(slack)))[0]
        assert await slack.answers("ack") == []
        await held.let_go()
        await slack.click("U01ALICE", CHANNEL, held.ts, "approve")
        assert await decisions(conn) == [ALICES]
        clicking.cancel()


# Endings


@dataclass(frozen=True, kw_only=True)
class Held:
    """An approval whose row nobody else can lock: its card's ts, and the connection that holds it."""

    ts: str
    gate: Connection

    async def has_a_waiter(self) -> bool:
        return bool(
            await value(
                self.gate,
                "SELECT count(*) FROM pg_stat_activity WHERE %s = ANY(pg_blocking_pids(pid))",
                self.gate.info.backend_pid,
            )
        )

    async def let_go(self) -> None:
        await self.gate.execute("ROLLBACK")


@contextlib.asynccontextmanager
async def held_approval(database_url: str, conn: Connection, flows: Flows, slack: LocalSlack) -> AsyncIterator[Held]:
    await wait_for_claim(conn, flows)
    card = await card_of(slack)
    async with await connect(database_url, "drive") as gate:
        await gate.execute("BEGIN")
        await gate.execute("SELECT FROM approvals FOR UPDATE")
        yield Held(ts=card["ts"], gate=gate)


async def test_a_bot_told_to_end_answers_the_click_under_way_and_keeps_its_decision(
    slack: LocalSlack, database_url: str, conn: Connection, flows: Flows, tmp_path: Path
) -> None:
    async with (
        Office(tmp_path, database_url, slack).service("bot") as service,
        held_approval(database_url, conn, flows, slack) as held,
    ):
        clicking = asyncio.create_task(slack.click("U01ALICE", CHANNEL, held.ts, "approve"))
        await until(held.has_a_waiter)
        service.running.signal(signal.SIGTERM)
        # All that it waits for now is the click: its page is gone already.
        await service.running.until(service.is_shut)
        assert await slack.answers("ack") == []
        assert await decisions(conn) == []

        await held.let_go()
        await clicking
        assert await slack.answers() == [Answer(kind="ack", status=200, body="")]
        assert await decisions(conn) == [ALICES]
        done = await service.running.end()
    assert done.code == 0
    assert "Traceback" not in done.err


async def refused(folder: Path, database_url: str, slack: LocalSlack, command: str, *, method: str) -> Done:
    """How a service ends to which Slack refuses this method; in less than 10 s after it asked."""
    async with FaultProxy(slack.ui_url) as proxy:
        proxy.fail(method, "error", error="invalid_auth", times=1000)
        async with Office(folder, database_url, slack, proxy.api_url).terminal(free_port()).service(command) as running:

            async def asked() -> bool:
                return bool(proxy.calls_of(method))

            await running.until(asked)
            begun = time.monotonic()
            done = await running.end()
    assert time.monotonic() - begun < 10
    return done


def for_people(done: Done) -> list[str]:
    """The lines on stderr that are no log records, and those that say that something went wrong in the log."""
    return [line for line in done.err.splitlines() if not line.startswith("{") or '"level": "error"' in line]


async def test_a_wrong_app_token_ends_the_service_with_one_line_that_names_it(
    slack: LocalSlack, database_url: str, tmp_path: Path
) -> None:
    done = await refused(tmp_path, database_url, slack, "serve", method="apps.connections.open")
    assert done.code == 2
    assert for_people(done) == [
        "error: SLACK_APP_TOKEN is refused by Slack (invalid_auth): make one with the scope connections:write"
    ]
    assert APP_TOKEN not in done.err


async def test_a_wrong_bot_token_ends_the_service_with_one_line_that_names_it(
    slack: LocalSlack, database_url: str, tmp_path: Path
) -> None:
    done = await refused(tmp_path, database_url, slack, "bot", method="auth.test")
    assert done.code == 2
    assert for_people(done) == ["error: SLACK_BOT_TOKEN is refused by Slack (invalid_auth): set the app's bot token"]


# The connection


@pytest.fixture
def short_pings(monkeypatch: pytest.MonkeyPatch) -> None:
    """A dead connection is noticed in less than a second instead of eight."""
    monkeypatch.setattr(socket_mode, "_PING_INTERVAL_S", 0.4)


@contextlib.asynccontextmanager
async def socket_of(database_url: str, api_url: str) -> AsyncIterator[SocketMode]:
    """The websocket's end in this process, not open yet."""
    background = Background()
    async with pool_of(database_url) as pool, client_of(api_url, timeout_s=1.0) as client:
        bolt = build_bolt(client, pool, OwnTeam(client), background)
        yield SocketMode(bolt, client, APP_TOKEN, background)


@pytest.mark.usefixtures("short_pings")
@pytest.mark.parametrize("number", [signal.SIGSTOP, signal.SIGKILL], ids=["frozen", "gone"])
async def test_the_watch_ends_when_slack_is_silent_and_not_before(
    slack: LocalSlack, database_url: str, number: signal.Signals
) -> None:
    async with socket_of(database_url, slack.api_url) as socket:
        await socket.open()
        begun = time.time()
        watching = asyncio.create_task(socket.watch(silence_s=1.0))

        async def outlived() -> bool:
            # When the ping was sent whose answer came last.
            return (socket._socket.last_ping_pong_time or 0.0) > begun + 2.0

        await until(outlived)
        assert (watching.done(), socket.connected) == (False, True)
        with stopped(slack, number):
            silent_since = time.monotonic()
            async with asyncio.timeout(15):
                with pytest.raises(SlackIsSilent, match="no connection to Slack for 1 s: start this process anew"):
                    await watching
            # Less the quarter of a second since its last look before.
            assert time.monotonic() - silent_since > 0.7
            assert not socket.connected
        await socket.close()


@contextlib.contextmanager
def stopped(slack: LocalSlack, number: signal.Signals = signal.SIGSTOP) -> Iterator[None]:
    """A frozen Slack goes on afterwards, for it could not be ended otherwise."""
    os.kill(slack.pid, number)
    try:
        yield
    finally:
        if number == signal.SIGSTOP:
            os.kill(slack.pid, signal.SIGCONT)


@pytest.mark.usefixtures("short_pings")
async def test_a_service_ends_with_the_reason_when_slack_stays_away(
    slack: LocalSlack, database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(SocketMode, "watch", partialmethod(SocketMode.watch, silence_s=0.5))
    for name, text in slack.environment().items():
        monkeypatch.setenv(name, text)
    monkeypatch.setenv("PORT", "0")
    running = asyncio.create_task(run_services(read_settings(), database_url, asyncio.Event(), web=True, worker=False))
    await until(lambda: is_connected(slack))
    os.kill(slack.pid, signal.SIGKILL)
    async with asyncio.timeout(20):
        with pytest.raises(BaseExceptionGroup) as ended:
            await running
    assert ended.group_contains(SlackIsSilent)


async def is_connected(slack: LocalSlack) -> bool:
    return any(entry["kind"] == "socket" for entry in await slack.log())


async def test_a_slack_in_trouble_at_the_start_is_not_taken_for_a_wrong_token(
    slack: LocalSlack, database_url: str
) -> None:
    troubles: tuple[tuple[FaultKind, str], ...] = (
        ("503", "without a reason"),
        ("429", "ratelimited"),
        ("error", "internal_error"),
        ("drop", "no websocket to Slack"),
    )
    async with FaultProxy(slack.ui_url) as proxy:
        for kind, reason in troubles:
            proxy.fail("apps.connections.open", kind, error="internal_error")
            async with socket_of(database_url, proxy.api_url) as socket:
                with pytest.raises(SlackIsSilent, match=reason):
                    await socket.open()
                assert socket._socket.aiohttp_client_session.closed


async def test_a_slack_that_does_not_answer_at_the_start_is_given_up(
    slack: LocalSlack, database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(socket_mode, "_OPEN_TIMEOUT_S", 0.5)
    with stopped(slack):
        async with socket_of(database_url, slack.api_url) as socket:
            with pytest.raises(SlackIsSilent, match=r"no websocket to Slack within 0\.5 s \(TimeoutError\)"):
                await socket.open()


async def test_a_bot_is_unready_while_slack_is_away_and_takes_clicks_when_it_is_back(
    database_url: str, conn: Connection, flows: Flows, tmp_path: Path
) -> None:
    with LocalSlack() as first, LocalSlack() as second:
        async with (
            FaultProxy(first.ui_url) as proxy,
            Office(tmp_path, database_url, first, proxy.api_url).service("bot") as service,
        ):
            assert (await service.readyz())[1]["socket mode"] == "ok"
            # Its address stays, so it is the same Slack to the bot, started again.
            proxy._upstream_url = second.ui_url
            os.kill(first.pid, signal.SIGKILL)
            await service.running.until(service.is_not_ready)
            assert (await service.readyz())[1]["socket mode"] == "no connection to Slack"
            await service.running.until(service.is_ready)

            await wait_for_claim(conn, flows)
            card = await card_of(second)
            await second.click("U01ALICE", CHANNEL, card["ts"], "approve")
            assert await decisions(conn) == [ALICES]
            assert [answer.status for answer in await second.answers("ack")] == [200]
