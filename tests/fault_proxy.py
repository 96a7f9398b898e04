"""A proxy in front of the local Slack that adds what it lacks, and fails on demand.

What it adds: message metadata, the filters and pages of `conversations.history` and `conversations.replies` (where it
also hides private notes, as Slack does), user groups, what kind of member somebody is, and that not everybody can be
sent a direct message. What it does on demand, once unless told otherwise: rate
limits, outages, refusals, and the two kinds of lost connection and of silence, before and after Slack has done what it
was asked.
It stands in the test's own event loop and knows nothing of the bot.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Literal, Self

import aiohttp
from aiohttp import web

from tests.local_slack import TEAM

FaultKind = Literal["429", "500", "503", "error", "drop", "hang", "lost_reply", "slow"]

_OPEN = "conversations.open"

# Slack's own default for a page of history.
_PAGE = 100


@dataclass(frozen=True, kw_only=True)
class Call:
    """One Web API call that reached the proxy, failed ones included; blocks and metadata are decoded."""

    method: str
    arguments: dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class UserGroup:
    """A Slack user group: `@handle` and its people's ids."""

    handle: str
    users: list[str]
    is_disabled: bool = False


@dataclass(kw_only=True)
class _Fault:
    method: str
    kind: FaultKind
    times: int
    retry_after_s: int
    error: str
    delay_s: float


