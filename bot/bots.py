"""The bots of many workspaces in one process: a Bolt app for each, and which of them a request of Slack's is for.

Whatever Slack sends names its workspace, whose row is read for each request. What is of none that has the app installed
is refused, and nothing of it is recorded.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from dataclasses import dataclass

import aiohttp
from aiohttp import web
from slack_bolt.app.async_app import AsyncApp
from slack_bolt.context.respond.async_respond import AsyncRespond
from slack_bolt.request.async_request import AsyncBoltRequest
from slack_sdk.errors import SlackApiError

from bot.desk import Audience
from bot.door import answered
from bot.groups import OwnTeam, groups_in
from bot.heard import is_end
from bot.kit import as_id, as_text
from bot.pool import Pool, on_pool
from bot.slack import Background, build_bolt
from bot.slack_api import DEAD_TOKEN, read_error
from bot.workspaces import Clients, Kept
from flow.database import AWAY
from flow.errors import FlowError, TokenUnreadable, UnknownWorkspace, WorkspaceClosed
from flow.settings import names_in
from flow.workspaces import Workspace, uninstalled, workspace_of

log = logging.getLogger(__name__)

# Of the three seconds that Slack waits for the answer to an event.
_ASK_TIMEOUT_S = 1.5


@dataclass(frozen=True, kw_only=True)
class Bundle:
    """What the bot has for one workspace."""

    own_team: OwnTeam
    bolt: AsyncApp


class Bots:
    """The bot of each workspace, for whatever Slack sends, and for the pages."""

    def __init__(
        self, clients: Clients, pool: Pool, background: Background, *, viewers: frozenset[str], public_url: str | None
    ) -> None:
        self._clients, self._pool, self._background = clients, pool, background
        self._viewers, self._public_url = viewers, public_url
        self._kept = Kept(self._bundle)

    def _bundle(self, row: Workspace) -> Bundle:
        client = self._clients.client(row)
        own_team = OwnTeam(client, workspace=row.workspace)
        audience = Audience(
            viewers=self._viewers,
            filers=names_in(row.filers),
            names_groups=bool(groups_in(map(row.rules.tier, row.rules.names))),
            closed=f"this workspace {row.closed}" if row.closed else "",
        )
        bolt = build_bolt(
            client, self._pool, own_team, self._background, audience=audience, public_url=self._public_url
        )
        return Bundle(own_team=own_team, bolt=bolt)

    async def team_of(self, workspace: str | None) -> OwnTeam | None:
        """Whom to ask about the members of a workspace; None if that is nobody."""
        if workspace is None:
            return None
        try:
            return self._kept.of(await self._row(workspace)).own_team
        except (UnknownWorkspace, WorkspaceClosed):
            return None

    async def _row(self, workspace: str) -> Workspace:
        return await on_pool(self._pool, lambda conn: workspace_of(conn, workspace))

    # What Slack sends

    async def find(self, request: AsyncBoltRequest) -> AsyncApp | web.Response:
        """The Bolt app of the workspace that a signed request is from; what is of none that is installed is refused,
        and nothing of it is recorded."""
        if request.body.get("type") == "url_verification":
            return web.json_response({"challenge": request.body.get("challenge")})
        try:
            if is_end(request.body):
                return await self._end(request)
            return self._kept.of(await self._row(workspace_in(request) or "")).bolt
        except (UnknownWorkspace, WorkspaceClosed) as exc:
            log.warning("a request of Slack's is refused: %s", exc)
            self._tell(request, "The app is not installed in this workspace any more, so nothing was done.")
            return web.json_response({"error": "not installed in this workspace"}, status=403)
        except (TokenUnreadable, TokenInDoubt) as exc:
            log.error("a request of Slack's failed: %s", exc)  # noqa: TRY400 (no bug of ours)
            self._tell(request, "That did not work. Please try again in a moment: twice is once.")
        except AWAY as exc:
            log.warning("a request of Slack's was not recorded: %s", str(exc).strip())
            self._tell(request, "That was not recorded: the database is away. Please try again in a moment.")
        return web.json_response({"error": "not recorded"}, status=503)

    def _tell(self, request: AsyncBoltRequest, text: str) -> None:
        """In private, where a press or a command says how: there may be no token to do it otherwise."""
        if url := as_text(request.body.get("response_url")):
            self._background.spawn(answered(AsyncRespond(response_url=url), text=f"⚠️ {text}", replace_original=False))

    async def _end(self, request: AsyncBoltRequest) -> web.Response:
        """Drop the tokens that Slack takes no more. One that it still takes is of an installation after that event."""
        for key in filter(None, keys_in(request)):
            with contextlib.suppress(UnknownWorkspace):
                row = await self._row(key)
                if row.is_installed:
                    await self._end_if_dead(row)
        return web.Response()

    async def _end_if_dead(self, row: Workspace) -> None:
        try:
            async with asyncio.timeout(_ASK_TIMEOUT_S):
                await self._clients.client(row).auth_test()
        except SlackApiError as exc:
            error = read_error(exc)[1]
            if error not in DEAD_TOKEN:
                raise TokenInDoubt(row.workspace) from exc
        except (aiohttp.ClientError, TimeoutError, OSError) as exc:
            raise TokenInDoubt(row.workspace) from exc
        else:
            log.info("workspace %s: it was uninstalled, and is installed again", row.workspace)
            return
        if await on_pool(self._pool, lambda conn: uninstalled(conn, row, by="slack")):
            log.warning("workspace %s has uninstalled the app: its token is deleted", row.workspace)


class TokenInDoubt(FlowError):
    """Slack does not say whether a token is good."""

    def __init__(self, workspace: str) -> None:
        super().__init__(f"Slack does not say whether the token of workspace {workspace} is good any more")


def keys_in(request: AsyncBoltRequest) -> tuple[str | None, str | None]:
    """The ids of team and grid that a signed request is from, as Bolt finds them in each kind of payload."""
    return as_id(request.context.team_id), as_id(request.context.enterprise_id)


def workspace_in(request: AsyncBoltRequest) -> str | None:
    """The installation that a request is of: that of a whole grid, where the team may be null, or else that of a team.

    Formats: https://docs.slack.dev/enterprise/developing-for-enterprise-orgs
    """
    team, grid = keys_in(request)
    return grid if request.context.is_enterprise_install or team is None else team
