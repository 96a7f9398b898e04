"""Every door, and everybody who is not of the workspace: nothing of it is seen there, or done to it.

Whoever comes has the same member id, the same name, the same user group and the same place in every list as whoever
may: only the workspace is another. Whoever is of it must get through, or the refusals would prove nothing. What is
asked for by its id is answered as an id is that nobody has. A new door is a new row in `tests.workspace_doors`.
"""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from datetime import UTC, datetime

import aiohttp
import pytest

from flow.approvals import approval_of, decide
from flow.database import Connection, ring
from flow.delegations import with_absent
from flow.errors import NotAllowed, UnknownApproval
from flow.inbox import Search, count_mine, find, may_see, waits_for
from flow.inputs import mail_person, parse_claim
from flow.links import make_link
from flow.model import Person
from flow.payments import pay_from_ledger
from flow.policy import Tier
from flow.sessions import make_login_link
from flow.standing import check_person
from flow.tokens import SCOPES, create_token
from tests.api_door import Program
from tests.browsing import Visitor
from tests.many_workspaces import SameInAll, installation, member
from tests.openid_server import openid_server
from tests.people import YES, ask, stand_in
from tests.processes import ROOT
from tests.rows import all_rows, one_row, value
from tests.slack_door import Caller
from tests.workspace_doors import API, GONE, NONE, NOWHERE, OPERATOR, OURS, PAGES, SLACK, THEIRS, Door, Request, World

# Whoever is paid tells whose request it is.
PAYEES = {OURS: "Northwind", THEIRS: "Contoso", GONE: "Initech"}
TOKENS = tuple(f"api:{workspace.lower()}" for workspace in PAYEES)
# What there is in each workspace: whom it asks, and who asked for it. The lists have the people of all.
REQUESTS = {
    "listed": (("U01ALICE", "@finance", "alice@example.com", "webhook:acme:carol", "api:operator", *TOKENS), "U05EVE"),
    "for a group": (("@finance",), "U05EVE"),
    "for who is away": (("U01ALICE",), "U05EVE"),
    "asked by a program": (("U01ALICE",), "api:{}"),
    "over": (("U01ALICE",), "U05EVE"),
}
DOORS = {"Slack": SLACK, "page": PAGES, "API": API}


@pytest.fixture
async def world(database_url: str, conn: Connection) -> AsyncIterator[World]:
    # Alice of each may see everything, in hers.
    viewers = frozenset(f"slack:{workspace}/U01ALICE" for workspace in (*PAYEES, NOWHERE))
    async with AsyncExitStack() as stack:
        enter = stack.enter_async_context
        slacks, openid = await enter(SameInAll()), await enter(openid_server())
        bot = await enter(installation(database_url, slacks, viewers=viewers, openid_url=openid.url))
        tokens = {OPERATOR: await create_token(conn, "operator", SCOPES, by="cli:ann")}
        for workspace in PAYEES:
            await bot.install(conn, workspace)
            await _fill(conn, workspace)
            name = workspace.lower()
            tokens[workspace] = await create_token(conn, name, SCOPES, by="cli:ann", workspace=workspace)
        await bot.uninstall(conn, GONE)
        yield World(
            conn=conn,
            bot=bot,
            caller=await enter(Caller(bot.url)),
            program=await enter(Program(bot.url)),
            visitor=await enter(Visitor(bot.site.url)),
            openid=openid,
            tokens=tokens,
        )


async def _fill(conn: Connection, workspace: str) -> None:
    """The same in each."""
    for name, (approvers, requested_by) in REQUESTS.items():
        tier = Tier(name="approval", approvers=approvers)
        thread_id, by = _thread(name, workspace), requested_by.format(workspace.lower())
        await ask(conn, thread_id, tier=tier, requested_by=by, payee=PAYEES[workspace], workspace=workspace)
    await stand_in(conn, member(workspace, "U01ALICE"), "U02BOB")
    over = await request_of(conn, "over", workspace)
    await decide(conn, over.interrupt_id, member(workspace, "U01ALICE"), YES)
    claim = parse_claim(amount="250", currency="USD", payee=PAYEES[workspace])
    await pay_from_ledger(conn, over.thread, claim, [])


