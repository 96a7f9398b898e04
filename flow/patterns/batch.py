"""Batch: one item a step, so that whoever goes on after a kill begins with the item that was under way.

uv run claim_flow.py start --flow batch --thread b1 --input '{"items": ["i0", "i1", "i2"]}'

A step changes one number. The items are stored once, however many steps there are, and what comes of each is in the
row of its own effect: a list of results in the state would be stored again with every step.
"""

from __future__ import annotations

from typing import Any, TypedDict

from langgraph.graph import END, START, StateGraph
from pydantic import BaseModel, HttpUrl

from flow.asking import progress
from flow.effects import idempotency_key, idempotent
from flow.flows import Flow
from flow.outside import async_client


class Batch(BaseModel):
    """With a `url` each item is a POST there."""

    items: list[str]
    url: HttpUrl | None = None


class State(TypedDict, total=False):
    items: list[str]
    url: str | None
    done: int
    result: dict[str, Any]


async def work(state: State) -> State:
    done = state.get("done", 0)
    await handle(state["items"][done], state["url"])
    progress(done + 1, len(state["items"]))
    return {"done": done + 1}


async def finish(state: State) -> State:
    return {"result": {"done": state.get("done", 0)}}


@idempotent
async def handle(item: str, url: str | None) -> str:
    """The item's own work. Two equal items are two."""
    if url is not None:
        async with async_client() as http:
            answer = await http.post(url, json={"item": item}, headers={"Idempotency-Key": idempotency_key()})
        answer.raise_for_status()
    return f"{item}: {idempotency_key()[:12]}"


def following(state: State) -> str:
    return "work" if state.get("done", 0) < len(state["items"]) else "finish"


def build() -> StateGraph[State, Any, Any, Any]:
    graph = StateGraph(State)
    graph.add_node("work", work)
    graph.add_node("finish", finish)
    graph.add_conditional_edges(START, following, ["work", "finish"])
    graph.add_conditional_edges("work", following, ["work", "finish"])
    graph.add_edge("finish", END)
    return graph


FLOW = Flow(name="batch", version="1", build=build, input=Batch)
