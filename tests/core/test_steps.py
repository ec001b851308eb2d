"""What one transaction changes, step by step, without a store."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import orjson
import pytest

import endstop as es
from endstop.core.events import GO, Order, TurnProposal
from endstop.core.refold import refold
from endstop.core.steps import LoseCall, version_symbol
from endstop.core.steps_life import (
    CompleteRun,
    EndRun,
    FreezeRun,
    JoinRun,
    LeaveRun,
    RecoverRun,
    ResumeRun,
    SaveCheckpoint,
    SeeOrders,
    parse_change,
)
from endstop.core.steps_turn import ReserveChild, ReserveHandoff, ReserveTurn, SettleTurn, StepAnswer
from endstop.core.transitions import OperationState
from endstop.errors import ResumeRefusedError
from tests.core.kit import proposal_of
from tests.core.stage import POLICY, SPEC, Stage


def join(stage: Stage, owner: str = "w2") -> None:
    stage.apply(JoinRun(run_id="r1", now_us=stage.at(), spec=SPEC, policy_digest=stage.policy.digest(), owner_id=owner))


def leave(stage: Stage, owner: str = "w1") -> es.Envelope | None:
    return stage.apply(LeaveRun(run_id="r1", now_us=stage.at(), owner_id=owner))


def end(stage: Stage) -> es.Envelope:
    reason = es.Reason.OPERATOR_CANCELLED_LOOP
    return stage.apply(EndRun(run_id="r1", now_us=stage.at(), reason=reason, guard="stop"))


def resume(stage: Stage, change: str = "strategy") -> int:
    return stage.apply(ResumeRun(run_id="r1", now_us=stage.at(), change=change, reason="r"))


# -- Reserve


def test_a_reservation_leaves_the_intent_the_evidence_and_one_entry() -> None:
    stage = Stage()
    proposal, reserved = stage.reserve()
    assert reserved.verdict.action is es.Action.EXECUTE
    operation = reserved.operation
    assert operation is not None
    assert (operation.state, operation.attempt, operation.fence) == (OperationState.EXECUTING, 1, 1)
    assert (operation.owner_id, operation.call_id, operation.run_id) == ("w1", "c1", "r1")
    assert stage.operations == {operation.operation_id: operation}
    assert stage.txn.evidence.steps == 1
    assert stage.txn.evidence.pending["c1"].owner == "w1"
    assert stage.kinds == ["run_open", "call_intent"]
    assert stage.last["op"] == operation.operation_id
    assert stage.last["fp"] == proposal.fingerprint


def test_an_operators_orders_are_seen_by_the_reservation() -> None:
    stage = Stage()
    stage.controls(kill=Order(reason="", actor="ops"))
    _, reserved = stage.reserve()
    assert reserved.verdict.reason is es.Reason.KILL_SWITCH
    assert reserved.envelope is not None
    assert stage.kinds == ["run_open", "call_refused", "stop"]
    assert stage.operations == {}


def test_a_latched_run_answers_with_its_end_and_writes_nothing() -> None:
    stage = Stage()
    envelope = end(stage)
    kept = len(stage.leaves)
    for _ in range(3):
        _, reserved = stage.reserve()
        assert reserved.envelope == envelope
        turn = stage.apply(
            ReserveTurn(run_id="r1", now_us=stage.at(), policy=POLICY, proposal=TurnProposal(call_id="t1"))
        )
        assert turn.envelope == envelope
    assert len(stage.leaves) == kept


def test_a_worker_of_an_earlier_generation_is_told_an_end_of_its_own() -> None:
    stage = Stage()
    end(stage)
    assert resume(stage) == 2
    kept = len(stage.leaves)
    _, reserved = stage.reserve(generation=1)
    assert reserved.verdict.guard == "generation"
    assert reserved.envelope is not None
    assert reserved.envelope.generation == 1
    stale = stage.apply(CompleteRun(run_id="r1", now_us=stage.at(), output="x", generation=1))
    assert stale.terminal_reason is es.Reason.OPERATOR_CANCELLED_LOOP
    assert stage.txn.envelope is None
    assert (len(stage.leaves), stage.txn.output) == (kept, None)
    _, reserved = stage.reserve(generation=2)
    assert reserved.verdict.action is es.Action.EXECUTE


# -- Settle and lose


def test_a_late_outcome_of_an_attempt_that_was_taken_over_is_only_noted() -> None:
    stage = Stage()
    proposal, reserved = stage.reserve()
    assert reserved.operation is not None
    owned = reserved.operation
    newer = replace(owned, attempt=2, fence=2, owner_id="w2")
    stage.operations[owned.operation_id] = newer
    settled = stage.settle(proposal, owned)
    assert not settled.accepted
    assert stage.operations[owned.operation_id] == newer
    assert stage.last["late"] == 1


def test_a_late_outcome_of_the_latest_attempt_settles_an_unknown_operation() -> None:
    stage = Stage()
    proposal, reserved = stage.reserve()
    owned = reserved.operation
    assert owned is not None
    stage.apply(RecoverRun(run_id="r1", now_us=stage.at(), dead_owners=frozenset({"w1"})))
    assert stage.operations[owned.operation_id].state is OperationState.UNKNOWN
    assert stage.settle(proposal, owned).accepted
    assert stage.operations[owned.operation_id].state is OperationState.COMMITTED


def test_an_outcome_after_the_end_is_recorded_and_ends_nothing_again() -> None:
    stage = Stage()
    proposal, reserved = stage.reserve("look", q=1)
    envelope = end(stage)
    settled = stage.settle(proposal, None, es.ToolResult(status="fatal"))
    assert settled.envelope == stage.txn.envelope == envelope
    assert stage.kinds[-1] == "result"
    del reserved


@pytest.mark.parametrize(("sent", "state"), [(True, OperationState.UNKNOWN), (False, OperationState.FAILED_RETRYABLE)])
def test_a_lost_call_is_unknown_unless_it_was_never_sent(sent: bool, state: OperationState) -> None:
    stage = Stage()
    proposal, reserved = stage.reserve()
    assert reserved.operation is not None
    lose = LoseCall(
        run_id="r1", now_us=stage.at(), proposal=proposal, operation=reserved.operation, sent=sent, cause="Ü" * 200
    )
    stage.apply(lose)
    assert stage.operations[reserved.operation.operation_id].state is state
    assert stage.txn.evidence.pending == {}
    assert stage.kinds[-1] == "lost"
    kept = len(stage.leaves)
    stage.apply(lose)
    assert len(stage.leaves) == kept


def test_losing_a_call_that_may_not_have_been_let_through_touches_only_its_own() -> None:
    stage = Stage()
    proposal, reserved = stage.reserve()
    assert reserved.operation is not None
    key = reserved.operation.operation_id
    for owner, call_id in (("w2", "c1"), ("w2", "c2"), ("w1", "c2")):
        other = replace(proposal, call_id=call_id)
        stage.apply(
            LoseCall(run_id="r1", now_us=stage.at(), proposal=other, operation_id=key, owner_id=owner, sent=False)
        )
        assert stage.operations[key].state is OperationState.EXECUTING
    assert "c1" in stage.txn.evidence.pending
    stage.apply(
        LoseCall(run_id="r1", now_us=stage.at(), proposal=proposal, operation_id=key, owner_id="w1", sent=False)
    )
    assert stage.operations[key].state is OperationState.FAILED_RETRYABLE
    # Settled since: nothing is taken back.
    proposal, reserved = stage.reserve(call_id="c3")
    stage.settle(proposal, reserved.operation)
    stage.apply(
        LoseCall(run_id="r1", now_us=stage.at(), proposal=proposal, operation_id=key, owner_id="w1", sent=False)
    )
    assert stage.operations[key].state is OperationState.COMMITTED


def test_a_delivery_of_a_call_loses_nothing_of_another_delivery_of_the_same_call() -> None:
    """Two threads of one worker deliver one call id; the answer to the refusal of the second is lost."""
    stage = Stage()
    proposal, reserved = stage.reserve(attempt="1")
    assert reserved.operation is not None
    key = reserved.operation.operation_id
    assert stage.operations[key].attempt_id == stage.last["attempt_id"] == "1"
    _, refused = stage.reserve(attempt="2")
    assert refused.verdict.reason is es.Reason.IN_PROGRESS
    kept = len(stage.leaves)
    lose = LoseCall(
        run_id="r1", now_us=stage.at(), proposal=proposal, operation_id=key, owner_id="w1", attempt_id="2", sent=False
    )
    stage.apply(lose)
    assert (stage.operations[key].state, len(stage.leaves)) == (OperationState.EXECUTING, kept)
    assert "c1" in stage.txn.evidence.pending
    # It is its own that it loses, and another try is again somebody's own.
    stage.apply(replace(lose, attempt_id="1"))
    assert stage.operations[key].state is OperationState.FAILED_RETRYABLE
    stage.reserve(attempt="3")
    assert (stage.operations[key].attempt, stage.operations[key].attempt_id) == (2, "3")
    stage.apply(replace(lose, attempt_id="1"))
    assert stage.operations[key].state is OperationState.EXECUTING


def test_a_lost_call_leaves_another_one_under_its_id_in_flight_also_when_folded() -> None:
    stage = Stage()
    proposal, first = stage.reserve(attempt="1", n="a")
    _, second = stage.reserve(attempt="2", n="b")
    assert first.operation is not None
    assert second.operation is not None
    stage.apply(
        LoseCall(
            run_id="r1", now_us=stage.at(), proposal=proposal, operation=first.operation, owner_id="w1", attempt_id="1"
        )
    )
    assert stage.operations[first.operation.operation_id].state is OperationState.UNKNOWN
    assert stage.txn.evidence.pending["c1"].operation_id == second.operation.operation_id
    assert refold(stage.leaves, POLICY.limits) == stage.txn.evidence


# -- Life


def test_the_first_to_enter_after_a_resume_enters_the_generation_that_it_opened() -> None:
    stage = Stage()
    end(stage)
    assert resume(stage) == 2
    join(stage)
    assert stage.txn.generation == 2
    leave(stage, "w2")
    join(stage, "w3")
    assert stage.txn.generation == 3
    join(stage, "w4")
    assert stage.txn.generation == 3


def test_time_stands_still_between_a_leave_and_a_join() -> None:
    stage = Stage()
    leave(stage)
    elapsed = stage.txn.evidence.elapsed_us
    stage.now_us += 10**9
    assert stage.txn.evidence.elapsed_us_at(stage.now_us) == elapsed
    join(stage)
    stage.now_us += 5_000
    assert stage.txn.evidence.elapsed_us_at(stage.now_us) == elapsed + 5_000


def test_leaving_twice_is_noted_once() -> None:
    stage = Stage()
    leave(stage)
    kept = len(stage.leaves)
    assert leave(stage) is None
    assert len(stage.leaves) == kept
    assert not stage.txn.row_changed


@pytest.mark.parametrize("state", [es.RunState.STOPPED, es.RunState.INTERRUPTED])
def test_a_freeze_that_was_ordered_meanwhile_shows_when_a_run_goes_on(state: es.RunState) -> None:
    stage = Stage()
    if state is es.RunState.STOPPED:
        end(stage)
    else:
        stage.apply(RecoverRun(run_id="r1", now_us=stage.at(), dead_owners=frozenset({"w1"})))
    assert stage.txn.state is state
    stage.controls(frozen=Order(reason="", actor="ops"))
    if state is es.RunState.STOPPED:
        resume(stage)
    else:
        join(stage)
    assert stage.txn.state is es.RunState.FROZEN
    assert stage.txn.evidence.frozen
    # Only when no order holds it any more is it lifted.
    stage.apply(FreezeRun(run_id="r1", now_us=stage.at(), frozen=False))
    assert stage.txn.state is es.RunState.FROZEN
    stage.controls()
    stage.apply(FreezeRun(run_id="r1", now_us=stage.at(), frozen=False))
    assert stage.txn.state is es.RunState.RUNNING


def test_seeing_orders_ends_a_killed_run_and_leaves_others_alone() -> None:
    stage = Stage()
    assert stage.apply(SeeOrders(run_id="r1", now_us=stage.at())) is None
    assert stage.kinds == ["run_open"]
    stage.controls(kill=Order(reason="on fire", actor="ops"))
    envelope = stage.apply(SeeOrders(run_id="r1", now_us=stage.at()))
    assert envelope is not None
    assert (envelope.terminal_reason, envelope.message) == (es.Reason.KILL_SWITCH, "on fire")
    assert stage.last["actor"] == "ops"
    with pytest.raises(ResumeRefusedError, match="kill order"):
        resume(stage)


def test_recovery_charges_open_model_calls_only_when_nobody_is_left() -> None:
    stage = Stage()
    join(stage)
    for call_id in ("t1", "t2"):
        stage.apply(
            ReserveTurn(
                run_id="r1", now_us=stage.at(), policy=POLICY,
                proposal=TurnProposal(call_id=call_id, tokens_bound=40, nanos_bound=9),
            )
        )  # fmt: skip
    stage.apply(RecoverRun(run_id="r1", now_us=stage.at(), dead_owners=frozenset({"w1"})))
    assert stage.txn.state is es.RunState.RUNNING
    assert (stage.txn.evidence.output_tokens, stage.txn.evidence.held_tokens) == (0, 80)
    stage.apply(
        SettleTurn(run_id="r1", now_us=stage.at(), call_id="t1", usage=es.Usage(output_tokens=7), spend_nanos=1)
    )
    stage.apply(RecoverRun(run_id="r1", now_us=stage.at(), dead_owners=frozenset({"w2"})))
    assert stage.txn.state is es.RunState.INTERRUPTED
    evidence = stage.txn.evidence
    assert (evidence.output_tokens, evidence.spend_nanos, evidence.held_tokens) == (47, 10, 0)
    kept = len(stage.leaves)
    stage.apply(RecoverRun(run_id="r1", now_us=stage.at(), dead_owners=frozenset({"w1", "w2"})))
    assert len(stage.leaves) == kept


def test_an_interrupted_runs_time_ended_when_it_was_last_seen() -> None:
    stage = Stage()
    stage.reserve()
    seen_us = stage.now_us
    stage.now_us += 10**9
    stage.apply(RecoverRun(run_id="r1", now_us=stage.at(), dead_owners=frozenset({"w1"})))
    assert stage.txn.evidence.elapsed_us == seen_us - 1_000_000


def interrupted() -> tuple[Stage, es.Envelope]:
    """A run whose only worker, w1, was taken for dead, with its end."""
    stage = Stage()
    stage.apply(RecoverRun(run_id="r1", now_us=stage.at(), dead_owners=frozenset({"w1"})))
    assert stage.txn.envelope is not None
    return stage, stage.txn.envelope


@pytest.mark.parametrize("generation", [None, 1])
def test_a_worker_that_was_taken_for_dead_gets_nothing_through_and_ends_nothing(generation: int | None) -> None:
    stage, crashed = interrupted()
    kept = len(stage.leaves)
    _, reserved = stage.reserve(generation=generation)
    assert (reserved.verdict.action, reserved.verdict.reason) == (es.Action.STOP, es.Reason.CRASHED)
    place = {"run_id": "r1", "now_us": stage.at(), "policy": POLICY, "generation": generation}
    turn = ReserveTurn(**place, proposal=TurnProposal(call_id="t1", tokens_bound=1))  # type: ignore[arg-type]  # by name
    handoff = ReserveHandoff(**place, proposal=proposal_of())  # type: ignore[arg-type]  # by name
    child = ReserveChild(**place, proposal=proposal_of(), child_run_id="r2", parent_run_id="r1", depth=1)  # type: ignore[arg-type]  # by name
    answers: list[StepAnswer] = [stage.apply(turn), stage.apply(handoff), stage.apply(child)]
    for answer in answers:
        assert (answer.verdict.action, answer.envelope) == (es.Action.STOP, crashed)
    done = CompleteRun(run_id="r1", now_us=stage.at(), output="done", generation=generation)
    assert stage.apply(done) == crashed
    fatal = EndRun(run_id="r1", now_us=stage.at(), reason=es.Reason.FATAL, guard="host", generation=1)
    assert stage.apply(fatal) == crashed == reserved.envelope
    assert (stage.txn.state, stage.txn.output, len(stage.leaves)) == (es.RunState.INTERRUPTED, None, kept)
    # It joins again, in another generation, and goes on.
    join(stage, "w1")
    assert stage.reserve(generation=2)[1].verdict.action is es.Action.EXECUTE


@pytest.mark.parametrize("status", ["complete", "human_required", "fatal", "permission_denied"])
def test_what_a_worker_brings_that_was_taken_for_dead_is_recorded_and_ends_nothing(status: str) -> None:
    stage = Stage()
    proposal, reserved = stage.reserve()
    assert reserved.operation is not None
    stage.apply(RecoverRun(run_id="r1", now_us=stage.at(), dead_owners=frozenset({"w1"})))
    crashed = stage.txn.envelope
    settled = stage.settle(proposal, reserved.operation, es.ToolResult(status=status, side_effect_committed=True))
    assert (settled.verdict, settled.envelope) == (GO, None)
    assert stage.operations[reserved.operation.operation_id].state is OperationState.COMMITTED
    assert (stage.txn.state, stage.txn.envelope, stage.kinds[-1]) == (es.RunState.INTERRUPTED, crashed, "result")
    assert stage.reserve(n="b", call_id="c2", generation=1)[1].envelope == crashed


@pytest.mark.parametrize("status", ["complete", "fatal"])
def test_what_a_worker_of_an_earlier_generation_brings_does_not_end_a_later_one(status: str) -> None:
    stage = Stage()
    proposal, reserved = stage.reserve("look", q=1)
    stage.apply(RecoverRun(run_id="r1", now_us=stage.at(), dead_owners=frozenset({"w1"})))
    join(stage)
    settled = stage.settle(proposal, reserved.operation, es.ToolResult(status=status), generation=1)
    assert (settled.verdict, settled.envelope) == (GO, None)
    assert (stage.txn.state, stage.txn.generation, stage.txn.envelope) == (es.RunState.RUNNING, 2, None)
    assert stage.kinds[-1] == "result"
    stopped = stage.reserve("look", "c2", generation=1)[1].envelope
    assert stopped is not None
    assert (stopped.guard, stopped.generation) == ("generation", 1)


def hold(stage: Stage, call_id: str = "t1") -> None:
    proposal = TurnProposal(call_id=call_id, tokens_bound=40, nanos_bound=9)
    stage.apply(ReserveTurn(run_id="r1", now_us=stage.at(), policy=POLICY, proposal=proposal))


def recover(stage: Stage) -> None:
    stage.apply(RecoverRun(run_id="r1", now_us=stage.at(), dead_owners=frozenset({"w1"})))


def enter_again(stage: Stage) -> None:
    leave(stage)
    join(stage)


def end_and_resume(stage: Stage) -> None:
    end(stage)
    resume(stage)


@pytest.mark.parametrize("way", [recover, enter_again, end_and_resume])
@pytest.mark.parametrize(("used", "nanos", "posted"), [(30, 4, (40, 9)), (40, 9, (40, 9)), (55, 12, (55, 12))])
def test_a_hold_that_is_taken_away_is_charged_and_a_late_report_posts_the_rest(
    way: Callable[[Stage], None], used: int, nanos: int, posted: tuple[int, int]
) -> None:
    stage = Stage()
    hold(stage)
    way(stage)
    evidence = stage.txn.evidence
    assert (evidence.output_tokens, evidence.spend_nanos) == (40, 9)
    assert (evidence.held_tokens, evidence.held_nanos, evidence.turns_open) == (0, 0, {})
    assert stage.kinds.count("turn") == 1
    settle = SettleTurn(
        run_id="r1", now_us=stage.at(), call_id="t1", usage=es.Usage(output_tokens=used), spend_nanos=nanos
    )
    stage.apply(settle)
    assert (evidence.output_tokens, evidence.spend_nanos) == posted
    assert (stage.last["tokens"], stage.last["used"], stage.last["used_nanos"]) == (posted[0] - 40, used, nanos)
    # The entries tell the same, in sum and folded.
    turns = [entry for leaf in stage.leaves if (entry := orjson.loads(leaf))["type"] == "turn"]
    assert (sum(turn["tokens"] for turn in turns), sum(turn["nanos"] for turn in turns)) == posted
    assert replace(refold(stage.leaves, POLICY.limits), ended_message="") == replace(evidence, ended_message="")


def test_a_report_of_a_call_that_nobody_remembers_is_posted_in_full() -> None:
    stage = Stage()
    hold(stage)
    recover(stage)
    for _ in range(2):
        stage.apply(
            SettleTurn(run_id="r1", now_us=stage.at(), call_id="t1", usage=es.Usage(output_tokens=41), spend_nanos=9)
        )
    assert (stage.txn.evidence.output_tokens, stage.txn.evidence.spend_nanos) == (41 + 41, 9 + 9)


def test_a_checkpoint_leaves_its_size_and_not_its_words() -> None:
    stage = Stage()
    stage.apply(SaveCheckpoint(run_id="r1", now_us=stage.at(), data='{"planted":1}'))
    assert stage.last["size"] == 13
    assert b"planted" not in stage.leaves[-1]
    assert stage.txn.checkpoint is not None
    assert stage.txn.checkpoint.seq == 1


@pytest.mark.parametrize(
    ("text", "parsed"),
    [
        ("cursor", (es.Change.CURSOR, None, None)),
        ("limit:steps_max=40", (None, "steps_max", 40)),
        ("limit:steps_max=0", (None, "steps_max", 0)),
    ],
)
def test_a_named_change_is_read(text: str, parsed: tuple[object, ...]) -> None:
    assert parse_change(text) == parsed


@pytest.mark.parametrize(
    "text",
    [
        "", "again", "limit", "limit:", "limit:x", "limit:=4", "limit:x=", "limit:x=-1", "limit:x=²", "limit:x=1e3",
        "limit:x=" + "9" * 17, "Cursor",
    ],
)  # fmt: skip
def test_what_names_no_change_is_refused(text: str) -> None:
    with pytest.raises(ResumeRefusedError):
        parse_change(text)


def test_a_progress_version_stands_in_an_entry_as_a_number_or_a_digest() -> None:
    assert version_symbol(None) is None
    assert version_symbol(2**53 - 1) == 2**53 - 1
    for version in ("planted", 2**53, "é\ud800"):
        symbol = version_symbol(version)
        assert isinstance(symbol, str)
        assert len(symbol) == 32
        assert "planted" not in symbol
