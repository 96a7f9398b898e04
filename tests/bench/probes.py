"""What is measured: the life of a claim over the limit, three times a round.

    plain     the plain script: start, resume
    alone     claim-flow with no worker on its database: start, show, list
    served    claim-flow while `serve` runs: start, and a click on the card that it posted
    crowded   the same on a database in which 10,000 requests wait
    driven    the drives of claims, with spans and without, by turns

To add a row: return one more number from a probe here, or add a probe, and name it in ROWS.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any, LiteralString

import aiohttp
import psycopg
from psycopg.rows import scalar_row

from flow import inputs, threads
from flow.database import connect
from flow.model import CLAIM_FLOW as FLOW
from flow.model import CLAIM_FLOW_VERSION as FLOW_VERSION
from tests.bench import drives
from tests.bench.databases import database
from tests.bench.programs import CLAIM_FLOW, PLAIN_SCRIPT, environment, serving, timed_ms
from tests.bench.slack_stand_in import CHANNEL, TEAM, SlackStandIn
from tests.bench.table import Probe, Row
from tests.slack_requests import FORM, SIGNING_SECRET, block_actions_body, sign

# Requests that wait in the crowded database.
_CROWD = 10_000

ROWS = (
    Row(ours="click to paid", theirs="resume", at_least=50),
    Row(ours="click to acknowledgement", theirs="resume"),
    # What waits may cost a click at most half as much again.
    Row(ours=f"click to paid, {_CROWD:,} wait", theirs="click to paid", at_least=1 / 1.5),
    Row(ours=f"click to acknowledgement, {_CROWD:,} wait", theirs="click to acknowledgement"),
    Row(ours="start, alone", theirs="start", at_least=1),
    Row(ours="start, a worker runs", theirs="start", at_least=4),
    Row(ours="list", theirs="start", at_least=4),
    Row(ours="show", theirs="start", at_least=4),
    drives.ROW,
)

_AMOUNT = "250"
APPROVER = "U01ALICE"
# A full page of `list`.
_OLDER_CLAIMS = 50
_STAND_BYS = 2
# No bell rings exactly at the payment's commit. Whoever looks for it each millisecond does so within the server: a
# client would take the processors' time from what it measures.
_UNTIL_PAID = """
    CREATE FUNCTION pg_temp.until_paid(claim text) RETURNS void LANGUAGE plpgsql AS $$
    BEGIN
        WHILE NOT EXISTS (SELECT FROM payments WHERE thread_id = claim) LOOP PERFORM pg_sleep(0.001); END LOOP;
    END $$
