"""Decisions of external approvers: signed requests, per https://www.standardwebhooks.com.

A signature proves the endpoint that sent it. Which of its people decided it says itself; that one must be on the
endpoint's list here, and on the approval's.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from standardwebhooks.webhooks import Webhook

from bot.problems import Problem
from flow.errors import NotAllowed
from flow.model import Person
from flow.settings import Settings


@dataclass(frozen=True, kw_only=True)
class Endpoint:
    """One sender: its secrets (several while one is replaced by another), and the people it may speak for."""

    name: str
    secrets: tuple[str, ...]
    approvers: frozenset[str]

    def person(self, approver: str) -> Person:
        """One of its people. Raises NotAllowed for any other."""
        key = f"webhook:{self.name}:{approver}"
        if approver not in self.approvers:
            raise NotAllowed(key, f"{self.name} may not speak for them: see WEBHOOK_APPROVERS")
        return Person(key=key, name=f"{approver} ({self.name})", names=frozenset({key}))


def endpoints_of(settings: Settings) -> tuple[Endpoint, ...]:
    """The senders that WEBHOOK_SECRETS names; none: that door is shut."""
    approvers = settings.webhook_approver_names
    return tuple(
        Endpoint(name=name, secrets=tuple(secrets), approvers=frozenset(approvers.get(name, ())))
        for name, secrets in settings.webhook_secret_lists.items()
    )


def is_webhook(headers: Mapping[str, str]) -> bool:
    """Whether the request says that it is signed."""
    return any(name in headers for name in ("webhook-id", "webhook-timestamp", "webhook-signature"))


def sender_of(endpoints: tuple[Endpoint, ...], headers: Mapping[str, str], body: bytes) -> tuple[Endpoint, str]:
    """The endpoint that signed exactly this body within the last five minutes, and its id for it.

    Raises Problem: 400 without an id, 401 for whatever is not signed by one of them.
    """
    webhook_id = headers.get("webhook-id", "")
    if not webhook_id and headers.get("webhook-timestamp") and headers.get("webhook-signature"):
        raise Problem(400, "webhook-id is missing: without it a repeated request could not be told from a new one")
    well_formed = re.fullmatch(r"[A-Za-z0-9_-]{1,128}", webhook_id, re.ASCII) and re.fullmatch(
        r"[0-9]{10}", headers.get("webhook-timestamp", ""), re.ASCII
    )
    if well_formed:
        given = {name: headers.get(name, "") for name in ("webhook-id", "webhook-timestamp", "webhook-signature")}
        for endpoint in endpoints:
            if any(_signed(secret, given, body) for secret in endpoint.secrets):
                return endpoint, webhook_id
    raise Problem(
        401, "not signed by an endpoint that is known here", headers={"WWW-Authenticate": "Webhook-Signature"}
    )


def _signed(secret: str, headers: dict[str, str], body: bytes) -> bool:
    try:
        Webhook(secret).verify(body, headers, json_parse=False)
    except Exception:  # noqa: BLE001 (it raises whatever hostile headers make its parsing raise; none is a signature)
        return False
    return True
