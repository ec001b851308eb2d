"""The pages say what the program does: every verb, option, code and reason, and none that is not there."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from endstop.cli.app import VERBS, cli
from endstop.cli.codes import ExitCode
from endstop.core.reasons import ENDINGS

Found = tuple[str, click.Command]
ROOT = click.Context(cli, info_name="endstop")


def _commands() -> Iterator[Found]:
    for name in VERBS:
        command = cli.get_command(ROOT, name)
        assert command is not None, name
        yield name, command
        if isinstance(command, click.Group):
            context = click.Context(command, info_name=name)
            for inner in command.list_commands(context):
                found = command.get_command(context, inner)
                assert found is not None
                yield f"{name} {inner}", found


COMMANDS = list(_commands())


@pytest.fixture(scope="module")
def sections(repository: Path) -> dict[str, str]:
    text = (repository / "docs" / "cli.md").read_text(encoding="utf-8")
    parts = re.split(r"^#{2,3} endstop (.+)$", text, flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def test_every_verb_has_a_section_and_every_section_a_verb(sections: dict[str, str]) -> None:
    assert list(sections) == [name for name, _ in COMMANDS]


@pytest.mark.parametrize(("name", "command"), COMMANDS, ids=[name for name, _ in COMMANDS])
def test_a_section_names_exactly_the_options_of_its_verb(
    name: str, command: click.Command, sections: dict[str, str]
) -> None:
    context = click.Context(command)
    options = {option for parameter in command.get_params(context) for option in parameter.opts if option[:1] == "-"}
    section = re.sub(r"^```.*?^```", "", sections[name], flags=re.MULTILINE | re.DOTALL)
    documented = set(re.findall(r"^\| (.+?) \| .+ \|$|^Shared: (.+)\.$", section, flags=re.MULTILINE))
    named = {option for cells in documented for cell in cells for option in re.findall(r"`(--?[a-z-]+)`", cell)}
    if isinstance(command, click.Group):
        assert not named
    else:
        assert named == options - {"-h"}


@pytest.mark.parametrize(("name", "command"), COMMANDS, ids=[name for name, _ in COMMANDS])
def test_a_section_says_what_the_help_says_word_for_word(
    name: str, command: click.Command, sections: dict[str, str]
) -> None:
    assert command.help
    section = " ".join(sections[name].split())
    assert " ".join(command.help.split()) in section
    for parameter in command.params:
        if isinstance(parameter, click.Option) and parameter.opts[-1] not in ("--json", "--store", "--no-color"):
            assert parameter.help
            assert parameter.help in section, parameter.opts


@pytest.mark.parametrize(("name", "command"), COMMANDS, ids=[name for name, _ in COMMANDS])
def test_every_verb_has_json_an_example_and_hyphenated_options(name: str, command: click.Command) -> None:
    if isinstance(command, click.Group):
        return
    options = [option for parameter in command.params for option in parameter.opts if option.startswith("--")]
    assert "--json" in options
    assert all(re.fullmatch(r"--[a-z]+(-[a-z]+)*", option) for option in options)
    assert f"endstop {name}" in (command.epilog or "")


@pytest.fixture(scope="module")
def tables(repository: Path) -> list[list[str]]:
    text = (repository / "docs" / "exit-codes.md").read_text(encoding="utf-8")
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line.startswith("|")]


def test_every_exit_code_is_explained_once(tables: list[list[str]]) -> None:
    codes = [int(row[0]) for row in tables if row[0].isdigit()]
    assert codes == sorted(int(code) for code in ExitCode)


def test_every_terminal_reason_stands_with_its_code_and_next_action(tables: list[list[str]]) -> None:
    rows = {row[0].strip("`"): (int(row[1]), row[2].strip("`")) for row in tables if len(row) == 4 and row[1].isdigit()}
    assert rows == {
        reason.value: (ending.exit_code, ending.next_action.value) for reason, ending in ENDINGS.items()
    }  # fmt: skip


def test_the_root_help_names_every_exit_code() -> None:
    text = cli.get_help(ROOT)
    assert all(re.search(rf"\b{code.value} [a-z]", text) for code in ExitCode)
