"""Traps in a flow's code, found by reading it: each with its file, its line and what to do instead.

    asks twice           a node asks again, or in a loop: at each answer it runs from its top
    acts before asking   what a node did before it asked it does once more at the answer
    asks in an effect    an @idempotent function is no place to wait for a person
    clock                the clock, or chance, decides, and decides anew when the node runs again
    secret               a request names what nobody should be shown
    checkpointer         a graph has a saver of its own, or none where it needs one, or is run by its module
    hash                 hash() is another one in each process
    state                a checkpoint gives back something else than the state held

What is read is what runs: the nodes and edges of the compiled graph and of those within it, and the helpers that they
call; what is installed is not. Where a run can tell, it refuses these as well.
"""

from __future__ import annotations

import ast
import builtins
import os
import random
import time
import uuid
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from datetime import date, datetime
from pathlib import Path
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any, Literal

from langgraph.pregel import Pregel
from langgraph.types import interrupt

from flow.asking import Request
from flow.flows import Flow
from flow.keeping import unkept
from flow.paths import Paths, Role, is_effect, is_question
from flow.secrecy import is_allowed, is_secret_name, value_secret
from flow.source import Code, code_of, line_of_key, syntax_of

Trap = Literal[
    "asks twice",
    "acts before asking",
    "asks in an effect",
    "always true",
    "clock",
    "secret",
    "checkpointer",
    "hash",
    "state",
]

_FIXES: dict[Trap, str] = {
    "asks twice": "give each question a node of its own; to ask several in turn, lead an edge back to the node",
    "acts before asking": "move it to a node before this one, or behind the answer",
    "asks in an effect": "ask in the node, and pass the answer to the effect",
    "always true": "look into it, or use `ask(Request(…))`, whose answer is true if it approves",
    "clock": "decide by what is in the state: `started_at` is, and a node of its own may add more",
    "secret": "pass a reference to it; if it is none, allow its name with Flow(not_secret=(…,))",
    "checkpointer": "let `build` return the graph uncompiled: each drive brings the saver that keeps what it does",
    "hash": "use the value itself, or hashlib",
}

_OURS = Path(__file__).resolve().parent
_CLOCKS = frozenset({
    datetime.now, datetime.utcnow, datetime.today, date.today, time.time, time.time_ns, time.monotonic,
    time.monotonic_ns, time.perf_counter, time.perf_counter_ns, time.localtime, time.gmtime, uuid.uuid1, uuid.uuid4,
    os.urandom, random.random, random.getrandbits,
})  # fmt: skip


@dataclass(frozen=True, kw_only=True, order=True)
class Finding:
    """One trap: where it is, what it is, and what to do instead."""

    file: str
    line: int
    trap: Trap
    what: str
    fix: str

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def traps_of(flow: Flow) -> list[Finding]:
    """Every trap that can be seen in this flow, by file and line."""
    return sorted(_Reader(flow).read())


