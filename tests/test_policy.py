"""The policy that somebody wrote: who is asked for what, and that nothing unclear is taken for a yes."""

from __future__ import annotations

import shutil
from dataclasses import replace
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

from bot.blocks import card
from flow.approvals import approval_of, approvals_of, decide
from flow.claims import FLOW
from flow.database import Connection
from flow.deadlines import expire_overdue
from flow.drive import drive
from flow.errors import NotAllowed, SettingError, Unaskable
from flow.flows import Flows
from flow.inputs import parse_claim
from flow.model import Person
from flow.patterns import FLOWS as PATTERNS
from flow.policy import Tier, Tiers, in_words, policy_of, read_policy
from flow.settings import Settings
from flow.threads import thread_of
from tests.command import ROOT, Terminal
from tests.people import ALICE, ANN, BOB, CAROL, YES, slack_person, start_claim
from tests.rows import value

EXAMPLE = ROOT / "policy.example.toml"
DANA, EMIL = slack_person("U03DANA", "Dana"), slack_person("U04EMIL", "Emil")
ALL = Flows([FLOW, *PATTERNS])


@pytest.fixture
def policy() -> Tiers:
    return read_policy(EXAMPLE)


def written(folder: Path, text: str) -> Path:
    path = folder / "policy.toml"
    path.write_text(text)
    return path


def names_of(policy: Tiers, amount: str, currency: str) -> list[str]:
    return [tier.name for tier in policy.tiers_of(parse_claim(amount=amount, currency=currency))]


# A tier of one, to which more is added.
ONE = '[[tiers]]\nname = "one"\napprovers = ["U01ALICE"]\n'

# The file


def test_the_example_is_a_policy(policy: Tiers) -> None:
    assert policy.rules[1].tier == Tier(
        name="vp",
        approvers=("U03DANA", "U04EMIL", "webhook:acme:carol"),
        required=2,
        expires_after_s=604_800,
        on_expiry="escalate",
        escalate_to=("U05FAY",),
        rank=1,
    )
    assert policy.rules[1].step_up_over == {"USD": Decimal(250_000), "EUR": Decimal(250_000)}
    assert policy.rules[0].tier.approvers == ("U01ALICE", "U02BOB", "@finance", "carol@example.com")
    assert policy.rules[0].over == {"USD": Decimal("100.00"), "EUR": Decimal("100.00")}
    assert policy.words[1] == (
        "vp: 2 of U03DANA, U04EMIL, webhook:acme:carol, within 7 days, then also U05FAY,"
        " on the page over 250,000.00 USD, 250,000.00 EUR and in other currencies"
    )


@pytest.mark.parametrize(
    ("amount", "currency", "page"),
    [("60000", "USD", False), ("250000", "USD", False), ("250000.01", "USD", True), ("1", "JPY", True)],
)
def test_what_takes_the_page_goes_by_the_amount(policy: Tiers, amount: str, currency: str, page: bool) -> None:
    claim = parse_claim(amount=amount, currency=currency)
    tiers = {tier.name: tier.step_up for tier in policy.tiers_of(claim)}
    assert tiers == {"manager": False, "vp": page}
    # A flow that names the tier says no amount.
    assert policy.tier("vp").step_up


@pytest.mark.parametrize(
    ("amount", "currency", "names"),
    [
        ("100", "USD", []),
        ("100.01", "USD", ["manager"]),
        ("50000", "EUR", ["manager"]),
        ("50000.01", "EUR", ["manager", "vp"]),
        # Nobody has said how much is little.
        ("1", "JPY", ["manager", "vp"]),
    ],
)
def test_a_tier_is_asked_over_its_limit_and_in_every_other_currency(
    policy: Tiers, amount: str, currency: str, names: list[str]
) -> None:
    assert names_of(policy, amount, currency) == names


def test_the_examples_places_are_ones_with_their_comment_signs_removed(tmp_path: Path) -> None:
    text = EXAMPLE.read_text().replace("# post_to =", "post_to =").replace("# channel =", "channel =")
    tier = read_policy(written(tmp_path, text)).rules[0].tier
    assert (tier.post_to, tier.channel) == ("both", "C02MANAGERS")
    assert in_words(tier).endswith(", in C02MANAGERS and by direct messages")


