"""stop, freeze, deny, kill, resume and reconcile: orders, and what they say when they cannot be given."""

from __future__ import annotations

from pathlib import Path

import pytest

import endstop as es
from tests.cli.conftest import Endstop, call_turn, text_turn, write_task

DONE = text_turn("x is there.")
STORE = ".endstop/endstop.db"


@pytest.fixture
def paused(run_cli: Endstop, folder: Path) -> str:
    """A run that waits for a person."""
    assert run_cli("run", write_task(folder, call_turn("ask_person")), "--run-id", "waiting").code == 5
    return "waiting"


@pytest.fixture
def detached(folder: Path) -> str:
    """A run that nobody is inside of, and that has not ended."""
    with (
        es.open(STORE) as guard,
        guard.run(es.Spec(what_it_does="a", what_it_does_not="b", done_looks_like="c"), run_id="open-1"),
    ):
        pass
    assert folder.exists()
    return "open-1"


# -- stop


def test_stopping_is_requested_once_and_said_again(run_cli: Endstop, detached: str) -> None:
    first = run_cli("stop", detached, "--reason", "enough", "--actor", "ann", "--json").json
    assert (first["requested"], first["already_ended"], first["acknowledged"]) == (True, False, True)
    assert first["envelope"]["message"] == "enough"
    second = run_cli("stop", detached, "--reason", "again", "--json").json
    assert (second["requested"], second["already_ended"]) == (False, True)
    assert second["envelope"] == first["envelope"]
    assert "already ended" in run_cli("stop", detached).out
    stop = run_cli("show", detached, "--json", "--entries").json["ledger_entries"][-1]["entry"]
    assert (stop["type"], stop["actor"]) == ("stop", "ann")


@pytest.mark.parametrize("verb", ["stop", "freeze", "unfreeze", "show"])
def test_a_run_that_is_not_there_ends_with_8_and_makes_no_store(run_cli: Endstop, folder: Path, verb: str) -> None:
    answer = run_cli(verb, "nowhere")
    assert (answer.code, answer.out) == (8, "")
    assert not (folder / ".endstop").exists()


# -- freeze


def test_a_frozen_run_without_a_worker_neither_resumes_nor_starts(run_cli: Endstop, paused: str, folder: Path) -> None:
    assert run_cli("freeze", paused, "--json").json["control"]["run_id"] == paused
    resumed = run_cli("resume", paused, "--change", "authorisation", "--reason", "granted")
    assert (resumed.code, resumed.out) == (7, "")
    assert f"endstop unfreeze {paused}" in resumed.err
    assert run_cli("unfreeze", paused, "--json").json == {"schema": "endstop/1", "run_id": paused, "withdrawn": 1}
    assert run_cli("resume", paused, "--change", "authorisation", "--reason", "granted").code == 0
    assert run_cli("freeze", "--all").code == 0
    started = run_cli("run", "task.toml", "--run-id", paused)
    assert (started.code, started.out) == (7, "")
    assert "unfreeze --all" in started.err
    assert folder.exists()


def test_a_freeze_names_one_run_or_all(run_cli: Endstop) -> None:
    for args in (("freeze",), ("freeze", "r", "--all"), ("unfreeze",), ("unfreeze", "r", "--all")):
        assert run_cli(*args).code == 2


def test_unfreezing_what_is_not_frozen_is_harmless(run_cli: Endstop) -> None:
    assert run_cli("unfreeze", "--all").code == 0


# -- deny


def test_a_denied_tool_is_not_called_until_the_rule_is_withdrawn(run_cli: Endstop, folder: Path) -> None:
    mark = folder / "mark"
    task = write_task(folder, call_turn("touch", path=str(mark)), DONE)
    rule = run_cli("deny", "--tool", "tou*", "--reason", "migration").out.strip()
    run_id = run_cli("run", task, "--json").json["run_id"]
    assert not mark.exists()
    shown = run_cli("show", run_id).out
    assert "deny_rule" in shown
    assert f"rule {rule}" in shown
    [listed] = run_cli("deny", "--list", "--json").json["controls"]
    assert (listed["control_id"], listed["tool"], listed["reason"]) == (rule, "tou*", "migration")
    assert rule in run_cli("deny", "--list").out
    assert run_cli("undeny", "--rule", rule).out == "withdrawn: 1\n"
    assert run_cli("run", task).code == 0
    assert mark.exists()


def test_a_rule_may_name_effect_run_and_arguments(run_cli: Endstop, detached: str) -> None:
    order = run_cli("deny", "--run", detached, "--effect", "write", "--arg", "to=*@example.org", "--json").json[
        "control"
    ]
    assert (order["run_id"], order["effect"], order["args"]) == (detached, "write", {"to": "*@example.org"})


