"""Signed decisions of external approvers: a signature proves the endpoint, its list and the approval's the person."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import AsyncIterator
from typing import Any

import pytest
from yarl import URL

from bot.api import LARGEST_BODY
from flow.approvals import decide
from flow.database import Connection
from flow.errors import SettingError
from flow.policy import Tier
from flow.settings import read_settings
from tests.api_door import OLD_SECRET, OTHER_SECRET, SECRET, Program, api_in_process, signed, token
from tests.people import ANN, NO, ask
from tests.rows import all_rows, one_row, rewrite, until, value
from tests.test_api import is_problem

CAROLS = Tier(name="approval", approvers=("webhook:acme:carol", "U01ALICE"))
YES = {"decision": "approve", "approver": "carol"}


@pytest.fixture
async def acme(database_url: str) -> AsyncIterator[Program]:
    """A program that signs, and has no token."""
    async with api_in_process(database_url) as url, Program(url) as program:
        yield program


async def test_a_signed_decision_is_recorded_in_the_approvers_name(acme: Program, conn: Connection) -> None:
    interrupt_id = await ask(conn, tier=CAROLS)
    answer = await acme.decide_signed(interrupt_id, YES | {"reason": "as agreed"})
    assert (answer.status, answer.body["recorded"], answer.body["approval"]["status"]) == (200, True, "approved")
    row = await one_row(conn, "SELECT person, person_name, verdict, door, reason FROM decisions")
    assert row == {
        "person": "webhook:acme:carol",
        "person_name": "carol (acme)",
        "verdict": "approve",
        "door": "webhook",
        "reason": "as agreed",
    }
    assert await value(conn, "SELECT due_at IS NOT NULL FROM threads")


@pytest.mark.parametrize("secret", [SECRET, OLD_SECRET], ids=["new", "old"])
async def test_while_a_secret_is_replaced_both_are_good(acme: Program, conn: Connection, secret: str) -> None:
    assert (await acme.decide_signed(await ask(conn, tier=CAROLS), YES, secret=secret)).status == 200


# The same again


async def test_a_repeated_request_gets_the_first_answer_and_does_nothing(acme: Program, conn: Connection) -> None:
    interrupt_id = await ask(conn, tier=CAROLS)
    first = await acme.decide_signed(interrupt_id, YES)
    # Signed anew, as senders do when they try again.
    again = await acme.decide_signed(interrupt_id, YES, at=time.time() - 60)
    assert (again.status, again.body) == (200, first.body)
    assert again.body["recorded"] is True
    assert await value(conn, "SELECT count(*) FROM decisions") == 1


async def test_twenty_at_once_record_one_decision(acme: Program, conn: Connection) -> None:
    interrupt_id = await ask(conn, tier=CAROLS)
    answers = await asyncio.gather(*(acme.decide_signed(interrupt_id, YES) for _ in range(20)))
    # Those that came while the first was being worked on are told to come again.
    assert {answer.status for answer in answers} <= {200, 409}
    assert (await acme.decide_signed(interrupt_id, YES)).status == 200
    assert await value(conn, "SELECT count(*) FROM decisions") == 1
    assert await value(conn, "SELECT wakes FROM threads") == 1


async def test_a_refusal_is_repeated_too(acme: Program, conn: Connection) -> None:
    interrupt_id = await ask(conn, tier=CAROLS)
    dave = {"decision": "approve", "approver": "dave"}
    first = await acme.decide_signed(interrupt_id, dave)
    assert is_problem(first, 403, "not on the list of approvers")
    await rewrite(conn, "approvers = approvers || 'webhook:acme:dave'::text")
    assert is_problem(await acme.decide_signed(interrupt_id, dave), 403)
    assert (await acme.decide_signed(interrupt_id, dave, webhook_id="msg_2")).status == 200


async def test_the_same_id_with_another_body_or_for_another_approval_is_a_conflict(
    acme: Program, conn: Connection
) -> None:
    interrupt_id, other = await ask(conn, tier=CAROLS), await ask(conn, "t2", tier=CAROLS)
    assert (await acme.decide_signed(interrupt_id, YES)).status == 200
    assert is_problem(await acme.decide_signed(interrupt_id, YES | {"decision": "reject"}), 409)
    assert is_problem(await acme.decide_signed(other, YES), 409)
    assert await value(conn, "SELECT count(*) FROM decisions") == 1


async def test_two_endpoints_may_use_the_same_id(acme: Program, conn: Connection) -> None:
    tier = Tier(name="approval", approvers=("webhook:acme:carol", "webhook:other:carol"), required=2)
    interrupt_id = await ask(conn, tier=tier)
    for secret in (SECRET, OTHER_SECRET):
        assert (await acme.decide_signed(interrupt_id, YES, secret=secret)).body["recorded"] is True
    people = [row["person"] for row in await all_rows(conn, "SELECT person FROM decisions ORDER BY person")]
    assert people == ["webhook:acme:carol", "webhook:other:carol"]


# Who may not


async def test_an_endpoint_speaks_only_for_its_own_people(acme: Program, conn: Connection) -> None:
    tier = Tier(name="approval", approvers=("webhook:acme:carol", "webhook:acme:eve", "U01ALICE"))
    interrupt_id = await ask(conn, tier=tier)
    # On the approval's list but not on the endpoint's; another endpoint's carol; somebody in Slack.
    for number, (approver, secret) in enumerate(
        [("eve", SECRET), ("carol", OTHER_SECRET), ("U01ALICE", SECRET), ("webhook:acme:carol", OTHER_SECRET)]
    ):
        answer = await acme.decide_signed(
            interrupt_id, {"decision": "approve", "approver": approver}, secret=secret, webhook_id=f"msg_{number}"
        )
        assert is_problem(answer, 403), approver
    assert await all_rows(conn, "SELECT * FROM decisions") == []


async def test_what_was_decided_before_is_said(acme: Program, conn: Connection) -> None:
    interrupt_id = await ask(conn, tier=CAROLS)
    await decide(conn, interrupt_id, ANN, NO)
    late = await acme.decide_signed(interrupt_id, YES)
    assert is_problem(late, 409, "already rejected by ann")
    assert (late.body["decision"], late.body["decided_by"]) == ("rejected", "ann")


async def test_an_approval_that_is_not_there_or_expired_is_said(acme: Program, conn: Connection) -> None:
    assert is_problem(await acme.decide_signed("0" * 32, YES), 404)
    expired = await ask(conn, tier=Tier(name="approval", approvers=CAROLS.approvers, expires_after_s=0))
    assert is_problem(await acme.decide_signed(expired, YES, webhook_id="msg_2"), 410)


# What is no signature


@pytest.mark.parametrize("off_s", [-301, 301])
async def test_an_old_or_early_signature_is_none(acme: Program, conn: Connection, off_s: int) -> None:
    interrupt_id = await ask(conn, tier=CAROLS)
    assert is_problem(await acme.decide_signed(interrupt_id, YES, at=time.time() + off_s), 401)
    assert (await acme.decide_signed(interrupt_id, YES, at=time.time() + off_s * 0.9)).status == 200


@pytest.mark.parametrize(
    "change",
    [
        {"webhook-signature": ""},
        {"webhook-signature": "v1"},
        {"webhook-signature": "v1,"},
        {"webhook-signature": "v1,%%%"},
        {"webhook-signature": "v1,a,b"},
        {"webhook-signature": "v1a,ZmFrZQ=="},
        {"webhook-signature": "v1,ZmFrZQ=="},
        {"webhook-signature": " ".join(["v1,ZmFrZQ=="] * 200)},
        {"webhook-timestamp": ""},
        {"webhook-timestamp": "nan"},
        {"webhook-timestamp": "1e9"},
        {"webhook-timestamp": "9" * 400},
        {"webhook-timestamp": "-161426533"},
        {"webhook-timestamp": "1614265330"},
        {"webhook-id": "msg 1"},
        {"webhook-id": "msg.1"},
        {"webhook-id": "m" * 129},
        {"webhook-id": "msg_2"},
    ],
    ids=lambda change: str(change)[:60],
)
async def test_whatever_is_not_signed_is_refused_before_it_is_read(
    acme: Program, conn: Connection, change: dict[str, str]
) -> None:
    interrupt_id = await ask(conn, tier=CAROLS)
    raw = json.dumps(YES).encode()
    path = f"/api/approvals/{interrupt_id}/decision"
    answer = await acme.ask("POST", path, raw=raw, headers=signed(raw) | change)
    assert is_problem(answer, 401, "not signed by an endpoint")
    assert await all_rows(conn, "SELECT * FROM decisions") == []
    assert await all_rows(conn, "SELECT * FROM receipts") == []
    assert (await acme.ask("POST", path, raw=raw, headers=signed(raw))).status == 200


async def test_another_body_than_the_signed_one_is_refused(acme: Program, conn: Connection) -> None:
    interrupt_id = await ask(conn, tier=CAROLS)
    headers = signed(json.dumps(YES | {"decision": "reject"}).encode())
    raw = json.dumps(YES).encode()
    assert is_problem(await acme.ask("POST", f"/api/approvals/{interrupt_id}/decision", raw=raw, headers=headers), 401)


async def test_without_an_id_a_request_is_malformed(acme: Program, conn: Connection) -> None:
    raw = json.dumps(YES).encode()
    headers = {name: text for name, text in signed(raw).items() if name != "webhook-id"}
    path = f"/api/approvals/{await ask(conn, tier=CAROLS)}/decision"
    assert is_problem(await acme.ask("POST", path, raw=raw, headers=headers), 400, "webhook-id is missing")


@pytest.mark.parametrize("raw", [b"", b"{", b"\xff\xfe", b"[]", b"null"], ids=repr)
async def test_a_signed_body_that_is_no_decision_is_malformed(acme: Program, conn: Connection, raw: bytes) -> None:
    path = f"/api/approvals/{await ask(conn, tier=CAROLS)}/decision"
    headers = signed(raw) if raw.isascii() else signed(b"")
    answer = await acme.ask("POST", path, raw=raw, headers=headers)
    assert is_problem(answer, 400 if raw.isascii() else 401)


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"aproved": False},
        {"approved": "no"},
        {"decision": "approve"},
        {"decision": True, "approver": "carol"},
        {"decision": "approved", "approver": "carol"},
        {"decision": "approve", "approver": ""},
        {"decision": "approve", "approver": None},
        {"decision": "approve", "approver": ["carol"]},
        {"decision": "approve", "approver": "carol", "amount": "1"},
    ],
    ids=json.dumps,
)
async def test_a_signed_body_of_another_shape_approves_nothing(
    acme: Program, conn: Connection, body: dict[str, Any]
) -> None:
    assert is_problem(await acme.decide_signed(await ask(conn, tier=CAROLS), body), 400)
    assert await all_rows(conn, "SELECT * FROM decisions") == []


async def test_a_body_that_is_too_large_is_refused(acme: Program, conn: Connection) -> None:
    body = YES | {"reason": "x" * LARGEST_BODY}
    assert is_problem(await acme.decide_signed(await ask(conn, tier=CAROLS), body), 413)


@pytest.mark.parametrize(
    ("headers", "raw", "status"),
    [
        ({"webhook-id": "x", "Content-Encoding": "gzip"}, b"not gzip", 400),
        ({"webhook-timestamp": "1", "webhook-signature": "v1,x"}, b"{}", 400),
        ({"webhook-id": "x"}, b" " * (LARGEST_BODY + 1), 413),
        ({"webhook-id": "x"}, b"{}", 401),
    ],
    ids=["not what it says", "no id", "too large", "not signed"],
)
async def test_a_stranger_is_refused_only_so_often_and_fills_no_log(
    database_url: str, caplog: pytest.LogCaptureFixture, headers: dict[str, str], raw: bytes, status: int
) -> None:
    path, headers = f"/api/approvals/{'0' * 32}/decision", headers | {"Connection": "close"}
    async with api_in_process(database_url, most_refused=2) as url, Program(url) as stranger:
        answers = [await stranger.ask("POST", path, raw=raw, headers=headers) for _ in range(3)]
    for answer, expected in zip(answers, (status, status, 429), strict=True):
        assert is_problem(answer, expected), answer
    assert [record.getMessage() for record in caplog.records if record.exc_info] == []


async def test_a_program_with_a_token_is_told_of_a_body_that_is_not_what_it_says_and_not_kept_out(
    database_url: str, conn: Connection
) -> None:
    headers = {"Content-Encoding": "gzip", "Connection": "close"}
    async with api_in_process(database_url, most_refused=0) as url, Program(url, await token(conn)) as robot:
        answer = await robot.ask("POST", "/api/threads", raw=b"not gzip", headers=headers)
    assert is_problem(answer, 400, "not what its headers say")


async def test_a_body_that_breaks_off_is_no_failure_of_ours(
    database_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    head = f"POST /api/approvals/{'0' * 32}/decision HTTP/1.1\r\nHost: x\r\nwebhook-id: x\r\nContent-Length: 9\r\n\r\n"
    caplog.set_level(logging.INFO)
    async with api_in_process(database_url) as url:
        _, writer = await asyncio.open_connection("127.0.0.1", URL(url).port)
        writer.write(f"{head}half".encode())
        await writer.drain()
        writer.close()

        async def answered() -> bool:
            return any(record.name == "bot.problems" for record in caplog.records)

        await until(answered)
    assert [record.getMessage() for record in caplog.records if record.exc_info] == []


async def test_without_secrets_the_door_is_shut(database_url: str, conn: Connection) -> None:
    interrupt_id = await ask(conn, tier=CAROLS)
    async with api_in_process(database_url, endpoints=()) as url, Program(url) as acme:
        assert is_problem(await acme.decide_signed(interrupt_id, YES), 401)


# Settings


@pytest.mark.parametrize(
    ("name", "given", "text"),
    [
        ("WEBHOOK_SECRETS", "acme", "ENDPOINT=whsec_"),
        ("WEBHOOK_SECRETS", "acme=secret", "ENDPOINT=whsec_"),
        ("WEBHOOK_SECRETS", "acme=whsec_c2hvcnQ=", "24 to 64"),
        ("WEBHOOK_SECRETS", f"Acme={SECRET}", "ENDPOINT=whsec_"),
        ("WEBHOOK_SECRETS", f"acme={SECRET},other={SECRET}", "acme and other share a secret"),
        ("WEBHOOK_APPROVERS", "carol", "ENDPOINT=NAME"),
        ("WEBHOOK_APPROVERS", "acme=carol smith", "ENDPOINT=NAME"),
        ("APPROVERS", "webhook:acme", "names nobody"),
        ("APPROVERS", "api:", "names nobody"),
    ],
)
def test_a_wrong_setting_is_said_and_no_secret_shown(
    monkeypatch: pytest.MonkeyPatch, name: str, given: str, text: str
) -> None:
    monkeypatch.setenv(name, given)
    with pytest.raises(SettingError, match=text) as wrong:
        read_settings()
    assert name in str(wrong.value)
    assert SECRET not in str(wrong.value)


def test_a_name_that_comes_twice_is_a_rotation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WEBHOOK_SECRETS", f"acme={SECRET}, acme={OLD_SECRET}, other={OTHER_SECRET}")
    monkeypatch.setenv("WEBHOOK_APPROVERS", "acme=carol, acme=dave@example.com")
    monkeypatch.setenv("APPROVERS", "U01ALICE, webhook:acme:carol, api:robot")
    settings = read_settings()
    assert settings.webhook_secret_lists == {"acme": [SECRET, OLD_SECRET], "other": [OTHER_SECRET]}
    assert settings.webhook_approver_names == {"acme": ["carol", "dave@example.com"]}
