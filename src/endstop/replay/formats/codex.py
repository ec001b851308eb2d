"""Codex rollouts: a JSON record a line, each with a `type` and a `payload`.

Token counts come twice, as the last turn's and as a running total: the difference of totals is taken, so that events
that repeat a total add nothing. A person's words stand as `user_message` events; what the host writes into user items
(environment, instructions) is none.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

from endstop.core.model import Usage
from endstop.replay.fields import Json, record, text, time_us
from endstop.replay.format import Format
from endstop.replay.formats.openai_responses import ItemStream, responses_usage
from endstop.replay.trace import Event, Item, RunEnd, RunHead, Skips, TraceUsage, UserInput

if TYPE_CHECKING:
    from endstop.replay.source import Source

__all__ = ["FORMAT"]

NAME: Final = "codex"
_TYPES: Final = frozenset({"session_meta", "response_item", "event_msg", "turn_context", "compacted", "world_state"})


def _sniff(source: Source) -> int:
    found = [item for item in source.head_records if isinstance(item, dict)]
    known = [item for item in found if text(item.get("type")) in _TYPES and isinstance(item.get("payload"), dict)]
    return 95 if known and len(known) * 2 >= len(found) else 0


class _Rollout:
    """The events of one rollout, record by record."""

    def __init__(self, skips: Skips) -> None:
        self._skips = skips
        self._stream = ItemStream(skips)
        self._total = Usage()

    def events(self, item: Json) -> Iterator[Event]:
        """The events of the next record."""
        kind, payload = text(item.get("type")), record(item.get("payload"))
        at_us = time_us(item.get("timestamp"))
        if kind == "response_item":
            yield from self._stream.events(payload, at_us, person=False)
        elif kind == "turn_context":
            self._stream.model = text(payload.get("model")) or self._stream.model
        elif kind == "event_msg":
            if payload.get("type") == "user_message":
                yield UserInput(at_us=at_us)
            elif payload.get("type") == "token_count":
                yield from self._counted(record(payload.get("info")), at_us)
        elif kind not in _TYPES:
            self._skips.add(f"record of type {kind}"[:60])

    def rest(self) -> Iterator[Event]:
        """What was counted after the last turn's items."""
        usage = self._stream.left()
        if usage is not None:
            yield TraceUsage(usage=usage)

    def _counted(self, info: Json, at_us: int | None) -> Iterator[Event]:
        total = responses_usage(info.get("total_token_usage"))
        if total is None:
            usage = responses_usage(info.get("last_token_usage"))
        else:
            usage, self._total = _difference(total, self._total), total
        if usage is None or not usage.total_tokens:
            return
        # Told before or after the turn's own items, by the version that wrote the file.
        if self._stream.in_turn:
            yield TraceUsage(usage=usage, at_us=at_us)
        else:
            self._stream.hold(usage)


def _difference(total: Usage, before: Usage) -> Usage:
    """What a running total has grown by; one that fell began anew."""
    if total.total_tokens < before.total_tokens:
        return total
    return Usage(
        input_tokens=max(0, total.input_tokens - before.input_tokens),
        output_tokens=max(0, total.output_tokens - before.output_tokens),
        cache_read_tokens=max(0, total.cache_read_tokens - before.cache_read_tokens),
        reasoning_tokens=max(0, total.reasoning_tokens - before.reasoning_tokens),
    )


def _read(source: Source, skips: Skips) -> Iterator[Item]:
    head = RunHead(run_id=source.stem, source=source.name, format=NAME)
    rollout = _Rollout(skips)
    for item in source.records(skips):
        for event in rollout.events(item):
            yield head, event
    for event in rollout.rest():
        yield head, event
    yield head, RunEnd()


FORMAT: Final = Format(name=NAME, title="Codex rollouts", tried=True, sniff=_sniff, read=_read)
