"""Each of many workspaces is answered and posted to with its own token, in its own channel; none waits for another."""

from __future__ import annotations

import contextlib
import json
import re
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import pytest
from aiohttp import web

from bot import outlet
from bot.bots import Bots
from bot.deliver import Deliverer
from bot.doctor_slack import slack_findings
from bot.groups import OwnTeam
from bot.pool import pool_of
from bot.slack import Background, events_at
from bot.web import build_web
from bot.workspaces import ManyOutlets
from flow import notices
from flow.approvals import decide
from flow.database import Connection
from flow.model import Person
from flow.policy import Tier, parse_policy
from flow.settings import read_settings
from flow.workspaces import rotate, set_up, uninstalled, workspace_of
from tests.command import Terminal
from tests.many_slacks import (
    KEY,
    OTHER_KEY,
    POLICY,
    ManySlacks,
    Team,
    cipher_with,
    clients_of,
    install,
    many_settings,
)
from tests.people import ANN, YES, ask
from tests.rows import all_rows, one_row, until, value
from tests.services import is_ready
from tests.slack_door import Caller, bot_in_process, client_of, typed_in
from tests.slack_requests import ABSENT, JSON, MALFORMED, SIGNING_SECRET, SlackRequest, altered_click_body, button

PAIR = ("T01ACME", "T02BETA")
MANAGER = parse_policy(POLICY, named="policy").tier("manager")


@pytest.fixture(autouse=True)
def _no_pace(monkeypatch: pytest.MonkeyPatch) -> None:
    """One message a second is a wait that only one fact here is about."""
    monkeypatch.setattr(outlet, "_BETWEEN_POSTS_S", 0.0)


@pytest.fixture
async def slack() -> AsyncIterator[ManySlacks]:
    async with ManySlacks() as running:
        for key in PAIR:
            running.team(key, key.lower())
        yield running


@contextlib.asynccontextmanager
async def bots_in_process(database_url: str, slack: ManySlacks, *keys: str) -> AsyncIterator[str]:
    """The URL of a bot of all workspaces."""
    background = Background()
    async with pool_of(database_url) as pool, clients_of(slack, *keys) as clients:
        bots = Bots(clients, pool, background, viewers=frozenset(), public_url=None)
        app = build_web(slack=events_at(bots.find, SIGNING_SECRET), checks={})
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=1.0)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        try:
            yield f"http://127.0.0.1:{runner.addresses[0][1]}"
        finally:
            await background.drain(10.0)
            await runner.cleanup()


@pytest.fixture
async def caller(database_url: str, slack: ManySlacks) -> AsyncIterator[Caller]:
    async with bots_in_process(database_url, slack) as url, Caller(url) as running:
        yield running


@contextlib.asynccontextmanager
async def deliverer_to(slack: ManySlacks, *keys: str) -> AsyncIterator[Deliverer]:
    async with clients_of(slack, *keys) as clients:
        yield Deliverer(ManyOutlets(clients, public_url=None))


@pytest.fixture
async def deliverer(slack: ManySlacks) -> AsyncIterator[Deliverer]:
    async with deliverer_to(slack) as made:
        yield made


async def both(conn: Connection, slack: ManySlacks) -> None:
    """ACME and Beta have the app, and each a channel."""
    for key in PAIR:
        await install(conn, slack, slack.teams[key], channel=f"C{key[1:]}", policy=POLICY)


async def click_from(caller: Caller, conn: Connection, interrupt_id: str, team: str) -> SlackRequest:
    """A member of this team, of an id that is Alice's in each, presses Approve in their workspace."""
    digest = await value(conn, "SELECT request_hash FROM approvals WHERE interrupt_id = %s", interrupt_id)
    body = altered_click_body(
        team={"id": team, "domain": team.lower()},
        user={"id": "U01ALICE", "name": "alice", "team_id": team},
        actions=[button("approve", json.dumps({"interrupt": interrupt_id, "hash": digest}))],
        response_url=caller.response_url,
        container=ABSENT,
        channel=ABSENT,
        message=ABSENT,
    )
    return SlackRequest(name="click", body=body, expected=range(200, 201))


async def asked_in(conn: Connection, workspace: str, thread_id: str = "t1", *, tier: Tier = MANAGER) -> str:
    return await ask(conn, thread_id, tier=tier, workspace=workspace)


