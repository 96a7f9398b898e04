"""Cards are what Slack takes and what a person cannot be fooled by, whatever a claimant or an approver is called."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from bot.blocks import card, parse_button, parse_click, reply, value_of
from bot.details import details_of
from bot.outcomes import already
from bot.views import amount_form, in_words, reject_form, skeleton
from flow.model import Advice, Approval, Decision, Payment, Person, Thread
from flow.show import Story
from flow.text import visible
from flow.trace import Event, Trace
from tests.block_kit import SETTLED, WAITING, escaped, findings, texts, view_findings

_AT = datetime(2026, 11, 30, 9, 0, tzinfo=UTC)
_INTERRUPT = "0123456789abcdef0123456789abcdef"
_HASH = "5e" * 32

APPROVAL = Approval(
    interrupt_id=_INTERRUPT,
    thread_id="t1",
    tier="approval",
    request={"amount": "250.00", "currency": "USD", "payee": "ACME"},
    request_hash=_HASH,
    requested_by="cli:ann",
    approvers=("U01ALICE",),
    required=1,
    status="pending",
    requested_at=_AT,
    expires_at=None,
    settled_at=None,
)
THREAD = Thread(
    thread_id="t1",
    flow="claims",
    flow_version="1",
    input={"amount": "250.00", "currency": "USD", "payee": "ACME", "note": "three chairs"},
    requested_by="cli:ann",
    status="waiting",
    reason=None,
    wakes=0,
    attempts=0,
    due_at=None,
    created_at=_AT,
    put_off=False,
)
YES = Decision(
    person="slack:T01TEST/U01ALICE", person_name="alice", verdict="approve", door="slack", reason="", decided_at=_AT
)
PAYMENT = Payment(
    id=1,
    thread_id="t1",
    amount=Decimal("250.00"),
    currency="USD",
    payee="ACME",
    provider="ledger",
    idempotency_key=None,
    reference="L-t1",
    status="paid",
    reason=None,
    attempts=0,
    intended_at=_AT,
    paid_at=_AT,
)
ADVICE = Advice(
    thread_id="t1",
    status="given",
    summary="Chairs.",
    risks=(),
    needs_review=False,
    reason=None,
    model="m",
    prompt_tokens=None,
    completion_tokens=None,
    latency_ms=None,
)

# What people wrote into other bots' approvals, to be taken for the bot.
_HOSTILE = (
    "<!channel>", "<@U01ALICE>", "<https://evil.example|Approve here>", "<!date^0^{date}|never>", "&lt;", "&", "<",
    ">", "|", "\n✅ Approved by alice", "\n*Status:* approved", "\u2028💸 250.00 USD paid", "\r", " ",
    "\u202e0001$\u202c", "\u2066", "\u200b", "\u200d", "\ufeff", "\u00ad", "\x00", "\x1b[2K",
    "👍🏽", "👩\u200d👧", "بوب", "`", "*", "_", "~", ":tada:",
    "<&>" * 1000, "&" * 700, "a" * 5000, "\u202e" * 300,
)  # fmt: skip
_TEXT = st.lists(st.sampled_from(_HOSTILE) | st.text(max_size=20), max_size=4).map("".join)
_TIME = st.integers(0, 10**6).map(lambda minutes: _AT + timedelta(minutes=minutes))
_DECISION = st.builds(
    Decision,
    person=st.just("slack:T01TEST/U01ALICE"),
    person_name=_TEXT,
    verdict=st.sampled_from(["approve", "reject"]),
    door=st.sampled_from(["slack", "cli", "webhook"]) | _TEXT,
    reason=_TEXT,
    decided_at=_TIME,
    for_person=st.none() | st.just("slack:T01TEST/U02BOB"),
    for_name=st.none() | _TEXT,
    void=st.booleans(),
)
# Names of members, as they are written; nobody else writes about these.
_MEMBERS = ("U04DANA", "slack:T01TEST/U05ERIN")
_MENTIONED = ("U04DANA", "U05ERIN")
_AMOUNT = st.decimals("0.01", "999999999999999.99", places=2).map(str)
_THREAD_ID = st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._:@-]{0,199}", fullmatch=True)


# How long an example takes says how busy the machine is.
_on_any_machine = settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.too_slow])


@st.composite
def _situations(draw: st.DrawFn) -> tuple[Approval, Thread, Payment | None, Advice | None]:
    """An approval at any point of its life, with hostile text wherever a person or a model can write."""
    thread_id = draw(_THREAD_ID)
    request = {"amount": draw(_AMOUNT), "currency": draw(st.sampled_from(["USD", "JPY"])), "payee": draw(_TEXT)}
    approval = replace(
        APPROVAL,
        thread_id=thread_id,
        request=request,
        requested_by=draw(_TEXT | st.sampled_from(_MEMBERS)),
        required=draw(st.integers(1, 3)),
        rank=draw(st.integers(0, 1)),
        step_up=draw(st.booleans()),
        escalate_to=tuple(draw(st.lists(_TEXT | st.sampled_from(_MEMBERS), max_size=2))),
        escalated_at=draw(st.none() | _TIME),
        changed_to=draw(st.none() | st.just({"amount": "1.00"})),
        changed_by=draw(st.none() | _TEXT | st.sampled_from(_MEMBERS)),
        changed_for=draw(st.none() | _TEXT | st.sampled_from(_MEMBERS)),
        changed_why=draw(_TEXT),
        status=draw(st.sampled_from(["pending", "approved", "rejected", "expired", "withdrawn", "superseded"])),
        expires_at=draw(st.none() | _TIME),
        decisions=tuple(draw(st.lists(_DECISION, max_size=3))) * draw(st.sampled_from([1, 1, 1, 30])),
    )
    thread = replace(
        THREAD,
        thread_id=thread_id,
        input={**request, "note": draw(_TEXT)},
        status=draw(
            st.sampled_from(["running", "waiting", "paid", "rejected", "expired", "stuck", "failed", "unknown"])
        ),
    )
    payment = replace(PAYMENT, reference=draw(_TEXT)) if thread.status == "paid" else None
    risks = tuple(draw(st.lists(_TEXT, max_size=4)))
    return approval, thread, payment, draw(st.none() | st.just(replace(ADVICE, summary=draw(_TEXT), risks=risks)))


@_on_any_machine
@given(_situations())
def test_slack_takes_every_card_and_no_text_of_a_person_is_markup(
    situation: tuple[Approval, Thread, Payment | None, Advice | None],
) -> None:
    for public_url in (None, "https://claims.example.com"):
        assert findings(*card(*situation, public_url=public_url), mentions=_MENTIONED) == []


@_on_any_machine
@given(_situations())
def test_slack_takes_every_reply_and_no_text_of_a_person_is_markup(
    situation: tuple[Approval, Thread, Payment | None, Advice | None],
) -> None:
    approval, thread, payment, _ = situation
    assert findings(reply(approval, thread, payment), [_SOME_BLOCK], mentions=_MENTIONED) == []


@_on_any_machine
@given(_situations())
def test_nothing_on_a_card_is_hidden_or_moved(
    situation: tuple[Approval, Thread, Payment | None, Advice | None],
) -> None:
    text, blocks = card(*situation)
    for shown in (text, *(each["text"] for each in texts(blocks))):
        assert shown == visible(shown)


@_on_any_machine
@given(_situations())
def test_whoever_reads_the_notification_alone_knows_the_request(
    situation: tuple[Approval, Thread, Payment | None, Advice | None],
) -> None:
    approval, *_ = situation
    text, _ = card(*situation)
    assert f": {Decimal(approval.request['amount']):,} {approval.request['currency']}" in text
    assert f", requested by {_said(approval.requested_by)}" in text
    assert f" (thread {approval.thread_id})" in text


@_on_any_machine
@given(_situations())
def test_a_card_can_be_decided_while_it_is_pending_and_never_after(
    situation: tuple[Approval, Thread, Payment | None, Advice | None],
) -> None:
    approval, *_ = situation
    _, blocks = card(*situation)
    shown = [each["action_id"] for block in blocks if block["type"] == "actions" for each in block["elements"]]
    waiting = WAITING[1:] if approval.step_up else WAITING
    assert shown == (waiting if approval.status == "pending" else SETTLED)


@_on_any_machine
@given(_situations())
def test_only_sentences_of_ours_are_formatted(
    situation: tuple[Approval, Thread, Payment | None, Advice | None],
) -> None:
    """A person's text stands in plain text, or within one line of ours: no line in mrkdwn begins with it."""
    approval, *_ = situation
    _, blocks = card(*situation)
    lines = [line for each in texts(blocks) if each["type"] == "mrkdwn" for line in each["text"].splitlines()]
    labels = ("*Amount*", "*Payee*", "*Requested by*", "*Note*", "*Decide by*", "🤖 *Advice of a language model, ")
    ends = (
        "✅ *",
        "❌ *",
        "✅ ~",
        "❌ ~",
        "💸 *",
        "⚠️ ",
        "⏫ *Escalated to* ",
        "Nothing was paid",
        "Superseded: ",
        "… and ",
    )
    counts = tuple(f"*{given} of {approval.required} approvals*" for given in range(3))
    mentions = tuple(f"<@{member}>" for member in _MENTIONED)
    ours = (*labels, *ends, *counts, *mentions, "<!date^", "This much is approved on its web page only")
    assert all(line.startswith(ours) for line in lines)
    assert sum(line.startswith(("✅", "❌")) for line in lines) <= len(approval.decisions)


