"""Every door, and everybody who is not of the workspace: nothing of it is seen there, or done to it.

Whoever comes has the same member id, the same name, the same user group and the same place in every list as whoever
may: only the workspace is another. Whoever is of it must get through, or the refusals would prove nothing. What is
asked for by its id is answered as an id is that nobody has. A new door is a new row in `tests.workspace_doors`.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack

import pytest

from flow.approvals import approval_of, decide
from flow.database import Connection
from flow.inputs import mail_person, parse_claim
from flow.links import make_link
from flow.model import Person
from flow.payments import pay_from_ledger
from flow.policy import Tier
from flow.sessions import make_login_link
from flow.tokens import SCOPES, create_token
from tests.api_door import Program
from tests.browsing import Visitor
from tests.many_workspaces import SameInAll, installation, member
from tests.openid_server import openid_server
from tests.people import YES, ask, stand_in
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


def rows(doors: dict[str, Sequence[Door]], *workspaces: str) -> list[object]:
    """A row of the table for each door and each that somebody comes from."""
    return [
        pytest.param(door, workspace, id=f"{kind}: {door}, {workspace}")
        for kind, each in doors.items()
        for door in each
        for workspace in workspaces
    ]


OF_THE_API = {"API": API}
FOR_OPERATORS = {"API": [door for door in API if door.operator]}
LISTS = {kind: [door for door in doors if door.does == "sees" and not door.by_id] for kind, doors in DOORS.items()}
# No token is ever made for a workspace that nobody knows.
FOR_PEOPLE = {kind: doors for kind, doors in DOORS.items() if doors is not API}


@pytest.mark.parametrize(("door", "workspace"), [*rows(DOORS, OURS), *rows(FOR_OPERATORS, OPERATOR)])
async def test_whoever_is_of_the_workspace_gets_through(world: World, door: Door, workspace: str) -> None:
    request, before = await request_of(world.conn, door.about, OURS), await world.all_but_theirs()
    said = await door.run(world, workspace, request)
    if door.does == "changes":
        assert await world.all_but_theirs() != before, said
    else:
        assert said.startswith(("200 ", "303 ")) and (PAYEES[OURS] in said or request.thread in said), said


@pytest.mark.parametrize(("door", "workspace"), [*rows(DOORS, THEIRS, GONE), *rows(FOR_PEOPLE, NOWHERE)])
async def test_whoever_is_not_sees_nothing_of_it_and_changes_nothing(world: World, door: Door, workspace: str) -> None:
    request, before = await request_of(world.conn, door.about, OURS), await world.all_but_theirs()
    said = await door.run(world, workspace, request)
    assert await world.all_but_theirs() == before, said
    assert PAYEES[OURS] not in said
    if door.by_id:
        assert _without_ids(said, request) == _without_ids(await door.run(world, workspace, NONE), NONE)
    else:
        assert f"of-{OURS}" not in said and request.interrupt_id not in said


def _without_ids(said: str, request: Request) -> str:
    for each in (request.interrupt_id, request.digest, request.thread):
        said = said.replace(each, "…")
    return said


@pytest.mark.parametrize(("door", "workspace"), rows(LISTS, THEIRS))
async def test_each_list_has_what_is_of_its_own(world: World, door: Door, workspace: str) -> None:
    said = await door.run(world, workspace, NONE)
    assert PAYEES[workspace] in said or f"of-{workspace}" in said, said
