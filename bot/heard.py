"""Who stands behind a payload of Slack's, and whether App Home or `/claims` listens to it. Pure functions.

Formats: https://api.slack.com/interactivity/slash-commands, https://api.slack.com/reference/interaction-payloads and
https://api.slack.com/events/app_home_opened
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from bot import filing, home
from bot.away import COMMAND
from bot.kit import as_dict, as_id, as_text, cut, first_of
from flow.text import visible

_NAME = 120


@dataclass(frozen=True, kw_only=True)
class Visitor:
    """A member of a team, as Slack has signed. `enterprise_id` is their grid."""

    user_id: str
    name: str
    team_id: str
    enterprise_id: str | None


def visitor_of(body: dict[str, Any]) -> Visitor | None:
    """Whoever typed a command, pressed, sent a form, or opened App Home; None if that is not to be found."""
    user, event = as_dict(body.get("user")), as_dict(body.get("event"))
    user_id = as_id(user.get("id")) or as_id(body.get("user_id")) or as_id(event.get("user"))
    if user_id is None:
        return None
    name = as_text(user.get("name")) or as_text(user.get("username")) or as_text(body.get("user_name")) or user_id
    teams = (user.get("team_id"), as_dict(body.get("team")).get("id"), body.get("team_id"))
    return Visitor(
        user_id=user_id,
        name=cut(visible(name), _NAME),
        team_id=next(filter(None, map(as_id, teams)), ""),
        enterprise_id=as_id(as_dict(body.get("enterprise")).get("id")) or as_id(body.get("enterprise_id")),
    )


def is_for_home(body: dict[str, Any]) -> bool:
    """Whether this is for App Home or `/claims`, in the shape that Bolt takes for granted. Presses aside."""
    kind = body.get("type")
    if kind is None:
        return body.get("command") == COMMAND
    if kind == "shortcut":
        return body.get("callback_id") == filing.SHORTCUT
    if kind == "event_callback":
        return as_dict(body.get("event")).get("type") == "app_home_opened"
    view = as_dict(body.get("view"))
    return (
        kind == "view_submission"
        and view.get("type") == "modal"
        and view.get("callback_id") in (filing.FORM, home.BULK)
    )


def is_in_home(body: dict[str, Any]) -> bool:
    """Whether it was pressed in somebody's App Home."""
    at_view = as_dict(body.get("container")).get("type") == "view"
    return at_view and as_dict(body.get("view")).get("type") == "home"


def is_in_list(body: dict[str, Any]) -> bool:
    """Whether it was pressed in a private list: no card, and none of its copies."""
    private = as_dict(body.get("container")).get("is_ephemeral") is True
    return private or as_text(first_of(body.get("actions")).get("block_id")).startswith("list-")


def pressed_value(body: dict[str, Any]) -> str:
    return as_text(first_of(body.get("actions")).get("value"))
