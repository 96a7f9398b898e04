"""Another amount, proposed by an approver, and the policy of today, applied on purpose."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

from bot.outcomes import superseded_line
from bot.people import as_named_here
from flow.approvals import approval_of, approvals_of, decide
from flow.changes import change_amount, refresh
from flow.database import Connection
from flow.delegations import away
from flow.drive import drive
from flow.errors import AlreadyDecided, BadInput, NotAllowed, NothingToDecide, StaleRequest, Tampered, Unaskable
from flow.flows import Flows
from flow.model import Approval, Person
from flow.policy import Policy, Rule, Tier, Tiers
from flow.show import approval_as_json, changed_in_words, stories_of
from flow.threads import thread_of
from flow.trace import trace_of
from tests.api_door import Program, api_in_process, token
from tests.command import Terminal
from tests.driving import money, run
from tests.people import ALICE, ANN, BOB, CAROL, EVE, NO, POLICY, YES, ask, start_claim
from tests.rows import all_rows, one_row, value

MANAGER = Tier(name="manager", approvers=("U01ALICE", "U02BOB"))
VP = Tier(name="vp", approvers=("U03CAROL",), rank=1)
TWO = Tiers(
    rules=(Rule(tier=MANAGER, over={"USD": Decimal(100)}), Rule(tier=VP, over={"USD": Decimal(1000)})),
)


async def waiting(conn: Connection, flows: Flows, policy: Policy = POLICY, amount: str = "250") -> Approval:
    await start_claim(conn, amount=amount)
    assert await run(conn, flows, policy=policy) == "waiting"
    return await newest(conn)


async def newest(conn: Connection) -> Approval:
    return (await approvals_of(conn, ["t1"]))["t1"][-1]


async def change(conn: Connection, approval: Approval, person: Person, amount: str, reason: str = "") -> Approval:
    return await change_amount(
        conn,
        approval.interrupt_id,
        person,
        amount=amount,
        reason=reason,
        door="slack",
        request_hash=approval.request_hash,
    )


async def test_another_amount_is_another_request_and_only_that_is_paid(conn: Connection, flows: Flows) -> None:
    first = await waiting(conn, flows)
    superseded = await change(conn, first, ALICE, "200", "as the order says")
    assert (superseded.status, superseded.changed_to, superseded.changed_by, superseded.changed_why) == (
        "superseded", {"amount": "200.00"}, ALICE.key, "as the order says"
    )  # fmt: skip
    # Before the flow has asked again nobody can decide the old one.
    with pytest.raises(AlreadyDecided, match="superseded"):
        await decide(conn, first.interrupt_id, BOB, YES)
    assert await run(conn, flows) == "waiting"
    second = await newest(conn)
    assert second.interrupt_id != first.interrupt_id
    assert second.request_hash != first.request_hash
    assert (second.status, second.request["amount"], second.decisions) == ("pending", "200.00", ())
    await decide(conn, second.interrupt_id, ALICE, YES)
    assert await run(conn, flows) == "over"
    assert await money(conn) == [("t1", "200.00", "USD", "ACME")]
    thread = await thread_of(conn, "t1")
    assert (thread.input["amount"], thread.asks_for["amount"]) == ("250.00", "200.00")


async def test_the_same_claim_filed_again_is_still_the_same_thread(conn: Connection, flows: Flows) -> None:
    await change(conn, await waiting(conn, flows), ALICE, "200")
    assert (await start_claim(conn, amount="250")).thread_id == "t1"


async def test_a_click_on_the_old_card_never_answers_the_new_request(conn: Connection, flows: Flows) -> None:
    first = await waiting(conn, flows)
    await change(conn, first, ALICE, "200")
    await run(conn, flows)
    for verdict in (YES, NO):
        with pytest.raises(AlreadyDecided):
            await decide(conn, first.interrupt_id, BOB, verdict)
    assert (await newest(conn)).status == "pending"


async def test_votes_are_void_and_every_tier_is_asked_again(conn: Connection, flows: Flows) -> None:
    first = await waiting(conn, flows, TWO, "2000")
    await decide(conn, first.interrupt_id, ALICE, YES)
    assert await run(conn, flows, policy=TWO) == "waiting"
    await change(conn, await newest(conn), CAROL, "1500")
    assert await run(conn, flows, policy=TWO) == "waiting"
    asked = (await approvals_of(conn, ["t1"]))["t1"]
    assert [(each.tier, each.status, each.request["amount"]) for each in asked] == [
        ("manager", "superseded", "2000.00"), ("vp", "superseded", "2000.00"), ("manager", "pending", "1500.00")
    ]  # fmt: skip
    assert [(each.step, each.steps) for each in asked] == [(1, 2), (2, 2), (1, 2)]
    for person in (ALICE, CAROL):
        await decide(conn, (await newest(conn)).interrupt_id, person, YES)
        last = await run(conn, flows, policy=TWO)
    assert last == "over"
    assert await money(conn) == [("t1", "1500.00", "USD", "ACME")]


async def test_tiers_are_those_of_the_new_amount(conn: Connection, flows: Flows) -> None:
    await change(conn, await waiting(conn, flows, TWO, "2000"), ALICE, "500")
    await run(conn, flows, policy=TWO)
    await decide(conn, (await newest(conn)).interrupt_id, BOB, YES)
    assert await run(conn, flows, policy=TWO) == "over"
    assert await money(conn) == [("t1", "500.00", "USD", "ACME")]


async def test_an_amount_below_every_limit_is_asked_for_all_the_same(conn: Connection, flows: Flows) -> None:
    await change(conn, await waiting(conn, flows), ALICE, "20")
    assert await run(conn, flows) == "waiting"
    assert await money(conn) == []
    await decide(conn, (await newest(conn)).interrupt_id, BOB, YES)
    assert await run(conn, flows) == "over"
    assert await money(conn) == [("t1", "20.00", "USD", "ACME")]


async def test_whoever_raises_an_amount_does_not_decide_it(conn: Connection, flows: Flows) -> None:
    await change(conn, await waiting(conn, flows), ALICE, "300")
    await run(conn, flows)
    raised = await newest(conn)
    with pytest.raises(NotAllowed, match="raised the amount"):
        await decide(conn, raised.interrupt_id, ALICE, YES)
    # Another one lowers it, and it is still above what was filed.
    await change(conn, raised, BOB, "290")
    await run(conn, flows)
    for person in (ALICE, BOB):
        with pytest.raises(NotAllowed, match="raised the amount"):
            await decide(conn, (await newest(conn)).interrupt_id, person, YES)
    # What was filed is asked for by nobody but whoever filed it.
    await change(conn, await newest(conn), CAROL, "250")
    await run(conn, flows)
    await decide(conn, (await newest(conn)).interrupt_id, ALICE, YES)
    assert await run(conn, flows) == "over"
    assert await money(conn) == [("t1", "250.00", "USD", "ACME")]


async def test_the_same_change_of_the_request_that_it_made_is_none(conn: Connection, flows: Flows) -> None:
    first = await waiting(conn, flows)
    await change_amount(conn, first.interrupt_id, ANN, amount="300", door="cli", request_hash=None)
    await drive(conn, "t1", flows=flows, policy=POLICY)
    [second] = [each for each in (await approvals_of(conn, ["t1"]))["t1"] if each.status == "pending"]
    again = await change_amount(conn, second.interrupt_id, ANN, amount="300.00", door="cli", request_hash=None)
    assert again.interrupt_id == first.interrupt_id
    assert (await approval_of(conn, second.interrupt_id)).status == "pending"
    # Whoever has not asked for it is told so.
    with pytest.raises(BadInput, match="asked for already"):
        await change_amount(conn, second.interrupt_id, BOB, amount="300", door="slack", request_hash=None)


def test_a_change_at_the_command_line_may_be_typed_again(database_url: str, tmp_path: Path) -> None:
    terminal = Terminal(tmp_path, DATABASE_URL=database_url, APPROVERS="U01ALICE")
    assert terminal.run("start", "--thread", "t1", "--amount", "250").code == 0
    for amount in ("300", "300", "300.00", "400", "300"):
        done = terminal.run("change", "--thread", "t1", "--amount", amount)
        assert (done.code, done.err) == (0, ""), done
        assert done.out.startswith(f"t1: {amount.removesuffix('.00')}.00 USD is waiting"), done.out
    assert len([row for row in terminal.run("audit", "--thread", "t1").out.splitlines() if "changed" in row]) == 3


async def test_the_same_change_twice_is_one(conn: Connection, flows: Flows) -> None:
    first = await waiting(conn, flows)
    for _ in range(2):
        await change(conn, first, ALICE, "200")
    assert await value(conn, "SELECT count(*) FROM events WHERE type = 'approval.changed'") == 1
    with pytest.raises(AlreadyDecided):
        await change(conn, first, BOB, "210")


@pytest.mark.parametrize(
    ("amount", "wrong"),
    [
        ("", "write digits"),
        ("-5", "write digits"),
        ("0", "above zero"),
        ("1.234", "at most 2 decimals"),
        ("1e3", "write digits"),
        ("250", "asked for already"),
        ("250.0", "asked for already"),
    ],
)
async def test_what_is_no_other_amount_changes_nothing(conn: Connection, flows: Flows, amount: str, wrong: str) -> None:
    first = await waiting(conn, flows)
    with pytest.raises(BadInput, match=wrong):
        await change(conn, first, ALICE, amount)
    assert await approval_of(conn, first.interrupt_id) == first
    assert (await thread_of(conn, "t1")).changed is None


async def test_only_those_who_may_decide_it_change_it_and_only_what_they_saw(conn: Connection, flows: Flows) -> None:
    first = await waiting(conn, flows)
    with pytest.raises(NotAllowed):
        await change(conn, first, EVE, "200")
    with pytest.raises(StaleRequest):
        await change(conn, replace(first, request_hash="0" * 64), ALICE, "200")
    await decide(conn, first.interrupt_id, BOB, NO)
    with pytest.raises(AlreadyDecided):
        await change(conn, first, ALICE, "200")
    assert (await newest(conn)).changed_to is None


async def test_a_change_and_a_click_at_one_moment_leave_one_truth(
    conn: Connection, crowd: list[Connection], flows: Flows
) -> None:
    for number in range(5):
        interrupt_id = await ask(conn, f"r{number}")
        approval = await approval_of(conn, interrupt_id)
        answers = await asyncio.gather(
            change(crowd[0], approval, ALICE, "200"),
            decide(crowd[1], interrupt_id, BOB, YES),
            change(crowd[2], approval, CAROL, "210"),
            return_exceptions=True,
        )
        assert [isinstance(each, AlreadyDecided) for each in answers].count(True) == 2, answers
        after = await approval_of(conn, interrupt_id)
        assert after.status == ("approved" if not isinstance(answers[1], Exception) else "superseded")


async def test_another_flow_takes_no_other_amount(conn: Connection) -> None:
    interrupt_id = await ask(conn)
    await conn.execute("UPDATE threads SET flow = 'payment'")
    with pytest.raises(NothingToDecide):
        await change(conn, await approval_of(conn, interrupt_id), ALICE, "200")


# The policy of today


def one(approvers: tuple[str, ...], **more: Any) -> Tiers:
    """A policy of the one tier that the tests' claims have asked."""
    tier = Tier(name="approval", approvers=approvers, **more)
    return Tiers(rules=(Rule(tier=tier, over={"USD": Decimal(100)}),))


