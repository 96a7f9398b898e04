"""The modals behind a card's buttons: opened at once, then filled; sent, refused in place, or too late."""

from __future__ import annotations

import itertools
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from flow.approvals import decide
from flow.changes import change_amount, withdraw
from flow.database import Connection
from flow.flows import Flows
from flow.policy import Tier
from flow.threads import thread_of
from tests.asking import REFUND, put
from tests.block_kit import buttons_of, view_findings, words_of
from tests.local_slack import CHANNEL, LocalSlack, skip_reason
from tests.people import BOB, NO, POLICY, TWO_OF_THREE, YES, ask, slack_person
from tests.rows import all_rows, one_row, rewrite, until, value
from tests.services import QuietSlack
from tests.slack_door import Caller, bot_in_process, client_of, content_of, errors_in, reject_in, typed_in
from tests.slack_requests import ABSENT, button
from tests.test_change_modal import shown, words
from tests.test_socket_mode import Office

_PAGE = Tier(name="approval", approvers=POLICY.approvers, step_up=True)
_APPROVERS = POLICY.approvers
_MODALS = ("reject", "change-amount", "details")


@pytest.fixture
async def slack() -> AsyncIterator[QuietSlack]:
    async with QuietSlack() as running:
        yield running


@pytest.fixture
async def bot(database_url: str, slack: QuietSlack) -> AsyncIterator[Caller]:
    """A bot that runs in this process, and somebody in front of it."""
    async with client_of(slack.url) as client, bot_in_process(database_url, client) as url, Caller(url) as caller:
        yield caller


async def press(bot: Caller, conn: Connection, interrupt_id: str, action_id: str, **fields: Any) -> int:
    return (await bot.click(await bot.body_of(conn, interrupt_id, action_id, ts="1.1", **fields))).status


async def reject(bot: Caller, conn: Connection, interrupt_id: str, reason: str = "", **who: str) -> dict[str, str]:
    """Send Reject's modal; what is wrong with it, by block."""
    answered = await bot.click(await bot.rejection_of(conn, interrupt_id, reason, **who))
    assert answered.status == 200
    return errors_in(answered)


async def ask_for(bot: Caller, conn: Connection, interrupt_id: str, amount: str, **how: Any) -> dict[str, str]:
    """Send the modal that asks for another amount; what is wrong with it, by block."""
    values = typed_in(amount=amount, reason=how.pop("reason", ""))
    status, errors = await bot.submit(conn, interrupt_id, values, callback_id="change-amount", **how)
    assert status == 200
    return errors


async def nobody_decided(conn: Connection) -> bool:
    undecided = await value(conn, "SELECT status FROM approvals") == "pending"
    return undecided and await all_rows(conn, "SELECT * FROM decisions") == []


# Opened


@pytest.mark.parametrize("name", _MODALS)
async def test_a_modal_opens_while_the_database_is_busy_and_is_filled_when_it_answers(
    bot: Caller, slack: QuietSlack, conn: Connection, name: str
) -> None:
    interrupt_id = await ask(conn)
    body = await bot.body_of(conn, interrupt_id, name, ts="1.1")
    async with conn.transaction():
        await conn.execute("LOCK TABLE approvals IN ACCESS EXCLUSIVE MODE")
        assert (await bot.click(body)).status == 200
        [skeleton] = slack.views
        assert words_of(skeleton).startswith("One moment…")
        assert view_findings(skeleton) == []
        assert "submit" not in skeleton
    view = await shown(slack)
    assert view_findings(view, mentions=_APPROVERS) == []
    assert "250.00 USD" in words_of(view)
    assert await nobody_decided(conn)


@pytest.mark.parametrize("name", _MODALS)
async def test_who_gets_no_modal_from_slack_is_told_to_click_again(
    bot: Caller, slack: QuietSlack, conn: Connection, name: str
) -> None:
    interrupt_id = await ask(conn)
    assert await press(bot, conn, interrupt_id, name, trigger_id="expired_trigger_id") == 503
    assert await bot.note() == "⚠️ The form could not be opened. Please try again in a moment."
    assert await press(bot, conn, interrupt_id, name, trigger_id=ABSENT) == 400
    assert await bot.note() == "This button is not one of ours any more: look at the newest message."
    assert slack.views == []
    assert await nobody_decided(conn)


