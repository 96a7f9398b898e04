"""What changes a pending request on purpose: another amount, somebody who takes it back, the policy of today.

Another amount is another request. The old one is superseded with every vote on the claim so far, and the thread goes
back to the policy and asks anew, under a new interrupt id and a new hash; nothing of it is ever paid unasked. Whoever
raises an amount asks for it as much as whoever filed the claim, and does not decide it.
"""

from __future__ import annotations

from datetime import UTC, datetime
from decimal import Decimal

from psycopg import sql
from psycopg.types.json import Jsonb

from flow import audit, inputs, mails, notices, reminders, threads
from flow.approvals import (
    COLUMNS,
    approval_of,
    approvals_of,
    check_decidable,
    record_changes,
    refusals_kept,
    renew_fingerprint,
    settle_if_decided,
    with_decisions,
)
from flow.database import Connection
from flow.errors import BadInput, NotAllowed, NothingToDecide, Tampered
from flow.model import CLAIM_FLOW, Approval, Claim, Person, Thread
from flow.policy import Policy, Tier, is_group, is_requester
from flow.standing import Standing


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
        approval = await approval_of(conn, interrupt_id, lock=True)
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
            raise BadInput("amount", amount, "it is what is asked for already")
        await conn.execute(
            "UPDATE approvals SET status = 'superseded', settled_at = clock_timestamp(),"
            " changed_to = %s, changed_by = %s, changed_why = %s WHERE interrupt_id = %s",
            (Jsonb(changed), person.key, reason, interrupt_id),
        )
        # Those of other tiers, too: what they said yes to is not asked for any more.
        rows = await conn.execute(
            sql.SQL(
                "UPDATE approvals SET status = 'superseded', settled_at = coalesce(settled_at, clock_timestamp())"
                " WHERE thread_id = %s AND (status = 'approved' OR interrupt_id = %s) RETURNING {}"
            ).format(COLUMNS),
            (thread.thread_id, interrupt_id),
        )
        superseded = await with_decisions(conn, await rows.fetchall())
        await conn.execute(
            "UPDATE threads SET changed = %s, raised_by = %s WHERE thread_id = %s",
            (Jsonb(changed), _raised_by(approval, thread.input, wanted, person, standing), thread.thread_id),
        )
        for each in superseded:
            await notices.change_card(conn, each.interrupt_id)
        [approval] = [each for each in superseded if each.interrupt_id == interrupt_id]
        await notices.post_reply(conn, interrupt_id, thread.thread_id)
        await record_changes(
            conn,
            approval,
            "approval.changed",
            who=person.key,
            door=door,
            for_whom=standing.absent.key if standing.absent else None,
            data={"changed_to": changed, "reason": reason},
        )
        await threads.wake(conn, thread.thread_id)
        return approval


def _raised_by(
    approval: Approval, filed: dict[str, str], wanted: Decimal, person: Person, standing: Standing
) -> list[str]:
    """Names of everybody who has asked for more than was filed: they are who would pay themselves."""
    if wanted <= Decimal(filed["amount"]):
        return []
    names = {*approval.raised_by, *person.names, *(standing.absent.names if standing.absent else ())}
    return sorted(name for name in names if not is_group(name))


async def withdraw(
    conn: Connection, thread_id: str, person: Person, reason: str = "", *, door: str | None = None
) -> None:
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
            ).format(COLUMNS),
            (person.key, reason, thread_id),
        )
        withdrawn = await with_decisions(conn, await rows.fetchall())
        if not withdrawn:
            await _check_withdrawn(conn, thread)
            return
        await threads.wake(conn, thread_id)
        for approval in withdrawn:
            await notices.change_card(conn, approval.interrupt_id)
            await record_changes(
                conn,
                approval,
                "approval.withdrawn",
                who=person.key,
                door=door or audit.door_of(person.key),
                data={"reason": reason},
            )


async def _check_withdrawn(conn: Connection, thread: Thread) -> None:
    """Pass if the last request of the thread was taken back before."""
    asked = (await approvals_of(conn, [thread.thread_id]))[thread.thread_id]
    if not asked or asked[-1].status != "withdrawn":
        was = f"its last request was {asked[-1].status}" if asked else f"it is {thread.status}"
        raise NothingToDecide(thread.thread_id, was)


async def refresh(conn: Connection, policy: Policy, thread_id: str, *, by: str) -> list[Approval]:
    """Apply the policy of today to what the thread waits for, in a transaction of its own; the approvals as they are.

    Their time begins anew. Votes of those who are not on the list any more are void; whoever is added is asked; if the
    rest is enough, that settles it. Raises Unaskable if the policy has no such tier any more.
    """
    async with conn.transaction():
        thread = await threads.thread_of(conn, thread_id)
        pending = await conn.execute(
            "SELECT interrupt_id FROM approvals WHERE thread_id = %s AND status = 'pending' ORDER BY interrupt_id",
            (thread_id,),
        )
        refreshed = []
        for row in await pending.fetchall():
            approval = await approval_of(conn, row["interrupt_id"], lock=True)
            if approval.status == "pending":
                claim = Claim.of_input(approval.request) if thread.flow == CLAIM_FLOW else None
                refreshed.append(await _refresh(conn, approval, policy.tier(approval.tier, claim), by))
        return refreshed


async def _refresh(conn: Connection, approval: Approval, tier: Tier, by: str) -> Approval:
    if not approval.whole:
        raise Tampered(approval.interrupt_id)
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
    await conn.execute(
        "UPDATE decisions SET void = listed_as <> ALL(%s) WHERE interrupt_id = %s AND listed_as IS NOT NULL",
        (list(tier.approvers), approval.interrupt_id),
    )
    if tier.remind_every_s:
        every_s, hours, now = tier.remind_every_s, tier.working_hours, datetime.now(UTC)
        await reminders.schedule(conn, approval.interrupt_id, now, every_s=every_s, hours=hours)
    added = set(tier.approvers) - set(approval.approvers)
    await mails.ask_by_mail(conn, await approval_of(conn, approval.interrupt_id), added)
    now_is = await settle_if_decided(conn, await approval_of(conn, approval.interrupt_id))
    await audit.record(
        conn,
        "approval.refreshed",
        who=by,
        door=audit.door_of(by),
        thread_id=approval.thread_id,
        interrupt_id=approval.interrupt_id,
        shown=approval.request_hash,
        data={
            "tier": tier.name,
            "approvers": list(tier.approvers),
            "required": tier.required,
            "void": [vote.person for vote in now_is.decisions if vote.void],
        },
    )
    if now_is.status != "pending":
        await record_changes(conn, now_is, "approval.decided", who=by, door=audit.door_of(by))
    return now_is
