"""A scripted model plays its lines in order, tells conversations apart, and says where a script is wrong."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from endstop.core.model import Usage
from endstop.errors import ModelNotFoundError, ProviderError, TaskInvalidError, UsageError
from endstop.loop.conversation import (
    AssistantTurn,
    Item,
    ToolAnswer,
    ToolAnswers,
    ToolOffer,
    ToolRequest,
    UserText,
    parsed_arguments,
    reported_usage,
)
from endstop.loop.model import ModelClient, input_bound, open_model
from endstop.loop.scripted import ScriptedFault, ScriptedModel, ScriptedTurn, load_script, parse_script


def ask(model: ModelClient, items: list[Item], pieces: list[str] | None = None) -> AssistantTurn:
    on_text = None if pieces is None else pieces.append
    return asyncio.run(model.respond(system="", items=items, tools=(), output_tokens_max=None, on_text=on_text))


def play(model: ModelClient, turns: int) -> list[AssistantTurn]:
    items: list[Item] = [UserText(text="go")]
    answers = []
    for _ in range(turns):
        answers.append(ask(model, items))
        items.append(answers[-1])
    return answers


def script(text: str) -> ScriptedModel:
    return parse_script(text, source="turns.jsonl", name="scripted:turns.jsonl")


def test_a_script_plays_text_calls_usage_and_stop_reasons_line_by_line(tmp_path: Path) -> None:
    (tmp_path / "turns.jsonl").write_text(
        "// a comment\n"
        "\n"
        '{"text": "I look.", "tool_calls": [{"id": "c1", "name": "search", "args": {"q": "x"}}], '
        '"usage": {"input_tokens": 9, "output_tokens": 4, "cache_read_tokens": 3}}\n'
        '{"text": "Cut", "stop_reason": "max_tokens"}\n'
        '{"text": "Done."}\n'
    )
    first, second, third = play(open_model("scripted:turns.jsonl", base_dir=tmp_path), 3)
    assert first.text == "I look."
    assert first.tool_requests == (ToolRequest(call_id="c1", name="search", args={"q": "x"}),)
    assert first.stop_reason == "tool_use"
    assert first.usage == Usage(input_tokens=9, output_tokens=4, cache_read_tokens=3)
    assert first.model == "scripted:turns.jsonl"
    assert (second.stop_reason, second.usage) == ("max_tokens", None)
    assert (third.text, third.stop_reason) == ("Done.", "end_turn")


def test_after_the_last_line_the_last_turn_repeats_with_fresh_call_ids() -> None:
    turns = play(script('{"text": "a"}\n{"tool_calls": [{"id": "c1", "name": "update"}, {"name": "log"}]}'), 4)
    ids = [request.call_id for turn in turns for request in turn.tool_requests]
    assert [request.name for request in turns[3].tool_requests] == ["update", "log"]
    assert ids[:2] == ["c1", "call-2-2"]
    assert len(set(ids)) == 6


def test_after_end_answers_with_an_empty_turn_that_ends() -> None:
    turns = play(script('{"after": "end"}\n{"text": "a"}'), 3)
    assert [(turn.text, turn.stop_reason, turn.tool_requests) for turn in turns] == [
        ("a", "end_turn", ()),
        ("", "end_turn", ()),
        ("", "end_turn", ()),
    ]


def test_one_script_serves_many_conversations_each_from_its_first_line() -> None:
    model = script('{"text": "1"}\n{"text": "2"}')
    assert [turn.text for turn in play(model, 2)] == ["1", "2"]
    assert [turn.text for turn in play(model, 2)] == ["1", "2"]


def test_a_fault_line_fails_once_and_again_in_the_next_conversation() -> None:
    model = script(
        '{"fault": {"class": "rate_limit", "retry_after_ms": 5}}\n{"fault": {"class": "outage"}}\n{"text": "ok"}'
    )
    for _ in range(2):
        with pytest.raises(ProviderError) as first:
            ask(model, [])
        assert (first.value.fault, first.value.retry_after_ms) == ("rate_limit", 5)
        with pytest.raises(ProviderError) as second:
            ask(model, [])
        assert (second.value.fault, second.value.retry_after_ms) == ("outage", None)
        assert ask(model, []).text == "ok"


def test_a_fault_as_the_last_line_repeats_for_ever_and_with_end_only_once() -> None:
    line = '{"fault": {"class": "timeout"}}'
    for _ in range(3):
        with pytest.raises(ProviderError, match="timeout"):
            ask(script(line), [])
    model = script('{"after": "end"}\n' + line)
    with pytest.raises(ProviderError):
        ask(model, [])
    assert ask(model, []).text == ""


def test_text_is_handed_to_on_text() -> None:
    pieces: list[str] = []
    ask(script('{"text": "hello"}'), [], pieces)
    assert pieces == ["hello"]


def test_a_delay_passes_before_the_answer_and_ends_at_once_when_cancelled() -> None:
    async def cancelled() -> None:
        model = ScriptedModel([{"text": "late", "delay_ms": 600_000}])
        task = asyncio.ensure_future(model.respond(system="", items=[], tools=(), output_tokens_max=None, on_text=None))
        for _ in range(3):
            await asyncio.wait({asyncio.ensure_future(asyncio.wait_for(asyncio.Event().wait(), 0.001))})
        assert not task.done()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(cancelled())
    assert ask(ScriptedModel([{"text": "soon", "delay_ms": 1}]), []).text == "soon"


def test_a_script_can_be_written_in_python() -> None:
    model = ScriptedModel(
        [
            ScriptedTurn(fault=ScriptedFault(fault="auth")),
            ScriptedTurn(tool_calls=(ToolRequest(call_id="", name="search", args="{not json"),)),
            {"text": "done"},
        ],
        after="end",
    )
    with pytest.raises(ProviderError):
        ask(model, [])
    first, second = play(model, 2)
    assert first.tool_requests == (ToolRequest(call_id="call-2-1", name="search", args="{not json"),)
    assert second.text == "done"
    with pytest.raises(TaskInvalidError, match="turn 1"):
        ScriptedModel([{"txt": "x"}])
    with pytest.raises(TaskInvalidError, match="holds no turn"):
        ScriptedModel([])


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ("{", "no JSON"),
        ("[]", "one JSON object"),
        ("{}", "needs `text`, `tool_calls` or `fault`"),
        ('{"txt": "a"}', "did you mean `text`"),
        ('{"text": 1}', "`text` must be text"),
        ('{"tool_calls": {}}', "must be a list"),
        ('{"tool_calls": [{"id": "c"}]}', "tool call 1: `name`"),
        ('{"tool_calls": [{"name": "a", "arguments": {}}]}', "unknown member `arguments`"),
        ('{"tool_calls": [{"name": "a", "args": 3}]}', "`args` must be an object"),
        ('{"text": "a", "usage": {"input_tokens": -1}}', "`input_tokens` must be a whole number"),
        ('{"text": "a", "usage": {"tokens": 1}}', "unknown member `tokens`"),
        ('{"text": "a", "stop_reason": "done"}', "one of end_turn"),
        ('{"fault": {"class": "boom"}}', "one of rate_limit"),
        ('{"fault": {"class": "auth"}, "text": "a"}', "no text"),
        ('{"text": "a", "delay_ms": 600001}', "at most 600000"),
        ('{"after": "end"}', "first line only"),
    ],
)
def test_a_bad_line_is_named_with_file_and_line(line: str, complaint: str) -> None:
    with pytest.raises(TaskInvalidError, match=r"turns\.jsonl, line 3[:,] ") as caught:
        script('{"text": "fine"}\n\n' + line)
    assert complaint in str(caught.value)


def test_a_wrong_settings_line_and_an_empty_script_are_refused() -> None:
    with pytest.raises(TaskInvalidError, match="line 1: `after` must be"):
        script('{"after": "loop"}\n{"text": "a"}')
    with pytest.raises(TaskInvalidError, match="line 1: unknown member `text`"):
        script('{"after": "end", "text": "a"}')
    with pytest.raises(TaskInvalidError, match="holds no turn"):
        script('{"after": "end"}\n// nothing\n')


def test_a_script_that_cannot_be_read_names_the_file(tmp_path: Path) -> None:
    with pytest.raises(TaskInvalidError, match=r"missing\.jsonl: the file cannot be read"):
        load_script("missing.jsonl", base_dir=tmp_path)
    (tmp_path / "binary.jsonl").write_bytes(b"\xff\xfe")
    with pytest.raises(TaskInvalidError, match=r"binary\.jsonl: the file is no UTF-8"):
        load_script("binary.jsonl", base_dir=tmp_path)


def test_zero_usage_counts_as_none() -> None:
    assert ask(script('{"text": "a", "usage": {"input_tokens": 0, "output_tokens": 0}}'), []).usage is None


@pytest.mark.parametrize("name", ["", "gpt", "openai:", "nobody:model"])
def test_a_name_that_is_no_model_is_refused_with_the_form_to_use(name: str) -> None:
    with pytest.raises(ModelNotFoundError, match=r"PROVIDER:NAME|known are"):
        open_model(name)


def test_an_object_that_is_no_model_is_refused() -> None:
    with pytest.raises(ModelNotFoundError, match="a int is no model"):
        open_model(7)
    with pytest.raises(UsageError, match="max_output_tokens"):
        open_model("scripted:x", max_output_tokens=0)


def test_a_model_client_comes_back_as_it_is() -> None:
    model = ScriptedModel([{"text": "a"}])
    assert open_model(model) is model


def test_the_input_bound_is_no_less_than_the_bytes_of_everything_said() -> None:
    tool = ToolOffer(name="search", description="Sucht überall", parameters='{"type": "object", "properties": {}}')
    items: list[Item] = [
        UserText(text="日本語" * 10),
        AssistantTurn(text="ja", tool_requests=(ToolRequest(call_id="c", name="search", args={"q": '"' * 20}),)),
        ToolAnswers(answers=(ToolAnswer(call_id="c", name="search", content='{"a": "b"}'),)),
    ]
    bound = input_bound("system", items, [tool])
    said = (
        "system"
        + "日本語" * 10
        + "ja"
        + "search" * 3
        + "cc"
        + '\\"' * 20
        + '{"a": "b"}'
        + tool.parameters
        + tool.description
    )
    assert bound >= len(said.encode())
    assert bound > input_bound("system", items, [])
    hidden = AssistantTurn(text="ja", hidden_tokens_max=500)
    assert input_bound("", [hidden], []) == input_bound("", [AssistantTurn(text="ja")], []) + 500
    assert input_bound("\ud800", [], []) > input_bound("", [], [])  # half a character is no reason to fail


def test_arguments_that_are_no_json_object_stay_text() -> None:
    assert parsed_arguments('{"a": 1}') == {"a": 1}
    assert parsed_arguments("  ") == {}
    for text in ("{", "[1]", "3", '{"a": NaN}'):
        assert parsed_arguments(text) == text


def test_usage_that_says_nothing_or_cannot_be_read_is_none() -> None:
    assert reported_usage(input_tokens=None, output_tokens=None) is None
    assert reported_usage(input_tokens=0, output_tokens=0) is None
    assert reported_usage(input_tokens=-1, output_tokens=5) is None
    assert reported_usage(input_tokens=1.5, output_tokens=5) is None
    assert reported_usage(input_tokens=1, output_tokens=None) == Usage(input_tokens=1)
