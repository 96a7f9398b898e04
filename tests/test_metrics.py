"""Figures: each of them moves when the thing happens, in real processes; and what is read from them names none else."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import yaml  # type: ignore[import-untyped]
from prometheus_client.parser import text_string_to_metric_families

from bot.metrics import exposition
from flow import counts, deliveries, figures
from flow.counts import Count, Times
from flow.database import Connection, connect
from flow.events import give_positions
from tests.api_door import SECRET, signed
from tests.bank import Bank
from tests.command import ROOT, Terminal
from tests.drives import held_at_payment
from tests.driving import waiting_claim
from tests.fault_proxy import FaultProxy
from tests.local_slack import free_port
from tests.people import ask as ask_somebody
from tests.people import start_claim
from tests.rows import break_table, until, value
from tests.services import Town

TOKEN = "a-long-random-text"
README = (ROOT / "README.md").read_text()
MONITORING = ROOT / "docs" / "monitoring"

Samples = dict[tuple[str, tuple[tuple[str, str], ...]], float]


@pytest.fixture
def town(tmp_path: Path, database_url: str) -> Town:
    return Town(database_url, Terminal(tmp_path, METRICS_TOKEN=TOKEN, STAND_BY="2"))


async def ask(port: int, authorization: str | None = f"Bearer {TOKEN}") -> tuple[int, str]:
    headers = {"Authorization": authorization} if authorization else {}
    async with (
        aiohttp.ClientSession() as session,
        session.get(f"http://127.0.0.1:{port}/metrics", headers=headers) as answer,
    ):
        return answer.status, await answer.text()


def samples_of(text: str) -> Samples:
    families = text_string_to_metric_families(text)
    return {(each.name, tuple(sorted(each.labels.items()))): each.value for f in families for each in f.samples}


async def scrape(port: int) -> Samples:
    status, text = await ask(port)
    assert status == 200
    return samples_of(text)


def one(samples: Samples, name: str, **labels: str) -> float:
    """The value of this metric with these labels; 0 if it is not there."""
    return samples.get((f"claim_flow_{name}", tuple(sorted(labels.items()))), 0.0)


async def until_it_says(port: int, look: Callable[[Samples], object]) -> Samples:
    """The first scrape of which this is true. (The database is asked every few seconds.)"""

    async def said() -> Samples | None:
        samples = await scrape(port)
        return samples if look(samples) else None

    found = await until(said, within_s=45)
    assert found is not None
    return found


# Who may read them


async def test_metrics_are_for_whoever_has_the_token(town: Town) -> None:
    async with town, town.service("bot"):
        for authorization in (None, "Bearer wrong", f"Basic {TOKEN}", TOKEN, f"Bearer {TOKEN}é"):
            status, text = await ask(town.port, authorization)
            assert (status, "claim_flow" in text) == (401, False)
        assert (await ask(town.port))[0] == 200


async def test_without_a_token_nobody_reads_metrics(town: Town) -> None:
    del town.terminal.environment["METRICS_TOKEN"]
    async with town, town.service("bot"):
        assert (await ask(town.port, None))[0] == (await ask(town.port, "Bearer "))[0] == 404


# What moves them


async def test_a_click_moves_what_is_told_of_requests_decisions_payments_and_drives(
    town: Town, conn: Connection
) -> None:
    async with town, town.service("serve"):
        first, _ = await town.waiting(conn, ["t1", "t2"])
        before = await until_it_says(
            town.port,
            lambda now: (
                one(now, "pending_approvals", tier="approval", age="1h") == 2
                and one(now, "drives_total", outcome="waiting") == 2
            ),
        )
        assert one(before, "oldest_pending_approval_seconds") > 0
        assert [one(before, "click_to_acknowledgement_seconds_count"), one(before, "takeovers_total")] == [0, 0]
        assert await town.click(first.approve) == 200
        after = await until_it_says(
            town.port,
            lambda now: (
                one(now, "pending_approvals", tier="approval", age="1h") == 1
                and one(now, "drives_total", outcome="over") == 1
            ),
        )
        assert one(after, "decisions_total", door="slack", verdict="approve") == 1
        assert one(after, "click_to_acknowledgement_seconds_count") == 1
        assert 0 < one(after, "click_to_acknowledgement_seconds_sum") < 3
        assert one(after, "payments_total", status="paid") == 1
        assert one(after, "click_to_paid_seconds_count") == 1
        as_the_rows_say = "SELECT extract(epoch FROM paid_at - settled_at)::float8 FROM payments JOIN approvals USING"
        seconds = await value(conn, f"{as_the_rows_say} (thread_id)")
        assert one(after, "click_to_paid_seconds_sum") == pytest.approx(seconds, abs=1e-5)
        # Once more changes nothing, and is answered.
        assert await town.click(first.approve) == 200
        again = await until_it_says(town.port, lambda now: one(now, "ready_standbys") == 2)
        assert one(again, "decisions_total", door="slack", verdict="approve") == 1
        assert one(again, "click_to_acknowledgement_seconds_count") == 2
        assert one(again, "pool_connections", state="idle") >= 1 and one(again, "pool_most_connections") == 8


async def test_a_payment_of_nobodys_click_has_no_time_from_a_click(town: Town, conn: Connection) -> None:
    async with town, town.service("serve"):
        await start_claim(conn, "small", "20")
        after = await until_it_says(town.port, lambda now: one(now, "payments_total", status="paid") == 1)
        assert one(after, "click_to_paid_seconds_count") == 0


async def test_a_signed_decision_is_told_by_sender_and_answer(town: Town, conn: Connection) -> None:
    webhooks = {"WEBHOOK_SECRETS": f"acme={SECRET}", "WEBHOOK_APPROVERS": "acme=carol"}
    async with town, town.service("serve", APPROVERS="webhook:acme:carol", **webhooks):
        await start_claim(conn, "t1")
        waits = "SELECT max(interrupt_id) FROM approvals WHERE status = 'pending'"

        async def asked() -> Any:
            return await value(conn, waits)

        interrupt_id = await until(asked)
        body = json.dumps({"decision": "approve", "approver": "carol"}).encode()
        url = f"http://127.0.0.1:{town.port}/api/approvals/{interrupt_id}/decision"
        async with aiohttp.ClientSession() as session:
            for headers in (signed(body), signed(body), signed(b"another")):
                async with session.post(
                    url, data=body, headers=headers | {"Content-Type": "application/json"}
                ) as answer:
                    await answer.read()
        after = await scrape(town.port)
        assert one(after, "webhook_receipts_total", endpoint="acme", status="200") == 2
        assert one(after, "webhook_receipts_total", endpoint="", status="401") == 1
        assert one(after, "decisions_total", door="webhook", verdict="approve") == 1


async def test_a_worker_tells_on_its_health_port_that_it_took_over_from_a_dead_one(
    town: Town, conn: Connection, database_url: str
) -> None:
    port = free_port()
    health = {"HEALTH_PORT": str(port), "METRICS_TOKEN": TOKEN, "STAND_BY": "1"}
    async with town, contextlib.AsyncExitStack() as stack:
        async with held_at_payment(conn, database_url, ["t1"]) as until_held:
            async with town.worker(conn) as dies:
                await until_held()
                dies.kill()
                await dies.end()
            await stack.enter_async_context(town.worker(conn, **health))
            await until_held()
            # Its stand-by is in the midst of it.
            during = await until_it_says(port, lambda now: one(now, "due_threads") == 1)
            assert one(during, "ready_standbys") == 0
        after = await until_it_says(port, lambda now: one(now, "payments_total", status="paid") == 1)
        assert one(after, "takeovers_total") == 1
        # One that nobody drove before is no takeover.
        await start_claim(conn, "t2", "20")
        again = await until_it_says(port, lambda now: one(now, "payments_total", status="paid") == 2)
        assert one(again, "takeovers_total") == 1


async def test_threads_that_stop_and_payments_that_are_unknown_are_told(town: Town, conn: Connection) -> None:
    async with Bank(remembers=False) as bank, town:
        bank.faults.extend(["lost", "lost"])
        provider = {"PAYMENT_PROVIDER": "http", "PAYMENT_URL": bank.url, "PAYMENT_KEY_LIFETIME": "0"}
        async with town.service("serve", **provider):
            await start_claim(conn, "lost", "20")
            after = await until_it_says(
                town.port,
                lambda now: (
                    one(now, "open_payments", status="unknown") == 1
                    and one(now, "stopped_threads", status="unknown") == 1
                    and one(now, "payments_total", status="unknown") == 1
                ),
            )
            assert one(after, "oldest_open_payment_seconds", status="unknown") > 0
            assert one(after, "drives_total", outcome="failed") == 1
            await break_table(conn, "payments", "INSERT", "RAISE 'the vault is shut'")
            async with conn.transaction():
                await start_claim(conn, "shut", "20")
                await conn.execute("UPDATE threads SET attempts = 19 WHERE thread_id = 'shut'")
            await until_it_says(
                town.port,
                lambda now: (
                    one(now, "stopped_threads", status="stuck") == 1 and one(now, "drives_total", outcome="stuck") == 2
                ),
            )


async def test_what_slack_refuses_and_what_waits_for_it_is_told(town: Town, conn: Connection) -> None:
    async with town, FaultProxy(town.slack.url.removesuffix("/api/")) as proxy:
        proxy.fail("chat.postMessage", "429", retry_after_s=1)
        proxy.fail("chat.postMessage", "503", times=1000)
        async with town.service("serve", SLACK_API_URL=proxy.api_url):
            await town.waiting(conn, ["t1"])
            after = await until_it_says(
                town.port,
                lambda now: (
                    one(now, "slack_errors_total", method="chat.postMessage", error="http_503") >= 1
                    and one(now, "oldest_waiting_notice_seconds", kind="card") > 3
                ),
            )
            # It was tried again since, and has waited all the same.
            assert one(after, "slack_errors_total", method="chat.postMessage", error="ratelimited") == 1
            assert one(after, "waiting_notices", kind="card") == 1
            await conn.execute("UPDATE notices SET status = 'failed', due_at = NULL")
            await until_it_says(
                town.port,
                lambda now: (
                    one(now, "refused_notices", kind="card") == 1 and one(now, "waiting_notices", kind="card") == 0
                ),
            )


async def test_work_that_nobody_does_is_told(town: Town, conn: Connection) -> None:
    async with town, town.service("bot"):
        await start_claim(conn, "t1")
        after = await until_it_says(
            town.port, lambda now: one(now, "due_threads") == 1 and one(now, "oldest_due_thread_seconds") > 0
        )
        assert not [name for name, _ in after if name == "claim_flow_ready_standbys"]


async def test_a_request_whose_time_is_over_is_told(town: Town, conn: Connection) -> None:
    async with town, town.service("serve"):
        await town.waiting(conn, ["t1"])
        await conn.execute("UPDATE approvals SET expires_at = clock_timestamp()")
        await until_it_says(town.port, lambda now: one(now, "expiries_total") == 1)


async def test_while_the_database_is_away_a_process_tells_what_it_knows_itself(
    town: Town, conn: Connection, server_url: str
) -> None:
    async with town, town.service("serve"):
        [claim] = await town.waiting(conn, ["t1"])
        assert await town.click(claim.approve) == 200
        assert one(await scrape(town.port), "database_up") == 1
        async with await connect(server_url, "listen") as admin:
            name = conn.info.dbname
            await admin.execute(f'ALTER DATABASE "{name}" ALLOW_CONNECTIONS false'.encode())
            try:
                await conn.execute(
                    "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = current_database()"
                    " AND pid <> pg_backend_pid()"
                )
                away = await until_it_says(town.port, lambda now: one(now, "database_up") == 0)
                assert one(away, "decisions_total", door="slack", verdict="approve") == 1
                assert not [name for name, _ in away if name == "claim_flow_due_threads"]
            finally:
                await admin.execute(f'ALTER DATABASE "{name}" ALLOW_CONNECTIONS true'.encode())
        await until_it_says(town.port, lambda now: one(now, "database_up") == 1)


async def test_looking_reads_no_table_whole(conn: Connection) -> None:
    await conn.execute(
        "INSERT INTO threads (thread_id, flow, flow_version, input, requested_by, status, due_at)"
        " SELECT 'old-' || n, 'claim', '1', '{}', 'cli:ann', 'paid', NULL FROM generate_series(1, 20000) n"
    )
    await conn.execute(
        "INSERT INTO approvals (interrupt_id, thread_id, tier, request, request_hash, requested_by, approvers,"
        " required, status, settled_at, rank) SELECT md5(thread_id), thread_id, 'approval', '{}', 'x', 'cli:ann', '{}',"
        " 1, 'approved', now(), 0 FROM threads"
    )
    await conn.execute(
        "INSERT INTO notices (kind, interrupt_id, thread_id, status, due_at) SELECT 'card', interrupt_id, thread_id,"
        " 'sent', NULL FROM approvals"
    )
    await conn.execute(
        "INSERT INTO payments (thread_id, amount, currency, payee, provider, reference, status, paid_at) SELECT"
        " thread_id, 1, 'USD', '', 'ledger', thread_id, 'paid', now() FROM threads"
    )
    await conn.execute(
        "INSERT INTO links (interrupt_id, person, made_by) SELECT interrupt_id, 'mail:a@b.example', 'x' FROM approvals"
    )
    # So that what is dead in an index costs nothing either, whenever somebody vacuums.
    await conn.execute("VACUUM ANALYZE")
    # Else what filled the tables may count as read now.
    await conn.execute("SELECT pg_stat_force_next_flush()")
    read = (
        "SELECT relname, seq_scan FROM pg_stat_xact_user_tables WHERE seq_scan > 0"
        " AND relname IN ('threads', 'approvals', 'notices', 'payments', 'links')"
    )
    async with conn.transaction():
        found = await figures.figures(conn, slack=True, mail=True)
        scanned = await (await conn.execute(read)).fetchall()
    assert scanned == []
    assert sum(sum(figure.values.values()) for figure in found) == 0


async def test_ages_are_told_in_steps(conn: Connection, flows: Any) -> None:
    await waiting_claim(conn, flows)
    for hours, age in ((0.5, "1h"), (2, "4h"), (20, "1d"), (71, "3d"), (100, "more")):
        await conn.execute("UPDATE approvals SET requested_at = now() - %s * interval '1 hour'", (hours,))
        [pending, oldest, *_] = await figures.figures(conn, slack=True, mail=True)
        assert pending.values == {("approval", each): float(each == age) for each in figures.AGES}
        assert oldest.values[()] == pytest.approx(hours * 3600, abs=60)


async def test_notices_that_nobody_sends_here_are_not_told(conn: Connection, flows: Any) -> None:
    await waiting_claim(conn, flows)
    named = {figure.name: figure for figure in await figures.figures(conn, slack=False, mail=False)}
    assert named["claim_flow_waiting_notices"].values == {("webhook",): 0.0}


async def webhooks(conn: Connection) -> tuple[float, float, float]:
    """Of events for endpoints: how many wait, since how many seconds the first of them does, and what is refused."""
    named = {figure.name: figure.values for figure in await figures.figures(conn, slack=False, mail=False)}
    told = ("waiting_notices", "oldest_waiting_notice_seconds", "refused_notices")
    waiting, oldest_s, refused = (named[f"claim_flow_{name}"]["webhook",] for name in told)
    return waiting, oldest_s, refused


async def test_an_event_that_no_endpoint_gets_is_told_wherever_it_stopped(conn: Connection) -> None:
    assert await webhooks(conn) == (0, 0, 0)
    await ask_somebody(conn, "before")
    await deliveries.add_endpoints(conn, ["acme"])
    assert await webhooks(conn) == (0, 0, 0)
    await ask_somebody(conn, "t1")
    await conn.execute("UPDATE events SET created_at = created_at - interval '1 hour' WHERE thread_id = 't1'")
    an_hour: Any = pytest.approx(3600, abs=60)
    # No process that knows of the endpoint runs: the event has no position, then one.
    assert await webhooks(conn) == (1, an_hour, 0)
    await give_positions(conn)
    assert await webhooks(conn) == (1, an_hour, 0)
    await deliveries.spread(conn, "acme")
    assert await webhooks(conn) == (1, an_hour, 0)
    delivery = await deliveries.lease(conn, "acme")
    assert delivery is not None
    await deliveries.mark_dead(conn, delivery, "it said 404")
    assert await webhooks(conn) == (0, 0, 1)
    await deliveries.turn_off(conn, delivery, "it said 410")
    await ask_somebody(conn, "t2")
    assert await webhooks(conn) == (0, 0, 2)
    await deliveries.resend_dead(conn, "acme", by="cli:ann")
    assert (await webhooks(conn))[::2] == (2, 0)


def test_times_are_told_as_prometheus_wants_them() -> None:
    took, happened = Times("took_seconds", "How long.", (0.1, 1.0)), Count("things", 'What "happened".', "what")
    for seconds in (0.05, 0.1, 0.5, 7.0):
        took.add(seconds)
    happened.add('odd "name"\n')
    text = exposition([], [happened], [took]).decode()
    told = samples_of(text)
    buckets = [told["took_seconds_bucket", (("le", bound),)] for bound in ("0.1", "1.0", "+Inf")]
    assert (buckets, told["took_seconds_count", ()]) == ([2, 3, 4], 4)
    assert told["took_seconds_sum", ()] == pytest.approx(7.65)
    assert told["things_total", (("what", 'odd "name"\n'),)] == 1


# What reads them


async def known(conn: Connection) -> dict[str, set[str]]:
    """The labels of every metric of ours, by each name that a query may have for it."""
    found = {figure.name: set(figure.labels) for figure in await figures.figures(conn, slack=True, mail=True)}
    found |= {f"{count.name}_total": set(count.labels) for count in counts.COUNTS}
    for taken in counts.TIMES:
        found |= {f"{taken.name}_bucket": {"le"}, f"{taken.name}_sum": set(), f"{taken.name}_count": set()}
    here = {"pool_connections": {"state"}, "pool_most_connections": set(), "pool_waiting_requests": set()}
    here |= {"ready_standbys": set(), "database_up": set()}
    return found | {f"claim_flow_{name}": labels for name, labels in here.items()}


def expressions() -> list[str]:
    board = json.loads((MONITORING / "grafana-dashboard.json").read_text())
    alerts = yaml.safe_load((MONITORING / "alerts.yaml").read_text())
    of_panels = [target["expr"] for panel in board["panels"] for target in panel["targets"]]
    return of_panels + [rule["expr"] for group in alerts["groups"] for rule in group["rules"]]


async def test_what_is_known_is_what_a_process_tells(town: Town, conn: Connection) -> None:
    async with town, town.service("serve"):
        _, text = await ask(town.port)
    told = {f"{line.split()[2]}" for line in text.splitlines() if line.startswith("# TYPE claim_flow")}
    # "things_total" is the type's and the sample's name; a histogram's type has none of its samples' endings.
    assert told == {re.sub(r"_(bucket|sum|count)\Z", "", name) for name in await known(conn)}


async def test_dashboard_and_alerts_name_what_there_is(conn: Connection) -> None:
    metrics = await known(conn)
    used = set()
    for expression in expressions():
        names = re.findall(r"\b(?:claim_flow|process)_\w+", expression)
        assert names, expression
        used |= set(names)
        labels = {name for group in re.findall(r"\bby \(([^)]*)\)", expression) for name in re.split(r",\s*", group)}
        labels |= set(re.findall(r"[{,]\s*(\w+)\s*(?:=~|!~|!=|=)", expression))
        here = set().union(*(metrics[name] for name in names if name.startswith("claim_flow_")))
        assert labels <= here | {"instance", "job"}, expression
    ours = {name for name in used if name.startswith("claim_flow_")}
    assert ours <= metrics.keys()
    # Nothing is told that nobody looks at.
    assert {re.sub(r"_(bucket|sum|count)\Z", "", name) for name in metrics} == {
        re.sub(r"_(bucket|sum|count)\Z", "", name) for name in ours
    }


@pytest.mark.parametrize("expression", expressions())
def test_an_expression_is_whole(expression: str) -> None:
    """What tells that something was cut off or mistyped; promtool knows more."""
    rest = re.sub(r'\{\w+(?:=|=~)"[\w|]+"\}|\[\d+m\]', "", expression)
    rest = re.sub(r"\s*\bby \(\w+(?:, \w+)*\)\s*", "", rest)
    for _ in range(expression.count("(")):
        rest = re.sub(r"\b(?:absent|max|min|sum|rate|increase|histogram_quantile)\((?:0\.\d+, )?[\w.]+\)", "1", rest)
    assert re.fullmatch(r"\w+(?: (?:[*<>]|==) \d+)*", rest), rest


def test_alerts_cover_what_must_wake_somebody() -> None:
    alerts = yaml.safe_load((MONITORING / "alerts.yaml").read_text())
    rules = [rule for group in alerts["groups"] for rule in group["rules"]]
    names = {rule["alert"] for rule in rules}
    assert names >= {
        "ClaimFlowApprovalWaitsForLong",
        "ClaimFlowThreadStuck",
        "ClaimFlowPaymentUnknown",
        "ClaimFlowNoticesLate",
        # Without a process no other rule has anything to compare.
        "ClaimFlowAway",
    }
    assert len(names) == len(rules)
    assert all(rule["annotations"]["summary"] and rule["labels"]["severity"] in ("page", "ticket") for rule in rules)


async def test_the_readme_has_every_metric_with_its_labels(conn: Connection) -> None:
    rows = re.findall(r"^\| `(claim_flow_\w+)(?:\{([a-z, ]+)\})?` \|", README, re.MULTILINE)
    shown = {name: set(re.findall(r"\w+", labels)) for name, labels in rows}
    assert len(shown) == len(rows)
    assert shown == {
        re.sub(r"_(bucket|sum|count)\Z", "", name): labels - {"le"} for name, labels in (await known(conn)).items()
    }
