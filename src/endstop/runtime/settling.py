"""What an authorised person decides about one operation in doubt. Nothing that a model can reach calls this."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import orjson

from endstop.core.canonical import digest_of
from endstop.core.probing import RECEIPT_CHARS_MAX, Exclusion
from endstop.core.steps_life import RecoverRun
from endstop.core.steps_operations import SettleByHand
from endstop.core.transitions import OperationState
from endstop.errors import RunNotFoundError, UsageError
from endstop.runtime.asking import is_owner_gone
from endstop.store.port import ROWS_MAX

if TYPE_CHECKING:
    from endstop.core.records import EntryRecord, OperationRecord
    from endstop.runtime.guard import Guard

__all__ = ["operation_history", "operation_of", "settle_operation"]

TEXT_CHARS_MAX: Final = 10_000
OUTCOMES: Final = ("applied", "not_applied")


@dataclass(frozen=True, slots=True, kw_only=True)
class OperationEvidence:
    """Why a person says so: a reason, and what was seen at the target. Both are kept as digests alone."""

    reason: str
    evidence: str

    def __post_init__(self) -> None:
        for said, text in (("a reason", self.reason), ("evidence", self.evidence)):
            if not text.strip() or len(text) > TEXT_CHARS_MAX:
                msg = f"settling an operation by hand needs {said} of 1 to {TEXT_CHARS_MAX} characters"
                raise UsageError(msg)


def operation_of(guard: Guard, operation_id: str) -> OperationRecord:
    """The operation. Raises RunNotFoundError when there is none of that id."""
    found = guard.store.operations(operation_id=operation_id).result()
    if not found:
        msg = f"there is no operation {operation_id[:80]} in this store; `endstop ops` lists them"
        raise RunNotFoundError(msg)
    return found[0]


def settle_operation(
    guard: Guard, operation_id: str, *, outcome: str, reason: str, evidence: str, actor: str,
    exclusion: Exclusion | str | None = None, receipt: str | None = None,
) -> OperationRecord:  # fmt: skip
    """Settle an operation in doubt by what a person found out; see `Guard.settle_operation`."""
    said = OperationEvidence(reason=reason, evidence=evidence)
    if outcome not in OUTCOMES:
        msg = f"an operation is settled as one of {', '.join(OUTCOMES)}, not {outcome[:40]!r}"
        raise UsageError(msg)
    if receipt is not None and len(receipt) > RECEIPT_CHARS_MAX:
        msg = f"a receipt has {RECEIPT_CHARS_MAX} characters at most"
        raise UsageError(msg)
    chosen = None if exclusion is None else _exclusion(exclusion)
    record = operation_of(guard, operation_id)
    world, key = guard.world, guard.store.store_key
    # 1. What a dead worker left executing is in doubt; whether it is dead is not the person's to say.
    if record.state is OperationState.EXECUTING and not world.board.is_alive(record.owner_id):
        guard.store.transact(
            RecoverRun(run_id=record.run_id, now_us=world.clock.now_us(), dead_owners=frozenset({record.owner_id}))
        ).result()
        record = operation_of(guard, operation_id)
    if chosen is None and outcome == "not_applied" and is_owner_gone(world, record):
        chosen = Exclusion.OWNER_DEAD
    # 2. Settle the attempt that was read, and no other.
    step = SettleByHand(
        run_id=record.run_id, now_us=world.clock.now_us(), operation_id=record.operation_id, attempt=record.attempt,
        fence=record.fence, applied=outcome == "applied", exclusion=chosen, actor=actor,
        why=digest_of("reason", said.reason, key=key), proof=digest_of("evidence", said.evidence, key=key),
        receipt=receipt,
    )  # fmt: skip
    settled = guard.store.transact(step).result().operation
    return record if settled is None else settled


def _exclusion(named: Exclusion | str) -> Exclusion:
    try:
        return Exclusion(named)
    except ValueError as error:
        msg = f"an exclusion is one of {', '.join(item.value for item in Exclusion)}, not {str(named)[:40]!r}"
        raise UsageError(msg) from error


def operation_history(guard: Guard, record: OperationRecord) -> tuple[EntryRecord, ...]:
    """Every entry about an operation, oldest first, in whatever runs its attempts were made."""
    found: dict[int, EntryRecord] = {}
    runs, seen = [record.run_id], set[str]()
    while runs:
        run_id = runs.pop()
        seen.add(run_id)
        after = -1
        while page := guard.store.entries(run_id=run_id, after_index=after, limit=ROWS_MAX).result():
            after = page[-1].index
            for entry in page:
                if record.operation_id.encode() not in entry.leaf:
                    continue
                leaf = orjson.loads(entry.leaf)
                named = leaf.get("ops")
                if leaf.get("op") == record.operation_id or (isinstance(named, list) and record.operation_id in named):
                    found[entry.index] = entry
                    earlier = leaf.get("prev")
                    if isinstance(earlier, str) and earlier not in seen:
                        runs.append(earlier)
            if len(page) < ROWS_MAX:
                break
    return tuple(found[index] for index in sorted(found))
