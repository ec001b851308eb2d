"""Gemini CLI chats: recorded sessions (messages with `toolCalls`) and checkpoints (contents with parts)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

from endstop.core.reasons import ErrorClass
from endstop.replay.fields import Json, arguments, first_of, name, record, records_in, text, time_us
from endstop.replay.format import Format
from endstop.replay.formats.google_adk import PartStream, gemini_usage
from endstop.replay.seen import Seen
from endstop.replay.trace import (
    Event,
    Item,
    RunEnd,
    RunHead,
    Skips,
    TraceCall,
    TraceLost,
    TraceResult,
    TraceTurn,
    UserInput,
)

if TYPE_CHECKING:
    from endstop.replay.source import Source

__all__ = ["FORMAT"]

NAME: Final = "gemini_cli"
_QUIET: Final = frozenset({"info", "warning", "error", "about", "stats"})


def _messages(source: Source) -> list[Json]:
    if isinstance(source.document, dict):
        return records_in(first_of(source.document, "messages", "history"))
    return [item for item in source.head_records if isinstance(item, dict)]


def _sniff(source: Source) -> int:
    messages = _messages(source)
    if any(message.get("type") == "gemini" for message in messages):
        return 93
    parts = [
        part
        for message in messages
        if message.get("role") in ("user", "model")
        for part in records_in(message.get("parts"))
    ]
    return 75 if any("functionCall" in part or "functionResponse" in part for part in parts) else 0


def _read(source: Source, skips: Skips) -> Iterator[Item]:
    run_id = text(record(source.document).get("sessionId")) or source.stem
    head = RunHead(run_id=run_id, source=source.name, format=NAME)
    records = _messages(source) if isinstance(source.document, dict) else source.records(skips)
    stream, seen = PartStream(skips), Seen()
    turns = 0
    for message in records:
        if "parts" in message and "role" in message:
            made = message.get("role") == "model"
            for event in stream.events(
                records_in(message.get("parts")), model=made, person=not made, agent="main", usage=None, at_us=None
            ):
                yield head, event
        elif message.get("type") == "gemini":
            turns += 1
            for event in _model_events(message, turns, seen, skips):
                yield head, event
        elif message.get("type") == "user":
            yield head, UserInput(at_us=time_us(message.get("timestamp")))
        elif text(message.get("type")) not in _QUIET and "sessionId" not in message:
            skips.add("record that is no message")
    yield head, RunEnd()


def _model_events(message: Json, turns: int, seen: Seen, skips: Skips) -> Iterator[Event]:
    at_us = time_us(message.get("timestamp"))
    if not seen.add(text(message.get("id")) or f"message {turns}"):
        # A message is written again when it grows.
        skips.add("message written again")
        return
    yield TraceTurn(model=text(message.get("model")), usage=gemini_usage(message.get("tokens")), at_us=at_us)
    for number, call in enumerate(records_in(message.get("toolCalls"))):
        call_id = text(call.get("id")) or f"turn-{turns}-{number}"
        when_us = time_us(call.get("timestamp"))
        yield TraceCall(
            tool=name(call.get("name")), args=arguments(call.get("args")), call_id=call_id, round_id=f"turn-{turns}",
            at_us=at_us,
        )  # fmt: skip
        if "result" not in call and call.get("status") not in ("error", "cancelled"):
            yield TraceLost(call_id=call_id)
            continue
        yield _result(call, call_id, when_us)


def _result(call: Json, call_id: str, at_us: int | None) -> Event:
    parts = records_in(call.get("result"))
    answers = [record(part.get("functionResponse")).get("response") for part in parts if "functionResponse" in part]
    value: object = answers[0] if len(answers) == 1 else answers or call.get("result")
    failed = {"error": ErrorClass.TOOL_FAILED, "cancelled": ErrorClass.DENIED}.get(text(call.get("status")))
    said = text(record(value).get("error")) or text(call.get("resultDisplay"))
    return TraceResult(
        call_id=call_id, value=value, error_class=failed, message=said[:2_000] if failed else None, at_us=at_us
    )


FORMAT: Final = Format(name=NAME, title="Gemini CLI chats", tried=False, sniff=_sniff, read=_read)
