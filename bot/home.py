"""App Home: what waits for a person, what they asked for, and what was decided. Pure functions.

Format: https://api.slack.com/reference/surfaces/views; a view has at most 100 blocks, and this at most 76.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from bot.kit import (
    HEADER,
    OPTION,
    SECTION_TEXT,
    Block,
    as_dict,
    as_text,
    button,
    cut,
    is_hex,
    label,
    one_line,
    plain,
    safe,
    told,
)
from bot.lists import (
    PAGE,
    TITLES,
    ListName,
    Page,
    about,
    approval_row,
    can_approve_here,
    empty_line,
    paging,
    parse_turn,
    said_blocks,
    story_row,
    turn_value,
    waiting_row,
)
from flow.inbox import MOST_COUNTED
from flow.model import Approval
from flow.show import Story

# The `callback_id` of the modal that asks whether the chosen ones are to be approved.
BULK = "approve_selected"

_CHOSEN = "chosen"
_DIVIDER: Block = {"type": "divider"}
_NAME = 200
_NOTE = 1500

Ways = dict[ListName, tuple[str, ...]]


@dataclass(frozen=True, kw_only=True)
class Contents:
    """What one person's Home shows; `waiting` is how many wait for them on all pages, up to
    MOST_COUNTED."""

    waiting: int
    waits: Page[Approval]
    asked: Page[Story]
    decided: Page[Approval]


@dataclass(frozen=True, kw_only=True)
class Chosen:
    """A request that was ticked, as it was shown."""

    interrupt_id: str
    request_hash: str
    label: str


def home_view(contents: Contents, *, public_url: str | None, said: Sequence[str] = ()) -> dict[str, Any]:
    """The tab. `said` is what has just been done, a line each, escaped already."""
    waits = contents.waits
    blocks = [*_top(), *said_blocks(said)]
    # As many as are counted may be more.
    waiting = contents.waiting if contents.waiting < MOST_COUNTED else f"{MOST_COUNTED - 1}+"
    blocks.append(_header(f"{TITLES['waits']} ({waiting})"))
    blocks += [each for row in waits.rows for each in waiting_row(row, place="waits", public_url=public_url)]
    blocks += [*_nothing("waits", waits), *paging(waits, "waits"), *_bulk(waits.rows)]
    asked = [story_row(row, place="asked") for row in contents.asked.rows]
    blocks += [_DIVIDER, _header(TITLES["asked"]), *asked]
    blocks += [*_nothing("asked", contents.asked), *paging(contents.asked, "asked")]
    decided = [approval_row(row, place="decided") for row in contents.decided.rows]
    blocks += [_DIVIDER, _header(TITLES["decided"]), *decided]
    blocks += [*_nothing("decided", contents.decided), *paging(contents.decided, "decided")]
    blocks.append(label("Opening this tab shows what is true now."))
    ways: Ways = {"waits": waits.way, "asked": contents.asked.way, "decided": contents.decided.way}
    return {"type": "home", "private_metadata": ways_value(ways), "blocks": blocks}


def home_without_lists(said: Sequence[str], ways: Ways) -> dict[str, Any]:
    """The tab of somebody of whom it is not known what they may see. `ways` are kept for when it is."""
    return {"type": "home", "private_metadata": ways_value(ways), "blocks": [*_top(), *said_blocks(said)]}


def _top() -> list[Block]:
    buttons = [button("new-claim", "New claim", "new", "primary"), _refresh()]
    return [{"type": "actions", "block_id": "top", "elements": buttons}]


def ways_value(ways: Ways) -> str:
    return json.dumps([json.loads(turn_value(name, way)) for name, way in ways.items()], separators=(",", ":"))


def parse_ways(value: object) -> Ways:
    """Where each list of a Home stands; at its newest row, if that is not to be read."""
    try:
        given = json.loads(as_text(value))
    except (ValueError, RecursionError):
        return {}
    turns = [parse_turn(json.dumps(each)) for each in given] if isinstance(given, list) else []
    return {turn.name: turn.way for turn in turns if turn}


# Many at once


def chosen_of(values: object) -> list[Chosen]:
    """The requests that are ticked, from a view's `state.values`, whatever else is in there."""
    found = []
    for block in as_dict(values).values():
        options = as_dict(as_dict(block).get(_CHOSEN)).get("selected_options")
        for option in options if isinstance(options, list) else ():
            each = _chosen(
                as_text(as_dict(option).get("value")), as_text(as_dict(as_dict(option).get("text")).get("text"))
            )
            if each is not None:
                found.append(each)
    return found[:PAGE]


