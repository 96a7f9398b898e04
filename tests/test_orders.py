"""Whatever happens, in whatever order: a decision is kept, money moves once, and what people see becomes true.

Hypothesis makes up the stories: people who click, processes and connections that die between any two messages, two who
act at the same moment, time that passes. After each event the rows are held against the model of `orders.py`.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from typing import Any, ClassVar, Literal, LiteralString

import psycopg
import pytest
from hypothesis import HealthCheck, Phase, seed, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from bot import blocks
from bot.outlet import _facts
from flow import delegations, notices, threads
from flow.approvals import approval_of, decide
from flow.changes import change_amount, withdraw
from flow.database import Connection, Role, connect
from flow.deadlines import expire_overdue
from flow.drive import drive
from flow.errors import DriveFailed, FlowError, ThreadExists
from flow.flows import Flows
from flow.model import OVER, Approval, Notice, Payment, Person, Thread, Verdict, VerdictName
from tests.chance import seeded
from tests.driving import CLAIMS
from tests.orders import (
    POLICY_BY_AMOUNT,
    STALE,
    TIERS,
    Act,
    Asked,
    Change,
    Expiry,
    Filed,
    Happened,
    Vote,
    Withdrawal,
    outcomes,
)
from tests.people import ALICE, ANN, BOB, CAROL, EVE, start_claim
from tests.rows import RENEW_FINGERPRINTS, all_rows, until, value
from tests.wire import Wire

_DRIVE_TIMEOUT_S = 120.0
# Another one at the command line, who has filed nothing.
_ZOE = Person(key="cli:zoe", name="zoe", names=frozenset({"cli:zoe"}), trusted=True)
_PEOPLE = {person.name: person for person in (ALICE, BOB, CAROL, EVE, ANN)}
_VERDICTS: tuple[VerdictName, ...] = ("approve", "reject")
# The messages of a drive and of a decision on a new connection, and a few more.
_OF_A_DRIVE, _OF_A_VOTE, _OF_A_CHANGE = 50, 20, 30
# Of a drive that finds nothing to do, and of one that leaves its thread to a person.
_OF_A_LOOK, _OF_GIVING_UP = 24, 18

# Alarms have a lane of their own; they are of the moment, and nothing has to agree with them later.
_UNSENT: LiteralString = "SELECT * FROM notices WHERE status <> 'sent' AND kind <> 'alarm'"

# How a delivery can end.
_Delivered = Literal["sent", "unheard", "later", "failed", "dies before", "dies after"]
_Other = Literal["drive", "vote", "change", "withdraw", "retry", "expire", "evict", "deliver"]

Work = Callable[[Connection], Coroutine[Any, Any, str | None]]

slots = st.integers(0, 2)
people = st.sampled_from(["Alice", "Bob", "Carol", "Eve"])
deciders = st.sampled_from(["Alice", "Bob", "Carol", "ann"])
amounts = st.sampled_from([*TIERS])
requesters = st.sampled_from([ANN.key, "U01ALICE"])
verdicts = st.sampled_from(_VERDICTS)
absent = st.sampled_from(["Alice", "Bob", "Carol"])
delegates = st.sampled_from(["Eve", "Eve", "Bob", "Carol"])
# A vote, mostly; each of them is made up of the same.
acts = st.sampled_from(["vote", "vote", "vote", "change", "withdraw"])
# Counted back from the newest.
places = st.integers(0, 5)
messages = st.integers(1, _OF_A_DRIVE)
lanes = st.sampled_from(["changes", "posts"])
sides = st.sampled_from(["cut_before", "cut_after"])


@dataclass(kw_only=True)
class World:
    """What the stories of one test share: a database, a loop, and sessions that stay open."""

    url: str
    flows: Flows
    runner: asyncio.Runner
    stories: int = 0
    sessions: dict[str, Connection] = field(default_factory=dict)

    async def connect(self) -> None:
        roles: dict[str, Role] = {"watch": "drive", "door": "door", "one": "drive", "two": "drive"}
        self.sessions = {name: await connect(self.url, role) for name, role in roles.items()}

    async def disconnect(self) -> None:
        for conn in self.sessions.values():
            await conn.close()

    async def wipe(self) -> None:
        """No row is left of an earlier story, and no number of it comes again."""
        self.stories += 1
        await self.sessions["watch"].execute(
            "DELETE FROM delegations; DELETE FROM events; DELETE FROM links; DELETE FROM notices; DELETE FROM payments;"
            " DELETE FROM decisions; DELETE FROM approvals;"
            " DELETE FROM threads; DELETE FROM checkpoints; DELETE FROM checkpoint_blobs;"
            " DELETE FROM checkpoint_writes",
            prepare=False,
        )


class Orders(RuleBasedStateMachine):
    """One story in a world that whoever wants to hear it puts here."""

    _world: ClassVar[World]

    def __init__(self) -> None:
        super().__init__()
        self._filed: dict[str, Filed] = {}
        self._asked: dict[str, Asked] = {}
        self._votes: list[Vote] = []
        # Who decides for whom: the key, by the name of whoever is away, the longest first.
        self._away: dict[str, str] = {}
        # Rows that must never change again, by the interrupt id.
        self._settled: dict[str, dict[str, Any]] = {}
        # Deliveries under way, with what they will show; and what stands in the channel.
        self._sending: list[tuple[Notice, str]] = []
        self._cards: dict[str, str] = {}
        self._replies: dict[str, set[str]] = {}
        self._run(self._world.wipe())

    # What people do

    @initialize(amount=st.sampled_from([*TIERS][1:]), requested_by=requesters)
    def begin(self, amount: str, requested_by: str) -> None:
        """A small claim that is due, and a larger one that waits."""
        self._file(0, "20.00", ANN.key)
        self._file(1, amount, requested_by)
        assert self._run(self._drive(self._thread(1).thread_id)(self._world.sessions["one"])) == "waiting"
        self._run(self._hold_against_the_rows())

    @rule(slot=slots, amount=amounts, requested_by=requesters)
    def start(self, slot: int, amount: str, requested_by: str) -> None:
        self._file(slot, amount, requested_by)

    @rule(place=places, person=people, verdict=verdicts, stale=st.sampled_from([False, False, False, True]))
    def click(self, place: int, person: str, verdict: VerdictName, stale: bool) -> None:
        self._cast(self._vote(place, person, verdict, stale=stale))

    @rule(place=places, verdict=verdicts)
    def decide_at_the_command_line(self, place: int, verdict: VerdictName) -> None:
        self._cast(self._vote(place, "ann", verdict))

    @precondition(lambda self: self._votes)
    @rule(place=places)
    def click_again(self, place: int) -> None:
        vote = self._votes[-1 - place % len(self._votes)]
        self._cast(replace(vote, acts_for=self._acts_for(vote.person)))

    @rule(place=places, person=deciders, amount=amounts)
    def ask_for_another_amount(self, place: int, person: str, amount: str) -> None:
        self._cast(self._change(place, person, amount))

    @precondition(lambda self: self._pending())
    @rule(place=places, person=deciders, amount=amounts)
    def ask_for_another_amount_in_time(self, place: int, person: str, amount: str) -> None:
        self._cast(self._change(self._place_of_pending(place), person, amount))

    @rule(place=places, person=deciders)
    def take_back(self, place: int, person: str) -> None:
        self._cast(self._withdrawal(place, person))

    @rule(person=absent, to=delegates)
    def go_away(self, person: str, to: str) -> None:
        """And let somebody decide meanwhile."""
        self._go_away(person, _PEOPLE[to])

    @precondition(lambda self: self._pending())
    @rule(person=absent, to=delegates, place=places, kind=acts, verdict=verdicts, amount=amounts)
    def go_away_and_have_it_decided(
        self, person: str, to: str, place: int, kind: _Other, verdict: VerdictName, amount: str
    ) -> None:
        self._go_away(person, _PEOPLE[to])
        act = self._act(kind, self._place_of_pending(place), to, verdict, amount)
        assert act is not None
        self._cast(act)

    @precondition(lambda self: self._away)
    @rule(place=places)
    def come_back(self, place: int) -> None:
        person = [*self._away][place % len(self._away)]
        self._run(delegations.end(self._door, _PEOPLE[person], by=_PEOPLE[person].key))
        del self._away[person]

    @precondition(lambda self: self._unsound())
    @rule(place=places)
    def retry(self, place: int) -> None:
        unsound = self._unsound()
        self._run(self._wake(unsound[place % len(unsound)], self._door))
        self._run(self._hold_against_the_rows())

    # What processes do

    @rule()
    def a_worker_drives_what_is_due(self) -> None:
        self._run(self._work())
        self._run(self._hold_against_the_rows())

    @rule(slot=slots, session=st.sampled_from(["one", "two"]))
    def drive(self, slot: int, session: str) -> None:
        outcome = self._run(self._drive(self._thread(slot).thread_id)(self._world.sessions[session]))
        assert outcome in ("waiting", "over", "stuck"), outcome
        self._run(self._hold_against_the_rows())

    @rule(lane=lanes)
    def a_deliverer_begins(self, lane: notices.Lane) -> None:
        self._run(self._begin_delivery(lane))

    @precondition(lambda self: self._sending)
    @rule(
        place=places,
        how=st.sampled_from(["sent", "sent", "unheard", "later", "failed", "dies before", "dies after"]),
    )
    def a_deliverer_ends(self, place: int, how: _Delivered) -> None:
        self._run(self._end_delivery(*self._sending.pop(place % len(self._sending)), how))

    @precondition(lambda self: self._sending)
    @rule(lane=lanes)
    def a_lease_runs_out_and_another_deliverer_begins(self, lane: notices.Lane) -> None:
        self._run(self._watch.execute("UPDATE notices SET due_at = clock_timestamp() WHERE due_at IS NOT NULL"))
        self._run(self._begin_delivery(lane))

    @rule()
    def the_deliverers_catch_up(self) -> None:
        self._run(self._deliver_everything())
        self._run(self._assert_what_is_shown_is_true())

    # What goes wrong

    @rule(slot=slots, side=sides, at=messages)
    def a_drive_dies(self, slot: int, side: str, at: int) -> None:
        self._run(self._cut(self._drive(self._thread(slot).thread_id), "drive", {side: at}))
        self._run(self._hold_against_the_rows())

    @precondition(lambda self: self._payable())
    @rule(place=places)
    def a_drive_dies_when_it_has_paid(self, place: int) -> None:
        """Between two messages only the payment's row knows of it."""
        drive = self._drive(self._payable()[place % len(self._payable())].thread_id)
        self._run(self._cut(drive, "drive", {}, commit_of=b"INSERT INTO payments"))
        self._run(self._hold_against_the_rows())

    @rule(place=places, person=people, verdict=verdicts, side=sides, at=st.integers(1, _OF_A_VOTE))
    def a_click_loses_its_connection(self, place: int, person: str, verdict: VerdictName, side: str, at: int) -> None:
        vote = self._vote(place, person, verdict)
        answer = self._run(self._cut(_casting(vote), "door", {side: at}))
        self._run(self._hold_against_the_rows((vote, answer)))

    @rule(place=places, person=deciders, amount=amounts, side=sides, at=st.integers(1, _OF_A_CHANGE))
    def whoever_asks_for_another_amount_loses_the_connection(
        self, place: int, person: str, amount: str, side: str, at: int
    ) -> None:
        change = self._change(place, person, amount)
        answer = self._run(self._cut(_casting(change), "door", {side: at}))
        self._run(self._hold_against_the_rows((change, answer)))

    @precondition(lambda self: self._payable())
    @rule(place=places)
    def twenty_drives_died(self, place: int) -> None:
        self._run(self._use_up(self._payable()[place % len(self._payable())]))

    @precondition(lambda self: self._pending())
    @rule(place=places)
    def a_forged_request_is_approved(self, place: int) -> None:
        """It is driven at once, and is not paid: what was approved is not what was asked for."""
        filed = self._pending()[place % len(self._pending())]
        filed.forged, filed.sound = True, False
        self._run(self._watch.execute("UPDATE approvals SET tier = '?' WHERE interrupt_id = ANY(%s)", (filed.asked,)))
        self._run(self._watch.execute(RENEW_FINGERPRINTS))
        self._cast(self._vote(self._place_of(filed), "ann", "approve"))
        self._run(self._drive(filed.thread_id)(self._world.sessions["one"]))
        self._run(self._hold_against_the_rows())

    @precondition(lambda self: any(filed.forged for filed in self._filed.values()))
    @rule(slot=slots)
    def a_forgery_is_mended(self, slot: int) -> None:
        self._run(self._mend(self._thread(slot), self._watch))

    @rule(noticed=st.booleans())
    def time_passes(self, noticed: bool) -> None:
        """More than any lease, deadline, back-off and drive lasts; and a worker's clock may look what that means."""
        self._run(self._let_time_pass())
        if noticed:
            self._run(self._expire())

    @rule()
    def everything_is_started_anew(self) -> None:
        self._run(self._world.disconnect())
        self._run(self._world.connect())

    # What happens at the same moment

    @rule(
        slot=slots,
        at=messages,
        other=st.sampled_from(["drive", "vote", "change", "withdraw", "retry", "expire", "evict", "deliver"]),
        place=places,
        person=deciders,
        verdict=verdicts,
        amount=amounts,
    )
    def meanwhile_in_a_drive(
        self, slot: int, at: int, other: _Other, place: int, person: str, verdict: VerdictName, amount: str
    ) -> None:
        act, filed = self._act(other, place, person, verdict, amount), self._thread(slot)
        self._run(self._both(self._drive(filed.thread_id), "drive", at, other, filed, act))

    @precondition(lambda self: self._pending())
    @rule(place=places, at=st.integers(1, _OF_A_LOOK), other=acts, verdict=verdicts, amount=amounts)
    def somebody_decides_while_a_drive_looks(
        self, place: int, at: int, other: _Other, verdict: VerdictName, amount: str
    ) -> None:
        filed = self._pending()[place % len(self._pending())]
        act = self._act(other, self._place_of(filed), "ann", verdict, amount)
        self._run(self._both(self._drive(filed.thread_id), "drive", at, other, filed, act))

    @precondition(lambda self: self._payable())
    @rule(place=places, at=st.integers(1, _OF_GIVING_UP))
    def somebody_retries_while_a_drive_gives_up(self, place: int, at: int) -> None:
        filed = self._payable()[place % len(self._payable())]
        if filed.sound:
            self._run(self._use_up(filed))
        self._run(self._both(self._drive(filed.thread_id), "drive", at, "retry", filed, None))

    @rule(
        at=st.integers(1, _OF_A_VOTE),
        places=st.tuples(places, st.sampled_from([0, 0, 1])),
        persons=st.tuples(people, deciders),
        said=st.tuples(verdicts, verdicts),
        first=acts,
        other=st.sampled_from(["vote", "vote", "change", "withdraw", "drive", "retry", "expire", "deliver"]),
        slot=slots,
        amounts=st.tuples(amounts, amounts),
    )
    def meanwhile_in_a_click(
        self,
        at: int,
        places: tuple[int, int],
        persons: tuple[str, str],
        said: tuple[VerdictName, VerdictName],
        first: _Other,
        other: _Other,
        slot: int,
        amounts: tuple[str, str],
    ) -> None:
        held = self._act(first, places[0], persons[0], said[0], amounts[0])
        assert held is not None
        second = self._act(other, places[0] + places[1], persons[1], said[1], amounts[1])
        self._run(self._both(_casting(held), "door", at, other, self._thread(slot), second, held=held))

    # What must be true

    @invariant()
    def the_promises_hold(self) -> None:
        self._each_thread_has_one_driver()
        self._money_moves_once_and_only_as_the_policy_says()
        self._each_thread_is_due_or_waits_or_is_over_or_says_what_is_wrong()

    def _each_thread_has_one_driver(self) -> None:
        """Its checkpoints are one line: two who drive it at once would both add to the same one."""
        forks = "SELECT thread_id FROM checkpoints WHERE thread_id = ANY(%s) GROUP BY thread_id, parent_checkpoint_id"
        assert self._run(all_rows(self._watch, forks + " HAVING count(*) > 1", [*self._filed])) == []

    def _money_moves_once_and_only_as_the_policy_says(self) -> None:
        query = "SELECT thread_id, amount::text, currency, payee, status FROM payments WHERE thread_id = ANY(%s)"
        paid = self._run(all_rows(self._watch, query, [*self._filed]))
        assert len({row["thread_id"] for row in paid}) == len(paid), paid
        assert {filed.thread_id for filed in self._filed.values() if filed.paid} <= {row["thread_id"] for row in paid}
        for row in paid:
            filed = self._filed[row["thread_id"]]
            assert filed.paid or not filed.forged
            assert (row["amount"], row["currency"], row["payee"]) == (filed.wanted, "USD", "ACME")
            assert row["status"] == "paid"
            assert filed.end(self._asked) == "paid"
            filed.paid = True

    def _each_thread_is_due_or_waits_or_is_over_or_says_what_is_wrong(self) -> None:
        rows = self._run(
            all_rows(
                self._watch,
                "SELECT thread_id, status, reason, due_at IS NOT NULL AS due,"
                " EXISTS (SELECT FROM payments p WHERE p.thread_id = t.thread_id) AS paid"
                " FROM threads t WHERE thread_id = ANY(%s)",
                [*self._filed],
            )
        )
        assert len(rows) == len(self._filed)
        for row in rows:
            filed = self._filed[row["thread_id"]]
            if row["due"]:
                assert row["status"] not in OVER, row
            elif row["status"] in ("stuck", "unknown"):
                assert row["reason"] and not filed.sound, row
            elif row["status"] in OVER:
                assert row["status"] == filed.end(self._asked), row
                assert row["paid"] == (row["status"] == "paid"), row
            else:
                assert (row["status"], filed.end(self._asked)) == ("waiting", "waiting"), row
                assert filed.asked and self._asked[filed.asked[-1]].status == "pending", row

    def teardown(self) -> None:
        """Mended and left alone, everything comes to its end: a story that went wrong before has told enough."""
        if sys.exc_info()[0] is None:
            self._run(self._end())

    # Inside: the sessions

    def _run(self, work: Coroutine[Any, Any, Any]) -> Any:
        return self._world.runner.run(work)

    @property
    def _watch(self) -> Connection:
        return self._world.sessions["watch"]

    @property
    def _door(self) -> Connection:
        return self._world.sessions["door"]

    # Inside: who and what

    def _file(self, slot: int, amount: str, requested_by: str) -> None:
        thread_id = f"t{self._world.stories}-{slot}"
        filed = self._filed.setdefault(thread_id, Filed(thread_id=thread_id, amount=amount, requested_by=requested_by))
        starting = start_claim(self._door, thread_id, amount, requested_by=requested_by)
        if filed.amount == amount:
            assert self._run(starting).requested_by == filed.requested_by
        else:
            with pytest.raises(ThreadExists):
                self._run(starting)

    def _thread(self, slot: int) -> Filed:
        return [*self._filed.values()][slot % len(self._filed)]

    def _payable(self) -> list[Filed]:
        return [each for each in self._filed.values() if not each.paid and each.end(self._asked) == "paid"]

    def _pending(self) -> list[Filed]:
        return [each for each in self._filed.values() if each.asked and self._asked[each.asked[-1]].status == "pending"]

    def _place_of(self, filed: Filed) -> int:
        """Where its newest request is, counted back from the newest of all."""
        return [*reversed(self._asked)].index(filed.asked[-1])

    def _place_of_pending(self, place: int) -> int:
        return self._place_of(self._pending()[place % len(self._pending())])

    def _unsound(self) -> list[Filed]:
        return [each for each in self._filed.values() if not each.sound]

    def _vote(self, place: int, person: str, verdict: VerdictName, *, stale: bool = False) -> Vote:
        asked, who = self._at(place), _PEOPLE[person]
        shown = None if who.trusted else STALE if stale else asked.request_hash
        said = Verdict(verdict=verdict, door="cli" if who.trusted else "slack", request_hash=shown)
        vote = Vote(interrupt_id=asked.interrupt_id, person=who, verdict=said, acts_for=self._acts_for(who))
        self._votes.append(vote)
        return vote

    def _change(self, place: int, person: str, amount: str) -> Change:
        who = _PEOPLE[person]
        return Change(
            interrupt_id=self._at(place).interrupt_id, person=who, amount=amount, acts_for=self._acts_for(who)
        )

    def _withdrawal(self, place: int, person: str) -> Withdrawal:
        return Withdrawal(interrupt_id=self._at(place).interrupt_id, person=_PEOPLE[person])

    def _go_away(self, name: str, delegate: Person) -> None:
        if _PEOPLE[name] == delegate:
            return
        self._run(_going_away(_PEOPLE[name], delegate)(self._door))
        self._away.pop(name, None)
        self._away[name] = delegate.key

    def _act(self, kind: _Other, place: int, person: str, verdict: VerdictName, amount: str) -> Act | None:
        """What this person does with the request at this place; None if it is nothing that a person does."""
        if kind == "vote":
            return self._vote(place, person, verdict)
        if kind == "change":
            return self._change(place, person, amount)
        return self._withdrawal(place, person) if kind == "withdraw" else None

    def _at(self, place: int) -> Asked:
        return [*self._asked.values()][-1 - place % len(self._asked)]

    def _acts_for(self, person: Person) -> tuple[Person, ...]:
        return tuple(_PEOPLE[absent] for absent, delegate in self._away.items() if delegate == person.key)

    def _cast(self, act: Act) -> None:
        answer = self._run(_casting(act)(self._door))
        self._run(self._hold_against_the_rows((act, answer)))

    # Inside: drives

    def _drive(self, thread_id: str) -> Work:
        async def work(conn: Connection) -> str | None:
            try:
                return await drive(conn, thread_id, flows=self._world.flows, policy=POLICY_BY_AMOUNT)
            except DriveFailed as exc:
                return exc.reason

        return work

    async def _work(self) -> None:
        """What a worker does until nothing is due."""
        door, one = self._door, self._world.sessions["one"]
        while due := await threads.due_threads(door, flows=CLAIMS, drive_timeout_s=_DRIVE_TIMEOUT_S, limit=100):
            for each in due:
                assert not each.held
                assert await self._drive(each.thread_id)(one) in ("waiting", "over", "stuck")

    async def _wake(self, filed: Filed, conn: Connection) -> None:
        """What `retry` does."""
        thread = await threads.thread_of(conn, filed.thread_id)
        if thread.due_at is None and thread.status != "stuck":
            return
        async with conn.transaction():
            await threads.wake(conn, filed.thread_id)
        filed.sound = not filed.forged

    async def _use_up(self, filed: Filed) -> None:
        died = await self._watch.execute(
            "UPDATE threads SET attempts = %s, due_at = clock_timestamp() WHERE thread_id = %s AND due_at IS NOT NULL",
            (threads.MAX_ATTEMPTS, filed.thread_id),
        )
        filed.sound = filed.sound and died.rowcount == 0

    async def _mend(self, filed: Filed, conn: Connection) -> None:
        for number, interrupt_id in enumerate(filed.asked):
            name = filed.tiers[number].name
            await conn.execute("UPDATE approvals SET tier = %s WHERE interrupt_id = %s", (name, interrupt_id))
        await conn.execute(RENEW_FINGERPRINTS)
        filed.forged = False

    # Inside: what goes wrong

    async def _cut(self, work: Work, role: Role, cut: dict[str, int], *, commit_of: bytes = b"") -> str | None:
        """The answer of work whose connection may be lost on its way; None if it was, and its session has ended."""
        async with Wire(self._world.url, **cut) as wire, await connect(wire.url, role) as victim:
            pid = victim.info.backend_pid
            wire.cut_after_commit_of(commit_of)
            try:
                return await work(victim)
            except psycopg.OperationalError:
                assert victim.closed
        await self._until_gone(pid)
        return None

    async def _until_gone(self, pid: int) -> None:
        async def gone() -> bool:
            return bool(await value(self._watch, "SELECT count(*) = 0 FROM pg_stat_activity WHERE pid = %s", pid))

        await until(gone)

    async def _let_time_pass(self) -> None:
        a_while = "interval '2 hours'"
        await self._watch.execute(
            f"UPDATE threads SET due_at = due_at - {a_while}, driven_at = driven_at - {a_while};"
            f" UPDATE notices SET due_at = due_at - {a_while};"
            f" UPDATE approvals SET expires_at = expires_at - {a_while}",
            prepare=False,
        )
        for key, asked in self._asked.items():
            self._asked[key] = replace(asked, overdue=asked.tier.expires_after_s is not None)

    async def _expire(self) -> None:
        happened: list[Happened] = [
            (Expiry(interrupt_id=key), "recorded")
            for key, asked in self._asked.items()
            if asked.overdue and asked.status == "pending"
        ]
        assert await expire_overdue(self._watch) == len(happened)
        await self._hold_against_the_rows(*happened)

    # Inside: at the same moment

    async def _both(
        self,
        work: Work,
        role: Role,
        at: int,
        other: _Other,
        filed: Filed,
        act: Act | None,
        *,
        held: Act | None = None,
    ) -> None:
        """Hold the work up before its message `at`, do the other thing until it is done or has to wait, and let go."""
        conn = self._world.sessions["two" if other == "drive" else "door"]
        async with Wire(self._world.url, hold_before=at) as wire, await connect(wire.url, role) as victim:
            pid = victim.info.backend_pid
            first = asyncio.create_task(_heard(work(victim)))
            async with _ended(first):
                await _either(first, wire.held)
                second = asyncio.create_task(self._do(other, conn, filed, act, pid))
                async with _ended(second):
                    await until(lambda: self._needs_no_more_time(second, conn))
                    wire.release()
                    answer = await second
                outcome = await first
        if outcome is None:
            await self._until_gone(pid)
        happened: list[Happened] = [(each, said) for each, said in ((held, outcome), (act, answer)) if each]
        if other == "expire":
            happened += [(Expiry(interrupt_id=key), None) for key, asked in self._asked.items() if asked.overdue]
        await self._hold_against_the_rows(*happened)

    async def _do(self, other: _Other, conn: Connection, filed: Filed, act: Act | None, driver_pid: int) -> str | None:
        if act is not None:
            return await _casting(act)(conn)
        if other == "drive":
            return await self._drive(filed.thread_id)(conn)
        if other == "retry":
            await self._mend(filed, conn)
            await self._wake(filed, conn)
        elif other == "expire":
            await expire_overdue(conn)
        elif other == "deliver":
            await self._begin_delivery("posts")
        elif other == "evict":
            await conn.execute("UPDATE threads SET driven_at = driven_at - interval '1 hour'")
            await threads.evict_driver(conn, filed.thread_id, drive_timeout_s=_DRIVE_TIMEOUT_S)
        return None

    async def _needs_no_more_time(self, task: asyncio.Task[Any], conn: Connection) -> bool:
        """Whether the task has ended, or its session waits for another one."""
        query = "SELECT cardinality(pg_blocking_pids(%s)) > 0"
        return task.done() or bool(await value(self._watch, query, conn.info.backend_pid))

    # Inside: deliveries

    async def _begin_delivery(self, lane: notices.Lane) -> bool:
        notice = await notices.lease(self._door, lane)
        if notice is None:
            return False
        approval, thread, payment = await _facts(self._door, notice)
        show = _reply if notice.kind == "reply" else _card
        text = show(approval, thread, payment)
        self._sending.append((notice, text))
        return True

    async def _end_delivery(self, notice: Notice, text: str, how: _Delivered) -> None:
        ours = await value(
            self._watch,
            "SELECT attempt = %s AND status = 'sending' FROM notices WHERE id = %s",
            notice.attempt,
            notice.id,
        )
        assert notice.interrupt_id is not None
        # One that outlived its lease and did not live to say so could leave anything behind.
        if how == "sent" or (ours and how in ("unheard", "dies after")):
            if notice.kind == "card":
                self._cards[notice.interrupt_id] = text
            else:
                self._replies.setdefault(notice.interrupt_id, set()).add(text)
        if how == "sent":
            await notices.mark_sent(self._door, notice)
        elif how in ("unheard", "later"):
            await notices.mark_later(self._door, notice, wait_s=2, error=how, ambiguous=how == "unheard")
        elif how == "failed":
            await notices.mark_failed(self._door, notice, how)
        else:
            await self._watch.execute(
                "UPDATE notices SET due_at = clock_timestamp() WHERE id = %s AND attempt = %s AND status = 'sending'",
                (notice.id, notice.attempt),
            )

    async def _deliver_everything(self) -> None:
        """Whoever is under way ends, the latest first; then all that was put off or refused is sent."""
        for sending in reversed(self._sending):
            await self._end_delivery(*sending, "sent")
        self._sending = []
        await notices.retry_failed(self._door)
        await self._watch.execute("UPDATE notices SET due_at = clock_timestamp() WHERE due_at IS NOT NULL")
        while await self._begin_delivery("changes") or await self._begin_delivery("posts"):
            await self._end_delivery(*self._sending.pop(), "sent")

    # Inside: the rows

    async def _hold_against_the_rows(self, *happened: Happened) -> None:
        """Let the model take the step that the rows show, which must be one that explains the answers."""
        rows = await all_rows(
            self._watch,
            "SELECT interrupt_id, thread_id, tier, request, request_hash, requested_by, approvers, required, status,"
            " raised_by, settled_at, changed_to->>'amount' AS changed_to, (SELECT coalesce(jsonb_object_agg(person,"
            " jsonb_build_array(coalesce(for_person, person), verdict, decided_at)), '{}')"
            " FROM decisions d WHERE d.interrupt_id = a.interrupt_id) AS votes"
            " FROM approvals a WHERE thread_id = ANY(%s) ORDER BY requested_at",
            [*self._filed],
        )
        seen = {
            row["interrupt_id"]: (
                row["status"],
                {person: (voice, verdict) for person, (voice, verdict, _) in row["votes"].items()},
                row["changed_to"],
            )
            for row in rows
        }
        known = {key: said for key, said in seen.items() if key in self._asked}
        before = self._asked
        for after in outcomes(before, happened):
            if {key: (asked.status, asked.votes, asked.changed_to) for key, asked in after.items()} == known:
                self._asked = dict(after)
                break
        else:
            raise AssertionError(f"{happened} do not lead from {before} to {known}")
        for row in rows:
            if row["status"] != "pending":
                # What is settled stays as it is, and so does who settled it.
                assert self._settled.setdefault(row["interrupt_id"], row)["votes"] == row["votes"]
                assert self._settled[row["interrupt_id"]]["settled_at"] == row["settled_at"]
        self._go_on(before)
        for row in rows:
            if row["interrupt_id"] not in known:
                assert seen[row["interrupt_id"]] == ("pending", {}, None)
                self._learn(row)

    def _go_on(self, before: Mapping[str, Asked]) -> None:
        """What was decided since then wakes a claim, and another amount has it begin anew."""
        for filed in self._filed.values():
            if any(before[key].status != self._asked[key].status for key in filed.asked):
                # Whatever had stopped it: it was woken.
                filed.sound = not filed.forged
            for key in filed.asked:
                if self._asked[key].changed_to:
                    filed.ask_anew(self._asked[key])

    def _learn(self, row: dict[str, Any]) -> None:
        """A new request must be the next one that the policy asks for, and say what is wanted."""
        filed = self._filed[row["thread_id"]]
        assert all(self._asked[each].status == "approved" for each in filed.asked)
        tier = filed.tiers[len(filed.asked)]
        assert (row["tier"], row["approvers"], row["required"]) == (tier.name, [*tier.approvers], tier.required)
        assert (row["request"]["amount"], row["requested_by"]) == (filed.wanted, filed.requested_by)
        assert set(row["raised_by"]) == filed.raised_by
        filed.asked.append(row["interrupt_id"])
        self._asked[row["interrupt_id"]] = Asked(
            interrupt_id=row["interrupt_id"],
            thread_id=filed.thread_id,
            request_hash=row["request_hash"],
            tier=tier,
            requested_by=filed.requested_by,
            filed_amount=filed.amount,
            amount=filed.wanted,
            raised_by=filed.raised_by,
        )

    async def _settle(self) -> None:
        """Everything is driven until nothing is due."""
        await self._watch.execute("UPDATE threads SET due_at = clock_timestamp() WHERE due_at IS NOT NULL")
        await self._work()
        await self._hold_against_the_rows()

    async def _end(self) -> None:
        for filed in self._filed.values():
            await self._mend(filed, self._watch)
            if not filed.sound:
                await self._wake(filed, self._door)
        await self._settle()
        await self._assert_each_thread_is(lambda filed: filed.end(self._asked))
        while any(asked.status == "pending" for asked in self._asked.values()):
            await self._expire()
            for person in (ANN, _ZOE):
                for asked in [asked for asked in self._asked.values() if asked.status == "pending"]:
                    said = Verdict(verdict="approve", door="cli", request_hash=asked.request_hash)
                    vote = Vote(interrupt_id=asked.interrupt_id, person=person, verdict=said)
                    await self._hold_against_the_rows((vote, await _casting(vote)(self._door)))
            await self._settle()
        await self._assert_each_thread_is(lambda filed: filed.end(self._asked))
        await self._assert_the_right_ones_are_paid()
        await self._deliver_everything()
        await self._assert_what_is_shown_is_true()
        # The last request of each thread says how it ended.
        assert set(self._replies) >= {filed.asked[-1] for filed in self._filed.values() if filed.asked}

    async def _assert_each_thread_is(self, status: Callable[[Filed], str]) -> None:
        rows = await all_rows(self._watch, "SELECT thread_id, status, due_at FROM threads ORDER BY 1")
        assert rows == [
            {"thread_id": key, "status": status(self._filed[key]), "due_at": None} for key in sorted(self._filed)
        ]

    async def _assert_the_right_ones_are_paid(self) -> None:
        rows = await all_rows(self._watch, "SELECT thread_id, amount::text FROM payments ORDER BY 1")
        expected = [key for key, filed in sorted(self._filed.items()) if filed.end(self._asked) == "paid"]
        assert rows == [{"thread_id": key, "amount": self._filed[key].wanted} for key in expected]

    async def _assert_what_is_shown_is_true(self) -> None:
        """A thread that is due and has paid is about to say so; everything else is said."""
        assert await all_rows(self._watch, _UNSENT) == []
        rows = await all_rows(
            self._watch,
            "SELECT id, kind, interrupt_id, thread_id, version FROM notices JOIN threads USING (thread_id)"
            " WHERE kind <> 'alarm' AND"
            " (threads.due_at IS NULL OR NOT EXISTS (SELECT FROM payments WHERE thread_id = threads.thread_id))",
        )
        for row in rows:
            approval, thread, payment = await _facts(self._watch, Notice(**row, attempt=0, ambiguous=False))
            if row["kind"] == "card":
                assert self._cards[row["interrupt_id"]] == _card(approval, thread, payment)
            elif thread.over and row["interrupt_id"] == self._filed[row["thread_id"]].asked[-1]:
                # Below an older card, or before the end, stands what was true when it was said.
                assert _reply(approval, thread, payment) in self._replies[row["interrupt_id"]]
        query = "SELECT interrupt_id FROM notices WHERE kind <> 'alarm'"
        shown = {row["interrupt_id"] for row in await all_rows(self._watch, query)}
        assert shown == set(self._asked)


