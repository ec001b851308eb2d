"""A signal to `endstop run`, or its time-out, is an operator's stop: the envelope is there before the process ends."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from subprocess import Popen

import pytest

from tests.cli.conftest import Endstop, await_state, call_turn, finished, start, text_turn, write_task

pytestmark = pytest.mark.slow

LATE = text_turn("late", delay_ms=120_000)


def _asleep(folder: Path, *args: str) -> Popen[str]:
    """A process whose model will not answer within the test."""
    process = start("run", write_task(folder, LATE), "--run-id", "r", *args)
    await_state("r", "running")
    return process


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 4), (signal.SIGHUP, 4)], ids=str)
def test_a_signal_stops_the_run_and_leaves_its_envelope(
    folder: Path, run_cli: Endstop, number: signal.Signals, code: int
) -> None:
    process = _asleep(folder, "--json")
    process.send_signal(number)
    answer = finished(process)
    assert (answer.code, answer.json["exit_code"]) == (code, code)
    assert answer.json["envelope"]["terminal_reason"] == "operator_cancelled_loop"
    assert number.name in answer.json["envelope"]["message"]
    stored = run_cli("show", "r", "--json").json
    assert (stored["state"], stored["envelope"]) == ("stopped", answer.json["envelope"])


def test_a_time_out_stops_the_run_and_ends_with_124(folder: Path) -> None:
    answer = finished(start("run", write_task(folder, LATE), "--timeout", "1", "--json"))
    assert (answer.code, answer.json["terminal_reason"]) == (124, "operator_cancelled_loop")
    assert "--timeout of 1 s ran out" in answer.json["envelope"]["message"]


def test_a_time_out_does_not_wait_for_ever_for_a_tool_that_hangs(folder: Path, run_cli: Endstop) -> None:
    task = write_task(folder, call_turn("dawdle", seconds=100))
    answer = finished(start("run", task, "--timeout", "1", "--run-id", "r", "--json"), seconds=25)
    assert (answer.code, answer.json["exit_code"], answer.json["state"]) == (124, 124, "stopped")
    assert run_cli("reconcile").code == 10


def test_a_run_that_ends_in_time_does_not_end_with_124(folder: Path) -> None:
    assert finished(start("run", write_task(folder, text_turn("done")), "--timeout", "60")).code == 0


def test_a_second_interrupt_leaves_at_once_and_the_write_in_flight_is_in_doubt(folder: Path, run_cli: Endstop) -> None:
    process = start("run", write_task(folder, call_turn("dawdle", seconds=60)), "--run-id", "r", "--json")
    await_state("r", "running", in_flight=1)
    process.send_signal(signal.SIGINT)
    await_state("r", "stopped")
    process.send_signal(signal.SIGINT)
    answer = finished(process, seconds=10)
    assert answer.code == 130
    assert json.loads(answer.out)["envelope"]["terminal_reason"] == "operator_cancelled_loop"
    assert "left with calls in flight" in answer.err
    doubt = run_cli("reconcile", "--json")
    assert doubt.code == 10
    assert [operation["tool"] for operation in doubt.json["in_doubt"]] == ["dawdle"]


def test_a_stop_from_another_process_ends_it_with_4(folder: Path, run_cli: Endstop) -> None:
    process = _asleep(folder, "--json")
    stopped = run_cli("stop", "r", "--reason", "enough", "--wait")
    assert stopped.code == 0
    assert "requested: r, operator_cancelled_loop" in stopped.out
    assert "acknowledged" in stopped.out
    answer = finished(process)
    assert (answer.code, answer.json["envelope"]["message"]) == (4, "enough")


def test_a_killed_process_leaves_an_interrupted_run_that_resumes_with_its_counters(
    folder: Path, run_cli: Endstop
) -> None:
    mark = folder / "mark"
    turns = (call_turn("touch", path=str(mark)), LATE)
    process = start("run", write_task(folder, *turns), "--run-id", "r")
    # The second turn has left, so the write of the first is settled.
    await_state("r", "running", turns=2)
    process.kill()
    assert finished(process).code == -signal.SIGKILL
    [run] = run_cli("ps", "--json").json["runs"]
    assert (run["state"], run["envelope"]["terminal_reason"]) == ("interrupted", "crashed")
    assert run_cli("reconcile", "--json").json["interrupted"] == ["r"]
    write_task(folder, call_turn("touch", path=str(mark)), text_turn("done"))
    answer = run_cli("resume", "r", "--change", "cursor", "--reason", "restarted", "--task", "task.toml", "--json")
    assert (answer.code, answer.json["terminal_reason"]) == (0, "complete")
    assert answer.json["turns"] > run["counters"]["turns"]
    assert mark.read_text() == "x"
