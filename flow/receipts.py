"""The first answer to a request, given again whenever the same request comes: nothing is done twice.

The caller says how a request is recognised: a webhook by its id, a call of the API by its Idempotency-Key.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Literal

from flow.database import Connection
from flow.errors import InFlight, KeyReused

Door = Literal["webhook", "api"]


@dataclass(frozen=True, kw_only=True)
class Answer:
    """An HTTP status and a JSON body. `repeated`: it was given before, and nothing was done now."""

    status: int
    body: dict[str, Any]
    repeated: bool = False


async def answer_once(
    conn: Connection, *, door: Door, sender: str, key: str, body: bytes, work: Callable[[], Awaitable[Answer]]
) -> Answer:
    """The answer of `work`, in one transaction with what it does; or the one that was given to this request before.

    Whatever `work` raises undoes everything, and the request may come again. Raises KeyReused if the key came with
    another body, InFlight if the first request is still being worked on.
    """
    digest = hashlib.sha256(body).digest()
    async with conn.transaction():
        row = await (
            await conn.execute(
                "SELECT pg_try_advisory_xact_lock(hashtextextended(%s, 0)) AS first", (f"{door} {sender} {key}",)
            )
        ).fetchone()
        assert row is not None
        if not row["first"]:
            raise InFlight(key)
        inserted = await conn.execute(
            "INSERT INTO receipts (door, sender, key, body_sha256) VALUES (%s, %s, %s, %s) ON CONFLICT DO NOTHING",
            (door, sender, key, digest),
        )
        of_this = (door, sender, key)
        if not inserted.rowcount:
            query = "SELECT body_sha256, status, answer FROM receipts WHERE (door, sender, key) = (%s, %s, %s)"
            known = await (await conn.execute(query, of_this)).fetchone()
            assert known is not None
            if known["body_sha256"] != digest:
                raise KeyReused(key, "another request", "this one")
            return Answer(status=known["status"], body=known["answer"], repeated=True)
        answer = await work()
        await conn.execute(
            "UPDATE receipts SET status = %s, answer = %s WHERE (door, sender, key) = (%s, %s, %s)",
            (answer.status, json.dumps(answer.body), *of_this),
        )
        return answer
