"""The ways through a node: where it asks, and what it may have done before.

Each function is followed from its first line by all its branches at once; a loop's body is taken twice, since what
happens in it may have happened before. Helpers are followed as if they stood where they are called.
"""

from __future__ import annotations

import ast
import builtins
import os
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any, Literal

from langgraph.types import interrupt

from flow import effects
from flow.asking import ask
from flow.source import UNKNOWN, Code, code_of

Role = Literal["node", "edge", "effect"]

# What is called to change something outside. Of packages only their functions: a class is merely made.
_ACTS = (builtins.print, builtins.open, builtins.input, subprocess.Popen, os.system, os.remove, os.rename, os.replace,
         os.unlink, os.mkdir, os.makedirs, os.rmdir)  # fmt: skip
_PACKAGES = frozenset({
    "aiohttp", "aiosmtplib", "anthropic", "asyncpg", "boto3", "botocore", "celery", "ftplib", "httpx", "imaplib",
    "kafka", "openai", "paramiko", "pika", "psycopg2", "pymongo", "redis", "requests", "shutil", "slack_sdk", "smtplib",
    "socket", "sqlite3", "stripe", "subprocess", "urllib3",
})  # fmt: skip
_VERBS = frozenset({
    "ainvoke", "astream", "batch", "charge", "commit", "create", "delete", "delete_one", "execute", "executemany",
    "insert", "insert_one", "invoke", "mkdir", "patch", "pay", "post", "publish", "put", "refund", "rename", "request",
    "rmdir", "save", "send", "send_message", "sendall", "sendmail", "stream", "touch", "transfer", "unlink", "upload",
    "urlopen", "write", "write_bytes", "write_text", "writelines",
})  # fmt: skip


@dataclass(frozen=True)
class Seen:
    """What may have happened on the ways to one point: whether it has asked, and where it has acted and how."""

    asked: bool = False
    acts: frozenset[tuple[str, int, str]] = frozenset()


def _either(*ways: Seen | None) -> Seen | None:
    """What may have happened where these ways meet; None: none of them gets here."""
    open_ways = [way for way in ways if way is not None]
    if not open_ways:
        return None
    acts: frozenset[tuple[str, int, str]] = frozenset()
    return Seen(any(way.asked for way in open_ways), acts.union(*(way.acts for way in open_ways)))


def is_question(target: Any) -> bool:
    return target is ask or target is interrupt


def is_effect(target: Any) -> bool:
    """Whether it is @idempotent, made already or as it stands in a function."""
    if isinstance(target, Code):
        return any(_plain(target, decorator) is effects.idempotent for decorator in target.decorators)
    function = target.__func__ if isinstance(target, MethodType) else target
    return isinstance(function, FunctionType) and function.__code__.co_filename == effects.__file__ and hasattr(
        function, "__wrapped__"
    )  # fmt: skip


def _plain(code: Code, decorator: ast.expr) -> Any:
    return code.meaning(decorator.func if isinstance(decorator, ast.Call) else decorator)


class Paths:
    """Follows functions, and reports what it finds: the trap, the file, the line, and what it is.

    `look` is called once with each function that is followed, and its role.
    """

    def __init__(
        self,
        *,
        report: Callable[[Any, str, int, str], None],
        look: Callable[[Code, Role], None],
        is_followed: Callable[[Code], bool],
    ) -> None:
        self.report, self.is_followed, self._look = report, is_followed, look
        # Whether anything has asked so far.
        self.asks = False
        self._looked: set[tuple[object, ...]] = set()
        self._ends: dict[tuple[object, ...], Seen | None] = {}

    @property
    def places(self) -> set[Any]:
        """Where the functions stand that were followed."""
        return {place for place, _ in self._looked}

    def run(self, code: Code, role: Role, seen: Seen = Seen(), above: tuple[Any, ...] = ()) -> Seen | None:
        """What may have happened at the function's end."""
        if (code.place, role) not in self._looked:
            self._looked.add((code.place, role))
            self._look(code, role)
        if code.place in above:
            return seen
        known = (code.place, role, seen)
        if known not in self._ends:
            way = _Way(self, code, role, (*above, code.place))
            end = way.through(code.body, seen)
            self._ends[known] = _either(end, *way.returned)
        end = self._ends[known]
        self.asks |= end is not None and end.asked
        return end

    def followed(self, target: Any) -> Code | None:
        """The code of a helper of one's own."""
        if not isinstance(target, Code | FunctionType | MethodType):
            return None
        code = code_of(target)
        return code if code is not None and self.is_followed(code) else None


