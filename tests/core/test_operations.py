"""Writes and their keys: what the ledger of operations says of a proposal, and what may never be sent twice."""

from __future__ import annotations

from dataclasses import replace

import pytest

from endstop import Action, ErrorClass, Policy, Reason, ToolCall, ToolPolicy, ToolResult
from endstop.core import fold
from endstop.core.decide import decide_call
from endstop.core.events import OperationView, Proposal, Verdict
from endstop.core.evidence import ANSWERED_MAX, Evidence
from endstop.core.transitions import OperationState
from tests.core.kit import NO_CAPS, guard_of, write_of
from tests.fixtures.driver import Step, Story, drive

UPDATE = ToolPolicy(effect="write", idempotency_key="{id}")


def play(steps: list[Step], tool: ToolPolicy = UPDATE) -> Story:
    return drive(guard_of(tools={"crm.update": tool}), steps)


def update(call_id: str = "", answer: object = "done", **args: object) -> Step:
    return Step(tool="crm.update", args={"id": 1, **args}, answer=answer, call_id=call_id)


def view(proposal: Proposal, state: str, *, call_id: str = "first", **more: object) -> OperationView:
    base = OperationView(
        operation_id="op-1", state=state, fingerprint=proposal.fingerprint, call_id=call_id, same_run=True, generation=1
    )
    return replace(base, **more)  # type: ignore[arg-type]  # fields by name


def decide(state: str, *, evidence: Evidence | None = None, tool: Proposal | None = None, **more: object) -> Verdict:
    proposal = tool or write_of(call_id="second")
    operation = view(proposal, state, **more)  # type: ignore[arg-type]  # fields by name
    return decide_call(Policy(limits=NO_CAPS), evidence or Evidence(), proposal, 1_000, operation=operation)


# -- The four rules of a key


def test_the_same_call_id_is_answered_with_the_stored_result() -> None:
    story = play([update("c1"), update("c1"), update("c1")])
    assert [decision.action for decision in story.decisions] == [Action.EXECUTE, Action.REPLAY, Action.REPLAY]
    replayed = story.decisions[1]
    assert replayed.reason is None
    assert replayed.result == ToolResult(value="done")  # type: ignore[attr-defined]  # a Replay, as asserted above


def test_a_new_call_id_ends_the_run() -> None:
    story = play([update("c1"), update("c2")])
    assert (story.stopped_at, story.ended) == (2, Reason.ALREADY_COMMITTED)


def test_a_new_call_id_is_answered_from_the_ledger_where_the_policy_says_so() -> None:
    tool = ToolPolicy(effect="write", idempotency_key="{id}", on_committed="replay")
    story = play([update(f"c{n}") for n in range(3)], tool)
    assert [decision.action for decision in story.decisions] == [Action.EXECUTE, Action.REPLAY, Action.REPLAY]
    assert story.ran("crm.update") == 1


def test_other_arguments_under_one_key_are_refused() -> None:
    story = play([update("c1", name="Ann"), update("c2", name="Bob")])
    assert story.decisions[1].reason is Reason.KEY_MISMATCH
    assert story.ran("crm.update") == 1


@pytest.mark.parametrize("value", [None, "", "  "])
def test_a_write_whose_key_has_no_value_is_refused_and_told_what_is_missing(value: object) -> None:
    story = play([Step(tool="crm.update", args={"id": value})])
    decision = story.decisions[0]
    assert (decision.action, decision.reason) == (Action.BLOCK, Reason.KEY_MISSING)
    assert "id" in decision.message


def test_a_write_that_declares_no_key_is_refused_and_told_to_declare_one() -> None:
    story = play([update()], ToolPolicy(effect="write"))
    assert story.decisions[0].reason is Reason.KEY_MISSING
    assert "declare idempotency_key" in story.decisions[0].message


def test_a_write_without_a_key_that_is_proposed_again_and_again_ends_the_run() -> None:
    story = play([Step(tool="crm.update", args={"n": n}) for n in range(9)])
    assert (story.stopped_at, story.ended) == (3, Reason.ERROR_STREAK)


# -- What became of the write


def test_a_write_in_flight_blocks_its_key() -> None:
    guard = guard_of(tools={"crm.update": UPDATE})
    guard.before(ToolCall(tool="crm.update", args={"id": 1}, call_id="c1"))
    decision = guard.before(ToolCall(tool="crm.update", args={"id": 1}, call_id="c2"))
    assert (decision.action, decision.reason) == (Action.BLOCK, Reason.IN_PROGRESS)


