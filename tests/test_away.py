"""Somebody decides for a person who is away: how that is said in Slack and at the command line, and what they see."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import AsyncIterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from psycopg import Rollback

from bot.away import parse_away
from bot.groups import OwnTeam
from flow.approvals import approval_of, decide
from flow.database import Connection
from flow.delegations import current, end, with_absent
from flow.errors import BadInput, FlowError, NotAllowed
from flow.inbox import MOST_COUNTED, Search, count_mine, find, find_threads, may_see, place_named, place_of, waits_for
from flow.model import Approval, Person
from flow.policy import Tier
from tests.browsing import Visitor, pages_in_process, signed_in_at_once
from tests.command import Terminal
from tests.home_door import Member, member_at_a_bot
from tests.local_slack import CHANNEL
from tests.people import ALICE, BOB, CAROL, EVE, YES, ask, stand_in, start_claim
from tests.rows import all_rows, one_row, until, value
from tests.services import QuietSlack
from tests.slack_door import client_of
from tests.test_pages import path_of


@pytest.fixture
async def alice(database_url: str) -> AsyncIterator[Member]:
    async with member_at_a_bot(database_url) as alice:
        yield alice


# In Slack


@pytest.mark.parametrize(
    "how", ["<@U02BOB> until friday", "<@U02BOB|bob> friday", "  <@U02BOB|bob the 1st>  until   Friday "]
)
async def test_away_lets_somebody_decide_until_the_end_of_that_day_where_i_am(
    alice: Member, conn: Connection, how: str
) -> None:
    alice.slack.zones["U01ALICE"] = "America/New_York"
    said = (await alice.command(f"away {how}"))["text"]

    row = await one_row(
        conn, "SELECT person, delegate, made_by, until AT TIME ZONE 'America/New_York' AS until FROM delegations"
    )
    assert (row["person"], row["delegate"], row["made_by"]) == (ALICE.key, "U02BOB", ALICE.key)
    assert (row["until"].isoweekday(), f"{row['until']:%H:%M:%S}") == (5, "23:59:59")
    assert said.startswith("🌴 <@U02BOB> decides for you until <!date^") and "(America/New_York time): whatever" in said


@pytest.mark.parametrize("zone", [None, "", "Middle/Earth", "../etc/passwd"])
async def test_whose_zone_slack_does_not_know_is_at_utc_and_told_the_time_alone(
    alice: Member, conn: Connection, zone: str | None
) -> None:
    if zone is not None:
        alice.slack.zones["U01ALICE"] = zone
    said = (await alice.command("away <@U02BOB> until tomorrow"))["text"]
    assert " UTC>: whatever lists you" in said and "time)" not in said
    assert f"{await value(conn, 'SELECT until FROM delegations'):%H:%M}" == "23:59"


async def test_whose_zone_slack_does_not_say_in_time_is_asked_to_try_again(alice: Member, conn: Connection) -> None:
    """Whose day ends when is not guessed: it was UTC's, and said so beside a time in the reader's own zone."""
    # Who she is has been said, and is kept.
    await alice.command()
    alice.slack.silent.add(alice.id)
    said = (await alice.command("away <@U02BOB> until tomorrow"))["text"]
    assert said == "⚠️ Slack did not say in which time zone you are: try again in a moment."
    assert await all_rows(conn, "SELECT * FROM delegations") == []


async def test_at_the_command_line_a_day_ends_by_the_clock_of_that_day(
    database_url: str, conn: Connection, tmp_path: Path
) -> None:
    """Summer time that begins in between was forgotten: it ended an hour too late, or too early."""
    day = datetime.now(UTC).date() + timedelta(days=10)
    # Clocks go forward in five days or six, and back after half a year.
    forward, back = ((day + timedelta(days=days)).timetuple().tm_yday % 365 for days in (-5, 180))
    terminal = Terminal(tmp_path, DATABASE_URL=database_url, TZ=f"WINTER0SUMMER,{forward}/0,{back}/0")
    done = terminal.run("away", "--as", "cli:ann", "--to", "mail:bob@example.com", "--until", f"{day}")
    assert done.code == 0
    assert f"until {day:%A %Y-%m-%d} 23:59 SUMMER" in done.out


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("@bob until friday", "pick the person from the menu"),
        ("<@U01ALICE> until friday", "it must be somebody else"),
        ("<@U02BOB> until someday", 'write "friday"'),
        ("<@U02BOB> until 2020-01-01", "later than now"),
        ("<@U02BOB> until 20 weeks", "at most 90 days"),
        ("<@U02BOB>", "until friday"),
        ("<!subteam^S01FIN|@finance> until friday", "until friday"),
        ("bob until friday", "until friday"),
        ("<!channel> <!here>", "until friday"),
    ],
)
async def test_what_cannot_be_understood_is_said_and_changes_nothing(
    alice: Member, conn: Connection, how: str, said: str
) -> None:
    answer = (await alice.command(f"away {how}"))["text"]
    assert said in answer and "<!" not in answer
    assert await all_rows(conn, "SELECT * FROM delegations") == []


async def test_back_ends_it_and_away_alone_says_how_it_stands(alice: Member, conn: Connection) -> None:
    assert (await alice.command("back"))["text"] == "Nobody was deciding for you."
    await alice.command("away <@U02BOB> until tomorrow")
    assert "<@U02BOB> decides for you until" in (await alice.command("away"))["text"]
    assert "decides for you until" not in (await replace(alice, id="U02BOB").command("away"))["text"]
    assert (await alice.command("back"))["text"] == "👋 Nobody decides for you any more."
    assert await current(conn) == []
    assert "decides for you until" not in (await alice.command("away"))["text"]


async def test_whoever_is_to_decide_is_told(alice: Member, conn: Connection) -> None:
    await alice.command("away <@U02BOB> until tomorrow")

    async def told() -> list[dict[str, Any]]:
        return [each for each in alice.slack.messages.values() if each["channel"] == "U02BOB"]

    [said] = await until(told)
    assert said["text"].startswith("🌴 <@U01ALICE> is away, and you decide for them until <!date^")


async def test_that_a_delegate_could_not_be_told_is_logged(
    alice: Member, conn: Connection, caplog: pytest.LogCaptureFixture
) -> None:
    alice.slack.zones["U01ALICE"] = "UTC"
    alice.slack.refuses["U02BOB"] = "messages_tab_disabled"
    assert "decides for you" in (await alice.command("away <@U02BOB> until tomorrow"))["text"]

    async def logged() -> bool:
        return "U02BOB was not told whom they decide for: messages_tab_disabled: turn the app's" in caplog.text

    await until(logged)
    assert [each.delegate for each in await current(conn)] == ["U02BOB"]


@pytest.mark.parametrize("kind", [{"is_restricted": True}, {"is_bot": True}, {"deleted": True}, {"team_id": "T0OTHER"}])
async def test_a_guest_a_bot_and_an_outsider_is_refused_as_a_delegate(
    database_url: str, conn: Connection, tmp_path: Path, kind: dict[str, Any]
) -> None:
    async with member_at_a_bot(database_url) as alice:
        alice.slack.kinds["U02BOB"] = kind
        said = (await alice.command("away <@U02BOB> until tomorrow"))["text"]
        assert "only a full member of this workspace can decide for somebody else" in said
        slack = {"SLACK_API_URL": alice.slack.url, "SLACK_BOT_TOKEN": "xoxb-1", "SLACK_CHANNEL": CHANNEL}
        terminal = Terminal(tmp_path, DATABASE_URL=database_url, SLACK_SIGNING_SECRET="s", **slack)
        command = ("away", "--as", "U01ALICE", "--to", "U02BOB", "--until", "tomorrow")
        refused = await terminal.run_meanwhile(*command)
        assert (refused.code, "only a full member" in refused.err) == (2, True)
        assert await all_rows(conn, "SELECT * FROM delegations") == []
        alice.slack.kinds["U02BOB"] = {}
        made = await terminal.run_meanwhile(*command)
        assert (made.code, made.err) == (0, "")
        [told] = [each["text"] for each in alice.slack.messages.values() if each["channel"] == "U02BOB"]
        assert told.startswith("🌴 <@U01ALICE> is away, and you decide for them until <!date^")
        alice.slack.refuses["U02BOB"] = "messages_tab_disabled"
        made = await terminal.run_meanwhile(*command)
        assert made.code == 0
        assert made.err.startswith("U02BOB was not told (messages_tab_disabled: turn the app's")
    assert [each.delegate for each in await current(conn)] == ["U02BOB"]


async def test_what_somebody_lent_who_has_left_since_is_ended_at_the_command_line(
    alice: Member, database_url: str, conn: Connection, tmp_path: Path
) -> None:
    await alice.command("away <@U02BOB> until 2 weeks")
    alice.slack.kinds["U01ALICE"] = {"deleted": True}
    interrupt_id = await ask(conn, tier=Tier(name="approval", approvers=("U01ALICE",)))
    slack = {"SLACK_API_URL": alice.slack.url, "SLACK_BOT_TOKEN": "xoxb-1", "SLACK_CHANNEL": CHANNEL}
    terminal = Terminal(tmp_path, DATABASE_URL=database_url, SLACK_SIGNING_SECRET="s", **slack)
    ended = await terminal.run_meanwhile("away", "--as", "U01ALICE", "--back")
    assert (ended.code, ended.out) == (0, "nobody decides for U01ALICE any more\n")
    with pytest.raises(NotAllowed):
        await decide(conn, interrupt_id, BOB, YES)


async def test_another_delegate_takes_the_place_of_the_first(alice: Member, conn: Connection) -> None:
    for member in ("U02BOB", "U03CAROL", "U03CAROL"):
        await alice.command(f"away <@{member}> until 3 days")
    assert [each.delegate for each in await current(conn)] == ["U03CAROL"]


@pytest.mark.parametrize("text", ["", "<@", "<@U02BOB", "<@U02BOB>until friday", "<@u02bob> until friday", "\x00 \x00"])
def test_what_names_nobody_is_refused(text: str) -> None:
    with pytest.raises(BadInput):
        parse_away(text)


# What a delegate sees and may do


def _people() -> list[Person]:
    mail = Person(
        key="mail:mary@example.com", name="mary", names=frozenset({"mail:mary@example.com", "mary@example.com"})
    )
    unsure = [replace(EVE, groups_known=False), replace(EVE, full_member=False), replace(EVE, full_member=None)]
    return [ALICE, BOB, CAROL, EVE, mail, *unsure]


async def _many_requests(conn: Connection) -> list[str]:
    """Requests of every kind that who sees and decides what depends on."""
    lists = [("U01ALICE",), ("U02BOB", "mary@example.com"), ("U03CAROL", "U01ALICE"), ("S01FIN", "U01ALICE")]
    # Two who may be away at once: one voice of theirs may be given when the other is not.
    lists.append(("U01ALICE", "U02BOB"))
    requesters = ["cli:ann", "u01alice", BOB.key, "mail:mary@example.com"]
    ids = []
    for number, (approvers, requested_by, own) in enumerate(itertools.product(lists, requesters, (False, True))):
        tier = Tier(name="approval", approvers=approvers, required=2, self_approval=own)
        ids.append(await ask(conn, f"t{number:02}", tier=tier, requested_by=requested_by))
    await conn.execute("UPDATE approvals SET raised_by = %s WHERE thread_id LIKE '%%3'", (sorted(ALICE.names),))
    await conn.execute("UPDATE approvals SET raised_by = %s WHERE thread_id LIKE '%%5'", (sorted(BOB.names),))
    await conn.execute("UPDATE approvals SET expires_at = clock_timestamp() WHERE thread_id LIKE '%%7'")
    await conn.execute(
        "UPDATE approvals SET on_expiry = 'escalate', escalate_to = '{U99X}', expires_after_s = 1"
        " WHERE thread_id IN ('t07', 't17')"
    )
    await conn.execute("UPDATE approvals a SET fingerprint = approval_fingerprint(a)")
    return ids


async def test_lists_counts_and_decisions_agree_for_everybody_and_their_delegates(conn: Connection) -> None:
    """What SQL finds is what the pure rules say, and what waits for a person is what `decide` takes from them."""
    ids = await _many_requests(conn)
    for delegations in ([], [(ALICE, "U02BOB")], [(ALICE, "U66EVE"), (BOB, "U66EVE"), (CAROL, "mary@example.com")]):
        for person in (ALICE, BOB, CAROL):
            async with conn.transaction():
                await end(conn, person, by=person.key)
        for person, delegate in delegations:
            await stand_in(conn, person, delegate)
        # Somebody has put in whoever reads, and nobody can decide it.
        await conn.execute("UPDATE approvals SET approvers = approvers || '{U01ALICE,U02BOB}' WHERE thread_id = 't05'")
        approvals = [await approval_of(conn, each) for each in ids]
        assert [each.thread_id for each in approvals if each.tampered] == ["t05"]
        for person in _people():
            await _check_agreement(conn, approvals, person)
        # Some have voted by then.
        for voter, interrupt_id in (
            (ALICE, ids[0]), (BOB, ids[8]), (EVE, ids[1]), (CAROL, ids[16]), (ALICE, ids[32]), (BOB, ids[34]),
        ):  # fmt: skip
            if waits_for(await approval_of(conn, interrupt_id), await with_absent(conn, voter), datetime.now(UTC)):
                await decide(conn, interrupt_id, voter, YES)


async def _check_agreement(conn: Connection, approvals: list[Approval], person: Person) -> None:
    acting, now, nobody = await with_absent(conn, person), datetime.now(UTC), frozenset[str]()
    seen = await find(conn, acting, Search(view="all"), viewers=nobody, limit=100)
    assert {each.interrupt_id for each in seen} == {
        each.interrupt_id for each in approvals if may_see(each, acting, nobody)
    }
    mine = {each.interrupt_id for each in await find(conn, acting, Search(), viewers=nobody, limit=100)}
    assert mine == {each.interrupt_id for each in approvals if waits_for(each, acting, now)}
    assert await count_mine(conn, acting) == len(mine)
    assert mine == {each.interrupt_id for each in approvals if await _would_be_taken(conn, each, person)}


async def _would_be_taken(conn: Connection, approval: Approval, person: Person) -> bool:
    taken = False
    async with conn.transaction():
        try:
            taken = (await decide(conn, approval.interrupt_id, person, YES)).recorded
        except FlowError:
            taken = False
        raise Rollback
    return taken


async def test_a_viewer_sees_everything_and_it_is_no_more_theirs_to_decide(conn: Connection) -> None:
    ids = await _many_requests(conn)
    viewers = frozenset({"U66EVE"})
    assert len(await find(conn, EVE, Search(view="all"), viewers=viewers, limit=100)) == len(ids)
    assert await find(conn, EVE, Search(), viewers=viewers, limit=100) == []


async def test_whoever_has_decided_for_somebody_sees_it_when_they_are_back(conn: Connection) -> None:
    interrupt_id = await ask(conn, tier=Tier(name="approval", approvers=("U01ALICE",)))
    await ask(conn, "other", tier=Tier(name="approval", approvers=("U01ALICE",)))
    await stand_in(conn, ALICE, "U66EVE")
    await decide(conn, interrupt_id, EVE, YES)
    async with conn.transaction():
        await end(conn, ALICE, by=ALICE.key)
    eve = await with_absent(conn, EVE)
    for view in ("all", "history"):
        found = await find(conn, eve, Search(view=view), viewers=(), limit=9)
        assert [each.interrupt_id for each in found] == [interrupt_id]
    assert may_see(await approval_of(conn, interrupt_id), eve, ())


async def test_what_waits_is_counted_as_far_as_anybody_reads(conn: Connection) -> None:
    await ask(conn, "t0")
    await conn.execute(
        "INSERT INTO approvals"
        " (interrupt_id, thread_id, tier, rank, request, request_hash, requested_by, approvers, required)"
        " SELECT md5('p' || g), thread_id, tier, rank, request, request_hash, requested_by, approvers, required"
        " FROM approvals, generate_series(1, 150) AS g"
    )
    assert await count_mine(conn, ALICE) == MOST_COUNTED


async def test_what_somebody_filed_is_found_page_by_page(conn: Connection) -> None:
    for number in range(5):
        await start_claim(conn, f"t{number}", requested_by=("U01ALICE", "u01alice", ALICE.key)[number % 3])
        await start_claim(conn, f"other{number}")
    first = await find_threads(conn, ALICE, limit=3)
    last = first[-1]
    rest = await find_threads(conn, ALICE, limit=3, before=(last.created_at, last.thread_id))
    assert [each.thread_id for each in (*first, *rest)] == ["t4", "t3", "t2", "t1", "t0"]


def test_a_place_is_read_as_it_was_written() -> None:
    at = datetime(2026, 12, 1, 9, 0, 0, 123456, tzinfo=UTC)
    assert place_named(place_of(at, "0" * 32)) == (at, "0" * 32)
    for odd in ("", "1", "~a", "1~", "1~\x00", "1~a b", "99999999999999999~a", "-1~a", "١~a"):
        assert place_named(odd) is None


async def test_a_delegate_finds_it_on_the_pages_too(database_url: str, conn: Connection) -> None:
    interrupt_id = await ask(conn, tier=Tier(name="approval", approvers=("U01ALICE",)))
    await stand_in(conn, ALICE, "U02BOB")
    async with (
        QuietSlack() as slack,
        client_of(slack.url) as client,
        pages_in_process(database_url, groups=OwnTeam(client)) as site,
        Visitor(site.url) as visitor,
    ):
        await signed_in_at_once(conn, site, visitor, BOB)
        assert path_of(interrupt_id) in (await visitor.get("/approvals")).links
        page = await visitor.get(path_of(interrupt_id))
        assert page.status == 200
        await visitor.post(path_of(interrupt_id), page.form("Approve").fields | {"verdict": "approve"})
        # Back from standing in, they still see what they have decided.
        async with conn.transaction():
            await end(conn, ALICE, by=ALICE.key)
        assert path_of(interrupt_id) in (await visitor.get("/approvals?view=history")).links
        assert (await visitor.get(path_of(interrupt_id))).status == 200
    row = await one_row(conn, "SELECT person, for_person, verdict FROM decisions")
    assert row == {"person": BOB.key, "for_person": ALICE.key, "verdict": "approve"}


# At the command line


def test_the_command_line_says_who_decides_for_whom(database_url: str, tmp_path: Path) -> None:
    terminal = Terminal(tmp_path, DATABASE_URL=database_url)
    assert terminal.run("away").out == "nobody is away\n"
    made = terminal.run("away", "--as", "alice@example.com", "--to", "Bob@Example.com", "--until", "3 days", "--json")
    said = json.loads(made.out)
    assert (made.code, said["person"], said["to"]) == (0, "mail:alice@example.com", "bob@example.com")
    assert made.err == "bob@example.com was not told (Slack is off): tell them yourself\n"
    assert said["made_by"].startswith("cli:") and datetime.fromisoformat(said["until"]) > datetime.now(UTC)
    assert json.loads(terminal.run("away", "--json").out) == [said]
    assert re.fullmatch(
        r"bob@example\.com decides for alice@example\.com \(mail:alice@example\.com\) until \w+day .*\n",
        terminal.run("away").out,
    )
    back = ("away", "--as", "alice@example.com", "--back")
    assert terminal.run(*back).out == "nobody decides for alice@example.com any more\n"
    assert terminal.run(*back).out == "nobody decided for alice@example.com\n"
    assert terminal.run("away", "--json").out == "[]\n"


@pytest.mark.parametrize(
    ("options", "code"),
    [
        (("--as", "alice@example.com"), 2),
        (("--to", "bob@example.com", "--until", "friday"), 2),
        (("--back",), 2),
        (("--as", "alice@example.com", "--to", "bob@example.com"), 2),
        (("--as", "alice@example.com", "--to", "bob@example.com", "--until", "friday", "--back"), 2),
        (("--as", "alice@example.com", "--to", "alice@example.com", "--until", "friday"), 2),
        (("--as", "alice@example.com", "--to", "@finance", "--until", "friday"), 2),
        (("--as", "alice@example.com", "--to", "no name", "--until", "friday"), 2),
        (("--as", "alice@example.com", "--to", "bob@example.com", "--until", "someday"), 2),
        (("--as", "alice", "--to", "bob@example.com", "--until", "friday"), 2),
        # Slack is off, so nobody knows whose member she is.
        (("--as", "U01ALICE", "--to", "bob@example.com", "--until", "friday"), 1),
    ],
)
async def test_what_is_not_whole_is_refused_at_the_command_line(
    database_url: str, conn: Connection, tmp_path: Path, options: tuple[str, ...], code: int
) -> None:
    done = Terminal(tmp_path, DATABASE_URL=database_url).run("away", *options)
    assert (done.code, done.out) == (code, "")
    assert await all_rows(conn, "SELECT * FROM delegations") == []
