"""Progress: what grows, what is seen before, whose version it is, and in which order an epoch opens."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest

from endstop import LoopGuard, Policy, Reason, ToolCall, ToolPolicy, ToolResult, UsageError
from endstop.core import fold
from endstop.core.evidence import OPAQUE_VALUES_MAX, SOURCES_MAX, VERSIONS_MAX, Evidence, kept_version
from endstop.core.propose import progress_source
from tests.core.kit import NO_CAPS, guard_of
from tests.fixtures.driver import Step, drive, progress

LOOK = Step(tool="look", answer="same")


def epochs(versions: list[int | str], *, seed: int | str | None = None, tool: str = "work") -> list[int]:
    """The epoch after each result of one source."""
    guard = LoopGuard(Policy(limits=replace(NO_CAPS, no_progress_max=99)), initial_progress_version=seed)
    seen = []
    for number, version in enumerate(versions):
        drive(guard, [Step(tool=tool, args={"n": number}, answer=progress(number, version), call_id=f"c{number}")])
        seen.append(guard.evidence.epoch)
    return seen


def test_a_number_is_progress_when_it_is_higher_than_all_before() -> None:
    assert epochs([3, 3, 5, 4, 5, 6]) == [1, 1, 2, 2, 2, 3]


def test_opaque_text_is_progress_when_it_was_not_seen_before() -> None:
    assert epochs(["x", "x", "y", "x", "y", "z"]) == [1, 1, 2, 2, 2, 3]


def test_a_source_that_mixes_numbers_and_text_gets_nowhere_by_going_back_and_forth() -> None:
    assert epochs([1, "a", 1, "a", 1]) == [1, 2, 2, 2, 2]
    assert epochs(["a", 1, "a", 1, 2]) == [1, 2, 2, 2, 3]


def test_an_initial_number_seeds_every_source() -> None:
    assert epochs([41, 42], seed=41) == [0, 1]
    assert epochs([3, 5, 7, 8], seed=7) == [0, 0, 0, 1]


def test_an_initial_text_counts_as_seen_by_every_source_for_good() -> None:
    assert epochs(["a", "b", "a", "c"], seed="a") == [0, 1, 1, 2]


def test_the_higher_of_two_seeds_stays() -> None:
    evidence = Evidence()
    fold.seed_version(evidence, 9)
    fold.seed_version(evidence, 4)
    assert evidence.version_floor == 9


def test_versions_belong_to_their_source() -> None:
    """A cursor of 3 is progress although a row version of 41 was seen."""
    guard = guard_of()
    drive(guard, [Step(tool="rows", answer=progress("x", 41)), Step(tool="pages", answer=progress("x", 3))])
    assert guard.evidence.epoch == 2
    assert guard.evidence.versions == {"rows": 41, "pages": 3}


def test_a_source_is_a_tool_and_its_declared_scope() -> None:
    tool = ToolPolicy(effect="read", progress="row.version", progress_scope=("table",))
    guard = guard_of(tools={"rows": tool})
    for table, version in (("a", 5), ("b", 5), ("a", 5), ("b", 6)):
        call = ToolCall(tool="rows", args={"table": table, "v": version})
        guard.before(call)
        guard.after(call, {"row": {"version": version}})
    assert guard.evidence.epoch == 3
    assert len(guard.evidence.versions) == 2
    assert progress_source("rows", "not an object", tool) == "rows"


def test_the_tools_own_word_goes_before_the_declared_place() -> None:
    guard = guard_of(tools={"t": ToolPolicy(effect="read", progress="v")})
    drive(guard, [Step(tool="t", answer=ToolResult(value={"v": 3}, progress_version=8))])
    assert guard.evidence.progress_version == 8


@dataclass(frozen=True)
class Page:
    cursor: int
    rows: tuple[str, ...] = ()


def test_the_declared_place_is_found_in_records_and_in_lists() -> None:
    guard = guard_of(tools={"t": ToolPolicy(effect="read", progress="cursor")})
    drive(guard, [Step(tool="t", answer=Page(cursor=7))])
    assert guard.evidence.progress_version == 7
    guard = guard_of(tools={"t": ToolPolicy(effect="read", progress="0.cursor")})
    drive(guard, [Step(tool="t", answer=[{"cursor": 8}])])
    assert guard.evidence.progress_version == 8


@pytest.mark.parametrize("answer", [{}, {"v": None}, {"v": True}, {"v": 1.5}, {"v": [1]}, "v", object(), None])
def test_what_is_neither_a_whole_number_nor_text_is_no_version(answer: object) -> None:
    guard = guard_of(tools={"t": ToolPolicy(effect="unknown", progress="v")})
    drive(guard, [Step(tool="t", answer=answer)])
    assert guard.evidence.versions == {}


def test_numbers_beyond_what_a_state_can_hold_are_opaque() -> None:
    assert epochs([2**70, 2**70, 2**71]) == [1, 1, 2]
    guard = LoopGuard()
    drive(guard, [Step(tool="t", answer=progress("x", 2**70))])
    Evidence.unpack(guard.evidence.pack())


def test_long_opaque_versions_that_differ_at_their_end_stay_apart() -> None:
    assert epochs(["v" * 500 + "1", "v" * 500 + "2", "v" * 500 + "1"]) == [1, 2, 2]
    assert len(kept_version("é" * 19)) == len(kept_version("v" * 500)) == 20


@pytest.mark.parametrize("version", [True, 1.0, [1]])
def test_a_result_refuses_a_version_of_another_kind(version: object) -> None:
    with pytest.raises(UsageError, match="progress_version"):
        ToolResult(progress_version=version)  # type: ignore[arg-type]  # the point of the test


def test_the_epoch_opens_before_the_result_is_recorded() -> None:
    """The result that carries the new version is the first of the new window."""
    guard = guard_of()
    drive(guard, [LOOK, LOOK, Step(tool="work", answer=progress("done", 1))])
    assert len(guard.evidence.trail) == 1
    assert guard.evidence.trail[0][0] == guard.evidence.last.fingerprint  # type: ignore[union-attr]  # just recorded


def test_an_epoch_clears_windows_and_counts_and_keeps_totals_versions_and_waits() -> None:
    guard = guard_of(replace(NO_CAPS, same_call_max=99), on_trip=("warn", "block", "stop"))
    later: ToolResult[object] = ToolResult(status="retryable", retry_after_ms=60_000)
    drive(guard, [*[LOOK] * 4, Step(tool="api", answer=later)])
    evidence = guard.evidence
    assert evidence.stall == 2
    guard.user_input()
    assert (evidence.trail, evidence.runs, evidence.calls, evidence.last) == ([], [], {}, None)
    assert (evidence.stall, evidence.row_calls, evidence.streaks, evidence.polls) == (0, [], {}, {})
    assert (evidence.rungs, evidence.warned) == ({}, 0)
    assert (evidence.steps, len(evidence.waits)) == (5, 1)


def test_productive_polling_goes_on_for_ever() -> None:
    guard = guard_of()
    story = drive(guard, [Step(tool="poll", answer=progress("working", n)) for n in range(500)])
    assert story.stopped_at is None
    assert guard.evidence.epoch == 500


def test_after_a_resume_an_unchanged_result_is_no_progress_and_totals_go_on() -> None:
    guard = guard_of()
    drive(guard, [Step(tool="work", answer=progress("x", 5)), LOOK])
    evidence = guard.evidence
    fold.ended(evidence, Reason.NO_PROGRESS, "stalled", 2_000_000)
    fold.resumed(evidence, 3_000_000)
    assert (evidence.generation, evidence.ended, evidence.steps) == (2, None, 2)
    assert (evidence.trail, evidence.waits, evidence.rounds, evidence.answered) == ([], {}, {}, [])
    epoch = evidence.epoch
    drive(guard, [Step(tool="work", answer=progress("x", 5), call_id="c9")])
    assert evidence.epoch == epoch
    drive(guard, [Step(tool="work", answer=progress("x", 6), call_id="c10")])
    assert evidence.epoch == epoch + 1


def test_sources_are_bounded_and_the_highest_evicted_number_becomes_the_floor() -> None:
    evidence = Evidence()
    for number in range(SOURCES_MAX + 3):
        fold.note_version(evidence, f"s{number}", 100 + number)
    assert len(evidence.versions) == SOURCES_MAX
    assert (evidence.version_floor, evidence.evictions) == (102, 3)


def test_a_text_source_that_is_evicted_sets_no_floor() -> None:
    evidence = Evidence()
    fold.note_version(evidence, "text", "v1")
    for number in range(SOURCES_MAX):
        fold.note_version(evidence, f"s{number}", number)
    assert "text" not in evidence.versions
    assert evidence.version_floor is None


def test_opaque_values_are_bounded_for_one_source_and_for_all() -> None:
    evidence = Evidence()
    for number in range(VERSIONS_MAX + 9):
        fold.note_version(evidence, "one", f"v{number}")
    kept = evidence.versions["one"]
    assert isinstance(kept, list)
    assert (len(kept), kept[-1]) == (VERSIONS_MAX, f"v{VERSIONS_MAX + 8}")
    for source in ("two", "three"):
        for number in range(VERSIONS_MAX):
            fold.note_version(evidence, source, f"v{number}")
    held = [len(values) for values in evidence.versions.values() if isinstance(values, list)]
    assert sum(held) == OPAQUE_VALUES_MAX
    assert evidence.evictions > 0


def test_a_value_shown_again_is_the_newest_of_its_source() -> None:
    evidence = Evidence()
    for version in ("a", "b", "a"):
        fold.note_version(evidence, "s", version)
    assert evidence.versions["s"] == ["b", "a"]
