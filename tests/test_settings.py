"""Settings are right at start, or the error names the one that is wrong and what to do."""

from __future__ import annotations

import traceback
from pathlib import Path

import pytest

from flow import database
from flow.errors import SettingError
from flow.settings import Settings, read_settings

SLACK = {
    "SLACK_BOT_TOKEN": "xoxb-very-secret",
    "SLACK_SIGNING_SECRET": "signing-very-secret",
    "SLACK_CHANNEL": "C0123456789",
}


@pytest.fixture
def give(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    return monkeypatch


def set_all(give: pytest.MonkeyPatch, values: dict[str, str]) -> None:
    for name, value in values.items():
        give.setenv(name, value)


def test_without_any_setting_slack_is_off_and_nobody_approves() -> None:
    settings = read_settings()
    assert (settings.slack_is_on, settings.approver_names, settings.database_url) == (False, (), None)
    assert settings.claim_flow_home == Path(".claim_flow")
    assert (settings.host, settings.port, settings.drive_timeout) == ("127.0.0.1", 4000, 120.0)


@pytest.mark.parametrize("way_in", ["SLACK_SIGNING_SECRET", "SLACK_APP_TOKEN"])
def test_a_whole_slack_configuration_is_on(give: pytest.MonkeyPatch, way_in: str) -> None:
    set_all(give, SLACK)
    give.delenv("SLACK_SIGNING_SECRET")
    give.setenv(way_in, "very-secret")
    assert read_settings().slack_is_on


@pytest.mark.parametrize("given", [[name] for name in SLACK] + [[a for a in SLACK if a != name] for name in SLACK])
def test_half_a_slack_configuration_names_what_is_missing(give: pytest.MonkeyPatch, given: list[str]) -> None:
    set_all(give, {name: SLACK[name] for name in given})
    with pytest.raises(SettingError) as wrong:
        read_settings()
    missing = str(wrong.value).split(" not set:")[0]
    assert [name for name in SLACK if name in missing] == [name for name in SLACK if name not in given]
    assert ".env" in str(wrong.value)


def test_an_empty_value_counts_as_not_set(give: pytest.MonkeyPatch) -> None:
    set_all(give, dict.fromkeys([*SLACK, "DATABASE_URL", "APPROVERS", "PORT", "DRIVE_TIMEOUT", "CLAIM_FLOW_HOME"], ""))
    assert read_settings() == Settings(_env_file=None)  # type: ignore[call-arg]
    give.setenv("SLACK_BOT_TOKEN", SLACK["SLACK_BOT_TOKEN"])
    with pytest.raises(SettingError, match=r"SLACK_CHANNEL and SLACK_SIGNING_SECRET .*not set"):
        read_settings()


@pytest.mark.parametrize("channel", ["C012345", "G012345", "D012345"])
def test_a_channel_is_given_by_its_id(give: pytest.MonkeyPatch, channel: str) -> None:
    set_all(give, SLACK | {"SLACK_CHANNEL": channel})
    assert read_settings().slack_channel == channel


@pytest.mark.parametrize("channel", ["#payments", "payments", "c012345", "U012345", "C01 2345", "C012345,C067890"])
def test_a_channel_that_is_no_id_is_refused(give: pytest.MonkeyPatch, channel: str) -> None:
    set_all(give, SLACK | {"SLACK_CHANNEL": channel})
    with pytest.raises(SettingError, match=r"\ASLACK_CHANNEL: give the channel's id"):
        read_settings()


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("U01ALICE", ("U01ALICE",)),
        ("U01ALICE,slack:T01TEAM/U02BOB", ("U01ALICE", "slack:T01TEAM/U02BOB")),
        (" U01ALICE , W02BOB ,, ", ("U01ALICE", "W02BOB")),
        (" , ", ()),
    ],
)
def test_approvers_are_people_and_programs(give: pytest.MonkeyPatch, text: str, names: tuple[str, ...]) -> None:
    give.setenv("APPROVERS", text)
    assert read_settings().approver_names == names


