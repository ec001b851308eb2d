"""Properties of the decision as a whole: pure, exact, monotone in its limits, and always with an end."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from endstop import Action, Limits, LoopGuard, Policy, ToolCall, ToolPolicy, ToolResult
from endstop.core import fold, loops
from endstop.core.decide import decide_call, decide_child, decide_handoff, decide_turn
from endstop.core.events import Proposal
from endstop.core.evidence import Evidence
from endstop.core.reasons import Effect
from tests.core.kit import NO_CAPS, Clock, guard_of, proposal_of, turn_of
from tests.fixtures.driver import Step, drive

ANSWERS: list[object] = [
    "same",
    "other",
    ToolResult(error_class="not_found", message="no"),
    ToolResult(error_class="tool_failed", message="broke"),
    ToolResult(status="retryable", retry_after_ms=0),
    ToolResult(value=1, progress_version=7),
]
STEPS = st.builds(
    Step,
    tool=st.sampled_from(["a", "b", "read", "poll"]),
    args=st.fixed_dictionaries({"n": st.integers(0, 2)}),
    answer=st.sampled_from(ANSWERS),
    round_id=st.sampled_from([None, None, "m1", "m2"]),
)
RUNS = st.lists(STEPS, max_size=25)
TOOLS = {"read": ToolPolicy(effect="read"), "poll": ToolPolicy(effect="poll")}


# -- Pure


@given(RUNS)
def test_a_decision_changes_nothing_in_the_evidence(steps: list[Step]) -> None:
    guard = guard_of(tools=TOOLS, on_trip=("warn", "block", "stop"))
    drive(guard, steps)
    evidence, policy = guard.evidence, guard.policy
    before = evidence.pack()
    for name in ("a", "b", "read", "new"):
        proposal = proposal_of(name, n=1)
        first = decide_call(policy, evidence, proposal, 5)
        assert decide_call(policy, evidence, proposal, 5) == first
        decide_handoff(policy, evidence, proposal, 5)
    decide_turn(policy, evidence, turn_of(tokens=5), 5)
    decide_child(policy, evidence, 1, 5)
    assert evidence.pack() == before


@given(RUNS)
def test_the_same_run_is_decided_the_same_again(steps: list[Step]) -> None:
    one, other = (drive(guard_of(tools=TOOLS), steps) for _ in range(2))
    assert one.decisions == other.decisions


# -- Cycles, against brute force


def repeats_by_hand(names: list[str], period: int) -> int:
    """How many of the newest symbols equal the one `period` places before them, counted one by one."""
    count = 0
    while len(names) - count - period > 0 and names[-1 - count] == names[-1 - count - period]:
        count += 1
    return count


@given(st.lists(st.sampled_from("abc"), max_size=40), st.integers(2, 12))
def test_the_counted_repeats_are_those_of_the_whole_history(names: list[str], period_max: int) -> None:
    limits, evidence = Limits(cycle_period_max=period_max, call_window=1), Evidence()
    for place, name in enumerate(names):
        fold._push(evidence, (name, ""), limits)
        expected = [repeats_by_hand(names[: place + 1], period) for period in range(1, period_max + 1)]
        assert evidence.runs == expected


def cycle_by_hand(names: list[str], proposed: str, period_max: int, laps: int) -> int | None:
    """The shortest period p from 2 on in which `names` ends in so many full laps and `proposed` starts the next.

    For p = 2 the proposed call is the last of the laps. A row of one symbol is no cycle.
    """
    for period in range(2, period_max + 1):
        length = period * laps - (1 if period == 2 and laps > 1 else 0)
        tail = names[-length:]
        if len(tail) < length or len(set(tail)) == 1:
            continue
        repeated = all(tail[place] == tail[place + period] for place in range(length - period))
        if repeated and tail[length - period] == proposed:
            return period
    return None


def named(tool: str) -> Proposal:
    return Proposal(tool=tool, effect=Effect.UNKNOWN, fingerprint=tool, call_id="c")


@given(st.lists(st.sampled_from("abc"), max_size=30), st.integers(2, 8), st.integers(1, 4))
def test_a_cycle_is_found_exactly_where_it_is_by_hand(names: list[str], period_max: int, laps: int) -> None:
    limits = Limits(cycle_period_max=period_max, cycle_repeats_max=laps)
    evidence = Evidence()
    for name in names:
        fold._push(evidence, (name, ""), limits)
    for proposed in "abcd":
        trip = loops.cycle_before(limits, evidence, named(proposed))
        found = None if trip is None else trip.detail.period
        assert found == cycle_by_hand(names, proposed, period_max, laps)


# -- Monotone


LIMIT_NAMES = [
    "steps_max", "retries_max", "same_call_max", "cycle_repeats_max", "no_progress_max", "same_answer_max",
    "error_streak_max", "refused_streak_max", "poll_unchanged_max", "turns_max", "tokens_max", "wall_ms_max",
]  # fmt: skip
SMALL = Limits(
    steps_max=6, retries_max=1, same_call_max=1, cycle_repeats_max=1, no_progress_max=1, same_answer_max=2,
    error_streak_max=1, refused_streak_max=1, poll_unchanged_max=1,
)  # fmt: skip


@pytest.mark.parametrize("name", LIMIT_NAMES)
@given(steps=RUNS, more=st.integers(1, 5))
def test_a_higher_limit_never_refuses_what_a_lower_one_let_pass(name: str, steps: list[Step], more: int) -> None:
    """At one and the same point of one run."""
    guard = guard_of(tools=TOOLS, on_trip=("observe",))
    drive(guard, steps)
    evidence = guard.evidence
    low = Policy(limits=SMALL, tools=TOOLS)
    high = replace(low, limits=replace(SMALL, **{name: getattr(SMALL, name) + more}))
    for tool in ("a", "b", "read", "poll", "new"):
        proposal = replace(proposal_of(tool, n=1), call_id="next")
        if decide_call(low, evidence, proposal, 10).action is Action.EXECUTE:
            assert decide_call(high, evidence, proposal, 10).action is Action.EXECUTE
    if decide_turn(low, evidence, turn_of(tokens=9), 10).action is Action.EXECUTE:
        assert decide_turn(high, evidence, turn_of(tokens=9), 10).action is Action.EXECUTE


# -- Always an end


@given(st.lists(STEPS, min_size=1, max_size=4))
def test_a_run_that_repeats_itself_ends(lap: list[Step]) -> None:
    """Whatever a short lap holds, its repetition is stopped without any cap but that on retries."""
    story = drive(guard_of(), [replace(step, round_id=None) for step in lap * 30])
    assert story.stopped_at is not None


@given(RUNS)
def test_nothing_runs_after_the_stop(steps: list[Step]) -> None:
    guard = guard_of(tools=TOOLS)
    drive(guard, steps)
    if guard.ended is not None:
        counters = guard.counters
        again = drive(guard, [Step(tool="brand-new", args={"n": 99})])
        assert again.executed == []
        assert guard.counters == counters


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 2_000)), max_size=30))
def test_holds_are_given_back_and_never_go_below_nothing(moves: list[tuple[int, int]]) -> None:
    guard = LoopGuard(Policy(limits=NO_CAPS), clock=Clock())
    open_turns = 0
    for kind, tokens in moves:
        if kind and guard.before_turn(output_tokens_max=tokens).action is Action.EXECUTE:
            open_turns += 1
        elif open_turns:
            guard.after_turn(output_tokens=tokens)
            open_turns -= 1
        assert guard.evidence.held_tokens >= 0
        assert len(guard.evidence.turns_open) == open_turns
    while open_turns:
        guard.after_turn()
        open_turns -= 1
    assert guard.evidence.held_tokens == 0


@given(st.dictionaries(st.text(max_size=4), st.integers(), max_size=3))
def test_a_call_made_of_the_same_parts_is_the_same_call(args: dict[str, int]) -> None:
    guard = guard_of()
    calls = [ToolCall(tool="t", args=dict(args), call_id=f"c{n}") for n in range(3)]
    for call in calls[:2]:
        guard.before(call)
        guard.after(call, "same")
    assert guard.before(calls[2]).action is Action.STOP
