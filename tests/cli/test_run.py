"""`endstop run`: one run a key, exit codes by how it ended, data apart from noise."""

from __future__ import annotations

from pathlib import Path

import pytest

import endstop as es
from endstop.core.envelope import Envelope
from endstop.core.reasons import ENDINGS, Reason
from endstop.loop.agent import AgentLoop, LoopResult
from tests.cli.conftest import Endstop, await_state, call_turn, finished, start, text_turn, write_task

DONE = text_turn("x is there.")


def test_a_task_that_completes_ends_with_0_and_reports_on_stdout(run_cli: Endstop, folder: Path) -> None:
    answer = run_cli("run", write_task(folder, call_turn("look", q="x"), DONE))
    assert answer.code == 0
    assert "ended   complete" in answer.out
    assert "output  x is there." in answer.out
    assert "turns   2 of 5" in answer.out
    assert "look  result  progress" in answer.err


def test_json_goes_to_stdout_alone_also_when_a_tool_prints(run_process: Endstop, folder: Path) -> None:
    answer = run_process("run", write_task(folder, call_turn("look", q="x"), DONE), "--json", "--label", "team=seo")
    body = answer.json
    assert body["schema"] == "endstop/1"
    assert (body["success"], body["started"], body["exit_code"], body["output"]) == (True, True, 0, "x is there.")
    assert (body["turns"], body["total_tokens"], body["terminal_reason"]) == (2, 100, "complete")
    assert body["run"]["labels"] == {"team": "seo"}
    assert body["run"]["envelope"] == body["envelope"]
    assert "a tool prints this" in answer.err


@pytest.mark.parametrize(
    ("turns", "more", "code", "reason"),
    [
        ((call_turn("look", q="x"),), "", 3, "same_call_repeat"),
        (tuple(call_turn("look", q=str(n)) for n in range(9)), "[limits]\nturns_max = 3\n", 3, "turn_ceiling"),
        ((call_turn("unpermitted"),), "", 3, "permission_denied"),
        ((call_turn("ask_person"),), "", 5, "human_required"),
        (({"fault": {"class": "auth"}}, DONE), "", 1, "provider_fault"),
    ],
)
def test_the_exit_code_is_that_of_the_terminal_reason(
    run_cli: Endstop, folder: Path, turns: tuple[dict[str, object], ...], more: str, code: int, reason: str
) -> None:
    answer = run_cli("run", write_task(folder, *turns, more=more), "--json")
    assert (answer.code, answer.json["exit_code"], answer.json["terminal_reason"]) == (code, code, reason)
    assert answer.json["success"] is False


def test_a_stop_says_which_guard_at_which_figure_and_how_to_go_on(run_cli: Endstop, folder: Path) -> None:
    turns = [call_turn("look", q=str(number)) for number in range(9)]
    answer = run_cli("run", write_task(folder, *turns, more="[limits]\nturns_max = 3\n"), "--run-id", "r1")
    assert "turn_ceiling" in answer.out
    assert "turns_max = 3" in answer.out
    assert "endstop resume r1 --change limit:turns_max=6" in answer.out


def test_the_same_key_never_starts_a_second_run(run_cli: Endstop, folder: Path) -> None:
    mark = folder / "mark"
    task = write_task(folder, call_turn("touch", path=str(mark)), DONE, key="weekly-{iso_week}")
    first = run_cli("run", task, "--json")
    second = run_cli("run", task, "--json")
    assert first.json["run_id"] == second.json["run_id"]
    assert (first.json["started"], second.json["started"]) == (True, False)
    assert second.json["terminal_reason"] == "complete"
    assert (first.code, second.code) == (0, 0)
    assert mark.read_text() == "x"
    assert "nothing was started" in second.err


def test_a_key_whose_run_was_stopped_ends_with_that_code_again(run_cli: Endstop, folder: Path) -> None:
    task = write_task(folder, call_turn("look", q="x"), key="k-{date}")
    assert run_cli("run", task).code == 3
    assert run_cli("run", task).code == 3
    assert len(run_cli("ps", "--all", "--json").json["runs"]) == 1


def test_a_run_that_a_living_process_works_on_is_not_started(run_cli: Endstop, folder: Path) -> None:
    task = write_task(folder, text_turn("late", delay_ms=60_000))
    process = start("run", task, "--run-id", "busy")
    try:
        await_state("busy", "running")
        answer = run_cli("run", task, "--run-id", "busy", "--json")
        assert (answer.code, answer.json["started"], answer.json["state"]) == (0, False, "running")
    finally:
        process.terminate()
        ended = finished(process)
    assert ended.code == 4


