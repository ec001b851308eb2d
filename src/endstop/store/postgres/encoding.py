"""Rows of the PostgreSQL store to records and back, once each."""

from __future__ import annotations

import operator
from dataclasses import asdict
from typing import TYPE_CHECKING, Final, cast

import orjson

from endstop.core.codec import envelope_data, envelope_from, limits_from, spec_from
from endstop.core.operation_extra import extra_text, with_extra
from endstop.core.reasons import RunState
from endstop.core.records import CheckpointRecord, ChildRecord, ControlRecord, OperationRecord
from endstop.core.transitions import OperationState
from endstop.errors import EndstopError, StoreCorruptError
from endstop.store.port import StoredSpec
from endstop.store.rows import RunRow

if TYPE_CHECKING:
    from collections.abc import Sequence

    from endstop.core.model import Spec
    from endstop.store.workspace import LiveRun

__all__ = [
    "Values", "child_from", "child_values", "control_from", "control_values", "new_run_values", "operation_from",
    "operation_values", "run_from", "run_values", "spec_values", "state_values",
    "stored_spec_from",
]  # fmt: skip

Row = tuple[object, ...]
Values = dict[str, object]


def _corrupt(what: str) -> StoreCorruptError:
    return StoreCorruptError(f"{what} cannot be read: restore the store from a backup, nothing goes ahead on it")


def _json(value: object) -> str:
    return orjson.dumps(value).decode()


def _pairs(text: object) -> tuple[tuple[str, str], ...]:
    return tuple((str(name), str(value)) for name, value in orjson.loads(cast("str", text)))


# -- Runs


def run_from(row: Row) -> RunRow:
    """A root run. Raises StoreCorruptError when the row makes none."""
    (
        run_id, agent, labels, spec, policy_digest, run_key, created_at_us, state, generation, limits, owners,
        first_seq, checkpoint, checkpoint_seq, checkpoint_at_us, envelope, output, next_seq, updated_at_us, evidence,
    ) = cast("list[str]", row)  # fmt: skip
    noted = cast("str | None", checkpoint)
    ending = cast("str | None", envelope)
    kept = cast("str | None", output)
    try:
        return RunRow(
            key=1, run_id=run_id, agent=agent, labels=_pairs(labels), spec=spec_from(spec.encode()),
            policy_digest=policy_digest, run_key=cast("bytes | None", run_key), created_at_us=int(created_at_us),
            state=RunState(state), generation=int(generation), limits=limits_from(limits.encode()),
            owners=tuple(orjson.loads(owners)), first_seq=int(first_seq),
            checkpoint=None
            if noted is None
            else CheckpointRecord(data=noted, seq=int(checkpoint_seq), at_us=int(checkpoint_at_us)),
            envelope=None if ending is None else envelope_from(ending.encode()),
            output=None if kept is None else orjson.loads(kept),
            next_seq=int(next_seq), updated_at_us=int(updated_at_us), evidence=evidence.encode(),
        )  # fmt: skip
    except (ValueError, TypeError, KeyError, EndstopError) as error:
        raise _corrupt(f"run {str(run_id)[:80]}") from error


def run_values(run: LiveRun) -> Values:
    """What seldom changes of a root run."""
    txn = run.txn
    checkpoint = txn.checkpoint
    return {
        "run_id": txn.run_id, "state": txn.state.value, "generation": txn.generation,
        "limits": _json(asdict(txn.limits)), "owners": _json(txn.owners), "first_seq": txn.first_seq,
        "checkpoint": None if checkpoint is None else checkpoint.data,
        "checkpoint_seq": None if checkpoint is None else checkpoint.seq,
        "checkpoint_at_us": None if checkpoint is None else checkpoint.at_us,
        "envelope": None if txn.envelope is None else envelope_data(txn.envelope).decode(),
        # As JSON, because PostgreSQL's text has no place for a null character and an agent's may have one.
        "output": None if txn.output is None else _json(txn.output),
    }  # fmt: skip


def state_values(run: LiveRun, read_stamp: str | None = None) -> Values:
    """What changes with every step of a root run, and the version that it is to be written over, if that is asked."""
    txn = run.txn
    return {
        "run_id": txn.run_id, "next_seq": txn.next_seq, "updated_at_us": txn.updated_at_us,
        "evidence": txn.evidence.pack().decode(), "read_stamp": read_stamp,
    }  # fmt: skip


