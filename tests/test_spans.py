"""Traces: what is recorded of a thread, by whichever process, how it is read, and what is never in it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import operator
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Annotated, Any, LiteralString, TypedDict

import pytest
from langchain_core.language_models.fake_chat_models import GenericFakeChatModel
from langchain_core.messages import AIMessage
from langgraph.graph import END, START, StateGraph
from pydantic import BaseModel

from flow import threads
from flow.approvals import decide
from flow.assess import Adviser
from flow.claims import FLOW as CLAIMS
from flow.database import Connection, connect
from flow.drive import drive
from flow.effects import idempotent
from flow.errors import DriveFailed, UnknownThread
from flow.flows import Flow, Flows
from flow.log import hider, hider_of_content
from flow.retention import BATCH, Keep, foresee, prune
from flow.settings import Settings
from flow.spans import Recorder, Span, messages_kept, parse_traceparent, recorded_by, span, spans_of
from flow.trace import Node, Tree, tree_of
from tests.api_door import SECRET, Program, api_in_process, token
from tests.bank import Bank
from tests.command import Terminal
from tests.driving import run
from tests.hook_server import Fault, HookServer
from tests.local_slack import BOT_TOKEN, CHANNEL, SIGNING_SECRET
from tests.model_server import FaultyModel, advice, content
from tests.people import ALICE, ANN, POLICY, YES, start_claim
from tests.processes import end_of, start_process
from tests.rows import all_rows, until, value
from tests.services import QuietSlack

CALLER = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


async def spans_named(conn: Connection, name: str, thread_id: str = "t1") -> list[Span]:
    return [each for each in await spans_of(conn, thread_id) if each.name == name]


async def the_span(conn: Connection, name: str, thread_id: str = "t1") -> Span:
    [found] = await spans_named(conn, name, thread_id)
    return found


def shape(node: Node) -> Any:
    """Names alone: of a leaf its own, else with those of its children."""
    return (node.span.name, [shape(child) for child in node.children]) if node.children else node.span.name


def nodes_of(tree: Tree, name: str) -> list[Node]:
    return [node for _, node in tree.root.each() if node.span.name == name]


def drives_of(tree: Tree) -> list[Any]:
    return [shape(node) for node in tree.root.children if node.span.name == "drive"]


# What can be recorded


async def test_whatever_a_span_is_told_can_be_written(conn: Connection) -> None:
    recorder = Recorder("work")
    with recorded_by(recorder), span("outer\x00") as outer, span("POST", kind="client") as call:
        call.answered(200)
        odd: Any = ["a list"]
        call.note(what="NUL \x00 and \ud800", missing=float("nan"), nothing=None, odd=odd, large=2**64)
    await recorder.write(conn, "t1")
    posted = await the_span(conn, "POST")
    assert posted.parent_id == outer.span_id == (await the_span(conn, "outer�")).span_id
    assert posted.attributes == {
        "http.response.status_code": 200,
        "what": "NUL � and �",
        "missing": "nan",
        "odd": "['a list']",
        "large": "18446744073709551616",
    }


async def test_times_are_the_databases_whatever_this_machines_clock_says(
    conn: Connection, flows: Flows, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("time.time", lambda: 0.0)
    await start_claim(conn)
    await run(conn, flows)
    drove = await the_span(conn, "drive")
    taken = await value(conn, "SELECT driven_at FROM threads")
    # But for how long a statement is on its way.
    assert abs((drove.started_at - taken).total_seconds()) < 5
    assert drove.ended_at is not None
    assert drove.started_at < drove.ended_at <= await value(conn, "SELECT clock_timestamp()")


async def test_a_drive_that_records_writes_in_no_statement_more(conn: Connection, flows: Flows) -> None:
    """The spans travel with the statement that ends the drive."""
    counted = []
    for on in (True, False):
        said: list[Any] = []
        real = conn.execute

        async def execute(query: Any, *more: Any, _said: list[Any] = said, _real: Any = real, **how: Any) -> Any:
            _said.append(query)
            return await _real(query, *more, **how)

        await start_claim(conn, f"t{on}")
        conn.execute = execute  # type: ignore[method-assign]
        try:
            await drive(conn, f"t{on}", flows=flows, policy=POLICY, spans=on)
        finally:
            conn.execute = real  # type: ignore[method-assign]
        counted.append(len(said))
        assert bool(await spans_of(conn, f"t{on}")) == on
    assert counted[0] == counted[1]


async def test_without_a_recorder_nothing_is_recorded(conn: Connection) -> None:
    with span("nobody's") as live:
        live.note(what=1)
    assert await value(conn, "SELECT count(*) FROM spans") == 0


# A claim, from its filing to its webhooks


@pytest.fixture
async def world() -> AsyncIterator[tuple[Bank, FaultyModel, QuietSlack, HookServer]]:
    model = FaultyModel(content(advice(needs_review=False), prompt_tokens=120, completion_tokens=34))
    async with Bank() as bank, model, QuietSlack() as slack, HookServer() as hooks:
        yield bank, model, slack, hooks


@pytest.fixture
def terminal(tmp_path: Path, database_url: str, world: tuple[Bank, FaultyModel, QuietSlack, HookServer]) -> Terminal:
    bank, model, slack, hooks = world
    return Terminal(
        tmp_path,
        DATABASE_URL=database_url,
        APPROVERS="U01ALICE",
        OPENAI_API_KEY="sk-test-3b0e6c1f",
        OPENAI_BASE_URL=model.base_url,
        MODEL="gpt-test",
        PAYMENT_PROVIDER="http",
        PAYMENT_URL=bank.url,
        SLACK_API_URL=slack.url,
        SLACK_BOT_TOKEN=BOT_TOKEN,
        SLACK_SIGNING_SECRET=SIGNING_SECRET,
        SLACK_CHANNEL=CHANNEL,
        WEBHOOK_URLS=f"acme={hooks.url}",
        WEBHOOK_SIGNING_SECRETS=f"acme={SECRET}",
        WEBHOOK_ALLOW_PRIVATE="true",
    )


CLAIM = ("--amount", "250", "--payee", "Dear Payee Ltd", "--note", "chairs for my secret office")


async def test_a_claim_is_one_tree_across_its_processes(
    conn: Connection, terminal: Terminal, world: tuple[Bank, FaultyModel, QuietSlack, HookServer]
) -> None:
    bank, _, slack, hooks = world
    # The endpoint is heard of before anything happens.
    assert (await terminal.run_meanwhile("deliver")).code == 0
    hooks.faults.append(Fault(status=503))
    bank.faults.append(503)
    started = await terminal.run_meanwhile("start", "--thread", "t1", *CLAIM)
    assert started.code == 0, started.err
    resumed = await terminal.run_meanwhile("resume", "--thread", "t1", "--approve")
    assert "answered 503" in resumed.err
    await conn.execute("UPDATE threads SET due_at = clock_timestamp() WHERE due_at IS NOT NULL")
    await conn.execute("UPDATE webhook_deliveries SET due_at = clock_timestamp() WHERE due_at IS NOT NULL")
    ended = await terminal.run_meanwhile("work", "--once")
    assert ended.code == 0, ended.err
    assert len(bank.paid) == 1
    assert slack.messages

    tree = await tree_of(conn, "t1")
    assert drives_of(tree) == [
        ("drive", [("intake", ["chat gpt-test"]), "decide", "approve"]),
        ("drive", ["approve", ("pay", [("pay by http", ["POST"])])]),
        ("drive", [("pay", [("pay by http", ["POST"])])]),
    ]
    drives = nodes_of(tree, "drive")
    assert [node.span.attributes["outcome"] for node in drives] == ["waiting", "failed", "paid"]
    assert [node.span.error for node in drives] == [None, "PaymentUnanswered", None]
    # The third tried again what the second had failed at.
    assert [node.span.attributes["attempt"] for node in drives] == [1, 1, 2]
    assert len({node.span.attributes["pid"] for node in drives}) == 3

    [asked] = nodes_of(tree, "chat gpt-test")
    assert asked.span.kind == "client"
    assert asked.span.attributes == {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "openai",
        "gen_ai.request.model": "gpt-test",
        "gen_ai.response.model": "m",
        "gen_ai.usage.input_tokens": 120,
        "gen_ai.usage.output_tokens": 34,
        "server.address": "127.0.0.1",
    }
    assert tree.tokens == (120, 34)
    paying = nodes_of(tree, "POST")
    assert [node.span.attributes["http.response.status_code"] for node in paying] == [503, 201]
    assert [node.span.error for node in paying] == ["503", None]

    [wait] = nodes_of(tree, "wait for approval")
    assert [shape(child) for child in wait.children] == ["approve"]
    assert wait.span.ended_at is not None
    assert tree.root.waiting == wait.waiting == wait.span.ended_at - wait.span.started_at
    assert wait.children[0].span.attributes["door"] == "cli"

    [card, *_] = [node for node in tree.root.children if node.span.name == "deliver card"]
    assert "slack chat.postMessage" in [child.span.name for child in card.children]
    answers = [node.span.attributes["http.response.status_code"] for node in nodes_of(tree, "webhook acme")]
    assert (answers[0], set(answers[1:])) == (503, {200})
    assert len(answers) == len(hooks.received)
    [payment] = nodes_of(tree, "payment")
    assert payment.span.attributes == {"provider": "http", "status": "paid", "attempts": 2}
    # Every span is in the one tree, and below what made it.
    rows = await all_rows(conn, "SELECT span_id FROM spans")
    assert {row["span_id"] for row in rows} < {node.span.span_id for _, node in tree.root.each()}


async def test_nothing_private_is_in_a_trace(
    conn: Connection, terminal: Terminal, world: tuple[Bank, FaultyModel, QuietSlack, HookServer]
) -> None:
    bank, model, *_ = world
    bank.faults.append(400)
    assert (await terminal.run_meanwhile("start", "--thread", "t1", *CLAIM)).code == 0
    reason = ("--reason", "my secret reason")
    refused = await terminal.run_meanwhile("resume", "--thread", "t1", "--approve", *reason)
    assert "told to answer 400" in refused.err
    asked = json.dumps(model.requests)
    assert "Dear Payee" in asked and "secret office" in asked
    text = str(await all_rows(conn, "SELECT * FROM spans")) + json.dumps((await tree_of(conn, "t1")).as_json())
    assert "chat gpt-test" in text
    for private in ("Dear Payee", "secret", "sk-test", "xoxb", "told to answer", "concrete reason for doubt"):
        assert private not in text, private


async def test_what_models_are_asked_is_kept_if_somebody_wants_it_without_secrets(
    conn: Connection, flows: Flows
) -> None:
    key = "sk-live-0123456789abcdef"
    async with FaultyModel(content(advice(f"Chairs. {key}"))) as model:
        adviser = Adviser(api_key="sk-x", base_url=model.base_url, model="m")
        await start_claim(conn, "t1", "20")
        hide = hider(frozenset())
        assert await drive(conn, "t1", flows=flows, policy=POLICY, adviser=adviser, hide=hide) == "over"
    said = (await the_span(conn, "chat m")).attributes
    [rules, asked] = json.loads(said["gen_ai.input.messages"])
    assert (rules["role"], asked["role"]) == ("system", "user")
    assert "three chairs" in asked["parts"][0]["content"]
    [answer] = json.loads(said["gen_ai.output.messages"])
    assert (answer["role"], "Chairs. ***" in answer["parts"][0]["content"]) == ("assistant", True)
    assert key not in str(said)


@pytest.mark.parametrize(
    "messages", [[("system", "rules"), ("user", 'so "long" ' * 10_000)], [("user", f"{n}: words") for n in range(9000)]]
)
def test_what_is_too_long_to_be_kept_is_still_messages(messages: list[tuple[str, str]]) -> None:
    recorder = Recorder("work", hide=hider(frozenset()))
    with recorded_by(recorder), span("chat") as call:
        call.note(asked=messages_kept(messages))
    [chat, _] = json.loads(recorder.rows())
    said = json.loads(chat["said"]["asked"])
    (role, text), last = messages[-1], said[-1]
    assert last["role"] == role
    kept = last["parts"][0]["content"]
    assert text.startswith(kept) and len(kept) >= min(len(text), 5_000)
    assert len(said) == min(len(messages), 100)


def test_only_who_sets_it_keeps_what_models_are_asked() -> None:
    given: dict[str, Any] = {"openai_api_key": "sk-secret-key-of-ours"}
    assert hider_of_content(Settings(**given)) is None
    hide = hider_of_content(Settings(**given, trace_content=True))
    assert hide is not None
    assert hide("it was sk-secret-key-of-ours") == "it was ***"


# Death


def drive_until_killed(url: str) -> None:
    """Die in the midst of the payment."""
    import os
    import signal

    class Lethal:
        name, address, key_lifetime_s, timeout_s, answers_by_key = "lethal", "here", 86_400.0, 2.0, True

        async def pay(self, _: Any) -> str:
            os.kill(os.getpid(), signal.SIGKILL)
            return ""

        async def look_up(self, _: Any) -> str | None:
            return None

    async def one() -> None:
        async with await connect(url, "drive") as conn:
            await drive(conn, "t1", flows=Flows([CLAIMS]), policy=POLICY, provider=Lethal())

    asyncio.run(one())


async def test_a_killed_drive_loses_its_own_spans_alone_and_the_next_one_says_so(
    conn: Connection, flows: Flows, database_url: str
) -> None:
    await start_claim(conn)
    assert await run(conn, flows) == "waiting"
    interrupt_id: str = await value(conn, "SELECT interrupt_id FROM approvals")
    await decide(conn, interrupt_id, ALICE, YES)
    assert await end_of(start_process(drive_until_killed, database_url)) == -9

    class Mended:
        name, address, key_lifetime_s, timeout_s, answers_by_key = "lethal", "here", 86_400.0, 2.0, True

        async def pay(self, _: Any) -> str:
            return "P-1"

        async def look_up(self, _: Any) -> str | None:
            return None

    async def driven() -> str | None:
        outcome = await drive(conn, "t1", flows=flows, policy=POLICY, provider=Mended())
        # The killed one's session lets go a moment after it.
        return outcome if outcome != "locked" else None

    assert await until(driven) == "over"
    tree = await tree_of(conn, "t1")
    assert drives_of(tree) == [
        ("drive", ["intake", "decide", "approve"]),
        ("drive", [("pay", ["pay by lethal"])]),
    ]
    last = nodes_of(tree, "drive")[-1].span.attributes
    assert (last["attempt"], last["taken_over"], last["outcome"]) == (2, True, "paid")


# Flows of any shape


class Numbers(TypedDict, total=False):
    done: Annotated[list[int], operator.add]
    result: list[int]


class NoInput(BaseModel):
    pass


def flow_of(graph: StateGraph[Any, Any, Any, Any]) -> Flows:
    """A flow of somebody's own, called `own`."""
    return Flows(
        [Flow(name="own", version="1", build=lambda: graph, input=NoInput, result=lambda state: state["done"])]
    )


