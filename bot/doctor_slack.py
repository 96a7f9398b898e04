"""`doctor` on Slack: tokens, scopes, channels and user groups; of one workspace, or of each of many."""

from __future__ import annotations

from collections.abc import AsyncIterator, Collection, Sequence
from dataclasses import replace

import aiohttp
from slack_sdk.errors import SlackApiError
from slack_sdk.web.async_client import AsyncWebClient
from slack_sdk.web.async_slack_response import AsyncSlackResponse

from bot.filers import is_address
from bot.findings import Finding
from bot.groups import OwnTeam, groups_in
from bot.slack_api import DIRECT_SCOPES, GROUP_SCOPES, SCOPES, fix_of, read_error, slack_client
from bot.workspaces import Clients
from flow.database import connect
from flow.errors import FlowError, SettingError, TokenUnreadable
from flow.policy import Tier, is_group, parse_policy, policy_of
from flow.settings import Settings, names_in
from flow.workspaces import Workspace, workspaces

_NO_ANSWER = (SlackApiError, aiohttp.ClientError, TimeoutError, OSError)

# For addresses among FILERS; manifest.yml does not ask for it.
_ADDRESS_SCOPES = ("users:read.email",)


async def slack_findings(settings: Settings, url: str | None) -> AsyncIterator[Finding]:
    """Slack as it is here: one workspace, many (which takes the database at `url`), or off."""
    if settings.many_workspaces:
        async for finding in _many(settings, url):
            yield finding
    elif settings.slack_is_on:
        async for finding in _one(settings):
            yield finding
    else:
        fix = "to turn it on, see SLACK_BOT_TOKEN and what belongs to it in .env.example"
        yield Finding(what="Slack", ok=True, found="off", fix=fix)


async def _many(settings: Settings, url: str | None) -> AsyncIterator[Finding]:
    """Each workspace, by itself."""
    if url is None:
        return
    async with await connect(url, "door") as conn:
        rows = await workspaces(conn)
    if not rows:
        fix = f"install the app at {settings.public_url}/slack/install"
        yield Finding(what="workspaces", ok=True, found="none", fix=fix)
    try:
        async with Clients.of(settings) as clients:
            for row in rows:
                async for finding in _workspace(settings, clients, row):
                    yield replace(finding, what=f"{row.workspace} ({row.name}): {finding.what}")
    except SettingError as exc:
        yield Finding(what="TOKEN_KEYS", ok=False, found=str(exc), fix="see TOKEN_KEYS in .env.example")


async def _workspace(settings: Settings, clients: Clients, row: Workspace) -> AsyncIterator[Finding]:
    if not row.is_installed:
        yield Finding(what="token", ok=True, found=f"uninstalled since {row.uninstalled_at:%Y-%m-%d %H:%M}")
        return
    yield _policy(row)
    try:
        client = clients.client(row)
        who = await client.auth_test()
    except TokenUnreadable as exc:
        yield Finding(what="token", ok=False, found="none of TOKEN_KEYS opens it", fix=str(exc))
        return
    except _NO_ANSWER as exc:
        yield _refused("token", settings, exc, workspace=row.workspace)
        return
    yield Finding(what="token", ok=True, found=f"{who['user']} in {who['team']}")
    tiers, filers = [row.rules.tier(name) for name in row.rules.names], names_in(row.filers)
    if finding := _scopes(who, tiers, filers, workspace=row.workspace):
        yield finding
    if row.channel is None:
        fix = f"claim_flow.py workspaces set {row.workspace} --channel C0123456789"
        yield Finding(what="channel", ok=False, found="none: nothing is posted there", fix=fix)
    channels = {"channel": row.channel, "the operators' channel": row.ops_channel}
    for name, channel in (channels | {f"the channel of tier {tier.name}": tier.channel for tier in tiers}).items():
        if channel is not None:
            yield await _channel(client, settings, name, channel, workspace=row.workspace)
    if groups := [*groups_in(tiers), *sorted(filter(is_group, filers))]:
        yield await _groups(client, settings, groups)


def _policy(row: Workspace) -> Finding:
    fix = f"claim_flow.py workspaces set {row.workspace} --policy FILE"
    if row.policy is None:
        return Finding(what="policy", ok=False, found="none: nothing is filed there", fix=fix)
    try:
        policy = parse_policy(row.policy, named="it")
    except SettingError as exc:
        return Finding(what="policy", ok=False, found=f"{exc}: nobody is asked", fix=fix)
    ok = all(policy.tier(name).approvers for name in policy.names)
    fix = "" if ok else "give the tier approvers, or only the command line can decide"
    return Finding(what="policy", ok=ok, found="; ".join(policy.words), fix=fix)


