"""OpenAI Responses items: `function_call` and `function_call_output`, and the calls that the provider runs itself.

Read from a list of items, from response objects (`output`, with their `input` where it was kept), and from one item
or response a line. Items carry no usage; responses do.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

from endstop.core.reasons import ErrorClass
from endstop.replay.fields import (
    Json,
    arguments,
    blocks_value,
    count,
    first_of,
    items,
    json_value,
    name,
    record,
    records_in,
    text,
    time_us,
    usage_of,
)
from endstop.replay.format import CallIds, Format
from endstop.replay.seen import Seen
from endstop.replay.trace import Event, Item, RunEnd, RunHead, Skips, TraceCall, TraceResult, TraceTurn, UserInput

if TYPE_CHECKING:
    from endstop.core.model import Usage
    from endstop.replay.source import Source

__all__ = ["FORMAT", "ItemStream", "responses_usage"]

NAME: Final = "openai_responses"
SECONDS_MAX: Final = 10**7
_CALLS: Final = frozenset(
    {"function_call", "custom_tool_call", "local_shell_call", "computer_call", "shell_call", "apply_patch_call"}
)
_OUTPUTS: Final = frozenset({f"{kind}_output" for kind in _CALLS})
# The provider ran these itself, so call and answer stand in one item.
_HOSTED: Final = frozenset(
    {"web_search_call", "file_search_call", "code_interpreter_call", "image_generation_call", "mcp_call"}
)
_ITEM_TYPES: Final = _CALLS | _OUTPUTS | _HOSTED | {"message", "reasoning", "mcp_list_tools", "item_reference"}
_TOLD: Final = re.compile(
    r"(?:Chunk ID: [^\n]*\n)?(?:Exit code: (?P<a>-?\d+)\n)?(?:Wall time: (?P<s>[\d.]+) seconds\n)"
    r"(?:Process exited with code (?P<b>-?\d+)\n)?(?:(?:Total output lines|Original token count): [^\n]*\n)*Output:\n?"
)


def responses_usage(value: object) -> Usage | None:
    """The `usage` of a response, or one count of a Codex rollout."""
    found = record(value)
    cached = first_of(record(found.get("input_tokens_details")), "cached_tokens")
    reasoning = first_of(record(found.get("output_tokens_details")), "reasoning_tokens")
    return usage_of(
        input_tokens=found.get("input_tokens"), output_tokens=found.get("output_tokens"),
        cache_read=first_of(found, "cached_input_tokens") if cached is None else cached,
        reasoning=first_of(found, "reasoning_output_tokens") if reasoning is None else reasoning,
    )  # fmt: skip


class ItemStream:
    """The events of one run's items. What the model says between two inputs is one turn."""

    def __init__(self, skips: Skips, *, model: str = "", agent: str = "main") -> None:
        self._skips = skips
        self._ids = CallIds()
        self._seen = Seen()
        self._turns = 0
        self._in_turn = False
        self._held: Usage | None = None
        self.model = model
        self.agent = agent
        self.last_person = ""

    @property
    def in_turn(self) -> bool:
        """Whether the model has spoken since the last input."""
        return self._in_turn

    def hold(self, usage: Usage) -> None:
        """Keep the usage that was told before its turn."""
        self._held = usage if self._held is None else _sum(self._held, usage)

    def left(self) -> Usage | None:
        """Usage that no turn has taken, at the end of a recording."""
        held, self._held = self._held, None
        return held

    def events(self, item: Json, at_us: int | None = None, *, person: bool = True) -> Iterator[Event]:
        """The events of the next item. `person` False: user messages of this stream are not to be trusted as such."""
        kind = text(item.get("type")) or ("message" if "role" in item else "")
        if kind == "message":
            if item.get("role") == "assistant":
                yield from self._turn(at_us)
                return
            self._in_turn = False
            if item.get("role") == "user" and person:
                yield UserInput(at_us=at_us)
        elif kind == "reasoning":
            yield from self._turn(at_us)
        elif kind in _CALLS:
            yield from self._call(item, kind, at_us)
        elif kind in _OUTPUTS:
            yield from self._output(item, at_us)
        elif kind in _HOSTED:
            yield from self._hosted(item, kind, at_us)
        elif kind not in _ITEM_TYPES and kind not in ("ghost_snapshot", "compaction"):
            self._skips.add(f"item of type {kind}"[:60])

    def _turn(self, at_us: int | None) -> Iterator[Event]:
        if self._in_turn:
            return
        self._in_turn = True
        self._turns += 1
        usage, self._held = self._held, None
        yield TraceTurn(agent=self.agent, model=self.model, usage=usage, at_us=at_us)

    def _call(self, item: Json, kind: str, at_us: int | None) -> Iterator[Event]:
        call_id = text(item.get("call_id")) or text(item.get("id"))
        if call_id and not self._seen.add(call_id):
            self._skips.add("call repeated after a resume")
            return
        yield from self._turn(at_us)
        tool = name(item.get("name") or kind.removesuffix("_call"))
        given = first_of(item, "arguments", "input", "action", "operation")
        # A custom tool takes free text, which is no broken JSON.
        args = {"input": given} if kind == "custom_tool_call" and isinstance(given, str) else arguments(given)
        yield TraceCall(
            tool=tool, args=args, call_id=self._ids.opened(call_id, tool), round_id=f"turn-{self._turns}",
            agent=self.agent, at_us=at_us,
        )  # fmt: skip

    def _output(self, item: Json, at_us: int | None) -> Iterator[Event]:
        self._in_turn = False
        call_id = self._ids.answered(text(item.get("call_id")))
        if not call_id:
            self._skips.add("result without a call")
            return
        if not self._seen.add(("answer", call_id)):
            self._skips.add("result repeated after a resume")
            return
        yield told_result(call_id, item.get("output"), at_us)

    def _hosted(self, item: Json, kind: str, at_us: int | None) -> Iterator[Event]:
        yield from self._turn(at_us)
        call_id = self._ids.opened(text(item.get("id")), kind)
        tool = name(item.get("name") or kind.removesuffix("_call"))
        given = first_of(item, "arguments", "action", "queries", "code")
        yield TraceCall(
            tool=tool, args=arguments(given) if kind == "mcp_call" else {"input": given}, call_id=call_id,
            round_id=f"turn-{self._turns}", agent=self.agent, at_us=at_us,
        )  # fmt: skip
        self._ids.answered(call_id)
        answer = first_of(item, "output", "results", "outputs", "result")
        error = item.get("error")
        if error:
            said = text(error) or text(record(error).get("message")) or "error"
            yield TraceResult(
                call_id=call_id, value=answer, error_class=ErrorClass.TOOL_FAILED, message=said, at_us=at_us
            )
        elif answer is not None:
            yield TraceResult(call_id=call_id, value=answer, at_us=at_us)
        else:
            self._skips.add("hosted call without its answer")


