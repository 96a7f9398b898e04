"""People click, so many a second: how long until each click is acknowledged, and until its claim is paid.

Clicks come on a clock, not one after the answer to the other, as Slack's do; each is on a card of its own, whose update
and whose payment in a fresh process compete for the same cores.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import psycopg

from flow import inputs, threads
from flow.approvals import approvals_of
from flow.database import Connection, connect
from flow.model import CLAIM_FLOW as FLOW
from flow.model import CLAIM_FLOW_VERSION as FLOW_VERSION
from flow.model import Approval
from tests.bench.databases import database
from tests.bench.probes import APPROVER, serve_environment, until
from tests.bench.programs import serving
from tests.bench.slack_stand_in import CHANNEL, TEAM, SlackStandIn
from tests.slack_requests import FORM, SIGNING_SECRET, block_actions_body, sign

# Clicks a second, and for how many seconds.
RUSHES, QUICK_RUSHES = {1: 20, 10: 10, 50: 10}, {1: 3, 10: 2, 50: 2}
# At every rate.
REQUIRED_P99_MS = 50.0
# How many times faster than the plain script's `resume` a click is paid, where the machine keeps up.
REQUIRED_RATIO = 50.0

# How exactly the moment of a payment is known.
_LOOKS_EVERY_S = 0.002


@dataclass(frozen=True, kw_only=True)
class Rush:
    """What came out of each click, in ms."""

    clicks_a_second: int
    acknowledged_ms: Sequence[float]
    paid_ms: Sequence[float]

    @property
    def p99_ms(self) -> float:
        """Of the acknowledgements."""
        return _p99(self.acknowledged_ms)

    @property
    def paid_p50_ms(self) -> float:
        return statistics.median(self.paid_ms)

    def meets(self, resume_ms: float | None) -> bool:
        """What is required, against the plain script's `resume`, if that was measured."""
        acknowledges = self.p99_ms <= REQUIRED_P99_MS
        return acknowledges and (resume_ms is None or self.paid_p50_ms * REQUIRED_RATIO <= resume_ms)

    def rendered(self, resume_ms: float | None) -> str:
        line = (
            f"{self.clicks_a_second} clicks a second ({len(self.paid_ms)}):"
            f" acknowledged after {statistics.median(self.acknowledged_ms):.1f} ms (p50), {self.p99_ms:.1f} ms (p99;"
            f" required: {REQUIRED_P99_MS:g} ms);"
            f" paid after {self.paid_p50_ms:.1f} ms (p50), {_p99(self.paid_ms):.1f} ms (p99)"
        )
        if resume_ms is not None:
            line += f", 1/{resume_ms / self.paid_p50_ms:.0f} of `resume` (required: 1/{REQUIRED_RATIO:g})"
        return f"{line} {'met' if self.meets(resume_ms) else 'missed'}"


def _p99(values: Sequence[float]) -> float:
    """Of fewer than a hundred it is the largest."""
    return statistics.quantiles(values, n=100, method="inclusive")[98] if len(values) >= 100 else max(values)


async def rush(
    server_url: str, admin: psycopg.Connection, home: Path, *, rushes: Mapping[int, int], say: Callable[[str], None]
) -> list[Rush]:
    """Click on a `serve` of its own, at one rate after the other; `rushes` says for how many seconds."""
    warm_up = max(rushes)
    with database(server_url, admin) as url:
        async with (
            SlackStandIn() as slack,
            aiohttp.ClientSession() as http,
            serving(serve_environment(url, slack), home, http) as serve_url,
            await connect(url, "door") as conn,
            await connect(url, "door") as watch,
        ):
            counts = [rate * seconds for rate, seconds in rushes.items()]
            waiting = await _wait_for_approval(conn, warm_up + sum(counts))
            # A first second is thrown away: it fills the pool and warms what a bot that runs for days has warm.
            await _rush(http, serve_url, watch, [waiting.pop() for _ in range(warm_up)], warm_up)
            found = []
            for (rate, seconds), count in zip(rushes.items(), counts, strict=True):
                say(f"{seconds} s of {rate} clicks a second")
                found.append(await _rush(http, serve_url, watch, [waiting.pop() for _ in range(count)], rate))
            return found


