"""Who must approve what: tiers by amount, and the check of one person against one list.

The rules stand in policy.toml; without one there is a single tier, of APPROVERS. A tier's rules are copied into each
approval when it is requested, so a later change of policy does not reach it.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Collection, Mapping
from dataclasses import dataclass, fields, replace
from decimal import Decimal
from pathlib import Path
from typing import Annotated, Any, Protocol

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from flow import inputs
from flow.errors import BadInput, SettingError, Unaskable
from flow.hours import Hours
from flow.model import Claim, OnExpiry, Person, PostTo
from flow.settings import Settings, approver_name, channel_id, seconds_of
from flow.text import bare_name

# The tier of a question that names none: the built-in one, or the first that somebody wrote.
UNNAMED = "approval"

# A claim in a currency that is not listed always needs an approval: 100 of an unknown unit may be a fortune.
LIMITS: Mapping[str, Decimal] = {"USD": Decimal(100)}


@dataclass(frozen=True, kw_only=True)
class Tier:
    """One round of approval: `required` distinct people out of `approvers` (empty: nobody can)."""

    name: str
    approvers: tuple[str, ...]
    required: int = 1
    expires_after_s: float | None = None
    # Once, instead of the end: ask `escalate_to`, too, and begin the time anew.
    on_expiry: OnExpiry = "reject"
    escalate_to: tuple[str, ...] = ()
    remind_every_s: float | None = None
    # When people work, as `flow.hours.Hours` reads it.
    working_hours: str | None = None
    # Whether whoever asks may be one of those who approve.
    self_approval: bool = False
    # Whether a click in Slack is not enough to approve, and it takes the page.
    step_up: bool = False
    post_to: PostTo = "channel"
    # The id of a Slack channel; None: the bot's own.
    channel: str | None = None
    # Its place in the policy.
    rank: int = 0

    def as_state(self) -> dict[str, Any]:
        """What is not as usual, in plain values. Another release may not know the rest."""
        given = {field.name: (field.default, getattr(self, field.name)) for field in fields(self)}
        return {
            name: list(value) if isinstance(value, tuple) else value
            for name, (usual, value) in given.items()
            if value != usual
        }

    @classmethod
    def of_state(cls, kept: Mapping[str, Any]) -> Tier:
        """The same again. What another release has kept beside it is left out."""
        values: dict[str, Any] = {}
        for field in fields(cls):
            if field.name in kept:
                value = kept[field.name]
                values[field.name] = tuple(value) if isinstance(value, list) else value
        return cls(**values)


class Policy(Protocol):
    """What a drive asks."""

    def tiers_of(self, claim: Claim) -> tuple[Tier, ...]:
        """The tiers that must approve this claim, in order; none means that it may be paid at once."""

    def review_tiers(self, claim: Claim) -> tuple[Tier, ...]:
        """The tiers for a claim that needs none by its amount, but that a person should look at."""

    def tier(self, name: str, claim: Claim | None = None) -> Tier:
        """The tier that is asked for by its name, for this claim if it is one. Raises Unaskable."""

    @property
    def names(self) -> tuple[str, ...]:
        """Of its tiers, in their order."""

    @property
    def words(self) -> tuple[str, ...]:
        """Its tiers for a person, in their order."""


@dataclass(frozen=True, kw_only=True)
class OneTier:
    """The built-in policy: one tier for every claim over its currency's limit, and for whatever a flow asks."""

    approvers: tuple[str, ...]
    limits: Mapping[str, Decimal]

    def tiers_of(self, claim: Claim) -> tuple[Tier, ...]:
        return (self.tier(UNNAMED),) if _is_over(self.limits, claim) else ()

    def review_tiers(self, claim: Claim) -> tuple[Tier, ...]:  # noqa: ARG002
        return (self.tier(UNNAMED),)

    def tier(self, name: str, claim: Claim | None = None) -> Tier:  # noqa: ARG002
        return Tier(name=name, approvers=self.approvers)

    @property
    def names(self) -> tuple[str, ...]:
        return (UNNAMED,)

    @property
    def words(self) -> tuple[str, ...]:
        return (in_words(self.tier(UNNAMED)),)


# Whatever it is asked, nobody but the command line may decide it, and nothing is paid unasked.
NOBODY = OneTier(approvers=(), limits={})


@dataclass(frozen=True, kw_only=True)
class Rule:
    """A tier, and the amounts that need it: those over its currency's limit, and all in a currency without one."""

    tier: Tier
    over: Mapping[str, Decimal]
    # Whether claims ask it; a flow may, by its name.
    claims: bool = True
    # The amounts that take more than a click in Slack, in the same way; None: none do.
    step_up_over: Mapping[str, Decimal] | None = None

    def tier_for(self, claim: Claim | None) -> Tier:
        """The tier, as strict as this claim needs it: of what is no claim nobody knows the amount."""
        over = self.step_up_over
        return replace(self.tier, step_up=over is not None and (claim is None or _is_over(over, claim)))


