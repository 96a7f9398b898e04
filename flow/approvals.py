"""Requests for a decision, and `decide`, the only writer of decisions: every door ends here.

A request is one row per LangGraph interrupt, written by the drive that found the thread waiting. `decide` commits
the verdict, wakes the thread and changes the cards in one transaction; the door answers after that.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any

from psycopg import sql
from psycopg.types.json import Jsonb

from flow import audit, counts, inputs, mails, notices, reminders, threads
from flow.database import Connection, Page, newest
from flow.delegations import with_absent
from flow.errors import (
    AlreadyDecided,
    ApprovalExpired,
    FlowError,
    GroupsUnknown,
    LinkGone,
    NotAllowed,
    PageNeeded,
    StaleRequest,
    Tampered,
    UnknownApproval,
)
from flow.events import facts_of_approval, record_told
from flow.log import concerning
from flow.model import Approval, ApprovalEventType, Decision, Person, Thread, Verdict
from flow.policy import Tier
from flow.questions import bare, checked_answer, question_of
from flow.standing import Standing, check_person, escalates
from flow.text import bare_name, canonical
from flow.workspaces import reaches

log = logging.getLogger(__name__)

COLUMNS = sql.SQL(
    "interrupt_id, thread_id, tier, request, request_hash, requested_by, approvers, required, status, requested_at,"
    " expires_at, settled_at, withdrawn_by, withdrawn_why, rank, on_expiry, escalate_to, expires_after_s, escalated_at,"
    " self_approval, step_up, post_to, channel, changed_to - 'for' AS changed_to, changed_to->>'for' AS changed_for,"
    " changed_by, changed_why, raised_by, step, steps, workspace,"
    " coalesce(fingerprint = approval_fingerprint(approvals), status <> 'pending') AS whole"
)
# What somebody is told instead of having decided; a value that cannot be used is none of these.
_REFUSALS = (NotAllowed, StaleRequest, PageNeeded, Tampered, ApprovalExpired, AlreadyDecided, LinkGone)

_DECISION = "person, person_name, verdict, door, reason, decided_at, answer, for_person, for_name, listed_as, void"
# For whoever holds no row.
_WITH_DECISIONS = sql.SQL(
    "{}, (SELECT coalesce(json_agg(d ORDER BY decided_at), '[]') FROM (SELECT "
    + _DECISION
    + " FROM decisions WHERE interrupt_id = approvals.interrupt_id) AS d) AS decisions"
).format(COLUMNS)


async def request_approval(
    conn: Connection,
    thread: Thread,
    *,
    interrupt_id: str,
    tier: Tier,
    request: dict[str, Any],
    request_hash: str,
    step: tuple[int, int] | None = None,
) -> None:
    """Ask for a decision: the row, the card that shows it, the mails to approvers by address.

    A repeated request changes nothing.
    """
    inserted = await conn.execute(
        sql.SQL(
            "INSERT INTO approvals (interrupt_id, thread_id, tier, request, request_hash, requested_by, raised_by,"
            " approvers, required, rank, expires_after_s, on_expiry, escalate_to, self_approval, step_up, post_to,"
            " channel, step, steps, workspace, requested_at, expires_at)"
            " SELECT %s, thread_id, %s, %s, %s, %s, coalesce(raised_by, '{{}}'), %s,"
            " %s, %s, %s, %s, %s, %s, %s, %s, %s, %s, %s, workspace, now, now + %s * interval '1 second'"
            " FROM threads, clock_timestamp() AS now WHERE thread_id = %s"
            " ON CONFLICT (interrupt_id) DO NOTHING RETURNING {}"
        ).format(COLUMNS),
        (
            interrupt_id,
            tier.name,
            Jsonb(request),
            request_hash,
            thread.requested_by,
            list(tier.approvers),
            tier.required,
            tier.rank,
            tier.expires_after_s,
            tier.on_expiry,
            list(tier.escalate_to),
            tier.self_approval,
            tier.step_up,
            tier.post_to,
            tier.channel,
            *(step or (None, None)),
            tier.expires_after_s,
            thread.thread_id,
        ),
    )
    for row in await inserted.fetchall():
        await notices.post_card(conn, interrupt_id, thread.thread_id)
        if tier.remind_every_s:
            every_s, hours = tier.remind_every_s, tier.working_hours
            await reminders.schedule(conn, interrupt_id, row["requested_at"], every_s=every_s, hours=hours)
        rules = {"approvers": list(tier.approvers), "required": tier.required}
        approval, by = _approval(row | {"decisions": ()}), f"flow:{thread.flow}"
        await record_changes(
            conn,
            approval,
            "approval.requested",
            who=by,
            door="flow",
            for_whom=thread.requested_by,
            data=rules,
        )
        await mails.ask_by_mail(conn, approval, tier.approvers)


async def supersede(conn: Connection, thread_id: str, *, keep: Sequence[str]) -> None:
    """Close the thread's pending approvals that its flow no longer waits for: a decision on them would do nothing.

    That happens when checkpoints were lost: the flow asks again, under a new interrupt id.
    """
    rows = await conn.execute(
        "UPDATE approvals SET status = 'superseded', settled_at = clock_timestamp()"
        " WHERE thread_id = %s AND status = 'pending' AND interrupt_id <> ALL(%s) RETURNING interrupt_id, request_hash",
        (thread_id, list(keep)),
    )
    for row in await rows.fetchall():
        interrupt_id = row["interrupt_id"]
        await notices.change_card(conn, interrupt_id)
        await audit.record(
            conn,
            "approval.superseded",
            who="flow",
            door="flow",
            thread_id=thread_id,
            interrupt_id=interrupt_id,
            shown=row["request_hash"],
        )


async def waiting_threads(conn: Connection) -> list[str]:
    """Whatever waits for a decision, oldest first, by index."""
    rows = await conn.execute("SELECT thread_id FROM approvals WHERE status = 'pending' ORDER BY requested_at")
    return list(dict.fromkeys(row["thread_id"] for row in await rows.fetchall()))


async def approval_of(conn: Connection, interrupt_id: str, *, lock: bool = False) -> Approval:
    """The approval with its decisions. Raises UnknownApproval."""
    query = sql.SQL("SELECT {} FROM approvals WHERE interrupt_id = %s {}").format(
        *((COLUMNS, sql.SQL("FOR UPDATE")) if lock else (_WITH_DECISIONS, sql.SQL("")))
    )
    rows = await (await conn.execute(query, (interrupt_id,))).fetchall()
    if not rows:
        raise UnknownApproval(interrupt_id)
    return (await with_decisions(conn, rows))[0] if lock else _approval(rows[0])


async def approval_for(conn: Connection, person: Person, interrupt_id: str, *, lock: bool = False) -> Approval:
    """The same for somebody who says the id. What is of another workspace is as unknown to them as what is not there.

    Raises UnknownApproval.
    """
    approval = await approval_of(conn, interrupt_id, lock=lock)
    if not reaches(person, approval.workspace):
        raise UnknownApproval(interrupt_id)
    return approval


async def lock_pending(conn: Connection, interrupt_ids: Sequence[str]) -> None:
    """Let nobody decide these until the transaction ends."""
    await conn.execute(
        "SELECT FROM approvals WHERE interrupt_id = ANY(%s) AND status = 'pending' ORDER BY interrupt_id FOR UPDATE",
        (list(interrupt_ids),),
    )


async def approvals_of(conn: Connection, thread_ids: Sequence[str]) -> dict[str, list[Approval]]:
    """Every approval of these threads by thread id, oldest first."""
    query = sql.SQL("SELECT {} FROM approvals WHERE thread_id = ANY(%s) ORDER BY requested_at").format(_WITH_DECISIONS)
    rows = await conn.execute(query, (list(thread_ids),))
    found: dict[str, list[Approval]] = {thread_id: [] for thread_id in thread_ids}
    for approval in map(_approval, await rows.fetchall()):
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
    page = newest(("requested_at", "interrupt_id"), before, only)
    query = sql.SQL(
        "SELECT {} FROM approvals WHERE {} AND {} ORDER BY requested_at DESC, interrupt_id LIMIT %(limit)s"
    ).format(_WITH_DECISIONS, sql.SQL("status = %(status)s" if status else "true"), page.where)
    rows = await conn.execute(query, {"status": status, "limit": limit, **page.values})
    return [_approval(row) for row in await rows.fetchall()]


async def latest_decisions(
    conn: Connection, *, limit: int, before: tuple[datetime, str] | None = None, only: Page | None = None
) -> list[tuple[str, str, Decision]]:
    """The newest first, by index, each with its thread and interrupt id; those after `before`, whose name is
    `interrupt_id~person`, and only on such approvals as `only` says."""
    only = only or Page(where=sql.SQL("true"), values={})
    values, where = {"limit": limit, **only.values}, only.where
    if before is not None:
        at, name = before
        interrupt_id, _, person = name.partition("~")
        where = sql.SQL(
            "{} AND d.decided_at <= %(at)s"
            " AND (d.decided_at < %(at)s OR (d.interrupt_id, d.person) > (%(id)s, %(person)s))"
        ).format(where)
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
    decide, records nothing and succeeds. Raises UnknownApproval, NotAllowed, StaleRequest, PageNeeded, Tampered,
    ApprovalExpired, or AlreadyDecided if the approval was settled the other way.
    """
    decided = await _decide(conn, interrupt_id, person, verdict)
    if decided.recorded:
        counts.decisions.add(verdict.door, verdict.verdict)
        with concerning(thread=decided.approval.thread_id, interrupt=interrupt_id, approver=person.key):
            log.info("decided: %s, through %s", verdict.verdict, verdict.door)
    return decided


