"""Who may file a claim in Slack. A small one is paid unasked, so it is not for everybody who can type there."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from bot.groups import OwnTeam
from flow.errors import FlowError
from flow.model import Person
from flow.policy import is_group, names_person


class MayNotFile(FlowError):
    """Somebody in Slack who files no claims."""


def is_address(name: str) -> bool:
    """Whether it is a mail address, which takes a scope of its own to compare."""
    return "@" in name and not is_group(name)


@dataclass(frozen=True, kw_only=True)
class Filers:
    """The full members of the team: all of them, or those whom `names` has, if that is not empty."""

    own_team: OwnTeam
    names: Collection[str] = ()
    # Why nobody may, if nobody may.
    closed: str = ""

    async def check(self, person: Person) -> None:
        """Raises MayNotFile, or MembershipUnknown if Slack does not say who it is."""
        if self.closed:
            raise MayNotFile(self.closed)
        if not await self.own_team.has(person):
            raise MayNotFile("only members of this workspace file claims here, and no guests")
        if self.names and not await self._names(person):
            raise MayNotFile("you are not among those who file claims here: ask whoever runs this (FILERS)")

    async def _names(self, person: Person) -> bool:
        if names_person(self.names, person):
            return True
        if any(map(is_address, self.names)):
            address = await self.own_team.address_of(person)
            if address and {address, f"mail:{address}"} & set(self.names):
                return True
        groups = tuple(filter(is_group, self.names))
        return bool(groups and await self.own_team.groups_of(person, groups))
