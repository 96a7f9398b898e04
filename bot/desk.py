"""What a person in Slack is shown of their requests, and what is done for them beyond deciding: App Home, the lists of
`/claims`, who decides for whom, and filing.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any, TypeVar
from weakref import WeakValueDictionary
from zoneinfo import ZoneInfo

from slack_bolt.context.respond.async_respond import AsyncRespond
from slack_sdk.errors import SlackApiError

from bot.answers import sentence
from bot.away import USAGE, away_note, back_note, parse_away, tell_delegate, who_of
from bot.door import IN_TIME_S, SLACK_AWAY, Door, answered
from bot.filers import Filers
from bot.filing import new_claim_view
from bot.heard import Origin, Visitor, origin_in, visitor_of, with_origin
from bot.home import Chosen, Contents, Ways, bulk_view, home_view, home_without_lists, outcome_line, parse_ways
from bot.kit import Block, as_dict, as_text, date, escape
from bot.lists import (
    HELP,
    PAGE,
    ListName,
    Page,
    Turn,
    approvals_list,
    page_of,
    parse_turn,
    place_of_approval,
    place_of_story,
    stories_list,
)
from bot.people import MembershipUnknown, as_named_here, for_lists, slack_person
from bot.pool import on_pool
from bot.slack_api import RATE_LIMITS, read_error
from bot.views import skeleton
from flow import delegations, threads
from flow.approvals import approval_for
from flow.database import AWAY, Connection
from flow.errors import BadInput, FlowError, ThreadExists, UnknownApproval
from flow.inbox import Search, View, count_mine, find, find_threads, lists_groups, waits_for
from flow.model import Approval, Person
from flow.show import Story, stories_of
from flow.starting import New

T = TypeVar("T")

log = logging.getLogger(__name__)

# A time zone is worth no more of the seconds that Slack waits.
_ZONE_TIMEOUT_S = 1.0
# A Home that Slack is too busy for is shown when it has said that it will, and given up after so many times.
_MOST_TRIES = 5
_LONGEST_WAIT_S = 60.0

_VIEWS: dict[ListName, View] = {"waits": "mine", "all": "all", "decided": "history"}
_LISTS: dict[str, ListName] = {"": "waits", "mine": "asked", "all": "all"}
_RECORDED = "✅ Your vote counts. What became of it cannot be shown now."
_NOT_IN_TIME = "This could not be confirmed in time. Please send it again in a moment: twice is once."


@dataclass(frozen=True, kw_only=True)
class Audience:
    """Who sees and does what beyond deciding, by the settings: `viewers` see everything, `filers` file claims (empty:
    every full member). `names_groups`: the policy names user groups, so who is in which matters."""

    viewers: frozenset[str] = frozenset()
    filers: frozenset[str] = frozenset()
    names_groups: bool = False
    # Why nothing is filed at all, if it is not.
    closed: str = ""


class Desk:
    """What the listeners of `bot.slack_home` do."""

    def __init__(self, door: Door, audience: Audience) -> None:
        self._door, self._audience = door, audience
        self._client, self._pool, self._own_team, self._spawn = door.client, door.pool, door.own_team, door.spawn
        self._filers = Filers(own_team=door.own_team, names=audience.filers, closed=audience.closed)
        # Whoever holds a person's lock shows their Home: what is shown last is what was looked up last.
        self._homes: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    async def _person(self, visitor: Visitor) -> Person:
        """Who it is to the policy. Raises MembershipUnknown."""
        return await self._own_team.placed(await self._came(visitor))

    async def _came(self, visitor: Visitor) -> Person:
        """As the payload has them."""
        return slack_person(
            user_id=visitor.user_id,
            name=visitor.name,
            team_id=visitor.team_id,
            enterprise_id=visitor.enterprise_id,
            own_team=await self._own_team.keys(),
            workspace=self._own_team.workspace,
        )

    async def _reader(self, visitor: Visitor) -> Person:
        """The same as lists take them: with their user groups, if any matter, and with those whom they decide for."""
        person = await self._person(visitor)

        async def look(conn: Connection) -> tuple[Person, bool]:
            groups = self._audience.names_groups or await lists_groups(conn)
            return await delegations.with_absent(conn, person), groups

        acting, groups = await on_pool(self._pool, look)
        return await for_lists(self._own_team, acting, groups=groups)

    # App Home

    async def open_bulk(self, body: dict[str, Any], chosen: Sequence[Chosen]) -> None:
        """Ask whether these are to be approved. Raises NotRecorded if Slack does not open it."""
        await self._door.open(body, bulk_view(chosen))

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
        """Whoever has done something in a modal is shown anew what they opened it from, unless that was a card."""
        visitor, origin = visitor_of(body), origin_in(as_text(as_dict(body.get("view")).get("private_metadata")))
        if visitor is None:
            return
        if origin.ways is not None:
            self.publish_later(visitor, parse_ways(origin.ways))
        elif origin.response_url:
            turn = parse_turn(origin.turn) or Turn(name="waits", way=())
            self.replace_later(AsyncRespond(response_url=origin.response_url), visitor, turn)

    async def _publish(
        self, visitor: Visitor, ways: Ways, results: Sequence[tuple[str, str | None]], said: Sequence[str]
    ) -> None:
        async with self._homes.setdefault(visitor.user_id, asyncio.Lock()):
            for _ in range(_MOST_TRIES):
                view = await self._home(visitor, ways, results, said)
                try:
                    await self._client.views_publish(user_id=visitor.user_id, view=view)
                except SlackApiError as exc:
                    status, error, wait_s = read_error(exc)
                    if status != 429 and error not in RATE_LIMITS:
                        raise
                    # Looked up anew then: it may be another one.
                    await asyncio.sleep(min(wait_s or 1.0, _LONGEST_WAIT_S))
                else:
                    return
            log.warning("the Home of %s is not shown as it is now: Slack is too busy", visitor.user_id)

    async def _home(
        self, visitor: Visitor, ways: Ways, results: Sequence[tuple[str, str | None]], said: Sequence[str]
    ) -> dict[str, Any]:
        try:
            acting = await self._reader(visitor)
        except MembershipUnknown as exc:
            came = await self._came(visitor)
            lines = await on_pool(self._pool, lambda conn: _outcomes(conn, came, results))
            return home_without_lists([*said, *lines, f"⚠️ {escape(sentence(exc))}"], ways)

        async def look(conn: Connection) -> tuple[Contents, list[str]]:
            return await self._contents(conn, acting, ways), await _outcomes(conn, acting, results)

        contents, lines = await on_pool(self._pool, look)
        return home_view(contents, public_url=self._door.public_url, said=[*said, *lines])

    async def _contents(self, conn: Connection, acting: Person, ways: Ways) -> Contents:
        return Contents(
            waiting=await count_mine(conn, acting),
            waits=await self._approvals(conn, acting, Turn(name="waits", way=ways.get("waits", ()))),
            asked=await _asked(conn, acting, Turn(name="asked", way=ways.get("asked", ()))),
            decided=await self._approvals(conn, acting, Turn(name="decided", way=ways.get("decided", ()))),
        )

    async def _approvals(self, conn: Connection, acting: Person, turn: Turn) -> Page[Approval]:
        search = Search(view=_VIEWS[turn.name])
        keys = await self._own_team.keys()

        async def look(turn: Turn) -> list[Approval]:
            viewers = self._audience.viewers
            found = await find(conn, acting, search, viewers=viewers, limit=PAGE + 1, before=turn.before)
            return [as_named_here(each, keys) for each in found]

        return await _last_with_rows(look, turn, place_of_approval)

    # The command and its lists

    async def answer(self, visitor: Visitor, word: str, rest: str) -> tuple[str, list[Block] | None]:
        """What is answered to `/claims word rest`."""
        try:
            async with asyncio.timeout(IN_TIME_S):
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
        acting = await self._reader(visitor)

        async def look(conn: Connection) -> tuple[str, list[Block]]:
            said = await _outcomes(conn, acting, results)
            if turn.name == "asked":
                return stories_list(await _asked(conn, acting, turn), said=said)
            page = await self._approvals(conn, acting, turn)
            now = datetime.now(UTC)
            open_ids = frozenset(each.interrupt_id for each in page.rows if waits_for(each, acting, now))
            return approvals_list(page, turn.name, open_ids=open_ids, public_url=self._door.public_url, said=said)

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
            # What a press did is told, whether or not the list can be looked up, or replaced.
            try:
                text, blocks = await self._list(visitor, turn, results)
            except (FlowError, *AWAY, *SLACK_AWAY) as exc:
                log.warning("a list was not shown anew: %s: %s", type(exc).__name__, str(exc).strip())
                await self._tell(respond, visitor, results)
                return
            if not await answered(respond, text=text, blocks=blocks, replace_original=True):
                await self._tell(None, visitor, results)

        self._spawn(replace())

    async def _tell(
        self, respond: AsyncRespond | None, visitor: Visitor, results: Sequence[tuple[str, str | None]]
    ) -> None:
        """Say what their presses have done, without the list that they pressed in."""
        if not results:
            return
        came = await self._came(visitor)
        try:
            said = await on_pool(self._pool, lambda conn: _outcomes(conn, came, results))
        except AWAY as exc:
            log.warning("what a press did is told without its request: %s", str(exc).strip())
            said = [f"⚠️ {escape(note)}" if note else _RECORDED for _, note in results]
        await self._door.note(respond, visitor.user_id, "\n".join(said))

    # Who decides for whom

    async def _away(self, visitor: Visitor, rest: str) -> str:
        person = await self._person(visitor)
        if not rest.strip():
            return await on_pool(self._pool, lambda conn: _delegates(conn, person))
        asked = parse_away(rest)
        await self._own_team.check_delegate(asked.to)
        zone = await self._zone(visitor)
        until = delegations.parse_until(asked.until, now=datetime.now(UTC), zone=zone or UTC)

        async def write(conn: Connection) -> delegations.Delegation:
            async with conn.transaction():
                return await delegations.away(conn, person, to=asked.to, until=until, made_by=person.key)

        made = await on_pool(self._pool, write)
        self._spawn(self._tell_delegate(made))
        return away_note(made, str(zone) if zone else None)

    async def _tell_delegate(self, made: delegations.Delegation) -> None:
        if why_not := await tell_delegate(self._client, made):
            log.warning("%s was not told whom they decide for: %s", made.delegate, why_not)

    async def _back(self, visitor: Visitor) -> str:
        person = await self._person(visitor)

        async def write(conn: Connection) -> bool:
            async with conn.transaction():
                return await delegations.end(conn, person, by=person.key)

        return back_note(held=await on_pool(self._pool, write))

    async def _zone(self, visitor: Visitor) -> ZoneInfo | None:
        """Where their days end; None if Slack does not know it. Raises FlowError if it does not say in time."""
        try:
            async with asyncio.timeout(_ZONE_TIMEOUT_S):
                answer = await self._client.users_info(user=visitor.user_id)
        except SLACK_AWAY as exc:
            log.warning("Slack does not say in which time zone somebody is: %s: %s", type(exc).__name__, exc)
            raise FlowError("Slack did not say in which time zone you are: try again in a moment") from exc
        name = as_text(as_dict(answer.get("user")).get("tz"))
        try:
            return ZoneInfo(name) if name else None
        except (KeyError, ValueError, OSError):
            return None

    # Filing

    async def open_form(self, body: dict[str, Any], origin: Origin) -> None:
        """Open the form for a claim: empty at once, and filled when it is known that this person may file one.

        Raises NotRecorded if Slack does not open it.
        """
        view = await self._door.open(body, skeleton("New claim"))
        if visitor := visitor_of(body):
            self._spawn(self._door.fill(view, "New claim", self._form_for(visitor, origin)))

    async def _form_for(self, visitor: Visitor, origin: Origin) -> dict[str, Any]:
        await self._filers.check(await self._person(visitor))
        return new_claim_view(with_origin("", origin))

    async def file(self, visitor: Visitor, thread_id: str, new: New) -> str | None:
        """Have it committed; why it is not, in words, or None."""
        task = self._spawn(self._file(visitor, thread_id, new))
        done, _ = await asyncio.wait({task}, timeout=IN_TIME_S)
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
        await self._filers.check(person)
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
                workspace=person.workspace,
            ),
        )

    def tell_later(self, visitor: Visitor, origin: Origin, text: str) -> None:
        """Tell whoever filed: in their Home, or where they typed the command, else in a direct message."""
        if origin.ways is not None:
            self.publish_later(visitor, parse_ways(origin.ways), said=[text])
        else:
            respond = AsyncRespond(response_url=origin.response_url) if origin.response_url else None
            self._spawn(self._door.note(respond, visitor.user_id, text))


async def _asked(conn: Connection, person: Person, turn: Turn) -> Page[Story]:
    async def look(turn: Turn) -> list[Story]:
        return await stories_of(conn, await find_threads(conn, person, limit=PAGE + 1, before=turn.before))

    return await _last_with_rows(look, turn, place_of_story)


async def _last_with_rows(
    look: Callable[[Turn], Awaitable[Sequence[T]]], turn: Turn, place: Callable[[T], str]
) -> Page[T]:
    """This page of a list, or the last before it that is not empty by now."""
    while not (found := await look(turn)) and turn.way:
        turn = replace(turn, way=turn.way[:-1])
    return page_of(found, turn.way, place)


async def _outcomes(conn: Connection, person: Person, results: Sequence[tuple[str, str | None]]) -> list[str]:
    """A line for each press of theirs."""
    lines = []
    for interrupt_id, note in results:
        try:
            lines.append(outcome_line(await approval_for(conn, person, interrupt_id), note))
        except UnknownApproval as exc:
            lines.append(f"⚠️ {escape(sentence(exc))}")
    return lines


async def _delegates(conn: Connection, person: Person) -> str:
    """Who decides for this person now, and how to say so."""
    held = await delegations.standing_in(conn, person.names, workspace=person.workspace)
    said = [f"{who_of(each.delegate)} decides for you until {date(each.until)}." for each in held]
    return " ".join([*said, USAGE])
