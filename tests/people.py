"""The people of the tests, and the shortest way to a claim that waits for them."""

from __future__ import annotations

from flow import threads
from flow.approvals import request_approval
from flow.database import Connection
from flow.delegations import away
from flow.inputs import parse_claim
from flow.model import CLAIM_FLOW, CLAIM_FLOW_VERSION, Person, Thread, Verdict, request_hash
from flow.policy import LIMITS, OneTier, Tier
from tests.rows import value


def slack_person(member: str, name: str) -> Person:
    key = f"slack:T01TEST/{member}"
    return Person(key=key, name=name, names=frozenset({key, member}))


ALICE = slack_person("U01ALICE", "Alice")
BOB = slack_person("U02BOB", "Bob")
CAROL = slack_person("U03CAROL", "Carol")
# On nobody's list.
EVE = slack_person("U66EVE", "Eve")
# At the command line, and the one who starts the tests' claims.
ANN = Person(key="cli:ann", name="ann", names=frozenset({"cli:ann"}), trusted=True)

POLICY = OneTier(approvers=("U01ALICE", "U02BOB", "U03CAROL"), limits=LIMITS)
ONE_OF_THREE = Tier(name="approval", approvers=POLICY.approvers)
TWO_OF_THREE = Tier(name="approval", approvers=POLICY.approvers, required=2)

YES = Verdict(verdict="approve", door="slack")
NO = Verdict(verdict="reject", door="slack", reason="not this quarter")


async def start_claim(
    conn: Connection,
    thread_id: str = "t1",
    amount: str = "250",
    *,
    currency: str = "USD",
    requested_by: str = ANN.key,
    payee: str = "ACME",
    workspace: str | None = None,
) -> Thread:
    """A thread that is due, as every door starts one. Over 100 USD waits for a person."""
    claim = parse_claim(amount=amount, currency=currency, payee=payee, note="three chairs")
    return await threads.insert_thread(
        conn,
        thread_id=thread_id,
        flow=CLAIM_FLOW,
        flow_version=CLAIM_FLOW_VERSION,
        input=claim.as_input(),
        requested_by=requested_by,
        workspace=workspace,
    )


async def ask(
    conn: Connection,
    thread_id: str = "t1",
    *,
    tier: Tier = ONE_OF_THREE,
    requested_by: str = ANN.key,
    payee: str = "ACME",
    workspace: str | None = None,
) -> str:
    """The interrupt id of a pending approval of a waiting thread, as a drive leaves them, but without LangGraph."""
    thread = await start_claim(conn, thread_id, requested_by=requested_by, payee=payee, workspace=workspace)
    interrupt_id = thread_id.encode().hex().rjust(32, "0")[-32:]
    claim = parse_claim(amount="250", currency="USD", payee=payee)
    async with conn.transaction():
        await request_approval(
            conn,
            thread,
            interrupt_id=interrupt_id,
            tier=tier,
            request={"amount": "250.00", "currency": "USD", "payee": payee},
            request_hash=request_hash(
                thread_id=thread_id,
                interrupt_id=interrupt_id,
                tier=tier.name,
                flow_version=CLAIM_FLOW_VERSION,
                claim=claim,
            ),
        )
        assert await threads.leave(conn, thread, status="waiting")
    return interrupt_id


async def stand_in(conn: Connection, person: Person, delegate: str) -> None:
    """The person is away until tomorrow."""
    then = await value(conn, "SELECT clock_timestamp() + interval '1 day'")
    async with conn.transaction():
        await away(conn, person, to=delegate, until=then, made_by=person.key)