def test_a_pressed_button_names_what_its_card_showed() -> None:
    _, blocks = card(APPROVAL, THREAD, None)
    [buttons] = [block["elements"] for block in blocks if block["type"] == "actions"]
    for button in buttons:
        pressed = {"user": {"id": "U01ALICE", "team_id": "T01TEST"}, "actions": [button]}
        press = parse_button(pressed)
        assert press is not None
        assert (press.interrupt_id, press.request_hash) == (_INTERRUPT, _HASH)
        # No other button decides anything by itself.
        assert (parse_click(pressed) is not None) == (button["action_id"] == "approve")


def test_a_card_says_who_asks_for_what_in_which_thread() -> None:
    text, blocks = card(APPROVAL, THREAD, None, ADVICE)
    assert text == "Approval needed: 250.00 USD to ACME, requested by cli:ann (thread t1)"
    assert _words(blocks) == [
        "Approval needed: 250.00 USD",
        "*Amount*", "250.00 USD", "*Payee*", "ACME", "*Requested by*", "cli:ann", "*Note*", "three chairs",
        "🤖 *Advice of a language model, to be doubted*", "Chairs. No risks found.",
        "Approve", "Reject", "Change amount…", "Details",
        f"thread t1 · interrupt {_INTERRUPT} · hash 5e5e5e5e5e5e",
    ]  # fmt: skip


