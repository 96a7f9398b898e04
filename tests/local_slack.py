"""A Slack for tests: a workspace on 127.0.0.1 that posts, remembers, and clicks buttons at the bot.

The process itself is `bot.local_slack`; this adds what a test wants to do to it and see of it. What it cannot do
(metadata, history filters, user groups, failures) is added in front of it by `fault_proxy.py`. Where it differs from
the real Slack, and a test could be misled:

- it knows no membership, rate limits or length limits, and does not look at tokens or scopes;
- it waits minutes for the bot's answer, where Slack gives up after three seconds;
- a `response_url` never expires, and a reply through it is public unless it says `"response_type": "ephemeral"`
  (Slack's own default is the other way round); the same goes for a command that is answered in the HTTP response;
- private notes stay in the channel's list for ever and are part of its `conversations.history`;
- Socket Mode sends each payload to every connection, not to one.
"""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Literal, Self

import aiohttp

from bot.local_slack import (
    APP,
    APP_TOKEN,
    BOT_TOKEN,
    BOT_USER,
    CHANNEL,
    SIGNING_SECRET,
    TEAM,
    LocalSlackFailed,
    LocalSlackMissing,
    find_binary,
    free_port,
    running_local_slack,
    settings_for,
    skip_reason,
)

__all__ = [
    "APP",
    "APP_TOKEN",
    "BOT_TOKEN",
    "BOT_USER",
    "CHANNEL",
    "SIGNING_SECRET",
    "TEAM",
    "Answer",
    "LocalSlack",
    "LocalSlackFailed",
    "LocalSlackMissing",
    "find_binary",
    "free_port",
    "skip_reason",
]

