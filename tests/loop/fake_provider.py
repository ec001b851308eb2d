"""A model provider on loopback: real HTTP, the wire formats of Anthropic, OpenAI (both), Ollama and Gemini.

A test queues answers and failures; the server plays them in order and keeps every request it got. It knows nothing
of the clients, so what they send is judged as bytes on a wire.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Self

Json = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Call:
    call_id: str
    name: str
    args: str


@dataclass(frozen=True, kw_only=True)
class Tokens:
    """Counts as Anthropic gives them: `fresh` leaves out what was read from and written to a cache."""

    fresh: int = 100
    output: int = 20
    read: int = 0
    written: int = 0
    reasoning: int = 0

    @property
    def total(self) -> int:
        return self.fresh + self.read + self.written


@dataclass(frozen=True, kw_only=True)
class Answer:
    text: str = ""
    calls: tuple[Call, ...] = ()
    thinking: str = ""
    signature: str = ""
    tokens: Tokens | None = field(default_factory=Tokens)
    stop: str | None = None
    cut: bool = False  # the stream ends in the middle


@dataclass(frozen=True, kw_only=True)
class Failure:
    status: int
    headers: Mapping[str, str] = field(default_factory=dict)
    body: Json = field(default_factory=lambda: {"error": {"type": "test_error", "message": "the secret-key is bad"}})
    hang: bool = False


@dataclass(frozen=True, kw_only=True)
class Seen:
    path: str
    headers: dict[str, str]
    body: Json


class FakeProvider:
    """`with FakeProvider() as provider:`; `provider.queue` holds what it answers, `provider.seen` what it got."""

    def __init__(self) -> None:
        self.queue: list[Answer | Failure] = []
        self.seen: list[Seen] = []
        self.released = threading.Event()
        self._lock = threading.Lock()
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(self))
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_port}"

    def next(self, seen: Seen) -> Answer | Failure:
        with self._lock:
            self.seen.append(seen)
            return self.queue.pop(0) if self.queue else Failure(status=599)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.released.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def _handler(provider: FakeProvider) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *args: object) -> None:
            pass

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers.get("content-length", 0))))
            seen = Seen(path=self.path, headers={k.lower(): v for k, v in self.headers.items()}, body=body)
            answer = provider.next(seen)
            if isinstance(answer, Failure):
                if answer.hang:
                    provider.released.wait(30)
                    self.close_connection = True
                    return
                self._json(answer.status, answer.body, answer.headers)
                return
            route = self.path.split("?")[0]
            whole, events = _FORMATS[next(end for end in _FORMATS if route.endswith(end))](answer)
            if body.get("stream") or route.endswith(":streamGenerateContent"):
                self._stream(events, cut=answer.cut)
            else:
                self._json(200, whole, {})

        def _json(self, status: int, body: Json, headers: Mapping[str, str]) -> None:
            data = json.dumps(body).encode()
            self.send_response(status)
            for name, value in {
                "content-type": "application/json",
                "content-length": str(len(data)),
                **headers,
            }.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(data)

        def _stream(self, events: list[tuple[str | None, Json | str]], *, cut: bool) -> None:
            self.send_response(200)
            self.send_header("content-type", "text/event-stream")
            self.send_header("connection", "close")
            self.end_headers()
            self.close_connection = True
            for name, data in events[: len(events) // 2] if cut else events:
                head = f"event: {name}\n" if name else ""
                text = data if isinstance(data, str) else json.dumps(data)
                self.wfile.write(f"{head}data: {text}\n\n".encode())
                self.wfile.flush()

    return Handler


def _pieces(text: str) -> Iterator[str]:
    for start in range(0, len(text), 5):
        yield text[start : start + 5]


Rendered = tuple[Json, list[tuple[str | None, Json | str]]]


def _anthropic(answer: Answer) -> Rendered:
    blocks: list[Json] = []
    if answer.thinking:
        blocks.append({"type": "thinking", "thinking": answer.thinking, "signature": answer.signature})
    if answer.text:
        blocks.append({"type": "text", "text": answer.text})
    blocks += [{"type": "tool_use", "id": c.call_id, "name": c.name, "input": json.loads(c.args)} for c in answer.calls]
    stop = answer.stop or ("tool_use" if answer.calls else "end_turn")
    tokens = answer.tokens
    usage: Json = (
        {"input_tokens": 0, "output_tokens": 0}
        if tokens is None
        else {
            "input_tokens": tokens.fresh,
            "output_tokens": tokens.output,
            "cache_read_input_tokens": tokens.read,
            "cache_creation_input_tokens": tokens.written,
        }
    )
    whole: Json = {
        "id": "msg_1", "type": "message", "role": "assistant", "model": "claude-test", "content": blocks,
        "stop_reason": stop, "stop_sequence": None, "usage": usage,
    }  # fmt: skip
    start = {**whole, "content": [], "stop_reason": None, "usage": {**usage, "output_tokens": 0}}
    events: list[tuple[str | None, Json | str]] = [("message_start", {"type": "message_start", "message": start})]
    for index, block in enumerate(blocks):
        empty: Json
        deltas: list[Json]
        if block["type"] == "text":
            empty, deltas = (
                {"type": "text", "text": ""},
                [{"type": "text_delta", "text": piece} for piece in _pieces(block["text"])],
            )
        elif block["type"] == "thinking":
            empty, deltas = (
                {"type": "thinking", "thinking": "", "signature": ""},
                [
                    {"type": "thinking_delta", "thinking": block["thinking"]},
                    {"type": "signature_delta", "signature": block["signature"]},
                ],
            )
        else:
            empty, deltas = (
                {**block, "input": {}},
                [{"type": "input_json_delta", "partial_json": piece} for piece in _pieces(json.dumps(block["input"]))],
            )
        events.append(("content_block_start", {"type": "content_block_start", "index": index, "content_block": empty}))
        events += [
            ("content_block_delta", {"type": "content_block_delta", "index": index, "delta": delta}) for delta in deltas
        ]
        events.append(("content_block_stop", {"type": "content_block_stop", "index": index}))
    end = {"type": "message_delta", "delta": {"stop_reason": stop, "stop_sequence": None}, "usage": usage}
    events += [("message_delta", end), ("message_stop", {"type": "message_stop"})]
    return whole, events


def _chat(answer: Answer) -> Rendered:
    calls = [
        {"index": i, "id": c.call_id, "type": "function", "function": {"name": c.name, "arguments": c.args}}
        for i, c in enumerate(answer.calls)
    ]
    stop = answer.stop or ("tool_calls" if calls else "stop")
    tokens = answer.tokens
    usage: Json | None = None
    if tokens is not None:
        usage = {
            "prompt_tokens": tokens.total,
            "completion_tokens": tokens.output,
            "total_tokens": tokens.total + tokens.output,
            "prompt_tokens_details": {"cached_tokens": tokens.read},
            "completion_tokens_details": {"reasoning_tokens": tokens.reasoning},
        }
    message: Json = {"role": "assistant", "content": answer.text or None}
    if calls:
        message["tool_calls"] = calls
    head: Json = {"id": "chat_1", "created": 1_700_000_000, "model": "gpt-test"}
    whole: Json = {
        **head, "object": "chat.completion", "choices": [{"index": 0, "message": message, "finish_reason": stop}],
    }  # fmt: skip
    if usage is not None:
        whole["usage"] = usage

    def chunk(delta: Json, finish: str | None = None) -> tuple[None, Json]:
        choice = {"index": 0, "delta": delta, "finish_reason": finish}
        return None, {**head, "object": "chat.completion.chunk", "choices": [choice]}

    events: list[tuple[str | None, Json | str]] = [chunk({"role": "assistant", "content": ""})]
    events += [chunk({"content": piece}) for piece in _pieces(answer.text)]
    for call in calls:
        events.append(chunk({"tool_calls": [{**call, "function": {**call["function"], "arguments": ""}}]}))
        for piece in _pieces(call["function"]["arguments"]):
            events.append(chunk({"tool_calls": [{"index": call["index"], "function": {"arguments": piece}}]}))
    events.append(chunk({}, stop))
    if usage is not None:
        events.append((None, {**head, "object": "chat.completion.chunk", "choices": [], "usage": usage}))
    events.append((None, "[DONE]"))
    return whole, events


def _responses(answer: Answer) -> Rendered:
    output: list[Json] = []
    if answer.signature:
        output.append(
            {"type": "reasoning", "id": "rs_1", "summary": [{"type": "summary_text", "text": answer.thinking}],
             "encrypted_content": answer.signature, "status": "completed"}
        )  # fmt: skip
    if answer.text:
        content = [{"type": "output_text", "text": answer.text, "annotations": []}]
        output.append({"type": "message", "id": "m_1", "role": "assistant", "status": "completed", "content": content})
    output += [
        {"type": "function_call", "id": f"fc_{c.call_id}", "call_id": c.call_id, "name": c.name, "arguments": c.args,
         "status": "completed"}
        for c in answer.calls
    ]  # fmt: skip
    tokens = answer.tokens
    usage: Json | None = None
    if tokens is not None:
        usage = {
            "input_tokens": tokens.total,
            "output_tokens": tokens.output,
            "total_tokens": tokens.total + tokens.output,
            "input_tokens_details": {"cached_tokens": tokens.read},
            "output_tokens_details": {"reasoning_tokens": tokens.reasoning},
        }
    whole: Json = {
        "id": "resp_1", "object": "response", "created_at": 1_700_000_000, "model": "gpt-test", "status": "completed",
        "output": output, "usage": usage, "parallel_tool_calls": True, "tool_choice": "auto", "tools": [],
        "error": None, "incomplete_details": None, "instructions": None, "metadata": {},
    }  # fmt: skip
    sequence = iter(range(10_000))

    def event(kind: str, **fields: Any) -> tuple[str, Json]:
        return kind, {"type": kind, "sequence_number": next(sequence), **fields}

    begun = {**whole, "status": "in_progress", "output": [], "usage": None}
    events: list[tuple[str | None, Json | str]] = [event("response.created", response=begun)]
    for index, item in enumerate(output):
        where: Json = {"output_index": index, "item_id": item["id"]}
        if item["type"] == "message":
            events.append(event("response.output_item.added", output_index=index, item={**item, "content": []}))
            part = item["content"][0]
            spot: Json = {**where, "content_index": 0}
            events.append(event("response.content_part.added", **spot, part={**part, "text": ""}))
            events += [
                event("response.output_text.delta", **spot, delta=piece, logprobs=[]) for piece in _pieces(answer.text)
            ]
            events.append(event("response.output_text.done", **spot, text=answer.text, logprobs=[]))
            events.append(event("response.content_part.done", **spot, part=part))
        elif item["type"] == "function_call":
            events.append(event("response.output_item.added", output_index=index, item={**item, "arguments": ""}))
            events += [
                event("response.function_call_arguments.delta", **where, delta=piece)
                for piece in _pieces(item["arguments"])
            ]
            done = {"arguments": item["arguments"], "name": item["name"]}
            events.append(event("response.function_call_arguments.done", **where, **done))
        else:
            events.append(event("response.output_item.added", output_index=index, item={**item, "summary": []}))
        events.append(event("response.output_item.done", output_index=index, item=item))
    events.append(event("response.completed", response=whole))
    return whole, events


def _gemini(answer: Answer) -> Rendered:
    parts: list[Json] = [{"text": answer.text}] if answer.text else []
    for call in answer.calls:
        part: Json = {"functionCall": {"id": call.call_id, "name": call.name, "args": json.loads(call.args)}}
        if answer.signature:
            part["thoughtSignature"] = answer.signature
        parts.append(part)
    whole: Json = {
        "candidates": [
            {"index": 0, "finishReason": answer.stop or "STOP", "content": {"role": "model", "parts": parts}}
        ],
        "modelVersion": "gemini-test",
        "responseId": "r1",
    }
    tokens = answer.tokens
    if tokens is not None:
        whole["usageMetadata"] = {
            "promptTokenCount": tokens.total,
            "candidatesTokenCount": tokens.output - tokens.reasoning,
            "thoughtsTokenCount": tokens.reasoning,
            "cachedContentTokenCount": tokens.read,
            "totalTokenCount": tokens.total + tokens.output,
        }
    return whole, [(None, whole)]


_FORMATS = {
    "/messages": _anthropic,
    "/chat/completions": _chat,
    "/responses": _responses,
    ":generateContent": _gemini,
    ":streamGenerateContent": _gemini,
}
