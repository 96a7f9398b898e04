"""Deliverers in this process, in front of a Slack that may fail, and the cards that they leave in the channel."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

from bot.deliver import Deliverer
from bot.outlet import Outlet
from tests.block_kit import words_of
from tests.fault_proxy import FaultProxy
from tests.local_slack import CHANNEL
from tests.slack_door import client_of

# Long enough for a local answer on a busy machine, short beside the one that never comes.
_PATIENCE_S = 2.0

OPS_CHANNEL = "C02RND"


@contextlib.asynccontextmanager
async def deliverer_at(proxy: FaultProxy, *, patience_s: float = _PATIENCE_S) -> AsyncIterator[Deliverer]:
    async with client_of(proxy.api_url, timeout_s=patience_s) as client:
        yield Deliverer(Outlet(client, CHANNEL, ops_channel=OPS_CHANNEL))


@contextlib.asynccontextmanager
async def running(deliverer: Deliverer, url: str) -> AsyncIterator[None]:
    """The deliverer as a service runs it, and stops it at the end."""
    task = asyncio.create_task(deliverer.run(url))
    try:
        yield
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


def interrupt_of(message: dict[str, Any]) -> str:
    """The interrupt id that the card names to a person."""
    return words_of(message).split("interrupt ")[1].split(" ", maxsplit=1)[0]
