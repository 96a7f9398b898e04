"""The drill of docs/operating.md: a dump of a service at work, restored elsewhere, goes on where the dump stood."""

from __future__ import annotations

import asyncio
import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from flow.database import connect
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


def drill() -> list[list[str]]:
    """The commands of the page, as words."""
    page = (ROOT / "docs" / "operating.md").read_text()
    return [shlex.split(line) for line in re.findall(r"^    ((?:pg_dump|createdb|pg_restore) .*)$", page, re.MULTILINE)]


async def test_what_is_restored_goes_on_where_it_was_dumped(server: PostgresServer, tmp_path: Path) -> None:
    dump, create, restore = drill()
    assert [words[0] for words in (dump, create, restore)] == ["pg_dump", "createdb", "pg_restore"]
    file = str(server.folder / "claims.dump")

    async def run(words: list[str], url: str) -> None:
        places = {"claims.dump": file, "$DATABASE_URL": url, "$NEW_DATABASE_URL": url}
        with_url = [*words, "--maintenance-db", server.url()] if words[0] == "createdb" else words
        await asyncio.to_thread(server.run, *[places.get(word, word) for word in with_url])

    with server.database() as url:
        async with Town(url, Terminal(tmp_path)) as town:
            async with town.service("serve", STAND_BY="2"), await connect(url, "drive") as conn:
                late, waiting = await town.waiting(conn, ["late", "waiting"])
                [done] = await town.waiting(conn, ["done"])
                await town.click_until_heard(done.approve)
                await town.assert_shown_as_paid(["done"])
                await town.until_posted([waiting, late])
                head = (await town.terminal.run_meanwhile("audit", "verify", "--json")).json["head"]
                await run(dump, url)
                # What happens after the dump is what a restore loses.
                await town.click_until_heard(late.approve)
                await town.assert_shown_as_paid(["late"])
            await run(create, server.url())
            again = server.url(create[-1])
            await run(restore, again)
            town.terminal.environment["DATABASE_URL"] = again
            checked = await town.terminal.run_meanwhile("audit", "verify", "--head", head)
            assert (checked.code, checked.err) == (0, "")
            async with town.service("serve", STAND_BY="2", PORT=str(town.port)), await connect(again, "drive") as conn:
                states = {row["thread_id"]: row["status"] for row in await all_rows(conn, "TABLE threads")}
                assert states == {"waiting": "waiting", "late": "waiting", "done": "paid"}
                # The buttons that people see are those of before.
                for claim in (waiting, late):
                    await town.click_until_heard(claim.approve)
                # A click on what was done is answered and does nothing.
                await town.click_until_heard(done.approve)
                [new] = await town.waiting(conn, ["new"])
                await town.click_until_heard(new.approve)
                await until_settled(conn)
                await assert_each_paid_once(conn)

                async def all_shown() -> bool:
                    return bool(await value(conn, "SELECT bool_and(status = 'sent') FROM notices"))

                await until(all_shown, within_s=60)
                assert {each: len(cards) for each, cards in town.slack.cards().items()} == {
                    "waiting": 1, "late": 1, "done": 1, "new": 1,
                }  # fmt: skip
            verified = await town.terminal.run_meanwhile("audit", "verify", "--head", head)
            assert (verified.code, verified.err) == (0, "")
