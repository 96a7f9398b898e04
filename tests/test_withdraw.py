"""Requests that are taken back: by whoever asked, once, and never after they were decided."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from bot.blocks import card
from flow.approvals import approval_of, approvals_of, decide
from flow.changes import withdraw
from flow.database import Connection
from flow.errors import AlreadyDecided, FlowError, NotAllowed, NothingToDecide, UnknownThread
from flow.flows import Flows
from flow.threads import insert_thread, thread_of
from tests.api_door import Program, api_in_process, token
from tests.command import Terminal
from tests.driving import run, waiting_claim
from tests.people import ALICE, ANN, BOB, CAROL, EVE, NO, YES, start_claim
from tests.rows import all_rows, value
from tests.test_flows import branching, flow_of


async def waits(conn: Connection, flows: Flows, *, requested_by: str = ANN.key) -> str:
    """The interrupt id of a claim of 250 USD that waits."""
    await start_claim(conn, requested_by=requested_by)
    assert await run(conn, flows) == "waiting"
    [approval] = (await approvals_of(conn, ["t1"]))["t1"]
    return approval.interrupt_id


async def test_a_claim_that_is_taken_back_ends_unpaid_and_says_by_whom(conn: Connection, flows: Flows) -> None:
    interrupt_id = await waits(conn, flows)
    for _ in range(2):
        await withdraw(conn, "t1", ANN, "bought elsewhere")
    assert await run(conn, flows) == "over"
    assert (await thread_of(conn, "t1")).status == "withdrawn"
    assert await value(conn, "SELECT count(*) FROM payments") == 0
    approval = await approval_of(conn, interrupt_id)
    assert (approval.status, approval.withdrawn_by, approval.withdrawn_why) == (
        "withdrawn", "cli:ann", "bought elsewhere"
    )  # fmt: skip
    _, blocks = card(approval, await thread_of(conn, "t1"), None)
    assert "Nothing was paid: withdrawn by cli:ann (bought elsewhere)." in str(blocks)
    types = [row["type"] for row in await all_rows(conn, "SELECT type FROM events ORDER BY id")]
    assert types == ["approval.requested", "approval.withdrawn"]
    # It stays so.
    await withdraw(conn, "t1", ANN)
    assert (await approval_of(conn, interrupt_id)).withdrawn_why == "bought elsewhere"


@pytest.mark.parametrize("verdict", [YES, NO])
async def test_a_decision_comes_too_late_for_it(conn: Connection, flows: Flows, verdict: Any) -> None:
    interrupt_id = await waits(conn, flows)
    await withdraw(conn, "t1", ANN)
    with pytest.raises(AlreadyDecided, match="already withdrawn by cli:ann"):
        await decide(conn, interrupt_id, ALICE, verdict)


async def test_only_whoever_asked_takes_it_back(conn: Connection, flows: Flows) -> None:
    await waits(conn, flows, requested_by="U02BOB")
    for stranger in (ALICE, CAROL, EVE):
        with pytest.raises(NotAllowed, match="only whoever asked"):
            await withdraw(conn, "t1", stranger)
    assert await value(conn, "SELECT status FROM approvals") == "pending"
    await withdraw(conn, "t1", BOB)
    assert await value(conn, "SELECT withdrawn_by FROM approvals") == BOB.key


@pytest.mark.parametrize(("verdict", "was"), [(YES, "approved"), (NO, "rejected")])
async def test_what_was_decided_is_not_taken_back(conn: Connection, flows: Flows, verdict: Any, was: str) -> None:
    interrupt_id = await waits(conn, flows)
    await decide(conn, interrupt_id, ALICE, verdict)
    with pytest.raises(NothingToDecide, match=f"its last request was {was}"):
        await withdraw(conn, "t1", ANN)
    assert (await approval_of(conn, interrupt_id)).status == was


async def test_there_is_nothing_to_take_back_where_nobody_is_asked(conn: Connection, flows: Flows) -> None:
    with pytest.raises(UnknownThread):
        await withdraw(conn, "t1", ANN)
    await start_claim(conn, amount="20")
    with pytest.raises(NothingToDecide, match="it is running"):
        await withdraw(conn, "t1", ANN)
    assert await run(conn, flows) == "over"
    with pytest.raises(NothingToDecide, match="it is paid"):
        await withdraw(conn, "t1", ANN)


async def test_of_an_approval_and_a_withdrawal_at_once_one_stands(
    conn: Connection, crowd: list[Connection], flows: Flows
) -> None:
    ends = set()
    for number in range(12):
        thread_id = f"t{number}"
        interrupt_id = await waiting_claim(conn, flows, thread_id)
        yes, back = crowd[number % 2 : number % 2 + 2]
        both = decide(yes, interrupt_id, ALICE, YES), withdraw(back, thread_id, ANN)
        answers = await asyncio.gather(*both, return_exceptions=True)
        assert sum(isinstance(answer, FlowError) for answer in answers) == 1
        assert await run(conn, flows, thread_id) == "over"
        status = (await thread_of(conn, thread_id)).status
        ends.add(status)
        paid = await value(conn, "SELECT count(*) FROM payments WHERE thread_id = %s", thread_id)
        assert (status, paid) in (("paid", 1), ("withdrawn", 0))
    assert ends <= {"paid", "withdrawn"}


async def test_every_question_of_a_flow_is_taken_back_and_the_flow_hears_of_it(conn: Connection) -> None:
    flows = Flows([flow := flow_of(branching)])
    await insert_thread(
        conn, thread_id="t1", flow=flow.name, flow_version=flow.version, input={}, requested_by="cli:ann"
    )
    await run(conn, flows)
    await withdraw(conn, "t1", ANN)
    assert await run(conn, flows) == "over"
    thread = await thread_of(conn, "t1")
    assert (thread.status, thread.result) == ("done", [["left", False], ["right", False]])


# Doors


@pytest.fixture
async def robot(database_url: str, conn: Connection) -> AsyncIterator[Program]:
    async with api_in_process(database_url) as url, Program(url, await token(conn)) as program:
        yield program


async def test_a_token_takes_back_what_it_asked_for_and_nothing_else(
    robot: Program, conn: Connection, flows: Flows
) -> None:
    await waits(conn, flows, requested_by="api:robot")
    answer = await robot.post("/api/threads/t1/withdrawal", {"reason": "typo"})
    assert (answer.status, answer.body["approval"]["status"]) == (200, "withdrawn")
    assert answer.body["approval"]["withdrawn_by"] == "api:robot"
    assert (await robot.post("/api/threads/t1/withdrawal", {})).status == 200
    await start_claim(conn, "t2")
    await run(conn, flows, "t2")
    assert (await robot.post("/api/threads/t2/withdrawal", {})).status == 403
    assert (await robot.post("/api/threads/t3/withdrawal", {})).status == 404
    assert (await robot.post("/api/threads/t1/withdrawal", {"why": "typo"})).status == 400
    assert await value(conn, "SELECT status FROM approvals WHERE thread_id = 't2'") == "pending"


async def test_the_command_line_takes_it_back(tmp_path: Path, database_url: str) -> None:
    terminal = Terminal(tmp_path, DATABASE_URL=database_url)
    terminal.run("start", "--thread", "t1", "--amount", "250")
    for _ in range(2):
        done = terminal.run("withdraw", "--thread", "t1", "--reason", "bought elsewhere")
        assert done.code == 0
        assert done.out.startswith("t1: 250.00 USD is withdrawn, nothing is paid (withdrawn by cli:ann at ")
    assert "bought elsewhere" in terminal.run("show", "--thread", "t1").out
    late = terminal.run("resume", "--thread", "t1", "--approve")
    assert (late.code, "already withdrawn by cli:ann" in late.err) == (1, True)
