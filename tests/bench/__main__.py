"""The benchmark: claim-flow side by side with others, in one run, on one Postgres server.

    uv run python -m tests.bench
    uv run python -m tests.bench --rounds 30 --check
    uv run python -m tests.bench --quick --only warm

    commands    whole commands and clicks, against the plain script           probes.py
    warm        claims in warm processes, against LangGraph and others        warm_processes.py
    rush        clicks on a clock, at several rates                           rush.py
    idle        what `serve` costs while there is nothing to do               idle.py
    many        the same at a million threads, and with several workers       many.py
    costs       what each claim takes, and so a thousand a second             costs.py

It is no test: a busy machine makes all sides slow, and only the ratios mean anything. Each module says what is
required; TEST_DATABASE_URL names a server to use instead of an embedded one.
"""

from __future__ import annotations

import asyncio
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import click
import psycopg

from tests.bench.costs import costs
from tests.bench.databases import machine, server, versions_of
from tests.bench.idle import REQUIRED_CPU, idle
from tests.bench.many import many
from tests.bench.probes import ROWS, probes
from tests.bench.programs import compile_bytecode
from tests.bench.rush import QUICK_RUSHES, RUSHES, rush
from tests.bench.table import measure, missed, rendered
from tests.bench.warm_processes import ROWS as WARM_ROWS
from tests.bench.warm_processes import warm_probes

_PARTS = ("warm", "commands", "rush", "idle", "many", "costs")


@dataclass(frozen=True, kw_only=True)
class _Plan:
    """How often each is measured, claims in each warm process and round, how long, and how many claims are costed."""

    rounds: int
    claims: int
    rushes: dict[int, int]
    idle_s: int
    costed: int


_WHOLE = _Plan(rounds=15, claims=20, rushes=RUSHES, idle_s=60, costed=300)
_QUICK = _Plan(rounds=3, claims=5, rushes=QUICK_RUSHES, idle_s=5, costed=20)


@click.command(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120})
@click.option("--rounds", type=click.IntRange(1, 1000), help=f"How often each is measured.  [default: {_WHOLE.rounds}]")
@click.option("--quick", is_flag=True, help=f"Only {_QUICK.rounds} rounds, and short ones: the table, not the truth.")
@click.option("--only", multiple=True, type=click.Choice(_PARTS), help="Only these parts.  [default: all]")
@click.option("--check", is_flag=True, help="Exit 1 if a requirement is missed.")
def main(rounds: int | None, quick: bool, only: tuple[str, ...], check: bool) -> None:
    """Measure claim-flow against others, and print one table."""
    compile_bytecode()
    plan = _QUICK if quick else _WHOLE
    met = asyncio.run(_run(plan, rounds or plan.rounds, only or _PARTS, quick=quick))
    if check and not met:
        sys.exit(1)


async def _run(plan: _Plan, rounds: int, parts: Sequence[str], *, quick: bool) -> bool:
    """Whether every requirement of these parts is met."""
    # Everything runs in here, where no `.env` of the developer reaches it.
    with (
        tempfile.TemporaryDirectory(prefix="claim-flow-bench-") as folder,
        server(Path(folder)) as server_url,
        psycopg.connect(server_url, autocommit=True) as admin,
    ):
        home, met = Path(folder), True
        click.echo(machine(versions_of(admin)))
        if "warm" in parts:
            async with warm_probes(server_url, admin, home, claims=plan.claims, say=_say_progress) as found:
                series = await measure(found, rounds, say=_say_progress)
            click.echo("\n".join(rendered(WARM_ROWS, series)))
            met = met and not missed(WARM_ROWS, series)
        resume_ms = None
        if "commands" in parts:
            async with probes(server_url, admin, home) as found:
                series = await measure(found, rounds, say=_say_progress)
            click.echo("\n".join(rendered(ROWS, series)))
            met = met and not missed(ROWS, series)
            resume_ms = statistics.median(series["resume"])
        if "rush" in parts:
            for rushed in await rush(server_url, admin, home, rushes=plan.rushes, say=_say_progress):
                click.echo(rushed.rendered(resume_ms))
                met = met and rushed.meets(resume_ms)
        if "idle" in parts:
            _say_progress(f"{plan.idle_s} s of nothing to do")
            found_idle = await idle(server_url, admin, home, seconds=plan.idle_s)
            click.echo(found_idle.rendered())
            met = met and found_idle.cpu < REQUIRED_CPU
        if "many" in parts:
            met = await many(server_url, admin, home, quick=quick, rounds=rounds, say=_say_progress) and met
        if "costs" in parts:
            found_costs = await costs(server_url, admin, home, claims=plan.costed, say=_say_progress)
            click.echo("\n".join(found_costs.rendered()))
    return met


def _say_progress(text: str) -> None:
    click.echo(text, err=True)


if __name__ == "__main__":
    main()
