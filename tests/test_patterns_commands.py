"""Each pattern as it is typed: `start --flow NAME --input JSON`, and `resume` where it asks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from flow.database import Connection
from tests.command import Terminal
from tests.outside import Outside
from tests.pattern_runs import pending_of, result_of

LARGE = {"amount": "60000", "payee": "ACME"}


@pytest.fixture
def terminal(tmp_path: Path, database_url: str) -> Terminal:
    return Terminal(tmp_path, DATABASE_URL=database_url, WEBHOOK_ALLOW_PRIVATE="true")


@pytest.mark.parametrize(
    ("flow", "given", "tiers", "status"),
    [
        ("approval", LARGE, ["vp"], "booked"),
        ("tiered", {"amount": "60000"}, ["manager", "vp"], "booked"),
        ("payment", {"amount": "2000"}, ["approval"], "charged"),
        ("research", {"topic": "refund"}, ["analyst"], "reported"),
    ],
)
async def test_a_pattern_that_asks_waits_for_each_tier_and_ends_with_its_result(
    terminal: Terminal, conn: Connection, flow: str, given: dict[str, Any], tiers: list[str], status: str
) -> None:
    done = terminal.run("start", "--flow", flow, "--thread", "x", "--input", json.dumps(given))
    for tier in tiers:
        assert (done.code, done.err) == (0, "")
        assert "is waiting for approval" in done.out
        [pending] = await pending_of(conn, "x")
        assert pending["tier"] == tier
        done = terminal.run("resume", "--thread", "x", "--interrupt", pending["interrupt_id"], "--approve")
    assert (done.code, done.err) == (0, "")
    assert " is done: " in done.out
    assert (await result_of(conn, "x"))["status"] == status


async def test_the_reason_that_is_typed_with_a_rejection_is_shown_with_the_result(terminal: Terminal) -> None:
    words = ("start", "--flow", "approval", "--thread", "x", "--input", json.dumps(LARGE))
    assert terminal.run(*words).code == 0
    done = terminal.run("resume", "--thread", "x", "--reject", "--reason", "not this quarter")
    assert (done.code, done.err) == (0, "")
    assert 'is done: {"status": "rejected", "reason": "not this quarter"}' in done.out


@pytest.mark.parametrize(
    ("flow", "given", "result"),
    [
        ("batch", {"items": [f"i{number}" for number in range(100)]}, {"done": 100}),
        ("fan-out", {"urls": ["/a", "/b"]}, {"delivered": 2}),
    ],
)
async def test_a_pattern_that_asks_nobody_ends_with_its_result(
    terminal: Terminal, conn: Connection, flow: str, given: dict[str, Any], result: dict[str, Any]
) -> None:
    async with Outside() as outside:
        if "urls" in given:
            given = {"urls": [outside.url + path for path in given["urls"]]}
        words = ("start", "--flow", flow, "--thread", "x", "--input", json.dumps(given))
        done = await terminal.run_meanwhile(*words)
        assert (done.code, done.err) == (0, "")
        # Typed again it is the same thread, which is over.
        assert (await terminal.run_meanwhile(*words)).out == done.out
    assert await result_of(conn, "x") == result
    assert [each.path for each in outside.done] in ([], ["/a", "/b"], ["/b", "/a"])
    assert len(outside.done) == result.get("delivered", 0)


@pytest.mark.parametrize(
    ("flow", "given"), [("tiered", '{"amount": "much"}'), ("batch", "[]"), ("three-step", '{"seconds": 1}')]
)
def test_what_is_typed_wrong_is_refused_and_writes_nothing(terminal: Terminal, flow: str, given: str) -> None:
    done = terminal.run("start", "--flow", flow, "--thread", "x", "--input", given)
    assert done.code > 0
    assert done.err.startswith("error: ")
    assert terminal.run("show", "--thread", "x").code == 1
