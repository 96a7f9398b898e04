"""The web inbox: what waits for a person, what became of it, and Approve and Reject.

What somebody may see is `flow.inbox`'s business, what they may decide the policy's: every decision ends in
`approvals.decide`, another amount in `changes.change_amount`, for the request whose hash the page carried.
"""

from __future__ import annotations

import collections
import contextlib
import logging
import re
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, date, datetime
from decimal import Decimal
from typing import TypeVar, get_args
from urllib.parse import urlencode

from aiohttp import web

from bot.answers import Misfilled, sentence
from bot.forms import Filled, Form, Refused, hash_of, reason_of, verdict_of
from bot.live import Live, stream
from bot.outcomes import TAMPERED
from bot.people import MembershipUnknown, for_lists, unknown_kept, with_groups
from bot.pool import on_pool
from bot.shapes import ApprovalStatus
from bot.site import Site, see_other
from bot.waterfall import MOST_BARS, waterfall_of
from flow import inputs
from flow.approvals import approval_for, decide
from flow.changes import change_amount
from flow.database import AWAY, Connection
from flow.errors import BadInput, FlowError, GroupsUnknown, NotAllowed, UnknownApproval
from flow.inbox import (
    Search,
    View,
    count_mine,
    find,
    lists_groups,
    may_see,
    place_named,
    place_of,
    waits_for,
)
from flow.model import Approval, Person, Thread, Verdict
from flow.policy import is_group
from flow.questions import question_of
from flow.sessions import Session, session_of
from flow.show import Story, stories_of
from flow.standing import check_person, escalates
from flow.threads import thread_of, threads_of
from flow.trace import Trace, Tree, trace_of, tree_of

log = logging.getLogger(__name__)

T = TypeVar("T")

# A page of the list; and so the most that are approved at once.
PAGE = 50
# After it the rest of many is not tried any more: one may take seconds, and proxies give up after 30 or 60.
_MANY_WITHIN_S = 20.0

_NOT_CONFIRMED = "It could not be confirmed. If it still waits, please approve it again: twice is once."

_ONE = "/approvals/{interrupt_id:[0-9a-f]{32}}"
_VIEWS: dict[str, View] = {view: view for view in get_args(View)}
# Open pages of one session that hear of changes.
_MOST_STREAMS = 10


def inbox_routes(site: Site, live: Live) -> list[web.RouteDef]:
    """The inbox's routes."""
    inbox = _Inbox(site, live)
    page = site.handler
    return [
        web.get("/", page(_to_the_inbox)),
        web.get("/approvals", page(inbox.show_list)),
        web.get("/approvals/events", page(inbox.events), allow_head=False),
        web.get("/approvals/bulk", page(inbox.ask_for_many)),
        web.post("/approvals/bulk", page(inbox.decide_many)),
        web.get(_ONE, page(inbox.show_one)),
        web.post(_ONE, page(inbox.decide_one)),
        web.get(f"{_ONE}/trace", page(inbox.show_trace)),
        web.post(f"{_ONE}/amount", page(inbox.change_one)),
    ]


async def _to_the_inbox(_: web.Request) -> web.Response:
    return see_other("/approvals")


