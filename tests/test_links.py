"""Links that one person may use once: a scanner, a thief and a second try change nothing."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from decimal import Decimal
from pathlib import Path
from typing import Any, LiteralString

import psycopg
import pytest

from bot.limits import Limit
from bot.site import Site
from flow import links
from flow.approvals import approval_of, decide
from flow.changes import refresh
from flow.database import Connection
from flow.errors import CodeWrong, LinkGone, NotAllowed
from flow.inputs import mail_person
from flow.model import Verdict
from flow.policy import Rule, Tier, Tiers
from tests.asking import REFUND, put
from tests.browsing import Visitor, pages_in_process, signed_in_at_once
from tests.command import Terminal
from tests.people import ALICE, NO, YES, ask
from tests.rows import all_rows, break_table, mend_table, one_row, rewrite, value

MARY, JOHN = mail_person("mary@example.com"), mail_person("john@example.com")
BY_MAIL = Tier(name="approval", approvers=("mary@example.com", "mail:john@example.com", "U01ALICE"))
TWO_BY_MAIL = Tier(name="approval", approvers=BY_MAIL.approvers, required=2)
# Beside it there are those that wait to be mailed.
HERS: LiteralString = "WHERE person = 'mail:mary@example.com' AND revoked_at IS NULL"
APPROVE = Verdict(verdict="approve", door="link")


@pytest.fixture
async def site(database_url: str) -> AsyncIterator[Site]:
    async with pages_in_process(database_url) as running:
        yield running


@pytest.fixture
async def strict(database_url: str) -> AsyncIterator[Site]:
    """Above 200 a link alone is not enough."""
    async with pages_in_process(database_url, step_up_over=Decimal(200)) as running:
        yield running


@pytest.fixture
async def visitors() -> AsyncIterator[Any]:
    """`await visitors(site)`: a browser that was never used before."""
    async with AsyncExitStack() as stack:

        async def visitor(site: Site) -> Visitor:
            return await stack.enter_async_context(Visitor(site.url))

        yield visitor


async def new_link(conn: Connection, interrupt_id: str, *, code: bool = False) -> links.NewLink:
    """Mary's."""
    return await links.make_link(conn, await approval_of(conn, interrupt_id), MARY, by="cli:ann", with_code=code)


async def decisions(conn: Connection) -> list[dict[str, Any]]:
    return await all_rows(conn, "SELECT person, verdict, door, reason FROM decisions ORDER BY decided_at")


async def everything(conn: Connection) -> list[dict[str, Any]]:
    """What looking must not change."""
    return [
        *await all_rows(conn, "SELECT * FROM links ORDER BY id"),
        *await all_rows(conn, "SELECT * FROM approvals ORDER BY interrupt_id"),
        *await all_rows(conn, "SELECT * FROM decisions ORDER BY decided_at"),
        *await all_rows(conn, "SELECT * FROM notices ORDER BY id"),
        *await all_rows(conn, "SELECT * FROM threads ORDER BY thread_id"),
        *await all_rows(conn, "SELECT count(*) FROM sessions"),
    ]


# Deciding


async def test_mary_approves_by_her_link_and_lands_on_a_page_without_the_token(
    site: Site, conn: Connection, visitors: Any
) -> None:
    interrupt_id = await ask(conn, tier=BY_MAIL)
    made = await new_link(conn, interrupt_id)
    mary = await visitors(site)
    page = await mary.get(f"/a/{made.token}")
    assert page.status == 200 and "250.00 USD" in page.text and "to ACME" in page.text and "three chairs" in page.text
    assert "You decide as mary@example.com" in page.text
    answer = await mary.post(f"/a/{made.token}", page.form("Approve").fields | {"verdict": "approve", "reason": "fine"})
    assert (answer.status, answer.headers["Location"]) == (303, "/a/done")
    assert await decisions(conn) == [
        {"person": "mail:mary@example.com", "verdict": "approve", "door": "link", "reason": "fine"}
    ]
    assert (await approval_of(conn, interrupt_id)).status == "approved"
    done = await mary.get("/a/done")
    assert done.status == 200 and "Your decision is recorded" in done.text and made.token not in done.html
    assert await value(conn, f"SELECT used_at IS NOT NULL FROM links {HERS}")


