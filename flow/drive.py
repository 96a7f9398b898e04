"""`drive`: take a thread as far as it can go now. With `flow.run` the only caller of LangGraph.

Recovery is not a special path: a drive looks at the checkpoint and goes on from there, whoever died before.

    no checkpoint yet                      run from the start
    at an interrupt, no approval row yet   write the approval and its card
    at an interrupt, undecided             stop
    at an interrupt, decided               resume it with the verdict, by its id; run on, if its step has had it
    tasks left, none of them interrupted   run on
    no tasks left                          close the thread from its rows, or by the flow's result

A thread whose flow is not here, in the version that it began with, is left alone. A long drive stops between two steps
and leaves the rest to the next one, so that no drive outlives its supervisor's patience.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any, Literal

import psycopg
from langgraph.checkpoint.postgres.aio import AsyncPostgresSaver
from langgraph.types import Interrupt, StateSnapshot
from psycopg import errors

from flow import notices, payments, threads
from flow.approvals import approval_of, approvals_of, lock_pending, request_approval, supersede
from flow.assess import Adviser
from flow.database import Connection, Lock, connect, exclusively
from flow.errors import (
    AskedInEffect,
    AskedTwice,
    BadInput,
    DriveFailed,
    EffectFailed,
    KeyReused,
    NodeGone,
    NoResult,
    NotApproved,
    ResultNotKept,
    SecretInRequest,
    Unaskable,
    UnknownApproval,
    UnstorableState,
)
from flow.events import facts_of_thread, record_events
from flow.flows import Asked, Flow, Flows, settled_the_same
from flow.inputs import storable
from flow.model import Approval, Payment, Thread
from flow.pen import Pen
from flow.policy import Policy
from flow.providers import Provider
from flow.questions import answer_to
from flow.run import Run
from flow.spans import Recorder
from flow.workspaces import policy_in

# How a drive ends, unless a step failed and will be tried again.
Outcome = Literal["locked", "waiting", "over", "stuck", "unavailable", "unfinished"]

# Trying again would change nothing.
_FINAL = (
    NotApproved, KeyReused, EffectFailed, ResultNotKept, Unaskable, SecretInRequest, AskedTwice, AskedInEffect,
    NoResult, NodeGone, BadInput, UnstorableState,
)  # fmt: skip


@dataclass(kw_only=True)
class Findings:
    """What a drive comes upon beside its outcome: whether the driver before had died; and, if this one ended a claim
    that came to a payment, the payment's status, and how long after the decision it was made, if both were."""

    taken_over: bool = False
    payment: str | None = None
    decided_to_paid_s: float | None = None


async def drive(
    conn: Connection,
    thread_id: str,
    *,
    flows: Flows,
    policy: Policy,
    adviser: Adviser | None = None,
    provider: Provider | None = None,
    slice_s: float = math.inf,
    findings: Findings | None = None,
    spans: bool = True,
    hide: Callable[[str], str] | None = None,
) -> Outcome:
    """Drive the thread on this connection until it waits for a person or is over, or has been driven for `slice_s`.

    `locked`: somebody else drives it. `stuck`: it needs a person, for the reason in its row. `unavailable`: none of
    `flows` is the thread's. `unfinished`: it is due for the rest. Raises DriveFailed if a step failed and will be tried
    again later. `policy` is for a thread of no workspace; each of several has its own. A lost connection rises as it
    is: nothing more can be written, and nothing needs to be. `findings` is filled in for whoever counts; `spans`:
    whether the thread's trace says what this drive does; `hide`: what takes secrets out of what models are asked and
    answer, if the trace keeps that.
    """
    findings = findings or Findings()
    if not await threads.try_lock(conn, thread_id):
        return "locked"
    recorder = Recorder("drive", on=spans, hide=hide, pid=os.getpid())
    pen = Pen(conn=conn, policy=policy, adviser=adviser, provider=provider, spans=recorder)
    try:
        return await _drive_locked(pen, thread_id, flows, slice_s, findings)
    except Exception as exc:
        if conn.closed:
            raise
        reason = _in_words(exc)
        # With the pen: what ran beside the step that failed may still be writing.
        async with pen.tx():
            thread = await threads.put_off(conn, thread_id, reason, spans=recorder.rows(error=exc, outcome="failed"))
            if thread.status == "stuck":
                may_be_paid = await payments.give_up(conn, thread_id, reason)
                if may_be_paid:
                    await threads.mark_unknown(conn, thread_id)
                await _tell_the_end(conn, thread_id, "unknown" if may_be_paid else "stuck")
                return "stuck"
        raise DriveFailed(thread_id, reason) from exc
    finally:
        # A session that is gone has lost its locks already.
        with contextlib.suppress(psycopg.OperationalError):
            await threads.unlock(conn, thread_id)


