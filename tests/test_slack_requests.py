"""Requests as Slack sends them, and as it never would, at the real web application on a real database."""

from __future__ import annotations

import asyncio
import itertools
import json
import time
from collections.abc import AsyncIterator
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from bot.blocks import Click, parse_click
from flow.database import Connection
from tests.fault_proxy import FaultKind, FaultProxy
from tests.local_slack import LocalSlack, skip_reason
from tests.people import ask
from tests.rows import all_rows, one_row, value
from tests.slack_door import Caller, bot_in_process, client_of
from tests.slack_requests import JSON, MALFORMED, SlackRequest, altered_click_body, button

pytestmark = pytest.mark.skipif(skip_reason() is not None, reason=skip_reason() or "")

_VALUE = json.dumps({"interrupt": "0" * 32, "hash": "0" * 64})

# What JSON can say.
_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
_FIELDS = (
    "team", "enterprise", "is_enterprise_install", "user", "container", "channel", "message", "view", "event", "state",
    "response_url", "response_urls", "authorizations", "actions", "trigger_id", "callback_id", "function_data",
)  # fmt: skip
_TYPES = (
    "block_actions", "event_callback", "view_submission", "view_closed", "shortcut", "message_action",
    "interactive_message", "dialog_submission", "block_suggestion", "workflow_step_edit", "url_verification",
)  # fmt: skip
# A field that is read into, with anything inside.
_INSIDE = st.fixed_dictionaries(
    {},
    optional=dict.fromkeys(("id", "team_id", "name", "username", "channel_id", "message_ts", "ts", "type"), _JSON),
)
_ACTIONS = st.lists(
    st.fixed_dictionaries(
        {}, optional={"action_id": st.sampled_from(["approve", "reject"]) | _JSON, "value": st.just(_VALUE) | _JSON}
    ),
    max_size=2,
)
_ODD_FIELDS = st.builds(
    lambda fields, type_: {**fields, "type": type_},
    st.dictionaries(st.sampled_from(_FIELDS), _JSON | _INSIDE | _ACTIONS, max_size=4),
    st.sampled_from(_TYPES),
)

# How long an example takes says how busy the machine is.
_on_any_machine = settings(deadline=None, max_examples=100, suppress_health_check=[HealthCheck.too_slow])


@pytest.fixture
async def proxy() -> AsyncIterator[FaultProxy]:
    """A Slack that is there to say which team the bot belongs to."""
    with LocalSlack(request_url="http://127.0.0.1:9/") as slack:
        async with FaultProxy(slack.ui_url) as running:
            yield running


@pytest.fixture
async def bot(database_url: str, proxy: FaultProxy) -> AsyncIterator[Caller]:
    """A bot that runs in this process, and somebody in front of it."""
    async with (
        # More patience than a click has, less than it takes to wait for one at the end.
        client_of(proxy.api_url, timeout_s=3.0) as client,
        bot_in_process(database_url, client) as url,
        Caller(url) as caller,
    ):
        yield caller


async def test_no_malformed_request_fails_the_bot_or_decides(bot: Caller, conn: Connection) -> None:
    await ask(conn)
    answers = {each.name: await bot.send(each) for each in MALFORMED}

    wrong = {
        each.name: answers[each.name].status for each in MALFORMED if answers[each.name].status not in each.expected
    }
    assert wrong == {}
    assert await all_rows(conn, "SELECT * FROM decisions") == []
    assert await value(conn, "SELECT status FROM approvals") == "pending"


async def test_a_signed_challenge_is_answered_with_itself(bot: Caller) -> None:
    body = b'{"type":"url_verification","challenge":"c"}'
    answer = await bot.send(SlackRequest(name="challenge", body=body, content_type=JSON, expected=range(200, 201)))
    assert (answer.status, json.loads(answer.body)) == (200, {"challenge": "c"})


async def test_a_replayed_click_is_one_decision(bot: Caller, conn: Connection) -> None:
    body = await bot.body_of(conn, await ask(conn))
    assert {(await bot.click(body)).status for _ in range(3)} == {200}

    decision = await one_row(conn, "SELECT person, verdict, door FROM decisions")
    assert decision == {"person": "slack:T01TEST/U01ALICE", "verdict": "approve", "door": "slack"}
    assert await value(conn, "SELECT wakes FROM threads") == 1


