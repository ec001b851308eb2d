"""The bare guard: the pure core with nothing around it but a lock and a clock. In memory, no store, no I/O.

    guard = LoopGuard()
    decision = guard.before(ToolCall(tool="search", args={"q": "x"}))
    if decision.action == "execute":
        decision = guard.after(call, ToolResult(value=search("x")))

It keeps the same evidence as a durable run, so that a call is decided the same way by both.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from endstop.core import fold, loops
from endstop.core.decide import decide_call, decide_turn
from endstop.core.events import GO, OperationView, Proposal, TurnProposal, Verdict
from endstop.core.evidence import Evidence
from endstop.core.messages import message_of, warning_of
from endstop.core.model import (
    Block,
    Counters,
    Decision,
    Execute,
    ModelCall,
    Replay,
    Stop,
    ToolCall,
    ToolResult,
    Usage,
    Wait,
)
from endstop.core.observe import as_result, checked, measure, observe
from endstop.core.policy import Policy, ToolPolicy
from endstop.core.propose import propose
from endstop.core.reasons import Action, ErrorClass, Reason
from endstop.core.slots import open_twin, sealed
from endstop.core.steps import operation_event
from endstop.core.transitions import OperationEvent, OperationState
from endstop.runtime.clock import SystemClock

if TYPE_CHECKING:
    from endstop.core.model import Version

__all__ = ["LoopGuard", "decision_of"]

# On CPython 3.11 reading a member through its enum costs more than the comparison it is for.
_EXECUTE: Final = Action.EXECUTE
_OPEN_EXECUTE: Final = open_twin(Execute)


class LoopGuard:
    """Every guard of one run, in memory. Safe to share between threads.

    `clock` returns microseconds; the run's time starts at the first call. `initial_progress_version` is the progress
    version of an earlier stretch: an unchanged first result is then no progress.
    """

    def __init__(
        self,
        policy: Policy | None = None,
        *,
        initial_progress_version: Version | None = None,
        clock: Callable[[], int] | None = None,
    ) -> None:
        self._policy = policy or Policy()
        self._clock = clock or SystemClock().now_us
        self._lock = threading.Lock()
        self._evidence = Evidence()
        self._operations: dict[str, OperationView] = {}
        self._results: dict[str, ToolResult[object]] = {}
        # Calls let through and not settled: by their id, and those without one by the identity of the call itself,
        # which is kept so that no other object can take that identity.
        self._open: dict[str, list[Proposal]] = {}
        self._unnamed: dict[int, tuple[ToolCall, list[Proposal]]] = {}
        self._serial = 0
        if initial_progress_version is not None:
            fold.seed_version(self._evidence, initial_progress_version)

    @property
    def policy(self) -> Policy:
        """What calls are judged against."""
        return self._policy

    @property
    def evidence(self) -> Evidence:
        """The run's evidence, for reading only."""
        return self._evidence

    @property
    def counters(self) -> Counters:
        """What was used so far."""
        with self._lock:
            return self._evidence.counters(self._clock())

    @property
    def ended(self) -> Reason | None:
        """Why the run is over, or None."""
        ended = self._evidence.ended
        return None if ended is None else Reason(ended)

    def before(self, call: ToolCall, *, fault: ErrorClass | None = None) -> Decision:
        """May `call` run now? Pass `fault` when the host already knows that it cannot (an unknown tool, a refusal)."""
        tool = self._policy.tool(call.tool)
        with self._lock:
            now_us = self._now()
            self._serial += 1
            proposal = propose(call, tool, call_id=call.call_id or f"#{self._serial}", fault=fault)
            operation = self._operations.get(proposal.key_digest) if proposal.key_digest is not None else None
            verdict = decide_call(self._policy, self._evidence, proposal, now_us, operation=operation)
            if verdict.action is _EXECUTE:
                self._let_through(call, proposal, verdict, now_us)
            else:
                self._refuse(proposal, verdict, now_us)
        result = None if verdict.action is _EXECUTE else self._result_of(proposal, verdict)
        return decision_of(verdict, proposal, now_us, result=result)

    def after(self, call: ToolCall, result: ToolResult[object] | object) -> Decision:
        """What follows from `result`, the answer to the `call` that `before` let through: go on, or stop."""
        tool = self._policy.tool(call.tool)
        answer = checked(as_result(result), tool)
        with self._lock:
            now_us = self._now()
            proposal = self._opened(call, tool)
            measured = measure(answer, proposal, tool)
            seen = observe(self._evidence, proposal, measured, now_us)
            fold.settled(self._evidence, seen, self._policy.limits, now_us)
            if proposal.key_digest is not None:
                self._settle_operation(proposal.key_digest, proposal, answer)
            verdict = self._latch() or loops.after(self._policy, self._evidence, seen, tool)
            if verdict is not GO:
                self._conclude(verdict, now_us)
        return decision_of(verdict, proposal, now_us)

    def before_turn(
        self, *, input_tokens_max: int | None = None, output_tokens_max: int | None = None, model: str = ""
    ) -> Decision:
        """May the next model call leave? The bounds are the most tokens it can use, where they are known."""
        asked = ModelCall(model=model, input_tokens_max=input_tokens_max, output_tokens_max=output_tokens_max)
        known = [bound for bound in (asked.input_tokens_max, asked.output_tokens_max) if bound is not None]
        with self._lock:
            now_us = self._now()
            self._serial += 1
            proposal = TurnProposal(
                call_id=f"turn#{self._serial}", model=model, tokens_bound=sum(known) if known else None
            )
            verdict = decide_turn(self._policy, self._evidence, proposal, now_us)
            if verdict.action is _EXECUTE:
                fold.turn_let_through(self._evidence, proposal)
            else:
                self._conclude(verdict, now_us)
        return decision_of(verdict, None, now_us)

    def after_turn(
        self,
        *,
        input_tokens: int = 0,
        output_tokens: int = 0,
        cache_read_tokens: int = 0,
        reasoning_tokens: int = 0,
        spend_nanos: int = 0,
    ) -> Decision:
        """Post what the oldest open model call used (totals in tokens, spend in nano-dollars)."""
        usage = Usage(
            input_tokens=input_tokens,
            output_tokens=output_tokens,
            cache_read_tokens=cache_read_tokens,
            reasoning_tokens=reasoning_tokens,
            spend_nanos=spend_nanos,
        )
        with self._lock:
            now_us = self._now()
            oldest = next(iter(self._evidence.turns_open), "")
            fold.turn_settled(self._evidence, oldest, usage, spend_nanos)
            verdict = self._latch() or GO
        return decision_of(verdict, None, now_us)

    def user_input(self) -> None:
        """A real person spoke: a new epoch. Never call this for text that a host injects."""
        with self._lock:
            fold.user_input(self._evidence)

    # -- Parts

    def _now(self) -> int:
        now_us = self._clock()
        if not self._evidence.running_since_us and self._evidence.ended is None:
            fold.started(self._evidence, now_us)
        return now_us

    def _latch(self) -> Verdict | None:
        ended = self._evidence.ended
        return None if ended is None else Verdict(action=Action.STOP, reason=Reason(ended), guard="latch")

    def _let_through(self, call: ToolCall, proposal: Proposal, verdict: Verdict, now_us: int) -> None:
        operation_id = None if proposal.key_digest is None else self._begin(proposal.key_digest, proposal)
        fold.let_through(self._evidence, proposal, verdict, now_us, operation_id)
        if call.call_id:
            self._open.setdefault(call.call_id, []).append(proposal)
        else:
            self._unnamed.setdefault(id(call), (call, []))[1].append(proposal)

    def _refuse(self, proposal: Proposal, verdict: Verdict, now_us: int) -> None:
        if verdict.action is Action.STOP:
            self._conclude(verdict, now_us)
        elif verdict.action is Action.REPLAY:
            fold.replayed(self._evidence, proposal, verdict)
        else:
            fold.refused(self._evidence, proposal, verdict)

    def _conclude(self, verdict: Verdict, now_us: int) -> None:
        """Latch a stop; note a rung that a result climbed."""
        if verdict.action is not Action.STOP:
            fold.climbed_after(self._evidence, verdict)
        elif self._evidence.ended is None:
            reason = verdict.reason or Reason.LOOP_GUARD_TRIGGERED
            fold.ended(self._evidence, reason, message_of(verdict), now_us)

    def _opened(self, call: ToolCall, tool: ToolPolicy) -> Proposal:
        """The proposal that `before` let through for this call; made anew when there is none (a host ran it anyway)."""
        if call.call_id:
            found = self._open.get(call.call_id)
            if found is None:
                return propose(call, tool)
            if len(found) == 1:
                del self._open[call.call_id]
            return found.pop(0)
        place = id(call)
        if place not in self._unnamed:
            place = self._twin_of(call, tool)
        if place not in self._unnamed:
            return propose(call, tool, call_id="#0")
        proposals = self._unnamed[place][1]
        if len(proposals) == 1:
            del self._unnamed[place]
        return proposals.pop(0)

    def _twin_of(self, call: ToolCall, tool: ToolPolicy) -> int:
        """Where an equal call without an id stands that was let through, or 0."""
        wanted = propose(call, tool).fingerprint
        return next((place for place, (_, twins) in self._unnamed.items() if twins[0].fingerprint == wanted), 0)

    def _begin(self, key: str, proposal: Proposal) -> str:
        """The dispatch intent of a write: from now on its key is taken."""
        self._operations[key] = self._view(key, proposal, OperationState.EXECUTING)
        return key

    def _settle_operation(self, key: str, proposal: Proposal, result: ToolResult[object]) -> None:
        known = self._operations.get(key)
        if known is not None and known.state == OperationState.COMMITTED:
            # A late second answer never un-commits a write.
            return
        match operation_event(result):
            case OperationEvent.APPLIED:
                self._operations[key] = self._view(key, proposal, OperationState.COMMITTED)
                self._results[key] = result
            case OperationEvent.LOST:
                self._operations[key] = self._view(key, proposal, OperationState.UNKNOWN)
            case OperationEvent.REFUSED:
                self._operations[key] = self._view(key, proposal, OperationState.FAILED_FINAL)
                self._results[key] = result
            case _:
                self._operations.pop(key, None)

    def _view(self, key: str, proposal: Proposal, state: OperationState) -> OperationView:
        return OperationView(
            operation_id=key,
            state=state.value,
            fingerprint=proposal.fingerprint,
            call_id=proposal.call_id,
            same_run=True,
            generation=self._evidence.generation,
        )

    def _result_of(self, proposal: Proposal, verdict: Verdict) -> ToolResult[object] | None:
        if verdict.action is not Action.REPLAY or proposal.key_digest is None:
            return None
        return self._results.get(proposal.key_digest)


