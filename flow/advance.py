"""`advance`: have a thread driven until it waits or is over, by a worker if one is here, else in this process.

What `start` and `resume` share. The same `drive` either way; a worker only saves the seconds that LangGraph's import
takes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import psycopg

from flow.database import Connection, check_locks, connect, is_present, listen, wait_for_bell
from flow.errors import DriveFailed
from flow.model import Thread
from flow.settings import Settings
from flow.threads import thread_of

# How often to look whether the worker is still here. The row's own changes ring.
_POLL_S = 0.25


async def advance(
    url: str, conn: Connection, thread_id: str, settings: Settings, *, tell: Callable[[Thread], None] | None = None
) -> Thread:
    """The thread as it is once it waits for a person, is over, stuck or put off, or nothing of it has moved for long
    enough. `tell` gets it as it is meanwhile, now and then.

    A step that fails is told by the row alone, the same whoever drove.
    """
    await listen(conn)
    clock = asyncio.get_running_loop().time
    seen, deadline = None, clock() + settings.drive_timeout
    while True:
        thread = await thread_of(conn, thread_id)
        if tell:
            tell(thread)
        if thread.progress != seen:
            seen, deadline = thread.progress, clock() + settings.drive_timeout
        if thread.due_at is None or thread.put_off or clock() > deadline:
            return thread
        if await is_present(conn, thread.flow_key):
            await wait_for_bell(conn, timeout_s=_POLL_S)
        elif await _drive_and_tell(url, conn, thread, settings, tell):
            deadline = clock() + settings.drive_timeout
        else:
            # Somebody else drives it.
            await wait_for_bell(conn, timeout_s=_POLL_S)


async def _drive_and_tell(
    url: str, conn: Connection, thread: Thread, settings: Settings, tell: Callable[[Thread], None] | None
) -> bool:
    driving = asyncio.ensure_future(_drive_here(url, thread.thread_id, thread.flow_key, settings))
    while tell and not driving.done():
        await asyncio.wait({driving}, timeout=_POLL_S)
        tell(await thread_of(conn, thread.thread_id))
    return await driving


async def _drive_here(url: str, thread_id: str, flow_key: str, settings: Settings) -> bool:
    """False if somebody else is driving it, or has taken over because we stood still for too long."""
    from flow.assess import adviser_of
    from flow.drive import drive, ensure_checkpoint_tables
    from flow.flows import flows_with
    from flow.log import hider_of_content
    from flow.policy import policy_of
    from flow.providers import provider_of

    await check_locks(url)
    async with await connect(url, "drive") as own:
        await ensure_checkpoint_tables(url, own)
        try:
            outcome = await drive(
                own,
                thread_id,
                flows=flows_with(settings.flow_modules, flow_key),
                policy=policy_of(settings),
                adviser=adviser_of(settings),
                provider=provider_of(settings),
                slice_s=settings.drive_slice,
                spans=settings.spans,
                hide=hider_of_content(settings),
            )
        except DriveFailed:
            return True
        except psycopg.OperationalError:
            if not own.closed:
                raise
            # Our drive is lost with its connection. Whether the database is, the next look at the thread will tell.
            return False
    return outcome != "locked"
