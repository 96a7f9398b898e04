"""Reminders: at the hours in which people work, to those who have not decided, and one for however long it was."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from bot import outlet
from bot.blocks import reminder
from bot.deliver import Deliverer
from bot.people import missing_of
from flow.approvals import approval_of, decide
from flow.database import Connection
from flow.delegations import standing_in_for
from flow.errors import SettingError
from flow.hours import Hours, next_reminder
from flow.inputs import mail_person
from flow.model import Person
from flow.policy import Tier, read_policy
from flow.reminders import remind_overdue
from tests.command import Terminal, worker
from tests.delivering import deliverer_at
from tests.fault_proxy import FaultProxy
from tests.local_slack import CHANNEL, LocalSlack, skip_reason
from tests.people import ALICE, BOB, CAROL, NO, TWO_OF_THREE, YES, ask, stand_in
from tests.rows import all_rows, rewrite, until, value
from tests.test_policy import EXAMPLE, written

BERLIN = "09:00-17:00 Europe/Berlin"
DAILY = replace(TWO_OF_THREE, remind_every_s=86_400.0)

needs_local_slack = pytest.mark.skipif(skip_reason() is not None, reason=skip_reason() or "")


# When


@pytest.mark.parametrize(
    ("at", "first"),
    [
        # Berlin is an hour ahead of UTC in winter, and two in summer. 30 November 2026 is a Monday.
        ("2026-11-30T07:59", "2026-11-30T08:00"),
        ("2026-11-30T08:00", "2026-11-30T08:00"),
        ("2026-11-30T12:34", "2026-11-30T12:34"),
        ("2026-11-30T15:59", "2026-11-30T15:59"),
        ("2026-11-30T16:00", "2026-12-01T08:00"),
        ("2026-11-30T23:30", "2026-12-01T08:00"),
        # A weekend, over which clocks are put back, and one over which they are put forward.
        ("2026-10-23T16:00", "2026-10-26T08:00"),
        ("2026-10-25T12:00", "2026-10-26T08:00"),
        ("2026-03-27T16:30", "2026-03-30T07:00"),
    ],
)
def test_the_next_working_hour_is_the_one_on_the_wall(at: str, first: str) -> None:
    found = Hours.parse(BERLIN).first_from(datetime.fromisoformat(at).replace(tzinfo=UTC))
    assert found == datetime.fromisoformat(first).replace(tzinfo=UTC)


def test_without_hours_it_is_any_time() -> None:
    asked = datetime(2026, 11, 28, 3, tzinfo=UTC)
    assert next_reminder(asked, 3600, None) == datetime(2026, 11, 28, 4, tzinfo=UTC)
    assert next_reminder(asked, 3600, BERLIN) == datetime(2026, 11, 30, 8, tzinfo=UTC)


@pytest.mark.parametrize(
    ("lines", "wrong"),
    [
        ('remind_every = "daily"', "tiers.1.remind_every: write"),
        ('remind_every = "1 day"\nworking_hours = "9-17"', 'write "09:00-17:00 Europe/Berlin"'),
        ('remind_every = "1 day"\nworking_hours = "09:00-17:00 Europe/Atlantis"', "is no time zone"),
        ('remind_every = "1 day"\nworking_hours = "09:00-17:00 ../../etc/passwd"', "write"),
        ('remind_every = "1 day"\nworking_hours = "17:00-09:00 UTC"', "it must end later than it starts"),
        (f'working_hours = "{BERLIN}"', "say remind_every, too"),
    ],
)
def test_reminders_that_are_unclear_are_refused(tmp_path: Path, lines: str, wrong: str) -> None:
    with pytest.raises(SettingError) as caught:
        read_policy(written(tmp_path, f'[[tiers]]\nname = "a"\napprovers = []\n{lines}\n'))
    assert wrong in str(caught.value)


def test_the_example_reminds() -> None:
    tier = read_policy(EXAMPLE).rules[0].tier
    assert (tier.remind_every_s, tier.working_hours) == (86_400, BERLIN)


# The clock


async def due_now(conn: Connection, interval: str = "1 second") -> None:
    await conn.execute("UPDATE approvals SET remind_at = clock_timestamp() - %s::interval", (interval,))


async def reminders(conn: Connection) -> list[dict[str, Any]]:
    return await all_rows(conn, "SELECT version, status FROM notices WHERE kind = 'reminder'")


async def test_the_first_is_due_after_its_time_and_each_after_the_one_before(conn: Connection) -> None:
    await ask(conn, tier=DAILY)
    assert await value(conn, "SELECT remind_at - requested_at = interval '1 day' FROM approvals")
    assert await remind_overdue(conn) == 0
    await due_now(conn)
    assert await remind_overdue(conn) == 1
    assert await reminders(conn) == [{"version": 1, "status": "pending"}]
    in_s = await value(conn, "SELECT extract(epoch FROM remind_at - clock_timestamp())::float8 FROM approvals")
    assert 86_390 < in_s <= 86_400


async def test_after_a_week_nobody_was_there_it_is_one_reminder_and_not_seven(conn: Connection) -> None:
    await ask(conn, tier=DAILY)
    await due_now(conn, "7 days")
    assert [await remind_overdue(conn) for _ in range(3)] == [1, 0, 0]
    assert await reminders(conn) == [{"version": 1, "status": "pending"}]


async def test_what_was_due_while_no_worker_ran_waits_for_the_hours_in_which_people_work(conn: Connection) -> None:
    await ask(conn, tier=replace(DAILY, working_hours=closed_now()))
    await due_now(conn, "10 hours")
    assert await remind_overdue(conn) == 0
    assert await reminders(conn) == []
    opens = Hours.parse(closed_now()).first_from(datetime.now(UTC))
    assert await value(conn, "SELECT remind_at FROM approvals") == opens


def closed_now() -> str:
    """Hours that begin in an hour at the earliest."""
    return "13:00-14:00 UTC" if datetime.now(UTC).hour < 12 else "01:00-02:00 UTC"


@pytest.mark.parametrize("verdict", [YES, NO])
async def test_what_is_decided_reminds_nobody(conn: Connection, verdict: Any) -> None:
    interrupt_id = await ask(conn, tier=replace(DAILY, required=1))
    await due_now(conn)
    await decide(conn, interrupt_id, ALICE, verdict)
    assert await remind_overdue(conn) == 0
    assert await reminders(conn) == []


async def test_a_tier_without_reminders_has_none(conn: Connection) -> None:
    await ask(conn)
    assert await value(conn, "SELECT remind_at FROM approvals") is None


async def test_two_clocks_remind_once(conn: Connection, crowd: list[Connection]) -> None:
    for number in range(6):
        await ask(conn, f"t{number}", tier=DAILY)
    await due_now(conn)
    async with conn.transaction():
        assert await remind_overdue(conn, limit=3) == 3
        # The others are skipped, not waited for.
        assert await remind_overdue(crowd[0]) == 3
    assert await remind_overdue(crowd[1]) == 0
    assert len(await reminders(conn)) == 6


async def test_a_worker_reminds(conn: Connection, database_url: str, tmp_path: Path) -> None:
    await ask(conn, tier=DAILY)
    await due_now(conn)
    async with worker(Terminal(tmp_path, DATABASE_URL=database_url), conn):

        async def reminded() -> bool:
            return bool(await reminders(conn))

        await until(reminded, within_s=30)


# What is said


async def waits_for(conn: Connection, interrupt_id: str) -> str:
    """Whom the reminder names."""
    approval = await approval_of(conn, interrupt_id)
    missing = missing_of(approval, await standing_in_for(conn, approval), {"T01TEST"})
    said = reminder(approval, missing, {"@finance": "S01FIN"})
    since, _, named = said.partition(" this waits for ")
    assert since.startswith("⏰ Since <!date^") and named.endswith(".")
    return named[:-1]


def listing(*approvers: str, **rules: Any) -> Tier:
    return Tier(**{"name": "approval", "approvers": approvers, "required": 2, **rules})


async def test_it_names_those_who_have_not_decided(conn: Connection) -> None:
    approvers = ("U01ALICE", "slack:T01TEST/U03CAROL", "carol@example.com", "<!here>")
    interrupt_id = await ask(conn, tier=listing(*approvers))
    assert await waits_for(conn, interrupt_id) == "<@U01ALICE>, <@U03CAROL>, carol@example.com, &lt;!here&gt;"
    await decide(conn, interrupt_id, ALICE, YES)
    assert await waits_for(conn, interrupt_id) == "<@U03CAROL>, carol@example.com, &lt;!here&gt;"


async def test_whoever_is_of_another_team_calls_nobody_here(conn: Connection) -> None:
    interrupt_id = await ask(conn, tier=listing("slack:T02OTHER/U02BOB", "U01ALICE", "U02BOB"))
    assert await waits_for(conn, interrupt_id) == "slack:T02OTHER/U02BOB, <@U01ALICE>, <@U02BOB>"
    key = "slack:T02OTHER/U02BOB"
    await decide(conn, interrupt_id, Person(key=key, name="Bob", names=frozenset({key})), YES)
    assert await waits_for(conn, interrupt_id) == "<@U01ALICE>, <@U02BOB>"


async def test_user_groups_are_called_by_their_ids(conn: Connection) -> None:
    interrupt_id = await ask(conn, tier=listing("@finance", "S0APPR", "@gone"))
    assert await waits_for(conn, interrupt_id) == "<!subteam^S01FIN>, <!subteam^S0APPR>, @gone"


async def test_it_names_nobody_who_cannot_and_nobody_twice(conn: Connection) -> None:
    carol = mail_person("carol@example.com")
    tier = listing("carol@example.com", "dave@example.com", "U02BOB", "U03CAROL")
    interrupt_id = await ask(conn, tier=tier, requested_by="slack:T01TEST/U02BOB")
    await rewrite(conn, "raised_by = %s", sorted(CAROL.names))
    await decide(conn, interrupt_id, carol, YES)
    assert await waits_for(conn, interrupt_id) == "dave@example.com"
    await rewrite(conn, "self_approval = true")
    assert await waits_for(conn, interrupt_id) == "dave@example.com, <@U02BOB>, <@U03CAROL>"
    nobody = await ask(conn, "t2", tier=Tier(name="approval", approvers=()))
    assert await waits_for(conn, nobody) == "the command line"
    many = await ask(conn, "t3", tier=Tier(name="approval", approvers=tuple(f"U1{n:03}" for n in range(30))))
    assert (await waits_for(conn, many)).endswith("<@U1019>, 10 more")


async def test_it_names_whoever_decides_for_somebody_who_is_away(conn: Connection) -> None:
    interrupt_id = await ask(conn, tier=listing("U01ALICE", "U02BOB", "U03CAROL"), requested_by="U66EVE")
    await stand_in(conn, ALICE, "U02BOB")
    # Whoever asks for it decides for nobody.
    await stand_in(conn, CAROL, "U66EVE")
    assert await waits_for(conn, interrupt_id) == "<@U01ALICE> (away: <@U02BOB> decides), <@U02BOB>, <@U03CAROL>"
    await decide(conn, interrupt_id, BOB, YES)
    # He has no second vote to give.
    assert await waits_for(conn, interrupt_id) == "<@U01ALICE>, <@U03CAROL>"


async def test_whoever_had_somebody_decide_for_them_has_decided(conn: Connection) -> None:
    interrupt_id = await ask(conn, tier=listing("U01ALICE", "U03CAROL"))
    await stand_in(conn, ALICE, "U02BOB")
    await decide(conn, interrupt_id, BOB, YES)
    assert await waits_for(conn, interrupt_id) == "<@U03CAROL>"


async def test_a_zone_that_this_machine_does_not_know_stops_no_clock(conn: Connection) -> None:
    await ask(conn, tier=DAILY)
    await conn.execute("UPDATE approvals SET working_hours = '09:00-17:00 Europe/Atlantis'")
    await due_now(conn)
    assert await remind_overdue(conn) == 1


async def test_what_has_expired_reminds_nobody(conn: Connection) -> None:
    await ask(conn, tier=DAILY)
    await due_now(conn)
    await conn.execute("UPDATE approvals SET expires_at = clock_timestamp()")
    assert await remind_overdue(conn) == 0


@pytest.fixture
def slack() -> Iterator[LocalSlack]:
    with LocalSlack(request_url="http://127.0.0.1:9/") as running:
        yield running


@pytest.fixture
async def proxy(slack: LocalSlack, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[FaultProxy]:
    monkeypatch.setattr(outlet, "_BETWEEN_POSTS_S", 0.0)
    async with FaultProxy(slack.ui_url) as running:
        yield running


async def below_cards(slack: LocalSlack) -> list[str]:
    return [message["text"] for message in await slack.messages(CHANNEL) if message["text"].startswith("⏰")]


async def sweep(proxy: FaultProxy, conn: Connection) -> tuple[int, int]:
    async with deliverer_at(proxy) as deliverer:
        await conn.execute("UPDATE notices SET due_at = clock_timestamp() WHERE due_at IS NOT NULL")
        return await Deliverer.sweep(deliverer, conn)


@needs_local_slack
async def test_each_reminder_is_said_once_below_its_card(
    slack: LocalSlack, proxy: FaultProxy, conn: Connection
) -> None:
    interrupt_id = await ask(conn, tier=DAILY)
    await sweep(proxy, conn)
    for number in (1, 2):
        await due_now(conn)
        await remind_overdue(conn)
        # Slack acted, and its answer was lost: it is looked for before it is said again.
        proxy.fail("chat.postMessage", "lost_reply")
        assert await sweep(proxy, conn) == (0, 1)
        assert await sweep(proxy, conn) == (1, 0)
        assert len(await below_cards(slack)) == number
    await due_now(conn)
    await remind_overdue(conn)
    for person in (ALICE, BOB):
        await decide(conn, interrupt_id, person, YES)
    await sweep(proxy, conn)
    # It was decided before it was said.
    assert len(await below_cards(slack)) == 2
