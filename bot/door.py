"""What every listener of Slack's door does: act as whoever pressed, in Slack's time, and answer in private.

The order is the promise: a press that was answered is committed.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass
from typing import Any, TypeVar

import aiohttp
from slack_bolt.context.respond.async_respond import AsyncRespond
from slack_sdk.errors import SlackApiError
from slack_sdk.web.async_client import AsyncWebClient

from bot.blocks import Press
from bot.groups import OwnTeam
from bot.kit import as_dict, as_id, as_text, escape
from bot.outcomes import refusal
from bot.people import slack_person, unknown_kept, with_groups
from bot.pool import Pool, on_pool
from bot.views import View, in_words
from flow import notices
from flow.approvals import approval_for
from flow.database import AWAY, OUTSIDE_AFTER_S, Connection
from flow.errors import FlowError, UnknownApproval
from flow.log import also_concerning
from flow.model import Person

log = logging.getLogger(__name__)

# Slack waits three seconds; the rest is for the way and the note.
IN_TIME_S = 2.4
# Nobody looks at an empty modal for longer.
_FILL_TIMEOUT_S = 10.0

SLACK_AWAY = (SlackApiError, aiohttp.ClientError, TimeoutError, OSError)

NO_BUTTON = "This button is not one of ours any more: look at the newest message."

T = TypeVar("T")
Work = Callable[[Connection, Person], Awaitable[T]]


class NotRecorded(Exception):
    """The press could not be committed in time. It may still be; pressing again is safe."""


@dataclass(frozen=True, kw_only=True)
class Door:
    """Where presses come in. `own_team` knows who is of the bot's team; `public_url` is where the pages are."""

    client: AsyncWebClient
    pool: Pool
    own_team: OwnTeam
    spawn: Callable[[Coroutine[Any, Any, Any]], asyncio.Task[Any]]
    public_url: str | None = None

    async def act(self, press: Press, work: Work[T]) -> T:
        """The work, on a connection, as whoever pressed: the one place that says who they are."""
        person = await self.own_team.placed(await self._came(press))
        return await with_groups(
            self.own_team, person, lambda known: on_pool(self.pool, lambda conn: work(conn, known))
        )

    async def _came(self, press: Press) -> Person:
        """As the payload has them: of this door's workspace, whatever it says of their team."""
        return person_of(press, await self.own_team.keys(), self.own_team.workspace)

    async def _act_kept(self, press: Press, work: Work[T]) -> T:
        person = await self._came(press)
        async with unknown_kept(self.pool, person, press.interrupt_id, door="slack", shown=press.request_hash):
            return await self.act(press, work)

    async def act_in_time(self, press: Press, work: Work[T]) -> T:
        """The same, committed before Slack gives up. It is not cut off by that: it may still be done.

        Raises NotRecorded if it could not be committed in time, and whatever FlowError the work raises.
        """
        also_concerning(interrupt=press.interrupt_id, approver=press.user_id)
        task: asyncio.Task[T] = self.spawn(self._act_kept(press, work))
        done, _ = await asyncio.wait({task}, timeout=IN_TIME_S)
        if not done:
            raise NotRecorded("Your click could not be confirmed in time. If the buttons stay, please click again.")
        try:
            return task.result()
        except AWAY as exc:
            log.warning("a click was not recorded: %s", str(exc).strip())
            raise NotRecorded(
                "Your click was not recorded: the database is away. Please click again in a moment."
            ) from exc
        except SLACK_AWAY as exc:
            log.warning("a click was not recorded, as Slack does not say which team is ours: %s", exc)
            raise NotRecorded(
                "Your click was not recorded: Slack did not answer. Please click again in a moment."
            ) from exc

    async def open(self, body: dict[str, Any], view: View) -> View:
        """The modal as Slack opened it. Raises NotRecorded if it did not: the person is told to try again."""
        try:
            async with asyncio.timeout(IN_TIME_S):
                opened = await self.client.views_open(trigger_id=as_text(body.get("trigger_id")), view=view)
        except SLACK_AWAY as exc:
            log.warning("a form was not opened: %s: %s", type(exc).__name__, str(exc).strip())
            raise NotRecorded("The form could not be opened. Please try again in a moment.") from exc
        return as_dict(opened.get("view"))

    async def fill(self, view: View, title: str, content: Awaitable[View]) -> None:
        """Show in an opened modal what there is to see, or why there is nothing."""
        try:
            async with asyncio.timeout(_FILL_TIMEOUT_S):
                filled = await content
        except FlowError as exc:
            filled = in_words(title, refusal(exc))
        except (*AWAY, *SLACK_AWAY) as exc:
            log.warning("a form was not filled: %s: %s", type(exc).__name__, str(exc).strip())
            filled = in_words(title, "⚠️ This could not be looked up. Close it, and click again in a moment.")
        await self.show(view, filled)

    async def show(self, view: View, content: View) -> None:
        """Put this in the place of what a modal shows."""
        try:
            await self.client.views_update(view_id=view.get("id"), hash=view.get("hash"), view=content)
        except SLACK_AWAY as exc:
            # It was closed meanwhile; or else it still says what to do.
            log.warning("a form was not filled: %s: %s", type(exc).__name__, str(exc).strip())

    def tell(self, body: dict[str, Any], respond: AsyncRespond, text: str) -> None:
        """A note that only the person who pressed sees; member ids in it are shown as names."""
        shown = re.sub(r"\b[UW](?=[A-Z]*\d)[A-Z0-9]{4,}\b", r"<@\g<0>>", escape(text))
        self.spawn(self._tell(body, respond, shown))

    async def _tell(self, body: dict[str, Any], respond: AsyncRespond, text: str) -> None:
        member = as_id(as_dict(body.get("user")).get("id"))
        await self.note(respond if body.get("response_url") else None, member, text)

    async def note(self, respond: AsyncRespond | None, member: str | None, text: str) -> None:
        """Say this to one person: where they pressed or typed, else in a direct message."""
        if respond is not None and await answered(respond, text=text, replace_original=False):
            return
        if member:
            # What stands in a modal, or in the App Home, is in no channel that a note could appear in.
            await self.client.chat_postMessage(channel=member, text=text, unfurl_links=False, unfurl_media=False)

    async def remember_copy(self, press: Press) -> None:
        """A copy whose posting we never heard of becomes known, and is kept true like the others.

        Whatever became of the press: on a card of a settled request the buttons go away. What it has begun goes first.
        """
        if press.channel_id is None or press.message_ts is None:
            return
        await asyncio.sleep(OUTSIDE_AFTER_S)
        copy = (press.channel_id, press.message_ts)
        # Of an approval that is not there, or not for here, there is nothing to show, and the person was told so.
        with contextlib.suppress(UnknownApproval):
            async with self.pool.connection() as conn:
                if copy in await notices.messages_of(conn, press.interrupt_id):
                    return
                await approval_for(conn, await self._came(press), press.interrupt_id)
                async with conn.transaction():
                    await notices.remember_message(conn, press.interrupt_id, *copy)
                    await notices.show_card(conn, press.interrupt_id)


async def answered(respond: AsyncRespond, **message: Any) -> bool:
    """Send this through a `response_url`, which is good for half an hour and five times. Whether Slack took it."""
    try:
        answer = await respond(response_type="ephemeral", unfurl_links=False, unfurl_media=False, **message)
    except SLACK_AWAY as exc:
        log.warning("a note did not reach Slack: %s: %s", type(exc).__name__, str(exc).strip())
        return False
    return bool(answer.status_code == 200)


def person_of(press: Press, own_team: frozenset[str], workspace: str | None = None) -> Person:
    """Who pressed."""
    return slack_person(
        user_id=press.user_id,
        name=press.user_name,
        team_id=press.team_id,
        enterprise_id=press.enterprise_id,
        own_team=own_team,
        workspace=workspace,
    )
