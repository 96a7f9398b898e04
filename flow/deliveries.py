"""The outgoing webhooks: which event goes to which endpoint, and what became of it.

An endpoint is a name; its URL and secrets are settings of the processes that deliver. It has a row with the position up
to which every event has its delivery, and begins with what happens after it was first heard of. Whoever delivers to an
endpoint gives it its deliveries first (`spread`), so an event is written without knowing of any endpoint, and processes
whose settings differ each look after their own: one lock and a key see to it that an event is never spread twice or
forgotten. An endpoint that is taken out of the settings keeps its place, and goes on from there if it comes back; so
does one that was turned off because it answered 410. Until it is forgotten by name it holds every event since.

Leases are those of `flow.notices`: a committed UPDATE, the call with no transaction open, and an outcome that is
recorded only where the attempt is still its own. Whoever dies in between has its event sent again, under the same id.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from flow.audit import door_of, record
from flow.database import Connection, Lock, lock_until_commit, ring
from flow.errors import UnknownEndpoint, UnknownEvent
from flow.events import give_positions, lock_events
from flow.model import Delivery, Event
from flow.spans import NONE, WRITTEN
from flow.text import visible

# Longer than a delivery can take (15 s), short enough that a dead deliverer is not missed for long.
LEASE_S = 30.0


async def add_endpoints(conn: Connection, names: Iterable[str]) -> None:
    """Hear of these endpoints: from now on every event is theirs. One SELECT if they are known."""
    known = await conn.execute("SELECT name FROM webhook_endpoints")
    new = sorted(set(names) - {row["name"] for row in await known.fetchall()})
    if not new:
        return
    await give_positions(conn)
    async with conn.transaction():
        await lock_events(conn)
        await conn.execute(
            "INSERT INTO webhook_endpoints (name, position)"
            " SELECT name, (SELECT coalesce(max(position), 0) FROM events) FROM unnest(%s::text[]) AS name"
            " ON CONFLICT DO NOTHING",
            (new,),
        )


async def spread(conn: Connection, endpoint: str) -> None:
    """Give the endpoint its deliveries of what has happened since; one SELECT if that is nothing."""
    row = await (
        await conn.execute(
            # Each a look at an end of an index: as EXISTS they might be answered by reading all events.
            "SELECT FROM webhook_endpoints WHERE name = %s AND turned_off_at IS NULL AND ("
            "(SELECT id FROM events WHERE position IS NULL ORDER BY id LIMIT 1) IS NOT NULL"
            " OR (SELECT max(position) FROM events) > position)",
            (endpoint,),
        )
    ).fetchone()
    if row is None:
        return
    await give_positions(conn)
    async with conn.transaction():
        await lock_events(conn)
        listed = await conn.execute(
            "SELECT position FROM webhook_endpoints WHERE name = %s AND turned_off_at IS NULL", (endpoint,)
        )
        for row in await listed.fetchall():
            # By a position that the database knows: of one in a join it expects a third of all events to follow.
            # Already there: what somebody has had sent again by its id.
            await conn.execute(
                "WITH new AS (SELECT id, position FROM events WHERE position > %(after)s),"
                " made AS (INSERT INTO webhook_deliveries (endpoint, event_id)"
                " SELECT %(name)s, id FROM new ORDER BY position ON CONFLICT DO NOTHING)"
                " UPDATE webhook_endpoints w SET position = last.position"
                " FROM (SELECT max(position) AS position FROM new HAVING count(*) > 0) AS last"
                " WHERE w.name = %(name)s",
                {"after": row["position"], "name": endpoint},
            )


async def lease(conn: Connection, endpoint: str) -> Delivery | None:
    """Take what has been due at this endpoint for longest, for LEASE_S; None if nothing is, or it may not be asked."""
    row = await (
        await conn.execute(
            "WITH next AS (SELECT d.endpoint, d.event_id FROM webhook_deliveries d"
            " JOIN webhook_endpoints w ON w.name = d.endpoint"
            " WHERE d.endpoint = %s AND d.due_at <= statement_timestamp() AND w.turned_off_at IS NULL"
            " AND coalesce(w.quiet_until <= clock_timestamp(), true)"
            " ORDER BY d.due_at, d.event_id LIMIT 1 FOR UPDATE OF d SKIP LOCKED)"
            " UPDATE webhook_deliveries d SET status = 'sending', attempt = d.attempt + 1, tries = d.tries + 1,"
            " due_at = clock_timestamp() + %s * interval '1 second' FROM next, events e"
            " WHERE (d.endpoint, d.event_id) = (next.endpoint, next.event_id) AND e.id = d.event_id"
            " RETURNING d.endpoint, d.attempt, d.tries, e.id, e.type, e.data, e.created_at, e.position",
            (endpoint, LEASE_S),
        )
    ).fetchone()
    if row is None:
        return None
    of_delivery = {name: row.pop(name) for name in ("endpoint", "attempt", "tries")}
    return Delivery(event=Event(**row), **of_delivery)


async def mark_sent(conn: Connection, delivery: Delivery, *, spans: str = NONE) -> None:
    """The endpoint has it. `spans`, here and below: those of the delivery."""
    await _mark(
        conn, delivery, "status = 'sent', due_at = NULL, error = NULL, sent_at = clock_timestamp()", spans=spans
    )


async def mark_later(
    conn: Connection,
    delivery: Delivery,
    *,
    wait_s: float,
    error: str,
    quiet_s: float | None = None,
    spans: str = NONE,
) -> None:
    """Not delivered, or perhaps: try again after `wait_s`. `quiet_s`: the endpoint wants nothing at all for so long."""
    async with conn.transaction():
        await _mark(
            conn,
            delivery,
            "status = 'pending', error = %(error)s, due_at = clock_timestamp() + %(wait_s)s * interval '1 second'",
            error=error,
            wait_s=wait_s,
            spans=spans,
        )
        if quiet_s is not None:
            await conn.execute(
                "UPDATE webhook_endpoints SET quiet_until = clock_timestamp() + %s * interval '1 second'"
                " WHERE name = %s",
                (quiet_s, delivery.endpoint),
            )


async def mark_dead(conn: Connection, delivery: Delivery, error: str, *, spans: str = NONE) -> None:
    """It is not tried again until somebody says so."""
    await _mark(conn, delivery, "status = 'dead', due_at = NULL, error = %(error)s", error=error, spans=spans)


async def turn_off(conn: Connection, delivery: Delivery, reason: str, *, spans: str = NONE) -> None:
    """The endpoint wants nothing more: this delivery is dead, and those that wait stay where they are."""
    async with conn.transaction():
        await mark_dead(conn, delivery, reason, spans=spans)
        await conn.execute(
            "UPDATE webhook_endpoints SET turned_off_at = clock_timestamp(), reason = %s"
            " WHERE name = %s AND turned_off_at IS NULL",
            (reason, delivery.endpoint),
        )


async def resend_event(conn: Connection, event_id: int, endpoint: str, *, by: str) -> None:
    """Have the event sent to the endpoint now, under its old id, whatever became of it; turns the endpoint on.

    Also one from before the endpoint was heard of. Raises UnknownEndpoint, UnknownEvent.
    """
    async with conn.transaction():
        await _turn_on(conn, [endpoint])
        # Locked, so that it stays, or is gone by then: it may be old enough to be deleted.
        event = await (await conn.execute("SELECT FROM events WHERE id = %s FOR KEY SHARE", (event_id,))).fetchone()
        if event is None:
            raise UnknownEvent(event_id)
        # One that is on its way stays so: its lease runs, and then it is tried again anyway.
        await conn.execute(
            "INSERT INTO webhook_deliveries AS d (endpoint, event_id) VALUES (%s, %s)"
            f" ON CONFLICT (endpoint, event_id) DO UPDATE {_FROM_THE_START} WHERE d.status <> 'sending'",
            (endpoint, event_id),
        )
        data = {"event": event_id, "endpoints": [endpoint]}
        await record(conn, "webhook.resent", who=by, door=door_of(by), data=data)


async def resend_dead(conn: Connection, endpoint: str | None = None, *, by: str) -> int:
    """Have every dead letter (of this endpoint) sent now, each under its old id; how many. Turns the endpoints on.

    Raises UnknownEndpoint.
    """
    async with conn.transaction():
        if endpoint is not None:
            await _turn_on(conn, [endpoint])
        resent = await conn.execute(
            f"UPDATE webhook_deliveries d {_FROM_THE_START} WHERE status = 'dead' AND endpoint = coalesce(%s, endpoint)"
            " RETURNING endpoint",
            (endpoint,),
        )
        names = [row["endpoint"] for row in await resent.fetchall()]
        await _turn_on(conn, sorted(set(names)))
        if names or endpoint:
            data = {"count": len(names), "endpoints": sorted({*names} | ({endpoint} if endpoint else set()))}
            await record(conn, "webhook.resent", who=by, door=door_of(by), data=data)
        return len(names)


async def forget_endpoint(conn: Connection, endpoint: str, *, by: str) -> int:
    """Nobody sends to it any more: its place goes, and with it what waits for it and its dead letters; how many.

    Nothing holds events for it from now on. If somebody hears of it again it begins anew, with what happens after that.
    Raises UnknownEndpoint.
    """
    async with conn.transaction():
        # Nobody spreads to it meanwhile.
        await lock_until_commit(conn, Lock.EVENTS)
        rows = await conn.execute("SELECT position FROM webhook_endpoints WHERE name = %s FOR UPDATE", (endpoint,))
        row = await rows.fetchone()
        if row is None:
            raise UnknownEndpoint(endpoint)
        deleted = await conn.execute(
            "WITH gone AS (DELETE FROM webhook_deliveries WHERE endpoint = %s RETURNING event_id, status)"
            " SELECT count(*) FILTER (WHERE status <> 'sent') + (SELECT count(*) FROM events"
            " WHERE (position > %s OR position IS NULL) AND id NOT IN (SELECT event_id FROM gone)) AS count FROM gone",
            (endpoint, row["position"]),
        )
        await conn.execute("DELETE FROM webhook_endpoints WHERE name = %s", (endpoint,))
        lost = await deleted.fetchone()
        assert lost is not None
        data = {"endpoints": [endpoint], "count": lost["count"]}
        await record(conn, "webhook.forgotten", who=by, door=door_of(by), data=data)
        return int(lost["count"])


@dataclass(frozen=True, kw_only=True)
class DeadLetter:
    """A delivery that was given up."""

    event_id: int
    type: str
    thread_id: str
    attempts: int
    error: str | None
    created_at: datetime

    def in_words(self) -> str:
        what = f"event {self.event_id}, {self.type} of {self.thread_id} at {_when(self.created_at)}"
        return f"{what}, tried {self.attempts} times: {self.error}"

    def as_json(self) -> dict[str, Any]:
        return {
            "event": self.event_id,
            "type": self.type,
            "thread": self.thread_id,
            "attempts": self.attempts,
            "error": self.error,
            "created_at": self.created_at.isoformat(),
        }


@dataclass(frozen=True, kw_only=True)
class EndpointState:
    """How an endpoint fares: `waiting` events are not delivered yet, the first of them happened at `oldest`."""

    name: str
    turned_off_at: datetime | None
    reason: str | None
    quiet_until: datetime | None
    waiting: int
    oldest: datetime | None
    dead_count: int
    dead: tuple[DeadLetter, ...]

    def in_words(self, *, configured: bool) -> str:
        """A line, and one for each dead letter. `configured`: this process has its URL."""
        state = "on" if self.turned_off_at is None else f"off since {_when(self.turned_off_at)} ({self.reason})"
        if self.quiet_until is not None:
            state += f", wants nothing until {_when(self.quiet_until)}"
        since = f" since {_when(self.oldest)}" if self.oldest else ""
        here = "" if configured else ", not in WEBHOOK_URLS here"
        head = f"{self.name}: {state}{here}; {self.waiting} waiting{since}, {self.dead_count} dead"
        return "\n".join([visible(head), *(f"  {visible(letter.in_words())}" for letter in self.dead)])

    def as_json(self) -> dict[str, Any]:
        """The object that `--json` prints."""
        return {
            "endpoint": self.name,
            "on": self.turned_off_at is None,
            "turned_off_at": self.turned_off_at and self.turned_off_at.isoformat(),
            "reason": self.reason,
            "quiet_until": self.quiet_until and self.quiet_until.isoformat(),
            "waiting": self.waiting,
            "oldest": self.oldest and self.oldest.isoformat(),
            "dead_count": self.dead_count,
            "dead": [letter.as_json() for letter in self.dead],
        }


async def endpoint_states(conn: Connection, *, limit: int) -> list[EndpointState]:
    """Every endpoint that was ever heard of, each with at most `limit` dead letters, the newest first."""
    rows = await conn.execute(
        "SELECT w.name, w.turned_off_at, w.reason, CASE WHEN w.quiet_until > clock_timestamp() THEN w.quiet_until END"
        " AS quiet_until, due.count + new.count AS waiting, least(due.oldest, new.oldest) AS oldest,"
        " (SELECT count(*) FROM webhook_deliveries d WHERE d.endpoint = w.name AND d.status = 'dead') AS dead_count"
        " FROM webhook_endpoints w,"
        " LATERAL (SELECT count(*), min(e.created_at) AS oldest FROM webhook_deliveries d JOIN events e ON e.id ="
        " d.event_id WHERE d.endpoint = w.name AND d.due_at IS NOT NULL) AS due,"
        # Not spread yet.
        " LATERAL (SELECT count(*), min(e.created_at) AS oldest FROM events e WHERE (e.position > w.position OR"
        " e.position IS NULL) AND NOT EXISTS (SELECT FROM webhook_deliveries d WHERE (d.endpoint, d.event_id) ="
        " (w.name, e.id))) AS new ORDER BY w.name"
    )
    return [
        EndpointState(**row, dead=tuple(await _dead_letters(conn, row["name"], limit))) for row in await rows.fetchall()
    ]


async def _dead_letters(conn: Connection, endpoint: str, limit: int) -> Sequence[DeadLetter]:
    rows = await conn.execute(
        "SELECT e.id AS event_id, e.type, e.thread_id, d.attempt AS attempts, d.error, e.created_at"
        " FROM webhook_deliveries d JOIN events e ON e.id = d.event_id WHERE d.endpoint = %s AND d.status = 'dead'"
        " ORDER BY d.event_id DESC LIMIT %s",
        (endpoint, limit),
    )
    return [DeadLetter(**row) for row in await rows.fetchall()]


def _when(at: datetime) -> str:
    return at.astimezone().strftime("%Y-%m-%d %H:%M:%S %Z")


# Due now, and at the beginning of the schedule.
_FROM_THE_START = "SET status = 'pending', due_at = clock_timestamp(), tries = 0"


async def _mark(conn: Connection, delivery: Delivery, change: str, **values: object) -> None:
    query = (
        f"WITH ended AS (UPDATE webhook_deliveries d SET {change}"
        " WHERE endpoint = %(endpoint)s AND event_id = %(event)s AND attempt = %(attempt)s AND status = 'sending'"
        f" RETURNING (SELECT thread_id FROM events e WHERE e.id = d.event_id) AS thread_id), {WRITTEN} SELECT"
    )
    ours = {"endpoint": delivery.endpoint, "event": delivery.event.id, "attempt": delivery.attempt}
    await conn.execute(query.encode(), ours | values)


async def _turn_on(conn: Connection, endpoints: Sequence[str]) -> None:
    """Let them have what waits, at once. Raises UnknownEndpoint."""
    for endpoint in endpoints:
        turned = await conn.execute(
            "UPDATE webhook_endpoints SET turned_off_at = NULL, reason = NULL, quiet_until = NULL WHERE name = %s",
            (endpoint,),
        )
        if turned.rowcount == 0:
            raise UnknownEndpoint(endpoint)
    await ring(conn)
