"""Who must approve what: tiers by amount, and the check of one person against one list.

A tier's rules are copied into each approval when it is requested, so a later change of policy does not reach it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from decimal import Decimal

from flow.model import Claim, Person
from flow.settings import Settings

# A claim in a currency that is not listed always needs an approval: 100 of an unknown unit may be a fortune.
LIMITS: Mapping[str, Decimal] = {"USD": Decimal(100)}


@dataclass(frozen=True, kw_only=True)
class Tier:
    """One round of approval: `required` distinct people out of `approvers` (empty: nobody can)."""

    name: str
    approvers: tuple[str, ...]
    required: int = 1
    expires_after_s: float | None = None


@dataclass(frozen=True, kw_only=True)
class Policy:
    """The built-in policy: one tier for every claim over its currency's limit."""

    approvers: tuple[str, ...]
    limits: Mapping[str, Decimal]

    def tiers_of(self, claim: Claim) -> tuple[Tier, ...]:
        """The tiers that must approve this claim, in order; none means that it may be paid at once."""
        limit = self.limits.get(claim.currency)
        if limit is not None and claim.amount <= limit:
            return ()
        return (self._approval(),)

    def review_tiers(self) -> tuple[Tier, ...]:
        """The tiers for a claim that needs none by its amount, but that a person should look at."""
        return (self._approval(),)

    def tier(self, name: str) -> Tier:
        """The tier that a flow asks for by its name."""
        return Tier(name=name, approvers=self.approvers)

    def _approval(self) -> Tier:
        return self.tier("approval")


def names_person(approvers: Collection[str], person: Person) -> bool:
    """Whether the list names this person by any name that the door vouches for. An empty list names nobody."""
    return not person.names.isdisjoint(approvers)


def is_requester(requested_by: str, person: Person) -> bool:
    """Whether this person filed the request. Capitals make no other person: an address is written either way."""
    return requested_by.lower() in {name.lower() for name in person.names}


def policy_of(settings: Settings) -> Policy:
    """The policy that these settings ask for."""
    return Policy(approvers=settings.approver_names, limits=LIMITS)
