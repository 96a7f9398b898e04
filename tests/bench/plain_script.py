"""The plain script to measure against: what a reader of the tutorial writes in an afternoon.

    DATABASE_URL=… python plain_script.py start --thread t1 --amount 250
    DATABASE_URL=… python plain_script.py resume --thread t1 --approve

Every command is a new interpreter that imports everything, connects, runs setup() and compiles the graph.
"""

import argparse
import os
import sys
from typing import Any, TypedDict

import openai  # noqa: F401  (the tutorial's script imports it at the top)
import psycopg
from langchain_core.runnables import RunnableConfig
from langgraph.checkpoint.postgres import PostgresSaver
from langgraph.graph import END, START, StateGraph
from langgraph.graph.state import CompiledStateGraph
from langgraph.types import Command, interrupt

DSN = os.environ["DATABASE_URL"]


class Claim(TypedDict, total=False):
    thread: str
    amount: float
    approved: bool
    payment: str


def intake(state: Claim) -> Claim:
    return {"amount": float(state["amount"])}


def decide(state: Claim) -> Claim:
    return {"approved": state["amount"] <= 100}


def approve(state: Claim) -> Claim:
    return {"approved": bool(interrupt({"question": "approve?", "amount": state["amount"]}))}


def pay(state: Claim) -> Claim:
    if not state["approved"]:
        return {"payment": "rejected"}
    with psycopg.connect(DSN) as conn:
        conn.execute(
            "INSERT INTO plain_payments (thread_id, amount) VALUES (%s, %s) ON CONFLICT (thread_id) DO NOTHING",
            (state["thread"], state["amount"]),
        )
    return {"payment": "pay-" + state["thread"]}


def build(saver: PostgresSaver) -> CompiledStateGraph[Claim, None, Claim, Claim]:
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
    return graph.compile(checkpointer=saver)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("command", choices=["start", "resume"])
    parser.add_argument("--thread", required=True)
    parser.add_argument("--amount", type=float)
    parser.add_argument("--approve", action="store_true")
    args = parser.parse_args()
    with psycopg.connect(DSN) as conn:
        conn.execute("CREATE TABLE IF NOT EXISTS plain_payments (thread_id text PRIMARY KEY, amount numeric)")
    with PostgresSaver.from_conn_string(DSN) as saver:
        saver.setup()
        graph = build(saver)
        config: RunnableConfig = {"configurable": {"thread_id": args.thread}}
        result: dict[str, Any]
        if args.command == "start":
            result = graph.invoke({"thread": args.thread, "amount": args.amount}, config)
        else:
            result = graph.invoke(Command(resume=args.approve), config)
    sys.stdout.write("waiting for approval\n" if "__interrupt__" in result else f"{result}\n")


if __name__ == "__main__":
    main()
