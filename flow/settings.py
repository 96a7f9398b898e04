"""Every setting, read once at the start of a command: from the environment, then from `.env`.

A missing or wrong setting is a SettingError that names the setting and the fix.
"""

from __future__ import annotations

import base64
import os
import re
from decimal import Decimal
from pathlib import Path
from typing import Literal, Self
from urllib.parse import unquote, urlsplit

from pydantic import Field, SecretStr, ValidationError, field_validator, model_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from flow.errors import SettingError
from flow.text import ADDRESS


class Settings(BaseSettings):
    """The field names in capitals are the environment's names; the README has the table."""

    model_config = SettingsConfigDict(
        env_file=".env", env_file_encoding="utf-8", env_ignore_empty=True, extra="ignore", hide_input_in_errors=True
    )

    database_url: SecretStr | None = None
    claim_flow_home: Path = Path(".claim_flow")

    # Modules whose flows can be started.
    flows: str = "flow.claims,flow.patterns"

    # Who must approve what. Unset: policy.toml, if there is one, else one tier of APPROVERS.
    policy_file: Path | None = None
    approvers: str = ""
    # Who may file claims in Slack. Unset: every full member of the team.
    filers: str = ""

    slack_bot_token: SecretStr | None = None
    # One of the two: signed HTTP requests, or Socket Mode.
    slack_signing_secret: SecretStr | None = None
    slack_app_token: SecretStr | None = None
    slack_channel: str | None = None
    # Where the operators are told of threads that need them; unset: in SLACK_CHANNEL.
    slack_ops_channel: str | None = None
    slack_api_url: str = "https://slack.com/api/"
    # Many workspaces in the place of the one of SLACK_BOT_TOKEN: what their tokens are encrypted with. The first of
    # them encrypts, all of them open.
    token_keys: SecretStr | None = None

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

    # External approvers: `acme=whsec_…,acme=whsec_old…` (a name repeated is a rotation), and who each may speak for.
    webhook_secrets: SecretStr | None = None
    webhook_approvers: str = ""

    # Where events are sent, `acme=https://…,ops=https://…`, and the secrets that sign them (repeated: a rotation).
    webhook_urls: SecretStr | None = None
    webhook_signing_secrets: SecretStr | None = None
    # For development: http, and addresses that are not public.
    webhook_allow_private: bool = False
    # Where people's browsers reach the pages. Unset: only this machine's do.
    public_url: str | None = None
    # Who sees every approval in the inbox, beside those that name them.
    inbox_viewers: str = ""
    # Sign in with Slack.
    slack_client_id: str | None = None
    slack_client_secret: SecretStr | None = None
    # Mails with links to approvers by address.
    smtp_url: SecretStr | None = None
    mail_from: str | None = None
    # Above this amount, in the claim's own currency, a link alone does not decide.
    step_up_over: Decimal | None = Field(default=None, ge=0, allow_inf_nan=False)

    host: str = "127.0.0.1"
    port: int = Field(default=4000, ge=0, le=65535)
    # Where `work`, which has no pages, answers /healthz and /readyz; unset: nowhere.
    health_port: int | None = Field(default=None, ge=0, le=65535)
    # Who may read /metrics, on either port; unset: nobody.
    metrics_token: SecretStr | None = Field(default=None, min_length=16)
    log_format: Literal["auto", "json", "text"] = "auto"

    # Where traces go besides our own tables: by OTLP, under OpenTelemetry's own names, and to Langfuse.
    otel_exporter_otlp_endpoint: str | None = None
    # The whole URL, where it does not end with /v1/traces.
    otel_exporter_otlp_traces_endpoint: str | None = None
    otel_exporter_otlp_headers: SecretStr | None = None
    otel_service_name: str = "claim-flow"
    otel_resource_attributes: str = ""
    langfuse_public_key: str | None = None
    langfuse_secret_key: SecretStr | None = None
    # The same by its old name and its new one, which wins. Unset: Langfuse's own cloud, in Europe.
    langfuse_host: str | None = None
    langfuse_base_url: str | None = None

    # How long one drive may take before its process is killed and the thread is taken over.
    drive_timeout: float = Field(default=120.0, gt=0, allow_inf_nan=False)
    # Fresh processes that wait for a thread, and so the most drives at a time; each with a connection and about 80 MB.
    stand_by: int = Field(default=4, ge=1, le=64)

    # How long what only the run of a thread needed is kept after its end, and events after all have them.
    checkpoint_retention: str = "7 days"
    event_retention: str = "30 days"
    span_retention: str = "30 days"

    # Whether traces are recorded, and whether they keep what models are asked and answer.
    spans: bool = True
    trace_content: bool = False

    @field_validator("slack_api_url")
    @classmethod
    def _ends_with_a_slash(cls, url: str) -> str:
        return url if url.endswith("/") else url + "/"

    @field_validator("slack_channel", "slack_ops_channel")
    @classmethod
    def _is_a_channel_id(cls, channel: str | None) -> str | None:
        return channel if channel is None else channel_id(channel)

    @field_validator("checkpoint_retention", "event_retention", "span_retention")
    @classmethod
    def _is_a_time_or_never(cls, text: str) -> str:
        _kept_s(text)
        return text

    @field_validator("flows")
    @classmethod
    def _are_modules(cls, modules: str) -> str:
        for module in _split(modules):
            if not all(part.isidentifier() for part in module.split(".")):
                raise ValueError(f"{module!r} is no module: write flow.claims,myteam.refunds")
        return modules

    @field_validator("token_keys")
    @classmethod
    def _are_keys(cls, given: SecretStr | None) -> SecretStr | None:
        keys = _split(given.get_secret_value()) if given else []
        if given is not None and not (keys and all(map(_is_key, keys))):
            raise ValueError(f"write keys of 32 random bytes in URL-safe base64, separated by commas: {_MAKE_A_KEY}")
        return given

    @field_validator("approvers")
    @classmethod
    def _names_people(cls, approvers: str) -> str:
        for name in _split(approvers):
            approver_name(name)
        return approvers

    @field_validator("filers")
    @classmethod
    def _names_filers(cls, filers: str) -> str:
        return filers_in(filers)

    @field_validator("inbox_viewers")
    @classmethod
    def _names_viewers(cls, viewers: str) -> str:
        for name in _split(viewers):
            if not _VIEWER.fullmatch(name):
                raise ValueError(
                    f"{name!r} names nobody: write U01ALICE or slack:T01TEAM/U01ALICE (Slack member ids),"
                    " alice@example.com, or cli:USER"
                )
        return viewers

    @field_validator("public_url")
    @classmethod
    def _is_an_origin(cls, url: str | None) -> str | None:
        if url is None:
            return None
        try:
            parts = urlsplit(url)
            safe = parts.scheme == "https" or (parts.scheme == "http" and parts.hostname in LOOPBACK)
            whole = parts.hostname and not (parts.path.strip("/") or parts.query or parts.fragment or parts.username)
            port = parts.port
        except ValueError:
            safe = whole = False
        if not safe or not whole:
            raise ValueError("write https://claims.example.com, with no path; http only on 127.0.0.1 or localhost")
        # As browsers write it in `Origin`.
        host = f"[{parts.hostname}]" if ":" in str(parts.hostname) else str(parts.hostname)
        named = port is not None and port != {"https": 443, "http": 80}[parts.scheme]
        return f"{parts.scheme}://{host}" + (f":{port}" if named else "")

    @field_validator("smtp_url")
    @classmethod
    def _is_a_mail_server(cls, given: SecretStr | None) -> SecretStr | None:
        parts = urlsplit(given.get_secret_value()) if given else None
        if parts is not None and (parts.scheme not in ("smtp", "smtps") or not parts.hostname):
            raise ValueError("write smtp://user:password@host:587, or smtps://… for TLS from the first byte")
        return given

    @field_validator("mail_from")
    @classmethod
    def _is_an_address(cls, address: str | None) -> str | None:
        if address is not None and not ADDRESS.fullmatch(address):
            raise ValueError("write an address, such as claims@example.com")
        return address

    @field_validator("webhook_secrets", "webhook_signing_secrets")
    @classmethod
    def _are_secrets(cls, given: SecretStr | None) -> SecretStr | None:
        names: dict[str, str] = {}
        for name, secret in _pairs(given.get_secret_value() if given else ""):
            if not _ENDPOINT.fullmatch(name) or not secret.startswith("whsec_") or not _is_long_base64(secret[6:]):
                raise ValueError(
                    "write ENDPOINT=whsec_… pairs, separated by commas; a secret is base64 of 24 to 64 random bytes"
                )
            if names.setdefault(secret, name) != name:
                raise ValueError(f"{names[secret]} and {name} share a secret: then each could speak for the other")
        return given

    @field_validator("webhook_approvers")
    @classmethod
    def _are_endpoints_people(cls, given: str) -> str:
        for endpoint, name in _pairs(given):
            if not _ENDPOINT.fullmatch(endpoint) or not _ENDPOINTS_PERSON.fullmatch(name):
                raise ValueError("write ENDPOINT=NAME pairs, separated by commas: acme=carol,acme=dave")
        return given

    @field_validator("webhook_urls")
    @classmethod
    def _are_urls(cls, given: SecretStr | None) -> SecretStr | None:
        names = set()
        for name, url in _pairs(given.get_secret_value() if given else ""):
            if not _ENDPOINT.fullmatch(name) or not _is_url(url):
                raise ValueError("write ENDPOINT=https://… pairs, separated by commas (a comma in a URL as %2C)")
            if name in names:
                raise ValueError(f"{name} comes twice: give each URL a name of its own")
            names.add(name)
        return given

    @model_validator(mode="after")
    def _outgoing_webhooks_are_whole(self) -> Self:
        urls, secrets = self.webhook_url_of, self.webhook_signing_secret_lists
        if missing := sorted(set(urls) - set(secrets)):
            raise ValueError(f"WEBHOOK_SIGNING_SECRETS has no secret for {', '.join(missing)}")
        if missing := sorted(set(secrets) - set(urls)):
            raise ValueError(f"WEBHOOK_URLS has no URL for {', '.join(missing)}")
        plain = [name for name, url in urls.items() if not url.startswith("https://")]
        if plain and not self.webhook_allow_private:
            raise ValueError(f"WEBHOOK_URLS: {plain[0]} is not https (for development: WEBHOOK_ALLOW_PRIVATE=true)")
        return self

    @field_validator(
        "otel_exporter_otlp_endpoint", "otel_exporter_otlp_traces_endpoint", "langfuse_host", "langfuse_base_url"
    )
    @classmethod
    def _is_where_traces_go(cls, url: str | None) -> str | None:
        if url is not None and not _is_url(url):
            raise ValueError("write http://collector.internal:4318 or https://…; a password belongs into the headers")
        return url

    @field_validator("otel_exporter_otlp_headers")
    @classmethod
    def _are_headers(cls, given: SecretStr | None) -> SecretStr | None:
        for name, value in _decoded_pairs(given.get_secret_value() if given else "").items():
            if not _HEADER.fullmatch(name) or not re.fullmatch(r"[\x20-\x7e]+", value):
                raise ValueError("write NAME=VALUE pairs, separated by commas: authorization=Bearer%20abc,x-a=b")
        return given

    @field_validator("otel_resource_attributes")
    @classmethod
    def _are_attributes(cls, given: str) -> str:
        if not all(name and value for name, value in _decoded_pairs(given).items()):
            raise ValueError("write NAME=VALUE pairs, separated by commas: deployment.environment.name=production")
        return given

    @model_validator(mode="after")
    def _traces_go_out_or_stay(self) -> Self:
        if self.otel_exporter_otlp_headers and not self.otlp_url:
            raise ValueError("OTEL_EXPORTER_OTLP_ENDPOINT is not set: OTEL_EXPORTER_OTLP_HEADERS are for nobody")
        keys = {"LANGFUSE_PUBLIC_KEY": self.langfuse_public_key, "LANGFUSE_SECRET_KEY": self.langfuse_secret_key}
        missing = [name for name, value in keys.items() if not value]
        if missing and (len(missing) < len(keys) or self.langfuse_host or self.langfuse_base_url):
            raise ValueError(f"{' and '.join(missing)} not set: Langfuse needs both keys, or none of its settings")
        return self

    @model_validator(mode="after")
    def _slack_is_whole_or_off(self) -> Self:
        if self.many_workspaces:
            self._check_many()
            return self
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

    def _check_many(self) -> None:
        needed = {
            "SLACK_CLIENT_ID": self.slack_client_id,
            "SLACK_CLIENT_SECRET": self.slack_client_secret,
            "SLACK_SIGNING_SECRET": self.slack_signing_secret,
            "PUBLIC_URL": self.public_url,
        }
        if missing := [name for name, value in needed.items() if not value]:
            raise ValueError(f"{' and '.join(missing)} not set: many workspaces (TOKEN_KEYS) need them all")
        of_one = {
            "SLACK_BOT_TOKEN": self.slack_bot_token,
            "SLACK_CHANNEL": self.slack_channel,
            "SLACK_OPS_CHANNEL": self.slack_ops_channel,
            "SLACK_APP_TOKEN": self.slack_app_token,
            "APPROVERS": self.approvers,
            "FILERS": self.filers,
        }
        if ambiguous := [name for name, value in of_one.items() if value]:
            raise ValueError(
                f"TOKEN_KEYS is for many workspaces, {' and '.join(ambiguous)} for one: unset it, and say so for each"
                " workspace with `claim_flow.py workspaces set`"
            )
        if bare := [name for name in _split(self.inbox_viewers) if re.fullmatch(r"[UW][A-Z0-9]+", name)]:
            raise ValueError(f"INBOX_VIEWERS: with many workspaces {bare[0]} is nobody: write slack:T01TEAM/{bare[0]}")

    @model_validator(mode="after")
    def _pages_are_whole(self) -> Self:
        if bool(self.slack_client_id) != bool(self.slack_client_secret):
            raise ValueError("SLACK_CLIENT_ID and SLACK_CLIENT_SECRET: Sign in with Slack needs both, or none")
        if self.slack_client_id and not self.public_url:
            raise ValueError("PUBLIC_URL is not set: Sign in with Slack comes back to it")
        if self.smtp_url and not (self.mail_from and self.public_url):
            raise ValueError("MAIL_FROM and PUBLIC_URL are needed for mails: who they are from, where their links lead")
        return self

    @property
    def pages_url(self) -> str | None:
        """Where the pages are for a browser; None: nowhere, as the machine's name for others is not known."""
        if self.public_url or self.host not in LOOPBACK:
            return self.public_url
        return f"http://{f'[{self.host}]' if ':' in self.host else self.host}:{self.port}"

    @property
    def slack_is_on(self) -> bool:
        return self.slack_bot_token is not None or self.many_workspaces

    @property
    def many_workspaces(self) -> bool:
        """Whether each workspace has a bot token of its own, in the database; else there is one, in these settings."""
        return self.token_keys is not None

    @property
    def token_key_list(self) -> list[str]:
        return _split(self.token_keys.get_secret_value() if self.token_keys else "")

    @property
    def webhook_secret_lists(self) -> dict[str, list[str]]:
        """The secrets of each endpoint."""
        return _lists(self.webhook_secrets.get_secret_value() if self.webhook_secrets else "")

    @property
    def webhook_approver_names(self) -> dict[str, list[str]]:
        """The people of each endpoint."""
        return _lists(self.webhook_approvers)

    @property
    def webhook_url_of(self) -> dict[str, str]:
        """Where the events of each endpoint go."""
        return dict(_pairs(self.webhook_urls.get_secret_value() if self.webhook_urls else ""))

    @property
    def webhook_signing_secret_lists(self) -> dict[str, list[str]]:
        """What the events of each endpoint are signed with."""
        return _lists(self.webhook_signing_secrets.get_secret_value() if self.webhook_signing_secrets else "")

    @property
    def otlp_url(self) -> str | None:
        """Where traces are sent by OTLP; None: nowhere. https://opentelemetry.io/docs/specs/otel/protocol/exporter/"""
        if self.otel_exporter_otlp_traces_endpoint or not self.otel_exporter_otlp_endpoint:
            return self.otel_exporter_otlp_traces_endpoint
        return f"{self.otel_exporter_otlp_endpoint.rstrip('/')}/v1/traces"

    @property
    def otlp_headers(self) -> dict[str, str]:
        given = self.otel_exporter_otlp_headers
        return _decoded_pairs(given.get_secret_value() if given else "")

    @property
    def trace_resource(self) -> dict[str, str]:
        """What every trace says of the service that it is from."""
        return _decoded_pairs(self.otel_resource_attributes) | {"service.name": self.otel_service_name}

    @property
    def langfuse_url(self) -> str | None:
        """Where Langfuse takes traces, if its keys are set."""
        if self.langfuse_public_key is None:
            return None
        base = self.langfuse_base_url or self.langfuse_host or "https://cloud.langfuse.com"
        return f"{base.rstrip('/')}/api/public/otel/v1/traces"

    @property
    def trace_targets(self) -> tuple[str, ...]:
        """The names of where traces go; nowhere, if none are recorded."""
        urls = {"otlp": self.otlp_url, "langfuse": self.langfuse_url} if self.spans else {}
        return tuple(name for name, url in urls.items() if url)

    @property
    def drive_slice(self) -> float:
        """Seconds after which a long drive leaves the rest to the next one, far below DRIVE_TIMEOUT."""
        return min(20.0, self.drive_timeout / 4)

    @property
    def checkpoint_retention_s(self) -> int | None:
        """None: they are never deleted."""
        return _kept_s(self.checkpoint_retention)

    @property
    def event_retention_s(self) -> int | None:
        return _kept_s(self.event_retention)

    @property
    def span_retention_s(self) -> int | None:
        return _kept_s(self.span_retention)

    @property
    def flow_modules(self) -> tuple[str, ...]:
        return tuple(_split(self.flows))

    @property
    def policy_path(self) -> Path | None:
        """The file with the policy; None: there is none."""
        usual = Path("policy.toml")
        # A link that leads nowhere is a policy that is missing, and not none.
        return self.policy_file or (usual if os.path.lexists(usual) else None)

    @property
    def approver_names(self) -> tuple[str, ...]:
        return tuple(map(_lowered, _split(self.approvers)))

    @property
    def filer_names(self) -> frozenset[str]:
        return names_in(self.filers)

    @property
    def viewer_names(self) -> frozenset[str]:
        return names_in(self.inbox_viewers)


