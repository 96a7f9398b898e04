"""Flows of every shape are driven by one `drive`: branches, subgraphs, long ones, and those that are not here."""

from __future__ import annotations

import asyncio
import contextlib
import operator
import os
import re
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Annotated, Any, TypedDict

import pytest
from langgraph.graph import END, START, StateGraph
from langgraph.types import interrupt
from pydantic import BaseModel

from flow import Flow, Request, ask, progress, threads
from flow.approvals import approval_of, decide
from flow.claims import FLOW as CLAIMS
from flow.database import Connection, connect
from flow.drive import drive
from flow.errors import DriveFailed, SettingError, ThreadExists
from flow.flows import Flows
from flow.threads import insert_thread, settle_flows, thread_of
from tests.command import ROOT, Terminal, worker
from tests.driving import renamed, run
from tests.pausing import Letter, LetterState, letters, load, pause
from tests.people import ANN, NO, POLICY, YES, start_claim
from tests.rows import all_rows, one_row, until, value


class Nothing(BaseModel):
    pass


class State(TypedDict, total=False):
    said: Annotated[list[Any], operator.add]
    done: int
    total: int
    thread_id: str
    started_at: str
    result: Any


def flow_of(build: Any, *, version: str = "1", **more: Any) -> Flow:
    return Flow(name="test", version=version, build=build, input=more.pop("input", Nothing), **more)


def one_node(node: Any) -> Any:
    def build() -> StateGraph[Any, Any, Any, Any]:
        graph = StateGraph(State)
        graph.add_node("only", node)
        graph.add_edge(START, "only")
        return graph

    return build


async def begin(conn: Connection, flow: Flow, thread_id: str = "t1", given: dict[str, Any] | None = None) -> None:
    await insert_thread(
        conn,
        thread_id=thread_id,
        flow=flow.name,
        flow_version=flow.version,
        input=given or {},
        requested_by="cli:ann",
    )


async def pending(conn: Connection) -> dict[str, str]:
    """Interrupt ids of what waits, by title."""
    rows = await all_rows(conn, "SELECT interrupt_id, request FROM approvals WHERE status = 'pending'")
    return {row["request"]["title"]: row["interrupt_id"] for row in rows}


# Asking


def branching() -> StateGraph[Any, Any, Any, Any]:
    def asker(name: str) -> Any:
        def node(state: State) -> State:
            return {"said": [[name, ask(Request(title=name)).approved]]}

        return node

    graph = StateGraph(State)
    for name in ("left", "right"):
        graph.add_node(name, asker(name))
        graph.add_edge(START, name)
    graph.add_node("end", lambda state: {"result": sorted(state["said"])})
    graph.add_edge(["left", "right"], "end")
    return graph


async def test_branches_ask_side_by_side_and_one_answer_leaves_the_other_waiting(conn: Connection) -> None:
    flows = Flows([flow := flow_of(branching)])
    await begin(conn, flow)
    assert await run(conn, flows) == "waiting"
    asked = await pending(conn)
    assert set(asked) == {"left", "right"}
    await decide(conn, asked["right"], ANN, NO)
    assert await run(conn, flows) == "waiting"
    assert await pending(conn) == {"left": asked["left"]}
    await decide(conn, asked["left"], ANN, YES)
    assert await run(conn, flows) == "over"
    assert (await thread_of(conn, "t1")).result == [["left", True], ["right", False]]


async def test_both_answers_at_once_are_both_heard(conn: Connection) -> None:
    flows = Flows([flow := flow_of(branching)])
    await begin(conn, flow)
    await run(conn, flows)
    for interrupt_id in (await pending(conn)).values():
        await decide(conn, interrupt_id, ANN, YES)
    assert await run(conn, flows) == "over"
    assert (await thread_of(conn, "t1")).result == [["left", True], ["right", True]]