async def start_own(conn: Connection) -> None:
    await threads.insert_thread(conn, thread_id="t1", flow="own", flow_version="1", input={}, requested_by=ANN.key)


@idempotent
async def measure(number: int) -> int:
    with span("within", kind="client"):
        return number


@idempotent
def measure_slowly(number: int) -> int:
    return number


async def test_branches_inner_graphs_and_thread_pools_have_each_their_place(conn: Connection) -> None:
    inner = StateGraph(Numbers)

    async def deep(state: Numbers) -> Numbers:
        return {"done": [await measure(1)]}

    inner.add_node("deep", deep)
    inner.add_edge(START, "deep")
    inner.add_edge("deep", END)

    def pooled(state: Numbers) -> Numbers:
        with ThreadPoolExecutor(2) as pool:
            return {"done": sorted(pool.map(measure_slowly, [2, 3]))}

    async def failing(state: Numbers) -> Numbers:
        if not await value(conn_of_test, "SELECT count(*) FROM spans"):
            await measure(4)
            raise OSError("with a secret in it")
        return {"done": [4]}

    graph = StateGraph(Numbers)
    graph.add_node("inner", inner.compile())
    graph.add_node("pooled", pooled)
    graph.add_node("failing", failing)
    graph.add_edge(START, "inner")
    graph.add_edge(START, "pooled")
    graph.add_edge(["inner", "pooled"], "failing")
    graph.add_edge("failing", END)
    flows = flow_of(graph)
    await start_own(conn)
    async with await connect(conn_url(conn), "door") as conn_of_test:
        with pytest.raises(DriveFailed):
            await drive(conn, "t1", flows=flows, policy=POLICY)
        await conn.execute("UPDATE threads SET due_at = clock_timestamp()")
        assert await drive(conn, "t1", flows=flows, policy=POLICY) == "over"
    tree = await tree_of(conn, "t1")
    [first, second] = [node for node in tree.root.children if node.span.name == "drive"]
    shapes = dict(shape(child) for child in first.children)
    assert shapes == {
        "inner": [("deep", [("measure", ["within"])])],
        "pooled": ["measure_slowly", "measure_slowly"],
        "failing": [("measure", ["within"])],
    }
    [failed] = nodes_of(tree, "failing")[:1]
    assert failed.span.error == "OSError"
    assert first.span.error == "OSError"
    # What was done before is not done again, and not said to be.
    assert shape(second) == ("drive", ["failing"])
    assert "secret" not in str(await all_rows(conn, "SELECT * FROM spans"))


