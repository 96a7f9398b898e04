"""`doctor` looks at everything outside of us that can be wrong, and says what to fix."""

from __future__ import annotations

import re
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from decimal import Decimal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from aiohttp import web
from pydantic import SecretStr

from bot import doctor
from bot.doctor import examine
from bot.findings import Finding
from flow import audit
from flow.database import Connection
from flow.deliveries import add_endpoints, forget_endpoint, spread
from flow.settings import Settings
from tests.bank import Bank
from tests.command import ROOT
from tests.model_server import KEY, FaultyModel, advice, content, error
from tests.people import ask, start_claim
from tests.rows import value
from tests.test_audit import BORN, tamper

SCOPES = "chat:write,channels:history,groups:history,commands,users:read"


@dataclass
class Slack:
    """A Slack that knows its methods' errors, and the scopes of its token."""

    scopes: str | None = SCOPES
    # By method, or by method and channel.
    errors: dict[str, str] = field(default_factory=dict)
    url: str = ""

    async def answer(self, request: web.Request) -> web.Response:
        method, form = request.match_info["method"], {**request.query, **await request.post()}
        refused = self.errors.get(method) or self.errors.get(f"{method} {form.get('channel')!s}")
        known: dict[str, Any] = {"user": "claim-flow", "team": "Test", "messages": [], "url": "wss://slack.example"}
        known["usergroups"] = [
            {"id": "S01FIN", "handle": "finance", "users": ["U01ALICE"], "date_delete": 0},
            {"id": "S02OLD", "handle": "old", "users": [], "date_delete": 1},
        ]
        headers = {"x-oauth-scopes": self.scopes} if self.scopes is not None else {}
        return web.json_response({"ok": False, "error": refused} if refused else {"ok": True, **known}, headers=headers)


@pytest.fixture
async def slack() -> AsyncIterator[Slack]:
    made = Slack()
    app = web.Application()
    app.router.add_route("*", "/api/{method}", made.answer)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    made.url = f"http://127.0.0.1:{runner.addresses[0][1]}/api/"
    yield made
    await runner.cleanup()


def settings_at(database_url: str, slack: Slack | None = None, **more: Any) -> Settings:
    if slack is not None:
        more = {
            "slack_api_url": slack.url,
            "slack_bot_token": SecretStr("xoxb-1"),
            "slack_app_token": SecretStr("xapp-1"),
            "slack_channel": "C01GEN",
            "slack_ops_channel": "C02OPS",
            "approvers": "U01ALICE",
        } | more
    return Settings(database_url=SecretStr(database_url), **more)


async def findings(settings: Settings) -> dict[str, Finding]:
    return {finding.what: finding async for finding in examine(settings)}


async def test_where_all_is_well_nothing_is_wrong(database_url: str, slack: Slack) -> None:
    found = await findings(settings_at(database_url, slack))
    assert [finding.what for finding in found.values() if not finding.ok] == []
    assert list(found) == [
        *("database", "clock", "locks", "audit", "retention", "messages", "flows", "policy", "payments", "model"),
        *("Slack token", "Slack scopes", "SLACK_CHANNEL", "SLACK_OPS_CHANNEL", "SLACK_APP_TOKEN"),
    ]
    assert found["policy"].found == "over 100 USD, and in any other currency, one of U01ALICE"
    assert found["clock"].found.startswith("the database's is 0.")


@pytest.mark.parametrize(("shift_s", "word"), [(-45.0, "ahead of"), (45.0, "behind")])
async def test_a_clock_that_is_wrong_is_found(
    database_url: str, monkeypatch: pytest.MonkeyPatch, shift_s: float, word: str
) -> None:
    monkeypatch.setattr("bot.doctor.time", SimpleNamespace(time=lambda: time.time() + shift_s))
    clock = (await findings(settings_at(database_url)))["clock"]
    assert not clock.ok
    assert f"{word} this machine's" in clock.found
    assert "NTP" in clock.fix


async def test_a_thread_that_nobody_prunes_is_found(database_url: str, conn: Connection) -> None:
    for name, days in (("young", 7.9), ("old", 8.1), ("older", 9)):
        await start_claim(conn, name)
        await conn.execute(
            "UPDATE threads SET status = 'paid', due_at = NULL, ended_at = clock_timestamp() - %s * interval '1 day'"
            " WHERE thread_id = %s",
            (days, name),
        )
    found = (await findings(settings_at(database_url)))["retention"]
    assert not found.ok
    assert found.found.startswith("thread older ended at ")
    assert (await findings(settings_at(database_url, checkpoint_retention="2 weeks")))["retention"].ok
    assert (await findings(settings_at(database_url, checkpoint_retention="never")))["retention"].ok
    await conn.execute("UPDATE threads SET pruned_at = now() WHERE thread_id <> 'young'")
    assert (await findings(settings_at(database_url)))["retention"].ok


