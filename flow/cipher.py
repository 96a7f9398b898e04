"""The tokens of workspaces at rest: encrypted and authenticated by Fernet, with TOKEN_KEYS. Nothing else knows how.

A token is sealed with the name of its workspace, so that one that is copied into another row opens nowhere.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from flow.errors import SettingError, TokenUnreadable
from flow.settings import Settings

if TYPE_CHECKING:
    from cryptography.fernet import MultiFernet


class Cipher:
    """Encrypts with the first key, and opens with any."""

    def __init__(self, fernet: MultiFernet) -> None:
        self._fernet = fernet

    @classmethod
    def of(cls, settings: Settings) -> Cipher:
        """That of TOKEN_KEYS. Raises SettingError."""
        if not settings.token_key_list:
            raise SettingError(
                "TOKEN_KEYS is not set: the tokens of workspaces are encrypted with it (see .env.example)"
            )
        try:
            from cryptography.fernet import Fernet, MultiFernet
        except ModuleNotFoundError as exc:
            raise SettingError(
                "TOKEN_KEYS needs the extra `workspaces`: `uv sync --extra workspaces`, or pip install cryptography"
            ) from exc
        return cls(MultiFernet([Fernet(key) for key in settings.token_key_list]))

    def encrypt(self, workspace: str, token: str) -> str:
        """What may be kept of this workspace's token."""
        return self._fernet.encrypt(f"{workspace} {token}".encode()).decode()

    def decrypt(self, workspace: str, encrypted: str) -> str:
        """The token again. Raises TokenUnreadable."""
        from cryptography.fernet import InvalidToken

        try:
            of, _, token = self._fernet.decrypt(encrypted.encode()).decode().partition(" ")
        except InvalidToken as exc:
            raise TokenUnreadable(workspace) from exc
        if of != workspace:
            raise TokenUnreadable(workspace)
        return token
