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

from endstop.core.answers import answer_to_refusal, failure_of
from endstop.core.codec import result_from
from endstop.core.commands import Execute, Flow, Recall, RecoverOwner, Remember, Returned, Transact, perform
from endstop.core.messages import warning_of
from endstop.core.observe import as_result, checked, measure
from endstop.core.reasons import Action, Effect, ErrorClass, Reason
from endstop.core.steps import CallReserved, CallSettled, LoseCall, ReserveCall, SettleCall
from endstop.core.transitions import OperationState
from endstop.errors import InvariantError, OutcomeUnknownError, RunHalted

if TYPE_CHECKING:
    from endstop.core.envelope import Envelope
    from endstop.core.events import Proposal, Verdict
    from endstop.core.model import ToolResult
    from endstop.core.observe import Measured
    from endstop.core.policy import Policy, ToolPolicy

__all__ = ["CallRequest", "guarded_call", "halted"]

SHARED_EFFECTS: Final = (Effect.READ, Effect.POLL)


@dataclass(frozen=True, slots=True, kw_only=True)
class CallRequest:
    """Everything that one guarded call needs. `now_us` reads the run's clock; `schema_check` judges an answer."""

    run_id: str
    policy: Policy
    tool: ToolPolicy
    proposal: Proposal
    operation_id: str | None
    owner_id: str
    run_key: bytes = field(repr=False)
    call: Callable[[], object] = field(repr=False)
    now_us: Callable[[], int] = field(repr=False)
    schema_check: Callable[[object], str | None] | None = field(default=None, repr=False)
    input_digest: str = ""
    actor: str = "agent"


def halted(envelope: Envelope | None) -> RunHalted:
    """The signal for a run that is over."""
    if envelope is None:
        msg = "a halted run has no envelope"
        raise InvariantError(msg)
    return RunHalted(f"run {envelope.run_id} is over: {envelope.terminal_reason}. {envelope.message}", envelope)


def guarded_call(request: CallRequest) -> Flow[ToolResult[object]]:
    """Guard one tool call. Gives the result; raises RunHalted, OutcomeUnknownError or the tool's own exception."""
    proposal = request.proposal
    # 1. Reserve: decided and durable before one byte leaves. A dead owner is recovered once, then asked again.
    reserved = yield from _reserve(request)
    blocker = reserved.stored
    if reserved.verdict.reason is Reason.IN_PROGRESS and blocker is not None:
        if (yield from perform(RecoverOwner(operation=blocker))):
            reserved = yield from _reserve(request)
    if reserved.verdict.action is not Action.EXECUTE:
        return (yield from _not_executed(request, reserved))
    # 2. Execute, outside any transaction. Whatever breaks in here leaves the outcome open.
    try:
        returned: Returned = yield from perform(
            Execute(
                proposal=proposal, operation=reserved.operation, call=request.call,
                deadline_us=_deadline(request, reserved),
            )
        )  # fmt: skip
    except BaseException as signal:
        yield from perform(
            Transact(
                step=LoseCall(
                    run_id=request.run_id, now_us=request.now_us(), proposal=proposal, operation=reserved.operation,
                    cause=type(signal).__name__, actor=request.actor,
                )
            )
        )  # fmt: skip
        raise
    # 3. Settle: outcome, evidence, entry and the decision that follows, in one transaction.
    result, measured, lost = _judged(request, returned)
    settled: CallSettled = yield from perform(
        Transact(
            step=SettleCall(
                run_id=request.run_id, now_us=request.now_us(), policy=request.policy, tool=request.tool,
                proposal=proposal, measured=measured, result=result, operation=reserved.operation,
                took_us=returned.took_us, lost=lost, actor=request.actor,
            )
        )
    )  # fmt: skip
    # 4. What follows.
    return (yield from _after(request, reserved.verdict, settled, result, returned.error))


def _reserve(request: CallRequest) -> Flow[CallReserved]:
    return (
        yield from perform(
            Transact(
                step=ReserveCall(
                    run_id=request.run_id, now_us=request.now_us(), policy=request.policy,
                    proposal=request.proposal, operation_id=request.operation_id, owner_id=request.owner_id,
                    input_digest=request.input_digest, actor=request.actor,
                )
            )
        )
    )  # fmt: skip


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
        return twin if twin is not None else answer_to_refusal(verdict, request.now_us())
    if verdict.action is Action.REPLAY:
        stored = reserved.stored
        if stored is None:
            msg = "a replay without a stored operation"
            raise InvariantError(msg)
        return replace(result_from(stored.result), operation_id=stored.operation_id)
    return answer_to_refusal(verdict, request.now_us())


def _judged(request: CallRequest, returned: Returned) -> tuple[ToolResult[object], Measured, bool]:
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
    return result, measured, lost


def _after(
    request: CallRequest,
    verdict: Verdict,
    settled: CallSettled,
    result: ToolResult[object],
    error: Exception | None,
) -> Flow[ToolResult[object]]:
    """Go on, or stop; a tool's own exception is raised again, and an open outcome as what it is."""
    proposal, operation = request.proposal, settled.operation
    if settled.envelope is not None and settled.envelope.terminal_reason is not Reason.COMPLETE:
        raise halted(settled.envelope) from error
    if error is not None:
        if operation is not None and result.error_class is ErrorClass.OUTCOME_UNKNOWN:
            msg = (
                f"operation {operation.operation_id} of tool {proposal.tool} is {operation.state}: it may have happened. "
                "It is not sent again; settle it with a probe or by hand (endstop ops)"
            )
            raise OutcomeUnknownError(msg, operation.operation_id) from error
        raise error
    warning = warning_of(verdict, proposal.effect) or warning_of(settled.verdict, proposal.effect)
    if warning is not None or operation is not None:
        committed = result.side_effect_committed
        if operation is not None and operation.state is OperationState.COMMITTED:
            committed = True
        result = replace(
            result,
            warning=warning,
            operation_id=result.operation_id or (None if operation is None else operation.operation_id),
            side_effect_committed=committed,
        )
    if proposal.round_id is not None and proposal.effect in SHARED_EFFECTS:
        yield from perform(
            Remember(round_id=proposal.round_id, fingerprint=proposal.fingerprint, result=result)
        )
    return result
