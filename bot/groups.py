"""The team that the bot belongs to: its ids, its user groups, and who is a full member of it.

What Slack has said is kept for a minute at most: whoever leaves a group decides nothing for it after that. What it has
not said is kept for no time.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Collection, Iterable
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar

import aiohttp
from slack_sdk.errors import SlackApiError
from slack_sdk.web.async_client import AsyncWebClient

from bot.kit import as_dict, as_text
from bot.people import MembershipUnknown, member_of, slack_person
from bot.slack_api import FIXES, SEE_ERROR, read_error
from flow.delegations import Delegation
from flow.errors import BadInput, FlowError
from flow.model import Person
from flow.policy import Tier, is_group, is_member

log = logging.getLogger(__name__)

T = TypeVar("T")

_KEPT_S = 60.0
# Of the time that Slack gives a click: see bot.slack. The rest is for the database, before and after.
_ASK_TIMEOUT_S = 1.5

_NO_ANSWER = (SlackApiError, aiohttp.ClientError, OSError, KeyError, AttributeError, TypeError, ValueError)
# Slack's word that there is nobody by this id whom the bot could see.
_NOBODY = {"user_not_found", "user_not_visible"}


def groups_in(tiers: Iterable[Tier]) -> tuple[str, ...]:
    """The user groups that a policy's tiers name, as they are written there."""
    named = (name for tier in tiers for name in (*tier.approvers, *tier.escalate_to))
    return tuple(dict.fromkeys(filter(is_group, named)))


@dataclass(frozen=True, kw_only=True)
class _Group:
    id: str
    members: frozenset[str]


@dataclass(frozen=True, kw_only=True)
class _Member:
    """Somebody as Slack's directory has them: `teams` are the ids of their teams and their grid."""

    team_id: str
    # Empty outside of an Enterprise Grid.
    grid_id: str
    teams: frozenset[str]
    is_full: bool
    # In small letters; empty where the app may not know it.
    address: str


