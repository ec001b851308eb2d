"""Files to reports: several runs, several files, several processes, two policies, folders and patterns, the story."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path

import pytest

from endstop import Limits, Policy, ToolPolicy
from endstop.errors import UsageError
from endstop.replay import replayer
from endstop.replay.observed import observed_guards
from endstop.replay.replayer import ReplaySettings, expand, replay_file, replay_files, spooled
from tests.replay.recordings import NO_CAPS, OPEN, lines, replayed

LOOP = [{"tool": "look", "args": {}, "result": "same"}] * 4


def looping(path: Path, times: int = 4) -> Path:
    return lines(path, [{"tool": "look", "args": {}, "result": "same"}] * times)


def test_several_files_give_their_reports_in_their_order(tmp_path: Path) -> None:
    paths = [looping(tmp_path / f"{number}.jsonl", number) for number in range(1, 6)]
    found = list(replay_files(paths, ReplaySettings(policy=OPEN)))
    assert [report.source for report in found] == [str(path) for path in paths]
    assert [report.runs[0].stop is not None for report in found] == [False, False, True, True, True]


@pytest.mark.slow
def test_several_processes_give_the_same_reports(tmp_path: Path) -> None:
    paths = [looping(tmp_path / f"{number}.jsonl", number) for number in range(1, 5)]
    settings = ReplaySettings(
        policy=Policy(limits=NO_CAPS, tools={"look": ToolPolicy(effect="read")}), against=Policy(), all_guards=True
    )
    assert list(replay_files(paths, settings, processes=2)) == list(replay_files(paths, settings))


def test_two_policies_are_judged_over_the_same_events(tmp_path: Path) -> None:
    lax = Policy(limits=replace(NO_CAPS, same_call_max=4, no_progress_max=9))
    report = replayed(looping(tmp_path / "a.jsonl", 6), against=lax)
    assert report.stop is not None
    assert report.against is not None
    assert report.against.stop is not None
    assert (report.stop.call_index, report.against.stop.call_index) == (2, 4)


def test_caps_are_part_of_a_policy_and_may_be_left_out(tmp_path: Path) -> None:
    path = lines(tmp_path / "a.jsonl", [{"tool": "look", "args": {"n": n}, "result": n} for n in range(30)])
    capped = replayed(path, Policy())
    assert capped.stop is not None
    assert (capped.stop.reason, capped.stop.call_index) == ("step_cap", 20)
    assert replayed(path, Policy(), caps=False).stop is None


def test_one_run_may_be_picked(tmp_path: Path) -> None:
    path = lines(
        tmp_path / "a.jsonl", [{"run": f"r{n % 3}", "tool": "look", "args": {}, "result": n} for n in range(9)]
    )
    report = replayed(path, run_id="r1")
    assert (report.run_id, report.totals.calls) == ("r1", 3)


def test_more_runs_than_there_is_room_for_are_closed_and_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replayer, "RUNS_OPEN_MAX", 3)
    records = [{"run": f"r{n}", "tool": "look", "args": {}, "result": n} for n in (0, 1, 2, 3, 4, 0)]
    found = replay_file(lines(tmp_path / "a.jsonl", records), ReplaySettings(policy=OPEN))
    assert sum(run.totals.calls for run in found.runs) == 6
    assert [skip.reason for skip in found.skipped] == [replayer.CLOSED_FOR_ROOM]


def test_a_file_that_cannot_be_read_is_a_report_with_an_error(tmp_path: Path) -> None:
    found = replay_file(tmp_path / "none.jsonl", ReplaySettings(policy=OPEN))
    assert found.runs == ()
    assert "cannot be read" in str(found.error)


def test_a_format_may_be_named_instead_of_recognised(tmp_path: Path) -> None:
    path = lines(tmp_path / "a.jsonl", [{"tool": "look"}])
    assert replayed(path, format_name="plain").totals.calls == 1
    wrong = replay_file(path, ReplaySettings(policy=OPEN, format_name="nonsense"))
    assert "no trace format" in str(wrong.error)


def test_names_mean_files_folders_and_patterns(tmp_path: Path) -> None:
    for name in ("a.jsonl", "b/c.json", "b/.hidden/d.json", "b/notes.md", "b/e.traj"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("{}")

    def names(*given: str) -> list[str]:
        return [str(path.relative_to(tmp_path)) for path in expand([str(tmp_path / one) for one in given])]

    assert names("a.jsonl") == ["a.jsonl"]
    assert names("b") == ["b/c.json", "b/e.traj"]
    assert names("*.jsonl", "b/*.json", "a.jsonl") == ["a.jsonl", "b/c.json"]
    with pytest.raises(UsageError, match="no file"):
        names("nothing.json")
    with pytest.raises(UsageError, match="no file"):
        names("x*.json")


def test_sub_agent_files_go_with_their_session(tmp_path: Path) -> None:
    inner = tmp_path / "s" / "subagents"
    inner.mkdir(parents=True)
    (tmp_path / "s.jsonl").write_text("{}")
    (inner / "agent-a.jsonl").write_text("{}")
    assert expand([str(tmp_path)]) == (tmp_path / "s.jsonl",)
    assert expand([str(inner)]) == (inner / "agent-a.jsonl",)


def test_standard_input_is_kept_in_a_file_of_its_own(tmp_path: Path) -> None:
    path = spooled(io.BytesIO(b"x" * 3_000_000), folder=str(tmp_path))
    assert path.stat().st_size == 3_000_000
    assert path.parent == tmp_path


def test_a_report_is_json(tmp_path: Path) -> None:
    report = replayed(looping(tmp_path / "a.jsonl"), against=Policy(), all_guards=True, sampled=True)
    found = json.loads(json.dumps(report.to_json()))
    assert found["stop"]["call_index"] == 2
    assert found["stop"]["reason"] == "same_call_repeat"
    assert found["alone"][0]["guard"] == "same_call"
    assert found["against"]["run_id"] == report.run_id


def test_no_argument_and_no_answer_stands_in_a_report(tmp_path: Path) -> None:
    record = {"tool": "look", "args": {"secret": "hunter2"}, "result": "classified"}
    report = replayed(lines(tmp_path / "a.jsonl", [record] * 5), all_guards=True, sampled=True)
    text = json.dumps(report.to_json())
    assert report.stop is not None
    assert "hunter2" not in text
    assert "classified" not in text


# -- The story


def told(tmp_path: Path, records: list[dict[str, object]], policy: Policy = OPEN) -> str:
    return replayed(lines(tmp_path / "a.jsonl", records), policy).story


def step(tool: str, result: object, **args: object) -> dict[str, object]:
    return {"tool": tool, "args": args, "result": result}


def test_the_story_of_a_failing_call_names_what_stood_between(tmp_path: Path) -> None:
    book, think = step("book", "Error: no funds"), [step("think", "", n=n) for n in range(4)]
    records = [step("look", "seats"), book, think[0], book, think[1], book, think[2], book]
    assert told(tmp_path, records) == (
        "book failed the same way 2 times, alternating with think; stopped before call 5; "
        "the recording made 3 more calls, 2 of them this one again"
    )


def test_the_stories_of_cycles(tmp_path: Path) -> None:
    two = [step("a", 1), step("b", 2)] * 3
    assert told(tmp_path, two).startswith("b and a alternated with the same answers; stopped before call 3")
    three = [step("a", 1), step("b", 2), step("c", 3)] * 3
    assert told(tmp_path, three).startswith("a, b and c went round a cycle of 3 calls with the same answers")
    one = [step("sql", "Error 1", q=1), step("sql", "Error 2", q=2)] * 3
    assert told(tmp_path, one).startswith("sql went round 2 calls with the same failures")


@pytest.mark.parametrize(
    ("records", "policy", "expected"),
    [
        ([step("look", n, n=n) for n in range(3)], OPEN, "passed: 3 calls, nothing to stop"),
        ([step("look", n, n=n) for n in range(3)], Policy(limits=Limits(steps_max=2)),
         "the run met steps_max = 2; stopped before call 2; the recording made 1 more call"),
        ([step("read", [], n=n) for n in range(8)], Policy(limits=NO_CAPS, tools={"read": ToolPolicy(effect="read")}),
         "read gave one answer to 8 different requests; stopped before the call after the last"),
        ([{"tool": "make", "args": {"n": n}, "error": "no space"} for n in range(4)], OPEN,
         "make failed the same way 3 times in a row; stopped before call 3; the recording made 1 more call"),
        ([step("look", "x")] * 3, Policy(limits=NO_CAPS, on_trip=("observe",)),
         "same_call_repeat was observed at call 2; nothing was stopped in 3 calls"),
        ([{"tool": "look", "args": {}, "status": "complete", "result": "done"}], OPEN,
         "look reported that the task is complete; stopped before the call after the last"),
    ],
)  # fmt: skip
def test_other_stories(tmp_path: Path, records: list[dict[str, object]], policy: Policy, expected: str) -> None:
    assert told(tmp_path, records, policy) == expected


# -- Shadow mode


def test_what_was_only_observed_is_summed_up_by_guard(tmp_path: Path) -> None:
    records = [
        *({"run": "a", "tool": "look", "args": {}, "result": "x"} for _ in range(5)),
        *({"run": "b", "tool": "look", "args": {"n": n}, "result": n} for n in range(5)),
        *({"run": "c", "tool": "ab"[n % 2], "args": {}, "result": n % 2} for n in range(6)),
    ]
    policy = Policy(limits=NO_CAPS, on_trip=("observe",))
    found = replay_file(lines(tmp_path / "a.jsonl", records), ReplaySettings(policy=policy))
    assert all(run.stop is None for run in found.runs)
    summed = {one.guard: (one.runs, one.calls_after, one.example) for one in observed_guards(found.runs)}
    assert summed["same_call"] == (1, 3, "a")
    assert summed["short_cycle"] == (1, 3, "c")
