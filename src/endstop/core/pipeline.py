"""The life of one guarded call, written once.

    reserve ──▶ execute ──▶ settle ──▶ what follows

`guarded_call` is a generator of commands. It knows neither threads nor event loops nor clocks that tick by
themselves: a sync driver, an async driver and a simulator each answer its commands. Where a crash may fall between
two commands, `docs/guarantees.md` says what is left.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Final

from endstop.core.admission import admitted
from endstop.core.answers import answer_to_refusal, failure_of
from endstop.core.commands import CallCut, Execute, Flow, Recall, Remember, Returned, Transact, perform
from endstop.core.messages import warning_of
from endstop.core.model import ToolResult
from endstop.core.observe import as_result, checked, measure
from endstop.core.operation_answers import refusal, replayed
from endstop.core.operation_terms import terms_of
from endstop.core.reasons import Action, Effect, ErrorClass, Reason
from endstop.core.steps import CallReserved, CallSettled, LoseCall, ReserveCall, SettleCall
from endstop.core.transitions import OperationState
from endstop.errors import (
    CommitUnknownError,
    EndstopError,
    InvariantError,
    OutcomeUnknownError,
    RunHalted,
    StoreError,
    StoreUnavailableError,
)

if TYPE_CHECKING:
    from endstop.core.envelope import Envelope
    from endstop.core.events import Proposal, Verdict
    from endstop.core.observe import Measured
    from endstop.core.policy import Policy, ToolPolicy
    from endstop.core.records import OperationRecord

__all__ = ["CallRequest", "guarded_call", "halted"]

SHARED_EFFECTS: Final = (Effect.READ, Effect.POLL)


@dataclass(frozen=True, slots=True, kw_only=True)
class CallRequest:
    """Everything that one guarded call needs. `now_us` reads the run's clock; `schema_check` judges an answer.

    `attempt_id` is this delivery's own among all calls of `owner_id`, also those under the same call id.
    """

    run_id: str
    policy: Policy
    tool: ToolPolicy
    proposal: Proposal
    operation_id: str | None
    owner_id: str
    run_key: bytes = field(repr=False)
    call: Callable[[], object] = field(repr=False)
    now_us: Callable[[], int] = field(repr=False)
    attempt_id: str = ""
    generation: int | None = None
    schema_check: Callable[[object], str | None] | None = field(default=None, repr=False)
    input_digest: str = ""
    store_key: bytes = field(default=b"", repr=False)
    actor: str = "agent"


def halted(envelope: Envelope | None) -> RunHalted:
    """The signal for a run that is over."""
    if envelope is None:
        msg = "a halted run has no envelope"
        raise InvariantError(msg)
    return RunHalted(f"run {envelope.run_id} is over: {envelope.terminal_reason}. {envelope.message}", envelope)


def guarded_call(request: CallRequest) -> Flow[ToolResult[object]]:
    """Guard one tool call. Gives the result; raises RunHalted, OutcomeUnknownError or the tool's own exception."""
    stage = _Stage()
    try:
        return (yield from _guarded(request, stage))
    except GeneratorExit:
        raise
    except CallCut as cut:
        yield from _lose(request, stage.operation, cut.signal, sent=cut.sent)
        raise cut.signal from None
    except BaseException as error:
        # Whatever broke, wherever it fell: a call that was let through is settled, or recorded as lost.
        if stage.is_open:
            yield from _lose(request, stage.operation, error, sent=stage.is_sent)
            if stage.is_sent and isinstance(error, Exception):
                raise _open_ended(request, stage.operation, error) from error
        raise


class _Stage:
    """How far a call has come: whether it may own a place in the records, and whether the tool may have been called."""

    __slots__ = ("is_open", "is_sent", "operation")

    def __init__(self) -> None:
        self.is_open = False
        self.is_sent = False
        self.operation: OperationRecord | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Outcome:
    """How the tool ended: its result and digests, its own exception, and whether a side effect stays open."""

    result: ToolResult[object] = field(repr=False)
    measured: Measured
    lost: bool
    error: Exception | None
    took_us: int


def _guarded(request: CallRequest, stage: _Stage) -> Flow[ToolResult[object]]:
    # 1. Reserve: decided and durable before one byte leaves. What stands in the way is cleared once, and asked again.
    reserved = yield from admitted(
        lambda: _reserve(request, stage), request.tool, now_us=request.now_us, store_key=request.store_key
    )
    if reserved.verdict.action is not Action.EXECUTE:
        return (yield from _not_executed(request, reserved))
    # 2. Execute, outside any transaction. Whatever breaks in here leaves the outcome open.
    stage.is_sent = True
    returned: Returned = yield from perform(
        Execute(
            proposal=request.proposal, operation=reserved.operation, call=request.call,
            deadline_us=_deadline(request, reserved),
        )
    )  # fmt: skip
    outcome = _judged(request, returned)
    # 3. Settle: outcome, evidence, entry and the decision that follows, in one transaction.
    settled = yield from _settle(request, stage, outcome)
    # 4. What follows.
    return (yield from _after(request, reserved.verdict, settled, outcome))


def _reserve(request: CallRequest, stage: _Stage) -> Flow[CallReserved]:
    step = ReserveCall(
        run_id=request.run_id, now_us=request.now_us(), policy=request.policy, proposal=request.proposal,
        operation_id=request.operation_id, owner_id=request.owner_id, attempt_id=request.attempt_id,
        generation=request.generation, input_digest=request.input_digest,
        terms=terms_of(request.tool, request.proposal.args), actor=request.actor,
    )  # fmt: skip
    stage.is_open = True
    try:
        reserved = yield from perform(Transact(step=step))
    except CommitUnknownError:
        raise  # the intent may be durable
    except EndstopError:
        stage.is_open = False  # the store says that nothing was written
        raise
    stage.operation = reserved.operation
    stage.is_open = reserved.verdict.action is Action.EXECUTE
    return reserved