def test_capitals_make_no_other_address(give: pytest.MonkeyPatch) -> None:
    set_all(
        give, {"APPROVERS": "Alice@Example.com, mail:BOB@example.com", "INBOX_VIEWERS": "CAROL@example.com,cli:Ann"}
    )
    assert read_settings().approver_names == ("alice@example.com", "mail:bob@example.com")
    assert read_settings().viewer_names == {"carol@example.com", "cli:Ann"}


@pytest.mark.parametrize(
    "wrong",
    ["alice@", "@", "alice", "@fin ance", "s01board", "u01alice", "C01ALICE", "*", "U01ALICE U02BOB", "slack:U01ALICE"],
)
def test_an_approver_that_nobody_could_be_is_refused(give: pytest.MonkeyPatch, wrong: str) -> None:
    give.setenv("APPROVERS", f"U01ALICE,{wrong}")
    with pytest.raises(SettingError, match=r"\AAPPROVERS: .* names nobody") as error:
        read_settings()
    assert repr(wrong) in str(error.value)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("PORT", value) for value in ("http", "-1", "65536", "4000.5")),
        *(("DRIVE_TIMEOUT", value) for value in ("0", "-1", "soon", "nan")),
        ("DRIVE_TIMEOUT", "inf"),
        *(("STAND_BY", value) for value in ("0", "65", "two")),
    ],
)
def test_a_number_out_of_range_names_its_setting(give: pytest.MonkeyPatch, name: str, value: str) -> None:
    give.setenv(name, value)
    with pytest.raises(SettingError, match=rf"\A{name}: .*\.env"):
        read_settings()


@pytest.mark.parametrize(
    ("url", "pages"),
    [
        ("https://claims.example.com/", "https://claims.example.com"),
        ("https://Claims.example.com:443", "https://claims.example.com"),
        ("https://claims.example.com:8443", "https://claims.example.com:8443"),
        ("http://localhost:4000", "http://localhost:4000"),
        ("http://[::1]:4000", "http://[::1]:4000"),
    ],
)
def test_a_public_url_is_written_as_browsers_write_an_origin(give: pytest.MonkeyPatch, url: str, pages: str) -> None:
    give.setenv("PUBLIC_URL", url)
    assert read_settings().pages_url == pages


@pytest.mark.parametrize(
    "url",
    ["http://claims.example.com", "claims.example.com", "https://a.example/b", "https://u@a.example", "https://a:x"],
)
def test_a_public_url_that_is_not_safe_or_not_whole_is_refused(give: pytest.MonkeyPatch, url: str) -> None:
    give.setenv("PUBLIC_URL", url)
    with pytest.raises(SettingError, match="PUBLIC_URL"):
        read_settings()


@pytest.mark.parametrize(
    ("host", "pages"),
    [("127.0.0.1", "http://127.0.0.1:4000"), ("::1", "http://[::1]:4000"), ("0.0.0.0", None), ("10.0.0.7", None)],
)
def test_without_a_public_url_pages_are_on_this_machine_or_nowhere(
    give: pytest.MonkeyPatch, host: str, pages: str | None
) -> None:
    give.setenv("HOST", host)
    assert read_settings().pages_url == pages


@pytest.mark.parametrize(
    ("given", "missing"),
    [
        ({"SLACK_CLIENT_ID": "1.2", "PUBLIC_URL": "https://a.example"}, "SLACK_CLIENT_SECRET"),
        ({"SLACK_CLIENT_SECRET": "x", "PUBLIC_URL": "https://a.example"}, "SLACK_CLIENT_ID"),
        ({"SLACK_CLIENT_ID": "1.2", "SLACK_CLIENT_SECRET": "x"}, "PUBLIC_URL"),
        ({"SMTP_URL": "smtp://mail.example.com", "PUBLIC_URL": "https://a.example"}, "MAIL_FROM"),
        ({"SMTP_URL": "smtp://mail.example.com", "MAIL_FROM": "a@b.example"}, "PUBLIC_URL"),
        ({"SMTP_URL": "http://mail.example.com"}, "SMTP_URL"),
        ({"MAIL_FROM": "claims"}, "MAIL_FROM"),
        ({"MAIL_FROM": "a@b.example\nBcc: c@d.example"}, "MAIL_FROM"),
        ({"STEP_UP_OVER": "much"}, "STEP_UP_OVER"),
        ({"STEP_UP_OVER": "NaN"}, "STEP_UP_OVER"),
        ({"INBOX_VIEWERS": "everybody"}, "INBOX_VIEWERS"),
    ],
    ids=str,
)
def test_what_is_missing_or_wrong_for_the_pages_is_named(
    give: pytest.MonkeyPatch, given: dict[str, str], missing: str
) -> None:
    set_all(give, given)
    with pytest.raises(SettingError, match=missing):
        read_settings()