async def test_a_modal_that_was_closed_before_it_was_filled_troubles_nobody(
    bot: Caller, slack: QuietSlack, conn: Connection, caplog: pytest.LogCaptureFixture
) -> None:
    interrupt_id = await ask(conn)
    slack.closes_modals = True
    assert await press(bot, conn, interrupt_id, "reject") == 200
    await until(lambda: _logged(caplog, "a form was not filled"))
    # What stands there if it is open after all says what to do.
    assert "close this and click again" in words_of(slack.views[0])
    slack.closes_modals = False
    assert await press(bot, conn, interrupt_id, "reject") == 200
    assert "250.00 USD" in words_of(await shown(slack))
    assert "Traceback" not in caplog.text


async def _logged(caplog: pytest.LogCaptureFixture, text: str) -> bool:
    return text in caplog.text


async def test_rejects_modal_shows_what_is_rejected_and_asks_why(
    bot: Caller, slack: QuietSlack, conn: Connection
) -> None:
    interrupt_id = await ask(conn)
    assert await press(bot, conn, interrupt_id, "reject") == 200
    view = await shown(slack)
    said = words_of(view)
    assert all(each in said for each in ("250.00 USD", "ACME", "cli:ann"))
    [reason] = [each for each in view["blocks"] if each["type"] == "input"]
    assert reason["optional"] is True
    assert reason["hint"]["text"] == "Whoever asked for it will read this."
    digest = await value(conn, "SELECT request_hash FROM approvals")
    carried = {"interrupt": interrupt_id, "hash": digest, "channel": CHANNEL, "ts": "1.1"}
    assert json.loads(view["private_metadata"]) == carried


async def test_a_question_of_another_flow_is_rejected_the_same_way(
    bot: Caller, slack: QuietSlack, conn: Connection
) -> None:
    interrupt_id = await put(conn, REFUND)
    assert await press(bot, conn, interrupt_id, "reject") == 200
    assert "1,250.00 EUR: Refund" in words_of(await shown(slack))
    assert await reject(bot, conn, interrupt_id, "no such order") == {}
    assert await value(conn, "SELECT reason FROM decisions") == "no such order"
    # It has no amount of a claim's.
    assert await press(bot, conn, await put(conn, REFUND, "q2"), "change-amount") == 200
    assert "no amount that could be changed" in await words(slack)


@pytest.mark.parametrize("name", ["reject", "change-amount"])
async def test_a_modal_says_why_there_is_nothing_to_decide(
    bot: Caller, slack: QuietSlack, conn: Connection, name: str
) -> None:
    numbers = itertools.count(1)

    async def said(of: str, **fields: Any) -> str:
        assert await press(bot, conn, of, name, **fields) == 200
        return await words(slack)

    async def one(**how: Any) -> str:
        return await ask(conn, f"t{next(numbers)}", **how)

    assert "not on the list of approvers" in await said(await one(), by="U66EVE")
    assert "not on the list of approvers" in await said(await one(), team="T99OTHER")
    assert "nobody decides a request of their own" in await said(await one(requested_by="U01ALICE"))
    interrupt_id = await one()
    stale = button(name, json.dumps({"interrupt": interrupt_id, "hash": "f" * 64}))
    assert "has changed since it was shown" in await said(interrupt_id, actions=[stale])
    nowhere = button(name, json.dumps({"interrupt": "0" * 32, "hash": "f" * 64}))
    assert "No approval has the interrupt id" in await said(interrupt_id, actions=[nowhere])
    await decide(conn, interrupt_id, BOB, YES)
    assert (await said(interrupt_id)).startswith("Already approved by Bob at ")
    interrupt_id = await one()
    await decide(conn, interrupt_id, BOB, NO)
    assert (await said(interrupt_id)).startswith("Already rejected by Bob at ")
    interrupt_id = await one(requested_by="U04DANA")
    await withdraw(conn, f"t{next(numbers) - 1}", slack_person("U04DANA", "Dana"))
    assert (await said(interrupt_id)).startswith("Already withdrawn by U04DANA at ")
    interrupt_id = await one()
    await rewrite(conn, "expires_at = clock_timestamp() - interval '1 second'")
    # Before the clock has seen it.
    assert (await said(interrupt_id)).startswith("Already expired at ")
    interrupt_id = await one()
    await change_amount(conn, interrupt_id, BOB, amount="200", door="cli", request_hash=None)
    assert await said(interrupt_id) == "Already superseded: what is asked for now is on a newer card."


