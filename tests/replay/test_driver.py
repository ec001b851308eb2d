"""The replay decides as a live guard does: the same call, the same reason, the same evidence."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Final

import pytest
from hypothesis import given
from hypothesis import strategies as st

from endstop import Action, ErrorClass, LoopGuard, Policy, Reason, ToolCall, ToolPolicy, ToolResult, Usage
from endstop.core.model import Decision
from endstop.replay.driver import RunReplay
from endstop.replay.report import RunReport
from endstop.replay.trace import (
    Event,
    RunHead,
    TraceCall,
    TraceLost,
    TraceResult,
    TraceStart,
    TraceTurn,
    TraceUsage,
    UserInput,
)
from tests.core.shapes import LEGITIMATE, LOOPS, Shape
from tests.replay.recordings import NO_CAPS, OPEN

HEAD: Final = RunHead(run_id="r", source="s", format="f")
SECOND_US: Final = 1_000_000


def replay(events: Sequence[Event], policy: Policy = OPEN, **options: bool) -> RunReport:
    run = RunReplay(policy, **options)
    for event in events:
        run.feed(event)
    return run.report(HEAD)


def call(tool: str, number: int, *, round_id: str | None = None, **args: object) -> TraceCall:
    return TraceCall(tool=tool, args=args, call_id=f"c{number}", round_id=round_id)


def answered(tool: str, number: int, value: object, **args: object) -> list[Event]:
    return [call(tool, number, **args), TraceResult(call_id=f"c{number}", value=value)]


# -- Against the bare guard


def live_stop(policy: Policy, events: Sequence[Event]) -> tuple[int, Reason, str | None] | None:
    """Where a LoopGuard that is asked before each recorded call ends the run: the index of the call not made."""
    now = [1]
    guard = LoopGuard(policy, clock=lambda: now[0])
    calls: dict[str, list[ToolCall]] = {}
    made = 0
    for event in events:
        decision: Decision | None = None
        if isinstance(event, TraceCall):
            now[0] = max(now[0], event.at_us or 0)
            asked = ToolCall(
                tool=event.tool, args=event.args, call_id=event.call_id, round_id=event.round_id, agent=event.agent
            )
            decision = guard.before(asked, fault=event.fault)
            if decision.action is Action.EXECUTE:
                calls.setdefault(event.call_id, []).append(asked)
            if decision.action is not Action.STOP:
                made += 1
        elif isinstance(event, TraceResult):
            now[0] = max(now[0], event.at_us or 0)
            waiting = calls.get(event.call_id)
            if waiting:
                decision = guard.after(waiting.pop(0), _result(event))
        elif isinstance(event, TraceTurn):
            decision = guard.before_turn()
            if decision.action is Action.EXECUTE:
                usage = event.usage or Usage()
                guard.after_turn(input_tokens=usage.input_tokens, output_tokens=usage.output_tokens)
        elif isinstance(event, UserInput):
            guard.user_input()
        if decision is not None and decision.action is Action.STOP:
            assert decision.reason is not None
            return made, decision.reason, decision.guard
    return None


def _result(event: TraceResult) -> ToolResult[object]:
    status = "retryable" if event.error_class is not None else event.status
    return ToolResult(
        value=event.value, error_class=event.error_class, message=event.message, status=status,
        progress_version=event.progress_version,
    )  # fmt: skip


def agrees(policy: Policy, events: Sequence[Event]) -> None:
    expected = live_stop(policy, events)
    stop = replay(events, policy).stop
    found = None if stop is None else (stop.call_index, stop.reason, stop.guard)
    assert found == expected
    going_on = replay(events, policy, goes_on=True).stop
    assert (going_on is None) == (stop is None)
    if stop is not None and going_on is not None:
        assert (going_on.call_index, going_on.reason) == (stop.call_index, stop.reason)


def events_of(shape: Shape) -> list[Event]:
    events: list[Event] = []
    for number, step in enumerate(shape.steps):
        if step.user_speaks:
            events.append(UserInput())
        call_id = step.call_id or f"call-{number}"
        events.append(
            TraceCall(tool=step.tool, args=step.args, call_id=call_id, round_id=step.round_id, fault=step.fault)
        )
        answer = step.answer() if callable(step.answer) else step.answer
        if isinstance(answer, ToolResult):
            events.append(
                TraceResult(
                    call_id=call_id,
                    value=answer.value,
                    status=answer.status,
                    error_class=answer.error_class,
                    message=answer.message,
                    progress_version=answer.progress_version,
                )
            )
        else:
            events.append(TraceResult(call_id=call_id, value=answer))
    return events


@pytest.mark.parametrize("declared", [False, True], ids=["bare", "declared"])
@pytest.mark.parametrize("shape", [*LOOPS, *LEGITIMATE], ids=lambda shape: shape.name)
def test_every_shape_stops_in_a_replay_where_it_stops_live(shape: Shape, *, declared: bool) -> None:
    policy = Policy(limits=NO_CAPS, tools=shape.tools if declared else {})
    stop = replay(events_of(shape), policy).stop
    expected = shape.declared_refused if declared else shape.refused
    # Shapes count calls from 1.
    assert (None if stop is None else stop.call_index + 1) == expected


TOOLS: Final = ("look", "poll", "write", "wait")
DECLARED: Final = {
    "look": ToolPolicy(effect="read", progress="seen"),
    "poll": ToolPolicy(effect="poll", poll_unchanged_max=3),
    "write": ToolPolicy(effect="write", idempotency_key="{n}"),
    "wait": ToolPolicy(effect="wait"),
}
ANSWERS: Final = st.one_of(
    st.sampled_from(["same", "other", "", None]),
    st.integers(0, 3).map(lambda number: {"seen": number}),
)
CLASSES: Final = st.sampled_from([None, None, None, ErrorClass.TOOL_FAILED, ErrorClass.SCHEMA, ErrorClass.NOT_FOUND])


@st.composite
def recordings(draw: st.DrawFn) -> list[Event]:
    """Turns of one to three calls, each answered before the next turn; few names, so that loops are common."""
    events: list[Event] = []
    number = 0
    at_us = 1
    for turn in range(draw(st.integers(1, 12))):
        at_us += draw(st.integers(0, 3 * SECOND_US))
        if draw(st.integers(0, 9)) == 0:
            events.append(UserInput())
        events.append(TraceTurn(usage=Usage(input_tokens=draw(st.integers(0, 3_000)))))
        made: list[TraceCall] = []
        for _ in range(draw(st.integers(1, 3))):
            tool, size = draw(st.sampled_from(TOOLS)), draw(st.integers(0, 1))
            made.append(
                TraceCall(tool=tool, args={"n": size}, call_id=f"c{number}", round_id=f"turn-{turn}", at_us=at_us)
            )
            number += 1
        events += made
        for one in draw(st.permutations(made)):
            error_class = draw(CLASSES)
            events.append(
                TraceResult(
                    call_id=one.call_id,
                    value=draw(ANSWERS),
                    error_class=error_class,
                    message=None if error_class is None else "it failed",
                    at_us=at_us,
                )
            )
    return events


@given(recordings(), st.booleans(), st.booleans())
def test_a_replay_stops_where_a_live_guard_does(events: list[Event], declared: bool, capped: bool) -> None:
    limits = replace(NO_CAPS, steps_max=9, turns_max=6, tokens_max=9_000, wall_ms_max=12_000) if capped else NO_CAPS
    agrees(Policy(limits=limits, tools=DECLARED if declared else {}), events)


@given(recordings())
def test_what_comes_after_the_stop_and_before_it_add_up(events: list[Event]) -> None:
    report = replay(events)
    assert report.totals.calls == sum(isinstance(event, TraceCall) for event in events)
    if report.stop is None:
        assert report.after is None
        return
    assert report.after is not None
    assert report.stop.call_index + report.after.calls == report.totals.calls
    assert 0 <= report.after.tokens <= report.totals.tokens
    assert all(mark.index < report.stop.call_index for mark in report.stop.evidence)


# -- What a recording leaves open


def test_a_call_without_an_outcome_is_no_evidence_once_the_model_speaks_again() -> None:
    events: list[Event] = []
    for number in range(6):
        events += [TraceTurn(), call("look", number)]
    report = replay(events)
    assert report.stop is None
    assert report.unanswered == 6


def test_calls_in_flight_count_as_the_same_until_then() -> None:
    events = [TraceTurn(), *(call("look", number) for number in range(3))]
    stop = replay(events).stop
    assert stop is not None
    assert (stop.call_index, stop.reason) == (2, Reason.SAME_CALL_REPEAT)


def test_a_result_that_comes_late_is_folded_all_the_same() -> None:
    events: list[Event] = [TraceTurn(), call("look", 0), TraceTurn(), TraceResult(call_id="c0", value="a")]
    events += [*answered("look", 1, "a"), call("look", 2)]
    report = replay(events)
    assert report.stop is not None
    assert report.stop.call_index == 2
    assert report.unanswered == 0


def test_a_lost_call_is_no_evidence_and_an_orphan_result_is_counted() -> None:
    report = replay([call("look", 0), TraceLost(call_id="c0"), TraceResult(call_id="c9", value=1)])
    assert report.unanswered == 1
    assert [(skip.reason, skip.count) for skip in report.skipped] == [("result without a call", 1)]


def test_more_calls_in_flight_than_a_run_remembers_are_given_up_oldest_first() -> None:
    events = [call("look", number, n=number) for number in range(200)]
    report = replay(events)
    assert report.stop is None
    assert report.unanswered == 200


def test_calls_that_share_an_id_are_answered_in_their_order() -> None:
    same = [TraceCall(tool="look", args={"n": n}, call_id="c") for n in range(3)]
    results = [TraceResult(call_id="c", value=n) for n in range(3)]
    assert replay([*same, *results]).unanswered == 0


def test_a_copy_within_a_round_shares_its_twin_s_answer() -> None:
    events: list[Event] = [
        call("look", 0, round_id="t"), call("look", 1, round_id="t"),
        TraceResult(call_id="c0", value="a"), TraceResult(call_id="c1", value="b"),
    ]  # fmt: skip
    report = replay(events, Policy(limits=NO_CAPS, tools={"look": ToolPolicy(effect="read")}))
    (judged,) = report.judgements
    assert (judged.action, judged.reason, judged.call_index) == (Action.REPLAY, Reason.ROUND_DUPLICATE, 1)


# -- Time, tokens, money


def test_waiting_for_a_person_is_no_running_time() -> None:
    events: list[Event] = [
        UserInput(at_us=SECOND_US), TraceTurn(at_us=2 * SECOND_US), UserInput(at_us=500 * SECOND_US),
        TraceTurn(at_us=501 * SECOND_US),
    ]  # fmt: skip
    assert replay(events).totals.time_us == 2 * SECOND_US


def test_what_calls_took_is_the_time_where_there_is_no_other() -> None:
    events: list[Event] = [
        call("a", 0),
        TraceResult(call_id="c0", took_ms=700),
        call("b", 1),
        TraceResult(call_id="c1"),
    ]
    limits = replace(NO_CAPS, wall_ms_max=600)
    stop = replay(events, Policy(limits=limits)).stop
    assert stop is not None
    assert (stop.call_index, stop.reason) == (1, Reason.WALL_CLOCK_CAP)


def test_tokens_told_after_a_turn_count_before_the_next_one() -> None:
    events: list[Event] = []
    for number in range(4):
        events += [TraceTurn(), *answered("look", number, number), TraceUsage(usage=Usage(input_tokens=400))]
    stop = replay(events, Policy(limits=replace(NO_CAPS, tokens_max=1_000))).stop
    assert stop is not None
    assert (stop.reason, stop.at_turn, stop.turn, stop.call_index) == (Reason.TOKEN_CEILING, True, 3, 3)


def test_spend_stops_a_run_that_has_a_budget() -> None:
    turn = TraceTurn(usage=Usage(input_tokens=1), spend_nanos=600)
    report = replay([turn] * 4, Policy(limits=replace(NO_CAPS, spend_nanos_max=1_000)))
    assert report.stop is not None
    assert (report.stop.reason, report.stop.turn) == (Reason.SPEND_CAP, 2)
    assert (report.totals.spend_nanos, report.totals.spend_known) == (2_400, True)


def test_a_version_that_was_known_before_is_no_progress() -> None:
    def look(number: int) -> list[Event]:
        return [call("look", number, n=number), TraceResult(call_id=f"c{number}", value=number, progress_version=5)]

    events = [event for number in range(4) for event in look(number)]
    seeded: list[Event] = [TraceStart(version=5), *events]
    stop = replay(seeded).stop
    assert stop is not None
    assert (stop.reason, stop.after_call, stop.call_index) == (Reason.NO_PROGRESS, 2, 3)
    assert [mark.index for mark in stop.evidence] == [0, 1, 2]


# -- Ladders, observation, guards one by one


def test_a_ladder_warns_blocks_and_stops_in_a_replay_too() -> None:
    events = [event for number in range(6) for event in answered("look", number, "same")]
    report = replay(events, Policy(limits=NO_CAPS, on_trip=("warn", "block", "stop")))
    assert [(one.call_index, one.action, one.warned) for one in report.judgements] == [
        (2, Action.EXECUTE, True), (3, Action.BLOCK, False),
    ]  # fmt: skip
    assert report.stop is not None
    assert report.stop.call_index == 4


def test_observing_stops_nothing_and_says_what_would_have_been() -> None:
    events = [event for number in range(4) for event in answered("look", number, "same")]
    report = replay(events, Policy(limits=NO_CAPS, on_trip=("observe",)))
    assert report.stop is None
    assert [(one.call_index, one.observed) for one in report.judgements] == [(2, True), (3, True)]


def test_each_guard_alone_is_asked_past_the_first_stop() -> None:
    pairs = [("a", "1"), ("b", "2")] * 5
    events = [event for number, (tool, value) in enumerate(pairs) for event in answered(tool, number, value)]
    report = replay(events, Policy(limits=replace(NO_CAPS, steps_max=8)), goes_on=True)
    found = {trip.guard: trip.call_index for trip in report.alone}
    assert found == {"short_cycle": 3, "same_call": 4, "no_progress": 7, "steps_max": 8}
    assert report.peaks is not None
    assert (report.peaks.steps, report.peaks.same_call, report.peaks.cycle_laps) == (10, 4, 5)


def test_a_committed_write_proposed_again_ends_the_run() -> None:
    tools = {"write": ToolPolicy(effect="write", idempotency_key="{id}")}
    events = [*answered("write", 0, "ok", id=1), *answered("look", 1, "x"), *answered("write", 2, "ok", id=1)]
    stop = replay(events, Policy(limits=NO_CAPS, tools=tools)).stop
    assert stop is not None
    assert (stop.reason, stop.call_index) == (Reason.ALREADY_COMMITTED, 2)
    assert [mark.index for mark in stop.evidence] == [0]


Evidence = tuple[list[Event], Reason, list[int]]


def _failures() -> Evidence:
    events: list[Event] = []
    for number in range(4):
        events += [
            call("build", number, n=number),
            TraceResult(call_id=f"c{number}", error_class=ErrorClass.TOOL_FAILED, message="no space"),
        ]
    return events, Reason.ERROR_STREAK, [0, 1, 2]


def _rows() -> Evidence:
    events = [event for number in range(9) for event in answered("look", number, [], n=number)]
    return events, Reason.SAME_ANSWER, list(range(8))


def _polls() -> Evidence:
    events = [event for number in range(6) for event in answered("poll", number, "pending")]
    return events, Reason.POLL_EXHAUSTED, [0, 1, 2, 3]


def _cycle() -> Evidence:
    letters = "xyz" * 3
    events = [event for number, name in enumerate(letters) for event in answered(name, number, name)]
    return events, Reason.SHORT_CYCLE, [0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize("make", [_failures, _rows, _polls, _cycle])
def test_a_stop_names_the_calls_it_rests_on(make: Callable[[], Evidence]) -> None:
    events, reason, marks = make()
    tools = {"look": ToolPolicy(effect="read"), "poll": ToolPolicy(effect="poll", poll_unchanged_max=3)}
    stop = replay(events, Policy(limits=NO_CAPS, tools=tools)).stop
    assert stop is not None
    assert stop.reason is reason
    assert [mark.index for mark in stop.evidence] == marks
