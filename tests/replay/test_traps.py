"""The traps that recordings of real agents hold, each with a recording made for it."""

from __future__ import annotations

import base64
from pathlib import Path

import pytest

from endstop import ErrorClass
from endstop.replay.trace import TraceCall, TraceResult, paired
from tests.replay.recordings import document, lines, read, replayed

AT = "2026-01-05T10:00:{:02d}.000Z"


def said(number: int, message_id: str, blocks: list[object], **more: object) -> dict[str, object]:
    """One assistant line of a Claude Code session."""
    usage = {"input_tokens": 10, "cache_read_input_tokens": 900, "cache_creation_input_tokens": 90, "output_tokens": 5}
    message = {"id": message_id, "role": "assistant", "model": "m", "content": blocks, "usage": usage}
    return {
        "type": "assistant", "uuid": f"u{number}", "sessionId": "s", "timestamp": AT.format(number), "message": message,
        **more,
    }  # fmt: skip


def use(call_id: str, name: str = "Read", **args: object) -> dict[str, object]:
    return {"type": "tool_use", "id": call_id, "name": name, "input": args}


def answer(number: int, call_id: str, content: object, **more: object) -> dict[str, object]:
    block = {"type": "tool_result", "tool_use_id": call_id, "content": content, **more}
    return {
        "type": "user", "uuid": f"r{number}", "sessionId": "s", "timestamp": AT.format(number),
        "message": {"role": "user", "content": [block]},
    }  # fmt: skip


def person(number: int, text: str, **more: object) -> dict[str, object]:
    return {
        "type": "user", "uuid": f"p{number}", "timestamp": AT.format(number),
        "message": {"role": "user", "content": text}, **more,
    }  # fmt: skip


def test_usage_repeated_on_every_line_of_a_message_is_counted_once(tmp_path: Path) -> None:
    text = {"type": "text", "text": "…"}
    found = read(
        lines(
            tmp_path / "s.jsonl",
            [said(1, "m1", [text]), said(2, "m1", [use("c1")]), said(3, "m1", [use("c2")]), said(4, "m2", [use("c3")])],
        )
    )
    assert found.format == "claude_code"
    assert (found.turns(), found.tokens()) == (2, 2 * 1_005)


def test_a_stream_s_first_output_count_is_replaced_by_the_larger_one(tmp_path: Path) -> None:
    first, last = said(1, "m1", [use("c1")]), said(2, "m1", [use("c2")])
    last["message"]["usage"]["output_tokens"] = 105  # type: ignore[index]  # made above as nested objects
    found = read(lines(tmp_path / "s.jsonl", [first, last]))
    assert found.tokens() == 1_000 + 105


def test_the_calls_of_one_message_are_one_round_and_answers_may_come_in_any_order(tmp_path: Path) -> None:
    found = read(
        lines(
            tmp_path / "s.jsonl",
            [
                said(1, "m1", [use("c1", path="a")]),
                said(1, "m1", [use("c2", path="b")]),
                answer(2, "c2", "B"),
                answer(3, "c1", "A"),
            ],
        )
    )
    calls = list(paired(found.run))
    assert [(one.call.call_id, one.result.value if one.result else None) for one in calls] == [("c1", "A"), ("c2", "B")]
    assert {one.call.round_id for one in calls} == {"m1"}


def test_lines_repeated_after_a_resume_are_taken_once(tmp_path: Path) -> None:
    session = [person(1, "go"), said(2, "m1", [use("c1", path="a")]), answer(3, "c1", "A")]
    again = [{**line, "uuid": f"copy-{number}"} for number, line in enumerate(session)]
    found = read(lines(tmp_path / "s.jsonl", [*session, *again, said(9, "m2", [use("c2")])]))
    assert [name for name, _, _ in found.calls()] == ["Read", "Read"]
    assert found.turns() == 2
    assert found.people() == 1
    assert found.skipped == {"call repeated after a resume": 1, "result repeated after a resume": 1}


