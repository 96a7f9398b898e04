"""Tells open pages that something has changed: the bell of the database, passed on as Server-Sent Events.

Like the bell it carries nothing: a page that hears it looks again.
https://html.spec.whatwg.org/multipage/server-sent-events.html
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
from collections.abc import Awaitable, Callable

from aiohttp import web

from flow.database import wakes

# Bells come in bursts, one for each of a handful of rows; a page need not look more often than this.
_PAUSE_S = 0.25
# A proxy ends what is silent for a minute, and a session that has ended is noticed this late.
_BEAT_S = 20.0


class Live:
    """The bell as many can hear it at once: `run` listens, `wait` waits."""

    def __init__(self) -> None:
        self._next = asyncio.Event()
        # How often it has rung: whoever knows the number misses nothing while they are busy.
        self.rung = 0
        self.closing = False
        # Open streams of each session.
        self.streams: collections.Counter[str] = collections.Counter()

    async def run(self, url: str) -> None:
        """Listen until cancelled."""
        async with contextlib.aclosing(wakes(url, polls=False)) as bells:
            async for connected in bells:
                if connected:
                    self._ring()

    def close(self) -> None:
        """End every stream: this process stops."""
        self.closing = True
        self._ring()

    async def wait(self, heard: int, timeout_s: float) -> int:
        """How often it has rung, as soon as that is more often than was heard, or after `timeout_s`."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while self.rung == heard:
                    await self._next.wait()
        return self.rung

    def _ring(self) -> None:
        self.rung += 1
        self._next.set()
        self._next = asyncio.Event()


async def stream(request: web.Request, live: Live, session_holds: Callable[[], Awaitable[bool]]) -> web.StreamResponse:
    """Events for as long as the session holds, the page is open, and this process runs."""
    response = web.StreamResponse(
        headers={
            "Content-Type": "text/event-stream",
            "Cache-Control": "no-store",
            "X-Content-Type-Options": "nosniff",
            # nginx would keep the events to itself until its buffer is full.
            "X-Accel-Buffering": "no",
        }
    )
    await response.prepare(request)
    await response.write(b"retry: 2000\n\n")
    heard = live.rung
    with contextlib.suppress(ConnectionError):
        while not live.closing:
            rung = await live.wait(heard, _BEAT_S)
            if live.closing or not await session_holds():
                break
            await response.write(b": still here\n\n" if rung == heard else b"event: change\ndata:\n\n")
            heard = rung
            await asyncio.sleep(_PAUSE_S)
    return response
