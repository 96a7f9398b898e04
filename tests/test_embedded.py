"""The embedded server: one, whoever asks first; it outlives them, and comes back after any death."""

from __future__ import annotations

import contextlib
import ctypes
import os
import pwd
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import psycopg
import pytest

from flow import embedded
from flow.embedded import embedded_url, stop_embedded
from flow.errors import DatabaseUnavailable
from tests.folders import server_folder
from tests.processes import ROOT, Meet, run_together

_ASK = (
    "import sys; from pathlib import Path; from flow.embedded import embedded_url;"
    " print(embedded_url(Path(sys.argv[1])))"
)
# The code under test, whatever the working directory.
_OUR_CODE = os.environ | {"PYTHONPATH": str(ROOT)}


@pytest.fixture
def home() -> Iterator[Path]:
    """A home without a server yet; whatever runs in it is killed at the end."""
    with server_folder() as folder:
        yield folder
        for process in _servers(folder):
            _end(process, signal.SIGQUIT)
        _release_shared_memory(folder)


def ask_in_a_process(home: Path) -> str:
    """The URL that a command gets, which has ended."""
    command = [sys.executable, "-c", _ASK, str(home)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, env=_OUR_CODE)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def ask(meet: Meet, home: str) -> str:
    """What each of several processes does at once."""
    meet()
    return embedded_url(Path(home))


def make_user(meet: Meet, name: str) -> str:
    """What each of several processes does at once."""
    embedded._SERVER_USER = name
    meet()
    embedded.ensure_server_user()
    return str(pwd.getpwnam(name).pw_uid)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root makes users")
def test_the_first_servers_of_a_machine_make_their_user_together() -> None:
    name = f"pgserver-{os.getpid()}"
    try:
        assert len(set(run_together(6, make_user, name))) == 1
    finally:
        subprocess.run(["userdel", name], check=True)


def test_six_processes_at_once_get_one_server_in_a_fresh_home(home: Path) -> None:
    urls = run_together(6, ask, str(home / "not" / "there" / "yet"))
    assert len(set(urls)) == 1, urls
    # They have all ended, and it is still there.
    with psycopg.connect(urls[0]) as conn:
        assert conn.execute("SELECT 1").fetchone() == (1,)
    assert len(_servers(home)) == 1


def test_the_server_survives_the_process_that_started_it(home: Path) -> None:
    url = ask_in_a_process(home)
    with psycopg.connect(url) as conn:
        assert conn.execute("SELECT 1").fetchone() == (1,)
    (server,) = _servers(home)
    assert ask_in_a_process(home) == url
    assert _servers(home) == [server]


def test_its_url_is_a_socket_that_no_other_machine_reaches(home: Path) -> None:
    with psycopg.connect(ask_in_a_process(home)) as conn:
        assert conn.execute("SHOW listen_addresses").fetchone() == ("",)


def test_what_was_written_is_there_after_stop_and_start(home: Path) -> None:
    with psycopg.connect(ask_in_a_process(home), autocommit=True) as conn:
        conn.execute("CREATE TABLE kept AS SELECT 42 AS answer")
        # A session that is open does not keep it from stopping.
        assert stop_embedded(home) is True
    assert _servers(home) == []
    assert stop_embedded(home) is False
    with psycopg.connect(ask_in_a_process(home)) as conn:
        assert conn.execute("SELECT answer FROM kept").fetchone() == (42,)


def test_stopping_what_never_ran_is_no_error(home: Path) -> None:
    assert stop_embedded(home) is False
    assert list(home.iterdir()) == []


def test_a_killed_server_comes_back_with_what_was_committed(home: Path) -> None:
    with psycopg.connect(ask_in_a_process(home), autocommit=True) as conn:
        conn.execute("CREATE TABLE kept AS SELECT 42 AS answer")
    (server,) = _servers(home)
    family = [server, *server.children()]
    _note_shared_memory(home, server)
    server.kill()
    psutil.wait_procs(family, timeout=30)
    assert (home / "postgres" / "postmaster.pid").exists()
    assert stop_embedded(home) is False
    with psycopg.connect(ask_in_a_process(home)) as conn:
        assert conn.execute("SELECT answer FROM kept").fetchone() == (42,)


def test_a_killed_server_whose_pid_another_program_has_now_comes_back(home: Path) -> None:
    ask_in_a_process(home)
    (server,) = _servers(home)
    pid, user, family = server.pid, server.username(), [server, *server.children()]
    _note_shared_memory(home, server)
    server.kill()
    psutil.wait_procs(family, timeout=30)
    as_the_server = {"user": user} if os.geteuid() == 0 else {}
    with subprocess.Popen(["sleep", "600"], **as_the_server) as stranger:  # type: ignore[call-overload]
        try:
            for file in ("postmaster.pid", ".s.PGSQL.5432.lock"):
                left = home / "postgres" / file
                lines = left.read_text().splitlines(keepends=True)
                assert lines[0] == f"{pid}\n"
                left.write_text("".join([f"{stranger.pid}\n", *lines[1:]]))
            with psycopg.connect(ask_in_a_process(home)) as conn:
                assert conn.execute("SELECT 1").fetchone() == (1,)
            assert stranger.poll() is None
        finally:
            stranger.kill()
    assert len(_servers(home)) == 1