async def _rush(
    http: aiohttp.ClientSession, serve_url: str, watch: Connection, approvals: Sequence[Approval], rate: int
) -> Rush:
    clicked: dict[str, float] = {}
    acknowledged, paid = await asyncio.gather(
        _click_all(http, serve_url, approvals, rate, clicked),
        _payments(watch, {approval.thread_id for approval in approvals}),
    )
    paid_ms = [(paid[thread_id] - at) * 1000 for thread_id, at in clicked.items()]
    return Rush(clicks_a_second=rate, acknowledged_ms=acknowledged, paid_ms=paid_ms)


async def _payments(watch: Connection, thread_ids: set[str]) -> dict[str, float]:
    """When each of these was seen to be paid."""
    seen: dict[str, float] = {}
    while len(seen) < len(thread_ids):
        rows = await watch.execute(
            "SELECT thread_id FROM payments WHERE thread_id = ANY(%s)", (list(thread_ids - seen.keys()),)
        )
        now = time.perf_counter()
        seen |= {row["thread_id"]: now for row in await rows.fetchall()}
        await asyncio.sleep(_LOOKS_EVERY_S)
    return seen


async def _wait_for_approval(conn: Connection, count: int) -> list[Approval]:
    """So many claims that wait, each with a card that we say was posted: Slack would take a second for each."""
    claim = inputs.parse_claim(amount="250", currency="USD", payee="ACME")
    ids = [f"rush-{number}" for number in range(count)]
    for thread_id in ids:
        await threads.insert_thread(
            conn,
            thread_id=thread_id,
            flow=FLOW,
            flow_version=FLOW_VERSION,
            input=claim.as_input(),
            requested_by="cli:ann",
        )
        await conn.execute("UPDATE notices SET status = 'sent', due_at = NULL WHERE status = 'pending'")
    await until(conn, "SELECT count(*) = %s AS ok FROM threads WHERE status = 'waiting'", count, every_s=0.05)
    await conn.execute("UPDATE notices SET status = 'sent', due_at = NULL, attempt = attempt + 1")
    await conn.execute(
        "INSERT INTO messages (channel, ts, interrupt_id) SELECT %s, row_number() OVER ()::text || '.000200',"
        " interrupt_id FROM approvals ON CONFLICT DO NOTHING",
        (CHANNEL,),
    )
    found = await approvals_of(conn, ids)
    return [found[thread_id][0] for thread_id in ids]


async def _click_all(
    http: aiohttp.ClientSession, serve_url: str, approvals: Sequence[Approval], rate: int, clicked: dict[str, float]
) -> list[float]:
    """How long each acknowledgement took, in ms; `clicked` gets the moment of each click."""
    began = time.perf_counter()

    async def click(number: int, approval: Approval) -> float:
        await asyncio.sleep(max(0.0, began + number / rate - time.perf_counter()))
        value = f'{{"interrupt": "{approval.interrupt_id}", "hash": "{approval.request_hash}"}}'
        body = block_actions_body(user=APPROVER, team=TEAM, value=value, channel=CHANNEL, message_ts="1.000300")
        headers = {"Content-Type": FORM, **sign(SIGNING_SECRET, int(time.time()), body)}
        sent = clicked[approval.thread_id] = time.perf_counter()
        async with http.post(f"{serve_url}/slack/events", data=body, headers=headers) as answer:
            if answer.status != 200:
                raise RuntimeError(f"a click was answered with {answer.status}: {await answer.text()}")
        return (time.perf_counter() - sent) * 1000

    return await asyncio.gather(*(click(number, approval) for number, approval in enumerate(approvals)))
