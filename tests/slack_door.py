"""A person with signed clicks in front of the bot's door, and the bot itself in this process."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Self

import aiohttp
from aiohttp import web
from slack_sdk.web.async_client import AsyncWebClient

from bot.desk import Audience
from bot.groups import OwnTeam
from bot.pool import pool_of
from bot.slack import Background, build_bolt, slack_events
from bot.slack_api import CALL_TIMEOUT_S
from bot.web import build_web
from flow.database import Connection
from flow.model import Person
from tests.block_kit import words_of
from tests.local_slack import BOT_TOKEN, CHANNEL, SIGNING_SECRET, LocalSlack
from tests.rows import until, value
from tests.slack_requests import ABSENT, SlackRequest, altered_click_body, button, payload_body


class OurTeam:
    """As `bot.groups.OwnTeam`, without a Slack to ask."""

    workspace = None

    async def keys(self) -> frozenset[str]:
        return frozenset({"T01TEST"})

    async def placed(self, person: Person) -> Person:
        return person

    async def has(self, person: Person) -> bool:
        return person.key.startswith("slack:T01TEST/")


@dataclass(frozen=True, kw_only=True)
class Answered:
    """What the bot gave back."""

    status: int
    body: str


class Caller:
    """Sends one bot whatever Slack would, or would not, and hears its private notes: `async with Caller(url) as …`.

    For clicks that no workspace would deliver: as another team's member, twice in one instant, with odd fields.
    """

    def __init__(self, url: str) -> None:
        self.url = url
        self._notes: asyncio.Queue[dict[str, Any]] = asyncio.Queue()

    async def __aenter__(self) -> Self:
        # A connection each: what a malformed request does to its connection is no other's business.
        self._session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(force_close=True))
        app = web.Application()
        app.router.add_post("/note", self._hear)
        self._runner = web.AppRunner(app, shutdown_timeout=0.1)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._session.close()
        await self._runner.cleanup()

    @property
    def response_url(self) -> str:
        """Where the bot says what only the person who clicked shall see."""
        return f"http://127.0.0.1:{self._runner.addresses[0][1]}/note"

    async def send(self, request: SlackRequest) -> Answered:
        skipped = ["Content-Type"] if request.content_type is None else []
        async with self._session.request(
            request.method,
            self.url + request.path,
            data=request.body,
            headers=request.headers(time.time(), SIGNING_SECRET),
            skip_auto_headers=skipped,
        ) as response:
            return Answered(status=response.status, body=await response.text(errors="replace"))

    async def click(self, body: bytes, headers: dict[str, str] | None = None) -> Answered:
        """Post one signed click."""
        request = SlackRequest(name="click", body=body, expected=range(200, 201), extra_headers=headers or {})
        return await self.send(request)

    async def body_of(
        self,
        conn: Connection,
        interrupt_id: str,
        verdict: str = "approve",
        *,
        by: str = "U01ALICE",
        team: str = "T01TEST",
        ts: str | None = None,
        **fields: Any,
    ) -> bytes:
        """A click on this approval's button, on the message with this ts or on none; `fields` replace the payload's."""
        digest = await value(conn, "SELECT request_hash FROM approvals WHERE interrupt_id = %s", interrupt_id)
        pressed = button(verdict, json.dumps({"interrupt": interrupt_id, "hash": digest}))
        ours = {
            "user": {"id": by, "name": by.lower(), "team_id": team},
            "actions": [pressed],
            "response_url": self.response_url,
            "container": {"type": "message", "channel_id": CHANNEL, "message_ts": ts} if ts else ABSENT,
            "channel": ABSENT,
            "message": ABSENT,
        }
        return altered_click_body(**{**ours, **fields})

    async def submit(
        self,
        conn: Connection,
        interrupt_id: str,
        values: Any,
        *,
        by: str = "U01ALICE",
        team: str = "T01TEST",
        **fields: Any,
    ) -> tuple[int, dict[str, str]]:
        """Send the form about this approval: the status, and the errors by block. `fields` replace the view's."""
        answered = await self.click(await self.form_of(conn, interrupt_id, values, by=by, team=team, **fields))
        return answered.status, errors_in(answered)

    async def form_of(
        self,
        conn: Connection,
        interrupt_id: str,
        values: Any,
        *,
        by: str = "U01ALICE",
        team: str = "T01TEST",
        **fields: Any,
    ) -> bytes:
        """The form about this approval as Slack sends it, Change's unless `fields` say another `callback_id`."""
        digest = await value(conn, "SELECT request_hash FROM approvals WHERE interrupt_id = %s", interrupt_id)
        view = {
            "type": "modal",
            "callback_id": "change",
            "private_metadata": json.dumps({"interrupt": interrupt_id, "hash": digest}),
            "state": {"values": values},
        }
        user = {"id": by, "name": by.lower(), "team_id": team}
        payload = {"type": "view_submission", "team": {"id": team}, "user": user, "view": {**view, **fields}}
        return payload_body(payload)

    async def rejection_of(
        self, conn: Connection, interrupt_id: str, reason: str = "", *, by: str = "U01ALICE", team: str = "T01TEST"
    ) -> bytes:
        """What Reject's modal sends."""
        values = typed_in(reason=reason)
        return await self.form_of(conn, interrupt_id, values, by=by, team=team, callback_id="reject")

    async def reply(self, timeout_s: float = 10.0) -> dict[str, Any]:
        """What came next through the `response_url`."""
        async with asyncio.timeout(timeout_s):
            return await self._notes.get()

    async def note(self, timeout_s: float = 10.0) -> str:
        """The next private note's text."""
        told = await self.reply(timeout_s)
        # Slack shows a reply to everybody, and in the card's place, unless it is told not to.
        assert (told["response_type"], told["replace_original"]) == ("ephemeral", False)
        return str(told["text"])

    async def _hear(self, request: web.Request) -> web.Response:
        self._notes.put_nowait(await request.json())
        return web.Response(text="ok")


