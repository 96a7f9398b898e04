"""Sign in with Slack, which is OpenID Connect: https://docs.slack.dev/authentication/sign-in-with-slack/

The person comes out as a click makes them. Whoever cannot be told from the signed token is nobody.
"""

from __future__ import annotations

import hmac
import json
import logging
import secrets
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlencode

import aiohttp
from aiohttp import web
from joserfc import jwt
from joserfc.errors import JoseError
from joserfc.jwk import KeySet
from slack_sdk.errors import SlackApiError

from bot.forms import Refused
from bot.kit import is_id
from bot.login import place_after
from bot.people import slack_person
from bot.site import Site, see_other
from flow.model import Person
from flow.sessions import begin_session
from flow.text import visible

log = logging.getLogger(__name__)

# How long somebody may take at Slack.
_LOGIN_S = 600
# Between Slack's clock and ours.
_LEEWAY_S = 60
_CALL_TIMEOUT_S = 10.0
# Slack signs with this alone; whatever else a token names is not looked at.
_ALGORITHMS = ["RS256"]
_NAME = 120

# Which of several workspaces the members of this team, and of this grid, are of; None: of none that is installed.
WorkspaceOf = Callable[[str, str | None], Awaitable[str | None]]


@dataclass(frozen=True, kw_only=True)
class Provider:
    """Slack, or what stands in for it: `base` is https://slack.com, and also who its tokens must be from."""

    base: str
    client_id: str
    client_secret: str

    @classmethod
    def of(cls, *, api_url: str, client_id: str, client_secret: str) -> Provider:
        """The one whose Web API this is."""
        base = api_url.removesuffix("/").removesuffix("/api")
        return cls(base=base, client_id=client_id, client_secret=client_secret)


class LoginRefused(Exception):
    """Nobody is signed in; the text is for the log."""


def slack_login_routes(
    site: Site, provider: Provider, http: aiohttp.ClientSession, workspace_of: WorkspaceOf | None = None
) -> list[web.RouteDef]:
    """To Slack, and back. Without `workspace_of` there is one workspace, and whoever is of another team is a stranger
    in it."""
    login = _SlackLogin(site, provider, http, workspace_of)
    return [
        web.get("/login/slack", site.handler(login.start), allow_head=False),
        web.get("/login/slack/callback", site.handler(login.finish, referrer="no-referrer"), allow_head=False),
    ]


