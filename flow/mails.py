"""The outbox of mails: an approver who has an address gets a link to the request, written when it is asked for.

A link's token is kept nowhere, so whoever sends the mail makes one at that moment and adds its hash to the link. An
attempt that got no answer may have arrived; the next one sends another token, and both are good for the one decision.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from flow.audit import record
from flow.database import Connection, ring
from flow.model import Approval
from flow.notices import raise_alarm
from flow.sessions import digest_of, new_token
from flow.standing import askers_of
from flow.text import ADDRESS

# Longer than a delivery can take, short enough that a dead mailer is not missed for long.
LEASE_S = 60.0

# Most of a day, with the back-off of whoever sends.
MAX_ATTEMPTS = 15

# Link l of approval a is still good for something; else nobody is mailed, and nothing waits or has failed.
WANTED = (
    "l.used_at IS NULL AND l.revoked_at IS NULL AND a.status = 'pending'"
    " AND (a.expires_at IS NULL OR a.expires_at > clock_timestamp())"
)

_FAILED = f"l.mail_due_at IS NULL AND l.mail_error IS NOT NULL AND {WANTED}"


@dataclass(frozen=True, kw_only=True)
class Mail:
    """One link that is to be mailed now, and the token that its mail carries. `attempt` is the fence."""

    link_id: int
    interrupt_id: str
    thread_id: str
    address: str
    token: str
    request: dict[str, Any]
    attempt: int


@dataclass(frozen=True, kw_only=True)
class FailedMail:
    """One that is not tried again until somebody says `deliver`, though its link is still good for something."""

    thread_id: str
    address: str
    error: str


async def ask_by_mail(conn: Connection, approval: Approval, names: Collection[str]) -> None:
    """Let everybody by these names who has an address, and may decide what is asked, have a link by mail."""
    for address in sorted(_addresses_in(names) - _addresses_in(askers_of(approval))):
        made = await conn.execute(
            "INSERT INTO links (interrupt_id, person, made_by, mail_due_at)"
            " VALUES (%s, %s, 'policy', clock_timestamp()) ON CONFLICT DO NOTHING"
            " RETURNING person",
            (approval.interrupt_id, f"mail:{address}"),
        )
        for row in await made.fetchall():
            await record(
                conn,
                "link.made",
                who="policy",
                door="drive",
                thread_id=approval.thread_id,
                interrupt_id=approval.interrupt_id,
                for_whom=row["person"],
            )
            await ring(conn)


def _addresses_in(names: Collection[str]) -> set[str]:
    bare = (name.removeprefix("mail:") for name in names)
    return {name.lower() for name in bare if ADDRESS.fullmatch(name)}


async def lease_mail(conn: Connection) -> Mail | None:
    """Take the mail that has been due for longest, with a token of its own, for LEASE_S; None if none is due.

    A link that is spent, revoked, or whose approval no longer waits is not mailed any more.
    """
    token = new_token()
    row = await (
        await conn.execute(
            "WITH next AS (SELECT l.id FROM links l JOIN approvals a USING (interrupt_id)"
            f" WHERE l.mail_due_at <= statement_timestamp() AND {WANTED}"
            " ORDER BY l.mail_due_at LIMIT 1 FOR UPDATE OF l SKIP LOCKED)"
            " UPDATE links l SET mail_attempt = l.mail_attempt + 1,"
            " tokens_sha256 = l.tokens_sha256 || %(digest)s::bytea,"
            " mail_due_at = clock_timestamp() + %(lease)s * interval '1 second'"
            " FROM next, approvals a WHERE l.id = next.id AND a.interrupt_id = l.interrupt_id"
            " RETURNING l.id AS link_id, l.interrupt_id, a.thread_id, substr(l.person, 6) AS address, a.request,"
            " l.mail_attempt AS attempt",
            {"digest": digest_of(token), "lease": LEASE_S},
        )
    ).fetchone()
    return Mail(**row, token=token) if row else None


async def mark_mailed(conn: Connection, mail: Mail) -> None:
    """The mail server has taken it."""
    await conn.execute(
        "UPDATE links SET mailed_at = clock_timestamp(), mail_due_at = NULL, mail_error = NULL"
        " WHERE id = %s AND mail_attempt = %s",
        (mail.link_id, mail.attempt),
    )
    await ring(conn)


async def mark_mail_later(conn: Connection, mail: Mail, *, wait_s: float, error: str) -> None:
    """Not taken, or perhaps taken: try again after `wait_s`."""
    await conn.execute(
        "UPDATE links SET mail_due_at = clock_timestamp() + %s * interval '1 second', mail_error = %s"
        " WHERE id = %s AND mail_attempt = %s",
        (wait_s, error, mail.link_id, mail.attempt),
    )


async def mark_mail_failed(conn: Connection, mail: Mail, error: str) -> None:
    """It cannot be delivered, which is an alarm: the link stays good, but somebody must bring it."""
    async with conn.transaction():
        ours = await conn.execute(
            "UPDATE links SET mail_due_at = NULL, mail_error = %s WHERE id = %s AND mail_attempt = %s",
            (error, mail.link_id, mail.attempt),
        )
        if ours.rowcount:
            await raise_alarm(conn, mail.thread_id)


async def failed_mails(conn: Connection, *, most: int) -> list[FailedMail]:
    """Those that failed, of the `most` oldest requests that wait. By index, however many links there are."""
    rows = await conn.execute(
        "SELECT a.thread_id, l.address, l.error FROM (SELECT * FROM approvals WHERE status = 'pending'"
        " ORDER BY requested_at, interrupt_id DESC LIMIT %s) a"
        # With an OFFSET it cannot become a join of two whole tables.
        " CROSS JOIN LATERAL (SELECT substr(l.person, 6) AS address, l.mail_error AS error FROM links l"
        f" WHERE l.interrupt_id = a.interrupt_id AND {_FAILED} ORDER BY l.id OFFSET 0) l",
        (most,),
    )
    return [FailedMail(**row) for row in await rows.fetchall()]


async def retry_mails(conn: Connection) -> int:
    """Make every mail that failed, and whose link is still good for something, due again; how many."""
    rows = await conn.execute(
        "UPDATE links l SET mail_due_at = clock_timestamp() FROM approvals a WHERE a.interrupt_id = l.interrupt_id"
        f" AND {_FAILED}"
    )
    return rows.rowcount
