"""What deploy/partitions.sql changes at a million threads: one database with it and one without, side by side.

    uv run python -m tests.bench.partitions
    uv run python -m tests.bench.partitions --threads 20000

No test, as the benchmark beside it is none. The table in docs/scaling.md is what it prints.
"""

from __future__ import annotations

import asyncio
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any, LiteralString

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
    """Measure one table and sixteen partitions, turn by turn, and print the figures."""
    with (
        tempfile.TemporaryDirectory(prefix="claim-flow-bench-") as home,
        server(Path(home)) as server_url,
        psycopg.connect(server_url, autocommit=True) as admin,
        database(server_url, admin) as plain,
        database(server_url, admin) as parted,
    ):
        click.echo(f"{machine(versions_of(admin))}; {many:,} threads")
        asyncio.run(_compare(plain, parted, many, rounds))


async def _compare(plain: str, parted: str, many: int, rounds: int) -> None:
    async with await connect(plain, "drive") as one, await connect(parted, "drive") as other:
        for url, conn in ((plain, one), (parted, other)):
            await ensure_schema(url, conn)
            await ensure_checkpoint_tables(url, conn)
            await conn.execute(_FILL, {"flow": CLAIM_FLOW, "version": CLAIM_FLOW_VERSION, "many": many})
        began = time.perf_counter()
        async with other.transaction():
            await other.execute(SCRIPT.read_bytes(), prepare=False)
        took_s = time.perf_counter() - began
        for conn in (one, other):
            await conn.execute("VACUUM ANALYZE")
            await conn.execute("CHECKPOINT")
        click.echo("\n| | one table | 16 partitions |\n|---|---|---|")
        for name, act in _ACTS.items():
            click.echo(f"| {name} | {' | '.join(await _medians(act, (one, other), many, rounds))} |")
        for name, statements in _CHORES.items():
            took = [await _seconds(*each) for each in zip((one, other), statements, strict=True)]
            click.echo(f"| {name} | {' | '.join(took)} |")
        click.echo(f"\nthe script took {took_s:.0f} s")


Act = Callable[[Connection, str], Awaitable[Any]]

_OURS = [flow_key(CLAIM_FLOW, CLAIM_FLOW_VERSION)]

_ACTS: dict[str, Act] = {
    "a worker's look at what is due": lambda conn, _: threads.due_threads(
        conn, flows=_OURS, drive_timeout_s=120.0, limit=100
    ),
    "a thread by its id": threads.thread_of,
    "a decision wakes its thread": threads.wake,
    "a drive takes its thread": threads.take,
    "a new thread": lambda conn, thread_id: start_claim(conn, f"new-{thread_id}"),
    "the newest fifty": lambda conn, _: threads.latest_threads(conn, status=None, limit=50),
}

# On the one table, and on one partition of the other.
_CHORES = {
    "`VACUUM` of every page of what is vacuumed at a time": (
        "VACUUM (FREEZE, DISABLE_PAGE_SKIPPING) threads",
        "VACUUM (FREEZE, DISABLE_PAGE_SKIPPING) threads_p0",
    ),
    "`REINDEX` of what is locked at a time": ("REINDEX TABLE threads", "REINDEX TABLE threads_p0"),
}


async def _medians(act: Act, conns: Sequence[Connection], many: int, rounds: int) -> list[str]:
    """For each connection, in milliseconds, and the 99th of a hundred: a busy machine is busy for both."""
    times: list[list[float]] = [[] for _ in conns]
    for turn in range(rounds):
        # Threads that wait, spread over the whole table.
        thread_id = f"t{1 + 100 * (turn * 7919 % (many // 100))}"
        for conn, own in zip(conns, times, strict=True):
            began = time.perf_counter()
            await act(conn, thread_id)
            own.append((time.perf_counter() - began) * 1000)
    return [f"{statistics.median(own):.2f} ms (99 %: {sorted(own)[len(own) * 99 // 100]:.1f})" for own in times]


async def _seconds(conn: Connection, statement: LiteralString) -> str:
    began = time.perf_counter()
    await conn.execute(statement)
    return f"{time.perf_counter() - began:.2f} s"


if __name__ == "__main__":
    main()
