"""Text that a stranger wrote, made safe to look at; and how an address is written."""

from __future__ import annotations

import hashlib
import json
import re
import unicodedata
from collections.abc import Sequence
from typing import Any

# A mail address, as far as we take them: no quotes, no comments, nothing that a header could be broken with.
ADDRESS = re.compile(r"[A-Za-z0-9._%+-]{1,64}@[A-Za-z0-9](?:[A-Za-z0-9.-]{0,252}[A-Za-z0-9])?")

# Line breaks and tabs are honest; the variation selector after an emoji only says that it is one.
_KEPT = {"\n", "\t", "\ufe0f"}
# Letters and marks by category that a reader does not see: Unicode's Default_Ignorable_Code_Point, and blank Braille.
_UNSEEN = {"\u034f", "\u115f", "\u1160", "\u17b4", "\u17b5", "\u2800", "\u3164", "\uffa0"}
_UNSEEN |= {chr(code) for code in (*range(0x180B, 0x180F), *range(0xFE00, 0xFE10), *range(0xE0100, 0xE01F0))}


def canonical(value: Any) -> str:
    """JSON that is the same for the same, in every process. (Python's own comparison takes True for 1.)"""
    return json.dumps(value, ensure_ascii=True, sort_keys=True, separators=(",", ":"))


def digest(value: Any) -> str:
    """The fingerprint of a JSON value: 64 hex digits, the same for the same."""
    return hashlib.sha256(canonical(value).encode()).hexdigest()


def bare_name(name: str) -> str:
    """A person without the kind or the team of their name, as far as two ways to write one can be told."""
    return re.sub(r"^(?:mail:|slack:[TE][A-Z0-9]+/)", "", name)


def some_of(names: Sequence[str], most: int = 20) -> str:
    """The names in a sentence; of a long list the first, and how many more there are."""
    more = [f"and {len(names) - most} more"] if len(names) > most else []
    return ", ".join([*names[:most], *more])


def visible(text: str) -> str:
    """The text with every character that a reader could not see, or that moves others, shown as its escape."""
    return "".join(_escape(c) if _hides(c) else c for c in text)


def visible_json(value: Any, *, indent: int | None = 2) -> str:
    """The value as JSON for a person: what `visible` would escape is escaped as JSON does, so it stays the same value.

    Outside of strings JSON has no such character.
    """
    text = json.dumps(value, ensure_ascii=False, indent=indent)
    return "".join(json.dumps(c)[1:-1] if _hides(c) else c for c in text)


def _hides(character: str) -> bool:
    """Format characters reorder or hide what stands around them (bidi overrides, zero-width joiners); the rest of "C"
    is control characters, private use and unassigned code points; "Zl" and "Zp" break lines that look whole."""
    category = unicodedata.category(character)
    return character not in _KEPT and (character in _UNSEEN or category[0] == "C" or category in ("Zl", "Zp"))


def _escape(character: str) -> str:
    return f"\\u{{{ord(character):x}}}"
