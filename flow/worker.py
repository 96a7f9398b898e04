"""The worker: finds due threads and has each driven in a fresh process; and the clock.

The rows are the queue, so a worker keeps nothing that matters: what it has in flight is only a hint, and any number
of workers on any number of machines share one database. The bell shortens the wait, a poll is the truth.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
from collections.abc import AsyncIterator

import psycopg

from flow import audit, counts, deadlines, exports, reminders, retention, threads
from flow.database import AWAY, POLL_S, Connection, Lock, connect, wakes
from flow.errors import ChainBroken, DatabaseUnavailable
from flow.log import concerning, new_trace_id
from flow.standby import Report, Standby, Zygote

log = logging.getLogger(__name__)

# A killed drive's backend notices within this; looking again at once saves its thread the wait for the next poll.
_LOOKS_AFTER_A_DEATH_S = (0.02, 0.05, 0.1, 0.3, 0.6)

# Besides the half second in which the server notices a death, this is how late a dead worker's thread is taken over.
# One query each time, and only while somebody else drives.
_BETWEEN_LOOKS_AT_OTHERS_S = 0.25

_BETWEEN_TIDYING_S = 600.0

# How late people are reminded, and a thread whose flow has come back is taken up, besides at once by who brings it.
_BETWEEN_LOOKS_AROUND_S = 5.0

# One that has not rehearsed was made for threads that waited: if none comes, one that has takes its place.
_UNREHEARSED_S = 0.2

# More than a worker can have stand-bys.
_BATCH = 100

# With the half second between them this is long enough for a database to restart.
_MOST_FAILURES = 20

_AWAY = {True: "here", False: "away"}

# No thread id: tells a slot to end.
_NO_MORE = ""


class Worker:
    """Runs until it is told to stop. `ready` counts the stand-bys that wait for a thread."""

    def __init__(self, url: str, *, drive_timeout_s: float, stand_by: int, keep: retention.Keep) -> None:
        self._url, self._drive_timeout_s, self._stand_by, self._keep = url, drive_timeout_s, stand_by, keep
        self._zygote = Zygote.start(url)
        self._jobs: asyncio.Queue[str] = asyncio.Queue()
        self._in_flight: set[str] = set()
        self._look = asyncio.Event()
        self._works = asyncio.Event()
        self._stopping = False
        self._conn: Connection | None = None
        self._connected = False
        # Zygotes that died in a row, and threads whose driver died while their lock may still be held.
        self._failures = 0
        self._orphans: set[str] = set()
        # Threads, and sessions that drive them for too long and cannot be cut off: each is told once.
        self._lasting: set[tuple[str, int | None]] = set()
        # Keys of the flows that its stand-bys drive; the first of them says so.
        self._flows: tuple[str, ...] = ()
        self._looks_around_at = 0.0
        self._looks_again_at = 0.0
        # Whether more was due at the last look than there were stand-bys.
        self._is_behind = False
        self.ready = 0

    @property
    def works(self) -> bool:
        """Whether a stand-by has come up, and the database is heard."""
        return self._works.is_set() and self._connected

    async def run(self, stop: asyncio.Event) -> None:
        """Work until `stop` is set, then let the drives under way end."""
        async with self._slots() as group:
            listener = group.create_task(self._listen())
            stopper = group.create_task(self._stop_on(stop))
            tidier = group.create_task(self._tidy_now_and_then())
            while not self._stopping:
                await self._look.wait()
                self._look.clear()
                await self._scan_if_connected()
            listener.cancel()
            stopper.cancel()
            tidier.cancel()

    async def run_once(self) -> None:
        """Drive what is due until nothing is. Tidying is left to the caller: what there is to tell comes first."""
        async with self._slots():
            # The first stand-by says which flows there are.
            await self._works.wait()
            while await self._scan() or self._in_flight:
                # No bell is heard here, and what another worker holds may be free by then.
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(POLL_S):
                        await self._look.wait()
                self._look.clear()

    @contextlib.asynccontextmanager
    async def _slots(self) -> AsyncIterator[asyncio.TaskGroup]:
        """The stand-bys, each in a slot that replaces it after its drive; at the end the drives under way end first."""
        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(self._stand_by):
                    group.create_task(self._slot())
                yield group
                self._stopping = True
                for _ in range(self._stand_by):
                    self._jobs.put_nowait(_NO_MORE)
                while self._in_flight:
                    await self._look.wait()
                    self._look.clear()
                # Whoever is still waiting for a stand-by need not.
                self._zygote.stop()
        finally:
            self._zygote.stop()
            if self._conn is not None:
                await self._conn.close()

    async def _slot(self) -> None:
        # A rehearsal is also a trial: it fails where the database takes no writes.
        in_doubt = False
        while not self._stopping:
            rehearsed = in_doubt or not self._is_behind
            try:
                standby = await self._zygote.fork(rehearsed=rehearsed)
            except OSError as exc:
                in_doubt = True
                await self._mend(exc)
                continue
            in_doubt = False
            with contextlib.closing(standby):
                self._flows = standby.flows
                self._works.set()
                self._failures = 0
                self.ready += 1
                self._look.set()
                try:
                    thread_id = await self._job_for(standby, within_s=None if rehearsed else _UNREHEARSED_S)
                finally:
                    self.ready -= 1
                if thread_id is None:
                    continue
                if thread_id == _NO_MORE:
                    return
                try:
                    with concerning(thread=thread_id, trace_id=new_trace_id()):
                        report = await standby.drive(thread_id, timeout_s=self._drive_timeout_s)
                        in_doubt = report.lost is not None
                        _count(report)
                        self._log(thread_id, report)
                finally:
                    self._in_flight.discard(thread_id)
                    self._look.set()

    async def _job_for(self, standby: Standby, *, within_s: float | None) -> str | None:
        """The next thread to drive; None if the stand-by died, or the time is over, before there was one."""
        job = asyncio.ensure_future(self._jobs.get())
        try:
            await asyncio.wait({job, standby.ended}, timeout=within_s, return_when=asyncio.FIRST_COMPLETED)
            if job.done():
                return job.result()
            # One that has just been put there: a stand-by is ready for it.
            return None if standby.ended.done() or self._jobs.empty() else self._jobs.get_nowait()
        finally:
            job.cancel()

    async def _mend(self, exc: OSError) -> None:
        """A stand-by could not be made: the database is away, or the zygote is gone."""
        if self._stopping:
            return
        log.warning("no stand-by: %s", exc)
        if not self._zygote.alive:
            self._failures += 1
            if self._failures > (_MOST_FAILURES if self._works.is_set() else 0):
                # It must not go on saying that it is here.
                raise DatabaseUnavailable("no process could be made that drives threads: see the lines above") from exc
            self._zygote.stop()
            self._zygote = Zygote.start(self._url)
        await asyncio.sleep(0.5)

    async def _listen(self) -> None:
        # Only a worker that can work says that it is here.
        await self._works.wait()
        async with contextlib.aclosing(wakes(self._url, present_as=(Lock.WORKER, *self._flows))) as waking:
            async for connected in waking:
                if connected != self._connected:
                    log.log(logging.INFO if connected else logging.WARNING, "the database is %s", _AWAY[connected])
                    self._looks_around_at = 0.0
                self._connected = connected
                if connected:
                    self._look.set()

    async def _stop_on(self, stop: asyncio.Event) -> None:
        await stop.wait()
        self._stopping = True
        self._look.set()

    async def _scan_if_connected(self) -> None:
        try:
            await self._scan()
        except AWAY as exc:
            # The listener keeps trying, and wakes us when the database is back.
            log.warning("the database is away: %s", str(exc).strip())
            if self._conn is not None:
                await self._conn.close()

    async def _scan(self) -> int:
        """Give each ready stand-by a thread that is due and free; how many such threads there are."""
        if self._conn is None or self._conn.closed:
            self._conn = await connect(self._url, "door")
        wanting, held_elsewhere, behind = 0, False, False
        await self._look_around(self._conn)
        # Whoever ends meanwhile may stand in what is found, as it was before its drive, and makes us look again.
        in_flight = set(self._in_flight)
        found = await threads.due_threads(
            self._conn, flows=self._flows, drive_timeout_s=self._drive_timeout_s, limit=_BATCH
        )
        if any(due.held and due.thread_id not in in_flight for due in found):
            # Others are at it. Whoever takes the oldest, as they do, comes too late for most of them; but for what
            # somebody has to be relieved of.
            found = sorted(random.sample(found, len(found)), key=lambda due: not due.overdue)
        for due in found:
            if due.thread_id in in_flight:
                # Driven, and due again perhaps: whoever asks whether anything is left must look once more.
                wanting += due.thread_id not in self._in_flight
                continue
            if due.held and not due.overdue:
                held_elsewhere = True
                wanting += due.thread_id in self._orphans
                continue
            if self.ready <= self._jobs.qsize():
                # The rest is left to other workers, or to the next stand-by that is ready.
                wanting += 1
                behind = True
                break
            if due.overdue and not await self._evict(self._conn, due):
                held_elsewhere = True
                continue
            wanting += 1
            self._orphans.discard(due.thread_id)
            self._in_flight.add(due.thread_id)
            self._jobs.put_nowait(due.thread_id)
        self._is_behind = behind
        loop = asyncio.get_running_loop()
        if held_elsewhere and self._looks_again_at < loop.time():
            # Nobody rings when its driver dies. One timer for all of them, however often the bell rings.
            self._looks_again_at = loop.time() + _BETWEEN_LOOKS_AT_OTHERS_S
            loop.call_at(self._looks_again_at, self._look.set)
        await deadlines.expire_overdue(self._conn)
        return wanting

    async def _look_around(self, conn: Connection) -> None:
        """Now and then, and when the database is heard again: take up what waited for our flows, set aside what waits
        for flows that nobody has, have people reminded, and seal the audit log."""
        now = asyncio.get_running_loop().time()
        if self._flows and now >= self._looks_around_at:
            self._looks_around_at = now + _BETWEEN_LOOKS_AROUND_S
            await reminders.remind_overdue(conn)
            _taken_up, set_aside = await threads.settle_flows(conn, self._flows)
            if set_aside:
                log.error("%d threads are unavailable: no worker has their flow", set_aside)
            try:
                if await audit.seal(conn) == audit.BATCH:
                    # There is more, after the threads that are due.
                    self._looks_around_at = now
            except ChainBroken as exc:
                log.error("%s", exc)  # noqa: TRY400 (nobody needs a traceback)

    async def _tidy_now_and_then(self) -> None:
        await self._works.wait()
        while True:
            await self.tidy()
            await asyncio.sleep(_BETWEEN_TIDYING_S)

    async def tidy(self) -> None:
        """Delete what has been kept for long enough. On a connection of its own: no thread that is due waits for it."""
        try:
            async with await connect(self._url, "door") as conn:
                # Where nobody sends traces, what is marked has an age, too, and goes with the spans.
                await exports.spread(conn)
                pruned = await retention.prune(conn, self._keep)
        except (psycopg.Error, DatabaseUnavailable):
            # Whatever it is, money must not wait until it is mended.
            log.exception("what is long over could not be deleted; the next try is in %g s", _BETWEEN_TIDYING_S)
        else:
            if pruned.rows:
                log.info("deleted what is long over: %s", " ".join(pruned.in_words().split()))

    async def _evict(self, conn: Connection, due: threads.Due) -> bool:
        """Cut off whoever drives it for too long. False if that is refused: then it stays theirs."""
        thread_id, too_long_s = due.thread_id, self._drive_timeout_s
        try:
            if await threads.evict_driver(conn, thread_id, drive_timeout_s=too_long_s):
                log.warning("thread %s: its driver overstayed %g s and was cut off", thread_id, too_long_s)
        except AWAY:
            raise
        except psycopg.Error as exc:
            # Another role's session, most of all. No other thread has to wait for it.
            if (thread_id, due.holder) not in self._lasting:
                self._lasting.add((thread_id, due.holder))
                why, _, _ = str(exc).partition("\n")
                fix = f"end its process, or say `SELECT pg_terminate_backend({due.holder})` as its role or a superuser"
                told = "thread %s: its driver overstays %g s and cannot be cut off: %s; %s"
                log.error(told, thread_id, too_long_s, why, fix)  # noqa: TRY400 (nobody needs a traceback)
            return False
        return True

    def _log(self, thread_id: str, report: Report) -> None:
        if report.lost is not None:
            log.warning("thread %s: %s; driving it again", thread_id, report.lost)
            self._orphans.add(thread_id)
            loop = asyncio.get_running_loop()
            for wait_s in _LOOKS_AFTER_A_DEATH_S:
                loop.call_later(wait_s, self._look.set)
        elif report.failed is not None:
            log.warning("thread %s: a step failed and will be tried again: %s", thread_id, report.failed)
        elif report.outcome in ("stuck", "unavailable"):
            log.error("thread %s needs a person: %s", thread_id, report.reason)
        else:
            log.info("thread %s: %s", thread_id, report.outcome)


def _count(report: Report) -> None:
    counts.drives.add(report.outcome or ("failed" if report.failed is not None else "lost"))
    if report.taken_over:
        counts.takeovers.add()
    if report.payment is not None:
        counts.payments.add(report.payment)
    if report.decided_to_paid_s is not None:
        counts.click_to_paid.add(report.decided_to_paid_s)
