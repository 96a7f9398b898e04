"""Events to the endpoints of WEBHOOK_URLS, signed per https://www.standardwebhooks.com.

Each endpoint has a lane of its own, with its own connections and its own name look-ups: one that is slow, or fails,
delays nobody else. An event keeps its id and its bytes at every attempt; only time and signature are new.

Whoever configures a URL could otherwise have us ask what only we can reach: so it is resolved here, every address must
be public, the connection goes to exactly the address that was checked, and redirects are not followed.
"""

from __future__ import annotations

import asyncio
import contextlib
import email.utils
import json
import logging
import math
import random
import re
import socket
import time
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import aiohttp
from aiohttp.abc import AbstractResolver, ResolveResult
from standardwebhooks.webhooks import Webhook

from bot.pool import Pool, on_pool, pool_of
from flow import addresses, deliveries
from flow.addresses import ForbiddenAddress, is_public
from flow.aio import to_its_end
from flow.database import AWAY, OUTSIDE_AFTER_S, Connection, Lock, wakes
from flow.inputs import storable
from flow.model import Delivery, Event
from flow.settings import Settings
from flow.spans import Recorder

log = logging.getLogger(__name__)

# The standard's own schedule: three days. What is not delivered by then is a dead letter.
RETRIES_S = (5, 300, 1800, 7200, 18_000, 36_000, 50_400, 72_000, 86_400)
# Failures that came together do not return together.
_JITTER = 0.1
# An endpoint may ask for patience, but not for ever.
_LONGEST_PATIENCE_S = 86_400.0

_CONNECT_S, _CALL_S = 5.0, 15.0
# Of an answer at most 64 kB are taken from the network: aiohttp stops when it holds twice its buffer, after one more
# read of what the socket holds, which is twice what it is told.
_READ_BUFFER, _SOCKET_BUFFER = 1 << 13, 1 << 14
# Bytes that surely hold the characters of an answer that are kept.
_KEPT_CHARACTERS = 200
_KEPT_BYTES = 4 * _KEPT_CHARACTERS

IsAllowed = Callable[[str], bool]
LookUp = Callable[[str, int], Sequence[str]]


@dataclass(frozen=True, kw_only=True)
class Receiver:
    """Who gets events: several secrets while one is replaced by another."""

    name: str
    url: str
    secrets: tuple[str, ...]


def receivers_of(settings: Settings) -> tuple[Receiver, ...]:
    """The endpoints of WEBHOOK_URLS."""
    secrets = settings.webhook_signing_secret_lists
    return tuple(
        Receiver(name=name, url=url, secrets=tuple(secrets[name])) for name, url in settings.webhook_url_of.items()
    )


class WebhookDeliverer:
    """Delivers to its receivers; any number of them may run side by side, with the same settings or others."""

    def __init__(self, lanes: Sequence[_Lane]) -> None:
        self._lanes = lanes
        # Whether the last look at the database succeeded; part of readiness.
        self.connected = False

    @classmethod
    @contextlib.asynccontextmanager
    async def of(cls, settings: Settings) -> AsyncIterator[WebhookDeliverer]:
        allowed: IsAllowed = (lambda _: True) if settings.webhook_allow_private else is_public
        async with deliverer_to(receivers_of(settings), is_allowed=allowed, spans=settings.spans) as deliverer:
            yield deliverer

    async def run(self, url: str) -> None:
        """Deliver whenever something is due, until cancelled."""
        async with pool_of(url) as pool, asyncio.TaskGroup() as group:
            for lane in self._lanes:
                group.create_task(lane.run(pool))
            await self._listen(url)

    async def sweep(self, url: str, *, within_s: float = math.inf) -> tuple[int, int]:
        """Deliver what is due now; how many were sent, and how many not. Begins none after `within_s`."""
        deadline = asyncio.get_running_loop().time() + within_s
        async with pool_of(url) as pool, asyncio.TaskGroup() as group:
            sweeping = [group.create_task(lane.sweep(pool, deadline)) for lane in self._lanes]
        counts = [task.result() for task in sweeping]
        return sum(sent for sent, _ in counts), sum(failed for _, failed in counts)

    async def _listen(self, url: str) -> None:
        async with contextlib.aclosing(wakes(url, present_as=(Lock.WEBHOOKS,), after_s=OUTSIDE_AFTER_S)) as waking:
            async for connected in waking:
                self.connected = connected
                for lane in self._lanes if connected else ():
                    lane.look.set()