def test_comments_and_records_that_are_no_messages_stand_between(tmp_path: Path) -> None:
    found = read(
        lines(
            tmp_path / "s.jsonl",
            [
                "// Source: somewhere",
                {"type": "summary", "summary": "x", "leafUuid": "l"},
                said(1, "m1", [use("c1")]),
                {"type": "progress", "data": {}, "uuid": "x"},
                {"type": "file-history-snapshot", "snapshot": {}},
                {"type": "brand-new-kind"},
                answer(2, "c1", "ok"),
            ],
        )
    )
    assert len(found.calls()) == 1
    assert found.skipped == {"comment line": 1, "record of type brand-new-kind": 1}


def test_a_megabyte_of_image_becomes_a_digest(tmp_path: Path) -> None:
    picture = base64.b64encode(bytes(range(256)) * 4_096).decode()
    block = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": picture}}
    found = read(lines(tmp_path / "s.jsonl", [said(1, "m1", [use("c1")]), answer(2, "c1", [block])]))
    (_, _, value) = found.calls()[0]
    assert len(repr(value)) < 400
    assert len(picture) > 1_000_000
    other = picture[:-8] + "AAAAAAA="
    block["source"]["data"] = other  # type: ignore[index]  # made above as nested objects
    changed = read(lines(tmp_path / "t.jsonl", [said(1, "m1", [use("c1")]), answer(2, "c1", [block])]))
    assert changed.calls()[0][2] != value


def test_sub_agents_files_are_merged_by_time_and_only_the_root_s_user_is_a_person(tmp_path: Path) -> None:
    inner = tmp_path / "s" / "subagents"
    inner.mkdir(parents=True)
    side = {"isSidechain": True, "agentId": "a1"}
    lines(
        inner / "agent-a1.jsonl",
        [person(3, "brief", **side), said(4, "m2", [use("c2", "Grep")], **side), {**answer(5, "c2", "hit"), **side}],
    )
    main = lines(
        tmp_path / "s.jsonl",
        [person(1, "go"), said(2, "m1", [use("c1", "Task")]), answer(6, "c1", "done"), said(7, "m3", [use("c3")])],
    )
    found = read(main)
    calls = [event for event in found.run.events if isinstance(event, TraceCall)]
    assert [(call.tool, call.agent) for call in calls] == [("Task", "main"), ("Grep", "a1"), ("Read", "main")]
    assert found.people() == 1


@pytest.mark.parametrize(
    ("text", "is_person"),
    [
        ("please go on", True),
        ("[Request interrupted by user]", False),
        ("<system-reminder>x</system-reminder>", False),
        ("<local-command-stdout>x", False),
        ("This session is being continued from a previous conversation", False),
    ],
)
def test_text_that_a_host_puts_in_is_no_person(tmp_path: Path, text: str, *, is_person: bool) -> None:
    found = read(lines(tmp_path / "s.jsonl", [said(1, "m1", [use("c1")]), person(2, text)]))
    assert found.people() == int(is_person)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("The user doesn't want to proceed with this tool use.", ErrorClass.DENIED),
        ("<tool_use_error>InputValidationError: x</tool_use_error>", ErrorClass.SCHEMA),
        ("<tool_use_error>Error: No such tool available: X</tool_use_error>", ErrorClass.UNKNOWN_TOOL),
        ("exit 1", ErrorClass.TOOL_FAILED),
    ],
)
def test_the_session_s_own_marks_of_failure_have_a_class(tmp_path: Path, text: str, expected: ErrorClass) -> None:
    found = read(lines(tmp_path / "s.jsonl", [said(1, "m1", [use("c1")]), answer(2, "c1", text, is_error=True)]))
    (result,) = [event for event in found.run.events if isinstance(event, TraceResult)]
    assert result.error_class is expected


def codex(kind: str, payload: dict[str, object], second: int = 0) -> dict[str, object]:
    return {"timestamp": AT.format(second), "type": kind, "payload": payload}


def counted(total: int, last: int) -> dict[str, object]:
    def usage(size: int) -> dict[str, int]:
        return {"input_tokens": size - 10, "cached_input_tokens": 5, "output_tokens": 10, "total_tokens": size}

    return codex(
        "event_msg",
        {"type": "token_count", "info": {"total_token_usage": usage(total), "last_token_usage": usage(last)}},
    )


