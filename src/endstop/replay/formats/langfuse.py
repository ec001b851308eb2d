"""Langfuse exports: TOOL observations are calls, GENERATIONs turns.

Where a trace has no TOOL observations, the calls are taken from the `function_call` items, or chat messages, inside its
generations' inputs. Read from lists of observations, from `{"observations": […]}`, and from one a line.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

from endstop.replay.fields import (
    Json,
    arguments,
    first_of,
    json_value,
    name,
    nanos_of_dollars,
    record,
    records_in,
    text,
    time_us,
    usage_of,
)
from endstop.replay.format import Format
from endstop.replay.seen import Seen
from endstop.replay.timeline import Interval, runs_of
from endstop.replay.trace import NO_VALUE, Item, Skips

if TYPE_CHECKING:
    from endstop.core.model import Usage
    from endstop.replay.source import Source

__all__ = ["FORMAT"]

NAME: Final = "langfuse"
_TYPES: Final = frozenset(
    {"TOOL", "GENERATION", "SPAN", "EVENT", "AGENT", "CHAIN", "RETRIEVER", "EVALUATOR", "EMBEDDING", "GUARDRAIL"}
)


def _observations(item: Json) -> list[Json]:
    inner = item.get("observations")
    if isinstance(inner, list):
        return records_in(inner)
    return [item] if text(item.get("type")) in _TYPES else []


def _sniff(source: Source) -> int:
    for item in source.head_records:
        for found in _observations(record(item))[:5]:
            if "traceId" in found or "trace_id" in found or "parentObservationId" in found:
                return 92
    return 0


def _read(source: Source, skips: Skips) -> Iterator[Item]:
    yield from runs_of(_intervals(source, skips), source=source.name, format_name=NAME, skips=skips)


def _intervals(source: Source, skips: Skips) -> Iterator[Interval]:
    seen = Seen()
    told: list[Interval] = []
    spanned: set[str] = set()
    for item in source.records(skips):
        found = _observations(item)
        if not found:
            skips.add("record without observations")
        for one in found:
            run_id = text(first_of(one, "traceId", "trace_id") or item.get("id")) or source.stem
            if one.get("type") == "TOOL":
                spanned.add(run_id)
                yield _tool(one, run_id)
            elif one.get("type") == "GENERATION":
                yield _generation(one, run_id)
                told += _told(one, run_id, seen)
    yield from (interval for interval in told if interval.run_id not in spanned)


def _times(one: Json) -> tuple[int | None, int | None]:
    return time_us(first_of(one, "startTime", "start_time")), time_us(first_of(one, "endTime", "end_time"))


def _tool(one: Json, run_id: str) -> Interval:
    start_us, end_us = _times(one)
    given = one.get("input")
    parsed = json_value(given) if isinstance(given, str) else given
    return Interval(
        run_id=run_id, span_id=text(one.get("id")), start_us=start_us, end_us=end_us, tool=name(one.get("name")),
        args=parsed if isinstance(parsed, dict) else {"input": parsed},
        value=one.get("output", NO_VALUE),
        error=(text(one.get("statusMessage")) or "error") if one.get("level") == "ERROR" else None,
    )  # fmt: skip


def _generation(one: Json, run_id: str) -> Interval:
    start_us, end_us = _times(one)
    cost = first_of(one, "totalCost", "calculatedTotalCost") or record(one.get("costDetails")).get("total")
    return Interval(
        run_id=run_id, span_id=text(one.get("id")), start_us=start_us, end_us=end_us,
        model=text(one.get("model")), usage=_usage(one), spend_nanos=nanos_of_dollars(cost),
    )  # fmt: skip


def _usage(one: Json) -> Usage | None:
    found = record(first_of(one, "usageDetails", "usage"))
    read = first_of(found, "input_cached_tokens", "cache_read_input_tokens")
    return usage_of(
        input_tokens=first_of(found, "input", "prompt_tokens", "promptTokens") or one.get("promptTokens"),
        output_tokens=first_of(found, "output", "completion_tokens", "completionTokens") or one.get("completionTokens"),
        cache_read=read, reasoning=first_of(found, "output_reasoning_tokens"),
    )  # fmt: skip


def _told(one: Json, run_id: str, seen: Seen) -> list[Interval]:
    """The answered calls inside a generation's input."""
    given = one.get("input")
    parsed = json_value(given) if isinstance(given, str) else given
    messages = records_in(parsed) or records_in(first_of(record(parsed), "messages", "input"))
    asked: dict[str, tuple[str, object]] = {}
    answers: dict[str, object] = {}
    for message in messages:
        if message.get("type") == "function_call":
            asked[text(message.get("call_id"))] = (name(message.get("name")), message.get("arguments"))
        elif message.get("type") == "function_call_output":
            answers[text(message.get("call_id"))] = message.get("output")
        elif message.get("role") == "tool":
            answers[text(message.get("tool_call_id"))] = message.get("content")
        for call in records_in(message.get("tool_calls")):
            function = record(call.get("function")) or call
            asked[text(call.get("id"))] = (name(function.get("name")), first_of(function, "arguments", "args"))
    start_us, _ = _times(one)
    return [
        Interval(
            run_id=run_id, span_id=call_id, start_us=start_us, end_us=start_us, tool=asked[call_id][0],
            args=arguments(asked[call_id][1]), value=answer,
        )
        for call_id, answer in answers.items()
        if call_id in asked and seen.add((run_id, call_id))
    ]  # fmt: skip


FORMAT: Final = Format(name=NAME, title="Langfuse exports", tried=False, sniff=_sniff, read=_read)