async def test_the_policy_reaches_what_waits_when_it_is_told_to(conn: Connection, flows: Flows) -> None:
    first = await waiting(conn, flows)
    [tier] = await refresh(conn, one(("U66EVE",), expires_after_s=60.0, remind_every_s=5.0), "t1", by="cli:ann")
    assert tier.approvers == ("U66EVE",)
    # Whatever policy the worker began with.
    assert await run(conn, flows) == "waiting"
    approval = await newest(conn)
    assert approval.interrupt_id != first.interrupt_id
    assert (approval.approvers, approval.whole, approval.status) == (("U66EVE",), True, "pending")
    row = await one_row(
        conn,
        "SELECT expires_at > clock_timestamp() + interval '50 seconds' AS late, remind_at > clock_timestamp() AS remind"
        " FROM approvals WHERE status = 'pending'",
    )
    assert row == {"late": True, "remind": True}
    for asked in (first, approval):
        with pytest.raises((NotAllowed, AlreadyDecided)):
            await decide(conn, asked.interrupt_id, ALICE, YES)
    await decide(conn, approval.interrupt_id, EVE, YES)
    assert await run(conn, flows) == "over"
    assert await money(conn) == [("t1", "250.00", "USD", "ACME")]


async def test_every_tier_is_asked_anew_by_it_and_votes_so_far_are_void(conn: Connection, flows: Flows) -> None:
    first = await waiting(conn, flows, TWO, "2000")
    await decide(conn, first.interrupt_id, ALICE, YES)
    assert await run(conn, flows, policy=TWO) == "waiting"
    manager, vp = replace(MANAGER, required=2), replace(VP, approvers=("U66EVE",))
    rules = (Rule(tier=manager, over={"USD": Decimal(100)}), Rule(tier=vp, over={"USD": Decimal(1000)}))
    await refresh(conn, Tiers(rules=rules), "t1", by="cli:ann")
    assert [each.status for each in (await approvals_of(conn, ["t1"]))["t1"]] == ["superseded", "superseded"]
    [story] = await stories_of(conn, [await thread_of(conn, "t1")])
    ends = [event.detail for event in (await trace_of(conn, story)).events if event.what == "Superseded"]
    assert "by cli:ann, who asks for the same, by the policy of then" in ends
    for person in (ALICE, BOB, EVE):
        assert await run(conn, flows, policy=TWO) == "waiting"
        await decide(conn, (await newest(conn)).interrupt_id, person, YES)
    assert await run(conn, flows, policy=TWO) == "over"
    assert await money(conn) == [("t1", "2000.00", "USD", "ACME")]


