"""What is kept of each of many workspaces: its token, which only TOKEN_KEYS open, and who approves what there."""

from __future__ import annotations

import contextlib
import re
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from bot.workspaces import check_keys
from flow import workspaces
from flow.audit import latest_entries
from flow.changes import refresh
from flow.cipher import Cipher
from flow.database import Connection
from flow.drive import drive
from flow.errors import SettingError, TokenUnreadable, UnknownWorkspace, WorkspaceClosed
from flow.flows import Flows
from flow.policy import NOBODY
from flow.sessions import begin_session, make_login_link, session_of, use_login_link
from flow.settings import Settings, read_settings
from flow.tokens import create_token, token_of
from flow.workspaces import Workspace, check_open, removed, rotate, set_up, uninstalled, workspace_of
from tests.command import Terminal
from tests.many_slacks import KEY, OTHER_KEY, POLICY, ManySlacks, cipher_with, install, many_settings
from tests.many_workspaces import member
from tests.people import start_claim
from tests.rows import all_rows, one_row, value

STRICT = POLICY.replace("100", "5").replace("U01ALICE", "U02BOB")


@pytest.fixture
async def slack() -> AsyncIterator[ManySlacks]:
    async with ManySlacks() as running:
        running.team("T01ACME", "ACME")
        running.team("T02BETA", "Beta")
        yield running


async def acme(conn: Connection, slack: ManySlacks, **more: str) -> Workspace:
    return await install(conn, slack, slack.teams["T01ACME"], **more)


async def beta(conn: Connection, slack: ManySlacks, **more: str) -> Workspace:
    return await install(conn, slack, slack.teams["T02BETA"], **more)


def token_in(row: Workspace, *keys: str) -> str:
    assert row.token is not None
    return cipher_with(*keys).decrypt(row.workspace, row.token)


# Tokens


async def test_a_token_is_opened_by_its_key_alone(conn: Connection, slack: ManySlacks) -> None:
    row = await acme(conn, slack)
    [token] = slack.teams["T01ACME"].tokens
    assert token_in(row) == token_in(row, OTHER_KEY, KEY) == token
    with pytest.raises(TokenUnreadable, match=r"^TOKEN_KEYS: no key opens the token of workspace T01ACME"):
        token_in(row, OTHER_KEY)
    assert token not in repr(row) and str(row.token) not in repr(row)


async def test_a_token_that_is_copied_into_another_row_opens_nowhere(conn: Connection, slack: ManySlacks) -> None:
    await acme(conn, slack)
    await beta(conn, slack)
    await conn.execute(
        "UPDATE workspaces SET token = (SELECT token FROM workspaces WHERE workspace = 'T02BETA')"
        " WHERE workspace = 'T01ACME'"
    )
    with pytest.raises(TokenUnreadable):
        token_in(await workspace_of(conn, "T01ACME"))


async def test_after_a_rotation_the_old_key_opens_nothing(conn: Connection, slack: ManySlacks) -> None:
    before = [await acme(conn, slack), await beta(conn, slack)]
    assert await rotate(conn, cipher_with(OTHER_KEY, KEY), by="cli:ann") == 2
    for row in before:
        now = await workspace_of(conn, row.workspace)
        assert token_in(now, OTHER_KEY) == token_in(row)
        with pytest.raises(TokenUnreadable):
            token_in(now)
    [entry] = await latest_entries(conn, thread_id=None, limit=1)
    assert (entry.kind, entry.who, entry.data) == ("workspaces.rotated", "cli:ann", {"count": 2})


async def test_a_rotation_without_the_old_key_changes_nothing(conn: Connection, slack: ManySlacks) -> None:
    await acme(conn, slack)
    await rotate(conn, cipher_with(OTHER_KEY, KEY), by="cli:ann")
    await beta(conn, slack)
    before = await workspaces.workspaces(conn)
    with pytest.raises(TokenUnreadable):
        await rotate(conn, cipher_with(OTHER_KEY), by="cli:ann")
    assert await workspaces.workspaces(conn) == before


