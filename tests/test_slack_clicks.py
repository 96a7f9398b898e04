"""What people in Slack see and cause: a real `serve` with its worker, the local Slack over HTTP, a real database.

One service and one workspace for all facts, each about a thread of its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sys
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import psycopg
import pytest
import pytest_asyncio
from psycopg import sql

from flow.approvals import approval_of
from flow.database import Connection, connect
from flow.drive import drive
from flow.flows import Flows
from flow.policy import policy_of
from flow.settings import Settings
from tests.block_kit import SETTLED, WAITING, buttons_of, words_of
from tests.command import ROOT, Running, Terminal
from tests.conftest import _database, _url_of
from tests.local_slack import CHANNEL, LocalSlack, free_port, skip_reason
from tests.people import ANN, start_claim
from tests.rows import all_rows, one_row, until, value
from tests.slack_door import Answered, Caller, bot_in_process, client_of, errors_in, reject_in

pytestmark = [
    pytest.mark.skipif(skip_reason() is not None, reason=skip_reason() or ""),
    pytest.mark.asyncio(loop_scope="module"),
]

# Slack's one message a second is a wait that no fact here is about.
_UNPACED = "import bot.outlet, claim_flow; bot.outlet._BETWEEN_POSTS_S = 0.0; claim_flow.main()"


@dataclass(frozen=True, kw_only=True)
class Card:
    """One posted request, and its buttons' value and block, which a click can still name when they are gone."""

    thread_id: str
    interrupt_id: str
    ts: str
    value: str
    block_id: str


class Stage:
    """The service, the workspace that it serves, and the person who watches both and the database."""

    def __init__(self, url: str, slack: LocalSlack, caller: Caller, terminal: Terminal) -> None:
        self.url, self.slack, self.caller, self.terminal = url, slack, caller, terminal
        self.conn: Connection
        self._threads = 0

    async def start(self, *, requested_by: str = ANN.key) -> str:
        """The interrupt id of a new claim of 250.00 USD, once it waits."""
        self._threads += 1
        thread_id = f"t{self._threads}"
        await start_claim(self.conn, thread_id, requested_by=requested_by)
        rows = await until(
            lambda: all_rows(self.conn, "SELECT interrupt_id FROM approvals WHERE thread_id = %s", thread_id)
        )
        return str(rows[0]["interrupt_id"])

    async def card_of(self, interrupt_id: str) -> Card:
        """The request's card, once the channel has it."""
        [row] = await until(
            lambda: all_rows(
                self.conn,
                "SELECT thread_id, ts FROM messages JOIN approvals USING (interrupt_id) WHERE interrupt_id = %s",
                interrupt_id,
            )
        )
        [buttons] = [each for each in (await self.shown(row["ts"]))["blocks"] if each["type"] == "actions"]
        return Card(
            interrupt_id=interrupt_id, value=buttons["elements"][0]["value"], block_id=buttons["block_id"], **row
        )

    async def ask(self, *, requested_by: str = ANN.key) -> Card:
        return await self.card_of(await self.start(requested_by=requested_by))

    async def shown(self, ts: str) -> dict[str, Any]:
        """The message as a person sees it now."""
        [message] = [each for each in await self.slack.messages(CHANNEL) if each["ts"] == ts]
        return message

    async def until_shown(self, card: Card, words: str, *, within_s: float = 15.0) -> dict[str, Any]:
        """The card, once it says this."""

        async def says() -> dict[str, Any]:
            message = await self.shown(card.ts)
            return message if words in f"{message['text']}\n{words_of(message)}" else {}

        return await until(says, within_s)

    async def reply_to(self, card: Card) -> str:
        """What is said below the card, once there is something; more than one reply is one too many."""

        async def replies() -> list[str]:
            said = await self.slack.messages(CHANNEL)
            return [each["text"] for each in said if each.get("thread_ts") == card.ts and each["ts"] != card.ts]

        [reply] = await until(replies)
        return reply

    async def click(self, user: str, card: Card, verdict: str) -> int | None:
        """Press the button, as it was shown; the HTTP status that the bot answered."""
        await self.slack.click(user, CHANNEL, card.ts, verdict, value=card.value, block_id=card.block_id)
        return (await self.slack.answers("interactive"))[-1].status

    async def reject(self, user: str, card: Card, reason: str = "") -> str:
        """Press Reject, as it was shown, and send its modal; what the modal says against it, or nothing."""
        return await reject_in(self.slack, user, card.ts, reason, value=card.value, block_id=card.block_id)

    async def click_and_read(self, user: str, card: Card, verdict: str) -> str:
        """Press the button of a bot that answers, and read the private note that comes of it."""
        before = len(await self.slack.ephemerals(user))
        assert await self.click(user, card, verdict) == 200
        return await self.next_note(user, before)

    async def body_of(self, card: Card, verdict: str = "approve", *, caller: Caller | None = None, **who: str) -> bytes:
        """The same click as a request, for sending it as no workspace would."""
        return await (caller or self.caller).body_of(self.conn, card.interrupt_id, verdict, ts=card.ts, **who)

    async def next_note(self, user: str, before: int) -> str:
        async def new() -> list[str]:
            return [note["text"] for note in (await self.slack.ephemerals(user))[before:]]

        [note] = await until(new)
        return note

    async def until_over(self, card: Card, status: str) -> None:
        async def over() -> bool:
            return bool(
                status == await value(self.conn, "SELECT status FROM threads WHERE thread_id = %s", card.thread_id)
            )

        await until(over)

    async def payments(self, card: Card) -> int:
        return int(await value(self.conn, "SELECT count(*) FROM payments WHERE thread_id = %s", card.thread_id))

    async def decisions(self, card: Card) -> list[dict[str, Any]]:
        return await all_rows(
            self.conn, "SELECT person, verdict, door FROM decisions WHERE interrupt_id = %s", card.interrupt_id
        )

    async def assert_untouched(self, card: Card) -> None:
        """Nobody has decided, and everybody can see that."""
        assert await self.decisions(card) == []
        assert (await approval_of(self.conn, card.interrupt_id)).status == "pending"
        assert await self.payments(card) == 0
        message = await self.shown(card.ts)
        assert "Approval needed" in message["text"]
        assert buttons_of(message) == WAITING


