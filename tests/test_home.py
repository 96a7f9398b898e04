"""App Home: what a person finds there, what their presses do, and what Slack takes; over signed HTTP."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
import yaml  # type: ignore[import-untyped]
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from psycopg.types.json import Jsonb

from bot import filing, home
from bot.away import COMMAND
from bot.details import details_of
from bot.home import Contents, home_view, home_without_lists, outcome_line
from bot.lists import Page, approvals_list, paging, parse_turn, stories_list, turn_value
from flow.approvals import approval_of, decide
from flow.database import Connection
from flow.delegations import away
from flow.inbox import MOST_COUNTED
from flow.model import Approval
from flow.policy import Tier
from flow.show import Story, stories_of
from flow.threads import thread_of
from flow.trace import trace_of
from tests.asking import DINNER, put
from tests.block_kit import findings, home_findings, texts, view_findings, words_of
from tests.command import ROOT
from tests.home_door import Member, actions_in, boxes_of, buttons_in, items_of, member_at_a_bot, opened_body
from tests.people import ALICE, BOB, NO, ONE_OF_THREE, TWO_OF_THREE, ask
from tests.rows import all_rows, one_row, rewrite, until, value
from tests.slack_requests import JSON, SlackRequest, button, payload_body
from tests.test_blocks import _MENTIONED, _situations

PAGES = "https://claims.example.com"
_on_any_machine = settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.too_slow])


@pytest.fixture
async def alice(database_url: str) -> AsyncIterator[Member]:
    async with member_at_a_bot(database_url, public_url=PAGES) as alice:
        yield alice


async def ask_many(conn: Connection, count: int) -> list[str]:
    """The interrupt ids of so many requests, the newest first."""
    return [await ask(conn, f"t{number:02}") for number in range(count)][::-1]


# What is found there


async def test_home_lists_what_waits_for_me_what_i_asked_for_and_what_was_decided(
    alice: Member, conn: Connection
) -> None:
    waits, own, over = (
        await ask(conn, "waits"),
        await ask(conn, "own", requested_by="U01ALICE"),
        await ask(conn, "over"),
    )
    await ask(conn, "of-others", tier=Tier(name="approval", approvers=("U66EVE",)))
    await decide(conn, over, BOB, NO)
    view = await alice.opened_home()

    assert home_findings(view) == []
    assert items_of(view, "waits") == [waits]
    assert items_of(view, "asked") == [own]
    assert items_of(view, "decided") == [over]
    words = words_of(view)
    assert "Waits for you (1)" in words and "rejected by Bob" in words and "of-others" not in words
    assert actions_in(view, f"waits-{waits}") == ["approve", "reject", "details"]


async def test_home_shows_an_empty_desk_as_such(alice: Member) -> None:
    view = await alice.opened_home()
    assert home_findings(view) == []
    assert "Waits for you (0)" in words_of(view) and "Nothing waits for you." in words_of(view)


@pytest.mark.parametrize(("waiting", "said"), [(99, "(99)"), (MOST_COUNTED, "(99+)")])
def test_home_says_that_more_wait_than_are_counted_as_the_pages_do(waiting: int, said: str) -> None:
    none: Page[Any] = Page(rows=[])
    view = home_view(Contents(waiting=waiting, waits=none, asked=none, decided=none), public_url=None)
    assert f"Waits for you {said}" in words_of(view)


async def test_the_tab_of_messages_publishes_nothing(alice: Member) -> None:
    assert (await alice.open_home(tab="messages")).status == 200
    await alice.opened_home()
    assert alice.published == 1


async def test_a_retried_event_shows_the_same_again(alice: Member, conn: Connection) -> None:
    await ask(conn)
    first = await alice.opened_home()
    retried = SlackRequest(
        name="retried",
        body=opened_body(alice.id),
        content_type=JSON,
        expected=range(200, 201),
        extra_headers={"X-Slack-Retry-Num": "1", "X-Slack-Retry-Reason": "http_timeout"},
    )
    assert (await alice.bot.send(retried)).status == 200
    assert (await alice.home(after=1))["blocks"] == first["blocks"]
    assert await all_rows(conn, "SELECT * FROM decisions") == []


async def test_what_takes_more_than_a_press_has_a_way_to_its_page_and_no_box(alice: Member, conn: Connection) -> None:
    much = await ask(conn, "much", tier=replace(ONE_OF_THREE, step_up=True))
    for number in range(2):
        await ask(conn, f"little-{number}")
    view = await alice.opened_home()

    assert home_findings(view) == []
    assert actions_in(view, f"waits-{much}") == ["page", "reject", "details"]
    assert buttons_in(view, f"waits-{much}")[0]["url"] == f"{PAGES}/approvals/{much}"
    assert len(boxes_of(view)) == 2 and much not in "".join(boxes_of(view))


async def test_above_the_first_tier_one_press_asks_once_more(alice: Member, conn: Connection) -> None:
    first, second = await ask(conn, "first"), await ask(conn, "second", tier=replace(ONE_OF_THREE, rank=1))
    view = await alice.opened_home()
    assert "confirm" not in buttons_in(view, f"waits-{first}")[0]
    assert "250.00 USD to ACME" in buttons_in(view, f"waits-{second}")[0]["confirm"]["text"]["text"]


async def test_every_list_pages_on_and_back_and_the_others_stay_where_they_are(alice: Member, conn: Connection) -> None:
    ids = await ask_many(conn, 23)
    own = [await ask(conn, f"own{number:02}", requested_by=ALICE.key) for number in range(12)][::-1]
    pages = [view := await alice.opened_home()]
    for action, block in (("next", "waits"), ("next", "asked"), ("next", "waits"), ("previous", "waits")):
        before = alice.published
        assert (await alice.press_in_home(view, f"page-{action}", f"page-{block}")).status == 200
        pages.append(view := await alice.home(after=before))

    assert [items_of(page, "waits") for page in pages] == [ids[:10], ids[10:20], ids[10:20], ids[20:], ids[10:20]]
    assert [items_of(page, "asked") for page in pages] == [own[:10], own[:10], own[10:], own[10:], own[10:]]
    assert "page-next" not in actions_in(pages[3], "page-waits")
    assert [home_findings(page) for page in pages] == [[]] * 5


# What a press does


async def test_a_press_of_approve_is_decided_and_the_home_says_so(alice: Member, conn: Connection) -> None:
    interrupt_id, other_id = await ask(conn), await ask(conn, "t2")
    view = await alice.opened_home()
    assert (await alice.press_in_home(view, "approve", f"waits-{interrupt_id}")).status == 200

    # An answered press is a committed decision.
    decision = await one_row(conn, "SELECT interrupt_id, person, verdict, door FROM decisions")
    assert decision == {"interrupt_id": interrupt_id, "person": ALICE.key, "verdict": "approve", "door": "slack"}
    after = await alice.home(after=1)
    assert "✅ 250.00 USD to ACME (t1): approved" in words_of(after)
    assert (items_of(after, "waits"), items_of(after, "decided")) == ([other_id], [interrupt_id])
    assert home_findings(after) == []
    # No message was pressed, so none is kept as a copy of the card.
    assert await all_rows(conn, "SELECT * FROM messages") == []


async def test_a_press_on_a_stale_home_decides_nothing_and_says_who_was_first(alice: Member, conn: Connection) -> None:
    interrupt_id = await ask(conn)
    view = await alice.opened_home()
    await decide(conn, interrupt_id, BOB, NO)
    assert (await alice.press_in_home(view, "approve", f"waits-{interrupt_id}")).status == 200

    assert "(t1): Already rejected by Bob" in words_of(await alice.home(after=1))
    assert await value(conn, "SELECT count(*) FROM decisions") == 1


async def test_a_press_carries_the_hash_of_what_was_shown(alice: Member, conn: Connection) -> None:
    interrupt_id = await ask(conn)
    stale = json.dumps({"interrupt": interrupt_id, "hash": "f" * 64})
    view = await alice.opened_home()
    await alice.press_in_home(view, "approve", f"waits-{interrupt_id}", actions=[button("approve", stale)])

    assert "The request has changed since it was shown" in words_of(await alice.home(after=1))
    assert await all_rows(conn, "SELECT * FROM decisions") == []


async def test_a_press_that_cannot_be_committed_in_time_is_not_acknowledged(alice: Member, conn: Connection) -> None:
    interrupt_id = await ask(conn)
    view = await alice.opened_home()
    async with conn.transaction():
        await conn.execute("SELECT FROM approvals FOR UPDATE")
        assert (await alice.press_in_home(view, "approve", f"waits-{interrupt_id}")).status == 503
        assert "could not be confirmed in time" in words_of(await alice.home(after=1))
    assert (await alice.press_in_home(view, "approve", f"waits-{interrupt_id}")).status == 200
    assert await value(conn, "SELECT count(*) FROM decisions") == 1


async def test_one_of_two_votes_is_said_to_count(alice: Member, conn: Connection) -> None:
    interrupt_id = await ask(conn, tier=TWO_OF_THREE)
    view = await alice.opened_home()
    await alice.press_in_home(view, "approve", f"waits-{interrupt_id}")

    after = await alice.home(after=1)
    assert "your vote counts, 1 of 2" in words_of(after)
    assert items_of(after, "waits") == []


async def test_a_press_in_another_teams_home_is_refused(alice: Member, conn: Connection) -> None:
    interrupt_id = await ask(conn)
    view = await alice.opened_home()
    stranger = {"id": "U01ALICE", "name": "alice", "team_id": "T0OTHER"}
    await alice.press_in_home(view, "approve", f"waits-{interrupt_id}", user=stranger)

    after = await alice.home(after=1)
    assert "may not decide this" in words_of(after)
    assert items_of(after, "waits") == []
    assert await all_rows(conn, "SELECT * FROM decisions") == []


async def test_reject_in_home_ends_it(alice: Member, conn: Connection) -> None:
    interrupt_id = await ask(conn)
    ids = [interrupt_id, *[await ask(conn, f"t2{number}") for number in range(11)]][::-1]
    await alice.press_in_home(await alice.opened_home(), "page-next", "page-waits")
    view = await alice.home(after=1)
    await alice.press_in_home(view, "reject", f"waits-{interrupt_id}")
    assert await alice.send(await alice.modal(), {"reason": "not this year"}) == {}
    assert await value(conn, "SELECT status FROM approvals WHERE thread_id = 't1'") == "rejected"
    # Home shows it by itself, where it stood.
    assert items_of(await alice.home(after=2), "waits") == [ids[10]]


async def test_what_is_withdrawn_from_its_details_is_shown_so_in_home(alice: Member, conn: Connection) -> None:
    own = await ask(conn, requested_by=ALICE.key)
    view = await alice.opened_home()
    await alice.press_in_home(view, "details", f"asked-{own}")
    await withdraw_in(alice, await alice.modal())
    assert "withdrawn" in words_of(await alice.home(after=1))


async def withdraw_in(member: Member, modal: dict[str, Any]) -> None:
    """Press Withdraw in this modal."""
    [pressed] = [
        each for block in modal["blocks"] for each in block.get("elements", []) if each.get("action_id") == "withdraw"
    ]
    shown = {"id": "V1", "type": "modal", "hash": "1.0", "private_metadata": modal["private_metadata"]}
    container = {"type": "view", "view_id": "V1"}
    answered = await member.press(
        {"container": container, "view": shown, "actions": [button("withdraw", pressed["value"])]}
    )
    assert answered.status == 200


async def test_two_homes_of_one_request_make_one_decision(alice: Member, conn: Connection) -> None:
    interrupt_id = await ask(conn)
    bob = replace(alice, id="U02BOB")
    hers, his = await alice.opened_home(), await bob.opened_home()
    answers = await asyncio.gather(
        alice.press_in_home(hers, "approve", f"waits-{interrupt_id}"),
        bob.press_in_home(his, "approve", f"waits-{interrupt_id}"),
    )
    assert [each.status for each in answers] == [200, 200]
    assert await value(conn, "SELECT count(*) FROM decisions") == 1
    assert await value(conn, "SELECT wakes FROM threads") == 1


# Many at once


async def test_what_is_ticked_is_asked_for_by_its_number_and_approved_each_for_itself(
    alice: Member, conn: Connection
) -> None:
    ids = await ask_many(conn, 4)
    view = await alice.opened_home()
    boxes = boxes_of(view)
    assert (await alice.press_in_home(view, "approve-selected", ticked=boxes[:3])).status == 200
    [modal] = alice.slack.views
    assert view_findings(modal) == []
    assert (modal["title"]["text"], modal["submit"]["text"]) == ("Approve 3 requests?", "Approve 3")
    assert words_of(modal).count("250.00 USD to ACME") == 3
    assert await all_rows(conn, "SELECT * FROM decisions") == []

    await decide(conn, ids[1], BOB, NO)
    assert (await alice.submit(modal)).status == 200
    after = words_of(await alice.home(after=1))
    assert "✅ 250.00 USD to ACME (t03): approved" in after
    assert "⚠️ 250.00 USD to ACME (t02): Already rejected by Bob" in after
    assert "✅ 250.00 USD to ACME (t01): approved" in after
    rows = await all_rows(conn, "SELECT interrupt_id FROM decisions WHERE person = %s", ALICE.key)
    assert {row["interrupt_id"] for row in rows} == {ids[0], ids[2]}
    assert await value(conn, "SELECT status FROM approvals WHERE thread_id = 't00'") == "pending"


async def test_many_sent_twice_are_decided_once(alice: Member, conn: Connection) -> None:
    await ask_many(conn, 10)
    view = await alice.opened_home()
    await alice.press_in_home(view, "approve-selected", ticked=boxes_of(view))
    [modal] = alice.slack.views
    assert view_findings(modal) == []
    answers = await asyncio.gather(alice.submit(modal), alice.submit(modal))
    assert [each.status for each in answers] == [200, 200]
    assert await value(conn, "SELECT count(*) FROM decisions") == 10
    assert await all_rows(conn, "SELECT DISTINCT wakes FROM threads") == [{"wakes": 1}]


async def test_nothing_ticked_opens_nothing(alice: Member, conn: Connection) -> None:
    await ask_many(conn, 2)
    view = await alice.opened_home()
    await alice.press_in_home(view, "approve-selected")
    assert "Nothing is ticked" in words_of(await alice.home(after=1))
    assert alice.slack.views == []


async def test_a_form_that_slack_does_not_open_is_not_acknowledged(alice: Member, conn: Connection) -> None:
    await ask_many(conn, 2)
    view = await alice.opened_home()
    answered = await alice.press_in_home(
        view, "approve-selected", ticked=boxes_of(view), trigger_id="expired_trigger_id"
    )
    assert answered.status == 503


# Delegates


async def test_a_delegate_finds_and_decides_what_waits_for_whoever_is_away(alice: Member, conn: Connection) -> None:
    # Slack says that she is a full member.
    alice.slack.zones["U01ALICE"] = "UTC"
    only_bob = Tier(name="approval", approvers=("U02BOB",))
    waits = await ask(conn, "bobs", tier=only_bob)
    await ask(conn, "by-bob", tier=replace(only_bob, self_approval=True), requested_by="U02BOB")
    assert items_of(await alice.opened_home(), "waits") == []
    await let_alice_decide_for_bob(conn)
    view = await alice.opened_home()
    assert items_of(view, "waits") == [waits]

    await alice.press_in_home(view, "approve", f"waits-{waits}")
    after = await alice.home(after=2)
    assert items_of(after, "waits") == []
    assert "approved by u01alice for Bob" in words_of(after)


async def let_alice_decide_for_bob(conn: Connection) -> None:
    until_then = await value(conn, "SELECT clock_timestamp() + interval '1 day'")
    async with conn.transaction():
        await away(conn, BOB, to="U01ALICE", until=until_then, made_by=BOB.key)


async def test_a_guest_lends_nobodys_voice_and_is_shown_nothing_of_theirs(alice: Member, conn: Connection) -> None:
    waits = await ask(conn, "bobs", tier=Tier(name="approval", approvers=("U02BOB",)))
    await let_alice_decide_for_bob(conn)
    shown = await alice.opened_home()
    assert items_of(shown, "waits") == [waits]
    guest = replace(alice, id="U04GUEST")
    guest.slack.kinds["U04GUEST"] = {"is_restricted": True}
    async with conn.transaction():
        await away(conn, BOB, to="U04GUEST", until=datetime.now(UTC) + timedelta(days=1), made_by=BOB.key)
    assert items_of(await guest.opened_home(), "waits") == []
    # A button that they got from somebody else.
    await guest.press_in_home(shown, "approve", f"waits-{waits}")
    assert "only a full member of this workspace decides for Bob" in words_of(await guest.home(after=1))
    assert await all_rows(conn, "SELECT * FROM decisions") == []


# Groups


async def test_members_of_a_group_find_what_waits_for_it_and_what_it_decided(alice: Member, conn: Connection) -> None:
    alice.slack.groups["S01FIN", "finance"] = ["U01ALICE", "U02BOB"]
    tier = Tier(name="approval", approvers=("@finance",))
    waits, over = await ask(conn, "waits", tier=tier), await ask(conn, "over", tier=tier)
    await alice.bot.click(await alice.bot.rejection_of(conn, over, by="U02BOB"))
    view = await alice.opened_home()
    assert (items_of(view, "waits"), items_of(view, "decided")) == ([waits], [over])
    await alice.press_in_home(view, "approve", f"waits-{waits}")
    view = await alice.home(after=1)
    assert (items_of(view, "waits"), items_of(view, "decided")) == ([], [over, waits])
    stranger = await replace(alice, id="U05DAVE").opened_home()
    assert items_of(stranger, "waits") == items_of(stranger, "decided") == []


# What Slack does


async def test_a_home_that_slack_is_too_busy_for_shows_what_is_true_when_it_is_taken(
    alice: Member, conn: Connection
) -> None:
    interrupt_id = await ask(conn)
    view = await alice.opened_home()
    alice.slack.busy = [1]
    assert (await alice.press_in_home(view, "refresh")).status == 200

    async def refused() -> bool:
        return not alice.slack.busy

    await until(refused)
    # Meanwhile a press is shown after it, and not before.
    assert (await alice.press_in_home(view, "approve", f"waits-{interrupt_id}")).status == 200
    assert alice.published == 1
    first = await alice.home(after=1)
    assert items_of(first, "waits") == []
    assert "(t1): approved" in words_of(await alice.home(after=2))


async def test_whom_slack_does_not_place_is_told_to_try_again_and_finds_it_then(
    alice: Member, conn: Connection
) -> None:
    interrupt_id = await ask(conn)
    alice.slack.silent.add(alice.id)
    view = await alice.opened_home()
    assert home_findings(view) == [] and "Slack did not say who you are" in words_of(view)
    alice.slack.silent.clear()
    assert (await alice.press_in_home(view, "refresh")).status == 200
    assert items_of(await alice.home(after=1), "waits") == [interrupt_id]


# Rows that cannot be read, and too much to say


_UNREADABLE = [
    '{"amount": "ten", "currency": "USD"}',
    '{"amount": {}}',
    "{}",
    "[]",
    '"x"',
    '{"kind": 1}',
    '{"kind": {}}',
]


@pytest.mark.parametrize("request_", [*_UNREADABLE, '{"kind": "question", "title": 5, "fields": 5}'])
async def test_a_request_that_cannot_be_read_is_shown_as_such_and_the_others_as_they_are(
    alice: Member, conn: Connection, request_: str
) -> None:
    good, bad = await ask(conn, "good"), await ask(conn, "bad")
    own = await ask(conn, "own", requested_by=ALICE.key)
    await rewrite(conn, "request = %s WHERE thread_id <> 'good'", request_)
    await conn.execute("UPDATE threads SET input = jsonb_set(input, '{amount}', '\"ten\"') WHERE thread_id = 'own'")
    view = await alice.opened_home()
    assert home_findings(view) == []
    assert items_of(view, "waits") == [bad, good] and items_of(view, "asked") == [own]
    assert "250.00 USD to ACME" in words_of(view) and "cannot be read" in words_of(view)
    for word in ("", "mine", "all"):
        said = await alice.command(word)
        assert findings(said["text"], said["blocks"], mentions=("U01ALICE",), one_each=False) == []
        assert own in items_of(said, "list") or bad in items_of(said, "list")


async def test_ten_long_refusals_are_all_told(alice: Member, conn: Connection) -> None:
    await ask_many(conn, 10)
    view = await alice.opened_home()
    await alice.press_in_home(view, "approve-selected", ticked=boxes_of(view))
    others = [f"slack:T0OTHER/U{number:040}" for number in range(400)]
    await rewrite(conn, "approvers = %s", others)
    assert (await alice.submit(await alice.modal())).status == 200
    after = await alice.home(after=1)
    assert home_findings(after) == []
    assert words_of(after).count("and 380 more") == 10


async def test_a_note_that_is_too_long_is_cut_in_words(conn: Connection) -> None:
    line = outcome_line(await approval_of(conn, await ask(conn)), "<&>" * 5000)
    assert "cut: the rest is too long" in line
    view = home_without_lists([line] * 20, {})
    assert home_findings(view) == []


async def test_a_last_page_that_is_empty_by_now_steps_back(alice: Member, conn: Connection) -> None:
    ids = await ask_many(conn, 21)
    view = await alice.opened_home()
    for turned in (1, 2):
        await alice.press_in_home(view, "page-next", "page-waits")
        view = await alice.home(after=turned)
    assert items_of(view, "waits") == ids[20:]
    await alice.press_in_home(view, "approve", f"waits-{ids[20]}")
    after = await alice.home(after=3)
    assert items_of(after, "waits") == ids[10:20]
    assert actions_in(after, "page-waits") == ["page-previous"]


# Odd requests


_ODD: list[Any] = [
    None,
    0,
    [],
    {},
    "\x00",
    {"type": "home"},
    [1],
    {"values": {"a": {"chosen": {"selected_options": [1]}}}},
]


@pytest.mark.parametrize("action_id", ["approve", "reject", "page-next", "refresh", "approve-selected", "new-claim"])
async def test_no_odd_press_in_a_home_fails_the_bot_or_decides(alice: Member, conn: Connection, action_id: str) -> None:
    await ask(conn)
    for odd in _ODD:
        for name in ("private_metadata", "state", "id"):
            shown = {"type": "home", "private_metadata": "", name: odd}
            payload = {"view": shown, "actions": [button(action_id, odd)], "trigger_id": "expired_trigger_id"}
            answered = await alice.press(payload | {"container": {"type": "view"}})
            assert answered.status in (200, 400, 503), (name, odd, answered)
    assert await all_rows(conn, "SELECT * FROM decisions") == []
    assert (await alice.open_home()).status == 200


@pytest.mark.parametrize("callback_id", [home.BULK, filing.FORM])
async def test_no_odd_form_fails_the_bot(alice: Member, conn: Connection, callback_id: str) -> None:
    for odd in [*_ODD, "[[1, 2, 3]]", '[["a", "b"]]']:
        for name in ("private_metadata", "state", "id", "blocks"):
            view = {"type": "modal", "callback_id": callback_id, name: odd}
            assert (await alice.submit(view)).status in (200, 400), (name, odd)
    assert await all_rows(conn, "SELECT * FROM threads") == []


@pytest.mark.parametrize(
    "event", [None, [], "app_home_opened", {}, {"type": []}, {"type": "app_home_opened", "user": {}}]
)
async def test_no_odd_event_fails_the_bot(alice: Member, event: Any) -> None:
    body = json.dumps({"type": "event_callback", "team_id": "T01TEST", "event": event}).encode()
    request = SlackRequest(name="odd", body=body, content_type=JSON, expected=range(200, 500))
    assert (await alice.bot.send(request)).status in request.expected


async def test_a_challenge_is_answered_and_an_unsigned_one_is_not(alice: Member) -> None:
    body = b'{"type":"url_verification","challenge":"c"}'
    signed = SlackRequest(name="challenge", body=body, content_type=JSON, expected=range(200, 201))
    assert json.loads((await alice.bot.send(signed)).body) == {"challenge": "c"}
    assert (await alice.bot.send(replace(signed, signing=lambda *_: {}))).status == 401


async def test_a_view_of_the_bots_own_that_is_no_home_is_heard_as_a_click(alice: Member, conn: Connection) -> None:
    """A press in a modal has no channel either; it is decided, and no Home appears for it."""
    interrupt_id = await ask(conn)
    digest = await value(conn, "SELECT request_hash FROM approvals")
    payload = {
        "type": "block_actions",
        "user": {"id": "U01ALICE", "team_id": "T01TEST"},
        "container": {"type": "view", "view_id": "V1"},
        "view": {"type": "modal"},
        "actions": [button("approve", json.dumps({"interrupt": interrupt_id, "hash": digest}))],
    }
    assert (await alice.bot.click(payload_body(payload))).status == 200
    assert await value(conn, "SELECT status FROM approvals") == "approved"
    assert alice.published == 0


# What Slack takes


@st.composite
def _contents(draw: st.DrawFn) -> Contents:
    situations = draw(st.lists(_situations(), min_size=1, max_size=3))

    def distinct(count: int) -> list[tuple[Approval, Story]]:
        rows = []
        for number in range(count):
            approval, thread, payment, advice = situations[number % len(situations)]
            found = replace(
                approval,
                interrupt_id=f"{number:032x}",
                step_up=draw(st.booleans()),
                rank=draw(st.integers(0, 1)),
                tier=draw(st.sampled_from(["approval", "<!channel>", "&" * 200])),
            )
            rows.append((found, Story(thread=thread, approvals=[found], advice=advice, payment=payment)))
        return rows

    rows = distinct(draw(st.sampled_from([0, 1, 2, 10])))
    way = tuple(draw(st.lists(st.just(f"{10**15}~{'a' * 200}"), max_size=12)))
    following = draw(st.none() | st.just(f"{10**15}~{'b' * 200}"))
    approvals = Page(rows=[approval for approval, _ in rows], way=way, following=following)
    stories = Page(rows=[story for _, story in rows], way=way, following=following)
    return Contents(waiting=len(rows), waits=approvals, asked=stories, decided=approvals)


@_on_any_machine
@given(_contents(), st.sampled_from([None, PAGES]))
def test_slack_takes_every_home_and_no_text_of_a_person_is_markup(contents: Contents, public_url: str | None) -> None:
    view = home_view(contents, public_url=public_url, said=["✅ x: approved"] * 10)
    assert home_findings(view) == []
    for each in texts(view["blocks"]):
        assert "<!channel>" not in each["text"] or each["type"] == "plain_text"


@_on_any_machine
@given(_contents(), st.sampled_from([None, PAGES]))
def test_slack_takes_every_list(contents: Contents, public_url: str | None) -> None:
    open_ids = frozenset(row.interrupt_id for row in contents.waits.rows[::2])
    listed = approvals_list(contents.waits, "all", open_ids=open_ids, public_url=public_url, said=["✅ x"])
    assert findings(*listed, mentions=_MENTIONED, one_each=False) == []
    assert findings(*stories_list(contents.asked), one_each=False) == []


@given(st.lists(st.sampled_from([f"{10**15}~{'a' * 200}", f"{10**15}~{'0' * 32}"]), max_size=60))
def test_a_way_of_any_length_fits_and_leads_on_from_its_end(way: list[str]) -> None:
    turn = parse_turn(turn_value("asked", way))
    assert turn is not None
    assert list(turn.way) == way[len(way) - len(turn.way) :]
    assert turn.way[-1:] == tuple(way[-1:])
    [actions] = paging(Page(rows=[], way=turn.way, following="1~a"), "asked")
    assert all(len(each["value"]) < 2000 for each in actions["elements"])


# The manifest


def test_the_manifest_and_the_code_agree() -> None:
    manifest = yaml.safe_load((ROOT / "manifest.yml").read_text())
    features, config = manifest["features"], manifest["settings"]
    assert [each["command"] for each in features["slash_commands"]] == [COMMAND]
    assert all(each["should_escape"] for each in features["slash_commands"])
    assert [each["callback_id"] for each in features["shortcuts"]] == [filing.SHORTCUT]
    assert config["event_subscriptions"]["bot_events"] == ["app_home_opened", "app_uninstalled", "tokens_revoked"]
    assert features["app_home"]["home_tab_enabled"]
    assert {"commands", "users:read", "chat:write"} <= set(manifest["oauth_config"]["scopes"]["bot"])
    urls = {config["interactivity"]["request_url"], config["event_subscriptions"]["request_url"]}
    assert urls == {each["url"] for each in features["slash_commands"]}


def test_every_scope_of_the_manifest_has_a_comment_that_says_why() -> None:
    lines = (ROOT / "manifest.yml").read_text().split("    bot:\n")[1].split("settings:")[0].splitlines()
    comments = [line for line in lines if line.strip().startswith("#")]
    assert comments and lines[0] in comments


# Other flows


async def test_what_a_press_cannot_say_has_its_details_and_no_approve(alice: Member, conn: Connection) -> None:
    interrupt_id = await put(conn, DINNER)
    view = await alice.opened_home()
    assert actions_in(view, f"waits-{interrupt_id}") == ["reject", "details"]
    assert home_findings(view) == []


@pytest.mark.parametrize("now", [{"amount": "9.00", "currency": "USD", "payee": "Mallory"}, {}], ids=["more", "empty"])
async def test_what_was_changed_past_us_is_listed_as_that(conn: Connection, now: dict[str, Any]) -> None:
    interrupt_id = await ask(conn)
    await conn.execute("UPDATE approvals SET request = %s, requested_by = 'Mallory'", (Jsonb(now),))
    approval = await approval_of(conn, interrupt_id)
    [story] = await stories_of(conn, [await thread_of(conn, "t1")])
    shown: list[tuple[str, list[dict[str, Any]]]] = [
        approvals_list(Page(rows=[approval]), "all", open_ids=frozenset(), public_url=None),
        stories_list(Page(rows=[story])),
        ("", [details_of(approval, story, await trace_of(conn, story), ALICE)]),
    ]
    for text, blocks in shown:
        said = text + json.dumps(blocks, ensure_ascii=False)
        assert "changed outside of the bot" in said and "nobody can decide it" in said
        assert not any(word in said for word in ("9.00", "Mallory", "250.00", "cannot be read"))
