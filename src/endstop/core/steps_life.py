"""What one transaction does for a run's life: join, checkpoint, complete, stop, freeze, resume, recover."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

from endstop.core import fold
from endstop.core.canonical import digest, digest_of
from endstop.core.ending import end_run, left_behind
from endstop.core.entries import safe_name
from endstop.core.events import NO_CONTROLS, Verdict
from endstop.core.evidence import Evidence
from endstop.core.reasons import CAP_REASONS, LIMIT_OF_REASON, Action, Change, Reason, RunState
from endstop.core.records import CheckpointRecord, OperationRecord, RunTransaction
from endstop.core.steps import Step, version_symbol
from endstop.core.steps_turn import charge_turns
from endstop.core.transitions import OperationEvent, OperationState, RunEvent, operation_next, run_next
from endstop.errors import PolicyInvalidError, ResumeRefusedError, RunJoinError

if TYPE_CHECKING:
    from endstop.core.envelope import Envelope
    from endstop.core.model import Spec, Version
    from endstop.core.policy import Limits

__all__ = [
    "CompleteRun", "EndRun", "FreezeRun", "JoinRun", "Joined", "LeaveRun", "NewRun", "NoteUserInput", "RecoverRun",
    "Recovered", "ResumeRun", "SaveCheckpoint", "SeeOrders", "open_run", "parse_change",
]  # fmt: skip

CHECKPOINT_CHARS_MAX: Final = 64 * 1024
ENTRY_NAMES_MAX: Final = 64
LIMIT_DIGITS_MAX: Final = 16  # as many as the largest limit has


@dataclass(frozen=True, slots=True, kw_only=True)
class NewRun:
    """What a run starts with. The store makes the run, its key and its first entry from this, unless it exists."""

    run_id: str
    spec: Spec
    policy_digest: str
    limits: Limits
    agent: str
    labels: tuple[tuple[str, str], ...]
    owner_id: str
    now_us: int
    run_key: bytes
    initial_progress_version: Version | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Joined:
    """The answer to JoinRun."""

    state: RunState
    generation: int
    envelope: Envelope | None
    limits: Limits
    progress_version: Version | None
    checkpoint: CheckpointRecord | None


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinRun(Step[Joined]):
    """Enter a run that exists, with the same spec and policy. Raises RunJoinError when either differs.

    `spec` None takes the stored one.
    """

    spec: Spec | None
    policy_digest: str
    owner_id: str

    def apply(self, txn: RunTransaction) -> Joined:
        """Check, then add this worker; an ended run is left as it is."""
        if self.spec is not None and self.spec != txn.load_spec():
            msg = f"run {txn.run_id} exists with another spec: join it with its own spec, or start another run"
            raise RunJoinError(msg)
        if self.policy_digest != txn.policy_digest:
            msg = f"run {txn.run_id} exists under another policy: join it with its own policy, or start another run"
            raise RunJoinError(msg)
        if txn.evidence.ended is None:
            # Nobody was inside: this is a restart, so what was committed before is answered from the ledger. A
            # generation that a resume has just opened and nobody has entered is the one that we enter.
            if not txn.owners and txn.next_seq != txn.first_seq + 1:
                charge_turns(txn, self.now_us, "left_open")
                txn.generation += 1
                txn.envelope = None
                txn.first_seq = txn.next_seq
                fold.reentered(txn.evidence)
            txn.state = run_next(txn.state, RunEvent.REJOIN)
            _see_freeze(txn, self.now_us)
            if self.owner_id not in txn.owners:
                txn.owners = (*txn.owners, self.owner_id)
            fold.continued(txn.evidence, self.now_us)
            txn.append("run_join", self.now_us, {"owner": self.owner_id, "generation": txn.generation})
            txn.row_changed = txn.evidence_changed = True
        return Joined(
            state=txn.state,
            generation=txn.generation,
            envelope=txn.envelope,
            limits=txn.limits,
            progress_version=txn.evidence.progress_version,
            checkpoint=txn.checkpoint,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaveRun(Step["Envelope | None"]):
    """This worker has left the run without completing it; with nobody inside, its time stands still.

    Gives the run's envelope when it has ended.
    """

    owner_id: str

    def apply(self, txn: RunTransaction) -> Envelope | None:
        """Take this worker out."""
        if self.owner_id in txn.owners:
            txn.owners = tuple(owner for owner in txn.owners if owner != self.owner_id)
            txn.row_changed = True
            if txn.evidence.ended is None:
                txn.append("run_leave", self.now_us, {"owner": self.owner_id})
                if not txn.owners:
                    fold.paused(txn.evidence, self.now_us)
                txn.evidence_changed = True
        return txn.envelope if txn.evidence.ended is not None else None


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveCheckpoint(Step[int]):
    """Keep the last safe state of the run: JSON text."""

    data: str

    def apply(self, txn: RunTransaction) -> int:
        """Keep it and note its digest."""
        seq = txn.append("checkpoint", self.now_us, {"size": len(self.data), "turn": txn.evidence.turns})
        txn.checkpoint = CheckpointRecord(data=self.data, seq=seq, at_us=self.now_us)
        txn.row_changed = True
        return seq


@dataclass(frozen=True, slots=True, kw_only=True)
class CompleteRun(Step["Envelope"]):
    """The agent says that it is done: the run ends as complete, its output is kept for review.

    A worker of an earlier `generation` than the run's own, or one that was taken for dead, ends nothing; it gets an
    envelope that says so.
    """

    output: str | None = None
    generation: int | None = None
    actor: str = "agent"

    def apply(self, txn: RunTransaction) -> Envelope:
        """End the run; one that has ended keeps its envelope."""
        stale = left_behind(txn, self.generation, self.now_us)
        if stale is not None:
            return stale.envelope
        if txn.evidence.ended is None:
            txn.output = self.output
        verdict = Verdict(action=Action.STOP, reason=Reason.COMPLETE, guard="complete")
        return end_run(txn, verdict, self.now_us, actor=self.actor)


@dataclass(frozen=True, slots=True, kw_only=True)
class EndRun(Step["Envelope"]):
    """End the run for a reason from outside the guards: an operator, a framework's cap, a provider, a crash.

    `generation` as in CompleteRun; an operator gives none, and may end an interrupted run too.
    """

    reason: Reason
    guard: str
    message: str = ""
    generation: int | None = None
    actor: str = "operator"

    def apply(self, txn: RunTransaction) -> Envelope:
        """End the run; one that has ended keeps its envelope."""
        stale = None if self.generation is None else left_behind(txn, self.generation, self.now_us)
        if stale is not None:
            return stale.envelope
        verdict = Verdict(action=Action.STOP, reason=self.reason, guard=self.guard)
        return end_run(txn, verdict, self.now_us, actor=self.actor, message=self.message)


@dataclass(frozen=True, slots=True, kw_only=True)
class FreezeRun(Step[RunState]):
    """Show a freeze, or its end, in the run's state. The order itself is a control record."""

    frozen: bool
    actor: str = "operator"

    def apply(self, txn: RunTransaction) -> RunState:
        """Change running to frozen or back; any other state stays, and so does a freeze that another order holds."""
        if txn.state in (RunState.RUNNING, RunState.FROZEN):
            _show_freeze(txn, self.now_us, frozen=self.frozen or txn.controls.frozen is not None, actor=self.actor)
        return txn.state


