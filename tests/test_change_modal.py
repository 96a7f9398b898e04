"""The form behind the Change button: opened for who may decide, decided like a click, told in place what is wrong."""

from __future__ import annotations

import itertools
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from bot.blocks import Press, parse_press
from bot.questions import typed_in
from flow.approvals import decide
from flow.database import Connection
from flow.questions import question_of, stored_question
from tests.asking import DINNER, MAIL, human_interrupt, put, tool_call, tool_calls
from tests.block_kit import view_findings, words_of
from tests.local_slack import CHANNEL, LocalSlack, skip_reason
from tests.people import BOB, NO, TWO_OF_THREE
from tests.rows import all_rows, one_row, rewrite, until, value
from tests.services import QuietSlack
from tests.slack_door import Caller, bot_in_process, client_of, content_of
from tests.slack_requests import ABSENT, button
from tests.test_socket_mode import Office

_CAROL = {"to": "carol@example.com", "text": "Hello"}
_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@pytest.fixture
async def slack() -> AsyncIterator[QuietSlack]:
    async with QuietSlack() as running:
        yield running


@pytest.fixture
async def bot(database_url: str, slack: QuietSlack) -> AsyncIterator[Caller]:
    """A bot that runs in this process, and somebody in front of it."""
    async with client_of(slack.url) as client, bot_in_process(database_url, client) as url, Caller(url) as caller:
        yield caller


def filled(step: str | None, args: str | None = None, message: str | None = None, number: int = 0) -> dict[str, Any]:
    """The state of one action's fields, as Slack sends it: a field that is empty is there, and null."""
    chosen = {"text": {"type": "plain_text", "text": "x"}, "value": step} if step else None
    return {
        f"step-{number}": {f"step-{number}": {"type": "static_select", "selected_option": chosen}},
        f"args-{number}": {f"args-{number}": {"type": "plain_text_input", "value": args}},
        f"message-{number}": {f"message-{number}": {"type": "plain_text_input", "value": message}},
    }


async def change(bot: Caller, conn: Connection, interrupt_id: str, **fields: Any) -> int:
    """Press Change."""
    return (await bot.click(await bot.body_of(conn, interrupt_id, "change", ts="1.1", **fields))).status


async def shown(slack: QuietSlack) -> dict[str, Any]:
    """The newest modal, once it is filled."""

    async def modals() -> list[dict[str, Any]]:
        return slack.views

    return await content_of(modals)


async def words(slack: QuietSlack) -> str:
    """What the newest modal says, which cannot be sent."""
    view = await shown(slack)
    assert view_findings(view) == []
    assert "submit" not in view
    return words_of(view)


async def answer(conn: Connection) -> Any:
    return await value(conn, "SELECT answer FROM decisions")


async def nobody_decided(conn: Connection) -> bool:
    undecided = await value(conn, "SELECT status FROM approvals") == "pending"
    return undecided and await all_rows(conn, "SELECT * FROM decisions") == []


# The form is opened


async def test_change_opens_a_form_that_slack_takes_with_the_arguments_in_it(
    bot: Caller, slack: QuietSlack, conn: Connection
) -> None:
    interrupt_id = await put(conn, tool_call())
    assert await change(bot, conn, interrupt_id) == 200

    view = await shown(slack)
    assert [view_findings(each) for each in (*slack.opened, view)] == [[], []]
    elements = {each["block_id"]: each["element"] for each in view["blocks"] if each["type"] == "input"}
    assert json.loads(elements["args-0"]["initial_value"]) == MAIL
    choices = [each["value"] for each in elements["step-0"]["options"]]
    assert choices == ["approve", "edit", "respond", "reject"]
    # What nobody chose is no decision.
    assert "initial_option" not in elements["step-0"]
    carried = json.loads(view["private_metadata"])
    digest = await value(conn, "SELECT request_hash FROM approvals")
    assert carried == {"interrupt": interrupt_id, "hash": digest, "channel": CHANNEL, "ts": "1.1"}
    assert await nobody_decided(conn)


async def test_a_form_offers_nothing_that_is_not_allowed(bot: Caller, slack: QuietSlack, conn: Connection) -> None:
    await change(bot, conn, await put(conn, tool_calls(("a", {}, ("approve",)), ("b", {}, ("edit", "reject")))))

    view = await shown(slack)
    inputs = {each["block_id"]: each["element"] for each in view["blocks"] if each["type"] == "input"}
    assert list(inputs) == ["step-0", "step-1", "args-1", "message-1"]
    assert inputs["step-0"]["initial_option"]["value"] == "approve"