@pytest.mark.slow
def test_of_two_processes_with_one_key_at_the_same_moment_one_works(folder: Path) -> None:
    """Two starts at once would both find nobody inside; the claim lets one of them go first."""
    mark = folder / "mark"
    task = write_task(folder, call_turn("touch", path=str(mark)), text_turn("done", delay_ms=1_500), key="once-{date}")
    processes = [start("run", task, "--json") for _ in range(4)]
    answers = [finished(process) for process in processes]
    assert [answer.code for answer in answers] == [0, 0, 0, 0]
    started = [answer for answer in answers if answer.json["started"]]
    assert len(started) == 1
    assert mark.read_text() == "x"


def test_a_stored_spec_is_taken_and_its_run_is_the_one_that_starts(run_cli: Endstop, folder: Path) -> None:
    run_id = run_cli("spec", "--what-it-does", "a", "--what-it-does-not", "b", "--done-looks-like", "c").out.strip()
    task = write_task(folder, DONE, spec=False)
    answer = run_cli("run", task, "--spec", run_id, "--json")
    assert (answer.code, answer.json["run_id"]) == (0, run_id)
    assert answer.json["run"]["spec"]["what_it_does"] == "a"
    again = run_cli("run", task, "--spec", run_id, "--json")
    assert again.json["run_id"] != run_id
    assert again.json["run"]["spec"] == answer.json["run"]["spec"]


def test_without_any_spec_and_without_a_terminal_it_ends_with_2(run_cli: Endstop, folder: Path) -> None:
    answer = run_cli("run", write_task(folder, DONE, spec=False))
    assert (answer.code, answer.out) == (2, "")
    assert "--spec RUN" in answer.err
    assert run_cli("ps", "--all", "--json").json["runs"] == []


