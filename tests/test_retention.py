"""What is long over is deleted in time and in batches, and the record stays, whoever dies or comes in between."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable
from pathlib import Path
from typing import Any, LiteralString

import pytest
from psycopg import errors, sql
from psycopg.types.json import Jsonb

from flow import database, deliveries, events, notices, payments, threads
from flow.approvals import decide
from flow.database import Connection, connect, ensure_schema
from flow.drive import ensure_checkpoint_tables
from flow.errors import (
    AlreadyDecided,
    EventsForgotten,
    EventUnknown,
    FlowError,
    NothingToResolve,
    SettingError,
    UnknownEvent,
)
from flow.events import events_after
from flow.flows import Flows
from flow.links import link_of
from flow.model import OVER, STATUSES
from flow.retention import BATCH, Keep, foresee, prune
from flow.sessions import begin_session, make_login_link, session_of
from flow.settings import read_settings
from flow.show import stories_of
from flow.trace import trace_of
from tests.api_door import Program, api_in_process, token
from tests.command import Terminal
from tests.driving import everything, run, waiting_claim
from tests.people import ALICE, ANN, BOB, NO, YES, ask, start_claim
from tests.rows import all_rows, one_row, rewrite, until, until_blocked, value

DAY_S = 86_400
KEEP = Keep(checkpoints_s=7 * DAY_S, events_s=30 * DAY_S, spans_s=30 * DAY_S)
NOTHING = Keep(checkpoints_s=None, events_s=None, spans_s=None)

CHECKPOINTS = ("checkpoints", "checkpoint_blobs", "checkpoint_writes")


async def paid_claim(conn: Connection, flows: Flows, thread_id: str = "t1") -> str:
    """The interrupt id of a claim that was approved and paid just now."""
    interrupt_id = await waiting_claim(conn, flows, thread_id)
    await decide(conn, interrupt_id, ALICE, YES)
    assert await run(conn, flows, thread_id) == "over"
    return interrupt_id


async def let_pass(conn: Connection, days: float = 8) -> None:
    """All that has happened so far happened so many days earlier."""
    ago = sql.Literal(f"{days} days")
    for table, column in (
        ("threads", "ended_at"),
        ("threads", "created_at"),
        ("events", "created_at"),
        ("receipts", "received_at"),
        ("sessions", "expires_at"),
        ("login_links", "expires_at"),
    ):
        names = sql.Identifier(table), sql.Identifier(column)
        await conn.execute(
            sql.SQL("UPDATE {} SET {column} = {column} - {}::interval").format(names[0], ago, column=names[1])
        )


async def checkpoints_of(conn: Connection, thread_id: str = "t1") -> int:
    """How many rows LangGraph has of it."""
    counts = [
        await value(conn, "SELECT count(*) FROM checkpoints WHERE thread_id = %s", thread_id),
        await value(conn, "SELECT count(*) FROM checkpoint_blobs WHERE thread_id = %s", thread_id),
        await value(conn, "SELECT count(*) FROM checkpoint_writes WHERE thread_id = %s", thread_id),
    ]
    return sum(counts)


async def pruned(conn: Connection) -> list[str]:
    rows = await all_rows(conn, "SELECT thread_id FROM threads WHERE pruned_at IS NOT NULL ORDER BY 1")
    return [row["thread_id"] for row in rows]


async def ended_threads(conn: Connection, count: int, *, ago: str = "8 days") -> None:
    """Threads that ended long ago, each with a checkpoint of LangGraph's."""
    await conn.execute(
        "INSERT INTO threads (thread_id, flow, flow_version, input, requested_by, status, due_at, ended_at)"
        " SELECT 'x' || n, 'claim', '1', '{}', 'cli:ann', 'paid', NULL,"
        " clock_timestamp() - %s::interval + n * interval '1 millisecond' FROM generate_series(1, %s) AS n",
        (ago, count),
    )
    await conn.execute(
        "INSERT INTO checkpoints (thread_id, checkpoint_ns, checkpoint_id, checkpoint)"
        " SELECT 'x' || n, '', '1', jsonb_build_object('state', repeat('x', 800)) FROM generate_series(1, %s) AS n",
        (count,),
    )


# Threads


@pytest.mark.parametrize("status", STATUSES)
async def test_a_thread_has_an_end_exactly_if_it_is_over(conn: Connection, status: str) -> None:
    await start_claim(conn)
    result = Jsonb({}) if status == "done" else None
    await conn.execute("UPDATE threads SET status = %s, due_at = NULL, result = %s", (status, result))
    assert await value(conn, "SELECT ended_at IS NOT NULL FROM threads") == (status in OVER)


@pytest.mark.parametrize(("age", "goes"), [("6 days 23:59", False), ("7 days 00:00:01", True)])
async def test_a_finished_thread_keeps_its_checkpoints_for_a_week(
    conn: Connection, flows: Flows, age: str, *, goes: bool
) -> None:
    await paid_claim(conn, flows)
    before = await checkpoints_of(conn)
    await conn.execute("UPDATE threads SET ended_at = clock_timestamp() - %s::interval", (age,))
    found = await prune(conn, KEEP)
    assert before > 0
    assert await checkpoints_of(conn) == (0 if goes else before)
    assert (found.threads, await pruned(conn)) == ((1, ["t1"]) if goes else (0, []))


