"""What a user of the command line sees: each command is a process of its own, as typed."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

import aiohttp
import psycopg
import pytest
from psycopg import sql

from flow.approvals import decide
from flow.claims import FLOW
from flow.database import Connection, advisory_key
from flow.drive import drive
from flow.embedded import stop_embedded
from flow.flows import Flows
from tests.command import ROOT, Done, Running, Terminal, members_of, worker
from tests.drives import everything, held_at_payment
from tests.people import ANN, POLICY, YES, start_claim
from tests.rows import all_rows, break_table, mend_table, one_row, rewrite, until, value

HEAVY = {"langgraph", "langchain_core", "langsmith"}


@pytest.fixture
def terminal(tmp_path: Path, database_url: str) -> Terminal:
    """A terminal whose commands use this test's database."""
    return Terminal(tmp_path, DATABASE_URL=database_url)


@pytest.fixture
def fresh() -> Iterator[Terminal]:
    """A terminal with nothing configured, as in a new checkout: an embedded server of its own, gone at the end."""
    # Short: a Unix socket's path has at most 107 bytes.
    folder = Path(tempfile.mkdtemp(prefix="cf-"))
    yield Terminal(folder)
    stop_embedded(folder / ".claim_flow")
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
async def waiting(conn: Connection, flows: Flows) -> str:
    """The interrupt id of thread t1, which waits for a decision on 250.00 USD."""
    await start_claim(conn, "t1", "250")
    assert await drive(conn, "t1", flows=flows, policy=POLICY) == "waiting"
    return str(await value(conn, "SELECT interrupt_id FROM approvals"))


# The main job


async def test_a_small_claim_is_paid_at_once(terminal: Terminal, conn: Connection) -> None:
    done = terminal.run("start", "--thread", "t0", "--amount", "20", "--payee", "ACME", "--note", "chalk")
    assert done == Done(code=0, out="t0: 20.00 USD is paid, reference L-t0\n", err="")
    payment = await one_row(conn, "SELECT * FROM payments")
    assert (payment["thread_id"], str(payment["amount"]), payment["currency"]) == ("t0", "20.00", "USD")
    assert (payment["payee"], payment["reference"], payment["status"]) == ("ACME", "L-t0", "paid")


async def test_a_large_claim_waits_for_the_command_that_it_prints(terminal: Terminal, conn: Connection) -> None:
    started = terminal.run("start", "--thread", "t1", "--amount", "250")
    interrupt_id = await value(conn, "SELECT interrupt_id FROM approvals")
    assert started.out == (
        "t1: 250.00 USD is waiting for approval\n"
        f"  interrupt  {interrupt_id}\n"
        "  approve    uv run claim_flow.py resume --thread t1 --approve\n"
        "  reject     uv run claim_flow.py resume --thread t1 --reject\n"
    )
    assert (started.code, started.err) == (0, "")
    assert await all_rows(conn, "SELECT * FROM payments") == []

    [approve] = re.findall(r"approve +uv run claim_flow.py (.*)", started.out)
    resumed = terminal.run(*approve.split())
    assert (resumed.code, resumed.err) == (0, "")
    assert re.fullmatch(
        r"t1: 250.00 USD is paid, reference L-t1 \(approved by cli:ann at [0-9-]{10} [0-9:]{8} UTC\)\n", resumed.out
    )
    payment = await one_row(conn, "SELECT * FROM payments")

    assert terminal.run(*approve.split()) == resumed
    assert await one_row(conn, "SELECT * FROM payments") == payment

    decided_at = await value(conn, "SELECT decided_at FROM decisions")
    assert_refused(
        terminal.run("resume", "--thread", "t1", "--reject"),
        f"already approved by cli:ann at {decided_at:%Y-%m-%d %H:%M:%S} UTC",
    )
    assert await one_row(conn, "SELECT * FROM payments") == payment
    assert await value(conn, "SELECT verdict FROM decisions") == "approve"


async def test_a_rejected_claim_is_never_paid(terminal: Terminal, conn: Connection, waiting: str) -> None:
    rejected = terminal.run("resume", "--thread", "t1", "--reject", "--reason", "too dear", "--by", "Bob")
    assert (rejected.code, rejected.err) == (0, "")
    assert re.fullmatch(
        r"t1: 250.00 USD is rejected, nothing is paid \(rejected by Bob \(cli:ann\) at .* UTC: too dear\)\n",
        rejected.out,
    )
    assert_refused(terminal.run("resume", "--thread", "t1", "--approve"), "already rejected by Bob (cli:ann) at ")
    assert terminal.run("resume", "--thread", "t1", "--reject", "--interrupt", waiting) == rejected
    assert await all_rows(conn, "SELECT * FROM payments") == []
    assert await value(conn, "SELECT status FROM threads") == "rejected"


