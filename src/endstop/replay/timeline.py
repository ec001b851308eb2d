"""Spans as a run: formats that record intervals, in any order, become events in the order of time.

A span's start is the call, its end the outcome; a model span is a turn at its start and its tokens at its end. The
spans of a source are held in memory, `SPANS_MAX` of them at most, because nothing promises their order.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from endstop.core.reasons import ErrorClass
from endstop.replay.trace import (
    NO_VALUE,
    Item,
    RunEnd,
    RunHead,
    Skips,
    TraceCall,
    TraceLost,
    TraceResult,
    TraceTurn,
    TraceUsage,
)

if TYPE_CHECKING:
    from endstop.core.model import Usage
    from endstop.replay.trace import Event

__all__ = ["SPANS_MAX", "Interval", "runs_of"]

SPANS_MAX: Final = 200_000
TURN: Final = "turn"
TOOL: Final = "tool"


@dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    """One span of a run: a tool call (`tool` is set) or a model call. Times are microseconds since the epoch.

    `value` is `NO_VALUE` where the span holds no answer, not even null. `error` is the span's own word for a failure.
    """

    run_id: str
    span_id: str
    start_us: int | None
    end_us: int | None
    tool: str | None = None
    args: Mapping[str, object] | str = ""
    value: object = NO_VALUE
    error: str | None = None
    error_class: ErrorClass = ErrorClass.TOOL_FAILED
    agent: str = "main"
    model: str = ""
    usage: Usage | None = None
    spend_nanos: int | None = None


def runs_of(intervals: Iterable[Interval], *, source: str, format_name: str, skips: Skips) -> Iterator[Item]:
    """The events of every run in `intervals`, run by run, each in the order of time."""
    runs: dict[str, list[Interval]] = {}
    held = 0
    for interval in intervals:
        if held >= SPANS_MAX:
            skips.add(f"span beyond the first {SPANS_MAX}")
            continue
        held += 1
        runs.setdefault(interval.run_id, []).append(interval)
    for run_id, found in runs.items():
        head = RunHead(run_id=run_id, source=source, format=format_name)
        for event in _ordered(found):
            yield head, event
        yield head, RunEnd()


def _ordered(intervals: list[Interval]) -> Iterator[Event]:
    points: list[tuple[int, int, int, Interval, bool]] = []
    at_us = 0
    for number, interval in enumerate(intervals):
        at_us = interval.start_us if interval.start_us is not None else at_us
        # At one instant an end comes before a beginning: the answer was there when the next call was made.
        points.append((at_us, 1, number, interval, True))
        end_us = interval.end_us if interval.end_us is not None and interval.end_us >= at_us else at_us
        # A span of no length ends after it began, and before the next one begins.
        points.append((end_us, 0 if end_us > at_us else 1, number, interval, False))
    turns = 0
    for _, _, _, interval, begins in sorted(points, key=lambda point: (*point[:3], not point[4])):
        if interval.tool is None:
            if begins:
                turns += 1
            yield from _model_events(interval, begins=begins)
        else:
            yield from _tool_events(interval, f"{TURN}-{turns}" if turns else None, begins=begins)


def _model_events(interval: Interval, *, begins: bool) -> Iterator[Event]:
    if begins:
        yield TraceTurn(agent=interval.agent, model=interval.model, at_us=interval.start_us)
    elif interval.usage is not None:
        yield TraceUsage(usage=interval.usage, spend_nanos=interval.spend_nanos, at_us=interval.end_us)


def _tool_events(interval: Interval, round_id: str | None, *, begins: bool) -> Iterator[Event]:
    if begins:
        yield TraceCall(
            tool=interval.tool or "", args=interval.args, call_id=interval.span_id, round_id=round_id,
            agent=interval.agent, at_us=interval.start_us,
        )  # fmt: skip
    elif interval.error is not None:
        value = None if interval.value is NO_VALUE else interval.value
        yield TraceResult(
            call_id=interval.span_id, value=value, error_class=interval.error_class, message=interval.error[:2_000],
            at_us=interval.end_us,
        )  # fmt: skip
    elif interval.value is NO_VALUE:
        yield TraceLost(call_id=interval.span_id)
    else:
        yield TraceResult(call_id=interval.span_id, value=interval.value, at_us=interval.end_us)
