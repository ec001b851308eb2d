"""Every format by a small recording made for it: recognised by content, read call by call, tokens and times kept."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from endstop import ErrorClass
from endstop.replay.recognise import format_named, formats, recognise
from endstop.replay.source import Source
from endstop.replay.trace import TraceCall, TraceResult, TraceTurn
from tests.replay.recordings import Read, document, lines, read, replayed
from tests.replay.samples import CALLS, SAMPLES, Sample, inspect_log, langfuse, langsmith, traj


def _settled(calls: list[tuple[str, object, object]]) -> list[tuple[str, object, object]]:
    """Argument text as the object it holds, where the expectation names objects."""
    return [(tool, json.loads(args) if isinstance(args, str) else args, value) for tool, args, value in calls]


@pytest.mark.parametrize("sample", SAMPLES, ids=lambda sample: sample.make.__name__.strip("_"))
def test_a_recording_is_recognised_and_read(sample: Sample, tmp_path: Path) -> None:
    found: Read = read(sample.make(tmp_path / "recording"))
    assert found.format == sample.name
    calls = found.calls()
    assert (calls if sample.calls is not None else _settled(calls)) == (sample.calls or CALLS)
    assert (found.turns(), found.people(), found.tokens()) == (sample.turns, sample.people, sample.tokens)
    assert found.skipped == {}


@pytest.mark.parametrize("sample", SAMPLES, ids=lambda sample: sample.make.__name__.strip("_"))
def test_results_find_their_calls_and_nothing_is_stopped(sample: Sample, tmp_path: Path) -> None:
    report = replayed(sample.make(tmp_path / "recording"))
    assert report.unanswered == 0
    assert report.stop is None
    assert report.totals.calls == len(sample.calls or CALLS)


def test_every_format_has_a_sample_or_tests_of_its_own() -> None:
    elsewhere = {
        "ag2_chat", "claude_code", "codex", "endstop", "intercode", "openai_chat", "react_text", "toolbench",
    }  # fmt: skip
    assert {sample.name for sample in SAMPLES} | elsewhere == {known.name for known in formats()}


def test_names_of_formats_are_unique_and_an_unknown_one_is_refused() -> None:
    names = [known.name for known in formats()]
    assert len(set(names)) == len(names)
    with pytest.raises(Exception, match="no trace format 'nonsense'"):
        format_named("nonsense")


@pytest.mark.parametrize("text", ["", "hello\nworld\n", "{}", "[]", "[1, 2]", '{"a": 1}\n{"b": 2}\n', "%PDF-1.4 …"])
def test_what_is_no_recording_is_taken_for_none(tmp_path: Path, text: str) -> None:
    path = tmp_path / "x"
    path.write_text(text)
    assert recognise(Source(path)) is None
    assert read(path).skipped == {"source in no known format": 1}


def test_times_and_prices_are_kept_where_a_format_has_them(tmp_path: Path) -> None:
    trajectory = replayed(traj(tmp_path / "a"))
    assert (trajectory.totals.spend_nanos, trajectory.outcome) == (250_000_000, "submitted")
    traced = replayed(langfuse(tmp_path / "b"))
    assert (traced.totals.spend_nanos, traced.totals.time_us) == (500_000_000, 4_500_000)
    assert replayed(langsmith(tmp_path / "c")).totals.spend_nanos == 250_000_000
    assert replayed(inspect_log(tmp_path / "d")).outcome == "s C"


def test_a_log_s_own_word_for_a_failure_has_a_class(tmp_path: Path) -> None:
    tool = {"event": "tool", "id": "c", "function": "f", "arguments": {}, "result": "", "error": {"type": "timeout",
            "message": "too long"}}  # fmt: skip
    path = document(tmp_path / "i.json", {"eval": {"task": "t"}, "samples": [{"id": 1, "events": [tool]}]})
    (result,) = [event for event in read(path).run.events if isinstance(event, TraceResult)]
    assert (result.error_class, result.message) == (ErrorClass.TIMEOUT, "too long")


def test_results_benchmark_runs_keep_their_ids_and_rewards(tmp_path: Path) -> None:
    chat = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]
    path = document(
        tmp_path / "t.json",
        [{"task_id": 8, "trial": 1, "reward": 1.0, "traj": chat, "info": {"user_cost": 0.1}},
         {"task_id": "9", "trial": 2, "reward": 0.0, "traj": [*chat, {"role": "tool", "content": "x"}]}],
    )  # fmt: skip
    found = read(path)
    assert [(run.run_id, run.outcome) for run in found.runs] == [("t8_r1", "reward 1"), ("t9_r2", "reward 0")]
    assert found.skipped == {"cost of the simulated user": 1, "result without a call": 1}


def test_interleaved_runs_of_plain_lines_are_kept_apart(tmp_path: Path) -> None:
    path = lines(
        tmp_path / "p.jsonl",
        [{"run": f"r{n % 2}", "tool": "look", "args": {"n": n % 2}, "result": n % 2} for n in range(6)],
    )
    found = read(path)
    assert sorted((run.run_id, sum(isinstance(e, TraceCall) for e in run.events)) for run in found.runs) == [
        ("r0", 3),
        ("r1", 3),
    ]


def test_plain_lines_carry_everything_the_guard_can_use(tmp_path: Path) -> None:
    path = lines(
        tmp_path / "p.jsonl",
        [
            {"type": "turn", "model": "m", "input_tokens": 3, "output_tokens": 4, "cost_usd": 0.001,
             "at": "2026-01-01T00:00:00Z"},
            {"tool": "look", "args": {}, "error": {"class": "not_found", "message": "gone"}, "effect": "read",
             "took_ms": 500,
             "at": "2026-01-01T00:00:01Z"},
            {"tool": "wait", "args": {}, "status": "progress", "result": 1, "progress_version": 7, "agent": "b"},
            {"note": "no tool"},
        ],
    )  # fmt: skip
    found = read(path)
    turn, _, failed, _, versioned = found.run.events
    assert isinstance(turn, TraceTurn)
    assert (turn.model, turn.spend_nanos) == ("m", 1_000_000)
    assert isinstance(failed, TraceResult)
    assert isinstance(versioned, TraceResult)
    assert (failed.error_class, failed.message, failed.took_ms) == (ErrorClass.NOT_FOUND, "gone", 500)
    assert versioned.progress_version == 7
    assert found.skipped == {"line without a tool": 1}
    assert replayed(path).totals.time_us == 1_500_000
