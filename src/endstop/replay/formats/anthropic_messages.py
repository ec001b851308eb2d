"""Anthropic messages: `tool_use` and `tool_result` blocks.

Read from a list of messages, from a request or a log of `{"messages": [...]}`, from one message or one such object a
line, and from responses (`"type": "message"` with `usage`).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

from endstop.core.model import COUNT_MAX, Usage
from endstop.core.reasons import ErrorClass
from endstop.replay.fields import (
    Json,
    arguments,
    blocks_value,
    count,
    first_of,
    name,
    record,
    records_in,
    text,
    time_us,
)
from endstop.replay.format import CallIds, Format
from endstop.replay.trace import Event, Item, RunEnd, RunHead, Skips, TraceCall, TraceResult, TraceTurn, UserInput

if TYPE_CHECKING:
    from endstop.replay.source import Source

__all__ = ["FORMAT", "BlockConversation", "anthropic_usage"]

NAME: Final = "anthropic_messages"
_USES: Final = frozenset({"tool_use", "server_tool_use", "mcp_tool_use"})
_BLOCKS: Final = _USES | {"tool_result"}


def anthropic_usage(value: object) -> Usage | None:
    """The `usage` of a message: input with what was read from the cache and written to it."""
    raw = record(value)
    if not raw:
        return None
    read, written = count(raw.get("cache_read_input_tokens")), count(raw.get("cache_creation_input_tokens"))
    found = Usage(
        input_tokens=min(count(raw.get("input_tokens")) + read + written, COUNT_MAX),
        output_tokens=count(raw.get("output_tokens")), cache_read_tokens=read, cache_write_tokens=written,
    )  # fmt: skip
    return found if found.total_tokens else None


class BlockConversation:
    """The events of one run's messages, one message at a time."""

    def __init__(self, skips: Skips) -> None:
        self._skips = skips
        self._ids = CallIds()
        self._turns = 0

    def events(self, message: Json) -> Iterator[Event]:
        """The events of the next message."""
        at_us = time_us(first_of(message, "timestamp", "created_at"))
        blocks = records_in(message.get("content"))
        if message.get("role") == "assistant":
            self._turns += 1
            yield TraceTurn(model=text(message.get("model")), usage=anthropic_usage(message.get("usage")), at_us=at_us)
        answered = False
        for block in blocks:
            kind = text(block.get("type"))
            if kind in _USES:
                yield self._call(block, at_us)
            elif kind.endswith("tool_result"):
                answered = True
                yield from self._answer(block, at_us)
        if message.get("role") == "user" and not answered:
            yield UserInput(at_us=at_us)

    def _call(self, block: Json, at_us: int | None) -> Event:
        tool = name(block.get("name"))
        return TraceCall(
            tool=tool, args=arguments(block.get("input")), call_id=self._ids.opened(text(block.get("id")), tool),
            round_id=f"turn-{self._turns}", at_us=at_us,
        )  # fmt: skip

    def _answer(self, block: Json, at_us: int | None) -> Iterator[Event]:
        call_id = self._ids.answered(text(block.get("tool_use_id")))
        if not call_id:
            self._skips.add("result without a call")
            return
        value = blocks_value(block.get("content"))
        failed = block.get("is_error") is True
        said = value if isinstance(value, str) else ""
        yield TraceResult(
            call_id=call_id, value=value, error_class=ErrorClass.TOOL_FAILED if failed else None,
            message=said[:2_000] if failed else None, at_us=at_us,
        )  # fmt: skip


def _has_blocks(messages: list[Json]) -> bool:
    return any(
        text(block.get("type")) in _BLOCKS for message in messages for block in records_in(message.get("content"))
    )


def _sniff(source: Source) -> int:
    if source.shape not in ("lines", "document"):
        return 0
    found = [item for item in source.head_records if isinstance(item, dict)]
    inner = [message for item in found for message in records_in(item.get("messages"))]
    plain = [item for item in found if item.get("role") in ("user", "assistant")]
    return 85 if _has_blocks(inner) or _has_blocks(plain) else 0


def _read(source: Source, skips: Skips) -> Iterator[Item]:
    head = RunHead(run_id=source.stem, source=source.name, format=NAME)
    conversation = BlockConversation(skips)
    runs = 0
    for item in source.records(skips):
        messages = item.get("messages")
        if not isinstance(messages, list):
            for event in conversation.events(item):
                yield head, event
            continue
        given = first_of(item, "run_id", "id", "session_id")
        run_id = str(given) if isinstance(given, str | int) else source.stem if runs == 0 else f"{source.stem}#{runs}"
        own, inner = RunHead(run_id=run_id, source=source.name, format=NAME), BlockConversation(skips)
        runs += 1
        for message in records_in(messages):
            for event in inner.events(message):
                yield own, event
        yield own, RunEnd()
    if not runs:
        yield head, RunEnd()


FORMAT: Final = Format(name=NAME, title="Anthropic messages", tried=True, sniff=_sniff, read=_read)
