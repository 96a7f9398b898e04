"""The values that travel between modules: frozen, keyword-only, no behaviour beyond what they are.

They know neither SQL nor Slack. Amounts are Decimal with the currency's own number of decimals; times are aware.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from decimal import Decimal
from typing import Any, Literal

from flow.text import bare_name

VerdictName = Literal["approve", "reject"]
OnExpiry = Literal["reject", "escalate"]
PostTo = Literal["channel", "direct", "both"]
ApprovalEventType = Literal[
    "approval.requested",
    "approval.voted",
    "approval.decided",
    "approval.expired",
    "approval.escalated",
    "approval.withdrawn",
    "approval.changed",
]
EventType = Literal[
    ApprovalEventType,
    "payment.paid",
    "payment.unknown",
    "thread.done",
    "thread.stuck",
]

# The built-in flow, named here so that whoever only files a claim need not import LangGraph. The version is part of
# every request's hash: raise it when a change alters what an approval means.
CLAIM_FLOW = "claims"
CLAIM_FLOW_VERSION = "1"

# What a thread can be.
STATUSES = (
    "running", "waiting", "paid", "rejected", "expired", "withdrawn", "failed", "stuck", "unknown", "unavailable",
    "done",
)  # fmt: skip

# A thread with one of these statuses is never driven again.
OVER = frozenset({"paid", "rejected", "expired", "withdrawn", "failed", "done"})


@dataclass(frozen=True, kw_only=True)
class Claim:
    """What is to be paid: the built-in flow's input.

    `amount` is exact, in units of `currency` (ISO 4217). `note` is the claimant's own text and is never trusted.
    """

    amount: Decimal
    currency: str
    payee: str = ""
    note: str = ""

    def as_input(self) -> dict[str, str]:
        """The claim as the JSON object that is stored with its thread."""
        return {"amount": str(self.amount), "currency": self.currency, "payee": self.payee, "note": self.note}

    @classmethod
    def of_input(cls, stored: dict[str, Any]) -> Claim:
        return cls(
            amount=Decimal(stored["amount"]),
            currency=stored["currency"],
            payee=stored.get("payee", ""),
            note=stored.get("note", ""),
        )


def flow_key(name: str, version: str) -> str:
    """A flow in one version, as workers say which they have."""
    return f"{name}@{version}"


@dataclass(frozen=True, kw_only=True)
class Thread:
    """One run of one flow, as its row says. `put_off`: a step failed, and it will be tried again at `due_at`."""

    thread_id: str
    flow: str
    flow_version: str
    input: dict[str, Any]
    requested_by: str
    status: str
    reason: str | None
    wakes: int
    attempts: int
    due_at: datetime | None
    created_at: datetime
    put_off: bool
    # Fields of the input that are not asked for any more as they were filed, and what is asked for instead.
    changed: dict[str, Any] | None = None
    # Steps of a long flow: how many are done, of how many.
    progress: tuple[int, int] | None = None
    # What a flow without a payment has come to: any JSON value, once it is done.
    result: Any = None
    # As a driver takes it: whoever drove it before died in the midst of that.
    taken_over: bool = False
    # The same: whether anybody has.
    driven_before: bool = True
    # The workspace that it was started in, of several; None: there is one, in the settings.
    workspace: str | None = None

    @property
    def flow_key(self) -> str:
        return flow_key(self.flow, self.flow_version)

    @property
    def over(self) -> bool:
        return self.status in OVER

    @property
    def asks_for(self) -> dict[str, Any]:
        """The input as it is by now."""
        return self.input | (self.changed or {})


@dataclass(frozen=True, kw_only=True)
class Decision:
    """One person's verdict on an approval."""

    person: str
    person_name: str
    verdict: VerdictName
    door: str
    reason: str
    decided_at: datetime
    # What it says beyond yes or no: see flow.questions.
    answer: dict[str, Any] | None = None
    # Whoever gave their vote into this person's hands while away.
    for_person: str | None = None
    for_name: str | None = None
    # The name by which the list of approvers had whoever's voice it is; None: at the command line, off the list.
    listed_as: str | None = None
    # It counts no more: the rules were changed on purpose.
    void: bool = False

    @property
    def who(self) -> str:
        """Who decided, in words: "Bob", or "Bob for Alice"."""
        return f"{self.person_name} for {self.for_name}" if self.for_name else self.person_name

    @property
    def voice(self) -> str:
        """Whose vote it is, however their name is written."""
        return bare_name(self.for_person or self.person)


