"""Where workspaces meet: a grid and its teams, a bot of another one, somebody who is in two, and one worker for all."""

from __future__ import annotations

from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta

import pytest

from bot.deliver import Deliverer
from bot.groups import OwnTeam
from bot.outlet import Outlet
from bot.people import slack_person
from bot.slack_api import client_with, slack_session
from flow import delegations
from flow.approvals import decide
from flow.database import Connection
from flow.errors import FlowError
from flow.model import Person, Verdict
from flow.policy import Tier
from flow.threads import insert_thread, settle_flows
from tests.many_slacks import POLICY, ManySlacks, install
from tests.people import ask
from tests.rows import all_rows, value

MANAGER = Tier(name="manager", approvers=("U01ALICE",))


@pytest.fixture
async def slack() -> AsyncIterator[ManySlacks]:
    async with ManySlacks() as slack:
        slack.team("T01ACME", "ACME", grid="E01GRID")
        slack.team("T02BETA", "Beta")
        slack.team("E01GRID", is_grid=True)
        yield slack


@pytest.mark.parametrize(("files_in", "clicks_in"), [("", "T02NEAR"), ("T01ACME", "T02NEAR"), ("T02NEAR", "T01ACME")])
async def test_a_member_of_a_grid_is_one_person_in_all_of_its_teams(
    conn: Connection, slack: ManySlacks, files_in: str, clicks_in: str
) -> None:
    grid = slack.teams["E01GRID"]
    await install(conn, slack, grid, channel="C01GEN", policy=POLICY)
    teams = ["T01ACME", "T02NEAR"]
    slack.kinds["U01ALICE"] = {
        "team_id": "T01ACME",
        "enterprise_user": {"id": "U01ALICE", "enterprise_id": "E01GRID", "teams": teams},
    }
    async with slack_session() as session:
        own = OwnTeam(client_with(next(iter(grid.tokens)), session, api_url=slack.api_url), workspace="E01GRID")

        async def came(team: str) -> Person:
            keys = await own.keys()
            grid_id = "E01GRID" if team else None
            person = slack_person(
                user_id="U01ALICE",
                name="Alice",
                team_id=team,
                enterprise_id=grid_id,
                own_team=keys,
                workspace="E01GRID",
            )
            return await own.placed(person)

        filed, clicked = await came(files_in), await came(clicks_in)
    asked = await ask(conn, "t1", tier=MANAGER, requested_by=filed.key, workspace="E01GRID")
    with pytest.raises(FlowError, match="nobody decides a request of their own"):
        await decide(conn, asked, clicked, Verdict(verdict="approve", door="slack"))


async def test_a_bot_of_one_token_posts_nothing_of_a_workspace(conn: Connection, slack: ManySlacks) -> None:
    await install(conn, slack, slack.teams["T01ACME"], channel="C01GEN", policy=POLICY)
    await ask(conn, "t1", tier=MANAGER, workspace="T01ACME")
    async with slack_session() as session:
        client = client_with(slack.token(slack.teams["T02BETA"]), session, api_url=slack.api_url)
        assert (await Deliverer(Outlet(client, "C_BETA")).sweep(conn))[0] == 0
    assert not slack.posts("T02BETA")
    assert "TOKEN_KEYS" in await value(conn, "SELECT error FROM notices WHERE thread_id = 't1' AND kind = 'card'")


@pytest.mark.parametrize("key", ["slack:T01ACME/U01ALICE", "mail:a@example.com"])
async def test_a_person_is_away_in_each_workspace_by_itself(conn: Connection, slack: ManySlacks, key: str) -> None:
    for workspace in ("T01ACME", "E01GRID"):
        await install(conn, slack, slack.teams[workspace], channel="C01GEN", policy=POLICY)
        person = Person(key=key, name="Alice", names=frozenset({key}), workspace=workspace)
        until = datetime.now(UTC) + timedelta(days=2)
        async with conn.transaction():
            await delegations.away(conn, person, to="b@example.com", until=until, made_by="cli:ann")
    assert await value(conn, "SELECT count(*) FROM delegations WHERE ended_at IS NULL") == 2


async def test_each_workspace_is_told_what_waits_for_a_flow_that_nobody_has(
    conn: Connection, slack: ManySlacks
) -> None:
    for workspace in ("T01ACME", "T02BETA"):
        await install(conn, slack, slack.teams[workspace], channel="C01GEN", policy=POLICY)
        for number in range(2):
            await insert_thread(
                conn,
                thread_id=f"{workspace}-{number}",
                flow="refunds",
                flow_version="1",
                input={},
                requested_by="cli:ann",
                workspace=workspace,
            )
    await conn.execute("UPDATE threads SET due_at = due_at - interval '11 seconds'")
    assert await settle_flows(conn, ["claims@1"]) == (0, 4)
    alarms = await all_rows(conn, "SELECT thread_id FROM notices WHERE kind = 'alarm' ORDER BY 1")
    assert [row["thread_id"] for row in alarms] == ["T01ACME-0", "T02BETA-0"]