"""
# How long an answer may take before the benchmark gives up.
_WITHIN_S = 60.0


@contextlib.asynccontextmanager
async def probes(server_url: str, admin: psycopg.Connection, home: Path) -> AsyncIterator[Sequence[Probe]]:
    """The probes in the order of a round, each on a database of its own."""
    async with contextlib.AsyncExitStack() as stack:
        plain, alone, served, crowded, driven = (stack.enter_context(database(server_url, admin)) for _ in range(5))
        http = await stack.enter_async_context(aiohttp.ClientSession())
        slack = await stack.enter_async_context(SlackStandIn())
        for url in (alone, served, crowded, driven):
            await timed_ms(CLAIM_FLOW, "setup", env=environment(DATABASE_URL=url), cwd=home)
            await _file_older_claims(url)
        await _crowd(crowded)
        lives = [
            await stack.enter_async_context(_served(url, slack, home, http, suffix))
            for url, suffix in ((served, ""), (crowded, f", {_CROWD:,} wait"))
        ]
        numbers = itertools.count(1)

        async def plain_life() -> dict[str, float]:
            return await _plain_life(f"plain-{next(numbers)}", environment(DATABASE_URL=plain), home)

        async def alone_life() -> dict[str, float]:
            return await _alone_life(f"alone-{next(numbers)}", environment(DATABASE_URL=alone), home)

        yield plain_life, alone_life, *lives, await stack.enter_async_context(drives.drives(driven))


@contextlib.asynccontextmanager
async def _served(
    url: str, slack: SlackStandIn, home: Path, http: aiohttp.ClientSession, suffix: str
) -> AsyncIterator[Probe]:
    """The probe of a `serve` on this database; its series end with `suffix`."""
    env, numbers = serve_environment(url, slack), itertools.count(1)
    async with (
        serving(env, home, http) as serve_url,
        await psycopg.AsyncConnection[tuple[Any, ...]].connect(url, autocommit=True) as watch,
    ):
        await watch.execute(_UNTIL_PAID)

        async def life() -> dict[str, float]:
            thread_id = f"served{'-crowded' if suffix else ''}-{next(numbers)}"
            await _rest(watch)
            start_ms = await timed_ms(
                CLAIM_FLOW, "start", "--thread", thread_id, "--amount", _AMOUNT, env=env, cwd=home
            )
            card = await slack.card_of(thread_id)
            await _rest(watch)
            clicked = await _click(http, f"{serve_url}/slack/events", card, watch, thread_id)
            await slack.reply_of(thread_id)
            await _rest(watch)
            return {f"{name}{suffix}": ms for name, ms in {"start, a worker runs": start_ms, **clicked}.items()}

        yield life


async def _plain_life(thread_id: str, env: dict[str, str], home: Path) -> dict[str, float]:
    start_ms = await timed_ms(PLAIN_SCRIPT, "start", "--thread", thread_id, "--amount", _AMOUNT, env=env, cwd=home)
    resume_ms = await timed_ms(PLAIN_SCRIPT, "resume", "--thread", thread_id, "--approve", env=env, cwd=home)
    return {"start": start_ms, "resume": resume_ms}


async def _alone_life(thread_id: str, env: dict[str, str], home: Path) -> dict[str, float]:
    start_ms = await timed_ms(CLAIM_FLOW, "start", "--thread", thread_id, "--amount", _AMOUNT, env=env, cwd=home)
    show_ms = await timed_ms(CLAIM_FLOW, "show", "--thread", thread_id, env=env, cwd=home)
    list_ms = await timed_ms(CLAIM_FLOW, "list", env=env, cwd=home)
    return {"start, alone": start_ms, "show": show_ms, "list": list_ms}


async def _click(
    http: aiohttp.ClientSession,
    url: str,
    card: dict[str, Any],
    watch: psycopg.AsyncConnection[tuple[Any, ...]],
    thread_id: str,
) -> dict[str, float]:
    """Press Approve on the card: how long until it is answered, and until the payment is committed, in ms."""
    body = block_actions_body(
        user=APPROVER, team=TEAM, value=_approve_value(card), channel=CHANNEL, message_ts=card["ts"]
    )
    headers = {"Content-Type": FORM, **sign(SIGNING_SECRET, int(time.time()), body)}

    async def press() -> float:
        async with http.post(url, data=body, headers=headers) as answer:
            if answer.status != 200:
                raise RuntimeError(f"a click was answered with {answer.status}: {await answer.text()}")
        return time.perf_counter()

    async def payment() -> float:
        await watch.execute("SELECT pg_temp.until_paid(%s)", (thread_id,))
        return time.perf_counter()

    began = time.perf_counter()
    answered, paid = await asyncio.gather(press(), payment())
    return {"click to acknowledgement": (answered - began) * 1000, "click to paid": (paid - began) * 1000}


def _approve_value(card: dict[str, Any]) -> str:
    [value] = [
        element["value"]
        for block in card["blocks"]
        if block["type"] == "actions"
        for element in block["elements"]
        if element["action_id"] == "approve"
    ]
    assert json.loads(value)
    return str(value)


async def _rest(watch: psycopg.AsyncConnection[tuple[Any, ...]]) -> None:
    """Return when everything is told and all stand-bys wait again: one measurement must not pay for the last."""
    await until(
        watch,
        "SELECT NOT EXISTS (SELECT FROM notices WHERE due_at IS NOT NULL) AND count(*) = %s"
        " AND bool_and(state = 'idle' AND clock_timestamp() - state_change > interval '100 ms')"
        " FROM pg_stat_activity WHERE datname = current_database() AND application_name = 'claim_flow drive'",
        _STAND_BYS,
        every_s=0.05,
    )


async def until(watch: psycopg.AsyncConnection[Any], query: LiteralString, *params: object, every_s: float) -> None:
    """Return when the query's one value is true."""
    deadline = time.monotonic() + _WITHIN_S
    while not await _holds(watch, query, params):
        if time.monotonic() > deadline:
            raise RuntimeError(f"not true within {_WITHIN_S:g} s: {query} {params}")
        await asyncio.sleep(every_s)