@pytest.fixture(scope="module")
def module_database(admin: psycopg.Connection, template: str) -> Iterator[str]:
    with _database(admin, template) as name:
        yield name


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def _serving(
    server_url: str, module_database: str, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Stage]:
    url, port = _url_of(server_url, module_database), free_port()
    bot_url = f"http://127.0.0.1:{port}"
    with LocalSlack(request_url=f"{bot_url}/slack/events") as slack:
        settings = {"DATABASE_URL": url, "PORT": str(port), "APPROVERS": "U01ALICE,U02BOB"}
        terminal = Terminal(tmp_path_factory.mktemp("serve"), **settings, **slack.environment())
        async with serve(terminal), Caller(bot_url) as caller:
            yield Stage(url, slack, caller, terminal)


@pytest_asyncio.fixture(loop_scope="module")
async def stage(_serving: Stage) -> AsyncIterator[Stage]:
    """The stage, with a connection that only this test uses."""
    async with await connect(_serving.url, "drive") as conn:
        _serving.conn = conn
        yield _serving


@contextlib.asynccontextmanager
async def serve(terminal: Terminal, command: str = "serve") -> AsyncIterator[Running]:
    """A service, from the moment when it says that it is ready."""
    out, err = terminal.folder / f"{command}.out", terminal.folder / f"{command}.err"
    with out.open("xb") as to_out, err.open("xb") as to_err:
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-c",
            _UNPACED,
            command,
            cwd=terminal.folder,
            env={**terminal.environment, "PYTHONPATH": str(ROOT)},
            stdin=asyncio.subprocess.DEVNULL,
            stdout=to_out,
            stderr=to_err,
        )
    running = Running(process, out, err)
    try:
        await running.until(lambda: is_ready(f"http://127.0.0.1:{terminal.environment['PORT']}"))
        yield running
    finally:
        await running.stop()


async def is_ready(bot_url: str) -> bool:
    with contextlib.suppress(aiohttp.ClientConnectionError):
        async with aiohttp.ClientSession() as session, session.get(f"{bot_url}/readyz") as response:
            return response.status == 200
    return False


# The main job


