"""Steps that are broken on purpose, each in the way in which guards of this kind are broken in the field."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Final

from endstop.core.events import GO, NO_CONTROLS
from endstop.core.model import ToolResult, Usage
from endstop.core.reasons import Action, ErrorClass, Reason, RunState, Status
from endstop.core.records import RunTransaction
from endstop.core.steps import ReserveCall, SettleCall, Step
from endstop.core.steps_life import EndRun, Recovered, RecoverRun, ResumeRun, SaveCheckpoint
from endstop.core.steps_turn import ReserveTurn, SettleTurn
from endstop.core.transitions import OperationState
from endstop.testing.history import Rule

Change = Callable[[Step[object], RunTransaction], object]


@dataclass(frozen=True, kw_only=True)
class Altered(Step[object]):
    """A step that does `change` in place of what `inner` would do."""

    inner: Step[object]
    change: Change

    @property
    def operation_key(self) -> str | None:
        return self.inner.operation_key

    def apply(self, txn: RunTransaction) -> object:
        return self.change(self.inner, txn)


@dataclass(frozen=True, slots=True, kw_only=True)
class Broken:
    """One way to be wrong, the steps that it breaks, and the rules that may find it."""

    kinds: tuple[type, ...]
    change: Change
    found_by: frozenset[Rule]
    folds: bool = False

    def alter(self, step: Step[object]) -> Step[object]:
        if not isinstance(step, self.kinds):
            return step
        return Altered(run_id=step.run_id, now_us=step.now_us, inner=step, change=self.change)


def _lease_over_runs_again(step: Step[object], txn: RunTransaction) -> object:
    """The common policy: whoever is gone did nothing, so the operation may be sent again."""
    answer = step.apply(txn)
    txn.operations = [
        (replace(record, state=OperationState.FAILED_RETRYABLE, outcome="not_applied"), fence)
        for record, fence in txn.operations
    ]
    return answer


def _forgets_the_intent(step: Step[object], txn: RunTransaction) -> object:
    answer = step.apply(txn)
    txn.operations.clear()
    return answer


def _get_or_create(step: Step[object], txn: RunTransaction) -> object:
    """Gives the operation that is there without saying who made it, so that everybody executes it."""
    answer = step.apply(txn)
    found = getattr(answer, "stored", None)
    if found is None:
        return answer
    return replace(answer, verdict=GO, operation=found)  # type: ignore[type-var]  # a CallReserved


def _holds_nothing(step: Step[object], txn: RunTransaction) -> object:
    assert isinstance(step, ReserveTurn)
    return replace(step, proposal=replace(step.proposal, tokens_bound=0, nanos_bound=0)).apply(txn)


def _posts_nothing(step: Step[object], txn: RunTransaction) -> object:
    assert isinstance(step, SettleTurn)
    return replace(step, usage=Usage(), spend_nanos=0).apply(txn)


def _forgets_its_charges(step: Step[object], txn: RunTransaction) -> object:
    """What recovery has charged is posted once more by whoever was not dead after all."""
    txn.evidence.turns_charged.clear()
    return step.apply(txn)


def _drops_holds(step: Step[object], txn: RunTransaction) -> object:
    """Whoever goes on with a run forgets the model calls that are under way."""
    txn.evidence.turns_open.clear()
    txn.evidence.held_tokens = txn.evidence.held_nanos = 0
    return step.apply(txn)


def _does_not_latch(step: Step[object], txn: RunTransaction) -> object:
    evidence = txn.evidence
    ended, evidence.ended = evidence.ended, None
    answer = step.apply(txn)
    if txn.evidence.ended is None:
        txn.evidence.ended = ended
    return answer


def _ends_again(step: Step[object], txn: RunTransaction) -> object:
    if txn.state is RunState.STOPPED:
        txn.evidence.ended = None
        txn.state = RunState.RUNNING
    return step.apply(txn)


def _skips_a_number(step: Step[object], txn: RunTransaction) -> object:
    txn.next_seq += 1
    return step.apply(txn)


def _takes_failure_for_proof(step: Step[object], txn: RunTransaction) -> object:
    """Any exception means that nothing happened."""
    assert isinstance(step, SettleCall)
    if not step.lost:
        return step.apply(txn)
    said: ToolResult[object] = ToolResult(
        status=Status.RETRYABLE, error_class=ErrorClass.TOOL_FAILED, side_effect_committed=False
    )
    return replace(step, lost=False, result=said).apply(txn)


def _ignores_orders(step: Step[object], txn: RunTransaction) -> object:
    standing, txn.controls = txn.controls, NO_CONTROLS
    answer = step.apply(txn)
    txn.controls = standing
    return answer


def _recovers_nothing(step: Step[object], txn: RunTransaction) -> object:
    return Recovered(lost_calls=(), in_doubt=(), state=txn.state)


def _recovers_too_much(step: Step[object], txn: RunTransaction) -> object:
    """Also what was settled before its worker died is in doubt."""
    answer = step.apply(txn)
    for record in txn.load_operations():
        if record.state is OperationState.COMMITTED:
            txn.put_operation(replace(record, state=OperationState.UNKNOWN), record.fence)
    txn.row_changed = True
    return answer


def _answers_with_another_result(step: Step[object], txn: RunTransaction) -> object:
    answer = step.apply(txn)
    found = getattr(answer, "stored", None)
    if found is None or found.result is None:
        return answer
    another = replace(found, result=b'{"value":"another"}', result_digest=None)
    return replace(answer, stored=another)  # type: ignore[type-var]  # a CallReserved


def _counts_without_an_entry(step: Step[object], txn: RunTransaction) -> object:
    txn.evidence.steps += 1
    return step.apply(txn)


def _sends_an_open_outcome_again(step: Step[object], txn: RunTransaction) -> object:
    """An unknown outcome is taken for a failure when the agent asks again."""
    found = txn.operation
    if found is not None and found.state is OperationState.UNKNOWN:
        txn.operation = replace(found, state=OperationState.FAILED_RETRYABLE)
    return step.apply(txn)


def _asks_for_reason_first(step: Step[object], txn: RunTransaction) -> object:
    """Ends the run, and lets the call through all the same."""
    answer = step.apply(txn)
    verdict = getattr(answer, "verdict", None)
    if verdict is not None and verdict.action is Action.STOP and verdict.reason is not Reason.COMPLETE:
        return replace(answer, verdict=GO)  # type: ignore[type-var]  # a CallReserved
    return answer


BROKEN: Final[dict[str, Broken]] = {
    "a lease that is over runs the operation again": Broken(
        kinds=(RecoverRun,), change=_lease_over_runs_again,
        found_by=frozenset({Rule.ONE_EFFECT, Rule.TRUE_OUTCOME}),
    ),
    "the same, found by the entries": Broken(
        kinds=(RecoverRun,), change=_lease_over_runs_again, found_by=frozenset({Rule.FOLD}), folds=True
    ),
    "a reservation forgets the intent": Broken(
        kinds=(ReserveCall,), change=_forgets_the_intent, found_by=frozenset({Rule.INTENT_FIRST})
    ),
    "get-or-create executes what is there": Broken(
        kinds=(ReserveCall,), change=_get_or_create, found_by=frozenset({Rule.ONE_EFFECT, Rule.INTENT_FIRST})
    ),
    "an open outcome is sent again": Broken(
        kinds=(ReserveCall,), change=_sends_an_open_outcome_again, found_by=frozenset({Rule.ONE_EFFECT})
    ),
    "a failure is taken for proof": Broken(
        kinds=(SettleCall,), change=_takes_failure_for_proof, found_by=frozenset({Rule.TRUE_OUTCOME})
    ),
    "a model call holds nothing": Broken(
        kinds=(ReserveTurn,), change=_holds_nothing, found_by=frozenset({Rule.BUDGET})
    ),
    "a model call posts nothing": Broken(
        kinds=(SettleTurn,), change=_posts_nothing, found_by=frozenset({Rule.BUDGET})
    ),
    "a charged model call is posted again": Broken(
        kinds=(SettleTurn,), change=_forgets_its_charges, found_by=frozenset({Rule.BUDGET})
    ),
    "a resume drops what is held": Broken(
        kinds=(ResumeRun,), change=_drops_holds, found_by=frozenset({Rule.BUDGET})
    ),
    "a stop does not latch": Broken(
        kinds=(ReserveCall,), change=_does_not_latch, found_by=frozenset({Rule.ONE_END})
    ),
    "a stopped run ends again": Broken(kinds=(EndRun,), change=_ends_again, found_by=frozenset({Rule.ONE_END})),
    "a stopped call is sent all the same": Broken(
        kinds=(ReserveCall,), change=_asks_for_reason_first, found_by=frozenset({Rule.INTENT_FIRST})
    ),
    "an entry number is left out": Broken(
        kinds=(SaveCheckpoint,), change=_skips_a_number, found_by=frozenset({Rule.NO_GAPS})
    ),
    "orders are not looked at": Broken(
        kinds=(ReserveCall,), change=_ignores_orders, found_by=frozenset({Rule.ORDERS})
    ),
    "recovery does nothing": Broken(
        kinds=(RecoverRun,), change=_recovers_nothing, found_by=frozenset({Rule.NOTHING_LEFT})
    ),
    "recovery puts in doubt what was committed": Broken(
        kinds=(RecoverRun,), change=_recovers_too_much, found_by=frozenset({Rule.FINAL})
    ),
    "a replay answers with another result": Broken(
        kinds=(ReserveCall,), change=_answers_with_another_result, found_by=frozenset({Rule.FINAL})
    ),
    "a counter grows without an entry": Broken(
        kinds=(SettleCall,), change=_counts_without_an_entry, found_by=frozenset({Rule.FOLD}), folds=True
    ),
}  # fmt: skip
