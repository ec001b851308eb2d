"""A small recording in each format, and what must be read out of it."""

from __future__ import annotations

import base64
import gzip
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tests.replay.recordings import document, lines

Made = Callable[[Path], Path]
CALLS: Final = [("search", {"q": "x"}, "nothing"), ("search", {"q": "y"}, "found")]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """A recording of `CALLS` in one format, and what else can be read out of it."""

    name: str
    make: Made
    tokens: int = 0
    turns: int = 0
    people: int = 0
    calls: list[tuple[str, object, object]] | None = None


def _arguments(query: str) -> str:
    return json.dumps({"q": query})


def _responses(path: Path) -> Path:
    return lines(
        path,
        [
            {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "go"}]},
            {"type": "reasoning", "summary": []},
            {"type": "function_call", "call_id": "c1", "name": "search", "arguments": _arguments("x")},
            {"type": "function_call", "call_id": "c2", "name": "search", "arguments": _arguments("y")},
            {"type": "function_call_output", "call_id": "c2", "output": "found"},
            {"type": "function_call_output", "call_id": "c1", "output": "nothing"},
        ],
    )


def _response_objects(path: Path) -> Path:
    usage = {"input_tokens": 90, "output_tokens": 10, "input_tokens_details": {"cached_tokens": 50}}
    call = {"type": "function_call", "call_id": "c1", "name": "search", "arguments": _arguments("x")}
    told = {"type": "function_call_output", "call_id": "c1", "output": "nothing"}
    return lines(
        path,
        [
            {"object": "response", "model": "m", "output": [call], "usage": usage},
            {"object": "response", "model": "m", "input": [call, told], "usage": usage, "output": [
                {"type": "mcp_call", "id": "m1", "name": "search", "arguments": _arguments("y"), "output": "found"}]},
        ],
    )  # fmt: skip


def _anthropic(path: Path) -> Path:
    usage = {"input_tokens": 5, "cache_read_input_tokens": 80, "cache_creation_input_tokens": 5, "output_tokens": 10}
    return document(
        path,
        {"messages": [
            {"role": "user", "content": "go"},
            {"role": "assistant", "usage": usage, "content": [
                {"type": "text", "text": "…"},
                {"type": "tool_use", "id": "c1", "name": "search", "input": {"q": "x"}},
                {"type": "tool_use", "id": "c2", "name": "search", "input": {"q": "y"}}]},
            {"role": "user", "content": [
                {"type": "tool_result", "tool_use_id": "c2", "content": [{"type": "text", "text": "found"}]},
                {"type": "tool_result", "tool_use_id": "c1", "content": "nothing"}]},
        ]},
    )  # fmt: skip


def _mini(path: Path) -> Path:
    def step(query: str) -> dict[str, object]:
        return {"role": "assistant", "content": f"THOUGHT\n\n```mswea_bash_command\nsearch {query}\n```"}

    return document(
        path,
        {"trajectory_format": "mini-swe-agent-1", "info": {"exit_status": "Submitted"}, "messages": [
            {"role": "system", "content": "```mswea_bash_command\nexample\n```"}, {"role": "user", "content": "task"},
            step("x"), {"role": "user", "content": "<returncode>1</returncode>\n<output>\nnothing\n</output>"},
            step("y"), {"role": "user", "content": "<returncode>0</returncode>\n<output>\nfound\n</output>"},
        ]},
    )  # fmt: skip


def traj(path: Path) -> Path:
    return document(
        path,
        {"environment": "e", "history": [], "trajectory": [
            {"action": "search x\n", "observation": "nothing", "execution_time": 0.5, "thought": "t", "state": {}},
            {"action": "search y\n", "observation": "found", "execution_time": 0.25, "thought": "t", "state": {}}],
         "info": {"exit_status": "submitted",
                  "model_stats": {"instance_cost": 0.25, "tokens_sent": 90, "tokens_received": 10, "api_calls": 2}}},
    )  # fmt: skip


