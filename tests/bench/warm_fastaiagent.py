# /// script
# requires-python = ">=3.11"
# dependencies = ["fastaiagent[postgres]==1.94.0", "psycopg[binary]"]
# ///
"""The same four nodes on fastaiagent and its Postgres checkpointer, in a warm process of an environment of its own.

    DATABASE_URL=… uv run --no-project --script tests/bench/warm_fastaiagent.py

It cannot be one of this project's dependencies: it wants an older `rich`.
"""

from __future__ import annotations

import asyncio
import os
from typing import Any

from fastaiagent import Chain, Resume, interrupt
from fastaiagent.checkpointers import PostgresCheckpointer
from fastaiagent.tool import FunctionTool
from psycopg_pool import ConnectionPool

from tests.bench.warm import answer


async def _main() -> None:
    url = os.environ["DATABASE_URL"]
    pool = ConnectionPool(url, min_size=1, open=True, kwargs={"autocommit": True})
    with pool.connection() as conn:
        conn.execute(
            "CREATE TABLE IF NOT EXISTS fast_payments (thread_id text PRIMARY KEY, amount numeric NOT NULL,"
            " paid_at timestamptz NOT NULL DEFAULT clock_timestamp())"
        )

    def intake(amount: str) -> dict[str, Any]:
        return {"amount": amount.strip()}

    def decide(amount: str) -> dict[str, Any]:
        return {"approved": float(amount) <= 100}

    def approve(amount: str) -> dict[str, Any]:
        return {"approved": interrupt("approve?", {"amount": amount}).approved}

    def pay(thread: str, amount: str) -> dict[str, Any]:
        with pool.connection() as conn:
            conn.execute(
                "INSERT INTO fast_payments (thread_id, amount) VALUES (%s, %s) ON CONFLICT (thread_id) DO NOTHING",
                (thread, amount),
            )
        return {"payment": f"pay-{thread}"}

    chain = Chain("claim", checkpointer=PostgresCheckpointer(url))
    amount = {"amount": "{{state.amount}}"}
    for node, mapping in ((intake, amount), (decide, amount), (approve, amount)):
        chain.add_node(node.__name__, tool=FunctionTool(name=node.__name__, fn=node), input_mapping=mapping)
    chain.add_node("pay", tool=FunctionTool(name="pay", fn=pay), input_mapping={"thread": "{{state.thread}}", **amount})
    chain.connect("intake", "decide")
    chain.connect("decide", "approve")
    chain.connect("approve", "pay")

    async def start(thread_id: str) -> None:
        begun = {"thread": thread_id, "amount": "250.00", "currency": "USD", "payee": "ACME"}
        result = await chain.aexecute(begun, execution_id=thread_id)
        assert result.status == "paused", result

    async def resume(thread_id: str) -> None:
        result = await chain.resume(thread_id, resume_value=Resume(approved=True))
        assert result.status == "completed", result

    await answer(start=start, resume=resume)


if __name__ == "__main__":
    asyncio.run(_main())
