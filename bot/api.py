"""The JSON API: programs start threads, read what is known, and decide; external approvers decide with a signature.

Bearer tokens have scopes; a signed request needs none. Every decision ends in `approvals.decide`, another amount in
`changes.change_amount`. The table of routes
is also what the OpenAPI document is made from.
"""

from __future__ import annotations

import json
import re
from base64 import urlsafe_b64decode, urlsafe_b64encode
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

from aiohttp import web
from pydantic import BaseModel, ValidationError

from bot import shapes
from bot.bodies import BodyBroken, read_at_most
from bot.limits import Limit, caller_of
from bot.pool import Pool, on_pool
from bot.problems import SENDER, Problem, answer_problems, problem_of
from bot.webhooks import Endpoint, is_webhook, sender_of
from flow import approvals, inputs, payments, threads
from flow.changes import change_amount, withdraw
from flow.database import Connection
from flow.errors import BadInput, FlowError, KeyReused, NotAllowed, ThreadExists
from flow.events import page_after
from flow.log import also_concerning
from flow.model import CLAIM_FLOW, Approval, Decision, Event, Payment, Person, Verdict
from flow.receipts import Answer, answer_once
from flow.show import approval_as_json, decision_as_json, payment_as_json, stories_of
from flow.spans import parse_traceparent
from flow.starting import Checker
from flow.tokens import Scope, Token, token_of
from flow.workspaces import of_workspace, workspace_meant

# The largest claim has 10,000 characters of note.
LARGEST_BODY = 1 << 16

# A minute. Whoever has a token or a secret is never kept out by those who guess.
_MOST_REFUSED, _MOST_DECISIONS = 60, 1200

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


@dataclass(frozen=True, kw_only=True)
class Route:
    """One operation: what it takes (validated before the handler runs), gives, and asks of the token."""

    method: str
    path: str
    name: str
    summary: str
    scope: Scope
    handler: Callable[[Call], Awaitable[Answer]]
    answer: Any
    query: type[BaseModel] = shapes.NoQuery
    body: type[BaseModel] | None = None
    success: tuple[int, ...] = (200,)
    refusals: tuple[int, ...] = ()
    # Whether a signed request may come without a token.
    signed: bool = False


@dataclass(frozen=True, kw_only=True)
class Call:
    """One authenticated, validated request."""

    pool: Pool
    checker: Checker
    many_workspaces: bool
    request: web.Request
    raw: bytes
    query: Any
    body: Any
    # One of the two.
    token: Token | None
    sender: tuple[Endpoint, str] | None

    @property
    def reader(self) -> Person:
        """Who reads, or takes back, by a token."""
        assert self.token is not None
        return self.token.person


def build_api(
    pool: Pool,
    endpoints: tuple[Endpoint, ...],
    checker: Checker,
    *,
    many_workspaces: bool = False,
    most_refused: int = _MOST_REFUSED,
    most_decisions: int = _MOST_DECISIONS,
) -> web.Application:
    """The application below /api. `many_workspaces`: whether a start must say in which it is made. `most_refused`: of
    an address, a minute. `most_decisions`: of a token or sender."""
    app = web.Application(middlewares=[answer_problems])
    limits = _Limits(refused=Limit(most_refused), decisions=Limit(most_decisions))

    def call_of(**more: Any) -> Call:
        return Call(pool=pool, checker=checker, many_workspaces=many_workspaces, **more)

    for route in ROUTES:
        app.router.add_route(route.method, route.path, _handler_of(route, pool, endpoints, call_of, limits))
    return app


@dataclass(frozen=True, kw_only=True)
class _Limits:
    refused: Limit
    decisions: Limit


def _handler_of(
    route: Route, pool: Pool, endpoints: tuple[Endpoint, ...], call_of: Callable[..., Call], limits: _Limits
) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
    async def handle(request: web.Request) -> web.StreamResponse:
        # Who it is comes first: a stranger learns nothing from how his request is malformed.
        try:
            if route.signed and is_webhook(request.headers):
                request[SENDER] = ""
                raw, token = await _read(request), None
                sender = sender_of(endpoints, request.headers, raw)
                request[SENDER] = sender[0].name
            else:
                token, sender = await _token_of(request, pool, route.scope), None
                raw = await _read(request)
        except Problem as exc:
            # Whoever signs is a stranger until their whole body was read.
            if exc.status == 401 or request.get(SENDER) == "":
                _count(limits.refused, caller_of(request))
            raise
        also_concerning(approver=token.key if token else f"webhook:{request[SENDER]}")
        if route.scope == "decide":
            _count(limits.decisions, token.key if token else sender[0].name if sender else "")
        call = call_of(
            request=request,
            raw=raw,
            query=_valid(route.query, dict(_once(request.query.items(), "query parameter"))),
            body=_valid(route.body, _json(request, raw)) if route.body else None,
            token=token,
            sender=sender,
        )
        answer = await route.handler(call)
        headers = {"Location": f"/api/threads/{answer.body['thread']}"} if answer.status == 201 else {}
        kind = "application/problem+json" if answer.status >= 400 else "application/json"
        return web.json_response(answer.body, status=answer.status, headers=headers, content_type=kind)

    return handle