@dataclass(frozen=True, kw_only=True)
class Row:
    """One approval in a list."""

    approval: Approval
    thread: Thread
    # Whether this person could approve it now, by saying no more than that.
    open: bool


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What became of one of many."""

    interrupt_id: str
    # Of one that was decided; of the others there is a reason.
    approval: Approval | None = None
    why_not: str = ""
    # Whether it may have been recorded all the same.
    unconfirmed: bool = False


class _Inbox:
    """The handlers."""

    def __init__(self, site: Site, live: Live) -> None:
        self._site, self._live = site, live

    async def show_list(self, request: web.Request) -> web.Response:
        session = await self._site.signed_in(request)
        person = await self._with_groups(session.person)
        search, before = _search_of(request.query), _cursor_of(request.query.get("after"))

        async def look(conn: Connection) -> tuple[list[Row], int]:
            found = await find(conn, person, search, viewers=self._site.viewers, limit=PAGE, before=before)
            return await _rows(conn, found, person), await count_mine(conn, person)

        rows, mine = await on_pool(self._site.pool, look)
        return self._site.page(
            "inbox.html",
            session=session,
            rows=rows,
            mine=mine,
            groups_known=person.groups_known,
            search=search,
            query=_query(request.query),
            statuses=get_args(ApprovalStatus),
            searching=search != Search(view=search.view),
            following=_following(request.query, rows),
        )

    async def show_one(self, request: web.Request) -> web.Response:
        session = await self._site.signed_in(request)
        interrupt_id = inputs.parse_interrupt_id(request.match_info["interrupt_id"])
        return await self._one(session, interrupt_id, Filled())

    async def _one(self, session: Session, interrupt_id: str, filled: Filled) -> web.Response:
        async def look(conn: Connection, person: Person) -> tuple[Approval, Story, Trace, int]:
            approval = await self._visible(conn, interrupt_id, person)
            [story] = await stories_of(conn, [await thread_of(conn, approval.thread_id)])
            return approval, story, await trace_of(conn, story), await count_mine(conn, person)

        person = await self._with_groups(session.person)
        approval, story, trace, mine = await self._as(person, look)
        if approval.tampered:
            return self._site.page(
                "tampered.html", session=session, approval=approval, thread=story.thread, mine=mine, text=TAMPERED
            )
        return self._site.page(
            "approval.html",
            status=422 if filled.errors else 200,
            session=session,
            filled=filled,
            approval=approval,
            story=story,
            thread=story.thread,
            trace=trace,
            mine=mine,
            given=next((vote for vote in approval.votes if vote.person == session.person.key), None),
            why_not=_why_not(approval, person),
        )

    async def show_trace(self, request: web.Request) -> web.Response:
        """The trace of the request's thread, for whoever may see the request."""
        session = await self._site.signed_in(request)
        interrupt_id = inputs.parse_interrupt_id(request.match_info["interrupt_id"])

        async def look(conn: Connection, person: Person) -> tuple[Approval, Tree, int]:
            approval = await self._visible(conn, interrupt_id, person)
            tree = await tree_of(conn, approval.thread_id, most=MOST_BARS)
            return approval, tree, await count_mine(conn, person)

        approval, tree, mine = await self._as(await self._with_groups(session.person), look)
        if approval.tampered:
            return see_other(f"/approvals/{interrupt_id}")
        return self._site.page(
            "trace.html", session=session, approval=approval, waterfall=waterfall_of(tree), mine=mine
        )

    async def decide_one(self, request: web.Request) -> web.Response:
        session, form = await self._form(request)
        interrupt_id = inputs.parse_interrupt_id(request.match_info["interrupt_id"])
        approval = await self._decide_as(
            session.person, interrupt_id, None, lambda conn, known: self._visible(conn, interrupt_id, known)
        )
        question = question_of(approval.request)
        try:
            verdict = verdict_of(form, question, door="web")
            await self._decide_as(
                session.person,
                interrupt_id,
                verdict.request_hash,
                lambda conn, known: decide(conn, interrupt_id, known, verdict),
            )
        except (Misfilled, BadInput) as exc:
            if question.kind == "claim":
                raise
            return await self._one(session, interrupt_id, Filled.of(form, question, exc))
        return see_other(f"/approvals/{interrupt_id}")

    async def change_one(self, request: web.Request) -> web.Response:
        """Ask for another amount instead."""
        session, form = await self._form(request)
        interrupt_id = inputs.parse_interrupt_id(request.match_info["interrupt_id"])
        amount, reason, request_hash = form.one("amount").strip(), reason_of(form), hash_of(form)

        async def change(conn: Connection, known: Person) -> None:
            await self._visible(conn, interrupt_id, known)
            await change_amount(
                conn, interrupt_id, known, amount=amount, reason=reason, door="web", request_hash=request_hash
            )

        try:
            await self._decide_as(session.person, interrupt_id, request_hash, change)
        except BadInput as exc:
            filled = Filled(amount=amount, reason=reason, errors={"amount": sentence(exc)})
            return await self._one(session, interrupt_id, filled)
        return see_other(f"/approvals/{interrupt_id}")

    # Many at once

    async def ask_for_many(self, request: web.Request) -> web.Response:
        """The chosen ones once more, with their sum, before anything is approved."""
        session = await self._site.signed_in(request)
        ids = [inputs.parse_interrupt_id(each) for each in dict.fromkeys(request.query.getall("item", []))]
        if not 0 < len(ids) <= PAGE:
            raise Refused(400, "Nothing is chosen", f"Choose 1 to {PAGE} requests in the list.")

        async def look(conn: Connection, person: Person) -> tuple[list[Row], int]:
            found = [await self._visible(conn, each, person) for each in ids]
            return await _rows(conn, found, person), await count_mine(conn, person)

        rows, mine = await self._as(await self._with_groups(session.person), look)
        open_rows = [row for row in rows if row.open]
        return self._site.page(
            "bulk.html",
            session=session,
            rows=open_rows,
            left_out=len(rows) - len(open_rows),
            sums=_sums(open_rows),
            mine=mine,
            outcomes=None,
        )

    async def decide_many(self, request: web.Request) -> web.Response:
        """Approve each of them for itself: one that is refused does not keep the others from it."""
        session, form = await self._form(request)
        reason = reason_of(form)
        items = [_item(each) for each in dict.fromkeys(form.all("item"))]
        if not 0 < len(items) <= PAGE:
            raise Refused(400, "Nothing is chosen", f"Choose 1 to {PAGE} requests in the list.")
        outcomes, person = [], await self._with_groups(session.person)
        until = time.monotonic() + _MANY_WITHIN_S
        for interrupt_id, request_hash in items:
            verdict = Verdict(verdict="approve", door="web", reason=reason, request_hash=request_hash)
            outcomes.append(await self._decide_one_of_many(person, interrupt_id, verdict, until=until))
        # Without the number, if it cannot be had: what was recorded is told all the same.
        mine = 0
        with contextlib.suppress(*AWAY, TimeoutError):
            mine = await on_pool(self._site.pool, lambda conn: count_mine(conn, person))
        return self._site.page("bulk.html", session=session, rows=[], left_out=0, sums={}, mine=mine, outcomes=outcomes)

    async def _decide_one_of_many(
        self, person: Person, interrupt_id: str, verdict: Verdict, *, until: float
    ) -> Outcome:
        async def work(conn: Connection, known: Person) -> Approval:
            await self._visible(conn, interrupt_id, known)
            return (await decide(conn, interrupt_id, known, verdict)).approval

        unconfirmed = Outcome(interrupt_id=interrupt_id, why_not=_NOT_CONFIRMED, unconfirmed=True)
        if time.monotonic() > until:
            return unconfirmed
        try:
            approval = await self._decide_as(person, interrupt_id, verdict.request_hash, work)
        except (*AWAY, TimeoutError) as exc:
            log.warning("one of many was not confirmed: %s: %s", type(exc).__name__, str(exc).strip())
            return unconfirmed
        except FlowError as exc:
            return Outcome(interrupt_id=interrupt_id, why_not=str(exc))
        return Outcome(interrupt_id=interrupt_id, approval=approval)

    async def events(self, request: web.Request) -> web.StreamResponse:
        """Whenever something changes, for as long as the page is open."""
        session = await self._site.session(request)
        if session is None:
            # An EventSource gives up at this; any other answer it would complain of, or ask again.
            return web.Response(status=204)

        async def holds() -> bool:
            try:
                return await on_pool(self._site.pool, lambda conn: session_of(conn, session.token)) is not None
            except AWAY:
                # It cannot be told, so the stream ends; the page asks for another.
                return False

        if self._live.streams[session.token] >= _MOST_STREAMS:
            return web.Response(status=429)
        self._live.streams[session.token] += 1
        try:
            return await stream(request, self._live, holds)
        finally:
            self._live.streams[session.token] -= 1
            # Zeros would stay for ever.
            self._live.streams += collections.Counter()

    # What the handlers share

    async def _form(self, request: web.Request) -> tuple[Session, Form]:
        """Who decides, and what they sent."""
        session = await self._site.session(request)
        if session is None:
            raise Refused(403, "You are not signed in", "Nothing was done. Sign in, then decide once more.")
        form = await self._site.form(request, session.token)
        self._site.count(self._site.decisions, request, session.person.key)
        return session, form

    async def _with_groups(self, person: Person) -> Person:
        """The person with all their user groups, if there are any that matter."""
        groups = self._site.names_groups or await on_pool(self._site.pool, lists_groups)
        return await for_lists(await self._site.team_of(person.workspace), person, groups=groups)

    async def _as(self, person: Person, work: Callable[[Connection, Person], Awaitable[T]]) -> T:
        """Do it on a connection, as the person with their user groups if it takes those. Raises MembershipUnknown."""
        return await with_groups(
            await self._site.team_of(person.workspace),
            person,
            lambda known: on_pool(self._site.pool, lambda conn: work(conn, known)),
        )

    async def _decide_as(
        self, person: Person, interrupt_id: str, shown: str | None, work: Callable[[Connection, Person], Awaitable[T]]
    ) -> T:
        """The same for a decision: that it was refused because Slack did not say who they are is kept."""
        async with unknown_kept(self._site.pool, person, interrupt_id, door="web", shown=shown):
            return await self._as(person, work)

    async def _visible(self, conn: Connection, interrupt_id: str, person: Person) -> Approval:
        """The approval, if this person may see it. One that they may not see is as unknown as one that is not there."""
        approval = await approval_for(conn, person, interrupt_id)
        if not may_see(approval, person, self._site.viewers):
            groups = tuple(filter(is_group, approval.approvers))
            if groups and not person.groups_known:
                raise GroupsUnknown(person.name, groups)
            if person.full_member is None and may_see(approval, replace(person, full_member=True), ()):
                raise GroupsUnknown(person.name)
            raise UnknownApproval(interrupt_id)
        return approval


