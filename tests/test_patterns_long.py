"""The patterns that take their time: fan-out, batch and three steps; killed on the way, and finished by others."""

from __future__ import annotations

import collections
import contextlib
import socket
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from flow.database import Connection
from flow.errors import DriveFailed
from tests.command import Running, Terminal
from tests.outside import Asked, Outside
from tests.pattern_runs import (
    drive_here,
    drive_in_a_process,
    driven_in_a_process,
    effects_of,
    leases_are_over,
    result_of,
    start,
)
from tests.processes import end_of, start_process
from tests.rows import all_rows, one_row, until, value

pytestmark = pytest.mark.timeout(300)

PATHS = [f"/hook-{number}" for number in range(10)]
ITEMS = [f"i{number}" for number in range(100)]

# What becomes of the calls that are under way at the kill: the service never looked at them, or has done them.
Fate = Callable[[Outside, Callable[[Asked], bool]], None]


def never_looked_at(outside: Outside, chosen: Callable[[Asked], bool]) -> None:
    outside.ignored = chosen


def done_but_never_answered(outside: Outside, chosen: Callable[[Asked], bool]) -> None:
    outside.mute = chosen


FATES = pytest.mark.parametrize("fate", [never_looked_at, done_but_never_answered], ids=lambda fate: fate.__name__)


@pytest.fixture
async def outside(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Outside]:
    monkeypatch.setenv("WEBHOOK_ALLOW_PRIVATE", "true")
    async with Outside() as outside:
        yield outside


async def kill_when(url: str, thread_id: str, look: Callable[[], Any]) -> None:
    """Drive it in a process, and SIGKILL that as soon as this is true."""
    process = start_process(drive_in_a_process, url, thread_id)
    try:
        await until(look, within_s=60)
        assert process.exitcode is None
    finally:
        process.kill()
    assert await end_of(process) < 0


# Fan-out


@FATES
async def test_a_fan_out_killed_half_way_is_finished_by_another_process_with_ten_deliveries(
    database_url: str, conn: Connection, outside: Outside, tally: collections.Counter[str], fate: Fate
) -> None:
    """The five calls under way at the kill are made again, under their keys, and none of the five that were done."""

    async def half_is_done() -> bool:
        recorded = [effect["status"] for effect in await effects_of(conn, "t1")].count("done")
        return recorded == 5 and len(outside.asked) == 10

    fate(outside, lambda asked: asked.path in PATHS[5:])
    await start(conn, "fan-out", "t1", urls=[outside.url + path for path in PATHS])
    await kill_when(database_url, "t1", half_is_done)
    fate(outside, lambda asked: False)
    await leases_are_over(conn)
    assert await driven_in_a_process(database_url, "t1") == 0
    assert await result_of(conn, "t1") == {"delivered": 10}
    assert outside.done_by_path == dict.fromkeys(PATHS, 1)
    assert outside.asked_by_path == dict.fromkeys(PATHS[:5], 1) | dict.fromkeys(PATHS[5:], 2)
    assert len({each.key for each in outside.asked}) == 10
    tally["fan-outs killed"] += 1
    tally["deliveries"] += len(outside.done)


async def test_a_fan_out_tries_all_and_then_only_those_again_that_failed(conn: Connection, outside: Outside) -> None:
    """Those answered with anything but a 2xx, and the one whose connection was refused."""
    with free_port() as port:
        away = f"http://127.0.0.1:{port}/away"
    outside.failing = dict(zip(PATHS, (301, 404, 503), strict=False))
    await start(conn, "fan-out", "t1", urls=[away, *(outside.url + path for path in PATHS)], text="hello")
    with pytest.raises(DriveFailed, match=r"NotDelivered: 4 of 11 failed, 127\.0\.0\.1: "):
        await drive_here(conn, "t1")
    assert outside.done_by_path == dict.fromkeys(PATHS[3:], 1)
    outside.failing.clear()
    async with Outside(port=port) as back:
        assert await drive_here(conn, "t1") == "over"
    assert await result_of(conn, "t1") == {"delivered": 11}
    assert back.done_by_path == {"/away": 1}
    assert outside.done_by_path == dict.fromkeys(PATHS, 1)
    assert outside.asked_by_path == dict.fromkeys(PATHS[:3], 2) | dict.fromkeys(PATHS[3:], 1)
    assert [each.body for each in outside.done] == [{"text": "hello"}] * 10


async def test_the_same_url_twice_is_two_calls(conn: Connection, outside: Outside) -> None:
    await start(conn, "fan-out", "t1", urls=[outside.url + "/hook"] * 2)
    assert await drive_here(conn, "t1") == "over"
    assert outside.done_by_path == {"/hook": 2}


@contextlib.contextmanager
def free_port() -> Iterator[int]:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        yield taken.getsockname()[1]


# Batch


