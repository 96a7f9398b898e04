"""What a flow asks a person, in whatever shape it asks: recognised, shown, and answered in the shape it expects.

    request      our own: `ask(Request(…))`, or a plain `interrupt({"title": …})`; answered with our verdict
    inbox        LangChain's Agent Inbox: `HumanInterrupt`; answered with a list of `HumanResponse`
    actions      LangChain's human-in-the-loop middleware: `action_requests` and `review_configs`
    tool         the same, one call at a time: `{"type": "tool_approval", …}`
    json         anything else: shown as JSON, answered with True or False

A question is stored with its approval as one JSON object, and read again by every door. The built-in claim flow's own
(amount, currency, payee) is older than this module and stays as it is: kind `claim`.

Shapes: https://github.com/langchain-ai/agent-inbox and https://docs.langchain.com/oss/python/langchain/human-in-the-loop
"""

from __future__ import annotations

import functools
import html
import json
import math
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import asdict, dataclass, field, is_dataclass
from datetime import date, time, timedelta
from decimal import Decimal
from enum import Enum
from pathlib import PurePath
from typing import Any, Literal
from uuid import UUID

from pydantic import BaseModel

from flow.errors import BadInput, Unaskable
from flow.inputs import DEEPEST, MAX_NOTE, storable
from flow.model import Approval, Thread, VerdictName
from flow.text import canonical, digest, visible

Kind = Literal["claim", "request", "inbox", "actions", "tool", "json"]
Step = Literal["approve", "edit", "reject", "respond"]

# In the order in which they are offered.
STEPS: tuple[Step, ...] = ("approve", "edit", "respond", "reject")

# Of a question as it is stored: more is no question, but a document. Give a person its address.
LARGEST = 100_000
# Each option is a button, and this is the longest label that a button in Slack can have.
MOST_OPTIONS = 20
LONGEST_OPTION = 75


@dataclass(frozen=True, kw_only=True)
class Action:
    """One thing that a flow wants to do, and what a person may make of it: some of STEPS."""

    name: str
    args: dict[str, Any]
    description: str
    allowed: tuple[Step, ...]


@dataclass(frozen=True, kw_only=True)
class Question:
    """What a person is asked. All text is a stranger's.

    `amount` has the decimals of `currency`. `options` are names, one of which an approval chooses. `actions` are for
    the kinds inbox, actions and tool, and each of them gets an answer of its own.
    """

    kind: Kind
    title: str
    fields: tuple[tuple[str, str], ...] = ()
    amount: str | None = None
    currency: str | None = None
    payee: str | None = None
    options: tuple[str, ...] = ()
    actions: tuple[Action, ...] = field(default=())

    @property
    def can_approve(self) -> bool:
        """Whether approving needs no more than saying so."""
        return not self.options and all("approve" in action.allowed for action in self.actions)

    @property
    def can_reject(self) -> bool:
        """Whether rejecting needs no more than saying so."""
        return all("reject" in action.allowed for action in self.actions)

    @property
    def can_change(self) -> bool:
        """Whether there is more to say than yes or no to everything: arguments to edit, an answer, one by one."""
        return len(self.actions) > 1 or any({"edit", "respond"} & set(action.allowed) for action in self.actions)


def stored_question(value: Any, *, response_schema: Any = None) -> dict[str, Any]:
    """An interrupt's value as it is stored: a JSON object whose `kind` says what it was. `tier` names who is asked.

    Raises Unaskable for what nobody could be shown.
    """
    try:
        stored = _recognised(value, response_schema)
        text = json.dumps(stored, ensure_ascii=True, sort_keys=True)
    except (ValueError, TypeError, AttributeError, RecursionError) as exc:
        # It looked like a shape that we know, and is not of it.
        raise Unaskable(f"{type(exc).__name__}: {exc}") from exc
    if len(text) > LARGEST:
        raise Unaskable(f"it has {len(text)} characters as JSON, at most {LARGEST} are kept: pass a reference instead")
    return stored


def question_of(request: Mapping[str, Any]) -> Question:
    """The question that is stored with an approval."""
    if "kind" not in request:
        amount, currency, payee = (request.get(name) for name in ("amount", "currency", "payee"))
        return Question(kind="claim", title="Approval", amount=amount, currency=currency, payee=payee)
    return Question(
        kind=request["kind"],
        title=request["title"],
        fields=tuple((name, text) for name, text in request.get("fields", ())),
        amount=request.get("amount"),
        currency=request.get("currency"),
        options=tuple(request.get("options", ())),
        actions=tuple(
            Action(
                name=action["name"],
                args=action["args"],
                description=action["description"],
                allowed=tuple(action["allowed"]),
            )
            for action in request.get("actions", ())
        ),
    )