@contextlib.asynccontextmanager
async def deliverer_to(
    receivers: Sequence[Receiver],
    *,
    is_allowed: IsAllowed,
    look_up: LookUp | None = None,
    call_s: float = _CALL_S,
    spans: bool = True,
) -> AsyncIterator[WebhookDeliverer]:
    """A deliverer with connections that reach allowed addresses only."""
    async with contextlib.AsyncExitStack() as stack:
        lanes = []
        for receiver in receivers:
            resolver = _Resolver(look_up or addresses.look_up, is_allowed)
            stack.push_async_callback(resolver.close)
            http = await stack.enter_async_context(_session(resolver, is_allowed, call_s))
            lanes.append(_Lane(receiver, http, spans=spans))
        yield WebhookDeliverer(lanes)


class _Lane:
    """Everything of one receiver, one delivery after the other."""

    def __init__(self, receiver: Receiver, http: aiohttp.ClientSession, *, spans: bool) -> None:
        self._receiver, self._http, self._spans = receiver, http, spans
        self.look = asyncio.Event()

    async def run(self, pool: Pool) -> None:
        while True:
            await self.look.wait()
            self.look.clear()
            try:
                await self.sweep(pool)
            except AWAY as exc:
                # Leases run out by themselves; the listener keeps trying and wakes us.
                log.warning("the database is away: %s", str(exc).strip())

    async def sweep(self, pool: Pool, deadline: float = math.inf) -> tuple[int, int]:
        """Deliver what is due; how many were sent, and how many not."""
        clock = asyncio.get_running_loop().time
        sent = failed = 0
        await on_pool(pool, lambda conn: deliveries.spread(conn, self._receiver.name))
        while clock() < deadline:
            # One that is cut off would be sent again when its lease runs out.
            delivered = await to_its_end(self._deliver_next(pool))
            if delivered is None:
                break
            sent, failed = sent + delivered, failed + (not delivered)
        return sent, failed

    async def _deliver_next(self, pool: Pool) -> bool | None:
        """Whether the delivery that is due was sent; None if none is due. No connection is held while it is sent."""
        delivery = await on_pool(pool, lambda conn: deliveries.lease(conn, self._receiver.name))
        if delivery is None:
            return None
        recorder = Recorder(f"webhook {delivery.endpoint}", on=self._spans, kind="client")
        answer = await self._send(delivery)
        spans = recorder.rows(
            error=answer.failure, event=delivery.event.type, attempt=delivery.attempt, **answer.as_attributes()
        )
        await on_pool(pool, lambda conn: _record(conn, delivery, answer, spans))
        return answer.taken

    async def _send(self, delivery: Delivery) -> Answer:
        body = body_of(delivery.event)
        headers = {
            "Content-Type": "application/json",
            "User-Agent": "claim-flow",
            **signed_headers(self._receiver, id_of(delivery), body, at=_now()),
        }
        try:
            async with self._http.post(
                self._receiver.url, data=body, headers=headers, allow_redirects=False
            ) as response:
                answer = await _read(response)
                # What it still has to say is not waited for.
                response.close()
                return answer
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError, ArithmeticError) as exc:
            return Answer(status=None, text=f"{type(exc).__name__}: {exc}", raised=exc)


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What came back: no status if no answer did."""

    status: int | None
    text: str
    retry_after_s: float | None = None
    raised: Exception | None = None

    @property
    def taken(self) -> bool:
        return self.status is not None and 200 <= self.status < 300

    @property
    def failure(self) -> Exception | str | None:
        """What a span has as its error."""
        return self.raised or (None if self.taken else str(self.status))

    def as_attributes(self) -> dict[str, int]:
        return {} if self.status is None else {"http.response.status_code": self.status}

    @property
    def error(self) -> str:
        said = f": {self.text}" if self.text else ""
        # Of strangers: what the row can hold, and no more than a look at it.
        return storable(f"{f'answered {self.status}' if self.status else 'no answer'}{said}")[:_KEPT_CHARACTERS]


async def _record(conn: Connection, delivery: Delivery, answer: Answer, spans: str) -> None:
    event, endpoint, error = delivery.event, delivery.endpoint, answer.error
    if answer.taken:
        await deliveries.mark_sent(conn, delivery, spans=spans)
    elif answer.status == 410:
        log.error("endpoint %s is gone, and turned off until `claim_flow.py webhooks resend`: %s", endpoint, error)
        await deliveries.turn_off(conn, delivery, error, spans=spans)
    elif delivery.tries > len(RETRIES_S):
        log.error("event %s is a dead letter for %s: %s", event.id, endpoint, error)
        await deliveries.mark_dead(conn, delivery, error, spans=spans)
    else:
        wait_s = RETRIES_S[delivery.tries - 1] * random.uniform(1 - _JITTER, 1 + _JITTER)  # noqa: S311 (no secret)
        log.warning("event %s did not reach %s, next try in %.0f s: %s", event.id, endpoint, wait_s, error)
        await deliveries.mark_later(
            conn,
            delivery,
            wait_s=max(wait_s, answer.retry_after_s or 0.0),
            error=error,
            # It speaks of itself, not of this event.
            quiet_s=answer.retry_after_s if answer.status in (429, 503) else None,
            spans=spans,
        )


# What is sent


def _now() -> datetime:
    return datetime.now(UTC)


def id_of(delivery: Delivery) -> str:
    """The webhook-id: the same at every attempt, and no other event's or endpoint's."""
    return f"evt_{delivery.event.id}_{delivery.endpoint}"


def body_of(event: Event) -> bytes:
    """The event as JSON: the same bytes whoever sends it, and whenever."""
    return json.dumps(event.as_json(), sort_keys=True, ensure_ascii=True, separators=(",", ":")).encode()


def signed_headers(receiver: Receiver, webhook_id: str, body: bytes, *, at: datetime) -> dict[str, str]:
    """The standard's three headers, with a signature by each of the receiver's secrets."""
    return {
        "webhook-id": webhook_id,
        "webhook-timestamp": str(int(at.timestamp())),
        "webhook-signature": " ".join(
            Webhook(secret).sign(webhook_id, at.astimezone(UTC), body.decode()) for secret in receiver.secrets
        ),
    }


# What comes back


async def _read(response: aiohttp.ClientResponse) -> Answer:
    """The answer. Of one that took the event nothing more is read: it may go on for ever."""
    answer = Answer(status=response.status, text="", retry_after_s=retry_after_s(response.headers.get("Retry-After")))
    if answer.taken:
        return answer
    read = b""
    # Whatever happens now, this is what it said.
    with contextlib.suppress(aiohttp.ClientError, TimeoutError, OSError):
        async for chunk in response.content.iter_any():
            read += chunk
            if len(read) >= _KEPT_BYTES:
                break
    text = " ".join(read[:_KEPT_BYTES].decode(errors="replace").split())
    return Answer(status=answer.status, text=text, retry_after_s=answer.retry_after_s)


def retry_after_s(given: str | None) -> float | None:
    """Seconds, or a date: https://www.rfc-editor.org/rfc/rfc9110#field.retry-after. None for whatever is neither."""
    if given is None:
        return None
    if re.fullmatch(r"[0-9]{1,9}", given, re.ASCII):
        return min(float(given), _LONGEST_PATIENCE_S)
    try:
        at = email.utils.parsedate_to_datetime(given)
        wait_s = (at if at.tzinfo else at.replace(tzinfo=UTC)).timestamp() - time.time()
    except (ValueError, OverflowError):
        return None
    return min(max(wait_s, 0.0), _LONGEST_PATIENCE_S)