async def test_the_page_after_it_is_the_deciders_alone(site: Site, conn: Connection, visitors: Any) -> None:
    stranger = await visitors(site)
    assert (await stranger.get("/a/done")).status == 404
    stranger.cookies[site.cookie_name("decided")] = f"1~{'0' * 32}~approve"
    assert (await stranger.get("/a/done")).status == 404


@pytest.mark.parametrize("method", ["HEAD", "GET", "PUT", "DELETE", "PATCH"])
async def test_a_scanner_that_follows_the_link_again_and_again_changes_nothing(
    site: Site, conn: Connection, visitors: Any, method: str
) -> None:
    made = await new_link(conn, await ask(conn, tier=BY_MAIL))
    before = await everything(conn)
    scanner = await visitors(site)
    for _ in range(3):
        answer = await scanner.ask(method, f"/a/{made.token}?verdict=approve")
        assert answer.status == (200 if method in ("GET", "HEAD") else 405)
    assert await everything(conn) == before
    # The person who comes after it decides.
    mary = await visitors(site)
    page = await mary.get(f"/a/{made.token}")
    assert (await mary.post(f"/a/{made.token}", page.form("Reject").fields | {"verdict": "reject"})).status == 303


async def test_a_scanner_that_posts_what_it_saw_without_cookies_changes_nothing(
    site: Site, conn: Connection, visitors: Any
) -> None:
    made = await new_link(conn, await ask(conn, tier=BY_MAIL))
    before = await everything(conn)
    scanner = await visitors(site)
    fields = (await scanner.get(f"/a/{made.token}")).form("Approve").fields | {"verdict": "approve"}
    scanner.cookies.clear()
    assert (await scanner.post(f"/a/{made.token}", fields)).status == 403
    assert await everything(conn) == before


async def test_pressing_twice_is_once_and_the_other_button_is_too_late(
    site: Site, conn: Connection, visitors: Any
) -> None:
    made = await new_link(conn, await ask(conn, tier=TWO_BY_MAIL))
    mary = await visitors(site)
    fields = (await mary.get(f"/a/{made.token}")).form("Approve").fields
    both = await asyncio.gather(
        *[mary.post(f"/a/{made.token}", fields | {"verdict": "approve"}) for _ in range(2)],
    )
    assert [answer.status for answer in both] == [303, 303]
    other = await mary.post(f"/a/{made.token}", fields | {"verdict": "reject"})
    assert other.status == 410 and "it was used before" in other.text
    assert [each["verdict"] for each in await decisions(conn)] == ["approve"]


async def test_a_button_that_is_pressed_again_for_a_void_vote_is_not_told_that_it_was_recorded(
    site: Site, conn: Connection, visitors: Any
) -> None:
    interrupt_id = await put(conn, REFUND, tier=TWO_BY_MAIL)
    token = (await new_link(conn, interrupt_id)).token
    mary = await visitors(site)
    fields = (await mary.get(f"/a/{token}")).form("Approve").fields | {"verdict": "approve"}
    assert (await mary.post(f"/a/{token}", fields)).status == 303
    await refresh(conn, Tiers(rules=(Rule(tier=TWO_BY_MAIL, over={}),)), "q1", by="cli:ann")
    again = await mary.post(f"/a/{token}", fields)
    assert again.status == 410 and "it was used before" in again.text
    assert (await approval_of(conn, interrupt_id)).votes == ()


async def test_two_browsers_with_one_link_make_one_decision(conn: Connection, crowd: list[Connection]) -> None:
    made = await new_link(conn, await ask(conn, tier=TWO_BY_MAIL))
    verdicts = [APPROVE, Verdict(verdict="reject", door="link")] * 2
    outcomes = await asyncio.gather(
        *[links.spend(c, made.token, v, code="", step_up=False) for c, v in zip(crowd, verdicts, strict=True)],
        return_exceptions=True,
    )
    recorded = [each for each in outcomes if not isinstance(each, BaseException) and each.recorded]
    assert len(recorded) == 1 and len(await decisions(conn)) == 1
    assert sum(isinstance(each, LinkGone) for each in outcomes) == 2


async def test_a_decision_that_cannot_be_committed_does_not_spend_the_link(conn: Connection) -> None:
    made = await new_link(conn, await ask(conn, tier=BY_MAIL))
    await break_table(conn, "decisions", "INSERT", "RAISE EXCEPTION 'no'")
    with pytest.raises(psycopg.errors.RaiseException):
        await links.spend(conn, made.token, APPROVE, code="", step_up=False)
    await mend_table(conn)
    assert await value(conn, f"SELECT used_at FROM links {HERS}") is None
    assert (await links.spend(conn, made.token, APPROVE, code="", step_up=False)).recorded


