"""Programs in front of the bot's API: with tokens, and with signatures."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Self

import aiohttp
from aiohttp import web
from multidict import CIMultiDictProxy
from standardwebhooks.webhooks import Webhook

from bot.api import build_api
from bot.pool import pool_of
from bot.web import build_web
from bot.webhooks import Endpoint
from flow.database import Connection
from flow.starting import Checker
from flow.tokens import SCOPES, Scope, create_token

SECRET = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"
OLD_SECRET = "whsec_C2FVsBQIhrscChlQIMV+b5sSYspob7oD"
OTHER_SECRET = "whsec_t1Sb7FZqCKYAc9lXqzA6oqUq4kPtDTkX"

# acme is in the midst of a rotation, and speaks for two people; other for one of the same name.
ENDPOINTS = (
    Endpoint(name="acme", secrets=(SECRET, OLD_SECRET), approvers=frozenset({"carol", "dave"})),
    Endpoint(name="other", secrets=(OTHER_SECRET,), approvers=frozenset({"carol"})),
)


@dataclass(frozen=True, kw_only=True)
class Answered:
    """What came back."""

    status: int
    body: Any
    headers: CIMultiDictProxy[str]


@contextlib.asynccontextmanager
async def api_in_process(
    database_url: str, *, endpoints: tuple[Endpoint, ...] = ENDPOINTS, **more: Any
) -> AsyncIterator[str]:
    """The URL of a bot with its API."""
    async with pool_of(database_url) as pool:
        checker = Checker()
        runner = web.AppRunner(build_web(api=build_api(pool, endpoints, checker, **more), checks={}), access_log=None)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        try:
            yield f"http://127.0.0.1:{runner.addresses[0][1]}"
        finally:
            await runner.cleanup()
            await checker.close()


class Program:
    """`async with Program(url, token) as program`: asks the API, and hands back whatever it answers."""

    def __init__(self, url: str, token: str | None = None) -> None:
        self._url, self._token = url, token

    async def __aenter__(self) -> Self:
        self._session = aiohttp.ClientSession()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._session.close()

    async def ask(
        self,
        method: str,
        path: str,
        body: Any = None,
        *,
        headers: Any = None,
        raw: bytes | None = None,
        **query: Any,
    ) -> Answered:
        """`raw` is sent as it is, in the place of `body` as JSON."""
        given = [("Authorization", f"Bearer {self._token}")] if self._token else []
        if body is not None or raw is not None:
            given.append(("Content-Type", "application/json"))
        asked = dict(headers or {})
        given = [(name, value) for name, value in given if name not in asked] + list(asked.items())
        data = raw if raw is not None else json.dumps(body).encode() if body is not None else None
        async with self._session.request(method, self._url + path, data=data, headers=given, params=query) as answer:
            text = await answer.text()
            parsed = json.loads(text) if text and "json" in answer.content_type else text
            return Answered(status=answer.status, body=parsed, headers=answer.headers)

    async def get(self, path: str, **query: Any) -> Answered:
        return await self.ask("GET", path, **query)

    async def post(self, path: str, body: Any, **more: Any) -> Answered:
        return await self.ask("POST", path, body, **more)

    async def decide_signed(
        self, interrupt_id: str, body: Any, *, webhook_id: str = "msg_1", secret: str = SECRET, at: float | None = None
    ) -> Answered:
        """A signed decision."""
        raw = json.dumps(body).encode()
        return await self.ask(
            "POST",
            f"/api/approvals/{interrupt_id}/decision",
            raw=raw,
            headers=signed(raw, webhook_id=webhook_id, secret=secret, at=at),
        )


def signed(raw: bytes, *, webhook_id: str = "msg_1", secret: str = SECRET, at: float | None = None) -> dict[str, str]:
    """The three headers, made by the package that senders use."""
    when = datetime.fromtimestamp(int(time.time() if at is None else at), tz=UTC)
    return {
        "webhook-id": webhook_id,
        "webhook-timestamp": str(int(when.timestamp())),
        "webhook-signature": Webhook(secret).sign(webhook_id, when, raw.decode()),
    }


async def token(conn: Connection, name: str = "robot", scopes: tuple[Scope, ...] = SCOPES) -> str:
    return await create_token(conn, name, scopes, by="cli:ann")
