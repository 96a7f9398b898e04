"""What flows ask, in every shape: recognised, its answers checked, and answered in the shape that it expects."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flow.errors import BadInput, Unaskable
from flow.inputs import DEEPEST, storable_value
from flow.model import Decision, VerdictName
from flow.questions import (
    LARGEST,
    answer_to,
    checked_answer,
    question_hash,
    question_of,
    stored_question,
)
from flow.text import digest
from tests.asking import DINNER, MAIL, REFUND, human_interrupt, tool_call, tool_calls
from tests.test_blocks import APPROVAL, THREAD, YES

TOOL = {"type": "tool_approval", "tool_call_id": "c1", "name": "send_email", "args": MAIL, "description": "Sends it."}


def schema(*allowed: str) -> dict[str, Any]:
    """What LangChain says of the answers to one call, if it takes several kinds; a tool's own words stand in it."""
    return {
        "$defs": {"send_email": {"properties": {"then": {"const": "reject"}, "or": {"enum": ["respond"]}}}},
        "discriminator": {"mapping": {each: f"#/$defs/{each}" for each in allowed}, "propertyName": "type"},
    }


def question(value: Any, **more: Any) -> Any:
    return question_of(stored_question(value, **more))


# Recognised


@pytest.mark.parametrize(
    ("value", "kind", "title"),
    [
        (REFUND, "request", "Refund"),
        ({"title": "Only a title"}, "request", "Only a title"),
        ({"title": " \n "}, "request", "Approval"),
        ({"title": "Two\nlines"}, "request", "Two lines"),
        (tool_call(), "actions", "send_email"),
        (tool_calls(("a", {}, ("approve",)), ("b", {}, ("edit",)), ("a", {}, ("approve",))), "actions", "a, b"),
        (TOOL, "tool", "send_email"),
        (human_interrupt(), "inbox", "send_email"),
        ([human_interrupt(name="a"), human_interrupt(name="b")], "inbox", "a, b"),
        # A word more than a request has, or one of another type: whatever it is, it is shown.
        ({"title": "Refund", "color": "red"}, "json", "Approval"),
        ({"title": 1}, "json", "Approval"),
        ({"action_requests": 1, "review_configs": []}, "json", "Approval"),
        ([human_interrupt(), 1], "json", "Approval"),
        ([], "json", "Approval"),
        ("Shall I?", "json", "Approval"),
        (None, "json", "Approval"),
    ],
)
def test_a_question_is_recognised_by_its_shape(value: Any, kind: str, title: str) -> None:
    found = question(value)
    assert (found.kind, found.title) == (kind, title)


def test_a_request_keeps_its_fields_in_order_and_its_amount_exact() -> None:
    found = question({**REFUND, "fields": {"b": 1, "a": {"x": [True]}, "c": "text"}})
    assert found.fields == (("b", "1"), ("a", '{\n "x": [\n  true\n ]\n}'), ("c", "text"))
    assert (found.amount, found.currency, found.payee) == ("1250.00", "EUR", None)


def test_a_claim_is_older_than_kinds() -> None:
    found = question_of({"amount": "250.00", "currency": "USD", "payee": "ACME"})
    assert (found.kind, found.amount, found.payee, found.can_change) == ("claim", "250.00", "ACME", False)


@pytest.mark.parametrize(
    ("value", "allowed", "can"),
    [
        (tool_call("approve", "reject"), ("approve", "reject"), (True, True, False)),
        (tool_call("reject", "edit", "approve"), ("approve", "edit", "reject"), (True, True, True)),
        (tool_call("edit"), ("edit",), (False, False, True)),
        (human_interrupt("accept", "ignore"), ("approve", "reject"), (True, True, False)),
        (human_interrupt("respond"), ("respond",), (False, False, True)),
    ],
)
def test_what_is_allowed_is_what_the_flow_allows(
    value: Any, allowed: tuple[str, ...], can: tuple[bool, bool, bool]
) -> None:
    found = question(value)
    assert found.actions[0].allowed == allowed
    assert (found.can_approve, found.can_reject, found.can_change) == can


