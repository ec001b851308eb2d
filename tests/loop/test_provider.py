"""The real SDKs through the model layer, over real HTTP on loopback: one `respond` is one request, whatever comes."""

from __future__ import annotations

import asyncio
import sys
import traceback
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from endstop.core.model import Usage
from endstop.errors import ModelNotFoundError, ProviderError
from endstop.loop.conversation import AssistantTurn, Item, ToolAnswer, ToolAnswers, ToolOffer, ToolRequest, UserText
from endstop.loop.model import ModelClient, input_bound, open_model
from tests.loop.fake_provider import Answer, Call, Failure, FakeProvider, Tokens

EXTRA = 'the SDKs are an extra: pip install "endstop[models]"'
for package in ("pydantic_ai", "anthropic", "openai", "google.genai"):
    pytest.importorskip(package, reason=EXTRA)

TOOL = ToolOffer(
    name="search",
    description="Look up",
    parameters='{"type": "object", "properties": {"q": {"type": "string"}}, "required": ["q"]}',
)
CALL = Call(call_id="c1", name="search", args='{"q": "x"}')


@dataclass(frozen=True, kw_only=True)
class Kind:
    name: str
    path: str
    root: str = "/v1"
    cache_writes: bool = False
    reasoning: bool = True


KINDS = [
    Kind(name="anthropic:claude-sonnet-5-5", path="/v1/messages", root="", cache_writes=True, reasoning=False),
    Kind(name="openai:my-model", path="/v1/chat/completions"),
    Kind(name="openai-chat:gpt-5", path="/v1/chat/completions"),
    Kind(name="openai-responses:gpt-5", path="/v1/responses"),
    Kind(name="ollama:qwen3", path="/v1/chat/completions"),
    Kind(name="google:gemini-2.5-pro", path="/v1beta/models/gemini-2.5-pro:", root=""),
]
every_kind = pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
both_ways = pytest.mark.parametrize("streamed", [False, True], ids=["whole", "streamed"])


@pytest.fixture
def provider() -> Iterator[FakeProvider]:
    with FakeProvider() as server:
        yield server


def opened(kind: Kind, provider: FakeProvider, *, timeout_ms: int = 20_000) -> ModelClient:
    return open_model(kind.name, base_url=provider.url + kind.root, api_key="secret-key", timeout_ms=timeout_ms)


async def respond(
    model: ModelClient, items: list[Item], pieces: list[str] | None = None, *, output_tokens_max: int | None = 50
) -> AssistantTurn:
    return await model.respond(
        system="be brief",
        items=items,
        tools=[TOOL],
        output_tokens_max=output_tokens_max,
        on_text=None if pieces is None else pieces.append,
    )


def one_turn(
    kind: Kind, provider: FakeProvider, *, streamed: bool, timeout_ms: int = 20_000, pieces: list[str] | None = None
) -> AssistantTurn:
    async def run() -> AssistantTurn:
        model = opened(kind, provider, timeout_ms=timeout_ms)
        try:
            return await respond(model, [UserText(text="go")], [] if streamed and pieces is None else pieces)
        finally:
            await model.aclose()

    return asyncio.run(run())


def failure_of(kind: Kind, provider: FakeProvider, *, streamed: bool, timeout_ms: int = 20_000) -> ProviderError:
    with pytest.raises(ProviderError) as caught:
        one_turn(kind, provider, streamed=streamed, timeout_ms=timeout_ms)
    return caught.value


@every_kind
@both_ways
def test_a_turn_with_text_call_and_usage_comes_through(kind: Kind, provider: FakeProvider, streamed: bool) -> None:
    tokens = Tokens(fresh=100, output=20, read=7, written=3, reasoning=4)
    provider.queue = [Answer(text="Hello there", calls=(CALL,), tokens=tokens)]
    pieces: list[str] = []
    turn = one_turn(kind, provider, streamed=streamed, pieces=pieces if streamed else None)
    assert turn.text == "Hello there"
    assert turn.tool_requests == (ToolRequest(call_id="c1", name="search", args={"q": "x"}),)
    assert (turn.stop_reason, turn.model) == ("tool_use", kind.name)
    assert turn.usage == Usage(
        input_tokens=110,
        output_tokens=20,
        cache_read_tokens=7,
        cache_write_tokens=3 if kind.cache_writes else 0,
        reasoning_tokens=4 if kind.reasoning else 0,
    )
    assert "".join(pieces) == ("Hello there" if streamed else "")
    assert len(provider.seen) == 1
    assert provider.seen[0].path.startswith(kind.path)