# Rejected


async def test_a_rejection_keeps_its_reason_and_sent_twice_it_is_one(bot: Caller, conn: Connection) -> None:
    interrupt_id = await ask(conn)
    assert await reject(bot, conn, interrupt_id, " bought <elsewhere>\nalready ") == {}
    decision = await one_row(conn, "SELECT person, person_name, verdict, door, reason FROM decisions")
    assert decision == {
        "person": "slack:T01TEST/U01ALICE",
        "person_name": "u01alice",
        "verdict": "reject",
        "door": "slack",
        "reason": "bought <elsewhere>\nalready",
    }
    assert await value(conn, "SELECT status FROM approvals") == "rejected"
    [kept] = await all_rows(conn, "SELECT data ->> 'reason' AS reason FROM audit WHERE kind = 'approval.voted'")
    assert kept == {"reason": "bought <elsewhere>\nalready"}
    assert await reject(bot, conn, interrupt_id, "again") == {"reason": "Already rejected by u01alice."}
    assert await value(conn, "SELECT reason FROM decisions") == "bought <elsewhere>\nalready"
    assert await value(conn, "SELECT wakes FROM threads") == 1


async def test_a_rejection_without_a_reason_is_one(bot: Caller, conn: Connection) -> None:
    assert await reject(bot, conn, await ask(conn)) == {}
    assert await value(conn, "SELECT reason FROM decisions") == ""


@pytest.mark.parametrize(("reason", "wrong"), [("x" * 2001, "at most 2000"), ("a\x00b", "cannot be stored")])
async def test_a_reason_that_cannot_be_kept_is_told_beside_it(
    bot: Caller, conn: Connection, reason: str, wrong: str
) -> None:
    errors = await reject(bot, conn, await ask(conn), reason)
    assert wrong in errors["reason"]
    assert await nobody_decided(conn)


async def test_a_rejection_by_who_may_not_is_told_so(bot: Caller, conn: Connection) -> None:
    interrupt_id = await ask(conn, requested_by="U02BOB")
    for who, why in (
        ({"by": "U66EVE"}, "not on the list"),
        ({"team": "T99OTHER"}, "not on the list"),
        ({"by": "U02BOB"}, "nobody decides a request of their own"),
    ):
        assert why in (await reject(bot, conn, interrupt_id, **who))["reason"]
    assert await nobody_decided(conn)


async def test_a_rejection_that_comes_too_late_or_is_stale_is_told_so(bot: Caller, conn: Connection) -> None:
    interrupt_id = await ask(conn)
    stale = json.dumps({"interrupt": interrupt_id, "hash": "f" * 64})
    _, errors = await bot.submit(conn, interrupt_id, typed_in(reason=""), callback_id="reject", private_metadata=stale)
    assert "changed" in errors["reason"]
    await rewrite(conn, "expires_at = clock_timestamp() - interval '1 second'")
    assert (await reject(bot, conn, interrupt_id))["reason"].startswith("Already expired at ")
    await rewrite(conn, "expires_at = NULL")
    assert await nobody_decided(conn)
    await decide(conn, interrupt_id, BOB, YES)
    assert (await reject(bot, conn, interrupt_id))["reason"].startswith("Already approved by Bob at ")
    assert await value(conn, "SELECT status FROM approvals") == "approved"


