"""What many cost: a million threads, several workers, and what each claim leaves behind; one table after the other."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import click
import psycopg

from tests.bench.scale import QUICK_SIZES, SIZES, scale
from tests.bench.wal import wal
from tests.bench.workers import workers


async def many(
    server_url: str, admin: psycopg.Connection, home: Path, *, quick: bool, rounds: int, say: Callable[[str], None]
) -> bool:
    """Print them; whether all that is required is met. Seeding a million threads alone takes some minutes and 6 GB."""
    sizes = QUICK_SIZES if quick else SIZES
    lines, met = await scale(server_url, admin, home, sizes=sizes, rounds=rounds, say=say)
    click.echo("\n".join(lines))
    for worked in await workers(server_url, admin, home, claims=30 if quick else 300, say=say):
        click.echo(worked.rendered())
        met = met and worked.met
    say("what a claim writes")
    click.echo("\n".join((await wal(server_url, admin, claims=50 if quick else 200)).rendered()))
    return met
