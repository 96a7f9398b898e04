"""`/claims` and its lists: to whoever types it alone, page by page, over signed HTTP and over a websocket."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bot import groups
from bot.desk import Audience
from bot.lists import HELP
from flow.approvals import decide
from flow.database import Connection
from flow.policy import Tier
from tests.block_kit import findings, words_of
from tests.fault_proxy import FaultProxy
from tests.home_door import Member, actions_in, buttons_in, command_body, items_of, member_at_a_bot
from tests.local_slack import CHANNEL, Answer, LocalSlack, free_port, skip_reason
from tests.people import ALICE, BOB, NO, ask, start_claim
from tests.rows import all_rows, one_row, until, value
from tests.slack_door import content_of
from tests.slack_requests import SlackRequest, button
from tests.test_home import withdraw_in
from tests.test_socket_mode import Office

STRANGERS = Tier(name="approval", approvers=("U05DAVE",))


@pytest.fixture
async def alice(database_url: str) -> AsyncIterator[Member]:
    async with member_at_a_bot(database_url, audience=Audience(viewers=frozenset({"U66EVE"}))) as alice:
        yield alice


def taken_by_slack(said: dict[str, Any]) -> bool:
    # Whoever asked is shown by the name that everybody knows.
    return findings(said["text"], said["blocks"], mentions=("U01ALICE", "U02BOB"), one_each=False) == []


async def test_claims_lists_what_waits_for_me_the_newest_first(alice: Member, conn: Connection) -> None:
    first, second = await ask(conn, "first"), await ask(conn, "second")
    await ask(conn, "own", requested_by=ALICE.key)
    await ask(conn, "of-others", tier=STRANGERS)
    said = await alice.command()

    assert taken_by_slack(said)
    assert items_of(said, "list") == [second, first]
    assert actions_in(said, f"list-{first}") == ["approve", "reject", "details"]
    assert "250.00 USD to ACME" in said["text"] and HELP in words_of(said)


async def test_claims_mine_lists_what_i_filed_whether_or_not_it_was_asked(alice: Member, conn: Connection) -> None:
    await start_claim(conn, "small", "20", requested_by="u01alice")
    own, settled = await ask(conn, "own", requested_by=ALICE.key), await ask(conn, "settled", requested_by="U01ALICE")
    await ask(conn, "of-others")
    await decide(conn, settled, BOB, NO)
    said = await alice.command("mine")

    assert taken_by_slack(said)
    assert items_of(said, "list") == [settled, own, "small"]
    words = words_of(said)
    assert "rejected by Bob" in words and "waiting for approval (0 of 1)" in words and "20.00 USD" in words


async def test_claims_all_is_what_i_may_see_and_everything_for_a_viewer(alice: Member, conn: Connection) -> None:
    named, own = await ask(conn, "named"), await ask(conn, "own", requested_by=ALICE.key, tier=STRANGERS)
    hidden = await ask(conn, "hidden", tier=STRANGERS)
    hers, eves = await alice.command("all"), await replace(alice, id="U66EVE").command("all")

    assert taken_by_slack(hers) and taken_by_slack(eves)
    assert items_of(hers, "list") == [own, named]
    assert items_of(eves, "list") == [hidden, own, named]
    # A viewer decides no more for it.
    assert "approve" not in str(eves["blocks"])
    assert actions_in(hers, f"list-{named}") == ["approve", "reject", "details"]


@pytest.mark.parametrize(("word", "place"), [("", "waits"), ("all", "all"), ("mine", "asked")])
async def test_a_list_pages_on_and_back_in_its_place(alice: Member, conn: Connection, word: str, place: str) -> None:
    requested_by = ALICE.key if word == "mine" else BOB.key
    ids = [await ask(conn, f"t{number:02}", requested_by=requested_by) for number in range(21)][::-1]
    pages = [said := await alice.command(word)]
    # What is filed meanwhile moves nothing.
    await ask(conn, "meanwhile", requested_by=requested_by)
    for action in ("next", "next", "previous"):
        said = await alice.list_after(said, f"page-{action}", f"page-{place}")
        pages.append(said)

    assert [items_of(page, "list") for page in pages] == [ids[:10], ids[10:20], ids[20:], ids[10:20]]
    assert all(map(taken_by_slack, pages))
    assert [actions_in(page, f"page-{place}") for page in (pages[0], pages[2])] == [["page-next"], ["page-previous"]]


async def test_a_press_in_a_list_is_decided_and_shown_in_its_place(alice: Member, conn: Connection) -> None:
    ids = [await ask(conn, f"t{number:02}") for number in range(12)][::-1]
    said = await alice.list_after(await alice.command(), "page-next", "page-waits")
    after = await alice.list_after(said, "approve", f"list-{ids[10]}")

    decision = await one_row(conn, "SELECT interrupt_id, person, door FROM decisions")
    assert decision == {"interrupt_id": ids[10], "person": ALICE.key, "door": "slack"}
    assert "✅ 250.00 USD to ACME (t01): approved" in words_of(after)
    # Still on the second page.
    assert items_of(after, "list") == [ids[11]]
    assert taken_by_slack(after)
    # The list is no copy of the card, whatever is pressed in it: nobody could keep it true.
    carried = buttons_in(after, f"list-{ids[11]}")[0]["value"]
    for action in ("details", "change", "reject"):
        pressed = [button(action, carried)]
        assert (await alice.press_in_list(after, "reject", f"list-{ids[11]}", actions=pressed)).status == 200
    # One that nobody had noted is known a moment after a press in it, and so would the list be by then.
    card = {"container": {"type": "message", "message_ts": "8.8", "channel_id": CHANNEL}, "channel": {"id": CHANNEL}}
    await alice.press(card | {"actions": [button("reject", carried)], "response_url": alice.bot.response_url})

    async def copies() -> list[dict[str, Any]]:
        return await all_rows(conn, "SELECT ts FROM messages")

    assert await until(copies) == [{"ts": "8.8"}]


async def test_what_is_rejected_in_its_form_leaves_the_list_where_it_stood(alice: Member, conn: Connection) -> None:
    ids = [await ask(conn, f"t{number:02}") for number in range(12)][::-1]
    said = await alice.list_after(await alice.command(), "page-next", "page-waits")
    assert (await alice.press_in_list(said, "reject", f"list-{ids[10]}")).status == 200
    assert await alice.send(await alice.modal(), {"reason": "no"}) == {}
    after = await alice.bot.reply()
    assert (after["response_type"], after["replace_original"]) == ("ephemeral", True)
    assert items_of(after, "list") == [ids[11]]


async def test_what_is_withdrawn_from_its_details_is_shown_so_in_the_list(alice: Member, conn: Connection) -> None:
    own = await ask(conn, requested_by=ALICE.key)
    said = await alice.command("mine")
    assert (await alice.press_in_list(said, "details", f"list-{own}")).status == 200
    await withdraw_in(alice, await alice.modal())
    assert "withdrawn" in words_of(await alice.bot.reply())


async def test_what_a_press_did_is_told_when_its_list_is_too_old_to_be_replaced(
    alice: Member, conn: Connection
) -> None:
    interrupt_id = await ask(conn)
    said = await alice.command()
    nowhere = f"http://127.0.0.1:{free_port()}/note"
    assert (await alice.press_in_list(said, "approve", f"list-{interrupt_id}", response_url=nowhere)).status == 200

    async def told() -> list[str]:
        return [each["text"] for each in alice.slack.messages.values() if each["channel"] == alice.id]

    assert await until(told) == ["✅ 250.00 USD to ACME (t1): approved"]


async def test_a_press_in_a_list_is_answered_though_slack_does_not_say_who_pressed(
    alice: Member, conn: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    interrupt_id = await ask(conn)
    said = await alice.command()
    # What Slack has said of her is forgotten by then.
    monkeypatch.setattr(groups, "_KEPT_S", 0.0)
    alice.slack.silent.add(alice.id)
    # Without her team, as it may be in a grid.
    user = {"id": alice.id, "name": "alice"}
    assert (await alice.press_in_list(said, "approve", f"list-{interrupt_id}", user=user, team=None)).status == 200
    note = await alice.bot.note()
    assert note == "⚠️ 250.00 USD to ACME (t1): Slack did not say who you are: click again in a moment."
    assert await value(conn, "SELECT count(*) FROM decisions") == 0


async def test_a_refused_press_in_a_list_is_told_though_the_database_is_away_by_then(
    alice: Member, conn: Connection
) -> None:
    interrupt_id = await ask(conn)
    said = await alice.command()
    await decide(conn, interrupt_id, BOB, NO)
    async with conn.transaction():
        # What only the list looks at; then what its outcome is told by.
        await conn.execute("LOCK TABLE delegations IN ACCESS EXCLUSIVE MODE")
        assert (await alice.press_in_list(said, "approve", f"list-{interrupt_id}")).status == 200
        await conn.execute("LOCK TABLE approvals IN ACCESS EXCLUSIVE MODE")
        assert (await alice.bot.note(timeout_s=30.0)).startswith("⚠️ Already rejected by Bob at ")


async def test_a_vote_in_a_list_is_told_though_the_database_is_away_by_then(alice: Member, conn: Connection) -> None:
    interrupt_id = await ask(conn)
    said = await alice.command()
    async with conn.transaction():
        await conn.execute("LOCK TABLE delegations IN ACCESS EXCLUSIVE MODE")
        assert (await alice.press_in_list(said, "approve", f"list-{interrupt_id}")).status == 200
        await conn.execute("LOCK TABLE approvals IN ACCESS EXCLUSIVE MODE")
        assert await alice.bot.note(timeout_s=30.0) == "✅ Your vote counts. What became of it cannot be shown now."
    assert await value(conn, "SELECT count(*) FROM decisions") == 1


async def test_a_command_in_our_channel_is_its_persons_own_teams(alice: Member, conn: Connection) -> None:
    """In a channel that two teams share the command names the place's team."""
    await ask(conn)
    alice.slack.kinds[alice.id] = {"team_id": "T0OTHER"}
    assert items_of(await alice.command(), "list") == []
    stranger = replace(alice, id="U66EVE")
    alice.slack.kinds[stranger.id] = {"team_id": "T0OTHER"}
    assert items_of(await stranger.command("all"), "list") == []


