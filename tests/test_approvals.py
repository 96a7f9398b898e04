"""`decide` from every side, and at the same moment: one verdict, by the right person, for what was shown, or none."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any, LiteralString

import psycopg
import pytest
from psycopg import errors

from flow.approvals import Decided, approval_of, approvals_of, decide
from flow.database import Connection, connect
from flow.deadlines import expire_overdue
from flow.errors import AlreadyDecided, ApprovalExpired, NotAllowed, StaleRequest, UnknownApproval
from flow.model import Person, Verdict
from flow.policy import Tier
from tests.people import ALICE, ANN, BOB, CAROL, EVE, NO, ONE_OF_THREE, TWO_OF_THREE, YES, ask, slack_person
from tests.rows import all_rows, break_table, mend_table, one_row, until_blocked, value


@pytest.fixture
async def doors(database_url: str) -> AsyncIterator[list[Connection]]:
    """Twenty people's doors."""
    async with contextlib.AsyncExitStack() as stack:
        yield [await stack.enter_async_context(await connect(database_url, "door")) for _ in range(20)]


@pytest.fixture
async def door(database_url: str) -> AsyncIterator[Connection]:
    async with await connect(database_url, "door") as conn:
        yield conn


async def state_of(conn: Connection, interrupt_id: str) -> dict[str, Any]:
    """What a decision changes, all of it."""
    return await one_row(
        conn,
        "SELECT a.status, a.settled_at, t.status AS thread, t.wakes, t.due_at,"
        " n.version AS card, n.status AS card_status,"
        " (SELECT array_agg(d.person || ' ' || d.verdict ORDER BY decided_at)"
        " FROM decisions d WHERE d.interrupt_id = a.interrupt_id) AS decisions"
        " FROM approvals a JOIN threads t USING (thread_id) JOIN notices n USING (interrupt_id)"
        " WHERE a.interrupt_id = %s AND n.kind = 'card'",
        interrupt_id,
    )


async def overdue(conn: Connection, interrupt_id: str) -> None:
    await conn.execute(
        "UPDATE approvals SET expires_at = clock_timestamp() - interval '1 second' WHERE interrupt_id = %s",
        (interrupt_id,),
    )


# One person, one verdict


@pytest.mark.parametrize(("verdict", "status"), [(YES, "approved"), (NO, "rejected")])
async def test_a_verdict_settles_wakes_and_changes_the_card(conn: Connection, verdict: Verdict, status: str) -> None:
    interrupt_id = await ask(conn)
    before = await state_of(conn, interrupt_id)
    assert (before["status"], before["thread"], before["due_at"]) == ("pending", "waiting", None)
    decided = await decide(conn, interrupt_id, ALICE, verdict)
    assert (decided.recorded, decided.approval.status) == (True, status)
    assert decided.approval == await approval_of(conn, interrupt_id)
    after = await state_of(conn, interrupt_id)
    assert (after["status"], after["thread"], after["wakes"]) == (status, "running", before["wakes"] + 1)
    assert after["due_at"] is not None
    assert after["settled_at"] is not None
    assert (after["card"], after["card_status"]) == (before["card"] + 1, "pending")
    row = await one_row(conn, "SELECT * FROM decisions")
    assert row.pop("decided_at") is not None
    assert row == {
        "interrupt_id": interrupt_id,
        "person": ALICE.key,
        "person_name": "Alice",
        "verdict": verdict.verdict,
        "door": "slack",
        "reason": verdict.reason,
        "answer": None,
        "for_person": None,
        "for_name": None,
        "listed_as": "U01ALICE",
        "void": False,
    }


async def test_a_decision_is_committed_before_decide_returns(conn: Connection, door: Connection) -> None:
    interrupt_id = await ask(conn)
    await decide(door, interrupt_id, ALICE, YES)
    await conn.execute("SELECT pg_terminate_backend(%s, 5000)", (door.info.backend_pid,))
    assert (await state_of(conn, interrupt_id))["decisions"] == [f"{ALICE.key} approve"]