@FATES
async def test_a_batch_killed_at_item_73_goes_on_at_74_in_another_process_and_does_each_item_once(
    database_url: str, conn: Connection, outside: Outside, tally: collections.Counter[str], fate: Fate
) -> None:
    """73 items are done and recorded, and the 74th is under way."""

    async def is_at_74() -> bool:
        return len(outside.asked) == 74

    fate(outside, lambda asked: asked.body["item"] == ITEMS[73])
    await start(conn, "batch", "t1", items=ITEMS, url=outside.url)
    await kill_when(database_url, "t1", is_at_74)
    effects = await effects_of(conn, "t1")
    assert [effect["status"] for effect in effects] == ["done"] * 73 + ["started"]
    progress = await one_row(conn, "SELECT progress_done, progress_total FROM threads")
    assert 0 < progress["progress_done"] <= 73
    assert progress["progress_total"] == 100
    fate(outside, lambda asked: False)
    await leases_are_over(conn)
    assert await driven_in_a_process(database_url, "t1") == 0
    assert await result_of(conn, "t1") == {"done": 100}
    assert [each.body["item"] for each in outside.done] == ITEMS
    # The first that the other process asked for is the one that was under way.
    assert [each.body["item"] for each in outside.asked] == [*ITEMS[:74], *ITEMS[73:]]
    assert await one_row(conn, "SELECT progress_done, progress_total FROM threads") == {
        "progress_done": 100,
        "progress_total": 100,
    }
    tally["batches killed"] += 1
    tally["items"] += len(outside.done)


async def test_a_batch_of_1_100_items_has_no_limit_of_steps_and_keeps_no_more_for_each_than_one_of_100(
    conn: Connection, tally: collections.Counter[str]
) -> None:
    bytes_per_item = {}
    for count in (100, 1_100):
        thread_id = f"t{count}"
        await start(conn, "batch", thread_id, items=[f"i{number}" for number in range(count)])
        while (outcome := await drive_here(conn, thread_id)) == "unfinished":
            pass
        assert outcome == "over"
        assert await result_of(conn, thread_id) == {"done": count}
        assert len(await effects_of(conn, thread_id)) == count
        bytes_per_item[count] = await stored_bytes(conn, thread_id) / count
        tally[f"bytes in checkpoints for each of {count} items"] = round(bytes_per_item[count])
    assert bytes_per_item[1_100] <= bytes_per_item[100]


async def test_a_batch_of_nothing_is_done_and_equal_items_are_two(conn: Connection, outside: Outside) -> None:
    for thread_id, items in (("none", []), ("same", ["a", "a"])):
        await start(conn, "batch", thread_id, items=items, url=outside.url)
        assert await drive_here(conn, thread_id) == "over"
        assert await result_of(conn, thread_id) == {"done": len(items)}
    assert [each.body for each in outside.done] == [{"item": "a"}] * 2


async def stored_bytes(conn: Connection, thread_id: str) -> float:
    """Of all that LangGraph keeps of a thread."""
    return float(
        await value(
            conn,
            "SELECT (SELECT sum(pg_column_size(c)) FROM checkpoints c WHERE c.thread_id = t.thread_id)"
            " + (SELECT sum(pg_column_size(b)) FROM checkpoint_blobs b WHERE b.thread_id = t.thread_id)"
            " + (SELECT sum(pg_column_size(w)) FROM checkpoint_writes w WHERE w.thread_id = t.thread_id)"
            " FROM threads t WHERE t.thread_id = %s",
            thread_id,
        )
    )


# Three steps


async def test_three_steps_over_three_processes_run_step_one_once(
    tmp_path: Path, database_url: str, conn: Connection, tally: collections.Counter[str]
) -> None:
    """As the tutorial has it: two of three commands are killed while step two takes its time."""
    terminal = Terminal(tmp_path, DATABASE_URL=database_url)
    words = ("start", "--flow", "three-steps", "--thread", "t1", "--input", '{"seconds": 3}')
    first = await terminal.start(*words)
    await kill_in_step_two(conn, first, attempts=1)
    # Typed again, the same.
    second = await terminal.start(*words)
    await kill_in_step_two(conn, second, attempts=2)
    third = await terminal.start("retry", "--thread", "t1")
    done = await third.end()
    assert done.code == 0, done.err
    assert len({first.pid, second.pid, third.pid}) == 3
    # Whoever had run step one again would have left its own process here.
    assert await result_of(conn, "t1") == {"one": first.pid, "two": third.pid, "three": third.pid}
    tally["commands killed in step two"] += 2


async def kill_in_step_two(conn: Connection, running: Running, *, attempts: int) -> None:
    """SIGKILL once step one is kept and the drive of this number is under way."""

    async def in_step_two() -> bool:
        rows = await all_rows(
            conn,
            "SELECT FROM threads WHERE attempts = %s AND driver_pid IN (SELECT pid FROM pg_stat_activity)"
            " AND EXISTS (SELECT FROM checkpoints WHERE checkpoint->'channel_values' ? 'one')",
            attempts,
        )
        return len(rows) == 1

    try:
        await running.until(in_step_two)
    finally:
        running.kill()
    assert (await running.end()).code < 0
