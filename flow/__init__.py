"""The durable part: threads, approvals, payments, and the flows themselves. It knows neither Slack nor HTTP.

What a flow of one's own needs can be had from here: `from flow import Flow, Request, ask, idempotent`.
"""

import importlib
import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from flow.asking import Answer as Answer
    from flow.asking import Request as Request
    from flow.asking import ask as ask
    from flow.asking import progress as progress
    from flow.effects import idempotency_key as idempotency_key
    from flow.effects import idempotent as idempotent
    from flow.flows import Flow as Flow

# Before LangGraph is imported anywhere: a variable that happens to be set would send every claim to LangSmith, and
# start threads that no fork survives.
for _name in ("LANGSMITH_TRACING", "LANGSMITH_TRACING_V2", "LANGCHAIN_TRACING", "LANGCHAIN_TRACING_V2"):
    os.environ[_name] = "false"

_HOMES = {
    "Answer": "flow.asking",
    "Flow": "flow.flows",
    "Request": "flow.asking",
    "ask": "flow.asking",
    "idempotency_key": "flow.effects",
    "idempotent": "flow.effects",
    "progress": "flow.asking",
}


def __getattr__(name: str) -> Any:
    """Imported only when it is asked for: LangGraph costs a second."""
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'flow' has no attribute {name!r}")
