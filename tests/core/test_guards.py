"""The loop guards, sentence by sentence: change, same call, cycles, stall, row of one answer, streak, polls, rounds."""

from __future__ import annotations

from dataclasses import replace

import pytest

from endstop import Action, Effect, ErrorClass, LoopGuard, Reason, ToolCall, ToolPolicy, ToolResult
from endstop.core import fold
from endstop.core.events import Verdict
from tests.core.kit import NO_CAPS, Clock, guard_of, proposal_of
from tests.core.shapes import POLL, READ, WAIT, failed, reads, rounds
from tests.fixtures.driver import Step, Story, drive, progress

LOOK = Step(tool="look", answer="same")


def new(number: int) -> Step:
    return Step(tool="read", args={"n": number}, answer=f"text {number}")


def play(steps: list[Step], tools: dict[str, ToolPolicy] | None = None, **limits: int) -> Story:
    return drive(guard_of(replace(NO_CAPS, **limits), tools=tools), steps)


# -- Change


def test_a_repeated_call_that_answers_with_something_new_empties_the_window() -> None:
    def looks(answers: str) -> Story:
        return play([Step(tool="look", answer=answer) for answer in answers])

    assert looks("aab").stopped_at == 3
    assert looks("abbc").stopped_at == 4
    assert looks("abcde").stopped_at is None


def test_a_change_seen_by_one_call_clears_the_window_for_all() -> None:
    clock = [Step(tool="clock", answer="it is one"), Step(tool="clock", answer="it is two")]
    assert play([LOOK, clock[0], LOOK, new(1), clock[1], LOOK]).stopped_at is None
    assert play([LOOK, clock[0], LOOK, new(1), clock[0], LOOK]).stopped_at == 6


def test_a_first_answer_of_a_new_call_is_no_change() -> None:
    assert play([LOOK, new(1), LOOK, new(2), LOOK]).stopped_at == 5


def test_an_answer_seen_before_in_the_epoch_is_no_change() -> None:
    """A flag that goes back and forth moves nothing."""
    steps = [Step(tool="look", answer=answer) for answer in "abab"]
    guard = guard_of()
    drive(guard, steps)
    assert len(guard.evidence.trail) == 3, "only the first b was a change"


# -- Same call


def test_a_call_is_refused_when_it_gave_one_answer_twice_in_the_window() -> None:
    story = play([LOOK, new(1), LOOK, new(2), LOOK])
    assert (story.stopped_at, story.ended) == (5, Reason.SAME_CALL_REPEAT)
    assert story.decisions[-1].detail.value == 2


def test_the_window_is_so_many_executed_calls_long() -> None:
    """With six calls between, both looks stand in the window of eight; with seven, the first has left it."""
    between = [new(n) for n in range(6)]
    assert play([LOOK, *between, LOOK, LOOK]).stopped_at == 9
    assert play([LOOK, *between, new(90), LOOK, LOOK]).stopped_at is None


def test_back_to_back_repeats_count_beyond_the_window() -> None:
    story = play([LOOK] * 6, same_call_max=4, call_window=2, no_progress_max=9)
    assert (story.stopped_at, story.ended) == (5, Reason.SAME_CALL_REPEAT)


def test_different_answers_of_one_call_are_counted_apart() -> None:
    """Oscillating answers: a b (a b) never twice the same since the last change, until one comes twice."""
    steps = [Step(tool="look", answer=answer) for answer in "abaab"]
    assert play(steps, no_progress_max=9).stopped_at == 5


def test_same_call_max_is_a_limit() -> None:
    assert play([LOOK] * 9, same_call_max=1).stopped_at == 2
    assert play([LOOK] * 9, same_call_max=4, no_progress_max=9).stopped_at == 5


# -- Cycles


@pytest.mark.parametrize(("period", "refused"), [(2, 4), (3, 7), (4, 9), (5, 11), (6, 13), (7, 15), (8, 17)])
def test_a_cycle_is_refused_at_the_call_that_starts_or_closes_the_next_lap(period: int, refused: int) -> None:
    story = play(reads("abcdefgh"[:period]) * 4, no_progress_max=99)
    assert (story.stopped_at, story.ended) == (refused, Reason.SHORT_CYCLE)
    detail = story.decisions[-1].detail
    assert (detail.limit_name, detail.limit, detail.period, detail.repeats) == ("cycle_repeats_max", 2, period, 2)