@dataclass(frozen=True, kw_only=True)
class Tiers:
    """A policy that somebody wrote: the tiers whose limit an amount is over, in their order."""

    rules: tuple[Rule, ...]

    def tiers_of(self, claim: Claim) -> tuple[Tier, ...]:
        return tuple(rule.tier_for(claim) for rule in self.rules if rule.claims and _is_over(rule.over, claim))

    def review_tiers(self, claim: Claim) -> tuple[Tier, ...]:
        return (next(rule.tier_for(claim) for rule in self.rules if rule.claims),)

    def tier(self, name: str, claim: Claim | None = None) -> Tier:
        for rule in self.rules:
            if rule.tier.name == name:
                return rule.tier_for(claim)
        if name == UNNAMED:
            return replace(self.rules[0].tier_for(claim), name=name)
        raise Unaskable(f"the policy has no tier {name!r}, only {', '.join(self.names)}")

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(rule.tier.name for rule in self.rules)

    @property
    def words(self) -> tuple[str, ...]:
        return tuple(in_words(rule.tier) + _page_in_words(rule.step_up_over) for rule in self.rules)


def _is_over(limits: Mapping[str, Decimal], claim: Claim) -> bool:
    limit = limits.get(claim.currency)
    return limit is None or claim.amount > limit


def in_words(tier: Tier) -> str:
    """The tier for a person: "vp: 2 of U03DANA, U04EMIL, within 7 days"."""
    who = f"{tier.required} of {', '.join(tier.approvers)}" if tier.approvers else "nobody but the command line"
    within = f", within {_in_words(tier.expires_after_s)}" if tier.expires_after_s else ""
    then = f", then also {', '.join(tier.escalate_to)}" if tier.on_expiry == "escalate" else ""
    every = f", reminded every {_in_words(tier.remind_every_s).removeprefix('1 ')}" if tier.remind_every_s else ""
    hours = f" ({tier.working_hours})" if tier.working_hours else ""
    own = ", whoever asks among them" if tier.self_approval else ""
    page = ", on the page" if tier.step_up else ""
    where = {
        "channel": f", in {tier.channel}" if tier.channel else "",
        "direct": ", by direct messages",
        "both": f", in {tier.channel or 'the channel'} and by direct messages",
    }[tier.post_to]
    return f"{tier.name}: {who}{own}{page}{within}{then}{every}{hours}{where}"


def _page_in_words(over: Mapping[str, Decimal] | None) -> str:
    if over is None:
        return ""
    amounts = ", ".join(f"{limit:,} {currency}" for currency, limit in over.items())
    return f", on the page over {amounts} and in other currencies" if over else ", on the page"


