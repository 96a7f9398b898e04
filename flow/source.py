"""Where a function stands in its file, and what the names in it mean: for whoever reads flows without running them."""

from __future__ import annotations

import ast
import builtins
import functools
import inspect
import sys
import sysconfig
from collections import ChainMap
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

# What a name stands for if only a run could tell.
UNKNOWN: Any = object()

_INSTALLED = tuple(Path(sysconfig.get_path(name)).resolve() for name in ("stdlib", "platstdlib", "purelib", "platlib"))


@dataclass(frozen=True, kw_only=True, eq=False)
class Code:
    """One function: its syntax, its file, and what the names around it stand for."""

    node: ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda
    file: str
    names: Callable[[str], Any] = field(repr=False)
    # What a method is bound to.
    bound_to: Any = UNKNOWN

    @property
    def place(self) -> tuple[str, int, int]:
        return self.file, self.node.lineno, self.node.col_offset

    @property
    def decorators(self) -> list[ast.expr]:
        return [] if isinstance(self.node, ast.Lambda) else self.node.decorator_list

    @property
    def body(self) -> list[ast.stmt]:
        if isinstance(self.node, ast.Lambda):
            return [ast.copy_location(ast.Return(value=self.node.body), self.node.body)]
        return self.node.body

    def meaning(self, expression: ast.expr) -> Any:
        """What a name, or a dotted one, stands for; a Code for a function that this one defines."""
        if isinstance(expression, ast.Name):
            return self._own[expression.id] if expression.id in self._own else self.names(expression.id)
        if isinstance(expression, ast.Attribute):
            return _attribute(self.meaning(expression.value), expression.attr)
        return UNKNOWN

    @functools.cached_property
    def _own(self) -> dict[str, Any]:
        """Its parameters and variables, the functions that it defines, and what it imports."""
        args = self.node.args
        named = [*args.posonlyargs, *args.args, args.vararg, *args.kwonlyargs, args.kwarg]
        own = {arg.arg: UNKNOWN for arg in named if arg is not None}
        own |= dict.fromkeys(list(own)[:1], self.bound_to)
        for node in ast.walk(self.node):
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                own.setdefault(node.id, UNKNOWN)
            elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node is not self.node:
                own[node.name] = self.within(node)
            elif isinstance(node, ast.Import | ast.ImportFrom):
                own.update(_imported(node))
        return own

    def within(self, node: ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda) -> Code:
        """A function that stands in this one."""
        return Code(node=node, file=self.file, names=lambda name: self.meaning(ast.Name(id=name)))


def code_of(function: Any) -> Code | None:
    """The code of what can be called; None for what is installed, or has none in Python."""
    if isinstance(function, Code):
        return function
    if isinstance(function, functools.partial):
        return code_of(function.func)
    bound_to = function.__self__ if isinstance(function, MethodType) else UNKNOWN
    plain = inspect.unwrap(function.__func__ if isinstance(function, MethodType) else function)
    if not isinstance(plain, FunctionType):
        call = inspect.getattr_static(type(plain), "__call__", None)
        return code_of(MethodType(call, plain)) if isinstance(call, FunctionType) else None
    file = plain.__code__.co_filename
    if not is_own(file) or (node := _node_of(plain.__code__)) is None:
        return None
    cells: dict[str, Any] = {}
    for name, cell in zip(plain.__code__.co_freevars, plain.__closure__ or (), strict=True):
        try:
            cells[name] = cell.cell_contents
        except ValueError:
            cells[name] = UNKNOWN
    around = ChainMap(cells, plain.__globals__, vars(builtins))
    return Code(node=node, file=file, names=lambda name: around.get(name, UNKNOWN), bound_to=bound_to)


def is_own(file: str) -> bool:
    """Whether a file is somebody's own, and neither Python's nor installed."""
    path = Path(file)
    return path.is_file() and not any(path.resolve().is_relative_to(folder) for folder in _INSTALLED)


@functools.cache
def syntax_of(file: str) -> ast.Module:
    return ast.parse(Path(file).read_bytes())


def line_of_key(schema: type, key: str) -> tuple[str, int] | None:
    """Where a class annotates this key, itself or by a class that it inherits from."""
    for kind in (schema, *getattr(schema, "__orig_bases__", ()), *schema.__mro__[1:]):
        module = sys.modules.get(getattr(kind, "__module__", ""))
        file = getattr(module, "__file__", None)
        if file is None or not is_own(file):
            continue
        for node in ast.walk(syntax_of(file)):
            if isinstance(node, ast.ClassDef) and node.name == kind.__name__:
                for each in node.body:
                    if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name) and each.target.id == key:
                        return file, each.lineno
    return None


def _node_of(code: CodeType) -> ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda | None:
    """Its syntax: by its first line, that of the first decorator, and its name; for lambdas of a line by a column."""
    found = []
    for node in ast.walk(syntax_of(code.co_filename)):
        if isinstance(node, ast.Lambda):
            if code.co_name == "<lambda>" and node.lineno == code.co_firstlineno:
                found.append(node)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name == code.co_name:
            first = node.decorator_list[0] if node.decorator_list else node
            if first.lineno == code.co_firstlineno:
                return node
    places = {(line, column) for line, _, column, _ in code.co_positions()}
    for node in found:
        if any((getattr(n, "lineno", 0), getattr(n, "col_offset", 0)) in places for n in ast.walk(node.body)):
            return node
    return None


def _attribute(of: Any, name: str) -> Any:
    """By looking only: no property runs."""
    if isinstance(of, ModuleType):
        return getattr(of, name, UNKNOWN)
    if isinstance(of, type):
        found = inspect.getattr_static(of, name, UNKNOWN)
        if isinstance(found, staticmethod | FunctionType):
            return getattr(found, "__func__", found)
        # Of Python's own classes, such as datetime: `datetime.now` is bound to it.
        return getattr(of, name, UNKNOWN) if not isinstance(found, property | FunctionType) else UNKNOWN
    if of is UNKNOWN or isinstance(of, Code):
        return UNKNOWN
    found = inspect.getattr_static(type(of), name, UNKNOWN)
    if isinstance(found, FunctionType):
        return MethodType(found, of)
    return vars(of).get(name, UNKNOWN) if found is UNKNOWN and hasattr(of, "__dict__") else UNKNOWN


def _imported(node: ast.Import | ast.ImportFrom) -> Iterator[tuple[str, Any]]:
    """What an import within a function brings, if it has been imported before."""
    for each in node.names:
        if isinstance(node, ast.ImportFrom):
            module = sys.modules.get(node.module or "") if not node.level else None
            yield each.asname or each.name, getattr(module, each.name, UNKNOWN)
        elif each.asname:
            yield each.asname, sys.modules.get(each.name, UNKNOWN)
        else:
            first = each.name.partition(".")[0]
            yield first, sys.modules.get(first, UNKNOWN)