@every_kind
@both_ways
def test_a_conversation_with_tools_goes_round(kind: Kind, provider: FakeProvider, streamed: bool) -> None:
    provider.queue = [
        Answer(text="I look.", calls=(CALL,), thinking="hm", signature="c2ln"),
        Answer(text="Done."),
    ]

    async def run() -> tuple[AssistantTurn, AssistantTurn]:
        model = opened(kind, provider)
        items: list[Item] = [UserText(text="go")]
        first = await respond(model, items, [] if streamed else None)
        items += [first, ToolAnswers(answers=(ToolAnswer(call_id="c1", name="search", content='{"hits": 0}'),))]
        second = await respond(model, items, [] if streamed else None)
        await model.aclose()
        return first, second

    first, second = asyncio.run(run())
    assert first.text == "I look."
    assert (second.text, second.stop_reason) == ("Done.", "end_turn")
    sent = str(provider.seen[1].body)
    for word in ("be brief", "go", "I look.", "c1", "search", "hits"):
        assert word in sent
    if kind.name.split(":")[0] in ("anthropic", "openai-responses", "google"):
        # The provider's signed reasoning goes back unchanged, and the input bound knows of it.
        assert "c2ln" in sent
        assert first.hidden_tokens_max > 0
        assert input_bound("", [first], []) > input_bound("", [AssistantTurn(text="I look.")], [])


@every_kind
@both_ways
@pytest.mark.parametrize(
    ("failure", "fault", "wait_ms"),
    [
        (Failure(status=429, headers={"retry-after": "2"}), "rate_limit", 2_000),
        (Failure(status=500), "outage", None),
        (Failure(status=503, headers={"retry-after": "1"}), "outage", 1_000),
        (Failure(status=529), "outage", None),
        (Failure(status=401), "auth", None),
        (Failure(status=400), "invalid_request", None),
    ],
    ids=lambda value: str(value.status) if isinstance(value, Failure) else "",
)
def test_a_failure_is_one_attempt_and_has_its_class(
    kind: Kind, provider: FakeProvider, streamed: bool, failure: Failure, fault: str, wait_ms: int | None
) -> None:
    provider.queue = [failure]
    error = failure_of(kind, provider, streamed=streamed)
    assert (error.fault, error.retry_after_ms) == (fault, wait_ms)
    assert len(provider.seen) == 1
    # Neither the message nor a printed traceback repeats the key or the provider's words.
    assert "secret-key" not in "".join(traceback.format_exception(error))
    assert kind.name in str(error)


@every_kind
@both_ways
def test_a_server_that_hangs_is_a_time_out_after_one_attempt(
    kind: Kind, provider: FakeProvider, streamed: bool
) -> None:
    provider.queue = [Failure(status=0, hang=True)]
    assert failure_of(kind, provider, streamed=streamed, timeout_ms=150).fault == "timeout"
    assert len(provider.seen) == 1


@every_kind
def test_a_stream_that_breaks_off_is_no_answer(kind: Kind, provider: FakeProvider) -> None:
    provider.queue = [Answer(text="half of what I meant to say", cut=True)]
    # Gemini's one event was cut away, so there is no answer at all.
    assert failure_of(kind, provider, streamed=True).fault == ("other" if "google" in kind.name else "outage")


def test_a_server_that_nobody_listens_on_is_unreachable_and_not_charged() -> None:
    with FakeProvider() as gone:
        pass
    for kind in KINDS:
        assert failure_of(kind, gone, streamed=False).fault == "unreachable"