async def test_a_link_that_cannot_be_marked_as_used_makes_no_decision(conn: Connection) -> None:
    made = await new_link(conn, await ask(conn, tier=BY_MAIL))
    await break_table(conn, "links", "UPDATE", "RAISE EXCEPTION 'no'")
    with pytest.raises(psycopg.errors.RaiseException):
        await links.spend(conn, made.token, APPROVE, code="", step_up=False)
    await mend_table(conn)
    assert await decisions(conn) == []


# Who may not


async def used(site: Site, conn: Connection, mary: Visitor, token: str, fields: dict[str, str]) -> None:
    await mary.post(f"/a/{token}", fields | {"verdict": "reject"})
    await conn.execute("DELETE FROM decisions")
    await conn.execute("UPDATE approvals SET status = 'pending', settled_at = NULL")


async def revoked(site: Site, conn: Connection, mary: Visitor, token: str, fields: dict[str, str]) -> None:
    [row] = await all_rows(conn, "SELECT interrupt_id FROM approvals")
    await links.revoke_link(conn, await approval_of(conn, row["interrupt_id"]), MARY, by="cli:ann")


async def replaced(site: Site, conn: Connection, mary: Visitor, token: str, fields: dict[str, str]) -> None:
    [row] = await all_rows(conn, "SELECT interrupt_id FROM approvals")
    await new_link(conn, row["interrupt_id"])


async def expired(site: Site, conn: Connection, mary: Visitor, token: str, fields: dict[str, str]) -> None:
    await conn.execute("UPDATE approvals SET expires_at = clock_timestamp()")


async def settled_otherwise(site: Site, conn: Connection, mary: Visitor, token: str, fields: dict[str, str]) -> None:
    [row] = await all_rows(conn, "SELECT interrupt_id FROM approvals")
    await decide(conn, row["interrupt_id"], ALICE, NO)
    await conn.execute("DELETE FROM decisions")


async def off_the_list(site: Site, conn: Connection, mary: Visitor, token: str, fields: dict[str, str]) -> None:
    await rewrite(conn, "approvers = ARRAY['U01ALICE']")


async def her_own(site: Site, conn: Connection, mary: Visitor, token: str, fields: dict[str, str]) -> None:
    await rewrite(conn, "requested_by = 'Mary@Example.com'")


async def changed_request(site: Site, conn: Connection, mary: Visitor, token: str, fields: dict[str, str]) -> None:
    await rewrite(conn, "request_hash = repeat('0', 64)")


async def no_form_token(site: Site, conn: Connection, mary: Visitor, token: str, fields: dict[str, str]) -> None:
    del fields["form_token"]


async def anothers_form_token(site: Site, conn: Connection, mary: Visitor, token: str, fields: dict[str, str]) -> None:
    async with Visitor(site.url) as other:
        fields["form_token"] = (await other.get(f"/a/{token}")).form("Approve").fields["form_token"]


async def a_sessions_form_token(
    site: Site, conn: Connection, mary: Visitor, token: str, fields: dict[str, str]
) -> None:
    fields["form_token"] = site.form_token(await signed_in_at_once(conn, site, mary, MARY))


async def another_links_form_token(
    site: Site, conn: Connection, mary: Visitor, token: str, fields: dict[str, str]
) -> None:
    other = await new_link(conn, await ask(conn, "t2", tier=BY_MAIL))
    fields["form_token"] = (await mary.get(f"/a/{other.token}")).form("Approve").fields["form_token"]


async def tampered_cookie(site: Site, conn: Connection, mary: Visitor, token: str, fields: dict[str, str]) -> None:
    mary.cookies[site.cookie_name("visitor")] = "A" * 43 + "." + "0" * 64


async def no_verdict(site: Site, conn: Connection, mary: Visitor, token: str, fields: dict[str, str]) -> None:
    fields["verdict"] = ""


async def no_hash(site: Site, conn: Connection, mary: Visitor, token: str, fields: dict[str, str]) -> None:
    fields["request_hash"] = ""