def inspect_log(path: Path) -> Path:
    def tool(call_id: str, query: str, **more: object) -> dict[str, object]:
        return {"event": "tool", "id": call_id, "function": "search", "arguments": {"q": query}, "timestamp":
                "2026-01-01T00:00:01+00:00", "completed": "2026-01-01T00:00:02+00:00", **more}  # fmt: skip

    model = {"event": "model", "model": "m", "timestamp": "2026-01-01T00:00:00+00:00",
             "output": {"usage": {"input_tokens": 45, "output_tokens": 5}}}  # fmt: skip
    return document(
        path,
        {"version": 2, "eval": {"task": "t"}, "samples": [{
            "id": 1, "epoch": 1, "scores": {"s": {"value": "C"}}, "attachments": {"ab": "found"}, "events": [
                model, tool("c1", "x", result="nothing"), model, tool("c2", "y", result="attachment://ab")]}]},
    )  # fmt: skip


def _openhands_old(path: Path) -> Path:
    def pair(number: int, query: str, told: str) -> list[dict[str, object]]:
        return [
            {"id": number, "source": "agent", "action": "run", "args": {"q": query},
             "tool_call_metadata": {"function_name": "search", "tool_call_id": f"c{number}"}},
            {"id": number + 1, "source": "agent", "observation": "run", "cause": number, "content": told},
        ]  # fmt: skip

    start = {"id": 0, "source": "user", "action": "message", "args": {"content": "go"}}
    return document(path, [start, *pair(1, "x", "nothing"), *pair(3, "y", "found")])


def _adk(path: Path) -> Path:
    def parts(*made: dict[str, object]) -> dict[str, object]:
        return {"role": "x", "parts": list(made)}

    return document(
        path,
        {"id": "sess", "events": [
            {"author": "user", "content": parts({"text": "go"}), "timestamp": 1733043686.5},
            {"author": "bot", "timestamp": 1733043687.5,
             "usageMetadata": {"promptTokenCount": 90, "candidatesTokenCount": 10},
             "content": parts({"function_call": {"name": "search", "args": {"q": "x"}}},
                              {"functionCall": {"name": "search", "args": {"q": "y"}}})},
            {"author": "bot", "content": parts({"function_response": {"name": "search", "response": "nothing"}},
                                               {"functionResponse": {"name": "search", "response": "found"}})},
        ]},
    )  # fmt: skip


def _autogen_session(path: Path) -> Path:
    def exchange(messages: list[object], content: object) -> dict[str, object]:
        response = {"content": content, "usage": {"prompt_tokens": 45, "completion_tokens": 5}}
        return {"mode": "create", "messages": messages, "response": response, "stream": []}

    asked = [{"id": f"c{n}", "name": "search", "arguments": _arguments(q)} for n, q in ((1, "x"), (2, "y"))]
    told = [{"call_id": "c1", "content": "nothing"}, {"call_id": "c2", "content": "found"}]
    history = [
        {"type": "UserMessage", "source": "user", "content": "go"},
        {"type": "AssistantMessage", "content": asked},
        {"type": "FunctionExecutionResultMessage", "content": told},
    ]
    return document(path, [exchange(history[:1], asked), exchange(history, "done")])


def _autogen_messages(path: Path) -> Path:
    asked = [{"id": f"c{n}", "name": "search", "arguments": _arguments(q)} for n, q in ((1, "x"), (2, "y"))]
    told = [{"call_id": "c1", "content": "nothing"}, {"call_id": "c2", "content": "found", "is_error": False}]
    used = {"prompt_tokens": 90, "completion_tokens": 10}
    return lines(
        path,
        [
            {"type": "TextMessage", "source": "user", "content": "go"},
            {"type": "ToolCallRequestEvent", "source": "bot", "content": asked, "models_usage": used},
            {"type": "ToolCallExecutionEvent", "source": "bot", "content": told},
        ],
    )


def _magentic(path: Path) -> Path:
    page = "\n\nHere is a screenshot of [a page](https://example.test). "
    return document(
        path,
        {"history": [
            {"role": "human", "content": "go"}, {"role": "Orchestrator (thought)", "content": "Initial plan"},
            {"role": "WebSurfer", "content": f"I clicked 'A\n\nB'.{page}nothing"},
            {"role": "Assistant", "content": "run\n```python\nprint(1)\n```"},
            {"role": "ComputerTerminal", "content": "1"},
            {"role": "FileSurfer", "content": "Address: file:///a\nTitle: A"},
        ]},
    )  # fmt: skip


