"""Who decides for whom while somebody is away: for a time, by name, and never for what either of them asks for.

A delegate gives the vote of whoever is away, not a second one beside it: see `Decision.voice`. It reaches no further:
a vote that somebody holds for another cannot be handed on.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass, replace
from datetime import UTC, datetime, time, timedelta, tzinfo

from flow import audit, notices
from flow.database import Connection, ring
from flow.errors import BadInput
from flow.model import Absent, Person
from flow.policy import is_group
from flow.text import bare_name

LONGEST = timedelta(days=90)

_DAYS = ("monday", "tuesday", "wednesday", "thursday", "friday", "saturday", "sunday")


@dataclass(frozen=True, kw_only=True)
class Delegation:
    """Until then, whoever has the name `delegate` decides for `person`."""

    id: int
    person: str
    person_name: str
    names: tuple[str, ...]
    delegate: str
    made_by: str
    made_at: datetime
    until: datetime


async def away(conn: Connection, person: Person, *, to: str, until: datetime, made_by: str) -> Delegation:
    """Let whoever has the name `to` decide for this person until then, in the place of anybody before.

    `to` is written as approvers are. User groups are not handed over: who is in them is Slack's to say. Belongs in a
    transaction of the caller's. Raises BadInput.
    """
    if is_group(to):
        raise BadInput("the delegate", to, "it must be one person")
    if bare_name(to) in set(map(bare_name, person.names)):
        raise BadInput("the delegate", to, "it must be somebody else")
    # Two at once would both find nothing to end.
    await conn.execute("SELECT pg_advisory_xact_lock(hashtextextended(%s, 0))", (f"away {bare_name(person.key)}",))
    names = {name for name in person.names if not is_group(name)}
    now = await _now(conn)
    if not now < until <= now + LONGEST:
        raise BadInput("until", until.isoformat(), f"it must be later than now, and at most {LONGEST.days} days away")
    await end(conn, person, by=made_by)
    rows = await conn.execute(
        "INSERT INTO delegations (person, person_name, names, delegate, made_by, until) VALUES (%s, %s, %s, %s, %s, %s)"
        " RETURNING id, person, person_name, names, delegate, made_by, made_at, until",
        (person.key, person.name, sorted(names), to, made_by, until),
    )
    row = await rows.fetchone()
    assert row is not None
    await notices.change_direct_cards(conn, names)
    data = {"delegate": to, "until": until.isoformat()}
    await audit.record(
        conn, "delegation.made", who=made_by, door=audit.door_of(made_by), for_whom=person.key, data=data
    )
    await ring(conn)
    return _delegation(row)


async def end(conn: Connection, person: Person, *, by: str) -> bool:
    """The person is back: nobody decides for them any more. False if nobody did."""
    rows = await conn.execute(
        "UPDATE delegations SET ended_at = clock_timestamp() WHERE person = ANY(%s) AND ended_at IS NULL"
        " RETURNING person, delegate, until > clock_timestamp() AS held",
        (sorted(person.names),),
    )
    ended = [row for row in await rows.fetchall() if row["held"]]
    for row in ended:
        data = {"delegate": row["delegate"]}
        await audit.record(conn, "delegation.ended", who=by, door=audit.door_of(by), for_whom=row["person"], data=data)
    await ring(conn)
    return bool(ended)


async def current(conn: Connection, *, limit: int = 100) -> list[Delegation]:
    """Those that hold now, the next to end first."""
    rows = await conn.execute(
        "SELECT id, person, person_name, names, delegate, made_by, made_at, until FROM delegations"
        " WHERE ended_at IS NULL AND until > clock_timestamp() ORDER BY until LIMIT %s",
        (limit,),
    )
    return [_delegation(row) for row in await rows.fetchall()]


async def standing_in(conn: Connection, names: Collection[str]) -> list[Delegation]:
    """Those that hold now for anybody by one of these names."""
    rows = await conn.execute(
        "SELECT id, person, person_name, names, delegate, made_by, made_at, until FROM delegations"
        " WHERE names && %s::text[] AND ended_at IS NULL AND until > clock_timestamp() ORDER BY id",
        (list(names),),
    )
    return [_delegation(row) for row in await rows.fetchall()]


async def with_absent(conn: Connection, person: Person) -> Person:
    """The person, with those whom they decide for now. Two with one name would be two voices, so their keys differ."""
    rows = await conn.execute(
        "SELECT person, person_name, names FROM delegations"
        " WHERE delegate = ANY(%s) AND ended_at IS NULL AND until > clock_timestamp() ORDER BY id",
        (sorted(person.names),),
    )
    found = await rows.fetchall()
    absent = (Absent(key=row["person"], name=row["person_name"], names=frozenset(row["names"])) for row in found)
    return replace(person, acts_for=tuple(absent))


def parse_until(text: str, *, now: datetime, zone: tzinfo) -> datetime:
    """The end of what somebody calls "friday", "tomorrow", "2026-12-24", "3 days" or "2 weeks", in their zone.

    A day is meant to its end; today's name is a week away. Raises BadInput.
    """
    said, today = " ".join(text.lower().split()), now.astimezone(zone).date()
    if said in _DAYS:
        day = today + timedelta(days=(_DAYS.index(said) - today.weekday() - 1) % 7 + 1)
    elif said in ("today", "tomorrow"):
        day = today + timedelta(days=said == "tomorrow")
    elif match := re.fullmatch(r"([1-9][0-9]?) (day|week)s?", said):
        day = today + timedelta(days=int(match[1]) * {"day": 1, "week": 7}[match[2]])
    else:
        try:
            day = datetime.strptime(said, "%Y-%m-%d").date()  # noqa: DTZ007 (a date, and nothing more)
        except ValueError:
            raise BadInput("until", text, 'write "friday", "tomorrow", "2026-12-24", "3 days" or "2 weeks"') from None
    if day.year > today.year + 1:
        raise BadInput("until", text, f"at most {LONGEST.days} days")
    return datetime.combine(day, time(23, 59, 59), tzinfo=zone).astimezone(UTC)


async def _now(conn: Connection) -> datetime:
    row = await (await conn.execute("SELECT clock_timestamp() AS now")).fetchone()
    assert row is not None
    now: datetime = row["now"]
    return now


def _delegation(row: dict[str, object]) -> Delegation:
    names = row["names"]
    assert isinstance(names, list)
    return Delegation(**row | {"names": tuple(names)})  # type: ignore[arg-type]
