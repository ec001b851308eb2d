"""Pydantic AI messages: `tool-call` parts of responses, `tool-return` and `retry-prompt` parts of requests."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

from endstop.core.reasons import ErrorClass
from endstop.replay.fields import Json, arguments, first_of, name, record, records_in, text, time_us, usage_of
from endstop.replay.format import CallIds, Format
from endstop.replay.trace import Event, Item, RunEnd, RunHead, Skips, TraceCall, TraceResult, TraceTurn, UserInput

if TYPE_CHECKING:
    from endstop.core.model import Usage
    from endstop.replay.source import Source

__all__ = ["FORMAT"]

NAME: Final = "pydantic_ai"
_FAILED: Final = frozenset({"failed", "retried", "denied"})


def _sniff(source: Source) -> int:
    found = [record(item) for item in source.head_records]
    if isinstance(source.document, dict):
        found += records_in(first_of(source.document, "messages", "all_messages"))
    for item in found:
        if item.get("kind") in ("request", "response") and isinstance(item.get("parts"), list):
            parts = records_in(item["parts"])
            return 93 if not parts or any("part_kind" in part for part in parts) else 0
    return 0


class _Messages:
    """The events of one run, message by message."""

    def __init__(self, skips: Skips) -> None:
        self._skips = skips
        self._ids = CallIds()
        self._turns = 0

    def events(self, message: Json) -> Iterator[Event]:
        """The events of the next message."""
        at_us = time_us(message.get("timestamp"))
        parts = records_in(message.get("parts"))
        if message.get("kind") == "response":
            self._turns += 1
            yield TraceTurn(model=text(message.get("model_name")), usage=_usage(message.get("usage")), at_us=at_us)
        for part in parts:
            kind = part.get("part_kind")
            when_us = time_us(part.get("timestamp")) or at_us
            if kind in ("tool-call", "builtin-tool-call"):
                tool = name(part.get("tool_name"))
                yield TraceCall(
                    tool=tool, args=arguments(part.get("args")),
                    call_id=self._ids.opened(text(part.get("tool_call_id")), tool),
                    round_id=f"turn-{self._turns}", at_us=when_us,
                )  # fmt: skip
            elif kind in ("tool-return", "builtin-tool-return") or (kind == "retry-prompt" and part.get("tool_name")):
                yield from self._answer(part, str(kind), when_us)
            elif kind == "user-prompt":
                yield UserInput(at_us=when_us)

    def _answer(self, part: Json, kind: str, at_us: int | None) -> Iterator[Event]:
        call_id = self._ids.answered(text(part.get("tool_call_id")), name(part.get("tool_name")))
        if not call_id:
            self._skips.add("result without a call")
            return
        content, outcome = part.get("content"), text(part.get("outcome"))
        error_class: ErrorClass | None = None
        if kind == "retry-prompt" or outcome in _FAILED:
            # A list of errors is the schema's complaint about the arguments.
            error_class = ErrorClass.SCHEMA if isinstance(content, list) else ErrorClass.TOOL_FAILED
            if outcome == "denied":
                error_class = ErrorClass.DENIED
        said = content if isinstance(content, str) else ""
        yield TraceResult(
            call_id=call_id, value=content, error_class=error_class, message=said[:2_000] if error_class else None,
            at_us=at_us,
        )  # fmt: skip


def _usage(value: object) -> Usage | None:
    found = record(value)
    return usage_of(
        input_tokens=first_of(found, "input_tokens", "request_tokens"),
        output_tokens=first_of(found, "output_tokens", "response_tokens"),
        cache_read=found.get("cache_read_tokens"), cache_write=found.get("cache_write_tokens"),
        reasoning=found.get("output_reasoning_tokens"),
    )  # fmt: skip


def _read(source: Source, skips: Skips) -> Iterator[Item]:
    head = RunHead(run_id=source.stem, source=source.name, format=NAME)
    messages = _Messages(skips)
    wrapped: list[Json] = []
    if isinstance(source.document, dict):
        wrapped = records_in(first_of(source.document, "messages", "all_messages"))
    for item in wrapped or source.records(skips):
        for event in messages.events(item):
            yield head, event
    yield head, RunEnd()


FORMAT: Final = Format(name=NAME, title="Pydantic AI messages", tried=False, sniff=_sniff, read=_read)