def _pydantic_ai(path: Path) -> Path:
    def call(call_id: str, query: str) -> dict[str, object]:
        return {"part_kind": "tool-call", "tool_name": "search", "args": _arguments(query), "tool_call_id": call_id}

    def told(call_id: str, content: object) -> dict[str, object]:
        return {"part_kind": "tool-return", "tool_name": "search", "content": content, "tool_call_id": call_id}

    return document(
        path,
        [
            {"kind": "request", "parts": [{"part_kind": "system-prompt", "content": "s"},
                                          {"part_kind": "user-prompt", "content": "go"}]},
            {"kind": "response", "parts": [call("c1", "x"), call("c2", "y")], "model_name": "m",
             "usage": {"input_tokens": 90, "output_tokens": 10}},
            {"kind": "request", "parts": [told("c1", "nothing"), told("c2", "found")]},
        ],
    )  # fmt: skip


def _gemini(path: Path) -> Path:
    def tool(call_id: str, query: str, told: str) -> dict[str, object]:
        answer = {"functionResponse": {"id": call_id, "name": "search", "response": {"output": told}}}
        return {"id": call_id, "name": "search", "args": {"q": query}, "status": "success", "result": [answer],
                "timestamp": "2026-01-01T00:00:02Z"}  # fmt: skip

    return document(
        path,
        {"sessionId": "s", "projectHash": "h", "messages": [
            {"id": "1", "type": "user", "content": "go", "timestamp": "2026-01-01T00:00:00Z"},
            {"id": "2", "type": "gemini", "content": "", "timestamp": "2026-01-01T00:00:01Z", "model": "g",
             "tokens": {"input": 90, "output": 6, "thoughts": 4, "cached": 0, "tool": 0, "total": 100},
             "toolCalls": [tool("c1", "x", "nothing"), tool("c2", "y", "found")]},
            {"id": "3", "type": "info", "content": "…"},
        ]},
    )  # fmt: skip


def _attribute(name: str, value: object) -> dict[str, object]:
    kind = "intValue" if isinstance(value, int) else "stringValue"
    return {"key": name, "value": {kind: str(value)}}


def _otlp(spans: list[tuple[str, int, int, dict[str, object]]]) -> dict[str, object]:
    made = [
        {
            "traceId": "t1", "spanId": f"s{number}", "name": name, "startTimeUnixNano": str(start * 10**9),
            "endTimeUnixNano": str(end * 10**9), "attributes": [_attribute(*pair) for pair in attributes.items()],
        }
        for number, (name, start, end, attributes) in enumerate(spans)
    ]  # fmt: skip
    return {"resourceSpans": [{"resource": {}, "scopeSpans": [{"scope": {}, "spans": made}]}]}


NOW: Final = 1_767_000_000


def _otel(path: Path) -> Path:
    def tool(start: int, query: str, told: str) -> tuple[str, int, int, dict[str, object]]:
        attributes = {"gen_ai.operation.name": "execute_tool", "gen_ai.tool.name": "search",
                      "gen_ai.tool.call.arguments": _arguments(query), "gen_ai.tool.call.result": told}  # fmt: skip
        return "execute_tool search", NOW + start, NOW + start + 1, attributes

    chat = ("chat m", NOW, NOW + 1, {"gen_ai.operation.name": "chat", "gen_ai.request.model": "m",
                                     "gen_ai.usage.input_tokens": 90, "gen_ai.usage.output_tokens": 10})  # fmt: skip
    # Spans are exported when they end, so never in the order of their beginnings.
    return lines(path, [_otlp([tool(4, "y", "found"), tool(2, "x", "nothing")]), _otlp([chat])])


def _otel_messages(path: Path) -> Path:
    messages = [
        {"role": "user", "parts": [{"type": "text", "content": "go"}]},
        {"role": "assistant", "parts": [{"type": "tool_call", "id": "c1", "name": "search", "arguments": {"q": "x"}}]},
        {"role": "tool", "parts": [{"type": "tool_call_response", "id": "c1", "response": "nothing"}]},
        {"role": "assistant", "parts": [{"type": "tool_call", "id": "c2", "name": "search", "arguments": {"q": "y"}}]},
        {"role": "tool", "parts": [{"type": "tool_call_response", "id": "c2", "response": "found"}]},
    ]

    def chat(start: int, upto: int) -> tuple[str, int, int, dict[str, object]]:
        return "chat", NOW + start, NOW + start + 1, {
            "gen_ai.operation.name": "chat", "gen_ai.input.messages": json.dumps(messages[:upto]),
            "gen_ai.usage.input_tokens": 45, "gen_ai.usage.output_tokens": 5}  # fmt: skip

    return document(path, _otlp([chat(0, 3), chat(2, 5)]))


