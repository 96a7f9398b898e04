"""The modals behind a card's buttons: opened at once and empty, then filled; what is sent from them is decided.

A trigger is good for three seconds, so nothing stands before the opening: no database, nobody else. Whatever keeps a
form from being taken is said beside its first field, and what was typed stays.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from slack_bolt.app.async_app import AsyncApp
from slack_bolt.async_app import AsyncAck
from slack_bolt.context.respond.async_respond import AsyncRespond
from slack_bolt.response import BoltResponse

from bot.answers import Misfilled, answer_of
from bot.blocks import Press, parse_button, parse_press, value_of
from bot.details import details_of
from bot.door import NO_BUTTON, Door, NotRecorded
from bot.heard import Origin, origin_of, with_origin
from bot.kit import as_dict, as_text, typed_text
from bot.outcomes import already, refusal
from bot.people import as_named_here
from bot.questions import FORM, form_of, has_form, typed_in
from bot.views import AMOUNT, MAX_REASON, REJECT, View, amount_form, in_words, reject_form, skeleton
from flow import inputs
from flow.approvals import approval_for, check_decidable, decide, refusals_kept
from flow.changes import change_amount, withdraw
from flow.database import Connection
from flow.errors import BadInput, FlowError, NothingToDecide
from flow.inbox import may_see
from flow.model import Approval, Person, Verdict
from flow.questions import question_of
from flow.show import stories_of
from flow.threads import thread_of
from flow.trace import trace_of

# The modals that can be sent.
FORMS = (FORM, REJECT, AMOUNT)

Fill = Callable[[Connection, Person, Press], Awaitable[View]]
# What a form says is done; why not, or None.
Send = Callable[[Connection, Person, Press, Any], Awaitable[str | None]]


def hear_modals(bolt: AsyncApp, door: Door, *, sent: Callable[[dict[str, Any]], None]) -> None:
    """Hear the buttons that open modals, the forms in them, and the button in one of them.

    `sent` is called with the payload of a form that was taken: whatever it was opened from may show more than is true.
    """

    async def details(conn: Connection, person: Person, press: Press) -> View:
        return await _details(door, conn, person, press)

    _hear_button(bolt, door, "reject", "Reject", _reject_view)
    _hear_button(bolt, door, "change", "Your answer", _change_view)
    _hear_button(bolt, door, "change-amount", "Change amount", _amount_view)
    _hear_button(bolt, door, "details", "Details", details)
    _hear_form(bolt, door, REJECT, "reason", _reject, sent=sent)
    _hear_form(bolt, door, FORM, "step-0", _change, sent=sent)
    _hear_form(bolt, door, AMOUNT, "amount", _change_amount, sent=sent)

    @bolt.action("withdraw")
    async def take_back(ack: AsyncAck, body: dict[str, Any], respond: AsyncRespond) -> BoltResponse | None:
        press = parse_button(body)
        if press is None:
            door.tell(body, respond, NO_BUTTON)
            return BoltResponse(status=400, body="not one of our buttons")
        view = as_dict(body.get("view"))
        try:
            await door.act_in_time(press, lambda conn, person: _withdraw(conn, person, press))
        except FlowError as exc:
            door.spawn(door.show(view, in_words("Withdraw", refusal(exc))))
        else:
            door.spawn(door.fill(view, "Details", _content(door, press, details, origin_of(body))))
            sent(body)
        await ack()
        return None


def _hear_button(bolt: AsyncApp, door: Door, action_id: str, title: str, fill: Fill) -> None:
    @bolt.action(action_id)
    async def open_modal(ack: AsyncAck, body: dict[str, Any], respond: AsyncRespond) -> BoltResponse | None:
        press = parse_button(body)
        if press is None or not as_text(body.get("trigger_id")):
            door.tell(body, respond, NO_BUTTON)
            return BoltResponse(status=400, body="not one of our buttons")
        view = await door.open(body, skeleton(title))
        await ack()
        door.spawn(door.fill(view, title, _content(door, press, fill, origin_of(body))))
        door.spawn(door.remember_copy(press))
        return None


def _hear_form(
    bolt: AsyncApp, door: Door, callback_id: str, first: str, send: Send, *, sent: Callable[[dict[str, Any]], None]
) -> None:
    @bolt.view(callback_id)
    async def take_form(ack: AsyncAck, body: dict[str, Any]) -> BoltResponse | None:
        view = as_dict(body.get("view"))
        press = parse_press(body, as_text(view.get("private_metadata")))
        if press is None:
            return BoltResponse(status=400, body="not one of our forms")
        values = as_dict(as_dict(view.get("state")).get("values"))
        errors = await _send(door, press, values, first, send)
        if errors:
            await ack(response_action="errors", errors=errors)
            return None
        await ack()
        door.spawn(door.remember_copy(press))
        sent(body)
        return None


async def _content(door: Door, press: Press, fill: Fill, origin: Origin) -> View:
    """What an opened modal shows. Raises FlowError, which says why there is nothing."""
    view = await door.act(press, lambda conn, person: fill(conn, person, press))
    return view | {"private_metadata": with_origin(as_text(view.get("private_metadata")), origin)}


async def _send(door: Door, press: Press, values: Any, first: str, send: Send) -> dict[str, str]:
    """Have it committed; what is wrong with it by block, nothing if it was."""
    try:
        note = await door.act_in_time(press, lambda conn, person: send(conn, person, press, values))
    except NotRecorded:
        note = "This could not be confirmed in time. Please send it again in a moment: twice is once."
    except Misfilled as exc:
        return exc.errors
    except BadInput as exc:
        return {exc.name if exc.name in values else first: refusal(exc)}
    except FlowError as exc:
        note = refusal(exc)
    return {first: note} if note else {}


# What is shown


async def _reject_view(conn: Connection, person: Person, press: Press) -> View:
    approval = await _decidable(conn, person, press)
    return reject_form(approval, _carried(approval, press))


async def _amount_view(conn: Connection, person: Person, press: Press) -> View:
    approval = await _decidable(conn, person, press)
    if question_of(approval.request).kind != "claim":
        raise NothingToDecide(approval.thread_id, "it has no amount that could be changed")
    return amount_form(approval, _carried(approval, press))


async def _change_view(conn: Connection, person: Person, press: Press) -> View:
    approval = await _decidable(conn, person, press)
    question = question_of(approval.request)
    if not has_form(question):
        return in_words("Your answer", NO_BUTTON)
    return form_of(question, _carried(approval, press))


async def _decidable(conn: Connection, person: Person, press: Press) -> Approval:
    """The approval, if this person may decide it as it was shown. Raises FlowError, which says why not."""
    async with refusals_kept(conn, press.interrupt_id, person, door="slack", shown=press.request_hash):
        approval = await approval_for(conn, person, press.interrupt_id)
        await check_decidable(conn, approval, person, request_hash=press.request_hash)
    return approval


async def _details(door: Door, conn: Connection, person: Person, press: Press) -> View:
    """Whoever can see the card may: the members of our own team, and whoever it names."""
    approval = as_named_here(await approval_for(conn, person, press.interrupt_id), await door.own_team.keys())
    if press.user_id not in person.names and not may_see(approval, person, ()):
        return in_words("Details", "Only members of this workspace see more of it.")
    [story] = await stories_of(conn, [await thread_of(conn, approval.thread_id)])
    return details_of(approval, story, await trace_of(conn, story), person, public_url=door.public_url)


def _carried(approval: Approval, press: Press) -> str:
    return value_of(approval, channel=press.channel_id, ts=press.message_ts)


# What is done


async def _reject(conn: Connection, person: Person, press: Press, values: Any) -> str | None:
    reason = inputs.parse_text("reason", typed_text(values, "reason"), MAX_REASON)
    verdict = Verdict(verdict="reject", door="slack", reason=reason, request_hash=press.request_hash)
    decided = await decide(conn, press.interrupt_id, person, verdict)
    return None if decided.recorded else already(decided.approval)


async def _change(conn: Connection, person: Person, press: Press, values: Any) -> str | None:
    question = question_of((await approval_for(conn, person, press.interrupt_id)).request)
    name, answer = answer_of(question, typed_in(values, question))
    verdict = Verdict(verdict=name, door="slack", request_hash=press.request_hash, answer=answer)
    decided = await decide(conn, press.interrupt_id, person, verdict)
    return None if decided.recorded else already(decided.approval)


async def _change_amount(conn: Connection, person: Person, press: Press, values: Any) -> str | None:
    reason = inputs.parse_text("reason", typed_text(values, "reason"), MAX_REASON)
    await change_amount(
        conn,
        press.interrupt_id,
        person,
        amount=typed_text(values, "amount"),
        reason=reason,
        door="slack",
        request_hash=press.request_hash,
    )
    return None


async def _withdraw(conn: Connection, person: Person, press: Press) -> None:
    """Take back what was shown, and not what the thread may wait for by now."""
    approval = await approval_for(conn, person, press.interrupt_id)
    await withdraw(
        conn,
        approval.thread_id,
        person,
        door="slack",
        interrupt_id=press.interrupt_id,
        request_hash=press.request_hash,
    )
