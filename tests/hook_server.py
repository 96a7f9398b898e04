"""A server that receives webhooks: it remembers what was signed for it, and can be told to fail."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections import deque
from dataclasses import dataclass, field
from typing import Any, Self

from aiohttp import web
from standardwebhooks.webhooks import Webhook

from bot.webhooks_out import Receiver
from tests.api_door import OTHER_SECRET, SECRET
from tests.bank import cut


@dataclass(frozen=True, kw_only=True)
class Fault:
    """How one request is answered. `held`: not before this is set. `lost`: it is taken, and the answer never arrives.
    `endless`: the answer's body never ends."""

    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""
    held: asyncio.Event | None = None
    lost: bool = False
    endless: bool = False


@dataclass(frozen=True, kw_only=True)
class Received:
    """One request that was signed as it should be."""

    id: str
    timestamp: int
    body: bytes
    host: str

    @property
    def event(self) -> Any:
        return json.loads(self.body)


@dataclass
class HookServer:
    """`async with HookServer() as server`: takes POSTs at `server.url`, and everything else as a mistake."""

    secret: str = SECRET
    host: str = "127.0.0.1"
    port: int = 0
    received: list[Received] = field(default_factory=list)
    mistakes: list[str] = field(default_factory=list)
    faults: deque[Fault] = field(default_factory=deque)
    # Bytes of endless answers that went out.
    written: int = 0
    # Endless answers that came to an end because nobody read them any more.
    ended: int = 0
    # The answers to come that have no fault of their own.
    usual: Fault = field(default_factory=Fault)

    async def __aenter__(self) -> Self:
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", self._receive)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        await self._runner.setup()
        await web.TCPSite(self._runner, self.host, self.port).start()
        self.port = self._runner.addresses[0][1]
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._runner.cleanup()

    @property
    def url(self) -> str:
        return f"http://{self.host}:{self.port}/hooks"

    @property
    def ids(self) -> list[str]:
        return [each.id for each in self.received]

    @property
    def types(self) -> list[str]:
        return [each.event["type"] for each in self.received]

    def named(self, name: str = "acme", *secrets: str) -> Receiver:
        """This server as an endpoint."""
        return Receiver(name=name, url=self.url, secrets=secrets or (self.secret,))

    async def got(self, count: int) -> bool:
        return len(self.received) >= count

    async def _receive(self, request: web.Request) -> web.StreamResponse:
        raw = await request.read()
        try:
            Webhook(self.secret).verify(raw, dict(request.headers))
            assert (request.method, request.path) == ("POST", "/hooks")
            assert request.headers["Content-Type"] == "application/json"
        except Exception as exc:  # noqa: BLE001 (the test wants to see it, whatever it is)
            self.mistakes.append(f"{request.method} {request.path}: {type(exc).__name__}: {exc}")
            return web.Response(status=401)
        self.received.append(
            Received(
                id=request.headers["webhook-id"],
                timestamp=int(request.headers["webhook-timestamp"]),
                body=raw,
                host=request.headers["Host"],
            )
        )
        return await self._answer(request, self.faults.popleft() if self.faults else self.usual)

    async def _answer(self, request: web.Request, fault: Fault) -> web.StreamResponse:
        if fault.held:
            await fault.held.wait()
        if fault.lost:
            return cut(request)
        if not fault.endless:
            return web.Response(status=fault.status, headers=fault.headers, body=fault.body)
        response = web.StreamResponse(status=fault.status, headers=fault.headers)
        await response.prepare(request)
        with contextlib.suppress(ConnectionError):
            while True:
                await response.write(b"more " * 2000)
                self.written += 10_000
        self.ended += 1
        return response


def other_server() -> HookServer:
    return HookServer(secret=OTHER_SECRET)
