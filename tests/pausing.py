"""Threads that were paused by one release, kept as files, for those that come after it.

uv run python -m tests.pausing NAME      # writes tests/paused/NAME.json, by the release that runs it
"""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import Any, TypedDict

from langgraph.graph import END, START, StateGraph
from psycopg import sql
from pydantic import BaseModel

from flow import Flow, Request, ask
from flow.database import Connection
from flow.drive import drive
from flow.flows import Flows
from flow.policy import Policy
from flow.threads import insert_thread

FOLDER = Path(__file__).with_name("paused")

# What a migration gives to rows from before it, where a column has no default.
_SINCE = {"approvals": {"rank": 0}}

_TABLES = ("threads", "approvals", "checkpoints", "checkpoint_blobs", "checkpoint_writes")


class Letter(BaseModel):
    to: str


class LetterState(TypedDict, total=False):
    to: str
    approved: bool
    result: dict[str, Any]


def review(state: LetterState) -> LetterState:
    return {"approved": ask(Request(title="Send a letter", fields={"To": state["to"]})).approved}


def send(state: LetterState) -> LetterState:
    return {"result": {"sent": state["approved"], "to": state["to"]}}


def letters(*, asks: str = "review", sends: str = "send", sender: Any = send, state: Any = LetterState) -> Flow:
    """A flow that asks, and then sends; other releases of it name its nodes otherwise."""

    def build() -> StateGraph[Any, Any, Any, Any]:
        graph = StateGraph(state)
        graph.add_node(asks, review)
        graph.add_node(sends, sender)
        graph.add_edge(START, asks)
        graph.add_edge(asks, sends)
        graph.add_edge(sends, END)
        return graph

    return Flow(name="letters", version="1", build=build, input=Letter)


async def pause(conn: Connection, thread_id: str, flow: Flow, given: dict[str, Any], policy: Policy) -> None:
    """Start a thread of this flow, and drive it to its pause."""
    await insert_thread(
        conn,
        thread_id=thread_id,
        flow=flow.name,
        flow_version=flow.version,
        input=given,
        requested_by="cli:ann",
    )
    assert await drive(conn, thread_id, flows=Flows([flow]), policy=policy) == "waiting"


async def rows_of(conn: Connection, thread_id: str) -> dict[str, list[Any]]:
    """Every row of the thread that its next drive reads, as Postgres writes it in JSON."""
    kept = {}
    for table in _TABLES:
        query = sql.SQL("SELECT row_to_json(t) AS row FROM {} t WHERE thread_id = %s").format(sql.Identifier(table))
        kept[table] = [each["row"] for each in await (await conn.execute(query, (thread_id,))).fetchall()]
    return kept


async def load(conn: Connection, name: str) -> str:
    """Put a kept thread into this database; its interrupt id."""
    kept: dict[str, list[dict[str, Any]]] = json.loads((FOLDER / f"{name}.json").read_text())
    for table in _TABLES:
        for kept_row in kept[table]:
            row = _SINCE.get(table, {}) | kept_row
            columns = sql.SQL(", ").join(map(sql.Identifier, row))
            await conn.execute(
                sql.SQL("INSERT INTO {table} ({columns}) SELECT {columns} FROM json_populate_record(NULL::{table}, %s)")
                .format(table=sql.Identifier(table), columns=columns),
                (json.dumps(row),),
            )  # fmt: skip
    return str(kept["approvals"][0]["interrupt_id"])


async def _make(name: str) -> None:
    import tempfile

    from flow.claims import FLOW as CLAIMS
    from flow.database import connect, ensure_schema
    from flow.drive import ensure_checkpoint_tables
    from flow.embedded import embedded_url, stop_embedded
    from tests.people import POLICY

    made = {
        "letters": (letters(), {"to": "ACME"}),
        "claims": (CLAIMS, {"amount": "250.00", "currency": "USD", "payee": "ACME", "note": ""}),
    }
    flow, given = made[name.split("-", maxsplit=1)[0]]
    with tempfile.TemporaryDirectory() as folder:
        url = embedded_url(Path(folder))
        try:
            async with await connect(url, "drive") as conn:
                await ensure_schema(url, conn)
                await ensure_checkpoint_tables(url, conn)
                await pause(conn, "t1", flow, given, POLICY)
                kept = await rows_of(conn, "t1")
        finally:
            stop_embedded(Path(folder))
    (FOLDER / f"{name}.json").write_text(json.dumps(kept, indent=1) + "\n")


if __name__ == "__main__":
    asyncio.run(_make(sys.argv[1]))