def shell(call_id: str, command: str = "ls") -> list[dict[str, object]]:
    return [
        codex("response_item", {"type": "reasoning", "summary": []}),
        codex("response_item", {"type": "function_call", "name": "shell", "call_id": call_id,
                                "arguments": f'{{"command": ["bash", "-lc", "{command}"]}}'}),
    ]  # fmt: skip


def output(call_id: str, text: str, code: int = 0) -> dict[str, object]:
    wrapped = f'{{"output": "{text}", "metadata": {{"exit_code": {code}, "duration_seconds": 1.5}}}}'
    return codex("response_item", {"type": "function_call_output", "call_id": call_id, "output": wrapped})


def test_running_totals_are_taken_by_their_difference(tmp_path: Path) -> None:
    found = read(
        lines(
            tmp_path / "r.jsonl",
            [
                codex("session_meta", {"id": "x"}),
                codex("event_msg", {"type": "user_message", "message": "go"}),
                counted(100, 100),
                *shell("c1"),
                output("c1", "a"),
                counted(100, 100),
                counted(250, 150),
                *shell("c2"),
                output("c2", "b"),
                counted(400, 150),
            ],
        )
    )
    assert found.format == "codex"
    assert (found.tokens(), found.turns(), found.people()) == (400, 2, 1)
    assert [value for _, _, value in found.calls()] == ["a", "b"]


def test_an_exit_code_is_a_failure_only_with_words(tmp_path: Path) -> None:
    found = read(
        lines(
            tmp_path / "r.jsonl",
            [
                codex("session_meta", {"id": "x"}),
                *shell("c1"),
                output("c1", "no such file", 2),
                *shell("c2"),
                output("c2", "", 1),
            ],
        )
    )
    results = [event for event in found.run.events if isinstance(event, TraceResult)]
    assert [result.error_class for result in results] == [ErrorClass.TOOL_FAILED, None]
    assert results[0].took_ms == 1_500


def test_newer_shell_output_loses_its_head(tmp_path: Path) -> None:
    text = "Exit code: 0\nWall time: 0.4 seconds\nOutput:\nhello"
    told = codex("response_item", {"type": "function_call_output", "call_id": "c1", "output": text})
    found = read(lines(tmp_path / "r.jsonl", [codex("session_meta", {"id": "x"}), *shell("c1"), told]))
    assert found.calls()[0][2] == "hello"


def test_cumulative_statistics_of_several_models_are_taken_by_their_growth(tmp_path: Path) -> None:
    def stats(main: int, other: int, cost: float) -> dict[str, object]:
        def metrics(tokens: int, dollars: float) -> dict[str, object]:
            return {
                "accumulated_cost": dollars,
                "accumulated_token_usage": {"prompt_tokens": tokens, "completion_tokens": 0},
            }

        value = {"usage_to_metrics": {"default": metrics(main, cost), "condenser": metrics(other, 0.0)}}
        return {"kind": "ConversationStateUpdateEvent", "key": "stats", "value": value}

    action = {"kind": "ActionEvent", "source": "agent", "tool_name": "terminal", "tool_call_id": "c1", "id": "e1",
              "action": {"kind": "TerminalAction", "command": "ls"}}  # fmt: skip
    seen = {"kind": "ObservationEvent", "tool_call_id": "c1", "action_id": "e1",
            "observation": {"content": [{"type": "text", "text": "a"}], "is_error": True}}  # fmt: skip
    path = lines(tmp_path / "e.jsonl", [stats(100, 0, 0.01), action, seen, stats(250, 40, 0.03)])
    found = read(path)
    assert found.format == "openhands"
    assert found.tokens() == 290
    assert found.calls() == [("terminal", {"command": "ls"}, "a")]
    assert replayed(path).totals.spend_nanos == 30_000_000


def test_a_null_answer_an_empty_one_and_none_at_all_are_three_things(tmp_path: Path) -> None:
    history = {"actions": ["a", "b", "c"], "observations": [None, ""]}
    run = {"environment": "ic_bash", "turn_history": history, "summary": {"max_reward": 0.5}}
    path = document(tmp_path / "i.json", {"7": run})
    found = read(path)
    assert found.format == "intercode"
    assert [value for _, _, value in found.calls()] == [None, "", ...]
    assert found.run.outcome == "reward 0.5"
    assert replayed(path).unanswered == 1


