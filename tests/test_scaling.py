"""What docs/scaling.md promises: whose rows they are, what crosses threads, partitions that nobody notices, what is
given to Citus, and how many connections there are.

A server of this module's own writes down every statement of whole lives; so what is looked at is what processes ran,
and not what the code seems to say.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest
from psycopg import errors
from psycopg.rows import dict_row

from flow.approvals import decide
from flow.database import Connection
from tests.api_door import SECRET
from tests.collector import Collector
from tests.command import ROOT, Terminal
from tests.hook_server import HookServer
from tests.local_slack import free_port
from tests.people import ALICE, YES, start_claim
from tests.postgres import PostgresServer
from tests.rows import all_rows, one_row, until, value
from tests.services import Town
from tests.smtp_server import smtp_server
from tests.whole_lives import live, statements_in, writing_down

# Whichever test is first lives the lives: half a minute, and more on a busy machine.
pytestmark = pytest.mark.timeout(300)

PAGE = (ROOT / "docs" / "scaling.md").read_text()
PARTITIONS = (ROOT / "deploy" / "partitions.sql").read_bytes()
CITUS = (ROOT / "deploy" / "citus.sql").read_text()
# The names that the script is called for.
PARTITIONED = set(re.findall(r"'(\w+)'", PARTITIONS.decode().rpartition("SELECT")[2]))

_OURS = "table_schema = 'public' AND table_type = 'BASE TABLE'"
# Whether every unique index of a table has this column.
_KEYED_BY_THREAD = """
    SELECT relname FROM pg_class c WHERE relkind = 'r' AND relnamespace = 'public'::regnamespace
    AND (SELECT bool_and('thread_id' IN (
        SELECT attname FROM pg_attribute a WHERE a.attrelid = c.oid AND a.attnum = ANY(i.indkey)
    )) FROM pg_index i WHERE i.indrelid = c.oid AND i.indisunique) ORDER BY 1
