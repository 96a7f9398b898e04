"""A thread as it is shown: one JSON object for programs, here and in the API; tables and lines for people."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any

from flow.advice import advice_in_words, advice_of
from flow.approvals import approvals_of
from flow.audit import Entry
from flow.database import Connection
from flow.model import CLAIM_FLOW, Advice, Approval, Decision, Payment, Thread
from flow.payments import payments_of
from flow.questions import Question, question_of
from flow.text import visible

if TYPE_CHECKING:
    from rich.console import Console

    from flow.spans import Span
    from flow.trace import Node, Tree


@dataclass(frozen=True, kw_only=True)
class Story:
    """A thread with everything that is known of it."""

    thread: Thread
    approvals: Sequence[Approval]
    advice: Advice | None
    payment: Payment | None

    @property
    def approval(self) -> Approval | None:
        """The approval that waits, else the last one."""
        candidates = self.pending or self.approvals
        return candidates[-1] if candidates else None

    @property
    def pending(self) -> list[Approval]:
        """Those that wait: a flow with branches may ask for several at once."""
        return [approval for approval in self.approvals if approval.status == "pending"]

    def as_json(self) -> dict[str, Any]:
        """The object that `--json` prints; amounts are strings with the currency's decimals, times ISO 8601 in UTC."""
        thread, approval, payment = self.thread, self.approval, self.payment
        return {
            "thread": thread.thread_id,
            "flow": thread.flow,
            "flow_version": thread.flow_version,
            "status": thread.status,
            **{name: self._said(name) for name in ("amount", "currency", "payee", "note")},
            "input": thread.input,
            "changed": thread.changed,
            "requested_by": thread.requested_by,
            "workspace": thread.workspace,
            "created_at": thread.created_at.isoformat(),
            "reason": thread.reason,
            "advice": self.advice and _advice_as_json(self.advice),
            "approval": approval and approval_as_json(approval),
            "payment": payment and payment_as_json(payment),
            "progress": thread.progress and {"done": thread.progress[0], "total": thread.progress[1]},
            "result": thread.result,
        }

    def _said(self, name: str) -> str | None:
        """A field of a claim as it is asked for now, or one of the same name in another flow's input, if it is text."""
        said = self.thread.asks_for.get(name)
        return said if isinstance(said, str) else None

    @property
    def amount(self) -> str:
        return f"{self._said('amount') or ''} {self._said('currency') or ''}".strip()

    @property
    def payee(self) -> str:
        return self._said("payee") or ""

    @property
    def title(self) -> str:
        """What it is about, in a few words: the amount, or whatever else its flow asked."""
        if self.thread.flow == CLAIM_FLOW:
            return self.amount
        about = f": {_in_short(question_of(self.approval.request))}" if self.approval else ""
        return f"{self.thread.flow}{about}"


async def stories_of(conn: Connection, threads: Sequence[Thread]) -> list[Story]:
    """The stories of these threads, in a handful of queries however many there are."""
    ids = [thread.thread_id for thread in threads]
    approvals, advice, payments = (
        await approvals_of(conn, ids),
        await advice_of(conn, ids),
        await payments_of(conn, ids),
    )
    return [
        Story(
            thread=thread,
            approvals=approvals[thread.thread_id],
            advice=advice.get(thread.thread_id),
            payment=payments.get(thread.thread_id),
        )
        for thread in threads
    ]