async def test_an_endpoint_that_holds_events_is_found(database_url: str, conn: Connection) -> None:
    await add_endpoints(conn, ["acme", "gone"])
    await ask(conn)
    here: dict[str, Any] = {
        "webhook_urls": SecretStr("acme=https://acme.example.com/"),
        "webhook_signing_secrets": SecretStr(f"acme=whsec_{'A' * 32}"),
    }
    found = await findings(settings_at(database_url, **here))
    assert "webhooks to acme" not in found
    gone = found["webhooks to gone"]
    assert (gone.ok, gone.found.startswith("gone holds 1 events since 20")) == (False, True)
    assert "webhooks forget gone" in gone.fix
    # No process that has it in its settings runs.
    await conn.execute("UPDATE events SET created_at = created_at - interval '11 minutes'")
    late = (await findings(settings_at(database_url, **here)))["webhooks to acme"]
    assert (late.ok, late.found.startswith("acme holds 1 events since 20")) == (False, True)
    await spread(conn, "acme")
    await conn.execute("UPDATE webhook_deliveries SET status = 'dead', due_at = NULL, error = 'it said 404'")
    dead = (await findings(settings_at(database_url, **here)))["webhooks to acme"]
    assert (dead.ok, dead.found) == (False, "acme holds 0 events, and 1 dead letters; the last of these: it said 404")
    assert "webhooks resend --dead --endpoint acme" in dead.fix
    await conn.execute("UPDATE webhook_endpoints SET turned_off_at = now(), reason = 'it said 410' WHERE name = 'acme'")
    off = (await findings(settings_at(database_url, **here)))["webhooks to acme"]
    assert (off.ok, "it is off since" in off.found, "(it said 410)" in off.found) == (False, True, True)
    await forget_endpoint(conn, "gone", by="cli:ann")
    assert "webhooks to gone" not in await findings(settings_at(database_url, **here))


async def test_an_audit_log_that_was_changed_is_found(database_url: str, conn: Connection) -> None:
    await audit.record(conn, "login.made", who="cli:ann", door="cli", for_whom="a")
    found = (await findings(settings_at(database_url)))["audit"]
    assert (found.ok, found.found) == (True, f"{BORN + 1} rows, of which the newest {BORN + 1} are whole")
    row = await value(conn, "SELECT max(id) FROM audit")
    await tamper(conn, f"UPDATE audit SET who = 'cli:eve' WHERE id = {row}")
    found = (await findings(settings_at(database_url)))["audit"]
    assert (found.ok, found.found.startswith(f"row {row}, at position {BORN + 1}, was changed")) == (False, True)
    assert "audit verify" in found.fix


async def test_messages_that_slack_refused_or_nobody_sends_are_found(
    database_url: str, conn: Connection, slack: Slack
) -> None:
    settings = settings_at(database_url, slack)
    await ask(conn)
    assert (await findings(settings))["messages"].ok
    await conn.execute("UPDATE notices SET due_at = '2026-01-02 03:04:05Z'")
    found = (await findings(settings))["messages"]
    assert not found.ok
    assert found.found == (
        "1 waiting for more than 10 minutes; the oldest is the card of thread t1, since 2026-01-02 03:04 UTC;"
        " nobody has tried: no bot runs"
    )
    await ask(conn, "t2")
    await conn.execute(
        "UPDATE notices SET status = 'failed', due_at = NULL, error = 'not_in_channel: x' WHERE thread_id = 't2'"
    )
    found = (await findings(settings))["messages"]
    assert found.found.startswith("1 failed for good, 1 waiting for more than 10 minutes; the oldest is the card of")
    assert found.found.endswith("; the last error: not_in_channel: x")
    assert "claim_flow.py deliver" in found.fix
    # Without Slack nobody is to be told.
    assert "messages" not in await findings(settings_at(database_url))


