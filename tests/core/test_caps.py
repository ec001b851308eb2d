"""Caps: what they count, that the limit-th is allowed and the next refused, and that nothing resets them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from endstop import Action, Limits, Policy, PolicyInvalidError, Reason, ToolCall, ToolResult, UsageError
from endstop.core import fold
from endstop.core.decide import decide_call, decide_child, decide_handoff, decide_turn
from endstop.core.events import GO
from endstop.core.evidence import PENDING_MAX, TURNS_OPEN_MAX, Evidence
from endstop.core.model import ModelCall, Usage
from endstop.errors import InvariantError
from tests.core.kit import NO_CAPS, Clock, guard_of, proposal_of, turn_of
from tests.fixtures.driver import Step, drive, progress


def new_reads(count: int) -> list[Step]:
    return [Step(tool="read", args={"n": n}, answer=f"text {n}") for n in range(count)]


def test_the_defaults_are_the_published_ones() -> None:
    limits = Limits()
    assert (limits.steps_max, limits.turns_max, limits.tokens_max, limits.wall_ms_max) == (20, 5, 15_000, 60_000)
    assert (limits.retries_max, limits.handoffs_max, limits.depth_max, limits.spend_nanos_max) == (3, 8, 4, None)
    assert (limits.same_call_max, limits.call_window) == (2, 8)
    assert (limits.cycle_period_max, limits.cycle_repeats_max) == (8, 2)
    assert (limits.no_progress_max, limits.same_answer_max) == (3, 8)
    assert (limits.error_streak_max, limits.refused_streak_max, limits.poll_unchanged_max) == (3, 2, 30)


def test_the_twentieth_step_is_allowed_and_the_next_refused() -> None:
    story = drive(guard_of(Limits()), new_reads(30))
    assert len(story.executed) == 20
    assert story.stopped_at == 21
    assert story.ended is Reason.STEP_CAP


def test_a_step_counts_when_it_is_let_through_settled_or_not() -> None:
    guard = guard_of(replace(NO_CAPS, steps_max=1))
    assert guard.before(ToolCall(tool="a")).action is Action.EXECUTE
    assert guard.before(ToolCall(tool="b")).reason is Reason.STEP_CAP


def test_the_fifth_turn_is_allowed_and_the_next_refused() -> None:
    guard = guard_of(Limits())
    for _ in range(5):
        assert guard.before_turn().action is Action.EXECUTE
        guard.after_turn()
    assert guard.before_turn().reason is Reason.TURN_CEILING


def test_a_limit_of_zero_allows_none() -> None:
    assert guard_of(replace(NO_CAPS, turns_max=0)).before_turn().reason is Reason.TURN_CEILING
    assert guard_of(replace(NO_CAPS, steps_max=0)).before(ToolCall(tool="a")).reason is Reason.STEP_CAP


@pytest.mark.parametrize(("used", "allowed"), [(14_999, True), (15_000, True), (15_001, False)])
def test_tokens_are_refused_when_more_than_the_maximum_was_used(used: int, allowed: bool) -> None:
    guard = guard_of(Limits())
    guard.before_turn()
    guard.after_turn(input_tokens=used - 100, output_tokens=100)
    decision = guard.before_turn()
    assert (decision.action is Action.EXECUTE) is allowed
    assert allowed or decision.reason is Reason.TOKEN_CEILING


@pytest.mark.parametrize(("bound", "allowed"), [(5_000, True), (5_001, False)])
def test_tokens_are_refused_when_what_was_used_and_a_known_bound_pass_the_maximum(bound: int, allowed: bool) -> None:
    guard = guard_of(Limits())
    guard.before_turn()
    guard.after_turn(input_tokens=10_000)
    decision = guard.before_turn(input_tokens_max=bound - 1_000, output_tokens_max=1_000)
    assert (decision.action is Action.EXECUTE) is allowed


def test_the_bounds_of_model_calls_in_flight_are_held_and_given_back() -> None:
    guard = guard_of(Limits())
    guard.before_turn(output_tokens_max=8_000)
    assert guard.before_turn(output_tokens_max=8_000).reason is Reason.TOKEN_CEILING
    other = guard_of(Limits())
    other.before_turn(output_tokens_max=8_000)
    other.after_turn(output_tokens=10)
    assert other.before_turn(output_tokens_max=8_000).action is Action.EXECUTE


def test_cached_and_reasoning_tokens_are_shown_apart_and_not_added_twice() -> None:
    guard = guard_of()
    guard.before_turn()
    guard.after_turn(input_tokens=100, output_tokens=50, cache_read_tokens=80, reasoning_tokens=30)
    counters = guard.counters
    assert (counters.input_tokens, counters.output_tokens) == (100, 50)
    assert (counters.cache_read_tokens, counters.reasoning_tokens) == (80, 30)
    assert guard.evidence.input_tokens + guard.evidence.output_tokens == 150


@pytest.mark.parametrize(("passed_ms", "allowed"), [(59_999, True), (60_000, False)])
def test_the_wall_clock_runs_from_the_first_call(passed_ms: int, allowed: bool) -> None:
    clock = Clock()
    guard = guard_of(Limits(), clock=clock)
    clock.pass_ms(1_000_000)
    guard.before(ToolCall(tool="a"))
    clock.pass_ms(passed_ms)
    decision = guard.before(ToolCall(tool="b"))
    assert (decision.action is Action.EXECUTE) is allowed
    assert allowed or decision.reason is Reason.WALL_CLOCK_CAP


def test_a_clock_that_starts_at_zero_counts_and_one_that_runs_backwards_adds_nothing() -> None:
    clock = Clock(0)
    guard = guard_of(Limits(), clock=clock)
    guard.before(ToolCall(tool="a"))
    clock.pass_ms(100)
    assert guard.counters.elapsed_ms in (99, 100)
    clock.now_us = 0
    assert guard.counters.elapsed_ms == 0
    assert guard.before(ToolCall(tool="b")).action is Action.EXECUTE


def test_elapsed_time_is_running_time_only() -> None:
    evidence = Evidence()
    fold.started(evidence, 1_000_000)
    fold.started(evidence, 5_000_000)
    fold.paused(evidence, 3_000_000)
    assert evidence.elapsed_us_at(900_000_000) == 2_000_000
    fold.continued(evidence, 1_000_000_000)
    assert evidence.elapsed_us_at(1_000_500_000) == 2_500_000


def test_handoffs_and_depth_have_their_caps() -> None:
    policy, evidence = Policy(), Evidence()
    for number in range(8):
        edge = proposal_of("handoff", target=number)
        verdict = decide_handoff(policy, evidence, edge, 1)
        assert verdict.action is Action.EXECUTE
        fold.handed_off(evidence, edge, verdict, policy.limits)
    assert decide_handoff(policy, evidence, proposal_of("handoff", target=99), 1).reason is Reason.HANDOFF_CAP
    assert decide_child(policy, evidence, 4, 1).action is Action.EXECUTE
    assert decide_child(policy, evidence, 5, 1).reason is Reason.DEPTH_CAP


def test_one_handoff_repeated_is_refused_like_a_call_with_one_answer() -> None:
    policy, evidence = Policy(), Evidence()
    edge = proposal_of("handoff", target="b")
    for _ in range(2):
        fold.handed_off(evidence, edge, decide_handoff(policy, evidence, edge, 1), policy.limits)
    assert decide_handoff(policy, evidence, edge, 1).reason is Reason.SAME_CALL_REPEAT


def test_a_child_that_starts_shares_the_evidence_and_changes_nothing_in_it() -> None:
    policy, evidence = Policy(), Evidence()
    before = evidence.pack()
    fold.child_started(evidence, decide_child(policy, evidence, 1, 1))
    assert evidence.pack() == before


def test_spend_needs_a_price_only_when_there_is_a_budget() -> None:
    budget = Policy(limits=Limits(spend_nanos_max=1_000))
    assert decide_turn(Policy(), Evidence(), turn_of(), 1).action is Action.EXECUTE
    assert decide_turn(budget, Evidence(), turn_of(), 1).reason is Reason.BUDGET_UNPRICED
    assert decide_turn(budget, Evidence(), turn_of(nanos=1_000), 1).action is Action.EXECUTE
    assert decide_turn(budget, Evidence(), turn_of(nanos=1_001), 1).reason is Reason.SPEND_CAP


def test_spend_counts_what_is_posted_and_what_is_held() -> None:
    policy, evidence = Policy(limits=Limits(spend_nanos_max=1_000)), Evidence()
    fold.turn_let_through(evidence, turn_of("t1", nanos=600))
    assert decide_turn(policy, evidence, turn_of("t2", nanos=401), 1).reason is Reason.SPEND_CAP
    fold.turn_settled(evidence, "t1", Usage(input_tokens=1), 500)
    assert decide_turn(policy, evidence, turn_of("t2", nanos=500), 1).action is Action.EXECUTE
    assert decide_turn(policy, evidence, turn_of("t2", nanos=501), 1).reason is Reason.SPEND_CAP


def test_retries_of_a_provider_share_the_runs_retry_cap() -> None:
    policy, evidence = Policy(), Evidence()
    for number in range(3):
        verdict = decide_turn(policy, evidence, turn_of(f"t{number}", retry=True), 1)
        assert verdict.is_retry
        fold.turn_let_through(evidence, turn_of(f"t{number}", retry=True))
    assert evidence.retries == 3
    assert decide_turn(policy, evidence, turn_of("t9", retry=True), 1).reason is Reason.RETRY_CAP


def test_neither_progress_nor_a_users_word_resets_a_cap() -> None:
    guard = guard_of(replace(NO_CAPS, steps_max=4))
    steps = [Step(tool="poll", answer=progress("x", n), user_speaks=True) for n in range(9)]
    assert drive(guard, steps).ended is Reason.STEP_CAP


def test_a_stop_is_a_latch_with_its_own_reason_and_takes_the_time_with_it() -> None:
    clock = Clock()
    guard = guard_of(replace(NO_CAPS, steps_max=1), clock=clock)
    drive(guard, new_reads(2))
    clock.pass_ms(10**9)
    assert guard.before(ToolCall(tool="other")).guard == "latch"
    assert guard.before_turn().reason is Reason.STEP_CAP
    assert guard.after_turn(input_tokens=1).reason is Reason.STEP_CAP
    assert guard.counters.elapsed_ms == 0


def test_a_result_that_comes_after_the_stop_is_recorded_and_answered_with_the_stop() -> None:
    guard = guard_of(replace(NO_CAPS, steps_max=1))
    first = ToolCall(tool="a", call_id="c1")
    guard.before(first)
    guard.before(ToolCall(tool="b", call_id="c2"))
    decision = guard.after(first, ToolResult(status="complete"))
    assert (decision.action, decision.reason) == (Action.STOP, Reason.STEP_CAP)
    assert guard.ended is Reason.STEP_CAP
    assert not guard.evidence.pending


def test_calls_in_flight_have_a_limit_and_the_next_one_is_blocked_not_stopped() -> None:
    policy, evidence = Policy(limits=NO_CAPS), Evidence()
    for number in range(PENDING_MAX):
        fold.let_through(evidence, proposal_of(call_id=f"c{number}", n=number), GO, 1, None)
    verdict = decide_call(policy, evidence, proposal_of(call_id="one-more", n="x"), 1)
    assert (verdict.action, verdict.reason) == (Action.BLOCK, Reason.IN_PROGRESS)
    with pytest.raises(InvariantError):
        fold.let_through(evidence, proposal_of(call_id="one-more"), verdict, 1, None)


def test_model_calls_in_flight_have_a_limit() -> None:
    policy, evidence = Policy(limits=NO_CAPS), Evidence()
    for number in range(TURNS_OPEN_MAX):
        fold.turn_let_through(evidence, turn_of(f"t{number}"))
    assert decide_turn(policy, evidence, turn_of("more"), 1).reason is Reason.IN_PROGRESS
    with pytest.raises(InvariantError):
        fold.turn_let_through(evidence, turn_of("more"))


@pytest.mark.parametrize("value", [-1, True, 1.5, 2**53, "9"])
def test_bounds_and_usage_are_whole_numbers(value: object) -> None:
    with pytest.raises(UsageError):
        ModelCall(output_tokens_max=value)  # type: ignore[arg-type]  # the point of the test
    with pytest.raises(UsageError):
        Usage(input_tokens=value)  # type: ignore[arg-type]  # the point of the test
    with pytest.raises(UsageError):
        guard_of().after_turn(spend_nanos=value)  # type: ignore[arg-type]  # the point of the test


def test_usage_adds_input_and_output() -> None:
    assert Usage(input_tokens=3, output_tokens=4, cache_read_tokens=2).total_tokens == 7


def test_a_limit_can_be_raised_by_name_only() -> None:
    assert Limits().raised("steps_max", 40).steps_max == 40
    with pytest.raises(PolicyInvalidError, match="no limit named"):
        Limits().raised("step_max", 40)
