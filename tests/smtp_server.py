"""A mail server with memory, that can be told to refuse, to hang up, or to take a mail and say nothing."""

from __future__ import annotations

import asyncio
import contextlib
import re
import warnings
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from email import message_from_bytes
from email.message import EmailMessage
from email.policy import default
from typing import Any

from aiosmtpd.smtp import SMTP, AuthResult, Envelope, LoginPassword, Session

USER, PASSWORD = "claims@example.com", "p@ss/word"


@dataclass
class SmtpServer:
    """`refusals` and `silences` are used up one by one; `bounces` are recipients that do not exist.

    A refusal may quote what it disliked: `{token}` in it is the link's, `{start}` and `{rest}` are its parts, `{small}`
    is in small letters. Bytes are sent as they are.
    """

    port: int = 0
    received: list[EmailMessage] = field(default_factory=list)
    recipients: list[str] = field(default_factory=list)
    refusals: list[str | bytes] = field(default_factory=list)
    # The tokens of what was refused.
    refused: list[str] = field(default_factory=list)
    silences: int = 0
    bounces: set[str] = field(default_factory=set)
    logins: list[tuple[str, str]] = field(default_factory=list)

    @property
    def url(self) -> str:
        return f"smtp://127.0.0.1:{self.port}"

    def tokens(self) -> list[str]:
        """The token of each mail's link, in the order in which they came."""
        return [_token_in(mail) for mail in self.received]

    async def handle_RCPT(  # noqa: N802 (aiosmtpd's name)
        self, server: SMTP, session: Session, envelope: Envelope, address: str, options: list[str]
    ) -> str:
        if address in self.bounces:
            return "550 5.1.1 no such user"
        envelope.rcpt_tos.append(address)
        return "250 OK"

    async def handle_DATA(self, server: SMTP, session: Session, envelope: Envelope) -> str | bytes:  # noqa: N802
        assert isinstance(envelope.content, bytes)
        mail: Any = message_from_bytes(envelope.content, policy=default)
        if self.refusals:
            refusal, token = self.refusals.pop(0), _token_in(mail)
            self.refused.append(token)
            return refusal if isinstance(refusal, bytes) else _quoting(refusal, token)
        self.received.append(mail)
        self.recipients += envelope.rcpt_tos
        if self.silences:
            self.silences -= 1
            transport = server.transport
            assert transport is not None
            transport.abort()  # type: ignore[attr-defined]
        return "250 taken"


def _token_in(mail: EmailMessage) -> str:
    return str(re.findall(r"/a/([A-Za-z0-9_-]{43})\s", mail.get_content())[0])


def _quoting(refusal: str, token: str) -> str:
    return refusal.format(token=token, small=token.lower(), start=token[:20], rest=token[20:])


@contextlib.asynccontextmanager
async def smtp_server(*, with_login: bool = False) -> AsyncIterator[SmtpServer]:
    running = SmtpServer()

    def authenticate(_server: SMTP, _session: Session, _envelope: Envelope, mechanism: str, data: Any) -> AuthResult:
        assert isinstance(data, LoginPassword)
        running.logins.append((data.login.decode(), data.password.decode()))
        return AuthResult(success=running.logins[-1] == (USER, PASSWORD))

    more: dict[str, Any] = {"authenticator": authenticate, "auth_required": True, "auth_require_tls": False}
    loop = asyncio.get_running_loop()

    def connected() -> SMTP:
        with warnings.catch_warnings():
            # Passwords without TLS, which is what this one is for.
            warnings.simplefilter("ignore")
            return SMTP(running, hostname="mail.test", loop=loop, **(more if with_login else {}))

    server = await loop.create_server(connected, "127.0.0.1", 0)
    running.port = server.sockets[0].getsockname()[1]
    try:
        yield running
    finally:
        server.close()
