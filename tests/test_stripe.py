"""Paying with Stripe: two steps, each under a key of its own; money moves in the second, once."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from stripe import StripeClient

from flow import payments
from flow.database import Connection
from flow.drive import Outcome, drive
from flow.errors import DriveFailed
from flow.flows import Flows
from flow.model import Payment
from flow.providers import CannotLookUp, Order, PaymentRefused, PaymentUnsent
from flow.stripe_provider import StripeProvider, minor_units
from tests import node
from tests.command import Terminal
from tests.people import POLICY, start_claim
from tests.stripe_server import API_KEY, CARD, CUSTOMER, Fault, Step, Stripe, running_emulate

ORDER = Order(key="k:t1", thread_id="t1", amount=Decimal("250.00"), currency="USD", payee="ACME")


@pytest.fixture
async def stripe() -> AsyncIterator[Stripe]:
    async with Stripe() as running:
        yield running


def provider_at(url: str) -> StripeProvider:
    return StripeProvider(api_key=API_KEY, customer=CUSTOMER, payment_method=CARD, timeout_s=5.0, api_base=url)


async def pay(conn: Connection, flows: Flows, stripe: Stripe, *, api_key: str = API_KEY) -> Outcome:
    """Drive t1, whatever it was put off for."""
    await start_claim(conn, amount="20")
    provider = replace(provider_at(stripe.url), api_key=api_key)
    return await drive(conn, "t1", flows=flows, policy=POLICY, provider=provider)


async def payment_of(conn: Connection) -> Payment:
    return (await payments.payments_of(conn, ["t1"]))["t1"]


async def test_a_payment_is_made_once_and_its_reference_kept(conn: Connection, flows: Flows, stripe: Stripe) -> None:
    assert await pay(conn, flows, stripe) == "over"
    assert await pay(conn, flows, stripe) == "over"
    [moved] = stripe.moved
    asked = {name: moved[name] for name in ("amount", "currency", "customer", "payment_method", "description")}
    assert asked == {
        "amount": "2000",
        "currency": "usd",
        "customer": CUSTOMER,
        "payment_method": CARD,
        "description": "t1: ACME",
    }
    payment = await payment_of(conn)
    assert (payment.status, payment.reference, payment.provider, payment.attempts) == ("paid", "pi_1", "stripe", 1)
    assert (moved["metadata[thread]"], moved["metadata[key]"]) == ("t1", payment.idempotency_key)


async def test_a_payee_that_is_a_connected_account_gets_the_money(stripe: Stripe) -> None:
    await provider_at(stripe.url).pay(replace(ORDER, payee="acct_1A2b"))
    await provider_at(stripe.url).pay(replace(ORDER, key="k:t2", payee="acct_1A2b or so"))
    assert [moved.get("transfer_data[destination]") for moved in stripe.moved] == ["acct_1A2b", None]


@pytest.mark.parametrize("fault", ["lost", "dropped", 429, 500, 503, 409], ids=str)
@pytest.mark.parametrize("step", ["create", "confirm"])
async def test_without_an_answer_the_same_keys_are_used_again(
    conn: Connection, flows: Flows, stripe: Stripe, step: Step, fault: Fault
) -> None:
    stripe.faults[step].append(fault)
    with pytest.raises(DriveFailed, match="PaymentUnanswered"):
        await pay(conn, flows, stripe)
    assert await pay(conn, flows, stripe) == "over"
    assert (len(stripe.moved), len(stripe.intents)) == (1, 1)
    payment = await payment_of(conn)
    assert (payment.status, payment.reference, payment.attempts) == ("paid", "pi_1", 2)


async def test_a_decline_is_kept_and_said(conn: Connection, flows: Flows, stripe: Stripe) -> None:
    stripe.faults["confirm"].append("declined")
    assert await pay(conn, flows, stripe) == "over"
    payment = await payment_of(conn)
    assert payment.status == "refused"
    assert "Your card was declined." in str(payment.reason)
    assert stripe.moved == []


async def test_a_payment_that_wants_a_person_is_cancelled_and_refused(
    conn: Connection, flows: Flows, stripe: Stripe
) -> None:
    stripe.faults["confirm"].append("requires_action")
    assert await pay(conn, flows, stripe) == "over"
    assert ((await payment_of(conn)).status, stripe.intents["pi_1"]["status"]) == ("refused", "canceled")


@pytest.mark.parametrize(("becomes", "status"), [("succeeded", "paid"), ("canceled", "refused")])
async def test_a_payment_that_takes_its_time_is_asked_for_until_it_is_settled(
    conn: Connection, flows: Flows, stripe: Stripe, becomes: str, status: str
) -> None:
    stripe.faults["confirm"].append("processing")
    for _ in range(2):
        with pytest.raises(DriveFailed, match="still processing pi_1"):
            await pay(conn, flows, stripe)
    stripe.intents["pi_1"]["status"] = becomes
    assert await pay(conn, flows, stripe) == "over"
    assert (await payment_of(conn)).status == status


async def test_a_payment_that_succeeds_while_it_is_cancelled_is_paid(stripe: Stripe) -> None:
    stripe.faults["confirm"].append("requires_action")
    provider = provider_at(stripe.url)
    cancelled = stripe._do

    def succeed_first(step: Step, asked: dict[str, str], intent_id: str, fault: object) -> tuple[int, dict[str, Any]]:
        if step == "cancel":
            stripe.intents[intent_id]["status"] = "succeeded"
        return cancelled(step, asked, intent_id, fault)

    stripe._do = succeed_first  # type: ignore[method-assign]
    assert await provider.pay(ORDER) == "pi_1"


async def test_what_fails_after_the_confirmation_leaves_it_open(conn: Connection, flows: Flows, stripe: Stripe) -> None:
    stripe.faults["confirm"].append("processing")
    stripe.faults["retrieve"].append(401)
    with pytest.raises(DriveFailed, match="PaymentUnanswered"):
        await pay(conn, flows, stripe)
    # It was asked: that must not be forgotten.
    assert (await payment_of(conn)).attempts == 1


async def test_a_payment_confirmed_by_hand_is_paid(conn: Connection, flows: Flows, stripe: Stripe) -> None:
    stripe.faults["confirm"].append("dropped")
    with pytest.raises(DriveFailed, match="PaymentUnanswered"):
        await pay(conn, flows, stripe)
    stripe.intents["pi_1"]["status"] = "succeeded"
    assert await pay(conn, flows, stripe) == "over"
    assert ((await payment_of(conn)).status, stripe.moved) == ("paid", [])


async def test_a_wrong_key_of_ours_is_no_refusal(conn: Connection, flows: Flows, stripe: Stripe) -> None:
    with pytest.raises(DriveFailed, match="Stripe refuses STRIPE_API_KEY"):
        await pay(conn, flows, stripe, api_key="sk_test_old")
    assert (await payment_of(conn)).attempts == 0
    assert await pay(conn, flows, stripe) == "over"
    assert len(stripe.moved) == 1


async def test_a_stripe_that_cannot_be_reached_was_not_asked(conn: Connection, flows: Flows) -> None:
    async with Stripe() as gone:
        pass
    with pytest.raises(DriveFailed, match="Stripe cannot be reached"):
        await pay(conn, flows, gone)
    assert ((await payment_of(conn)).status, (await payment_of(conn)).attempts) == ("intended", 0)


async def test_a_key_that_stripe_knows_with_another_amount_is_left_to_a_person(stripe: Stripe) -> None:
    await provider_at(stripe.url).pay(ORDER)
    with pytest.raises(Exception, match="Keys can only be used with the same parameters") as caught:
        await provider_at(stripe.url).pay(replace(ORDER, amount=Decimal("251.00")))
    assert type(caught.value).__name__ == "PaymentUnanswered"
    assert len(stripe.moved) == 1


async def test_nothing_is_looked_up_on_a_guess(stripe: Stripe) -> None:
    with pytest.raises(CannotLookUp, match="dashboard"):
        await provider_at(stripe.url).look_up(ORDER)


@pytest.mark.parametrize(
    ("amount", "currency", "minor"),
    [
        ("250.00", "USD", 25_000),
        ("0.01", "EUR", 1),
        ("5000", "JPY", 5_000),
        ("5", "UGX", 500),
        ("5", "ISK", 500),
        ("1.230", "KWD", 1_230),
        ("999999999999999.99", "USD", 99_999_999_999_999_999),
    ],
)
def test_an_amount_is_in_stripes_smallest_unit(amount: str, currency: str, minor: int) -> None:
    assert minor_units(Decimal(amount), currency) == minor


@pytest.mark.parametrize(("amount", "currency"), [("1.234", "KWD"), ("0.5", "JPY"), ("0.001", "USD")])
def test_an_amount_that_stripe_cannot_pay_exactly_is_refused(amount: str, currency: str) -> None:
    with pytest.raises(PaymentRefused, match=f"cannot pay {amount} {currency} exactly"):
        minor_units(Decimal(amount), currency)


@pytest.mark.skipif(node.skip_reason() is not None, reason=node.skip_reason() or "")
async def test_the_shapes_are_stripes() -> None:
    """Against a Stripe that is not ours."""
    with running_emulate() as url:
        client = StripeClient(API_KEY, base_addresses={"api": url})
        customer = await asyncio.to_thread(client.v1.customers.create)
        provider = replace(provider_at(url), customer=customer.id)
        paid = await asyncio.to_thread(client.v1.payment_intents.retrieve, await provider.pay(ORDER))
        assert (paid.status, paid.amount, paid.currency) == ("succeeded", 25_000, "usd")
        assert paid.metadata is not None
        assert (paid.metadata["thread"], paid.metadata["key"]) == ("t1", ORDER.key)
        # A wrong setting is no refusal of the claim.
        with pytest.raises(PaymentUnsent, match=r"STRIPE_CUSTOMER: .*No such customer"):
            await provider_at(url).pay(ORDER)


@pytest.mark.parametrize("missing", ["STRIPE_API_KEY", "STRIPE_CUSTOMER", "STRIPE_PAYMENT_METHOD"])
def test_what_is_missing_is_said_at_start(tmp_path: Path, database_url: str, missing: str) -> None:
    given = {"STRIPE_API_KEY": API_KEY, "STRIPE_CUSTOMER": CUSTOMER, "STRIPE_PAYMENT_METHOD": CARD, missing: ""}
    done = Terminal(tmp_path, DATABASE_URL=database_url, PAYMENT_PROVIDER="stripe", **given).run("serve")
    assert (done.code, done.out) == (2, "")
    assert f"{missing} not set" in done.err


async def test_a_small_claim_is_paid_by_stripe_at_the_command_line(
    tmp_path: Path, database_url: str, stripe: Stripe
) -> None:
    terminal = Terminal(
        tmp_path,
        DATABASE_URL=database_url,
        PAYMENT_PROVIDER="stripe",
        STRIPE_API_KEY=API_KEY,
        STRIPE_CUSTOMER=CUSTOMER,
        STRIPE_PAYMENT_METHOD=CARD,
        STRIPE_API_BASE=stripe.url,
    )
    done = await terminal.run_meanwhile("start", "--thread", "t1", "--amount", "20")
    assert (done.code, done.out) == (0, "t1: 20.00 USD is paid, reference pi_1\n")
    assert len(stripe.moved) == 1
