"""What happens when a guard trips: the rungs, the note to the model, and `observe`."""

from __future__ import annotations

from dataclasses import replace

import pytest

from endstop import Action, Effect, ErrorClass, LoopGuard, Policy, PolicyInvalidError, Reason, ToolCall, ToolPolicy
from endstop.core import fold
from endstop.core.decide import decide_call, decide_child, decide_handoff, decide_turn
from endstop.core.events import Controls, OperationView, Order, Verdict
from endstop.core.evidence import RUNG_STEPS_KEPT, Evidence
from endstop.core.messages import message_of, warning_of
from tests.core.kit import NO_CAPS, guard_of, proposal_of, turn_of, write_of
from tests.core.shapes import POLL, failed
from tests.core.test_results import retryable
from tests.fixtures.driver import Step, drive

LADDER = ("warn", "block", "stop")
LOOK = Step(tool="look", answer="same")
PATIENT = replace(NO_CAPS, no_progress_max=99)


def actions(guard: LoopGuard, steps: list[Step]) -> list[Action]:
    return [decision.action for decision in drive(guard, steps).decisions]


# -- Ladders


def test_the_default_ladder_stops_at_once() -> None:
    assert Policy().on_trip == ("stop",)
    assert actions(guard_of(), [LOOK] * 3)[-1] is Action.STOP


def test_a_ladder_warns_then_blocks_then_stops() -> None:
    story = drive(guard_of(PATIENT, on_trip=LADDER), [LOOK] * 5)
    assert [decision.action for decision in story.decisions] == [Action.EXECUTE] * 3 + [Action.BLOCK, Action.STOP]
    warned = story.decisions[2]
    assert warned.reason is Reason.SAME_CALL_REPEAT
    assert warned.warning is not None
    assert warned.message in warned.warning


@pytest.mark.parametrize(
    ("ladder", "after"),
    [
        (("warn", "stop"), [Action.EXECUTE, Action.STOP]),
        (("block", "stop"), [Action.BLOCK, Action.STOP]),
        (("stop",), [Action.STOP]),
    ],
)
def test_shorter_ladders_leave_rungs_out(ladder: tuple[str, ...], after: list[Action]) -> None:
    assert actions(guard_of(PATIENT, on_trip=ladder), [LOOK] * 9)[2:] == after


@pytest.mark.parametrize(
    "ladder",
    [
        ("warn",),
        ("warn", "block"),
        (),
        ("stop", "warn"),
        ("block", "warn", "stop"),
        ("stop", "stop"),
        ("warn", "stop", "block"),
        ("observe", "stop"),
        ("shout", "stop"),
    ],
)
def test_a_ladder_without_a_stop_or_with_a_rung_out_of_reach_is_refused(ladder: tuple[str, ...]) -> None:
    with pytest.raises(PolicyInvalidError):
        Policy(on_trip=ladder)


def test_one_word_may_stand_for_a_ladder_of_one_rung() -> None:
    assert Policy(on_trip="observe").observes  # type: ignore[arg-type]  # the point of the test
    assert Policy(on_trip="stop").on_trip == ("stop",)  # type: ignore[arg-type]  # the same


def test_where_a_loop_is_seen_in_a_result_the_rung_after_the_warning_is_a_stop() -> None:
    guard = guard_of(on_trip=LADDER)
    errors = [Step(tool="api", args={"n": n}, answer=failed(ErrorClass.AUTH, "no")) for n in range(6)]
    calls = [ToolCall(tool="api", args={"n": n}, call_id=f"c{n}") for n in range(6)]
    seen = []
    for call, step in zip(calls, errors, strict=True):
        if guard.before(call).action is Action.EXECUTE:
            seen.append(guard.after(call, step.answer))
    assert [decision.action for decision in seen] == [Action.EXECUTE] * 3 + [Action.STOP]
    assert seen[2].warning is not None
    assert seen[3].reason is Reason.ERROR_STREAK
    assert drive(guard_of(on_trip=("block", "stop")), errors).stopped_at == 4


def test_a_cap_has_no_rungs() -> None:
    guard = guard_of(replace(NO_CAPS, steps_max=1), on_trip=LADDER)
    assert actions(guard, [LOOK] * 2)[-1] is Action.STOP


def test_a_loop_that_stayed_away_starts_at_the_bottom_again() -> None:
    evidence = Evidence(rungs={"x": (2, 10)}, steps=10 + RUNG_STEPS_KEPT)
    assert evidence.rungs_climbed("x") == 2
    evidence.steps += 1
    assert evidence.rungs_climbed("x") == 0
    assert evidence.rungs_climbed("unknown") == 0


def test_a_new_epoch_forgets_warnings() -> None:
    guard = guard_of(PATIENT, on_trip=LADDER)
    drive(guard, [LOOK] * 3)
    assert guard.evidence.warned == 1
    guard.user_input()
    assert drive(guard, [LOOK] * 3).decisions[-1].warning is not None


# -- Notes


def test_a_poll_is_told_to_wait_and_not_to_vary_its_arguments() -> None:
    guard = guard_of(replace(NO_CAPS, poll_unchanged_max=2), tools={"status": POLL}, on_trip=LADDER)
    call = ToolCall(tool="status", call_id="c")
    decisions = []
    for _ in range(3):
        guard.before(call)
        decisions.append(guard.after(call, "running"))
    assert "long wait" in (decisions[-1].warning or "")


