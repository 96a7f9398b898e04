"""The audit log: who did what, through which door, for whom, and what they were shown.

A row is written in the transaction that makes it true, and never changed: triggers and grants see to that. So that
whoever gets around them is found out, rows are chained: the seal of a row is the sha256 of the seal before it and of
the row. Chaining a row where it is written would make every decision wait for the one before it. So it is written
unsealed, and a sealer chains what is committed, in the order in which it finds it: a row that is committed late comes
later in the chain, however small its id.

To change a row, to move it or to take it out means to make every seal from there on anew. Whoever can do even that is
found out by a head (position and sha256 of the last seal) that was noted elsewhere.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
from collections.abc import AsyncIterator
from dataclasses import asdict, dataclass, is_dataclass
from datetime import UTC, datetime
from typing import Any, Literal

from psycopg import sql
from psycopg.types.json import Jsonb

from flow.database import Connection, Lock, try_lock_until_commit
from flow.errors import BadInput, ChainBroken, RowMissing
from flow.model import Approval
from flow.policy import Policy
from flow.text import canonical, digest

AuditKind = Literal[
    "approval.requested",
    "approval.voted",
    "approval.refused",
    "approval.decided",
    "approval.expired",
    "approval.escalated",
    "approval.withdrawn",
    "approval.superseded",
    "approval.changed",
    "approval.refreshed",
    "approval.tampered",
    "delegation.made",
    "delegation.ended",
    "payment.intended",
    "payment.paid",
    "payment.refused",
    "payment.unknown",
    "payment.resolved",
    "thread.started",
    "thread.retried",
    "token.created",
    "token.revoked",
    "link.made",
    "link.code_made",
    "link.revoked",
    "login.made",
    "webhook.resent",
    "webhook.forgotten",
    "policy.changed",
    "workspace.installed",
    "workspace.uninstalled",
    "workspace.set_up",
    "workspaces.rotated",
    "database.migrated",
]

# Sealed in one transaction, or read at once: some hundred milliseconds at most.
BATCH = 1000

_COLUMNS = sql.SQL("a.id, a.at, a.kind, a.thread_id, a.interrupt_id, a.who, a.door, a.for_whom, a.shown, a.data")


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One row of the log."""

    id: int
    at: datetime
    kind: str
    thread_id: str | None
    interrupt_id: str | None
    who: str
    door: str
    for_whom: str | None
    shown: str | None
    data: dict[str, Any]

    def as_json(self) -> dict[str, Any]:
        """What is printed, exported and sealed. It stays as it is: the seals of all rows depend on it."""
        return {
            "id": self.id,
            "at": self.at.astimezone(UTC).isoformat(),
            "kind": self.kind,
            "thread": self.thread_id,
            "interrupt_id": self.interrupt_id,
            "who": self.who,
            "door": self.door,
            "for_whom": self.for_whom,
            "shown": self.shown,
            "data": self.data,
        }


@dataclass(frozen=True, kw_only=True)
class Head:
    """An end of the chain: how many rows it has, and the last seal."""

    position: int
    sha256: bytes

    @classmethod
    def parse(cls, text: str) -> Head:
        """Of POSITION:SHA256, as `str` writes it. Raises BadInput."""
        match = re.fullmatch(r"([0-9]{1,18}):([0-9a-f]{64})", text)
        if match is None:
            raise BadInput("head", text, "write POSITION:SHA256, as `audit verify` prints it")
        return cls(position=int(match[1]), sha256=bytes.fromhex(match[2]))

    def __str__(self) -> str:
        return f"{self.position}:{self.sha256.hex()}"

    def with_row(self, entry: Entry) -> Head:
        """The chain with this row at its end."""
        sealed = hashlib.sha256(self.sha256 + canonical(entry.as_json()).encode()).digest()
        return Head(position=self.position + 1, sha256=sealed)


# Before the first row.
EMPTY = Head(position=0, sha256=bytes(32))


@dataclass(frozen=True, kw_only=True)
class Sealed:
    """A row in its place in the chain, whose end it was with `head`; no `entry` if the row itself is gone."""

    head: Head
    audit_id: int
    entry: Entry | None

    def as_line(self) -> str:
        """A line of `audit export`. Its seal is of the one before it, and of the line without `position` and `sha256`.

        Raises RowMissing.
        """
        if self.entry is None:
            raise RowMissing(self.audit_id)
        return canonical(self.entry.as_json() | {"position": self.head.position, "sha256": self.head.sha256.hex()})