def test_every_wrong_setting_is_named_at_once(give: pytest.MonkeyPatch) -> None:
    set_all(give, {"PORT": "http", "APPROVERS": "alice", "STAND_BY": "0"})
    with pytest.raises(SettingError) as wrong:
        read_settings()
    assert [line.split(":")[0] for line in str(wrong.value).splitlines()] == ["APPROVERS", "PORT", "STAND_BY"]


def test_a_setting_error_is_a_usage_error() -> None:
    assert SettingError.exit_code == 2


def test_the_env_file_of_the_working_directory_is_read(tmp_path: Path) -> None:
    (tmp_path / ".env").write_text("# ours\nAPPROVERS=U01ALICE\nPORT=4001\nSOMEBODY_ELSES=1\n")
    settings = read_settings()
    assert (settings.approver_names, settings.port) == (("U01ALICE",), 4001)


def test_the_environment_wins_over_the_env_file(give: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / ".env").write_text("PORT=4001\nAPPROVERS=U01ALICE\n")
    give.setenv("PORT", "4002")
    settings = read_settings()
    assert (settings.approver_names, settings.port) == (("U01ALICE",), 4002)


def test_an_env_file_that_is_no_text_is_named(tmp_path: Path) -> None:
    (tmp_path / ".env").write_bytes(b"APPROVERS=\xff\xfe\n")
    with pytest.raises(SettingError, match=r"\.env is not UTF-8"):
        read_settings()


@pytest.mark.parametrize("url", ["https://slack.example/api", "https://slack.example/api/"])
def test_slacks_address_ends_with_a_slash(give: pytest.MonkeyPatch, url: str) -> None:
    give.setenv("SLACK_API_URL", url)
    assert read_settings().slack_api_url == "https://slack.example/api/"


def test_no_secret_shows_in_a_repr(give: pytest.MonkeyPatch) -> None:
    set_all(give, SLACK | {"DATABASE_URL": "postgresql://u:very-secret@db/claims"})
    settings = read_settings()
    assert "very-secret" not in repr(settings) + str(settings) + str(settings.model_dump()) + settings.model_dump_json()
    assert settings.database_url is not None
    assert settings.database_url.get_secret_value() == "postgresql://u:very-secret@db/claims"


def test_no_secret_shows_in_the_traceback_of_an_error(give: pytest.MonkeyPatch) -> None:
    set_all(give, {name: SLACK[name] for name in ("SLACK_BOT_TOKEN", "SLACK_SIGNING_SECRET")})
    with pytest.raises(SettingError) as wrong:
        read_settings()
    assert "very-secret" not in "".join(traceback.format_exception(wrong.value))


@pytest.mark.parametrize(
    "url",
    [
        "postgresql://u:very-secret%zz@db/claims",
        "mysql://u:very-secret@db/claims",
        "postgresql://u:very-secret@db/claims?sslmod=on",
        "host=db password='very-secret",
    ],
)
def test_a_database_url_that_is_none_is_named_without_its_password(give: pytest.MonkeyPatch, url: str) -> None:
    give.setenv("DATABASE_URL", url)
    with pytest.raises(SettingError, match=r"\ADATABASE_URL is not a libpq URL") as wrong:
        database.database_url(read_settings())
    assert "very-secret" not in str(wrong.value)


def test_the_given_database_url_is_used(give: pytest.MonkeyPatch) -> None:
    give.setenv("DATABASE_URL", "postgresql://u:p@db/claims")
    assert database.database_url(read_settings()) == "postgresql://u:p@db/claims"
