"""Suggested limits let every measured run pass, with the margin, and touch nothing that is enough already."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from endstop import Policy, ToolPolicy, load_policy
from endstop.errors import UsageError
from endstop.replay.driver import RunReplay
from endstop.replay.replayer import ReplaySettings, replay_file
from endstop.replay.report import RunReport
from endstop.replay.suggest import Suggestion, measuring, suggest_limits
from endstop.replay.trace import RunHead, TraceCall, TraceResult
from tests.replay.recordings import lines

HEALTHY = [
    {"tool": "build", "args": {}, "result": "1 failed", "round": n, "input_tokens": 900, "output_tokens": 100,
     "at": f"2026-01-01T00:00:{n:02d}Z"}
    for n in range(40)
]  # fmt: skip


def measured(path: Path, policy: Policy = Policy()) -> RunReport:  # noqa: B008  # frozen
    found = replay_file(path, ReplaySettings(policy=measuring(policy), all_guards=True))
    (report,) = found.runs
    return report


def suggested(path: Path, margin_percent: int = 25) -> Suggestion:
    return suggest_limits([measured(path)], Policy(), margin_percent=margin_percent)


def test_healthy_runs_pass_under_the_suggested_file(tmp_path: Path) -> None:
    path = lines(tmp_path / "a.jsonl", HEALTHY)
    assert replay_file(path, ReplaySettings(policy=Policy())).runs[0].stop is not None
    fragment = suggested(path).toml
    (tmp_path / "endstop.toml").write_text(fragment)
    policy = load_policy(tmp_path / "endstop.toml")
    assert replay_file(path, ReplaySettings(policy=policy)).runs[0].stop is None
    assert policy.limits.steps_max == 50
    assert policy.limits.tokens_max == 50_000
    assert policy.limits.error_streak_max == Policy().limits.error_streak_max


def test_every_number_stands_beside_its_figures(tmp_path: Path) -> None:
    found = suggested(lines(tmp_path / "a.jsonl", HEALTHY), 50)
    assert "# From 1 run with 40 calls: 50 % above the furthest." in found.toml
    assert "steps_max = 60  # median 40, 95 % 40, most 40 (a); was 20" in found.toml
    assert "# error_streak_max = 3 is enough: median 0, 95 % 0, most 0" in found.toml
    (steps,) = [limit for limit in found.limits if limit.name == "steps_max"]
    assert (steps.value, steps.current, steps.changed, steps.peak, steps.peak_run) == (60, 20, True, 40, "a")


def test_what_the_recordings_do_not_say_is_not_suggested(tmp_path: Path) -> None:
    path = lines(tmp_path / "a.jsonl", [{"tool": "look", "args": {"n": n}, "result": n} for n in range(5)])
    names = {limit.name for limit in suggested(path).limits}
    assert "steps_max" in names
    assert names.isdisjoint({"tokens_max", "turns_max", "wall_ms_max", "spend_nanos_max"})


def test_a_row_that_no_memory_holds_is_named_as_such(tmp_path: Path) -> None:
    policy = Policy(tools={"read": ToolPolicy(effect="read")})
    path = lines(tmp_path / "a.jsonl", [{"tool": "read", "args": {"n": n}, "result": []} for n in range(80)])
    found = suggest_limits([measured(path, policy)], policy)
    (row,) = [limit for limit in found.limits if limit.name == "same_answer_max"]
    assert row.impossible
    assert "no value lets this pass" in found.toml


@pytest.mark.parametrize("margin", [-1, 1_001, 0.5])
def test_a_margin_is_a_whole_number_of_percent(tmp_path: Path, margin: object) -> None:
    with pytest.raises(UsageError, match="margin"):
        suggested(lines(tmp_path / "a.jsonl", HEALTHY), margin)  # type: ignore[arg-type]  # what is tested


def test_without_a_measured_run_there_is_nothing_to_suggest() -> None:
    with pytest.raises(UsageError, match="no run was measured"):
        suggest_limits([], Policy())


CALLS = st.lists(st.tuples(st.integers(0, 3), st.integers(0, 2)), min_size=1, max_size=40)


@given(CALLS, st.integers(0, 200))
def test_any_run_passes_under_the_limits_suggested_from_it(calls: list[tuple[int, int]], margin: int) -> None:
    head = RunHead(run_id="r", source="s", format="f")
    tools = {"t0": ToolPolicy(effect="read"), "t1": ToolPolicy(effect="poll")}

    def run(policy: Policy, *, goes_on: bool) -> RunReport:
        replay = RunReplay(policy, goes_on=goes_on)
        for number, (tool, answer) in enumerate(calls):
            replay.feed(TraceCall(tool=f"t{tool}", args={"n": number % 2}, call_id=f"c{number}"))
            replay.feed(TraceResult(call_id=f"c{number}", value=answer))
        return replay.report(head)

    policy = Policy(tools=tools)
    found = suggest_limits([run(measuring(policy), goes_on=True)], policy, margin_percent=margin)
    limits = policy.limits
    for limit in found.limits:
        limits = limits.raised(limit.name, limit.value)
    assert run(policy.under(limits), goes_on=False).stop is None
