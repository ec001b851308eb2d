"""The list of formats, and which one a source is in: by content, never by name."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Final

from endstop.errors import UsageError
from endstop.replay.format import Format
from endstop.replay.source import Source
from endstop.replay.trace import Event, Item, RunHead, Skips, TraceRun

__all__ = ["CONFIDENCE_MIN", "format_named", "formats", "load_runs", "read", "recognise"]

CONFIDENCE_MIN: Final = 20
RUN_EVENTS_MAX: Final = 2_000_000
UNKNOWN: Final = "source in no known format"


@cache
def formats() -> tuple[Format, ...]:
    """Every format, the more telling ones first: among equals the first wins."""
    from endstop.replay.formats import (
        ag2_chat,
        anthropic_messages,
        autogen_session,
        claude_code,
        codex,
        gemini_cli,
        google_adk,
        http_exchanges,
        inspect_log,
        intercode,
        langfuse,
        langsmith,
        ledger,
        magentic_one,
        mini_swe_agent,
        openai_chat,
        openai_responses,
        openhands,
        openinference,
        otel_genai,
        plain,
        pydantic_ai,
        react_text,
        swe_agent,
        toolbench,
    )

    return (
        ledger.FORMAT,
        claude_code.FORMAT,
        codex.FORMAT,
        swe_agent.FORMAT,
        mini_swe_agent.FORMAT,
        inspect_log.FORMAT,
        openhands.FORMAT,
        google_adk.FORMAT,
        intercode.FORMAT,
        toolbench.FORMAT,
        autogen_session.FORMAT,
        magentic_one.FORMAT,
        ag2_chat.FORMAT,
        pydantic_ai.FORMAT,
        gemini_cli.FORMAT,
        openinference.FORMAT,
        otel_genai.FORMAT,
        langfuse.FORMAT,
        langsmith.FORMAT,
        http_exchanges.FORMAT,
        anthropic_messages.FORMAT,
        openai_responses.FORMAT,
        openai_chat.FORMAT,
        plain.FORMAT,
        react_text.FORMAT,
    )


def format_named(name: str) -> Format:
    """The format called `name`. Raises UsageError for an unknown one."""
    for known in formats():
        if known.name == name:
            return known
    msg = f"there is no trace format {name!r}; one of {', '.join(sorted(known.name for known in formats()))}"
    raise UsageError(msg)


def recognise(source: Source) -> Format | None:
    """The format that `source` looks like most, or None when it looks like none."""
    best, confidence = None, CONFIDENCE_MIN - 1
    for known in formats():
        found = known.sniff(source)
        if found > confidence:
            best, confidence = known, found
    return best


def read(path: Path, skips: Skips, *, format_name: str | None = None, name: str | None = None) -> Iterator[Item]:
    """The events of every run in the file at `path`, in order; what cannot be read is counted in `skips`.

    Raises UsageError when the file cannot be opened or `format_name` is unknown; never for what the file holds.
    """
    source = Source(path, name=name)
    found = recognise(source) if format_name is None else format_named(format_name)
    if found is None:
        skips.add(UNKNOWN)
        return
    yield from found.read(source, skips)


def load_runs(
    path: Path, skips: Skips, *, run_id: str | None = None, format_name: str | None = None
) -> tuple[TraceRun, ...]:
    """Whole runs in memory: all of the file at `path`, or the one called `run_id`.

    For work that needs a run twice; a replay streams. Raises UsageError as `read` does, and when a run has more than
    `RUN_EVENTS_MAX` events.
    """
    heads: dict[str, RunHead] = {}
    events: dict[str, list[Event]] = {}
    for head, event in read(path, skips, format_name=format_name):
        if run_id is not None and head.run_id != run_id:
            continue
        heads.setdefault(head.run_id, head)
        kept = events.setdefault(head.run_id, [])
        kept.append(event)
        if len(kept) > RUN_EVENTS_MAX:
            msg = f"run {head.run_id} has more than {RUN_EVENTS_MAX} events: too many to hold at once"
            raise UsageError(msg)
    return tuple(
        TraceRun(
            run_id=head.run_id, source=head.source, format=head.format, outcome=head.outcome,
            events=tuple(events[head.run_id]),
        )
        for head in heads.values()
    )  # fmt: skip
