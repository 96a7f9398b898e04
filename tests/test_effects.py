"""`@idempotent`: whatever fails or dies, in one thread each call takes effect once."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from decimal import Decimal
from enum import StrEnum
from typing import Any

import aiohttp
import pytest
from langgraph.graph import END, START, StateGraph
from langgraph.types import RetryPolicy, Send, interrupt

from flow import claims, effects, threads
from flow.approvals import decide
from flow.database import Connection, connect
from flow.drive import drive
from flow.effects import idempotency_key, idempotent
from flow.errors import DriveFailed, EffectFailed, EffectInProgress, KeyReused, NotInADrive, ResultNotKept
from flow.flows import Flows
from flow.pen import Pen
from flow.text import digest
from tests.bank import Bank
from tests.driving import claims_by, graph_of
from tests.people import ALICE, ONE_OF_THREE, POLICY, YES, start_claim
from tests.processes import ROOT, start_process
from tests.rows import all_rows, one_row, value

State = dict[str, Any]


class World:
    """What has really happened outside, in order."""

    def __init__(self) -> None:
        self.done: list[Any] = []
        self.keys: list[str] = []

    @property
    def effect(self) -> Any:
        """An effect that says what it did."""

        @idempotent
        async def act(what: Any) -> Any:
            self.keys.append(idempotency_key())
            self.done.append(what)
            return {"did": what}

        return act

    @property
    def sync_effect(self) -> Any:
        @idempotent
        def act(what: Any) -> Any:
            self.keys.append(idempotency_key())
            self.done.append(what)
            return {"did": what}

        return act


class OutOfOrder(Exception):
    """What makes a node fail; nothing of ours."""


@pytest.fixture
def world() -> World:
    return World()


async def run(conn: Connection, flows: Flows) -> None:
    """Drive t1 to where it stops. These flows pay nothing, so in the end they are stuck."""
    await start_claim(conn)
    await conn.execute("UPDATE threads SET attempts = 0, due_at = clock_timestamp() WHERE status <> 'stuck'")
    outcome = await drive(conn, "t1", flows=flows, policy=POLICY)
    assert outcome in ("stuck", "waiting"), outcome


async def reason(conn: Connection) -> str:
    return str(await value(conn, "SELECT reason FROM threads"))


def failing_once(node: Callable[..., Any]) -> Callable[[State], Any]:
    """The node, failing after everything it does the first time."""
    failed = False

    async def run_node(state: State) -> Any:
        nonlocal failed
        answer = await node(state)
        if not failed:
            failed = True
            raise OutOfOrder
        return answer

    return run_node


# Once


async def test_a_node_that_runs_again_makes_none_of_its_calls_again(conn: Connection, world: World) -> None:
    act, seen = world.effect, []

    async def node(state: State) -> State:
        seen.append([await act("a"), await act("b"), await act("a"), await act(what="a")])
        return {}

    flows = graph_of(failing_once(node))
    with pytest.raises(DriveFailed, match="OutOfOrder"):
        await run(conn, flows)
    await run(conn, flows)
    # Equal calls are several, however their arguments are written.
    assert world.done == ["a", "b", "a", "a"]
    assert len(set(world.keys)) == 4
    assert seen[0] == seen[1] == [{"did": "a"}, {"did": "b"}, {"did": "a"}, {"did": "a"}]


async def test_a_node_that_failed_half_way_makes_only_the_rest(conn: Connection, world: World) -> None:
    act, broken = world.effect, True

    async def node(state: State) -> State:
        for number in range(5):
            if broken and number == 3:
                raise OutOfOrder
            await act("same")
        return {}

    with pytest.raises(DriveFailed, match="OutOfOrder"):
        await run(conn, graph_of(node))
    broken = False
    await run(conn, graph_of(node))
    assert len(world.done) == len(set(world.keys)) == 5


@pytest.mark.parametrize(
    "result", [None, True, 0, 0.1, "", "\0 \ud800 é", [], {"a": [1, {"b": None}]}, 10**30], ids=ascii
)
async def test_any_json_value_is_kept(conn: Connection, result: Any) -> None:
    calls, seen = 0, []

    @idempotent
    async def act() -> Any:
        nonlocal calls
        calls += 1
        return result

    async def node(state: State) -> State:
        seen.append(await act())
        return {}

    flows = graph_of(failing_once(node))
    with pytest.raises(DriveFailed, match="OutOfOrder"):
        await run(conn, flows)
    await run(conn, flows)
    assert (calls, seen) == (1, [result, result])


async def test_first_and_later_callers_get_the_same_shape(conn: Connection) -> None:
    seen = []

    @idempotent
    async def act() -> Any:
        return {1: ("a", "b")}

    async def node(state: State) -> State:
        seen.append(await act())
        return {}

    flows = graph_of(failing_once(node))
    with pytest.raises(DriveFailed, match="OutOfOrder"):
        await run(conn, flows)
    await run(conn, flows)
    assert seen == [{"1": ["a", "b"]}, {"1": ["a", "b"]}]


async def test_a_retry_within_one_drive_makes_no_call_again(conn: Connection, world: World) -> None:
    act, runs = world.effect, 0

    async def node(state: claims.State) -> claims.State:
        nonlocal runs
        runs += 1
        await act("a")
        await act("a")
        if runs < 3:
            raise ConnectionError
        return {}

    flow = StateGraph(claims.State, context_schema=Pen)
    flow.add_node("only", node, retry_policy=RetryPolicy(initial_interval=0.01, max_attempts=5))
    flow.add_edge(START, "only")
    flow.add_edge("only", END)
    await run(conn, claims_by(flow))
    assert (runs, world.done) == (3, ["a", "a"])


async def test_a_node_that_pauses_after_a_call_does_not_make_it_again(conn: Connection, world: World) -> None:
    act = world.effect

    async def node(state: State) -> State:
        await act("before")
        interrupt({"amount": "250.00", "currency": "USD", "payee": "ACME", "tier": asdict(ONE_OF_THREE)})
        await act("after")
        return {}

    await run(conn, graph_of(node))
    assert world.done == ["before"]
    await decide(conn, await value(conn, "SELECT interrupt_id FROM approvals"), ALICE, YES)
    await run(conn, graph_of(node))
    assert world.done == ["before", "after"]


async def test_a_step_taken_twice_takes_effect_twice(conn: Connection, world: World) -> None:
    act = world.effect

    async def step(state: claims.State) -> claims.State:
        await act("same")
        return {"tier": state.get("tier", 0) + 1}

    flow = StateGraph(claims.State, context_schema=Pen)
    flow.add_node("step", step)
    flow.add_edge(START, "step")
    flow.add_conditional_edges("step", lambda state: "step" if state["tier"] < 3 else END, ["step", END])
    await run(conn, claims_by(flow))
    assert len(set(world.keys)) == 3


async def test_parallel_branches_are_calls_of_their_own_and_none_is_made_again(conn: Connection, world: World) -> None:
    act, broken, all_acted = world.effect, True, asyncio.Event()

    async def branch(state: Any) -> claims.State:
        await act("same")
        if len(world.done) == 3:
            all_acted.set()
        if broken and state == 2:
            await all_acted.wait()
            raise OutOfOrder
        return {}

    flow = StateGraph(claims.State, context_schema=Pen)
    flow.add_node("branch", branch)
    flow.add_conditional_edges(START, lambda _: [Send("branch", number) for number in range(3)], ["branch"])
    flow.add_edge("branch", END)
    with pytest.raises(DriveFailed, match="OutOfOrder"):
        await run(conn, claims_by(flow))
    broken = False
    await run(conn, claims_by(flow))
    assert len(world.done) == len(set(world.keys)) == 3


async def test_a_flow_that_starts_over_makes_no_call_again(conn: Connection, world: World) -> None:
    """As after a crash before its first checkpoint, or when the checkpoints are lost."""
    act = world.effect

    async def node(state: State) -> State:
        await act("a")
        raise OutOfOrder

    for _ in range(2):
        with pytest.raises(DriveFailed, match="OutOfOrder"):
            await run(conn, graph_of(node))
        for table in ("checkpoints", "checkpoint_writes", "checkpoint_blobs"):
            await conn.execute(f"DELETE FROM {table}".encode())
    assert world.done == ["a"]


async def test_a_subgraph_in_a_loop_makes_its_calls_each_time_and_none_again(conn: Connection, world: World) -> None:
    act, broken = world.effect, True

    async def inner(state: claims.State) -> claims.State:
        await act("same")
        if broken and state["tier"] == 2:
            raise OutOfOrder
        return {"tier": state["tier"] + 1}

    async def begin(state: claims.State) -> claims.State:
        return {"tier": 1}

    nested = StateGraph(claims.State)
    nested.add_node("inner", inner)
    nested.add_edge(START, "inner")
    nested.add_edge("inner", END)
    flow = StateGraph(claims.State, context_schema=Pen)
    flow.add_node("begin", begin)
    flow.add_node("nested", nested.compile())
    flow.add_edge(START, "begin")
    flow.add_edge("begin", "nested")
    flow.add_conditional_edges("nested", lambda state: "nested" if state["tier"] < 4 else END, ["nested", END])
    with pytest.raises(DriveFailed, match="OutOfOrder"):
        await run(conn, claims_by(flow))
    assert len(world.done) == 2
    broken = False
    await run(conn, claims_by(flow))
    assert len(world.done) == len(set(world.keys)) == 3


async def test_a_subgraph_that_runs_again_in_a_retry_of_its_node_makes_no_call_again(
    conn: Connection, world: World
) -> None:
    """LangGraph tells its runs within one process by a number, which would make them two places."""
    act, runs = world.effect, 0

    async def inner(state: claims.State) -> claims.State:
        nonlocal runs
        runs += 1
        await act("a")
        if runs == 1:
            raise ConnectionError
        return {}

    nested = StateGraph(claims.State)
    nested.add_node("inner", inner)
    nested.add_edge(START, "inner")
    nested.add_edge("inner", END)
    flow = StateGraph(claims.State, context_schema=Pen)
    retried = RetryPolicy(initial_interval=0.01, max_attempts=2, retry_on=ConnectionError)
    flow.add_node("nested", nested.compile(), retry_policy=retried)
    flow.add_edge(START, "nested")
    flow.add_edge("nested", END)
    with pytest.raises(DriveFailed, match=r"NeedsKey: .*act is called in a subgraph that runs a second time"):
        await run(conn, claims_by(flow))
    await run(conn, claims_by(flow))
    assert world.done == ["a"]


async def test_a_call_that_is_tried_again_in_its_node_is_the_same_call(conn: Connection, world: World) -> None:
    broken = 2

    @idempotent
    async def act(what: str) -> None:
        nonlocal broken
        world.keys.append(idempotency_key())
        if broken:
            broken -= 1
            raise TimeoutError
        world.done.append(what)

    async def node(state: State) -> State:
        for _ in range(3):
            try:
                await act("a")
                break
            except TimeoutError:
                continue
        await act("a")
        return {}

    await run(conn, graph_of(node))
    # Tried three times under one key; the second call is another one.
    assert world.done == ["a", "a"]
    assert [world.keys.count(key) for key in dict.fromkeys(world.keys)] == [3, 1]


async def test_a_node_that_insists_does_not_get_round_a_lease(conn: Connection, world: World) -> None:
    act = world.effect

    async def node(state: State) -> State:
        with pytest.raises(EffectInProgress):
            await act("a")
        with pytest.raises(EffectInProgress):
            await act("a")
        return {}

    async def dying(state: State) -> State:
        await act("a")
        # As if its process had died before the outcome was written.
        async with effects._current_drive.get().pen.tx() as own:  # type: ignore[union-attr]
            await own.execute("UPDATE effects SET status = 'started', result = NULL, ended_at = NULL")
        raise OutOfOrder

    with pytest.raises(DriveFailed, match="OutOfOrder"):
        await run(conn, graph_of(dying))
    await run(conn, graph_of(node))
    assert world.done == ["a"]


# Threads and pools


async def test_calls_in_threads_and_pools_know_their_thread(conn: Connection, world: World) -> None:
    act, results = world.sync_effect, []

    def node(state: State) -> State:
        results.append(act("here"))
        with ThreadPoolExecutor(4) as pool:
            results.extend(pool.map(act, ["p1", "p2", "p3", "p3"]))
            results.append(pool.submit(lambda: act("lambda")).result())
        thread = threading.Thread(target=act, args=["thread"])
        thread.start()
        thread.join()
        raise OutOfOrder

    for _ in range(2):
        with pytest.raises(DriveFailed, match="OutOfOrder"):
            await run(conn, graph_of(node))
    assert sorted(world.done) == ["here", "lambda", "p1", "p2", "p3", "p3", "thread"]
    assert len(set(world.keys)) == 7
    assert results[:6] == results[6:]


async def test_a_call_in_a_pool_that_was_there_before_is_known_by_its_node(conn: Connection, world: World) -> None:
    act = world.sync_effect
    with ThreadPoolExecutor(1) as pool:
        # Its one thread was started by no node.
        pool.submit(int).result()

        def node(state: State) -> State:
            pool.submit(act, "p").result()
            return {}

        await run(conn, graph_of(node))
    assert world.done == ["p"]


async def test_an_async_node_can_hand_a_sync_call_to_a_thread(conn: Connection, world: World) -> None:
    act = world.sync_effect

    async def node(state: State) -> State:
        await asyncio.gather(*(asyncio.to_thread(act, number) for number in range(5)))
        await asyncio.get_running_loop().run_in_executor(None, act, 5)
        return {}

    await run(conn, graph_of(node))
    assert sorted(world.done) == [0, 1, 2, 3, 4, 5]


async def test_an_async_call_in_a_loop_of_its_own_is_recorded(conn: Connection, world: World) -> None:
    act = world.effect

    def node(state: State) -> State:
        asyncio.run(act("elsewhere"))
        return {}

    await run(conn, graph_of(node))
    assert world.done == ["elsewhere"]
    assert await value(conn, "SELECT status FROM effects") == "done"


async def test_a_sync_call_that_would_block_the_drive_is_refused(conn: Connection, world: World) -> None:
    act = world.sync_effect

    async def node(state: State) -> State:
        act("a")
        return {}

    with pytest.raises(DriveFailed, match=r"NotInADrive: .*act would hold up the loop that records it"):
        await run(conn, graph_of(node))
    assert world.done == []


async def test_a_call_beside_another_of_its_key_waits_for_it(conn: Connection, world: World) -> None:
    @idempotent(key="invoice")
    async def act(what: str) -> str:
        world.done.append(what)
        await asyncio.sleep(0)
        return what

    seen = []

    async def node(state: State) -> State:
        seen.extend(await asyncio.gather(*(act("a") for _ in range(8))))
        return {}

    await run(conn, graph_of(node))
    assert (world.done, seen) == (["a"], ["a"] * 8)


# Death


async def test_a_killed_fan_out_goes_on_where_it_was_in_another_process(database_url: str, conn: Connection) -> None:
    async with Bank(remembers=False) as bank:
        await start_claim(conn)
        for dies_at, code in ((6, -signal.SIGKILL), (None, 0)):
            process = start_process(_fan_out, database_url, bank.url, dies_at)
            await asyncio.to_thread(process.join, 60)
            assert process.exitcode == code
        assert [order["thread"] for order in bank.paid] == [f"u{number}" for number in range(10)]
        assert len(set(bank.keys)) == 10


def _fan_out(url: str, bank_url: str, dies_at: int | None) -> None:
    def deliver(number: int) -> str:
        async def post() -> str:
            async with (
                aiohttp.ClientSession() as session,
                session.post(
                    bank_url, json={"thread": f"u{number}"}, headers={"Idempotency-Key": idempotency_key()}
                ) as response,
            ):
                return str((await response.json())["reference"])

        if number == dies_at:
            os.kill(os.getpid(), signal.SIGKILL)
        return asyncio.run(post())

    # Nobody is making the call that its process died before.
    effect = idempotent(lease_s=0.0)(deliver)

    def node(state: State) -> State:
        with ThreadPoolExecutor(1) as pool:
            list(pool.map(effect, range(10)))
        return {}

    async def drive_it() -> None:
        async with await connect(url, "drive") as conn:
            assert await drive(conn, "t1", flows=graph_of(node), policy=POLICY) == "stuck"

    asyncio.run(drive_it())


async def test_a_call_whose_process_died_is_made_again_with_its_key_when_its_lease_is_over(
    database_url: str, conn: Connection, world: World
) -> None:
    @idempotent
    async def act(what: str) -> None:
        world.keys.append(idempotency_key())
        if not victim.closed:
            await victim.close()
            raise asyncio.CancelledError
        world.done.append(what)

    async def node(state: State) -> State:
        await act("a")
        return {}

    async with await connect(database_url, "drive") as victim:
        with pytest.raises(BaseException):  # noqa: B017 - a dead one's last words are its own
            await run(victim, graph_of(node))
        assert victim.closed
    with pytest.raises(DriveFailed, match=r"EffectInProgress: .* may still be under way, for [56][0-9] s at most"):
        await run(conn, graph_of(node))
    assert world.done == []
    await conn.execute("UPDATE effects SET lease_until = clock_timestamp()")
    await run(conn, graph_of(node))
    assert world.done == ["a"]
    assert world.keys == [world.keys[0]] * 2
    assert await one_row(conn, "SELECT status, attempt FROM effects") == {"status": "done", "attempt": 2}


async def test_a_call_that_is_cut_off_while_its_outcome_is_written_is_written(conn: Connection, world: World) -> None:
    """LangGraph cancels what runs beside a node that failed."""
    act, failing = world.effect, asyncio.Event()

    async def acting(state: claims.State) -> claims.State:
        await act("a")
        failing.set()
        await asyncio.Event().wait()
        return {}

    async def broken(state: claims.State) -> claims.State:
        await failing.wait()
        raise OutOfOrder

    flow = StateGraph(claims.State, context_schema=Pen)
    for name, node in (("acting", acting), ("broken", broken)):
        flow.add_node(name, node)
        flow.add_edge(START, name)
    with pytest.raises(DriveFailed, match="OutOfOrder"):
        await run(conn, claims_by(flow))
    assert await value(conn, "SELECT status FROM effects") == "done"


# Failure


class Declined(Exception):
    """An error that can be made again from its arguments."""

    def __init__(self, code: str, limit: int) -> None:
        super().__init__(code, limit)
        self.code = code


class Opaque(Declined):
    """And one that cannot."""

    def __init__(self, answer: object) -> None:
        super().__init__("opaque", 0)
        self.args = (answer,)


async def test_a_permanent_error_is_raised_again_as_it_was(conn: Connection, world: World) -> None:
    @idempotent(permanent=(Declined,))
    async def act(what: str) -> None:
        world.done.append(what)
        raise Declined("card_declined", 100)

    caught = []

    async def node(state: State) -> State:
        try:
            await act("a")
        except Declined as exc:
            caught.append((exc.code, exc.args))
        return {}

    flows = graph_of(failing_once(node))
    with pytest.raises(DriveFailed, match="OutOfOrder"):
        await run(conn, flows)
    await run(conn, flows)
    assert (world.done, caught) == (["a"], [("card_declined", ("card_declined", 100))] * 2)


async def test_a_permanent_error_that_cannot_be_made_again_is_another_one_from_the_start(
    conn: Connection, world: World
) -> None:
    @idempotent(permanent=(Declined,))
    def act(what: str) -> None:
        world.done.append(what)
        raise Opaque(object())

    def node(state: State) -> State:
        act("a")
        return {}

    await run(conn, graph_of(node))
    assert "act has failed for good (tests.test_effects.Opaque: <object object" in await reason(conn)
    await threads.wake(conn, "t1")
    await run(conn, graph_of(node))
    assert "act has failed for good" in await reason(conn)
    assert world.done == ["a"]


async def test_any_other_error_leaves_the_call_open(conn: Connection, world: World) -> None:
    broken = True

    @idempotent(permanent=(Declined,))
    async def act(what: str) -> None:
        world.keys.append(idempotency_key())
        if broken:
            raise TimeoutError
        world.done.append(what)

    async def node(state: State) -> State:
        await act("a")
        return {}

    with pytest.raises(DriveFailed, match="TimeoutError"):
        await run(conn, graph_of(node))
    broken = False
    await run(conn, graph_of(node))
    assert world.done == ["a"]
    assert world.keys == [world.keys[0]] * 2


@pytest.mark.parametrize(
    "result",
    [object(), float("nan"), {"when": datetime(2026, 1, 1, tzinfo=UTC)}, {(1, 2): 3}],
    ids=["object", "nan", "datetime", "pair"],
)
async def test_a_result_that_cannot_be_kept_is_said_and_the_call_not_made_again(
    conn: Connection, world: World, result: object
) -> None:
    @idempotent
    async def act(what: str) -> object:
        world.done.append(what)
        return result

    async def node(state: State) -> State:
        await act("a")
        return {}

    for _ in range(2):
        await run(conn, graph_of(node))
        assert "act is done, but its result was not kept" in await reason(conn)
        # A person tries again.
        await threads.wake(conn, "t1")
    assert world.done == ["a"]
    row = await one_row(conn, "SELECT status, result, error IS NOT NULL AS explained FROM effects")
    assert row == {"status": "done", "result": None, "explained": True}


class Told:
    """A result that says of itself what it was told to, or fails to."""

    def __init__(self, text: str | None) -> None:
        self.text = text

    def __repr__(self) -> str:
        if self.text is None:
            raise OutOfOrder
        return self.text


@pytest.mark.parametrize(
    ("result", "kept"),
    [
        ({"reference": "O-1", "amount": Decimal("2.50")}, "{'reference': 'O-1', 'amount': Decimal('2.50')}"),
        (Told("O-1\0\ud800" + "x" * 1000), "O-1\ufffd\ufffd" + "x" * 295),
        (Told(None), None),
    ],
    ids=["decimal", "unstorable", "mute"],
)
async def test_of_a_result_that_cannot_be_kept_its_reference_is_found_in_the_row_and_not_shown(
    conn: Connection, result: object, kept: str | None
) -> None:
    @idempotent
    async def act() -> object:
        return result

    async def node(state: State) -> State:
        await act()
        return {}

    await run(conn, graph_of(node))
    assert await value(conn, "SELECT error->>'result' FROM effects WHERE status = 'done'") == kept
    assert "act is done, but its result was not kept" in await reason(conn)
    assert "O-1" not in await reason(conn)


# Keys


async def test_a_chosen_key_counts_for_the_whole_thread(conn: Connection, world: World) -> None:
    @idempotent(key=lambda order, **_: f"invoice-{order}")
    async def act(order: str) -> str:
        world.done.append(order)
        return f"paid {order}"

    async def node(state: State) -> State:
        assert [await act("o1"), await act("o2"), await act("o1")] == ["paid o1", "paid o2", "paid o1"]
        return {}

    await run(conn, graph_of(node))
    assert world.done == ["o1", "o2"]
    assert [row["key"] for row in await all_rows(conn, "SELECT key FROM effects ORDER BY key")] == [
        "key:invoice-o1",
        "key:invoice-o2",
    ]


async def test_a_chosen_key_stands_for_one_function_and_its_arguments(conn: Connection, world: World) -> None:
    @idempotent(key="order-1")
    async def charge(amount: int) -> None:
        world.done.append(amount)

    @idempotent(key="order-1")
    async def refund(amount: int) -> None:
        world.done.append(-amount)

    refused = []

    async def node(state: State) -> State:
        await charge(100)
        for other in (charge(200), refund(100)):
            with pytest.raises(KeyReused) as caught:
                await other
            refused.append(str(caught.value))
        return {}

    await run(conn, graph_of(node))
    assert world.done == [100]
    assert "other arguments" in refused[0]
    assert "charge already, not for" in refused[1]


async def test_a_charge_with_a_key_is_not_made_again_by_a_release_that_changes_it(
    conn: Connection, world: World
) -> None:
    @idempotent(key=lambda order, **_: f"charge {order}")
    async def before(order: str) -> str:
        world.done.append(order)
        return "O-1"

    @idempotent(key=lambda order, **_: f"charge {order}")
    async def after(order: str, note: str = "") -> str:
        world.done.append(order)
        return "O-2"

    charge, seen = before, []

    async def node(state: State) -> State:
        seen.append(await charge("A-17"))
        return {}

    flows = graph_of(failing_once(node))
    with pytest.raises(DriveFailed, match="OutOfOrder"):
        await run(conn, flows)
    charge = after
    await run(conn, flows)
    assert "key:charge A-17 stands for" in await reason(conn)
    # As it was.
    charge = before
    await threads.wake(conn, "t1")
    await run(conn, flows)
    assert (world.done, seen) == (["A-17"], ["O-1", "O-1"])


async def test_two_functions_of_one_name_are_two_effects(conn: Connection, world: World) -> None:
    one, other = world.effect, World().effect

    async def node(state: State) -> State:
        await one("a")
        await other("a")
        return {}

    await run(conn, graph_of(node))
    assert await value(conn, "SELECT count(*) FROM effects") == 2


async def test_two_threads_and_two_installations_have_keys_of_their_own(conn: Connection) -> None:
    keys = []

    @idempotent(key="same")
    async def act() -> None:
        keys.append(idempotency_key())

    async def node(state: State) -> State:
        await act()
        return {}

    for thread_id in ("t1", "t2", "t3"):
        await start_claim(conn, thread_id)
        await drive(conn, thread_id, flows=graph_of(node), policy=POLICY)
    await conn.execute("UPDATE installation SET id = gen_random_uuid()")
    # As the first thread of another installation would.
    for table in ("effects", "checkpoints", "checkpoint_writes", "checkpoint_blobs"):
        await conn.execute(f"DELETE FROM {table} WHERE thread_id = 't1'".encode())
    await threads.wake(conn, "t1")
    await run(conn, graph_of(node))
    assert len(set(keys)) == 4
    assert all(len(key) == 64 for key in keys)


@pytest.mark.parametrize("key", ["", "x" * 201, "a\0b", 7], ids=ascii)
async def test_a_key_that_is_no_text_is_refused_before_anything_happens(
    conn: Connection, world: World, key: Any
) -> None:
    @idempotent(key=lambda: key)
    async def act() -> None:
        world.done.append("acted")

    async def node(state: State) -> State:
        await act()
        return {}

    with pytest.raises(DriveFailed, match="is not text of 1 to 200 printable characters"):
        await run(conn, graph_of(node))
    assert world.done == []


async def test_a_call_from_within_itself_is_refused(conn: Connection) -> None:
    @idempotent(key="self")
    async def act(depth: int) -> None:
        with pytest.raises(EffectInProgress, match="from within itself"):
            await act(depth)

    async def node(state: State) -> State:
        await act(1)
        return {}

    await run(conn, graph_of(node))
    assert await value(conn, "SELECT status FROM effects") == "done"


# Arguments


class Colour(StrEnum):
    RED = "red"


@dataclass(frozen=True)
class Order:
    number: int
    tags: frozenset[str]


ARGUMENTS = {
    "plain": [None, True, 1, 1.5, "é", [1, [2]], {"b": 1, "a": {"c": 2}}],
    "values": [Decimal("1.10"), datetime(2026, 1, 1, tzinfo=UTC), b"\0", Colour.RED],
    "sets": {"many", "words", "in", "no", "order"},
    "order": Order(1, frozenset("abcdef")),
    "mapping": {(1, 2): "pair", "x": "text", 3: "number"},
}


def fingerprints() -> list[str]:
    return [digest(effects._plain(argument)) for argument in ARGUMENTS.values()]


def test_a_fingerprint_is_the_same_in_every_process() -> None:
    ours = fingerprints()
    assert len(set(ours)) == len(ours)
    for seed in ("1", "2"):
        theirs = subprocess.run(
            [sys.executable, "-c", "from tests.test_effects import fingerprints; print(fingerprints())"],
            cwd=ROOT,
            env=os.environ | {"PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        )
        assert theirs.stdout.strip() == str(ours)


@pytest.mark.parametrize(
    ("one", "other"),
    [(1, 1.0), (1, True), (None, "null"), ("1", 1), ([1], ["1"]), ({1: 2}, {"1": 2}), ("a", b"a"), ([], {})],
    ids=repr,
)
def test_arguments_that_differ_have_different_fingerprints(one: object, other: object) -> None:
    assert digest(effects._plain(one)) != digest(effects._plain(other))


async def test_an_argument_without_a_plain_form_is_refused_before_anything_happens(
    conn: Connection, world: World
) -> None:
    act = world.effect

    async def node(state: State) -> State:
        await act({"client": object()})
        return {}

    with pytest.raises(DriveFailed, match=r"its argument what cannot be told from others \(a builtins.object has no"):
        await run(conn, graph_of(node))
    assert (world.done, await all_rows(conn, "SELECT * FROM effects")) == ([], [])


# Where it does not belong


async def test_outside_of_a_drive_nothing_happens(world: World) -> None:
    with pytest.raises(NotInADrive, match="only while a thread is driven"):
        await world.effect("a")
    with pytest.raises(NotInADrive, match="only while a thread is driven"):
        world.sync_effect("a")
    with pytest.raises(NotInADrive, match="inside of an @idempotent function"):
        idempotency_key()
    assert world.done == []


async def test_a_thread_that_outlives_its_drive_does_nothing_more(conn: Connection, world: World) -> None:
    act, go, ended = world.sync_effect, threading.Event(), []

    def late() -> None:
        go.wait()
        try:
            act("late")
        except NotInADrive as exc:
            ended.append(exc)

    thread = threading.Thread(target=late)

    def node(state: State) -> State:
        thread.start()
        return {}

    await run(conn, graph_of(node))
    go.set()
    await asyncio.to_thread(thread.join)
    assert (world.done, len(ended)) == ([], 1)


def test_a_generator_is_refused() -> None:
    with pytest.raises(TypeError, match="is a generator"):

        @idempotent
        def act() -> Any:
            yield 1


def test_errors_say_what_to_do() -> None:
    assert str(ResultNotKept("shop.charge", "no")) == (
        "shop.charge is done, but its result was not kept (no): let it return JSON values"
    )
    assert str(EffectFailed("shop.charge", "Declined", "no")) == "shop.charge has failed for good (Declined: no)"