def conn_url(conn: Connection) -> str:
    return conn.info.dsn


async def test_a_call_that_fails_and_is_made_again_is_two_attempts(conn: Connection) -> None:
    failures = [OSError("no")]

    @idempotent
    async def flaky() -> int:
        if failures:
            raise failures.pop()
        return 1

    async def node(state: Numbers) -> Numbers:
        return {"done": [await flaky()]}

    graph = StateGraph(Numbers)
    graph.add_node("node", node)
    graph.add_edge(START, "node")
    graph.add_edge("node", END)
    flows = flow_of(graph)
    await start_own(conn)
    with pytest.raises(DriveFailed):
        await drive(conn, "t1", flows=flows, policy=POLICY)
    assert await drive(conn, "t1", flows=flows, policy=POLICY) == "over"
    tried = [each for each in await spans_of(conn, "t1") if each.name.endswith("flaky")]
    assert [(each.attributes["attempt"], each.error) for each in tried] == [(1, "OSError"), (2, None)]


@pytest.mark.parametrize("kept", [False, True], ids=["not kept", "kept"])
async def test_a_model_that_a_flow_calls_through_langchain_is_recorded_with_its_tokens(
    conn: Connection, kept: bool
) -> None:
    answer = AIMessage(
        content="a secret answer",
        usage_metadata={"input_tokens": 7, "output_tokens": 5, "total_tokens": 12},
        response_metadata={"model_name": "gpt-test-2026"},
    )
    model = GenericFakeChatModel(messages=iter([answer]), metadata={"ls_provider": "openai"})

    async def think(state: Numbers) -> Numbers:
        await model.ainvoke("a secret question", config={"metadata": {"ls_model_name": "gpt-test"}})
        return {"done": [1]}

    graph = StateGraph(Numbers)
    graph.add_node("think", think)
    graph.add_edge(START, "think")
    graph.add_edge("think", END)
    await start_own(conn)
    hide = hider(frozenset()) if kept else None
    assert await drive(conn, "t1", flows=flow_of(graph), policy=POLICY, hide=hide) == "over"
    tree = await tree_of(conn, "t1")
    assert tree.tokens == (7, 5)
    [call] = [node for _, node in tree.root.each() if node.span.kind == "client"]
    assert call.span.attributes["gen_ai.response.model"] == "gpt-test-2026"
    assert call.span.parent_id == nodes_of(tree, "think")[0].span.span_id
    text = str(await all_rows(conn, "SELECT * FROM spans"))
    assert ("a secret question" in text, "a secret answer" in text) == (kept, kept)


