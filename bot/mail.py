"""Mails: each brings one approver the link to one request, by SMTP, as soon as it is asked for.

What a claimant wrote does not travel: a mail program would make links of it. The page behind the link shows it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import re
from dataclasses import dataclass
from decimal import Decimal
from email.message import EmailMessage
from email.policy import SMTP
from email.utils import format_datetime, localtime
from typing import Any
from urllib.parse import unquote, urlsplit

import aiosmtplib

from bot.site import money
from flow import mails
from flow.aio import to_its_end
from flow.database import AWAY, OUTSIDE_AFTER_S, Connection, Lock, connect, wakes
from flow.inputs import storable
from flow.links import wants_code
from flow.log import HIDDEN
from flow.mails import Mail
from flow.questions import question_of
from flow.settings import LOOPBACK, Settings

log = logging.getLogger(__name__)

# For the whole conversation; the lease is longer.
_SEND_TIMEOUT_S = 20.0
_SHORTEST_WAIT_S = 5.0
_LONGEST_WAIT_S = 4 * 3600.0
# No address of anything can be written with these.
_HARMLESS = re.compile(r"[A-Za-z0-9 _,()'-]{1,80}")
# Of a token: fewer characters than these tell nobody the rest.
_PIECE = 8


@dataclass(frozen=True, kw_only=True)
class MailServer:
    """Where mails go. `tls`: from the first byte. `start_tls`: before anything is said; None: if it is there."""

    host: str
    port: int
    user: str | None
    password: str | None
    tls: bool
    start_tls: bool | None

    @classmethod
    def of(cls, url: str) -> MailServer:
        """The server of an SMTP_URL. Only to this machine a password, or a link, goes without TLS."""
        parts = urlsplit(url)
        tls = parts.scheme == "smtps"
        host = parts.hostname or ""
        return cls(
            host=host,
            port=parts.port or (465 if tls else 587),
            user=unquote(parts.username) if parts.username else None,
            password=unquote(parts.password) if parts.password else None,
            tls=tls,
            start_tls=False if tls else None if host in LOOPBACK else True,
        )


class Mailer:
    """Sends on whatever connection it is given; any number of them may run side by side."""

    def __init__(self, server: MailServer, *, sender: str, url: str, step_up_over: Decimal | None) -> None:
        self._server, self._sender, self._url, self._step_up_over = server, sender, url, step_up_over
        # Whether the last look at the database succeeded; part of readiness.
        self.connected = False

    @classmethod
    def of(cls, settings: Settings) -> Mailer:
        assert settings.smtp_url is not None
        assert settings.mail_from is not None
        assert settings.public_url is not None
        server = MailServer.of(settings.smtp_url.get_secret_value())
        return cls(server, sender=settings.mail_from, url=settings.public_url, step_up_over=settings.step_up_over)

    async def run(self, url: str) -> None:
        """Send whenever something is due, until cancelled."""
        conn: Connection | None = None
        async with contextlib.aclosing(wakes(url, present_as=(Lock.DELIVERER,), after_s=OUTSIDE_AFTER_S)) as waking:
            async for connected in waking:
                self.connected = connected
                if not connected:
                    continue
                try:
                    if conn is None or conn.closed:
                        conn = await connect(url, "door")
                    await self.sweep(conn)
                except AWAY as exc:
                    # Leases run out by themselves; the listener keeps trying and wakes us.
                    log.warning("the database is away: %s", str(exc).strip())
                    if conn is not None:
                        await conn.close()

    async def sweep(self, conn: Connection, *, within_s: float = math.inf) -> tuple[int, int]:
        """Send what is due now; how many were sent, and how many not. Begins none after `within_s`."""
        clock = asyncio.get_running_loop().time
        deadline = clock() + within_s
        sent = failed = 0
        while clock() < deadline:
            # One that is cut off would keep its lease, and nobody would go on.
            done = await to_its_end(self._send_next(conn))
            if done is None:
                break
            sent, failed = sent + done, failed + (not done)
        return sent, failed

    async def _send_next(self, conn: Connection) -> bool | None:
        """Whether the mail that is due was sent; None if none is due."""
        mail = await mails.lease_mail(conn)
        if mail is None:
            return None
        try:
            await self._send(message_of(mail, sender=self._sender, url=self._url, step_up_over=self._step_up_over))
        except (aiosmtplib.SMTPException, TimeoutError, OSError, ValueError) as exc:
            await self._failed(conn, mail, exc)
            return False
        await mails.mark_mailed(conn, mail)
        return True

    async def _send(self, message: EmailMessage) -> None:
        async with asyncio.timeout(_SEND_TIMEOUT_S):
            await aiosmtplib.send(
                message,
                hostname=self._server.host,
                port=self._server.port,
                username=self._server.user,
                password=self._server.password,
                use_tls=self._server.tls,
                start_tls=self._server.start_tls,
                timeout=_SEND_TIMEOUT_S / 2,
            )

    async def _failed(self, conn: Connection, mail: Mail, exc: Exception) -> None:
        code, said = _answer_of(exc)
        # Operators read it, and the link is still good.
        error = _without(mail.token, storable(f"{type(exc).__name__}: {said}"))[:300]
        for_good = mail.attempt >= mails.MAX_ATTEMPTS or (_is_for_good(exc) and code >= 500)
        level, what = (logging.ERROR, "failed for good") if for_good else (logging.WARNING, "was not sent")
        log.log(level, "thread %s: the mail to %s %s: %s", mail.thread_id, mail.address, what, error)
        if for_good:
            await mails.mark_mail_failed(conn, mail, error)
        else:
            wait_s = min(_SHORTEST_WAIT_S * 2 ** (mail.attempt - 1), _LONGEST_WAIT_S)
            await mails.mark_mail_later(conn, mail, wait_s=wait_s, error=error)


def message_of(mail: Mail, *, sender: str, url: str, step_up_over: Decimal | None) -> EmailMessage:
    """The mail. A second copy has the same id, so many mail programs show one of them; the links of both are good."""
    what = _named(mail.request)
    message = EmailMessage(policy=SMTP)
    message["From"], message["To"] = sender, mail.address
    message["Subject"] = f"Approval needed: {what}" if what else "Approval needed"
    message["Date"] = format_datetime(localtime())
    message["Message-ID"] = f"<link-{mail.link_id}-{mail.interrupt_id}@{sender.rpartition('@')[2]}>"
    # No out-of-office replies: https://www.rfc-editor.org/rfc/rfc3834
    message["Auto-Submitted"] = "auto-generated"
    lines = [
        f"You are asked to approve {what}." if what else "You are asked for an approval.",
        "",
        "Look at it and decide:",
        f"{url}/a/{mail.token}",
        "",
        "Opening the link decides nothing. It works once, for this request alone.",
        "Do not pass it on: whoever has it is taken for you.",
    ]
    if wants_code(mail.request, step_up_over):
        about = "This amount" if question_of(mail.request).amount else "It"
        lines += ["", f"{about} needs a code too, which comes another way than this mail."]
    message.set_content("\n".join(lines) + "\n")
    return message


def _named(request: dict[str, Any]) -> str:
    """The amount; of another flow the title too, unless a mail program could make something of it."""
    question, amount = question_of(request), money(request)
    if question.kind == "claim" or not _HARMLESS.fullmatch(question.title):
        return amount
    return f"{amount}: {question.title}" if amount else question.title


def _answer_of(exc: Exception) -> tuple[int, str]:
    """The server's code, 0 if there is none, and what it said, for a person."""
    if isinstance(exc, aiosmtplib.SMTPRecipientsRefused) and exc.recipients:
        first: Any = exc.recipients[0]
        return int(first.code), str(first.message)
    return int(getattr(exc, "code", 0) or 0), str(getattr(exc, "message", exc) or exc)


def _without(token: str, said: str) -> str:
    """What a server said, without the token, which it may quote: whole, in parts, and within a longer word."""
    pieces = "|".join(token[at : at + _PIECE] for at in range(len(token) - _PIECE + 1))
    return re.sub(rf"(?:{pieces})[A-Za-z0-9_-]*", HIDDEN, said, flags=re.IGNORECASE)


def _is_for_good(exc: Exception) -> bool:
    """Whether a refusal is of this mail. One of us (our password, our sender) is mended by somebody, then sent."""
    return isinstance(
        exc, (aiosmtplib.SMTPRecipientsRefused, aiosmtplib.SMTPRecipientRefused, aiosmtplib.SMTPDataError)
    )
