"""LangChain runs as LangSmith exports them: `run_type` tool is a call, `llm` a turn, grouped by trace.

Read from lists of runs, from nested `child_runs`, and from one run a line.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

from endstop.replay.fields import (
    Json,
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
from endstop.replay.timeline import Interval, runs_of
from endstop.replay.trace import NO_VALUE, Item, Skips

if TYPE_CHECKING:
    from endstop.core.model import Usage
    from endstop.replay.source import Source

__all__ = ["FORMAT"]

NAME: Final = "langsmith"
DEPTH_MAX: Final = 64


def _sniff(source: Source) -> int:
    for item in source.head_records:
        found = record(item)
        for one in (found, *records_in(found.get("runs"))[:1]):
            if "run_type" in one and ("inputs" in one or "outputs" in one):
                return 92
    return 0


def _read(source: Source, skips: Skips) -> Iterator[Item]:
    yield from runs_of(_intervals(source, skips), source=source.name, format_name=NAME, skips=skips)


def _intervals(source: Source, skips: Skips) -> Iterator[Interval]:
    for item in source.records(skips):
        for one in records_in(item.get("runs")) or [item]:
            if "run_type" not in one:
                skips.add("record without a run type")
                continue
            yield from _flattened(one, text(first_of(one, "trace_id", "id")) or source.stem, 0, skips)


def _flattened(one: Json, run_id: str, depth: int, skips: Skips) -> Iterator[Interval]:
    if one.get("run_type") == "tool":
        yield _tool(one, run_id)
    elif one.get("run_type") == "llm":
        yield _model(one, run_id)
    if depth >= DEPTH_MAX:
        skips.add("run nested too deep")
        return
    for child in records_in(one.get("child_runs")):
        yield from _flattened(child, run_id, depth + 1, skips)


def _tool(one: Json, run_id: str) -> Interval:
    inputs = record(one.get("inputs"))
    given = inputs.get("input") if list(inputs) == ["input"] else inputs
    parsed = json_value(given) if isinstance(given, str) else given
    outputs = one.get("outputs")
    value: object = NO_VALUE if outputs is None else outputs
    if isinstance(outputs, dict) and list(outputs) == ["output"]:
        value = _content(outputs["output"])
    error = one.get("error")
    return Interval(
        run_id=run_id, span_id=text(one.get("id")), start_us=time_us(one.get("start_time")),
        end_us=time_us(one.get("end_time")), tool=name(one.get("name")),
        args=parsed if isinstance(parsed, dict) else {"input": parsed}, value=value,
        error=str(error) if error else None,
    )  # fmt: skip


def _content(output: object) -> object:
    """A tool message's content: its id is new each time and says nothing."""
    found = record(output)
    kwargs = record(found.get("kwargs")) or found
    return kwargs["content"] if kwargs.get("type") == "tool" and "content" in kwargs else output


def _model(one: Json, run_id: str) -> Interval:
    return Interval(
        run_id=run_id, span_id=text(one.get("id")), start_us=time_us(one.get("start_time")),
        end_us=time_us(one.get("end_time")), model=text(one.get("name")), usage=_usage(one),
        spend_nanos=nanos_of_dollars(one.get("total_cost")),
    )  # fmt: skip


def _usage(one: Json) -> Usage | None:
    outputs = record(one.get("outputs"))
    told = record(record(outputs.get("llm_output")).get("token_usage")) or record(outputs.get("usage_metadata"))
    return usage_of(
        input_tokens=first_of(one, "prompt_tokens") or first_of(told, "prompt_tokens", "input_tokens"),
        output_tokens=first_of(one, "completion_tokens") or first_of(told, "completion_tokens", "output_tokens"),
    )


FORMAT: Final = Format(name=NAME, title="LangChain / LangSmith runs", tried=False, sniff=_sniff, read=_read)