async def _decide(conn: Connection, interrupt_id: str, person: Person, verdict: Verdict) -> Decided:
    async with (
        refusals_kept(conn, interrupt_id, person, door=verdict.door, shown=verdict.request_hash),
        conn.transaction(),
    ):
        approval = await approval_for(conn, person, interrupt_id, lock=True)
        standing = await _checked(conn, approval, person, verdict.request_hash)
        if verdict.answer is not None:
            # Arguments of an action are within a step, a list and the answer.
            inputs.check_depth("answer", verdict.answer, around=3)
        if approval.status != "pending":
            _check_same(approval, verdict)
            return Decided(approval=approval, recorded=False)
        await _check_time(conn, approval)
        if approval.step_up and (verdict.door, verdict.verdict) == ("slack", "approve"):
            raise PageNeeded(interrupt_id)
        verdict = replace(verdict, answer=_checked_answer(approval, person, verdict))
        decision = await _record(conn, approval, person, standing, verdict)
        if decision is None:
            return Decided(approval=approval, recorded=False)
        others = [other for other in approval.decisions if other.person != decision.person]
        approval = await settle_if_decided(conn, replace(approval, decisions=(*others, decision)))
        settled: tuple[ApprovalEventType, ...] = () if approval.status == "pending" else ("approval.decided",)
        await record_changes(
            conn,
            approval,
            "approval.voted",
            *settled,
            who=person.key,
            door=verdict.door,
            for_whom=decision.for_person,
            data=_said(decision),
        )
        return Decided(approval=approval, recorded=True)


