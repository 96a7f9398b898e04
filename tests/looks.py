"""What is looked up and written of many threads, as doors, workers and retention do it, and what that reads of them.

Each look is of the rows of `tests.seed`, and leaves nothing behind: it is rolled back.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from bot.lists import PAGE
from flow import deadlines, deliveries, events, inputs, mails, notices, payments, reminders, retention, threads
from flow.approvals import approval_of, approvals_of, decide, latest_approvals, latest_decisions
from flow.audit import latest_entries, seal
from flow.database import Connection
from flow.delegations import with_absent
from flow.figures import figures
from flow.inbox import Search, View, count_mine, find, find_threads, lists_groups
from flow.model import CLAIM_FLOW, CLAIM_FLOW_VERSION, Person, Verdict, flow_key
from flow.show import stories_of
from tests.seed import BUSY, DUE, FEW, GROUP, NOBODY

Look = Callable[[Connection], Awaitable[Any]]

# As the API and the web inbox have it.
_PAGE = 50
# Older than anything.
_AGES_S = 20 * 365 * 86_400
_OVER = 5

BUSY_WITH_GROUP = replace(BUSY, names=BUSY.names | {GROUP})


async def _scan(conn: Connection) -> None:
    """What a worker does at each look."""
    flows = (flow_key(CLAIM_FLOW, CLAIM_FLOW_VERSION),)
    due = await threads.due_threads(conn, flows=flows, drive_timeout_s=120, limit=100)
    assert len(due) == DUE
    await deadlines.expire_overdue(conn)


async def _look_around(conn: Connection) -> None:
    """What it does now and then."""
    await reminders.remind_overdue(conn)
    await threads.settle_flows(conn, (flow_key(CLAIM_FLOW, CLAIM_FLOW_VERSION),))
    await seal(conn)


async def _deliver(conn: Connection) -> None:
    """What deliverers do at each bell, and when there is one more event."""
    await deliveries.spread(conn, "acme")
    await events.record_events(conn, "due-1", "payment.paid", data={"thread": "due-1"})
    for lane in ("posts", "changes", "alarms"):
        await notices.lease(conn, lane)
    await mails.lease_mail(conn)
    await deliveries.spread(conn, "acme")
    assert await deliveries.lease(conn, "acme")


async def _drive(conn: Connection) -> None:
    """What stands around the graph in a drive."""
    assert await threads.take(conn, "due-1")
    await threads.wake(conn, "due-1")
    thread = await threads.thread_of(conn, "due-1")
    claim = inputs.parse_claim(amount="250", currency="USD", payee="ACME")
    await payments.pay_from_ledger(conn, "due-1", claim, [])
    assert await threads.leave(conn, thread, status="paid")


async def _file(conn: Connection) -> None:
    claim = inputs.parse_claim(amount="250", currency="USD", payee="ACME")
    await threads.insert_thread(
        conn,
        thread_id="new",
        flow=CLAIM_FLOW,
        flow_version=CLAIM_FLOW_VERSION,
        input=claim.as_input(),
        requested_by="cli:ann",
    )


async def _click(conn: Connection) -> None:
    [approval] = (await approvals_of(conn, ["few-6"]))["few-6"]
    verdict = Verdict(verdict="approve", door="slack", request_hash=approval.request_hash)
    assert (await decide(conn, approval.interrupt_id, FEW, verdict)).recorded
    await seal(conn)


async def _card(conn: Connection) -> None:
    """What a deliverer reads to show one card."""
    [approval] = (await approvals_of(conn, ["few-6"]))["few-6"]
    await approval_of(conn, approval.interrupt_id)
    await notices.copies_of(conn, approval.interrupt_id)
    await notices.failures_of(conn, "few-6")


async def _show(conn: Connection) -> None:
    await stories_of(conn, [await threads.thread_of(conn, "few-6")])
    await latest_entries(conn, thread_id="few-6", limit=_PAGE)


def _list(status: str | None) -> Look:
    async def look(conn: Connection) -> None:
        await stories_of(conn, await threads.latest_threads(conn, status=status, limit=_PAGE))

    return look


def _inbox(person: Person, view: View = "mine") -> Look:
    async def look(conn: Connection) -> None:
        acting = await with_absent(conn, person)
        await find(conn, acting, Search(view=view), viewers=(), limit=_PAGE)
        await count_mine(conn, acting)

    return look


def _home(person: Person) -> Look:
    async def look(conn: Connection) -> None:
        await lists_groups(conn)
        acting = await with_absent(conn, person)
        await count_mine(conn, acting)
        await find(conn, acting, Search(view="mine"), viewers=(), limit=PAGE + 1)
        await stories_of(conn, await find_threads(conn, acting, limit=PAGE + 1))
        await find(conn, acting, Search(view="history"), viewers=(), limit=PAGE + 1)

    return look


async def _prune(conn: Connection) -> None:
    """As if some had ended long before the others. A full batch of a small table is found by reading it."""
    over = [f"over-{number}" for number in range(1, _OVER + 1)]
    await conn.execute(
        "UPDATE threads SET ended_at = clock_timestamp() - interval '30 years' WHERE thread_id = ANY(%s)", (over,)
    )
    pruned = await retention.prune(conn, retention.Keep(checkpoints_s=_AGES_S, events_s=_AGES_S, spans_s=_AGES_S))
    assert (pruned.threads, pruned.failed) == (_OVER, {})


LOOKS: Mapping[str, Look] = {
    "due scan": _scan,
    "look around": _look_around,
    "deliverers' look": _deliver,
    "drive's own rows": _drive,
    "start": _file,
    "click": _click,
    "card": _card,
    "show": _show,
    "list": _list(None),
    "list of what waits": _list("waiting"),
    "API, approvals": lambda conn: latest_approvals(conn, status="pending", limit=_PAGE),
    "API, decisions": lambda conn: latest_decisions(conn, limit=_PAGE),
    "API, payments": lambda conn: payments.latest_payments(conn, status="paid", limit=_PAGE),
    "API, events": lambda conn: events.events_after(conn, 1, limit=_PAGE),
    "inbox, few wait": _inbox(FEW),
    "inbox, many wait": _inbox(BUSY_WITH_GROUP),
    "inbox, all, few": _inbox(FEW, "all"),
    "inbox, history, many": _inbox(BUSY_WITH_GROUP, "history"),
    "App Home, nothing": _home(NOBODY),
    "App Home, few wait": _home(FEW),
    "App Home, many wait": _home(BUSY_WITH_GROUP),
    "metrics": lambda conn: figures(conn, slack=True, mail=True),
    "prune": _prune,
}

# Tables of which there are more rows with every thread.
GROWING = [
    "threads", "approvals", "decisions", "payments", "notices", "messages", "links", "events", "webhook_deliveries",
    "audit", "audit_seals", "effects", "advice", "receipts", "checkpoints", "checkpoint_blobs", "checkpoint_writes",
]  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Reading:
    """What was read of one table: how often all of it, and how many of its rows."""

    whole: int
    rows: int


async def reading(conn: Connection, look: Look) -> dict[str, Reading]:
    """What a look reads of each table that grows, as Postgres itself counts it, triggers and foreign keys included."""
    async with conn.transaction(force_rollback=True):
        before = await _read(conn)
        await look(conn)
        after = await _read(conn)
    found = {
        table: Reading(whole=whole - before[table][0], rows=rows - before[table][1])
        for table, (whole, rows) in after.items()
    }
    return {table: read for table, read in found.items() if read.whole or read.rows}


async def _read(conn: Connection) -> dict[str, tuple[int, int]]:
    rows = await conn.execute(
        "SELECT relname, seq_scan, seq_tup_read + coalesce(idx_tup_fetch, 0) AS rows FROM pg_stat_xact_user_tables"
        " WHERE relname = ANY(%s)",
        (GROWING,),
    )
    return {row["relname"]: (row["seq_scan"], row["rows"]) for row in await rows.fetchall()}