@pytest.mark.parametrize("again", [ALICE, BOB, ANN], ids=lambda person: person.name)
@pytest.mark.parametrize("verdict", [YES, NO], ids=lambda verdict: verdict.verdict)
async def test_the_same_verdict_again_succeeds_and_records_nothing(
    conn: Connection, again: Person, verdict: Verdict
) -> None:
    interrupt_id = await ask(conn)
    await decide(conn, interrupt_id, ALICE, verdict)
    before = await state_of(conn, interrupt_id)
    decided = await decide(conn, interrupt_id, again, verdict)
    assert not decided.recorded
    assert decided.approval.settled_by is not None
    assert decided.approval.settled_by.person == ALICE.key
    assert await state_of(conn, interrupt_id) == before


@pytest.mark.parametrize(("first", "second", "status"), [(YES, NO, "approved"), (NO, YES, "rejected")])
@pytest.mark.parametrize("person", [ALICE, BOB, ANN], ids=lambda person: person.name)
async def test_the_other_verdict_is_refused_and_names_who_decided_and_when(
    conn: Connection, person: Person, first: Verdict, second: Verdict, status: str
) -> None:
    interrupt_id = await ask(conn)
    await decide(conn, interrupt_id, ALICE, first)
    before = await state_of(conn, interrupt_id)
    with pytest.raises(AlreadyDecided) as refused:
        await decide(conn, interrupt_id, person, second)
    assert (refused.value.status, refused.value.by, refused.value.at) == (status, "Alice", before["settled_at"])
    assert f"already {status} by Alice at {before['settled_at']:%Y-%m-%d %H:%M:%S} UTC" in str(refused.value)
    assert await state_of(conn, interrupt_id) == before


# Who may decide


async def test_an_interrupt_id_that_nobody_asked_is_unknown(conn: Connection) -> None:
    await ask(conn)
    for unknown in ("0" * 31 + "1", "", "t1", "' OR true --"):
        with pytest.raises(UnknownApproval):
            await decide(conn, unknown, ALICE, YES)
    assert await all_rows(conn, "SELECT * FROM decisions") == []


OWN = ALICE.key


@pytest.mark.parametrize(
    ("person", "tier", "requested_by", "why"),
    [
        (EVE, ONE_OF_THREE, ANN.key, "not on the list"),
        (ALICE, Tier(name="approval", approvers=()), ANN.key, "nobody is"),
        (ALICE, Tier(name="approval", approvers=("",)), ANN.key, "not on the list"),
        (ALICE, Tier(name="approval", approvers=("Alice", "alice", "u01alice", "U01ALIC")), ANN.key, "not on the list"),
        (ALICE, Tier(name="approval", approvers=("slack:T02OTHER/U01ALICE",)), ANN.key, "not on the list"),
        (ALICE, ONE_OF_THREE, OWN, "own"),
        (ALICE, ONE_OF_THREE, "U01ALICE", "own"),
        (replace(ANN, trusted=False), ONE_OF_THREE, "cli:bob", "not on the list"),
        (Person(key="", name="", names=frozenset()), Tier(name="approval", approvers=()), ANN.key, "nobody is"),
    ],
)
@pytest.mark.parametrize("verdict", [YES, NO], ids=lambda verdict: verdict.verdict)
async def test_only_people_whom_the_policy_names_decide(
    conn: Connection, *, person: Person, tier: Tier, requested_by: str, why: str, verdict: Verdict
) -> None:
    interrupt_id = await ask(conn, tier=tier, requested_by=requested_by)
    before = await state_of(conn, interrupt_id)
    with pytest.raises(NotAllowed, match=why):
        await decide(conn, interrupt_id, person, verdict)
    assert await state_of(conn, interrupt_id) == before


