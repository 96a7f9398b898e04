"""People of Slack, the same whether they click a button or sign in to a page, and the user groups that they are in."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, TypeVar

from bot.pool import Pool
from flow.approvals import approval_for, record_refusal
from flow.delegations import Delegation
from flow.errors import FlowError, GroupsUnknown
from flow.model import Approval, Person
from flow.policy import is_member
from flow.standing import askers_of
from flow.text import some_of

if TYPE_CHECKING:
    from bot.groups import OwnTeam

T = TypeVar("T")


class MembershipUnknown(FlowError):
    """Slack does not say who somebody is, or which groups they are in. Nothing was written; asking again is safe."""

    def __init__(self, groups: Sequence[str] = ()) -> None:
        self.groups = tuple(groups)
        wanted = f"who is in {some_of(groups)}" if groups else "who you are"
        super().__init__(f"Slack did not say {wanted}: click again in a moment")


def slack_person(
    *,
    user_id: str,
    name: str,
    team_id: str,
    enterprise_id: str | None,
    own_team: Collection[str],
    workspace: str | None = None,
) -> Person:
    """The member of a team. The same member id in another team is another person, whom a bare id does not name.

    `enterprise_id` is only the payload's word. In a shared channel it is ours, and the person may not be: it counts for
    members of our own team alone. For others Slack's directory is asked: see `OwnTeam.placed`. `workspace` is the one,
    of several, that they came by.
    """
    key = f"slack:{team_id}/{user_id}"
    names = {key} if team_id else set()
    if team_id in own_team:
        names |= {user_id} | ({f"slack:{enterprise_id}/{user_id}"} if enterprise_id else set())
    return Person(key=key, name=name, names=frozenset(names), workspace=workspace)


def member_of(person: Person) -> tuple[str, str] | None:
    """Team and member id of a person of Slack; the team is empty where Slack has not said it. None for all others."""
    kind, _, rest = person.key.partition(":")
    team, _, user_id = rest.partition("/")
    return (team, user_id) if kind == "slack" else None


async def with_groups(own_team: OwnTeam | None, person: Person, work: Callable[[Person], Awaitable[T]]) -> T:
    """Do it as this person; once more, with their user groups, if whether they may depends on those, and once more if
    it depends on whether they are a full member of the team: that is, if they decide for somebody else.

    The work raises GroupsUnknown for that, before it writes anything. So whoever is listed by a name of their own costs
    no question to Slack, and waits for none. Without Slack a group names nobody, and no member decides for another.
    Raises MembershipUnknown.
    """
    member = member_of(person)
    if member is None:
        return await work(person)
    if own_team is None:
        return await work(replace(person, full_member=False))
    # Of whom Slack has just not said it, it is not asked again: there may be fifty requests to decide.
    unsaid, member_unsaid = not person.groups_known, person.full_member is None
    known = replace(person, groups_known=False, full_member=None)
    while True:
        try:
            return await work(known)
        except GroupsUnknown as exc:
            if unsaid or (member_unsaid and not exc.groups):
                raise MembershipUnknown(exc.groups) from exc
            groups = exc.groups
        if groups:
            known = replace(known, names=known.names | await own_team.groups_of(person, groups), groups_known=True)
        else:
            known = replace(known, full_member=await own_team.has(person))


@contextlib.asynccontextmanager
async def unknown_kept(
    pool: Pool, person: Person, interrupt_id: str, *, door: str, shown: str | None
) -> AsyncIterator[None]:
    """Whoever is refused because Slack does not say who they are is kept in the audit log, as all who are refused."""
    try:
        yield
    except MembershipUnknown as exc:
        async with pool.connection() as conn, conn.transaction():
            approval = await approval_for(conn, person, interrupt_id)
            await record_refusal(conn, approval, person, exc, door=door, shown=shown)
        raise


async def for_lists(own_team: OwnTeam | None, person: Person, *, groups: bool) -> Person:
    """The person as lists of what waits for them take them: with all their user groups, if any `groups` matter; and, if
    they decide for somebody else, with whether they are a full member.

    If Slack does not say, `groups_known` is False, or `full_member` None: then a list is shorter, and nobody is kept
    from it.
    """
    if member_of(person) is None:
        return person
    if own_team is None:
        return replace(person, full_member=False)
    known = person
    if groups:
        try:
            known = replace(known, names=known.names | await own_team.groups_of(person))
        except MembershipUnknown:
            known = replace(known, groups_known=False)
    if person.acts_for:
        try:
            known = replace(known, full_member=await own_team.has(person))
        except MembershipUnknown:
            known = replace(known, full_member=None)
    return known


def own_member(name: str, own_team: Collection[str]) -> str | None:
    """The id of the member of ours whom a list names like this; None for anybody else."""
    team, _, member = name.removeprefix("slack:").rpartition("/")
    return member if is_member(member) and (not team or team in own_team) else None


def as_named_here(approval: Approval, own_team: Collection[str]) -> Approval:
    """The approval as the team's own messages show it: its members by their bare ids, which Slack shows as names.

    Whoever has a team before their id is a stranger, and may share the id with one of ours.
    """

    def here(name: str) -> str:
        return own_member(name, own_team) or name

    return replace(
        approval,
        requested_by=here(approval.requested_by),
        raised_by=tuple(dict.fromkeys(map(here, approval.raised_by))),
        approvers=tuple(dict.fromkeys(map(here, approval.approvers))),
        escalate_to=tuple(dict.fromkeys(map(here, approval.escalate_to))),
        changed_by=approval.changed_by and here(approval.changed_by),
        changed_for=approval.changed_for and here(approval.changed_for),
    )


@dataclass(frozen=True, kw_only=True)
class Asked:
    """Somebody, or a user group, whom a list names; and whoever would decide for them now, as they are away."""

    name: str
    stand_in: str | None = None


def asked_of(approval: Approval, stood_in: Collection[Delegation], own_team: Collection[str]) -> list[Asked]:
    """Whom the approval asks, by the names that its messages show: never who may not decide it.

    `stood_in` are the delegations of those on its list.
    """

    key = _key_in(own_team)
    barred, asking = set(map(key, askers_of(approval))), set(map(key, (approval.requested_by, *approval.raised_by)))
    stand_ins = {
        key(name): own_member(each.delegate, own_team) or each.delegate
        for each in stood_in
        # Nobody lends their voice to what they ask for, nor borrows one.
        if asking.isdisjoint({key(each.delegate), *map(key, each.names)})
        for name in each.names
    }
    listed = as_named_here(approval, own_team).approvers
    return [Asked(name=name, stand_in=stand_ins.get(key(name))) for name in listed if key(name) not in barred]


def missing_of(approval: Approval, stood_in: Collection[Delegation], own_team: Collection[str]) -> list[Asked]:
    """Those of them whose vote does not count yet. Of a user group nobody can say so."""
    key = _key_in(own_team)
    voices = {key(vote.for_person or vote.person) for vote in approval.votes}
    voters = {key(vote.person) for vote in approval.votes}
    return [
        # Whoever has voted has no second vote to give.
        replace(each, stand_in=None) if each.stand_in and key(each.stand_in) in voters else each
        for each in asked_of(approval, stood_in, own_team)
        if key(each.name) not in voices
    ]


def _key_in(own_team: Collection[str]) -> Callable[[str], str]:
    """What two ways to write one person have in common."""
    return lambda name: (own_member(name, own_team) or name.removeprefix("mail:")).lower()
