"""What must be true of claims, whatever happens to them in whatever order: a model to hold against the rows.

It says the rules once more, in plain Python, and shares nothing with the product but its words for people and verdicts.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from decimal import Decimal

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
    """A request for a decision. `overdue`: its time is over, whether anybody has noticed or not.

    `votes`: by whoever gave it, in their order, whose voice it is and what it says. `raised_by`: names of whoever
    raised the amount to this one. `changed_to`: the amount that is asked for instead, wanted by `changed_by`, and with
    that raised by `raised_then`.
    """

    interrupt_id: str
    thread_id: str
    request_hash: str
    tier: Tier
    requested_by: str
    filed_amount: str
    amount: str
    raised_by: frozenset[str] = frozenset()
    status: str = "pending"
    overdue: bool = False
    votes: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    changed_to: str | None = None
    changed_by: str | None = None
    raised_then: frozenset[str] = frozenset()

    def voice_of(self, person: Person, acts_for: Sequence[Person]) -> Person | None:
        """With whose voice they decide it: their own, else that of somebody who is away; None: with nobody's."""
        if person.trusted:
            return person
        if self._asks(person):
            return None
        if self._names(person):
            return person
        lent = [absent for absent in acts_for if self._names(absent) and not self._asks(absent)]
        given = {voice: by for by, (voice, _) in self.votes.items()}
        # One that they have given before, then one that nobody has.
        return min(lent, key=lambda each: {person.key: 0, None: 1}.get(given.get(each.key), 2), default=None)

    def _names(self, person: Person) -> bool:
        return any(name in self.tier.approvers for name in person.names)

    def _asks(self, person: Person) -> bool:
        return self.requested_by in person.names or bool(self.raised_by & person.names)

    def settled_otherwise(self) -> str | None:
        """The refusal of whoever wants something else of one that is settled."""
        return {"pending": None, "expired": "ApprovalExpired"}.get(self.status, "AlreadyDecided")


Requests = Mapping[str, Asked]


@dataclass(frozen=True, kw_only=True)
class Vote:
    """Somebody's word on a request, with the hash of what they were shown, while they decided for these."""

    interrupt_id: str
    person: Person
    verdict: Verdict
    acts_for: tuple[Person, ...] = ()

    def on(self, requests: Requests) -> tuple[Requests, str]:
        """The requests after it, and the answer: `recorded`, `known`, or the name of a refusal."""
        asked, said = requests[self.interrupt_id], self.verdict.verdict
        voice = asked.voice_of(self.person, self.acts_for)
        if voice is None:
            return requests, "NotAllowed"
        if refusal := self._refusal(asked):
            return requests, refusal
        if asked.status != "pending":
            return requests, "known"
        for by, (given, verdict) in asked.votes.items():
            if given == voice.key and verdict == said:
                return requests, "known"
            if (given == voice.key != self.person.key != by) or (by == self.person.key and given != voice.key):
                return requests, "NotAllowed"
        votes = {**asked.votes, self.person.key: (voice.key, said)}
        approvals = len({given for given, verdict in votes.values() if verdict == "approve"})
        status = "rejected" if said == "reject" else "approved" if approvals >= asked.tier.required else "pending"
        return {**requests, self.interrupt_id: replace(asked, votes=votes, status=status)}, "recorded"

    def _refusal(self, asked: Asked) -> str | None:
        if self.verdict.request_hash not in (None, asked.request_hash):
            return "StaleRequest"
        if asked.status == {"approve": "approved", "reject": "rejected"}[self.verdict.verdict]:
            return None
        return asked.settled_otherwise() or ("ApprovalExpired" if asked.overdue else None)


