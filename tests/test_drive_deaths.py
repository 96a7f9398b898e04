"""Whatever dies in a drive, wherever: the next one finishes it, and money moves once.

Sessions ended by the server, and a process killed with SIGKILL. `test_boundaries_drive.py` visits every round trip.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import LiteralString

import psycopg
import pytest

from flow import threads
from flow.approvals import decide
from flow.claims import FLOW
from flow.database import Connection, connect
from flow.drive import drive
from flow.flows import Flows
from flow.model import Claim
from flow.policy import OneTier, Tier
from tests.people import ALICE, POLICY, YES, start_claim
from tests.processes import start_process
from tests.rows import all_rows, break_table, mend_table, one_row, until, until_blocked, value


@dataclass(frozen=True, kw_only=True)
class LethalPolicy(OneTier):
    """Strikes whenever it is asked, which is between two steps of the flow."""

    strike: Callable[[], None]

    def tiers_of(self, claim: Claim) -> tuple[Tier, ...]:
        self.strike()
        return super().tiers_of(claim)


async def live(conn: Connection, flows: Flows, thread_id: str) -> str:
    """Everything that is left of a claim's life, from wherever it stands: asked, approved by Alice, paid."""
    while (outcome := await drive(conn, thread_id, flows=flows, policy=POLICY)) == "waiting":
        (pending,) = await all_rows(
            conn, "SELECT interrupt_id FROM approvals WHERE thread_id = %s AND status = 'pending'", thread_id
        )
        await decide(conn, pending["interrupt_id"], ALICE, YES)
    return outcome


async def assert_lived_once(conn: Connection, thread_id: str) -> None:
    """One payment, one approval, one decision, one card, one reply; nothing left to do."""
    row = await one_row(
        conn,
        "SELECT status, due_at, attempts,"
        " (SELECT array_agg(amount::text) FROM payments p WHERE p.thread_id = t.thread_id) AS payments,"
        " (SELECT array_agg(status) FROM approvals a WHERE a.thread_id = t.thread_id) AS approvals,"
        " (SELECT array_agg(person) FROM decisions JOIN approvals a USING (interrupt_id)"
        "  WHERE a.thread_id = t.thread_id) AS decisions,"
        " (SELECT array_agg(kind ORDER BY id) FROM notices n WHERE n.thread_id = t.thread_id) AS notices"
        " FROM threads t WHERE thread_id = %s",
        thread_id,
    )
    assert row == {
        "status": "paid",
        "due_at": None,
        "attempts": 0,
        "payments": ["250.00"],
        "approvals": ["approved"],
        "decisions": [ALICE.key],
        "notices": ["card", "reply"],
    }, thread_id


@pytest.mark.parametrize(
    ("table", "event"),
    [
        ("checkpoints", "INSERT"),
        ("checkpoint_writes", "INSERT"),
        ("checkpoint_blobs", "INSERT"),
        ("threads", "UPDATE"),
        ("approvals", "INSERT"),
        ("approvals", "UPDATE"),
        ("notices", "INSERT"),
        ("notices", "UPDATE"),
        ("decisions", "INSERT"),
        ("payments", "INSERT"),
    ],
)
async def test_a_session_that_the_server_ends_in_any_write_pays_once(
    database_url: str, conn: Connection, flows: Flows, table: str, event: LiteralString
) -> None:
    await start_claim(conn)
    await break_table(conn, table, event, "PERFORM pg_terminate_backend(pg_backend_pid()), pg_sleep(60)")
    async with await connect(database_url, "drive") as victim:
        with pytest.raises(psycopg.OperationalError):
            await live(victim, flows, "t1")
        assert victim.closed
    assert await all_rows(conn, "SELECT * FROM payments") == []
    await mend_table(conn)
    assert await live(conn, flows, "t1") == "over"
    await assert_lived_once(conn, "t1")


async def test_a_session_that_the_server_ends_between_two_steps_is_taken_up(
    database_url: str, conn: Connection, flows: Flows, admin: psycopg.Connection
) -> None:
    await start_claim(conn)
    async with await connect(database_url, "drive") as victim:
        pid = victim.info.backend_pid

        def strike() -> None:
            admin.execute("SELECT pg_terminate_backend(%s, 5000)", (pid,))

        policy = LethalPolicy(approvers=POLICY.approvers, limits=POLICY.limits, strike=strike)
        with pytest.raises(psycopg.OperationalError):
            await drive(victim, "t1", flows=flows, policy=policy)
    row = await one_row(conn, "SELECT status, attempts, due_at IS NOT NULL AS due, reason FROM threads")
    assert row == {"status": "running", "attempts": 1, "due": True, "reason": None}
    assert await live(conn, flows, "t1") == "over"
    await assert_lived_once(conn, "t1")


def drive_in_a_process(url: str, thread_id: str) -> None:
    async def one() -> None:
        async with await connect(url, "drive") as conn:
            await drive(conn, thread_id, flows=Flows([FLOW]), policy=POLICY)

    asyncio.run(one())


async def test_a_process_killed_while_it_pays_frees_the_thread_and_pays_once(
    database_url: str, conn: Connection, flows: Flows
) -> None:
    await start_claim(conn, amount="250")
    assert await drive(conn, "t1", flows=flows, policy=POLICY) == "waiting"
    await decide(conn, await value(conn, "SELECT interrupt_id FROM approvals"), ALICE, YES)
    async with await connect(database_url, "drive") as gate:
        await gate.execute("BEGIN")
        await gate.execute("LOCK TABLE payments IN SHARE ROW EXCLUSIVE MODE")
        process = start_process(drive_in_a_process, database_url, "t1")
        pid = await until(lambda: _driver(conn))
        assert pid is not None
        await until_blocked(conn, pid, by=gate.info.backend_pid)
        assert not await threads.try_lock(conn, "t1")
        process.kill()
        process.join(10)

        async def free() -> bool:
            return await threads.try_lock(conn, "t1")

        # Its statement still waits for the gate, and yet its lock is free: the server looks after its client.
        await until(free, within_s=5)
        await threads.unlock(conn, "t1")
        await gate.execute("ROLLBACK")
    assert await all_rows(conn, "SELECT * FROM payments") == []
    assert await live(conn, flows, "t1") == "over"
    await assert_lived_once(conn, "t1")


async def _driver(conn: Connection) -> int | None:
    """The backend of whoever drives t1 elsewhere."""
    pid: int | None = await value(
        conn,
        "SELECT driver_pid FROM threads WHERE driver_pid <> %s UNION ALL SELECT NULL LIMIT 1",
        conn.info.backend_pid,
    )
    return pid
