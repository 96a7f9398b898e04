"""What is done is written where it becomes true, nobody waits for the chain, and whoever breaks it is found out."""

from __future__ import annotations

import asyncio
import hashlib
import json
import re
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, LiteralString

import psycopg
import pytest
from psycopg import errors, sql

from flow import audit, deliveries, links, payments, threads, tokens
from flow.approvals import approval_of, decide
from flow.audit import BATCH, EMPTY, Head, latest_entries, record, seal, seal_all, verify
from flow.database import Connection, Lock, connect, ensure_schema, try_lock_until_commit
from flow.drive import drive
from flow.errors import BadInput, ChainBroken, CodeWrong, DriveFailed, FlowError, UnknownToken
from flow.flows import Flows
from flow.inputs import mail_person, parse_claim
from flow.model import Verdict
from flow.policy import OneTier, Tier
from flow.sessions import make_login_link
from flow.text import canonical
from tests.bank import Bank
from tests.command import ROOT, Terminal
from tests.driving import run, waiting_claim
from tests.people import ALICE, ANN, POLICY, YES, ask, start_claim
from tests.rows import all_rows, break_table, mend_table, until_blocked, value
from tests.test_payments import provider_at, some_minutes_later

MARY = mail_person("mary@example.com")
BY_MAIL = Tier(name="approval", approvers=("mary@example.com", "U01ALICE"))
CLAIM = parse_claim(amount="20", currency="USD", payee="ACME")
# How many rows a new database begins with: one for each migration since there is a log.
BORN = len([each for each in (ROOT / "flow" / "migrations").glob("*.sql") if each.name >= "0013"])

Act = Callable[[Connection], Awaitable[object]]


@pytest.fixture
async def ten(database_url: str) -> AsyncIterator[list[Connection]]:
    """Ten sessions."""
    opened = [await connect(database_url, "door") for _ in range(10)]
    yield opened
    for each in opened:
        await each.close()


async def add(conn: Connection, *names: str) -> None:
    """A row for each, by hand."""
    for name in names:
        await record(conn, "login.made", who="cli:ann", door="cli", for_whom=name)


async def sealed_names(conn: Connection) -> list[str]:
    """Of those rows, in the order of the chain."""
    query: LiteralString = (
        "SELECT for_whom AS name FROM audit_seals JOIN audit ON id = audit_id"
        " WHERE kind = 'login.made' ORDER BY position"
    )
    return [row["name"] for row in await all_rows(conn, query)]


async def wrong_with(conn: Connection, *, noted: Head | None = None) -> str | None:
    return (await verify(conn, noted=noted)).wrong


# What is recorded


async def nothing(_: Connection) -> None:
    """No preparation."""


async def stuck(conn: Connection) -> None:
    await start_claim(conn)
    await conn.execute("UPDATE threads SET status = 'stuck', due_at = NULL, reason = 'the bank is closed'")


async def asked(conn: Connection) -> None:
    await ask(conn, tier=BY_MAIL)


async def linked(conn: Connection) -> None:
    await asked(conn)
    await make_link(conn)


async def make_link(conn: Connection, *, code: bool = False) -> links.NewLink:
    approval = await approval_of(conn, await value(conn, "SELECT interrupt_id FROM approvals"))
    return await links.make_link(conn, approval, MARY, by="cli:ann", with_code=code)


async def make_code(conn: Connection) -> None:
    approval = await approval_of(conn, await value(conn, "SELECT interrupt_id FROM approvals"))
    await links.make_code(conn, approval, MARY, by="cli:ann")


async def revoke_link(conn: Connection) -> None:
    approval = await approval_of(conn, await value(conn, "SELECT interrupt_id FROM approvals"))
    await links.revoke_link(conn, approval, MARY, by="cli:ann")


async def dead_letter(conn: Connection) -> None:
    await deliveries.add_endpoints(conn, ["acme"])
    await ask(conn)
    await deliveries.spread(conn, "acme")
    await conn.execute("UPDATE webhook_deliveries SET status = 'dead', due_at = NULL")


async def make_token(conn: Connection) -> None:
    await tokens.create_token(conn, "robot", ("read", "start"), by="cli:ann")


async def intend(conn: Connection) -> None:
    async with conn.transaction():
        await payments.intend(conn, "t1", CLAIM, provider_at(Bank()))


async def intended(conn: Connection) -> None:
    await start_claim(conn, amount="20")
    await intend(conn)


async def unknown(conn: Connection) -> None:
    await intended(conn)
    await payments.give_up(conn, "t1", "no answer")
    await conn.execute("UPDATE threads SET status = 'unknown', due_at = NULL")


async def give_up(conn: Connection) -> None:
    async with conn.transaction():
        await payments.give_up(conn, "t1", "no answer")


async def resolve(conn: Connection) -> None:
    await payments.resolve(conn, "t1", reference="B-7", by="cli:ann")


async def pay_from_ledger(conn: Connection) -> None:
    async with conn.transaction():
        await payments.pay_from_ledger(conn, "t1", CLAIM, [])