# Whom we speak to


class _Resolver(AbstractResolver):
    """Asks once per connection, and gives nothing if a single address is not allowed."""

    def __init__(self, look_up: LookUp, is_allowed: IsAllowed) -> None:
        self._look_up, self._is_allowed = look_up, is_allowed
        # A name server that does not answer keeps threads busy for long: those of this endpoint, not everybody's.
        self._threads = ThreadPoolExecutor(max_workers=2, thread_name_prefix="resolver")

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_UNSPEC
    ) -> list[ResolveResult]:
        del family
        addresses = await asyncio.get_running_loop().run_in_executor(self._threads, self._look_up, host, port)
        for address in addresses:
            if not self._is_allowed(address):
                raise ForbiddenAddress(host, address)
        return [
            ResolveResult(
                hostname=host,
                host=address,
                port=port,
                family=socket.AF_INET6 if ":" in address else socket.AF_INET,
                proto=socket.IPPROTO_TCP,
                flags=socket.AI_NUMERICHOST,
            )
            for address in addresses
        ]

    async def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)


def _session(resolver: _Resolver, is_allowed: IsAllowed, call_s: float) -> aiohttp.ClientSession:
    def allowed_socket(address_info: Any) -> socket.socket:
        family, kind, protocol, _, address = address_info
        # An address that is written in the URL is never looked up. This is the one that is connected to.
        if not is_allowed(address[0]):
            raise ForbiddenAddress("the URL's host", address[0])
        sock = socket.socket(family, kind, protocol)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _SOCKET_BUFFER)
        return sock

    connector = aiohttp.TCPConnector(
        resolver=resolver,
        socket_factory=allowed_socket,
        # A connection that is kept is one whose name is not checked again.
        force_close=True,
        use_dns_cache=False,
    )
    return aiohttp.ClientSession(
        connector=connector,
        timeout=aiohttp.ClientTimeout(total=call_s, connect=min(_CONNECT_S, call_s)),
        cookie_jar=aiohttp.DummyCookieJar(),
        read_bufsize=_READ_BUFFER,
        # A few bytes can be made to stand for gigabytes.
        auto_decompress=False,
    )