@pytest.mark.parametrize(("laps", "refused"), [(1, 3), (2, 4), (3, 6), (4, 8)])
def test_cycle_repeats_max_moves_the_refusal_of_a_cycle_of_two(laps: int, refused: int) -> None:
    assert play(reads("ab") * 9, cycle_repeats_max=laps, same_call_max=99, no_progress_max=99).stopped_at == refused


@pytest.mark.parametrize(("laps", "refused"), [(1, 4), (2, 7), (3, 10)])
def test_cycle_repeats_max_moves_the_refusal_of_a_longer_cycle(laps: int, refused: int) -> None:
    assert play(reads("abc") * 9, cycle_repeats_max=laps, same_call_max=99, no_progress_max=99).stopped_at == refused


def test_a_cycle_is_named_before_the_same_call() -> None:
    """Both rules refuse the seventh call of ABCABCA."""
    assert play(reads("abc") * 3).ended is Reason.SHORT_CYCLE


def test_one_call_all_along_is_a_repeat_and_no_cycle() -> None:
    assert play([LOOK] * 9, same_call_max=5, no_progress_max=99).ended is Reason.SAME_CALL_REPEAT


def test_a_call_that_leaves_the_cycle_is_allowed() -> None:
    assert play([*reads("abcabc"), new(1)]).stopped_at is None


def test_an_answer_that_differs_breaks_a_cycle() -> None:
    lap = [Step(tool="look", answer="x one"), Step(tool="list", answer="y")]
    other = [Step(tool="look", answer="z two"), Step(tool="list", answer="y")]
    assert play([*lap, *other]).stopped_at is None


def test_cycle_period_max_of_one_turns_the_rule_off() -> None:
    story = play(reads("ab") * 5, cycle_period_max=1)
    assert (story.stopped_at, story.ended) == (5, Reason.SAME_CALL_REPEAT)


def test_a_cycle_has_one_name_wherever_it_is_entered() -> None:
    """Under a ladder, a warned cycle that is entered elsewhere is the same loop."""
    guard = guard_of(on_trip=("warn", "block", "stop"), limits=replace(NO_CAPS, same_call_max=99, no_progress_max=99))
    story = drive(guard, [*reads("abcabc"), *reads("a"), *reads("b")])
    assert story.decisions[6].warning is not None
    assert story.decisions[7].action is Action.BLOCK


# -- No progress


def test_results_with_nothing_new_in_a_row_stop_the_run() -> None:
    story = play(reads("abcdefghijkl") * 3)
    assert (story.stopped_at, story.ended) == (28, Reason.NO_PROGRESS)


def test_an_answer_is_nothing_new_once_its_call_gave_it_twice() -> None:
    guard = guard_of(replace(NO_CAPS, same_call_max=99))
    stalls = []
    for number in range(5):
        drive(guard, [Step(tool="look", answer="same", call_id=f"c{number}")])
        stalls.append(guard.evidence.stall)
    assert stalls == [0, 0, 1, 2, 3]


def test_something_new_ends_the_stall() -> None:
    guard = guard_of(replace(NO_CAPS, same_call_max=99))
    drive(guard, [LOOK] * 4)
    assert guard.evidence.stall == 2
    drive(guard, [new(1)])
    assert guard.evidence.stall == 0


def test_a_result_with_a_version_is_judged_by_it_alone() -> None:
    """Ever new words, one version: nothing new. Ever the same words, a growing version: new."""
    talk = [Step(tool="look", args={"n": n}, answer=progress(f"words {n}", 7)) for n in range(9)]
    assert (play(talk).stopped_at, play(talk).ended) == (5, Reason.NO_PROGRESS)
    work = [Step(tool="look", answer=progress("words", n)) for n in range(30)]
    assert play(work).stopped_at is None


def test_a_failure_is_no_progress_whatever_version_it_carries() -> None:
    guard = guard_of()
    bad: ToolResult[object] = ToolResult(error_class=ErrorClass.TOOL_FAILED, message="broke", progress_version=9)
    drive(guard, [Step(tool="work", answer=bad)])
    assert guard.evidence.epoch == 0
    drive(guard, [Step(tool="work", answer=progress("done", 9))])
    assert guard.evidence.epoch == 1


