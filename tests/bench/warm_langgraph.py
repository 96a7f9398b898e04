"""The same four nodes on LangGraph and its Postgres saver alone, in a warm process: compiled once, connected once.

DATABASE_URL=… python -m tests.bench.warm_langgraph sync
"""

from __future__ import annotations

import asyncio
import os
import sys
from typing import Any, TypedDict

from langchain_core.runnables import RunnableConfig
from langgraph.checkpoint.postgres.aio import AsyncPostgresSaver
from langgraph.graph import END, START, StateGraph
from langgraph.types import Command, interrupt
from psycopg import AsyncConnection
from psycopg.rows import dict_row

from tests.bench.warm import answer


class Claim(TypedDict, total=False):
    thread: str
    amount: str
    currency: str
    payee: str
    approved: bool
    payment: str


async def _main(durability: Any) -> None:
    conn = await AsyncConnection.connect(
        os.environ["DATABASE_URL"], autocommit=True, prepare_threshold=0, row_factory=dict_row
    )
    saver = AsyncPostgresSaver(conn)
    await saver.setup()
    await conn.execute(
        "CREATE TABLE IF NOT EXISTS raw_payments (thread_id text PRIMARY KEY, amount numeric NOT NULL,"
        " paid_at timestamptz NOT NULL DEFAULT clock_timestamp())"
    )

    async def intake(state: Claim) -> Claim:
        return {"amount": state["amount"].strip()}

    async def decide(state: Claim) -> Claim:
        return {"approved": float(state["amount"]) <= 100}

    async def approve(state: Claim) -> Claim:
        return {"approved": bool(interrupt({"question": "approve?", "amount": state["amount"]}))}

    async def pay(state: Claim) -> Claim:
        async with saver.lock:
            await conn.execute(
                "INSERT INTO raw_payments (thread_id, amount) VALUES (%s, %s) ON CONFLICT (thread_id) DO NOTHING",
                (state["thread"], state["amount"]),
            )
        return {"payment": f"pay-{state['thread']}"}

    graph = StateGraph(Claim)
    graph.add_node("intake", intake)
    graph.add_node("decide", decide)
    graph.add_node("approve", approve)
    graph.add_node("pay", pay)
    graph.add_edge(START, "intake")
    graph.add_edge("intake", "decide")
    graph.add_conditional_edges("decide", lambda state: "pay" if state["approved"] else "approve", ["pay", "approve"])
    graph.add_edge("approve", "pay")
    graph.add_edge("pay", END)
    compiled = graph.compile(checkpointer=saver)

    def config(thread_id: str) -> RunnableConfig:
        return {"configurable": {"thread_id": thread_id}}

    async def start(thread_id: str) -> None:
        begun: Claim = {"thread": thread_id, "amount": "250.00", "currency": "USD", "payee": "ACME"}
        result = await compiled.ainvoke(begun, config(thread_id), durability=durability)
        assert "__interrupt__" in result

    async def resume(thread_id: str) -> None:
        result = await compiled.ainvoke(Command(resume=True), config(thread_id), durability=durability)
        assert result["payment"]

    await answer(start=start, resume=resume)


if __name__ == "__main__":
    asyncio.run(_main(sys.argv[1]))
