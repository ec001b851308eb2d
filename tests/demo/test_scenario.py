"""The demonstration really happens: its claims are checked here against its own files, and it leaves nothing behind."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import endstop as es
from endstop.demo import agent, scenario
from endstop.demo.crm import recorded_writes
from endstop.demo.processes import DemoFailedError, Place, crm_process, wait_for_write
from endstop.runtime.clock import SystemClock

MAIN = "import sys; from endstop.demo.scenario import main; sys.exit(main(keep=None, json={json}, plain=False))"
SECONDS_MAX = 15
PROC = Path("/proc")


@contextmanager
def demo(tmp_path: Path, *, as_json: bool = False) -> Iterator[subprocess.Popen[str]]:
    """The demonstration as a process whose temporary folder, and so every process of it, carries this test's path."""
    with subprocess.Popen(
        [sys.executable, "-c", MAIN.format(json=as_json)],
        env={**os.environ, "TMPDIR": str(tmp_path)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def processes_of(tmp_path: Path) -> list[str]:
    """The command lines of all processes that name a file below this test's folder."""
    if not PROC.is_dir():
        pytest.skip("NOT TESTED: this system does not show its processes under /proc")
    found = []
    for entry in PROC.glob("[0-9]*/cmdline"):
        try:
            command = entry.read_bytes().replace(b"\0", b" ").decode("utf-8", "replace")
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            continue
        if str(tmp_path) in command:
            found.append(command)
    return found


def until_none_is_left(tmp_path: Path) -> list[str]:
    end = time.monotonic() + SECONDS_MAX
    while (left := processes_of(tmp_path)) and time.monotonic() < end:
        time.sleep(0.02)
    return left


# --- the whole of it -------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_demonstration_holds_is_quick_and_leaves_nothing_behind(tmp_path: Path) -> None:
    began = time.monotonic()
    with demo(tmp_path) as process:
        told, complaints = process.communicate(timeout=60)
        took = time.monotonic() - began
    assert complaints == ""
    assert process.returncode == 0
    assert took < SECONDS_MAX
    assert processes_of(tmp_path) == []
    assert list(tmp_path.iterdir()) == []
    assert told.count("✓") == 8
    assert "✗" not in told
    assert "\x1b" not in told, "piped text is plain"
    assert re.search(r"writes in the CRM +8 +1 +1\n", told)
    assert re.search(r"ended by +iteration cap +already_committed +outcome_unknown\n", told)
    assert "8 of 8 checks held" in told
    assert len(told.splitlines()) <= 50


@pytest.mark.slow
def test_a_stream_without_ticks_gets_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONIOENCODING", "ascii")
    with demo(tmp_path) as process:
        told, complaints = process.communicate(timeout=60)
    assert (process.returncode, complaints) == (0, "")
    assert told.count("\n  ok ") == 8


@pytest.mark.slow
def test_a_reader_that_has_seen_enough_leaves_nothing_behind(tmp_path: Path) -> None:
    with demo(tmp_path) as process:
        assert process.stdout is not None
        process.stdout.readline()
        process.stdout.close()
        process.wait(60)
    assert processes_of(tmp_path) == []
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_as_json_it_gives_all_facts_and_nothing_else(tmp_path: Path) -> None:
    with demo(tmp_path, as_json=True) as process:
        told, complaints = process.communicate(timeout=60)
    facts = json.loads(told)
    assert (process.returncode, complaints, facts["held"]) == (0, "", True)
    assert [facts[act]["writes"] for act in ("without_guard", "with_guard", "after_kill")] == [8, 1, 1]
    assert [facts[act]["model_turns"] for act in ("without_guard", "with_guard")] == [8, 2]
    stopped, killed = facts["with_guard"], facts["after_kill"]
    assert stopped["envelope"]["terminal_reason"] == "already_committed"
    assert stopped["envelope"]["blocked_call"]["args"] == {"contact_id": "str[6]", "stage": "str[3]", "version": "int"}
    assert [row["breach_reason"] for row in stopped["ledger"]][-2:] == ["already_committed"] * 2
    assert killed["killed"]["signal"] == "SIGKILL"
    assert killed["state_after_kill"] == "interrupted"
    assert [operation["state"] for operation in killed["operations"]] == ["UNKNOWN"]
    assert killed["answer"]["reason"] == "outcome_unknown"
    assert killed["answer"]["next_allowed_action"] == "human_review"
    assert killed["envelope"]["in_doubt"] == [killed["operations"][0]["operation_id"]]
    assert all(check["held"] for act in (facts["without_guard"], stopped, killed) for check in act["checks"])


@pytest.mark.slow
def test_a_kept_folder_holds_what_was_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "kept" / "demo"
    assert scenario.main(keep=folder, json=True, plain=False) == 0
    facts = json.loads(capsys.readouterr().out)
    counts = [len(recorded_writes(folder / "crm.db", contact)) for contact in scenario.CONTACTS]
    assert counts == [8, 1, 1]
    policy = es.load_policy(folder / "endstop.toml")
    with es.open(f"sqlite:///{folder}/endstop.db", policy=policy) as guard:
        assert guard.show(facts["with_guard"]["run_id"]).state == "stopped"
        [doubtful] = guard.operations(facts["after_kill"]["run_id"])
        assert (doubtful.state, doubtful.tool) == ("UNKNOWN", agent.TOOL)
    assert processes_of(tmp_path) == []


def test_a_folder_that_holds_something_is_refused_and_left_alone(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(es.UsageError, match="not empty"):
        scenario.main(keep=tmp_path, json=False, plain=True)
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


# --- a check that cannot fail is no check ----------------------------------------------------------------------------


@pytest.mark.slow
def test_with_a_guard_that_takes_the_write_for_a_read_the_checks_fail(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    sabotaged = f'[limits]\nturns_max = {agent.ITERATIONS_MAX}\n\n[tools."{agent.TOOL}"]\neffect = "read"\n'
    monkeypatch.setattr(agent, "POLICY_TOML", sabotaged)
    assert scenario.main(keep=None, json=False, plain=True) == 1
    told = capsys.readouterr().out
    assert "✗ the CRM's own table holds 1 write (expected 1, found 8)" in told
    assert "✗ the next worker's same update was refused as outcome_unknown" in told
    assert re.search(r"✗ the CRM's own table still holds 1 write \(expected 1, found [2-9]\)", told)
    assert "checks held" in told


@pytest.mark.slow
def test_without_repetition_the_first_act_fails(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(agent, "run_without_guard", lambda crm_url, contact_id: 0)
    assert scenario.main(keep=None, json=False, plain=True) == 1
    assert "✗ the CRM's own table holds 8 writes of one update (expected 8, found 0)" in capsys.readouterr().out


# --- cut short -------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, -signal.SIGINT), (signal.SIGTERM, 143)])
def test_cut_short_it_ends_its_processes_and_removes_its_folder(tmp_path: Path, number: int, code: int) -> None:
    with demo(tmp_path) as process:
        assert process.stdout is not None
        assert process.stdout.readline().startswith("A real CRM")
        assert processes_of(tmp_path), "the CRM runs by now"
        process.send_signal(number)
        process.communicate(timeout=60)
    assert process.returncode == code
    assert processes_of(tmp_path) == []
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_killed_itself_it_leaves_no_process_running(tmp_path: Path) -> None:
    with demo(tmp_path) as process:
        assert process.stdout is not None
        process.stdout.readline()
        assert processes_of(tmp_path)
        process.kill()
        process.wait(60)
    assert until_none_is_left(tmp_path) == []


@pytest.mark.slow
def test_an_agent_that_dies_before_it_writes_is_named_and_no_act_is_claimed(tmp_path: Path) -> None:
    place = Place(folder=tmp_path)
    with crm_process(place):
        place.log.write_text("first line\nwhat went wrong\n")
        with (
            subprocess.Popen([sys.executable, "-c", "pass"]) as dead,
            pytest.raises(DemoFailedError, match="what went wrong"),
        ):
            wait_for_write(place, "C-1", dead, SystemClock())
    assert processes_of(tmp_path) == []