def test_without_a_limit_a_tier_is_always_asked(tmp_path: Path) -> None:
    policy = read_policy(written(tmp_path, '[[tiers]]\nname = "all"\napprovers = []\n'))
    assert names_of(policy, "0.01", "USD") == ["all"]
    assert policy.rules[0].tier.approvers == ()


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        (ONE + 'on_expiry = "escalate"\n', 'on_expiry = "escalate" and escalate_to belong together'),
        (ONE + 'escalate_to = ["U02BOB"]\n', 'on_expiry = "escalate" and escalate_to belong together'),
        (ONE + 'on_expiry = "escalate"\nescalate_to = ["U02BOB"]\n', "say expires_after, too"),
        (
            ONE + 'on_expiry = "escalate"\nescalate_to = ["U01ALICE"]\nexpires_after = "1 day"\n',
            "names somebody who is asked already",
        ),
        (ONE + 'on_expiry = "forget"\n', "on_expiry: Input should be 'reject' or 'escalate'"),
        (ONE + 'post_to = "everybody"\n', "post_to: Input should be"),
        ('[[tiers]]\nname = "a"\napprovers = ["a@b.example"]\npost_to = "direct"\n', "reaches nobody"),
        (ONE + 'channel = "#finance"\n', "give the channel's id"),
        (ONE + "step_up_over = { USD = -1 }\n", "step_up_over"),
        ("", "tiers: Field required"),
        ("tiers = []", "tiers: List should have at least 1 item"),
        ("[[tiers]", "cannot be read"),
        ('[[tiers]]\nname = "a"', "tiers.1.approvers: Field required"),
        ('[[tiers]]\nname = "A b"\napprovers = []', "tiers.1.name: "),
        ('[[tiers]]\nname = "a"\napprovers = ["alice"]', "tiers.1.approvers.1: 'alice' names nobody"),
        ('[[tiers]]\nname = "a"\napprovers = "U01ALICE"', "tiers.1.approvers: "),
        ('[[tiers]]\nname = "a"\napprovers = ["U01ALICE"]\nrequired = 2', "2 of 1 approvers can never be had"),
        ('[[tiers]]\nname = "a"\napprovers = ["U01ALICE", "U01ALICE"]\nrequired = 2', "2 of 1 approvers"),
        ('[[tiers]]\nname = "a"\napprovers = ["U01ALICE"]\nrequired = 0', "tiers.1.required: "),
        ('[[tiers]]\nname = "a"\napprovers = ["U01ALICE"]\nrequired = true', "tiers.1.required: "),
        ('[[tiers]]\nname = "a"\napprovers = []\nover = { USD = -1 }', "tiers.1.over: amount '-1'"),
        ('[[tiers]]\nname = "a"\napprovers = []\nover = { USD = 1.005 }', "at most 2 decimals"),
        ('[[tiers]]\nname = "a"\napprovers = []\nover = { USD = nan }', "amount 'nan'"),
        ('[[tiers]]\nname = "a"\napprovers = []\nover = { usd = 1 }', "currency 'usd'"),
        ('[[tiers]]\nname = "a"\napprovers = []\nover = 100', "currency '100'"),
        ('[[tiers]]\nname = "a"\napprovers = []\nexpires_after = "soon"', 'tiers.1.expires_after: write "30 minutes"'),
        ('[[tiers]]\nname = "a"\napprovers = []\nexpires_after = 60', "tiers.1.expires_after: "),
        ('[[tiers]]\nname = "a"\napprovers = []\nself_aproval = true', "tiers.1.self_aproval: Extra inputs"),
        ('[[tiers]]\nname = "a"\napprovers = []\n' * 2, "two tiers have one name"),
        ('[[tiers]]\nname = "a"\napprovers = []\nclaims = false', "no tier is asked for claims"),
        (
            '[[tiers]]\nname = "a"\napprovers = ["carol@example.com", "mail:carol@example.com"]\nrequired = 2',
            "somebody is listed twice",
        ),
        ('[[tiers]]\nname = "a"\napprovers = ["U01ALICE", "slack:T01/U01ALICE"]', "somebody is listed twice"),
        ('[[tiers]]\nname = "a"\napprovers = []\nexpires_after = "600000 weeks"', "at most 260 weeks"),
        (f"tiers = {'[' * 5000}", "cannot be read"),
        (f"tiers = 1{'0' * 5000}", "cannot be read"),
    ],
)
def test_a_policy_that_is_unclear_is_refused_and_says_where(tmp_path: Path, text: str, wrong: str) -> None:
    with pytest.raises(SettingError) as caught:
        read_policy(written(tmp_path, text))
    assert wrong in str(caught.value)
    assert str(tmp_path) in str(caught.value)