"""

# A thread, or its request, given as a value.
_NAMES_ITS_THREAD = re.compile(r"\b(?:thread_id|interrupt_id) = (?:coalesce\()?\$")
_WRITES_ITS_THREAD = re.compile(r"(?:WITH \w+ AS \()?INSERT INTO \w+ (?:AS \w+ )?\([^)]*\b(?:thread_id|interrupt_id)\b")
_WORDS = re.compile(r"[a-z_]+")


def rows_of(title: str) -> list[list[str]]:
    """The cells of the table of a section, without its head and the lines that only part it."""
    [section] = re.findall(rf"^## {title}\n(.*?)(?=^## |\Z)", PAGE, re.MULTILINE | re.DOTALL)
    lines = [line for line in section.splitlines() if line.startswith("|")][2:]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines if "**" not in line]


THREAD_OF = {row[0].strip("`"): row[1].strip("`") for row in rows_of("Whose rows they are")}
CROSSES = [row[0].strip("`") for row in rows_of("What crosses threads")]
# Those with a row for each thread, or more.
OF_THREADS = {table for table, column in THREAD_OF.items() if column != "none" and not column.startswith("audit")}


def crosses(statement: str) -> bool:
    """Whether it is about threads and does not say which."""
    about = OF_THREADS & set(_WORDS.findall(statement))
    return bool(about) and not _NAMES_ITS_THREAD.search(statement) and not _WRITES_ITS_THREAD.match(statement)


# Statements


@pytest.fixture(scope="module")
def statements(tmp_path_factory: pytest.TempPathFactory) -> Iterator[set[str]]:
    """Every statement of whole lives."""
    with PostgresServer() as server, writing_down(server) as log, server.database() as url:
        asyncio.run(live(url, tmp_path_factory.mktemp("lives")))
        yield statements_in(log)


def test_no_statement_crosses_threads_but_those_that_are_listed(statements: set[str]) -> None:
    unlisted = [each for each in statements if crosses(each) and not any(listed in each for listed in CROSSES)]
    assert not unlisted, "\n\n".join(unlisted)


def test_each_that_is_listed_ran_and_crosses(statements: set[str]) -> None:
    crossing = [each for each in statements if crosses(each)]
    assert [listed for listed in CROSSES if not any(listed in each for each in crossing)] == []


def test_what_a_click_a_drive_and_a_payment_write_was_among_them(statements: set[str]) -> None:
    """Else nothing that is said of them is shown."""
    for written in ("threads", "approvals", "decisions", "payments", "notices", "checkpoints", "events", "audit"):
        assert any(each.startswith(f"INSERT INTO {written} ") for each in statements), written
    for began in ("UPDATE threads SET driver_pid", "UPDATE threads t SET wakes", "UPDATE approvals SET status"):
        assert any(each.startswith(began) for each in statements), began


@pytest.mark.parametrize(
    ("statement", "does"),
    [
        ("SELECT * FROM threads WHERE thread_id = $", False),
        ("SELECT * FROM threads WHERE status = $", True),
        ("SELECT * FROM threads t JOIN approvals a ON a.thread_id = t.thread_id WHERE a.tier = $", True),
        ("INSERT INTO events (type, thread_id) VALUES ($, $)", False),
        ("UPDATE webhook_deliveries SET status = $", True),
        ("DELETE FROM sessions WHERE expires_at < $", False),
    ],
)
def test_what_crosses_threads_is_told_from_what_does_not(statement: str, does: bool) -> None:
    assert crosses(statement) == does


async def test_the_page_says_of_every_table_whose_rows_they_are(conn: Connection) -> None:
    tables = await value(conn, f"SELECT array_agg(table_name::text) FROM information_schema.tables WHERE {_OURS}")
    assert sorted(THREAD_OF) == sorted(tables)
    for table, named in THREAD_OF.items():
        columns = await value(
            conn,
            "SELECT array_agg(column_name::text) FROM information_schema.columns WHERE table_name = %s"
            " AND table_schema = 'public'",
            table,
        )
        ways = [column for column in ("thread_id", "interrupt_id", "event_id", "audit_id") if column in columns]
        assert named == next(iter(ways), "none"), table


async def test_the_page_says_which_keys_hold_the_thread(conn: Connection) -> None:
    keyed = [row["relname"] for row in await all_rows(conn, _KEYED_BY_THREAD)]
    assert sorted(row[0].strip("`") for row in rows_of("Whose rows they are") if row[2].startswith("yes")) == keyed


# Partitions


async def _partition(conn: Connection) -> None:
    async with conn.transaction():
        await conn.execute(PARTITIONS, prepare=False)


_SHAPE = """
    SELECT 'column' AS kind, table_name || '.' || column_name AS name, data_type || coalesce(column_default, '') AS what
    FROM information_schema.columns WHERE table_schema = 'public'
    UNION ALL SELECT 'key', conrelid::regclass || '.' || conname, pg_get_constraintdef(oid) FROM pg_constraint
    WHERE connamespace = 'public'::regnamespace AND conparentid = 0 AND conrelid <> 0
    UNION ALL SELECT 'index', indexrelid::regclass::text, replace(pg_get_indexdef(indexrelid), ' ONLY ', ' ')
    FROM pg_index JOIN pg_class c ON c.oid = indrelid WHERE relnamespace = 'public'::regnamespace
    UNION ALL SELECT 'trigger', tgname, pg_get_triggerdef(oid) FROM pg_trigger WHERE NOT tgisinternal AND tgparentid = 0
    UNION ALL SELECT 'grant', table_name || '.' || grantee, privilege_type FROM information_schema.role_table_grants
    WHERE table_schema = 'public'