def _count(limit: Limit, caller: str) -> None:
    if (wait_s := limit.take(caller)) is not None:
        raise Problem(429, f"too many requests: ask again in {wait_s} s", headers={"Retry-After": str(wait_s)})


# Who it is


async def _token_of(request: web.Request, pool: Pool, scope: Scope) -> Token:
    kind, _, secret = request.headers.get("Authorization", "").partition(" ")
    token = None
    if kind.lower() == "bearer" and secret:
        token = await on_pool(pool, lambda conn: token_of(conn, secret))
    if token is None:
        raise Problem(401, "a bearer token is needed: `claim_flow.py tokens create`", headers=_BEARER)
    if scope not in token.scopes:
        raise Problem(403, f"the token {token.name} may not {scope}")
    return token


_BEARER = {"WWW-Authenticate": "Bearer"}


# What it says


async def _read(request: web.Request) -> bytes:
    try:
        raw = await read_at_most(request, LARGEST_BODY)
    except BodyBroken as exc:
        raise Problem(400, "the body is not what its headers say that it is") from exc
    if raw is None:
        raise Problem(413, f"at most {LARGEST_BODY} bytes are taken")
    return raw


def _json(request: web.Request, raw: bytes) -> Any:
    if request.content_type != "application/json":
        raise Problem(415, "send application/json")
    try:
        # A repeated name would leave it open which of the two is meant.
        return json.loads(raw.decode(), object_pairs_hook=lambda pairs: _once(pairs, "field"), parse_constant=_refuse)
    except (ValueError, RecursionError) as exc:
        raise Problem(400, f"the body is not JSON: {exc}") from exc


