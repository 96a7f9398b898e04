"""A proxy between processes and a real Postgres server that strikes exactly between two round trips.

The random kind of fault finds what nobody thought of; this one visits every place there is.
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
Fault = Literal["kill", "stop", "cut", "stall", "look"]
When = Literal["before", "after"]

# Longer than every patience of a door and than a door's transaction may idle, shorter than a lease or a drive may take.
STALL_S = 20.0


@dataclass(frozen=True, kw_only=True)
class Trap:
    """A fault at the `at`-th round trip (from 1), counted from where a connection names the thread, or from `arm`.

    - `kill`: SIGKILL for the process, and its connection is gone.
    - `cut`: the connection is gone, the process lives.
    - `stall`: the round trip arrives STALL_S late.
    - `stop`: SIGSTOP for the process; the connection stays.
    - `look`: the round trip is held up for the witness only.

    `before`: the server has not heard of it. `after`: the server has done it, but the process has not heard of that,
    and if it is killed or cut off it never does.
    """

    at: int
    fault: Fault = "kill"
    when: When = "before"
    role: Role = "drive"


@dataclass(frozen=True, kw_only=True)
class Sprung:
    """A trap that sprang: the process that it hit, and what the server had done of what was counted until then.

    `thread_id` is empty for a trap that was armed for whatever comes.
    """

    thread_id: str
    trap: Trap
    pid: int
    done: tuple[str, ...]

    @property
    def has_paid(self) -> bool:
        """Whether a payment was committed."""
        paying = False
        for statement in self.done:
            if paying and statement == "COMMIT":
                return True
            paying = paying or statement.startswith("INSERT INTO payments")
        return False


@dataclass(kw_only=True)
class _Counted:
    """Round trips that are counted together, in words, and the trap that waits among them."""

    thread_id: str = ""
    trap: Trap | None = None
    done: list[str] = field(default_factory=list)


class FaultingProxy(_Middleman):
    """Passes everything on until a trap springs: `async with FaultingProxy(url) as proxy`, then connect to `proxy.url`.

    A trap that is laid is for one connection: the first that names its thread after that. `asked` are the round trips
    of a thread's connections of one role, in words, a list for each connection, which grows. A trap that is armed is
    for all connections together. `witness` is called when a trap has sprung and the session of the process, dead or
    not, still holds its locks. `stalling` are the round trips that are held up now. Linux only: there one end of a
    Unix socket knows which process is at the other.
    """

    def __init__(self, url: str, witness: Callable[[Sprung], Awaitable[None]] | None = None) -> None:
        super().__init__(url)
        self._witness = witness
        self._traps: dict[tuple[str, str], list[Trap | None]] = {}
        self._everything: _Counted | None = None
        self.asked: dict[tuple[str, str], list[list[str]]] = {}
        self.sprung: list[Sprung] = []
        self.stalling = 0
        self._sessions: list[_Session] = []

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

    @property
    def logged_in(self) -> int:
        """How many connections have got as far as to ask something."""
        return sum(session.greeted for session in self._sessions)

    @property
    def unsprung(self) -> dict[str, list[int]]:
        """How many round trips each drive of each thread was that no trap has hit."""
        hit = {each.thread_id for each in self.sprung}
        drives = {thread_id: drives for (thread_id, role), drives in self.asked.items() if role == "drive"}
        return {thread_id: [*map(len, drives[thread_id])] for thread_id in drives.keys() - hit}

    def lay(self, thread_id: str, *traps: Trap | None) -> None:
        """Lay traps for the next connections that name this thread, one for each (None lets one drive through); and
        note what they ask."""
        for role in ("door", "drive"):
            self.asked.setdefault((thread_id, role), [])
            laid = self._traps.setdefault((thread_id, role), [])
            laid.extend(trap for trap in traps if role == (trap.role if trap else "drive"))

    def arm(self, trap: Trap | None = None) -> list[str]:
        """Count whatever is asked from now on, by all connections together, and spring the trap there. Gives what was
        counted, in words: a list that grows."""
        self._everything = _Counted(trap=trap)
        return self._everything.done

    async def _serve(self, startup: bytes, reader: StreamReader, writer: StreamWriter) -> None:
        up_reader, up_writer = await self._dial(startup)
        session = _Session(role=_role_of(startup), pid=_pid_of(writer), writer=writer)
        self._sessions.append(session)
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
                counted = self._count(session)
                trap = counted.trap if counted and counted.trap and counted.trap.at == len(counted.done) else None
                if counted and trap and trap.when == "before":
                    await self._spring(session, counted, trap)
                session.asked += 1
                session.mute = bool(trap and trap.when == "after")
                up_writer.write(session.take_batch())
                if counted and trap and trap.when == "after":
                    await session.all_answered()
                    await self._spring(session, counted, trap)
                    session.unmute()
            elif kind in b"HXpdcf":
                up_writer.write(session.take_batch())

    def _count(self, session: _Session) -> _Counted | None:
        """Count this round trip, if it is one that counts."""
        statement, counted = session.take_statements(), self._everything or session.counted or self._named_by(session)
        session.counted = counted
        if counted:
            counted.done.append(statement)
        return counted

    def _named_by(self, session: _Session) -> _Counted | None:
        for (thread_id, role), traps in self._traps.items():
            if role == session.role and thread_id.encode() in session.batch:
                counted = _Counted(thread_id=thread_id, trap=traps.pop(0) if traps else None)
                self.asked[thread_id, role].append(counted.done)
                return counted
        return None

    async def _spring(self, session: _Session, counted: _Counted, trap: Trap) -> None:
        if trap.fault == "kill":
            os.kill(session.pid, signal.SIGKILL)
        elif trap.fault == "stop":
            os.kill(session.pid, signal.SIGSTOP)
            await until(lambda: _is_stopped(session.pid))
        done = counted.done if trap.when == "after" else counted.done[:-1]
        sprung = Sprung(thread_id=counted.thread_id, trap=trap, pid=session.pid, done=tuple(done))
        if self._witness:
            await self._witness(sprung)
        self.sprung.append(sprung)
        if trap.fault in ("kill", "cut"):
            raise ConnectionAbortedError
        if trap.fault == "stall":
            self.stalling += 1
            try:
                await asyncio.sleep(STALL_S)
            finally:
                self.stalling -= 1


@dataclass(kw_only=True)
class _Session:
    """One connection: who is at its end, what it asks, and what it is doing for which thread."""

    role: str
    pid: int
    writer: StreamWriter
    # None until it has done anything that counts.
    counted: _Counted | None = None
    # The round trip that is being put together.
    batch: bytes = b""
    statements: list[str] = field(default_factory=list)
    prepared: dict[bytes, str] = field(default_factory=dict)
    # Answers that are kept back while `mute`.
    held: bytes = b""
    mute: bool = False
    asked: int = 0
    greeted: bool = False
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
                    self.greeted = True
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