def test_arguments_that_differ_in_spaces_and_order_are_one_call(tmp_path: Path) -> None:
    def asked(call_id: str, arguments: str) -> list[dict[str, object]]:
        call = {"id": call_id, "type": "function", "function": {"name": "book", "arguments": arguments}}
        return [
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": call_id, "content": "Error: sold out"},
        ]

    messages = [
        {"role": "user", "content": "book it"},
        *asked("c1", '{"a": 1, "b": 2}'), *asked("c2", '{"b":2,"a":1}'), *asked("c3", '{ "a":1,\n"b": 2}'),
        *asked("c4", '{"a": 1, "b": 2}'),
    ]  # fmt: skip
    report = replayed(document(tmp_path / "m.json", messages))
    assert report.format == "openai_chat"
    assert report.stop is not None
    assert (report.stop.call_index, report.stop.reason) == (2, "same_call_repeat")
    assert [mark.index for mark in report.stop.evidence] == [0, 1]
    assert report.story.startswith("book failed the same way 2 times in a row; stopped before call 2")


def test_a_report_that_quotes_a_block_and_a_block_nobody_ran_are_no_calls(tmp_path: Path) -> None:
    block = "```python\nprint(1)\n```"
    terminal = {"role": "user", "name": "Computer_terminal"}
    history = [
        {"role": "assistant", "name": "Writer", "content": f"try this\n{block}"},
        {"role": "user", "name": "Checker", "content": "no, wait"},
        {"role": "assistant", "name": "Writer", "content": f"again\n{block}"},
        {**terminal, "content": "exitcode: 0 (execution succeeded)\nCode output: 1"},
        {"role": "user", "name": "Checker", "content": f"Writer ran\n{block}\nand got 1"},
        {**terminal, "content": "There is no code from the last 1 message for me to execute."},
    ]
    found = read(document(tmp_path / "h.json", {"history": history, "question": "?"}))
    assert found.format == "ag2_chat"
    assert found.calls() == [("Computer_terminal", {"code": "print(1)"}, "1")]
    (call,) = [event for event in found.run.events if isinstance(event, TraceCall)]
    assert call.agent == "Writer"


def test_a_user_message_that_a_harness_put_in_opens_no_epoch(tmp_path: Path) -> None:
    chain = [{"role": "user", "content": "go"}]
    for _ in range(3):
        chain += [
            {"role": "assistant", "function_call": {"name": "list_all", "arguments": "{}"}},
            {"role": "function", "name": "list_all", "content": '{"error": "", "response": "[1]"}'},
            {"role": "user", "content": "This is not the first time you try", "valid": False},
        ]
    path = document(tmp_path / "t.json", {"answer_generation": {"train_messages": [[], chain], "total_tokens": 9_999}})
    report = replayed(path)
    assert report.format == "toolbench"
    assert report.stop is not None
    assert report.stop.call_index == 2
    assert report.totals.tokens == 0


def test_several_calls_on_one_line_of_text_are_one_call(tmp_path: Path) -> None:
    path = tmp_path / "log.txt"
    path.write_text(
        "##\nBEGIN TRIAL 2\n##\n------------- BEGIN HALTED AGENTS -------------\n\nQuestion: who?\n"
        "Thought 1: look\nAction 1: Search[A], Search[B]\nObservation 1: Could not find that page.\nSecond line\n"
        "Thought 2: again\nAction 2: Finish[x]\nObservation 2: Answer is CORRECT\nCorrect answer: x\n"
    )
    found = read(path)
    assert found.format == "react_text"
    assert found.calls() == [
        ("Search", {"argument": "A], Search[B"}, "Could not find that page.\nSecond line"),
        ("Finish", {"argument": "x"}, "Answer is CORRECT"),
    ]
    assert found.run.run_id.startswith("trial2_")
    assert found.run.outcome == "halted"
