"""OpenHands events: actions and observations with ids, and totals that only grow.

The statistics of a conversation are cumulative over all its models: what they grew by is one turn's usage. A turn is
an action that came with a new answer of the model. Read from the newer `kind` events and the older `action` /
`observation` ones, as lines or as one array.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

from endstop.core.model import Usage
from endstop.core.reasons import ErrorClass
from endstop.replay.fields import (
    Json,
    arguments,
    blocks_value,
    count,
    first_of,
    name,
    nanos_of_dollars,
    record,
    records_in,
    text,
    time_us,
)
from endstop.replay.format import Format
from endstop.replay.seen import Seen
from endstop.replay.trace import (
    Event,
    Item,
    RunEnd,
    RunHead,
    Skips,
    TraceCall,
    TraceResult,
    TraceTurn,
    TraceUsage,
    UserInput,
)

if TYPE_CHECKING:
    from endstop.replay.source import Source

__all__ = ["FORMAT"]

NAME: Final = "openhands"
_KINDS: Final = frozenset(
    {
        "ActionEvent", "ObservationEvent", "MessageEvent", "AgentErrorEvent", "SystemPromptEvent",
        "UserRejectObservation",
        "ConversationStateUpdateEvent", "Condensation", "CondensationRequest", "PauseEvent", "TokenEvent",
        "CondensationSummaryEvent", "ConversationErrorEvent", "StreamingDeltaEvent",
    }
)  # fmt: skip
_NO_CALLS: Final = frozenset({"message", "system", "change_agent_state", "null", "finish", "recall", "think"})


def _sniff(source: Source) -> int:
    found = [item for item in source.head_records if isinstance(item, dict)]
    if any(text(item.get("kind")) in _KINDS for item in found):
        return 95
    old = [item for item in found if item.get("source") in ("agent", "user", "environment")]
    return 80 if any("action" in item for item in old) and any("observation" in item for item in old) else 0


class _Events:
    """The events of one conversation."""

    def __init__(self, skips: Skips) -> None:
        self._skips = skips
        self._totals: dict[str, tuple[Usage, int]] = {}
        self._responses = Seen()
        self._turns = 0

    def events(self, item: Json) -> Iterator[Event]:
        """The events of the next record."""
        at_us = time_us(item.get("timestamp"))
        kind = text(item.get("kind"))
        if not kind:
            yield from self._older(item, at_us)
        elif kind == "ActionEvent":
            yield from self._action(item, at_us)
        elif kind in ("ObservationEvent", "AgentErrorEvent", "UserRejectObservation"):
            yield from self._observation(item, kind, at_us)
        elif kind == "MessageEvent":
            if item.get("source") == "user":
                yield UserInput(at_us=at_us)
            else:
                yield from self._turn(item, at_us)
        elif kind == "ConversationStateUpdateEvent":
            if item.get("key") in ("stats", "full_state"):
                value = record(item.get("value"))
                yield from self._counted(record(value.get("stats")) or value, at_us)
        elif kind not in _KINDS:
            self._skips.add(f"event of kind {kind}"[:60])

    def _turn(self, item: Json, at_us: int | None) -> Iterator[Event]:
        response = text(item.get("llm_response_id")) or text(item.get("id"))
        if self._responses.add(response):
            self._turns += 1
            yield TraceTurn(at_us=at_us)

    def _action(self, item: Json, at_us: int | None) -> Iterator[Event]:
        yield from self._turn(item, at_us)
        asked = record(item.get("tool_call"))
        given = item.get("action")
        if not isinstance(given, dict):
            # The arguments did not pass the tool's schema: the model's own text is all there is.
            given = first_of(asked, "arguments") or record(asked.get("function")).get("arguments")
        args = {field: value for field, value in given.items() if field != "kind"} if isinstance(given, dict) else given
        yield TraceCall(
            tool=name(item.get("tool_name")), args=arguments(args),
            call_id=text(item.get("tool_call_id")) or text(item.get("id")), round_id=f"turn-{self._turns}", at_us=at_us,
        )  # fmt: skip

    def _observation(self, item: Json, kind: str, at_us: int | None) -> Iterator[Event]:
        call_id = text(item.get("tool_call_id")) or text(item.get("action_id"))
        seen = item.get("observation")
        found = record(seen)
        value = blocks_value(found.get("content")) if "content" in found else seen
        error_class: ErrorClass | None = None
        said = value if isinstance(value, str) else ""
        if kind == "UserRejectObservation":
            error_class, said = ErrorClass.DENIED, text(item.get("rejection_reason"))
        elif kind == "AgentErrorEvent":
            error_class, said = ErrorClass.SCHEMA, text(item.get("error"))
        elif found.get("is_error") is True or found.get("error"):
            error_class, said = ErrorClass.TOOL_FAILED, said or text(found.get("error"))
        yield TraceResult(
            call_id=call_id, value=value, error_class=error_class, message=said[:2_000] if error_class else None,
            at_us=at_us,
        )  # fmt: skip

    def _counted(self, stats: Json, at_us: int | None) -> Iterator[Event]:
        for label, metrics in record(stats.get("usage_to_metrics")).items():
            found = record(metrics)
            raw = record(found.get("accumulated_token_usage"))
            usage = Usage(
                input_tokens=count(raw.get("prompt_tokens")), output_tokens=count(raw.get("completion_tokens")),
                cache_read_tokens=count(raw.get("cache_read_tokens")),
                cache_write_tokens=count(raw.get("cache_write_tokens")),
                reasoning_tokens=count(raw.get("reasoning_tokens")),
            )  # fmt: skip
            nanos = nanos_of_dollars(found.get("accumulated_cost")) or 0
            before, spent = self._totals.get(label, (Usage(), 0))
            self._totals[label] = (usage, nanos)
            more = _growth(usage, before)
            if more.total_tokens or nanos > spent:
                yield TraceUsage(usage=more, spend_nanos=max(0, nanos - spent), at_us=at_us)

    def _older(self, item: Json, at_us: int | None) -> Iterator[Event]:
        action, observation = item.get("action"), item.get("observation")
        meta = record(item.get("tool_call_metadata"))
        if isinstance(action, str):
            if action == "message" and item.get("source") == "user":
                yield UserInput(at_us=at_us)
            if item.get("source") != "agent" or action in _NO_CALLS:
                return
            self._turns += 1
            yield TraceTurn(at_us=at_us)
            yield TraceCall(
                tool=name(meta.get("function_name") or action), args=arguments(item.get("args")),
                call_id=str(item.get("id", "")), round_id=f"turn-{self._turns}", at_us=at_us,
            )  # fmt: skip
        elif isinstance(observation, str) and item.get("cause") is not None:
            code = record(record(item.get("extras")).get("metadata")).get("exit_code")
            said = text(item.get("content"))
            failed = observation == "error" or (isinstance(code, int) and code not in (0, -1) and bool(said.strip()))
            yield TraceResult(
                call_id=str(item["cause"]), value=said, error_class=ErrorClass.TOOL_FAILED if failed else None,
                message=said[:2_000] if failed else None, at_us=at_us,
            )  # fmt: skip


def _growth(now: Usage, before: Usage) -> Usage:
    """What totals have grown by; totals that fell began anew."""
    if now.total_tokens < before.total_tokens:
        return now
    return Usage(
        input_tokens=max(0, now.input_tokens - before.input_tokens),
        output_tokens=max(0, now.output_tokens - before.output_tokens),
        cache_read_tokens=max(0, now.cache_read_tokens - before.cache_read_tokens),
        cache_write_tokens=max(0, now.cache_write_tokens - before.cache_write_tokens),
        reasoning_tokens=max(0, now.reasoning_tokens - before.reasoning_tokens),
    )


def _read(source: Source, skips: Skips) -> Iterator[Item]:
    head = RunHead(run_id=source.stem, source=source.name, format=NAME)
    events = _Events(skips)
    wrapped = records_in(record(source.document).get("events")) if isinstance(source.document, dict) else []
    for item in wrapped or source.records(skips):
        for event in events.events(item):
            yield head, event
    yield head, RunEnd()


FORMAT: Final = Format(name=NAME, title="OpenHands events", tried=True, sniff=_sniff, read=_read)
