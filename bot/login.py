"""Signing in to the pages and out of them: a link from the command line, or Sign in with Slack."""

from __future__ import annotations

import re

from aiohttp import web

from bot.forms import Refused
from bot.pool import on_pool
from bot.site import Site, see_other
from flow.sessions import end_session, person_of_login_link, use_login_link


def login_routes(site: Site) -> list[web.RouteDef]:
    """Sign in, sign out."""
    login = _Login(site)
    return [
        web.get("/login", site.handler(login.show)),
        web.get("/login/{token:[A-Za-z0-9_-]{43}}", site.handler(login.ask, referrer="no-referrer")),
        web.post("/login/{token:[A-Za-z0-9_-]{43}}", site.handler(login.sign_in, referrer="no-referrer")),
        web.post("/logout", site.handler(login.sign_out)),
    ]


def place_after(text: str | None) -> str:
    """Where to go when somebody has signed in: to one of our own pages only."""
    return text if text and re.fullmatch(r"/approvals(/[0-9a-f]{32})?", text) else "/approvals"


class _Login:
    """The handlers."""

    def __init__(self, site: Site) -> None:
        self._site = site

    async def show(self, request: web.Request) -> web.Response:
        if await self._site.session(request):
            return see_other("/approvals")
        then = place_after(request.query.get("then"))
        return self._site.page("login.html", with_slack=self._site.slack_login, then=then, person=None)

    async def ask(self, request: web.Request) -> web.Response:
        """Who the link would sign in, and a button: looking at a link does not spend it."""
        token = request.match_info["token"]
        self._site.count(self._site.logins, request)
        person = await on_pool(self._site.pool, lambda conn: person_of_login_link(conn, token))
        if person is None:
            raise _gone()
        visitor = self._site.visitor(request)
        page = self._site.page(
            "login.html", with_slack=False, then="", person=person, visitor_token=self._site.form_token(visitor + token)
        )
        self._site.remember_visitor(page, visitor)
        return page

    async def sign_in(self, request: web.Request) -> web.Response:
        token = request.match_info["token"]
        self._site.count(self._site.logins, request)
        await self._site.form(request, self._site.known_visitor(request) + token)
        # Not repeated on another connection: the first may have spent the link, and its session is nobody's then.
        async with self._site.pool.connection() as conn:
            session = await use_login_link(conn, token)
        if session is None:
            raise _gone()
        answer = see_other("/approvals")
        self._site.begin(answer, session)
        return answer

    async def sign_out(self, request: web.Request) -> web.Response:
        """The session is over in the database: a copy of the cookie is worth nothing."""
        # Also without a session: the answer takes the cookie away.
        self._site.check_origin(request)
        session = await self._site.session(request)
        answer = see_other("/login")
        if session is not None:
            await self._site.form(request, session.token)
            await on_pool(self._site.pool, lambda conn: end_session(conn, session.token))
        self._site.drop_cookie(answer, "session")
        return answer


def _gone() -> Refused:
    text = "It was used before, is older than ten minutes, or was copied in part. Make another: claim_flow.py login"
    return Refused(410, "This link is no good", text)