@pytest.mark.parametrize(
    ("said", "allowed"),
    [
        (schema("approve", "edit"), ("approve", "edit")),
        ({"properties": {"type": {"const": "reject"}, "message": {}}}, ("reject",)),
        (None, ("approve", "edit", "respond", "reject")),
    ],
)
def test_what_a_single_call_allows_stands_in_its_schema(said: Any, allowed: tuple[str, ...]) -> None:
    assert question(TOOL, response_schema=said).actions[0].allowed == allowed


def test_options_are_chosen_from_and_not_approved_as_they_are() -> None:
    found = question(DINNER)
    assert found.options == ("pay now", "pay later")
    assert (found.can_approve, found.can_reject, found.can_change) == (False, True, False)


@pytest.mark.parametrize(
    ("description", "kept"),
    [
        (f"Please look\n\nTool: send_email\nArgs: {MAIL}", "Please look"),
        ("Tool: another", "Tool: another"),
        (7, ""),
    ],
)
def test_a_description_does_not_repeat_what_stands_there(description: Any, kept: str) -> None:
    asked = tool_call()
    asked["action_requests"][0]["description"] = description
    assert question(asked).actions[0].description == kept


def _deep(levels: int) -> Any:
    return {"a": _deep(levels - 1)} if levels else 1


@pytest.mark.parametrize(
    "value",
    [
        "x" * LARGEST,
        {"title": "Many", "fields": {str(number): "y" * 100 for number in range(1000)}},
        _deep(DEEPEST + 2),
        tool_call(args=_deep(DEEPEST + 2)),
        {"a": 10**5000},
        {**REFUND, "amount": "12.345"},
        {**REFUND, "amount": "-1"},
        {**REFUND, "currency": None},
        {"title": "Refund", "currency": "EUR"},
        {"title": "Fields", "fields": ["a"]},
        {"title": "Options", "options": "ab"},
        {"title": "Options", "options": [1]},
        {"title": "Options", "options": ["a", " a "]},
        {"title": "Options", "options": [""]},
        {"title": "Options", "options": ["x" * 76]},
        {"title": "Options", "options": [str(number) for number in range(21)]},
        {"action_requests": [], "review_configs": []},
        {"action_requests": [{"name": "a", "args": {}}], "review_configs": []},
        tool_call("wave"),
        {"action_request": {"action": "a", "args": {}}, "config": {"allow_accept": "yes"}},
    ],
    ids=lambda value: repr(value)[:40] if not isinstance(value, dict) or 10**5000 not in value.values() else "digits",
)
def test_what_nobody_could_be_shown_or_could_answer_is_refused(value: Any) -> None:
    with pytest.raises(Unaskable):
        stored_question(value)


@settings(deadline=None)
@given(
    st.recursive(
        st.text(st.characters()) | st.floats() | st.none() | st.binary(max_size=3),
        lambda each: (
            st.lists(each, max_size=3) | st.dictionaries(st.text(st.characters()) | st.integers(), each, max_size=3)
        ),
        max_leaves=8,
    )
)
def test_whatever_is_asked_can_be_stored(value: Any) -> None:
    for asked in (
        value,
        {"title": "\ud800", "fields": {"\x00": value}},
        tool_call(name="\x00", args={"\ud83d": value}),
    ):
        try:
            text = json.dumps(stored_question(asked), allow_nan=False, ensure_ascii=False)
        except Unaskable as exc:
            assert "written alike" in exc.why
            continue
        assert storable_value(text)
        assert "\x00" not in json.loads(json.dumps(text))


# Hashed


def test_the_fingerprint_is_the_same_in_every_process_and_of_nothing_else() -> None:
    stored = stored_question(REFUND)
    ours = question_hash(THREAD, "0" * 32, "approval", stored)
    assert ours == "2b636c5d91343cd29520e82a6a1da59253db85cf4001af154ecabf073d939c13"
    # Postgres keeps the names of an object in an order of its own.
    assert question_hash(THREAD, "0" * 32, "approval", dict(reversed(stored.items()))) == ours
    others = [
        question_hash(THREAD, "1" * 32, "approval", stored),
        question_hash(THREAD, "0" * 32, "vp", stored),
        question_hash(replace(THREAD, thread_id="t2"), "0" * 32, "approval", stored),
        question_hash(replace(THREAD, flow_version="2"), "0" * 32, "approval", stored),
        question_hash(THREAD, "0" * 32, "approval", stored | {"amount": "1250.01"}),
        question_hash(THREAD, "0" * 32, "approval", stored | {"fields": list(reversed(stored["fields"]))}),
    ]
    assert len({ours, *others}) == 1 + len(others)


