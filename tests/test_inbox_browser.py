"""The inbox and a link in a real browser, while the local Slack's page and other open pages change by themselves.

The README's pictures of them are made here, as those of the cards are in test_browser.py.
"""

from __future__ import annotations

import os
import re
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any, Literal

import pytest
from playwright.async_api import BrowserContext, ConsoleMessage, Locator, Page, ViewportSize, expect

from flow import threads
from flow.database import Connection
from flow.inputs import parse_claim
from flow.model import CLAIM_FLOW, CLAIM_FLOW_VERSION
from tests import node
from tests.chromium import MISSING, chromium, make_small, place_of
from tests.command import Terminal
from tests.local_slack import LocalSlack, skip_reason
from tests.rows import all_rows, one_row, until, value
from tests.slack_page import served

_WRONG = skip_reason() or node.skip_reason() or MISSING
# CI installs all of them, so there what is wrong must fail.
pytestmark = pytest.mark.skipif(bool(_WRONG and not os.environ.get("CI")), reason=str(_WRONG))

DESKTOP: ViewportSize = {"width": 1120, "height": 760}
PHONE: ViewportSize = {"width": 390, "height": 844}
LOOKS: tuple[tuple[Literal["light", "dark"], ViewportSize], ...] = (
    ("light", DESKTOP),
    ("dark", DESKTOP),
    ("light", PHONE),
    ("dark", PHONE),
)


@pytest.fixture
async def terminal(slack: LocalSlack, port: int, database_url: str, tmp_path: Path) -> AsyncIterator[Terminal]:
    """A terminal beside a `serve` that is ready. Alice decides in Slack or in the inbox, Mary by links."""
    settings = {
        "DATABASE_URL": database_url,
        "APPROVERS": "U01ALICE, mary@example.com",
        "PUBLIC_URL": f"http://127.0.0.1:{port}",
        "STEP_UP_OVER": "5000",
    }
    folder = tmp_path / "terminal"
    folder.mkdir()
    async with served(folder, slack, port, **settings) as terminal:
        yield terminal


@pytest.fixture
async def browser(tmp_path: Path) -> AsyncIterator[BrowserContext]:
    async with chromium(tmp_path / "browser", viewport=DESKTOP) as browser:
        yield browser


@pytest.fixture
def complaints(
    browser: BrowserContext,
    port: int,
    # Once that has ended, every page complains.
    terminal: Terminal,
) -> Iterator[list[str]]:
    """What the browser complains of in a page of ours, such as of the content security policy; at the end nothing."""
    said: list[str] = []

    def hear(message: ConsoleMessage) -> None:
        ours = message.page is not None and message.page.url.startswith(f"http://127.0.0.1:{port}/")
        # A refusal is a page with a status of its own.
        if ours and message.type in ("error", "warning") and "responded with a status of" not in message.text:
            said.append(message.text)

    browser.on("weberror", lambda error: said.append(str(error.error)))
    browser.on("console", hear)
    yield said
    assert said == []


async def file_claim(
    conn: Connection,
    thread_id: str,
    amount: str,
    payee: str,
    note: str,
    *,
    by: str = "dana@example.com",
    currency: str = "USD",
) -> str:
    """The interrupt id of the request, once it waits."""
    await threads.insert_thread(
        conn,
        thread_id=thread_id,
        flow=CLAIM_FLOW,
        flow_version=CLAIM_FLOW_VERSION,
        input=parse_claim(amount=amount, currency=currency, payee=payee, note=note).as_input(),
        requested_by=by,
    )

    async def waits() -> list[dict[str, Any]]:
        return await all_rows(conn, "SELECT interrupt_id FROM approvals WHERE thread_id = %s", thread_id)

    [row] = await until(waits, within_s=60)
    return str(row["interrupt_id"])


async def sign_in(terminal: Terminal, page: Page, who: str) -> None:
    made = await terminal.run_meanwhile("login", "--as", who)
    assert made.code == 0, made.err
    await page.goto(made.out.strip())
    await page.get_by_role("button", name="Sign in").click()
    await expect(page.get_by_role("heading", name="Approvals")).to_be_visible()