class OwnTeam:
    """The team that the bot token belongs to: a bare member id in a list means a member of it. `workspace` is the one,
    of several, that has this token."""

    def __init__(self, client: AsyncWebClient, *, workspace: str | None = None) -> None:
        self._client, self.workspace = client, workspace
        self._keys: frozenset[str] | None = None
        self._groups = _Kept(self._ask_groups)
        self._members: dict[str, _Kept[_Member | None]] = {}

    async def keys(self) -> frozenset[str]:
        """The ids that stand for it, asked for once: the team's, and the grid's if the app is installed there as a
        whole."""
        if self._keys is None:
            answer = await self._client.auth_test()
            ids = (answer.get("team_id"), answer.get("enterprise_id") if answer.get("is_enterprise_install") else None)
            self._keys = frozenset(str(key) for key in ids if key)
        return self._keys

    async def groups(self) -> frozenset[str]:
        """All user groups that somebody can be in, each by its id and as `@handle`. Raises what the client raises."""
        return frozenset(await self._groups.get())

    async def group_ids(self, names: Collection[str]) -> dict[str, str]:
        """The ids of those of these groups that are named by a handle, as far as Slack says so."""
        handles = {name for name in names if name.startswith("@")}
        if not handles:
            return {}
        try:
            known = await self._groups.get()
        except _NO_ANSWER as exc:
            _say(exc)
            return {}
        return {name: known[name].id for name in handles if name in known}

    async def groups_of(self, person: Person, names: Collection[str] | None = None) -> frozenset[str]:
        """Those of the groups with these names (None: of all) that the person is in, if they are a full member of ours.

        Guests, bots, people of other teams and whoever has left are in none. Raises MembershipUnknown.
        """
        member = member_of(person)
        if member is None:
            return frozenset()
        team, user_id = member
        try:
            async with asyncio.timeout(_ASK_TIMEOUT_S):
                users = await self._groups.get()
                found = frozenset(
                    name
                    for name, group in users.items()
                    if user_id in group.members and (names is None or name in names)
                )
                return found if found and await self._is_full(user_id, team) else frozenset()
        except _NO_ANSWER as exc:
            _say(exc)
            raise MembershipUnknown(sorted(names or ())) from exc

    async def has(self, person: Person) -> bool:
        """Whether the person is a full member of ours. Raises MembershipUnknown."""
        member = member_of(person)
        if member is None:
            return False
        team, user_id = member
        try:
            async with asyncio.timeout(_ASK_TIMEOUT_S):
                return await self._is_full(user_id, team)
        except _NO_ANSWER as exc:
            _say(exc)
            raise MembershipUnknown from exc

    async def address_of(self, person: Person) -> str:
        """The mail address of a full member of ours, as far as the app may know it. Raises MembershipUnknown."""
        if not await self.has(person):
            return ""
        member = member_of(person)
        assert member is not None
        try:
            async with asyncio.timeout(_ASK_TIMEOUT_S):
                known = await self._member(member[1])
        except _NO_ANSWER as exc:
            _say(exc)
            raise MembershipUnknown from exc
        return known.address if known else ""

    async def check_delegate(self, name: str) -> None:
        """Refuse whoever would not be let decide for somebody else, before anybody relies on them.

        Raises BadInput, or FlowError if Slack does not say.
        """
        try:
            may = await self.may_stand_in(name)
        except _NO_ANSWER as exc:
            _say(exc)
            raise FlowError(f"Slack did not say who {name} is: try again in a moment") from exc
        if not may:
            raise BadInput("the delegate", name, "only a full member of this workspace can decide for somebody else")

    async def standing_in(self, stood_in: Collection[Delegation]) -> list[Delegation]:
        """Those of them whose delegate would be let decide now, as far as Slack says so: for what names people, and can
        do without a name."""
        found = []
        for each in stood_in:
            try:
                if await self.may_stand_in(each.delegate):
                    found.append(each)
            except _NO_ANSWER as exc:
                _say(exc)
        return found

    async def may_stand_in(self, name: str) -> bool:
        """Whether a person of this name is let decide for another. Raises what the client raises."""
        team, _, user_id = name.removeprefix("slack:").rpartition("/")
        if not is_member(user_id):
            # Somebody outside of Slack, who is no guest of ours.
            return True
        async with asyncio.timeout(_ASK_TIMEOUT_S):
            return await self._is_full(user_id, team or None)

    async def _is_full(self, user_id: str, team: str | None) -> bool:
        """Whether the member of this team (None: of ours) is a full one of ours. Raises what the client raises."""
        known, keys = await self._member(user_id), await self.keys()
        if known is None or not known.is_full or known.teams.isdisjoint(keys):
            return False
        # The same id in another team is somebody else, whatever our directory says of the one whom we know.
        return team is None or team in known.teams

    async def placed(self, person: Person) -> Person:
        """Somebody whose team the payload did not name, or who is of another one while the app is installed in a whole
        grid, as the member of ours whom Slack has by this id; else as they came. Raises MembershipUnknown."""
        member = member_of(person)
        assert member is not None
        team, user_id = member
        try:
            async with asyncio.timeout(_ASK_TIMEOUT_S):
                keys = await self.keys()
                if team and not any(key.startswith("E") for key in keys):
                    return person
                known = await self._member(user_id)
        except _NO_ANSWER as exc:
            _say(exc)
            raise MembershipUnknown from exc
        if known is None or keys.isdisjoint({known.team_id, known.grid_id}):
            return person
        if team and team not in known.teams:
            # The same id in another grid.
            return person
        own = team or known.team_id
        ours = slack_person(
            user_id=user_id, name=person.name, team_id=own, enterprise_id=known.grid_id or None, own_team={own}
        )
        # One person, whichever team of the grid they come from.
        everywhere = {f"slack:{each}/{user_id}" for each in known.teams}
        return replace(person, key=ours.key, names=person.names | ours.names | everywhere)

    async def _member(self, user_id: str) -> _Member | None:
        self._members = {key: kept for key, kept in self._members.items() if kept.is_fresh}
        kept = self._members.setdefault(user_id, _Kept(lambda: self._ask_member(user_id)))
        return await kept.get()

    async def _ask_groups(self) -> dict[str, _Group]:
        """Each group that is not disabled. https://api.slack.com/methods/usergroups.list"""
        if self.workspace is not None and self.workspace.startswith("E"):
            # Of a whole grid Slack would not say it, and no list there names one: see `flow.workspaces.set_up`.
            return {}
        answer = await self._client.usergroups_list(include_users=True, include_disabled=True)
        found: dict[str, _Group] = {}
        for group in answer["usergroups"]:
            if not group.get("date_delete"):
                known = _Group(id=group["id"], members=frozenset(group.get("users") or ()))
                found[known.id] = found[f"@{group['handle']}"] = known
        return found

    async def _ask_member(self, user_id: str) -> _Member | None:
        """https://api.slack.com/methods/users.info"""
        try:
            user: dict[str, Any] = (await self._client.users_info(user=user_id))["user"]
        except SlackApiError as exc:
            if read_error(exc)[1] in _NOBODY:
                return None
            raise
        grid = as_dict(user.get("enterprise_user"))
        team_id, grid_id = as_text(user.get("team_id")), as_text(grid.get("enterprise_id"))
        # Whatever is not said is not so: a user without these words is one whom Slack does not know well.
        never = ("deleted", "is_bot", "is_restricted", "is_ultra_restricted")
        return _Member(
            team_id=team_id,
            grid_id=grid_id,
            teams=frozenset(filter(None, (team_id, grid_id, *grid.get("teams", ())))),
            is_full=all(user.get(word) is False for word in never) and not user.get("is_stranger"),
            address=as_text(as_dict(user.get("profile")).get("email")).lower(),
        )


