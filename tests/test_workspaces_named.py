"""At the command line somebody says which of several workspaces they mean; where there is one, they say nothing."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from flow.client import Client
from flow.database import Connection
from flow.errors import BadInput, WorkspaceClosed
from flow.settings import Settings
from flow.workspaces import uninstalled, workspace_of
from tests.command import Done, Terminal
from tests.many_workspaces import SameInAll, cipher_of, environment_of_many, install
from tests.rows import all_rows, one_row, value

OURS, THEIRS = "T01OURS", "T02THEIRS"


@pytest.fixture
async def slacks() -> AsyncIterator[SameInAll]:
    async with SameInAll() as running:
        yield running


@pytest.fixture
async def many(tmp_path: Path, database_url: str, conn: Connection, slacks: SameInAll) -> Terminal:
    """Where the app is installed in two workspaces."""
    terminal = Terminal(tmp_path, DATABASE_URL=database_url, SLACK_API_URL=slacks.api_url, **environment_of_many())
    for workspace in (OURS, THEIRS):
        await install(conn, cipher_of(terminal.environment), slacks, workspace)
    return terminal


async def typed(terminal: Terminal, line: str, *more: str) -> Done:
    return await terminal.run_meanwhile(*line.split(), *more)


async def test_a_start_says_in_which_workspace(many: Terminal, conn: Connection, slacks: SameInAll) -> None:
    silent = await typed(many, "start --thread t1 --amount 250")
    assert silent.code == 2 and "say which" in silent.err
    unknown = await typed(many, "start --thread t1 --amount 250 --workspace T09NONE")
    assert unknown.code == 1 and "no workspace" in unknown.err
    assert await all_rows(conn, "SELECT FROM threads") == []
    started = await typed(many, f"start --thread t1 --amount 250 --workspace {OURS} --json")
    assert (started.code, started.json["workspace"], started.json["status"]) == (0, OURS, "waiting")
    assert len(slacks.posts(OURS)) == 1 and slacks.posts(THEIRS) == []
    taken = await typed(many, f"start --thread t1 --amount 250 --workspace {THEIRS}")
    assert taken.code == 1 and "another workspace" in taken.err and "250" not in taken.err
    assert (await typed(many, f"start --thread t2 --amount 20 --workspace {THEIRS}")).code == 0
    listed = await typed(many, f"list --workspace {THEIRS} --json")
    assert [each["thread"] for each in listed.json] == ["t2"]
    assert len((await typed(many, "list --json")).json) == 2


async def test_a_token_may_be_of_one_workspace(many: Terminal, conn: Connection) -> None:
    assert (await typed(many, f"tokens create one --scope read --workspace {OURS}")).code == 0
    assert (await typed(many, "tokens create all --scope read")).code == 0
    assert (await typed(many, "tokens create none --scope read --workspace T09NONE")).code == 1
    assert f"one: read in {OURS}; by" in (await typed(many, "tokens list")).out
    listed = (await typed(many, "tokens list --json")).json
    assert [(each["name"], each["workspace"]) for each in listed] == [("all", None), ("one", OURS)]
    data = await value(conn, "SELECT data FROM audit WHERE for_whom = 'api:one'")
    assert data == {"scopes": ["read"], "workspace": OURS}


async def test_a_member_of_slack_is_signed_in_to_their_workspace(
    many: Terminal, conn: Connection, slacks: SameInAll
) -> None:
    assert (await typed(many, "login --as U01ALICE")).code == 2
    assert (await typed(many, f"login --as U01ALICE --workspace {OURS}")).code == 0
    link = await one_row(conn, "SELECT person, names, workspace FROM login_links")
    key = f"slack:{OURS}/U01ALICE"
    assert link == {"person": key, "names": sorted(["U01ALICE", key]), "workspace": OURS}
    # A guest from elsewhere, in a channel that is shared: not the member with that id.
    assert (await typed(many, f"login --as slack:T08GUEST/U01ALICE --workspace {OURS}")).code == 0
    names = await value(conn, "SELECT names FROM login_links WHERE person <> %s", key)
    assert names == ["slack:T08GUEST/U01ALICE"]
    assert (await typed(many, "login --as alice@example.com")).code == 0
    assert await value(conn, "SELECT workspace FROM login_links WHERE person LIKE 'mail:%%'") is None
    await install(conn, cipher_of(many.environment), slacks, "E01GRID", is_grid=True)
    bare = await typed(many, "login --as U01ALICE --workspace E01GRID")
    assert bare.code == 1 and "a whole grid" in bare.err
    assert (await typed(many, "login --as slack:T05TEAM/U01ALICE --workspace E01GRID")).code == 0
    names = await value(conn, "SELECT names FROM login_links WHERE workspace = 'E01GRID'")
    assert names == sorted(["U01ALICE", "slack:E01GRID/U01ALICE", "slack:T05TEAM/U01ALICE"])
    assert await uninstalled(conn, await workspace_of(conn, OURS), by="slack")
    gone = await typed(many, f"login --as U01ALICE --workspace {OURS}")
    assert gone.code == 1 and "uninstalled" in gone.err


async def test_somebody_is_away_in_one_workspace(many: Terminal, conn: Connection, slacks: SameInAll) -> None:
    assert (await typed(many, "away --as U01ALICE --to U02BOB --until tomorrow")).code == 2
    for workspace in (OURS, THEIRS):
        made = await typed(many, f"away --as U01ALICE --to U02BOB --until tomorrow --workspace {workspace} --json")
        assert (made.code, made.json["workspace"]) == (0, workspace), made.err
    assert [post["channel"] for post in slacks.posts(OURS)] == ["U02BOB"]
    assert (await typed(many, f"away --as U01ALICE --back --workspace {OURS}")).code == 0
    assert [each["workspace"] for each in (await typed(many, "away --json")).json] == [THEIRS]
    assert f"(slack:{THEIRS}/U01ALICE) in {THEIRS} until" in (await typed(many, "away")).out


@pytest.mark.parametrize(
    "line",
    [
        "start --thread t1 --amount 20",
        "list",
        "tokens create one --scope read",
        "login --as alice@example.com",
        "away --as alice@example.com --to bob@example.com --until tomorrow",
    ],
)
async def test_where_there_is_one_workspace_nobody_names_it(tmp_path: Path, database_url: str, line: str) -> None:
    done = await typed(Terminal(tmp_path, DATABASE_URL=database_url), f"{line} --workspace {OURS}")
    assert done.code == 2 and "leave it out" in done.err


async def test_python_names_it_too(many: Terminal, conn: Connection) -> None:
    given = {name.lower(): each for name, each in many.environment.items()}
    fields = {name: each for name, each in given.items() if name in Settings.model_fields}
    async with Client.of(Settings(**fields)) as client:  # type: ignore[arg-type]
        with pytest.raises(BadInput, match="say which"):
            await client.start("claims", "t1", {"amount": "20"}, requested_by="api:shop")
        thread = await client.start("claims", "t1", {"amount": "20"}, requested_by="api:shop", workspace=OURS)
        assert thread.workspace == OURS
        assert await uninstalled(conn, await workspace_of(conn, OURS), by="slack")
        with pytest.raises(WorkspaceClosed):
            await client.start("claims", "t2", {"amount": "20"}, requested_by="api:shop", workspace=OURS)
