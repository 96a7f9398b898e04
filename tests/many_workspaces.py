"""Several workspaces at one bot in this process, and the same people in each of them."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from typing import Any

from aiohttp import web
from cryptography.fernet import Fernet

from bot.api import build_api
from bot.bots import Bots
from bot.openid import Provider
from bot.pool import on_pool, pool_of
from bot.site import Site
from bot.slack import Background, events_at
from bot.slack_api import slack_session
from bot.web import build_web
from bot.workspaces import Clients
from flow import workspaces
from flow.cipher import Cipher
from flow.database import Connection
from flow.model import Person
from flow.sessions import workspace_of_member
from flow.settings import Settings
from flow.starting import Checker
from tests.api_door import ENDPOINTS
from tests.browsing import pages_in_process
from tests.local_slack import SIGNING_SECRET
from tests.many_slacks import CLIENT_ID, CLIENT_SECRET, ManySlacks, Team

POLICY = """
[[tiers]]
name = "approval"
over = { USD = 100 }
approvers = ["U01ALICE"]
"""


class SameInAll(ManySlacks):
    """In each of its workspaces the same people are full members, and these are in its group @finance."""

    finance = ("U01ALICE", "U06FINN")

    def _answer(self, method: str, team: Team, given: dict[str, Any]) -> dict[str, Any]:
        if method == "usergroups.list":
            return {"usergroups": [{"id": f"S{team.id}", "handle": "finance", "users": list(self.finance)}]}
        return super()._answer(method, team, given)


def member(workspace: str, user_id: str, name: str = "Alice") -> Person:
    """A member of a workspace, as its bot makes them."""
    key = f"slack:{workspace}/{user_id}"
    return Person(key=key, name=name, names=frozenset({key, user_id}), workspace=workspace)


def environment_of_many(**more: str) -> dict[str, str]:
    """The settings of an installation for several."""
    return {
        "TOKEN_KEYS": Fernet.generate_key().decode(),
        "SLACK_CLIENT_ID": CLIENT_ID,
        "SLACK_CLIENT_SECRET": CLIENT_SECRET,
        "SLACK_SIGNING_SECRET": SIGNING_SECRET,
        "PUBLIC_URL": "http://localhost:4000",
    } | more


async def install(
    conn: Connection, cipher: Cipher, slacks: ManySlacks, workspace: str, *, is_grid: bool = False
) -> None:
    """The app is installed there, and set up."""
    team = slacks.team(workspace, is_grid=is_grid)
    token = cipher.encrypt(workspace, slacks.token(team))
    await workspaces.installed(conn, workspace, name=team.name, token=token, by=f"slack:{workspace}/U09ADMIN")
    await workspaces.set_up(conn, workspace, by="cli:ann", channel="C01GEN", policy=POLICY)


def cipher_of(environment: Mapping[str, str]) -> Cipher:
    """That of these settings, whatever else is in them."""
    return Cipher.of(Settings(**{name.lower(): each for name, each in environment.items()}))  # type: ignore[arg-type]


@dataclass(frozen=True, kw_only=True)
class Installation:
    """One process that serves all of them: Slack's door and the API at `url`, the pages at `site.url`."""

    url: str
    site: Site
    background: Background
    cipher: Cipher
    slacks: ManySlacks

    async def install(self, conn: Connection, workspace: str, *, is_grid: bool = False) -> None:
        await install(conn, self.cipher, self.slacks, workspace, is_grid=is_grid)

    async def uninstall(self, conn: Connection, workspace: str) -> None:
        assert await workspaces.uninstalled(conn, await workspaces.workspace_of(conn, workspace), by="slack")


@contextlib.asynccontextmanager
async def installation(
    database_url: str, slacks: ManySlacks, *, viewers: frozenset[str] = frozenset(), openid_url: str = ""
) -> AsyncIterator[Installation]:
    """As `serve` makes it, without a worker."""
    background, checker, cipher = Background(), Checker(), cipher_of(environment_of_many())
    provider = Provider.of(api_url=f"{openid_url}/api/", client_id=CLIENT_ID, client_secret=CLIENT_SECRET)
    async with pool_of(database_url) as pool, slack_session() as session:
        clients = Clients(cipher=cipher, session=session, api_url=slacks.api_url)
        bots = Bots(clients, pool, background, viewers=viewers, public_url=None)

        async def workspace_of(team_id: str, enterprise_id: str | None) -> str | None:
            return await on_pool(pool, lambda conn: workspace_of_member(conn, team_id, enterprise_id))

        app = build_web(
            slack=events_at(bots.find, SIGNING_SECRET),
            api=build_api(pool, ENDPOINTS, checker, many_workspaces=True),
            checks={},
        )
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=1.0)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        pages = pages_in_process(
            database_url, openid=provider, viewers=viewers, team_of=bots.team_of, workspace_of=workspace_of
        )
        async with pages as site:
            url = f"http://127.0.0.1:{runner.addresses[0][1]}"
            try:
                yield Installation(url=url, site=site, background=background, cipher=cipher, slacks=slacks)
            finally:
                await runner.cleanup()
                await background.drain(10.0)
                await checker.close()
