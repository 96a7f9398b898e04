"""Traces reach a collector and Langfuse whole, whatever becomes of either meanwhile."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, LiteralString

import pytest
from pydantic import SecretStr

from bot.blocks import alarm
from bot.doctor import examine
from bot.findings import Finding
from bot.otlp import span_as_json, targets_of
from bot.traces_out import MOST_BYTES, MOST_SPANS, TraceSender
from flow import exports
from flow.approvals import decide
from flow.database import Connection
from flow.errors import SettingError
from flow.notices import failures_of
from flow.retention import Keep, foresee, prune
from flow.settings import Settings, read_settings
from flow.threads import thread_of
from tests.collector import Collector, Fault
from tests.command import Terminal
from tests.local_slack import free_port
from tests.model_server import KEY, FaultyModel, advice, content
from tests.people import ALICE, YES, ask, start_claim
from tests.rows import all_rows, one_row, until, value

# Long enough for a local answer on a busy machine, short beside the one that never comes.
PATIENCE_S = 3.0

LANGFUSE_PATH = "/api/public/otel/v1/traces"


@pytest.fixture
async def collector(conn: Connection) -> AsyncIterator[Collector]:
    """A collector, from before anything happens."""
    await exports.add_targets(conn, ["otlp"])
    async with Collector() as made:
        yield made
    assert made.mistakes == []


@pytest.fixture
async def langfuse(conn: Connection) -> AsyncIterator[Collector]:
    await exports.add_targets(conn, ["langfuse"])
    keys = base64.b64encode(b"pk-lf-1:sk-lf-2").decode()
    wants = {"Authorization": f"Basic {keys}", "x-langfuse-ingestion-version": "4"}
    async with Collector(path=LANGFUSE_PATH, wants=wants) as made:
        yield made
    assert made.mistakes == []


def to(*collectors: Collector, **more: Any) -> Settings:
    """The settings with these targets."""
    for each in collectors:
        if each.path == LANGFUSE_PATH:
            more |= {"langfuse_public_key": "pk-lf-1", "langfuse_base_url": each.url}
            more.setdefault("langfuse_secret_key", SecretStr("sk-lf-2"))
        else:
            more["otel_exporter_otlp_endpoint"] = each.url
    return Settings(**more)


async def sweep(url: str, settings: Settings) -> tuple[int, int]:
    """Send once what is due: of how many threads it was sent, and of how many not."""
    async with TraceSender.of(settings, call_s=PATIENCE_S) as sender:
        return await sender.sweep(url)


async def record(conn: Connection, thread_id: str, *names: str, **said: str) -> None:
    """Spans of the thread, as whoever ends work writes them."""
    for name in names:
        await conn.execute(
            "INSERT INTO spans (thread_id, span_id, name, kind, started_at, ended_at, attributes)"
            " SELECT %s, substr(md5(random()::text), 1, 16), %s, 'internal', now(), now(), %s::jsonb",
            (thread_id, name, json.dumps(said)),
        )


async def traced(conn: Connection, thread_id: str = "t1", *names: str) -> None:
    """A thread that goes on, and has spans."""
    await start_claim(conn, thread_id)
    await record(conn, thread_id, *(names or ("intake",)))


async def let_time_pass(conn: Connection) -> None:
    """Until every target may be asked again, and every lease has run out."""
    await conn.execute("UPDATE trace_targets SET quiet_until = clock_timestamp() WHERE quiet_until IS NOT NULL")
    await conn.execute("UPDATE trace_exports SET due_at = clock_timestamp() WHERE due_at IS NOT NULL")


async def quiet_s(conn: Connection) -> float:
    """For how long the only target is left alone."""
    found: float = await value(
        conn, "SELECT extract(epoch FROM quiet_until - clock_timestamp())::float8 FROM trace_targets"
    )
    return found


async def rows_left(conn: Connection) -> int:
    found: int = await value(
        conn,
        "SELECT (SELECT count(*) FROM trace_targets) + (SELECT count(*) FROM trace_marks)"
        " + (SELECT count(*) FROM trace_exports)",
    )
    return found


def names(collector: Collector, *, of_request: int | None = None) -> list[str]:
    """What was recorded, without what every thread has."""
    found = collector.spans if of_request is None else collector.requests[of_request]
    return sorted(span.name for span in found if span.name not in ("start", "thread claims"))


# Whole


async def test_a_claim_of_three_processes_arrives_as_one_trace(
    database_url: str, conn: Connection, collector: Collector, langfuse: Collector, tmp_path: Path
) -> None:
    async with FaultyModel(content(advice())) as model:
        terminal = Terminal(
            tmp_path,
            DATABASE_URL=database_url,
            OTEL_EXPORTER_OTLP_ENDPOINT=collector.url,
            LANGFUSE_PUBLIC_KEY="pk-lf-1",
            LANGFUSE_SECRET_KEY="sk-lf-2",
            LANGFUSE_HOST=langfuse.url,
            OPENAI_API_KEY=KEY,
            OPENAI_BASE_URL=model.base_url,
        )
        words = ("--amount", "250", "--payee", "Zephyrine", "--note", "for the quiet birthday")
        assert (await terminal.run_meanwhile("start", "--thread", "t1", *words)).code == 0
    assert (await terminal.run_meanwhile("deliver")).out == "2 sent, 0 not\n"
    [early] = collector.traces.values()
    assert not any(span.name.startswith(("wait for", "thread")) for span in early.values())
    decided = await terminal.run_meanwhile("resume", "--thread", "t1", "--approve", "--reason", "because of cake")
    assert decided.code == 0
    assert (await terminal.run_meanwhile("deliver")).out == "2 sent, 0 not\n"
    assert (await terminal.run_meanwhile("deliver")).out == "0 sent, 0 not\n"

    [(trace_id, trace)] = collector.traces.items()
    assert trace_id == await value(conn, "SELECT trace_of(thread_id, traceparent) FROM threads")
    [root] = [span for span in trace.values() if span.above is None]
    assert root.name == "thread claims"
    assert all(span.above in trace for span in trace.values() if span is not root)
    assert all(root.start_ns <= span.start_ns for span in trace.values())
    found = [span.name for span in trace.values()]
    assert found.count("drive") == 2
    assert {"start", "intake", "wait for approval", "approve", "pay", "payment"} <= set(found)
    # Nothing was sent twice.
    assert (
        len(collector.spans) == len(trace) == await value(conn, "SELECT cardinality(sent) FROM trace_exports LIMIT 1")
    )
    # Langfuse has the same, and knows the model's call.
    assert langfuse.traces.keys() == collector.traces.keys()
    assert langfuse.traces[trace_id].keys() == trace.keys()
    [call] = [span for span in langfuse.spans if span.said.get("langfuse.observation.type") == "generation"]
    assert (call.said["gen_ai.usage.input_tokens"], call.said["gen_ai.usage.output_tokens"]) == (100, 20)
    for word in (b"Zephyrine", b"birthday", b"cake", KEY.encode(), b"sk-lf-2", b"Three chairs", b"no receipt"):
        assert word not in collector.raw + langfuse.raw


async def test_a_server_sends_them_by_itself_and_one_without_the_setting_forgets_what_was_left(
    database_url: str, conn: Connection, tmp_path: Path
) -> None:
    async with Collector() as collector:
        settings = {"DATABASE_URL": database_url, "PORT": str(free_port()), "STAND_BY": "1"}
        terminal = Terminal(tmp_path, OTEL_EXPORTER_OTLP_ENDPOINT=collector.url, **settings)

        async def has_all_of_t1() -> bool:
            return "thread claims" in [span.name for span in collector.spans]

        async with terminal.service("serve") as serve:
            assert (await terminal.run_meanwhile("start", "--thread", "t1", "--amount", "20")).code == 0
            await serve.until(has_all_of_t1)
        assert collector.mistakes == []
    # Nobody is there to take what is of this one.
    assert (await terminal.run_meanwhile("start", "--thread", "t2", "--amount", "250")).code == 0
    assert await rows_left(conn) > 2

    async def is_empty() -> bool:
        return await rows_left(conn) == 0

    del terminal.environment["OTEL_EXPORTER_OTLP_ENDPOINT"]
    async with terminal.service("bot") as bot:
        await bot.until(is_empty)


# What is sent, and how often


async def test_a_span_is_sent_once_and_a_later_one_when_it_has_ended(
    database_url: str, conn: Connection, collector: Collector
) -> None:
    await traced(conn, "t1", "intake", "decide")
    assert await sweep(database_url, to(collector)) == (1, 0)
    assert names(collector) == ["decide", "intake"]
    assert await sweep(database_url, to(collector)) == (0, 0)
    await record(conn, "t1", "pay")
    assert await sweep(database_url, to(collector)) == (1, 0)
    assert names(collector, of_request=1) == ["pay"]
    # The end of the thread is the end of its root.
    await conn.execute("UPDATE threads SET status = 'paid', due_at = NULL WHERE thread_id = 't1'")
    assert await sweep(database_url, to(collector)) == (1, 0)
    [root] = collector.requests[2]
    assert root.above is None
    [trace] = collector.traces.values()
    assert {span.above for span in trace.values() if span is not root} == {root.id}


async def test_what_a_long_drive_wrote_before_its_end_is_sent_below_it(
    database_url: str, conn: Connection, collector: Collector
) -> None:
    """It writes some of its spans meanwhile, and itself last; a drive that was killed, never."""
    await start_claim(conn)
    add: LiteralString = (
        "INSERT INTO spans (thread_id, span_id, parent_id, name, kind, started_at, ended_at)"
        " VALUES ('t1', %s, %s, %s, 'internal', now(), now())"
    )
    await conn.execute("UPDATE threads SET driver_pid = 1")
    await conn.execute(add, ("b" * 16, "a" * 16, "node"))
    await conn.execute(add, ("d" * 16, "c" * 16, "lost"))
    await sweep(database_url, to(collector))
    assert names(collector) == []
    await conn.execute("UPDATE threads SET driver_pid = NULL")
    await conn.execute(add, ("a" * 16, None, "drive"))
    await sweep(database_url, to(collector))
    above = {span.name: span.above for span in collector.spans}
    root = above["start"]
    assert above == {"start": root, "drive": root, "node": "a" * 16, "lost": root}


async def test_it_says_what_it_is_from_and_of_which_thread(
    database_url: str, conn: Connection, collector: Collector
) -> None:
    await traced(conn)
    settings = to(collector, otel_service_name="claims", otel_resource_attributes="deployment.environment.name=a%2Cb")
    await sweep(database_url, settings)
    [span, _] = sorted(collector.spans, key=lambda span: span.name)
    assert (span.about["service.name"], span.about["deployment.environment.name"]) == ("claims", "a,b")
    assert (span.name, span.said["claim_flow.thread"]) == ("intake", "t1")
    row = await one_row(
        conn, "SELECT trace_of(thread_id, traceparent) AS trace, root_of(thread_id) AS root FROM threads"
    )
    assert (span.trace, span.above) == (row["trace"], row["root"])


async def test_the_trace_of_whoever_started_the_thread_goes_on(
    database_url: str, conn: Connection, collector: Collector
) -> None:
    await traced(conn)
    await conn.execute(
        "UPDATE threads SET traceparent = '00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01', status = 'paid',"
        " due_at = NULL"
    )
    await sweep(database_url, to(collector))
    [trace] = collector.traces
    assert trace == "4bf92f3577b34da6a3ce929d0e0e4736"
    assert "00f067aa0ba902b7" in [span.above for span in collector.spans]


async def test_each_target_gets_everything_and_one_that_is_away_holds_up_no_other(
    database_url: str, conn: Connection, collector: Collector, langfuse: Collector
) -> None:
    langfuse.usual = Fault(status=503)
    await traced(conn)
    assert await sweep(database_url, to(collector, langfuse)) == (1, 1)
    assert names(collector) == ["intake"]
    langfuse.usual = Fault()
    await let_time_pass(conn)
    assert await sweep(database_url, to(collector, langfuse)) == (1, 0)
    assert names(langfuse) == names(collector) == ["intake"]


async def test_langfuse_is_told_which_spans_are_calls_of_a_model(
    database_url: str, conn: Connection, langfuse: Collector
) -> None:
    await start_claim(conn)
    await record(conn, "t1", "intake")
    await conn.execute(
        "INSERT INTO spans (thread_id, span_id, name, kind, started_at, ended_at, attributes) VALUES ('t1',"
        " 'aaaaaaaaaaaaaaaa', 'chat m', 'client', now(), now(), '{\"gen_ai.request.model\": \"m\","
        ' "gen_ai.usage.input_tokens": 90, "gen_ai.usage.output_tokens": 30, "gen_ai.input.messages": "[]"}\')'
    )
    await sweep(database_url, to(langfuse))
    said = {span.name: span.said for span in langfuse.spans}
    assert said["chat m"]["langfuse.observation.type"] == "generation"
    assert said["chat m"]["gen_ai.usage.input_tokens"] == 90
    assert said["chat m"]["langfuse.observation.input"] == "[]"
    assert "langfuse.observation.type" not in said["intake"]
    assert {each["langfuse.trace.name"] for each in said.values()} == {"thread claims"}


async def test_what_is_new_while_a_request_is_on_its_way_is_sent_after_it(
    database_url: str, conn: Connection, collector: Collector
) -> None:
    held = asyncio.Event()
    collector.faults.append(Fault(held=held))
    await traced(conn)
    async with asyncio.TaskGroup() as group:
        sending = group.create_task(sweep(database_url, to(collector)))
        await until(collector.was_asked)
        await record(conn, "t1", "pay")
        await exports.spread(conn)
        held.set()
    assert sending.result() == (2, 0)
    assert [names(collector, of_request=number) for number in range(2)] == [["intake"], ["pay"]]


async def test_what_a_sender_took_with_it_is_sent_by_the_next(
    database_url: str, conn: Connection, collector: Collector
) -> None:
    await traced(conn)
    await exports.spread(conn)
    [taken] = await exports.lease(conn, "otlp")
    assert await sweep(database_url, to(collector)) == (0, 0)
    await let_time_pass(conn)
    assert await sweep(database_url, to(collector)) == (1, 0)
    # It comes back, and has nothing to say any more.
    await exports.put_off(conn, [taken], error="too late")
    assert await value(conn, "SELECT due_at IS NULL FROM trace_exports")


async def test_two_senders_side_by_side_send_each_span_once(
    database_url: str, conn: Connection, collector: Collector
) -> None:
    for number in range(200):
        await traced(conn, f"t{number}")
    counts = await asyncio.gather(*(sweep(database_url, to(collector)) for _ in range(3)))
    assert sum(sent for sent, _ in counts) == len(names(collector)) == len(collector.threads) == 200


async def test_writers_and_senders_side_by_side_wait_for_nobody_and_lose_nothing(
    database_url: str, conn: Connection, crowd: list[Connection], collector: Collector
) -> None:
    threads = [f"t{number}" for number in range(40)]
    for thread_id in threads:
        await start_claim(conn, thread_id)

    async def write(conn: Connection, who: int) -> None:
        for turn in range(5):
            # Each in another order, and in transactions of several threads.
            mixed = threads[turn * who :] + threads[: turn * who]
            async with conn.transaction():
                for thread_id in mixed[:: who + 1]:
                    await record(conn, thread_id, f"{who}-{turn}")

    async def send() -> None:
        for _ in range(4):
            await sweep(database_url, to(collector))

    await asyncio.gather(*(write(each, who) for who, each in enumerate(crowd)), *(send() for _ in range(3)))
    await sweep(database_url, to(collector))
    recorded = await value(conn, "SELECT count(*) FROM spans")
    assert len({span.id for span in collector.spans}) == recorded + len(threads)
    assert await value(conn, "SELECT count(*) FROM trace_exports WHERE due_at IS NOT NULL") == 0


# How much at a time


async def test_a_thousand_threads_do_not_make_one_request(
    database_url: str, conn: Connection, collector: Collector
) -> None:
    await conn.execute(
        "INSERT INTO threads (thread_id, flow, flow_version, input, requested_by)"
        " SELECT 'many-' || n, 'claims', '1', '{}', 'cli:ann' FROM generate_series(1, 1000) n"
    )
    await conn.execute(
        "INSERT INTO spans (thread_id, span_id, name, kind, started_at, ended_at)"
        " SELECT 'many-' || n, lpad(to_hex(n * 100 + k), 16, '0'), 'node', 'internal', now(), now()"
        " FROM generate_series(1, 1000) n, generate_series(1, 20) k"
    )
    assert await sweep(database_url, to(collector)) >= (1000, 0)
    assert len(names(collector)) == 20_000
    assert max(map(len, collector.requests)) <= MOST_SPANS
    assert max(collector.sizes) <= MOST_BYTES * 1.1
    assert await value(conn, "SELECT count(*) FROM trace_exports WHERE due_at IS NOT NULL") == 0


async def test_a_thread_of_many_spans_takes_several_requests(
    database_url: str, conn: Connection, collector: Collector
) -> None:
    await start_claim(conn)
    await conn.execute(
        "INSERT INTO spans (thread_id, span_id, name, kind, started_at, ended_at)"
        " SELECT 't1', lpad(to_hex(k), 16, '0'), 'node', 'internal', now(), now() FROM generate_series(1, 1234) k"
    )
    await sweep(database_url, to(collector))
    # All of them, and its start.
    assert [len(each) for each in collector.requests] == [500, 500, 235]
    assert len({span.id for span in collector.spans}) == 1235


async def test_long_texts_make_a_request_shorter(database_url: str, conn: Connection, collector: Collector) -> None:
    await start_claim(conn)
    for _ in range(30):
        await record(conn, "t1", "chat", prompt="long " * 20_000)
    await sweep(database_url, to(collector))
    assert len(names(collector)) == 30
    assert max(collector.sizes) <= MOST_BYTES * 1.1


# A target that is away


async def test_a_collector_that_is_down_for_a_while_gets_everything_afterwards(
    database_url: str, conn: Connection
) -> None:
    async with Collector() as collector:
        settings, port = to(collector), collector.port
    await exports.add_targets(conn, ["otlp"])
    await traced(conn, "t1")
    assert await sweep(database_url, settings) == (0, 1)
    waits = [await quiet_s(conn)]
    await traced(conn, "t2")
    # It is left alone meanwhile.
    assert await sweep(database_url, settings) == (0, 0)
    for _ in range(8):
        await let_time_pass(conn)
        assert await sweep(database_url, settings) == (0, 2)
        waits.append(await quiet_s(conn))
    assert waits == pytest.approx([5, 10, 20, 40, 80, 160, 300, 300, 300], abs=3)
    async with Collector(port=port) as collector:
        await let_time_pass(conn)
        assert await sweep(database_url, settings) == (2, 0)
        assert collector.threads == {"t1", "t2"}
    # An outage is nobody's to mend here.
    assert await all_rows(conn, "SELECT FROM notices") == []
    assert await value(conn, "SELECT failures FROM trace_targets") == 0


@pytest.mark.parametrize("status", [429, 502, 503, 504, 500])
async def test_what_may_be_sent_again_is(
    database_url: str, conn: Connection, collector: Collector, status: int
) -> None:
    collector.faults.append(Fault(status=status, body="busy"))
    await traced(conn)
    assert await sweep(database_url, to(collector)) == (0, 1)
    assert await quiet_s(conn) == pytest.approx(5, abs=3)
    await let_time_pass(conn)
    assert await sweep(database_url, to(collector)) == (1, 0)
    assert names(collector) == ["intake"]


@pytest.mark.parametrize(("said", "wait_s"), [("47", 47), ("0", 1), ("soon", 5)])
async def test_a_target_is_left_alone_for_as_long_as_it_asks(
    database_url: str, conn: Connection, collector: Collector, said: str, wait_s: float
) -> None:
    collector.faults.append(Fault(status=429, headers={"Retry-After": said}))
    await traced(conn)
    await sweep(database_url, to(collector))
    assert await quiet_s(conn) == pytest.approx(wait_s, abs=2)
    assert await sweep(database_url, to(collector)) == (0, 0)
    assert collector.asked == 1


async def test_an_answer_that_is_lost_or_too_late_means_once_more_and_does_no_harm(
    database_url: str, conn: Connection, collector: Collector
) -> None:
    never = asyncio.Event()
    collector.faults.extend([Fault(lost=True), Fault(held=never)])
    await traced(conn, "t1", "intake", "pay")
    for _ in range(2):
        assert await sweep(database_url, to(collector)) == (0, 1)
        await let_time_pass(conn)
    assert await sweep(database_url, to(collector)) == (1, 0)
    # Taken twice, and still one trace with these and its start.
    assert len(collector.spans) == 6
    assert [len(trace) for trace in collector.traces.values()] == [3]
    never.set()


# A target that refuses


async def test_a_key_that_is_refused_is_an_alarm_once_until_it_worked(
    database_url: str, conn: Connection, langfuse: Collector
) -> None:
    wrong = to(langfuse, langfuse_secret_key=SecretStr("sk-lf-wrong"))
    await traced(conn, "t1")
    await sweep(database_url, wrong)
    assert await alarms(conn) == [("t1", 1)]
    [(kind, error)] = await failures_of(conn, "t1")
    assert (kind, error.startswith("langfuse answered 401")) == ("trace", True)
    told = alarm(await thread_of(conn, "t1"), [(kind, error)])
    assert told is not None and "Traces do not get out, this one first (langfuse answered 401" in told
    for number in range(2, 4):
        await traced(conn, f"t{number}")
        await let_time_pass(conn)
        assert await sweep(database_url, wrong) == (0, number)
    assert await alarms(conn) == [("t1", 1)]
    # Nothing was lost by that, and nobody needs anybody any more.
    await let_time_pass(conn)
    assert await sweep(database_url, to(langfuse)) == (3, 0)
    assert langfuse.threads == {"t1", "t2", "t3"}
    assert await failures_of(conn, "t1") == []
    assert alarm(await thread_of(conn, "t1"), []) is None
    await record(conn, "t1", "pay")
    await sweep(database_url, wrong)
    assert await alarms(conn) == [("t1", 2)]


@pytest.mark.parametrize(
    "fault",
    [
        Fault(status=403),
        Fault(status=404),
        Fault(status=415),
        Fault(status=307, headers={"Location": "/elsewhere"}),
        Fault(body="<p>Sign in", kind="text/html"),
    ],
    ids=["403", "404", "415", "a redirect", "a page"],
)
async def test_an_address_that_takes_no_traces_is_an_alarm_and_loses_none(
    database_url: str, conn: Connection, collector: Collector, fault: Fault
) -> None:
    collector.faults.append(fault)
    await traced(conn)
    assert await sweep(database_url, to(collector)) == (0, 1)
    assert await alarms(conn) == [("t1", 1)]
    collector.requests.clear()
    await let_time_pass(conn)
    assert await sweep(database_url, to(collector)) == (1, 0)
    assert names(collector) == ["intake"]


async def test_a_span_that_is_refused_is_given_up_and_takes_no_other_with_it(
    database_url: str, conn: Connection, collector: Collector, caplog: pytest.LogCaptureFixture
) -> None:
    collector.poison = "bad"
    for number in range(5):
        await traced(conn, f"t{number}", "bad" if number == 2 else "good")
    await sweep(database_url, to(collector))
    assert collector.threads == {"t0", "t1", "t3", "t4"}
    assert await alarms(conn) == [("t2", 1)]
    assert "2 spans of this thread are given up: otlp answered 400" in caplog.text
    assert [kind for kind, _ in await failures_of(conn, "t2")] == ["trace"]
    assert await sweep(database_url, to(collector)) == (0, 0)
    # What comes after it is sent.
    await record(conn, "t2", "later")
    assert await sweep(database_url, to(collector)) == (1, 0)
    assert names(collector, of_request=-1) == ["later"]


async def test_a_span_that_breaks_the_target_holds_up_only_its_own_thread(
    database_url: str, conn: Connection, collector: Collector
) -> None:
    collector.poison, collector.poisoned = "bad", 500
    for number in range(5):
        await traced(conn, f"t{number}", "bad" if number == 2 else "good")
    for _ in range(3):
        await sweep(database_url, to(collector))
        await let_time_pass(conn)
    assert collector.threads == {"t0", "t1", "t3", "t4"}
    # It may be the target's fault, which somebody mends.
    collector.poison = ""
    assert await sweep(database_url, to(collector)) == (1, 0)
    assert collector.threads == {f"t{number}" for number in range(5)}
    assert await alarms(conn) == []


async def test_a_trace_that_cannot_be_written_holds_up_no_other(
    database_url: str, conn: Connection, collector: Collector, caplog: pytest.LogCaptureFixture
) -> None:
    for thread_id in ("t1", "t2", "t3"):
        await traced(conn, thread_id)
    await conn.execute("UPDATE spans SET attributes = '[1]' WHERE thread_id = 't2'")
    await sweep(database_url, to(collector))
    assert collector.threads == {"t1", "t3"}
    assert "thread t2: its trace cannot be sent" in caplog.text
    assert await sweep(database_url, to(collector)) == (0, 0)


async def test_what_a_collector_left_out_is_logged(
    database_url: str, conn: Connection, collector: Collector, caplog: pytest.LogCaptureFixture
) -> None:
    collector.usual = Fault(body='{"partialSuccess": {"rejectedSpans": "3", "errorMessage": "too old"}}')
    await traced(conn)
    assert await sweep(database_url, to(collector)) == (1, 0)
    assert "otlp has left out 3 spans: too old" in caplog.text


async def alarms(conn: Connection) -> list[tuple[str, int]]:
    """Of which threads, and how often."""
    rows = await all_rows(conn, "SELECT thread_id, version FROM notices WHERE kind = 'alarm' ORDER BY id")
    return [(row["thread_id"], row["version"]) for row in rows]


@pytest.mark.parametrize("odd", ['{"partialSuccess": {"rejectedSpans": 1e999}}', "[" * 16_000, "null", "no JSON"])
async def test_whatever_else_is_said_by_who_takes_them_they_are_taken(
    database_url: str, conn: Connection, collector: Collector, odd: str
) -> None:
    collector.usual = Fault(body=odd)
    await traced(conn)
    assert await sweep(database_url, to(collector)) == (1, 0)
    assert await sweep(database_url, to(collector)) == (0, 0)


# On nobody's way


async def test_a_decision_does_not_wait_for_whoever_spreads_marks(conn: Connection, crowd: list[Connection]) -> None:
    await exports.add_targets(conn, ["otlp"])
    interrupt_id = await ask(conn)
    await record(conn, "t1", "intake")
    [spreader, *_] = crowd
    async with spreader.transaction():
        await exports.spread(spreader)
        await conn.execute("SET lock_timeout = '500ms'")
        await decide(conn, interrupt_id, ALICE, YES)
    assert await value(conn, "SELECT count(*) FROM trace_exports") == 1


async def test_of_a_thread_of_many_spans_no_more_is_written_at_a_time_than_is_sent(
    database_url: str, conn: Connection, collector: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = 0

    def write(*args: Any) -> dict[str, Any]:
        nonlocal written
        written += 1
        return span_as_json(*args)

    monkeypatch.setattr("bot.traces_out.span_as_json", write)
    await start_claim(conn)
    await conn.execute(
        "INSERT INTO spans (thread_id, span_id, parent_id, name, kind, started_at, ended_at)"
        " SELECT 't1', lpad(to_hex(k), 16, '0'), CASE WHEN k > 1 THEN lpad('1', 16, '0') END, 'node', 'internal',"
        " now(), now() FROM generate_series(1, 2600) k"
    )
    await sweep(database_url, to(collector))
    assert len({span.id for span in collector.spans}) == written == 2601
    # Those that came later are below what went out before them.
    [(_, trace)] = collector.traces.items()
    assert [span.above for span in trace.values()].count(f"{1:016x}") == 2599


# Targets that come and go


async def test_without_a_target_there_are_no_rows(database_url: str, conn: Connection) -> None:
    await traced(conn)
    await conn.execute("UPDATE threads SET status = 'paid', due_at = NULL")
    assert await rows_left(conn) == 0


async def test_a_target_that_is_taken_out_leaves_no_rows(
    database_url: str, conn: Connection, collector: Collector, langfuse: Collector
) -> None:
    for number in range(3):
        await traced(conn, f"t{number}")
        await sweep(database_url, to(collector, langfuse))
    await traced(conn, "t4")
    await exports.keep_targets(conn, ["otlp"])
    assert await value(conn, "SELECT count(*) FROM trace_exports WHERE target <> 'otlp'") == 0
    await sweep(database_url, to(collector))
    assert len(collector.threads) == 4
    await record(conn, "t4", "pay")
    await exports.keep_targets(conn, [])
    await record(conn, "t4", "later")
    assert await rows_left(conn) == 0


async def test_without_spans_nothing_goes_out(conn: Connection) -> None:
    settings = Settings(spans=False, otel_exporter_otlp_endpoint="http://c:4318")
    assert (settings.trace_targets, targets_of(settings)) == ((), ())


async def test_marks_that_nobody_sends_have_an_age_and_the_doctor_finds_their_target(
    database_url: str, conn: Connection, tmp_path: Path
) -> None:
    """Only the one who filed has the setting."""
    await exports.add_targets(conn, ["otlp"])
    await traced(conn)
    assert (await Terminal(tmp_path, DATABASE_URL=database_url).run_meanwhile("work", "--once")).code == 0
    assert await value(conn, "SELECT count(*) FROM trace_marks") == 0
    assert await value(conn, "SELECT due_at IS NOT NULL FROM trace_exports") is True
    found = await found_by_doctor(Settings(database_url=SecretStr(database_url)), "otlp")
    assert (found.ok, "this one has not" in found.found, "`serve`" in found.fix) == (False, True, True)


async def test_a_sender_whose_target_another_process_took_out_takes_it_up_again(
    database_url: str, conn: Connection, collector: Collector
) -> None:
    await exports.keep_targets(conn, [])
    await sweep(database_url, to(collector))
    await traced(conn)
    assert await sweep(database_url, to(collector)) == (1, 0)


async def test_what_was_sent_is_forgotten_with_the_spans(
    database_url: str, conn: Connection, collector: Collector
) -> None:
    for thread_id in ("old", "new"):
        await traced(conn, thread_id)
    await sweep(database_url, to(collector))
    keep = Keep.of(Settings())
    assert (await prune(conn, keep)).rows == 0
    for column, table in (("started_at", "spans"), ("marked_at", "trace_exports")):
        await conn.execute(
            f"UPDATE {table} SET {column} = {column} - interval '31 days' WHERE thread_id = 'old'".encode()
        )
    assert (await foresee(conn, keep)).rows == 2
    assert (await prune(conn, keep)).rows == 2
    assert await value(conn, "SELECT thread_id FROM trace_exports") == "new"
    # The thread goes on: what is new of it is sent, and all that its rows tell once more, which does no harm.
    await record(conn, "old", "pay")
    assert await sweep(database_url, to(collector)) == (1, 0)
    assert sorted(len(trace) for trace in collector.traces.values()) == [2, 3]


# Settings


@pytest.mark.parametrize(
    ("given", "missing"),
    [
        ({"LANGFUSE_PUBLIC_KEY": "pk-lf-1"}, "LANGFUSE_SECRET_KEY not set"),
        ({"LANGFUSE_SECRET_KEY": "sk-lf-2"}, "LANGFUSE_PUBLIC_KEY not set"),
        ({"LANGFUSE_HOST": "https://l.example"}, "LANGFUSE_PUBLIC_KEY and LANGFUSE_SECRET_KEY not set"),
        ({"OTEL_EXPORTER_OTLP_HEADERS": "a=b"}, "OTEL_EXPORTER_OTLP_ENDPOINT is not set"),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "collector:4318"}, "OTEL_EXPORTER_OTLP_ENDPOINT: write http"),
        (
            {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c:4318", "OTEL_EXPORTER_OTLP_HEADERS": "a=b%0d%0aX: y"},
            "OTEL_EXPORTER_OTLP_HEADERS: write NAME=VALUE",
        ),
        ({"OTEL_RESOURCE_ATTRIBUTES": "production"}, "OTEL_RESOURCE_ATTRIBUTES: write NAME=VALUE"),
    ],
    ids=str,
)
def test_half_a_configuration_is_refused(monkeypatch: pytest.MonkeyPatch, given: dict[str, str], missing: str) -> None:
    for name, text in given.items():
        monkeypatch.setenv(name, text)
    with pytest.raises(SettingError) as refused:
        read_settings()
    assert missing in str(refused.value)


@pytest.mark.parametrize(
    ("given", "otlp", "langfuse"),
    [
        ({}, None, None),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c:4318/"}, "http://c:4318/v1/traces", None),
        (
            {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c:4318", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "https://c/t"},
            "https://c/t",
            None,
        ),
        (
            {"LANGFUSE_PUBLIC_KEY": "pk", "LANGFUSE_SECRET_KEY": "sk"},
            None,
            f"https://cloud.langfuse.com{LANGFUSE_PATH}",
        ),
        (
            {"LANGFUSE_PUBLIC_KEY": "pk", "LANGFUSE_SECRET_KEY": "sk", "LANGFUSE_HOST": "https://old.example"},
            None,
            f"https://old.example{LANGFUSE_PATH}",
        ),
        (
            {
                "LANGFUSE_PUBLIC_KEY": "pk",
                "LANGFUSE_SECRET_KEY": "sk",
                "LANGFUSE_HOST": "https://old.example",
                "LANGFUSE_BASE_URL": "https://new.example/",
            },
            None,
            f"https://new.example{LANGFUSE_PATH}",
        ),
    ],
    ids=str,
)
def test_where_traces_go_is_said_by_the_names_of_opentelemetry_and_langfuse(
    monkeypatch: pytest.MonkeyPatch, given: dict[str, str], otlp: str | None, langfuse: str | None
) -> None:
    for name, text in given.items():
        monkeypatch.setenv(name, text)
    settings = read_settings()
    assert (settings.otlp_url, settings.langfuse_url) == (otlp, langfuse)


async def test_headers_are_sent_as_they_are_meant(database_url: str, conn: Connection, collector: Collector) -> None:
    collector.wants = {"authorization": "Bearer a=b,c", "x-team": "claims"}
    headers = SecretStr("authorization=Bearer%20a=b%2Cc, x-team=claims")
    await traced(conn)
    assert await sweep(database_url, to(collector, otel_exporter_otlp_headers=headers)) == (1, 0)


# The doctor


async def found_by_doctor(settings: Settings, name: str) -> Finding:
    [found] = [each async for each in examine(settings) if each.what == f"traces to {name}"]
    return found


async def test_the_doctor_asks_each_target_and_sends_it_nothing(
    database_url: str, conn: Connection, collector: Collector, langfuse: Collector
) -> None:
    await traced(conn)
    settings = to(collector, langfuse, database_url=SecretStr(database_url))
    found = await found_by_doctor(settings, "otlp")
    assert (found.ok, found.found) == (True, f"{collector.url}/v1/traces takes them")
    assert (await found_by_doctor(settings, "langfuse")).ok
    assert collector.spans == langfuse.spans == []
    await exports.keep_targets(conn, [])
    here = Settings(database_url=SecretStr(database_url))
    assert [each.what async for each in examine(here) if each.what.startswith("traces")] == []


async def test_the_doctor_says_what_is_wrong_with_a_target_and_what_to_mend(
    database_url: str, conn: Connection, langfuse: Collector
) -> None:
    await traced(conn)
    base: dict[str, Any] = {"database_url": SecretStr(database_url)}
    wrong = to(langfuse, langfuse_secret_key=SecretStr("sk-lf-wrong"), **base)
    await sweep(database_url, wrong)
    found = await found_by_doctor(wrong, "langfuse")
    assert not found.ok
    assert "answered 401" in found.found and "; 1 threads wait, since 20" in found.found
    assert "LANGFUSE_SECRET_KEY" in found.fix and "LANGFUSE_BASE_URL" in found.fix
    found = await found_by_doctor(Settings(otel_exporter_otlp_endpoint="http://127.0.0.1:9", **base), "otlp")
    assert (found.ok, "no answer" in found.found, "4318" in found.fix) == (False, True, True)


async def test_the_doctor_finds_traces_that_nobody_sends(
    database_url: str, conn: Connection, collector: Collector
) -> None:
    await traced(conn)
    await exports.spread(conn)
    settings = to(collector, database_url=SecretStr(database_url))
    assert (await found_by_doctor(settings, "otlp")).ok
    await conn.execute("UPDATE trace_exports SET marked_at = marked_at - interval '11 minutes'")
    found = await found_by_doctor(settings, "otlp")
    assert (found.ok, "1 threads wait, since 20" in found.found, "serve" in found.fix) == (False, True, True)


# Secrets


async def test_no_secret_goes_out_whoever_wrote_it_into_a_span(
    database_url: str, conn: Connection, collector: Collector
) -> None:
    secret, token = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw", "xoxb-12345-abcdef"
    await start_claim(conn)
    await record(conn, "t1", f"call {token}", url=f"https://a.example/?token={secret}", why="hunter2-hunter2")
    await sweep(database_url, to(collector, payment_token=SecretStr("hunter2-hunter2")))
    assert len(names(collector)) == 1
    for word in (secret, token, "hunter2-hunter2"):
        assert word.encode() not in collector.raw


async def test_what_a_target_says_is_kept_without_our_key(
    database_url: str, conn: Connection, collector: Collector
) -> None:
    headers = SecretStr("x-key=a-very%2Blong-key")
    collector.faults.append(Fault(status=401, body="a-very+long-key is unknown"))
    await traced(conn)
    await sweep(database_url, to(collector, otel_exporter_otlp_headers=headers))
    assert await value(conn, "SELECT error FROM trace_targets") == "otlp answered 401: *** is unknown"