def test_only_a_warning_has_a_note_and_only_a_reason_a_message() -> None:
    assert message_of(Verdict()) == ""
    assert warning_of(Verdict(), Effect.READ) is None
    stopped = Verdict(action=Action.STOP, reason=Reason.FATAL, warn=True)
    assert warning_of(stopped, Effect.READ) is None
    assert warning_of(Verdict(reason=Reason.NO_PROGRESS, warn=True), Effect.READ) is not None


# -- Observe


def observer(**limits: int) -> LoopGuard:
    return guard_of(replace(NO_CAPS, **limits), on_trip=("observe",))


def test_under_observe_no_loop_is_refused_and_every_one_is_said() -> None:
    story = drive(observer(), [LOOK] * 9)
    assert len(story.executed) == 9
    assert story.ended is None
    assert [decision.reason for decision in story.decisions[2:4]] == [Reason.SAME_CALL_REPEAT] * 2
    assert all(decision.observed for decision in story.decisions[2:])


def test_under_observe_a_loop_climbs_no_rung() -> None:
    guard = observer()
    drive(guard, [LOOK] * 9)
    assert guard.evidence.rungs == {}


def test_under_observe_caps_are_said_unless_a_guard_after_them_speaks() -> None:
    guard = observer(steps_max=1)
    story = drive(guard, [LOOK] * 3)
    assert [decision.reason for decision in story.decisions] == [None, Reason.STEP_CAP, Reason.SAME_CALL_REPEAT]
    assert len(story.executed) == 3


def test_under_observe_every_cap_lets_through_and_speaks() -> None:
    limits = replace(
        NO_CAPS, wall_ms_max=1, turns_max=0, tokens_max=0, retries_max=0, handoffs_max=0, depth_max=0, spend_nanos_max=0
    )
    policy = Policy(limits=limits, on_trip=("observe",))
    late, on_time = Evidence(running_since_us=1), Evidence()
    assert decide_call(policy, late, proposal_of(), 10**9).reason is Reason.WALL_CLOCK_CAP
    assert decide_turn(policy, late, turn_of(), 10**9).reason is Reason.WALL_CLOCK_CAP
    assert decide_turn(policy, on_time, turn_of(), 1).reason is Reason.TURN_CEILING
    assert decide_handoff(policy, on_time, proposal_of("handoff"), 1).reason is Reason.HANDOFF_CAP
    assert decide_child(policy, on_time, 1, 1).reason is Reason.DEPTH_CAP
    retry = decide_turn(policy, on_time, turn_of(retry=True), 1)
    assert (retry.action, retry.reason, retry.is_retry) == (Action.EXECUTE, Reason.RETRY_CAP, True)
    turns = Policy(limits=replace(limits, turns_max=9), on_trip=("observe",))
    assert decide_turn(turns, on_time, turn_of(tokens=1), 1).reason is Reason.TOKEN_CEILING
    assert decide_turn(turns, on_time, turn_of(), 1).reason is Reason.BUDGET_UNPRICED
    assert decide_turn(turns, on_time, turn_of(nanos=1), 1).reason is Reason.SPEND_CAP


def test_under_observe_a_retry_is_let_through_and_counted() -> None:
    guard = observer(retries_max=1)
    story = drive(guard, [Step(tool="api", answer=retryable(60_000)), *[Step(tool="api", answer=retryable())] * 3])
    assert len(story.executed) == 4
    assert story.decisions[-1].reason is Reason.RETRY_CAP
    assert guard.counters.retries == 3


def test_under_observe_copies_and_hasty_polls_run() -> None:
    tools = {"status": ToolPolicy(effect="poll", poll_interval_ms_min=60_000)}
    guard = guard_of(tools=tools, on_trip=("observe",))
    steps = [Step(tool="status", answer="x", round_id="m1"), Step(tool="status", answer="x", round_id="m1")]
    assert len(drive(guard, [*steps, *steps]).executed) == 4


def test_under_observe_what_cannot_run_does_not_run_and_ends_nothing() -> None:
    guard = guard_of(on_trip=("observe",))
    story = drive(guard, [Step(tool="none", fault=ErrorClass.UNKNOWN_TOOL)] * 9)
    assert story.executed == []
    assert {decision.action for decision in story.decisions} == {Action.BLOCK}


def test_under_observe_a_committed_write_is_still_not_made_again() -> None:
    policy = Policy(on_trip=("observe",), limits=NO_CAPS)
    proposal = write_of(call_id="second")
    committed = OperationView(
        operation_id="o1", state="COMMITTED", fingerprint=proposal.fingerprint, call_id="first", same_run=True,
        generation=1,
    )  # fmt: skip
    assert decide_call(policy, Evidence(), proposal, 1, operation=committed).action is Action.REPLAY


def test_under_observe_operators_are_obeyed() -> None:
    policy = Policy(on_trip=("observe",))
    order = Order(reason="r", actor="a")
    assert decide_call(policy, Evidence(), proposal_of(), 1, controls=Controls(stop=order)).action is Action.STOP
    evidence = Evidence()
    fold.let_through(evidence, proposal_of(), Verdict(), 1, None)
    frozen = decide_call(policy, evidence, proposal_of(), 1, controls=Controls(frozen=order))
    assert (frozen.action, frozen.reason) == (Action.BLOCK, Reason.FROZEN)
