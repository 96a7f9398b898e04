"""The demo as a newcomer types it: it shows the whole product, needs nothing, and leaves nothing."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import aiohttp
import psutil
import pytest

from bot import local_slack
from bot.local_slack import LocalSlackMissing, find_binary, skip_reason
from tests.command import ROOT
from tests.folders import server_folder
from tests.rows import until

needs_local_slack = pytest.mark.skipif(skip_reason() is not None, reason=skip_reason() or "")

# A database made and ended, a dozen interpreters; a busy machine may need a few times ten seconds.
_PATIENCE_S = 90.0


class Desk:
    """A newcomer's folder, with a home and a place for temporary files of its own.

    Whatever a command leaves behind can be told by it: processes that stand in it or have its name, and files.
    """

    def __init__(self, folder: Path) -> None:
        self.folder, self._temporary = folder, folder / "tmp"
        for made in (folder / "home", self._temporary):
            made.mkdir()
        self.environment = {
            "PATH": os.environ["PATH"],
            "HOME": str(folder / "home"),
            "TMPDIR": str(self._temporary),
            "TZ": "UTC",
        }

    def type(self, *words: str, checkout: Path = ROOT) -> subprocess.Popen[bytes]:
        """Start a command as a terminal does, as the head of a group of processes that gets the Ctrl-C."""
        with (self.folder / "out").open("wb") as out, (self.folder / "err").open("wb") as err:
            return subprocess.Popen(
                [sys.executable, checkout / "claim_flow.py", *words],
                cwd=self.folder,
                env=self.environment,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                process_group=0,
            )

    @property
    def out(self) -> str:
        return (self.folder / "out").read_text()

    @property
    def err(self) -> str:
        return (self.folder / "err").read_text()

    def processes(self) -> dict[int, str]:
        """The command lines of all processes that belong here, by pid."""
        return {each.pid: " ".join(each.cmdline()) for each in self._processes()}

    def listening_ports(self) -> set[int]:
        ports: set[int] = set()
        for process in self._processes():
            # One that has ended by now listens no more.
            with contextlib.suppress(psutil.NoSuchProcess):
                listening = [each for each in process.net_connections("tcp") if each.status == psutil.CONN_LISTEN]
                ports.update(each.laddr.port for each in listening)
        return ports

    def temporary_folders(self) -> list[str]:
        """The embedded server's wheel keeps a lock file in the system's own folder; that is not ours to remove."""
        return sorted(each.name for each in self._temporary.iterdir() if each.name != ".lockfile")

    def end_all(self) -> None:
        """End whatever is left, so that a failed test leaves nothing either."""
        for pid in self.processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def _processes(self) -> list[psutil.Process]:
        return [each for each in psutil.process_iter() if each.pid != os.getpid() and self._is_here(each)]

    def _is_here(self, process: psutil.Process) -> bool:
        with contextlib.suppress(psutil.Error, OSError):
            if process.status() == psutil.STATUS_ZOMBIE:
                return False
            known_by = [process.cwd(), *process.cmdline(), *process.environ().values()]
            return any(str(self.folder) in each for each in known_by)
        return False


@pytest.fixture
def desk() -> Iterator[Desk]:
    with server_folder() as folder:
        made = Desk(folder)
        yield made
        made.end_all()


def end_of(process: subprocess.Popen[bytes]) -> int:
    """Its exit code."""
    return process.wait(_PATIENCE_S)


async def is_bare(desk: Desk) -> bool:
    return not desk.processes()


def is_refused(port: int) -> bool:
    with socket.socket() as probe:
        probe.settimeout(1.0)
        return probe.connect_ex(("127.0.0.1", port)) != 0


# With a local Slack


@dataclass(frozen=True, kw_only=True)
class Shown:
    """What a demo that ran to its end showed, and what was there afterwards."""

    code: int
    out: str
    err: str
    processes: dict[int, str]
    temporary_folders: list[str]
    foreign_calls: int


@pytest.fixture(scope="module")
def shown() -> Iterator[Shown]:
    """`demo --click` on the desk of somebody with settings: a database, a Slack and a model of theirs, and worse."""
    with server_folder() as folder, socket.create_server(("127.0.0.1", 0)) as foreign:
        desk = Desk(folder)
        foreign.setblocking(False)
        url = f"http://127.0.0.1:{foreign.getsockname()[1]}"
        (desk.folder / ".env").write_text(
            f"DATABASE_URL=postgresql://me@{url.removeprefix('http://')}/mine\nSLACK_BOT_TOKEN=xoxb-mine\n"
            f"SLACK_APP_TOKEN=xapp-mine\nSLACK_CHANNEL=C0MINE\nSLACK_API_URL={url}/api/\nAPPROVERS=U99EVE\n"
        )
        desk.environment |= {
            "OPENAI_API_KEY": "sk-mine",
            "OPENAI_BASE_URL": f"{url}/v1",
            "CLAIM_FLOW_HOME": "/nonexistent",
            "PORT": "1",
            # The same to pydantic.
            "host": "nowhere.invalid",
            "stand_by": "none",
        }
        process = desk.type("demo", "--click")
        try:
            code = end_of(process)
            # A process whose parent has died needs a moment to hear of it.
            deadline = time.monotonic() + 2.0
            while desk.processes() and time.monotonic() < deadline:
                time.sleep(0.01)
            calls = 0
            with contextlib.suppress(BlockingIOError):
                foreign.accept()
                calls += 1
            yield Shown(
                code=code,
                out=desk.out,
                err=desk.err,
                processes=desk.processes(),
                temporary_folders=desk.temporary_folders(),
                foreign_calls=calls,
            )
        finally:
            desk.end_all()


@needs_local_slack
def test_the_demo_shows_a_claim_paid_at_once_and_one_paid_after_a_click(shown: Shown) -> None:
    assert (shown.code, shown.err) == (0, "")
    told = [line for line in shown.out.splitlines() if line.startswith(("t0:", "t1:", "Alice presses", "payment"))]
    # Without the page, and without when it was.
    assert [" ".join(re.sub(r" \(.*\)| at .*,", "", line).split()) for line in told] == [
        "t0: 20.00 USD is paid, reference L-t0",
        "t1: 250.00 USD is waiting for approval",
        "Alice presses Approve in the local Slack.",
        "payment paid reference L-t1",
        "t1: 250.00 USD is paid, reference L-t1",
    ]
    listed = [line.split()[:4] for line in shown.out.splitlines()[-2:]]
    assert listed == [["t1", "claims", "paid", "250.00"], ["t0", "claims", "paid", "20.00"]]
    assert "by alice (slack:T01TEST/U01ALICE, slack)" in shown.out


@needs_local_slack
def test_the_demo_uses_no_setting_of_the_user_and_calls_nobody(shown: Shown) -> None:
    assert (shown.code, shown.foreign_calls) == (0, 0)
    [approvers] = [line.split() for line in shown.out.splitlines() if line.startswith("approvers")]
    assert approvers == ["approvers", "U01ALICE"]
    assert "model's advice" not in shown.out


@needs_local_slack
def test_the_demo_leaves_no_process_no_folder_and_no_port(shown: Shown) -> None:
    assert shown.processes == {}
    assert shown.temporary_folders == []
    [page] = re.findall(r"http://127\.0\.0\.1:(\d+)", shown.out)
    assert is_refused(int(page))


@needs_local_slack
async def test_ctrl_c_while_the_demo_waits_ends_everything(desk: Desk) -> None:
    process = desk.type("demo")
    [page] = await until(
        partial(told, desk, process, r"Now open (\S+) as Alice[^$]* resume --thread t1 --approve\n"), _PATIENCE_S
    )
    async with aiohttp.ClientSession() as session, session.get(page) as answer:
        assert answer.status == 200
    # The page, and where it sends clicks.
    ports = desk.listening_ports()
    assert len(ports) == 2
    assert len(desk.processes()) > 3
    await assert_ctrl_c_ends(desk, process)
    assert [port for port in ports if not is_refused(port)] == []


@needs_local_slack
async def test_ctrl_c_while_a_command_of_the_demo_runs_ends_that_too(desk: Desk) -> None:
    process = desk.type("demo")
    await until(partial(told, desk, process, r"\$ uv run claim_flow.py start --thread t1"), _PATIENCE_S)
    await until(partial(runs, desk, "start --thread t1"))
    await assert_ctrl_c_ends(desk, process)


async def told(desk: Desk, process: subprocess.Popen[bytes], pattern: str) -> list[str]:
    assert process.poll() is None, desk.err
    return re.findall(pattern, desk.out)


async def runs(desk: Desk, words: str) -> bool:
    return any(words in each for each in desk.processes().values())


async def assert_ctrl_c_ends(desk: Desk, process: subprocess.Popen[bytes]) -> None:
    """A clean end within 15 s, without a word, and nothing left."""
    os.killpg(process.pid, signal.SIGINT)
    code = await asyncio.to_thread(process.wait, 15)
    assert (code, desk.err) == (0, "")
    await until(partial(is_bare, desk), within_s=2.0)
    assert desk.temporary_folders() == []


# Without one


def copy_checkout(to: Path) -> Path:
    """A fresh clone: the local Slack's lock file is there, its program is not."""
    for folder in ("bot", "flow"):
        shutil.copytree(ROOT / folder, to / folder, ignore=shutil.ignore_patterns("__pycache__"))
    (to / "tests" / "slack").mkdir(parents=True)
    for name in ("claim_flow.py", "tests/slack/package.json", "tests/slack/package-lock.json"):
        shutil.copy(ROOT / name, to / name)
    return to