def in_words(story: Story) -> str:
    """Where the thread is now, and the next command to type, in a few lines."""
    thread, approval, payment = story.thread, story.approval, story.payment
    head = f"{thread.thread_id}: {visible(story.title)}"
    if payment is not None and thread.status == "paid":
        return f"{head} is {payment.status}, reference {payment.reference}{_decided(approval)}"
    if thread.status == "done":
        return f"{head} is done: {visible(json.dumps(thread.result, ensure_ascii=False))}"
    if thread.status == "waiting" and len(story.pending) > 1:
        each = [f"  {one.interrupt_id}  {visible(_in_short(question_of(one.request)))}" for one in story.pending]
        choose = f"  decide     uv run claim_flow.py resume --thread {thread.thread_id} --interrupt ID --approve"
        return "\n".join([f"{head} is waiting for {len(each)} approvals", *each, choose])
    if thread.status == "waiting" and approval is not None:
        which = f" --interrupt {approval.interrupt_id}" if len(story.approvals) > 1 else ""
        return "\n".join(
            [
                f"{head} is waiting for approval",
                f"  interrupt  {approval.interrupt_id}",
                f"  approve    uv run claim_flow.py resume --thread {thread.thread_id} --approve{which}",
                f"  reject     uv run claim_flow.py resume --thread {thread.thread_id} --reject{which}",
            ]
        )
    if thread.status in ("rejected", "expired", "withdrawn"):
        taken_back = f" ({withdrawn_in_words(approval)})" if approval and approval.withdrawn_by else ""
        return f"{head} is {thread.status}, nothing is paid{taken_back or _decided(approval)}"
    why = f": {visible(thread.reason)}" if thread.reason else ""
    later = f"; the next try is at {_when(thread.due_at)}" if thread.put_off else ""
    return f"{head} is {thread.status}{why}{later}"


def print_list(stories: Sequence[Story]) -> None:
    from rich.table import Table
    from rich.text import Text

    table = Table(
        "thread", "flow", "status", "amount", "payee", "requested by", "started", "reference", box=None, pad_edge=False
    )
    table.columns[0].overflow = "fold"
    table.columns[3].justify = "right"
    for story in stories:
        thread = story.thread
        cells = (
            thread.thread_id,
            thread.flow,
            thread.status,
            visible(story.amount),
            visible(story.payee),
            visible(thread.requested_by),
            f"{thread.created_at.astimezone():%Y-%m-%d %H:%M}",
            (story.payment.reference if story.payment else None) or "",
        )
        table.add_row(*map(Text, cells))
    _console().print(table if stories else Text("no threads: uv run claim_flow.py start --thread t1 --amount 250"))


def print_story(story: Story) -> None:
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, show_header=False, pad_edge=False)

    def row(name: str, value: object) -> None:
        if value not in (None, ""):
            table.add_row(Text(name, style="dim"), Text(visible(str(value))))

    thread = story.thread
    row("thread", thread.thread_id)
    row("flow", f"{thread.flow}, version {thread.flow_version}")
    row("status", thread.status)
    row("reason", thread.reason)
    row("progress", "{} of {}".format(*thread.progress) if thread.progress else "")
    row("next try", _when(thread.due_at) if thread.put_off else "")
    row("amount", story.amount)
    row("filed as", thread.input["amount"] if thread.changed else "")
    for name, said in thread.input.items():
        if name not in ("amount", "currency"):
            row(name, said if isinstance(said, str) else json.dumps(said, ensure_ascii=False))
    if story.advice is not None:
        row("model's advice", advice_in_words(story.advice))
    row("requested by", thread.requested_by)
    row("workspace", thread.workspace)
    row("started", _when(thread.created_at))
    for approval in story.approvals:
        row(approval.tier, f"{approval.status}, interrupt {approval.interrupt_id}")
        _add_question(row, question_of(approval.request))
        row("approvers", ", ".join(approval.approvers) or "nobody but the command line")
        row("expires", _when(approval.expires_at))
        row("escalated", _when(approval.escalated_at))
        row("withdrawn", withdrawn_in_words(approval))
        row("changed", changed_in_words(approval))
        for decision in approval.decisions:
            reason = f": {decision.reason}" if decision.reason else ""
            void = ", void" if decision.void else ""
            who = f"{decision.who} ({decision.person}, {decision.door}{void})"
            row(decision.verdict, f"by {who} at {_when(decision.decided_at)}{reason}")
            row("answer", json.dumps(decision.answer, ensure_ascii=False) if decision.answer else "")
    row("result", json.dumps(thread.result, ensure_ascii=False, indent=1) if thread.status == "done" else "")
    if story.payment is not None:
        row("payment", payment_in_words(story.payment))
    _console().print(table)


