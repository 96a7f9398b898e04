"""Filing a claim in Slack: the form, what is wrong by field, and one claim however often it is sent."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import pytest

from bot import groups
from bot.desk import Audience
from bot.filing import new_claim_view, thread_id_of
from flow.database import Connection
from flow.settings import Settings
from tests.block_kit import view_findings, words_of
from tests.home_door import Member, member_at_a_bot
from tests.local_slack import free_port
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
    view = await alice.modal()
    assert view_findings(view) == [] and "submit" in view, words_of(view)
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
    view = await alice.modal()
    assert view_findings(view) == []
    assert await alice.send(view, CLAIM) == {}
    assert "Filed as slack-" in (await direct_message(alice))["text"]


async def test_who_cannot_be_told_where_they_typed_is_told_in_a_direct_message(alice: Member, conn: Connection) -> None:
    nowhere = f"http://127.0.0.1:{free_port()}/note"
    assert await alice.command("new", response_url=nowhere) == {}
    assert await alice.send(await alice.modal(), CLAIM | {"payee": "https://evil.example.com"}) == {}
    message = await direct_message(alice)
    assert "Filed as slack-" in message["text"]
    assert (message["unfurl_links"], message["unfurl_media"]) == (False, False)


async def direct_message(alice: Member) -> dict[str, Any]:
    """The only one that Alice has got, once it is there."""

    async def messages() -> list[dict[str, Any]]:
        return list(alice.slack.messages.values())

    [message] = await until(messages)
    assert message["channel"] == "U01ALICE"
    return message


# Who may


async def refused_form(member: Member) -> str:
    """What the form says in its place; whoever has sent one all the same is told so, too, and nothing is filed."""
    assert await member.command("new") == {}
    view = await member.modal()
    assert "submit" not in view and view_findings(view) == []
    answer = await member.send(new_claim_view(), CLAIM)
    said: str = answer["errors"]["amount"]
    assert said in words_of(view)
    return said


_KINDS: list[dict[str, Any]] = [
    {"is_restricted": True},
    {"is_restricted": True, "is_ultra_restricted": True},
    {"is_bot": True},
    {"deleted": True},
    {"is_stranger": True},
    {"is_restricted": None},
    {"team_id": "T0OTHER"},
]


@pytest.mark.parametrize("kind", _KINDS, ids=lambda kind: "-".join(f"{name}-{said}" for name, said in kind.items()))
async def test_whoever_is_no_full_member_of_ours_files_nothing(
    alice: Member, conn: Connection, kind: dict[str, Any]
) -> None:
    alice.slack.kinds[alice.id] = kind
    assert "Only members of this workspace file claims here, and no guests" in await refused_form(alice)
    assert await all_rows(conn, "SELECT * FROM threads") == []


async def test_where_slack_does_not_say_who_it_is_nothing_is_filed(alice: Member, conn: Connection) -> None:
    alice.slack.silent.add(alice.id)
    assert "Slack did not say who you are" in await refused_form(alice)
    assert await all_rows(conn, "SELECT * FROM threads") == []
    alice.slack.silent.clear()
    assert await alice.send(new_claim_view(), CLAIM) == {}


async def test_whoever_became_a_guest_while_the_form_was_open_files_nothing(
    alice: Member, conn: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    view = await opened_form(alice)
    alice.slack.kinds[alice.id] = {"is_restricted": True}
    # What Slack has said is good for a minute.
    monkeypatch.setattr(groups, "_KEPT_S", 0.0)
    assert "no guests" in (await alice.send(view, CLAIM))["errors"]["amount"]
    assert await all_rows(conn, "SELECT * FROM threads") == []


@pytest.mark.parametrize(
    "filers", ["U01ALICE", "slack:T01TEST/U01ALICE", "U02BOB, @staff", "S01STAFF", "mail:Alice@Example.com"]
)
async def test_filers_are_named_by_id_by_group_or_by_address_and_nobody_else_files(
    database_url: str, conn: Connection, filers: str
) -> None:
    names = Settings(filers=filers).filer_names
    async with member_at_a_bot(database_url, audience=Audience(filers=names)) as alice:
        alice.slack.groups["S01STAFF", "staff"] = ["U01ALICE", "U66GUEST"]
        alice.slack.kinds["U01ALICE"] = {"profile": {"email": "alice@example.com"}}
        alice.slack.kinds["U66GUEST"] = {"is_restricted": True, "profile": {"email": "alice@example.com"}}
        for other, said in (("U03CAROL", "not among those who file claims"), ("U66GUEST", "no guests")):
            assert said in await refused_form(replace(alice, id=other))
        assert await all_rows(conn, "SELECT * FROM threads") == []
        assert await alice.send(await opened_form(alice), CLAIM) == {}
    assert await value(conn, "SELECT requested_by FROM threads") == ALICE.key


@pytest.mark.parametrize("filers", ["alice", "cli:ann", "webhook:acme:carol", "api:robot", "U01ALICE, <@U02BOB>"])
def test_what_names_no_filer_is_refused_at_the_start(filers: str) -> None:
    with pytest.raises(ValueError, match="files nothing in Slack"):
        Settings(filers=filers)


async def test_a_form_opened_in_home_is_told_of_there(alice: Member, conn: Connection) -> None:
    view = await alice.opened_home()
    assert (await alice.press_in_home(view, "new-claim")).status == 200
    assert await alice.send(await alice.modal(), CLAIM | {"payee": "<!channel>"}) == {}

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