def decision_of(
    verdict: Verdict, proposal: Proposal | None, now_us: int, *, result: ToolResult[object] | None = None
) -> Decision:
    """The public decision for a verdict."""
    fingerprint = proposal.fingerprint if proposal is not None else ""
    if verdict is GO:
        return sealed(_OPEN_EXECUTE(fingerprint=fingerprint), Execute)
    message = message_of(verdict)
    match verdict.action:
        case Action.EXECUTE:
            warning = None if proposal is None else warning_of(verdict, proposal.effect)
            return Execute(
                reason=verdict.reason, guard=verdict.guard, message=message, fingerprint=fingerprint,
                detail=verdict.detail, warning=warning, observed=verdict.observed,
            )  # fmt: skip
        case Action.REPLAY:
            return Replay(
                reason=verdict.reason, guard=verdict.guard, message=message, fingerprint=fingerprint,
                detail=verdict.detail, result=result,
            )  # fmt: skip
        case Action.WAIT:
            return Wait(
                reason=verdict.reason, guard=verdict.guard, message=message, fingerprint=fingerprint,
                detail=verdict.detail, until_us=verdict.until_us,
                retry_after_ms=-(-max(0, verdict.until_us - now_us) // 1_000),
            )  # fmt: skip
        case Action.BLOCK:
            return Block(
                reason=verdict.reason, guard=verdict.guard, message=message, fingerprint=fingerprint,
                detail=verdict.detail,
            )  # fmt: skip
        case _:
            # What is nothing else is a stop.
            return Stop(
                reason=verdict.reason, guard=verdict.guard, message=message, fingerprint=fingerprint,
                detail=verdict.detail,
            )  # fmt: skip
