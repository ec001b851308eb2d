"""The closed vocabularies: what a decision, a result, a run and its end may be called.

`ENDINGS` is the one table from terminal reason to exit code and next allowed action. Documentation and
command line read it; nothing else decides an exit code.
"""

from __future__ import annotations

from enum import StrEnum
from types import UnionType
from typing import TYPE_CHECKING, Final, Generic, NamedTuple, Self, TypeVar, overload

__all__ = [
    "BLOCK_REASONS",
    "CAP_REASONS",
    "ENDINGS",
    "LIMIT_OF_REASON",
    "OPERATOR_REASONS",
    "TERMINAL_REASONS",
    "Action",
    "Change",
    "Effect",
    "Ending",
    "ErrorClass",
    "NextAction",
    "OutcomeClass",
    "Reason",
    "RunState",
    "Status",
]


W = TypeVar("W", bound=StrEnum)

if TYPE_CHECKING:

    class Word(Generic[W]):
        """A record's field that reads as a member of `W` and may be written as its plain text."""

        @overload
        def __get__(self, instance: None, owner: object) -> Self: ...
        @overload
        def __get__(self, instance: object, owner: object) -> W: ...
        def __get__(self, instance: object, owner: object) -> W | Self: ...
        def __set__(self, instance: object, value: W | str) -> None: ...

    class OptionalWord(Generic[W]):
        """The same for a field that may be None."""

        @overload
        def __get__(self, instance: None, owner: object) -> Self: ...
        @overload
        def __get__(self, instance: object, owner: object) -> W | None: ...
        def __get__(self, instance: object, owner: object) -> W | Self | None: ...
        def __set__(self, instance: object, value: W | str | None) -> None: ...

else:
    # For whoever reads annotations at run time (a JSON Schema is made of them), a word is its enum.

    class Word:
        """See above."""

        def __class_getitem__(cls, kind: type[StrEnum]) -> type[StrEnum]:
            return kind

    class OptionalWord:
        """See above."""

        def __class_getitem__(cls, kind: type[StrEnum]) -> UnionType:
            return kind | None


class Action(StrEnum):
    """What a decision says about the call."""

    EXECUTE = "execute"
    REPLAY = "replay"
    WAIT = "wait"
    BLOCK = "block"
    STOP = "stop"


class Effect(StrEnum):
    """What a tool does to the world outside."""

    READ = "read"
    WRITE = "write"
    POLL = "poll"
    WAIT = "wait"
    UNKNOWN = "unknown"


class OutcomeClass(StrEnum):
    """What is known of a write's target when an attempt's outcome is not."""

    IDEMPOTENT_BY_TARGET = "idempotent_by_target"
    PROBEABLE = "probeable"
    AT_MOST_ONCE = "at_most_once"


class Status(StrEnum):
    """What a tool says of its own answer."""

    PROGRESS = "progress"
    COMPLETE = "complete"
    RETRYABLE = "retryable"
    FATAL = "fatal"
    PERMISSION_DENIED = "permission_denied"
    POLICY_BLOCKED = "policy_blocked"
    HUMAN_REQUIRED = "human_required"


class ErrorClass(StrEnum):
    """Why an attempt failed, from the guard, the host or an adapter; never read out of a plain value's text."""

    UNKNOWN_TOOL = "unknown_tool"
    SCHEMA = "schema"
    DENIED = "denied"
    NOT_FOUND = "not_found"
    AUTH = "auth"
    CONFLICT = "conflict"
    TIMEOUT = "timeout"
    OUTAGE = "outage"
    RATE_LIMIT = "rate_limit"
    EMPTY_ANSWER = "empty_answer"
    ANSWER_SCHEMA = "answer_schema"
    TOOL_FAILED = "tool_failed"
    OUTCOME_UNKNOWN = "outcome_unknown"
    GUARD_BLOCKED = "guard_blocked"


class Change(StrEnum):
    """The named change of precondition that makes another attempt more than "try again"."""

    CURSOR = "cursor"
    ARGS = "args"
    AUTHORISATION = "authorisation"
    STRATEGY = "strategy"
    RETRY_AFTER = "retry_after"


class RunState(StrEnum):
    """Where a run is in its life."""

    RUNNING = "running"
    PAUSED = "paused"
    FROZEN = "frozen"
    INTERRUPTED = "interrupted"
    STOPPED = "stopped"
    COMPLETE = "complete"


class NextAction(StrEnum):
    """What may follow a run's end."""

    NONE = "none"
    HUMAN_REVIEW = "human_review"
    RESUME_AFTER_CHANGE = "resume_after_change"


