"""What flows ask, as an interrupt's value, and the shortest way to such a question that waits for people."""

from __future__ import annotations

from typing import Any

from flow import threads
from flow.approvals import request_approval
from flow.database import Connection
from flow.policy import Tier
from flow.questions import question_hash, stored_question
from tests.people import ANN, ONE_OF_THREE

REFUND = {
    "title": "Refund",
    "fields": {"Order": "A-17", "Customer": "ACME", "Why": "The chair came with three legs.\nIt was to have four."},
    "amount": "1250",
    "currency": "EUR",
}
DINNER = {"title": "Dinner", "options": ["pay now", "pay later"]}
MAIL = {"to": "bob@example.com", "text": "Hello <Bob> & all"}


def tool_call(*allowed: str, name: str = "send_email", args: dict[str, Any] | None = None) -> dict[str, Any]:
    """What LangChain's human-in-the-loop middleware asks about one call of a tool."""
    return tool_calls((name, args or MAIL, allowed or ("approve", "edit", "reject", "respond")))


def tool_calls(*calls: tuple[str, dict[str, Any], tuple[str, ...]]) -> dict[str, Any]:
    return {
        "action_requests": [{"name": name, "args": args, "description": f"Runs {name}."} for name, args, _ in calls],
        "review_configs": [{"action_name": name, "allowed_decisions": list(allowed)} for name, _, allowed in calls],
    }


def human_interrupt(*allowed: str, name: str = "send_email", args: dict[str, Any] | None = None) -> dict[str, Any]:
    """What LangChain's Agent Inbox is asked; `allowed` are of accept, edit, respond and ignore."""
    names = ("accept", "edit", "respond", "ignore")
    return {
        "action_request": {"action": name, "args": args or MAIL},
        "config": {f"allow_{each}": each in (allowed or names) for each in names},
        "description": "A mail to a customer",
    }


async def put(
    conn: Connection, asked: Any, thread_id: str = "q1", *, tier: Tier = ONE_OF_THREE, requested_by: str = ANN.key
) -> str:
    """The interrupt id of a pending question of a waiting thread of the flow `desk`, without LangGraph."""
    thread = await threads.insert_thread(
        conn, thread_id=thread_id, flow="desk", flow_version="1", input={}, requested_by=requested_by
    )
    interrupt_id = thread_id.encode().hex().rjust(32, "0")[-32:]
    stored = stored_question(asked)
    async with conn.transaction():
        await request_approval(
            conn,
            thread,
            interrupt_id=interrupt_id,
            tier=tier,
            request=stored,
            request_hash=question_hash(thread, interrupt_id, tier.name, stored),
        )
        assert await threads.leave(conn, thread, status="waiting")
    return interrupt_id
