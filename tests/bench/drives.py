"""What traces cost: the drives of a claim, warm and in this process, with their spans and without."""

from __future__ import annotations

import contextlib
import itertools
import statistics
import time
from collections.abc import AsyncIterator

from flow import inputs, threads
from flow.approvals import approvals_of, decide
from flow.claims import FLOW
from flow.database import Connection, connect
from flow.drive import drive, ensure_checkpoint_tables
from flow.flows import Flows
from flow.model import CLAIM_FLOW, CLAIM_FLOW_VERSION, Person, Verdict
from flow.policy import OneTier
from tests.bench.table import Probe, Row

WITH, WITHOUT = "a claim's drives, with spans", "a claim's drives, without"

# They may cost a tenth of a drive.
ROW = Row(ours=WITH, theirs=WITHOUT, at_least=1 / 1.1)

# Each way, by turns: one claim's drives vary by more than what is to be seen.
_CLAIMS = 20
_CLERK = Person(key="cli:bench", name="bench", names=frozenset({"cli:bench"}), trusted=True)


@contextlib.asynccontextmanager
async def drives(url: str) -> AsyncIterator[Probe]:
    """The probe, on a database with our tables."""
    numbers = itertools.count(1)
    async with await connect(url, "drive") as conn:
        await ensure_checkpoint_tables(url, conn)

        async def lives() -> dict[str, float]:
            took: dict[bool, list[float]] = {True: [], False: []}
            for _ in range(_CLAIMS):
                for spans, each in took.items():
                    each.append(await _live(conn, f"driven-{next(numbers)}", spans=spans))
            return {WITH: statistics.median(took[True]), WITHOUT: statistics.median(took[False])}

        yield lives


async def _live(conn: Connection, thread_id: str, *, spans: bool) -> float:
    """The drive to the request and the one to the payment, in ms."""
    policy, flows = OneTier(approvers=(), limits={}), Flows([FLOW])
    await threads.insert_thread(
        conn,
        thread_id=thread_id,
        flow=CLAIM_FLOW,
        flow_version=CLAIM_FLOW_VERSION,
        input=inputs.parse_claim(amount="250", currency="USD", payee="ACME").as_input(),
        requested_by="cli:ann",
    )
    began = time.perf_counter()
    assert await drive(conn, thread_id, flows=flows, policy=policy, spans=spans) == "waiting"
    asked = time.perf_counter()
    [approval] = (await approvals_of(conn, [thread_id]))[thread_id]
    await decide(conn, approval.interrupt_id, _CLERK, Verdict(verdict="approve", door="cli"))
    decided = time.perf_counter()
    assert await drive(conn, thread_id, flows=flows, policy=policy, spans=spans) == "over"
    return (time.perf_counter() - decided + asked - began) * 1000