class FaultProxy:
    """One proxy: `async with FaultProxy(slack.ui_url) as proxy:`, then give the bot `proxy.api_url`.

    `groups` are the workspace's user groups by id, `S0APPR` with Alice in it unless given; a test may change them at
    any time. `members` are people beside those of the local Slack, and words about them, by id: fields of `users.info`.
    `calls` are all calls of the Web API in the order in which they came. Deliveries to the bot and its
    replies through a `response_url` do not pass through here.
    """

    def __init__(self, upstream_url: str, *, groups: dict[str, UserGroup] | None = None) -> None:
        self.url = ""
        self.groups = groups or {"S0APPR": UserGroup(handle="finance-managers", users=["U01ALICE"])}
        self.members: dict[str, dict[str, Any]] = {}
        self.calls: list[Call] = []
        self._upstream_url = upstream_url
        self._faults: list[_Fault] = []
        self._metadata: dict[tuple[str, str], dict[str, Any]] = {}
        self._called = asyncio.Condition()

    async def __aenter__(self) -> Self:
        self._session = aiohttp.ClientSession()
        app = web.Application(client_max_size=16 << 20)
        app.router.add_route("*", "/api/{method}", self._web_api)
        app.router.add_route("*", "/{path:.*}", self._anything_else)
        # A slow answer under way must not hold up the end of the test.
        self._runner = web.AppRunner(app, shutdown_timeout=0.1)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._runner.cleanup()
        await self._session.close()

    @property
    def api_url(self) -> str:
        """The Web API through this proxy, ending in `/api/`: what `SLACK_API_URL` wants."""
        return f"{self.url}/api/"

    def fail(
        self,
        method: str,
        kind: FaultKind,
        *,
        times: int = 1,
        retry_after_s: int = 1,
        error: str = "is_archived",
        delay_s: float = 35.0,
    ) -> None:
        """Fail the next calls of one method, such as `chat.postMessage`; several faults of a method come in turn.

        - `429`: refused, rate limited, with `Retry-After: retry_after_s`.
        - `500`: failed inside, with a word of plain text.
        - `503`: refused, with a page of HTML.
        - `error`: refused, `{"ok": false, "error": error}`.
        - `drop`: cut off before Slack hears of it.
        - `hang`: Slack never hears of it, and neither does the caller for `delay_s`.
        - `lost_reply`: Slack does it, the caller is cut off instead of hearing so.
        - `slow`: Slack does it, the caller hears so `delay_s` later (35 s outlast the SDK's patience).
        """
        self._faults.append(
            _Fault(method=method, kind=kind, times=times, retry_after_s=retry_after_s, error=error, delay_s=delay_s)
        )

    def calls_of(self, method: str) -> list[dict[str, Any]]:
        """The arguments of each call of one method, in order."""
        return [call.arguments for call in self.calls if call.method == method]

    async def wait_for_calls(self, method: str, count: int = 1, timeout_s: float = 10.0) -> list[dict[str, Any]]:
        """The arguments of the calls of one method, once there are `count` of them.

        A call counts when it arrives, so a test can kill the caller while Slack still works on it.
        """
        async with asyncio.timeout(timeout_s), self._called:
            await self._called.wait_for(lambda: len(self.calls_of(method)) >= count)
        return self.calls_of(method)

    async def _web_api(self, request: web.Request) -> web.StreamResponse:
        method, arguments = request.match_info["method"], await _arguments_of(request)
        self.calls.append(Call(method=method, arguments=arguments))
        async with self._called:
            self._called.notify_all()
        fault = self._next_fault(method)
        if fault and fault.kind == "hang":
            await asyncio.sleep(fault.delay_s)
        if fault and (refused := _refusal(fault, request)):
            return refused
        if method in _GROUP_METHODS:
            answer = _GROUP_METHODS[method](self.groups, arguments)
        elif method == "users.info":
            answer = await self._user(str(arguments.get("user")))
        else:
            no_message = await self._no_direct_message(str(arguments.get("users"))) if method == _OPEN else None
            answer = no_message or await self._ask_slack(request)
        self._remember_metadata(method, arguments, answer)
        if method in ("conversations.history", "conversations.replies") and answer["ok"]:
            answer = self._page_of(answer["messages"], arguments)
        if fault and fault.kind == "lost_reply":
            return _cut_off(request)
        if fault and fault.kind == "slow":
            await asyncio.sleep(fault.delay_s)
        return web.json_response(answer)

    async def _anything_else(self, request: web.Request) -> web.Response:
        status, body, content_type = await self._forward(request)
        return web.Response(status=status, body=body, headers={"Content-Type": content_type})

    def _next_fault(self, method: str) -> _Fault | None:
        fault = next((each for each in self._faults if each.method == method), None)
        if fault:
            fault.times -= 1
            if fault.times <= 0:
                self._faults.remove(fault)
        return fault

    async def _ask_slack(self, request: web.Request) -> dict[str, Any]:
        _, body, _ = await self._forward(request)
        answer: dict[str, Any] = json.loads(body)
        return answer

    async def _forward(self, request: web.Request) -> tuple[int, bytes, str]:
        headers = {name: request.headers[name] for name in ("Content-Type", "Authorization") if name in request.headers}
        async with self._session.request(
            request.method, self._upstream_url + request.path_qs, data=await request.read() or None, headers=headers
        ) as response:
            return response.status, await response.read(), response.headers.get("Content-Type", "text/plain")

    async def _user(self, user_id: str) -> dict[str, Any]:
        """The answer of `users.info`: the local Slack's, or a member's of its team, with a test's own words.

        Format: https://api.slack.com/types/user
        """
        async with self._session.get(f"{self._upstream_url}/api/users.info", params={"user": user_id}) as response:
            known: dict[str, Any] = await response.json()
        if not known["ok"] and user_id not in self.members:
            return known
        usual = {"id": user_id, "team_id": TEAM, "name": user_id.lower(), "deleted": False, "is_bot": False}
        kind = {"is_restricted": False, "is_ultra_restricted": False, "is_app_user": False}
        return {"ok": True, "user": usual | known.get("user", {}) | kind | self.members.get(user_id, {})}

    async def _no_direct_message(self, user_id: str) -> dict[str, Any] | None:
        """Why `conversations.open` refuses: https://api.slack.com/methods/conversations.open#errors"""
        known = await self._user(user_id)
        if not known["ok"]:
            return known
        error = {"is_bot": "cannot_dm_bot", "deleted": "user_disabled"}
        return next(({"ok": False, "error": why} for word, why in error.items() if known["user"][word]), None)

    def _remember_metadata(self, method: str, arguments: dict[str, Any], answer: dict[str, Any]) -> None:
        if method in ("chat.postMessage", "chat.update") and answer["ok"] and arguments.get("metadata") is not None:
            self._metadata[(answer["channel"], answer["ts"])] = arguments["metadata"]

    def _page_of(self, messages: list[dict[str, Any]], arguments: dict[str, Any]) -> dict[str, Any]:
        """The history's answer: one page of what the filters let through, each message with its metadata.

        Without `include_all_metadata` only its type is shown. `cursor` is the place where the page starts.
        """
        kept = [each for each in messages if each.get("subtype") != "ephemeral" and _in_range(each["ts"], arguments)]
        start, size = int(arguments.get("cursor") or 0), int(arguments.get("limit") or _PAGE)
        end = start + size
        has_more, full = len(kept) > end, _flag(arguments, "include_all_metadata")
        return {
            "ok": True,
            "messages": [self._with_metadata(each, full=full) for each in kept[start:end]],
            "has_more": has_more,
            "response_metadata": {"next_cursor": str(end) if has_more else ""},
        }

    def _with_metadata(self, message: dict[str, Any], *, full: bool) -> dict[str, Any]:
        metadata = self._metadata.get((message["channel"], message["ts"]))
        if metadata is None:
            return message
        return {**message, "metadata": metadata if full else {"event_type": metadata["event_type"]}}