async def test_a_press_in_a_list_that_is_too_late_says_who_was_first(alice: Member, conn: Connection) -> None:
    interrupt_id = await ask(conn)
    said = await alice.command()
    await decide(conn, interrupt_id, BOB, NO)
    assert "Already rejected by Bob" in words_of(await alice.list_after(said, "approve", f"list-{interrupt_id}"))


async def test_a_press_in_a_list_without_its_page_shows_the_newest(alice: Member, conn: Connection) -> None:
    interrupt_id = await ask(conn)
    said = await alice.command()
    digest = await value(conn, "SELECT request_hash FROM approvals")
    for turn in ("null", '"x"', '"{}"', '"[]"', '{"list":"waits"}', '"{\\"list\\":\\"waits\\",\\"way\\":[1]}"'):
        pressed = button("approve", f'{{"interrupt": "{interrupt_id}", "hash": "{digest}", "turn": {turn}}}')
        assert (await alice.press_in_list(said, "reject", actions=[pressed])).status == 200
        assert (await alice.bot.reply())["replace_original"] is True
    assert await value(conn, "SELECT count(*) FROM decisions") == 1


@pytest.mark.parametrize("text", ["help", "HELP", "nonsense", "<!channel>", "\x00", "x" * 4000, "mine extra", "back"])
async def test_whatever_is_typed_is_answered(alice: Member, text: str) -> None:
    said = await alice.command(text)
    assert said["text"].strip() and "<!channel>" not in said["text"]
    if text in ("help", "nonsense"):
        assert HELP in said["text"]


