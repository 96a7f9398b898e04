"""What is typed after `/claims`, as values; what is answered to it; and how a delegate is told."""

from __future__ import annotations

import re
from dataclasses import dataclass

import aiohttp
from slack_sdk.errors import SlackApiError
from slack_sdk.web.async_client import AsyncWebClient

from bot.kit import date, escape, mention, safe
from bot.slack_api import FIXES, SEE_ERROR, read_error
from flow.delegations import Delegation
from flow.errors import BadInput
from flow.policy import is_member
from flow.text import bare_name

COMMAND = "/claims"

_NAME = 120
_MENTION = re.compile(r"<@([UW][A-Z0-9]{2,})(?:\|[^>]*)?>")
USAGE = "write `/claims away @bob until friday`: a day, a date such as 2026-12-24, or a time such as 3 days."


@dataclass(frozen=True, kw_only=True)
class Away:
    """Somebody is to decide for whoever types; `until` is as they wrote it."""

    to: str
    until: str


def parse_away(text: str) -> Away:
    """What follows `away`: "@bob until friday". Raises BadInput, which says how to write it."""
    match = re.fullmatch(r"\s*(<[^>]*>|\S+)\s+(?:until\s+)?(\S.*?)\s*", text, re.DOTALL)
    if match is None:
        raise BadInput("/claims away", text, USAGE)
    who, until = match.groups()
    mention = _MENTION.fullmatch(who)
    if mention is None:
        why = "pick the person from the menu that opens when you type @" if who.startswith("@") else USAGE
        raise BadInput("/claims away", who, why)
    return Away(to=mention[1], until=until)


def away_note(made: Delegation, zone: str | None) -> str:
    """Who decides until when, and what. `zone` is where the last day ends, if that is known."""
    where = f" ({safe(zone, _NAME)} time)" if zone else ""
    return (
        f"🌴 {who_of(made.delegate)} decides for you until {date(made.until)}{where}:"
        " whatever lists you by your own id. What lists a user group that you are in stays with those who are in it."
    )


def delegate_note(made: Delegation) -> str:
    """The same for whoever decides meanwhile. It stays in their conversation with us."""
    absent = mention(bare_name(made.person), _NAME)
    return (
        f"🌴 {absent} is away, and you decide for them until {date(made.until)}. What waits is in App Home and in"
        f" `{COMMAND}`."
    )


async def tell_delegate(client: AsyncWebClient, made: Delegation) -> str | None:
    """Tell whoever decides meanwhile, in a direct message; why they were not, or None.

    It is no more than a courtesy: they decide all the same, and whoever is away has been told who does.
    """
    member = made.delegate.rpartition("/")[2]
    if not is_member(member):
        return "nobody of this name is in Slack"
    try:
        await client.chat_postMessage(channel=member, text=delegate_note(made), unfurl_links=False, unfurl_media=False)
    except SlackApiError as exc:
        error = read_error(exc)[1]
        return f"{error}: {FIXES.get(error, SEE_ERROR)}"
    except (aiohttp.ClientError, TimeoutError, OSError) as exc:
        return f"no answer from Slack ({type(exc).__name__})"
    return None


def back_note(*, held: bool) -> str:
    return "👋 Nobody decides for you any more." if held else "Nobody was deciding for you."


def who_of(name: str) -> str:
    """A mention of a member of ours, and nobody else."""
    return f"<@{name}>" if is_member(name) else escape(name)