def _thread(name: str, workspace: str) -> str:
    return f"{name.replace(' ', '-')}-of-{workspace}"


async def request_of(conn: Connection, name: str, workspace: str) -> Request:
    query = "SELECT thread_id AS thread, interrupt_id, request_hash AS digest FROM approvals WHERE thread_id = %s"
    return Request(**await one_row(conn, query, _thread(name, workspace)))


def rows(doors: Mapping[str, Sequence[Door]], *workspaces: str) -> list[object]:
    """A row of the table for each door and each that somebody comes from."""
    return [
        pytest.param(door, workspace, id=f"{kind}: {door}, {workspace}")
        for kind, each in doors.items()
        for door in each
        for workspace in workspaces
    ]


SIGN_IN = next(door for door in PAGES if door.name == "Sign in with Slack")
OF_OPERATORS = {"API": [door for door in API if door.operator]}
LISTS = {kind: [door for door in doors if door.does == "sees" and not door.by_id] for kind, doors in DOORS.items()}


@pytest.mark.parametrize(("door", "workspace"), [*rows(DOORS, OURS), *rows(OF_OPERATORS, OPERATOR)])
async def test_whoever_is_of_the_workspace_gets_through(world: World, door: Door, workspace: str) -> None:
    request, before = await request_of(world.conn, door.about, OURS), await world.all_but_theirs()
    said = await door.run(world, workspace, request)
    if door.does == "changes":
        assert await world.all_but_theirs() != before, said
    else:
        assert said.startswith(("200 ", "303 ")) and (PAYEES[OURS] in said or request.thread in said), said


@pytest.mark.parametrize(("door", "strangers"), rows(DOORS, "strangers"))
async def test_whoever_is_not_sees_nothing_of_it_and_changes_nothing(world: World, door: Door, strangers: str) -> None:
    request, before = await request_of(world.conn, door.about, OURS), await world.all_but_theirs()
    # No token is ever made for a workspace that nobody knows.
    for workspace in (THEIRS, GONE) if door in API else (THEIRS, GONE, NOWHERE):
        world.visitor.cookies.clear()
        said = await door.run(world, workspace, request)
        assert await world.all_but_theirs() == before, (strangers, workspace, said)
        assert PAYEES[OURS] not in said, workspace
        if door.by_id:
            assert _without_ids(said, request) == _without_ids(await door.run(world, workspace, NONE), NONE), workspace
        else:
            assert f"of-{OURS}" not in said and request.interrupt_id not in said, workspace


def _without_ids(said: str, request: Request) -> str:
    for each in (request.interrupt_id, request.digest, request.thread):
        said = said.replace(each, "…")
    return said


@pytest.mark.parametrize(("door", "workspace"), rows(LISTS, THEIRS))
async def test_each_list_has_what_is_of_its_own(world: World, door: Door, workspace: str) -> None:
    said = await door.run(world, workspace, NONE)
    assert PAYEES[workspace] in said or f"of-{workspace}" in said, said


async def test_a_name_on_the_list_says_nothing_in_another_workspace(conn: Connection, world: World) -> None:
    """The rule itself, whichever door somebody comes to."""
    approval = await approval_of(conn, (await request_of(conn, "listed", OURS)).interrupt_id)
    alice, now, everybody = member(OURS, "U01ALICE"), datetime.now(UTC), frozenset({"U01ALICE"})
    assert check_person(approval, alice).listed_as == "U01ALICE"
    assert waits_for(approval, alice, now) and may_see(approval, alice, everybody)
    for stranger in (
        member(THEIRS, "U01ALICE"),
        # From before there were several, or by a door that does not say.
        replace(alice, workspace=None),
        replace(mail_person("alice@example.com"), workspace=THEIRS),
        Person(key="api:operator", name="operator", names=frozenset({"api:operator"}), workspace=THEIRS),
    ):
        with pytest.raises(UnknownApproval):
            check_person(approval, stranger)
        assert not waits_for(approval, stranger, now) and not may_see(approval, stranger, everybody)