async def test_whoever_types_counts_once_whatever_they_say_who_they_are(
    terminal: Terminal, conn: Connection, waiting: str
) -> None:
    await rewrite(conn, "required = 2")
    for name in ("Alice", "Bob"):
        done = terminal.run("resume", "--thread", "t1", "--approve", "--by", name)
        assert done.code == 0
        assert "is waiting for approval" in done.out
        assert waiting in done.out
    assert await all_rows(conn, "SELECT person, person_name FROM decisions") == [
        {"person": "cli:ann", "person_name": "Alice (cli:ann)"}
    ]
    assert await all_rows(conn, "SELECT * FROM payments") == []


async def test_starting_again_with_the_same_input_returns_the_thread(
    terminal: Terminal, conn: Connection, waiting: str
) -> None:
    before = await everything(conn)
    words = ("start", "--thread", "t1", "--amount", "250.0", "--payee", "ACME", "--note", "three chairs")
    again = terminal.run(*words, trace_imports=True)
    assert again.code == 0
    assert again.out.startswith(f"t1: 250.00 USD is waiting for approval\n  interrupt  {waiting}\n")
    assert not HEAVY & again.imports
    assert await everything(conn) == before


@pytest.mark.usefixtures("waiting")
@pytest.mark.parametrize(
    "other", [["--amount", "251"], ["--currency", "EUR"], ["--payee", "ACMA"], ["--note", "four chairs"]]
)
async def test_starting_again_with_another_input_is_refused(
    terminal: Terminal, conn: Connection, other: list[str]
) -> None:
    before = await everything(conn)
    words = ["start", "--thread", "t1", "--amount", "250", "--payee", "ACME", "--note", "three chairs", *other]
    assert_refused(terminal.run(*words), "thread t1 was started before with another input (250.00 USD to ACME)")
    assert await everything(conn) == before


# Refusals


async def test_an_unknown_thread_is_refused(terminal: Terminal, conn: Connection) -> None:
    for words in (["resume", "--approve"], ["resume", "--reject"], ["show"]):
        assert_refused(terminal.run(*words, "--thread", "nobody"), "no thread nobody: see `claim_flow.py list`")
    assert not any((await everything(conn)).values())


async def test_a_thread_that_waits_for_nothing_is_refused(terminal: Terminal, conn: Connection, flows: Flows) -> None:
    await start_claim(conn, "t0", "20")
    assert await drive(conn, "t0", flows=flows, policy=POLICY) == "over"
    before = await everything(conn)
    for verdict in ("--approve", "--reject"):
        assert_refused(
            terminal.run("resume", "--thread", "t0", verdict),
            "thread t0 waits for no decision: it is paid, reference L-t0",
        )
    assert await everything(conn) == before


async def test_an_interrupt_that_the_thread_does_not_have_is_refused(
    terminal: Terminal, conn: Connection, waiting: str
) -> None:
    before = await everything(conn)
    words = ("resume", "--thread", "t1", "--approve", "--interrupt")
    assert_refused(terminal.run(*words, "0" * 32), f"no approval has the interrupt id '{'0' * 32}'")
    assert_refused(terminal.run(*words, waiting[:31]), "interrupt id ", code=2)
    assert await everything(conn) == before


