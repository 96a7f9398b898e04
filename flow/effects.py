"""`@idempotent`: a call to the outside that has one outcome in its thread, however often its process dies.

    @idempotent
    async def send_receipt(order: str) -> str:
        return await mail.send(order, headers={"Idempotency-Key": idempotency_key()})

The call's row is committed before the function runs, its outcome after it:

    started    the function is running, or its process died meanwhile
    done       with the result, which later calls get without running anything
    failed     with an error that was declared permanent, which later calls get again

A process that dies in between leaves `started`: when the lease is over the function runs again, and can hand the same
`idempotency_key()` to whoever it calls; a service that does not honour it may do the same twice. Any other exception
leaves it open too, and the next attempt runs it again.

Sync and async functions, in nodes, threads and pools (`ThreadPoolExecutor`: a thread that takes work from a queue
of its own keeps the place of whoever started it). Importing this module lets context variables travel into threads and
thread pools, as Python 3.14 does for threads: without that a pool's work would not know its thread.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import contextvars
import dataclasses
import decimal
import functools
import inspect
import itertools
import json
import threading
from collections import defaultdict
from collections.abc import Callable, Coroutine, Iterator, Mapping
from collections.abc import Set as AbstractSet
from datetime import date, time, timedelta
from decimal import Decimal
from enum import Enum
from pathlib import PurePath
from typing import Any, ParamSpec, TypeVar, cast, overload
from uuid import UUID

from langgraph.config import get_config
from langgraph.errors import GraphBubbleUp, GraphInterrupt
from langgraph.runtime import get_runtime
from pydantic import BaseModel

from flow.aio import to_its_end
from flow.errors import (
    AskedInEffect,
    EffectFailed,
    EffectInProgress,
    KeyReused,
    NeedsKey,
    NotInADrive,
    ResultNotKept,
)
from flow.inputs import storable
from flow.pen import Pen
from flow.spans import span
from flow.text import canonical, digest

P = ParamSpec("P")
T = TypeVar("T")

# Longer than a call to the outside should take: one whose drive lost its session has ended before it is made again.
LEASE_S = 60.0

_LONGEST_KEY = 200
# Characters: enough for a reference, and what stands around it.
_MOST_OF_A_RESULT = 300


@overload
def idempotent(function: Callable[P, T], /) -> Callable[P, T]: ...
@overload
def idempotent(
    *,
    key: str | Callable[..., str] | None = None,
    permanent: tuple[type[Exception], ...] = (),
    lease_s: float = LEASE_S,
) -> Callable[[Callable[P, T]], Callable[P, T]]: ...
def idempotent(
    function: Callable[P, T] | None = None,
    /,
    *,
    key: str | Callable[..., str] | None = None,
    permanent: tuple[type[Exception], ...] = (),
    lease_s: float = LEASE_S,
) -> Any:
    """The function, recorded: in one thread each call of it has one outcome, and is not made again once it has.

    `key` names the call within its thread, or is called with the arguments to name it. Without it a call is known by
    the function's module and qualified name, its arguments with their defaults, and its place: the flow's step and
    node, and how many equal calls this run of the node made before. So two equal payments in one node are two, also
    when it runs again; and a call that failed and is tried again in the same run is the same one. A node that calls one
    subgraph twice needs keys; and so does what must not be done twice when the code has changed meanwhile: a change of
    any of these makes another call of it, but what has a key raises KeyReused.

    Results are JSON values, None among them, and every caller gets what JSON makes of them (a tuple is a list). For a
    result that is none the effect stays `done`, with the beginning of its repr in the row's `error`, and this and each
    later call raises ResultNotKept. Exceptions of the types `permanent` are the outcome as well. Arguments are kept as
    a fingerprint only, and must be plain values, dataclasses or pydantic models; other kinds raise TypeError before
    anything happens.

    `lease_s`: how long after its beginning, in seconds by the database's clock, a call without an outcome is not made
    again. It is not renewed: make it longer than the call can take, or a drive that takes over from one that has lost
    its session may make the call while the first is still under way.

    Calls side by side under one key wait for the first. Raises KeyReused if the key stands for another function or
    other arguments, EffectInProgress if an earlier call may still be under way, NotInADrive outside of a flow's node.
    """

    def decorate(function: Callable[P, T]) -> Callable[P, T]:
        if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
            raise TypeError(f"{function.__qualname__} is a generator: an effect returns one result")
        effect = _Effect(function, key=key, permanent=permanent, lease_s=lease_s)
        return effect.as_async() if inspect.iscoroutinefunction(function) else effect.as_sync()

    return decorate if function is None else decorate(function)


def idempotency_key() -> str:
    """The key of the call under way, 64 hex digits: the same each time it is made, and no other call's anywhere."""
    calls = _under_way.get()
    if not calls:
        raise NotInADrive("idempotency_key() is for the inside of an @idempotent function")
    return calls[-1].outside_key


