"""AutoGen: recorded model sessions (requests with their responses) and AgentChat messages.

A session holds every request with its whole history, so an answer to a call stands in a later request: each call and
each answer is taken once.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

from endstop.core.reasons import ErrorClass
from endstop.replay.fields import Json, arguments, first_of, items, name, record, records_in, text, time_us, usage_of
from endstop.replay.format import Format
from endstop.replay.seen import Seen
from endstop.replay.trace import Event, Item, RunEnd, RunHead, Skips, TraceCall, TraceResult, TraceTurn, UserInput

if TYPE_CHECKING:
    from endstop.core.model import Usage
    from endstop.replay.source import Source

__all__ = ["FORMAT"]

NAME: Final = "autogen"
_REQUESTS: Final = ("ToolCallRequestEvent", "ToolCallMessage")
_RESULTS: Final = ("ToolCallExecutionEvent", "ToolCallResultMessage", "FunctionExecutionResultMessage")
_MESSAGES: Final = frozenset(
    {*_REQUESTS, *_RESULTS, "TextMessage", "SystemMessage", "UserMessage", "AssistantMessage", "ToolCallSummaryMessage",
     "HandoffMessage", "StopMessage", "MultiModalMessage", "ThoughtEvent", "UserInputRequestedEvent",
     "MemoryQueryEvent"}
)  # fmt: skip


def _items(source: Source) -> list[Json]:
    if isinstance(source.document, dict):
        return records_in(first_of(source.document, "messages", "message_thread"))
    return [item for item in source.head_records if isinstance(item, dict)]


def _sniff(source: Source) -> int:
    for item in _items(source):
        inner = records_in(item.get("messages"))
        if "mode" in item and "response" in item and any(text(message.get("type")) in _MESSAGES for message in inner):
            return 93
        if text(item.get("type")) in _MESSAGES and "content" in item:
            return 88
    return 0


class _Session:
    """The events of one recording."""

    def __init__(self, skips: Skips) -> None:
        self._skips = skips
        self._calls = Seen()
        self._answers = Seen()
        self._said = Seen()
        self._turns = 0

    def exchange(self, item: Json) -> Iterator[Event]:
        """One request with its response."""
        for message in records_in(item.get("messages")):
            if message.get("type") == "UserMessage" and message.get("source") in ("User", "user", "human"):
                if self._said.add(repr(message.get("content"))):
                    yield UserInput()
            else:
                yield from self._results(message, None)
        response = record(item.get("response"))
        yield from self._turn(_usage(response.get("usage")), "main", None)
        yield from self._asked(items(response.get("content")), "main", None)

    def message(self, item: Json) -> Iterator[Event]:
        """One AgentChat message."""
        kind, source = text(item.get("type")), text(item.get("source"))
        at_us = time_us(item.get("created_at"))
        if kind in _REQUESTS:
            yield from self._turn(_usage(item.get("models_usage")), name(source), at_us)
            yield from self._asked(items(item.get("content")), name(source), at_us)
        elif kind in _RESULTS:
            yield from self._results(item, at_us)
        elif kind == "TextMessage" and source == "user":
            yield UserInput(at_us=at_us)
        elif kind == "TextMessage":
            yield from self._turn(_usage(item.get("models_usage")), name(source), at_us)
        elif kind not in _MESSAGES:
            self._skips.add(f"message of type {kind}"[:60])

    def _turn(self, usage: Usage | None, agent: str, at_us: int | None) -> Iterator[Event]:
        self._turns += 1
        yield TraceTurn(agent=agent, usage=usage, at_us=at_us)

    def _asked(self, calls: list[object], agent: str, at_us: int | None) -> Iterator[Event]:
        for call in map(record, calls):
            if "name" in call and self._calls.add(text(call.get("id"))):
                yield TraceCall(
                    tool=name(call.get("name")), args=arguments(call.get("arguments")), call_id=text(call.get("id")),
                    round_id=f"turn-{self._turns}", agent=agent, at_us=at_us,
                )  # fmt: skip

    def _results(self, message: Json, at_us: int | None) -> Iterator[Event]:
        for result in records_in(message.get("content")):
            call_id = text(result.get("call_id"))
            if not call_id or call_id not in self._calls or not self._answers.add(call_id):
                continue
            value = result.get("content")
            failed = result.get("is_error") is True
            yield TraceResult(
                call_id=call_id, value=value, error_class=ErrorClass.TOOL_FAILED if failed else None,
                message=text(value)[:2_000] if failed else None, at_us=at_us,
            )  # fmt: skip


def _usage(value: object) -> Usage | None:
    found = record(value)
    return usage_of(input_tokens=found.get("prompt_tokens"), output_tokens=found.get("completion_tokens"))


def _read(source: Source, skips: Skips) -> Iterator[Item]:
    head = RunHead(run_id=source.stem, source=source.name, format=NAME)
    session = _Session(skips)
    records = _items(source) if isinstance(source.document, dict) else source.records(skips)
    for item in records:
        for event in session.exchange(item) if "response" in item else session.message(item):
            yield head, event
    yield head, RunEnd()


FORMAT: Final = Format(name=NAME, title="AutoGen sessions and messages", tried=True, sniff=_sniff, read=_read)
