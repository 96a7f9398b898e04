"""What a checkpoint would not give back is refused before a thread begins, or leaves it to a person with the reason."""

from __future__ import annotations

import collections
import dataclasses
import logging
import operator
import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from enum import Enum, StrEnum
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, NewType, NoReturn, NotRequired, TypedDict, TypeVar
from uuid import UUID

import pytest
import typing_extensions
from langchain_core.documents import Document
from langchain_core.messages import AnyMessage, BaseMessage
from langgraph.channels import UntrackedValue
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import END, START, StateGraph, add_messages
from langgraph.types import interrupt
from pydantic import BaseModel, model_validator

from flow.asking import Request, ask
from flow.database import Connection
from flow.effects import idempotent
from flow.errors import BadInput, SettingError, ThreadExists
from flow.flows import Flow, Flows, load_flows
from flow.inputs import check_object, parse_object
from flow.settings import Settings
from flow.starting import Checker, filed
from flow.threads import insert_thread, thread_of
from tests.command import ROOT
from tests.driving import run, thread_row
from tests.rows import all_rows, value


class Nothing(BaseModel):
    pass


class Money(BaseModel):
    amount: Decimal


class Sure(BaseModel):
    """One that no sample satisfies."""

    @model_validator(mode="after")
    def _never(self) -> NoReturn:
        raise ValueError("never")


@dataclasses.dataclass(frozen=True, slots=True)
class Line:
    text: str

    def __post_init__(self) -> None:
        raise ValueError("never")


class Color(Enum):
    RED = 1


class Size(StrEnum):
    S = "s"


class Pair(NamedTuple):
    one: str


class Names(list[str]):
    pass


class Plain:
    pass


class Tree(TypedDict):
    name: str
    below: NotRequired[list[Tree]]


class Late(BaseModel):
    """One of which nobody can make up a sample: it is let through."""

    def model_post_init(self, context: Any, /) -> None:
        raise ValueError("never")


class Other(typing_extensions.TypedDict, total=False):
    at: datetime


class Rotten(TypedDict):
    pair: tuple[str, str]


T = TypeVar("T")
OrderId = NewType("OrderId", str)

KEPT: tuple[Any, ...] = (
    str, int, float, bool, None, bytes, Decimal, datetime, date, time, timedelta, UUID, Path, list, dict, set, Any,
    object, T, OrderId, list[str], list[Any], dict[str, Any], dict[str, Decimal], set[str], frozenset[int],
    Sequence[str], Mapping[str, date], str | None, Literal["a", "b"], Tree, Other, list[Tree], collections.deque[str],
    Annotated[list[str], operator.add], Annotated[list[AnyMessage], add_messages], list[BaseMessage], list[Document],
    Annotated[Money, UntrackedValue], Late,
)  # fmt: skip

LOST: tuple[tuple[Any, str], ...] = (
    (Money, "dict instead of Money"),
    (Sure, "dict instead of Sure"),
    (Money | None, "dict instead of Money"),
    (list[Money], "dict instead of Money"),
    (Line, "dict instead of Line"),
    (dict[str, Line], "dict instead of Line"),
    (Color, "int instead of Color"),
    (Size, "str instead of Size"),
    (Literal[Color.RED], "int instead of Color"),
    (Pair, "dict instead of Pair"),
    (Rotten, "list instead of tuple"),
    (tuple[str, ...], "list instead of tuple"),
    (tuple[Any, ...], "list instead of tuple"),
    (Names, "list instead of Names"),
    (collections.Counter[str], "dict instead of Counter"),
    (collections.defaultdict[str, int], "dict instead of defaultdict"),
    (ValueError, "str instead of ValueError"),
    (Plain, "no checkpoint can hold"),
    (complex, "no checkpoint can hold"),
    (Callable[[], str], "no checkpoint can hold"),
)


def flow_of(schema: Any, node: Any = lambda state: {}, **compiled: Any) -> Flow:
    def build() -> Any:
        graph = StateGraph(schema)
        graph.add_node("only", node)
        graph.add_edge(START, "only")
        graph.add_edge("only", END)
        return graph.compile(**compiled) if compiled else graph

    return Flow(name="only", version="1", build=build, input=Nothing)


def state_of(annotation: Any) -> Any:
    return TypedDict("State", {"kept": annotation}, total=False)  # type: ignore[operator]


# Ids that a type writes itself may hold an address, and differ from process to process.
@pytest.mark.parametrize("annotation", KEPT, ids=lambda _: None)
def test_what_comes_back_as_it_was_may_be_in_a_state(annotation: Any) -> None:
    flow_of(state_of(annotation)).compile()


