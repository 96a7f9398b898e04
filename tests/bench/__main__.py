"""The benchmark: claim-flow and the plain script side by side, in one run, on one Postgres server.

    uv run python -m tests.bench
    uv run python -m tests.bench --rounds 30 --check

It is no test: a busy machine makes both sides slow, and only the ratios mean anything. `probes.py` says what is
measured and what is required; TEST_DATABASE_URL names a server to use instead of an embedded one.
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
from pathlib import Path

import click
import psycopg

from tests.bench.databases import machine, server, versions_of
from tests.bench.many import many
from tests.bench.probes import ROWS, probes
from tests.bench.programs import compile_bytecode
from tests.bench.rush import CLICKS_A_SECOND, REQUIRED_P99_MS, Rush, rush
from tests.bench.table import Series, measure, missed, rendered

_QUICK_ROUNDS = 3
_SECONDS, _QUICK_SECONDS = 10, 2


@click.command(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120})
@click.option(
    "--rounds", type=click.IntRange(1, 1000), default=15, show_default=True, help="How often each is measured."
)
@click.option("--quick", is_flag=True, help=f"Only {_QUICK_ROUNDS} rounds: the table, not the truth.")
@click.option("--check", is_flag=True, help="Exit 1 if a requirement is missed.")
def main(rounds: int, quick: bool, check: bool) -> None:
    """Measure claim-flow against the plain script, and print one table."""
    compile_bytecode()
    rounds, seconds = (_QUICK_ROUNDS, _QUICK_SECONDS) if quick else (rounds, _SECONDS)
    series, rushed, meets = asyncio.run(_run(rounds, seconds, quick=quick))
    click.echo("\n".join(rendered(ROWS, series)))
    click.echo(rushed.rendered())
    if check and (not meets or missed(ROWS, series) or rushed.p99_ms > REQUIRED_P99_MS):
        sys.exit(1)


async def _run(rounds: int, seconds: int, *, quick: bool) -> tuple[Series, Rush, bool]:
    # Both sides run in here, where no `.env` of the developer reaches them.
    with (
        tempfile.TemporaryDirectory(prefix="claim-flow-bench-") as home,
        server(Path(home)) as server_url,
        psycopg.connect(server_url, autocommit=True) as admin,
    ):
        click.echo(machine(versions_of(admin)))
        async with probes(server_url, admin, Path(home)) as found:
            series = await measure(found, rounds, say=_say_progress)
        _say_progress(f"{seconds} s of {CLICKS_A_SECOND} clicks a second")
        rushed = await rush(server_url, admin, Path(home), seconds=seconds)
        return series, rushed, await many(server_url, admin, Path(home), quick=quick, rounds=rounds, say=_say_progress)


def _say_progress(text: str) -> None:
    click.echo(text, err=True)


if __name__ == "__main__":
    main()
