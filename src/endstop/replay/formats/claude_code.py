"""Claude Code sessions: a JSON record a line, sub-agents in files of their own beside it.

One message of the API stands in several lines that repeat its id and its usage: a turn is counted once a message id,
and of its output tokens the largest figure (the first ones are a stream's beginning, so even that is a lower bound).
A resumed session repeats lines under new ids: calls, results and the user's words are taken once.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Final

from endstop.core.model import Usage
from endstop.core.reasons import ErrorClass
from endstop.replay.fields import Json, arguments, blocks_value, count, name, record, records_in, text, time_us
from endstop.replay.format import Format
from endstop.replay.seen import Seen
from endstop.replay.source import Source
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
    from collections.abc import Iterable

__all__ = ["FORMAT", "subagent_files"]

NAME: Final = "claude_code"
SUBAGENTS_MAX: Final = 64
_QUIET_TYPES: Final = frozenset(
    {
        "file-history-snapshot", "summary", "progress", "queue-operation", "system", "attachment", "last-prompt",
        "ai-title", "custom-title", "agent-name", "pr-link", "mode", "permission-mode", "tag", "x-error",
    }
)  # fmt: skip
_INJECTED: Final = (
    "[Request interrupted", "<local-command", "<system-reminder", "<task-notification", "<bash-", "Caveat:",
    "This session is being continued from",
)  # fmt: skip
_REFUSED_BY_PERSON: Final = ("The user doesn't want", "[Request interrupted", "The user rejected")


def subagent_files(path: Path) -> list[Path]:
    """The files of the sub-agents that ran inside the session at `path`."""
    folder = path.with_suffix("") / "subagents"
    return sorted(folder.glob("agent-*.jsonl")) if folder.is_dir() else []


def _records_of(source: Source, skips: Skips) -> Iterable[Json]:
    wrapped = record(source.document).get("loglines")
    return records_in(wrapped) if isinstance(wrapped, list) else source.records(skips)


def _sniff(source: Source) -> int:
    found: list[Json] = [item for item in source.head_records if isinstance(item, dict)]
    if isinstance(source.document, dict) and isinstance(source.document.get("loglines"), list):
        found = records_in(source.document["loglines"])[:40]
    for item in found:
        if item.get("type") not in ("user", "assistant", *_QUIET_TYPES):
            continue
        message = record(item.get("message"))
        if message.get("role") in ("user", "assistant") and ("uuid" in item or "timestamp" in item):
            return 95
        if item.get("type") in ("summary", "file-history-snapshot") and ("leafUuid" in item or "snapshot" in item):
            return 85
    return 0


class _Session:
    """The events of one session, record by record, sub-agents included."""

    def __init__(self, skips: Skips) -> None:
        self._skips = skips
        self._calls = Seen()
        self._answers = Seen()
        self._said = Seen()
        self._messages = Seen()
        self._last = ""
        self._last_output = 0

    def events(self, item: Json) -> Iterator[Event]:
        """The events of the next record."""
        kind = text(item.get("type"))
        if kind == "assistant":
            yield from self._assistant(item)
        elif kind == "user":
            yield from self._user(item)
        elif kind not in _QUIET_TYPES:
            self._skips.add(f"record of type {kind}"[:60])

    def _assistant(self, item: Json) -> Iterator[Event]:
        message = record(item.get("message"))
        agent = _agent(item)
        at_us = time_us(item.get("timestamp"))
        message_id = text(message.get("id")) or text(item.get("uuid"))
        yield from self._turn(message, message_id, agent, at_us)
        for block in records_in(message.get("content")):
            if block.get("type") != "tool_use":
                continue
            call_id = text(block.get("id"))
            if call_id and not self._calls.add(call_id):
                self._skips.add("call repeated after a resume")
                continue
            yield TraceCall(
                tool=name(block.get("name")), args=arguments(block.get("input")), call_id=call_id,
                round_id=message_id or None, agent=agent, at_us=at_us,
            )  # fmt: skip

    def _turn(self, message: Json, message_id: str, agent: str, at_us: int | None) -> Iterator[Event]:
        raw = record(message.get("usage"))
        usage = _usage(raw) if raw else None
        if message_id != self._last or not message_id:
            if not message_id or self._messages.add(message_id):
                self._last, self._last_output = message_id, 0 if usage is None else usage.output_tokens
                yield TraceTurn(agent=agent, model=text(message.get("model")), usage=usage, at_us=at_us)
        elif usage is not None and usage.output_tokens > self._last_output:
            more = Usage(output_tokens=usage.output_tokens - self._last_output)
            self._last_output = usage.output_tokens
            yield TraceUsage(usage=more, at_us=at_us)

    def _user(self, item: Json) -> Iterator[Event]:
        content = record(item.get("message")).get("content")
        at_us = time_us(item.get("timestamp"))
        blocks = records_in(content)
        answered = False
        for block in blocks:
            if block.get("type") == "tool_result":
                answered = True
                yield from self._answer(item, block, at_us)
        if not answered and self._is_person(item, content, blocks):
            yield UserInput(at_us=at_us)

    def _answer(self, item: Json, block: Json, at_us: int | None) -> Iterator[Event]:
        call_id = text(block.get("tool_use_id"))
        if call_id in self._answers:
            self._skips.add("result repeated after a resume")
            return
        if call_id not in self._calls:
            self._skips.add("result without a call")
            return
        self._answers.add(call_id)
        value = blocks_value(block.get("content"))
        failed = block.get("is_error") is True
        said = value if isinstance(value, str) else ""
        yield TraceResult(
            call_id=call_id, value=value, error_class=_class_of(said) if failed else None,
            message=said[:2_000] if failed else None, agent=_agent(item), at_us=at_us,
        )  # fmt: skip

    def _is_person(self, item: Json, content: object, blocks: list[Json]) -> bool:
        if item.get("isMeta") or item.get("isSidechain") or item.get("isCompactSummary"):
            return False
        said = content if isinstance(content, str) else next((text(b.get("text")) for b in blocks if b.get("text")), "")
        if not said and not blocks:
            return False
        return not said.startswith(_INJECTED) and self._said.add((item.get("timestamp"), said[:200]))


def _agent(item: Json) -> str:
    if item.get("isSidechain"):
        return name(item.get("agentId") or "sub-agent")
    return "main"


def _usage(raw: Json) -> Usage:
    read, written = count(raw.get("cache_read_input_tokens")), count(raw.get("cache_creation_input_tokens"))
    return Usage(
        input_tokens=min(count(raw.get("input_tokens")) + read + written, 2**53 - 1),
        output_tokens=count(raw.get("output_tokens")), cache_read_tokens=read, cache_write_tokens=written,
    )  # fmt: skip


def _class_of(said: str) -> ErrorClass:
    """The host marks failures by fixed words of its own at the head of the text."""
    if said.startswith(_REFUSED_BY_PERSON):
        return ErrorClass.DENIED
    head = said[:200]
    if "InputValidationError" in head:
        return ErrorClass.SCHEMA
    if "No such tool available" in head:
        return ErrorClass.UNKNOWN_TOOL
    return ErrorClass.TOOL_FAILED


def _timed(records: Iterable[Json], file: int) -> Iterator[tuple[str, int, int, Json]]:
    """Records with what they are merged by: their own ISO time, or that of the record before."""
    at = ""
    for number, item in enumerate(records):
        given = item.get("timestamp")
        at = given if isinstance(given, str) and given > at else at
        yield at, file, number, item


def _read(source: Source, skips: Skips) -> Iterator[Item]:
    head = RunHead(run_id=source.stem, source=source.name, format=NAME)
    session = _Session(skips)
    files = subagent_files(source.path)
    if len(files) > SUBAGENTS_MAX:
        skips.add("sub-agent file beyond the limit", len(files) - SUBAGENTS_MAX)
    records: Iterator[Json] = iter(_records_of(source, skips))
    if files:
        streams = [_timed(records, 0)]
        streams += [_timed(Source(file).records(skips), n) for n, file in enumerate(files[:SUBAGENTS_MAX], 1)]
        records = (item for _, _, _, item in heapq.merge(*streams))
    for item in records:
        for event in session.events(item):
            yield head, event
    yield head, RunEnd()


FORMAT: Final = Format(
    name=NAME, title="Claude Code sessions (with sub-agent files)", tried=True, sniff=_sniff, read=_read
)
