"""Pay once per thread.

The `ledger`, the default, is our own row: one INSERT with a unique key. A provider outside is asked between two
commits:

    intended   committed, with the key that every attempt will use
               the call, with no transaction open
    paid       with the provider's reference
    refused    the provider said no, for good
    unknown    no answer came, and asking again is no longer safe: a person must look, and `resolve`

After a crash or a lost answer the row is still `intended`: the same key is used again for as long as the provider
remembers it, else the provider is asked what became of it. Nothing is ever paid on a guess, nor called unpaid: that
there is no payment is not believed while an order may be on its way, nor is a refusal after an order that was not
answered, unless it is the provider's word on the key. A provider that can be asked is asked before the first attempt,
too, if the thread is older than the provider's memory: a database that was restored does not know of its own last
payments.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Literal

from flow import threads
from flow.approvals import approvals_of
from flow.audit import AuditKind, door_of, record
from flow.database import Connection
from flow.errors import KeyReused, NothingToResolve
from flow.events import facts_of_thread, record_events, record_told
from flow.model import CLAIM_FLOW, Approval, Claim, Payment
from flow.pen import Pen
from flow.providers import CannotLookUp, Order, PaymentRefused, PaymentUnanswered, PaymentUnsent, Provider
from flow.spans import Live, span

# A key that the provider may forget while we ask is no protection.
_KEY_MARGIN_S = 3600.0

# Nobody waits for an order's answer any more by then, and whoever took it has written it down.
_BOOKED_WITHIN_S = 300.0

# Who pays, in the audit log.
_PAYER = f"flow:{CLAIM_FLOW}"

_COLUMNS = (
    "id, thread_id, amount, currency, payee, provider, idempotency_key, reference, status, reason, attempts,"
    " intended_at, paid_at"
)


async def pay_from_ledger(conn: Connection, thread_id: str, claim: Claim, approvals: Sequence[Approval]) -> Payment:
    """Pay the claim by a row, once: a thread that was paid before gets its first payment back, unchanged.

    The reference is made from the thread id, so it is the same whoever pays and however often.
    """
    inserted = await conn.execute(
        "INSERT INTO payments (thread_id, amount, currency, payee, provider, reference, status, intended_at, paid_at)"
        # One look at the clock: of two the second may be that of the beginning.
        " SELECT %s, %s, %s, %s, 'ledger', %s, 'paid', now, now FROM clock_timestamp() AS now"
        f" ON CONFLICT (thread_id) DO NOTHING RETURNING {_COLUMNS}",
        (thread_id, claim.amount, claim.currency, claim.payee, f"L-{thread_id}"),
    )
    row = await inserted.fetchone()
    if row is None:
        return _checked(await _payment(conn, thread_id), claim)
    payment = Payment(**row)
    await _record(conn, payment, "payment.paid", approvals)
    return payment


async def intend(conn: Connection, thread_id: str, claim: Claim, provider: Provider) -> Payment:
    """The payment that is to be made, committed before anybody is asked; `attempts` counts this one.

    Whatever was settled before comes back as it is. Raises KeyReused if the thread's payment is of another claim: the
    provider never sees one key with two amounts.
    """
    inserted = await conn.execute(
        "INSERT INTO payments (thread_id, amount, currency, payee, provider, idempotency_key, status)"
        " SELECT %s, %s, %s, %s, %s, id || ':' || %s, 'intended' FROM installation ON CONFLICT (thread_id) DO NOTHING"
        " RETURNING thread_id",
        (thread_id, claim.amount, claim.currency, claim.payee, provider.name, thread_id),
    )
    await conn.execute(
        "UPDATE payments SET attempts = attempts + 1,"
        " asked_at = CASE WHEN attempts = 0 THEN clock_timestamp() ELSE asked_at END,"
        " asked_of = CASE WHEN attempts = 0 THEN %s ELSE asked_of END"
        " WHERE thread_id = %s AND status = 'intended'",
        (provider.address, thread_id),
    )
    payment = await _payment(conn, thread_id)
    if await inserted.fetchone():
        await _audit(conn, payment, "payment.intended")
    return _checked(payment, claim)


async def pay_outside(pen: Pen, payment: Payment, provider: Provider | None) -> Payment:
    """Have the provider make an intended payment, or find out what became of it; the row as it is then.

    Raises PaymentUnsent and PaymentUnanswered: the drive is put off, and the next one asks again.
    """
    if provider is None or provider.name != payment.provider:
        # Another one knows nothing of the key.
        why = f"it was begun with the provider {payment.provider}, which is not PAYMENT_PROVIDER any more"
        return await _update(pen, payment, "status = 'unknown', reason = %s", why, becomes="payment.unknown")
    assert payment.idempotency_key is not None
    order = Order(
        key=payment.idempotency_key,
        thread_id=payment.thread_id,
        amount=payment.amount,
        currency=payment.currency,
        payee=payment.payee,
    )
    try:
        reference = await _ask(pen, payment, order, provider)
    except PaymentUnsent:
        await _unsent(pen, payment)
        raise
    except PaymentRefused as exc:
        return await _update(pen, payment, "status = 'refused', reason = %s", str(exc), becomes="payment.refused")
    except CannotLookUp as exc:
        why = f"the provider did not answer in time, and cannot be asked what became of it: {exc}"
        return await _update(pen, payment, "status = 'unknown', reason = %s", why, becomes="payment.unknown")
    paid = "status = 'paid', reference = %s, paid_at = clock_timestamp(), reason = NULL"
    return await _update(pen, payment, paid, reference, becomes="payment.paid")


async def payments_of(conn: Connection, thread_ids: Sequence[str]) -> dict[str, Payment]:
    """The payments of those of these threads that have one, by thread id."""
    rows = await conn.execute(f"SELECT {_COLUMNS} FROM payments WHERE thread_id = ANY(%s)", (list(thread_ids),))
    return {row["thread_id"]: Payment(**row) for row in await rows.fetchall()}


async def latest_payments(
    conn: Connection, *, status: str | None, limit: int, before: int | None = None, workspace: str | None = None
) -> list[Payment]:
    """The newest first, by index; those with an id below `before`, and of what was started in this `workspace`."""
    where = ("status = %(status)s" if status else "true") + (" AND id < %(before)s" if before else "")
    if workspace is not None:
        where += " AND (SELECT workspace = %(workspace)s FROM threads t WHERE t.thread_id = payments.thread_id)"
    rows = await conn.execute(
        f"SELECT {_COLUMNS} FROM payments WHERE {where} ORDER BY id DESC LIMIT %(limit)s",
        {"status": status, "before": before, "limit": limit, "workspace": workspace},
    )
    return [Payment(**row) for row in await rows.fetchall()]


async def unknown_payments(conn: Connection, *, limit: int) -> list[Payment]:
    """Payments that somebody must look at, oldest first."""
    rows = await conn.execute(
        f"SELECT {_COLUMNS} FROM payments WHERE status = 'unknown' ORDER BY intended_at LIMIT %s", (limit,)
    )
    return [Payment(**row) for row in await rows.fetchall()]


async def resolve(conn: Connection, thread_id: str, *, reference: str | None, by: str) -> Payment:
    """A person has looked: it was paid under this reference, or, if that is None, it was not.

    Wakes the thread, which ends accordingly. The same word again changes nothing. Raises NothingToResolve.
    """
    async with conn.transaction():
        rows = await conn.execute(f"SELECT {_COLUMNS} FROM payments WHERE thread_id = %s FOR UPDATE", (thread_id,))
        row = await rows.fetchone()
        if row is None:
            raise NothingToResolve(thread_id, "it has no payment")
        payment = Payment(**row)
        # `intended` too, if no drive will ask again by itself.
        given_up = (await threads.thread_of(conn, thread_id)).status in ("stuck", "unknown")
        if given_up and payment.status in ("unknown", "intended"):
            await conn.execute(
                "UPDATE payments SET status = %s, reference = %s, reason = %s,"
                " paid_at = CASE WHEN %s::text IS NULL THEN NULL ELSE clock_timestamp() END WHERE thread_id = %s",
                ("paid" if reference else "refused", reference, f"resolved by {by}", reference, thread_id),
            )
            resolved = await _payment(conn, thread_id)
            await _audit(conn, resolved, "payment.resolved", who=by, door=door_of(by), was=payment.status)
            if reference:
                approvals = (await approvals_of(conn, [thread_id]))[thread_id]
                await record_events(conn, thread_id, "payment.paid", data=_facts_of(resolved, approvals))
            await threads.wake(conn, thread_id)
        elif (payment.reference, payment.status) != (reference, "paid" if reference else "refused"):
            raise NothingToResolve(thread_id, f"its payment is {payment.status}")
        return await _payment(conn, thread_id)


async def give_up(conn: Connection, thread_id: str, reason: str) -> bool:
    """Nobody will ask again by himself. Whether it may have been paid: then it is `unknown`, and a person must look."""
    asked = await conn.execute(
        "UPDATE payments SET status = 'unknown', reason = %s"
        " WHERE thread_id = %s AND status = 'intended' AND attempts > 0",
        (reason, thread_id),
    )
    if not asked.rowcount:
        return False
    approvals = (await approvals_of(conn, [thread_id]))[thread_id]
    await _record(conn, await _payment(conn, thread_id), "payment.unknown", approvals)
    return True


async def _ask(pen: Pen, payment: Payment, order: Order, provider: Provider) -> str:
    before = await _before(pen, payment)
    if payment.attempts > 1 and before.asked_of not in (None, provider.address):
        raise CannotLookUp(f"it was sent the order as {before.asked_of}, and would now be asked as {provider.address}")
    reference = await _found_before(pen, payment, order, provider, before)
    if reference is not None:
        return reference
    if payment.attempts > 1:
        await _update(pen, payment, "asked_at = clock_timestamp()")
    try:
        with _attempt("pay", payment):
            return await provider.pay(order)
    except PaymentRefused as exc:
        if payment.attempts == 1 or provider.answers_by_key:
            raise
        # Whoever says no may never have seen the order before, which may have been paid.
        try:
            reference = await _look_up(payment, order, provider, before)
        except CannotLookUp as cannot:
            raise CannotLookUp(f"{cannot}; asked once more it said no ({exc})") from exc
        if reference is None:
            raise
        return reference


async def _found_before(pen: Pen, payment: Payment, order: Order, provider: Provider, before: _Before) -> str | None:
    """The reference of what was paid already; it is looked up where the key may be forgotten.

    Then only the provider's word that nothing was paid makes asking again safe.
    """
    remembered_s = provider.key_lifetime_s - _KEY_MARGIN_S
    must = payment.attempts > 1 and before.payment_s > remembered_s
    # A database that was restored has forgotten what was paid after its dump, but not the threads of before.
    if not must and before.thread_s <= max(remembered_s, _KEY_MARGIN_S):
        return None
    try:
        return await _look_up(payment, order, provider, before)
    except PaymentUnanswered:
        await _unsent(pen, payment)
        raise
    except CannotLookUp:
        if must:
            raise
        return None


async def _look_up(payment: Payment, order: Order, provider: Provider, before: _Before) -> str | None:
    """The reference of what was paid under the key; None if nothing was, and no order under it is on its way.

    Raises CannotLookUp and PaymentUnanswered.
    """
    with _attempt("look up", payment):
        reference = await provider.look_up(order)
    if reference is None and payment.attempts > 1 and before.asked_s < provider.timeout_s + _BOOKED_WITHIN_S:
        raise PaymentUnanswered(
            f"the provider knows of no payment, but was sent the order {before.asked_s:.0f} s ago: it may be on its way"
        )
    return reference


async def _unsent(pen: Pen, payment: Payment) -> None:
    """No order has left in this attempt, so the next one is as good as it was."""
    await _update(pen, payment, "attempts = attempts - 1")


def _attempt(what: str, payment: Payment) -> AbstractContextManager[Live]:
    said: dict[str, Any] = {"payment.provider": payment.provider, "payment.attempt": payment.attempts}
    return span(f"{what} by {payment.provider}", **said)


@dataclass(frozen=True, kw_only=True)
class _Before:
    """How long ago, in seconds, the payment was begun, its provider was last sent the order, and its thread began; and
    which address the order was sent to."""

    payment_s: float
    asked_s: float
    thread_s: float
    asked_of: str | None


async def _before(pen: Pen, payment: Payment) -> _Before:
    async with pen.tx() as conn:
        row = await (
            await conn.execute(
                "SELECT extract(epoch FROM now - p.intended_at)::float8 AS payment_s,"
                " extract(epoch FROM now - coalesce(p.asked_at, p.intended_at))::float8 AS asked_s,"
                " extract(epoch FROM now - t.created_at)::float8 AS thread_s, p.asked_of"
                " FROM payments p JOIN threads t USING (thread_id), clock_timestamp() AS now WHERE p.thread_id = %s",
                (payment.thread_id,),
            )
        ).fetchone()
    assert row is not None
    return _Before(**row)


# What a payment becomes.
Outcome = Literal["payment.paid", "payment.unknown", "payment.refused"]


async def _update(pen: Pen, payment: Payment, change: str, *values: Any, becomes: Outcome | None = None) -> Payment:
    async with pen.tx() as conn:
        updated = await conn.execute(
            f"UPDATE payments SET {change} WHERE thread_id = %s AND status = 'intended'", (*values, payment.thread_id)
        )
        payment = await _payment(conn, payment.thread_id)
        if becomes and updated.rowcount:
            approvals = (await approvals_of(conn, [payment.thread_id]))[payment.thread_id]
            await _record(conn, payment, becomes, approvals)
        return payment


async def _record(conn: Connection, payment: Payment, became: Outcome, approvals: Sequence[Approval]) -> None:
    """The drive has found this out, and tells both those who listen and those who look it up. A refusal is told to the
    former by its thread's end."""
    if became == "payment.refused":
        await _audit(conn, payment, became)
        return
    await record_told(
        conn,
        payment.thread_id,
        became,
        facts=_facts_of(payment, approvals),
        who=_PAYER,
        door="drive",
        data=_entry_of(payment),
    )


