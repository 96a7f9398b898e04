"""The outbox: what is due is leased once, what changed is shown again, and a late deliverer spoils nothing."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import pytest

from flow import notices
from flow.database import Connection, connect
from flow.model import Notice
from tests.people import ask
from tests.rows import all_rows, one_row, value


@pytest.fixture
async def deliverers(database_url: str) -> AsyncIterator[list[Connection]]:
    async with contextlib.AsyncExitStack() as stack:
        yield [await stack.enter_async_context(await connect(database_url, "door")) for _ in range(10)]


async def notice(conn: Connection, kind: str = "card") -> dict[str, Any]:
    """The only notice of this kind: is it due, and what does it say of itself."""
    return await one_row(
        conn,
        "SELECT id, status, version, attempt, ambiguous, error, due_at <= clock_timestamp() AS due"
        " FROM notices WHERE kind = %s",
        kind,
    )


async def lease(conn: Connection) -> Notice | None:
    """What is due in either lane."""
    return await notices.lease(conn, "posts") or await notices.lease(conn, "changes")


async def leased(conn: Connection) -> Notice:
    found = await lease(conn)
    assert found is not None
    return found


async def refuse(conn: Connection) -> None:
    """What is due is refused, and the operators are told."""
    await notices.mark_failed(conn, await leased(conn), "not_in_channel")
    alarm = await notices.lease(conn, "alarms")
    assert alarm is not None
    assert (alarm.kind, alarm.interrupt_id) == ("alarm", None)
    await notices.mark_sent(conn, alarm)


async def run_out(conn: Connection) -> None:
    """The time of every lease is over."""
    await conn.execute("UPDATE notices SET due_at = clock_timestamp() - interval '1 second' WHERE status = 'sending'")


async def test_a_request_has_one_card_that_is_due_at_once(conn: Connection) -> None:
    interrupt_id = await ask(conn)
    await notices.post_card(conn, interrupt_id, "t1")
    row = await notice(conn)
    assert (row["status"], row["version"], row["attempt"], row["due"]) == ("pending", 1, 0, True)
    found = await leased(conn)
    assert (found.kind, found.interrupt_id, found.thread_id) == ("card", interrupt_id, "t1")
    assert (found.version, found.attempt, found.ambiguous) == (1, 1, False)


async def test_a_leased_notice_is_nobody_elses_until_its_lease_ends(conn: Connection) -> None:
    await ask(conn)
    await leased(conn)
    assert await lease(conn) is None
    left = await one_row(conn, "SELECT extract(epoch FROM due_at - clock_timestamp()) AS s, status FROM notices")
    assert left["status"] == "sending"
    assert notices.LEASE_S - 15 < left["s"] <= notices.LEASE_S


async def test_ten_deliverers_at_once_lease_each_notice_once(conn: Connection, deliverers: list[Connection]) -> None:
    for thread_id in map(str, range(50)):
        await ask(conn, thread_id)

    async def deliver(mine: Connection) -> list[int]:
        found = []
        while due := await lease(mine):
            found.append(due.id)
        return found

    found = await asyncio.gather(*(deliver(mine) for mine in deliverers))
    ids = [row["id"] for row in await all_rows(conn, "SELECT id FROM notices ORDER BY id")]
    assert sorted(one for some in found for one in some) == ids
    assert {row["attempt"] for row in await all_rows(conn, "SELECT attempt FROM notices")} == {1}


async def test_the_notice_that_is_due_for_longest_is_first(conn: Connection) -> None:
    for thread_id in ("a", "b", "c"):
        await ask(conn, thread_id)
    await conn.execute("UPDATE notices SET due_at = clock_timestamp() - interval '1 hour' WHERE thread_id = 'b'")
    assert [(await leased(conn)).thread_id for _ in range(3)] == ["b", "a", "c"]


async def test_changes_of_posted_cards_do_not_wait_behind_new_ones(conn: Connection) -> None:
    posted = await ask(conn, "posted")
    await notices.mark_sent(conn, await leased(conn))
    await ask(conn, "new")
    await notices.post_reply(conn, posted, "posted")
    await notices.change_card(conn, posted)
    changed = await notices.lease(conn, "changes")
    assert changed is not None
    assert (changed.thread_id, changed.kind) == ("posted", "card")
    assert await notices.lease(conn, "changes") is None
    new = [await notices.lease(conn, "posts") for _ in range(3)]
    assert [one and (one.thread_id, one.kind) for one in new] == [("new", "card"), ("posted", "reply"), None]


async def test_a_sent_notice_is_due_no_more(conn: Connection) -> None:
    await ask(conn)
    await notices.mark_sent(conn, await leased(conn))
    row = await notice(conn)
    assert (row["status"], row["due"], row["error"]) == ("sent", None, None)
    assert await lease(conn) is None


async def test_a_sent_card_is_due_again_when_it_changes(conn: Connection) -> None:
    interrupt_id = await ask(conn)
    await notices.mark_sent(conn, await leased(conn))
    await notices.change_card(conn, interrupt_id)
    again = await leased(conn)
    assert (again.version, again.attempt, again.ambiguous) == (2, 2, False)


async def test_a_change_while_it_is_being_sent_makes_it_due_again_after_it_was_sent(conn: Connection) -> None:
    interrupt_id = await ask(conn)
    sending = await leased(conn)
    await notices.change_card(conn, interrupt_id)
    # Not before: two deliverers of one message could overtake each other.
    assert await lease(conn) is None
    await notices.mark_sent(conn, sending)
    row = await notice(conn)
    assert (row["status"], row["version"], row["due"]) == ("pending", 2, True)
    again = await leased(conn)
    assert (again.version, again.ambiguous) == (2, False)
    await notices.mark_sent(conn, again)
    assert (await notice(conn))["status"] == "sent"


async def test_a_change_in_a_transaction_that_fails_never_was(conn: Connection) -> None:
    interrupt_id = await ask(conn)
    await notices.mark_sent(conn, await leased(conn))
    async with conn.transaction(force_rollback=True):
        await notices.change_card(conn, interrupt_id)
    assert (await notice(conn))["status"] == "sent"


async def test_a_lease_that_ran_out_is_leased_again_and_said_to_be_ambiguous(conn: Connection) -> None:
    await ask(conn)
    first = await leased(conn)
    await run_out(conn)
    second = await leased(conn)
    assert (second.id, second.attempt, second.ambiguous) == (first.id, first.attempt + 1, True)
    # And stays so until it is known to be sent, whatever happens to the next ones.
    await notices.mark_later(conn, second, wait_s=0, error="rate limited", ambiguous=False)
    third = await leased(conn)
    assert third.ambiguous
    await notices.mark_sent(conn, third)
    assert (await notice(conn))["ambiguous"] is False


async def test_a_late_deliverer_does_not_mark_it_sent_but_has_it_shown_again(conn: Connection) -> None:
    await ask(conn)
    late = await leased(conn)
    await run_out(conn)
    fast = await leased(conn)
    await notices.mark_sent(conn, late)
    # The fast one is at work: after it, the card is shown once more, as what the late one sent may lie on top.
    assert ((await notice(conn))["status"], (await notice(conn))["attempt"]) == ("sending", fast.attempt)
    await notices.mark_sent(conn, fast)
    row = await notice(conn)
    assert (row["status"], row["due"], row["version"]) == ("pending", True, 2)


async def test_a_deliverer_that_is_late_by_a_whole_delivery_has_it_shown_again(conn: Connection) -> None:
    await ask(conn)
    late = await leased(conn)
    await run_out(conn)
    await notices.mark_sent(conn, await leased(conn))
    assert (await notice(conn))["status"] == "sent"
    await notices.mark_sent(conn, late)
    row = await notice(conn)
    assert (row["status"], row["due"], row["version"]) == ("pending", True, 2)


async def test_a_late_deliverers_failure_changes_nothing(conn: Connection) -> None:
    await ask(conn)
    late = await leased(conn)
    await run_out(conn)
    fast = await leased(conn)
    before = await notice(conn)
    await notices.mark_failed(conn, late, "channel_not_found")
    await notices.mark_later(conn, late, wait_s=0, error="timeout", ambiguous=False)
    assert await notice(conn) == before
    await notices.mark_sent(conn, fast)
    assert (await notice(conn))["status"] == "sent"


async def test_a_notice_that_is_put_off_waits_as_long_as_it_was_told(conn: Connection) -> None:
    await ask(conn)
    await notices.mark_later(conn, await leased(conn), wait_s=60, error="rate limited", ambiguous=False)
    row = await one_row(
        conn, "SELECT status, error, ambiguous, extract(epoch FROM due_at - clock_timestamp()) AS s FROM notices"
    )
    assert (row["status"], row["error"], row["ambiguous"]) == ("pending", "rate limited", False)
    assert 45 < row["s"] <= 60
    assert await lease(conn) is None


@pytest.mark.parametrize("ambiguous", [True, False])
async def test_a_notice_that_is_put_off_remembers_whether_it_may_have_been_sent(
    conn: Connection, ambiguous: bool
) -> None:
    await ask(conn)
    await notices.mark_later(conn, await leased(conn), wait_s=0, error="timeout", ambiguous=ambiguous)
    assert (await leased(conn)).ambiguous is ambiguous


async def test_a_late_change_without_an_answer_is_shown_once_more(conn: Connection) -> None:
    interrupt_id = await ask(conn)
    await notices.mark_sent(conn, await leased(conn))
    await notices.change_card(conn, interrupt_id)
    slow = await leased(conn)
    await run_out(conn)
    await notices.mark_sent(conn, await leased(conn))
    # The first one's update may have landed last.
    await notices.mark_later(conn, slow, wait_s=5, error="timeout", ambiguous=True)
    row = await notice(conn)
    assert (row["status"], row["due"]) == ("pending", True)


async def test_a_refused_notice_waits_for_somebody_to_mend_the_cause(conn: Connection) -> None:
    await ask(conn)
    await refuse(conn)
    assert await notices.failures_of(conn, "t1") == [("card", "not_in_channel")]
    row = await notice(conn)
    assert (row["status"], row["due"], row["error"]) == ("failed", None, "not_in_channel")
    assert await lease(conn) is None
    assert await notices.retry_failed(conn) == 1
    assert await notices.retry_failed(conn) == 0
    assert (await leased(conn)).attempt == 2


async def test_only_refused_notices_are_tried_again(conn: Connection) -> None:
    for thread_id in ("refused", "sent", "sending", "pending"):
        await ask(conn, thread_id)
    await refuse(conn)
    await notices.mark_sent(conn, await leased(conn))
    await leased(conn)
    assert await notices.retry_failed(conn) == 1
    rows = await all_rows(conn, "SELECT thread_id, status FROM notices WHERE kind = 'card' ORDER BY id")
    assert [row["status"] for row in rows] == ["pending", "sent", "sending", "pending"]


async def test_a_refused_card_is_tried_again_when_it_changes(conn: Connection) -> None:
    interrupt_id = await ask(conn)
    await refuse(conn)
    await notices.change_card(conn, interrupt_id)
    assert (await leased(conn)).version == 2


async def test_an_outcome_is_said_once_and_a_later_one_once_more(conn: Connection) -> None:
    interrupt_id = await ask(conn)
    await notices.mark_sent(conn, await leased(conn))
    for version in (1, 2):
        await notices.post_reply(conn, interrupt_id, "t1")
        reply = await leased(conn)
        assert (reply.kind, reply.version) == ("reply", version)
        await notices.mark_sent(conn, reply)
        # A change of the card does not say it again.
        await notices.change_card(conn, interrupt_id)
        card = await leased(conn)
        assert card.kind == "card"
        await notices.mark_sent(conn, card)
        assert await lease(conn) is None


async def test_a_late_deliverer_of_a_reply_leaves_the_card_alone(conn: Connection) -> None:
    interrupt_id = await ask(conn)
    await notices.mark_sent(conn, await leased(conn))
    await notices.post_reply(conn, interrupt_id, "t1")
    late = await leased(conn)
    await run_out(conn)
    await notices.mark_sent(conn, await leased(conn))
    await notices.mark_sent(conn, late)
    assert [row["status"] for row in await all_rows(conn, "SELECT status FROM notices")] == ["sent", "sent"]


async def test_a_card_says_how_its_delivery_stands(conn: Connection) -> None:
    interrupt_id = await ask(conn)
    assert await notices.card_status(conn, interrupt_id) == "pending"
    sending = await leased(conn)
    assert await notices.card_status(conn, interrupt_id) == "sending"
    await notices.mark_sent(conn, sending)
    assert await notices.card_status(conn, interrupt_id) == "sent"
    assert await notices.card_status(conn, "0" * 32) is None


async def test_what_is_sent_or_has_just_become_due_is_not_undelivered(conn: Connection) -> None:
    assert await notices.undelivered(conn, patience_s=0.0) is None
    await ask(conn)
    assert await notices.undelivered(conn, patience_s=60.0) is None
    await notices.mark_sent(conn, await leased(conn))
    assert await notices.undelivered(conn, patience_s=0.0) is None


async def test_what_nobody_delivers_is_undelivered_and_so_is_what_is_tried_again_and_again(conn: Connection) -> None:
    await ask(conn)
    card = await leased(conn)
    await notices.mark_later(conn, card, wait_s=32, error="no answer from Slack", ambiguous=False)
    await ask(conn, "t2")
    await conn.execute("UPDATE notices SET due_at = clock_timestamp() - interval '1 hour' WHERE thread_id = 't2'")
    late = await notices.undelivered(conn, patience_s=60.0)
    assert late is not None
    assert (late.failed, late.waiting, late.kind, late.thread_id, late.error) == (0, 1, "card", "t2", None)
    # The other one waits as well, since it was asked for: it is due only in half a minute, as ever.
    late = await notices.undelivered(conn, patience_s=0.0)
    assert late is not None
    assert (late.waiting, late.thread_id, late.error) == (2, "t2", "no answer from Slack")


async def test_what_was_refused_is_undelivered_until_it_is_sent(conn: Connection) -> None:
    await ask(conn)
    await refuse(conn)
    late = await notices.undelivered(conn, patience_s=3600.0)
    assert late is not None
    assert (late.failed, late.waiting, late.thread_id, late.error) == (1, 0, "t1", "not_in_channel")
    assert late.since == await value(conn, "SELECT max(at) FROM audit")
    await notices.retry_failed(conn)
    await notices.mark_sent(conn, await leased(conn))
    assert await notices.undelivered(conn, patience_s=0.0) is None
