"""The web inbox: everybody sees and decides what the policy lets them, and nothing decides but a form of ours."""

from __future__ import annotations

import asyncio
import contextlib
import re
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import aiohttp
import pytest
from psycopg.types.json import Jsonb

from bot.limits import Limit
from bot.live import Live
from bot.pages import PAGE
from bot.site import Site
from flow import database
from flow.approvals import approval_of, decide
from flow.database import Connection, connect
from flow.drive import drive
from flow.flows import Flows
from flow.inputs import mail_person
from flow.model import Person
from flow.policy import LIMITS, OneTier, Tier
from flow.sessions import begin_session, end_session, make_login_link
from tests.browsing import PageSeen, Visitor, pages_in_process, signed_in_at_once
from tests.command import Terminal
from tests.people import ALICE, ANN, BOB, EVE, NO, TWO_OF_THREE, YES, ask, start_claim
from tests.rows import RENEW_FINGERPRINTS, all_rows, rewrite, until_blocked, value
from tests.services import held, until_held_up

# As they are on the web, where the command line's exemption ends.
WEB_ANN = Person(key=ANN.key, name=ANN.name, names=ANN.names)
MARY = mail_person("Mary@Example.com")


@pytest.fixture
async def site(database_url: str) -> AsyncIterator[Site]:
    async with pages_in_process(database_url) as running:
        yield running


@pytest.fixture
async def visit(site: Site, conn: Connection) -> AsyncIterator[Any]:
    """`await visit(ALICE)`: a browser in which this person is signed in; None: nobody."""
    async with AsyncExitStack() as stack:

        async def visit(person: Person | None) -> Visitor:
            visitor = await stack.enter_async_context(Visitor(site.url))
            if person is not None:
                await signed_in_at_once(conn, site, visitor, person)
            return visitor

        yield visit


async def decisions(conn: Connection) -> list[dict[str, Any]]:
    return await all_rows(conn, "SELECT person, verdict, door, reason FROM decisions ORDER BY decided_at")


def path_of(interrupt_id: str) -> str:
    return f"/approvals/{interrupt_id}"


# Deciding


async def test_alice_signs_in_by_a_link_approves_with_a_reason_and_it_is_paid(
    site: Site, conn: Connection, flows: Flows
) -> None:
    await start_claim(conn, amount="1250")
    policy = OneTier(approvers=("U01ALICE",), limits=LIMITS)
    await drive(conn, "t1", flows=flows, policy=policy)
    async with Visitor(site.url) as alice:
        await alice.sign_in(conn, ALICE)
        inbox = await alice.get("/approvals")
        assert "1,250.00 USD" in inbox.text
        [path] = [link for link in inbox.links if link.startswith("/approvals/")]
        page = await alice.get(path)
        assert "to ACME" in page.text and "three chairs" in page.text and "cli:ann" in page.text
        answer = await alice.press(page, "Approve", reason="as agreed\r\nwith Bob")
        assert (answer.status, answer.headers["Location"]) == (303, path)
        assert await decisions(conn) == [
            {"person": ALICE.key, "verdict": "approve", "door": "web", "reason": "as agreed\nwith Bob"}
        ]
        await drive(conn, "t1", flows=flows, policy=policy)
        after = await alice.get(path)
        assert "L-t1" in after.text and "Approved by Alice" in after.text and "as agreed with Bob" in after.text
        assert not after.has_button("Approve") and not after.has_button("Reject")


async def test_bob_rejects_with_a_reason(visit: Any, conn: Connection) -> None:
    interrupt_id = await ask(conn)
    bob = await visit(BOB)
    await bob.press(await bob.get(path_of(interrupt_id)), "Reject", reason="not this quarter")
    [made] = await decisions(conn)
    assert (made["person"], made["verdict"], made["reason"]) == (BOB.key, "reject", "not this quarter")
    assert (await approval_of(conn, interrupt_id)).status == "rejected"


async def test_two_must_approve_and_one_of_them_can_still_change_to_reject(visit: Any, conn: Connection) -> None:
    interrupt_id = await ask(conn, tier=TWO_OF_THREE)
    alice = await visit(ALICE)
    await alice.press(await alice.get(path_of(interrupt_id)), "Approve")
    page = await alice.get(path_of(interrupt_id))
    assert "1 more must" in page.text and not page.has_button("Approve") and page.has_button("Reject")
    await alice.press(page, "Reject")
    assert (await approval_of(conn, interrupt_id)).status == "rejected"


async def test_pressing_twice_is_once(visit: Any, conn: Connection) -> None:
    interrupt_id = await ask(conn)
    alice = await visit(ALICE)
    page = await alice.get(path_of(interrupt_id))
    both = await asyncio.gather(alice.press(page, "Approve"), alice.press(page, "Approve"))
    assert [answer.status for answer in both] == [303, 303]
    assert len(await decisions(conn)) == 1


async def test_a_decision_the_other_way_says_who_was_first(visit: Any, conn: Connection) -> None:
    interrupt_id = await ask(conn)
    alice = await visit(ALICE)
    page = await alice.get(path_of(interrupt_id))
    await decide(conn, interrupt_id, BOB, NO)
    answer = await alice.press(page, "Approve")
    assert answer.status == 409 and "Already rejected by Bob" in answer.text


# Another amount


