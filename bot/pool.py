"""The web process's connections: few, short, and found dead in time."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import TypeVar

from psycopg import errors
from psycopg_pool import AsyncConnectionPool

from flow.database import AWAY, CONNECTION, Connection, session_conninfo

T = TypeVar("T")

Pool = AsyncConnectionPool[Connection]

# Requests are short; more of them at once would only wait for each other inside Postgres.
_SIZE = 8
# Slack shows an error after three seconds: a click that has to wait for a connection longer than this is lost anyway.
_TIMEOUT_S = 2.0
# The pool waits twice as long after each attempt that failed; after this the next request makes one of its own.
_RECONNECT_TIMEOUT_S = 1.0


@contextlib.asynccontextmanager
async def pool_of(url: str) -> AsyncIterator[Pool]:
    """Connections for doors, opened as they are needed."""
    pool: Pool = AsyncConnectionPool(
        session_conninfo(url, "door"),
        min_size=2,
        max_size=_SIZE,
        timeout=_TIMEOUT_S,
        reconnect_timeout=_RECONNECT_TIMEOUT_S,
        open=False,
        kwargs=CONNECTION,
    )
    async with pool:
        yield pool


async def on_pool(pool: Pool, work: Callable[[Connection], Awaitable[T]]) -> T:
    """Do it on a connection; once more if that one had died, so it must be safe to repeat.

    Connections that died with a restarted server are only found by using them.
    """
    try:
        return await _on_pool(pool, work)
    except AWAY:
        await pool.check()
        return await _on_pool(pool, work)


async def _on_pool(pool: Pool, work: Callable[[Connection], Awaitable[T]]) -> T:
    async with pool.connection() as conn:
        try:
            return await work(conn)
        except errors.ReadOnlySqlTransaction:
            # It leads to a server that takes no writes, perhaps for ever; another one may lead elsewhere.
            await conn.close()
            raise