def asks_twice_beside_one_that_fails() -> StateGraph[Any, Any, Any, Any]:
    def asker(title: str) -> Any:
        return lambda _: {"said": [ask(Request(title=title)).approved]}

    def failing() -> Any:
        def node(_: State) -> State:
            ask(Request(title="beside"))
            raise RuntimeError("the other system is away")

        return node

    inner = StateGraph(State)
    inner.add_node("one", asker("first"))
    inner.add_node("two", asker("second"))
    inner.add_edge(START, "one")
    inner.add_edge("one", "two")
    graph = StateGraph(State)
    graph.add_node("twice", inner.compile())
    graph.add_node("fails", failing())
    graph.add_edge(START, "twice")
    graph.add_edge(START, "fails")
    return graph


async def test_what_one_branch_asks_next_is_asked_before_the_answer_of_another_goes_on(
    conn: Connection, database_url: str
) -> None:
    """Else nobody could answer it for as long as the other fails."""
    flows = Flows([flow := flow_of(asks_twice_beside_one_that_fails)])
    await begin(conn, flow)
    assert await run(conn, flows) == "waiting"
    for interrupt_id in (await pending(conn)).values():
        await decide(conn, interrupt_id, ANN, YES)
    for _ in range(2):
        async with await connect(database_url, "drive") as own:
            # As it is, if LangGraph cut off a statement beside the branch that fails, and the connection with it.
            with contextlib.suppress(DriveFailed, RuntimeError):
                await run(own, flows)
    assert set(await pending(conn)) == {"second"}


@pytest.mark.parametrize("returned", [{"said": ["worked"]}, {}, None])
async def test_a_branch_that_failed_beside_one_that_asks_is_tried_again_before_the_thread_waits(
    conn: Connection, returned: Any
) -> None:
    tries: list[str] = []

    def asker(state: State) -> State:
        return {"said": [ask(Request(title="Go on")).approved]}

    def work(state: State) -> Any:
        tries.append("work")
        if len(tries) < 3:
            raise OSError("no route to host")
        return returned

    def build() -> StateGraph[Any, Any, Any, Any]:
        graph = StateGraph(State)
        graph.add_node("ask", asker)
        graph.add_node("work", work)
        graph.add_node("end", lambda state: {"result": len(state["said"])})
        graph.add_edge(START, "ask")
        graph.add_edge(START, "work")
        graph.add_edge(["ask", "work"], "end")
        return graph

    flows = Flows([flow := flow_of(build)])
    await begin(conn, flow)
    for _ in range(2):
        with pytest.raises(DriveFailed, match="no route to host"):
            await run(conn, flows)
    assert await run(conn, flows) == "waiting"
    assert len(tries) == 3
    await decide(conn, (await pending(conn))["Go on"], ANN, YES)
    assert await run(conn, flows) == "over"
    assert len(tries) == 3
    assert (await thread_of(conn, "t1")).result == (2 if returned else 1)


async def test_the_command_line_asks_which_of_several_is_meant(
    conn: Connection, database_url: str, tmp_path: Path
) -> None:
    terminal = Terminal(tmp_path, DATABASE_URL=database_url)
    flows = Flows([flow := flow_of(branching)])
    await begin(conn, flow)
    await run(conn, flows)
    refused = terminal.run("resume", "--thread", "t1", "--approve")
    assert (refused.code, "say which with --interrupt" in refused.err) == (1, True)
    assert all(interrupt_id in refused.err for interrupt_id in (await pending(conn)).values())
    assert await value(conn, "SELECT count(*) FROM decisions") == 0


async def test_a_subgraph_may_ask(conn: Connection) -> None:
    def build() -> StateGraph[Any, Any, Any, Any]:
        graph = StateGraph(State)
        graph.add_node("inner", branching().compile())
        graph.add_edge(START, "inner")
        return graph

    flows = Flows([flow := flow_of(build)])
    await begin(conn, flow)
    assert await run(conn, flows) == "waiting"
    for title in ("left", "right"):
        await decide(conn, (await pending(conn))[title], ANN, YES)
        await run(conn, flows)
    assert (await thread_of(conn, "t1")).result == [["left", True], ["right", True]]


