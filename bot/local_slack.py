"""A Slack on this machine for demo and tests: Web API, signed requests, Socket Mode, and a page to click on.

Its program is the npm package `local-slack-*`, pinned by the lock file in `tests/slack`; Slack itself is never called.
"""

from __future__ import annotations

import contextlib
import fcntl
import http.client
import json
import re
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from flow.errors import FlowError

TEAM = "T01TEST"
APP = "A01APP"
BOT_USER = "U0BOT"
BOT_TOKEN = "xoxb-test-token"  # noqa: S105 (the local workspace's own; it guards nothing)
APP_TOKEN = "xapp-test-token"  # noqa: S105
SIGNING_SECRET = "test-signing-secret"  # noqa: S105
CHANNEL = "C01GEN"

_PACKAGES = Path(__file__).parent.parent / "tests" / "slack"

# It answers within a tenth of a second; ten leave room for a machine that does many things at once.
_START_TIMEOUT_S = 10.0
_END_TIMEOUT_S = 5.0

# Runs inside the program before its own code. It listens on every interface otherwise, and would outlive us if we were
# killed: the pipe on its stdin ends with us, whatever ended us. Its page gets the script below.
_LEASH = """
const serve = Bun.serve;
const script = `<script>${PAGE}</script>`;
const add = { element: (head) => head.prepend(script, { html: true }) };
Bun.serve = (options) => serve({
  ...options,
  hostname: "127.0.0.1",
  async fetch(...request) {
    const answer = await options.fetch(...request);
    const isPage = answer?.headers.get("content-type")?.startsWith("text/html");
    return isPage ? new HTMLRewriter().on("head", add).transform(answer) : answer;
  },
});
process.stdin.on("end", () => process.exit(0)).resume();
"""

# The page shows dates and the three escapes of mrkdwn as they were sent; in Slack a reader sees the time in their own
# zone, and the characters (https://api.slack.com/reference/surfaces/formatting). Only texts are changed here, so what
# became a link or a mention stays one, and nothing else becomes one.
_PAGE = r"""
const day = (at) => at.toLocaleDateString("en-US", { dateStyle: "medium" });
const time = (at) => at.toLocaleTimeString("en-US", { timeStyle: "short" });
const ago = (at) => {
  const minutes = Math.round((new Date() - at) / 60000);
  return minutes < 1 ? "just now" : `${minutes} minute${minutes > 1 ? "s" : ""} ago`;
};
const date = (_, seconds, format) => {
  const at = new Date(seconds * 1000);
  const today = day(at) === day(new Date());
  return format.replace("{date_short_pretty}", today ? "today" : day(at)).replace("{time}", time(at))
    .replace("{ago}", ago(at));
};
const shown = (text) => text
  .replace(/<!date\^(\d+)\^([^|>]*)\|[^>]*>/g, date)
  .replace(/&lt;/g, "<").replace(/&gt;/g, ">").replace(/&amp;/g, "&");
new MutationObserver(() => {
  for (const part of document.querySelectorAll(".mrkdwn")) {
    const texts = document.createTreeWalker(part, NodeFilter.SHOW_TEXT);
    while (texts.nextNode()) {
      const text = shown(texts.currentNode.data);
      if (text !== texts.currentNode.data) texts.currentNode.data = text;
    }
  }
}).observe(document, { childList: true, subtree: true });
"""


class LocalSlackMissing(FlowError):
    """The program is not there and cannot be installed."""


class LocalSlackFailed(FlowError):
    """The local Slack did not start, or refused a call."""


@contextlib.contextmanager
def running_local_slack(*, request_url: str | None = None) -> Iterator[tuple[str, int]]:
    """A workspace on a free port of 127.0.0.1: its URL and its process id; gone when the block ends.

    With a `request_url` the app gets signed HTTP requests there, without one it must connect by Socket Mode. Alice, Bob
    and Eve are in the channel `approvals`, as is the bot.
    """
    program = find_binary()
    with tempfile.TemporaryDirectory(prefix="local-slack-") as name:
        folder = Path(name)
        process = _start(program, folder, _workspace(request_url))
        try:
            yield f"http://127.0.0.1:{_wait_for_port(process, folder / 'output.txt')}", process.pid
        finally:
            end(process)


def settings_for(url: str, *, socket_mode: bool = False) -> dict[str, str]:
    """The environment of a bot that works in this workspace."""
    settings = {
        "SLACK_BOT_TOKEN": BOT_TOKEN,
        "SLACK_SIGNING_SECRET": SIGNING_SECRET,
        "SLACK_CHANNEL": CHANNEL,
        "SLACK_API_URL": f"{url}/api/",
    }
    return settings | ({"SLACK_APP_TOKEN": APP_TOKEN} if socket_mode else {})