async def test_a_rejection_that_is_not_committed_in_time_stays_and_can_be_sent_again(
    bot: Caller, conn: Connection
) -> None:
    interrupt_id = await ask(conn)
    async with conn.transaction():
        await conn.execute("SELECT FROM approvals FOR UPDATE")
        errors = await reject(bot, conn, interrupt_id, "no")
        assert errors["reason"].startswith("This could not be confirmed in time.")
    await reject(bot, conn, interrupt_id, "no")
    assert await one_row(conn, "SELECT verdict, reason FROM decisions") == {"verdict": "reject", "reason": "no"}


async def test_who_approved_may_still_reject_with_a_reason(bot: Caller, conn: Connection) -> None:
    interrupt_id = await ask(conn, tier=TWO_OF_THREE)
    for _ in range(2):
        assert await press(bot, conn, interrupt_id, "approve") == 200
    assert await bot.note() == "Your vote counts already: 1 of 2 approvals."
    assert await reject(bot, conn, interrupt_id, "on second thoughts") == {}
    assert await one_row(conn, "SELECT verdict, reason FROM decisions") == {
        "verdict": "reject",
        "reason": "on second thoughts",
    }


async def test_pressing_reject_decides_nothing_and_whoever_may_not_is_kept_in_the_audit_log(
    bot: Caller, slack: QuietSlack, conn: Connection
) -> None:
    interrupt_id = await ask(conn)
    for person, refused in (("U01ALICE", []), ("U66EVE", [{"who": "slack:T01TEST/U66EVE", "door": "slack"}])):
        assert await press(bot, conn, interrupt_id, "reject", by=person) == 200
        await shown(slack)
        assert await all_rows(conn, "SELECT who, door FROM audit WHERE kind = 'approval.refused'") == refused
    assert await nobody_decided(conn)


@pytest.mark.parametrize("callback_id", ["reject", "change-amount"])
async def test_no_malformed_form_fails_the_bot(bot: Caller, conn: Connection, callback_id: str) -> None:
    interrupt_id = await ask(conn)
    odd: list[Any] = [None, 0, "\x00", "\ud83d", [], [1], {}, {"id": {}}, "x" * 100_000]
    for each in odd:
        status, _ = await bot.submit(conn, interrupt_id, {}, callback_id=callback_id, private_metadata=each)
        assert status == 400
    for each in odd:
        for values in (each, {"amount": each}, {"amount": {"amount": each}}, {"amount": {"amount": {"value": each}}}):
            status, _ = await bot.submit(conn, interrupt_id, values, callback_id="change-amount")
            assert status == 200
    assert await nobody_decided(conn)


# Another amount


async def test_another_amount_supersedes_the_request_and_is_asked_for_anew(
    bot: Caller, slack: QuietSlack, conn: Connection, flows: Flows
) -> None:
    interrupt_id = await ask(conn)
    assert await press(bot, conn, interrupt_id, "change-amount") == 200
    view = await shown(slack)
    amount, reason = [each for each in view["blocks"] if each["type"] == "input"]
    assert (amount["label"]["text"], amount["element"]["initial_value"]) == ("Amount in USD", "250.00")
    assert reason["optional"] is True

    assert await ask_for(bot, conn, interrupt_id, "200", reason="two chairs", by="U02BOB") == {}
    row = await one_row(conn, "SELECT status, changed_to, changed_by, changed_why FROM approvals")
    assert row == {
        "status": "superseded",
        "changed_to": {"amount": "200.00"},
        "changed_by": "slack:T01TEST/U02BOB",
        "changed_why": "two chairs",
    }
    # Sent twice is once.
    assert await ask_for(bot, conn, interrupt_id, "200.00", by="U02BOB") == {}
    late = await ask_for(bot, conn, interrupt_id, "300")
    assert late == {"amount": "Already superseded: what is asked for now is on a newer card."}
    assert (await thread_of(conn, "t1")).asks_for["amount"] == "200.00"


@pytest.mark.parametrize(
    ("amount", "wrong"),
    [
        ("", "write digits"),
        ("two hundred", "write digits"),
        ("1,000", "write digits"),
        ("-5", "write digits"),
        ("٢٠٠", "write digits"),
        ("200.001", "USD has at most 2 decimals"),
        ("0", "above zero"),
        ("250", "asked for already"),
    ],
)
async def test_an_amount_that_cannot_be_asked_for_is_told_beside_it(
    bot: Caller, conn: Connection, amount: str, wrong: str
) -> None:
    errors = await ask_for(bot, conn, await ask(conn), amount)
    assert wrong in errors["amount"]
    assert await nobody_decided(conn)


