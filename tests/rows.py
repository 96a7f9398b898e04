"""What tests look at: rows, and conditions that become true."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any, LiteralString, TypeVar

from psycopg import sql

from flow.database import Connection

RENEW_FINGERPRINTS = "UPDATE approvals a SET fingerprint = approval_fingerprint(a)"

# How many locks are held in this database; another one of the server is another test's.
LOCKS_HERE: LiteralString = (
    "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory'"
    " AND database = (SELECT oid FROM pg_database WHERE datname = current_database())"
)

T = TypeVar("T")


async def all_rows(conn: Connection, query: LiteralString, *params: object) -> list[dict[str, Any]]:
    return await (await conn.execute(query, params)).fetchall()


async def one_row(conn: Connection, query: LiteralString, *params: object) -> dict[str, Any]:
    """The only row."""
    (row,) = await all_rows(conn, query, *params)
    return row


async def value(conn: Connection, query: LiteralString, *params: object) -> Any:
    """The only column of the only row."""
    (found,) = (await one_row(conn, query, *params)).values()
    return found


async def until(look: Callable[[], Awaitable[T]], within_s: float = 60.0) -> T:
    """The first truthy answer. Fails if there is none in time."""
    deadline = time.monotonic() + within_s
    while not (found := await look()):
        assert time.monotonic() < deadline, f"{look} did not come true within {within_s} s"
        await asyncio.sleep(0.005)
    return found


async def until_blocked(observer: Connection, pid: int, *, by: int | None = None) -> None:
    """Return when the session with this backend pid waits for a lock that another session (`by`, if given) holds."""

    async def blocked() -> bool:
        holders: list[int] = await value(observer, "SELECT pg_blocking_pids(%s)", pid)
        return by in holders if by else bool(holders)

    await until(blocked)


async def break_table(conn: Connection, table: str, event: LiteralString, body: LiteralString) -> None:
    """Make every INSERT or UPDATE of a row of this table run `body` (PL/pgSQL) first."""
    await conn.execute(
        sql.SQL("CREATE FUNCTION breakage() RETURNS trigger LANGUAGE plpgsql AS {}").format(
            sql.Literal(f"BEGIN {body}; RETURN NEW; END")
        )
    )
    await conn.execute(
        sql.SQL("CREATE TRIGGER breakage BEFORE {} ON {} FOR EACH ROW EXECUTE FUNCTION breakage()").format(
            sql.SQL(event), sql.Identifier(table)
        )
    )


async def mend_table(conn: Connection) -> None:
    """Undo `break_table`."""
    await conn.execute("DROP FUNCTION breakage() CASCADE")


async def rewrite(conn: Connection, change: LiteralString, *values: object) -> None:
    """Change what all approvals say, as only we do: their fingerprints are those of what they say then."""
    async with conn.transaction():
        await conn.execute(f"UPDATE approvals SET {change}", values)
        await conn.execute(RENEW_FINGERPRINTS)