@pytest.mark.parametrize(("verdict", "said"), [(YES, True), (NO, False)])
async def test_a_plain_interrupt_is_shown_as_json_and_answered_with_true_or_false(
    conn: Connection, verdict: Any, said: bool
) -> None:
    flows = Flows([flow := flow_of(one_node(lambda _: {"result": interrupt({"delete": ["a", 1]})}))])
    await begin(conn, flow)
    await run(conn, flows)
    request = await value(conn, "SELECT request FROM approvals")
    assert request["fields"] == [["Value", '{\n "delete": [\n  "a",\n  1\n ]\n}']]
    await decide(conn, (await pending(conn))["Approval"], ANN, verdict)
    assert await run(conn, flows) == "over"
    assert (await thread_of(conn, "t1")).result is said


@pytest.mark.parametrize("within", [False, True], ids=["alone", "in an inner graph"])
@pytest.mark.parametrize(("verdict", "said"), [(YES, True), (NO, False)])
async def test_an_answer_after_which_a_node_failed_is_not_the_answer_to_its_next_question(
    conn: Connection, verdict: Any, said: bool, within: bool
) -> None:
    """LangGraph keeps the answer with the failed step, and takes the same one again for the next that it is asked."""
    failing = ["no route to host", "no route to host"]

    def node(_: State) -> State:
        shipped = interrupt({"ship": "A-17"})
        if failing:
            raise OSError(failing.pop())
        return {"result": [shipped, interrupt({"refund": 5000})]}

    def nested() -> StateGraph[Any, Any, Any, Any]:
        graph = StateGraph(State)
        graph.add_node("inner", one_node(node)().compile())
        graph.add_edge(START, "inner")
        return graph

    flow = flow_of(
        nested if within else one_node(node), describe=lambda asked: Request(title=next(iter(asked)), tier="support")
    )
    flows = Flows([flow])
    await begin(conn, flow)
    await run(conn, flows)
    await decide(conn, (await pending(conn))["ship"], ANN, YES)
    for _ in range(2):
        with pytest.raises(DriveFailed, match="no route to host"):
            await run(conn, flows)
    assert await run(conn, flows) == "waiting"
    await decide(conn, (await pending(conn))["refund"], ANN, verdict)
    assert await run(conn, flows) == "over"
    assert (await thread_of(conn, "t1")).result == [True, said]


@pytest.mark.parametrize(("verdict", "said"), [(YES, True), (NO, False)])
async def test_a_flow_may_describe_its_plain_interrupt_and_is_answered_as_before(
    conn: Connection, verdict: Any, said: bool
) -> None:
    flow = flow_of(
        one_node(lambda _: {"result": interrupt({"order": "A-17"})}),
        describe=lambda asked: Request(title=f"Cancel {asked['order']}", tier="support"),
    )
    flows = Flows([flow])
    await begin(conn, flow)
    await run(conn, flows)
    assert await value(conn, "SELECT tier FROM approvals") == "support"
    await decide(conn, (await pending(conn))["Cancel A-17"], ANN, verdict)
    assert await run(conn, flows) == "over"
    assert (await thread_of(conn, "t1")).result is said


@pytest.mark.parametrize(("verdict", "said"), [(YES, "paid"), (NO, "not paid")])
async def test_an_answer_is_as_true_as_what_it_says(conn: Connection, verdict: Any, said: str) -> None:
    flow = flow_of(one_node(lambda _: {"result": "paid" if ask(Request(title="Pay")) else "not paid"}))
    flows = Flows([flow])
    await begin(conn, flow)
    await run(conn, flows)
    await decide(conn, (await pending(conn))["Pay"], ANN, verdict)
    assert await run(conn, flows) == "over"
    assert (await thread_of(conn, "t1")).result == said