async def test_a_command_without_a_person_is_refused_and_another_is_not_heard(alice: Member) -> None:
    for fields, status in (({"user_id": ""}, 400), ({"command": "/other"}, 404), ({"type": "event_callback"}, 404)):
        body = command_body("", user="U01ALICE", response_url=alice.bot.response_url, **fields)
        assert (await alice.bot.click(body)).status == status


async def test_a_command_is_answered_in_time_while_the_database_is_held(alice: Member, conn: Connection) -> None:
    async with conn.transaction():
        await conn.execute("LOCK TABLE approvals IN ACCESS EXCLUSIVE MODE")
        assert "try again" in (await alice.command())["text"]
    assert "blocks" in await alice.command()


async def test_a_command_that_slack_calls_a_retry_is_answered_again(alice: Member, conn: Connection) -> None:
    await ask(conn)
    body = command_body("", user=alice.id, response_url=alice.bot.response_url)
    retried = SlackRequest(
        name="retried", body=body, expected=range(200, 201), extra_headers={"X-Slack-Retry-Num": "1"}
    )
    assert (await alice.bot.send(retried)).body == (await alice.bot.click(body)).body


# At the local Slack


@pytest.mark.skipif(skip_reason() is not None, reason=skip_reason() or "")
async def test_the_command_the_home_and_the_form_work_over_a_websocket(
    database_url: str, conn: Connection, tmp_path: Path
) -> None:
    with LocalSlack() as slack:
        async with (
            # It knows who is a guest.
            FaultProxy(slack.ui_url) as proxy,
            Office(tmp_path, database_url, slack, proxy.api_url).service("bot"),
        ):
            interrupt_id = await ask(conn)
            await slack.command("U01ALICE", "/claims")
            [note] = await slack.ephemerals("U01ALICE")
            assert items_of(note, "list") == [interrupt_id]

            await slack.open_home("U01ALICE")
            home = await until(lambda: slack.home("U01ALICE"))
            assert home is not None and items_of(home, "waits") == [interrupt_id]

            await slack.command("U01ALICE", "/claims", "new")
            assert "submit" in await content_of(slack.modals)
            # The local Slack forgets what a field begins with.
            currency = {"currency": {"currency": {"type": "plain_text_input", "value": "EUR"}}}
            wrong = currency | {"amount": {"amount": {"type": "plain_text_input", "value": "ten"}}}
            assert list(await slack.submit_modal("U01ALICE", wrong)) == ["amount"]
            right = currency | {"amount": {"amount": {"type": "plain_text_input", "value": "70"}}}
            assert await slack.submit_modal("U01ALICE", right) == {}
            filed = await one_row(
                conn, "SELECT input->>'amount' AS amount, requested_by FROM threads WHERE thread_id <> 't1'"
            )
            assert filed == {"amount": "70.00", "requested_by": ALICE.key}

            async def told() -> bool:
                return any("Filed as slack-" in each["text"] for each in await slack.ephemerals("U01ALICE"))

            await until(told)
            await slack.command("U01ALICE", "/claims", "away <@U02BOB|bob> until tomorrow")
            # The local Slack says where she is.
            assert "Europe/Moscow" in (await slack.ephemerals("U01ALICE"))[-1]["text"]
            assert all(each == Answer(kind="ack", status=200, body=each.body) for each in await slack.answers())
