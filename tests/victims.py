"""What a process does that is there to be struck down; forked, so that a hundred of them take seconds.

Each does what users run, on a connection that may be a proxy's.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from collections.abc import Sequence
from multiprocessing.connection import Connection as Pipe
from pathlib import Path

import claim_flow
from bot.deliver import Deliverer
from bot.outlet import Outlet
from flow.database import connect
from tests.local_slack import CHANNEL
from tests.slack_door import bot_in_process, client_of


def command(words: Sequence[str], settings: dict[str, str], out: Path, err: Path) -> None:
    """Type a command, with its output in these files."""
    os.environ.update(settings)
    sys.argv = ["claim_flow.py", *words]
    with (
        out.open("w", encoding="utf-8") as to_out,
        err.open("w", encoding="utf-8") as to_err,
        contextlib.redirect_stdout(to_out),
        contextlib.redirect_stderr(to_err),
    ):
        claim_flow.main()


def bot(url: str, api_url: str, ready: Pipe) -> None:
    """Serve clicks until killed, at the URL that it says when it is ready."""

    async def serve() -> None:
        async with client_of(api_url) as client, bot_in_process(url, client) as bot_url:
            ready.send(bot_url)
            await asyncio.Event().wait()

    asyncio.run(serve())


def deliver(url: str, api_url: str) -> None:
    """Deliver what is due."""

    async def sweep() -> None:
        async with client_of(api_url) as client, await connect(url, "door") as conn:
            await Deliverer(Outlet(client, CHANNEL)).sweep(conn)

    asyncio.run(sweep())
