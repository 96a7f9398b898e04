"""What the API takes and gives, as pydantic models: they validate, and the OpenAPI document is made from them."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Any, Generic, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, StringConstraints

from flow.inputs import MAX_NAME, MAX_NOTE
from flow.model import CLAIM_FLOW, EventType

T = TypeVar("T")

# The same rules as flow.inputs, which has the last word.
ThreadId = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9._:@-]{0,199}$")]
InterruptId = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{32}$")]
RequestHash = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]
Amount = Annotated[str, StringConstraints(pattern=r"^[0-9]{1,15}(\.[0-9]{1,4})?$")]
Currency = Annotated[str, StringConstraints(pattern=r"^[A-Z]{3}$")]

# Of a team, or of a whole grid.
Workspace = Annotated[str, StringConstraints(pattern=r"^[TE][A-Z0-9]{2,20}$")]
FlowName = Annotated[str, StringConstraints(pattern=r"^[a-z0-9][a-z0-9-]{0,62}$")]

ThreadStatus = Literal[
    "running",
    "waiting",
    "paid",
    "rejected",
    "expired",
    "withdrawn",
    "failed",
    "stuck",
    "unknown",
    "unavailable",
    "done",
]
ApprovalStatus = Literal["pending", "approved", "rejected", "expired", "withdrawn", "superseded"]
PaymentStatus = Literal["intended", "paid", "refused", "unknown"]
VerdictName = Literal["approve", "reject"]


class _Request(BaseModel):
    """Exactly these fields, with exactly these types."""

    model_config = ConfigDict(extra="forbid", strict=True)


class NewThread(_Request):
    """A thread to be started: a claim, by its fields, or any flow, by its `input`."""

    thread: ThreadId = Field(description="The thread's id, chosen by you: one claim, for ever.")
    flow: FlowName = Field(default=CLAIM_FLOW, description="Which flow.")
    input: dict[str, Any] | None = Field(
        default=None, description="What the flow is started with; its model says more."
    )
    amount: Amount | None = Field(
        default=None, description="Units of the currency, with no more decimals than it has.", examples=["250.00"]
    )
    currency: Currency | None = Field(default=None, description="ISO 4217 code; USD if left out.")
    payee: str | None = Field(default=None, max_length=MAX_NAME)
    note: str | None = Field(default=None, max_length=MAX_NOTE)
    requested_by: str | None = Field(
        default=None,
        min_length=1,
        max_length=MAX_NAME,
        description="Who asks, such as U01ALICE, if it is not the token itself; nobody decides a request of their own.",
    )

    workspace: Workspace | None = Field(
        default=None, description="In which of several it is started, if the token is not of one."
    )


class Withdrawal(_Request):
    """Why a request is taken back."""

    reason: str = Field(default="", max_length=MAX_NOTE)


class ActionAnswer(_Request):
    """What becomes of one action: `edit` brings `args`, `respond` a `message`, and `reject` may bring one."""

    type: Literal["approve", "edit", "reject", "respond"]
    args: dict[str, Any] | None = None
    message: str | None = Field(default=None, max_length=MAX_NOTE)


class Answer(_Request):
    """One of the request's options, or what becomes of each of its actions, in their order."""

    option: str | None = Field(default=None, max_length=MAX_NAME)
    actions: list[ActionAnswer] | None = Field(default=None, max_length=100)


class NewDecision(_Request):
    """One person's verdict."""

    decision: VerdictName
    approver: str | None = Field(
        default=None,
        min_length=1,
        max_length=MAX_NAME,
        description="Signed: which of the endpoint's people decided. With a token: nothing, or the token itself.",
    )
    reason: str = Field(default="", max_length=MAX_NOTE)
    interrupt_id: InterruptId | None = Field(
        default=None, description="What is decided, once more: a signature covers the body and not the path."
    )
    request_hash: RequestHash | None = Field(default=None, description="Of the request as the approver was shown it.")
    answer: Answer | None = Field(default=None, description="What there is to say beyond yes or no, if the flow asks.")


class NewAmount(_Request):
    """Another amount, to be asked for instead."""

    amount: Amount = Field(description="In the claim's currency, with no more decimals than it has.")
    approver: str | None = Field(
        default=None,
        min_length=1,
        max_length=MAX_NAME,
        description="Signed: which of the endpoint's people asks. With a token: nothing, or the token itself.",
    )
    reason: str = Field(default="", max_length=MAX_NOTE)
    interrupt_id: InterruptId | None = Field(
        default=None, description="What is changed, once more: a signature covers the body and not the path."
    )
    request_hash: RequestHash | None = Field(default=None, description="Of the request as the approver was shown it.")


class _Query(BaseModel):
    """Everything comes as text here."""

    model_config = ConfigDict(extra="forbid")

    limit: int = Field(default=50, ge=1, le=200)


# Microseconds since 1970, and in base64url what tells rows of one instant apart: of a decision a person's key, too.
Cursor = Annotated[str, StringConstraints(pattern=r"^[0-9]{1,16}~[A-Za-z0-9_-]{1,2000}$")]


class NoQuery(BaseModel):
    """None is taken."""

    model_config = ConfigDict(extra="forbid")