async def small_claim(conn: Connection) -> None:
    await start_claim(conn, amount="20")


CLI = {"who": "cli:ann", "door": "cli"}
FLOW = {"who": "flow:claims", "door": "drive"}

# Its kind; what must be there; what is done, and the table that it changes; and what its row says.
ACTS: list[tuple[str, Act, Act, LiteralString, dict[str, Any]]] = [
    ("thread.started", nothing, small_claim, "threads", {"who": "python", "for_whom": ANN.key, "thread_id": "t1"}),
    ("thread.retried", stuck, lambda conn: threads.retry(conn, "t1", by="cli:ann"), "threads", CLI),
    ("token.created", nothing, make_token, "api_tokens", CLI | {"for_whom": "api:robot"}),
    (
        "token.revoked",
        make_token,
        lambda conn: tokens.revoke_token(conn, "robot", by="cli:ann"),
        "api_tokens",
        CLI | {"for_whom": "api:robot"},
    ),
    ("link.made", asked, make_link, "links", CLI | {"for_whom": MARY.key, "thread_id": "t1"}),
    ("link.code_made", linked, make_code, "links", CLI | {"for_whom": MARY.key, "thread_id": "t1"}),
    ("link.revoked", linked, revoke_link, "links", CLI | {"for_whom": MARY.key, "thread_id": "t1"}),
    (
        "login.made",
        nothing,
        lambda conn: make_login_link(conn, ALICE, by="cli:ann"),
        "login_links",
        CLI | {"for_whom": ALICE.key},
    ),
    (
        "webhook.resent",
        dead_letter,
        lambda conn: deliveries.resend_dead(conn, by="cli:ann"),
        "webhook_deliveries",
        CLI | {"data": {"count": 1, "endpoints": ["acme"]}},
    ),
    (
        "webhook.forgotten",
        dead_letter,
        lambda conn: deliveries.forget_endpoint(conn, "acme", by="cli:ann"),
        "webhook_endpoints",
        CLI | {"data": {"count": 1, "endpoints": ["acme"]}},
    ),
    ("payment.paid", small_claim, pay_from_ledger, "payments", FLOW | {"thread_id": "t1"}),
    ("payment.intended", small_claim, intend, "payments", FLOW | {"thread_id": "t1"}),
    ("payment.unknown", intended, give_up, "payments", FLOW | {"thread_id": "t1"}),
    ("payment.resolved", unknown, resolve, "payments", CLI | {"thread_id": "t1"}),
]


@pytest.mark.parametrize(("kind", "before", "act", "table", "says"), ACTS, ids=[each[0] for each in ACTS])
async def test_what_is_done_and_its_row_are_one(
    conn: Connection, kind: str, before: Act, act: Act, table: LiteralString, says: dict[str, Any]
) -> None:
    await before(conn)
    found = sql.SQL("SELECT to_jsonb(t) FROM {} t ORDER BY 1").format(sql.Identifier(table))
    was = await (await conn.execute(found)).fetchall()
    await break_table(
        conn, "audit", "INSERT", f"IF NEW.kind = '{kind}' THEN RAISE EXCEPTION 'it takes no rows'; END IF"
    )
    with pytest.raises(errors.RaiseException, match="it takes no rows"):
        await act(conn)
    assert await (await conn.execute(found)).fetchall() == was
    await mend_table(conn)
    await act(conn)
    assert await (await conn.execute(found)).fetchall() != was
    [entry] = [each for each in await latest_entries(conn, thread_id=None, limit=100) if each.kind == kind][:1]
    assert {name: getattr(entry, name) for name in says} == says


async def test_what_changes_nothing_is_not_recorded(conn: Connection) -> None:
    for _ in range(2):
        await start_claim(conn, amount="20")
        await pay_from_ledger(conn)
    await make_token(conn)
    for _ in range(2):
        await tokens.revoke_token(conn, "robot", by="cli:ann")
    with pytest.raises(UnknownToken):
        await tokens.revoke_token(conn, "nobody", by="cli:ann")
    assert await deliveries.resend_dead(conn, by="cli:ann") == 0
    with pytest.raises(FlowError, match="nothing to try again"):
        await threads.retry(conn, await waiting_nothing(conn), by="cli:ann")
    kinds = [entry.kind for entry in reversed(await latest_entries(conn, thread_id=None, limit=100))]
    assert kinds[BORN:] == ["thread.started", "payment.paid", "token.created", "token.revoked", "thread.started"]


async def waiting_nothing(conn: Connection) -> str:
    """A thread that is over."""
    await start_claim(conn, "t2", "20")
    await conn.execute("UPDATE threads SET status = 'rejected', due_at = NULL WHERE thread_id = 't2'")
    return "t2"


