"""OpenAI chat messages: `tool_calls` and `role: "tool"`, and the older `function_call` and `role: "function"`.

Read from a list of messages, from `{"messages": [...]}`, from one such object a line, from one message a line, and
from tau-bench's results (`{"task_id", "trial", "traj": [...], "reward"}`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from endstop.replay.fields import (
    Json,
    arguments,
    blocks_value,
    first_of,
    name,
    nanos_of_dollars,
    record,
    records_in,
    text,
    time_us,
    usage_of,
)
from endstop.replay.format import CallIds, Format
from endstop.replay.trace import (
    Event,
    Item,
    RunEnd,
    RunHead,
    Skips,
    TraceCall,
    TraceResult,
    TraceTurn,
    UserInput,
)

if TYPE_CHECKING:
    from endstop.core.model import Usage
    from endstop.replay.source import Source

__all__ = ["FORMAT", "Conversation", "chat_usage", "looks_like_chat"]

NAME: Final = "openai_chat"
_ROLES: Final = frozenset({"system", "developer", "user", "assistant", "tool", "function"})


def chat_usage(value: object) -> Usage | None:
    """The `usage` of a chat completion, cached and reasoning tokens kept apart."""
    found = record(value)
    read = record(found.get("prompt_tokens_details")).get("cached_tokens")
    reasoning = record(found.get("completion_tokens_details")).get("reasoning_tokens")
    return usage_of(
        input_tokens=first_of(found, "prompt_tokens", "input_tokens"),
        output_tokens=first_of(found, "completion_tokens", "output_tokens"),
        cache_read=read, reasoning=reasoning,
    )  # fmt: skip


class Conversation:
    """The events of one run's messages, one message at a time."""

    def __init__(self, skips: Skips) -> None:
        self._skips = skips
        self._ids = CallIds()
        self._turns = 0

    def events(self, message: Json) -> Iterator[Event]:
        """The events of the next message."""
        match message.get("role"):
            case "assistant":
                yield from self._assistant(message)
            case "tool" | "function":
                yield from self._answer(message)
            case "user":
                # `valid: false` marks what a harness put in the user's mouth (ToolBench).
                if message.get("valid") is not False:
                    yield UserInput(at_us=_time_of(message))
            case "system" | "developer":
                return
            case _:
                self._skips.add("message of an unknown role")

    def _assistant(self, message: Json) -> Iterator[Event]:
        self._turns += 1
        round_id = f"turn-{self._turns}"
        at_us = _time_of(message)
        agent = name(message["name"]) if text(message.get("name")) else "main"
        yield TraceTurn(
            agent=agent, model=text(message.get("model")), usage=chat_usage(message.get("usage")), at_us=at_us
        )
        calls = [(call, record(first_of(call, "function", "custom"))) for call in records_in(message.get("tool_calls"))]
        legacy = message.get("function_call")
        if isinstance(legacy, dict):
            calls.append(({}, legacy))
        for call, function in calls:
            tool = name(first_of(function, "name") or call.get("name"))
            given = first_of(function, "arguments", "input")
            yield TraceCall(
                tool=tool, args=arguments(call.get("args") if given is None else given),
                call_id=self._ids.opened(text(call.get("id")), tool), round_id=round_id, agent=agent, at_us=at_us,
            )  # fmt: skip

    def _answer(self, message: Json) -> Iterator[Event]:
        is_legacy = message.get("role") == "function"
        call_id = self._ids.answered(text(message.get("tool_call_id")), text(message.get("name")) if is_legacy else "")
        if not call_id:
            self._skips.add("result without a call")
            return
        yield TraceResult(call_id=call_id, value=blocks_value(message.get("content")), at_us=_time_of(message))


def _time_of(message: Json) -> int | None:
    return time_us(first_of(message, "timestamp", "created_at", "created"))


def looks_like_chat(messages: object) -> int:
    """How much a list of messages looks like a chat with tools."""
    found = records_in(messages)
    if not found or any(text(message.get("role")) not in _ROLES for message in found[:20]):
        return 0
    if any(isinstance(message.get("tool_calls"), list) or message.get("role") == "tool" for message in found):
        return 80
    if any(isinstance(message.get("function_call"), dict) for message in found):
        return 80
    return 30


@dataclass(frozen=True, slots=True, kw_only=True)
class _Chat:
    """One run as the file holds it."""

    head: RunHead
    messages: Iterable[Json]
    spend_nanos: int | None = None


def _sniff(source: Source) -> int:
    if source.shape not in ("lines", "document"):
        return 0
    if isinstance(source.document, dict):
        return looks_like_chat(_messages_of(source.document))
    found = [item for item in source.head_records if isinstance(item, dict)]
    if not found:
        return 0
    if all(text(item.get("role")) in _ROLES for item in found):
        return looks_like_chat(found)
    return max((looks_like_chat(_messages_of(item)) for item in found), default=0)


def _messages_of(item: Json) -> object:
    return first_of(item, "messages", "traj")


def _chats(source: Source, skips: Skips) -> Iterator[_Chat]:
    if isinstance(source.document, dict) and _messages_of(source.document) is not None:
        yield _chat_of(source.document, source, 0)
        return
    first = next((item for item in source.head_records if isinstance(item, dict)), {})
    if text(first.get("role")) in _ROLES:
        head = RunHead(run_id=source.stem, source=source.name, format=NAME)
        yield _Chat(head=head, messages=source.records(skips))
        return
    for number, item in enumerate(source.records(skips)):
        if isinstance(_messages_of(item), list):
            yield _chat_of(item, source, number)
        else:
            skips.add("record without messages")


def _chat_of(item: Json, source: Source, number: int) -> _Chat:
    if "task_id" in item and "trial" in item:
        run_id = f"t{item['task_id']}_r{item['trial']}"
    else:
        given = first_of(item, "run_id", "id", "conversation_id", "session_id")
        run_id = (
            str(given) if isinstance(given, str | int) else source.stem if number == 0 else f"{source.stem}#{number}"
        )
    reward = item.get("reward")
    outcome = f"reward {reward:g}" if isinstance(reward, int | float) and not isinstance(reward, bool) else ""
    return _Chat(
        head=RunHead(run_id=run_id, source=source.name, format=NAME, outcome=outcome),
        messages=records_in(_messages_of(item)),
        spend_nanos=nanos_of_dollars(record(item.get("info")).get("user_cost")) if "traj" in item else None,
    )


def _read(source: Source, skips: Skips) -> Iterator[Item]:
    for chat in _chats(source, skips):
        conversation = Conversation(skips)
        for message in chat.messages:
            for event in conversation.events(message):
                yield chat.head, event
        if chat.spend_nanos:
            # What a simulated user cost is no spend of the agent.
            skips.add("cost of the simulated user")
        yield chat.head, RunEnd()


FORMAT: Final = Format(
    name=NAME, title="OpenAI chat messages (also function_call, tau-bench)", tried=True, sniff=_sniff, read=_read
)
