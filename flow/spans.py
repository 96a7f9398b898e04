"""Spans: what a process did for a thread, when, and for how long. The recorder; `flow.trace` reads.

    with span("POST", kind="client") as call:
        …
        call.note(**{"http.response.status_code": 200})

A span is begun and ended in the process that does the thing, and kept in memory. Whoever ends the work writes all of
them with the statement that ends it (WRITTEN), so they cost no round trip of their own; a process that is killed loses
those that it had not written. Ages are sent, not times: the database's clock gives every span its time, whatever
the clocks of the machines say.

Outside of `recorded_by` a span is recorded nowhere and costs next to nothing. Knows neither LangGraph nor Slack. No
note, no payee, no secret and no text of an exception belongs into a span: a trace may be read by whoever runs the
machines, and sent elsewhere.
"""

from __future__ import annotations

import contextlib
import contextvars
import json
import os
import re
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Literal
from urllib.parse import urlsplit

from flow.database import Connection
from flow.inputs import storable
from flow.text import digest

Kind = Literal["internal", "client"]
Attributes = dict[str, str | int | float | bool]

# Names and texts that flows and strangers choose.
_LONGEST = 200
_LONGEST_VALUE = 20_000
_MOST_MESSAGES = 100
# Nobody to whom traces are sent takes larger ones; what is no number is not smaller.
_LARGEST = 2**63 - 1

# A part of the statement that ends the work, whose other part is called `ended` and gives the thread's id, if it ended:
# `WITH ended AS (UPDATE … RETURNING thread_id), {WRITTEN} SELECT … FROM ended`, with `Recorder.rows()` as `spans`.
WRITTEN = (
    "written AS (INSERT INTO spans (thread_id, span_id, parent_id, name, kind, started_at, ended_at, error, attributes)"
    " SELECT ended.thread_id, id, parent, name, kind, statement_timestamp() - began * interval '1 second',"
    " statement_timestamp() - over * interval '1 second', failed, coalesce(said, '{}')"
    " FROM ended, jsonb_to_recordset(%(spans)s::jsonb) AS new (id text, parent text, name text, kind text,"
    " began float8, over float8, failed text, said jsonb))"
)
NONE = "[]"
# As many are written before the end of the work.
_MANY = 500


@dataclass(frozen=True, kw_only=True)
class Span:
    """One span as it is read. No `parent_id`: the root of its thread is above it. No `ended_at`: it goes on.

    `error` is the type of what was raised.
    """

    span_id: str
    parent_id: str | None = None
    name: str
    kind: Kind = "internal"
    started_at: datetime
    ended_at: datetime | None
    error: str | None = None
    attributes: dict[str, Any] = field(default_factory=dict)


@dataclass(kw_only=True)
class Live:
    """A span that goes on here. `began` and `ended` are of this process's monotonic clock."""

    span_id: str
    parent_id: str | None
    name: str
    kind: Kind
    began: float
    ended: float | None = None
    error: str | None = None
    attributes: Attributes = field(default_factory=dict)

    def note(self, **said: str | float | None) -> None:
        """Keep these attributes; those without a value are left out."""
        self.attributes.update({name: value for name, value in said.items() if value is not None})

    def answered(self, status: int) -> None:
        """What is called over HTTP has answered; from 400 on that is the span's error."""
        self.note(**{"http.response.status_code": status})
        self.failed(str(status) if status >= 400 else None)

    def failed(self, error: BaseException | str | None) -> None:
        """It ended with this, by its type; None changes nothing."""
        if error is not None:
            self.error = type(error).__name__ if isinstance(error, BaseException) else error

    def as_row(self, now: float) -> dict[str, Any]:
        row: dict[str, Any] = {
            "id": self.span_id,
            "parent": self.parent_id,
            "name": _kept(self.name),
            "kind": self.kind,
            "began": now - self.began,
            "over": now - min(now, self.ended or now),
        }
        if self.error:
            row["failed"] = _kept(self.error)
        if self.attributes:
            row["said"] = {name: _storable(value) for name, value in self.attributes.items()}
        return row


class Recorder:
    """The spans of one piece of work for a thread, in this process and on any of its threads, until they are written.

    `top` is the work itself, and the others are within it; `around` says in which of them whatever begins here is, if
    no span of this module says it. One that is not `on` records nothing. `hide` takes secrets out of what models are
    asked and answer; None: that is not recorded at all.
    """

    def __init__(
        self,
        name: str,
        *,
        on: bool = True,
        hide: Callable[[str], str] | None = None,
        kind: Kind = "internal",
        **said: Any,
    ) -> None:
        self.on, self.hide = on, hide
        self.top = self.begin(name, kind=kind, **said)
        self.around: Callable[[], str] = lambda: self.top.span_id
        self._ended: list[Live] = []

    def begin(self, name: str, *, kind: Kind = "internal", parent_id: str | None = None, **said: Any) -> Live:
        live = Live(span_id=os.urandom(8).hex(), parent_id=parent_id, name=name, kind=kind, began=time.monotonic())
        live.note(**said)
        return live

    def end(self, live: Live, *, error: BaseException | str | None = None) -> None:
        live.ended = time.monotonic()
        live.failed(error)
        self._ended.append(live)

    def rows(self, *, error: BaseException | str | None = None, **said: str | float | None) -> str:
        """All that is not written yet, as JSON for WRITTEN; the work ends with that statement."""
        if not self.on:
            return NONE
        self.top.note(**said)
        self.top.failed(error)
        return _rows([*self._ended, self.top])

    @property
    def many(self) -> bool:
        """Whether it is time to `write` some."""
        return self.on and len(self._ended) >= _MANY

    async def write(self, conn: Connection, thread_id: str) -> None:
        """Write what has ended, while the work goes on. Belongs in a transaction."""
        ended, self._ended = self._ended, []
        await conn.execute(
            f"WITH ended AS (SELECT %(thread_id)s::text AS thread_id), {WRITTEN} SELECT",
            {"thread_id": thread_id, "spans": _rows(ended)},
        )


