"""Research with review: search, let an analyst look at what was found, and report it if they agree.

uv run claim_flow.py start --flow research --thread r1 --input '{"topic": "refund"}'

What was found is in the state: the report is of exactly what the analyst has seen, and a rejection goes past it.
"""

from __future__ import annotations

from typing import Any, TypedDict

from langgraph.graph import END, START, StateGraph
from pydantic import BaseModel, Field

from flow.asking import Request, ask
from flow.effects import idempotent
from flow.flows import Flow

# What there is to search, by title. A team asks its own index here.
DOCUMENTS = {
    "Refunds": "A refund goes back to the card that was charged, within five days.",
    "Receipts": "A receipt is sent once, after the charge or the refund that it is about.",
    "Large payments": "A payment over 50,000 waits for a VP, whoever asked for it.",
}


class Question(BaseModel):
    topic: str = Field(min_length=1, max_length=200)


class State(TypedDict, total=False):
    topic: str
    found: list[str]
    approved: bool
    reason: str
    result: dict[str, Any]


async def search(state: State) -> State:
    return {"found": await find(state["topic"])}


async def review(state: State) -> State:
    fields = {"Found": "\n".join(state["found"]) or "nothing"}
    answer = ask(Request(title=f"Report on {state['topic']}", fields=fields, tier="analyst"))
    return {"approved": answer.approved, "reason": answer.reason}


async def report(state: State) -> State:
    return {"result": {"status": "reported", "topic": state["topic"], "report": state["found"]}}


async def refuse(state: State) -> State:
    return {"result": {"status": "rejected", "reason": state["reason"]}}


@idempotent
async def find(topic: str) -> list[str]:
    """What mentions it. A search that costs something is paid for once."""
    documents = [f"{title}: {text}" for title, text in DOCUMENTS.items()]
    return [document for document in documents if topic.lower() in document.lower()]


def build() -> StateGraph[State, Any, Any, Any]:
    graph = StateGraph(State)
    graph.add_node("search", search)
    graph.add_node("review", review)
    graph.add_node("report", report)
    graph.add_node("refuse", refuse)
    graph.add_edge(START, "search")
    graph.add_edge("search", "review")
    graph.add_conditional_edges(
        "review", lambda state: "report" if state["approved"] else "refuse", ["report", "refuse"]
    )
    graph.add_edge("report", END)
    graph.add_edge("refuse", END)
    return graph


FLOW = Flow(name="research", version="1", build=build, input=Question)