# A click lasts as long as the bot takes to answer it.
_CALL_TIMEOUT_S = 30.0


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What the bot gave back for one delivery, in the order in which the answers came.

    `kind` is `interactive` (clicks, modals), `slash_commands`, `events_api`, or in Socket Mode `ack` for all of them.
    `status` is the HTTP status, 200 for an ack, and None when no answer came: the bot was unreachable.
    """

    kind: str
    status: int | None
    body: str


class LocalSlack:
    """One running workspace: `with LocalSlack(request_url=...) as slack:`.

    With a `request_url` the app gets signed HTTP requests there, without one it must connect by Socket Mode. Alice, Bob
    and Eve are in `approvals` (C01GEN), as is the bot; `random` (C02RND) has Alice alone.
    """

    def __init__(self, *, request_url: str | None = None) -> None:
        self._request_url = request_url
        self._running = running_local_slack(request_url=request_url)
        self._url, self._pid = "", 0

    def __enter__(self) -> Self:
        self._url, self._pid = self._running.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._running.__exit__(kind, exc, trace)

    # -- where it is

    @property
    def pid(self) -> int:
        """The process, for tests about what is left when it ends."""
        return self._pid

    @property
    def ui_url(self) -> str:
        """The workspace's page for a browser, without a slash at the end."""
        return self._url

    @property
    def api_url(self) -> str:
        """The Web API, ending in `/api/`: what `SLACK_API_URL` wants."""
        return f"{self._url}/api/"

    def environment(self, *, api_url: str | None = None, channel: str = CHANNEL) -> dict[str, str]:
        """The bot's settings for this workspace; `api_url` is a fault proxy's, when one stands in front."""
        ours = {"SLACK_CHANNEL": channel, "SLACK_API_URL": api_url or self.api_url}
        return settings_for(self._url, socket_mode=self._request_url is None) | ours

    # -- what people see

    async def messages(self, channel: str) -> list[dict[str, Any]]:
        """The channel's messages as they are now, oldest first, thread replies among them, private notes left out.

        `{"type": "message", "ts", "channel", "user", "text", "blocks"?, "thread_ts"?, "edited"?: {"user", "ts"}}`, and
        for the bot's own also `bot_id` and `app_id`. An update replaces text and blocks in place and sets `edited` (a
        replacement through a `response_url` does not); one without blocks takes the blocks away. A user's id as the
        channel means that user's direct messages with the bot. An unknown channel is an empty one.
        """
        return [each for each in await self._all_messages(channel) if each.get("subtype") != "ephemeral"]

    async def ephemerals(self, user: str, channel: str = CHANNEL) -> list[dict[str, Any]]:
        """The private notes that this user got in the channel, oldest first, however they were sent.

        Messages with `"subtype": "ephemeral"` and `"ephemeral_to": user`: from `chat.postEphemeral`, or a reply with
        `"response_type": "ephemeral"` through a `response_url`, or as the answer to a command.
        """
        return [each for each in await self._all_messages(channel) if each.get("ephemeral_to") == user]

    async def modals(self) -> list[dict[str, Any]]:
        """The open views, the one on top last. There is one stack for the whole workspace."""
        return list((await self._snapshot())["modalStack"])

    async def home(self, user: str) -> dict[str, Any] | None:
        """The App Home view that was last published for this user."""
        view: dict[str, Any] | None = (await self._snapshot())["homeViews"].get(user, {}).get(APP)
        return view

    # -- what people do; each returns when the bot has answered

    async def click(
        self, user: str, channel: str, ts: str, action_id: str, value: str | None = None, block_id: str | None = None
    ) -> None:
        """Click a button, and return when the bot has answered (see `answers` for what it said).

        Value and block are read from the message as it is shown now; LookupError when it shows no such button. Given
        both, nothing is looked up, so a test can click what was never shown, or is no longer.
        """
        if value is None or block_id is None:
            button = _button_of(await self._all_messages(channel), ts, action_id)
            value = button["value"] if value is None else value
            block_id = button["block_id"] if block_id is None else block_id
        action = {"type": "button", "action_id": action_id, "value": value, "block_id": block_id}
        await self._post("interact", user=user, channel=channel, messageTs=ts, action=action)

    async def say(self, user: str, text: str, channel: str = CHANNEL, thread_ts: str | None = None) -> str:
        """Post as a person, and return the message's ts.

        The bot gets a `message` event in channels that it is in, and `app_mention` too when the text has `<@U0BOT>`. A
        text that starts with a slash is no command here.
        """
        said = await self._post("message", user=user, channel=channel, text=text, thread_ts=thread_ts)
        return str(said["message"]["ts"])

    async def command(self, user: str, command: str, text: str = "", channel: str = CHANNEL) -> None:
        """Type a slash command: `command` with its slash, `text` the rest."""
        await self._post("command", user=user, channel=channel, command=command, text=text)

    async def open_home(self, user: str) -> None:
        """Open the App Home tab; the bot gets `app_home_opened`."""
        await self._post("open-home", user=user)

    async def submit_modal(self, user: str, values: dict[str, dict[str, dict[str, Any]]]) -> dict[str, str]:
        """Submit the modal on top, and return the errors that the bot showed in it, by block; none mean it was taken.

        `values` is block id, action id, then the element's state: `{"type": "plain_text_input", "value": "why"}`. A
        field left out is empty. Only the page's own websocket can do this, so this speaks to it.
        """
        async with self._page() as page:
            if not (await page.receive_json())["state"]["modalStack"]:
                raise LookupError("no modal is open")
            await page.send_json({"t": "view_submit", "user": user, "values": values})
            return await _outcome_of_submission(page)

    # -- what the bot did

    async def log(self) -> list[dict[str, Any]]:
        """The latest 1,000 things that passed between Slack and the bot, oldest first.

        `{"id", "time": milliseconds, "direction", "kind", "summary", "detail"}`. Calls of the bot are `from_bot`,
        `web_api`, with the method as the summary and its arguments as the detail, metadata included. A delivery is
        `to_bot` and its kind, with the body as text; the bot's answer is `from_bot`, the same kind, `HTTP 200`, and the
        answer's body; no answer is `internal`, the same kind, `POST failed: ...`. A refused call is `internal` too.
        """
        return list((await self._get("log"))["log"])

    async def answers(self, kind: str | None = None) -> list[Answer]:
        """What the bot answered, of one kind or all: a click itself never fails, its answer stands here."""
        found = [_answer_of(entry) for entry in await self.log()]
        return [each for each in found if each is not None and kind in (None, each.kind)]

    async def state(self) -> dict[str, Any]:
        """`{"workspace", "apps", "users", "channels"}`; direct messages are channels with `is_im`."""
        return await self._get("state")

    async def reset(self) -> None:
        """Forget messages, private notes, views, the log and direct messages; people and channels stay."""
        await self._post("reset")

    # -- inside

    async def _all_messages(self, channel: str) -> list[dict[str, Any]]:
        if channel.startswith("U"):
            channels = (await self.state())["channels"]
            channel = next((c["id"] for c in channels if c["is_im"] and channel in c["members"]), channel)
        return list((await self._get(f"messages/{channel}"))["messages"])

    async def _snapshot(self) -> dict[str, Any]:
        """Everything that the page shows, as its websocket sends it on connecting."""
        async with self._page() as page:
            state: dict[str, Any] = (await page.receive_json())["state"]
            return state

    def _page(self) -> _Page:
        return _Page(self._url)

    async def _get(self, path: str) -> dict[str, Any]:
        return await self._call("GET", path, None)

    async def _post(self, path: str, **body: object) -> dict[str, Any]:
        return await self._call("POST", path, body)

    async def _call(self, method: Literal["GET", "POST"], path: str, body: dict[str, object] | None) -> dict[str, Any]:
        timeout = aiohttp.ClientTimeout(total=_CALL_TIMEOUT_S)
        async with (
            aiohttp.ClientSession(timeout=timeout) as session,
            session.request(method, f"{self._url}/_control/{path}", json=body) as response,
        ):
            text = await response.text()
            if response.status != 200:
                raise LocalSlackFailed(f"{method} /_control/{path} answered {response.status}: {text}")
            answer: dict[str, Any] = json.loads(text)
            return answer