@pytest.mark.parametrize(
    ("spoil", "status"),
    [
        (used, 410),
        (revoked, 410),
        (replaced, 410),
        (expired, 410),
        (settled_otherwise, 409),
        (off_the_list, 403),
        (her_own, 403),
        (changed_request, 409),
        (no_form_token, 403),
        (anothers_form_token, 403),
        (a_sessions_form_token, 403),
        (another_links_form_token, 403),
        (tampered_cookie, 403),
        (no_verdict, 400),
        (no_hash, 400),
    ],
    ids=lambda each: getattr(each, "__name__", str(each)),
)
async def test_a_link_that_is_not_whole_decides_nothing(
    site: Site, conn: Connection, visitors: Any, spoil: Any, status: int
) -> None:
    made = await new_link(conn, await ask(conn, tier=BY_MAIL))
    mary = await visitors(site)
    fields = (await mary.get(f"/a/{made.token}")).form("Approve").fields | {"verdict": "approve"}
    await spoil(site, conn, mary, made.token, fields)
    answer = await mary.post(f"/a/{made.token}", fields)
    assert answer.status == status, answer.text
    assert await decisions(conn) == []


@pytest.mark.parametrize("origin", ["https://evil.example", "null", None, "http://127.0.0.1:1"])
async def test_a_form_from_elsewhere_decides_nothing(
    site: Site, conn: Connection, visitors: Any, origin: str | None
) -> None:
    made = await new_link(conn, await ask(conn, tier=BY_MAIL))
    mary = await visitors(site)
    fields = (await mary.get(f"/a/{made.token}")).form("Approve").fields | {"verdict": "approve"}
    assert (await mary.post(f"/a/{made.token}", fields, headers={"Origin": origin})).status == 403
    assert await decisions(conn) == []


async def test_a_link_decides_its_own_approval_and_no_other(site: Site, conn: Connection, visitors: Any) -> None:
    first, second = await ask(conn, tier=BY_MAIL), await ask(conn, "t2", tier=BY_MAIL)
    made = await new_link(conn, first)
    mary = await visitors(site)
    fields = (await mary.get(f"/a/{made.token}")).form("Approve").fields | {"verdict": "approve"}
    other = await approval_of(conn, second)
    # What another request's page would carry.
    assert (await mary.post(f"/a/{made.token}", fields | {"request_hash": other.request_hash})).status == 409
    assert (await mary.post(f"/approvals/{second}", fields | {"request_hash": other.request_hash})).status == 403
    assert await decisions(conn) == []


@pytest.mark.parametrize(
    "person", [mail_person("eve@example.com"), mail_person("dana@example.com")], ids=["stranger", "requester"]
)
async def test_nobody_gets_a_link_who_may_not_decide(conn: Connection, person: Any) -> None:
    tier = Tier(name="approval", approvers=("dana@example.com",))
    approval = await approval_of(conn, await ask(conn, tier=tier, requested_by="Dana@example.com"))
    with pytest.raises(NotAllowed):
        await links.make_link(conn, approval, person, by="cli:ann", with_code=False)
    assert await all_rows(conn, "SELECT * FROM links") == []


@pytest.mark.parametrize("spoil", [used, revoked, settled_otherwise], ids=lambda each: str(each.__name__))
async def test_a_link_that_is_over_shows_nothing_of_the_request(
    site: Site, conn: Connection, visitors: Any, spoil: Any
) -> None:
    made = await new_link(conn, await ask(conn, tier=BY_MAIL))
    mary = await visitors(site)
    await spoil(site, conn, mary, made.token, (await mary.get(f"/a/{made.token}")).form("Approve").fields)
    page = await mary.get(f"/a/{made.token}")
    assert page.status == 410 and "ACME" not in page.text and not page.has_button("Approve")


async def test_a_link_shows_nothing_of_what_was_changed_past_us(site: Site, conn: Connection, visitors: Any) -> None:
    made = await new_link(conn, await ask(conn, tier=BY_MAIL))
    await conn.execute("UPDATE approvals SET request = '{}'")
    page = await (await visitors(site)).get(f"/a/{made.token}")
    assert (page.status, "changed outside of the bot" in page.text, page.has_button("Approve")) == (409, True, False)


async def test_an_unknown_token_is_no_link(site: Site, visitors: Any) -> None:
    assert (await (await visitors(site)).get(f"/a/{'A' * 43}")).status == 410


