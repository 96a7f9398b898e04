"""Fan-out: many webhooks side by side, in a pool of threads; those that failed, and no other, are tried again.

uv run claim_flow.py start --flow fan-out --thread f1 --input '{"urls": ["https://example.com/a"]}'

Each call has a row of its own: a run that follows a failed or a killed one gets the outcomes that are there, and makes
the calls that have none.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypedDict
from urllib.parse import urlsplit

from langgraph.graph import END, START, StateGraph
from pydantic import BaseModel, Field, HttpUrl

from flow.effects import idempotency_key, idempotent
from flow.flows import Flow
from flow.outside import client

# A hundred calls that hang take less than a drive may (DRIVE_TIMEOUT).
AT_ONCE = 20


class FanOut(BaseModel):
    urls: list[HttpUrl] = Field(min_length=1, max_length=100)
    text: str = "done"


class State(TypedDict, total=False):
    urls: list[str]
    text: str
    result: dict[str, Any]


class NotDelivered(Exception):
    """Some calls failed; the next try makes only these."""


def deliver(state: State) -> State:
    with ThreadPoolExecutor(AT_ONCE) as pool:
        calls = [(url, pool.submit(post, url, state["text"])) for url in state["urls"]]
    # The pool has ended, so each was tried.
    failed = [f"{urlsplit(url).hostname}: {error}" for url, call in calls if (error := call.exception())]
    if failed:
        raise NotDelivered(f"{len(failed)} of {len(calls)} failed, {failed[0]}")
    return {"result": {"delivered": len(calls)}}


@idempotent
def post(url: str, text: str) -> int:
    with client() as http:
        answer = http.post(url, json={"text": text}, headers={"Idempotency-Key": idempotency_key()})
    if not answer.is_success:
        # Not httpx's own error: that holds the whole URL, which may be a secret, and this is shown.
        raise NotDelivered(f"it answered {answer.status_code}")
    return answer.status_code


def build() -> StateGraph[State, Any, Any, Any]:
    graph = StateGraph(State)
    graph.add_node("deliver", deliver)
    graph.add_edge(START, "deliver")
    graph.add_edge("deliver", END)
    return graph


FLOW = Flow(name="fan-out", version="1", build=build, input=FanOut)
