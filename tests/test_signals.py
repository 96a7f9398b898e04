"""Signals, crashes and dead sessions, under people who click: nothing is lost, doubled, or held up by another's death.

What happens to a drive that is killed, wherever it is, is test_kills.py's.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import textwrap
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from flow.database import Connection, connect, ring
from tests.chance import seeded
from tests.command import ROOT, Terminal
from tests.drives import assert_each_paid_once, assert_never_two_drivers, until_settled
from tests.local_slack import free_port
from tests.people import start_claim
from tests.pg_proxy import FaultingProxy, Trap
from tests.postgres import PostgresServer
from tests.rows import all_rows, break_table, one_row, until, value
from tests.services import READY_STANDBYS, Claim, Town, held, standbys_are_ready, until_held_up
from tests.slack_door import Caller

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="processes are stopped and watched Linux's way"),
    pytest.mark.timeout(300),
]


@pytest.fixture
async def town(tmp_path: Path, database_url: str) -> AsyncIterator[Town]:
    async with Town(database_url, Terminal(tmp_path)) as town:
        yield town


# The bot


async def test_no_click_that_was_answered_is_lost_when_the_bot_is_killed(
    town: Town, conn: Connection, database_url: str
) -> None:
    random = seeded()
    thread_ids = [f"t{number:02}" for number in range(24)]
    async with town.worker(conn):
        claims = await town.waiting(conn, thread_ids)
        unheard: list[Claim] = []
        for burst in (claims[:12], claims[12:]):
            async with (
                town.service("bot") as bot,
                # Of every second click it is sure that the bot dies in its midst.
                held(database_url, [claim.interrupt_id for claim in burst[::2]]) as holder,
            ):
                await town.until_posted(claims)
                clicking = [asyncio.create_task(town.click(claim.approve)) for claim in burst]
                await until_held_up(conn, 6, by=holder)
                await asyncio.sleep(random.uniform(0, 0.03))
                bot.kill()
                await bot.end()
                answers = await asyncio.gather(*clicking)
            heard = {claim.interrupt_id for claim, answer in zip(burst, answers, strict=True) if answer == 200}
            assert heard <= await decided(conn)
            unheard += [claim for claim in burst if claim.interrupt_id not in heard]
        assert len(unheard) >= 12
        async with town.service("bot"):
            for claim in unheard:
                assert await town.click_until_heard(claim.approve) == 0
            await until_settled(conn)
            await town.assert_shown_as_paid(thread_ids)
    await assert_each_paid_once(conn)
    assert await value(conn, "SELECT count(*) FROM decisions") == len(thread_ids)


async def test_a_bot_that_stands_still_answers_nobody_and_doubles_nothing_when_it_goes_on(
    town: Town, conn: Connection
) -> None:
    async with town.worker(conn), town.service("bot") as bot:
        claims = await town.waiting(conn, ["t1", "t2", "t3"])
        await town.until_posted(claims)
        assert await town.click(claims[0].approve) == 200
        bot.signal(signal.SIGSTOP)
        began = time.monotonic()
        # Slack gives up on them; they are still in the bot's socket.
        late = await asyncio.gather(*(town.click(claim.approve) for claim in claims[1:]))
        assert (late, time.monotonic() - began > 2.9) == ([None, None], True)
        assert len(await decided(conn)) == 1
        bot.signal(signal.SIGCONT)
        for claim in claims[1:]:
            assert await town.click_until_heard(claim.approve) == 0
        await until_settled(conn)
        await town.assert_shown_as_paid(["t1", "t2", "t3"])
    await assert_each_paid_once(conn)
    assert await value(conn, "SELECT count(*) FROM decisions") == 3


async def test_a_bot_that_stands_still_in_the_midst_of_a_decision_keeps_another_bot_from_it_for_ten_seconds_at_most(
    town: Town, conn: Connection, database_url: str
) -> None:
    other_port = str(free_port())
    async with (
        FaultingProxy(database_url) as proxy,
        town.worker(conn),
        town.service("bot", DATABASE_URL=proxy.url) as still,
        town.service("bot", PORT=other_port),
        Caller(f"http://127.0.0.1:{other_port}") as other,
    ):
        [claim] = await town.waiting(conn, ["t1"])
        await town.until_posted([claim])
        # The decision is written, and its thread is to be woken, all in one transaction.
        proxy.lay("t1", Trap(at=1, role="door", fault="stop"))
        assert await town.click(claim.approve) is None
        assert [sprung.pid for sprung in proxy.sprung] == [still.pid]
        # It stands still for three seconds already.
        began = time.monotonic()
        while (status := await town.click(claim.approve, caller=other)) != 200:
            assert status == 503
            assert time.monotonic() < began + 10
        still.signal(signal.SIGCONT)
        await until_settled(conn)
        # It has lost its session, and tries once more on a new one.
        assert await town.click_until_heard(claim.approve) == 0
        await town.assert_shown_as_paid(["t1"])
    await assert_each_paid_once(conn)
    assert await value(conn, "SELECT count(*) FROM decisions") == 1


async def test_what_a_service_answered_before_it_was_ended_is_paid_by_the_next_one(
    town: Town, conn: Connection, database_url: str
) -> None:
    thread_ids = [f"t{number}" for number in range(6)]
    async with town.service("serve") as serve:
        claims = await town.waiting(conn, thread_ids)
        await town.until_posted(claims)
        async with held(database_url, [claim.interrupt_id for claim in claims[::2]]) as holder:
            clicking = [asyncio.create_task(town.click(claim.approve)) for claim in claims]
            # The time is the fact: by now each click is somewhere between the socket and its answer, or answered.
            await asyncio.sleep(0.05)
            serve.signal(signal.SIGTERM)
            await until_held_up(conn, 3, by=holder)
        answers = await asyncio.gather(*clicking)
        assert (await serve.end()).code == 0
    heard = {claim.interrupt_id for claim, answer in zip(claims, answers, strict=True) if answer == 200}
    assert heard
    assert heard <= await decided(conn)
    async with town.service("serve"):
        await until_settled(conn)
        paid = {row["thread_id"] for row in await all_rows(conn, "SELECT thread_id FROM payments")}
        assert {claim.thread_id for claim in claims if claim.interrupt_id in heard} <= paid
        for claim in claims:
            assert await town.click_until_heard(claim.approve) == 0
        await until_settled(conn)
        await town.assert_shown_as_paid(thread_ids)
    await assert_each_paid_once(conn)


# The worker


async def test_a_zygote_that_stands_still_delays_threads_and_loses_none(town: Town, conn: Connection) -> None:
    async with town.worker(conn, STAND_BY="2") as busy:
        zygote = await busy.zygote()
        await until(lambda: standbys_are_ready(conn, 2))
        zygote.suspend()
        try:
            for number in range(6):
                await start_claim(conn, f"t{number}", "20")
            # Those who were ready drive one thread each; nobody comes after them.
            await until(lambda: paid_are(conn, 2))
            assert await value(conn, "SELECT count(*) FROM threads WHERE due_at IS NOT NULL AND attempts = 0") == 4
        finally:
            zygote.resume()
        await until_settled(conn)
        assert await busy.zygote() == zygote
    await assert_each_paid_once(conn)
    await assert_never_two_drivers(conn)


async def test_a_zygote_that_stands_still_for_good_is_replaced(town: Town, conn: Connection, tmp_path: Path) -> None:
    hazards = tmp_path / "hazards"
    hazards.mkdir()
    # A minute of patience is what a loaded machine needs, and no test.
    (hazards / "sitecustomize.py").write_text(
        "import sys\nif 'work' in sys.orig_argv:\n    import flow.standby\n    flow.standby._READY_TIMEOUT_S = 25.0\n"
    )
    async with town.worker(conn, STAND_BY="1", PYTHONPATH=f"{hazards}{os.pathsep}{ROOT}") as busy:
        zygote = await busy.zygote()
        zygote.suspend()
        for number in range(3):
            await start_claim(conn, f"t{number}", "20")
        await until(lambda: paid_are(conn, 3), within_s=90)
        assert not zygote.is_running()
    await assert_each_paid_once(conn)


async def test_standbys_whose_sessions_died_are_replaced_and_the_next_thread_costs_no_attempt(
    town: Town, conn: Connection
) -> None:
    await watch_attempts(conn)
    async with town.worker(conn, STAND_BY="2") as busy:
        zygote = await busy.zygote()
        await until(lambda: standbys_are_ready(conn, 2))
        before = {child.pid for child in zygote.children()}
        await terminate_standbys(conn)

        async def replaced() -> bool:
            now = {child.pid for child in zygote.children()}
            return len(now) == 2 and not now & before and await standbys_are_ready(conn, 2)

        await busy.until(replaced)
        await start_claim(conn, "t1", "20")
        await until_settled(conn)
        assert "driving it again" not in busy.err

        # Also if nobody has noticed yet.
        for number in range(2, 8):
            await until(lambda: standbys_are_ready(conn, 2))
            await terminate_standbys(conn)
            await start_claim(conn, f"t{number}", "20")
            await until_settled(conn)
    assert await value(conn, "SELECT max(attempts) FROM seen") == 1
    await assert_each_paid_once(conn)


async def test_a_thread_that_crashes_its_process_and_one_that_never_ends_hold_up_no_other(
    town: Town, conn: Connection, tmp_path: Path
) -> None:
    """Real ones: a segmentation fault, and a sleep that nothing but SIGKILL ends."""
    mended = tmp_path / "mended"
    # Every interpreter that starts imports it, and so does the zygote.
    hazards = tmp_path / "hazards"
    hazards.mkdir()
    (hazards / "sitecustomize.py").write_text(HAZARDS)
    settings = {"PYTHONPATH": str(hazards), "MENDED": str(mended)}
    async with town.worker(conn, DRIVE_TIMEOUT="2", **settings) as busy:

        async def sleeper_was_killed() -> bool:
            return "took longer than 2 s and was killed" in busy.err

        for thread_id in ("segfault", "sleeper"):
            await start_claim(conn, thread_id, "20")
        await busy.until(lambda: attempts_are(conn, ["segfault", "sleeper"], 1))
        began = time.monotonic()
        for number in range(30):
            await start_claim(conn, f"t{number:02}", "20")
        await until(lambda: paid_are(conn, 30))
        sys.stderr.write(f"\n30 threads were paid beside two that cannot be in {time.monotonic() - began:.1f} s\n")
        held_up = "SELECT status FROM threads WHERE thread_id IN ('segfault', 'sleeper')"
        assert [row["status"] for row in await all_rows(conn, held_up)] == ["running", "running"]

        # The back-off of the last of twenty attempts is ten minutes, which need not be waited for.
        await conn.execute("UPDATE threads SET attempts = 18 WHERE thread_id = 'segfault'")
        await busy.until(lambda: is_stuck_at_once(conn, "segfault"))
        row = await one_row(conn, "SELECT attempts, due_at, reason FROM threads WHERE thread_id = 'segfault'")
        assert (row["due_at"], row["reason"]) == (None, "20 drives died without a word")
        listed = await busy_terminal(town).run_meanwhile("list", "--status", "stuck", "--json")
        assert [(each["thread"], each["reason"]) for each in listed.json] == [("segfault", row["reason"])]
        assert "thread segfault needs a person: 20 drives died without a word" in busy.err
        await busy.until(sleeper_was_killed)

        mended.touch()
        done = await busy_terminal(town).run_meanwhile("retry", "--thread", "segfault")
        assert (done.code, done.out, done.err) == (0, "segfault: 20.00 USD is paid, reference L-segfault\n", "")
        # Its back-off need not be waited for either.
        await conn.execute("UPDATE threads SET due_at = clock_timestamp() WHERE due_at IS NOT NULL")
        await until_settled(conn)
    await assert_each_paid_once(conn)
    await assert_never_two_drivers(conn)


HAZARDS = textwrap.dedent(
    """\
    import sys

    if "flow.standby" in sys.orig_argv:
        import ctypes, functools, os, resource, time
        from flow import claims

        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        rightly = claims.pay

        @functools.wraps(rightly)
        async def pay(state, runtime):
            if not os.path.exists(os.environ["MENDED"]):
                if state["thread_id"] == "segfault":
                    ctypes.string_at(0)
                if state["thread_id"] == "sleeper":
                    time.sleep(86_400)
            return await rightly(state, runtime)

        claims.pay = pay
    """
)


async def test_the_end_of_the_terminal_ends_a_worker_unless_it_was_started_with_nohup(
    town: Town, conn: Connection
) -> None:
    # However this process was started itself.
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    try:
        async with town.worker(conn) as there:
            there.signal(signal.SIGHUP)
            assert (await there.end()).code == 0
        # All that `nohup` does to whoever it starts.
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        async with town.worker(conn) as stays:
            stays.signal(signal.SIGHUP)
            await start_claim(conn, "t1", "20")
            await stays.until(lambda: paid_are(conn, 1))
            assert (await stays.stop()).code == 0
    finally:
        signal.signal(signal.SIGHUP, before)


# The database


async def test_everything_goes_on_in_the_same_processes_after_the_database_was_killed(
    own_database: str, server: PostgresServer, tmp_path: Path
) -> None:
    random = seeded()
    large = [f"large-{number:02}" for number in range(18)]
    async with Town(own_database, Terminal(tmp_path)) as town, town.service("serve", STAND_BY="3") as serve:
        zygote = await serve.zygote()
        async with await connect(own_database, "drive") as conn:
            claims = await town.waiting(conn, large)
            await town.until_posted(claims)
        unheard = 0
        for number, batch in enumerate((claims[:6], claims[6:12], claims[12:])):
            async with await connect(own_database, "drive") as conn, await connect(own_database, "listen") as holder:
                for claim in batch[1:]:
                    await start_claim(conn, f"small-{claim.thread_id}", "20")
                await hold(holder, conn, batch[0], f"small-{batch[0].thread_id}")
                clicking = [asyncio.create_task(town.click_until_heard(claim.approve)) for claim in batch]
                # One drive is in the midst of its payment and one click of its decision; the rest is where it is.
                await until_held_up(conn, 2, by=holder.info.backend_pid)
                await asyncio.sleep(random.uniform(0, 0.1))
                await asyncio.to_thread(server.stop, "immediate")
                await holder.close()
            if number == 1:
                # Away for long enough to be noticed.
                assert await town.click(batch[0].approve) == 503
            await asyncio.to_thread(server.start)
            unheard += sum(await asyncio.gather(*clicking))
        async with await connect(own_database, "drive") as conn:
            await until_settled(conn)
            await town.assert_shown_as_paid(large)
            await assert_each_paid_once(conn)
            await assert_never_two_drivers(conn)
            assert await value(conn, "SELECT count(*) FROM payments") == 36
            assert await value(conn, "SELECT count(*) FROM decisions") == 18
        assert not serve.ended
        assert await serve.zygote() == zygote
    sys.stderr.write(f"\nthe server was killed 3 times under 18 clicks, of which {unheard} had to be repeated\n")


# What the tests share


@pytest.fixture(scope="module")
def server() -> Iterator[PostgresServer]:
    with PostgresServer() as server:
        yield server


@pytest.fixture
def own_database(server: PostgresServer) -> Iterator[str]:
    with server.database() as url:
        yield url


async def hold(holder: Connection, conn: Connection, claim: Claim, small: str) -> None:
    """Whoever decides this claim, or pays the small one, which is filed here, waits until this session ends."""
    await holder.execute("BEGIN")
    await holder.execute("SELECT FROM approvals WHERE interrupt_id = %s FOR UPDATE", (claim.interrupt_id,))
    async with conn.transaction():
        await start_claim(conn, small, "20")
        await conn.execute("UPDATE threads SET due_at = NULL WHERE thread_id = %s", (small,))
    await holder.execute(
        "INSERT INTO payments (thread_id, amount, currency, payee, provider, reference, status, paid_at)"
        " VALUES (%s, 20, 'USD', '', 'ledger', %s, 'paid', clock_timestamp())",
        (small, small),
    )
    async with conn.transaction():
        await conn.execute("UPDATE threads SET due_at = clock_timestamp() WHERE thread_id = %s", (small,))
        await ring(conn)


async def decided(conn: Connection) -> set[str]:
    return {row["interrupt_id"] for row in await all_rows(conn, "SELECT interrupt_id FROM decisions")}


async def paid_are(conn: Connection, count: int) -> bool:
    return bool(await value(conn, "SELECT count(*) >= %s FROM threads WHERE status = 'paid'", count))


async def attempts_are(conn: Connection, thread_ids: list[str], least: int) -> bool:
    return bool(
        await value(conn, "SELECT min(attempts) >= %s FROM threads WHERE thread_id = ANY(%s)", least, thread_ids)
    )


async def is_stuck_at_once(conn: Connection, thread_id: str) -> bool:
    """Whether it is stuck; if it is only put off, it is due now."""
    await conn.execute(
        "UPDATE threads SET due_at = clock_timestamp() WHERE thread_id = %s AND due_at > clock_timestamp()",
        (thread_id,),
    )
    return bool(await value(conn, "SELECT status = 'stuck' FROM threads WHERE thread_id = %s", thread_id))


async def terminate_standbys(conn: Connection) -> None:
    """End the sessions of all that wait for a thread."""
    rows = await all_rows(conn, f"SELECT pg_terminate_backend(pid, 5000) AS gone {READY_STANDBYS}")
    assert [row["gone"] for row in rows] == [True, True]


async def watch_attempts(conn: Connection) -> None:
    """Note in the table `seen` what each change of a thread says of its attempts."""
    await conn.execute("CREATE TABLE seen (thread_id text, attempts integer)")
    await break_table(conn, "threads", "UPDATE", "INSERT INTO seen VALUES (NEW.thread_id, NEW.attempts)")


def busy_terminal(town: Town) -> Terminal:
    """Where one types while services run; Slack is theirs."""
    ours = ("DATABASE_URL", "APPROVERS")
    return Terminal(town.terminal.folder, **{name: town.terminal.environment[name] for name in ours})