def told_result(call_id: str, output: object, at_us: int | None) -> TraceResult:
    """An output as a result: the shell's wrapping (exit code, time) is taken off; a failure needs a code and words."""
    value, code, seconds = output, 0, 0.0
    if isinstance(output, list):
        value = blocks_value(output)
    elif isinstance(output, str):
        wrapped = json_value(output) if output.startswith("{") else None
        told = _TOLD.match(output)
        if isinstance(wrapped, dict) and "output" in wrapped and isinstance(wrapped.get("metadata"), dict):
            value = wrapped["output"]
            code, seconds = _shell_facts(wrapped["metadata"])
        elif told:
            value = output[told.end() :]
            code, seconds = int(told["a"] or told["b"] or 0), float(told["s"]) if told["s"].count(".") < 2 else 0.0  # noqa: PLR2004
    failed = code != 0 and isinstance(value, str) and bool(value.strip())
    return TraceResult(
        call_id=call_id, value=value, error_class=ErrorClass.TOOL_FAILED if failed else None,
        message=value[:2_000] if failed and isinstance(value, str) else None, at_us=at_us,
        took_ms=int(seconds * 1_000) if 0 < seconds < SECONDS_MAX else None,
    )  # fmt: skip


def _shell_facts(metadata: Json) -> tuple[int, float]:
    code, seconds = metadata.get("exit_code"), metadata.get("duration_seconds")
    return (
        code if isinstance(code, int) else 0,
        float(seconds) if isinstance(seconds, int | float) else 0.0,
    )


def _sum(one: Usage, other: Usage) -> Usage:
    return Usage(
        input_tokens=count(one.input_tokens + other.input_tokens),
        output_tokens=count(one.output_tokens + other.output_tokens),
        cache_read_tokens=count(one.cache_read_tokens + other.cache_read_tokens),
        reasoning_tokens=count(one.reasoning_tokens + other.reasoning_tokens),
    )


def _is_response(item: Json) -> bool:
    return item.get("object") == "response" or (
        "output" in item and "model" in item and isinstance(item["output"], list)
    )


def _sniff(source: Source) -> int:
    if source.shape not in ("lines", "document"):
        return 0
    found = [item for item in source.head_records if isinstance(item, dict)]
    if isinstance(source.document, dict):
        found = [source.document, *records_in(source.document.get("items")), *records_in(source.document.get("input"))]
    if any(_is_response(item) for item in found):
        return 75
    kinds = {text(item.get("type")) for item in found}
    return 70 if kinds & (_CALLS | _OUTPUTS | _HOSTED) else 0


def _read(source: Source, skips: Skips) -> Iterator[Item]:
    head = RunHead(run_id=source.stem, source=source.name, format=NAME)
    stream = ItemStream(skips)
    seen_ids = Seen()
    for item in _items_of(source, skips):
        if _is_response(item):
            yield from _response(head, stream, seen_ids, item)
        else:
            for event in stream.events(item, time_us(first_of(item, "timestamp", "created_at"))):
                yield head, event
    yield head, RunEnd()


def _items_of(source: Source, skips: Skips) -> Iterator[Json]:
    if isinstance(source.document, dict):
        wrapped = source.document.get("items")
        if isinstance(wrapped, list):
            yield from records_in(wrapped)
            return
    yield from source.records(skips)


def _response(head: RunHead, stream: ItemStream, seen_ids: Seen, item: Json) -> Iterator[Item]:
    """One response: its input as far as it is new, then its output as one turn."""
    at_us = time_us(item.get("created_at"))
    stream.model = text(item.get("model"))
    for given in records_in(items(item.get("input"))):
        if seen_ids.add(repr(given)):
            for event in stream.events(given, at_us):
                yield head, event
    usage = responses_usage(item.get("usage"))
    if usage is not None:
        stream.hold(usage)
    for made in records_in(item.get("output")):
        seen_ids.add(repr(made))
        for event in stream.events(made, at_us):
            yield head, event


FORMAT: Final = Format(name=NAME, title="OpenAI Responses items", tried=True, sniff=_sniff, read=_read)