@contextlib.asynccontextmanager
async def refusals_kept(
    conn: Connection, interrupt_id: str, person: Person, *, door: str, shown: str | None
) -> AsyncIterator[None]:
    """Whoever is refused is kept in the audit log, after what they began was rolled back.

    Who is about to decide a request that was changed past us has the operators told, if that was not seen before: the
    database itself sees it, unless whoever did it has turned that off.
    """
    try:
        yield
    except GroupsUnknown:
        # Not refused yet.
        raise
    except _REFUSALS as exc:
        async with conn.transaction():
            approval = await approval_of(conn, interrupt_id, lock=isinstance(exc, Tampered))
            also: tuple[audit.AuditKind, ...] = ()
            if isinstance(exc, Tampered) and not await audit.has(conn, approval, "approval.tampered"):
                also = ("approval.tampered",)
                await notices.raise_alarm(conn, approval.thread_id, tampered=interrupt_id)
            await record_refusal(conn, approval, person, exc, *also, door=door, shown=shown)
        raise


async def record_refusal(
    conn: Connection,
    approval: Approval,
    person: Person,
    why: Exception,
    *also: audit.AuditKind,
    door: str,
    shown: str | None,
) -> None:
    """Keep in the audit log who was refused and why, and what else it shows; in the caller's transaction."""
    await audit.record(
        conn,
        "approval.refused",
        *also,
        who=person.key,
        door=door,
        thread_id=approval.thread_id,
        interrupt_id=approval.interrupt_id,
        shown=shown,
        data={"name": person.name, "why": str(why), "status": approval.status},
    )