async def test_another_amount_is_asked_for_anew(visit: Any, conn: Connection, flows: Flows) -> None:
    await start_claim(conn)
    policy = OneTier(approvers=("U01ALICE", "U02BOB"), limits=LIMITS)
    await drive(conn, "t1", flows=flows, policy=policy)
    path = path_of(await value(conn, "SELECT interrupt_id FROM approvals"))
    bob = await visit(BOB)
    page = await bob.get(path)
    assert page.form("Ask anew").fields["amount"] == "250.00"
    for _ in range(2):
        # Pressed twice is once.
        answer = await bob.press(page, "Ask anew", amount=" 200 ", reason="two\r\nchairs")
        assert (answer.status, answer.headers["Location"]) == (303, path)
    assert await all_rows(conn, "SELECT status, changed_to, changed_by, changed_why FROM approvals") == [
        {
            "status": "superseded",
            "changed_to": {"amount": "200.00"},
            "changed_by": BOB.key,
            "changed_why": "two\nchairs",
        }
    ]
    assert await all_rows(conn, "SELECT who, door FROM audit WHERE kind = 'approval.changed'") == [
        {"who": BOB.key, "door": "web"}
    ]
    after = await bob.get(path)
    assert f"by {BOB.key}, who asks for 200.00 instead of 250.00: two chairs" in after.text
    assert not after.has_button("Ask anew") and not after.has_button("Approve")
    await drive(conn, "t1", flows=flows, policy=policy)
    assert "200.00 USD" in (await bob.get("/approvals")).text


@pytest.mark.parametrize(
    ("amount", "wrong"),
    [("", "write digits"), ("1,000", "write digits"), ("0", "above zero"), ("250", "what is asked for already")],
)
async def test_an_amount_that_cannot_be_asked_for_is_told_beside_it(
    visit: Any, conn: Connection, amount: str, wrong: str
) -> None:
    interrupt_id = await ask(conn)
    alice = await visit(ALICE)
    answer = await alice.press(await alice.get(path_of(interrupt_id)), "Ask anew", amount=amount, reason="<b>")
    assert (answer.status, wrong in answer.text) == (422, True)
    assert answer.form("Ask anew").fields["reason"] == "<b>"
    assert answer.form("Approve").fields["reason"] == ""
    assert (await approval_of(conn, interrupt_id)).status == "pending"


@pytest.mark.parametrize(
    ("spoil", "status"),
    [({"form_token": ""}, 403), ({"request_hash": "x"}, 400), ({"request_hash": "0" * 64}, 409)],
    ids=["form token", "hash", "another hash"],
)
async def test_another_amount_is_as_well_guarded_as_a_decision(
    visit: Any, conn: Connection, spoil: dict[str, str], status: int
) -> None:
    interrupt_id = await ask(conn)
    alice = await visit(ALICE)
    page = await alice.get(path_of(interrupt_id))
    assert (await alice.press(page, "Ask anew", amount="200", **spoil)).status == status
    fields = page.form("Ask anew").fields | {"amount": "200"}
    path = f"{path_of(interrupt_id)}/amount"
    assert (await alice.post(path, fields, headers={"Origin": "https://evil.example"})).status == 403
    eve = await visit(EVE)
    own = (await eve.get("/approvals")).form("Sign out").fields
    assert (await eve.post(path, fields | own)).status == 404
    assert (await approval_of(conn, interrupt_id)).status == "pending"


# Who may not. Each is refused with a status, and nothing is recorded.

STRANGERS_TIER = Tier(name="approval", approvers=("U02BOB",))


@pytest.mark.parametrize(
    ("person", "requested_by", "status"),
    [
        pytest.param(EVE, ANN.key, 404, id="a stranger, who is not even told that it is there"),
        pytest.param(ALICE, "U01ALICE", 403, id="the requester by member id, though on the list"),
        pytest.param(MARY, "MARY@example.com", 403, id="the requester by address, in whatever letters"),
        pytest.param(WEB_ANN, ANN.key, 403, id="the one at the command line, who is nobody special here"),
        pytest.param(
            Person(key="slack:T02OTHER/U01ALICE", name="alice", names=frozenset({"slack:T02OTHER/U01ALICE"})),
            ANN.key,
            404,
            id="the same member id in another team",
        ),
    ],
)
async def test_whom_the_policy_does_not_name_cannot_decide(
    visit: Any, conn: Connection, person: Person, requested_by: str, status: int
) -> None:
    tier = Tier(name="approval", approvers=("U01ALICE", "mary@example.com"))
    interrupt_id = await ask(conn, tier=tier, requested_by=requested_by)
    approval = await approval_of(conn, interrupt_id)
    visitor = await visit(person)
    page = await visitor.get(path_of(interrupt_id))
    assert page.status == (404 if status == 404 else 200)
    assert not page.has_button("Approve") and not page.has_button("Reject")
    # A form token of their own session, from whatever page shows one.
    token = (await visitor.get("/approvals")).forms[0].fields["form_token"]
    for verdict in ("approve", "reject"):
        fields = {"form_token": token, "verdict": verdict, "request_hash": approval.request_hash}
        assert (await visitor.post(path_of(interrupt_id), fields)).status == status
    assert await decisions(conn) == []


async def signed_out(site: Site, conn: Connection, alice: Visitor, fields: dict[str, str]) -> dict[str, Any]:
    await alice.press(await alice.get("/approvals"), "Sign out")
    return {}


async def ended_elsewhere(site: Site, conn: Connection, alice: Visitor, fields: dict[str, str]) -> dict[str, Any]:
    kept = dict(alice.cookies)
    await alice.press(await alice.get("/approvals"), "Sign out")
    # A copy of the cookie from before.
    alice.cookies.update(kept)
    return {}


async def expired_session(site: Site, conn: Connection, alice: Visitor, fields: dict[str, str]) -> dict[str, Any]:
    await conn.execute("UPDATE sessions SET expires_at = clock_timestamp()")
    return {}


async def tampered_signature(site: Site, conn: Connection, alice: Visitor, fields: dict[str, str]) -> dict[str, Any]:
    name = site.cookie_name("session")
    kept = alice.cookies[name]
    alice.cookies[name] = kept[:-1] + ("0" if kept[-1] != "0" else "1")
    return {}


async def unsigned_token(site: Site, conn: Connection, alice: Visitor, fields: dict[str, str]) -> dict[str, Any]:
    name = site.cookie_name("session")
    alice.cookies[name] = alice.cookies[name].partition(".")[0]
    return {}


async def no_form_token(site: Site, conn: Connection, alice: Visitor, fields: dict[str, str]) -> dict[str, Any]:
    del fields["form_token"]
    return {}