def print_audit(entries: Sequence[Entry]) -> None:
    from rich.table import Table
    from rich.text import Text

    table = Table("id", "at", "what", "thread", "who", "door", "for", "facts", box=None, pad_edge=False)
    table.columns[-1].overflow = "fold"
    for entry in entries:
        facts = (f"{name} {fact}" for name, fact in entry.data.items() if isinstance(fact, str | int) and fact != "")
        cells = (
            str(entry.id),
            f"{entry.at.astimezone():%Y-%m-%d %H:%M:%S}",
            entry.kind,
            entry.thread_id or "",
            entry.who,
            entry.door,
            entry.for_whom or "",
            ", ".join(facts),
        )
        table.add_row(*(Text(visible(cell)) for cell in cells))
    _console().print(table if entries else Text("nothing is recorded"))


def print_tree(tree: Tree) -> None:
    """The spans of a trace, each with how long it took; and what all of it came to."""
    from rich.table import Table
    from rich.text import Text

    from flow.trace import tokens_of

    table = Table("span", "took", "waited", "tokens", "", box=None, pad_edge=False)
    for number in (1, 2, 3):
        table.columns[number].justify = "right"
    table.columns[0].overflow = table.columns[4].overflow = "fold"
    for guide, node in _guided(tree.root):
        span = node.span
        took = "" if span.ended_at == span.started_at else in_time(tree.lasted(span))
        cells = (
            guide + visible(span.name),
            took if span.ended_at else f"{took} so far",
            in_time(node.waiting) if node.waiting else "",
            " + ".join(f"{count:,}" for count in tokens_of(span)) if any(tokens_of(span)) else "",
            visible("; ".join([*([f"failed: {span.error}"] if span.error else []), *_told_of(span)])),
        )
        style = "red" if span.error else "yellow" if node.waiting and guide else ""
        table.add_row(*(Text(cell, style=style) for cell in cells))
    asked, answered = tree.tokens
    console = _console()
    console.print(table)
    parts = [
        f"{in_time(tree.lasted(tree.root.span))} in all{'' if tree.root.span.ended_at else ' so far'}",
        f"{in_time(tree.root.waiting)} of it waiting for people",
        *([f"{asked:,} + {answered:,} tokens"] if asked or answered else []),
    ]
    console.print(Text(f"trace {tree.trace_id}: {', '.join(parts)}"))


def _guided(node: Node, own: str = "", below: str = "") -> Iterator[tuple[str, Node]]:
    """Each node with the lines that lead to it."""
    yield own, node
    for child in node.children:
        is_last = child is node.children[-1]
        yield from _guided(child, below + ("└─ " if is_last else "├─ "), below + ("   " if is_last else "│  "))


def _told_of(span: Span) -> list[str]:
    """Its attributes; the tokens have a column, and what a model was asked is too long for a line."""
    return [
        f"{name} {value}"
        for name, value in span.attributes.items()
        if not name.startswith(("gen_ai.usage.", "gen_ai.input", "gen_ai.output"))
    ]


def in_time(lasted: timedelta) -> str:
    """How long it took, of a precision that fits: 850 ms, 12.3 s, 4 min 5 s, 3 h 20 min, 2 d 4 h."""
    ms = lasted / timedelta(milliseconds=1)
    if ms < 1000:
        return f"{ms:.1f} ms" if ms < 10 else f"{ms:.0f} ms"
    if ms < 60_000:
        return f"{ms / 1000:.1f} s"
    seconds = round(ms / 1000)
    for large, small, size, unit in (("d", "h", 86_400, 3600), ("h", "min", 3600, 60)):
        if seconds >= size:
            return f"{seconds // size} {large} {seconds % size // unit} {small}"
    return f"{seconds // 60} min {seconds % 60} s"


def _in_short(question: Question) -> str:
    return f"{question.amount} {question.currency}: {question.title}" if question.amount else question.title


