"""The delivery of notices to Slack: which is due, where it belongs, and what becomes of it.

Slack has no idempotency key, so the SDK's retries are off, and each result is recorded: sent, later, or failed for
good. With many workspaces each has an outlet of its own, and none waits for another that Slack wants to be quiet.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
from collections.abc import AsyncIterator, Mapping
from typing import Protocol, TypeVar

import aiohttp
from slack_sdk.errors import SlackApiError

from bot.outlet import LeaseLost, Outlet
from bot.places import PlaceRefused
from bot.slack_api import ENDED, RATE_LIMITS, fix_of, is_refusal, read_error, slack_client
from flow import notices
from flow.aio import to_its_end
from flow.database import AWAY, OUTSIDE_AFTER_S, POLL_S, Connection, Lock, connect, wakes
from flow.errors import TokenUnreadable, WorkspaceClosed
from flow.log import concerning
from flow.model import Notice
from flow.settings import Settings
from flow.spans import Recorder, recorded_by
from flow.workspaces import uninstalled

log = logging.getLogger(__name__)

K = TypeVar("K")

_LONGEST_WAIT_S = 30.0
_LANES: tuple[notices.Lane, ...] = ("posts", "changes", "alarms")


class Outlets(Protocol):
    """Where notices go out: `bot.outlet.Outlet`, where there is one, or `bot.workspaces.ManyOutlets`."""

    async def of(self, conn: Connection, notice: Notice) -> Outlet:
        """That of a notice. Raises WorkspaceClosed if it has none, and TokenUnreadable."""


class Deliverer:
    """Delivers on whatever connection it is given; any number of them may run side by side."""

    def __init__(self, outlets: Outlets, *, spans: bool = True) -> None:
        self._outlets, self._spans = outlets, spans
        # By workspace (None: the one that there is) the loop's time until which Slack has asked us to be quiet, and
        # until which it takes no more messages in a channel.
        self._quiet_until: dict[str | None, float] = {}
        self._rests_until: dict[str, float] = {}
        # Whether the last look at the database succeeded; part of readiness.
        self.connected = False

    @classmethod
    @contextlib.asynccontextmanager
    async def of(cls, settings: Settings) -> AsyncIterator[Deliverer]:
        if settings.many_workspaces:
            from bot.workspaces import ManyOutlets

            async with ManyOutlets.of_settings(settings) as outlets:
                yield cls(outlets, spans=settings.spans)
            return
        assert settings.slack_channel is not None
        async with slack_client(settings) as client:
            outlet = Outlet(
                client,
                settings.slack_channel,
                ops_channel=settings.slack_ops_channel,
                public_url=settings.public_url,
            )
            yield cls(outlet, spans=settings.spans)

    async def run(self, url: str) -> None:
        """Deliver whenever something is due, until cancelled."""
        bells = {lane: asyncio.Event() for lane in _LANES}
        async with (
            asyncio.TaskGroup() as group,
            contextlib.aclosing(wakes(url, present_as=(Lock.DELIVERER,), after_s=OUTSIDE_AFTER_S)) as waking,
        ):
            for lane, bell in bells.items():
                group.create_task(self._run_lane(url, lane, bell))
            async for connected in waking:
                if connected != self.connected:
                    log.log(logging.INFO if connected else logging.WARNING, "connected to the database: %s", connected)
                self.connected = connected
                if connected:
                    for bell in bells.values():
                        bell.set()

    async def sweep(self, conn: Connection, *, within_s: float = math.inf) -> tuple[int, int]:
        """Deliver what is due now, changes first; how many were sent, and how many not.

        Begins none after `within_s`.
        """
        deadline = asyncio.get_running_loop().time() + within_s
        sent = failed = 0
        lanes: tuple[notices.Lane, ...] = ("changes", "posts", "changes", "alarms")
        for lane in lanes:
            # Twice: a card that changed while it was posted is a change now.
            delivered, refused = await self._sweep_lane(conn, lane, deadline)
            sent, failed = sent + delivered, failed + refused
        return sent, failed

    async def _run_lane(self, url: str, lane: notices.Lane, bell: asyncio.Event) -> None:
        conn: Connection | None = None
        while True:
            # Each looks by itself, too, should the one listener hear nothing.
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(POLL_S):
                    await bell.wait()
            bell.clear()
            try:
                if conn is None or conn.closed:
                    conn = await connect(url, "door")
                await self._sweep_lane(conn, lane)
            except AWAY as exc:
                # Leases run out by themselves; the listener keeps trying and wakes us.
                log.warning("the database is away: %s", str(exc).strip())
                if conn is not None:
                    await conn.close()

    async def _sweep_lane(self, conn: Connection, lane: notices.Lane, deadline: float = math.inf) -> tuple[int, int]:
        clock = asyncio.get_running_loop().time
        sent = failed = 0
        # Told to wait, we wait with everything of that workspace, not with one message only.
        while None not in (quiet := _still(self._quiet_until)) and clock() < deadline:
            # One that is cut off would keep its lease, and nobody would go on.
            delivered = await to_its_end(self._deliver_next(conn, lane, {key for key in quiet if key is not None}))
            if delivered is None:
                break
            sent, failed = sent + delivered, failed + (not delivered)
        return sent, failed

    async def _deliver_next(self, conn: Connection, lane: notices.Lane, quiet: set[str]) -> bool | None:
        """Whether the notice that is due was sent; None if none is due."""
        # Whose channel takes no message at this moment lets others go first.
        resting = _still(self._rests_until)
        notice = await notices.lease(conn, lane, but=quiet | resting)
        if notice is None and resting - quiet:
            notice = await notices.lease(conn, lane, but=quiet)
        if notice is None:
            return None
        with concerning(thread=notice.thread_id, interrupt=notice.interrupt_id):
            return await self._deliver(conn, notice)

    async def _deliver(self, conn: Connection, notice: Notice) -> bool:
        recorder = Recorder(f"deliver {notice.kind}", on=self._spans, attempt=notice.attempt)
        try:
            outlet = await self._outlets.of(conn, notice)
        except WorkspaceClosed as exc:
            # Of an alarm nobody else is told.
            level = logging.ERROR if notice.kind == "alarm" else logging.WARNING
            log.log(level, "thread %s: its %s cannot be posted: %s", notice.thread_id, notice.kind, exc)
            await notices.mark_failed(conn, notice, str(exc))
            return False
        except TokenUnreadable as exc:
            # Another process may have the key.
            log.error("thread %s: %s", notice.thread_id, exc)  # noqa: TRY400 (no bug of ours)
            await notices.mark_later(conn, notice, wait_s=_LONGEST_WAIT_S, error=str(exc), ambiguous=False)
            return False
        with concerning(workspace=outlet.workspace):
            return await self._deliver_to(outlet, conn, notice, recorder)

    async def _deliver_to(self, outlet: Outlet, conn: Connection, notice: Notice, recorder: Recorder) -> bool:
        try:
            with recorded_by(recorder):
                told = await outlet.tell(conn, notice)
            if not told:
                # Nobody was asked anything: there is nothing to trace.
                await notices.mark_later(conn, notice, wait_s=1, error="its card is not posted yet", ambiguous=False)
                return False
        except LeaseLost:
            # It is another's by now, and so is what becomes of it; but for what we have written at some copies already.
            log.warning("thread %s: its %s was left to another deliverer", notice.thread_id, notice.kind)
            await notices.show_once_more(conn, notice)
            return True
        except WorkspaceClosed as exc:
            log.error("thread %s: its %s cannot be posted: %s", notice.thread_id, notice.kind, exc)  # noqa: TRY400 (no bug of ours)
            await notices.mark_failed(conn, notice, str(exc), spans=recorder.rows(error=exc))
        except SlackApiError as exc:
            await self._refused(outlet, conn, notice, recorder, exc)
        except PlaceRefused as exc:
            await self._refused(outlet, conn, notice, recorder, exc.cause, place=exc.place)
        except (ArithmeticError, AttributeError, KeyError, TypeError, ValueError) as exc:
            # A request that we cannot show, or an answer that we cannot read, must not keep the others waiting.
            log.exception("thread %s: its %s cannot be shown", notice.thread_id, notice.kind)
            why = f"it cannot be shown: {type(exc).__name__}: {exc}"
            await notices.mark_failed(conn, notice, why, spans=recorder.rows(error=exc))
        except (aiohttp.ClientError, TimeoutError, OSError) as exc:
            unsent = isinstance(exc, aiohttp.ClientConnectorError)
            error = f"no answer from Slack ({type(exc).__name__}: {exc})"
            log.warning("thread %s: %s", notice.thread_id, error)
            spans = recorder.rows(error=exc)
            await notices.mark_later(
                conn, notice, wait_s=_wait_s(notice), error=error, ambiguous=not unsent, spans=spans
            )
        else:
            await notices.mark_sent(conn, notice, spans=recorder.rows())
            return True
        finally:
            if outlet.workspace is not None:
                self._rests_until[outlet.workspace] = outlet.rests_until
        return False

    async def _refused(
        self,
        outlet: Outlet,
        conn: Connection,
        notice: Notice,
        recorder: Recorder,
        exc: SlackApiError,
        *,
        place: str | None = None,
    ) -> None:
        status, error, retry_after_s = read_error(exc)
        spans = recorder.rows(error=exc)
        if status == 429 or error in RATE_LIMITS:
            wait_s = retry_after_s or _wait_s(notice)
            self._quiet_until[outlet.workspace] = asyncio.get_running_loop().time() + wait_s
            await notices.mark_later(conn, notice, wait_s=wait_s, error="rate limited", ambiguous=False, spans=spans)
        elif not is_refusal(exc):
            log.warning("thread %s: Slack failed (%s %s)", notice.thread_id, status, error)
            await notices.mark_later(
                conn,
                notice,
                wait_s=_wait_s(notice),
                error=f"Slack failed ({status} {error})",
                ambiguous=True,
                spans=spans,
            )
        else:
            fix = fix_of(error, outlet.workspace)
            if place not in (None, outlet.channel):
                fix = f"{fix_of(error, outlet.workspace, channel='the channel')} ({place})"
            log.error("thread %s: Slack refused its %s (%s): %s", notice.thread_id, notice.kind, error, fix)
            if outlet.row is not None and error in ENDED and await uninstalled(conn, outlet.row, by="slack"):
                # That it was uninstalled was never heard.
                log.warning("workspace %s has uninstalled the app: its token is deleted", outlet.workspace)
            await notices.mark_failed(conn, notice, f"{error}: {fix}", spans=spans)


def _wait_s(notice: Notice) -> float:
    return min(_LONGEST_WAIT_S, float(2 ** min(notice.attempt, 5)))


def _still(until: Mapping[K, float]) -> set[K]:
    """Those whose time is not over."""
    now = asyncio.get_running_loop().time()
    return {key for key, at in until.items() if at > now}
