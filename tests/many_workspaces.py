"""Several workspaces at one bot in this process: a Slack that knows each by its token, and people who come from any."""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any, Self
from urllib.parse import unquote_plus

from aiohttp import web
from cryptography.fernet import Fernet

from bot.api import build_api
from bot.bots import Bots
from bot.openid import Provider
from bot.pool import pool_of
from bot.site import Site
from bot.slack import Background, events_at
from bot.slack_api import slack_session
from bot.web import build_web
from bot.workspaces import Clients
from flow.cipher import Cipher
from flow.database import Connection
from flow.model import Person
from flow.settings import Settings
from flow.starting import Checker
from flow.workspaces import installed, set_up, uninstalled
from tests.api_door import ENDPOINTS
from tests.browsing import pages_in_process
from tests.local_slack import SIGNING_SECRET
from tests.openid_server import CLIENT_ID, CLIENT_SECRET

POLICY = """
[[tiers]]
name = "approval"
over = { USD = 100 }
approvers = ["U01ALICE"]
"""


def settings_of_many(**more: Any) -> dict[str, str]:
    """The environment of an installation for several."""
    key = Fernet.generate_key().decode()
    return {
        "TOKEN_KEYS": key,
        "SLACK_CLIENT_ID": CLIENT_ID,
        "SLACK_CLIENT_SECRET": CLIENT_SECRET,
        "SLACK_SIGNING_SECRET": SIGNING_SECRET,
        "PUBLIC_URL": "http://localhost:4000",
    } | more


async def install(conn: Connection, cipher: Cipher, workspace: str) -> None:
    """The app is installed there, and set up."""
    token = cipher.encrypt(workspace, f"xoxb-{workspace}")
    await installed(conn, workspace, name=workspace, token=token, by=f"slack:{workspace}/U0ADMIN")
    await set_up(conn, workspace, by="cli:ann", channel="C01GEN", policy=POLICY)


async def uninstall(conn: Connection, workspace: str) -> None:
    from flow.workspaces import workspace_of

    assert await uninstalled(conn, await workspace_of(conn, workspace), by="slack")


def member(workspace: str, user_id: str, name: str = "Alice") -> Person:
    """A member of a workspace, as its bot makes them."""
    key = f"slack:{workspace}/{user_id}"
    return Person(key=key, name=name, names=frozenset({key, user_id}), workspace=workspace)


@dataclass
class ManySlacks:
    """The Web API of any workspace, told by its token: `async with ManySlacks() as slacks`, at `slacks.url`.

    `heard` is whatever the bot has sent, with whose token and by which method. In each workspace the same people are
    full members, and the same are in its group @finance.
    """

    url: str = ""
    heard: list[tuple[str, str, str]] = field(default_factory=list)
    finance: list[str] = field(default_factory=lambda: ["U01ALICE", "U06FINN"])

    async def __aenter__(self) -> Self:
        app = web.Application()
        app.router.add_route("*", "/api/{method}", self._answer)
        self._runner = web.AppRunner(app, shutdown_timeout=0.1)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}/api/"
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._runner.cleanup()

    async def _answer(self, request: web.Request) -> web.Response:
        team = request.headers["Authorization"].removeprefix("Bearer xoxb-")
        method, said = request.match_info["method"], unquote_plus(await request.text())
        self.heard.append((team, method, said))
        answers: dict[str, dict[str, Any]] = {
            "auth.test": {"team_id": team, "user_id": "U0BOT", "bot_id": "B0BOT"},
            "users.info": {"user": _user(team, request.query.get("user", ""))},
            "usergroups.list": {"usergroups": [{"id": "S01FIN", "handle": "finance", "users": self.finance}]},
            "views.open": {"view": {"id": "V1", "hash": "1.0"}},
        }
        return web.json_response({"ok": True} | answers.get(method, {}))


def _user(team: str, user_id: str) -> dict[str, Any]:
    never = dict.fromkeys(("deleted", "is_bot", "is_restricted", "is_ultra_restricted"), False)
    return {"id": user_id, "team_id": team, "tz": "UTC", **never}


@dataclass(frozen=True, kw_only=True)
class ManyBots:
    """One process that serves all of them: Slack's door and the API at `url`, the pages at `site.url`."""

    url: str
    site: Site
    background: Background
    cipher: Cipher


@contextlib.asynccontextmanager
async def bots_in_process(
    database_url: str, slacks: ManySlacks, *, viewers: frozenset[str] = frozenset(), openid_url: str = ""
) -> AsyncIterator[ManyBots]:
    """As `serve` makes them, without a worker."""
    settings = Settings(**{name.lower(): value for name, value in settings_of_many().items()})  # type: ignore[arg-type]
    background, checker, cipher = Background(), Checker(), Cipher.of(settings)
    provider = Provider.of(api_url=f"{openid_url}/api/", client_id=CLIENT_ID, client_secret=CLIENT_SECRET)
    async with pool_of(database_url) as pool, slack_session() as session:
        clients = Clients(cipher=cipher, session=session, api_url=slacks.url)
        bots = Bots(clients, pool, background, viewers=viewers, public_url=None)
        app = build_web(
            slack=events_at(bots.find, SIGNING_SECRET),
            api=build_api(pool, ENDPOINTS, checker, many_workspaces=True),
            checks={},
        )
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=1.0)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        pages = pages_in_process(
            database_url, openid=provider, viewers=viewers, team_of=bots.team_of, workspace_of=bots.workspace_of
        )
        async with pages as site:
            try:
                url = f"http://127.0.0.1:{runner.addresses[0][1]}"
                yield ManyBots(url=url, site=site, background=background, cipher=cipher)
            finally:
                await runner.cleanup()
                await background.drain(10.0)
                await checker.close()


def opened(interrupt_id: str, digest: str) -> str:
    """What a button of ours, or a form, carries."""
    return json.dumps({"interrupt": interrupt_id, "hash": digest})