"""


async def _shape(conn: Connection) -> set[tuple[str, str, str]]:
    rows = await all_rows(conn, _SHAPE)
    return {(r["kind"], r["name"], r["what"]) for r in rows if not re.search(r"_p\d+(\.|_|$)", r["name"])}


async def test_partitions_have_every_column_key_index_trigger_and_grant_by_the_same_name(conn: Connection) -> None:
    await conn.execute("GRANT SELECT, UPDATE ON threads TO pg_monitor")
    before = await _shape(conn)
    await _partition(conn)
    assert await _shape(conn) == before
    assert await value(conn, "SELECT count(*) FROM pg_inherits WHERE inhparent = 'threads'::regclass") == 16
    options = "SELECT reloptions FROM pg_class WHERE relname = 'threads_p7'"
    assert "fillfactor=85" in await value(conn, options)


async def test_what_is_partitioned_has_the_thread_in_every_key_and_is_never_asked_by_where_a_row_lies(
    conn: Connection, statements: set[str]
) -> None:
    """A `ctid` is of one partition: in another there is a row in the same place."""
    keyed = {row["relname"] for row in await all_rows(conn, _KEYED_BY_THREAD)}
    by_place = {table for each in statements for table in re.findall(r"\bctid FROM (\w+)", each)}
    assert keyed & by_place
    assert keyed - by_place == PARTITIONED
    await _partition(conn)
    parted = await all_rows(conn, "SELECT relname FROM pg_class WHERE relkind = 'p'")
    assert {row["relname"] for row in parted} == PARTITIONED


async def test_partitioning_again_changes_nothing(conn: Connection) -> None:
    await _partition(conn)
    before = await all_rows(conn, "SELECT oid FROM pg_class WHERE relnamespace = 'public'::regnamespace ORDER BY 1")
    await _partition(conn)
    assert before == await all_rows(
        conn, "SELECT oid FROM pg_class WHERE relnamespace = 'public'::regnamespace ORDER BY 1"
    )


async def test_a_claim_that_waits_while_its_tables_are_partitioned_is_paid_once(
    conn: Connection, database_url: str, tmp_path: Path
) -> None:
    terminal = Terminal(tmp_path, DATABASE_URL=database_url, APPROVERS="U01ALICE")
    for number in range(20):
        await start_claim(conn, f"t{number}")
    assert (await terminal.run_meanwhile("work", "--once")).code == 0
    threads = "SELECT * FROM threads ORDER BY thread_id"
    before = await all_rows(conn, threads)
    await _partition(conn)
    assert await all_rows(conn, threads) == before
    assert (await one_row(conn, "SELECT count(DISTINCT tableoid) > 5 AS spread FROM threads"))["spread"]
    for row in await all_rows(conn, "SELECT interrupt_id FROM approvals"):
        await decide(conn, row["interrupt_id"], ALICE, YES)
    done = await terminal.run_meanwhile("work", "--once")
    assert done.code == 0, done.err
    paid = await all_rows(conn, "SELECT thread_id FROM payments WHERE status = 'paid' ORDER BY 1")
    assert [row["thread_id"] for row in paid] == sorted(f"t{number}" for number in range(20))
    with pytest.raises(errors.CheckViolation):
        await conn.execute("UPDATE threads SET status = 'paid', due_at = now() WHERE thread_id = 't0'")
    with pytest.raises(errors.ForeignKeyViolation):
        await conn.execute("DELETE FROM threads WHERE thread_id = 't0'")


# Citus

# What Citus looks at before it distributes a table: https://github.com/citusdata/citus
_STAND_IN = """
    CREATE FUNCTION create_distributed_table(name regclass, by text, colocate_with text DEFAULT 'default')
    RETURNS void LANGUAGE plpgsql AS $$
    BEGIN
        IF EXISTS (SELECT FROM pg_index i WHERE indrelid = name AND indisunique AND by NOT IN (
            SELECT attname FROM pg_attribute WHERE attrelid = name AND attnum = ANY(i.indkey)))
        THEN RAISE 'a unique key of % is without %', name, by; END IF;
        IF EXISTS (SELECT FROM pg_constraint WHERE contype = 'f' AND name IN (conrelid, confrelid))
        THEN RAISE 'a foreign key between % and a local table', name; END IF;
        IF EXISTS (SELECT FROM pg_trigger WHERE tgrelid = name AND NOT tgisinternal)
        THEN RAISE '% has triggers', name; END IF;
        INSERT INTO distributed VALUES (name::text, colocate_with);
    END $$;
    CREATE TABLE distributed (name text, colocated text);