async def link_for_mary(terminal: Terminal, thread_id: str) -> list[str]:
    """Its URL, and the code if there is one."""
    made = await terminal.run_meanwhile("link", "--thread", thread_id, "--to", "mary@example.com")
    assert made.code == 0, made.err
    return made.out.split()


async def card_of(page: Page, text: str) -> Locator:
    """The message in the local Slack that shows this text now, whatever it shows later."""
    shown = page.locator(".messages .msg", has_text=text)
    await expect(shown).to_have_count(1)
    return page.locator(f".messages .msg[data-ts='{await shown.get_attribute('data-ts')}']")


async def expect_accessible(page: Page) -> None:
    """axe-core finds nothing serious on the page as it is now, in either scheme and on a phone."""
    source = (node.installed("axe") / "axe-core" / "axe.min.js").read_text()
    size = page.viewport_size
    for scheme, viewport in LOOKS:
        await page.emulate_media(color_scheme=scheme)
        await page.set_viewport_size(viewport)
        await page.evaluate(source)
        found = await page.evaluate("async () => (await axe.run()).violations")
        bad = [
            f"{each['id']} ({each['impact']}): {each['nodes'][0]['html']}: {each['nodes'][0]['failureSummary']}"
            for each in found
        ]
        assert bad == [], f"{page.url} {scheme} {viewport}"
        wide = await page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth")
        assert wide <= 0, f"{page.url} is {wide} pixels too wide in {viewport}"
    await page.emulate_media(color_scheme="light")
    assert size is not None
    await page.set_viewport_size(size)


async def take_picture(page: Page, path: Path, *, dark: bool = False, phone: bool = False) -> None:
    await page.emulate_media(color_scheme="dark" if dark else "light")
    await page.set_viewport_size(PHONE if phone else DESKTOP)
    await page.mouse.move(0, 0)
    path.parent.mkdir(exist_ok=True)
    await page.screenshot(path=path)
    make_small(path)
    await page.emulate_media(color_scheme="light")
    await page.set_viewport_size(DESKTOP)


