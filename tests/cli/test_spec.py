"""A person writes down what "done" means; the run's id is all that goes to stdout."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.cli.conftest import Endstop

THREE = ("--what-it-does", "a", "--what-it-does-not", "b", "--done-looks-like", "c")


@pytest.fixture
def at_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """A person sits there. (Real terminals are in test_terminal.py.)"""
    monkeypatch.setattr("endstop.cli.spec.can_ask", lambda: True)


def test_the_three_options_store_a_spec_and_print_the_run_id_alone(run_cli: Endstop) -> None:
    answer = run_cli("spec", *THREE)
    assert (answer.code, answer.err) == (0, "")
    assert re.fullmatch(r"[0-9a-f-]{36}\n", answer.out)


def test_json_gives_the_id_and_the_spec(run_cli: Endstop) -> None:
    answer = run_cli("spec", *THREE, "--run-id", "my-run", "--json")
    assert answer.json == {
        "schema": "endstop/1", "run_id": "my-run",
        "spec": {"what_it_does": "a", "what_it_does_not": "b", "done_looks_like": "c"},
    }  # fmt: skip


def test_without_a_terminal_what_is_missing_is_named_and_nothing_is_stored(run_cli: Endstop, folder: Path) -> None:
    answer = run_cli("spec", "--what-it-does", "a")
    assert (answer.code, answer.out) == (2, "")
    assert "--what-it-does-not, --done-looks-like, or --file" in answer.err
    assert not (folder / ".endstop").exists()


@pytest.mark.usefixtures("at_a_terminal")
def test_a_blank_answer_is_asked_for_again(run_cli: Endstop) -> None:
    answer = run_cli("spec", "--json", answers="\n  \nLooks.\nChanges nothing.\n" + "x" * 9_000 + "\nFound.\n")
    assert answer.code == 0
    assert answer.err.count("What does it do?") == 3
    assert "9000 characters" in answer.err
    assert answer.json["spec"] == {
        "what_it_does": "Looks.", "what_it_does_not": "Changes nothing.", "done_looks_like": "Found.",
    }  # fmt: skip


@pytest.mark.usefixtures("at_a_terminal")
def test_only_what_is_missing_is_asked_for(run_cli: Endstop) -> None:
    answer = run_cli("spec", "--what-it-does", "a", "--done-looks-like", "c", answers="b\n")
    assert answer.code == 0
    assert answer.err.count("?") == 1


@pytest.mark.usefixtures("at_a_terminal")
def test_a_person_who_leaves_stores_nothing(run_cli: Endstop, folder: Path) -> None:
    assert run_cli("spec", answers="").code == 130
    assert not (folder / ".endstop").exists()


@pytest.mark.parametrize("head", ["", "[spec]\n"])
def test_a_file_gives_the_spec_at_its_top_or_in_its_table(run_cli: Endstop, folder: Path, head: str) -> None:
    (folder / "s.toml").write_text(f'{head}what_it_does = "a"\nwhat_it_does_not = "b"\ndone_looks_like = "c"\n')
    assert run_cli("spec", "--file", "s.toml").code == 0


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('what_it_dose = "a"', "did you mean 'what_it_does'?"),
        ('what_it_does = "a"', "what_it_does_not, done_looks_like is missing"),
        ('what_it_does = 1\nwhat_it_does_not = "b"\ndone_looks_like = "c"', "is blank"),
        ('what_it_does = " "\nwhat_it_does_not = "b"\ndone_looks_like = "c"', "is blank"),
        ("spec = 1", "must be a table"),
        ("what_it_does = ", "s.toml"),
    ],
)
def test_a_file_that_is_no_spec_is_refused_with_what_is_wrong(
    run_cli: Endstop, folder: Path, text: str, said: str
) -> None:
    (folder / "s.toml").write_text(text)
    answer = run_cli("spec", "--file", "s.toml")
    assert (answer.code, answer.out) == (2, "")
    assert said in answer.err


def test_a_file_and_options_exclude_each_other(run_cli: Endstop, folder: Path) -> None:
    (folder / "s.toml").write_text("")
    assert run_cli("spec", "--file", "s.toml", *THREE).code == 2


def test_an_id_that_is_taken_by_another_spec_is_refused(run_cli: Endstop) -> None:
    assert run_cli("spec", *THREE, "--run-id", "r").code == 0
    answer = run_cli("spec", *THREE[:-1], "other", "--run-id", "r")
    assert (answer.code, answer.out) == (2, "")


@pytest.mark.parametrize("run_id", ["last", "", "a b", "ä", "a/b", "x" * 201, "-x", "a\x1b"])
def test_an_id_that_could_not_stand_in_a_record_or_a_command_is_refused(run_cli: Endstop, run_id: str) -> None:
    assert run_cli("spec", *THREE, f"--run-id={run_id}").code == 2