def _in_words(seconds: float) -> str:
    for unit, length in (("day", 86_400), ("hour", 3600), ("minute", 60)):
        if seconds % length == 0:
            count = int(seconds // length)
            return f"{count} {unit}{'s' if count > 1 else ''}"
    return f"{seconds:g} seconds"


# One person against one list


def is_group(name: str) -> bool:
    """Whether it is a Slack user group, by its id or its handle."""
    return re.fullmatch(r"S[A-Z0-9]{2,}|@.+", name) is not None


def is_member(name: str) -> bool:
    """Whether it is a Slack member id."""
    return re.fullmatch(r"[UW][A-Z0-9]{2,}", name) is not None


def names_person(approvers: Collection[str], person: Person) -> bool:
    """Whether the list names this person by any name that the door vouches for. An empty list names nobody."""
    return not person.names.isdisjoint(approvers)


def is_requester(requested_by: str, person: Person) -> bool:
    """Whether this person filed the request. Capitals make no other person: an address is written either way."""
    return requested_by.lower() in {name.lower() for name in person.names}


# The file


def policy_of(settings: Settings) -> Policy:
    """The policy that these settings ask for. Raises SettingError, which names file, tier and fix."""
    path = settings.policy_path
    if path is None:
        return OneTier(approvers=settings.approver_names, limits=LIMITS)
    if settings.approvers:
        raise SettingError(f"APPROVERS and {path} both say who may decide: remove one of them")
    return read_policy(path)


def read_policy(path: Path) -> Tiers:
    """The policy in this file. Raises SettingError."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, ValueError) as exc:
        raise SettingError(f"{path} cannot be read: {exc}") from exc
    return parse_policy(text, named=str(path))


def parse_policy(text: str, *, named: str) -> Tiers:
    """The policy that this text says; `named` is what errors call it. Raises SettingError."""
    try:
        written = _Written.model_validate(tomllib.loads(text))
    except ValidationError as exc:
        raise SettingError("\n".join(f"{named}: {_explained(dict(error))}" for error in exc.errors())) from exc
    except (ValueError, RecursionError) as exc:
        raise SettingError(f"{named} cannot be read: {exc}") from exc
    return Tiers(rules=tuple(tier.as_rule(rank) for rank, tier in enumerate(written.tiers)))


def _seconds(text: Any) -> int:
    return seconds_of(text if isinstance(text, str) else "")


def _hours(text: str | None) -> str | None:
    if text is not None:
        Hours.parse(text)
    return text


def _channel(text: str | None) -> str | None:
    return text if text is None else channel_id(text)


def _limits(given: Any) -> Any:
    limits = {}
    for currency, amount in given.items() if isinstance(given, dict) else [(str(given), "")]:
        try:
            decimals = inputs.decimals_of(currency)
            is_none = amount == 0 and not isinstance(amount, bool | str | float)
            limits[currency] = Decimal(0) if is_none else inputs.parse_amount(str(amount), currency, decimals)
        except BadInput as exc:
            raise ValueError(str(exc)) from exc
    return limits


class _WrittenTier(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    name: str = Field(pattern=r"^[a-z0-9][a-z0-9-]{0,62}$")
    approvers: list[Annotated[str, AfterValidator(approver_name)]]
    over: Annotated[dict[str, Decimal], BeforeValidator(_limits)] = Field(default_factory=dict)
    claims: bool = True
    required: int = Field(default=1, ge=1, le=100)
    expires_after: Annotated[float | None, BeforeValidator(_seconds)] = None
    on_expiry: OnExpiry = "reject"
    escalate_to: list[Annotated[str, AfterValidator(approver_name)]] = Field(default_factory=list)
    remind_every: Annotated[float | None, BeforeValidator(_seconds)] = None
    working_hours: Annotated[str | None, AfterValidator(_hours)] = None
    self_approval: bool = False
    step_up_over: Annotated[dict[str, Decimal] | None, BeforeValidator(_limits)] = None
    post_to: PostTo = "channel"
    channel: Annotated[str | None, AfterValidator(_channel)] = None

    @model_validator(mode="after")
    def _can_be_met(self) -> _WrittenTier:
        people = set(map(bare_name, self.approvers))
        if len(people) < len(set(self.approvers)):
            raise ValueError("somebody is listed twice, under two names: each of them would be a voice")
        if 0 < len(people) < self.required and not any(map(is_group, people)):
            raise ValueError(f"{self.required} of {len(people)} approvers can never be had")
        if (self.on_expiry == "escalate") != bool(self.escalate_to):
            raise ValueError('on_expiry = "escalate" and escalate_to belong together')
        if self.escalate_to and not self.expires_after:
            raise ValueError("to escalate takes a time to do it: say expires_after, too")
        if set(map(bare_name, self.escalate_to)) & people:
            raise ValueError("escalate_to names somebody who is asked already")
        if self.post_to == "direct" and not any(map(is_member, people)):
            raise ValueError('post_to = "direct" reaches nobody: list approvers by their Slack member ids')
        if self.working_hours and not self.remind_every:
            raise ValueError("working_hours are for reminders: say remind_every, too")
        return self

    def as_rule(self, rank: int) -> Rule:
        tier = Tier(
            name=self.name,
            approvers=tuple(dict.fromkeys(self.approvers)),
            required=self.required,
            expires_after_s=self.expires_after,
            on_expiry=self.on_expiry,
            escalate_to=tuple(dict.fromkeys(self.escalate_to)),
            remind_every_s=self.remind_every,
            working_hours=self.working_hours,
            self_approval=self.self_approval,
            post_to=self.post_to,
            channel=self.channel,
            rank=rank,
        )
        return Rule(tier=tier, over=self.over, claims=self.claims, step_up_over=self.step_up_over)


class _Written(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    tiers: list[_WrittenTier] = Field(min_length=1)

    @model_validator(mode="after")
    def _have_names_of_their_own(self) -> _Written:
        names = [tier.name for tier in self.tiers]
        if len(set(names)) < len(names):
            raise ValueError("two tiers have one name")
        if not any(tier.claims for tier in self.tiers):
            raise ValueError("no tier is asked for claims")
        return self


def _explained(error: dict[str, Any]) -> str:
    where = ".".join(str(part + 1) if isinstance(part, int) else str(part) for part in error["loc"])
    return f"{where}: {str(error['msg']).removeprefix('Value error, ')}"