async def test_a_node_that_asks_something_else_once_it_is_answered_does_not_go_on(conn: Connection) -> None:
    price = {"now": "100.00"}

    def node(_: State) -> State:
        answer = ask(Request(title="Pay", amount=price["now"], currency="EUR"))
        return {"result": [price["now"], answer.approved]}

    flows = Flows([flow := flow_of(one_node(node))])
    await begin(conn, flow)
    await run(conn, flows)
    await decide(conn, (await pending(conn))["Pay"], ANN, YES)
    price["now"] = "9000.00"
    assert await run(conn, flows) == "stuck"
    assert "asks something else than what people were shown" in str((await thread_of(conn, "t1")).reason)


@pytest.mark.parametrize(
    "asked", [{"x": {"b", "a"}, "n": 1e23}, {"n": [1e300, 0.1, 2.0, (1 << 62) + 1]}], ids=["set", "floats"]
)
async def test_what_json_writes_in_another_way_is_what_was_approved(conn: Connection, asked: Any) -> None:
    flows = Flows([flow := flow_of(one_node(lambda _: {"result": interrupt(asked)}))])
    await begin(conn, flow)
    assert await run(conn, flows) == "waiting"
    await decide(conn, (await pending(conn))["Approval"], ANN, YES)
    assert await run(conn, flows) == "over"


async def test_an_input_with_numbers_that_postgres_writes_otherwise_is_the_same_again(conn: Connection) -> None:
    flow = flow_of(one_node(lambda _: {"result": 1}))
    for _ in range(2):
        await begin(conn, flow, given={"n": [1e23, 1e300, 2.0, 0.1]})
    with pytest.raises(ThreadExists):
        await begin(conn, flow, given={"n": [1e23, 1e300, 2.0, 0.2]})


async def test_what_nobody_could_be_shown_leaves_the_thread_to_a_person(conn: Connection) -> None:
    flows = Flows([flow := flow_of(one_node(lambda _: {"result": interrupt({"long": "x" * 200_000})}))])
    await begin(conn, flow)
    assert await run(conn, flows) == "stuck"
    assert "pass a reference" in str((await thread_of(conn, "t1")).reason)
    assert await value(conn, "SELECT count(*) FROM notices WHERE kind = 'alarm'") == 1


@pytest.mark.parametrize(
    "tamper",
    [
        "UPDATE approvals SET request = jsonb_set(request, '{title}', '\"Give a present\"')",
        "UPDATE approvals SET request_hash = repeat('0', 64)",
        "UPDATE approvals SET tier = 'another'",
    ],
)
async def test_what_was_approved_in_another_form_does_not_go_on(conn: Connection, tamper: Any) -> None:
    flow = letters()
    await pause(conn, "t1", flow, {"to": "ACME"}, POLICY)
    await decide(conn, (await pending(conn))["Send a letter"], ANN, YES)
    await conn.execute(tamper)
    assert await run(conn, Flows([flow])) == "stuck"
    assert "is not what the flow asks for" in str((await thread_of(conn, "t1")).reason)


# Ending


async def test_the_state_begins_with_the_input_the_thread_and_the_time(conn: Connection) -> None:
    def node(state: State) -> State:
        return {"result": [state["total"], state["thread_id"], state["started_at"]]}

    class Given(BaseModel):
        total: int = 3

    flows = Flows([flow := flow_of(one_node(node), input=Given)])
    await begin(conn, flow)
    assert await run(conn, flows) == "over"
    thread = await thread_of(conn, "t1")
    assert thread.result == [3, "t1", thread.created_at.isoformat()]
    assert await run(conn, flows) == "over"


@pytest.mark.parametrize(
    ("result", "why"),
    [
        (None, "KeyError"),
        (lambda state: {1, 2}, "TypeError"),
        (lambda state: float("nan"), "ValueError"),
        (lambda state: "x" * 70_000, "at most 64000"),
    ],
)
async def test_a_flow_that_ends_without_a_result_is_stuck_with_an_alarm(
    conn: Connection, result: Any, why: str
) -> None:
    flows = Flows([flow := flow_of(one_node(lambda _: {"done": 1}), result=result)])
    await begin(conn, flow)
    assert await run(conn, flows) == "stuck"
    assert why in str((await thread_of(conn, "t1")).reason)
    assert await value(conn, "SELECT count(*) FROM notices WHERE kind = 'alarm'") == 1
    assert [row["type"] for row in await all_rows(conn, "SELECT type FROM events")] == ["thread.stuck"]