_MAKE_A_KEY = "python -c 'import base64, os; print(base64.urlsafe_b64encode(os.urandom(32)).decode())'"

LOOPBACK = ("127.0.0.1", "localhost", "::1")

# How people are written: Slack members, people with an address, people of a webhook's endpoint, and programs with a
# token.
_MEMBER = r"[UW][A-Z0-9]{2,}|slack:[TE][A-Z0-9]{2,}/[UW][A-Z0-9]{2,}"
_FILER = re.compile(rf"{_MEMBER}|S[A-Z0-9]{{2,}}|@[a-z0-9][a-z0-9._-]{{0,79}}|(?:mail:)?{ADDRESS.pattern}")
_APPROVER = re.compile(
    rf"{_FILER.pattern}"
    r"|webhook:[a-z0-9][a-z0-9-]{0,62}:[A-Za-z0-9][A-Za-z0-9._@+-]{0,99}|api:[a-z0-9][a-z0-9-]{0,62}"
)
_VIEWER = re.compile(rf"{_MEMBER}|(?:mail:)?{ADDRESS.pattern}|cli:\S{{1,200}}")
_ENDPOINT = re.compile(r"[a-z0-9][a-z0-9-]{0,62}")
# https://www.rfc-editor.org/rfc/rfc9110#name-tokens
_HEADER = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_ENDPOINTS_PERSON = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@+-]{0,99}")