def test_a_tier_for_flows_alone_is_not_asked_for_claims_and_the_first_is_asked_where_none_is_named(
    tmp_path: Path,
) -> None:
    text = '[[tiers]]\nname = "analyst"\napprovers = ["U01ALICE"]\nclaims = false\n'
    policy = read_policy(written(tmp_path, text + '[[tiers]]\nname = "all"\napprovers = ["U02BOB"]\n'))
    assert names_of(policy, "5", "USD") == ["all"]
    assert [tier.name for tier in policy.review_tiers(parse_claim(amount="5", currency="USD"))] == ["all"]
    assert policy.tier("analyst").approvers == ("U01ALICE",)
    assert policy.tier("approval") == Tier(name="approval", approvers=("U01ALICE",))


def test_a_link_that_leads_nowhere_is_not_no_policy(tmp_path: Path) -> None:
    Path("policy.toml").symlink_to(tmp_path / "elsewhere.toml")
    with pytest.raises(SettingError, match="cannot be read"):
        policy_of(Settings(approvers=""))


def test_a_file_and_approvers_are_not_both_taken(tmp_path: Path) -> None:
    # The tests' own folder is the one that a command would be typed in.
    shutil.copy(EXAMPLE, "policy.toml")
    assert policy_of(Settings()) == read_policy(EXAMPLE)
    with pytest.raises(SettingError, match="both say who may decide"):
        policy_of(Settings(approvers="U01ALICE"))
    with pytest.raises(SettingError, match="cannot be read"):
        policy_of(Settings(policy_file=tmp_path / "elsewhere.toml"))


def test_the_command_says_who_would_be_asked(tmp_path: Path) -> None:
    terminal = Terminal(tmp_path, POLICY_FILE=str(EXAMPLE))
    everybody = terminal.run("policy")
    assert (everybody.code, len(everybody.out.splitlines())) == (0, 2)
    asked = terminal.run("policy", "--amount", "5000")
    assert asked.out == (
        "manager: 1 of U01ALICE, U02BOB, @finance, carol@example.com, within 3 days, reminded every day"
        " (09:00-17:00 Europe/Berlin)\n"
    )
    assert terminal.run("policy", "--amount", "20").out.startswith("nobody: ")
    [manager, vp] = terminal.run("policy", "--amount", "60000", "--currency", "EUR", "--json").json
    assert (manager["name"], vp["required"]) == ("manager", 2)
    assert "langgraph" not in terminal.run("policy", trace_imports=True).imports
    built_in = Terminal(tmp_path, APPROVERS="U01ALICE")
    assert built_in.run("policy", "--amount", "101").out == "approval: 1 of U01ALICE\n"


# Threads under it


async def pending(conn: Connection, thread_id: str = "t1") -> tuple[str, str]:
    [approval] = [each for each in (await approvals_of(conn, [thread_id]))[thread_id] if each.status == "pending"]
    return approval.tier, approval.interrupt_id


async def run(conn: Connection, policy: Any) -> str:
    return await drive(conn, "t1", flows=ALL, policy=policy)


async def test_a_manager_and_two_of_three_vps_approve_in_turn(conn: Connection, policy: Tiers) -> None:
    await start_claim(conn, amount="60000")
    assert await run(conn, policy) == "waiting"
    tier, first = await pending(conn)
    assert tier == "manager"
    with pytest.raises(NotAllowed):
        await decide(conn, first, DANA, YES)
    await decide(conn, first, ALICE, YES)
    assert await run(conn, policy) == "waiting"
    tier, second = await pending(conn)
    assert tier == "vp"
    for stranger in (ALICE, BOB, CAROL):
        with pytest.raises(NotAllowed):
            await decide(conn, second, stranger, YES)
    await decide(conn, second, DANA, YES)
    # Once more is the same voice.
    assert not (await decide(conn, second, DANA, YES)).recorded
    assert await run(conn, policy) == "waiting"
    _, blocks = card(await approval_of(conn, second), await thread_of(conn, "t1"), None)
    assert "*1 of 2 approvals*" in str(blocks)
    await decide(conn, second, EMIL, YES)
    assert await run(conn, policy) == "over"
    assert await value(conn, "SELECT count(*) FROM payments WHERE amount = 60000") == 1