# Long ones


def counting() -> StateGraph[Any, Any, Any, Any]:
    async def count(state: State) -> State:
        done = state.get("done", 0) + 1
        progress(done, state["total"])
        return {"done": done, "said": [done]}

    def after(state: State) -> str:
        return "count" if state["done"] < state["total"] else "end"

    graph = StateGraph(State)
    graph.add_node("count", count)
    graph.add_node("end", lambda state: {"result": state["said"]})
    graph.add_edge(START, "count")
    graph.add_conditional_edges("count", after, ["count", "end"])
    graph.add_edge("end", END)
    return graph


class Total(BaseModel):
    total: int


async def test_a_long_flow_is_driven_in_slices_and_each_step_once(conn: Connection) -> None:
    flows = Flows([flow := flow_of(counting, input=Total)])
    await begin(conn, flow, given={"total": 5})
    outcomes = []
    for slices in range(1, 10):
        outcomes.append(await drive(conn, "t1", flows=flows, policy=POLICY, slice_s=0))
        row = await one_row(
            conn, "SELECT attempts, progress_done, progress_total, due_at IS NOT NULL AS due FROM threads"
        )
        if outcomes[-1] == "over":
            break
        assert row == {"attempts": 0, "progress_done": slices, "progress_total": 5, "due": True}
    assert outcomes == ["unfinished"] * 5 + ["over"]
    assert (await thread_of(conn, "t1")).result == [1, 2, 3, 4, 5]


async def test_a_slice_lets_every_branch_of_a_step_end(conn: Connection) -> None:
    worked: list[str] = []

    def quick(state: State) -> State:
        return {"said": ["quick"]}

    async def slow(state: State) -> State:
        for done in range(1, 4):
            progress(done, 3)
            await asyncio.sleep(0.02)
        worked.append("slow")
        return {"said": ["slow"]}

    def build() -> StateGraph[Any, Any, Any, Any]:
        graph = StateGraph(State)
        for name, node in {"quick": quick, "slow": slow}.items():
            graph.add_node(name, node)
            graph.add_edge(START, name)
        graph.add_node("end", lambda state: {"result": sorted(state["said"])})
        graph.add_edge(["quick", "slow"], "end")
        return graph

    flows = Flows([flow := flow_of(build)])
    await begin(conn, flow)
    assert await drive(conn, "t1", flows=flows, policy=POLICY, slice_s=0) == "unfinished"
    assert worked == ["slow"]
    assert await drive(conn, "t1", flows=flows, policy=POLICY, slice_s=0) == "over"
    assert (worked, (await thread_of(conn, "t1")).result) == (["slow"], ["quick", "slow"])


async def test_a_slice_never_ends_inside_a_step_of_several(conn: Connection) -> None:
    flows = Flows([flow := flow_of(branching)])
    await begin(conn, flow)
    assert await drive(conn, "t1", flows=flows, policy=POLICY, slice_s=0) == "waiting"
    for interrupt_id in (await pending(conn)).values():
        await decide(conn, interrupt_id, ANN, YES)
    assert await drive(conn, "t1", flows=flows, policy=POLICY, slice_s=0) == "unfinished"
    assert await drive(conn, "t1", flows=flows, policy=POLICY, slice_s=0) == "over"
    assert (await thread_of(conn, "t1")).result == [["left", True], ["right", True]]


@pytest.fixture
async def package(tmp_path: Path, database_url: str) -> AsyncIterator[Terminal]:
    (tmp_path / "counting.py").write_text(
        "from tests.test_flows import Total, counting\n"
        "from flow import Flow\n"
        "FLOW = Flow(name='counting', version='3', build=counting, input=Total)\n"
    )
    yield Terminal(tmp_path, DATABASE_URL=database_url, PYTHONPATH=f"{ROOT}:{tmp_path}")