def read_settings() -> Settings:
    """The settings of this process. Raises SettingError."""
    try:
        return Settings()
    except ValidationError as exc:
        raise SettingError("\n".join(_explained(dict(error)) for error in exc.errors())) from exc
    except UnicodeDecodeError as exc:
        raise SettingError(f".env is not UTF-8 text: {exc}") from exc


def seconds_of(text: str) -> int:
    """How long "30 minutes", "12 hours", "3 days" or "2 weeks" are; "3d" for short. Raises ValueError."""
    match = re.fullmatch(r"([1-9][0-9]{0,5}) ?(?:(m|h|d|w)|(minute|hour|day|week)s?)", text)
    if match is None:
        raise ValueError('write "30 minutes", "12 hours", "3 days" or "2 weeks"')
    seconds = int(match[1]) * {"m": 60, "h": 3600, "d": 86_400, "w": 604_800}[(match[2] or match[3])[0]]
    if seconds > _LONGEST_S:
        raise ValueError("at most 260 weeks")
    return seconds


# Five years: no deadline that anybody means, and far from what a calendar ends with.
_LONGEST_S = 260 * 604_800


def _kept_s(text: str) -> int | None:
    try:
        return None if text == "never" else seconds_of(text)
    except ValueError as exc:
        raise ValueError(f'{exc}, or "never" for what is never deleted') from None


