"""What the tests of many drives share: holding some up, waiting for all, and what must be true afterwards."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

from flow.approvals import decide
from flow.database import Connection, connect, ring
from tests.people import ANN, YES, start_claim
from tests.pg_proxy import FaultingProxy
from tests.rows import all_rows, until, value

# For a hundred deaths on a machine that has other things to do; pytest's own patience ends sooner for most tests.
SETTLING_S = 240.0


async def approve_all(conn: Connection, thread_ids: str = "%") -> None:
    """Approve what waits in the threads of this LIKE pattern."""
    pending = "SELECT interrupt_id FROM approvals WHERE status = 'pending' AND thread_id LIKE %s"
    for row in await all_rows(conn, pending, thread_ids):
        await decide(conn, row["interrupt_id"], ANN, YES)


async def until_settled(conn: Connection) -> None:
    """Wait until no thread wants to be driven: each waits for a person or is over."""

    async def settled() -> bool:
        return bool(await value(conn, "SELECT count(*) = 0 FROM threads WHERE due_at IS NOT NULL"))

    await until(settled, within_s=SETTLING_S)


@asynccontextmanager
async def held_at_payment(
    conn: Connection, url: str, thread_ids: Sequence[str]
) -> AsyncIterator[Callable[[], Awaitable[None]]]:
    """New small claims are due, and whoever drives them stays in the midst of their payments until the end of the
    `async with`. Gives what to await until all of them are there.

    It touches no other payment: another session has inserted the same ones and will take them back, and an INSERT that
    would be the second of its key waits for the first.
    """
    async with await connect(url, "listen") as holder, holder.transaction(force_rollback=True):
        for thread_id in thread_ids:
            async with conn.transaction():
                await start_claim(conn, thread_id, "20")
                await conn.execute("UPDATE threads SET due_at = NULL WHERE thread_id = %s", (thread_id,))
            await holder.execute(
                "INSERT INTO payments (thread_id, amount, currency, payee, provider, reference, status, paid_at)"
                " VALUES (%s, 20, 'USD', '', 'ledger', %s, 'paid', clock_timestamp())",
                (thread_id, thread_id),
            )
        async with conn.transaction():
            await conn.execute(
                "UPDATE threads SET due_at = clock_timestamp() WHERE thread_id = ANY(%s)", (list(thread_ids),)
            )
            await ring(conn)

        async def all_are_held() -> bool:
            held = "SELECT count(*) FROM pg_stat_activity WHERE %s = ANY(pg_blocking_pids(pid))"
            return bool(await value(conn, held, holder.info.backend_pid) == len(thread_ids))

        async def until_held() -> None:
            await until(all_are_held, within_s=60)

        yield until_held


async def drives_undisturbed(proxy: FaultingProxy, conn: Connection) -> tuple[list[str], list[str], list[str]]:
    """What drives ask: for a small claim, for a large one until its request, and for that after the approval.

    Of stand-bys that have rehearsed, as all do but those that are made while others are waited for: these prepare each
    statement in a round trip of its own, and a trap there would catch nobody else.
    """
    while True:
        small, asking, resumed = await _probed(proxy, conn, f"probe-{len(proxy.asked)}")
        if not any(statement.startswith("PREPARE ") for drive in (small, asking, resumed) for statement in drive):
            return small, asking, resumed


async def _probed(proxy: FaultingProxy, conn: Connection, name: str) -> tuple[list[str], list[str], list[str]]:
    for thread_id, amount in ((f"{name}-small", "20"), (f"{name}-large", "250")):
        proxy.lay(thread_id)
        await start_claim(conn, thread_id, amount)
    await until_settled(conn)
    await approve_all(conn, f"{name}-large")
    await until_settled(conn)
    [small], [asking, resumed] = proxy.asked[f"{name}-small", "drive"], proxy.asked[f"{name}-large", "drive"]

    async def all_ended() -> bool:
        return all(drive[-1].startswith("SELECT pg_advisory_unlock") for drive in (small, asking, resumed))

    await until(all_ended)
    return small, asking, resumed


async def assert_each_paid_once(conn: Connection) -> None:
    """Every thread is paid, once, with the amount that was claimed."""
    unpaid = await all_rows(conn, "SELECT thread_id, status, reason FROM threads WHERE status <> 'paid'")
    assert unpaid == [], unpaid
    paid = await all_rows(conn, "SELECT thread_id, amount::text, currency FROM payments ORDER BY 1")
    claimed = "SELECT thread_id, input->>'amount' AS amount, input->>'currency' AS currency FROM threads ORDER BY 1"
    assert paid == await all_rows(conn, claimed), paid


async def assert_never_two_drivers(conn: Connection) -> None:
    """Each thread's checkpoints are one line: two who drive it at once would both add to the same one."""
    forks = await all_rows(
        conn, "SELECT thread_id, parent_checkpoint_id FROM checkpoints GROUP BY 1, 2 HAVING count(*) > 1"
    )
    assert forks == [], forks


async def everything(conn: Connection) -> dict[str, list[dict[str, Any]]]:
    """Every row that a door or a drive may write."""
    return {
        "threads": await all_rows(conn, "SELECT * FROM threads ORDER BY 1"),
        "approvals": await all_rows(conn, "SELECT * FROM approvals ORDER BY 1"),
        "decisions": await all_rows(conn, "SELECT * FROM decisions ORDER BY 1, 2"),
        "payments": await all_rows(conn, "SELECT * FROM payments ORDER BY 1"),
        "notices": await all_rows(conn, "SELECT * FROM notices ORDER BY 1"),
        "checkpoints": await all_rows(conn, "SELECT * FROM checkpoints ORDER BY 1, 2, 3"),
        "writes": await all_rows(conn, "SELECT * FROM checkpoint_writes ORDER BY 1, 2, 3, 4, 5"),
    }