# Writing


async def record(
    conn: Connection,
    *kinds: AuditKind,
    who: str,
    door: str,
    thread_id: str | None = None,
    interrupt_id: str | None = None,
    for_whom: str | None = None,
    shown: str | None = None,
    data: dict[str, Any] | None = None,
) -> None:
    """Add a row for each kind, in this order, with the same facts. Belongs in the transaction that makes them true.

    `for_whom`: in whose name, or to whom it was given, if that is somebody else. `shown`: the hash of the request that
    they were shown. No secrets: what stands here is never forgotten.
    """
    await conn.execute(
        ENTERED,
        {
            "kinds": list(kinds),
            "thread_id": thread_id,
            "interrupt_id": interrupt_id,
            "who": who,
            "door": door,
            "for_whom": for_whom,
            "shown": shown,
            "data": Jsonb(data or {}),
        },
    )


# The statement, which can also be the end of another one.
ENTERED = (
    "INSERT INTO audit (kind, thread_id, interrupt_id, who, door, for_whom, shown, data)"
    " SELECT kind, %(thread_id)s, %(interrupt_id)s, %(who)s, %(door)s, %(for_whom)s, %(shown)s, %(data)s"
    " FROM unnest(%(kinds)s::text[]) WITH ORDINALITY AS wanted (kind, place) ORDER BY place"
)


async def has(conn: Connection, approval: Approval, kind: AuditKind) -> bool:
    """Whether this has happened to the approval."""
    row = await conn.execute(
        "SELECT FROM audit WHERE thread_id = %s AND interrupt_id = %s AND kind = %s LIMIT 1",
        (approval.thread_id, approval.interrupt_id, kind),
    )
    return await row.fetchone() is not None


def door_of(key: str) -> str:
    """The door that somebody's key names: `cli` of `cli:ann`."""
    return key.partition(":")[0]


async def record_policy(conn: Connection, policy: Policy, *, by: str) -> None:
    """Whoever begins to work with another policy than the last one that was recorded leaves it here, in words."""
    assert is_dataclass(policy) and not isinstance(policy, type)
    rules = json.loads(json.dumps(asdict(policy), default=str))
    fingerprint = digest(rules)
    row = await (
        await conn.execute(
            "SELECT data->>'sha256' AS sha256 FROM audit WHERE kind = 'policy.changed' ORDER BY id DESC LIMIT 1"
        )
    ).fetchone()
    if row is None or row["sha256"] != fingerprint:
        # Two at once may both write it, which says nothing that is wrong.
        data = {"sha256": fingerprint, "tiers": list(policy.words), "rules": rules}
        await record(conn, "policy.changed", who=by, door=door_of(by), data=data)


# Sealing


async def seal(conn: Connection) -> int:
    """Chain up to BATCH rows that are committed and not sealed yet, in a transaction of its own; how many.

    0 also if somebody else is at it: nobody waits. One SELECT if there are none. Raises ChainBroken: what was cut off
    must not be covered by what comes later.
    """
    if await (await conn.execute("SELECT FROM audit_unsealed LIMIT 1")).fetchone() is None:
        return 0
    async with conn.transaction():
        if not await try_lock_until_commit(conn, Lock.AUDIT):
            return 0
        # Only now, in statements of their own: they must see what whoever had the lock before has done.
        head = await _head(conn)
        if head != await _last_seal(conn):
            raise ChainBroken
        sealed = []
        for entry in await _unsealed(conn):
            head = head.with_row(entry)
            sealed.append(Sealed(head=head, audit_id=entry.id, entry=entry))
        if sealed:
            await _append(conn, sealed)
    return len(sealed)


async def seal_all(conn: Connection) -> None:
    """Chain everything that is committed, unless somebody else is at it."""
    while await seal(conn) == BATCH:
        pass