@every_kind
@both_ways
def test_usage_that_is_missing_or_zero_is_none(kind: Kind, provider: FakeProvider, streamed: bool) -> None:
    provider.queue = [Answer(text="Done.", tokens=None)]
    assert one_turn(kind, provider, streamed=streamed).usage is None


@pytest.mark.parametrize(
    ("index", "stop", "expected"),
    [
        (0, "max_tokens", "max_tokens"),
        (0, "refusal", "refusal"),
        (0, "pause_turn", "other"),
        (1, "length", "max_tokens"),
        (1, "content_filter", "refusal"),
        (5, "MAX_TOKENS", "max_tokens"),
        (5, "SAFETY", "refusal"),
    ],
)
def test_stop_reasons_are_normalised(provider: FakeProvider, index: int, stop: str, expected: str) -> None:
    provider.queue = [Answer(text="x", stop=stop)]
    assert one_turn(KINDS[index], provider, streamed=False).stop_reason == expected


def test_a_turn_that_asks_for_tools_but_says_stop_still_asks_for_tools(provider: FakeProvider) -> None:
    provider.queue = [Answer(calls=(CALL,), stop="stop")]
    assert one_turn(KINDS[1], provider, streamed=False).stop_reason == "tool_use"


def test_arguments_that_do_not_parse_stay_text_and_go_back(provider: FakeProvider) -> None:
    provider.queue = [Answer(calls=(Call(call_id="c1", name="search", args='{"q": '),)), Answer(text="Sorry.")]

    async def run() -> AssistantTurn:
        model = opened(KINDS[1], provider)
        turn = await respond(model, [UserText(text="go")])
        refusal = ToolAnswer(call_id="c1", name="search", content="no JSON", failed=True)
        await respond(model, [UserText(text="go"), turn, ToolAnswers(answers=(refusal,))])
        await model.aclose()
        return turn

    assert asyncio.run(run()).tool_requests == (ToolRequest(call_id="c1", name="search", args='{"q": '),)
    assert provider.seen[1].body["messages"][3]["content"] == "no JSON"


def test_a_failed_answer_is_flagged_where_the_provider_has_a_flag(provider: FakeProvider) -> None:
    provider.queue = [Answer(text="ok")]
    past = AssistantTurn(tool_requests=(ToolRequest(call_id="c1", name="search", args={"q": "x"}),))
    answers = ToolAnswers(answers=(ToolAnswer(call_id="c1", name="search", content="broken", failed=True),))

    async def run() -> None:
        model = opened(KINDS[0], provider)
        await respond(model, [UserText(text="go"), past, answers, UserText(text="go on")])
        await model.aclose()

    asyncio.run(run())
    roles = [message["role"] for message in provider.seen[0].body["messages"]]
    assert roles == ["user", "assistant", "user"]
    result = provider.seen[0].body["messages"][2]["content"][0]
    assert (result["tool_use_id"], result["is_error"]) == ("c1", True)


def test_the_output_cap_of_the_call_wins_over_the_models_own(provider: FakeProvider) -> None:
    provider.queue = [Answer(text="a"), Answer(text="b")]

    async def run() -> None:
        model = open_model(KINDS[0].name, base_url=provider.url, api_key="k", max_output_tokens=33)
        await respond(model, [UserText(text="go")], output_tokens_max=None)
        await respond(model, [UserText(text="go")], output_tokens_max=12)
        await model.aclose()

    asyncio.run(run())
    assert [seen.body["max_tokens"] for seen in provider.seen] == [33, 12]


def test_a_streamed_chat_asks_for_usage(provider: FakeProvider) -> None:
    provider.queue = [Answer(text="a")]
    assert one_turn(KINDS[1], provider, streamed=True).usage is not None
    assert provider.seen[0].body["stream_options"] == {"include_usage": True}


def test_one_model_serves_one_event_loop_after_another(provider: FakeProvider) -> None:
    provider.queue = [Answer(text="a"), Answer(text="b"), Answer(text="c")]
    model = opened(KINDS[0], provider)

    async def run() -> str:
        text = (await respond(model, [UserText(text="go")])).text
        await model.aclose()
        await model.aclose()  # closing twice is harmless
        return text

    async def twice() -> str:
        return await run() + await run()

    assert asyncio.run(run()) + asyncio.run(twice()) == "abc"