async def test_a_person_who_waits_sees_how_far_it_is_and_a_pipe_gets_the_result_alone(
    package: Terminal, conn: Connection
) -> None:
    package.environment["FLOWS"] = "counting"
    given = ("--flow", "counting", "--input", '{"total": 400}')
    seen, out = on_a_screen(package, "start", "--thread", "t1", *given)
    assert re.search(r"t1 .*\d+/400", seen)
    assert out.startswith("t1: counting is done: ")
    piped = package.run("start", "--thread", "t2", *given)
    assert (piped.code, piped.err) == (0, "")
    assert re.search(r"progress +400 of 400", package.run("show", "--thread", "t1").out)
    assert package.run("show", "--thread", "t1", "--json").json["progress"] == {"done": 400, "total": 400}


def on_a_screen(terminal: Terminal, *words: str) -> tuple[str, str]:
    """What a command shows on a terminal as stderr, and what it prints."""
    ours, theirs = os.openpty()
    with os.fdopen(ours, "rb", buffering=0) as screen:
        process = subprocess.Popen(
            [sys.executable, str(ROOT / "claim_flow.py"), *words],
            cwd=terminal.folder,
            env=terminal.environment | {"TERM": "xterm", "COLUMNS": "100"},
            stdout=subprocess.PIPE,
            stderr=theirs,
        )
        os.close(theirs)
        seen = b""
        # Linux tells the end of a terminal by EIO.
        with contextlib.suppress(OSError):
            while part := screen.read(4096):
                seen += part
        out, _ = process.communicate(timeout=60)
    assert process.returncode == 0
    return seen.decode(), out.decode()


# Versions, and flows that are not here


def saying(word: str) -> Any:
    def node(_: State) -> State:
        return {"result": [word, ask(Request(title=word)).approved]}

    return one_node(node)


async def test_a_thread_keeps_its_version_whatever_comes_beside_it(conn: Connection) -> None:
    old, new = flow_of(saying("old"), version="1"), flow_of(saying("new"), version="2")
    await begin(conn, old)
    assert await run(conn, Flows([old])) == "waiting"
    both = Flows([new, old])
    await decide(conn, (await pending(conn))["old"], ANN, YES)
    assert await run(conn, both) == "over"
    assert (await thread_of(conn, "t1")).result == ["old", True]


async def test_a_thread_whose_version_is_not_here_is_left_alone_and_goes_on_when_it_is(conn: Connection) -> None:
    old, new = flow_of(saying("old"), version="1"), flow_of(saying("new"), version="2")
    await begin(conn, old)
    await run(conn, Flows([old]))
    await decide(conn, (await pending(conn))["old"], ANN, YES)
    before = await all_rows(conn, "SELECT checkpoint_id FROM checkpoints ORDER BY 1")
    for _ in range(2):
        assert await run(conn, Flows([new])) == "unavailable"
    thread = await thread_of(conn, "t1")
    assert (thread.status, thread.due_at, thread.attempts) == ("unavailable", None, 0)
    assert thread.reason == "no worker has the flow test in version 1: name its module in FLOWS"
    assert await all_rows(conn, "SELECT checkpoint_id FROM checkpoints ORDER BY 1") == before
    assert await value(conn, "SELECT count(*) FROM notices WHERE kind = 'alarm'") == 1

    assert await settle_flows(conn, [new.key]) == (0, 0)
    assert await settle_flows(conn, [new.key, old.key]) == (1, 0)
    assert await run(conn, Flows([new, old])) == "over"
    assert (await thread_of(conn, "t1")).result == ["old", True]


