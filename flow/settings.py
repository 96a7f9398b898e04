"""Every setting, read once at the start of a command: from the environment, then from `.env`.

A missing or wrong setting is a SettingError that names the setting and the fix.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Literal, Self

from pydantic import Field, SecretStr, ValidationError, field_validator, model_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from flow.errors import SettingError


class Settings(BaseSettings):
    """The field names in capitals are the environment's names; the README has the table."""

    model_config = SettingsConfigDict(
        env_file=".env", env_file_encoding="utf-8", env_ignore_empty=True, extra="ignore", hide_input_in_errors=True
    )

    database_url: SecretStr | None = None
    claim_flow_home: Path = Path(".claim_flow")

    approvers: str = ""

    slack_bot_token: SecretStr | None = None
    # One of the two: signed HTTP requests, or Socket Mode.
    slack_signing_secret: SecretStr | None = None
    slack_app_token: SecretStr | None = None
    slack_channel: str | None = None
    # Where the operators are told of threads that need them; unset: in SLACK_CHANNEL.
    slack_ops_channel: str | None = None
    slack_api_url: str = "https://slack.com/api/"

    # The model that advises on claims. An explicit base URL wins; else OpenRouter's for its key, else OpenAI's.
    openrouter_api_key: SecretStr | None = None
    openai_api_key: SecretStr | None = None
    openai_base_url: str | None = None
    model: str | None = None

    # Who moves the money; `ledger` is a row in our own database.
    payment_provider: Literal["ledger", "http", "stripe"] = "ledger"
    payment_url: str | None = None
    payment_token: SecretStr | None = None
    payment_lookup_url: str | None = None
    payment_timeout: float = Field(default=20.0, gt=0, allow_inf_nan=False)
    # How long the payment service remembers an Idempotency-Key, in seconds; 0 if it does not.
    payment_key_lifetime: float = Field(default=86_400.0, ge=0, allow_inf_nan=False)

    stripe_api_key: SecretStr | None = None
    # Who is charged, and how.
    stripe_customer: str | None = None
    stripe_payment_method: str | None = None
    stripe_api_base: str | None = None

    host: str = "127.0.0.1"
    port: int = Field(default=4000, ge=0, le=65535)
    # Where `work`, which has no pages, answers /healthz and /readyz; unset: nowhere.
    health_port: int | None = Field(default=None, ge=0, le=65535)

    # How long one drive may take before its process is killed and the thread is taken over.
    drive_timeout: float = Field(default=120.0, gt=0, allow_inf_nan=False)
    # Fresh processes that wait for a thread, and so the most drives at a time; each with a connection and about 80 MB.
    stand_by: int = Field(default=4, ge=1, le=64)

    @field_validator("slack_api_url")
    @classmethod
    def _ends_with_a_slash(cls, url: str) -> str:
        return url if url.endswith("/") else url + "/"

    @field_validator("slack_channel", "slack_ops_channel")
    @classmethod
    def _is_a_channel_id(cls, channel: str | None) -> str | None:
        if channel is not None and not re.fullmatch(r"[CGD][A-Z0-9]{2,}", channel):
            raise ValueError("give the channel's id (C…), not its name: a name can change hands")
        return channel

    @field_validator("approvers")
    @classmethod
    def _names_people(cls, approvers: str) -> str:
        for name in _split(approvers):
            if not re.fullmatch(r"[UW][A-Z0-9]{2,}|slack:[TE][A-Z0-9]{2,}/[UW][A-Z0-9]{2,}", name):
                raise ValueError(f"{name!r} is not a Slack member id: write U01ALICE or slack:T01TEAM/U01ALICE")
        return approvers

    @model_validator(mode="after")
    def _slack_is_whole_or_off(self) -> Self:
        given = {
            "SLACK_BOT_TOKEN": self.slack_bot_token,
            "SLACK_CHANNEL": self.slack_channel,
            "SLACK_SIGNING_SECRET (or SLACK_APP_TOKEN for Socket Mode)": self.slack_signing_secret
            or self.slack_app_token,
        }
        missing = [name for name, value in given.items() if not value]
        if 0 < len(missing) < len(given):
            raise ValueError(f"{' and '.join(missing)} not set: Slack needs them all, or none")
        return self

    @property
    def slack_is_on(self) -> bool:
        return self.slack_bot_token is not None

    @property
    def approver_names(self) -> tuple[str, ...]:
        return tuple(_split(self.approvers))


def read_settings() -> Settings:
    """The settings of this process. Raises SettingError."""
    try:
        return Settings()
    except ValidationError as exc:
        raise SettingError("\n".join(_explained(dict(error)) for error in exc.errors())) from exc
    except UnicodeDecodeError as exc:
        raise SettingError(f".env is not UTF-8 text: {exc}") from exc


def _split(names: str) -> list[str]:
    return [name for part in names.split(",") if (name := part.strip())]


def _explained(error: dict[str, object]) -> str:
    place = error["loc"]
    assert isinstance(place, tuple)
    message = str(error["msg"]).removeprefix("Value error, ")
    where = f"{str(place[0]).upper()}: " if place else ""
    return f"{where}{message} (in the environment or .env; see .env.example)"
