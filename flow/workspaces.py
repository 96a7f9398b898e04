"""Many workspaces of Slack on one installation, each with a bot token, a channel and a policy of its own.

Whatever is started in one is posted, decided and seen there alone. With one token, in the settings, there are none:
every `workspace` is None then, and nothing here is asked for.

Slack's word makes a row (`installed`) and takes its token (`uninstalled`); what is decided there by whom is an
operator's (`set_up`). Until then nothing is filed or paid there. A row stays, with what was set up, for a next time.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Any

from psycopg import sql

from flow.audit import AuditKind, door_of, record
from flow.cipher import Cipher
from flow.database import Connection, Page, ring
from flow.errors import BadInput, SettingError, UnknownWorkspace, WorkspaceClosed
from flow.model import Person
from flow.policy import NOBODY, Policy, is_group, parse_policy
from flow.settings import names_in
from flow.text import digest, visible

log = logging.getLogger(__name__)

_COLUMNS = sql.SQL(
    "workspace, name, token, installed_by, installed_at, uninstalled_at, channel, ops_channel, policy, filers"
)


def reaches(person: Person, workspace: str | None) -> bool:
    """Whether somebody may at all see or decide what was started in this workspace.

    Members of Slack reach their own alone, and so does a token of the API that was made for one. Whoever is of none
    (an address, the sender of a webhook, the command line) is named by the lists of any.
    """
    if person.key.startswith("slack:"):
        return person.workspace == workspace
    return person.workspace in (None, workspace)


def reached(person: Person) -> Page:
    """The same in SQL, of rows that have a `workspace`."""
    everything = sql.SQL("workspace IS NULL" if person.key.startswith("slack:") else "true")
    return of_workspace(person.workspace) or Page(where=everything, values={})


def of_workspace(workspace: str | None) -> Page | None:
    """The rows of this one alone; None: of all."""
    return Page(where=sql.SQL("workspace = %(workspace)s"), values={"workspace": workspace}) if workspace else None


def workspace_meant(workspace: str | None, *, many: bool) -> str | None:
    """The one of several that somebody names; None where there is one, in the settings.

    Raises BadInput unless it is named where there are many, and only there.
    """
    if not many:
        if workspace is not None:
            raise BadInput("workspace", workspace, "there is one here, that of SLACK_BOT_TOKEN: leave it out")
        return None
    if workspace is None:
        raise BadInput("workspace", "", "there are many here: say which, as `claim_flow.py workspaces list` has them")
    return workspace


@dataclass(frozen=True, kw_only=True)
class Workspace:
    """A workspace, or a whole Enterprise Grid, that the app was installed in.

    `token` is encrypted (see flow.cipher), and None once the app is not installed there any more.
    """

    workspace: str
    name: str
    token: str | None = field(repr=False)
    installed_by: str
    installed_at: datetime
    uninstalled_at: datetime | None
    channel: str | None
    ops_channel: str | None
    policy: str | None
    filers: str

    @property
    def is_installed(self) -> bool:
        return self.token is not None

    def in_words(self) -> str:
        """A line for whoever runs this."""
        since = self.uninstalled_at or self.installed_at
        state = f"{'installed' if self.is_installed else 'uninstalled'} since {since.astimezone():%Y-%m-%d %H:%M %Z}"
        alarms = f", alarms in {self.ops_channel}" if self.ops_channel else ""
        where = f"posts in {self.channel}{alarms}" if self.channel else "no channel"
        rules = "; ".join(self.rules.words) if self.policy is not None else "no policy: nothing is filed there"
        filers = f"; filed by {self.filers}" if self.filers else ""
        return visible(f"{self.workspace} ({self.name}): {state}; {where}; {rules}{filers}")

    def as_json(self) -> dict[str, Any]:
        """The object that `--json` prints."""
        return {
            "workspace": self.workspace,
            "name": self.name,
            "installed": self.is_installed,
            "installed_by": self.installed_by,
            "installed_at": self.installed_at.isoformat(),
            "uninstalled_at": self.uninstalled_at and self.uninstalled_at.isoformat(),
            "channel": self.channel,
            "ops_channel": self.ops_channel,
            "filers": self.filers,
            "tiers": None if self.policy is None else list(self.rules.words),
        }

    @property
    def closed(self) -> str:
        """Why nothing is filed there; empty if something may be."""
        if not self.is_installed:
            return "has uninstalled the app: nothing is filed there until it is installed again"
        if self.policy is None:
            return (
                "is not set up yet, so nothing is filed there: whoever runs this says who approves what with"
                f" `claim_flow.py workspaces set {self.workspace} --policy FILE`"
            )
        return ""

    @property
    def rules(self) -> Policy:
        """Who must approve what there: nobody may, and nothing is paid unasked, where nobody has said so, or it cannot
        be read."""
        if self.policy is None:
            return NOBODY
        try:
            return parse_policy(self.policy, named=f"the policy of workspace {self.workspace}")
        except SettingError as exc:
            log.error("nobody is asked there: %s", exc)  # noqa: TRY400 (no bug of ours)
            return NOBODY


async def workspace_of(conn: Connection, workspace: str) -> Workspace:
    """The workspace with this id. Raises UnknownWorkspace."""
    query = sql.SQL("SELECT {} FROM workspaces WHERE workspace = %s").format(_COLUMNS)
    row = await (await conn.execute(query, (workspace,))).fetchone()
    if row is None:
        raise UnknownWorkspace(workspace)
    return Workspace(**row)


async def workspace_of_thread(conn: Connection, thread_id: str) -> Workspace | None:
    """The one that the thread was started in; None for a thread of none."""
    columns = sql.SQL(", ").join([sql.SQL("w.") + sql.Identifier(each) for each in Workspace.__dataclass_fields__])
    query = sql.SQL("SELECT {} FROM threads t JOIN workspaces w USING (workspace) WHERE t.thread_id = %s")
    row = await (await conn.execute(query.format(columns), (thread_id,))).fetchone()
    return Workspace(**row) if row else None


async def workspaces(conn: Connection) -> Sequence[Workspace]:
    """All that the app was ever installed in."""
    rows = await conn.execute(sql.SQL("SELECT {} FROM workspaces ORDER BY workspace").format(_COLUMNS))
    return [Workspace(**row) for row in await rows.fetchall()]


async def check_open(conn: Connection, workspace: str) -> None:
    """Pass if something may be filed there. Raises UnknownWorkspace, WorkspaceClosed."""
    row = await workspace_of(conn, workspace)
    if row.closed:
        raise WorkspaceClosed(workspace, row.closed)


async def policy_in(conn: Connection, workspace: str | None, otherwise: Policy) -> Policy:
    """Who must approve what there; `otherwise` for what is of no workspace."""
    return otherwise if workspace is None else (await workspace_of(conn, workspace)).rules


async def installed(conn: Connection, workspace: str, *, name: str, token: str, by: str) -> Workspace:
    """Keep the token, which is encrypted, and whatever was set up there before. In a transaction of its own."""
    async with conn.transaction():
        await conn.execute(
            "INSERT INTO workspaces (workspace, name, token, installed_by) VALUES (%s, %s, %s, %s)"
            " ON CONFLICT (workspace) DO UPDATE SET name = EXCLUDED.name, token = EXCLUDED.token,"
            " installed_by = EXCLUDED.installed_by, installed_at = clock_timestamp(), uninstalled_at = NULL",
            (workspace, name, token, by),
        )
        await _tell_what_was_refused(conn, workspace)
        await _record(conn, "workspace.installed", workspace, by=by, name=name)
        return await workspace_of(conn, workspace)


async def uninstalled(conn: Connection, row: Workspace, *, by: str) -> bool:
    """Drop the token of this installation, and of no later one; whether it was there. In a transaction of its own."""
    async with conn.transaction():
        dropped = await conn.execute(
            "UPDATE workspaces SET token = NULL, uninstalled_at = clock_timestamp()"
            " WHERE workspace = %s AND installed_at = %s AND token IS NOT NULL",
            (row.workspace, row.installed_at),
        )
        if dropped.rowcount:
            await _record(conn, "workspace.uninstalled", row.workspace, by=by)
        return bool(dropped.rowcount)


async def removed(conn: Connection, row: Workspace, *, by: str) -> None:
    """An operator wants nothing of it any more, in one transaction: its token, its policy, its tokens of the API and
    its members' sessions are gone. Whoever installs the app there again finds it not set up."""
    async with conn.transaction():
        await uninstalled(conn, row, by=by)
        await set_up(conn, row.workspace, by=by, policy="")
        revoked = await conn.execute(
            "UPDATE api_tokens SET revoked_at = clock_timestamp() WHERE workspace = %s AND revoked_at IS NULL"
            " RETURNING name",
            (row.workspace,),
        )
        for each in await revoked.fetchall():
            await record(conn, "token.revoked", who=by, door=door_of(by), for_whom=f"api:{each['name']}")
        for table in ("sessions", "login_links"):
            query = sql.SQL("DELETE FROM {} WHERE workspace = %s").format(sql.Identifier(table))
            await conn.execute(query, (row.workspace,))


