"""Questions of any flow in a real browser: for everybody, on a phone too, and what is typed stays."""

from __future__ import annotations

import json
from pathlib import Path

from playwright.async_api import BrowserContext, expect

from flow.approvals import decide
from flow.database import Connection
from flow.model import Verdict
from flow.policy import Tier
from tests.asking import DINNER, REFUND, put, tool_calls
from tests.command import Terminal
from tests.people import BOB
from tests.rows import value
from tests.test_inbox_browser import (
    browser,
    complaints,
    expect_accessible,
    pytestmark,
    sign_in,
    take_picture,
    terminal,
)

__all__ = ["browser", "complaints", "pytestmark", "terminal"]

_TWO = Tier(name="approval", approvers=("U01ALICE", "U02BOB"), required=2)
_MAIL = {"to": "bob@example.com", "subject": "Your refund", "text": "Dear Bob,\nthe money is on its way."}


async def test_an_option_is_chosen_in_a_browser(
    browser: BrowserContext, complaints: list[str], terminal: Terminal, conn: Connection, tmp_path: Path
) -> None:
    interrupt_id = await put(conn, {**REFUND, **DINNER, "title": "Refund for three chairs"})
    page = await browser.new_page()
    await sign_in(terminal, page, "U01ALICE")
    await page.goto(f"{page.url}/{interrupt_id}")
    await expect(page.get_by_role("heading", name="Refund for three chairs")).to_be_visible()
    await expect_accessible(page)
    await page.get_by_label("pay later").check()
    await take_picture(page, tmp_path / "options-light.png")
    await take_picture(page, tmp_path / "options-phone.png", phone=True, dark=True)
    await page.get_by_role("button", name="Approve").click()
    await expect(page.locator("#decide")).to_contain_text("chose: pay later")
    assert await value(conn, "SELECT answer FROM decisions") == {"option": "pay later"}


async def test_an_action_is_edited_in_a_browser_while_somebody_else_decides(
    browser: BrowserContext, complaints: list[str], terminal: Terminal, conn: Connection, tmp_path: Path
) -> None:
    calls = (("send_email", _MAIL, ("approve", "edit", "respond", "reject")), ("delete_draft", {"id": 7}, ("approve",)))
    interrupt_id = await put(conn, tool_calls(*calls), tier=_TWO)
    page = await browser.new_page()
    await sign_in(terminal, page, "U01ALICE")
    await page.goto(f"{page.url}/{interrupt_id}")
    await expect_accessible(page)
    edited = json.dumps({**_MAIL, "to": "carol@example.com"}, indent=2)
    await page.locator("#step-0").select_option("edit")
    await page.locator("#args-0").fill(edited)
    await page.locator("#step-1").select_option("approve")
    steps = [{"type": "edit", "args": json.loads(edited)}, {"type": "approve"}]
    said = Verdict(verdict="approve", door="slack", answer={"actions": steps})
    await decide(conn, interrupt_id, BOB, said)
    await expect(page.locator("#trace")).to_contain_text("Approved by Bob")
    assert await page.locator("#step-0").input_value() == "edit"
    assert await page.locator("#args-0").input_value() == edited
    await page.locator("#message-0").fill("not for an edit")
    await page.get_by_role("button", name="Send these answers").click()
    await expect(page.get_by_role("alert")).to_contain_text("This goes with an answer or a rejection")
    await expect_accessible(page)
    await put(conn, DINNER, "q2")
    await expect(page.get_by_role("link", name="For me 2 waiting")).to_be_visible()
    await expect(page.get_by_role("alert")).to_be_visible()
    await take_picture(page, tmp_path / "edit-light.png")
    await page.set_viewport_size({"width": 1120, "height": 1900})
    await page.screenshot(path=tmp_path / "edit-long.png")
    await page.locator("#message-0").fill("")
    await page.get_by_role("button", name="Send these answers").click()
    await expect(page.locator("#decide")).to_contain_text("carol@example.com")
    await expect_accessible(page)
    await page.screenshot(path=tmp_path / "edited-long.png")
    assert await value(conn, "SELECT status FROM approvals WHERE thread_id = 'q1'") == "approved"
