"""The app is installed by whoever began it here, in their browser, once; its token is tried, and kept encrypted."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import aiohttp
import pytest
import yaml  # type: ignore[import-untyped]
from psycopg.errors import CheckViolation

from bot.site import Site
from flow import workspaces
from flow.audit import latest_entries
from flow.database import Connection
from flow.workspaces import Workspace, workspace_of
from tests.browsing import PageSeen, Visitor, pages_in_process
from tests.command import ROOT, Terminal
from tests.local_slack import free_port
from tests.many_slacks import CLIENT_ID, POLICY, ManySlacks, cipher_with, clients_of, install, many_settings
from tests.rows import all_rows, value

BEGIN = "/slack/install"


@pytest.fixture
async def slack() -> AsyncIterator[ManySlacks]:
    async with ManySlacks() as running:
        running.installs = running.team("T01ACME", "ACME")
        yield running


@pytest.fixture
async def site(database_url: str, slack: ManySlacks) -> AsyncIterator[Site]:
    async with (
        clients_of(slack) as clients,
        pages_in_process(database_url, openid=slack.provider, clients=clients) as running,
    ):
        yield running


@pytest.fixture
async def vera(site: Site) -> AsyncIterator[Visitor]:
    async with Visitor(site.url) as visitor:
        yield visitor


async def come_back(visitor: Visitor) -> str:
    """To Slack, where the person agrees: the path that Slack sends the browser back to."""
    to_slack = await visitor.get(BEGIN)
    assert to_slack.status == 303, to_slack.text
    async with aiohttp.ClientSession() as http, http.get(to_slack.headers["Location"], allow_redirects=False) as agreed:
        return agreed.headers["Location"].removeprefix(visitor.url)


async def is_not_installed(conn: Connection, answer: PageSeen, status: int = 403) -> bool:
    assert answer.status == status, answer.text
    return await all_rows(conn, "SELECT * FROM workspaces") == []


async def the_token(conn: Connection, workspace: str) -> str:
    row = await workspace_of(conn, workspace)
    assert row.token is not None
    return cipher_with().decrypt(workspace, row.token)


def secrets_in(slack: ManySlacks) -> list[str]:
    return [token for team in slack.teams.values() for token in team.tokens]


async def test_an_admin_installs_the_app_and_reads_what_is_next(
    vera: Visitor, site: Site, slack: ManySlacks, conn: Connection
) -> None:
    page = await vera.get(await come_back(vera))
    assert page.status == 200, page.text
    assert "Installed in ACME" in page.text
    assert "claim_flow.py workspaces \\ set T01ACME \\ --channel C0123456789 \\ --policy policy.toml" in page.text
    row = await workspace_of(conn, "T01ACME")
    assert (row.name, row.installed_by, row.channel, row.policy) == ("ACME", "slack:T01ACME/U09ADMIN", None, None)
    assert await the_token(conn, "T01ACME") in slack.teams["T01ACME"].tokens
    [asked] = slack.authorized
    assert asked["client_id"] == CLIENT_ID and asked["redirect_uri"] == f"{site.url}/slack/oauth_redirect"
    [entry] = await latest_entries(conn, thread_id=None, limit=1)
    assert (entry.kind, entry.who, entry.door) == ("workspace.installed", "slack:T01ACME/U09ADMIN", "slack")
    assert page.headers["Referrer-Policy"] == "no-referrer"


async def test_what_is_asked_for_is_what_the_manifest_asks_for(vera: Visitor, slack: ManySlacks) -> None:
    await come_back(vera)
    wanted = yaml.safe_load((ROOT / "manifest.yml").read_text())["oauth_config"]["scopes"]["bot"]
    assert sorted(slack.authorized[0]["scope"].split(",")) == sorted(wanted)


async def test_no_token_is_in_the_database_in_clear(vera: Visitor, slack: ManySlacks, conn: Connection) -> None:
    await vera.get(await come_back(vera))
    tables = await all_rows(
        conn,
        "SELECT quote_ident(relname) AS name FROM pg_class WHERE relkind = 'r'"
        " AND relnamespace = 'public'::regnamespace",
    )
    everything = "".join([str(await all_rows(conn, f"SELECT t::text FROM {each['name']} t")) for each in tables])
    [token] = secrets_in(slack)
    assert "T01ACME" in everything and token not in everything and "xoxb-" not in everything
    # Nor could it be.
    with pytest.raises(CheckViolation, match="workspaces_token_check"):
        await workspaces.installed(conn, "T02ODD", name="odd", token=token, by="cli:ann")


@pytest.mark.parametrize("spoil", ["state", "no state", "no cookie", "another's cookie", "tampered", "late"])
async def test_coming_back_to_another_browser_or_too_late_installs_nothing(
    vera: Visitor, site: Site, slack: ManySlacks, conn: Connection, spoil: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = await come_back(vera)
    state = parse_qs(urlsplit(path).query)["state"][0]
    name = site.cookie_name("install")
    if spoil == "state":
        path = path.replace(state, "A" * 43)
    elif spoil == "no state":
        path = path.partition("&state=")[0]
    elif spoil == "no cookie":
        del vera.cookies[name]
    elif spoil == "another's cookie":
        async with Visitor(site.url) as other:
            await other.get(BEGIN)
            vera.cookies[name] = other.cookies[name]
    elif spoil == "tampered":
        vera.cookies[name] = vera.cookies[name].replace(state, "A" * 43)
        path = path.replace(state, "A" * 43)
    else:
        now = time.time()
        monkeypatch.setattr(time, "time", lambda: now + 601)
    assert await is_not_installed(conn, await vera.get(path))
    # The code was not even shown to Slack.
    assert secrets_in(slack) == []


async def test_a_cookie_of_a_sign_in_begins_no_installation(vera: Visitor, site: Site, conn: Connection) -> None:
    path = await come_back(vera)
    await vera.get("/login/slack")
    vera.cookies[site.cookie_name("install")] = vera.cookies[site.cookie_name("login")]
    assert await is_not_installed(conn, await vera.get(path))


async def test_a_state_is_good_for_one_installation(
    vera: Visitor, site: Site, slack: ManySlacks, conn: Connection
) -> None:
    path, name = await come_back(vera), site.cookie_name("install")
    cookie = vera.cookies[name]
    assert (await vera.get(path)).status == 200
    assert name not in vera.cookies
    # Also with a copy of the cookie, and with a code that is good.
    vera.cookies[name] = cookie
    again = await come_back(vera)
    code = parse_qs(urlsplit(again).query)["code"][0]
    vera.cookies[name] = cookie
    assert (await vera.get(path.replace("code-1", code))).status == 403
    assert len(secrets_in(slack)) == 1
    assert await value(conn, "SELECT count(*) FROM workspaces") == 1


async def test_somebody_who_says_no_reads_that_nothing_is_installed(
    vera: Visitor, slack: ManySlacks, conn: Connection
) -> None:
    path = await come_back(vera)
    state = parse_qs(urlsplit(path).query)["state"][0]
    answer = await vera.get(f"/slack/oauth_redirect?error=access_denied&state={state}")
    assert await is_not_installed(conn, answer)
    assert "Somebody said no at Slack" in answer.text and BEGIN in answer.links
    # Before the state is looked at nothing is said.
    async with Visitor(vera.url) as stranger:
        told = await stranger.get("/slack/oauth_redirect?error=access_denied&state=x")
    assert "said no" not in told.text and told.status == 403


@pytest.mark.parametrize(
    "answer",
    [
        {"access_token": "xoxb-never-given"},
        {"access_token": None},
        {"access_token": ["x"]},
        {"token_type": "user"},
        {"expires_in": 43200, "refresh_token": "xoxe-1"},
        {"team": None},
        {"team": {"id": "acme"}},
        {"team": "T01ACME"},
        {"team": {"id": "T02OTHER", "name": "other"}},
        {"is_enterprise_install": True},
        {"ok": False, "error": "invalid_code"},
    ],
    ids=str,
)
async def test_an_answer_without_a_good_bot_token_installs_nothing(
    vera: Visitor, slack: ManySlacks, conn: Connection, answer: dict[str, Any]
) -> None:
    slack.answer = answer
    assert await is_not_installed(conn, await vera.get(await come_back(vera)))


async def test_a_slack_that_is_away_is_said_so(database_url: str, conn: Connection, slack: ManySlacks) -> None:
    async with (
        clients_of(slack) as clients,
        pages_in_process(database_url, openid=slack.provider, clients=clients) as site,
        Visitor(site.url) as visitor,
    ):
        path = await come_back(visitor)
        # Its Web API is asked at a port where nobody listens.
        object.__setattr__(clients, "api_url", "http://127.0.0.1:9/api/")
        assert await is_not_installed(conn, await visitor.get(path), 503)


async def test_a_whole_grid_is_kept_by_its_own_id_with_no_team(
    vera: Visitor, slack: ManySlacks, conn: Connection
) -> None:
    slack.installs = slack.team("E01GRID", "Starship", is_grid=True)
    page = await vera.get(await come_back(vera))
    assert page.status == 200, page.text
    assert "Installed in Starship" in page.text and "an admin of it also has to add the app" in page.text
    assert [row.workspace for row in await workspaces.workspaces(conn)] == ["E01GRID"]
    assert await the_token(conn, "E01GRID") in slack.teams["E01GRID"].tokens


async def test_one_workspace_of_a_grid_is_kept_by_its_own_id(
    vera: Visitor, slack: ManySlacks, conn: Connection
) -> None:
    slack.installs = slack.team("T03MOON", "Moon", grid="E01GRID")
    assert (await vera.get(await come_back(vera))).status == 200
    assert [row.workspace for row in await workspaces.workspaces(conn)] == ["T03MOON"]


async def test_a_new_installation_keeps_channel_and_policy(vera: Visitor, slack: ManySlacks, conn: Connection) -> None:
    before = await install(conn, slack, slack.teams["T01ACME"], channel="C01ACME", policy=POLICY, filers="U01ALICE")
    await workspaces.uninstalled(conn, before, by="slack")
    page = await vera.get(await come_back(vera))
    assert "It is set up as before: requests are posted in C01ACME" in page.text
    row = await workspace_of(conn, "T01ACME")
    assert set_up(row) == set_up(before) and row.is_installed and row.uninstalled_at is None
    assert await the_token(conn, "T01ACME") == secrets_in(slack)[-1]


def set_up(row: Workspace) -> tuple[Any, ...]:
    return row.channel, row.ops_channel, row.policy, row.filers


async def test_a_running_bot_installs_the_app_and_logs_no_token(
    slack: ManySlacks, database_url: str, conn: Connection, tmp_path: Path
) -> None:
    port = free_port()
    url = f"http://localhost:{port}"
    settings = many_settings(slack, PORT=str(port), PUBLIC_URL=url)
    terminal = Terminal(tmp_path, DATABASE_URL=database_url, **settings)
    async with terminal.service("bot") as bot, Visitor(url) as vera:

        async def answers() -> bool:
            try:
                return (await vera.get("/login")).status == 200
            except aiohttp.ClientConnectionError:
                return False

        await bot.until(answers)
        assert (await vera.get(await come_back(vera))).status == 200
        assert (await workspace_of(conn, "T01ACME")).is_installed
        [token] = secrets_in(slack)
        assert "the app is installed in workspace T01ACME" in bot.err
        assert token not in bot.err and "code-1" not in bot.err and settings["TOKEN_KEYS"] not in bot.err
