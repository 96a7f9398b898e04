"""The payment pattern: whatever dies, wherever: charged once, refunded at most once, one receipt.

What counts is what a service outside has done, which knows idempotency keys as payment services do.
"""

from __future__ import annotations

import asyncio
import collections
import signal
import sys
from collections.abc import AsyncIterator, Sequence
from typing import Any

import pytest

from flow.database import Connection
from flow.errors import BadInput, DriveFailed
from tests.boundaries import few_at_once, traps, until_sprung
from tests.outside import Outside
from tests.pattern_runs import (
    Life,
    answer,
    asked_undisturbed,
    drive_here,
    driven_in_a_process,
    effects_of,
    live,
    pattern,
    result_of,
    start,
)
from tests.people import NO, YES
from tests.pg_proxy import FaultingProxy, Trap
from tests.rows import all_rows, value

# Of their five drives four differ: a large payment is charged the same way whatever becomes of it.
SMALL = Life(name="small", flow="payment", given={"amount": "1000"}, drives=1, verdict=YES)
APPROVED = Life(name="approved", flow="payment", given={"amount": "1000.01"}, drives=2, verdict=YES)
REJECTED = Life(name="rejected", flow="payment", given={"amount": "2000"}, drives=2, verdict=NO)
DRIVES = ((SMALL, 0), (APPROVED, 0), (APPROVED, 1), (REJECTED, 1))

ORDERED = {
    "small": ["charges", "receipts"],
    "approved": ["charges", "receipts"],
    "rejected": ["charges", "refunds", "receipts"],
}


@pytest.fixture
async def outside(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Outside]:
    monkeypatch.setenv("WEBHOOK_ALLOW_PRIVATE", "true")
    async with Outside() as outside:
        yield outside


@pytest.mark.skipif(sys.platform != "linux", reason="who is at the end of a socket is asked Linux's way")
@pytest.mark.timeout(300)
async def test_a_payment_killed_at_any_point_charges_once_refunds_at_most_once_and_sends_one_receipt(
    database_url: str, conn: Connection, outside: Outside, tally: collections.Counter[str]
) -> None:
    """SIGKILL before each round trip of its drives; and after those that are followed by a call to the outside, which
    then was claimed and never made."""

    async def kill(proxy: FaultingProxy, life: Life, number: int, trap: Trap) -> None:
        thread_id = f"{life.name}-{number}-{trap.when}-{trap.at:03}"
        async with alone:
            await life.due(conn, thread_id, number, url=f"{outside.url}/{thread_id}")
        proxy.lay(thread_id, trap)
        assert await driven_in_a_process(proxy.url, thread_id) == -signal.SIGKILL

    alone = asyncio.Lock()
    async with FaultingProxy(database_url) as proxy:
        for life, number in DRIVES:
            probe = f"{life.name}-{number}-probe"
            await life.due(conn, probe, number, url=f"{outside.url}/{probe}")
            asked = await asked_undisturbed(proxy, probe)
            planned = [*traps(asked, "kill"), *(Trap(at=at, when="after") for at in _claims(asked))]
            tally["points"] += len(planned)
            await few_at_once(kill(proxy, life, number, trap) for trap in planned)
        tally["kills"] += len(await until_sprung(proxy, tally["points"]))
    await assert_all_come_to_their_end(conn, outside)
    tally["requests"] += len(outside.asked)
    for what in ("charges", "refunds", "receipts"):
        tally[what] += sum(each.path.endswith(what) for each in outside.done)
    tally["threads"] += await value(conn, "SELECT count(*) FROM threads")
    # Some were killed after the service had done it and before that was recorded.
    assert len(outside.asked) > len(outside.done)


async def assert_all_come_to_their_end(conn: Connection, outside: Outside) -> None:
    """Each thread, healed, has its result, and had each thing done once, in order, under one key."""
    for row in await all_rows(conn, "SELECT thread_id FROM threads"):
        thread_id = row["thread_id"]
        name, _, _ = thread_id.partition("-")
        result = await live(conn, thread_id, REJECTED.verdict if name == "rejected" else YES)
        done = [each for each in outside.done if each.path.startswith(f"/{thread_id}/")]
        assert [each.path.rpartition("/")[2] for each in done] == ORDERED[name], thread_id
        assert result["status"] == ("refunded" if name == "rejected" else "charged"), thread_id
        keys = [each.key for each in outside.asked if each.path.startswith(f"/{thread_id}/")]
        assert list(dict.fromkeys(keys)) == [each.key for each in done], thread_id


def _claims(asked: Sequence[str]) -> list[int]:
    """The round trips, from 1, that commit the claim of a call."""
    claims = [at for at, statement in enumerate(asked, 1) if statement.startswith("INSERT INTO effects")]
    return [at + asked[at:].index("COMMIT") + 1 for at in claims]


# What it does


async def test_a_small_payment_is_charged_and_gets_its_receipt(conn: Connection, outside: Outside) -> None:
    await start(conn, "payment", "t1", amount="1000", url=outside.url)
    assert await drive_here(conn, "t1") == "over"
    assert await result_of(conn, "t1") == {"status": "charged", "charge": "O-1", "receipt": "O-2"}
    assert [(each.path, each.body) for each in outside.done] == [
        ("/charges", {"amount": "1000.00"}),
        ("/receipts", {"status": "charged", "charge": "O-1"}),
    ]