@dataclass(frozen=True, kw_only=True)
class Approval:
    """One request for a decision, keyed by the LangGraph interrupt id (32 hex digits)."""

    interrupt_id: str
    thread_id: str
    tier: str
    request: dict[str, Any]
    request_hash: str
    requested_by: str
    approvers: tuple[str, ...]
    required: int
    status: str
    requested_at: datetime
    expires_at: datetime | None
    settled_at: datetime | None
    # The key of whoever took the request back.
    withdrawn_by: str | None = None
    withdrawn_why: str = ""
    # The rules of its tier: see flow.policy.Tier.
    rank: int = 0
    on_expiry: OnExpiry = "reject"
    escalate_to: tuple[str, ...] = ()
    expires_after_s: float | None = None
    escalated_at: datetime | None = None
    self_approval: bool = False
    step_up: bool = False
    post_to: PostTo = "channel"
    channel: str | None = None
    # Its place among the requests that the thread is to make, of how many; None: it is the only one, or nobody knows.
    step: int | None = None
    steps: int | None = None
    # Superseded by a request for this, proposed by this person, with the voice of that one who is away.
    changed_to: dict[str, Any] | None = None
    changed_by: str | None = None
    changed_for: str | None = None
    changed_why: str = ""
    # Names of whoever raised the amount to this one.
    raised_by: tuple[str, ...] = ()
    # The thread's.
    workspace: str | None = None
    # False if somebody has changed past us what it says, or by which rules it is decided.
    whole: bool = True
    decisions: tuple[Decision, ...] = ()

    @property
    def is_open(self) -> bool:
        """Whether it waits for a decision as it was asked for."""
        return self.status == "pending" and self.whole

    @property
    def tampered(self) -> bool:
        """Whether what waits is not what was asked for: nobody can decide it, and nobody should believe it."""
        return self.status == "pending" and not self.whole

    @property
    def settled_by(self) -> Decision | None:
        """The decision that settled it: a rejection if there is one, else the last approval."""
        if self.status not in ("approved", "rejected"):
            return None
        wanted = "reject" if self.status == "rejected" else "approve"
        return next((d for d in reversed(self.votes) if d.verdict == wanted), None)

    def changer(self, written: Callable[[str], str]) -> str:
        """Who proposed what it was superseded by, and for whom, each key written like this; empty if nobody did."""
        return " for ".join(written(key) for key in (self.changed_by, self.changed_for) if key)

    @property
    def votes(self) -> tuple[Decision, ...]:
        """The decisions that count."""
        return tuple(decision for decision in self.decisions if not decision.void)

    @property
    def approvals_given(self) -> int:
        """How many different voices have approved."""
        return len({decision.voice for decision in self.votes if decision.verdict == "approve"})


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What a door hands to `decide`: the verdict, and the hash of the request that the person was shown.

    `request_hash` is None only for doors that show the row itself (the command line).
    """

    verdict: VerdictName
    door: str
    reason: str = ""
    request_hash: str | None = None
    answer: dict[str, Any] | None = None


@dataclass(frozen=True, kw_only=True)
class Absent:
    """Somebody who is away, by the key and the names that they have. Their voice is lent for what was started in this
    `workspace`, of several."""

    key: str
    name: str
    names: frozenset[str]
    workspace: str | None = None


@dataclass(frozen=True, kw_only=True)
class Person:
    """Who decides. `key` is what is recorded; `names` are all names that the door vouches for, the key among them.

    An approver list names a person if it holds one of `names`. `trusted` is the command line: whoever types there
    has the database anyway. `groups_known` is False where a door can still ask which Slack user groups they are in, and
    `full_member` None where it can still ask whether they are one of our team: guests and outsiders of Slack are not,
    and decide for nobody else. `acts_for` are those whom they decide for at this time. `workspace` is the one that they
    are of, out of several: see `flow.workspaces.reaches`.
    """

    key: str
    name: str
    names: frozenset[str]
    trusted: bool = False
    groups_known: bool = True
    full_member: bool | None = True
    acts_for: tuple[Absent, ...] = ()
    workspace: str | None = None


@dataclass(frozen=True, kw_only=True)
class Payment:
    """Our row of a payment; `reference` is the provider's id.

    `status` is `intended`, `paid`, `refused` or `unknown`; `attempts` counts how often a provider outside was asked.
    """

    id: int
    thread_id: str
    amount: Decimal
    currency: str
    payee: str
    provider: str
    idempotency_key: str | None
    reference: str | None
    status: str
    reason: str | None
    attempts: int
    intended_at: datetime
    paid_at: datetime | None


@dataclass(frozen=True, kw_only=True)
class Advice:
    """What the language model said of a claim: `status` is `asked`, `given`, or `unavailable` for the `reason`.

    Never trusted: it repeats what the claimant wrote.
    """

    thread_id: str
    status: str
    summary: str
    risks: tuple[str, ...]
    needs_review: bool
    reason: str | None
    model: str
    prompt_tokens: int | None
    completion_tokens: int | None
    latency_ms: int | None


@dataclass(frozen=True, kw_only=True)
class Notice:
    """An outbox row that a deliverer has leased: `attempt` is its fence, `version` what it must show at least.

    An alarm is of its thread, and has no `interrupt_id`.
    """

    id: int
    kind: Literal["card", "reply", "reminder", "alarm"]
    interrupt_id: str | None
    thread_id: str
    version: int
    attempt: int
    ambiguous: bool


@dataclass(frozen=True, kw_only=True)
class Event:
    """Something that has happened, with the facts as they were then. `position` orders events, `id` names one."""

    id: int
    type: EventType
    data: dict[str, Any]
    created_at: datetime
    position: int | None

    def as_json(self) -> dict[str, Any]:
        """What is sent, and listed: `timestamp` is when it happened."""
        return {"type": self.type, "timestamp": self.created_at.astimezone(UTC).isoformat(), "data": self.data}


@dataclass(frozen=True, kw_only=True)
class Delivery:
    """An event that a deliverer has leased for one endpoint.

    `attempt` is its fence, `tries` its place in the schedule, this attempt included.
    """

    endpoint: str
    event: Event
    attempt: int
    tries: int


def request_hash(*, thread_id: str, interrupt_id: str, tier: str, flow_version: str, claim: Claim) -> str:
    """The fingerprint of exactly what is asked for: 64 hex digits, the same in every process and release.

    Shown on the card, carried by the button, checked at the decision and again before the payment.
    """
    canonical = json.dumps(
        [thread_id, interrupt_id, str(claim.amount), claim.currency, claim.payee, tier, flow_version],
        ensure_ascii=True,
        separators=(",", ":"),
    )
    return hashlib.sha256(canonical.encode()).hexdigest()
