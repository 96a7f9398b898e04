"""Log lines: one JSON object each, about what they are about, without secrets and without people's own words."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from flow.database import Connection
from flow.log import hider
from tests.command import ROOT, Terminal
from tests.rows import until, value
from tests.services import Town

SECRETS = {
    "a bot token": "xoxb-1234567890-abcdefGHIJ",
    "a rotated bot token": "xoxe.xoxb-1-Mi0yLTEyMzQ1Njc4OTA",
    "an app token": "xapp-1-A0123-456-abcdef0123456789",
    "a model's key": "sk-proj-AbCd_1234-efgh5678",
    "a payment provider's key": "sk_live_51H8abcdefghijklmnop",
    "a webhook's secret": "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw",
    "an API token": "cf_Zk3vR9tQ2xY7bN4mW8pL1sD6fG0hJ5kA3cV7eU2iO9q",
    "a link": "Zk3vR9tQ2xY7bN4mW8pL1sD6fG0hJ5kA3cV7eU2iO9q",
    "a signing secret of ours": "0123456789abcdef-signing",
    "a password of ours": "p%40ss-of-the-database",
    "the same, decoded": "p@ss-of-the-database",
}
AROUND = {
    **dict.fromkeys(SECRETS, "it said {} and ended"),
    "a link": "GET https://claims.example.com/a/{} failed",
    "a password of ours": "postgresql://claims:{}@db/claims",
}
HEADERS = {
    "a bearer token": ("Authorization: Bearer {}", "opaque-0123456789"),
    "a basic password": ("{{'authorization': 'Basic {}'}}", "Y2xhaW1zOnNlY3JldA=="),
    "a bare one": ("<CIMultiDict('Authorization': 'bearer {}')>", "opaque-9876543210"),
    "a response_url": ("POST https://hooks.slack.com/{} refused", "actions/T01/123/abcDEF"),
    "an answer of a log-in": ("GET /login/slack/callback?state=abc&code={}&x=1", "123.456.789"),
    "a session": ("Cookie: __Host-session={}; theme=dark", "token.0123abcd"),
    "a row that Postgres refuses": (
        "new row violates a check\nDETAIL:  Failing row contains ({}).",
        "t1, my boss\n\nand I, 9",
    ),
    "an input": ("1 error\n note: bad [type=x, input_value={}, input_type=str]", "'my divorce'"),
}
OURS = {
    "DATABASE_URL": "postgresql://claims:p%40ss-of-the-database@db/claims",
    "SLACK_BOT_TOKEN": "xoxb-ours",
    "SLACK_SIGNING_SECRET": "0123456789abcdef-signing",
    "SLACK_CHANNEL": "C0123456789",
}

# Logs what it reads, in the message, in an argument, as an exception, and as one that is behind another.
LOGS = """
import json, logging, sys
from flow.log import concerning, log_to_stderr
from flow.settings import read_settings
log_to_stderr(read_settings())
log = logging.getLogger("library")
with concerning(thread="t1", trace_id="0123"):
    for text in json.loads(sys.argv[1]):
        log.warning(text)
        log.warning("it is %r", {"given": text})
        try:
            try:
                raise ValueError(text)
            except ValueError as exc:
                raise RuntimeError("no") from exc
        except RuntimeError:
            log.exception("failed")