class _Page:
    """The websocket that the workspace's page lives on; the first frame is everything that it shows."""

    def __init__(self, url: str) -> None:
        self._url = url.replace("http", "ws", 1) + "/ui"

    async def __aenter__(self) -> aiohttp.ClientWebSocketResponse:
        self._session = aiohttp.ClientSession()
        # A workspace with a long log is a frame of many megabytes.
        self._socket = await self._session.ws_connect(self._url, max_msg_size=0)
        return self._socket

    async def __aexit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._socket.close()
        await self._session.close()


def _button_of(messages: list[dict[str, Any]], ts: str, action_id: str) -> dict[str, str]:
    shown = [
        {
            "block_id": block.get("block_id", ""),
            "action_id": element.get("action_id"),
            "value": element.get("value", ""),
        }
        for message in messages
        if message["ts"] == ts
        for block in message.get("blocks") or []
        for element in [*block.get("elements", []), block.get("accessory") or {}]
        if element.get("type") == "button"
    ]
    for button in shown:
        if button["action_id"] == action_id:
            return button
    raise LookupError(f"message {ts} shows no button {action_id}, but {[each['action_id'] for each in shown]}")


def _answer_of(entry: dict[str, Any]) -> Answer | None:
    kind, detail = entry["kind"], entry.get("detail")
    if kind == "ack":
        return Answer(kind=kind, status=200, body=json.dumps(detail) if detail else "")
    if kind not in ("interactive", "slash_commands", "events_api"):
        return None
    if entry["direction"] == "internal":
        return Answer(kind=kind, status=None, body=entry["summary"])
    if entry["direction"] == "from_bot":
        return Answer(kind=kind, status=int(entry["summary"].removeprefix("HTTP ")), body=detail or "")
    return None


async def _outcome_of_submission(page: aiohttp.ClientWebSocketResponse) -> dict[str, str]:
    """The errors by block, or none. The bot's own view calls come before its answer, the outcome after it."""
    answered = False
    async with asyncio.timeout(_CALL_TIMEOUT_S):
        while True:
            frame = await page.receive_json()
            if frame["t"] == "view_errors":
                return dict(frame["errors"])
            if frame["t"] == "view" and answered:
                return {}
            answered = answered or (frame["t"] == "log" and _answer_of(frame["entry"]) is not None)