class _Way:
    """One function, by all its ways."""

    def __init__(self, paths: Paths, code: Code, role: Role, above: tuple[Any, ...]) -> None:
        self._paths, self._code, self._role, self._above = paths, code, role, above
        self.returned: list[Seen] = []
        # Of the loop around: what may have happened where it is left, and where it begins anew.
        self._left: list[Seen] = []
        self._again: list[Seen] = []

    def through(self, body: list[ast.stmt], seen: Seen | None) -> Seen | None:
        for statement in body:
            if seen is None:
                return None
            seen = self._statement(statement, seen)
        return seen

    def _statement(self, node: ast.stmt, seen: Seen) -> Seen | None:
        match node:
            case ast.If():
                seen = self._value(node.test, seen)
                end = _either(self.through(node.body, seen), self.through(node.orelse, seen))
            case ast.While() | ast.For() | ast.AsyncFor():
                end = self._loop(node, seen)
            case ast.Try() | ast.TryStar():
                end = self._attempt(node, seen)
            case ast.With() | ast.AsyncWith():
                for item in node.items:
                    seen = self._value(item.context_expr, seen)
                if isinstance(node, ast.AsyncWith):
                    seen = self._act(node, "it enters `async with`", seen)
                end = self.through(node.body, seen)
            case ast.Match():
                seen = self._value(node.subject, seen)
                other = None if any(map(_takes_all, node.cases)) else seen
                end = _either(other, *(self.through(case.body, seen) for case in node.cases))
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                end = seen
            case _:
                end = self._simple(node, seen)
        return end

    def _simple(self, node: ast.stmt, seen: Seen) -> Seen | None:
        for each in ast.iter_child_nodes(node):
            if isinstance(each, ast.expr):
                seen = self._value(each, seen)
        match node:
            case ast.Return():
                self.returned.append(seen)
            case ast.Break():
                self._left.append(seen)
            case ast.Continue():
                self._again.append(seen)
        return None if isinstance(node, ast.Return | ast.Raise | ast.Break | ast.Continue) else seen

    def _loop(self, node: ast.While | ast.For | ast.AsyncFor, seen: Seen) -> Seen | None:
        head = node.test if isinstance(node, ast.While) else node.iter
        outside, self._left, self._again = (self._left, self._again), [], []
        start: Seen | None = seen
        for _ in range(2):
            if start is None:
                break
            start = self._value(head, start)
            if isinstance(node, ast.AsyncFor):
                start = self._act(node, "it enters `async for`", start)
            start = _either(start, self.through(node.body, start), *self._again)
        forever = isinstance(node, ast.While) and isinstance(head, ast.Constant) and bool(head.value)
        end = _either(None if forever else self.through(node.orelse, start), *self._left)
        self._left, self._again = outside
        return end

    def _attempt(self, node: ast.Try | ast.TryStar, seen: Seen) -> Seen | None:
        end = self.through(node.body, seen)
        # What failed may have been its first line or its last.
        failed = _either(seen, end)
        after = _either(self.through(node.orelse, end), *(self.through(each.body, failed) for each in node.handlers))
        last = self.through(node.finalbody, _either(after, failed))
        return None if after is None else last

    def _value(self, node: ast.expr, seen: Seen) -> Seen:
        match node:
            case ast.Lambda():
                pass
            case ast.IfExp() | ast.BoolOp():
                seen = self._choice(node, seen)
            case ast.ListComp() | ast.SetComp() | ast.GeneratorExp() | ast.DictComp():
                seen = self._comprehension(node, seen)
            case ast.Await(value=ast.Call() as call):
                seen = self._call(call, seen, awaited=True)
            case ast.Await():
                seen = self._act(node, "it awaits", self._value(node.value, seen))
            case ast.Call():
                seen = self._call(node, seen, awaited=False)
            case _:
                for child in ast.iter_child_nodes(node):
                    seen = self._value(child, seen) if isinstance(child, ast.expr) else seen
        return seen

    def _choice(self, node: ast.IfExp | ast.BoolOp, seen: Seen) -> Seen:
        if isinstance(node, ast.IfExp):
            seen = self._value(node.test, seen)
            return _either(self._value(node.body, seen), self._value(node.orelse, seen)) or seen
        for each in node.values:
            seen = _either(seen, self._value(each, seen)) or seen
        return seen

    def _comprehension(self, node: ast.ListComp | ast.SetComp | ast.GeneratorExp | ast.DictComp, seen: Seen) -> Seen:
        for generator in node.generators:
            seen = self._value(generator.iter, seen)
        made = [node.key, node.value] if isinstance(node, ast.DictComp) else [node.elt]
        for each in [*(test for generator in node.generators for test in generator.ifs), *made] * 2:
            seen = _either(seen, self._value(each, seen)) or seen
        return seen

    def _call(self, node: ast.Call, seen: Seen, *, awaited: bool) -> Seen:
        of = [] if isinstance(node.func, ast.Name) else [getattr(node.func, "value", node.func)]
        for each in (*of, *node.args, *(keyword.value for keyword in node.keywords)):
            seen = self._value(each, seen)
        target = self._code.meaning(node.func)
        if is_question(target):
            return self._ask(node, seen)
        if is_effect(target):
            if (inner := self._paths.followed(target)) is not None:
                self._paths.run(inner, "effect")
            return self._act(node, f"it calls {ast.unparse(node.func)}, an effect", seen)
        if (helper := self._paths.followed(target)) is not None:
            return self._paths.run(helper, self._role, seen, self._above) or seen
        if awaited:
            return self._act(node, f"it awaits {ast.unparse(node.func)}", seen)
        return self._act(node, f"it calls {ast.unparse(node.func)}", seen) if _is_act(target, node.func) else seen

    def _ask(self, node: ast.Call, seen: Seen) -> Seen:
        self._paths.asks = True
        if self._role == "effect":
            what = f"{ast.unparse(node.func)} is called within an @idempotent function"
            self._paths.report("asks in an effect", self._code.file, node.lineno, what)
            return seen
        if seen.asked:
            self._paths.report("asks twice", self._code.file, node.lineno, "a node may ask more than once")
        for file, line, what in seen.acts:
            self._paths.report("acts before asking", file, line, f"{what}, and asks later")
        return Seen(asked=True, acts=seen.acts)

    def _act(self, node: ast.stmt | ast.expr, what: str, seen: Seen) -> Seen:
        return Seen(seen.asked, seen.acts | {(self._code.file, node.lineno, what)})


def _takes_all(case: ast.match_case) -> bool:
    return case.guard is None and isinstance(case.pattern, ast.MatchAs) and case.pattern.pattern is None


def _is_act(target: Any, name: ast.expr) -> bool:
    if any(target is each for each in _ACTS):
        return True
    if isinstance(target, FunctionType | MethodType | BuiltinFunctionType):
        module = getattr(target, "__module__", None) or type(getattr(target, "__self__", None)).__module__
        if module.partition(".")[0] in _PACKAGES or module == "urllib.request":
            return True
    return target is UNKNOWN and isinstance(name, ast.Attribute) and name.attr in _VERBS
