"""Filing a claim in Slack: the form, what is wrong by field, and one claim however often it is sent."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import pytest

from bot.filing import new_claim_view, thread_id_of
from flow.database import Connection
from tests.block_kit import view_findings, words_of
from tests.home_door import Member, member_at_a_bot
from tests.people import ALICE
from tests.rows import all_rows, break_table, mend_table, one_row, until, value

CLAIM = {"amount": "250", "currency": "USD", "payee": "ACME", "note": "three chairs\nand a table"}


@pytest.fixture
async def alice(database_url: str) -> AsyncIterator[Member]:
    async with member_at_a_bot(database_url) as alice:
        yield alice


async def opened_form(alice: Member) -> dict[str, Any]:
    """The form that `/claims new` opens; what becomes of it is told where that was typed."""
    assert await alice.command("new") == {}
    view = alice.slack.views[-1]
    assert view_findings(view) == []
    return view


async def test_a_claim_is_filed_by_its_form_and_its_person_is_told(alice: Member, conn: Connection) -> None:
    assert await alice.send(await opened_form(alice), CLAIM) == {}

    # Committed before the form closes.
    row = await one_row(conn, "SELECT thread_id, flow, input, requested_by, due_at IS NOT NULL AS due FROM threads")
    thread_id = thread_id_of("T01TEST", "V1")
    assert row == {
        "thread_id": thread_id,
        "flow": "claims",
        "input": {**CLAIM, "amount": "250.00"},
        "requested_by": ALICE.key,
        "due": True,
    }
    note = await alice.bot.note()
    assert f"Filed as {thread_id}: 250.00 USD to ACME." in note and "`/claims mine`" in note


async def test_a_form_sent_twice_or_at_once_files_one_claim(alice: Member, conn: Connection) -> None:
    view = await opened_form(alice)
    assert await asyncio.gather(*(alice.send(view, CLAIM) for _ in range(5))) == [{}] * 5
    assert await alice.send(view, CLAIM) == {}
    assert await value(conn, "SELECT count(*) FROM threads") == 1
    # Another form is another claim, even with the same in it.
    assert await alice.send(view, CLAIM, view_id="V2") == {}
    assert await value(conn, "SELECT count(*) FROM threads") == 2


async def test_a_form_that_was_filed_is_not_filed_with_something_else_in_it(alice: Member, conn: Connection) -> None:
    view = await opened_form(alice)
    await alice.send(view, CLAIM)
    answer = await alice.send(view, CLAIM | {"amount": "999"})
    assert "This form was filed before" in answer["errors"]["amount"]
    assert await value(conn, "SELECT input->>'amount' FROM threads") == "250.00"


@pytest.mark.parametrize(
    ("field", "typed", "said"),
    [
        ("amount", "ten", "Write digits"),
        ("amount", "0", "It must be above zero."),
        ("amount", "-5", "Write digits"),
        ("amount", "1.234", "USD has at most 2 decimals."),
        ("amount", "", "Write digits"),
        ("currency", "XYZ", "Use an ISO 4217 code"),
        ("payee", "a\nb", "It must be one line."),
        ("payee", "x" * 201, "It has 201 characters"),
        ("note", "a\x00b", "It contains the character"),
    ],
)
async def test_what_is_wrong_is_said_beside_its_field_and_nothing_is_filed(
    alice: Member, conn: Connection, field: str, typed: str, said: str
) -> None:
    answer = await alice.send(new_claim_view(), CLAIM | {field: typed})
    assert answer["response_action"] == "errors"
    assert list(answer["errors"]) == [field] and said in answer["errors"][field]
    assert await all_rows(conn, "SELECT * FROM threads") == []


async def test_a_currency_is_understood_in_small_letters_and_spaces_are_no_part_of_anything(
    alice: Member, conn: Connection
) -> None:
    await alice.send(new_claim_view(), {"amount": " 5 ", "currency": " eur "})
    assert await value(conn, "SELECT input FROM threads") == {
        "amount": "5.00", "currency": "EUR", "payee": "", "note": "",
    }  # fmt: skip


async def test_a_database_that_refuses_keeps_the_form_open_and_sending_again_files_it(
    alice: Member, conn: Connection
) -> None:
    view = await opened_form(alice)
    await break_table(conn, "threads", "INSERT", "RAISE SQLSTATE '57P01'")
    answer = await alice.send(view, CLAIM)
    assert "twice is once" in answer["errors"]["amount"]
    assert await all_rows(conn, "SELECT * FROM threads") == []
    await mend_table(conn)
    assert await alice.send(view, CLAIM) == {}
    assert await value(conn, "SELECT count(*) FROM threads") == 1


async def test_a_database_that_takes_too_long_keeps_the_form_open_and_sending_again_is_once(
    alice: Member, conn: Connection
) -> None:
    view = await opened_form(alice)
    async with conn.transaction():
        await conn.execute("LOCK TABLE threads IN ACCESS EXCLUSIVE MODE")
        assert "twice is once" in (await alice.send(view, CLAIM))["errors"]["amount"]
    assert await alice.send(view, CLAIM) == {}
    assert await value(conn, "SELECT count(*) FROM threads") == 1


async def test_somebody_of_another_team_files_nothing(alice: Member, conn: Connection) -> None:
    stranger = {"user": {"id": "U01ALICE", "team_id": "T0OTHER"}}
    view = new_claim_view() | {"state": {"values": {"amount": {"amount": {"value": "5"}}}}}
    view["state"]["values"]["currency"] = {"currency": {"value": "USD"}}
    answered = await alice.submit(view, **stranger)
    assert "only members of this workspace" in answered.body.lower()
    assert await all_rows(conn, "SELECT * FROM threads") == []


async def test_the_shortcut_opens_the_form_and_its_person_is_told_in_a_direct_message(
    alice: Member, conn: Connection
) -> None:
    assert (await alice.shortcut()).status == 200
    [view] = alice.slack.views
    assert view_findings(view) == []
    assert await alice.send(view, CLAIM) == {}

    async def messages() -> list[dict[str, Any]]:
        return list(alice.slack.messages.values())

    [message] = await until(messages)
    assert message["channel"] == "U01ALICE" and "Filed as slack-" in message["text"]


async def test_a_form_opened_in_home_is_told_of_there(alice: Member, conn: Connection) -> None:
    view = await alice.opened_home()
    assert (await alice.press_in_home(view, "new-claim")).status == 200
    assert await alice.send(alice.slack.views[-1], CLAIM | {"payee": "<!channel>"}) == {}

    after = await alice.home(after=1)
    assert "250.00 USD to &lt;!channel&gt;" in words_of(after)
    assert thread_id_of("T01TEST", "V1") in words_of(after)


async def test_a_trigger_that_has_expired_is_told_and_nothing_is_acknowledged_in_vain(alice: Member) -> None:
    said = await alice.command("new", trigger_id="expired_trigger_id")
    assert "could not be opened" in said["text"]
    assert (await alice.shortcut("expired_trigger_id")).status == 503


def test_a_threads_id_is_its_forms_and_nobody_elses() -> None:
    ids = {thread_id_of(team, view) for team in ("T1", "T2") for view in ("V1", "V2")}
    assert len(ids) == 4
    assert thread_id_of("T1", "V1") == thread_id_of("T1", "V1")


async def test_two_people_file_each_their_own(alice: Member, conn: Connection) -> None:
    bob = replace(alice, id="U02BOB")
    await alice.send(new_claim_view(), CLAIM, view_id="V1")
    await bob.send(new_claim_view(), CLAIM, view_id="V2")
    rows = await all_rows(conn, "SELECT requested_by FROM threads ORDER BY requested_by")
    assert [row["requested_by"] for row in rows] == [ALICE.key, "slack:T01TEST/U02BOB"]
