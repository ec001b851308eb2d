"""ps, show, ops and ledger: what happened, as tables and as JSON."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.conftest import Endstop, call_turn, finished, process_environment, start, text_turn, write_task

DONE = text_turn("x is there.")


@pytest.fixture
def two_runs(run_cli: Endstop, folder: Path) -> None:
    """One that was stopped as a loop, one that is complete after a write."""
    looping = write_task(folder, call_turn("look", q="x"), name="looping")
    writing = write_task(folder, call_turn("touch", path=str(folder / "mark")), DONE, name="writing")
    assert run_cli("run", looping, "--run-id", "looping-1", "--label", "team=seo").code == 3
    assert run_cli("run", writing, "--run-id", "writing-1").code == 0


# -- ps


def test_without_a_store_there_is_nothing_and_none_is_made(run_cli: Endstop, folder: Path) -> None:
    answer = run_cli("ps", "--json")
    assert (answer.code, answer.json) == (0, {"schema": "endstop/1", "runs": []})
    assert "no store" in answer.err
    assert not (folder / ".endstop").exists()


@pytest.mark.usefixtures("two_runs")
def test_ps_lists_ended_runs_only_when_asked(run_cli: Endstop) -> None:
    assert run_cli("ps").out == ""
    lines = run_cli("ps", "--all").out.splitlines()
    assert lines[0].split() == ["RUN", "STATE", "AGENT", "TURNS", "STEPS", "TOKENS", "SPEND", "AGE", "ENDED", "BY"]
    assert [line.split()[:2] for line in lines[1:]] == [["writing-1", "complete"], ["looping-1", "stopped"]]
    assert lines[2].endswith("same_call_repeat")


@pytest.mark.usefixtures("two_runs")
@pytest.mark.parametrize(
    ("args", "found"),
    [
        (("--all",), ["writing-1", "looping-1"]),
        (("--all", "--limit", "1"), ["writing-1"]),
        (("--state", "stopped"), ["looping-1"]),
        (("--state", "stopped", "--state", "complete"), ["writing-1", "looping-1"]),
        (("--all", "--label", "team=seo"), ["looping-1"]),
        (("--all", "--label", "team=other"), []),
    ],
)
def test_ps_filters(run_cli: Endstop, args: tuple[str, ...], found: list[str]) -> None:
    assert [run["run_id"] for run in run_cli("ps", "--json", *args).json["runs"]] == found


@pytest.mark.usefixtures("two_runs")
def test_the_limit_counts_after_the_filter(run_cli: Endstop) -> None:
    assert [run["run_id"] for run in run_cli("ps", "--state", "stopped", "--limit", "1", "--json").json["runs"]] == [
        "looping-1"
    ]


def test_watching_without_a_terminal_needs_json(run_cli: Endstop) -> None:
    answer = run_cli("ps", "--watch")
    assert (answer.code, answer.out) == (2, "")
    assert "--json" in answer.err


@pytest.mark.slow
@pytest.mark.usefixtures("two_runs")
def test_watching_as_json_gives_a_line_and_ends_with_130_on_interrupt() -> None:
    process = start("ps", "--all", "--watch", "--json")
    assert process.stdout is not None
    assert '"run_id":"writing-1"' in process.stdout.readline()
    process.send_signal(2)
    assert finished(process).code == 130


# -- names of runs


@pytest.mark.usefixtures("two_runs")
@pytest.mark.parametrize(
    ("named", "found"), [("last", "writing-1"), ("loopin", "looping-1"), ("looping-1", "looping-1")]
)
def test_a_run_is_found_by_its_id_its_first_letters_or_as_the_last(run_cli: Endstop, named: str, found: str) -> None:
    assert run_cli("show", named, "--json").json["run_id"] == found


@pytest.mark.usefixtures("two_runs")
@pytest.mark.parametrize(("named", "code"), [("loop", 8), ("nothing-like-it", 8), ("", 8)])
def test_too_few_letters_or_wrong_ones_find_nothing(run_cli: Endstop, named: str, code: int) -> None:
    answer = run_cli("show", named)
    assert (answer.code, answer.out) == (code, "")


def test_letters_that_fit_two_runs_name_both(run_cli: Endstop, folder: Path) -> None:
    task = write_task(folder, DONE)
    for run_id in ("same-head-1", "same-head-2"):
        assert run_cli("run", task, "--run-id", run_id).code == 0
    answer = run_cli("show", "same-head")
    assert answer.code == 2
    assert "same-head-1" in answer.err
    assert "same-head-2" in answer.err


# -- show


@pytest.mark.usefixtures("two_runs")
def test_show_tells_the_timeline_with_the_guard_and_the_end_in_words(run_cli: Endstop) -> None:
    out = run_cli("show", "looping-1").out
    lines = [line.split() for line in out.splitlines()]
    head = next(line for line in lines if line and line[0] == "TIME")
    assert head == ["TIME", "TURN", "STEP", "AGENT", "TOOL", "DECISION", "GUARD", "WHY"]
    calls = [line for line in lines if len(line) > 5 and line[4] == "look"]
    assert [call[5] for call in calls] == ["execute", "execute", "stop"]
    assert calls[2][6:8] == ["same_call", "same_call_repeat,"]
    assert "labels" in out
    assert "team=seo" in out
    assert "refused call  look(q: str[1])" in out
    assert "endstop resume looping-1 --change strategy" in out


@pytest.mark.usefixtures("two_runs")
def test_show_lists_side_effects(run_cli: Endstop) -> None:
    assert "touch: COMMITTED (op_" in run_cli("show", "writing-1").out


@pytest.mark.usefixtures("two_runs")
def test_show_as_json_is_the_run_and_with_entries_its_ledger(run_cli: Endstop) -> None:
    body = run_cli("show", "looping-1", "--json").json
    assert next(iter(body)) == "schema"
    assert "ledger_entries" not in body
    entries = run_cli("show", "looping-1", "--json", "--entries").json["ledger_entries"]
    assert len(entries) == body["entries"]
    assert [entry["entry"]["type"] for entry in entries][:3] == ["run_open", "turn_intent", "turn"]
    assert [entry["index"] for entry in entries] == list(range(1, len(entries) + 1))


# -- ops


@pytest.mark.usefixtures("two_runs")
def test_ops_lists_operations_and_shows_one_by_its_first_letters(run_cli: Endstop) -> None:
    [operation] = run_cli("ops", "--json").json["operations"]
    assert (operation["tool"], operation["state"], operation["run_id"]) == ("touch", "COMMITTED", "writing-1")
    shown = run_cli("ops", operation["operation_id"][:12], "--json").json
    assert shown == {"schema": "endstop/1", **operation}
    assert operation["operation_id"] in run_cli("ops", "writing-1").out
    assert run_cli("ops", "looping-1", "--json").json["operations"] == []
    assert run_cli("ops", "--state", "UNKNOWN", "--json").json["operations"] == []
    assert "key digest" in run_cli("ops", operation["operation_id"]).out


def test_an_operation_that_is_not_there_ends_with_8(run_cli: Endstop) -> None:
    assert run_cli("ops", "op_0000000000").code == 8


# -- ledger


@pytest.mark.usefixtures("two_runs")
def test_the_ledger_has_nine_columns(run_cli: Endstop) -> None:
    head = run_cli("ledger", "show").out.splitlines()[0].split()
    assert [name.lower() for name in head] == [
        "session_id", "turn_count", "state_origin", "input_hash", "token_delta", "execution_time_ms", "pass_fail",
        "breach_reason", "created_at",
    ]  # fmt: skip
    rows = run_cli("ledger", "show", "--run", "looping-1", "--json").json["rows"]
    assert {row["session_id"] for row in rows} == {"looping-1"}
    assert rows[-1]["breach_reason"] == "same_call_repeat"


@pytest.mark.usefixtures("two_runs")
def test_the_entries_are_shown_as_they_are_stored(run_cli: Endstop) -> None:
    body = run_cli("ledger", "show", "--entries", "--after", "0", "--limit", "3", "--json").json
    assert [entry["index"] for entry in body["entries"]] == [1, 2, 3]
    lines = run_cli("ledger", "show", "--entries").out.splitlines()
    assert all(line.startswith("{") for line in lines)


@pytest.mark.usefixtures("two_runs")
def test_the_tail_is_the_last_entries_in_order(run_cli: Endstop) -> None:
    lines = run_cli("ledger", "tail", "-n", "2").out.splitlines()
    assert len(lines) == 2
    assert lines[1].endswith("complete")
    assert run_cli("ledger", "tail", "-n", "0").out == ""
    assert len(run_cli("ledger", "tail", "-n", "3", "--run", "looping-1", "--json").out.splitlines()) == 3


@pytest.mark.slow
@pytest.mark.usefixtures("two_runs")
def test_following_shows_what_is_written_later_until_interrupted(run_cli: Endstop, folder: Path) -> None:
    process = start("ledger", "tail", "-n", "1", "-f", "--json")
    assert process.stdout is not None
    assert '"type":"complete"' in process.stdout.readline()
    assert run_cli("run", write_task(folder, DONE, name="third"), "--run-id", "third").code == 0
    seen = [process.stdout.readline() for _ in range(4)]
    assert '"type":"run_open"' in seen[0]
    assert '"type":"complete"' in seen[3]
    process.send_signal(2)
    assert finished(process).code == 130


@pytest.mark.slow
@pytest.mark.usefixtures("two_runs")
def test_a_reader_that_leaves_early_is_no_error() -> None:
    import subprocess
    import sys

    done = subprocess.run(
        ["bash", "-o", "pipefail", "-c", f"{sys.executable} -m endstop ledger show | head -n 1"],
        capture_output=True, text=True, check=False, env=process_environment(),
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("SESSION_ID")