async def _rows(conn: Connection, found: Sequence[Approval], person: Person) -> list[Row]:
    threads = await threads_of(conn, [approval.thread_id for approval in found])
    return [
        Row(
            approval=each,
            thread=threads[each.thread_id],
            open=waits_for(each, person, datetime.now(UTC)) and question_of(each.request).can_approve,
        )
        for each in found
    ]


def _why_not(approval: Approval, person: Person) -> str | None:
    """Why this person cannot decide this approval now, in words; None if they can."""
    if approval.status != "pending":
        return f"This request is {approval.status}."
    if approval.tampered:
        return TAMPERED
    if approval.expires_at is not None and approval.expires_at <= datetime.now(UTC) and not escalates(approval):
        return "The time for a decision is over."
    try:
        check_person(approval, person)
    except GroupsUnknown as exc:
        return f"{MembershipUnknown(exc.groups)}."
    except NotAllowed as exc:
        return f"You can see this request, but not decide it: {exc.why}."
    return None


def _item(text: str) -> tuple[str, str]:
    interrupt_id, _, request_hash = text.partition(":")
    if not re.fullmatch(r"[0-9a-f]{64}", request_hash):
        raise Refused(400, "Not understood", "The form is not as it was sent from here.")
    return inputs.parse_interrupt_id(interrupt_id), request_hash


