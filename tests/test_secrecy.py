"""No secret reaches a request: it is refused by its name or its form, and is not in the refusal. Nothing else is."""

from __future__ import annotations

import hashlib
import json
import uuid
from typing import Any, TypedDict

import pytest
from hypothesis import given
from hypothesis import strategies as st
from langgraph.graph import END, START, StateGraph
from langgraph.types import interrupt
from pydantic import BaseModel

from flow.asking import Request, ask
from flow.database import Connection
from flow.errors import SecretInRequest
from flow.flows import Flow, Flows
from flow.questions import stored_question
from flow.secrecy import check_no_secret
from flow.threads import insert_thread
from tests.driving import run, thread_row
from tests.rows import all_rows, value

# None of them opens anything: parts, so that whoever scans this file for secrets finds none.
STRIPE = "sk_live_" + "51H8xTz2eZvKYlo2C"
GITHUB = "ghp_" + "a1B2c3D4e5F6" * 3
SLACK = "xoxb-" + "123456789012-abcdef"
OPENAI = "sk-proj-" + "a1B2c3D4e5F6g7H8i9J0"
AWS = "AKIA" + "IOSFODNN7EXAMPLE"
JWT = "eyJ" + "hbGciOiJIUzI1NiJ9.eyJzdWIiOiIxIn0." + "c2lnbmF0dXJl"
PEM = "-----BEGIN " + "RSA PRIVATE KEY-----\nMIIEow"
CARD = "4111" + "111111111111"
AMEX = "3782 " + "822463 10005"

SECRET_VALUES = (
    STRIPE, GITHUB, SLACK, OPENAI, AWS, JWT, PEM, CARD, AMEX, "4111 1111 1111 1111", "5555-5555-5555-4444",
    "Bearer abcDEF123456ghiJKL", "Authorization: Basic dXNlcjpwYXNz", "postgresql://ann:hunter2@db.example.com/claims",
    "password=correcthorse", "the login, password: hunter2", "https://example.com/in?token=a1b2c3d4e5f6a7b8c9",
    str({"api_key": "correcthorse"}),
)  # fmt: skip

SECRET_NAMES = (
    "password", "Password", "userPassword", "db_passwd", "API key", "apiKey", "client_secret", "accessToken",
    "refresh-token", "CVV", "privateKey", "Passphrase", "SECRET_KEY", "new password 2",
)  # fmt: skip

# What money flows do ask about.
PLAIN = {
    "Order": "4000123412341235", "Invoice": "INV-2026-00004111", "Payee": "ACME GmbH, Berlin",
    "IBAN": "DE89 3704 0044 0532 0130 00", "IBAN (NL)": "NL91ABNA0417164300",
    "IBAN (ES)": "ES91 2100 0418 4502 0005 1332",
    "Amount": "4,111,111,111,111.11", "Id": "12345678-1234-4234-8234-123456789012", "Phone": "+4917012345678",
    "Hash": hashlib.sha256(b"order").hexdigest(), "Thread": "batch-2026-11-30:7", "Token budget": "1200000",
    "Tokens": "400", "Max tokens": "4096", "Token": "USDC", "Secret Santa budget": "40", "Password policy": "12 signs",
    "Reset password": "for carol@example.com", "Password reset": "https://example.com/reset", "Password": "********",
    "API key": "redacted", "Card number ends in": "4242", "Card": "**** **** **** 1111", "Authorization": "PO-2026-118",
    "Link": "https://example.com/orders/4000123412341235?tab=1", "Pages": "http://127.0.0.1:4000/a/b",
    "Note": "the bearer certificate-of-deposit is due; basic understanding of the risk-assessment",
    "At": "1796072400123", "Key": "order-7", "Keyboard": "3", "Passport": "C01X00T47", "Compass": "needed",
}  # fmt: skip


def question(value: Any) -> dict[str, Any]:
    return stored_question(value.as_value() if isinstance(value, Request) else value)


def refused(value: Any, *allowed: str) -> str:
    with pytest.raises(SecretInRequest) as caught:
        check_no_secret(question(value), allowed=allowed)
    return str(caught.value)


@pytest.mark.parametrize("secret", SECRET_VALUES)
def test_a_value_that_is_a_secret_is_refused_wherever_it_stands_and_is_not_repeated(secret: str) -> None:
    action = {"name": "pay", "args": {"to": {"them": [secret]}}}
    config = [{"action_name": "pay", "allowed_decisions": ["approve", "reject"]}]
    for asked in (
        Request(title=f"Use {secret}"),
        Request(title="Pay", fields={"Note": f"with {secret} as agreed"}),
        Request(title="Pay", options=("yes", secret)),
        {"title": "Pay", "fields": {"How": {"with": secret}}},
        {"action_requests": [action], "review_configs": config},
        {"action_requests": [action | {"args": {}, "description": secret}], "review_configs": config},
        {"anything": secret},
        secret,
    ):
        said = refused(asked)
        assert secret not in said
        assert "Pass a reference" in said
        assert "not_secret" in said


