"""Who decides for whom while somebody is away: for a time, by name, and never for what either of them asks for.

A delegate gives the vote of whoever is away, not a second one beside it: see `Decision.voice`. It reaches no further:
a vote that somebody holds for another cannot be handed on.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass, replace
from datetime import UTC, datetime, time, timedelta, tzinfo

from psycopg import sql

from flow import audit, notices
from flow.database import Connection, ring
from flow.errors import BadInput
from flow.model import Absent, Approval, Person
from flow.policy import is_group
from flow.text import bare_name
from flow.workspaces import reached

LONGEST = timedelta(days=90)
# The last of these days is meant to its end, and one has 25 hours.
_LAST_DAY = timedelta(hours=25)

_DAYS = ("monday", "tuesday", "wednesday", "thursday", "friday", "saturday", "sunday")


@dataclass(frozen=True, kw_only=True)
class Delegation:
    """Until then, whoever has the name `delegate` decides for `person`: what was started in this `workspace`, of
    several."""

    id: int
    person: str
    person_name: str
    names: tuple[str, ...]
    delegate: str
    made_by: str
    made_at: datetime
    until: datetime
    workspace: str | None = None


_COLUMNS = "id, person, person_name, names, delegate, made_by, made_at, until, workspace"


async def away(conn: Connection, person: Person, *, to: str, until: datetime, made_by: str) -> Delegation:
    """Let whoever has the name `to` decide for this person until then, in the place of anybody before: in the person's
    own workspace, of several.

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
    if not now < until <= now + LONGEST + _LAST_DAY:
        raise BadInput("until", until.isoformat(), f"it must be later than now, and at most {LONGEST.days} days away")
    await end(conn, person, by=made_by)
    rows = await conn.execute(
        "INSERT INTO delegations (person, person_name, names, delegate, made_by, until, workspace)"
        f" VALUES (%s, %s, %s, %s, %s, %s, %s) RETURNING {_COLUMNS}",
        (person.key, person.name, sorted(names), to, made_by, until, person.workspace),
    )
    row = await rows.fetchone()
    assert row is not None
    await notices.change_direct_cards(conn, names, workspace=person.workspace)
    data = {"delegate": to, "until": until.isoformat()}
    await audit.record(
        conn, "delegation.made", who=made_by, door=audit.door_of(made_by), for_whom=person.key, data=data
    )
    await ring(conn)
    return _delegation(row)


async def end(conn: Connection, person: Person, *, by: str) -> bool:
    """The person is back in their workspace: nobody decides for them any more. False if nobody did."""
    rows = await conn.execute(
        "UPDATE delegations SET ended_at = clock_timestamp() WHERE person = ANY(%s) AND ended_at IS NULL"
        " AND workspace IS NOT DISTINCT FROM %s RETURNING person, delegate, until > clock_timestamp() AS held",
        (sorted(person.names), person.workspace),
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
        f"SELECT {_COLUMNS} FROM delegations"
        " WHERE ended_at IS NULL AND until > clock_timestamp() ORDER BY until LIMIT %s",
        (limit,),
    )
    return [_delegation(row) for row in await rows.fetchall()]


async def standing_in(conn: Connection, names: Collection[str], *, workspace: str | None) -> list[Delegation]:
    """Those that hold now in this workspace for anybody by one of these names."""
    rows = await conn.execute(
        f"SELECT {_COLUMNS} FROM delegations WHERE names && %s::text[] AND workspace IS NOT DISTINCT FROM %s"
        " AND ended_at IS NULL AND until > clock_timestamp() ORDER BY id",
        (list(names), workspace),
    )
    return [_delegation(row) for row in await rows.fetchall()]


async def standing_in_for(conn: Connection, approval: Approval) -> list[Delegation]:
    """Those that hold now for anybody whom the approval lists."""
    return await standing_in(conn, approval.approvers, workspace=approval.workspace)


async def with_absent(conn: Connection, person: Person) -> Person:
    """The person, with those whom they decide for now. Two with one name would be two voices, so their keys differ."""
    own = reached(person)
    query = sql.SQL(
        "SELECT person AS key, person_name AS name, names, workspace FROM delegations WHERE delegate = ANY(%(names)s)"
        " AND {} AND ended_at IS NULL AND until > clock_timestamp() ORDER BY id"
    ).format(own.where)
    rows = await conn.execute(query, {"names": sorted(person.names), **own.values})
    absent = (Absent(**row | {"names": frozenset(row["names"])}) for row in await rows.fetchall())
    return replace(person, acts_for=tuple(absent))


def parse_until(text: str, *, now: datetime, zone: tzinfo | None) -> datetime:
    """The end of what somebody calls "friday", "tomorrow", "2026-12-24", "3 days" or "2 weeks", in their zone; None is
    this machine's.

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
    if day < today:
        raise BadInput("until", text, "it must be later than now")
    if day > today + LONGEST:
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
