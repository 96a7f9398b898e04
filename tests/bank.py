"""A payment service with a memory, which can be told to fail: what it has really paid is what counts."""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass, field
from typing import Any, Literal, Self

from aiohttp import web

# lost: it pays, and the answer never arrives. dropped: the request never arrives. held: it pays, and answers when
# freed. slow: it pays when freed. halves: it pays, and the second half of its answer comes when freed. A number: that
# HTTP status, and no payment; a 401 quotes the token.
Fault = Literal["lost", "dropped", "held", "slow", "halves"] | int


@dataclass
class Bank:
    """`async with Bank() as bank`: POST and GET of `bank.url`, keyed by `Idempotency-Key`.

    `remembers` keys: a known one gets the first reference again. Else every request that arrives is a payment.
    """

    remembers: bool = True
    paid: list[dict[str, Any]] = field(default_factory=list)
    keys: list[str] = field(default_factory=list)
    # Keys that somebody asked about; so many of those questions are not answered.
    looked_up: list[str] = field(default_factory=list)
    look_up_faults: int = 0
    # Whether whatever stands before it knows where it is, for those who look up.
    is_found: bool = True
    # What it adds to its word that it knows of no reference.
    says: dict[str, str] = field(default_factory=dict)
    faults: deque[Fault] = field(default_factory=deque)
    asked: asyncio.Event = field(default_factory=asyncio.Event)
    booked: asyncio.Event = field(default_factory=asyncio.Event)
    freed: asyncio.Event = field(default_factory=asyncio.Event)
    url: str = ""
    _references: dict[str, str] = field(default_factory=dict)

    async def __aenter__(self) -> Self:
        app = web.Application()
        app.router.add_post("/payments", self._pay)
        app.router.add_get("/payments", self._look_up)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}/payments"
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._runner.cleanup()

    async def _pay(self, request: web.Request) -> web.StreamResponse:
        key = request.headers["Idempotency-Key"]
        self.keys.append(key)
        self.asked.set()
        fault = self.faults.popleft() if self.faults else None
        if isinstance(fault, int):
            headers = {"Location": "/payments"} if fault == 302 else {}
            why = f"told to answer {fault}" if fault != 401 else f"unknown: {request.headers.get('Authorization')}"
            return web.json_response({"error": why}, status=fault, headers=headers)
        if fault == "dropped":
            return cut(request)
        body = await request.json()
        if fault == "slow":
            await self.freed.wait()
        if not (self.remembers and key in self._references):
            self._references[key] = f"B-{len(self.paid) + 1}"
            self.paid.append(body)
            self.booked.set()
        if fault == "held":
            await self.freed.wait()
        if fault == "lost":
            return cut(request)
        if fault == "halves":
            return await self._in_halves(request, self._references[key])
        return web.json_response({"reference": self._references[key]}, status=201)

    async def _in_halves(self, request: web.Request, reference: str) -> web.StreamResponse:
        answer = web.StreamResponse(status=201)
        await answer.prepare(request)
        await answer.write(b'{"reference": ')
        await self.freed.wait()
        await answer.write(f'"{reference}"}}'.encode())
        return answer

    async def _look_up(self, request: web.Request) -> web.Response:
        self.looked_up.append(request.headers["Idempotency-Key"])
        if self.look_up_faults:
            self.look_up_faults -= 1
            return web.json_response({}, status=503)
        if not self.is_found:
            return web.Response(status=404, text="default backend - 404")
        reference = self._references.get(request.headers["Idempotency-Key"])
        said = {"reference": reference} | ({} if reference else self.says)
        return web.json_response(said, status=200 if reference else 404)


def cut(request: web.Request) -> web.Response:
    """Cut the connection instead of answering."""
    assert request.transport is not None
    request.transport.abort()
    return web.Response()
