"""What every page shares: who is signed in, cookies, form tokens, headers, and errors as pages.

A form is accepted only from our own page: its token goes with a cookie that no other site can set or have sent, and
its Origin is ours. GET and HEAD change nothing.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import secrets
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from datetime import datetime
from decimal import Decimal
from importlib import resources
from typing import Any, Literal
from urllib.parse import parse_qsl

from aiohttp import web
from jinja2 import Environment, PackageLoader, StrictUndefined

from bot.answers import STEPS, answer_in_words, sentence
from bot.bodies import BodyBroken, read_at_most
from bot.forms import Form, Refused
from bot.groups import OwnTeam
from bot.limits import Limit, caller_of
from bot.outcomes import CHANGED
from bot.pool import Pool, on_pool
from bot.problems import problem_of
from flow.database import AWAY, Connection
from flow.delegations import with_absent
from flow.errors import FlowError
from flow.log import also_concerning, concerning, new_trace_id
from flow.model import Approval, Thread
from flow.questions import question_of
from flow.sessions import SESSION_HOURS, Session, session_of
from flow.text import visible, visible_json

log = logging.getLogger(__name__)

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
TeamOf = Callable[[str | None], Awaitable[OwnTeam | None]]
Referrer = Literal["same-origin", "no-referrer"]

_HEADERS = {
    # Everything that a page needs comes from here, nobody may frame it, and its forms lead nowhere else.
    "Content-Security-Policy": "default-src 'none'; style-src 'self'; script-src 'self'; img-src 'self';"
    " connect-src 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'",
    "Cache-Control": "no-store",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "X-Robots-Tag": "noindex",
    "Cross-Origin-Opener-Policy": "same-origin",
}

# Tokens in paths: guessing one of 256 bits is hopeless, so these only bound what strangers can make us do.
_TOKENS_A_MINUTE = 60
_LOGINS_A_MINUTE = 20
_DECISIONS_A_MINUTE = 60

# The largest form has a question's arguments, of 100,000 characters as JSON, a few bytes for each when it is encoded.
_LARGEST_FORM = 1 << 19
# The inbox sends a handful, and one for each request of a page when many are approved.
_MOST_FIELDS = 1000


class SignInFirst(Exception):
    """Nobody is signed in. `then` is where to go afterwards."""

    def __init__(self, then: str) -> None:
        self.then = then


async def no_team(_: str | None) -> OwnTeam | None:
    """The team of a workspace where Slack is off."""
    return None


@dataclass(frozen=True, kw_only=True)
class Site:
    """What the pages' handlers need. `url` is where browsers reach them, without a slash at the end."""

    pool: Pool
    url: str
    secret: bytes
    viewers: frozenset[str] = frozenset()
    step_up_over: Decimal | None = None
    # Whether there is Sign in with Slack.
    slack_login: bool = False
    # Slack, to ask who is in a user group of this workspace (None: of the one that there is); without it they name
    # nobody.
    team_of: TeamOf = no_team
    # Whether the policy names any.
    names_groups: bool = False
    tokens: Limit = field(default_factory=lambda: Limit(_TOKENS_A_MINUTE))
    logins: Limit = field(default_factory=lambda: Limit(_LOGINS_A_MINUTE))
    decisions: Limit = field(default_factory=lambda: Limit(_DECISIONS_A_MINUTE))
    templates: Environment = field(default_factory=lambda: build_templates())  # noqa: PLW0108 (defined below)

    # Pages

    def page(self, template: str, *, status: int = 200, session: Session | None = None, **values: Any) -> web.Response:
        """A page from a template; a session makes it one for somebody who is signed in."""
        form_token = self.form_token(session.token) if session else ""
        text = self.templates.get_template(template).render(session=session, form_token=form_token, **values)
        return web.Response(text=text, status=status, content_type="text/html", charset="utf-8")

    def handler(self, handle: Handler, *, referrer: Referrer = "same-origin") -> Handler:
        """The handler with our headers; what goes wrong becomes a page. Paths are not logged: some hold tokens."""

        async def safe(request: web.Request) -> web.StreamResponse:
            with concerning(trace_id=new_trace_id()):
                return await answered(request)

        async def answered(request: web.Request) -> web.StreamResponse:
            try:
                response = await handle(request)
            except SignInFirst as exc:
                response = see_other("/login" if exc.then == "/approvals" else f"/login?then={exc.then}")
            except Refused as exc:
                response = self._refusal(exc)
            except (*AWAY, TimeoutError) as exc:
                log.warning("a page was not made: %s: %s", type(exc).__name__, str(exc).strip())
                response = self._refusal(_NOT_NOW)
            except FlowError as exc:
                response = self._refusal(_refused(exc))
            except web.HTTPException:
                raise
            except Exception:
                log.exception("a page failed: %s %s", request.method, _pattern(request))
                response = self._refusal(_BROKEN)
            if not response.prepared:
                response.headers.update(_HEADERS | {"Referrer-Policy": referrer} | _copied(response))
            return response

        return safe

    def _refusal(self, refused: Refused) -> web.Response:
        response = self.page("message.html", status=refused.status, title=refused.title, text=refused.text)
        if refused.retry_after_s is not None:
            response.headers["Retry-After"] = str(refused.retry_after_s)
        return response

    # Cookies

    def cookie_name(self, name: str) -> str:
        """Browsers take `__Host-` only with Secure, for the whole host, and from that host alone."""
        return f"__Host-{name}"

    def set_cookie(
        self, response: web.Response, name: str, value: str, *, strict: bool = False, max_age_s: int | None = None
    ) -> None:
        response.set_cookie(
            self.cookie_name(name),
            value,
            max_age=max_age_s,
            path="/",
            secure=True,
            httponly=True,
            samesite="Strict" if strict else "Lax",
        )

    def drop_cookie(self, response: web.Response, name: str) -> None:
        response.del_cookie(self.cookie_name(name), path="/", secure=True, httponly=True, samesite="Lax")

    def cookie(self, request: web.Request, name: str) -> str | None:
        return request.cookies.get(self.cookie_name(name))

    def signed(self, text: str, *, use: str) -> str:
        return f"{text}.{self._mac(use, text)}"

    def unsigned(self, given: str | None, *, use: str) -> str | None:
        """What was signed for this use; None for everything else."""
        text, dot, mac = (given or "").rpartition(".")
        return text if dot and _same(mac, self._mac(use, text)) else None

    def _mac(self, use: str, text: str) -> str:
        data = f"{use}\0{text}".encode("utf-8", "surrogateescape")
        return hmac.new(self.secret, data, hashlib.sha256).hexdigest()

    # Who is signed in

    def begin(self, response: web.Response, token: str) -> None:
        """The answer that signs somebody in."""
        self.set_cookie(response, "session", self.signed(token, use="session"), max_age_s=SESSION_HOURS * 3600)

    async def session(self, request: web.Request) -> Session | None:
        """Who asks, if they are signed in, and whom they stand in for."""
        token = self.unsigned(self.cookie(request, "session"), use="session")
        return await on_pool(self.pool, lambda conn: _with_absent(conn, token)) if token else None

    async def signed_in(self, request: web.Request) -> Session:
        """Who asks. Raises SignInFirst."""
        session = await self.session(request)
        if session is None:
            raise SignInFirst(request.path if request.method == "GET" else "/approvals")
        also_concerning(approver=session.person.key)
        return session

    # Forms

    def form_token(self, holder: str) -> str:
        """What a form of this holder (a session's token, or a visitor's cookie and a link) carries."""
        return self._mac("form", holder)

    async def form(self, request: web.Request, holder: str) -> Form:
        """The form that was sent, once it is certain that it came from our page. Raises Refused."""
        self.check_origin(request)
        if request.content_type != "application/x-www-form-urlencoded":
            raise Refused(415, "Not understood", "Only forms are taken here.")
        try:
            raw = await read_at_most(request, _LARGEST_FORM)
        except BodyBroken as exc:
            raise Refused(400, "Nothing was done", "The form did not arrive as it was sent. Try again.") from exc
        if raw is None:
            raise Refused(413, "Too large", f"At most {_LARGEST_FORM} bytes are taken.")
        form = Form(_fields(raw))
        if not _same(form.one("form_token"), self.form_token(holder)):
            raise Refused(403, "Nothing was done", "The page was out of date. Go back, reload it, and try again.")
        return form

    def check_origin(self, request: web.Request) -> None:
        """Raise Refused unless a page of ours sent this.

        A page that sends no referrer sends the origin `null` with its forms; then the browser's own word must say that
        it was ours: https://fetch.spec.whatwg.org/#append-a-request-origin-header
        """
        origins = request.headers.getall("Origin", [])
        ours = origins == [self.url]
        silent = origins == ["null"] and request.headers.getall("Sec-Fetch-Site", []) == ["same-origin"]
        if not ours and not silent:
            raise Refused(403, "Nothing was done", f"This was not sent from a page of {self.url}: open it there.")

    def visitor(self, request: web.Request) -> str:
        """What tells visitors apart who are not signed in: the nonce in their cookie, or a new one."""
        return self.unsigned(self.cookie(request, "visitor"), use="visitor") or secrets.token_urlsafe(32)

    def known_visitor(self, request: web.Request) -> str:
        """The visitor that a form of ours was shown to. Raises Refused."""
        visitor = self.unsigned(self.cookie(request, "visitor"), use="visitor")
        if visitor is None:
            raise Refused(403, "Nothing was done", "The browser sent no cookie with it. Allow cookies, then try again.")
        return visitor

    def remember_visitor(self, response: web.Response, visitor: str) -> None:
        self.set_cookie(response, "visitor", self.signed(visitor, use="visitor"), strict=True)

    def count(self, limit: Limit, request: web.Request, who: str | None = None) -> None:
        """Raise Refused if this caller asks too often."""
        wait_s = limit.take(who or caller_of(request))
        if wait_s is not None:
            text = f"That was too often. Try again in {wait_s} seconds."
            raise Refused(429, "Too many requests", text, retry_after_s=wait_s)