async def test_another_amount_from_who_may_not_decide_is_refused(bot: Caller, conn: Connection) -> None:
    interrupt_id = await ask(conn, requested_by="U02BOB")
    for who, why in (({"by": "U66EVE"}, "not on the list"), ({"by": "U02BOB"}, "a request of their own")):
        assert why in (await ask_for(bot, conn, interrupt_id, "200", **who))["amount"]
    long = await ask_for(bot, conn, interrupt_id, "200", reason="x" * 2001)
    assert "at most 2000" in long["reason"]
    assert await nobody_decided(conn)


# Details


async def test_details_show_everything_in_full(bot: Caller, slack: QuietSlack, conn: Connection) -> None:
    interrupt_id = await ask(conn, tier=TWO_OF_THREE)
    note = "<&>" * 3000 + " the end"
    await conn.execute(
        "UPDATE threads SET input = input || jsonb_build_object('note', %s::text, 'receipt', 'https://evil.example/x')",
        (note,),
    )
    await press(bot, conn, interrupt_id, "approve")
    assert await press(bot, conn, interrupt_id, "details", by="U99EVE") == 200
    view = await shown(slack)
    assert view_findings(view, mentions=_APPROVERS) == []
    said = words_of(view)
    texts = [block["text"] for block in view["blocks"] if block["type"] == "section" and "text" in block]
    assert note in "".join(each["text"] for each in texts if each["type"] == "plain_text")
    digest = await value(conn, "SELECT request_hash FROM approvals")
    for each in ("Approved by u01alice", "through slack", f"interrupt {interrupt_id}", f"hash {digest}", "2 of: <@U01"):
        assert each in said
    [receipt] = [each for each in texts if each["text"] == "https://evil.example/x"]
    assert receipt["type"] == "plain_text"
    # Only whoever asked takes it back.
    assert buttons_of(view) == []


async def test_details_are_for_our_own_team_and_whoever_is_named(
    bot: Caller, slack: QuietSlack, conn: Connection
) -> None:
    interrupt_id = await ask(conn, tier=Tier(name="approval", approvers=("slack:T77PARTNER/U07PAT",)))
    await press(bot, conn, interrupt_id, "details", by="U99EVE", team="T99OTHER")
    assert await words(slack) == "Only members of this workspace see more of it."
    await press(bot, conn, interrupt_id, "details", by="U07PAT", team="T77PARTNER")
    assert f"interrupt {interrupt_id}" in words_of(await shown(slack))


async def test_whoever_asked_withdraws_it_from_its_details(bot: Caller, slack: QuietSlack, conn: Connection) -> None:
    interrupt_id = await ask(conn, requested_by="U04DANA")
    await press(bot, conn, interrupt_id, "details", by="U04DANA")
    view = await shown(slack)
    assert buttons_of(view) == ["withdraw"]
    [actions] = [each for each in view["blocks"] if each["type"] == "actions"]
    pressed = actions["elements"][0]
    assert "nothing is paid" in pressed["confirm"]["text"]["text"]

    # A press in a modal comes without a channel, a message, or a way to answer in private.
    in_modal: dict[str, Any] = {
        "container": {"type": "view", "view_id": "V1"},
        "view": {"id": "V1", "hash": "1.0", "type": "modal"},
        "response_url": ABSENT,
    }

    async def take_back(by: str) -> int:
        body = await bot.body_of(conn, interrupt_id, "withdraw", by=by, **in_modal)
        return (await bot.click(body)).status

    async def says(words: str) -> None:
        async def said() -> bool:
            return words in words_of(slack.views[0])

        await until(said)

    assert await take_back("U01ALICE") == 200
    await says("only whoever asked for it takes a request back")
    assert await value(conn, "SELECT status FROM approvals") == "pending"
    for _ in range(2):
        assert await take_back("U04DANA") == 200
        await says("Withdrawn")
    row = await one_row(conn, "SELECT status, withdrawn_by FROM approvals")
    assert row == {"status": "withdrawn", "withdrawn_by": "slack:T01TEST/U04DANA"}
    assert buttons_of(slack.views[0]) == []