async def test_a_flow_of_many_steps_writes_its_spans_meanwhile(
    conn: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("flow.spans._MANY", 3)
    seen: list[int] = []

    async def step(state: Numbers) -> Numbers:
        seen.append(len(seen))
        return {"done": [len(seen)]}

    async def crash(state: Numbers) -> Numbers:
        await conn.close()
        return {}

    graph = StateGraph(Numbers)
    names = [f"step-{number}" for number in range(5)]
    for name in names:
        graph.add_node(name, step)
    graph.add_node("crash", crash)
    graph.add_edge(START, names[0])
    for one, following in zip(names, [*names[1:], "crash"], strict=True):
        graph.add_edge(one, following)
    await start_own(conn)
    url = conn_url(conn)
    with contextlib.suppress(Exception):
        await drive(conn, "t1", flows=flow_of(graph), policy=POLICY)
    async with await connect(url, "door") as other:
        assert [each.name for each in await spans_of(other, "t1")] == names[:3]
        # Their drive was lost: they are the thread's.
        tree = await tree_of(other, "t1")
        assert [child.span.name for child in tree.root.children] == ["start", *names[:3]]


# The trace context of the caller


async def test_a_caller_of_the_api_goes_on_with_its_own_trace(conn: Connection, database_url: str) -> None:
    async with api_in_process(database_url) as url, Program(url, await token(conn)) as program:
        for thread_id, headers in (("t1", {"traceparent": CALLER}), ("t2", {}), ("t3", {"traceparent": "00-junk"})):
            body = {"thread": thread_id, "amount": "20", "currency": "USD"}
            answered = await program.post("/api/threads", body, headers=headers)
            assert answered.status == 201, answered.body
    trees = [await tree_of(conn, thread_id) for thread_id in ("t1", "t2", "t3")]
    assert (trees[0].trace_id, trees[0].root.span.parent_id) == (CALLER[3:35], CALLER[36:52])
    assert len({tree.trace_id for tree in trees}) == 3
    assert [tree.root.span.parent_id for tree in trees[1:]] == [None, None]
    assert await value(conn, "SELECT count(*) FROM threads WHERE traceparent IS NOT NULL") == 1


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        ([CALLER], CALLER),
        ([f"01{CALLER[2:]}-what-is-more"], f"01{CALLER[2:]}"),
        ([], None),
        ([CALLER, CALLER], None),
        ([CALLER.upper()], None),
        ([f"ff{CALLER[2:]}"], None),
        ([f"{CALLER}-more"], None),
        ([f"{CALLER}-"], None),
        ([f"01{CALLER[2:]}more"], None),
        ([f"00-{'0' * 32}-b7ad6b7169203331-01"], None),
        ([f"00-0af7651916cd43dd8448eb211c80319c-{'0' * 16}-01"], None),
    ],
)
def test_a_trace_context_is_taken_as_the_standard_says(given: list[str], kept: str | None) -> None:
    assert parse_traceparent(given) == kept


