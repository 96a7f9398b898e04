"""App Home, the command `/claims` and the form for a claim: what Slack tells of them, and what is answered.

A press of Approve or Reject is decided as one on a card is, and its outcome shown where it was made. Whatever needs
Slack's trigger opens its form before anything else: three seconds later it could not.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Awaitable, Callable
from dataclasses import asdict
from typing import Any

from slack_bolt.app.async_app import AsyncApp
from slack_bolt.async_app import AsyncAck
from slack_bolt.context.respond.async_respond import AsyncRespond
from slack_bolt.response import BoltResponse

from bot import filing, home
from bot.away import COMMAND
from bot.blocks import Click, parse_click, parse_press
from bot.desk import Desk
from bot.door import NotRecorded
from bot.heard import Origin, is_in_home, is_in_list, origin_in, origin_of, pressed_value, visitor_of
from bot.home import Chosen, Ways, parse_ways
from bot.kit import as_dict, as_text
from bot.lists import Turn, parse_turn
from flow.errors import BadInput

Decide = Callable[[Click], Awaitable[str | None]]


def hear_home(bolt: AsyncApp, desk: Desk, *, decide: Decide) -> None:
    """Listen. `decide` commits a click and says what to tell whoever pressed; it raises NotRecorded."""
    _hear_home_tab(bolt, desk, decide)
    _hear_bulk(bolt, desk, decide)
    _hear_lists(bolt, desk, decide)
    _hear_command(bolt, desk)
    _hear_filing(bolt, desk)


async def _in_home(body: dict[str, Any]) -> bool:
    return is_in_home(body)


async def _in_list(body: dict[str, Any]) -> bool:
    return is_in_list(body)


_DECIDES = re.compile(r"\Aapprove\Z")
_PAGES = re.compile(r"\Apage-(next|previous)\Z")
_NOT_OURS = "not one of ours"


def _hear_home_tab(bolt: AsyncApp, desk: Desk, decide: Decide) -> None:
    @bolt.event("app_home_opened")
    async def open_tab(body: dict[str, Any]) -> None:
        if as_dict(body.get("event")).get("tab") != "messages" and (visitor := visitor_of(body)):
            desk.publish_later(visitor)

    @bolt.action(_DECIDES, matchers=[_in_home])
    async def decide_in_tab(ack: AsyncAck, body: dict[str, Any]) -> BoltResponse | None:
        click, visitor = parse_click(body), visitor_of(body)
        if click is None or visitor is None:
            return BoltResponse(status=400, body=_NOT_OURS)
        ways = _ways_of(body)
        try:
            note = await decide(click)
        except NotRecorded as exc:
            # There is no message that a private note could stand below.
            desk.publish_later(visitor, ways, [(click.interrupt_id, str(exc))])
            return BoltResponse(status=503, body="not recorded")
        await ack()
        desk.publish_later(visitor, ways, [(click.interrupt_id, note)])
        return None

    @bolt.action(re.compile(r"\A(page-(next|previous)|refresh)\Z"), matchers=[_in_home])
    async def turn_in_tab(ack: AsyncAck, body: dict[str, Any]) -> None:
        await ack()
        turn = parse_turn(pressed_value(body))
        if visitor := visitor_of(body):
            desk.publish_later(visitor, _ways_of(body) | ({turn.name: turn.way} if turn else {}))


def _ways_of(body: dict[str, Any]) -> Ways:
    return parse_ways(as_dict(body.get("view")).get("private_metadata"))


def _hear_bulk(bolt: AsyncApp, desk: Desk, decide: Decide) -> None:
    @bolt.action("approve-selected", matchers=[_in_home])
    async def ask_for_many(ack: AsyncAck, body: dict[str, Any]) -> BoltResponse | None:
        chosen = home.chosen_of(as_dict(as_dict(body.get("view")).get("state")).get("values"))
        visitor = visitor_of(body)
        if not chosen and visitor:
            await ack()
            desk.publish_later(visitor, _ways_of(body), said=["⚠️ Nothing is ticked."])
            return None
        await desk.open_bulk(body, chosen)
        await ack()
        return None

    @bolt.view(home.BULK)
    async def decide_many(ack: AsyncAck, body: dict[str, Any]) -> BoltResponse | None:
        chosen, visitor = home.parse_bulk(as_dict(body.get("view")).get("private_metadata")), visitor_of(body)
        if not chosen or visitor is None:
            return BoltResponse(status=400, body=_NOT_OURS)
        # Each for itself: one that is refused, or late, keeps no other from being approved.
        results = await asyncio.gather(*(_approve(body, each, decide) for each in chosen))
        await ack()
        desk.publish_later(visitor, {}, results)
        return None


async def _approve(body: dict[str, Any], chosen: Chosen, decide: Decide) -> tuple[str, str | None]:
    press = parse_press(body, json.dumps({"interrupt": chosen.interrupt_id, "hash": chosen.request_hash}))
    assert press is not None
    try:
        return chosen.interrupt_id, await decide(Click(**asdict(press)))
    except NotRecorded as exc:
        return chosen.interrupt_id, str(exc)


def _hear_lists(bolt: AsyncApp, desk: Desk, decide: Decide) -> None:
    @bolt.middleware
    async def forget_where_it_stands(body: dict[str, Any], next: Callable[[], Awaitable[None]]) -> None:
        # Whatever hears a press takes its message for a copy of the card, and nobody can keep a private list true.
        if is_in_list(body):
            body["container"] = {**as_dict(body.get("container")), "message_ts": None}
            body.pop("message", None)
        await next()

    @bolt.action(_PAGES)
    async def turn(ack: AsyncAck, body: dict[str, Any], respond: AsyncRespond) -> None:
        await ack()
        wanted, visitor = parse_turn(pressed_value(body)), visitor_of(body)
        if wanted and visitor:
            desk.replace_later(respond, visitor, wanted)

    @bolt.action(_DECIDES, matchers=[_in_list])
    async def decide_in_list(ack: AsyncAck, body: dict[str, Any], respond: AsyncRespond) -> BoltResponse | None:
        click, visitor = parse_click(body), visitor_of(body)
        if click is None or visitor is None:
            return BoltResponse(status=400, body=_NOT_OURS)
        note = await decide(click)
        await ack()
        carried = as_dict(json.loads(pressed_value(body)))
        turn = parse_turn(as_text(carried.get("turn"))) or Turn(name="waits", way=())
        desk.replace_later(respond, visitor, turn, [(click.interrupt_id, note)])
        return None


def _hear_command(bolt: AsyncApp, desk: Desk) -> None:
    @bolt.command(COMMAND)
    async def hear_command(ack: AsyncAck, body: dict[str, Any]) -> BoltResponse | None:
        visitor = visitor_of(body)
        if visitor is None:
            return BoltResponse(status=400, body=_NOT_OURS)
        word, _, rest = as_text(body.get("text")).strip().partition(" ")
        if word.lower() == "new":
            try:
                await desk.open_form(body, Origin(response_url=as_text(body.get("response_url"))))
            except NotRecorded as exc:
                await ack(text=f"⚠️ {exc}", response_type="ephemeral")
            else:
                await ack()
            return None
        text, blocks = await desk.answer(visitor, word.lower(), rest)
        await ack(text=text, blocks=blocks, response_type="ephemeral")
        return None


def _hear_filing(bolt: AsyncApp, desk: Desk) -> None:
    @bolt.shortcut(filing.SHORTCUT)
    @bolt.action("new-claim")
    async def open_form(ack: AsyncAck, body: dict[str, Any]) -> None:
        await desk.open_form(body, origin_of(body))
        await ack()

    @bolt.view(filing.FORM)
    async def file(ack: AsyncAck, body: dict[str, Any]) -> BoltResponse | None:
        visitor, view = visitor_of(body), as_dict(body.get("view"))
        view_id = as_text(view.get("id"))
        if visitor is None or not view_id:
            return BoltResponse(status=400, body=_NOT_OURS)
        thread_id = filing.thread_id_of(visitor.team_id, view_id)
        try:
            new = filing.new_of(as_dict(as_dict(view.get("state")).get("values")))
        except BadInput as exc:
            await ack(response_action="errors", errors=filing.field_error(exc))
            return None
        if refusal := await desk.file(visitor, thread_id, new):
            await ack(response_action="errors", errors={"amount": refusal})
            return None
        await ack()
        desk.tell_later(visitor, origin_in(as_text(view.get("private_metadata"))), filing.filed_note(thread_id, new))
        return None
