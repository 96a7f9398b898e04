"""Flows with traps in them, each marked in its line, and their neighbours that have none."""

from __future__ import annotations

import re

HEAD = """
from __future__ import annotations
import asyncio, hashlib, random, re, secrets, time, uuid
import datetime as dt
from datetime import UTC, date, datetime
from decimal import Decimal
from typing import Any, TypedDict
import flow, requests_like
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import END, START, StateGraph
from langgraph.types import interrupt
from pydantic import BaseModel
from flow.asking import Request, ask as pause_for
from flow import ask, idempotent
from flow.flows import Flow

class Nothing(BaseModel):
    pass

class State(TypedDict, total=False):
    names: list[str]
    started_at: str
    at: str
    result: Any

@idempotent
async def book(what: str) -> str:
    return what

def route(state):
    return END
"""

TAIL = """
def build():
    graph = StateGraph(State)
    graph.add_node("only", node)
    graph.add_edge(START, "only")
    graph.add_conditional_edges("only", route, [END])
    return graph

FLOW = Flow(name="only", version="1", build=build, input=Nothing)
"""

# The lines that must be found end with the trap's name.
BAD = {
    "two questions in a row": """
async def node(state):
    first = ask(Request(title="one"))
    second = pause_for(Request(title="two"))  #! asks twice
    return {"result": [first.approved, second.approved]}
""",
    "an answer that is true whatever it says": """
def node(state):
    if not interrupt({"title": "Pay 100?"}):  #! always true
        return {"result": "no"}
    return {"result": "yes"}
""",
    "a plain interrupt after a question": """
def node(state):
    if ask(Request(title="one")).approved:
        return {"result": interrupt("two")}  #! asks twice
    return {}
""",
    "a question in a for loop": """
async def node(state):
    for name in state["names"]:
        ask(Request(title=name))  #! asks twice
    return {}
""",
    "a question in a while loop, and in a comprehension": """
def node(state):
    return {"result": [ask(Request(title=name)).approved for name in state["names"]]}  #! asks twice
def route(state):
    return END
""",
    "a second question in a helper of a helper": """
def inner(state):
    return flow.ask(Request(title="two"))  #! asks twice
def outer(state):
    return inner(state)
async def node(state):
    ask(Request(title="one"))
    return {"result": outer(state).approved}
""",
    "a question that is tried again": """
def node(state):
    while True:
        try:
            return {"result": ask(Request(title="one")).approved}  #! asks twice
        except ValueError:
            ask(Request(title="again"))  #! asks twice
            continue
""",
    "an effect before a question": """
async def node(state):
    entry = await book("x")  #! acts before asking
    return {"result": ask(Request(title=entry)).approved}
""",
    "calls to the outside before a question": """
async def node(state, client=None):
    print("asking")  #! acts before asking
    client.post("https://example.com")  #! acts before asking
    await asyncio.sleep(0)  #! acts before asking
    async with client.session():  #! acts before asking
        pass
    with open("x") as file:  #! acts before asking
        file.read()
    return {"result": interrupt("may I?")}
""",
    "an effect in one branch, and in a helper": """
async def prepare(state):
    if state["names"]:
        await book("x")  #! acts before asking
async def node(state):
    await prepare(state)
    return {"result": ask(Request(title="one")).approved}
""",
    "what a loop did before it asks": """
async def node(state):
    for name in state["names"]:
        if name == "ask":
            return {"result": ask(Request(title=name)).approved}
        await book(name)  #! acts before asking
    return {}
""",
    "a question within an effect, and in its helper": """
def sure():
    return interrupt("sure?")  #! asks in an effect
@idempotent
def pay():
    return sure()
@idempotent(key="k")
def refund():
    return ask(Request(title="sure?")).approved  #! asks in an effect
def node(state):
    return {"result": [pay(), refund()]}
""",
    "the clock decides": """
async def node(state):
    if datetime.now(UTC).hour < 12:  #! clock
        return {}
    late = time.time() > 5 if state else None
    while late:  #! clock
        pass
    return {"result": 1 if random.random() < 0.5 else 2}  #! clock
""",
    "the clock decides by a helper, by a name, and in an edge": """
def is_late(state):
    now = dt.datetime.now(dt.UTC)
    return now.isoformat() > state["at"]
def node(state):
    if is_late(state):  #! clock
        return {}
    match date.today().weekday():  #! clock
        case 0:
            return {}
    chosen = secrets.choice(state["names"])
    return {"result": [name for name in state["names"] if name == chosen]}  #! clock
def route(state):
    return END if uuid.uuid4().hex > "8" else END  #! clock #! clock
""",
    "secrets are asked about": """
def node(state):
    ask(Request(
        title="Log in",
        fields={
            "User": state["at"],
            "password": state["at"],  #! secret
            "How": "Bearer abcDEF123456ghiJKL",  #! secret
        },
    ))
    return {}
def other(state):
    return interrupt({"api_key": state["at"]})  #! secret
def route(state):
    other(state)
    return END
""",
    "hash() in a key, a node and a thread id": """
def key_of(what):
    return str(hash(what))  #! hash
@idempotent(key=key_of)
async def first(what): return what
@idempotent(key=lambda what: f"{hash(what)}")  #! hash
async def second(what): return what
async def node(state):
    await first("a")
    await second("b")
    return {"result": hash(state["at"])}  #! hash
def begin_one(client, order):
    client.start(flow="only", thread_id=f"order-{hash(order)}")  #! hash
""",
    "a saver of its own, and a graph that is run by its module": """
def node(state):
    return {"result": interrupt("may I?")}
def build():
    graph = StateGraph(State)
    graph.add_node("only", node)
    graph.add_edge(START, "only")
    return graph.compile(checkpointer=InMemorySaver())  #! checkpointer
def run_it():
    app = build().compile()
    return app.invoke({})  #! checkpointer
FLOW = Flow(name="only", version="1", build=build, input=Nothing)
TAIL = False
""",
    "a graph within, without a saver": """
def node(state):
    return {"result": interrupt("may I?")}
def build():
    inner = StateGraph(State)
    inner.add_node("asks", node)
    inner.add_edge(START, "asks")
    graph = StateGraph(State)
    graph.add_node("only", inner.compile(checkpointer=False))  #! checkpointer
    graph.add_edge(START, "only")
    return graph
FLOW = Flow(name="only", version="1", build=build, input=Nothing)
TAIL = False
""",
    "a state that is not given back": """
class Order(BaseModel):
    name: str
class State(TypedDict, total=False):
    order: Order  #! state
    pair: list[tuple[str, str]]  #! state
    plain: dict[str, Any]
def node(state):
    return {}
""",
}