def test_a_receiver_of_text_that_fails_is_not_blamed_on_the_provider(provider: FakeProvider) -> None:
    provider.queue = [Answer(text="Hello there")]

    def broken(text: str) -> None:
        raise KeyError(text)

    async def run() -> None:
        model = opened(KINDS[0], provider)
        try:
            await model.respond(
                system="", items=[UserText(text="go")], tools=(), output_tokens_max=None, on_text=broken
            )
        finally:
            await model.aclose()

    with pytest.raises(KeyError):
        asyncio.run(run())


def test_a_cancelled_call_is_cancelled_and_not_a_fault(provider: FakeProvider) -> None:
    provider.queue = [Failure(status=0, hang=True)]

    async def run() -> None:
        model = opened(KINDS[0], provider)
        task = asyncio.ensure_future(respond(model, [UserText(text="go")]))
        while not provider.seen:
            await asyncio.wait({task}, timeout=0.005)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await model.aclose()

    asyncio.run(run())


def test_the_key_for_openai_never_goes_to_another_server(
    provider: FakeProvider, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "key-for-openai")
    provider.queue = [Answer(text="a")]

    async def run() -> None:
        model = open_model("openai:my-model", base_url=provider.url + "/v1")
        await respond(model, [UserText(text="go")])
        await model.aclose()

    asyncio.run(run())
    assert "key-for-openai" not in str(provider.seen[0].headers)


def test_a_model_of_the_layer_itself_is_used_directly() -> None:
    from pydantic_ai.models.test import TestModel

    model = open_model(TestModel(custom_output_text="hello", call_tools=[]))
    pieces: list[str] = []
    assert asyncio.run(respond(model, [UserText(text="go")], output_tokens_max=None)).text == "hello"
    assert asyncio.run(respond(model, [UserText(text="go")], pieces, output_tokens_max=None)).stop_reason == "end_turn"
    assert "".join(pieces) == "hello"


@pytest.mark.parametrize(
    ("name", "variable"),
    [
        ("anthropic:claude-sonnet-5-5", "ANTHROPIC_API_KEY"),
        ("openai:gpt-5", "OPENAI_API_KEY"),
        ("openai-chat:gpt-5", "OPENAI_API_KEY"),
        ("google:gemini-2.5-pro", "GOOGLE_API_KEY"),
        ("gemini:gemini-2.5-pro", "GOOGLE_API_KEY"),
    ],
)
def test_a_missing_key_names_the_variable_to_set(name: str, variable: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for other in ("ANTHROPIC_API_KEY", "OPENAI_API_KEY", "OPENAI_BASE_URL", "GOOGLE_API_KEY", "GEMINI_API_KEY"):
        monkeypatch.delenv(other, raising=False)
    with pytest.raises(ModelNotFoundError, match=f"has no key: set the environment variable {variable}"):
        open_model(name)


def test_ollama_needs_no_key_and_has_a_default_address(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OLLAMA_BASE_URL", raising=False)
    assert open_model("ollama:qwen3").name == "ollama:qwen3"


def test_a_missing_extra_names_the_command_that_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in [name for name in sys.modules if name.split(".")[0] == "pydantic_ai"]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, "pydantic_ai", None)
    with pytest.raises(ModelNotFoundError, match=r'pip install "endstop\[models\]"'):
        open_model("anthropic:claude-sonnet-5-5", api_key="k")


def test_opening_a_script_imports_no_sdk() -> None:
    import subprocess

    code = (
        "import sys; from endstop.loop.scripted import ScriptedModel; from endstop.loop.model import open_model;"
        "import endstop.runtime.prices, endstop.loop.anthropic_shape, endstop.loop.provider;"
        "open_model(ScriptedModel([{'text': 'a'}]));"
        "print([m for m in ('pydantic_ai', 'anthropic', 'openai', 'google.genai', 'genai_prices') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
