"""Spans: what a process did for a thread, when, and for how long. The recorder; `flow.trace` reads.

    with span("POST", kind="client") as call:
        …
        call.note(**{"http.response.status_code": 200})

A span is begun and ended in the process that does the thing, and kept in memory. Whoever ends the work writes all of
them with the statement that ends it (`WRITTEN`), so they cost no round trip of their own; a process that is killed
loses those that it had not written. Ages are sent, not times: the database's clock gives every span its time, whatever
the clocks of the machines say.

Outside of `recorded_by` a span is recorded nowhere and costs next to nothing. Knows neither LangGraph nor Slack. No
note, no payee, no secret and no text of an exception belongs into a span: a trace may be read by whoever runs the
machines, and sent elsewhere.
"""

from __future__ import annotations

import contextlib
import contextvars
import json
import math
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Literal

from flow.database import Connection
from flow.inputs import storable
from flow.text import digest

Kind = Literal["internal", "client"]
Attributes = dict[str, str | int | float | bool]

# Names and texts that flows and strangers choose.
_LONGEST = 200
_LONGEST_VALUE = 20_000

# A part of the statement that ends the work (`WITH {WRITTEN} UPDATE …`), with `thread_id` and `Recorder.rows()` as
# `spans` among its parameters. Safe to repeat: a span has one id.
WRITTEN = (
    "written AS (INSERT INTO spans (thread_id, span_id, parent_id, name, kind, started_at, ended_at, error, attributes)"
    " SELECT %(thread_id)s, id, parent, name, kind, statement_timestamp() - began * interval '1 second',"
    " statement_timestamp() - ended * interval '1 second', error, coalesce(said, '{}')"
    " FROM jsonb_to_recordset(%(spans)s::jsonb) AS new (id text, parent text, name text, kind text, began float8,"
    " ended float8, error text, said jsonb) ON CONFLICT DO NOTHING)"
)
NONE = "[]"


@dataclass(frozen=True, kw_only=True)
class Span:
    """One span as it is read. No `parent_id`: the root of its thread is above it. No `ended_at`: it goes on.

    `error` is the type of what was raised.
    """

    span_id: str
    parent_id: str | None
    name: str
    kind: Kind
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

    def as_row(self, now: float) -> dict[str, Any]:
        row: dict[str, Any] = {
            "id": self.span_id,
            "parent": self.parent_id,
            "name": _kept(self.name),
            "kind": self.kind,
            "began": now - self.began,
            "ended": max(0.0, now - (self.ended or now)),
        }
        if self.error:
            row["error"] = _kept(self.error)
        if self.attributes:
            row["said"] = {name: _storable(value) for name, value in self.attributes.items()}
        return row


class Recorder:
    """The spans of one thread in this process, on any of its threads, until they are written.

    `around`: the id of what goes on here, for spans that are within no other.
    """

    def __init__(self, *, around: Callable[[], str | None]) -> None:
        self.around = around
        self._ended: list[Live] = []

    def begin(self, name: str, *, kind: Kind = "internal", parent_id: str | None = None, **said: Any) -> Live:
        live = Live(span_id=new_id(), parent_id=parent_id, name=name, kind=kind, began=time.monotonic())
        live.note(**said)
        return live

    def end(self, live: Live, *, error: BaseException | str | None = None) -> None:
        live.ended = time.monotonic()
        live.error = type(error).__name__ if isinstance(error, BaseException) else error
        self._ended.append(live)

    def rows(self, *going_on: Live) -> str:
        """What is not written yet, as JSON for WRITTEN; and those that end with the statement."""
        now = time.monotonic()
        return json.dumps([live.as_row(now) for live in (*self._ended, *going_on)])

    def forget(self) -> None:
        """They are written."""
        self._ended.clear()


_recorder: contextvars.ContextVar[Recorder | None] = contextvars.ContextVar("recorder", default=None)
_here: contextvars.ContextVar[Live | None] = contextvars.ContextVar("span", default=None)


@contextlib.contextmanager
def recorded_by(recorder: Recorder | None) -> Iterator[None]:
    """Inside, and in every task, thread and pool that begins there, spans are recorded with it."""
    tokens = _recorder.set(recorder), _here.set(None)
    try:
        yield
    finally:
        _recorder.reset(tokens[0])
        _here.reset(tokens[1])


@contextlib.contextmanager
def span(name: str, *, kind: Kind = "internal", **said: Any) -> Iterator[Live]:
    """What is done inside is one span; what it raises is its error, by its type."""
    recorder = _recorder.get()
    if recorder is None:
        yield Live(span_id="", parent_id=None, name=name, kind=kind, began=0.0)
        return
    above = _here.get()
    live = recorder.begin(name, kind=kind, parent_id=above.span_id if above else recorder.around(), **said)
    token = _here.set(live)
    error: BaseException | None = None
    try:
        yield live
    except BaseException as exc:
        error = exc
        raise
    finally:
        _here.reset(token)
        recorder.end(live, error=error)


def note(**said: str | float | None) -> None:
    """Keep these attributes with the span that goes on here, if any does."""
    if (live := _here.get()) is not None:
        live.note(**said)


def new_id() -> str:
    """A span id that no other span has."""
    return os.urandom(8).hex()


def id_of(*what: Any) -> str:
    """The span id of what another row tells: the same whoever reads it."""
    return digest(what)[:16]


async def spans_of(conn: Connection, thread_id: str) -> list[Span]:
    """The recorded spans of the thread, oldest first."""
    rows = await conn.execute(
        "SELECT span_id, parent_id, name, kind, started_at, ended_at, error, attributes FROM spans"
        " WHERE thread_id = %s ORDER BY started_at, ended_at DESC, span_id",
        (thread_id,),
    )
    return [Span(**row) for row in await rows.fetchall()]


def _kept(text: str) -> str:
    return storable(text[:_LONGEST])


def _storable(value: str | float) -> str | float:
    """As JSON in Postgres can hold it."""
    if isinstance(value, str):
        return storable(value[:_LONGEST_VALUE])
    return value if math.isfinite(value) else str(value)
