"""Slack's door: requests are verified over their raw bytes, clicks and forms are decided, then acknowledged.

The order is the promise: a click that was answered is a committed decision. Whatever keeps it from being committed in
time is answered with an error, which Slack shows to the person, and with a private note that says to click again; in a
form the error stands beside its first field.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import hmac
import logging
import re
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any, TypeVar

import aiohttp
from aiohttp import web
from psycopg import errors
from slack_bolt.adapter.aiohttp import to_aiohttp_response
from slack_bolt.app.async_app import AsyncApp
from slack_bolt.async_app import AsyncAck
from slack_bolt.authorization import AuthorizeResult
from slack_bolt.context.respond.async_respond import AsyncRespond
from slack_bolt.request.async_request import AsyncBoltRequest
from slack_bolt.response import BoltResponse
from slack_sdk.errors import SlackApiError
from slack_sdk.web.async_client import AsyncWebClient

from bot.answers import Misfilled, answer_of, sentence
from bot.blocks import Change, Click, Press, parse_change, parse_click, parse_press, value_of
from bot.groups import OwnTeam
from bot.kit import as_dict, as_text, escape
from bot.people import slack_person, with_groups
from bot.pool import Pool, on_pool
from bot.questions import FORM, form_of, has_form, typed_in
from bot.slack_api import TROUBLES, read_error
from flow import notices
from flow.approvals import Decided, approval_of, decide
from flow.database import AWAY, Connection
from flow.errors import FlowError, SettingError, StaleRequest
from flow.model import Approval, Person, Verdict
from flow.questions import question_of
from flow.standing import check_person

log = logging.getLogger(__name__)

T = TypeVar("T")

# Slack waits three seconds; the rest is for the way and the note.
_DECIDE_TIMEOUT_S = 2.4
# https://api.slack.com/authentication/verifying-requests-from-slack
_TOLERANCE_S = 300

# Slack's own troubles: they say nothing of our token.
PASSING_ERRORS = TROUBLES | {"ratelimited"}


_NO_BUTTON = "This button is not one of ours any more: look at the newest message."


class NotRecorded(Exception):
    """The click could not be committed in time. It may still be; clicking again is safe."""


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


def build_bolt(client: AsyncWebClient, pool: Pool, own_team: OwnTeam, background: Background) -> AsyncApp:
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

    _hear_clicks(bolt, pool, own_team, background)
    _hear_forms(bolt, client, pool, own_team, background)

    @bolt.action(re.compile(""))
    async def ignore_other_actions(ack: AsyncAck) -> None:
        await ack()

    @bolt.error
    async def answer_error(error: Exception, respond: AsyncRespond) -> BoltResponse:
        if isinstance(error, NotRecorded):
            background.spawn(_tell(respond, f"⚠️ {error}"))
        else:
            log.error("a request from Slack failed", exc_info=error)
            background.spawn(_tell(respond, "⚠️ Your click was not recorded. Please click again in a moment."))
        return BoltResponse(status=503, body="not recorded")

    return bolt


def _hear_clicks(bolt: AsyncApp, pool: Pool, own_team: OwnTeam, background: Background) -> None:
    @bolt.action(re.compile(r"\A(approve(-[0-9]+)?|reject)\Z"))
    async def decide_click(ack: AsyncAck, body: dict[str, Any], respond: AsyncRespond) -> BoltResponse | None:
        click = parse_click(body)
        if click is None:
            background.spawn(_tell(respond, _NO_BUTTON))
            return BoltResponse(status=400, body="not one of our buttons")
        note = await _decide(background, _click_on_pool(pool, click, own_team))
        await ack()
        if note:
            background.spawn(_tell(respond, note))
        background.spawn(_remember_copy(pool, click))
        return None


def _hear_forms(bolt: AsyncApp, client: AsyncWebClient, pool: Pool, own_team: OwnTeam, background: Background) -> None:
    @bolt.action("change")
    async def open_form(ack: AsyncAck, body: dict[str, Any], respond: AsyncRespond) -> BoltResponse | None:
        change = parse_change(body)
        if change is None:
            background.spawn(_tell(respond, _NO_BUTTON))
            return BoltResponse(status=400, body="not one of our buttons")
        note = await _open_form(client, pool, change, own_team)
        await ack()
        if note:
            background.spawn(_tell(respond, note))
        background.spawn(_remember_copy(pool, change))
        return None

    @bolt.view(FORM)
    async def decide_form(ack: AsyncAck, body: dict[str, Any]) -> BoltResponse | None:
        view = as_dict(body.get("view"))
        press = parse_press(body, as_text(view.get("private_metadata")))
        if press is None:
            return BoltResponse(status=400, body="not one of our forms")
        values = as_dict(as_dict(view.get("state")).get("values"))
        errors = await _decide_form(background, _form_on_pool(pool, press, values, own_team))
        if errors:
            await ack(response_action="errors", errors=errors)
            return None
        await ack()
        background.spawn(_remember_copy(pool, press))
        return None


async def _decide(background: Background, work: Coroutine[Any, Any, Decided]) -> str | None:
    """Have it committed. What to tell the person in private, or None if the card says it all.

    Raises NotRecorded if it could not be committed in time, Misfilled for a form that cannot be taken.
    """
    task = background.spawn(work)
    done, _ = await asyncio.wait({task}, timeout=_DECIDE_TIMEOUT_S)
    if not done:
        raise NotRecorded("Your click could not be confirmed in time. If the buttons stay, please click again.")
    try:
        decided = task.result()
    except AWAY as exc:
        log.warning("a click was not recorded: %s", str(exc).strip())
        raise NotRecorded("Your click was not recorded: the database is away. Please click again in a moment.") from exc
    except Misfilled:
        raise
    except FlowError as exc:
        return sentence(exc)
    except (SlackApiError, aiohttp.ClientError, TimeoutError, OSError) as exc:
        log.warning("a click was not recorded, as Slack does not say which team is ours: %s", exc)
        raise NotRecorded("Your click was not recorded: Slack did not answer. Please click again in a moment.") from exc
    return None if decided.recorded else _already(decided.approval)


def _already(approval: Approval) -> str:
    by = approval.settled_by
    return f"Already {approval.status}" + (f" by {by.person_name}." if by else ".")


async def _click_on_pool(pool: Pool, click: Click, own_team: OwnTeam) -> Decided:
    person = person_of(click, await own_team.keys())
    verdict = Verdict(verdict=click.verdict, door="slack", request_hash=click.request_hash, answer=click.answer)

    async def work(conn: Connection, person: Person) -> Decided:
        return await decide(conn, click.interrupt_id, person, verdict)

    return await _as(person, pool, own_team, work)


async def _as(person: Person, pool: Pool, own_team: OwnTeam, work: Callable[[Connection, Person], Awaitable[T]]) -> T:
    """Do it on a connection, as the person with their user groups if it takes those."""
    return await with_groups(own_team, person, lambda known: on_pool(pool, lambda conn: work(conn, known)))


# Forms


async def _open_form(client: AsyncWebClient, pool: Pool, change: Change, own_team: OwnTeam) -> str | None:
    """Open the form, or say why there is none. Raises NotRecorded if Slack, or the database, is not there in time."""

    async def checked_approval(conn: Connection, person: Person) -> Approval:
        approval = await approval_of(conn, change.interrupt_id)
        check_person(approval, person)
        return approval

    try:
        async with asyncio.timeout(_DECIDE_TIMEOUT_S):
            approval = await _as(person_of(change, await own_team.keys()), pool, own_team, checked_approval)
            if approval.request_hash != change.request_hash:
                raise StaleRequest(change.interrupt_id)
            if approval.status != "pending":
                return _already(approval)
            question = question_of(approval.request)
            if not has_form(question):
                return _NO_BUTTON
            value = value_of(approval, channel=change.channel_id, ts=change.message_ts)
            await client.views_open(trigger_id=change.trigger_id, view=form_of(question, value))
    except FlowError as exc:
        return sentence(exc)
    except (*AWAY, SlackApiError, aiohttp.ClientError, TimeoutError, OSError) as exc:
        log.warning("a form was not opened: %s: %s", type(exc).__name__, str(exc).strip())
        raise NotRecorded("The form could not be opened. Please click again in a moment.") from exc
    return None


async def _decide_form(background: Background, work: Coroutine[Any, Any, Decided]) -> dict[str, str]:
    """Have it committed; what is wrong with it by block, nothing if it was."""
    try:
        note = await _decide(background, work)
    except Misfilled as exc:
        return exc.errors
    except NotRecorded:
        note = "This could not be confirmed in time. Please send it again in a moment: twice is once."
    return {"step-0": note} if note else {}


async def _form_on_pool(pool: Pool, press: Press, values: dict[str, Any], own_team: OwnTeam) -> Decided:
    person = person_of(press, await own_team.keys())

    async def work(conn: Connection, person: Person) -> Decided:
        question = question_of((await approval_of(conn, press.interrupt_id)).request)
        name, answer = answer_of(question, typed_in(values, question))
        verdict = Verdict(verdict=name, door="slack", request_hash=press.request_hash, answer=answer)
        return await decide(conn, press.interrupt_id, person, verdict)

    return await _as(person, pool, own_team, work)


async def _remember_copy(pool: Pool, click: Press) -> None:
    """A copy whose posting we never heard of becomes known, and is kept true like the others.

    Whatever became of the click: on a card of a settled request the buttons go away.
    """
    if click.channel_id is None or click.message_ts is None:
        return
    copy = (click.channel_id, click.message_ts)
    # For an approval that does not exist there is nothing to show, and `decide` has said so.
    with contextlib.suppress(errors.ForeignKeyViolation):
        async with pool.connection() as conn:
            if copy in await notices.messages_of(conn, click.interrupt_id):
                return
            async with conn.transaction():
                await notices.remember_message(conn, click.interrupt_id, *copy)
                await notices.change_card(conn, click.interrupt_id)


def person_of(click: Press, own_team: frozenset[str]) -> Person:
    """Who clicked."""
    return slack_person(
        user_id=click.user_id,
        name=click.user_name,
        team_id=click.team_id,
        enterprise_id=click.enterprise_id,
        own_team=own_team,
    )


async def _tell(respond: AsyncRespond, text: str) -> None:
    """A note that only the person who clicked sees; member ids in it are shown as names."""
    shown = re.sub(r"\b[UW](?=[A-Z]*\d)[A-Z0-9]{4,}\b", r"<@\g<0>>", escape(text))
    await respond(text=shown, response_type="ephemeral", replace_original=False)


# HTTP mode


def slack_events(bolt: AsyncApp, signing_secret: str) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
    """The handler of POST /slack/events: 401 for whatever is not signed by Slack, before anything is parsed."""

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
        return await to_aiohttp_response(await bolt.async_dispatch(parsed))

    return handle


def _is_heard(body: dict[str, Any]) -> bool:
    """Whether anything here listens to it, and finds what it looks at. Bolt would fail on a wrong shape of the rest."""
    if body.get("type") == "view_submission":
        view = as_dict(body.get("view"))
        return view.get("type") == "modal" and view.get("callback_id") == FORM
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