def channel_id(text: str) -> str:
    """The id of a Slack channel. Raises ValueError."""
    if not re.fullmatch(r"[CGD][A-Z0-9]{2,}", text):
        raise ValueError("give the channel's id (C…), not its name: a name can change hands")
    return text


def filers_in(text: str) -> str:
    """The list as it is written. Raises ValueError for what names nobody who files claims."""
    for name in _split(text):
        if not _FILER.fullmatch(name):
            raise ValueError(
                f"{name!r} files nothing in Slack: write U01ALICE or slack:T01TEAM/U01ALICE (member ids), @finance"
                " or S01FIN (user groups), or alice@example.com"
            )
    return text


def names_in(text: str) -> frozenset[str]:
    """The names of a list, as a person's names have them."""
    return frozenset(map(_lowered, _split(text)))


def approver_name(name: str) -> str:
    """How a list has this person. Raises ValueError for what names nobody."""
    if not _APPROVER.fullmatch(name):
        raise ValueError(
            f"{name!r} names nobody: write U01ALICE or slack:T01TEAM/U01ALICE (Slack member ids), @finance or S01FIN"
            " (Slack user groups), alice@example.com, webhook:ENDPOINT:NAME, or api:TOKEN"
        )
    return _lowered(name)


def _split(names: str) -> list[str]:
    return [name for part in names.split(",") if (name := part.strip())]


