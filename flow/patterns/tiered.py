"""Tiered approval: a manager over 1,000, then a VP too over 50,000; each tier is a request of its own.

uv run claim_flow.py start --flow tiered --thread x --input '{"amount": "60000"}'

One node asks for one tier, and a conditional edge sends the thread through it again for the next: an answer belongs to
its request, so however often the manager's click arrives, it is never taken for the VP's.
"""

from __future__ import annotations

from decimal import Decimal
from typing import Any, TypedDict

from langgraph.graph import END, START, StateGraph
from pydantic import BaseModel

from flow.asking import Request, ask
from flow.effects import idempotency_key, idempotent
from flow.flows import Flow
from flow.patterns.usd import Dollars

# Who is asked over which amount, from the lowest to the highest.
TIERS = (("manager", Decimal(1_000)), ("vp", Decimal(50_000)))


class Payment(BaseModel):
    amount: Dollars


class State(TypedDict, total=False):
    """`answered` counts the tiers that have."""

    amount: str
    answered: int
    approved: bool
    reason: str
    result: dict[str, Any]


async def approve(state: State) -> State:
    answered = state.get("answered", 0)
    tier, limit = TIERS[answered]
    answer = ask(Request(title=f"Payment over {limit:,}", amount=state["amount"], currency="USD", tier=tier))
    return {"answered": answered + 1, "approved": answer.approved, "reason": answer.reason}


async def book(state: State) -> State:
    return {"result": {"status": "booked", "entry": await enter(state["amount"])}}


async def refuse(state: State) -> State:
    tier, _limit = TIERS[state["answered"] - 1]
    return {"result": {"status": "rejected", "tier": tier, "reason": state["reason"]}}


@idempotent
async def enter(amount: str) -> str:
    """The ledger's entry; a ledger of another service would be sent the same key."""
    return f"{amount}: {idempotency_key()[:12]}"


def following(state: State) -> str:
    """Where the thread goes from here: to the next tier that its amount is over, if nobody has said no."""
    answered = state.get("answered", 0)
    if answered and not state["approved"]:
        return "refuse"
    over = [tier for tier, limit in TIERS if Decimal(state["amount"]) > limit]
    return "approve" if answered < len(over) else "book"


def build() -> StateGraph[State, Any, Any, Any]:
    graph = StateGraph(State)
    graph.add_node("approve", approve)
    graph.add_node("book", book)
    graph.add_node("refuse", refuse)
    graph.add_conditional_edges(START, following, ["approve", "book"])
    graph.add_conditional_edges("approve", following, ["approve", "book", "refuse"])
    graph.add_edge("book", END)
    graph.add_edge("refuse", END)
    return graph


FLOW = Flow(name="tiered", version="1", build=build, input=Payment)