def bulk_view(chosen: Sequence[Chosen]) -> dict[str, Any]:
    """The modal that says how many, and which, before anything is approved."""
    many = f"{len(chosen)} requests" if len(chosen) != 1 else "1 request"
    lines = [told(f"• {one_line(each.label)}", SECTION_TEXT) for each in chosen]
    return {
        "type": "modal",
        "callback_id": BULK,
        "private_metadata": json.dumps(
            [[each.interrupt_id, each.request_hash, each.label] for each in chosen], ensure_ascii=False
        ),
        "title": plain(f"Approve {many}?", 24),
        "submit": plain(f"Approve {len(chosen)}", 24),
        "close": plain("Cancel", 24),
        "blocks": [
            *({"type": "section", "text": line} for line in lines),
            label(f"*{many}*, each for itself: it is final, and what is approved may be paid at once."),
        ],
    }


def parse_bulk(metadata: object) -> list[Chosen]:
    """What that modal asked about."""
    try:
        given = json.loads(as_text(metadata))
    except (ValueError, RecursionError):
        return []
    items = [each for each in given if isinstance(each, list) and len(each) == 3] if isinstance(given, list) else []
    found = [_chosen(f"{interrupt_id}:{digest}", as_text(text)) for interrupt_id, digest, text in items]
    return [each for each in found if each is not None][:PAGE]


def outcome_line(approval: Approval, note: str | None) -> str:
    """What became of one press: how the request stands, or why nothing was recorded."""
    what = f"{safe(about(approval), _NAME)} ({approval.thread_id})"
    if note is not None:
        return f"⚠️ {what}: {safe(note, _NOTE, rest='… (cut: the rest is too long for this place)')}"
    if approval.status == "pending":
        return f"✅ {what}: your vote counts, {approval.approvals_given} of {approval.required}"
    return f"{'❌' if approval.status == 'rejected' else '✅'} {what}: {approval.status}"


def _chosen(value: str, text: str) -> Chosen | None:
    interrupt_id, _, digest = value.partition(":")
    if not is_hex(interrupt_id, 32) or not is_hex(digest, 64):
        return None
    return Chosen(interrupt_id=interrupt_id, request_hash=digest, label=cut(one_line(text), OPTION) or interrupt_id)


def _bulk(rows: Sequence[Approval]) -> list[Block]:
    """A box for each that a press is enough for, if there is more than one."""
    options = [
        {
            "text": told(one_line(f"{about(row)} ({row.thread_id})"), OPTION),
            "value": f"{row.interrupt_id}:{row.request_hash}",
        }
        for row in rows
        if can_approve_here(row)
    ]
    if len(options) < 2:
        return []
    boxes: Block = {"type": "checkboxes", "action_id": _CHOSEN, "options": options}
    return [
        label("*Several at once*"),
        # Another page has other boxes, none of them ticked.
        {"type": "actions", "block_id": f"bulk-{rows[0].interrupt_id}", "elements": [boxes]},
        {
            "type": "actions",
            "block_id": "bulk",
            "elements": [button("approve-selected", "Approve selected…", "selected", "primary")],
        },
    ]


def _header(text: str) -> Block:
    return {"type": "header", "text": plain(text, HEADER)}


def _refresh() -> Block:
    return button("refresh", "Refresh", "refresh")


def _nothing(name: ListName, page: Page[Any]) -> list[Block]:
    return [] if page.rows else [empty_line(name)]