async def test_what_needs_no_approval_by_now_is_asked_for_all_the_same(conn: Connection, flows: Flows) -> None:
    await waiting(conn, flows)
    lax = Tiers(rules=(Rule(tier=MANAGER, over={"USD": Decimal(10_000)}),))
    assert [tier.name for tier in await refresh(conn, lax, "t1", by="cli:ann")] == ["manager"]
    assert await run(conn, flows, policy=lax) == "waiting"
    assert await money(conn) == []


async def test_an_amount_that_was_changed_stays_changed(conn: Connection, flows: Flows) -> None:
    await change(conn, await waiting(conn, flows), ALICE, "300")
    await run(conn, flows)
    await refresh(conn, one(POLICY.approvers), "t1", by="cli:ann")
    await run(conn, flows)
    approval = await newest(conn)
    assert approval.request["amount"] == "300.00"
    with pytest.raises(NotAllowed, match="raised the amount"):
        await decide(conn, approval.interrupt_id, ALICE, YES)
    await decide(conn, approval.interrupt_id, BOB, YES)
    assert await run(conn, flows) == "over"
    assert await money(conn) == [("t1", "300.00", "USD", "ACME")]


async def test_another_flow_keeps_its_request_and_gets_the_rules_and_no_votes(conn: Connection) -> None:
    interrupt_id = await ask(conn, tier=Tier(name="approval", approvers=POLICY.approvers, required=2))
    await conn.execute("UPDATE threads SET flow = 'payment'")
    await decide(conn, interrupt_id, ALICE, YES)
    await refresh(conn, one(("U01ALICE", "U66EVE"), required=2), "t1", by="cli:ann")
    approval = await approval_of(conn, interrupt_id)
    assert (approval.approvers, approval.whole) == (("U01ALICE", "U66EVE"), True)
    assert [(each.person, each.void) for each in approval.decisions] == [(ALICE.key, True)]
    await decide(conn, interrupt_id, EVE, YES)
    assert (await approval_of(conn, interrupt_id)).status == "pending"
    # Their voice is theirs again.
    assert (await decide(conn, interrupt_id, ALICE, YES)).approval.status == "approved"


