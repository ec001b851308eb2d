"""Google ADK sessions: `function_call` and `function_response` parts in a list of events.

Newer files write names in camel case; both are read. Responses find their call by id, else the oldest call of that
name. A transfer to another agent is a call like any other.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

from endstop.replay.fields import Json, arguments, first_of, name, record, records_in, text, time_us, usage_of
from endstop.replay.format import CallIds, Format
from endstop.replay.trace import Event, Item, RunEnd, RunHead, Skips, TraceCall, TraceResult, TraceTurn, UserInput

if TYPE_CHECKING:
    from endstop.core.model import Usage
    from endstop.replay.source import Source

__all__ = ["FORMAT", "PartStream", "gemini_usage"]

NAME: Final = "google_adk"


def gemini_usage(value: object) -> Usage | None:
    """Gemini's usage metadata, in either spelling; thoughts are output."""
    found = record(value)
    thoughts = first_of(found, "thoughts_token_count", "thoughtsTokenCount", "thoughts")
    answered = first_of(found, "candidates_token_count", "candidatesTokenCount", "output")
    total_out = (answered if isinstance(answered, int) else 0) + (thoughts if isinstance(thoughts, int) else 0)
    return usage_of(
        input_tokens=first_of(found, "prompt_token_count", "promptTokenCount", "input"), output_tokens=total_out,
        cache_read=first_of(found, "cached_content_token_count", "cachedContentTokenCount", "cached"),
        reasoning=thoughts,
    )  # fmt: skip


class PartStream:
    """The events of one conversation of contents with parts, as Gemini writes them."""

    def __init__(self, skips: Skips) -> None:
        self._skips = skips
        self._ids = CallIds()
        self._turns = 0

    def events(
        self, parts: list[Json], *, model: bool, person: bool, agent: str, usage: Usage | None, at_us: int | None
    ) -> Iterator[Event]:
        """The events of one content. `model`: the model made it; `person`: it is a person's, if it is no answer."""
        calls = [record(first_of(part, "function_call", "functionCall")) for part in parts]
        answers = [record(first_of(part, "function_response", "functionResponse")) for part in parts]
        if model and not any(answers):
            self._turns += 1
            yield TraceTurn(agent=agent, usage=usage, at_us=at_us)
        for call in filter(None, calls):
            tool = name(call.get("name"))
            yield TraceCall(
                tool=tool, args=arguments(call.get("args")), call_id=self._ids.opened(text(call.get("id")), tool),
                round_id=f"turn-{self._turns}", agent=agent, at_us=at_us,
            )  # fmt: skip
        for answer in filter(None, answers):
            call_id = self._ids.answered(text(answer.get("id")), name(answer.get("name")))
            if call_id:
                yield TraceResult(call_id=call_id, value=answer.get("response"), agent=agent, at_us=at_us)
            else:
                self._skips.add("result without a call")
        if person and not any(answers) and any(part.get("text") for part in parts):
            yield UserInput(at_us=at_us)


def _events_of(document: object) -> list[Json]:
    return [item for item in records_in(record(document).get("events")) if isinstance(item.get("content"), dict)]


def _sniff(source: Source) -> int:
    events = _events_of(source.document)
    if not events:
        return 0
    has_parts = any(isinstance(record(event.get("content")).get("parts"), list) for event in events)
    return 92 if has_parts and any("author" in event for event in events) else 0


def _read(source: Source, skips: Skips) -> Iterator[Item]:
    document = record(source.document)
    head = RunHead(run_id=text(document.get("id")) or source.stem, source=source.name, format=NAME)
    stream = PartStream(skips)
    for event in _events_of(document):
        content = record(event.get("content"))
        if first_of(event, "partial") is True:
            skips.add("partial event of a stream")
            continue
        author = name(event.get("author"))
        usage = gemini_usage(first_of(event, "usage_metadata", "usageMetadata"))
        for made in stream.events(
            records_in(content.get("parts")), model=author != "user", person=author == "user",
            agent="main" if author == "user" else author, usage=usage, at_us=time_us(event.get("timestamp")),
        ):  # fmt: skip
            yield head, made
    yield head, RunEnd()


FORMAT: Final = Format(name=NAME, title="Google ADK sessions", tried=True, sniff=_sniff, read=_read)
