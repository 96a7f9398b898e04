"""The card as people see it: a real browser on the local Slack's page, and a real `serve` behind it.

Two of the README's pictures are made here: `make screenshots` writes them, any other run puts its own into its
temporary folder.
"""

from __future__ import annotations

import os
import re
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from playwright.async_api import Locator, Page, expect

from flow.database import Connection
from tests.chromium import MISSING, place_of
from tests.command import Terminal
from tests.local_slack import LocalSlack, skip_reason
from tests.rows import all_rows, one_row
from tests.slack_page import ALICE, EVE, act_as, button, card_of, served, slack_page, take_picture

# What a stranger may try: a mention, a shout, a link that looks like a button, bold, a bidi override.
HOSTILE = "<@U01ALICE> <!channel> <https://evil.example|Approve here> *bold* \u202edlog\u202c"
HOSTILE_AS_SHOWN = HOSTILE.replace("\u202e", r"\u{202e}").replace("\u202c", r"\u{202c}")

_WRONG = skip_reason() or MISSING
# CI installs both, so there what is wrong must fail.
pytestmark = pytest.mark.skipif(bool(_WRONG and not os.environ.get("CI")), reason=str(_WRONG))


@pytest.fixture
async def terminal(slack: LocalSlack, port: int, database_url: str, tmp_path: Path) -> AsyncIterator[Terminal]:
    """A terminal beside a `serve` that is ready for clicks. Alice is the only approver."""
    folder = tmp_path / "terminal"
    folder.mkdir()
    async with served(folder, slack, port, DATABASE_URL=database_url, APPROVERS=ALICE) as terminal:
        yield terminal


@pytest.fixture
async def page(slack: LocalSlack, tmp_path: Path) -> AsyncIterator[Page]:
    async with slack_page(slack, tmp_path / "browser") as page:
        yield page


async def test_alice_approves_in_the_browser_and_eve_cannot(
    page: Page, terminal: Terminal, conn: Connection, tmp_path: Path
) -> None:
    await file_claim(terminal, payee="Brown & Co", note="Three chairs for the new office", by="dana")

    card = await card_of(page, "Brown & Co")
    await expect(card).to_contain_text(re.compile(r"Approval needed.*1,?250\.00", re.DOTALL))
    await expect(card).to_contain_text("Three chairs for the new office")
    await expect(button(card, "Approve")).to_be_visible()
    await expect(button(card, "Reject")).to_be_visible()
    await take_picture(page, card, place_of("card-waiting.png", tmp_path))

    await act_as(page, EVE)
    await button(card, "Approve").click()
    note = page.locator(".msg", has_text="only visible to you")
    await expect(note).to_contain_text("not on the list of approvers")
    await expect(button(card, "Approve")).to_be_visible()
    assert await all_rows(conn, "SELECT * FROM decisions") == []
    await take_picture(page, note, tmp_path / "private-note.png")

    await act_as(page, ALICE)
    await button(card, "Approve").click()
    await expect(card).to_contain_text(re.compile("approved by alice", re.IGNORECASE))
    await expect(card).to_contain_text("L-office-chairs")
    await expect(card).to_contain_text("1 reply")
    await expect(card.locator(".bk-button")).to_have_text("Details")
    decision = await one_row(conn, "SELECT person, verdict, door FROM decisions")
    assert decision == {"person": "slack:T01TEST/U01ALICE", "verdict": "approve", "door": "slack"}
    payment = await one_row(conn, "SELECT reference, status, amount::text, payee FROM payments")
    assert payment == {
        "reference": "L-office-chairs",
        "status": "paid",
        "amount": "1250.00",
        "payee": "Brown & Co",
    }
    await take_picture(page, card, place_of("card-paid.png", tmp_path))


async def test_hostile_text_shows_as_what_it_is(page: Page, terminal: Terminal, conn: Connection) -> None:
    await file_claim(terminal, payee=HOSTILE, note=HOSTILE, by=HOSTILE)

    card = await card_of(page, "Approval needed")
    await expect(button(card, "Reject")).to_be_visible()
    await expect_shown_as_it_is(page, card)

    await button(card, "Reject").click()
    modal = page.locator(".modal")
    await expect(modal).to_contain_text("Whoever asked for it will read this.")
    await expect(modal.locator("a[href*='evil.example'], .mention")).to_have_count(0)
    await modal.get_by_role("textbox").fill("no such chairs")
    await modal.get_by_role("button", name="Reject").click()
    await expect(card).to_contain_text(re.compile("rejected by alice", re.IGNORECASE))
    await expect(card.locator(".bk-button")).to_have_text("Details")
    await expect(card).to_contain_text("alice: no such chairs")
    # The reply below the card, too.
    await card.get_by_role("button", name="1 reply").click()
    await expect(page.locator(".thread-body .msg")).to_have_count(2)
    await expect_shown_as_it_is(page, card)
    assert await all_rows(conn, "SELECT * FROM payments") == []


async def file_claim(terminal: Terminal, *, payee: str, note: str, by: str) -> None:
    claim = ["--thread", "office-chairs", "--amount", "1250", "--payee", payee, "--note", note, "--by", by]
    started = await terminal.run_meanwhile("start", *claim)
    assert started.code == 0, started.err


async def expect_shown_as_it_is(page: Page, card: Locator) -> None:
    """Payee, requester and note are on the card, letter by letter, and nothing became an element of the page."""
    assert (await card.inner_text()).count(HOSTILE_AS_SHOWN) >= 3
    await expect(page.locator("a[href*='evil.example'], .msg .mention")).to_have_count(0)
    await expect(page.locator(".msg strong", has_text="bold")).to_have_count(0)
