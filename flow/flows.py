"""A flow is a module: `FLOWS` names them, and this loads them.

    # myteam/refunds.py, and FLOWS=flow.claims,myteam.refunds
    FLOW = Flow(name="refunds", version="1", input=Refund, build=build)

A module has one `FLOW`, or several in `FLOWS`. Two of one name must differ in their version: new threads get the one
that is named first, and a thread keeps the one that it began with.
"""

from __future__ import annotations

import importlib
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

from langgraph.graph import StateGraph
from langgraph.graph.state import CompiledStateGraph
from langgraph.types import Interrupt
from pydantic import BaseModel, ValidationError

from flow.asking import Request
from flow.errors import NoResult, SettingError, Unaskable, UnknownFlow
from flow.inputs import refused
from flow.keeping import unkept
from flow.model import Approval, Thread, flow_key
from flow.policy import UNNAMED, Policy, Tier
from flow.questions import question_hash, stored_question

Graph = CompiledStateGraph[Any, Any, Any, Any]

# What a thread's result may have, as JSON: it stands in its row, in events and in webhooks.
LARGEST_RESULT = 64_000

_NAME = re.compile(r"[a-z0-9][a-z0-9-]{0,62}")
_VERSION = re.compile(r"[A-Za-z0-9][A-Za-z0-9.+-]{0,62}")


@dataclass(frozen=True, kw_only=True)
class Asked:
    """One question as it is written to its approval's row. `step` is its place among how many, where that is known."""

    tier: str
    request: dict[str, Any]
    digest: str
    step: tuple[int, int] | None = None


class Flow:
    """One flow: how it is called, built, begun and ended.

    `name` is of small letters, digits and "-". `version` says what an approval means: it is part of what people agree
    to, and a thread is only ever driven by the version that it began with. `build` returns the StateGraph, not
    compiled (or compiled without a saver, as LangChain's `create_agent` does). `input` checks what a thread is started
    with, before it is.

    The state begins as the input's fields in JSON (a Decimal is text, which `Decimal(state["amount"])` reads; a set is
    a list), with `thread_id` and `started_at` (ISO 8601, UTC) if it has such keys. The flow is done when its graph has
    ended and `result` of the state is a JSON value; by default that is the state's key `result`. `describe` makes a
    Request of the value of a plain `interrupt()` of no known shape, for people to see; it is answered with True or
    False as before. Names in `not_secret` may stand in requests although their values look like secrets.
    """

    # Whether it ends by the row of its payment, rather than by a result; then `pay` itself checks what was approved.
    pays = False

    def __init__(
        self,
        *,
        name: str,
        version: str,
        build: Callable[[], StateGraph[Any, Any, Any, Any] | Graph],
        input: type[BaseModel],
        describe: Callable[[Any], Request] | None = None,
        result: Callable[[Mapping[str, Any]], Any] | None = None,
        not_secret: Sequence[str] = (),
    ) -> None:
        if not _NAME.fullmatch(name) or not _VERSION.fullmatch(version):
            raise SettingError(
                f"the flow {name!a} version {version!a}: a name has small letters, digits and -, a version also . and +"
            )
        self.name, self.version, self.build, self.input = name, version, build, input
        self.describe, self.not_secret = describe, frozenset(not_secret)
        self._result = result
        self._graph: Graph | None = None

    @property
    def key(self) -> str:
        return flow_key(self.name, self.version)

    def compile(self) -> Graph:
        """Its graph, compiled once per process (2 ms); each drive copies it with its own saver.

        Raises SettingError for a graph that brings its own saver, or whose state no checkpoint would give back.
        """
        if self._graph is None:
            graph = self.built()
            if graph.checkpointer is not None:
                raise SettingError(
                    f"the flow {self.name} is built with a checkpointer of its own: let build return the StateGraph, or"
                    " compile it without one; each drive brings the one that keeps what it does"
                )
            if lost := list(unkept(graph)):
                raise SettingError(f"the flow {self.name}: {'; '.join(map(str, lost))}")
            self._graph = graph
        return self._graph

    def built(self) -> Graph:
        """A graph of it, compiled, whatever else is wrong with it. Raises SettingError if it cannot be built."""
        try:
            built = self.build()
            return built.compile() if isinstance(built, StateGraph) else built
        except Exception as exc:
            # Whatever its own code, or LangGraph, says of it: it must be named, and not end as a traceback of ours.
            raise SettingError(f"FLOWS: {self.name} cannot be built: {type(exc).__name__}: {exc}") from exc

    def begin(self, thread: Thread) -> Mapping[str, Any]:
        """The state that a new thread begins with."""
        own = {"thread_id": thread.thread_id, "started_at": thread.created_at.isoformat()}
        return self.checked(thread.input).model_dump(mode="json") | own

    def checked(self, given: Any) -> BaseModel:
        """The input, checked by the flow's model. Raises BadInput, which names the field."""
        try:
            return self.input.model_validate(given)
        except ValidationError as exc:
            raise refused(exc, f"{self.name}: ") from exc

    def asks(self, thread: Thread, pause: Interrupt) -> Asked:
        """What an interrupt of this flow asks, and of which tier. Raises Unaskable, SecretInRequest."""
        from flow.secrecy import check_no_secret

        request = stored_question(pause.value, response_schema=pause.response_schema)
        if self.describe and request["kind"] == "json":
            # Shown otherwise, and answered as before.
            request = stored_question(self.describe(pause.value).as_value()) | {"kind": "json"}
            if request["options"]:
                raise Unaskable("what is answered with True or False has no options")
        check_no_secret(request, allowed=self.not_secret)
        tier = request.get("tier", UNNAMED)
        return Asked(tier=tier, request=request, digest=question_hash(thread, pause.id, tier, request))

    def tier_of(self, asked: Asked, pause: Interrupt, policy: Policy) -> Tier:  # noqa: ARG002
        """Who is asked, by the policy of the moment in which it is asked. Raises Unaskable."""
        return policy.tier(asked.tier)

    def result(self, state: Mapping[str, Any]) -> Any:
        """What a thread whose graph has ended with this state has come to. Raises NoResult."""
        try:
            found = self._result(state) if self._result else state["result"]
            text = json.dumps(found, allow_nan=False)
        except (KeyError, TypeError, ValueError, AttributeError, IndexError) as exc:
            raise NoResult(f"the flow ended without a result ({type(exc).__name__}: {exc})") from exc
        if len(text) > LARGEST_RESULT:
            raise NoResult(f"the flow's result has {len(text)} characters as JSON, at most {LARGEST_RESULT} are kept")
        return json.loads(text)


