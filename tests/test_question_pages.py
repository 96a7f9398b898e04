"""Questions of any flow in the inbox and behind a link: shown whole, answered by a form, and nothing typed is lost."""

from __future__ import annotations

import html
import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from decimal import Decimal
from typing import Any

import pytest

from bot.mail import message_of
from bot.site import Site
from flow import links, threads
from flow.approvals import approval_of, decide
from flow.changes import refresh
from flow.database import Connection
from flow.inputs import mail_person
from flow.links import wants_code
from flow.mails import Mail
from flow.model import Person, Verdict
from flow.policy import Tier
from flow.questions import stored_question
from tests.asking import DINNER, MAIL, REFUND, human_interrupt, put, tool_call, tool_calls
from tests.browsing import PageSeen, Visitor, pages_in_process, signed_in_at_once
from tests.people import ALICE, BOB, POLICY, TWO_OF_THREE, ask
from tests.rows import all_rows, value

MARY = mail_person("mary@example.com")
BY_MAIL = Tier(name="approval", approvers=("mary@example.com", "U01ALICE"))
_EDITED = json.dumps({"to": "carol@example.com"})
_HOSTILE = '</textarea></pre><script>alert(1)</script>"\u202e'


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


async def decision(conn: Connection) -> tuple[str, Any]:
    """The only one: what was said, and beyond it."""
    [made] = await all_rows(conn, "SELECT verdict, answer FROM decisions")
    return made["verdict"], made["answer"]


async def page_of(visitor: Visitor, interrupt_id: str) -> PageSeen:
    page = await visitor.get(f"/approvals/{interrupt_id}")
    assert page.status == 200, page.text
    return page


async def link(conn: Connection, interrupt_id: str, *, code: bool = False) -> links.NewLink:
    """Mary's."""
    return await links.make_link(conn, await approval_of(conn, interrupt_id), MARY, by="cli:ann", with_code=code)


# Shown


async def test_a_request_is_shown_with_its_fields_and_amount(visit: Any, conn: Connection) -> None:
    interrupt_id = await put(conn, REFUND)
    alice = await visit(ALICE)
    page = await page_of(alice, interrupt_id)
    for words in ("Refund", "1,250.00 EUR", "Order A-17", "The chair came with three legs. It was to have four."):
        assert words in page.text
    assert page.has_button("Approve 1,250.00 EUR") and page.has_button("Reject") and not page.has_button("Send")
    inbox = await alice.get("/approvals")
    assert "1,250.00 EUR Refund" in inbox.text
    await alice.press(page, "Approve")
    assert await decision(conn) == ("approve", None)


async def test_whatever_a_flow_writes_is_text(visit: Any, conn: Connection) -> None:
    alice = await visit(ALICE)
    asked = (
        {"title": _HOSTILE, "fields": {_HOSTILE: _HOSTILE}, "options": [_HOSTILE]},
        tool_call(name=_HOSTILE, args={_HOSTILE: _HOSTILE}),
        human_interrupt(name=_HOSTILE, args={"a": [_HOSTILE]}) | {"description": _HOSTILE},
        {_HOSTILE: _HOSTILE},
    )
    for number, value_ in enumerate(asked):
        interrupt_id = await put(conn, value_, f"q{number}")
        page = await page_of(alice, interrupt_id)
        assert "<script>alert" not in page.html and "\u202e" not in html.unescape(page.html).replace(_HOSTILE, "")
        assert "alert(1)" in page.text
    assert "<script>alert" not in (await alice.get("/approvals")).html


async def test_what_a_person_approves_is_what_the_form_sends_back_untouched(visit: Any, conn: Connection) -> None:
    """Arguments in a field are the same value, whatever is in them."""
    args = {"text": "\n\n  two\r\nlines \u202e </textarea> é \U0001f44d", "number": 1.0, "none": None}
    alice = await visit(ALICE)
    page = await page_of(alice, await put(conn, tool_call(args=args)))
    assert json.loads(page.form("Approve").fields["args-0"]) == args
    assert (await alice.press(page, "Approve")).status == 303
    assert await decision(conn) == ("approve", None)


# Answered