def effect_under_way() -> str | None:
    """The name of the @idempotent function that is running here; None outside of all."""
    calls = _under_way.get()
    return calls[-1].name if calls else None


@contextlib.contextmanager
def recorded_by(pen: Pen) -> Iterator[None]:
    """Within it, effects are recorded with this pen. One run of a graph, on the loop that is running now."""
    drive = _Drive(pen=pen, loop=asyncio.get_running_loop())
    token = _current_drive.set(drive)
    try:
        yield
    finally:
        drive.over = True
        _current_drive.reset(token)


@dataclasses.dataclass(kw_only=True)
class _Drive:
    """What the calls of one run share; only its loop touches it."""

    pen: Pen
    loop: asyncio.AbstractEventLoop
    over: bool = False
    # The numbers of equal calls, for each run of a node: those that are taken.
    numbers: defaultdict[tuple[object, ...], set[int]] = dataclasses.field(default_factory=lambda: defaultdict(set))
    # Calls under way, by key.
    running: dict[str, asyncio.Future[None]] = dataclasses.field(default_factory=dict)

    async def here(self, work: Coroutine[Any, Any, T]) -> T:
        """Do it on the drive's loop, from this one or another."""
        if asyncio.get_running_loop() is self.loop:
            return await work
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, self.loop))

    def wait_for(self, work: Coroutine[Any, Any, T]) -> T:
        """Do it on the drive's loop, from a thread."""
        return asyncio.run_coroutine_threadsafe(work, self.loop).result()


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Place:
    """Where in its thread a call is made: where it stays the same when the node runs again, and which run it is."""

    thread_id: str
    where: tuple[object, ...]
    run: tuple[object, ...]
    # In a subgraph that its node calls a second time, or that runs a second time in a retry of its node: LangGraph
    # tells the two by a number that starts anew in another process.
    is_repeated: bool


@dataclasses.dataclass(kw_only=True)
class _Call:
    """One call, from its claim to its outcome."""

    drive: _Drive
    name: str
    thread_id: str
    key: str
    # A row of the table, once it is claimed or found.
    row: dict[str, Any] = dataclasses.field(default_factory=dict)
    claimed: bool = False
    outside_key: str = ""
    # Its number among equal calls, and where that was taken.
    number: tuple[tuple[object, ...], int] | None = None
    # Whether it has an outcome. One that has none may be made again, as the same call.
    ended: bool = False

    def free(self) -> None:
        """Let those go on that wait for this call."""
        if self.number is not None and not self.ended:
            where, number = self.number
            self.drive.numbers[where].discard(number)
        if (waiting := self.drive.running.pop(self.key, None)) is not None:
            waiting.set_result(None)


_current_drive: contextvars.ContextVar[_Drive | None] = contextvars.ContextVar("drive", default=None)
_under_way: contextvars.ContextVar[tuple[_Call, ...]] = contextvars.ContextVar("under_way", default=())


