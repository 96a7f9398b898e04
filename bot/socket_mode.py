"""Socket Mode: the same clicks over a websocket that we open, so that no public URL is needed.

Slack's client reconnects by itself, for ever and silently; what it never does is fail. So the token is tried before,
and a connection that stays away is made a reason to end.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from typing import NoReturn

import aiohttp
from slack_bolt.adapter.socket_mode.async_internals import send_async_response
from slack_bolt.adapter.socket_mode.internals import build_headers
from slack_bolt.app.async_app import AsyncApp
from slack_bolt.request.async_request import AsyncBoltRequest
from slack_sdk.errors import SlackApiError
from slack_sdk.socket_mode.aiohttp import SocketModeClient
from slack_sdk.socket_mode.async_client import AsyncBaseSocketModeClient
from slack_sdk.socket_mode.request import SocketModeRequest
from slack_sdk.web.async_client import AsyncWebClient

from bot.slack import PASSING_ERRORS, Background, answer
from bot.slack_api import read_error
from flow.errors import FlowError, SettingError

log = logging.getLogger(__name__)

_OPEN_TIMEOUT_S = 10.0
# A click is answered within three seconds, or not at all.
_DRAIN_S = 5.0
# Our ping, which Slack answers; four without an answer mean that the connection is dead.
_PING_INTERVAL_S = 5.0
# Long enough for Slack's own restarts; after it a supervisor does better than we do.
SILENCE_S = 120.0


class SlackIsSilent(FlowError):
    """No connection to Slack for SILENCE_S; the process ends so that its supervisor starts it anew."""


class SocketMode:
    """One websocket to Slack that hands requests to Bolt, and remembers when it was last alive."""

    def __init__(self, bolt: AsyncApp, client: AsyncWebClient, app_token: str, background: Background) -> None:
        self._bolt, self._background = bolt, background
        quiet = logging.getLogger("slack_sdk.socket_mode")
        quiet.setLevel(logging.CRITICAL)
        self._socket = SocketModeClient(
            app_token=app_token, web_client=client, ping_interval=_PING_INTERVAL_S, logger=quiet
        )
        self._socket.socket_mode_request_listeners.append(self._handle)
        self._under_way: set[asyncio.Task[None]] = set()
        self.connected = False

    async def open(self) -> None:
        """Connect, within 10 s. Raises SettingError for a token that Slack refuses, SlackIsSilent for its trouble."""
        async with contextlib.AsyncExitStack() as undo:
            undo.push_async_callback(self._socket.close)
            await self._open()
            undo.pop_all()
        self.connected = True

    async def _open(self) -> None:
        try:
            async with asyncio.timeout(_OPEN_TIMEOUT_S):
                answer = await self._socket.web_client.apps_connections_open(app_token=self._socket.app_token)
                self._socket.wss_uri = answer["url"]
                await self._socket.connect()  # type: ignore[no-untyped-call]
        except SlackApiError as exc:
            _status, error, _retry_after_s = read_error(exc)
            if not error or error in PASSING_ERRORS:
                raise SlackIsSilent(f"Slack opens no websocket ({error or 'without a reason'}): start anew") from exc
            raise SettingError(
                f"SLACK_APP_TOKEN is refused by Slack ({error}): make one with the scope connections:write"
            ) from exc
        except (TimeoutError, aiohttp.ClientError, OSError) as exc:
            raise SlackIsSilent(f"no websocket to Slack within {_OPEN_TIMEOUT_S:g} s ({type(exc).__name__})") from exc

    async def watch(self, *, silence_s: float = SILENCE_S) -> NoReturn:
        """Keep `connected` true to life. Raises SlackIsSilent once it was not for `silence_s`."""
        clock = asyncio.get_running_loop().time
        last_alive = clock()
        while True:
            self.connected = await self._socket.is_connected()
            if self.connected:
                last_alive = clock()
            elif clock() - last_alive > silence_s:
                raise SlackIsSilent(f"no connection to Slack for {silence_s:g} s: start this process anew")
            await asyncio.sleep(min(1.0, silence_s / 4))

    async def close(self) -> None:
        """Take nothing more, answer what is under way, then close."""
        self._socket.socket_mode_request_listeners.clear()
        if self._under_way:
            await asyncio.wait(self._under_way, timeout=_DRAIN_S)
        await self._socket.close()  # type: ignore[no-untyped-call]

    async def _handle(self, socket: AsyncBaseSocketModeClient, request: SocketModeRequest) -> None:
        # The client keeps no reference to what it starts; we do, so that `close` can wait for it.
        task = self._background.spawn(self._answer(socket, request))
        self._under_way.add(task)
        task.add_done_callback(self._under_way.discard)

    async def _answer(self, socket: AsyncBaseSocketModeClient, request: SocketModeRequest) -> None:
        start = asyncio.get_running_loop().time()
        asked = AsyncBoltRequest(mode="socket_mode", body=request.payload, headers=build_headers(request))
        await send_async_response(socket, request, await answer(self._bolt, asked), start)