# Answered: what may be said


@pytest.mark.parametrize(
    ("value", "verdict", "answer"),
    [
        (REFUND, "approve", None),
        (REFUND, "reject", None),
        (DINNER, "approve", {"option": "pay later"}),
        (DINNER, "reject", None),
        (tool_call(), "approve", {"actions": [{"type": "edit", "args": {"to": "c"}}]}),
        (tool_call(), "approve", {"actions": [{"type": "respond", "message": "no need"}]}),
        (tool_call(), "reject", {"actions": [{"type": "reject", "message": "why"}]}),
        (tool_calls(("a", {}, ("approve",)), ("b", {}, ("reject",))), "approve",
         {"actions": [{"type": "approve"}, {"type": "reject"}]}),
    ],
)  # fmt: skip
def test_an_answer_is_kept_as_it_was_given(value: Any, verdict: VerdictName, answer: Any) -> None:
    assert checked_answer(question(value), verdict, answer) == answer


_STEP = {"type": "approve"}


@pytest.mark.parametrize(
    ("value", "verdict", "answer"),
    [
        (DINNER, "approve", None),
        (DINNER, "approve", {"option": "pay never"}),
        (DINNER, "approve", {"option": ["pay now"]}),
        (DINNER, "reject", {"option": "pay now"}),
        (DINNER, "approve", {"actions": [_STEP]}),
        (REFUND, "approve", {"option": "pay now"}),
        (REFUND, "approve", {"actions": []}),
        ("Shall I?", "approve", {"text": "yes"}),
        (tool_call("edit"), "approve", None),
        (tool_call("approve"), "reject", None),
        (tool_call(), "approve", {}),
        (tool_call(), "approve", []),
        (tool_call(), "approve", "yes"),
        (tool_call(), "approve", {"actions": [_STEP], "option": "a"}),
        (tool_call(), "approve", {"actions": []}),
        (tool_call(), "approve", {"actions": [_STEP, _STEP]}),
        (tool_call(), "approve", {"actions": {"0": _STEP}}),
        (tool_call(), "approve", {"actions": ["approve"]}),
        (tool_call(), "approve", {"actions": [{"type": ["approve"]}]}),
        (tool_call(), "approve", {"actions": [{**_STEP, "args": {}}]}),
        (tool_call("reject"), "approve", {"actions": [_STEP]}),
        # The verdict is what the rows say: it must not differ from what the flow is told.
        (tool_call(), "approve", {"actions": [{"type": "reject"}]}),
        (tool_call(), "reject", {"actions": [_STEP]}),
        (tool_call(), "reject", {"actions": [{"type": "edit", "args": {}}]}),
        (tool_call(), "approve", {"actions": [{"type": "edit"}]}),
        (tool_call(), "approve", {"actions": [{"type": "edit", "args": [1]}]}),
        (tool_call(), "approve", {"actions": [{"type": "edit", "args": {"a": "\x00"}}]}),
        (tool_call(), "approve", {"actions": [{"type": "edit", "args": {"\ud83d": 1}}]}),
        (tool_call(), "approve", {"actions": [{"type": "edit", "args": {"a": float("nan")}}]}),
        (tool_call(), "approve", {"actions": [{"type": "edit", "args": {"a": "x" * 20_000}}]}),
        (tool_call(), "approve", {"actions": [{"type": "edit", "args": _deep(DEEPEST + 1)}]}),
        (tool_call(), "approve", {"actions": [{"type": "edit", "args": _deep(900)}]}),
        (tool_call(), "approve", {"actions": [{"type": "respond"}]}),
        (tool_call(), "approve", {"actions": [{"type": "respond", "message": ""}]}),
        (tool_call(), "approve", {"actions": [{"type": "respond", "message": 1}]}),
        (tool_call(), "reject", {"actions": [{"type": "reject", "message": "\x1b"}]}),
    ],
)
def test_an_answer_that_does_not_belong_to_the_question_is_refused(
    value: Any, verdict: VerdictName, answer: Any
) -> None:
    with pytest.raises(BadInput):
        checked_answer(question(value), verdict, answer)


