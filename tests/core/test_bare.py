"""The bare guard around the core: which result belongs to which call, its lock, its clock, its public answers."""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import get_type_hints

import pytest

import endstop
from endstop import Action, LoopGuard, NextAction, Policy, Reason, ToolCall, ToolPolicy, ToolResult
from endstop.core import fold
from endstop.core.envelope import Envelope
from endstop.core.events import Verdict
from endstop.core.evidence import Evidence
from endstop.core.reasons import Change
from tests.core.kit import NO_CAPS, Clock, guard_of, proposal_of, turn_of
from tests.fixtures.driver import Step, drive


def test_the_example_of_the_docstring_runs() -> None:
    guard = LoopGuard()
    call = ToolCall(tool="search", args={"q": "x"})
    decision = guard.before(call)
    assert decision.action == "execute"
    assert guard.after(call, ToolResult(value=["hit"])).action == "execute"
    assert decision.fingerprint
    assert decision.reason is None


# -- Which result belongs to which call


def test_a_result_finds_its_call_by_id() -> None:
    guard = guard_of()
    first, second = (ToolCall(tool="t", args={"n": n}, call_id=f"c{n}") for n in (1, 2))
    guard.before(first)
    guard.before(second)
    assert guard.after(second, "b").fingerprint == guard.before(replace(second, call_id="x")).fingerprint
    guard.after(first, "a")
    assert [len(guard.evidence.trail), len(guard.evidence.pending)] == [2, 1]


def test_a_result_finds_a_call_without_an_id_by_the_call_itself_or_by_its_like() -> None:
    guard = guard_of()
    call, like = ToolCall(tool="t", args={"n": 1}), ToolCall(tool="t", args={"n": 1})
    guard.before(call)
    guard.before(call)
    guard.after(call, "a")
    assert len(guard.evidence.pending) == 1
    guard.after(like, "a")
    assert not guard.evidence.pending
    assert len(guard.evidence.trail) == 2


def test_two_calls_under_one_id_are_answered_in_their_order() -> None:
    guard = guard_of()
    first, second = (ToolCall(tool="t", args={"n": n}, call_id="same") for n in (1, 2))
    guard.before(first)
    guard.before(second)
    one = guard.after(first, "a").fingerprint
    other = guard.after(second, "b").fingerprint
    assert one != other
    assert not guard.evidence.pending


@pytest.mark.parametrize("call_id", ["", "c1"])
def test_a_result_without_a_call_is_evidence_all_the_same(call_id: str) -> None:
    """A host that ran a call it never asked about."""
    guard = guard_of()
    for _ in range(2):
        guard.after(ToolCall(tool="t", call_id=call_id), "same")
    assert guard.counters.steps == 0
    assert guard.before(ToolCall(tool="t")).reason is Reason.SAME_CALL_REPEAT


# -- Threads


def test_threads_share_one_count() -> None:
    guard = LoopGuard(Policy(limits=replace(NO_CAPS, steps_max=100)))
    ran: list[int] = []

    def work(worker: int) -> None:
        for number in range(50):
            call = ToolCall(tool="t", args={"w": worker, "n": number}, call_id=f"{worker}-{number}")
            if guard.before(call).action is Action.EXECUTE:
                ran.append(number)
                guard.after(call, number)

    workers = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert len(ran) == 100
    assert guard.counters.steps == 100
    assert guard.ended is Reason.STEP_CAP


# -- The clock


def test_without_a_clock_real_time_is_taken() -> None:
    guard = LoopGuard()
    assert guard.before(ToolCall(tool="t")).action is Action.EXECUTE
    assert guard.counters.elapsed_ms < 60_000


def test_time_starts_at_the_first_call_and_stops_with_the_run() -> None:
    clock = Clock()
    guard = guard_of(clock=clock)
    clock.pass_ms(5_000)
    assert guard.counters.elapsed_ms == 0
    drive(guard, [Step(tool="t", answer=ToolResult(status="complete"))])
    clock.pass_ms(5_000)
    assert guard.before(ToolCall(tool="t")).reason is Reason.COMPLETE
    assert guard.counters.elapsed_ms == 0


# -- Small folds that the durable run uses


def test_a_stop_climbs_no_rung_and_another_verdict_does() -> None:
    evidence = Evidence()
    fold.climbed_after(evidence, Verdict(action=Action.STOP, reason=Reason.NO_PROGRESS, loop="stall:0"))
    assert evidence.rungs == {}
    fold.climbed_after(evidence, Verdict(reason=Reason.NO_PROGRESS, loop="stall:0", warn=True))
    assert evidence.rungs == {"stall:0": (1, 0)}


def test_a_worker_that_comes_back_opens_a_generation_and_keeps_windows_and_counts() -> None:
    guard = guard_of()
    drive(guard, [Step(tool="t", answer="same")] * 2)
    evidence = guard.evidence
    fold.let_through(evidence, proposal_of(), Verdict(), 1, None)
    fold.turn_let_through(evidence, turn_of(tokens=9))
    fold.reentered(evidence)
    assert (evidence.generation, len(evidence.trail), evidence.steps) == (2, 2, 3)
    assert (evidence.pending, evidence.turns_open, evidence.held_tokens, evidence.output_tokens) == ({}, {}, 0, 9)


# -- Public answers as JSON


def test_a_decision_a_result_and_an_envelope_speak_json() -> None:
    guard = LoopGuard()
    story = drive(guard, [Step(tool="t", answer="same")] * 3)
    decision = story.decisions[-1].to_json()
    assert decision["action"] == "stop"
    assert decision["reason"] == "same_call_repeat"
    assert ToolResult(value=7).to_json()["status"] == "progress"
    envelope = Envelope(
        run_id="r", generation=1, terminal_reason=Reason.STEP_CAP, next_allowed_action=NextAction.RESUME_AFTER_CHANGE
    )
    assert envelope.to_json()["terminal_reason"] == "step_cap"


def test_words_are_their_enums_for_whoever_reads_annotations() -> None:
    hints = get_type_hints(ToolResult)
    assert hints["status"] is endstop.Status
    assert hints["error_class"] == endstop.ErrorClass | None


def test_words_may_be_written_as_plain_text_and_are_read_as_members() -> None:
    assert ToolCall(tool="t", change="cursor").change is Change.CURSOR
    assert ToolResult(status="fatal").status is endstop.Status.FATAL
    assert ToolPolicy(effect="read").effect is endstop.Effect.READ


def test_a_policy_under_other_limits_keeps_its_tools() -> None:
    policy = Policy(tools={"a.*": ToolPolicy(effect="read")})
    other = policy.under(NO_CAPS)
    assert other.limits is NO_CAPS
    assert other.tool("a.b") is policy.tool("a.b")