async def test_a_row_tells_the_facts_and_no_private_text(conn: Connection) -> None:
    await start_claim(conn, "t1", "20", requested_by="U01ALICE")
    await pay_from_ledger(conn)
    paid, started = await latest_entries(conn, thread_id="t1", limit=10)
    claim = {"amount": "20.00", "currency": "USD", "payee": "ACME"}
    fingerprint = hashlib.sha256(canonical(claim | {"note": "three chairs"}).encode()).hexdigest()
    assert started.data == claim | {"flow": "claims", "version": "1", "input_sha256": fingerprint}
    assert (started.who, started.for_whom) == ("python", "U01ALICE")
    assert paid.data == claim | {
        "provider": "ledger",
        "idempotency_key": None,
        "reference": "L-t1",
        "status": "paid",
        "reason": None,
    }


@pytest.mark.parametrize(("fault", "end"), [(None, "paid"), (402, "refused")])
async def test_a_payment_outside_is_recorded_from_its_intent_to_its_end(
    conn: Connection, flows: Flows, fault: int | None, end: str
) -> None:
    await start_claim(conn, amount="20")
    async with Bank() as bank:
        bank.faults += [fault] if fault else []
        await break_table(conn, "audit", "INSERT", f"IF NEW.kind = 'payment.{end}' THEN RAISE EXCEPTION 'full'; END IF")
        provider = provider_at(bank, can_look_up=True)
        with pytest.raises(DriveFailed, match="full"):
            await drive(conn, "t1", flows=flows, policy=POLICY, provider=provider)
        assert await value(conn, "SELECT status FROM payments") == "intended"
        await mend_table(conn)
        bank.faults += [fault] if fault else []
        # Nobody knows any more that the order was answered.
        await some_minutes_later(conn)
        await drive(conn, "t1", flows=flows, policy=POLICY, provider=provider)
    ended, intended, _ = await latest_entries(conn, thread_id="t1", limit=10)
    assert (intended.kind, ended.kind, ended.data["status"]) == ("payment.intended", f"payment.{end}", end)
    assert ended.data["reason" if fault else "reference"]


async def test_a_payment_whose_provider_is_gone_is_recorded_as_unknown(conn: Connection, flows: Flows) -> None:
    await start_claim(conn, amount="20")
    async with Bank() as bank:
        bank.faults.append("lost")
        with pytest.raises(DriveFailed):
            await drive(conn, "t1", flows=flows, policy=POLICY, provider=provider_at(bank))
        await drive(conn, "t1", flows=flows, policy=POLICY)
    ended = (await latest_entries(conn, thread_id="t1", limit=1))[0]
    assert ended.kind == "payment.unknown"
    assert "not PAYMENT_PROVIDER any more" in ended.data["reason"]


async def test_a_wrong_code_is_a_refusal(conn: Connection) -> None:
    await asked(conn)
    made = await make_link(conn, code=True)
    shown = await value(conn, "SELECT request_hash FROM approvals")
    verdict = Verdict(verdict="approve", door="link", request_hash=shown)
    with pytest.raises(CodeWrong):
        await links.spend(conn, made.token, verdict, code="no", step_up=True)
    [refused] = await latest_entries(conn, thread_id="t1", limit=1)
    assert (refused.kind, refused.who, refused.door, refused.shown) == ("approval.refused", MARY.key, "link", shown)


async def test_a_link_that_the_policy_makes_is_recorded(conn: Connection) -> None:
    await asked(conn)
    [made] = [each for each in await latest_entries(conn, thread_id="t1", limit=9) if each.kind == "link.made"]
    assert (made.who, made.for_whom) == ("policy", MARY.key)


async def test_what_is_recorded_together_is_in_order(conn: Connection) -> None:
    await record(conn, "approval.voted", "approval.decided", who="slack:T01TEST/U01ALICE", door="slack", shown="93ab")
    decided, voted = await latest_entries(conn, thread_id=None, limit=2)
    assert (voted.kind, decided.kind) == ("approval.voted", "approval.decided")
    assert replace(voted, id=0, at=decided.at, kind="") == replace(decided, id=0, kind="")


async def test_migrations_are_recorded(empty_database_url: str) -> None:
    async with await connect(empty_database_url, "door") as conn:
        await ensure_schema(empty_database_url, conn, by="cli:ann")
        await ensure_schema(empty_database_url, conn, by="cli:bob")
        found = await latest_entries(conn, thread_id=None, limit=100)
        newest = await value(conn, "SELECT max(version) FROM claim_flow_migrations")
    assert {(entry.kind, entry.who, entry.door) for entry in found} == {("database.migrated", "cli:ann", "cli")}
    assert found[0].data == {"version": newest}


