"""Small honest middlemen between a client and a real Postgres server: one counts, cuts and holds up, one pools.

Message formats: https://www.postgresql.org/docs/18/protocol-message-formats.html
"""

from __future__ import annotations

import abc
import asyncio
import contextlib
from asyncio import StreamReader, StreamWriter
from collections.abc import Awaitable, Callable
from typing import Self
from urllib.parse import urlsplit

from psycopg.conninfo import conninfo_to_dict

_SSL_REQUEST, _GSS_REQUEST, _CANCEL_REQUEST = 80877103, 80877104, 80877102

# Parse, Bind, Describe, Execute, Close: the server carries them out when they come, without waiting for the Sync.
_BEFORE_SYNC = b"PBDEC"


class _Middleman(abc.ABC):
    """Listens on a TCP port of its own for as long as its `async with` lasts."""

    def __init__(self, url: str) -> None:
        self._upstream_url = url
        self.url = ""
        self.clients = 0
        self._open: set[StreamWriter] = set()
        self._serving: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._welcome, "127.0.0.1", 0)
        port = self._server.sockets[0].getsockname()[1]
        user = conninfo_to_dict(self._upstream_url).get("user", "")
        name = urlsplit(self._upstream_url).path
        self.url = f"postgresql://{user}@127.0.0.1:{port}{name}?sslmode=disable&gssencmode=disable"
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        self.cut()
        for task in self._serving:
            task.cancel()
        await asyncio.gather(*self._serving)

    def cut(self) -> None:
        """Lose every connection, without a goodbye to either side."""
        for writer in self._open:
            writer.transport.abort()

    async def _welcome(self, reader: StreamReader, writer: StreamWriter) -> None:
        self.clients += 1
        self._open.add(writer)
        if task := asyncio.current_task():
            self._serving.add(task)
        # The end of either side, or of the `async with`, is the end of this one.
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
            if startup := await _read_startup(reader, writer):
                await self._serve(startup, reader, writer)
        writer.transport.abort()

    @abc.abstractmethod
    async def _serve(self, startup: bytes, reader: StreamReader, writer: StreamWriter) -> None:
        """Carry what this client says to the server, and back, until either ends."""

    async def _dial(self, startup: bytes) -> tuple[StreamReader, StreamWriter]:
        given = conninfo_to_dict(self._upstream_url)
        host, port = str(given.get("host") or "127.0.0.1"), given.get("port") or 5432
        if host.startswith("/"):
            reader, writer = await asyncio.open_unix_connection(f"{host}/.s.PGSQL.{port}")
        else:
            reader, writer = await asyncio.open_connection(host, int(port))
        self._open.add(writer)
        writer.write(startup)
        return reader, writer


class Wire(_Middleman):
    """Passes everything on, counts the round trips that were asked for and answered, and cuts at the one it is told.

    Logging in is not counted. `cut_before` n: the n-th never reaches the server. `cut_after` n: the server did it,
    but the client never hears of it. `hold_before` n: the n-th stays on its way from `held` until `release`.
    """

    def __init__(self, url: str, *, cut_before: int = 0, cut_after: int = 0, hold_before: int = 0) -> None:
        super().__init__(url)
        self.asked = self.answered = 0
        self.held = asyncio.Event()
        self._released = asyncio.Event()
        self._cut_before, self._cut_after, self._hold_before = cut_before, cut_after, hold_before
        self._awaited, self._is_awaited = b"", False

    def cut_after_commit_of(self, text: bytes) -> None:
        """Do as `cut_after` does, at the first COMMIT after a statement with this text."""
        self._awaited = text

    def release(self) -> None:
        """Let go what is held up, and hold up nothing any more."""
        self._released.set()

    async def _serve(self, startup: bytes, reader: StreamReader, writer: StreamWriter) -> None:
        up_reader, up_writer = await self._dial(startup)
        async with asyncio.TaskGroup() as pumps:
            pumps.create_task(_pump(reader, up_writer, self._on_question, together=_BEFORE_SYNC))
            pumps.create_task(_pump(up_reader, writer, self._on_answer))

    async def _on_question(self, kind: bytes, message: bytes) -> None:
        if self._awaited and self._awaited in message:
            self._is_awaited = True
        if kind in b"QS":
            self.asked += 1
            if self._is_awaited and b"COMMIT" in message:
                self._cut_after = self.asked
            if self.asked == self._cut_before:
                self.cut()
                raise ConnectionAbortedError
            if self.asked == self._hold_before:
                self.held.set()
                await self._released.wait()

    async def _on_answer(self, kind: bytes, message: bytes) -> None:
        if kind == b"Z" and self.asked:
            self.answered += 1
            if self.answered == self._cut_after:
                self.cut()
                raise ConnectionAbortedError


