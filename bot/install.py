"""Installs the app in a workspace, or in a whole Enterprise Grid, by OAuth: https://docs.slack.dev/authentication/installing-with-oauth

Whoever comes back from Slack must have begun here, in this browser, once. The token is tried before it is kept, and
kept encrypted. It opens nothing yet: an operator has to set the workspace up.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import logging
import re
import secrets
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import aiohttp
from aiohttp import web
from slack_sdk.errors import SlackApiError
from slack_sdk.oauth import AuthorizeUrlGenerator

from bot.kit import as_dict, as_id, as_text
from bot.openid import Provider
from bot.site import Site, see_other
from bot.slack_api import DIRECT_SCOPES, GROUP_SCOPES, SCOPES, client_with, is_refusal, read_error
from bot.workspaces import Clients
from flow.text import visible
from flow.workspaces import installed, use_state

log = logging.getLogger(__name__)

# How long somebody may take at Slack.
_GOOD_FOR_S = 600
_NAME = 120


@dataclass(frozen=True, kw_only=True)
class Installation:
    """What Slack says of one: `workspace` is the id of the team, or of the grid where it is of a whole one."""

    workspace: str
    name: str
    by: str
    token: str = field(repr=False)


class InstallRefused(Exception):
    """Nothing is installed; the text is for the log."""


class SaidNo(Exception):
    """Nothing is installed, as somebody at Slack did not want it."""


def install_routes(site: Site, provider: Provider, clients: Clients) -> list[web.RouteDef]:
    """To Slack, and back."""
    install = _Install(site, provider, clients)
    return [
        web.get("/slack/install", site.handler(install.start), allow_head=False),
        web.get("/slack/oauth_redirect", site.handler(install.finish, referrer="no-referrer"), allow_head=False),
    ]


class _Install:
    """The handlers."""

    def __init__(self, site: Site, provider: Provider, clients: Clients) -> None:
        self._site, self._provider, self._clients = site, provider, clients
        self._redirect_url = f"{site.url}/slack/oauth_redirect"
        self._authorize = AuthorizeUrlGenerator(
            client_id=provider.client_id,
            scopes=[*SCOPES, *GROUP_SCOPES, *DIRECT_SCOPES],
            redirect_uri=self._redirect_url,
            authorization_url=f"{provider.base}/oauth/v2/authorize",
        )

    async def start(self, request: web.Request) -> web.Response:
        """Off to Slack, with a state that only this browser can bring back."""
        self._site.count(self._site.logins, request)
        state = secrets.token_urlsafe(32)
        answer = see_other(self._authorize.generate(state))
        said = json.dumps([state, int(time.time()) + _GOOD_FOR_S])
        self._site.set_cookie(answer, "install", self._site.signed(said, use="install"), max_age_s=_GOOD_FOR_S)
        return answer

    async def finish(self, request: web.Request) -> web.Response:
        """Keep what Slack gives for the code, and say what is next."""
        self._site.count(self._site.logins, request)
        try:
            await self._spend_state(request)
            found = await self._installation(request)
        except SaidNo:
            return self._site.page("not_installed.html", status=403, text="Somebody said no at Slack.")
        except InstallRefused as exc:
            log.warning("an installation was refused: %s", exc)
            text = "It was begun elsewhere or long ago, or came back before, or Slack does not vouch for it."
            return self._site.page("not_installed.html", status=403, text=text)
        except (SlackApiError, aiohttp.ClientError, TimeoutError, OSError) as exc:
            log.warning("Slack does not answer: %s: %s", type(exc).__name__, exc)
            text = "Slack does not answer. Begin again in a moment."
            return self._site.page("not_installed.html", status=503, text=text)
        token = self._clients.cipher.encrypt(found.workspace, found.token)
        async with self._site.pool.connection() as conn:
            row = await installed(conn, found.workspace, name=found.name, token=token, by=found.by)
        log.info("the app is installed in workspace %s (%s), by %s", row.workspace, row.name, found.by)
        page = self._site.page("installed.html", row=row)
        self._site.drop_cookie(page, "install")
        return page

    async def _spend_state(self, request: web.Request) -> None:
        """Raises InstallRefused unless this browser began it, lately, and comes back for the first time."""
        said = self._site.unsigned(self._site.cookie(request, "install"), use="install")
        if said is None:
            raise InstallRefused("this browser has not begun it")
        state, until = json.loads(said)
        if not hmac.compare_digest(state.encode(), request.query.get("state", "").encode("utf-8", "surrogatepass")):
            raise InstallRefused("another state came back")
        if time.time() > until:
            raise InstallRefused("it took too long")
        spent = hashlib.sha256(state.encode()).digest()
        async with self._site.pool.connection() as conn:
            if not await use_state(conn, spent, good_for_s=_GOOD_FOR_S):
                raise InstallRefused("it came back before")

    async def _installation(self, request: web.Request) -> Installation:
        """What the code stands for. Raises InstallRefused, SaidNo."""
        if error := request.query.get("error"):
            if error == "access_denied":
                raise SaidNo
            raise InstallRefused(f"Slack says {error[:80]!a}")
        try:
            answer = await self._client().oauth_v2_access(
                client_id=self._provider.client_id,
                client_secret=self._provider.client_secret,
                code=request.query.get("code", ""),
                redirect_uri=self._redirect_url,
            )
            found = installation_in(as_dict(answer.data))
            tested = await self._client(found.token).auth_test()
        except SlackApiError as exc:
            if is_refusal(exc):
                raise InstallRefused(f"Slack says {read_error(exc)[1][:80]!a}") from exc
            raise
        if found.workspace not in (tested.get("team_id"), tested.get("enterprise_id")):
            raise InstallRefused(f"the token is not of {found.workspace}")
        return found

    def _client(self, token: str | None = None) -> Any:
        return client_with(token, self._clients.session, api_url=self._clients.api_url)


def installation_in(answer: Mapping[str, Any]) -> Installation:
    """What `oauth.v2.access` has answered. Raises InstallRefused where there is no bot token that stays good.

    Formats: https://docs.slack.dev/reference/methods/oauth.v2.access
    """
    token, grid, team = as_text(answer.get("access_token")), as_dict(answer.get("enterprise")), answer.get("team")
    if answer.get("token_type") != "bot" or not token:
        raise InstallRefused("no bot token came")
    if answer.get("expires_in") is not None:
        raise InstallRefused(
            "the token would expire: turn token rotation off in the app's settings, as manifest.yml has it"
        )
    # In a whole grid the team is null.
    of = grid if answer.get("is_enterprise_install") is True else as_dict(team)
    workspace = as_text(of.get("id"))
    if not re.fullmatch(r"[TE][A-Z0-9]{2,}", workspace):
        raise InstallRefused("no workspace is named")
    installer = as_id(as_dict(answer.get("authed_user")).get("id"))
    return Installation(
        workspace=workspace,
        name=visible(as_text(of.get("name")))[:_NAME] or workspace,
        by=f"slack:{workspace}/{installer}" if installer else "slack",
        token=token,
    )