async def _one(settings: Settings) -> AsyncIterator[Finding]:
    assert settings.slack_channel is not None
    async with slack_client(settings) as client:
        try:
            who = await client.auth_test()
        except _NO_ANSWER as exc:
            yield _refused("Slack token", settings, exc)
            return
        yield Finding(what="Slack token", ok=True, found=f"{who['user']} in {who['team']}")
        tiers = _tiers(settings)
        if finding := _scopes(who, tiers, settings.filer_names):
            yield finding
        channels = {"SLACK_CHANNEL": settings.slack_channel, "SLACK_OPS_CHANNEL": settings.slack_ops_channel}
        channels |= {f"the channel of tier {tier.name}": tier.channel for tier in tiers}
        for name, channel in channels.items():
            if channel is not None:
                yield await _channel(client, settings, name, channel)
        if groups := [*groups_in(tiers), *sorted(filter(is_group, settings.filer_names))]:
            yield await _groups(client, settings, groups)
        if settings.slack_app_token is not None:
            yield await _app_token(client, settings, settings.slack_app_token.get_secret_value())


def _tiers(settings: Settings) -> list[Tier]:
    """The policy's; none if it cannot be read, which is a finding of its own."""
    try:
        policy = policy_of(settings)
    except FlowError:
        return []
    return [policy.tier(name) for name in policy.names]


def _scopes(
    who: AsyncSlackResponse, tiers: Sequence[Tier], filers: Collection[str], *, workspace: str | None = None
) -> Finding | None:
    """Whether the token may do what the bot, this policy and FILERS need; None if Slack does not say.

    Format: https://api.slack.com/authentication/oauth-v2#check
    """
    said = who.headers.get("x-oauth-scopes")
    if said is None:
        return None
    scopes = {scope.strip() for scope in said.split(",")}
    needed = [*SCOPES]
    if groups_in(tiers) or any(map(is_group, filers)):
        needed += GROUP_SCOPES
    if any(tier.post_to != "channel" for tier in tiers):
        needed += DIRECT_SCOPES
    if any(is_address(name) for name in filers):
        needed += _ADDRESS_SCOPES
    missing = [name for name in needed if name not in scopes]
    if missing:
        fix = fix_of("missing_scope", workspace)
        return Finding(what="Slack scopes", ok=False, found=f"{', '.join(missing)} missing", fix=fix)
    return Finding(what="Slack scopes", ok=True, found="as in manifest.yml")


async def _channel(
    client: AsyncWebClient, settings: Settings, name: str, channel: str, *, workspace: str | None = None
) -> Finding:
    try:
        # History, not info: it needs no scope beyond those that delivering needs, and tells membership too.
        await client.conversations_history(channel=channel, limit=1)
    except _NO_ANSWER as exc:
        return _refused(name, settings, exc, workspace=workspace)
    return Finding(what=name, ok=True, found=f"{channel}, and the bot is in it")


async def _groups(client: AsyncWebClient, settings: Settings, groups: Sequence[str]) -> Finding:
    try:
        known = await OwnTeam(client).groups()
    except _NO_ANSWER as exc:
        return _refused("Slack user groups", settings, exc)
    missing = ", ".join(name for name in groups if name not in known)
    if missing:
        fix = "correct the approvers (or FILERS), or make the group in Slack: until then it names nobody"
        return Finding(what="Slack user groups", ok=False, found=f"Slack has no {missing}", fix=fix)
    return Finding(what="Slack user groups", ok=True, found=", ".join(groups))


async def _app_token(client: AsyncWebClient, settings: Settings, token: str) -> Finding:
    try:
        await client.apps_connections_open(app_token=token)
    except _NO_ANSWER as exc:
        wanted = "set SLACK_APP_TOKEN to an app-level token with the scope connections:write"
        return _refused("SLACK_APP_TOKEN", settings, exc, fix=wanted)
    return Finding(what="SLACK_APP_TOKEN", ok=True, found="Socket Mode can connect")


def _refused(
    what: str, settings: Settings, exc: Exception, *, fix: str | None = None, workspace: str | None = None
) -> Finding:
    if isinstance(exc, SlackApiError):
        error = read_error(exc)[1] or str(exc)
        return Finding(what=what, ok=False, found=error, fix=fix or fix_of(error, workspace, channel=what))
    found = f"no answer from {settings.slack_api_url} ({type(exc).__name__})"
    return Finding(what=what, ok=False, found=found, fix="check the network, and SLACK_API_URL if it is set")
