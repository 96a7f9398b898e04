"""The worker's looks at what is due."""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import AsyncIterator, Sequence
from typing import Any
from urllib.parse import quote

import pytest

from flow import threads
from flow.database import Connection
from flow.retention import Keep
from flow.threads import Due
from flow.worker import Worker
from tests.drives import approve_all
from tests.people import start_claim
from tests.rows import until, value

KEEP = Keep(checkpoints_s=None, events_s=None, spans_s=None)


@pytest.fixture
async def service_url(conn: Connection, database_url: str) -> AsyncIterator[str]:
    """The URL of this test's database for a role that may do everything in its tables, and is no superuser."""
    role = f"service_{uuid.uuid4().hex[:12]}"
    await conn.execute(f"CREATE ROLE {role}".encode())
    for what in ("TABLES", "SEQUENCES"):
        await conn.execute(f"GRANT ALL ON ALL {what} IN SCHEMA public TO {role}".encode())
    yield f"{database_url}{'&' if '?' in database_url else '?'}options={quote(f'-c role={role}')}"
    await conn.execute(f"DROP OWNED BY {role}".encode())
    await conn.execute(f"DROP ROLE {role}".encode())


@pytest.mark.parametrize("due_again", [False, True])
async def test_a_thread_that_is_driven_while_the_worker_looks_is_driven_again_only_if_it_is_due_again(
    conn: Connection,
    database_url: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    *,
    due_again: bool,
) -> None:
    """An answer of the database may be old when it is read: here the second one is, by a whole drive."""
    caplog.set_level(logging.INFO, "flow.worker")
    worker = Worker(database_url, drive_timeout_s=60, stand_by=2, keep=KEEP)
    looked_up, answers = threads.due_threads, list[Sequence[Due]]()

    async def driven() -> bool:
        return "thread t1: waiting" in caplog.messages and not worker._in_flight

    async def slow(*args: Any, **kwargs: Any) -> Sequence[Due]:
        if any(answers):
            await until(driven)
            monkeypatch.undo()
            if due_again:
                await approve_all(conn)
            return next(filter(None, answers))
        answers.append(await looked_up(*args, **kwargs))
        asyncio.get_running_loop().call_soon(worker._look.set)
        return answers[-1]

    monkeypatch.setattr(threads, "due_threads", slow)
    await start_claim(conn, amount="250")
    await worker.run_once()
    ends = [message for message in caplog.messages if message.startswith("thread t1: ")]
    assert ends == ["thread t1: waiting", *(["thread t1: over"] if due_again else [])]


async def test_a_driver_that_overstays_and_cannot_be_cut_off_holds_up_no_other_thread(
    conn: Connection, service_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    """It is of a role that the worker's is no member of."""
    caplog.set_level(logging.ERROR, "flow.worker")
    for thread_id in ("held", "t2", "t3"):
        await start_claim(conn, thread_id, "20")
    assert await threads.try_lock(conn, "held")
    assert await threads.take(conn, "held")
    await conn.execute("UPDATE threads SET driven_at = driven_at - interval '61 seconds' WHERE thread_id = 'held'")
    await Worker(service_url, drive_timeout_s=60, stand_by=1, keep=KEEP).run_once()
    paid = "SELECT array_agg(thread_id ORDER BY thread_id) FROM threads WHERE status = 'paid'"
    assert await value(conn, paid) == ["t2", "t3"]
    [said] = caplog.messages
    assert said.startswith("thread held: its driver overstays 60 s and cannot be cut off: ")
    assert f"pg_terminate_backend({conn.info.backend_pid})" in said


async def test_a_hundred_drives_under_way_hide_no_thread_that_nobody_drives(
    conn: Connection, database_url: str
) -> None:
    """A thread that is driven for the first time is as due as it was."""
    for number in range(100):
        await start_claim(conn, f"held-{number}", "20")
    await start_claim(conn, "free", "20")
    held = "SELECT count(pg_advisory_lock(hashtextextended(thread_id, 0))) FROM threads WHERE thread_id <> 'free'"
    assert await value(conn, held) == 100
    await Worker(database_url, drive_timeout_s=60, stand_by=1, keep=KEEP).run_once()
    assert await value(conn, "SELECT array_agg(thread_id) FROM threads WHERE status = 'paid'") == ["free"]