# Clicks, forms, commands


async def test_a_click_is_decided_by_the_workspace_that_it_is_from(
    caller: Caller, slack: ManySlacks, conn: Connection
) -> None:
    await both(conn, slack)
    ids = {key: await asked_in(conn, key, key.lower()) for key in PAIR}
    # The same member id in the other workspace, whose own list has it, too.
    assert (await caller.send(await click_from(caller, conn, ids["T01ACME"], "T02BETA"))).status == 200
    note = await caller.note()
    assert await all_rows(conn, "SELECT * FROM decisions") == []
    assert "250" not in note and "t01acme" not in note
    assert (await caller.send(await click_from(caller, conn, ids["T01ACME"], "T01ACME"))).status == 200
    decided = await one_row(conn, "SELECT thread_id, person FROM decisions JOIN approvals USING (interrupt_id)")
    assert decided == {"thread_id": "t01acme", "person": "slack:T01ACME/U01ALICE"}
    assert {call.team for call in slack.asked} <= set(PAIR)


def payload(team: Any, **more: Any) -> dict[str, Any]:
    user = {"id": "U01ALICE", "name": "alice", "team_id": "T03MOON"}
    return {"team": team, "user": user, **more}


def of_grid(flag: Any) -> dict[str, Any]:
    return {"enterprise": {"id": "E01GRID", "name": "grid"}, "is_enterprise_install": flag}


def command(**fields: str) -> SlackRequest:
    usual = {"command": "/claims", "text": "", "user_id": "U01ALICE", "user_name": "alice"}
    body = urlencode(usual | {"response_url": "http://127.0.0.1:9/none"} | fields)
    return SlackRequest(name="command", body=body.encode(), expected=range(200, 201))


def event(event: dict[str, Any], **fields: Any) -> SlackRequest:
    body = {"type": "event_callback", "event": event, **fields}
    return SlackRequest(name="event", body=json.dumps(body).encode(), content_type=JSON, expected=range(200, 201))


def interactive(fields: dict[str, Any]) -> SlackRequest:
    body = urlencode({"payload": json.dumps(fields)})
    return SlackRequest(name="interactive", body=body.encode(), expected=range(200, 201))


HOME = {"type": "app_home_opened", "user": "U01ALICE", "tab": "home"}
SHORTCUT = {"type": "shortcut", "callback_id": "new_claim", "trigger_id": "1.2.a"}
TYPED = typed_in(amount="20", currency="USD", payee="ACME", note="x")
FORM = {
    "type": "view_submission",
    "view": {"type": "modal", "callback_id": "file_claim", "id": "V1", "state": {"values": TYPED}},
}
PRESS = {
    "type": "block_actions",
    "actions": [{"type": "button", "action_id": "details", "block_id": "b", "value": "{}"}],
    "trigger_id": "1.2.a",
}
NAMED = {"id": "T03MOON", "domain": "moon"}


@pytest.mark.parametrize(
    ("request_", "workspace"),
    [
        (interactive(payload(NAMED, **PRESS)), "T03MOON"),
        (interactive(payload(NAMED, **SHORTCUT)), "T03MOON"),
        (interactive(payload(NAMED, **FORM)), "T03MOON"),
        (interactive(payload(NAMED, **PRESS, **of_grid(False))), "T03MOON"),
        (interactive(payload(NAMED, **PRESS, **of_grid(True))), "E01GRID"),
        (interactive(payload(None, **PRESS, **of_grid(True))), "E01GRID"),
        (interactive(payload(None, **SHORTCUT, **of_grid(True))), "E01GRID"),
        (interactive(payload(None, **FORM, **of_grid(True))), "E01GRID"),
        (command(team_id="T03MOON"), "T03MOON"),
        (command(team_id="T03MOON", enterprise_id="E01GRID", is_enterprise_install="false"), "T03MOON"),
        (command(team_id="T03MOON", enterprise_id="E01GRID", is_enterprise_install="true"), "E01GRID"),
        (command(enterprise_id="E01GRID", is_enterprise_install="true"), "E01GRID"),
        (event(HOME, team_id="T03MOON"), "T03MOON"),
        # In a shared channel the event is of another team than the installation.
        (
            event(HOME, team_id="T09THEIRS", authorizations=[{"team_id": "T03MOON", "is_enterprise_install": False}]),
            "T03MOON",
        ),
        (
            event(
                HOME,
                team_id="T03MOON",
                authorizations=[{"enterprise_id": "E01GRID", "team_id": "T03MOON", "is_enterprise_install": True}],
            ),
            "E01GRID",
        ),
        (
            event(
                HOME,
                team_id=None,
                enterprise_id="E01GRID",
                authorizations=[{"enterprise_id": "E01GRID", "team_id": None, "is_enterprise_install": True}],
            ),
            "E01GRID",
        ),
    ],
    ids=lambda each: each if isinstance(each, str) else each.body.decode()[:40],
)
async def test_each_kind_of_payload_is_answered_by_the_installation_that_it_is_of(
    database_url: str, slack: ManySlacks, conn: Connection, request_: SlackRequest, workspace: str
) -> None:
    slack.team("T03MOON", grid="E01GRID")
    slack.team("E01GRID", is_grid=True)
    for team in slack.teams.values():
        await install(conn, slack, team, channel="C01GEN", policy=POLICY)
    async with bots_in_process(database_url, slack) as url, Caller(url) as caller:
        assert (await caller.send(request_)).status < 500

        async def asked() -> set[str | None]:
            return {call.team for call in slack.asked}

        # The bot asks by its own token who it is, if nothing else.
        assert await until(asked) == {workspace}


