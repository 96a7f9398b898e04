"""Paying outside: the service is asked between two commits, once, or again only where that is safe."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator
from dataclasses import replace
from decimal import Decimal
from pathlib import Path

import pytest

from flow import payments, threads
from flow.database import Connection, connect, ensure_schema
from flow.drive import Outcome, drive
from flow.errors import DriveFailed, NothingToResolve
from flow.flows import Flows
from flow.model import Payment
from flow.providers import HttpProvider, Order
from tests.bank import Bank, Fault
from tests.command import Terminal
from tests.people import POLICY, start_claim
from tests.rows import all_rows, value

DAY_S = 86_400.0


@pytest.fixture
async def bank() -> AsyncIterator[Bank]:
    async with Bank() as made:
        yield made


def provider_at(
    bank: Bank, *, key_lifetime_s: float = DAY_S, can_look_up: bool = False, timeout_s: float = 2.0
) -> HttpProvider:
    return HttpProvider(
        url=bank.url,
        token="secret",
        timeout_s=timeout_s,
        key_lifetime_s=key_lifetime_s,
        lookup_url=bank.url if can_look_up else None,
    )


async def pay(conn: Connection, flows: Flows, provider: HttpProvider) -> Outcome:
    """Drive t1, whatever it was put off for."""
    await start_claim(conn, amount="20")
    return await drive(conn, "t1", flows=flows, policy=POLICY, provider=provider)


async def payment_of(conn: Connection) -> Payment:
    return (await payments.payments_of(conn, ["t1"]))["t1"]


async def some_minutes_later(conn: Connection) -> None:
    await conn.execute("UPDATE payments SET asked_at = asked_at - interval '6 minutes'")


async def status_of(conn: Connection) -> str:
    return (await threads.thread_of(conn, "t1")).status


async def test_a_payment_outside_is_made_once_and_its_reference_kept(
    conn: Connection, flows: Flows, bank: Bank
) -> None:
    assert await pay(conn, flows, provider_at(bank)) == "over"
    assert await pay(conn, flows, provider_at(bank)) == "over"
    assert bank.paid == [{"amount": "20.00", "currency": "USD", "payee": "ACME", "thread": "t1"}]
    payment = await payment_of(conn)
    assert (payment.status, payment.reference, payment.provider, payment.attempts) == ("paid", "B-1", "http", 1)
    assert payment.idempotency_key == f"{await value(conn, 'SELECT id::text FROM installation')}:t1"


@pytest.mark.parametrize("fault", ["lost", "dropped", 500, 503, 429, 409, 302], ids=str)
async def test_without_an_answer_the_same_key_is_used_again(
    conn: Connection, flows: Flows, bank: Bank, fault: Fault
) -> None:
    bank.faults.append(fault)
    with pytest.raises(DriveFailed):
        await pay(conn, flows, provider_at(bank))
    assert (await payment_of(conn)).status == "intended"
    assert await pay(conn, flows, provider_at(bank)) == "over"
    assert len(bank.paid) == 1
    assert len(bank.keys) == 2
    assert len(set(bank.keys)) == 1
    assert (await payment_of(conn)).attempts == 2


@pytest.mark.parametrize("status", [400, 402, 403, 404, 422])
async def test_a_refusal_is_kept_and_nobody_is_asked_again(
    conn: Connection, flows: Flows, bank: Bank, status: int
) -> None:
    bank.faults.append(status)
    assert await pay(conn, flows, provider_at(bank)) == "over"
    assert await pay(conn, flows, provider_at(bank)) == "over"
    assert await status_of(conn) == "failed"
    assert (await threads.thread_of(conn, "t1")).reason == (
        f"the payment service answered {status}: told to answer {status}"
    )
    assert (len(bank.keys), bank.paid) == (1, [])


async def test_a_service_that_cannot_be_reached_was_not_asked(conn: Connection, flows: Flows, bank: Bank) -> None:
    away = HttpProvider(url="http://127.0.0.1:1/", token=None, timeout_s=2.0, key_lifetime_s=0, lookup_url=None)
    with pytest.raises(DriveFailed, match="cannot be reached"):
        await pay(conn, flows, away)
    assert (await payment_of(conn)).attempts == 0
    # So asking is safe even where keys are not remembered.
    assert await pay(conn, flows, provider_at(bank, key_lifetime_s=0)) == "over"
    assert len(bank.paid) == 1


@pytest.mark.parametrize("fault", ["lost", "dropped"])
async def test_a_service_that_forgets_and_cannot_be_asked_is_never_asked_twice(
    conn: Connection, flows: Flows, bank: Bank, fault: Fault
) -> None:
    bank.remembers = False
    bank.faults.append(fault)
    provider = provider_at(bank, key_lifetime_s=0)
    with pytest.raises(DriveFailed):
        await pay(conn, flows, provider)
    assert await pay(conn, flows, provider) == "stuck"
    assert await status_of(conn) == "unknown"
    assert [each.thread_id for each in await payments.unknown_payments(conn, limit=10)] == ["t1"]
    assert len(bank.keys) == 1


@pytest.mark.parametrize(("fault", "asked"), [("lost", 1), ("dropped", 2)])
async def test_a_service_that_forgets_is_asked_what_became_of_it(
    conn: Connection, flows: Flows, bank: Bank, fault: Fault, asked: int
) -> None:
    bank.remembers = False
    bank.faults.append(fault)
    provider = provider_at(bank, key_lifetime_s=0, can_look_up=True)
    with pytest.raises(DriveFailed):
        await pay(conn, flows, provider)
    await some_minutes_later(conn)
    assert await pay(conn, flows, provider) == "over"
    assert (len(bank.keys), len(bank.paid)) == (asked, 1)
    assert (await payment_of(conn)).reference == "B-1"


async def test_an_order_that_takes_longer_than_anybody_waits_is_not_made_twice(
    conn: Connection, flows: Flows, bank: Bank
) -> None:
    bank.remembers = False
    provider = provider_at(bank, key_lifetime_s=0, can_look_up=True, timeout_s=0.3)
    # Each order starts its time anew, not only the first.
    for number in (1, 2):
        bank.faults.append("slow" if number == 2 else "dropped")
        with pytest.raises(DriveFailed):
            await pay(conn, flows, provider)
        with pytest.raises(DriveFailed, match="may be on its way"):
            await pay(conn, flows, provider)
        assert (len(bank.keys), len(bank.paid)) == (number, 0)
        if number == 1:
            await some_minutes_later(conn)
    bank.freed.set()
    await bank.booked.wait()
    assert await pay(conn, flows, provider) == "over"
    assert (len(bank.paid), (await payment_of(conn)).reference) == (1, "B-1")


async def test_a_payment_under_way_at_the_service_is_not_taken_for_none(
    conn: Connection, flows: Flows, bank: Bank
) -> None:
    bank.remembers = False
    bank.faults.append("slow")
    bank.says = {"status": "processing"}
    provider = provider_at(bank, key_lifetime_s=0, can_look_up=True, timeout_s=0.3)
    for why in ("no answer", "answered 404, and not"):
        with pytest.raises(DriveFailed, match=why):
            await pay(conn, flows, provider)
        await some_minutes_later(conn)
    bank.freed.set()
    await bank.booked.wait()
    assert await pay(conn, flows, provider) == "over"
    assert (len(bank.paid), (await payment_of(conn)).reference) == (1, "B-1")


@pytest.mark.parametrize("status", [403, 404, 422])
async def test_a_refusal_after_a_lost_answer_does_not_say_that_nothing_was_paid(
    conn: Connection, flows: Flows, bank: Bank, status: int
) -> None:
    bank.faults.extend(["lost", status])
    with pytest.raises(DriveFailed):
        await pay(conn, flows, provider_at(bank))
    assert await pay(conn, flows, provider_at(bank)) == "stuck"
    payment = await payment_of(conn)
    assert (payment.status, await status_of(conn)) == ("unknown", "unknown")
    assert f"asked once more it said no (the payment service answered {status}: " in str(payment.reason)
    assert await value(conn, "SELECT kind FROM notices") == "alarm"


async def test_after_a_lost_answer_and_a_refusal_what_was_paid_is_looked_up(
    conn: Connection, flows: Flows, bank: Bank
) -> None:
    bank.faults.extend(["lost", 404])
    provider = provider_at(bank, can_look_up=True)
    with pytest.raises(DriveFailed):
        await pay(conn, flows, provider)
    assert await pay(conn, flows, provider) == "over"
    assert (len(bank.paid), (await payment_of(conn)).reference, await status_of(conn)) == (1, "B-1", "paid")


async def test_a_refusal_after_an_order_that_never_arrived_stands_once_that_is_sure(
    conn: Connection, flows: Flows, bank: Bank
) -> None:
    bank.faults.extend(["dropped", 402, 402])
    provider = provider_at(bank, can_look_up=True)
    for _ in range(2):
        with pytest.raises(DriveFailed):
            await pay(conn, flows, provider)
    assert (await payment_of(conn)).status == "intended"
    await some_minutes_later(conn)
    assert await pay(conn, flows, provider) == "over"
    assert (bank.paid, (await payment_of(conn)).status, await status_of(conn)) == ([], "refused", "failed")


async def test_an_answer_that_arrives_in_pieces_is_read_whole(conn: Connection, flows: Flows, bank: Bank) -> None:
    bank.faults.append("halves")
    async with asyncio.TaskGroup() as group:
        paying = group.create_task(pay(conn, flows, provider_at(bank)))
        await bank.booked.wait()
        bank.freed.set()
    assert (paying.result(), len(bank.keys), (await payment_of(conn)).reference) == ("over", 1, "B-1")


async def test_a_token_that_the_service_quotes_is_not_shown(conn: Connection, flows: Flows, bank: Bank) -> None:
    bank.faults.append(401)
    with pytest.raises(DriveFailed) as failed:
        await pay(conn, flows, provider_at(bank))
    reason = (await threads.thread_of(conn, "t1")).reason or ""
    assert "unknown: Bearer PAYMENT_TOKEN" in reason
    assert "secret" not in f"{reason} {failed.value}"


@pytest.mark.parametrize(("can_look_up", "often"), [(True, 1), (False, 2)])
async def test_what_a_restored_database_does_not_know_of_is_looked_up_where_that_can_be(
    conn: Connection, flows: Flows, bank: Bank, *, can_look_up: bool, often: int
) -> None:
    """Paid, restored from a dump of before, and driven once the bank has forgotten the key; docs/operating.md."""
    bank.remembers = False
    await start_claim(conn, amount="20")
    installation = await value(conn, "SELECT id::text FROM installation")
    order = Order(key=f"{installation}:t1", thread_id="t1", amount=Decimal(20), currency="USD", payee="ACME")
    provider = provider_at(bank, can_look_up=can_look_up)
    assert await provider.pay(order) == "B-1"
    await conn.execute("UPDATE threads SET created_at = created_at - interval '2 days'")
    assert await pay(conn, flows, provider) == "over"
    assert (len(bank.paid), (await payment_of(conn)).reference) == (often, f"B-{often}")


async def test_an_old_claim_whose_look_up_is_not_answered_is_looked_up_again(
    conn: Connection, flows: Flows, bank: Bank
) -> None:
    await start_claim(conn, amount="20")
    await conn.execute("UPDATE threads SET created_at = created_at - interval '2 days'")
    bank.look_up_faults = 1
    with pytest.raises(DriveFailed):
        await pay(conn, flows, provider_at(bank, can_look_up=True))
    assert (bank.keys, len(bank.looked_up)) == ([], 1)
    assert await pay(conn, flows, provider_at(bank, can_look_up=True)) == "over"
    assert (len(bank.paid), len(bank.looked_up)) == (1, 2)


async def test_a_fresh_claim_is_paid_by_one_call(conn: Connection, flows: Flows, bank: Bank) -> None:
    assert await pay(conn, flows, provider_at(bank, can_look_up=True, key_lifetime_s=0)) == "over"
    assert (len(bank.keys), bank.looked_up) == (1, [])


async def test_a_payment_that_was_begun_with_another_provider_is_left_to_a_person(
    conn: Connection, flows: Flows, bank: Bank
) -> None:
    bank.faults.append("lost")
    with pytest.raises(DriveFailed):
        await pay(conn, flows, provider_at(bank))
    assert await pay(conn, flows, replace(provider_at(bank), name="other")) == "stuck"
    payment = await payment_of(conn)
    assert (payment.status, await status_of(conn)) == ("unknown", "unknown")
    assert "begun with the provider http" in str(payment.reason)
    assert len(bank.keys) == 1


async def test_an_order_that_one_service_did_not_answer_is_not_sent_to_another(
    conn: Connection, flows: Flows, bank: Bank
) -> None:
    bank.faults.append("lost")
    with pytest.raises(DriveFailed):
        await pay(conn, flows, provider_at(bank))
    elsewhere = replace(provider_at(bank, can_look_up=True), url=f"{bank.url}/elsewhere")
    assert await pay(conn, flows, elsewhere) == "stuck"
    assert (len(bank.keys), len(bank.looked_up), len(bank.paid), await status_of(conn)) == (1, 0, 1, "unknown")
    assert "sent the order as 127.0.0.1:" in str((await payment_of(conn)).reason)


async def test_an_order_that_never_left_may_be_sent_to_another_service(
    conn: Connection, flows: Flows, bank: Bank
) -> None:
    away = HttpProvider(url="http://127.0.0.1:1/", token=None, timeout_s=2.0, key_lifetime_s=0, lookup_url=None)
    with pytest.raises(DriveFailed, match="cannot be reached"):
        await pay(conn, flows, away)
    assert await pay(conn, flows, provider_at(bank)) == "over"
    assert len(bank.paid) == 1


async def test_what_a_gateway_does_not_find_was_not_looked_up(conn: Connection, flows: Flows, bank: Bank) -> None:
    bank.faults.extend(["lost", 404])
    bank.is_found = False
    provider = provider_at(bank, can_look_up=True)
    for why in ("no answer", "answered 404, and not"):
        with pytest.raises(DriveFailed, match=why):
            await pay(conn, flows, provider)
        await some_minutes_later(conn)
    bank.is_found = True
    assert await pay(conn, flows, provider) == "over"
    assert (len(bank.paid), (await payment_of(conn)).reference, await status_of(conn)) == (1, "B-1", "paid")


async def test_a_payment_that_may_have_been_made_is_unknown_whatever_fails_last(
    conn: Connection, flows: Flows, bank: Bank
) -> None:
    bank.faults.append("lost")
    with pytest.raises(DriveFailed):
        await pay(conn, flows, provider_at(bank))
    await conn.execute("UPDATE threads SET attempts = %s", (threads.MAX_ATTEMPTS - 1,))
    bank.faults.append(401)
    assert await pay(conn, flows, provider_at(bank)) == "stuck"
    assert (await status_of(conn), (await payment_of(conn)).status) == ("unknown", "unknown")
    # And stays so when somebody looks once more.
    assert await pay(conn, flows, provider_at(bank)) == "stuck"
    assert await status_of(conn) == "unknown"


async def test_a_key_that_may_be_forgotten_soon_is_not_used_again(conn: Connection, flows: Flows, bank: Bank) -> None:
    bank.faults.append("lost")
    with pytest.raises(DriveFailed):
        await pay(conn, flows, provider_at(bank))
    await conn.execute("UPDATE payments SET intended_at = intended_at - interval '23 hours 1 minute'")
    assert await pay(conn, flows, provider_at(bank)) == "stuck"
    assert await status_of(conn) == "unknown"
    assert len(bank.keys) == 1


async def test_the_service_never_sees_one_key_with_two_amounts(conn: Connection, flows: Flows, bank: Bank) -> None:
    bank.faults.append("dropped")
    with pytest.raises(DriveFailed):
        await pay(conn, flows, provider_at(bank))
    await conn.execute("UPDATE payments SET amount = 21")
    assert await pay(conn, flows, provider_at(bank)) == "stuck"
    assert "stands for 21 USD already, not for 20.00 USD" in ((await threads.thread_of(conn, "t1")).reason or "")
    assert len(bank.keys) == 1


async def test_a_service_that_never_answers_ends_as_unknown(conn: Connection, flows: Flows, bank: Bank) -> None:
    await start_claim(conn, amount="20")
    await conn.execute("UPDATE threads SET attempts = %s", (threads.MAX_ATTEMPTS - 1,))
    bank.faults.append(503)
    assert await pay(conn, flows, provider_at(bank)) == "stuck"
    assert (await status_of(conn), (await payment_of(conn)).status) == ("unknown", "unknown")
    assert await value(conn, "SELECT kind FROM notices") == "alarm"


@pytest.mark.parametrize("given_up_while_asking", [False, True])
@pytest.mark.parametrize(("reference", "ends"), [("B-7", "paid"), (None, "failed")])
async def test_a_person_says_what_became_of_it(
    conn: Connection, flows: Flows, bank: Bank, *, given_up_while_asking: bool, reference: str | None, ends: str
) -> None:
    bank.faults.append("lost")
    provider = provider_at(bank, key_lifetime_s=0)
    await start_claim(conn, amount="20")
    if given_up_while_asking:
        await conn.execute("UPDATE threads SET attempts = %s", (threads.MAX_ATTEMPTS - 1,))
    else:
        with pytest.raises(DriveFailed):
            await pay(conn, flows, provider)
        with pytest.raises(NothingToResolve):
            await payments.resolve(conn, "t1", reference=reference, by="cli:ann")
    assert await pay(conn, flows, provider) == "stuck"
    for _ in range(2):
        await payments.resolve(conn, "t1", reference=reference, by="cli:ann")
    assert await pay(conn, flows, provider) == "over"
    assert (await status_of(conn), (await payment_of(conn)).reference) == (ends, reference)
    with pytest.raises(NothingToResolve):
        await payments.resolve(conn, "t1", reference="B-8", by="cli:ann")
    assert len(bank.keys) == 1


async def test_two_installations_use_two_keys_for_threads_of_one_name(
    conn: Connection, flows: Flows, bank: Bank, empty_database_url: str
) -> None:
    await pay(conn, flows, provider_at(bank))
    async with await connect(empty_database_url, "drive") as other:
        await ensure_schema(empty_database_url, other)
        ids = [await value(each, "SELECT id::text FROM installation") for each in (conn, other)]
    assert len(set(ids)) == 2


# As people meet it


async def test_a_start_killed_while_the_service_pays_pays_once(
    tmp_path: Path, database_url: str, conn: Connection, bank: Bank
) -> None:
    terminal = Terminal(tmp_path, DATABASE_URL=database_url, PAYMENT_PROVIDER="http", PAYMENT_URL=bank.url)
    words = ("start", "--thread", "t1", "--amount", "20")
    bank.faults.append("held")
    running = await terminal.start(*words)
    await bank.asked.wait()
    running.signal(signal.SIGKILL)
    await running.end()
    assert [row["status"] for row in await all_rows(conn, "SELECT status FROM payments")] == ["intended"]
    bank.freed.set()
    done = await terminal.run_meanwhile(*words)
    assert (done.code, done.out) == (0, "t1: 20.00 USD is paid, reference B-1\n")
    assert (len(bank.paid), len(bank.keys), len(set(bank.keys))) == (1, 2, 1)


async def test_an_unknown_payment_is_listed_and_resolved_at_the_command_line(
    tmp_path: Path, database_url: str, conn: Connection, bank: Bank
) -> None:
    terminal = Terminal(
        tmp_path,
        DATABASE_URL=database_url,
        PAYMENT_PROVIDER="http",
        PAYMENT_URL=bank.url,
        PAYMENT_KEY_LIFETIME="0",
    )
    words = ("start", "--thread", "t1", "--amount", "20")
    bank.faults.append("lost")
    assert (await terminal.run_meanwhile(*words)).code == 1
    await conn.execute("UPDATE threads SET due_at = clock_timestamp()")
    unknown = await terminal.run_meanwhile(*words)
    assert (unknown.code, "is unknown" in unknown.out) == (1, True)
    listed = await terminal.run_meanwhile("payments", "list", "--unknown")
    assert listed.out.startswith("t1: 20.00 USD is unknown, asked 2 times under the key ")
    both = await terminal.run_meanwhile("payments", "resolve", "t1", "--paid", "B-1", "--not-paid")
    assert both.code == 2
    done = await terminal.run_meanwhile("payments", "resolve", "t1", "--paid", "B-1")
    assert (done.code, done.out) == (0, "t1: 20.00 USD is paid, reference B-1\n")
    assert (await terminal.run_meanwhile("payments", "list", "--unknown")).out == ""
    assert len(bank.keys) == 1


async def test_payments_are_listed_newest_first(tmp_path: Path, database_url: str, conn: Connection) -> None:
    terminal = Terminal(tmp_path, DATABASE_URL=database_url)
    for number in range(3):
        await terminal.run_meanwhile("start", "--thread", f"t{number}", "--amount", f"1{number}")
    listed = await terminal.run_meanwhile("payments", "list", "--limit", "2")
    assert [line.split(" at ")[0] for line in listed.out.splitlines()] == [
        "t2: 12.00 USD is paid", "t1: 11.00 USD is paid"
    ]  # fmt: skip
    listed = await terminal.run_meanwhile("payments", "list", "--json")
    assert [(each["thread"], each["reference"]) for each in listed.json] == [
        ("t2", "L-t2"), ("t1", "L-t1"), ("t0", "L-t0")
    ]  # fmt: skip


def test_a_provider_that_lacks_its_address_is_refused_at_start(tmp_path: Path, database_url: str) -> None:
    done = Terminal(tmp_path, DATABASE_URL=database_url, PAYMENT_PROVIDER="http").run("serve")
    assert (done.code, done.out) == (2, "")
    assert "PAYMENT_URL is not set" in done.err
