"""`drive`: a claim waits for exactly one decision and is paid exactly once, whoever drives it beside whom."""

from __future__ import annotations

import asyncio
from dataclasses import asdict, dataclass
from decimal import Decimal
from typing import Any

import pytest
from langgraph.graph import START, StateGraph
from langgraph.types import interrupt

from flow import claims, threads
from flow.approvals import approval_of, decide
from flow.database import Connection
from flow.deadlines import expire_overdue
from flow.errors import DriveFailed, NotApproved, ThreadExists, UnknownThread
from flow.flows import Flows
from flow.model import Claim, request_hash
from flow.pen import Pen
from flow.policy import OneTier, Tier
from tests.driving import CLAIMS, claims_by, everything, graph_of, money, run, thread_row, waiting_claim
from tests.people import ALICE, ANN, BOB, NO, POLICY, YES, start_claim
from tests.rows import LOCKS_HERE, all_rows, one_row, until, until_blocked, value


@dataclass(frozen=True, kw_only=True)
class TwoTiers(OneTier):
    """First the manager, then the director."""

    def tiers_of(self, claim: Claim) -> tuple[Tier, ...]:
        tiers = (Tier(name="manager", approvers=("U01ALICE",)), Tier(name="director", approvers=("U02BOB",)))
        return tiers if claim.amount > 0 else ()


# To the end, or to a person


@pytest.mark.parametrize(("amount", "paid"), [("20", "20.00"), ("0.01", "0.01"), ("100", "100.00")])
async def test_a_small_claim_is_paid_in_one_go(conn: Connection, flows: Flows, amount: str, paid: str) -> None:
    await start_claim(conn, amount=amount)
    assert await run(conn, flows) == "over"
    assert await money(conn) == [("t1", paid, "USD", "ACME")]
    row = await thread_row(conn)
    assert (row["status"], row["reason"], row["due"], row["driver_pid"]) == ("paid", None, False, None)
    assert await all_rows(conn, "SELECT * FROM approvals") == []
    assert await all_rows(conn, "SELECT * FROM notices") == []


@pytest.mark.parametrize(("amount", "currency"), [("100.01", "USD"), ("250", "USD"), ("0.01", "EUR"), ("1", "JPY")])
async def test_a_large_claim_or_one_in_a_currency_without_a_limit_waits(
    conn: Connection, flows: Flows, amount: str, currency: str
) -> None:
    await start_claim(conn, amount=amount, currency=currency)
    assert await run(conn, flows) == "waiting"
    assert await money(conn) == []
    row = await thread_row(conn)
    assert (row["status"], row["due"], row["attempts"], row["driver_pid"]) == ("waiting", False, 0, None)


async def test_a_waiting_claim_has_one_approval_and_one_card(conn: Connection, flows: Flows) -> None:
    interrupt_id = await waiting_claim(conn, flows)
    approval = await approval_of(conn, interrupt_id)
    assert (approval.thread_id, approval.tier, approval.requested_by) == ("t1", "approval", ANN.key)
    assert (approval.status, approval.required, approval.approvers) == ("pending", 1, POLICY.approvers)
    assert approval.request == {"amount": "250.00", "currency": "USD", "payee": "ACME"}
    assert approval.request_hash == request_hash(
        thread_id="t1",
        interrupt_id=interrupt_id,
        tier="approval",
        flow_version="1",
        claim=Claim.of_input(approval.request),
    )
    assert await all_rows(conn, "SELECT kind, interrupt_id, thread_id, status, version FROM notices") == [
        {"kind": "card", "interrupt_id": interrupt_id, "thread_id": "t1", "status": "pending", "version": 1}
    ]


async def test_an_approved_claim_is_paid_once(conn: Connection, flows: Flows) -> None:
    interrupt_id = await waiting_claim(conn, flows)
    await decide(conn, interrupt_id, ALICE, YES)
    assert await run(conn, flows) == "over"
    assert await money(conn) == [("t1", "250.00", "USD", "ACME")]
    assert (await thread_row(conn))["status"] == "paid"
    # The card changed with the decision and with the payment; the outcome is said once.
    rows = await all_rows(conn, "SELECT kind, version FROM notices ORDER BY id")
    assert rows == [{"kind": "card", "version": 3}, {"kind": "reply", "version": 1}]


async def test_a_rejected_claim_ends_unpaid(conn: Connection, flows: Flows) -> None:
    interrupt_id = await waiting_claim(conn, flows)
    await decide(conn, interrupt_id, ALICE, NO)
    assert await run(conn, flows) == "over"
    assert await money(conn) == []
    row = await thread_row(conn)
    assert (row["status"], row["due"]) == ("rejected", False)
    rows = await all_rows(conn, "SELECT kind, version FROM notices ORDER BY id")
    assert rows == [{"kind": "card", "version": 3}, {"kind": "reply", "version": 1}]


