"""A member of the workspace at App Home and at `/claims`: types, opens, presses and sends, over signed HTTP."""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlencode

from bot.desk import Audience
from tests.local_slack import CHANNEL
from tests.rows import until
from tests.services import QuietSlack
from tests.slack_door import Answered, Caller, bot_in_process, client_of, content_of
from tests.slack_requests import JSON, SlackRequest, payload_body

TEAM = "T01TEST"


def command_body(text: str, *, user: str, response_url: str, **fields: str) -> bytes:
    """A slash command as Slack posts it: https://api.slack.com/interactivity/slash-commands"""
    typed = {
        "token": "verification-token",
        "team_id": TEAM,
        "team_domain": "test-workspace",
        "channel_id": CHANNEL,
        "channel_name": "approvals",
        "user_id": user,
        "user_name": user.lower(),
        "command": "/claims",
        "text": text,
        "api_app_id": "A01APP",
        "is_enterprise_install": "false",
        "response_url": response_url,
        "trigger_id": "1.2.a",
    }
    return urlencode(typed | fields).encode()


def opened_body(user: str, *, tab: str = "home", team: str = TEAM) -> bytes:
    """The event: https://api.slack.com/events/app_home_opened"""
    event = {"type": "app_home_opened", "user": user, "channel": "D01ALICE", "tab": tab, "event_ts": "1796072400.1"}
    authorization = {"enterprise_id": None, "team_id": team, "user_id": "U0BOT", "is_bot": True}
    return json.dumps(
        {
            "type": "event_callback",
            "token": "verification-token",
            "team_id": team,
            "api_app_id": "A01APP",
            "event": event,
            "event_id": "Ev01",
            "event_time": 1796072400,
            "authorizations": [authorization | {"is_enterprise_install": False}],
        }
    ).encode()


@dataclass(frozen=True, kw_only=True)
class Member:
    """One person in front of one bot."""

    bot: Caller
    slack: QuietSlack
    id: str = "U01ALICE"

    async def command(self, text: str = "", **fields: str) -> dict[str, Any]:
        """Type `/claims text`: what is answered, to them alone."""
        body = command_body(text, user=self.id, **{"response_url": self.bot.response_url} | fields)
        answered = await self.bot.click(body)
        assert answered.status == 200, answered
        said: dict[str, Any] = json.loads(answered.body) if answered.body else {}
        assert said.get("response_type", "ephemeral") == "ephemeral"
        return said

    async def open_home(self, *, tab: str = "home") -> Answered:
        body = opened_body(self.id, tab=tab)
        return await self.bot.send(SlackRequest(name="opened", body=body, content_type=JSON, expected=range(200, 201)))

    async def home(self, *, after: int = 0) -> dict[str, Any]:
        """What this person's Home shows, once it was published more than `after` times."""

        async def published() -> list[dict[str, Any]]:
            mine = [view for user, view in self.slack.homes if user == self.id]
            return mine[after:]

        return (await until(published))[-1]

    @property
    def published(self) -> int:
        return sum(user == self.id for user, _ in self.slack.homes)

    async def opened_home(self) -> dict[str, Any]:
        before = self.published
        assert (await self.open_home()).status == 200
        return await self.home(after=before)

    async def press_in_home(
        self,
        view: dict[str, Any],
        action_id: str,
        block_id: str | None = None,
        *,
        ticked: Sequence[str] = (),
        **fields: Any,
    ) -> Answered:
        """Press a button of this Home view, with the boxes of these values ticked."""
        shown = {
            "id": "V2",
            "type": "home",
            "team_id": TEAM,
            "private_metadata": view["private_metadata"],
            "state": {"values": _ticked(view, ticked)},
        }
        payload = {
            "container": {"type": "view", "view_id": "V2"},
            "view": shown,
            "actions": [_button(view["blocks"], action_id, block_id)],
        }
        return await self.press(payload | fields)

    async def press_in_list(
        self, said: dict[str, Any], action_id: str, block_id: str | None = None, **fields: Any
    ) -> Answered:
        """Press a button of a private list. Slack sends no message with it."""
        payload = {
            "container": {"type": "message", "message_ts": "9.9", "channel_id": CHANNEL, "is_ephemeral": True},
            "channel": {"id": CHANNEL, "name": "approvals"},
            "response_url": self.bot.response_url,
            "actions": [_button(said["blocks"], action_id, block_id)],
        }
        return await self.press(payload | fields)

    async def list_after(self, said: dict[str, Any], action_id: str, block_id: str | None = None) -> dict[str, Any]:
        """What stands in the place of the list after this press."""
        assert (await self.press_in_list(said, action_id, block_id)).status == 200
        reply = await self.bot.reply()
        assert (reply["response_type"], reply["replace_original"]) == ("ephemeral", True)
        return reply

    async def modal(self) -> dict[str, Any]:
        """The modal that was opened last, once it is filled."""

        async def views() -> list[dict[str, Any]]:
            return self.slack.views

        return await content_of(views)

    async def shortcut(self, trigger_id: str = "1.2.a") -> Answered:
        payload = {"type": "shortcut", "callback_id": "new_claim", "action_ts": "1.1", "trigger_id": trigger_id}
        return await self.bot.click(payload_body(self._who() | payload))

    async def send(self, view: dict[str, Any], values: dict[str, str], *, view_id: str = "V1") -> dict[str, Any]:
        """Send a form: what is answered to it."""
        state = {
            name: {name: {"type": "plain_text_input", "value": values.get(name)}}
            for name in (each["block_id"] for each in view["blocks"] if each["type"] == "input")
        }
        answered = await self.submit(view | {"id": view_id, "state": {"values": state}})
        assert answered.status == 200, answered
        return json.loads(answered.body) if answered.body else {}

    async def submit(self, view: dict[str, Any], **fields: Any) -> Answered:
        sent = {"type": "view_submission", "trigger_id": "1.2.a", "view": {"id": "V1"} | view, "response_urls": []}
        return await self.bot.click(payload_body(self._who() | sent | fields))

    async def press(self, payload: dict[str, Any]) -> Answered:
        """Send this as a press of theirs."""
        pressed = {"type": "block_actions", "api_app_id": "A01APP", "trigger_id": "1.2.a"}
        return await self.bot.click(payload_body(self._who() | pressed | payload))

    def _who(self) -> dict[str, Any]:
        user = {"id": self.id, "username": self.id.lower(), "name": self.id.lower(), "team_id": TEAM}
        return {"team": {"id": TEAM, "domain": "test-workspace"}, "enterprise": None, "user": user}