async def test_two_installations_have_two_traces_for_one_thread_id(conn: Connection) -> None:
    await start_claim(conn)
    before = await tree_of(conn, "t1")
    assert (await tree_of(conn, "t1")).trace_id == before.trace_id
    await conn.execute("UPDATE installation SET id = gen_random_uuid()")
    after = await tree_of(conn, "t1")
    assert (after.trace_id != before.trace_id, after.root.span.span_id != before.root.span.span_id) == (True, True)


# Waiting


async def test_waits_side_by_side_are_counted_once(conn: Connection) -> None:
    """Two approvals of one thread that overlap by half."""
    await start_claim(conn)
    add: LiteralString = (
        "INSERT INTO approvals (interrupt_id, thread_id, tier, request, request_hash, requested_by, approvers,"
        " required, rank, status, requested_at, settled_at) VALUES (%s, 't1', %s, '{}', '', 'cli:ann', '{}',"
        " 1, 0, 'approved',"
        " (SELECT created_at FROM threads) + %s * interval '1 hour', (SELECT created_at FROM threads) + %s * interval"
        " '1 hour')"
    )
    await conn.execute(add, ("a" * 32, "one", 1, 3))
    await conn.execute(add, ("b" * 32, "two", 2, 4))
    tree = await tree_of(conn, "t1")
    assert tree.root.waiting.total_seconds() == 3 * 3600
    assert [node.waiting.total_seconds() for node in tree.root.children] == [0, 2 * 3600, 2 * 3600]


