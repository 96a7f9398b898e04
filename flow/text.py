"""Text that a stranger wrote, made safe to look at."""

from __future__ import annotations

import unicodedata

# Format characters reorder or hide what stands around them (bidi overrides, zero-width joiners); the rest of "C" is
# control characters, private use and unassigned code points. Line breaks and tabs are honest.
_KEPT = {"\n", "\t"}


def visible(text: str) -> str:
    """The text with every character that a reader could not see, or that moves others, shown as its escape."""
    return "".join(c if c in _KEPT or unicodedata.category(c)[0] != "C" else _escape(c) for c in text)


def _escape(character: str) -> str:
    return f"\\u{{{ord(character):x}}}"
