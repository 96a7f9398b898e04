"""How things stand in the database, in numbers: what waits for whom, for how long, and what has stopped.

Each figure comes from an index that holds little more than what it counts, and none counts past MOST, so that looking
costs the same however many threads there are. What has happened, and how often, is in `flow.counts`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from flow import mails
from flow.database import Connection

# Ten thousand that wait need somebody, whatever the rest is.
MOST = 10_000

# A look that takes longer is given up: the figures are not worth a slow database's last strength.
_TIMEOUT = "2s"

AGES = ("1h", "4h", "1d", "3d", "more")


@dataclass(frozen=True, kw_only=True)
class Figure:
    """One number by labels, as it is now."""

    name: str
    help: str
    labels: tuple[str, ...] = ()
    values: Mapping[tuple[str, ...], float]


async def figures(conn: Connection, *, slack: bool, mail: bool) -> list[Figure]:
    """How things stand. Without `slack` or `mail` nobody sends what is kept for them, and it is not counted."""
    async with conn.transaction():
        await conn.execute(f"SET LOCAL statement_timeout = '{_TIMEOUT}'")
        return [
            *await _approvals(conn),
            *await _threads(conn),
            *await _notices(conn, slack=slack, mail=mail),
            *await _payments(conn),
        ]


async def _approvals(conn: Connection) -> list[Figure]:
    rows = await conn.execute(
        "SELECT tier, CASE WHEN age <= 3600 THEN '1h' WHEN age <= 14400 THEN '4h' WHEN age <= 86400 THEN '1d'"
        " WHEN age <= 259200 THEN '3d' ELSE 'more' END AS up_to, count(*), max(age)::float8 AS oldest"
        " FROM (SELECT tier, extract(epoch FROM clock_timestamp() - requested_at) AS age FROM approvals"
        # The oldest first, from the end of the index.
        " WHERE status = 'pending' ORDER BY requested_at, interrupt_id DESC LIMIT %s) waiting GROUP BY 1, 2",
        (MOST,),
    )
    found = await rows.fetchall()
    counts = {(row["tier"], up_to): 0.0 for row in found for up_to in AGES}
    return [
        Figure(
            name="claim_flow_pending_approvals",
            help=f"Requests that wait for a person, by tier and by how long they have waited (the oldest {MOST}).",
            labels=("tier", "age"),
            values=counts | {(row["tier"], row["up_to"]): row["count"] for row in found},
        ),
        Figure(
            name="claim_flow_oldest_pending_approval_seconds",
            help="How long the oldest request has waited for a person; 0 if none waits.",
            values={(): max((row["oldest"] for row in found), default=0.0)},
        ),
    ]


async def _threads(conn: Connection) -> list[Figure]:
    due = await _one(
        conn,
        "SELECT count(*), coalesce(extract(epoch FROM clock_timestamp() - min(due_at)), 0)::float8 AS oldest FROM"
        " (SELECT due_at FROM threads WHERE due_at IS NOT NULL AND due_at <= statement_timestamp() LIMIT %s) due",
    )
    stopped: dict[tuple[str, ...], float] = {}
    for status in ("stuck", "unknown", "unavailable"):
        counted = await _one(
            conn, f"SELECT count(*) FROM (SELECT FROM threads WHERE status = '{status}' LIMIT %s) stopped"
        )
        stopped[status,] = counted["count"]
    return [
        Figure(
            name="claim_flow_due_threads",
            help=f"Threads that want to be driven now, those that are being driven among them (at most {MOST}).",
            values={(): due["count"]},
        ),
        Figure(
            name="claim_flow_oldest_due_thread_seconds",
            help="How long the first of them has wanted it; 0 if none does.",
            values={(): due["oldest"]},
        ),
        Figure(
            name="claim_flow_stopped_threads",
            help="Threads that need an operator: stuck, unknown (perhaps paid), or unavailable (no worker has the flow)"
            f" (at most {MOST} of each).",
            labels=("status",),
            values=stopped,
        ),
    ]


_WAITING = {
    "slack": "(SELECT kind, coalesce(waits_since, due_at) AS since FROM notices WHERE due_at IS NOT NULL"
    " LIMIT %(most)s)",
    "mail": "(SELECT 'mail', coalesce(l.mailed_at, l.made_at) FROM links l JOIN approvals a USING (interrupt_id)"
    f" WHERE l.mail_due_at IS NOT NULL AND {mails.WANTED} LIMIT %(most)s)",
    "webhooks": "(SELECT 'webhook', e.created_at FROM webhook_endpoints w JOIN webhook_deliveries d ON d.endpoint ="
    " w.name JOIN events e ON e.id = d.event_id WHERE d.due_at IS NOT NULL AND w.turned_off_at IS NULL LIMIT %(most)s)"
    # Not spread yet, and nobody does it if no process has the endpoint in its settings.
    " UNION ALL (SELECT 'webhook', e.created_at FROM webhook_endpoints w CROSS JOIN LATERAL ("
    "(SELECT created_at FROM events WHERE position > w.position ORDER BY position LIMIT %(most)s) UNION ALL"
    " (SELECT created_at FROM events WHERE position IS NULL ORDER BY id LIMIT %(most)s)) e"
    " WHERE w.turned_off_at IS NULL LIMIT %(most)s)",
}


async def _notices(conn: Connection, *, slack: bool, mail: bool) -> list[Figure]:
    here = {"slack": slack, "mail": mail, "webhooks": True}
    sources = " UNION ALL ".join(source for name, source in _WAITING.items() if here[name])
    kinds = [("card", "reply", "reminder", "alarm") if slack else (), ("mail",) if mail else (), ("webhook",)]
    none = {(kind,): 0.0 for some in kinds for kind in some}
    rows = await conn.execute(
        "SELECT kind, count(*), greatest(max(extract(epoch FROM clock_timestamp() - since)), 0)::float8 AS oldest"
        f" FROM ({sources}) AS waiting (kind, since) GROUP BY kind",
        {"most": MOST},
    )
    waiting = await rows.fetchall()
    rows = await conn.execute(
        "SELECT kind, count(*) FROM (SELECT kind FROM notices WHERE status = 'failed' LIMIT %s) failed GROUP BY kind",
        (MOST,),
    )
    refused: dict[tuple[str, ...], float] = {(row["kind"],): row["count"] for row in await rows.fetchall()}
    dead = await _one(
        conn,
        "SELECT count(*) + (SELECT count(*) FROM webhook_endpoints WHERE turned_off_at IS NOT NULL) AS count"
        " FROM (SELECT FROM webhook_deliveries WHERE status = 'dead' LIMIT %s) dead",
    )
    refused["webhook",] = dead["count"]
    if mail:
        refused["mail",] = len(await mails.failed_mails(conn, most=MOST))
    return [
        Figure(
            name="claim_flow_waiting_notices",
            help=f"What the outside has not been told yet, by kind (at most {MOST} of Slack's, mails, and webhooks).",
            labels=("kind",),
            values=none | {(row["kind"],): row["count"] for row in waiting},
        ),
        Figure(
            name="claim_flow_oldest_waiting_notice_seconds",
            help="How long the first of them has waited, however often it was tried; 0 if none waits.",
            labels=("kind",),
            values=none | {(row["kind"],): row["oldest"] for row in waiting},
        ),
        Figure(
            name="claim_flow_refused_notices",
            help="What is not sent any more, since it was refused, until somebody mends it and says `deliver`; for"
            " webhooks dead letters and endpoints that are off, until `webhooks resend`"
            f" (at most {MOST} of each, and mails of the oldest {MOST} requests that wait).",
            labels=("kind",),
            values={(kind,): 0.0 for kind in kinds[0]} | refused,
        ),
    ]


async def _payments(conn: Connection) -> list[Figure]:
    counts: dict[tuple[str, ...], float] = {}
    oldest: dict[tuple[str, ...], float] = {}
    for status in ("intended", "unknown"):
        row = await _one(
            conn,
            "SELECT count(*), coalesce(extract(epoch FROM clock_timestamp() - min(intended_at)), 0)::float8 AS oldest"
            f" FROM (SELECT intended_at FROM payments WHERE status = '{status}' ORDER BY id LIMIT %s) AS open",
        )
        counts[status,], oldest[status,] = row["count"], row["oldest"]
    return [
        Figure(
            name="claim_flow_open_payments",
            help="Payments that are neither made nor refused: intended, or unknown, which somebody must look at"
            f" (at most {MOST} of each).",
            labels=("status",),
            values=counts,
        ),
        Figure(
            name="claim_flow_oldest_open_payment_seconds",
            help="How long ago the first of them was begun; 0 if there is none.",
            labels=("status",),
            values=oldest,
        ),
    ]


async def _one(conn: Connection, query: str) -> dict[str, float]:
    row = await (await conn.execute(query.encode(), (MOST,))).fetchone()
    assert row is not None
    return row
