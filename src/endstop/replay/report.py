"""What a replay found, as frozen records that a process can send to another and a file can hold."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from endstop.core.model import NO_DETAIL, Detail
from endstop.replay.trace import Skipped

if TYPE_CHECKING:
    from endstop.core.reasons import Action, Reason

__all__ = ["CallMark", "GuardTrip", "Judgement", "Peaks", "RunReport", "RunTotals", "Sample", "StopPoint"]


@dataclass(frozen=True, slots=True, kw_only=True)
class CallMark:
    """One call by its index, as evidence: the tool, and its arguments' fingerprint."""

    index: int
    tool: str
    fingerprint: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StopPoint:
    """Where the guard would have ended the run.

    `call_index` is the first call that would not have been made: the refused one, or the one after the result or the
    model turn that ended the run. It equals the number of calls when none came after. `after_call` is the call whose
    result ended the run, else None. `turn` counts the model turns let through before it. `between` are the tools that
    were called between the calls of the evidence, `failing` whether its answers read as failures (for words only).
    """

    call_index: int
    turn: int
    reason: Reason
    guard: str | None
    message: str
    detail: Detail = NO_DETAIL
    loop: str | None = None
    after_call: int | None = None
    at_turn: bool = False
    tool: str = ""
    evidence: tuple[CallMark, ...] = ()
    between: tuple[str, ...] = ()
    failing: bool = False
    at_us: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Judgement:
    """A decision that was not "go on": a warning, a block, an observation, a copy that shares an answer, a wait."""

    call_index: int
    action: Action
    reason: Reason | None
    guard: str | None
    loop: str | None = None
    warned: bool = False
    observed: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class GuardTrip:
    """Where one guard alone would have ended the run; `after_call` as in `StopPoint`."""

    guard: str
    reason: Reason
    call_index: int
    after_call: int | None = None
    value: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RunTotals:
    """Sums over calls and turns. `time_us` is running time; waiting for a person is none. `spend_known` is False
    where the recording has no prices."""

    calls: int = 0
    turns: int = 0
    input_tokens: int = 0
    output_tokens: int = 0
    spend_nanos: int = 0
    time_us: int = 0
    spend_known: bool = False

    @property
    def tokens(self) -> int:
        """Input plus output tokens."""
        return self.input_tokens + self.output_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Peaks:
    """The most that a run came to, guard by guard: what its limits must allow for it to pass."""

    steps: int = 0
    turns: int = 0
    tokens: int = 0
    wall_ms: int = 0
    retries: int = 0
    handoffs: int = 0
    spend_nanos: int = 0
    same_call: int = 0
    cycle_laps: int = 0
    no_progress: int = 0
    same_answer: int = 0
    error_streak: int = 0
    refused_streak: int = 0
    poll_unchanged: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One point of a plot: a call, how often it had been made in the window (itself counted), the tokens and the
    running time by then (microseconds, 0 where unknown)."""

    call_index: int
    repeats: int
    tokens: int
    time_us: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class RunReport:
    """What one run's replay found. `after` are the totals from the stop on: what it would have saved.

    `repeated_after` counts how often the refused call was made in the recording from the stop on, itself included.
    """

    run_id: str
    source: str
    format: str
    outcome: str
    totals: RunTotals
    stop: StopPoint | None = None
    after: RunTotals | None = None
    story: str = ""
    judgements: tuple[Judgement, ...] = ()
    alone: tuple[GuardTrip, ...] = ()
    peaks: Peaks | None = None
    samples: tuple[Sample, ...] = ()
    repeated_after: int = 0
    unanswered: int = 0
    skipped: tuple[Skipped, ...] = ()
    against: RunReport | None = None

    def to_json(self) -> dict[str, object]:
        """This report as JSON values."""
        found = asdict(self)
        found["against"] = None if self.against is None else self.against.to_json()
        return found
