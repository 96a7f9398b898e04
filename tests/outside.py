"""A service outside that honours idempotency keys: what it has done is what counts, whoever asked how often."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Self

from aiohttp import web


@dataclass(frozen=True, kw_only=True)
class Asked:
    """One request that arrived."""

    path: str
    key: str
    body: Any


def _none(_: Asked) -> bool:
    return False


@dataclass
class Outside:
    """`async with Outside() as outside`: takes POSTs below `outside.url`, each with an `Idempotency-Key`.

    A key that it knows gets the first reference again, and nothing more is done. Paths in `failing` are answered with
    that status, and those in `saying` with that JSON. What is `ignored` is never looked at, and what is `mute` is done
    but never answered.
    """

    port: int = 0
    asked: list[Asked] = field(default_factory=list)
    done: list[Asked] = field(default_factory=list)
    failing: dict[str, int] = field(default_factory=dict)
    saying: dict[str, Any] = field(default_factory=dict)
    ignored: Callable[[Asked], bool] = _none
    mute: Callable[[Asked], bool] = _none

    async def __aenter__(self) -> Self:
        app = web.Application()
        app.router.add_post("/{path:.*}", self._take)
        self._references: dict[str, str] = {}
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", self.port).start()
        self.port = self._runner.addresses[0][1]
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._runner.cleanup()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def asked_by_path(self) -> Counter[str]:
        return Counter(each.path for each in self.asked)

    @property
    def done_by_path(self) -> Counter[str]:
        return Counter(each.path for each in self.done)

    async def _take(self, request: web.Request) -> web.Response:
        asked = Asked(path=request.path, key=request.headers["Idempotency-Key"], body=await request.json())
        self.asked.append(asked)
        if self.ignored(asked):
            await asyncio.Event().wait()
        if status := self.failing.get(asked.path):
            return web.json_response({"error": "told to fail"}, status=status, headers={"Location": "/elsewhere"})
        if asked.key not in self._references:
            self._references[asked.key] = f"O-{len(self.done) + 1}"
            self.done.append(asked)
        if self.mute(asked):
            await asyncio.Event().wait()
        said = self.saying.get(asked.path, {"reference": self._references[asked.key]})
        return web.json_response(said, status=201)
