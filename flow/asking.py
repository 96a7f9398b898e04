"""`ask`: a flow's own way to ask a person, with a typed answer.

    async def review(state: State) -> State:
        answer = ask(Request(title="Refund", fields={"Order": state["order"]}, amount=state["amount"], currency="EUR"))
        return {"approved": answer.approved, "reason": answer.reason}

A node asks once, and does nothing before it asks: at the answer the node runs again from its top.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextvars import ContextVar
from dataclasses import asdict, dataclass, field
from decimal import Decimal
from typing import Any

from langgraph.config import get_stream_writer
from langgraph.runtime import get_runtime
from langgraph.types import interrupt

from flow.effects import effect_under_way
from flow.errors import AskedInEffect, AskedTwice, NotApproved
from flow.questions import stored_question
from flow.text import digest


@dataclass(frozen=True, kw_only=True)
class Request:
    """What to ask: `fields` are shown as label and text, `amount` is exact, in units of `currency` (ISO 4217).

    `tier` names who is asked, in the policy's words. With `options` an approval chooses one of these names.
    """

    title: str
    fields: Mapping[str, object] = field(default_factory=dict)
    amount: Decimal | str | None = None
    currency: str | None = None
    tier: str = "approval"
    options: tuple[str, ...] = ()

    def as_value(self) -> dict[str, Any]:
        """The interrupt's value: plain JSON."""
        value = {name: each for name, each in asdict(self).items() if each not in (None, (), {})}
        value["fields"] = {name: str(each) for name, each in self.fields.items()}
        if self.amount is not None:
            value["amount"] = str(self.amount)
        return value | {"options": list(self.options)}


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What became of it. `status` is approved, rejected, expired, withdrawn or superseded.

    `by` are the keys of those who decided, `option` the chosen one of the request's options.
    """

    approved: bool
    status: str
    by: tuple[str, ...]
    reason: str
    option: str | None

    def __bool__(self) -> bool:
        """`if ask(…)` means what it says."""
        return self.approved


def ask(request: Request) -> Answer:
    """Pause until people have decided.

    Raises Unaskable at once for what nobody could be shown, AskedTwice in a node that has asked before, AskedInEffect
    inside of an @idempotent function, NotApproved if the node now asks something else than what was answered.
    """
    if (effect := effect_under_way()) is not None:
        raise AskedInEffect(effect)
    info = get_runtime().execution_info
    assert info is not None
    run = (info.checkpoint_ns, info.task_id, info.node_attempt)
    if _asked_in.get() == run:
        raise AskedTwice
    value = request.as_value()
    asked = digest(stored_question(value))
    _asked_in.set(run)
    said = interrupt(value)
    # Strictly: a truthy answer of any other shape is not an approval.
    if not isinstance(said, dict):
        return Answer(approved=False, status="rejected", by=(), reason="the answer was not understood", option=None)
    if said.get("asked") != asked:
        raise NotApproved("the node asks something else than what people were shown: nothing goes on")
    return Answer(
        approved=said.get("approved") is True,
        status=str(said.get("status")),
        by=tuple(said.get("by") or ()),
        reason=str(said.get("reason") or ""),
        option=said.get("option"),
    )


def progress(done: int, total: int) -> None:
    """Say how far a long flow is: `show`, the pages and a waiting command line have it within half a second."""
    if not (0 <= done <= total < 1 << 63):
        raise ValueError(f"{done} of {total} is no progress")
    get_stream_writer()({PROGRESS: [int(done), int(total)]})


# The run of a node that has asked.
_asked_in: ContextVar[tuple[object, ...] | None] = ContextVar("asked_in", default=None)

# How it travels: on LangGraph's own `custom` stream.
PROGRESS = "claim_flow_progress"
