"""Stripe as the provider: a PaymentIntent charges the configured customer's saved payment method.

Two calls, each under an idempotency key of its own made from the order's: create, then confirm. Money moves in the
second one only, so a crash between them leaves an intent that nobody ever confirms twice. A payee that is a connected
account (`acct_…`) gets the money; any other is only named in the description.

Keys: https://docs.stripe.com/api/idempotent_requests; a key is kept for at least 24 hours, and its first answer, which
may be a refusal, is that to each repeat. Stripe's search is not made for finding what was just written, so this
provider does not look up.
"""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from decimal import Context, Decimal

import aiohttp
import stripe
from stripe import PaymentIntent, RequestOptions, StripeClient
from stripe.params import PaymentIntentCreateParams

from flow.inputs import storable
from flow.providers import CannotLookUp, Order, PaymentRefused, PaymentUnanswered, PaymentUnsent
from flow.spans import address_of, span

# Stripe's smallest units: https://docs.stripe.com/currencies#zero-decimal (UGX and ISK count hundredths there, although
# they have none)
_WHOLE = frozenset(
    ["BIF", "CLP", "DJF", "GNF", "JPY", "KMF", "KRW", "MGA", "PYG", "RWF", "VND", "VUV", "XAF", "XOF", "XPF"]
)
_THOUSANDTHS = frozenset(["BHD", "JOD", "KWD", "OMR", "TND"])


@dataclass(frozen=True, kw_only=True)
class StripeProvider:
    """`customer` and `payment_method` are Stripe's ids (`cus_…`, `pm_…`); `api_base` is Stripe's own if None."""

    api_key: str
    customer: str
    payment_method: str
    timeout_s: float
    api_base: str | None = None
    name: str = "stripe"
    key_lifetime_s: float = 86_400.0
    answers_by_key: bool = True

    @property
    def address(self) -> str:
        return address_of(self.api_base) if self.api_base else "api.stripe.com"

    async def pay(self, order: Order) -> str:
        amount = minor_units(order.amount, order.currency)
        confirmed = False
        try:
            async with self._client() as client:
                intent = await self._create(client, order, amount)
                if intent.status == "requires_confirmation":
                    intent = await _confirm(client, order, intent)
                confirmed = True
                if intent.status != "succeeded":
                    # The answer to the confirmation is repeated as it was; what has become of it since is asked for.
                    intent = await _retrieve(client, intent)
                return await self._settled(client, order, intent)
        except PaymentUnsent as exc:
            if confirmed:
                raise PaymentUnanswered(str(exc)) from exc
            raise

    async def look_up(self, order: Order) -> str | None:  # noqa: ARG002 (the protocol's)
        raise CannotLookUp("look for the thread's payment in Stripe's dashboard")

    async def _create(self, client: StripeClient, order: Order, amount: int) -> PaymentIntent:
        params: PaymentIntentCreateParams = {
            "amount": amount,
            "currency": order.currency.lower(),
            "customer": self.customer,
            "payment_method": self.payment_method,
            # A person who would have to be sent somewhere is not there.
            "automatic_payment_methods": {"enabled": True, "allow_redirects": "never"},
            "description": f"{order.thread_id}: {order.payee}"[:500] if order.payee else order.thread_id,
            "metadata": {"thread": order.thread_id, "key": order.key},
        }
        if re.fullmatch(r"acct_[A-Za-z0-9]+", order.payee):
            params["transfer_data"] = {"destination": order.payee}
        creating = client.v1.payment_intents.create_async(params, {"idempotency_key": order.key})
        return await _traced("payment_intents.create", creating)

    async def _settled(self, client: StripeClient, order: Order, intent: PaymentIntent) -> str:
        """The reference of a payment that succeeded. Whatever is not under way any more is refused."""
        if intent.status == "succeeded":
            return intent.id
        if intent.status == "processing":
            raise PaymentUnanswered(f"Stripe is still processing {intent.id}")
        wanted = intent.status
        if wanted != "canceled":
            # It wants something that nobody will do; it must not succeed later on.
            intent = await _cancel(client, order, intent)
        if intent.status == "succeeded":
            return intent.id
        if intent.status != "canceled":
            raise PaymentUnanswered(f"Stripe says that {intent.id} is {intent.status}")
        raise PaymentRefused(f"Stripe did not take the payment ({intent.id} was {wanted})")

    @asynccontextmanager
    async def _client(self) -> AsyncIterator[StripeClient]:
        """A client for one payment, whose errors are the provider's three."""
        async with aiohttp.ClientSession() as session:
            client = stripe.StripeClient(
                self.api_key,
                # Whether to ask again is ours to decide.
                max_network_retries=0,
                http_client=stripe.AIOHTTPClient(timeout=aiohttp.ClientTimeout(total=self.timeout_s), session=session),
                base_addresses={"api": self.api_base} if self.api_base else {},
            )
            try:
                yield client
            except stripe.APIConnectionError as exc:
                if isinstance(exc.__cause__, aiohttp.ClientConnectorError):
                    raise PaymentUnsent(f"Stripe cannot be reached: {exc.__cause__}") from exc
                raise PaymentUnanswered(f"no answer from Stripe ({type(exc.__cause__).__name__})") from exc
            except (stripe.AuthenticationError, stripe.PermissionError) as exc:
                # Nothing was looked at: when the key is mended, the claim can be paid.
                raise PaymentUnsent(f"Stripe refuses STRIPE_API_KEY: {_said(exc)}") from exc
            except (stripe.CardError, stripe.InvalidRequestError) as exc:
                if exc.code == "resource_missing" and exc.param in ("customer", "payment_method"):
                    # It is our setting that is wrong, not the claim.
                    raise PaymentUnsent(f"Stripe does not know STRIPE_{exc.param.upper()}: {_said(exc)}") from exc
                raise PaymentRefused(f"Stripe refused: {_said(exc)}") from exc
            except (aiohttp.ClientError, TimeoutError, OSError) as exc:
                # Its library lets through what happens while an answer is read.
                raise PaymentUnanswered(f"no answer from Stripe ({type(exc).__name__})") from exc
            except stripe.StripeError as exc:
                # Its own failure, too many requests, or a key that it knows with other parameters.
                raise PaymentUnanswered(f"Stripe failed: {_said(exc)}") from exc