@pytest.mark.parametrize("keys", ["", "x", f"{KEY},short", KEY.rstrip("="), f"{KEY} {OTHER_KEY}"])
def test_keys_that_are_none_are_said_so_and_not_repeated(monkeypatch: pytest.MonkeyPatch, keys: str) -> None:
    for name, text in many_settings(ManySlacks(), keys=keys or ",", SLACK_API_URL="http://127.0.0.1:9/").items():
        monkeypatch.setenv(name, text)
    with pytest.raises(SettingError, match="TOKEN_KEYS: write keys of 32 random bytes") as wrong:
        read_settings()
    assert KEY not in str(wrong.value)


def test_without_keys_nothing_is_encrypted() -> None:
    with pytest.raises(SettingError, match="TOKEN_KEYS is not set"):
        Cipher.of(Settings())


@pytest.mark.parametrize("missing", ["SLACK_CLIENT_ID", "SLACK_CLIENT_SECRET", "SLACK_SIGNING_SECRET", "PUBLIC_URL"])
def test_many_workspaces_need_what_installs_the_app(monkeypatch: pytest.MonkeyPatch, missing: str) -> None:
    for name, text in many_settings(ManySlacks(), SLACK_API_URL="http://127.0.0.1:9/").items():
        if name != missing:
            monkeypatch.setenv(name, text)
    with pytest.raises(SettingError, match=missing):
        read_settings()


@pytest.mark.parametrize(
    "given",
    [
        {"SLACK_BOT_TOKEN": "xoxb-1"},
        {"SLACK_CHANNEL": "C01GEN"},
        {"SLACK_OPS_CHANNEL": "C02OPS"},
        {"SLACK_APP_TOKEN": "xapp-1"},
        {"APPROVERS": "U01ALICE"},
        {"FILERS": "U01ALICE"},
        {"INBOX_VIEWERS": "U01ALICE"},
    ],
    ids=str,
)
def test_what_is_for_one_workspace_is_refused_beside_many(
    monkeypatch: pytest.MonkeyPatch, given: dict[str, str]
) -> None:
    for name, text in (many_settings(ManySlacks(), SLACK_API_URL="http://127.0.0.1:9/") | given).items():
        monkeypatch.setenv(name, text)
    with pytest.raises(SettingError, match=next(iter(given))):
        read_settings()


async def test_a_bot_without_the_key_does_not_start_and_says_why(
    conn: Connection, slack: ManySlacks, database_url: str, tmp_path: Path
) -> None:
    await acme(conn, slack)
    settings = many_settings(slack, keys=OTHER_KEY)
    done = await Terminal(tmp_path, DATABASE_URL=database_url, **settings).run_meanwhile("bot")
    assert done.code == 2
    assert done.err.splitlines()[-1].startswith("error: TOKEN_KEYS: no key opens the token of workspace T01ACME")
    assert "Traceback" not in done.err and OTHER_KEY not in done.err


# Set up, uninstalled, installed again


async def test_what_is_not_said_stays_and_every_change_is_in_the_log(conn: Connection, slack: ManySlacks) -> None:
    await acme(conn, slack)
    await set_up(conn, "T01ACME", by="cli:ann", channel="C01ACME", policy=POLICY)
    row = await set_up(conn, "T01ACME", by="cli:ann", ops_channel="C02OPS", filers="U01ALICE")
    assert (row.channel, row.ops_channel, row.policy, row.filers) == ("C01ACME", "C02OPS", POLICY, "U01ALICE")
    assert await workspace_of(conn, "T01ACME") == row
    assert (await set_up(conn, "T01ACME", by="cli:ann", ops_channel="")).ops_channel is None
    entries = await latest_entries(conn, thread_id=None, limit=4)
    assert [entry.kind for entry in entries] == [*["workspace.set_up"] * 3, "workspace.installed"]
    assert entries[2].data["tiers"] == ["manager: 1 of U01ALICE"] and entries[2].data["workspace"] == "T01ACME"


