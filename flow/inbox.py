"""What a person sees in the inbox: approvals that name them, or somebody they stand in for, or that they have decided,
requests that they filed, or everything for a viewer.

Whom a person stands in for is in their `acts_for`: see `flow.delegations.with_absent`.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from typing import Any, Literal

from psycopg import sql

from flow.approvals import latest_approvals
from flow.database import Connection, Page, newest
from flow.errors import NotAllowed, UnknownApproval
from flow.model import Absent, Approval, Person, Thread
from flow.policy import is_requester, names_person
from flow.standing import check_person, escalates
from flow.text import bare_name
from flow.threads import threads_of
from flow.workspaces import reached, reaches

View = Literal["mine", "all", "history"]

# As far as what waits for one person is counted: more is too many, whatever the number.
MOST_COUNTED = 100

# As many of everybody's newest rows are looked at before the indexes of names are.
MOST_OF_EVERYBODY = 500

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


@dataclass(frozen=True, kw_only=True)
class Search:
    """What is looked for; whatever is left out matches everything. `words` are looked for in all that is shown."""

    view: View = "mine"
    status: str | None = None
    at_least: Decimal | None = None
    at_most: Decimal | None = None
    requester: str = ""
    since: date | None = None
    until: date | None = None
    thread: str = ""
    words: str = ""


def may_see(approval: Approval, person: Person, viewers: Collection[str]) -> bool:
    """Whether this person is shown this approval. `_seen` says the same in SQL."""
    return reaches(person, approval.workspace) and (
        names_person(viewers, person)
        or names_person(approval.approvers, person)
        or is_requester(approval.requested_by, person)
        or any(decision.person == person.key for decision in approval.decisions)
        or any(person.full_member and _stands_in(approval, absent) for absent in person.acts_for)
    )


def waits_for(approval: Approval, person: Person, now: datetime) -> bool:
    """Whether this person's vote is still missing, and would be taken. The view `mine` says the same in SQL."""
    over = approval.expires_at is not None and approval.expires_at <= now and not escalates(approval)
    if not approval.is_open or over:
        return False
    try:
        standing = check_person(approval, person)
    except (NotAllowed, UnknownApproval):
        return False
    voice = bare_name(standing.absent.key if standing.absent else person.key)
    return not any(vote.person == person.key or vote.voice == voice for vote in approval.votes)


def _stands_in(approval: Approval, absent: Absent) -> bool:
    """Whether the list names somebody who is away, for what they could decide themselves. `_STANDS_IN` is the same."""
    away = Person(key=absent.key, name=absent.name, names=absent.names)
    asks = is_requester(approval.requested_by, away) or names_person(approval.raised_by, away)
    return absent.workspace == approval.workspace and names_person(approval.approvers, away) and not asks


# Places in a list


def place_of(at: datetime, name: str) -> str:
    """Where a list goes on after the row of this time and id, as text for a URL or a button."""
    return f"{(at - _EPOCH) // timedelta(microseconds=1)}~{name}"


def place_named(text: str) -> tuple[datetime, str] | None:
    """The same as `find` and `find_threads` take it; None if it is no place."""
    match = re.fullmatch(r"([0-9]{1,16})~([A-Za-z0-9._:@-]{1,200})", text, re.ASCII)
    return (_EPOCH + timedelta(microseconds=int(match[1])), match[2]) if match else None


# What is found


async def find(
    conn: Connection,
    person: Person,
    search: Search,
    *,
    viewers: Collection[str],
    limit: int,
    before: tuple[datetime, str] | None = None,
) -> list[Approval]:
    """The approvals that this person sees and looks for, newest first; those after `before`."""
    seen, page = _seen(person, viewers), newest(("requested_at", "interrupt_id"), before, reached(person))
    where = sql.SQL(" AND ").join([_view(search.view, person), *seen, page.where, *_conditions(search)])
    values = _person_values(person) | {
        "wanted": search.status,
        "at_least": search.at_least,
        "at_most": search.at_most,
        "requester": search.requester,
        "since": search.since,
        "until": search.until,
        "thread": search.thread,
        "words": search.words,
    }

    async def read(where: sql.Composable) -> list[Approval]:
        return await latest_approvals(
            conn, status=None, limit=limit, before=before, only=Page(where=where, values=values)
        )

    if not seen:
        return await read(where)
    # Whoever is on many rows is on most of the newest. Whoever has little is not: along the index of times the database
    # would read everybody's for them, so theirs are found by the indexes of names, and sorted then.
    found = await read(_NEWEST_FIRST.format(_IN_VIEW[search.view], page.where, where))
    return found if len(found) == limit else await read(_NAMES_FIRST.format(where))