@pytest.mark.parametrize(
    ("errors", "what", "fix"),
    [
        ({"auth.test": "invalid_auth"}, "Slack token", "set SLACK_BOT_TOKEN"),
        ({"auth.test": "token_revoked"}, "Slack token", "install the app again"),
        ({"conversations.history C01GEN": "not_in_channel"}, "SLACK_CHANNEL", "invite the bot to SLACK_CHANNEL"),
        (
            {"conversations.history C02OPS": "not_in_channel"},
            "SLACK_OPS_CHANNEL",
            "the bot to SLACK_OPS_CHANNEL",
        ),
        ({"conversations.history C02OPS": "channel_not_found"}, "SLACK_OPS_CHANNEL", "set SLACK_OPS_CHANNEL to"),
        ({"apps.connections.open": "invalid_auth"}, "SLACK_APP_TOKEN", "connections:write"),
    ],
    ids=str,
)
async def test_what_slack_refuses_is_said_with_its_fix(
    database_url: str, slack: Slack, errors: dict[str, str], what: str, fix: str
) -> None:
    slack.errors = errors
    found = await findings(settings_at(database_url, slack))
    assert [finding.what for finding in found.values() if not finding.ok] == [what]
    assert found[what].found == next(iter(errors.values()))
    assert fix in found[what].fix


async def test_a_missing_scope_is_found(database_url: str, slack: Slack) -> None:
    slack.scopes = "chat:write, groups:history, commands"
    scopes = (await findings(settings_at(database_url, slack)))["Slack scopes"]
    assert (scopes.ok, scopes.found) == (False, "channels:history, users:read missing")
    assert "manifest.yml" in scopes.fix


_TIER = '[[tiers]]\nname = "a"\napprovers = ["U01ALICE", "{group}"]\npost_to = "{post_to}"\nchannel = "C03VP"\n'


def ruled(folder: Path, *, group: str = "U02BOB", post_to: str = "channel") -> dict[str, Any]:
    """The settings of a policy with one tier."""
    (folder / "rules.toml").write_text(_TIER.format(group=group, post_to=post_to))
    return {"approvers": "", "policy_file": folder / "rules.toml"}


@pytest.mark.parametrize(
    ("rules", "missing"),
    [
        ({}, None),
        ({"group": "@finance"}, "usergroups:read missing"),
        ({"post_to": "both"}, "im:write, im:history missing"),
        ({"filers": "U01ALICE"}, None),
        ({"filers": "@staff"}, "usergroups:read missing"),
        ({"filers": "U01ALICE, alice@example.com"}, "users:read.email missing"),
    ],
    ids=str,
)
async def test_a_scope_is_missing_only_if_the_policy_needs_it(
    database_url: str, slack: Slack, tmp_path: Path, rules: dict[str, str], missing: str | None
) -> None:
    given = ruled(tmp_path, **{name: value for name, value in rules.items() if name != "filers"})
    given |= {"filers": rules.get("filers", "")}
    scopes = (await findings(settings_at(database_url, slack, **given)))["Slack scopes"]
    assert (scopes.ok, None if scopes.ok else scopes.found) == (missing is None, missing)
    slack.scopes = f"{SCOPES},usergroups:read,im:write,im:history,users:read.email"
    assert (await findings(settings_at(database_url, slack, **given)))["Slack scopes"].ok


async def test_the_scopes_of_the_manifest_are_what_is_needed_and_no_more(
    database_url: str, slack: Slack, tmp_path: Path
) -> None:
    slack.scopes = ""
    given = ruled(tmp_path, group="@finance", post_to="both")
    scopes = (await findings(settings_at(database_url, slack, **given)))["Slack scopes"]
    manifest = (ROOT / "manifest.yml").read_text().partition("    bot:\n")[2].partition("\nsettings:")[0]
    in_manifest = re.findall(r"^      - (\S+)$", manifest, re.MULTILINE)
    assert sorted(scopes.found.removesuffix(" missing").split(", ")) == sorted(in_manifest)


async def test_a_user_group_that_slack_does_not_have_is_named(database_url: str, slack: Slack, tmp_path: Path) -> None:
    for group in ("@finance", "S01FIN"):
        found = (await findings(settings_at(database_url, slack, **ruled(tmp_path, group=group))))["Slack user groups"]
        assert (found.ok, found.found) == (True, group)
    for group in ("@nobody", "@old", "S02OLD", "S0NONE"):
        found = (await findings(settings_at(database_url, slack, **ruled(tmp_path, group=group))))["Slack user groups"]
        assert (found.ok, found.found) == (False, f"Slack has no {group}")
    found = (await findings(settings_at(database_url, slack, approvers="@finance, @nobody")))["Slack user groups"]
    assert (found.ok, found.found) == (False, "Slack has no @nobody")
    slack.errors = {"usergroups.list": "missing_scope"}
    found = (await findings(settings_at(database_url, slack, approvers="@finance")))["Slack user groups"]
    assert (found.ok, "manifest.yml" in found.fix) == (False, True)
    assert "Slack user groups" not in await findings(settings_at(database_url, slack))


