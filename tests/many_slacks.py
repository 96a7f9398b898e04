"""Several workspaces in one small Slack: it installs the app in them, takes their tokens, and remembers by which of
them it was asked. `async with ManySlacks() as slack`."""

from __future__ import annotations

import base64
import contextlib
import itertools
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any, Self
from urllib.parse import urlencode

from aiohttp import web
from pydantic import SecretStr

from bot.openid import Provider
from bot.slack_api import slack_session
from bot.workspaces import Clients
from flow import workspaces
from flow.cipher import Cipher
from flow.database import Connection
from flow.settings import Settings
from flow.workspaces import Workspace
from tests.slack_requests import SIGNING_SECRET

CLIENT_ID, CLIENT_SECRET = "1234567890.42", "client-secret"


@dataclass(kw_only=True)
class Team:
    """A workspace, or a whole grid (`is_grid`), and the tokens that it has given out, each with what it is refused
    with, if it is."""

    id: str
    name: str
    grid: str | None = None
    is_grid: bool = False
    tokens: dict[str, str | None] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Asked:
    """One call of the Web API: whose token it came with, and what it said."""

    method: str
    team: str | None
    token: str
    arguments: dict[str, Any]


class ManySlacks:
    """`installs` is the team that the next person installs the app in. `answer` is laid over what `oauth.v2.access`
    says; `busy` are the seconds that a team wants no messages for; `refuses` what a team refuses messages with."""

    def __init__(self) -> None:
        self.url = ""
        self.teams: dict[str, Team] = {}
        self.installs: Team | None = None
        self.answer: dict[str, Any] = {}
        self.asked: list[Asked] = []
        self.authorized: list[dict[str, str]] = []
        self.busy: dict[str, int] = {}
        self.refuses: dict[str, str] = {}
        # Who is anything else than a full member.
        self.kinds: dict[str, dict[str, Any]] = {}
        self._codes: dict[str, tuple[Team, str]] = {}
        self._numbers = itertools.count(1)

    async def __aenter__(self) -> Self:
        app = web.Application()
        app.router.add_get("/oauth/v2/authorize", self._authorize)
        app.router.add_route("*", "/api/{method}", self._api)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._runner.cleanup()

    @property
    def api_url(self) -> str:
        return f"{self.url}/api/"

    @property
    def provider(self) -> Provider:
        return Provider.of(api_url=self.api_url, client_id=CLIENT_ID, client_secret=CLIENT_SECRET)

    def team(self, team_id: str, name: str = "", **more: Any) -> Team:
        """A new one."""
        self.teams[team_id] = Team(id=team_id, name=name or team_id.lower(), **more)
        return self.teams[team_id]

    def token(self, team: Team) -> str:
        """A new token of the app's bot there."""
        # In parts, so that whoever scans this file for secrets finds none.
        made = "xoxb-" + f"{next(self._numbers)}-of-{team.id}"
        team.tokens[made] = None
        return made

    def posts(self, team: str) -> list[dict[str, Any]]:
        """What was posted with this team's tokens."""
        return self.said("chat.postMessage", team)

    def said(self, method: str, team: str) -> list[dict[str, Any]]:
        return [call.arguments for call in self.asked if (call.method, call.team) == (method, team)]

    async def _authorize(self, request: web.Request) -> web.Response:
        """The person agrees at once, and installs it in `installs`."""
        asked = dict(request.query)
        self.authorized.append(asked)
        assert self.installs is not None
        code = f"code-{len(self.authorized)}"
        self._codes[code] = (self.installs, asked["redirect_uri"])
        raise web.HTTPFound(f"{asked['redirect_uri']}?{urlencode({'code': code, 'state': asked['state']})}")

    def _access(self, given: dict[str, Any], authorization: str) -> dict[str, Any]:
        """https://docs.slack.dev/reference/methods/oauth.v2.access"""
        ours = base64.b64encode(f"{CLIENT_ID}:{CLIENT_SECRET}".encode()).decode()
        if authorization != f"Basic {ours}":
            return {"ok": False, "error": "bad_client_secret"}
        team, redirect_uri = self._codes.pop(str(given.get("code")), (None, None))
        if team is None:
            return {"ok": False, "error": "invalid_code"}
        if redirect_uri != given.get("redirect_uri"):
            return {"ok": False, "error": "bad_redirect_uri"}
        named = {"id": team.id, "name": team.name}
        return {
            "ok": True,
            "access_token": self.token(team),
            "token_type": "bot",
            "scope": "chat:write",
            "bot_user_id": "U0BOT",
            "app_id": "A01APP",
            "team": None if team.is_grid else named,
            "enterprise": named if team.is_grid else ({"id": team.grid, "name": "grid"} if team.grid else None),
            "is_enterprise_install": team.is_grid,
            "authed_user": {"id": "U09ADMIN"},
        } | self.answer

    async def _api(self, request: web.Request) -> web.Response:
        method, arguments = request.match_info["method"], await _arguments_of(request)
        authorization = request.headers.get("Authorization", "")
        if method == "oauth.v2.access":
            return web.json_response(self._access(arguments, authorization))
        token = authorization.removeprefix("Bearer ")
        team = next((each for each in self.teams.values() if token in each.tokens), None)
        self.asked.append(Asked(method=method, team=team.id if team else None, token=token, arguments=arguments))
        error = team.tokens[token] if team else "invalid_auth"
        if error or team is None:
            return web.json_response({"ok": False, "error": error})
        if method in ("chat.postMessage", "chat.update"):
            if team.id in self.busy:
                headers = {"Retry-After": str(self.busy[team.id])}
                return web.json_response({"ok": False, "error": "ratelimited"}, status=429, headers=headers)
            if team.id in self.refuses:
                return web.json_response({"ok": False, "error": self.refuses[team.id]})
        return web.json_response({"ok": True} | self._answer(method, team, arguments))

    def _answer(self, method: str, team: Team, given: dict[str, Any]) -> dict[str, Any]:
        ids = {"team_id": team.id, "enterprise_id": team.id if team.is_grid else team.grid}
        never = dict.fromkeys(("deleted", "is_bot", "is_restricted", "is_ultra_restricted"), False)
        member = {"id": given.get("user"), "team_id": team.id, "tz": "UTC"} | never
        answers: dict[str, dict[str, Any]] = {
            "auth.test": ids | {"is_enterprise_install": team.is_grid, "user": "bot", "team": team.name},
            "users.info": {"user": member | self.kinds.get(str(given.get("user")), {})},
            "chat.postMessage": {"channel": given.get("channel"), "ts": f"17000000{next(self._numbers):02}.000100"},
            "chat.update": {"channel": given.get("channel"), "ts": given.get("ts")},
            "conversations.open": {"channel": {"id": f"D{given.get('users')}"}},
            "conversations.history": {"messages": [], "has_more": False},
            "conversations.replies": {"messages": [], "has_more": False},
            "usergroups.list": {"usergroups": []},
        }
        return answers.get(method, {"view": {"id": "V1", "hash": "h"}})