# Answered: what the flow is told


def told(value: Any, *decisions: Decision, status: str = "approved") -> Any:
    stored = stored_question(value)
    answer = answer_to(stored, replace(APPROVAL, request=stored, status=status, decisions=decisions))
    if isinstance(answer, dict) and "approved" in answer:
        assert answer.pop("asked") == digest(stored)
    return answer


def said(*steps: dict[str, Any], verdict: VerdictName = "approve") -> Decision:
    return replace(YES, verdict=verdict, answer={"actions": list(steps)})


_NO = replace(YES, verdict="reject", reason="not now")
_EDIT = {"type": "edit", "args": {"to": "c"}}
_EDITED_CALL = {"name": "send_email", "args": {"to": "c"}}


@pytest.mark.parametrize(
    ("value", "decision", "answer"),
    [
        ("Shall I?", YES, True),
        (tool_call(), YES, {"decisions": [{"type": "approve"}]}),
        (tool_call(), said(_EDIT), {"decisions": [{"type": "edit", "edited_action": _EDITED_CALL}]}),
        (tool_call(), said({"type": "respond", "message": "m"}), {"decisions": [{"type": "respond", "message": "m"}]}),
        (TOOL, YES, {"type": "approve"}),
        (TOOL, said(_EDIT), {"type": "edit", "edited_action": _EDITED_CALL}),
        (human_interrupt(), YES, [{"type": "accept", "args": None}]),
        (human_interrupt(), said(_EDIT), [{"type": "edit", "args": {"action": "send_email", "args": {"to": "c"}}}]),
        (human_interrupt(), said({"type": "respond", "message": "m"}), [{"type": "response", "args": "m"}]),
        (
            DINNER,
            replace(YES, answer={"option": "pay later"}),
            {"approved": True, "status": "approved", "by": [YES.person], "reason": "", "option": "pay later"},
        ),
    ],
)
def test_an_approval_is_told_in_the_shape_of_the_question(value: Any, decision: Decision, answer: Any) -> None:
    assert told(value, decision) == answer


@pytest.mark.parametrize(
    ("value", "decision", "answer"),
    [
        ("Shall I?", _NO, False),
        (tool_call(), _NO, {"decisions": [{"type": "reject", "message": "not now"}]}),
        (TOOL, _NO, {"type": "reject", "message": "not now"}),
        (TOOL, said({"type": "reject", "message": "m"}, verdict="reject"), {"type": "reject", "message": "m"}),
        (human_interrupt(), _NO, [{"type": "ignore", "args": None}]),
        (
            REFUND,
            _NO,
            {"approved": False, "status": "rejected", "by": [YES.person], "reason": "not now", "option": None},
        ),
    ],
)
def test_a_rejection_is_told_in_the_shape_of_the_question(value: Any, decision: Decision, answer: Any) -> None:
    assert told(value, decision, status="rejected") == answer


@pytest.mark.parametrize("status", ["expired", "withdrawn", "superseded"])
@pytest.mark.parametrize(
    ("value", "answer"),
    [
        ("Shall I?", False),
        (
            tool_call("approve", "edit"),
            {"decisions": [{"type": "reject", "message": "{status}: nobody has decided it"}]},
        ),
        (TOOL, {"type": "reject", "message": "{status}: nobody has decided it"}),
        (human_interrupt("accept"), [{"type": "ignore", "args": None}]),
        (
            DINNER,
            {
                "approved": False,
                "status": "{status}",
                "by": [YES.person],
                "reason": "{status}: nobody has decided it",
                "option": None,
            },
        ),
    ],
)
def test_whatever_is_no_approval_is_told_as_a_rejection_though_somebody_approved(
    value: Any, answer: Any, status: str
) -> None:
    """One of two had said yes, to an edit even, when the time was over."""
    first = replace(YES, answer={"option": "pay now"} if value is DINNER else None)
    if isinstance(value, dict) and "action_requests" in value:
        first = said(_EDIT)
    assert told(value, first, status=status) == json.loads(json.dumps(answer).replace("{status}", status))
