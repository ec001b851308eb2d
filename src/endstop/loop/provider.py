"""Anthropic, OpenAI, Gemini, Ollama and every server that speaks OpenAI's wire format, through pydantic-ai's models.

Only its model layer is used (one request, one answer), never its agent. The SDKs below it retry silently; that is
switched off twice, on the client and on the request, because each attempt must be one guarded turn.
Nothing of it is imported before a model is opened.
"""

from __future__ import annotations

import asyncio
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final

import orjson

from endstop.errors import ModelNotFoundError, ProviderError
from endstop.loop.conversation import (
    AssistantTurn,
    ToolAnswers,
    ToolRequest,
    UserText,
    parsed_arguments,
    reported_usage,
)
from endstop.loop.faults import provider_error
from endstop.runtime.clock import SystemClock

if TYPE_CHECKING:
    from pydantic_ai.messages import ModelMessage, ModelRequestPart, ModelResponse, ModelResponsePart
    from pydantic_ai.models import Model, ModelRequestParameters, StreamedResponse
    from pydantic_ai.settings import ModelSettings

    from endstop.core.model import Usage
    from endstop.loop.conversation import Item, StopReason, ToolOffer
    from endstop.runtime.clock import Clock

__all__ = ["OLLAMA_URL", "PROVIDERS", "ProviderModel", "open_provider", "wrap_model"]

OLLAMA_URL: Final = "http://localhost:11434/v1"
EXTRA: Final = 'pip install "endstop[models]"'

# The prefix of a name, and the environment variable its SDK reads the key from (None: no key is needed).
PROVIDERS: Final[dict[str, str | None]] = {
    "anthropic": "ANTHROPIC_API_KEY",
    "gemini": "GOOGLE_API_KEY",
    "google": "GOOGLE_API_KEY",
    "ollama": None,
    "openai": "OPENAI_API_KEY",
    "openai-chat": "OPENAI_API_KEY",
    "openai-responses": "OPENAI_API_KEY",
}

_USAGE_COMES_FIRST: Final = frozenset({"anthropic", "google"})

_STOP_REASONS: Final[dict[str, StopReason]] = {
    "stop": "end_turn",
    "length": "max_tokens",
    "content_filter": "refusal",
    "tool_call": "tool_use",
}


def open_provider(
    prefix: str,
    model: str,
    *,
    base_url: str | None,
    api_key: str | None,
    max_output_tokens: int | None,
    timeout_ms: int,
) -> ProviderModel:
    """Open `prefix:model`. The first SDK client is built here, so that a missing part is known before a run starts.

    Raises ModelNotFoundError naming the extra to install, the key's environment variable or the known providers.
    """
    name = f"{prefix}:{model}"
    if prefix not in PROVIDERS:
        msg = (
            f"model {name!r}: no provider {prefix!r}; known are {', '.join(sorted(PROVIDERS))} and scripted. "
            "A server that speaks OpenAI's API goes by 'openai:NAME' with its base_url"
        )
        raise ModelNotFoundError(msg)

    def build() -> Model[Any]:
        return _build(prefix, model, base_url=base_url, api_key=api_key)

    try:
        first = build()
    except ImportError as error:
        msg = f"model {name!r} needs an extra that is not installed here: {EXTRA}"
        raise ModelNotFoundError(msg) from error
    except Exception as error:
        # The one usage error of a provider's constructor is a missing key; its text is advice for another library.
        if type(error).__name__ != "UserError":
            raise
        msg = f"model {name!r} has no key: set the environment variable {PROVIDERS[prefix]}"
        raise ModelNotFoundError(msg) from None
    return ProviderModel(name, build, first=first, max_output_tokens=max_output_tokens, timeout_ms=timeout_ms)


def wrap_model(model: object, *, max_output_tokens: int | None, timeout_ms: int) -> ProviderModel:
    """Use a pydantic-ai model that the caller made. Its client's own retries are switched off per request."""
    from pydantic_ai.models import Model

    if not isinstance(model, Model):
        msg = f"a {type(model).__name__} is no pydantic-ai model: pass an instance of its Model class"
        raise ModelNotFoundError(msg)
    given: Model[Any] = model
    return ProviderModel(given.model_id, lambda: given, max_output_tokens=max_output_tokens, timeout_ms=timeout_ms)