async def test_an_expired_claim_ends_unpaid(conn: Connection, flows: Flows) -> None:
    await waiting_claim(conn, flows)
    await conn.execute("UPDATE approvals SET expires_at = clock_timestamp() - interval '1 second'")
    assert await expire_overdue(conn) == 1
    assert await run(conn, flows) == "over"
    assert (await thread_row(conn))["status"] == "expired"
    assert await money(conn) == []


async def test_of_two_requests_at_once_each_gets_its_own_answer(conn: Connection) -> None:
    answers: dict[str, bool] = {}

    def asking(name: str) -> Any:
        def ask(state: claims.State) -> claims.State:
            tier = asdict(Tier(name=name, approvers=POLICY.approvers))
            verdict = interrupt({"amount": "250.00", "currency": "USD", "payee": "ACME", "tier": tier})
            answers[name] = verdict["approved"]
            return {}

        return ask

    flow = StateGraph(claims.State, context_schema=Pen)
    for name in ("manager", "director"):
        flow.add_node(name, asking(name))
        flow.add_edge(START, name)
    flows = claims_by(flow)
    await start_claim(conn)
    assert await run(conn, flows) == "waiting"
    ids = {row["tier"]: row["interrupt_id"] for row in await all_rows(conn, "SELECT * FROM approvals")}
    assert set(ids) == {"manager", "director"}

    await decide(conn, ids["director"], ALICE, NO)
    assert await run(conn, flows) == "waiting"
    assert answers == {"director": False}
    assert (await approval_of(conn, ids["manager"])).status == "pending"
    await decide(conn, ids["manager"], BOB, YES)
    await run(conn, flows)
    assert answers == {"director": False, "manager": True}


async def test_each_tier_is_asked_for_itself(conn: Connection, flows: Flows) -> None:
    policy = TwoTiers(approvers=(), limits={})
    await start_claim(conn)
    assert await run(conn, flows, policy=policy) == "waiting"
    first = await one_row(conn, "SELECT interrupt_id, tier FROM approvals")
    await decide(conn, first["interrupt_id"], ALICE, YES)
    assert await run(conn, flows, policy=policy) == "waiting"
    second = await one_row(conn, "SELECT interrupt_id, tier FROM approvals WHERE status = 'pending'")
    assert (first["tier"], second["tier"]) == ("manager", "director")
    assert first["interrupt_id"] != second["interrupt_id"]
    # The first one again answers the first one only.
    assert not (await decide(conn, first["interrupt_id"], ALICE, YES)).recorded
    assert await run(conn, flows, policy=policy) == "waiting"
    assert await money(conn) == []
    await decide(conn, second["interrupt_id"], BOB, YES)
    assert await run(conn, flows, policy=policy) == "over"
    assert len(await money(conn)) == 1


async def test_the_second_tier_can_reject_what_the_first_approved(conn: Connection, flows: Flows) -> None:
    policy = TwoTiers(approvers=(), limits={})
    await start_claim(conn)
    for person, verdict in ((ALICE, YES), (BOB, NO)):
        await run(conn, flows, policy=policy)
        pending = await value(conn, "SELECT interrupt_id FROM approvals WHERE status = 'pending'")
        await decide(conn, pending, person, verdict)
    assert await run(conn, flows, policy=policy) == "over"
    assert ((await thread_row(conn))["status"], await money(conn)) == ("rejected", [])


async def test_the_policy_of_the_first_drive_stays(conn: Connection, flows: Flows) -> None:
    await waiting_claim(conn, flows)
    lax = OneTier(approvers=("U66EVE",), limits={"USD": Decimal(10**9)})
    assert await run(conn, flows, policy=lax) == "waiting"
    assert await money(conn) == []


# Again, and side by side


@pytest.mark.parametrize("verdict", [None, YES, NO], ids=["undecided", "approved", "rejected"])
async def test_a_drive_without_need_changes_nothing(conn: Connection, flows: Flows, verdict: Any) -> None:
    interrupt_id = await waiting_claim(conn, flows)
    if verdict:
        await decide(conn, interrupt_id, ALICE, verdict)
        await run(conn, flows)
    before = await everything(conn)
    for _ in range(2):
        assert await run(conn, flows) == ("over" if verdict else "waiting")
    assert await everything(conn) == before


async def test_a_finished_thread_that_is_started_again_is_not_paid_again(conn: Connection, flows: Flows) -> None:
    await start_claim(conn, amount="20")
    await run(conn, flows)
    again = await start_claim(conn, amount="20")
    assert (again.status, again.due_at) == ("paid", None)
    assert await run(conn, flows) == "over"
    with pytest.raises(ThreadExists, match=r"20\.00 USD to ACME"):
        await start_claim(conn, amount="21")
    assert await money(conn) == [("t1", "20.00", "USD", "ACME")]