async def test_a_policy_that_says_nothing_is_refused(conn: Connection, slack: ManySlacks) -> None:
    before = await acme(conn, slack, policy=POLICY)
    for policy in ("[[tiers", "tiers = []", POLICY.replace("manager", "The Boss")):
        with pytest.raises(SettingError, match="the policy"):
            await set_up(conn, "T01ACME", by="cli:ann", policy=policy)
    assert await workspace_of(conn, "T01ACME") == before
    with pytest.raises(UnknownWorkspace, match="T09NONE"):
        await set_up(conn, "T09NONE", by="cli:ann", policy=POLICY)


async def test_user_groups_are_refused_for_a_whole_grid(conn: Connection, slack: ManySlacks) -> None:
    await install(conn, slack, slack.team("E01GRID", is_grid=True), policy=POLICY)
    await acme(conn, slack, policy=POLICY.replace("U01ALICE", "@finance"), filers="@staff")
    for given in ({"policy": POLICY.replace("U01ALICE", "@finance")}, {"filers": "U01ALICE, S01FIN"}):
        with pytest.raises(SettingError, match="of a whole grid Slack does not say"):
            await set_up(conn, "E01GRID", by="cli:ann", **given)
    row = await workspace_of(conn, "E01GRID")
    assert (row.policy, row.filers) == (POLICY, "")


async def test_an_uninstall_drops_the_token_of_that_installation_alone(conn: Connection, slack: ManySlacks) -> None:
    first = await acme(conn, slack, channel="C01ACME", policy=POLICY)
    again = await acme(conn, slack)
    assert not await uninstalled(conn, first, by="slack")
    assert (await workspace_of(conn, "T01ACME")).is_installed
    # A rotation is no new installation.
    await rotate(conn, cipher_with(OTHER_KEY, KEY), by="cli:ann")
    assert await uninstalled(conn, again, by="slack")
    row = await workspace_of(conn, "T01ACME")
    assert (row.token, row.channel, row.policy) == (None, "C01ACME", POLICY)
    assert not await uninstalled(conn, again, by="slack")
    kinds = [entry.kind for entry in await latest_entries(conn, thread_id=None, limit=10)]
    assert kinds.count("workspace.uninstalled") == 1


# Filing and driving


async def start_in(conn: Connection, workspace: str, thread_id: str = "t1", amount: str = "50") -> None:
    await start_claim(conn, thread_id, amount, workspace=workspace)


async def test_nothing_is_filed_where_nobody_has_set_the_workspace_up(conn: Connection, slack: ManySlacks) -> None:
    await acme(conn, slack, channel="C01ACME")
    with pytest.raises(WorkspaceClosed, match="not set up yet"):
        await start_in(conn, "T01ACME")
    row = await set_up(conn, "T01ACME", by="cli:ann", policy=POLICY)
    await uninstalled(conn, row, by="slack")
    with pytest.raises(WorkspaceClosed, match="uninstalled"):
        await start_in(conn, "T01ACME")
    with pytest.raises(UnknownWorkspace):
        await start_in(conn, "T09NONE")
    assert await all_rows(conn, "SELECT * FROM threads") == []


async def asked(conn: Connection, thread_id: str) -> list[str] | None:
    row = await all_rows(conn, "SELECT approvers FROM approvals WHERE thread_id = %s", thread_id)
    return row[0]["approvers"] if row else None


async def test_the_same_amount_asks_different_people_in_different_workspaces(
    conn: Connection, slack: ManySlacks, flows: Flows
) -> None:
    await acme(conn, slack, policy=POLICY)
    await beta(conn, slack, policy=STRICT)
    for thread_id, workspace, amount in (
        ("a50", "T01ACME", "50"),
        ("b50", "T02BETA", "50"),
        ("a250", "T01ACME", "250"),
        ("b250", "T02BETA", "250"),
    ):
        await start_in(conn, workspace, thread_id, amount)
        # The settings' own policy is no other workspace's.
        await drive(conn, thread_id, flows=flows, policy=NOBODY)
    assert [await asked(conn, each) for each in ("a50", "b50")] == [None, ["U02BOB"]]
    assert [await asked(conn, each) for each in ("a250", "b250")] == [["U01ALICE"], ["U02BOB"]]
    assert await value(conn, "SELECT string_agg(thread_id, ',') FROM payments") == "a50"
    rows = await all_rows(conn, "SELECT thread_id, workspace FROM approvals ORDER BY 1")
    assert [tuple(row.values()) for row in rows] == [("a250", "T01ACME"), ("b250", "T02BETA"), ("b50", "T02BETA")]