async def test_a_large_payment_is_charged_before_anybody_is_asked_and_kept_if_it_is_approved(
    conn: Connection, outside: Outside
) -> None:
    await start(conn, "payment", "t1", amount="1000.01", url=outside.url)
    assert await drive_here(conn, "t1") == "waiting"
    assert outside.done_by_path == {"/charges": 1}
    request = await value(conn, "SELECT request FROM approvals")
    assert (request["amount"], request["currency"], request["fields"]) == ("1000.01", "USD", [["Charge", "O-1"]])
    await answer(conn, "t1", YES)
    assert await drive_here(conn, "t1") == "over"
    assert await result_of(conn, "t1") == {"status": "charged", "charge": "O-1", "receipt": "O-2"}


async def test_a_rejected_payment_is_refunded_and_its_receipt_says_why(conn: Connection, outside: Outside) -> None:
    await start(conn, "payment", "t1", amount="2000", url=outside.url)
    assert await live(conn, "t1", NO) == {
        "status": "refunded",
        "charge": "O-1",
        "refund": "O-2",
        "reason": NO.reason,
        "receipt": "O-3",
    }
    assert [each.path for each in outside.done] == ["/charges", "/refunds", "/receipts"]
    assert outside.done[1].body == {"charge": "O-1"}
    assert outside.done[2].body["reason"] == NO.reason


@pytest.mark.parametrize("status", [302, 402, 503])
async def test_a_service_that_fails_is_asked_again_under_the_same_key(
    conn: Connection, outside: Outside, status: int
) -> None:
    outside.failing["/charges"] = status
    await start(conn, "payment", "t1", amount="20", url=outside.url)
    with pytest.raises(DriveFailed, match=str(status)):
        await drive_here(conn, "t1")
    assert outside.done == []
    outside.failing.clear()
    assert await drive_here(conn, "t1") == "over"
    [first, second, _receipt] = outside.asked
    assert first.key == second.key
    assert [effect["attempt"] for effect in await effects_of(conn, "t1")] == [2, 1]


@pytest.mark.parametrize(
    "said",
    [{"reference": None}, {"reference": ""}, {"reference": ["O-1"]}, {"reference": True}, {}, ["O-1"], "O-1"],
    ids=repr,
)
async def test_an_answer_without_a_reference_is_no_charge_and_the_service_is_asked_again(
    conn: Connection, outside: Outside, said: Any
) -> None:
    outside.saying["/charges"] = said
    await start(conn, "payment", "t1", amount="20", url=outside.url)
    with pytest.raises(DriveFailed, match="without a reference"):
        await drive_here(conn, "t1")
    outside.saying.clear()
    assert await drive_here(conn, "t1") == "over"
    assert (await result_of(conn, "t1"))["charge"] == "O-1"
    assert outside.done_by_path == {"/charges": 1, "/receipts": 1}


@pytest.mark.parametrize("reference", ["4111111111111111", "sk_live_" + "4eC39HqLyjWDarjtT1", 4111111111111111])
async def test_a_reference_that_looks_like_a_secret_is_reviewed(
    conn: Connection, outside: Outside, reference: str | int
) -> None:
    """The money has moved: nobody could refund what nobody can be asked about."""
    outside.saying["/charges"] = {"reference": reference}
    await start(conn, "payment", "t1", amount="2000", url=outside.url)
    assert await drive_here(conn, "t1") == "waiting"
    assert await value(conn, "SELECT request->'fields' FROM approvals") == [["Charge", str(reference)]]


async def test_without_a_service_every_thread_has_references_of_its_own(conn: Connection) -> None:
    references = set()
    for thread_id in ("t1", "t2"):
        await start(conn, "payment", thread_id, amount="2000")
        result = await live(conn, thread_id, NO)
        references |= {result["charge"], result["refund"], result["receipt"]}
        assert [effect["status"] for effect in await effects_of(conn, thread_id)] == ["done"] * 3
    assert len(references) == 6


@pytest.mark.parametrize(
    "given", [{}, {"amount": "0"}, {"amount": "1.005"}, {"amount": "NaN"}, {"amount": "20", "url": "ftp://bank"}]
)
def test_what_cannot_be_charged_is_refused_before_anything_happens(given: dict[str, Any]) -> None:
    with pytest.raises(BadInput):
        pattern("payment").checked(given)


@pytest.mark.parametrize("url", ["https://bank/pay?key=1", "https://bank/pay?", "https://bank/#pay"])
def test_a_service_whose_url_nothing_can_be_added_to_is_refused(url: str) -> None:
    with pytest.raises(BadInput, match="has a query or a fragment: /charges, /refunds and /receipts come after it"):
        pattern("payment").checked({"amount": "20", "url": url})


async def test_an_amount_with_an_exponent_is_charged_and_asked_about_in_plain_digits(conn: Connection) -> None:
    await start(conn, "payment", "t1", amount="2E+3")
    assert await drive_here(conn, "t1") == "waiting"
    assert (await value(conn, "SELECT request FROM approvals"))["amount"] == "2000.00"
