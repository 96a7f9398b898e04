"""Who decides for whom: for a time, with one voice, never for what either of them asks for."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from zoneinfo import ZoneInfo

import pytest
from psycopg import errors

from flow import delegations
from flow.approvals import approval_of, decide
from flow.database import Connection
from flow.delegations import LONGEST, away, current, end, parse_until, with_absent
from flow.errors import AlreadyDecided, BadInput, NotAllowed
from flow.model import Person
from flow.policy import Tier
from tests.people import ALICE, ANN, BOB, CAROL, EVE, NO, ONE_OF_THREE, YES, ask
from tests.rows import all_rows, rewrite, value

# Bob is on no list here.
ALICE_ALONE = Tier(name="approval", approvers=("U01ALICE",))
ALICE_AND_CAROL = Tier(name="approval", approvers=("U01ALICE", "U03CAROL"), required=2)


def soon(**more: float) -> datetime:
    return datetime.now(UTC) + timedelta(**more or {"hours": 8})


async def bob_for(conn: Connection, person: Person, until: datetime | None = None) -> None:
    await away(conn, person, to="U02BOB", until=until or soon(), made_by=person.key)


async def test_a_delegate_decides_and_both_are_named(conn: Connection) -> None:
    interrupt_id = await ask(conn, tier=ALICE_ALONE)
    with pytest.raises(NotAllowed):
        await decide(conn, interrupt_id, BOB, YES)
    await bob_for(conn, ALICE)
    decided = await decide(conn, interrupt_id, BOB, YES)
    [decision] = decided.approval.decisions
    assert decided.approval.status == "approved"
    assert (decision.who, decision.person, decision.for_person, decision.listed_as) == (
        "Bob for Alice", BOB.key, ALICE.key, "U01ALICE"
    )  # fmt: skip
    with pytest.raises(AlreadyDecided, match="by Bob for Alice"):
        await decide(conn, interrupt_id, ALICE, NO)


@pytest.mark.parametrize("first_is_the_delegate", [True, False])
async def test_a_delegate_is_no_second_voice_beside_the_one_who_is_away(
    conn: Connection, first_is_the_delegate: bool
) -> None:
    interrupt_id = await ask(conn, tier=ALICE_AND_CAROL)
    await bob_for(conn, ALICE)
    first, second = (BOB, ALICE) if first_is_the_delegate else (ALICE, BOB)
    assert (await decide(conn, interrupt_id, first, YES)).recorded
    assert not (await decide(conn, interrupt_id, second, YES)).recorded
    assert (await approval_of(conn, interrupt_id)).status == "pending"
    assert (await decide(conn, interrupt_id, CAROL, YES)).approval.status == "approved"


async def test_whoever_is_back_may_still_say_no(conn: Connection) -> None:
    interrupt_id = await ask(conn, tier=ALICE_AND_CAROL)
    await bob_for(conn, ALICE)
    await decide(conn, interrupt_id, BOB, YES)
    assert (await decide(conn, interrupt_id, ALICE, NO)).approval.status == "rejected"


async def test_a_delegate_does_not_overrule_the_one_who_has_decided(conn: Connection) -> None:
    interrupt_id = await ask(conn, tier=ALICE_AND_CAROL)
    await bob_for(conn, ALICE)
    await decide(conn, interrupt_id, ALICE, YES)
    with pytest.raises(NotAllowed, match="Alice has decided it already"):
        await decide(conn, interrupt_id, BOB, NO)
    assert (await approval_of(conn, interrupt_id)).status == "pending"


async def test_a_delegate_of_two_decides_for_the_one_who_has_not(conn: Connection) -> None:
    interrupt_id = await ask(conn, tier=ALICE_AND_CAROL)
    for person in (ALICE, CAROL):
        await bob_for(conn, person)
    await decide(conn, interrupt_id, ALICE, YES)
    decided = await decide(conn, interrupt_id, BOB, YES)
    assert (decided.approval.status, decided.approval.decisions[-1].who) == ("approved", "Bob for Carol")


async def test_nobody_gives_two_votes_and_is_told_so(conn: Connection) -> None:
    three = replace(ALICE_AND_CAROL, approvers=("U01ALICE", "U03CAROL", "U66EVE"), required=3)
    interrupt_id = await ask(conn, tier=three)
    for person in (ALICE, CAROL):
        await bob_for(conn, person)
    assert (await decide(conn, interrupt_id, BOB, YES)).recorded
    assert not (await decide(conn, interrupt_id, BOB, YES)).recorded
    await rewrite(conn, "approvers = array_append(approvers, 'U02BOB')")
    with pytest.raises(NotAllowed, match="as Bob for Alice already, and one person has one vote"):
        await decide(conn, interrupt_id, BOB, YES)
    assert (await approval_of(conn, interrupt_id)).approvals_given == 1


async def test_a_delegate_may_turn_their_yes_into_a_no(conn: Connection) -> None:
    interrupt_id = await ask(conn, tier=ALICE_AND_CAROL)
    await bob_for(conn, ALICE)
    await decide(conn, interrupt_id, BOB, YES)
    assert (await decide(conn, interrupt_id, BOB, NO)).approval.status == "rejected"


async def test_whoever_is_on_the_list_decides_as_themselves_and_once(conn: Connection) -> None:
    two_of_three = replace(ONE_OF_THREE, required=2)
    interrupt_id = await ask(conn, tier=two_of_three)
    await bob_for(conn, ALICE)
    [decision] = (await decide(conn, interrupt_id, BOB, YES)).approval.decisions
    assert decision.who == "Bob"
    assert not (await decide(conn, interrupt_id, BOB, YES)).recorded
    assert (await approval_of(conn, interrupt_id)).status == "pending"


async def test_nobody_decides_through_a_delegate_what_they_asked_for(conn: Connection) -> None:
    of_alice = await ask(conn, "t1", tier=ALICE_ALONE, requested_by=ALICE.key)
    of_bob = await ask(conn, "t2", tier=ALICE_ALONE, requested_by=BOB.key)
    own = replace(ALICE_ALONE, self_approval=True)
    of_alice_who_may = await ask(conn, "t3", tier=own, requested_by=ALICE.key)
    of_bob_who_may = await ask(conn, "t4", tier=own, requested_by=BOB.key)
    raised_by_bob = await ask(conn, "t5", tier=own)
    await rewrite(conn, "raised_by = CASE thread_id WHEN 't5' THEN '{U02BOB}'::text[] ELSE '{}' END")
    await bob_for(conn, ALICE)
    for interrupt_id in (of_alice, of_bob, of_alice_who_may, of_bob_who_may, raised_by_bob):
        with pytest.raises(NotAllowed):
            await decide(conn, interrupt_id, BOB, YES)
    assert await all_rows(conn, "SELECT * FROM decisions") == []


async def test_a_voice_that_somebody_holds_is_not_handed_on(conn: Connection) -> None:
    interrupt_id = await ask(conn, tier=ALICE_ALONE)
    await bob_for(conn, ALICE)
    await away(conn, BOB, to="U66EVE", until=soon(), made_by=BOB.key)
    with pytest.raises(NotAllowed):
        await decide(conn, interrupt_id, EVE, YES)


async def test_its_time_ends_by_itself_and_by_coming_back(conn: Connection) -> None:
    interrupt_id = await ask(conn, tier=ALICE_ALONE)
    await bob_for(conn, ALICE)
    assert [each.delegate for each in await current(conn)] == ["U02BOB"]
    await conn.execute("UPDATE delegations SET until = clock_timestamp()")
    assert await current(conn) == []
    with pytest.raises(NotAllowed):
        await decide(conn, interrupt_id, BOB, YES)
    await bob_for(conn, ALICE)
    assert await delegations.end(conn, ALICE, by=ALICE.key)
    assert not await delegations.end(conn, ALICE, by=ALICE.key)
    with pytest.raises(NotAllowed):
        await decide(conn, interrupt_id, BOB, YES)


async def test_whom_a_page_knew_as_away_is_back_at_the_decision(conn: Connection) -> None:
    """Whoever signed in stands in for whom their page has read; the vote is another transaction."""
    interrupt_id = await ask(conn, tier=ALICE_ALONE)
    await bob_for(conn, ALICE)
    read = await with_absent(conn, BOB)
    assert read.acts_for
    assert await end(conn, ALICE, by=ALICE.key)
    with pytest.raises(NotAllowed, match="not on the list"):
        await decide(conn, interrupt_id, read, YES)
    # Nor does whom it has read keep another from it who is away by now.
    await bob_for(conn, CAROL)
    listed = await ask(conn, "t2", tier=Tier(name="approval", approvers=("U03CAROL",)))
    assert (await decide(conn, listed, read, YES)).approval.decisions[0].for_person == CAROL.key


async def test_another_delegate_takes_the_place_of_the_first(conn: Connection) -> None:
    interrupt_id = await ask(conn, tier=ALICE_ALONE)
    await bob_for(conn, ALICE)
    await away(conn, ALICE, to="slack:T01TEST/U03CAROL", until=soon(), made_by=ANN.key)
    with pytest.raises(NotAllowed):
        await decide(conn, interrupt_id, BOB, YES)
    assert (await decide(conn, interrupt_id, CAROL, YES)).approval.status == "approved"


async def test_groups_are_not_handed_over(conn: Connection) -> None:
    interrupt_id = await ask(conn, tier=Tier(name="approval", approvers=("@finance",)))
    await bob_for(conn, replace(ALICE, names=ALICE.names | {"@finance"}))
    with pytest.raises(NotAllowed):
        await decide(conn, interrupt_id, BOB, YES)


@pytest.mark.parametrize("to", ["@finance", "S01FIN"])
async def test_a_group_is_no_delegate(conn: Connection, to: str) -> None:
    with pytest.raises(BadInput, match="one person"):
        await away(conn, ALICE, to=to, until=soon(), made_by=ALICE.key)


async def test_two_at_once_leave_one(conn: Connection, crowd: list[Connection]) -> None:
    async def go(session: Connection, to: str) -> None:
        async with session.transaction():
            await away(session, ALICE, to=to, until=soon(), made_by=ALICE.key)

    people = ("U02BOB", "U03CAROL", "U66EVE", "U05DANA")
    await asyncio.gather(*(go(session, to) for session, to in zip(crowd, people, strict=True)))
    assert len(await current(conn)) == 1


@pytest.mark.parametrize("to", ["U01ALICE", "slack:T01TEST/U01ALICE", "slack:T02OTHER/U01ALICE"])
async def test_nobody_is_their_own_delegate(conn: Connection, to: str) -> None:
    with pytest.raises(BadInput, match="somebody else"):
        await away(conn, ALICE, to=to, until=soon(), made_by=ALICE.key)


@pytest.mark.parametrize("until", [soon(minutes=-1), soon(days=LONGEST.days + 2)])
async def test_it_ends_in_time(conn: Connection, until: datetime) -> None:
    with pytest.raises(BadInput, match="until"):
        await bob_for(conn, ALICE, until)
    assert await value(conn, "SELECT count(*) FROM delegations") == 0


async def test_the_table_takes_one_at_a_time(conn: Connection) -> None:
    await bob_for(conn, ALICE)
    again = (
        "INSERT INTO delegations (person, person_name, names, delegate, made_by, until)"
        " SELECT person, person_name, names, 'U03CAROL', made_by, until FROM delegations"
    )
    with pytest.raises(errors.UniqueViolation):
        await conn.execute(again)


# A Wednesday, late in the evening in Berlin.
NOW = datetime(2026, 12, 2, 22, 30, tzinfo=UTC)


@pytest.mark.parametrize(
    ("text", "until"),
    [
        ("friday", "2026-12-04 23:59:59"),
        ("Friday", "2026-12-04 23:59:59"),
        ("wednesday", "2026-12-09 23:59:59"),
        ("thursday", "2026-12-03 23:59:59"),
        ("tomorrow", "2026-12-03 23:59:59"),
        ("today", "2026-12-02 23:59:59"),
        ("3 days", "2026-12-05 23:59:59"),
        (" 2  weeks ", "2026-12-16 23:59:59"),
        ("2026-12-24", "2026-12-24 23:59:59"),
    ],
)
def test_a_time_is_said_in_words(text: str, until: str) -> None:
    berlin = ZoneInfo("Europe/Berlin")
    meant = parse_until(text, now=NOW, zone=berlin).astimezone(berlin)
    assert f"{meant:%Y-%m-%d %H:%M:%S}" == until


async def test_ninety_days_are_let_and_no_more_wherever_somebody_is(conn: Connection) -> None:
    for zone in map(ZoneInfo, ("Pacific/Honolulu", "UTC", "Europe/Berlin", "Pacific/Kiritimati")):
        now = datetime.now(UTC)
        await bob_for(conn, ALICE, parse_until("90 days", now=now, zone=zone))
        with pytest.raises(BadInput, match="at most 90 days"):
            parse_until("91 days", now=now, zone=zone)


def test_a_day_is_the_persons_own() -> None:
    tokyo = parse_until("today", now=NOW, zone=ZoneInfo("Asia/Tokyo"))
    assert tokyo.astimezone(ZoneInfo("Asia/Tokyo")).day == 3


@pytest.mark.parametrize(
    "text", ["", "soon", "2026-13-01", "0 days", "100 days", "next friday", "friday; drop", "1 year", "9999-12-31"]
)
def test_other_words_are_not_guessed_at(text: str) -> None:
    with pytest.raises(BadInput, match="until"):
        parse_until(text, now=NOW, zone=UTC)