async def test_a_stranger_is_told_why_there_is_no_form(bot: Caller, slack: QuietSlack, conn: Connection) -> None:
    assert await change(bot, conn, await put(conn, tool_call()), by="U66EVE") == 200
    assert (
        await words(slack) == "U66eve may not decide this: not on the list of approvers (U01ALICE, U02BOB, U03CAROL)."
    )


async def test_a_settled_question_opens_no_form(bot: Caller, slack: QuietSlack, conn: Connection) -> None:
    interrupt_id = await put(conn, tool_call())
    await decide(conn, interrupt_id, BOB, NO)
    assert await change(bot, conn, interrupt_id) == 200
    assert (await words(slack)).startswith("Already rejected by Bob")


async def test_who_gets_no_form_from_slack_is_told_to_click_again(
    bot: Caller, slack: QuietSlack, conn: Connection
) -> None:
    interrupt_id = await put(conn, tool_call())
    assert await change(bot, conn, interrupt_id, trigger_id="expired_trigger_id") == 503
    assert await bot.note() == "⚠️ The form could not be opened. Please try again in a moment."
    assert await change(bot, conn, interrupt_id, trigger_id=ABSENT) == 400
    assert await bot.note() == "This button is not one of ours any more: look at the newest message."
    assert await change(bot, conn, interrupt_id, actions=[button("change", "of another release")]) == 400
    assert await bot.note() == "This button is not one of ours any more: look at the newest message."
    assert slack.views == []


async def test_a_form_about_something_else_is_told_so(bot: Caller, slack: QuietSlack, conn: Connection) -> None:
    interrupt_id = await put(conn, tool_call())
    stale = button("change", json.dumps({"interrupt": interrupt_id, "hash": "f" * 64}))
    assert await change(bot, conn, interrupt_id, actions=[stale]) == 200
    assert "changed" in await words(slack)
    # A request that has nothing to change.
    assert await change(bot, conn, await put(conn, DINNER, "q2")) == 200
    assert await words(slack) == "This button is not one of ours any more: look at the newest message."


# The form is decided


@pytest.mark.parametrize(
    ("asked", "values", "verdict", "said"),
    [
        (tool_call(), filled("approve", json.dumps(MAIL, indent=4)), "approve", [{"type": "approve"}]),
        (tool_call(), filled("edit", json.dumps(_CAROL)), "approve", [{"type": "edit", "args": _CAROL}]),
        (tool_call(), filled("reject", json.dumps(MAIL)), "reject", [{"type": "reject"}]),
        (tool_call(), filled("reject", None, " no "), "reject", [{"type": "reject", "message": "no"}]),
        (tool_call(), filled("respond", None, "Ask Bob"), "approve", [{"type": "respond", "message": "Ask Bob"}]),
        (human_interrupt(), filled("edit", '{"to": "x"}'), "approve", [{"type": "edit", "args": {"to": "x"}}]),
        (
            tool_calls(("a", {}, ("approve", "reject")), ("b", {}, ("approve", "reject"))),
            filled("approve") | filled("reject", number=1),
            "approve",
            [{"type": "approve"}, {"type": "reject"}],
        ),
    ],
)
async def test_a_form_is_one_committed_decision(
    bot: Caller, conn: Connection, asked: Any, values: Any, verdict: str, said: Any
) -> None:
    interrupt_id = await put(conn, asked)
    assert await bot.submit(conn, interrupt_id, values) == (200, {})

    decision = await one_row(conn, "SELECT person, person_name, verdict, door, answer FROM decisions")
    assert decision == {
        "person": "slack:T01TEST/U01ALICE",
        "person_name": "u01alice",
        "verdict": verdict,
        "door": "slack",
        "answer": {"actions": said},
    }
    assert await value(conn, "SELECT wakes FROM threads") == 1
    # Sent twice, it is one, and says by whom.
    status = await value(conn, "SELECT status FROM approvals")
    assert await bot.submit(conn, interrupt_id, values) == (200, {"step-0": f"Already {status} by u01alice."})


