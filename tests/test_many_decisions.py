"""Five hundred decisions over fifty connections: none fails, each is recorded once."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Sequence

import pytest

from flow.database import Connection
from flow.policy import Tier
from tests.api_door import Program, api_in_process, token
from tests.people import ask
from tests.rows import value

_DECISIONS, _CONNECTIONS = 500, 50


@pytest.mark.timeout(300)
async def test_many_decisions_at_once_are_all_recorded(
    database_url: str, conn: Connection, capfd: pytest.CaptureFixture[str]
) -> None:
    tier = Tier(name="approval", approvers=("webhook:acme:carol", "api:robot"))
    async with conn.transaction():
        asked = [await ask(conn, f"t{number:03}", tier=tier) for number in range(_DECISIONS)]
    secret = await token(conn, scopes=("decide",))
    async with api_in_process(database_url) as url:
        took = await asyncio.gather(
            *(_decide(url, secret, asked[number::_CONNECTIONS], number) for number in range(_CONNECTIONS))
        )
    latencies = sorted(latency for each in took for latency in each)
    assert len(latencies) == _DECISIONS
    assert await value(conn, "SELECT count(*) FROM decisions WHERE verdict = 'approve'") == _DECISIONS
    assert await value(conn, "SELECT count(*) FROM threads WHERE due_at IS NOT NULL AND wakes = 1") == _DECISIONS
    p50, p99 = latencies[_DECISIONS // 2], latencies[_DECISIONS * 99 // 100]
    with capfd.disabled():
        sys.stderr.write(
            f"\n{_DECISIONS} decisions over {_CONNECTIONS} connections: no error,"
            f" p50 {p50 * 1000:.0f} ms, p99 {p99 * 1000:.0f} ms\n"
        )


async def _decide(url: str, secret: str, asked: Sequence[str], number: int) -> list[float]:
    """Decide these one after the other, half of the callers with a token and half signed; how long each took, in s."""
    latencies = []
    async with Program(url, secret if number % 2 else None) as program:
        for interrupt_id in asked:
            begun = time.monotonic()
            if number % 2:
                answer = await program.post(f"/api/approvals/{interrupt_id}/decision", {"decision": "approve"})
            else:
                body = {"decision": "approve", "approver": "carol"}
                answer = await program.decide_signed(interrupt_id, body, webhook_id=f"msg_{interrupt_id}")
            latencies.append(time.monotonic() - begun)
            assert answer.status == 200, answer.body
    return latencies
