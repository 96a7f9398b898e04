"""What `serve` costs while there is nothing to do: the processor's time, and memory, of all of its processes."""

from __future__ import annotations

import asyncio
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import psutil
import psycopg

from tests.bench.databases import database
from tests.bench.probes import serve_environment
from tests.bench.programs import running
from tests.bench.slack_stand_in import SlackStandIn

REQUIRED_CPU = 0.01

# What it does once when it begins is over by then.
_SETTLES_IN_S = 10.0


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Of one process, in MB. `pss` counts what is shared with others once, divided among them."""

    rss: float
    pss: float


@dataclass(frozen=True, kw_only=True)
class Idle:
    """`cpu` is a part of one core, of all processes together."""

    seconds: int
    cpu: float
    serve: Memory
    zygote: Memory
    stand_bys: Sequence[Memory]

    def rendered(self) -> str:
        child = Memory(
            rss=statistics.median(each.rss for each in self.stand_bys),
            pss=statistics.median(each.pss for each in self.stand_bys),
        )
        everything = sum(each.pss for each in (self.serve, self.zygote, *self.stand_bys))
        return (
            f"idle for {self.seconds} s: {self.cpu:.2%} of a core (required: under {REQUIRED_CPU:.0%})"
            f" {'met' if self.cpu < REQUIRED_CPU else 'missed'}; memory, resident (and shared parts divided):"
            f" serve {_said(self.serve)}, the process that stand-bys are forked from {_said(self.zygote)},"
            f" each of {len(self.stand_bys)} stand-bys {_said(child)}; {everything:.0f} MB in all"
        )


async def idle(server_url: str, admin: psycopg.Connection, home: Path, *, seconds: int) -> Idle:
    """Look at a `serve` of its own for so many seconds."""
    with database(server_url, admin) as url:
        async with (
            SlackStandIn() as slack,
            aiohttp.ClientSession() as http,
            running("serve", serve_environment(url, slack), home, http) as (_, pid),
        ):
            await asyncio.sleep(_SETTLES_IN_S)
            serve = psutil.Process(pid)
            [zygote] = serve.children()
            stand_bys = zygote.children()
            processes = [serve, zygote, *stand_bys]
            before = sum(map(_cpu_s, processes))
            await asyncio.sleep(seconds)
            # A stand-by that had been replaced would be missed here.
            cpu_s = sum(map(_cpu_s, processes)) - before
            return Idle(
                seconds=seconds,
                cpu=cpu_s / seconds,
                serve=_memory(serve),
                zygote=_memory(zygote),
                stand_bys=[_memory(each) for each in stand_bys],
            )


def _cpu_s(process: psutil.Process) -> float:
    spent = process.cpu_times()
    return spent.user + spent.system


def _memory(process: psutil.Process) -> Memory:
    found = process.memory_full_info()
    return Memory(rss=found.rss / 2**20, pss=found.pss / 2**20)


def _said(memory: Memory) -> str:
    return f"{memory.rss:.0f} MB ({memory.pss:.0f})"
