"""What people and programs type, checked before anything is written.

Each function returns the value in its one canonical form, or raises BadInput, which names value and expectation.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from flow.errors import BadInput
from flow.model import Claim, Person
from flow.settings import channel_id, filers_in, names_in
from flow.text import ADDRESS

# It stands in URLs, in Slack and in an index.
_THREAD_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:@-]{0,199}", re.ASCII)
_INTERRUPT_ID = re.compile(r"[0-9a-f]{32}", re.ASCII)
# At most 15 digits before the point: more than any budget, and never near Decimal's 28 digits of precision.
_AMOUNT = re.compile(r"([0-9]{1,15})(?:\.([0-9]+))?", re.ASCII)
# Postgres text and jsonb cannot hold NUL, UTF-8 cannot hold lone surrogates; other control characters only hide things.
_UNSTORABLE = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ud800-\udfff]")

MAX_NAME = 200
MAX_NOTE = 10_000
# Of a flow's input, as JSON.
MAX_OBJECT = 1_000_000
# Of anything that is kept as JSON: nobody reads more, and what writes it does not always get through.
DEEPEST = 50


def parse_thread_id(text: str) -> str:
    if not _THREAD_ID.fullmatch(text):
        raise BadInput(
            "thread id", text, "use up to 200 letters, digits and . _ : @ -, beginning with a letter or a digit"
        )
    return text


def parse_interrupt_id(text: str) -> str:
    if not _INTERRUPT_ID.fullmatch(text):
        raise BadInput("interrupt id", text, "it is 32 hexadecimal digits, as `claim_flow.py show` prints it")
    return text


def parse_channel(name: str, text: str | None) -> str | None:
    """The id of a channel of Slack; None and an empty text stay so. Raises BadInput."""
    try:
        return channel_id(text) if text else text
    except ValueError as exc:
        raise BadInput(name, text, str(exc)) from exc


def parse_file(name: str, path: str | None) -> str | None:
    """What the file says; None for none. Raises BadInput."""
    try:
        return Path(path).read_text(encoding="utf-8") if path is not None else None
    except (OSError, ValueError) as exc:
        raise BadInput(name, path, f"it cannot be read: {exc}") from exc


def parse_filers(name: str, text: str | None) -> str | None:
    """Who files claims in one of many workspaces, written as FILERS; None stays so. Raises BadInput."""
    if text is None:
        return None
    try:
        filers_in(text)
    except ValueError as exc:
        raise BadInput(name, text, str(exc)) from exc
    if any("@" in each.lstrip("@") for each in names_in(text)):
        raise BadInput(name, text, "write member ids and user groups: the app does not ask who has which address")
    return text


def refused(exc: ValidationError, prefix: str = "") -> BadInput:
    """The first thing that a model did not take, by its field's name."""
    first = exc.errors(include_url=False, include_context=False)[0]
    where = ".".join(map(str, first["loc"])) or "input"
    return BadInput(f"{prefix}{where}", first["input"], first["msg"])


def mail_person(address: str) -> Person:
    """The person with this address, whose capitals say nothing. Raises BadInput."""
    text = address.strip().removeprefix("mail:")
    if not ADDRESS.fullmatch(text):
        raise BadInput("address", address, "write it like alice@example.com")
    key = f"mail:{text.lower()}"
    return Person(key=key, name=text.lower(), names=frozenset({key, text.lower()}))


def parse_claim(*, amount: str, currency: str, payee: str = "", note: str = "") -> Claim:
    """The claim that was typed. Raises BadInput for the first field that cannot be used."""
    decimals = decimals_of(currency)
    return Claim(
        amount=parse_amount(amount, currency, decimals),
        currency=currency,
        payee=parse_text("payee", payee, MAX_NAME, lines=False),
        note=parse_text("note", note, MAX_NOTE),
    )


def parse_object(text: str) -> dict[str, Any]:
    """A JSON object that can be stored, of at most MAX_OBJECT characters. Raises BadInput."""
    try:
        # A repeated name would leave it open which of the two is meant.
        value = json.loads(text, object_pairs_hook=_once, parse_constant=_no_number)
    except (ValueError, RecursionError) as exc:
        raise BadInput("JSON", text, str(exc)) from exc
    if not isinstance(value, dict):
        raise BadInput("JSON", text, 'it must be an object: {"name": "value"}')
    check_object(value)
    return value


