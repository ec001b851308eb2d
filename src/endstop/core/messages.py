"""What a decision says to the model and to the operator: what happened, and one next step. Never an argument.

The texts stand in one table so that every reason has one, by test.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from endstop.core.reasons import Action, Effect, Reason

if TYPE_CHECKING:
    from endstop.core.events import Verdict

__all__ = ["TEXTS", "message_of", "warning_of"]

TEXTS: Final[dict[Reason, str]] = {
    Reason.STEP_CAP: "The run has used its {limit} tool calls. It is over; report what was reached.",
    Reason.TURN_CEILING: "The run has used its {limit} model turns. It is over; report what was reached.",
    Reason.TOKEN_CEILING: "The next model call could pass the run's {limit} tokens. The run is over.",
    Reason.WALL_CLOCK_CAP: "The run has used its {limit} ms of running time. It is over.",
    Reason.RETRY_CAP: "The run has used its {limit} retries. Trying again is not allowed; a person must look at it.",
    Reason.HANDOFF_CAP: "The run has used its {limit} handoffs. The run is over.",
    Reason.DEPTH_CAP: "Sub-agents may be nested {limit} deep at most, and this one would be deeper. The run is over.",
    Reason.SPEND_CAP: "The next model call could pass the run's budget of {limit} nano-dollars. It was not sent.",
    Reason.SAME_CALL_REPEAT: "This exact call already gave the same answer {repeats} times. Use that answer, or say "
    "what is missing.",
    Reason.SHORT_CYCLE: "The last calls repeat a cycle of {period} with the same answers. Leave the cycle: use what "
    "they said, or report what blocks you.",
    Reason.NO_PROGRESS: "The last {value} results brought nothing new. Finish with what is known, or report what "
    "blocks you.",
    Reason.SAME_ANSWER: "{value} different requests got one and the same answer. More wordings will not change it.",
    Reason.ERROR_STREAK: "This tool failed the same way {value} times in a row. Do not call it again as it is.",
    Reason.POLL_EXHAUSTED: "{value} polls in a row saw no change. Make one long wait, or hand over to a person.",
    Reason.COMPLETE: "The task is complete; nothing more may be called.",
    Reason.FATAL: "The tool reported a fatal error. The run is over.",
    Reason.PERMISSION_DENIED: "The tool was denied permission. It must not be retried; a person must grant it.",
    Reason.POLICY_BLOCKED: "A policy of the target refused the call. The run is over.",
    Reason.HUMAN_REQUIRED: "A person must act before this run goes on.",
    Reason.ALREADY_COMMITTED: "This write was already committed under its key. It was not sent again.",
    Reason.OUTCOME_UNKNOWN: "An earlier attempt of this operation has an unknown outcome: it may have happened. It "
    "must not be sent again until a person or a probe has settled it.",
    Reason.DENY_RULE: "An operator has forbidden this call. Do not propose it again; go on without it or finish.",
    Reason.KILL_SWITCH: "An operator has killed this run. Nothing more may be called.",
    Reason.OPERATOR_CANCELLED_LOOP: "An operator has stopped this run. Nothing more may be called.",
    Reason.LOOP_GUARD_TRIGGERED: "The run was stopped as a loop.",
    Reason.BUDGET_UNPRICED: "The run has a budget, and this call has no known worst case: its model has no price here, "
    "or the call names no bound for its input and output tokens. It was not sent.",
    Reason.LEDGER_UNAVAILABLE: "The ledger cannot record this call, so it was not made.",
    Reason.FRAMEWORK_CAP: "The agent framework ended the run at its own limit.",
    Reason.PROVIDER_FAULT: "The model provider failed and may not be asked again in this run.",
    Reason.CRASHED: "The process that ran this agent ended without a word.",
    Reason.FROZEN: "An operator has frozen this run: no retries, sub-agents or handoffs until it is unfrozen.",
    Reason.KEY_MISSING: "This write has no idempotency key, so it was not sent. Needed: {rule}.",
    Reason.KEY_MISMATCH: "This idempotency key already names an operation with other arguments. Nothing was sent.",
    Reason.IN_PROGRESS: "This operation is being executed elsewhere. Do not send it again; ask for its state later.",
    Reason.NOT_BEFORE: "The tool asked for a wait or a changed precondition first. Trying again is no change: wait, "
    "correct the arguments, renew the authorisation or take another way.",
    Reason.ROUND_DUPLICATE: "The same call stands in this message twice; it was made once.",
    Reason.UNDECLARED_TOOL: "This tool is not declared in the policy, and only declared tools may run.",
    Reason.UNKNOWN_TOOL: "There is no tool of this name. Use one of the tools that were offered.",
    Reason.MALFORMED_CALL: "The arguments could not be read as the tool's JSON object. Correct them.",
    Reason.HOST_DENIED: "The host refused this call. Do not propose it again unchanged.",
}
_POLL_ADVICE: Final = "Make one long wait before the next look; do not vary the arguments."
_WARNING_HEAD: Final = "Note before this answer: "
_LAST_WARNING: Final = " This is the only note on it; the next repetition is refused."


def message_of(verdict: Verdict) -> str:
    """The text for `verdict`; empty when nothing speaks against the call."""
    if verdict.reason is None:
        return ""
    detail = verdict.detail
    figures = {
        "limit": detail.limit, "value": detail.value, "period": detail.period, "repeats": detail.repeats,
        "rule": detail.rule,
    }  # fmt: skip
    return TEXTS[verdict.reason].format(**{name: "" if item is None else item for name, item in figures.items()})


def warning_of(verdict: Verdict, effect: Effect) -> str | None:
    """The note that stands at the head of a result whose call a ladder let through once more."""
    if not verdict.warn or verdict.action is not Action.EXECUTE:
        return None
    advice = _POLL_ADVICE if effect in (Effect.POLL, Effect.WAIT) else message_of(verdict)
    return _WARNING_HEAD + advice + _LAST_WARNING