async def test_a_policy_is_recorded_when_it_is_another_one(conn: Connection) -> None:
    other = OneTier(approvers=(*POLICY.approvers, "U04EMIL"), limits=POLICY.limits)
    for policy in (POLICY, POLICY, other, other, POLICY):
        await audit.record_policy(conn, policy, by="cli:ann")
    found = [each for each in await latest_entries(conn, thread_id=None, limit=9) if each.kind == "policy.changed"]
    assert [each.data["tiers"] for each in found] == [
        ["approval: 1 of U01ALICE, U02BOB, U03CAROL"],
        ["approval: 1 of U01ALICE, U02BOB, U03CAROL, U04EMIL"],
        ["approval: 1 of U01ALICE, U02BOB, U03CAROL"],
    ]
    assert found[0].data["rules"] == {"approvers": list(POLICY.approvers), "limits": {"USD": "100"}}
    # Who is asked is the same; above which amount is not.
    await audit.record_policy(conn, replace(POLICY, limits={}), by="cli:ann")
    assert (await latest_entries(conn, thread_id=None, limit=1))[0].data["rules"]["limits"] == {}


# Only ever added

UPSERT = (
    "INSERT INTO audit (id, kind, who, door) OVERRIDING SYSTEM VALUE VALUES (1, '', '', '')"
    " ON CONFLICT (id) DO UPDATE SET who = 'cli:eve'"
)


@pytest.mark.parametrize(
    "statement",
    [
        "UPDATE audit SET who = 'cli:eve'",
        "UPDATE audit SET who = 'cli:eve' WHERE false",
        "DELETE FROM audit",
        "TRUNCATE audit CASCADE",
        "TRUNCATE audit_seals",
        "UPDATE audit_seals SET position = position + 1",
        "DELETE FROM audit_seals",
        "DELETE FROM audit_head",
        "TRUNCATE audit_head",
        "UPDATE audit_head SET position = 0",
        UPSERT,
    ],
)
@pytest.mark.parametrize("role", ["origin", "replica"])
async def test_what_is_recorded_stays(conn: Connection, statement: LiteralString, role: LiteralString) -> None:
    await add(conn, "a", "b")
    await seal_all(conn)
    was = await all_rows(conn, "SELECT * FROM audit ORDER BY id")
    await conn.execute(sql.SQL("SET session_replication_role = {}").format(sql.Literal(role)))
    with pytest.raises(errors.InsufficientPrivilege, match="the audit is append-only"):
        await conn.execute(statement)
    assert await all_rows(conn, "SELECT * FROM audit ORDER BY id") == was
    assert await wrong_with(conn) is None


async def test_with_the_grants_of_the_readme_a_service_works_and_cannot_change_what_is_recorded(
    conn: Connection, database_url: str, flows: Flows
) -> None:
    role = f"claims_{uuid.uuid4().hex[:12]}"
    grants = re.findall(r"^    ((?:GRANT|REVOKE) .*;)$", (ROOT / "README.md").read_text(), re.MULTILINE)
    assert len(grants) >= 3
    await conn.execute(f"CREATE ROLE {role}".encode())
    try:
        for grant in grants:
            await conn.execute(re.sub(r"\bclaims;$", f"{role};", grant).encode())
        async with await connect(database_url, "drive") as service:
            await service.execute(f"SET ROLE {role}".encode())
            await ensure_schema(database_url, service)
            await decide(service, await waiting_claim(service, flows), ALICE, YES)
            assert await run(service, flows) == "over"
            assert await value(service, "SELECT status FROM payments") == "paid"
            assert await wrong_with(service) is None
            assert await value(service, "SELECT count(*) FROM audit_unsealed") == 0
            for table in ("audit", "audit_seals"):
                for change in (f"UPDATE {table} SET sha256 = NULL", f"DELETE FROM {table}", f"TRUNCATE {table}"):
                    with pytest.raises(errors.InsufficientPrivilege, match=f"permission denied for table {table}"):
                        await service.execute(change.replace("audit SET sha256", "audit SET who").encode())
            for trick in ("ALTER TABLE audit DISABLE TRIGGER ALL", "SET session_replication_role = replica"):
                with pytest.raises(errors.InsufficientPrivilege):
                    await service.execute(trick.encode())
    finally:
        await conn.execute(f"DROP OWNED BY {role}".encode())
        await conn.execute(f"DROP ROLE {role}".encode())


# Sealing


async def test_nobody_waits_and_what_is_committed_late_is_sealed_later(crowd: list[Connection]) -> None:
    one, two, sealer, _ = crowd
    await seal_all(sealer)
    async with asyncio.timeout(5), one.transaction():
        await add(one, "early")
        async with two.transaction():
            await add(two, "late")
            assert await seal(sealer) == 0
        assert await seal(sealer) == 1
        assert await sealed_names(sealer) == ["late"]
    assert await seal(sealer) == 1
    # By id it is the other way round.
    assert await sealed_names(sealer) == ["late", "early"]
    ids = [
        row["id"] for row in await all_rows(sealer, "SELECT id FROM audit WHERE kind = 'login.made' ORDER BY for_whom")
    ]
    assert ids == sorted(ids)
    assert await wrong_with(sealer) is None


async def test_what_is_rolled_back_leaves_nothing_to_seal(conn: Connection) -> None:
    await seal_all(conn)
    async with conn.transaction(force_rollback=True):
        await add(conn, "never")
    await add(conn, "a")
    assert await seal(conn) == 1
    found = await verify(conn)
    # The id that is missing is no row that is missing.
    assert (found.wrong, found.waiting) == (None, 0)
    assert await value(conn, "SELECT max(id) - count(*) FROM audit") == 1


