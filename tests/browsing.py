"""People in front of the pages, without a browser: a cookie jar, the forms of a page, and the bot in this process."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from html.parser import HTMLParser
from typing import Any, Self

import aiohttp
from aiohttp import web
from multidict import CIMultiDictProxy
from yarl import URL

from bot.groups import OwnTeam
from bot.install import install_routes
from bot.links import link_routes
from bot.live import Live
from bot.login import login_routes
from bot.openid import Provider, WorkspaceOf, slack_login_routes
from bot.pages import inbox_routes
from bot.pool import pool_of
from bot.site import Site, static_files
from bot.web import build_web
from bot.workspaces import Clients
from flow.database import Connection
from flow.model import Person
from flow.sessions import begin_session, make_login_link, session_secret
from tests.local_slack import free_port


@contextlib.asynccontextmanager
async def pages_in_process(
    database_url: str,
    *,
    openid: Provider | None = None,
    groups: OwnTeam | None = None,
    workspace_of: WorkspaceOf | None = None,
    clients: Clients | None = None,
    **more: Any,
) -> AsyncIterator[Site]:
    """A bot with its pages, at `site.url`. `groups` is the team whose user groups it can ask for; with `clients` the
    app can be installed."""
    url = f"http://127.0.0.1:{free_port()}"
    live = Live()

    async def team_of(_: str | None) -> OwnTeam | None:
        return groups

    async with pool_of(database_url) as pool, aiohttp.ClientSession() as http:
        async with pool.connection() as conn:
            secret = await session_secret(conn)
        more.setdefault("slack_login", openid is not None)
        site = Site(pool=pool, url=url, secret=secret, **{"team_of": team_of} | more)
        routes = [
            *inbox_routes(site, live),
            *login_routes(site),
            *link_routes(site),
            web.get("/static/{name}", static_files()),
        ]
        if openid is not None:
            routes += slack_login_routes(site, openid, http, workspace_of)
        if openid is not None and clients is not None:
            routes += install_routes(site, openid, clients)
        runner = web.AppRunner(build_web(pages=routes, checks={}), access_log=None, shutdown_timeout=1)
        await runner.setup()
        listening = asyncio.create_task(live.run(database_url))
        await web.TCPSite(runner, "127.0.0.1", URL(url).port).start()
        try:
            yield site
        finally:
            live.close()
            listening.cancel()
            await runner.cleanup()


@dataclass(frozen=True, kw_only=True)
class FormSeen:
    """A form of a page: where it goes, and what it holds."""

    method: str
    action: str
    fields: dict[str, str]
    buttons: dict[str, tuple[str, str]]


@dataclass(frozen=True, kw_only=True)
class PageSeen:
    """What came back: `text` is what a person reads, one space between words."""

    status: int
    html: str
    text: str
    headers: CIMultiDictProxy[str]
    forms: list[FormSeen] = field(default_factory=list)
    links: list[str] = field(default_factory=list)

    def form(self, button: str) -> FormSeen:
        """The form that has a button whose label begins like this."""
        [found] = [form for form in self.forms if any(label.startswith(button) for label in form.buttons)]
        return found

    def has_button(self, label: str) -> bool:
        return any(each.startswith(label) for form in self.forms for each in form.buttons)


class Visitor:
    """`async with Visitor(site.url) as alice`: follows no redirects, keeps cookies as a browser would."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.cookies: dict[str, str] = {}

    async def __aenter__(self) -> Self:
        self._http = aiohttp.ClientSession(cookie_jar=aiohttp.DummyCookieJar())
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._http.close()

    async def ask(
        self, method: str, path: str, *, headers: Mapping[str, str] | None = None, data: Any = None
    ) -> PageSeen:
        cookie = "; ".join(f"{name}={value}" for name, value in self.cookies.items())
        given = ({"Cookie": cookie} if cookie else {}) | dict(headers or {})
        async with self._http.request(
            method, URL(self.url + path, encoded=True), headers=given, data=data, allow_redirects=False
        ) as answer:
            for name, morsel in answer.cookies.items():
                if morsel.value and morsel["max-age"] != "0":
                    self.cookies[name] = morsel.value
                else:
                    self.cookies.pop(name, None)
            html = await answer.text()
            parsed = _Parser()
            parsed.feed(html)
            return PageSeen(
                status=answer.status,
                html=html,
                text=" ".join("".join(parsed.texts).split()),
                headers=answer.headers,
                forms=parsed.forms,
                links=parsed.links,
            )

    async def get(self, path: str, **more: Any) -> PageSeen:
        return await self.ask("GET", path, **more)

    async def post(self, path: str, fields: Any, *, headers: Mapping[str, str] | None = None) -> PageSeen:
        """A form, sent as from one of our own pages, unless the headers say otherwise (None leaves one out)."""
        given = {"Origin": self.url} | dict(headers or {})
        return await self.ask("POST", path, data=fields, headers={n: v for n, v in given.items() if v is not None})

    async def press(self, page: PageSeen, button: str, **changed: str) -> PageSeen:
        """Press a button of a page, with these fields filled in."""
        form = page.form(button)
        name, value = next(each for label, each in form.buttons.items() if label.startswith(button))
        fields = form.fields | ({name: value} if name else {}) | changed
        return await self.post(form.action, fields)

    async def sign_in(self, conn: Connection, person: Person) -> None:
        """As the holder of a login link does it."""
        token = await make_login_link(conn, person, by="cli:ann")
        path = f"/login/{token}"
        page = await self.get(path)
        form = page.form("Sign in")
        answer = await self.post(path, form.fields)
        assert (answer.status, answer.headers["Location"]) == (303, "/approvals"), answer.text


async def signed_in_at_once(conn: Connection, site: Site, visitor: Visitor, person: Person) -> str:
    """Without a link; the session's token."""
    token = await begin_session(conn, person, by="link")
    visitor.cookies[site.cookie_name("session")] = site.signed(token, use="session")
    return token


class _Parser(HTMLParser):
    """Texts, links and forms."""

    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []
        self.forms: list[FormSeen] = []
        self.links: list[str] = []
        self._button: tuple[str, str] | None = None
        self._field = ""
        self._label: list[str] = []
        self._hidden = 0

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attrs}
        if tag in ("script", "style", "title"):
            self._hidden += 1
        if tag == "form":
            method, action = given.get("method", "get"), given.get("action", "")
            self.forms.append(FormSeen(method=method, action=action, fields={}, buttons={}))
        elif tag in ("input", "textarea", "select") and self.forms and given.get("type") != "checkbox":
            if given.get("type") != "radio" or "checked" in given:
                self.forms[-1].fields[given["name"]] = given.get("value", "")
            self._field, self._label = given["name"], []
        elif tag == "option" and "selected" in given and self._field:
            self.forms[-1].fields[self._field] = given.get("value", "")
        elif tag == "button" and self.forms:
            self._button, self._label = (given.get("name", ""), given.get("value", "")), []
        elif tag == "a":
            self.links.append(given["href"])
        self.texts.append(" ")

    def handle_endtag(self, tag: str) -> None:
        if tag in ("script", "style", "title"):
            self._hidden -= 1
        if tag == "button" and self._button is not None:
            self.forms[-1].buttons[" ".join("".join(self._label).split())] = self._button
            self._button = None
        if tag == "textarea" and self.forms:
            # A browser takes off the first line end.
            self.forms[-1].fields[self._field] = "".join(self._label).removeprefix("\n")
        self.texts.append(" ")

    def handle_data(self, data: str) -> None:
        if not self._hidden:
            self.texts.append(data)
        self._label.append(data)