async def test_the_same_click_twenty_times_at_once_is_one_decision(bot: Caller, conn: Connection) -> None:
    body = await bot.body_of(conn, await ask(conn))
    answers = await asyncio.gather(*(bot.click(body) for _ in range(20)))

    assert {answer.status for answer in answers} == {200}
    assert await value(conn, "SELECT count(*) FROM decisions") == 1
    assert await value(conn, "SELECT wakes FROM threads") == 1


async def test_a_click_that_slack_calls_a_retry_is_decided_like_any_other(bot: Caller, conn: Connection) -> None:
    body = await bot.body_of(conn, await ask(conn))
    headers = {"X-Slack-Retry-Num": "1", "X-Slack-Retry-Reason": "http_timeout"}
    assert (await bot.click(body, headers)).status == 200

    assert await value(conn, "SELECT count(*) FROM decisions") == 1
    assert (await bot.click(body, headers)).status == 200
    assert await value(conn, "SELECT count(*) FROM decisions") == 1


async def test_a_click_is_decided_whatever_bolts_own_headers_say(bot: Caller, conn: Connection) -> None:
    body = await bot.body_of(conn, await ask(conn))
    headers = {"X-Slack-Bolt-Lazy-Only": "1", "X-Slack-Bolt-Lazy-Function-Name": "decide_click"}
    assert (await bot.click(body, headers)).status == 200

    assert await value(conn, "SELECT status FROM approvals") == "approved"


async def test_an_action_of_no_button_of_ours_is_acknowledged(bot: Caller, conn: Connection) -> None:
    await ask(conn)
    answer = await bot.click(altered_click_body(actions=[button("open_details", "x")]))

    assert answer.status == 200
    assert await all_rows(conn, "SELECT * FROM decisions") == []


async def test_a_click_with_another_hash_than_the_requests_decides_nothing(bot: Caller, conn: Connection) -> None:
    interrupt_id = await ask(conn)
    stale = json.dumps({"interrupt": interrupt_id, "hash": "f" * 64})
    assert (await bot.click(await bot.body_of(conn, interrupt_id, actions=[button("approve", stale)]))).status == 200

    assert await all_rows(conn, "SELECT * FROM decisions") == []
    assert await value(conn, "SELECT status FROM approvals") == "pending"


async def test_a_click_for_an_approval_that_is_not_here_decides_nothing(bot: Caller, conn: Connection) -> None:
    body = await bot.body_of(conn, await ask(conn), ts="1.1", actions=[button("approve", _VALUE)])
    assert (await bot.click(body)).status == 200

    assert (await bot.note()).startswith("No approval has the interrupt id ")
    assert await all_rows(conn, "SELECT * FROM decisions") == []
    assert await all_rows(conn, "SELECT * FROM messages") == []


async def test_a_click_whose_other_fields_are_odd_is_decided_or_refused(bot: Caller, conn: Connection) -> None:
    """Never a failure, and never an approval by somebody else than the one who clicked."""
    values: list[Any] = [None, 0, "\x00", "\ud83d", [], {"id": {}}, {"id": "\x00", "ts": "\x00", "message_ts": [1]}]
    fields = ("team", "enterprise", "container", "channel", "message", "response_url", "view", "event", "state")
    for number, (field, odd) in enumerate(itertools.product(fields, values)):
        interrupt_id = await ask(conn, f"t{number}")
        answer = await bot.click(await bot.body_of(conn, interrupt_id, **{field: odd}))
        assert answer.status in (200, 400), (field, odd, answer)
        decisions = await all_rows(conn, "SELECT person FROM decisions WHERE interrupt_id = %s", interrupt_id)
        assert decisions == [{"person": "slack:T01TEST/U01ALICE"}] * (answer.status == 200), (field, odd, answer)


async def test_a_name_that_no_database_can_hold_does_not_stop_its_click(bot: Caller, conn: Connection) -> None:
    user = {"id": "U01ALICE", "team_id": "T01TEST", "name": "a\x00\ud83d\u202eb"}
    assert (await bot.click(await bot.body_of(conn, await ask(conn), user=user))).status == 200

    assert await value(conn, "SELECT person_name FROM decisions") == "a\\u{0}\\u{d83d}\\u{202e}b"


