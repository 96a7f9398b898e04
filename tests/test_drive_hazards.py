"""`drive` where something is wrong: forged rows, failed steps, and a LangGraph that says what is not so."""

from __future__ import annotations

import math
from typing import LiteralString

import pytest
from langgraph.checkpoint.postgres.aio import AsyncPostgresSaver
from langgraph.types import Command

from flow import claims, threads
from flow.approvals import approval_of, decide
from flow.database import Connection
from flow.errors import DriveFailed, NotApproved
from flow.flows import Flows
from flow.pen import Pen
from flow.run import Run
from tests.driving import everything, graph_of, money, on, renamed, run, thread_row, waiting_claim
from tests.orders import POLICY_BY_AMOUNT
from tests.people import ALICE, ANN, POLICY, YES, start_claim
from tests.rows import RENEW_FINGERPRINTS, all_rows, break_table, mend_table, one_row, rewrite, value

# Only what was approved


@pytest.mark.parametrize(
    "tamper",
    [
        "UPDATE approvals SET request_hash = repeat('0', 64)",
        "UPDATE approvals SET tier = 'another'",
        """UPDATE checkpoints SET checkpoint = jsonb_set(checkpoint, '{channel_values,amount}', '"9999.00"')""",
        """UPDATE checkpoints SET checkpoint = jsonb_set(checkpoint, '{channel_values,currency}', '"KWD"')""",
        """UPDATE checkpoints SET checkpoint = jsonb_set(checkpoint, '{channel_values,payee}', '"EVE"')""",
    ],
)
@pytest.mark.parametrize("when", ["before the decision", "after the decision"])
async def test_what_was_not_approved_in_this_form_is_not_paid(
    conn: Connection, flows: Flows, tamper: LiteralString, when: str
) -> None:
    interrupt_id = await waiting_claim(conn, flows)
    if when == "before the decision":
        await conn.execute(tamper)
        # By somebody who knows how.
        await conn.execute(RENEW_FINGERPRINTS)
    await decide(conn, interrupt_id, ANN, YES)
    if when == "after the decision":
        await conn.execute(tamper)
    for _ in range(2):
        assert await run(conn, flows) == "stuck"
        row = await thread_row(conn)
        assert (row["status"], row["due"]) == ("stuck", False)
        assert row["reason"].startswith("not paid: ")
        assert await money(conn) == []


async def test_a_request_that_showed_another_amount_is_not_paid(conn: Connection, flows: Flows) -> None:
    interrupt_id = await waiting_claim(conn, flows)
    await rewrite(conn, """request = jsonb_set(request, '{amount}', '"1.00"')""")
    await decide(conn, interrupt_id, ANN, YES)
    await run(conn, flows)
    assert await money(conn) == []


async def test_a_state_without_tiers_does_not_pay_what_the_policy_would_ask_for(conn: Connection, flows: Flows) -> None:
    await start_claim(conn, amount="20")
    await break_table(conn, "payments", "INSERT", "RAISE EXCEPTION 'not yet'")
    with pytest.raises(DriveFailed):
        await run(conn, flows)
    await mend_table(conn)
    # A small claim needed nobody; now the state says that it is a large one.
    await conn.execute(
        """UPDATE checkpoints SET checkpoint = jsonb_set(checkpoint, '{channel_values,amount}', '"9999.00"')"""
    )
    await run(conn, flows)
    assert await money(conn) == []


@pytest.mark.parametrize(
    "answer",
    [True, 1, "yes", "approved", {}, {"approved": 1}, {"approved": "true"}, {"status": "approved"}, ["approve"]],
)
async def test_nothing_but_true_is_an_approval(conn: Connection, flows: Flows, answer: object) -> None:
    interrupt_id = await waiting_claim(conn, flows)
    state = await on(conn, flows, Command(resume={interrupt_id: answer}))
    assert (state["approved"], state.get("reference")) == (False, None)
    assert await money(conn) == []


async def test_an_answer_that_no_row_knows_of_pays_nothing(conn: Connection, flows: Flows) -> None:
    interrupt_id = await waiting_claim(conn, flows)
    with pytest.raises(NotApproved):
        await on(conn, flows, Command(resume={interrupt_id: {"approved": True}}))
    assert await run(conn, flows) == "stuck"
    assert await money(conn) == []


# Steps that fail