async def test_a_worker_looks_only_at_threads_that_it_can_drive(conn: Connection) -> None:
    flow = flow_of(saying("word"))
    for number in range(3):
        await begin(conn, flow, f"t{number}")
    await start_claim(conn, "claim")
    due = await threads.due_threads(conn, flows=[CLAIMS.key, "other@1"], drive_timeout_s=60, limit=2)
    assert [each.thread_id for each in due] == ["claim"]
    due = await threads.due_threads(conn, flows=[CLAIMS.key, flow.key], drive_timeout_s=60, limit=3)
    assert [each.thread_id for each in due] == ["t0", "t1", "t2"]


async def test_what_waits_for_a_flow_that_nobody_has_is_set_aside_after_a_grace(conn: Connection) -> None:
    flow = flow_of(saying("word"))
    for number in range(3):
        await begin(conn, flow, f"t{number}")
    await start_claim(conn, "claim")
    assert await settle_flows(conn, [CLAIMS.key]) == (0, 0)
    await conn.execute("UPDATE threads SET due_at = due_at - interval '11 seconds'")
    # Nobody says that he drives claims, either; but the caller is about to.
    assert await settle_flows(conn, [CLAIMS.key]) == (0, 3)
    assert await settle_flows(conn, [CLAIMS.key]) == (0, 0)
    statuses = {
        row["thread_id"]: row["status"] for row in await all_rows(conn, "SELECT thread_id, status FROM threads")
    }
    assert statuses == {"claim": "running"} | dict.fromkeys(("t0", "t1", "t2"), "unavailable")


async def test_list_shows_what_no_worker_has_and_the_worker_that_has_it_takes_it_up(
    package: Terminal, conn: Connection
) -> None:
    def terminal(flows: str) -> Terminal:
        return Terminal(package.folder, **package.environment, FLOWS=flows)

    given = ("--thread", "t1", "--flow", "counting", "--input", '{"total": 3}')
    async with worker(terminal("flow.claims"), conn):
        # This command has the flow, and nobody else: it drives by itself, a worker or none.
        assert terminal("counting").run("start", *given).code == 0
        await conn.execute(
            "UPDATE threads SET status = 'running', result = NULL, due_at = clock_timestamp() - interval '11 seconds'"
        )

        async def listed() -> bool:
            return ["t1", "counting", "unavailable"] in [line.split()[:3] for line in list_().splitlines()]

        def list_() -> str:
            return terminal("flow.claims").run("list", "--status", "unavailable").out

        await until(listed, within_s=30)
        async with worker(terminal("counting,flow.claims"), conn, present=2):

            async def done() -> bool:
                return bool(await value(conn, "SELECT status = 'done' FROM threads"))

            await until(done, within_s=30)


# Paused by one release, driven by another


@pytest.mark.parametrize("name", ["claims-before-flows", "claims-0.1"])
async def test_a_claim_that_an_earlier_release_paused_is_paid_once(conn: Connection, flows: Flows, name: str) -> None:
    interrupt_id = await load(conn, name)
    assert await run(conn, flows) == "waiting"
    await decide(conn, interrupt_id, ANN, YES)
    for _ in range(2):
        assert await run(conn, flows) == "over"
    assert await value(conn, "SELECT count(*) FROM payments WHERE amount = 250") == 1


@pytest.mark.parametrize("name", ["claims-before-flows", "claims-0.1"])
async def test_a_claim_whose_node_was_renamed_is_not_paid_and_not_called_over(conn: Connection, name: str) -> None:
    interrupt_id = await load(conn, name)
    await decide(conn, interrupt_id, ANN, YES)
    assert await run(conn, renamed("approve", "ask")) == "stuck"
    assert await value(conn, "SELECT count(*) FROM payments") == 0


async def test_a_thread_goes_on_when_the_node_after_its_pause_was_renamed_and_the_state_has_grown(
    conn: Connection,
) -> None:
    class Grown(LetterState, total=False):
        stamp: str

    def post(state: Grown) -> Grown:
        return {"result": {"sent": state["approved"], "to": state["to"], "stamp": state.get("stamp", "none")}}

    interrupt_id = await load(conn, "letters-0.1")
    await decide(conn, interrupt_id, ANN, YES)
    assert await run(conn, Flows([letters(sends="post", sender=post, state=Grown)])) == "over"
    assert (await thread_of(conn, "t1")).result == {"sent": True, "to": "ACME", "stamp": "none"}