def test_waiting_for_a_write_in_flight_is_no_refusal_that_adds_up() -> None:
    guard = guard_of(tools={"crm.update": UPDATE})
    for number in range(9):
        guard.before(ToolCall(tool="crm.update", args={"id": 1}, call_id=f"c{number}"))
    assert guard.evidence.streaks == {}
    assert guard.ended is None


def test_a_write_that_was_proven_not_applied_may_be_made() -> None:
    undone: ToolResult[object] = ToolResult(error_class="conflict", side_effect_committed=False, message="busy")
    story = play([update("c1", undone), update("c2")])
    assert story.ran("crm.update") == 2
    assert story.ended is None


@pytest.mark.parametrize("error_class", ["timeout", "outage", "outcome_unknown"])
def test_a_write_whose_outcome_is_unknown_is_never_sent_again(error_class: str) -> None:
    lost: ToolResult[object] = ToolResult(status="retryable", error_class=error_class)
    story = play([update("c1", lost), update("c1"), update("c2")])
    assert story.ran("crm.update") == 1
    assert story.decisions[1].reason is Reason.OUTCOME_UNKNOWN
    assert (story.stopped_at, story.ended) == (3, Reason.OUTCOME_UNKNOWN)


def test_a_failure_that_says_it_was_committed_is_committed() -> None:
    odd: ToolResult[object] = ToolResult(error_class="tool_failed", side_effect_committed=True, message="m")
    assert play([update("c1", odd), update("c2")]).ended is Reason.ALREADY_COMMITTED


def test_a_late_second_answer_un_commits_nothing() -> None:
    guard = guard_of(tools={"crm.update": UPDATE})
    call = ToolCall(tool="crm.update", args={"id": 1}, call_id="c1")
    guard.before(call)
    guard.after(call, "done")
    guard.after(call, ToolResult(error_class="conflict", side_effect_committed=False, message="late"))
    assert guard.before(call).action is Action.REPLAY


def test_an_answer_to_a_write_that_was_never_let_through_is_recorded_all_the_same() -> None:
    """A host that ran it anyway: the key is taken from now on, or free when it was proven not applied."""
    guard = guard_of(tools={"crm.update": UPDATE})
    call = ToolCall(tool="crm.update", args={"id": 1}, call_id="c1")
    guard.after(call, ToolResult(error_class="conflict", side_effect_committed=False, message="no"))
    assert guard.before(call).action is Action.EXECUTE
    other = ToolCall(tool="crm.update", args={"id": 2}, call_id="c2")
    guard.after(other, "done")
    assert guard.before(replace(other, call_id="c3")).reason is Reason.ALREADY_COMMITTED


def test_a_refusal_by_the_target_is_kept_as_the_answer() -> None:
    guard = guard_of(tools={"crm.update": UPDATE}, on_trip=("observe",))
    call = ToolCall(tool="crm.update", args={"id": 1}, call_id="c1")
    guard.before(call)
    guard.after(call, ToolResult(status="fatal", message="no such contact"))
    fold.resumed(guard.evidence, 1)
    decision = guard.before(replace(call, call_id="c2"))
    assert decision.action is Action.REPLAY
    assert decision.result.message == "no such contact"  # type: ignore[attr-defined]  # a Replay, as asserted above


# -- Every state of an operation


@pytest.mark.parametrize(
    ("state", "action", "reason"),
    [
        (OperationState.RESERVED, Action.BLOCK, Reason.IN_PROGRESS),
        (OperationState.EXECUTING, Action.BLOCK, Reason.IN_PROGRESS),
        (OperationState.COMMITTED, Action.STOP, Reason.ALREADY_COMMITTED),
        (OperationState.TOMBSTONE, Action.STOP, Reason.ALREADY_COMMITTED),
        (OperationState.FAILED_RETRYABLE, Action.EXECUTE, None),
        (OperationState.FAILED_FINAL, Action.REPLAY, None),
        (OperationState.CANCELLED, Action.REPLAY, None),
        (OperationState.UNKNOWN, Action.BLOCK, Reason.OUTCOME_UNKNOWN),
        (OperationState.MANUAL, Action.BLOCK, Reason.OUTCOME_UNKNOWN),
        (OperationState.POISONED, Action.BLOCK, Reason.OUTCOME_UNKNOWN),
        ("A_STATE_OF_THE_FUTURE", Action.BLOCK, Reason.OUTCOME_UNKNOWN),
    ],
)
def test_each_state_of_an_operation_has_its_answer(state: str, action: Action, reason: Reason | None) -> None:
    verdict = decide(str(state))
    assert (verdict.action, verdict.reason) == (action, reason)