@pytest.mark.parametrize(
    ("values", "wrong"),
    [
        (filled(None), {"step-0": "Choose what becomes of it."}),
        (filled("delete"), {"step-0": "Choose what becomes of it."}),
        (filled("edit", "{"), {"args-0": "This is no JSON object: Expecting property name"}),
        (filled("edit", ""), {"args-0": "This is no JSON object: "}),
        (filled("edit", "[1]"), {"args-0": "This is no JSON object: it must be an object"}),
        (filled("edit", '{"to": 1, "to": 2}'), {"args-0": "This is no JSON object: a name comes twice"}),
        (filled("edit", '{"to": NaN}'), {"args-0": "This is no JSON object: NaN is no number"}),
        (filled("edit", '{"to": "\\u0000"}'), {"args-0": "This is no JSON object: it contains a character"}),
        (filled("edit", '{"a":' * 400 + "1" + "}" * 400), {"args-0": "This is no JSON object: it is nested"}),
        (filled("edit", json.dumps({"to": "x" * 20_000})), {"step-0": "Answer "}),
        (filled("approve", '{"to": "carol"}'), {"args-0": "You changed this: choose to edit, or put it back."}),
        (filled("reject", "{"), {"args-0": "You changed this: choose to edit, or put it back."}),
        (filled("approve", None, "but only once"), {"message-0": "This goes with an answer or a rejection"}),
        (filled("edit", "{", "why"), {"args-0": "This is no JSON", "message-0": "This goes with"}),
        (filled("respond", None, "  "), {"message-0": "Write the answer."}),
    ],
)
async def test_a_form_that_cannot_be_taken_says_so_beside_the_field(
    bot: Caller, conn: Connection, values: Any, wrong: dict[str, str]
) -> None:
    status, errors = await bot.submit(conn, await put(conn, tool_call()), values)
    assert (status, errors.keys()) == (200, wrong.keys())
    assert all(errors[name].startswith(begins) for name, begins in wrong.items()), errors
    assert await nobody_decided(conn)


async def test_a_form_by_who_may_not_decide_is_told_so(bot: Caller, conn: Connection) -> None:
    interrupt_id = await put(conn, tool_call(), requested_by="U02BOB")
    for person, why in (("U66EVE", "not on the list"), ("U02BOB", "nobody decides a request of their own")):
        _, errors = await bot.submit(conn, interrupt_id, filled("approve"), by=person)
        assert why in errors["step-0"]
    _, errors = await bot.submit(conn, interrupt_id, filled("approve"), team="T99OTHER")
    assert "not on the list" in errors["step-0"]
    assert await nobody_decided(conn)


async def test_a_form_that_comes_too_late_or_is_about_something_else_is_told_so(bot: Caller, conn: Connection) -> None:
    interrupt_id = await put(conn, tool_call())
    stale = json.dumps({"interrupt": interrupt_id, "hash": "f" * 64})
    _, errors = await bot.submit(conn, interrupt_id, filled("approve"), private_metadata=stale)
    assert "changed" in errors["step-0"]
    nowhere = json.dumps({"interrupt": "0" * 32, "hash": "f" * 64})
    _, errors = await bot.submit(conn, interrupt_id, filled("approve"), private_metadata=nowhere)
    assert errors["step-0"].startswith("No approval has the interrupt id")
    await rewrite(conn, "expires_at = clock_timestamp() - interval '1 second'")
    _, errors = await bot.submit(conn, interrupt_id, filled("approve"))
    assert "expired" in errors["step-0"]
    assert await nobody_decided(conn)
    await rewrite(conn, "expires_at = NULL")
    await decide(conn, interrupt_id, BOB, NO)
    _, errors = await bot.submit(conn, interrupt_id, filled("approve"))
    assert errors["step-0"].startswith("Already rejected by Bob")


async def test_a_form_that_is_not_committed_in_time_stays_and_can_be_sent_again(bot: Caller, conn: Connection) -> None:
    interrupt_id = await put(conn, tool_call())
    async with conn.transaction():
        await conn.execute("SELECT FROM approvals FOR UPDATE")
        _, errors = await bot.submit(conn, interrupt_id, filled("edit", json.dumps(_CAROL)))
        assert errors["step-0"].startswith("This could not be confirmed in time.")
    await bot.submit(conn, interrupt_id, filled("edit", json.dumps(_CAROL)))
    assert await answer(conn) == {"actions": [{"type": "edit", "args": _CAROL}]}