async def test_a_tiers_channel_is_looked_at_like_the_bots_own(database_url: str, slack: Slack, tmp_path: Path) -> None:
    settings = settings_at(database_url, slack, **ruled(tmp_path))
    assert (await findings(settings))["the channel of tier a"].found == "C03VP, and the bot is in it"
    slack.errors = {"conversations.history C03VP": "not_in_channel"}
    found = (await findings(settings))["the channel of tier a"]
    assert (found.ok, found.fix) == (False, "invite the bot to the channel of tier a")


async def test_a_slack_that_does_not_say_its_scopes_is_believed(database_url: str, slack: Slack) -> None:
    slack.scopes = None
    assert "Slack scopes" not in await findings(settings_at(database_url, slack))


async def test_a_slack_that_is_not_there_is_said(database_url: str, slack: Slack) -> None:
    settings = settings_at(database_url, slack, slack_api_url="http://127.0.0.1:9/api/")
    token = (await findings(settings))["Slack token"]
    assert not token.ok
    assert "no answer from http://127.0.0.1:9/api/" in token.found


async def test_slack_without_approvers_is_wrong_and_the_command_line_without_them_is_not(
    database_url: str, slack: Slack
) -> None:
    policy = (await findings(settings_at(database_url, slack, approvers="")))["policy"]
    assert (policy.ok, "APPROVERS" in policy.fix) == (False, True)
    assert (await findings(settings_at(database_url)))["policy"].ok


async def test_a_policy_file_is_told_or_what_is_wrong_with_it(database_url: str, tmp_path: Path) -> None:
    path = tmp_path / "rules.toml"
    given: dict[str, Any] = {"approvers": "", "policy_file": path, "public_url": "https://claims.example.com"}
    path.write_text((ROOT / "policy.example.toml").read_text())
    told = (await findings(settings_at(database_url, **given)))["policy"]
    assert told.ok and "vp: 2 of U03DANA, U04EMIL, webhook:acme:carol, within 7 days" in told.found
    path.write_text('[[tiers]]\nname = "all"\napprovers = []\n')
    told = (await findings(settings_at(database_url, **given)))["policy"]
    assert (told.ok, "all: nobody but the command line" in told.found) == (False, True)
    path.write_text("tiers = 1")
    told = (await findings(settings_at(database_url, **given)))["policy"]
    assert (told.ok, str(path) in told.found) == (False, True)


async def test_flows_are_named_or_what_is_wrong_with_them(database_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found = (await findings(settings_at(database_url)))["flows"]
    assert found.ok and found.found.startswith("approval, batch, claims, fan-out")
    monkeypatch.setenv("FLOWS", "flow.claims,no.such_module")
    wrong = (await findings(settings_at(database_url)))["flows"]
    assert (wrong.ok, "no.such_module cannot be imported" in wrong.found) == (False, True)


async def test_a_model_that_answers_is_fine_and_one_that_does_not_is_said(database_url: str) -> None:
    async with FaultyModel(content(advice()), error(401, f"no such key: {KEY}")) as server:
        settings = settings_at(database_url, openai_api_key=SecretStr(KEY), openai_base_url=server.base_url)
        model = (await findings(settings))["model"]
        assert (model.ok, model.found) == (True, "gpt-5-mini answers (that took 120 tokens)")
        model = (await findings(settings))["model"]
    assert not model.ok
    assert "OPENAI_BASE_URL" in model.fix
    assert KEY not in model.found


async def test_a_payment_service_without_an_address_is_said(database_url: str) -> None:
    payments = (await findings(settings_at(database_url, payment_provider="http")))["payments"]
    assert not payments.ok
    assert "PAYMENT_URL is not set" in payments.found
    assert (await findings(settings_at(database_url)))["payments"].found == "in our own ledger"


async def test_a_payment_service_that_does_not_say_that_nothing_was_paid_is_said(database_url: str) -> None:
    async with Bank() as bank:
        settings = settings_at(database_url, payment_provider="http", payment_url=bank.url, payment_lookup_url=bank.url)
        payments = (await findings(settings))["payments"]
        assert (payments.ok, payments.found) == (True, "by http, which answers look-ups")
        bank.is_found = False
        payments = (await findings(settings))["payments"]
        assert not payments.ok
        assert '{"reference": null}' in payments.fix
    assert (bank.keys, bank.paid) == ([], [])


def test_the_sample_is_a_claim_that_nobody_pays() -> None:
    assert (doctor._SAMPLE.amount, doctor._SAMPLE.payee) == (Decimal("1.00"), "nobody")