def _button(blocks: list[dict[str, Any]], action_id: str, block_id: str | None) -> dict[str, Any]:
    """The element of `actions` for a button that is shown."""
    [found] = [
        element | {"block_id": block.get("block_id", "x"), "action_ts": "1.1"}
        for block in blocks
        for element in (*block.get("elements", []), block.get("accessory", {}))
        if element.get("action_id") == action_id and block_id in (None, block.get("block_id"))
    ]
    return {name: value for name, value in found.items() if name != "confirm"}


def _ticked(view: dict[str, Any], values: Sequence[str]) -> dict[str, Any]:
    """The state of the view's boxes, as Slack sends it."""
    return {
        block["block_id"]: {
            each["action_id"]: {
                "type": "checkboxes",
                "selected_options": [option for option in each["options"] if option["value"] in values],
            }
        }
        for block in view["blocks"]
        for each in block.get("elements", [])
        if each["type"] == "checkboxes"
    }


def boxes_of(view: dict[str, Any]) -> list[str]:
    """The values of the view's boxes."""
    return [
        option["value"]
        for block in view["blocks"]
        for each in block.get("elements", [])
        if each["type"] == "checkboxes"
        for option in each["options"]
    ]


def items_of(shown: dict[str, Any], place: str) -> list[str]:
    """The interrupt ids of the rows in that place of a Home or a list, in their order."""
    names = [block.get("block_id", "") for block in shown["blocks"]]
    return [name.removeprefix(f"{place}-") for name in names if name.startswith(f"{place}-")]


def buttons_in(shown: dict[str, Any], block_id: str) -> list[dict[str, Any]]:
    [block] = [each for each in shown["blocks"] if each.get("block_id") == block_id]
    return list(block["elements"])


def actions_in(shown: dict[str, Any], block_id: str) -> list[str]:
    """The action ids of one block."""
    return [each["action_id"] for each in buttons_in(shown, block_id)]


@contextlib.asynccontextmanager
async def member_at_a_bot(
    database_url: str, *, public_url: str | None = None, audience: Audience | None = None
) -> AsyncIterator[Member]:
    """Alice, in front of a bot that runs in this process."""
    async with (
        QuietSlack() as slack,
        client_of(slack.url) as client,
        bot_in_process(database_url, client, public_url=public_url, audience=audience) as url,
        Caller(url) as caller,
    ):
        yield Member(bot=caller, slack=slack)