def question_hash(thread: Thread, interrupt_id: str, tier: str, stored: Mapping[str, Any]) -> str:
    """The fingerprint of exactly what is asked for: 64 hex digits, as `model.request_hash` is for a claim."""
    of = [thread.thread_id, interrupt_id, tier, thread.flow, thread.flow_version, stored]
    return digest(of)


# Answers


def checked_answer(question: Question, verdict: VerdictName, answer: Any) -> dict[str, Any] | None:
    """What a person says beyond yes or no, as it is stored; None if it is nothing more. Raises BadInput.

    `{"option": NAME}` for a question with options. `{"actions": [{"type": …}, …]}` for one with actions, one for each
    and in their order: `edit` brings `args`, `respond` brings a `message`, and `reject` may.
    """
    if answer is None:
        _check_plain(question, verdict)
        return None
    if not isinstance(answer, dict) or len(answer) != 1:
        raise BadInput("answer", answer, 'it is {"option": …} or {"actions": […]}')
    [(name, given)] = answer.items()
    if name == "option" and question.options and verdict == "approve":
        if given not in question.options:
            raise BadInput("option", given, f"it is one of {', '.join(question.options)}")
        return {"option": given}
    if name == "actions" and question.actions:
        if not isinstance(given, list) or len(given) != len(question.actions):
            raise BadInput("answer", given, f"it has one answer for each of the {len(question.actions)} actions")
        steps = [_checked_step(action, step) for action, step in zip(question.actions, given, strict=True)]
        all_rejected = all(step["type"] == "reject" for step in steps)
        if all_rejected != (verdict == "reject"):
            raise BadInput("answer", given, "to reject is to reject every action, and to approve is anything else")
        return {"actions": steps}
    raise BadInput("answer", answer, f"this {verdict} takes none of that kind")


def _check_plain(question: Question, verdict: VerdictName) -> None:
    if verdict == "approve" and question.options:
        raise BadInput("answer", None, f"choose one of {', '.join(question.options)}")
    if verdict == "approve" and not question.can_approve:
        raise BadInput("answer", None, "it cannot be approved as it is: say what becomes of each action")
    if verdict == "reject" and not question.can_reject:
        raise BadInput("answer", None, "it cannot be rejected as a whole: say what becomes of each action")


def _checked_step(action: Action, step: Any) -> dict[str, Any]:
    kind = step.get("type") if isinstance(step, dict) else None
    if kind not in action.allowed:
        raise BadInput("answer", step, f'for {action.name} its "type" is one of {", ".join(action.allowed)}')
    takes = {"approve": set(), "edit": {"args"}, "respond": {"message"}, "reject": {"message"}}[kind]
    if unknown := set(step) - takes - {"type"}:
        raise BadInput("answer", step, f"{kind} takes no {', '.join(sorted(unknown))}")
    if kind == "edit" and not isinstance(step.get("args"), dict):
        raise BadInput("answer", step, 'edit brings "args", an object')
    message = step.get("message")
    if (kind == "respond" and not message) or not isinstance(message, str | None):
        raise BadInput("answer", step, f'{kind} brings a "message", which is text')
    checked = {"type": kind, **({"args": step["args"]} if kind == "edit" else {})}
    checked |= {"message": message} if message else {}
    _check_storable("answer", checked)
    return checked


def _check_storable(name: str, value: Any) -> None:
    try:
        clean, length = _clean(value), len(json.dumps(value))
    except (ValueError, RecursionError) as exc:
        raise BadInput(name, value, str(exc)) from exc
    if clean != value:
        raise BadInput(name, value, "it contains a character that cannot be stored")
    if length > MAX_NOTE:
        raise BadInput(name, value, f"it is longer than {MAX_NOTE} characters")


def bare(answer: Any) -> Any:
    """An answer as it would be stored: without messages that say nothing."""
    if isinstance(answer, dict):
        return {name: bare(each) for name, each in answer.items() if (name, each) != ("message", "")}
    return [bare(each) for each in answer] if isinstance(answer, list) else answer