def _show_freeze(txn: RunTransaction, now_us: int, *, frozen: bool, actor: str) -> None:
    """Let state and evidence of a live run say whether it is frozen."""
    if frozen is not (txn.state is RunState.FROZEN):
        txn.state = run_next(txn.state, RunEvent.FREEZE if frozen else RunEvent.UNFREEZE)
        txn.row_changed = True
    if frozen is not txn.evidence.frozen:
        txn.evidence.frozen = frozen
        txn.append("control", now_us, {"order": "freeze" if frozen else "unfreeze"}, actor=actor)
        txn.row_changed = txn.evidence_changed = True


def _see_freeze(txn: RunTransaction, now_us: int) -> None:
    """A run that starts to run again shows a freeze that was ordered, or lifted, meanwhile."""
    order = txn.controls.frozen
    _show_freeze(txn, now_us, frozen=order is not None, actor="operator" if order is None else order.actor)


@dataclass(frozen=True, slots=True, kw_only=True)
class SeeOrders(Step["Envelope | None"]):
    """A worker has entered a run: a standing kill ends it at once, a standing freeze shows in its state.

    Gives the envelope of a run that is over.
    """

    def apply(self, txn: RunTransaction) -> Envelope | None:
        """End or mark the run."""
        kill = txn.controls.kill
        if txn.evidence.ended is None and kill is not None:
            verdict = Verdict(action=Action.STOP, reason=Reason.KILL_SWITCH, guard="kill")
            return end_run(txn, verdict, self.now_us, actor=kill.actor, message=kill.reason)
        if txn.state is RunState.RUNNING:
            _see_freeze(txn, self.now_us)
        return txn.envelope if txn.evidence.ended is not None else None


