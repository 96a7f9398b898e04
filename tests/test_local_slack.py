"""The rig itself: what the other Slack tests stand on."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs

import aiohttp
import pytest
from aiohttp import web
from slack_sdk.signature import SignatureVerifier

from tests.fault_proxy import FaultProxy
from tests.local_slack import BOT_TOKEN, CHANNEL, SIGNING_SECRET, Answer, LocalSlack, free_port, skip_reason
from tests.slack_requests import MALFORMED, UNVERIFIED, SlackRequest, block_actions_body, sign

pytestmark = pytest.mark.skipif(skip_reason() is not None, reason=skip_reason() or "")

_BUTTON = {"type": "button", "action_id": "approve", "value": "v1", "text": {"type": "plain_text", "text": "Approve"}}
_CARD = [{"type": "actions", "block_id": "a1", "elements": [_BUTTON]}]


@pytest.fixture
def slack() -> Iterator[LocalSlack]:
    """A workspace whose app is nowhere: enough for what the bot sends."""
    with LocalSlack(request_url=f"http://127.0.0.1:{free_port()}/slack/events") as running:
        yield running


async def test_a_posted_message_is_seen_updated_and_forgotten(slack: LocalSlack) -> None:
    posted = await _call(slack.api_url, "chat.postMessage", channel=CHANNEL, text="hello", blocks=_CARD)
    await _call(slack.api_url, "chat.update", channel=CHANNEL, ts=posted["ts"], text="done")

    [message] = await slack.messages(CHANNEL)
    assert (message["ts"], message["text"], "blocks" in message, "edited" in message) == (
        posted["ts"],
        "done",
        False,
        True,
    )
    assert [entry["summary"] for entry in await slack.log()] == ["chat.postMessage", "chat.update"]

    await slack.reset()
    assert await slack.messages(CHANNEL) == []


async def test_a_private_note_is_seen_by_its_user_alone(slack: LocalSlack) -> None:
    await _call(slack.api_url, "chat.postEphemeral", channel=CHANNEL, user="U02BOB", text="not yours to decide")

    assert [note["text"] for note in await slack.ephemerals("U02BOB")] == ["not yours to decide"]
    assert await slack.ephemerals("U01ALICE") == []
    assert await slack.messages(CHANNEL) == []


async def test_a_message_to_a_user_is_read_under_their_id(slack: LocalSlack) -> None:
    assert await slack.messages("U99EVE") == []
    await _call(slack.api_url, "chat.postMessage", channel="U99EVE", text="hello Eve")

    assert [message["text"] for message in await slack.messages("U99EVE")] == ["hello Eve"]


async def test_a_click_reaches_the_app_with_a_valid_signature() -> None:
    async with _app_that_answers({"text": "thanks"}) as app:
        with LocalSlack(request_url=app.url) as slack:
            posted = await _call(slack.api_url, "chat.postMessage", channel=CHANNEL, text="pay?", blocks=_CARD)
            await slack.click("U01ALICE", CHANNEL, posted["ts"], "approve")
            [click] = [json.loads(payload) for payload in app.payloads]
            await _post(click["response_url"], text="only you see this", response_type="ephemeral")

            assert click["user"]["id"] == "U01ALICE"
            assert click["actions"][0]["value"] == "v1"
            assert click["actions"][0]["block_id"] == "a1"
            assert await slack.answers("interactive") == [
                Answer(kind="interactive", status=200, body='{"text": "thanks"}')
            ]
            assert [note["text"] for note in await slack.ephemerals("U01ALICE")] == ["only you see this"]


async def test_a_click_on_a_button_that_is_not_shown_is_an_error_unless_forged(slack: LocalSlack) -> None:
    posted = await _call(slack.api_url, "chat.postMessage", channel=CHANNEL, text="decided")
    with pytest.raises(LookupError, match="shows no button approve"):
        await slack.click("U01ALICE", CHANNEL, posted["ts"], "approve")

    await slack.click("U01ALICE", CHANNEL, posted["ts"], "approve", value="v1", block_id="a1")
    assert [answer.status for answer in await slack.answers()] == [None]


async def test_a_modal_is_filled_in_and_refused_and_taken() -> None:
    errors = {"response_action": "errors", "errors": {"why": "say more"}}
    async with _app_that_answers({}, errors, {}) as app:
        with LocalSlack(request_url=app.url) as slack:
            await slack.command("U01ALICE", "/claim", "start")
            opened = parse_qs(app.bodies[0])["trigger_id"][0]
            element = {"type": "plain_text_input", "action_id": "text"}
            view = {"type": "modal", "blocks": [{"type": "input", "block_id": "why", "element": element}]}
            await _call(slack.api_url, "views.open", trigger_id=opened, view=view)
            filled = {"why": {"text": {"type": "plain_text_input", "value": "no"}}}

            assert await slack.submit_modal("U01ALICE", filled) == {"why": "say more"}
            assert len(await slack.modals()) == 1
            assert await slack.submit_modal("U01ALICE", filled) == {}
            assert await slack.modals() == []
            assert json.loads(app.payloads[-1])["view"]["state"]["values"] == filled


async def test_without_a_request_url_the_app_connects_by_socket_mode() -> None:
    with LocalSlack() as slack:
        assert "SLACK_APP_TOKEN" in slack.environment()
        opened = await _call(slack.api_url, "apps.connections.open")
        async with aiohttp.ClientSession() as session, session.ws_connect(opened["url"]) as connection:
            assert (await connection.receive_json())["type"] == "hello"
            clicking = asyncio.create_task(slack.click("U99EVE", CHANNEL, "1.1", "approve", "v1", "a1"))
            envelope = await connection.receive_json()
            await connection.send_json({"envelope_id": envelope["envelope_id"]})
            await clicking

        assert envelope["payload"]["user"]["id"] == "U99EVE"
        assert [answer.status for answer in await slack.answers()] == [200]


def test_nothing_is_left_when_it_ends_and_only_this_machine_could_reach_it() -> None:
    with LocalSlack() as slack:
        port, pid = int(slack.ui_url.rpartition(":")[2]), slack.pid
        assert _listens("127.0.0.1", port)
        # All of 127.0.0.0/8 is this machine: who listens on every interface would answer here too.
        assert not _listens("127.0.0.2", port)

    assert not _listens("127.0.0.1", port)
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_a_killed_test_run_leaves_no_slack_behind(tmp_path: Path) -> None:
    program = "from tests.local_slack import *\nwith LocalSlack() as slack: print(slack.ui_url, flush=True); input()"
    run = subprocess.Popen(
        [sys.executable, "-c", program],
        cwd=Path(__file__).parent.parent,
        # A killed run cannot remove its folder.
        env={**os.environ, "TMPDIR": str(tmp_path)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with run:
        assert run.stdout is not None
        port = int(run.stdout.readline().rpartition(":")[2])
        assert _listens("127.0.0.1", port)
        run.send_signal(signal.SIGKILL)

    deadline = time.monotonic() + 10
    while _listens("127.0.0.1", port):
        assert time.monotonic() < deadline, "the local Slack outlived the run that started it"


async def test_the_proxy_adds_metadata_filters_and_pages(slack: LocalSlack) -> None:
    metadata = {"event_type": "approval", "event_payload": {"interrupt_id": "i1"}}
    async with FaultProxy(slack.ui_url) as proxy:
        first = await _call(proxy.api_url, "chat.postMessage", channel=CHANNEL, text="1", metadata=metadata)
        await _call(proxy.api_url, "chat.postEphemeral", channel=CHANNEL, user="U02BOB", text="note")
        second = await _call(proxy.api_url, "chat.postMessage", channel=CHANNEL, text="2")
        ask = {"channel": CHANNEL, "include_all_metadata": True}

        newest = await _call(proxy.api_url, "conversations.history", limit=1, **ask)
        assert [each["text"] for each in newest["messages"]] == ["2"]
        cursor = newest["response_metadata"]["next_cursor"]
        oldest = await _call(proxy.api_url, "conversations.history", limit=1, cursor=cursor, **ask)
        assert [each["metadata"] for each in oldest["messages"]] == [metadata]
        assert not oldest["has_more"]
        since = await _call(proxy.api_url, "conversations.history", oldest=first["ts"], **ask)
        assert [each["ts"] for each in since["messages"]] == [second["ts"]]


async def test_the_proxy_knows_user_groups(slack: LocalSlack) -> None:
    async with FaultProxy(slack.ui_url) as proxy:
        listed = await _call(proxy.api_url, "usergroups.list")
        assert [(each["id"], each["handle"]) for each in listed["usergroups"]] == [("S0APPR", "finance-managers")]
        assert (await _call(proxy.api_url, "usergroups.users.list", usergroup="S0APPR"))["users"] == ["U01ALICE"]
        assert (await _call(proxy.api_url, "usergroups.users.list", usergroup="S0NONE"))["error"] == "no_such_subteam"


async def test_a_lost_reply_posts_once_and_cuts_the_caller_off(slack: LocalSlack) -> None:
    async with FaultProxy(slack.ui_url) as proxy:
        proxy.fail("chat.postMessage", "lost_reply")
        with pytest.raises(aiohttp.ServerDisconnectedError):
            await _call(proxy.api_url, "chat.postMessage", channel=CHANNEL, text="once")

        assert [message["text"] for message in await slack.messages(CHANNEL)] == ["once"]
        assert len(proxy.calls_of("chat.postMessage")) == 1


async def test_a_dropped_call_never_reaches_slack(slack: LocalSlack) -> None:
    async with FaultProxy(slack.ui_url) as proxy:
        proxy.fail("chat.postMessage", "drop")
        with pytest.raises(aiohttp.ServerDisconnectedError):
            await _call(proxy.api_url, "chat.postMessage", channel=CHANNEL, text="never")

        assert await slack.messages(CHANNEL) == []
        assert len(proxy.calls_of("chat.postMessage")) == 1


async def test_a_fault_lasts_as_often_as_asked_and_faults_come_in_turn(slack: LocalSlack) -> None:
    async with FaultProxy(slack.ui_url) as proxy, aiohttp.ClientSession() as session:
        proxy.fail("auth.test", "429", times=2, retry_after_s=7)
        proxy.fail("auth.test", "503")
        proxy.fail("auth.test", "error", error="account_inactive")
        seen = []
        for _ in range(5):
            async with session.post(proxy.api_url + "auth.test") as response:
                seen.append(
                    (response.status, response.headers.get("Retry-After"), "account_inactive" in await response.text())
                )

        assert seen == [(429, "7", False), (429, "7", False), (503, None, False), (200, None, True), (200, None, False)]


async def test_a_slow_call_is_done_long_before_its_caller_knows(slack: LocalSlack) -> None:
    async with FaultProxy(slack.ui_url) as proxy:
        proxy.fail("chat.postMessage", "slow", delay_s=3600)
        calling = asyncio.create_task(_call(proxy.api_url, "chat.postMessage", channel=CHANNEL, text="slow"))
        await proxy.wait_for_calls("chat.postMessage")
        async with asyncio.timeout(10):
            while not await slack.messages(CHANNEL):
                pass

        assert not calling.done()
    with pytest.raises(aiohttp.ServerDisconnectedError):
        await calling


@pytest.mark.parametrize("request_", [each for each in MALFORMED if b"\xff" not in each.body], ids=str)
def test_slacks_own_verifier_agrees_on_who_is_verified(request_: SlackRequest) -> None:
    headers = request_.headers(time.time())
    assert _verified(request_.body, headers) == (request_.expected != UNVERIFIED)


def test_every_malformed_request_has_a_name_of_its_own() -> None:
    names = [each.name for each in MALFORMED]
    assert len(names) == len(set(names))


def test_a_click_body_says_who_clicked_what() -> None:
    body = block_actions_body(user="U02BOB", value="i1", message=None)
    [payload] = parse_qs(body.decode())["payload"]
    click = json.loads(payload)

    assert (click["user"]["id"], click["actions"][0]["value"], click["message"]) == ("U02BOB", "i1", None)
    assert _verified(body, sign(SIGNING_SECRET, int(time.time()), body))


class _App:
    """A bot that checks each signature, remembers what it got, and gives prepared answers in turn."""

    def __init__(self, answers: list[dict[str, Any]]) -> None:
        self.answers = answers
        self.url = ""
        self.bodies: list[str] = []

    @property
    def payloads(self) -> list[str]:
        return [parse_qs(body)["payload"][0] for body in self.bodies if body.startswith("payload=")]

    async def receive(self, request: web.Request) -> web.Response:
        body = await request.read()
        if not _verified(body, dict(request.headers)):
            return web.Response(status=401)
        self.bodies.append(body.decode())
        return web.json_response(self.answers.pop(0))


@asynccontextmanager
async def _app_that_answers(*answers: dict[str, Any]) -> AsyncIterator[_App]:
    bot = _App(list(answers))
    app = web.Application()
    app.router.add_post("/slack/events", bot.receive)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    bot.url = f"http://127.0.0.1:{runner.addresses[0][1]}/slack/events"
    try:
        yield bot
    finally:
        await runner.cleanup()


async def _call(api_url: str, method: str, **arguments: object) -> dict[str, Any]:
    headers = {"Authorization": f"Bearer {BOT_TOKEN}"}
    async with (
        aiohttp.ClientSession(headers=headers) as session,
        session.post(api_url + method, json=arguments) as response,
    ):
        answer: dict[str, Any] = await response.json()
        return answer


async def _post(url: str, **body: object) -> None:
    async with aiohttp.ClientSession() as session, session.post(url, json=body) as response:
        assert response.status == 200


def _verified(body: bytes, headers: dict[str, str]) -> bool:
    """What the SDK says of a body in UTF-8, but stricter: its int() takes spaces and the digits of any script."""
    timestamp = headers.get("X-Slack-Request-Timestamp", "")
    if not re.fullmatch("[0-9]{1,12}", timestamp):
        return False
    try:
        return SignatureVerifier(SIGNING_SECRET).is_valid_request(body, headers)
    except TypeError:
        # Raised on a signature that is not ASCII.
        return False


def _listens(host: str, port: int) -> bool:
    try:
        socket.create_connection((host, port), timeout=1.0).close()
    except OSError:
        return False
    return True