@pytest.mark.parametrize(
    ("words", "said"),
    [
        *((["start", "--thread", "t1", "--amount", amount], f"amount '{amount}' is not usable: ") for amount in (
            "NaN", "-inf", "-5", "0", "1e400", "12.345", "1,000", "1_000", " 5", "", "1000000000000000",
        )),
        (["start", "--thread", "t1", "--amount", "\uff15"], r"amount '\uff15' is not usable: "),
        (["start", "--thread", "t1", "--amount", "1.5", "--currency", "JPY"], "amount '1.5' is not usable: JPY"),
        *((["start", "--thread", "t1", "--amount", "5", "--currency", currency], f"currency '{currency}' is not")
          for currency in ("usd", "BTC")),
        *((["start", "--amount", "5", "--thread", thread], f"thread id '{thread}' is not usable: ")
          for thread in ("", "-t", "../t1")),
        (["start", "--amount", "5", "--thread", "t" * 201], "thread id 'ttt"),
        (["resume", "--approve", "--thread", "t/1"], "thread id 't/1' is not usable: "),
        (["resume", "--thread", "t1", "--approve", "--interrupt", "all"], "interrupt id 'all' is not usable: "),
        (["show", "--thread", "t/1"], "thread id 't/1' is not usable: "),
        (["start", "--thread", "t1", "--amount", "5", "--payee", "ACME\nBOB"], "payee "),
        (["start", "--thread", "t1", "--amount", "5", "--note", "x" * 10_001], "note "),
        (["start", "--thread", "t1", "--amount", "5", "--note", "\x1b[2J"], "note "),
        (["start", "--thread", "t1", "--amount", "5", "--by", "a\nb"], "--by "),
        # Bytes that are no UTF-8 arrive as lone surrogates, which neither Postgres nor JSON can hold.
        (["start", "--amount", "5", "--thread", b"\xff"], r"thread id '\udcff' is not usable: "),
        (["start", "--thread", "t1", "--amount", b"5\xff"], r"amount '5\udcff' is not usable: "),
        (["start", "--thread", "t1", "--amount", "5", "--currency", b"\xff"], r"currency '\udcff' is not usable: "),
        (["start", "--thread", "t1", "--amount", "5", "--payee", b"\xff"], r"payee '\udcff' is not usable: "),
        (["start", "--thread", "t1", "--amount", "5", "--note", b"\xed\xa0\x80"], r"note '\udced"),
        (["start", "--thread", "t1", "--amount", "5", "--by", b"\xff"], r"--by '\udcff' is not usable: "),
        (["resume", "--thread", "t1", "--approve", "--reason", b"\xff"], r"--reason '\udcff' is not usable: "),
        (["resume", "--thread", "t1", "--approve", "--by", b"\xff"], r"--by '\udcff' is not usable: "),
        (["resume", "--thread", "t1", "--approve", "--interrupt", b"\xff"], r"interrupt id '\udcff' is not usable: "),
    ],
)  # fmt: skip
def test_what_cannot_be_used_is_refused_in_one_line_before_a_database_is_touched(
    tmp_path: Path, words: list[str | bytes], said: str
) -> None:
    # Nothing configured: whatever reached for the database would make an embedded one here.
    assert_refused(Terminal(tmp_path).run(*words), said, code=2)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "words",
    [
        ["start", "--amount", "5"],
        ["start", "--thread", "t1"],
        ["resume", "--thread", "t1"],
        ["resume", "--approve"],
        ["resume", "--thread", "t1", "--reject", "--approve"],
        ["show"],
        ["list", "--status", "lost"],
        ["list", "--limit", "0"],
        ["pay"],
    ],
)
def test_wrong_usage_is_told_with_exit_2_before_a_database_is_touched(tmp_path: Path, words: list[str]) -> None:
    done = Terminal(tmp_path).run(*words)
    assert (done.code, done.out) == (2, "")
    assert done.err.startswith("Usage: claim_flow.py ")
    assert "Traceback" not in done.err
    assert list(tmp_path.iterdir()) == []


async def test_a_user_name_that_cannot_be_stored_is_refused(terminal: Terminal, conn: Connection) -> None:
    terminal.environment["LOGNAME"] = "a\udcff"
    assert_refused(terminal.run("start", "--thread", "t1", "--amount", "5"), r"\udcff", code=2)
    assert not any((await everything(conn)).values())


# What is stored


async def test_list_and_show_tell_programs_the_same(terminal: Terminal, conn: Connection, waiting: str) -> None:
    await start_claim(conn, "t2", "20")
    [newest, oldest] = terminal.run("list", "--json").json
    assert newest == terminal.run("show", "--thread", "t2", "--json").json
    assert oldest == terminal.run("show", "--thread", "t1", "--json").json
    assert_like(
        newest,
        {"thread": "t2", "flow": "claims", "status": "running", "amount": "20.00", "currency": "USD"}
        | {"approval": None, "payment": None},
    )
    assert_like(oldest, {"thread": "t1", "status": "waiting", "amount": "250.00", "currency": "USD", "payment": None})
    assert_like(
        oldest["approval"],
        {"interrupt_id": waiting, "tier": "approval", "status": "pending", "expires_at": None, "decisions": []},
    )
    assert [story["thread"] for story in terminal.run("list", "--json", "--status", "waiting").json] == ["t1"]
    assert [story["thread"] for story in terminal.run("list", "--json", "--limit", "1").json] == ["t2"]
    assert terminal.run("list", "--json", "--status", "paid").json == []