@pytest.mark.parametrize("name", SECRET_NAMES)
def test_a_value_with_the_name_of_a_secret_is_refused_and_the_name_is_said(name: str) -> None:
    action = {"type": "tool_approval", "name": "log_in", "args": {"with": {name: "correct horse"}}}
    for asked in (Request(title="Log in", fields={name: "correct horse"}), action, {"user": {name: "correct horse"}}):
        said = refused(asked)
        assert repr(name) in said
        assert "correct horse" not in said


def test_a_secret_that_is_a_name_is_not_repeated_either() -> None:
    assert STRIPE not in refused(Request(title="Pay", fields={STRIPE: "1"}))


def test_a_number_of_a_card_is_found_as_a_number_too() -> None:
    assert "payment card" in refused({"type": "tool_approval", "name": "pay", "args": {"card": int(CARD)}})


@pytest.mark.parametrize("name", PLAIN)
def test_what_flows_ask_about_is_no_secret(name: str) -> None:
    check_no_secret(question(Request(title="Pay", fields={name: PLAIN[name]})), allowed=())
    check_no_secret(question({name: PLAIN[name]}), allowed=())


def test_a_request_with_all_of_it_in_one_is_no_secret() -> None:
    check_no_secret(question(Request(title="Token budget: 1200000 tokens", fields=PLAIN)), allowed=())
    check_no_secret(question(json.dumps(PLAIN)), allowed=())


@given(st.uuids(), st.binary(), st.decimals(0, 10**12, places=2), st.datetimes(), st.integers(0, 10**13 - 1))
def test_ids_hashes_amounts_times_and_short_numbers_are_never_secrets(
    an_id: uuid.UUID, content: bytes, amount: Any, when: Any, number: int
) -> None:
    texts = [
        str(an_id),
        hashlib.sha256(content).hexdigest(),
        f"{amount} USD",
        f"{amount:,}",
        when.isoformat(),
        str(number),
    ]
    for text in [*texts, ", ".join(texts)]:
        check_no_secret(question(Request(title=text, fields={"Value": text})), allowed=())


def test_a_name_that_the_flow_allows_is_let_through_and_only_that_name() -> None:
    asked = Request(title="Rotate", fields={"Api key": "old-one", "Webhook": f"was {SLACK}"})
    check_no_secret(question(asked), allowed=("api_key", "webhook"))
    assert "Webhook" in refused(asked, "api_key")
    assert "Api key" in refused(asked, "webhook")


def test_what_an_allowed_name_holds_may_stand_in_the_description_too() -> None:
    call = {
        "type": "tool_approval",
        "name": "call",
        "args": {"card": CARD},
        "description": f"Args: {{'card': '{CARD}'}}",
    }
    check_no_secret(question(call), allowed=("card",))
    assert "description" in refused(call | {"description": f"not {AMEX}"}, "card")


# In a drive


class Input(BaseModel):
    pass


class State(TypedDict, total=False):
    result: bool


def flow_that_asks(value: Any, **more: Any) -> Flows:
    async def node(state: State) -> State:
        return {"result": bool(ask(value).approved if isinstance(value, Request) else interrupt(value))}

    graph = StateGraph(State)
    graph.add_node("only", node)
    graph.add_edge(START, "only")
    graph.add_edge("only", END)
    return Flows([Flow(name="asks", version="1", build=lambda: graph, input=Input, **more)])


async def drive_one(conn: Connection, flows: Flows) -> str:
    await insert_thread(conn, thread_id="t1", flow="asks", flow_version="1", input={}, requested_by="cli:ann")
    return await run(conn, flows)


@pytest.mark.parametrize("asked", [Request(title="Log in", fields={"Token": GITHUB}), {"password": "hunter2"}])
async def test_a_thread_that_would_show_a_secret_is_stuck_with_the_reason_and_an_alarm(
    conn: Connection, asked: Any
) -> None:
    assert await drive_one(conn, flow_that_asks(asked)) == "stuck"
    row = await thread_row(conn)
    assert (row["status"], row["due"]) == ("stuck", False)
    assert "would show a secret to everybody" in row["reason"]
    assert await value(conn, "SELECT count(*) FROM notices WHERE kind = 'alarm'") == 1
    assert await all_rows(conn, "SELECT * FROM approvals") == []
    assert GITHUB not in row["reason"]
    assert "hunter2" not in row["reason"]


async def test_a_thread_whose_flow_allows_the_name_waits(conn: Connection) -> None:
    flows = flow_that_asks(Request(title="Log in", fields={"Token": GITHUB}), not_secret=("token",))
    assert await drive_one(conn, flows) == "waiting"