def test_so_many_calls_and_answers_are_remembered_and_the_rest_counted() -> None:
    guard = guard_of()
    drive(guard, [Step(tool="look", answer=f"answer number {n} of many") for n in range(6)])
    assert len(next(iter(guard.evidence.calls.values()))) == 4
    assert guard.evidence.evictions == 2


# -- Same answer row


def row(count: int, tool: str = "search") -> list[Step]:
    return [Step(tool=tool, args={"q": n}, answer=[]) for n in range(count)]


def test_so_many_different_requests_with_one_answer_stop_the_run() -> None:
    story = play(row(20), {"search": READ})
    assert (story.stopped_at, story.ended) == (9, Reason.SAME_ANSWER)


def test_only_declared_reads_have_a_row() -> None:
    assert play(row(20)).stopped_at is None
    assert play(row(20), {"search": ToolPolicy(effect="unknown")}).stopped_at is None


def test_a_new_answer_of_another_tool_ends_the_row() -> None:
    more = [Step(tool="search", args={"q": n + 50}, answer=[]) for n in range(7)]
    assert play([*row(7), new(1), *more], {"search": READ}).stopped_at is None
    assert play([*row(7), *more], {"search": READ}).stopped_at == 9


def test_a_stale_answer_of_another_tool_ends_no_row() -> None:
    guard = guard_of(replace(NO_CAPS, no_progress_max=99, same_call_max=99), tools={"search": READ})
    drive(guard, [*[LOOK] * 2, *row(7)])
    drive(guard, [LOOK])
    assert len(guard.evidence.row_calls) == 7
    story = drive(guard, [Step(tool="search", args={"q": "last"}, answer=[], call_id="last")])
    assert story.ended is Reason.SAME_ANSWER


def test_another_answer_of_the_same_tool_starts_another_row() -> None:
    found = Step(tool="search", args={"q": "found"}, answer=["hit"])
    assert play([*row(7), found, *row(7)], {"search": READ}, same_call_max=9, no_progress_max=99).stopped_at is None


def test_the_same_request_twice_counts_once_and_a_failure_not_at_all() -> None:
    guard = guard_of(tools={"search": READ})
    drive(guard, [*row(3), *row(3)])
    assert len(guard.evidence.row_calls) == 3
    drive(guard, [Step(tool="search", args={"q": "x"}, answer=failed(ErrorClass.CONFLICT, "busy"))])
    assert len(guard.evidence.row_calls) == 3


# -- Error streak


@pytest.mark.parametrize(
    ("error_class", "stopped_at"),
    [
        (ErrorClass.UNKNOWN_TOOL, 3),
        (ErrorClass.SCHEMA, 3),
        (ErrorClass.DENIED, 3),
        (ErrorClass.NOT_FOUND, 4),
        (ErrorClass.AUTH, 4),
        (ErrorClass.CONFLICT, 4),
        (ErrorClass.EMPTY_ANSWER, 4),
        (ErrorClass.ANSWER_SCHEMA, 4),
        (ErrorClass.TOOL_FAILED, 4),
        (ErrorClass.OUTAGE, None),
        (ErrorClass.TIMEOUT, None),
        (ErrorClass.RATE_LIMIT, None),
        (ErrorClass.OUTCOME_UNKNOWN, None),
    ],
)
def test_each_class_of_error_has_its_streak_or_none(error_class: ErrorClass, stopped_at: int | None) -> None:
    steps = [Step(tool="api", args={"n": n}, answer=failed(error_class, "no")) for n in range(6)]
    story = play(steps)
    assert story.stopped_at == stopped_at
    assert stopped_at is None or story.ended is Reason.ERROR_STREAK


def test_a_success_of_the_tool_ends_its_streak_and_of_another_tool_does_not() -> None:
    def fail(number: int) -> Step:
        return Step(tool="api", args={"n": number}, answer=failed(ErrorClass.NOT_FOUND, "no"))

    good = Step(tool="api", args={"n": "good"}, answer="found")
    assert play([fail(1), fail(2), good, fail(3), fail(4)]).stopped_at is None
    assert play([fail(1), new(1), fail(2), new(2), fail(3)]).stopped_at == 6


def test_two_classes_and_two_tools_are_streaks_of_their_own() -> None:
    steps = [
        Step(tool=tool, args={"n": n}, answer=failed(error_class, "no"))
        for n in range(2)
        for tool in ("a", "b")
        for error_class in (ErrorClass.NOT_FOUND, ErrorClass.AUTH)
    ]
    assert play(steps).stopped_at is None


