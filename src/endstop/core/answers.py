"""What comes back to the caller when a call was refused, and what a tool's own exception says.

Rule: the class of a failure comes from the exception's type, never from its text. The text goes to the model, cut to
`MESSAGE_CHARS_MAX`, because a tool's own words about its failure are data like any answer.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from endstop.core.messages import message_of
from endstop.core.model import MESSAGE_CHARS_MAX, ToolResult
from endstop.core.reasons import Action, Effect, ErrorClass, Reason, Status
from endstop.errors import NotAppliedError

if TYPE_CHECKING:
    from endstop.core.events import Verdict

__all__ = ["IN_PROGRESS_RETRY_MS", "answer_to_refusal", "failure_of"]

IN_PROGRESS_RETRY_MS: Final = 1_000

_CLASS_OF_REFUSAL: Final = {
    Reason.UNKNOWN_TOOL: ErrorClass.UNKNOWN_TOOL,
    Reason.MALFORMED_CALL: ErrorClass.SCHEMA,
    Reason.HOST_DENIED: ErrorClass.DENIED,
    Reason.DENY_RULE: ErrorClass.DENIED,
    Reason.OUTCOME_UNKNOWN: ErrorClass.OUTCOME_UNKNOWN,
}
_NEXT_STEP: Final = {
    Reason.UNKNOWN_TOOL: "use_an_offered_tool",
    Reason.MALFORMED_CALL: "correct_the_arguments",
    Reason.KEY_MISSING: "give_the_key_fields",
    Reason.OUTCOME_UNKNOWN: "human_review",
    Reason.NOT_BEFORE: "wait_or_name_a_change",
    Reason.IN_PROGRESS: "wait",
    Reason.ROUND_DUPLICATE: "use_the_first_answer",
}
# What the agent may mend by itself comes back as retryable; the rest as a refusal.
_MENDABLE: Final = frozenset({Reason.UNKNOWN_TOOL, Reason.MALFORMED_CALL, Reason.KEY_MISSING, Reason.IN_PROGRESS})


def answer_to_refusal(verdict: Verdict, now_us: int, complaint: str = "") -> ToolResult[object]:
    """The structured answer to a call that was not executed: what happened and one next step.

    `complaint` says what exactly is wrong with a malformed call.
    """
    reason = verdict.reason
    message = message_of(verdict)
    if complaint and reason is Reason.MALFORMED_CALL:
        message = f"{message} {complaint}"[:MESSAGE_CHARS_MAX]
    if verdict.action is Action.WAIT:
        wait_ms = max(0, -(-(verdict.until_us - now_us) // 1_000))
        return ToolResult(
            status=Status.RETRYABLE, reason=reason, message=message, retry_after_ms=wait_ms,
            error_class=ErrorClass.GUARD_BLOCKED, next_allowed_action="wait",
        )  # fmt: skip
    if verdict.action is Action.REPLAY:
        return ToolResult(reason=reason, message=message, replayed=True, next_allowed_action="use_the_first_answer")
    status = Status.RETRYABLE if reason in _MENDABLE else Status.POLICY_BLOCKED
    return ToolResult(
        status=status,
        reason=reason,
        message=message,
        error_class=(
            ErrorClass.GUARD_BLOCKED if reason is None else _CLASS_OF_REFUSAL.get(reason, ErrorClass.GUARD_BLOCKED)
        ),
        retry_after_ms=IN_PROGRESS_RETRY_MS if reason is Reason.IN_PROGRESS else None,
        next_allowed_action="another_step" if reason is None else _NEXT_STEP.get(reason, "another_step"),
    )


def failure_of(error: Exception, effect: Effect) -> tuple[ToolResult[object], bool]:
    """A tool's exception as a result, and whether it leaves a side effect's outcome open.

    Only NotAppliedError is proof that nothing happened. For declared reads, polls and waits there is nothing to leave
    open.
    """
    message = f"{type(error).__name__}: {error}"[:MESSAGE_CHARS_MAX]
    owned = effect in (Effect.WRITE, Effect.UNKNOWN)
    if isinstance(error, NotAppliedError):
        wait_ms = None if error.final else error.retry_after_ms
        refused = ErrorClass.TOOL_FAILED if wait_ms is None else ErrorClass.RATE_LIMIT
        result: ToolResult[object] = ToolResult(
            status=Status.RETRYABLE, error_class=ErrorClass.DENIED if error.final else refused, message=message,
            retry_after_ms=wait_ms, side_effect_committed=False,
        )  # fmt: skip
        return result, False
    if isinstance(error, PermissionError):
        return ToolResult(status=Status.PERMISSION_DENIED, error_class=ErrorClass.AUTH, message=message), owned
    if effect is Effect.WRITE:
        return ToolResult(status=Status.RETRYABLE, error_class=ErrorClass.OUTCOME_UNKNOWN, message=message), True
    if isinstance(error, TimeoutError):
        error_class = ErrorClass.TIMEOUT
    elif isinstance(error, ConnectionError):
        error_class = ErrorClass.OUTAGE
    else:
        error_class = ErrorClass.TOOL_FAILED
    return ToolResult(status=Status.RETRYABLE, error_class=error_class, message=message), owned
