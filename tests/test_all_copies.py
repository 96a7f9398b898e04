"""Whatever settles a request, through whichever door: every posted copy of it shows so within five seconds.

Four copies of each card: in the channel, in two approvers' direct messages, and one whose posting nobody heard of and
on which somebody clicked. A worker with its clock drives; the deliverer is the bot's.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path

import pytest

from bot import outlet
from flow import notices
from flow.approvals import approvals_of, decide
from flow.changes import change_amount, withdraw
from flow.database import Connection
from flow.model import Approval
from tests.block_kit import buttons_of
from tests.command import Terminal, worker
from tests.delivering import deliverer_at, running
from tests.fault_proxy import FaultProxy
from tests.local_slack import CHANNEL, LocalSlack, skip_reason
from tests.people import ALICE, ANN, BOB, NO, start_claim
from tests.rows import until, value
from tests.slack_door import client_of
from tests.test_every_door import NAMES, Doors, doors  # noqa: F401

pytestmark = pytest.mark.skipif(skip_reason() is not None, reason=skip_reason() or "")

WITHIN_S = 5.0

# Everybody who is behind a door, and two who are asked in direct messages besides.
_POLICY = f"""
[[tiers]]
name = "approval"
over = {{ USD = 100 }}
approvers = {sorted({*NAMES.values(), "U01ALICE", "U02BOB"})}
expires_after = "1 hour"
post_to = "both"
"""

# A clock that looks late is late.
_SINCE = (
    "SELECT extract(epoch FROM clock_timestamp() - CASE status WHEN 'expired' THEN expires_at ELSE settled_at END)"
    "::float"
    " FROM approvals WHERE interrupt_id = %s"
)

Settle = Callable[[Connection, Terminal, Approval], Awaitable[None]]


async def at_the_command_line(_: Connection, terminal: Terminal, approval: Approval) -> None:
    assert (await terminal.run_meanwhile("resume", "--thread", approval.thread_id, "--approve")).code == 0


async def by_a_rejection(conn: Connection, _: Terminal, approval: Approval) -> None:
    await decide(conn, approval.interrupt_id, ALICE, NO)


async def by_the_clock(conn: Connection, _: Terminal, approval: Approval) -> None:
    """It is over by now; the worker's clock finds that out by itself."""
    await conn.execute(
        "UPDATE approvals SET expires_at = clock_timestamp() WHERE interrupt_id = %s", (approval.interrupt_id,)
    )


async def by_whoever_asked(conn: Connection, _: Terminal, approval: Approval) -> None:
    await withdraw(conn, approval.thread_id, ANN)


async def by_another_amount(conn: Connection, _: Terminal, approval: Approval) -> None:
    await change_amount(
        conn, approval.interrupt_id, BOB, amount="200", door="slack", request_hash=approval.request_hash
    )


OTHERS: dict[str, Settle] = {
    "the command line": at_the_command_line,
    "a rejection": by_a_rejection,
    "the clock": by_the_clock,
    "a withdrawal": by_whoever_asked,
    "another amount": by_another_amount,
}


@pytest.fixture(autouse=True)
def _no_pace(monkeypatch: pytest.MonkeyPatch) -> None:
    """One message a second in a channel is a wait of the posts; changes have none."""
    monkeypatch.setattr(outlet, "_BETWEEN_POSTS_S", 0.0)


@pytest.fixture
def slack() -> Iterator[LocalSlack]:
    with LocalSlack(request_url="http://127.0.0.1:9/") as started:
        yield started


@pytest.fixture
async def proxy(slack: LocalSlack) -> AsyncIterator[FaultProxy]:
    async with FaultProxy(slack.ui_url) as started:
        yield started


async def test_every_copy_of_a_request_that_is_settled_anywhere_shows_so_in_time(
    conn: Connection,
    database_url: str,
    tmp_path: Path,
    slack: LocalSlack,
    proxy: FaultProxy,
    doors: Doors,  # noqa: F811
    tally: Counter[str],
) -> None:
    (tmp_path / "policy.toml").write_text(_POLICY)
    terminal = Terminal(tmp_path, DATABASE_URL=database_url)
    longest_ms = 0
    async with deliverer_at(proxy) as deliverer, worker(terminal, conn), running(deliverer, database_url):
        # However somebody asks for another amount, what becomes of the request is the same.
        deciding = [door for door in NAMES if not door.startswith("amount")]
        for number, way in enumerate([*deciding, *OTHERS]):
            approval = await asked(conn, f"t{number}")
            places = await posted(conn, slack, approval)
            if way in OTHERS:
                await OTHERS[way](conn, terminal, approval)
            else:
                send = await doors.prepare(way, approval.interrupt_id)
                assert await send() in (200, 303)

            async def all_show_it(places: list[tuple[str, str]] = places) -> bool:
                return not any([await waits_at(slack, *place) for place in places])

            await until(all_show_it, within_s=60)
            took_s = await value(conn, _SINCE, approval.interrupt_id)
            assert took_s < WITHIN_S, (way, took_s)
            longest_ms = max(longest_ms, round(took_s * 1000))
            tally["copies that came true"] += len(places)
    tally["ms at the most"] = longest_ms


async def asked(conn: Connection, thread_id: str) -> Approval:
    """A claim that waits, as the worker has left it."""
    await start_claim(conn, thread_id)

    async def waiting() -> list[Approval]:
        return [each for each in (await approvals_of(conn, [thread_id]))[thread_id] if each.status == "pending"]

    [approval] = await until(waiting, within_s=60)
    return approval


async def posted(conn: Connection, slack: LocalSlack, approval: Approval) -> list[tuple[str, str]]:
    """Channel and ts of its four copies, of which one became known by a click."""

    async def three() -> list[tuple[str, str]]:
        places = await notices.messages_of(conn, approval.interrupt_id)
        return places if len(places) == 3 else []

    places = await until(three, within_s=60)
    [original] = [each for each in await slack.messages(CHANNEL) if each["ts"] == places[0][1]]
    async with client_of(slack.api_url) as client:
        copy = await client.chat_postMessage(channel=CHANNEL, text=original["text"], blocks=original["blocks"])
    await notices.remember_message(conn, approval.interrupt_id, CHANNEL, str(copy["ts"]))
    return [*places, (CHANNEL, str(copy["ts"]))]


async def waits_at(slack: LocalSlack, channel: str, ts: str) -> bool:
    """Whether the copy there still offers to approve."""
    [message] = [each for each in await slack.messages(channel) if each["ts"] == ts]
    return "approve" in buttons_of(message)
