"""The trace of a thread as a waterfall: where each span's bar stands. Pure functions; the page draws them.

A claim takes milliseconds of work and days of waiting. Drawn to one scale the work would be dots, so times in which
nothing is worked on are drawn short, as their logarithm, and the page says so.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

from flow.show import in_time
from flow.trace import Node, Tree, tokens_of

# More than anybody reads, and so few that no click waits until the page is made.
MOST_BARS = 1000

# Deeper ones are not drawn further to the right: a phone is narrow.
_DEEPEST = 5
# Of the whole width, in percent.
_NARROWEST = 1.0
# What waiting takes of the width, if it is drawn short.
_IDLE_SHARE = 0.4


@dataclass(frozen=True, kw_only=True)
class Bar:
    """One line of the waterfall. `left` and `width` are percent; `tone` is its colour: work, call, wait or bad."""

    name: str
    depth: int
    tone: str
    left: float
    width: float
    started_at: datetime
    took: str
    going_on: bool
    about: str


@dataclass(frozen=True, kw_only=True)
class Waterfall:
    """The lines, oldest first; and the whole in words. `shortened`: waiting is not drawn to scale. `cut`: there may be
    more lines, and tokens."""

    bars: tuple[Bar, ...]
    took: str
    going_on: bool
    waited: str
    tokens: str
    shortened: bool
    cut: bool
    trace_id: str


def waterfall_of(tree: Tree) -> Waterfall:
    nodes = list(tree.root.each())
    axis = _Axis.of(tree, [node for _, node in nodes])
    asked, answered = tree.tokens
    return Waterfall(
        bars=tuple(_bar(tree, axis, depth, node) for depth, node in nodes),
        took=in_time(tree.lasted(tree.root.span)),
        going_on=tree.root.span.ended_at is None,
        waited=in_time(tree.root.waiting) if tree.root.waiting else "",
        tokens=f"{asked:,} + {answered:,}" if asked or answered else "",
        shortened=axis.shortened,
        cut=tree.cut,
        trace_id=tree.trace_id,
    )


def _bar(tree: Tree, axis: _Axis, depth: int, node: Node) -> Bar:
    span = node.span
    left, right = axis.at(span.started_at), axis.at(span.ended_at or tree.as_of)
    width = max(_NARROWEST, right - left)
    return Bar(
        name=span.name,
        depth=min(depth, _DEEPEST),
        tone="bad" if span.error else "wait" if node.waiting and depth else "call" if span.kind == "client" else "work",
        left=round(min(left, 100 - width), 2),
        width=round(width, 2),
        started_at=span.started_at,
        took="" if span.ended_at == span.started_at else in_time(tree.lasted(span)),
        going_on=span.ended_at is None,
        about="; ".join(_about(node)),
    )


def _about(node: Node) -> Iterable[str]:
    """In a few words what is beside its times."""
    span = node.span
    if span.error:
        yield f"failed: {span.error}"
    if any(tokens_of(span)):
        yield "{:,} + {:,} tokens".format(*tokens_of(span))
    if span.attributes.get("paused"):
        yield "asks"
    for name, words in _WORTH_SAYING.items():
        if span.attributes.get(name, 1) != 1:
            yield words.format(span.attributes[name])


# A first attempt is not.
_WORTH_SAYING = {
    "attempt": "attempt {}",
    "outcome": "{}",
    "status": "{}",
    "door": "through {}",
    "http.response.status_code": "answered {}",
    "slack.error": "{}",
}


@dataclass(frozen=True, kw_only=True)
class _Axis:
    """From times to percent of the width: the ends of its pieces, within which it is straight."""

    times: tuple[float, ...]
    places: tuple[float, ...]
    shortened: bool

    @classmethod
    def of(cls, tree: Tree, nodes: Sequence[Node]) -> _Axis:
        first = tree.root.span.started_at
        spans = [(node.span.started_at, node.span.ended_at) for node in nodes]
        last = max([ended or tree.as_of for _, ended in spans], default=first)
        # The root, waits and whatever else goes on are no work.
        busy = _merged(
            (node.span.started_at, node.span.ended_at) for node in nodes[1:] if node.span.ended_at and not node.waiting
        )
        pieces: list[tuple[datetime, bool]] = []
        at = first
        for began, ended in busy:
            if began > at:
                pieces.append((began, False))
            pieces.append((max(ended, at), True))
            at = max(ended, at)
        if last > at:
            pieces.append((last, False))
        return cls._drawn(first, pieces)

    @classmethod
    def _drawn(cls, first: datetime, pieces: Sequence[tuple[datetime, bool]]) -> _Axis:
        begins = [first, *(end for end, _ in pieces)]
        lasted = [max(0.0, (end - began).total_seconds()) for began, (end, _) in zip(begins, pieces, strict=False)]
        work = sum(each for each, (_, busy) in zip(lasted, pieces, strict=True) if busy)
        shortened = 0 < work < sum(lasted) * (1 - _IDLE_SHARE)
        weights = lasted
        if shortened:
            logs = [0.0 if busy else math.log1p(each) for each, (_, busy) in zip(lasted, pieces, strict=True)]
            idle = sum(logs) or 1.0
            weights = [
                (1 - _IDLE_SHARE) * each / work if busy else _IDLE_SHARE * log / idle
                for each, log, (_, busy) in zip(lasted, logs, pieces, strict=True)
            ]
        whole, place, places = sum(weights) or 1.0, 0.0, [0.0]
        for weight in weights:
            place += 100 * weight / whole
            places.append(place)
        return cls(times=tuple(each.timestamp() for each in begins), places=tuple(places), shortened=shortened)

    def at(self, time: datetime) -> float:
        sought = time.timestamp()
        number = bisect.bisect_left(self.times, sought, lo=1)
        if number == len(self.times):
            return self.places[-1]
        began, ended = self.times[number - 1], self.times[number]
        part = (sought - began) / (ended - began) if ended > began else 1.0
        return self.places[number - 1] + max(0.0, part) * (self.places[number] - self.places[number - 1])


def _merged(spans: Iterable[tuple[datetime, datetime | None]]) -> list[tuple[datetime, datetime]]:
    """Times in which at least one of them went on."""
    merged: list[tuple[datetime, datetime]] = []
    for began, ended in sorted((began, ended) for began, ended in spans if ended):
        if merged and began <= merged[-1][1] + timedelta(milliseconds=1):
            merged[-1] = merged[-1][0], max(merged[-1][1], ended)
        else:
            merged.append((began, ended))
    return merged