@pytest.mark.parametrize("status", sorted(set(STATUSES) - OVER))
async def test_a_thread_that_is_not_over_is_never_touched(conn: Connection, flows: Flows, status: str) -> None:
    interrupt_id = await waiting_claim(conn, flows)
    await conn.execute("UPDATE threads SET status = %s", (status,))
    await let_pass(conn, 1000)
    await conn.execute("UPDATE threads SET driven_at = driven_at - interval '1000 days'")
    await conn.execute("UPDATE notices SET status = 'sent', due_at = NULL")
    before = await everything(conn)
    # Events go by their own age, whatever their thread is doing.
    assert list((await prune(conn, KEEP)).as_json()["tables"]) == ["events"]
    assert await everything(conn) == before
    await conn.execute("UPDATE threads SET status = 'waiting'")
    await decide(conn, interrupt_id, ALICE, YES)
    assert await run(conn, flows) == "over"


async def test_the_record_of_a_pruned_thread_is_whole_and_answers_everything(conn: Connection, flows: Flows) -> None:
    interrupt_id = await paid_claim(conn, flows)
    await conn.execute("UPDATE notices SET status = 'sent', due_at = NULL")
    await let_pass(conn, 400)
    record: list[LiteralString] = [
        "SELECT * FROM approvals",
        "SELECT * FROM decisions",
        "SELECT * FROM payments",
        "SELECT to_jsonb(t) - 'pruned_at' AS thread FROM threads t",
    ]
    before = [await all_rows(conn, query) for query in record]
    audited: LiteralString = "SELECT * FROM audit ORDER BY id"
    log = await all_rows(conn, audited)
    [story] = await stories_of(conn, [await threads.thread_of(conn, "t1")])
    traced = await trace_of(conn, story)
    assert (await prune(conn, KEEP)).threads == 1

    assert [await all_rows(conn, query) for query in record] == before
    assert await all_rows(conn, audited) == log
    assert await stories_of(conn, [await threads.thread_of(conn, "t1")]) == [story]
    assert (await trace_of(conn, story)).events == traced.events
    # What comes late finds it over, and neither runs nor pays it again.
    assert (await start_claim(conn)).status == "paid"
    assert not (await decide(conn, interrupt_id, ALICE, YES)).recorded
    with pytest.raises(AlreadyDecided):
        await decide(conn, interrupt_id, BOB, NO)
    with pytest.raises(FlowError, match="is paid: there is nothing to try again"):
        await threads.retry(conn, "t1", by=ANN.key)
    with pytest.raises(NothingToResolve):
        await payments.resolve(conn, "t1", reference=None, by=ANN.key)
    await threads.wake(conn, "t1")
    assert await run(conn, flows) == "over"
    assert await checkpoints_of(conn) == 0
    assert [await all_rows(conn, query) for query in record] == before


async def test_a_payment_that_is_unknown_can_be_resolved_however_late(conn: Connection, flows: Flows) -> None:
    await waiting_claim(conn, flows)
    await conn.execute(
        "INSERT INTO payments (thread_id, amount, currency, payee, provider, idempotency_key, status, attempts)"
        " VALUES ('t1', 250, 'USD', 'ACME', 'http', 'k', 'unknown', 1)"
    )
    await conn.execute("UPDATE threads SET status = 'unknown'")
    await let_pass(conn, 1000)
    kept = await checkpoints_of(conn)
    await prune(conn, KEEP)
    assert kept > 0
    assert await checkpoints_of(conn) == kept
    assert (await payments.resolve(conn, "t1", reference="R-1", by=ANN.key)).status == "paid"


async def test_a_thread_that_becomes_due_before_it_is_listed_is_left_alone(
    conn: Connection, crowd: list[Connection]
) -> None:
    await ended_threads(conn, 3)
    async with crowd[0].transaction():
        await crowd[0].execute("UPDATE threads SET status = 'running', due_at = now() WHERE thread_id = 'x2'")
        # Nobody waits for it, either.
        assert (await prune(conn, KEEP)).threads == 2
    assert (await prune(conn, KEEP)).threads == 0
    assert (await pruned(conn), await checkpoints_of(conn, "x2")) == (["x1", "x3"], 1)


async def test_a_thread_cannot_become_due_between_listing_and_deletion(
    conn: Connection, crowd: list[Connection]
) -> None:
    await ended_threads(conn, 3)
    holder, other, *_ = crowd
    async with asyncio.TaskGroup() as group, holder.transaction():
        await holder.execute("SELECT FROM checkpoints WHERE thread_id = 'x3' FOR UPDATE")
        pruning = group.create_task(prune(conn, KEEP))
        await until_blocked(holder, conn.info.backend_pid)
        reopen = "UPDATE threads SET status = 'running', due_at = now() WHERE thread_id = 'x2'"
        reopening = group.create_task(_refusal(other, reopen))
        await until_blocked(holder, other.info.backend_pid, by=conn.info.backend_pid)
    assert pruning.result().threads == 3
    # What has no checkpoints any more would run from its start: the table refuses it.
    assert reopening.result() == "CheckViolation"


async def _refusal(conn: Connection, statement: LiteralString) -> str:
    try:
        await conn.execute(statement)
    except errors.Error as exc:
        return type(exc).__name__
    return ""


async def test_whoever_has_a_threads_lock_keeps_its_checkpoints(conn: Connection, crowd: list[Connection]) -> None:
    await ended_threads(conn, 3)
    assert await threads.try_lock(crowd[0], "x2")
    assert (await prune(conn, KEEP)).threads == 2
    assert (await pruned(conn), await checkpoints_of(conn, "x2")) == (["x1", "x3"], 1)
    await threads.unlock(crowd[0], "x2")
    assert (await prune(conn, KEEP)).threads == 1


async def test_who_prunes_leaves_no_thread_locked(conn: Connection, crowd: list[Connection]) -> None:
    await ended_threads(conn, 3)
    await prune(conn, KEEP)
    assert await threads.try_lock(crowd[0], "x1")


