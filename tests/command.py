"""`claim_flow.py` as a user types it: real processes, in a folder and an environment of the test's own."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from flow.database import Connection, Lock
from tests.rows import until, value

ROOT = Path(__file__).resolve().parents[1]

# An interpreter that imports LangGraph on a busy machine; nothing here takes nearly as long.
_PATIENCE_S = 60.0

Word = str | bytes


@dataclass(frozen=True, kw_only=True)
class Done:
    """What a command left behind: its exit code and what a person sees."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)

    @property
    def imports(self) -> set[str]:
        """Every module that it imported, if it was run with `trace_imports`."""
        lines = [line for line in self.err.splitlines() if line.startswith("import time:")]
        return {line.rsplit("|", 1)[1].strip() for line in lines}


class Terminal:
    """A folder to type commands in, with nothing in the environment but these settings.

    The user is `ann` and the time zone UTC, whoever runs the tests and wherever.
    """

    def __init__(self, folder: Path, **settings: str) -> None:
        self.folder = folder
        # The embedded server's wheel keeps a lock file in the home folder.
        self.environment = {"PATH": os.environ["PATH"], "HOME": str(folder), "LOGNAME": "ann", "TZ": "UTC"} | settings

    def run(self, *words: Word, trace_imports: bool = False) -> Done:
        """Type a command and wait for its end."""
        done = subprocess.run(
            _command(words, trace_imports=trace_imports),
            cwd=self.folder,
            env=self.environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            check=False,
            timeout=_PATIENCE_S,
        )
        return Done(code=done.returncode, out=done.stdout.decode(), err=done.stderr.decode())

    async def start(self, *words: Word, trace_imports: bool = False) -> Running:
        """Type a command and leave it running; its output goes to files, so that it never waits for a reader."""
        name = f"{len(list(self.folder.glob('*.out')))}-{os.fsdecode(words[0])}"
        out, err = self.folder / f"{name}.out", self.folder / f"{name}.err"
        with out.open("xb") as to_out, err.open("xb") as to_err:
            process = await asyncio.create_subprocess_exec(
                *_command(words, trace_imports=trace_imports),
                cwd=self.folder,
                env=self.environment,
                stdin=subprocess.DEVNULL,
                stdout=to_out,
                stderr=to_err,
            )
        return Running(process, out, err)

    async def run_meanwhile(self, *words: Word, trace_imports: bool = False) -> Done:
        """Type a command and wait for its end, while the test's other tasks go on."""
        running = await self.start(*words, trace_imports=trace_imports)
        try:
            return await running.end()
        finally:
            running.kill()

    @contextlib.asynccontextmanager
    async def service(self, *words: Word, trace_imports: bool = False) -> AsyncIterator[Running]:
        """A command that runs for as long as the `async with`: SIGTERM ends it, if nothing else did."""
        running = await self.start(*words, trace_imports=trace_imports)
        try:
            yield running
        finally:
            await running.stop()


class Running:
    """A command that is still running, perhaps."""

    def __init__(self, process: asyncio.subprocess.Process, out: Path, err: Path) -> None:
        self.pid = process.pid
        self._process, self._out, self._err = process, out, err

    @property
    def out(self) -> str:
        return self._out.read_text()

    @property
    def err(self) -> str:
        return self._err.read_text()

    @property
    def ended(self) -> bool:
        return self._process.returncode is not None

    async def end(self) -> Done:
        """Wait for its end."""
        async with asyncio.timeout(_PATIENCE_S):
            code = await self._process.wait()
        return Done(code=code, out=self.out, err=self.err)

    def signal(self, number: signal.Signals) -> None:
        if not self.ended:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.signal(signal.SIGKILL)

    async def stop(self) -> Done:
        """End it as a service manager does: politely, and with force if that does not help."""
        self.signal(signal.SIGTERM)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(20):
                await self._process.wait()
        self.kill()
        return await self.end()

    async def until(self, look: Callable[[], Awaitable[bool]]) -> None:
        """Wait for something that only comes true while this runs; fails with its errors if it ends before."""

        async def looked() -> bool:
            assert not self.ended, self.err
            return await look()

        await until(looked, within_s=_PATIENCE_S)

    async def zygote(self) -> psutil.Process:
        """A worker's process that forks its stand-bys; the head of a process group that holds them all."""
        found: list[psutil.Process] = []

        async def forked() -> bool:
            found[:] = psutil.Process(self.pid).children()
            return bool(found and found[0].children())

        await self.until(forked)
        return found[0]


@contextlib.asynccontextmanager
async def worker(terminal: Terminal, conn: Connection, *, present: int = 1) -> AsyncIterator[Running]:
    """A worker, from the moment when it, as the `present`-th, says that it is here."""
    async with terminal.service("work") as running:
        await running.until(lambda: workers_are(conn, present))
        yield running


async def workers_are(conn: Connection, count: int) -> bool:
    """Whether this many workers say that they are here."""
    held = await value(
        conn,
        "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND objsubid = 2 AND objid = %s AND granted"
        " AND database = (SELECT oid FROM pg_database WHERE datname = current_database())",
        int(Lock.WORKER),
    )
    return bool(held == count)


def members_of(group: int) -> list[int]:
    """The pids of the processes of a process group that are alive."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, ProcessLookupError):
            if os.getpgid(process.pid) == group and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process.pid)
    return found


def _command(words: tuple[Word, ...], *, trace_imports: bool) -> list[Word]:
    traced = ["-X", "importtime"] if trace_imports else []
    return [sys.executable, *traced, str(ROOT / "claim_flow.py"), *words]