@dataclass(frozen=True, slots=True, kw_only=True)
class NoteUserInput(Step[int]):
    """A real person spoke to the run: a new epoch."""

    def apply(self, txn: RunTransaction) -> int:
        """Open the epoch."""
        fold.user_input(txn.evidence)
        txn.evidence_changed = True
        return txn.append("user_input", self.now_us, {"turn": txn.evidence.turns}, actor="user")


def parse_change(text: str) -> tuple[Change | None, str | None, int | None]:
    """A named change as (change, limit name, limit value): `authorisation`, or `limit:steps_max=40`.

    Raises ResumeRefusedError when the text names no change.
    """
    kind, _, rest = text.partition(":")
    if kind == "limit":
        name, _, value = rest.partition("=")
        if not name or not (value.isascii() and value.isdigit()) or len(value) > LIMIT_DIGITS_MAX:
            msg = "a raised limit is written limit:NAME=VALUE, with a whole number"
            raise ResumeRefusedError(msg)
        return None, name, int(value)
    try:
        return Change(text), None, None
    except ValueError:
        known = ", ".join(change.value for change in Change)
        msg = f"a resume names its change: {known}, or limit:NAME=VALUE; {text[:40]!r} is none of them"
        raise ResumeRefusedError(msg) from None


@dataclass(frozen=True, slots=True, kw_only=True)
class ResumeRun(Step[int]):
    """Go on with a run that ended or was interrupted: a new generation with the same totals.

    Raises ResumeRefusedError when the run is complete, still running, or ended by a cap that the change does not
    raise; nothing is changed then.
    """

    change: str
    reason: str
    actor: str = "operator"

    def apply(self, txn: RunTransaction) -> int:
        """Check the change, open the generation, raise the limit."""
        named, limit_name, value = parse_change(self.change)
        if not self.reason.strip():
            msg = "a resume needs a reason"
            raise ResumeRefusedError(msg)
        if RunEvent.RESUME not in RUN_RESUMABLE[txn.state]:
            msg = f"run {txn.run_id} is {txn.state}; only a stopped, paused or interrupted run can be resumed"
            raise ResumeRefusedError(msg)
        if txn.controls.kill is not None:
            msg = f"run {txn.run_id} is under a kill order: withdraw it first (endstop unkill)"
            raise ResumeRefusedError(msg)
        limits = self._limits(txn, limit_name, value)
        charge_turns(txn, self.now_us, "left_open", actor=self.actor)
        txn.limits = limits
        txn.state = run_next(txn.state, RunEvent.RESUME)
        _see_freeze(txn, self.now_us)
        txn.generation += 1
        fold.resumed(txn.evidence, self.now_us)
        # Nobody is inside yet: time starts when a worker joins.
        fold.paused(txn.evidence, self.now_us)
        txn.envelope = None
        txn.owners = ()
        txn.first_seq = txn.append(
            "resume",
            self.now_us,
            {
                "change": named.value if named is not None else "limit", "limit": limit_name, "value": value,
                "generation": txn.generation, "ver": version_symbol(txn.evidence.progress_version),
                "why": digest(self.reason.encode("utf-8", "replace")),
            },
            actor=self.actor,
        )  # fmt: skip
        txn.row_changed = txn.evidence_changed = True
        return txn.generation

    def _limits(self, txn: RunTransaction, limit_name: str | None, value: int | None) -> Limits:
        """The limits of the next generation: the named one raised, and the one that ended the run among them."""
        ended = None if txn.evidence.ended is None else Reason(txn.evidence.ended)
        if ended in CAP_REASONS and limit_name != LIMIT_OF_REASON[ended]:
            msg = f"run {txn.run_id} ended by {ended}: resume it with --change limit:{LIMIT_OF_REASON[ended]}=VALUE"
            raise ResumeRefusedError(msg)
        if limit_name is None or value is None:
            return txn.limits
        try:
            raised = txn.limits.raised(limit_name, value)
        except PolicyInvalidError as error:
            msg = f"run {txn.run_id} cannot be resumed with limit:{limit_name[:40]}: {error}"
            raise ResumeRefusedError(msg) from error
        before = getattr(txn.limits, limit_name)
        if before is None or value <= before:
            stands = "has no maximum" if before is None else f"is {before} already"
            msg = f"limit {limit_name} {stands}; a resume must raise it"
            raise ResumeRefusedError(msg)
        return raised