class Flows:
    """The flows of this process, in the order in which `FLOWS` names them."""

    def __init__(self, flows: Sequence[Flow]) -> None:
        self._flows: dict[str, Flow] = {}
        for flow in flows:
            if self._flows.setdefault(flow.key, flow) is not flow:
                raise SettingError(
                    f"FLOWS: two flows are {flow.name} version {flow.version}: give each its own version"
                )

    def __iter__(self) -> Iterator[Flow]:
        return iter(self._flows.values())

    @property
    def keys(self) -> tuple[str, ...]:
        return tuple(self._flows)

    def of(self, thread: Thread) -> Flow | None:
        """The flow of this thread, in the version that it began with."""
        return self._flows.get(thread.flow_key)


def load_flows(modules: Sequence[str]) -> Flows:
    """Import these modules, collect their flows, and compile them.

    Raises SettingError, which names the module or the flow and what it lacks.
    """
    flows = Flows(list(_each(modules)))
    for flow in flows:
        flow.compile()
    return flows


def flows_with(modules: Sequence[str], key: str) -> Flows:
    """The flow with this key alone, or none: whoever needs only one imports no more than it takes to find it."""
    return Flows(list(islice((flow for flow in _each(modules) if flow.key == key), 1)))


def newest_flow(modules: Sequence[str], name: str) -> Flow:
    """The flow that a new thread gets, found in the same way. Raises UnknownFlow."""
    known = set()
    for flow in _each(modules):
        if flow.name == name:
            return flow
        known.add(flow.name)
    raise UnknownFlow(name, sorted(known))


def _each(modules: Sequence[str]) -> Iterator[Flow]:
    for module in modules:
        yield from _flows_of(module)


def _flows_of(module: str) -> Sequence[Flow]:
    try:
        imported = importlib.import_module(module)
    except Exception as exc:
        # Whatever its own code raises: it must be named, and not end as a traceback of ours.
        raise SettingError(f"FLOWS: {module} cannot be imported: {type(exc).__name__}: {exc}") from exc
    found = getattr(imported, "FLOWS", None) or [getattr(imported, "FLOW", None)]
    if not all(isinstance(flow, Flow) for flow in found):
        raise SettingError(f"FLOWS: {module} has no FLOW: give it one, `FLOW = Flow(name=…, …)`, or several in FLOWS")
    return tuple(found)


def settled_the_same(asked: Asked, approval: Approval) -> bool:
    """Whether what was approved is what the flow asks for, by its row and by the flow itself."""
    if not approval.whole:
        return False
    return asked.digest == approval.request_hash and asked.request == approval.request and asked.tier == approval.tier
