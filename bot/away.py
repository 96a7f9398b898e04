"""What is typed after `/claims`, as values; and what is answered to it. Pure functions."""

from __future__ import annotations

import re
from dataclasses import dataclass

from bot.kit import date, escape, mention, safe
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


def away_note(made: Delegation, zone: str) -> str:
    """Who decides until when."""
    return f"🌴 {who_of(made.delegate)} decides for you until {date(made.until)} ({safe(zone, _NAME)} time)."


def delegate_note(made: Delegation) -> str:
    """The same for whoever decides meanwhile. It stays in their conversation with us."""
    absent = mention(bare_name(made.person), _NAME)
    return (
        f"🌴 {absent} is away, and you decide for them until {date(made.until)}. What waits is in App Home and in"
        f" `{COMMAND}`."
    )


def back_note(*, held: bool) -> str:
    return "👋 Nobody decides for you any more." if held else "Nobody was deciding for you."


def who_of(name: str) -> str:
    """A mention of a member of ours, and nobody else."""
    return f"<@{name}>" if is_member(name) else escape(name)
