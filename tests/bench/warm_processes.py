"""What is measured in warm processes: claims one after the other, started until they pause and resumed to their end.

    claim-flow            filed, driven, decided and driven, with its approvals, notices, events and audit log
    LangGraph             the same four nodes on its own Postgres saver; saved at each step, and, to compare, at exit
    fastaiagent           the same four nodes on its Postgres checkpointer, if its environment can be made
    commits               as many bare commits as claim-flow makes

Each has a database of its own on the one server. First one process alone, then one for each core, all at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psycopg

from tests.bench.databases import database
from tests.bench.programs import CLAIM_FLOW, environment, timed_ms
from tests.bench.table import Probe, Row
from tests.bench.warm import READY

_ROOT = Path(__file__).parents[2]
_FASTAIAGENT = Path(__file__).with_name("warm_fastaiagent.py")

START, RESUME, ALL_CORES = "start to pause", "resume to end", "a claim, on all cores"
_OURS, _AT_EXIT, _COMMITS = "", "LangGraph at exit: ", "commits: "
_LANGGRAPH, _FAST = "LangGraph: ", "fastaiagent: "

ROWS = tuple(
    Row(ours=name, theirs=f"{rival}{name}", at_least=at_least)
    for rival, at_least in ((_LANGGRAPH, 1.0), (_FAST, 2.0), (_AT_EXIT, None), (_COMMITS, None))
    for name in (START, RESUME, ALL_CORES)
)

# One environment is made from a registry, the others are this one.
_READY_WITHIN_S = 180.0


@dataclass(frozen=True, kw_only=True)
class _Rival:
    """Warm processes of one kind, one for each core."""

    name: str
    processes: Sequence[asyncio.subprocess.Process]

    async def took(self, act: str, prefix: str, count: int) -> float:
        """The median of so many claims in one process, in ms."""
        answer = await _asked(self.processes[0], act, prefix, count)
        took_ms: list[float] = answer["took_ms"]
        return statistics.median(took_ms)

    async def took_together(self, prefix: str, count: int) -> float:
        """How long a claim took while all cores were at it: the whole time, divided by the number of claims."""
        began = time.perf_counter()
        for act in ("start", "resume"):
            await asyncio.gather(
                *(_asked(process, act, f"{prefix}-{n}", count) for n, process in enumerate(self.processes))
            )
        return (time.perf_counter() - began) * 1000 / (count * len(self.processes))


@contextlib.asynccontextmanager
async def warm_probes(
    server_url: str, admin: psycopg.Connection, home: Path, *, claims: int, say: Callable[[str], None]
) -> AsyncIterator[Sequence[Probe]]:
    """A probe for each rival; `claims` in each process and round."""
    async with contextlib.AsyncExitStack() as stack:

        def on_its_own() -> str:
            return stack.enter_context(database(server_url, admin))

        ours_url = on_its_own()
        await timed_ms(CLAIM_FLOW, "setup", env=environment(DATABASE_URL=ours_url), cwd=home)
        ours = await stack.enter_async_context(_started(_OURS, ours_url, home, _module("warm_claim_flow")))
        of_start, of_resume = await _commits_of(ours.processes[0], admin)
        say(f"claim-flow makes {of_start} commits until a claim pauses, and {of_resume} from the decision to its end")
        rivals = [ours]
        for name, command in (
            (_LANGGRAPH, _module("warm_langgraph", "sync")),
            (_AT_EXIT, _module("warm_langgraph", "exit")),
            (_COMMITS, _module("warm_commits", str(of_start), str(of_resume))),
        ):
            rivals.append(await stack.enter_async_context(_started(name, on_its_own(), home, command)))
        try:
            rivals.append(await stack.enter_async_context(_started(_FAST, on_its_own(), home, _fastaiagent())))
        except (RuntimeError, TimeoutError) as exc:
            say(f"fastaiagent is not measured ({exc}); to have it: uv sync --script {_FASTAIAGENT.relative_to(_ROOT)}")
        yield [_probe(rival, claims) for rival in rivals]


def _probe(rival: _Rival, claims: int) -> Probe:
    rounds = iter(range(sys.maxsize))

    async def probe() -> dict[str, float]:
        prefix = f"round-{next(rounds)}"
        return {
            f"{rival.name}{START}": await rival.took("start", prefix, claims),
            f"{rival.name}{RESUME}": await rival.took("resume", prefix, claims),
            f"{rival.name}{ALL_CORES}": await rival.took_together(f"{prefix}-all", claims),
        }

    return probe


async def _commits_of(process: asyncio.subprocess.Process, admin: psycopg.Connection) -> tuple[int, int]:
    """How many transactions that write a start makes, and a resume: by the server's own count, so nobody else may."""

    def written() -> int:
        row = admin.execute("SELECT pg_snapshot_xmax(pg_current_snapshot())::text::bigint").fetchone()
        assert row is not None
        return int(row[0])

    counts, claims = [written()], 10
    for act in ("start", "resume"):
        await _asked(process, act, "counted", claims)
        counts.append(written())
    of_start, of_resume = (round((after - before) / claims) for before, after in itertools.pairwise(counts))
    return of_start, of_resume


async def _asked(process: asyncio.subprocess.Process, act: str, prefix: str, count: int) -> dict[str, Any]:
    assert process.stdin is not None and process.stdout is not None
    process.stdin.write(f"{act} {prefix} {count}\n".encode())
    line = await process.stdout.readline()
    if not line:
        raise RuntimeError("a warm process died in the midst of its claims: see above")
    answer: dict[str, Any] = json.loads(line)
    return answer


def _module(name: str, *args: str) -> list[str]:
    return [sys.executable, "-m", f"tests.bench.{name}", *args]


def _fastaiagent() -> list[str]:
    """In the environment that the script's own head describes, with our Python."""
    uv = shutil.which("uv") or str(_ROOT / ".uv" / "bin" / "uv")
    return [uv, "run", "--quiet", "--no-project", "--python", sys.executable, "--script", str(_FASTAIAGENT)]


@contextlib.asynccontextmanager
async def _started(name: str, url: str, home: Path, command: Sequence[str]) -> AsyncIterator[_Rival]:
    """One process for each core, ready. Raises RuntimeError if one ends instead, TimeoutError."""
    # PATH and the like stay: uv keeps what it has made once.
    env = {**environment(DATABASE_URL=url), "PYTHONPATH": str(_ROOT)}
    processes: list[asyncio.subprocess.Process] = []
    try:
        for number in range(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1):
            log = home / f"{name.strip(': ') or 'claim-flow'}-{number}.log"
            with log.open("wb") as stderr:
                process = await asyncio.create_subprocess_exec(
                    *command, env=env, cwd=home, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=stderr
                )
            processes.append(process)
            await _until_ready(process, log)
        yield _Rival(name=name, processes=processes)
    except FileNotFoundError as exc:
        raise RuntimeError(f"{command[0]} is not there") from exc
    finally:
        for process in processes:
            assert process.stdin is not None
            process.stdin.close()
            await process.wait()


async def _until_ready(process: asyncio.subprocess.Process, log: Path) -> None:
    assert process.stdout is not None
    async with asyncio.timeout(_READY_WITHIN_S):
        line = await process.stdout.readline()
    if line.decode().strip() != READY:
        raise RuntimeError(_last_words(log))


def _last_words(log: Path) -> str:
    lines = log.read_text().strip().splitlines()
    return lines[-1] if lines else "it ended without a word"