async def test_two_who_must_both_approve_must_say_the_same(bot: Caller, conn: Connection) -> None:
    interrupt_id = await put(conn, tool_call(), tier=TWO_OF_THREE)
    edited = filled("edit", json.dumps(_CAROL))
    assert await bot.submit(conn, interrupt_id, edited) == (200, {})
    for person in ("U01ALICE", "U02BOB"):
        _, errors = await bot.submit(conn, interrupt_id, filled("approve"), by=person)
        assert "has approved it with another answer" in errors["step-0"]
    assert await value(conn, "SELECT status FROM approvals") == "pending"
    assert await bot.submit(conn, interrupt_id, edited, by="U02BOB") == (200, {})
    assert await value(conn, "SELECT status FROM approvals") == "approved"


async def test_an_option_is_chosen_by_its_button_and_no_other_way(bot: Caller, conn: Connection) -> None:
    interrupt_id = await put(conn, DINNER)
    digest = await value(conn, "SELECT request_hash FROM approvals")
    for name, more, status in (
        ("approve", {}, 200),
        ("approve-1", {}, 400),
        ("approve-1", {"option": "pay never"}, 200),
        ("approve-x", {"option": "pay later"}, 200),
    ):
        pressed = button(name, json.dumps({"interrupt": interrupt_id, "hash": digest, **more}))
        assert (await bot.click(await bot.body_of(conn, interrupt_id, actions=[pressed]))).status == status
        assert await nobody_decided(conn)
    pressed = button("approve-1", json.dumps({"interrupt": interrupt_id, "hash": digest, "option": "pay later"}))
    assert (await bot.click(await bot.body_of(conn, interrupt_id, actions=[pressed]))).status == 200
    assert await answer(conn) == {"option": "pay later"}


# Forms as Slack never sends them


async def test_no_malformed_form_fails_the_bot_or_decides(bot: Caller, conn: Connection) -> None:
    interrupt_id = await put(conn, tool_call())
    odd: list[Any] = [None, 0, "\x00", "\ud83d", [], [1], {}, {"id": {}}, "x" * 100_000]
    for name, each in itertools.product(("private_metadata", "state", "callback_id", "type", "blocks", "team_id"), odd):
        values = filled("no step of ours")
        status, _ = await bot.submit(conn, interrupt_id, values, **{name: each})
        assert status < 500, (name, each)
    for each in odd:
        for values in (each, {"step-0": each}, {"step-0": {"step-0": each}}, filled("approve") | {"step-0": {"x": 1}}):
            status, errors = await bot.submit(conn, interrupt_id, values)
            assert (status, errors) == (200, {"step-0": "Choose what becomes of it."})
    assert await nobody_decided(conn)


@settings(deadline=None, max_examples=200, suppress_health_check=[HealthCheck.too_slow])
@given(_JSON.filter(lambda each: isinstance(each, dict)), st.text(), _JSON)
def test_no_payload_makes_the_reading_of_a_form_raise(body: dict[str, Any], text: str, values: Any) -> None:
    assert isinstance(parse_press(body, text), Press | None)
    question = question_of(stored_question(tool_call()))
    read = {"step-0": {"step-0": values}, "args-0": values, "message-0": {"message-0": {"value": values}}}
    [typed] = typed_in(read, question)
    assert all(isinstance(each, str) for each in (typed.step, typed.args, typed.message))


# Over a websocket


@pytest.mark.skipif(skip_reason() is not None, reason=skip_reason() or "")
async def test_the_form_works_in_socket_mode(conn: Connection, database_url: str, tmp_path: Path) -> None:
    interrupt_id = await put(conn, tool_call())
    with LocalSlack() as slack:
        async with Office(tmp_path, database_url, slack).service("bot"):
            await until(lambda: all_rows(conn, "SELECT * FROM messages"))
            ts = await value(conn, "SELECT ts FROM messages WHERE interrupt_id = %s", interrupt_id)
            await slack.click("U01ALICE", CHANNEL, ts, "change")
            await content_of(slack.modals)
            assert await slack.submit_modal("U01ALICE", filled("edit", "{")) != {}
            assert await nobody_decided(conn)
            assert await slack.submit_modal("U01ALICE", filled("edit", json.dumps(_CAROL))) == {}
            assert await slack.modals() == []
    assert await answer(conn) == {"actions": [{"type": "edit", "args": _CAROL}]}
