"""Slack's rules for a message with blocks, as far as cards use them, checked strictly: what is not known is wrong.

Rules: https://api.slack.com/reference/block-kit/blocks, https://api.slack.com/reference/block-kit/block-elements and
https://api.slack.com/reference/block-kit/composition-objects. Slack counts a text after escaping, so plain text is
counted as if each of its `&<>` were an entity, although it is sent as it is.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Collection, Iterator
from typing import Any

# chat.update takes no longer text; chat.postMessage would.
LONGEST_TEXT = 4000
MOST_BLOCKS = 50
# The texts of a posted message together. Slack does not say how many characters it takes, and has refused 11,341:
# https://github.com/slackapi/bolt-js/issues/2867. What answers a command or a press is not counted so.
LONGEST_IN_ALL = 10_000

# The buttons of a claim's card.
WAITING = ["approve", "reject", "change-amount", "details"]
SETTLED = ["details"]

_ENTITIES = {"&": "&amp;", "<": "&lt;", ">": "&gt;"}
# A token that a card may hold: https://api.slack.com/reference/surfaces/formatting#date-formatting
_DATE = re.compile(r"<!date\^\d+\^[^<>&|^]+\|[^<>&|^]+>")
# Another, where a member is named by us: https://api.slack.com/reference/surfaces/formatting#mentioning-users
_MENTION = re.compile(r"<@([UW][A-Z0-9]+)>")
_ENTITY = re.compile(r"&(?:amp|lt|gt);")


def findings(
    text: str, blocks: list[dict[str, Any]], *, mentions: Collection[str] = (), one_each: bool = True
) -> list[str]:
    """What Slack, or we, would refuse in this message; each with its place. Empty: it is fine.

    `mentions` are the members that we mean to mention; any other mention is a stranger's. `one_each`: it is a card,
    which is posted, and has no action twice; in a list each is once in a block.
    """
    actions = _actions_of(blocks)
    length = length_in_all(blocks)
    return [
        *_text_findings("text", text, LONGEST_TEXT),
        *_mrkdwn_findings("text", text),
        *_mention_findings([text, *(each["text"] for each in texts(blocks) if each["type"] == "mrkdwn")], mentions),
        *_count_findings("blocks", blocks, MOST_BLOCKS),
        *([f"blocks: {length} characters in all"] if one_each and length > LONGEST_IN_ALL else []),
        *_repeated("block_id", [block.get("block_id") for block in blocks]),
        *(
            found
            for ids in ([[*itertools.chain(*actions)]] if one_each else actions)
            for found in _repeated("action_id", ids)
        ),
        *(found for number, block in enumerate(blocks) for found in _block_findings(f"blocks[{number}]", block)),
    ]


def _actions_of(blocks: list[dict[str, Any]]) -> list[list[str | None]]:
    """The action ids of each block."""
    return [
        [each.get("action_id") for each in (*block.get("elements", []), block.get("accessory", {}))] for block in blocks
    ]


def texts(blocks: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Every text object, wherever it stands."""
    for block in blocks:
        inside = (block.get("text"), *block.get("fields", []), *block.get("elements", []), block.get("accessory"))
        for each in inside:
            if isinstance(each, dict) and each["type"] == "checkboxes":
                yield from (option["text"] for option in each["options"])
            elif isinstance(each, dict) and each["type"] == "button":
                yield each["text"]
                yield from each.get("confirm", {}).values()
            elif isinstance(each, dict):
                yield each


def length_in_all(blocks: list[dict[str, Any]]) -> int:
    """The characters of all texts of these blocks, escaped."""
    return sum(len(escaped(each["text"]) if each["type"] == "plain_text" else each["text"]) for each in texts(blocks))


def words_of(message: dict[str, Any]) -> str:
    """Everything that the message's blocks say, labels of buttons included."""
    return "\n".join(each["text"] for each in texts(message["blocks"]))


def buttons_of(message: dict[str, Any]) -> list[str]:
    """The action ids of the message's buttons."""
    elements = [each for block in message["blocks"] if block["type"] == "actions" for each in block["elements"]]
    return [each["action_id"] for each in elements]


def escaped(text: str) -> str:
    """Plain text as Slack keeps it."""
    return re.sub("[&<>]", lambda found: _ENTITIES[found[0]], text)


def _header(place: str, block: dict[str, Any]) -> Iterator[str]:
    yield from _keys(place, block, needed={"text"})
    yield from _text_object(f"{place}.text", block.get("text"), 150, only="plain_text")


