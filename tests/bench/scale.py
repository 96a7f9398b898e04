"""A million threads: whether what is done of one thread, or for one person, costs more the more there are of others.

Each is measured in turn in databases of several sizes, seeded by `tests.seed`: what doors, workers and retention do
inside Postgres (`tests.looks`), then whole clicks and Homes over HTTP. Required is that of the largest the median is at
most half as much again as that of the empty one, in which only those rows stand that are measured; and that no table
which grows is read through.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import statistics
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from pathlib import Path

import aiohttp
import psycopg

from flow import inputs, threads
from flow.approvals import approvals_of
from flow.database import Connection, connect, ensure_schema
from flow.drive import ensure_checkpoint_tables
from flow.model import CLAIM_FLOW, CLAIM_FLOW_VERSION
from tests.bench.databases import database
from tests.bench.probes import APPROVER, serve_environment, until
from tests.bench.programs import serving
from tests.bench.slack_stand_in import CHANNEL, TEAM, SlackStandIn
from tests.bench.table import Probe, Series, measure
from tests.home_door import opened_body
from tests.looks import GROWING, LOOKS, reading
from tests.seed import seed
from tests.slack_requests import FORM, JSON, SIGNING_SECRET, block_actions_body, sign

SIZES, QUICK_SIZES = (0, 1_000, 100_000, 1_000_000), (0, 1_000)
REQUIRED_RATIO = 1.5

_HOMES = {"App Home over HTTP, few wait": "U01ALICE", "App Home over HTTP, many wait": "U09BUSY"}
_OVER_HTTP = ("click to acknowledgement", "click to paid", *_HOMES)
# The rest is only shown: metrics count what waits, up to a bound, and one person's lists look at everybody's newest.
_REQUIRED = ("due scan", "list", "list of what waits", "API, approvals", "click", *_OVER_HTTP)
# Blocks: what waits for them alone has as many.
_FULL_HOME = 20
# A look takes some milliseconds, and a busy machine makes any of them slow.
_LOOKS_A_ROUND = 4
# What comes after each (another stand-by, the card) is not to be paid by the next.
_REST_S = 1.0
# Fewer rows are best read through.
_LARGE = 10_000


async def scale(
    server_url: str,
    admin: psycopg.Connection,
    home: Path,
    *,
    sizes: Sequence[int],
    rounds: int,
    say: Callable[[str], None],
) -> tuple[list[str], bool]:
    """The table, and whether all that is required is met."""
    async with contextlib.AsyncExitStack() as stack:
        urls: dict[int, str] = {}
        for size in sizes:
            say(f"{size:,} threads")
            urls[size] = stack.enter_context(database(server_url, admin))
            await _fill(urls[size], size)
        series, whole = await _looked(urls, rounds, say)
        before = await _whole_reads(urls[max(sizes)])
        async with _clicked(urls, home) as probes:
            series |= await measure(probes, rounds, say=say)
        after = await _whole_reads(urls[max(sizes)])
        if max(sizes) >= _LARGE:
            whole |= {f"{table} by `serve`" for table in after if after[table] > before[table]}
    lines = [_line(name, series, sizes) for name in (*LOOKS, *_OVER_HTTP)]
    missed = [name for name in _REQUIRED if _ratio(name, series, sizes) > REQUIRED_RATIO]
    found = ", ".join(sorted(whole)) or "none"
    return [*_aligned([_heads(sizes), *lines]), f"read through: {found}"], not missed and not whole


async def _fill(url: str, size: int) -> None:
    async with await connect(url, "drive") as conn:
        await ensure_schema(url, conn)
        await ensure_checkpoint_tables(url, conn)
        await seed(conn, size)


# Inside Postgres


async def _looked(
    urls: Mapping[int, str], rounds: int, say: Callable[[str], None]
) -> tuple[dict[str, Sequence[float]], set[str]]:
    """How long each look takes, in ms, and what the largest database was read through for."""
    async with contextlib.AsyncExitStack() as stack:
        conns = {size: await stack.enter_async_context(await connect(url, "door")) for size, url in urls.items()}
        series = await measure([_look(name, conns) for name in LOOKS], rounds * _LOOKS_A_ROUND, say=say)
        whole = set()
        for name, look in LOOKS.items() if max(conns) >= _LARGE else ():
            read = await reading(conns[max(conns)], look)
            whole |= {f"{table} by {name}" for table, each in read.items() if each.whole}
        for conn in conns.values():
            # Else the next part would begin with driving it.
            await conn.execute("UPDATE threads SET due_at = due_at + interval '1000 days' WHERE due_at IS NOT NULL")
    return dict(series), whole


def _look(name: str, conns: Mapping[int, Connection]) -> Probe:
    async def probe() -> dict[str, float]:
        took = {}
        for size, conn in conns.items():
            async with conn.transaction(force_rollback=True):
                began = time.perf_counter()
                await LOOKS[name](conn)
                took[_series(name, size)] = (time.perf_counter() - began) * 1000
        return took

    return probe


# Over HTTP


@contextlib.asynccontextmanager
async def _clicked(urls: Mapping[int, str], home: Path) -> AsyncIterator[list[Probe]]:
    """A `serve` on each database, and what is measured of it."""
    async with contextlib.AsyncExitStack() as stack:
        http = await stack.enter_async_context(aiohttp.ClientSession())
        probes = []
        for size, url in urls.items():
            slack = await stack.enter_async_context(SlackStandIn())
            # What was seeded is kept.
            env = serve_environment(url, slack) | {"CHECKPOINT_RETENTION": "never", "EVENT_RETENTION": "never"}
            conn = await stack.enter_async_context(await connect(url, "door"))
            (home / str(size)).mkdir()
            serve_url = await stack.enter_async_context(serving(env, home / str(size), http))
            probes.append(_served(http, f"{serve_url}/slack/events", slack, conn, size))
        yield probes


def _served(http: aiohttp.ClientSession, url: str, slack: SlackStandIn, conn: Connection, size: int) -> Probe:
    numbers = itertools.count(1)

    async def probe() -> dict[str, float]:
        took = await _click(http, url, conn, f"clicked-{next(numbers)}")
        for name, member in _HOMES.items():
            await asyncio.sleep(_REST_S)
            published = slack.next_home_of(member)
            began = time.perf_counter()
            await _post(http, url, opened_body(member).replace(b"T01TEST", TEAM.encode()), JSON)
            view = await asyncio.wait_for(published, 30)
            took[name] = (time.perf_counter() - began) * 1000
            if len(view["blocks"]) < _FULL_HOME:
                raise RuntimeError(f"the Home of {member} does not show what waits: {view}")
        return {_series(name, size): ms for name, ms in took.items()}

    return probe


async def _click(http: aiohttp.ClientSession, url: str, conn: Connection, thread_id: str) -> dict[str, float]:
    """Approve a claim that waits, and whose card we say was posted."""
    await threads.insert_thread(
        conn,
        thread_id=thread_id,
        flow=CLAIM_FLOW,
        flow_version=CLAIM_FLOW_VERSION,
        input=inputs.parse_claim(amount="250", currency="USD", payee="ACME").as_input(),
        requested_by="cli:ann",
    )
    await until(conn, "SELECT status = 'waiting' FROM threads WHERE thread_id = %s", thread_id, every_s=0.01)
    [approval] = (await approvals_of(conn, [thread_id]))[thread_id]
    value = json.dumps({"interrupt": approval.interrupt_id, "hash": approval.request_hash})
    body = block_actions_body(user=APPROVER, team=TEAM, value=value, channel=CHANNEL, message_ts="1.000300")
    await asyncio.sleep(_REST_S)
    began = time.perf_counter()
    await _post(http, url, body, FORM)
    answered = time.perf_counter()
    await until(conn, "SELECT EXISTS (SELECT FROM payments WHERE thread_id = %s)", thread_id, every_s=0.001)
    paid = time.perf_counter()
    return {"click to acknowledgement": (answered - began) * 1000, "click to paid": (paid - began) * 1000}


async def _post(http: aiohttp.ClientSession, url: str, body: bytes, content_type: str) -> None:
    headers = {"Content-Type": content_type, **sign(SIGNING_SECRET, int(time.time()), body)}
    async with http.post(url, data=body, headers=headers) as answer:
        if answer.status != 200:
            raise RuntimeError(f"answered with {answer.status}: {await answer.text()}")


async def _whole_reads(url: str) -> dict[str, int]:
    """How often each table that grows was read through by sessions that have ended."""
    async with await connect(url, "door") as conn:
        query = "SELECT relname, seq_scan FROM pg_stat_user_tables WHERE relname = ANY(%s)"
        rows = await (await conn.execute(query, (GROWING,))).fetchall()
        return {row["relname"]: row["seq_scan"] for row in rows}


# The table


def _series(name: str, size: int) -> str:
    return f"{name}, {size}"


def _ratio(name: str, series: Series, sizes: Sequence[int]) -> float:
    smallest, largest = (statistics.median(series[_series(name, size)]) for size in (min(sizes), max(sizes)))
    return largest / smallest


def _heads(sizes: Sequence[int]) -> tuple[str, ...]:
    return ("threads", *(f"{size:,}" for size in sizes), "ratio", "required", "")


def _line(name: str, series: Series, sizes: Sequence[int]) -> tuple[str, ...]:
    medians = (f"{statistics.median(series[_series(name, size)]):.1f} ms" for size in sizes)
    ratio = _ratio(name, series, sizes)
    required = name in _REQUIRED
    verdict = ("met" if ratio <= REQUIRED_RATIO else "missed") if required else ""
    return (name, *medians, f"{ratio:.2f}x", f"{REQUIRED_RATIO:g}x" if required else "", verdict)


def _aligned(lines: Sequence[tuple[str, ...]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    sides = [str.ljust, *[str.rjust] * (len(widths) - 2), str.ljust]
    return [
        "  ".join(side(cell, width) for side, cell, width in zip(sides, line, widths, strict=True)).rstrip()
        for line in lines
    ]
