"""Payment with review and refund: charged at once, reviewed if it is large, refunded if it is rejected; then a receipt.

uv run claim_flow.py start --flow payment --thread p1 --input '{"amount": "2000"}'

With a "url" in the input each of the three is a POST there, to /charges, /refunds and /receipts. Whenever a call is
made again, because the process died before it had the answer, its Idempotency-Key is the same: that, and a service
that honours it, is what makes once out of at least once.
"""

from __future__ import annotations

from decimal import Decimal
from typing import Annotated, Any, TypedDict

from langgraph.graph import END, START, StateGraph
from pydantic import AfterValidator, BaseModel, HttpUrl

from flow.asking import Request, ask
from flow.effects import idempotency_key, idempotent
from flow.flows import Flow
from flow.inputs import MAX_NAME, storable
from flow.outside import async_client
from flow.patterns.usd import Dollars

LIMIT = Decimal(1_000)


def ends_in_its_path(url: HttpUrl) -> HttpUrl:
    if {"?", "#"} & set(str(url)):
        raise ValueError("it has a query or a fragment: /charges, /refunds and /receipts come after it")
    return url


class Payment(BaseModel):
    amount: Dollars
    url: Annotated[HttpUrl, AfterValidator(ends_in_its_path)] | None = None


class NoReference(Exception):
    """The service says that it has done what was ordered, and not as what: asking again under the same key may tell."""


class State(TypedDict, total=False):
    amount: str
    url: str | None
    charge: str
    approved: bool
    reason: str
    refund: str
    result: dict[str, Any]


async def charge(state: State) -> State:
    return {"charge": await order(state["url"], "charges", amount=state["amount"])}


async def review(state: State) -> State:
    answer = ask(
        Request(title="Large payment", fields={"Charge": state["charge"]}, amount=state["amount"], currency="USD")
    )
    return {"approved": answer.approved, "reason": answer.reason}


async def refund(state: State) -> State:
    return {"refund": await order(state["url"], "refunds", charge=state["charge"])}


async def receipt(state: State) -> State:
    said = {"status": "charged", "charge": state["charge"]}
    if "refund" in state:
        said |= {"status": "refunded", "refund": state["refund"], "reason": state["reason"]}
    return {"result": said | {"receipt": await order(state["url"], "receipts", **said)}}


@idempotent
async def order(url: str | None, what: str, **details: str) -> str:
    """The reference of what was ordered, by the service; without a service, of the key."""
    if url is None:
        return f"{what}-{idempotency_key()[:12]}"
    async with async_client() as http:
        answer = await http.post(
            f"{url.rstrip('/')}/{what}", json=details, headers={"Idempotency-Key": idempotency_key()}
        )
    return reference_in(answer.raise_for_status().json())


def reference_in(answer: Any) -> str:
    reference = answer.get("reference") if isinstance(answer, dict) else None
    if type(reference) not in (str, int) or reference == "":
        raise NoReference("the service answered without a reference")
    return storable(str(reference))[:MAX_NAME]


def build() -> StateGraph[State, Any, Any, Any]:
    graph = StateGraph(State)
    graph.add_node("charge", charge)
    graph.add_node("review", review)
    graph.add_node("refund", refund)
    graph.add_node("receipt", receipt)
    graph.add_edge(START, "charge")
    graph.add_conditional_edges(
        "charge", lambda state: "review" if is_large(state) else "receipt", ["review", "receipt"]
    )
    graph.add_conditional_edges(
        "review", lambda state: "receipt" if state["approved"] else "refund", ["receipt", "refund"]
    )
    graph.add_edge("refund", "receipt")
    graph.add_edge("receipt", END)
    return graph


def is_large(state: State) -> bool:
    return Decimal(state["amount"]) > LIMIT


# A service's reference may look like a token or a card's number; when it is shown, the money has moved already.
FLOW = Flow(name="payment", version="1", build=build, input=Payment, not_secret=("Charge",))