async def test_an_option_is_chosen_and_shown(visit: Any, conn: Connection) -> None:
    interrupt_id = await put(conn, DINNER)
    alice = await visit(ALICE)
    page = await page_of(alice, interrupt_id)
    refused = await alice.press(page, "Approve", reason="hungry")
    assert refused.status == 422 and "Choose one." in refused.text
    assert refused.form("Approve").fields["reason"] == "hungry"
    await alice.press(refused, "Approve", option="pay later")
    assert await decision(conn) == ("approve", {"option": "pay later"})
    assert "chose: pay later" in (await page_of(alice, interrupt_id)).text


async def test_an_option_that_was_chosen_does_not_keep_anybody_from_rejecting(visit: Any, conn: Connection) -> None:
    alice = await visit(ALICE)
    await alice.press(await page_of(alice, await put(conn, DINNER)), "Reject", option="pay now")
    assert await decision(conn) == ("reject", None)


@pytest.mark.parametrize(
    ("fields", "verdict", "step"),
    [
        ({"step-0": "edit", "args-0": _EDITED}, "approve", {"type": "edit", "args": {"to": "carol@example.com"}}),
        ({"step-0": "respond", "message-0": "Ask\r\nBob"}, "approve", {"type": "respond", "message": "Ask\nBob"}),
        ({"step-0": "reject", "message-0": "no"}, "reject", {"type": "reject", "message": "no"}),
        ({"step-0": "approve"}, "approve", {"type": "approve"}),
    ],
)
async def test_an_action_is_answered(
    visit: Any, conn: Connection, fields: dict[str, str], verdict: str, step: dict[str, Any]
) -> None:
    interrupt_id = await put(conn, tool_call())
    alice = await visit(ALICE)
    answer = await alice.press(await page_of(alice, interrupt_id), "Send this answer", **fields)
    assert (answer.status, answer.headers["Location"]) == (303, f"/approvals/{interrupt_id}")
    assert await decision(conn) == (verdict, {"actions": [step]})


@pytest.mark.parametrize(
    ("button", "fields", "said"),
    [
        ("Send", {}, "Choose what becomes of it."),
        ("Send", {"step-0": "wave"}, "Choose what becomes of it."),
        ("Send", {"step-0": "edit", "args-0": '{"to": }'}, "This is no JSON object: Expecting value"),
        ("Send", {"step-0": "edit", "args-0": "[" * 100_000}, "This is no JSON object"),
        ("Send", {"step-0": "edit", "args-0": json.dumps({"a": "x" * 10_001})}, "longer than 10000"),
        ("Send", {"step-0": "approve", "args-0": _EDITED}, "You changed this: choose to edit, or put it back."),
        ("Send", {"step-0": "respond"}, "Write the answer."),
        ("Send", {"step-0": "approve", "message-0": "mine"}, "This goes with an answer or a rejection"),
        ("Approve", {"args-0": _EDITED}, "You filled in answers, and pressed another button"),
        ("Approve", {"message-0": "mine"}, "You filled in answers, and pressed another button"),
        ("Reject", {"step-0": "edit"}, "You filled in answers, and pressed another button"),
        ("Send", {"step-0": "approve", "reason": "x" * 10_001}, "at most 10000 are kept"),
    ],
)
async def test_a_form_that_cannot_be_taken_says_why_and_keeps_what_was_typed(
    visit: Any, conn: Connection, button: str, fields: dict[str, str], said: str
) -> None:
    alice = await visit(ALICE)
    page = await page_of(alice, await put(conn, tool_call()))
    refused = await alice.press(page, button, **{"reason": "because", **fields})
    assert (refused.status, said in refused.text) == (422, True), refused.text
    kept = refused.form("Send").fields
    for name, typed in {"reason": "because", **fields}.items():
        if typed != "wave":
            assert kept[name] == typed
    assert await all_rows(conn, "SELECT * FROM decisions") == []


