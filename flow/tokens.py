"""Bearer tokens of the API: named, scoped, revocable; only their hash is kept."""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Literal, get_args

from flow.audit import door_of, record
from flow.database import Connection
from flow.errors import BadInput, TokenExists, UnknownToken
from flow.model import Person
from flow.sessions import IN_FORCE, digest_of, new_token

Scope = Literal["read", "start", "decide"]
SCOPES: tuple[Scope, ...] = get_args(Scope)

# Says what it is to whoever finds one, secret scanners among them.
_PREFIX = "cf_"

_COLUMNS = "name, scopes, workspace, created_by, created_at, revoked_at"


@dataclass(frozen=True, kw_only=True)
class Token:
    """A token without its secret. It acts as `api:NAME`: in one `workspace` of several, or, an operator's, in all."""

    name: str
    scopes: tuple[Scope, ...]
    workspace: str | None
    created_by: str
    created_at: datetime
    revoked_at: datetime | None

    def as_json(self) -> dict[str, Any]:
        """What `tokens list --json` prints."""
        return {
            "name": self.name,
            "scopes": list(self.scopes),
            "workspace": self.workspace,
            "created_by": self.created_by,
            "created_at": self.created_at.isoformat(),
            "revoked_at": self.revoked_at and self.revoked_at.isoformat(),
        }

    @property
    def key(self) -> str:
        return f"api:{self.name}"

    @property
    def person(self) -> Person:
        """Whose word it is."""
        return Person(key=self.key, name=self.name, names=frozenset({self.key}), workspace=self.workspace)


def parse_token_name(text: str) -> str:
    if not re.fullmatch(r"[a-z0-9][a-z0-9-]{0,62}", text):
        raise BadInput("token name", text, "use up to 63 small letters, digits and -")
    return text


async def create_token(
    conn: Connection, name: str, scopes: tuple[Scope, ...], *, by: str, workspace: str | None = None
) -> str:
    """Make a token; the secret is returned, once. Raises TokenExists; a revoked name is not given again either."""
    secret = _PREFIX + new_token()
    async with conn.transaction():
        made = await conn.execute(
            "INSERT INTO api_tokens (name, token_sha256, scopes, workspace, created_by) VALUES (%s, %s, %s, %s, %s)"
            " ON CONFLICT (name) DO NOTHING",
            (name, digest_of(secret), list(scopes), workspace, by),
        )
        if not made.rowcount:
            raise TokenExists(name)
        data = {"scopes": list(scopes)} | ({"workspace": workspace} if workspace else {})
        await record(conn, "token.created", who=by, door=door_of(by), for_whom=f"api:{name}", data=data)
    return secret


async def token_of(conn: Connection, secret: str) -> Token | None:
    """The token with this secret, unless it was revoked, or its workspace is not installed any more."""
    query = (
        f"SELECT {_COLUMNS} FROM api_tokens WHERE token_sha256 = %s AND revoked_at IS NULL"
        f" AND {IN_FORCE.format('api_tokens')}"
    )
    row = await (await conn.execute(query, (digest_of(secret),))).fetchone()
    return Token(**row | {"scopes": tuple(row["scopes"])}) if row else None


async def tokens(conn: Connection) -> list[Token]:
    """All of them, revoked ones too, by name."""
    rows = await (await conn.execute(f"SELECT {_COLUMNS} FROM api_tokens ORDER BY name")).fetchall()
    return [Token(**row | {"scopes": tuple(row["scopes"])}) for row in rows]


async def revoke_token(conn: Connection, name: str, *, by: str) -> None:
    """It is refused from now on. Again changes nothing. Raises UnknownToken."""
    async with conn.transaction():
        revoked = await conn.execute(
            "UPDATE api_tokens SET revoked_at = clock_timestamp() WHERE name = %s AND revoked_at IS NULL", (name,)
        )
        if revoked.rowcount:
            await record(conn, "token.revoked", who=by, door=door_of(by), for_whom=f"api:{name}")
        elif await (await conn.execute("SELECT FROM api_tokens WHERE name = %s", (name,))).fetchone() is None:
            raise UnknownToken(name)
