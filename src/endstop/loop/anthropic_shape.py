"""Any object with the shape of Anthropic's client: `client.messages.create(…)`, sync or async, real or a test's own.

Nothing is imported from an SDK: requests are plain dicts, answers are read from objects and from dicts alike.
A sync client is called in a thread. Text comes in one piece; `on_text` gets it when the answer is complete.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

import orjson

from endstop.errors import ProviderError
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
    from endstop.core.model import Usage
    from endstop.loop.conversation import Item, StopReason, ToolOffer
    from endstop.runtime.clock import Clock

__all__ = ["MAX_OUTPUT_TOKENS", "MODEL", "AnthropicShapedModel"]

# What a client is asked for when neither it nor the caller names a model, and the cap the API insists on.
MODEL: Final = "claude-sonnet-5-5"
MAX_OUTPUT_TOKENS: Final = 4_096

_STOP_REASONS: Final[dict[str, StopReason]] = {
    "end_turn": "end_turn",
    "stop_sequence": "end_turn",
    "tool_use": "tool_use",
    "max_tokens": "max_tokens",
    "model_context_window_exceeded": "max_tokens",
    "refusal": "refusal",
}

# Blocks go back as they came, in the SDK's own objects or in a test's dicts.
_Block = Mapping[str, object] | object


class AnthropicShapedModel:
    """A `ModelClient` over a client object. `model` names what is asked for; else the client's own `model`, else MODEL.

    The client's own retries are switched off with `with_options(max_retries=0)` where it has that.
    """

    def __init__(
        self,
        client: object,
        *,
        model: str | None = None,
        max_output_tokens: int | None = None,
        timeout_ms: int,
        clock: Clock | None = None,
    ) -> None:
        self._client: Any = _without_retries(client)
        own = getattr(client, "model", None)
        self._model = model or (own if isinstance(own, str) and own else MODEL)
        self._max_output_tokens = max_output_tokens or MAX_OUTPUT_TOKENS
        self._timeout_ms = timeout_ms
        self._clock = clock or SystemClock()

    @property
    def name(self) -> str:
        """The name it is priced and recorded under."""
        return f"anthropic:{self._model}"

    async def respond(
        self,
        *,
        system: str,
        items: Sequence[Item],
        tools: Sequence[ToolOffer],
        output_tokens_max: int | None,
        on_text: Callable[[str], None] | None,
    ) -> AssistantTurn:
        """One call of `messages.create`. Raises ProviderError for every failure of it."""
        request: dict[str, object] = {
            "model": self._model,
            "max_tokens": self._max_output_tokens if output_tokens_max is None else output_tokens_max,
            "messages": _messages(items),
        }
        # Left out when empty: the API refuses an empty list of tools, and a client's default need not be None.
        if system:
            request["system"] = system
        if tools:
            request["tools"] = [
                {"name": tool.name, "description": tool.description, "input_schema": orjson.loads(tool.parameters)}
                for tool in tools
            ]
        try:
            async with asyncio.timeout(self._timeout_ms / 1_000):
                answer = await self._create(request)
        except Exception as error:
            raise provider_error(error, model=self.name, now_us=self._clock.now_us()) from None
        turn = self._turn(answer)
        if turn.text and on_text is not None:
            on_text(turn.text)
        return turn

    async def aclose(self) -> None:
        """The client belongs to the caller, who closes it."""

    async def _create(self, request: Mapping[str, object]) -> object:
        create = self._client.messages.create
        if inspect.iscoroutinefunction(create):
            return await create(**request)
        # A sync client blocks; an async one behind a plain wrapper hands back what must be awaited here.
        answer = await asyncio.to_thread(create, **request)
        return await answer if inspect.isawaitable(answer) else answer

    def _turn(self, answer: object) -> AssistantTurn:
        content = _member(answer, "content")
        if isinstance(content, str):
            content = [{"type": "text", "text": content}]
        if not isinstance(content, Sequence):
            msg = f"{self.name}: the answer of `messages.create` has no list of content blocks"
            raise ProviderError(msg, "other")
        texts: list[str] = []
        requests: list[ToolRequest] = []
        hidden = 0
        for block in content:
            kind = _member(block, "type")
            if kind == "text":
                texts.append(str(_member(block, "text") or ""))
            elif kind == "tool_use":
                requests.append(_request(block))
            else:
                hidden += len(repr(block).encode("utf-8", "surrogatepass"))
        usage = _usage(_member(answer, "usage"))
        if hidden and usage is not None:
            hidden = max(hidden, usage.output_tokens)
        stop = _member(answer, "stop_reason")
        return AssistantTurn(
            text="".join(texts),
            tool_requests=tuple(requests),
            stop_reason=_stop_reason(stop, has_requests=bool(requests)),
            usage=usage,
            model=self.name,
            native=tuple(content),
            hidden_tokens_max=hidden,
        )


def _without_retries(client: object) -> object:
    with_options = getattr(client, "with_options", None)
    # A stand-in that invents every attribute would hand back another stand-in, without its answers.
    invented = not isinstance(getattr(client, "max_retries", 0), int)
    return with_options(max_retries=0) if callable(with_options) and not invented else client


def _count(holder: object, name: str) -> int:
    """An optional count; what is none counts nothing."""
    value = _member(holder, name)
    return value if isinstance(value, int) else 0


def _member(holder: object, name: str) -> object:
    """A member of a dict or an attribute of an object; None where there is neither."""
    return holder.get(name) if isinstance(holder, Mapping) else getattr(holder, name, None)


def _request(block: _Block) -> ToolRequest:
    given = _member(block, "input")
    args: Mapping[str, object] | str
    if isinstance(given, str):
        args = parsed_arguments(given)
    elif given is None:
        args = {}
    else:
        args = given if isinstance(given, dict) else orjson.dumps(given, default=repr).decode()
    return ToolRequest(call_id=str(_member(block, "id") or ""), name=str(_member(block, "name") or ""), args=args)


def _stop_reason(stop: object, *, has_requests: bool) -> StopReason:
    reason = _STOP_REASONS.get(stop, "other") if isinstance(stop, str) else "other"
    if reason in ("max_tokens", "refusal"):
        return reason
    if has_requests:
        return "tool_use"
    # A stand-in that names no reason and asks for nothing has said what it had to say.
    return "end_turn" if stop is None else reason


def _usage(usage: object) -> Usage | None:
    """Anthropic counts cache reads and writes beside `input_tokens`; here they are part of the total."""
    if usage is None:
        return None
    read = _count(usage, "cache_read_input_tokens")
    written = _count(usage, "cache_creation_input_tokens")
    fresh = _member(usage, "input_tokens")
    return reported_usage(
        input_tokens=fresh + read + written if isinstance(fresh, int) else fresh,
        output_tokens=_member(usage, "output_tokens"),
        cache_read_tokens=read,
        cache_write_tokens=written,
        reasoning_tokens=_count(_member(usage, "output_tokens_details"), "thinking_tokens"),
    )


def _messages(items: Sequence[Item]) -> list[dict[str, object]]:
    """Alternating messages: what is said between two assistant turns is one message, tool results first."""
    messages: list[dict[str, object]] = []
    pending: list[_Block] = []
    for item in items:
        if isinstance(item, UserText):
            pending.append({"type": "text", "text": item.text})
        elif isinstance(item, ToolAnswers):
            for answer in item.answers:
                result: dict[str, object] = {
                    "type": "tool_result",
                    "tool_use_id": answer.call_id,
                    "content": answer.content,
                }
                if answer.failed:
                    result["is_error"] = True
                pending.append(result)
        else:
            if pending:
                messages.append({"role": "user", "content": pending})
                pending = []
            content = _assistant(item)
            if content:
                messages.append({"role": "assistant", "content": content})
    if pending:
        messages.append({"role": "user", "content": pending})
    return messages


def _assistant(turn: AssistantTurn) -> list[_Block]:
    if isinstance(turn.native, tuple):
        return [block for block in turn.native if _member(block, "type") != "text" or _member(block, "text")]
    content: list[_Block] = [{"type": "text", "text": turn.text}] if turn.text else []
    for request in turn.tool_requests:
        # The API takes objects only; arguments that did not parse go back as the text they were.
        args = {"unparsed": request.args} if isinstance(request.args, str) else dict(request.args)
        content.append({"type": "tool_use", "id": request.call_id, "name": request.name, "input": args})
    return content
