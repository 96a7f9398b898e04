"""The local Slack's page in a browser and a `serve` behind it: who acts, which card, which button, and pictures."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
from playwright.async_api import Locator, Page, expect

from tests.chromium import chromium, make_small
from tests.command import Terminal
from tests.local_slack import LocalSlack

ALICE, BOB, EVE = "U01ALICE", "U02BOB", "U99EVE"

# As Slack has it where the page is rougher, and nothing around what a picture is of.
_STYLE = """
button { font-family: inherit }
.msg { padding: 12px 18px }
.home { flex: none }
.modal-overlay { background: #fff }
.modal { border: 1px solid #ddd; box-shadow: none }
.modal .blocks { gap: 14px }
.bk-plain-input { max-width: none }
"""


@contextlib.asynccontextmanager
async def served(folder: Path, slack: LocalSlack, port: int, **settings: str) -> AsyncIterator[Terminal]:
    """A terminal in this folder beside a `serve` on this port that is ready for clicks."""
    terminal = Terminal(folder, **(slack.environment() | {"PORT": str(port), "STAND_BY": "1"} | settings))
    async with terminal.service("serve") as serving, aiohttp.ClientSession() as session:

        async def ready() -> bool:
            try:
                async with session.get(f"http://127.0.0.1:{port}/readyz") as answer:
                    return answer.status == 200
            except aiohttp.ClientConnectionError:
                return False

        await serving.until(ready)
        yield terminal


@contextlib.asynccontextmanager
async def slack_page(slack: LocalSlack, folder: Path) -> AsyncIterator[Page]:
    """The page as Alice sees it, in a browser that was never used before."""
    # The list of channels takes 220 of the width, the messages have the rest.
    async with chromium(folder, viewport={"width": 850, "height": 900}) as browser:
        page = await browser.new_page()
        await page.goto(slack.ui_url)
        await page.add_style_tag(content=_STYLE)
        yield page


async def card_of(page: Page, text: str) -> Locator:
    """The message that shows this text now, whatever it shows later."""
    shown = page.locator(".messages .msg", has_text=text)
    await expect(shown).to_have_count(1)
    return page.locator(f".messages .msg[data-ts='{await shown.get_attribute('data-ts')}']")


def button(card: Locator, name: str) -> Locator:
    return card.get_by_role("button", name=name, exact=True)


async def act_as(page: Page, user: str) -> None:
    await page.get_by_label("Act as").select_option(user)


async def take_picture(page: Page, what: Locator, path: Path) -> None:
    # Under the pointer a message has a menu.
    await page.mouse.move(0, 0)
    await what.screenshot(path=path)
    make_small(path)