def test_a_request_is_read_by_its_id_for_somebody() -> None:
    """At no door for anybody, but by the link that is for it, and to show it where it was asked."""
    reads = re.compile(r"\bapprovals?_of\(")
    found = {file.name for file in (ROOT / "bot").glob("*.py") if reads.search(file.read_text())}
    assert found == {"links.py", "outlet.py", "demo.py"}


# Whose somebody is, in a grid


@pytest.fixture
async def grid(world: World, conn: Connection) -> str:
    """The app is installed in a whole grid, and Alice is of a team of it, T05TEAM; what waits there lists her."""
    workspace = "E01GRID"
    await world.bot.install(conn, workspace, is_grid=True)
    kind = {"team_id": "T05TEAM", "enterprise_user": {"enterprise_id": workspace, "teams": ["T05TEAM"]}}
    world.bot.slacks.kinds["U01ALICE"] = kind
    await ask(conn, "grids", requested_by="U05EVE", payee="Globex", workspace=workspace)
    return workspace


async def sign_in_as(world: World, team: str, grid: str | None) -> str:
    """What Alice of this team, in this grid, sees."""
    world.visitor.cookies.clear()
    world.openid.claims = {"https://slack.com/enterprise_id": grid}
    return await SIGN_IN.run(world, team, NONE)


async def test_a_member_of_a_grid_is_of_it_unless_their_team_has_the_app(
    world: World, conn: Connection, grid: str
) -> None:
    assert "Globex" in await sign_in_as(world, "T05TEAM", grid)
    person = await one_row(conn, "SELECT names, workspace FROM sessions ORDER BY created_at DESC LIMIT 1")
    names = ["U01ALICE", f"slack:{grid}/U01ALICE", "slack:T05TEAM/U01ALICE"]
    assert person == {"names": sorted(names), "workspace": grid}
    # Without the grid's word, or with another's, nobody knows the team.
    assert (await sign_in_as(world, "T05TEAM", None)).startswith("403 ")
    assert (await sign_in_as(world, "T05TEAM", "E02OTHER")).startswith("403 ")
    # A member with that id of another team of the grid is somebody else: the list does not have them.
    assert "Globex" not in await sign_in_as(world, "T06TEAM", grid)
    await world.bot.install(conn, "T05TEAM")
    assert "Globex" not in await sign_in_as(world, "T05TEAM", grid)
    assert await value(conn, "SELECT workspace FROM sessions ORDER BY created_at DESC LIMIT 1") == "T05TEAM"


# What ends with a workspace, and what is of none


async def test_a_session_a_login_link_and_a_token_end_with_their_workspace(world: World, conn: Connection) -> None:
    link = await make_login_link(conn, member(OURS, "U01ALICE"), by="cli:ann")
    form_token = await world.sign_in(OURS)
    assert (await world.visitor.get("/approvals")).status == 200
    await world.bot.uninstall(conn, OURS)
    assert (await world.visitor.get("/approvals")).headers["Location"] == "/login"
    # An EventSource asks no more after this.
    assert (await world.visitor.get("/approvals/events")).status == 204
    assert (await world.visitor.get(f"/login/{link}")).status == 410
    assert (await world.visitor.post(f"/login/{link}", {"form_token": form_token})).status in (403, 410)
    headers = {"Authorization": f"Bearer {world.tokens[OURS]}"}
    assert (await world.program.ask("GET", "/api/threads", headers=headers)).status == 401


async def test_a_stream_ends_with_the_workspace_of_its_session(world: World, conn: Connection) -> None:
    await world.sign_in(OURS)
    cookie = "; ".join(f"{name}={each}" for name, each in world.visitor.cookies.items())
    url = f"{world.visitor.url}/approvals/events"
    async with aiohttp.ClientSession() as http, http.get(url, headers={"Cookie": cookie}) as stream:
        assert await stream.content.readline() == b"retry: 2000\n"
        await world.bot.uninstall(conn, OURS)
        await ring(conn)
        assert (await stream.content.read()).strip() == b""