def _fields(raw: bytes) -> dict[str, list[str]]:
    """The fields of a form, in our own encoding, whatever the sender calls it: some take minutes to decode."""
    fields: dict[str, list[str]] = {}
    try:
        pairs = parse_qsl(raw.decode("ascii"), keep_blank_values=True, errors="strict", max_num_fields=_MOST_FIELDS)
    except ValueError as exc:
        raise Refused(400, "Not understood", "The form is not as it was sent from here.") from exc
    for name, value in pairs:
        fields.setdefault(name, []).append(value)
    return fields


def see_other(path: str) -> web.Response:
    """Go there, by GET."""
    return web.Response(status=303, headers={"Location": path})


def static_files() -> Handler:
    """The handler of /static/{name}: our own files, and nothing else."""
    folder = resources.files("bot") / "static"
    files = {file.name: file.read_bytes() for file in folder.iterdir() if file.name.rpartition(".")[2] in _TYPES}

    async def handle(request: web.Request) -> web.Response:
        name = request.match_info["name"]
        if name not in files:
            raise web.HTTPNotFound
        kind = _TYPES[name.rpartition(".")[2]]
        # A page names each file with its version, so whatever was fetched stays good.
        headers = {"Cache-Control": "public, max-age=31536000, immutable", "X-Content-Type-Options": "nosniff"}
        return web.Response(body=files[name], content_type=kind, charset="utf-8", headers=headers)

    return handle


