"""Events are written where they become true, and whoever reads them in order misses none."""

from __future__ import annotations

import asyncio
import json
import uuid
from collections.abc import AsyncIterator
from typing import Any

import pytest

from flow import events, payments, threads
from flow.approvals import decide
from flow.database import Connection
from flow.deadlines import expire_overdue
from flow.drive import drive
from flow.errors import EventsForgotten, EventUnknown
from flow.events import events_after, page_after, record_events
from flow.flows import Flows
from flow.inputs import parse_claim
from flow.model import Event
from flow.policy import Tier
from tests.api_door import Program, api_in_process, token
from tests.bank import Bank
from tests.driving import graph_of, run, waiting_claim
from tests.people import ALICE, ANN, BOB, NO, POLICY, TWO_OF_THREE, YES, ask, start_claim
from tests.rows import all_rows, value
from tests.test_payments import provider_at


async def types(conn: Connection) -> list[str]:
    return [row["type"] for row in await all_rows(conn, "SELECT type FROM events ORDER BY id")]


async def last(conn: Connection) -> Any:
    return await value(conn, "SELECT data FROM events ORDER BY id DESC LIMIT 1")


# What is recorded


async def test_each_step_of_a_claim_is_an_event(conn: Connection, flows: Flows) -> None:
    interrupt_id = await waiting_claim(conn, flows)
    asked = await last(conn)
    await decide(conn, interrupt_id, ALICE, YES)
    decided = await last(conn)
    assert await run(conn, flows) == "over"
    paid = await last(conn)
    assert await types(conn) == ["approval.requested", "approval.voted", "approval.decided", "payment.paid"]
    digest = await value(conn, "SELECT request_hash FROM approvals")
    assert asked == {
        "thread": "t1",
        "workspace": None,
        "interrupt_id": interrupt_id,
        "title": None,
        "amount": "250.00",
        "currency": "USD",
        "payee": "ACME",
        "tier": "approval",
        "request_hash": digest,
        "status": "pending",
        "decisions": [],
        "payment": None,
        "result": None,
    }
    [vote] = decided["decisions"]
    assert vote == {
        "person": ALICE.key, "for_person": None, "verdict": "approve", "door": "slack", "at": vote["at"]
    }  # fmt: skip
    assert decided == asked | {"status": "approved", "decisions": decided["decisions"]}
    nothing = {"interrupt_id": None, "tier": None, "request_hash": None}
    assert paid == decided | nothing | {"status": "paid", "payment": "L-t1"}


async def test_the_note_is_in_no_event(conn: Connection, flows: Flows) -> None:
    interrupt_id = await waiting_claim(conn, flows)
    await decide(conn, interrupt_id, ALICE, YES)
    await run(conn, flows)
    assert "three chairs" in str(await all_rows(conn, "SELECT input FROM threads"))
    assert "three chairs" not in json.dumps([row["data"] for row in await all_rows(conn, "SELECT data FROM events")])


async def test_each_vote_is_an_event_and_the_last_one_a_decision_too(conn: Connection) -> None:
    interrupt_id = await ask(conn, tier=TWO_OF_THREE)
    await decide(conn, interrupt_id, ALICE, YES)
    await decide(conn, interrupt_id, ALICE, YES)
    assert await types(conn) == ["approval.requested", "approval.voted"]
    assert (await last(conn))["status"] == "pending"
    await decide(conn, interrupt_id, BOB, NO)
    await decide(conn, interrupt_id, ANN, NO)
    assert await types(conn) == ["approval.requested", "approval.voted", "approval.voted", "approval.decided"]
    assert [vote["verdict"] for vote in (await last(conn))["decisions"]] == ["approve", "reject"]
    assert (await last(conn))["status"] == "rejected"


async def test_an_approval_that_expires_is_an_event(conn: Connection) -> None:
    await ask(conn, tier=Tier(name="approval", approvers=POLICY.approvers, expires_after_s=0))
    assert await expire_overdue(conn) == 1
    assert await expire_overdue(conn) == 0
    assert await types(conn) == ["approval.requested", "approval.expired"]
    assert (await last(conn))["status"] == "expired"


async def test_a_payment_is_one_event_however_often_it_is_made(conn: Connection) -> None:
    await start_claim(conn, amount="20")
    claim = parse_claim(amount="20", currency="USD", payee="ACME")
    for _ in range(2):
        await payments.pay_from_ledger(conn, "t1", claim, [])
    assert await types(conn) == ["payment.paid"]


