"""What a person sees in the inbox: approvals that name them, requests that they filed, or everything for a viewer."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from datetime import date, datetime
from decimal import Decimal
from typing import Any, Literal

from psycopg import sql

from flow.approvals import latest_approvals
from flow.database import Connection, Page
from flow.model import Approval, Person
from flow.policy import is_requester, names_person

View = Literal["mine", "all", "history"]


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
    return (
        names_person(viewers, person)
        or names_person(approval.approvers, person)
        or is_requester(approval.requested_by, person)
    )


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
    conditions = [_VIEWS[search.view], *_seen(person, viewers), *_conditions(search)]
    where = sql.SQL(" AND ").join(conditions)
    values = _person_values(person) | {
        "at_least": search.at_least,
        "at_most": search.at_most,
        "requester": search.requester,
        "since": search.since,
        "until": search.until,
        "thread": search.thread,
        "words": search.words,
    }
    return await latest_approvals(
        conn, status=search.status, limit=limit, before=before, only=Page(where=where, values=values)
    )


async def count_mine(conn: Connection, person: Person) -> int:
    """How many approvals wait for this person."""
    query = sql.SQL("SELECT count(*) AS n FROM approvals WHERE {}").format(_VIEWS["mine"])
    row = await (await conn.execute(query, _person_values(person))).fetchone()
    assert row is not None
    return int(row["n"])


async def lists_groups(conn: Connection) -> bool:
    """Whether anything that waits lists a Slack user group: only then does it matter who is in which."""
    query = (
        "SELECT EXISTS (SELECT FROM approvals, unnest(approvers) AS name WHERE status = 'pending'"
        " AND name ~ '^(@.+|S[A-Z0-9]{2,})$') AS found"
    )
    row = await (await conn.execute(query)).fetchone()
    assert row is not None
    return bool(row["found"])


# The conditions in SQL. `mine` is what this person can decide now: named, not asked for by themselves, not yet decided.
_REQUESTED = sql.SQL("lower(approvals.requested_by) = ANY(%(lowered)s)")
_VIEWS: dict[View, sql.Composable] = {
    "mine": sql.SQL(
        "approvals.status = 'pending' AND approvers && %(names)s::text[] AND NOT {}"
        " AND (expires_at IS NULL OR expires_at > clock_timestamp()) AND NOT EXISTS (SELECT FROM decisions d"
        " WHERE d.interrupt_id = approvals.interrupt_id AND d.person = %(person)s)"
    ).format(_REQUESTED),
    "all": sql.SQL("true"),
    "history": sql.SQL("approvals.status <> 'pending'"),
}


def _seen(person: Person, viewers: Collection[str]) -> list[sql.Composable]:
    if names_person(viewers, person):
        return []
    return [sql.SQL("(approvers && %(names)s::text[] OR {})").format(_REQUESTED)]


def _person_values(person: Person) -> dict[str, Any]:
    lowered = [name.lower() for name in person.names]
    return {"person": person.key, "names": list(person.names), "lowered": lowered}


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
        (search.at_least is not None, sql.SQL("{} >= %(at_least)s").format(_AMOUNT)),
        (search.at_most is not None, sql.SQL("{} <= %(at_most)s").format(_AMOUNT)),
        (search.requester, sql.SQL("strpos(lower(approvals.requested_by), lower(%(requester)s)) > 0")),
        (search.since, sql.SQL("requested_at >= %(since)s::date")),
        (search.until, sql.SQL("requested_at < %(until)s::date + 1")),
        (search.thread, sql.SQL("strpos(lower(thread_id), lower(%(thread)s)) > 0")),
        (search.words, sql.SQL(_ANYWHERE)),
    ]
    return [condition for given, condition in wanted if given]
