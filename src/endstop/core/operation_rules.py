"""What a transaction may do to an operation, beside dispatching it: settle, contradict, exhaust, re-arm, note.

Rules of this file:

1. Every change goes through the table of `endstop.core.transitions` and writes over exactly the version that was read.
2. An outcome belongs to one attempt. That of an older attempt changes nothing; it is noted as an incident.
3. What is terminal never changes its outcome. Evidence that speaks against it is noted as an incident.
4. "Not applied" re-arms a key only with a reason why the old attempt cannot take effect any more.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final

from endstop.core.canonical import digest
from endstop.core.codec import result_data
from endstop.core.entries import safe_name
from endstop.core.probing import Exclusion
from endstop.core.records import OperationRecord
from endstop.core.slots import changer
from endstop.core.transitions import OperationEvent, OperationState, operation_next
from endstop.errors import InvariantError, StoreCorruptError

if TYPE_CHECKING:
    from endstop.core.model import ToolResult
    from endstop.core.operation_terms import OperationTerms
    from endstop.core.records import RunTransaction

__all__ = [
    "OUTCOMES", "check_result", "exhaust", "may_go_again", "note_operation", "rearmed", "result_digest",
    "settle_attempt", "with_result",
]  # fmt: skip

OUTCOMES: Final = {
    OperationEvent.APPLIED: "applied",
    OperationEvent.NOT_APPLIED: "not_applied",
    OperationEvent.REFUSED: "not_applied",
    OperationEvent.LOST: "unknown",
}
_OPEN: Final = (OperationState.EXECUTING, OperationState.UNKNOWN, OperationState.MANUAL)
_APPLIED: Final = OperationEvent.APPLIED
_LOST: Final = OperationEvent.LOST
_changed: Final = changer(OperationRecord)


def note_operation(
    txn: RunTransaction, now_us: int, before: OperationRecord, after: OperationRecord, code: str, *,
    actor: str, incident: bool = False, proof: str = "", why: str = "", probe: int = 0, exclusion: str | None = None,
) -> None:  # fmt: skip
    """Append the entry of one change (or of evidence that changed nothing). `proof` and `why` are digests."""
    txn.append(
        "operation",
        now_us,
        {
            "op": before.operation_id, "tool": before.tool, "from": before.state.value, "to": after.state.value,
            "attempt": before.attempt, "fence": before.fence, "code": code, "incident": 1 if incident else None,
            "proof": proof, "why": why, "probe": probe or None, "exclusion": exclusion,
            "prev": before.run_id if before.run_id != txn.run_id else None,
        },
        actor=actor,
    )  # fmt: skip


# -- Results


def result_digest(data: bytes | None, key: bytes) -> str | None:
    """The digest that a stored result is checked against when it is replayed."""
    return None if data is None else digest(b"result\0" + data, key)


def check_result(record: OperationRecord, key: bytes) -> None:
    """Raise StoreCorruptError when the stored result is not the one that was stored: the tool is never called again."""
    if record.result_digest is None or record.state is OperationState.TOMBSTONE:
        return
    if result_digest(record.result, key) != record.result_digest:
        msg = (
            f"the stored result of operation {record.operation_id} does not fit its digest: the operation is not run "
            "again; restore the store from a backup"
        )
        raise StoreCorruptError(msg)


def with_result(
    record: OperationRecord, event: OperationEvent, now_us: int, data: bytes | None, kind: str, key: bytes,
    not_before_us: int | None = None,
) -> OperationRecord:  # fmt: skip
    """`record` after `event`, with the outcome and the result that came with it."""
    state = operation_next(record.state, event)
    return _changed(
        record, state=state, settled_at_us=now_us, outcome=OUTCOMES[event], result=data, result_kind=kind,
        result_digest=result_digest(data, key), probe_until_us=0, args=record.args if event is _LOST else None,
        not_before_us=record.not_before_us if not_before_us is None else not_before_us,
    )  # fmt: skip


# -- The outcome of an attempt


def settle_attempt(
    txn: RunTransaction, owned: OperationRecord, result: ToolResult[object], event: OperationEvent, now_us: int, *,
    key: bytes, actor: str,
) -> bool:  # fmt: skip
    """Write the outcome that the owner of an attempt brings, also late. False when it changed nothing: then it was
    noted as an incident."""
    stored = txn.operation
    if stored is None:
        msg = f"operation {owned.operation_id} was dispatched but is not stored"
        raise InvariantError(msg)
    # 1. A newer attempt owns it.
    if stored.attempt != owned.attempt or stored.fence != owned.fence or stored.owner_id != owned.owner_id:
        note_operation(txn, now_us, stored, stored, f"late_{OUTCOMES[event]}", actor=actor, incident=True)
        return False
    # 2. It is still open: the first outcome counts, and no outcome says nothing that is not known.
    if stored.state in _OPEN:
        if event is _LOST and stored.state is not OperationState.EXECUTING:
            return True
        data, kind = result_data(result) if event is not _LOST else (None, "none")
        wait_ms = result.retry_after_ms or 0
        not_before_us = now_us + wait_ms * 1_000 if wait_ms else 0
        record = with_result(stored, event, now_us, data, kind, key, not_before_us)
        if stored.state is not OperationState.EXECUTING:
            note_operation(txn, now_us, stored, record, "late_result", actor=actor)
        txn.put_operation(record, stored.fence)
        return True
    # 3. Something else settled it meanwhile: agreement is fine, contradiction is not.
    if event is _LOST or OUTCOMES[event] == stored.outcome:
        return True
    return contradict(txn, stored, event, now_us, actor=actor)


def contradict(
    txn: RunTransaction, stored: OperationRecord, event: OperationEvent, now_us: int, *, actor: str, probe: int = 0
) -> bool:
    """Evidence of the same attempt against what is recorded. A key that waits for another attempt is blocked; what is
    terminal stays. Always False, always an incident."""
    record, code = stored, f"contradiction_{OUTCOMES[event]}"
    if stored.state is OperationState.FAILED_RETRYABLE and event is _APPLIED:
        record = replace(
            stored, state=operation_next(stored.state, OperationEvent.CONTRADICT), outcome="unknown", reason=code,
            settled_at_us=now_us,
        )  # fmt: skip
        txn.put_operation(record, stored.fence)
    note_operation(txn, now_us, stored, record, code, actor=actor, incident=True, probe=probe)
    return False


# -- Another attempt


def may_go_again(stored: OperationRecord, terms: OperationTerms) -> bool:
    """Whether an attempt of unknown outcome may be sent again under its key, because the target refuses a second."""
    return stored.state is OperationState.UNKNOWN and terms.target_dedupes and stored.attempt < terms.attempts_max


def rearmed(txn: RunTransaction, stored: OperationRecord, now_us: int, *, actor: str) -> OperationState:
    """The state from which an operation that `may_go_again` is dispatched, noted with its exclusion."""
    record = replace(stored, state=operation_next(stored.state, OperationEvent.NOT_APPLIED))
    note_operation(txn, now_us, stored, record, "sent_again", actor=actor, exclusion=Exclusion.TARGET_DEDUPES.value)
    return record.state


def exhaust(txn: RunTransaction, fingerprint: str, terms: OperationTerms, now_us: int, *, actor: str) -> None:
    """Close an operation whose attempts are all used and were all proven not applied. Its fence moves on, so that
    nobody dispatches what he read before."""
    stored = txn.operation
    if stored is None or stored.state is not OperationState.FAILED_RETRYABLE:
        return
    if stored.attempt < terms.attempts_max or stored.fingerprint != fingerprint:
        return
    record = replace(
        stored, state=operation_next(stored.state, OperationEvent.EXHAUSTED), fence=stored.fence + 1,
        reason=safe_name(f"{stored.attempt} attempts were not applied"),
    )  # fmt: skip
    note_operation(txn, now_us, stored, record, "attempts_exhausted", actor=actor)
    txn.put_operation(record, stored.fence)