async def test_a_payment_outside_is_one_event(conn: Connection, flows: Flows) -> None:
    async with Bank() as bank:
        await start_claim(conn, amount="20")
        await drive(conn, "t1", flows=flows, policy=POLICY, provider=provider_at(bank))
        bank.faults.append(402)
        await start_claim(conn, "t2", amount="20")
        await drive(conn, "t2", flows=flows, policy=POLICY, provider=provider_at(bank))
    # One that the service refuses is none.
    assert await types(conn) == ["payment.paid"]
    assert ((await last(conn))["payment"], (await last(conn))["decisions"]) == ("B-1", [])


async def test_a_payment_that_nobody_knows_of_is_an_event_and_so_is_what_a_person_says(
    conn: Connection, flows: Flows
) -> None:
    async with Bank() as bank:
        bank.faults.append("lost")
        await start_claim(conn, amount="20")
        await conn.execute("UPDATE threads SET attempts = %s", (threads.MAX_ATTEMPTS - 1,))
        assert await drive(conn, "t1", flows=flows, policy=POLICY, provider=provider_at(bank)) == "stuck"
    assert await types(conn) == ["payment.unknown"]
    assert ((await last(conn))["status"], (await last(conn))["payment"]) == ("unknown", None)
    for _ in range(2):
        await payments.resolve(conn, "t1", reference="B-1", by="cli:ann")
    assert await types(conn) == ["payment.unknown", "payment.paid"]
    assert (await last(conn))["payment"] == "B-1"


async def test_a_payment_that_was_not_made_after_all_is_no_payment(conn: Connection) -> None:
    await start_claim(conn, amount="20")
    await payments.intend(conn, "t1", parse_claim(amount="20", currency="USD", payee="ACME"), provider_at(Bank()))
    assert await payments.give_up(conn, "t1", "no answer")
    await threads.mark_unknown(conn, "t1")
    await payments.resolve(conn, "t1", reference=None, by="cli:ann")
    assert await types(conn) == ["payment.unknown"]


async def test_each_time_that_a_thread_gets_stuck_is_an_event(conn: Connection) -> None:
    async def fails(_: object) -> None:
        raise ValueError("broken")

    await start_claim(conn)
    for _ in range(2):
        await threads.wake(conn, "t1")
        await conn.execute("UPDATE threads SET attempts = %s", (threads.MAX_ATTEMPTS - 1,))
        assert await run(conn, graph_of(fails)) == "stuck"
        assert await run(conn, graph_of(fails)) == "stuck"
    assert await types(conn) == ["thread.stuck", "thread.stuck"]
    assert (await last(conn))["status"] == "stuck"
    assert "broken" not in json.dumps(await last(conn))


async def test_what_is_rolled_back_has_not_happened(conn: Connection) -> None:
    interrupt_id = await ask(conn)
    async with conn.transaction(force_rollback=True):
        await decide(conn, interrupt_id, ALICE, YES)
        assert "approval.decided" in await types(conn)
    assert await types(conn) == ["approval.requested"]


# Reading in order


async def test_an_event_that_is_committed_late_comes_after_what_was_read_before_it(
    conn: Connection, crowd: list[Connection]
) -> None:
    slow, quick, reader, _ = crowd
    async with slow.transaction():
        await ask(slow, "t1")
        # It gets a later id, and is there first.
        await ask(quick, "t2")
        [seen] = await events_after(reader, 0, limit=10)
        assert seen.data["thread"] == "t2"
        assert await events_after(reader, seen.position or 0, limit=10) == []
    [late] = await events_after(reader, seen.position or 0, limit=10)
    assert late.data["thread"] == "t1"
    assert late.id < seen.id


async def test_a_long_transaction_keeps_no_event_of_others_back(conn: Connection, crowd: list[Connection]) -> None:
    long, reader, *_ = crowd
    async with long.transaction():
        await long.execute("INSERT INTO receipts (door, sender, key, body_sha256) VALUES ('api', 'a', 'k', '')")
        await ask(conn)
        assert len(await events_after(reader, 0, limit=10)) == 1


async def test_readers_at_once_agree_on_the_order(conn: Connection, crowd: list[Connection]) -> None:
    for number in range(10):
        await ask(conn, f"t{number}")
    read = await asyncio.gather(*(events_after(reader, 0, limit=100) for reader in crowd))
    assert all(each == read[0] for each in read)
    assert [event.data["thread"] for event in read[0]] == [f"t{number}" for number in range(10)]


# Over HTTP


@pytest.fixture
async def robot(database_url: str, conn: Connection) -> AsyncIterator[Program]:
    async with api_in_process(database_url) as url, Program(url, await token(conn, scopes=("read",))) as program:
        yield program