@pytest.mark.parametrize("policy", [None, "[[tiers", "tiers = []"], ids=str)
async def test_nothing_is_paid_unasked_where_the_policy_is_gone_or_broken(
    conn: Connection, slack: ManySlacks, flows: Flows, policy: str | None
) -> None:
    await acme(conn, slack, policy=POLICY)
    await start_in(conn, "T01ACME", amount="1")
    await conn.execute("UPDATE workspaces SET policy = %s", (policy,))
    with contextlib.suppress(WorkspaceClosed):
        await start_in(conn, "T01ACME", "t2", amount="1")
    await drive(conn, "t1", flows=flows, policy=NOBODY)
    assert await asked(conn, "t1") == []
    assert await all_rows(conn, "SELECT * FROM payments") == []


async def test_a_refresh_asks_by_the_policy_of_the_workspace(conn: Connection, slack: ManySlacks, flows: Flows) -> None:
    await acme(conn, slack, policy=POLICY)
    await start_in(conn, "T01ACME", amount="250")
    await drive(conn, "t1", flows=flows, policy=NOBODY)
    await set_up(conn, "T01ACME", by="cli:ann", policy=STRICT)
    assert [tier.approvers for tier in await refresh(conn, NOBODY, "t1", by="cli:ann")] == [("U02BOB",)]
    await drive(conn, "t1", flows=flows, policy=NOBODY)
    pending = await one_row(conn, "SELECT approvers FROM approvals WHERE status = 'pending'")
    assert pending == {"approvers": ["U02BOB"]}


async def test_a_worker_asks_by_the_policy_of_the_workspace(
    conn: Connection, slack: ManySlacks, database_url: str, tmp_path: Path
) -> None:
    await acme(conn, slack, policy=STRICT, channel="C01ACME")
    await start_in(conn, "T01ACME", amount="50")
    done = await Terminal(tmp_path, DATABASE_URL=database_url, **many_settings(slack)).run_meanwhile("work", "--once")
    assert done.code == 0, done.err
    assert await asked(conn, "t1") == ["U02BOB"]
    assert [post["channel"] for post in slack.posts("T01ACME")] == ["C01ACME"]


# At the command line


async def test_an_operator_lists_sets_up_rotates_and_removes(
    conn: Connection, slack: ManySlacks, database_url: str, tmp_path: Path
) -> None:
    await acme(conn, slack)
    terminal = Terminal(tmp_path, DATABASE_URL=database_url, **many_settings(slack, keys=f"{OTHER_KEY},{KEY}"))
    (tmp_path / "acme.toml").write_text(POLICY)
    said = await terminal.run_meanwhile("workspaces", "list")
    assert "T01ACME (ACME): installed since" in said.out and "no policy: nothing is filed there" in said.out
    said = await terminal.run_meanwhile("workspaces", "set", "T01ACME", "--channel", "C01ACME", "--policy", "acme.toml")
    assert (said.code, "posts in C01ACME; manager: 1 of U01ALICE" in said.out) == (0, True), said.err
    said = await terminal.run_meanwhile("policy", "--workspace", "T01ACME", "--amount", "250")
    assert said.out.strip() == "manager: 1 of U01ALICE"
    said = await terminal.run_meanwhile("workspaces", "rotate")
    assert "1 encrypted anew" in said.out
    assert token_in(await workspace_of(conn, "T01ACME"), OTHER_KEY) in slack.teams["T01ACME"].tokens
    said = await terminal.run_meanwhile("workspaces", "remove", "T01ACME")
    assert (said.code, said.err) == (0, "")
    assert len(slack.said("auth.revoke", "T01ACME")) == 1
    [row] = (await terminal.run_meanwhile("workspaces", "list", "--json")).json
    assert (row["workspace"], row["installed"], row["channel"]) == ("T01ACME", False, "C01ACME")
    assert "token" not in row