async def _audit(
    conn: Connection, payment: Payment, kind: AuditKind, *, who: str = _PAYER, door: str = "drive", **more: str
) -> None:
    await record(conn, kind, who=who, door=door, thread_id=payment.thread_id, data=_entry_of(payment) | more)


def _entry_of(payment: Payment) -> dict[str, Any]:
    """What the audit log has of it."""
    return {
        "amount": str(payment.amount),
        "currency": payment.currency,
        "payee": payment.payee,
        "provider": payment.provider,
        "idempotency_key": payment.idempotency_key,
        "reference": payment.reference,
        "status": payment.status,
        "reason": payment.reason,
    }


def _facts_of(payment: Payment, approvals: Sequence[Approval]) -> dict[str, Any]:
    """What programs are told of it."""
    claim = {"amount": str(payment.amount), "currency": payment.currency, "payee": payment.payee}
    return facts_of_thread(payment.thread_id, claim, approvals, status=payment.status, reference=payment.reference)


async def _payment(conn: Connection, thread_id: str) -> Payment:
    payment = (await payments_of(conn, [thread_id])).get(thread_id)
    assert payment is not None
    return payment


def _checked(payment: Payment, claim: Claim) -> Payment:
    if (payment.amount, payment.currency, payment.payee) != (claim.amount, claim.currency, claim.payee):
        raise KeyReused(payment.thread_id, f"{payment.amount} {payment.currency}", f"{claim.amount} {claim.currency}")
    return payment