async def test_events_are_listed_oldest_first_and_a_page_at_a_time(robot: Program, conn: Connection) -> None:
    for thread_id in ("t1", "t2", "t3"):
        await ask(conn, thread_id)
    first = (await robot.get("/api/events", limit=2)).body
    assert [item["data"]["thread"] for item in first["items"]] == ["t1", "t2"]
    assert first["items"][0]["type"] == "approval.requested"
    second = (await robot.get("/api/events", limit=2, cursor=first["next"])).body
    assert [item["data"]["thread"] for item in second["items"]] == ["t3"]


async def test_the_end_of_the_events_is_where_the_next_ones_are_asked_for(robot: Program, conn: Connection) -> None:
    nothing = (await robot.get("/api/events")).body
    assert nothing == {"items": [], "next": 0}
    interrupt_id = await ask(conn)
    place = (await robot.get("/api/events", cursor=nothing["next"])).body["next"]
    assert (await robot.get("/api/events", cursor=place)).body == {"items": [], "next": place}
    await decide(conn, interrupt_id, ALICE, YES)
    page = (await robot.get("/api/events", cursor=place)).body
    assert [item["type"] for item in page["items"]] == ["approval.voted", "approval.decided"]


async def test_events_are_for_tokens_that_may_read(robot: Program, conn: Connection) -> None:
    other = await token(conn, "clerk", ("decide",))
    assert (await robot.ask("GET", "/api/events", headers={"Authorization": f"Bearer {other}"})).status == 403


# One workspace of several


async def pay_in(conn: Connection, *workspaces: str) -> None:
    """One more event in each of these."""
    for workspace in workspaces:
        thread_id = f"t{uuid.uuid4()}"
        query = "INSERT INTO threads (thread_id, flow, flow_version, input, requested_by, workspace) VALUES"
        await conn.execute(f"{query} (%s, 'claims', '1', '{{}}', 'cli:ann', %s)", (thread_id, workspace))
        await record_events(conn, thread_id, "payment.paid", data={"thread": thread_id})


@pytest.fixture
async def two(conn: Connection) -> Connection:
    await conn.execute(
        "INSERT INTO workspaces (workspace, name, token, installed_by) SELECT w, w, 'sealed', 'cli:ann'"
        " FROM unnest('{T01OURS,T02THEIRS}'::text[]) AS w"
    )
    return conn


async def test_whoever_reads_one_workspace_gets_all_of_it_and_nothing_else(two: Connection) -> None:
    await pay_in(two, *["T01OURS", "T02THEIRS", "T02THEIRS"] * 4)
    read: list[Event] = []
    place, following = -1, 0
    while following > place:
        place = following
        found, following = await page_after(two, place, limit=3, workspace="T01OURS")
        read += found
    assert [event.data["workspace"] for event in read] == ["T01OURS"] * 4
    everything, _ = await page_after(two, 0, limit=100)
    assert [event.data["workspace"] for event in everything] == ["T01OURS", "T02THEIRS", "T02THEIRS"] * 4


async def test_what_is_forgotten_of_others_is_no_loss_to_whoever_keeps_reading(two: Connection) -> None:
    await pay_in(two, "T01OURS", "T02THEIRS", "T02THEIRS")
    found, place = await page_after(two, 0, limit=10, workspace="T01OURS")
    assert [event.position for event in found] == [1] and place == 3
    await two.execute("DELETE FROM events")
    await two.execute("UPDATE installation SET events_forgotten = 3")
    # Nothing of theirs was forgotten behind the place that they were given, only behind what they read last.
    assert await page_after(two, place, limit=10, workspace="T01OURS") == ([], 3)
    with pytest.raises(EventsForgotten):
        await page_after(two, 1, limit=10, workspace="T01OURS")
    with pytest.raises(EventUnknown):
        await page_after(two, 4, limit=10, workspace="T01OURS")


async def test_what_becomes_visible_while_a_page_is_read_is_on_the_next(
    two: Connection, crowd: list[Connection], monkeypatch: pytest.MonkeyPatch
) -> None:
    other, *_ = crowd

    async def and_then_one_more(conn: Connection, *args: Any, **more: Any) -> Any:
        found = await events_after(conn, *args, **more)
        await pay_in(other, "T01OURS")
        await events_after(other, 0, limit=1)
        return found

    await pay_in(two, "T02THEIRS")
    with monkeypatch.context() as patch:
        patch.setattr(events, "events_after", and_then_one_more)
        found, place = await page_after(two, 0, limit=10, workspace="T01OURS")
    assert found == []
    [late], _ = await page_after(two, place, limit=10, workspace="T01OURS")
    assert late.data["workspace"] == "T01OURS"
