"""Pay once. The payment of a thread is one row with a unique key; the `ledger` provider is that row itself."""

from __future__ import annotations

from collections.abc import Sequence

from flow.database import Connection
from flow.model import Claim, Payment

_COLUMNS = "id, thread_id, amount, currency, payee, provider, reference, status, paid_at"


async def pay(conn: Connection, thread_id: str, claim: Claim) -> Payment:
    """Pay the claim, once: a thread that was paid before gets its first payment back, unchanged.

    The reference is made from the thread id, so it is the same whoever pays and however often.
    """
    await conn.execute(
        "INSERT INTO payments (thread_id, amount, currency, payee, provider, reference, status)"
        " VALUES (%s, %s, %s, %s, 'ledger', %s, 'paid') ON CONFLICT (thread_id) DO NOTHING",
        (thread_id, claim.amount, claim.currency, claim.payee, f"L-{thread_id}"),
    )
    payment = (await payments_of(conn, [thread_id])).get(thread_id)
    assert payment is not None
    return payment


async def payments_of(conn: Connection, thread_ids: Sequence[str]) -> dict[str, Payment]:
    """The payments of those of these threads that have one, by thread id."""
    rows = await conn.execute(f"SELECT {_COLUMNS} FROM payments WHERE thread_id = ANY(%s)", (list(thread_ids),))
    return {row["thread_id"]: Payment(**row) for row in await rows.fetchall()}