@dataclass(frozen=True, kw_only=True)
class _Current:
    """Who records here, and the innermost span of this module."""

    recorder: Recorder
    live: Live | None = None

    @property
    def span_id(self) -> str:
        return self.live.span_id if self.live else self.recorder.around()


_current: contextvars.ContextVar[_Current | None] = contextvars.ContextVar("span", default=None)


@contextlib.contextmanager
def recorded_by(recorder: Recorder) -> Iterator[None]:
    """Inside, and in every task, thread and pool that begins there, spans are recorded with it."""
    token = _current.set(_Current(recorder=recorder) if recorder.on else None)
    try:
        yield
    finally:
        _current.reset(token)


@contextlib.contextmanager
def span(name: str, *, kind: Kind = "internal", **said: Any) -> Iterator[Live]:
    """What is done inside is one span; what it raises is its error, by its type."""
    current = _current.get()
    if current is None:
        yield Live(span_id="", parent_id=None, name=name, kind=kind, began=0.0)
        return
    live = current.recorder.begin(name, kind=kind, parent_id=current.span_id, **said)
    token = _current.set(_Current(recorder=current.recorder, live=live))
    error: BaseException | None = None
    try:
        yield live
    except BaseException as exc:
        error = exc
        raise
    finally:
        _current.reset(token)
        current.recorder.end(live, error=error)


def here() -> str | None:
    """The id of the span that goes on here; None: nothing is recorded."""
    current = _current.get()
    return current.span_id if current else None


def messages_kept(messages: Iterable[tuple[str, str]]) -> str | None:
    """What a model was asked, or answered, as pairs of role and text; None: it is not kept here.

    Of too many the last ones, and of too long ones the beginnings, so that it stays what this is:
    https://opentelemetry.io/docs/specs/semconv/gen-ai/gen-ai-input-messages.json
    """
    current = _current.get()
    if current is None or (hide := current.recorder.hide) is None:
        return None
    hidden = [(role, hide(text)) for role, text in messages][-_MOST_MESSAGES:]
    longest = _LONGEST_VALUE
    while len(said := _as_messages(hidden, longest)) > _LONGEST_VALUE and longest:
        longest //= 2
    return said


def id_of(*what: Any) -> str:
    """The span id of what another row tells: the same whoever reads it."""
    return digest(what)[:16]


def parse_traceparent(given: Sequence[str]) -> str | None:
    """The caller's trace context, of the headers that came; None, as the standard wants it, if they are not one.

    Of a later version, which may say more, the part that every version begins with.
    """
    found = _TRACEPARENT.match(given[0].strip()) if len(given) == 1 else None
    if found is None or (found["version"] == "00" and len(found.string) > _LENGTH):
        return None
    return found[0][:_LENGTH]


# https://www.w3.org/TR/trace-context/#traceparent-header-field-values
_TRACEPARENT = re.compile(
    r"(?P<version>(?!ff)[0-9a-f]{2})-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}(?:-|\Z)"
)
_LENGTH = 55


def address_of(url: str) -> str:
    """The host alone: a path, a query or a name before the @ may be secret."""
    try:
        return urlsplit(url).hostname or ""
    except ValueError:
        return ""


async def spans_of(
    conn: Connection,
    thread_id: str,
    *,
    without: Collection[str] = (),
    most: int | None = None,
    settled: bool = False,
) -> list[Span]:
    """The recorded spans of the thread, oldest first: those that are not among `without`, and at most so many. One
    whose parent is not there has none; `settled`: and is left out while a drive goes on that may yet write it."""
    rows = await conn.execute(
        "SELECT span_id, (SELECT above.span_id FROM spans above"
        " WHERE (above.thread_id, above.span_id) = (s.thread_id, s.parent_id)) AS parent_id,"
        " name, kind, started_at, ended_at, error, attributes FROM spans s WHERE thread_id = %(thread)s"
        " AND NOT EXISTS (SELECT FROM unnest(%(without)s::text[]) AS known WHERE known = s.span_id)"
        " AND (NOT %(settled)s OR s.parent_id IS NULL OR EXISTS (SELECT FROM spans above"
        " WHERE (above.thread_id, above.span_id) = (s.thread_id, s.parent_id))"
        " OR (SELECT driver_pid IS NULL FROM threads WHERE thread_id = %(thread)s))"
        " ORDER BY started_at, ended_at DESC, span_id LIMIT %(most)s",
        {"thread": thread_id, "without": list(without), "most": most, "settled": settled},
    )
    return [Span(**row) for row in await rows.fetchall()]


def _as_messages(messages: Sequence[tuple[str, str]], longest: int) -> str:
    parts = [{"role": role, "parts": [{"type": "text", "content": text[:longest]}]} for role, text in messages]
    return json.dumps(parts, ensure_ascii=False)


def _rows(lives: Sequence[Live]) -> str:
    now = time.monotonic()
    return json.dumps([live.as_row(now) for live in lives])


def _kept(text: str) -> str:
    return storable(text[:_LONGEST])


def _storable(value: object) -> str | float:
    """As JSON in Postgres can hold it, whatever a model's library says: a span must not keep a drive from its end."""
    if isinstance(value, int | float) and abs(value) <= _LARGEST:
        return value
    return storable(str(value)[:_LONGEST_VALUE])
