"""What has happened, for programs: rows that are written in the transaction that makes them true, and read in order.

Ids are given when a row is written, and transactions end in any order: whoever reads on from the last id that he has
seen misses the event with a smaller one that is committed a moment later. So readers go by `position`. It is given to
rows that are committed already, by one transaction at a time: an event that becomes visible later has a higher one,
whatever its id. (Transaction ids would do without this second write. But whoever waits until none below is running
waits for the longest transaction of the whole server, and a database that is restored elsewhere starts them anew.)

Nothing here rings: every transaction that records an event changes what people see, too, and rings for that.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC
from typing import Any, Literal

from psycopg.types.json import Jsonb

from flow import audit
from flow.database import Connection, Lock, lock_until_commit
from flow.errors import EventsForgotten, EventUnknown
from flow.model import Approval, ApprovalEventType, Decision, Event, EventType

# What both programs and the audit log are told.
ToldType = Literal[ApprovalEventType, "payment.paid", "payment.unknown"]

# A tenth of a second, and longer than a page of the API.
_BATCH = 2000


async def record_events(
    conn: Connection, thread_id: str, *types: EventType, data: dict[str, Any], interrupt_id: str | None = None
) -> None:
    """This has happened to the thread, in this order, and these are the facts.

    Belongs in the transaction that makes it true. An event of an approval needs its `interrupt_id`. The facts come from
    the caller, who has them: putting them together by a query would cost a click half a millisecond. Only in which
    workspace the thread was started is its row's to say, so that no event is ever another one's.
    """
    values = {"types": list(types), "thread_id": thread_id, "interrupt_id": interrupt_id, "facts": Jsonb(data)}
    await conn.execute(_RECORDED, values)


_RECORDED = (
    "INSERT INTO events (type, thread_id, interrupt_id, data, workspace) SELECT type, thread_id, %(interrupt_id)s,"
    " %(facts)s || jsonb_build_object('workspace', workspace), workspace FROM threads,"
    " unnest(%(types)s::text[]) WITH ORDINALITY AS wanted (type, place) WHERE thread_id = %(thread_id)s ORDER BY place"
)


async def record_told(
    conn: Connection,
    thread_id: str,
    *types: ToldType,
    facts: dict[str, Any],
    who: str,
    door: str,
    interrupt_id: str | None = None,
    for_whom: str | None = None,
    shown: str | None = None,
    data: dict[str, Any],
) -> None:
    """The same, and that the audit log has it, by one statement: `facts` for programs, and `data` for the log, as
    `audit.record` takes it."""
    await conn.execute(
        f"WITH recorded AS ({_RECORDED}) {audit.ENTERED}",
        {
            "types": list(types),
            "kinds": list(types),
            "thread_id": thread_id,
            "interrupt_id": interrupt_id,
            "facts": Jsonb(facts),
            "who": who,
            "door": door,
            "for_whom": for_whom,
            "shown": shown,
            "data": Jsonb(data),
        },
    )


def facts_of_approval(approval: Approval) -> dict[str, Any]:
    """The `data` of an event of an approval, as the approval is now."""
    return _facts(
        thread=approval.thread_id,
        interrupt_id=approval.interrupt_id,
        claim=approval.request,
        tier=approval.tier,
        request_hash=approval.request_hash,
        status=approval.status,
        decisions=approval.votes,
    )


def facts_of_thread(
    thread_id: str,
    claim: Mapping[str, Any],
    approvals: Sequence[Approval],
    *,
    status: str,
    reference: str | None = None,
    result: Any = None,
) -> dict[str, Any]:
    """The `data` of an event of a payment or a thread: with everybody's decisions, whatever the tier."""
    counted = [approval for approval in approvals if approval.status != "superseded"]
    decisions = [vote for approval in counted for vote in approval.votes]
    return _facts(thread=thread_id, claim=claim, status=status, decisions=decisions, payment=reference, result=result)


_SHOWN = ("title", "amount", "currency", "payee")