async def _holds(watch: psycopg.AsyncConnection[Any], query: LiteralString, params: tuple[object, ...]) -> bool:
    async with watch.cursor(row_factory=scalar_row) as cursor:
        return bool(await (await cursor.execute(query, params)).fetchone())


async def _crowd(url: str) -> None:
    """Requests that wait, with a card each that we say was posted."""
    async with await psycopg.AsyncConnection[tuple[Any, ...]].connect(url) as conn:
        await conn.execute(
            "INSERT INTO threads (thread_id, flow, flow_version, input, requested_by, status, due_at)"
            " SELECT 'crowd-' || n, %s, %s, '{\"amount\": \"250.00\", \"currency\": \"USD\"}', 'cli:ann', 'waiting',"
            " NULL FROM generate_series(1, %s) n",
            (FLOW, FLOW_VERSION, _CROWD),
        )
        await conn.execute(
            "INSERT INTO approvals (interrupt_id, thread_id, tier, request, request_hash, requested_by, approvers,"
            " required, rank, expires_at, remind_every_s, remind_at)"
            " SELECT lpad(to_hex(n), 32, '0'), 'crowd-' || n, 'approval',"
            ' \'{"amount": "250.00", "currency": "USD", "payee": ""}\', repeat(\'0\', 64), \'cli:ann\', %s, 1, 0,'
            " now() + interval '1 day', 86400, now() + interval '1 day' FROM generate_series(1, %s) n",
            ([APPROVER], _CROWD),
        )
        await conn.execute(
            "INSERT INTO notices (kind, interrupt_id, thread_id, status, due_at)"
            " SELECT 'card', interrupt_id, thread_id,"
            " 'sent', NULL FROM approvals WHERE thread_id LIKE 'crowd-%'"
        )
        await conn.execute(
            "INSERT INTO messages (channel, ts, interrupt_id) SELECT %s, row_number() OVER ()::text || '.000100',"
            " interrupt_id FROM approvals WHERE thread_id LIKE 'crowd-%%'",
            (CHANNEL,),
        )
        await conn.commit()
    async with await psycopg.AsyncConnection[tuple[Any, ...]].connect(url, autocommit=True) as conn:
        await conn.execute("ANALYZE")


async def _file_older_claims(url: str) -> None:
    claim = inputs.parse_claim(amount="20", currency="USD", payee="ACME")
    async with await connect(url, "door") as conn:
        for number in range(_OLDER_CLAIMS):
            thread = await threads.insert_thread(
                conn,
                thread_id=f"older-{number}",
                flow=FLOW,
                flow_version=FLOW_VERSION,
                input=claim.as_input(),
                requested_by="cli:ann",
            )
            assert await threads.leave(conn, thread, status="waiting")


def serve_environment(url: str, slack: SlackStandIn) -> dict[str, str]:
    """The settings of a `serve` on this database and in this Slack."""
    return environment(
        DATABASE_URL=url,
        APPROVERS=APPROVER,
        STAND_BY=str(_STAND_BYS),
        SLACK_API_URL=slack.url,
        SLACK_BOT_TOKEN="xoxb-bench",
        SLACK_SIGNING_SECRET=SIGNING_SECRET,
        SLACK_CHANNEL=CHANNEL,
    )