class _SlackLogin:
    """The handlers."""

    def __init__(
        self, site: Site, provider: Provider, http: aiohttp.ClientSession, workspace_of: WorkspaceOf | None
    ) -> None:
        self._site, self._provider, self._http, self._workspace_of = site, provider, http, workspace_of
        self._redirect_url = f"{site.url}/login/slack/callback"

    async def start(self, request: web.Request) -> web.Response:
        """Off to Slack, with a state that only this browser can bring back, and a nonce for the token."""
        self._site.count(self._site.logins, request)
        state, nonce = secrets.token_urlsafe(32), secrets.token_urlsafe(32)
        query = {
            "response_type": "code",
            "scope": "openid profile",
            "client_id": self._provider.client_id,
            "redirect_uri": self._redirect_url,
            "state": state,
            "nonce": nonce,
        }
        answer = see_other(f"{self._provider.base}/openid/connect/authorize?{urlencode(query)}")
        said = json.dumps([state, nonce, int(time.time()) + _LOGIN_S, place_after(request.query.get("then"))])
        self._site.set_cookie(answer, "login", self._site.signed(said, use="login"), max_age_s=_LOGIN_S)
        return answer

    async def finish(self, request: web.Request) -> web.Response:
        self._site.count(self._site.logins, request)
        try:
            nonce, then = self._expected(request)
            person = await self._person(request.query.get("code", ""), nonce)
        except LoginRefused as exc:
            log.warning("Sign in with Slack was refused: %s", exc)
            raise Refused(403, "You are not signed in", "Slack did not vouch for you. Try once more.") from exc
        except (SlackApiError, aiohttp.ClientError, TimeoutError, OSError) as exc:
            log.warning("Slack does not answer: %s: %s", type(exc).__name__, exc)
            raise Refused(503, "Not now", "Slack does not answer. Try again in a moment.") from exc
        async with self._site.pool.connection() as conn:
            session = await begin_session(conn, person, by="slack")
        answer = see_other(then)
        self._site.begin(answer, session)
        # A state is good for one sign-in.
        self._site.drop_cookie(answer, "login")
        return answer

    def _expected(self, request: web.Request) -> tuple[str, str]:
        """The nonce that the token must have, and where to go. Raises LoginRefused unless this browser began it."""
        said = self._site.unsigned(self._site.cookie(request, "login"), use="login")
        if said is None:
            raise LoginRefused("this browser has not begun it")
        state, nonce, until, then = json.loads(said)
        if not hmac.compare_digest(state.encode(), request.query.get("state", "").encode("utf-8", "surrogatepass")):
            raise LoginRefused("another state came back")
        if time.time() > until:
            raise LoginRefused("it took too long")
        if "error" in request.query:
            raise LoginRefused(f"Slack says {request.query['error'][:80]!a}")
        return nonce, then

    async def _person(self, code: str, nonce: str) -> Person:
        """Who the code stands for. Raises LoginRefused."""
        fields = {
            "client_id": self._provider.client_id,
            "client_secret": self._provider.client_secret,
            "code": code,
            "grant_type": "authorization_code",
            "redirect_uri": self._redirect_url,
        }
        given = await self._json("POST", "/api/openid.connect.token", data=fields)
        if given.get("ok") is not True or not isinstance(given.get("id_token"), str):
            raise LoginRefused(f"no token for the code ({str(given.get('error'))[:80]!a})")
        keys = await self._json("GET", "/openid/connect/keys")
        claims = read_token(given["id_token"], keys, self._provider, nonce=nonce, now=time.time())
        workspace = await self._workspace_of(*_teams_of(claims)) if self._workspace_of else None
        team = await self._site.team_of(workspace)
        if team is not None:
            return await team.placed(person_of(claims, await team.keys(), workspace))
        # A bare member id means nobody: whose member would it be?
        stranger = person_of(claims, frozenset())
        if self._workspace_of is not None:
            raise LoginRefused(f"{stranger.key} is of no workspace that the app is installed in")
        return stranger

    async def _json(self, method: str, path: str, **more: Any) -> dict[str, Any]:
        timeout = aiohttp.ClientTimeout(total=_CALL_TIMEOUT_S)
        url = self._provider.base + path
        async with self._http.request(method, url, timeout=timeout, allow_redirects=False, **more) as answer:
            try:
                body = json.loads(await answer.text())
            except ValueError as exc:
                raise LoginRefused(f"{path} answered {answer.status}, and not in JSON") from exc
        if answer.status != 200 or not isinstance(body, dict):
            raise LoginRefused(f"{path} answered {answer.status}")
        return body


def read_token(token: str, keys: Mapping[str, Any], provider: Provider, *, nonce: str, now: float) -> dict[str, Any]:
    """What a token says that Slack signed, for us, for this sign-in, and lately. Raises LoginRefused.

    The checks: https://openid.net/specs/openid-connect-core-1_0.html#IDTokenValidation
    """
    try:
        claims = jwt.decode(token, KeySet.import_key_set(dict(keys)), algorithms=_ALGORITHMS).claims  # type: ignore[arg-type]
        jwt.JWTClaimsRegistry(
            now=int(now),
            leeway=_LEEWAY_S,
            iss={"essential": True, "value": provider.base},
            aud={"essential": True, "value": provider.client_id},
            exp={"essential": True},
            iat={"essential": True},
            nonce={"essential": True, "value": nonce},
        ).validate(claims)
    except (JoseError, ValueError, TypeError, KeyError, AttributeError) as exc:
        raise LoginRefused(f"the token is not good: {type(exc).__name__}: {exc}") from exc
    audience = claims["aud"]
    if isinstance(audience, list) and audience != [provider.client_id]:
        raise LoginRefused("the token is for others too")
    return claims


def person_of(claims: Mapping[str, Any], own_team: frozenset[str], workspace: str | None = None) -> Person:
    """The member that a token names. Raises LoginRefused."""
    user_id, name = claims.get("https://slack.com/user_id"), claims.get("name")
    team_id, enterprise_id = _teams_of(claims)
    if not is_id(user_id):
        raise LoginRefused("the token names no member of a team")
    return slack_person(
        user_id=str(user_id),
        name=visible(name)[:_NAME] if isinstance(name, str) and name.strip() else str(user_id),
        team_id=team_id,
        enterprise_id=enterprise_id,
        own_team=own_team,
        workspace=workspace,
    )


def _teams_of(claims: Mapping[str, Any]) -> tuple[str, str | None]:
    """Whose member a token names: their team, and its grid. Raises LoginRefused."""
    team_id, enterprise_id = claims.get("https://slack.com/team_id"), claims.get("https://slack.com/enterprise_id")
    if not is_id(team_id):
        raise LoginRefused("the token names no member of a team")
    return str(team_id), str(enterprise_id) if is_id(enterprise_id) else None
