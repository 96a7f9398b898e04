"""Who stands behind a payload of Slack's, and whether App Home or `/claims` listens to it. Pure functions.

Formats: https://api.slack.com/interactivity/slash-commands, https://api.slack.com/reference/interaction-payloads and
https://api.slack.com/events/app_home_opened
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace
from typing import Any

from bot import filing, home
from bot.away import COMMAND
from bot.blocks import value_in
from bot.kit import as_dict, as_id, as_text, cut, first_of
from flow.text import visible

_NAME = 120
# What Slack takes as the `private_metadata` of a view.
_METADATA = 3000


@dataclass(frozen=True, kw_only=True)
class Visitor:
    """Somebody in Slack, as it has signed. `team_id` is their own team, `enterprise_id` its grid.

    Empty and None where the payload does not say whose they are: then Slack is asked.
    """

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
    # Not the payload's team: in a shared channel that is ours, and the person may not be.
    team_id = as_id(user.get("team_id")) or ""
    grid = as_id(as_dict(body.get("enterprise")).get("id")) or as_id(body.get("enterprise_id"))
    return Visitor(
        user_id=user_id,
        name=cut(visible(name), _NAME),
        team_id=team_id,
        enterprise_id=grid if team_id else None,
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


def is_end(body: dict[str, Any]) -> bool:
    """Whether it says that the app was uninstalled, or its bot's token revoked.

    Formats: https://docs.slack.dev/reference/events/app_uninstalled and …/tokens_revoked
    """
    event = as_dict(body.get("event")) if body.get("type") == "event_callback" else {}
    if event.get("type") == "tokens_revoked":
        # A person's own token, of Sign in with Slack, is none that we have.
        return bool(as_dict(event.get("tokens")).get("bot"))
    return event.get("type") == "app_uninstalled"


@dataclass(frozen=True, kw_only=True)
class Origin:
    """What a modal was opened from, which is to be shown anew once something was done in it: a Home, with where its
    lists stand, or a list of `/claims`, with the page that it is on and where it can be replaced. Empty for a card."""

    ways: str | None = None
    turn: str = ""
    response_url: str = ""


def origin_of(body: dict[str, Any]) -> Origin:
    """Where this button was pressed."""
    if is_in_home(body):
        return Origin(ways=as_text(as_dict(body.get("view")).get("private_metadata")))
    if is_in_list(body):
        turn = as_text(value_in(pressed_value(body)).get("turn"))
        return Origin(turn=turn, response_url=as_text(body.get("response_url")))
    return origin_in(as_text(as_dict(body.get("view")).get("private_metadata")))


def with_origin(metadata: str, origin: Origin) -> str:
    """What a modal carries, and where it was opened from; the lists begin anew where there is no room for more."""
    if origin == Origin():
        return metadata
    carried = value_in(metadata)
    for kept in (origin, replace(origin, ways=origin.ways and "", turn="")):
        given = {name: value for name, value in asdict(kept).items() if value or name == "ways"}
        text = json.dumps(carried | {"from": given})
        if len(text) <= _METADATA:
            return text
    return metadata


def origin_in(metadata: str) -> Origin:
    """The same as it comes back with the form."""
    given = as_dict(value_in(metadata).get("from"))
    ways = given.get("ways")
    return Origin(
        ways=ways if isinstance(ways, str) else None,
        turn=as_text(given.get("turn")),
        response_url=as_text(given.get("response_url")),
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
