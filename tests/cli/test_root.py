"""The root command: help without loading, versions, unknown verbs, errors in one line."""

from __future__ import annotations

import subprocess
import sys
from importlib import import_module

import click
import pytest

import endstop
from endstop.cli.app import VERBS
from tests.cli.conftest import Endstop, process_environment


def test_the_help_lists_every_verb_and_loads_none_of_them(run_cli: Endstop) -> None:
    code = (
        "import sys\nfrom endstop.cli import main\nsys.argv = ['endstop', '--help']\nassert main() == 0\n"
        "heavy = {'rich', 'pydantic', 'apsw', 'endstop.cli.run', 'endstop.cli.ps', 'endstop.loop.agent'}\n"
        "assert not heavy & set(sys.modules), heavy & set(sys.modules)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], env=process_environment(), capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    for name in VERBS:
        assert f"\n  {name} " in done.stdout


@pytest.mark.parametrize("name", list(VERBS))
def test_the_overview_says_of_a_verb_what_fits_it(name: str) -> None:
    verb = VERBS[name]
    found = getattr(import_module(f"endstop.cli.{verb.module}"), verb.name)
    assert isinstance(found, click.Command)
    assert found.name == name
    assert verb.says.endswith(".")


def test_the_version_goes_to_stdout(run_process: Endstop) -> None:
    answer = run_process("--version")
    assert (answer.code, answer.out, answer.err) == (0, f"endstop {endstop.__version__}\n", "")


def test_an_unknown_verb_is_answered_with_the_nearest(run_cli: Endstop) -> None:
    answer = run_cli("shwo")
    assert (answer.code, answer.out) == (2, "")
    assert "did you mean 'show'?" in answer.err


WRONG = [("ps", "--nope"), ("show",), ("run", "missing.toml"), ("kill", "--all"), ("ps", "--state", "x")]


@pytest.mark.parametrize("args", WRONG, ids=" ".join)
def test_wrong_usage_ends_with_2_and_an_empty_stdout(run_cli: Endstop, args: tuple[str, ...]) -> None:
    answer = run_cli(*args)
    assert (answer.code, answer.out) == (2, "")
    assert answer.err.startswith("endstop: ")


def test_no_verb_at_all_shows_the_help_and_ends_with_2(run_cli: Endstop) -> None:
    answer = run_cli()
    assert (answer.code, answer.out) == (2, "")
    assert "Usage: endstop" in answer.err


def test_a_store_may_be_named_before_or_after_the_verb(run_cli: Endstop) -> None:
    three = ("--what-it-does", "a", "--what-it-does-not", "b", "--done-looks-like", "c")
    assert run_cli("--store", "a.db", "spec", *three, "--run-id", "one-spec").code == 0
    assert "has not started" in run_cli("show", "one-spec", "--store", "sqlite:///a.db").err
    assert "there is no run" in run_cli("--store", "a.db", "show", "one-spec", "--store", "memory:").err


def test_a_fault_nobody_foresaw_is_one_line_and_the_trace_is_on_demand(
    run_cli: Endstop, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object, **__: object) -> None:
        msg = "so\x1b[31m"
        raise ZeroDivisionError(msg)

    monkeypatch.setattr("endstop.cli.session.open_guard", broken)
    answer = run_cli("ps", "--store", "memory:")
    assert answer.code == 1
    assert answer.err == (
        "endstop: internal error: ZeroDivisionError: so\\x1b[31m\nendstop: run with ENDSTOP_DEBUG=1 for the trace\n"
    )
    monkeypatch.setenv("ENDSTOP_DEBUG", "1")
    assert "Traceback" in run_cli("ps", "--store", "memory:").err


def test_a_store_that_cannot_be_used_ends_with_1(run_cli: Endstop) -> None:
    answer = run_cli("spec", "--store", "/dev/null/x.db", "--what-it-does", "a", "--what-it-does-not", "b",
                     "--done-looks-like", "c")  # fmt: skip
    assert (answer.code, answer.out) == (1, "")


def test_an_interrupted_verb_ends_with_130(run_cli: Endstop, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("endstop.cli.session.open_guard", interrupted)
    assert run_cli("ps", "--store", "memory:").code == 130