def _section(place: str, block: dict[str, Any]) -> Iterator[str]:
    yield from _keys(place, block, optional={"text", "fields", "accessory"})
    if "accessory" in block:
        yield from _button(f"{place}.accessory", block["accessory"])
    if "text" not in block and "fields" not in block:
        yield f"{place}: neither text nor fields"
    if "text" in block:
        yield from _text_object(f"{place}.text", block["text"], 3000)
    if "fields" in block:
        yield from _count_findings(f"{place}.fields", block["fields"], 10)
        for number, field in enumerate(block["fields"]):
            yield from _text_object(f"{place}.fields[{number}]", field, 2000)


def _context(place: str, block: dict[str, Any]) -> Iterator[str]:
    yield from _keys(place, block, needed={"elements"})
    yield from _count_findings(f"{place}.elements", block["elements"], 10)
    for number, element in enumerate(block["elements"]):
        yield from _text_object(f"{place}.elements[{number}]", element, 3000)


def _actions(place: str, block: dict[str, Any]) -> Iterator[str]:
    yield from _keys(place, block, needed={"elements"})
    yield from _count_findings(f"{place}.elements", block["elements"], 25)
    for number, element in enumerate(block["elements"]):
        check = _checkboxes if element.get("type") == "checkboxes" else _button
        yield from check(f"{place}.elements[{number}]", element)


def _checkboxes(place: str, element: dict[str, Any]) -> Iterator[str]:
    """https://api.slack.com/reference/block-kit/block-elements#checkboxes"""
    yield from _keys(place, element, needed={"action_id", "options"})
    yield from _count_findings(f"{place}.options", element["options"], 10)
    yield from _repeated("option", [option.get("value") for option in element["options"]])
    for option in element["options"]:
        yield from _keys(f"{place}.options", {"type": "option"} | option, needed={"text", "value"})
        yield from _text_object(f"{place}.options", option["text"], 75)
        yield from _text_findings(f"{place}.options.value", option["value"], 150)


def _confirm(place: str, confirm: dict[str, Any]) -> Iterator[str]:
    """https://api.slack.com/reference/block-kit/composition-objects#confirm"""
    limits = {"title": 100, "text": 300, "confirm": 30, "deny": 30}
    yield from _keys(place, {"type": "confirm"} | confirm, needed=set(limits))
    for name, longest in limits.items():
        yield from _text_object(f"{place}.{name}", confirm[name], longest, only="plain_text")


def _button(place: str, element: dict[str, Any]) -> Iterator[str]:
    if element.get("type") != "button":
        yield f"{place}: type {element.get('type')!r}"
        return
    # One that opens a page need not say anything to us.
    said = {"url"} if "url" in element else {"value"}
    yield from _keys(place, element, needed={"text", "action_id", *said}, optional={"style", "confirm"})
    yield from _text_object(f"{place}.text", element["text"], 75, only="plain_text")
    yield from _text_findings(f"{place}.action_id", element["action_id"], 255)
    for name in said:
        yield from _text_findings(f"{place}.{name}", element[name], {"value": 2000, "url": 3000}[name])
    if element.get("style", "primary") not in ("primary", "danger"):
        yield f"{place}.style: {element['style']!r}"
    if "confirm" in element:
        yield from _confirm(f"{place}.confirm", element["confirm"])


def _divider(place: str, block: dict[str, Any]) -> Iterator[str]:
    yield from _keys(place, block)


_BLOCKS: dict[object, Callable[[str, dict[str, Any]], Iterator[str]]] = {
    "header": _header,
    "section": _section,
    "context": _context,
    "actions": _actions,
    "divider": _divider,
}


def _block_findings(place: str, block: dict[str, Any]) -> Iterator[str]:
    check = _BLOCKS.get(block.get("type"))
    if check is None:
        yield f"{place}: type {block.get('type')!r}"
        return
    yield from check(place, block)
    if "block_id" in block:
        yield from _text_findings(f"{place}.block_id", block["block_id"], 255)


def _text_object(place: str, each: object, longest: int, *, only: str | None = None) -> Iterator[str]:
    if not isinstance(each, dict) or each.get("type") not in ((only,) if only else ("plain_text", "mrkdwn")):
        yield f"{place}: not a text object that may stand here: {each!r}"
        return
    switch = "emoji" if each["type"] == "plain_text" else "verbatim"
    yield from _keys(place, each, needed={"text"}, optional={switch})
    if not isinstance(each.get(switch, False), bool):
        yield f"{place}.{switch}: {each[switch]!r}"
    yield from _text_findings(place, each["text"], longest, plain=each["type"] == "plain_text")
    if each["type"] == "mrkdwn":
        yield from _mrkdwn_findings(place, each["text"])


def _text_findings(place: str, text: object, longest: int, *, plain: bool = False) -> Iterator[str]:
    if not isinstance(text, str) or not text.strip():
        yield f"{place}: no text: {text!r}"
        return
    length = len(escaped(text) if plain else text)
    if length > longest:
        yield f"{place}: {length} characters, at most {longest} may be"