async def test_the_running_commands_tell_programs_where_the_thread_is(terminal: Terminal, conn: Connection) -> None:
    started = terminal.run("start", "--thread", "t1", "--amount", "1.5", "--currency", "KWD", "--json")
    assert (started.code, started.err) == (0, "")
    assert_like(started.json, {"thread": "t1", "status": "waiting", "amount": "1.500", "currency": "KWD"})
    resumed = terminal.run("resume", "--thread", "t1", "--approve", "--reason", "fine", "--json")
    assert (resumed.code, resumed.err) == (0, "")
    assert resumed.json == terminal.run("show", "--thread", "t1", "--json").json
    payment = await one_row(conn, "SELECT id, reference, status FROM payments")
    assert_like(resumed.json, {"status": "paid"})
    assert_like(resumed.json["payment"], payment)
    assert_like(resumed.json["approval"], {"status": "approved"})
    [decision] = resumed.json["approval"]["decisions"]
    assert_like(decision, {"person": "cli:ann", "verdict": "approve", "door": "cli", "reason": "fine"})
    for text in (decision["decided_at"], resumed.json["payment"]["paid_at"], resumed.json["created_at"]):
        assert datetime.fromisoformat(text).utcoffset() is not None


async def test_list_and_show_tell_people_the_same(terminal: Terminal, conn: Connection, waiting: str) -> None:
    await decide(conn, waiting, ANN, YES)
    await start_claim(conn, "t2", "20")
    listed = terminal.run("list")
    assert (listed.code, listed.err) == (0, "")
    heads, newest, oldest = listed.out.splitlines()
    assert re.split(r"\s{2,}", heads.strip()) == (
        ["thread", "flow", "status", "amount", "payee", "requested by", "started", "reference"]
    )
    assert newest.split()[:7] == ["t2", "claims", "running", "20.00", "USD", "ACME", "cli:ann"]
    assert oldest.split()[:7] == ["t1", "claims", "running", "250.00", "USD", "ACME", "cli:ann"]
    shown = terminal.run("show", "--thread", "t1")
    assert (shown.code, shown.err) == (0, "")
    for line in (
        "thread        t1",
        "amount        250.00 USD",
        "payee         ACME",
        "note          three chairs",
        "requested by  cli:ann",
        f"approval      approved, interrupt {waiting}",
        "approve       by ann (cli:ann, slack)",
    ):
        assert f"\n{line}" in f"\n{shown.out}", line
    assert terminal.run("list", "--status", "paid").out.startswith("no threads")


async def test_a_long_thread_id_can_be_copied_from_the_list(terminal: Terminal, conn: Connection) -> None:
    long = "claim:2026-11-30:" + "x" * 183
    await start_claim(conn, long, "20")
    rows = terminal.run("list").out.splitlines()[1:]
    assert "".join(row.split()[0] for row in rows) == long


async def test_what_a_stranger_wrote_cannot_rewrite_the_screen(terminal: Terminal, conn: Connection) -> None:
    words = ("--amount", "250", "--payee", "ACME\u202e", "--note", "[red]three[/red]\u200b chairs")
    assert terminal.run("start", "--thread", "t1", *words).code == 0
    # As an older release, or SQL by hand, may have left it.
    await conn.execute("UPDATE threads SET requested_by = E'cli:\\x1b[2J'")
    shown = terminal.run("show", "--thread", "t1").out + terminal.run("list").out
    assert not {"\u202e", "\u200b", "\x1b"} & set(shown)
    assert r"ACME\u{202e}" in shown
    assert "[red]three[/red]" in shown
    assert r"cli:\u{1b}[2J" in shown


def test_threads_are_still_there_after_the_database_was_stopped(fresh: Terminal) -> None:
    assert fresh.run("start", "--thread", "t0", "--amount", "20").out == "t0: 20.00 USD is paid, reference L-t0\n"
    assert fresh.run("start", "--thread", "t1", "--amount", "250").code == 0
    listed, shown = fresh.run("list"), fresh.run("show", "--thread", "t1", "--json")
    assert {story["thread"]: story["status"] for story in fresh.run("list", "--json").json} == {
        "t0": "paid",
        "t1": "waiting",
    }
    assert fresh.run("db", "stop") == Done(code=0, out="stopped\n", err="")
    assert fresh.run("db", "stop") == Done(code=0, out="it is not running\n", err="")
    assert (fresh.run("list"), fresh.run("show", "--thread", "t1", "--json")) == (listed, shown)
    resumed = fresh.run("resume", "--thread", "t1", "--approve")
    assert (resumed.code, resumed.err) == (0, "")
    assert resumed.out.startswith("t1: 250.00 USD is paid, reference L-t1 (approved by cli:ann at ")


