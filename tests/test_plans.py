"""What doors, workers and retention read of twenty thousand threads: what an index finds, and no more."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator

import psycopg
import pytest

from flow.approvals import approvals_of, decide
from flow.database import Connection, connect, ensure_schema
from flow.drive import drive, ensure_checkpoint_tables
from flow.flows import Flows
from flow.threads import thread_of
from tests.bench.databases import database
from tests.looks import LOOKS, reading
from tests.people import ALICE, POLICY, YES, start_claim
from tests.seed import seed

THREADS = 20_000
# Of one table. One percent of the threads waits, as many are put off, and none of that is read to find out what is due.
MOST_READ = 180
# Two lists that look at the newest five hundred of everybody's first; and what counts what waits.
MOST_READ_BY_LISTS = 1300

# From the sixth time on Postgres may take a plan that is made for any parameters.
_TIMES = 7


@pytest.fixture(scope="module")
def many_url(server_url: str, admin: psycopg.Connection) -> Iterator[str]:
    async def fill(url: str) -> None:
        async with await connect(url, "drive") as conn:
            await ensure_schema(url, conn)
            await ensure_checkpoint_tables(url, conn)
            await seed(conn, THREADS)

    with database(server_url, admin) as url:
        asyncio.run(fill(url))
        yield url


@pytest.fixture
async def many(many_url: str) -> AsyncIterator[Connection]:
    async with await connect(many_url, "door") as conn:
        yield conn


@pytest.mark.parametrize("name", LOOKS)
async def test_no_look_reads_a_table_through(many: Connection, name: str) -> None:
    most = MOST_READ_BY_LISTS if name.startswith(("inbox", "App Home", "metrics")) else MOST_READ
    for _ in range(_TIMES):
        read = await reading(many, LOOKS[name])
        assert {table: each for table, each in read.items() if each.whole or each.rows > most} == {}


async def test_no_drive_reads_a_table_through(many: Connection, flows: Flows) -> None:
    """From filing to the payment, with LangGraph's own tables."""

    async def live(conn: Connection) -> None:
        await start_claim(conn, "t1")
        assert await drive(conn, "t1", flows=flows, policy=POLICY) == "waiting"
        [approval] = (await approvals_of(conn, ["t1"]))["t1"]
        await decide(conn, approval.interrupt_id, ALICE, YES)
        assert await drive(conn, "t1", flows=flows, policy=POLICY) == "over"
        assert (await thread_of(conn, "t1")).status == "paid"

    for _ in range(_TIMES):
        read = await reading(many, live)
        assert {"threads", "approvals", "payments", "checkpoints", "checkpoint_blobs", "checkpoint_writes"} <= set(read)
        assert {table: each for table, each in read.items() if each.whole or each.rows > MOST_READ} == {}


async def test_a_look_that_reads_a_table_through_is_found(many: Connection) -> None:
    async def look(conn: Connection) -> None:
        await conn.execute("SELECT count(*) FROM threads WHERE input->>'note' = 'four chairs'")

    read = await reading(many, look)
    assert read["threads"].whole == 1
    assert read["threads"].rows > THREADS