@dataclass(frozen=True, kw_only=True)
class Change:
    """Somebody asks for another amount than a request."""

    interrupt_id: str
    person: Person
    amount: str
    acts_for: tuple[Person, ...] = ()

    def on(self, requests: Requests) -> tuple[Requests, str]:
        asked = requests[self.interrupt_id]
        if (asked.changed_to, asked.changed_by) == (self.amount, self.person.key):
            return requests, "recorded"
        voice = asked.voice_of(self.person, self.acts_for)
        if voice is None:
            return requests, "NotAllowed"
        if refusal := asked.settled_otherwise() or ("ApprovalExpired" if asked.overdue else None):
            return requests, refusal
        if asked.amount == self.amount:
            # A success where it is what they have asked for, and nothing new otherwise.
            theirs = (asked.thread_id, self.amount, self.person.key)
            again = any((each.thread_id, each.changed_to, each.changed_by) == theirs for each in requests.values())
            return requests, "recorded" if again else "BadInput"
        raised = Decimal(self.amount) > Decimal(asked.filed_amount)
        then = asked.raised_by | self.person.names | voice.names if raised else frozenset()
        changed = replace(
            asked, status="superseded", changed_to=self.amount, changed_by=self.person.key, raised_then=then
        )
        # What other tiers said yes to is not asked for any more.
        others = {
            key: replace(each, status="superseded")
            for key, each in requests.items()
            if each.thread_id == asked.thread_id and each.status == "approved"
        }
        return {**requests, **others, self.interrupt_id: changed}, "recorded"


@dataclass(frozen=True, kw_only=True)
class Withdrawal:
    """Somebody takes a request back."""

    interrupt_id: str
    person: Person

    def on(self, requests: Requests) -> tuple[Requests, str]:
        asked = requests[self.interrupt_id]
        if not self.person.trusted and asked.requested_by not in self.person.names:
            return requests, "NotAllowed"
        if asked.status not in ("pending", "withdrawn"):
            return requests, "NothingToDecide"
        return {**requests, self.interrupt_id: replace(asked, status="withdrawn")}, "recorded"


@dataclass(frozen=True, kw_only=True)
class Expiry:
    """The clock's word on a request."""

    interrupt_id: str

    def on(self, requests: Requests) -> tuple[Requests, str]:
        asked = requests[self.interrupt_id]
        if asked.status != "pending" or not asked.overdue:
            return requests, "known"
        return {**requests, self.interrupt_id: replace(asked, status="expired")}, "recorded"


Act = Vote | Change | Withdrawal
# Something that happened, and its answer; None if nobody heard one: it may as well not have happened.
Happened = tuple[Act | Expiry, str | None]


def outcomes(before: Requests, happened: Sequence[Happened]) -> Iterator[Requests]:
    """The requests after all of this, for every order of it that explains the answers."""
    if not happened:
        yield before
    for number, (event, heard) in enumerate(happened):
        rest = [*happened[:number], *happened[number + 1 :]]
        after, answer = event.on(before)
        if heard in (None, answer):
            yield from outcomes(after, rest)
        if heard is None:
            yield from outcomes(before, rest)


@dataclass(kw_only=True)
class Filed:
    """A claim that was filed, for `amount`; by now `wanted` is asked for, which `raised_by` have raised.

    `forged`: its requests do not say any more what was approved. `sound`: nothing keeps it from its end; without
    being so it may be stuck until somebody mends it, and says so.
    """

    thread_id: str
    amount: str
    requested_by: str
    wanted: str = ""
    changed: bool = False
    raised_by: frozenset[str] = frozenset()
    # Interrupt ids of the requests for what is wanted, oldest first.
    asked: list[str] = field(default_factory=list)
    forged: bool = False
    sound: bool = True
    paid: bool = False

    def __post_init__(self) -> None:
        self.wanted = self.wanted or self.amount

    @property
    def tiers(self) -> tuple[Tier, ...]:
        # What somebody has changed, somebody has to approve.
        return TIERS[self.wanted] or ((ONE_OF_THREE,) if self.changed else ())

    def ask_anew(self, superseded: Asked) -> None:
        """Another amount is wanted: by new requests, which nobody has forged."""
        assert superseded.changed_to is not None
        self.wanted, self.raised_by, self.changed = superseded.changed_to, superseded.raised_then, True
        self.asked, self.forged, self.sound = [], False, True

    def end(self, asked: Requests) -> str:
        """The status that it must come to now, if everybody does their work."""
        for number in range(len(self.tiers)):
            status = asked[self.asked[number]].status if number < len(self.asked) else "pending"
            if status != "approved":
                return "waiting" if status == "pending" else status
        return "paid"