GOOD = {
    "an answer that is true or false": """
def node(state):
    if not interrupt({"invoice": 7}):
        return {"result": "no"}
    return {"result": "yes"}
""",
    "an answer of ours": """
def node(state):
    return {"result": "yes" if ask(Request(title="Pay 100?")) else "no"}
""",
    "one question, and effects behind it": """
def words(state):
    return ", ".join(sorted({name.strip().lower() for name in state["names"]}))
async def node(state):
    amount = Decimal(state["at"]).quantize(Decimal("0.01"))
    request = Request(title=f"Pay {amount:,}", fields={"To": words(state), "For": state.get("at", "")}, amount=amount)
    known = {**state, "digest": hashlib.sha256(str(amount).encode()).hexdigest(), "ok": re.match("a", "b") is None}
    answer = ask(request)
    if not answer.approved:
        return {"result": known}
    print("approved")
    return {"result": await book("x")}
""",
    "one question on each of two ways": """
async def node(state):
    if state["names"]:
        answer = ask(Request(title="many"))
    else:
        answer = ask(Request(title="none"))
    return {"result": answer.approved}
""",
    "a loop that asks at most once": """
async def node(state):
    for name in state["names"]:
        if name != "ask":
            continue
        if ask(Request(title=name)).approved:
            break
        return {}
    return {}
""",
    "an effect on the way that does not ask": """
async def node(state):
    match state["at"]:
        case "small":
            return {"result": await book("x")}
        case _:
            return {"result": ask(Request(title="one")).approved}
""",
    "an effect that fails instead of asking": """
async def node(state):
    if not state["names"]:
        await book("x")
        raise ValueError("nobody")
    return {"result": ask(Request(title="one")).approved}
""",
    "times that are kept, and decided by the state": """
@idempotent
async def dated(what):
    return datetime.now(UTC).isoformat() if random.random() < 2 else what
async def node(state):
    if datetime.fromisoformat(state["started_at"]).hour < 12:
        return {"at": datetime.now(UTC).isoformat()}
    took = time.monotonic()
    if await dated("x") > state["at"]:
        return {"at": str(time.monotonic() - took)}
    rng = random.Random(7)
    return {"result": "a" if rng.random() < 0.5 else "b"}
""",
    "words that are no secrets": """
def node(state):
    return {"result": ask(Request(title="Token budget", fields={"Tokens": "400", "Password policy": "12"})).approved}
""",
    "a graph within that is run in its node": """
inner = StateGraph(State)
inner.add_node("asks", lambda state: {"result": interrupt("may I?")})
inner.add_edge(START, "asks")
app = inner.compile()
async def node(state):
    return {"result": (await app.ainvoke(state))["result"]}
""",
    "a hash of its own": """
class Order:
    def __hash__(self):
        return hash("order")
def node(state, hash=hashlib.sha256):
    return {"result": hash(b"x").hexdigest()}
""",
    "a function that calls itself": """
def depth(state, left):
    return depth(state, left - 1) if left else ask(Request(title="deep"))
def node(state):
    return {"result": depth(state, 3).approved}
""",
}


def module(body: str) -> str:
    return HEAD + body + ("" if "TAIL = False" in body else TAIL)


def marked(body: str) -> list[tuple[int, str]]:
    lines = enumerate((HEAD + body).splitlines(), start=1)
    return sorted((number, trap) for number, line in lines for trap in set(re.findall(r"#! ([a-z ]+\w)", line)))