async def wrong_form_token(site: Site, conn: Connection, alice: Visitor, fields: dict[str, str]) -> dict[str, Any]:
    fields["form_token"] = "0" * 64
    return {}


async def anothers_form_token(site: Site, conn: Connection, alice: Visitor, fields: dict[str, str]) -> dict[str, Any]:
    fields["form_token"] = site.form_token(await begin_session(conn, BOB, by="link"))
    return {}


async def another_origin(site: Site, conn: Connection, alice: Visitor, fields: dict[str, str]) -> dict[str, Any]:
    return {"headers": {"Origin": "https://evil.example"}}


async def no_origin(site: Site, conn: Connection, alice: Visitor, fields: dict[str, str]) -> dict[str, Any]:
    return {"headers": {"Origin": None}}


async def null_origin(site: Site, conn: Connection, alice: Visitor, fields: dict[str, str]) -> dict[str, Any]:
    return {"headers": {"Origin": "null", "Sec-Fetch-Site": "cross-site"}}


async def no_hash(site: Site, conn: Connection, alice: Visitor, fields: dict[str, str]) -> dict[str, Any]:
    del fields["request_hash"]
    return {}


async def anothers_hash(site: Site, conn: Connection, alice: Visitor, fields: dict[str, str]) -> dict[str, Any]:
    fields["request_hash"] = "0" * 64
    return {}


async def no_verdict(site: Site, conn: Connection, alice: Visitor, fields: dict[str, str]) -> dict[str, Any]:
    del fields["verdict"]
    return {}


async def two_verdicts(site: Site, conn: Connection, alice: Visitor, fields: dict[str, str]) -> dict[str, Any]:
    return {"fields": [*fields.items(), ("verdict", "reject")]}


async def not_a_form(site: Site, conn: Connection, alice: Visitor, fields: dict[str, str]) -> dict[str, Any]:
    return {"headers": {"Content-Type": "text/plain"}, "fields": "verdict=approve"}


async def an_expired_approval(site: Site, conn: Connection, alice: Visitor, fields: dict[str, str]) -> dict[str, Any]:
    await conn.execute("UPDATE approvals SET expires_at = clock_timestamp()")
    return {}


async def unstorable_reason(site: Site, conn: Connection, alice: Visitor, fields: dict[str, str]) -> dict[str, Any]:
    fields["reason"] = "\x00"
    return {}


REFUSALS = [
    (signed_out, 403),
    (ended_elsewhere, 403),
    (expired_session, 403),
    (tampered_signature, 403),
    (unsigned_token, 403),
    (no_form_token, 403),
    (wrong_form_token, 403),
    (anothers_form_token, 403),
    (another_origin, 403),
    (no_origin, 403),
    (null_origin, 403),
    (no_hash, 400),
    (anothers_hash, 409),
    (no_verdict, 400),
    (two_verdicts, 400),
    (not_a_form, 415),
    (an_expired_approval, 410),
    (unstorable_reason, 422),
]


@pytest.mark.parametrize(("spoil", "status"), REFUSALS, ids=lambda each: getattr(each, "__name__", str(each)))
async def test_a_decision_that_is_not_whole_is_refused(
    visit: Any, site: Site, conn: Connection, spoil: Any, status: int
) -> None:
    interrupt_id = await ask(conn)
    alice = await visit(ALICE)
    form = (await alice.get(path_of(interrupt_id))).form("Approve")
    fields = form.fields | {"verdict": "approve"}
    changed = await spoil(site, conn, alice, fields)
    answer = await alice.post(form.action, changed.get("fields", fields), headers=changed.get("headers"))
    assert answer.status == status, answer.text
    assert await decisions(conn) == []


@pytest.mark.parametrize("charset", ["punycode", "hex", "unicode_escape", "utf-16"])
async def test_a_form_in_an_encoding_of_the_senders_choice_is_read_in_ours(
    visit: Any, conn: Connection, charset: str
) -> None:
    """Some take minutes to decode, and some are no encoding of text at all."""
    interrupt_id = await ask(conn)
    alice = await visit(ALICE)
    form = (await alice.get(path_of(interrupt_id))).form("Approve")
    kind = {"Content-Type": f"application/x-www-form-urlencoded; charset={charset}"}
    answer = await alice.post(form.action, urlencode(form.fields | {"verdict": "approve"}), headers=kind)
    assert answer.status == 303
    assert len(await decisions(conn)) == 1


async def test_a_form_without_a_length_may_not_be_longer_either(visit: Any, conn: Connection) -> None:
    interrupt_id = await ask(conn)
    alice = await visit(ALICE)
    form = (await alice.get(path_of(interrupt_id))).form("Approve")

    async def chunks() -> AsyncIterator[bytes]:
        for _ in range(64):
            yield b"x" * (1 << 16)

    kind = {"Content-Type": "application/x-www-form-urlencoded"}
    assert (await alice.post(form.action, chunks(), headers=kind)).status == 413


async def test_a_form_that_is_not_what_it_says_it_is_is_told_so(
    visit: Any, conn: Connection, caplog: pytest.LogCaptureFixture
) -> None:
    alice = await visit(ALICE)
    kind = {"Content-Type": "application/x-www-form-urlencoded", "Content-Encoding": "gzip"}
    answer = await alice.post(path_of(await ask(conn)), b"not gzip", headers=kind)
    assert answer.status == 400 and "Nothing was done" in answer.text
    assert [record.getMessage() for record in caplog.records if record.exc_info] == []


async def test_no_other_site_signs_anybody_out(visit: Any) -> None:
    # Its request brings no cookie, and the answer would take it away.
    stranger = await visit(None)
    answer = await stranger.post("/logout", {}, headers={"Origin": "https://evil.example"})
    assert answer.status == 403
    assert "Set-Cookie" not in answer.headers