async def test_a_name_in_a_private_note_is_no_markup(bot: Caller, conn: Connection) -> None:
    interrupt_id = await ask(conn)
    user = {"id": "U02BOB", "team_id": "T01TEST", "name": "<https://evil.example|Bob> & <!channel>"}
    await bot.click(await bot.body_of(conn, interrupt_id, user=user))
    await bot.click(await bot.body_of(conn, interrupt_id))

    assert await bot.note() == "Already approved by &lt;https://evil.example|Bob&gt; &amp; &lt;!channel&gt;."


async def test_a_click_on_a_button_that_is_none_of_ours_any_more_is_told_so(bot: Caller, conn: Connection) -> None:
    body = await bot.body_of(conn, await ask(conn), actions=[button("approve", "of another release")])
    assert (await bot.click(body)).status == 400

    assert await bot.note() == "This button is not one of ours any more: look at the newest message."
    assert await all_rows(conn, "SELECT * FROM decisions") == []


@pytest.mark.parametrize("kind", ["503", "drop", "slow"])
async def test_a_click_is_not_acknowledged_while_slack_does_not_say_which_team_is_ours(
    bot: Caller, proxy: FaultProxy, conn: Connection, kind: FaultKind
) -> None:
    body = await bot.body_of(conn, await ask(conn))
    proxy.fail("auth.test", kind, delay_s=3600)
    assert (await bot.click(body)).status == 503

    assert "click again" in await bot.note()
    assert await all_rows(conn, "SELECT * FROM decisions") == []
    assert (await bot.click(body)).status == 200
    assert await value(conn, "SELECT status FROM approvals") == "approved"


async def test_a_click_that_cannot_be_committed_in_time_is_not_acknowledged_and_can_be_repeated(
    bot: Caller, conn: Connection
) -> None:
    body = await bot.body_of(conn, await ask(conn))
    began = time.monotonic()
    async with conn.transaction():
        await conn.execute("SELECT FROM approvals FOR UPDATE")
        assert (await bot.click(body)).status == 503
        # Slack's own patience.
        assert time.monotonic() - began < 3
        assert (
            await bot.note() == "⚠️ Your click could not be confirmed in time. If the buttons stay, please click again."
        )

    assert (await bot.click(body)).status == 200
    assert await value(conn, "SELECT count(*) FROM decisions") == 1
    assert await value(conn, "SELECT wakes FROM threads") == 1


async def test_no_signed_payload_fails_the_bot(bot: Caller) -> None:
    bodies: list[bytes] = []

    @_on_any_machine
    @given(_ODD_FIELDS)
    def collect(fields: dict[str, Any]) -> None:
        bodies.append(altered_click_body(**fields))

    collect()
    for body in bodies:
        answer = await bot.click(body)
        assert answer.status < 500, (body, answer)


@_on_any_machine
@given(_JSON.filter(lambda each: isinstance(each, dict)) | _ODD_FIELDS)
@example({"actions": [{"action_id": "approve", "value": "[" * 100_000}], "user": {"id": "U01ALICE"}})
def test_no_payload_makes_the_reading_of_a_click_raise(payload: dict[str, Any]) -> None:
    click = parse_click(payload)
    assert click is None or _is_whole(click)


@_on_any_machine
@given(_ODD_FIELDS)
def test_a_click_is_read_whole_or_not_at_all_whatever_stands_in_its_other_fields(fields: dict[str, Any]) -> None:
    payload = {"user": {"id": "U01ALICE"}, "actions": [{"action_id": "approve", "value": _VALUE}], **fields}
    click = parse_click(payload)
    assert click is None or _is_whole(click)


def _is_whole(click: Click) -> bool:
    optional = (click.enterprise_id, click.channel_id, click.message_ts)
    texts = [click.user_id, click.user_name, click.team_id, *(each for each in optional if each is not None)]
    return all(isinstance(each, str) and each.isprintable() and len(each) <= 120 for each in texts)
