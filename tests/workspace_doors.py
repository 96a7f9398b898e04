"""Every door, as somebody from any workspace comes to it: one row each, and what they were told at it."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, LiteralString

import aiohttp

from flow.database import Connection
from tests.api_door import Program
from tests.browsing import PageSeen, Visitor, signed_in_at_once
from tests.home_door import command_body, opened_body
from tests.many_workspaces import Installation, member
from tests.openid_server import OpenIdServer
from tests.rows import all_rows
from tests.slack_door import Caller, typed_in
from tests.slack_requests import FORM, JSON, SlackRequest, altered_click_body, button, payload_body

# Where it was asked; another one with the same people; one that has uninstalled the app; one that never had it.
OURS, THEIRS, GONE, NOWHERE = "T01OURS", "T02THEIRS", "T03GONE", "T04NOWHERE"
# Comes with a token of the API that was made for none.
OPERATOR = "an operator"


@dataclass(frozen=True, kw_only=True)
class Request:
    """What waits: its thread, its id and its hash."""

    thread: str
    interrupt_id: str
    digest: str

    @property
    def value(self) -> str:
        """What a button of it carries."""
        return json.dumps({"interrupt": self.interrupt_id, "hash": self.digest})


# What nobody has asked for.
NONE = Request(thread="nowhere", interrupt_id="f" * 32, digest="0" * 64)


@dataclass(frozen=True, kw_only=True)
class World:
    """An installation of several workspaces, and whatever people come with: `tokens` are by workspace."""

    conn: Connection
    bot: Installation
    caller: Caller
    program: Program
    visitor: Visitor
    openid: OpenIdServer
    tokens: dict[str, str]

    async def slack(self, body: bytes, content_type: str = FORM) -> str:
        """Slack sends this: what it and the person are told, once all of it is done."""
        known = len(self.bot.slacks.asked)
        request = SlackRequest(name="door", body=body, content_type=content_type, expected=range(200, 600))
        answered = await self.caller.send(request)
        await self.bot.background.drain(10.0)
        asked = self.bot.slacks.asked[known:]
        told = [str(each.arguments) for each in asked if each.method.startswith(("chat.", "views."))]
        with contextlib.suppress(TimeoutError):
            while True:
                told.append(json.dumps(await self.caller.reply(0.05)))
        return f"{answered.status} {answered.body} {' '.join(told)}"

    async def sign_in(self, workspace: str) -> str:
        """Alice of this workspace is signed in; the token of her forms."""
        person = member(workspace, "U01ALICE")
        token = await signed_in_at_once(self.conn, self.bot.site, self.visitor, person)
        return self.bot.site.form_token(token)

    async def all_but_theirs(self) -> dict[str, list[dict[str, Any]]]:
        """Every row that is not of THEIRS."""
        return {table: await all_rows(self.conn, query, THEIRS) for table, query in _ROWS.items()}


_ROWS: dict[str, LiteralString] = {
    "threads": "SELECT * FROM threads WHERE workspace IS DISTINCT FROM %s ORDER BY thread_id",
    "approvals": "SELECT * FROM approvals WHERE workspace IS DISTINCT FROM %s ORDER BY interrupt_id",
    "delegations": "SELECT * FROM delegations WHERE workspace IS DISTINCT FROM %s ORDER BY id",
    "events": "SELECT id, workspace FROM events WHERE workspace IS DISTINCT FROM %s ORDER BY id",
    "decisions": "SELECT d.* FROM decisions d JOIN approvals a USING (interrupt_id)"
    " WHERE a.workspace IS DISTINCT FROM %s ORDER BY interrupt_id, person",
    "messages": "SELECT m.* FROM messages m JOIN approvals a USING (interrupt_id)"
    " WHERE a.workspace IS DISTINCT FROM %s ORDER BY m.channel, m.ts",
    "notices": "SELECT n.* FROM notices n JOIN threads t USING (thread_id)"
    " WHERE t.workspace IS DISTINCT FROM %s ORDER BY id",
    "audit": "SELECT l.id, l.kind FROM audit l JOIN threads t USING (thread_id)"
    " WHERE t.workspace IS DISTINCT FROM %s ORDER BY l.id",
}

Run = Callable[[World, str, Request], Awaitable[str]]


@dataclass(frozen=True, kw_only=True)
class Door:
    """`run` comes to it from a workspace, with a request, and gives back whatever it was told.

    `does`: whoever gets through has changed something there, or sees it. `by_id`: they say what they mean, so that it
    must be as unknown to others as what is not there. `about`: which of the requests that wait.
    """

    name: str
    run: Run
    does: Literal["changes", "sees"]
    by_id: bool = True
    about: str = "listed"
    # Whether a token of the API that was made for no workspace gets through, too.
    operator: bool = True

    def __str__(self) -> str:
        return self.name


# Slack


def _who(workspace: str, user_id: str) -> dict[str, Any]:
    """The same person, whichever workspace they are of."""
    user = {"id": user_id, "name": "alice", "username": "alice", "team_id": workspace}
    return {"team": {"id": workspace, "domain": "x"}, "enterprise": None, "user": user}


def _press(action: str, by: str = "U01ALICE", at: dict[str, Any] | None = None) -> Run:
    """A button of a request: on a card, or `at` another place."""

    async def run(world: World, workspace: str, request: Request) -> str:
        pressed = {"actions": [button(action, request.value)], "response_url": world.caller.response_url}
        return await world.slack(altered_click_body(**_who(workspace, by) | pressed | (at or {})))

    return run


_HOME = {"id": "V2", "type": "home", "private_metadata": "", "state": {"values": {}}}
_IN_HOME = {"container": {"type": "view", "view_id": "V2"}, "view": _HOME}
_IN_LIST = {"container": {"type": "message", "channel_id": "C01GEN", "message_ts": "9.9", "is_ephemeral": True}}
_IN_MODAL = {"container": {"type": "view", "view_id": "V1"}, "view": {"id": "V1", "type": "modal", "hash": "h"}}


def _send(callback_id: str, metadata: Callable[[Request], str] = lambda request: request.value, **typed: str) -> Run:
    """A modal that was filled in, and what it carries."""

    async def run(world: World, workspace: str, request: Request) -> str:
        view = {"id": "V1", "type": "modal", "callback_id": callback_id, "private_metadata": metadata(request)}
        sent = {"type": "view_submission", "view": view | {"state": {"values": typed_in(**typed)}}}
        return await world.slack(payload_body(_who(workspace, "U01ALICE") | sent))

    return run


def _chosen(request: Request) -> str:
    return json.dumps([[request.interrupt_id, request.digest, "something"]])


def _type(text: str, by: str = "U01ALICE") -> Run:
    async def run(world: World, workspace: str, _: Request) -> str:
        return await world.slack(command_body(text, user=by, response_url=world.caller.response_url, team_id=workspace))

    return run


async def _open_home(world: World, workspace: str, _: Request) -> str:
    return await world.slack(opened_body("U01ALICE", team=workspace), JSON)


_CLAIM = {"amount": "20", "currency": "USD", "payee": "ACME", "note": ""}

SLACK: Sequence[Door] = (
    Door(name="Approve", run=_press("approve"), does="changes"),
    Door(name="Approve, for @finance", run=_press("approve", "U06FINN"), does="changes", about="for a group"),
    Door(name="Approve, for who is away", run=_press("approve", "U02BOB"), does="changes", about="for who is away"),
    Door(name="Approve in App Home", run=_press("approve", at=_IN_HOME), does="changes"),
    Door(name="Approve in a list", run=_press("approve", at=_IN_LIST), does="changes"),
    Door(name="approve selected", run=_send("approve_selected", _chosen), does="changes"),
    Door(name="a copy becomes known", run=_press("details"), does="changes"),
    Door(name="Details", run=_press("details"), does="sees"),
    Door(name="Reject", run=_press("reject"), does="sees"),
    Door(name="Reject, sent", run=_send("reject", reason="no"), does="changes"),
    Door(name="Change amount", run=_press("change-amount"), does="sees"),
    Door(name="Change amount, sent", run=_send("change-amount", amount="200", reason=""), does="changes"),
    Door(name="Withdraw", run=_press("withdraw", "U05EVE", _IN_MODAL), does="changes"),
    Door(name="App Home", run=_open_home, does="sees", by_id=False),
    Door(name="/claims", run=_type(""), does="sees", by_id=False),
    Door(name="/claims mine", run=_type("mine", "U05EVE"), does="sees", by_id=False),
    Door(name="/claims all", run=_type("all"), does="sees", by_id=False),
    Door(name="/claims away", run=_type("away <@U03CAROL> until tomorrow"), does="changes", by_id=False),
    Door(name="/claims back", run=_type("back"), does="changes", by_id=False),
    Door(name="file a claim", run=_send("file_claim", lambda _: "", **_CLAIM), does="changes", by_id=False),
)


# Pages


def _look(path: str) -> Run:
    async def run(world: World, workspace: str, request: Request) -> str:
        await world.sign_in(workspace)
        return _said(await world.visitor.get(path.format(id=request.interrupt_id)))

    return run


def _fill_in(path: str, **fields: str) -> Run:
    """A form, with the token that a page of ours would have: whoever sends it may have been shown that page before."""

    async def run(world: World, workspace: str, request: Request) -> str:
        ids = {"id": request.interrupt_id, "hash": request.digest}
        sent = {"form_token": await world.sign_in(workspace)} | {n: each.format(**ids) for n, each in fields.items()}
        return _said(await world.visitor.post(path.format(**ids), sent))

    return run


async def _sign_in_with_slack(world: World, workspace: str, _: Request) -> str:
    world.openid.claims |= {"https://slack.com/team_id": workspace}
    to_slack = (await world.visitor.get("/login/slack")).headers["Location"]
    async with aiohttp.ClientSession() as http, http.get(to_slack, allow_redirects=False) as agreed:
        back = agreed.headers["Location"].removeprefix(world.visitor.url)
    return f"{_said(await world.visitor.get(back))} {_said(await world.visitor.get('/approvals?view=all'))}"


def _said(page: PageSeen) -> str:
    return f"{page.status} {page.headers.get('Location', '')} {page.text}"


_VERDICT = {"verdict": "approve", "request_hash": "{hash}", "reason": ""}

PAGES: Sequence[Door] = (
    Door(name="the inbox", run=_look("/approvals"), does="sees", by_id=False),
    Door(name="all that is seen", run=_look("/approvals?view=all"), does="sees", by_id=False),
    Door(name="a search", run=_look("/approvals?view=all&words=250"), does="sees", by_id=False),
    Door(name="the history", run=_look("/approvals?view=history"), does="sees", by_id=False, about="over"),
    Door(name="a request", run=_look("/approvals/{id}"), does="sees"),
    Door(name="its trace", run=_look("/approvals/{id}/trace"), does="sees"),
    Door(name="many, asked", run=_look("/approvals/bulk?item={id}"), does="sees"),
    Door(name="decide", run=_fill_in("/approvals/{id}", **_VERDICT), does="changes"),
    Door(name="another amount", run=_fill_in("/approvals/{id}/amount", amount="200", **_VERDICT), does="changes"),
    Door(name="many, approved", run=_fill_in("/approvals/bulk", item="{id}:{hash}", reason=""), does="changes"),
    Door(name="Sign in with Slack", run=_sign_in_with_slack, does="sees", by_id=False),
)


# The API


def _ask(method: str, path: str, body: Any = None) -> Run:
    async def run(world: World, workspace: str, request: Request) -> str:
        there = path.format(id=request.interrupt_id, thread=request.thread)
        headers = {"Authorization": f"Bearer {world.tokens[workspace]}"}
        answered = await world.program.ask(method, f"/api{there}", body, headers=headers)
        return f"{answered.status} {json.dumps(answered.body)}"

    return run


_APPROVE, _AMOUNT = {"decision": "approve"}, {"amount": "200"}
_NEW = {"thread": "new", "amount": "20.00"}

API: Sequence[Door] = (
    Door(name="a thread", run=_ask("GET", "/threads/{thread}"), does="sees"),
    Door(name="threads", run=_ask("GET", "/threads"), does="sees", by_id=False),
    Door(name="an approval", run=_ask("GET", "/approvals/{id}"), does="sees"),
    Door(name="approvals", run=_ask("GET", "/approvals"), does="sees", by_id=False),
    Door(name="decisions", run=_ask("GET", "/decisions"), does="sees", by_id=False, about="over"),
    Door(name="payments", run=_ask("GET", "/payments"), does="sees", by_id=False, about="over"),
    Door(name="events", run=_ask("GET", "/events"), does="sees", by_id=False),
    Door(name="decide", run=_ask("POST", "/approvals/{id}/decision", _APPROVE), does="changes"),
    Door(name="another amount", run=_ask("POST", "/approvals/{id}/amount", _AMOUNT), does="changes"),
    Door(
        name="withdraw",
        run=_ask("POST", "/threads/{thread}/withdrawal", {}),
        does="changes",
        about="asked by a program",
        operator=False,
    ),
    Door(name="start", run=_ask("POST", "/threads", _NEW), does="changes", by_id=False, operator=False),
    Door(name="start there", run=_ask("POST", "/threads", _NEW | {"workspace": OURS}), does="changes", by_id=False),
)
