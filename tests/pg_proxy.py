"""A proxy between processes and a real Postgres server that kills one of them exactly between two round trips.

The random kind of kill finds what nobody thought of; this one visits every place there is.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import socket
import struct
import tempfile
from asyncio import StreamReader, StreamWriter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Literal, Self
from urllib.parse import urlencode, urlsplit

import psutil
from psycopg.conninfo import conninfo_to_dict

from tests.rows import until
from tests.wire import _Middleman, _read_message

Role = Literal["door", "drive"]
When = Literal["before", "after"]


@dataclass(frozen=True, kw_only=True)
class Trap:
    """Kill the process at the `at`-th round trip (from 1) of a connection, counted from where it names the thread.

    `before`: the server never hears of it. `after`: the server has done it, but the process never hears of that.
    With another signal than SIGKILL, or none, the connection stays: the round trip is held up for the witness only.
    """

    at: int
    when: When = "before"
    role: Role = "drive"
    signal: signal.Signals | None = signal.SIGKILL


@dataclass(frozen=True, kw_only=True)
class Sprung:
    """A trap that sprang: the process that it hit, and what the server had done on this connection until then."""

    thread_id: str
    trap: Trap
    pid: int
    done: tuple[str, ...]

    @property
    def has_paid(self) -> bool:
        """Whether a payment of this connection was committed."""
        paying = False
        for statement in self.done:
            if paying and statement == "COMMIT":
                return True
            paying = paying or statement.startswith("INSERT INTO payments")
        return False


class KillProxy(_Middleman):
    """Passes everything on until a trap springs: `async with KillProxy(url) as proxy`, then connect to `proxy.url`.

    A trap is for one connection: the first that names its thread after it was laid. `asked` are the round trips of a
    thread's connections of one role, in words, a list for each connection, which grows. `witness` is called when a trap
    has sprung and the session of the process, dead or not, still holds its locks. Linux only: there one end of a Unix
    socket knows which process is at the other.
    """

    def __init__(self, url: str, witness: Callable[[Sprung], Awaitable[None]] | None = None) -> None:
        super().__init__(url)
        self._witness = witness
        self._traps: dict[tuple[str, str], list[Trap | None]] = {}
        self.asked: dict[tuple[str, str], list[list[str]]] = {}
        self.sprung: list[Sprung] = []

    async def __aenter__(self) -> Self:
        self._folder = tempfile.mkdtemp(prefix="cf-")
        self._server = await asyncio.start_unix_server(self._welcome, f"{self._folder}/.s.PGSQL.5432")
        given = conninfo_to_dict(self._upstream_url)
        options = {"host": self._folder, "port": "5432", "user": given.get("user"), "password": given.get("password")}
        query = urlencode({name: value for name, value in options.items() if value})
        self.url = f"postgresql://{urlsplit(self._upstream_url).path}?{query}"
        return self

    async def __aexit__(self, *exc: object) -> None:
        await super().__aexit__(*exc)
        shutil.rmtree(self._folder)

    def lay(self, thread_id: str, *traps: Trap | None) -> None:
        """Lay traps for the next connections that name this thread, one for each (None lets one drive through); and
        note what they ask."""
        for role in ("door", "drive"):
            self.asked.setdefault((thread_id, role), [])
            laid = self._traps.setdefault((thread_id, role), [])
            laid.extend(trap for trap in traps if role == (trap.role if trap else "drive"))

    async def _serve(self, startup: bytes, reader: StreamReader, writer: StreamWriter) -> None:
        up_reader, up_writer = await self._dial(startup)
        session = _Session(role=_role_of(startup), pid=_pid_of(writer), writer=writer)
        async with asyncio.TaskGroup() as pumps:
            pumps.create_task(session.answer(up_reader))
            with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
                await self._ask(session, reader, up_writer)
            # The end of either side is the end of the other.
            up_writer.transport.abort()

    async def _ask(self, session: _Session, reader: StreamReader, up_writer: StreamWriter) -> None:
        """Pass on what the process asks, a round trip at a time."""
        while True:
            kind, message = await _read_message(reader)
            session.note(kind, message)
            session.batch += message
            if kind in b"QS":
                trap = self._trap_at(session)
                if trap and trap.when == "before":
                    await self._spring(session, trap)
                session.asked += 1
                session.mute = bool(trap and trap.when == "after")
                up_writer.write(session.take_batch())
                if trap and trap.when == "after":
                    await session.all_answered()
                    await self._spring(session, trap)
                    session.unmute()
            elif kind in b"HXpdcf":
                up_writer.write(session.take_batch())

    def _trap_at(self, session: _Session) -> Trap | None:
        """The trap of this round trip, if there is one; the round trip is noted."""
        if session.thread_id is None:
            for (thread_id, role), traps in self._traps.items():
                if role == session.role and thread_id.encode() in session.batch:
                    session.thread_id = thread_id
                    session.trap = traps.pop(0) if traps else None
                    self.asked[thread_id, role].append(session.done)
        statement = session.take_statements()
        if session.thread_id is None:
            return None
        session.done.append(statement)
        return session.trap if session.trap and session.trap.at == len(session.done) else None

    async def _spring(self, session: _Session, trap: Trap) -> None:
        assert session.thread_id is not None
        if trap.signal:
            os.kill(session.pid, trap.signal)
        done = session.done if trap.when == "after" else session.done[:-1]
        sprung = Sprung(thread_id=session.thread_id, trap=trap, pid=session.pid, done=tuple(done))
        if trap.signal == signal.SIGSTOP:
            await until(lambda: _is_stopped(session.pid))
        if self._witness:
            await self._witness(sprung)
        self.sprung.append(sprung)
        if trap.signal == signal.SIGKILL:
            raise ConnectionAbortedError


@dataclass(kw_only=True)
class _Session:
    """One connection: who is at its end, what it asks, and what it is doing for which thread."""

    role: str
    pid: int
    writer: StreamWriter
    thread_id: str | None = None
    trap: Trap | None = None
    # The statements of each round trip since the thread was named.
    done: list[str] = field(default_factory=list)
    # The round trip that is being put together.
    batch: bytes = b""
    statements: list[str] = field(default_factory=list)
    prepared: dict[bytes, str] = field(default_factory=dict)
    # Answers that are kept back while `mute`.
    held: bytes = b""
    mute: bool = False
    asked: int = 0
    answered: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(0))

    def note(self, kind: bytes, message: bytes) -> None:
        """Remember what a message makes the server do, in words."""
        body = message[5:]
        if kind == b"Q":
            self.statements.append(_in_words(body.split(b"\0", 1)[0]))
        elif kind == b"P":
            name, statement, _ = body.split(b"\0", 2)
            self.prepared[name] = _in_words(statement)
            self.statements.append(f"PREPARE {self.prepared[name]}")
        elif kind == b"B":
            self.statements.append(self.prepared[body.split(b"\0", 2)[1]])

    def take_statements(self) -> str:
        """What this round trip does, in words; what it only prepares is worth words if it does nothing else."""
        done = [statement for statement in self.statements if not statement.startswith("PREPARE ")] or self.statements
        self.statements = []
        return "; ".join(done)

    def take_batch(self) -> bytes:
        taken, self.batch = self.batch, b""
        return taken

    async def answer(self, up_reader: StreamReader) -> None:
        """Pass on what the server answers."""
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            while True:
                kind, message = await _read_message(up_reader)
                self.held += message
                if kind == b"Z":
                    self.answered.release()
                if not self.mute:
                    self.unmute()
        self.writer.transport.abort()

    def unmute(self) -> None:
        self.mute = False
        self.writer.write(self.held)
        self.held = b""

    async def all_answered(self) -> None:
        # The greeting of a new session ends like an answer.
        for _ in range(self.asked + 1):
            await self.answered.acquire()


def _role_of(startup: bytes) -> str:
    """`drive`, `door` or `listen`, from the session's application name."""
    words = startup[8:].split(b"\0")
    settings = dict(zip(words[::2], words[1::2], strict=False))
    return settings.get(b"application_name", b"").decode().removeprefix("claim_flow ")


def _pid_of(writer: StreamWriter) -> int:
    """The process that connected. Format: struct ucred of unix(7)."""
    credentials = writer.get_extra_info("socket").getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
    pid, _uid, _gid = struct.unpack("3i", credentials)
    return int(pid)


async def _is_stopped(pid: int) -> bool:
    return bool(psutil.Process(pid).status() == psutil.STATUS_STOPPED)


def _in_words(statement: bytes) -> str:
    return " ".join(statement.decode().split())[:60]