def _build(prefix: str, model: str, *, base_url: str | None, api_key: str | None) -> Model[Any]:
    """A fresh model with a fresh SDK client. Raises ImportError without the extra, UserError without a key."""
    built: Model[Any]
    if prefix == "anthropic":
        from pydantic_ai.models.anthropic import AnthropicModel
        from pydantic_ai.providers.anthropic import AnthropicProvider

        built = AnthropicModel(model, provider=AnthropicProvider(api_key=api_key, base_url=base_url))
    elif prefix in ("google", "gemini"):
        from pydantic_ai.models.google import GoogleModel
        from pydantic_ai.providers.google import GoogleProvider

        built = GoogleModel(model, provider=GoogleProvider(api_key=api_key, base_url=base_url))
    elif prefix == "ollama":
        from pydantic_ai.models.ollama import OllamaModel

        built = OllamaModel(model, provider=_ollama(base_url, api_key))
    elif prefix == "openai" and base_url is not None:
        from pydantic_ai.models.openai import OpenAIChatModel
        from pydantic_ai.providers.openai_compatible import OpenAICompatibleProvider

        # Another company's server: the key for OpenAI from the environment must never reach it.
        compatible = OpenAICompatibleProvider("openai-compatible", base_url=base_url, api_key=api_key)
        built = OpenAIChatModel(model, provider=compatible)
    else:
        from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
        from pydantic_ai.providers.openai import OpenAIProvider

        openai = OpenAIProvider(base_url=base_url, api_key=api_key)
        built = (
            OpenAIChatModel(model, provider=openai)
            if prefix == "openai-chat"
            else OpenAIResponsesModel(model, provider=openai)
        )
    client: Any = getattr(built, "client", None)
    if hasattr(client, "max_retries"):
        client.max_retries = 0
    return built


def _ollama(base_url: str | None, api_key: str | None) -> Any:
    from pydantic_ai.exceptions import UserError
    from pydantic_ai.providers.ollama import OllamaProvider

    try:
        return OllamaProvider(base_url=base_url, api_key=api_key)
    except UserError:
        # Neither an argument nor the environment names a server: the one that Ollama starts by default.
        return OllamaProvider(base_url=OLLAMA_URL, api_key=api_key)


class ProviderModel:
    """A `ModelClient` over a pydantic-ai model. May be shared by threads: each event loop gets its own connections."""

    def __init__(
        self,
        name: str,
        build: Callable[[], Model[Any]],
        *,
        first: Model[Any] | None = None,
        max_output_tokens: int | None = None,
        timeout_ms: int,
        clock: Clock | None = None,
    ) -> None:
        self._name = name
        self._build = build
        self._spare = first
        self._max_output_tokens = max_output_tokens
        self._timeout_ms = timeout_ms
        self._clock = clock or SystemClock()
        self._lock = threading.Lock()
        # Connections belong to the event loop that opened them.
        self._open: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, Model[Any]] = weakref.WeakKeyDictionary()

    @property
    def name(self) -> str:
        """The name it is priced and recorded under."""
        return self._name

    async def respond(
        self,
        *,
        system: str,
        items: Sequence[Item],
        tools: Sequence[ToolOffer],
        output_tokens_max: int | None,
        on_text: Callable[[str], None] | None,
    ) -> AssistantTurn:
        """One HTTP request, streamed when `on_text` is given. Raises ProviderError for every failure of it."""
        parameters = _parameters(tools)
        settings = self._settings(output_tokens_max)
        relay = _Relay(on_text) if on_text is not None else None
        model = await self._model()
        messages = _messages(system, items, flags_failures=model.system == "anthropic")
        try:
            # Around everything, the reading of a stream included: a server that drips must not hold a run.
            async with asyncio.timeout(self._timeout_ms / 1_000):
                response = await _request(model, messages, settings, parameters, relay)
        except Exception as error:
            if relay is not None and relay.failed:
                raise
            raise provider_error(error, model=self._name, now_us=self._clock.now_us()) from None
        if _broke_off(response, model.system, streamed=relay is not None):
            msg = f"{self._name}: the provider's stream broke off before its end on this model call; try again later"
            raise ProviderError(msg, "outage")
        return _turn(response, self._name)

    async def aclose(self) -> None:
        """Close the connections of the running event loop."""
        with self._lock:
            model = self._open.pop(asyncio.get_running_loop(), None)
        if model is not None:
            await model.__aexit__(None, None, None)

    async def _model(self) -> Model[Any]:
        loop = asyncio.get_running_loop()
        with self._lock:
            model = self._open.get(loop)
            if model is not None:
                return model
            model, self._spare = self._spare or self._build(), None
            self._open[loop] = model
        await model.__aenter__()
        return model

    def _settings(self, output_tokens_max: int | None) -> ModelSettings:
        settings: ModelSettings = {"max_retries": 0, "timeout": self._timeout_ms / 1_000}
        cap = self._max_output_tokens if output_tokens_max is None else output_tokens_max
        if cap is not None:
            settings["max_tokens"] = cap
        return settings


