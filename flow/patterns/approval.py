"""Approval: a large amount waits for a VP, and the ledger gets its entry once.

uv run claim_flow.py start --flow approval --thread a1 --input '{"amount": "60000", "payee": "ACME"}'
"""

from __future__ import annotations

from decimal import Decimal
from typing import Any, TypedDict

from langgraph.graph import END, START, StateGraph
from pydantic import BaseModel, Field

from flow.asking import Request, ask
from flow.effects import idempotency_key, idempotent
from flow.flows import Flow
from flow.patterns.usd import Dollars

LIMIT = Decimal(50_000)


class Payment(BaseModel):
    amount: Dollars
    payee: str = Field(min_length=1, max_length=200)


class State(TypedDict, total=False):
    amount: str
    payee: str
    approved: bool
    reason: str
    result: dict[str, Any]


async def approve(state: State) -> State:
    answer = ask(
        Request(
            title="Payment over 50,000",
            fields={"Payee": state["payee"]},
            amount=state["amount"],
            currency="USD",
            tier="vp",
        )
    )
    return {"approved": answer.approved, "reason": answer.reason}


async def book(state: State) -> State:
    return {"result": {"status": "booked", "entry": await enter(state["payee"], state["amount"])}}


async def refuse(state: State) -> State:
    return {"result": {"status": "rejected", "reason": state["reason"]}}


@idempotent
async def enter(payee: str, amount: str) -> str:
    """The ledger's entry; a ledger of another service would be sent the same key."""
    return f"{amount} to {payee}: {idempotency_key()[:12]}"


def build() -> StateGraph[State, Any, Any, Any]:
    graph = StateGraph(State)
    graph.add_node("approve", approve)
    graph.add_node("book", book)
    graph.add_node("refuse", refuse)
    graph.add_conditional_edges(START, lambda state: "approve" if is_large(state) else "book", ["approve", "book"])
    graph.add_conditional_edges("approve", lambda state: "book" if state["approved"] else "refuse", ["book", "refuse"])
    graph.add_edge("book", END)
    graph.add_edge("refuse", END)
    return graph


def is_large(state: State) -> bool:
    return Decimal(state["amount"]) > LIMIT


FLOW = Flow(name="approval", version="1", build=build, input=Payment)
