"""What one transaction does for a tool call: reserve before, settle after.

A step is a frozen record with one pure method, `apply(txn)`: it reads and changes the working copy of one run and
returns its answer. The store gives the working copy, runs the step inside one transaction and saves what changed. So
every store decides alike, and the same steps run in the simulator.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Final, Generic, TypeVar

from endstop.core import fold, loops
from endstop.core.canonical import digest
from endstop.core.codec import output_text
from endstop.core.decide import decide_call
from endstop.core.ending import end_run, figures, left_behind
from endstop.core.entries import INT_MAX, safe_name
from endstop.core.events import GO, OperationView, Proposal, Verdict
from endstop.core.observe import Measured, observe
from endstop.core.operation_rules import OUTCOMES, exhaust, may_go_again, note_operation, rearmed, settle_attempt
from endstop.core.operation_terms import DEFAULT_TERMS, OperationTerms
from endstop.core.reasons import Action, ErrorClass, Reason, Status
from endstop.core.records import OperationRecord, RunTransaction
from endstop.core.slots import open_twin, sealed
from endstop.core.transitions import OperationEvent, OperationState, operation_next

if TYPE_CHECKING:
    from endstop.core.envelope import Envelope
    from endstop.core.events import Observation
    from endstop.core.model import ToolResult
    from endstop.core.policy import Policy, ToolPolicy

__all__ = [
    "CallReserved", "CallSettled", "LoseCall", "ReserveCall", "SettleCall", "Step", "operation_event", "version_symbol",
]  # fmt: skip

A = TypeVar("A")
_OPEN_RECORD: Final = open_twin(OperationRecord)


@dataclass(frozen=True, slots=True, kw_only=True)
class Step(Generic[A]):
    """One change of one run. `operation_key` names the operation record that the store reads with the run."""

    run_id: str
    now_us: int

    @property
    def operation_key(self) -> str | None:
        """The id of the operation that `apply` needs, or None."""
        return None

    @abstractmethod
    def apply(self, txn: RunTransaction) -> A:
        """Change `txn` and answer. Pure but for `txn`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CallReserved:
    """The answer to ReserveCall. `operation` is set when this call owns one; `envelope` when the run is over."""

    verdict: Verdict
    operation: OperationRecord | None = None
    stored: OperationRecord | None = None
    envelope: Envelope | None = None
    elapsed_us: int = 0
    wall_ms_max: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ReserveCall(Step[CallReserved]):
    """May this tool call run? On yes, its dispatch intent is durable with the same commit.

    `generation` is the one that the asking worker entered (None: not checked): a worker of an earlier one is stopped.
    `attempt_id` names this delivery of the call among all of its owner's, so that no other one is taken for it.
    """

    policy: Policy
    proposal: Proposal
    operation_id: str | None
    owner_id: str
    attempt_id: str = ""
    generation: int | None = None
    input_digest: str = ""
    terms: OperationTerms = DEFAULT_TERMS
    actor: str = "agent"

    @property
    def operation_key(self) -> str | None:
        """The operation behind the call's key, or behind its run and call id."""
        return self.operation_id

    def apply(self, txn: RunTransaction) -> CallReserved:
        """Decide, then write either the intent or the refusal, with the same evidence."""
        evidence, proposal = txn.evidence, self.proposal
        policy = txn.effective(self.policy)
        stale = left_behind(txn, self.generation, self.now_us)
        if stale is not None:
            return CallReserved(verdict=stale.verdict, envelope=stale.envelope)
        # 1. Decide on what is stored now.
        exhaust(txn, proposal.operation_fingerprint, self.terms, self.now_us, actor=self.actor)
        verdict = decide_call(
            policy, evidence, proposal, self.now_us, controls=txn.controls, operation=_view(txn, self.terms)
        )
        elapsed_us = evidence.elapsed_us_at(self.now_us)
        # 2. Over: nothing but the end is written.
        if verdict.action is Action.STOP:
            first = evidence.ended is None
            if first:
                self._note(txn, "call_refused", verdict)
            envelope = end_run(txn, verdict, self.now_us, blocked=proposal)
            return CallReserved(
                verdict=verdict, envelope=envelope, elapsed_us=elapsed_us, wall_ms_max=policy.limits.wall_ms_max
            )
        txn.evidence_changed = True
        # 3. Refused, put off or answered from the ledger: evidence, but no side effect.
        if verdict.action is not Action.EXECUTE:
            if verdict.action is Action.REPLAY:
                fold.replayed(evidence, proposal, verdict)
                self._note(txn, "call_replayed", verdict)
            else:
                fold.refused(evidence, proposal, verdict)
                self._note(txn, "call_refused", verdict)
            return CallReserved(
                verdict=verdict, stored=txn.operation, elapsed_us=elapsed_us, wall_ms_max=policy.limits.wall_ms_max
            )
        # 4. Let through: intent, evidence and entry.
        operation = self._dispatch(txn) if self.operation_id is not None else None
        fold.let_through(evidence, proposal, verdict, self.now_us, None if operation is None else self.operation_id)
        pending = evidence.pending[proposal.call_id]
        pending.owner, pending.attempt_id = self.owner_id, self.attempt_id
        self._note(txn, "call_intent", verdict)
        return CallReserved(
            verdict=verdict, operation=operation, elapsed_us=elapsed_us, wall_ms_max=policy.limits.wall_ms_max
        )

    def _dispatch(self, txn: RunTransaction) -> OperationRecord:
        old, proposal = txn.operation, self.proposal
        before = None if old is None else old.state
        if old is not None and may_go_again(old, self.terms):
            before = rearmed(txn, old, self.now_us, actor=self.actor)
        state = operation_next(before, OperationEvent.DISPATCH)
        if old is None:
            made = _OPEN_RECORD(
                operation_id=self.operation_id or "", tool=proposal.tool, key_digest=proposal.key_digest,
                fingerprint=proposal.operation_fingerprint, state=state, run_id=txn.run_id, generation=txn.generation,
                call_id=proposal.call_id, owner_id=self.owner_id, effect=proposal.effect.value,
                created_at_us=self.now_us, dispatched_at_us=self.now_us, args=self.terms.kept_args,
                attempt_id=self.attempt_id,
            )  # fmt: skip
            record = sealed(made, OperationRecord)
            txn.put_operation(record, 0)
            return record
        record = replace(
            old, state=state, attempt=old.attempt + 1, fence=old.fence + 1, run_id=txn.run_id,
            generation=txn.generation, call_id=proposal.call_id, owner_id=self.owner_id,
            dispatched_at_us=self.now_us, settled_at_us=None, outcome=None, result=None, result_kind=None,
            result_digest=None, reason="", probe_count=0, probe_not_before_us=0, probe_until_us=0, settled_by="",
            receipt=None, args=self.terms.kept_args, attempt_id=self.attempt_id,
        )  # fmt: skip
        note_operation(txn, self.now_us, old, record, "another_attempt", actor=self.actor)
        txn.put_operation(record, old.fence)
        return record

    def _note(self, txn: RunTransaction, kind: str, verdict: Verdict) -> None:
        proposal = self.proposal
        seq = txn.append(
            kind,
            self.now_us,
            {
                "tool": proposal.tool, "effect": proposal.effect.value, "fp": proposal.fingerprint,
                "call": proposal.call_id, "round": proposal.round_id, "agent": proposal.agent,
                "op": self.operation_id, "key": proposal.key_digest, "owner": self.owner_id,
                "attempt_id": self.attempt_id,
                "retry": 1 if verdict.is_retry else None,
                "action": verdict.action.value, "reason": verdict.reason, "guard": verdict.guard,
                "loop": verdict.loop, "warn": 1 if verdict.warn else None,
                "observed": 1 if verdict.observed else None, "rule": _rule(verdict),
                "turn": txn.evidence.turns, "step": txn.evidence.steps, **figures(verdict),
            },
            actor=self.actor,
        )  # fmt: skip
        if self.input_digest:
            txn.input_digests.append((seq, self.input_digest))