@pytest.mark.parametrize("name", ["U01ALICE", "slack:T01TEST/U01ALICE"])
async def test_a_person_may_be_listed_by_any_name_that_the_door_vouches_for(conn: Connection, name: str) -> None:
    interrupt_id = await ask(conn, tier=Tier(name="approval", approvers=("U02BOB", name)))
    assert (await decide(conn, interrupt_id, ALICE, YES)).recorded


@pytest.mark.parametrize("approvers", [(), ("U01ALICE",)])
async def test_the_person_at_the_command_line_decides_also_an_own_request_and_without_a_list(
    conn: Connection, approvers: tuple[str, ...]
) -> None:
    interrupt_id = await ask(conn, tier=Tier(name="approval", approvers=approvers), requested_by=ANN.key)
    decided = await decide(conn, interrupt_id, ANN, replace(YES, door="command line"))
    assert decided.approval.status == "approved"
    assert await one_row(conn, "SELECT person, door FROM decisions") == {"person": "cli:ann", "door": "command line"}


async def test_somebody_who_may_not_decide_learns_nothing_of_a_settled_approval(conn: Connection) -> None:
    interrupt_id = await ask(conn)
    await decide(conn, interrupt_id, ALICE, YES)
    for verdict in (YES, NO):
        with pytest.raises(NotAllowed):
            await decide(conn, interrupt_id, EVE, verdict)


async def test_the_list_is_the_one_of_the_day_of_the_request(conn: Connection) -> None:
    interrupt_id = await ask(conn, tier=Tier(name="approval", approvers=("U66EVE",)))
    # The policy of today, and of every other approval, names Alice.
    with pytest.raises(NotAllowed):
        await decide(conn, interrupt_id, ALICE, YES)
    assert (await decide(conn, interrupt_id, EVE, YES)).recorded


# For exactly what was shown


async def test_what_was_shown_must_be_what_is_decided(conn: Connection) -> None:
    interrupt_id = await ask(conn)
    shown = (await approval_of(conn, interrupt_id)).request_hash
    for stale in ("0" * 64, shown[:-1], shown.upper(), ""):
        with pytest.raises(StaleRequest):
            await decide(conn, interrupt_id, ALICE, replace(YES, request_hash=stale))
    assert await all_rows(conn, "SELECT * FROM decisions") == []
    assert (await decide(conn, interrupt_id, ALICE, replace(YES, request_hash=shown))).recorded


# In time


@pytest.mark.parametrize("verdict", [YES, NO], ids=lambda verdict: verdict.verdict)
@pytest.mark.parametrize("person", [ALICE, ANN], ids=lambda person: person.name)
async def test_nobody_decides_after_the_time_is_over(conn: Connection, person: Person, verdict: Verdict) -> None:
    interrupt_id = await ask(conn)
    await overdue(conn, interrupt_id)
    before = await state_of(conn, interrupt_id)
    at = await value(conn, "SELECT expires_at FROM approvals")
    for _ in range(2):
        with pytest.raises(ApprovalExpired, match=r"expired at 20.* UTC") as late:
            await decide(conn, interrupt_id, person, verdict)
        assert late.value.at == at
        # Whether the clock has swept it up or not.
        await expire_overdue(conn)
    after = await state_of(conn, interrupt_id)
    assert (before["decisions"], after["decisions"]) == (None, None)


async def test_a_request_that_expires_later_can_be_decided(conn: Connection) -> None:
    interrupt_id = await ask(conn, tier=replace(ONE_OF_THREE, expires_after_s=3600))
    left = await value(conn, "SELECT extract(epoch FROM expires_at - clock_timestamp()) FROM approvals")
    assert 3500 < left <= 3600
    assert await expire_overdue(conn) == 0
    assert (await decide(conn, interrupt_id, ALICE, YES)).recorded