async def test_a_waiting_claim_is_a_card_and_alices_click_pays_it(stage: Stage) -> None:
    card = await stage.ask()
    message = await stage.shown(card.ts)
    assert message["text"] == f"Approval needed: 250.00 USD to ACME, requested by cli:ann (thread {card.thread_id})"
    assert buttons_of(message) == WAITING
    assert f"interrupt {card.interrupt_id}" in words_of(message)

    assert await stage.click("U01ALICE", card, "approve") == 200
    # An answered click is a committed decision.
    assert await stage.decisions(card) == [{"person": "slack:T01TEST/U01ALICE", "verdict": "approve", "door": "slack"}]
    message = await stage.until_shown(card, "Paid: 250.00 USD")
    decided = await one_row(stage.conn, "SELECT * FROM decisions WHERE interrupt_id = %s", card.interrupt_id)
    assert f"✅ *Approved by alice*, <!date^{int(decided['decided_at'].timestamp())}^" in words_of(message)
    assert f"💸 *250.00 USD paid*, reference L-{card.thread_id}" in words_of(message)
    assert buttons_of(message) == SETTLED
    assert await stage.reply_to(card) == f"💸 *250.00 USD paid*, reference L-{card.thread_id}"
    assert await stage.payments(card) == 1
    assert await stage.slack.ephemerals("U01ALICE") == []


async def test_a_rejection_ends_the_thread_unpaid_and_says_so(stage: Stage) -> None:
    card = await stage.ask()
    assert await stage.reject("U02BOB", card, "not this quarter") == ""
    await stage.until_over(card, "rejected")
    message = await stage.until_shown(card, "Nothing was paid: rejected.")
    assert "❌ *Rejected by bob*, " in words_of(message)
    assert "bob: not this quarter" in words_of(message)
    assert buttons_of(message) == SETTLED
    assert await stage.reply_to(card) == "Nothing was paid: rejected."
    assert await stage.payments(card) == 0


async def test_a_card_follows_a_decision_at_the_command_line_within_five_seconds(stage: Stage) -> None:
    card = await stage.ask()
    done = await stage.terminal.run_meanwhile("resume", "--thread", card.thread_id, "--approve")
    assert done.code == 0, done.err
    message = await stage.until_shown(card, "Paid: 250.00 USD", within_s=5.0)
    assert "✅ *Approved by cli:ann* (cli), " in words_of(message)
    assert buttons_of(message) == SETTLED


# Who may


async def test_a_strangers_click_is_told_in_private_and_changes_nothing(stage: Stage) -> None:
    card = await stage.ask()
    note = await stage.click_and_read("U99EVE", card, "approve")
    assert note == "Eve may not decide this: not on the list of approvers (<@U01ALICE>, <@U02BOB>)."
    await stage.assert_untouched(card)


@pytest.mark.parametrize("requester", ["U01ALICE", "slack:T01TEST/U01ALICE"])
async def test_nobody_decides_a_request_of_their_own(stage: Stage, requester: str) -> None:
    card = await stage.ask(requested_by=requester)
    said = "Alice may not decide this: nobody decides a request of their own."
    assert await stage.click_and_read("U01ALICE", card, "approve") == said
    await stage.assert_untouched(card)
    assert await stage.reject("U01ALICE", card) == said
    await stage.assert_untouched(card)

    assert await stage.click("U02BOB", card, "approve") == 200
    await stage.until_over(card, "paid")


async def test_an_approvers_member_id_in_another_team_is_a_stranger(stage: Stage) -> None:
    card = await stage.ask()
    body = await stage.body_of(card, by="U01ALICE", team="T99OTHER")
    assert (await stage.caller.click(body)).status == 200
    assert "not on the list of approvers" in await stage.caller.note()
    await stage.assert_untouched(card)


async def test_without_approvers_every_click_is_refused(database_url: str, flows: Flows, stage: Stage) -> None:
    async with await connect(database_url, "drive") as conn, client_of(stage.slack.api_url) as client:
        await start_claim(conn)
        await drive(conn, "t1", flows=flows, policy=policy_of(Settings()))
        interrupt_id = await value(conn, "SELECT interrupt_id FROM approvals")
        async with bot_in_process(database_url, client) as url, Caller(url) as caller:
            assert (await caller.click(await caller.body_of(conn, interrupt_id))).status == 200
            assert "set APPROVERS" in await caller.note()
        assert await all_rows(conn, "SELECT * FROM decisions") == []
        assert (await approval_of(conn, interrupt_id)).status == "pending"


# More than one click


async def test_a_second_click_is_told_who_decided(stage: Stage) -> None:
    card = await stage.ask()
    assert await stage.click("U01ALICE", card, "approve") == 200
    await stage.until_over(card, "paid")
    assert await stage.click_and_read("U02BOB", card, "approve") == "Already approved by alice."
    assert await stage.click_and_read("U01ALICE", card, "approve") == "Already approved by alice."
    said = await stage.reject("U02BOB", card)
    assert said.startswith("Already approved by alice at ")
    assert said.endswith(": the first decision stands.")
    assert len(await stage.decisions(card)) == 1
    assert await stage.payments(card) == 1