async def _confirm(client: StripeClient, order: Order, intent: PaymentIntent) -> PaymentIntent:
    try:
        confirming = client.v1.payment_intents.confirm_async(
            intent.id, {"off_session": True}, {"idempotency_key": f"{order.key}/confirm"}
        )
        return await _traced("payment_intents.confirm", confirming)
    except stripe.InvalidRequestError as exc:
        if exc.code != "payment_intent_unexpected_state":
            raise
        # Somebody else has confirmed or cancelled it: its state says what became of it.
        return await _retrieve(client, intent)


async def _cancel(client: StripeClient, order: Order, intent: PaymentIntent) -> PaymentIntent:
    try:
        options: RequestOptions = {"idempotency_key": f"{order.key}/cancel"}
        return await _traced("payment_intents.cancel", client.v1.payment_intents.cancel_async(intent.id, {}, options))
    except stripe.InvalidRequestError as exc:
        if exc.code != "payment_intent_unexpected_state":
            raise
        # It was settled in this very moment.
        return await _retrieve(client, intent)


async def _retrieve(client: StripeClient, intent: PaymentIntent) -> PaymentIntent:
    return await _traced("payment_intents.retrieve", client.v1.payment_intents.retrieve_async(intent.id))


async def _traced(what: str, calling: Awaitable[PaymentIntent]) -> PaymentIntent:
    with span(f"stripe {what}", kind="client") as call:
        try:
            return await calling
        except stripe.StripeError as exc:
            if exc.http_status:
                call.answered(exc.http_status)
            raise


def minor_units(amount: Decimal, currency: str) -> int:
    """The amount in Stripe's smallest unit of the currency. Raises PaymentRefused if it is no whole number of them."""
    decimals = 0 if currency in _WHOLE else 3 if currency in _THOUSANDTHS else 2
    # Whatever precision the caller's thread has been set to.
    minor = amount.scaleb(decimals, Context(prec=50))
    whole = int(minor)
    # Of thousandths Stripe takes whole tens.
    if minor != whole or (decimals == 3 and whole % 10):
        raise PaymentRefused(f"Stripe cannot pay {amount} {currency} exactly")
    return whole


def _said(exc: Exception) -> str:
    return storable(" ".join(str(exc).split()).encode("utf-8", "replace").decode())[:300]
