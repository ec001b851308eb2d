"""Rows of the SQLite store to records and back, once each."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, cast

import orjson

from endstop.core.codec import envelope_data, envelope_from, limits_from, spec_from
from endstop.core.operation_extra import extra_text, same_extra, with_extra
from endstop.core.reasons import RunState
from endstop.core.records import CheckpointRecord, ChildRecord, ControlRecord, OperationRecord
from endstop.core.transitions import OperationState
from endstop.errors import EndstopError, StoreCorruptError
from endstop.store.port import LedgerRow, StoredSpec
from endstop.store.rows import RunRow

if TYPE_CHECKING:
    import apsw

    from endstop.core.model import Spec
    from endstop.store.workspace import LiveRun

__all__ = [
    "child_from", "child_values", "control_from", "control_values", "is_settlement", "ledger_row_from",
    "new_run_values", "operation_from", "operation_values", "outcome_values", "run_from", "run_values", "spec_values",
    "stored_spec_from",
]  # fmt: skip

Row = tuple["apsw.SQLiteValue", ...]


def _corrupt(what: str) -> StoreCorruptError:
    return StoreCorruptError(f"{what} cannot be read: restore the store from a backup, nothing goes ahead on it")


def _json(value: object) -> str:
    return orjson.dumps(value).decode()


def _pairs(text: object) -> tuple[tuple[str, str], ...]:
    return tuple((str(name), str(value)) for name, value in orjson.loads(cast("str", text)))


def spec_text(spec: Spec) -> str:
    """A spec as stored text."""
    return _json(asdict(spec))


# -- Runs


def run_from(row: Row) -> RunRow:
    """A root run. Raises StoreCorruptError when the row makes none."""
    (
        key, run_id, agent, labels, spec, policy_digest, run_key, created_at_us, state, generation, limits, owners,
        first_seq, checkpoint, checkpoint_seq, checkpoint_at_us, envelope, output, next_seq, updated_at_us, evidence,
    ) = cast("list[str]", row)  # fmt: skip
    noted = cast("str | None", checkpoint)
    ending = cast("str | None", envelope)
    try:
        return RunRow(
            key=int(key), run_id=run_id, agent=agent, labels=_pairs(labels), spec=spec_from(spec.encode()),
            policy_digest=policy_digest, run_key=cast("bytes | None", run_key), created_at_us=int(created_at_us),
            state=RunState(state), generation=int(generation), limits=limits_from(limits.encode()),
            owners=tuple(orjson.loads(owners)), first_seq=int(first_seq),
            checkpoint=None
            if noted is None
            else CheckpointRecord(data=noted, seq=int(checkpoint_seq), at_us=int(checkpoint_at_us)),
            envelope=None if ending is None else envelope_from(ending.encode()), output=output,
            next_seq=int(next_seq), updated_at_us=int(updated_at_us), evidence=cast("bytes", evidence),
        )  # fmt: skip
    except (ValueError, TypeError, KeyError, EndstopError) as error:
        raise _corrupt(f"run {str(run_id)[:80]}") from error


def run_values(run: LiveRun) -> tuple[apsw.SQLiteValue, ...]:
    """What seldom changes of a root run, in the order of the statement `update_run` (but for its key)."""
    txn = run.txn
    checkpoint = txn.checkpoint
    return (
        txn.state.value, txn.generation, _json(asdict(txn.limits)), _json(txn.owners), txn.first_seq,
        None if checkpoint is None else checkpoint.data, None if checkpoint is None else checkpoint.seq,
        None if checkpoint is None else checkpoint.at_us,
        None if txn.envelope is None else envelope_data(txn.envelope).decode(), txn.output,
    )  # fmt: skip


def new_run_values(run: LiveRun) -> tuple[apsw.SQLiteValue, ...]:
    """A new root run, in the order of the statement `insert_run`."""
    txn = run.txn
    return (
        txn.run_id, txn.agent, _json(run.labels), spec_text(run.spec), txn.policy_digest, run.run_key,
        run.created_at_us, *run_values(run),
    )  # fmt: skip


def child_from(row: Row) -> ChildRecord:
    """A child run."""
    run_id, root_run_id, parent_run_id, depth, agent, created_at_us = cast("list[str]", row)
    return ChildRecord(
        run_id=run_id, root_run_id=root_run_id, parent_run_id=parent_run_id, depth=int(depth), agent=agent,
        created_at_us=int(created_at_us),
    )  # fmt: skip


def child_values(child: ChildRecord) -> tuple[apsw.SQLiteValue, ...]:
    """A child run, in the order of its statement."""
    return (child.run_id, child.root_run_id, child.parent_run_id, child.depth, child.agent, child.created_at_us)


def stored_spec_from(row: Row) -> StoredSpec:
    """A spec. Raises StoreCorruptError when the row makes none."""
    run_id, spec, created_at_us = cast("list[str]", row)
    try:
        return StoredSpec(run_id=run_id, spec=spec_from(spec.encode()), created_at_us=int(created_at_us))
    except (ValueError, TypeError, EndstopError) as error:
        raise _corrupt(f"the spec of run {run_id[:80]}") from error


def spec_values(stored: StoredSpec) -> tuple[apsw.SQLiteValue, ...]:
    """A spec, in the order of its statement."""
    return (stored.run_id, spec_text(stored.spec), stored.created_at_us)


# -- Operations


def operation_from(row: Row) -> OperationRecord:
    """An operation. Raises StoreCorruptError when the row makes none: it is never taken for an absent one."""
    values = cast("list[str]", row)
    try:
        record = OperationRecord(
            operation_id=values[0], tool=values[1], key_digest=values[2], fingerprint=values[3],
            state=OperationState(values[4]), run_id=values[5], generation=int(values[6]), call_id=values[7],
            owner_id=values[8], attempt=int(values[9]), fence=int(values[10]), effect=values[11],
            created_at_us=int(values[12]), dispatched_at_us=cast("int | None", values[13]),
            settled_at_us=cast("int | None", values[14]), not_before_us=int(values[15]), outcome=values[16],
            result_kind=values[17], result=cast("bytes | None", values[18]), result_digest=values[19],
            reason=values[20],
        )  # fmt: skip
        return with_extra(record, values[21])
    except (ValueError, TypeError) as error:
        raise _corrupt(f"operation {values[0][:80]}") from error


def operation_values(record: OperationRecord) -> tuple[apsw.SQLiteValue, ...]:
    """An operation, in the order of its statements."""
    return (
        record.operation_id, record.tool, record.key_digest, record.fingerprint, record.state.value, record.run_id,
        record.generation, record.call_id, record.owner_id, record.attempt, record.fence, record.effect,
        record.created_at_us, record.dispatched_at_us, record.settled_at_us, record.not_before_us, record.outcome,
        record.result_kind, record.result, record.result_digest, record.reason, extra_text(record),
    )  # fmt: skip


def outcome_values(record: OperationRecord) -> tuple[apsw.SQLiteValue, ...]:
    """What a settlement changes of an operation, in the order of the statement `settle_operation`."""
    return (
        record.operation_id, record.fence, record.state.value, record.settled_at_us, record.not_before_us,
        record.outcome, record.result_kind, record.result, record.result_digest, record.reason,
    )  # fmt: skip


def is_settlement(before: OperationRecord, after: OperationRecord) -> bool:
    """Whether the two differ in nothing but what `outcome_values` gives."""
    return (
        before.fence == after.fence and before.attempt == after.attempt and before.run_id == after.run_id
        and before.owner_id == after.owner_id and before.call_id == after.call_id and before.tool == after.tool
        and before.generation == after.generation and before.fingerprint == after.fingerprint
        and before.key_digest == after.key_digest and before.effect == after.effect
        and before.created_at_us == after.created_at_us and before.dispatched_at_us == after.dispatched_at_us
        and same_extra(before, after)
    )  # fmt: skip


# -- Orders and the ledger


def control_from(row: Row) -> ControlRecord:
    """An order. Raises StoreCorruptError when the row makes none."""
    values = cast("list[str]", row)
    try:
        return ControlRecord(
            control_id=values[0], kind=values[1], run_id=values[2], label=values[3], tool=values[4], effect=values[5],
            args=_pairs(values[6]), reason=values[7], actor=values[8], created_at_us=int(values[9]),
            withdrawn_at_us=cast("int | None", values[10]),
        )  # fmt: skip
    except (ValueError, TypeError) as error:
        raise _corrupt(f"the order {values[0][:80]}") from error


def control_values(control: ControlRecord) -> tuple[apsw.SQLiteValue, ...]:
    """An order, in the order of its statement."""
    return (
        control.control_id, control.kind, control.run_id, control.label, control.tool, control.effect,
        _json(control.args), control.reason, control.actor, control.created_at_us, control.withdrawn_at_us,
    )  # fmt: skip


def ledger_row_from(row: Row) -> LedgerRow:
    """A row of the view."""
    values = cast("list[str]", row)
    return LedgerRow(
        session_id=values[0], turn_count=int(values[1]), state_origin=values[2], input_hash=values[3],
        token_delta=int(values[4]), execution_time_ms=int(values[5]), pass_fail=values[6], breach_reason=values[7],
        created_at=values[8],
    )  # fmt: skip