def _once(pairs: Any, what: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in pairs:
        if name in found:
            raise Problem(400, f"the {what} {name!a} comes twice")
        found[name] = value
    return found


def _refuse(name: str) -> Any:
    raise Problem(400, f"the body is not JSON: it knows no {name}")


def _valid(model: type[BaseModel], given: Any) -> Any:
    try:
        return model.model_validate(given)
    except ValidationError as exc:
        wrong = "; ".join(f"{'.'.join(map(str, e['loc'])) or 'it'}: {e['msg']}" for e in exc.errors())
        raise Problem(400, wrong.encode("utf-8", "backslashreplace").decode()) from exc


# Threads


async def start_thread(call: Call) -> Answer:
    token, asked = call.token, call.body
    assert token is not None
    if token.workspace is not None and asked.workspace not in (None, token.workspace):
        raise NotAllowed(token.key, f"it is a token of {token.workspace}, and starts nothing elsewhere")
    new = await call.checker.filed(asked.flow, _input_of(asked))
    requested_by = inputs.parse_text("requested_by", asked.requested_by or token.key, inputs.MAX_NAME, lines=False)
    if requested_by != token.key and "decide" in token.scopes:
        raise NotAllowed(token.key, "a token that may decide files requests in its own name only")
    workspace = workspace_meant(asked.workspace or token.workspace, many=call.many_workspaces)
    key = _idempotency_key(call.request)
    traceparent = parse_traceparent(call.request.headers.getall("traceparent", []))

    async def start(conn: Connection) -> Answer:
        async def once() -> Answer:
            before = await _exists(conn, asked.thread)
            thread = await threads.insert_thread(
                conn,
                thread_id=asked.thread,
                flow=new.flow,
                flow_version=new.flow_version,
                input=new.input,
                requested_by=requested_by,
                filed_by=token.key,
                traceparent=traceparent,
                workspace=workspace,
            )
            if thread.requested_by != requested_by:
                raise Problem(409, f"thread {asked.thread} was started before by somebody else")
            [story] = await stories_of(conn, [thread])
            return Answer(status=200 if before else 201, body=story.as_json())

        if key is None:
            return await once()
        return await answer_once(conn, door="api", sender=token.name, key=key, body=call.raw, work=once)

    try:
        return await on_pool(call.pool, start)
    except ThreadExists as exc:
        if "read" in token.scopes:
            raise
        raise Problem(409, f"thread {asked.thread} was started before with another input") from exc
    except KeyReused as exc:
        raise Problem(422, "this Idempotency-Key came with another request before") from exc


def _input_of(asked: shapes.NewThread) -> dict[str, Any]:
    claim = asked.model_dump(include={"amount", "currency", "payee", "note"}, exclude_none=True)
    if asked.input is not None and claim:
        raise Problem(422, "give `input`, or the fields of a claim, not both")
    if asked.input is None and asked.flow != CLAIM_FLOW:
        raise Problem(422, f"the flow {asked.flow} wants its `input`")
    return claim if asked.input is None else asked.input


async def _exists(conn: Connection, thread_id: str) -> bool:
    row = await (await conn.execute("SELECT FROM threads WHERE thread_id = %s", (thread_id,))).fetchone()
    return row is not None


def _idempotency_key(request: web.Request) -> str | None:
    """Draft: https://datatracker.ietf.org/doc/draft-ietf-httpapi-idempotency-key-header/"""
    given = request.headers.getall("Idempotency-Key", [])
    if len(given) > 1:
        raise Problem(400, "two Idempotency-Key headers")
    if given and not re.fullmatch(r"[\x21-\x7e]{1,200}", given[0]):
        raise Problem(400, "an Idempotency-Key has 1 to 200 printable ASCII characters, and no space")
    return given[0] if given else None


async def list_threads(call: Call) -> Answer:
    query: shapes.ThreadsQuery = call.query
    before = _time_and_name(query.cursor)

    async def look(conn: Connection) -> list[dict[str, Any]]:
        found = await threads.latest_threads(
            conn, status=query.status, limit=query.limit, before=before, only=of_workspace(call.reader.workspace)
        )
        return [story.as_json() for story in await stories_of(conn, found)]

    items = await on_pool(call.pool, look)
    return _page(items, query.limit, lambda last: _cursor(datetime.fromisoformat(last["created_at"]), last["thread"]))


async def show_thread(call: Call) -> Answer:
    thread_id = inputs.parse_thread_id(call.request.match_info["thread"])

    async def look(conn: Connection) -> dict[str, Any]:
        [story] = await stories_of(conn, [await threads.thread_for(conn, call.reader, thread_id)])
        return story.as_json()

    return Answer(status=200, body=await on_pool(call.pool, look))


async def withdraw_thread(call: Call) -> Answer:
    asked: shapes.Withdrawal = call.body
    thread_id = inputs.parse_thread_id(call.request.match_info["thread"])
    reason = inputs.parse_text("reason", asked.reason, inputs.MAX_NOTE)

    async def take_back(conn: Connection) -> dict[str, Any]:
        await withdraw(conn, thread_id, call.reader, reason)
        [story] = await stories_of(conn, [await threads.thread_of(conn, thread_id)])
        return story.as_json()

    return Answer(status=200, body=await on_pool(call.pool, take_back))


# Approvals and decisions


async def list_approvals(call: Call) -> Answer:
    query: shapes.ApprovalsQuery = call.query
    found = await on_pool(
        call.pool,
        lambda conn: approvals.latest_approvals(
            conn,
            status=query.status,
            limit=query.limit,
            before=_time_and_name(query.cursor),
            only=of_workspace(call.reader.workspace),
        ),
    )
    return _page(
        [_approval(each) for each in found],
        query.limit,
        lambda last: _cursor(datetime.fromisoformat(last["requested_at"]), last["interrupt_id"]),
    )


async def show_approval(call: Call) -> Answer:
    interrupt_id = inputs.parse_interrupt_id(call.request.match_info["interrupt_id"])
    found = await on_pool(call.pool, lambda conn: approvals.approval_for(conn, call.reader, interrupt_id))
    return Answer(status=200, body=_approval(found))


async def decide(call: Call) -> Answer:
    asked: shapes.NewDecision = call.body
    interrupt_id = _meant(call)
    verdict = Verdict(
        verdict=asked.decision,
        door=_door_of(call),
        reason=inputs.parse_text("reason", asked.reason, inputs.MAX_NOTE),
        request_hash=asked.request_hash,
        answer=asked.answer.model_dump(exclude_none=True) if asked.answer else None,
    )

    async def work(conn: Connection, person: Person) -> Answer:
        decided = await approvals.decide(conn, interrupt_id, person, verdict)
        return Answer(status=200, body={"recorded": decided.recorded, "approval": _approval(decided.approval)})

    return await _as_approver(call, interrupt_id, work)


async def change(call: Call) -> Answer:
    asked: shapes.NewAmount = call.body
    interrupt_id = _meant(call)
    reason = inputs.parse_text("reason", asked.reason, inputs.MAX_NOTE)

    async def work(conn: Connection, person: Person) -> Answer:
        superseded = await change_amount(
            conn,
            interrupt_id,
            person,
            amount=asked.amount,
            reason=reason,
            door=_door_of(call),
            request_hash=asked.request_hash,
        )
        return Answer(status=200, body=_approval(superseded))

    return await _as_approver(call, interrupt_id, work)


def _meant(call: Call) -> str:
    """The interrupt id of the path, and of the body if it says one."""
    interrupt_id = inputs.parse_interrupt_id(call.request.match_info["interrupt_id"])
    if call.body.interrupt_id not in (None, interrupt_id):
        raise Problem(422, "the body is about another approval than the path")
    return interrupt_id


def _door_of(call: Call) -> str:
    return "webhook" if call.sender else "api"


async def _as_approver(
    call: Call, interrupt_id: str, work: Callable[[Connection, Person], Awaitable[Answer]]
) -> Answer:
    """Do it as the token, or as the person that a signed request names: that one once for each webhook id."""
    approver: str | None = call.body.approver
    if call.sender is None:
        assert call.token is not None
        person = _person_of(call.token, approver)
        return await on_pool(call.pool, lambda conn: work(conn, person))
    endpoint, webhook_id = call.sender
    if approver is None:
        raise Problem(400, "approver: which of your people decided?")

    async def once(conn: Connection) -> Answer:
        async def answered() -> Answer:
            try:
                return await work(conn, endpoint.person(approver))
            except FlowError as exc:
                # A refusal is an answer, too.
                problem = problem_of(exc)
                return Answer(status=problem.status, body=problem.as_json())

        # The same body for another approval is another request.
        body = f"{interrupt_id}\n".encode() + call.raw
        return await answer_once(conn, door="webhook", sender=endpoint.name, key=webhook_id, body=body, work=answered)

    return await on_pool(call.pool, once)


def _person_of(token: Token, approver: str | None) -> Person:
    if approver not in (None, token.key, token.name):
        raise NotAllowed(token.key, "a token decides in its own name only")
    return token.person


async def list_decisions(call: Call) -> Answer:
    query: shapes.DecisionsQuery = call.query
    found = await on_pool(
        call.pool,
        lambda conn: approvals.latest_decisions(
            conn, limit=query.limit, before=_time_and_name(query.cursor), only=of_workspace(call.reader.workspace)
        ),
    )
    return _page(
        [_decision(*each) for each in found],
        query.limit,
        lambda last: _cursor(datetime.fromisoformat(last["decided_at"]), f"{last['interrupt_id']}~{last['person']}"),
    )


# Payments


async def list_payments(call: Call) -> Answer:
    query: shapes.PaymentsQuery = call.query
    found = await on_pool(
        call.pool,
        lambda conn: payments.latest_payments(
            conn, status=query.status, limit=query.limit, before=query.cursor, workspace=call.reader.workspace
        ),
    )
    return _page([_payment(each) for each in found], query.limit, lambda last: last["id"])


# Events


async def list_events(call: Call) -> Answer:
    query: shapes.EventsQuery = call.query
    found, last = await on_pool(
        call.pool,
        lambda conn: page_after(conn, query.cursor, limit=query.limit, workspace=call.reader.workspace),
    )
    return Answer(status=200, body={"items": [_event(each) for each in found], "next": last})


# Pages


def _page(items: list[dict[str, Any]], limit: int, cursor: Callable[[dict[str, Any]], str | int]) -> Answer:
    # A full page may be the last one; then the next is empty.
    following = cursor(items[-1]) if len(items) == limit else None
    return Answer(status=200, body={"items": items, "next": following})


def _cursor(at: datetime, name: str) -> str:
    coded = urlsafe_b64encode(name.encode()).decode().rstrip("=")
    return f"{(at - _EPOCH) // timedelta(microseconds=1)}~{coded}"


def _time_and_name(cursor: str | None) -> tuple[datetime, str] | None:
    if cursor is None:
        return None
    at, _, coded = cursor.partition("~")
    name = _decoded(coded)
    if name is None:
        raise BadInput("cursor", cursor, "it is `next` of the page before")
    return _EPOCH + timedelta(microseconds=int(at)), name


def _decoded(coded: str) -> str | None:
    """The name in a cursor; None if no cursor of ours has it."""
    try:
        name = urlsafe_b64decode(coded + "=" * (-len(coded) % 4)).decode()
    except ValueError:
        return None
    return name if inputs.storable_value(name) else None


# Shapes


def _approval(approval: Approval) -> dict[str, Any]:
    of_thread = {
        "thread": approval.thread_id,
        "requested_by": approval.requested_by,
        "workspace": approval.workspace,
        "request": approval.request,
    }
    return approval_as_json(approval) | of_thread


def _decision(thread_id: str, interrupt_id: str, decision: Decision) -> dict[str, Any]:
    return decision_as_json(decision) | {"thread": thread_id, "interrupt_id": interrupt_id}


def _payment(payment: Payment) -> dict[str, Any]:
    of_thread = {
        "thread": payment.thread_id,
        "amount": str(payment.amount),
        "currency": payment.currency,
        "payee": payment.payee,
        "provider": payment.provider,
    }
    return payment_as_json(payment) | of_thread


def _event(event: Event) -> dict[str, Any]:
    return {"id": event.id} | event.as_json()


ROUTES: Sequence[Route] = (
    Route(
        method="POST",
        path="/threads",
        name="startThread",
        summary="Start a thread. The same thread again, with the same input, is answered as it is now.",
        scope="start",
        handler=start_thread,
        body=shapes.NewThread,
        answer=shapes.Thread,
        success=(200, 201),
        refusals=(409, 413, 415, 422),
    ),
    Route(
        method="GET",
        path="/threads",
        name="listThreads",
        summary="The newest threads.",
        scope="read",
        handler=list_threads,
        query=shapes.ThreadsQuery,
        refusals=(422,),
        answer=shapes.Page[shapes.Thread],
    ),
    Route(
        method="GET",
        path="/threads/{thread}",
        name="showThread",
        summary="One thread.",
        scope="read",
        handler=show_thread,
        answer=shapes.Thread,
        refusals=(404, 422),
    ),
    Route(
        method="POST",
        path="/threads/{thread}/withdrawal",
        name="withdrawThread",
        summary="Take back what a thread waits for, by the token in whose name it was asked.",
        scope="start",
        handler=withdraw_thread,
        body=shapes.Withdrawal,
        answer=shapes.Thread,
        refusals=(404, 409, 413, 415, 422),
    ),
    Route(
        method="GET",
        path="/approvals",
        name="listApprovals",
        summary="The newest approvals.",
        scope="read",
        handler=list_approvals,
        query=shapes.ApprovalsQuery,
        refusals=(422,),
        answer=shapes.Page[shapes.ApprovalOfThread],
    ),
    Route(
        method="GET",
        path="/approvals/{interrupt_id}",
        name="showApproval",
        summary="One approval.",
        scope="read",
        handler=show_approval,
        answer=shapes.ApprovalOfThread,
        refusals=(404, 422),
    ),
    Route(
        method="POST",
        path="/approvals/{interrupt_id}/decision",
        name="decide",
        summary="Decide, with a token or signed. The same verdict again succeeds and changes nothing.",
        scope="decide",
        handler=decide,
        body=shapes.NewDecision,
        answer=shapes.Decided,
        refusals=(404, 409, 410, 413, 415, 422),
        signed=True,
    ),
    Route(
        method="POST",
        path="/approvals/{interrupt_id}/amount",
        name="changeAmount",
        summary="Ask for another amount instead, with a token or signed: the request is superseded, and made anew."
        " The same amount again succeeds and changes nothing.",
        scope="decide",
        handler=change,
        body=shapes.NewAmount,
        answer=shapes.ApprovalOfThread,
        refusals=(404, 409, 410, 413, 415, 422),
        signed=True,
    ),
    Route(
        method="GET",
        path="/decisions",
        name="listDecisions",
        summary="The newest decisions.",
        scope="read",
        handler=list_decisions,
        query=shapes.DecisionsQuery,
        refusals=(422,),
        answer=shapes.Page[shapes.DecisionOfThread],
    ),
    Route(
        method="GET",
        path="/payments",
        name="listPayments",
        summary="The newest payments.",
        scope="read",
        handler=list_payments,
        query=shapes.PaymentsQuery,
        answer=shapes.Page[shapes.PaymentOfThread],
    ),
    Route(
        method="GET",
        path="/events",
        name="listEvents",
        summary="What has happened, oldest first: what webhooks send. Going on from `next` misses nothing.",
        scope="read",
        handler=list_events,
        query=shapes.EventsQuery,
        answer=shapes.Events,
        refusals=(410, 422),
    ),
)