def _card(approval: Approval, thread: Thread, payment: Payment | None) -> str:
    """What the card says, but for the deadline: here time passes by moving that."""
    return str(blocks.card(replace(approval, expires_at=None), thread, payment))


def _reply(approval: Approval, thread: Thread, payment: Payment | None) -> str:
    """What the word below it says, but for the same."""
    return blocks.reply(replace(approval, expires_at=None), thread, payment)


def _casting(act: Act) -> Work:
    """What a door does with it; its answer."""

    async def work(conn: Connection) -> str | None:
        try:
            return await _done(conn, act)
        except FlowError as exc:
            return type(exc).__name__

    return work


async def _done(conn: Connection, act: Act) -> str:
    if isinstance(act, Vote):
        decided = await decide(conn, act.interrupt_id, act.person, act.verdict)
        return "recorded" if decided.recorded else "known"
    door = "cli" if act.person.trusted else "slack"
    if isinstance(act, Change):
        await change_amount(conn, act.interrupt_id, act.person, amount=act.amount, door=door, request_hash=None)
    else:
        thread_id = (await approval_of(conn, act.interrupt_id)).thread_id
        await withdraw(conn, thread_id, act.person, door=door, interrupt_id=act.interrupt_id)
    return "recorded"


def _going_away(person: Person, delegate: Person) -> Work:
    async def work(conn: Connection) -> None:
        until = datetime.now(UTC) + timedelta(days=30)
        async with conn.transaction():
            await delegations.away(conn, person, to=delegate.key, until=until, made_by=person.key)

    return work