def _openinference(path: Path) -> Path:
    def tool(start: int, query: str, told: str) -> tuple[str, int, int, dict[str, object]]:
        return "search", NOW + start, NOW + start + 1, {
            "openinference.span.kind": "TOOL", "tool.name": "search", "input.value": _arguments(query),
            "output.value": told}  # fmt: skip

    model = ("llm", NOW, NOW + 1, {"openinference.span.kind": "LLM", "llm.token_count.prompt": "90",
                                   "llm.token_count.completion": "10"})  # fmt: skip
    return document(path, _otlp([model, tool(2, "x", "nothing"), tool(4, "y", "found")]))


def _openinference_messages(path: Path) -> Path:
    def call(place: int, call_id: str, query: str, told: str) -> dict[str, object]:
        asked, answered = f"llm.input_messages.{place}.message", f"llm.input_messages.{place + 1}.message"
        return {
            f"{asked}.role": "assistant", f"{asked}.tool_calls.0.tool_call.id": call_id,
            f"{asked}.tool_calls.0.tool_call.function.name": "search",
            f"{asked}.tool_calls.0.tool_call.function.arguments": _arguments(query),
            f"{answered}.role": "tool", f"{answered}.tool_call_id": call_id, f"{answered}.content": told,
        }  # fmt: skip

    model = {"openinference.span.kind": "LLM", "llm.token_count.prompt": 90, "llm.token_count.completion": 10}
    attributes = {**model, **call(1, "c1", "x", "nothing"), **call(3, "c2", "y", "found")}
    span = {"name": "llm", "context": {"trace_id": "t", "span_id": "s"}, "start_time": "2026-01-01T00:00:00Z",
            "end_time": "2026-01-01T00:00:01Z", "attributes": attributes}  # fmt: skip
    return lines(path, [span, {**span, "context": {"trace_id": "t", "span_id": "s2"}, "attributes": {
        "openinference.span.kind": "CHAIN"}}])  # fmt: skip


def langfuse(path: Path) -> Path:
    def tool(number: int, query: str, told: str) -> dict[str, object]:
        return {"id": f"o{number}", "traceId": "t", "type": "TOOL", "name": "search", "input": {"q": query},
                "output": told,
                "startTime": f"2026-01-01T00:00:0{number}Z", "endTime": f"2026-01-01T00:00:0{number}.5Z"}  # fmt: skip

    model = {"id": "g", "traceId": "t", "type": "GENERATION", "model": "m", "startTime": "2026-01-01T00:00:00Z",
             "endTime": "2026-01-01T00:00:01Z",
             "usageDetails": {"input": 90, "output": 10}, "totalCost": 0.5}  # fmt: skip
    return document(path, {"observations": [tool(4, "y", "found"), tool(2, "x", "nothing"), model]})


def _langfuse_generations(path: Path) -> Path:
    history = [
        {"type": "function_call", "call_id": "c1", "name": "search", "arguments": _arguments("x")},
        {"type": "function_call_output", "call_id": "c1", "output": "nothing"},
        {"type": "function_call", "call_id": "c2", "name": "search", "arguments": _arguments("y")},
        {"type": "function_call_output", "call_id": "c2", "output": "found"},
    ]
    model = {"id": "g", "traceId": "t", "type": "GENERATION", "input": history, "startTime": "2026-01-01T00:00:00Z",
             "endTime": "2026-01-01T00:00:01Z", "usageDetails": {"input": 90, "output": 10}}  # fmt: skip
    return lines(path, [model, {"id": "s", "traceId": "t", "type": "SPAN", "parentObservationId": None}])


