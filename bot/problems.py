"""Errors over HTTP as problem documents, and the id that each request has in answers and logs.

Format: https://www.rfc-editor.org/rfc/rfc9457
"""

from __future__ import annotations

import logging
from typing import Any

from aiohttp import web
from aiohttp.typedefs import Handler

from bot.people import MembershipUnknown
from flow import counts
from flow.database import AWAY
from flow.errors import (
    AlreadyDecided,
    ApprovalExpired,
    BadInput,
    EventsForgotten,
    EventUnknown,
    FlowError,
    InFlight,
    KeyReused,
    LinkGone,
    NotAllowed,
    NotChecked,
    NothingToDecide,
    PageNeeded,
    StaleRequest,
    Tampered,
    ThreadExists,
    UnknownApproval,
    UnknownFlow,
    UnknownThread,
    UnknownWorkspace,
    WorkspaceClosed,
)
from flow.log import concerning, new_trace_id

# The endpoint that signed a request; empty until it is known.
SENDER = web.RequestKey("SENDER", str)

log = logging.getLogger(__name__)

# By type; whatever is not listed is ours to answer for.
_STATUSES: dict[type[FlowError], int] = {
    BadInput: 422,
    NotAllowed: 403,
    PageNeeded: 403,
    UnknownApproval: 404,
    UnknownThread: 404,
    AlreadyDecided: 409,
    InFlight: 409,
    KeyReused: 409,
    NothingToDecide: 409,
    StaleRequest: 409,
    Tampered: 409,
    ThreadExists: 409,
    ApprovalExpired: 410,
    EventsForgotten: 410,
    EventUnknown: 410,
    LinkGone: 410,
    UnknownFlow: 422,
    UnknownWorkspace: 422,
    WorkspaceClosed: 422,
    NotChecked: 503,
    MembershipUnknown: 503,
}

_TITLES = {
    400: "The request is malformed",
    401: "Not authenticated",
    403: "Not allowed",
    404: "Not found",
    405: "Method not allowed",
    406: "Not acceptable",
    409: "Conflict",
    410: "Gone",
    413: "Too large",
    415: "Not JSON",
    422: "Not usable",
    429: "Too many requests",
    500: "Something is wrong here",
    503: "Not now",
}


class Problem(Exception):
    """An answer that is an error. `more` are members of the document beside the standard ones."""

    def __init__(self, status: int, detail: str, *, headers: dict[str, str] | None = None, **more: Any) -> None:
        super().__init__(detail)
        self.status, self.detail, self.headers, self.more = status, detail, headers or {}, more

    def as_json(self) -> dict[str, Any]:
        title = _TITLES.get(self.status, "Refused")
        return {"type": "about:blank", "title": title, "status": self.status, "detail": self.detail, **self.more}


def problem_of(exc: FlowError) -> Problem:
    """What a refusal of ours is over HTTP."""
    if isinstance(exc, AlreadyDecided):
        at = exc.at.isoformat() if exc.at else None
        return Problem(409, str(exc), decision=exc.status, decided_by=exc.by, decided_at=at)
    headers = {"Retry-After": "1"} if isinstance(exc, InFlight) else None
    return Problem(_STATUSES.get(type(exc), 500), str(exc), headers=headers)


@web.middleware
async def answer_problems(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Every answer has an id, and every error is a problem document."""
    request_id = new_trace_id()
    with concerning(trace_id=request_id):
        response = await _answered(request, handler, request_id)
        response.headers["X-Request-Id"] = request_id
        if response.status >= 400:
            log.info("request %s: %s %s: %s", request_id, request.method, request.path, response.status)
    if (sender := request.get(SENDER)) is not None:
        counts.webhook_receipts.add(sender, str(response.status))
    return response


async def _answered(request: web.Request, handler: Handler, request_id: str) -> web.StreamResponse:
    try:
        return await handler(request)
    except Problem as exc:
        return _document(exc)
    except web.HTTPException as exc:
        headers = {"Allow": exc.headers["Allow"]} if "Allow" in exc.headers else None
        return _document(Problem(exc.status, exc.reason, headers=headers))
    except (*AWAY, TimeoutError) as exc:
        log.warning("request %s was not carried out: %s: %s", request_id, type(exc).__name__, str(exc).strip())
        wait = {"Retry-After": "1"}
        return _document(Problem(503, "it could not be recorded: ask again, twice is once", headers=wait))
    except FlowError as exc:
        return _document(problem_of(exc))
    except Exception:
        log.exception("request %s failed: %s %s", request_id, request.method, request.path)
        return _document(Problem(500, f"look for {request_id} in the log"))


def _document(problem: Problem) -> web.Response:
    return web.json_response(
        problem.as_json(), status=problem.status, headers=problem.headers, content_type="application/problem+json"
    )
