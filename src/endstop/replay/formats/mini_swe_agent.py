"""mini-swe-agent trajectories: one fenced shell command a message, or `tool_calls` in newer versions.

The user's messages after the first are the harness's: `<returncode>…</returncode><output>…</output>`. An exit code
with words is a failure; one without (a search that found nothing) is an answer.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

from endstop.core.reasons import ErrorClass
from endstop.replay.fields import Json, nanos_of_dollars, record, records_in, text, time_us
from endstop.replay.format import Format
from endstop.replay.formats.openai_chat import Conversation, chat_usage
from endstop.replay.trace import Event, Item, RunEnd, RunHead, Skips, TraceCall, TraceResult, TraceTurn, TraceUsage

if TYPE_CHECKING:
    from endstop.replay.source import Source

__all__ = ["FORMAT"]

NAME: Final = "mini_swe_agent"
TOOL: Final = "bash"
_BLOCK: Final = re.compile(r"```(?:bash|mswea_bash_command|sh)\s*\n(.*?)\n?```", re.DOTALL)
_ANSWER: Final = re.compile(r"\s*<returncode>(-?\d+)</returncode>\s*(?:<output>\n?(.*?)\n?</output>)?", re.DOTALL)
_EXCEPTION: Final = re.compile(r"<exception>(.*?)</exception>", re.DOTALL)


def _messages(source: Source) -> list[Json]:
    document = source.document
    return records_in(record(document).get("messages") if isinstance(document, dict) else document)


def _sniff(source: Source) -> int:
    document = record(source.document)
    if text(document.get("trajectory_format")).startswith("mini-swe-agent"):
        return 96
    messages = _messages(source)
    for message in messages:
        if message.get("role") == "user" and _ANSWER.match(text(message.get("content"))):
            return 90
    return 0


def _read(source: Source, skips: Skips) -> Iterator[Item]:
    info = record(record(source.document).get("info"))
    head = RunHead(run_id=source.stem, source=source.name, format=NAME, outcome=text(info.get("exit_status")))
    conversation = _Conversation(skips)
    for message in _messages(source):
        for event in conversation.events(message):
            yield head, event
    stats = record(info.get("model_stats"))
    spend_nanos = nanos_of_dollars(stats.get("instance_cost"))
    if spend_nanos:
        from endstop.core.model import Usage

        yield head, TraceUsage(usage=Usage(), spend_nanos=spend_nanos)
    yield head, RunEnd()


class _Conversation:
    """The events of one run, message by message."""

    def __init__(self, skips: Skips) -> None:
        self._chat = Conversation(skips)
        self._skips = skips
        self._steps = 0
        self._open = ""

    def events(self, message: Json) -> Iterator[Event]:
        """The events of the next message."""
        said = message.get("content")
        if message.get("tool_calls") or message.get("role") == "tool":
            for event in self._chat.events(message):
                yield _judged(event) if isinstance(event, TraceResult) else event
        elif message.get("role") == "assistant":
            yield from self._asked(message, text(said))
        elif message.get("role") == "user" and self._open:
            yield _answer(self._open, text(said))
            self._open = ""

    def _asked(self, message: Json, said: str) -> Iterator[Event]:
        at_us = time_us(record(message.get("extra")).get("timestamp"))
        usage = chat_usage(record(record(message.get("extra")).get("response")).get("usage"))
        yield TraceTurn(usage=usage, at_us=at_us)
        blocks = _BLOCK.findall(said)
        if not blocks:
            return
        if len(blocks) > 1:
            # The harness refuses such a message; its answer belongs to none of the blocks.
            self._skips.add("message with several commands")
            return
        self._steps += 1
        self._open = f"step-{self._steps}"
        yield TraceCall(tool=TOOL, args={"command": blocks[0]}, call_id=self._open, round_id=self._open, at_us=at_us)


def _judged(result: TraceResult) -> TraceResult:
    return _answer(result.call_id, result.value) if isinstance(result.value, str) else result


def _answer(call_id: str, said: str) -> TraceResult:
    found = _ANSWER.match(said)
    broken = _EXCEPTION.search(said)
    if broken:
        return TraceResult(call_id=call_id, value=said, error_class=ErrorClass.TOOL_FAILED, message=broken[1])
    if found is None:
        return TraceResult(call_id=call_id, value=said)
    output = found[2] if found[2] is not None else said[found.end() :].strip()
    if found[1] != "0" and output.strip():
        return TraceResult(call_id=call_id, value=output, error_class=ErrorClass.TOOL_FAILED, message=output[:2_000])
    return TraceResult(call_id=call_id, value=output)


FORMAT: Final = Format(name=NAME, title="mini-swe-agent trajectories", tried=True, sniff=_sniff, read=_read)
