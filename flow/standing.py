"""Whether one person may decide one approval, by the rules in its row, and with whose voice: their own, or that of
somebody who is away.

A list that names nobody lets nobody decide. Whatever is unclear is refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from flow.errors import GroupsUnknown, NotAllowed, UnknownApproval
from flow.model import Absent, Approval, Person
from flow.policy import is_group, is_requester, names_person
from flow.text import bare_name, some_of
from flow.workspaces import reaches


@dataclass(frozen=True, kw_only=True)
class Standing:
    """As whom a person decides. `listed_as` is the name that the list has for the voice; None: the command line's."""

    listed_as: str | None
    absent: Absent | None = None


def check_person(approval: Approval, person: Person) -> Standing:
    """As whom this person decides this approval. Raises NotAllowed, which says why they may not; and UnknownApproval
    for whoever does not reach its workspace: names alone say nothing there.

    GroupsUnknown, one of those, says that they may if they are in one of the list's user groups; or, for somebody who
    is away, if they are a full member of the team.
    """
    if not reaches(person, approval.workspace):
        raise UnknownApproval(approval.interrupt_id)
    if person.trusted:
        return Standing(listed_as=None)
    asks, raised = is_requester(approval.requested_by, person), names_person(approval.raised_by, person)
    if asks and not approval.self_approval:
        raise NotAllowed(person.name, "nobody decides a request of their own")
    if raised and not approval.self_approval:
        raise NotAllowed(person.name, "whoever raised the amount asks for it, and another one decides")
    if listed_as := _listed_as(approval, person.names):
        return Standing(listed_as=listed_as)
    groups = tuple(filter(is_group, approval.approvers))
    if groups and not person.groups_known:
        raise GroupsUnknown(person.name, groups)
    if not (asks or raised) and (lent := _lent(approval, person)):
        # The list trusts whom it names. Whoever they handed their voice to is to be one of us, at least.
        if person.full_member is None:
            raise GroupsUnknown(person.name)
        if not person.full_member:
            assert lent.absent is not None
            raise NotAllowed(person.name, f"only a full member of this workspace decides for {lent.absent.name}")
        return lent
    who = some_of(approval.approvers) or (
        "nobody is, so only the command line can: set APPROVERS, or the tier's approvers"
    )
    raise NotAllowed(person.name, f"not on the list of approvers ({who})")


def _lent(approval: Approval, person: Person) -> Standing | None:
    """The voice of somebody who is away: one that this person has given before, else one that has not decided yet.

    Whether they are still in the team nobody asks, as of nobody who is listed by their id: most doors could not.
    """
    listed = [(absent, _listed_for(approval, absent)) for absent in person.acts_for]
    lent = [Standing(listed_as=listed_as, absent=absent) for absent, listed_as in listed if listed_as]
    given = {vote.voice: vote.person for vote in approval.votes}
    return min(lent, key=lambda each: _order(each, given, person), default=None)


def _order(standing: Standing, given: Mapping[str, str], person: Person) -> int:
    assert standing.absent is not None
    by = given.get(bare_name(standing.absent.key))
    return 1 if by is None else 0 if by == person.key else 2


def askers_of(approval: Approval) -> tuple[str, ...]:
    """Names of those who do not decide it because they ask for it: whoever filed it, and whoever raised its amount."""
    return () if approval.self_approval else (approval.requested_by, *approval.raised_by)


def escalates(approval: Approval) -> bool:
    """Whether the end of its time is not its own end: others are asked, too. Until then the first may still decide."""
    return approval.on_expiry == "escalate" and approval.escalated_at is None


def _listed_as(approval: Approval, names: frozenset[str]) -> str | None:
    return next((name for name in approval.approvers if name in names), None)


def _listed_for(approval: Approval, absent: Absent) -> str | None:
    """The name that stands for somebody who is away; None if they could not decide it themselves, either."""
    if absent.workspace != approval.workspace:
        return None
    away = Person(key=absent.key, name=absent.name, names=absent.names)
    if is_requester(approval.requested_by, away) or names_person(approval.raised_by, away):
        # Not even where a person may approve what they ask for: then it takes their own word.
        return None
    return _listed_as(approval, absent.names)
