"""People of Slack, the same whether they click a button or sign in to a page, and the user groups that they are in."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, TypeVar

from flow.errors import FlowError, GroupsUnknown
from flow.model import Person

if TYPE_CHECKING:
    from bot.groups import OwnTeam

T = TypeVar("T")


class MembershipUnknown(FlowError):
    """Slack does not say who somebody is, or which groups they are in. Nothing was written; asking again is safe."""

    def __init__(self, groups: Sequence[str] = ()) -> None:
        self.groups = tuple(groups)
        wanted = f"who is in {', '.join(groups)}" if groups else "who you are"
        super().__init__(f"Slack did not say {wanted}: click again in a moment")


def slack_person(
    *, user_id: str, name: str, team_id: str, enterprise_id: str | None, own_team: Collection[str]
) -> Person:
    """The member of a team. The same member id in another team is another person, whom a bare id does not name."""
    keys = {f"slack:{team}/{user_id}" for team in (team_id, enterprise_id) if team}
    # In a shared channel the enterprise is ours and the person may not be: only their own team counts.
    names = keys | ({user_id} if (team_id or enterprise_id) in own_team else set())
    return Person(key=f"slack:{team_id or enterprise_id or ''}/{user_id}", name=name, names=frozenset(names))


def member_of(person: Person) -> tuple[str, str] | None:
    """Team and member id of a person of Slack; the team is empty where Slack has not said it. None for all others."""
    kind, _, rest = person.key.partition(":")
    team, _, user_id = rest.partition("/")
    return (team, user_id) if kind == "slack" else None


async def with_groups(own_team: OwnTeam | None, person: Person, work: Callable[[Person], Awaitable[T]]) -> T:
    """Do it as this person; once more, with their user groups, if whether they may depends on those.

    The work raises GroupsUnknown for that, before it writes anything. So whoever is listed by a name of their own costs
    no question to Slack, and waits for none. Without Slack a group names nobody. Raises MembershipUnknown.
    """
    member = member_of(person)
    if own_team is None or member is None:
        return await work(person)
    if not member[0]:
        person = await own_team.placed(person)
    try:
        return await work(replace(person, groups_known=False))
    except GroupsUnknown as exc:
        listed = exc.groups
    groups = await own_team.groups_of(person, listed)
    return await work(replace(person, names=person.names | groups, groups_known=True))


async def with_all_groups(own_team: OwnTeam | None, person: Person) -> Person:
    """The person with all their user groups, for lists of what waits for them.

    If Slack does not say, `groups_known` is False: then a list is shorter, and nobody is kept from it.
    """
    if own_team is None or member_of(person) is None:
        return person
    try:
        return replace(person, names=person.names | await own_team.groups_of(person))
    except MembershipUnknown:
        return replace(person, groups_known=False)
