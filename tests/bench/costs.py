"""What a claim costs through the API, from filing to payment: the processor's time of each part, bytes of WAL, commits,
and what sessions wait for; and so what a thousand and ten thousand a second would take.

Every process of the machine is counted, so it must do nothing else, and Postgres must run on it.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import aiohttp
import psutil
import psycopg

from flow.database import Connection, connect, listen
from flow.tokens import create_token
from tests.bench.databases import database
from tests.bench.programs import CLAIM_FLOW as PROGRAM
from tests.bench.programs import environment, running, timed_ms
from tests.bench.workers import waits_of

# What the extrapolation is for.
RATES = (1_000, 10_000)

_STAND_BYS = 2
_AT_ONCE = 16
_WITHIN_S = 600.0
_LOOKS_EVERY_S = 0.1

# Sessions that commit as fast as they can, and for how long.
_SESSIONS = 8
_COMMITS_S = 3.0


@dataclass(frozen=True, kw_only=True)
class Costs:
    """Of `claims` in `took_s`. Processor's time in seconds of all; `commits` are transactions, looks among them, and
    `rings` those that ring the bell. The two rates are of bare commits that ring, and that do not, in sessions that do
    nothing else."""

    claims: int
    took_s: float
    bot_s: float
    drives_s: float
    postgres_s: float
    wal_bytes: int
    commits: int
    rings: int
    waits: Counter[str]
    seen: int
    ringing_a_second: float
    silent_a_second: float

    @property
    def cpu_s(self) -> float:
        return self.bot_s + self.drives_s + self.postgres_s

    def rendered(self) -> list[str]:
        waits = ", ".join(f"{count / self.seen:.1%} {what}" for what, count in self.waits.most_common(4))
        each = (
            f"{self._ms(self.cpu_s)} of a core (bot {self._ms(self.bot_s)}, drives and their stand-bys"
            f" {self._ms(self.drives_s)}, Postgres {self._ms(self.postgres_s)}),"
            f" {self.wal_bytes / self.claims / 1000:.1f} kB of WAL, {self.commits / self.claims:.1f} transactions, of"
            f" which {self.rings / self.claims:.1f} ring"
        )
        commits = f"{self.silent_a_second:,.0f} a second, {self.ringing_a_second:,.0f} that ring"
        return [
            f"{self.claims} claims through the API, {self.claims / self.took_s:.1f} a second; each: {each}",
            f"sessions at work waited: {waits or 'never'}",
            f"bare commits in {_SESSIONS} sessions: {commits}",
            *(self._at(rate) for rate in RATES),
        ]

    def _at(self, rate: int) -> str:
        each = rate / self.claims
        return (
            f"{rate:,} claims a second: {self.cpu_s * each:,.0f} cores (bots {self.bot_s * each:,.0f}, workers"
            f" {self.drives_s * each:,.0f}, Postgres {self.postgres_s * each:,.0f}),"
            f" {self.wal_bytes * each / 1e6:,.0f} MB of WAL and {self.rings * each:,.0f} commits that ring, a second"
        )

    def _ms(self, seconds: float) -> str:
        return f"{seconds / self.claims * 1000:.1f} ms"


async def costs(
    server_url: str, admin: psycopg.Connection, home: Path, *, claims: int, say: Callable[[str], None]
) -> Costs:
    """So many claims over the limit, filed and decided through the API of a `bot`, and driven by a `work`."""
    with database(server_url, admin) as url:
        env = environment(DATABASE_URL=url, STAND_BY=str(_STAND_BYS), APPROVERS="api:approver")
        await timed_ms(PROGRAM, "setup", env=env, cwd=home)
        async with (
            await connect(url, "door") as conn,
            _api(conn) as http,
            running("bot", env, home, http) as (base, bot_pid),
            running("work", env, home, http),
        ):
            say(f"{claims} claims through the API")
            await _settled(conn)
            postmaster = psutil.Process(conn.info.backend_pid).parent()
            assert postmaster is not None
            async with waits_of(url) as waits, _bells(url) as bells:
                before = await _spent(conn, bot_pid, postmaster)
                began = time.perf_counter()
                await _file(http, base, claims)
                await _until(conn, "SELECT count(*) FROM approvals", claims)
                await _decide(http, base, conn)
                await _until(conn, "SELECT count(*) FROM threads WHERE status = 'paid'", claims)
                took_s = time.perf_counter() - began
                await _settled(conn)
                after = await _spent(conn, bot_pid, postmaster)
            say(f"commits, {_COMMITS_S:g} s each")
            silent, ringing = [await _commits_a_second(url, rings=rings) for rings in (False, True)]
    spent = {name: after[name] - before[name] for name in before}
    seen = waits.pop("")
    return Costs(
        claims=claims,
        took_s=took_s,
        bot_s=spent["bot"],
        drives_s=spent["machine"] - spent["bot"] - spent["postgres"] - spent["self"],
        postgres_s=spent["postgres"],
        wal_bytes=int(spent["wal"]),
        commits=int(spent["commits"]),
        rings=bells[""],
        waits=waits,
        seen=seen,
        ringing_a_second=ringing,
        silent_a_second=silent,
    )


@contextlib.asynccontextmanager
async def _api(conn: Connection) -> AsyncIterator[aiohttp.ClientSession]:
    """A client whose token only files; whoever decides has one of their own."""
    secret = await create_token(conn, "shop", ("start",), by="cli:bench")
    async with aiohttp.ClientSession(headers={"Authorization": f"Bearer {secret}"}) as http:
        yield http


async def _file(http: aiohttp.ClientSession, base: str, claims: int) -> None:
    async def file(number: int) -> None:
        claim = {"thread": f"cost-{number}", "amount": "250", "payee": "ACME"}
        async with http.post(f"{base}/api/threads", json=claim) as answer:
            assert answer.status == 201, await answer.text()

    await _all_at_once([partial(file, number) for number in range(claims)])


async def _decide(http: aiohttp.ClientSession, base: str, conn: Connection) -> None:
    secret = await create_token(conn, "approver", ("decide",), by="cli:bench")
    rows = await (await conn.execute("SELECT interrupt_id, request_hash FROM approvals")).fetchall()

    async def decide(interrupt_id: str, request_hash: str) -> None:
        verdict = {"decision": "approve", "request_hash": request_hash}
        url, headers = f"{base}/api/approvals/{interrupt_id}/decision", {"Authorization": f"Bearer {secret}"}
        async with http.post(url, json=verdict, headers=headers) as answer:
            assert answer.status == 200, await answer.text()

    await _all_at_once([partial(decide, **row) for row in rows])


async def _all_at_once(calls: Sequence[Callable[[], Awaitable[None]]]) -> None:
    """All of them, so many at a time."""
    waiting = iter(calls)

    async def some() -> None:
        for call in waiting:
            await call()

    async with asyncio.TaskGroup() as group:
        for _ in range(_AT_ONCE):
            group.create_task(some())


async def _spent(conn: Connection, bot_pid: int, postmaster: psutil.Process) -> dict[str, float]:
    """Seconds of the processor since the beginning, of each; bytes of WAL, and commits."""
    row = await (
        await conn.execute(
            "SELECT pg_stat_force_next_flush(), pg_wal_lsn_diff(pg_current_wal_insert_lsn(), '0/0')::float8 AS wal,"
            " (SELECT xact_commit FROM pg_stat_database WHERE datname = current_database())::float8 AS commits"
        )
    ).fetchone()
    assert row is not None
    machine, own = psutil.cpu_times(), time.process_time()
    backends = [_cpu_s(each) for each in postmaster.children()]
    ended = postmaster.cpu_times()
    return {
        "machine": sum(machine) - machine.idle - machine.iowait - machine.guest - machine.guest_nice,
        "bot": _cpu_s(psutil.Process(bot_pid)),
        "postgres": _cpu_s(postmaster) + ended.children_user + ended.children_system + sum(backends),
        "self": own,
        "wal": row["wal"],
        "commits": row["commits"],
    }


def _cpu_s(process: psutil.Process) -> float:
    with contextlib.suppress(psutil.NoSuchProcess):
        times = process.cpu_times()
        return float(times.user + times.system)
    return 0.0


async def _until(conn: Connection, query: str, count: int) -> None:
    deadline = time.monotonic() + _WITHIN_S
    while not ((row := await (await conn.execute(query.encode())).fetchone()) and row["count"] >= count):
        if time.monotonic() > deadline:
            raise RuntimeError(f"not {count} within {_WITHIN_S:g} s: {query}")
        await asyncio.sleep(_LOOKS_EVERY_S)


async def _settled(conn: Connection) -> None:
    """All stand-bys wait, with nothing to do."""
    await _until(
        conn,
        "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND state = 'idle'"
        " AND application_name = 'claim_flow drive' AND clock_timestamp() - state_change > interval '1 second'",
        _STAND_BYS,
    )


@contextlib.asynccontextmanager
async def _bells(url: str) -> AsyncIterator[Counter[str]]:
    """How many commits have rung: Postgres tells each once, however often it rang within it."""
    bells: Counter[str] = Counter()

    async def count(conn: Connection) -> None:
        await listen(conn)
        async for _ in conn.notifies():
            bells[""] += 1

    async with await connect(url, "door") as conn:
        counting = asyncio.ensure_future(count(conn))
        try:
            yield bells
        finally:
            counting.cancel()
            await asyncio.wait({counting})


async def _commits_a_second(url: str, *, rings: bool) -> float:
    """How many transactions of one small row are committed, in sessions that do nothing else."""
    statement = b"INSERT INTO commits DEFAULT VALUES" + (b"; NOTIFY claim_flow" if rings else b"")
    done = 0

    async def commit(conn: Connection, until: float) -> None:
        nonlocal done
        while time.perf_counter() < until:
            await conn.execute(statement, prepare=False)
            done += 1

    async with contextlib.AsyncExitStack() as stack:
        conns = [await stack.enter_async_context(await connect(url, "door")) for _ in range(_SESSIONS)]
        await conns[0].execute("CREATE TABLE IF NOT EXISTS commits (id bigint GENERATED ALWAYS AS IDENTITY)")
        began = time.perf_counter()
        async with asyncio.TaskGroup() as group:
            for conn in conns:
                group.create_task(commit(conn, began + _COMMITS_S))
        return done / (time.perf_counter() - began)