def langsmith(path: Path) -> Path:
    def tool(number: int, query: str, told: object) -> dict[str, object]:
        return {"id": f"r{number}", "trace_id": "t", "run_type": "tool", "name": "search",
                "inputs": {"input": _arguments(query)},
                "outputs": {"output": told}, "start_time": f"2026-01-01T00:00:0{number}", "end_time":
                f"2026-01-01T00:00:0{number}.5"}  # fmt: skip

    model = {"id": "m", "trace_id": "t", "run_type": "llm", "name": "m", "inputs": {}, "outputs": {},
             "prompt_tokens": 90,
             "completion_tokens": 10, "total_cost": "0.25", "start_time": "2026-01-01T00:00:00",
             "end_time": "2026-01-01T00:00:01"}  # fmt: skip
    message = {"lc": 1, "id": ["ToolMessage"], "kwargs": {"type": "tool", "content": "found", "tool_call_id": "new"}}
    root = {"id": "t", "trace_id": "t", "run_type": "chain", "inputs": {}, "name": "root", "child_runs": [
        model, tool(2, "x", "nothing"), tool(4, "y", message)]}  # fmt: skip
    return document(path, [root])


def _plain(path: Path) -> Path:
    return lines(
        path,
        [
            {"type": "user"},
            {
                "tool": "search",
                "args": {"q": "x"},
                "result": "nothing",
                "round": 1,
                "input_tokens": 90,
                "output_tokens": 10,
            },
            {"tool": "search", "args": _arguments("y"), "result": "found", "round": 1},
        ],
    )


def _exchange(messages: list[object], answer: object, *, packed: bool = False) -> dict[str, object]:
    body = json.dumps(answer).encode() if not isinstance(answer, bytes) else answer
    return {
        "request": {"uri": "https://api.example.test/v1/chat/completions", "method": "POST",
                    "body": json.dumps({"model": "m", "messages": messages})},
        "response": {"status": {"code": 200}, "body": {"string": gzip.compress(body) if packed else body.decode()}},
    }  # fmt: skip


def _cassette(path: Path) -> Path:
    def asked(call_id: str, query: str) -> dict[str, object]:
        function = {"name": "search", "arguments": _arguments(query)}
        return {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"id": call_id, "type": "function", "function": function}],
        }

    user = {"role": "user", "content": "It's\n\n a: 'test' # not a comment"}
    first = {"choices": [{"message": asked("c1", "x")}], "usage": {"prompt_tokens": 45, "completion_tokens": 5}}
    pieces = [
        {
            "choices": [
                {
                    "delta": {
                        "tool_calls": [{"index": 0, "id": "c2", "function": {"name": "search", "arguments": '{"q"'}}]
                    }
                }
            ]
        },
        {"choices": [{"delta": {"tool_calls": [{"index": 0, "function": {"arguments": ': "y"}'}}]}}]},
        {"choices": [], "usage": {"prompt_tokens": 45, "completion_tokens": 5}},
    ]
    stream = b"".join(b"data: " + json.dumps(piece).encode() + b"\n\n" for piece in pieces) + b"data: [DONE]\n\n"
    second = [user, asked("c1", "x"), {"role": "tool", "tool_call_id": "c1", "content": "nothing"}]
    third = [*second, asked("c2", "y"), {"role": "tool", "tool_call_id": "c2", "content": "found"}]
    done = {"choices": [{"message": {"role": "assistant", "content": "done"}}]}
    exchanges = [_exchange([user], first, packed=True), _exchange(second, stream), _exchange(third, done)]
    path.write_text(_yaml({"interactions": exchanges, "version": 1}))
    return path


def _yaml(value: object, indent: int = 0) -> str:
    """YAML in the style of cassettes, as far as this test needs it."""
    pad = " " * indent
    if isinstance(value, dict):
        return "".join(f"{pad}{name}:{_below(item, indent + 2)}" for name, item in value.items())
    assert isinstance(value, list)
    return "".join(f"{pad}- {_yaml(item, indent + 2).lstrip(' ')}" for item in value)


def _below(item: object, indent: int) -> str:
    if isinstance(item, dict | list):
        return "\n" + _yaml(item, indent if isinstance(item, dict) else indent - 2)
    if isinstance(item, bytes):
        text = base64.b64encode(item).decode()
        rows = [text[start : start + 60] for start in range(0, len(text), 60)]
        return " !!binary |\n" + "".join(f"{' ' * indent}{row}\n" for row in rows)
    if isinstance(item, int):
        return f" {item}\n"
    text = str(item).replace("'", "''").replace("\n", f"\n\n{' ' * indent}")
    return f" '{text}'\n"