def _mrkdwn_findings(place: str, text: str) -> Iterator[str]:
    """Whatever Slack would take for markup: an unescaped control character that is no part of a date."""
    rest = _ENTITY.sub("", _MENTION.sub("", _DATE.sub("", text)))
    if re.search("[&<>]", rest):
        yield f"{place}: not escaped: {rest!r}"


def _mention_findings(shown: list[str], mentions: Collection[str]) -> Iterator[str]:
    yield from (f"mentions {each}" for text in shown for each in _MENTION.findall(text) if each not in mentions)


def _keys(
    place: str,
    each: dict[str, Any],
    *,
    needed: frozenset[str] | set[str] = frozenset(),
    optional: set[str] | None = None,
) -> Iterator[str]:
    # A block of any type may have an id; a text object and an element may not.
    known = {"type", *needed, *(optional or ())} | ({"block_id"} if each.get("type") in _BLOCKS else set())
    yield from (f"{place}: {key} is missing" for key in needed - each.keys())
    yield from (f"{place}: unknown key {key}" for key in each.keys() - known)


def _count_findings(place: str, items: list[Any], most: int) -> Iterator[str]:
    if not 0 < len(items) <= most:
        yield f"{place}: {len(items)} of them, at most {most} may be"


def _repeated(name: str, given: list[str | None]) -> Iterator[str]:
    ids = [each for each in given if each is not None]
    yield from (f"{name} {each!r} is there twice" for each in {each for each in ids if ids.count(each) > 1})


# Modals: https://api.slack.com/reference/surfaces/views


def view_findings(view: dict[str, Any], *, mentions: Collection[str] = ()) -> list[str]:
    """The same for a modal."""
    inputs = [each for each in view["blocks"] if each.get("type") == "input"]
    others = [each for each in view["blocks"] if each.get("type") != "input"]
    needed = {"callback_id", "title", "close", "blocks"} | ({"submit", "private_metadata"} if inputs else set())
    shown = [each["text"] for each in texts(others) if each["type"] == "mrkdwn"]
    return [
        *_keys("view", view, needed=needed, optional={"submit", "private_metadata"}),
        *_text_findings("callback_id", view["callback_id"], 255),
        *_text_findings("private_metadata", view.get("private_metadata") or "-", 3000),
        *(
            found
            for name in ("title", "submit", "close")
            if name in view
            for found in _text_object(name, view[name], 24, only="plain_text")
        ),
        *_count_findings("blocks", view["blocks"], 100),
        *_repeated("block_id", [each.get("block_id") for each in view["blocks"]]),
        *_mention_findings(shown, mentions),
        *(found for number, block in enumerate(others) for found in _block_findings(f"blocks[{number}]", block)),
        *(found for number, block in enumerate(inputs) for found in _input(f"inputs[{number}]", block)),
    ]


def home_findings(view: dict[str, Any]) -> list[str]:
    """The same for App Home."""
    blocks = view["blocks"]
    return [
        *_keys("view", view, needed={"type", "blocks"}, optional={"private_metadata", "callback_id", "external_id"}),
        *([] if view["type"] == "home" else [f"type {view['type']!r}"]),
        *_text_findings("private_metadata", view["private_metadata"], 3000),
        *_count_findings("blocks", blocks, 100),
        *_repeated("block_id", [block.get("block_id") for block in blocks]),
        *(found for ids in _actions_of(blocks) for found in _repeated("action_id", ids)),
        *(found for number, block in enumerate(blocks) for found in _block_findings(f"blocks[{number}]", block)),
    ]


def _input(place: str, block: dict[str, Any]) -> Iterator[str]:
    yield from _keys(place, block, needed={"label", "element", "block_id"}, optional={"optional", "hint"})
    yield from _text_object(f"{place}.label", block["label"], 2000, only="plain_text")
    if "hint" in block:
        yield from _text_object(f"{place}.hint", block["hint"], 2000, only="plain_text")
    element = block["element"]
    if element["type"] == "plain_text_input":
        yield from _keys(place, element, needed={"action_id"}, optional={"multiline", "initial_value", "max_length"})
        if len(element.get("initial_value", "")) > element.get("max_length", 3000) <= 3000:
            yield f"{place}: {len(element['initial_value'])} characters to begin with"
    elif element["type"] == "static_select":
        yield from _keys(place, element, needed={"action_id", "options"}, optional={"initial_option"})
        yield from _count_findings(f"{place}.options", element["options"], 100)
        for option in element["options"]:
            yield from _text_object(f"{place}.options", option["text"], 75, only="plain_text")
            yield from _text_findings(f"{place}.options.value", option["value"], 75)
        if element.get("initial_option", element["options"][0]) not in element["options"]:
            yield f"{place}: begins with what is no option"
    else:
        yield f"{place}: element {element['type']!r}"