async def check_decidable(
    conn: Connection, approval: Approval, person: Person, *, request_hash: str | None
) -> Standing:
    """As whom this person can decide this now. The caller holds its row. Raises whatever `decide` does."""
    standing = await _checked(conn, approval, person, request_hash)
    if approval.status != "pending":
        raise _settled_otherwise(approval)
    await _check_time(conn, approval)
    return standing


async def _checked(conn: Connection, approval: Approval, person: Person, request_hash: str | None) -> Standing:
    """Whether this person decides what they were shown, as it was asked."""
    if not approval.whole:
        raise Tampered(approval.interrupt_id)
    standing = await _standing(conn, approval, person)
    if request_hash not in (None, approval.request_hash):
        raise StaleRequest(approval.interrupt_id)
    return standing


async def _standing(conn: Connection, approval: Approval, person: Person) -> Standing:
    """As whom they decide. Those who are away are looked for only if they matter, and now: whom the person stood in for
    when their page was opened may be back."""
    try:
        return check_person(approval, replace(person, acts_for=()))
    except GroupsUnknown:
        raise
    except NotAllowed as exc:
        acting = await with_absent(conn, person)
        if not acting.acts_for:
            raise exc from None
    return check_person(approval, acting)


async def renew_fingerprint(conn: Connection, interrupt_id: str) -> None:
    """We have changed its rules ourselves."""
    await conn.execute(
        "UPDATE approvals a SET fingerprint = approval_fingerprint(a) WHERE interrupt_id = %s", (interrupt_id,)
    )


def _checked_answer(approval: Approval, person: Person, verdict: Verdict) -> dict[str, Any] | None:
    """What the verdict says beyond yes or no. Those who approve must say the same. Raises BadInput, NotAllowed."""
    answer = checked_answer(question_of(approval.request), verdict.verdict, verdict.answer)
    for other in approval.votes:
        if verdict.verdict == other.verdict == "approve" and canonical(other.answer) != canonical(answer):
            raise NotAllowed(person.name, f"{other.person_name} has approved it with another answer: reject it instead")
    return answer


def _check_same(approval: Approval, verdict: Verdict) -> None:
    """Pass if the settled approval says what the verdict says."""
    by = approval.settled_by
    same = by is not None and (verdict.answer is None or canonical(bare(verdict.answer)) == canonical(by.answer))
    if same and approval.status == {"approve": "approved", "reject": "rejected"}[verdict.verdict]:
        return
    raise _settled_otherwise(approval)


def _settled_otherwise(approval: Approval) -> FlowError:
    if approval.status == "expired" and approval.settled_at is not None:
        return ApprovalExpired(approval.interrupt_id, approval.expires_at or approval.settled_at)
    by = approval.settled_by
    who = by.who if by else approval.withdrawn_by or approval.changer(str) or "the flow"
    return AlreadyDecided(approval.interrupt_id, approval.status, who, approval.settled_at)


async def _check_time(conn: Connection, approval: Approval) -> None:
    """The database's clock is the only one: two machines must not disagree about a deadline."""
    if approval.expires_at is None or escalates(approval):
        return
    row = await (await conn.execute("SELECT %s <= clock_timestamp() AS over", (approval.expires_at,))).fetchone()
    if row is None or row["over"]:
        raise ApprovalExpired(approval.interrupt_id, approval.expires_at)


