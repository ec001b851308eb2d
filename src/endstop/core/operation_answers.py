"""What a caller gets for a call that its operation's state answers: the stored result, or a refusal that names it."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from endstop.core.answers import answer_to_refusal
from endstop.core.codec import result_from
from endstop.core.model import ToolResult
from endstop.core.operation_rules import check_result
from endstop.core.reasons import ErrorClass, Reason, Status
from endstop.core.transitions import OperationState

if TYPE_CHECKING:
    from endstop.core.events import Verdict
    from endstop.core.policy import ToolPolicy
    from endstop.core.records import OperationRecord

__all__ = ["refusal", "replayed"]


def replayed(stored: OperationRecord, key: bytes) -> ToolResult[object]:
    """The answer of an operation that is settled. Raises StoreCorruptError when it is not the one that was stored."""
    check_result(stored, key)
    if stored.state is OperationState.CANCELLED:
        return ToolResult(
            status=Status.POLICY_BLOCKED, error_class=ErrorClass.GUARD_BLOCKED, operation_id=stored.operation_id,
            message="this operation was withdrawn before it was sent", replayed=True, side_effect_committed=False,
        )  # fmt: skip
    if stored.state is OperationState.TOMBSTONE and stored.outcome == "not_applied":
        return ToolResult(
            status=Status.FATAL, error_class=ErrorClass.TOOL_FAILED, operation_id=stored.operation_id, replayed=True,
            message="this operation was refused before; its answer is no longer kept", side_effect_committed=False,
        )  # fmt: skip
    if stored.state is OperationState.TOMBSTONE:
        return ToolResult(
            operation_id=stored.operation_id, replayed=True, side_effect_committed=True,
            message="this operation was applied before; its answer is no longer kept",
        )  # fmt: skip
    return replace(result_from(stored.result), operation_id=stored.operation_id)


def refusal(
    verdict: Verdict, stored: OperationRecord | None, tool: ToolPolicy, now_us: int, complaint: str = ""
) -> ToolResult[object]:
    """The answer to a refused call. One that an operation stands behind names it, so that it can be asked for."""
    answer = answer_to_refusal(verdict, now_us, complaint)
    if stored is None or verdict.reason not in (Reason.IN_PROGRESS, Reason.OUTCOME_UNKNOWN):
        return answer
    answer = replace(answer, operation_id=stored.operation_id)
    if stored.state is OperationState.POISONED:
        message = f"{stored.attempt} attempts of this operation were refused by the target. A person must look at it."
        return replace(answer, message=message, error_class=ErrorClass.TOOL_FAILED)
    if verdict.reason is Reason.IN_PROGRESS and tool.waiter == "handle":
        return replace(answer, retry_after_ms=None, next_allowed_action="ask_for_the_operation")
    return answer