def _settle(request: CallRequest, stage: _Stage, outcome: _Outcome) -> Flow[CallSettled]:
    step = SettleCall(
        run_id=request.run_id, now_us=request.now_us(), policy=request.policy, tool=request.tool,
        proposal=request.proposal, measured=outcome.measured, result=outcome.result, operation=stage.operation,
        generation=request.generation, took_us=outcome.took_us, lost=outcome.lost, result_key=request.store_key,
        actor=request.actor,
    )  # fmt: skip
    try:
        settled = yield from perform(Transact(step=step))
    except StoreUnavailableError:
        # Nothing was written, and what the tool did is known now and never again.
        settled = yield from perform(Transact(step=step))
    stage.is_open = False
    return settled


def _lose(request: CallRequest, operation: OperationRecord | None, cause: BaseException, *, sent: bool) -> Flow[None]:
    """Record that the call has no outcome. When that fails too, its record stays "executing", which blocks as well."""
    step = LoseCall(
        run_id=request.run_id, now_us=request.now_us(), proposal=request.proposal, operation=operation,
        operation_id=request.operation_id, owner_id=request.owner_id, attempt_id=request.attempt_id,
        cause=type(cause).__name__, sent=sent, actor=request.actor,
    )  # fmt: skip
    try:
        yield from perform(Transact(step=step))
    except StoreError as error:
        cause.add_note(f"the ledger could not record that call {request.proposal.call_id} ended so: {error}")


def _open_ended(request: CallRequest, operation: OperationRecord | None, error: Exception) -> Exception:
    """What is raised when a call ran and its outcome could not be recorded: for a write, that it is unknown."""
    if operation is None or request.tool.effect is not Effect.WRITE:
        return error
    msg = (
        f"operation {operation.operation_id} of tool {request.proposal.tool} was sent and its outcome could not be "
        "recorded: it is not sent again; settle it with a probe or by hand (endstop ops)"
    )
    return OutcomeUnknownError(msg, operation.operation_id)


def _deadline(request: CallRequest, reserved: CallReserved) -> int:
    """The sooner of the tool's own deadline and the end of the run's time (microseconds on the run's clock)."""
    now_us = request.now_us()
    left_us = _NEVER_US if request.policy.observes else reserved.wall_ms_max * 1_000 - reserved.elapsed_us
    if request.tool.deadline_ms is not None:
        left_us = min(left_us, request.tool.deadline_ms * 1_000)
    return now_us + left_us


_NEVER_US: Final = 10**15


def _not_executed(request: CallRequest, reserved: CallReserved) -> Flow[ToolResult[object]]:
    """The call did not run: the run is over, the ledger or a twin answers, or it is refused as a value."""
    verdict = reserved.verdict
    if verdict.action is Action.STOP:
        raise halted(reserved.envelope)
    if verdict.action is Action.REPLAY and verdict.reason is Reason.ROUND_DUPLICATE:
        twin = yield from perform(
            Recall(round_id=request.proposal.round_id or "", fingerprint=request.proposal.fingerprint)
        )
        return answer_to_refusal(verdict, request.now_us()) if twin is None else replace(twin, replayed=True)
    if verdict.action is Action.REPLAY:
        stored = reserved.stored
        if stored is None:
            msg = "a replay without a stored operation"
            raise InvariantError(msg)
        return replayed(stored, request.store_key)
    return refusal(verdict, reserved.stored, request.tool, request.now_us(), request.proposal.complaint)


def _judged(request: CallRequest, returned: Returned) -> _Outcome:
    """The result that is settled, its digests, and whether a side effect's outcome stays open."""
    lost = False
    if returned.error is not None:
        result, lost = failure_of(returned.error, request.tool.effect)
    else:
        raw = as_result(returned.value)
        broken = None if request.schema_check is None or raw.failed else request.schema_check(raw.value)
        result = checked(raw, request.tool, broken)
    sketched = not request.tool.declared
    measured = measure(result, request.proposal, request.tool, key=request.run_key, sketched=sketched)
    return _Outcome(result=result, measured=measured, lost=lost, error=returned.error, took_us=returned.took_us)


def _after(request: CallRequest, verdict: Verdict, settled: CallSettled, outcome: _Outcome) -> Flow[ToolResult[object]]:
    """Go on, or stop; a tool's own exception is raised again, and an open outcome as what it is."""
    proposal, operation, result, error = request.proposal, settled.operation, outcome.result, outcome.error
    if settled.envelope is not None and settled.envelope.terminal_reason is not Reason.COMPLETE:
        raise halted(settled.envelope) from error
    if error is not None:
        if operation is not None and result.error_class is ErrorClass.OUTCOME_UNKNOWN:
            msg = (
                f"operation {operation.operation_id} of tool {proposal.tool} is {operation.state}: it may have "
                "happened. It is not sent again; settle it with a probe or by hand (endstop ops)"
            )
            raise OutcomeUnknownError(msg, operation.operation_id) from error
        raise error
    warning = warning_of(verdict, proposal.effect) or warning_of(settled.verdict, proposal.effect)
    if warning is not None or operation is not None:
        committed = result.side_effect_committed
        is_write = proposal.effect is Effect.WRITE
        if is_write and operation is not None and operation.state is OperationState.COMMITTED:
            committed = True
        result = replace(
            result,
            warning=warning,
            operation_id=result.operation_id or (None if operation is None else operation.operation_id),
            side_effect_committed=committed,
        )
    if proposal.round_id is not None and proposal.effect in SHARED_EFFECTS:
        yield from perform(Remember(round_id=proposal.round_id, fingerprint=proposal.fingerprint, result=result))
    return result
