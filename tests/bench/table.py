"""What is compared with what, and how it is shown. Knows nothing of what the numbers mean."""

from __future__ import annotations

import statistics
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass

# Runs once a round and returns one number for each series that it has measured; smaller is better.
Probe = Callable[[], Awaitable[Mapping[str, float]]]
Series = Mapping[str, Sequence[float]]

_HEADS = ("claim-flow", "median", "min", "against", "median", "min", "ratio", "required", "")


@dataclass(frozen=True, kw_only=True)
class Row:
    """Two series side by side, by the names that their probes gave them.

    `at_least` is how many times smaller the median of `ours` must be than that of `theirs`. Without `theirs`, or
    without `at_least`, a row is only shown; so is one whose `theirs` is not installed.
    """

    ours: str
    theirs: str | None = None
    at_least: float | None = None
    unit: str = "ms"

    def ratio(self, series: Series) -> float | None:
        if self.theirs is None or self.theirs not in series:
            return None
        return statistics.median(series[self.theirs]) / statistics.median(series[self.ours])

    def verdict(self, series: Series) -> str:
        ratio = self.ratio(series)
        if ratio is None or self.at_least is None:
            return ""
        return "met" if ratio >= self.at_least else "missed"

    def cells(self, series: Series) -> tuple[str, ...]:
        ratio = self.ratio(series)
        return (
            *_summary(self.ours, series, self.unit),
            *(_summary(self.theirs, series, self.unit) if self.theirs else ("", "", "")),
            f"{ratio:.2f}x" if ratio is not None else "",
            f"{self.at_least:g}x" if self.at_least is not None else "",
            self.verdict(series),
        )


async def measure(probes: Sequence[Probe], rounds: int, *, say: Callable[[str], None]) -> Series:
    """Every probe once a round, in turn, so that a slow minute of the machine hits all alike.

    A first round is thrown away: it fills caches and writes what bytecode is missing.
    """
    series: dict[str, list[float]] = {}
    for number in range(rounds + 1):
        say(f"round {number} of {rounds}" if number else "warm-up")
        for probe in probes:
            for name, value in (await probe()).items():
                series.setdefault(name, []).extend([value] if number else [])
    return series


def missed(rows: Sequence[Row], series: Series) -> bool:
    """Whether any row misses what is required of it."""
    return any(row.verdict(series) == "missed" for row in rows)


def rendered(rows: Sequence[Row], series: Series) -> list[str]:
    """The table, as lines of text."""
    lines = [_HEADS, *(row.cells(series) for row in rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    # Names stand left, numbers right.
    sides = [str.ljust if head in ("claim-flow", "against", "") else str.rjust for head in _HEADS]
    return [
        "  ".join(side(cell, width) for side, cell, width in zip(sides, line, widths, strict=True)).rstrip()
        for line in lines
    ]


def _summary(name: str, series: Series, unit: str) -> tuple[str, str, str]:
    if name not in series:
        return name, "not installed", ""
    values = series[name]
    return name, f"{statistics.median(values):.1f} {unit}", f"{min(values):.1f} {unit}"
