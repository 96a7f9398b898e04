"""The rules of a tier, as each request keeps them: whoever asks, the page, escalation; and rows changed past us."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import LiteralString

import pytest
from psycopg import errors

from bot.blocks import alarm
from flow.approvals import approval_of, decide
from flow.database import Connection
from flow.deadlines import expire_overdue
from flow.delegations import away
from flow.errors import AlreadyDecided, ApprovalExpired, GroupsUnknown, NotAllowed, PageNeeded, Tampered
from flow.flows import Flows
from flow.model import Verdict
from flow.notices import failures_of
from flow.policy import Tier
from flow.threads import thread_of
from tests.driving import run
from tests.people import ALICE, ANN, BOB, CAROL, EVE, NO, ONE_OF_THREE, YES, ask, slack_person, start_claim
from tests.rows import all_rows, rewrite, value

OWN = Tier(name="approval", approvers=("U01ALICE", "U02BOB"), required=2, self_approval=True)
ON_THE_PAGE = Tier(name="approval", approvers=("U01ALICE",), step_up=True)
ESCALATING = Tier(
    name="approval", approvers=("U01ALICE",), expires_after_s=3600, on_expiry="escalate", escalate_to=("U02BOB",)
)
GROUP = Tier(name="approval", approvers=("@finance", "S01BOARD"))


async def overdue(conn: Connection) -> None:
    await conn.execute("UPDATE approvals SET expires_at = clock_timestamp() - interval '1 second'")


# Whoever asks


async def test_whoever_asks_is_one_of_those_who_approve_where_the_policy_says_so(conn: Connection) -> None:
    interrupt_id = await ask(conn, tier=OWN, requested_by=ALICE.key)
    assert (await decide(conn, interrupt_id, ALICE, YES)).approval.status == "pending"
    # Still one voice.
    assert not (await decide(conn, interrupt_id, ALICE, YES)).recorded
    assert (await decide(conn, interrupt_id, BOB, YES)).approval.status == "approved"


@pytest.mark.parametrize("requested_by", ["slack:T01TEST/U01ALICE", "U01ALICE", "u01alice"])
async def test_and_nowhere_else(conn: Connection, requested_by: str) -> None:
    interrupt_id = await ask(conn, requested_by=requested_by)
    with pytest.raises(NotAllowed, match="of their own"):
        await decide(conn, interrupt_id, ALICE, YES)


# More than a click


async def test_a_click_does_not_approve_what_takes_the_page(conn: Connection) -> None:
    interrupt_id = await ask(conn, tier=ON_THE_PAGE)
    with pytest.raises(PageNeeded):
        await decide(conn, interrupt_id, ALICE, YES)
    assert await all_rows(conn, "SELECT * FROM decisions") == []
    on_the_page = Verdict(verdict="approve", door="web")
    assert (await decide(conn, interrupt_id, ALICE, on_the_page)).approval.status == "approved"


async def test_a_click_does_reject_it(conn: Connection) -> None:
    interrupt_id = await ask(conn, tier=ON_THE_PAGE)
    assert (await decide(conn, interrupt_id, ALICE, NO)).approval.status == "rejected"


# Groups


async def test_a_group_names_whoever_is_known_to_be_in_it(conn: Connection) -> None:
    interrupt_id = await ask(conn, tier=GROUP)
    with pytest.raises(GroupsUnknown) as caught:
        await decide(conn, interrupt_id, replace(ALICE, groups_known=False), YES)
    assert caught.value.groups == ("@finance", "S01BOARD")
    with pytest.raises(NotAllowed, match="not on the list"):
        await decide(conn, interrupt_id, ALICE, YES)
    in_it = replace(ALICE, names=ALICE.names | {"@finance"})
    decided = await decide(conn, interrupt_id, in_it, YES)
    assert (decided.approval.status, decided.approval.decisions[0].listed_as) == ("approved", "@finance")


# Escalation


async def test_others_are_asked_too_when_the_time_is_over_and_once(conn: Connection) -> None:
    interrupt_id = await ask(conn, tier=ESCALATING)
    with pytest.raises(NotAllowed):
        await decide(conn, interrupt_id, BOB, YES)
    await overdue(conn)
    before = await value(conn, "SELECT version FROM notices WHERE kind = 'card'")
    assert await expire_overdue(conn) == 1
    approval = await approval_of(conn, interrupt_id)
    assert (approval.status, approval.approvers, approval.whole) == ("pending", ("U01ALICE", "U02BOB"), True)
    assert approval.escalated_at is not None
    assert approval.expires_at is not None
    assert (approval.expires_at - approval.escalated_at).total_seconds() == pytest.approx(3600, abs=1)
    assert await value(conn, "SELECT version FROM notices WHERE kind = 'card'") == before + 1
    assert await value(conn, "SELECT status FROM notices WHERE kind = 'reminder'") == "pending"
    assert await value(conn, "SELECT type FROM events ORDER BY id DESC LIMIT 1") == "approval.escalated"
    assert await expire_overdue(conn) == 0
    assert (await decide(conn, interrupt_id, BOB, YES)).approval.status == "approved"


async def test_the_second_time_it_is_over(conn: Connection, flows: Flows) -> None:
    await start_claim(conn)
    await run(conn, flows)
    escalating = "on_expiry = 'escalate', escalate_to = '{U02BOB}', expires_after_s = 3600, expires_at = now()"
    await rewrite(conn, escalating)
    for _ in range(2):
        assert await expire_overdue(conn) == 1
        await overdue(conn)
    assert await value(conn, "SELECT status FROM approvals") == "expired"
    assert await run(conn, flows) == "over"
    assert (await thread_of(conn, "t1")).status == "expired"


async def test_the_first_may_decide_until_the_clock_has_looked(conn: Connection) -> None:
    interrupt_id = await ask(conn, tier=ESCALATING)
    await overdue(conn)
    assert (await decide(conn, interrupt_id, ALICE, YES)).approval.status == "approved"
    assert await expire_overdue(conn) == 0


async def test_after_it_has_escalated_its_end_is_its_end(conn: Connection) -> None:
    interrupt_id = await ask(conn, tier=ESCALATING)
    await overdue(conn)
    await expire_overdue(conn)
    await overdue(conn)
    with pytest.raises(ApprovalExpired):
        await decide(conn, interrupt_id, ALICE, YES)


async def test_clicks_and_clocks_at_one_moment_leave_one_truth(conn: Connection, crowd: list[Connection]) -> None:
    for number in range(10):
        interrupt_id = await ask(conn, f"t{number}", tier=ESCALATING)
        await overdue(conn)
        first, second, third, fourth = crowd
        answers = await asyncio.gather(
            expire_overdue(first),
            decide(second, interrupt_id, ALICE, YES),
            expire_overdue(third),
            decide(fourth, interrupt_id, BOB, YES),
            return_exceptions=True,
        )
        assert [each for each in answers if isinstance(each, Exception) and not isinstance(each, NotAllowed)] == []
        approval = await approval_of(conn, interrupt_id)
        assert (approval.status, approval.whole) == ("approved", True)
        asked = ("U01ALICE", "U02BOB") if approval.escalated_at else ("U01ALICE",)
        assert approval.approvers == asked


async def test_the_clock_makes_nothing_good_that_was_changed_past_us(conn: Connection) -> None:
    interrupt_id = await ask(conn, tier=ESCALATING)
    await conn.execute("UPDATE approvals SET approvers = '{U66EVE}'")
    await overdue(conn)
    assert await expire_overdue(conn) == 1
    assert (await approval_of(conn, interrupt_id)).status == "expired"
    with pytest.raises((Tampered, ApprovalExpired)):
        await decide(conn, interrupt_id, EVE, YES)


# Rows that were changed past us


@pytest.mark.parametrize(
    "change",
    [
        "request = jsonb_set(request, '{amount}', '\"9250.00\"')",
        "request = jsonb_set(request, '{payee}', '\"Mallory\"')",
        "request_hash = repeat('0', 64)",
        "approvers = array_append(approvers, 'U66EVE')",
        "required = 1",
        "raised_by = '{U02BOB}'",
        "escalate_to = '{U66EVE}'",
        "requested_by = 'somebody'",
        "self_approval = true",
        "step_up = true",
        "tier = 'lower'",
    ],
)
async def test_what_was_changed_past_us_is_decided_by_nobody_and_alarms(
    conn: Connection, change: LiteralString
) -> None:
    interrupt_id = await ask(conn, tier=replace(ONE_OF_THREE, required=2))
    await conn.execute(f"UPDATE approvals SET {change}")
    for person in (ALICE, ANN, EVE):
        with pytest.raises(Tampered):
            await decide(conn, interrupt_id, person, YES)
    assert await all_rows(conn, "SELECT * FROM decisions") == []
    assert await value(conn, "SELECT status FROM notices WHERE kind = 'alarm'") == "pending"
    said = alarm(await thread_of(conn, "t1"), await failures_of(conn, "t1"))
    assert said is not None
    assert "was changed in the database" in said


async def test_what_is_changed_after_it_was_approved_is_not_paid(conn: Connection, flows: Flows) -> None:
    await start_claim(conn)
    await run(conn, flows)
    interrupt_id = await value(conn, "SELECT interrupt_id FROM approvals")
    await decide(conn, interrupt_id, ALICE, YES)
    # Anybody may be written there; who was asked is part of what was approved.
    await conn.execute("UPDATE approvals SET approvers = '{U66EVE}'")
    assert await run(conn, flows) == "stuck"
    assert await all_rows(conn, "SELECT * FROM payments") == []
    assert "was not approved in this form" in ((await thread_of(conn, "t1")).reason or "")


# What stays of it


async def test_a_vote_a_refusal_and_a_decision_are_kept_with_who_and_what_they_saw(conn: Connection) -> None:
    interrupt_id = await ask(conn, tier=replace(ONE_OF_THREE, required=2))
    digest = (await approval_of(conn, interrupt_id)).request_hash
    seen = replace(YES, request_hash=digest)
    await away(conn, CAROL, to="U66EVE", until=datetime.now(UTC) + timedelta(hours=1), made_by=CAROL.key)
    with pytest.raises(NotAllowed):
        await decide(conn, interrupt_id, slack_person("U77MALLORY", "Mallory"), seen)
    await decide(conn, interrupt_id, ALICE, seen)
    await decide(conn, interrupt_id, EVE, seen)
    with pytest.raises(AlreadyDecided):
        await decide(conn, interrupt_id, BOB, replace(NO, door="web", request_hash=digest))
    rows = await all_rows(
        conn, "SELECT kind, who, door, for_whom, shown FROM audit WHERE interrupt_id = %s ORDER BY id", interrupt_id
    )
    assert [(row["kind"], row["who"], row["door"], row["for_whom"]) for row in rows] == [
        ("approval.requested", "flow:claims", "flow", ANN.key),
        ("approval.refused", "slack:T01TEST/U77MALLORY", "slack", None),
        ("approval.voted", ALICE.key, "slack", None),
        ("approval.voted", EVE.key, "slack", CAROL.key),
        ("approval.decided", EVE.key, "slack", CAROL.key),
        ("approval.refused", BOB.key, "web", None),
    ]
    assert {row["shown"] for row in rows} == {digest}


async def test_whoever_has_the_database_overrides_and_that_is_kept(conn: Connection) -> None:
    interrupt_id = await ask(conn)
    await decide(conn, interrupt_id, ANN, Verdict(verdict="approve", door="cli"))
    assert await value(conn, "SELECT data->'override' FROM audit WHERE kind = 'approval.voted'") is True


async def test_each_request_that_was_changed_past_us_is_said(conn: Connection) -> None:
    first, second = await ask(conn), await ask(conn, "t2")
    await conn.execute("UPDATE approvals SET thread_id = 't1', required = 3")
    for interrupt_id in (first, second):
        with pytest.raises(Tampered):
            await decide(conn, interrupt_id, ALICE, YES)
    assert await value(conn, "SELECT version FROM notices WHERE kind = 'alarm'") == 2


async def test_a_release_that_knows_no_rules_decides_asks_and_expires_nothing(conn: Connection) -> None:
    interrupt_id = await ask(conn, tier=ESCALATING)
    with pytest.raises(errors.CheckViolation):
        await conn.execute(
            "INSERT INTO decisions (interrupt_id, person, person_name, verdict, door)"
            " VALUES (%s, 'slack:T01TEST/U01ALICE', 'Alice', 'approve', 'slack')",
            (interrupt_id,),
        )
    with pytest.raises(errors.CheckViolation):
        await conn.execute("UPDATE approvals SET status = 'expired', settled_at = now()")
    with pytest.raises(errors.NotNullViolation):
        await conn.execute(
            "INSERT INTO approvals (interrupt_id, thread_id, tier, request, request_hash, requested_by, approvers,"
            " required) SELECT repeat('a', 32), thread_id, tier, request, request_hash, requested_by, approvers, 1"
            " FROM approvals"
        )


async def test_what_was_changed_past_us_is_said_to_the_operators_once(conn: Connection) -> None:
    interrupt_id = await ask(conn)
    await conn.execute("UPDATE approvals SET required = 1, approvers = '{U66EVE}'")
    for _ in range(3):
        with pytest.raises(Tampered):
            await decide(conn, interrupt_id, EVE, YES)
    assert await value(conn, "SELECT version FROM notices WHERE kind = 'alarm'") == 1
    assert await value(conn, "SELECT count(*) FROM audit WHERE kind = 'approval.tampered'") == 1
    assert await value(conn, "SELECT count(*) FROM audit WHERE kind = 'approval.refused'") == 3
