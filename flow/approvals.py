"""Requests for a decision, and `decide`, the only writer of decisions: every door ends here.

A request is one row per LangGraph interrupt, written by the drive that found the thread waiting. `decide` commits
the verdict, wakes the thread and changes the cards in one transaction; the door answers after that.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any

from psycopg import sql
from psycopg.types.json import Jsonb

from flow import mails, notices, reminders, threads
from flow.database import Connection, Page, newest
from flow.errors import AlreadyDecided, ApprovalExpired, NotAllowed, NothingToDecide, StaleRequest, UnknownApproval
from flow.events import facts_of_approval, record_events
from flow.model import Approval, Decision, EventType, Person, Thread, Verdict
from flow.policy import Tier, is_requester, names_person
from flow.questions import bare, checked_answer, question_of
from flow.text import canonical

_COLUMNS = sql.SQL(
    "interrupt_id, thread_id, tier, request, request_hash, requested_by, approvers, required, status, requested_at,"
    " expires_at, settled_at, withdrawn_by, withdrawn_why"
)


async def request_approval(
    conn: Connection, thread: Thread, *, interrupt_id: str, tier: Tier, request: dict[str, Any], request_hash: str
) -> None:
    """Ask for a decision: the row, the card that shows it, the mails to approvers by address.

    A repeated request changes nothing.
    """
    inserted = await conn.execute(
        sql.SQL(
            "INSERT INTO approvals (interrupt_id, thread_id, tier, request, request_hash, requested_by, approvers,"
            " required, expires_at) VALUES"
            " (%s, %s, %s, %s, %s, %s, %s, %s, clock_timestamp() + %s * interval '1 second')"
            " ON CONFLICT (interrupt_id) DO NOTHING RETURNING {}"
        ).format(_COLUMNS),
        (
            interrupt_id,
            thread.thread_id,
            tier.name,
            Jsonb(request),
            request_hash,
            thread.requested_by,
            list(tier.approvers),
            tier.required,
            tier.expires_after_s,
        ),
    )
    for row in await inserted.fetchall():
        await notices.post_card(conn, interrupt_id, thread.thread_id)
        if tier.remind_every_s:
            every_s, hours = tier.remind_every_s, tier.working_hours
            await reminders.schedule(conn, interrupt_id, row["requested_at"], every_s=every_s, hours=hours)
        await _record_events(conn, _approval(row, ()), "approval.requested")
        await mails.ask_by_mail(conn, interrupt_id, tier.approvers, requested_by=thread.requested_by)


async def supersede(conn: Connection, thread_id: str, *, keep: Sequence[str]) -> None:
    """Close the thread's pending approvals that its flow no longer waits for: a decision on them would do nothing.

    That happens when checkpoints were lost: the flow asks again, under a new interrupt id.
    """
    rows = await conn.execute(
        "UPDATE approvals SET status = 'superseded', settled_at = clock_timestamp()"
        " WHERE thread_id = %s AND status = 'pending' AND interrupt_id <> ALL(%s) RETURNING interrupt_id",
        (thread_id, list(keep)),
    )
    for row in await rows.fetchall():
        await notices.change_card(conn, row["interrupt_id"])


async def approval_of(conn: Connection, interrupt_id: str, *, lock: bool = False) -> Approval:
    """The approval with its decisions. Raises UnknownApproval."""
    query = sql.SQL("SELECT {} FROM approvals WHERE interrupt_id = %s {}").format(
        _COLUMNS, sql.SQL("FOR UPDATE" if lock else "")
    )
    rows = await (await conn.execute(query, (interrupt_id,))).fetchall()
    if not rows:
        raise UnknownApproval(interrupt_id)
    return (await _with_decisions(conn, rows))[0]


async def lock_pending(conn: Connection, interrupt_ids: Sequence[str]) -> None:
    """Let nobody decide these until the transaction ends."""
    await conn.execute(
        "SELECT FROM approvals WHERE interrupt_id = ANY(%s) AND status = 'pending' ORDER BY interrupt_id FOR UPDATE",
        (list(interrupt_ids),),
    )


async def approvals_of(conn: Connection, thread_ids: Sequence[str]) -> dict[str, list[Approval]]:
    """Every approval of these threads by thread id, oldest first."""
    query = sql.SQL("SELECT {} FROM approvals WHERE thread_id = ANY(%s) ORDER BY requested_at").format(_COLUMNS)
    rows = await (await conn.execute(query, (list(thread_ids),))).fetchall()
    found: dict[str, list[Approval]] = {thread_id: [] for thread_id in thread_ids}
    for approval in await _with_decisions(conn, rows):
        found[approval.thread_id].append(approval)
    return found


async def latest_approvals(
    conn: Connection,
    *,
    status: str | None,
    limit: int,
    before: tuple[datetime, str] | None = None,
    only: Page | None = None,
) -> list[Approval]:
    """The newest first, by index; those after `before` (requested_at, interrupt_id), and only such as `only` says."""
    page = newest(("requested_at", "interrupt_id"), before)
    query = sql.SQL(
        "SELECT {} FROM approvals WHERE {} AND {} AND {} ORDER BY requested_at DESC, interrupt_id LIMIT %(limit)s"
    ).format(
        _COLUMNS,
        sql.SQL("status = %(status)s" if status else "true"),
        page.where,
        only.where if only else sql.SQL("true"),
    )
    rows = await conn.execute(query, {"status": status, "limit": limit, **page.values, **(only.values if only else {})})
    return await _with_decisions(conn, await rows.fetchall())


async def latest_decisions(
    conn: Connection, *, limit: int, before: tuple[datetime, str] | None = None
) -> list[tuple[str, str, Decision]]:
    """The newest first, by index, each with its thread and interrupt id; those after `before`, whose name is
    `interrupt_id~person`."""
    values: dict[str, Any] = {"limit": limit}
    where = sql.SQL("true")
    if before is not None:
        at, name = before
        interrupt_id, _, person = name.partition("~")
        where = sql.SQL(
            "d.decided_at <= %(at)s AND (d.decided_at < %(at)s OR (d.interrupt_id, d.person) > (%(id)s, %(person)s))"
        )
        values |= {"at": at, "id": interrupt_id, "person": person}
    rows = await conn.execute(
        sql.SQL(
            "SELECT a.thread_id, d.* FROM decisions d JOIN approvals a USING (interrupt_id) WHERE {}"
            " ORDER BY d.decided_at DESC, d.interrupt_id, d.person LIMIT %(limit)s"
        ).format(where),
        values,
    )
    found = await rows.fetchall()
    return [(row.pop("thread_id"), row.pop("interrupt_id"), Decision(**row)) for row in found]


@dataclass(frozen=True, kw_only=True)
class Decided:
    """What `decide` found or made: the approval as it is now. `recorded` is False if nothing had to be written."""

    approval: Approval
    recorded: bool


async def decide(conn: Connection, interrupt_id: str, person: Person, verdict: Verdict) -> Decided:
    """Record one person's verdict, in a transaction of its own, and settle the approval if that settles it.

    Returns only after the commit, so the door may answer. Safe to repeat: the same verdict again, by anyone who may
    decide, records nothing and succeeds. Raises UnknownApproval, NotAllowed, StaleRequest, ApprovalExpired, or
    AlreadyDecided if the approval was settled the other way.
    """
    async with conn.transaction():
        approval = await approval_of(conn, interrupt_id, lock=True)
        check_person(approval, person)
        if verdict.request_hash not in (None, approval.request_hash):
            raise StaleRequest(interrupt_id)
        if approval.status != "pending":
            _check_same(approval, verdict)
            return Decided(approval=approval, recorded=False)
        await _check_time(conn, approval)
        verdict = replace(verdict, answer=_checked_answer(approval, person, verdict))
        decision = await _record(conn, approval, person, verdict)
        if decision is None:
            return Decided(approval=approval, recorded=False)
        others = [other for other in approval.decisions if other.person != decision.person]
        approval = await _settle_if_decided(conn, replace(approval, decisions=(*others, decision)))
        settled: tuple[EventType, ...] = () if approval.status == "pending" else ("approval.decided",)
        await _record_events(conn, approval, "approval.voted", *settled)
        return Decided(approval=approval, recorded=True)


async def expire_overdue(conn: Connection, *, limit: int = 100) -> int:
    """Settle pending approvals whose time is over as `expired`; how many. Locked ones are being decided: skipped."""
    async with conn.transaction():
        rows = await conn.execute(
            sql.SQL(
                "UPDATE approvals SET status = 'expired', settled_at = clock_timestamp() WHERE interrupt_id IN ("
                "SELECT interrupt_id FROM approvals WHERE status = 'pending' AND expires_at <= clock_timestamp()"
                " ORDER BY expires_at LIMIT %s FOR UPDATE SKIP LOCKED) RETURNING {}"
            ).format(_COLUMNS),
            (limit,),
        )
        expired = await _with_decisions(conn, await rows.fetchall())
        for approval in expired:
            await notices.change_card(conn, approval.interrupt_id)
            await _record_events(conn, approval, "approval.expired")
            await threads.wake(conn, approval.thread_id)
    return len(expired)


async def withdraw(conn: Connection, thread_id: str, person: Person, reason: str = "") -> None:
    """Take back what a thread waits for, in a transaction of its own: its flow hears of it, and a claim ends unpaid.

    Whoever asked may, and the command line. Safe to repeat: what was taken back before is a success that records
    nothing. Raises NotAllowed, NothingToDecide, UnknownThread.
    """
    async with conn.transaction():
        thread = await threads.thread_of(conn, thread_id)
        if not person.trusted and not is_requester(thread.requested_by, person):
            raise NotAllowed(person.name, "only whoever asked for it takes a request back")
        rows = await conn.execute(
            sql.SQL(
                "UPDATE approvals SET status = 'withdrawn', settled_at = clock_timestamp(), withdrawn_by = %s,"
                " withdrawn_why = %s WHERE interrupt_id IN (SELECT interrupt_id FROM approvals"
                " WHERE thread_id = %s AND status = 'pending' ORDER BY interrupt_id FOR UPDATE) RETURNING {}"
            ).format(_COLUMNS),
            (person.key, reason, thread_id),
        )
        withdrawn = await _with_decisions(conn, await rows.fetchall())
        if not withdrawn:
            await _check_withdrawn(conn, thread)
            return
        await threads.wake(conn, thread_id)
        for approval in withdrawn:
            await notices.change_card(conn, approval.interrupt_id)
            await _record_events(conn, approval, "approval.withdrawn")


async def _check_withdrawn(conn: Connection, thread: Thread) -> None:
    """Pass if the last request of the thread was taken back before."""
    asked = (await approvals_of(conn, [thread.thread_id]))[thread.thread_id]
    if not asked or asked[-1].status != "withdrawn":
        was = f"its last request was {asked[-1].status}" if asked else f"it is {thread.status}"
        raise NothingToDecide(thread.thread_id, was)


def check_person(approval: Approval, person: Person) -> None:
    """Raise NotAllowed, which says why, unless the policy lets this person decide this approval."""
    if person.trusted:
        return
    if is_requester(approval.requested_by, person):
        raise NotAllowed(person.name, "nobody decides a request of their own")
    if not names_person(approval.approvers, person):
        who = (
            ", ".join(approval.approvers)
            or "nobody is, so only the command line can: set APPROVERS, or the tier's approvers"
        )
        raise NotAllowed(person.name, f"not on the list of approvers ({who})")


def _checked_answer(approval: Approval, person: Person, verdict: Verdict) -> dict[str, Any] | None:
    """What the verdict says beyond yes or no. Those who approve must say the same. Raises BadInput, NotAllowed."""
    answer = checked_answer(question_of(approval.request), verdict.verdict, verdict.answer)
    for other in approval.decisions:
        if verdict.verdict == other.verdict == "approve" and canonical(other.answer) != canonical(answer):
            raise NotAllowed(person.name, f"{other.person_name} has approved it with another answer: reject it instead")
    return answer


def _check_same(approval: Approval, verdict: Verdict) -> None:
    """Pass if the settled approval says what the verdict says."""
    by = approval.settled_by
    same = by is not None and (verdict.answer is None or canonical(bare(verdict.answer)) == canonical(by.answer))
    if same and approval.status == {"approve": "approved", "reject": "rejected"}[verdict.verdict]:
        return
    if approval.status == "expired" and approval.settled_at is not None:
        raise ApprovalExpired(approval.interrupt_id, approval.expires_at or approval.settled_at)
    who = by.person_name if by else approval.withdrawn_by or "the flow"
    raise AlreadyDecided(approval.interrupt_id, approval.status, who, approval.settled_at)


async def _check_time(conn: Connection, approval: Approval) -> None:
    """The database's clock is the only one: two machines must not disagree about a deadline."""
    if approval.expires_at is None:
        return
    row = await (await conn.execute("SELECT %s <= clock_timestamp() AS over", (approval.expires_at,))).fetchone()
    if row is None or row["over"]:
        raise ApprovalExpired(approval.interrupt_id, approval.expires_at)


