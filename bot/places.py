"""Where the copies of a card go: a channel, direct messages to those who may decide, or both; and who they are."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Sequence

from slack_sdk.errors import SlackApiError
from slack_sdk.web.async_client import AsyncWebClient

from bot.groups import OwnTeam
from bot.people import Asked, as_named_here, asked_of, missing_of, own_member
from bot.slack_api import is_refusal, read_error
from flow.delegations import Delegation
from flow.model import Approval
from flow.notices import OWN_CHANNEL, Copy
from flow.policy import is_member


class Places:
    """The places of approvals: ids of channels, and of members, whose direct messages `opened` finds."""

    def __init__(self, client: AsyncWebClient, channel: str) -> None:
        self._client, self._channel = client, channel
        self._team = OwnTeam(client)
        self._opened: dict[str, str] = {}

    async def shown(self, approval: Approval) -> Approval:
        """The approval as messages to this team show it."""
        return as_named_here(approval, await self._team.keys())

    async def of(self, approval: Approval) -> list[str]:
        """Where its copies belong: the tier's channel, and each member of ours who is listed by their id; not those who
        may not decide it.

        User groups get none: their people change, and a message stays.
        """
        channel = approval.channel or OWN_CHANNEL
        if approval.post_to == "channel":
            return [channel]
        members = _members(asked_of(approval, [], await self._team.keys()))
        return members if approval.post_to == "direct" else [channel, *members]

    async def of_delegates(self, approval: Approval, stood_in: Collection[Delegation]) -> list[str]:
        """The same of each member of ours who decides for one of those while they are away. Raises what the client
        raises if Slack does not say whether they may: a copy that is left out would be missing for good."""
        may = [each for each in stood_in if await self._team.may_stand_in(each.delegate)]
        asked = asked_of(approval, may, await self._team.keys())
        return list(dict.fromkeys(each.stand_in for each in asked if each.stand_in and is_member(each.stand_in)))

    async def missing(self, approval: Approval, stood_in: Collection[Delegation]) -> tuple[list[Asked], dict[str, str]]:
        """Whose votes are missing, and the ids of user groups among them by their handles."""
        may = await self._team.standing_in(stood_in)
        missing = missing_of(approval, may, await self._team.keys())
        return missing, await self._team.group_ids([each.name for each in missing])

    async def requester_of(self, approval: Approval) -> str | None:
        """The member of ours who asks for it; None for anybody else."""
        return own_member(approval.requested_by, await self._team.keys())

    def is_open(self, place: str) -> bool:
        """Whether its channel is known without asking."""
        return not is_member(place) or place in self._opened

    async def opened(self, place: str) -> str:
        """The id of the channel: a message to a member can be found, and changed, by that of the conversation alone."""
        if not self.is_open(place):
            answer = await self._client.conversations_open(users=place)
            self._opened[place] = str(answer["channel"]["id"])
        return self._opened.get(place, place) or self._channel


def is_served(place: str, channel: str, copies: Sequence[Copy]) -> bool:
    """Whether a copy stands at the place, which is this channel by now.

    For the bot's own channel one in any is enough of those that nobody noted a place of: the setting may have changed.
    A channel that a tier names is that one, or had another id when the copy was posted for it.
    """
    return any(
        copy.channel == channel
        or (not is_direct(channel) and copy.place == place)
        or (place == OWN_CHANNEL and copy.place is None and not is_direct(copy.channel))
        for copy in copies
    )


def concerns(copy: Copy, missing: Collection[Asked]) -> bool:
    """Whether a copy stands where somebody whose vote is missing reads it."""
    return copy.place is None or not is_member(copy.place) or copy.place in _members(missing)


def is_direct(channel: str) -> bool:
    """Whether it is a conversation with one person."""
    return channel.startswith("D")


def _members(asked: Collection[Asked]) -> list[str]:
    """Those of them, and of whoever stands in for them, who are members of ours."""
    names = (name for each in asked for name in (each.name, each.stand_in) if name and is_member(name))
    return list(dict.fromkeys(names))


class PlaceRefused(Exception):
    """Slack refuses a message at this place."""

    def __init__(self, place: str, cause: SlackApiError) -> None:
        self.place, self.cause = place, cause
        super().__init__(f"{place}: {read_error(cause)[1]}")


class Refusals:
    """What Slack refuses at some of several places, so that the others are served first.

    Only what it refuses for good: where it may have acted, nothing may be forgotten, and the whole is tried again.
    """

    def __init__(self) -> None:
        self._found: list[PlaceRefused] = []

    @contextlib.contextmanager
    def of(self, place: str) -> Iterator[None]:
        try:
            yield
        except SlackApiError as exc:
            if not is_refusal(exc):
                raise
            self._found.append(PlaceRefused(place, exc))

    def raise_first(self) -> None:
        """Raise PlaceRefused if there was anything."""
        for refused in self._found:
            raise refused from refused.cause
