"""`doctor`: looks at the surroundings and says what to fix."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import asdict, dataclass
from typing import Any

import aiohttp
import psycopg
from slack_sdk.errors import SlackApiError

from bot.slack_api import FIXES, read_error, slack_client
from flow.database import check_locks, connect, database_url, ensure_schema
from flow.errors import FlowError
from flow.settings import Settings


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One thing that was looked at."""

    what: str
    ok: bool
    found: str
    fix: str = ""

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


async def examine(settings: Settings) -> AsyncIterator[Finding]:
    """Everything that can be wrong outside of us, in the order in which it matters."""
    url, finding = await _database(settings)
    yield finding
    if url is not None:
        yield await _locks(url)
    if not settings.slack_is_on:
        yield Finding(
            what="Slack",
            ok=True,
            found="off",
            fix="to turn it on, see SLACK_BOT_TOKEN and what belongs to it in .env.example",
        )
        return
    yield _approvers(settings)
    async for finding in _slack(settings):
        yield finding


async def _database(settings: Settings) -> tuple[str | None, Finding]:
    try:
        url = database_url(settings)
        async with await connect(url, "door") as conn:
            await ensure_schema(url, conn)
            where = "embedded" if settings.database_url is None else "DATABASE_URL"
            version = conn.info.server_version
            found = f"Postgres {version // 10000}.{version % 10000} ({where}), tables up to date"
    except (FlowError, psycopg.Error) as exc:
        return None, Finding(what="database", ok=False, found=str(exc), fix="set DATABASE_URL, or unset it")
    return url, Finding(what="database", ok=True, found=found)


async def _locks(url: str) -> Finding:
    try:
        await check_locks(url)
    except FlowError as exc:
        return Finding(what="locks", ok=False, found=str(exc), fix="connect to the server itself, not to a pooler")
    return Finding(what="locks", ok=True, found="they hold through this connection")


def _approvers(settings: Settings) -> Finding:
    if not settings.approvers:
        return Finding(
            what="approvers", ok=False, found="none: every click will be refused", fix="set APPROVERS to member ids"
        )
    return Finding(what="approvers", ok=True, found=", ".join(settings.approver_names))


async def _slack(settings: Settings) -> AsyncIterator[Finding]:
    assert settings.slack_channel is not None
    async with slack_client(settings) as client:
        try:
            who = await client.auth_test()
            yield Finding(what="Slack token", ok=True, found=f"{who['user']} in {who['team']}")
            # History, not info: it needs no scope beyond those that delivering needs, and tells membership too.
            await client.conversations_history(channel=settings.slack_channel, limit=1)
            yield Finding(what="Slack channel", ok=True, found=settings.slack_channel)
        except SlackApiError as exc:
            error = read_error(exc)[1] or str(exc)
            yield Finding(what="Slack", ok=False, found=error, fix=FIXES.get(error, "see the error at api.slack.com"))
        except (aiohttp.ClientError, TimeoutError, OSError) as exc:
            yield Finding(
                what="Slack",
                ok=False,
                found=f"no answer from {settings.slack_api_url} ({type(exc).__name__})",
                fix="check the network, and SLACK_API_URL if it is set",
            )