async def test_one_session_has_only_so_many_open_streams(visit: Any, site: Site, conn: Connection) -> None:
    alice = await visit(ALICE)
    cookie = "; ".join(f"{name}={value}" for name, value in alice.cookies.items())
    async with AsyncExitStack() as stack:
        http = await stack.enter_async_context(aiohttp.ClientSession(headers={"Cookie": cookie}))
        url = f"{site.url}/approvals/events"
        opened = [await stack.enter_async_context(http.get(url)) for _ in range(11)]
        assert [answer.status for answer in opened] == [200] * 10 + [429]


async def test_a_page_without_a_referrer_may_send_its_form_if_the_browser_says_it_was_ours(
    visit: Any, conn: Connection
) -> None:
    interrupt_id = await ask(conn)
    alice = await visit(ALICE)
    form = (await alice.get(path_of(interrupt_id))).form("Approve")
    headers = {"Origin": "null", "Sec-Fetch-Site": "same-origin"}
    answer = await alice.post(form.action, form.fields | {"verdict": "approve"}, headers=headers)
    assert (answer.status, len(await decisions(conn))) == (303, 1)


@pytest.mark.parametrize("method", ["GET", "HEAD", "PUT", "DELETE", "PATCH"])
async def test_only_post_decides(visit: Any, conn: Connection, method: str) -> None:
    interrupt_id = await ask(conn)
    alice = await visit(ALICE)
    form = (await alice.get(path_of(interrupt_id))).form("Approve")
    fields = form.fields | {"verdict": "approve"}
    query = "&".join(f"{name}={value}" for name, value in fields.items())
    answer = await alice.ask(method, f"{form.action}?{query}", headers={"Origin": alice.url})
    assert answer.status == (200 if method in ("GET", "HEAD") else 405)
    assert await decisions(conn) == []


@pytest.mark.parametrize("path", ["/approvals", "/approvals/bulk?item=" + "0" * 32, "/approvals/" + "0" * 32])
async def test_whoever_is_not_signed_in_is_asked_to_be(visit: Any, conn: Connection, path: str) -> None:
    await ask(conn)
    answer = await (await visit(None)).get(path)
    assert answer.status == 303 and answer.headers["Location"].startswith("/login")
    assert "USD" not in answer.html


