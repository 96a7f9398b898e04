"""What a person in Slack is shown of their requests, and what is done for them beyond deciding: App Home, the lists of
`/claims`, who decides for whom, and filing.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any
from zoneinfo import ZoneInfo

from slack_bolt.context.respond.async_respond import AsyncRespond

from bot.answers import sentence
from bot.away import USAGE, away_note, back_note, delegate_note, parse_away, who_of
from bot.door import SLACK_AWAY, Door
from bot.heard import Visitor, visitor_of
from bot.home import Contents, Ways, home_view, outcome_line
from bot.kit import Block, as_dict, as_text, date, escape
from bot.lists import (
    HELP,
    PAGE,
    ListName,
    Page,
    Turn,
    approvals_list,
    page_of,
    place_of_approval,
    place_of_story,
    stories_list,
)
from bot.people import slack_person, with_all_groups
from bot.pool import on_pool
from flow import delegations, threads
from flow.approvals import approval_of
from flow.database import AWAY, Connection
from flow.errors import BadInput, FlowError, ThreadExists, UnknownApproval
from flow.inbox import Search, View, count_mine, find, find_threads, lists_groups, waits_for
from flow.model import Approval, Person
from flow.show import Story, stories_of
from flow.starting import New

log = logging.getLogger(__name__)

# Slack waits three seconds for an answer.
_TIMEOUT_S = 2.4
# A time zone is worth no more of them.
_ZONE_TIMEOUT_S = 1.0

_VIEWS: dict[ListName, View] = {"waits": "mine", "all": "all", "decided": "history"}
_LISTS: dict[str, ListName] = {"": "waits", "mine": "asked", "all": "all"}
_NOT_IN_TIME = "This could not be confirmed in time. Please send it again in a moment: twice is once."

# What a form carries that was opened in App Home; otherwise it is empty, or where its command can be answered.
FROM_HOME = "home"


class Desk:
    """What the listeners of `bot.slack_home` do."""

    def __init__(self, door: Door, *, viewers: frozenset[str]) -> None:
        self._client, self._pool, self._own_team, self._spawn = door.client, door.pool, door.own_team, door.spawn
        self._viewers, self._public_url = viewers, door.public_url

    async def open(self, body: dict[str, Any], view: dict[str, Any]) -> bool:
        """Open a form. False if Slack does not, or not in time."""
        try:
            async with asyncio.timeout(_TIMEOUT_S):
                await self._client.views_open(trigger_id=as_text(body.get("trigger_id")), view=view)
        except SLACK_AWAY as exc:
            log.warning("a form was not opened: %s: %s", type(exc).__name__, exc)
            return False
        return True

    async def _person(self, visitor: Visitor) -> Person:
        """Who it is to the policy, with their user groups if any are asked."""
        person = slack_person(
            user_id=visitor.user_id,
            name=visitor.name,
            team_id=visitor.team_id,
            enterprise_id=visitor.enterprise_id,
            own_team=await self._own_team.keys(),
        )
        if await on_pool(self._pool, lists_groups):
            person = await with_all_groups(self._own_team, person)
        return person

    # App Home

    def publish_later(
        self,
        visitor: Visitor,
        ways: Ways | None = None,
        results: Sequence[tuple[str, str | None]] = (),
        *,
        said: Sequence[str] = (),
    ) -> None:
        """Show this person's Home as it is now, with what their presses have done: interrupt ids and notes."""
        self._spawn(self._publish(visitor, ways or {}, results, said))

    def show_again(self, body: dict[str, Any]) -> None:
        """The same for whoever has sent a form."""
        if visitor := visitor_of(body):
            self.publish_later(visitor)

    async def _publish(
        self, visitor: Visitor, ways: Ways, results: Sequence[tuple[str, str | None]], said: Sequence[str]
    ) -> None:
        person = await self._person(visitor)

        async def look(conn: Connection) -> tuple[Contents, list[str]]:
            return await self._contents(conn, person, ways), await _outcomes(conn, results)

        contents, lines = await on_pool(self._pool, look)
        view = home_view(contents, public_url=self._public_url, said=[*said, *lines])
        await self._client.views_publish(user_id=visitor.user_id, view=view)

    async def _contents(self, conn: Connection, person: Person, ways: Ways) -> Contents:
        acting = await delegations.with_absent(conn, person)
        return Contents(
            waiting=await count_mine(conn, acting),
            waits=await self._approvals(conn, acting, Turn(name="waits", way=ways.get("waits", ()))),
            asked=await _asked(conn, acting, Turn(name="asked", way=ways.get("asked", ()))),
            decided=await self._approvals(conn, acting, Turn(name="decided", way=ways.get("decided", ()))),
        )

    async def _approvals(self, conn: Connection, acting: Person, turn: Turn) -> Page[Approval]:
        search = Search(view=_VIEWS[turn.name])
        found = await find(conn, acting, search, viewers=self._viewers, limit=PAGE + 1, before=turn.before)
        return page_of(found, turn.way, place_of_approval)

    # The command and its lists

    async def answer(self, visitor: Visitor, word: str, rest: str) -> tuple[str, list[Block] | None]:
        """What is answered to `/claims word rest`."""
        try:
            async with asyncio.timeout(_TIMEOUT_S):
                return await self._answer(visitor, word, rest)
        except BadInput as exc:
            return f"⚠️ {escape(f'{exc.name}: {exc.expected}')}", None
        except FlowError as exc:
            return f"⚠️ {escape(sentence(exc))}", None
        except (*AWAY, *SLACK_AWAY) as exc:
            log.warning("a command was not answered: %s: %s", type(exc).__name__, str(exc).strip())
            return "⚠️ This could not be done in time. Please try again in a moment: twice is once.", None

    async def _answer(self, visitor: Visitor, word: str, rest: str) -> tuple[str, list[Block] | None]:
        if word in _LISTS:
            return await self._list(visitor, Turn(name=_LISTS[word], way=()))
        if word == "away":
            return await self._away(visitor, rest), None
        if word == "back":
            return await self._back(visitor), None
        return (HELP if word == "help" else f"⚠️ I do not know that. {HELP}"), None

    async def _list(
        self, visitor: Visitor, turn: Turn, results: Sequence[tuple[str, str | None]] = ()
    ) -> tuple[str, list[Block]]:
        person = await self._person(visitor)

        async def look(conn: Connection) -> tuple[str, list[Block]]:
            acting = await delegations.with_absent(conn, person)
            said = "\n".join(await _outcomes(conn, results))
            if turn.name == "asked":
                return stories_list(await _asked(conn, acting, turn), said=said)
            page = await self._approvals(conn, acting, turn)
            now = datetime.now(UTC)
            open_ids = frozenset(each.interrupt_id for each in page.rows if waits_for(each, acting, now))
            return approvals_list(page, turn.name, open_ids=open_ids, public_url=self._public_url, said=said)

        return await on_pool(self._pool, look)

    def replace_later(
        self,
        respond: AsyncRespond,
        visitor: Visitor,
        turn: Turn,
        results: Sequence[tuple[str, str | None]] = (),
    ) -> None:
        """Put that page in the place of a list, with what a press has done."""

        async def replace() -> None:
            text, blocks = await self._list(visitor, turn, results)
            await respond(text=text, blocks=blocks, response_type="ephemeral", replace_original=True)

        self._spawn(replace())

    # Who decides for whom

    async def _away(self, visitor: Visitor, rest: str) -> str:
        person = await self._person(visitor)
        if not rest.strip():
            return await on_pool(self._pool, lambda conn: _delegates(conn, person))
        asked = parse_away(rest)
        await self._own_team.check_delegate(asked.to)
        zone = await self._zone(visitor)
        until = delegations.parse_until(asked.until, now=datetime.now(UTC), zone=zone)

        async def write(conn: Connection) -> delegations.Delegation:
            async with conn.transaction():
                return await delegations.away(conn, person, to=asked.to, until=until, made_by=person.key)

        made = await on_pool(self._pool, write)
        self._spawn(self._client.chat_postMessage(channel=asked.to, text=delegate_note(made)))
        return away_note(made, str(zone))

    async def _back(self, visitor: Visitor) -> str:
        person = await self._person(visitor)

        async def write(conn: Connection) -> bool:
            async with conn.transaction():
                return await delegations.end(conn, person, by=person.key)

        return back_note(held=await on_pool(self._pool, write))

    async def _zone(self, visitor: Visitor) -> ZoneInfo:
        """Where their days end, as far as Slack says so in time."""
        try:
            async with asyncio.timeout(_ZONE_TIMEOUT_S):
                answer = await self._client.users_info(user=visitor.user_id)
            return ZoneInfo(as_text(as_dict(answer.get("user")).get("tz")) or "UTC")
        except (*SLACK_AWAY, KeyError, ValueError):
            return ZoneInfo("UTC")

    # Filing

    async def file(self, visitor: Visitor, thread_id: str, new: New) -> str | None:
        """Have it committed; why it is not, in words, or None."""
        task = self._spawn(self._file(visitor, thread_id, new))
        done, _ = await asyncio.wait({task}, timeout=_TIMEOUT_S)
        if not done:
            return _NOT_IN_TIME
        try:
            task.result()
        except ThreadExists:
            return (
                f"This form was filed before, as {thread_id}, with something else in it: close it, and open a new one."
            )
        except FlowError as exc:
            return sentence(exc)
        except (*AWAY, *SLACK_AWAY) as exc:
            log.warning("a claim was not filed: %s: %s", type(exc).__name__, str(exc).strip())
            return _NOT_IN_TIME
        return None

    async def _file(self, visitor: Visitor, thread_id: str, new: New) -> None:
        person = await self._person(visitor)
        if visitor.user_id not in person.names:
            raise FlowError("only members of this workspace file claims here")
        await on_pool(
            self._pool,
            lambda conn: threads.insert_thread(
                conn,
                thread_id=thread_id,
                flow=new.flow,
                flow_version=new.flow_version,
                input=new.input,
                requested_by=person.key,
                filed_by=person.key,
            ),
        )

    def tell_later(self, visitor: Visitor, origin: str, text: str) -> None:
        """Tell whoever filed: where they typed the command, else in a direct message; and show it in their Home."""
        self._spawn(self._tell(visitor, origin, text))
        if origin == FROM_HOME:
            self.publish_later(visitor, said=[text])

    async def _tell(self, visitor: Visitor, origin: str, text: str) -> None:
        if origin not in ("", FROM_HOME):
            answer = await AsyncRespond(response_url=origin)(
                text=text, response_type="ephemeral", replace_original=False
            )
            if answer.status_code == 200:
                return
        if origin != FROM_HOME:
            await self._client.chat_postMessage(channel=visitor.user_id, text=text)


async def _asked(conn: Connection, person: Person, turn: Turn) -> Page[Story]:
    found = await find_threads(conn, person, limit=PAGE + 1, before=turn.before)
    return page_of(await stories_of(conn, found), turn.way, place_of_story)


async def _outcomes(conn: Connection, results: Sequence[tuple[str, str | None]]) -> list[str]:
    """A line for each press."""
    lines = []
    for interrupt_id, note in results:
        try:
            lines.append(outcome_line(await approval_of(conn, interrupt_id), note))
        except UnknownApproval as exc:
            lines.append(f"⚠️ {escape(sentence(exc))}")
    return lines


async def _delegates(conn: Connection, person: Person) -> str:
    """Who decides for this person now, and how to say so."""
    held = [each for each in await delegations.current(conn, limit=1000) if each.person in person.names]
    said = [f"{who_of(each.delegate)} decides for you until {date(each.until)}." for each in held]
    return " ".join([*said, USAGE])