async def test_many_who_prune_at_once_share_the_work(conn: Connection, crowd: list[Connection]) -> None:
    await ended_threads(conn, 3 * BATCH)
    done = await asyncio.gather(*(prune(each, KEEP) for each in crowd))
    assert sum(each.threads for each in done) == sum(each.rows for each in done) == 3 * BATCH
    assert await value(conn, "SELECT count(*) FROM checkpoints") == 0


async def test_a_prune_killed_within_a_batch_has_done_whole_batches(
    database_url: str, conn: Connection, crowd: list[Connection], tmp_path: Path
) -> None:
    await ended_threads(conn, BATCH + 50)
    terminal, holder = Terminal(tmp_path, DATABASE_URL=database_url), crowd[0]
    async with holder.transaction():
        await holder.execute("SELECT FROM checkpoints WHERE thread_id = %s FOR UPDATE", (f"x{BATCH + 1}",))
        running = await terminal.start("prune")

        async def is_held() -> bool:
            held = "SELECT count(*) = 1 FROM pg_stat_activity WHERE %s = ANY(pg_blocking_pids(pid))"
            return bool(await value(conn, held, holder.info.backend_pid))

        await running.until(is_held)
        running.kill()
        await running.end()
    # Each thread has both or neither, and the second batch is as it was.
    left = "SELECT count(*) FROM threads JOIN checkpoints USING (thread_id) WHERE pruned_at IS NULL"

    async def is_gone() -> bool:
        return bool(await value(conn, "SELECT count(*) = 0 FROM pg_locks WHERE locktype = 'advisory' AND objsubid = 1"))

    await until(is_gone)
    assert await value(conn, left) == 50 == await value(conn, "SELECT count(*) FROM checkpoints")
    assert len(await pruned(conn)) == BATCH
    done = terminal.run("prune", "--json")
    assert (done.code, done.json["threads"]) == (0, 50)
    assert await value(conn, "SELECT count(*) FROM checkpoints") == 0


# What was said of a thread


async def test_of_a_finished_threads_notices_those_go_that_have_nothing_left_to_say(
    conn: Connection, flows: Flows
) -> None:
    interrupt_id = await paid_claim(conn, flows)
    await let_pass(conn)
    await conn.execute("UPDATE notices SET status = 'sent', due_at = NULL WHERE kind = 'card'")
    await conn.execute("UPDATE notices SET status = 'failed', due_at = NULL, attempt = 1 WHERE kind = 'reply'")
    await notices.remember_message(conn, interrupt_id, "C1", "1.0")
    assert (await prune(conn, KEEP)).tables["notices"].rows == 1
    # Somebody may mend what Slack refused, and `deliver` will say it; where the copies stand is never forgotten.
    assert [row["kind"] for row in await all_rows(conn, "SELECT kind FROM notices")] == ["reply"]
    assert await notices.messages_of(conn, interrupt_id) == [("C1", "1.0")]


@pytest.mark.parametrize("copies", [0, 1])
async def test_what_was_never_said_goes_only_if_there_is_nowhere_to_say_it(
    conn: Connection, flows: Flows, copies: int
) -> None:
    """Without Slack every notice waits for ever; and no card of a settled request is posted anew."""
    interrupt_id = await paid_claim(conn, flows)
    await let_pass(conn)
    if copies:
        await notices.remember_message(conn, interrupt_id, "C1", "1.0")
    await prune(conn, KEEP)
    assert await value(conn, "SELECT count(*) FROM notices") == 2 * copies


async def test_the_outcome_of_what_was_asked_in_direct_messages_stays_until_it_is_said(
    conn: Connection, flows: Flows
) -> None:
    await waiting_claim(conn, flows)
    await rewrite(conn, "post_to = 'direct'")
    interrupt_id = await value(conn, "SELECT interrupt_id FROM approvals")
    await decide(conn, interrupt_id, ALICE, YES)
    assert await run(conn, flows) == "over"
    await let_pass(conn)
    await prune(conn, KEEP)
    # Nobody could be sent the card, and whoever asked may be told.
    assert [row["kind"] for row in await all_rows(conn, "SELECT kind FROM notices")] == ["reply"]
    await conn.execute("UPDATE notices SET status = 'sent', due_at = NULL")
    await conn.execute("UPDATE threads SET pruned_at = NULL")
    assert (await prune(conn, KEEP)).tables["notices"].rows == 1


async def test_an_alarm_stays_until_the_operators_have_heard_it(conn: Connection, flows: Flows) -> None:
    interrupt_id = await paid_claim(conn, flows)
    await conn.execute("UPDATE notices SET status = 'sent', due_at = NULL WHERE kind = 'reply'")
    await notices.remember_message(conn, interrupt_id, "C1", "1.0")
    refused = await notices.lease(conn, "changes")
    assert refused is not None
    await notices.mark_failed(conn, refused, "is_archived")
    await let_pass(conn)
    await prune(conn, KEEP)
    # What could not be shown stays, too: the alarm tells of it.
    assert [row["kind"] for row in await all_rows(conn, "SELECT kind FROM notices ORDER BY kind")] == ["alarm", "card"]


async def test_a_deliverer_that_ends_after_a_prune_has_the_card_shown_once_more(conn: Connection, flows: Flows) -> None:
    interrupt_id = await waiting_claim(conn, flows)
    slow = await notices.lease(conn, "posts")
    await conn.execute("UPDATE notices SET due_at = clock_timestamp()")
    fast = await notices.lease(conn, "posts")
    assert slow is not None
    assert fast is not None
    await notices.remember_message(conn, interrupt_id, "C1", "1.0")
    await decide(conn, interrupt_id, ALICE, YES)
    assert await run(conn, flows) == "over"
    await conn.execute("UPDATE notices SET status = 'sent', due_at = NULL")
    await let_pass(conn)
    await prune(conn, KEEP)
    assert await value(conn, "SELECT count(*) FROM notices") == 0
    # Its older text may stand there now.
    await notices.mark_sent(conn, slow)
    assert await one_row(conn, "SELECT kind, status FROM notices") == {"kind": "card", "status": "pending"}


