"""From a recording's words to the core's: calls, results and digests as a live run would have had them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from endstop.core.events import Proposal
from endstop.core.model import ToolResult
from endstop.core.observe import Measured
from endstop.core.propose import parsed_args
from endstop.core.reasons import Effect, Status
from endstop.replay.report import RunTotals

if TYPE_CHECKING:
    from endstop.core.policy import ToolPolicy
    from endstop.replay.trace import AnswerDigest, TraceCall, TraceResult

__all__ = ["identity_of", "rest_of", "told_proposal", "told_result", "tool_result"]


def told_proposal(call: TraceCall, call_id: str, tool: ToolPolicy) -> Proposal:
    """A call of which only digests were recorded."""
    return Proposal(
        tool=call.tool, effect=tool.effect if tool.declared else call.effect or Effect.UNKNOWN,
        fingerprint=call.fingerprint or "", call_id=call_id, round_id=call.round_id, agent=call.agent,
        key_digest=call.key_digest, replays_committed=tool.replays_committed, fault=call.fault,
        declared=tool.declared or bool(call.declared),
    )  # fmt: skip


def identity_of(call: TraceCall) -> tuple[str, object]:
    """What a later call must equal to be the same one again: enough for counting, not for judging."""
    return call.tool, call.fingerprint or parsed_args(call.args)


def rest_of(totals: RunTotals, before: RunTotals) -> RunTotals:
    """What was used after `before`."""
    return RunTotals(
        calls=totals.calls - before.calls, turns=totals.turns - before.turns,
        input_tokens=totals.input_tokens - before.input_tokens,
        output_tokens=totals.output_tokens - before.output_tokens,
        spend_nanos=totals.spend_nanos - before.spend_nanos, time_us=totals.time_us - before.time_us,
        spend_known=totals.spend_known,
    )  # fmt: skip


def tool_result(result: TraceResult) -> ToolResult[object]:
    """A recorded result as a live tool's, failures as theirs come back."""
    error_class, status = result.error_class, result.status
    if error_class is not None and status is Status.PROGRESS:
        status = Status.RETRYABLE
    return ToolResult(
        status=status, value=result.value, error_class=error_class, message=result.message,
        progress_version=result.progress_version, retry_after_ms=result.retry_after_ms,
    )  # fmt: skip


def told_result(result: TraceResult, digest: AnswerDigest) -> tuple[ToolResult[object], Measured]:
    """A result of which only digests were recorded."""
    answer = tool_result(result)
    measured = Measured(
        status=answer.status, failed=digest.failed or answer.failed, answer=digest.answer, evidence=digest.evidence,
        error_class=answer.error_class, error_symbol=digest.error_symbol, version=answer.progress_version,
        version_source=digest.version_source, retry_after_ms=digest.retry_after_ms,
    )  # fmt: skip
    return answer, measured
