"""Claims that are driven, what their rows say then, and the graphs of other releases."""

from __future__ import annotations

from typing import Any, LiteralString

from langgraph.checkpoint.postgres.aio import AsyncPostgresSaver
from langgraph.graph import END, START, StateGraph
from langgraph.types import Command

from flow import claims
from flow.database import Connection
from flow.drive import Outcome, drive
from flow.flows import Flows, Graph
from flow.model import CLAIM_FLOW, CLAIM_FLOW_VERSION
from flow.pen import Pen
from flow.policy import Policy
from tests.people import POLICY, start_claim
from tests.rows import all_rows, one_row, value

# The keys of the flows of a worker that has the claim flow alone.
CLAIMS = (claims.FLOW.key,)


async def run(conn: Connection, flows: Flows, thread_id: str = "t1", *, policy: Policy = POLICY) -> Outcome:
    return await drive(conn, thread_id, flows=flows, policy=policy)


async def waiting_claim(conn: Connection, flows: Flows, thread_id: str = "t1") -> str:
    """The interrupt id of a claim of 250 USD that waits for its decision."""
    await start_claim(conn, thread_id)
    assert await run(conn, flows, thread_id) == "waiting"
    interrupt_id: str = await value(
        conn, "SELECT interrupt_id FROM approvals WHERE thread_id = %s AND status = 'pending'", thread_id
    )
    return interrupt_id


async def thread_row(conn: Connection) -> dict[str, Any]:
    return await one_row(
        conn, "SELECT status, reason, wakes, attempts, due_at IS NOT NULL AS due, driver_pid FROM threads"
    )


async def money(conn: Connection) -> list[tuple[str, str, str, str]]:
    rows = await all_rows(conn, "SELECT thread_id, amount, currency, payee FROM payments ORDER BY id")
    return [(row["thread_id"], str(row["amount"]), row["currency"], row["payee"]) for row in rows]


async def everything(conn: Connection) -> dict[str, list[dict[str, Any]]]:
    """All rows of ours that a needless drive could change."""
    queries: dict[str, LiteralString] = {
        "threads": "SELECT thread_id, status, reason, wakes, attempts, due_at, driver_pid FROM threads",
        "approvals": "SELECT * FROM approvals",
        "decisions": "SELECT * FROM decisions",
        "payments": "SELECT * FROM payments",
        "notices": "SELECT * FROM notices ORDER BY id",
        "checkpoints": "SELECT checkpoint_id FROM checkpoints ORDER BY 1",
    }
    return {table: await all_rows(conn, query) for table, query in queries.items()}


# Graphs of other releases


def claims_by(graph: StateGraph[Any, Any, Any, Any] | Graph) -> Flows:
    """The claim flow, if this were its graph."""
    flow = claims.ClaimFlow(name=CLAIM_FLOW, version=CLAIM_FLOW_VERSION, build=lambda: graph, input=claims.FLOW.input)
    return Flows([flow])


def graph_of(node: Any) -> Flows:
    """A flow of one step."""
    graph = StateGraph(claims.State, context_schema=Pen)
    graph.add_node("only", node)
    graph.add_edge(START, "only")
    graph.add_edge("only", END)
    return claims_by(graph)


def renamed(old: str, new: str) -> Flows:
    """The claim flow with one node under another name."""
    graph = StateGraph(claims.State, context_schema=Pen)
    names = {name: name for name in ("intake", "decide", "approve", "pay")} | {old: new}
    graph.add_node(names["intake"], claims.intake)
    graph.add_node(names["decide"], claims.decide)
    graph.add_node(names["approve"], claims.approve)
    graph.add_node(names["pay"], claims.pay)
    graph.add_edge(START, names["intake"])
    graph.add_edge(names["intake"], names["decide"])
    ways: dict[Any, str] = {"approve": names["approve"], "pay": names["pay"], END: END}
    for name in ("decide", "approve"):
        graph.add_conditional_edges(names[name], claims._after_a_tier, ways)
    graph.add_edge(names["pay"], END)
    return claims_by(graph)


async def on(conn: Connection, flows: Flows, command: Command[Any]) -> dict[str, Any]:
    """The state after LangGraph alone has run on."""
    pen = Pen(conn=conn, policy=POLICY)
    saver = AsyncPostgresSaver(conn)
    saver.lock = pen.lock
    [flow] = flows
    state: dict[str, Any] = (
        await flow.compile()
        .copy({"checkpointer": saver})
        .ainvoke(command, {"configurable": {"thread_id": "t1"}}, context=pen, durability="sync")
    )
    return state