async def test_a_copy_that_turns_up_late_is_still_put_right(conn: Connection, flows: Flows) -> None:
    interrupt_id = await paid_claim(conn, flows)
    await let_pass(conn)
    await prune(conn, KEEP)
    await notices.remember_message(conn, interrupt_id, "C1", "1.0")
    await notices.show_card(conn, interrupt_id)
    notice = await notices.lease(conn, "posts")
    assert notice is not None
    assert (notice.kind, notice.interrupt_id, notice.thread_id) == ("card", interrupt_id, "t1")


async def test_links_of_a_finished_thread_go_and_those_of_a_waiting_one_stay(conn: Connection, flows: Flows) -> None:
    settled, waiting = await paid_claim(conn, flows), await ask(conn, "t2")
    for interrupt_id, mark in ((settled, b"a"), (waiting, b"b")):
        await conn.execute(
            "INSERT INTO links (interrupt_id, person, made_by, tokens_sha256)"
            " VALUES (%s, 'mail:mary@example.com', 'policy', ARRAY[sha256(%s)])",
            (interrupt_id, mark),
        )
    await let_pass(conn)
    await prune(conn, KEEP)
    assert await link_of(conn, "a") is None
    assert (await link_of(conn, "b")) is not None


# Events


async def test_events_that_everybody_has_go_with_their_deliveries(conn: Connection, flows: Flows) -> None:
    await deliveries.add_endpoints(conn, ["acme"])
    await paid_claim(conn, flows)
    await deliveries.spread(conn, "acme")
    await _deliver_all(conn)
    await let_pass(conn, 29)
    assert "events" not in (await prune(conn, KEEP)).tables
    await let_pass(conn, 1)
    done = await prune(conn, KEEP)
    assert done.tables["events"].rows == done.tables["webhook_deliveries"].rows == 4
    with pytest.raises(UnknownEvent):
        await deliveries.resend_event(conn, 1, "acme", by=ANN.key)


async def _deliver_all(conn: Connection) -> None:
    await conn.execute("UPDATE webhook_deliveries SET status = 'sent', due_at = NULL, sent_at = clock_timestamp()")


@pytest.mark.parametrize("status", ["pending", "sending", "dead"])
async def test_an_event_that_is_not_delivered_stays(conn: Connection, flows: Flows, status: str) -> None:
    await deliveries.add_endpoints(conn, ["acme"])
    await paid_claim(conn, flows)
    await deliveries.spread(conn, "acme")
    await _deliver_all(conn)
    await conn.execute(
        "UPDATE webhook_deliveries SET status = %s, due_at = CASE WHEN %s <> 'dead' THEN clock_timestamp() END"
        " WHERE event_id = 2",
        (status, status),
    )
    await let_pass(conn, 1000)
    await prune(conn, KEEP)
    assert [row["id"] for row in await all_rows(conn, "SELECT id FROM events")] == [2]
    assert [row["event_id"] for row in await all_rows(conn, "SELECT event_id FROM webhook_deliveries")] == [2]
    await _deliver_all(conn)
    assert (await prune(conn, KEEP)).tables["events"].rows == 1


@pytest.mark.parametrize("is_off", [False, True])
async def test_an_event_that_an_endpoint_has_not_come_to_stays(conn: Connection, flows: Flows, *, is_off: bool) -> None:
    await deliveries.add_endpoints(conn, ["acme", "ops"])
    await paid_claim(conn, flows)
    await deliveries.spread(conn, "ops")
    await _deliver_all(conn)
    if is_off:
        await conn.execute("UPDATE webhook_endpoints SET turned_off_at = now(), reason = '410' WHERE name = 'acme'")
    await let_pass(conn, 1000)
    assert "events" not in (await prune(conn, KEEP)).tables
    assert await value(conn, "SELECT count(*) FROM events") == 4


async def test_without_endpoints_and_readers_events_are_forgotten_too(conn: Connection, flows: Flows) -> None:
    await paid_claim(conn, flows)
    await let_pass(conn, 1000)
    assert (await foresee(conn, KEEP)).tables["events"].rows == 4
    assert (await prune(conn, KEEP)).tables["events"].rows == 4
    # Whoever has read the first of them may have missed the others.
    with pytest.raises(EventsForgotten):
        await events_after(conn, 1, limit=10)


async def test_a_reader_gives_few_positions_and_a_prune_gives_them_all(conn: Connection) -> None:
    await start_claim(conn)
    count = 2 * events._BATCH + 1
    await conn.execute(
        "INSERT INTO events (type, thread_id, data) SELECT 'payment.paid', 't1', '{}' FROM generate_series(1, %s)",
        (count,),
    )
    with_one = "SELECT count(position) FROM events"
    [first] = await events_after(conn, 0, limit=1)
    assert await value(conn, with_one) == events._BATCH
    read = [first.position or 0]
    while more := await events_after(conn, read[-1], limit=1000):
        read += [event.position or 0 for event in more]
    assert read == list(range(1, count + 1))
    await conn.execute("UPDATE events SET position = NULL")
    await prune(conn, KEEP)
    assert await value(conn, with_one) == count


