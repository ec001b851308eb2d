"""How a run ends: the latch, the state, the envelope and the stop entry, in one transaction and once a generation."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Final

from endstop.core import fold
from endstop.core.entries import safe_name
from endstop.core.envelope import CallNote, Envelope, LedgerSpan, OperationNote
from endstop.core.events import Verdict
from endstop.core.messages import message_of
from endstop.core.model import MESSAGE_CHARS_MAX, NO_DETAIL, Detail
from endstop.core.propose import argument_note
from endstop.core.reasons import ENDINGS, Action, Reason, RunState
from endstop.core.transitions import OperationState, RunEvent, run_next
from endstop.errors import InvariantError

if TYPE_CHECKING:
    from endstop.core.events import Proposal
    from endstop.core.records import OperationRecord, RunTransaction

__all__ = ["IN_DOUBT_STATES", "LeftBehind", "call_note", "end_run", "figures", "left_behind", "sound_text"]

IN_DOUBT_STATES = frozenset({OperationState.EXECUTING, OperationState.UNKNOWN, OperationState.MANUAL})
OPERATIONS_LISTED_MAX = 200
_FIGURES = tuple(item.name for item in fields(Detail) if item.name not in ("tool", "rule"))


def call_note(proposal: Proposal) -> CallNote:
    """A call as an envelope shows it."""
    return CallNote(
        tool=proposal.tool,
        fingerprint=proposal.fingerprint,
        args=argument_note(proposal.args),
        call_id=proposal.call_id,
        agent=proposal.agent,
    )


def figures(verdict: Verdict) -> dict[str, object]:
    """A verdict's detail as entry fields: names and whole numbers only."""
    detail = verdict.detail
    if detail is NO_DETAIL:
        return {}
    return {f"d.{name}": value for name in _FIGURES if (value := getattr(detail, name)) is not None}


def end_run(
    txn: RunTransaction,
    verdict: Verdict,
    now_us: int,
    *,
    blocked: Proposal | None = None,
    after: Proposal | None = None,
    actor: str = "agent",
    message: str = "",
) -> Envelope:
    """End the run with `verdict` and give its envelope; a run that has ended keeps the envelope it has."""
    # 1. Once only.
    if txn.evidence.ended is not None:
        if txn.envelope is None:
            msg = f"run {txn.run_id} has ended without an envelope"
            raise InvariantError(msg)
        return txn.envelope
    reason = verdict.reason
    if verdict.action is not Action.STOP or reason is None:
        msg = f"a verdict of {verdict.action} cannot end run {txn.run_id}"
        raise InvariantError(msg)
    # 2. The entry, so that the envelope can name it.
    text = sound_text(message)[:MESSAGE_CHARS_MAX] or message_of(verdict)
    guard = None if verdict.guard is None else safe_name(verdict.guard)
    doubtful = blocked or after
    seq = txn.append(
        "complete" if reason is Reason.COMPLETE else "stop",
        now_us,
        {
            "reason": reason.value, "guard": guard, "ok": reason is Reason.COMPLETE,
            "call": None if doubtful is None else doubtful.call_id,
            "fp": None if doubtful is None else doubtful.fingerprint,
            "turn": txn.evidence.turns, "step": txn.evidence.steps, **figures(verdict),
        },
        actor=actor,
    )  # fmt: skip
    # 3. The operations as they stand, in doubt first.
    known = sorted(_operations(txn), key=lambda item: (item.state not in IN_DOUBT_STATES, item.created_at_us))
    doubts = tuple(item.operation_id for item in known if item.state in IN_DOUBT_STATES)
    # 4. The latch and the state. A crash has no latch: the next worker goes on, in a new generation.
    if reason is Reason.CRASHED:
        fold.paused(txn.evidence, now_us)
        txn.state = run_next(txn.state, RunEvent.INTERRUPT)
    else:
        fold.ended(txn.evidence, reason, text, now_us)
        txn.state = run_next(txn.state, _event(reason))
    txn.envelope = Envelope(
        run_id=txn.run_id,
        generation=txn.generation,
        terminal_reason=reason,
        guard=guard,
        message=text,
        detail=verdict.detail,
        blocked_call=None if blocked is None else call_note(blocked),
        after_call=None if after is None else call_note(after),
        last_safe_checkpoint=None if txn.checkpoint is None else txn.checkpoint.data,
        progress_version=txn.evidence.progress_version,
        external_state="in_doubt" if doubts else "known",
        operations=tuple(
            OperationNote(operation_id=o.operation_id, tool=o.tool, key_digest=o.key_digest, state=o.state.value)
            for o in known[:OPERATIONS_LISTED_MAX]
        ),
        in_doubt=doubts,
        counters=txn.evidence.counters(now_us),
        spend_nanos=txn.evidence.spend_nanos,
        next_allowed_action=ENDINGS[reason].next_action,
        ledger=LedgerSpan(first=txn.first_seq, last=seq),
        occurred_at_us=now_us,
    )
    txn.row_changed = txn.evidence_changed = True
    return txn.envelope


def _operations(txn: RunTransaction) -> list[OperationRecord]:
    """Every operation of the run, as this transaction leaves it."""
    found = {record.operation_id: record for record in txn.load_operations()}
    for record, _ in txn.operations:
        if record.run_id == txn.run_id:
            found[record.operation_id] = record
    return list(found.values())


def _event(reason: Reason) -> RunEvent:
    if reason is Reason.COMPLETE:
        return RunEvent.COMPLETE
    return RunEvent.PAUSE if reason is Reason.HUMAN_REQUIRED else RunEvent.STOP


@dataclass(frozen=True, slots=True, kw_only=True)
class LeftBehind:
    """What a worker that is inside no longer is told: a verdict, and the end of its own stretch of the run."""

    verdict: Verdict
    envelope: Envelope


_LEFT_BEHIND: Final = Verdict(action=Action.STOP, reason=Reason.OPERATOR_CANCELLED_LOOP, guard="generation")
_TAKEN_FOR_DEAD: Final = Verdict(action=Action.STOP, reason=Reason.CRASHED, guard="recovery")


def left_behind(txn: RunTransaction, generation: int | None, now_us: int) -> LeftBehind | None:
    """The end of a worker that entered the run in `generation` and is inside no longer, else None.

    A worker that slept through a stop and a resume must not act on what it knew before; its end is stored nowhere. An
    interrupted run has nobody inside: who goes on in it was taken for dead, and its end is the stored one. Both must
    join the run again.
    """
    if generation is None or generation >= txn.generation:
        if txn.state is RunState.INTERRUPTED and txn.envelope is not None:
            return LeftBehind(verdict=_TAKEN_FOR_DEAD, envelope=txn.envelope)
        return None
    envelope = Envelope(
        run_id=txn.run_id,
        generation=generation,
        terminal_reason=Reason.OPERATOR_CANCELLED_LOOP,
        guard=_LEFT_BEHIND.guard,
        message=f"The run goes on in generation {txn.generation}; this worker entered in {generation}. Join it again.",
        counters=txn.evidence.counters(now_us),
        spend_nanos=txn.evidence.spend_nanos,
        next_allowed_action=ENDINGS[Reason.OPERATOR_CANCELLED_LOOP].next_action,
        occurred_at_us=now_us,
    )
    return LeftBehind(verdict=_LEFT_BEHIND, envelope=envelope)


def sound_text(text: str) -> str:
    """`text` as every store can hold it: lone surrogates become question marks."""
    return text if text.isascii() else text.encode("utf-8", "replace").decode("utf-8")
