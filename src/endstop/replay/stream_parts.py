"""A streamed response put together: server-sent events of the three providers' shapes into one message."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import orjson

from endstop.replay.fields import Json, integer, record, records_in, text

__all__ = ["streamed_message"]

PARTS_MAX: Final = 10_000


def _events(body: bytes) -> Iterator[Json]:
    for number, line in enumerate(body.splitlines()):
        if number > PARTS_MAX * 10:
            return
        if not line.startswith(b"data:"):
            continue
        try:
            value = orjson.loads(line.removeprefix(b"data:"))
        except ValueError:
            continue
        if isinstance(value, dict):
            yield value


def streamed_message(kind: str, body: bytes) -> Json:
    """The message that a stream carried; empty when it carried none. `kind`: chat, anthropic or responses."""
    match kind:
        case "chat":
            return _chat(_events(body))
        case "anthropic":
            return _anthropic(_events(body))
        case _:
            last: Json = {}
            for event in _events(body):
                if text(event.get("type")) in ("response.completed", "response.incomplete", "response.failed"):
                    last = record(event.get("response"))
            return last


def _chat(events: Iterator[Json]) -> Json:
    calls: dict[int, Json] = {}
    said: list[str] = []
    usage: object = None
    seen = False
    for event in events:
        usage = event.get("usage") or usage
        for choice in records_in(event.get("choices"))[:1]:
            seen = True
            delta = record(choice.get("delta"))
            said.append(text(delta.get("content")))
            for part in records_in(delta.get("tool_calls")):
                index = integer(part.get("index")) or 0
                call = calls.setdefault(index, {"id": "", "function": {"name": "", "arguments": ""}})
                function, more = record(call["function"]), record(part.get("function"))
                call["id"] = text(call["id"]) or text(part.get("id"))
                for field in ("name", "arguments"):
                    function[field] = text(function[field]) + text(more.get(field))
    if not seen:
        return {}
    return {"content": "".join(said), "tool_calls": [calls[index] for index in sorted(calls)], "usage": usage}


def _anthropic(events: Iterator[Json]) -> Json:
    message: Json = {}
    usage: Json = {}
    blocks: dict[int, Json] = {}
    pieces: dict[int, list[str]] = {}
    for event in events:
        index = integer(event.get("index")) or 0
        match event.get("type"):
            case "message_start":
                message = dict(record(event.get("message")))
                usage = dict(record(message.get("usage")))
            case "content_block_start":
                blocks[index] = dict(record(event.get("content_block")))
            case "content_block_delta":
                delta = record(event.get("delta"))
                pieces.setdefault(index, []).append(text(delta.get("partial_json")) or text(delta.get("text")))
            case "message_delta":
                usage.update(record(event.get("usage")))
            case _:
                continue
    for index, block in blocks.items():
        joined = "".join(pieces.get(index, []))
        if block.get("type") in ("tool_use", "server_tool_use") and joined:
            try:
                block["input"] = orjson.loads(joined)
            except ValueError:
                block["input"] = joined
        elif block.get("type") == "text":
            block["text"] = joined
    if not message:
        return {}
    return {**message, "usage": usage, "content": [blocks[index] for index in sorted(blocks)]}