async def test_one_rejection_ends_it(conn: Connection, policy: Tiers) -> None:
    await start_claim(conn, amount="60000")
    await run(conn, policy)
    await decide(conn, (await pending(conn))[1], ALICE, YES)
    await run(conn, policy)
    _, second = await pending(conn)
    await decide(conn, second, DANA, YES)
    await decide(conn, second, EMIL, YES.__class__(verdict="reject", door="slack"))
    assert await run(conn, policy) == "over"
    assert (await thread_of(conn, "t1")).status == "rejected"


async def test_a_request_expires_and_nothing_is_paid(conn: Connection, policy: Tiers) -> None:
    await start_claim(conn, amount="250")
    await run(conn, policy)
    assert await value(conn, "SELECT expires_at - requested_at = interval '3 days' FROM approvals")
    await conn.execute("UPDATE approvals SET expires_at = clock_timestamp()")
    assert await expire_overdue(conn) == 1
    assert await run(conn, policy) == "over"
    assert (await thread_of(conn, "t1")).status == "expired"
    assert await value(conn, "SELECT count(*) FROM payments") == 0


async def test_a_change_of_the_policy_does_not_reach_what_waits(
    conn: Connection, policy: Tiers, tmp_path: Path
) -> None:
    await start_claim(conn, amount="250")
    await run(conn, policy)
    other = read_policy(written(tmp_path, '[[tiers]]\nname = "board"\napprovers = ["U66EVE"]\n'))
    _, interrupt_id = await pending(conn)
    await decide(conn, interrupt_id, BOB, YES)
    assert await run(conn, other) == "over"
    assert await value(conn, "SELECT count(*) FROM payments") == 1


# Flows that name a tier


async def started(conn: Connection, flow: str, **given: str) -> None:
    from tests.pattern_runs import start

    await start(conn, flow, "t1", **given)


async def test_a_flow_asks_the_tier_that_it_names(conn: Connection, policy: Tiers) -> None:
    await started(conn, "tiered", amount="60000")
    assert await run(conn, policy) == "waiting"
    await decide(conn, (await pending(conn))[1], ALICE, YES)
    assert await run(conn, policy) == "waiting"
    tier, second = await pending(conn)
    assert tier == "vp"
    with pytest.raises(NotAllowed):
        await decide(conn, second, ALICE, YES)
    for person in (DANA, Person(key="webhook:acme:carol", name="carol", names=frozenset({"webhook:acme:carol"}))):
        # What has no amount is above every limit of a step-up: a click is not enough.
        await decide(conn, second, person, replace(YES, door="web"))
    assert await run(conn, policy) == "over"
    assert (await thread_of(conn, "t1")).status == "done"


async def test_a_tier_that_the_policy_does_not_have_is_asked_of_nobody(
    conn: Connection, policy: Tiers, tmp_path: Path
) -> None:
    with pytest.raises(Unaskable, match="the policy has no tier 'board', only manager, vp"):
        policy.tier("board")
    only = read_policy(written(tmp_path, '[[tiers]]\nname = "manager"\napprovers = ["U01ALICE"]\n'))
    await started(conn, "approval", amount="60000", payee="ACME")
    assert await run(conn, only) == "stuck"
    assert "the policy has no tier 'vp', only manager" in str((await thread_of(conn, "t1")).reason)
    assert await value(conn, "SELECT count(*) FROM approvals") == 0
    # One that waits already keeps its rules.
    await conn.execute("UPDATE threads SET status = 'running', due_at = clock_timestamp()")
    assert await run(conn, policy) == "waiting"
    await conn.execute("UPDATE threads SET due_at = clock_timestamp()")
    assert await run(conn, only) == "waiting"
    assert ANN.trusted
