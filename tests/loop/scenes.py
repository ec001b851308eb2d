"""What the loop's tests share: a spec, a wide policy, a scripted model that keeps what it was asked."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import orjson

import endstop as es
from endstop.loop.conversation import AssistantTurn, Item, ToolAnswer, ToolAnswers, ToolOffer
from endstop.loop.scripted import ScriptedModel

SPEC = es.Spec(what_it_does="tidies the list", what_it_does_not="deletes nothing", done_looks_like="the list is tidy")
WIDE = es.Limits(steps_max=500, turns_max=500, tokens_max=10**9, wall_ms_max=600_000)


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """One request that reached the model."""

    system: str
    items: tuple[Item, ...]
    tools: tuple[str, ...]
    output_tokens_max: int | None


class Model:
    """A scripted model that keeps what it was asked. `before` runs first, with the number of the request."""

    def __init__(
        self, *turns: dict[str, object], after: str = "repeat", before: Callable[[int], object] | None = None
    ) -> None:
        self._script = ScriptedModel(turns, after=after)  # type: ignore[arg-type]  # one of two words
        self._before = before
        self.asked: list[Asked] = []

    @property
    def name(self) -> str:
        return "scripted:test"

    async def respond(
        self, *, system: str, items: Sequence[Item], tools: Sequence[ToolOffer], output_tokens_max: int | None,
        on_text: Callable[[str], None] | None,
    ) -> AssistantTurn:  # fmt: skip
        self.asked.append(
            Asked(
                system=system, items=tuple(items), tools=tuple(tool.name for tool in tools),
                output_tokens_max=output_tokens_max,
            )
        )  # fmt: skip
        if self._before is not None:
            self._before(len(self.asked))
        return await self._script.respond(
            system=system, items=items, tools=tools, output_tokens_max=output_tokens_max, on_text=on_text
        )

    async def aclose(self) -> None:
        await self._script.aclose()


def says(text: str, **more: object) -> dict[str, object]:
    return {"text": text, **more}


def calls(*wanted: tuple[str, object], ids: Sequence[str] = (), **more: object) -> dict[str, object]:
    """A turn that proposes calls, each a tool's name and its arguments."""
    return {
        "tool_calls": [
            {"id": ids[place] if ids else f"c{place}-{name}-{hash(repr(args)) & 0xFFFF}", "name": name, "args": args}
            for place, (name, args) in enumerate(wanted)
        ],
        **more,
    }


def answers_of(result: es.LoopResult) -> list[ToolAnswer]:
    """Every answer that the model got, in order."""
    return [answer for item in result.conversation if isinstance(item, ToolAnswers) for answer in item.answers]


def told(result: es.LoopResult) -> list[dict[str, object]]:
    """What the answers say."""
    return [orjson.loads(answer.content) for answer in answers_of(result)]


def assert_every_call_is_answered_once(result: es.LoopResult) -> None:
    """Each assistant message with calls is followed by their answers: all of them, once, in order."""
    conversation = result.conversation
    for place, item in enumerate(conversation):
        if isinstance(item, AssistantTurn) and item.tool_requests:
            following = conversation[place + 1]
            assert isinstance(following, ToolAnswers)
            assert [answer.call_id for answer in following.answers] == [call.call_id for call in item.tool_requests]
            assert [answer.name for answer in following.answers] == [call.name for call in item.tool_requests]
            assert all(answer.content.startswith("{") for answer in following.answers)