async def _heard(work: Awaitable[str | None]) -> str | None:
    """Its answer; None if its connection was lost."""
    try:
        return await work
    except psycopg.OperationalError:
        return None


async def _either(task: asyncio.Task[Any], event: asyncio.Event) -> None:
    """Wait for the end of the task, or for the event."""
    waiting = asyncio.create_task(event.wait())
    async with _ended(waiting):
        await asyncio.wait({task, waiting}, return_when=asyncio.FIRST_COMPLETED)


@contextlib.asynccontextmanager
async def _ended(task: asyncio.Task[Any]) -> AsyncIterator[None]:
    """Nothing goes on after the `async with`."""
    try:
        yield
    finally:
        if not task.done():
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task


@pytest.mark.parametrize(
    ("stories", "events"),
    [
        pytest.param(300, 15, marks=pytest.mark.timeout(900), id="300 stories"),
        pytest.param(3000, 20, marks=[pytest.mark.thorough, pytest.mark.timeout(7200)], id="3000 stories"),
    ],
)
def test_whatever_happens_in_whatever_order_the_promises_hold(
    database_url: str, flows: Flows, stories: int, events: int
) -> None:
    with asyncio.Runner() as runner:
        world = World(url=database_url, flows=flows, runner=runner)
        runner.run(world.connect())

        class Told(Orders):
            _world = world

        try:
            run_state_machine_as_test(
                seed(seeded().randrange(1 << 32))(Told),
                settings=settings(
                    max_examples=stories,
                    stateful_step_count=events,
                    deadline=None,
                    database=None,
                    print_blob=True,
                    suppress_health_check=[*HealthCheck],
                    phases=[Phase.generate, Phase.shrink],
                ),
            )
        finally:
            runner.run(world.disconnect())