class _Relay:
    """Passes text on, and remembers whether the receiver failed, so that it is not taken for the provider."""

    def __init__(self, on_text: Callable[[str], None]) -> None:
        self._on_text = on_text
        self.failed = False

    def __call__(self, text: str) -> None:
        if not text:
            return
        try:
            self._on_text(text)
        except BaseException:
            self.failed = True
            raise


async def _request(
    model: Model[Any],
    messages: list[ModelMessage],
    settings: ModelSettings,
    parameters: ModelRequestParameters,
    relay: _Relay | None,
) -> ModelResponse:
    from pydantic_ai import direct

    if relay is None:
        # instrument=False: what a host has set up for its own tracing is not fed from here.
        return await direct.model_request(
            model, messages, model_settings=settings, model_request_parameters=parameters, instrument=False
        )
    async with direct.model_request_stream(
        model, messages, model_settings=settings, model_request_parameters=parameters, instrument=False
    ) as stream:
        await _relay_text(stream, relay)
        return stream.get()


async def _relay_text(stream: StreamedResponse, relay: _Relay) -> None:
    from pydantic_ai.messages import PartDeltaEvent, PartStartEvent, TextPart, TextPartDelta

    async for event in stream:
        if isinstance(event, PartStartEvent) and isinstance(event.part, TextPart):
            relay(event.part.content)
        elif isinstance(event, PartDeltaEvent) and isinstance(event.delta, TextPartDelta):
            relay(event.delta.content_delta)


def _parameters(tools: Sequence[ToolOffer]) -> ModelRequestParameters:
    from pydantic_ai.models import ModelRequestParameters
    from pydantic_ai.tools import ToolDefinition

    return ModelRequestParameters(
        function_tools=[
            ToolDefinition(
                name=tool.name, description=tool.description, parameters_json_schema=orjson.loads(tool.parameters)
            )
            for tool in tools
        ]
    )


