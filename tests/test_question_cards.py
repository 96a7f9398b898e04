"""The question of any flow as a card: what Slack takes, what a person cannot be fooled by, and what was answered."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, reject, settings
from hypothesis import strategies as st

from bot.blocks import card, parse_button, parse_click, reply, told_outcome
from bot.home import Contents, home_view, outcome_line
from bot.lists import Page, approvals_list
from bot.questions import form_of, has_form, typed_in
from bot.views import reject_form
from flow.errors import Unaskable
from flow.model import Approval, Decision, Thread
from flow.questions import question_of, stored_question
from flow.text import visible
from tests.asking import DINNER, REFUND, human_interrupt, tool_call, tool_calls
from tests.block_kit import findings, texts, view_findings
from tests.test_blocks import _AT, APPROVAL, THREAD, YES

_NO = replace(YES, verdict="reject", reason="not this quarter")
_LOUD = replace(YES, person_name="&" * 300, reason="<&>" * 1000)
_PRESSER = {"user": {"id": "U01ALICE", "team_id": "T01TEST"}, "trigger_id": "1.2.a"}

# What a flow, or the model behind it, may write to be taken for the bot, or to break its card.
_HOSTILE = (
    "<!channel>", "<https://evil.example|Approve>", "&" * 700, "<&>" * 1000, "\n✅ Approved by alice", "\u202e0001$",
    "\u200b", "\u00a0", "", " ", "\x00", "👍🏽", "*", "a" * 5000, '"', "\\",
)  # fmt: skip
_TEXT = st.lists(st.sampled_from(_HOSTILE) | st.text(max_size=20), max_size=3).map("".join)
_ARGS = st.dictionaries(_TEXT, _TEXT | st.integers() | st.lists(_TEXT, max_size=2), max_size=3)
_ALLOWED = st.sets(st.sampled_from(["approve", "edit", "reject", "respond"]), min_size=1).map(tuple)
_OPTIONS = st.lists(
    st.text("ab<&>\u202e ", min_size=1, max_size=70), max_size=20, unique_by=lambda o: " ".join(o.split())
)
_REQUESTS = st.builds(
    lambda title, fields, options, amount: {"title": title, "fields": fields, "options": options, **amount},
    _TEXT,
    st.dictionaries(_TEXT, _TEXT, max_size=60),
    _OPTIONS.map(lambda names: [name for name in names if name.strip()]),
    st.sampled_from([{}, {"amount": "99999999999.99", "currency": "USD"}]),
)
_CALLS = st.lists(st.tuples(_TEXT, _ARGS, _ALLOWED), min_size=1, max_size=25).map(lambda calls: tool_calls(*calls))
_ANYTHING = st.one_of(_TEXT, st.lists(_TEXT, max_size=3), st.dictionaries(_TEXT, _TEXT, max_size=3))
_on_any_machine = settings(
    deadline=None, max_examples=60, suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much]
)


def asked(value: Any, **changes: Any) -> Approval:
    return replace(APPROVAL, request=stored_question(value), **changes)


def of_flow(status: str, **changes: Any) -> Thread:
    return replace(THREAD, flow="desk", input={}, status=status, **changes)


def words_of(approval: Approval, thread: Thread | None = None) -> list[str]:
    return [each["text"] for each in texts(card(approval, thread or of_flow("waiting"), None)[1])]


def buttons_of(approval: Approval) -> dict[str, dict[str, Any]]:
    _, blocks = card(approval, of_flow("waiting"), None)
    return {each["action_id"]: each for b in blocks if b["type"] == "actions" for each in b["elements"]}


@st.composite
def _situations(draw: st.DrawFn) -> tuple[Approval, Thread]:
    value = draw(_REQUESTS | _CALLS | _ANYTHING | _ARGS.map(lambda args: human_interrupt(args=args)))
    status = draw(st.sampled_from(["pending", "approved", "rejected", "expired", "withdrawn", "superseded"]))
    decisions = draw(st.lists(st.sampled_from([YES, replace(_NO, person_name="<!here>" * 40), _LOUD]), max_size=3))
    thread = of_flow(
        draw(st.sampled_from(["waiting", "done", "stuck", "failed"])), result=draw(_ANYTHING), reason=draw(_TEXT)
    )
    more = {
        "decisions": tuple(decisions) * draw(st.sampled_from([1, 30])),
        "expires_at": draw(st.none() | st.just(_AT)),
        "rank": draw(st.integers(0, 1)),
        "required": draw(st.sampled_from([1, 99])),
        "escalated_at": draw(st.none() | st.just(_AT)),
        "escalate_to": ("&" * 300,) * 3,
    }
    try:
        return asked(value, status=status, **more), thread
    except Unaskable:
        reject()


@_on_any_machine
@given(_situations())
def test_slack_takes_the_card_of_every_question_and_nothing_on_it_is_markup_or_hidden(
    situation: tuple[Approval, Thread],
) -> None:
    text, blocks = card(*situation, None)
    assert findings(text, blocks) == []
    assert findings(reply(*situation, None), [{"type": "divider"}]) == []
    for shown in (text, *(each["text"] for each in texts(blocks))):
        assert shown == visible(shown)


@_on_any_machine
@given(_situations())
def test_no_card_of_a_flow_without_a_payment_speaks_of_one(situation: tuple[Approval, Thread]) -> None:
    _, blocks = card(*situation, None)
    ours = "\n".join(each["text"] for each in texts(blocks) if each["type"] == "mrkdwn")
    for word in ("Nothing was paid", "Not paid", "💸"):
        assert word not in ours
    assert "paid" not in reply(situation[0], replace(situation[1], result=None, reason=None), None).lower()


@_on_any_machine
@given(_CALLS)
def test_slack_takes_every_form_and_what_comes_back_untouched_is_no_change(value: dict[str, Any]) -> None:
    question = question_of(stored_question(value))
    if not has_form(question):
        return
    view = form_of(question, "{}")
    assert view_findings(view) == []
    filled = {
        each["block_id"]: {each["block_id"]: {"value": each["element"].get("initial_value")}}
        for each in view["blocks"]
        if each["type"] == "input"
    }
    for typed, action in zip(typed_in(filled, question), question.actions, strict=True):
        assert typed.args == "" or visible(typed.args) == typed.args
        assert typed.message == ""
        assert action.allowed


# What it says


def test_a_request_is_its_amount_and_title_its_fields_and_who_asks() -> None:
    text, blocks = card(asked(REFUND), of_flow("waiting"), None)
    assert text == "Approval needed: 1,250.00 EUR: Refund, requested by cli:ann (thread t1)"
    assert [each["text"] for each in texts(blocks)][:11] == [
        "1,250.00 EUR: Refund",
        "*Amount*", "1,250.00 EUR", "*Requested by*", "cli:ann",
        "Order", "A-17", "Customer", "ACME",
        "Why", "The chair came with three legs.\nIt was to have four.",
    ]  # fmt: skip
    assert list(buttons_of(asked(REFUND))) == ["approve", "reject", "details"]


@pytest.mark.parametrize("status", ["pending", "approved"])
def test_however_long_its_title_is_a_request_shows_its_amount_wherever_it_is_approved(status: str) -> None:
    title = "Refund for order 4711: " + "the chair came with three legs & " * 7
    approval = asked({"title": title, "amount": "98000", "currency": "EUR"}, status=status, rank=1)
    thread = of_flow("waiting")
    text, blocks = card(approval, thread, None)
    two = Page(rows=[approval, replace(approval, interrupt_id="ab" * 16)])
    home = home_view(Contents(waiting=2, waits=two, asked=Page(rows=[]), decided=two), public_url=None)
    boxes = [box["text"]["text"] for each in home["blocks"] for box in _boxes(each)]
    assert len(boxes) == 2
    listed, rows = approvals_list(two, "waits", open_ids=frozenset({approval.interrupt_id}), public_url=None)
    shown = {
        "card": blocks[0]["text"]["text"],
        "fact": " ".join(each["text"] for each in blocks[1]["fields"][:2]),
        "notification": text,
        "tick box": boxes[0],
        "home": home["blocks"][2]["text"]["text"],
        "list": rows[1]["text"]["text"],
        "list's notification": listed,
        "rejection": reject_form(approval, "{}")["blocks"][0]["text"]["text"],
        "outcome": told_outcome(approval, thread, None),
        "line": outcome_line(approval, None),
    }
    assert [place for place, said in shown.items() if "98,000.00 EUR" not in said] == []


def _boxes(block: dict[str, Any]) -> list[dict[str, Any]]:
    return [option for each in block.get("elements", []) for option in each.get("options", [])]


def test_an_action_is_its_name_its_arguments_and_what_is_said_of_it() -> None:
    words = words_of(asked(tool_call()))
    assert words[0] == "send_email"
    assert 'send_email\n{\n  "to": "bob@example.com",\n  "text": "Hello <Bob> & all"\n}' in words
    assert "Runs send_email." in words


def test_an_argument_that_hides_characters_shows_them_as_json_does() -> None:
    assert 'send_email\n{\n  "to": "bob\\u202emoc"\n}' in words_of(asked(tool_call(args={"to": "bob\u202emoc"})))


def test_what_has_no_room_is_said_to_stand_on_the_page() -> None:
    many = {"title": "Much", "fields": {f"Field {number}": "x" * 61 for number in range(40)}}
    assert "… see the page" in words_of(asked(many))
    long = words_of(asked({"title": "Long", "fields": {"Text": "y" * 4000}}))
    assert any(each.endswith("y… see the page") for each in long)


def test_a_card_that_slack_would_not_take_in_full_is_cut_and_asks_all_the_same() -> None:
    body = "Dear customer, we are sorry. " * 56
    mails = [(f"send_email_{n}", {"text": body}, ("approve", "reject")) for n in range(9)]
    text, blocks = card(asked(tool_calls(*mails)), of_flow("waiting"), None)
    assert findings(text, blocks) == []
    words = [each["text"] for each in texts(blocks)]
    assert "… see the page" in words and {"Requested by", "cli:ann"} <= {each.strip("*") for each in words}
    assert sum(each.startswith("send_email_") and "\n" in each for each in words) == 3
    assert list(buttons_of(asked(tool_calls(*mails)))) == ["approve", "reject", "change", "details"]


def test_votes_and_reasons_take_nothing_of_the_question_from_its_card() -> None:
    fields = {f"Field {n}": "y" * 1400 for n in range(9)}
    options = [f"pay {n} {'x' * 60}" for n in range(20)]
    for request in ({"title": "t" * 999, "fields": fields}, {"title": "t" * 999, "fields": fields, "options": options}):
        before = asked({**request, "amount": "98000", "currency": "EUR"}, rank=1, required=99, expires_at=_AT)
        after = replace(before, decisions=(_LOUD,) * 60, escalated_at=_AT, escalate_to=("&" * 300,) * 9)
        assert _field_words(before) == _field_words(after) != []
        for approval in (before, after):
            text, blocks = card(approval, of_flow("stuck", reason="&" * 999), None)
            assert findings(text, blocks) == []
            assert blocks[0]["text"]["text"].startswith("98,000.00 EUR")
            assert "cli:ann" in words_of(approval)
            assert len(buttons_of(approval)) == len(request.get("options", ["approve"])) + len(["reject", "details"])
    settled = replace(after, status="approved", settled_at=_AT)
    assert findings(*card(settled, of_flow("done", result="&" * 9999), None)) == []


def _field_words(approval: Approval) -> list[str]:
    return [each for each in words_of(approval) if each.startswith(("Field", "y", "… see the page"))]


@pytest.mark.parametrize(
    ("value", "buttons"),
    [
        (REFUND, ["approve", "reject"]),
        ("anything", ["approve", "reject"]),
        (DINNER, ["approve-0", "approve-1", "reject"]),
        (tool_call(), ["approve", "reject", "change"]),
        (tool_call("approve", "reject"), ["approve", "reject"]),
        (tool_call("approve"), ["approve"]),
        (tool_call("edit", "respond"), ["change"]),
        (tool_calls(("a", {}, ("approve", "reject")), ("b", {}, ("approve",))), ["approve", "change"]),
        (human_interrupt("accept", "ignore"), ["approve", "reject"]),
        (human_interrupt(), ["approve", "reject", "change"]),
        # Too long for an input of Slack's.
        (tool_call("edit", args={"text": "z" * 3000}), []),
        (tool_calls(*((f"t{n}", {}, ("approve", "reject")) for n in range(21))), ["approve", "reject"]),
    ],
)
def test_there_is_a_button_for_whatever_one_press_can_say(value: Any, buttons: list[str]) -> None:
    assert list(buttons_of(asked(value))) == [*buttons, "details"]


def test_a_pressed_option_is_an_approval_that_names_it() -> None:
    shown = buttons_of(asked(DINNER))
    assert [shown[name]["text"]["text"] for name in ("approve-0", "approve-1")] == ["pay now", "pay later"]
    click = parse_click({**_PRESSER, "actions": [shown["approve-1"]]})
    assert click is not None
    assert (click.answer, click.request_hash) == ({"option": "pay later"}, "5e" * 32)
    assert parse_click({**_PRESSER, "actions": [{**shown["approve-1"], "value": shown["reject"]["value"]}]}) is None
    assert parse_click({**_PRESSER, "actions": [{**shown["approve-1"], "action_id": "reject-1"}]}) is None


def test_a_pressed_change_is_no_click_and_names_what_opens_the_form() -> None:
    pressed = {**_PRESSER, "actions": [buttons_of(asked(tool_call()))["change"]]}
    assert parse_click(pressed) is None
    change = parse_button(pressed)
    assert change is not None
    assert (change.interrupt_id, change.request_hash) == (APPROVAL.interrupt_id, APPROVAL.request_hash)


# What became of it


def _answered(**answer: Any) -> tuple[Decision, ...]:
    return (replace(YES, answer=answer),)


@pytest.mark.parametrize(
    ("value", "decisions", "said", "in_a_line"),
    [
        (DINNER, _answered(option="pay later"), "chose: pay later", "chose: pay later"),
        (
            tool_call(),
            _answered(actions=[{"type": "edit", "args": {"to": "carol"}}]),
            'edited: {"to": "carol"}',
            'edited: {"to": "carol"}',
        ),
        (
            tool_call(),
            _answered(actions=[{"type": "respond", "message": "ask\nBob"}]),
            "answered: ask\nBob",
            "answered: ask Bob",
        ),
        (
            tool_calls(("a", {}, ("approve", "reject")), ("b", {}, ("approve", "reject"))),
            _answered(actions=[{"type": "approve"}, {"type": "reject", "message": "too late"}]),
            "a: approved\nb: rejected: too late",
            "a: approved; b: rejected: too late",
        ),
    ],
)
def test_a_settled_card_and_its_reply_say_what_was_chosen(
    value: Any, decisions: tuple[Decision, ...], said: str, in_a_line: str
) -> None:
    settled = asked(value, status="approved", settled_at=_AT, decisions=decisions)
    done = of_flow("done", result={"sent": True})
    assert said in words_of(settled, done)
    assert 'Done: {"sent": true}' in "\n".join(words_of(settled, done))
    assert reply(settled, done, None) == f'✅ Approved by alice, {in_a_line}. Done: {{"sent": true}}'


def test_a_pending_card_says_what_was_chosen_by_votes_that_count() -> None:
    void = replace(YES, answer={"option": "pay later"}, void=True)
    said = words_of(asked(DINNER, required=2, decisions=(void,)))
    assert any("~Approved by alice~ (void)" in each for each in said)
    assert not any("chose:" in each for each in said)
    said = words_of(asked(DINNER, required=2, decisions=(void, *_answered(option="pay now"))))
    assert "chose: pay now" in said and "chose: pay later" not in said


def test_a_rejected_question_says_by_whom_and_what_its_flow_came_to() -> None:
    rejected = asked(REFUND, status="rejected", settled_at=_AT, decisions=(_NO,))
    done = of_flow("done", result={"status": "rejected"})
    text, blocks = card(rejected, done, None)
    words = "\n".join(each["text"] for each in texts(blocks))
    assert text.startswith("❌ Rejected: 1,250.00 EUR: Refund")
    assert "❌ *Rejected by alice*" in words
    assert "alice: not this quarter" in words
    assert reply(rejected, done, None) == '❌ Rejected by alice. Done: {"status": "rejected"}'


@pytest.mark.parametrize(
    ("status", "said"),
    [("expired", "Nobody decided it in time."), ("withdrawn", "It was withdrawn.")],
)
def test_a_question_that_nobody_decided_says_so(status: str, said: str) -> None:
    assert said in words_of(asked(REFUND, status=status), of_flow("running"))


def test_a_stuck_thread_says_why_and_nothing_of_money() -> None:
    stuck = of_flow("stuck", reason="ValueError: <boom>")
    approved = asked(REFUND, status="approved", settled_at=_AT, decisions=(YES,))
    assert "⚠️ The thread is stuck, and somebody must look at it: ValueError: &lt;boom&gt;" in "\n".join(
        words_of(approved, stuck)
    )