def _facts(
    *,
    thread: str,
    claim: Mapping[str, Any],
    status: str,
    decisions: Sequence[Decision],
    interrupt_id: str | None = None,
    tier: str | None = None,
    request_hash: str | None = None,
    payment: str | None = None,
    result: Any = None,
) -> dict[str, Any]:
    """Always the same fields, and never the note: it is for those who decide."""
    return {
        "thread": thread,
        "interrupt_id": interrupt_id,
        # A flow's input may have anything under these names.
        **{name: said if isinstance(said := claim.get(name), str) else None for name in _SHOWN},
        "tier": tier,
        "request_hash": request_hash,
        "status": status,
        "decisions": [
            {
                "person": decision.person,
                "for_person": decision.for_person,
                "verdict": decision.verdict,
                "door": decision.door,
                "at": decision.decided_at.astimezone(UTC).isoformat(),
            }
            for decision in decisions
        ],
        "payment": payment,
        "result": result,
    }


async def page_after(
    conn: Connection, position: int, *, limit: int, workspace: str | None = None
) -> tuple[list[Event], int]:
    """The same as `events_after`, and the position to go on from.

    Whoever reads one workspace's goes on behind what is others', too: what they have read last would soon be older than
    all that is kept, and nobody could tell them that nothing of theirs has been forgotten since.
    """
    last = 0
    if workspace is not None:
        await _give_some(conn)
        # Before they are read: what becomes visible between the two is for the next page.
        row = await (await conn.execute("SELECT coalesce(max(position), 0) AS last FROM events")).fetchone()
        assert row is not None
        last = row["last"]
    found = await events_after(conn, position, limit=limit, workspace=workspace)
    read = (found[-1].position if found else None) or position
    return found, read if len(found) == limit else max(read, last)


async def events_after(conn: Connection, position: int, *, limit: int, workspace: str | None = None) -> list[Event]:
    """The events that became visible after this one, oldest first; after 0: from the oldest that is kept. With a
    `workspace`, those of what was started there.

    None is ever skipped by going on from the last. Raises EventsForgotten if one that followed is not kept any more,
    and EventUnknown if the database has never had the one to go on from, or has lost it.
    """
    # Whoever reads first does not wait until all have one: the rest follows with the next readings.
    await _give_some(conn)
    of_workspace = "" if workspace is None else " AND workspace = %(workspace)s"
    rows = await conn.execute(
        f"SELECT id, type, data, created_at, position FROM events WHERE position > %(position)s{of_workspace}"
        " ORDER BY position LIMIT %(limit)s",
        {"position": position, "limit": limit, "workspace": workspace},
    )
    events = [Event(**row) for row in await rows.fetchall()]
    # Only now: what is forgotten between the two is said, and not skipped.
    row = await (
        await conn.execute(
            "SELECT events_forgotten, greatest(events_forgotten, (SELECT max(position) FROM events)) AS last"
            " FROM installation"
        )
    ).fetchone()
    assert row is not None
    if 0 < position < row["events_forgotten"]:
        raise EventsForgotten(position)
    if position > row["last"]:
        raise EventUnknown(position)
    return events


async def give_positions(conn: Connection) -> None:
    """Give every event that can be seen its position, in batches; one SELECT when all have one.

    Each batch is a transaction of its own, unless there is one already.
    """
    while await _give_some(conn):
        pass


async def _give_some(conn: Connection) -> bool:
    """The next batch; whether there may be more."""
    # In the order of the index that has only those: the database might read through the table itself.
    row = await (await conn.execute("SELECT FROM events WHERE position IS NULL ORDER BY id LIMIT 1")).fetchone()
    if row is None:
        return False
    async with conn.transaction():
        await lock_until_commit(conn, Lock.EVENTS)
        return await _next_positions(conn, most=_BATCH) == _BATCH


async def lock_events(conn: Connection) -> None:
    """Until the transaction ends, every event that can be seen has its position, and nobody else gives any.

    `give_positions` before the transaction leaves little of that to do.
    """
    await lock_until_commit(conn, Lock.EVENTS)
    await _next_positions(conn, most=None)


async def _next_positions(conn: Connection, *, most: int | None) -> int:
    """Whoever has the lock gives so many their positions; how many there were.

    A statement of its own: it must see what whoever had the lock before has done.
    """
    given = await conn.execute(
        "WITH next AS (SELECT id, nextval('events_position') AS position"
        " FROM (SELECT id FROM events WHERE position IS NULL ORDER BY id LIMIT %s) AS ordered)"
        " UPDATE events SET position = next.position FROM next WHERE events.id = next.id",
        (most,),
    )
    return given.rowcount