@pytest.mark.parametrize(("annotation", "becomes"), LOST, ids=lambda _: None)
def test_what_comes_back_as_something_else_is_refused_with_flow_key_type_and_fix(
    annotation: Any, becomes: str, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(SettingError) as caught, caplog.at_level(logging.WARNING):
        flow_of(state_of(annotation)).compile()
    said = str(caught.value)
    assert said.startswith("the flow only: its state's kept is ")
    assert becomes in said
    assert "make it a list" in said or "keep text of it" in said
    assert caplog.records == []


@pytest.mark.parametrize("schema", [Money, dataclasses.make_dataclass("State", [("kept", "list[tuple[str, str]]")])])
def test_a_state_that_is_a_model_or_a_dataclass_is_looked_at_by_its_fields(schema: Any) -> None:
    flow = flow_of(schema)
    if schema is Money:
        flow.compile()
    else:
        with pytest.raises(SettingError, match="list instead of tuple"):
            flow.compile()


def test_the_state_of_a_graph_within_is_looked_at_as_well() -> None:
    inner = flow_of(state_of(Money)).build()
    assert isinstance(inner, StateGraph)
    with pytest.raises(SettingError, match="dict instead of Money"):
        flow_of(state_of(str), inner.compile()).compile()


@pytest.mark.parametrize("saver", [InMemorySaver(), True, False])
def test_a_graph_with_a_saver_of_its_own_is_refused(saver: Any) -> None:
    with pytest.raises(SettingError, match="checkpointer of its own"):
        flow_of(state_of(str), checkpointer=saver).compile()
    assert flow_of(state_of(str), checkpointer=None, name="x").compile().checkpointer is None


def test_flows_that_cannot_be_built_are_said_when_they_are_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    text = "from tests.test_keeping import *\nFLOW = {}\n"
    (tmp_path / "lost_state.py").write_text(text.format("flow_of(state_of(Money))"))
    (tmp_path / "unbuilt.py").write_text(text.format("Flow(name='x', version='1', build=dict.fromkeys, input=Nothing)"))
    with pytest.raises(SettingError, match="its state's kept is Money"):
        load_flows(("lost_state",))
    with pytest.raises(SettingError, match="FLOWS: x cannot be built: TypeError"):
        load_flows(("unbuilt",))


def test_the_trial_says_the_same_where_langgraph_reads_strictly() -> None:
    messages, money = (f"flow_of(state_of({each})).compile()" for each in ("list[BaseMessage]", "Money"))
    script = f"from tests.test_keeping import *\n{messages}\n{money}"
    environment = os.environ | {"LANGGRAPH_STRICT_MSGPACK": "true", "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=False)
    assert "SettingError: the flow only: its state's kept is Money" in done.stderr


# In a drive


async def drive_one(conn: Connection, flow: Flow) -> str:
    await insert_thread(conn, thread_id="t1", flow="only", flow_version="1", input={}, requested_by="cli:ann")
    return await run(conn, Flows([flow]))


@pytest.mark.parametrize("text", ["a\x00b", float("nan"), float("inf"), "\ud800"], ids=ascii)
async def test_a_value_that_no_checkpoint_can_hold_leaves_the_thread_to_a_person(conn: Connection, text: Any) -> None:
    assert await drive_one(conn, flow_of(state_of(Any), lambda state: {"kept": text})) == "stuck"
    row = await thread_row(conn)
    assert (row["status"], row["due"]) == ("stuck", False)
    assert "which no checkpoint can hold" in row["reason"]
    assert await value(conn, "SELECT count(*) FROM notices WHERE kind = 'alarm'") == 1


@pytest.mark.parametrize(
    "given", [{"x": "a\x00b"}, {"a\x00": 1}, {"x": [{"y": "\ud800"}]}, {"x": float("nan")}], ids=ascii
)
async def test_an_input_that_could_not_be_stored_is_refused_at_every_door(given: Any) -> None:
    with pytest.raises(BadInput):
        check_object(given)
    with pytest.raises(BadInput):
        filed(Settings(), "approval", given)
    checker = Checker()
    with pytest.raises(BadInput):
        await checker.filed("approval", given)


def test_an_input_with_nul_is_refused_at_the_command_line() -> None:
    with pytest.raises(BadInput, match="cannot be stored"):
        parse_object('{"x": "a\\u0000b"}')


# Asking where nobody can be asked


@idempotent
async def asks_inside() -> bool:
    return ask(Request(title="sure?")).approved


@idempotent(permanent=(Exception,))
async def pauses_inside() -> Any:
    return interrupt("sure?")


@idempotent
async def pauses_deep_inside() -> Any:
    return await pauses_inside()


@pytest.mark.parametrize("effect", [asks_inside, pauses_inside, pauses_deep_inside], ids=lambda f: f.__name__)
async def test_an_effect_that_asks_leaves_the_thread_to_a_person(conn: Connection, effect: Any) -> None:
    async def node(state: Any) -> Any:
        return {"result": await effect()}

    assert await drive_one(conn, flow_of(state_of(Any), node)) == "stuck"
    reason = (await thread_row(conn))["reason"]
    assert "_inside is @idempotent, and asks a person: ask in a node before it" in reason
    assert await all_rows(conn, "SELECT * FROM approvals") == []
    # It has no outcome: mended, it is called.
    assert {row["status"] for row in await all_rows(conn, "SELECT status FROM effects")} == {"started"}


# One thread id for two


async def test_a_second_batch_under_the_first_ones_id_is_refused_and_both_are_told_apart(conn: Connection) -> None:
    async def start(flow: str, given: dict[str, Any]) -> None:
        await insert_thread(conn, thread_id="b1", flow=flow, flow_version="1", input=given, requested_by="cli:ann")

    first = {"items": ["a", "b"], "currency": "EUR"}
    await start("batch", first)
    await start("batch", first)
    with pytest.raises(
        ThreadExists, match=r"another input \(flow batch: another items, total\): choose another --thread"
    ):
        await start("batch", {"items": ["c"], "currency": "EUR", "total": "3"})
    with pytest.raises(ThreadExists, match=r"\(flow batch\)"):
        await start("payment", first)
    assert (await thread_of(conn, "b1")).input == first
