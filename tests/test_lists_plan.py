"""What the lists of one person read of many rows: what an index finds, and no more."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest

from flow.approvals import latest_approvals
from flow.database import Connection
from flow.inbox import Search, count_mine, find, find_threads, lists_groups
from flow.model import Person
from flow.notices import Lane, change_direct_cards, lease, remind
from flow.threads import latest_threads
from flow.workspaces import of_workspace
from tests.people import EVE, ask
from tests.rows import RENEW_FINGERPRINTS, all_rows

ROWS = 20_000
# What a list may look at and throw away: rows of the person's own, or of their groups', that another list has.
_MOST_DROPPED = 1000
# However many rows a person is on: all that waits of them, and of everybody's newest a bounded number.
_MOST_READ = 1000


@pytest.fixture
async def many(conn: Connection) -> Connection:
    """Twenty thousand requests of two hundred people, that others and their groups decide."""
    await ask(conn, "t0", requested_by="slack:T01TEST/U0NOBODY")
    await conn.execute("SET session_replication_role = replica")
    for table, changed in {
        "threads": {
            "thread_id": "'p' || g",
            "created_at": "created_at - g * interval '1 second'",
            "requested_by": "'slack:T01TEST/UX' || g % 200",
        },
        "approvals": {
            "interrupt_id": "md5('p' || g)",
            "thread_id": "'p' || g",
            "requested_at": "requested_at - g * interval '1 second'",
            "requested_by": "'slack:T01TEST/UX' || g % 200",
            "approvers": "ARRAY['UY' || g % 50, 'SZ' || g % 50, 'UBUSY']",
            "post_to": "CASE WHEN g % 20 = 0 THEN 'direct' ELSE 'channel' END",
            # Most of it was decided long ago.
            "status": "CASE WHEN g % 20 = 0 THEN 'pending' ELSE 'approved' END",
            "settled_at": "CASE WHEN g % 20 > 0 THEN requested_at END",
            # Of the row as it is then: see below.
            "fingerprint": "NULL",
        },
    }.items():
        names = [
            row["column_name"]
            for row in await all_rows(
                conn,
                "SELECT column_name FROM information_schema.columns WHERE table_name = %s AND is_generated = 'NEVER'"
                " AND table_schema = current_schema()",
                table,
            )
        ]
        chosen = ", ".join(changed.get(name, name) for name in names)
        await conn.execute(
            f"INSERT INTO {table} ({', '.join(names)}) SELECT {chosen} FROM {table}, generate_series(1, {ROWS}) AS g"
            " WHERE thread_id = 't0'"
        )
    await conn.execute(RENEW_FINGERPRINTS)
    await conn.execute("SET session_replication_role = origin")
    await conn.execute("VACUUM ANALYZE")
    return conn


Look = Callable[[Connection, Person], Awaitable[Any]]


_LOOKS: dict[str, Look] = {
    "asked": lambda conn, person: find_threads(conn, person, limit=11),
    "count": count_mine,
    "waits": lambda conn, person: find(conn, person, Search(), viewers=(), limit=11),
    "history": lambda conn, person: find(conn, person, Search(view="history"), viewers=(), limit=11),
    "all": lambda conn, person: find(conn, person, Search(view="all"), viewers=(), limit=11),
    "groups": lambda conn, _: lists_groups(conn),
    "away": lambda conn, person: change_direct_cards(conn, person.names, workspace=person.workspace),
}

# What whoever may see everything is shown, and a token of the API that was made for one workspace.
_LOOKS_OF_ONE: dict[str, Look] = {
    "viewer, waits": lambda conn, person: find(conn, person, Search(), viewers=person.names, limit=11),
    "viewer, history": lambda conn, person: find(conn, person, Search(view="history"), viewers=person.names, limit=11),
    "viewer, all": lambda conn, person: find(conn, person, Search(view="all"), viewers=person.names, limit=11),
    "API, threads": lambda conn, person: latest_threads(
        conn, status=None, limit=50, only=of_workspace(person.workspace)
    ),
    "API, approvals": lambda conn, person: latest_approvals(
        conn, status=None, limit=50, only=of_workspace(person.workspace)
    ),
}


class _Explained:
    """A connection that runs what it is asked, and keeps how."""

    def __init__(self, conn: Connection) -> None:
        self._conn = conn
        self.plans: list[dict[str, Any]] = []

    async def execute(self, query: Any, values: Any = None) -> Any:
        text = query if isinstance(query, str) else query.as_string(self._conn)
        if text.startswith("NOTIFY"):
            return None
        rows = await (await self._conn.execute(f"EXPLAIN (ANALYZE, FORMAT JSON) {text}", values)).fetchall()
        self.plans.append(rows[0]["QUERY PLAN"][0]["Plan"])
        return await self._conn.execute(query, values)


def _nodes(plan: dict[str, Any]) -> Iterator[dict[str, Any]]:
    yield plan
    for each in plan.get("Plans", ()):
        yield from _nodes(each)


@pytest.mark.parametrize("lane", ["posts", "changes", "alarms"])
async def test_leasing_reads_no_more_than_is_first_in_its_queue(many: Connection, lane: Lane) -> None:
    """Of twenty thousand that are due, and as many that are put off."""
    await many.execute("SET session_replication_role = replica")
    await many.execute(
        "INSERT INTO notices (kind, interrupt_id, thread_id, version, due_at)"
        " SELECT CASE WHEN kind = 'changed' THEN 'card' ELSE kind END,"
        " CASE WHEN kind <> 'alarm' THEN md5(kind || g) END, 'p' || g, CASE WHEN kind = 'changed' THEN 2 ELSE 1 END,"
        " clock_timestamp() + CASE WHEN g %% 2 = 0 THEN interval '-1 minute' ELSE interval '1 day' END"
        " FROM unnest('{reply,reminder,changed,alarm}'::text[]) AS kind, generate_series(1, %s) AS g",
        (2 * ROWS // 4,),
    )
    await many.execute("SET session_replication_role = origin")
    await many.execute("VACUUM ANALYZE notices")
    explained = _Explained(many)
    leased = await lease(explained, lane)  # type: ignore[arg-type]
    assert leased is not None
    for plan in explained.plans:
        for node in _nodes(plan):
            assert node["Node Type"] not in ("Sort", "Seq Scan", "Bitmap Heap Scan"), plan
            read = (node["Actual Rows"] + node.get("Rows Removed by Filter", 0)) * node["Actual Loops"]
            assert read < 10, plan


async def test_reminders_wait_for_whatever_else_is_to_be_posted(conn: Connection) -> None:
    interrupt_id = await ask(conn)
    await remind(conn, interrupt_id, "t1")
    await conn.execute("UPDATE notices SET due_at = clock_timestamp() - interval '1 hour' WHERE kind = 'reminder'")
    kinds = [(await lease(conn, "posts")) for _ in range(3)]
    assert [each and each.kind for each in kinds] == ["card", "reminder", None]


@pytest.mark.parametrize("name", _LOOKS)
async def test_no_list_reads_through_what_is_others(many: Connection, name: str) -> None:
    """Whether the person has a lot, a little or nothing."""
    for member, groups in (
        ("U66EVE", []),
        ("UX7", []),
        ("UY7", []),
        ("U66EVE", ["SZ3", "@g3"]),
        ("UX7", ["SZ7", "SZ8"]),
        ("UBUSY", []),
    ):
        await _read_little(many, _LOOKS[name], _person(member, groups))


async def test_no_list_of_a_small_workspace_reads_through_the_large_one(many: Connection) -> None:
    """Its twenty requests are the oldest of twenty thousand, and name the same people."""
    await many.execute(
        "INSERT INTO workspaces (workspace, name, token, installed_by) SELECT w, w, 'sealed', 'cli:ann'"
        " FROM unnest('{T01SMALL,T02LARGE}'::text[]) AS w"
    )
    await many.execute("SET session_replication_role = replica")
    for table in ("threads", "approvals"):
        await many.execute(
            f"UPDATE {table} SET workspace = CASE WHEN substr(thread_id, 2)::int > %s THEN 'T01SMALL' ELSE 'T02LARGE'"
            " END",
            (ROWS - 20,),
        )
    await many.execute(RENEW_FINGERPRINTS)
    await many.execute("SET session_replication_role = origin")
    await many.execute("VACUUM FULL ANALYZE threads, approvals")
    for look in (_LOOKS | _LOOKS_OF_ONE).values():
        for member in ("U66EVE", "UY7", "UBUSY"):
            await _read_little(many, look, _person(member, [], "T01SMALL"))


def _person(member: str, groups: list[str], workspace: str | None = None) -> Person:
    names = frozenset({member, f"slack:T01TEST/{member}", *groups})
    return replace(EVE, key=f"slack:T01TEST/{member}", names=names, workspace=workspace)


async def _read_little(conn: Connection, look: Look, person: Person) -> None:
    explained = _Explained(conn)
    await look(explained, person)  # type: ignore[arg-type]
    for plan in explained.plans:
        for node in _nodes(plan):
            if node.get("Relation Name") in ("threads", "approvals"):
                dropped = node.get("Rows Removed by Filter", 0) * node["Actual Loops"]
                assert node["Node Type"] != "Seq Scan", (person.key, plan)
                assert dropped < _MOST_DROPPED, (person.key, plan)
                assert node["Actual Rows"] * node["Actual Loops"] <= _MOST_READ, (person.key, plan)
