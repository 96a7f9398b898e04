"""The drill of docs/operating.md: a dump of a service at work, restored on another server, goes on where it stood.

The service owns nothing, on neither of them.
"""

from __future__ import annotations

import asyncio
import re
import shlex
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from flow.database import Connection, connect
from flow.errors import EventUnknown
from flow.events import events_after
from tests.command import ROOT, Terminal
from tests.drives import assert_each_paid_once, until_settled
from tests.postgres import PostgresServer
from tests.rows import all_rows, until, value
from tests.services import Town

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="the server is stopped Linux's way"),
    pytest.mark.timeout(300),
]


@pytest.fixture
def server() -> Iterator[PostgresServer]:
    with PostgresServer() as server:
        yield server


@pytest.fixture
def another() -> Iterator[PostgresServer]:
    with PostgresServer() as server:
        yield server


def drill() -> list[list[str]]:
    """The commands of the page's drill, as words."""
    page = (ROOT / "docs" / "operating.md").read_text()
    page = page[page.index("    pg_dump") :]
    programs = "pg_dump|psql|createdb|pg_restore"
    return [shlex.split(line) for line in re.findall(rf"^    ((?:{programs}) .*)$", page, re.MULTILINE)]


async def grant(conn: Connection) -> None:
    """Give the role `claims` the rights that the README says it needs."""
    for statement in re.findall(r"^    ((?:GRANT|REVOKE) .*;)$", (ROOT / "README.md").read_text(), re.MULTILINE):
        await conn.execute(statement.encode())


def as_service(url: str) -> str:
    return url.replace("//postgres@", "//claims@")


async def run(words: list[str], on: PostgresServer, **urls: str) -> None:
    """One command of the page, in the server's folder."""
    said = [word.replace("claims.dump", str(on.folder / "claims.dump")) for word in words]
    for name, url in urls.items():
        said = [word.replace(f"${name}", url) for word in said]
    await asyncio.to_thread(on.run, *said)


async def restored(commands: list[list[str]], dump: Path, on: PostgresServer) -> str:
    """The service's URL of what these commands have made of the dump."""
    await asyncio.to_thread(shutil.copy, dump, on.folder)
    owned = on.url(commands[1][-1])
    for words in commands:
        await run(words, on, ADMIN_URL=on.url(), OWNER_URL=owned)
    async with await connect(owned, "drive") as owner:
        await grant(owner)
    return as_service(owned)


async def test_what_is_restored_goes_on_where_it_was_dumped(
    server: PostgresServer, another: PostgresServer, tmp_path: Path
) -> None:
    dump, *restore = drill()
    assert [words[0] for words in restore] == ["psql", "createdb", "pg_restore", "psql"]
    server.execute("CREATE ROLE claims LOGIN")

    with server.database() as owned:
        url = as_service(owned)
        async with await connect(owned, "drive") as owner:
            await grant(owner)
        async with Town(url, Terminal(tmp_path)) as town:
            async with town.service("serve", STAND_BY="2"), await connect(url, "drive") as conn:
                late, waiting = await town.waiting(conn, ["late", "waiting"])
                [done] = await town.waiting(conn, ["done"])
                await town.until_posted([waiting, late, done])
                await town.click_until_heard(done.approve)
                await town.assert_shown_as_paid(["done"])
                head = (await town.terminal.run_meanwhile("audit", "verify", "--json")).json["head"]
                # Somebody reads events.
                await events_after(conn, 0, limit=1000)
                await run(dump, server, DATABASE_URL=url)
                # What happens after the dump is what a restore loses.
                await town.click_until_heard(late.approve)
                await town.assert_shown_as_paid(["late"])
                lost = (await events_after(conn, 0, limit=1000))[-1]
            again = await restored(restore, server.folder / "claims.dump", another)
            town.terminal.environment["DATABASE_URL"] = again
            checked = await town.terminal.run_meanwhile("audit", "verify", "--head", head)
            assert (checked.code, checked.err) == (0, "")
            payments = await town.terminal.run_meanwhile("payments", "list")
            assert [line.partition(":")[0] for line in payments.out.splitlines()] == ["done"]
            async with await connect(again, "drive") as conn:
                with pytest.raises(EventUnknown):
                    await events_after(conn, lost.position or 0, limit=1)
            async with town.service("serve", STAND_BY="2", PORT=str(town.port)), await connect(again, "drive") as conn:
                states = {row["thread_id"]: row["status"] for row in await all_rows(conn, "TABLE threads")}
                assert states == {"waiting": "waiting", "late": "waiting", "done": "paid"}
                # The buttons that people see are those of before.
                for claim in (waiting, late):
                    await town.click_until_heard(claim.approve)
                # A click on what was done is answered and does nothing.
                await town.click_until_heard(done.approve)
                [new] = await town.waiting(conn, ["new"])
                await town.until_posted([new])
                await town.click_until_heard(new.approve)
                await until_settled(conn)
                await assert_each_paid_once(conn)

                async def all_shown() -> bool:
                    return bool(await value(conn, "SELECT bool_and(status = 'sent') FROM notices"))

                await until(all_shown, within_s=60)
                # No number is given twice, and whoever reads on from what is lost skips nothing.
                since = await events_after(conn, lost.position or 0, limit=1000)
                assert since[0].data["thread"] in ("waiting", "late")
                assert len(since) == await value(conn, "SELECT count(*) FROM events WHERE id > %s", lost.id)
                assert {event.type for event in since} >= {"approval.decided", "payment.paid"}
                assert {each: len(cards) for each, cards in town.slack.cards().items()} == {
                    "waiting": 1, "late": 1, "done": 1, "new": 1,
                }  # fmt: skip
            verified = await town.terminal.run_meanwhile("audit", "verify", "--head", head)
            assert (verified.code, verified.err) == (0, "")
