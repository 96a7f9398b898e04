"""What must be true of claims, whatever happens to them in whatever order: a model to hold against the rows.

It says the rules once more, in plain Python, and shares nothing with the product but its words for people and verdicts.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from flow.model import Claim, Person, Verdict
from flow.policy import OneTier, Tier
from tests.people import ALICE, BOB, ONE_OF_THREE, POLICY, TWO_OF_THREE

# What a claim needs, by its amount: nothing, one approval, one in time, two people, one after the other.
TIERS: Mapping[str, tuple[Tier, ...]] = {
    "20.00": (),
    "250.00": (ONE_OF_THREE,),
    "500.00": (replace(ONE_OF_THREE, name="in time", expires_after_s=3600.0),),
    "900.00": (replace(TWO_OF_THREE, name="two"),),
    "2000.00": (
        Tier(name="lead", approvers=("U01ALICE", BOB.key)),
        Tier(name="finance", approvers=(ALICE.key, "U03CAROL")),
    ),
}
STALE = "0" * 64


class PolicyByAmount(OneTier):
    def tiers_of(self, claim: Claim) -> tuple[Tier, ...]:
        return TIERS[str(claim.amount)]


POLICY_BY_AMOUNT = PolicyByAmount(approvers=POLICY.approvers, limits=POLICY.limits)


@dataclass(frozen=True, kw_only=True)
class Asked:
    """A request for a decision. `overdue`: its time is over, whether anybody has noticed or not."""

    interrupt_id: str
    request_hash: str
    tier: Tier
    requested_by: str
    status: str = "pending"
    overdue: bool = False
    votes: Mapping[str, str] = field(default_factory=dict)

    def may_be_decided_by(self, person: Person) -> bool:
        named = any(name in self.tier.approvers for name in person.names)
        return person.trusted or (named and self.requested_by not in person.names)


@dataclass(frozen=True, kw_only=True)
class Vote:
    """Somebody's word on a request, with the hash of what they were shown."""

    interrupt_id: str
    person: Person
    verdict: Verdict

    def on(self, asked: Asked) -> tuple[Asked, str]:
        """The request after it, and the answer: `recorded`, `known`, or the name of a refusal."""
        said = self.verdict.verdict
        if refusal := self._refusal(asked):
            return asked, refusal
        if asked.status != "pending" or asked.votes.get(self.person.key) in (said, "reject"):
            return asked, "known"
        votes = {**asked.votes, self.person.key: said}
        approvals = list(votes.values()).count("approve")
        status = "rejected" if said == "reject" else "approved" if approvals >= asked.tier.required else "pending"
        return replace(asked, votes=votes, status=status), "recorded"

    def _refusal(self, asked: Asked) -> str | None:
        if not asked.may_be_decided_by(self.person):
            return "NotAllowed"
        if self.verdict.request_hash not in (None, asked.request_hash):
            return "StaleRequest"
        if asked.status == "expired":
            return "ApprovalExpired"
        if asked.status != "pending":
            same = asked.status == {"approve": "approved", "reject": "rejected"}[self.verdict.verdict]
            return None if same else "AlreadyDecided"
        return "ApprovalExpired" if asked.overdue else None


@dataclass(frozen=True, kw_only=True)
class Expiry:
    """The clock's word on a request."""

    interrupt_id: str

    def on(self, asked: Asked) -> tuple[Asked, str]:
        if asked.status != "pending" or not asked.overdue:
            return asked, "known"
        return replace(asked, status="expired"), "recorded"


# Something that happened, and its answer; None if nobody heard one: it may as well not have happened.
Happened = tuple[Vote | Expiry, str | None]


def outcomes(before: Mapping[str, Asked], happened: Sequence[Happened]) -> Iterator[Mapping[str, Asked]]:
    """The requests after all of this, for every order of it that explains the answers."""
    if not happened:
        yield before
    for number, (event, heard) in enumerate(happened):
        rest = [*happened[:number], *happened[number + 1 :]]
        after, answer = event.on(before[event.interrupt_id])
        if heard in (None, answer):
            yield from outcomes({**before, event.interrupt_id: after}, rest)
        if heard is None:
            yield from outcomes(before, rest)


@dataclass(kw_only=True)
class Filed:
    """A claim that was filed.

    `forged`: its requests do not say any more what was approved. `sound`: nothing keeps it from its end; without
    being so it may be stuck until somebody mends it, and says so.
    """

    thread_id: str
    amount: str
    requested_by: str
    # Interrupt ids, oldest first.
    asked: list[str] = field(default_factory=list)
    forged: bool = False
    sound: bool = True
    paid: bool = False

    def end(self, asked: Mapping[str, Asked]) -> str:
        """The status that it must come to now, if everybody does their work."""
        for number in range(len(TIERS[self.amount])):
            status = asked[self.asked[number]].status if number < len(self.asked) else "pending"
            if status != "approved":
                return "waiting" if status == "pending" else status
        return "paid"