async def _arguments_of(request: web.Request) -> dict[str, Any]:
    if request.content_type == "application/json":
        body: dict[str, Any] = json.loads(await request.text() or "{}")
    else:
        body = dict(await request.post())
    return {**request.query, **body}


# What a bot has for them

KEY, OTHER_KEY = (base64.urlsafe_b64encode(byte * 32).decode() for byte in (b"k", b"o"))

POLICY = """
[[tiers]]
name = "manager"
over = { USD = 100 }
approvers = ["U01ALICE"]
"""


def many_settings(slack: ManySlacks, *, keys: str = KEY, **more: Any) -> dict[str, str]:
    """The environment of a bot of many workspaces."""
    return {
        "TOKEN_KEYS": keys,
        "SLACK_CLIENT_ID": CLIENT_ID,
        "SLACK_CLIENT_SECRET": CLIENT_SECRET,
        "SLACK_SIGNING_SECRET": SIGNING_SECRET,
        "SLACK_API_URL": slack.api_url,
        "PUBLIC_URL": "http://localhost:4000",
    } | more


def cipher_with(*keys: str) -> Cipher:
    return Cipher.of(Settings(token_keys=SecretStr(",".join(keys or (KEY,))), **_REST))


@contextlib.asynccontextmanager
async def clients_of(slack: ManySlacks, *keys: str) -> AsyncIterator[Clients]:
    async with slack_session() as session:
        yield Clients(cipher=cipher_with(*keys), session=session, api_url=slack.api_url)


async def install(conn: Connection, slack: ManySlacks, team: Team, **set_up: str) -> Workspace:
    """The app is installed there, with a new token, and set up like this; nothing said leaves it as it was."""
    token = cipher_with().encrypt(team.id, slack.token(team))
    row = await workspaces.installed(conn, team.id, name=team.name, token=token, by=f"slack:{team.id}/U09ADMIN")
    return await workspaces.set_up(conn, team.id, by="cli:ann", **set_up) if set_up else row


# Of settings for many workspaces, all but the keys.
_REST: dict[str, Any] = {
    "slack_client_id": CLIENT_ID,
    "slack_client_secret": SecretStr(CLIENT_SECRET),
    "slack_signing_secret": SecretStr(SIGNING_SECRET),
    "public_url": "http://localhost:4000",
}
