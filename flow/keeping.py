"""What a flow's state may hold: tried with the serializer of its checkpoints when the flow is loaded.

A sample of each type that the state's annotations name is written and read again. What comes back as something else,
or not at all, is named. LangGraph's strict reading (LANGGRAPH_STRICT_MSGPACK) is the one that counts: it makes no class
of a flow's own, and is to become the default. NUL and NaN no annotation shows: `saver.Serializer` refuses them.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import inspect
import logging
import re
import typing
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, MutableMapping, MutableSequence, Sequence
from collections.abc import Set as AbstractSet
from datetime import UTC, date, datetime, time, timedelta, tzinfo
from decimal import Decimal
from enum import Enum
from functools import partial
from ipaddress import IPv4Address, IPv6Address
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin
from uuid import UUID
from zoneinfo import ZoneInfo

from langgraph.channels import UntrackedValue
from langgraph.pregel import Pregel
from pydantic import BaseModel

from flow.errors import UnstorableState
from flow.saver import Serializer

_SAMPLES: dict[Any, Any] = {
    str: "x", int: 1, float: 1.5, bool: True, NoneType: None, bytes: b"x", complex: 1j, range: range(1),
    Decimal: Decimal("1.20"), datetime: datetime(2026, 11, 30, tzinfo=UTC), date: date(2026, 11, 30), time: time(1),
    timedelta: timedelta(1), tzinfo: UTC, UUID: UUID(int=1), Path: Path("x"), re.Pattern: re.compile("x"),
    IPv4Address: IPv4Address(1), IPv6Address: IPv6Address(1), ZoneInfo: ZoneInfo("UTC"),
    collections.defaultdict: collections.defaultdict(int), collections.Counter: collections.Counter("x"),
    collections.OrderedDict: collections.OrderedDict(x=1), tuple: ("x",), Callable: len, type: str,
}  # fmt: skip
_SEQUENCES: dict[Any, Callable[[Iterable[Any]], Any]] = {
    list: list, Sequence: list, MutableSequence: list, Iterable: list, Collection: list, set: set, AbstractSet: set,
    frozenset: frozenset, tuple: tuple, collections.deque: collections.deque,
}  # fmt: skip
_MAPPINGS = (dict, Mapping, MutableMapping)
_QUALIFIERS = (Annotated, typing.Required, typing.NotRequired, typing.Final, typing.ClassVar)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Unkept:
    """A key of a state whose value a checkpoint does not give back."""

    schema: type | None
    key: str
    type: str
    becomes: str

    @property
    def fix(self) -> str:
        if self.becomes.endswith("list"):
            return "make it a list"
        return "keep text of it, or a dict of plain values, and make it anew where it is needed"

    def __str__(self) -> str:
        return f"its state's {self.key} is {self.type}, which {self.becomes}: {self.fix}"


def unkept(graph: Pregel[Any, Any, Any, Any]) -> Iterator[Unkept]:
    """What would be lost of the states of this graph and of the graphs within it."""
    for each in (graph, *(inner for _, inner in graph.get_subgraphs(recurse=True))):
        builder = getattr(each, "builder", None)
        if builder is None:
            continue
        for key, channel in builder.channels.items():
            annotation = getattr(channel, "typ", Any)
            if not isinstance(channel, UntrackedValue) and (becomes := _becomes(annotation)):
                schema = next((schema for schema, keys in builder.schemas.items() if key in keys), None)
                yield Unkept(schema=schema, key=key, type=_in_words(annotation), becomes=becomes)


def _becomes(annotation: Any) -> str | None:
    """What a checkpoint makes of a value of this type, in words; None: the same."""
    serializer = Serializer(allowed_msgpack_modules=None)
    with _quietly():
        for sample in _samples(annotation):
            try:
                back = serializer.loads_typed(serializer.dumps_typed(sample))
            except (UnstorableState, TypeError, ValueError, AttributeError) as exc:
                return f"no checkpoint can hold ({exc.__cause__ or exc})"
            if changed := _changed(sample, back):
                return "comes back as " + changed
    return None


def _changed(sample: Any, back: Any) -> str | None:
    """The name of the type that came back in place of another one, here or within; None: all is the same."""
    if type(back) is not type(sample):
        was, now = type(sample).__name__, type(back).__name__
        return f"{now} instead of {was}"
    if isinstance(sample, Mapping):
        pairs = [*zip(sample, back, strict=False), *zip(sample.values(), back.values(), strict=False)]
    elif isinstance(sample, list | tuple | set | frozenset):
        pairs = list(zip(sample, back, strict=False))
    else:
        return None if back == sample else "another value"
    return next(filter(None, (_changed(one, other) for one, other in pairs)), None)


def _samples(annotation: Any, above: tuple[Any, ...] = ()) -> Iterator[Any]:
    """Values of this type, with one of each type that it names; none for what nobody can make up."""
    origin, args = get_origin(annotation), get_args(annotation)
    if annotation in above:
        return
    within = (*above, annotation)
    if origin in (*_QUALIFIERS, Union, UnionType) or isinstance(annotation, typing.NewType):
        for each in args[:1] if origin in _QUALIFIERS else args or (annotation.__supertype__,):
            yield from _samples(each, within)
    elif origin is Literal:
        yield from args
    elif origin in (*_SEQUENCES, *_MAPPINGS) and args:
        yield from _containers(origin, [list(_samples(each, within)) for each in args if each is not ...])
    elif (kind := origin or annotation) in _SAMPLES:
        yield _SAMPLES[kind]
    elif isinstance(kind, type):
        yield from _instances(kind, within)


def _containers(origin: Any, inner: list[list[Any]]) -> Iterator[Any]:
    if origin is tuple:
        yield tuple(next(iter(samples), None) for samples in inner)
    elif origin in _MAPPINGS:
        yield from ({name: each} for name in inner[0] or ["x"] for each in inner[1])
    else:
        yield from _made(*(partial(_SEQUENCES[origin], [each]) for each in inner[0]))


def _instances(kind: type, within: tuple[Any, ...]) -> Iterator[Any]:
    if hasattr(kind, "__total__"):
        # A TypedDict, of `typing` or of `typing_extensions`.
        for name, each in _hints(kind).items():
            yield from ({name: sample} for sample in _samples(each, within))
    elif issubclass(kind, Enum):
        yield from list(kind)[:1]
    elif issubclass(kind, BaseModel):
        # Without its own checks, which may want more than the types say.
        fields = {name: field.annotation for name, field in kind.model_fields.items()}
        yield from _made(lambda: kind.model_construct(**_filled(fields, within)))
    elif dataclasses.is_dataclass(kind):
        made = object.__new__(kind)
        for field in dataclasses.fields(kind):
            object.__setattr__(made, field.name, next(_samples(_hints(kind).get(field.name), within), None))
        yield made
    elif issubclass(kind, tuple) and hasattr(kind, "_fields"):
        yield from _made(lambda: kind(**_filled(_hints(kind), within)))
    elif issubclass(kind, str | int | float | bytes | Exception):
        yield from _made(lambda: kind("1") if not issubclass(kind, bytes) else kind(b"1"))
    elif kind.__new__ in _PLAIN_NEW and kind is not object and not inspect.isabstract(kind):
        yield from _made(lambda: kind.__new__(kind))


_PLAIN_NEW = (object.__new__, list.__new__, dict.__new__, set.__new__)


def _filled(hints: Mapping[str, Any], within: tuple[Any, ...]) -> dict[str, Any]:
    return {name: next(_samples(each, within), None) for name, each in hints.items()}


def _made(*ways: Callable[[], Any]) -> Iterator[Any]:
    """What can be made: a class may want more than its types say."""
    for make in ways:
        with contextlib.suppress(Exception):
            yield make()


def _hints(kind: type) -> dict[str, Any]:
    try:
        return typing.get_type_hints(kind, include_extras=True)
    except (NameError, TypeError):
        return {}


def _in_words(annotation: Any) -> str:
    if get_origin(annotation) is Annotated:
        return _in_words(get_args(annotation)[0])
    return annotation.__name__ if isinstance(annotation, type) and not get_args(annotation) else str(annotation)


@contextlib.contextmanager
def _quietly() -> Iterator[None]:
    """LangGraph warns of what it would not make, and pydantic of samples: that is the finding."""
    log = logging.getLogger("langgraph.checkpoint.serde.jsonplus")
    was, log.disabled = log.disabled, True
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        log.disabled = was