_TYPES = {"css": "text/css", "js": "text/javascript", "svg": "image/svg+xml"}

_NOT_NOW = Refused(
    503, "Not now", "The database is away, so nothing can be recorded. Try again in a moment: twice is once."
)
_BROKEN = Refused(500, "Something is wrong here", "It was written to the log. What you did may not have been recorded.")
_TITLES = {
    403: "You may not decide this",
    404: "There is nothing here",
    409: "Not recorded",
    410: "Too late",
    503: "Not now",
}


def _refused(exc: FlowError) -> Refused:
    status = problem_of(exc).status
    return Refused(status, _TITLES.get(status, "Not possible"), sentence(exc))


def _pattern(request: web.Request) -> str:
    """The path with its placeholders."""
    resource = request.match_info.route.resource
    return resource.canonical if resource else "?"


def _copied(response: web.StreamResponse) -> dict[str, str]:
    """Headers that a handler has set itself stay."""
    return {name: response.headers[name] for name in _HEADERS if name in response.headers}


async def _with_absent(conn: Connection, token: str) -> Session | None:
    session = await session_of(conn, token)
    return session and replace(session, person=await with_absent(conn, session.person))


def _same(given: str, ours: str) -> bool:
    return hmac.compare_digest(given.encode("utf-8", "surrogatepass"), ours.encode())