async def test_what_was_changed_past_us_is_not_made_good(conn: Connection, flows: Flows) -> None:
    first = await waiting(conn, flows)
    await conn.execute("UPDATE approvals SET approvers = '{U66EVE}'")
    with pytest.raises(Tampered):
        await refresh(conn, POLICY, "t1", by="cli:ann")
    assert not (await approval_of(conn, first.interrupt_id)).whole


async def test_a_tier_that_is_gone_leaves_everything_as_it_was(conn: Connection) -> None:
    interrupt_id = await ask(conn, tier=Tier(name="old", approvers=("U01ALICE",)))
    await conn.execute("UPDATE threads SET flow = 'payment'")
    with pytest.raises(Unaskable, match="no tier 'old'"):
        await refresh(conn, Tiers(rules=(Rule(tier=MANAGER, over={}),)), "t1", by="cli:ann")
    assert (await approval_of(conn, interrupt_id)).approvers == ("U01ALICE",)


async def test_a_thread_that_waits_for_nobody_is_left_alone(conn: Connection, flows: Flows) -> None:
    await start_claim(conn, amount="20")
    await run(conn, flows)
    assert await refresh(conn, POLICY, "t1", by="cli:ann") == ()
    assert await all_rows(conn, "SELECT * FROM approvals") == []