def test_a_card_names_the_tier_that_a_policy_names() -> None:
    text, blocks = card(replace(APPROVAL, tier="vp"), THREAD, None)
    assert text.startswith("Approval needed from vp: 250.00 USD to ACME")
    assert _words(blocks)[0] == "Approval needed from vp: 250.00 USD"


def test_a_card_says_which_step_of_how_many_it_is() -> None:
    text, blocks = card(replace(APPROVAL, tier="vp", step=2, steps=3), THREAD, None)
    assert _words(blocks)[0] == "Approval needed from vp, step 2 of 3: 250.00 USD"
    assert text.startswith("Approval needed from vp, step 2 of 3: 250.00 USD")
    assert "step" not in _words(card(replace(APPROVAL, tier="vp"), THREAD, None)[1])[0]


@pytest.mark.parametrize("now", [APPROVAL.request, APPROVAL.request | {"amount": "a lot"}, {"title": "<!here>"}, {}])
def test_a_card_that_was_changed_past_us_says_so_and_has_no_buttons(now: dict[str, Any]) -> None:
    tampered = replace(APPROVAL, request=now, whole=False, required=2)
    text, blocks = card(tampered, THREAD, None, public_url="https://bot.example")
    said = "This request was changed outside of the bot: nobody can decide it."
    assert _words(blocks)[:2] == ["⛔ Changed outside of the bot", said]
    assert text == f"⛔ Changed outside of the bot: thread t1. {said}"
    assert not any(block["type"] == "actions" for block in blocks)
    assert findings(text, blocks) == []
    settled = replace(APPROVAL, whole=False, status="withdrawn")
    assert "changed outside" not in json.dumps(card(settled, THREAD, None)[1])


def test_an_expired_card_says_when_it_was_too_late() -> None:
    expired = replace(APPROVAL, status="expired", expires_at=_AT, settled_at=_AT)
    _, blocks = card(expired, replace(THREAD, status="expired"), None)
    when = "<!date^1796029200^{date_short_pretty} at {time}|2026-11-30 09:00 UTC>"
    assert f"Nothing was paid: expired {when}." in _words(blocks)