class ThreadsQuery(_Query):
    """Which threads."""

    status: ThreadStatus | None = None
    cursor: Cursor | None = Field(default=None, description="`next` of the page before.")


class ApprovalsQuery(_Query):
    """Which approvals."""

    status: ApprovalStatus | None = None
    cursor: Cursor | None = Field(default=None, description="`next` of the page before.")


class DecisionsQuery(_Query):
    """Which decisions."""

    cursor: Cursor | None = Field(default=None, description="`next` of the page before.")


class PaymentsQuery(_Query):
    """Which payments."""

    status: PaymentStatus | None = None
    cursor: int | None = Field(default=None, ge=1, le=(1 << 63) - 1, description="`next` of the page before.")


class EventsQuery(_Query):
    """From where on."""

    cursor: int = Field(
        default=0,
        ge=0,
        le=(1 << 63) - 1,
        description="`next` of the page before. 0: from the oldest that is kept; 410: what followed this one is not.",
    )


class Decision(BaseModel):
    """One person's verdict, as it was recorded."""

    person: str
    name: str
    verdict: VerdictName
    door: str
    reason: str
    decided_at: datetime
    answer: dict[str, Any] | None
    for_person: str | None = Field(description="Whose vote it is, if that person is away and gave it to this one.")
    for_name: str | None
    void: bool = Field(description="It counts no more: the rules were changed after it.")


class Approval(BaseModel):
    """One request for a decision."""

    interrupt_id: InterruptId
    tier: str
    status: ApprovalStatus
    request_hash: str
    approvers: list[str]
    required: int
    requested_at: datetime
    expires_at: datetime | None
    settled_at: datetime | None
    withdrawn_by: str | None
    withdrawn_why: str
    escalated_at: datetime | None
    changed_to: dict[str, str] | None = Field(description="Superseded by a request for this.")
    changed_by: str | None
    changed_for: str | None = Field(description="Whose voice it was, if that person is away and gave it to this one.")
    changed_why: str
    decisions: list[Decision]


class ApprovalOfThread(Approval):
    """One request for a decision, and what is asked for."""

    thread: ThreadId
    requested_by: str
    workspace: str | None = Field(description="The thread's.")
    request: dict[str, Any]


class DecisionOfThread(Decision):
    """One person's verdict, and on what."""

    thread: ThreadId
    interrupt_id: InterruptId


class Payment(BaseModel):
    """What was paid, or what became of the attempt."""

    id: int
    reference: str | None
    status: PaymentStatus
    reason: str | None
    paid_at: datetime | None


class PaymentOfThread(Payment):
    """The same, and of which thread."""

    thread: ThreadId
    amount: str
    currency: str
    payee: str
    provider: str


class Advice(BaseModel):
    """What a model said. It repeats the claimant's words and decides nothing."""

    status: str
    summary: str
    risks: list[str]
    needs_review: bool
    reason: str | None
    model: str
    prompt_tokens: int | None
    completion_tokens: int | None
    latency_ms: int | None


class Thread(BaseModel):
    """A thread with everything that is known of it; `approval` is the one that waits, else the last."""

    thread: ThreadId
    flow: str
    flow_version: str
    status: ThreadStatus
    amount: str | None
    currency: str | None
    payee: str | None
    note: str | None
    input: dict[str, Any]
    changed: dict[str, str] | None = Field(description="Fields of the input that are asked for otherwise by now.")
    requested_by: str
    workspace: str | None = Field(description="In which of several it was started; null: there is one.")
    created_at: datetime
    reason: str | None
    advice: Advice | None
    approval: Approval | None
    payment: Payment | None
    progress: Progress | None
    result: Any


class Progress(BaseModel):
    """How far a long flow is: steps done, of how many."""

    done: int
    total: int


class Decided(BaseModel):
    """`recorded` is false if the same had been decided before: that is a success too."""

    recorded: bool
    approval: ApprovalOfThread


class Page(BaseModel, Generic[T]):
    """Newest first. `next` is the cursor of the page that follows, null at the end."""

    items: list[T]
    next: str | int | None


class EventVote(BaseModel):
    """One person's verdict, in an event."""

    person: str
    verdict: VerdictName
    door: str
    at: datetime


class EventData(BaseModel):
    """The facts as they were then. Of an approval, or, if there is no `interrupt_id`, of the thread and all its
    approvals.

    `title` is of what another flow than the claims' asks, `payment` is the payment's reference, and `result` is what a
    flow without a payment has come to."""

    thread: ThreadId
    workspace: str | None
    interrupt_id: InterruptId | None
    title: str | None
    amount: str | None
    currency: str | None
    payee: str | None
    tier: str | None
    request_hash: str | None
    status: str
    decisions: list[EventVote]
    payment: str | None
    result: Any


class Event(BaseModel):
    """Something that has happened; `timestamp` says when."""

    id: int
    type: EventType
    timestamp: datetime
    data: EventData


class Events(BaseModel):
    """Oldest first. `next` is always there: ask with it again for what happens later."""

    items: list[Event]
    next: int


class Problem(BaseModel):
    """An error (RFC 9457). A 409 of a decision also says what was decided, by whom, and when."""

    type: str
    title: str
    status: int
    detail: str
    decision: str | None = None
    decided_by: str | None = None
    decided_at: datetime | None = None