async def set_up(
    conn: Connection,
    workspace: str,
    *,
    by: str,
    channel: str | None = None,
    ops_channel: str | None = None,
    policy: str | None = None,
    filers: str | None = None,
) -> Workspace:
    """Say what is to be there, in a transaction of its own; None leaves it as it is, an empty text unsets it.

    What was refused for want of a channel is due again. Raises UnknownWorkspace, and SettingError for a policy that
    says nothing, or names user groups of a whole grid.
    """

    def said(text: str | None, before: str | None) -> str | None:
        return before if text is None else text or None

    async with conn.transaction():
        await conn.execute("SELECT FROM workspaces WHERE workspace = %s FOR UPDATE", (workspace,))
        row = await workspace_of(conn, workspace)
        new = replace(
            row,
            channel=said(channel, row.channel),
            ops_channel=said(ops_channel, row.ops_channel),
            policy=said(policy, row.policy),
            filers=row.filers if filers is None else filers,
        )
        words = parse_policy(new.policy, named="the policy").words if new.policy is not None else ()
        _check_groups(new)
        await conn.execute(
            "UPDATE workspaces SET channel = %s, ops_channel = %s, policy = %s, filers = %s WHERE workspace = %s",
            (new.channel, new.ops_channel, new.policy, new.filers, workspace),
        )
        await _tell_what_was_refused(conn, workspace)
        data = {"channel": new.channel, "ops_channel": new.ops_channel, "filers": new.filers, "tiers": list(words)}
        sha256 = None if new.policy is None else digest(new.policy)
        await _record(conn, "workspace.set_up", workspace, by=by, sha256=sha256, **data)
        return new


