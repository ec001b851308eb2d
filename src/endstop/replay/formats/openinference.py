"""OpenInference spans: TOOL spans are calls, LLM spans turns; token counts may be written as text.

Where a trace has no TOOL spans, the calls are taken from the LLM spans' input messages.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

from endstop.replay.fields import Json, arguments, first_of, integer, json_value, name, nanos_of_dollars, text, usage_of
from endstop.replay.format import Format
from endstop.replay.seen import Seen
from endstop.replay.spans import Span, has_spans, json_attribute, spans_of
from endstop.replay.timeline import Interval, runs_of
from endstop.replay.trace import NO_VALUE, Item, Skips

if TYPE_CHECKING:
    from endstop.replay.source import Source

__all__ = ["FORMAT", "message_calls"]

NAME: Final = "openinference"
KIND: Final = "openinference.span.kind"
_CALL: Final = re.compile(
    r"llm\.input_messages\.(\d+)\.message\.tool_calls\.(\d+)\.tool_call\.(id|function\.name|function\.arguments)$"
)
_ANSWER: Final = re.compile(r"llm\.input_messages\.(\d+)\.message\.(role|content|tool_call_id)$")


def _sniff(source: Source) -> int:
    return 93 if any(KIND in attributes for attributes in has_spans(source)) else 0


def _read(source: Source, skips: Skips) -> Iterator[Item]:
    yield from runs_of(_intervals(source, skips), source=source.name, format_name=NAME, skips=skips)


def _intervals(source: Source, skips: Skips) -> Iterator[Interval]:
    seen = Seen()
    told: list[Interval] = []
    spanned: set[str] = set()
    for span in spans_of(source, skips):
        kind = text(span.attributes.get(KIND)).upper()
        run_id = text(span.attributes.get("session.id")) or span.trace_id or "trace"
        if kind == "TOOL":
            spanned.add(run_id)
            yield _tool(span, run_id)
        elif kind == "LLM":
            yield _model(span, run_id)
            told += message_calls(span, run_id, seen)
    yield from (interval for interval in told if interval.run_id not in spanned)


def _tool(span: Span, run_id: str) -> Interval:
    found = span.attributes
    given = first_of(found, "tool.parameters", "input.value")
    if "input.value" in found:
        given = found["input.value"]
    parsed = json_value(given) if isinstance(given, str) else given
    answer = found.get("output.value", NO_VALUE)
    return Interval(
        run_id=run_id, span_id=span.span_id, start_us=span.start_us, end_us=span.end_us,
        tool=name(found.get("tool.name") or span.name),
        # A tool's input is often plain text: an argument, not broken JSON.
        args=parsed if isinstance(parsed, dict) else {"input": parsed},
        value=answer if answer is NO_VALUE else json_attribute(answer), error=span.error,
    )  # fmt: skip


def _model(span: Span, run_id: str) -> Interval:
    found = span.attributes
    return Interval(
        run_id=run_id, span_id=span.span_id, start_us=span.start_us, end_us=span.end_us,
        model=text(found.get("llm.model_name")), spend_nanos=nanos_of_dollars(found.get("llm.cost.total")),
        usage=usage_of(
            input_tokens=integer(found.get("llm.token_count.prompt")) or 0,
            output_tokens=integer(found.get("llm.token_count.completion")) or 0,
            cache_read=found.get("llm.token_count.prompt_details.cache_read"),
            reasoning=found.get("llm.token_count.completion_details.reasoning"),
        ),
    )  # fmt: skip


def message_calls(span: Span, run_id: str, seen: Seen) -> list[Interval]:
    """The answered calls in an LLM span's input messages, those that `seen` does not hold yet."""
    calls: dict[tuple[int, int], Json] = {}
    messages: dict[int, Json] = {}
    for field, value in span.attributes.items():
        call, answer = _CALL.match(field), _ANSWER.match(field)
        if call:
            calls.setdefault((int(call[1]), int(call[2])), {})[call[3]] = value
        elif answer:
            messages.setdefault(int(answer[1]), {})[answer[2]] = value
    answers = {
        text(message.get("tool_call_id")): message.get("content")
        for message in messages.values()
        if message.get("role") == "tool"
    }
    found = []
    for _, call_parts in sorted(calls.items()):
        call_id = text(call_parts.get("id"))
        if call_id not in answers or not seen.add((run_id, call_id)):
            continue
        found.append(
            Interval(
                run_id=run_id,
                span_id=call_id,
                start_us=span.start_us,
                end_us=span.start_us,
                tool=name(call_parts.get("function.name")),
                args=arguments(call_parts.get("function.arguments")),
                value=answers[call_id],
            )
        )
    return found


FORMAT: Final = Format(name=NAME, title="OpenInference spans", tried=False, sniff=_sniff, read=_read)
