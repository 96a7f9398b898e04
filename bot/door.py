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
from psycopg import errors
from slack_bolt.context.respond.async_respond import AsyncRespond
from slack_sdk.errors import SlackApiError
from slack_sdk.web.async_client import AsyncWebClient

from bot.blocks import Press
from bot.groups import OwnTeam
from bot.kit import as_dict, as_id, escape
from bot.people import slack_person, with_groups
from bot.pool import Pool, on_pool
from flow import notices
from flow.database import AWAY, Connection
from flow.log import also_concerning
from flow.model import Person

log = logging.getLogger(__name__)

# Slack waits three seconds; the rest is for the way and the note.
IN_TIME_S = 2.4

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
        person = person_of(press, await self.own_team.keys())
        return await with_groups(
            self.own_team, person, lambda known: on_pool(self.pool, lambda conn: work(conn, known))
        )

    async def act_in_time(self, press: Press, work: Work[T]) -> T:
        """The same, committed before Slack gives up. It is not cut off by that: it may still be done.

        Raises NotRecorded if it could not be committed in time, and whatever FlowError the work raises.
        """
        also_concerning(interrupt=press.interrupt_id, approver=press.user_id)
        task: asyncio.Task[T] = self.spawn(self.act(press, work))
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

    def tell(self, body: dict[str, Any], respond: AsyncRespond, text: str) -> None:
        """A note that only the person who pressed sees; member ids in it are shown as names."""
        shown = re.sub(r"\b[UW](?=[A-Z]*\d)[A-Z0-9]{4,}\b", r"<@\g<0>>", escape(text))
        self.spawn(self._tell(body, respond, shown))

    async def _tell(self, body: dict[str, Any], respond: AsyncRespond, text: str) -> None:
        member = as_id(as_dict(body.get("user")).get("id"))
        if body.get("response_url"):
            await respond(text=text, response_type="ephemeral", replace_original=False)
        elif member:
            # What stands in a modal, or in the App Home, is in no channel that a note could appear in.
            await self.client.chat_postMessage(channel=member, text=text, unfurl_links=False, unfurl_media=False)

    async def remember_copy(self, press: Press) -> None:
        """A copy whose posting we never heard of becomes known, and is kept true like the others.

        Whatever became of the press: on a card of a settled request the buttons go away.
        """
        if press.channel_id is None or press.message_ts is None:
            return
        copy = (press.channel_id, press.message_ts)
        # For an approval that does not exist there is nothing to show, and the person was told so.
        with contextlib.suppress(errors.ForeignKeyViolation):
            async with self.pool.connection() as conn:
                if copy in await notices.messages_of(conn, press.interrupt_id):
                    return
                async with conn.transaction():
                    await notices.remember_message(conn, press.interrupt_id, *copy)
                    await notices.change_card(conn, press.interrupt_id)


def person_of(press: Press, own_team: frozenset[str]) -> Person:
    """Who pressed."""
    return slack_person(
        user_id=press.user_id,
        name=press.user_name,
        team_id=press.team_id,
        enterprise_id=press.enterprise_id,
        own_team=own_team,
    )