def check_object(value: dict[str, Any]) -> None:
    """Raise BadInput for an object with text or numbers that Postgres cannot hold, or for a very large one."""
    check_depth("JSON", value)
    text = json.dumps(value, ensure_ascii=False)
    fits = all(map(storable_value, _scalars(value)))
    if len(text) > MAX_OBJECT:
        raise BadInput("JSON", text, f"it has {len(text)} characters, at most {MAX_OBJECT} are kept")
    if not fits:
        raise BadInput("JSON", text, "it contains a character or a number that cannot be stored")


def check_depth(name: str, value: dict[str, Any], *, around: int = 0) -> None:
    """Raise BadInput for an object that is nested too deeply to be kept, or even compared.

    `around`: so many levels are around what is kept.
    """
    if _depth(value, DEEPEST + around) > DEEPEST + around:
        raise BadInput(name, value.keys(), f"it is nested more than {DEEPEST} levels deep")


def _depth(value: Any, most: int) -> int:
    """How many objects and lists are within each other; no more than `most` + 1 of them are looked at."""
    level, within = 0, [value]
    while within and level <= most:
        level += any(isinstance(each, dict | list) for each in within)
        within = [
            inner
            for each in within
            if isinstance(each, dict | list)
            for inner in (each.values() if isinstance(each, dict) else each)
        ]
    return level


def _scalars(value: Any) -> Iterator[str | float]:
    if isinstance(value, str | float):
        yield value
    elif isinstance(value, dict):
        for name, each in value.items():
            yield name
            yield from _scalars(each)
    elif isinstance(value, list):
        for each in value:
            yield from _scalars(each)


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a name comes twice")
    return found


def _no_number(name: str) -> Any:
    raise ValueError(f"{name} is no number of JSON's")


def decimals_of(currency: str) -> int:
    """How many decimals the currency has (ISO 4217). Raises BadInput unless it is legal tender somewhere today."""
    from babel.core import get_global
    from babel.numbers import get_currency_precision

    current = {
        code
        for entries in get_global("territory_currencies").values()
        for code, _start, end, tender in entries
        if end is None and tender
    }
    if currency not in current:
        raise BadInput("currency", currency, "use an ISO 4217 code such as USD, EUR or JPY, in capitals")
    return get_currency_precision(currency)


def parse_amount(text: str, currency: str, decimals: int) -> Decimal:
    """A positive amount with exactly `decimals` decimals: "250" USD is Decimal("250.00")."""
    match = _AMOUNT.fullmatch(text)
    if match is None:
        raise BadInput("amount", text, "write digits with an optional decimal point, such as 250 or 250.00")
    if len(match[2] or "") > decimals:
        some = f"at most {decimals} decimals" if decimals else "no decimals"
        raise BadInput("amount", text, f"{currency} has {some}")
    amount = Decimal(text).quantize(Decimal(1).scaleb(-decimals))
    if amount == 0:
        raise BadInput("amount", text, "it must be above zero")
    return amount


def storable(text: str) -> str:
    """Text from a program that need not be refused: what cannot be stored is replaced by the replacement character."""
    return _UNSTORABLE.sub("\N{REPLACEMENT CHARACTER}", text)


def storable_value(value: str | float) -> bool:
    """Whether a checkpoint's JSON can hold it as it is."""
    if isinstance(value, float):
        return math.isfinite(value)
    return not re.search(r"[\x00\ud800-\udfff]", value)


def parse_text(name: str, text: str, longest: int, *, lines: bool = True) -> str:
    """Text that Postgres, JSON and a checkpoint can hold, unchanged."""
    if bad := _UNSTORABLE.search(text):
        raise BadInput(name, text, f"it contains the character {bad[0]!a}, which cannot be stored")
    if not lines and len(text.splitlines()) > 1:
        raise BadInput(name, text, "it must be one line")
    if len(text) > longest:
        raise BadInput(name, text, f"it has {len(text)} characters, at most {longest} are kept")
    return text