@pytest.mark.parametrize("people", [("U01ALICE", "U01ALICE"), ("U01ALICE", "U02BOB")], ids=["of-one", "of-two"])
async def test_two_simultaneous_clicks_pay_once(stage: Stage, people: tuple[str, str]) -> None:
    card = await stage.ask()
    clicks = [await stage.body_of(card, by=each) for each in people]
    answers = await click_together(stage, card, clicks)
    assert [answer.status for answer in answers] == [200, 200]
    assert await stage.caller.note() in {"Already approved by u01alice.", "Already approved by u02bob."}
    await stage.until_over(card, "paid")
    assert len(await stage.decisions(card)) == 1
    assert await stage.payments(card) == 1


async def test_one_signed_click_replayed_twenty_times_pays_once(stage: Stage) -> None:
    card = await stage.ask()
    click = await stage.body_of(card)
    answers = await asyncio.gather(*(stage.caller.click(click) for _ in range(20)))
    assert {answer.status for answer in answers} == {200}
    assert [await stage.caller.note() for _ in range(19)] == ["Already approved by u01alice."] * 19
    await stage.until_over(card, "paid")
    assert len(await stage.decisions(card)) == 1
    assert await stage.payments(card) == 1


async def test_of_an_approve_and_a_reject_in_the_same_instant_exactly_one_settles_twenty_times(stage: Stage) -> None:
    settled = []
    for _ in range(20):
        card = await stage.ask()
        approve = await stage.body_of(card, "approve", by="U01ALICE")
        reject = await stage.caller.rejection_of(stage.conn, card.interrupt_id, by="U02BOB")
        answers = await click_together(stage, card, [approve, reject])
        assert [answer.status for answer in answers] == [200, 200]
        [decision] = await stage.decisions(card)
        settled.append((card, decision["verdict"]))
        # Whoever came second is told.
        first = "approved by u01alice" if decision["verdict"] == "approve" else "rejected by u02bob"
        late = errors_in(answers[1]).get("reason") or await stage.caller.note()
        assert late.startswith(f"Already {first} at ")

    for card, verdict in settled:
        await stage.until_over(card, "paid" if verdict == "approve" else "rejected")
        assert await stage.payments(card) == (verdict == "approve")
        outcome = "💸 *250.00 USD paid*" if verdict == "approve" else "Nothing was paid"
        message = await stage.until_shown(card, outcome)
        assert ("✅ *Approved by u01alice*" in words_of(message)) == (verdict == "approve")
        assert ("❌ *Rejected by u02bob*" in words_of(message)) == (verdict == "reject")
        assert buttons_of(message) == SETTLED


# What was lost


async def test_a_click_on_a_card_that_we_forgot_posting_is_decided_and_shows(stage: Stage) -> None:
    card = await stage.ask()
    await stage.conn.execute("DELETE FROM messages WHERE ts = %s", (card.ts,))
    assert await stage.click("U01ALICE", card, "approve") == 200
    message = await stage.until_shown(card, "Paid: 250.00 USD")
    assert buttons_of(message) == SETTLED
    assert await stage.payments(card) == 1


async def test_a_late_click_on_a_card_that_we_forgot_posting_takes_its_buttons_away(stage: Stage) -> None:
    card = await stage.ask()
    await stage.conn.execute("DELETE FROM messages WHERE ts = %s", (card.ts,))
    done = await stage.terminal.run_meanwhile("resume", "--thread", card.thread_id, "--approve")
    assert done.code == 0, done.err
    assert buttons_of(await stage.shown(card.ts)) == WAITING

    assert (await stage.reject("U02BOB", card)).startswith("Already approved by cli:ann at ")
    message = await stage.until_shown(card, "Paid: 250.00 USD")
    assert buttons_of(message) == SETTLED


async def test_a_bot_that_is_stopped_while_a_click_waits_answers_it_and_loses_nothing(
    stage: Stage, tmp_path: Path
) -> None:
    card = await stage.ask()
    port = str(free_port())
    terminal = Terminal(tmp_path, **{**settings_of(stage), "PORT": port})
    async with serve(terminal, "bot") as bot, Caller(f"http://127.0.0.1:{port}") as caller:
        click = await stage.body_of(card, caller=caller)
        async with held(stage, card):
            clicking = asyncio.create_task(caller.click(click))
            await until_held_up(stage, 1)
            bot.signal(signal.SIGTERM)
            await until(lambda: does_not_listen(int(port)))
        assert (await clicking).status == 200
        done = await bot.end()
        assert done.code == 0, done.err
    await stage.until_over(card, "paid")
    await stage.until_shown(card, "Paid: 250.00 USD")