def _rule(verdict: Verdict) -> str | None:
    """Only a deny rule's own id goes into an entry; other rules are sentences."""
    return verdict.detail.rule if verdict.guard == "deny" else None


def _view(txn: RunTransaction, terms: OperationTerms) -> OperationView | None:
    record = txn.operation
    if record is None:
        return None
    state = record.state
    if may_go_again(record, terms):
        state = OperationState.FAILED_RETRYABLE  # the target keeps a second call from having an effect
    elif state is OperationState.TOMBSTONE and record.outcome == "not_applied":
        state = OperationState.FAILED_FINAL
    return OperationView(
        operation_id=record.operation_id,
        state=state.value,
        fingerprint=record.fingerprint,
        call_id=record.call_id,
        same_run=record.run_id == txn.run_id,
        # What a probe or a person found was never told to the agent: asking for it once is no repetition.
        generation=0 if record.settled_by else record.generation,
        attempt=record.attempt,
        not_before_us=record.not_before_us,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class CallSettled:
    """The answer to SettleCall: what follows, and the run's end when this result (or an operator) ended it.

    `accepted` is False when a newer attempt owns the operation: this outcome was only noted.
    """

    verdict: Verdict
    seen: Observation
    operation: OperationRecord | None = None
    envelope: Envelope | None = None
    accepted: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class SettleCall(Step[CallSettled]):
    """A tool call has an outcome: the operation's, the evidence, the entry, and the decision that follows.

    `generation` as in ReserveCall: the outcome of a worker that is inside no longer ends nothing.
    """

    policy: Policy
    tool: ToolPolicy
    proposal: Proposal
    measured: Measured
    result: ToolResult[object] = field(repr=False)
    operation: OperationRecord | None = None
    generation: int | None = None
    took_us: int = 0
    lost: bool = False
    result_key: bytes = field(default=b"", repr=False)
    actor: str = "agent"

    @property
    def operation_key(self) -> str | None:
        """The operation that this call owns."""
        return None if self.operation is None else self.operation.operation_id

    def apply(self, txn: RunTransaction) -> CallSettled:
        """Settle and judge. A late outcome, on a run that has ended or goes on without this worker, is recorded and
        judges nothing; what this worker proposes next will stop it."""
        evidence, policy = txn.evidence, txn.effective(self.policy)
        stale = left_behind(txn, self.generation, self.now_us)
        accepted = True
        # 1. The operation, by compare-and-set on attempt, fence and state.
        if self.operation is not None:
            event = OperationEvent.LOST if self.lost else operation_event(self.result)
            accepted = settle_attempt(
                txn, self.operation, self.result, event, self.now_us, key=self.result_key, actor=self.actor
            )
        # 2. The evidence.
        seen = observe(evidence, self.proposal, self.measured, self.now_us)
        fold.settled(evidence, seen, policy.limits, self.now_us)
        txn.evidence_changed = True
        # 3. What follows; the entry carries the rung that it climbed.
        if evidence.ended is not None:
            verdict = Verdict(action=Action.STOP, guard="latch")
        else:
            verdict = GO if stale is not None else loops.after(policy, evidence, seen, self.tool)
        fold.climbed_after(evidence, verdict)
        _note_result(txn, seen, self, verdict, accepted=accepted)
        # 4. A late outcome on an ended run changes its end no more.
        envelope = txn.envelope
        if verdict.action is Action.STOP and evidence.ended is None:
            if verdict.reason is Reason.COMPLETE:
                txn.output = output_text(self.result.value)
            # A tool's words are data and stay out of the envelope, but for those that it addresses to a person.
            said = self.result.message if verdict.reason is Reason.HUMAN_REQUIRED else None
            envelope = end_run(txn, verdict, self.now_us, after=self.proposal, message=said or "")
        return CallSettled(
            verdict=verdict, seen=seen, operation=txn.operation,
            envelope=envelope if verdict.action is Action.STOP else None, accepted=accepted,
        )  # fmt: skip


def operation_event(result: ToolResult[object]) -> OperationEvent:
    """What a result proves of its write. Anything that is no proof is `LOST`."""
    committed = result.side_effect_committed
    if committed is True:
        return OperationEvent.APPLIED
    if result.error_class is ErrorClass.OUTCOME_UNKNOWN:
        return OperationEvent.LOST
    if committed is False:
        return OperationEvent.REFUSED if result.error_class is ErrorClass.DENIED else OperationEvent.NOT_APPLIED
    if not result.failed:
        return OperationEvent.APPLIED
    if result.error_class in (ErrorClass.TIMEOUT, ErrorClass.OUTAGE):
        return OperationEvent.LOST
    return OperationEvent.REFUSED if result.status is Status.FATAL else OperationEvent.NOT_APPLIED


def _note_result(txn: RunTransaction, seen: Observation, step: SettleCall, verdict: Verdict, *, accepted: bool) -> None:
    operation = txn.operation
    txn.append(
        "result",
        step.now_us,
        {
            "tool": seen.tool, "effect": seen.effect.value, "fp": seen.fingerprint, "call": seen.call_id,
            "round": seen.round_id, "agent": seen.agent, "status": seen.status.value, "answer": seen.answer,
            "mute": None if seen.evidence else 1, "old": None if seen.news else 1,
            "changed": 1 if seen.changed else None, "progress": 1 if seen.progress else None,
            "cls": seen.error_class, "sym": seen.error_symbol, "src": seen.version_source,
            "ver": version_symbol(seen.version), "undeclared": None if seen.declared else 1,
            "failed": 1 if seen.failed else None, "nb": seen.not_before_us, "op": step.operation_key,
            "op_state": None if operation is None else operation.state.value, "late": None if accepted else 1,
            "ms": step.took_us // 1_000, "ok": not seen.failed,
            "loop": None if verdict.action is Action.STOP else verdict.loop, "warn": 1 if verdict.warn else None,
            "observed": 1 if verdict.observed else None, "reason": verdict.reason if verdict.observed else None,
            "turn": txn.evidence.turns, "step": txn.evidence.steps,
        },
        actor=step.actor,
    )  # fmt: skip


def version_symbol(version: int | str | None) -> int | str | None:
    """A progress version as an entry holds it: numbers as they are, opaque text as a digest."""
    if version is None or (isinstance(version, int) and abs(version) <= INT_MAX):
        return version
    return digest(str(version).encode("utf-8", "replace"))


@dataclass(frozen=True, slots=True, kw_only=True)
class LoseCall(Step[OperationRecord | None]):
    """A call that was let through ended without an outcome: cancelled, or its process died. Its write is UNKNOWN.

    `sent` False is proof that the tool was not called: the write is then "not applied". Without `operation` the call
    may not even have been let through (the answer of its reservation was lost); `operation_id`, `owner_id` and
    `attempt_id` say what it would own: another delivery of the same call by the same worker is not its own. A call that
    is settled or was never let through changes nothing.
    """

    proposal: Proposal
    operation: OperationRecord | None = None
    operation_id: str | None = None
    owner_id: str = ""
    attempt_id: str = ""
    cause: str = "cancelled"
    sent: bool = True
    actor: str = "agent"

    @property
    def operation_key(self) -> str | None:
        """The operation that this call owns."""
        return self.operation_id if self.operation is None else self.operation.operation_id

    def apply(self, txn: RunTransaction) -> OperationRecord | None:
        """Forget the call as evidence; mark what it may have done."""
        call, stored = txn.evidence.pending.get(self.proposal.call_id), txn.operation
        is_open = call is not None and self.owner_id in ("", call.owner) and self.attempt_id == call.attempt_id
        executing = stored is not None and stored.state is OperationState.EXECUTING and self._owns(stored)
        if not is_open and not executing:
            return stored
        if is_open:
            fold.abandoned(txn.evidence, self.proposal.call_id)
            txn.evidence_changed = True
        if stored is not None and executing:
            event = OperationEvent.LOST if self.sent else OperationEvent.NOT_APPLIED
            record = replace(
                stored, state=operation_next(stored.state, event), settled_at_us=self.now_us, outcome=OUTCOMES[event],
                reason=safe_name(self.cause),
            )  # fmt: skip
            txn.put_operation(record, stored.fence)
        self._note(txn, of_other=call is not None and not is_open)
        return txn.operation

    def _owns(self, stored: OperationRecord) -> bool:
        if self.operation is not None:
            return stored.fence == self.operation.fence and stored.attempt == self.operation.attempt
        mine = (self.owner_id, self.proposal.call_id, self.attempt_id)
        return (stored.owner_id, stored.call_id, stored.attempt_id) == mine

    def _note(self, txn: RunTransaction, *, of_other: bool) -> None:
        txn.append(
            "lost",
            self.now_us,
            {
                "tool": self.proposal.tool, "call": self.proposal.call_id, "fp": self.proposal.fingerprint,
                "op": self.operation_key, "cause": safe_name(self.cause), "unsent": None if self.sent else 1,
                "other": 1 if of_other else None,
                "turn": txn.evidence.turns, "step": txn.evidence.steps,
            },
            actor=self.actor,
        )  # fmt: skip