def test_a_paid_card_says_who_and_when_and_the_reference() -> None:
    approved = replace(APPROVAL, status="approved", settled_at=_AT, decisions=(YES,))
    text, blocks = card(approved, replace(THREAD, status="paid"), PAYMENT)
    when = "<!date^1796029200^{date_short_pretty} at {time}|2026-11-30 09:00 UTC>"
    assert f"✅ *Approved by alice*, {when}\n💸 *250.00 USD paid*, reference L-t1" in _words(blocks)
    said = "✅ Paid: 250.00 USD to ACME, requested by cli:ann (thread t1). Approved by alice at 2026-11-30 09:00 UTC"
    assert text == said


def test_a_rejected_card_says_why_and_that_nothing_was_paid() -> None:
    no = replace(YES, verdict="reject", reason="not this quarter", door="cli", person_name="ann")
    rejected = replace(APPROVAL, status="rejected", settled_at=_AT, decisions=(no,))
    _, blocks = card(rejected, replace(THREAD, status="rejected"), None)
    words = "\n".join(_words(blocks))
    assert "❌ *Rejected by ann* (cli), " in words
    assert "Nothing was paid: rejected." in words
    assert "ann: not this quarter" in words


# The rules of a tier on its card


def _shown(approval: Approval, thread: Thread = THREAD, **how: Any) -> str:
    return "\n".join(_words(card(approval, thread, None, **how)[1]))


def _button(approval: Approval, action_id: str, **how: Any) -> dict[str, Any]:
    _, blocks = card(approval, THREAD, None, **how)
    buttons = {each["action_id"]: each for b in blocks if b["type"] == "actions" for each in b["elements"]}
    found: dict[str, Any] = buttons[action_id]
    return found


def test_above_the_first_tier_slack_asks_back_before_it_sends_an_approval() -> None:
    assert "confirm" not in _button(APPROVAL, "approve")
    above = replace(APPROVAL, rank=1, request={**APPROVAL.request, "amount": "60000.00"})
    ask = _button(above, "approve")["confirm"]
    assert ask["text"]["text"] == "60,000.00 USD to ACME. An approval is final."
    assert "confirm" not in _button(above, "reject")


def test_what_is_approved_on_its_page_only_has_a_way_there_in_the_place_of_approve() -> None:
    on_page = replace(APPROVAL, step_up=True)
    button = _button(on_page, "page", public_url="https://claims.example.com")
    assert button["url"] == f"https://claims.example.com/approvals/{_INTERRUPT}"
    for public_url in (None, "https://claims.example.com"):
        _, blocks = card(on_page, THREAD, None, public_url=public_url)
        shown = [each["action_id"] for block in blocks if block["type"] == "actions" for each in block["elements"]]
        assert "approve" not in shown
        assert "reject" in shown
        assert ("PUBLIC_URL" in "\n".join(_words(blocks))) == (public_url is None)


def test_a_card_counts_whose_voices_it_has() -> None:
    for_alice = replace(YES, person="slack:T01TEST/U02BOB", person_name="Bob", for_person=YES.person, for_name="Alice")
    shown = _shown(replace(APPROVAL, required=2, decisions=(for_alice,)))
    assert "*1 of 2 approvals*: Bob for Alice" in shown
    assert "✅ *Approved by Bob for Alice*, " in shown
    void = _shown(replace(APPROVAL, required=2, decisions=(replace(for_alice, void=True),)))
    assert "*0 of 2 approvals*\n" in f"{void}\n"
    assert "✅ ~Approved by Bob for Alice~ (void), " in void


def test_an_escalated_card_says_to_whom_and_until_when() -> None:
    shown = _shown(replace(APPROVAL, escalate_to=("U04DANA", "erin@x.io"), escalated_at=_AT, expires_at=_AT))
    assert "⏫ *Escalated to* <@U04DANA>, erin@x.io, decide by <!date^1796029200^" in shown


