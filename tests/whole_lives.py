"""Whole lives of claims through processes and every door, on a server that writes down each statement it runs."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterator
from pathlib import Path

from flow.database import Connection, connect
from tests.api_door import SECRET, Program, signed
from tests.bank import Bank
from tests.browsing import Visitor
from tests.collector import Collector
from tests.command import Terminal
from tests.home_door import command_body, opened_body
from tests.hook_server import HookServer
from tests.postgres import PostgresServer
from tests.rows import all_rows, until
from tests.services import Town
from tests.slack_requests import JSON, SlackRequest
from tests.smtp_server import smtp_server

# The application's name of the test's own sessions: what they say is nobody's life.
_TEST = "test"


@contextlib.contextmanager
def writing_down(server: PostgresServer) -> Iterator[Path]:
    """The folder of its log, in JSON lines: every statement of every session from now on."""
    for setting in ("log_statement = 'all'", "logging_collector = on", "log_destination = 'jsonlog'"):
        server.execute(f"ALTER SYSTEM SET {setting}")
    server.restart()
    yield server.folder / "pg" / "log"


def statements_in(log: Path) -> set[str]:
    """Each statement that a process of ours ran, once, with every parameter as `$`."""
    found = set()
    for path in log.glob("*.json"):
        for line in path.read_text().splitlines():
            said = json.loads(line)
            if said.get("application_name", "").startswith("claim_flow ") and (
                match := re.match(r"(?:statement|execute [^:]+): (.*)", said["message"], re.DOTALL)
            ):
                found.add(re.sub(r"\$\d+", "$", " ".join(match[1].split())))
    return found


async def live(url: str, folder: Path) -> None:
    """Claims that are filed, asked for, decided through every door, changed, withdrawn, paid, listed and pruned."""
    async with (
        HookServer() as hooks,
        smtp_server() as mails,
        Bank() as bank,
        Collector() as collector,
        Town(url, Terminal(folder)) as town,
        await connect(url, "drive") as conn,
    ):
        await conn.execute(f"SET application_name = '{_TEST}'")
        town.terminal.environment |= {
            "APPROVERS": "U01ALICE,U02BOB,@finance,webhook:acme:carol,api:robot,dana@example.com",
            "INBOX_VIEWERS": "cli:ann",
            "METRICS_TOKEN": "a-long-random-text",
            "WEBHOOK_SECRETS": f"acme={SECRET}",
            "WEBHOOK_APPROVERS": "acme=carol",
            "WEBHOOK_URLS": f"acme={hooks.url}",
            "WEBHOOK_SIGNING_SECRETS": f"acme={SECRET}",
            "WEBHOOK_ALLOW_PRIVATE": "true",
            "PAYMENT_PROVIDER": "http",
            "PAYMENT_URL": bank.url,
            "PAYMENT_LOOKUP_URL": bank.url,
            "SMTP_URL": mails.url,
            "MAIL_FROM": "claims@example.com",
            "OTEL_EXPORTER_OTLP_ENDPOINT": collector.url,
            "PUBLIC_URL": f"http://127.0.0.1:{town.port}",
        }
        town.slack.groups["S01FIN", "finance"] = ["U01ALICE"]
        async with town.service("serve"):
            await _through_every_door(conn, town)
            await _afterwards(conn, town, hooks)
            assert len(bank.paid) == len(set(bank.keys)) > 3
        await _without_a_target(town, collector)


async def _through_every_door(conn: Connection, town: Town) -> None:
    async def said(*words: str, code: int = 0) -> str:
        done = await town.terminal.run_meanwhile(*words)
        assert done.code == code, (words, done.out, done.err)
        return done.out

    await said("start", "--thread", "small", "--amount", "20")
    # A flow with effects of its own.
    await said("start", "--thread", "other", "--flow", "research", "--input", '{"topic": "refund"}')
    claims = await town.waiting(conn, [f"big-{number}" for number in range(9)])
    await town.until_posted(claims)
    ids = [claim.interrupt_id for claim in claims]
    assert await town.click(claims[0].approve) == 200
    await said("resume", "--thread", "big-1", "--reject", "--reason", "no")
    await said("resume", "--thread", "other", "--approve")
    await said("change", "--thread", "big-2", "--amount", "300")
    await said("withdraw", "--thread", "big-3", "--reason", "mine")
    scopes = [word for scope in ("read", "start", "decide") for word in ("--scope", scope)]
    token = max((await said("tokens", "create", "robot", *scopes)).split(), key=len)
    link = await said("link", "--thread", "big-6", "--to", "dana@example.com")
    login = await said("login", "--as", "U01ALICE")
    url = f"http://127.0.0.1:{town.port}"
    async with Program(url, token) as program, Visitor(url) as visitor:
        raw = json.dumps({"decision": "approve", "approver": "carol"}).encode()
        answers = [
            await program.post("/api/threads", {"thread": "by-api", "amount": "250"}, headers={"Idempotency-Key": "k"}),
            await program.post(f"/api/approvals/{ids[4]}/decision", {"decision": "approve"}),
            await program.ask("POST", f"/api/approvals/{ids[5]}/decision", raw=raw, headers=signed(raw)),
        ]
        paths = ("threads", "threads/big-0", "approvals", f"approvals/{ids[7]}", "decisions", "payments", "events")
        answers += [await program.get(f"/api/{path}") for path in paths]
        assert [answer.status for answer in answers if answer.status >= 300] == [], answers
        page = await visitor.get(f"/a/{_path(link)}")
        said_yes = page.form("Approve").fields | {"verdict": "approve"}
        assert (await visitor.post(f"/a/{_path(link)}", said_yes)).status == 303
        page = await visitor.get(f"/login/{_path(login)}")
        assert (await visitor.post(f"/login/{_path(login)}", page.form("Sign in").fields)).status == 303
        for path in ("/approvals", "/approvals?view=history", "/approvals?view=all", "/approvals?q=ACME"):
            assert (await visitor.get(path)).status == 200
        page = await visitor.get(f"/approvals/{ids[8]}")
        assert (await visitor.press(page, "Approve")).status == 303
    caller, reply = town.caller, town.caller.response_url
    for words in ("", "mine", "all"):
        assert (await caller.click(command_body(words, user="U01ALICE", response_url=reply))).status == 200
    assert (
        await caller.send(
            SlackRequest(name="home", body=opened_body("U01ALICE"), expected=range(200, 201), content_type=JSON)
        )
    ).status == 200

    async def shown() -> bool:
        return bool(town.slack.homes)

    await until(shown)
    async with Program(url, town.terminal.environment["METRICS_TOKEN"]) as program:
        assert (await program.get("/metrics")).status == 200
    for words in (
        "list", "list --status waiting", "show --thread big-0", "trace --thread big-0", "payments list",
        "payments list --unknown", "audit", "audit --thread big-0", "audit verify", "audit export",
        "approvals refresh --all", "webhooks list", "doctor", "away --as U01ALICE --to U02BOB --until friday", "away",
        "away --as U01ALICE --back", "tokens list", "deliver", "tokens revoke robot", "policy",
    ):  # fmt: skip
        await said(*words.split())

    async def settled() -> bool:
        waiting = await all_rows(conn, "SELECT FROM threads WHERE due_at IS NOT NULL")
        unsent = await all_rows(conn, "SELECT FROM notices WHERE due_at IS NOT NULL")
        return not waiting and not unsent

    await until(settled, within_s=60)


async def _afterwards(conn: Connection, town: Town, hooks: HookServer) -> None:
    """What waits is reminded of, and expires; what is stuck is tried again; what is long over is deleted."""
    await conn.execute("UPDATE approvals SET remind_every_s = 3600, remind_at = now() WHERE status = 'pending'")

    async def reminded() -> bool:
        return bool(await all_rows(conn, "SELECT FROM notices WHERE kind = 'reminder' AND status = 'sent'"))

    await until(reminded, within_s=60)
    await conn.execute("UPDATE threads SET status = 'stuck', due_at = NULL WHERE thread_id = 'by-api'")
    assert (await town.terminal.run_meanwhile("retry", "--thread", "by-api")).code == 0
    await conn.execute("UPDATE approvals SET expires_at = now() WHERE status = 'pending'")

    async def over() -> bool:
        left = await all_rows(conn, "SELECT FROM threads WHERE ended_at IS NULL")
        untold = await all_rows(conn, "SELECT FROM notices WHERE due_at IS NOT NULL")
        unsent = await all_rows(conn, "SELECT FROM webhook_deliveries WHERE status <> 'sent'")
        unshown = await all_rows(
            conn, "SELECT FROM trace_marks UNION ALL SELECT FROM trace_exports WHERE due_at IS NOT NULL"
        )
        return not left and not untold and not unsent and not unshown

    await until(over, within_s=60)
    assert {"approval.requested", "approval.decided", "approval.expired", "payment.paid", "thread.done"} <= set(
        hooks.types
    )
    await conn.execute("UPDATE threads SET ended_at = ended_at - interval '30 days' WHERE ended_at IS NOT NULL")
    await conn.execute("UPDATE events SET created_at = created_at - interval '60 days'")
    await conn.execute("UPDATE spans SET started_at = started_at - interval '60 days'")
    await conn.execute("UPDATE trace_exports SET marked_at = marked_at - interval '60 days'")
    for words in ("prune --dry-run", "prune"):
        assert (await town.terminal.run_meanwhile(*words.split())).code == 0
    for table in ("checkpoints", "events", "spans", "trace_exports"):
        assert not await all_rows(conn, f"SELECT FROM {table}"), table


async def _without_a_target(town: Town, collector: Collector) -> None:
    """Traces are to go nowhere any more."""
    assert collector.mistakes == [] and {"small", "other", "big-0", "by-api"} <= collector.threads
    del town.terminal.environment["OTEL_EXPORTER_OTLP_ENDPOINT"]
    assert (await town.terminal.run_meanwhile("deliver")).code == 0


def _path(printed: str) -> str:
    match = re.search(r"https?://\S+/(?:a|login)/(\S+)", printed)
    assert match, printed
    return match[1]