def test_every_state_is_in_the_table_above() -> None:
    tried = set(OperationState)
    table = test_each_state_of_an_operation_has_its_answer.pytestmark[0].args[1]  # type: ignore[attr-defined]  # pytest's own mark
    assert tried <= {row[0] for row in table}


def test_an_operation_proven_not_applied_waits_out_its_own_back_off_and_counts_as_a_retry() -> None:
    waiting = decide("FAILED_RETRYABLE", not_before_us=5_000)
    assert (waiting.action, waiting.until_us) == (Action.WAIT, 5_000)
    assert decide("FAILED_RETRYABLE", not_before_us=500).is_retry


def test_a_named_change_that_an_answer_asked_for_goes_before_the_operations_back_off() -> None:
    evidence, proposal = Evidence(), write_of(call_id="second")
    evidence.waits[proposal.fingerprint] = -1
    assert decide("FAILED_RETRYABLE", evidence=evidence).reason is Reason.NOT_BEFORE


def test_another_runs_and_an_earlier_generations_write_is_answered_once_from_the_ledger() -> None:
    """Once: asked for again in this generation it is a write proposed twice."""
    for more in ({"same_run": False}, {"generation": 0}):
        evidence, proposal = Evidence(), write_of(call_id="second")
        verdict = decide("COMMITTED", evidence=evidence, **more)
        assert verdict.action is Action.REPLAY
        fold.replayed(evidence, proposal, verdict)
        again = decide("COMMITTED", evidence=evidence, tool=write_of(call_id="third"), **more)
        assert again.reason is Reason.ALREADY_COMMITTED


def test_a_committed_write_that_is_asked_for_again_and_again_is_a_loop_too() -> None:
    tool = ToolPolicy(effect="write", idempotency_key="{id}", on_committed="replay")
    story = play([update(f"c{n}") for n in range(9)], tool)
    assert story.ran("crm.update") == 1
    assert (story.stopped_at, story.ended) == (4, Reason.SAME_CALL_REPEAT)
    guard = guard_of(tools={"crm.update": tool}, on_trip=("observe",))
    assert drive(guard, [update(f"c{n}") for n in range(9)]).ran("crm.update") == 1
    assert guard.ended is None
    guard = guard_of(tools={"crm.update": tool}, on_trip=("warn", "stop"))
    told = [decision.action for decision in drive(guard, [update(f"c{n}") for n in range(9)]).decisions]
    assert told == [Action.EXECUTE, *[Action.REPLAY] * 3, Action.STOP]


def test_answered_keys_are_bounded_and_the_newest_are_kept() -> None:
    evidence = Evidence()
    for number in [*range(ANSWERED_MAX + 5), 6]:
        fold.replayed(evidence, replace(write_of(), key_digest=f"k{number}"), Verdict(action=Action.REPLAY))
    assert len(evidence.answered) == ANSWERED_MAX
    assert evidence.answered[-1] == "k6"
    fold.replayed(evidence, replace(write_of(), key_digest=None), Verdict(action=Action.REPLAY))
    assert evidence.answered[-1] == "k6"


def test_a_keyed_fingerprint_of_the_store_goes_before_the_runs_own() -> None:
    proposal = replace(write_of(call_id="second"), operation_fingerprint="store-wide")
    operation = replace(view(proposal, "COMMITTED", same_run=False), fingerprint="store-wide")
    assert decide_call(Policy(), Evidence(), proposal, 1, operation=operation).action is Action.REPLAY
    other = replace(operation, fingerprint="another")
    assert decide_call(Policy(), Evidence(), proposal, 1, operation=other).reason is Reason.KEY_MISMATCH


def test_host_faults_come_before_keys() -> None:
    guard = guard_of(tools={"crm.update": ToolPolicy(effect="write")})
    call = ToolCall(tool="crm.update", args={"id": 1})
    assert guard.before(call, fault=ErrorClass.SCHEMA).reason is Reason.MALFORMED_CALL