# Templates


def build_templates() -> Environment:
    environment = Environment(
        loader=PackageLoader("bot", "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    folder = resources.files("bot") / "static"
    versions = {file.name: hashlib.sha256(file.read_bytes()).hexdigest()[:12] for file in folder.iterdir()}
    environment.globals["steps"] = STEPS
    environment.globals["static"] = lambda name: f"/static/{name}?v={versions[name]}"
    environment.filters |= {"seen": seen, "money": money, "utc": _utc, "state": state_of, "about": about}
    environment.filters |= {"amount": amount_of, "name": name_of}
    environment.filters |= {
        "question": question_of,
        "subject": subject_of,
        "json": visible_json,
        "said": answer_in_words,
    }
    return environment


def seen(text: object) -> str:
    """A stranger's text: whatever hides or reorders shows as an escape."""
    return visible(str(text or ""))


def money(claim: dict[str, Any]) -> str:
    """1,250.00 USD; nothing for a question of another flow that is about none."""
    if claim.get("kind") and claim.get("amount") is None:
        return ""
    try:
        return f"{Decimal(claim['amount']):,} {claim['currency']}"
    except (KeyError, ArithmeticError, TypeError):
        return "no amount"


def subject_of(request: dict[str, Any]) -> str:
    """A request in a line: 1,250.00 USD, and what another flow calls it."""
    question = question_of(request)
    if question.kind == "claim":
        return money(request)
    return f"{money(request)}: {question.title}" if question.amount else question.title


def amount_of(approval: Approval) -> str:
    """What a list has for an amount."""
    return CHANGED if approval.tampered else money(approval.request)


def name_of(approval: Approval) -> str:
    """The same where a line is all there is."""
    return CHANGED if approval.tampered else subject_of(approval.request)


def about(approval: Approval) -> str:
    """What stands beside the amount in a list."""
    if approval.tampered:
        return approval.thread_id
    question = question_of(approval.request)
    return (question.payee or approval.thread_id) if question.kind == "claim" else question.title


def state_of(approval: Approval, thread: Thread) -> tuple[str, str]:
    """Where a request is, in a word for people, and the tone to say it in."""
    if approval.tampered:
        return CHANGED.capitalize(), "bad"
    if approval.status == "pending":
        return "Waiting", "waiting"
    if approval.status == "approved":
        return {
            "paid": ("Paid", "good"),
            "failed": ("Failed", "bad"),
            "unknown": ("Payment unknown", "bad"),
            "stuck": ("Stuck", "bad"),
        }.get(thread.status, ("Approved", "good"))
    return approval.status.capitalize(), "bad" if approval.status == "rejected" else "quiet"


def _utc(at: datetime) -> str:
    return f"{at:%-d %b %Y, %H:%M} UTC"