def typed_in(**fields: str | None) -> dict[str, Any]:
    """The state of a modal's text fields, as Slack sends it: one that is empty is there, and null."""
    return {name: {name: {"type": "plain_text_input", "value": text or None}} for name, text in fields.items()}


def errors_in(answered: Answered) -> dict[str, str]:
    """What the bot has against a form, by block; nothing if it took it."""
    said = json.loads(answered.body) if answered.status == 200 and answered.body else {}
    assert said.get("response_action", "errors") == "errors"
    errors: dict[str, str] = said.get("errors", {})
    return errors


async def content_of(modals: Callable[[], Awaitable[list[dict[str, Any]]]]) -> dict[str, Any]:
    """The modal on top, once it is filled."""

    async def filled() -> dict[str, Any]:
        view = next(reversed(await modals()), None)
        return view if view and "One moment…" not in json.dumps(view, ensure_ascii=False) else {}

    return await until(filled)


async def reject_in(slack: LocalSlack, user: str, ts: str, reason: str = "", **pressed: str) -> str:
    """Press Reject on the card with this ts, and send the modal; what the modal says against it, or nothing."""
    await slack.click(user, CHANNEL, ts, "reject", **pressed)
    assert (await slack.answers())[-1].status == 200
    view = await content_of(slack.modals)
    if "submit" not in view:
        return words_of(view)
    return " ".join((await slack.submit_modal(user, typed_in(reason=reason))).values())


@contextlib.asynccontextmanager
async def bot_in_process(
    database_url: str,
    client: AsyncWebClient,
    *,
    audience: Audience | None = None,
    public_url: str | None = None,
) -> AsyncIterator[str]:
    """The URL of the web application as a service serves it. At the end, what requests left behind is finished."""
    background = Background()
    async with pool_of(database_url) as pool:
        bolt = build_bolt(client, pool, OwnTeam(client), background, audience=audience, public_url=public_url)
        app = build_web(slack=slack_events(bolt, SIGNING_SECRET), checks={})
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=1.0)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        try:
            yield f"http://127.0.0.1:{runner.addresses[0][1]}"
        finally:
            await runner.cleanup()
            await background.drain(10.0)


@contextlib.asynccontextmanager
async def client_of(api_url: str, *, timeout_s: float = CALL_TIMEOUT_S) -> AsyncIterator[AsyncWebClient]:
    """The bot's client for this Web API, with a patience of the test's own."""
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=timeout_s)) as session:
        yield AsyncWebClient(token=BOT_TOKEN, base_url=api_url, session=session, retry_handlers=[])
