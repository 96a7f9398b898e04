"""The patterns that wait for people: approval, tiered approval, research with review; each cut off at every point."""

from __future__ import annotations

import asyncio
import collections
import contextlib
import signal
import sys
from typing import Any

import pytest

from flow.approvals import decide
from flow.database import Connection, connect
from flow.errors import BadInput
from flow.text import digest
from tests.boundaries import traps, until_sprung
from tests.drives import assert_never_two_drivers
from tests.pattern_runs import (
    Life,
    answer,
    asked_undisturbed,
    cut_off,
    drive_here,
    driven_in_a_process,
    effects_of,
    live,
    pattern,
    pending_of,
    result_of,
    start,
)
from tests.people import ALICE, NO, YES
from tests.pg_proxy import FaultingProxy
from tests.rows import all_rows, value

APPROVAL = {"amount": "50000.01", "payee": "ACME"}
TIERED = {"amount": "60000"}
RESEARCH = {"topic": "refund"}

LIVES = (
    Life(name="approval-yes", flow="approval", given=APPROVAL, drives=2, verdict=YES),
    Life(name="approval-no", flow="approval", given=APPROVAL, drives=2, verdict=NO),
    Life(name="tiered-yes", flow="tiered", given=TIERED, drives=3, verdict=YES),
    Life(name="research-yes", flow="research", given=RESEARCH, drives=2, verdict=YES),
    Life(name="research-no", flow="research", given=RESEARCH, drives=2, verdict=NO),
)
# Approvals, effects.
ONCE = {
    "approval-yes": (1, 1),
    "approval-no": (1, 0),
    "tiered-yes": (2, 1),
    "research-yes": (1, 1),
    "research-no": (1, 1),
}


# Killed


@pytest.mark.timeout(300)
@pytest.mark.parametrize("life", LIVES, ids=lambda life: life.name)
async def test_a_thread_cut_off_at_any_point_asks_once_acts_once_and_has_its_result(
    database_url: str, conn: Connection, tally: collections.Counter[str], life: Life
) -> None:
    await start(conn, life.flow, "undisturbed", **life.given)
    expected = without_keys(await live(conn, "undisturbed", life.verdict))
    async with FaultingProxy(database_url) as proxy:
        points = 0
        for number in range(life.drives):
            await life.due(conn, f"probe-{number}", number)
            asked = await asked_undisturbed(proxy, f"probe-{number}")
            for trap in traps(asked, "cut"):
                await life.due(conn, f"cut-{number}-{trap.at:03}", number)
                await cut_off(proxy, f"cut-{number}-{trap.at:03}", trap)
                points += 1
        tally["points"] += len(await until_sprung(proxy, points))
    for row in await all_rows(conn, "SELECT thread_id FROM threads WHERE thread_id LIKE 'cut-%%'"):
        thread_id = row["thread_id"]
        assert without_keys(await live(conn, thread_id, life.verdict)) == expected, thread_id
        asked = await value(conn, "SELECT count(*) FROM approvals WHERE thread_id = %s", thread_id)
        assert (asked, len(await effects_of(conn, thread_id))) == ONCE[life.name], thread_id
    await assert_never_two_drivers(conn)


@pytest.mark.skipif(sys.platform != "linux", reason="who is at the end of a socket is asked Linux's way")
async def test_a_process_killed_between_the_ledgers_entry_and_its_record_enters_it_once(
    database_url: str, conn: Connection
) -> None:
    """And a new process gives the same entry: it is made of the same key."""
    async with FaultingProxy(database_url) as proxy:
        await start(conn, "tiered", "probe", amount="1000")
        asked = await asked_undisturbed(proxy, "probe")
        await start(conn, "tiered", "t1", amount="1000")
        proxy.lay("t1", next(trap for trap in traps(asked, "kill") if asked[trap.at - 1].startswith("UPDATE effects")))
        assert await driven_in_a_process(proxy.url, "t1") == -signal.SIGKILL
    assert await effects_of(conn, "t1") == [{"name": "flow.patterns.tiered.enter", "status": "started", "attempt": 1}]
    result = await live(conn, "t1", YES)
    assert await effects_of(conn, "t1") == [{"name": "flow.patterns.tiered.enter", "status": "done", "attempt": 2}]
    installation = await value(conn, "SELECT id::text FROM installation")
    key = await value(conn, "SELECT key FROM effects WHERE thread_id = 't1'")
    assert result["entry"] == f"1000.00: {digest([installation, 't1', key])[:12]}"


# Approval


async def test_up_to_50_000_nobody_is_asked(conn: Connection) -> None:
    await start(conn, "approval", "t1", amount="50000", payee="ACME")
    assert await drive_here(conn, "t1") == "over"
    result = await result_of(conn, "t1")
    assert (result["status"], result["entry"].split(":")[0]) == ("booked", "50000.00 to ACME")
    assert await all_rows(conn, "SELECT * FROM approvals") == []


async def test_over_50_000_a_vp_is_asked_before_the_ledger_is_touched(conn: Connection) -> None:
    await start(conn, "approval", "t1", **APPROVAL)
    assert await drive_here(conn, "t1") == "waiting"
    assert [each["tier"] for each in await pending_of(conn, "t1")] == ["vp"]
    assert await effects_of(conn, "t1") == []
    await answer(conn, "t1", YES)
    assert await drive_here(conn, "t1") == "over"
    assert (await result_of(conn, "t1"))["status"] == "booked"
    assert len(await effects_of(conn, "t1")) == 1


async def test_a_vps_reason_to_reject_reaches_the_result_and_the_ledger_stays_as_it_is(conn: Connection) -> None:
    await start(conn, "approval", "t1", **APPROVAL)
    assert await live(conn, "t1", NO) == {"status": "rejected", "reason": NO.reason}
    assert await effects_of(conn, "t1") == []


