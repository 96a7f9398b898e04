"""The pen of a drive: its one connection, which also holds the thread's lock, and the lock that everyone shares.

LangGraph's saver writes in the background on the same connection, so every statement of ours, in nodes too, runs
under `tx()`. Whoever loses the connection loses lock and pen together: a stale process can write nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

from flow.assess import Adviser
from flow.database import Connection
from flow.policy import Policy
from flow.providers import Provider
from flow.spans import Recorder


@dataclass(frozen=True, kw_only=True)
class Pen:
    """What a node gets as `runtime.context`."""

    conn: Connection
    policy: Policy
    adviser: Adviser | None = None
    provider: Provider | None = None
    spans: Recorder = field(default_factory=lambda: Recorder("drive", on=False))
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)

    @contextlib.asynccontextmanager
    async def alone(self) -> AsyncIterator[Connection]:
        """The drive's connection, alone on it, for one look. Not re-entrant."""
        async with self.lock:
            yield self.conn

    @contextlib.asynccontextmanager
    async def tx(self) -> AsyncIterator[Connection]:
        """A transaction on the drive's connection, alone on it. Not re-entrant: SQL only inside, no outside call."""
        async with self.lock, self.conn.transaction():
            yield self.conn
