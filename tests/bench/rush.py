"""Fifty people click at once, second after second: how long until each click is acknowledged.

Clicks come on a clock, not one after the answer to the other, as Slack's do; each is on a card of its own, whose update
and whose payment in a fresh process compete for the same cores.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Sequence
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

CLICKS_A_SECOND = 50
REQUIRED_P99_MS = 50.0


@dataclass(frozen=True, kw_only=True)
class Rush:
    """What came out: acknowledgements in ms, and how long the last payment took after the last click, in s."""

    acknowledged_ms: Sequence[float]
    paid_after_s: float

    @property
    def p99_ms(self) -> float:
        return statistics.quantiles(self.acknowledged_ms, n=100)[98]

    def rendered(self) -> str:
        p50 = statistics.median(self.acknowledged_ms)
        verdict = "met" if self.p99_ms <= REQUIRED_P99_MS else "missed"
        return (
            f"click to acknowledgement at {CLICKS_A_SECOND} clicks a second ({len(self.acknowledged_ms)} clicks):"
            f" p50 {p50:.1f} ms, p99 {self.p99_ms:.1f} ms (required: {REQUIRED_P99_MS:g} ms) {verdict};"
            f" the last was paid {self.paid_after_s:.1f} s after the last click"
        )


async def rush(server_url: str, admin: psycopg.Connection, home: Path, *, seconds: int) -> Rush:
    """Click for so many seconds on a `serve` of its own."""
    with database(server_url, admin) as url:
        async with (
            SlackStandIn() as slack,
            aiohttp.ClientSession() as http,
            serving(serve_environment(url, slack), home, http) as serve_url,
            await connect(url, "door") as conn,
        ):
            waiting = await _wait_for_approval(conn, CLICKS_A_SECOND * (seconds + 1))
            # A first second is thrown away: it fills the pool and warms what a bot that runs for days has warm.
            await _click_all(http, serve_url, waiting[:CLICKS_A_SECOND])
            await _all_paid(conn, CLICKS_A_SECOND)
            took = await _click_all(http, serve_url, waiting[CLICKS_A_SECOND:])
            ended = time.perf_counter()
            await _all_paid(conn, len(waiting))
            return Rush(acknowledged_ms=took, paid_after_s=time.perf_counter() - ended)


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


async def _click_all(http: aiohttp.ClientSession, serve_url: str, approvals: Sequence[Approval]) -> list[float]:
    began = time.perf_counter()

    async def click(number: int, approval: Approval) -> float:
        await asyncio.sleep(max(0.0, began + number / CLICKS_A_SECOND - time.perf_counter()))
        value = f'{{"interrupt": "{approval.interrupt_id}", "hash": "{approval.request_hash}"}}'
        body = block_actions_body(user=APPROVER, team=TEAM, value=value, channel=CHANNEL, message_ts="1.000300")
        headers = {"Content-Type": FORM, **sign(SIGNING_SECRET, int(time.time()), body)}
        sent = time.perf_counter()
        async with http.post(f"{serve_url}/slack/events", data=body, headers=headers) as answer:
            if answer.status != 200:
                raise RuntimeError(f"a click was answered with {answer.status}: {await answer.text()}")
        return (time.perf_counter() - sent) * 1000

    return await asyncio.gather(*(click(number, approval) for number, approval in enumerate(approvals)))


async def _all_paid(conn: Connection, count: int) -> None:
    await until(conn, "SELECT count(*) >= %s AS ok FROM payments", count, every_s=0.05)