async def test_who_is_removed_does_not_come_back_by_installing_the_app_again(
    conn: Connection, slack: ManySlacks
) -> None:
    await install(conn, slack, slack.teams["T01ACME"], channel="C01ACME", policy=POLICY)
    secret = await create_token(conn, "shop", ("start",), by="cli:ann", workspace="T01ACME")
    alice = member("T01ACME", "U01ALICE")
    session = await begin_session(conn, alice, by="slack")
    link = await make_login_link(conn, alice, by="cli:ann")
    assert await token_of(conn, secret) is not None
    await removed(conn, await workspace_of(conn, "T01ACME"), by="cli:ann")
    await install(conn, slack, slack.teams["T01ACME"])
    with pytest.raises(WorkspaceClosed, match="is not set up yet"):
        await check_open(conn, "T01ACME")
    assert await token_of(conn, secret) is None
    assert await session_of(conn, session) is None
    assert await use_login_link(conn, link) is None
    kinds = await all_rows(conn, "SELECT kind FROM audit WHERE who = 'cli:ann' ORDER BY id DESC LIMIT 3")
    assert {row["kind"] for row in kinds} == {"workspace.uninstalled", "workspace.set_up", "token.revoked"}


async def test_an_installation_whose_keys_are_lost_starts_again_once_the_workspace_is_removed(
    conn: Connection, slack: ManySlacks, database_url: str, tmp_path: Path
) -> None:
    before = await acme(conn, slack, policy=POLICY, channel="C01ACME")
    terminal = Terminal(tmp_path, DATABASE_URL=database_url, **many_settings(slack, keys=OTHER_KEY))
    refused = await terminal.run_meanwhile("work")
    assert refused.code == 2
    [command] = re.findall(r"`claim_flow\.py (workspaces remove .*?)`", refused.err)
    said = await terminal.run_meanwhile(*command.split())
    assert said.code == 0 and "uninstall the app there by hand" in said.err
    await check_keys(conn, cipher_with(OTHER_KEY))
    again = await acme(conn, slack)
    assert again.is_installed and (again.channel, again.policy) == (before.channel, None)


async def test_who_is_removed_after_an_uninstall_before_it_was_set_up_is_removed_too(
    conn: Connection, slack: ManySlacks, database_url: str, tmp_path: Path
) -> None:
    row = await acme(conn, slack)
    secret = await create_token(conn, "shop", ("start",), by="cli:ann", workspace="T01ACME")
    await uninstalled(conn, row, by="slack")
    terminal = Terminal(tmp_path, DATABASE_URL=database_url, **many_settings(slack))
    said = await terminal.run_meanwhile("workspaces", "remove", "T01ACME")
    assert (said.code, said.err) == (0, "")
    await acme(conn, slack)
    assert await token_of(conn, secret) is None


@pytest.mark.parametrize(
    ("option", "text"),
    [
        ("--channel", "#payments"),
        ("--ops-channel", "alarms"),
        ("--filers", "everybody"),
        ("--filers", "alice@example.com"),
        ("--policy", "broken.toml"),
        ("--policy", "missing.toml"),
    ],
)
async def test_what_cannot_be_meant_sets_nothing_up(
    conn: Connection, slack: ManySlacks, database_url: str, tmp_path: Path, option: str, text: str
) -> None:
    before = await acme(conn, slack)
    (tmp_path / "broken.toml").write_text("[[tiers]]\nname = 1\n")
    terminal = Terminal(tmp_path, DATABASE_URL=database_url, **many_settings(slack))
    said = await terminal.run_meanwhile("workspaces", "set", "T01ACME", option, text)
    assert said.code == 2 and "Traceback" not in said.err, said.err
    assert await workspace_of(conn, "T01ACME") == before