# The command


async def test_the_command_prints_the_tree(conn: Connection, flows: Flows, database_url: str, tmp_path: Path) -> None:
    await start_claim(conn)
    await run(conn, flows)
    await decide(conn, await value(conn, "SELECT interrupt_id FROM approvals"), ALICE, YES)
    await run(conn, flows)
    await conn.execute("UPDATE spans SET name = E'pay \u202e\x1b[31m' WHERE name = 'pay'")
    terminal = Terminal(tmp_path, DATABASE_URL=database_url)
    shown = terminal.run("trace", "--thread", "t1")
    assert shown.code == 0, shown.err
    lines = shown.out.splitlines()
    first = lines[1].split()
    assert first[:2] == ["thread", "claims"]
    assert [line for line in lines if "pay \\u{202e}\\u{1b}[31m" in line]
    assert "\x1b" not in shown.out
    assert any("wait for approval" in line for line in lines)
    tree = await tree_of(conn, "t1")
    assert lines[-1].startswith(f"trace {tree.trace_id}: ")
    assert lines[-1].endswith(" of it waiting for people")
    said = terminal.run("trace", "--thread", "t1", "--json").json
    assert said == json.loads(json.dumps(tree.as_json()))
    assert said["root"]["children"][1]["parent_id"] == said["root"]["span_id"]
    assert 0 < said["waiting_ms"] < said["duration_ms"]