async def test_writers_do_not_wait_for_a_sealer_nor_sealers_for_each_other(crowd: list[Connection]) -> None:
    sealer, writer, other, observer = crowd
    await add(writer, "a")
    async with asyncio.timeout(5), sealer.transaction():
        # As far as a sealer gets before its commit.
        assert await seal(sealer) > 0
        await add(writer, "b")
        assert await seal(other) == 0
        assert await sealed_names(observer) == []
    assert await seal(other) == 1
    assert await sealed_names(observer) == ["a", "b"]


async def seal_until_all_is(conn: Connection) -> int:
    """How many rows of it this session has sealed."""
    count = 0
    while await value(conn, "SELECT EXISTS (SELECT FROM audit_unsealed)"):
        count += await seal(conn)
    return count


async def test_sealers_at_once_make_one_chain(conn: Connection, ten: list[Connection]) -> None:
    for number in range(40):
        await add(conn, *(f"{number}-{name}" for name in "abcdefghij"))
        waiting = await value(conn, "SELECT count(*) FROM audit_unsealed")
        assert sum(await asyncio.gather(*map(seal_until_all_is, ten))) == waiting
    found = await verify(conn)
    assert (found.wrong, found.waiting) == (None, 0)
    assert found.head.position == await value(conn, "SELECT count(*) FROM audit") == BORN + 400


async def test_a_sealer_that_dies_leaves_everything_to_the_next(
    conn: Connection, crowd: list[Connection], database_url: str
) -> None:
    await add(conn, "a", "b")
    dying, holder = await connect(database_url, "drive"), crowd[0]
    async with holder.transaction():
        # So that it stops in its midst.
        await holder.execute("SELECT FROM audit_head FOR UPDATE")
        sealing = asyncio.ensure_future(seal(dying))
        await until_blocked(conn, dying.info.backend_pid, by=holder.info.backend_pid)
        await conn.execute("SELECT pg_terminate_backend(%s)", (dying.info.backend_pid,))
        with pytest.raises(psycopg.OperationalError):
            await sealing
        assert await sealed_names(conn) == []
    assert await seal(conn) == BORN + 2
    assert await wrong_with(conn) is None


# Verifying


@pytest.fixture
async def five(conn: Connection) -> list[int]:
    """The ids of five sealed rows, which come after those that every database begins with."""
    await add(conn, "a", "b", "c", "d", "e")
    await seal_all(conn)
    assert (await verify(conn)).wrong is None
    return [row["id"] for row in await all_rows(conn, "SELECT id FROM audit WHERE kind = 'login.made' ORDER BY id")]


async def tamper(conn: Connection, *statements: str) -> None:
    """As somebody who may do everything with the database does it: every trigger is off, foreign keys too."""
    async with conn.transaction():
        await conn.execute("SET LOCAL session_replication_role = replica")
        for table in ("audit", "audit_seals", "audit_head"):
            await conn.execute(f"ALTER TABLE {table} DISABLE TRIGGER USER".encode())
        for statement in statements:
            await conn.execute(statement.encode())
        for table in ("audit", "audit_seals", "audit_head"):
            await conn.execute(f"ALTER TABLE {table} ENABLE TRIGGER USER".encode())


@pytest.mark.parametrize(
    "change",
    [
        "who = 'cli:eve'",
        "at = at + interval '1 microsecond'",
        "kind = 'login.madd'",
        "door = 'slack'",
        "for_whom = NULL",
        "shown = ''",
        "thread_id = 't1'",
        "interrupt_id = 'a'",
        """data = '{"a": 1}'""",
    ],
)
async def test_a_changed_row_is_found(conn: Connection, five: list[int], change: str) -> None:
    await tamper(conn, f"UPDATE audit SET {change} WHERE id = {five[2]}")
    assert str(await wrong_with(conn)).startswith(
        f"row {five[2]}, at position {BORN + 3}, was changed since it was sealed"
    )


async def test_a_missing_row_is_found(conn: Connection, five: list[int]) -> None:
    await tamper(conn, f"DELETE FROM audit WHERE id = {five[2]}")
    assert await wrong_with(conn) == f"row {five[2]} is missing: it was sealed at position {BORN + 3}"


async def test_a_row_that_is_missing_with_its_seal_is_found(conn: Connection, five: list[int]) -> None:
    gone = f"DELETE FROM audit_seals WHERE audit_id = {five[2]}", f"DELETE FROM audit WHERE id = {five[2]}"
    await tamper(conn, *gone)
    its_seal = f"its seal, at position {BORN + 3}, was taken out, too"
    assert await wrong_with(conn) == f"a row between row {five[1]} and row {five[3]} is missing: {its_seal}"
    # And if what follows is moved up.
    move_up = [f"UPDATE audit_seals SET position = {at - 1} WHERE position = {at}" for at in (BORN + 4, BORN + 5)]
    await tamper(conn, *move_up)
    assert str(await wrong_with(conn)).endswith("or one before it was taken out")


