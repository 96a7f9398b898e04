"""The worker's looks at what is due."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import Any

import pytest

from flow import threads
from flow.database import Connection
from flow.retention import Keep
from flow.threads import Due
from flow.worker import Worker
from tests.people import start_claim
from tests.rows import until


async def test_a_thread_that_is_driven_while_the_worker_looks_is_not_driven_again(
    conn: Connection, database_url: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """An answer of the database may be old when it is read: here the second one is, by a whole drive."""
    caplog.set_level(logging.INFO, "flow.worker")
    keep = Keep(checkpoints_s=None, events_s=None, spans_s=None)
    worker = Worker(database_url, drive_timeout_s=60, stand_by=2, keep=keep)
    looked_up, answers = threads.due_threads, list[Sequence[Due]]()

    async def driven() -> bool:
        return "thread t1: over" in caplog.messages

    async def slow(*args: Any, **kwargs: Any) -> Sequence[Due]:
        if any(answers):
            await until(driven)
            monkeypatch.undo()
            return next(filter(None, answers))
        answers.append(await looked_up(*args, **kwargs))
        asyncio.get_running_loop().call_soon(worker._look.set)
        return answers[-1]

    monkeypatch.setattr(threads, "due_threads", slow)
    await start_claim(conn, amount="20")
    await worker.run_once()
    assert caplog.messages.count("thread t1: over") == 1
