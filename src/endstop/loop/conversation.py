"""The words that the loop and every model client share: what was said, what was asked for, what came of it.

A client turns these into its provider's messages and back. What only the provider understands (signatures of its
reasoning, ids of its items) travels untouched in `AssistantTurn.native`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, Literal

import orjson

from endstop.core.model import Usage

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = [
    "STOP_REASONS",
    "AssistantTurn",
    "Item",
    "StopReason",
    "ToolAnswer",
    "ToolAnswers",
    "ToolOffer",
    "ToolRequest",
    "UserText",
    "parsed_arguments",
    "reported_usage",
]

StopReason = Literal["end_turn", "tool_use", "max_tokens", "refusal", "other"]
STOP_REASONS: Final[tuple[StopReason, ...]] = ("end_turn", "tool_use", "max_tokens", "refusal", "other")


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolOffer:
    """A tool as the model sees it. `parameters` is the JSON Schema of its argument object, as text."""

    name: str
    description: str
    parameters: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolRequest:
    """One call that the model proposes. `args` is the raw text when it is not a JSON object."""

    call_id: str
    name: str
    args: Mapping[str, object] | str = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class AssistantTurn:
    """One answer of a model.

    `usage` is None when the provider reported none, or only zeros: the guard then charges its bound. `native` is the
    client's own form of the turn, which it sends back in place of `text` and `tool_requests`. `hidden_tokens_max`
    bounds what `native` holds beyond those two, in tokens, so that the next call's input bound stays a bound.
    """

    text: str = ""
    tool_requests: tuple[ToolRequest, ...] = ()
    stop_reason: StopReason = "end_turn"
    usage: Usage | None = None
    model: str = ""
    native: object | None = None
    hidden_tokens_max: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolAnswer:
    """What the model is told about one of its calls."""

    call_id: str
    name: str
    content: str
    failed: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class UserText:
    """Something said to the model by the user or the host."""

    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolAnswers:
    """The answers to every call of the assistant turn before it."""

    answers: tuple[ToolAnswer, ...]


Item = UserText | AssistantTurn | ToolAnswers


def parsed_arguments(text: str) -> Mapping[str, object] | str:
    """The JSON object that `text` holds, `{}` for blank text, else `text` itself, unchanged."""
    if not text.strip():
        return {}
    try:
        value = orjson.loads(text)
    except ValueError:
        return text
    return value if isinstance(value, dict) else text


def reported_usage(
    *,
    input_tokens: object,
    output_tokens: object,
    cache_read_tokens: object = 0,
    cache_write_tokens: object = 0,
    reasoning_tokens: object = 0,
) -> Usage | None:
    """A provider's token counts as `Usage`, or None when they say nothing: missing, no counts, or all zero.

    A None among the details counts as 0. A figure that is no count spoils the whole report: usage that cannot be
    read must not make a paid call look cheap.
    """
    if input_tokens is None and output_tokens is None:
        return None
    counts: list[int] = []
    for value in (input_tokens, output_tokens, cache_read_tokens, cache_write_tokens, reasoning_tokens):
        count = 0 if value is None else value
        if isinstance(count, bool) or not isinstance(count, int) or count < 0:
            return None
        counts.append(count)
    if not any(counts):
        return None
    return Usage(
        input_tokens=counts[0],
        output_tokens=counts[1],
        cache_read_tokens=counts[2],
        cache_write_tokens=counts[3],
        reasoning_tokens=counts[4],
    )