def skip_reason() -> str | None:
    """Why this machine cannot run it, in words; None if it can."""
    if _installed():
        return None
    if not _PACKAGES.is_dir():
        return "its lock file (tests/slack) is only in a checkout, not in the installed package"
    if not shutil.which("npm"):
        return "npm is not installed: install Node.js, so that `npm ci` in tests/slack can fetch the local Slack"
    return None


def find_binary() -> Path:
    """The program, installed by `npm ci` in tests/slack if it is not there yet.

    Several processes may ask at once: one installs, the others wait for it.
    """
    if found := _installed():
        return found
    if reason := skip_reason():
        raise LocalSlackMissing(reason)
    with (_PACKAGES / "package-lock.json").open("rb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not _installed():
            _install()
    if found := _installed():
        return found
    raise LocalSlackMissing("npm has no local Slack for this machine: see the platforms in tests/slack/package.json")


def free_port() -> int:
    """A port of 127.0.0.1 that nobody listens on: the bot's, which the workspace must know before the bot starts."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _installed() -> Path | None:
    # npm installs the package of this machine's platform and no other.
    return next(_PACKAGES.glob("node_modules/local-slack-*/bin/local-slack*"), None)


def _install() -> None:
    command = ["npm", "ci", "--no-audit", "--no-fund", "--ignore-scripts"]
    done = subprocess.run(command, cwd=_PACKAGES, capture_output=True, text=True, check=False)
    if done.returncode:
        raise LocalSlackMissing(f"`npm ci` failed in tests/slack: {done.stderr.strip()}")


def _start(program: Path, folder: Path, workspace: dict[str, Any]) -> subprocess.Popen[bytes]:
    (folder / "workspace.json").write_text(json.dumps(workspace))
    (folder / "leash.js").write_text(f"const PAGE = {json.dumps(_PAGE)};{_LEASH}")
    # Port 0: the system picks one, so that no other process can take it in between.
    options = ["--config", "workspace.json", "--port", "0", "--base-host", "127.0.0.1", "--files-dir", "files"]
    with (folder / "output.txt").open("wb") as out:
        return subprocess.Popen(
            [program, *options],
            # In this folder, as it reads an .env where it stands; with no environment, as it obeys proxies.
            cwd=folder,
            env={"BUN_OPTIONS": "--preload=./leash.js"},
            stdin=subprocess.PIPE,
            stdout=out,
            stderr=subprocess.STDOUT,
            # A Ctrl-C in the terminal is ours to handle.
            start_new_session=True,
        )


def end(process: subprocess.Popen[bytes]) -> None:
    """End a server that listens to its stdin for our own end, and may wait for connections that a client keeps open."""
    process.terminate()
    try:
        process.wait(_END_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    assert process.stdin is not None
    process.stdin.close()


def _workspace(request_url: str | None) -> dict[str, Any]:
    app = {
        "appId": APP,
        "botUserId": BOT_USER,
        "botName": "claim-flow",
        "botToken": BOT_TOKEN,
        "appToken": APP_TOKEN,
        "signingSecret": SIGNING_SECRET,
    }
    delivery = {"mode": "events", "requestUrl": request_url} if request_url else {"mode": "socket"}
    return {
        "workspace": {"name": "Test Workspace", "domain": "test-workspace", "teamId": TEAM},
        "app": app | delivery,
        "users": [
            {
                "id": "U01ALICE",
                "name": "alice",
                "real_name": "Alice Anderson",
                "email": "alice@example.com",
                "tz": "Europe/Moscow",
            },
            {"id": "U02BOB", "name": "bob", "real_name": "بوب 👍 <Brown>", "email": "bob@example.com"},
            {"id": "U03BOTTY", "name": "botty", "real_name": "Botty", "is_bot": True},
            # In the channel, and on nobody's list.
            {"id": "U99EVE", "name": "eve", "real_name": "Eve", "email": "eve@example.com"},
        ],
        "channels": [
            {"id": CHANNEL, "name": "approvals", "members": ["U01ALICE", "U02BOB", "U99EVE", BOT_USER]},
            {"id": "C02RND", "name": "random", "members": ["U01ALICE"]},
        ],
    }


def _wait_for_port(process: subprocess.Popen[bytes], output: Path) -> int:
    """The port that it says it listens on, once it answers there."""
    deadline = time.monotonic() + _START_TIMEOUT_S
    while time.monotonic() < deadline and process.poll() is None:
        said = re.search(r"Web UI: +http://127\.0\.0\.1:(\d+)\s", output.read_text())
        if said and _answers(int(said[1])):
            return int(said[1])
        time.sleep(0.01)
    raise LocalSlackFailed(f"the local Slack did not start (exit code {process.poll()}): {output.read_text()}")


def _answers(port: int) -> bool:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=1.0)
    try:
        connection.request("GET", "/_control/state")
        return connection.getresponse().status == 200
    except OSError:
        return False
    finally:
        connection.close()