def test_plain_failures_are_told_apart_by_their_message_with_digits_masked() -> None:
    def fail(message: str, number: int) -> Step:
        return Step(tool="sh", args={"n": number}, answer=failed(ErrorClass.TOOL_FAILED, message))

    assert play([fail(f"line {n}: no such file", n) for n in range(5)]).stopped_at == 4
    messages = ("no file", "no right", "no space", "no")
    assert play([fail(message, n) for n, message in enumerate(messages)]).stopped_at is None
    long = "x" * 200
    assert play([fail(long + str("abc"[n]), n) for n in range(3)]).stopped_at == 4


def test_error_text_of_a_plain_value_is_not_read() -> None:
    assert play([Step(tool="sh", args={"n": n}, answer="error: no such file") for n in range(9)]).stopped_at is None


# -- Polls and waits


def test_polls_count_only_towards_poll_exhausted() -> None:
    story = play([Step(tool="status", answer="running")] * 40, {"status": POLL})
    assert (story.stopped_at, story.ended) == (32, Reason.POLL_EXHAUSTED)


def test_a_changed_poll_starts_again_and_a_tool_may_have_its_own_limit() -> None:
    tool = ToolPolicy(effect="poll", poll_unchanged_max=2)
    steps = [Step(tool="status", answer=answer) for answer in ("a", "a", "b", "b", "b", "b")]
    assert play(steps, {"status": tool}).stopped_at == 6


def test_polls_and_waits_leave_no_trace_in_the_window() -> None:
    guard = guard_of(tools={"status": POLL, "sleep": WAIT})
    drive(guard, [Step(tool="status", answer="x"), Step(tool="sleep", answer="y")] * 9)
    evidence = guard.evidence
    assert (evidence.trail, evidence.calls, evidence.stall, evidence.row_calls) == ([], {}, 0, [])


def test_a_poll_that_fails_in_transport_is_no_look_at_all() -> None:
    tool = ToolPolicy(effect="poll", poll_unchanged_max=2)
    late: ToolResult[object] = ToolResult(status="retryable", error_class=ErrorClass.TIMEOUT)
    answers = ["a", late, "a", late, "b"]
    steps = [Step(tool="status", answer=answer) for answer in answers]
    assert play(steps, {"status": tool}, retries_max=9).stopped_at is None


def test_a_poll_waits_out_the_interval_its_tool_declares() -> None:
    clock = Clock()
    guard = guard_of(tools={"status": ToolPolicy(effect="poll", poll_interval_ms_min=5_000)}, clock=clock)
    call = ToolCall(tool="status")
    guard.before(call)
    guard.after(call, "running")
    clock.pass_ms(4_000)
    decision = guard.before(call)
    assert (decision.action, decision.reason) == (Action.WAIT, Reason.NOT_BEFORE)
    assert decision.retry_after_ms == 1_000  # type: ignore[attr-defined]  # a Wait, as asserted above
    clock.pass_ms(1_000)
    assert guard.before(call).action is Action.EXECUTE


def test_a_success_of_a_poll_or_a_wait_ends_the_refusals_of_its_tool() -> None:
    for tool in (POLL, WAIT):
        guard = guard_of(tools={"status": tool})
        drive(guard, [Step(tool="status", fault=ErrorClass.SCHEMA, call_id="bad")])
        drive(guard, [Step(tool="status", answer="x", call_id="good")])
        assert guard.evidence.streaks == {}
    guard = guard_of(tools={"status": POLL})
    drive(guard, [Step(tool="status", fault=ErrorClass.SCHEMA, call_id="bad")])
    drive(guard, [Step(tool="status", answer=failed(ErrorClass.NOT_FOUND, "no"), call_id="worse")])
    assert guard.evidence.streaks != {}


# -- Rounds


def test_stall_row_and_streak_advance_once_a_round() -> None:
    guard = guard_of(replace(NO_CAPS, same_call_max=99, cycle_period_max=1), tools={"search": READ})
    drive(guard, [*reads("abc")] * 2)
    drive(guard, rounds(reads("abc")))
    assert guard.evidence.stall == 1
    guard = guard_of(tools={"search": READ})
    drive(guard, rounds(row(12)))
    assert guard.evidence.row_calls == guard.evidence.row_calls[:1]
    errors = [Step(tool="api", args={"n": n}, answer=failed(ErrorClass.NOT_FOUND, "no")) for n in range(9)]
    assert play(rounds(errors)).stopped_at is None
    assert play(rounds(errors[:3], errors[3:6], errors[6:])).stopped_at == 8