@pytest.mark.parametrize(
    ("name", "shown", "kind"),
    [
        ("U04DANA", "<@U04DANA>", "mrkdwn"),
        # Of another team than ours, whose members come by their bare ids.
        ("slack:T02OTHER/U04DANA", "slack:T02OTHER/U04DANA", "plain_text"),
        ("U04DANA ", "U04DANA", "plain_text"),
        ("<@U04DANA>", "<@U04DANA>", "plain_text"),
        ("slack:T01TEST/U04DANA>|x", "slack:T01TEST/U04DANA>|x", "plain_text"),
        ("U04DANA\nU05ERIN", "U04DANA U05ERIN", "plain_text"),
        ("UNA", "<@UNA>", "mrkdwn"),
        ("Una", "Una", "plain_text"),
    ],
)
def test_whoever_asked_is_mentioned_if_they_are_named_by_a_member_id_and_nothing_else(
    name: str, shown: str, kind: str
) -> None:
    _, blocks = card(replace(APPROVAL, requested_by=name), THREAD, None)
    [fields] = [block["fields"] for block in blocks if "fields" in block]
    [(_, said)] = [pair for pair in itertools.pairwise(fields) if pair[0]["text"] == "*Requested by*"]
    assert (said["text"], said["type"]) == (shown, kind)


@pytest.mark.parametrize(
    ("status", "thread", "title", "line"),
    [
        ("rejected", "rejected", "❌ Rejected", "Nothing was paid: rejected."),
        ("expired", "expired", "⌛ Expired", "Nothing was paid: expired."),
        ("withdrawn", "withdrawn", "↩️ Withdrawn", "Nothing was paid: withdrawn."),
        ("superseded", "paid", "🔁 Superseded", "Superseded: its flow asks anew, or no longer waits for it."),
        ("approved", "failed", "⚠️ Failed", "⚠️ Failed, nothing was paid"),
    ],
)
def test_each_end_without_a_payment_has_a_word_of_its_own(status: str, thread: str, title: str, line: str) -> None:
    approval, thread_is = replace(APPROVAL, status=status), replace(THREAD, status=thread)
    text, blocks = card(approval, thread_is, None)
    assert text.startswith(f"{title}: 250.00 USD")
    assert line in _words(blocks)
    assert reply(approval, thread_is, None) == line


def test_what_was_superseded_says_what_is_asked_instead_and_never_that_it_was_paid() -> None:
    changed: dict[str, Any] = {
        "changed_to": {"amount": "1200.00"},
        "changed_by": "U02BOB",
        "changed_why": "two <chairs>",
    }
    approval = replace(APPROVAL, status="superseded", requested_by="U04DANA", **changed)
    paid, payment = replace(THREAD, status="paid"), replace(PAYMENT, amount=Decimal("1200.00"))
    said = "Superseded: <@U02BOB> asks for 1,200.00 USD instead of 250.00 USD (two &lt;chairs&gt;)."
    _, blocks = card(approval, paid, payment)
    assert said in _words(blocks)
    assert "paid*" not in json.dumps(blocks)
    # Whoever filed it is told.
    assert reply(approval, paid, payment) == f"<@U04DANA> {said}"
    assert reply(replace(approval, requested_by="cli:ann"), paid, payment) == said


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"required": 3, "decisions": (YES,)}, "Your vote counts already: 1 of 3 approvals."),
        ({"status": "approved", "decisions": (YES,)}, "Already approved by alice."),
        ({"status": "expired", "expires_at": _AT}, "Already expired at 2026-11-30 09:00 UTC."),
        ({"status": "withdrawn", "withdrawn_by": "slack:T01TEST/U04DANA"}, "Already withdrawn by U04DANA."),
        ({"status": "superseded"}, "Already superseded: what is asked for now is on a newer card."),
        (
            {"status": "superseded", "changed_to": {"amount": "200.00"}, "changed_by": "slack:T01TEST/U02BOB"},
            "Already superseded: U02BOB asks for 200.00 USD instead of 250.00 USD.",
        ),
        (
            {
                "status": "superseded",
                "changed_to": {"amount": "200.00"},
                "changed_by": "slack:T01TEST/U02BOB",
                "changed_for": "slack:T01TEST/U01ALICE",
            },
            "Already superseded: U02BOB for U01ALICE asks for 200.00 USD instead of 250.00 USD.",
        ),
    ],
)
def test_whoever_comes_late_is_told_by_the_same_words(changes: dict[str, Any], said: str) -> None:
    assert already(replace(APPROVAL, **changes)) == said


# Modals