async def _unsealed(conn: Connection) -> list[Entry]:
    # OFFSET 0: row by row. Of a table whose rows all die the database expects more than there are, and would read the
    # whole log beside it. And one that is gone from the log must not stand in the way of those behind it.
    query = sql.SQL(
        "SELECT {} FROM audit_unsealed u CROSS JOIN LATERAL (SELECT * FROM audit WHERE id = u.audit_id OFFSET 0) a"
        " ORDER BY u.audit_id LIMIT %s"
    )
    rows = await conn.execute(query.format(_COLUMNS), (BATCH,))
    return [Entry(**row) for row in await rows.fetchall()]


async def _append(conn: Connection, sealed: list[Sealed]) -> None:
    ids, head = [each.audit_id for each in sealed], sealed[-1].head
    await conn.execute(
        "INSERT INTO audit_seals (position, audit_id, sha256)"
        " SELECT * FROM unnest(%s::bigint[], %s::bigint[], %s::bytea[])",
        ([each.head.position for each in sealed], ids, [each.head.sha256 for each in sealed]),
    )
    await conn.execute("DELETE FROM audit_unsealed WHERE audit_id = ANY(%s)", (ids,))
    await conn.execute("UPDATE audit_head SET position = %s, sha256 = %s", (head.position, head.sha256))


async def _head(conn: Connection) -> Head:
    row = await (await conn.execute("SELECT position, sha256 FROM audit_head")).fetchone()
    return Head(**row) if row else EMPTY


async def _last_seal(conn: Connection) -> Head:
    query = "SELECT position, sha256 FROM audit_seals ORDER BY position DESC LIMIT 1"
    row = await (await conn.execute(query)).fetchone()
    return Head(**row) if row else EMPTY


# Reading


async def latest_entries(
    conn: Connection, *, thread_id: str | None, limit: int, before: int | None = None
) -> list[Entry]:
    """The newest first, by index; of this thread, and with an id below `before`."""
    where = sql.SQL(" AND ").join(
        [
            sql.SQL("a.thread_id = %(thread)s" if thread_id is not None else "true"),
            sql.SQL("a.id < %(before)s" if before is not None else "true"),
        ]
    )
    query = sql.SQL("SELECT {} FROM audit a WHERE {} ORDER BY a.id DESC LIMIT %(limit)s").format(_COLUMNS, where)
    rows = await conn.execute(query, {"thread": thread_id, "before": before, "limit": limit})
    return [Entry(**row) for row in await rows.fetchall()]


async def chain(conn: Connection, *, start: int = 1) -> AsyncIterator[Sealed]:
    """The sealed rows from this position on, in the order of the chain, read in pages: it may be long.

    No transaction is held meanwhile, unless the caller has one: whoever takes the rows may be slow.
    """
    query = sql.SQL(
        "SELECT s.position, s.sha256, s.audit_id, {} FROM audit_seals s LEFT JOIN audit a ON a.id = s.audit_id"
        " WHERE s.position >= %s ORDER BY s.position LIMIT %s"
    ).format(_COLUMNS)
    while rows := await (await conn.execute(query, (start, BATCH))).fetchall():
        for row in rows:
            head = Head(position=row.pop("position"), sha256=row.pop("sha256"))
            audit_id = row.pop("audit_id")
            yield Sealed(head=head, audit_id=audit_id, entry=None if row["id"] is None else Entry(**row))
        start = head.position + 1


# Verifying


@dataclass(frozen=True, kw_only=True)
class Verified:
    """What `verify` found: `wrong` says what is not as it was written, None if nothing is. `waiting` rows are not
    sealed yet."""

    head: Head
    last_id: int | None
    waiting: int
    wrong: str | None

    def in_words(self) -> str:
        """That all is well, and the head to note elsewhere."""
        waiting = f"; {self.waiting} more are not sealed yet" if self.waiting else ""
        upto = f", sealed up to row {self.last_id}" if self.last_id else ""
        return f"{self.head.position} rows{upto}, whole{waiting}\nhead {self.head}"

    def as_json(self) -> dict[str, Any]:
        """The object that `--json` prints."""
        return {
            "whole": self.wrong is None,
            "wrong": self.wrong,
            "rows": self.head.position,
            "last_id": self.last_id,
            "waiting": self.waiting,
            "head": str(self.head),
        }


