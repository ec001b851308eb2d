"""Inspect evaluation logs (JSON): each sample is a run, its `tool` events are calls, its `model` events turns.

Results and texts that stand in the log's attachments are read from there. Tool events carry when they began and
ended; an error object is the log's own word for a failure.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

from endstop.core.reasons import ErrorClass
from endstop.replay.fields import (
    Json,
    arguments,
    blocks_value,
    first_of,
    name,
    record,
    records_in,
    text,
    time_us,
    usage_of,
)
from endstop.replay.format import Format
from endstop.replay.trace import Event, Item, RunEnd, RunHead, Skips, TraceCall, TraceResult, TraceTurn

if TYPE_CHECKING:
    from endstop.core.model import Usage
    from endstop.replay.source import Source

__all__ = ["FORMAT"]

NAME: Final = "inspect"
ATTACHMENT: Final = "attachment://"
_CLASSES: Final = {
    "timeout": ErrorClass.TIMEOUT,
    "parsing": ErrorClass.SCHEMA,
    "permission": ErrorClass.AUTH,
    "file_not_found": ErrorClass.NOT_FOUND,
    "approval": ErrorClass.DENIED,
}


def _sniff(source: Source) -> int:
    document = record(source.document)
    if "eval" not in document:
        return 0
    return 95 if "task" in record(document.get("eval")) else 0


def _read(source: Source, skips: Skips) -> Iterator[Item]:
    document = record(source.document)
    samples = records_in(document.get("samples"))
    if not samples:
        skips.add("log without samples")
    for sample in samples:
        run_id = f"{sample.get('id', len(samples))}:{sample.get('epoch', 1)}"
        scores = record(sample.get("scores"))
        outcome = ", ".join(f"{scorer} {record(score).get('value')}" for scorer, score in scores.items())[:200]
        head = RunHead(run_id=run_id, source=source.name, format=NAME, outcome=outcome)
        for event in _events(sample, skips):
            yield head, event
        yield head, RunEnd()


def _events(sample: Json, skips: Skips) -> Iterator[Event]:
    attachments = record(sample.get("attachments"))
    turns = 0
    for number, event in enumerate(records_in(sample.get("events"))):
        if event.get("event") == "model":
            turns += 1
            output = record(event.get("output"))
            yield TraceTurn(
                model=text(event.get("model")), usage=_usage(output.get("usage")),
                at_us=time_us(first_of(event, "completed", "timestamp")),
            )  # fmt: skip
        elif event.get("event") == "tool":
            call_id = text(event.get("id")) or f"event-{number}"
            yield TraceCall(
                tool=name(event.get("function")), args=arguments(_attached(event.get("arguments"), attachments)),
                call_id=call_id, round_id=f"turn-{turns}", agent=text(event.get("agent")) or "main",
                at_us=time_us(event.get("timestamp")),
            )  # fmt: skip
            yield from _result(call_id, event, attachments, skips)


def _result(call_id: str, event: Json, attachments: Json, skips: Skips) -> Iterator[Event]:
    error = record(event.get("error"))
    at_us = time_us(event.get("completed"))
    if "result" not in event and not error:
        if event.get("failed") is None:
            skips.add("tool event without a result")
        return
    value = blocks_value(_attached(event.get("result"), attachments))
    if not error:
        yield TraceResult(call_id=call_id, value=value, at_us=at_us)
        return
    yield TraceResult(
        call_id=call_id, value=value, error_class=_CLASSES.get(text(error.get("type")), ErrorClass.TOOL_FAILED),
        message=text(error.get("message"))[:2_000], at_us=at_us,
    )  # fmt: skip


def _attached(value: object, attachments: Json) -> object:
    """`value` with its references to attachments resolved, one level deep: that is where the log puts them."""
    if isinstance(value, str) and value.startswith(ATTACHMENT):
        return attachments.get(value.removeprefix(ATTACHMENT), value)
    if isinstance(value, dict):
        return {field: _attached(item, attachments) if isinstance(item, str) else item for field, item in value.items()}
    return value


def _usage(value: object) -> Usage | None:
    found = record(value)
    return usage_of(
        input_tokens=found.get("input_tokens"), output_tokens=found.get("output_tokens"),
        cache_read=found.get("input_tokens_cache_read"), cache_write=found.get("input_tokens_cache_write"),
        reasoning=found.get("reasoning_tokens"),
    )  # fmt: skip


FORMAT: Final = Format(name=NAME, title="Inspect evaluation logs (JSON)", tried=True, sniff=_sniff, read=_read)
