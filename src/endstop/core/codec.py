"""Records to JSON and back, once each, at the edge of a store or a command line.

Times are RFC 3339 UTC in what people read (`*_json`) and integer microseconds in what stores keep (`*_data`).
"""

from __future__ import annotations

import datetime
import json
from dataclasses import asdict, fields, replace
from operator import attrgetter
from typing import TYPE_CHECKING, Final

import orjson

from endstop.core.canonical import BYTES_MAX, canonical_bytes
from endstop.core.envelope import CallNote, Envelope, LedgerSpan, OperationNote
from endstop.core.model import Counters, Detail, Spec, ToolResult
from endstop.core.policy import Limits
from endstop.core.reasons import ErrorClass, NextAction, Reason
from endstop.errors import NotCanonicalError, StoreCorruptError, UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from endstop.core.model import Decision
    from endstop.core.records import OperationRecord, RunRecord

__all__ = [
    "decision_json", "envelope_data", "envelope_from", "envelope_json", "limits_from", "operation_json", "output_text",
    "result_data", "result_from", "result_json", "rfc3339", "run_json", "spec_from",
]  # fmt: skip

Json = dict[str, object]
RESULT_BYTES_MAX: Final = 64 * 1024
OUTPUT_BYTES_MAX: Final = BYTES_MAX
_BYTES_MARK: Final = b'{"$endstop":"bytes",'
_OPTIONS: Final = orjson.OPT_SORT_KEYS
_RESULT_NAMES: Final = tuple(item.name for item in fields(ToolResult) if item.name != "replayed")
_result_values = attrgetter(*_RESULT_NAMES)
_EPOCH: Final = datetime.datetime(1970, 1, 1, tzinfo=datetime.UTC)


def rfc3339(at_us: int | None) -> str | None:
    """Microseconds since 1970 as RFC 3339 text in UTC."""
    if at_us is None:
        return None
    return (_EPOCH + datetime.timedelta(microseconds=at_us)).isoformat(timespec="microseconds").replace("+00:00", "Z")


# -- Results


def result_data(result: ToolResult[object]) -> tuple[bytes | None, str]:
    """A result as stored bytes and its kind: `inline`, or `applied_without_result` when it cannot be stored."""
    data = _exact_bytes(_result_fields(result))
    if data is None or len(data) > RESULT_BYTES_MAX:
        return None, "applied_without_result"
    return data, "inline"


def _exact_bytes(body: Json) -> bytes | None:
    """`body` as JSON that gives the same values back; records become objects. None when a value would be lost."""
    try:
        data = orjson.dumps(body, option=_OPTIONS)
        if orjson.loads(data) == body:
            return data
    except orjson.JSONEncodeError:
        pass  # a type or a number that the canonical form knows and this encoder does not
    try:
        data = canonical_bytes(body)
    except NotCanonicalError:
        return None
    # Of bytes the canonical form keeps a digest alone.
    return None if _BYTES_MARK in data else data


def result_from(data: bytes | None) -> ToolResult[object]:
    """The result that `result_data` stored, marked as replayed. None gives "applied, the value was not kept"."""
    if data is None:
        return ToolResult(
            replayed=True, side_effect_committed=True,
            message="this operation was applied before; its answer could not be kept",
        )  # fmt: skip
    try:
        body = json.loads(data)
        reason = body.pop("reason", None)
        return replace(ToolResult(**body), reason=None if reason is None else Reason(reason), replayed=True)
    except (TypeError, ValueError, UsageError) as error:
        msg = "a stored result cannot be read: the operation is not run again; restore the store from a backup"
        raise StoreCorruptError(msg) from error


def _result_fields(result: ToolResult[object]) -> Json:
    """What is set of a result. `False` says nothing in a flag, and everything in a value."""
    return {
        name: value
        for name, value in zip(_RESULT_NAMES, _result_values(result), strict=True)
        if value is not None and (value is not False or name in ("value", "side_effect_committed"))
    }


def result_json(result: ToolResult[object]) -> Json:
    """A result as the model and the command line read it. The guard's warning stands first."""
    body: Json = {}
    if result.warning is not None:
        body["warning"] = result.warning
    body["status"] = result.status.value
    for name, value in _result_fields(result).items():
        if name not in ("status", "warning"):
            body[name] = value
    return body


def output_text(value: object) -> str | None:
    """A run's output as kept for review: text as it is, other JSON values as canonical JSON, else None.

    None also for what is larger than `OUTPUT_BYTES_MAX`.
    """
    if value is None:
        return None
    if isinstance(value, str):
        text = value if value.isascii() else value.encode("utf-8", "replace").decode()
        return text if len(text.encode()) <= OUTPUT_BYTES_MAX else None
    try:
        return canonical_bytes(value).decode()
    except NotCanonicalError:
        return None


# -- Envelopes


def envelope_data(envelope: Envelope) -> bytes:
    """An envelope as stored bytes."""
    return orjson.dumps(asdict(envelope), option=_OPTIONS)