class TransactionPooler(_Middleman):
    """Gives each transaction to whichever server session is free, as PgBouncer does with `pool_mode=transaction`.

    `prepared`: prepared statements follow their client to the next session (PgBouncer from 1.21 on); without it they
    stay behind in the session that they were made in.
    """

    def __init__(self, url: str, *, prepared: bool = True) -> None:
        super().__init__(url)
        self._prepared = prepared
        self._free: asyncio.LifoQueue[_Session] = asyncio.LifoQueue()

    async def _serve(self, startup: bytes, reader: StreamReader, writer: StreamWriter) -> None:
        # The client logs its own session in, and then shares it.
        session = _Session(*await self._dial(startup))
        await session.log_in(reader, writer)
        self._free.put_nowait(session)
        client = _Client(f"c{self.clients}".encode() if self._prepared else b"")
        while (batch := await client.next_batch(reader)) is not None:
            session = await self._free.get()
            idle = False
            while not idle:
                idle = await session.run(client, batch, writer)
                if not idle and (batch := await client.next_batch(reader)) is None:
                    return
            self._free.put_nowait(session)


class _Client:
    """One client of the pooler: its prepared statements, under names that no other client uses."""

    def __init__(self, prefix: bytes) -> None:
        self.prefix = prefix
        self.statements: dict[bytes, bytes] = {}

    async def next_batch(self, reader: StreamReader) -> list[tuple[bytes, bytes]] | None:
        """Messages up to one that the server answers with ReadyForQuery; None at the goodbye."""
        batch = []
        while True:
            kind, message = await _read_message(reader)
            if kind == b"X":
                return None
            batch.append((kind, self._renamed(kind, message)))
            if kind in b"QS":
                return batch

    def _renamed(self, kind: bytes, message: bytes) -> bytes:
        body = message[5:]
        if kind == b"P" and not body.startswith(b"\0"):
            body = self.prefix + body
            self.statements[body.split(b"\0", 1)[0]] = body
        elif kind == b"B":
            portal, statement, rest = body.split(b"\0", 2)
            body = b"\0".join((portal, statement and self.prefix + statement, rest))
        elif kind in b"DC" and body.startswith(b"S"):
            body = b"S" + self.prefix + body[1:]
        return _message(kind, body)


class _Session:
    """One session at the server, shared by the pooler's clients."""

    def __init__(self, reader: StreamReader, writer: StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        self._statements: set[bytes] = set()

    async def log_in(self, reader: StreamReader, writer: StreamWriter) -> None:
        while True:
            kind, message = await _read_message(self._reader)
            writer.write(message)
            if kind == b"Z":
                return
            if kind == b"R" and message[5:9] not in (b"\0\0\0\0", b"\0\0\0\x0c"):
                self._writer.write((await _read_message(reader))[1])

    async def run(self, client: _Client, batch: list[tuple[bytes, bytes]], writer: StreamWriter) -> bool:
        """Run one batch; whether the session is outside a transaction after it."""
        unannounced = 0
        for kind, message in batch:
            if kind == b"P":
                self._statements.add(message[5:].split(b"\0", 1)[0])
            elif kind == b"B" and client.prefix:
                name = message[5:].split(b"\0", 2)[1]
                if name and name not in self._statements:
                    self._statements.add(name)
                    self._writer.write(_message(b"P", client.statements[name]))
                    unannounced += 1
            self._writer.write(message)
        while True:
            kind, message = await _read_message(self._reader)
            if kind == b"1" and unannounced:
                unannounced -= 1
                continue
            writer.write(message)
            if kind == b"Z":
                return message[5:] == b"I"


async def _read_startup(reader: StreamReader, writer: StreamWriter) -> bytes | None:
    while True:
        size = await reader.readexactly(4)
        body = await reader.readexactly(int.from_bytes(size) - 4)
        code = int.from_bytes(body[:4])
        if code == _CANCEL_REQUEST:
            return None
        if code not in (_SSL_REQUEST, _GSS_REQUEST):
            return size + body
        writer.write(b"N")


async def _read_message(reader: StreamReader) -> tuple[bytes, bytes]:
    """The kind, and the whole message, kind and length included."""
    head = await reader.readexactly(5)
    return head[:1], head + await reader.readexactly(int.from_bytes(head[1:]) - 4)


def _message(kind: bytes, body: bytes) -> bytes:
    return kind + (len(body) + 4).to_bytes(4) + body


async def _pump(
    reader: StreamReader,
    writer: StreamWriter,
    look: Callable[[bytes, bytes], Awaitable[None]],
    *,
    together: bytes = b"",
) -> None:
    """Pass messages on until one side is gone, and then let the other one know.

    Messages of the kinds `together` wait for the next one of another kind.
    """
    waiting = b""
    try:
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            while True:
                kind, message = await _read_message(reader)
                await look(kind, message)
                waiting += message
                if kind not in together:
                    writer.write(waiting)
                    waiting = b""
    finally:
        writer.transport.abort()
