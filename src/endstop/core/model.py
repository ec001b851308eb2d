"""The values that cross module borders: specs, calls, results, usage and decisions.

All are frozen, keyword-only and valid from birth.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Final, Generic, TypeVar

from endstop.core.reasons import Action, Change, ErrorClass, OptionalWord, Reason, Status, Word
from endstop.errors import SpecInvalidError, UsageError

if TYPE_CHECKING:
    from endstop.core.envelope import Envelope

__all__ = [
    "NO_DETAIL",
    "Block",
    "Counters",
    "Decision",
    "Detail",
    "Execute",
    "ModelCall",
    "Replay",
    "Spec",
    "Stop",
    "ToolCall",
    "ToolResult",
    "Usage",
    "Version",
    "Wait",
]

T_co = TypeVar("T_co", covariant=True)
Version = int | str

SPEC_FIELD_CHARS_MAX: Final = 8_000
NAME_CHARS_MAX: Final = 200
MESSAGE_CHARS_MAX: Final = 2_000
COUNT_MAX: Final = 2**53 - 1


# On CPython 3.11 reading a member through its enum costs more than the comparison it is for.
_NOT_FAILED: Final = (Status.PROGRESS, Status.COMPLETE)


def _is_count(value: object) -> bool:
    return type(value) is int and 0 <= value <= COUNT_MAX


@dataclass(frozen=True, slots=True, kw_only=True)
class Spec:
    """What a run is for, in a person's words. Frozen once a run has started.

    Raises SpecInvalidError when a field is missing, no text, blank, or longer than 8 000 characters.
    """

    what_it_does: str
    what_it_does_not: str
    done_looks_like: str

    def __post_init__(self) -> None:
        for item in fields(self):
            text = getattr(self, item.name)
            if not isinstance(text, str) or not text.strip():
                msg = f"spec field {item.name!r} is blank: write one sentence before the first model call"
                raise SpecInvalidError(msg)
            if len(text) > SPEC_FIELD_CHARS_MAX:
                msg = f"spec field {item.name!r} has {len(text)} characters; at most {SPEC_FIELD_CHARS_MAX} are allowed"
                raise SpecInvalidError(msg)


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCall:
    """What an agent proposes; nothing has happened yet.

    `args` is the argument object, or the raw text when the model's arguments did not parse. `round_id` names the
    assistant message that held the call; `change` is the named change that makes a retry more than "try again".
    """

    tool: str
    args: Mapping[str, object] | str = field(default_factory=dict)
    call_id: str = ""
    round_id: str | None = None
    agent: str = "main"
    change: OptionalWord[Change] = None  # type: ignore[assignment]  # see endstop.core.reasons.Word

    def __post_init__(self) -> None:
        if not self.tool or len(self.tool) > NAME_CHARS_MAX:
            msg = f"a tool call needs a tool name of 1 to {NAME_CHARS_MAX} characters"
            raise UsageError(msg)
        args: object = self.args
        if type(args) is not dict and not isinstance(args, Mapping | str):
            msg = "a tool call's args are an object, or the raw text that did not parse"
            raise UsageError(msg)
        change: object = self.change
        if change is not None and type(change) is not Change:
            try:
                object.__setattr__(self, "change", Change(str(change)))
            except ValueError as error:
                msg = f"a tool call names an unknown change; one of {', '.join(Change)}"
                raise UsageError(msg) from error


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelCall:
    """One paid model call that is about to leave. The bounds are in tokens; None means no known bound."""

    model: str = ""
    input_tokens_max: int | None = None
    output_tokens_max: int | None = None
    call_id: str = ""
    agent: str = "main"

    def __post_init__(self) -> None:
        for name in ("input_tokens_max", "output_tokens_max"):
            value = getattr(self, name)
            if value is not None and not _is_count(value):
                msg = f"model call field {name} must be a whole number from 0 to {COUNT_MAX}"
                raise UsageError(msg)


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolResult(Generic[T_co]):
    """A tool's structured answer. A plain value is wrapped as `status="progress"`.

    `progress_version` is a number (or opaque text) from outside that only grows. `retry_after_ms` is a wait in
    milliseconds. `side_effect_committed` is the tool's own word on its write. `error_class` and `message` are set
    on failures. `warning` is the guard's note to the model on an answer that let a loop go on once more.
    """

    status: Word[Status] = Status.PROGRESS  # type: ignore[assignment]  # see endstop.core.reasons.Word
    value: T_co | None = None
    retryable: bool = False
    terminal: bool = False
    progress_version: Version | None = None
    operation_id: str | None = None
    next_allowed_action: str | None = None
    retry_after_ms: int | None = None
    side_effect_committed: bool | None = None
    error_class: OptionalWord[ErrorClass] = None  # type: ignore[assignment]  # see endstop.core.reasons.Word
    reason: Reason | None = None
    message: str | None = None
    warning: str | None = None
    replayed: bool = False

    def __post_init__(self) -> None:
        # 1. Accept the plain strings that users write, and nothing outside the closed sets.
        try:
            if type(self.status) is not Status:
                object.__setattr__(self, "status", Status(self.status))
            if self.error_class is not None and type(self.error_class) is not ErrorClass:
                object.__setattr__(self, "error_class", ErrorClass(self.error_class))
        except ValueError as error:
            msg = f"a tool result has an unknown status or error class: {error}"
            raise UsageError(msg) from error
        # 2. The flags that follow from the status are never left to the tool.
        status = self.status
        if status is not Status.PROGRESS or self.retryable or self.terminal:
            over = status not in (Status.PROGRESS, Status.RETRYABLE)
            object.__setattr__(self, "retryable", status is Status.RETRYABLE)
            # The guard's own refusals end this call, not the run.
            object.__setattr__(self, "terminal", over and self.reason is None)
        # 3. A wait is a count of milliseconds.
        wait = self.retry_after_ms
        if wait is not None and (type(wait) is not int or wait < 0):
            msg = "retry_after_ms must be a whole number of milliseconds, 0 or more"
            raise UsageError(msg)
        version = self.progress_version
        if version is not None and (type(version) is bool or not isinstance(version, int | str)):
            msg = "progress_version must be a whole number or opaque text"
            raise UsageError(msg)

    def to_json(self) -> dict[str, object]:
        """This answer as a model reads it: only what is set, the guard's warning first."""
        from endstop.core.codec import result_json

        return result_json(self)

    @property
    def failed(self) -> bool:
        """Whether this answer is a failure rather than data or a finished task."""
        return self.error_class is not None or self.status not in _NOT_FAILED


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """Tokens of one model call. `input_tokens` and `output_tokens` are totals; the others say how much of them was
    read from a cache, written to one, or spent on reasoning. `spend_nanos` is the price in nano-dollars, or None."""

    input_tokens: int = 0
    output_tokens: int = 0
    cache_read_tokens: int = 0
    cache_write_tokens: int = 0
    reasoning_tokens: int = 0
    spend_nanos: int | None = None

    def __post_init__(self) -> None:
        for item in fields(self):
            value = getattr(self, item.name)
            if value is not None and not _is_count(value):
                msg = f"usage field {item.name} must be a whole number from 0 to {COUNT_MAX}"
                raise UsageError(msg)

    @property
    def total_tokens(self) -> int:
        """Input plus output tokens."""
        return self.input_tokens + self.output_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Counters:
    """What a run has used so far; the same numbers in every agent, thread and process of it."""

    steps: int = 0
    turns: int = 0
    retries: int = 0
    handoffs: int = 0
    input_tokens: int = 0
    output_tokens: int = 0
    cache_read_tokens: int = 0
    cache_write_tokens: int = 0
    reasoning_tokens: int = 0
    spend_nanos: int = 0
    elapsed_ms: int = 0
    blocked: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Detail:
    """The figures behind a decision: the named limit and its maximum, the value that met it, and the loop's shape."""

    limit_name: str | None = None
    limit: int | None = None
    value: int | None = None
    period: int | None = None
    repeats: int | None = None
    tool: str | None = None
    error_class: ErrorClass | None = None
    rule: str | None = None