async def test_a_thread_that_nobody_started_is_unknown_and_leaves_no_trace(conn: Connection, flows: Flows) -> None:
    with pytest.raises(UnknownThread):
        await run(conn, flows, "nobodys")
    assert {table: rows for table, rows in (await everything(conn)).items() if rows} == {}
    assert await value(conn, LOCKS_HERE) == 0


async def test_a_drive_gives_the_threads_lock_back(conn: Connection, flows: Flows, crowd: list[Connection]) -> None:
    await waiting_claim(conn, flows)
    assert await threads.try_lock(crowd[0], "t1")


async def test_while_one_drives_the_other_is_told_that_it_is_locked(
    conn: Connection, flows: Flows, crowd: list[Connection]
) -> None:
    interrupt_id = await waiting_claim(conn, flows)
    await decide(conn, interrupt_id, ALICE, YES)
    gate, second, observer, _ = crowd
    async with gate.transaction():
        await approval_of(gate, interrupt_id, lock=True)
        driving = asyncio.create_task(run(conn, flows))
        await until_blocked(observer, conn.info.backend_pid)
        before = await everything(observer)
        assert await run(second, flows) == "locked"
        assert await everything(observer) == before
    assert await driving == "over"
    assert await run(second, flows) == "over"
    assert len(await money(conn)) == 1


async def test_four_drives_of_one_thread_at_once_pay_once(
    conn: Connection, flows: Flows, crowd: list[Connection]
) -> None:
    for thread_id in (f"t{turn}" for turn in range(10)):
        interrupt_id = await waiting_claim(conn, flows, thread_id)
        await decide(conn, interrupt_id, ALICE, YES)
        ends = await asyncio.gather(*(run(one, flows, thread_id) for one in crowd))
        assert "over" in ends
        assert set(ends) <= {"over", "locked"}
    assert [thread_id for thread_id, *_ in await money(conn)] == [f"t{turn}" for turn in range(10)]
    assert await value(conn, "SELECT count(*) FROM approvals") == 10


async def test_four_first_drives_of_one_thread_at_once_ask_once(
    conn: Connection, flows: Flows, crowd: list[Connection]
) -> None:
    for thread_id in (f"t{turn}" for turn in range(10)):
        await start_claim(conn, thread_id)
        ends = await asyncio.gather(*(run(one, flows, thread_id) for one in crowd))
        assert "waiting" in ends
        assert set(ends) <= {"waiting", "locked"}
    for table, count in (("approvals", 10), ("notices", 10), ("payments", 0)):
        assert await value(conn, f"SELECT count(*) FROM {table}") == count
    roots = "SELECT count(*) FROM checkpoints WHERE parent_checkpoint_id IS NULL"
    assert await value(conn, roots) == 10


# A decision that commits while a drive is ending


async def test_a_decision_that_commits_before_the_drive_looks_is_driven_by_it(
    conn: Connection, flows: Flows, crowd: list[Connection]
) -> None:
    interrupt_id = await waiting_claim(conn, flows)
    door, observer, *_ = crowd
    async with door.transaction():
        await decide(door, interrupt_id, ALICE, YES)
        driving = asyncio.create_task(run(conn, flows))
        await until_blocked(observer, conn.info.backend_pid, by=door.info.backend_pid)
    assert await driving == "over"
    assert len(await money(conn)) == 1


async def test_a_decision_that_commits_after_the_drive_looked_makes_the_thread_due(
    conn: Connection, flows: Flows, crowd: list[Connection]
) -> None:
    interrupt_id = await waiting_claim(conn, flows)
    gate, second_gate, door, observer = crowd
    driver = conn.info.backend_pid
    await gate.execute("BEGIN")
    await approval_of(gate, interrupt_id, lock=True)
    driving = asyncio.create_task(run(conn, flows))
    await until_blocked(observer, driver, by=gate.info.backend_pid)
    # The drive has begun: now its end is held up, and then it is let to look.
    await second_gate.execute("BEGIN")
    await second_gate.execute("SELECT FROM threads FOR UPDATE")
    await gate.execute("COMMIT")
    await until_blocked(observer, driver, by=second_gate.info.backend_pid)
    # It has seen no decision. One comes.
    deciding = asyncio.create_task(decide(door, interrupt_id, ALICE, YES))
    await until_blocked(observer, door.info.backend_pid, by=driver)
    await second_gate.execute("COMMIT")
    assert await driving == "waiting"
    assert (await deciding).recorded
    row = await thread_row(conn)
    assert (row["status"], row["wakes"], row["due"]) == ("running", 1, True)
    assert await run(conn, flows) == "over"
    assert len(await money(conn)) == 1