"""


@pytest.fixture
def coordinator(database_url: str) -> Iterator[psycopg.Connection[dict[str, str]]]:
    with psycopg.connect(database_url, autocommit=True, row_factory=dict_row) as conn:
        conn.execute(_STAND_IN)
        yield conn


def test_the_script_for_citus_distributes_what_citus_takes(coordinator: psycopg.Connection[dict[str, str]]) -> None:
    extension = "CREATE EXTENSION IF NOT EXISTS citus;"
    assert CITUS.count(extension) == 1
    coordinator.execute(CITUS.replace(extension, "").encode())
    rows = coordinator.execute("SELECT name, colocated FROM distributed ORDER BY name").fetchall()
    assert [tuple(row.values()) for row in rows] == [
        ("checkpoint_blobs", "checkpoints"),
        ("checkpoint_writes", "checkpoints"),
        ("checkpoints", "default"),
    ]


@pytest.mark.parametrize("table", ["threads", "approvals", "effects", "payments"])
def test_the_stand_in_refuses_what_citus_refuses(coordinator: psycopg.Connection[dict[str, str]], table: str) -> None:
    with pytest.raises(errors.RaiseException):
        coordinator.execute("SELECT create_distributed_table(%s, 'thread_id')", (table,))


def test_what_citus_distributes_is_asked_by_thread_and_without_volatile_functions(statements: set[str]) -> None:
    distributed = {"checkpoints", "checkpoint_blobs", "checkpoint_writes"}
    asked = [each for each in statements if distributed & set(_WORDS.findall(each))]
    assert asked
    for each in asked:
        assert not crosses(each) or "thread_id = ANY($)" in each, each
        assert not re.search(r"\b(clock_timestamp|random|nextval|timeofday|gen_random_uuid)\(", each), each
        assert not set(_WORDS.findall(each)) & OF_THREADS - distributed, each


# Connections


async def test_a_bot_and_a_worker_take_as_many_connections_as_the_page_says(
    conn: Connection, database_url: str, tmp_path: Path
) -> None:
    """With everything on that is sent, while no requests come."""
    page = " ".join((ROOT / "docs" / "operating.md").read_text().split())
    assert "4 connections for Slack, 2 for mails, 3 to 9 for webhooks, and one for each target of traces" in page
    sending = 4 + 2 + 3 + 1
    bot = 2 + 1 + sending
    worker = 4 + 2 + 2 + sending
    async with (
        HookServer() as hooks,
        smtp_server() as mails,
        Collector() as collector,
        Town(database_url, Terminal(tmp_path)) as town,
    ):
        town.terminal.environment |= {
            "SMTP_URL": mails.url,
            "MAIL_FROM": "claims@example.com",
            "PUBLIC_URL": f"http://127.0.0.1:{town.port}",
            "WEBHOOK_URLS": f"acme={hooks.url}",
            "WEBHOOK_SIGNING_SECRETS": f"acme={SECRET}",
            "WEBHOOK_ALLOW_PRIVATE": "true",
            "OTEL_EXPORTER_OTLP_ENDPOINT": collector.url,
        }
        await conn.execute("SET application_name = 'test'")

        async def all_is_told() -> bool:
            return "thread claims" in [span.name for span in collector.spans] and hooks.types == ["payment.paid"]

        async def there_are() -> bool:
            count = await value(
                conn,
                "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database()"
                " AND application_name LIKE 'claim_flow %%'",
            )
            # Two looks at whether a process is ready, at a time, have its pool make one more.
            return bool(bot + worker <= count <= bot + worker + 2)

        async with town.service("bot"), town.service("work", HEALTH_PORT=str(free_port())):
            await start_claim(conn, "t1", amount="20")
            await until(all_is_told, within_s=60)
            # A worker that deletes what is old has one more for a moment.
            await until(there_are, within_s=60)
