"""OpenTelemetry spans out of JSON: OTLP (`resourceSpans`), one batch a line, or flat spans with attributes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from endstop.replay.fields import Json, first_of, integer, items, json_value, record, records_in, text, time_us

if TYPE_CHECKING:
    from endstop.replay.source import Source
    from endstop.replay.trace import Skips

__all__ = ["Span", "flat", "has_spans", "spans_of"]

DEPTH_MAX = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """One span: its ids, times in microseconds, attributes by their dotted names, and its error where it has one."""

    trace_id: str
    span_id: str
    parent_id: str
    name: str
    start_us: int | None
    end_us: int | None
    attributes: Json
    error: str | None = None


def has_spans(source: Source) -> list[Json]:
    """The attributes of the first spans of a source; empty when it holds none."""
    found: list[Json] = []
    for item in source.head_records:
        for span in _raw_spans(record(item)):
            found.append(_attributes(span))
            if len(found) >= 200:  # noqa: PLR2004  # enough to see what kind they are
                return found
    return found


def spans_of(source: Source, skips: Skips) -> Iterator[Span]:
    """The spans of `source` in the order of the file."""
    for item in source.records(skips):
        found = False
        for raw in _raw_spans(item):
            found = True
            yield _span(raw)
        if not found:
            skips.add("record without spans")


def _raw_spans(item: Json) -> Iterator[Json]:
    batches = records_in(first_of(item, "resourceSpans", "resource_spans"))
    if batches:
        for batch in batches:
            scopes = first_of(batch, "scopeSpans", "scope_spans", "instrumentationLibrarySpans")
            for scope in records_in(scopes):
                yield from records_in(scope.get("spans"))
        return
    inner = records_in(item.get("spans"))
    if inner:
        yield from inner
    elif "attributes" in item or any(field.startswith("attributes.") for field in item):
        yield item


def _attributes(raw: Json) -> Json:
    given = raw.get("attributes")
    if isinstance(given, list):
        return {text(entry.get("key")): _value(entry.get("value"), 0) for entry in records_in(given)}
    if isinstance(given, dict):
        return flat(given)
    return {field.removeprefix("attributes."): value for field, value in raw.items() if field.startswith("attributes.")}


def flat(given: Json, prefix: str = "", depth: int = 0) -> Json:
    """Nested attributes by their dotted names; lists of messages stay as they are."""
    found: Json = {}
    for field, value in given.items():
        name = f"{prefix}{field}"
        found[name] = value
        if isinstance(value, dict) and depth < DEPTH_MAX:
            found.update(flat(value, f"{name}.", depth + 1))
    return found


def _value(value: object, depth: int) -> object:
    """An OTLP value as the JSON value it stands for."""
    found = record(value)
    if depth > DEPTH_MAX:
        return None
    for kind in ("stringValue", "string_value", "boolValue", "bool_value", "doubleValue", "double_value"):
        if kind in found:
            return found[kind]
    whole = first_of(found, "intValue", "int_value")
    if whole is not None:
        return integer(whole)
    array = record(first_of(found, "arrayValue", "array_value"))
    if array:
        return [_value(item, depth + 1) for item in items(array.get("values"))]
    pairs = record(first_of(found, "kvlistValue", "kvlist_value"))
    if pairs:
        return {
            text(entry.get("key")): _value(entry.get("value"), depth + 1) for entry in records_in(pairs.get("values"))
        }
    return None


def _span(raw: Json) -> Span:
    context = record(raw.get("context"))
    attributes = _attributes(raw)
    return Span(
        trace_id=text(first_of(raw, "traceId", "trace_id", "context.trace_id") or context.get("trace_id")),
        span_id=text(first_of(raw, "spanId", "span_id", "context.span_id", "id") or context.get("span_id")),
        parent_id=text(first_of(raw, "parentSpanId", "parent_id", "parent_span_id")),
        name=text(raw.get("name")),
        start_us=time_us(first_of(raw, "startTimeUnixNano", "start_time_unix_nano", "start_time", "startTime")),
        end_us=time_us(first_of(raw, "endTimeUnixNano", "end_time_unix_nano", "end_time", "endTime")),
        attributes=attributes,
        error=_error(raw, attributes),
    )


def _error(raw: Json, attributes: Json) -> str | None:
    status = raw.get("status")
    code = (
        record(status).get("code", record(status).get("status_code"))
        if isinstance(status, dict)
        else first_of(raw, "status_code")
    )
    if code in (2, "STATUS_CODE_ERROR", "ERROR") or attributes.get("error.type"):
        said = text(record(status).get("message")) or text(record(status).get("description"))
        return said or text(first_of(raw, "status_message")) or text(attributes.get("error.type")) or "error"
    return None


def json_attribute(value: object) -> object:
    """An attribute that may be JSON in text."""
    return json_value(value) if isinstance(value, str) and value[:1] in "{[" else value