def _lowered(name: str) -> str:
    """An address in small letters, as a person's names have it; nobody else is spelled in two ways."""
    return name.lower() if ADDRESS.fullmatch(name.removeprefix("mail:")) else name


def _pairs(text: str) -> list[tuple[str, str]]:
    """`a=x,a=y,b=z` as pairs; without a sign the second half is empty."""
    split = [part.partition("=") for part in _split(text)]
    return [(name.strip(), value.strip()) for name, _, value in split]


def _lists(text: str) -> dict[str, list[str]]:
    lists: dict[str, list[str]] = {}
    for name, value in _pairs(text):
        lists.setdefault(name, []).append(value)
    return lists


def _decoded_pairs(text: str) -> dict[str, str]:
    """`a=x%20y,b=z`, as W3C Baggage writes it, which is how OpenTelemetry's variables are written."""
    return {name: unquote(value) for name, value in _pairs(text)}


def _is_url(text: str) -> bool:
    """Whether it is an http(s) URL with a host, and without a password, which would stand in logs."""
    try:
        url = urlsplit(text)
        return bool(
            url.scheme in ("http", "https") and url.hostname and url.port != 0 and "@" not in url.netloc
        ) and not re.search(r"[\x00-\x20\x7f]", text)
    except ValueError:
        return False


def _is_key(text: str) -> bool:
    """Whether it is a key of Fernet's: https://github.com/fernet/spec/blob/master/Spec.md"""
    return re.fullmatch(r"[A-Za-z0-9_-]{43}=", text) is not None


def _is_long_base64(text: str) -> bool:
    try:
        return 24 <= len(base64.b64decode(text, validate=True)) <= 64
    except ValueError:
        return False


def _explained(error: dict[str, object]) -> str:
    place = error["loc"]
    assert isinstance(place, tuple)
    message = str(error["msg"]).removeprefix("Value error, ")
    where = f"{str(place[0]).upper()}: " if place else ""
    return f"{where}{message} (in the environment or .env; see .env.example)"