async def test_whoever_has_read_what_a_restored_database_has_lost_hears_of_it(
    conn: Connection, flows: Flows, database_url: str
) -> None:
    await paid_claim(conn, flows)
    last = (await events_after(conn, 0, limit=10))[-1].position or 0
    assert await events_after(conn, last, limit=10) == []
    with pytest.raises(EventUnknown):
        await events_after(conn, last + 1, limit=10)
    async with api_in_process(database_url) as url, Program(url, await token(conn)) as robot:
        assert (await robot.get("/api/events", cursor=last + 1)).status == 410
    # Whoever had read all before all was forgotten has missed nothing.
    await let_pass(conn, 1000)
    await prune(conn, KEEP)
    assert await events_after(conn, last, limit=10) == []
    with pytest.raises(EventUnknown):
        await events_after(conn, last + 1, limit=10)


async def test_an_event_that_becomes_due_again_meanwhile_stays(
    conn: Connection, flows: Flows, crowd: list[Connection]
) -> None:
    await deliveries.add_endpoints(conn, ["acme"])
    await paid_claim(conn, flows)
    await deliveries.spread(conn, "acme")
    await _deliver_all(conn)
    await let_pass(conn, 1000)
    async with asyncio.TaskGroup() as group, crowd[0].transaction():
        await crowd[0].execute(
            "UPDATE webhook_deliveries SET status = 'pending', due_at = clock_timestamp() WHERE event_id = 3"
        )
        pruning = group.create_task(prune(conn, KEEP))
        await until_blocked(crowd[1], conn.info.backend_pid)
    assert pruning.result().tables["events"].rows == 3
    assert (await one_row(conn, "SELECT event_id, status FROM webhook_deliveries")) == {
        "event_id": 3, "status": "pending"
    }  # fmt: skip
    assert [row["id"] for row in await all_rows(conn, "SELECT id FROM events")] == [3]


async def test_an_event_that_is_being_sent_again_is_passed_over(
    conn: Connection, flows: Flows, crowd: list[Connection]
) -> None:
    await deliveries.add_endpoints(conn, ["acme"])
    await paid_claim(conn, flows)
    await deliveries.spread(conn, "acme")
    await _deliver_all(conn)
    await let_pass(conn, 1000)
    async with crowd[0].transaction():
        await deliveries.resend_event(crowd[0], 3, "acme", by=ANN.key)
        assert (await prune(conn, KEEP)).tables["events"].rows == 3
    assert [row["id"] for row in await all_rows(conn, "SELECT id FROM events")] == [3]


async def test_an_event_that_is_being_deleted_is_not_sent_again(
    conn: Connection, flows: Flows, crowd: list[Connection]
) -> None:
    await deliveries.add_endpoints(conn, ["acme"])
    await paid_claim(conn, flows)
    await deliveries.spread(conn, "acme")
    await _deliver_all(conn)
    await let_pass(conn, 1000)
    holder, other, third, _ = crowd
    async with asyncio.TaskGroup() as group, holder.transaction():
        # A prune gets as far as its last statement.
        await holder.execute("SELECT FROM installation FOR UPDATE")
        pruning = group.create_task(prune(conn, KEEP))
        await until_blocked(third, conn.info.backend_pid)
        resending = group.create_task(_flow_error(deliveries.resend_event(other, 1, "acme", by=ANN.key)))
        await until_blocked(third, other.info.backend_pid, by=conn.info.backend_pid)
    assert pruning.result().tables["events"].rows == 4
    assert type(resending.result()) is UnknownEvent


async def _flow_error(act: Awaitable[None]) -> FlowError | None:
    try:
        await act
    except FlowError as exc:
        return exc
    return None


async def test_an_endpoint_that_is_forgotten_holds_nothing(
    conn: Connection, flows: Flows, database_url: str, tmp_path: Path
) -> None:
    await deliveries.add_endpoints(conn, ["gone", "here"])
    await paid_claim(conn, flows)
    await deliveries.spread(conn, "gone")
    await conn.execute("UPDATE webhook_deliveries SET status = 'dead', due_at = NULL WHERE event_id < 3")
    await paid_claim(conn, flows, "t2")
    await deliveries.spread(conn, "here")
    await conn.execute(
        "UPDATE webhook_deliveries SET status = 'sent', due_at = NULL, sent_at = now() WHERE endpoint = 'here'"
    )
    await let_pass(conn, 1000)
    assert "events" not in (await prune(conn, KEEP)).tables
    terminal = Terminal(tmp_path, DATABASE_URL=database_url, WEBHOOK_ALLOW_PRIVATE="true")
    terminal.environment |= {
        "WEBHOOK_URLS": "here=http://127.0.0.1:1/",
        "WEBHOOK_SIGNING_SECRETS": f"here=whsec_{'A' * 32}",
    }
    refused = terminal.run("webhooks", "forget", "here")
    assert (refused.code, refused.err) == (
        1, "error: here is in WEBHOOK_URLS: take it out first, on every machine\n"
    )  # fmt: skip
    assert terminal.run("webhooks", "forget", "other").code == 1
    done = terminal.run("webhooks", "forget", "gone")
    assert (done.code, done.out, done.err) == (0, "gone is forgotten, with 8 events that it has not got\n", "")
    assert [row["name"] for row in await all_rows(conn, "SELECT name FROM webhook_endpoints")] == ["here"]
    assert (await prune(conn, KEEP)).tables["events"].rows == 8
    audited = await one_row(conn, "SELECT data, door FROM audit WHERE kind = 'webhook.forgotten'")
    assert audited == {"data": {"endpoints": ["gone"], "count": 8}, "door": "cli"}