RUN_RESUMABLE: Final = {
    state: frozenset({RunEvent.RESUME})
    if state in (RunState.STOPPED, RunState.PAUSED, RunState.INTERRUPTED)
    else frozenset()
    for state in RunState
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Recovered:
    """The answer to RecoverRun: calls whose worker died, and the operations that are in doubt because of it."""

    lost_calls: tuple[str, ...]
    in_doubt: tuple[str, ...]
    state: RunState


@dataclass(frozen=True, slots=True, kw_only=True)
class RecoverRun(Step[Recovered]):
    """Take over after a crash: what dead workers had dispatched is UNKNOWN, and the run is interrupted when nobody
    alive is inside. Never sends anything again."""

    dead_owners: frozenset[str]
    actor: str = "recovery"

    def apply(self, txn: RunTransaction) -> Recovered:
        """Mark and note; running it twice changes nothing more."""
        lost = [call_id for call_id, call in txn.evidence.pending.items() if call.owner in self.dead_owners]
        doubts: list[OperationRecord] = []
        # 1. Operations first, so that a call is never forgotten before its write is marked.
        for record in txn.load_operations():
            if record.state is OperationState.EXECUTING and record.owner_id in self.dead_owners:
                state = operation_next(record.state, OperationEvent.LOST)
                marked = replace(
                    record, state=state, settled_at_us=self.now_us, outcome="unknown", reason="worker died"
                )
                txn.put_operation(marked, record.fence)
                doubts.append(marked)
        # 2. The calls.
        for call_id in lost:
            fold.abandoned(txn.evidence, call_id)
        # 3. The workers, and the run's state when nobody alive is left.
        left = tuple(owner for owner in txn.owners if owner not in self.dead_owners)
        died = [owner for owner in txn.owners if owner in self.dead_owners]
        someone_died = bool(died)
        txn.owners = left
        if someone_died and not left:
            charge_turns(txn, self.now_us, "worker_died", actor=self.actor)
        if lost or doubts or someone_died:
            txn.append(
                "recover",
                self.now_us,
                {
                    "lost": lost, "ops": [item.operation_id for item in doubts][:ENTRY_NAMES_MAX],
                    "owners": died, "state": txn.state.value,
                    "seen_us": self._seen_us(txn) if self._leaves_nobody(txn, someone_died=someone_died) else None,
                },
                actor=self.actor,
            )  # fmt: skip
            txn.row_changed = txn.evidence_changed = True
        if self._leaves_nobody(txn, someone_died=someone_died):
            fold.paused(txn.evidence, self._seen_us(txn))
            verdict = Verdict(action=Action.STOP, reason=Reason.CRASHED, guard="recovery")
            end_run(txn, verdict, self.now_us, actor=self.actor)
        return Recovered(lost_calls=tuple(lost), in_doubt=tuple(item.operation_id for item in doubts), state=txn.state)

    def _leaves_nobody(self, txn: RunTransaction, *, someone_died: bool) -> bool:
        return someone_died and not txn.owners and txn.state in (RunState.RUNNING, RunState.FROZEN)

    def _seen_us(self, txn: RunTransaction) -> int:
        """The run's time stopped when it was last seen, not when somebody noticed."""
        return txn.updated_at_us or self.now_us


def open_run(new: NewRun, *, ledger: str) -> RunTransaction:
    """The working copy of a run that starts now, with its first entry. The store saves it like any other."""
    evidence = Evidence()
    if new.initial_progress_version is not None:
        fold.seed_version(evidence, new.initial_progress_version)
    fold.started(evidence, new.now_us)
    txn = RunTransaction(
        run_id=new.run_id, ledger=ledger, state=RunState.RUNNING, generation=1, limits=new.limits,
        policy_digest=new.policy_digest, evidence=evidence, controls=NO_CONTROLS, next_seq=0, first_seq=0,
        agent=new.agent, owners=(new.owner_id,),
    )  # fmt: skip
    spec = new.spec
    txn.append(
        "run_open",
        new.now_us,
        {
            "agent": safe_name(new.agent), "owner": new.owner_id,
            "spec": digest_of("spec", spec.what_it_does, spec.what_it_does_not, spec.done_looks_like, key=new.run_key),
            "ver": version_symbol(new.initial_progress_version),
        },
    )  # fmt: skip
    txn.row_changed = txn.evidence_changed = True
    return txn
