"""Endstop's own ledger: the entries of a store file, or as the command line prints and exports them.

Entries hold digests, so digests are compared: a replay under the same policy decides as the live run did, and one
under another policy shows what that would have done with the same answers. Likeness was judged when the entries were
written and stands in them.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Final

import orjson

from endstop.core.evidence import NEEDS_CHANGE
from endstop.core.reasons import Effect, ErrorClass, Reason, Status
from endstop.errors import EndstopError
from endstop.replay.fields import Json, integer, name, record, records_in, text, usage_of, version
from endstop.replay.format import Format
from endstop.replay.trace import (
    AnswerDigest,
    Event,
    Item,
    RunHead,
    Skips,
    TraceCall,
    TraceHandoff,
    TraceLost,
    TracePause,
    TraceResult,
    TraceStart,
    TraceTurn,
    TraceUsage,
    UserInput,
)

if TYPE_CHECKING:
    from endstop.replay.source import Source

__all__ = ["FORMAT", "entry_events"]

NAME: Final = "endstop"
PAGE: Final = 1_000
_EFFECTS: Final = {word.value: word for word in Effect}
_STATUSES: Final = {word.value: word for word in Status}
_ERRORS: Final = {word.value: word for word in ErrorClass}
_FAULTS: Final = {
    Reason.UNKNOWN_TOOL.value: ErrorClass.UNKNOWN_TOOL,
    Reason.MALFORMED_CALL.value: ErrorClass.SCHEMA,
    Reason.HOST_DENIED.value: ErrorClass.DENIED,
}
# What records something about a run, but is no event of its course.
_QUIET: Final = frozenset({"run_join", "child", "checkpoint", "control", "operation", "ledger_open", "recover"})


def _entry_of(item: Json) -> Json:
    inner = item.get("entry")
    return inner if isinstance(inner, dict) else item


def _is_entry(item: Json) -> bool:
    return {"v", "type", "run", "seq", "ts_us"} <= item.keys()


def _sniff(source: Source) -> int:
    if source.shape == "store":
        return 50
    if isinstance(source.document, dict) and isinstance(source.document.get("entries"), list):
        found = records_in(source.document["entries"])
    else:
        found = [item for item in source.head_records if isinstance(item, dict)]
    return 99 if any(_is_entry(_entry_of(item)) for item in found) else 0


def _entries(source: Source, skips: Skips) -> Iterator[Json]:
    if source.shape == "store":
        yield from _stored(source.path, skips)
        return
    if isinstance(source.document, dict) and isinstance(source.document.get("entries"), list):
        yield from map(_entry_of, records_in(source.document["entries"]))
        return
    for item in source.records(skips):
        yield _entry_of(item)


def _stored(path: Path, skips: Skips) -> Iterator[Json]:
    from endstop.runtime.clock import SystemClock, SystemIds
    from endstop.store.registry import open_store

    try:
        store = open_store(str(path.resolve()), new_key=SystemIds().new_key, now_us=SystemClock().now_us)
    except EndstopError as error:
        skips.add(f"store that cannot be opened ({error.code})")
        return
    try:
        after = -1
        while page := store.entries(after_index=after, limit=PAGE).result():
            for entry in page:
                after = entry.index
                yield record(orjson.loads(entry.leaf))
    finally:
        store.close()


def _read(source: Source, skips: Skips) -> Iterator[Item]:
    heads: dict[str, RunHead] = {}
    owners: dict[str, set[str]] = {}
    for entry in _entries(source, skips):
        run_id = text(entry.get("run"))
        if not _is_entry(entry):
            skips.add("record that is no ledger entry")
            continue
        if not run_id:
            continue
        head = heads.setdefault(run_id, RunHead(run_id=run_id, source=source.name, format=NAME))
        for event in entry_events(entry, owners.setdefault(run_id, set()), skips):
            yield head, event


def entry_events(entry: Json, owners: set[str], skips: Skips) -> Iterator[Event]:
    """The events that one entry stands for. `owners` are the workers inside the run, kept between its entries."""
    kind = text(entry.get("type"))
    at_us = integer(entry.get("ts_us"))
    call_id = text(entry.get("call"))
    match kind:
        case "run_open":
            owners.add(text(entry.get("owner")))
            yield TraceStart(version=version(entry.get("ver")), at_us=at_us)
        case "run_leave":
            owners.discard(text(entry.get("owner")))
            if not owners:
                yield TracePause(at_us=at_us)
        case "call_intent":
            yield _call(entry, at_us)
        case "call_refused" | "call_replayed":
            yield _call(entry, at_us)
            yield TraceLost(call_id=call_id)
        case "result":
            yield _result(entry, at_us)
        case "lost":
            yield TraceLost(call_id=call_id)
        case "turn_intent" | "turn_refused":
            yield TraceTurn(
                agent=text(entry.get("agent")) or "main", model=text(entry.get("model")),
                tokens_bound=integer(entry.get("tokens_bound")), nanos_bound=integer(entry.get("nanos_bound")),
                at_us=at_us,
            )  # fmt: skip
        case "turn":
            yield from _used(entry, at_us)
        case "handoff":
            yield TraceHandoff(
                from_agent=text(entry.get("agent")) or "main",
                to_agent="",
                fingerprint=text(entry.get("fp")),
                at_us=at_us,
            )
        case "user_input":
            yield UserInput(at_us=at_us)
        case "resume":
            owners.clear()
            yield TraceStart(resumed=True, at_us=at_us)
        case "stop" | "complete":
            owners.clear()
            # A resume may follow, so this is not the run's last word.
            yield TracePause(outcome=text(entry.get("reason")), at_us=at_us)
        case _:
            if kind == "run_join":
                owners.add(text(entry.get("owner")))
            if kind not in _QUIET:
                skips.add(f"entry of type {kind}"[:60])


def _call(entry: Json, at_us: int | None) -> TraceCall:
    return TraceCall(
        tool=name(entry.get("tool")), args="", call_id=text(entry.get("call")), round_id=entry_text(entry, "round"),
        agent=text(entry.get("agent")) or "main", effect=_EFFECTS.get(text(entry.get("effect"))),
        fault=_FAULTS.get(text(entry.get("reason"))), fingerprint=text(entry.get("fp")),
        key_digest=entry_text(entry, "key"), at_us=at_us,
    )  # fmt: skip


def entry_text(entry: Json, field: str) -> str | None:
    """A field of an entry when it is text."""
    value = entry.get(field)
    return value if isinstance(value, str) else None


def _result(entry: Json, at_us: int | None) -> TraceResult:
    not_before_us = integer(entry.get("nb"))
    wait_ms: int | None = None
    if not_before_us is not None:
        wait_ms = NEEDS_CHANGE if not_before_us == NEEDS_CHANGE else max(0, (not_before_us - (at_us or 0)) // 1_000)
    return TraceResult(
        call_id=text(entry.get("call")), status=_STATUSES.get(text(entry.get("status")), Status.PROGRESS),
        error_class=_ERRORS.get(text(entry.get("cls"))), progress_version=version(entry.get("ver")),
        digest=AnswerDigest(
            answer=text(entry.get("answer")), evidence="mute" not in entry, failed="failed" in entry,
            error_symbol=text(entry.get("sym")), version_source=entry_text(entry, "src"), retry_after_ms=wait_ms,
        ),
        at_us=at_us,
    )  # fmt: skip


def _used(entry: Json, at_us: int | None) -> Iterator[Event]:
    usage = usage_of(
        input_tokens=entry.get("in"), output_tokens=entry.get("out"), cache_read=entry.get("cache_read"),
        cache_write=entry.get("cache_write"), reasoning=entry.get("reasoning"),
    )  # fmt: skip
    nanos = integer(entry.get("nanos"))
    if usage is not None or nanos:
        from endstop.core.model import Usage

        yield TraceUsage(usage=usage or Usage(), spend_nanos=nanos, at_us=at_us)


FORMAT: Final = Format(
    name=NAME, title="Endstop's own ledger (store file or entries)", tried=True, sniff=_sniff, read=_read
)
