"""Any object with `messages.create` is a model: sync or async, objects or dicts, real SDK or stand-in."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest

from endstop.core.model import Usage
from endstop.errors import ProviderError
from endstop.loop.anthropic_shape import MODEL, AnthropicShapedModel
from endstop.loop.conversation import AssistantTurn, Item, ToolAnswer, ToolAnswers, ToolOffer, ToolRequest, UserText
from endstop.loop.model import ModelClient, open_model
from tests.loop.fake_provider import Answer, Call, Failure, FakeProvider, Tokens

TOOL = ToolOffer(name="search", description="Look up", parameters='{"type": "object", "properties": {}}')


class Client:
    """A stand-in: plays answers, keeps requests."""

    def __init__(self, *answers: object, asynchronous: bool = False) -> None:
        self.answers = list(answers)
        self.requests: list[dict[str, Any]] = []
        self.threads: list[int] = []
        self.messages = SimpleNamespace(create=self._acreate if asynchronous else self._create)

    def _create(self, **request: object) -> object:
        self.requests.append(dict(request))
        self.threads.append(threading.get_ident())
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    async def _acreate(self, **request: object) -> object:
        return self._create(**request)


def as_objects(value: object) -> object:
    if isinstance(value, dict):
        return SimpleNamespace(**{key: value[key] if key == "input" else as_objects(value[key]) for key in value})
    return [as_objects(item) for item in value] if isinstance(value, list) else value


TOOL_TURN: dict[str, object] = {
    "content": [
        {"type": "thinking", "thinking": "hm", "signature": "c2ln"},
        {"type": "text", "text": "I look."},
        {"type": "tool_use", "id": "c1", "name": "search", "input": {"q": "x"}},
    ],
    "stop_reason": "tool_use",
    "usage": {
        "input_tokens": 10,
        "output_tokens": 40,
        "cache_read_input_tokens": 3,
        "cache_creation_input_tokens": 2,
        "output_tokens_details": {"thinking_tokens": 30},
    },
}


def ask(
    model: ModelClient, items: list[Item], *, system: str = "be brief", tools: tuple[ToolOffer, ...] = (TOOL,)
) -> AssistantTurn:
    return asyncio.run(model.respond(system=system, items=items, tools=tools, output_tokens_max=50, on_text=None))


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("objects", [False, True])
def test_a_turn_is_read_from_dicts_and_objects_and_goes_back_as_it_came(asynchronous: bool, objects: bool) -> None:
    answer = as_objects(TOOL_TURN) if objects else TOOL_TURN
    client = Client(answer, {"content": [{"type": "text", "text": "Done."}]}, asynchronous=asynchronous)
    model = open_model(client, client_model="claude-test")
    items: list[Item] = [UserText(text="go")]
    turn = ask(model, items)
    assert (turn.text, turn.stop_reason, turn.model) == ("I look.", "tool_use", "anthropic:claude-test")
    assert turn.tool_requests == (ToolRequest(call_id="c1", name="search", args={"q": "x"}),)
    assert turn.usage == Usage(
        input_tokens=15, output_tokens=40, cache_read_tokens=3, cache_write_tokens=2, reasoning_tokens=30
    )
    assert turn.hidden_tokens_max >= 40
    answers = (
        ToolAnswer(call_id="c1", name="search", content="nothing", failed=True),
        ToolAnswer(call_id="c2", name="search", content="fine"),
    )
    last = ask(model, [*items, turn, ToolAnswers(answers=answers), UserText(text="and?")])
    assert (last.text, last.stop_reason, last.usage) == ("Done.", "end_turn", None)
    first, second = client.requests
    assert first == {
        "model": "claude-test",
        "max_tokens": 50,
        "system": "be brief",
        "messages": [{"role": "user", "content": [{"type": "text", "text": "go"}]}],
        "tools": [{"name": "search", "description": "Look up", "input_schema": {"type": "object", "properties": {}}}],
    }
    content = answer.content if objects else answer["content"]  # type: ignore[attr-defined, index]  # of the shape
    assert second["messages"][1] == {"role": "assistant", "content": content}
    assert second["messages"][2]["content"] == [
        {"type": "tool_result", "tool_use_id": "c1", "content": "nothing", "is_error": True},
        {"type": "tool_result", "tool_use_id": "c2", "content": "fine"},
        {"type": "text", "text": "and?"},
    ]


def test_a_sync_client_is_called_in_a_thread_and_an_async_one_in_the_loop() -> None:
    for asynchronous in (False, True):
        client = Client({"content": []}, asynchronous=asynchronous)
        ask(open_model(client), [UserText(text="go")])
        assert (client.threads == [threading.get_ident()]) is asynchronous


def test_nothing_empty_is_sent_and_the_model_has_a_name() -> None:
    client = Client({"content": "just text"})
    turn = ask(open_model(client), [UserText(text="go")], system="", tools=())
    assert turn.text == "just text"
    assert set(client.requests[0]) == {"model", "max_tokens", "messages"}
    assert client.requests[0]["model"] == MODEL
    client.model = "claude-of-its-own"  # type: ignore[attr-defined]  # some clients carry their model
    assert open_model(client).name == "anthropic:claude-of-its-own"


def test_a_turn_of_another_client_is_sent_as_text_and_calls() -> None:
    client = Client({"content": []})
    foreign = AssistantTurn(
        text="I look.",
        tool_requests=(
            ToolRequest(call_id="c1", name="search", args={"q": "x"}),
            ToolRequest(call_id="c2", name="search", args="{broken"),
        ),
        native=object(),
    )
    ask(open_model(client), [UserText(text="go"), foreign])
    assert client.requests[0]["messages"][1]["content"] == [
        {"type": "text", "text": "I look."},
        {"type": "tool_use", "id": "c1", "name": "search", "input": {"q": "x"}},
        {"type": "tool_use", "id": "c2", "name": "search", "input": {"unparsed": "{broken"}},
    ]


@pytest.mark.parametrize(
    ("stop", "expected"),
    [("max_tokens", "max_tokens"), ("refusal", "refusal"), ("stop_sequence", "end_turn"), ("pause_turn", "other")],
)
def test_stop_reasons_are_normalised(stop: str, expected: str) -> None:
    client = Client({"content": [{"type": "text", "text": "x"}], "stop_reason": stop})
    assert ask(open_model(client), []).stop_reason == expected


def test_text_reaches_on_text_and_its_failure_is_not_blamed_on_the_provider() -> None:
    model = open_model(Client(TOOL_TURN, TOOL_TURN))
    pieces: list[str] = []

    def broken(text: str) -> None:
        raise KeyError(text)

    async def run() -> None:
        await model.respond(system="", items=[], tools=(), output_tokens_max=None, on_text=pieces.append)
        with pytest.raises(KeyError):
            await model.respond(system="", items=[], tools=(), output_tokens_max=None, on_text=broken)

    asyncio.run(run())
    assert pieces == ["I look."]


def test_a_stand_in_that_invents_every_attribute_works() -> None:
    client = MagicMock()
    client.messages.create.return_value = SimpleNamespace(
        content=[SimpleNamespace(type="text", text="hi")],
        stop_reason="end_turn",
        usage=MagicMock(input_tokens=3, output_tokens=4),
    )
    turn = ask(open_model(client), [UserText(text="go")])
    assert (turn.text, turn.usage) == ("hi", Usage(input_tokens=3, output_tokens=4))


def test_the_clients_own_retries_are_switched_off_where_it_has_that() -> None:
    told: list[dict[str, int]] = []
    plain = Client({"content": []})

    class Retrying(Client):
        def with_options(self, **options: int) -> Client:
            told.append(options)
            return plain

    ask(open_model(Retrying()), [])
    assert told == [{"max_retries": 0}]
    assert len(plain.requests) == 1


def test_an_answer_that_is_no_message_and_a_broken_client_are_provider_faults() -> None:
    for answer in ({"no": "content"}, RuntimeError("sk-secret")):
        with pytest.raises(ProviderError) as caught:
            ask(open_model(Client(answer)), [])
        assert caught.value.fault == "other"
        assert "sk-secret" not in str(caught.value)


def test_a_client_that_hangs_times_out() -> None:
    class Hanging:
        def __init__(self) -> None:
            self.messages = self

        async def create(self, **_: object) -> object:
            await asyncio.Event().wait()
            return None

    with pytest.raises(ProviderError) as caught:
        ask(AnthropicShapedModel(Hanging(), timeout_ms=20), [])
    assert caught.value.fault == "timeout"


# --- the real SDK, over real HTTP on loopback ------------------------------------------------------------------------


@pytest.fixture
def provider() -> Iterator[FakeProvider]:
    with FakeProvider() as server:
        yield server


def respond_with_sdk(provider: FakeProvider, kind: str, items: list[Item]) -> AssistantTurn:
    anthropic = pytest.importorskip("anthropic", reason='the SDKs are an extra: pip install "endstop[models]"')

    async def run() -> AssistantTurn:
        client = getattr(anthropic, kind)(api_key="secret-key", base_url=provider.url)
        try:
            model = open_model(client, client_model="claude-sonnet-5-5")
            return await model.respond(system="s", items=items, tools=[TOOL], output_tokens_max=50, on_text=None)
        finally:
            closed = client.close()
            if closed is not None:
                await closed

    return asyncio.run(run())


@pytest.mark.parametrize("kind", ["Anthropic", "AsyncAnthropic"])
def test_the_real_sdk_carries_a_conversation_with_tools_and_signed_reasoning(provider: FakeProvider, kind: str) -> None:
    call = Call(call_id="c1", name="search", args='{"q": "x"}')
    provider.queue = [
        Answer(
            text="I look.", calls=(call,), thinking="hm", signature="c2ln", tokens=Tokens(fresh=9, read=3, written=2)
        ),
        Answer(text="Done."),
    ]
    items: list[Item] = [UserText(text="go")]
    turn = respond_with_sdk(provider, kind, items)
    assert turn.tool_requests == (ToolRequest(call_id="c1", name="search", args={"q": "x"}),)
    assert turn.usage == Usage(input_tokens=14, output_tokens=20, cache_read_tokens=3, cache_write_tokens=2)
    items += [turn, ToolAnswers(answers=(ToolAnswer(call_id="c1", name="search", content="none"),))]
    assert respond_with_sdk(provider, kind, items).text == "Done."
    sent = provider.seen[1].body["messages"][1]["content"]
    assert [block["type"] for block in sent] == ["thinking", "text", "tool_use"]
    assert sent[0]["signature"] == "c2ln"


@pytest.mark.parametrize("kind", ["Anthropic", "AsyncAnthropic"])
@pytest.mark.parametrize(
    ("failure", "fault", "wait_ms"),
    [
        (Failure(status=429, headers={"retry-after": "7"}), "rate_limit", 7_000),
        (Failure(status=529), "outage", None),
        (Failure(status=401), "auth", None),
    ],
)
def test_the_real_sdk_makes_one_attempt_and_its_failure_is_classed(
    provider: FakeProvider, kind: str, failure: Failure, fault: str, wait_ms: int | None
) -> None:
    provider.queue = [failure]
    with pytest.raises(ProviderError) as caught:
        respond_with_sdk(provider, kind, [UserText(text="go")])
    assert (caught.value.fault, caught.value.retry_after_ms) == (fault, wait_ms)
    assert len(provider.seen) == 1
    assert "secret-key" not in str(caught.value)
