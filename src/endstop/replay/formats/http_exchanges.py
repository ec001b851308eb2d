"""Recorded HTTP between an agent and its provider: VCR cassettes (YAML, JSON) and HTTP archives (HAR).

Each request holds the conversation so far and each response the next turn, whole or as a stream. Requests that go on
from one another's messages are one run. OpenAI Chat Completions, OpenAI Responses and Anthropic Messages are read.
"""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

from endstop.replay.block_yaml import parse_blocks
from endstop.replay.fields import Json, first_of, record, records_in, text, time_us
from endstop.replay.format import Format
from endstop.replay.formats.anthropic_messages import BlockConversation
from endstop.replay.formats.openai_chat import Conversation
from endstop.replay.formats.openai_responses import ItemStream, responses_usage
from endstop.replay.source import NO_JSON_VALUE, parse_json
from endstop.replay.stream_parts import streamed_message
from endstop.replay.trace import Event, Item, RunEnd, RunHead, Skips

if TYPE_CHECKING:
    from endstop.replay.source import Source

__all__ = ["FORMAT"]

NAME: Final = "http_exchanges"
BODY_BYTES_MAX: Final = 64 * 1024 * 1024
YAML_BYTES_MAX: Final = 64 * 1024 * 1024
RUNS_MAX: Final = 1_000
_GZIP: Final = b"\x1f\x8b"


def _sniff(source: Source) -> int:
    if source.shape == "text":
        return 85 if source.head_text.startswith("interactions:") else 0
    document = record(source.document)
    if records_in(document.get("interactions")) and "request" in records_in(document["interactions"])[0]:
        return 90
    return 90 if isinstance(record(document.get("log")).get("entries"), list) else 0


def _exchanges(source: Source, skips: Skips) -> Iterator[tuple[Json, Json, str]]:
    """Requests and responses as they were recorded, and when."""
    document: object = source.document
    if source.shape == "text":
        if source.path.stat().st_size > YAML_BYTES_MAX:
            skips.add(f"cassette larger than {YAML_BYTES_MAX} bytes")
            return
        try:
            document = parse_blocks(source.lines())
        except (ValueError, RecursionError):
            skips.add("cassette in a style of YAML that is not read")
            return
    found = record(document)
    for one in records_in(found.get("interactions")):
        yield record(one.get("request")), record(one.get("response")), text(one.get("recorded_at"))
    for one in records_in(record(found.get("log")).get("entries")):
        yield record(one.get("request")), record(one.get("response")), text(one.get("startedDateTime"))


def _body(part: Json) -> bytes:
    body = first_of(part, "body", "postData", "content")
    if isinstance(body, dict):
        body = first_of(body, "string", "text", "base64_string")
    data = body if isinstance(body, bytes) else text(body).encode("utf-8", "surrogatepass")
    if data.startswith(_GZIP):
        try:
            unpacker = zlib.decompressobj(wbits=31)
            return unpacker.decompress(data, BODY_BYTES_MAX)
        except (zlib.error, gzip.BadGzipFile):
            return b""
    return data


class _Run:
    """One conversation over several requests."""

    def __init__(self, head: RunHead, kind: str, skips: Skips) -> None:
        self.head = head
        self.kind = kind
        self.sent: list[Json] = []
        self.response_id = ""
        self._stream: Conversation | BlockConversation | ItemStream
        if kind == "chat":
            self._stream = Conversation(skips)
        elif kind == "anthropic":
            self._stream = BlockConversation(skips)
        else:
            self._stream = ItemStream(skips)

    def goes_on(self, request: Json, messages: list[Json]) -> bool:
        """Whether a request continues this conversation."""
        linked = text(request.get("previous_response_id"))
        if linked:
            return linked == self.response_id
        return len(messages) > len(self.sent) and messages[: len(self.sent)] == self.sent

    def events(self, messages: list[Json], message: Json, at_us: int | None, *, linked: bool) -> Iterator[Event]:
        """What is new in a request, then the response."""
        new = messages if linked else messages[len(self.sent) :]
        for one in new:
            # What the model made stands in the responses; only a first request may bring a history of its own.
            if not self.sent or not self._is_models(one):
                yield from self._stream.events(one)
        self.sent = messages
        self.response_id = text(message.get("id"))
        if not message:
            return
        if isinstance(self._stream, ItemStream):
            usage = responses_usage(message.get("usage"))
            if usage is not None:
                self._stream.hold(usage)
            self._stream.model = text(message.get("model"))
            for item in records_in(message.get("output")):
                yield from self._stream.events(item, at_us)
        else:
            yield from self._stream.events(message)

    def _is_models(self, message: Json) -> bool:
        if self.kind == "responses":
            kind = text(message.get("type"))
            return message.get("role") == "assistant" or kind.endswith("_call") or kind == "reasoning"
        return message.get("role") == "assistant"


def _kind_of(request: Json, uri: str) -> tuple[str, list[Json]]:
    if "input" in request and "messages" not in request:
        given = request["input"]
        return "responses", records_in(given) or [{"role": "user", "content": text(given)}]
    messages = records_in(request.get("messages"))
    if not messages:
        return "", []
    return ("anthropic" if uri.split("?", maxsplit=1)[0].endswith("/messages") else "chat"), messages


def _message(kind: str, body: bytes) -> Json:
    """The assistant's message in a response, whole or streamed; empty when there is none."""
    value = parse_json(body)
    if value is NO_JSON_VALUE:
        return streamed_message(kind, body)
    found = record(value)
    if kind != "chat":
        return found if "usage" in found or "content" in found or "output" in found else {}
    choices = records_in(found.get("choices"))
    if not choices:
        return {}
    return {**record(choices[0].get("message")), "usage": found.get("usage"), "model": found.get("model")}


def _read(source: Source, skips: Skips) -> Iterator[Item]:
    runs: list[_Run] = []
    for request, response, at in _exchanges(source, skips):
        asked = record(parse_json(_body(request)))
        uri = text(first_of(request, "uri", "url"))
        kind, messages = _kind_of(asked, uri)
        if not kind:
            skips.add("exchange with no model")
            continue
        linked = bool(text(asked.get("previous_response_id")))
        run = next((one for one in reversed(runs) if one.kind == kind and one.goes_on(asked, messages)), None)
        if run is None:
            run_id = source.stem if not runs else f"{source.stem}#{len(runs)}"
            run = _Run(RunHead(run_id=run_id, source=source.name, format=NAME), kind, skips)
            if len(runs) >= RUNS_MAX:
                skips.add(f"conversation beyond the first {RUNS_MAX}")
                continue
            runs.append(run)
        message = _message(kind, _body(response))
        if not message:
            skips.add("response without a message")
        elif kind != "responses":
            message = {**message, "role": "assistant"}
        for event in run.events(messages, message, time_us(at), linked=linked):
            yield run.head, event
    for run in runs:
        yield run.head, RunEnd()


FORMAT: Final = Format(name=NAME, title="HTTP exchanges: VCR cassettes, HAR", tried=True, sniff=_sniff, read=_read)