async def count_mine(conn: Connection, person: Person) -> int:
    """How many approvals wait for this person, up to MOST_COUNTED."""
    query = sql.SQL("SELECT count(*) AS n FROM (SELECT FROM approvals WHERE {} AND {} LIMIT %(most)s) AS mine").format(
        reached(person).where, _mine(person)
    )
    row = await (await conn.execute(query, _person_values(person) | {"most": MOST_COUNTED})).fetchone()
    assert row is not None
    return int(row["n"])


async def lists_groups(conn: Connection) -> bool:
    """Whether any approval lists a Slack user group: only then does it matter who is in which."""
    # In the order of the index that has only those: as EXISTS it might be answered by reading the table itself.
    query = "SELECT interrupt_id FROM approvals WHERE lists_group(approvers) ORDER BY interrupt_id LIMIT 1"
    return await (await conn.execute(query)).fetchone() is not None


async def find_threads(
    conn: Connection, person: Person, *, limit: int, before: tuple[datetime, str] | None = None
) -> list[Thread]:
    """What this person filed, newest first, whether or not it needed an approval; those after `before`."""
    page = newest(("created_at", "thread_id"), before, reached(person))
    # For each name on its own the index has them in this order; for all names at once it has none, and the newest of
    # everybody's would be read through.
    query = sql.SQL(
        "SELECT thread_id FROM unnest(%(lowered)s::text[]) AS name CROSS JOIN LATERAL (SELECT thread_id, created_at"
        " FROM threads WHERE lower(requested_by) = name AND {} ORDER BY created_at DESC, thread_id LIMIT %(limit)s)"
        " AS filed ORDER BY created_at DESC, thread_id LIMIT %(limit)s"
    ).format(page.where)
    rows = await conn.execute(query, {"limit": limit, **page.values, "lowered": _lowered(person.names)})
    ids = [row["thread_id"] for row in await rows.fetchall()]
    found = await threads_of(conn, ids)
    return [found[thread_id] for thread_id in ids]


# The conditions in SQL

# What keeps each view to an index of its own, along which it is read.
_IN_VIEW: dict[View, sql.SQL] = {
    "mine": sql.SQL("status = 'pending'"),
    "history": sql.SQL("status <> 'pending'"),
    "all": sql.SQL("true"),
}
# Read in that order until there are enough: nothing is looked up that is not theirs.
_NEWEST_FIRST = sql.SQL(
    "interrupt_id = ANY(ARRAY(SELECT interrupt_id FROM (SELECT * FROM approvals WHERE {} AND {}"
    f" ORDER BY requested_at DESC, interrupt_id LIMIT {MOST_OF_EVERYBODY}) AS approvals WHERE {{}}"
    " ORDER BY requested_at DESC, interrupt_id LIMIT %(limit)s))"
)
# OFFSET 0 keeps the database from the index of times.
_NAMES_FIRST = sql.SQL(
    "interrupt_id = ANY(ARRAY(SELECT interrupt_id FROM (SELECT interrupt_id, requested_at FROM approvals WHERE {}"
    " OFFSET 0) AS own ORDER BY requested_at DESC, interrupt_id LIMIT %(limit)s))"
)

_REQUESTED = sql.SQL("lower(approvals.requested_by) = ANY(%(lowered)s)")
_NAMED = sql.SQL("approvers && %(names)s::text[]")
# An array, and no subquery of each row: an index finds its ids, beside those by approver and by requester.
_DECIDED = sql.SQL("interrupt_id = ANY(ARRAY(SELECT d.interrupt_id FROM decisions d WHERE d.person = %(person)s))")
_ASKS = sql.SQL("({} OR raised_by && %(names)s::text[])").format(_REQUESTED)
_HAS_GROUP = sql.SQL("lists_group(approvers)")
_STANDS_IN = (
    "(workspace IS NOT DISTINCT FROM {workspace} AND approvers && {names}::text[]"
    " AND NOT lower(approvals.requested_by) = ANY({lowered})"
    " AND NOT raised_by && {names}::text[])"
)
# As `flow.text.bare_name` has it.
_VOICE = "regexp_replace(coalesce(d.for_person, d.person), '^(mail:|slack:[TE][A-Z0-9]+/)', '')"
_NOT_VOTED = (
    "NOT EXISTS (SELECT FROM decisions d WHERE d.interrupt_id = approvals.interrupt_id AND NOT d.void"
    f" AND (d.person = %(person)s OR {_VOICE} = {{voice}}))"
)


def _view(view: View, person: Person) -> sql.Composable:
    if view == "mine":
        return _mine(person)
    return sql.SQL("approvals.status <> 'pending'" if view == "history" else "true")