async def test_whoever_is_of_no_workspace_decides_in_each_that_names_them(world: World, conn: Connection) -> None:
    for workspace in (OURS, THEIRS):
        request = await request_of(conn, "listed", workspace)
        said = {"decision": "approve", "approver": "carol"}
        answered = await world.program.decide_signed(request.interrupt_id, said, webhook_id=f"msg_{workspace}")
        assert (answered.status, answered.body["approval"]["workspace"]) == (200, workspace)


async def test_a_link_leads_to_its_own_request_and_no_further(world: World, conn: Connection) -> None:
    request = await request_of(conn, "listed", OURS)
    approval, alice = await approval_of(conn, request.interrupt_id), mail_person("alice@example.com")
    path = f"/a/{(await make_link(conn, approval, alice, by='cli:ann', with_code=False)).token}"
    page = await world.visitor.get(path)
    assert PAYEES[OURS] in page.text and PAYEES[THEIRS] not in page.html
    # Whoever has a link has no session, and none of its links gives them one.
    assert page.links == ["#main", "/approvals"]
    fields = page.form("Approve").fields | {"verdict": "approve"}
    assert (await world.visitor.post(path, fields)).status == 303
    done = await world.visitor.get("/a/done")
    assert PAYEES[OURS] in done.text and PAYEES[THEIRS] not in done.html and done.links == page.links
    assert await all_rows(conn, "SELECT interrupt_id FROM decisions WHERE door = 'link'") == [
        {"interrupt_id": request.interrupt_id}
    ]
    assert (await world.visitor.get("/approvals")).status == 303


async def test_a_key_of_two_programs_is_two_keys(world: World) -> None:
    async def start(workspace: str) -> tuple[int, str]:
        headers = {"Authorization": f"Bearer {world.tokens[workspace]}", "Idempotency-Key": "k1"}
        claim = {"thread": "t1", "amount": "20.00", "payee": "Acme Secrets"}
        answered = await world.program.post("/api/threads", claim, headers=headers)
        return answered.status, str(answered.body)

    assert (await start(OURS))[0] == 201
    assert (await start(OURS))[0] == 201
    status, said = await start(THEIRS)
    assert status == 409 and "Acme Secrets" not in said and "20.00" not in said


async def test_an_operator_says_in_which_workspace_something_is_started(world: World, conn: Connection) -> None:
    async def start(thread: str, **where: str) -> tuple[int, str]:
        headers = {"Authorization": f"Bearer {world.tokens[OPERATOR]}"}
        claim = {"thread": thread, "amount": "20.00"} | where
        answered = await world.program.post("/api/threads", claim, headers=headers)
        return answered.status, str(answered.body.get("detail"))

    status, detail = await start("t1")
    assert status == 422 and "say which" in detail
    status, detail = await start("t1", workspace=NOWHERE)
    assert status == 422 and "no workspace" in detail
    status, detail = await start("t1", workspace=GONE)
    assert status == 422 and "uninstalled" in detail
    assert (await start("t1", workspace=THEIRS))[0] == 201
    assert await value(conn, "SELECT workspace FROM threads WHERE thread_id = 't1'") == THEIRS
    status, detail = await start("t1", workspace=OURS)
    assert status == 409 and "another workspace" in detail


async def test_whoever_is_away_in_one_workspace_is_there_in_the_other(world: World, conn: Connection) -> None:
    """An address is one person in all of them, and may be away in one."""
    carol = mail_person("carol@example.com")
    lists = Tier(name="approval", approvers=("carol@example.com",))
    here, there = [await ask(conn, f"carols-{w}", tier=lists, workspace=w) for w in (OURS, THEIRS)]
    await stand_in(conn, replace(carol, workspace=OURS), "dave@example.com")
    dave = mail_person("dave@example.com")
    acting = await with_absent(conn, dave)
    found = await find(conn, acting, Search(), viewers=(), limit=10)
    assert [each.interrupt_id for each in found] == [here] and await count_mine(conn, acting) == 1
    with pytest.raises(NotAllowed):
        await decide(conn, there, dave, YES)
    assert (await decide(conn, here, dave, YES)).approval.decisions[0].for_person == carol.key