# What a command costs


@pytest.mark.parametrize(
    "words",
    [
        ["list"],
        ["list", "--json"],
        ["show", "--thread", "t1"],
        ["show", "--thread", "t1", "--json"],
        ["trace", "--thread", "t1"],
        ["doctor"],
    ],
)
async def test_a_command_that_only_reads_never_imports_langgraph(
    terminal: Terminal, waiting: str, words: list[str]
) -> None:
    done = terminal.run(*words, trace_imports=True)
    assert done.code == 0
    assert {"flow.database", "psycopg"} <= done.imports
    assert not HEAVY & done.imports
    assert waiting in done.out or "t1" in done.out or words == ["doctor"]


async def test_the_bot_never_imports_langgraph(terminal: Terminal) -> None:
    terminal.environment |= {"PORT": "0"} | SLACK
    async with terminal.service("bot", trace_imports=True) as bot:
        assert await status_of(bot, "/healthz") == 200
        done = await bot.stop()
    assert done.code == 0
    assert {"bot.server", "slack_bolt"} <= done.imports
    assert not HEAVY & done.imports


# Settings


async def test_the_database_of_a_dotenv_file_is_used(tmp_path: Path, database_url: str, waiting: str) -> None:
    (tmp_path / ".env").write_text(f"# where the claims are\nDATABASE_URL={database_url}\n")
    assert waiting in Terminal(tmp_path).run("show", "--thread", "t1").out
    # The environment comes first.
    away = Terminal(tmp_path, DATABASE_URL="postgresql://u@127.0.0.1:1/elsewhere").run("list")
    assert (away.code, away.out) == (1, "")


def test_half_a_slack_configuration_is_refused_by_every_command(terminal: Terminal) -> None:
    terminal.environment["SLACK_BOT_TOKEN"] = "xoxb-1"
    for words in (["list"], ["start", "--thread", "t1", "--amount", "5"], ["doctor"], ["serve"]):
        assert_refused(terminal.run(*words), "SLACK_CHANNEL", code=2)


@pytest.mark.parametrize(
    "words", [["list"], ["start", "--thread", "t1", "--amount", "5"], ["work", "--once"], ["serve"], ["deliver"]]
)
def test_a_database_that_is_away_is_told_in_one_line_that_names_the_setting(tmp_path: Path, words: list[str]) -> None:
    away = Terminal(tmp_path, DATABASE_URL="postgresql://u@127.0.0.1:1/claims")
    assert_refused(away.run(*words), "DATABASE_URL")


def test_a_database_url_that_is_none_is_told_in_one_line(tmp_path: Path) -> None:
    assert_refused(Terminal(tmp_path, DATABASE_URL="localhost").run("list"), "DATABASE_URL", code=2)


async def test_setup_makes_the_tables(tmp_path: Path, empty_database_url: str) -> None:
    terminal = Terminal(tmp_path, DATABASE_URL=empty_database_url)
    first = terminal.run("setup")
    assert (first.code, first.err) == (0, "")
    assert re.fullmatch(r"the database claim_flow_test_\w+ is ready \(Postgres \d+\)\n", first.out)
    assert terminal.run("setup") == first
    assert terminal.run("list", "--json").json == []


def test_delivering_without_slack_is_refused(terminal: Terminal) -> None:
    assert_refused(terminal.run("deliver"), "Slack is off: ")


def test_doctor_finds_nothing_wrong_where_nothing_is(terminal: Terminal) -> None:
    done = terminal.run("doctor")
    assert (done.code, done.err) == (0, "")
    assert re.search(r"^ok     database: Postgres \d+\.\d+ \(DATABASE_URL\), tables up to date\n", done.out)
    assert re.search(r"^ok     locks: ", done.out, re.MULTILINE)
    assert re.search(r"^ok     Slack: off$", done.out, re.MULTILINE)