async def test_alice_approves_in_the_inbox_and_the_card_in_slack_changes_by_itself(
    browser: BrowserContext,
    complaints: list[str],
    slack: LocalSlack,
    terminal: Terminal,
    conn: Connection,
    tmp_path: Path,
) -> None:
    await file_claim(conn, "train-tickets", "412.80", "Deutsche Bahn", "Four tickets to the fair", currency="EUR")
    await file_claim(conn, "office-chairs", "1250", "Brown & Co", "Three chairs for the new office.\nOffer of 12 Nov.")
    workspace, page = await browser.new_page(), await browser.new_page()
    await workspace.goto(slack.ui_url)
    card = await card_of(workspace, "Brown & Co")

    await sign_in(terminal, page, "U01ALICE")
    await expect(page.get_by_role("link", name="1,250.00 USD")).to_be_visible()
    await expect_accessible(page)
    # What is filed now appears by itself.
    await file_claim(conn, "cloud-november", "3980.15", "Hetzner Online GmbH", "Servers, November", by="U07KIM")
    await file_claim(conn, "team-lunch", "186.40", "Ristorante Roma", "Lunch with the new colleagues", by="U07KIM")
    await expect(page.get_by_role("link", name="3,980.15 USD")).to_be_visible()
    await expect(page.get_by_role("link", name="For me 4 waiting")).to_be_visible()
    await page.get_by_label("Choose 3,980.15 USD").check()
    await take_picture(page, place_of("inbox-light.png", tmp_path))
    await take_picture(page, tmp_path / "list-dark.png", dark=True)
    await take_picture(page, tmp_path / "list-phone.png", phone=True)

    await page.get_by_role("link", name="1,250.00 USD").click()
    await expect(page.get_by_role("heading", name="1,250.00 USD")).to_be_visible()
    await expect_accessible(page)
    await page.get_by_label("Reason").fill("Within the budget")
    await take_picture(page, tmp_path / "request-light.png")
    await take_picture(page, place_of("inbox-dark.png", tmp_path), dark=True)
    await take_picture(page, place_of("inbox-phone.png", tmp_path), phone=True)

    await page.get_by_role("button", name="Approve").click()
    # The page keeps up: approved at once, paid a moment later.
    await expect(page.locator("#request .state")).to_have_text("Paid")
    await expect(page.locator("#payment")).to_contain_text("L-office-chairs")
    await expect(page.locator("#decide")).to_contain_text("Within the budget")
    await expect(page.get_by_role("button", name="Approve")).to_have_count(0)
    await expect(card).to_contain_text(re.compile("approved by U01ALICE", re.IGNORECASE))
    await expect(card).to_contain_text("L-office-chairs")
    await expect(card.locator(".bk-button")).to_have_text("Details")
    decision = await one_row(conn, "SELECT person, verdict, door, reason FROM decisions")
    assert decision == {
        "person": "slack:T01TEST/U01ALICE",
        "verdict": "approve",
        "door": "web",
        "reason": "Within the budget",
    }
    assert await value(conn, "SELECT count(*) FROM payments") == 1
    await expect_accessible(page)
    await take_picture(page, place_of("inbox-paid.png", tmp_path))

    await page.get_by_role("link", name="how long each step took").click()
    bars = page.get_by_role("row")
    await expect(bars.filter(has_text="wait for approval")).to_contain_text("approved")
    # The card's last change is told to Slack after the page has come.
    await expect(bars.filter(has_text="slack chat.postMessage").first).to_be_visible()
    await expect(bars.filter(has_text="pay")).not_to_have_count(0)
    await expect_accessible(page)
    await take_picture(page, place_of("inbox-trace.png", tmp_path))
    await take_picture(page, tmp_path / "trace-dark.png", dark=True)
    await take_picture(page, tmp_path / "trace-phone.png", phone=True)


async def test_mary_decides_by_a_link_and_slack_and_an_open_inbox_change_by_themselves(
    browser: BrowserContext,
    complaints: list[str],
    slack: LocalSlack,
    terminal: Terminal,
    conn: Connection,
    tmp_path: Path,
) -> None:
    interrupt_id = await file_claim(conn, "new-van", "18400", "Autohaus Lange", "A van for deliveries, used, 2024")
    url, _, code = await link_for_mary(terminal, "new-van")
    workspace, inbox, page = [await browser.new_page() for _ in range(3)]
    await workspace.goto(slack.ui_url)
    card = await card_of(workspace, "Autohaus Lange")
    await sign_in(terminal, inbox, "U01ALICE")
    await inbox.goto(f"{url.partition('/a/')[0]}/approvals/{interrupt_id}")
    await expect(inbox.get_by_role("button", name="Approve")).to_be_visible()

    # A scanner that runs the page's scripts, in the same browser even, changes nothing.
    for _ in range(3):
        await page.goto(url)
    await expect(page.get_by_role("heading", name="18,400.00 USD")).to_be_visible()
    assert await all_rows(conn, "SELECT * FROM decisions") == []
    await expect_accessible(page)
    await take_picture(page, place_of("inbox-link-phone.png", tmp_path), phone=True)

    await page.get_by_label("Code").fill("nothing")
    await page.get_by_label("Reason").fill("We need it")
    await page.get_by_role("button", name="Approve").click()
    await expect(page.get_by_role("alert")).to_have_text("The code is wrong. 4 tries are left.")
    await expect_accessible(page)
    assert await all_rows(conn, "SELECT * FROM decisions") == []

    await page.get_by_label("Code").fill(code)
    await page.get_by_role("button", name="Approve").click()
    await expect(page.get_by_text("Your decision is recorded.")).to_be_visible()
    assert page.url.endswith("/a/done")
    await expect_accessible(page)
    await expect(card).to_contain_text("L-new-van")
    await expect(card.locator(".bk-button")).to_have_text("Details")
    await expect(inbox.locator("#request .state")).to_have_text("Paid")
    await expect(inbox.get_by_role("button", name="Approve")).to_have_count(0)
    decision = await one_row(conn, "SELECT person, verdict, door, reason FROM decisions")
    assert decision == {"person": "mail:mary@example.com", "verdict": "approve", "door": "link", "reason": "We need it"}
    await page.goto(url)
    await expect(page.get_by_role("heading", name="This link was used")).to_be_visible()
    await expect_accessible(page)