def file_policy(folder: Path, tier: str) -> None:
    (folder / "policy.toml").write_text(f'[[tiers]]\nname = "{tier}"\napprovers = ["U66EVE"]\n')


async def test_it_is_told_to_at_the_command_line(
    conn: Connection, database_url: str, tmp_path: Path, flows: Flows
) -> None:
    terminal = Terminal(tmp_path, DATABASE_URL=database_url)
    await start_claim(conn, "t1")
    await run(conn, flows)
    file_policy(tmp_path, "finance")
    done = terminal.run("approvals", "refresh", "--all")
    assert (done.code, done.out.strip()) == (0, "t1: finance: 1 of U66EVE")
    approval = await newest(conn)
    assert (approval.tier, approval.approvers, approval.status) == ("finance", ("U66EVE",), "pending")
    shown = terminal.run("show", "--thread", "t1").out
    assert "to the policy of that day by cli:" in shown
    kinds = [row["kind"] for row in await all_rows(conn, "SELECT kind FROM audit WHERE thread_id = 't1' ORDER BY id")]
    assert kinds == [
        "thread.started", "approval.requested", "approval.changed", "approval.refreshed", "approval.requested"
    ]  # fmt: skip
    again = terminal.run("approvals", "refresh", "--thread", "t1", "--json").json
    assert (again["thread"], [tier["name"] for tier in again["tiers"]], again["refused"]) == ("t1", ["finance"], None)
    assert terminal.run("approvals", "refresh", "--thread", "t9").code == 1
    assert terminal.run("approvals", "refresh").code == 2


async def test_what_could_not_be_refreshed_is_said_in_json_too(
    conn: Connection, database_url: str, tmp_path: Path, flows: Flows
) -> None:
    terminal = Terminal(tmp_path, DATABASE_URL=database_url)
    for thread_id in ("t1", "t2"):
        await start_claim(conn, thread_id)
        assert await drive(conn, thread_id, flows=flows, policy=POLICY) == "waiting"
    await conn.execute("UPDATE approvals SET approvers = '{U66EVE}' WHERE thread_id = 't2'")
    file_policy(tmp_path, "finance")
    done = terminal.run("approvals", "refresh", "--all", "--json")
    assert done.code == 1
    assert [(each["thread"], len(each["tiers"]), bool(each["refused"])) for each in done.json] == [
        ("t1", 1, False), ("t2", 0, True)
    ]  # fmt: skip
    assert terminal.run("approvals", "refresh", "--thread", "t2", "--json").code == 1


async def test_the_command_line_shows_what_is_asked_for_and_not_what_was_filed(
    conn: Connection, database_url: str, tmp_path: Path, flows: Flows
) -> None:
    terminal = Terminal(tmp_path, DATABASE_URL=database_url, APPROVERS="U01ALICE")
    await change(conn, await waiting(conn, flows), ALICE, "9000")
    await run(conn, flows)
    listed, shown = terminal.run("list").out, terminal.run("show", "--thread", "t1")
    assert "9000.00 USD" in listed and "9000.00 USD" in shown.out
    story = terminal.run("show", "--thread", "t1", "--json").json
    assert (story["amount"], story["input"]["amount"], story["changed"]) == ("9000.00", "250.00", {"amount": "9000.00"})


async def test_a_delegate_who_changes_it_is_named_with_the_one_who_is_away(conn: Connection, flows: Flows) -> None:
    first = await waiting(conn, flows)
    async with conn.transaction():
        until = datetime.now(UTC) + timedelta(days=1)
        await away(conn, ALICE, to=EVE.key, until=until, made_by=ALICE.key)
    for _ in range(2):
        superseded = await change(conn, first, EVE, "200")
        assert (superseded.changed_to, superseded.changed_by, superseded.changed_for) == (
            {"amount": "200.00"}, EVE.key, ALICE.key
        )  # fmt: skip
    both = f"{EVE.key} for {ALICE.key}"
    shown_here = as_named_here(superseded, {"T01TEST"})
    assert superseded_line(shown_here).startswith("Superseded: <@U66EVE> for <@U01ALICE> asks for 200.00 USD")
    with pytest.raises(AlreadyDecided, match=f"superseded by {both}"):
        await decide(conn, first.interrupt_id, BOB, YES)
    [story] = await stories_of(conn, [await thread_of(conn, "t1")])
    assert changed_in_words(superseded) == f"to 200.00 by {both}"
    [event] = [event for event in (await trace_of(conn, story)).events if event.what == "Superseded"]
    assert event.detail == f"by {both}, who asks for 200.00 instead of 250.00"
    shown = approval_as_json(superseded)
    assert (shown["changed_to"], shown["changed_by"], shown["changed_for"]) == (
        {"amount": "200.00"}, EVE.key, ALICE.key
    )  # fmt: skip
    # Whoever is on the list themselves speaks for themselves.
    own = await change(conn, await newest_after(conn, flows), BOB, "180")
    assert (own.changed_by, own.changed_for) == (BOB.key, None)