def test_the_second_copy_of_a_read_in_a_round_shares_and_the_third_is_a_repeat() -> None:
    story = play(rounds(reads("aaa")), {"read": READ})
    assert [decision.action for decision in story.decisions] == [Action.EXECUTE, Action.REPLAY, Action.STOP]
    assert story.decisions[1].reason is Reason.ROUND_DUPLICATE
    assert story.ended is Reason.SAME_CALL_REPEAT


@pytest.mark.parametrize("tools", [{}, {"read": ToolPolicy(effect="write", idempotency_key="{file}")}])
def test_the_second_copy_of_what_may_write_is_refused_and_the_third_is_a_repeat(tools: dict[str, ToolPolicy]) -> None:
    story = play(rounds(reads("aaa")), tools)
    assert [decision.action for decision in story.decisions] == [Action.EXECUTE, Action.BLOCK, Action.STOP]
    assert story.ended is Reason.SAME_CALL_REPEAT


def test_copies_are_seen_before_the_first_has_answered() -> None:
    guard = guard_of(tools={"read": READ})
    calls = [ToolCall(tool="read", args={"n": 1}, call_id=f"c{n}", round_id="m1") for n in range(3)]
    assert [guard.before(call).action for call in calls] == [Action.EXECUTE, Action.REPLAY, Action.STOP]


def test_a_wait_may_stand_in_a_message_as_often_as_it_likes() -> None:
    steps = rounds([Step(tool="sleep", answer="ok")] * 5)
    assert len(play(steps, {"sleep": WAIT}).executed) == 5


def test_the_same_call_of_another_round_is_no_copy() -> None:
    story = play(rounds(reads("a"), reads("a")))
    assert [decision.action for decision in story.decisions] == [Action.EXECUTE, Action.EXECUTE]


def test_a_call_of_a_round_that_is_proposed_again_under_its_own_id_is_no_copy() -> None:
    guard = guard_of()
    call = ToolCall(tool="api", call_id="c1", round_id="m1")
    guard.before(call)
    guard.after(call, ToolResult(status="retryable", error_class=ErrorClass.TIMEOUT))
    assert guard.before(call).action is Action.EXECUTE


def test_rounds_are_bounded_and_the_newest_are_kept() -> None:
    guard = guard_of()
    for number in range(12):
        drive(guard, [Step(tool="read", args={"n": number}, answer=f"t{number}", round_id=f"m{number}")])
    assert list(guard.evidence.rounds) == [f"m{number}" for number in range(4, 12)]
    wide = guard_of()
    for number in range(30):
        wide.before(ToolCall(tool="read", args={"n": number}, call_id=f"a{number}", round_id="m1"))
        wide.after(ToolCall(tool="read", args={"n": number}, call_id=f"a{number}", round_id="m1"), number)
    assert len(wide.evidence.rounds["m1"]) == 30
    for number in range(100):
        fold.refused(
            wide.evidence,
            replace(proposal_of("read", f"b{number}", n=-number - 1), round_id="m2"),
            Verdict(action=Action.BLOCK, reason=Reason.ROUND_DUPLICATE, guard="round"),
        )
    assert list(wide.evidence.rounds) == ["m2"]
    assert len(wide.evidence.rounds["m2"]) == 64


def test_calls_without_an_outcome_are_no_evidence_and_null_is_an_answer() -> None:
    guard = guard_of()
    guard.before(ToolCall(tool="a", call_id="c1"))
    fold.abandoned(guard.evidence, "c1")
    assert guard.evidence.trail == []
    assert play([Step(tool="look", answer=None)] * 5).stopped_at == 3


def test_two_workers_that_ask_the_same_at_once_count_as_two_equal_answers() -> None:
    guard = guard_of()
    first, second, third = (ToolCall(tool="look", call_id=f"c{n}", agent=f"w{n}") for n in range(3))
    guard.before(first)
    guard.before(second)
    assert guard.before(third).reason is Reason.SAME_CALL_REPEAT


def test_a_guard_without_a_policy_takes_the_defaults() -> None:
    guard = LoopGuard()
    assert guard.policy.limits.steps_max == 20
    assert guard.policy.tool("anything").effect is Effect.UNKNOWN
