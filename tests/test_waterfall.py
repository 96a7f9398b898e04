"""The waterfall: where the bars of a trace stand, and how much of it a page draws."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest

from bot.waterfall import MOST_BARS, waterfall_of
from flow.database import Connection
from flow.spans import Span
from flow.trace import Node, Tree, tree_of
from tests.people import start_claim

BEGIN = datetime(2026, 11, 2, 9, 0, tzinfo=UTC)


def span(name: str, begins_s: float, ends_s: float, **attributes: str) -> Span:
    began, ended = (BEGIN + timedelta(seconds=each) for each in (begins_s, ends_s))
    return Span(span_id=name, name=name, started_at=began, ended_at=ended, attributes=attributes)


def tree(*spans: Span, ends_s: float) -> Tree:
    nodes = tuple(
        Node(span=each, waiting=each.ended_at - each.started_at if "interrupt" in each.attributes else timedelta(0))
        for each in spans
        if each.ended_at
    )
    root = Node(span=span("thread", 0, ends_s), children=nodes)
    return Tree(thread_id="t1", trace_id="1" * 32, root=root, as_of=BEGIN + timedelta(seconds=ends_s))


def test_work_is_seen_beside_days_of_waiting() -> None:
    days = 2 * 86_400
    drawn = waterfall_of(
        tree(span("first", 0, 0.2), span("wait", 0.2, days, interrupt="i"), span("last", days, days + 0.3), ends_s=days)
    )
    first, wait, last = drawn.bars[1:]
    assert drawn.shortened
    assert (round(first.width), round(wait.width), round(last.width)) == (24, 40, 36)
    assert (first.left, wait.left, last.left) == pytest.approx((0, first.width, 64), abs=0.1)


def test_what_waits_for_nobody_is_drawn_to_scale() -> None:
    drawn = waterfall_of(tree(*(span(f"{n}", n, n + 1) for n in range(4)), ends_s=4))
    assert not drawn.shortened
    assert [(bar.left, bar.width) for bar in drawn.bars] == [(0, 100), (0, 25), (25, 25), (50, 25), (75, 25)]


def test_a_span_before_its_thread_or_after_its_end_stays_on_the_page() -> None:
    """A failover may change the clock."""
    drawn = waterfall_of(tree(span("early", -60, -50), span("work", 0, 1), span("late", 100, 101), ends_s=1))
    for bar in drawn.bars:
        assert bar.left >= 0 and bar.width >= 1 and bar.left + bar.width <= 100.01


async def test_of_a_very_long_trace_only_what_began_first_is_drawn(conn: Connection) -> None:
    await start_claim(conn)
    await conn.execute(
        "INSERT INTO spans (thread_id, span_id, name, kind, started_at, ended_at)"
        " SELECT 't1', lpad(to_hex(n), 16, '0'), 'node ' || n, 'internal', at, at + interval '1 s'"
        " FROM generate_series(1, 3000) n, LATERAL (SELECT now() + n * interval '2 s' AS at) times"
    )
    drawn = waterfall_of(await tree_of(conn, "t1", most=MOST_BARS))
    assert drawn.cut
    assert [bar.name for bar in drawn.bars[2:]] == [f"node {n}" for n in range(1, MOST_BARS + 1)]
    lefts = [bar.left for bar in drawn.bars[1:]]
    assert lefts == sorted(lefts)
    assert not waterfall_of(await tree_of(conn, "t1")).cut