async def test_a_reason_to_drive_that_comes_while_a_thread_is_closed_makes_it_look_again(
    conn: Connection, flows: Flows, crowd: list[Connection]
) -> None:
    interrupt_id = await waiting_claim(conn, flows)
    await decide(conn, interrupt_id, ALICE, NO)
    gate, second_gate, observer, _ = crowd
    driver = conn.info.backend_pid
    await gate.execute("BEGIN")
    await approval_of(gate, interrupt_id, lock=True)
    driving = asyncio.create_task(run(conn, flows))
    await until_blocked(observer, driver, by=gate.info.backend_pid)
    await second_gate.execute("BEGIN")
    await threads.wake(second_gate, "t1")
    await gate.execute("COMMIT")
    await until_blocked(observer, driver, by=second_gate.info.backend_pid)
    await second_gate.execute("COMMIT")
    assert await driving == "over"
    row = await thread_row(conn)
    assert (row["status"], row["wakes"], row["due"]) == ("rejected", 2, False)
    # The first try to close it left nothing behind: one change is the decision's, one the closing's.
    rows = await all_rows(conn, "SELECT kind, version FROM notices ORDER BY id")
    assert rows == [{"kind": "card", "version": 3}, {"kind": "reply", "version": 1}]


async def test_a_thread_stays_due_if_it_was_woken_since_it_was_taken(conn: Connection) -> None:
    await start_claim(conn)
    thread = await threads.take(conn, "t1")
    assert thread is not None
    await threads.wake(conn, "t1")
    assert not await threads.leave(conn, thread, status="waiting")
    row = await thread_row(conn)
    assert (row["status"], row["due"], row["wakes"]) == ("running", True, 1)


async def test_a_thread_that_is_given_up_stays_due_if_it_was_woken_since(
    conn: Connection, crowd: list[Connection]
) -> None:
    async def refuse(_: claims.State) -> claims.State:
        await threads.wake(crowd[0], "t1")
        raise NotApproved("not in this form")

    await start_claim(conn)
    with pytest.raises(DriveFailed):
        await run(conn, graph_of(refuse))
    row = await thread_row(conn)
    assert (row["status"], row["due"]) == ("running", True)


# A driver that overstays


async def test_a_driver_that_overstays_loses_its_session_and_writes_nothing_more(
    conn: Connection, flows: Flows, crowd: list[Connection]
) -> None:
    worker, observer, *_ = crowd
    await start_claim(conn, amount="20")
    assert await threads.try_lock(conn, "t1")
    stale = await threads.take(conn, "t1")
    assert stale is not None
    (due,) = await threads.due_threads(worker, flows=CLAIMS, drive_timeout_s=60, limit=10)
    assert (due.thread_id, due.held, due.overdue) == ("t1", True, False)
    assert not await threads.evict_driver(worker, "t1", drive_timeout_s=60)
    await observer.execute("UPDATE threads SET driven_at = driven_at - interval '61 seconds'")
    (due,) = await threads.due_threads(worker, flows=CLAIMS, drive_timeout_s=60, limit=10)
    assert (due.held, due.overdue) == (True, True)
    assert await threads.evict_driver(worker, "t1", drive_timeout_s=60)
    with pytest.raises(Exception, match=r"terminat|clos"):
        await threads.leave(conn, stale, status="stuck")
    assert await run(worker, flows) == "over"
    assert len(await money(worker)) == 1
    # Nobody holds it now, so nobody is hit.
    assert not await threads.evict_driver(worker, "t1", drive_timeout_s=0)


async def test_whoever_holds_the_lock_without_having_taken_the_thread_is_not_evicted(
    conn: Connection, crowd: list[Connection]
) -> None:
    await start_claim(conn)
    dead, holder, worker, _ = crowd
    await threads.take(dead, "t1")
    await conn.execute("UPDATE threads SET driven_at = driven_at - interval '61 seconds'")
    assert await threads.try_lock(holder, "t1")
    assert not await threads.evict_driver(worker, "t1", drive_timeout_s=60)
    assert await value(holder, "SELECT 1 AS alive") == 1


async def test_a_driver_that_stands_still_before_it_takes_the_thread_is_evicted_too(
    conn: Connection, crowd: list[Connection]
) -> None:
    holder, worker, *_ = crowd
    await start_claim(conn)
    assert await threads.try_lock(holder, "t1")
    (due,) = await threads.due_threads(worker, flows=CLAIMS, drive_timeout_s=60, limit=10)
    assert (due.held, due.overdue) == (True, False)
    # It has asked nothing since.
    await until(lambda: is_overdue(worker))
    assert await threads.evict_driver(worker, "t1", drive_timeout_s=0.05)
    with pytest.raises(Exception, match=r"terminat|clos"):
        await holder.execute("SELECT 1")


async def is_overdue(worker: Connection) -> bool:
    (due,) = await threads.due_threads(worker, flows=CLAIMS, drive_timeout_s=0.05, limit=10)
    return due.overdue