async def check_groups(own_team: OwnTeam, named: Collection[str]) -> None:
    """Say which of these user groups Slack does not have. Such a one names nobody, which is no danger."""
    if not named:
        return
    try:
        missing = sorted(set(named) - await own_team.groups())
    except _NO_ANSWER as exc:
        _say(exc)
        return
    if missing:
        log.warning("Slack has no user group %s: it names nobody", ", ".join(missing))


def _say(exc: Exception) -> None:
    error = read_error(exc)[1] if isinstance(exc, SlackApiError) else ""
    fix = FIXES.get(error, SEE_ERROR) if error else str(exc)
    log.warning("Slack does not say who is in its user groups (%s): %s", error or type(exc).__name__, fix)


class _Kept(Generic[T]):
    """An answer of Slack's, kept for a minute from when it was asked for; whoever asks meanwhile gets the same one.

    A failure is told to those who wait for it, and not kept.
    """

    def __init__(self, ask: Callable[[], Awaitable[T]]) -> None:
        self._ask = ask
        self._asked: asyncio.Task[T] | None = None
        self._at = 0.0

    @property
    def is_fresh(self) -> bool:
        if self._asked is None or time.monotonic() - self._at >= _KEPT_S:
            return False
        return not self._asked.done() or not (self._asked.cancelled() or self._asked.exception())

    async def get(self) -> T:
        if not self.is_fresh or self._asked is None:
            self._at, self._asked = time.monotonic(), asyncio.create_task(self._bounded())
            # Those who waited may have given up by then, and asyncio would complain of a failure that nobody has seen.
            self._asked.add_done_callback(lambda asked: asked.cancelled() or asked.exception())
        # Whoever gives up leaves the others waiting.
        return await asyncio.shield(self._asked)

    async def _bounded(self) -> T:
        async with asyncio.timeout(_ASK_TIMEOUT_S):
            return await self._ask()
