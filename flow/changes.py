"""What changes a pending request on purpose: another amount, somebody who takes it back, the policy of today.

Another amount is another request. The old one is superseded with every vote on the claim so far, and the thread goes
back to the policy and asks anew, under a new interrupt id and a new hash; nothing of it is ever paid unasked. Whoever
raises an amount asks for it as much as whoever filed the claim, and does not decide it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from decimal import Decimal
from typing import Any

from psycopg import sql
from psycopg.types.json import Jsonb

from flow import audit, inputs, mails, notices, reminders, threads
from flow.approvals import (
    COLUMNS,
    approval_for,
    approval_of,
    approvals_of,
    check_decidable,
    record_changes,
    refusals_kept,
    renew_fingerprint,
    with_decisions,
)
from flow.database import Connection
from flow.errors import BadInput, NotAllowed, NothingToDecide, StaleRequest, Tampered
from flow.model import CLAIM_FLOW, Approval, Claim, Person, Thread
from flow.policy import Policy, Tier, is_group, is_requester
from flow.standing import Standing
from flow.workspaces import policy_in


async def change_amount(
    conn: Connection,
    interrupt_id: str,
    person: Person,
    *,
    amount: str,
    reason: str = "",
    door: str,
    request_hash: str | None,
) -> Approval:
    """Ask for another amount instead, in a transaction of its own; the superseded approval.

    Whoever may decide it may. `amount` is as somebody typed it, in the claim's currency. The same again by the same
    person is a success that changes nothing. Raises BadInput, NothingToDecide, and whatever `decide` raises.
    """
    async with refusals_kept(conn, interrupt_id, person, door=door, shown=request_hash), conn.transaction():
        approval = await approval_for(conn, person, interrupt_id, lock=True)
        thread = await threads.thread_of(conn, approval.thread_id)
        if thread.flow != CLAIM_FLOW:
            raise NothingToDecide(thread.thread_id, f"the flow {thread.flow} takes no other amount")
        claim = Claim.of_input(approval.request)
        wanted = inputs.parse_amount(amount, claim.currency, inputs.decimals_of(claim.currency))
        changed = {"amount": str(wanted)}
        if approval.changed_to == changed and approval.changed_by == person.key:
            return approval
        standing = await check_decidable(conn, approval, person, request_hash=request_hash)
        if wanted == claim.amount:
            if before := await _proposed(conn, approval, changed, person):
                return before
            raise BadInput("amount", amount, "it is what is asked for already")
        absent = standing.absent.key if standing.absent else None
        change = Change(to=changed, by=person.key, why=reason, door=door, for_whom=absent)
        superseded = await _supersede(conn, approval, change)
        await conn.execute(
            "UPDATE threads SET changed = %s, raised_by = %s WHERE thread_id = %s",
            (Jsonb(changed), _raised_by(approval, thread.input, wanted, person, standing), thread.thread_id),
        )
        return superseded


async def _proposed(conn: Connection, approval: Approval, changed: dict[str, str], person: Person) -> Approval | None:
    """The request in whose place this one stands, if this person has asked for just that."""
    asked = (await approvals_of(conn, [approval.thread_id]))[approval.thread_id]
    by_them = (each for each in reversed(asked) if (each.changed_to, each.changed_by) == (changed, person.key))
    return next(by_them, None)


@dataclass(frozen=True, kw_only=True)
class Change:
    """What is asked for instead, `amount` or `tiers`: proposed by whom, for whom, why, and through which door."""

    to: dict[str, Any]
    by: str
    why: str
    door: str
    for_whom: str | None = None


async def _supersede(conn: Connection, approval: Approval, change: Change) -> Approval:
    """Send the thread back to ask anew, with every request of it so far superseded. The caller holds the row.

    Those of other tiers, too: what they said yes to is not asked for any more.
    """
    for_whom = {"for": change.for_whom} if change.for_whom else {}
    await conn.execute(
        "UPDATE approvals SET status = 'superseded', settled_at = clock_timestamp(), changed_to = %s, changed_by = %s,"
        " changed_why = %s WHERE interrupt_id = %s",
        # With it, for whom: it is taken out again where the row is read.
        (Jsonb(change.to | for_whom), change.by, change.why, approval.interrupt_id),
    )
    rows = await conn.execute(
        sql.SQL(
            "UPDATE approvals SET status = 'superseded' WHERE thread_id = %s"
            " AND (status = 'approved' OR interrupt_id = %s) RETURNING {}"
        ).format(COLUMNS),
        (approval.thread_id, approval.interrupt_id),
    )
    superseded = await with_decisions(conn, await rows.fetchall())
    for each in superseded:
        await notices.change_card(conn, each.interrupt_id)
        await record_changes(
            conn,
            each,
            "approval.changed",
            who=change.by,
            door=change.door,
            for_whom=change.for_whom,
            data={"changed_to": change.to, "reason": change.why},
        )
    await notices.post_reply(conn, approval.interrupt_id, approval.thread_id)
    await threads.wake(conn, approval.thread_id)
    return next(each for each in superseded if each.interrupt_id == approval.interrupt_id)


def _raised_by(
    approval: Approval, filed: dict[str, str], wanted: Decimal, person: Person, standing: Standing
) -> list[str]:
    """Names of everybody who has asked for more than was filed: they are who would pay themselves."""
    if wanted <= Decimal(filed["amount"]):
        return []
    names = {*approval.raised_by, *person.names, *(standing.absent.names if standing.absent else ())}
    return sorted(name for name in names if not is_group(name))


async def withdraw(
    conn: Connection,
    thread_id: str,
    person: Person,
    reason: str = "",
    *,
    door: str | None = None,
    interrupt_id: str | None = None,
    request_hash: str | None = None,
) -> None:
    """Take back what a thread waits for, in a transaction of its own: its flow hears of it, and a claim ends unpaid.

    All of it, or the one request that a door has shown. Whoever asked may, and the command line. Safe to repeat: what
    was taken back before is a success that records nothing. Raises NotAllowed, NothingToDecide, StaleRequest,
    UnknownThread.
    """
    asked = await _asked(conn, thread_id, interrupt_id)
    door = door or audit.door_of(person.key)
    async with contextlib.AsyncExitStack() as stack:
        if asked is not None:
            kept = refusals_kept(conn, asked.interrupt_id, person, door=door, shown=request_hash)
            await stack.enter_async_context(kept)
        await stack.enter_async_context(conn.transaction())
        thread = await threads.thread_for(conn, person, thread_id)
        if not person.trusted and not is_requester(thread.requested_by, person):
            raise NotAllowed(person.name, "only whoever asked for it takes a request back")
        if interrupt_id and asked and request_hash not in (None, asked.request_hash):
            raise StaleRequest(interrupt_id)
        rows = await conn.execute(
            sql.SQL(
                "UPDATE approvals SET status = 'withdrawn', settled_at = clock_timestamp(), withdrawn_by = %s,"
                " withdrawn_why = %s WHERE interrupt_id IN (SELECT interrupt_id FROM approvals"
                " WHERE thread_id = %s AND status = 'pending' AND interrupt_id = coalesce(%s, interrupt_id)"
                " ORDER BY interrupt_id FOR UPDATE) RETURNING {}"
            ).format(COLUMNS),
            (person.key, reason, thread_id, interrupt_id),
        )
        withdrawn = await with_decisions(conn, await rows.fetchall())
        if not withdrawn:
            _check_withdrawn(thread, await _asked(conn, thread_id, interrupt_id))
            return
        await threads.wake(conn, thread_id)
        for approval in withdrawn:
            await notices.change_card(conn, approval.interrupt_id)
            await record_changes(
                conn, approval, "approval.withdrawn", who=person.key, door=door, data={"reason": reason}
            )


async def _asked(conn: Connection, thread_id: str, interrupt_id: str | None) -> Approval | None:
    """The request that is meant, else the last one of the thread."""
    asked = (await approvals_of(conn, [thread_id]))[thread_id]
    return next((each for each in reversed(asked) if each.interrupt_id == (interrupt_id or each.interrupt_id)), None)


def _check_withdrawn(thread: Thread, asked: Approval | None) -> None:
    """Pass if it was taken back before."""
    if asked is None or asked.status != "withdrawn":
        was = f"its last request was {asked.status}" if asked else f"it is {thread.status}"
        raise NothingToDecide(thread.thread_id, was)


async def refresh(conn: Connection, policy: Policy, thread_id: str, *, by: str) -> tuple[Tier, ...]:
    """Apply the policy of today to what the thread waits for, in a transaction of its own; the tiers that are asked.

    Votes so far are void, and the time begins anew. A claim is asked for again from its first tier on, by new requests;
    what another flow asks keeps its request, with other rules. Empty: it waits for nobody. Raises Unaskable if the
    policy has no such tier any more, and Tampered.
    """
    async with conn.transaction():
        await threads.thread_of(conn, thread_id)
        rows = await conn.execute(
            sql.SQL(
                "SELECT {} FROM approvals WHERE thread_id = %s AND status = 'pending' ORDER BY interrupt_id FOR UPDATE"
            ).format(COLUMNS),
            (thread_id,),
        )
        pending = await with_decisions(conn, await rows.fetchall())
        for approval in pending:
            if not approval.whole:
                raise Tampered(approval.interrupt_id)
        thread = await threads.thread_of(conn, thread_id)
        policy = await policy_in(conn, thread.workspace, policy)
        if thread.flow != CLAIM_FLOW:
            return tuple([await _refresh(conn, each, policy.tier(each.tier), by) for each in pending])
        tiers: tuple[Tier, ...] = ()
        for approval in pending:
            claim = Claim.of_input(approval.request)
            tiers = policy.tiers_of(claim) or policy.review_tiers(claim)
            change = Change(to={"tiers": [tier.as_state() for tier in tiers]}, by=by, why="", door=audit.door_of(by))
            await _supersede(conn, approval, change)
            await _record_refresh(conn, approval, tiers, by)
        return tiers


async def _refresh(conn: Connection, approval: Approval, tier: Tier, by: str) -> Tier:
    await conn.execute(
        "UPDATE approvals SET approvers = %s, required = %s, rank = %s, expires_after_s = %s,"
        " expires_at = clock_timestamp() + %s * interval '1 second', on_expiry = %s, escalate_to = %s,"
        " escalated_at = NULL, self_approval = %s, step_up = %s, post_to = %s, channel = %s, remind_every_s = NULL,"
        " working_hours = NULL, remind_at = NULL WHERE interrupt_id = %s",
        (
            list(tier.approvers),
            tier.required,
            tier.rank,
            tier.expires_after_s,
            tier.expires_after_s,
            tier.on_expiry,
            list(tier.escalate_to),
            tier.self_approval,
            tier.step_up,
            tier.post_to,
            tier.channel,
            approval.interrupt_id,
        ),
    )
    await renew_fingerprint(conn, approval.interrupt_id)
    await conn.execute("UPDATE decisions SET void = true WHERE interrupt_id = %s", (approval.interrupt_id,))
    if tier.remind_every_s:
        every_s, hours, now = tier.remind_every_s, tier.working_hours, datetime.now(UTC)
        await reminders.schedule(conn, approval.interrupt_id, now, every_s=every_s, hours=hours)
    # Whoever has spent their link has a void vote, and no other way back; one that was revoked stays so.
    voted = {vote.person for vote in approval.votes}
    again = {name for name in tier.approvers if f"mail:{name.removeprefix('mail:').lower()}" in voted}
    added = set(tier.approvers) - set(approval.approvers)
    await mails.ask_by_mail(conn, await approval_of(conn, approval.interrupt_id), added | again)
    await notices.change_card(conn, approval.interrupt_id)
    await _record_refresh(conn, approval, (tier,), by)
    return tier


async def _record_refresh(conn: Connection, approval: Approval, tiers: Sequence[Tier], by: str) -> None:
    asked = [{"tier": tier.name, "approvers": list(tier.approvers), "required": tier.required} for tier in tiers]
    await audit.record(
        conn,
        "approval.refreshed",
        who=by,
        door=audit.door_of(by),
        thread_id=approval.thread_id,
        interrupt_id=approval.interrupt_id,
        shown=approval.request_hash,
        data={"asked": asked, "void": [vote.person for vote in approval.votes]},
    )