async def test_several_actions_are_answered_one_by_one_and_shown(visit: Any, conn: Connection) -> None:
    calls = (("send_email", MAIL, ("approve", "edit")), ("delete", {"id": 7}, ("approve", "reject")))
    interrupt_id = await put(conn, tool_calls(*calls))
    alice = await visit(ALICE)
    page = await page_of(alice, interrupt_id)
    # One of them cannot be rejected, so they cannot be as a whole.
    assert page.has_button("Approve all as they are") and not page.has_button("Reject")
    answers = {"step-0": "edit", "args-0": _EDITED, "step-1": "reject", "message-1": "keep it"}
    await alice.press(page, "Send these answers", **answers)
    after = await page_of(alice, interrupt_id)
    assert 'send_email: edited: {"to": "carol@example.com"}' in after.text
    assert "delete: rejected: keep it" in after.text


async def test_a_second_approver_must_say_what_the_first_said(visit: Any, conn: Connection) -> None:
    interrupt_id = await put(conn, tool_call(), tier=TWO_OF_THREE)
    alice, bob = await visit(ALICE), await visit(BOB)
    edit = {"step-0": "edit", "args-0": _EDITED}
    await alice.press(await page_of(alice, interrupt_id), "Send", **edit)
    page = await page_of(alice, interrupt_id)
    assert page.has_button("Reject") and not page.has_button("Send") and not page.has_button("Approve")
    refused = await bob.press(await page_of(bob, interrupt_id), "Approve")
    assert refused.status == 403 and "Alice has approved it with another answer" in refused.text
    await bob.press(await page_of(bob, interrupt_id), "Send", **edit)
    assert (await approval_of(conn, interrupt_id)).status == "approved"


async def test_whoever_has_a_void_vote_is_asked_again_by_the_page(visit: Any, conn: Connection) -> None:
    interrupt_id = await put(conn, tool_call(), tier=TWO_OF_THREE)
    alice = await visit(ALICE)
    await alice.press(await page_of(alice, interrupt_id), "Approve")
    assert not (await page_of(alice, interrupt_id)).has_button("Approve")
    await refresh(conn, POLICY, "q1", by="cli:ann")
    page = await page_of(alice, interrupt_id)
    assert "You have approved this" not in page.text
    assert page.has_button("Approve as it is") and page.has_button("Send this answer") and page.has_button("Reject")
    await alice.press(page, "Approve")
    assert (await approval_of(conn, interrupt_id)).status == "approved"


async def test_a_form_of_another_question_decides_nothing(visit: Any, conn: Connection) -> None:
    interrupt_id = await put(conn, tool_call())
    alice = await visit(ALICE)
    page = await page_of(alice, interrupt_id)
    stale = await alice.press(page, "Send", **{"step-0": "approve", "request_hash": "f" * 64})
    assert stale.status == 409
    assert (await alice.press(page, "Send", verdict="edit")).status == 400
    claim = await page_of(alice, await ask(conn))
    assert (await alice.press(claim, "Approve", verdict="change")).status >= 400
    assert await all_rows(conn, "SELECT * FROM decisions") == []


async def test_the_result_of_a_flow_is_shown_once_it_is_done(visit: Any, conn: Connection) -> None:
    interrupt_id = await put(conn, tool_call())
    said = {"actions": [{"type": "respond", "message": "no need"}]}
    await decide(conn, interrupt_id, ALICE, Verdict(verdict="approve", door="web", answer=said))
    thread = await threads.take(conn, "q1")
    assert thread is not None
    assert await threads.leave(conn, thread, status="done", result={"sent": "</pre><b>"})
    page = await page_of(await visit(ALICE), interrupt_id)
    assert "answered: no need" in page.text
    assert 'Result { "sent": "</pre><b>" }' in page.text
    assert "paid" not in page.text.lower()


# Lists


async def test_only_what_can_be_approved_as_it_is_is_approved_by_the_dozen(visit: Any, conn: Connection) -> None:
    plain, edited = await put(conn, tool_call(), "q1"), await put(conn, tool_call("edit"), "q2")
    choice = await put(conn, DINNER, "q3")
    alice = await visit(ALICE)
    inbox = await alice.get("/approvals")
    assert [f"pick-{each}" in inbox.html for each in (plain, edited, choice)] == [True, False, False]
    page = await alice.get(f"/approvals/bulk?item={plain}&item={edited}&item={choice}")
    assert "Approve 1 request?" in page.text and "2 that you chose" in page.text and "in all" not in page.text
    await alice.press(page, "Approve")
    assert await all_rows(conn, "SELECT interrupt_id FROM decisions") == [{"interrupt_id": plain}]