def test_a_rule_that_would_deny_everything_is_refused(run_cli: Endstop, detached: str) -> None:
    assert run_cli("deny", "--run", detached).code == 2
    assert run_cli("deny", "--arg", "novalue").code == 2
    assert run_cli("deny", "--list", "--tool", "x").code == 2


def test_withdrawing_names_its_rules_and_finds_some(run_cli: Endstop, detached: str) -> None:
    assert detached
    assert run_cli("undeny").code == 2
    assert run_cli("undeny", "--all", "--tool", "x").code == 2
    assert run_cli("undeny", "--tool", "never-denied").code == 8


# -- kill


def test_a_kill_without_a_terminal_asks_nobody(run_cli: Endstop, detached: str) -> None:
    """The emergency switch works from a pager's hook and a script."""
    answer = run_cli("kill", "--all", "--reason", "incident")
    assert (answer.code, answer.out) == (0, f"{detached}\n")
    assert run_cli("show", detached, "--json").json["envelope"]["terminal_reason"] == "kill_switch"


def test_a_kill_ends_runs_and_is_withdrawn(run_cli: Endstop, detached: str) -> None:
    assert run_cli("kill", "--all", "--reason", "incident", "--yes").out == f"{detached}\n"
    shown = run_cli("show", detached, "--json").json
    assert shown["envelope"]["terminal_reason"] == "kill_switch"
    assert "endstop unkill" in run_cli("show", detached).out
    assert run_cli("unkill", "--all", "--json").json["withdrawn"] == 1


def test_a_person_may_say_no_to_a_kill(run_cli: Endstop, detached: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("endstop.cli.kill.can_ask", lambda: True)
    assert run_cli("kill", "--all", "--reason", "incident", answers="n\n").code == 130
    assert run_cli("show", detached, "--json").json["state"] == "running"
    assert run_cli("kill", "--all", "--reason", "incident", answers="y\n").code == 0


def test_a_kill_names_a_label_or_all(run_cli: Endstop) -> None:
    for args in (
        ("kill", "--reason", "x", "--yes"),
        ("kill", "--all", "--label", "a", "--reason", "x", "--yes"),
        ("unkill",),
    ):
        assert run_cli(*args).code == 2


# -- resume


def test_a_run_ended_by_a_cap_needs_that_limit_raised(run_cli: Endstop, folder: Path) -> None:
    turns = [call_turn("look", q=str(number)) for number in range(3)]
    task = write_task(folder, *turns, DONE, more="[limits]\nturns_max = 2\n")
    assert run_cli("run", task, "--run-id", "capped").code == 3
    refused = run_cli("resume", "capped", "--change", "strategy", "--reason", "x")
    assert (refused.code, refused.out) == (2, "")
    assert "limit:turns_max=VALUE" in refused.err
    answer = run_cli("resume", "capped", "--change", "limit:turns_max=9", "--reason", "x", "--task", task, "--json")
    assert (answer.code, answer.json["run"]["limits"]["turns_max"]) == (0, 9)
    assert answer.json["turns"] == 6


@pytest.mark.parametrize("change", ["try again", "limit:steps_max", "limit:nope=3", "limit:steps_max=1"])
def test_a_resume_that_changes_nothing_is_refused(run_cli: Endstop, paused: str, change: str) -> None:
    assert run_cli("resume", paused, "--change", change, "--reason", "x").code == 2
    assert run_cli("show", paused, "--json").json["state"] == "paused"


def test_a_resume_needs_its_change_and_its_reason(run_cli: Endstop, paused: str) -> None:
    assert run_cli("resume", paused, "--change", "args").code == 2
    assert run_cli("resume", paused, "--reason", "x").code == 2
    assert run_cli("resume", paused, "--change", "args", "--reason", " ").code == 2


def test_a_complete_run_is_not_resumed(run_cli: Endstop, folder: Path) -> None:
    assert run_cli("run", write_task(folder, DONE), "--run-id", "done-1").code == 0
    assert run_cli("resume", "done-1", "--change", "args", "--reason", "x").code == 2


# -- the rest


def test_reconcile_on_a_clean_store_finds_nothing(run_cli: Endstop, paused: str) -> None:
    answer = run_cli("reconcile", "--json")
    assert (answer.code, answer.json) == (0, {"schema": "endstop/1", "interrupted": [], "probes": [], "in_doubt": []})
    assert paused


@pytest.mark.parametrize("actor", ["", "a\nb", "x" * 81, "\x1b[31m"])
def test_an_actor_is_a_plain_name(run_cli: Endstop, actor: str) -> None:
    assert run_cli("freeze", "--all", f"--actor={actor}").code == 2