async def test_without_npm_the_demo_says_so_and_shows_the_command_line_alone(desk: Desk) -> None:
    clone = copy_checkout(desk.folder / "clone")
    desk.environment["PATH"] = str(desk.folder / "nothing")
    code = await asyncio.to_thread(end_of, desk.type("demo", checkout=clone))
    assert (code, desk.err) == (0, "")
    first, *_ = lines = desk.out.splitlines()
    assert first == (
        "No local Slack: npm is not installed: install Node.js, so that `npm ci` in tests/slack can fetch the local"
        " Slack. Going on with the command line alone."
    )
    assert "t0: 20.00 USD is paid, reference L-t0" in lines
    assert "t1: 250.00 USD is waiting for approval" in lines
    paid = [line for line in lines if line.startswith("t1: 250.00 USD is paid, reference L-t1 (approved by cli:")]
    assert len(paid) == 2
    assert paid[0] == paid[1]
    await until(partial(is_bare, desk), within_s=2.0)
    assert desk.temporary_folders() == []


def test_an_installed_package_without_the_lock_file_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(local_slack, "_PACKAGES", tmp_path / "none")
    with pytest.raises(LocalSlackMissing, match="only in a checkout"):
        find_binary()


def test_an_npm_that_fails_is_quoted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    folder = copy_checkout(tmp_path / "clone") / "tests" / "slack"
    npm = tmp_path / "npm"
    npm.write_text("#!/bin/sh\necho 'npm error network is unreachable' >&2\nexit 1\n")
    npm.chmod(0o755)
    monkeypatch.setattr(local_slack, "_PACKAGES", folder)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    with pytest.raises(LocalSlackMissing, match="`npm ci` failed in tests/slack: npm error network is unreachable"):
        find_binary()
