"""Every trap is found in its line, and what stands beside it and is none is left alone."""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypedDict

import pytest
from langchain.agents import create_agent
from langchain.agents.middleware import HumanInTheLoopMiddleware
from langchain_core.language_models import FakeListChatModel
from langchain_core.tools import tool
from langgraph.graph import START, StateGraph
from langgraph.types import RetryPolicy, interrupt
from pydantic import BaseModel

from flow.approvals import decide
from flow.asking import Request, ask
from flow.database import Connection
from flow.flows import Flow, Flows, load_flows
from flow.threads import insert_thread
from flow.traps import Finding, traps_of
from tests.command import ROOT, Terminal
from tests.driving import run, thread_row
from tests.people import ANN, YES
from tests.rows import value
from tests.trapped import BAD, GOOD, marked, module


class Nothing(BaseModel):
    pass


@pytest.fixture
def found_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], list[Finding]]]:
    """What is found in a module of this text."""
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "requests_like.py").touch()
    path = tmp_path / "trapped.py"

    def found_in(body: str) -> list[Finding]:
        path.write_text(module(body))
        flow: Flow = importlib.import_module("trapped").FLOW
        return traps_of(flow)

    yield found_in
    for name in ("trapped", "requests_like", "documented"):
        sys.modules.pop(name, None)


@pytest.mark.parametrize("name", BAD)
def test_a_trap_is_found_in_its_line(found_in: Callable[[str], list[Finding]], name: str) -> None:
    assert marked(BAD[name])
    found = found_in(BAD[name])
    assert sorted({(each.line, each.trap) for each in found}) == marked(BAD[name]), found
    assert all(each.file.endswith("trapped.py") and each.what and each.fix for each in found)


@pytest.mark.parametrize("name", GOOD)
def test_what_is_no_trap_is_left_alone(found_in: Callable[[str], list[Finding]], name: str) -> None:
    assert found_in(GOOD[name]) == []


@pytest.mark.parametrize("flow", list(load_flows(("flow.claims", "flow.patterns"))), ids=lambda flow: flow.name)
def test_the_flows_that_are_here_have_no_traps(flow: Flow) -> None:
    assert traps_of(flow) == []


def test_the_flow_that_the_documentation_writes_has_no_traps(
    tmp_path: Path, found_in: Callable[[str], list[Finding]]
) -> None:
    [text] = re.findall(r"```python\n(.*?FLOW = .*?)```", (ROOT / "docs" / "flows.md").read_text(), re.DOTALL)
    (tmp_path / "documented.py").write_text(text)
    assert found_in("from documented import FLOW\nTAIL = False\n") == []


def test_an_agent_of_langchains_that_asks_before_its_tools_has_no_traps() -> None:
    model = FakeListChatModel(responses=["x"])
    middleware = HumanInTheLoopMiddleware(interrupt_on={"pay": True})
    flow = Flow(
        name="agent",
        version="1",
        build=lambda: create_agent(model, tools=[pay], middleware=[middleware]),
        input=Nothing,
    )
    flow.compile()
    assert traps_of(flow) == []


@tool
def pay(to: str) -> str:
    """Pay somebody."""
    return to


@tool
def pay_if_asked(to: str) -> str:
    """Pay somebody who is named."""
    first, second = interrupt("sure?"), interrupt("very sure?")
    return f"{to} {first} {second}"


def test_what_an_agents_tools_do_is_read_as_well() -> None:
    model = FakeListChatModel(responses=["x"])
    flow = Flow(name="agent", version="1", build=lambda: create_agent(model, tools=[pay_if_asked]), input=Nothing)
    assert [(each.trap, Path(each.file)) for each in traps_of(flow)] == [("asks twice", Path(__file__))]


# The command


def terminal_with(tmp_path: Path, body: str) -> Terminal:
    (tmp_path / "requests_like.py").touch()
    (tmp_path / "trapped.py").write_text(module(body))
    return Terminal(tmp_path, FLOWS="flow.patterns,trapped", PYTHONPATH=f"{ROOT}:{tmp_path}")


def test_the_command_prints_each_trap_with_its_line_and_fix_and_exits_1(tmp_path: Path) -> None:
    body = BAD["an effect before a question"]
    terminal = terminal_with(tmp_path, body)
    [(line, _)] = marked(body)
    done = terminal.run("doctor", "flow", "only")
    assert (done.code, done.err) == (1, "")
    assert done.out.splitlines() == [
        f"{tmp_path}/trapped.py:{line}: acts before asking: it calls book, an effect, and asks later",
        "       move it to a node before this one, or behind the answer",
    ]
    [finding] = terminal.run("doctor", "flow", "only", "--json").json
    assert set(finding) == {"file", "line", "trap", "what", "fix"}


def test_the_command_finds_nothing_where_nothing_is_and_knows_only_flows_that_are_here(tmp_path: Path) -> None:
    terminal = terminal_with(tmp_path, GOOD["one question on each of two ways"])
    for name in ("only", "approval"):
        done = terminal.run("doctor", "flow", name)
        assert (done.code, done.out) == (0, "no traps found\n")
    assert terminal.run("doctor", "flow", "only", "--json").json == []
    unknown = terminal.run("doctor", "flow", "nobodys")
    assert (unknown.code, "no flow 'nobodys' here, only approval" in unknown.err) == (2, True)


def test_the_command_tells_of_a_state_that_no_load_would_take(tmp_path: Path) -> None:
    terminal = terminal_with(tmp_path, BAD["a state that is not given back"])
    done = terminal.run("doctor", "flow", "only")
    assert (done.code, done.out.count(": state: ")) == (1, 2)
    started = terminal.run("start", "--flow", "only", "--thread", "t1", "--input", "{}")
    assert started.code == 2
    assert "the flow only: its state's order is Order, which comes back as dict instead of Order" in started.err


# At run time


class State(TypedDict, total=False):
    result: Any


def flow_of(node: Any) -> Flows:
    graph = StateGraph(State)
    graph.add_node("only", node, retry_policy=RetryPolicy(initial_interval=0.01, retry_on=ConnectionError))
    graph.add_edge(START, "only")
    return Flows([Flow(name="only", version="1", build=lambda: graph, input=Nothing)])


async def answered(conn: Connection, flows: Flows) -> str:
    """How the drive ends after the first question is approved."""
    await insert_thread(conn, thread_id="t1", flow="only", flow_version="1", input={}, requested_by="cli:ann")
    assert await run(conn, flows) == "waiting"
    await decide(conn, await value(conn, "SELECT interrupt_id FROM approvals"), ANN, YES)
    return await run(conn, flows)


@pytest.mark.parametrize("is_sync", [False, True])
async def test_a_node_that_asks_a_second_time_leaves_the_thread_to_a_person(conn: Connection, is_sync: bool) -> None:
    def node(state: State) -> State:
        return {"result": [ask(Request(title=name)).approved for name in ("one", "two")]}

    async def as_async(state: State) -> State:
        return node(state)

    assert await answered(conn, flow_of(node if is_sync else as_async)) == "stuck"
    assert "asks a second time: give each question a node of its own" in (await thread_row(conn))["reason"]
    assert await value(conn, "SELECT count(*) FROM approvals") == 1


async def test_a_node_that_is_tried_again_after_its_answer_has_not_asked_twice(conn: Connection) -> None:
    left = [ConnectionError("gone")]

    async def node(state: State) -> State:
        answer = ask(Request(title="one"))
        if left:
            raise left.pop()
        return {"result": answer.approved}

    assert await answered(conn, flow_of(node)) == "over"
    assert left == []
