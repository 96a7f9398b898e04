"""Where the copies of a card go: a channel, direct messages to those who may decide, or both."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

from slack_sdk.errors import SlackApiError
from slack_sdk.web.async_client import AsyncWebClient

from bot.groups import OwnTeam
from bot.slack_api import is_refusal, read_error
from flow.model import Approval
from flow.policy import is_member


class Places:
    """The places of approvals: ids of channels, and of members, whose direct messages `opened` finds."""

    def __init__(self, client: AsyncWebClient, channel: str) -> None:
        self._client, self._channel = client, channel
        self._team = OwnTeam(client)
        self._opened: dict[str, str] = {}

    def channel_of(self, approval: Approval) -> str:
        """The channel that takes its cards, and those that nobody else can be reached with."""
        return approval.channel or self._channel

    async def of(self, approval: Approval) -> list[str]:
        """Where its copies belong: the channel, and each member of ours who is listed by their id and did not ask.

        User groups get none: their people change, and a message stays.
        """
        if approval.post_to == "channel":
            return [self.channel_of(approval)]
        keys = await self._team.keys()
        askers = {name.lower() for name in (approval.requested_by, *approval.raised_by)}
        members = [
            member
            for member in dict.fromkeys(filter(None, (_member(name, keys) for name in approval.approvers)))
            if askers.isdisjoint({member.lower(), *(f"slack:{key}/{member}".lower() for key in keys)})
        ]
        return members if approval.post_to == "direct" else [self.channel_of(approval), *members]

    def is_open(self, place: str) -> bool:
        """Whether its channel is known without asking."""
        return not is_member(place) or place in self._opened

    async def opened(self, place: str) -> str:
        """The id of the channel: a message to a member can be found, and changed, by that of the conversation alone."""
        if not self.is_open(place):
            answer = await self._client.conversations_open(users=place)
            self._opened[place] = str(answer["channel"]["id"])
        return self._opened.get(place, place)


def is_served(channel: str, copies: Sequence[tuple[str, str]]) -> bool:
    """Whether a copy stands there. For a channel, one in any: the setting, or its own id, may have changed since."""
    there = {place for place, _ in copies}
    return channel in there or (not _is_direct(channel) and not all(map(_is_direct, there)))


def _is_direct(channel: str) -> bool:
    return channel.startswith("D")


def _member(name: str, own_team: frozenset[str]) -> str | None:
    """The member of ours that a list names like this."""
    team, _, member = name.removeprefix("slack:").rpartition("/")
    return member if is_member(member) and (not team or team in own_team) else None


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