async def ensure_checkpoint_tables(url: str, conn: Connection) -> None:
    """LangGraph's own tables, up to date; one SELECT when they are. Safe in any number of processes at once.

    Its set-up races with itself and deadlocks under a blocking lock, so it runs under a polled one. Three of its
    indexes repeat the primary keys, and are dropped. What retention deletes must be free for what comes: they are
    vacuumed early, long values as well.
    """
    newest = len(AsyncPostgresSaver.MIGRATIONS) - 1
    with contextlib.suppress(errors.UndefinedTable):
        row = await (await conn.execute("SELECT max(v) AS v FROM checkpoint_migrations")).fetchone()
        if row is not None and row["v"] is not None and row["v"] >= newest:
            return
    async with await connect(url, "drive") as own, exclusively(own, Lock.MIGRATION):
        await AsyncPostgresSaver(own).setup()
        for table in ("checkpoints", "checkpoint_blobs", "checkpoint_writes"):
            await own.execute(f"DROP INDEX IF EXISTS {table}_thread_id_idx")
            await own.execute(
                f"ALTER TABLE {table} SET (autovacuum_vacuum_scale_factor = 0.02,"
                " toast.autovacuum_vacuum_scale_factor = 0.02)"
            )


async def _drive_locked(pen: Pen, thread_id: str, flows: Flows, slice_s: float, findings: Findings) -> Outcome:
    conn = pen.conn
    while (thread := await threads.take(conn, thread_id)) is None:
        if outcome := await _untaken(pen, thread_id):
            return outcome
    pen = replace(pen, policy=await policy_in(conn, thread.workspace, pen.policy))
    findings.taken_over = thread.taken_over
    pen.spans.top.note(attempt=thread.attempts, taken_over=thread.taken_over or None)
    flow = flows.of(thread)
    if flow is None:
        return await _set_aside(pen, thread_id)
    run = Run(flow, pen, thread_id, until=asyncio.get_running_loop().time() + slice_s)
    # Before the first drive there is nothing to look at.
    state = await run.look() if thread.driven_before else None
    while True:
        try:
            place = await _step(run, pen, thread, state, findings)
        except _FINAL as exc:
            if not await _give_up(pen, thread, _storable(str(exc))):
                raise
            return "stuck"
        if isinstance(place, str):
            return place
        if run.stopped:
            async with pen.tx() as conn:
                await threads.hand_on(conn, thread_id, spans=pen.spans.rows(outcome="unfinished"))
            return "unfinished"
        if place is state:
            # A reason to drive has been added since; `leave` compares with this.
            thread = await threads.thread_of(conn, thread_id)
        state = place


async def _step(
    run: Run, pen: Pen, thread: Thread, state: StateSnapshot | None, findings: Findings
) -> StateSnapshot | Outcome:
    """Take the one step that the thread's state calls for: the state after it, or how the drive ends."""
    if state is None or state.created_at is None:
        return await run.on(run.flow.begin(thread))
    if state.interrupts and not run.leaves_behind(state):
        answers = await _answers_or_wait(pen, run.flow, thread, state.interrupts)
        if answers is None:
            return "waiting"
        return await run.on(await run.giving(state, answers)) if answers else state
    if state.tasks:
        return await run.on(None)
    if run.flow.pays:
        return await _close(pen, thread, findings) or state
    await run.check_end()
    return await _close_with_result(pen, run.flow, thread, state) or state