log.info("over")
"""


def logged(folder: Path, texts: list[str], **settings: str) -> str:
    environment = {"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT)} | OURS | settings
    done = subprocess.run(
        [sys.executable, "-c", LOGS, json.dumps(texts)],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stderr


def lines_of(text: str) -> list[dict[str, Any]]:
    """Every line, each of which must be JSON."""
    return [json.loads(line) for line in text.splitlines()]


@pytest.mark.parametrize("form", ["json", "text"])
def test_no_secret_is_logged_in_messages_arguments_or_exceptions(tmp_path: Path, form: str) -> None:
    texts = [AROUND[what].format(secret) for what, secret in SECRETS.items()]
    texts += [around.format(secret) for around, secret in HEADERS.values()]
    said = logged(tmp_path, texts, LOG_FORMAT=form)
    # Not more than them: the rest of each text is there to be read.
    assert said.count("and ended") >= 3 * (len(SECRETS) - 2)
    assert (said.count("t1, my boss"), said.count("ValueError")) == (0, said.count("RuntimeError: no"))
    for what, secret in {**SECRETS, **{what: secret for what, (_, secret) in HEADERS.items()}}.items():
        assert secret not in said, what


@pytest.mark.parametrize(
    "text",
    [
        "thread task-force-2026: paid, reference L-task-force-2026",
        "thread 0a1b2c3d-4e5f-6789-abcd-ef0123456789-expenses: waiting",
        "a bearer token is needed: `claim_flow.py tokens create`",
        "connected to the database at https://db.example.com:5432/claims",
        "request 0123456789abcdef: POST /api/approvals/0123456789abcdef0123456789abcdef/decision: 403",
    ],
)
def test_what_is_no_secret_stays(text: str) -> None:
    assert hider(frozenset({"0123456789abcdef-signing"}))(text) == text


def test_a_line_says_when_how_bad_who_and_about_what(tmp_path: Path) -> None:
    first, _, failed, over = lines_of(logged(tmp_path, ["hello\nworld"]))
    assert list(first) == ["time", "level", "logger", "message", "thread", "trace_id"]
    about = {"level": "warning", "logger": "library", "message": "hello\nworld", "thread": "t1", "trace_id": "0123"}
    assert first == {"time": first["time"]} | about
    assert first["time"].endswith("Z")
    assert failed["message"] == "failed" and "ValueError: hello" in failed["exception"]
    # It is about nothing any more.
    assert list(over) == ["time", "level", "logger", "message"]


def test_people_are_shown_text_and_programs_json_unless_told_otherwise(tmp_path: Path) -> None:
    assert "hello" in logged(tmp_path, ["hello"], LOG_FORMAT="text").splitlines()[0]
    with pytest.raises(json.JSONDecodeError):
        lines_of(logged(tmp_path, ["hello"], LOG_FORMAT="text"))
    assert on_a_terminal(tmp_path)[0] != "{"
    assert on_a_terminal(tmp_path, LOG_FORMAT="json")[0] == "{"


def on_a_terminal(folder: Path, **settings: str) -> str:
    """What a person sees first."""
    ours, theirs = pty.openpty()
    environment = {"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT), "TERM": "xterm"} | OURS | settings
    words = [sys.executable, "-c", LOGS, json.dumps(["hello"])]
    with subprocess.Popen(words, cwd=folder, env=environment, stderr=theirs) as process:
        os.close(theirs)
        shown = os.read(ours, 10_000)
        process.kill()
    os.close(ours)
    return shown.decode()


def test_the_commands_that_people_type_import_neither_logs_nor_metrics(tmp_path: Path, database_url: str) -> None:
    terminal = Terminal(tmp_path, DATABASE_URL=database_url)
    done = terminal.run("list", trace_imports=True)
    assert done.code == 0 and "flow.approvals" in done.imports
    assert not {name.split(".")[0] for name in done.imports} & {"structlog", "prometheus_client"}


async def test_a_click_and_its_drive_are_told_in_json_without_anybodys_words(
    tmp_path: Path, database_url: str, conn: Connection
) -> None:
    # A model that is not there: a stand-by has something to say.
    model = {"OPENAI_API_KEY": "sk-none-0123456789", "OPENAI_BASE_URL": "http://127.0.0.1:9/v1"}
    async with Town(database_url, Terminal(tmp_path)) as town, town.service("serve", STAND_BY="1", **model) as serve:
        [first, second] = await town.waiting(conn, ["t1", "t2"])
        assert await town.click(first.approve) == 200
        assert await town.click(await town.caller.rejection_of(conn, second.interrupt_id, "about the affair")) == 200

        async def over() -> bool:
            ended = "SELECT count(*) = 2 FROM threads WHERE status IN ('paid', 'rejected')"
            return bool(await value(conn, ended)) and serve.err.count(": over") == 2

        await until(over, within_s=60)
    lines = lines_of(serve.err)
    decided = {line["interrupt"]: line for line in lines if line["message"].startswith("decided: ")}
    approved = decided[first.interrupt_id]
    assert (approved["message"], approved["thread"]) == ("decided: approve, through slack", "t1")
    assert approved["approver"].endswith("U01ALICE") and approved["trace_id"]
    assert decided[second.interrupt_id]["trace_id"] != approved["trace_id"]
    ends = [line for line in lines if line["logger"] == "flow.worker" and line.get("thread")]
    assert len(ends) == len({line["trace_id"] for line in ends}) == 4
    # A process that the worker had forked speaks of the same drive.
    [unadvised, _] = [line for line in lines if line["logger"] == "flow.assess"]
    assert unadvised["trace_id"] in {line["trace_id"] for line in ends if line["thread"] == unadvised["thread"]}
    for words in ("three chairs", "affair", "sk-none", town.terminal.environment["SLACK_BOT_TOKEN"]):
        assert words not in serve.err
