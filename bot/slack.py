"""Slack's door: requests are verified over their raw bytes, clicks are decided, then acknowledged.

The order is the promise: a click that was answered is a committed decision. Whatever keeps it from being committed in
time is answered with an error, which Slack shows to the person, and with a private note that says to click again.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import logging
import re
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any

import aiohttp
from aiohttp import web
from slack_bolt.adapter.aiohttp import to_aiohttp_response
from slack_bolt.app.async_app import AsyncApp
from slack_bolt.async_app import AsyncAck
from slack_bolt.authorization import AuthorizeResult
from slack_bolt.context.respond.async_respond import AsyncRespond
from slack_bolt.request.async_request import AsyncBoltRequest
from slack_bolt.response import BoltResponse
from slack_sdk.errors import SlackApiError
from slack_sdk.web.async_client import AsyncWebClient

from bot.blocks import Click, parse_click
from bot.desk import Audience, Desk
from bot.door import NO_BUTTON, Door, NotRecorded
from bot.groups import OwnTeam
from bot.heard import is_end, is_for_home
from bot.kit import as_dict
from bot.modals import FORMS, hear_modals
from bot.outcomes import already, refusal
from bot.pool import Pool
from bot.slack_api import TROUBLES, read_error
from bot.slack_home import hear_home
from flow import counts
from flow.approvals import decide
from flow.errors import FlowError, SettingError
from flow.log import concerning, new_trace_id
from flow.model import Verdict

log = logging.getLogger(__name__)

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
# Whose a request is that Slack has signed, or what the answer is instead.
Find = Callable[[AsyncBoltRequest], Awaitable[AsyncApp | web.Response]]

# https://api.slack.com/authentication/verifying-requests-from-slack
_TOLERANCE_S = 300

# Slack's own troubles: they say nothing of our token.
PASSING_ERRORS = TROUBLES | {"ratelimited"}


class Background:
    """Work that goes on after a request was answered. Strong references: asyncio alone would let it be collected."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()

    def spawn(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)
        return task

    async def drain(self, timeout_s: float) -> None:
        """Wait for what is under way."""
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=timeout_s)

    def _done(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        exc = None if task.cancelled() else task.exception()
        # A FlowError is an answer, and whoever waited for it has given it.
        if exc is not None and not isinstance(exc, FlowError):
            log.warning("in the background: %s: %s", type(exc).__name__, exc)


async def check_token(own_team: OwnTeam) -> None:
    """Raise SettingError if Slack refuses the bot token. A Slack that does not answer may come back: only said."""
    try:
        await own_team.keys()
    except SlackApiError as exc:
        _status, error, _retry_after_s = read_error(exc)
        if error and error not in PASSING_ERRORS:
            raise SettingError(f"SLACK_BOT_TOKEN is refused by Slack ({error}): set the app's bot token") from exc
        log.warning("Slack does not answer as it should: %s", exc)
    except (aiohttp.ClientError, TimeoutError, OSError) as exc:
        log.warning("Slack does not answer: %s: %s", type(exc).__name__, exc)


def build_bolt(
    client: AsyncWebClient,
    pool: Pool,
    own_team: OwnTeam,
    background: Background,
    *,
    audience: Audience | None = None,
    public_url: str | None = None,
) -> AsyncApp:
    """The Bolt app. It does no verifying (see `slack_events`) and answers when its listener has returned."""

    async def authorize(**_: Any) -> AuthorizeResult:
        return AuthorizeResult(enterprise_id=None, team_id=None, bot_token=client.token)

    bolt = AsyncApp(
        logger=logging.getLogger("slack_bolt"),
        client=client,
        authorize=authorize,
        process_before_response=True,
        request_verification_enabled=False,
        ssl_check_enabled=False,
        ignoring_self_events_enabled=False,
    )
    door = Door(client=client, pool=pool, own_team=own_team, spawn=background.spawn, public_url=public_url)

    async def decide_click(click: Click) -> str | None:
        return await _decide(door, click)

    # First: it hears the presses of its own buttons alone.
    desk = Desk(door, audience or Audience())
    hear_home(bolt, desk, decide=decide_click)
    _hear_clicks(bolt, door)
    hear_modals(bolt, door, sent=desk.show_again)

    @bolt.action(re.compile(""))
    async def ignore_other_actions(ack: AsyncAck) -> None:
        await ack()

    @bolt.error
    async def answer_error(error: Exception, body: dict[str, Any], respond: AsyncRespond) -> BoltResponse:
        if isinstance(error, NotRecorded):
            door.tell(body, respond, f"⚠️ {error}")
        else:
            log.error("a request from Slack failed", exc_info=error)
            door.tell(body, respond, "⚠️ That did not work. Please try again in a moment: twice is once.")
        return BoltResponse(status=503, body="not recorded")

    return bolt


def _hear_clicks(bolt: AsyncApp, door: Door) -> None:
    @bolt.action(re.compile(r"\Aapprove(-[0-9]+)?\Z"))
    async def decide_click(ack: AsyncAck, body: dict[str, Any], respond: AsyncRespond) -> BoltResponse | None:
        click = parse_click(body)
        if click is None:
            door.tell(body, respond, NO_BUTTON)
            return BoltResponse(status=400, body="not one of our buttons")
        note = await _decide(door, click)
        await ack()
        if note:
            door.tell(body, respond, note)
        door.spawn(door.remember_copy(click))
        return None


async def _decide(door: Door, click: Click) -> str | None:
    """Have it committed. What to tell the person in private, or None if the card says it all.

    Raises NotRecorded if it could not be committed in time.
    """
    verdict = Verdict(verdict="approve", door="slack", request_hash=click.request_hash, answer=click.answer)
    try:
        decided = await door.act_in_time(click, lambda conn, person: decide(conn, click.interrupt_id, person, verdict))
    except FlowError as exc:
        return refusal(exc)
    return None if decided.recorded else already(decided.approval)


# HTTP mode


def slack_events(bolt: AsyncApp, signing_secret: str) -> Handler:
    """The handler of POST /slack/events, where there is one workspace."""

    async def the_one(request: AsyncBoltRequest) -> AsyncApp | web.Response:
        if is_end(request.body):
            log.error("Slack says that SLACK_BOT_TOKEN is taken back: install the app again, and set the new token")
            return web.Response()
        return bolt

    return events_at(the_one, signing_secret)


def events_at(find: Find, signing_secret: str) -> Handler:
    """The handler of POST /slack/events: 401 for whatever is not signed by Slack, before anything is parsed.

    `find` says whose a request is, or what the answer is instead.
    """

    async def handle(request: web.Request) -> web.StreamResponse:
        try:
            body = await request.read()
        except web.RequestPayloadError:
            # Not what its Content-Encoding or its chunks say that it is.
            return web.json_response({"error": "malformed"}, status=400)
        if not is_signed(signing_secret, request.headers, body, now=time.time()):
            _say_why_unsigned(signing_secret, request.headers, body, now=time.time())
            return web.json_response({"error": "not signed by Slack"}, status=401)
        # Bolt takes orders from these headers.
        headers: dict[str, str | Sequence[str]] = {
            name: value for name, value in request.headers.items() if not name.lower().startswith("x-slack-bolt-")
        }
        try:
            parsed = AsyncBoltRequest(body=body.decode(), query=request.query_string, headers=headers)
        except (ValueError, TypeError, AttributeError, LookupError, RecursionError):
            # Bolt looks into whatever it parses, and takes the shape of what it finds for granted.
            return web.json_response({"error": "malformed"}, status=400)
        if not _is_heard(parsed.body):
            return web.json_response({"error": "nothing listens to this"}, status=404)
        found = await find(parsed)
        return found if isinstance(found, web.Response) else await to_aiohttp_response(await answer(found, parsed))

    return handle


async def answer(bolt: AsyncApp, request: AsyncBoltRequest) -> BoltResponse:
    """Bolt's answer to what has come from Slack, however it came."""
    began = time.perf_counter()
    with concerning(trace_id=new_trace_id()):
        response = await bolt.async_dispatch(request)
    if request.body.get("type") in ("block_actions", "view_submission"):
        counts.click_to_answer.add(time.perf_counter() - began)
    return response


def _is_heard(body: dict[str, Any]) -> bool:
    """Whether anything here listens to it, and finds what it looks at. Bolt would fail on a wrong shape of the rest."""
    if is_for_home(body) or is_end(body):
        return True
    if body.get("type") == "view_submission":
        view = as_dict(body.get("view"))
        return view.get("type") == "modal" and view.get("callback_id") in FORMS
    if body.get("type") != "block_actions":
        return body.get("type") == "url_verification"
    actions = body.get("actions")
    return isinstance(actions, list) and isinstance(next(map(_action_id, actions), None), str)


def _action_id(action: object) -> object:
    return action.get("action_id") if isinstance(action, dict) else None


def is_signed(secret: str, headers: Any, body: bytes, *, now: float) -> bool:
    """Whether Slack signed exactly these bytes in the last five minutes.

    Scheme v0: https://api.slack.com/authentication/verifying-requests-from-slack
    """
    timestamp, signature = headers.get("X-Slack-Request-Timestamp", ""), headers.get("X-Slack-Signature", "")
    if not (timestamp.isascii() and timestamp.isdigit() and len(timestamp) <= 12):
        return False
    if abs(now - int(timestamp)) > _TOLERANCE_S:
        return False
    base = b"v0:" + timestamp.encode() + b":" + body
    expected = "v0=" + hmac.new(secret.encode(), base, hashlib.sha256).hexdigest()
    return hmac.compare_digest(expected.encode(), signature.encode("utf-8", "surrogateescape"))


def _say_why_unsigned(secret: str, headers: Any, body: bytes, *, now: float) -> None:
    """Log what keeps a request out that claims to be Slack's: its sender only sees that nothing happens."""
    timestamp = headers.get("X-Slack-Request-Timestamp", "")
    if "X-Slack-Signature" not in headers or not (timestamp.isascii() and timestamp.isdigit() and len(timestamp) <= 12):
        return
    if is_signed(secret, headers, body, now=int(timestamp)):
        off_s = int(timestamp) - round(now)
        log.warning("a request that Slack signed is refused: its clock and ours are %+d s apart (see NTP)", off_s)
    else:
        log.warning("a request is refused: not signed with SLACK_SIGNING_SECRET, or its body changed on the way")