def test_doctor_says_what_to_fix_and_exits_1(tmp_path: Path) -> None:
    away = Terminal(tmp_path, DATABASE_URL="postgresql://u@127.0.0.1:1/claims")
    done = away.run("doctor")
    assert (done.code, done.err) == (1, "")
    assert re.search(r"^WRONG  database: no connection to the database: ", done.out, re.MULTILINE)
    findings = away.run("doctor", "--json")
    assert findings.code == 1
    [database] = [finding for finding in findings.json if finding["what"] == "database"]
    assert (database["ok"], "DATABASE_URL" in database["fix"]) == (False, True)


# Steps that fail


BROKEN = "IF NEW.thread_id NOT LIKE 'rehearsal-%' THEN RAISE EXCEPTION 'the bank is closed'; END IF"


async def test_a_step_that_fails_is_told_and_tried_again(terminal: Terminal, conn: Connection) -> None:
    await break_table(conn, "payments", "INSERT", BROKEN)
    done = terminal.run("start", "--thread", "t0", "--amount", "20")
    assert done.code == 1
    assert re.fullmatch(
        r"t0: 20.00 USD is running: RaiseException: the bank is closed .*; the next try is at .* UTC\n", done.out
    )
    assert re.fullmatch(r"error: thread t0 did not get through: RaiseException: the bank is closed .*\n", done.err)
    # A second from now, at first; by then this test is not ready for it.
    await conn.execute("UPDATE threads SET due_at = due_at + interval '1 hour'")
    shown = terminal.run("show", "--thread", "t0").out
    assert re.search(r"^reason +RaiseException: the bank is closed", shown, re.MULTILINE)
    assert re.search(r"^next try +\d{4}-", shown, re.MULTILINE)
    await mend_table(conn)
    await conn.execute("UPDATE threads SET due_at = clock_timestamp()")
    assert terminal.run("start", "--thread", "t0", "--amount", "20").out == "t0: 20.00 USD is paid, reference L-t0\n"


async def test_a_step_that_fails_is_told_alike_with_and_without_a_worker(terminal: Terminal, conn: Connection) -> None:
    await break_table(conn, "payments", "INSERT", BROKEN)
    alone = terminal.run("start", "--thread", "t0", "--amount", "20")
    async with worker(terminal, conn):
        helped = await terminal.run_meanwhile("start", "--thread", "t1", "--amount", "20")
    assert without_details(helped).replace("t1", "t0") == without_details(alone)


async def test_a_stuck_thread_says_so_on_its_card_and_is_paid_when_it_is_tried_again(
    terminal: Terminal, conn: Connection, waiting: str
) -> None:
    await break_table(conn, "payments", "INSERT", BROKEN)
    await decide(conn, waiting, ANN, YES)
    await conn.execute("UPDATE threads SET attempts = 19")
    worked = terminal.run("work", "--once")
    assert worked.code == 0
    # With the reason, for whoever reads the log.
    assert re.search(r"thread t1 needs a person: .*the bank is closed", worked.err)
    assert await value(conn, "SELECT status FROM notices WHERE kind = 'alarm'") == "pending"
    card = "SELECT kind, version FROM notices WHERE kind <> 'alarm' ORDER BY kind"
    told = [(row["kind"], row["version"]) for row in await all_rows(conn, card)]
    assert await statuses(conn) == {"t1": "stuck"}
    assert [kind for kind, _ in told] == ["card", "reply"]
    assert_refused(terminal.run("retry", "--thread", "nobody"), "no thread nobody")

    await mend_table(conn)
    done = terminal.run("retry", "--thread", "t1")
    assert (done.code, done.out.startswith("t1: 250.00 USD is paid, reference L-t1")) == (0, True)
    now = [(row["kind"], row["version"]) for row in await all_rows(conn, card)]
    assert all(after > before for (_, before), (_, after) in zip(told, now, strict=True))
    assert_refused(terminal.run("retry", "--thread", "t1"), "nothing to try again")


async def test_a_start_that_nobody_drives_in_time_is_no_success(terminal: Terminal, conn: Connection) -> None:
    terminal.environment["DRIVE_TIMEOUT"] = "1"
    # A worker that says it is here, and does nothing.
    await conn.execute("SELECT pg_advisory_lock_shared(%s, %s)", advisory_key(FLOW.key))
    done = terminal.run("start", "--thread", "t1", "--amount", "20")
    assert done.code == 1
    assert "nobody has driven it in time" in done.err


