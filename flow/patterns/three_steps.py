"""Three steps, of which the middle one takes its time: kill it there, go on, and step one does not run again.

uv run claim_flow.py start --flow three-steps --thread t1 --input '{"seconds": 30}'

Type it again after a kill. Each step leaves the id of the process that ran it.
"""

from __future__ import annotations

import asyncio
import os
from typing import Any, TypedDict

from langgraph.graph import END, START, StateGraph
from pydantic import BaseModel, Field

from flow.flows import Flow


class Input(BaseModel):
    # A step must end before a worker takes its drive for dead (DRIVE_TIMEOUT, 120 s).
    seconds: float = Field(default=30, ge=0, le=100)


class State(TypedDict, total=False):
    seconds: float
    one: int
    two: int
    result: dict[str, Any]


async def one(state: State) -> State:  # noqa: ARG001
    return {"one": os.getpid()}


async def two(state: State) -> State:
    await asyncio.sleep(state["seconds"])
    return {"two": os.getpid()}


async def three(state: State) -> State:
    return {"result": {"one": state["one"], "two": state["two"], "three": os.getpid()}}


def build() -> StateGraph[State, Any, Any, Any]:
    graph = StateGraph(State)
    graph.add_node("one", one)
    graph.add_node("two", two)
    graph.add_node("three", three)
    graph.add_edge(START, "one")
    graph.add_edge("one", "two")
    graph.add_edge("two", "three")
    graph.add_edge("three", END)
    return graph


FLOW = Flow(name="three-steps", version="1", build=build, input=Input)