async def _answers_or_wait(
    pen: Pen, flow: Flow, thread: Thread, interrupts: Sequence[Interrupt]
) -> dict[str, Any] | None:
    """An answer that is there, by its interrupt id. None: there is none yet, and the thread now waits.

    One transaction with the approval rows locked: a decision either is seen here or waits until the thread waits,
    and then wakes it. Empty: something happened meanwhile, look again.
    """
    if thread.driven_before and (answers := await _answer_there(pen, flow, thread, interrupts)):
        return answers
    async with pen.tx() as conn:
        answers = {}
        if len(interrupts) > 1:
            # All at once and in the order of their ids, as whoever takes several back.
            await lock_pending(conn, [pause.id for pause in interrupts])
        for pause in interrupts:
            asked = flow.asks(thread, pause)
            # Whoever drives it first has asked nothing before.
            approval = await _asked_before(conn, pause) if thread.driven_before else None
            if approval is None:
                if thread.driven_before:
                    await supersede(conn, thread.thread_id, keep=[each.id for each in interrupts])
                tier = flow.tier_of(asked, pause, pen.policy)
                await request_approval(
                    conn,
                    thread,
                    interrupt_id=pause.id,
                    tier=tier,
                    request=asked.request,
                    request_hash=asked.digest,
                    step=asked.step,
                )
                continue
            if approval.status != "pending":
                answers[pause.id] = _answer(flow, asked, approval)
        if answers or not await threads.leave(conn, thread, status="waiting", spans=pen.spans.rows(outcome="waiting")):
            # One at a time: LangGraph cuts off what runs beside a branch that fails.
            return dict(islice(answers.items(), 1))
    return None


async def _asked_before(conn: Connection, pause: Interrupt) -> Approval | None:
    """The approval of this pause, which nobody decides meanwhile; None: it is not asked for yet."""
    with contextlib.suppress(UnknownApproval):
        approval = await approval_of(conn, pause.id)
        # A settled one stays as it is; locking it would only cost a commit.
        return approval if approval.status != "pending" else await approval_of(conn, pause.id, lock=True)
    return None


async def _answer_there(pen: Pen, flow: Flow, thread: Thread, interrupts: Sequence[Interrupt]) -> dict[str, Any]:
    """The answer to the only pause: what was settled while it waited stays as it is, so no row is locked for it.

    Empty: it waits, or is not asked for yet; or there are several, and those that are not are asked for first.
    """
    if len(interrupts) > 1:
        return {}
    [pause] = interrupts
    with contextlib.suppress(UnknownApproval):
        async with pen.alone() as conn:
            approval = await approval_of(conn, pause.id)
        if approval.status != "pending":
            return {pause.id: _answer(flow, flow.asks(thread, pause), approval)}
    return {}


def _answer(flow: Flow, asked: Asked, approval: Approval) -> Any:
    """What the flow is told of a settled approval. Raises NotApproved if it asks for something else by now."""
    if approval.status == "approved" and not flow.pays and not settled_the_same(asked, approval):
        raise NotApproved(
            f"what was approved as {approval.interrupt_id} is not what the flow asks for: nothing goes on"
        )
    return answer_to(approval.request, approval)


async def _close(pen: Pen, thread: Thread, findings: Findings) -> Outcome | None:
    """End the thread with the status that our rows give it. None: look again.

    LangGraph's word is not enough: a renamed node also ends "normally", and unpaid.
    """
    async with pen.tx() as conn:
        approvals = (await approvals_of(conn, [thread.thread_id]))[thread.thread_id]
        payment = (await payments.payments_of(conn, [thread.thread_id])).get(thread.thread_id)
        settled = [a.status for a in approvals if a.status in ("rejected", "expired", "withdrawn")]
        status = _PAID[payment.status] if payment else settled[-1] if settled else "stuck"
        reason = payment.reason if payment else None
        if status == "stuck":
            reason = "the flow ended without a payment or a refusal"
        await _tell_the_end(conn, thread.thread_id, status, approvals)
        spans = pen.spans.rows(outcome=status)
        if not await threads.leave(conn, thread, status=status, reason=reason, spans=spans):
            raise psycopg.Rollback
        if payment:
            findings.payment, findings.decided_to_paid_s = payment.status, _decided_to_paid_s(approvals, payment)
        return "stuck" if status in _NEEDS_A_PERSON else "over"
    return None


def _decided_to_paid_s(approvals: Sequence[Approval], payment: Payment) -> float | None:
    """Both times are the database's, so no two clocks are compared. None if nobody decided, or nothing was paid."""
    settled = [each.settled_at for each in approvals if each.status == "approved" and each.settled_at]
    if not settled or payment.paid_at is None:
        return None
    return max(0.0, (payment.paid_at - max(settled)).total_seconds())