async def test_the_clock_settles_what_is_overdue_and_only_that(conn: Connection) -> None:
    late, decided, later, never = [
        await ask(conn, thread_id, tier=replace(ONE_OF_THREE, expires_after_s=seconds))
        for thread_id, seconds in (("late", 3600), ("decided", 3600), ("later", 3600), ("never", None))
    ]
    await decide(conn, decided, ALICE, YES)
    for interrupt_id in (late, decided):
        await overdue(conn, interrupt_id)
    before = {interrupt_id: await state_of(conn, interrupt_id) for interrupt_id in (decided, later, never)}
    assert await expire_overdue(conn) == 1
    after = await state_of(conn, late)
    assert (after["status"], after["thread"], after["wakes"], after["card"]) == ("expired", "running", 1, 2)
    assert after["due_at"] is not None
    assert {interrupt_id: await state_of(conn, interrupt_id) for interrupt_id in before} == before
    assert await expire_overdue(conn) == 0
    with pytest.raises(ApprovalExpired):
        await decide(conn, late, ALICE, YES)


async def test_the_clock_settles_no_more_at_once_than_it_is_told(conn: Connection) -> None:
    for thread_id in ("a", "b", "c"):
        await overdue(conn, await ask(conn, thread_id))
    assert [await expire_overdue(conn, limit=2) for _ in range(3)] == [2, 1, 0]


async def test_the_clock_leaves_alone_what_is_being_decided(conn: Connection, door: Connection) -> None:
    interrupt_id = await ask(conn)
    await overdue(conn, interrupt_id)
    await conn.execute("SET lock_timeout = '5s'")
    async with door.transaction():
        # A decision that was in time, but is not through yet.
        await approval_of(door, interrupt_id, lock=True)
        assert await expire_overdue(conn) == 0
    assert await expire_overdue(conn) == 1


# Two of three


async def test_a_quorum_of_two_needs_two_people(conn: Connection) -> None:
    interrupt_id = await ask(conn, tier=TWO_OF_THREE)
    first = await decide(conn, interrupt_id, ALICE, YES)
    assert (first.recorded, first.approval.status) == (True, "pending")
    assert first.approval == await approval_of(conn, interrupt_id)
    # The card shows the first one; the thread has nothing to do yet.
    half = await state_of(conn, interrupt_id)
    assert (half["thread"], half["wakes"], half["due_at"], half["card"]) == ("waiting", 0, None, 2)

    again = await decide(conn, interrupt_id, ALICE, YES)
    assert (again.recorded, again.approval.status) == (False, "pending")
    assert await state_of(conn, interrupt_id) == half

    second = await decide(conn, interrupt_id, BOB, YES)
    assert (second.recorded, second.approval.status) == (True, "approved")
    assert second.approval == await approval_of(conn, interrupt_id)
    assert second.approval.settled_by is not None
    assert second.approval.settled_by.person == BOB.key
    whole = await state_of(conn, interrupt_id)
    assert whole["decisions"] == [f"{ALICE.key} approve", f"{BOB.key} approve"]
    assert (whole["thread"], whole["wakes"]) == ("running", 1)
    assert not (await decide(conn, interrupt_id, CAROL, YES)).recorded


async def test_one_person_under_two_names_is_one_voice(conn: Connection) -> None:
    interrupt_id = await ask(conn, tier=TWO_OF_THREE)
    await decide(conn, interrupt_id, ALICE, YES)
    renamed = Person(key=ALICE.key, name="Alicia", names=frozenset({"U01ALICE", "U02BOB"}))
    assert not (await decide(conn, interrupt_id, renamed, YES)).recorded
    assert (await state_of(conn, interrupt_id))["status"] == "pending"


async def test_one_rejection_is_enough(conn: Connection) -> None:
    interrupt_id = await ask(conn, tier=TWO_OF_THREE)
    await decide(conn, interrupt_id, ALICE, YES)
    assert (await decide(conn, interrupt_id, BOB, NO)).approval.status == "rejected"
    with pytest.raises(AlreadyDecided, match="rejected by Bob"):
        await decide(conn, interrupt_id, CAROL, YES)


