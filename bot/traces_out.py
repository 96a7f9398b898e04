"""Traces to where the settings say: by OTLP over HTTP, in JSON, to a collector, and to Langfuse.

Each target has a lane of its own, with its own connection: one that is slow, or away, delays nobody else. Nobody waits
for a trace, so there is no bell: what there is goes out every POLL_S, in requests of bounded size, and never on the way
of a drive or a click.

What an answer means: https://opentelemetry.io/docs/specs/otlp/#failures-1. A request is given up only where its own
spans are refused; while a target is away, overloaded, broken, or does not know our key, they stay where they are.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import math
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import Any

import aiohttp

from bot.otlp import Target, body_of, span_as_json, targets_of
from bot.webhooks_out import Answer, retry_after_s
from flow import exports
from flow.aio import to_its_end
from flow.database import AWAY, POLL_S, Connection, connect
from flow.exports import Export, Part
from flow.log import concerning, hider, secrets_of
from flow.settings import Settings
from flow.trace import tree_of

log = logging.getLogger(__name__)

# Of one request. Collectors take 20 MB by default, and services behind proxies 1 MB.
MOST_SPANS, MOST_BYTES = 500, 900_000

_CONNECT_S, _CALL_S = 5.0, 15.0
# More of an answer is not read.
_ANSWER_BYTES = 1 << 14

# The specification's own: the same request may be sent again. Any other 5xx is taken for a trouble of the target, too.
_LATER = (429, 502, 503, 504)
# The key or the address is wrong, or it takes no JSON: no request can succeed until somebody mends it.
_CLOSED = (401, 403, 404, 405, 415)


class TraceSender:
    """Sends to its targets; any number of them may run side by side."""

    def __init__(self, lanes: Sequence[_Lane]) -> None:
        self._lanes = lanes

    @classmethod
    @contextlib.asynccontextmanager
    async def of(cls, settings: Settings, *, call_s: float = _CALL_S) -> AsyncIterator[TraceSender]:
        hide = hider(secrets_of(settings))
        async with http_session(call_s) as http:
            yield cls([_Lane(target, settings.trace_resource, http, hide) for target in targets_of(settings)])

    async def run(self, url: str) -> None:
        """Send whatever there is, until cancelled."""
        async with asyncio.TaskGroup() as group:
            for lane in self._lanes:
                group.create_task(lane.run(url))

    async def sweep(self, url: str, *, within_s: float = math.inf) -> tuple[int, int]:
        """Send what is due now; of how many threads it was sent, and of how many not. Begins none after `within_s`."""
        deadline = asyncio.get_running_loop().time() + within_s
        async with asyncio.TaskGroup() as group:
            sweeping = [group.create_task(_sweep_once(lane, url, deadline)) for lane in self._lanes]
        counts = [task.result() for task in sweeping]
        return sum(sent for sent, _ in counts), sum(failed for _, failed in counts)


def http_session(call_s: float = _CALL_S) -> aiohttp.ClientSession:
    return aiohttp.ClientSession(
        timeout=aiohttp.ClientTimeout(total=call_s, connect=min(_CONNECT_S, call_s)),
        cookie_jar=aiohttp.DummyCookieJar(),
    )


async def _sweep_once(lane: _Lane, url: str, deadline: float) -> tuple[int, int]:
    async with await connect(url, "door") as conn:
        return await lane.sweep(conn, deadline)


class _Lane:
    """Everything of one target, one request after the other."""

    def __init__(
        self, target: Target, resource: dict[str, str], http: aiohttp.ClientSession, hide: Callable[[str], str]
    ) -> None:
        self._target, self._resource, self._http, self._hide = target, resource, http, hide

    async def run(self, url: str) -> None:
        conn: Connection | None = None
        while True:
            try:
                if conn is None or conn.closed:
                    conn = await connect(url, "door")
                await self.sweep(conn)
            except AWAY as exc:
                # Leases run out by themselves.
                log.warning("the database is away: %s", str(exc).strip())
                if conn is not None:
                    await conn.close()
            await asyncio.sleep(POLL_S)

    async def sweep(self, conn: Connection, deadline: float = math.inf) -> tuple[int, int]:
        """Send what is due; of how many threads it was sent, and of how many not."""
        clock = asyncio.get_running_loop().time
        sent = failed = 0
        # Whoever has started since without this target has taken it out.
        await exports.add_targets(conn, [self._target.name])
        await exports.spread(conn)
        while clock() < deadline:
            # What is cut off would be sent again when its lease runs out.
            went = await to_its_end(self._send_next(conn))
            if went is None:
                break
            sent, failed = sent + went[0], failed + went[1]
        return sent, failed

    async def _send_next(self, conn: Connection) -> tuple[int, int] | None:
        """Of how many threads something was sent, and of how many not, by one request; None if nothing is due."""
        leased = await exports.lease(conn, self._target.name)
        if not leased:
            return None
        batch = await self._gather(conn, leased)
        await exports.put_back(conn, leased[len(batch.parts) :])
        if not batch.spans:
            await exports.mark_sent(conn, batch.parts)
            return 0, 0
        answer = await post(self._http, self._target, body_of(batch.spans, self._resource))
        if answer.taken:
            await exports.mark_sent(conn, batch.parts)
            return len(batch.parts), 0
        await self._refused(conn, batch.parts, answer)
        return 0, len(batch.parts)

    async def _gather(self, conn: Connection, leased: Sequence[Export]) -> _Batch:
        """What fits into one request: of each thread, in their order, what the target has not got."""
        batch, size = _Batch(parts=[], spans=[]), 0
        for export in leased:
            try:
                said, last = await self._said(conn, export)
            except (ArithmeticError, KeyError, TypeError, ValueError):
                # One that we cannot write must not keep the others waiting.
                log.exception("thread %s: its trace cannot be sent", export.thread_id)
                said, last = {}, True
            fitting: list[str] = []
            for span_id, text in said.items():
                size += len(text)
                if batch.spans and (size > MOST_BYTES or len(batch.spans) == MOST_SPANS):
                    batch.parts += [Part(export=export, spans=fitting, last=False)] if fitting else []
                    return batch
                batch.spans.append(text)
                fitting.append(span_id)
            batch.parts.append(Part(export=export, spans=fitting, last=last))
        return batch

    async def _said(self, conn: Connection, export: Export) -> tuple[dict[str, str], bool]:
        """Spans that the target has not got, by id, each as JSON; and whether these are all.

        No more than one request takes, however many there are: clicks are answered on the same loop.
        """
        tree = await tree_of(conn, export.thread_id, without=export.sent, most=MOST_SPANS, settled=True)
        said: dict[str, str] = {}
        size = 0
        for _, node in tree.root.each():
            span = node.span
            if span.ended_at is None or span.span_id in export.sent:
                continue
            if len(said) == MOST_SPANS or size > MOST_BYTES:
                return said, False
            said[span.span_id] = json.dumps(span_as_json(span, tree, self._target, self._hide))
            size += len(said[span.span_id])
        return said, not tree.cut

    async def _refused(self, conn: Connection, parts: Sequence[Part], answer: Answer) -> None:
        name, status, threads = self._target.name, answer.status, [part.export for part in parts]
        error = self._hide(f"{name} {answer.error}")
        if status is None or status in _LATER:
            log.warning("traces do not get out for now: %s", error)
            await exports.put_off(conn, threads, error=error, wait_s=answer.retry_after_s)
        elif status in _CLOSED or status < 400:
            log.error("traces do not get out until somebody mends it, see `claim_flow.py doctor`: %s", error)
            await exports.put_off(conn, threads, error=error, alarm=True)
        elif status >= 500:
            log.warning("traces do not get out for now: %s", error)
            await exports.put_off(conn, threads, error=error, wait_s=answer.retry_after_s, alone=True)
        elif len(parts) > 1:
            # One of them may be what it does not like.
            log.warning("traces are sent one by one: %s", error)
            await exports.put_back(conn, threads, alone=True)
        else:
            [part] = parts
            with concerning(thread=part.export.thread_id):
                log.error("%s spans of this thread are given up: %s", len(part.spans), error)
            await exports.give_up(conn, part, error=error)


@dataclass(kw_only=True)
class _Batch:
    """Of which threads what goes out together, and how it is written."""

    parts: list[Part]
    spans: list[str]


async def post(http: aiohttp.ClientSession, target: Target, body: bytes) -> Answer:
    """Send one request, and say what came back. A page is no answer: it is not there that traces are taken."""
    headers = {"User-Agent": "claim-flow", **target.headers, "Content-Type": "application/json"}
    try:
        async with http.post(target.url, data=body, headers=headers, allow_redirects=False) as response:
            said = (await response.content.read(_ANSWER_BYTES)).decode(errors="replace")
            is_page, status = response.content_type == "text/html", response.status
            wait_s = retry_after_s(response.headers.get("Retry-After"))
    except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as exc:
        return Answer(status=None, text=f"{type(exc).__name__}: {exc}")
    if 200 <= status < 300 and not is_page:
        _say_what_was_left_out(target, said)
        return Answer(status=status, text="")
    return Answer(
        status=404 if is_page and status < 300 else status,
        text=f"a page, with status {status}: it takes no traces" if is_page else " ".join(said.split()),
        retry_after_s=wait_s,
    )


def _say_what_was_left_out(target: Target, said: str) -> None:
    """The specification wants no second try: https://opentelemetry.io/docs/specs/otlp/#partial-success-1."""
    try:
        partial: Any = json.loads(said or "{}")["partialSuccess"]
        count, why = int(partial.get("rejectedSpans") or 0), str(partial.get("errorMessage") or "")
    except (ArithmeticError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        # They have it, whatever else they say.
        return
    if count or why:
        log.warning("%s has left out %s spans: %s", target.name, count, why[:200])
