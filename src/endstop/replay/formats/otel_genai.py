"""OpenTelemetry GenAI spans: `execute_tool` spans are calls, `chat` spans turns.

Where tools have no spans of their own, the calls are taken from the messages of the chat spans. A run is one
conversation where spans name it, else one trace.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

from endstop.replay.fields import Json, arguments, first_of, name, records_in, text, usage_of
from endstop.replay.format import Format
from endstop.replay.seen import Seen
from endstop.replay.spans import Span, has_spans, json_attribute, spans_of
from endstop.replay.timeline import Interval, runs_of
from endstop.replay.trace import NO_VALUE, Item, Skips

if TYPE_CHECKING:
    from endstop.replay.source import Source

__all__ = ["FORMAT"]

NAME: Final = "otel_genai"
_MODEL_OPERATIONS: Final = frozenset({"chat", "generate_content", "text_completion", "responses"})


def _sniff(source: Source) -> int:
    found = has_spans(source)
    if any("openinference.span.kind" in attributes for attributes in found):
        return 0
    return 90 if any(field.startswith("gen_ai.") for attributes in found for field in attributes) else 0


def _read(source: Source, skips: Skips) -> Iterator[Item]:
    yield from runs_of(_intervals(source, skips), source=source.name, format_name=NAME, skips=skips)


def _intervals(source: Source, skips: Skips) -> Iterator[Interval]:
    seen = Seen()
    # The model's own messages repeat what tool spans say: they are kept back until it is clear who tells of the calls.
    told: list[Interval] = []
    spanned: set[str] = set()
    for span in spans_of(source, skips):
        operation = text(span.attributes.get("gen_ai.operation.name"))
        if operation == "execute_tool" or (not operation and span.attributes.get("gen_ai.tool.name")):
            made = _tool(span)
            spanned.add(made.run_id)
            yield made
        elif operation in _MODEL_OPERATIONS or "gen_ai.usage.input_tokens" in span.attributes:
            yield _model(span)
            told += _told(span, seen)
    yield from (interval for interval in told if interval.run_id not in spanned)


def _run_id(span: Span) -> str:
    return text(span.attributes.get("gen_ai.conversation.id")) or span.trace_id or "trace"


def _agent(span: Span) -> str:
    found = span.attributes.get("gen_ai.agent.name")
    return name(found) if found else "main"


def _tool(span: Span) -> Interval:
    given = first_of(span.attributes, "gen_ai.tool.call.arguments", "tool_arguments", "gen_ai.tool.arguments")
    answer = first_of(span.attributes, "gen_ai.tool.call.result", "tool_response", "gen_ai.tool.result")
    return Interval(
        run_id=_run_id(span), span_id=span.span_id, start_us=span.start_us, end_us=span.end_us,
        tool=name(first_of(span.attributes, "gen_ai.tool.name") or span.name),
        args=arguments({} if given is None else given), value=NO_VALUE if answer is None else json_attribute(answer),
        error=span.error, agent=_agent(span),
    )  # fmt: skip


def _model(span: Span) -> Interval:
    found = span.attributes
    return Interval(
        run_id=_run_id(span), span_id=span.span_id, start_us=span.start_us, end_us=span.end_us, agent=_agent(span),
        model=text(first_of(found, "gen_ai.response.model", "gen_ai.request.model")),
        usage=usage_of(
            input_tokens=first_of(found, "gen_ai.usage.input_tokens", "gen_ai.usage.prompt_tokens"),
            output_tokens=first_of(found, "gen_ai.usage.output_tokens", "gen_ai.usage.completion_tokens"),
            cache_read=first_of(found, "gen_ai.usage.cache_read.input_tokens", "gen_ai.usage.cache_read_tokens"),
            cache_write=first_of(found, "gen_ai.usage.cache_creation.input_tokens"),
        ),
    )  # fmt: skip


def _told(span: Span, seen: Seen) -> list[Interval]:
    """The calls that a chat span's messages tell of; the answers stand in the messages of a later span."""
    asked: dict[str, Json] = {}
    answers: dict[str, object] = {}
    for field in ("gen_ai.input.messages", "gen_ai.output.messages"):
        for message in records_in(json_attribute(span.attributes.get(field))):
            for part in records_in(message.get("parts")):
                if part.get("type") == "tool_call":
                    asked[text(part.get("id"))] = part
                elif part.get("type") == "tool_call_response":
                    answers[text(part.get("id"))] = first_of(part, "response", "result")
    found = []
    for call_id, answer in answers.items():
        request = asked.get(call_id)
        if request is None or not seen.add((_run_id(span), call_id)):
            continue
        # It was made and answered before this span began.
        found.append(
            Interval(
                run_id=_run_id(span),
                span_id=call_id,
                start_us=span.start_us,
                end_us=span.start_us,
                tool=name(request.get("name")),
                args=arguments(request.get("arguments")),
                value=answer,
                agent=_agent(span),
            )
        )
    return found


FORMAT: Final = Format(name=NAME, title="OpenTelemetry GenAI spans (OTLP JSON)", tried=False, sniff=_sniff, read=_read)