# The second factor


async def test_above_the_limit_the_code_is_wanted_too(strict: Site, conn: Connection, visitors: Any) -> None:
    made = await new_link(conn, await ask(conn, tier=BY_MAIL), code=True)
    assert made.code is not None
    mary = await visitors(strict)
    page = await mary.get(f"/a/{made.token}")
    fields = page.form("Approve").fields | {"verdict": "approve", "reason": "as agreed"}
    assert "code" in fields and made.code not in page.html
    for wrong in ("", f"{(int(made.code) + 1) % 1_000_000:06}"):
        answer = await mary.post(f"/a/{made.token}", fields | {"code": wrong})
        assert answer.status == 403 and "The code is wrong" in answer.text and "as agreed" in answer.text
    assert await decisions(conn) == []
    spaced = f" {made.code[:3]} {made.code[3:]}"
    assert (await mary.post(f"/a/{made.token}", fields | {"code": spaced})).status == 303
    assert len(await decisions(conn)) == 1


async def test_after_five_wrong_codes_the_right_one_is_refused_until_there_is_a_new_one(
    strict: Site, conn: Connection, visitors: Any
) -> None:
    interrupt_id = await ask(conn, tier=BY_MAIL)
    made = await new_link(conn, interrupt_id, code=True)
    assert made.code is not None
    mary = await visitors(strict)
    fields = (await mary.get(f"/a/{made.token}")).form("Approve").fields | {"verdict": "approve"}
    left = []
    for _ in range(5):
        answer = await mary.post(f"/a/{made.token}", fields | {"code": "x"})
        left.append(answer.text.partition("The code is wrong. ")[2][:1])
    assert left == ["4", "3", "2", "1", ""] and "wrong too often" in answer.text
    assert (await mary.post(f"/a/{made.token}", fields | {"code": made.code})).status == 403
    assert not (await mary.get(f"/a/{made.token}")).has_button("Approve")
    assert await decisions(conn) == []
    new = await links.make_code(conn, await approval_of(conn, interrupt_id), MARY, by="cli:ann")
    assert (await mary.post(f"/a/{made.token}", fields | {"code": new})).status == 303


async def test_tries_at_once_are_all_counted(conn: Connection, crowd: list[Connection]) -> None:
    made = await new_link(conn, await ask(conn, tier=BY_MAIL), code=True)
    outcomes = await asyncio.gather(
        *[links.spend(c, made.token, APPROVE, code="x", step_up=True) for c in [*crowd, conn]], return_exceptions=True
    )
    assert all(isinstance(each, CodeWrong) for each in outcomes)
    assert await value(conn, f"SELECT code_tries FROM links {HERS}") == 5


async def test_a_link_without_a_code_is_not_enough_above_the_limit(
    strict: Site, conn: Connection, visitors: Any
) -> None:
    # As a mail brings it.
    made = await new_link(conn, await ask(conn, tier=BY_MAIL))
    mary = await visitors(strict)
    page = await mary.get(f"/a/{made.token}")
    assert page.status == 200 and not page.has_button("Approve") and "needs a code besides the link" in page.text
    for code in ("", "000000"):
        with pytest.raises(CodeWrong):
            await links.spend(conn, made.token, APPROVE, code=code, step_up=True)
    assert await decisions(conn) == []


@pytest.mark.parametrize(
    ("amount", "limit", "wanted"),
    [("200.00", "200", False), ("200.01", "200", True), ("200.00", None, False), ("much", "200", True)],
)
async def test_a_code_is_wanted_above_the_limit_only(
    conn: Connection, amount: str, limit: str | None, wanted: bool
) -> None:
    await ask(conn)
    await rewrite(conn, "request = jsonb_set(request, '{amount}', to_jsonb(%s::text))", amount)
    [row] = await all_rows(conn, "SELECT interrupt_id FROM approvals")
    approval = await approval_of(conn, row["interrupt_id"])
    assert links.wants_code(approval.request, Decimal(limit) if limit else None) is wanted


# Secrets


async def test_tokens_and_codes_are_kept_as_hashes_only(conn: Connection) -> None:
    made = await new_link(conn, await ask(conn, tier=BY_MAIL), code=True)
    row = str(await one_row(conn, f"SELECT * FROM links {HERS}"))
    assert made.token not in row and made.code is not None and made.code not in row.replace("\\x", "")
    assert len(made.token) == 43


