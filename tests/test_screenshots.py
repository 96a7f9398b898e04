"""What people see in Slack, as the README shows it: six pictures of one story, told on the local Slack's page.

`make screenshots` writes them into docs; any other run looks at the same texts and leaves docs alone.
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
from tests.fault_proxy import FaultProxy
from tests.local_slack import LocalSlack, skip_reason
from tests.rows import RENEW_FINGERPRINTS, until, value
from tests.slack_page import ALICE, BOB, EVE, act_as, button, card_of, served, slack_page, take_picture

_WRONG = skip_reason() or MISSING
# CI installs both, so there what is wrong must fail.
pytestmark = pytest.mark.skipif(bool(_WRONG and not os.environ.get("CI")), reason=str(_WRONG))

POLICY = f"""
[[tiers]]
name = "manager"
over = {{ USD = 100, EUR = 100 }}
approvers = ["{ALICE}", "{BOB}"]
expires_after = "2 days"

[[tiers]]
name = "vp"
over = {{ USD = 50_000, EUR = 50_000 }}
approvers = ["{ALICE}", "{BOB}", "carol@example.com"]
required = 2
expires_after = "3 days"
"""


@pytest.fixture
async def terminal(slack: LocalSlack, port: int, database_url: str, tmp_path: Path) -> AsyncIterator[Terminal]:
    folder = tmp_path / "terminal"
    folder.mkdir()
    (folder / "policy.toml").write_text(POLICY)
    async with (
        # It says of people what the local Slack leaves out: without that nobody files.
        FaultProxy(slack.ui_url) as proxy,
        served(folder, slack, port, DATABASE_URL=database_url, SLACK_API_URL=proxy.api_url) as terminal,
    ):
        yield terminal


@pytest.fixture
async def page(slack: LocalSlack, tmp_path: Path) -> AsyncIterator[Page]:
    async with slack_page(slack, tmp_path / "browser") as page:
        yield page


async def test_the_pictures_show_what_people_see_in_slack(
    page: Page, terminal: Terminal, conn: Connection, tmp_path: Path
) -> None:
    async def picture(what: Locator, name: str, *texts: str) -> None:
        """Once all of these texts are on it, in this order."""
        await expect(what).to_contain_text(re.compile(".*".join(map(re.escape, texts)), re.DOTALL))
        await take_picture(page, what, place_of(f"slack-{name}.png", tmp_path))

    await file_claim(terminal, "server-racks", "64000", "Northwind Hosting", "Two server racks, installed")
    racks = await card_of(page, "Approval needed from manager")
    asked = ("64,000.00 USD", "Northwind Hosting", "@Eve", "Two server racks", "Decide by")
    await picture(racks, "two-tiers", "Approval needed from manager", *asked, "Approve", "Reject", "Change amount…")
    await act_as(page, BOB)
    await button(racks, "Approve").click()
    await expect(racks).to_contain_text("Approved by bob")
    racks = await card_of(page, "Approval needed from vp")
    await act_as(page, ALICE)
    await button(racks, "Approve").click()
    voted = ("Approved by alice", "1 of 2 approvals: alice", "Approve", "Reject")
    await picture(racks, "one-of-two", "Approval needed from vp", *asked, *voted)

    await file_claim(terminal, "team-dinner", "380", "Trattoria Roma", "Team dinner, 12 people")
    dinner, modal = await card_of(page, "Trattoria Roma"), page.locator(".modal")
    await act_as(page, BOB)
    await button(dinner, "Reject").click()
    await modal.get_by_role("textbox").fill("The receipt is missing. Please file it again with one.")
    await button(modal, "Reject").click()
    await expect(dinner).to_contain_text("1 reply")
    await expect(dinner.locator(".bk-button")).to_have_text("Details")
    rejected = ("Rejected by bob", "Nothing was paid", "bob: The receipt is missing.", "Details")
    await picture(dinner, "rejected", "Rejected: 380.00 USD", "Trattoria Roma", *rejected)

    await file_claim(terminal, "trade-fair", "1800", "Messe Berlin", "Booth at the trade fair")
    fair = await card_of(page, "Messe Berlin")
    await let_expire(conn, "trade-fair")
    await expect(fair).to_contain_text("1 reply")
    await expect(fair.locator(".bk-button")).to_have_text("Details")
    await picture(fair, "expired", "Expired: 1,800.00 USD", "Messe Berlin", "Nothing was paid: expired today at")

    await act_as(page, ALICE)
    await file_claim(terminal, "laptops", "5200", "Lenovo", "Four laptops for new colleagues")
    await card_of(page, "Lenovo")
    home = await open_home(page)
    await button(home, "New claim").click()
    await fill(modal, Amount="480.00", Currency="EUR", Payee="Deutsche Bahn", Note="Train to the customer in Hamburg")
    await picture(modal, "new-claim", "New claim", "Amount", "Currency", "Payee", "Note", "Cancel", "File it")
    await button(modal, "File it").click()
    await until_asked(conn, "480.00")
    # The page says of no press that it was in a Home, so Refresh is not heard from here.
    await page.get_by_role("button", name="approvals").click()
    await open_home(page)
    waits = ("Waits for you (1)", "5,200.00 USD to Lenovo", "manager · asked by @Eve", "Approve", "Reject")
    own = ("You asked for", "480.00 EUR to Deutsche Bahn · waiting for manager (0 of 1)")
    over = ("1,800.00 USD to Messe Berlin · expired", "rejected by bob", "Northwind Hosting · approved by bob")
    await picture(home, "home", "New claim", *waits, *own, "Recent decisions", *over)


async def open_home(page: Page) -> Locator:
    await page.get_by_role("button", name="claim-flow").click()
    return page.locator(".home")


async def fill(modal: Locator, **typed: str) -> None:
    for label, text in typed.items():
        field = modal.locator(".bk-input", has_text=label).get_by_role("textbox")
        await field.fill(text)
        await expect(field).to_have_value(text)
        await field.blur()


async def until_asked(conn: Connection, amount: str) -> None:
    """Return when somebody is asked for this amount."""
    asked = "SELECT count(*) = 1 FROM approvals WHERE status = 'pending' AND request->>'amount' = %s"
    await until(lambda: value(conn, asked, amount))


async def file_claim(terminal: Terminal, thread: str, amount: str, payee: str, note: str) -> None:
    """As Eve, who decides nothing."""
    claim = ["--thread", thread, "--amount", amount, "--payee", payee, "--note", note, "--by", EVE]
    started = await terminal.run_meanwhile("start", *claim)
    assert started.code == 0, started.err


async def let_expire(conn: Connection, thread: str) -> None:
    """Its time is over; the worker's clock finds that out by itself."""
    await conn.execute("UPDATE approvals SET expires_at = clock_timestamp() WHERE thread_id = %s", (thread,))
    await conn.execute(RENEW_FINGERPRINTS)
