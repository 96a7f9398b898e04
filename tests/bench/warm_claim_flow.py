"""claim-flow in a warm process, as a stand-by is, but for one claim after the other: filed, driven, decided, driven."""

from __future__ import annotations

import asyncio
import os
from decimal import Decimal

from flow.approvals import approvals_of, decide
from flow.claims import FLOW
from flow.database import connect
from flow.drive import drive
from flow.flows import Flows
from flow.model import CLAIM_FLOW, CLAIM_FLOW_VERSION, Claim, Person, Verdict
from flow.policy import OneTier
from flow.threads import insert_thread
from tests.bench.warm import answer

_ALICE = Person(key="slack:T01BENCH/U01ALICE", name="alice", names=frozenset({"U01ALICE"}))


async def _main() -> None:
    flows, policy = Flows([FLOW]), OneTier(approvers=("U01ALICE",), limits={"USD": Decimal(100)})
    claim = Claim(amount=Decimal("250.00"), currency="USD", payee="ACME").as_input()
    async with await connect(os.environ["DATABASE_URL"], "drive") as conn:

        async def start(thread_id: str) -> None:
            await insert_thread(
                conn,
                thread_id=thread_id,
                flow=CLAIM_FLOW,
                flow_version=CLAIM_FLOW_VERSION,
                input=claim,
                requested_by="cli:bench",
            )
            outcome = await drive(conn, thread_id, flows=flows, policy=policy)
            assert outcome == "waiting", outcome

        async def resume(thread_id: str) -> None:
            [approval] = (await approvals_of(conn, [thread_id]))[thread_id]
            await decide(
                conn,
                approval.interrupt_id,
                _ALICE,
                Verdict(verdict="approve", door="slack", request_hash=approval.request_hash),
            )
            outcome = await drive(conn, thread_id, flows=flows, policy=policy)
            assert outcome == "over", outcome

        await answer(start=start, resume=resume)


if __name__ == "__main__":
    asyncio.run(_main())
