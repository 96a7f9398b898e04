"""The hours in which people work, wherever they are."""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import UTC, datetime, time, timedelta
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

_HOURS = re.compile(r"([01]\d|2[0-3]):([0-5]\d)-([01]\d|2[0-3]):([0-5]\d) ([A-Za-z0-9_+/-]{1,60})")


@dataclass(frozen=True, kw_only=True)
class Hours:
    """From `start` to `end` o'clock in `zone`, Monday to Friday."""

    start: time
    end: time
    zone: ZoneInfo

    @classmethod
    def parse(cls, text: str) -> Hours:
        """Of "09:00-17:00 Europe/Berlin". Raises ValueError."""
        match = _HOURS.fullmatch(text)
        if match is None:
            raise ValueError('write "09:00-17:00 Europe/Berlin"')
        try:
            zone = ZoneInfo(match[5])
        except (ZoneInfoNotFoundError, ValueError, OSError) as exc:
            raise ValueError(f"{match[5]!r} is no time zone: write Europe/Berlin, America/New_York or UTC") from exc
        start, end = time(int(match[1]), int(match[2])), time(int(match[3]), int(match[4]))
        if start >= end:
            raise ValueError("it must end later than it starts")
        return cls(start=start, end=end, zone=zone)

    def first_from(self, at: datetime) -> datetime:
        """`at`, if people work then, else the next time at which they begin to."""
        local = at.astimezone(self.zone)
        for days in range(8):
            day = local.date() + timedelta(days=days)
            # In UTC: two times of one zone are compared by what the clock on the wall says, twice an hour in autumn.
            opens, closes = (
                datetime.combine(day, clock, tzinfo=self.zone).astimezone(UTC) for clock in (self.start, self.end)
            )
            if day.weekday() < 5 and at.astimezone(UTC) < closes:
                return max(opens, at.astimezone(UTC))
        raise AssertionError("a week without a working day")


def next_reminder(after: datetime, every_s: float, hours: str | None) -> datetime:
    """When to remind of what was last spoken of at `after`."""
    return next_open(after + timedelta(seconds=every_s), hours)


def next_open(at: datetime, hours: str | None) -> datetime:
    """`at`, if that is in these hours, else when they begin next."""
    try:
        return Hours.parse(hours).first_from(at) if hours else at
    except ValueError:
        # They were read where the policy was; this machine may know fewer zones.
        return at