async def verify(conn: Connection, *, noted: Head | None = None, newest: int | None = None) -> Verified:
    """Seal, then read the whole chain, and find the first row that was changed, taken out, moved or cut off.

    `noted`: a head of earlier, which must still be in the chain. `newest`: look only at so many rows at its end, and
    believe the seal before them, so that a long chain takes no longer than a short one.
    """
    with contextlib.suppress(ChainBroken):
        # What follows finds out in which way.
        await seal_all(conn)
    async with conn.transaction():
        # One view for all that follows, while others write and seal.
        await conn.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ, READ ONLY")
        end, last_id = (EMPTY, None) if newest is None else await _seal_before(conn, newest)
        wrong, believed = _is_not_noted(end, noted), last_id
        async for sealed in chain(conn, start=end.position + 1):
            wrong = wrong or await _is_wrong(conn, sealed, end, last_id) or _is_not_noted(sealed.head, noted)
            if wrong:
                break
            end, last_id = sealed.head, sealed.audit_id
        wrong = wrong or _is_cut_off(end, last_id, await _head(conn), noted)
        wrong = wrong or await _is_beside(conn, since=believed or 0)
        row = await (await conn.execute("SELECT count(*) AS waiting FROM audit_unsealed")).fetchone()
    assert row is not None
    return Verified(head=end, last_id=last_id, waiting=row["waiting"], wrong=wrong)


async def _seal_before(conn: Connection, newest: int) -> tuple[Head, int | None]:
    """The last seal that stands before so many others, and the id of its row; the beginning if there are fewer."""
    query = "SELECT position, sha256, audit_id FROM audit_seals ORDER BY position DESC OFFSET %s LIMIT 1"
    row = await (await conn.execute(query, (newest,))).fetchone()
    return (Head(position=row["position"], sha256=row["sha256"]), row["audit_id"]) if row else (EMPTY, None)


async def _is_wrong(conn: Connection, sealed: Sealed, end: Head, last_id: int | None) -> str | None:
    """In which way this is not what was sealed after `end`."""
    position, audit_id = end.position + 1, sealed.audit_id
    if sealed.head.position != position:
        where = f"between row {last_id} and row {audit_id}" if last_id else f"before row {audit_id}"
        return f"a row {where} is missing: its seal, at position {position}, was taken out, too"
    if sealed.entry is None:
        return f"row {audit_id} is missing: it was sealed at position {position}"
    if end.with_row(sealed.entry) == sealed.head:
        return None
    async for other in chain(conn):
        if other.entry is not None and end.with_row(other.entry) == sealed.head:
            return f"row {audit_id} is out of order: row {other.audit_id} was sealed at its position, {position}"
    return f"row {audit_id}, at position {position}, was changed since it was sealed, or one before it was taken out"


def _is_not_noted(found: Head, noted: Head | None) -> str | None:
    if noted is None or noted.position != found.position or noted == found:
        return None
    return f"the chain was made anew: position {noted.position} had another seal when the head was noted"


def _is_cut_off(end: Head, last_id: int | None, head: Head, noted: Head | None) -> str | None:
    what = (
        f"what came after row {last_id}, at position {end.position}, is cut off" if last_id else "all rows are cut off"
    )
    if end.position < head.position:
        return f"{what}: position {head.position} was sealed"
    if end != head:
        return f"the head was changed: it is {head}, and the chain ends with {end}"
    if noted is not None and noted.position > end.position:
        return f"{what}: position {noted.position} was sealed when the head was noted"
    return None


async def _is_beside(conn: Connection, *, since: int) -> str | None:
    """Whether a row later than `since` is neither sealed nor waits for it, or any waits and is gone."""
    query = (
        "SELECT audit_id FROM audit_unsealed u WHERE NOT EXISTS (SELECT FROM audit a WHERE a.id = u.audit_id) LIMIT 1"
    )
    if row := await (await conn.execute(query)).fetchone():
        return f"row {row['audit_id']} is missing: it was written, and not sealed yet"
    query = (
        "SELECT id FROM audit a WHERE id > %s"
        " AND NOT EXISTS (SELECT FROM audit_seals s WHERE s.audit_id = a.id)"
        " AND NOT EXISTS (SELECT FROM audit_unsealed u WHERE u.audit_id = a.id) ORDER BY id LIMIT 1"
    )
    if row := await (await conn.execute(query, (since,))).fetchone():
        return (
            f"row {row['id']} has no seal and does not wait for one: its seal was taken out, or it came in another way"
        )
    return None