# Tiered


@pytest.mark.parametrize(
    ("amount", "tiers"),
    [("1000", []), ("1000.01", ["manager"]), ("50000", ["manager"]), ("50000.01", ["manager", "vp"])],
)
async def test_each_tier_that_the_amount_is_over_is_asked_in_turn(
    conn: Connection, amount: str, tiers: list[str]
) -> None:
    await start(conn, "tiered", "t1", amount=amount)
    for tier in tiers:
        assert await drive_here(conn, "t1") == "waiting"
        assert [each["tier"] for each in await pending_of(conn, "t1")] == [tier]
        assert await effects_of(conn, "t1") == []
        await answer(conn, "t1", YES)
    assert await drive_here(conn, "t1") == "over"
    assert (await result_of(conn, "t1"))["status"] == "booked"
    assert len(await effects_of(conn, "t1")) == 1


@pytest.mark.parametrize("rejecting", ["manager", "vp"])
async def test_the_first_tier_that_rejects_is_the_last_that_is_asked(conn: Connection, rejecting: str) -> None:
    await start(conn, "tiered", "t1", **TIERED)
    while await drive_here(conn, "t1") == "waiting":
        [pending] = await pending_of(conn, "t1")
        await answer(conn, "t1", NO if pending["tier"] == rejecting else YES)
    assert await result_of(conn, "t1") == {"status": "rejected", "tier": rejecting, "reason": NO.reason}
    assert await effects_of(conn, "t1") == []


async def test_the_managers_click_delivered_six_times_at_once_never_passes_the_vp(
    database_url: str, conn: Connection, tally: collections.Counter[str]
) -> None:
    """Twenty rounds, with two drives beside the deliveries, and once more when the VP is waited for."""
    async with contextlib.AsyncExitStack() as stack:
        doors = [await stack.enter_async_context(await connect(database_url, "door")) for _ in range(6)]
        drivers = [await stack.enter_async_context(await connect(database_url, "drive")) for _ in range(2)]
        for thread_id in (f"t{number}" for number in range(20)):
            await start(conn, "tiered", thread_id, **TIERED)
            assert await drive_here(conn, thread_id) == "waiting"
            [manager] = await pending_of(conn, thread_id)
            decided, _ = await asyncio.gather(
                asyncio.gather(*(decide(door, manager["interrupt_id"], ALICE, YES) for door in doors)),
                asyncio.gather(*(drive_here(driver, thread_id) for driver in drivers)),
            )
            assert await drive_here(conn, thread_id) == "waiting"
            again = await asyncio.gather(*(decide(door, manager["interrupt_id"], ALICE, YES) for door in doors))
            assert [each.recorded for each in (*decided, *again)].count(True) == 1
            assert await drive_here(conn, thread_id) == "waiting"
            [waiting] = await pending_of(conn, thread_id)
            assert waiting["tier"] == "vp"
            assert await effects_of(conn, thread_id) == []
            tally["deliveries of a manager's click"] += len(doors) * 2
    assert await value(conn, "SELECT count(*) FROM decisions") == 20
    await decide(conn, waiting["interrupt_id"], ALICE, YES)
    assert await drive_here(conn, thread_id) == "over"
    assert len(await effects_of(conn, thread_id)) == 1


# Research


async def test_an_analyst_sees_what_was_found_and_it_is_what_is_reported(conn: Connection) -> None:
    await start(conn, "research", "t1", topic="Refund")
    assert await drive_here(conn, "t1") == "waiting"
    assert [each["tier"] for each in await pending_of(conn, "t1")] == ["analyst"]
    [[label, shown]] = (await value(conn, "SELECT request FROM approvals"))["fields"]
    assert (label, len(shown.splitlines())) == ("Found", 2)
    await answer(conn, "t1", YES)
    assert await drive_here(conn, "t1") == "over"
    result = await result_of(conn, "t1")
    assert result == {"status": "reported", "topic": "Refund", "report": shown.splitlines()}
    assert all("refund" in line.lower() for line in result["report"])


async def test_an_analyst_is_asked_also_when_nothing_was_found(conn: Connection) -> None:
    await start(conn, "research", "t1", topic="whales")
    assert await drive_here(conn, "t1") == "waiting"
    assert (await value(conn, "SELECT request FROM approvals"))["fields"] == [["Found", "nothing"]]


async def test_a_rejected_review_ends_with_its_reason_and_without_a_report(conn: Connection) -> None:
    await start(conn, "research", "t1", **RESEARCH)
    assert await live(conn, "t1", NO) == {"status": "rejected", "reason": NO.reason}


# Inputs


@pytest.mark.parametrize(
    ("flow", "given"),
    [
        ("approval", {"amount": "60000"}),
        ("approval", {"amount": "-1", "payee": "ACME"}),
        ("tiered", {}),
        ("tiered", {"amount": "sixty"}),
        ("research", {"topic": ""}),
        ("fan-out", {"urls": []}),
        ("fan-out", {"urls": ["file:///etc/passwd"]}),
        ("batch", {"items": "i0"}),
        ("three-steps", {"seconds": 1000}),
    ],
)
def test_what_a_pattern_cannot_use_is_refused_before_anything_is_written(flow: str, given: dict[str, Any]) -> None:
    with pytest.raises(BadInput):
        pattern(flow).checked(given)


def without_keys(result: dict[str, Any]) -> dict[str, Any]:
    """What all threads of one life have in common: an entry ends with its thread's key."""
    return {name: text.split(":")[0] if name == "entry" else text for name, text in result.items()}