def _mine(person: Person) -> sql.Composable:
    """What this person can decide now and has not, as `check_person` says it.

    By their own name; else for any of those who are away whose vote is missing: if they ask for it themselves they lend
    nobody's voice, whatever the policy lets them do with their own.
    """
    own = sql.SQL("WHEN {} THEN (self_approval OR NOT {}) AND {}").format(_NAMED, _ASKS, _not_voted("voice"))
    # Whether their own voice is asked for is not known, and so neither whether they may lend it.
    unknown = [] if person.groups_known else [sql.SQL("WHEN {} THEN false").format(_HAS_GROUP)]
    lent = [
        sql.SQL("WHEN {} AND {} THEN NOT {}").format(_stands_in_for(number), _not_voted(f"voice_{number}"), _ASKS)
        for number in _lenders(person)
    ]
    return sql.SQL(
        "approvals.status = 'pending' AND approvers && %(any_names)s::text[]"
        " AND (expires_at IS NULL OR expires_at > clock_timestamp()"
        " OR (on_expiry = 'escalate' AND escalated_at IS NULL)) AND CASE {} ELSE false END"
        " AND fingerprint = approval_fingerprint(approvals)"
    ).format(sql.SQL(" ").join([own, *unknown, *lent]))


def _lenders(person: Person) -> range:
    """The places of those who are away in `acts_for`: nobody lends a voice to somebody who is not known to be of us."""
    return range(len(person.acts_for) if person.full_member else 0)


def _not_voted(voice: str) -> sql.Composable:
    return sql.SQL(_NOT_VOTED).format(voice=sql.Placeholder(voice))


def _stands_in_for(number: int) -> sql.Composable:
    named = {name: sql.Placeholder(f"{name}_{number}") for name in ("names", "lowered", "workspace")}
    return sql.SQL(_STANDS_IN).format(**named)


def _seen(person: Person, viewers: Collection[str]) -> list[sql.Composable]:
    if names_person(viewers, person):
        return []
    others = map(_stands_in_for, _lenders(person))
    return [sql.SQL("({})").format(sql.SQL(" OR ").join([_NAMED, _REQUESTED, _DECIDED, *others]))]


def _person_values(person: Person) -> dict[str, Any]:
    values: dict[str, Any] = reached(person).values | {
        "person": person.key,
        "voice": bare_name(person.key),
        "names": list(person.names),
        "lowered": _lowered(person.names),
        "any_names": list(person.names.union(*(absent.names for absent in person.acts_for))),
    }
    for number, absent in enumerate(person.acts_for):
        values |= {
            f"names_{number}": list(absent.names),
            f"lowered_{number}": _lowered(absent.names),
            f"voice_{number}": bare_name(absent.key),
            f"workspace_{number}": absent.workspace,
        }
    return values


def _lowered(names: Collection[str]) -> list[str]:
    """Each once: U01ALICE and u01alice are one requester."""
    return sorted({name.lower() for name in names})


# A request of another flow may have no amount. What it has is looked for in its words, not in our names for them.
_AMOUNT = sql.SQL("CASE WHEN request->>'amount' ~ '^[0-9]{1,15}([.][0-9]+)?$' THEN (request->>'amount')::numeric END")
_ANYWHERE = (
    "strpos(lower(concat_ws(' ', thread_id, approvals.requested_by, request->>'payee', request->>'amount',"
    " request->>'title', jsonb_path_query_array(request, '$.fields[*][*]'), request->'options',"
    " jsonb_path_query_array(request, '$.actions[*].name'), jsonb_path_query_array(request, '$.actions[*].args'),"
    " jsonb_path_query_array(request, '$.actions[*].description'),"
    " (SELECT t.input->>'note' FROM threads t WHERE t.thread_id = approvals.thread_id))), lower(%(words)s)) > 0"
)


def _conditions(search: Search) -> list[sql.Composable]:
    """One for each field that is filled in."""
    wanted: list[tuple[object, sql.Composable]] = [
        (search.status, sql.SQL("approvals.status = %(wanted)s")),
        (search.at_least is not None, sql.SQL("{} >= %(at_least)s").format(_AMOUNT)),
        (search.at_most is not None, sql.SQL("{} <= %(at_most)s").format(_AMOUNT)),
        (search.requester, sql.SQL("strpos(lower(approvals.requested_by), lower(%(requester)s)) > 0")),
        (search.since, sql.SQL("requested_at >= %(since)s::date")),
        (search.until, sql.SQL("requested_at < %(until)s::date + 1")),
        (search.thread, sql.SQL("strpos(lower(thread_id), lower(%(thread)s)) > 0")),
        (search.words, sql.SQL(_ANYWHERE)),
    ]
    return [condition for given, condition in wanted if given]