def test_one_process_can_start_stop_and_start_again(home: Path) -> None:
    embedded_url(home)
    assert stop_embedded(home)
    with psycopg.connect(embedded_url(home)) as conn:
        assert conn.execute("SELECT 1").fetchone() == (1,)


def test_one_process_gets_a_running_server_after_a_kill(home: Path) -> None:
    embedded_url(home)
    (server,) = _servers(home)
    _note_shared_memory(home, server)
    _end(server, signal.SIGKILL)
    with psycopg.connect(embedded_url(home)) as conn:
        assert conn.execute("SELECT 1").fetchone() == (1,)


def test_a_home_that_cannot_be_made_is_named_with_the_way_out(home: Path) -> None:
    (home / "file").write_text("")
    with pytest.raises(DatabaseUnavailable, match="DATABASE_URL") as failed:
        embedded_url(home / "file")
    assert str(home / "file" / "postgres") in str(failed.value)


def test_data_that_is_broken_is_named_with_the_log_to_look_at(home: Path) -> None:
    ask_in_a_process(home)
    assert stop_embedded(home)
    (home / "postgres" / "postgresql.conf").write_text("no such setting = 1\n")
    with pytest.raises(DatabaseUnavailable, match="log") as failed:
        embedded_url(home)
    assert Path(home / "postgres" / "log").exists()
    assert "DATABASE_URL" in str(failed.value)
    assert _servers(home) == []


# As in a container whose entry point is a Python program: orphans become its children, and it waits for none of them.
_WHERE_NOBODY_REAPS = f"""
import ctypes, subprocess, sys, time
from pathlib import Path
import psutil, psycopg
from flow.embedded import stop_embedded
from tests.test_embedded import _note_shared_memory

assert ctypes.CDLL(None).prctl(36, 1, 0, 0, 0) == 0  # PR_SET_CHILD_SUBREAPER
home = Path(sys.argv[1])

def ask():
    command = [sys.executable, "-c", {_ASK!r}, home]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

url = ask()
"""


def test_it_stops_where_nobody_reaps_the_dead(home: Path) -> None:
    assert _run_where_nobody_reaps(home, "print(stop_embedded(home))") == "True"


def test_a_killed_server_comes_back_where_nobody_reaps_the_dead(home: Path) -> None:
    script = """
server = psutil.Process(int((home / "postgres" / "postmaster.pid").read_text().split()[0]))
_note_shared_memory(home, server)
server.kill()
while server.status() != psutil.STATUS_ZOMBIE:
    time.sleep(0.005)
print(psycopg.connect(ask()).execute("SELECT 1").fetchone())
"""
    assert _run_where_nobody_reaps(home, script) == "(1,)"


def _run_where_nobody_reaps(home: Path, script: str) -> str:
    """What the script printed within 8 s."""
    if sys.platform != "linux":
        pytest.skip("subreapers are Linux's")
    command = [sys.executable, "-c", _WHERE_NOBODY_REAPS + script, str(home)]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, timeout=8, env=_OUR_CODE)
    return done.stdout.strip()


def _servers(home: Path) -> list[psutil.Process]:
    """The postmasters whose data lies under `home`."""
    found = []
    for process in psutil.process_iter(["name", "cmdline"]):
        line = process.info["cmdline"] or []
        if process.info["name"] == "postgres" and "-D" in line and str(home) in line[line.index("-D") + 1]:
            found.append(process)
    return found


def _end(process: psutil.Process, sign: signal.Signals) -> None:
    """Send the signal, and return when the process has ended; its parent may not have taken note of that yet."""
    with contextlib.suppress(psutil.NoSuchProcess):
        process.send_signal(sign)
        deadline = time.monotonic() + 30
        while process.status() != psutil.STATUS_ZOMBIE:
            assert time.monotonic() < deadline, f"{process} does not end"
            time.sleep(0.005)


def _note_shared_memory(home: Path, server: psutil.Process) -> None:
    """Before it is killed: note what a killed server leaves in the machine, unless its next start removes it."""
    maps = Path(f"/proc/{server.pid}/maps")
    segments = set(re.findall(r"/dev/shm/PostgreSQL\.\d+", maps.read_text())) if maps.exists() else set()
    (home / "segments").write_text("\n".join(segments))


def _release_shared_memory(home: Path) -> None:
    if (noted := home / "segments").exists():
        for segment in noted.read_text().split():
            Path(segment).unlink(missing_ok=True)
    if (left := home / "postgres" / "postmaster.pid").exists():
        # Its key and its id, which System V knows it by; 0 is IPC_RMID.
        ctypes.CDLL(None).shmctl(int(left.read_text().splitlines()[6].split()[1]), 0, None)
