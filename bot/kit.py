"""What cards and modals are made of: Block Kit's texts, a stranger's text made safe for them, and payloads read safely.

Formats: https://api.slack.com/reference/block-kit/composition-objects
"""

from __future__ import annotations

import re
from datetime import UTC, datetime
from typing import Any

from flow.text import visible

Block = dict[str, Any]

# Block Kit's limits, in characters: https://api.slack.com/reference/block-kit/blocks
HEADER = 150
SECTION_TEXT = 3000
FIELD = 2000
BUTTON = 75


def escape(text: str) -> str:
    """Text with Slack's three control characters disarmed: no mention, no link. Escape last, after cutting."""
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def date(at: datetime) -> str:
    """A time that Slack shows in the reader's own zone (in mrkdwn only)."""
    return f"<!date^{int(at.timestamp())}^{{date_short_pretty}} at {{time}}|{at.astimezone(UTC):%Y-%m-%d %H:%M} UTC>"


def label(text: str) -> Block:
    """A line of our own words above what it is about."""
    return {"type": "context", "elements": [mrkdwn(text, FIELD)]}


def safe(text: str, longest: int) -> str:
    """A stranger's text inside our own sentence: visible, one line, cut, then escaped."""
    return escape(cut(one_line(text), longest))


def one_line(text: str) -> str:
    """Visible and without a line of its own, which could pass for one of ours."""
    return " ".join(visible(text).split())


def fitting(lines: list[str], longest: int) -> list[str]:
    """As many whole lines as there is room for: a cut inside one could leave half an escape."""
    kept = [line for number, line in enumerate(lines) if len("\n".join(lines[: number + 1])) < longest - 20]
    return kept if len(kept) == len(lines) else [*kept, f"… and {len(lines) - len(kept)} more"]


def plain(text: str, longest: int) -> Block:
    return {"type": "plain_text", "text": cut(visible(text), longest), "emoji": False}


def told(text: str, longest: int, *, rest: str = "…") -> Block:
    """A stranger's text of any length, never blank, cut to what Slack takes; Slack counts after escaping."""
    shown = visible(text)
    shown = shown if shown.strip() else "–"
    return {"type": "plain_text", "text": _fitted(shown, longest, rest), "emoji": False}


def _fitted(text: str, longest: int, rest: str) -> str:
    if len(escape(text)) <= longest:
        return text
    room, kept = longest - len(rest), 0
    while (room := room - len(escape(text[kept]))) >= 0:
        kept += 1
    return text[:kept] + rest


def mrkdwn(text: str, longest: int) -> Block:
    assert len(text) <= longest, len(text)
    return {"type": "mrkdwn", "text": text, "verbatim": True}


def cut(text: str, longest: int) -> str:
    return text if len(text) <= longest else text[: longest - 1] + "…"


def is_id(value: object) -> bool:
    """Whether it looks like one of Slack's ids or timestamps."""
    return isinstance(value, str) and re.fullmatch(r"[A-Za-z0-9.]{1,100}", value) is not None


def as_text(value: object) -> str:
    return value if isinstance(value, str) else ""


def as_id(value: object) -> str | None:
    """One of Slack's ids or timestamps; None for whatever else stands in its place."""
    return str(value) if is_id(value) else None


def is_hex(value: object, digits: int) -> bool:
    return isinstance(value, str) and re.fullmatch(rf"[0-9a-f]{{{digits}}}", value) is not None


def first_of(value: object) -> dict[str, Any]:
    return as_dict(value[0]) if isinstance(value, list) and value else {}


def as_dict(value: object) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}