async def test_a_thread_whose_asking_node_was_renamed_is_stuck_and_goes_on_when_it_is_brought_back(
    conn: Connection,
) -> None:
    interrupt_id = await load(conn, "letters-0.1")
    assert (await approval_of(conn, interrupt_id)).request["title"] == "Send a letter"
    await decide(conn, interrupt_id, ANN, YES)
    assert await run(conn, Flows([letters(asks="check")])) == "stuck"
    assert "bring it back" in str((await thread_of(conn, "t1")).reason)
    await threads.wake(conn, "t1")
    assert await run(conn, Flows([letters()])) == "over"
    assert (await thread_of(conn, "t1")).result == {"sent": True, "to": "ACME"}
    assert Letter.model_validate({"to": "ACME"}).to == "ACME"


@pytest.mark.parametrize("verdict", [YES, NO])
async def test_a_node_that_is_gone_is_not_the_end_though_the_state_has_a_result(conn: Connection, verdict: Any) -> None:
    def build(name: str) -> Flow:
        def graph() -> StateGraph[Any, Any, Any, Any]:
            graph = StateGraph(State)
            graph.add_node("charge", lambda _: {"result": "charged"})
            graph.add_node(name, lambda _: {"result": str(ask(Request(title="Keep")).approved)})
            graph.add_edge(START, "charge")
            graph.add_edge("charge", name)
            return graph

        return flow_of(graph)

    await begin(conn, old := build("review"))
    assert await run(conn, Flows([old])) == "waiting"
    for _ in range(2):
        # Nobody has decided yet: it is looked at for another reason.
        await threads.wake(conn, "t1")
        assert await run(conn, Flows([build("check")])) == "stuck"
    await decide(conn, (await pending(conn))["Keep"], ANN, verdict)
    assert await run(conn, Flows([build("check")])) == "stuck"
    await threads.wake(conn, "t1")
    assert await run(conn, Flows([old])) == "over"
    assert (await thread_of(conn, "t1")).result == str(verdict is YES)


async def test_a_node_that_is_gone_from_an_inner_graph_is_missed_too(conn: Connection) -> None:
    def build(name: str) -> Flow:
        def graph() -> StateGraph[Any, Any, Any, Any]:
            inner = StateGraph(State)
            inner.add_node(name, lambda _: {"done": int(ask(Request(title="Keep")).approved)})
            inner.add_edge(START, name)
            graph = StateGraph(State)
            graph.add_node("inner", inner.compile())
            graph.add_node("end", lambda state: {"result": state.get("done", "nobody asked")})
            graph.add_edge(START, "inner")
            graph.add_edge("inner", "end")
            return graph

        return flow_of(graph)

    await begin(conn, old := build("review"))
    assert await run(conn, Flows([old])) == "waiting"
    await decide(conn, (await pending(conn))["Keep"], ANN, YES)
    assert await run(conn, Flows([build("check")])) == "stuck"
    await threads.wake(conn, "t1")
    assert await run(conn, Flows([old])) == "over"
    assert (await thread_of(conn, "t1")).result == 1


async def test_two_flows_of_one_name_and_version_are_refused() -> None:
    with pytest.raises(SettingError, match="two flows are test version 1"):
        Flows([flow_of(counting), flow_of(branching)])


async def test_two_connections_drive_one_thread_one_at_a_time(conn: Connection, database_url: str) -> None:
    flows = Flows([flow := flow_of(counting, input=Total)])
    await begin(conn, flow, given={"total": 2})
    async with await connect(database_url, "drive") as other:
        assert await threads.try_lock(other, "t1")
        assert await run(conn, flows) == "locked"
        await threads.unlock(other, "t1")
    assert await run(conn, flows) == "over"
