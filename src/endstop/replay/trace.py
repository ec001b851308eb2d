"""A recorded run in words that belong to no format: what readers yield and the replayer consumes.

A reader turns a file into a stream of pairs `(RunHead, event)`. Calls and their results are separate events, as in
life: several calls of one message may be open at once, a result may come late, and some never come. A call's index is
its place among the calls of its run, counted from 0 by whoever consumes the stream.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final

from endstop.core.model import Usage, Version
from endstop.core.reasons import Effect, ErrorClass, Status
from endstop.core.slots import filled_by_slot, open_twin

__all__ = [
    "NO_VALUE",
    "OPEN_CALL",
    "OPEN_RESULT",
    "AnswerDigest",
    "Event",
    "Item",
    "PairedCall",
    "RunEnd",
    "RunHead",
    "Skipped",
    "Skips",
    "TraceCall",
    "TraceHandoff",
    "TraceLost",
    "TracePause",
    "TraceResult",
    "TraceRun",
    "TraceStart",
    "TraceTurn",
    "TraceUsage",
    "UserInput",
    "paired",
]

REASONS_MAX: Final = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class RunHead:
    """Which run an event belongs to. `outcome` is the recording's own word on how it ended (a reward, a status)."""

    run_id: str
    source: str
    format: str
    outcome: str = ""


@filled_by_slot
@dataclass(frozen=True, slots=True, kw_only=True)
class TraceTurn:
    """A model call was made. `usage` is None where the format does not say, or says it later (`TraceUsage`).

    `spend_nanos` is the price in nano-dollars, `at_us` microseconds since the epoch; both None where unknown. The
    bounds are the worst case that a guard was told of beforehand.
    """

    agent: str = "main"
    model: str = ""
    usage: Usage | None = None
    spend_nanos: int | None = None
    tokens_bound: int | None = None
    nanos_bound: int | None = None
    at_us: int | None = None


@filled_by_slot
@dataclass(frozen=True, slots=True, kw_only=True)
class TraceUsage:
    """More tokens or money of the turn before, or of the whole run: what a format counts apart from its turns."""

    usage: Usage
    spend_nanos: int | None = None
    at_us: int | None = None


@filled_by_slot
@dataclass(frozen=True, slots=True, kw_only=True)
class TraceCall:
    """A tool call was proposed. `args` is the object, or the raw text where it did not parse.

    `round_id` names the assistant message. `fingerprint` is set instead of arguments where the recording holds digests
    only (Endstop's own ledger); `key_digest` likewise. `fault` says that the host refused it before it could run.
    """

    tool: str
    args: Mapping[str, object] | str
    call_id: str = ""
    round_id: str | None = None
    agent: str = "main"
    effect: Effect | None = None
    declared: bool | None = None
    fault: ErrorClass | None = None
    fingerprint: str | None = None
    key_digest: str | None = None
    at_us: int | None = None


class _NoValue:
    """The type of `NO_VALUE`: not even null was recorded."""

    def __repr__(self) -> str:
        return "NO_VALUE"

    def __reduce__(self) -> str:
        return "NO_VALUE"


NO_VALUE: Final = _NoValue()


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerDigest:
    """An answer of which the recording holds digests only, as the ledger wrote them."""

    answer: str
    evidence: bool = True
    failed: bool = False
    error_symbol: str = ""
    version_source: str | None = None
    retry_after_ms: int | None = None


@filled_by_slot
@dataclass(frozen=True, slots=True, kw_only=True)
class TraceResult:
    """A call has an outcome. `value` is what the tool answered: a JSON null is an answer, and so is empty text.

    `error_class` is set where the recording itself marks the result as failed. `took_ms` is milliseconds.
    """

    call_id: str
    value: object = None
    status: Status = Status.PROGRESS
    error_class: ErrorClass | None = None
    message: str | None = None
    progress_version: Version | None = None
    retry_after_ms: int | None = None
    digest: AnswerDigest | None = None
    agent: str = "main"
    at_us: int | None = None
    took_ms: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceLost:
    """The recording holds no outcome of this call, and none will follow."""

    call_id: str


@filled_by_slot
@dataclass(frozen=True, slots=True, kw_only=True)
class TraceHandoff:
    """One agent handed the run to another."""

    from_agent: str
    to_agent: str
    fingerprint: str | None = None
    at_us: int | None = None


@filled_by_slot
@dataclass(frozen=True, slots=True, kw_only=True)
class UserInput:
    """A real person spoke. Text that a host injects never becomes this."""

    at_us: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TracePause:
    """The run stood still from here to its next event: that time is no running time. `outcome` as in `RunHead`."""

    outcome: str = ""
    at_us: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceStart:
    """The run went on from a progress version that was known before (`version`), or in a new generation (`resumed`)."""

    version: Version | None = None
    resumed: bool = False
    at_us: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RunEnd:
    """The reader knows that nothing more of this run follows. `outcome` as in `RunHead`, where it comes last."""

    outcome: str = ""


# For readers of formats that come in large files: an open twin, filled and then sealed, is made in half the time.
OPEN_CALL: Final = open_twin(TraceCall)
OPEN_RESULT: Final = open_twin(TraceResult)

Event = (
    TraceCall | TraceResult | TraceLost | TraceTurn | TraceUsage | TraceHandoff | TracePause | TraceStart | UserInput
    | RunEnd
)  # fmt: skip
Item = tuple[RunHead, Event]


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceRun:
    """One whole run in memory: its head and its events in order."""

    run_id: str
    source: str
    format: str
    events: tuple[Event, ...]
    outcome: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class PairedCall:
    """A call beside its result (None where there was none); `index` counts the run's calls from 0."""

    index: int
    call: TraceCall
    result: TraceResult | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Skipped:
    """Parts of a source that were not read: why, and how many."""

    reason: str
    count: int


class Skips:
    """Counts what could not be read. Every reader takes one and leaves nothing out in silence."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()

    def add(self, reason: str, count: int = 1) -> None:
        """Count `count` parts that were not read because of `reason`."""
        if reason not in self._counts and len(self._counts) >= REASONS_MAX:
            reason = "other reasons"
        self._counts[reason] += count

    def found(self) -> tuple[Skipped, ...]:
        """What was counted, the largest first."""
        ranked = sorted(self._counts.items(), key=lambda item: (-item[1], item[0]))
        return tuple(Skipped(reason=reason, count=count) for reason, count in ranked)


def paired(run: TraceRun) -> Iterator[PairedCall]:
    """The calls of `run` in order, each with its result; results find their call by id, the oldest open one first."""
    calls: list[TraceCall] = []
    results: dict[int, TraceResult] = {}
    open_calls: dict[str, list[int]] = {}
    for event in run.events:
        if isinstance(event, TraceCall):
            open_calls.setdefault(event.call_id or f"#{len(calls)}", []).append(len(calls))
            calls.append(event)
        elif isinstance(event, TraceResult):
            waiting = open_calls.get(event.call_id)
            if waiting:
                results[waiting.pop(0)] = event
    for index, call in enumerate(calls):
        yield PairedCall(index=index, call=call, result=results.get(index))
