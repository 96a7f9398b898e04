"""Requests and claims as rows of a list in Slack, and the private lists of `/claims`: pure functions.

A list is read page by page. What its buttons carry is the way that led to the page, so nothing is kept between two
presses: the places where each page began, the first of which is the newest row's and is left out.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Generic, Literal, TypeVar, get_args

from bot.blocks import page_of as page_of_request
from bot.blocks import value_of
from bot.kit import (
    SECTION_TEXT,
    Block,
    ago,
    as_dict,
    as_text,
    button,
    fitting,
    label,
    mention,
    money,
    mrkdwn,
    one_line,
    page_button,
    safe,
)
from bot.outcomes import CHANGED
from bot.questions import subject_of
from flow.inbox import place_named, place_of
from flow.model import Approval
from flow.questions import Question, question_of
from flow.show import Story

T = TypeVar("T")

ListName = Literal["waits", "asked", "all", "decided"]

PAGE = 10
_NAMES: dict[str, ListName] = {name: name for name in get_args(ListName)}
# What the buttons carry stays far below Slack's 2,000 characters, three ways below a view's 3,000. What is left out of
# a long way is its beginning: then "Previous" leads from there to the newest.
_WAY = 800

_NAME = 100
_SUMMARY = 2000

TITLES: dict[ListName, str] = {
    "waits": "Waits for you",
    "asked": "You asked for",
    "all": "All that you may see",
    "decided": "Recent decisions",
}
_EMPTY: dict[ListName, str] = {
    "waits": "Nothing waits for you.",
    "asked": "You have asked for nothing yet.",
    "all": "There is nothing that you may see.",
    "decided": "Nothing has been decided yet.",
}
_MARKS = {
    "paid": "💸", "approved": "✅", "rejected": "❌", "expired": "⌛", "withdrawn": "↩️", "superseded": "🔁",
    "pending": "⏳", "waiting": "⏳", "running": "⏳", "done": "✅",
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Page(Generic[T]):
    """Some rows of a list. `way` are the places where this page and those before it begin; empty: the newest."""

    rows: Sequence[T]
    way: tuple[str, ...] = ()
    # Where the next page begins; None if there is none.
    following: str | None = None


@dataclass(frozen=True, kw_only=True)
class Turn:
    """A page of a list that somebody wants."""

    name: ListName
    way: tuple[str, ...]

    @property
    def before(self) -> tuple[datetime, str] | None:
        """As `flow.inbox` takes it."""
        return place_named(self.way[-1]) if self.way else None


def page_of(found: Sequence[T], way: tuple[str, ...], place: Callable[[T], str]) -> Page[T]:
    """The page, of up to PAGE + 1 rows that were found from its beginning on."""
    rows = found[:PAGE]
    return Page(rows=rows, way=way, following=place(rows[-1]) if len(found) > PAGE else None)


def place_of_approval(approval: Approval) -> str:
    return place_of(approval.requested_at, approval.interrupt_id)


def place_of_story(story: Story) -> str:
    return place_of(story.thread.created_at, story.thread.thread_id)


# What buttons carry


def turn_value(name: ListName, way: Sequence[str]) -> str:
    kept = list(way)
    while sum(len(place) + 3 for place in kept) > _WAY:
        kept.pop(0)
    return json.dumps({"list": name, "way": kept}, separators=(",", ":"))


def parse_turn(value: str) -> Turn | None:
    """The page that a value of ours names; None for any other value."""
    try:
        given = as_dict(json.loads(value))
    except (ValueError, RecursionError):
        return None
    name, way = _NAMES.get(as_text(given.get("list"))), given.get("way")
    if name is None or not isinstance(way, list):
        return None
    if not all(isinstance(place, str) and place_named(place) for place in way):
        return None
    return Turn(name=name, way=tuple(way))


# Rows


def about(approval: Approval) -> str:
    """What is asked, in a few words of anybody's: "250.00 USD to ACME"."""
    if approval.tampered:
        return CHANGED
    question = _question(approval)
    if question is None:
        return "a request that cannot be read"
    if question.kind != "claim":
        return str(subject_of(question))
    amount = money(question.amount, question.currency)
    return f"{amount} to {question.payee}" if question.payee else amount


def can_approve_here(approval: Approval) -> bool:
    """Whether a press is enough: there is nothing else to say, and no page to be looked at."""
    question = _question(approval)
    return question is not None and question.can_approve and not approval.step_up


def _question(approval: Approval) -> Question | None:
    """What is asked; None if somebody has made it unreadable in the database. The other rows are shown all the same."""
    try:
        return question_of(approval.request)
    except (AttributeError, KeyError, TypeError, ValueError):
        return None


def waiting_row(approval: Approval, *, place: str, public_url: str | None, turn: str | None = None) -> list[Block]:
    """A request that the reader can decide. `place` makes its block's name; `turn` is the page that it is on."""
    more = {} if turn is None else {"turn": turn}
    value = value_of(approval, **more)
    buttons: list[Block] = []
    if can_approve_here(approval):
        # Above the first tier one press is one too few.
        ask = f"{one_line(about(approval))}. An approval is final." if approval.rank > 0 else None
        buttons.append(button("approve", "Approve", value, "primary", ask=ask))
    elif approval.step_up and public_url is not None:
        buttons.append(page_button("Approve on the page…", page_of_request(approval, public_url)))
    question = _question(approval)
    if question is not None and question.can_reject:
        buttons.append(button("reject", "Reject", value, "danger"))
    buttons.append(button("details", "Details", value))
    text = f"{_headline(approval)}\n{_by(approval)}"
    if approval.step_up and public_url is None:
        text += "\nThis much is approved on its page only, and PUBLIC_URL is not set: ask whoever runs this."
    return [
        {"type": "section", "text": mrkdwn(text, SECTION_TEXT)},
        {"type": "actions", "block_id": f"{place}-{approval.interrupt_id}", "elements": buttons},
    ]


