"""Programs start, read and decide over HTTP; whoever has no token, or the wrong one, learns nothing."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from bot.api import LARGEST_BODY, ROUTES
from flow.approvals import decide, latest_approvals, latest_decisions
from flow.database import Connection, connect
from flow.drive import drive
from flow.flows import Flows
from flow.inputs import parse_claim
from flow.model import Person
from flow.payments import latest_payments, pay_from_ledger
from flow.policy import LIMITS, OneTier, Tier
from flow.threads import latest_threads
from flow.tokens import SCOPES, revoke_token
from tests.api_door import Program, api_in_process, token
from tests.asking import put, tool_call
from tests.command import Terminal
from tests.people import ALICE, POLICY, YES, ask, start_claim
from tests.rows import all_rows, value

NEW = {"thread": "t1", "amount": "250", "currency": "USD", "payee": "ACME", "note": "three chairs"}
ROBOTS = Tier(name="approval", approvers=("api:robot", "api:clerk"))


@pytest.fixture
async def url(database_url: str) -> AsyncIterator[str]:
    async with api_in_process(database_url) as running:
        yield running


@pytest.fixture
async def robot(url: str, conn: Connection) -> AsyncIterator[Program]:
    async with Program(url, await token(conn)) as program:
        yield program


def is_problem(answer: Any, status: int, text: str = "") -> bool:
    return bool(
        answer.status == status == answer.body["status"]
        and answer.headers["Content-Type"].startswith("application/problem+json")
        and answer.headers["X-Request-Id"]
        and text in answer.body["detail"]
    )


# Threads


async def test_a_claim_is_filed_driven_decided_and_paid(robot: Program, conn: Connection, flows: Flows) -> None:
    made = await robot.post("/api/threads", NEW)
    assert (made.status, made.headers["Location"]) == (201, "/api/threads/t1")
    assert (made.body["status"], made.body["amount"], made.body["requested_by"]) == ("running", "250.00", "api:robot")
    policy = OneTier(approvers=("api:clerk",), limits=LIMITS)
    await drive(conn, "t1", flows=flows, policy=policy)
    [waiting] = (await robot.get("/api/approvals", status="pending")).body["items"]
    assert (waiting["thread"], waiting["request"]["amount"]) == ("t1", "250.00")
    clerk = await token(conn, "clerk", ("decide",))
    decided = await robot.post(
        f"/api/approvals/{waiting['interrupt_id']}/decision",
        {"decision": "approve", "reason": "as agreed"},
        headers={"Authorization": f"Bearer {clerk}"},
    )
    assert (decided.status, decided.body["recorded"]) == (200, True)
    assert decided.body["approval"]["status"] == "approved"
    await drive(conn, "t1", flows=flows, policy=policy)
    shown = (await robot.get("/api/threads/t1")).body
    assert (shown["status"], shown["payment"]["reference"]) == ("paid", "L-t1")
    [paid] = (await robot.get("/api/payments", status="paid")).body["items"]
    assert (paid["thread"], paid["amount"], paid["currency"]) == ("t1", "250.00", "USD")
    [decision] = (await robot.get("/api/decisions")).body["items"]
    assert (decision["person"], decision["door"], decision["reason"]) == ("api:clerk", "api", "as agreed")


async def test_the_same_thread_again_is_answered_as_it_is_and_another_is_refused(robot: Program) -> None:
    assert (await robot.post("/api/threads", NEW)).status == 201
    again = await robot.post("/api/threads", NEW)
    assert (again.status, again.body["thread"]) == (200, "t1")
    assert is_problem(await robot.post("/api/threads", NEW | {"amount": "251"}), 409, "started before")


@pytest.mark.parametrize(
    "wrong",
    [
        {},
        [],
        NEW | {"extra": 1},
        NEW | {"amount": 250},
        NEW | {"amount": "-1"},
        NEW | {"amount": "1e3"},
        NEW | {"thread": "../etc"},
        NEW | {"currency": "usd"},
        NEW | {"note": "x" * 10_001},
        NEW | {"flow": "Claims"},
        NEW | {"input": "250"},
    ],
    ids=lambda wrong: json.dumps(wrong)[:60],
)
async def test_what_the_description_does_not_allow_is_malformed(robot: Program, conn: Connection, wrong: Any) -> None:
    assert is_problem(await robot.post("/api/threads", wrong), 400)
    assert await all_rows(conn, "SELECT * FROM threads") == []


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"amount": "0.00"}, "above zero"),
        ({"amount": "1.001"}, "at most 2 decimals"),
        ({"currency": "ZZZ"}, "ISO 4217"),
        ({"note": "a\0b"}, "cannot be stored"),
        ({"amount": None}, "amount"),
        ({"input": {"amount": "250"}}, "not both"),
    ],
)
async def test_what_only_we_can_tell_is_unusable(robot: Program, change: dict[str, Any], text: str) -> None:
    assert is_problem(await robot.post("/api/threads", NEW | change), 422, text)


@pytest.mark.parametrize(
    ("raw", "text"),
    [
        (b"", "not JSON"),
        (b"{", "not JSON"),
        (b"\xff", "not JSON"),
        (b"[" * 50_000, "not JSON"),
        (b'{"thread": "t1", "thread": "t2", "amount": "5"}', "comes twice"),
        (b"null", "it: "),
    ],
)
async def test_a_body_that_is_no_json_object_is_malformed(robot: Program, raw: bytes, text: str) -> None:
    assert is_problem(await robot.ask("POST", "/api/threads", raw=raw), 400, text)


async def test_a_body_of_another_kind_or_size_is_refused(robot: Program) -> None:
    other = await robot.ask("POST", "/api/threads", raw=b"thread=t1", headers={"Content-Type": "text/plain"})
    assert is_problem(other, 415)
    assert is_problem(await robot.ask("POST", "/api/threads", raw=b" " * (LARGEST_BODY + 1)), 413)


async def test_a_thread_that_is_not_there_is_not_found(robot: Program) -> None:
    assert is_problem(await robot.get("/api/threads/nobody"), 404, "no thread nobody")
    assert is_problem(await robot.get("/api/approvals/" + "0" * 32), 404)
    assert is_problem(await robot.get("/api/nothing"), 404)
    wrong_method = await robot.ask("DELETE", "/api/threads/nobody")
    assert is_problem(wrong_method, 405)
    assert "GET" in wrong_method.headers["Allow"]


# Idempotency-Key


async def test_a_key_gets_the_first_answer_again_and_nothing_is_done(robot: Program, conn: Connection) -> None:
    key = {"Idempotency-Key": "k-1"}
    first = await robot.post("/api/threads", NEW, headers=key)
    await conn.execute("UPDATE threads SET status = 'waiting'")
    again = await robot.post("/api/threads", NEW, headers=key)
    assert (again.status, again.body) == (201, first.body)
    assert is_problem(await robot.post("/api/threads", NEW | {"thread": "t2"}, headers=key), 422)
    assert await value(conn, "SELECT count(*) FROM threads") == 1


async def test_a_key_of_a_request_under_way_is_a_conflict(robot: Program, conn: Connection) -> None:
    async with conn.transaction():
        await conn.execute("SELECT pg_advisory_xact_lock(hashtextextended('api robot k-1', 0))")
        busy = await robot.post("/api/threads", NEW, headers={"Idempotency-Key": "k-1"})
    assert is_problem(busy, 409, "being worked on")
    assert busy.headers["Retry-After"] == "1"


async def test_a_key_of_a_refused_request_is_free(robot: Program) -> None:
    key = {"Idempotency-Key": "k-1"}
    await robot.post("/api/threads", NEW)
    assert (await robot.post("/api/threads", NEW | {"amount": "9"}, headers=key)).status == 409
    assert (await robot.post("/api/threads", NEW | {"thread": "t2"}, headers=key)).status == 201


@pytest.mark.parametrize("key", ["", "two words", "x" * 201, "é"])
async def test_a_key_that_is_none_is_malformed(robot: Program, key: str) -> None:
    assert is_problem(await robot.post("/api/threads", NEW, headers={"Idempotency-Key": key}), 400)


async def test_two_keys_are_malformed(url: str, conn: Connection) -> None:
    secret = await token(conn)
    reader, writer = await asyncio.open_connection(*url.removeprefix("http://").split(":"))
    body = json.dumps(NEW).encode()
    head = (
        f"POST /api/threads HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {secret}\r\nContent-Type: application/json\r\n"
    )
    keys = "Idempotency-Key: a\r\nIdempotency-Key: b\r\n"
    writer.write(f"{head}{keys}Content-Length: {len(body)}\r\nConnection: close\r\n\r\n".encode() + body)
    answer = (await reader.read()).decode()
    writer.close()
    assert answer.startswith("HTTP/1.1 400")
    assert "two Idempotency-Key headers" in answer


# Deciding


async def test_the_same_verdict_again_succeeds_and_the_other_says_who_decided(robot: Program, conn: Connection) -> None:
    path = f"/api/approvals/{await ask(conn, tier=ROBOTS)}/decision"
    for recorded in (True, False):
        answer = await robot.post(path, {"decision": "reject"})
        assert (answer.status, answer.body["recorded"]) == (200, recorded)
    late = await robot.post(path, {"decision": "approve"})
    assert is_problem(late, 409, "already rejected by robot")
    assert (late.body["decision"], late.body["decided_by"]) == ("rejected", "robot")
    assert late.body["decided_at"]


async def test_a_token_that_is_not_on_the_list_may_not_decide(robot: Program, conn: Connection) -> None:
    path = f"/api/approvals/{await ask(conn)}/decision"
    assert is_problem(await robot.post(path, {"decision": "approve"}), 403, "not on the list of approvers")
    assert await all_rows(conn, "SELECT * FROM decisions") == []


async def test_a_token_speaks_for_nobody_else(robot: Program, conn: Connection) -> None:
    path = f"/api/approvals/{await ask(conn)}/decision"
    for other in ("U01ALICE", "slack:T01TEST/U01ALICE", "api:clerk"):
        answer = await robot.post(path, {"decision": "approve", "approver": other})
        assert is_problem(answer, 403, "in its own name only")
    assert await all_rows(conn, "SELECT * FROM decisions") == []


async def test_a_token_does_not_decide_what_it_filed(robot: Program, conn: Connection, flows: Flows) -> None:
    await robot.post("/api/threads", NEW)
    await drive(conn, "t1", flows=flows, policy=OneTier(approvers=("api:robot",), limits=LIMITS))
    path = f"/api/approvals/{await value(conn, 'SELECT interrupt_id FROM approvals')}/decision"
    assert is_problem(await robot.post(path, {"decision": "approve"}), 403, "of their own")
    # Nor can it file it as somebody else.
    masked = await robot.post("/api/threads", NEW | {"thread": "t2", "requested_by": "U02BOB"})
    assert is_problem(masked, 403, "in its own name only")


async def test_a_token_that_only_files_learns_nothing_of_others_claims(
    robot: Program, url: str, conn: Connection
) -> None:
    await robot.post("/api/threads", NEW)
    async with Program(url, await token(conn, "hr", ("start",))) as hr:
        other = await hr.post("/api/threads", NEW | {"amount": "1"})
        assert is_problem(other, 409, "thread t1 was started before")
        assert "250" not in str(other.body) and "ACME" not in str(other.body)
        # Nor can it take over a claim in another's name.
        same = await hr.post("/api/threads", NEW | {"requested_by": "U02BOB"})
        assert is_problem(same, 409, "by somebody else")


async def test_what_is_decided_may_be_said_once_more_and_must_agree(robot: Program, conn: Connection) -> None:
    interrupt_id = await ask(conn, tier=ROBOTS)
    path = f"/api/approvals/{interrupt_id}/decision"
    digest = await value(conn, "SELECT request_hash FROM approvals")
    said = {"decision": "approve", "interrupt_id": interrupt_id, "request_hash": digest}
    assert is_problem(await robot.post(path, said | {"interrupt_id": "0" * 32}), 422, "another approval")
    assert is_problem(await robot.post(path, said | {"request_hash": "0" * 64}), 409, "has changed")
    assert await all_rows(conn, "SELECT * FROM decisions") == []
    assert (await robot.post(path, said)).status == 200


async def test_a_token_that_only_files_may_say_who_asks(url: str, conn: Connection) -> None:
    async with Program(url, await token(conn, "hr", ("start",))) as hr:
        made = await hr.post("/api/threads", NEW | {"requested_by": "U02BOB"})
        assert (made.status, made.body["requested_by"]) == (201, "U02BOB")


@pytest.mark.parametrize("body", [{}, {"aproved": True}, {"decision": "yes"}, {"decision": True}, {"approved": "no"}])
async def test_what_is_no_verdict_decides_nothing(robot: Program, conn: Connection, body: dict[str, Any]) -> None:
    path = f"/api/approvals/{await ask(conn, tier=ROBOTS)}/decision"
    assert is_problem(await robot.post(path, body), 400)
    assert await all_rows(conn, "SELECT * FROM decisions") == []


@pytest.mark.parametrize("method", ["GET", "HEAD", "PUT"])
async def test_nothing_but_a_post_decides(robot: Program, conn: Connection, method: str) -> None:
    path = f"/api/approvals/{await ask(conn, tier=ROBOTS)}/decision"
    answer = await robot.ask(method, path, {"decision": "approve"})
    assert answer.status == 405
    assert await all_rows(conn, "SELECT * FROM decisions") == []


async def test_an_expired_request_is_gone(robot: Program, conn: Connection) -> None:
    path = f"/api/approvals/{await ask(conn, tier=Tier(name='approval', approvers=('api:robot',), expires_after_s=0))}"
    assert is_problem(await robot.post(f"{path}/decision", {"decision": "approve"}), 410, "expired")


# Tokens

FIRST = [(route.method, route.path.format(thread="t1", interrupt_id="0" * 32)) for route in ROUTES]


@pytest.mark.parametrize(("method", "path"), FIRST)
@pytest.mark.parametrize("given", [None, "", "Bearer", "Bearer cf_wrong", "Basic cm9ib3Q6", "Bearer \xff"], ids=ascii)
async def test_without_a_token_nobody_gets_anything(url: str, method: str, path: str, given: str | None) -> None:
    async with Program(url) as stranger:
        headers = {} if given is None else {"Authorization": given}
        answer = await stranger.ask(method, f"/api{path}", raw=b"{", headers=headers)
    assert is_problem(answer, 401)
    assert answer.headers["WWW-Authenticate"] == "Bearer"


@pytest.mark.parametrize("route", ROUTES, ids=lambda route: route.name)
async def test_a_token_does_only_what_its_scopes_say(url: str, conn: Connection, route: Any) -> None:
    others = tuple(scope for scope in SCOPES if scope != route.scope)
    async with Program(url, await token(conn, "other", others)) as other:
        path = route.path.format(thread="t1", interrupt_id="0" * 32)
        assert is_problem(await other.ask(route.method, f"/api{path}"), 403, f"may not {route.scope}")


async def test_a_revoked_token_is_refused_from_now_on(robot: Program, conn: Connection) -> None:
    assert (await robot.get("/api/threads")).status == 200
    await revoke_token(conn, "robot", by="cli:ann")
    assert is_problem(await robot.get("/api/threads"), 401)


async def test_whoever_guesses_is_slowed_down_and_nobody_else(database_url: str, conn: Connection) -> None:
    secret = await token(conn)
    async with api_in_process(database_url, most_refused=3) as url, Program(url) as stranger:
        statuses = [(await stranger.get("/api/threads")).status for _ in range(4)]
        assert statuses == [401, 401, 401, 429]
        refused = await stranger.get("/api/threads")
        assert is_problem(refused, 429, "ask again in")
        assert 0 < int(refused.headers["Retry-After"]) <= 60
        async with Program(url, secret) as robot:
            assert (await robot.get("/api/threads")).status == 200


async def test_one_token_decides_so_often_and_no_more(database_url: str, conn: Connection) -> None:
    path = f"/api/approvals/{await ask(conn, tier=ROBOTS)}/decision"
    async with api_in_process(database_url, most_decisions=2) as url, Program(url, await token(conn)) as robot:
        answers = [(await robot.post(path, {"decision": "reject"})).status for _ in range(3)]
        assert answers == [200, 200, 429]


async def test_only_a_tokens_hash_is_kept(conn: Connection) -> None:
    secret = await token(conn)
    row = await value(conn, "SELECT row_to_json(t)::text FROM api_tokens t")
    assert secret.startswith("cf_")
    assert secret not in row
    assert secret[3:] not in row


async def test_tokens_are_made_listed_and_revoked_at_the_command_line(
    tmp_path: Path, database_url: str, conn: Connection, url: str
) -> None:
    terminal = Terminal(tmp_path, DATABASE_URL=database_url)
    made = await terminal.run_meanwhile("tokens", "create", "robot", "--scope", "read")
    assert (made.code, made.out.startswith("cf_")) == (0, True)
    async with Program(url, made.out.strip()) as program:
        assert (await program.get("/api/threads")).status == 200
    again = await terminal.run_meanwhile("tokens", "create", "robot", "--scope", "read")
    assert (again.code, "there is, or was, a token robot" in again.err) == (1, True)
    assert (await terminal.run_meanwhile("tokens", "create", "x", "--scope", "all")).code == 2
    assert (await terminal.run_meanwhile("tokens", "create", "X", "--scope", "read")).code == 2
    assert (await terminal.run_meanwhile("tokens", "revoke", "robot")).code == 0
    assert (await terminal.run_meanwhile("tokens", "revoke", "nobody")).code == 1
    [listed] = (await terminal.run_meanwhile("tokens", "list", "--json")).json
    assert (listed["name"], listed["scopes"], bool(listed["revoked_at"])) == ("robot", ["read"], True)
    assert "robot: read; by cli:" in (await terminal.run_meanwhile("tokens", "list")).out


@pytest.mark.parametrize("levels", [51, 600, 900])
async def test_an_answer_that_nothing_could_keep_is_unusable_before_and_after_it_was_decided(
    robot: Program, conn: Connection, levels: int
) -> None:
    interrupt_id = await put(conn, tool_call(), tier=ROBOTS)
    path = f"/api/approvals/{interrupt_id}/decision"
    args = b'{"a":' * levels + b"1" + b"}" * levels
    raw = b'{"decision": "approve", "answer": {"actions": [{"type": "edit", "args": %b}]}}' % args
    assert is_problem(await robot.ask("POST", path, raw=raw), 422, "nested more than 50 levels deep")
    edited = {"decision": "approve", "answer": {"actions": [{"type": "edit", "args": {"to": "carol"}}]}}
    assert (await robot.post(path, edited)).status == 200
    assert is_problem(await robot.ask("POST", path, raw=raw), 422, "nested more than 50 levels deep")
    assert (await robot.post(path, edited)).status == 200


async def test_the_deepest_answer_that_is_kept_may_be_given_again(robot: Program, conn: Connection) -> None:
    interrupt_id = await put(conn, tool_call(), tier=ROBOTS)
    args: Any = 1
    for _ in range(49):
        args = {"a": args}
    edited = {"decision": "approve", "answer": {"actions": [{"type": "edit", "args": args}]}}
    answers = [await robot.post(f"/api/approvals/{interrupt_id}/decision", edited) for _ in range(2)]
    assert [(answer.status, answer.body["recorded"]) for answer in answers] == [(200, True), (200, False)]


# Pages


async def test_pages_have_everything_once_newest_first(robot: Program, conn: Connection) -> None:
    for number in range(5):
        await ask(conn, f"t{number}")
    # Two of one instant.
    await conn.execute("UPDATE threads SET created_at = '2026-01-01' WHERE thread_id IN ('t1', 't2')")
    await conn.execute("UPDATE approvals SET requested_at = '2026-01-01' WHERE thread_id IN ('t1', 't2')")
    for path in ("/api/threads", "/api/approvals"):
        seen: list[str] = []
        cursor: dict[str, str] = {}
        while True:
            page = (await robot.get(path, limit=2, **cursor)).body
            seen += [item["thread"] for item in page["items"]]
            if page["next"] is None:
                break
            cursor = {"cursor": page["next"]}
        assert seen == ["t4", "t3", "t0", "t1", "t2"], path


async def test_decisions_and_payments_page_too(robot: Program, conn: Connection) -> None:
    for number in range(3):
        await decide(conn, await ask(conn, f"t{number}"), ALICE, YES)
        await pay_from_ledger(conn, f"t{number}", parse_claim(amount="250", currency="USD"), [])
    for path in ("/api/decisions", "/api/payments"):
        first = (await robot.get(path, limit=2)).body
        rest = (await robot.get(path, limit=2, cursor=first["next"])).body
        assert [item["thread"] for item in first["items"] + rest["items"]] == ["t2", "t1", "t0"]
        assert rest["next"] is None


async def test_decisions_page_whoever_made_them(robot: Program, conn: Connection) -> None:
    addresses = ("mail:alice+claims@example.com", "mail:50%off@example.com")
    keys = (*addresses, "webhook:acme:carol+sales", "cli:Ünal & ~söhne/+", "cli:" + "ü" * 200)
    tier = Tier(name="approval", approvers=keys, required=len(keys))
    interrupt_id = await ask(conn, tier=tier)
    for key in keys:
        await decide(conn, interrupt_id, Person(key=key, name="x", names=frozenset({key})), YES)
    # All of one instant.
    await conn.execute("UPDATE decisions SET decided_at = '2026-01-01'")
    seen: list[str] = []
    page = (await robot.get("/api/decisions", limit=1)).body
    while page["items"]:
        seen += [item["person"] for item in page["items"]]
        answer = await robot.get("/api/decisions", limit=1, cursor=page["next"])
        assert answer.status == 200, answer.body
        page = answer.body
    assert sorted(seen) == sorted(keys)


@pytest.mark.parametrize("cursor", ["1~A", "1~_w", "1~AA"], ids=["no base64", "no text", "a NUL"])
async def test_a_cursor_of_ones_own_making_is_refused(robot: Program, cursor: str) -> None:
    for path in ("/api/threads", "/api/approvals", "/api/decisions"):
        assert is_problem(await robot.get(path, cursor=cursor), 422, "`next` of the page before")


@pytest.mark.parametrize(
    "query",
    [{"limit": "0"}, {"limit": "201"}, {"limit": "x"}, {"status": "nice"}, {"cursor": "x"}, {"page": "2"}],
    ids=str,
)
async def test_a_wrong_query_is_malformed(robot: Program, query: dict[str, str]) -> None:
    assert is_problem(await robot.get("/api/threads", **query), 400)


async def test_a_query_parameter_that_comes_twice_is_malformed(robot: Program) -> None:
    assert is_problem(await robot.get("/api/threads?limit=1&limit=2"), 400, "comes twice")


class Explaining:
    """A connection that explains the first query it gets instead of running it."""

    class Plan(Exception):
        """What it would do."""

    def __init__(self, conn: Connection) -> None:
        self._conn = conn

    async def execute(self, query: Any, values: Any) -> None:
        text = query if isinstance(query, str) else query.as_string(self._conn)
        rows = await (await self._conn.execute(f"EXPLAIN {text}".encode(), values)).fetchall()
        raise self.Plan("\n".join(row["QUERY PLAN"] for row in rows))


BEFORE = (datetime(2026, 1, 1, tzinfo=UTC), "a")
LATEST: dict[str, Callable[[Any, bool], Awaitable[Any]]] = {
    "threads": lambda conn, one: latest_threads(conn, status="paid" if one else None, limit=50, before=BEFORE),
    "approvals": lambda conn, one: latest_approvals(conn, status="pending" if one else None, limit=50, before=BEFORE),
    "decisions": lambda conn, _: latest_decisions(conn, limit=50, before=BEFORE),
    "payments": lambda conn, one: latest_payments(conn, status="paid" if one else None, limit=50, before=9),
}


@pytest.mark.parametrize("table", LATEST)
@pytest.mark.parametrize("of_one_status", [False, True])
async def test_a_page_comes_from_an_index_in_its_order(conn: Connection, table: str, *, of_one_status: bool) -> None:
    """Whatever the table's size."""
    for other_way in ("seqscan", "bitmapscan", "sort", "hashjoin", "mergejoin"):
        await conn.execute(f"SET enable_{other_way} = off".encode())
    with pytest.raises(Explaining.Plan) as plan:
        await LATEST[table](Explaining(conn), of_one_status)
    assert "Index" in str(plan.value)
    assert "Sort" not in str(plan.value)
    assert "Seq Scan" not in str(plan.value)


# When the database is away


async def test_while_the_database_is_away_the_answer_is_not_now(database_url: str, conn: Connection) -> None:
    secret = await token(conn)
    async with api_in_process(database_url) as url, Program(url, secret) as robot:
        assert (await robot.get("/api/threads")).status == 200
        async with await connect(database_url, "drive") as other, other.transaction():
            await other.execute("LOCK TABLE threads")
            answer = await robot.get("/api/threads")
        assert is_problem(answer, 503, "twice is once")
        assert answer.headers["Retry-After"]
        assert (await robot.get("/api/threads")).status == 200


async def test_a_slack_persons_click_and_a_program_meet_in_one_row(
    robot: Program, conn: Connection, flows: Flows
) -> None:
    await start_claim(conn)
    await drive(conn, "t1", flows=flows, policy=POLICY)
    interrupt_id = await value(conn, "SELECT interrupt_id FROM approvals")
    await decide(conn, interrupt_id, ALICE, YES)
    shown = (await robot.get(f"/api/approvals/{interrupt_id}")).body
    assert [decision["name"] for decision in shown["decisions"]] == ["Alice"]
