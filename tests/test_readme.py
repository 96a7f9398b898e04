"""What is written for people stays true: the README's tables, examples and links, and `.env.example`."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator

import click
import pytest
from pydantic import SecretStr

from claim_flow import cli
from flow.assess import Adviser, adviser_of
from flow.settings import Settings, read_settings
from tests.command import ROOT

README = (ROOT / "README.md").read_text()
EXAMPLE = (ROOT / ".env.example").read_text()
COMPOSE = (ROOT / "compose.yaml").read_text()

SETTINGS = {name.upper(): field for name, field in Settings.model_fields.items()}
# Not a setting of the program: compose.yaml makes its database with it.
FOR_COMPOSE = "POSTGRES_PASSWORD"


def section(title: str) -> str:
    [text] = re.findall(rf"^## {re.escape(title)}\n(.*?)(?=^## |\Z)", README, re.MULTILINE | re.DOTALL)
    return str(text)


def rows(title: str) -> list[list[str]]:
    """The cells of the tables of a section, without their heads."""
    lines = [line for line in section(title).splitlines() if line.startswith("|")]
    cells = [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines]
    # A head stands before a line of dashes.
    dashes = {number for number, row in enumerate(cells) if set("".join(row)) <= {"-"}}
    return [row for number, row in enumerate(cells) if not {number, number + 1} & dashes]


def quoted(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


def examples() -> list[tuple[str, str]]:
    """Name and value of each setting in .env.example, commented out or not."""
    return re.findall(r"^#?([A-Z_]+)=(.*)$", EXAMPLE, re.MULTILINE)


def adviser(key: str) -> Adviser:
    found = adviser_of(Settings.model_validate({key: SecretStr("sk")}))
    assert found is not None
    return found


# Settings


def test_the_readme_has_every_setting_once_and_no_other() -> None:
    assert sorted(name for row in rows("Settings") for name in quoted(row[0])) == sorted(SETTINGS)


def test_the_example_file_has_every_setting_once_and_composes_password() -> None:
    assert sorted(name for name, _ in examples()) == sorted([*SETTINGS, FOR_COMPOSE])
    assert FOR_COMPOSE in COMPOSE


def test_everything_in_the_example_file_is_commented_out() -> None:
    assert [line for line in EXAMPLE.splitlines() if line and not line.startswith("#")] == []


# What is for many workspaces, and what for one.
MANY, ONE = {"TOKEN_KEYS": f"{'x' * 43}="}, ("BOT_TOKEN", "APP_TOKEN", "CHANNEL", "OPS_CHANNEL", "APPROVERS", "FILERS")


@pytest.mark.parametrize("many", [False, True])
def test_the_example_file_is_usable_with_every_comment_sign_removed(
    monkeypatch: pytest.MonkeyPatch, many: bool
) -> None:
    for name, text in examples():
        if name not in MANY and not (many and name.removeprefix("SLACK_") in ONE):
            monkeypatch.setenv(name, text)
    if many:
        monkeypatch.setenv("TOKEN_KEYS", MANY["TOKEN_KEYS"])
        monkeypatch.setenv("INBOX_VIEWERS", "slack:T01TEAM/U01ALICE")
    assert read_settings().slack_is_on


@pytest.mark.parametrize("row", rows("Settings"), ids=lambda row: row[0])
def test_a_default_in_the_readme_is_the_settings_default(row: list[str]) -> None:
    names, defaults = quoted(row[0]), quoted(row[1])
    if names == ["MODEL"]:
        assert defaults == [adviser("openai_api_key").model]
    elif defaults:
        assert defaults == [_as_typed(SETTINGS[name].default) for name in names]
    else:
        # In words: there is none, or it is somebody else's.
        assert not any(SETTINGS[name].default for name in names if name != "SLACK_API_URL")


@pytest.mark.parametrize(("name", "text"), examples(), ids=str)
def test_an_example_of_a_setting_with_a_default_is_its_default(name: str, text: str) -> None:
    ours = {"MODEL": adviser("openai_api_key").model, "OPENAI_BASE_URL": adviser("openai_api_key").base_url}
    default = ours.get(name) or (SETTINGS[name].default if name in SETTINGS else None)
    if default:
        assert text == _as_typed(default)


def _as_typed(default: object) -> str:
    if isinstance(default, bool):
        return str(default).lower()
    return f"{default:g}" if isinstance(default, float) else str(default)


# Commands


def commands(group: click.Group, above: tuple[str, ...] = ()) -> Iterator[tuple[str, click.Command]]:
    """Each by its whole name."""
    for name, command in group.commands.items():
        if isinstance(command, click.Group):
            yield from commands(command, (*above, name))
        if not isinstance(command, click.Group) or command.invoke_without_command:
            yield " ".join((*above, name)), command


def test_the_readme_names_every_command_and_no_other() -> None:
    named = {re.split(r" [\[(]?--", text)[0] for row in rows("Use it") for text in quoted(row[0])}
    assert named == {name for name, _ in commands(cli)}


def test_the_readme_names_every_command_that_prints_json_and_no_other() -> None:
    [named] = re.findall(r"^`--json` on (.*) prints", section("Use it"), re.MULTILINE)
    assert sorted(quoted(named)) == sorted(
        name for name, command in commands(cli) if any("--json" in each.opts for each in command.params)
    )


def test_the_readme_names_every_option_of_the_commands_that_take_text() -> None:
    shown = {text.split()[0]: text for row in rows("Use it") for text in quoted(row[0]) if "--" in text}
    for name in ("start", "resume", "list", "show"):
        options = {each.opts[-1] for each in cli.commands[name].params} - {"--json"}
        assert options == set(re.findall(r"--[a-z]+", shown[name]))


def typed() -> list[str]:
    """Every command line in the README, as it stands there."""
    lines = re.findall(r"^ {4,}.*?claim_flow\.py (\S.*)$", README, re.MULTILINE)
    inline = re.findall(r"`(?:uv run )?claim_flow\.py ([^`]+)`", README)
    composed = re.findall(r"compose run --rm \w+ (.*)$", README, re.MULTILINE)
    return [*lines, *inline, *composed]


@pytest.mark.parametrize("line", typed())
def test_a_command_line_in_the_readme_can_be_typed(line: str) -> None:
    words = shlex.split(line, comments=True)
    command: click.Command = cli
    while isinstance(command, click.Group) and words and not words[0].startswith("-"):
        command = command.commands[words.pop(0)]
    command.make_context(command.name, words)


def test_the_readme_shows_command_lines() -> None:
    assert len(typed()) > 8


# Files


def links() -> list[str]:
    return sorted(set(re.findall(r"\]\((?!https?:|#)([^)#]+)", README)))


@pytest.mark.parametrize("path", links())
def test_a_file_that_the_readme_links_to_exists(path: str) -> None:
    assert (ROOT / path).exists()


@pytest.mark.parametrize("name", sorted(set(re.findall(r"\btest_\w+\.py", README))))
def test_a_test_that_the_readme_names_exists(name: str) -> None:
    assert (ROOT / "tests" / name).exists()


def test_the_readme_links_to_files() -> None:
    assert len(links()) > 10