def _add_question(row: Callable[[str, object], None], question: Question) -> None:
    """What another flow than the built-in one asks; that one's is the claim above."""
    if question.kind == "claim":
        return
    row("asks", question.title)
    row("amount", f"{question.amount} {question.currency}" if question.amount else "")
    for name, text in question.fields:
        row(name, text)
    for action in question.actions:
        row(action.name, json.dumps(action.args, ensure_ascii=False))
        row("", action.description)
        row("", f"allows {', '.join(action.allowed)}")
    row("options", ", ".join(question.options))


def _advice_as_json(advice: Advice) -> dict[str, Any]:
    return {
        name: value if not isinstance(value, tuple) else list(value)
        for name, value in asdict(advice).items()
        if name != "thread_id"
    }


def _console() -> Console:
    """As wide as the terminal, or wide enough not to break what a pipe or a file gets."""
    from rich.console import Console

    return Console() if sys.stdout.isatty() else Console(width=240)


def approval_as_json(approval: Approval) -> dict[str, Any]:
    """The object under `approval`."""
    return {
        "interrupt_id": approval.interrupt_id,
        "tier": approval.tier,
        "status": approval.status,
        "request_hash": approval.request_hash,
        "approvers": list(approval.approvers),
        "required": approval.required,
        "requested_at": approval.requested_at.isoformat(),
        "expires_at": approval.expires_at and approval.expires_at.isoformat(),
        "settled_at": approval.settled_at and approval.settled_at.isoformat(),
        "withdrawn_by": approval.withdrawn_by,
        "withdrawn_why": approval.withdrawn_why,
        "escalated_at": approval.escalated_at and approval.escalated_at.isoformat(),
        "changed_to": approval.changed_to and {k: v for k, v in approval.changed_to.items() if k == "amount"},
        "changed_by": approval.changed_by,
        "changed_for": approval.changed_for,
        "changed_why": approval.changed_why,
        "decisions": [decision_as_json(decision) for decision in approval.decisions],
    }


def decision_as_json(decision: Decision) -> dict[str, Any]:
    """One of `decisions`."""
    return {
        "person": decision.person,
        "name": decision.person_name,
        "verdict": decision.verdict,
        "door": decision.door,
        "reason": decision.reason,
        "decided_at": decision.decided_at.isoformat(),
        "answer": decision.answer,
        "for_person": decision.for_person,
        "for_name": decision.for_name,
        "void": decision.void,
    }


def payment_as_json(payment: Payment) -> dict[str, Any]:
    """The object under `payment`."""
    return {
        "id": payment.id,
        "reference": payment.reference,
        "status": payment.status,
        "reason": payment.reason,
        "paid_at": payment.paid_at and payment.paid_at.isoformat(),
    }


def payment_in_words(payment: Payment) -> str:
    """What became of it, in a line."""
    if payment.status == "paid":
        return f"paid at {_when(payment.paid_at)}, reference {payment.reference}"
    why = f": {payment.reason}" if payment.reason else ""
    return f"{payment.status}, asked {payment.attempts} times under the key {payment.idempotency_key}{why}"


def withdrawn_in_words(approval: Approval) -> str:
    """By whom, and why; empty if it was not taken back."""
    if approval.withdrawn_by is None:
        return ""
    why = f": {visible(approval.withdrawn_why)}" if approval.withdrawn_why else ""
    return f"withdrawn by {visible(approval.withdrawn_by)} at {_when(approval.settled_at)}{why}"


def changed_in_words(approval: Approval) -> str:
    """What is asked for instead, and who wants it; empty if nothing is."""
    if approval.changed_to is None:
        return ""
    amount = approval.changed_to.get("amount")
    why = f": {visible(approval.changed_why)}" if approval.changed_why else ""
    return f"to {amount or 'the policy of that day'} by {approval.changer(visible)}{why}"


def _decided(approval: Approval | None) -> str:
    by = approval and approval.settled_by
    if not approval or not by:
        return ""
    reason = f": {visible(by.reason)}" if by.reason else ""
    return f" ({approval.status} by {visible(by.who)} at {_when(by.decided_at)}{reason})"


def _when(at: datetime | None) -> str:
    return at.astimezone().strftime("%Y-%m-%d %H:%M:%S %Z") if at else ""