async def test_a_failed_step_is_put_off_with_its_reason_longer_each_time_and_stuck_in_the_end(
    conn: Connection, flows: Flows
) -> None:
    await start_claim(conn, amount="20")
    await break_table(conn, "payments", "INSERT", "RAISE EXCEPTION 'the bank is closed'")
    for attempt in range(1, threads.MAX_ATTEMPTS):
        before = await value(conn, "SELECT clock_timestamp()")
        with pytest.raises(DriveFailed, match="the bank is closed") as failed:
            await run(conn, flows)
        assert failed.value.thread_id == "t1"
        after = await value(conn, "SELECT clock_timestamp()")
        row = await one_row(conn, "SELECT status, reason, attempts, due_at, driver_pid FROM threads")
        assert (row["status"], row["attempts"], row["driver_pid"]) == ("running", attempt, None)
        assert "the bank is closed" in row["reason"]
        backoff = min(600, 2 ** (min(attempt, 10) - 1))
        assert (row["due_at"] - before).total_seconds() >= backoff * 0.75
        assert (row["due_at"] - after).total_seconds() <= backoff * 1.25
    assert await run(conn, flows) == "stuck"
    row = await thread_row(conn)
    assert (row["status"], row["due"]) == ("stuck", False)
    assert "the bank is closed" in row["reason"]
    assert await value(conn, "SELECT kind FROM notices") == "alarm"
    await mend_table(conn)
    assert await run(conn, flows) == "stuck"
    assert "the bank is closed" in (await thread_row(conn))["reason"]
    assert await money(conn) == []


async def test_a_failed_step_is_taken_up_where_it_failed(conn: Connection, flows: Flows) -> None:
    interrupt_id = await waiting_claim(conn, flows)
    await decide(conn, interrupt_id, ALICE, YES)
    await break_table(conn, "payments", "INSERT", "RAISE EXCEPTION 'the bank is closed'")
    with pytest.raises(DriveFailed):
        await run(conn, flows)
    await mend_table(conn)
    assert await run(conn, flows) == "over"
    assert len(await money(conn)) == 1
    row = await thread_row(conn)
    assert (row["status"], row["reason"], row["attempts"]) == ("paid", None, 0)
    assert await value(conn, "SELECT count(*) FROM approvals") == 1


async def test_drives_that_died_without_a_word_are_counted_put_off_and_stuck_in_the_end(
    conn: Connection, flows: Flows
) -> None:
    await start_claim(conn)
    for attempt in range(1, threads.MAX_ATTEMPTS + 1):
        taken = await threads.take(conn, "t1")
        assert taken is not None
        row = await one_row(conn, "SELECT attempts, due_at > clock_timestamp() AS put_off FROM threads")
        assert row == {"attempts": attempt, "put_off": attempt > 1}
    assert await run(conn, flows) == "stuck"
    row = await thread_row(conn)
    assert (row["status"], row["due"], row["reason"]) == ("stuck", False, "20 drives died without a word")
    assert await all_rows(conn, "SELECT * FROM checkpoints") == []


async def test_a_decision_gives_a_put_off_thread_all_its_attempts_again(conn: Connection, flows: Flows) -> None:
    interrupt_id = await waiting_claim(conn, flows)
    await conn.execute("UPDATE threads SET attempts = 19, reason = 'died'")
    await decide(conn, interrupt_id, ALICE, YES)
    assert (await thread_row(conn))["attempts"] == 0
    assert await run(conn, flows) == "over"


@pytest.mark.parametrize(
    "stored",
    ['{"amount": "abc", "currency": "USD"}', '{"currency": "USD"}', '{"amount": null, "currency": "USD"}', "[]"],
)
async def test_a_broken_input_is_put_off_with_a_reason(conn: Connection, flows: Flows, stored: str) -> None:
    await start_claim(conn)
    await conn.execute("UPDATE threads SET input = %s", (stored,))
    with pytest.raises(DriveFailed):
        await run(conn, flows)
    row = await thread_row(conn)
    assert (row["status"], row["attempts"], row["due"]) == ("running", 1, True)
    assert row["reason"]
    assert await money(conn) == []


async def test_a_reason_that_a_row_could_not_hold_is_escaped(conn: Connection) -> None:
    async def fail(_: claims.State) -> claims.State:
        raise ValueError("no \x00 nor \ud800\n in a row, " + "x" * 1000)

    await start_claim(conn)
    with pytest.raises(DriveFailed):
        await run(conn, graph_of(fail))
    reason = (await thread_row(conn))["reason"]
    assert reason.startswith("ValueError: no \\x00 nor \\ud800 in a row, xxx")
    assert len(reason) <= 500


# What LangGraph says, and what is so


async def test_a_flow_that_ends_without_payment_or_refusal_is_stuck(conn: Connection) -> None:
    async def shrug(_: claims.State) -> claims.State:
        return {"reference": "L-t1"}

    await start_claim(conn, amount="20")
    assert await run(conn, graph_of(shrug)) == "stuck"
    row = await thread_row(conn)
    assert (row["status"], row["due"]) == ("stuck", False)
    assert row["reason"] == "the flow ended without a payment or a refusal"


async def test_a_thread_before_a_node_that_was_renamed_is_stuck_and_recovers_when_that_is_undone(
    conn: Connection, flows: Flows
) -> None:
    interrupt_id = await waiting_claim(conn, flows)
    await decide(conn, interrupt_id, ALICE, YES)
    # The other way would be paid: a renamed node behind the pause is found by its new name.
    assert await run(conn, renamed("approve", "ask")) == "stuck"
    assert ((await thread_row(conn))["status"], await money(conn)) == ("stuck", [])
    await threads.wake(conn, "t1")
    assert await run(conn, flows) == "over"
    assert ((await thread_row(conn))["status"], len(await money(conn))) == ("paid", 1)