async def _record(conn: Connection, approval: Approval, person: Person, verdict: Verdict) -> Decision | None:
    """Write the verdict; None if this person has given it before.

    While the approval is pending an approve may be turned into a reject, never back.
    """
    rows = await conn.execute(
        "INSERT INTO decisions (interrupt_id, person, person_name, verdict, door, reason, answer)"
        " VALUES (%s, %s, %s, %s, %s, %s, %s) ON CONFLICT (interrupt_id, person) DO UPDATE"
        " SET verdict = EXCLUDED.verdict, door = EXCLUDED.door, reason = EXCLUDED.reason, answer = EXCLUDED.answer,"
        " decided_at = EXCLUDED.decided_at WHERE decisions.verdict = 'approve' AND EXCLUDED.verdict = 'reject'"
        " RETURNING person, person_name, verdict, door, reason, decided_at, answer",
        (
            approval.interrupt_id,
            person.key,
            person.name,
            verdict.verdict,
            verdict.door,
            verdict.reason,
            Jsonb(verdict.answer) if verdict.answer is not None else None,
        ),
    )
    row = await rows.fetchone()
    return Decision(**row) if row else None


async def _settle_if_decided(conn: Connection, approval: Approval) -> Approval:
    """The approval as it is with its newest decision: settled, or still pending."""
    verdicts = [decision.verdict for decision in approval.decisions]
    await notices.change_card(conn, approval.interrupt_id)
    if "reject" in verdicts:
        status = "rejected"
    elif verdicts.count("approve") >= approval.required:
        status = "approved"
    else:
        return approval
    rows = await conn.execute(
        "UPDATE approvals SET status = %s, settled_at = clock_timestamp() WHERE interrupt_id = %s"
        " RETURNING status, settled_at",
        (status, approval.interrupt_id),
    )
    row = await rows.fetchone()
    assert row is not None
    await threads.wake(conn, approval.thread_id)
    return replace(approval, **row)


async def _with_decisions(conn: Connection, rows: Sequence[dict[str, Any]]) -> list[Approval]:
    if not rows:
        return []
    cursor = await conn.execute(
        "SELECT interrupt_id, person, person_name, verdict, door, reason, decided_at, answer FROM decisions"
        " WHERE interrupt_id = ANY(%s) ORDER BY decided_at",
        ([row["interrupt_id"] for row in rows],),
    )
    made: dict[str, list[Decision]] = {}
    for decision in await cursor.fetchall():
        made.setdefault(decision.pop("interrupt_id"), []).append(Decision(**decision))
    return [_approval(row, made.get(row["interrupt_id"], ())) for row in rows]


def _approval(row: dict[str, Any], decisions: Sequence[Decision]) -> Approval:
    return Approval(**row | {"approvers": tuple(row["approvers"]), "decisions": tuple(decisions)})


async def _record_events(conn: Connection, approval: Approval, *types: EventType) -> None:
    data = facts_of_approval(approval)
    await record_events(conn, approval.thread_id, *types, data=data, interrupt_id=approval.interrupt_id)