def _refusal(fault: _Fault, request: web.Request) -> web.Response | None:
    """The answer of a fault that Slack never hears of, or None for one that comes afterwards."""
    if fault.kind == "429":
        headers = {"Retry-After": str(fault.retry_after_s)}
        return web.json_response({"ok": False, "error": "ratelimited"}, status=429, headers=headers)
    if fault.kind == "500":
        return web.Response(status=500, text="Internal Server Error")
    if fault.kind == "503":
        return web.Response(status=503, text="<html>Service Unavailable</html>", content_type="text/html")
    if fault.kind == "error":
        return web.json_response({"ok": False, "error": fault.error})
    if fault.kind in ("drop", "hang"):
        return _cut_off(request)
    return None


def _cut_off(request: web.Request) -> web.Response:
    """End the caller's connection; the response is never sent."""
    if request.transport is not None:
        request.transport.abort()
    return web.Response()


async def _arguments_of(request: web.Request) -> dict[str, Any]:
    """The call's arguments, whichever of Slack's ways they came: query, form, or JSON."""
    if request.content_type == "application/json":
        body: dict[str, Any] = json.loads(await request.text() or "{}")
    else:
        body = dict(await request.post())
    arguments = {**request.query, **body}
    decoded = {
        name: json.loads(arguments[name])
        for name in ("blocks", "metadata")
        if isinstance(arguments.get(name), str) and arguments[name]
    }
    return {**arguments, **decoded}


def _in_range(ts: str, arguments: dict[str, Any]) -> bool:
    at = float(ts)
    oldest, latest = float(arguments.get("oldest") or 0), float(arguments.get("latest") or "inf")
    return oldest <= at <= latest if _flag(arguments, "inclusive") else oldest < at < latest


def _flag(arguments: dict[str, Any], name: str) -> bool:
    return str(arguments.get(name, "")).lower() in ("1", "true")


def _list_groups(groups: dict[str, UserGroup], arguments: dict[str, Any]) -> dict[str, Any]:
    """Format: https://api.slack.com/methods/usergroups.list"""
    listed = [
        {
            "id": key,
            "team_id": TEAM,
            "is_usergroup": True,
            "name": group.handle,
            "handle": group.handle,
            "date_delete": 1760000000 if group.is_disabled else 0,
            "users": group.users,
        }
        for key, group in groups.items()
        if not group.is_disabled or _flag(arguments, "include_disabled")
    ]
    if not _flag(arguments, "include_users"):
        listed = [{name: value for name, value in each.items() if name != "users"} for each in listed]
    return {"ok": True, "usergroups": listed}


def _list_group_users(groups: dict[str, UserGroup], arguments: dict[str, Any]) -> dict[str, Any]:
    group = groups.get(str(arguments.get("usergroup")))
    return {"ok": True, "users": group.users} if group else {"ok": False, "error": "no_such_subteam"}


_GROUP_METHODS: dict[str, Callable[[dict[str, UserGroup], dict[str, Any]], dict[str, Any]]] = {
    "usergroups.list": _list_groups,
    "usergroups.users.list": _list_group_users,
}