async def test_withdraw_takes_back_what_was_shown_and_not_what_is_asked_by_now(
    bot: Caller, slack: QuietSlack, conn: Connection, flows: Flows
) -> None:
    interrupt_id = await ask(conn, requested_by="U04DANA")
    await change_amount(conn, interrupt_id, BOB, amount="200", door="cli", request_hash=None)
    body = await bot.body_of(conn, interrupt_id, "withdraw", by="U04DANA", view={"id": "V1", "hash": "1.0"})
    slack.views.append({})
    assert (await bot.click(body)).status == 200
    assert "superseded" in await words(slack)
    assert await value(conn, "SELECT count(*) FROM approvals WHERE status = 'withdrawn'") == 0


async def test_what_cannot_be_said_in_a_channel_is_a_direct_message(
    bot: Caller, slack: QuietSlack, conn: Connection
) -> None:
    """What is pressed in a modal is in no channel, and has no response_url."""
    view = {"id": "V1", "type": "modal", "team_id": "T01TEST"}
    home: dict[str, Any] = {"response_url": ABSENT, "container": {"type": "view", "view_id": "V1"}, "view": view}
    body = await bot.body_of(conn, await ask(conn), by="U66EVE", **home)
    assert (await bot.click(body)).status == 200
    [told] = await until(lambda: _posted(slack))
    assert told["channel"] == "U66EVE"
    assert "not on the list of approvers" in told["text"]


async def _posted(slack: QuietSlack) -> list[dict[str, Any]]:
    return list(slack.messages.values())


# On the page only


async def test_a_press_does_not_approve_what_is_approved_on_its_page_only(
    bot: Caller, slack: QuietSlack, conn: Connection
) -> None:
    interrupt_id = await ask(conn, tier=_PAGE)
    assert await press(bot, conn, interrupt_id, "approve") == 200
    assert "approved on its page only" in await bot.note()
    assert await nobody_decided(conn)
    # Slack tells of the button that opened it, too.
    assert await press(bot, conn, interrupt_id, "page") == 200
    assert await reject(bot, conn, interrupt_id, "no") == {}


# Over a websocket


@pytest.mark.skipif(skip_reason() is not None, reason=skip_reason() or "")
async def test_modals_work_in_socket_mode(conn: Connection, database_url: str, tmp_path: Path) -> None:
    first, second = await ask(conn), await ask(conn, "t2")
    with LocalSlack() as slack:
        async with Office(tmp_path, database_url, slack).service("bot"):
            await until(lambda: _all_posted(conn))
            ts = await value(conn, "SELECT ts FROM messages WHERE interrupt_id = %s", first)
            await slack.click("U02BOB", CHANNEL, ts, "change-amount")
            await content_of(slack.modals)
            assert "write digits" in (await slack.submit_modal("U02BOB", typed_in(amount="x", reason="")))["amount"]
            assert await slack.submit_modal("U02BOB", typed_in(amount="200", reason="")) == {}

            async def superseded() -> list[str]:
                said = {each["ts"]: words_of(each) for each in await slack.messages(CHANNEL) if "blocks" in each}
                return [said[ts]] if "Superseded: <@U02BOB> asks for 200.00 USD" in said[ts] else []

            await until(superseded)
            ts = await value(conn, "SELECT ts FROM messages WHERE interrupt_id = %s", second)
            await slack.click("U99EVE", CHANNEL, ts, "details")
            assert f"interrupt {second}" in words_of(await content_of(slack.modals))
            assert await reject_in(slack, "U01ALICE", ts, "not now") == ""
            assert await slack.modals() == []
    assert await value(conn, "SELECT reason FROM decisions WHERE interrupt_id = %s", second) == "not now"


async def _all_posted(conn: Connection) -> bool:
    return bool(await value(conn, "SELECT count(*) = 2 FROM messages"))