def answer_to(stored: Mapping[str, Any], approval: Approval) -> Any:
    """What the flow's `interrupt()` returns, in the shape that belongs to what it asked.

    Fails closed: whatever is not an approval is answered as a rejection, whoever or whatever settled it.
    """
    question = question_of(stored)
    settled = approval.settled_by
    said = (settled.answer if settled else None) or {}
    approved = approval.status == "approved"
    unsettled = f"by {approval.withdrawn_by}" if approval.withdrawn_by else "nobody has decided it"
    changed = {"changed": approval.changed_to} if approval.changed_to else {}
    why = f"{approval.status}: {approval.withdrawn_why or unsettled}"
    reason = settled.reason if settled else "" if approved else why
    if question.kind == "json":
        # A dict would be true whatever it says.
        return approved
    if not question.actions:
        return {
            "approved": approved,
            "status": approval.status,
            "by": [vote.person for vote in approval.votes],
            "reason": reason,
            "option": said.get("option"),
            # What it is an answer to: a node that runs again may ask something else.
            "asked": digest(stored),
        } | changed
    plain: dict[str, Any] = {"type": "approve"} if approved else {"type": "reject", "message": reason}
    steps: Sequence[dict[str, Any]] = said.get("actions") or [plain for _ in question.actions]
    pairs = list(zip(question.actions, steps, strict=True))
    if question.kind == "inbox":
        return [_inbox_response(action, step) for action, step in pairs]
    decisions = [_middleware_decision(action, step) for action, step in pairs]
    return decisions[0] if question.kind == "tool" else {"decisions": decisions}


def _inbox_response(action: Action, step: Mapping[str, Any]) -> dict[str, Any]:
    if step["type"] == "edit":
        return {"type": "edit", "args": {"action": action.name, "args": step["args"]}}
    if step["type"] == "respond":
        return {"type": "response", "args": step["message"]}
    return {"type": "accept" if step["type"] == "approve" else "ignore", "args": None}


def _middleware_decision(action: Action, step: Mapping[str, Any]) -> dict[str, Any]:
    if step["type"] == "edit":
        return {"type": "edit", "edited_action": {"name": action.name, "args": step["args"]}}
    message = {"message": step["message"]} if step.get("message") else {}
    return {"type": step["type"], **message}


# Shapes


def _recognised(value: Any, response_schema: Any) -> dict[str, Any]:
    if isinstance(value, Mapping):
        if isinstance(value.get("title"), str) and set(value) <= _REQUEST:
            return _request(value)
        if isinstance(value.get("action_requests"), list) and isinstance(value.get("review_configs"), list):
            return _middleware(value)
        if value.get("type") == "tool_approval" and isinstance(value.get("name"), str):
            return _tool(value, response_schema)
        if isinstance(value.get("action_request"), Mapping):
            return _inbox([value])
    if isinstance(value, list) and value and all(_is_human_interrupt(each) for each in value):
        return _inbox(value)
    return {"kind": "json", "title": "Approval", "fields": [["Value", _as_text(value)]]}


_REQUEST = {"title", "fields", "amount", "currency", "tier", "options"}


def _is_human_interrupt(value: Any) -> bool:
    return isinstance(value, Mapping) and isinstance(value.get("action_request"), Mapping)


def _request(value: Mapping[str, Any]) -> dict[str, Any]:
    fields = value.get("fields") or {}
    if not isinstance(fields, Mapping):
        raise Unaskable("`fields` is an object")
    amount, currency = value.get("amount"), value.get("currency")
    if amount is not None:
        from flow.inputs import decimals_of, parse_amount

        try:
            amount = str(parse_amount(str(amount), str(currency), decimals_of(str(currency))))
        except BadInput as exc:
            raise Unaskable(str(exc)) from exc
    elif currency is not None:
        raise Unaskable("`currency` without an `amount`")
    return {
        "kind": "request",
        "title": _line(value["title"]) or "Approval",
        "fields": [[_line(name), _as_text(text)] for name, text in fields.items()],
        "amount": amount,
        "currency": currency,
        "options": _options(value.get("options") or ()),
        "tier": _line(value.get("tier") or "approval"),
    }


def _options(given: Any) -> list[str]:
    if not isinstance(given, list | tuple) or not all(isinstance(each, str) for each in given):
        raise Unaskable("`options` is a list of names")
    names = [visible(_line(each)) for each in given]
    if len(names) > MOST_OPTIONS or len(set(names)) < len(names):
        raise Unaskable(f"`options` are at most {MOST_OPTIONS}, and each is another")
    # A button shows so many, and each "&" counts for five there: cut off, two of them could look the same.
    if not all(0 < len(html.escape(name, quote=False)) <= LONGEST_OPTION for name in names):
        raise Unaskable(f"each of the `options` has 1 to {LONGEST_OPTION} characters")
    return names