async def _record(
    conn: Connection, approval: Approval, person: Person, standing: Standing, verdict: Verdict
) -> Decision | None:
    """Write the verdict; None if this voice has given it before, by whomever.

    While the approval is pending an approve may be turned into a reject, never back. One that is void is as none.
    """
    absent = standing.absent
    voice = bare_name(absent.key if absent else person.key)
    for vote in approval.votes:
        if vote.voice == voice and vote.verdict == verdict.verdict:
            return None
        if vote.voice == voice and absent and vote.person != person.key:
            raise NotAllowed(person.name, f"{absent.name} has decided it already")
        if vote.person == person.key and vote.voice != voice:
            raise NotAllowed(person.name, f"they have decided it as {vote.who} already, and one person has one vote")
    rows = await conn.execute(
        "INSERT INTO decisions (interrupt_id, person, person_name, verdict, door, reason, answer, for_person, for_name,"
        " listed_as) VALUES (%s, %s, %s, %s, %s, %s, %s, %s, %s, %s) ON CONFLICT (interrupt_id, person) DO UPDATE"
        " SET verdict = EXCLUDED.verdict, door = EXCLUDED.door, reason = EXCLUDED.reason, answer = EXCLUDED.answer,"
        " for_person = EXCLUDED.for_person, for_name = EXCLUDED.for_name, listed_as = EXCLUDED.listed_as,"
        " void = false, decided_at = EXCLUDED.decided_at"
        " WHERE decisions.void OR (decisions.verdict = 'approve' AND EXCLUDED.verdict = 'reject')"
        f" RETURNING {_DECISION}",
        (
            approval.interrupt_id,
            person.key,
            person.name,
            verdict.verdict,
            verdict.door,
            verdict.reason,
            Jsonb(verdict.answer) if verdict.answer is not None else None,
            absent.key if absent else None,
            absent.name if absent else None,
            standing.listed_as,
        ),
    )
    row = await rows.fetchone()
    return Decision(**row) if row else None


async def settle_if_decided(conn: Connection, approval: Approval) -> Approval:
    """The approval as it is with its newest decisions: settled, or still pending."""
    await notices.change_card(conn, approval.interrupt_id)
    if any(vote.verdict == "reject" for vote in approval.votes):
        status = "rejected"
    elif approval.approvals_given >= approval.required:
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


async def with_decisions(conn: Connection, rows: Sequence[dict[str, Any]]) -> list[Approval]:
    """The approvals of rows that the caller holds. By a statement of its own: of those who held them before it sees
    what they have written, which the statement that waited for them does not."""
    if not rows:
        return []
    cursor = await conn.execute(
        f"SELECT interrupt_id, {_DECISION} FROM decisions WHERE interrupt_id = ANY(%s) ORDER BY decided_at",
        ([row["interrupt_id"] for row in rows],),
    )
    made: dict[str, list[Decision]] = {}
    for decision in await cursor.fetchall():
        made.setdefault(decision.pop("interrupt_id"), []).append(Decision(**decision))
    return [_approval(row | {"decisions": made.get(row["interrupt_id"], ())}) for row in rows]


def _approval(row: dict[str, Any]) -> Approval:
    """Of a row with its decisions, as values or as JSON."""
    lists = {name: tuple(row[name]) for name in ("approvers", "escalate_to", "raised_by")}
    decisions = tuple(each if isinstance(each, Decision) else _decision(each) for each in row["decisions"])
    return Approval(**row | lists | {"decisions": decisions})


def _decision(said: dict[str, Any]) -> Decision:
    return Decision(**said | {"decided_at": datetime.fromisoformat(said["decided_at"])})


async def record_changes(
    conn: Connection,
    approval: Approval,
    *types: ApprovalEventType,
    who: str,
    door: str,
    for_whom: str | None = None,
    data: dict[str, Any] | None = None,
) -> None:
    """This has happened to the approval, as it is now: for programs, and for the audit log."""
    await record_told(
        conn,
        approval.thread_id,
        *types,
        facts=facts_of_approval(approval),
        who=who,
        door=door,
        interrupt_id=approval.interrupt_id,
        for_whom=for_whom,
        shown=approval.request_hash,
        data={"tier": approval.tier, "status": approval.status} | (data or {}),
    )


def _said(decision: Decision) -> dict[str, Any]:
    """A vote in the audit log. Nobody on the list, at the command line, overrides it."""
    override = {"override": True} if decision.listed_as is None else {"listed_as": decision.listed_as}
    answer = {"answer": decision.answer} if decision.answer is not None else {}
    return {"name": decision.who, "verdict": decision.verdict, "reason": decision.reason} | override | answer