class Reason(StrEnum):
    """Why a decision was not "execute". All but the block reasons may end a run."""

    STEP_CAP = "step_cap"
    TURN_CEILING = "turn_ceiling"
    TOKEN_CEILING = "token_ceiling"
    WALL_CLOCK_CAP = "wall_clock_cap"
    RETRY_CAP = "retry_cap"
    HANDOFF_CAP = "handoff_cap"
    DEPTH_CAP = "depth_cap"
    SPEND_CAP = "spend_cap"
    SAME_CALL_REPEAT = "same_call_repeat"
    SHORT_CYCLE = "short_cycle"
    NO_PROGRESS = "no_progress"
    SAME_ANSWER = "same_answer"
    ERROR_STREAK = "error_streak"
    POLL_EXHAUSTED = "poll_exhausted"
    COMPLETE = "complete"
    FATAL = "fatal"
    PERMISSION_DENIED = "permission_denied"
    POLICY_BLOCKED = "policy_blocked"
    HUMAN_REQUIRED = "human_required"
    ALREADY_COMMITTED = "already_committed"
    OUTCOME_UNKNOWN = "outcome_unknown"
    DENY_RULE = "deny_rule"
    KILL_SWITCH = "kill_switch"
    OPERATOR_CANCELLED_LOOP = "operator_cancelled_loop"
    LOOP_GUARD_TRIGGERED = "loop_guard_triggered"
    BUDGET_UNPRICED = "budget_unpriced"
    LEDGER_UNAVAILABLE = "ledger_unavailable"
    FRAMEWORK_CAP = "framework_cap"
    PROVIDER_FAULT = "provider_fault"
    CRASHED = "crashed"
    # Block reasons: the call is refused, the run goes on.
    FROZEN = "frozen"
    KEY_MISSING = "key_missing"
    KEY_MISMATCH = "key_mismatch"
    IN_PROGRESS = "in_progress"
    NOT_BEFORE = "not_before"
    ROUND_DUPLICATE = "round_duplicate"
    UNDECLARED_TOOL = "undeclared_tool"
    UNKNOWN_TOOL = "unknown_tool"
    MALFORMED_CALL = "malformed_call"
    HOST_DENIED = "host_denied"


BLOCK_REASONS: Final = frozenset(
    {
        Reason.FROZEN,
        Reason.KEY_MISSING,
        Reason.KEY_MISMATCH,
        Reason.IN_PROGRESS,
        Reason.NOT_BEFORE,
        Reason.ROUND_DUPLICATE,
        Reason.UNDECLARED_TOOL,
        Reason.UNKNOWN_TOOL,
        Reason.MALFORMED_CALL,
        Reason.HOST_DENIED,
    }
)
TERMINAL_REASONS: Final = frozenset(Reason) - BLOCK_REASONS
OPERATOR_REASONS: Final = frozenset({Reason.DENY_RULE, Reason.KILL_SWITCH, Reason.OPERATOR_CANCELLED_LOOP})


class Ending(NamedTuple):
    """How a terminal reason leaves the process and what may follow it."""

    exit_code: int
    next_action: NextAction


_GUARD: Final = Ending(3, NextAction.RESUME_AFTER_CHANGE)
_OPERATOR: Final = Ending(4, NextAction.RESUME_AFTER_CHANGE)
_PERSON: Final = Ending(5, NextAction.HUMAN_REVIEW)

ENDINGS: Final[dict[Reason, Ending]] = {
    Reason.STEP_CAP: _GUARD,
    Reason.TURN_CEILING: _GUARD,
    Reason.TOKEN_CEILING: _GUARD,
    Reason.WALL_CLOCK_CAP: _GUARD,
    Reason.RETRY_CAP: _GUARD,
    Reason.HANDOFF_CAP: _GUARD,
    Reason.DEPTH_CAP: _GUARD,
    Reason.SPEND_CAP: _GUARD,
    Reason.SAME_CALL_REPEAT: _GUARD,
    Reason.SHORT_CYCLE: _GUARD,
    Reason.NO_PROGRESS: _GUARD,
    Reason.SAME_ANSWER: _GUARD,
    Reason.ERROR_STREAK: _GUARD,
    Reason.POLL_EXHAUSTED: _GUARD,
    Reason.COMPLETE: Ending(0, NextAction.NONE),
    Reason.FATAL: Ending(3, NextAction.HUMAN_REVIEW),
    Reason.PERMISSION_DENIED: Ending(3, NextAction.HUMAN_REVIEW),
    Reason.POLICY_BLOCKED: Ending(3, NextAction.HUMAN_REVIEW),
    Reason.HUMAN_REQUIRED: _PERSON,
    Reason.ALREADY_COMMITTED: Ending(3, NextAction.HUMAN_REVIEW),
    Reason.OUTCOME_UNKNOWN: Ending(10, NextAction.HUMAN_REVIEW),
    Reason.DENY_RULE: _OPERATOR,
    Reason.KILL_SWITCH: _OPERATOR,
    Reason.OPERATOR_CANCELLED_LOOP: _OPERATOR,
    Reason.LOOP_GUARD_TRIGGERED: _GUARD,
    Reason.BUDGET_UNPRICED: _GUARD,
    Reason.LEDGER_UNAVAILABLE: Ending(1, NextAction.RESUME_AFTER_CHANGE),
    Reason.FRAMEWORK_CAP: _GUARD,
    Reason.PROVIDER_FAULT: Ending(1, NextAction.RESUME_AFTER_CHANGE),
    Reason.CRASHED: Ending(1, NextAction.RESUME_AFTER_CHANGE),
}

# The limit that must be raised before a run ended by a cap may be resumed.
LIMIT_OF_REASON: Final[dict[Reason, str]] = {
    Reason.STEP_CAP: "steps_max",
    Reason.TURN_CEILING: "turns_max",
    Reason.TOKEN_CEILING: "tokens_max",
    Reason.WALL_CLOCK_CAP: "wall_ms_max",
    Reason.RETRY_CAP: "retries_max",
    Reason.HANDOFF_CAP: "handoffs_max",
    Reason.DEPTH_CAP: "depth_max",
    Reason.SPEND_CAP: "spend_nanos_max",
}
CAP_REASONS: Final = frozenset(LIMIT_OF_REASON)
