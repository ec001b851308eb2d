"""Asking a target what became of one operation, as a flow of commands like a guarded call.

    who could still send it? ──▶ begin ──▶ ask ──▶ settle

The owner's death is looked up before the question is put: a worker that dies after the target was asked may have sent
in between. A crash anywhere leaves the operation UNKNOWN, with the question counted.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import orjson

from endstop.core.codec import result_data
from endstop.core.commands import AskTarget, Flow, IsOwnerGone, Transact, perform
from endstop.core.model import ToolResult
from endstop.core.operation_terms import PROBE_DEADLINE_MS, asks_probe, terms_of
from endstop.core.probing import Exclusion, Found, ProbeRequest
from endstop.core.reasons import OutcomeClass
from endstop.core.steps_operations import BeginProbe, GiveUp, SettleProbe
from endstop.core.transitions import OperationState

if TYPE_CHECKING:
    from endstop.core.policy import ToolPolicy
    from endstop.core.probing import ProbeAnswer
    from endstop.core.records import OperationRecord

__all__ = ["ProbeJob", "ProbeReport", "probed"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeJob:
    """One operation to ask for. `tool` is what is declared of it; `gives_up` says that without a probe it becomes a
    person's at once."""

    operation: OperationRecord
    tool: ToolPolicy
    now_us: Callable[[], int] = field(repr=False)
    store_key: bytes = field(repr=False)
    gives_up: bool = False
    actor: str = "reconciler"


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeReport:
    """What came of a job: the operation as it stands, a code, what the target said, and when it may be asked again."""

    operation: OperationRecord
    code: str
    changed: bool = False
    found: Found | None = None
    not_before_us: int = 0


def probed(job: ProbeJob) -> Flow[ProbeReport]:
    """Ask the target, if it may be asked now, and settle the operation by what it says."""
    record, tool = job.operation, job.tool
    if record.state is not OperationState.UNKNOWN:
        return ProbeReport(operation=record, code="not_unknown")
    if not asks_probe(tool) or tool.probe is None:
        return (yield from _without_probe(job))
    terms = terms_of(tool)
    # 1. What keeps a late send from having an effect must hold before the question is put.
    gone = yield from perform(IsOwnerGone(operation=record))
    # 2. Write down that it is put.
    now_us = job.now_us()
    until_us = now_us + (tool.deadline_ms or PROBE_DEADLINE_MS) * 1_000
    begun = yield from perform(
        Transact(
            step=BeginProbe(
                run_id=record.run_id, now_us=now_us, operation_id=record.operation_id, attempt=record.attempt,
                fence=record.fence, terms=terms, until_us=until_us, actor=job.actor,
            )
        )
    )  # fmt: skip
    if not begun.number:
        stands = begun.operation or record
        return ProbeReport(
            operation=stands, code=begun.code, changed=stands.state is not record.state,
            not_before_us=begun.not_before_us,
        )  # fmt: skip
    # 3. Ask, outside any transaction.
    answer = yield from perform(AskTarget(probe=tool.probe, request=_request(record, until_us)))
    # 4. Settle.
    data, kind = _result_of(answer, record.operation_id)
    settled = yield from perform(
        Transact(
            step=SettleProbe(
                run_id=record.run_id, now_us=job.now_us(), operation_id=record.operation_id, attempt=record.attempt,
                fence=record.fence, number=begun.number, found=answer.found, terms=terms, began_us=now_us,
                exclusion=_exclusion(answer, tool, gone=gone), retry_after_ms=answer.retry_after_ms, data=data,
                kind=kind, receipt=answer.receipt, result_key=job.store_key, cause=answer.cause, actor=job.actor,
            )
        )
    )  # fmt: skip
    stands = settled.operation or record
    return ProbeReport(
        operation=stands, code=settled.code, changed=settled.changed and stands.state is not OperationState.UNKNOWN,
        found=answer.found, not_before_us=stands.probe_not_before_us,
    )  # fmt: skip


def _without_probe(job: ProbeJob) -> Flow[ProbeReport]:
    record, tool = job.operation, job.tool
    if not job.gives_up or not tool.declared or tool.target_class is OutcomeClass.IDEMPOTENT_BY_TARGET:
        return ProbeReport(operation=record, code="no_probe")
    settled = yield from perform(
        Transact(
            step=GiveUp(
                run_id=record.run_id, now_us=job.now_us(), operation_id=record.operation_id, attempt=record.attempt,
                fence=record.fence, code="no_probe", actor=job.actor,
            )
        )
    )  # fmt: skip
    return ProbeReport(operation=settled.operation or record, code=settled.code, changed=settled.changed)


def _request(record: OperationRecord, deadline_us: int) -> ProbeRequest:
    return ProbeRequest(
        operation_id=record.operation_id, tool=record.tool, idempotency_key=record.key_digest,
        args=None if record.args is None else orjson.loads(record.args), attempt=record.attempt,
        dispatched_at_us=record.dispatched_at_us, deadline_us=deadline_us,
    )  # fmt: skip


def _exclusion(answer: ProbeAnswer, tool: ToolPolicy, *, gone: bool) -> Exclusion | None:
    if answer.exclusion is not None:
        return answer.exclusion
    if gone:
        return Exclusion.OWNER_DEAD
    return Exclusion.TARGET_DEDUPES if tool.target_class is OutcomeClass.IDEMPOTENT_BY_TARGET else None


def _result_of(answer: ProbeAnswer, operation_id: str) -> tuple[bytes | None, str]:
    """The answer to replay, as it is stored."""
    if answer.found is not Found.APPLIED:
        return None, "none"
    if not answer.has_value:
        return None, "applied_without_result"
    value = answer.value
    result = value if isinstance(value, ToolResult) else ToolResult(value=value, operation_id=operation_id)
    return result_data(result)
