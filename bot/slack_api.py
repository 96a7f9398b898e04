"""Slack's Web API as we use it: the client, and how to read its errors."""

from __future__ import annotations

import contextlib
import re
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
from slack_sdk.errors import SlackApiError
from slack_sdk.web.async_client import AsyncWebClient
from slack_sdk.web.async_slack_response import AsyncSlackResponse

from flow import counts
from flow.settings import Settings
from flow.spans import span

CALL_TIMEOUT_S = 10.0

# What the bot needs whatever the policy says; for user groups among the approvers, or in FILERS; and for what is posted
# as direct messages: together those of manifest.yml.
SCOPES = ("chat:write", "channels:history", "groups:history", "commands", "users:read")
GROUP_SCOPES = ("usergroups:read",)
DIRECT_SCOPES = ("im:write", "im:history")

# Slack failed inside, perhaps after it acted, or is moving a workspace or a channel; that says nothing of what we sent,
# or who we are.
TROUBLES = {
    "internal_error",
    "fatal_error",
    "service_unavailable",
    "request_timeout",
    "update_failed",
    "team_added_to_org",
    "org_login_required",
    "external_channel_migrating",
}
# Too much at a time, by anybody or of messages alone: Slack did nothing, and will later.
RATE_LIMITS = {"ratelimited", "rate_limited", "message_limit_exceeded"}

FIXES = {
    "not_in_channel": "invite the bot to SLACK_CHANNEL",
    "channel_not_found": "set SLACK_CHANNEL to the id of a channel that the bot is in",
    "is_archived": "set SLACK_CHANNEL to a channel that is not archived",
    "restricted_action": "let the app post to SLACK_CHANNEL, in that channel's settings",
    "restricted_action_read_only_channel": "let the app post to SLACK_CHANNEL, in that channel's settings",
    "restricted_action_thread_only_channel": "set SLACK_CHANNEL to a channel that takes more than replies",
    "edit_window_closed": "let messages be edited at any time, in the workspace's settings",
    "is_inactive": "the card's channel is archived or gone: decide with `claim_flow.py resume`",
    "cant_update_message": "another app posted the card: set SLACK_BOT_TOKEN to the token of that one",
    "invalid_auth": "set SLACK_BOT_TOKEN to the app's bot token",
    "not_authed": "set SLACK_BOT_TOKEN to the app's bot token",
    "account_inactive": "install the app again and set SLACK_BOT_TOKEN",
    "token_revoked": "install the app again and set SLACK_BOT_TOKEN",
    "token_expired": "turn token rotation off and set SLACK_BOT_TOKEN",
    "missing_scope": "give the app the scopes of manifest.yml and install it again",
    "msg_blocks_too_long": "Slack takes less text: decide it on its page, and let its flow ask for less at once",
    "user_not_found": "take whoever is not in the team out of the tier's approvers",
    "user_not_visible": "take whoever is not in the team out of the tier's approvers",
    "user_disabled": "take whoever has left out of the tier's approvers",
    "cannot_dm_bot": "take the bot out of the tier's approvers",
    "messages_tab_disabled": "turn the app's messages tab on, under App Home",
}


# Slack's codes; whatever else it may say is not made a label.
_CODE = re.compile(r"[a-z_]{1,60}")

SEE_ERROR = "see the error at api.slack.com"

# What says that a token is good for nothing any more.
DEAD_TOKEN = {"invalid_auth", "not_authed", "account_inactive", "token_revoked", "token_expired"}
# And that the app is not installed there any more: `invalid_auth` is also said to an address that the workspace does
# not let in.
ENDED = {"account_inactive", "token_revoked"}


def fix_of(error: str, workspace: str | None, *, channel: str = "SLACK_CHANNEL") -> str:
    """What to do about an error of Slack's, where `channel` is the one that is meant; in this one of several."""
    fix = FIXES.get(error, SEE_ERROR)
    if workspace is None:
        return fix.replace("SLACK_CHANNEL", channel)
    if error in DEAD_TOKEN | {"missing_scope"}:
        return f"have the app installed in workspace {workspace} again: PUBLIC_URL/slack/install"
    there = channel if not channel.startswith("SLACK_") else f"its channel (claim_flow.py workspaces set {workspace})"
    return f"in workspace {workspace}: {fix.replace('SLACK_CHANNEL', there)}"


class CountingClient(AsyncWebClient):
    """Slack's own client, which counts what fails, and traces: every method ends in this one."""

    async def api_call(self, api_method: str, **asked: Any) -> AsyncSlackResponse:
        try:
            with span(f"slack {api_method}", kind="client") as call:
                try:
                    return await super().api_call(api_method, **asked)
                except SlackApiError as exc:
                    status, error, _ = read_error(exc)
                    code = error if _CODE.fullmatch(error) else f"http_{status}"
                    call.note(**{"slack.error": code})
                    counts.slack_errors.add(api_method, code)
                    raise
        except (aiohttp.ClientError, TimeoutError, OSError) as exc:
            counts.slack_errors.add(api_method, type(exc).__name__)
            raise


@contextlib.asynccontextmanager
async def slack_client(settings: Settings) -> AsyncIterator[AsyncWebClient]:
    """The client of the one bot token, with its connections kept open."""
    assert settings.slack_bot_token is not None
    async with slack_session() as session:
        yield client_with(settings.slack_bot_token.get_secret_value(), session, api_url=settings.slack_api_url)


def slack_session() -> aiohttp.ClientSession:
    """Connections to Slack, with time-outs of ours."""
    return aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=CALL_TIMEOUT_S))


def client_with(token: str | None, session: aiohttp.ClientSession, *, api_url: str) -> AsyncWebClient:
    """A client that makes no retries behind our back."""
    return CountingClient(
        token=token,
        base_url=api_url,
        session=session,
        retry_handlers=[],
    )


def is_refusal(exc: SlackApiError) -> bool:
    """Whether Slack has said no, for good. Else it is busy, or has failed and may have done what it was asked."""
    status, error, _ = read_error(exc)
    return status < 429 and bool(error) and error not in TROUBLES | RATE_LIMITS


def read_error(exc: SlackApiError) -> tuple[int, str, float | None]:
    """HTTP status (200 also for most refusals), Slack's error code (empty if the body was none), Retry-After in s."""
    response: Any = exc.response
    status = int(getattr(response, "status_code", 0) or getattr(response, "status", 0))
    data = getattr(response, "data", None)
    error = data.get("error", "") if isinstance(data, dict) else ""
    retry_after = (getattr(response, "headers", None) or {}).get("Retry-After")
    return status, str(error), float(retry_after) if retry_after and retry_after.isdigit() else None