def _inbox(values: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """https://github.com/langchain-ai/agent-inbox: `action_request`, `config`, `description`."""
    return _of_actions("inbox", [_inbox_action(value) for value in values])


def _inbox_action(value: Mapping[str, Any]) -> dict[str, Any]:
    request, config = value["action_request"], value.get("config") or {}
    names: dict[str, Step] = {
        "allow_accept": "approve", "allow_edit": "edit", "allow_respond": "respond", "allow_ignore": "reject"
    }  # fmt: skip
    allowed = [step for name, step in names.items() if config.get(name) is True]
    return _action(request.get("action"), request.get("args"), value.get("description"), allowed)


def _middleware(value: Mapping[str, Any]) -> dict[str, Any]:
    """`HITLRequest` of langchain.agents.middleware: the configs go by the action's name."""
    configs = {c.get("action_name"): c.get("allowed_decisions") for c in value["review_configs"] if isinstance(c, dict)}
    return _of_actions(
        "actions",
        [
            _action(a.get("name"), a.get("args"), a.get("description"), configs.get(a.get("name")) or ())
            for a in value["action_requests"]
            if isinstance(a, Mapping)
        ],
    )


def _tool(value: Mapping[str, Any], response_schema: Any) -> dict[str, Any]:
    """`ToolApprovalRequest` of the same; what is allowed stands in the interrupt's JSON schema."""
    schema = response_schema if isinstance(response_schema, dict) else {}
    # Several kinds of answer are told apart by their type; a single one names its own.
    several = schema.get("discriminator", {}).get("mapping", {})
    single = schema.get("properties", {}).get("type", {}).get("const")
    allowed = [step for step in STEPS if step in several or step == single] or (STEPS if not schema else ())
    return _of_actions("tool", [_action(value["name"], value.get("args"), value.get("description"), allowed)])


def _of_actions(kind: Kind, actions: list[dict[str, Any]]) -> dict[str, Any]:
    if not actions:
        raise Unaskable("it asks about no action")
    names = ", ".join(dict.fromkeys(action["name"] for action in actions))
    return {"kind": kind, "title": names, "actions": actions}


def _action(name: Any, args: Any, description: Any, allowed: Sequence[Any]) -> dict[str, Any]:
    known = [step for step in STEPS if step in allowed]
    if not known:
        raise Unaskable(f"nobody may decide anything about the action {name!r}")
    return {
        "name": _line(name) or "?",
        "args": _clean(args if isinstance(args, dict) else {"value": args}),
        "description": _description(description, name, args),
        "allowed": known,
    }


def _description(said: Any, name: Any, args: Any) -> str:
    """What is said besides name and arguments, which stand there already; the middleware repeats them by default."""
    text = said if isinstance(said, str) else ""
    return storable(text.removesuffix(f"\n\nTool: {name}\nArgs: {args}"))


def _line(value: Any) -> str:
    return " ".join(storable(str(value)).split())


def _as_text(value: Any) -> str:
    return storable(value if isinstance(value, str) else json.dumps(_clean(value), ensure_ascii=False, indent=1))


def _clean(value: Any, levels: int = DEEPEST) -> Any:
    """JSON that can be stored, the same in each process: unstorable characters are replaced, sets are sorted, and
    amounts, times and the like are written as text.

    Raises ValueError for what is nested too deeply, and TypeError for what has no such form.
    """
    if isinstance(value, str):
        return storable(value)
    if levels < 0:
        raise ValueError(f"it is nested more than {DEEPEST} levels deep")
    if isinstance(value, Mapping):
        names = [storable(str(name)) for name in value]
        if len(set(names)) < len(names):
            raise ValueError("two of its names are written alike")
        return {name: _clean(each, levels - 1) for name, each in zip(names, value.values(), strict=True)}
    if isinstance(value, list | tuple):
        return [_clean(each, levels - 1) for each in value]
    if isinstance(value, AbstractSet):
        return sorted((_clean(each, levels - 1) for each in value), key=canonical)
    plain = _plain(value)
    return plain if plain is value else _clean(plain, levels - 1)


@functools.singledispatch
def _plain(value: Any) -> Any:
    """A value that is no text and no container, as JSON or something plainer. Raises TypeError."""
    if is_dataclass(value) and not isinstance(value, type):
        return asdict(value)
    raise TypeError(f"{type(value).__name__} has no plain form")


@_plain.register
def _(value: bool | int | None) -> Any:
    return value


@_plain.register
def _(value: float) -> Any:
    if not math.isfinite(value):
        return str(value)
    # Postgres gives a whole number back as one.
    return int(value) if value.is_integer() else value


@_plain.register
def _(value: Decimal | date | time | timedelta | UUID | PurePath) -> Any:
    return str(value)


@_plain.register
def _(value: bytes) -> Any:
    return value.hex()


@_plain.register
def _(value: Enum) -> Any:
    return value.value


@_plain.register
def _(value: BaseModel) -> Any:
    return value.model_dump()
