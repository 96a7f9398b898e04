"""The run of a thread as its rows tell it: what happened when, and what was said to the outside; and as a tree of
spans, how long each step of it took.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import Any

from flow.approvals import approvals_of
from flow.database import Connection
from flow.errors import UnknownThread
from flow.model import Approval, Payment
from flow.payments import payments_of
from flow.show import Story
from flow.spans import Span, id_of, spans_of


@dataclass(frozen=True, kw_only=True)
class Event:
    """One line of the timeline. `tone` is how it ended, if it ended anything: good, bad, or neither."""

    at: datetime
    what: str
    detail: str = ""
    tone: str = ""


@dataclass(frozen=True, kw_only=True)
class Telling:
    """One notice to the outside, and where its delivery is."""

    kind: str
    status: str
    attempts: int
    error: str | None


@dataclass(frozen=True, kw_only=True)
class Trace:
    """The timeline, oldest first; the drives since the last that succeeded; and what the outside was told."""

    events: tuple[Event, ...]
    attempts: int
    driven_at: datetime | None
    tellings: tuple[Telling, ...]


async def trace_of(conn: Connection, story: Story) -> Trace:
    """The trace of the story's thread."""
    thread_id = story.thread.thread_id
    driven = await (
        await conn.execute("SELECT driven_at, attempts FROM threads WHERE thread_id = %s", (thread_id,))
    ).fetchone()
    assert driven is not None
    notices = await (
        await conn.execute(
            "SELECT kind, status, attempt, error FROM notices WHERE thread_id = %s ORDER BY id", (thread_id,)
        )
    ).fetchall()
    events = [
        Event(at=story.thread.created_at, what="Filed", detail=f"by {story.thread.requested_by}"),
        *await _advice(conn, thread_id),
        *[event for approval in story.approvals for event in _of_approval(approval)],
        *await _outside(conn, thread_id),
        *_of_payment(story),
    ]
    return Trace(
        events=tuple(sorted(events, key=lambda event: event.at)),
        attempts=driven["attempts"],
        driven_at=driven["driven_at"],
        tellings=tuple(
            Telling(kind=row["kind"], status=row["status"], attempts=row["attempt"], error=row["error"])
            for row in notices
        ),
    )


async def _advice(conn: Connection, thread_id: str) -> list[Event]:
    rows = await conn.execute("SELECT asked_at, status, model FROM advice WHERE thread_id = %s", (thread_id,))
    return [
        Event(at=row["asked_at"], what="A model was asked for advice", detail=f"{row['model']}: {row['status']}")
        for row in await rows.fetchall()
    ]


async def _outside(conn: Connection, thread_id: str) -> list[Event]:
    """Posted messages, and links."""
    rows = await conn.execute(
        "SELECT 'message' AS kind, m.channel AS who, m.posted_at AS made, NULL AS mailed, NULL AS revoked"
        " FROM messages m JOIN approvals a USING (interrupt_id) WHERE a.thread_id = %(id)s"
        " UNION ALL SELECT CASE l.made_by WHEN 'policy' THEN 'mail' ELSE 'link' END, substr(l.person, 6),"
        " l.made_at, l.mailed_at, l.revoked_at"
        " FROM links l JOIN approvals a USING (interrupt_id) WHERE a.thread_id = %(id)s",
        {"id": thread_id},
    )
    return [event for row in await rows.fetchall() for event in _of_outside(row)]


def _of_outside(row: dict[str, Any]) -> list[Event]:
    if row["kind"] == "message":
        return [Event(at=row["made"], what="Posted in Slack", detail=f"channel {row['who']}")]
    # A link that only waits to be mailed is not there yet for anybody.
    events = [Event(at=row["made"], what="Link made", detail=f"for {row['who']}")] if row["kind"] == "link" else []
    if row["mailed"]:
        events.append(Event(at=row["mailed"], what="Link mailed", detail=f"to {row['who']}"))
    if row["revoked"] and events:
        events.append(Event(at=row["revoked"], what="Link revoked", detail=f"of {row['who']}"))
    return events