async def newest_after(conn: Connection, flows: Flows) -> Approval:
    """What waits after the thread was driven."""
    assert await run(conn, flows) == "waiting"
    return await newest(conn)


# Doors: tests/test_every_door.py has them all


async def test_a_program_asks_for_another_amount_in_its_own_name(
    database_url: str, conn: Connection, flows: Flows
) -> None:
    policy = Tiers(rules=(Rule(tier=Tier(name="robots", approvers=("api:robot",)), over={"USD": Decimal(100)}),))
    first = await waiting(conn, flows, policy)
    path, said = f"/api/approvals/{first.interrupt_id}/amount", {"amount": "200", "reason": "as the order says"}
    async with api_in_process(database_url) as url, Program(url, await token(conn)) as robot:
        for wrong in ({}, {"amount": 200}, {"amount": "-1"}, said | {"currency": "EUR"}):
            assert (await robot.post(path, wrong)).status == 400
        for wrong in ({"amount": "200.001"}, {"amount": "250"}, said | {"interrupt_id": "0" * 32}):
            assert (await robot.post(path, wrong)).status == 422
        assert (await robot.post(path, said | {"approver": "carol"})).status == 403
        assert (await robot.post(path, said | {"request_hash": "0" * 64})).status == 409
        for _ in range(2):
            answer = await robot.post(path, said)
            assert (answer.status, answer.body["status"], answer.body["changed_to"]) == (
                200, "superseded", {"amount": "200.00"}
            )  # fmt: skip
            assert (answer.body["changed_by"], answer.body["changed_why"]) == ("api:robot", "as the order says")
        assert (await robot.post(path, {"amount": "300"})).status == 409
        assert (await robot.post(f"/api/approvals/{'0' * 32}/amount", said)).status == 404
    row = await one_row(conn, "SELECT who, door FROM audit WHERE kind = 'approval.changed'")
    assert row == {"who": "api:robot", "door": "api"}
    assert (await thread_of(conn, "t1")).asks_for["amount"] == "200.00"


def test_the_command_line_asks_for_another_amount(tmp_path: Path, database_url: str) -> None:
    terminal = Terminal(tmp_path, DATABASE_URL=database_url)
    terminal.run("start", "--thread", "t1", "--amount", "250")
    assert terminal.run("change", "--thread", "t1").code == 2
    assert terminal.run("change", "--thread", "t2", "--amount", "200").code == 1
    wrong = terminal.run("change", "--thread", "t1", "--amount", "1,000")
    assert (wrong.code, "write digits" in wrong.err) == (2, True)
    changed = terminal.run("change", "--thread", "t1", "--amount", "200", "--reason", "two chairs", "--json").json
    assert (changed["status"], changed["amount"], changed["approval"]["status"]) == ("waiting", "200.00", "pending")
    again = terminal.run("change", "--thread", "t1", "--amount", "200")
    assert (again.code, again.out.startswith("t1: 200.00 USD is waiting")) == (0, True)
    named = "--interrupt", changed["approval"]["interrupt_id"]
    for _ in range(2):
        # The same again is a success that changes nothing.
        done = terminal.run("change", "--thread", "t1", "--amount", "180", *named)
        assert (done.code, done.out.startswith("t1: 180.00 USD is waiting")) == (0, True)
    late = terminal.run("change", "--thread", "t1", "--amount", "170", *named)
    assert (late.code, "already superseded by cli:ann" in late.err) == (1, True)
    rows = terminal.run("audit", "--thread", "t1", "--json").json
    assert [(row["who"], row["door"]) for row in rows if row["kind"] == "approval.changed"] == [("cli:ann", "cli")] * 2