async def test_no_token_is_logged_whatever_happens(
    site: Site, conn: Connection, visitors: Any, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    made = await new_link(conn, await ask(conn, tier=BY_MAIL))
    mary = await visitors(site)
    page = await mary.get(f"/a/{made.token}")
    await mary.post(f"/a/{made.token}", {})
    await conn.execute("ALTER TABLE links RENAME TO links_away")
    broken = await mary.get(f"/a/{made.token}")
    assert broken.status == 500 and "a page failed: GET /a/" in caplog.text
    await conn.execute("ALTER TABLE links_away RENAME TO links")
    async with conn.transaction():
        await conn.execute("SELECT FROM approvals FOR UPDATE")
        held = await mary.post(f"/a/{made.token}", page.form("Approve").fields | {"verdict": "approve"})
    assert held.status == 503 and "a page was not made" in caplog.text
    assert made.token not in caplog.text


async def test_a_links_page_tells_nobody_where_it_is(site: Site, conn: Connection, visitors: Any) -> None:
    made = await new_link(conn, await ask(conn, tier=BY_MAIL))
    mary = await visitors(site)
    page = await mary.get(f"/a/{made.token}")
    gone = await mary.get(f"/a/{'A' * 43}")
    posted = await mary.post(f"/a/{made.token}", page.form("Approve").fields | {"verdict": "approve"})
    for answer in (page, gone, posted, await mary.get("/a/done")):
        assert answer.headers["Referrer-Policy"] == "no-referrer"
        assert answer.headers["Cache-Control"] == "no-store"
        assert "default-src 'none'" in answer.headers["Content-Security-Policy"]
        assert not [link for link in answer.links if link.startswith(("http", "//"))]
        assert made.token not in answer.html
    [cookie] = page.headers.getall("Set-Cookie")
    assert cookie.startswith("__Host-") and {"SameSite=Strict", "Secure", "HttpOnly", "Path=/"} <= set(
        cookie.split("; ")
    )


async def test_too_many_looks_in_a_minute_are_refused(database_url: str, visitors: Any) -> None:
    async with pages_in_process(database_url, tokens=Limit(2)) as site:
        visitor = await visitors(site)
        assert [(await visitor.get(f"/a/{'A' * 43}")).status for _ in range(3)] == [410, 410, 429]


# The command line


async def test_the_command_line_makes_shows_and_revokes_a_link(
    site: Site, conn: Connection, visitors: Any, database_url: str, tmp_path: Path
) -> None:
    await ask(conn, tier=BY_MAIL)
    terminal = Terminal(tmp_path, DATABASE_URL=database_url, PUBLIC_URL=site.url, STEP_UP_OVER="200")
    done = await terminal.run_meanwhile("link", "--thread", "t1", "--to", "Mary@Example.com")
    assert done.code == 0, done.err
    url, code = done.out.splitlines()
    assert code.startswith("code ") and len(code) == 11
    mary = await visitors(site)
    assert (await mary.get(url.removeprefix(site.url))).status == 200
    another = await terminal.run_meanwhile("link", "--thread", "t1", "--to", "mary@example.com", "--code")
    assert another.code == 0 and another.out.startswith("code ")
    revoked_now = await terminal.run_meanwhile("link", "--thread", "t1", "--to", "mary@example.com", "--revoke")
    assert revoked_now.code == 0, revoked_now.err
    assert (await mary.get(url.removeprefix(site.url))).status == 410
    again = await terminal.run_meanwhile("link", "--thread", "t1", "--to", "mary@example.com", "--code")
    assert again.code == 1 and "no open link" in again.err


async def test_the_command_line_refuses_a_link_for_a_stranger_or_a_settled_request(
    conn: Connection, database_url: str, tmp_path: Path
) -> None:
    interrupt_id = await ask(conn, tier=BY_MAIL)
    terminal = Terminal(tmp_path, DATABASE_URL=database_url)
    stranger = await terminal.run_meanwhile("link", "--thread", "t1", "--to", "eve@example.com")
    assert stranger.code == 1 and "not on the list" in stranger.err
    await decide(conn, interrupt_id, ALICE, YES)
    late = await terminal.run_meanwhile("link", "--thread", "t1", "--to", "mary@example.com")
    assert late.code == 1 and "approved" in late.err and late.out == ""