def _sums(rows: Sequence[Row]) -> dict[str, Decimal]:
    """By currency; a request of another flow may have no amount."""
    sums: dict[str, Decimal] = {}
    for row in rows:
        claim = row.approval.request
        with contextlib.suppress(KeyError, ArithmeticError, TypeError):
            sums[claim["currency"]] = sums.get(claim["currency"], Decimal(0)) + Decimal(claim["amount"])
    return sums


# What is looked for


def _search_of(query: Mapping[str, str]) -> Search:
    """Raises Refused for a field that cannot be understood."""
    view, status = _VIEWS.get(query.get("view", "mine")), query.get("status") or None
    if view is None or (status is not None and status not in get_args(ApprovalStatus)):
        raise Refused(400, "Not understood", "There is no such list.")
    return Search(
        view=view,
        status=status,
        at_least=_amount("smallest amount", query.get("at_least", "")),
        at_most=_amount("largest amount", query.get("at_most", "")),
        requester=_text("requester", query),
        since=_day("first day", query.get("since", "")),
        until=_day("last day", query.get("until", "")),
        thread=_text("thread", query),
        words=_text("words", query),
    )


def _text(name: str, query: Mapping[str, str]) -> str:
    return inputs.parse_text(name, query.get(name, "").strip(), inputs.MAX_NAME)


def _amount(name: str, text: str) -> Decimal | None:
    given = text.strip().replace(",", "")
    if given and not re.fullmatch(r"[0-9]{1,15}(\.[0-9]{1,4})?", given, re.ASCII):
        raise Refused(400, "Not understood", f"The {name} is not an amount: write 250 or 250.00.")
    return Decimal(given) if given else None


def _day(name: str, text: str) -> date | None:
    try:
        return date.fromisoformat(text) if text else None
    except ValueError:
        raise Refused(400, "Not understood", f"The {name} is not a date: write it like 2026-11-30.") from None


def _query(query: Mapping[str, str]) -> dict[str, str]:
    """The fields that are filled in, without the place in the list."""
    return {name: value for name, value in query.items() if value and name != "after"}


def _following(query: Mapping[str, str], rows: Sequence[Row]) -> str | None:
    """Where the list goes on. A full page may be the last one; then the next is empty."""
    if len(rows) < PAGE:
        return None
    last = rows[-1].approval
    after = place_of(last.requested_at, last.interrupt_id)
    return urlencode(_query(query) | {"after": after})


def _cursor_of(text: str | None) -> tuple[datetime, str] | None:
    if not text:
        return None
    place = place_named(text)
    if place is None:
        raise Refused(400, "Not understood", "There is no such place in the list.")
    return place