async def _close_with_result(pen: Pen, flow: Flow, thread: Thread, state: StateSnapshot) -> Outcome | None:
    """End the thread as `done` with its flow's result. None: look again. Raises NoResult."""
    result = flow.result(state.values)
    async with pen.tx() as conn:
        # An approval that nobody waits for any more.
        await supersede(conn, thread.thread_id, keep=[])
        approvals = (await approvals_of(conn, [thread.thread_id]))[thread.thread_id]
        await _tell_cards(conn, thread.thread_id, approvals)
        data = facts_of_thread(thread.thread_id, thread.input, approvals, status="done", result=result)
        await record_events(conn, thread.thread_id, "thread.done", data=data)
        if not await threads.leave(conn, thread, status="done", result=result, spans=pen.spans.rows(outcome="done")):
            raise psycopg.Rollback
        return "over"
    return None


async def _set_aside(pen: Pen, thread_id: str) -> Outcome:
    """Leave it alone: it is for those who have its flow."""
    async with pen.tx() as conn:
        thread = await threads.set_aside(conn, thread_id)
        if thread.status == "unavailable":
            await notices.raise_alarm(conn, thread_id)
    return "over" if thread.over else "unavailable"


# The thread's status by its payment's. A thread cannot end while its payment is only intended.
_PAID = {"paid": "paid", "refused": "failed", "unknown": "unknown", "intended": "stuck"}
_NEEDS_A_PERSON = ("stuck", "unknown")


async def _untaken(pen: Pen, thread_id: str) -> Outcome | None:
    """Why the thread cannot be taken; None if it can by now."""
    thread = await threads.thread_of(pen.conn, thread_id)
    if thread.over:
        return "over"
    if thread.status == "unavailable":
        return "unavailable"
    if thread.status in ("stuck", "unknown") and thread.due_at is None:
        return "stuck"
    if thread.attempts < threads.MAX_ATTEMPTS:
        return None
    reason = thread.reason or f"{thread.attempts} drives died without a word"
    return "stuck" if await _give_up(pen, thread, reason) else None


async def _give_up(pen: Pen, thread: Thread, reason: str) -> bool:
    """Leave the thread to a person, and say so on its cards. False if a reason to drive was added meanwhile."""
    async with pen.tx() as conn:
        status = "unknown" if await payments.give_up(conn, thread.thread_id, reason) else "stuck"
        await _tell_the_end(conn, thread.thread_id, status)
        spans = pen.spans.rows(outcome=status)
        if not await threads.leave(conn, thread, status=status, reason=reason, spans=spans):
            raise psycopg.Rollback
        return True
    return False


async def _tell_the_end(
    conn: Connection, thread_id: str, status: str, approvals: Sequence[Approval] | None = None
) -> None:
    """Every card of the thread shows its end, a reply below the last one says it, and the operators hear of trouble."""
    if approvals is None:
        approvals = (await approvals_of(conn, [thread_id]))[thread_id]
    await _tell_cards(conn, thread_id, approvals)
    if status in _NEEDS_A_PERSON:
        await notices.raise_alarm(conn, thread_id)
    if status == "stuck":
        # A payment that is unknown has said so itself.
        claim = (await threads.thread_of(conn, thread_id)).asks_for
        payment = (await payments.payments_of(conn, [thread_id])).get(thread_id)
        reference = payment.reference if payment else None
        data = facts_of_thread(thread_id, claim, approvals, status=status, reference=reference)
        await record_events(conn, thread_id, "thread.stuck", data=data)


async def _tell_cards(conn: Connection, thread_id: str, approvals: Sequence[Approval]) -> None:
    for approval in approvals:
        await notices.change_card(conn, approval.interrupt_id)
    if approvals:
        await notices.post_reply(conn, approvals[-1].interrupt_id, thread_id)


def _in_words(exc: BaseException) -> str:
    """One line for a person, of characters that the row can hold."""
    return _storable(f"{type(exc).__name__}: {exc}")


def _storable(text: str) -> str:
    one_line = " ".join(text.split())
    return storable(one_line.encode("utf-8", "backslashreplace").decode().replace("\x00", "\\x00"))[:500]
