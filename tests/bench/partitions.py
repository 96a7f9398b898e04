"""What deploy/partitions.sql changes at a million threads: the same database, measured before it and after.

    uv run python -m tests.bench.partitions
    uv run python -m tests.bench.partitions --threads 20000

No test, as the benchmark beside it is none. The table in docs/scaling.md is what it prints.
"""

from __future__ import annotations

import asyncio
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import click
import psycopg

from flow import threads
from flow.database import Connection, connect, ensure_schema
from flow.drive import ensure_checkpoint_tables
from flow.model import CLAIM_FLOW, CLAIM_FLOW_VERSION, flow_key
from tests.bench.databases import database, machine, server, versions_of
from tests.command import ROOT
from tests.people import start_claim

SCRIPT = ROOT / "deploy/partitions.sql"

# Of a million: most of them are over, a hundredth waits for people, and a thousandth is due.
_FILL = """
    INSERT INTO threads (thread_id, flow, flow_version, input, requested_by, status, due_at, created_at, ended_at)
    SELECT 't' || g, %(flow)s, %(version)s,
        '{"amount": "250", "currency": "USD", "payee": "ACME", "note": "three chairs"}', 'cli:ann',
        CASE WHEN g %% 1000 = 0 THEN 'running' WHEN g %% 100 = 1 THEN 'waiting' ELSE 'paid' END,
        CASE WHEN g %% 1000 = 0 THEN clock_timestamp() - g * interval '1 millisecond' END,
        clock_timestamp() - g * interval '1 second',
        CASE WHEN g %% 1000 > 0 AND g %% 100 <> 1 THEN clock_timestamp() END
    FROM generate_series(1, %(many)s) AS g
"""


@click.command(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120})
@click.option("--threads", "many", type=click.IntRange(1000), default=1_000_000, show_default=True)
@click.option("--rounds", type=click.IntRange(1), default=500, show_default=True, help="How often each is measured.")
def main(many: int, rounds: int) -> None:
    """Measure one table and sixteen partitions, and print the figures."""
    with (
        tempfile.TemporaryDirectory(prefix="claim-flow-bench-") as home,
        server(Path(home)) as server_url,
        psycopg.connect(server_url, autocommit=True) as admin,
        database(server_url, admin) as url,
    ):
        click.echo(f"{machine(versions_of(admin))}; {many:,} threads")
        asyncio.run(_measure(url, many, rounds))


async def _measure(url: str, many: int, rounds: int) -> None:
    async with await connect(url, "drive") as conn:
        await ensure_schema(url, conn)
        await ensure_checkpoint_tables(url, conn)
        await conn.execute(_FILL, {"flow": CLAIM_FLOW, "version": CLAIM_FLOW_VERSION, "many": many})
        before = await _figures(conn, "plain", many, rounds)
        began = time.perf_counter()
        async with conn.transaction():
            await conn.execute(SCRIPT.read_bytes(), prepare=False)
        took_s = time.perf_counter() - began
        after = await _figures(conn, "parted", many, rounds)
    click.echo("\n| | one table | 16 partitions |\n|---|---|---|")
    for name, figure in before.items():
        click.echo(f"| {name} | {figure} | {after[name]} |")
    click.echo(f"\nthe script took {took_s:.0f} s")


async def _figures(conn: Connection, prefix: str, many: int, rounds: int) -> dict[str, str]:
    await conn.execute("VACUUM ANALYZE")
    await conn.execute("CHECKPOINT")
    flows = [flow_key(CLAIM_FLOW, CLAIM_FLOW_VERSION)]
    # Spread over the whole table.
    chosen = [f"t{1 + 100 * (each * 7919 % (many // 100))}" for each in range(rounds)]
    found = {
        "the due scan": await _median(
            lambda _: threads.due_threads(conn, flows=flows, drive_timeout_s=120.0, limit=100), chosen
        ),
        "a thread by its id": await _median(lambda each: threads.thread_of(conn, each), chosen),
        "a decision wakes its thread": await _median(lambda each: threads.wake(conn, each), chosen),
        "a drive takes its thread": await _median(lambda each: threads.take(conn, each), chosen),
        "a new thread": await _median(lambda each: start_claim(conn, f"{prefix}-{each}"), chosen),
        "the newest fifty": await _median(lambda _: threads.latest_threads(conn, status=None, limit=50), chosen),
    }
    began = time.perf_counter()
    await conn.execute("VACUUM threads")
    found["vacuum of the whole table"] = f"{time.perf_counter() - began:.2f} s"
    first = await conn.execute(
        "SELECT coalesce((SELECT min(inhrelid::regclass::text) FROM pg_inherits WHERE inhparent = 'threads'::regclass),"
        " 'threads') AS name"
    )
    row = await first.fetchone()
    assert row is not None
    began = time.perf_counter()
    await conn.execute(f"REINDEX TABLE {row['name']}")
    found["rebuilding the indexes of what is locked for it"] = f"{time.perf_counter() - began:.2f} s"
    return found


async def _median(act: Callable[[str], Awaitable[Any]], chosen: list[str]) -> str:
    """In milliseconds, and the 99th of a hundred."""
    times = []
    for each in chosen:
        began = time.perf_counter()
        await act(each)
        times.append((time.perf_counter() - began) * 1000)
    times.sort()
    return f"{statistics.median(times):.2f} ms (99 %: {times[len(times) * 99 // 100]:.2f})"


if __name__ == "__main__":
    main()
