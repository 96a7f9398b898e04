"""One, two and four workers on one database: how fast they pay what is due together, and what they cost each other.

More workers than cores make nothing faster: what counts is that they do not hinder each other, and that no thread is
driven twice.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import psycopg
from psycopg.types.json import Jsonb

from flow import inputs
from flow.database import Connection, connect, ring
from flow.model import CLAIM_FLOW, CLAIM_FLOW_VERSION
from tests.bench.databases import database
from tests.bench.programs import CLAIM_FLOW as PROGRAM
from tests.bench.programs import environment, running, timed_ms

WORKERS = (1, 2, 4)
# Each worker's, and so the most drives at a time.
_STAND_BYS = 2
_LOOKS_EVERY_S = 0.01
_WITHIN_S = 300.0
_TOKEN = "the-token-of-the-benchmark"


@dataclass(frozen=True, kw_only=True)
class Worked:
    """What came of it. `drives` counts drives by how they ended; `waits` counts for what sessions were seen waiting,
    of `seen` sessions that did anything."""

    workers: int
    claims: int
    took_s: float
    drives: Counter[str]
    payments: int
    waits: Counter[str]
    seen: int

    @property
    def met(self) -> bool:
        """Each claim is paid once, by one drive."""
        return self.payments == self.claims == self.drives["over"]

    def rendered(self) -> str:
        drives = ", ".join(f"{count} {outcome}" for outcome, count in sorted(self.drives.items()))
        waits = ", ".join(f"{count / self.seen:.1%} {what}" for what, count in self.waits.most_common(4))
        return (
            f"{self.workers} workers: {self.claims / self.took_s:.1f} claims a second ({self.claims} in"
            f" {self.took_s:.1f} s); drives: {drives}; sessions at work waited: {waits or 'never'}"
            f" {'met' if self.met else 'missed'}"
        )


async def workers(
    server_url: str, admin: psycopg.Connection, home: Path, *, claims: int, say: Callable[[str], None]
) -> list[Worked]:
    """So many small claims that are due at once, paid by one worker, then by two, then by four."""
    found = []
    for count in WORKERS:
        say(f"{count} workers, {claims} claims")
        with database(server_url, admin) as url:
            env = environment(DATABASE_URL=url, STAND_BY=str(_STAND_BYS), METRICS_TOKEN=_TOKEN)
            await timed_ms(PROGRAM, "setup", env=env, cwd=home)
            async with (
                aiohttp.ClientSession() as http,
                await connect(url, "door") as conn,
                contextlib.AsyncExitStack() as stack,
            ):
                workers = [await stack.enter_async_context(running("work", env, home, http)) for _ in range(count)]
                urls = [url for url, _ in workers]
                found.append(await _work(http, urls, conn, url, claims))
    return found


async def _work(http: aiohttp.ClientSession, urls: Sequence[str], conn: Connection, url: str, claims: int) -> Worked:
    async with waits_of(url) as waits:
        began = time.perf_counter()
        await _file(conn, claims)
        await _until_over(conn, claims)
        took_s = time.perf_counter() - began
    drives: Counter[str] = Counter()
    for each in urls:
        drives += await _drives_of(http, each)
    row = await (await conn.execute("SELECT count(*) AS payments FROM payments")).fetchone()
    assert row is not None
    seen = waits.pop("")
    return Worked(
        workers=len(urls), claims=claims, took_s=took_s, drives=drives, payments=row["payments"], waits=waits, seen=seen
    )


async def _file(conn: Connection, claims: int) -> None:
    """All in one transaction, as a batch is imported."""
    claim = inputs.parse_claim(amount="20", currency="USD", payee="ACME")
    async with conn.transaction():
        await conn.execute(
            "INSERT INTO threads (thread_id, flow, flow_version, input, requested_by)"
            " SELECT 'due-' || n, %s, %s, %s, 'cli:ann' FROM generate_series(1, %s) AS n",
            (CLAIM_FLOW, CLAIM_FLOW_VERSION, Jsonb(claim.as_input()), claims),
        )
        await ring(conn)


async def _until_over(conn: Connection, claims: int) -> None:
    deadline = time.monotonic() + _WITHIN_S
    query = "SELECT count(*) >= %s AS over FROM threads WHERE status = 'paid'"
    while not ((row := await (await conn.execute(query, (claims,))).fetchone()) and row["over"]):
        if time.monotonic() > deadline:
            raise RuntimeError(f"{claims} claims are not paid within {_WITHIN_S:g} s")
        await asyncio.sleep(_LOOKS_EVERY_S)


@contextlib.asynccontextmanager
async def waits_of(url: str) -> AsyncIterator[Counter[str]]:
    """Counts what our sessions that do anything are seen to wait for; under the empty name, how often any was seen."""
    seen: Counter[str] = Counter({"": 0})

    async def look(conn: Connection) -> None:
        while True:
            rows = await conn.execute(
                "SELECT wait_event_type || ' ' || wait_event AS what FROM pg_stat_activity"
                " WHERE datname = current_database() AND application_name LIKE 'claim_flow %' AND state = 'active'"
                " AND pid <> pg_backend_pid()"
            )
            for row in await rows.fetchall():
                seen[""] += 1
                if row["what"]:
                    seen[row["what"]] += 1
            await asyncio.sleep(_LOOKS_EVERY_S)

    async with await connect(url, "door") as conn:
        looking = asyncio.ensure_future(look(conn))
        try:
            yield seen
        finally:
            looking.cancel()
            await asyncio.wait({looking})


async def _drives_of(http: aiohttp.ClientSession, url: str) -> Counter[str]:
    """A worker's own count of its drives, by how they ended."""
    async with http.get(f"{url}/metrics", headers={"Authorization": f"Bearer {_TOKEN}"}) as answer:
        answer.raise_for_status()
        text = await answer.text()
    found = re.findall(r'^claim_flow_drives_total\{outcome="(\w+)"\} ([0-9.e+]+)$', text, re.MULTILINE)
    return Counter({outcome: int(float(count)) for outcome, count in found})