@_on_any_machine
@given(_situations())
def test_slack_takes_every_modal_and_no_text_of_a_person_is_markup_or_hidden(
    situation: tuple[Approval, Thread, Payment | None, Advice | None],
) -> None:
    approval, thread, payment, advice = situation
    story = Story(thread=thread, approvals=[approval], advice=advice, payment=payment)
    events = [
        Event(at=decision.decided_at, what=f"Approved by {decision.who}", detail=decision.reason)
        for decision in approval.decisions
    ]
    trace = Trace(events=tuple(events), attempts=0, driven_at=None, tellings=())
    requester = Person(key="x", name="x", names=frozenset({approval.requested_by}))
    value = value_of(approval, channel="C" * 100, ts="1" * 100)
    for view in (
        *(
            details_of(approval, story, trace, requester, public_url=url)
            for url in (None, "https://claims.example.com")
        ),
        reject_form(approval, value),
        amount_form(approval, value),
        in_words("Reject", approval.requested_by),
        skeleton("Reject"),
    ):
        assert view_findings(view, mentions=(*_MENTIONED, *APPROVAL.approvers)) == []
        for each in texts(view["blocks"]):
            assert each["text"] == visible(each["text"])


def test_what_has_no_room_in_details_is_said_to_stand_on_the_page() -> None:
    long = replace(THREAD, input={**THREAD.input, "note": "&" * 200_000})
    story = Story(thread=long, approvals=[APPROVAL], advice=None, payment=None)
    trace = Trace(events=(), attempts=0, driven_at=None, tellings=())
    person = Person(key="x", name="x", names=frozenset())
    for public_url, where in (
        ("https://claims.example.com", f"https://claims.example.com/approvals/{_INTERRUPT}"),
        (None, "claim_flow.py show --thread t1"),
    ):
        view = details_of(APPROVAL, story, trace, person, public_url=public_url)
        assert view_findings(view, mentions=APPROVAL.approvers) == []
        assert where in "\n".join(_words(view["blocks"]))


@pytest.mark.parametrize(
    ("character", "shown"),
    [
        ("\u202e", "\\u{202e}"),  # right-to-left override
        ("\u2066", "\\u{2066}"),  # left-to-right isolate
        ("\u061c", "\\u{61c}"),  # Arabic letter mark
        ("\u200b", "\\u{200b}"),  # zero-width space
        ("\u200d", "\\u{200d}"),  # zero-width joiner
        ("\ufeff", "\\u{feff}"),  # byte order mark
        ("\u00ad", "\\u{ad}"),  # soft hyphen
        ("\x1b", "\\u{1b}"),  # escape
        ("\U000e0041", "\\u{e0041}"),  # a tag
    ],
)
def test_a_hostile_character_is_shown_as_its_escape_wherever_a_person_can_write_it(character: str, shown: str) -> None:
    name = f"a{character}b"
    said = replace(YES, person_name=name, reason=name)
    approval = replace(APPROVAL, request={**APPROVAL.request, "payee": name}, requested_by=name, decisions=(said,))
    text, blocks = card(approval, replace(THREAD, input={"note": name}), replace(PAYMENT, reference=name))
    everything = "\n".join([text, *_words(blocks)])
    assert character not in everything
    # Payee, requester, note, approver, the approver's reason, reference; in the text: payee, requester, approver.
    assert everything.count(f"a{shown}b") == 10


@pytest.mark.parametrize("text", ["<!channel>", "<@U01ALICE>", "<https://evil.example|Approve here>", "<#C01GEN>"])
def test_a_mention_or_link_of_a_persons_making_is_only_text(text: str) -> None:
    said = replace(YES, person_name=text, door=text)
    approval = replace(APPROVAL, request={**APPROVAL.request, "payee": text}, requested_by=text, decisions=(said,))
    fallback, blocks = card(approval, THREAD, replace(PAYMENT, reference=text))
    assert text not in fallback
    assert [each["text"] for each in texts(blocks) if each["type"] == "mrkdwn" and text in each["text"]] == []
    assert text not in reply(approval, THREAD, replace(PAYMENT, reference=text))


def test_a_name_of_several_lines_cannot_add_a_line_to_a_card() -> None:
    name = "ACME\n✅ Approved by alice\u2028💸 paid\rx"
    said = replace(YES, person_name=name, reason=name)
    approval = replace(APPROVAL, request={**APPROVAL.request, "payee": name}, requested_by=name, decisions=(said,))
    text, blocks = card(approval, THREAD, None)
    assert all(len(each.splitlines()) == 1 for each in (text, *_words(blocks)))