async def test_a_keyboard_is_enough_and_what_is_typed_stays_while_the_page_changes(
    browser: BrowserContext, complaints: list[str], terminal: Terminal, conn: Connection
) -> None:
    await file_claim(conn, "first", "250", "ACME", "one")
    await file_claim(conn, "second", "260", "ACME", "two")
    page = await browser.new_page()
    await sign_in(terminal, page, "U01ALICE")

    await press_until(page, page.get_by_label("Choose 260.00 USD"))
    await page.keyboard.press("Space")
    await file_claim(conn, "third", "270", "ACME", "three")
    await expect(page.get_by_label("Choose 270.00 USD")).to_be_visible()
    await expect(page.get_by_label("Choose 260.00 USD")).to_be_checked()
    await expect(page.get_by_label("Choose 260.00 USD")).to_be_focused()
    await press_until(page, page.get_by_role("button", name="Approve the chosen ones…"))
    await page.keyboard.press("Enter")
    await expect(page.get_by_role("heading", name="Approve 1 request?")).to_be_visible()
    await expect_accessible(page)
    await press_until(page, page.get_by_label("Reason"))
    await page.keyboard.type("as agreed")
    await page.keyboard.press("Tab")
    await page.keyboard.press("Enter")
    await expect(page.get_by_role("heading", name="Done")).to_be_visible()
    await expect_accessible(page)
    assert await one_row(conn, "SELECT reason, door FROM decisions") == {"reason": "as agreed", "door": "web"}

    await page.goto(page.url.replace("/bulk", ""))
    await press_until(page, page.get_by_role("link", name="250.00 USD"))
    await page.keyboard.press("Enter")
    await press_until(page, page.get_by_label("Reason"))
    await page.keyboard.type("no")
    await press_until(page, page.get_by_role("button", name="Reject"))
    await page.keyboard.press("Enter")
    await expect(page.locator("#request .state")).to_have_text("Rejected")
    await press_until(page, page.get_by_role("button", name="Sign out"))
    await page.keyboard.press("Enter")
    await expect(page.get_by_role("heading", name="Sign in to approvals")).to_be_visible()
    await expect_accessible(page)


async def press_until(page: Page, wanted: Locator) -> None:
    """Tab until it has the focus, which can be seen."""
    for _ in range(60):
        await page.keyboard.press("Tab")
        if await wanted.count() and await wanted.evaluate("element => element === document.activeElement"):
            outline = await wanted.evaluate("element => getComputedStyle(element).outlineStyle")
            assert outline == "solid"
            return
    raise AssertionError(f"{wanted} cannot be reached with the Tab key")


async def test_signing_out_in_one_page_ends_the_others(
    browser: BrowserContext, complaints: list[str], terminal: Terminal, conn: Connection
) -> None:
    await file_claim(conn, "first", "250", "ACME", "one")
    page, other = await browser.new_page(), await browser.new_page()
    await sign_in(terminal, page, "U01ALICE")
    await other.goto(page.url)
    await other.get_by_role("link", name="250.00 USD").click()
    await expect(other.get_by_role("button", name="Approve")).to_be_visible()
    await page.get_by_role("button", name="Sign out").click()
    await expect(page.get_by_role("heading", name="Sign in to approvals")).to_be_visible()
    await file_claim(conn, "second", "260", "ACME", "rings the bell")
    await expect(other.get_by_role("heading", name="Sign in to approvals")).to_be_visible()