async def test_a_thread_at_a_payment_that_was_renamed_is_stuck_and_recovers_when_that_is_undone(
    conn: Connection, flows: Flows
) -> None:
    await start_claim(conn, amount="20")
    await break_table(conn, "payments", "INSERT", "RAISE EXCEPTION 'the bank is closed'")
    with pytest.raises(DriveFailed):
        await run(conn, flows)
    await mend_table(conn)
    assert await run(conn, renamed("pay", "disburse")) == "stuck"
    assert ((await thread_row(conn))["status"], await money(conn)) == ("stuck", [])
    await threads.wake(conn, "t1")
    assert await run(conn, flows) == "over"
    assert ((await thread_row(conn))["status"], len(await money(conn))) == ("paid", 1)


async def test_a_step_without_its_checkpoint_looks_finished_and_is_paid_nevertheless(
    conn: Connection, flows: Flows
) -> None:
    await start_claim(conn, amount="20")
    await break_table(conn, "payments", "INSERT", "RAISE EXCEPTION 'the bank is closed'")
    with pytest.raises(DriveFailed):
        await run(conn, flows)
    await mend_table(conn)
    # As if it had died between the writes of `decide` and the checkpoint after it.
    last = await value(conn, "SELECT max(checkpoint_id) FROM checkpoints")
    for table in ("checkpoints", "checkpoint_writes"):
        await conn.execute(f"DELETE FROM {table} WHERE checkpoint_id = %s", (last,))
    [flow] = flows
    graph = flow.compile().copy({"checkpointer": AsyncPostgresSaver(conn)})
    state = await graph.aget_state({"configurable": {"thread_id": "t1"}})
    assert (state.next, [task.name for task in state.tasks]) == ((), ["decide"])
    assert await run(conn, flows) == "over"
    assert len(await money(conn)) == 1


async def test_a_late_drive_of_a_stuck_thread_does_nothing(conn: Connection, flows: Flows) -> None:
    await start_claim(conn, amount="20")
    await break_table(conn, "payments", "INSERT", "RAISE EXCEPTION 'the bank is closed'")
    await conn.execute("UPDATE threads SET attempts = %s", (threads.MAX_ATTEMPTS - 1,))
    assert await run(conn, flows) == "stuck"
    before = await everything(conn)
    assert await run(conn, flows) == "stuck"
    assert await everything(conn) == before


async def test_no_card_says_stuck_once_the_thread_is_tried_again_and_waits(conn: Connection, flows: Flows) -> None:
    await start_claim(conn, amount="2000.00")
    assert await run(conn, flows, policy=POLICY_BY_AMOUNT) == "waiting"
    first = await value(conn, "SELECT interrupt_id FROM approvals")
    await decide(conn, first, ANN, YES)
    await conn.execute("UPDATE threads SET attempts = %s", (threads.MAX_ATTEMPTS,))
    assert await run(conn, flows, policy=POLICY_BY_AMOUNT) == "stuck"
    # The first card says so.
    await conn.execute("UPDATE notices SET status = 'sent', due_at = NULL")
    async with conn.transaction():
        await threads.wake(conn, "t1")
    assert await run(conn, flows, policy=POLICY_BY_AMOUNT) == "waiting"
    query = "SELECT status FROM notices WHERE kind = 'card' AND interrupt_id = %s"
    assert await value(conn, query, first) == "pending"


async def test_a_thread_whose_checkpoints_are_gone_asks_again_before_it_pays(conn: Connection, flows: Flows) -> None:
    await waiting_claim(conn, flows)
    for table in ("checkpoints", "checkpoint_blobs", "checkpoint_writes"):
        await conn.execute(f"DELETE FROM {table}")
    assert await run(conn, flows) == "waiting"
    assert await money(conn) == []


async def test_a_request_that_was_asked_again_replaces_the_first(conn: Connection, flows: Flows) -> None:
    first = await waiting_claim(conn, flows)
    for table in ("checkpoints", "checkpoint_blobs", "checkpoint_writes"):
        await conn.execute(f"DELETE FROM {table}")
    await run(conn, flows)
    assert (await approval_of(conn, first)).status == "superseded"


async def test_an_answer_to_an_interrupt_that_langgraph_does_not_know_is_an_error(
    conn: Connection, flows: Flows
) -> None:
    await waiting_claim(conn, flows)
    pen = Pen(conn=conn, policy=POLICY)
    [flow] = flows
    runs = Run(flow, pen, "t1", until=math.inf)
    before = await all_rows(conn, "SELECT checkpoint_id FROM checkpoints ORDER BY 1")
    with pytest.raises(RuntimeError, match="did not move"):
        for _ in range(2):
            await runs.on(Command(resume={"0" * 32: {"approved": True}}))
    assert await all_rows(conn, "SELECT checkpoint_id FROM checkpoints ORDER BY 1") == before
    assert await money(conn) == []
