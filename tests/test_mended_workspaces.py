"""What is of one workspace stays there, whoever's bot comes across it; and a grid's member is one person."""

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
from tests.many_slacks import POLICY, ManySlacks, install
from tests.people import ask
from tests.rows import value

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
    with pytest.raises(FlowError, match=r"(?i)own|requested|yourself"):
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