def _of_approval(approval: Approval) -> list[Event]:
    who = f"{approval.required} of {len(approval.approvers)} must approve"
    events = [Event(at=approval.requested_at, what="Approval asked for", detail=who)]
    for decision in approval.decisions:
        good = decision.verdict == "approve"
        events.append(
            Event(
                at=decision.decided_at,
                what=f"{'Approved' if good else 'Rejected'} by {decision.who}{' (void)' if decision.void else ''}",
                detail=f"through {decision.door}" + (f": {decision.reason}" if decision.reason else ""),
                tone="" if decision.void else "good" if good else "bad",
            )
        )
    if approval.escalated_at:
        others = f"{', '.join(approval.escalate_to)} asked, too"
        events.append(Event(at=approval.escalated_at, what="Escalated", detail=others))
    if approval.settled_at and approval.status in ("expired", "withdrawn", "superseded"):
        what = approval.status.capitalize()
        events.append(Event(at=approval.settled_at, what=what, detail=_by_whom(approval), tone="bad"))
    return events


def _by_whom(approval: Approval) -> str:
    """Who ended it, and why, or what they ask for instead; empty if nobody did."""
    if approval.withdrawn_by:
        return f"by {approval.withdrawn_by}: {approval.withdrawn_why}".rstrip(": ")
    if approval.changed_to and approval.changed_by:
        amount = approval.changed_to.get("amount")
        wanted = f"{amount} instead of {approval.request['amount']}" if amount else "the same, by the policy of then"
        return f"by {approval.changer(str)}, who asks for {wanted}: {approval.changed_why}".rstrip(": ")
    return ""


def _of_payment(story: Story) -> list[Event]:
    payment = story.payment
    if payment is None:
        return []
    events = []
    if payment.provider != "ledger":
        times = f"asked {payment.attempts} times" if payment.attempts > 1 else "asked"
        events.append(Event(at=payment.intended_at, what="Payment begun", detail=f"{payment.provider}, {times}"))
    if payment.paid_at:
        events.append(Event(at=payment.paid_at, what="Paid", detail=f"reference {payment.reference}", tone="good"))
    return events


# The tree


@dataclass(frozen=True, kw_only=True)
class Node:
    """One span with what was done within it, oldest first. `waiting`: for how long of it people were waited for."""

    span: Span
    children: tuple[Node, ...] = ()
    waiting: timedelta = timedelta(0)

    def each(self, depth: int = 0) -> Iterator[tuple[int, Node]]:
        """It and all below it in the order of a tree that is read, with their depths."""
        yield depth, self
        for child in self.children:
            yield from child.each(depth + 1)


@dataclass(frozen=True, kw_only=True)
class Tree:
    """The trace of a thread as it was at `as_of`: what has not ended goes on then. `cut`: there may be more."""

    thread_id: str
    trace_id: str
    root: Node
    as_of: datetime
    cut: bool = False

    def lasted(self, span: Span) -> timedelta:
        return (span.ended_at or self.as_of) - span.started_at

    @property
    def tokens(self) -> tuple[int, int]:
        """Those of all questions to models, and of their answers."""
        every = [tokens_of(node.span) for _, node in self.root.each()]
        return sum(asked for asked, _ in every), sum(answered for _, answered in every)

    def as_json(self) -> dict[str, Any]:
        """The object that `--json` prints; times are ISO 8601 in UTC, durations milliseconds."""
        asked, answered = self.tokens
        return {
            "thread": self.thread_id,
            "trace_id": self.trace_id,
            "duration_ms": _ms(self.lasted(self.root.span)),
            "waiting_ms": _ms(self.root.waiting),
            "input_tokens": asked,
            "output_tokens": answered,
            "root": self._node_as_json(self.root),
        }

    def _node_as_json(self, node: Node) -> dict[str, Any]:
        span = node.span
        return {
            "span_id": span.span_id,
            "parent_id": span.parent_id,
            "name": span.name,
            "kind": span.kind,
            "started_at": span.started_at.isoformat(),
            "ended_at": span.ended_at and span.ended_at.isoformat(),
            "duration_ms": _ms(self.lasted(span)),
            "waiting_ms": _ms(node.waiting),
            "error": span.error,
            "attributes": span.attributes,
            "children": [self._node_as_json(child) for child in node.children],
        }


def tokens_of(span: Span) -> tuple[int, int]:
    """What a model was asked with, and what it answered with; zeros for all else."""
    asked, answered = (span.attributes.get(f"gen_ai.usage.{way}_tokens", 0) for way in ("input", "output"))
    return int(asked), int(answered)


