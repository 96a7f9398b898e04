"""What the language model said of claims: the rows, and how they are shown. `flow.assess` asks for it."""

from __future__ import annotations

from typing import Any

from flow.database import Connection
from flow.model import Advice


async def advice_of(conn: Connection, thread_ids: list[str]) -> dict[str, Advice]:
    """What the model said of those of these threads that it was asked about, by thread id."""
    rows = await conn.execute(
        "SELECT thread_id, status, summary, risks, needs_review, reason, model, prompt_tokens, completion_tokens,"
        " latency_ms FROM advice WHERE thread_id = ANY(%s)",
        (thread_ids,),
    )
    return {row["thread_id"]: _advice_from(row) for row in await rows.fetchall()}


def advice_in_words(advice: Advice) -> str:
    """The advice in one line; whoever shows it must say that it is a model's."""
    if advice.status != "given":
        return f"none ({advice.reason or 'still thinking'})"
    risks = f" Risks: {'; '.join(advice.risks)}." if advice.risks else " No risks found."
    return f"{advice.summary}{risks}" + (" A person should look at it." if advice.needs_review else "")


def _advice_from(row: dict[str, Any]) -> Advice:
    return Advice(**row | {"risks": tuple(row["risks"])})