NO_DETAIL: Final = Detail()


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """May the next call happen? One of Execute, Replay, Wait, Block, Stop; `action` names which.

    `reason` is None exactly when nothing speaks against the call. `message` is written for the model: what happened
    and one next step, never the arguments. `warning` is set when a ladder let a loop go on once more.
    """

    reason: Reason | None = None
    guard: str | None = None
    message: str = ""
    fingerprint: str = ""
    detail: Detail = NO_DETAIL
    warning: str | None = None
    observed: bool = False

    @property
    def action(self) -> Action:
        """The decision's name."""
        raise NotImplementedError

    def to_json(self) -> dict[str, object]:
        """This decision as the contract publishes it."""
        from endstop.core.codec import decision_json

        return decision_json(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class Execute(Decision):
    """The call may go out."""

    @property
    def action(self) -> Action:
        """Always `execute`."""
        return Action.EXECUTE


@dataclass(frozen=True, slots=True, kw_only=True)
class Replay(Decision):
    """The call was answered before; `result` is that answer, or None when only its occurrence is known here."""

    result: ToolResult[object] | None = None

    @property
    def action(self) -> Action:
        """Always `replay`."""
        return Action.REPLAY


@dataclass(frozen=True, slots=True, kw_only=True)
class Wait(Decision):
    """The call may be proposed again at `until_us` (microseconds on the guard's clock), `retry_after_ms` from now."""

    until_us: int = 0
    retry_after_ms: int = 0

    @property
    def action(self) -> Action:
        """Always `wait`."""
        return Action.WAIT


@dataclass(frozen=True, slots=True, kw_only=True)
class Block(Decision):
    """This call is refused; the run goes on."""

    @property
    def action(self) -> Action:
        """Always `block`."""
        return Action.BLOCK


@dataclass(frozen=True, slots=True, kw_only=True)
class Stop(Decision):
    """The run is over. `envelope` is its machine-readable end, where a whole run is known."""

    envelope: Envelope | None = None

    @property
    def action(self) -> Action:
        """Always `stop`."""
        return Action.STOP