@pytest.mark.parametrize("name", ["LANGSMITH_TRACING", "LANGSMITH_TRACING_V2", "LANGCHAIN_TRACING_V2"])
def test_a_run_is_never_sent_to_langsmith_by_accident(name: str) -> None:
    program = "import flow.drive, langsmith.utils as u; print(u.tracing_is_enabled())"
    environment = {**os.environ, name: "true", "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


# Workers


async def test_work_once_drives_what_is_due_and_ends(terminal: Terminal, conn: Connection, waiting: str) -> None:
    await decide(conn, waiting, ANN, YES)
    await start_claim(conn, "small", "20")
    await start_claim(conn, "large", "250")
    done = terminal.run("work", "--once")
    assert (done.code, done.out) == (0, "")
    assert await statuses(conn) == {"t1": "paid", "small": "paid", "large": "waiting"}
    assert terminal.run("work", "--once").code == 0
    assert await value(conn, "SELECT count(*) FROM payments") == 2


@pytest.mark.parametrize(
    "words",
    [
        ["start", "--thread", "t0", "--amount", "20", "--payee", "ACME", "--note", "three chairs"],
        ["work", "--once"],
    ],
)
async def test_a_database_that_goes_away_meanwhile_is_told_in_one_line(
    terminal: Terminal, database_url: str, admin: psycopg.Connection, conn: Connection, words: list[str]
) -> None:
    async with held_at_payment(conn, database_url, ["t0"]) as until_held:
        running = await terminal.start(*words)
        await until_held()
        allow_connections(admin, conn.info.dbname, allowed=False)
        admin.execute(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
            # All but who holds it.
            " WHERE datname = %s AND application_name <> 'claim_flow listen'",
            (conn.info.dbname,),
        )
        done = await running.end()
    allow_connections(admin, conn.info.dbname, allowed=True)
    assert (done.code, done.out) == (1, "")
    assert re.search(r"^error: .*database", done.err, re.MULTILINE), done.err
    assert "Traceback" not in done.err
    assert terminal.run(*words).code == 0
    assert terminal.run("show", "--thread", "t0", "--json").json["status"] == "paid"


async def test_start_and_resume_have_a_worker_do_it_and_say_the_same(
    tmp_path: Path, terminal: Terminal, empty_database_url: str, conn: Connection
) -> None:
    commands = (
        ("start", "--thread", "small", "--amount", "20"),
        ("start", "--thread", "large", "--amount", "250"),
        ("resume", "--thread", "large", "--approve", "--json"),
        ("resume", "--thread", "large", "--approve"),
    )
    async with worker(terminal, conn):
        helped = [await terminal.run_meanwhile(*words, trace_imports=True) for words in commands]
    for done in helped:
        assert not HEAVY & done.imports
    alone = Terminal(tmp_path, DATABASE_URL=empty_database_url)
    for done, words in zip(helped, commands, strict=True):
        by_itself = alone.run(*words)
        assert by_itself.err == ""
        assert without_details(done)[:2] == without_details(by_itself)[:2]


@pytest.mark.usefixtures("waiting")
async def test_start_and_resume_go_on_by_themselves_when_the_worker_is_gone(
    terminal: Terminal, conn: Connection
) -> None:
    async with worker(terminal, conn) as busy:
        # It still says that it is here, but takes nothing up any more.
        busy.signal(signal.SIGSTOP)
        session = (await busy.zygote()).pid
        commands = asyncio.gather(
            terminal.run_meanwhile("start", "--thread", "t0", "--amount", "20"),
            terminal.run_meanwhile("resume", "--thread", "t1", "--approve"),
        )
        await until(lambda: watchers_are(conn, 2))
        assert await all_rows(conn, "SELECT * FROM payments") == []
        busy.kill()
        started, resumed = await commands
    assert started == Done(code=0, out="t0: 20.00 USD is paid, reference L-t0\n", err="")
    assert resumed.out.startswith("t1: 250.00 USD is paid, reference L-t1 (approved by cli:ann at ")
    assert (resumed.code, resumed.err) == (0, "")
    assert await statuses(conn) == {"t0": "paid", "t1": "paid"}
    await until_ended(session)


async def until_ended(group: int) -> None:
    """Return when nobody of it is left: a child's death is seen a moment after that of its parent."""

    async def nobody_is_left() -> bool:
        return members_of(group) == []

    await until(nobody_is_left)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_a_worker_that_is_told_to_stop_lets_its_drives_end(
    terminal: Terminal, database_url: str, conn: Connection, number: signal.Signals
) -> None:
    async with worker(terminal, conn) as busy:
        session = (await busy.zygote()).pid
        async with held_at_payment(conn, database_url, ["t0"]) as until_held:
            await until_held()
            busy.signal(number)
            await busy.until(lambda: said(busy, "stopping"))
        done = await busy.end()
    assert (done.code, done.out) == (0, "")
    assert "Traceback" not in done.err
    assert await statuses(conn) == {"t0": "paid"}
    await until_ended(session)


async def test_serve_is_ready_once_a_thread_can_be_driven(terminal: Terminal, conn: Connection) -> None:
    terminal.environment["PORT"] = "0"
    async with terminal.service("serve") as server:
        await server.until(lambda: is_ready(server))
        assert await status_of(server, "/healthz") == 200
        done = await terminal.run_meanwhile("start", "--thread", "t0", "--amount", "20", trace_imports=True)
        assert (done.code, done.out) == (0, "t0: 20.00 USD is paid, reference L-t0\n")
        assert not HEAVY & done.imports
        stopped = await server.stop()
    assert (stopped.code, stopped.out) == (0, "")
    assert await statuses(conn) == {"t0": "paid"}


async def test_a_port_in_use_is_told_in_one_line(terminal: Terminal) -> None:
    terminal.environment["PORT"] = "0"
    async with terminal.service("bot") as bot:
        await bot.until(lambda: said(bot, "listening"))
        terminal.environment["PORT"] = (await address_of(bot)).rsplit(":", 1)[1]
        done = await terminal.run_meanwhile("bot")
    assert done.code == 2
    assert re.search(r"^error: cannot listen on HOST 127.0.0.1, (?i:port) \d+: ", done.err, re.MULTILINE)
    assert "Traceback" not in done.err


# Helpers

SLACK = {"SLACK_BOT_TOKEN": "xoxb-1", "SLACK_SIGNING_SECRET": "s", "SLACK_CHANNEL": "C01"} | {
    # Nobody is there, and nothing is asked of them.
    "SLACK_API_URL": "http://127.0.0.1:1/api/",
    "APPROVERS": "U01ALICE",
}


def assert_refused(done: Done, said: str, *, code: int = 1) -> None:
    """One clear line on stderr, and nothing else."""
    assert (done.code, done.out) == (code, "")
    assert done.err.startswith("error: ")
    assert said in done.err
    assert done.err.count("\n") == 1, done.err


def assert_like(found: dict[str, Any], wanted: dict[str, Any]) -> None:
    """At least these keys, with these values."""
    assert {name: found[name] for name in wanted} == wanted


def without_details(done: Done) -> str:
    """Code, output and errors without what is new in each run: ids and times."""
    text = json.dumps([done.code, done.out, done.err])
    text = re.sub(r"\b[0-9a-f]{32,64}\b", "ID", text)
    return re.sub(r"\d{4}-\d\d-\d\d[T ]\d\d:\d\d(:\d\d(\.\d+)?)?(\+00:00| UTC)", "TIME", text)


async def statuses(conn: Connection) -> dict[str, str]:
    rows = await all_rows(conn, "SELECT thread_id, status FROM threads")
    return {row["thread_id"]: row["status"] for row in rows}


async def watchers_are(conn: Connection, count: int) -> bool:
    """Whether this many commands wait for a worker: what they did last was to see that it is here."""
    watching = await value(
        conn,
        "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database()"
        " AND application_name = 'claim_flow door' AND state = 'idle' AND query LIKE 'SELECT EXISTS%%pg_locks%%'",
    )
    return bool(watching == count)


def allow_connections(admin: psycopg.Connection, database: str, *, allowed: bool) -> None:
    admin.execute(
        sql.SQL("ALTER DATABASE {} ALLOW_CONNECTIONS {}").format(sql.Identifier(database), sql.Literal(allowed))
    )


async def said(running: Running, text: str) -> bool:
    return text in running.err


async def address_of(running: Running) -> str:
    await running.until(lambda: said(running, "listening on "))
    [address] = re.findall(r"listening on (http://[0-9.]+:\d+)", running.err)
    return str(address)


async def status_of(running: Running, path: str) -> int:
    async with aiohttp.ClientSession() as session, session.get(await address_of(running) + path) as answer:
        return answer.status


async def is_ready(running: Running) -> bool:
    return await status_of(running, "/readyz") == 200
