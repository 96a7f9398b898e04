"""Links: one person's way to decide one approval, once. Whoever holds the token is taken for that person.

A link is spent in the transaction of the decision that it made. It ends with its approval; it can be revoked. Above
the step-up limit a code is wanted too, which never travels with the link.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from decimal import Decimal
from typing import Any

from psycopg import sql

from flow import approvals
from flow.approvals import Decided
from flow.audit import AuditKind, door_of, record
from flow.database import Connection, ring
from flow.delegations import with_absent
from flow.errors import CodeWrong, LinkGone, NoLink
from flow.inputs import mail_person
from flow.model import Approval, Person, Verdict
from flow.questions import bare
from flow.sessions import digest_of, new_token
from flow.standing import check_person

# Of a million codes: whoever has the link but not the code gets through once in 200,000 times.
CODE_TRIES = 5

_COLUMNS = sql.SQL("id, interrupt_id, person, code_sha256, code_tries, used_at, revoked_at")


@dataclass(frozen=True, kw_only=True)
class Link:
    """One link, as its row says. It has a code if `code_sha256` is there."""

    id: int
    interrupt_id: str
    person: str
    code_sha256: bytes | None
    code_tries: int
    used_at: datetime | None
    revoked_at: datetime | None

    @property
    def owner(self) -> Person:
        return mail_person(self.person)

    @property
    def tries_left(self) -> int:
        """How often a code may still be tried; 0 if there is none."""
        return CODE_TRIES - self.code_tries if self.code_sha256 is not None else 0


@dataclass(frozen=True, kw_only=True)
class NewLink:
    """What is shown once, and kept nowhere."""

    token: str
    code: str | None


def wants_code(request: Mapping[str, Any], step_up_over: Decimal | None) -> bool:
    """Whether a link alone is not enough for this amount. One that cannot be read is too much."""
    if step_up_over is None:
        return False
    try:
        return not Decimal(request["amount"]) <= step_up_over
    except (KeyError, ArithmeticError, TypeError):
        return True


async def make_link(conn: Connection, approval: Approval, person: Person, *, by: str, with_code: bool) -> NewLink:
    """A link for this person, in the place of any that they have. Raises NotAllowed if they may not decide it."""
    check_person(approval, await with_absent(conn, person))
    token, code = new_token(), _new_code() if with_code else None
    async with conn.transaction():
        # Two at once would both find nothing to revoke.
        await approvals.approval_of(conn, approval.interrupt_id, lock=True)
        replaced = await _revoke(conn, approval.interrupt_id, person)
        row = await (
            await conn.execute(
                "INSERT INTO links (interrupt_id, person, tokens_sha256, made_by) VALUES (%s, %s, %s, %s) RETURNING id",
                (approval.interrupt_id, person.key, [digest_of(token)], by),
            )
        ).fetchone()
        assert row is not None
        if code is not None:
            await _set_code(conn, row["id"], code)
        await _audit(conn, "link.made", approval, person, by, with_code=with_code, replaces_another=replaced)
        await ring(conn)
    return NewLink(token=token, code=code)


async def make_code(conn: Connection, approval: Approval, person: Person, *, by: str) -> str:
    """A new code, with five new tries, for the open link that this person has. Raises NoLink."""
    code = _new_code()
    async with conn.transaction():
        query = sql.SQL(
            "SELECT {} FROM links WHERE interrupt_id = %s AND person = %s AND used_at IS NULL AND revoked_at IS NULL"
            " FOR UPDATE"
        ).format(_COLUMNS)
        row = await (await conn.execute(query, (approval.interrupt_id, person.key))).fetchone()
        if row is None:
            raise NoLink(approval.thread_id, person.name)
        await _set_code(conn, row["id"], code)
        await _audit(conn, "link.code_made", approval, person, by)
    return code


async def revoke_link(conn: Connection, approval: Approval, person: Person, *, by: str) -> None:
    """Refuse the link that this person has from now on. Raises NoLink."""
    async with conn.transaction():
        if not await _revoke(conn, approval.interrupt_id, person):
            raise NoLink(approval.thread_id, person.name)
        await _audit(conn, "link.revoked", approval, person, by)
        await ring(conn)


async def link_of(conn: Connection, token: str) -> Link | None:
    """The link with this token, open or not; it stays as it is."""
    return await _link(conn, token, lock=False)


async def spend(conn: Connection, token: str, verdict: Verdict, *, code: str, step_up: bool) -> Decided:
    """Decide as the link's person, and spend the link in the same transaction.

    Safe to repeat: the verdict that the link was spent on records nothing and succeeds. Raises LinkGone, CodeWrong
    (the try is counted), and whatever `decide` raises; then the link is as it was.
    """
    found = await _link(conn, token, lock=False)
    if found is None:
        raise LinkGone("it is long over, or was copied in part")
    interrupt_id, door, shown = found.interrupt_id, verdict.door, verdict.request_hash
    kept = approvals.refusals_kept(conn, interrupt_id, found.owner, door=door, shown=shown)
    async with kept, conn.transaction():
        # First the approval, then the link, as whoever makes a link does.
        approval = await approvals.approval_of(conn, interrupt_id, lock=True)
        link = await _link(conn, token, lock=True)
        if link is None or link.revoked_at is not None:
            raise LinkGone("it was revoked, or copied in part")
        if link.used_at is not None:
            return await _same_again(conn, link, verdict)
        if not step_up or await _try_code(conn, link, code):
            decided = await approvals.decide(conn, link.interrupt_id, link.owner, verdict)
            await conn.execute("UPDATE links SET used_at = clock_timestamp() WHERE id = %s", (link.id,))
            return decided
        await record(
            conn,
            "approval.refused",
            who=link.person,
            door=verdict.door,
            thread_id=approval.thread_id,
            interrupt_id=link.interrupt_id,
            shown=verdict.request_hash,
            data={"verdict": verdict.verdict, "reason": "the code is wrong"},
        )
    # Only now: the try must stay counted.
    raise CodeWrong(max(link.tries_left - 1, 0))


async def _link(conn: Connection, token: str, *, lock: bool) -> Link | None:
    query = sql.SQL("SELECT {} FROM links WHERE tokens_sha256 @> ARRAY[%s::bytea] {}").format(
        _COLUMNS, sql.SQL("FOR UPDATE" if lock else "")
    )
    row = await (await conn.execute(query, (digest_of(token),))).fetchone()
    return Link(**row) if row else None


async def _same_again(conn: Connection, link: Link, verdict: Verdict) -> Decided:
    """A button that was pressed twice is no second use, for as long as the vote counts."""
    approval = await approvals.approval_of(conn, link.interrupt_id)
    for vote in approval.votes:
        same = vote.verdict == verdict.verdict and vote.answer == bare(verdict.answer)
        if vote.person == link.person and same:
            return Decided(approval=approval, recorded=False)
    raise LinkGone("it was used before")


async def _try_code(conn: Connection, link: Link, code: str) -> bool:
    """Whether the code is right; if it is not, one try less is left. The caller holds the link's row."""
    if link.code_sha256 is None or link.tries_left <= 0:
        return False
    if hmac.compare_digest(link.code_sha256, _code_digest(link.id, code)):
        return True
    await conn.execute("UPDATE links SET code_tries = code_tries + 1 WHERE id = %s", (link.id,))
    return False


async def _audit(conn: Connection, kind: AuditKind, approval: Approval, person: Person, by: str, **data: bool) -> None:
    await record(
        conn,
        kind,
        who=by,
        door=door_of(by),
        thread_id=approval.thread_id,
        interrupt_id=approval.interrupt_id,
        for_whom=person.key,
        data=data,
    )


async def _revoke(conn: Connection, interrupt_id: str, person: Person) -> bool:
    rows = await conn.execute(
        "UPDATE links SET revoked_at = clock_timestamp(), mail_due_at = NULL"
        " WHERE interrupt_id = %s AND person = %s AND used_at IS NULL AND revoked_at IS NULL",
        (interrupt_id, person.key),
    )
    return bool(rows.rowcount)


async def _set_code(conn: Connection, link_id: int, code: str) -> None:
    await conn.execute(
        "UPDATE links SET code_sha256 = %s, code_tries = 0 WHERE id = %s", (_code_digest(link_id, code), link_id)
    )


def _new_code() -> str:
    return f"{secrets.randbelow(1_000_000):06}"


def _code_digest(link_id: int, code: str) -> bytes:
    return hashlib.sha256(f"{link_id} {code}".encode("utf-8", "surrogateescape")).digest()
