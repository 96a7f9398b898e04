"""What cards and modals are made of: Block Kit's texts, a stranger's text made safe for them, and payloads read safely.

Formats: https://api.slack.com/reference/block-kit/composition-objects
"""

from __future__ import annotations

import re
from datetime import UTC, datetime
from decimal import Decimal
from typing import Any

from flow.policy import is_group, is_member
from flow.text import visible

Block = dict[str, Any]

# Block Kit's limits, in characters: https://api.slack.com/reference/block-kit/blocks
HEADER = 150
SECTION_TEXT = 3000
FIELD = 2000
BUTTON = 75
CONFIRM = 300
HINT = 2000
OPTION = 75


# Nobody is paid more.
_MOST_DIGITS = 30


def escape(text: str) -> str:
    """Text with Slack's three control characters disarmed: no mention, no link. Escape last, after cutting."""
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def date(at: datetime) -> str:
    """A time that Slack shows in the reader's own zone (in mrkdwn only)."""
    return f"<!date^{int(at.timestamp())}^{{date_short_pretty}} at {{time}}|{at.astimezone(UTC):%Y-%m-%d %H:%M} UTC>"


def label(text: str) -> Block:
    """A line of our own words above what it is about."""
    return {"type": "context", "elements": [mrkdwn(text, FIELD)]}


def text_input(name: str, text: str, *, optional: bool = False, hint: str = "", **element: Any) -> Block:
    """A field of a form to write in."""
    return form_field(name, text, {"type": "plain_text_input", **element}, optional=optional, hint=hint)


def form_field(name: str, text: str, element: Block, *, optional: bool = False, hint: str = "") -> Block:
    """A field of a form; its block has the name of its action, which errors are said by."""
    field: Block = {
        "type": "input",
        "block_id": name,
        "label": told(text, HEADER),
        "element": {**element, "action_id": name},
        "optional": optional,
    }
    return field | ({"hint": told(hint, HINT)} if hint else {})


def typed_text(values: Any, name: str) -> str:
    """What was typed into that field, by a submission's `state.values`; empty for whatever else is in there."""
    text = as_text(as_dict(as_dict(as_dict(values).get(name)).get(name)).get("value"))
    return text.replace("\r\n", "\n").strip()


def ago(at: datetime) -> str:
    """How long it is since, as Slack says it to each reader (in mrkdwn only)."""
    return f"<!date^{int(at.timestamp())}^{{ago}}|{at:%Y-%m-%d %H:%M} UTC>"


def safe(text: str, longest: int, *, rest: str = "…") -> str:
    """A stranger's text inside our own sentence: visible, one line, cut, then escaped, and no longer than that then."""
    return escape(fitted(one_line(text), longest, rest=rest))


def money(amount: object, currency: object) -> str:
    """1,250.00 USD. What somebody made unreadable in the database is said to be so, and hides nothing beside it."""
    try:
        read = Decimal(str(amount))
    except ArithmeticError:
        return "an amount that cannot be read"
    if not read.is_finite() or abs(read.adjusted()) > _MOST_DIGITS:
        return "an amount that cannot be read"
    return f"{read:,f} {currency}"


def mention(name: str, longest: int) -> str:
    """A member of ours, or a user group, as Slack shows them by their id (in mrkdwn only), anybody else by their name.

    Whoever is named with a team may share the id with one of ours, and nobody here is to be called in their place: see
    `bot.people.as_named_here`.
    """
    if is_member(name):
        return f"<@{name}>"
    return f"<!subteam^{name}>" if is_group(name) and not name.startswith("@") else safe(name, longest)


def one_line(text: str) -> str:
    """Visible and without a line of its own, which could pass for one of ours."""
    return " ".join(visible(text).split())


def fitting(lines: list[str], longest: int) -> list[str]:
    """As many whole lines as there is room for: a cut inside one could leave half an escape."""
    kept = [line for number, line in enumerate(lines) if len("\n".join(lines[: number + 1])) < longest - 20]
    return kept if len(kept) == len(lines) else [*kept, f"… and {len(lines) - len(kept)} more"]


def plain(text: str, longest: int) -> Block:
    """A text cut to what Slack takes, which counts after escaping: an "&" is five characters."""
    return {"type": "plain_text", "text": fitted(visible(text), longest), "emoji": False}


def told(text: str, longest: int, *, rest: str = "…") -> Block:
    """The same, never blank, `rest` standing for what is cut."""
    shown = visible(text)
    shown = shown if shown.strip() else "–"
    return {"type": "plain_text", "text": fitted(shown, longest, rest=rest), "emoji": False}


def in_full(text: str) -> list[Block]:
    """A stranger's text of any length over as many sections as it takes; none if it is blank."""
    rest, sections = visible(text), []
    while rest.strip():
        kept = _room_for(rest, SECTION_TEXT)
        # Slack takes no blank text, and nobody misses it.
        if rest[:kept].strip():
            sections.append({"type": "section", "text": {"type": "plain_text", "text": rest[:kept], "emoji": False}})
        rest = rest[kept:]
    return sections


def length_of(part: object) -> int:
    """How many characters all texts within blocks, or a part of one, have together once they are escaped."""
    if isinstance(part, list):
        return sum(map(length_of, part))
    if not isinstance(part, dict):
        return 0
    if part.get("type") in ("plain_text", "mrkdwn"):
        return len(escape(part["text"]) if part["type"] == "plain_text" else part["text"])
    return length_of([*part.values()])


def fitted(text: str, longest: int, *, rest: str = "…") -> str:
    """The text, cut so that it is no longer than that once it is escaped."""
    if len(escape(text)) <= longest:
        return text
    return text[: _room_for(text, longest - len(rest))] + rest


def _room_for(text: str, longest: int) -> int:
    """How many of the text's characters fit."""
    kept = 0
    while kept < len(text) and (longest := longest - len(escape(text[kept]))) >= 0:
        kept += 1
    return kept


def button(action_id: str, text: str, value: str, style: str | None = None, *, ask: str | None = None) -> Block:
    """A button of ours. `ask` is what Slack asks back before it sends the press."""
    made: Block = {"type": "button", "action_id": action_id, "text": told(text, BUTTON), "value": value}
    if style:
        made["style"] = style
    if ask:
        made["confirm"] = {
            "title": told("Are you sure?", BUTTON),
            "text": told(ask, CONFIRM),
            "confirm": told(text.rstrip("…"), 30),
            "deny": told("Cancel", 30),
        }
    return made


def page_button(text: str, url: str) -> Block:
    """A button that opens a page. Slack tells us of the press, too."""
    return {"type": "button", "action_id": "page", "text": told(text, BUTTON), "url": url}


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