def _messages(system: str, items: Sequence[Item], *, flags_failures: bool) -> list[ModelMessage]:
    """The conversation in the layer's own messages. What is said between two assistant turns is one message.

    `flags_failures`: whether the provider has a flag for a failed answer. For the others the layer would wrap the
    answer as `{"error": "…"}` and escape it; it is structured already, so it goes out as it is.
    """
    from pydantic_ai.messages import (
        ModelRequest,
        ModelResponse,
        SystemPromptPart,
        TextPart,
        ToolCallPart,
        ToolReturnPart,
        UserPromptPart,
    )

    messages: list[ModelMessage] = []
    pending: list[ModelRequestPart] = [SystemPromptPart(content=system)] if system else []
    for item in items:
        if isinstance(item, UserText):
            pending.append(UserPromptPart(content=item.text))
        elif isinstance(item, ToolAnswers):
            pending += [
                ToolReturnPart(
                    tool_name=answer.name,
                    content=answer.content,
                    tool_call_id=answer.call_id,
                    outcome="failed" if answer.failed and flags_failures else "success",
                )
                for answer in item.answers
            ]
        else:
            if pending:
                messages.append(ModelRequest(parts=pending))
                pending = []
            if isinstance(item.native, ModelResponse):
                messages.append(item.native)
                continue
            parts: list[ModelResponsePart] = [TextPart(content=item.text)] if item.text else []
            parts += [
                ToolCallPart(
                    tool_name=request.name,
                    args=request.args if isinstance(request.args, str) else dict(request.args),
                    tool_call_id=request.call_id,
                )
                for request in item.tool_requests
            ]
            messages.append(ModelResponse(parts=parts))
    if pending:
        messages.append(ModelRequest(parts=pending))
    return messages


def _turn(response: ModelResponse, name: str) -> AssistantTurn:
    from pydantic_ai.messages import TextPart, ToolCallPart

    requests: list[ToolRequest] = []
    hidden = 0
    for part in response.parts:
        if isinstance(part, TextPart | ToolCallPart):
            # Gemini signs its reasoning on the call itself.
            hidden += _repr_bytes(part.provider_details) if part.provider_details else 0
        else:
            # Reasoning and its signatures go back with the next call.
            hidden += _repr_bytes(part)
        if isinstance(part, ToolCallPart):
            given = part.args or {}
            args = parsed_arguments(given) if isinstance(given, str) else given
            requests.append(ToolRequest(call_id=part.tool_call_id, name=part.tool_name, args=args))
    usage = _usage(response)
    if hidden and usage is not None:
        # A summary or a short signature may stand for longer reasoning, all of which was counted as output.
        hidden = max(hidden, usage.output_tokens)
    return AssistantTurn(
        text=response.text or "",
        tool_requests=tuple(requests),
        stop_reason=_stop_reason(response, has_requests=bool(requests)),
        usage=usage,
        model=name,
        native=response,
        hidden_tokens_max=hidden,
    )


def _broke_off(response: ModelResponse, system: str, *, streamed: bool) -> bool:
    """Whether a stream ended before its end: half an answer must not pass for a whole one.

    The layer reports a stream without a finish reason as complete. Some OpenAI-compatible servers never send one, but
    then usage is the last thing they send; elsewhere usage comes first and proves nothing.
    """
    if response.state in ("incomplete", "interrupted"):
        return True
    if not streamed or _raw_finish_reason(response):
        return False
    return system in _USAGE_COMES_FIRST or _usage(response) is None


def _raw_finish_reason(response: ModelResponse) -> object:
    """The provider's own word for it; where it is missing the layer may put a default in `finish_reason`."""
    return (response.provider_details or {}).get("finish_reason")


def _repr_bytes(value: object) -> int:
    """Bytes of a value's repr, which is never shorter than the text in it."""
    return len(repr(value).encode("utf-8", "surrogatepass"))


def _stop_reason(response: ModelResponse, *, has_requests: bool) -> StopReason:
    said_nothing = response.finish_reason is None and not _raw_finish_reason(response)
    # A model that never names a reason, and did not break off, has said what it had to say.
    reason = "end_turn" if said_nothing else _STOP_REASONS.get(response.finish_reason or "", "other")
    if reason in ("max_tokens", "refusal"):
        return reason
    # Some servers end a turn with "stop", or with nothing, although it asks for tools.
    if has_requests:
        return "tool_use"
    return "other" if reason == "tool_use" else reason


def _usage(response: ModelResponse) -> Usage | None:
    usage = response.usage
    if usage.unmeasured_requests:
        return None
    return reported_usage(
        input_tokens=usage.input_tokens,
        output_tokens=usage.output_tokens,
        cache_read_tokens=usage.cache_read_tokens,
        cache_write_tokens=usage.cache_write_tokens,
        reasoning_tokens=usage.output_reasoning_tokens or usage.details.get("reasoning_tokens", 0),
    )