async def test_the_first_row_that_is_missing_is_found(conn: Connection, five: list[int]) -> None:
    await tamper(conn, f"DELETE FROM audit_seals WHERE position <= {BORN}", f"DELETE FROM audit WHERE id < {five[0]}")
    assert str(await wrong_with(conn)).startswith(f"a row before row {five[0]} is missing")


async def test_a_missing_row_is_found_before_it_is_sealed(conn: Connection, five: list[int]) -> None:
    await add(conn, "f")
    row = await value(conn, "SELECT max(id) FROM audit")
    await tamper(conn, f"DELETE FROM audit WHERE id = {row}")
    assert await wrong_with(conn) == f"row {row} is missing: it was written, and not sealed yet"
    # So is one that was to be left out of the chain.
    await add(conn, "g")
    row = await value(conn, "SELECT max(id) FROM audit")
    await tamper(conn, "DELETE FROM audit_unsealed")
    assert str(await wrong_with(conn)).startswith(f"row {row} has no seal and does not wait for one")
    assert len(five) == 5


async def test_rows_that_are_missing_do_not_keep_others_from_being_sealed(
    conn: Connection, five: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("flow.audit.BATCH", 2)
    await add(conn, "f")
    await add(conn, "g")
    await tamper(conn, f"DELETE FROM audit WHERE id > {five[-1]}")
    await add(conn, "h")
    assert await seal(conn) == 1
    row = await value(conn, "SELECT max(id) FROM audit")
    assert await value(conn, "SELECT max(audit_id) FROM audit_seals") == row


async def test_rows_in_another_order_are_found(conn: Connection, five: list[int]) -> None:
    ids, swapped = f"{five[1]}, {five[3]}", f"CASE audit_id WHEN {five[1]} THEN {five[3]} ELSE {five[1]} END"
    await tamper(
        conn,
        "ALTER TABLE audit_seals DROP CONSTRAINT audit_seals_audit_id_key",
        f"UPDATE audit_seals SET audit_id = {swapped} WHERE audit_id IN ({ids})",
    )
    assert (
        await wrong_with(conn) == f"row {five[3]} is out of order: row {five[1]} was sealed at its position, {BORN + 2}"
    )


async def test_rows_that_are_cut_off_are_found(conn: Connection, five: list[int]) -> None:
    head = (await verify(conn)).head
    await tamper(
        conn, f"DELETE FROM audit_seals WHERE position > {BORN + 3}", f"DELETE FROM audit WHERE id > {five[2]}"
    )
    cut_off = f"what came after row {five[2]}, at position {BORN + 3}, is cut off"
    assert await wrong_with(conn) == f"{cut_off}: position {BORN + 5} was sealed"
    # Even if the head is taken back, too: by whoever has noted it.
    await tamper(conn, "UPDATE audit_head SET (position, sha256) = (SELECT s.position, s.sha256 FROM audit_seals s"
                 f" WHERE s.position = {BORN + 3})")  # fmt: skip
    assert await wrong_with(conn) is None
    assert await wrong_with(conn, noted=head) == f"{cut_off}: position {BORN + 5} was sealed when the head was noted"
    # And if it grows over it.
    await add(conn, "f", "g", "h")
    assert str(await wrong_with(conn, noted=head)).startswith(f"the chain was made anew: position {BORN + 5}")


async def test_an_empty_log_is_whole_and_one_that_was_emptied_is_not(conn: Connection, five: list[int]) -> None:
    head = (await verify(conn)).head
    await tamper(conn, "DELETE FROM audit_seals", "DELETE FROM audit")
    assert await wrong_with(conn) == f"all rows are cut off: position {BORN + 5} was sealed"
    await tamper(conn, f"UPDATE audit_head SET position = 0, sha256 = '\\x{'00' * 32}'")
    found = await verify(conn)
    assert (found.wrong, found.head, found.last_id) == (None, EMPTY, None)
    assert await wrong_with(conn, noted=EMPTY) is None
    assert await wrong_with(conn, noted=replace(EMPTY, sha256=head.sha256)) is not None
    assert str(await wrong_with(conn, noted=head)).startswith("all rows are cut off")
    assert len(five) == 5


async def test_a_head_that_was_changed_is_found(conn: Connection, five: list[int]) -> None:
    await tamper(conn, f"UPDATE audit_head SET sha256 = '\\x{'ab' * 32}'")
    assert str(await wrong_with(conn)).startswith("the head was changed")
    assert len(five) == 5


async def test_nothing_is_sealed_onto_a_chain_that_is_broken(
    conn: Connection, terminal: Terminal, five: list[int]
) -> None:
    await tamper(
        conn, f"DELETE FROM audit_seals WHERE position > {BORN + 3}", f"DELETE FROM audit WHERE id > {five[2]}"
    )
    await start_claim(conn, amount="20")
    with pytest.raises(ChainBroken):
        await seal(conn)
    assert str(await wrong_with(conn)).startswith(f"what came after row {five[2]}, at position {BORN + 3}, is cut off")
    # And those who work go on, and say so.
    done = terminal.run("work", "--once")
    assert (done.code, "the audit log was changed" in done.err) == (0, True)
    assert await value(conn, "SELECT status FROM threads") == "paid"


async def test_a_head_that_was_noted_stays_in_the_chain(conn: Connection, five: list[int]) -> None:
    heads = [(await verify(conn)).head]
    for name in ("f", "g"):
        await add(conn, name)
        heads.append((await verify(conn)).head)
    for head in heads:
        assert Head.parse(str(head)) == head
        assert await wrong_with(conn, noted=head) is None
        other = replace(head, sha256=bytes(32))
        assert str(await wrong_with(conn, noted=other)).startswith("the chain was made anew")
    assert [head.position for head in heads] == [BORN + 5, BORN + 6, BORN + 7]


@pytest.mark.parametrize("text", ["", "7", "7:ab", f"x:{'a' * 64}", f"7:{'A' * 64}", f"-1:{'a' * 64}", f"7:{'a' * 65}"])
def test_what_is_no_head_is_refused(text: str) -> None:
    with pytest.raises(BadInput, match="POSITION:SHA256"):
        Head.parse(text)


async def test_verifying_goes_on_while_others_seal(conn: Connection, crowd: list[Connection], five: list[int]) -> None:
    sealer, holder = crowd[0], crowd[1]
    await add(conn, "f")
    async with holder.transaction():
        assert await try_lock_until_commit(holder, Lock.AUDIT)
        async with asyncio.timeout(5):
            found = await verify(sealer)
    assert (found.wrong, found.waiting, found.head.position) == (None, 1, BORN + len(five))
    assert "1 more are not sealed yet" in found.in_words()


async def test_a_long_chain_is_sealed_and_read_in_pages(conn: Connection) -> None:
    many = 20_000
    await conn.execute(
        "INSERT INTO audit (kind, who, door, data) SELECT 'login.made', 'cli:ann', 'cli', jsonb_build_object('n', n)"
        " FROM generate_series(1, %s) AS n",
        (many,),
    )
    assert await seal(conn) == BATCH
    found = await verify(conn)
    assert (found.wrong, found.head.position, found.waiting) == (None, BORN + many, 0)
    last = await value(conn, "SELECT max(id) FROM audit")
    await tamper(conn, f"""UPDATE audit SET data = '{{"n": 0}}' WHERE id = {last - 1}""")
    assert str(await wrong_with(conn)).startswith(f"row {last - 1}, at position {BORN + many - 1}, was changed")


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ("UPDATE audit SET who = 'cli:eve' WHERE id = {d}", "row {d}, at position {p}, was changed"),
        ("DELETE FROM audit WHERE id = {e}", "row {e} is missing"),
        ("DELETE FROM audit_seals WHERE audit_id = {d}", "a row between row {c} and row {e} is missing"),
        ("DELETE FROM audit_seals WHERE audit_id = {e}", "what came after row {d}, at position {p}, is cut off"),
        ("DELETE FROM audit_seals", "all rows are cut off"),
        ("UPDATE audit SET who = 'cli:eve' WHERE id = {c}", None),
    ],
)
async def test_the_end_of_a_chain_can_be_verified_by_itself(
    conn: Connection, five: list[int], wrong: str, said: str | None
) -> None:
    names = dict(zip("abcdep", [*five, BORN + 4], strict=True))
    found = await verify(conn, newest=2)
    assert (found.wrong, found.head.position, found.last_id) == (None, BORN + 5, names["e"])
    await tamper(conn, wrong.format(**names))
    found = await verify(conn, newest=2)
    assert found.wrong is None if said is None else str(found.wrong).startswith(said.format(**names))
    assert await wrong_with(conn)


