"""Secrets have no place in a request: it is shown in Slack, on pages and in mails, and kept for good.

A name tells (`password`, `api_key`), or the value itself does: a private key, a bearer header, a token with its maker's
prefix, a password in a URL, the number of a payment card. What is merely long and random is none: order numbers, hashes
and ids look the same.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import reduce
from typing import Any

from flow.errors import SecretInRequest

# How a name ends: "password" and "user password" are one, "password policy" and "reset password" are about one.
_NAMED = re.compile(
    r"(?!(?:reset|change|forgot|rotate|expire) )(?:.* )?"
    r"(?:password|passwd|passphrase|pwd|cvv2?|cvc2?|secret|(?:api|secret|private|signing|encryption) ?key"
    r"|(?:access|refresh|auth|api|bearer|session|id|csrf|reset|bot|app|login) ?token)(?: (?:value|text|plain|\d+))?"
)
# These may be something else as well: a coin, a permission. The value tells.
_PERHAPS = (
    (re.compile(r"(?:.* )?token"), re.compile(r"(?=.*\d)(?=.*[A-Za-z])\S{12,}")),
    (re.compile(r"(?:.* )?authorization"), re.compile(r"(?i)(?:basic|bearer|token|digest)\s+\S{6,}")),
)
# What stands where a secret was taken out, or says that there is one.
_MASKED = re.compile(r"[\W_xX]*|(?i:none|null|true|false|yes|no|set|unset|changed|hidden|redacted|masked)")

_FORMS = {
    "is a private key": r"-----BEGIN [A-Z ]*PRIVATE KEY-----|AGE-SECRET-KEY-1[0-9A-Z]{20,}",
    "has a bearer header": r"(?i:\bbearer)\s+(?=[^\s]*\d)(?=[^\s]*[A-Za-z])[\w.~+/=-]{16,}"
    r"|(?i:\bauthorization['\"]?\s*[:=]\s*['\"]?(?:basic|bearer|token|digest))\s+\S{6,}",
    "has a token": r"\beyJ[\w-]{8,}\.[\w-]{8,}\.[\w-]*"
    r"|\bsk-(?:[a-z0-9]+-)*[A-Za-z0-9_]{20,}|\b[sr]k_(?:live|test)_[A-Za-z0-9]{10,}|\bwhsec_[A-Za-z0-9+/=]{16,}"
    r"|\bxox[abeoprs]-[\w-]{10,}|\bxapp-[\w-]{10,}|\bgh[opsur]_[A-Za-z0-9]{36}|\bgithub_pat_\w{22,}|\bglpat-[\w-]{20}"
    r"|\b(?:AKIA|ASIA)[0-9A-Z]{16}\b|\bAIza[\w-]{35}|\bya29\.[\w-]{20,}|\bhf_[A-Za-z]{30,}|\bnpm_[A-Za-z0-9]{36}"
    r"|[?&](?:access_?token|token|api_?key)=(?=[^&]*\d)[\w.~%+-]{16,}"
    r"|\bpypi-AgE[\w-]{20,}|\bSG\.[\w-]{16,}\.[\w-]{16,}|\bshpat_[0-9a-f]{32}|\bdop_v1_[0-9a-f]{64}",
    "has a password in a URL": r"\b[a-z][a-z0-9+.-]*://[^\s/:@?#]*:[^\s/@?#]+@",
    "has a password": r"(?i)\b(?:password|passwd|passphrase|pwd|api[_ -]?key|secret[_ -]?key|client[_ -]?secret"
    r"|access[_ -]?token|refresh[_ -]?token)\b(?:['\"]\s*:\s*['\"]|\s*=\s*|\s*:\s*(?=\S*\d))"
    r"(?!\*|•|<|\[|\s)[^\s'\"&]{4,}",
}
_VALUES = tuple((what, re.compile(form)) for what, form in _FORMS.items())

# As cards are printed: in one piece, or in their groups; not a part of a longer number, an IBAN or a UUID.
_CARD = re.compile(
    r"(?<![\w+.,-])(?<!\d[ -])"
    r"(?:\d{14,19}|\d{4}([ -])\d{4}\1\d{4}\1\d{4}(?:\1\d{3})?|\d{4}([ -])\d{6}\2\d{4,5})(?![\w-]|[., ]\d)"
)
# Length and first digits by the card's network.
_NETWORK = re.compile(
    r"4(?:\d{15}|\d{18})|5[1-5]\d{14}|2(?:22[1-9]|2[3-9]\d|[3-6]\d\d|7[01]\d|720)\d{12}|3[47]\d{13}"
    r"|6(?:011|5\d\d|4[4-9]\d)\d{12,15}|3(?:0[0-5]|[68]\d)\d{11}|35(?:2[89]|[3-8]\d)\d{12}|62\d{14,17}"
)


def check_no_secret(request: Mapping[str, Any], *, allowed: Collection[str]) -> None:
    """Raise SecretInRequest for a name or a value that looks like a secret; it says where, and never what.

    `request` is a question as it is stored. What stands under an `allowed` name is let through, also where a text
    repeats it.
    """
    ours = frozenset(map(_words, allowed))
    texts = list(_texts_of(request))
    allowed_texts = {text.text for text in texts if text.is_named(ours)} - {""}
    for each in texts:
        if each.is_named(ours):
            continue
        for name in each.names:
            if value_secret(name):
                raise SecretInRequest(each.where, f"has a name that itself {value_secret(name)}")
            if is_secret_name(name, each.text):
                raise SecretInRequest(each.where, f"has a value with the name of a secret, {name!r}")
        rest = reduce(
            lambda text, part: text.replace(part, ""), sorted(allowed_texts, key=len, reverse=True), each.text
        )
        if what := value_secret(rest):
            raise SecretInRequest(" ".join([each.where, *map(repr, each.names)]), what)


def is_secret_name(name: str, text: str | None = None) -> bool:
    """Whether a value of this name is a secret; `text` is the value, where it is known."""
    words = _words(name)
    if text is None:
        return bool(_NAMED.fullmatch(words))
    if _MASKED.fullmatch(text):
        return False
    return bool(_NAMED.fullmatch(words)) or any(n.fullmatch(words) and v.fullmatch(text) for n, v in _PERHAPS)


def is_allowed(name: str, allowed: Collection[str]) -> bool:
    """Whether the flow lets values of this name be shown."""
    return _words(name) in set(map(_words, allowed))


def value_secret(text: str) -> str | None:
    """What kind of secret a text holds, as the rest of a sentence; None: none that can be told."""
    for what, form in _VALUES:
        if form.search(text):
            return what
    if any(_is_card(found[0]) for found in _CARD.finditer(text)):
        return "has the number of a payment card"
    return None


@dataclass(frozen=True, kw_only=True)
class _Text:
    """One text that is shown: where, and under which names."""

    where: str
    names: tuple[str, ...] = ()
    text: str

    def is_named(self, names: Collection[str]) -> bool:
        return any(_words(name) in names for name in (self.where, *self.names))


def _texts_of(request: Mapping[str, Any]) -> Iterator[_Text]:
    yield _Text(where="title", text=str(request.get("title", "")))
    for option in request.get("options", ()):
        yield _Text(where="options", text=str(option))
    for name, text in request.get("fields", ()):
        yield from _texts_in("fields", (name,), text)
    for action in request.get("actions", ()):
        yield from _texts_in(f"action {action['name']}", (), action["args"])
        yield _Text(where=f"action {action['name']}", names=("description",), text=action["description"])


def _texts_in(where: str, names: tuple[str, ...], value: Any) -> Iterator[_Text]:
    if isinstance(value, str) and value[:1] in ("{", "["):
        # What was no text in a field is kept as its JSON.
        with contextlib.suppress(ValueError, RecursionError):
            value = json.loads(value)
    if isinstance(value, Mapping):
        for name, each in value.items():
            yield from _texts_in(where, (*names, str(name)), each)
    elif isinstance(value, list):
        for each in value:
            yield from _texts_in(where, names, each)
    else:
        yield _Text(where=where, names=names, text="" if value is None else str(value))


def _words(name: str) -> str:
    """`clientSecret`, `client_secret` and `Client secret` are one name."""
    return " ".join(re.sub(r"(?<=[a-z0-9])(?=[A-Z])|[\W_]+", " ", name).lower().split())


def _is_card(text: str) -> bool:
    digits = re.sub(r"\D", "", text)
    doubled = [int(digit) * (2 if place % 2 else 1) for place, digit in enumerate(reversed(digits))]
    return bool(_NETWORK.fullmatch(digits)) and sum(each - 9 if each > 9 else each for each in doubled) % 10 == 0