def test_without_any_spec_a_person_is_asked(run_cli: Endstop, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("endstop.cli.run_task.can_ask", lambda: True)
    answer = run_cli("run", write_task(folder, DONE, spec=False), answers="a\nb\nc\n")
    assert answer.code == 0
    assert "What does done look like?" in answer.err


def test_an_unknown_stored_spec_ends_with_8(run_cli: Endstop, folder: Path) -> None:
    answer = run_cli("run", write_task(folder, DONE), "--spec", "nowhere")
    assert (answer.code, answer.out) == (8, "")


@pytest.mark.parametrize(
    ("change", "code", "said"),
    [
        (("task = ", "tusk = "), 2, "did you mean 'task'?"),
        (("tests.cli.task_tools:look", "tests.cli.task_tools:nope"), 2, "has no function 'nope'"),
        (("scripted:task.jsonl", "scripted:nowhere.jsonl"), 2, "nowhere.jsonl"),
        (("scripted:task.jsonl", "nobody:model"), 2, "nobody"),
        (('name = "scripted', 'api_key_env = "NO_SUCH_KEY"\nname = "scripted'), 2, "NO_SUCH_KEY"),
        (('name = "scripted', 'options = { a = 1 }\nname = "scripted'), 2, "options"),
    ],
)
def test_what_is_wrong_with_the_files_is_told_before_a_store_is_made(
    run_cli: Endstop, folder: Path, change: tuple[str, str], code: int, said: str
) -> None:
    task = folder / write_task(folder, DONE)
    task.write_text(task.read_text().replace(*change))
    answer = run_cli("run", "task.toml")
    assert (answer.code, answer.out) == (code, "")
    assert said in answer.err
    assert not (folder / ".endstop").exists()


def test_a_key_that_makes_no_sound_id_is_refused(run_cli: Endstop, folder: Path) -> None:
    answer = run_cli("run", write_task(folder, DONE, key="week {iso_week}"))
    assert answer.code == 2
    assert "run.key" in answer.err


def test_another_model_may_be_named(run_cli: Endstop, folder: Path) -> None:
    task = write_task(folder, call_turn("look", q="x"))
    write_task(folder, text_turn("from the other"), name="other")
    assert run_cli("run", task, "--model", "scripted:other.jsonl", "--json").json["output"] == "from the other"


def test_limits_from_the_environment_hold(run_cli: Endstop, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ENDSTOP__LIMITS__STEPS_MAX", "1")
    answer = run_cli("run", write_task(folder, call_turn("look", q="x"), call_turn("look", "c2", q="y")), "--json")
    assert answer.json["terminal_reason"] == "step_cap"


def test_quiet_keeps_stderr_empty(run_cli: Endstop, folder: Path) -> None:
    assert run_cli("run", write_task(folder, DONE), "-q").err == ""


def test_a_killed_label_refuses_a_new_run(run_cli: Endstop, folder: Path) -> None:
    assert run_cli("kill", "--label", "team=seo", "--reason", "incident", "--yes").code == 0
    task = write_task(folder, DONE)
    answer = run_cli("run", task, "--label", "team=seo", "--json")
    assert (answer.code, answer.json["terminal_reason"]) == (4, "kill_switch")
    assert run_cli("run", task).code == 0


def test_the_memory_store_serves_a_single_run(run_cli: Endstop, folder: Path) -> None:
    assert run_cli("run", write_task(folder, DONE), "--store", "memory:").code == 0
    assert not (folder / ".endstop").exists()


def test_another_policy_for_a_run_that_exists_is_refused(run_cli: Endstop, folder: Path) -> None:
    task = write_task(folder, call_turn("ask_person"))
    assert run_cli("run", task, "--run-id", "r").code == 5
    assert run_cli("resume", "r", "--change", "authorisation", "--reason", "granted").code == 0
    changed = write_task(folder, DONE, name="other", more="[limits]\nsteps_max = 99\n")
    answer = run_cli("run", changed, "--run-id", "r")
    assert (answer.code, answer.out) == (2, "")
    assert "another policy" in answer.err


def test_the_python_side_sees_the_same_run(run_cli: Endstop, folder: Path) -> None:
    body = run_cli("run", write_task(folder, DONE), "--json").json
    with es.open(".endstop/endstop.db") as guard:
        assert guard.show(body["run_id"]).output == "x is there."


def test_a_store_that_cannot_be_opened_starts_nothing_and_ends_with_1(run_cli: Endstop, folder: Path) -> None:
    mark = folder / "mark"
    (folder / "state.db").mkdir()
    answer = run_cli("run", write_task(folder, call_turn("touch", path=str(mark)), DONE), "--store", "state.db")
    assert (answer.code, answer.out) == (1, "")
    assert not mark.exists()


def _ending(reason: Reason) -> Envelope:
    action = ENDINGS[reason].next_action
    return Envelope(
        run_id="r", generation=1, terminal_reason=reason, message="no room left", next_allowed_action=action
    )


def test_a_ledger_that_fails_in_mid_run_is_told_without_asking_the_store(
    run_cli: Endstop, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The loop's own result is all there is: its end is not in the store."""
    reason = Reason.LEDGER_UNAVAILABLE
    result = LoopResult(
        success=False, run_id="r", output=None, turns=0, total_tokens=0, spend_nanos=0, terminal_reason=reason,
        envelope=_ending(reason),
    )  # fmt: skip
    monkeypatch.setattr(AgentLoop, "run", lambda *_, **__: result)
    answer = run_cli("run", write_task(folder, DONE), "--run-id", "r", "--json")
    assert (answer.code, answer.json["terminal_reason"], answer.json["run"]) == (1, "ledger_unavailable", None)
    assert "no room left" in answer.err


def test_a_run_that_ended_between_the_look_and_the_start_is_reported(
    run_cli: Endstop, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stopped_first(loop: AgentLoop, task: str, spec: es.Spec, *, run_id: str, **_: object) -> LoopResult:
        with loop._guard.run(spec, run_id=run_id):
            loop._guard.stop(run_id, reason="faster")
        pytest.fail("a stopped run is left without a word")

    monkeypatch.setattr(AgentLoop, "run", stopped_first)
    answer = run_cli("run", write_task(folder, DONE), "--run-id", "r", "--json")
    assert (answer.code, answer.json["envelope"]["message"]) == (4, "faster")


def test_a_fault_of_the_loop_is_an_internal_error_and_no_result(
    run_cli: Endstop, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object, **__: object) -> LoopResult:
        raise ZeroDivisionError

    monkeypatch.setattr(AgentLoop, "run", broken)
    answer = run_cli("run", write_task(folder, DONE), "--json")
    assert (answer.code, answer.out) == (1, "")
    assert "ZeroDivisionError" in answer.err