async def test_a_row_without_a_seal_is_found_at_the_end_of_a_chain(conn: Connection, five: list[int]) -> None:
    await add(conn, "f")
    await tamper(conn, "DELETE FROM audit_unsealed")
    found = await verify(conn, newest=2)
    assert f"row {five[-1] + 1} has no seal" in str(found.wrong)


# At the command line


@pytest.fixture
def terminal(tmp_path: Path, database_url: str) -> Terminal:
    return Terminal(tmp_path, DATABASE_URL=database_url, APPROVERS="U01ALICE")


async def test_a_claim_at_the_command_line_is_recorded_with_its_policy(conn: Connection, terminal: Terminal) -> None:
    start = "start", "--thread", "t1", "--amount", "20", "--by", "U01ALICE"
    assert terminal.run(*start).code == 0
    assert terminal.run(*start).code == 0
    shown = terminal.run("audit", "--json").json
    migrated = ["database.migrated"] * BORN
    assert [row["kind"] for row in shown] == ["payment.paid", "thread.started", "policy.changed", *migrated]
    assert shown[1] == {
        "id": shown[1]["id"],
        "at": shown[1]["at"],
        "kind": "thread.started",
        "thread": "t1",
        "interrupt_id": None,
        "who": "cli:ann",
        "door": "cli",
        "for_whom": "U01ALICE",
        "shown": None,
        "data": (await latest_entries(conn, thread_id="t1", limit=9))[1].data,
    }
    assert shown[2]["data"]["tiers"] == ["approval: 1 of U01ALICE"]
    terminal.environment["APPROVERS"] = "U02BOB"
    assert terminal.run("start", "--thread", "t2", "--amount", "20").code == 0
    [newest] = [row for row in terminal.run("audit", "--json", "--limit", "3").json if row["kind"] == "policy.changed"]
    assert newest["data"]["tiers"] == ["approval: 1 of U02BOB"]