async def test_a_bot_that_is_stopped_just_after_a_click_loses_nothing(stage: Stage, tmp_path: Path) -> None:
    card = await stage.ask()
    port = str(free_port())
    terminal = Terminal(tmp_path, **{**settings_of(stage), "PORT": port})
    async with serve(terminal, "bot") as bot, Caller(f"http://127.0.0.1:{port}") as caller:
        clicking = asyncio.create_task(caller.click(await stage.body_of(card, caller=caller)))
        # The time is the fact: by now the click is somewhere between the socket and its answer.
        await asyncio.sleep(0.05)
        bot.signal(signal.SIGTERM)
        assert (await clicking).status == 200
        assert (await bot.end()).code == 0
    await stage.until_over(card, "paid")
    assert await stage.payments(card) == 1


async def test_a_click_succeeds_although_every_session_of_the_bot_has_died(stage: Stage) -> None:
    card = await stage.ask()
    died = await all_rows(
        stage.conn,
        "SELECT pg_terminate_backend(pid, 5000) FROM pg_stat_activity"
        " WHERE datname = current_database() AND application_name = 'claim_flow door'",
    )
    assert len(died) >= 2
    assert await stage.click("U01ALICE", card, "approve") == 200
    await stage.until_over(card, "paid")
    await stage.until_shown(card, "Paid: 250.00 USD")


async def test_a_click_while_the_database_is_away_is_not_acknowledged_and_can_be_repeated(
    stage: Stage, admin: psycopg.Connection, module_database: str
) -> None:
    card = await stage.ask()
    notes = len(await stage.slack.ephemerals("U01ALICE"))
    with database_away(admin, module_database):
        assert await stage.click("U01ALICE", card, "approve") == 503
        note = await stage.next_note("U01ALICE", notes)
        assert note.startswith("⚠️ Your click was not recorded: the database is away. Please click again")
    async with await connect(stage.url, "drive") as conn:
        stage.conn = conn
        await stage.assert_untouched(card)
        await until(lambda: is_ready(stage.caller.url))
        assert await stage.click("U01ALICE", card, "approve") == 200
        await stage.until_over(card, "paid")
        assert await stage.payments(card) == 1
        await stage.until_shown(card, "Paid: 250.00 USD")


# What the tests share


@contextlib.asynccontextmanager
async def held(stage: Stage, card: Card) -> AsyncIterator[None]:
    """The approval's row locked, so that clicks on it wait."""
    async with await connect(stage.url, "drive") as holder, holder.transaction():
        await holder.execute("SELECT FROM approvals WHERE interrupt_id = %s FOR UPDATE", (card.interrupt_id,))
        yield


async def until_held_up(stage: Stage, count: int) -> None:
    """Return when this many sessions wait for a lock."""

    async def waiting() -> bool:
        waiters = await value(
            stage.conn,
            "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'",
        )
        return bool(waiters >= count)

    await until(waiting)


async def click_together(stage: Stage, card: Card, clicks: list[bytes]) -> list[Answered]:
    """All clicks are in the database, and wait, before the first one may go on."""
    async with held(stage, card):
        clicking = [asyncio.create_task(stage.caller.click(click)) for click in clicks]
        await until_held_up(stage, len(clicks))
    return await asyncio.gather(*clicking)


@contextlib.contextmanager
def database_away(admin: psycopg.Connection, name: str) -> Iterator[None]:
    """Every session of this database is ended, and no new one is let in."""
    allow = sql.SQL("ALTER DATABASE {} ALLOW_CONNECTIONS {}")
    admin.execute(allow.format(sql.Identifier(name), sql.SQL("false")))
    try:
        admin.execute("SELECT pg_terminate_backend(pid, 5000) FROM pg_stat_activity WHERE datname = %s", (name,))
        yield
    finally:
        admin.execute(allow.format(sql.Identifier(name), sql.SQL("true")))


def settings_of(stage: Stage) -> dict[str, str]:
    ours = ("DATABASE_URL", "APPROVERS", "SLACK_BOT_TOKEN", "SLACK_SIGNING_SECRET", "SLACK_CHANNEL", "SLACK_API_URL")
    return {name: stage.terminal.environment[name] for name in ours}


async def does_not_listen(port: int) -> bool:
    try:
        _, writer = await asyncio.open_connection("127.0.0.1", port)
    except OSError:
        return True
    writer.close()
    return False
