"""Threads of the flows of flow/patterns: begun, driven here or in a process of its own, struck, decided and healed."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import psycopg

from flow import threads
from flow.approvals import decide
from flow.database import Connection, connect
from flow.drive import Outcome, drive
from flow.flows import Flow, Flows
from flow.model import Verdict
from flow.patterns import FLOWS
from tests.people import ALICE, ANN, POLICY
from tests.pg_proxy import FaultingProxy, Trap
from tests.processes import end_of, start_process
from tests.rows import all_rows, value

PATTERNS = Flows(FLOWS)


def pattern(name: str) -> Flow:
    return next(flow for flow in FLOWS if flow.name == name)


async def start(conn: Connection, flow: str, thread_id: str, **given: Any) -> None:
    """A thread that is due, as every door starts one."""
    found = pattern(flow)
    found.checked(given)
    await threads.insert_thread(
        conn, thread_id=thread_id, flow=found.name, flow_version=found.version, input=given, requested_by=ANN.key
    )


async def drive_here(conn: Connection, thread_id: str) -> Outcome:
    return await drive(conn, thread_id, flows=PATTERNS, policy=POLICY)


def drive_in_a_process(url: str, thread_id: str) -> None:
    async def one() -> None:
        async with await connect(url, "drive") as conn:
            await drive_here(conn, thread_id)

    # The process was forked from one that an earlier test may have begun, with that test's environment.
    os.environ["WEBHOOK_ALLOW_PRIVATE"] = "true"
    asyncio.run(one())


async def driven_in_a_process(url: str, thread_id: str) -> int:
    """Its exit code, or the negative signal that killed it."""
    process = start_process(drive_in_a_process, url, thread_id)
    try:
        return await end_of(process)
    finally:
        process.kill()


async def pending_of(conn: Connection, thread_id: str) -> list[dict[str, Any]]:
    return await all_rows(
        conn, "SELECT interrupt_id, tier FROM approvals WHERE thread_id = %s AND status = 'pending'", thread_id
    )


async def answer(conn: Connection, thread_id: str, verdict: Verdict) -> None:
    """Alice decides the one thing that the thread waits for."""
    [pending] = await pending_of(conn, thread_id)
    await decide(conn, pending["interrupt_id"], ALICE, verdict)


async def leases_are_over(conn: Connection) -> None:
    """As a minute after a kill."""
    await conn.execute("UPDATE effects SET lease_until = clock_timestamp() WHERE status = 'started'")


async def live(conn: Connection, thread_id: str, verdict: Verdict) -> Any:
    """Everything that is left of a thread's life, from wherever it stands: its result."""
    await leases_are_over(conn)
    while await drive_here(conn, thread_id) == "waiting":
        # The kill may have come between the answer and what follows from it.
        await answer(conn, thread_id, verdict)
    return await result_of(conn, thread_id)


async def result_of(conn: Connection, thread_id: str) -> Any:
    assert await value(conn, "SELECT status FROM threads WHERE thread_id = %s", thread_id) == "done"
    return await value(conn, "SELECT result FROM threads WHERE thread_id = %s", thread_id)


async def effects_of(conn: Connection, thread_id: str) -> list[dict[str, Any]]:
    return await all_rows(
        conn, "SELECT name, status, attempt FROM effects WHERE thread_id = %s ORDER BY started_at", thread_id
    )


# Lives of threads, and faults in them


@dataclass(frozen=True, kw_only=True)
class Life:
    """A thread from its start to its end: what it begins with, what people say to it, and how many drives that takes.

    `name` is the beginning of its threads' ids.
    """

    name: str
    flow: str
    given: Mapping[str, Any]
    drives: int
    verdict: Verdict

    async def due(self, conn: Connection, thread_id: str, number: int, **given: Any) -> None:
        """A new thread that is due for its drive of this number, from 0."""
        await start(conn, self.flow, thread_id, **self.given, **given)
        for _ in range(number):
            assert await drive_here(conn, thread_id) == "waiting"
            await answer(conn, thread_id, self.verdict)


async def asked_undisturbed(proxy: FaultingProxy, thread_id: str) -> list[str]:
    """What a drive of this thread asks, a round trip each."""
    proxy.lay(thread_id)
    async with await connect(proxy.url, "drive") as conn:
        await drive_here(conn, thread_id)
    [asked] = proxy.asked[thread_id, "drive"]
    return asked


async def cut_off(proxy: FaultingProxy, thread_id: str, trap: Trap) -> None:
    """Drive it here until the trap takes the connection away."""
    proxy.lay(thread_id, trap)
    async with await connect(proxy.url, "drive") as victim:
        # It hears nothing of a connection that is lost when there is nothing left to do.
        with contextlib.suppress(psycopg.OperationalError):
            await drive_here(victim, thread_id)
        assert victim.closed