async def test_the_database_away_is_said_so_and_nothing_is_lost(
    visit: Any, site: Site, conn: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    interrupt_id = await ask(conn)
    alice = await visit(ALICE)
    page = await alice.get(path_of(interrupt_id))
    # Somebody else's transaction holds the row for longer than a door waits.
    async with conn.transaction():
        await conn.execute("SELECT FROM approvals FOR UPDATE")
        answer = await alice.press(page, "Approve")
    assert answer.status == 503 and "twice is once" in answer.text
    assert (await alice.press(page, "Approve")).status == 303
    assert len(await decisions(conn)) == 1


# Signing in and out


async def test_looking_at_a_login_link_does_not_spend_it_and_it_signs_in_once(
    visit: Any, conn: Connection, site: Site
) -> None:
    token = await make_login_link(conn, ALICE, by="cli:ann")
    scanner, alice, thief = await visit(None), await visit(None), await visit(None)
    for method in ("HEAD", "GET", "GET", "GET"):
        assert (await scanner.ask(method, f"/login/{token}")).status == 200
    page, other = await alice.get(f"/login/{token}"), await thief.get(f"/login/{token}")
    assert "Alice" in page.text and await value(conn, "SELECT count(*) FROM sessions") == 0
    assert (await alice.post(f"/login/{token}", page.form("Sign in").fields)).status == 303
    assert (await thief.post(f"/login/{token}", other.form("Sign in").fields)).status == 410
    assert (await thief.get(f"/login/{token}")).status == 410
    assert await value(conn, "SELECT count(*) FROM sessions") == 1
    assert "Alice" in (await alice.get("/approvals")).text


async def test_a_login_link_is_no_good_after_ten_minutes(visit: Any, conn: Connection) -> None:
    token = await make_login_link(conn, ALICE, by="cli:ann")
    alice = await visit(None)
    page = await alice.get(f"/login/{token}")
    await conn.execute("UPDATE login_links SET expires_at = expires_at - interval '10 minutes'")
    assert (await alice.post(f"/login/{token}", page.form("Sign in").fields)).status == 410


@pytest.mark.parametrize("spoil", ["no cookie", "another's cookie", "no token", "another origin"])
async def test_a_login_form_that_another_page_sends_signs_nobody_in(visit: Any, conn: Connection, spoil: str) -> None:
    token = await make_login_link(conn, ALICE, by="cli:ann")
    alice, other = await visit(None), await visit(None)
    fields = (await alice.get(f"/login/{token}")).form("Sign in").fields
    await other.get(f"/login/{token}")
    if spoil == "no cookie":
        alice.cookies.clear()
    if spoil == "another's cookie":
        alice.cookies = other.cookies
    if spoil == "no token":
        fields = {}
    headers = {"Origin": "https://evil.example"} if spoil == "another origin" else None
    assert (await alice.post(f"/login/{token}", fields, headers=headers)).status == 403
    assert await value(conn, "SELECT count(*) FROM sessions") == 0


async def test_signing_out_needs_the_form_token_too(visit: Any, conn: Connection) -> None:
    alice = await visit(ALICE)
    assert (await alice.post("/logout", {})).status == 403
    assert (await alice.get("/approvals")).status == 200


async def test_tokens_are_kept_as_hashes_only(visit: Any, conn: Connection) -> None:
    link, session = await make_login_link(conn, ALICE, by="cli:ann"), await begin_session(conn, ALICE, by="link")
    stored = str(await all_rows(conn, "SELECT * FROM sessions")) + str(
        await all_rows(conn, "SELECT * FROM login_links")
    )
    assert link not in stored and session not in stored
    await end_session(conn, session)
    assert await value(conn, "SELECT count(*) FROM sessions") == 0


@pytest.mark.parametrize(
    "then", ["https://evil.example", "//evil.example", "/approvals/../login", "javascript:alert(1)"]
)
async def test_signing_in_leads_nowhere_but_to_the_inbox(database_url: str, then: str) -> None:
    async with pages_in_process(database_url, slack_login=True) as site, Visitor(site.url) as visitor:
        page = await visitor.get(f"/login?then={then}")
        assert "/login/slack?then=/approvals" in page.links


async def test_the_command_line_prints_a_link_that_signs_one_person_in(
    database_url: str, conn: Connection, tmp_path: Path
) -> None:
    async with pages_in_process(database_url) as site:
        terminal = Terminal(tmp_path, DATABASE_URL=database_url, PUBLIC_URL=site.url)
        for who, key in (("Mary@example.com", MARY.key), ("cli", "cli:ann"), ("slack:T01TEST/U01ALICE", ALICE.key)):
            done = await terminal.run_meanwhile("login", "--as", who)
            assert done.code == 0, done.err
            async with Visitor(site.url) as visitor:
                path = done.out.strip().removeprefix(site.url)
                page = await visitor.get(path)
                assert (await visitor.post(path, page.form("Sign in").fields)).status == 303
            assert key in await value(conn, "SELECT array_agg(person) FROM sessions")


@pytest.mark.parametrize("who", ["U01ALICE", "alice", "@", "webhook:acme:carol", "cli:bob"])
def test_a_login_link_for_somebody_whom_nobody_can_tell_is_refused(database_url: str, tmp_path: Path, who: str) -> None:
    terminal = Terminal(tmp_path, DATABASE_URL=database_url)
    done = terminal.run("login", "--as", who)
    assert done.code in (1, 2) and done.out == ""


# What is seen


async def test_everybody_sees_what_names_them_and_what_they_asked_for_and_a_viewer_everything(
    database_url: str, conn: Connection
) -> None:
    mine = await ask(conn, "for-alice", tier=Tier(name="approval", approvers=("U01ALICE",)))
    filed = await ask(conn, "by-alice", tier=STRANGERS_TIER, requested_by="u01alice")
    other = await ask(conn, "of-others", tier=STRANGERS_TIER)
    seen_by = {ALICE.key: {mine, filed}, BOB.key: {filed, other}, EVE.key: set(), MARY.key: {mine, filed, other}}
    async with pages_in_process(database_url, viewers=frozenset({"mary@example.com"})) as site:
        for person in (ALICE, BOB, EVE, MARY):
            async with Visitor(site.url) as visitor:
                await signed_in_at_once(conn, site, visitor, person)
                listed = {link.rpartition("/")[2] for link in (await visitor.get("/approvals?view=all")).links}
                assert listed & {mine, filed, other} == seen_by[person.key]
                for interrupt_id in (mine, filed, other):
                    page = await visitor.get(path_of(interrupt_id))
                    assert page.status == (200 if interrupt_id in seen_by[person.key] else 404)
                    assert (await visitor.get(f"{path_of(interrupt_id)}/trace")).status == page.status


async def test_for_me_is_what_i_can_decide_and_have_not(visit: Any, conn: Connection) -> None:
    waits = await ask(conn, "waits", tier=TWO_OF_THREE)
    given = await ask(conn, "given", tier=TWO_OF_THREE)
    settled = await ask(conn, "settled")
    own = await ask(conn, "own", requested_by="U01ALICE")
    late = await ask(conn, "late", tier=Tier(name="approval", approvers=("U01ALICE",), expires_after_s=0))
    await decide(conn, given, ALICE, YES)
    await decide(conn, settled, BOB, NO)
    alice = await visit(ALICE)

    async def listed(path: str) -> set[str]:
        return {link.rpartition("/")[2] for link in (await alice.get(path)).links}

    everything = {waits, given, settled, own, late}
    assert await listed("/approvals") & everything == {waits}
    assert await listed("/approvals?view=all") & everything == everything
    assert await listed("/approvals?view=history") & everything == {settled}
    assert "For me 1 waiting" in (await alice.get("/approvals")).text


async def test_a_page_shows_a_strangers_text_as_what_it_is(visit: Any, conn: Connection) -> None:
    interrupt_id = await ask(conn, requested_by="<b>dana</b>")
    hostile = {"amount": "250.00", "currency": "USD", "payee": "<script>alert(1)</script>\u202edlog"}
    await rewrite(conn, "request = %s", Jsonb(hostile))
    await conn.execute("UPDATE threads SET input = input || %s", (Jsonb({"note": "<img src=x onerror=alert(1)>"}),))
    alice = await visit(ALICE)
    for path in ("/approvals", path_of(interrupt_id)):
        page = await alice.get(path)
        assert "<script>alert" not in page.html and "<img src=x" not in page.html and "<b>dana" not in page.html
        assert "<script>alert(1)</script>\\u{202e}dlog" in page.text and "<b>dana</b>" in page.text
        assert "\u202e" not in page.html


async def test_pages_forbid_what_they_do_not_need(visit: Any, conn: Connection) -> None:
    interrupt_id = await ask(conn)
    alice, nobody = await visit(ALICE), await visit(None)
    token = await make_login_link(conn, ALICE, by="cli:ann")
    pages: list[PageSeen] = [
        await alice.get("/approvals"),
        await alice.get(path_of(interrupt_id)),
        await alice.get(f"/approvals/{'0' * 32}"),
        await nobody.get("/login"),
        await nobody.get(f"/login/{token}"),
    ]
    for page in pages:
        policy = page.headers["Content-Security-Policy"]
        assert "default-src 'none'" in policy and "unsafe" not in policy and "frame-ancestors 'none'" in policy
        assert page.headers["Cache-Control"] == "no-store" and page.headers["X-Content-Type-Options"] == "nosniff"
        assert page.headers["Referrer-Policy"] in ("same-origin", "no-referrer")
        assert not [link for link in page.links if link.startswith(("http", "//"))]
        assert "style=" not in page.html and "onclick" not in page.html
    assert pages[-1].headers["Referrer-Policy"] == "no-referrer"


async def test_cookies_are_for_this_host_alone_and_no_script(visit: Any, conn: Connection) -> None:
    token = await make_login_link(conn, ALICE, by="cli:ann")
    alice = await visit(None)
    page = await alice.get(f"/login/{token}")
    answer = await alice.post(f"/login/{token}", page.form("Sign in").fields)
    [visitor], [session] = page.headers.getall("Set-Cookie"), answer.headers.getall("Set-Cookie")
    for cookie in (visitor, session):
        assert cookie.startswith("__Host-") and "Domain" not in cookie
        assert {"Secure", "HttpOnly", "Path=/"} <= set(cookie.split("; "))
    assert "SameSite=Strict" in visitor and "SameSite=Lax" in session


async def test_static_files_are_ours_and_nothing_else(visit: Any) -> None:
    nobody = await visit(None)
    page = await nobody.get("/login")
    assert "/static/style.css?v=" in page.html
    style = await nobody.get("/static/style.css")
    assert (style.status, style.headers["Content-Type"]) == (200, "text/css; charset=utf-8")
    for name in ("pages.py", "..%2fpages.py", "nothing.css"):
        assert (await nobody.get(f"/static/{name}")).status == 404


# Too much


async def test_too_many_decisions_in_a_minute_are_refused_for_that_person_alone(
    database_url: str, conn: Connection
) -> None:
    interrupt_id = await ask(conn, tier=TWO_OF_THREE)
    async with (
        pages_in_process(database_url, decisions=Limit(2)) as site,
        Visitor(site.url) as alice,
        Visitor(site.url) as bob,
    ):
        await signed_in_at_once(conn, site, alice, ALICE)
        await signed_in_at_once(conn, site, bob, BOB)
        page = await alice.get(path_of(interrupt_id))
        answers = [await alice.press(page, "Approve") for _ in range(3)]
        assert [answer.status for answer in answers] == [303, 303, 429]
        assert int(answers[2].headers["Retry-After"]) > 0
        assert (await bob.press(await bob.get(path_of(interrupt_id)), "Approve")).status == 303


async def test_too_many_tries_at_login_links_are_refused(database_url: str) -> None:
    async with pages_in_process(database_url, logins=Limit(3)) as site, Visitor(site.url) as visitor:
        answers = [await visitor.get(f"/login/{'A' * 43}") for _ in range(4)]
        assert [answer.status for answer in answers] == [410, 410, 410, 429]


async def test_callers_behind_our_proxy_are_told_apart(database_url: str) -> None:
    async with pages_in_process(database_url, logins=Limit(1)) as site, Visitor(site.url) as visitor:
        for hops, status in (("6.6.6.6, 1.1.1.1", 410), ("7.7.7.7, 1.1.1.1", 429), ("6.6.6.6, 2.2.2.2", 410)):
            answer = await visitor.get(f"/login/{'A' * 43}", headers={"X-Forwarded-For": hops})
            assert answer.status == status


def test_a_limit_forgets_after_a_minute() -> None:
    now = [0.0]
    limit = Limit(2, clock=lambda: now[0])
    assert [limit.take("a"), limit.take("a"), limit.take("a")] == [None, None, 60]
    now[0] = 59.5
    assert (limit.take("a"), limit.take("b")) == (1, None)
    now[0] = 60.5
    assert limit.take("a") is None


# Looking for something


async def test_a_search_finds_by_every_field_and_by_all_of_them(visit: Any, conn: Connection) -> None:
    chairs = await ask(conn, "chairs-1", requested_by="dana@example.com")
    desks = await ask(conn, "desks-2", requested_by="U05DAN")
    for interrupt_id, amount, payee, asked in (
        (chairs, "250.00", "Brown & Co", "2026-11-01T23:30Z"),
        (desks, "1250.50", "100% Desks_Ltd", "2026-11-02T00:30Z"),
    ):
        await conn.execute(
            "UPDATE approvals SET request = %s, requested_at = %s WHERE interrupt_id = %s",
            (Jsonb({"amount": amount, "currency": "USD", "payee": payee}), asked, interrupt_id),
        )
    await conn.execute(RENEW_FINGERPRINTS)
    await decide(conn, desks, ALICE, NO)
    alice = await visit(ALICE)

    async def found(**query: str) -> set[str]:
        page = await alice.get(f"/approvals?{urlencode({'view': 'all'} | query)}")
        assert page.status == 200, page.text
        return {"chairs" if chairs in link else "desks" for link in page.links if link.startswith("/approvals/")}

    assert await found() == {"chairs", "desks"}
    for query, wanted in (
        ({"status": "pending"}, {"chairs"}),
        ({"status": "rejected"}, {"desks"}),
        ({"at_least": "250.01"}, {"desks"}),
        ({"at_most": "1,250.50"}, {"chairs", "desks"}),
        ({"at_least": "100", "at_most": "250"}, {"chairs"}),
        ({"requester": "DANA@"}, {"chairs"}),
        ({"since": "2026-11-02"}, {"desks"}),
        ({"until": "2026-11-01"}, {"chairs"}),
        ({"since": "2026-11-01", "until": "2026-11-02"}, {"chairs", "desks"}),
        ({"thread": "DESKS"}, {"desks"}),
        ({"words": "brown &"}, {"chairs"}),
        ({"words": "three chairs"}, {"chairs", "desks"}),
        # No wildcards.
        ({"words": "%"}, {"desks"}),
        ({"words": "s_l"}, {"desks"}),
        ({"words": "' OR true --"}, set()),
        ({"requester": "u05", "at_least": "1000", "status": "rejected", "words": "desks"}, {"desks"}),
    ):
        assert await found(**query) == wanted, query


@pytest.mark.parametrize(
    "query",
    [
        "view=theirs",
        "status=paid",
        "at_least=much",
        "at_most=-1",
        "since=yesterday",
        "until=2026-13-01",
        "after=x",
        "words=%00",
        "thread=" + "x" * 201,
    ],
)
async def test_a_search_that_cannot_be_understood_is_refused(visit: Any, query: str) -> None:
    assert (await (await visit(ALICE)).get(f"/approvals?{query}")).status in (400, 422)


async def test_a_search_shows_nobody_what_they_may_not_see(visit: Any, conn: Connection) -> None:
    await ask(conn, "secret")
    eve = await visit(EVE)
    for query in ("view=all&words=secret", "view=history", "view=all&requester=cli:ann", "view=all&thread=secret"):
        page = await eve.get(f"/approvals?{query}")
        assert page.status == 200 and "250.00" not in page.text
        assert not [link for link in page.links if link.startswith("/approvals/")]


async def test_a_long_list_goes_on_and_shows_each_once(visit: Any, conn: Connection) -> None:
    made = {await ask(conn, f"t{number}") for number in range(PAGE + 3)}
    # Several in one instant.
    await conn.execute("UPDATE approvals SET requested_at = '2026-11-30' WHERE thread_id LIKE 't1%'")
    alice = await visit(ALICE)
    listed: list[str] = []
    path: str | None = "/approvals?view=all&words=t"
    while path is not None:
        page = await alice.get(path)
        listed += [link.rpartition("/")[2] for link in page.links if link.startswith("/approvals/")]
        path = next((link for link in page.links if "after=" in link), None)
        assert path is None or "words=t" in path
    assert len(listed) == PAGE + 3 and set(listed) == made


# Many at once


async def test_many_are_approved_after_their_sum_was_shown(visit: Any, conn: Connection) -> None:
    first, second, other = await ask(conn, "t1"), await ask(conn, "t2"), await ask(conn, "t3")
    alice = await visit(ALICE)
    page = await alice.get(f"/approvals/bulk?item={first}&item={second}&item={first}")
    assert "Approve 2 requests?" in page.text and "500.00 USD in all" in page.text
    assert await decisions(conn) == []
    form = page.form("Approve")
    items = re.findall(r'name="item" value="([0-9a-f:]+)"', page.html)
    fields = [("form_token", form.fields["form_token"]), ("reason", "monthly"), *(("item", item) for item in items)]
    done = await alice.post(form.action, fields)
    assert done.status == 200 and done.text.count("Approved") == 2
    made = await all_rows(conn, "SELECT interrupt_id, person, verdict, door, reason FROM decisions")
    assert {row["interrupt_id"] for row in made} == {first, second} and other not in str(made)
    assert {(row["person"], row["verdict"], row["door"], row["reason"]) for row in made} == {
        (ALICE.key, "approve", "web", "monthly")
    }


async def test_one_of_many_that_is_refused_does_not_keep_the_others_from_it(visit: Any, conn: Connection) -> None:
    good, own, taken, hidden = (
        await ask(conn, "good"),
        await ask(conn, "own", requested_by="U01ALICE"),
        await ask(conn, "taken"),
        await ask(conn, "hidden", tier=STRANGERS_TIER),
    )
    alice = await visit(ALICE)
    items = [f"{each}:{(await approval_of(conn, each)).request_hash}" for each in (hidden, own, taken, good)]
    stale = await ask(conn, "stale")
    items.insert(0, f"{stale}:{'0' * 64}")
    await decide(conn, taken, BOB, NO)
    token = (await alice.get("/approvals")).forms[0].fields["form_token"]
    done = await alice.post("/approvals/bulk", [("form_token", token), *(("item", item) for item in items)])
    assert done.status == 200
    for said in ("no approval has", "request of their own", "already rejected by Bob", "has changed", "250.00 USD"):
        assert said in done.text
    assert await value(conn, "SELECT array_agg(interrupt_id) FROM decisions WHERE verdict = 'approve'") == [good]


async def form_for(alice: Visitor, conn: Connection, *interrupt_ids: str) -> list[tuple[str, str]]:
    """What is sent to approve all of these."""
    token = (await alice.get("/approvals")).forms[0].fields["form_token"]
    items = [f"{each}:{(await approval_of(conn, each)).request_hash}" for each in interrupt_ids]
    return [("form_token", token), *(("item", item) for item in items)]


async def test_one_of_many_that_cannot_be_recorded_now_hides_nothing_of_what_was(
    visit: Any, conn: Connection, database_url: str
) -> None:
    first, held_up, last = [await ask(conn, name) for name in ("first", "held-up", "last")]
    alice = await visit(ALICE)
    fields = await form_for(alice, conn, first, held_up, last)
    async with held(database_url, [held_up]):
        done = await alice.post("/approvals/bulk", fields)
    assert done.status == 200 and done.text.count("Approved") == 2
    assert "could not be confirmed" in done.text and done.text.count("Not confirmed") == 1
    assert f'href="{path_of(held_up)}"' in done.html and "Refused" not in done.text
    assert {row["interrupt_id"] for row in await all_rows(conn, "SELECT interrupt_id FROM decisions")} == {first, last}
    # Twice is once.
    assert (await alice.post("/approvals/bulk", fields)).text.count("Approved") == 3
    assert len(await decisions(conn)) == 3


async def test_many_are_not_tried_for_longer_than_somebody_waits_for_the_page(
    visit: Any, conn: Connection, database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bot.pages._MANY_WITHIN_S", 1.0)
    interrupt_ids = [await ask(conn, f"t{number}") for number in range(6)]
    alice = await visit(ALICE)
    fields = await form_for(alice, conn, *interrupt_ids)
    began = time.monotonic()
    async with held(database_url, interrupt_ids):
        done = await alice.post("/approvals/bulk", fields)
    assert done.status == 200 and done.text.count("Not confirmed") == 6
    # A door waits twice for two seconds for each.
    assert time.monotonic() - began < 15


async def test_what_became_of_many_is_told_although_what_still_waits_cannot_be_counted(
    visit: Any, conn: Connection, database_url: str
) -> None:
    interrupt_id = await ask(conn)
    alice = await visit(ALICE)
    fields = await form_for(alice, conn, interrupt_id)
    async with await connect(database_url, "listen") as locker, locker.transaction():
        async with held(database_url, [interrupt_id]) as holder:
            sent = asyncio.create_task(alice.post("/approvals/bulk", fields))
            await until_held_up(conn, 1, by=holder)
            # Whoever has begun to decide comes first, and whoever counts then comes after it.
            locking = asyncio.create_task(locker.execute("LOCK TABLE approvals"))
            await until_blocked(conn, locker.info.backend_pid)
        await locking
        done = await sent
    assert done.status == 200 and done.text.count("Approved") == 1
    assert len(await decisions(conn)) == 1


async def test_many_leave_out_what_i_cannot_approve_and_show_nothing_that_i_may_not_see(
    visit: Any, conn: Connection
) -> None:
    good, own = await ask(conn, "good"), await ask(conn, "own", requested_by="U01ALICE")
    hidden = await ask(conn, "hidden", tier=STRANGERS_TIER)
    alice = await visit(ALICE)
    page = await alice.get(f"/approvals/bulk?item={good}&item={own}")
    assert "Approve 1 request?" in page.text and "1 that you chose cannot be approved" in page.text
    assert (await alice.get(f"/approvals/bulk?item={good}&item={hidden}")).status == 404


@pytest.mark.parametrize("spoil", ["no token", "another origin", "no item", "no hash", "too many"])
async def test_many_are_as_well_guarded_as_one(visit: Any, conn: Connection, spoil: str) -> None:
    interrupt_id = await ask(conn)
    alice = await visit(ALICE)
    token = (await alice.get("/approvals")).forms[0].fields["form_token"]
    item = f"{interrupt_id}:{(await approval_of(conn, interrupt_id)).request_hash}"
    fields = [("form_token", token if spoil != "no token" else ""), ("item", item)]
    if spoil == "no item":
        fields = fields[:1]
    if spoil == "no hash":
        fields[1] = ("item", interrupt_id)
    if spoil == "too many":
        fields += [("item", f"{number:032x}:{'0' * 64}") for number in range(PAGE)]
    headers = {"Origin": "https://evil.example"} if spoil == "another origin" else None
    assert (await alice.post("/approvals/bulk", fields, headers=headers)).status in (400, 403)
    assert await decisions(conn) == []


# Keeping up


@contextlib.asynccontextmanager
async def following(visitor: Visitor) -> AsyncIterator[Any]:
    """Reads one line of the events at a time."""
    cookie = "; ".join(f"{name}={value}" for name, value in visitor.cookies.items())
    async with (
        aiohttp.ClientSession() as http,
        http.get(f"{visitor.url}/approvals/events", headers={"Cookie": cookie}, allow_redirects=False) as answer,
    ):
        yield answer


async def heard(answer: Any, text: str) -> None:
    async with asyncio.timeout(15):
        async for line in answer.content:
            if text in line.decode():
                return
    raise AssertionError(f"the stream ended without {text!r}")


async def test_an_open_page_hears_of_a_decision_through_any_door(visit: Any, conn: Connection) -> None:
    interrupt_id = await ask(conn)
    async with following(await visit(ALICE)) as answer:
        assert answer.headers["Content-Type"] == "text/event-stream"
        await heard(answer, "retry:")
        await decide(conn, interrupt_id, BOB, YES)
        await heard(answer, "event: change")


async def test_a_stream_ends_with_the_session(visit: Any, site: Site, conn: Connection) -> None:
    alice = await visit(ALICE)
    async with following(alice) as answer:
        await heard(answer, "retry:")
        await alice.press(await alice.get("/approvals"), "Sign out")
        # Nothing has changed before, whose bell might be heard late.
        await ask(conn)
        async with asyncio.timeout(15):
            assert b"change" not in await answer.content.read()


async def test_a_stream_is_nobodys_who_is_not_signed_in(visit: Any) -> None:
    async with following(await visit(None)) as answer:
        assert answer.status == 204


async def test_streams_end_when_the_service_does(database_url: str, conn: Connection) -> None:
    async with AsyncExitStack() as stack:
        async with pages_in_process(database_url) as site:
            visitor = await stack.enter_async_context(Visitor(site.url))
            await signed_in_at_once(conn, site, visitor, ALICE)
            answer = await stack.enter_async_context(following(visitor))
            await heard(answer, "retry:")
        async with asyncio.timeout(5):
            assert (await answer.content.read()).strip() == b""


async def test_pages_hear_bells_and_not_the_clock(
    database_url: str, conn: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(database, "POLL_S", 0.01)
    async with contextlib.aclosing(database.wakes(database_url, polls=False)) as bells:
        assert await anext(bells)
        heard_next = asyncio.ensure_future(anext(bells))
        done, _ = await asyncio.wait({heard_next}, timeout=0.5)
        assert not done
        await database.ring(conn)
        async with asyncio.timeout(15):
            assert await heard_next


async def test_what_rings_while_a_stream_writes_is_heard() -> None:
    live = Live()
    before = live.rung
    live.close()
    async with asyncio.timeout(1):
        assert await live.wait(before, 60) == before + 1


@pytest.mark.parametrize("request_", ['{"amount": "9.00", "currency": "USD", "payee": "Mallory"}', "{}"])
async def test_what_was_changed_past_us_is_shown_nowhere_as_what_it_says(
    visit: Any, conn: Connection, request_: str
) -> None:
    interrupt_id = await ask(conn)
    await conn.execute("UPDATE approvals SET request = %s::jsonb, requested_by = 'Mallory'", (request_,))
    alice = await visit(ALICE)
    page = await alice.get(f"/approvals/{interrupt_id}")
    assert page.status == 200
    assert "This request was changed outside of the bot: nobody can decide it." in page.text
    listed = await alice.get("/approvals?view=all")
    assert "changed outside of the bot t1" in " ".join(listed.text.split())
    assert "For me" in listed.text and "For me 1" not in listed.text
    for seen in (page, listed):
        assert not any(word in seen.html for word in ("9.00", "Mallory", 'value="approve"', 'name="item"'))