class _Effect:
    """One decorated function."""

    def __init__(
        self,
        function: Callable[..., Any],
        *,
        key: str | Callable[..., str] | None,
        permanent: tuple[type[Exception], ...],
        lease_s: float,
    ) -> None:
        self._function, self._signature = function, inspect.signature(function)
        self._name = f"{function.__module__}.{function.__qualname__}"
        self._key, self._permanent, self._lease_s = key, permanent, lease_s

    def as_async(self) -> Callable[..., Any]:
        @functools.wraps(self._function)
        async def call(*args: Any, **kwargs: Any) -> Any:
            drive, place = self._drive(), _place()
            made = await drive.here(self._begin(drive, place, args, kwargs))
            if not made.claimed:
                return self._outcome(made)
            with _until_recorded(made):
                try:
                    with span(self._function.__qualname__, effect=self._name, attempt=made.row["attempt"]):
                        result = await self._function(*args, **kwargs)
                except Exception as exc:
                    if (kept := await to_its_end(drive.here(self._failed(made, exc)))) is not None:
                        raise kept from exc
                    raise
                return await to_its_end(drive.here(self._done(made, result)))

        return call

    def as_sync(self) -> Callable[..., Any]:
        @functools.wraps(self._function)
        def call(*args: Any, **kwargs: Any) -> Any:
            drive, place = self._drive(), _place()
            if _running_loop() is drive.loop:
                raise NotInADrive(
                    f"{self._name} would hold up the loop that records it: call it in a sync node, or with"
                    " `await asyncio.to_thread(…)`, or make it async"
                )
            made = drive.wait_for(self._begin(drive, place, args, kwargs))
            if not made.claimed:
                return self._outcome(made)
            with _until_recorded(made):
                try:
                    with span(self._function.__qualname__, effect=self._name, attempt=made.row["attempt"]):
                        result = self._function(*args, **kwargs)
                except Exception as exc:
                    if (kept := drive.wait_for(self._failed(made, exc))) is not None:
                        raise kept from exc
                    raise
                return drive.wait_for(self._done(made, result))

        return call

    def _drive(self) -> _Drive:
        drive = _current_drive.get()
        if drive is None:
            raise NotInADrive(f"{self._name} is @idempotent: it can be recorded only while a thread is driven")
        return drive

    # On the drive's loop, from here on

    async def _begin(self, drive: _Drive, place: _Place, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Call:
        """Claim the call, or find what became of it."""
        fingerprint = self._fingerprint(args, kwargs)
        number = self._number(drive, place, fingerprint) if self._key is None else None
        key = self._auto_key(place, fingerprint, number[1]) if number else self._chosen_key(args, kwargs)
        call = _Call(drive=drive, name=self._name, thread_id=place.thread_id, key=key, number=number)
        if any(outer.key == call.key for outer in _under_way.get()):
            raise EffectInProgress(self._name, "it is called from within itself")
        while (other := drive.running.get(call.key)) is not None:
            await asyncio.wait({other})
        if drive.over:
            raise NotInADrive(f"{self._name} was called after the drive that it belongs to had ended")
        drive.running[call.key] = drive.loop.create_future()
        try:
            await self._claim(call, fingerprint)
        except BaseException:
            call.free()
            raise
        if not call.claimed:
            call.ended = call.row["status"] != "started"
            call.free()
            self._check_ended(call, fingerprint)
        return call

    async def _claim(self, call: _Call, fingerprint: str) -> None:
        async with call.drive.pen.tx() as conn:
            rows = await conn.execute(
                "INSERT INTO effects AS e (thread_id, key, name, fingerprint, lease_until)"
                " VALUES (%(thread)s, %(key)s, %(name)s, %(print)s,"
                " clock_timestamp() + %(lease)s * interval '1 second')"
                " ON CONFLICT (thread_id, key) DO UPDATE"
                " SET attempt = e.attempt + 1, lease_until = EXCLUDED.lease_until"
                " WHERE e.status = 'started' AND e.lease_until <= clock_timestamp()"
                " AND (e.name, e.fingerprint) = (EXCLUDED.name, EXCLUDED.fingerprint)"
                " RETURNING attempt, (SELECT id::text FROM installation) AS installation",
                {
                    "thread": call.thread_id,
                    "key": call.key,
                    "name": self._name,
                    "print": fingerprint,
                    "lease": self._lease_s,
                },
            )
            if (claimed := await rows.fetchone()) is not None:
                call.claimed, call.row = True, claimed
                call.outside_key = digest([claimed["installation"], call.thread_id, call.key])
                return
            rows = await conn.execute(
                "SELECT name, fingerprint, status, result, error,"
                " greatest(0, extract(epoch FROM lease_until - clock_timestamp()))::float8 AS lease_left_s"
                " FROM effects WHERE thread_id = %s AND key = %s",
                (call.thread_id, call.key),
            )
            call.row = cast("dict[str, Any]", await rows.fetchone())

    def _check_ended(self, call: _Call, fingerprint: str) -> None:
        if call.row["name"] != self._name:
            raise KeyReused(call.key, call.row["name"], self._name)
        if call.row["fingerprint"] != fingerprint:
            raise KeyReused(call.key, "other arguments", f"these, of {self._name}")
        if call.row["status"] == "started":
            left = f"an earlier call may still be under way, for {call.row['lease_left_s']:.0f} s at most"
            raise EffectInProgress(self._name, left)

    async def _done(self, call: _Call, result: Any) -> Any:
        """Keep the result; what every caller gets."""
        try:
            text = json.dumps(result, allow_nan=False)
        except (TypeError, ValueError, RecursionError) as exc:
            await _end(call, "done", error={"text": f"{type(result).__name__}: {exc}", "result": _in_short(result)})
            raise ResultNotKept(self._name, str(exc)) from exc
        await _end(call, "done", result=text)
        return json.loads(text)

    async def _failed(self, call: _Call, exc: Exception) -> Exception | None:
        """Keep a permanent error; what every caller gets in its place. None: it is not permanent, let it rise.

        A pause for a person is refused: the function would begin anew at the answer.
        """
        # What LangGraph raises for itself is no outcome.
        passing = isinstance(exc, GraphBubbleUp | EffectInProgress | AskedInEffect)
        if passing or not isinstance(exc, self._permanent):
            async with call.drive.pen.tx() as conn:
                await conn.execute(
                    "UPDATE effects SET lease_until = clock_timestamp()"
                    " WHERE thread_id = %s AND key = %s AND attempt = %s AND status = 'started'",
                    (call.thread_id, call.key, call.row["attempt"]),
                )
            return AskedInEffect(self._name) if isinstance(exc, GraphInterrupt) else None
        error = _error_as_json(exc)
        await _end(call, "failed", error=error)
        return self._error_of(error)

    def _outcome(self, call: _Call) -> Any:
        if call.row["status"] == "failed":
            raise self._error_of(call.row["error"])
        if call.row["error"] is not None:
            raise ResultNotKept(self._name, call.row["error"]["text"])
        return call.row["result"]

    def _error_of(self, error: dict[str, Any]) -> Exception:
        """The exception again, of its own type if it can be made from its arguments: the first caller gets it too."""
        for kind in _with_subclasses(self._permanent):
            if _qualified(kind) == error["type"] and error["args"] is not None:
                with contextlib.suppress(Exception):
                    again = kind(*error["args"])
                    if str(again) == error["text"]:
                        return again
        return EffectFailed(self._name, error["type"], error["text"])

    def _fingerprint(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
        bound = self._signature.bind(*args, **kwargs)
        bound.apply_defaults()
        plain = {}
        for name, value in bound.arguments.items():
            try:
                plain[name] = _plain(value)
            except TypeError as exc:
                raise TypeError(f"{self._name}: its argument {name} cannot be told from others ({exc})") from None
        return digest(plain)

    def _number(self, drive: _Drive, place: _Place, fingerprint: str) -> tuple[tuple[object, ...], int]:
        """The smallest number that no equal call of this run of the node has: one that is tried again keeps its own."""
        where = (place.run, self._name, fingerprint)
        taken = drive.numbers[where]
        number = next(number for number in itertools.count() if number not in taken)
        taken.add(number)
        return where, number

    def _auto_key(self, place: _Place, fingerprint: str, number: int) -> str:
        if place.is_repeated:
            raise NeedsKey(self._name)
        return f"auto:{digest([self._name, place.where, fingerprint, number])}"

    def _chosen_key(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
        assert self._key is not None
        chosen = self._key(*args, **kwargs) if callable(self._key) else self._key
        if not (isinstance(chosen, str) and 0 < len(chosen) <= _LONGEST_KEY and chosen.isprintable()):
            raise ValueError(
                f"{self._name}: its key {chosen!r} is not text of 1 to {_LONGEST_KEY} printable characters"
            )
        return f"key:{chosen}"


async def _end(call: _Call, status: str, *, result: str | None = None, error: dict[str, Any] | None = None) -> None:
    async with call.drive.pen.tx() as conn:
        ours = await conn.execute(
            "UPDATE effects SET status = %s, result = %s, error = %s, ended_at = clock_timestamp()"
            " WHERE thread_id = %s AND key = %s AND attempt = %s AND status = 'started'",
            (status, result, error and json.dumps(error), call.thread_id, call.key, call.row["attempt"]),
        )
        call.ended = True
        assert ours.rowcount == 1, "somebody else has made this call, without the thread's lock"


@contextlib.contextmanager
def _until_recorded(call: _Call) -> Iterator[None]:
    """Inside, the call is under way; afterwards its outcome is recorded, or it never will be."""
    token = _under_way.set((*_under_way.get(), call))
    try:
        yield
    finally:
        _under_way.reset(token)
        if _running_loop() is call.drive.loop:
            call.free()
        else:
            # A loop that is closed has nobody left who waits.
            with contextlib.suppress(RuntimeError):
                call.drive.loop.call_soon_threadsafe(call.free)


def _place() -> _Place:
    """Where LangGraph is in this thread.

    By step and path, which stay the same if checkpoints are lost and the flow runs again; within a subgraph also by
    the tasks above it (format of the namespace: `node:task|node:task`).
    """
    try:
        config, info = get_config(), get_runtime().execution_info
    except (RuntimeError, KeyError) as exc:
        raise NotInADrive("an @idempotent function is called by a node of a flow") from exc
    assert info is not None
    metadata = config["metadata"]
    above = str(metadata["langgraph_checkpoint_ns"]).rpartition("|")[0]
    return _Place(
        thread_id=config["configurable"]["thread_id"],
        where=(above, metadata["langgraph_step"], metadata["langgraph_path"]),
        run=(info.checkpoint_ns, info.task_id, info.node_attempt),
        is_repeated=any(segment.isdigit() for segment in above.split("|")),
    )


@functools.singledispatch
def _plain(value: Any) -> Any:
    """JSON that is the same for equal values, in every process. Raises TypeError for what has no such form."""
    kind = _qualified(type(value))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return [kind, _plain({field.name: getattr(value, field.name) for field in dataclasses.fields(value)})]
    if isinstance(value, BaseModel):
        return [kind, _plain(value.model_dump())]
    raise TypeError(f"a {kind} has no plain form: give its id instead")


@_plain.register
def _(value: bool | int | float | str | None) -> Any:
    return value


@_plain.register
def _(value: Decimal | date | time | timedelta | UUID | PurePath | Enum) -> Any:
    return [type(value).__name__, str(value)]


@_plain.register
def _(value: bytes) -> Any:
    return ["bytes", value.hex()]


@_plain.register
def _(value: list | tuple) -> Any:  # type: ignore[type-arg]
    return [_plain(each) for each in value]


@_plain.register
def _(value: AbstractSet) -> Any:  # type: ignore[type-arg]
    return ["set", *sorted((_plain(each) for each in value), key=canonical)]


@_plain.register
def _(value: Mapping) -> Any:  # type: ignore[type-arg]
    return ["mapping", *sorted(([_plain(name), _plain(each)] for name, each in value.items()), key=canonical)]


def _in_short(result: Any) -> str | None:
    """What a person who looks into the row may know a result by: the beginning of its repr, if it has one."""
    with contextlib.suppress(Exception):
        return storable(repr(result)[:_MOST_OF_A_RESULT])
    return None


def _error_as_json(exc: Exception) -> dict[str, Any]:
    try:
        args = json.loads(json.dumps(exc.args, allow_nan=False))
    except (TypeError, ValueError, RecursionError):
        args = None
    return {"type": _qualified(type(exc)), "args": args, "text": str(exc)}


def _with_subclasses(kinds: tuple[type[Exception], ...]) -> Iterator[type[Exception]]:
    for kind in kinds:
        yield kind
        yield from _with_subclasses(tuple(kind.__subclasses__()))


def _qualified(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def _running_loop() -> asyncio.AbstractEventLoop | None:
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None


def _let_context_travel() -> None:
    """From now on a thread, and a pool's work, sees the context variables of whoever started it."""
    start: Callable[..., None] = threading.Thread.start
    submit: Callable[..., Any] = concurrent.futures.ThreadPoolExecutor.submit

    def run_apart(run: Callable[[], None]) -> None:
        # It lives in a context variable, and is changed in place.
        decimal.setcontext(decimal.getcontext().copy())
        run()

    @functools.wraps(start)
    def start_with_context(self: threading.Thread) -> None:
        self.run = functools.partial(contextvars.copy_context().run, run_apart, self.run)  # type: ignore[method-assign]
        start(self)

    @functools.wraps(submit)
    def submit_with_context(self: Any, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        return submit(self, contextvars.copy_context().run, fn, *args, **kwargs)

    threading.Thread.start = start_with_context  # type: ignore[method-assign]
    concurrent.futures.ThreadPoolExecutor.submit = submit_with_context  # type: ignore[method-assign]


_let_context_travel()