async def test_an_approve_may_be_turned_into_a_reject_while_it_is_pending(conn: Connection) -> None:
    interrupt_id = await ask(conn, tier=TWO_OF_THREE)
    await decide(conn, interrupt_id, ALICE, YES)
    turned = await decide(conn, interrupt_id, ALICE, NO)
    assert (turned.recorded, turned.approval.status) == (True, "rejected")
    assert turned.approval == await approval_of(conn, interrupt_id)
    assert await one_row(conn, "SELECT person, verdict, reason FROM decisions") == {
        "person": ALICE.key,
        "verdict": "reject",
        "reason": NO.reason,
    }
    with pytest.raises(AlreadyDecided, match="rejected by Alice"):
        await decide(conn, interrupt_id, ALICE, YES)


async def test_approvals_are_listed_by_thread_oldest_first_with_their_decisions(conn: Connection) -> None:
    one, two = await ask(conn, "one"), await ask(conn, "two", tier=TWO_OF_THREE)
    for person in (BOB, ALICE):
        await decide(conn, two, person, YES)
    found = await approvals_of(conn, ["one", "two", "three"])
    assert {thread_id: [a.interrupt_id for a in approvals] for thread_id, approvals in found.items()} == {
        "one": [one],
        "two": [two],
        "three": [],
    }
    assert [decision.person for decision in found["two"][0].decisions] == [BOB.key, ALICE.key]


# At the same moment


async def test_approve_and_reject_at_the_same_moment_settle_it_once(conn: Connection, doors: list[Connection]) -> None:
    for turn in range(20):
        interrupt_id = await ask(conn, f"t{turn}")
        sides = [(ALICE, YES, "approved"), (BOB, NO, "rejected")]
        if turn % 2:
            sides.reverse()
        async with _starting_line(conn, interrupt_id, doors[:2]):
            runs = [
                asyncio.create_task(_decide(door, interrupt_id, person, verdict))
                for door, (person, verdict, _) in zip(doors[:2], sides, strict=True)
            ]
        ends = await asyncio.gather(*runs)
        ((winner, _, status),) = [side for side, end in zip(sides, ends, strict=True) if isinstance(end, Decided)]
        (loss,) = [end for end in ends if isinstance(end, AlreadyDecided)]
        after = await state_of(conn, interrupt_id)
        assert after["status"] == status
        assert after["decisions"] == [f"{winner.key} {'approve' if status == 'approved' else 'reject'}"]
        assert (after["wakes"], after["card"]) == (1, 2)
        assert (loss.by, loss.status, loss.at) == (winner.name, status, after["settled_at"])


@pytest.mark.parametrize("people", ["one person", "twenty people"])
async def test_twenty_same_clicks_at_once_are_one_decision(
    conn: Connection, doors: list[Connection], people: str
) -> None:
    crowd = [ALICE if people == "one person" else slack_person(f"U{n:02}", f"Person {n}") for n in range(20)]
    members = tuple(name for person in crowd for name in person.names)
    interrupt_id = await ask(conn, tier=Tier(name="approval", approvers=members))
    async with _starting_line(conn, interrupt_id, doors):
        runs = [
            asyncio.create_task(decide(door, interrupt_id, person, YES))
            for door, person in zip(doors, crowd, strict=True)
        ]
    ends = await asyncio.gather(*runs)
    assert sorted(end.recorded for end in ends) == [False] * 19 + [True]
    assert {end.approval.status for end in ends} == {"approved"}
    after = await state_of(conn, interrupt_id)
    assert len(after["decisions"]) == 1
    assert (after["wakes"], after["card"]) == (1, 2)