def _har(path: Path) -> Path:
    usage = {"input_tokens": 40, "cache_read_input_tokens": 5, "output_tokens": 5}

    def use(call_id: str, query: str) -> dict[str, object]:
        return {"type": "tool_use", "id": call_id, "name": "search", "input": {"q": query}}

    def told(call_id: str, text: str) -> dict[str, object]:
        return {"role": "user", "content": [{"type": "tool_result", "tool_use_id": call_id, "content": text}]}

    def entry(messages: list[object], content: list[object]) -> dict[str, object]:
        return {
            "startedDateTime": "2026-01-01T00:00:00Z",
            "request": {"url": "https://api.example.test/v1/messages",
                        "postData": {"text": json.dumps({"messages": messages})}},
            "response": {"content": {"text": json.dumps({"content": content, "usage": usage, "model": "m"})}},
        }  # fmt: skip

    user = {"role": "user", "content": "go"}
    second = [user, {"role": "assistant", "content": [use("c1", "x")]}, told("c1", "nothing")]
    third = [*second, {"role": "assistant", "content": [use("c2", "y")]}, told("c2", "found")]
    entries = [entry([user], [use("c1", "x")]), entry(second, [use("c2", "y")]), entry(third, [])]
    return document(path, {"log": {"entries": entries}})


SAMPLES: Final = (
    Sample(name="openai_responses", make=_responses, turns=1, people=1),
    Sample(name="openai_responses", make=_response_objects, turns=2, tokens=200),
    Sample(name="anthropic_messages", make=_anthropic, turns=1, people=1, tokens=100),
    Sample(name="mini_swe_agent", make=_mini, turns=2, calls=[
        ("bash", {"command": "search x"}, "nothing"), ("bash", {"command": "search y"}, "found")]),
    Sample(name="swe_agent", make=traj, turns=2, tokens=100, calls=[
        ("search", {"rest": "x"}, "nothing"), ("search", {"rest": "y"}, "found")]),
    Sample(name="inspect", make=inspect_log, turns=2, tokens=100),
    Sample(name="openhands", make=_openhands_old, turns=2, people=1),
    Sample(name="google_adk", make=_adk, turns=1, people=1, tokens=100),
    Sample(name="autogen", make=_autogen_session, turns=2, people=1, tokens=100),
    Sample(name="autogen", make=_autogen_messages, turns=1, people=1, tokens=100),
    Sample(name="magentic_one", make=_magentic, turns=3, people=1, calls=[
        ("WebSurfer", {"action": "I clicked 'A\n\nB'."},
         "Here is a screenshot of [a page](https://example.test). nothing"),
        ("ComputerTerminal", {"action": "print(1)"}, "1"),
        ("FileSurfer", {"action": "Address: file:///a"}, "Title: A")]),
    Sample(name="pydantic_ai", make=_pydantic_ai, turns=1, people=1, tokens=100, calls=[
        ("search", _arguments("x"), "nothing"), ("search", _arguments("y"), "found")]),
    Sample(name="gemini_cli", make=_gemini, turns=1, people=1, tokens=100, calls=[
        ("search", {"q": "x"}, {"output": "nothing"}), ("search", {"q": "y"}, {"output": "found"})]),
    Sample(name="otel_genai", make=_otel, turns=1, tokens=100, calls=[
        ("search", _arguments("x"), "nothing"), ("search", _arguments("y"), "found")]),
    Sample(name="otel_genai", make=_otel_messages, turns=2, tokens=100),
    Sample(name="openinference", make=_openinference, turns=1, tokens=100),
    Sample(name="openinference", make=_openinference_messages, turns=1, tokens=100, calls=[
        ("search", _arguments("x"), "nothing"), ("search", _arguments("y"), "found")]),
    Sample(name="langfuse", make=langfuse, turns=1, tokens=100),
    Sample(name="langfuse", make=_langfuse_generations, turns=1, tokens=100, calls=[
        ("search", _arguments("x"), "nothing"), ("search", _arguments("y"), "found")]),
    Sample(name="langsmith", make=langsmith, turns=1, tokens=100),
    Sample(name="plain", make=_plain, turns=1, people=1, tokens=100, calls=[
        ("search", {"q": "x"}, "nothing"), ("search", _arguments("y"), "found")]),
    Sample(name="http_exchanges", make=_cassette, turns=3, people=1, tokens=100, calls=[
        ("search", _arguments("x"), "nothing"), ("search", '{"q": "y"}', "found")]),
    Sample(name="http_exchanges", make=_har, turns=3, people=1, tokens=150),
)  # fmt: skip
