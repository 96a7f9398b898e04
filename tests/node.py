"""Servers from npm, each pinned by a lock file in a folder of its own here, that end with the block that wants them."""

from __future__ import annotations

import contextlib
import fcntl
import re
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

from bot.local_slack import end

_HERE = Path(__file__).parent
# As the oldest of their package.json says.
_OLDEST_NODE = (20, 15)
# They listen after a second; the rest is for a machine that does many things at once.
_START_TIMEOUT_S = 20.0
# They would outlive a test run that was killed: the pipe on their stdin ends with us.
_LEASH = 'process.stdin.on("end", () => process.exit(0)).resume();\n'


def skip_reason() -> str | None:
    """Why this machine cannot run them, in words; None if it can."""
    node = shutil.which("node")
    if node is None or _version_of(node) < _OLDEST_NODE:
        return f"node {'.'.join(map(str, _OLDEST_NODE))} or newer is not installed: it runs stand-ins for services"
    if not shutil.which("npm"):
        return "npm is not installed: `npm ci` fetches the stand-ins for services"
    return None


def installed(folder: str) -> Path:
    """The modules that tests/`folder` pins, installed by `npm ci` if need be; several processes may ask at once."""
    modules = _HERE / folder / "node_modules"
    with (_HERE / folder / "package-lock.json").open("rb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not modules.exists():
            command = ["npm", "ci", "--no-audit", "--no-fund", "--ignore-scripts"]
            done = subprocess.run(command, cwd=_HERE / folder, capture_output=True, text=True, check=False)
            assert done.returncode == 0, f"`npm ci` failed in tests/{folder}: {done.stderr}"
    return modules


@contextlib.contextmanager
def running(
    program: Path | str, *options: str, files: Mapping[str, str], environment: Mapping[str, str]
) -> Iterator[str]:
    """The URL at which a program says that it is "listening on". It starts in a folder with these files."""
    with tempfile.TemporaryDirectory(prefix="node-") as name:
        folder = Path(name)
        for file, text in ({"leash.mjs": _LEASH} | dict(files)).items():
            (folder / file).write_text(text)
        node = shutil.which("node")
        assert node is not None
        with (folder / "output.txt").open("wb") as out:
            process = subprocess.Popen(
                [node, "--import", "./leash.mjs", program, *options],
                cwd=folder,
                env=dict(environment),
                stdin=subprocess.PIPE,
                stdout=out,
                stderr=subprocess.STDOUT,
            )
        try:
            yield _wait_for_url(process, folder / "output.txt")
        finally:
            end(process)


def _version_of(node: str) -> tuple[int, ...]:
    said = subprocess.run([node, "--version"], capture_output=True, text=True, check=True).stdout
    return tuple(int(part) for part in re.findall(r"\d+", said)[:3])


def _wait_for_url(process: subprocess.Popen[bytes], output: Path) -> str:
    deadline = time.monotonic() + _START_TIMEOUT_S
    while time.monotonic() < deadline and process.poll() is None:
        if said := re.search(r"listening on (http://127\.0\.0\.1:\d+)\s", output.read_text()):
            return said[1]
        time.sleep(0.01)
    raise AssertionError(f"it did not start (exit code {process.poll()}): {output.read_text()}")