class _Reader:
    def __init__(self, flow: Flow) -> None:
        self._flow = flow
        self._graph: Any = flow.built()
        self._found: set[Finding] = set()
        self._any_asks = False
        # The files of the flow itself, and where it is built.
        self._files: set[str] = set()
        self._built_at = ("", 0)
        if (build := code_of(flow.build)) is not None:
            self._files.add(build.file)
            self._built_at = build.file, build.node.lineno
        self._paths = Paths(report=self._add, look=self._look, is_followed=self._is_followed)

    def read(self) -> set[Finding]:
        graphs = [self._graph, *(inner for _, inner in self._graph.get_subgraphs(recurse=True))]
        for graph in graphs:
            for runnable in _runnables_of(graph):
                # Those that LangGraph does not call its subgraphs: of them it keeps nothing.
                graphs += [runnable] if isinstance(runnable, Pregel) and runnable not in graphs else []
        units = [(graph, list(_nodes_of(graph)), list(_edges_of(graph))) for graph in graphs]
        self._files |= {code.file for _, nodes, edges in units for code in (*nodes, *edges)}
        for graph, nodes, edges in units:
            self._paths.asks = False
            for code in nodes:
                self._paths.run(code, "node")
            for code in edges:
                self._paths.run(code, "edge")
            self._any_asks |= self._paths.asks
            if self._paths.asks and graph is not self._graph and graph.checkpointer is False:
                self._inner_without_saver()
        self._modules()
        if self._graph.checkpointer is not None and not any(found.trap == "checkpointer" for found in self._found):
            self._add("checkpointer", *self._built_at, "the graph is built with a checkpointer of its own")
        for lost in unkept(self._graph):
            file, line = (line_of_key(lost.schema, lost.key) if lost.schema else None) or self._built_at
            self._add("state", file, line, f"{lost.key} is {lost.type}, which {lost.becomes}", lost.fix)
        return self._found

    def _add(self, trap: Trap, file: str, line: int, what: str, fix: str = "") -> None:
        self._found.add(Finding(file=file, line=line, trap=trap, what=what, fix=fix or _FIXES[trap]))

    def _is_followed(self, code: Code) -> bool:
        """Of this project only what is a flow."""
        return code.file in self._files or not Path(code.file).resolve().is_relative_to(_OURS)

    # What one function says

    def _look(self, code: Code, role: Role) -> None:
        for node in _walk(code.node):
            if isinstance(node, ast.Call):
                target = code.meaning(node.func)
                if target is builtins.hash:
                    self._add("hash", code.file, node.lineno, "hash() differs from process to process")
                if target is Request or is_question(target):
                    self._look_at_request(code, node)
        if role == "effect":
            self._look_at_keys(code)
            return
        deciding = _Deciding(code, self._paths)
        for test in _tests(code, role):
            if _is_answered_with_a_container(code, test):
                self._add("always true", code.file, test.lineno, "a rejection is a dict or a list here, which is true")
            if deciding.is_by_clock(test):
                self._add("clock", code.file, test.lineno, "the clock or chance decides which way a node takes")

    def _look_at_request(self, code: Code, call: ast.Call) -> None:
        for name, value in _pairs(call):
            if is_allowed(name, self._flow.not_secret):
                continue
            text = value.value if isinstance(value, ast.Constant) and isinstance(value.value, str) else None
            if is_secret_name(name, text):
                self._add("secret", code.file, value.lineno, f"a request has a field {name!r}")
            elif text is not None and (what := value_secret(text)):
                self._add("secret", code.file, value.lineno, f"{name!r} {what}")

    def _look_at_keys(self, code: Code) -> None:
        """The function that names an effect's calls."""
        for decorator in code.decorators:
            for keyword in decorator.keywords if isinstance(decorator, ast.Call) else ():
                if keyword.arg == "key":
                    named = keyword.value
                    key = code.within(named) if isinstance(named, ast.Lambda) else code.meaning(named)
                    if (made_by := self._paths.followed(key)) is not None:
                        self._paths.run(made_by, "effect")

    # What stands around the nodes

    def _modules(self) -> None:
        for file in sorted(self._files):
            module = syntax_of(file)
            inside = {
                id(each)
                for node in ast.walk(module)
                if (file, getattr(node, "lineno", 0), getattr(node, "col_offset", 0)) in self._paths.places
                for each in ast.walk(node)
            }
            compiled = {name for node in ast.walk(module) for name in _compiled_names(node)}
            for node in ast.walk(module):
                self._thread_ids(file, node)
                if isinstance(node, ast.Call):
                    self._compiled(file, node)
                    if id(node) not in inside and self._any_asks and _runs_a_graph(node, compiled):
                        what = "the module runs its graph by itself: nobody is asked, and nothing is kept"
                        self._add("checkpointer", file, node.lineno, what, "start a thread of the flow instead")

    def _compiled(self, file: str, call: ast.Call) -> None:
        saver = _saver_of(call)
        if saver is not None and not isinstance(saver, ast.Constant):
            self._add("checkpointer", file, call.lineno, "a graph is compiled with a checkpointer of its own")

    def _inner_without_saver(self) -> None:
        fix = "compile it without `checkpointer`: it is kept with the graph around it"
        what = "a graph that asks is compiled with checkpointer=False"
        places = [
            (file, node.lineno)
            for file in self._files
            for node in ast.walk(syntax_of(file))
            if isinstance(node, ast.Call) and getattr(_saver_of(node), "value", None) is False
        ]
        for file, line in places or [self._built_at]:
            self._add("checkpointer", file, line, what, fix)

    def _thread_ids(self, file: str, node: ast.AST) -> None:
        for name, value in _named(node):
            for call in ast.walk(value) if name == "thread_id" else ():
                if isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id == "hash":
                    self._add("hash", file, call.lineno, "a thread id is made with hash()")


class _Deciding:
    """Whether the clock or chance is in what decides, by name or at once."""

    def __init__(self, code: Code, paths: Paths, above: tuple[object, ...] = ()) -> None:
        self._code, self._paths, self._above = code, paths, (*above, code.place)
        self._names: set[str] = set()
        before = -1
        while before != len(self._names):
            before = len(self._names)
            self._names |= {
                target.id
                for node in _walk(code.node)
                if isinstance(node, ast.Assign | ast.AnnAssign | ast.NamedExpr | ast.AugAssign) and node.value
                for target in (node.targets if isinstance(node, ast.Assign) else [node.target])
                if isinstance(target, ast.Name) and self.is_by_clock(node.value)
            }

    def is_by_clock(self, node: ast.AST) -> bool:
        if isinstance(node, ast.Name):
            return node.id in self._names
        if isinstance(node, ast.Await):
            # What comes from outside is its own; a person's answer is kept.
            return False
        if isinstance(node, ast.Call):
            target = self._code.meaning(node.func)
            if is_question(target) or is_effect(target):
                return False
            if _is_clock(target) or self._returns_it(target):
                return True
        return any(self.is_by_clock(child) for child in ast.iter_child_nodes(node))

    def _returns_it(self, target: Any) -> bool:
        helper = self._paths.followed(target)
        if helper is None or helper.place in self._above:
            return False
        inner = _Deciding(helper, self._paths, self._above)
        return any(inner.is_by_clock(value) for value in _returned(helper))


