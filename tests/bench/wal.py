"""What a claim writes: bytes of WAL from filing to the payment, with a pause and a resume, beside LangGraph alone; and
how many of its updates write no index (HOT).

All in this process, one claim after the other, with nothing else on the server: the WAL is the server's.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, TypedDict

import psycopg
from langgraph.checkpoint.postgres.aio import AsyncPostgresSaver
from langgraph.graph import END, START, StateGraph
from langgraph.types import Command, interrupt

from flow import events, inputs, notices, threads
from flow.approvals import approvals_of, decide
from flow.audit import seal_all
from flow.claims import FLOW
from flow.database import Connection, connect, ensure_schema
from flow.drive import drive, ensure_checkpoint_tables
from flow.flows import Flows
from flow.model import CLAIM_FLOW, CLAIM_FLOW_VERSION
from flow.standby import rehearse
from tests.bench.databases import database
from tests.people import ALICE, POLICY, YES

# Each page's first change after a checkpoint is written whole: the first claims pay for all that follow.
_WARM_UP = 50


class _State(TypedDict, total=False):
    thread: str
    amount: float
    approved: bool
    payment: str


@dataclass(frozen=True, kw_only=True)
class Written:
    """Bytes for each claim: by the flow alone, by all that follows (cards, positions of events, seals), and by
    LangGraph with the same graph's shape and nothing of ours; and for each rehearsal of a stand-by, of which a claim
    with a pause uses two if a worker drives it. `updates`: of each table, how many rows were updated, and
    how many of them without writing an index."""

    claims: int
    flow: float
    after: float
    rehearsal: float
    langgraph: float
    updates: dict[str, tuple[int, int]]

    def rendered(self) -> list[str]:
        head = (
            f"WAL for each of {self.claims} claims, with pause and resume: {self.flow / 1000:.1f} kB,"
            f" {self.after / 1000:.1f} kB more for its cards, events and seals,"
            f" {self.rehearsal / 1000:.1f} kB for each rehearsal of a stand-by;"
            f" LangGraph alone {self.langgraph / 1000:.1f} kB"
        )
        shares = (f"  {table}: {hot} of {every} updates are HOT" for table, (every, hot) in self.updates.items())
        return [head, *shares]


async def wal(server_url: str, admin: psycopg.Connection, *, claims: int) -> Written:
    with database(server_url, admin) as ours, database(server_url, admin) as theirs:
        async with await connect(ours, "drive") as conn:
            await ensure_schema(ours, conn)
            await ensure_checkpoint_tables(ours, conn)
            flows = Flows([FLOW])

            async def claim(number: int) -> None:
                await _claim(conn, f"claim-{number}", flows)

            flow = await _bytes_each(admin, claims, claim)
            began = _position(admin)
            await _tell(conn)
            after = _bytes_since(admin, began) / (claims + _WARM_UP)
        async with await connect(ours, "door") as conn:
            updates = await _updates(conn)
        async with await connect(ours, "drive") as conn:
            rehearsal = await _bytes_each(admin, _WARM_UP, lambda _: rehearse(conn))
        async with AsyncPostgresSaver.from_conn_string(theirs) as saver:
            await saver.setup()
            langgraph = await _bytes_each(admin, claims, _of_langgraph(saver))
    return Written(claims=claims, flow=flow, after=after, rehearsal=rehearsal, langgraph=langgraph, updates=updates)


async def _bytes_each(admin: psycopg.Connection, claims: int, claim: Callable[[int], Awaitable[None]]) -> float:
    admin.execute("CHECKPOINT")
    for number in range(_WARM_UP):
        await claim(number)
    began = _position(admin)
    for number in range(_WARM_UP, _WARM_UP + claims):
        await claim(number)
    return _bytes_since(admin, began) / claims


async def _claim(conn: Connection, thread_id: str, flows: Flows) -> None:
    await threads.insert_thread(
        conn,
        thread_id=thread_id,
        flow=CLAIM_FLOW,
        flow_version=CLAIM_FLOW_VERSION,
        input=inputs.parse_claim(amount="250", currency="USD", payee="ACME").as_input(),
        requested_by="cli:ann",
    )
    assert await drive(conn, thread_id, flows=flows, policy=POLICY) == "waiting"
    [approval] = (await approvals_of(conn, [thread_id]))[thread_id]
    await decide(conn, approval.interrupt_id, ALICE, YES)
    assert await drive(conn, thread_id, flows=flows, policy=POLICY) == "over"


async def _tell(conn: Connection) -> None:
    """As the deliverer and the worker do; a second claims' cards are one update of each row instead of two or three."""
    for lane in ("posts", "changes"):
        while notice := await notices.lease(conn, lane):
            assert notice.interrupt_id is not None
            await notices.remember_message(conn, notice.interrupt_id, "C01BENCH", f"{notice.id}.000100")
            await notices.mark_sent(conn, notice)
    await events.give_positions(conn)
    await seal_all(conn)


def _of_langgraph(saver: AsyncPostgresSaver) -> Callable[[int], Awaitable[None]]:
    """As the tutorial has it: the same steps, whose payment writes nothing."""
    graph = StateGraph(_State)
    graph.add_node("intake", lambda state: {"amount": float(state["amount"])})
    graph.add_node("decide", lambda state: {"approved": state["amount"] <= 100})
    graph.add_node("approve", lambda state: {"approved": bool(interrupt({"amount": state["amount"]}))})
    graph.add_node("pay", lambda state: {"payment": f"pay-{state['thread']}"})
    graph.add_edge(START, "intake")
    graph.add_edge("intake", "decide")
    graph.add_conditional_edges("decide", lambda state: "pay" if state["approved"] else "approve", ["pay", "approve"])
    graph.add_edge("approve", "pay")
    graph.add_edge("pay", END)
    compiled = graph.compile(checkpointer=saver)

    async def claim(number: int) -> None:
        config: Any = {"configurable": {"thread_id": f"claim-{number}"}}
        await compiled.ainvoke({"thread": f"claim-{number}", "amount": 250.0}, config)
        await compiled.ainvoke(Command(resume=True), config)

    return claim


def _position(admin: psycopg.Connection) -> str:
    row = admin.execute("SELECT pg_current_wal_insert_lsn()::text").fetchone()
    assert row is not None
    return str(row[0])


def _bytes_since(admin: psycopg.Connection, began: str) -> int:
    row = admin.execute("SELECT (pg_current_wal_insert_lsn() - %s::pg_lsn)::bigint", (began,)).fetchone()
    assert row is not None
    return int(row[0])


async def _updates(conn: Connection) -> dict[str, tuple[int, int]]:
    rows = await conn.execute(
        "SELECT relname, n_tup_upd AS updates, n_tup_hot_upd AS hot FROM pg_stat_user_tables WHERE n_tup_upd > 10"
        " ORDER BY n_tup_upd DESC"
    )
    return {row["relname"]: (row["updates"], row["hot"]) for row in await rows.fetchall()}