def new_run_values(run: LiveRun) -> Values:
    """A new root run, both parts of it."""
    txn, key = run.txn, run.run_key
    return {
        **run_values(run), **state_values(run), "agent": txn.agent, "labels": _json(run.labels),
        "spec": _spec_text(run.spec), "policy_digest": txn.policy_digest, "run_key": None if key is None else key.hex(),
        "created_at_us": run.created_at_us,
    }  # fmt: skip


def _spec_text(spec: Spec) -> str:
    return _json(asdict(spec))


def child_from(row: Row) -> ChildRecord:
    """A child run."""
    run_id, root_run_id, parent_run_id, depth, agent, created_at_us = cast("list[str]", row)
    return ChildRecord(
        run_id=run_id, root_run_id=root_run_id, parent_run_id=parent_run_id, depth=int(depth), agent=agent,
        created_at_us=int(created_at_us),
    )  # fmt: skip


def child_values(child: ChildRecord) -> Values:
    """A child run."""
    return asdict(child)


def stored_spec_from(row: Row) -> StoredSpec:
    """A spec. Raises StoreCorruptError when the row makes none."""
    run_id, spec, created_at_us = cast("list[str]", row)
    try:
        return StoredSpec(run_id=run_id, spec=spec_from(spec.encode()), created_at_us=int(created_at_us))
    except (ValueError, TypeError, EndstopError) as error:
        raise _corrupt(f"the spec of run {run_id[:80]}") from error


def spec_values(stored: StoredSpec) -> Values:
    """A spec."""
    return {"run_id": stored.run_id, "spec": _spec_text(stored.spec), "created_at_us": stored.created_at_us}


# -- Operations

_OPERATION_COLUMNS: Final = (
    "operation_id", "tool", "key_digest", "fingerprint", "run_id", "generation", "call_id", "owner_id", "attempt",
    "fence", "effect", "created_at_us", "dispatched_at_us", "settled_at_us", "not_before_us", "outcome", "result_kind",
    "result_digest", "reason",
)  # fmt: skip
_columns: Final = operator.attrgetter(*_OPERATION_COLUMNS)


def _bytes(value: object) -> bytes | None:
    """Bytes as a column gives them, or as the hexadecimal text that stands for them in JSON."""
    return bytes.fromhex(value) if isinstance(value, str) else cast("bytes | None", value)


def operation_from(row: Sequence[object]) -> OperationRecord:
    """An operation. Raises StoreCorruptError when the row makes none: it is never taken for an absent one."""
    values = cast("list[str]", row)
    try:
        record = OperationRecord(
            operation_id=values[0], tool=values[1], key_digest=values[2], fingerprint=values[3],
            state=OperationState(values[4]), run_id=values[5], generation=int(values[6]), call_id=values[7],
            owner_id=values[8], attempt=int(values[9]), fence=int(values[10]), effect=values[11],
            created_at_us=int(values[12]), dispatched_at_us=cast("int | None", values[13]),
            settled_at_us=cast("int | None", values[14]), not_before_us=int(values[15]), outcome=values[16],
            result_kind=values[17], result=_bytes(values[18]), result_digest=values[19],
            reason=values[20],
        )  # fmt: skip
        return with_extra(record, values[21])
    except (ValueError, TypeError) as error:
        raise _corrupt(f"operation {values[0][:80]}") from error


def operation_values(record: OperationRecord, read: OperationRecord | None) -> Values:
    """An operation, and the version that was read of it: None for one that nobody has written yet."""
    values: Values = dict(zip(_OPERATION_COLUMNS, _columns(record), strict=True))
    values["state"] = record.state.value
    values["extra"] = extra_text(record)
    values["result"] = None if record.result is None else record.result.hex()
    if read is not None:
        values.update(read_attempt=read.attempt, read_fence=read.fence, read_state=read.state.value)
    return values


# -- Orders


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


def control_values(control: ControlRecord) -> Values:
    """An order."""
    return {**asdict(control), "args": _json(control.args)}