async def test_two_of_three_at_the_same_moment_settle_it_once(conn: Connection, doors: list[Connection]) -> None:
    for turn in range(10):
        interrupt_id = await ask(conn, f"t{turn}", tier=TWO_OF_THREE)
        async with _starting_line(conn, interrupt_id, doors[:3]):
            runs = [
                asyncio.create_task(decide(door, interrupt_id, person, YES))
                for door, person in zip(doors[:3], (ALICE, BOB, CAROL), strict=True)
            ]
        ends = await asyncio.gather(*runs)
        assert sorted(end.recorded for end in ends) == [False, True, True]
        after = await state_of(conn, interrupt_id)
        assert (after["status"], len(after["decisions"]), after["wakes"]) == ("approved", 2, 1)


async def test_a_door_that_cannot_lock_in_time_says_so_and_records_nothing(conn: Connection, door: Connection) -> None:
    interrupt_id = await ask(conn)
    await door.execute("SET lock_timeout = '50ms'")
    async with conn.transaction():
        await approval_of(conn, interrupt_id, lock=True)
        with pytest.raises(errors.LockNotAvailable):
            await decide(door, interrupt_id, ALICE, YES)
    assert await all_rows(conn, "SELECT * FROM decisions") == []
    assert (await decide(door, interrupt_id, ALICE, YES)).recorded


# All or nothing


BREAKAGES: list[tuple[str, LiteralString]] = [
    ("decisions", "INSERT"),
    ("approvals", "UPDATE"),
    ("notices", "UPDATE"),
    ("threads", "UPDATE"),
]


@pytest.mark.parametrize(("table", "event"), BREAKAGES)
async def test_a_decision_that_fails_in_the_middle_writes_nothing(
    conn: Connection, table: str, event: LiteralString
) -> None:
    interrupt_id = await ask(conn)
    before = await state_of(conn, interrupt_id)
    await break_table(conn, table, event, "RAISE EXCEPTION 'disk full'")
    with pytest.raises(errors.RaiseException):
        await decide(conn, interrupt_id, ALICE, YES)
    assert await state_of(conn, interrupt_id) == before
    await mend_table(conn)
    assert (await decide(conn, interrupt_id, ALICE, YES)).recorded


@pytest.mark.parametrize(("table", "event"), BREAKAGES)
async def test_a_door_whose_session_dies_in_the_middle_wrote_nothing(
    conn: Connection, door: Connection, table: str, event: LiteralString
) -> None:
    interrupt_id = await ask(conn)
    before = await state_of(conn, interrupt_id)
    await break_table(conn, table, event, "PERFORM pg_terminate_backend(pg_backend_pid()), pg_sleep(60)")
    with pytest.raises(psycopg.OperationalError):
        await decide(door, interrupt_id, ALICE, YES)
    assert await state_of(conn, interrupt_id) == before


@pytest.mark.parametrize(("table", "event"), BREAKAGES[1:])
async def test_an_expiry_that_fails_in_the_middle_writes_nothing(
    conn: Connection, table: str, event: LiteralString
) -> None:
    interrupt_id = await ask(conn)
    await overdue(conn, interrupt_id)
    before = await state_of(conn, interrupt_id)
    await break_table(conn, table, event, "RAISE EXCEPTION 'disk full'")
    with pytest.raises(errors.RaiseException):
        await expire_overdue(conn)
    assert await state_of(conn, interrupt_id) == before


async def _decide(door: Connection, interrupt_id: str, person: Person, verdict: Verdict) -> Decided | AlreadyDecided:
    try:
        return await decide(door, interrupt_id, person, verdict)
    except AlreadyDecided as exc:
        return exc


@contextlib.asynccontextmanager
async def _starting_line(conn: Connection, interrupt_id: str, doors: list[Connection]) -> AsyncIterator[None]:
    """Hold the approval until every door that was sent off in the body stands before it; then let them go at once."""
    async with conn.transaction():
        await approval_of(conn, interrupt_id, lock=True)
        yield
        for door in doors:
            await until_blocked(conn, door.info.backend_pid)
