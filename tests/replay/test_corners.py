"""Corners of the formats: streams, links between exchanges, harness failures, handoffs, resumes, odd shapes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import endstop as es
from endstop import ErrorClass
from endstop.replay.replayer import ReplaySettings, replay_file
from endstop.replay.trace import TraceCall, TraceHandoff, TraceResult, TraceStart, TraceUsage
from tests.replay.recordings import NO_CAPS, OPEN, document, lines, read, replayed


def sse(*events: object) -> str:
    return "".join(f"event: x\ndata: {json.dumps(event)}\n\n" for event in events)


def cassette(path: Path, uri: str, exchanges: list[tuple[object, object]]) -> Path:
    made = [
        {
            "request": {"uri": uri, "body": json.dumps(asked)},
            "response": {"body": {"string": told if isinstance(told, str) else json.dumps(told)}},
        }
        for asked, told in exchanges
    ]
    return document(path, {"interactions": made})


def test_a_streamed_answer_of_anthropic_is_put_together(tmp_path: Path) -> None:
    stream = sse(
        {
            "type": "message_start",
            "message": {"id": "m", "model": "c", "usage": {"input_tokens": 40, "output_tokens": 1}},
        },
        {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}},
        {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": "I look"}},
        {"type": "content_block_start", "index": 1, "content_block": {"type": "tool_use", "id": "t1", "name": "look"}},
        {"type": "content_block_delta", "index": 1, "delta": {"partial_json": '{"q": '}},
        {"type": "content_block_delta", "index": 1, "delta": {"partial_json": '"x"}'}},
        {"type": "message_delta", "usage": {"output_tokens": 10}},
        {"type": "message_stop"},
    )
    user = {"role": "user", "content": "go"}
    path = cassette(tmp_path / "a.json", "https://x.test/v1/messages", [({"messages": [user]}, stream)])
    found = read(path)
    assert found.calls() == [("look", {"q": "x"}, ...)]
    assert found.tokens() == 50


def test_responses_that_go_on_from_one_another_are_one_run(tmp_path: Path) -> None:
    def response(name: str, output: list[object]) -> dict[str, object]:
        return {"id": name, "object": "response", "model": "m", "output": output,
                "usage": {"input_tokens": 9, "output_tokens": 1}}  # fmt: skip

    call = {"type": "function_call", "call_id": "c1", "name": "look", "arguments": "{}"}
    told = {"type": "function_call_output", "call_id": "c1", "output": "seen"}
    first = sse({"type": "response.created"}, {"type": "response.completed", "response": response("r1", [call])})
    path = cassette(
        tmp_path / "a.json",
        "https://x.test/v1/responses",
        [
            ({"model": "m", "input": "go"}, first),
            ({"model": "m", "input": [told], "previous_response_id": "r1"}, response("r2", [{"type": "reasoning"}])),
            ({"model": "m", "input": "another task"}, response("r3", [])),
            ({"name": "not a model"}, {}),
            ({"model": "m", "input": "broken"}, "no answer"),
        ],
    )
    found = read(path)
    assert [sum(isinstance(event, TraceCall) for event in run.events) for run in found.runs] == [1, 0, 0]
    assert [event.value for event in found.runs[0].events if isinstance(event, TraceResult)] == ["seen"]
    assert found.skipped == {"exchange with no model": 1, "response without a message": 1}


def test_hosted_and_custom_calls_of_responses_items_are_read(tmp_path: Path) -> None:
    found = read(
        lines(
            tmp_path / "a.jsonl",
            [
                {"role": "user", "content": "go"},
                {"type": "custom_tool_call", "call_id": "c1", "name": "patch", "input": "*** begin"},
                {"type": "custom_tool_call_output", "call_id": "c1", "output": "ok"},
                {"type": "custom_tool_call", "call_id": "c1", "name": "patch", "input": "*** begin"},
                {"type": "web_search_call", "id": "w1", "action": {"query": "x"}},
                {"type": "mcp_call", "id": "m1", "name": "q", "arguments": "{}", "error": "down", "output": None},
                {"type": "function_call_output", "call_id": "c9", "output": [{"type": "output_text", "text": "late"}]},
                {"type": "something_new"},
            ],
        )
    )
    assert found.calls() == [("patch", {"input": "*** begin"}, "ok"), ("web_search", {"input": {"query": "x"}}, ...),
                             ("q", "{}", None)]  # fmt: skip
    assert found.skipped == {
        "call repeated after a resume": 1, "hosted call without its answer": 1, "item of type something_new": 1,
    }  # fmt: skip
    failed = [event for event in found.run.events if isinstance(event, TraceResult) and event.error_class]
    assert [result.message for result in failed] == ["down"]


def test_mini_swe_agent_s_tool_calls_and_failures_are_read(tmp_path: Path) -> None:
    def asked(call_id: str, command: str) -> dict[str, object]:
        function = {"name": "bash", "arguments": json.dumps({"command": command})}
        return {"role": "assistant", "content": "", "tool_calls": [{"id": call_id, "function": function}],
                "extra": {"timestamp": 1_767_225_600.5}}  # fmt: skip

    def told(call_id: str, text: str) -> dict[str, object]:
        return {"role": "tool", "tool_call_id": call_id, "content": text}

    path = document(
        tmp_path / "t.json",
        {
            "trajectory_format": "mini-swe-agent-1.1",
            "info": {"model_stats": {"instance_cost": 0.5}},
            "messages": [
                asked("c1", "ls"), told("c1", "<returncode>2</returncode>\n<output>\nno\n</output>"),
                asked("c2", "x"),
                told("c2", "<returncode>-1</returncode><output></output><exception>timed out</exception>"),
                {"role": "assistant", "content": "```bash\na\n```\n```bash\nb\n```"},
                {"role": "user", "content": "one only"},
                {"role": "assistant", "content": "no command"}, {"role": "user", "content": "say one"},
            ],
        },
    )  # fmt: skip
    found = read(path)
    results = [event for event in found.run.events if isinstance(event, TraceResult)]
    assert [(result.error_class, result.message) for result in results] == [
        (ErrorClass.TOOL_FAILED, "no"), (ErrorClass.TOOL_FAILED, "timed out"),
    ]  # fmt: skip
    assert found.skipped == {"message with several commands": 1}
    assert replayed(path).totals.spend_nanos == 500_000_000


def test_openhands_messages_rejections_and_schema_faults_are_read(tmp_path: Path) -> None:
    def action(number: int, response: str) -> dict[str, object]:
        return {"kind": "ActionEvent", "id": f"a{number}", "tool_name": "run", "tool_call_id": f"c{number}",
                "llm_response_id": response, "action": None, "tool_call": {"arguments": '{"n": 1}'}}  # fmt: skip

    found = read(
        lines(
            tmp_path / "e.jsonl",
            [
                {"kind": "MessageEvent", "id": "m1", "source": "user"}, action(1, "r1"), action(2, "r1"),
                {"kind": "UserRejectObservation", "tool_call_id": "c1", "rejection_reason": "no"},
                {"kind": "AgentErrorEvent", "tool_call_id": "c2", "error": "bad arguments"},
                {"kind": "MessageEvent", "id": "m2", "source": "agent"}, {"kind": "NewEvent"},
            ],
        )
    )  # fmt: skip
    results = [event for event in found.run.events if isinstance(event, TraceResult)]
    assert [result.error_class for result in results] == [ErrorClass.DENIED, ErrorClass.SCHEMA]
    assert (found.turns(), found.people()) == (2, 1)
    assert found.skipped == {"event of kind NewEvent": 1}


def test_gemini_checkpoints_and_unfinished_calls_are_read(tmp_path: Path) -> None:
    contents = [
        {"role": "user", "parts": [{"text": "go"}]},
        {"role": "model", "parts": [{"functionCall": {"name": "look", "args": {}}}]},
        {"role": "user", "parts": [{"functionResponse": {"name": "look", "response": {"output": "x"}}}]},
    ]
    found = read(document(tmp_path / "c.json", {"history": contents}))
    assert (found.format, found.calls()) == ("gemini_cli", [("look", {}, {"output": "x"})])
    calls = [{"id": "1", "name": "look", "args": {}, "status": "executing"},
             {"id": "2", "name": "look", "args": {}, "status": "error", "resultDisplay": "bad"}]  # fmt: skip
    message = {"id": "m", "type": "gemini", "toolCalls": calls}
    found = read(lines(tmp_path / "s.jsonl", [{"sessionId": "s"}, message, message]))
    assert [value for _, _, value in found.calls()] == [..., None]
    assert found.skipped == {"message written again": 1}


def test_otlp_values_of_every_kind_and_failed_spans_are_read(tmp_path: Path) -> None:
    arguments = {"kvlistValue": {"values": [
        {"key": "n", "value": {"intValue": "3"}}, {"key": "on", "value": {"boolValue": True}},
        {"key": "list", "value": {"arrayValue": {"values": [{"doubleValue": 0.5}, {"stringValue": "s"}]}}},
    ]}}  # fmt: skip
    span = {
        "traceId": "t", "spanId": "s",
        "startTimeUnixNano": "1767225600000000000", "endTimeUnixNano": "1767225601000000000",
        "status": {"code": 2, "message": "broke"},
        "attributes": [
            {"key": "gen_ai.operation.name", "value": {"stringValue": "execute_tool"}},
            {"key": "gen_ai.tool.name", "value": {"stringValue": "f"}},
            {"key": "gen_ai.tool.call.arguments", "value": arguments},
        ],
    }  # fmt: skip
    spans = [span, {**span, "spanId": "u", "status": {}}]
    found = read(document(tmp_path / "o.json", {"resourceSpans": [{"scopeSpans": [{"spans": spans}]}]}))
    assert found.calls()[0] == ("f", {"n": 3, "on": True, "list": [0.5, "s"]}, None)
    assert found.calls()[1][2] is ...
    (result,) = [event for event in found.run.events if isinstance(event, TraceResult)]
    assert result.message == "broke"


@pytest.fixture
def guard() -> es.Guard:
    return es.open("memory:", policy=es.Policy(limits=NO_CAPS))


SPEC = es.Spec(what_it_does="a", what_it_does_not="b", done_looks_like="c")


def test_a_ledger_with_handoffs_user_input_and_a_resume_is_replayed(guard: es.Guard, tmp_path: Path) -> None:
    with pytest.raises(es.RunStopped), guard.run(SPEC, run_id="r") as run:
        run.handoff("researcher")
        run.user_input()
        for _ in range(3):
            run.call(lambda: "same", {}, tool="look")
    guard.resume("r", change="strategy", reason="looked at")
    with guard.run(SPEC, run_id="r") as run:
        run.call(lambda: "same", {}, tool="look")
        run.complete(output="done")
    leaves = [entry.leaf for entry in guard.store.entries(run_id="r").result()]
    path = lines(tmp_path / "l.jsonl", leaves)
    events = read(path).run.events
    assert sum(isinstance(event, TraceHandoff) for event in events) == 1
    assert [event.resumed for event in events if isinstance(event, TraceStart)] == [False, True]
    found = replay_file(path, ReplaySettings(policy=OPEN, all_guards=True))
    (report,) = found.runs
    assert report.stop is not None
    assert (report.stop.reason.value, report.stop.call_index) == ("same_call_repeat", 2)
    assert (report.totals.calls, report.outcome) == (4, "complete")


def test_failures_waits_and_lost_calls_of_a_ledger_are_replayed(guard: es.Guard, tmp_path: Path) -> None:
    def cut() -> object:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), guard.run(SPEC, run_id="r") as run:
        run.call(lambda: es.ToolResult(status="retryable", retry_after_ms=0, value=1), {}, tool="slow")
        run.call(lambda: es.ToolResult(error_class="not_found", message="gone"), {}, tool="look")
        run.call(cut, {}, tool="cut")
    path = lines(tmp_path / "l.jsonl", [entry.leaf for entry in guard.store.entries(run_id="r").result()])
    report = replayed(path)
    assert (report.totals.calls, report.unanswered) == (3, 1)
    assert report.stop is None


def test_usage_that_a_rollout_tells_at_its_very_end_is_kept(tmp_path: Path) -> None:
    usage = {"input_tokens": 90, "output_tokens": 10}
    counted = {"type": "token_count", "info": {"last_token_usage": usage}}
    path = lines(
        tmp_path / "r.jsonl",
        [
            {"type": "session_meta", "payload": {}},
            {"type": "event_msg", "payload": counted},
            {"type": "other", "payload": {}},
        ],
    )
    found = read(path)
    assert [event.usage.total_tokens for event in found.run.events if isinstance(event, TraceUsage)] == [100]
    assert found.skipped == {"record of type other": 1}