async def test_who_reads_on_hears_if_something_was_missed(conn: Connection, flows: Flows, database_url: str) -> None:
    await paid_claim(conn, flows)
    read = [event.position or 0 for event in await events_after(conn, 0, limit=10)]
    await let_pass(conn, 1000)
    await prune(conn, KEEP)
    await paid_claim(conn, flows, "t2")
    # Whoever had read everything misses nothing, and so does whoever begins.
    later = await events_after(conn, read[-1], limit=10)
    assert later[-1].type == "payment.paid"
    assert await events_after(conn, 0, limit=10) == later
    with pytest.raises(EventsForgotten):
        await events_after(conn, read[0], limit=10)
    async with api_in_process(database_url) as url, Program(url, await token(conn)) as robot:
        assert (await robot.get("/api/events", cursor=read[0])).status == 410
        assert (await robot.get("/api/events", cursor=read[-1])).body["next"] == later[-1].position


async def test_a_new_endpoint_begins_with_what_happens_after_it(conn: Connection, flows: Flows) -> None:
    await paid_claim(conn, flows)
    await let_pass(conn, 1000)
    await prune(conn, KEEP)
    await deliveries.add_endpoints(conn, ["acme"])
    await paid_claim(conn, flows, "t2")
    await deliveries.spread(conn, "acme")
    assert await value(conn, "SELECT count(*) FROM webhook_deliveries") == 4


# By their own age


@pytest.mark.parametrize(("days", "left"), [(29.9, 1), (30.1, 0)])
async def test_receipts_and_login_links_are_kept_for_thirty_days(conn: Connection, days: float, left: int) -> None:
    await conn.execute("INSERT INTO receipts (door, sender, key, body_sha256) VALUES ('api', 'robot', 'k', '')")
    await make_login_link(conn, ANN, by=ANN.key)
    await conn.execute("UPDATE login_links SET expires_at = clock_timestamp()")
    await let_pass(conn, days)
    await prune(conn, NOTHING)
    assert await value(conn, "SELECT count(*) FROM receipts") == left
    assert await value(conn, "SELECT count(*) FROM login_links") == left


async def test_a_session_is_forgotten_once_it_has_ended(conn: Connection) -> None:
    over, open_ = await begin_session(conn, ALICE, by="slack"), await begin_session(conn, BOB, by="slack")
    await conn.execute("UPDATE sessions SET expires_at = clock_timestamp() WHERE person = %s", (ALICE.key,))
    assert (await prune(conn, NOTHING)).tables["sessions"].rows == 1
    assert await session_of(conn, over) is None
    assert await session_of(conn, open_) is not None


async def test_more_than_a_batch_goes_too(conn: Connection) -> None:
    await conn.execute(
        "INSERT INTO receipts (door, sender, key, body_sha256, received_at)"
        " SELECT 'api', 'robot', n::text, '', now() - interval '31 days' FROM generate_series(1, %s) AS n",
        (2 * BATCH + 1,),
    )
    assert (await prune(conn, NOTHING)).rows == 2 * BATCH + 1


