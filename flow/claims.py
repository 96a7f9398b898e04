"""The claim flow: intake > decide > approve > pay.

    intake    asks the model for advice, once
    decide    asks the policy which tiers must approve, once, and keeps the answer in the state
    approve   waits for one tier; a conditional edge sends the thread through it again for the next one, or back to
              `decide` with another amount
    pay       pays, after checking that exactly this was approved

State is short plain scalars: strings are copied into every checkpoint, so the note stays in the thread's row. Whatever
is not the same each time (the policy, the model) is written to the state once and read from there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, TypedDict

from langgraph.graph import END, START, StateGraph
from langgraph.runtime import Runtime
from langgraph.types import Interrupt, interrupt

from flow import payments
from flow.approvals import approvals_of
from flow.assess import assess
from flow.database import Connection
from flow.errors import NotApproved
from flow.flows import Asked, Flow
from flow.model import CLAIM_FLOW, CLAIM_FLOW_VERSION, Approval, Claim, Thread, request_hash
from flow.pen import Pen
from flow.policy import Policy, Tier
from flow.starting import ClaimInput
from flow.threads import thread_of


class State(TypedDict, total=False):
    """`tiers` is a list of Tier fields; `tier` counts those that have approved. `changed`: not the amount as filed."""

    thread_id: str
    amount: str
    currency: str
    payee: str
    tiers: list[dict[str, Any]]
    tier: int
    needs_review: bool
    changed: bool
    approved: bool
    reference: str


async def intake(state: State, runtime: Runtime[Pen]) -> State:
    pen = runtime.context
    advice = await assess(pen.adviser, pen.tx, state["thread_id"])
    return {"tier": 0, "needs_review": advice is not None and advice.needs_review}


async def decide(state: State, runtime: Runtime[Pen]) -> State:
    policy, claim = runtime.context.policy, _claim_of(state)
    tiers = policy.tiers_of(claim)
    if not tiers and (state["needs_review"] or state.get("changed")):
        # The one thing that advice can do: add an approval. And what somebody has changed, somebody has to approve.
        tiers = policy.review_tiers(claim)
    return {"tiers": [tier.as_state() for tier in tiers], "approved": not tiers}


async def approve(state: State) -> State:
    # Nothing but the interrupt: whatever stood before it would run again at the answer.
    verdict = interrupt(_request_of(state))
    # Strictly: a truthy answer of any other shape is not an approval.
    approved = isinstance(verdict, dict) and verdict.get("approved") is True
    if isinstance(verdict, dict) and verdict.get("changed") and not approved:
        return _changed(verdict["changed"])
    return {"approved": approved, "tier": state["tier"] + 1}


def _changed(to: Mapping[str, Any]) -> State:
    """With no tier asked so far: of those that are given, else, with another amount, of those that the policy gives."""
    asked_anew: State = {"approved": False, "tier": 0, "tiers": to.get("tiers", [])}
    if "amount" in to:
        asked_anew |= {"amount": to["amount"], "changed": True}
    return asked_anew


async def pay(state: State, runtime: Runtime[Pen]) -> State:
    pen, claim, thread_id = runtime.context, _claim_of(state), state["thread_id"]
    async with pen.tx() as conn:
        approvals = await _check_approved(conn, state, claim)
        if pen.provider is None:
            payment = await payments.pay_from_ledger(conn, thread_id, claim, approvals)
        else:
            payment = await payments.intend(conn, thread_id, claim, pen.provider)
    if payment.status == "intended":
        payment = await payments.pay_outside(pen, payment, pen.provider)
    return {"reference": payment.reference or ""}


async def _check_approved(conn: Connection, state: State, claim: Claim) -> Sequence[Approval]:
    """The thread's approvals. Raises NotApproved unless this is the claim that was filed, and each tier approved it.

    By our rows, not by the state's word: what people were shown, and who said yes to it.
    """
    thread_id = state["thread_id"]
    thread = await thread_of(conn, thread_id)
    if replace(Claim.of_input(thread.asks_for), note="") != claim:
        raise NotApproved(f"not paid: {claim.amount} {claim.currency} is not the claim that was filed")
    approvals = (await approvals_of(conn, [thread_id]))[thread_id]
    granted = {approval.tier for approval in approvals if _grants(approval, claim, thread.flow_version)}
    if missing := [tier["name"] for tier in state["tiers"] if tier["name"] not in granted]:
        raise NotApproved(f"not paid: {claim.amount} {claim.currency} was not approved in this form by {missing}")
    return approvals


def _grants(approval: Approval, claim: Claim, flow_version: str) -> bool:
    return (
        approval.status == "approved"
        and approval.whole
        and all(vote.verdict == "approve" for vote in approval.votes)
        and approval.approvals_given >= approval.required
        and Claim.of_input(approval.request) == claim
        and approval.request_hash
        == request_hash(
            thread_id=approval.thread_id,
            interrupt_id=approval.interrupt_id,
            tier=approval.tier,
            flow_version=flow_version,
            claim=claim,
        )
    )


def build() -> StateGraph[State, Pen]:
    """The graph, not compiled: whoever drives it brings the saver."""
    graph = StateGraph(State, context_schema=Pen)
    graph.add_node("intake", intake)
    graph.add_node("decide", decide)
    graph.add_node("approve", approve)
    graph.add_node("pay", pay)
    graph.add_edge(START, "intake")
    graph.add_edge("intake", "decide")
    graph.add_conditional_edges("decide", _after_a_tier, ["approve", "pay", END])
    graph.add_conditional_edges("approve", _after_approval, ["approve", "decide", "pay", END])
    graph.add_edge("pay", END)
    return graph


async def _after_a_tier(state: State) -> str:
    if state["tier"] > 0 and not state["approved"]:
        return END
    return "approve" if state["tier"] < len(state["tiers"]) else "pay"


async def _after_approval(state: State) -> str:
    return await _after_a_tier(state) if state["tiers"] else "decide"


def _request_of(state: State) -> dict[str, Any]:
    return {
        "amount": state["amount"],
        "currency": state["currency"],
        "payee": state["payee"],
        "tier": state["tiers"][state["tier"]],
        "step": [state["tier"] + 1, len(state["tiers"])],
    }


def _claim_of(state: State) -> Claim:
    return Claim.of_input({name: state[name] for name in ("amount", "currency", "payee")})


class ClaimFlow(Flow):
    """The one flow that ends by its payment's row, and whose requests are older than `flow.questions`."""

    pays = True

    def begin(self, thread: Thread) -> Mapping[str, Any]:
        """Without the note, which stays in the thread's row."""
        claim = Claim.of_input(thread.input).as_input()
        return {"thread_id": thread.thread_id} | {name: claim[name] for name in ("amount", "currency", "payee")}

    def asks(self, thread: Thread, pause: Interrupt) -> Asked:
        shown = {name: pause.value[name] for name in ("amount", "currency", "payee")}
        tier = pause.value["tier"]["name"]
        digest = request_hash(
            thread_id=thread.thread_id,
            interrupt_id=pause.id,
            tier=tier,
            flow_version=thread.flow_version,
            claim=Claim.of_input(shown),
        )
        # What another release has asked has no step.
        step, steps = pause.value.get("step", (1, 1))
        return Asked(tier=tier, request=shown, digest=digest, step=(step, steps) if steps > 1 else None)

    def tier_of(self, asked: Asked, pause: Interrupt, policy: Policy) -> Tier:  # noqa: ARG002
        """As the state holds it, whatever the policy says by now."""
        return Tier.of_state(pause.value["tier"])


FLOW = ClaimFlow(name=CLAIM_FLOW, version=CLAIM_FLOW_VERSION, build=build, input=ClaimInput)