def test_the_log_is_shown_to_people(terminal: Terminal) -> None:
    terminal.run("start", "--thread", "t1", "--amount", "20")
    terminal.run("start", "--thread", "t2", "--amount", "20", "--payee", "AC\u202eME")
    lines = terminal.run("audit", "--thread", "t2").out.splitlines()
    assert [re.split(r" {2,}", line)[2:4] for line in lines[1:]] == [["payment.paid", "t2"], ["thread.started", "t2"]]
    assert all(fact in lines[2] for fact in ("amount 20.00", "currency USD", "payee AC\\u{202e}ME"))
    assert terminal.run("audit", "--thread", "t3").out.strip() == "nothing is recorded"
    assert terminal.run("audit", "--thread", "a b").code == 2


async def test_verify_says_what_is_wrong_and_exits_1(conn: Connection, terminal: Terminal) -> None:
    terminal.run("start", "--thread", "t1", "--amount", "20")
    whole = terminal.run("audit", "verify")
    assert (whole.code, whole.err) == (0, "")
    row = await value(conn, "SELECT max(id) FROM audit")
    words, head = whole.out.splitlines()
    assert words == f"{BORN + 3} rows, sealed up to row {row}, whole"
    noted = head.removeprefix("head ")
    assert terminal.run("audit", "verify", "--head", noted).code == 0
    assert terminal.run("audit", "verify", "--head", noted[:-1]).code == 2
    another = terminal.run("audit", "verify", "--head", f"{noted[:-64]}{'0' * 64}")
    assert (another.code, another.out) == (1, "")
    assert another.err.startswith("error: the chain was made anew")
    await tamper(conn, f"UPDATE audit SET who = 'cli:eve' WHERE id = {row}")
    changed = terminal.run("audit", "verify")
    assert (changed.code, changed.out) == (1, "")
    where = f"row {row}, at position {BORN + 3}"
    assert changed.err == f"error: {where}, was changed since it was sealed, or one before it was taken out\n"
    found = terminal.run("audit", "verify", "--json")
    assert (found.code, found.json["whole"], found.json["rows"]) == (1, False, BORN + 2)
    assert found.json["wrong"] in changed.err


async def test_an_export_can_be_verified_by_itself(conn: Connection, terminal: Terminal) -> None:
    await add(conn, "Zoë", "\u202e", *"abc")
    exported = terminal.run("audit", "export").out
    previous = bytes(32)
    rows = [json.loads(line) for line in exported.splitlines()]
    for place, row in enumerate(rows, start=1):
        assert row.pop("position") == place
        sealed = bytes.fromhex(row.pop("sha256"))
        alone = json.dumps(row, sort_keys=True, separators=(",", ":"))
        assert hashlib.sha256(previous + alone.encode()).digest() == sealed
        previous = sealed
    assert terminal.run("audit", "verify", "--json").json["head"] == f"{len(rows)}:{previous.hex()}"
    shown = terminal.run("audit", "--json").json
    assert sorted(rows, key=lambda row: -row["id"]) == shown
    await add(conn, "d")
    assert (
        exported + terminal.run("audit", "export", "--from", str(len(rows) + 1)).out
        == terminal.run("audit", "export").out
    )
    await tamper(conn, f"DELETE FROM audit WHERE id = {rows[-1]['id']}")
    cut = terminal.run("audit", "export")
    assert cut.out.splitlines() == exported.splitlines()[:-1]
    assert (cut.code, "is missing" in cut.err) == (1, True)


def test_reading_the_log_imports_no_langgraph(terminal: Terminal) -> None:
    for words in (["audit"], ["audit", "verify"], ["audit", "export"]):
        done = terminal.run(*words, trace_imports=True)
        assert done.code == 0
        assert "flow.audit" in done.imports
        assert not any(name.startswith(("langgraph", "langchain")) for name in done.imports)


async def test_a_worker_seals(conn: Connection, terminal: Terminal) -> None:
    await add(conn, "a")
    assert terminal.run("work", "--once").code == 0
    assert await sealed_names(conn) == ["a"]
    assert (await latest_entries(conn, thread_id=None, limit=1))[0].kind == "policy.changed"