async def test_what_cannot_be_deleted_holds_nothing_else_up(
    conn: Connection, database_url: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    await ended_threads(conn, 3)
    receipt = (
        "INSERT INTO receipts (door, sender, key, body_sha256, received_at)"
        " VALUES ('api', 'robot', 'k', '', now() - interval '90 days')"
    )
    await conn.execute(receipt)
    await conn.execute("ALTER TABLE checkpoint_writes RENAME TO elsewhere")
    done = await prune(conn, KEEP)
    assert list(done.failed) == ["threads"]
    assert done.failed["threads"].startswith("UndefinedTable: ")
    assert "threads that are long over could not be deleted" in caplog.text
    assert await value(conn, "SELECT count(*) FROM receipts") == 0
    # Whole batches or nothing, as always.
    assert await checkpoints_left(conn) == 3
    typed = Terminal(tmp_path, DATABASE_URL=database_url).run("prune")
    assert typed.code == 1
    assert "not everything could be deleted: threads (UndefinedTable: " in typed.err
    await conn.execute("ALTER TABLE elsewhere RENAME TO checkpoint_writes")
    assert (await prune(conn, KEEP)).threads == 3


async def checkpoints_left(conn: Connection) -> int:
    return int(await value(conn, "SELECT count(*) FROM checkpoints"))


async def test_a_prune_whose_connection_is_lost_says_so(conn: Connection, crowd: list[Connection]) -> None:
    await ended_threads(conn, 3)
    holder = crowd[0]
    async with asyncio.TaskGroup() as group, holder.transaction():
        await holder.execute("SELECT FROM checkpoints WHERE thread_id = 'x3' FOR UPDATE")
        pruning = group.create_task(_lost(prune(conn, KEEP)))
        await until_blocked(holder, conn.info.backend_pid)
        await holder.execute("SELECT pg_terminate_backend(%s)", (conn.info.backend_pid,))
        assert await pruning


async def _lost(act: Awaitable[Any]) -> bool:
    try:
        await act
    except errors.OperationalError:
        return True
    return False


# Settings and commands


@pytest.mark.parametrize(
    ("text", "seconds"), [("12 hours", 43_200), ("1 week", 604_800), ("7d", 604_800), ("never", None)]
)
def test_a_time_is_written_as_in_the_policy(monkeypatch: pytest.MonkeyPatch, text: str, seconds: int | None) -> None:
    monkeypatch.setenv("CHECKPOINT_RETENTION", text)
    monkeypatch.setenv("EVENT_RETENTION", text)
    monkeypatch.setenv("SPAN_RETENTION", text)
    assert Keep.of(read_settings()) == Keep(checkpoints_s=seconds, events_s=seconds, spans_s=seconds)


@pytest.mark.parametrize("text", ["7", "0 days", "-1 days", "a week", "7 years", "999999 weeks"])
def test_a_time_that_is_none_is_refused(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv("EVENT_RETENTION", text)
    with pytest.raises(SettingError, match=r"EVENT_RETENTION: .* never"):
        read_settings()


async def test_never_deletes_nothing(conn: Connection, flows: Flows) -> None:
    await paid_claim(conn, flows)
    await let_pass(conn, 1000)
    before = await everything(conn)
    assert (await prune(conn, NOTHING)).rows == 0
    assert await everything(conn) == before


async def test_a_dry_run_says_what_a_prune_does_and_does_nothing(
    database_url: str, conn: Connection, flows: Flows, tmp_path: Path
) -> None:
    terminal = Terminal(tmp_path, DATABASE_URL=database_url)
    await deliveries.add_endpoints(conn, ["acme"])
    for number in range(3):
        await paid_claim(conn, flows, f"t{number}")
    await deliveries.spread(conn, "acme")
    await _deliver_all(conn)
    await begin_session(conn, ALICE, by="slack")
    await let_pass(conn, 31)
    await ended_threads(conn, BATCH + 1, ago="10 days")
    before = await everything(conn)
    foreseen = terminal.run("prune", "--dry-run", "--older-than", "9d", "--json")
    assert foreseen.json["threads"] == BATCH + 4
    assert await everything(conn) == before
    assert set(foreseen.json["tables"]) == {
        *("checkpoints", "checkpoint_blobs", "checkpoint_writes", "notices", "events", "webhook_deliveries", "sessions")
    }
    done = terminal.run("prune", "--older-than", "9d", "--json")
    assert _rows(done.json) == _rows(foreseen.json)
    again = terminal.run("prune")
    assert (again.code, again.out) == (0, "deleted 0 finished threads, 0 rows, 0 bytes\n")
    assert terminal.run("prune", "--older-than", "soon").code == 2


def _rows(said: dict[str, Any]) -> dict[str, int]:
    """How many of what. (A row that is being deleted may take a byte more.)"""
    return {table: amount["rows"] for table, amount in said["tables"].items()} | {"threads": said["threads"]}


async def test_workers_prune_by_themselves(database_url: str, conn: Connection, flows: Flows, tmp_path: Path) -> None:
    await paid_claim(conn, flows)
    await let_pass(conn, 2)
    terminal = Terminal(tmp_path, DATABASE_URL=database_url, STAND_BY="1", CHECKPOINT_RETENTION="1 day")
    assert terminal.run("work", "--once").code == 0
    assert await pruned(conn) == ["t1"]
    await paid_claim(conn, flows, "t2")
    await let_pass(conn, 2)
    async with terminal.service("work") as working:

        async def has_pruned() -> bool:
            return await pruned(conn) == ["t1", "t2"]

        await working.until(has_pruned)


# Sizes and plans


_SIZED = (*CHECKPOINTS, "threads", "approvals", "decisions", "payments", "advice", "effects", "notices", "messages",
          "links", "events", "webhook_deliveries", "spans")  # fmt: skip


async def test_a_finished_thread_takes_little(conn: Connection, flows: Flows) -> None:
    """Against what the tables take when they are empty. 300 claims were driven; their records are copied nine times, so
    that the roots of indexes and half-empty pages do not count as if each thread had some."""
    driven, copies, empty = 300, 9, await _sizes(conn)
    for number in range(driven):
        await paid_claim(conn, flows, f"t{number:05}")
    await conn.execute("UPDATE notices SET status = 'sent', due_at = NULL")
    full = await _sizes(conn)
    await let_pass(conn, 31)
    await conn.execute("UPDATE spans SET started_at = started_at - interval '31 days'")
    done = await prune(conn, KEEP)
    assert done.threads == driven
    await _copy_records(conn, copies)
    left, count = await _sizes(conn), driven * (copies + 1)
    assert await value(conn, "SELECT count(*) FROM threads WHERE pruned_at IS NOT NULL") == count
    before = {table: (full[table] - empty[table]) // driven for table in full}
    after = {table: (left[table] - empty[table]) // count for table in _SIZED}
    audit = before.pop("audit")
    sys.stderr.write(
        f"\nbytes on disk for each finished thread: {sum(before.values())} before, {sum(after.values())} after, besides"
        f" {audit} of audit; {done.bytes // driven} in the rows that were deleted\n"
        + "".join(f"  {table}: {size} -> {after[table]}\n" for table, size in before.items() if size)
    )
    assert sum(after.values()) < 2000
    assert sum(after[table] for table in (*CHECKPOINTS, "notices", "events", "spans")) == 0


async def _copy_records(conn: Connection, copies: int) -> None:
    """So many more threads with the same record."""
    names: dict[str, LiteralString] = {
        "threads": "'thread_id', t.thread_id || n",
        "approvals": "'thread_id', t.thread_id || n, 'interrupt_id', md5(t.interrupt_id || n)",
        "decisions": "'interrupt_id', md5(t.interrupt_id || n)",
        "payments": "'thread_id', t.thread_id || n, 'reference', t.reference || n, 'id', t.id + 1000 * n",
    }
    for table, other in names.items():
        copy = sql.SQL(
            "INSERT INTO {table} OVERRIDING SYSTEM VALUE"
            " SELECT (jsonb_populate_record(t, jsonb_build_object({other}))).* FROM {table} t, generate_series(1, %s) n"
        )
        await conn.execute(copy.format(table=sql.Identifier(table), other=sql.SQL(other)), (copies,))


async def _sizes(conn: Connection) -> dict[str, int]:
    """Bytes on disk, with indexes and without dead rows."""
    sizes = {}
    for table in (*_SIZED, "audit"):
        await conn.execute(sql.SQL("VACUUM (FULL) {}").format(sql.Identifier(table)))
        sizes[table] = int(await value(conn, "SELECT pg_total_relation_size(%s::regclass)", table))
    return sizes


class Watching:
    """A connection that explains each statement instead of running it, as long as there is an answer to go on with."""

    def __init__(self, conn: Connection) -> None:
        self._conn, self.plans = conn, list[str]()

    async def execute(self, query: Any, values: Any = None) -> Any:
        text = query.decode() if isinstance(query, bytes) else query
        rows = await (await self._conn.execute(f"EXPLAIN {text}".encode(), values)).fetchall()
        self.plans.append(f"{text}\n" + "\n".join(row["QUERY PLAN"] for row in rows))
        return await self._conn.execute(query, values)

    def transaction(self) -> Any:
        return self._conn.transaction()


async def test_at_any_size_what_is_over_is_found_by_an_index(conn: Connection) -> None:
    # Many that are pruned, that ended lately, and that wait.
    await ended_threads(conn, 30_000, ago="400 days")
    await conn.execute("DELETE FROM checkpoints WHERE thread_id > 'x2'")
    await conn.execute("UPDATE threads SET pruned_at = now() WHERE thread_id > 'x2'")
    await conn.execute(
        "INSERT INTO threads (thread_id, flow, flow_version, input, requested_by, status, due_at)"
        " SELECT s || n, 'claim', '1', '{}', 'cli:ann', s, NULL"
        " FROM generate_series(1, 5000) AS n, unnest(ARRAY['waiting', 'paid']) AS s"
    )
    await conn.execute(
        "INSERT INTO approvals (interrupt_id, thread_id, tier, request, request_hash, requested_by, approvers,"
        " required, rank, status, settled_at) SELECT md5(thread_id), thread_id, 'a', '{}', '', 'cli:ann', '{}', 1, 0,"
        " 'approved', now() FROM threads"
    )
    await conn.execute(
        "INSERT INTO notices (kind, interrupt_id, thread_id, status, due_at)"
        " SELECT 'card', md5(thread_id), thread_id, 'sent', NULL FROM threads"
    )
    await conn.execute(
        "INSERT INTO events (type, thread_id, data, created_at, position)"
        " SELECT 'payment.paid', thread_id, '{}', now() - (CASE WHEN thread_id < 'x1001' THEN 31 ELSE 1 END)"
        " * interval '1 day', nextval('events_position') FROM threads WHERE thread_id > 'x'"
    )
    await conn.execute(
        "INSERT INTO links (interrupt_id, person, made_by, tokens_sha256, used_at)"
        " SELECT interrupt_id, 'mail:p' || n || '@example.com', 'policy', ARRAY[sha256((interrupt_id || n)::bytea)],"
        " CASE WHEN n = 1 THEN now() END FROM approvals, generate_series(1, 3) AS n"
    )
    await conn.execute(
        "INSERT INTO messages (channel, ts, interrupt_id) SELECT 'C1', interrupt_id, interrupt_id FROM approvals"
    )
    await deliveries.add_endpoints(conn, ["acme"])
    await conn.execute(
        "INSERT INTO webhook_deliveries (endpoint, event_id, status, due_at, sent_at)"
        " SELECT 'acme', id, 'sent', NULL, now() FROM events"
    )
    for table in ("threads", "approvals", "notices", "messages", "links", "events", "webhook_deliveries", *CHECKPOINTS):
        await conn.execute(sql.SQL("ANALYZE {}").format(sql.Identifier(table)))
    watching: Any = Watching(conn)
    done = await prune(watching, KEEP)
    assert done.threads > BATCH
    listing = [plan for plan in watching.plans if plan.startswith("SELECT thread_id, ended_at")]
    assert all("threads_to_prune" in plan for plan in listing)
    aged = [plan for plan in watching.plans if plan.startswith("SELECT t.id FROM events")]
    assert aged
    assert all("events_oldest" in plan for plan in aged)
    large = ("threads", "approvals", "notices", "messages", "links", "events", "webhook_deliveries", "checkpoints")
    for plan in watching.plans:
        assert not any(f"Seq Scan on {table} " in plan for table in large), plan


# Upgrading


async def test_what_ended_before_the_upgrade_ended_when_it_was_last_driven(
    empty_database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = database._migrations()
    async with await connect(empty_database_url, "drive") as conn:
        monkeypatch.setattr(database, "_migrations", lambda: [each for each in known if each[0] < 17])
        await ensure_schema(empty_database_url, conn)
        await conn.execute(
            "INSERT INTO threads (thread_id, flow, flow_version, input, requested_by, status, due_at, driven_at)"
            " VALUES ('paid', 'claim', '1', '{}', 'cli:ann', 'paid', NULL, now() - interval '8 days'),"
            " ('late', 'claim', '1', '{}', 'cli:ann', 'failed', NULL, now() - interval '6 days'),"
            " ('stuck', 'claim', '1', '{}', 'cli:ann', 'stuck', NULL, now() - interval '8 days')"
        )
        monkeypatch.setattr(database, "_migrations", lambda: known)
        await ensure_schema(empty_database_url, conn)
        await ensure_checkpoint_tables(empty_database_url, conn)
        await prune(conn, KEEP)
        assert await pruned(conn) == ["paid"]


async def test_langgraphs_tables_are_vacuumed_early_and_have_no_index_twice(conn: Connection) -> None:
    settings = "SELECT array_to_string(reloptions, ' ') FROM pg_class WHERE relname = %s"
    for table in CHECKPOINTS:
        assert "autovacuum_vacuum_scale_factor=0.02" in await value(conn, settings, table)
    repeated = "SELECT count(*) FROM pg_indexes WHERE indexname ~ '^checkpoint.*_thread_id_idx'"
    assert await value(conn, repeated) == 0