def _is_clock(target: Any) -> bool:
    if isinstance(target, MethodType):
        return isinstance(target.__self__, random.Random)
    return isinstance(target, FunctionType | BuiltinFunctionType) and (
        target in _CLOCKS or target.__module__ == "secrets"
    )


def _runnables_of(graph: Any) -> list[Any]:
    builder = getattr(graph, "builder", None)
    return [spec.runnable for spec in builder.nodes.values()] if builder else []


def _nodes_of(graph: Any) -> Iterator[Code]:
    for runnable in _runnables_of(graph):
        yield from _codes_of(runnable)


def _edges_of(graph: Any) -> Iterator[Code]:
    builder = getattr(graph, "builder", None)
    for branches in builder.branches.values() if builder else ():
        for branch in branches.values():
            yield from _codes_of(branch.path)


def _codes_of(runnable: Any) -> Iterator[Code]:
    """What a runnable calls: its function, each of a sequence's, each tool's."""
    inner = [*getattr(runnable, "steps", ()), *getattr(runnable, "tools_by_name", {}).values()]
    for each in inner:
        yield from _codes_of(each)
    functions = [getattr(runnable, name, None) for name in ("func", "afunc", "coroutine")]
    for function in [] if inner else functions:
        if function is not None and (code := code_of(function)) is not None:
            yield code


def _walk(node: ast.AST) -> Iterator[ast.AST]:
    """What stands in a function, without the functions that it defines."""
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield child
            yield from _walk(child)


def _returned(code: Code) -> Iterator[ast.expr]:
    if isinstance(code.node, ast.Lambda):
        yield code.node.body
        return
    for node in _walk(code.node):
        if isinstance(node, ast.Return) and node.value is not None:
            yield node.value


def _tests(code: Code, role: Role) -> Iterator[ast.expr]:
    """What decides which way a function takes; of an edge that is what it returns, too."""
    for node in _walk(code.node):
        if isinstance(node, ast.If | ast.While | ast.IfExp | ast.Assert):
            yield node.test
        elif isinstance(node, ast.comprehension):
            yield from node.ifs
        elif isinstance(node, ast.Match):
            yield node.subject
            yield from (case.guard for case in node.cases if case.guard is not None)
    if role == "edge":
        yield from _returned(code)


def _is_answered_with_a_container(code: Code, test: ast.expr) -> bool:
    """Whether the bare answer of an `interrupt()` of a known shape decides: the one of no shape gets True or False."""
    if isinstance(test, ast.BoolOp):
        return any(_is_answered_with_a_container(code, each) for each in test.values)
    if isinstance(test, ast.UnaryOp):
        return _is_answered_with_a_container(code, test.operand)
    if not isinstance(test, ast.Call) or code.meaning(test.func) is not interrupt or not test.args:
        return False
    names = [name for name, _ in _pairs(test)]
    return isinstance(test.args[0], ast.Dict | ast.List) and not _SHAPES.isdisjoint(names)


_SHAPES = frozenset({"title", "action_requests", "action_request"})


def _pairs(call: ast.Call) -> Iterator[tuple[str, ast.expr]]:
    """The literal names and values of the arguments, however deep."""
    for argument in (*call.args, *(keyword.value for keyword in call.keywords)):
        for node in ast.walk(argument):
            yield from _named(node)
    for keyword in call.keywords:
        if keyword.arg == "title":
            yield "title", keyword.value


def _named(node: ast.AST) -> Iterator[tuple[str, ast.expr]]:
    """What stands under a name: a literal dict's values, keyword arguments, an assignment."""
    if isinstance(node, ast.Dict):
        for key, value in zip(node.keys, node.values, strict=True):
            if isinstance(key, ast.Constant) and isinstance(key.value, str):
                yield key.value, value
    elif isinstance(node, ast.Call):
        yield from ((keyword.arg, keyword.value) for keyword in node.keywords if keyword.arg is not None)
    elif isinstance(node, ast.Assign):
        yield from ((target.id, node.value) for target in node.targets if isinstance(target, ast.Name))


def _is_compile(node: ast.AST) -> bool:
    return (
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr == "compile"
        and not (isinstance(node.func.value, ast.Name) and node.func.value.id in ("re", "regex"))
    )


def _saver_of(call: ast.Call) -> ast.expr | None:
    """What a graph is compiled with, if this does it."""
    if not _is_compile(call):
        return None
    return next((keyword.value for keyword in call.keywords if keyword.arg == "checkpointer"), None)


def _compiled_names(node: ast.AST) -> Iterator[str]:
    """The variables that hold a compiled graph, if this is an assignment of one."""
    if isinstance(node, ast.Assign) and _is_compile(node.value):
        yield from (target.id for target in node.targets if isinstance(target, ast.Name))


def _runs_a_graph(call: ast.Call, compiled: set[str]) -> bool:
    if not isinstance(call.func, ast.Attribute) or call.func.attr not in ("invoke", "ainvoke", "stream", "astream"):
        return False
    of = call.func.value
    return _is_compile(of) or (isinstance(of, ast.Name) and of.id in compiled)