def _check_groups(row: Workspace) -> None:
    """Refuse what would name nobody: for a whole grid Slack lists user groups by team alone.

    https://docs.slack.dev/reference/methods/usergroups.list
    """
    tiers = [row.rules.tier(name) for name in row.rules.names]
    named = [*names_in(row.filers), *(name for tier in tiers for name in (*tier.approvers, *tier.escalate_to))]
    if row.workspace.startswith("E") and (groups := [name for name in named if is_group(name)]):
        raise SettingError(f"{groups[0]}: of a whole grid Slack does not say who is in a user group: list member ids")


async def rotate(conn: Connection, cipher: Cipher, *, by: str) -> int:
    """Encrypt every token anew, with the first key, in a transaction of its own; how many. Raises TokenUnreadable."""
    async with conn.transaction():
        rows = await conn.execute("SELECT workspace, token FROM workspaces WHERE token IS NOT NULL FOR UPDATE")
        found = await rows.fetchall()
        for row in found:
            name = row["workspace"]
            encrypted = cipher.encrypt(name, cipher.decrypt(name, row["token"]))
            await conn.execute("UPDATE workspaces SET token = %s WHERE workspace = %s", (encrypted, name))
        await record(conn, "workspaces.rotated", who=by, door=door_of(by), data={"count": len(found)})
        return len(found)


async def use_state(conn: Connection, sha256: bytes, *, good_for_s: float) -> bool:
    """Spend the state of an installation, in a transaction of its own. False if it was spent before."""
    async with conn.transaction():
        await conn.execute(
            "DELETE FROM install_states WHERE used_at < clock_timestamp() - %s * interval '1 second'", (good_for_s,)
        )
        spent = await conn.execute("INSERT INTO install_states (sha256) VALUES (%s) ON CONFLICT DO NOTHING", (sha256,))
        return spent.rowcount == 1


async def _tell_what_was_refused(conn: Connection, workspace: str) -> None:
    """What could not be posted there is due again: what was missing may be there now."""
    await conn.execute(
        "UPDATE notices n SET status = 'pending', due_at = clock_timestamp() WHERE status = 'failed'"
        " AND EXISTS (SELECT FROM threads t WHERE t.thread_id = n.thread_id AND t.workspace = %s)",
        (workspace,),
    )
    await ring(conn)


async def _record(conn: Connection, kind: AuditKind, workspace: str, *, by: str, **data: object) -> None:
    await record(conn, kind, who=by, door=door_of(by), data={"workspace": workspace, **data})
