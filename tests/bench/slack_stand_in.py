"""A Slack that says ok at once: what is measured is this project, not Slack.

It remembers what was posted, so that a click is a click on a real card.
"""

from __future__ import annotations

import asyncio
import itertools
from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any, Self

from aiohttp import web

TEAM, CHANNEL = "T01BENCH", "C01BENCH"


@dataclass
class _Told:
    """What Slack was told of one thread: its card, and the outcome below it."""

    card: asyncio.Future[dict[str, Any]] = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    reply: asyncio.Future[dict[str, Any]] = field(default_factory=lambda: asyncio.get_running_loop().create_future())


class SlackStandIn:
    """Listens on a port of its own for as long as its `async with` lasts; `url` is a SLACK_API_URL."""

    def __init__(self) -> None:
        self.url = ""
        self._told: defaultdict[str, _Told] = defaultdict(_Told)
        self._homes: defaultdict[str, list[asyncio.Future[dict[str, Any]]]] = defaultdict(list)
        self._seconds = itertools.count(1_700_000_000)

    async def __aenter__(self) -> Self:
        app = web.Application()
        app.router.add_post("/api/auth.test", self._test_auth)
        app.router.add_post("/api/chat.postMessage", self._post)
        app.router.add_post("/api/chat.update", self._update)
        app.router.add_post("/api/views.publish", self._publish)
        app.router.add_get("/api/usergroups.list", self._list_groups)
        app.router.add_get("/api/users.info", self._tell_member)
        self._runner = web.AppRunner(app, access_log=None)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}/api/"
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._runner.cleanup()

    async def card_of(self, thread_id: str, *, within_s: float = 30.0) -> dict[str, Any]:
        """The thread's card, as it was posted, once it is."""
        return await asyncio.wait_for(self._told[thread_id].card, within_s)

    async def reply_of(self, thread_id: str, *, within_s: float = 30.0) -> dict[str, Any]:
        """What was said below the thread's card, once it is."""
        return await asyncio.wait_for(self._told[thread_id].reply, within_s)

    def next_home_of(self, member: str) -> asyncio.Future[dict[str, Any]]:
        """This member's Home, as soon as it is published again."""
        published: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        self._homes[member].append(published)
        return published

    async def _test_auth(self, _: web.Request) -> web.Response:
        who = {"url": "https://bench.slack.com/", "team": "Bench", "team_id": TEAM, "user": "bot", "user_id": "U0BOT"}
        return web.json_response({"ok": True, "bot_id": "B0BOT", **who})

    async def _post(self, request: web.Request) -> web.Response:
        message = await request.json() | {"ts": f"{next(self._seconds)}.000100"}
        told = self._told[message["metadata"]["event_payload"]["thread_id"]]
        heard = told.reply if "thread_ts" in message else told.card
        if not heard.done():
            heard.set_result(message)
        return web.json_response({"ok": True, "channel": message["channel"], "ts": message["ts"], "message": {}})

    async def _update(self, request: web.Request) -> web.Response:
        message = await request.json()
        return web.json_response({"ok": True, "channel": message["channel"], "ts": message["ts"], "text": ""})

    async def _publish(self, request: web.Request) -> web.Response:
        said = await request.json()
        for published in self._homes.pop(said["user_id"], ()):
            published.set_result(said["view"])
        return web.json_response({"ok": True, "view": {"id": "V01BENCH"}})

    async def _list_groups(self, _: web.Request) -> web.Response:
        group = {"id": "S0GROUP1", "handle": "bench", "date_delete": 0, "users": ["U09BUSY"]}
        return web.json_response({"ok": True, "usergroups": [group]})

    async def _tell_member(self, request: web.Request) -> web.Response:
        never = dict.fromkeys(("deleted", "is_bot", "is_restricted", "is_ultra_restricted"), False)
        user: dict[str, Any] = {"id": request.query["user"], "team_id": TEAM, "profile": {}, **never}
        return web.json_response({"ok": True, "user": user})
