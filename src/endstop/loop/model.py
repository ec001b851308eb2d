"""The port every model stands behind, how much input a call can hold at most, and how a name becomes a model.

    model = open_model("anthropic:claude-sonnet-5-5")
    turn = await model.respond(system="…", items=[UserText(text="…")], tools=(), output_tokens_max=1_000, on_text=None)

One `respond` is one attempt: a client never retries, so that every attempt passes the guard.
"""

from __future__ import annotations

import inspect
import json
from typing import TYPE_CHECKING, Final, Protocol, runtime_checkable

from endstop.errors import ModelNotFoundError, UsageError
from endstop.loop.conversation import AssistantTurn, ToolAnswers, UserText

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from endstop.loop.conversation import Item, ToolOffer

__all__ = ["TIMEOUT_MS", "ModelClient", "input_bound", "open_model"]

# How long one attempt may take, from the first byte out to the last byte in.
TIMEOUT_MS: Final = 600_000

# A token is at least one byte of UTF-8, so text never has more tokens than bytes. What providers put around the text
# is not in it: markers of roles and blocks, and the standing text that explains how tools are called (several hundred
# tokens). These allowances, in tokens, are generous on purpose: a bound that is too low is a budget with a hole.
REQUEST_FRAMING: Final = 64
ITEM_FRAMING: Final = 32
TOOLS_FRAMING: Final = 1_024
TOOL_FRAMING: Final = 64
# Some clients add a member such as `"additionalProperties": false` to every object of a schema.
SCHEMA_OBJECT_FRAMING: Final = 48


@runtime_checkable
class ModelClient(Protocol):
    """One model, ready to be asked."""

    @property
    def name(self) -> str:
        """The name it is priced and recorded under, e.g. `anthropic:claude-sonnet-5-5`."""
        ...

    async def respond(
        self,
        *,
        system: str,
        items: Sequence[Item],
        tools: Sequence[ToolOffer],
        output_tokens_max: int | None,
        on_text: Callable[[str], None] | None,
    ) -> AssistantTurn:
        """Make one attempt at the next assistant turn.

        `output_tokens_max` caps the answer, in tokens; None leaves the client's own cap. `on_text` gets pieces of the
        text as they come in. Raises ProviderError for every failure of the provider; nothing is retried.
        """
        ...

    async def aclose(self) -> None:
        """Give back connections. Asking again opens new ones."""
        ...


def input_bound(system: str, items: Sequence[Item], tools: Sequence[ToolOffer]) -> int:
    """An upper bound of the input tokens of a call: UTF-8 bytes plus allowances for the provider's framing."""
    bound = REQUEST_FRAMING + _size(system)
    if tools:
        bound += TOOLS_FRAMING
    for tool in tools:
        objects = tool.parameters.count("{")
        bound += TOOL_FRAMING + _size(tool.name) + _size(tool.description) + _size(tool.parameters)
        bound += objects * SCHEMA_OBJECT_FRAMING
    for item in items:
        bound += ITEM_FRAMING
        if isinstance(item, UserText):
            bound += _size(item.text)
        elif isinstance(item, ToolAnswers):
            for answer in item.answers:
                # Some providers wrap an answer in an object of their own, which escapes it.
                bound += ITEM_FRAMING + _size(answer.call_id) + _size(answer.name) + _escaped_size(answer.content)
        else:
            bound += _turn_size(item)
    return bound


def _turn_size(turn: AssistantTurn) -> int:
    size = _size(turn.text) + turn.hidden_tokens_max
    for request in turn.tool_requests:
        args = request.args if isinstance(request.args, str) else dict(request.args)
        # Also for raw text: clients wrap arguments that do not parse in an object, and escape them.
        size += ITEM_FRAMING + _size(request.call_id) + _size(request.name) + _escaped_size(args)
    return size


def _escaped_size(value: object) -> int:
    return _size(json.dumps(value, ensure_ascii=False, default=repr))


def _size(text: str) -> int:
    return len(text.encode("utf-8", "surrogatepass"))


def open_model(
    model: str | object,
    *,
    base_dir: Path | None = None,
    base_url: str | None = None,
    api_key: str | None = None,
    client_model: str | None = None,
    max_output_tokens: int | None = None,
    timeout_ms: int = TIMEOUT_MS,
) -> ModelClient:
    """Make a model client from a name or from a client object. Nothing is sent.

    Names: `scripted:FILE` (relative to `base_dir`), `anthropic:NAME`, `openai:NAME`, `google:NAME` (or `gemini:`),
    `ollama:NAME`; `openai:NAME` with `base_url` is any server that speaks OpenAI's Chat Completions. Without
    `api_key` the provider's SDK reads its own environment variable. Objects: a `ModelClient` comes back as it is; an
    object with `messages.create` (Anthropic's client, sync or async, or one of its shape) is asked for
    `client_model`; a `pydantic_ai` model is used directly.
    `max_output_tokens` is the cap of a call that names none; `timeout_ms` bounds one attempt.

    Raises ModelNotFoundError when the model cannot be used here, naming what to install or to set; TaskInvalidError
    for a script that does not parse; UsageError for a cap or a time-out that is not a positive whole number.
    """
    for label, value in (("max_output_tokens", max_output_tokens), ("timeout_ms", timeout_ms)):
        if value is not None and (type(value) is not int or value < 1):
            msg = f"{label} must be a whole number, 1 or more"
            raise UsageError(msg)
    if isinstance(model, str):
        return _open_name(
            model,
            base_dir=base_dir,
            base_url=base_url,
            api_key=api_key,
            max_output_tokens=max_output_tokens,
            timeout_ms=timeout_ms,
        )
    has_create = callable(getattr(getattr(model, "messages", None), "create", None))
    # A stand-in for Anthropic's client may invent every attribute, so `respond` alone proves nothing.
    if isinstance(model, ModelClient) and (inspect.iscoroutinefunction(model.respond) or not has_create):
        return model
    if has_create:
        from endstop.loop.anthropic_shape import AnthropicShapedModel

        return AnthropicShapedModel(
            model, model=client_model, max_output_tokens=max_output_tokens, timeout_ms=timeout_ms
        )
    if any(base.__module__.startswith("pydantic_ai.models") for base in type(model).__mro__):
        from endstop.loop.provider import wrap_model

        return wrap_model(model, max_output_tokens=max_output_tokens, timeout_ms=timeout_ms)
    kind = type(model).__name__
    msg = f"a {kind} is no model: give a name such as 'anthropic:NAME', or an object with `messages.create`"
    raise ModelNotFoundError(msg)


def _open_name(
    name: str,
    *,
    base_dir: Path | None,
    base_url: str | None,
    api_key: str | None,
    max_output_tokens: int | None,
    timeout_ms: int,
) -> ModelClient:
    prefix, colon, rest = name.partition(":")
    if not colon or not rest.strip():
        msg = f"model name {name!r} has no provider: write PROVIDER:NAME, e.g. 'anthropic:NAME' or 'scripted:FILE'"
        raise ModelNotFoundError(msg)
    if prefix == "scripted":
        from endstop.loop.scripted import load_script

        return load_script(rest, base_dir=base_dir, name=name)
    from endstop.loop.provider import open_provider

    return open_provider(
        prefix,
        rest,
        base_url=base_url,
        api_key=api_key,
        max_output_tokens=max_output_tokens,
        timeout_ms=timeout_ms,
    )