@pytest.mark.parametrize("words", ["refund", "A-17", "three legs", "bob@example", "send_email", "pay later", "1250.00"])
async def test_a_question_is_found_by_its_words(visit: Any, conn: Connection, words: str) -> None:
    await put(conn, {**REFUND, "options": ["pay later"]}, "q1")
    await put(conn, tool_call(), "q2")
    inbox = await (await visit(ALICE)).get(f"/approvals?words={words.replace(' ', '+')}")
    assert len([each for each in inbox.links if each.startswith("/approvals/0")]) == 1
    # The names that we gave to what we keep are no words of it.
    assert "Nothing matches" in (await (await visit(ALICE)).get("/approvals?words=allowed")).text


# Links


async def test_a_link_edits_an_action_and_keeps_what_was_typed(site: Site, visit: Any, conn: Connection) -> None:
    interrupt_id = await put(conn, tool_call(), tier=BY_MAIL)
    path = f"/a/{(await link(conn, interrupt_id)).token}"
    mary = await visit(None)
    page = await mary.get(path)
    assert "bob@example.com" in page.html and page.has_button("Approve as it is")
    sent = page.form("Send").fields | {"verdict": "change"}
    refused = await mary.post(path, sent | {"step-0": "edit", "args-0": "{", "reason": "r"})
    assert refused.status == 422 and refused.form("Send").fields["args-0"] == "{"
    answer = await mary.post(path, sent | {"step-0": "edit", "args-0": _EDITED})
    assert (answer.status, answer.headers["Location"]) == (303, "/a/done")
    assert await decision(conn) == ("approve", {"actions": [{"type": "edit", "args": {"to": "carol@example.com"}}]})
    assert "send_email" in (await mary.get("/a/done")).text
    # Pressed twice it is one; another answer is another use.
    assert (await mary.post(path, sent | {"step-0": "edit", "args-0": _EDITED})).status == 303
    assert (await mary.post(path, sent | {"step-0": "approve"})).status == 410


async def test_a_question_without_an_amount_wants_the_code_wherever_one_may_be_wanted(
    database_url: str, conn: Connection
) -> None:
    interrupt_id = await put(conn, tool_call(), tier=BY_MAIL)
    made = await link(conn, interrupt_id, code=True)
    async with pages_in_process(database_url, step_up_over=Decimal(200)) as site, Visitor(site.url) as mary:
        page = await mary.get(f"/a/{made.token}")
        sent = page.form("Send").fields | {"verdict": "change", "step-0": "edit", "args-0": _EDITED}
        refused = await mary.post(f"/a/{made.token}", sent | {"code": "nonono"})
        assert refused.status == 403 and refused.form("Send").fields["args-0"] == _EDITED
        assert (await mary.post(f"/a/{made.token}", sent | {"code": made.code})).status == 303
    assert wants_code(stored_question("Shall I?"), Decimal(10**9))
    assert wants_code(stored_question(REFUND), Decimal(1000)) and not wants_code(stored_question(REFUND), Decimal(2000))
    assert not wants_code(stored_question("Shall I?"), None)


# Mails


@pytest.mark.parametrize(
    ("value_", "subject"),
    [
        (REFUND, "Approval needed: 1,250.00 EUR: Refund"),
        (tool_call(), "Approval needed: send_email"),
        ({"title": "Look at evil.example"}, "Approval needed"),
        ({**REFUND, "title": "https://evil"}, "Approval needed: 1,250.00 EUR"),
    ],
)
def test_a_mail_says_what_it_is_about_unless_a_link_could_be_made_of_it(value_: Any, subject: str) -> None:
    mail = Mail(
        link_id=1,
        interrupt_id="0" * 32,
        thread_id="q1",
        address=MARY.name,
        token="A" * 43,
        request=stored_question(value_),
        attempt=1,
    )
    message = message_of(mail, sender="claims@example.com", url="https://claims.example.com", step_up_over=None)
    assert message["Subject"] == subject
    assert "evil" not in str(message)


async def test_a_question_is_mailed_to_who_decides_it(conn: Connection) -> None:
    await put(conn, tool_call(), tier=BY_MAIL)
    assert await value(conn, "SELECT person FROM links") == "mail:mary@example.com"
