"""Who moves the money: payment providers outside, each behind the same three words.

A provider is asked with a key that it should remember, so that asking again is safe for as long as it does; or it can
be asked what became of a key; or neither, and then nobody asks twice. They know neither Postgres nor LangGraph.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from decimal import Decimal
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Protocol
from urllib.parse import urlsplit

from flow.errors import FlowError, SettingError
from flow.inputs import MAX_NAME, storable
from flow.settings import Settings
from flow.spans import address_of, span
from flow.text import digest

if TYPE_CHECKING:
    import aiohttp


class PaymentRefused(FlowError):
    """The provider said no, for good; no money has moved."""


class PaymentUnsent(FlowError):
    """The provider was not reached; no money has moved."""


class PaymentUnanswered(FlowError):
    """No usable answer came; the money may have moved. Asking again later may tell."""


class CannotLookUp(FlowError):
    """This provider cannot be asked what became of a key."""


@dataclass(frozen=True, kw_only=True)
class Order:
    """What a provider is asked to pay, under a key that stays the same however often it is asked."""

    key: str
    thread_id: str
    amount: Decimal
    currency: str
    payee: str


class Provider(Protocol):
    """A payment provider outside.

    `key_lifetime_s`: how long it remembers a key, in seconds; 0 if it does not. `timeout_s`: how long its answer is
    waited for. `address`: whom it asks, so that nobody else is asked under the same key. `answers_by_key`: whether a
    refusal is its word on the key, so that an order under it that was not answered has paid nothing, either.
    """

    @property
    def name(self) -> str: ...

    @property
    def key_lifetime_s(self) -> float: ...

    @property
    def timeout_s(self) -> float: ...

    @property
    def address(self) -> str: ...

    @property
    def answers_by_key(self) -> bool: ...

    async def pay(self, order: Order) -> str:
        """Pay, and return the provider's reference.

        Safe to repeat within `key_lifetime_s`: a known key gets the first reference again. Raises PaymentRefused,
        PaymentUnsent or PaymentUnanswered.
        """

    async def look_up(self, order: Order) -> str | None:
        """The reference of the payment made under this key; None if nothing was paid under it.

        Raises CannotLookUp, or PaymentUnanswered if no usable answer came this time.
        """


@dataclass(frozen=True, kw_only=True)
class HttpProvider:
    """A POST with an `Idempotency-Key` header, as many payment services take it.

    Body: `{"amount": "250.00", "currency": "USD", "payee": "…", "thread": "t1"}`. A 2xx answer is a JSON object with
    the reference under `reference` or `id`. 4xx is a refusal, but for 401, which says that our token is wrong, and for
    408, 409, 425 and 429, which like 5xx and silence leave it open. Looking up is a GET of `lookup_url` with the same
    header; `{"reference": null}` and nothing more, with 2xx or 404, says that nothing was paid: with more in it, it may
    be of a payment that is under way. A refusal, and a 404 that does not say so, may come from whatever stands before
    the service, and knows of no key.
    """

    url: str
    token: str | None
    timeout_s: float
    key_lifetime_s: float
    lookup_url: str | None
    name: str = "http"
    answers_by_key: bool = False

    @property
    def address(self) -> str:
        """The host, and what tells the rest apart, which may be secret."""
        parts = urlsplit(self.url)
        port = parts.port or {"http": 80, "https": 443}.get(parts.scheme)
        return f"{parts.hostname}:{port}/{digest(parts.path)[:8]}"

    async def pay(self, order: Order) -> str:
        body = {
            "amount": str(order.amount),
            "currency": order.currency,
            "payee": order.payee,
            "thread": order.thread_id,
        }
        status, answer = await self._call("POST", self.url, order, body)
        if 200 <= status < 300:
            return _reference_in(answer)
        if status == 401:
            # Nothing was looked at: when the token is mended, the claim can be paid.
            raise PaymentUnsent(f"the payment service refuses PAYMENT_TOKEN (401: {self._reason_in(answer)})")
        said = f"the payment service answered {status}: {self._reason_in(answer)}"
        if 400 <= status < 500 and status not in _OPEN:
            raise PaymentRefused(said)
        raise PaymentUnanswered(said)

    async def look_up(self, order: Order) -> str | None:
        if self.lookup_url is None:
            raise CannotLookUp("PAYMENT_LOOKUP_URL is not set")
        try:
            status, answer = await self._call("GET", self.lookup_url, order, None)
        except PaymentUnsent as exc:
            raise PaymentUnanswered(str(exc)) from exc
        if (200 <= status < 300 or status == 404) and answer == {"reference": None}:
            return None
        if 200 <= status < 300:
            return _reference_in(answer)
        asked = f"when it was asked about {order.key}"
        raise PaymentUnanswered(f'the payment service answered {status}, and not {{"reference": null}}, {asked}')

    async def _call(self, method: str, url: str, order: Order, body: dict[str, str] | None) -> tuple[int, Any]:
        import aiohttp

        headers = {"Idempotency-Key": order.key} | ({"Authorization": f"Bearer {self.token}"} if self.token else {})
        timeout = aiohttp.ClientTimeout(total=self.timeout_s)
        said = {"http.request.method": method, "server.address": address_of(url)}
        try:
            with span(method, kind="client", **said) as call:
                async with (
                    aiohttp.ClientSession(timeout=timeout) as session,
                    # A redirect would carry the order to an address that nobody has configured.
                    session.request(method, url, json=body, headers=headers, allow_redirects=False) as response,
                ):
                    call.answered(response.status)
                    return response.status, _json_or_text(await _body_of(response))
        except aiohttp.ClientConnectorError as exc:
            raise PaymentUnsent(f"the payment service cannot be reached: {exc}") from exc
        except (aiohttp.ClientError, TimeoutError, OSError) as exc:
            raise PaymentUnanswered(f"no answer from the payment service ({type(exc).__name__}: {exc})") from exc

    def _reason_in(self, answer: Any) -> str:
        """In its own words, which are kept and shown; a service may quote the token that it refuses."""
        if isinstance(answer, dict):
            answer = answer.get("error") or answer.get("detail") or answer.get("message") or answer
        said = " ".join(str(answer).split())
        return storable(said.replace(self.token, "PAYMENT_TOKEN") if self.token else said)[:300]


# A time-out, a conflict with a request that is still running, "too early", "too many": none says that nothing was paid.
_OPEN = {408, 409, 425, 429}
_LONGEST_ANSWER = 65_536


def provider_of(settings: Settings) -> Provider | None:
    """The provider that PAYMENT_PROVIDER names; None for the ledger, whose payment is the row itself.

    Raises SettingError if what it needs is missing.
    """
    match settings.payment_provider:
        case "ledger":
            return None
        case "http":
            return _http_provider(settings)
        case "stripe":
            return _stripe_provider(settings)


def _http_provider(settings: Settings) -> Provider:
    if settings.payment_url is None:
        raise SettingError("PAYMENT_URL is not set: PAYMENT_PROVIDER=http needs it (see .env.example)")
    token = settings.payment_token
    return HttpProvider(
        url=settings.payment_url,
        token=token.get_secret_value() if token else None,
        timeout_s=settings.payment_timeout,
        key_lifetime_s=settings.payment_key_lifetime,
        lookup_url=settings.payment_lookup_url,
    )


def _stripe_provider(settings: Settings) -> Provider:
    key, customer, method = settings.stripe_api_key, settings.stripe_customer, settings.stripe_payment_method
    if key is None or customer is None or method is None:
        wanted = {"STRIPE_API_KEY": key, "STRIPE_CUSTOMER": customer, "STRIPE_PAYMENT_METHOD": method}
        missing = " and ".join(name for name, value in wanted.items() if value is None)
        raise SettingError(f"{missing} not set: PAYMENT_PROVIDER=stripe needs them all (see .env.example)")
    if find_spec("stripe") is None:
        raise SettingError("PAYMENT_PROVIDER=stripe needs the package stripe: `uv sync --extra stripe`")
    from flow.stripe_provider import StripeProvider

    return StripeProvider(
        api_key=key.get_secret_value(),
        customer=customer,
        payment_method=method,
        timeout_s=settings.payment_timeout,
        api_base=settings.stripe_api_base,
    )


def _reference_in(answer: Any) -> str:
    reference = (answer.get("reference") or answer.get("id")) if isinstance(answer, dict) else None
    if type(reference) not in (str, int) or not str(reference):
        # It says that it has paid, and not what: asking again under the same key may tell.
        raise PaymentUnanswered("the payment service answered without a reference")
    return storable(str(reference))[:MAX_NAME]


async def _body_of(response: aiohttp.ClientResponse) -> bytes:
    """The body, or so much of one that is too long."""
    body = b""
    # One read gives what is there, which may be a part.
    async for chunk in response.content.iter_any():
        body += chunk
        if len(body) >= _LONGEST_ANSWER:
            break
    return body[:_LONGEST_ANSWER]


def _json_or_text(body: bytes) -> Any:
    try:
        return json.loads(body)
    except ValueError:
        return body.decode("utf-8", "replace")
