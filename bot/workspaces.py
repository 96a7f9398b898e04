"""Many workspaces in one process: for each a client with its own token, and whatever is made around that.

It is made when it is first needed, and made anew when the workspace's row has changed: so whoever installs the app
anew, uninstalls it or is set up otherwise is served accordingly by every process at its next request.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

import aiohttp
from slack_sdk.errors import SlackApiError
from slack_sdk.web.async_client import AsyncWebClient

from bot.outlet import Outlet
from bot.slack_api import DEAD_TOKEN, client_with, read_error, slack_session
from flow.cipher import Cipher
from flow.database import Connection
from flow.errors import SettingError, WorkspaceClosed
from flow.model import Notice
from flow.settings import Settings
from flow.workspaces import Workspace, workspace_of_thread, workspaces

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Clients:
    """Makes a workspace's client, over connections that all of them share."""

    cipher: Cipher
    session: aiohttp.ClientSession
    api_url: str

    @classmethod
    @contextlib.asynccontextmanager
    async def of(cls, settings: Settings) -> AsyncIterator[Clients]:
        """Raises SettingError."""
        cipher = Cipher.of(settings)
        async with slack_session() as session:
            yield cls(cipher=cipher, session=session, api_url=settings.slack_api_url)

    def client(self, row: Workspace) -> AsyncWebClient:
        """Raises WorkspaceClosed, TokenUnreadable."""
        if row.token is None:
            raise WorkspaceClosed(
                row.workspace, "has uninstalled the app: nothing is posted there until it is installed again"
            )
        return client_with(self.cipher.decrypt(row.workspace, row.token), self.session, api_url=self.api_url)


async def check_keys(conn: Connection, cipher: Cipher) -> None:
    """Raise TokenUnreadable for the first workspace whose token TOKEN_KEYS do not open, before anybody relies on it."""
    for row in await workspaces(conn):
        if row.token is not None:
            cipher.decrypt(row.workspace, row.token)


async def revoke(settings: Settings, row: Workspace) -> str | None:
    """Have Slack take a workspace's token no more; why it does not know of that, or None."""
    try:
        async with Clients.of(settings) as clients:
            await clients.client(row).auth_revoke()
    except SlackApiError as exc:
        error = read_error(exc)[1]
        return None if error in DEAD_TOKEN else error or "it failed"
    except (SettingError, aiohttp.ClientError, TimeoutError, OSError) as exc:
        return f"{type(exc).__name__}: {exc}"
    return None


class Kept(Generic[T]):
    """What is made of a workspace's row, for as long as the row stays as it is."""

    def __init__(self, make: Callable[[Workspace], T]) -> None:
        self._make = make
        self._made: dict[str, tuple[Workspace, T]] = {}

    def of(self, row: Workspace) -> T:
        """Raises whatever making it raises."""
        known = self._made.get(row.workspace)
        if known is None or known[0] != row:
            # Whatever was there is of no more use, also if there is nothing in its place.
            self._made.pop(row.workspace, None)
            known = self._made[row.workspace] = (row, self._make(row))
        return known[1]


class ManyOutlets:
    """The outlet of each workspace, for whoever delivers."""

    def __init__(self, clients: Clients, *, public_url: str | None) -> None:
        self._clients, self._public_url = clients, public_url
        self._kept = Kept(self._outlet)

    @classmethod
    @contextlib.asynccontextmanager
    async def of_settings(cls, settings: Settings) -> AsyncIterator[ManyOutlets]:
        """Raises SettingError."""
        async with Clients.of(settings) as clients:
            yield cls(clients, public_url=settings.public_url)

    async def of(self, conn: Connection, notice: Notice) -> Outlet:
        """That of the notice's thread. Raises WorkspaceClosed, TokenUnreadable."""
        row = await workspace_of_thread(conn, notice.thread_id)
        if row is None:
            raise WorkspaceClosed(
                "(none)", "is no place to post to: the thread is from before there were several, decide it elsewhere"
            )
        if row.is_installed and row.channel is None and not (notice.kind == "alarm" and row.ops_channel):
            raise WorkspaceClosed(
                row.workspace,
                f"has no channel: say which with `claim_flow.py workspaces set {row.workspace} --channel C…`",
            )
        return self._kept.of(row)

    def _outlet(self, row: Workspace) -> Outlet:
        client, channel = self._clients.client(row), row.channel or row.ops_channel
        assert channel is not None
        return Outlet(client, channel, ops_channel=row.ops_channel, public_url=self._public_url, row=row)