def test_a_card_with_more_decisions_than_it_has_room_for_says_how_many_more_there_are() -> None:
    crowd = tuple(replace(YES, person_name="&" * 120, reason="yes") for _ in range(60))
    text, blocks = card(replace(APPROVAL, required=61, decisions=crowd), THREAD, None)
    assert findings(text, blocks) == []
    assert "… and 57 more" in "\n".join(_words(blocks))


# The validator itself

_SOME_BLOCK: dict[str, Any] = {"type": "section", "text": {"type": "mrkdwn", "text": "x"}}


def _actions(**changed: Any) -> dict[str, Any]:
    text = {"type": "plain_text", "text": "A"}
    return {
        "type": "actions",
        "elements": [{"type": "button", "action_id": "a", "value": "v", "text": text, **changed}],
    }


@pytest.mark.parametrize(
    "wrong",
    [
        {"type": "no_such_block"},
        {"type": "section"},
        {"type": "section", "text": {"type": "plain_text", "text": ""}},
        {"type": "section", "text": {"type": "plain_text", "text": " "}},
        {"type": "section", "text": {"type": "plain_text", "text": "&" * 601}},
        {"type": "section", "text": {"type": "mrkdwn", "text": "x" * 3001}},
        {"type": "section", "text": {"type": "mrkdwn", "text": "x", "emoji": True}},
        {"type": "section", "text": {"type": "plain_text", "text": "x", "verbatim": True}},
        {"type": "section", "text": {"type": "mrkdwn", "text": "<@U01ALICE>"}},
        {"type": "section", "text": {"type": "mrkdwn", "text": "a & b"}},
        {"type": "section", "text": {"type": "mrkdwn", "text": "<!date^1^{date}|<x>"}},
        {"type": "section", "fields": [_SOME_BLOCK["text"]] * 11},
        {"type": "section", "fields": []},
        {"type": "section", "fields": [{"type": "mrkdwn", "text": "x" * 2001}]},
        {"type": "header", "text": {"type": "mrkdwn", "text": "x"}},
        {"type": "header", "text": {"type": "plain_text", "text": "x" * 151}},
        {"type": "context", "elements": []},
        {"type": "context", "elements": [_SOME_BLOCK["text"]], "text": "x"},
        _actions(type="image"),
        _actions(value="x" * 2001),
        _actions(action_id="x" * 256),
        _actions(text={"type": "mrkdwn", "text": "A"}),
        _actions(text={"type": "plain_text", "text": "x" * 76}),
        _actions(style="default"),
        {**_actions(), "block_id": "x" * 256},
    ],
    ids=lambda wrong: json.dumps(wrong)[:60],
)
def test_the_validator_finds_what_slack_would_refuse(wrong: dict[str, Any]) -> None:
    assert findings("x", [wrong]) != []


def test_the_validator_finds_what_is_there_too_often() -> None:
    same = {**_actions(), "block_id": "b"}
    assert findings("x", [same]) == []
    found = findings("x", [same, same])
    assert found == ["block_id 'b' is there twice", "action_id 'a' is there twice"]
    assert findings("x", [_SOME_BLOCK] * 50) == []
    assert findings("x", [_SOME_BLOCK] * 51) == ["blocks: 51 of them, at most 50 may be"]
    assert findings("x" * 4001, [_SOME_BLOCK]) != []


def _words(blocks: list[dict[str, Any]]) -> list[str]:
    return [each["text"] for each in texts(blocks)]


def _said(name: str) -> str:
    """How a card's sentences begin to say a name: its first characters, as they are shown."""
    return escaped(" ".join(visible(name).split())[:10])


@pytest.mark.parametrize(
    ("status", "said"),
    [
        ("refused", "Failed, nothing was paid: the card &lt;expired&gt;"),
        ("unknown", "It is not known whether this was paid"),
        ("intended", ""),
    ],
)
def test_only_a_payment_that_was_made_is_called_paid(status: str, said: str) -> None:
    payment = replace(PAYMENT, reference=None, paid_at=None, status=status, reason="the card <expired>")
    thread = replace(THREAD, status={"refused": "failed", "unknown": "unknown", "intended": "running"}[status])
    approval = replace(APPROVAL, status="approved", settled_at=_AT, decisions=(YES,))
    text, shown = card(approval, thread, payment)
    assert said in json.dumps(shown, ensure_ascii=False)
    assert " paid*" not in json.dumps(shown)
    assert "Paid" not in text
    assert "paid, reference" not in reply(approval, thread, payment)