async def test_what_is_not_signed_is_refused_before_any_row_is_read(
    caller: Caller, slack: ManySlacks, conn: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    await both(conn, slack)
    interrupt_id = await asked_in(conn, "T01ACME")
    click = await click_from(caller, conn, interrupt_id, "T01ACME")
    read: list[str] = []

    async def watched(_: Bots, workspace: str) -> Any:
        read.append(workspace)
        return await workspace_of(conn, workspace)

    monkeypatch.setattr(Bots, "_row", watched)
    assert (await caller.send(replace(click, signing=lambda *_: {}))).status == 401
    assert (read, await all_rows(conn, "SELECT * FROM decisions")) == ([], [])
    assert (await caller.send(click)).status == 200
    assert read == ["T01ACME"]


async def test_slack_checks_the_address_before_anybody_has_installed_the_app(caller: Caller) -> None:
    body = json.dumps({"type": "url_verification", "challenge": "c1"}).encode()
    asked = SlackRequest(name="x", body=body, content_type=JSON, expected=range(200, 201))
    answered = await caller.send(asked)
    assert (answered.status, json.loads(answered.body)) == (200, {"challenge": "c1"})


async def test_whatever_slack_would_never_send_is_answered_as_where_there_is_one_workspace(
    caller: Caller, slack: ManySlacks, conn: Connection
) -> None:
    await both(conn, slack)
    wrong = {}
    for request in MALFORMED:
        answered = await caller.send(request)
        if answered.status not in request.expected:
            wrong[request.name] = answered
    assert wrong == {}


async def test_a_bot_of_one_workspace_takes_note_that_its_token_is_gone(
    database_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with (
        client_of("http://127.0.0.1:9/api/") as client,
        bot_in_process(database_url, client) as url,
        Caller(url) as caller,
    ):
        assert (await caller.send(event({"type": "app_uninstalled"}, team_id="T01TEST"))).status == 200
    assert "SLACK_BOT_TOKEN is taken back" in caplog.text


@pytest.mark.parametrize("how", ["unknown", "uninstalled"])
async def test_a_click_of_no_workspace_that_has_the_app_is_told_so_and_records_nothing(
    caller: Caller, slack: ManySlacks, conn: Connection, how: str
) -> None:
    await both(conn, slack)
    interrupt_id = await asked_in(conn, "T01ACME")
    team = "T09NONE" if how == "unknown" else "T01ACME"
    if how == "uninstalled":
        # It was answered before, so the bot has everything at hand.
        assert (await caller.send(event(HOME, team_id="T01ACME"))).status == 200
        await uninstalled(conn, await workspace_of(conn, "T01ACME"), by="slack")
    assert (await caller.send(await click_from(caller, conn, interrupt_id, team))).status == 403
    assert "The app is not installed in this workspace any more" in await caller.note()
    assert await all_rows(conn, "SELECT * FROM decisions") == []
    assert await value(conn, "SELECT count(*) FROM audit WHERE kind = 'approval.refused'") == 0


async def test_a_new_token_is_used_at_the_next_request(caller: Caller, slack: ManySlacks, conn: Connection) -> None:
    await both(conn, slack)
    await caller.send(command(team_id="T01ACME"))
    first = slack.asked[-1].token
    await install(conn, slack, slack.teams["T01ACME"])
    await caller.send(command(team_id="T01ACME"))
    assert slack.asked[-1].token == list(slack.teams["T01ACME"].tokens)[-1] != first


async def test_a_key_that_is_missing_is_an_error_that_names_it_and_records_nothing(
    database_url: str, slack: ManySlacks, conn: Connection, caplog: pytest.LogCaptureFixture
) -> None:
    await both(conn, slack)
    interrupt_id = await asked_in(conn, "T01ACME")
    async with bots_in_process(database_url, slack, OTHER_KEY) as url, Caller(url) as caller:
        assert (await caller.send(await click_from(caller, conn, interrupt_id, "T01ACME"))).status == 503
        assert "did not work" in await caller.note()
    assert "TOKEN_KEYS: no key opens the token of workspace T01ACME" in caplog.text
    assert await all_rows(conn, "SELECT * FROM decisions") == []


async def test_a_workspace_that_is_not_set_up_files_nothing(
    caller: Caller, slack: ManySlacks, conn: Connection
) -> None:
    await install(conn, slack, slack.teams["T01ACME"], channel="C01ACME")
    assert (await caller.send(command(team_id="T01ACME", text="new", trigger_id="1.2.a"))).status == 200

    async def told() -> list[dict[str, Any]]:
        return slack.said("views.update", "T01ACME")

    [view] = await until(told)
    assert "not set up yet" in json.dumps(view)
    form = payload({"id": "T01ACME"}, **FORM)
    form["user"]["team_id"] = "T01ACME"
    answered = await caller.send(interactive(form))
    assert answered.status == 200 and "not set up yet" in answered.body
    assert await all_rows(conn, "SELECT * FROM threads") == []


async def test_slack_is_not_asked_for_the_user_groups_of_a_whole_grid(
    database_url: str, slack: ManySlacks, conn: Connection
) -> None:
    await both(conn, slack)
    row = await install(conn, slack, slack.team("E01GRID", is_grid=True), channel="C01GRID", policy=POLICY)
    alice = Person(key="slack:T03MOON/U01ALICE", name="Alice", names=frozenset({"U01ALICE"}), workspace="E01GRID")
    async with clients_of(slack) as clients:
        assert await OwnTeam(clients.client(row), workspace="E01GRID").groups_of(alice) == frozenset()
        assert slack.said("usergroups.list", "E01GRID") == []
        beta = await workspace_of(conn, "T02BETA")
        await OwnTeam(clients.client(beta), workspace="T02BETA").groups_of(alice)
    assert len(slack.said("usergroups.list", "T02BETA")) == 1


async def test_filers_are_each_workspaces_own(caller: Caller, slack: ManySlacks, conn: Connection) -> None:
    await both(conn, slack)
    await set_up(conn, "T02BETA", by="cli:ann", filers="U02BOB")
    for team in PAIR:
        await caller.send(command(team_id=team, text="new", trigger_id="1.2.a"))

    async def filled() -> bool:
        return all(slack.said("views.update", team) for team in PAIR)

    await until(filled)
    said = {team: json.dumps(slack.said("views.update", team)) for team in PAIR}
    assert "not among those who file claims here" in said["T02BETA"]
    assert "not among" not in said["T01ACME"] and "file_claim" in said["T01ACME"]


# Uninstalled


UNINSTALLED = {"type": "app_uninstalled"}
REVOKED = {"type": "tokens_revoked", "tokens": {"oauth": [], "bot": ["U0BOT"]}}


def refuse_all(team: Team, error: str | None = "account_inactive") -> None:
    team.tokens = dict.fromkeys(team.tokens, error)


@pytest.mark.parametrize("said", [UNINSTALLED, REVOKED], ids=["uninstalled", "revoked"])
async def test_a_workspace_that_uninstalls_the_app_loses_its_token(
    caller: Caller, slack: ManySlacks, conn: Connection, said: dict[str, Any]
) -> None:
    await both(conn, slack)
    refuse_all(slack.teams["T01ACME"])
    assert (await caller.send(event(said, team_id="T01ACME"))).status == 200
    row = await workspace_of(conn, "T01ACME")
    assert (row.token, row.channel, row.policy) == (None, "C01ACME", POLICY)
    assert (await workspace_of(conn, "T02BETA")).is_installed
    assert await value(conn, "SELECT count(*) FROM audit WHERE kind = 'workspace.uninstalled'") == 1
    # Slack sends both, in any order.
    for again in (UNINSTALLED, REVOKED):
        assert (await caller.send(event(again, team_id="T01ACME"))).status == 200
    assert await value(conn, "SELECT count(*) FROM audit WHERE kind = 'workspace.uninstalled'") == 1


async def test_a_grid_that_uninstalls_the_app_loses_its_token_though_no_team_is_named(
    caller: Caller, slack: ManySlacks, conn: Connection
) -> None:
    grid = slack.team("E01GRID", is_grid=True)
    await install(conn, slack, grid)
    refuse_all(grid)
    assert (await caller.send(event(UNINSTALLED, team_id=None, enterprise_id="E01GRID"))).status == 200
    assert not (await workspace_of(conn, "E01GRID")).is_installed


async def test_an_uninstall_that_is_heard_after_a_new_installation_kills_nothing(
    caller: Caller, slack: ManySlacks, conn: Connection
) -> None:
    await both(conn, slack)
    refuse_all(slack.teams["T01ACME"])
    await install(conn, slack, slack.teams["T01ACME"])
    assert (await caller.send(event(UNINSTALLED, team_id="T01ACME"))).status == 200
    assert (await workspace_of(conn, "T01ACME")).is_installed


@pytest.mark.parametrize("said", [
    {"type": "tokens_revoked", "tokens": {"oauth": ["U01ALICE"]}},
    {"type": "tokens_revoked", "tokens": {"oauth": ["U01ALICE"], "bot": []}},
    {"type": "tokens_revoked"},
], ids=str)  # fmt: skip
async def test_a_persons_own_token_is_none_of_ours(
    caller: Caller, slack: ManySlacks, conn: Connection, said: dict[str, Any]
) -> None:
    await both(conn, slack)
    refuse_all(slack.teams["T01ACME"])
    await caller.send(event(said, team_id="T01ACME"))
    assert (await workspace_of(conn, "T01ACME")).is_installed


@pytest.mark.parametrize("error", ["internal_error", "ratelimited"])
async def test_a_slack_that_does_not_say_whether_a_token_is_good_is_asked_again(
    caller: Caller, slack: ManySlacks, conn: Connection, error: str
) -> None:
    await both(conn, slack)
    refuse_all(slack.teams["T01ACME"], error)
    # Slack sends an event that was not taken once more.
    assert (await caller.send(event(UNINSTALLED, team_id="T01ACME"))).status == 503
    assert (await workspace_of(conn, "T01ACME")).is_installed


# Messages


async def test_cards_go_out_with_their_own_workspaces_token_to_its_channel(
    deliverer: Deliverer, slack: ManySlacks, conn: Connection
) -> None:
    await both(conn, slack)
    for key in PAIR:
        await asked_in(conn, key, key.lower())
    assert await deliverer.sweep(conn) == (2, 0)
    for key in PAIR:
        [post] = slack.posts(key)
        assert post["channel"] == f"C{key[1:]}" and key.lower() in json.dumps(post)
    assert {call.team for call in slack.asked} == set(PAIR)


async def test_direct_messages_and_a_tiers_own_channel_are_in_the_workspace_too(
    deliverer: Deliverer, slack: ManySlacks, conn: Connection
) -> None:
    await both(conn, slack)
    tier = Tier(name="approval", approvers=("U01ALICE", "slack:T02BETA/U05DANA"), post_to="both", channel="C09TIER")
    await asked_in(conn, "T01ACME", tier=tier)
    await deliverer.sweep(conn)
    assert sorted(post["channel"] for post in slack.posts("T01ACME")) == ["C09TIER", "DU01ALICE"]
    assert slack.posts("T02BETA") == []


async def test_a_workspace_that_slack_wants_to_be_quiet_holds_up_no_other(
    deliverer: Deliverer, slack: ManySlacks, conn: Connection
) -> None:
    await both(conn, slack)
    slack.busy = {"T01ACME": 30}
    for number in range(3):
        await asked_in(conn, "T01ACME", f"a{number}")
    await asked_in(conn, "T02BETA", "b")
    assert await deliverer.sweep(conn) == (1, 1)
    assert len(slack.posts("T02BETA")) == 1
    # It was asked once, and is left alone since.
    assert len(slack.posts("T01ACME")) == 1
    slack.busy = {}
    deliverer._quiet_until.clear()
    await conn.execute("UPDATE notices SET due_at = clock_timestamp() WHERE due_at IS NOT NULL")
    assert await deliverer.sweep(conn) == (3, 0)


async def test_an_address_that_slack_does_not_let_in_ends_no_installation(
    deliverer: Deliverer, slack: ManySlacks, conn: Connection
) -> None:
    """Slack says `invalid_auth` to that as well, to all workspaces."""
    await both(conn, slack)
    refuse_all(slack.teams["T01ACME"], "invalid_auth")
    await asked_in(conn, "T01ACME", "a")
    await deliverer.sweep(conn)
    assert await value(conn, "SELECT status FROM notices WHERE kind = 'card'") == "failed"
    assert (await workspace_of(conn, "T01ACME")).is_installed


async def test_a_workspace_whose_token_is_refused_holds_up_no_other(
    deliverer: Deliverer, slack: ManySlacks, conn: Connection
) -> None:
    await both(conn, slack)
    refuse_all(slack.teams["T01ACME"], "token_revoked")
    await asked_in(conn, "T01ACME", "a")
    await asked_in(conn, "T02BETA", "b")
    await deliverer.sweep(conn)
    assert len(slack.posts("T02BETA")) == 1
    failed = await one_row(conn, "SELECT thread_id, error FROM notices WHERE status = 'failed' AND kind = 'card'")
    assert failed["thread_id"] == "a"
    assert failed["error"] == (
        "token_revoked: have the app installed in workspace T01ACME again: PUBLIC_URL/slack/install"
    )
    # Slack's word for that was never heard: its sessions and tokens of the API are good for nothing from now on.
    assert not (await workspace_of(conn, "T01ACME")).is_installed
    assert (await workspace_of(conn, "T02BETA")).is_installed
    # What it was refused is told once there is a token again.
    await install(conn, slack, slack.teams["T01ACME"])
    assert (await deliverer.sweep(conn))[1] == 0
    posted = [call.token for call in slack.asked if (call.method, call.team) == ("chat.postMessage", "T01ACME")]
    assert posted[-1] == list(slack.teams["T01ACME"].tokens)[-1]


async def test_many_cards_of_one_workspace_let_those_of_others_go_first(
    deliverer: Deliverer, slack: ManySlacks, conn: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    await both(conn, slack)
    monkeypatch.setattr(outlet, "_BETWEEN_POSTS_S", 0.3)
    for number in range(3):
        await asked_in(conn, "T01ACME", f"a{number}")
    await asked_in(conn, "T02BETA", "b")
    assert await deliverer.sweep(conn) == (4, 0)
    order = [call.team for call in slack.asked if call.method == "chat.postMessage"]
    assert order == ["T01ACME", "T02BETA", "T01ACME", "T01ACME"]


@pytest.mark.parametrize("missing", ["channel", "token"])
async def test_what_has_nowhere_to_go_says_what_to_do_and_goes_out_once_that_is_done(
    deliverer: Deliverer, slack: ManySlacks, conn: Connection, missing: str
) -> None:
    await both(conn, slack)
    await asked_in(conn, "T01ACME")
    await conn.execute("UPDATE workspaces SET channel = NULL WHERE workspace = 'T01ACME'")
    if missing == "token":
        await set_up(conn, "T01ACME", by="cli:ann", channel="C01ACME")
        await uninstalled(conn, await workspace_of(conn, "T01ACME"), by="slack")
    await deliverer.sweep(conn)
    errors = await all_rows(conn, "SELECT kind, status, error FROM notices ORDER BY id")
    assert [(row["kind"], row["status"]) for row in errors] == [("card", "failed"), ("alarm", "failed")]
    wanted = "workspaces set T01ACME --channel" if missing == "channel" else "until it is installed again"
    assert all(wanted in row["error"] for row in errors)
    assert slack.posts("T01ACME") == []
    if missing == "channel":
        await set_up(conn, "T01ACME", by="cli:ann", channel="C05NEW")
    else:
        await install(conn, slack, slack.teams["T01ACME"])
    await deliverer.sweep(conn)
    assert await value(conn, "SELECT count(*) FROM notices WHERE status = 'failed'") == 0
    assert {post["channel"] for post in slack.posts("T01ACME")} == {"C05NEW" if missing == "channel" else "C01ACME"}


async def test_an_alarm_goes_where_alarms_go_though_there_is_no_channel(
    deliverer: Deliverer, slack: ManySlacks, conn: Connection
) -> None:
    await both(conn, slack)
    await asked_in(conn, "T01ACME")
    await set_up(conn, "T01ACME", by="cli:ann", channel="", ops_channel="C07OPS")
    await deliverer.sweep(conn)
    rows = await all_rows(conn, "SELECT kind, status FROM notices ORDER BY id")
    assert [(row["kind"], row["status"]) for row in rows] == [("card", "failed"), ("alarm", "sent")]
    assert {post["channel"] for post in slack.posts("T01ACME")} == {"C07OPS"}


async def test_what_is_from_before_there_were_many_is_posted_nowhere(
    deliverer: Deliverer, slack: ManySlacks, conn: Connection
) -> None:
    await both(conn, slack)
    await ask(conn)
    assert await deliverer.sweep(conn) == (0, 2)
    assert slack.asked == []
    assert "from before" in await value(conn, "SELECT error FROM notices WHERE kind = 'card'")


async def test_a_key_that_is_missing_puts_off_what_waits_and_loses_nothing(slack: ManySlacks, conn: Connection) -> None:
    await both(conn, slack)
    await rotate(conn, cipher_with(OTHER_KEY, KEY), by="cli:ann")
    await asked_in(conn, "T01ACME")
    async with deliverer_to(slack) as blind:
        assert await blind.sweep(conn) == (0, 1)
    waits = await one_row(conn, "SELECT status, error FROM notices")
    assert waits["status"] == "pending" and waits["error"].startswith("TOKEN_KEYS: no key opens")
    await conn.execute("UPDATE notices SET due_at = clock_timestamp()")
    async with deliverer_to(slack, OTHER_KEY) as seeing:
        assert await seeing.sweep(conn) == (1, 0)


async def test_outcomes_and_alarms_are_told_in_the_workspace(
    deliverer: Deliverer, slack: ManySlacks, conn: Connection
) -> None:
    await both(conn, slack)
    await set_up(conn, "T01ACME", by="cli:ann", ops_channel="C07OPS")
    interrupt_id = await asked_in(conn, "T01ACME")
    await deliverer.sweep(conn)
    await decide(conn, interrupt_id, ANN, YES)
    await conn.execute("UPDATE threads SET status = 'stuck', reason = 'a bank holiday'")
    await notices.raise_alarm(conn, "t1")
    await deliverer.sweep(conn)
    assert len(slack.said("chat.update", "T01ACME")) == 1
    assert "C07OPS" in [post["channel"] for post in slack.posts("T01ACME")]
    assert slack.posts("T02BETA") == []


async def test_the_next_notice_is_found_by_index_whatever_one_workspace_has_waiting(
    slack: ManySlacks, conn: Connection
) -> None:
    await both(conn, slack)
    await asked_in(conn, "T02BETA", "b")
    await conn.execute(
        "INSERT INTO threads (thread_id, flow, flow_version, input, requested_by, workspace)"
        " SELECT 'a' || n, 'claims', '1', '{}', 'cli:ann', 'T01ACME' FROM generate_series(1, 5000) n"
    )
    await conn.execute(
        "INSERT INTO notices (kind, thread_id, due_at)"
        " SELECT 'alarm', 'a' || n, clock_timestamp() - interval '1 hour' FROM generate_series(1, 5000) n"
    )
    await conn.execute("INSERT INTO notices (kind, thread_id) VALUES ('alarm', 'b')")
    await conn.execute("ANALYZE threads, notices")
    began = time.perf_counter()
    found = await notices.lease(conn, "alarms", but=["T01ACME"])
    assert found is not None and found.thread_id == "b"
    assert time.perf_counter() - began < 1
    explained = await all_rows(
        conn,
        "EXPLAIN SELECT id, status FROM notices WHERE notice_lane(kind, version) = 'alarms'"
        " AND due_at <= statement_timestamp() AND coalesce((SELECT workspace FROM threads t"
        " WHERE t.thread_id = notices.thread_id) <> ALL('{T01ACME}'), true)"
        " ORDER BY due_at LIMIT 1 FOR UPDATE SKIP LOCKED",
    )
    plan = "\n".join(row["QUERY PLAN"] for row in explained)
    assert "Index Scan using notices_due" in plan and "Index Scan using threads_pkey" in plan, plan
    assert not re.search(r"Seq Scan|Sort", plan), plan


# All of it


async def test_a_claim_is_filed_approved_and_paid_in_each_of_two_workspaces(
    slack: ManySlacks, conn: Connection, database_url: str, tmp_path: Path, port: int
) -> None:
    await both(conn, slack)
    terminal = Terminal(tmp_path, DATABASE_URL=database_url, **many_settings(slack, PORT=str(port)))
    async with terminal.service("serve") as service, Caller(f"http://127.0.0.1:{port}") as caller:
        await service.until(lambda: is_ready(port))
        for key in PAIR:
            said = await terminal.run_meanwhile(
                "start", "--workspace", key, "--thread", key.lower(), "--amount", "250", "--json"
            )
            assert (said.code, said.json["status"]) == (0, "waiting"), said.err

        async def posted() -> bool:
            return all(slack.posts(key) for key in PAIR)

        await until(posted)
        for key in PAIR:
            interrupt_id = await value(conn, "SELECT interrupt_id FROM approvals WHERE workspace = %s", key)
            assert (await caller.send(await click_from(caller, conn, interrupt_id, key))).status == 200

        async def paid() -> bool:
            shown = [str(slack.said("chat.update", key)[-1:]) for key in PAIR]
            return all("Paid" in text for text in shown)

        await until(paid)
    assert await value(conn, "SELECT count(*) FROM payments WHERE status = 'paid'") == 2
    for key in PAIR:
        assert {post["channel"] for post in slack.posts(key)} == {f"C{key[1:]}"}
    # Each by its own token, and no other way.
    assert all(call.team and call.token.endswith(call.team) for call in slack.asked)
    tokens = [token for team in slack.teams.values() for token in team.tokens]
    assert not any(token in service.err for token in tokens)


# The doctor


async def findings(
    slack: ManySlacks, database_url: str, monkeypatch: pytest.MonkeyPatch, **more: str
) -> dict[str, Any]:
    for name, text in many_settings(slack, **more).items():
        monkeypatch.setenv(name, text)
    return {each.what: each async for each in slack_findings(read_settings(), database_url)}


async def test_the_doctor_examines_each_workspace(
    slack: ManySlacks, conn: Connection, database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    await both(conn, slack)
    found = await findings(slack, database_url, monkeypatch)
    assert all(each.ok for each in found.values()), found
    assert {"T01ACME (t01acme): token", "T02BETA (t02beta): channel", "T02BETA (t02beta): policy"} <= set(found)


@pytest.mark.parametrize(
    ("spoil", "what", "said"),
    [
        ("UPDATE workspaces SET channel = NULL", "channel", "workspaces set T01ACME --channel"),
        ("UPDATE workspaces SET policy = NULL", "policy", "workspaces set T01ACME --policy"),
        ("UPDATE workspaces SET policy = '[[tiers'", "policy", "workspaces set T01ACME --policy"),
        ("revoked", "token", "have the app installed in workspace T01ACME again"),
        ("key", "token", "TOKEN_KEYS"),
    ],
)
async def test_the_doctor_says_what_to_fix_in_which_workspace(
    slack: ManySlacks,
    conn: Connection,
    database_url: str,
    monkeypatch: pytest.MonkeyPatch,
    spoil: str,
    what: str,
    said: str,
) -> None:
    await both(conn, slack)
    keys = KEY
    if spoil == "revoked":
        refuse_all(slack.teams["T01ACME"], "token_revoked")
    elif spoil == "key":
        keys = OTHER_KEY
    else:
        await conn.execute(spoil.encode() + b" WHERE workspace = 'T01ACME'")
    found = await findings(slack, database_url, monkeypatch, keys=keys)
    wrong = found[f"T01ACME (t01acme): {what}"]
    assert not wrong.ok and said in wrong.fix
    assert spoil == "key" or all(each.ok for name, each in found.items() if name.startswith("T02BETA"))
