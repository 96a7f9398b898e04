"""Who is signed in to the pages: sessions, and the login links that begin one. Only hashes of tokens are kept.

A person is kept as the door vouched for them that signed them in. Nobody is `trusted` here: the command line is, and
these are not.
"""

from __future__ import annotations

import hashlib
import secrets
from dataclasses import dataclass
from typing import Any, Literal

from flow.audit import door_of, record
from flow.database import Connection
from flow.model import Person

# A working day: whoever left the company, or the list of a team, is out by tomorrow.
SESSION_HOURS = 12
LOGIN_LINK_MINUTES = 10

# Whoever is of a workspace that is not installed any more is nobody here.
IN_FORCE = (
    "(workspace IS NULL OR EXISTS (SELECT FROM workspaces w WHERE w.workspace = {}.workspace AND w.token IS NOT NULL))"
)

_OPEN = f"used_at IS NULL AND expires_at > clock_timestamp() AND {IN_FORCE.format('login_links')}"

SignedInBy = Literal["link", "slack"]


@dataclass(frozen=True, kw_only=True)
class Session:
    """Somebody who is signed in."""

    token: str
    person: Person


async def session_secret(conn: Connection) -> bytes:
    """What signs this installation's cookies."""
    row = await (await conn.execute("SELECT session_secret FROM installation")).fetchone()
    assert row is not None
    return bytes(row["session_secret"])


async def begin_session(conn: Connection, person: Person, *, by: SignedInBy) -> str:
    """Sign somebody in; the session's token is returned, once."""
    token = new_token()
    async with conn.transaction():
        await conn.execute(
            "INSERT INTO sessions (token_sha256, person, person_name, names, workspace, signed_in_by, expires_at)"
            " VALUES (%s, %s, %s, %s, %s, %s, clock_timestamp() + %s * interval '1 hour')",
            (digest_of(token), person.key, person.name, sorted(person.names), person.workspace, by, SESSION_HOURS),
        )
    return token


async def session_of(conn: Connection, token: str) -> Session | None:
    """The session with this token, unless it has ended, or its workspace is not installed any more."""
    row = await (
        await conn.execute(
            "SELECT person, person_name, names, workspace FROM sessions"
            f" WHERE token_sha256 = %s AND expires_at > clock_timestamp() AND {IN_FORCE.format('sessions')}",
            (digest_of(token),),
        )
    ).fetchone()
    return Session(token=token, person=_person(row)) if row else None


async def end_session(conn: Connection, token: str) -> None:
    """The token is refused from now on, wherever it was copied to."""
    await conn.execute("DELETE FROM sessions WHERE token_sha256 = %s", (digest_of(token),))


async def make_login_link(conn: Connection, person: Person, *, by: str) -> str:
    """The token of a link that signs this person in, once, within ten minutes."""
    token = new_token()
    async with conn.transaction():
        await conn.execute(
            "INSERT INTO login_links (token_sha256, person, person_name, names, workspace, made_by, expires_at)"
            " VALUES (%s, %s, %s, %s, %s, %s, clock_timestamp() + %s * interval '1 minute')",
            (digest_of(token), person.key, person.name, sorted(person.names), person.workspace, by, LOGIN_LINK_MINUTES),
        )
        await record(conn, "login.made", who=by, door=door_of(by), for_whom=person.key)
    return token


async def person_of_login_link(conn: Connection, token: str) -> Person | None:
    """Whom the link would sign in; None if it was used, is too old, or never was one. It stays as it is."""
    row = await (
        await conn.execute(
            f"SELECT person, person_name, names, workspace FROM login_links WHERE token_sha256 = %s AND {_OPEN}",
            (digest_of(token),),
        )
    ).fetchone()
    return _person(row) if row else None


async def use_login_link(conn: Connection, token: str) -> str | None:
    """Spend the link, and return the token of the session that it began; None if it is no good, or not any more."""
    async with conn.transaction():
        row = await (
            await conn.execute(
                f"UPDATE login_links SET used_at = clock_timestamp() WHERE token_sha256 = %s AND {_OPEN}"
                " RETURNING person, person_name, names, workspace",
                (digest_of(token),),
            )
        ).fetchone()
        return await begin_session(conn, _person(row), by="link") if row else None


async def workspace_of_member(conn: Connection, team_id: str, enterprise_id: str | None) -> str | None:
    """Which of the workspaces that are installed a member of this team, in this grid, is of: their team's, else that of
    the whole grid. None: of none."""
    # Ids of teams begin with a T, those of grids with an E.
    rows = await conn.execute(
        "SELECT workspace FROM workspaces WHERE workspace = ANY(%s) AND token IS NOT NULL"
        " ORDER BY workspace DESC LIMIT 1",
        ([team_id, enterprise_id or team_id],),
    )
    row = await rows.fetchone()
    return row["workspace"] if row else None


def new_token() -> str:
    """256 random bits, in 43 characters that a URL can hold."""
    return secrets.token_urlsafe(32)


def digest_of(token: str) -> bytes:
    # It has 256 random bits, so a slow hash would protect nothing.
    return hashlib.sha256(token.encode("utf-8", "surrogateescape")).digest()


def _person(row: dict[str, Any]) -> Person:
    names = frozenset(row["names"])
    return Person(key=row["person"], name=row["person_name"], names=names, workspace=row["workspace"])
