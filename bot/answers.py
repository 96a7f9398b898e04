"""What a person fills in beyond yes or no, in a form in Slack or on a page, and how it is said afterwards."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from flow import inputs
from flow.errors import BadInput, FlowError
from flow.model import VerdictName
from flow.questions import Action, Question
from flow.text import canonical, visible_json

# How each step is offered.
STEPS = {
    "approve": "Approve as it is",
    "edit": "Edit: use the arguments below",
    "respond": "Answer with the message below, do not run it",
    "reject": "Reject",
}


@dataclass(frozen=True, kw_only=True)
class Typed:
    """What was filled in for one action; empty where nothing was, or where there was no field."""

    step: str
    args: str
    message: str


class Misfilled(FlowError):
    """A form cannot be taken. `errors` say why, by field: `step-N`, `args-N` or `message-N` of the action N."""

    def __init__(self, errors: Mapping[str, str]) -> None:
        self.errors = dict(errors)
        super().__init__(" ".join(self.errors.values()))


def answer_of(question: Question, typed: Sequence[Typed]) -> tuple[VerdictName, dict[str, Any]]:
    """What the form says: to reject is to reject every action. Raises Misfilled.

    Nothing that was typed is dropped in silence: arguments that were changed are for an edit, and for nothing else.
    """
    errors: dict[str, str] = {}
    steps = []
    for number, (action, each) in enumerate(zip(question.actions, typed, strict=True)):
        step, wrong = _step_of(action, each)
        errors |= {f"{name}-{number}": why for name, why in wrong.items()}
        steps.append(step)
    if errors:
        raise Misfilled(errors)
    return ("reject" if all(step["type"] == "reject" for step in steps) else "approve"), {"actions": steps}


def was_filled_in(question: Question, typed: Sequence[Typed]) -> bool:
    """Whether the form says more than the question did."""
    return any(
        each.step or each.message or _is_changed(action, each)
        for action, each in zip(question.actions, typed, strict=True)
    )


def answer_in_words(question: Question, answer: Mapping[str, Any] | None) -> list[str]:
    """A decision's answer, a line for each choice: "chose: pay later", "edited: {…}". A stranger's text."""
    if answer is None:
        return []
    if "option" in answer:
        return [f"chose: {answer['option']}"]
    if len(answer["actions"]) > 1:
        pairs = zip(question.actions, answer["actions"], strict=True)
        return [f"{action.name}: {_step_in_words(step)}" for action, step in pairs]
    # The verdict is said already.
    [step] = answer["actions"]
    if step["type"] == "reject":
        return [f"reason: {step['message']}"] if step.get("message") else []
    return [_step_in_words(step)] if step["type"] != "approve" else []


def sentence(exc: FlowError) -> str:
    """What the error says, for a person."""
    text = str(exc)
    return f"{text[:1].upper()}{text[1:]}."


def _step_of(action: Action, typed: Typed) -> tuple[dict[str, Any], dict[str, str]]:
    """The step, and what is wrong with it by field."""
    step: dict[str, Any] = {"type": typed.step}
    if typed.step not in action.allowed:
        return step, {"step": "Choose what becomes of it."}
    wrong = {}
    if typed.step == "edit":
        try:
            step["args"] = inputs.parse_object(typed.args)
        except BadInput as exc:
            wrong["args"] = f"This is no JSON object: {exc.expected}."
    elif _is_changed(action, typed):
        wrong["args"] = "You changed this: choose to edit, or put it back."
    if typed.message and typed.step in ("respond", "reject"):
        step["message"] = typed.message
    elif typed.message:
        wrong["message"] = "This goes with an answer or a rejection: choose one, or leave it empty."
    elif typed.step == "respond":
        wrong["message"] = "Write the answer."
    return step, wrong


def _is_changed(action: Action, typed: Typed) -> bool:
    if "edit" not in action.allowed or not typed.args.strip():
        return False
    try:
        return canonical(inputs.parse_object(typed.args)) != canonical(action.args)
    except BadInput:
        return True


def _step_in_words(step: Mapping[str, Any]) -> str:
    if step["type"] == "edit":
        return f"edited: {visible_json(step['args'], indent=None)}"
    if step["type"] == "respond":
        return f"answered: {step['message']}"
    if step["type"] == "reject" and step.get("message"):
        return f"rejected: {step['message']}"
    return "rejected" if step["type"] == "reject" else "approved"