def approval_row(approval: Approval, *, place: str, turn: str | None = None) -> Block:
    """A request to look at. `turn` is the page that it is on, of a list that can be replaced."""
    text = f"{_mark(approval)} {_headline(approval)} · {_outcome(approval)}\n{_by(approval)}"
    return _row(text, f"{place}-{approval.interrupt_id}", approval, turn)


def story_row(story: Story, *, place: str, turn: str | None = None) -> Block:
    """What the reader filed, and how far it is."""
    thread, approval = story.thread, story.approval
    what = safe(_filed(story), _NAME * 2)
    status = thread.status
    if approval is not None and approval.tampered:
        status = "nobody can decide it"
    elif approval is not None and approval.status == "pending" and status == "waiting":
        status = f"waiting for {safe(approval.tier, _NAME)} ({approval.approvals_given} of {approval.required})"
    elif approval is not None and (approval.settled_by is not None or approval.status not in ("pending", status)):
        status += f", {_outcome(approval)}"
    mark = _mark(approval) if approval is not None and approval.tampered else _MARKS.get(thread.status, "⚠️")
    text = f"{mark} *{what}* · {status}\nthread {thread.thread_id} · {ago(thread.created_at)}"
    return _row(text, f"{place}-{approval.interrupt_id if approval else thread.thread_id}", approval, turn)


def _mark(approval: Approval) -> str:
    return "⛔" if approval.tampered else _MARKS.get(approval.status, "•")


def _filed(story: Story) -> str:
    if story.approval is not None and story.approval.tampered:
        return CHANGED
    try:
        return f"{story.title} to {story.payee}" if story.payee else story.title
    except (AttributeError, KeyError, TypeError, ValueError):
        return "a request that cannot be read"


def _row(text: str, block_id: str, approval: Approval | None, turn: str | None) -> Block:
    row: Block = {"type": "section", "block_id": block_id, "text": mrkdwn(text, SECTION_TEXT)}
    if approval is None:
        return row
    more = {} if turn is None else {"turn": turn}
    return row | {"accessory": button("details", "Details", value_of(approval, **more))}


def _headline(approval: Approval) -> str:
    return f"*{safe(about(approval), _NAME * 2)}*"


def _by(approval: Approval) -> str:
    if approval.tampered:
        return f"thread {approval.thread_id} · asked {ago(approval.requested_at)}"
    asked = f"asked by {mention(approval.requested_by, _NAME)} {ago(approval.requested_at)}"
    return f"{safe(approval.tier, _NAME)} · {asked} · thread {approval.thread_id}"


def _outcome(approval: Approval) -> str:
    by = approval.settled_by
    if by is not None:
        return f"{approval.status} by {safe(by.who, _NAME)}"
    if approval.tampered:
        return "nobody can decide it"
    if approval.status == "pending":
        return f"{approval.approvals_given} of {approval.required} approvals"
    return approval.status


# Paging


def paging(page: Page[Any], name: ListName) -> list[Block]:
    """The buttons to the pages before and after this one."""
    buttons = []
    if page.way:
        buttons.append(button("page-previous", "Previous", turn_value(name, page.way[:-1])))
    if page.following is not None:
        buttons.append(button("page-next", "Next page", turn_value(name, (*page.way, page.following))))
    return [{"type": "actions", "block_id": f"page-{name}", "elements": buttons}] if buttons else []


# The private lists

HELP = (
    "`/claims` what waits for you · `/claims mine` what you filed · `/claims all` all that you may see"
    " · `/claims new` file a claim · `/claims away @bob until friday` somebody decides for you · `/claims back`"
)


def approvals_list(
    page: Page[Approval], name: ListName, *, open_ids: frozenset[str], public_url: str | None, said: Sequence[str] = ()
) -> tuple[str, list[Block]]:
    """A list of requests: its text, and its blocks. Those of `open_ids` can be decided by the reader."""
    turn = turn_value(name, page.way)
    rows: list[Block] = []
    for approval in page.rows:
        if approval.interrupt_id in open_ids:
            rows += waiting_row(approval, place="list", public_url=public_url, turn=turn)
        else:
            rows.append(approval_row(approval, place="list", turn=turn))
    return _listed(page, name, [about(each) for each in page.rows], rows, said)


def stories_list(page: Page[Story], *, said: Sequence[str] = ()) -> tuple[str, list[Block]]:
    """The same for what the reader filed."""
    turn = turn_value("asked", page.way)
    rows = [story_row(story, place="list", turn=turn) for story in page.rows]
    lines = [f"{_filed(story)}: {story.thread.status}" for story in page.rows]
    return _listed(page, "asked", lines, rows, said)


def _listed(
    page: Page[Any], name: ListName, lines: Sequence[str], rows: list[Block], said: Sequence[str]
) -> tuple[str, list[Block]]:
    heads: list[Block] = [*said_blocks(said), {"type": "section", "text": mrkdwn(f"*{TITLES[name]}*", SECTION_TEXT)}]
    empty = [] if rows else [label(_EMPTY[name])]
    text = "\n".join([TITLES[name], *fitting([safe(line, _NAME * 2) for line in lines], _SUMMARY)])
    return text, [*heads, *rows, *empty, *paging(page, name), label(HELP)]


def said_blocks(said: Sequence[str]) -> list[Block]:
    """What has just been done, each in a block of its own: together they could be longer than Slack takes."""
    return [{"type": "section", "text": mrkdwn(line, SECTION_TEXT)} for line in said]


def empty_line(name: ListName) -> Block:
    return label(_EMPTY[name])