def test_of_an_unknown_thread_nothing_is_shown(tmp_path: Path, database_url: str) -> None:
    refused = Terminal(tmp_path, DATABASE_URL=database_url).run("trace", "--thread", "t9")
    assert (refused.code, refused.out) == (1, "")
    assert "no thread t9" in refused.err


async def test_a_tree_of_an_unknown_thread_is_refused(conn: Connection) -> None:
    with pytest.raises(UnknownThread):
        await tree_of(conn, "t9")


# Off, and forgotten


async def test_spans_false_records_nothing(conn: Connection, terminal: Terminal) -> None:
    terminal.environment["SPANS"] = "false"
    assert (await terminal.run_meanwhile("start", "--thread", "t1", *CLAIM)).code == 0
    assert (await terminal.run_meanwhile("work", "--once")).code == 0
    assert await value(conn, "SELECT count(*) FROM spans") == 0
    assert (await terminal.run_meanwhile("trace", "--thread", "t1")).code == 0


async def test_spans_are_forgotten_by_their_age_whatever_their_thread_is_doing(conn: Connection, flows: Flows) -> None:
    keep = Keep(checkpoints_s=None, events_s=None, spans_s=30 * 86_400)
    await start_claim(conn)
    await run(conn, flows)
    old = 2 * BATCH + 1
    await conn.execute(
        "INSERT INTO spans (thread_id, span_id, name, kind, started_at, ended_at)"
        " SELECT 't1', lpad(to_hex(n), 16, '0'), 'old', 'internal', now() - interval '31 days', now()"
        " FROM generate_series(1, %s) n",
        (old,),
    )
    young = await value(conn, "SELECT count(*) FROM spans WHERE name <> 'old'")
    assert (await foresee(conn, keep)).tables["spans"].rows == old
    done = await prune(conn, keep)
    assert done.tables["spans"].rows == old
    assert await value(conn, "SELECT count(*) FROM spans") == young > 0
    forever = Keep(checkpoints_s=None, events_s=None, spans_s=None)
    await conn.execute("UPDATE spans SET started_at = now() - interval '9 years'")
    assert "spans" not in (await prune(conn, forever)).tables


async def test_what_is_to_be_forgotten_is_found_by_an_index(conn: Connection) -> None:
    await conn.execute(
        "INSERT INTO spans (thread_id, span_id, name, kind, started_at, ended_at)"
        " SELECT 't1', lpad(to_hex(n), 16, '0'), 'x', 'internal', now() - n * interval '1 minute', now()"
        " FROM generate_series(1, 20000) n"
    )
    await conn.execute("ANALYZE spans")
    plan = await all_rows(
        conn,
        "EXPLAIN SELECT ctid FROM spans WHERE started_at < statement_timestamp() - 1000000 * interval '1 second'"
        " ORDER BY started_at LIMIT 200 FOR UPDATE SKIP LOCKED",
    )
    assert "spans_oldest" in str(plan)


# Slack refuses


async def test_what_slack_refuses_is_said_with_its_code(conn: Connection, terminal: Terminal, world: Any) -> None:
    slack: QuietSlack = world[2]
    slack.refuses[CHANNEL] = "not_in_channel"
    assert (await terminal.run_meanwhile("start", "--thread", "t1", *CLAIM)).code == 0

    async def refused() -> list[Span]:
        return await spans_named(conn, "slack chat.postMessage")

    [call, *_] = await until(refused)
    assert call.error == "SlackApiError"
    assert call.attributes["slack.error"] == "not_in_channel"
    [delivery, *_] = await spans_named(conn, "deliver card")
    assert (delivery.error, call.parent_id) == ("SlackApiError", delivery.span_id)