def envelope_from(data: bytes) -> Envelope:
    """The envelope that `envelope_data` wrote."""
    try:
        body = orjson.loads(data)
        return Envelope(
            **{
                **body,
                "terminal_reason": Reason(body["terminal_reason"]),
                "next_allowed_action": NextAction(body["next_allowed_action"]),
                "detail": _detail_from(body["detail"]),
                "blocked_call": _note_from(body["blocked_call"]),
                "after_call": _note_from(body["after_call"]),
                "operations": tuple(OperationNote(**item) for item in body["operations"]),
                "in_doubt": tuple(body["in_doubt"]),
                "counters": Counters(**body["counters"]),
                "ledger": None if body["ledger"] is None else LedgerSpan(**body["ledger"]),
            }
        )
    except (orjson.JSONDecodeError, TypeError, KeyError, ValueError) as error:
        msg = "a stored envelope cannot be read: restore the store from a backup"
        raise StoreCorruptError(msg) from error


def _detail_from(body: Mapping[str, str | int | None]) -> Detail:
    made: Callable[..., Detail] = Detail
    found = body.get("error_class")
    return made(**{**body, "error_class": None if found is None else ErrorClass(str(found))})


def _note_from(body: dict[str, object] | None) -> CallNote | None:
    if body is None:
        return None
    made: Callable[..., CallNote] = CallNote
    args = body["args"]
    pairs = tuple((name, note) for name, note in args) if isinstance(args, list) else ()
    return made(**{**body, "args": pairs})


def envelope_json(envelope: Envelope) -> Json:
    """An envelope as people and machines read it."""
    body: Json = asdict(envelope)
    body["detail"] = _without_none(asdict(envelope.detail))
    body["blocked_call"] = _note_json(envelope.blocked_call)
    body["after_call"] = _note_json(envelope.after_call)
    body["operations"] = [asdict(item) for item in envelope.operations]
    body["in_doubt"] = list(envelope.in_doubt)
    body["spend"] = {"spend_nanos": envelope.spend_nanos}
    del body["occurred_at_us"]
    body["occurred_at"] = rfc3339(envelope.occurred_at_us)
    return body


def _note_json(note: CallNote | None) -> Json | None:
    if note is None:
        return None
    return {**asdict(note), "args": dict(note.args)}


def _without_none(body: Json) -> Json:
    return {name: value for name, value in body.items() if value is not None}


# -- Runs, operations, decisions


def limits_from(data: bytes) -> Limits:
    """The limits of a stored run."""
    return Limits(**orjson.loads(data))


def spec_from(data: bytes) -> Spec:
    """A stored spec."""
    return Spec(**orjson.loads(data))


def run_json(run: RunRecord) -> Json:
    """A run as the contract publishes it."""
    checkpoint = run.checkpoint
    return {
        "run_id": run.run_id,
        "root_run_id": run.root_run_id,
        "parent_run_id": run.parent_run_id,
        "generation": run.generation,
        "state": run.state.value,
        "agent": run.agent,
        "labels": dict(run.labels),
        "spec": asdict(run.spec),
        "policy_digest": run.policy_digest,
        "counters": asdict(run.counters),
        "limits": asdict(run.limits),
        "progress_version": run.progress_version,
        "checkpoint": None
        if checkpoint is None
        else {"data": orjson.loads(checkpoint.data), "entry": checkpoint.seq, "at": rfc3339(checkpoint.at_us)},
        "in_flight": [{"call_id": call_id, "tool": tool} for call_id, tool in run.in_flight],
        "envelope": None if run.envelope is None else envelope_json(run.envelope),
        "entries": run.entries,
        "created_at": rfc3339(run.created_at_us),
        "updated_at": rfc3339(run.updated_at_us),
    }


def operation_json(operation: OperationRecord) -> Json:
    """An operation as the contract publishes it; its result's value is never shown here."""
    return {
        "operation_id": operation.operation_id,
        "tool": operation.tool,
        "key_digest": operation.key_digest,
        "state": operation.state.value,
        "attempt": operation.attempt,
        "run_id": operation.run_id,
        "generation": operation.generation,
        "created_at": rfc3339(operation.created_at_us),
        "dispatched_at": rfc3339(operation.dispatched_at_us),
        "settled_at": rfc3339(operation.settled_at_us),
        "outcome": operation.outcome,
        "result_kind": operation.result_kind,
        "reason": operation.reason,
        "settled_by": operation.settled_by,
        "receipt": operation.receipt,
        "probe_count": operation.probe_count,
        "probe_not_before": rfc3339(operation.probe_not_before_us or None),
    }


def decision_json(decision: Decision) -> Json:
    """A decision as the contract publishes it."""
    return {
        "action": decision.action.value,
        "reason": None if decision.reason is None else decision.reason.value,
        "guard": decision.guard,
        "message": decision.message,
        "fingerprint": decision.fingerprint,
        "detail": _without_none(asdict(decision.detail)),
        "warning": decision.warning,
        "observed": decision.observed,
    }