async def tree_of(
    conn: Connection,
    thread_id: str,
    *,
    without: Collection[str] = (),
    most: int | None = None,
    settled: bool = False,
) -> Tree:
    """The trace of the thread: what was recorded, and what its other rows tell. Raises UnknownThread.

    Of what was recorded only the `most` that began first and are not among `without`; `settled`: and whose parent is
    known for good.
    """
    row = await (
        await conn.execute(
            "SELECT flow, flow_version, status, created_at, ended_at, trace_of(thread_id, traceparent) AS trace_id,"
            " root_of(thread_id) AS root_id, substr(traceparent, 37, 16) AS caller_id, clock_timestamp() AS now"
            " FROM threads WHERE thread_id = %s",
            (thread_id,),
        )
    ).fetchone()
    if row is None:
        raise UnknownThread(thread_id)
    recorded = await spans_of(conn, thread_id, without=without, most=most, settled=settled)
    spans = [
        Span(span_id=id_of("start", thread_id), name="start", started_at=row["created_at"], ended_at=row["created_at"]),
        *recorded,
        *[span for approval in (await approvals_of(conn, [thread_id]))[thread_id] for span in _waits(approval)],
        *map(_paying, (await payments_of(conn, [thread_id])).values()),
    ]
    root = Span(
        span_id=row["root_id"],
        parent_id=row["caller_id"],
        name=f"thread {row['flow']}",
        started_at=row["created_at"],
        ended_at=row["ended_at"],
        attributes={"thread": thread_id, "flow": f"{row['flow']}@{row['flow_version']}", "status": row["status"]},
    )
    return Tree(
        thread_id=thread_id,
        trace_id=row["trace_id"],
        root=_grown(root, spans, row["now"]),
        as_of=row["now"],
        cut=len(recorded) == most,
    )


def _waits(approval: Approval) -> Iterator[Span]:
    """The wait for people, and each of their decisions in it. What they say as a reason is not in a trace."""
    wait = Span(
        span_id=id_of("approval", approval.interrupt_id),
        name=f"{_WAIT}{approval.tier}",
        started_at=approval.requested_at,
        ended_at=approval.settled_at,
        attributes={"interrupt": approval.interrupt_id, "status": approval.status, "required": approval.required},
    )
    yield wait
    for decision in approval.decisions:
        yield Span(
            span_id=id_of("decision", approval.interrupt_id, decision.person),
            parent_id=wait.span_id,
            name=decision.verdict,
            started_at=decision.decided_at,
            ended_at=decision.decided_at,
            attributes={"person": decision.person, "door": decision.door},
        )


_WAIT = "wait for "


def _paying(payment: Payment) -> Span:
    """From the intent to the outcome. The calls in between are spans of their own, of the drives that made them."""
    ended = payment.paid_at or (payment.intended_at if payment.status == "refused" else None)
    return Span(
        span_id=id_of("payment", payment.thread_id),
        name="payment",
        started_at=payment.intended_at,
        # A row of an earlier release may be paid a microsecond before it was begun.
        ended_at=max(ended, payment.intended_at) if ended else None,
        attributes={"provider": payment.provider, "status": payment.status, "attempts": payment.attempts},
    )


def _grown(root: Span, spans: Sequence[Span], now: datetime) -> Node:
    """The tree of these spans. What is below none of them stands below the root."""
    known = {span.span_id for span in spans}
    below: Mapping[str, list[Span]] = defaultdict(list)
    for span in sorted(spans, key=lambda span: (span.started_at, span.ended_at is None)):
        above = span.parent_id or root.span_id
        below[above if above in known else root.span_id].append(replace(span, parent_id=above))

    def grow(span: Span) -> Node:
        children = tuple(map(grow, below[span.span_id]))
        waits = [each for each in (span, *(child.span for child in children)) if "interrupt" in each.attributes]
        return Node(span=span, children=children, waiting=_together(waits, now))

    return grow(root)


def _together(spans: Iterable[Span], now: datetime) -> timedelta:
    """The time in which at least one of them went on."""
    total, until = timedelta(0), datetime.min.replace(tzinfo=now.tzinfo)
    for span in sorted(spans, key=lambda span: span.started_at):
        ended = span.ended_at or now
        total += max(timedelta(0), ended - max(span.started_at, until))
        until = max(until, ended)
    return total


def _ms(lasted: timedelta) -> float:
    return round(lasted / timedelta(milliseconds=1), 3)
