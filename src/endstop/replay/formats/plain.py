"""Plain JSON lines, for everything that has no format of its own: one tool call a line.

    {"run": "r1", "tool": "search", "args": {"q": "x"}, "result": ["a"], "round": 3, "agent": "main", "at": "2026-…Z"}

`tool` is needed, the rest is not: `args` (object or text), `result` (null is an answer; without it there was none),
`error` (text, or `{"class": …, "message": …}`), `status`, `progress_version`, `retry_after_ms`, `call_id`, `round`,
`agent`, `effect`, `at`, `took_ms`, and the turn's `model`, `input_tokens`, `output_tokens`, `cost_usd` or
`spend_nanos`. A line with `"type": "user"` is a person's input; one with `"type": "turn"` a model call by itself.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from endstop.core.model import NAME_CHARS_MAX
from endstop.core.reasons import Effect, ErrorClass, Status
from endstop.core.slots import sealed
from endstop.replay.fields import (
    Json,
    arguments,
    first_of,
    integer,
    name,
    nanos_of_dollars,
    record,
    text,
    time_us,
    usage_of,
    version,
)
from endstop.replay.format import Format
from endstop.replay.trace import (
    OPEN_CALL,
    OPEN_RESULT,
    Event,
    Item,
    RunHead,
    Skips,
    TraceCall,
    TraceLost,
    TraceResult,
    TraceTurn,
    UserInput,
)

if TYPE_CHECKING:
    from endstop.replay.source import Source

__all__ = ["FORMAT"]

NAME: Final = "plain"
_TOKENS: Final = ("input_tokens", "output_tokens", "cost_usd", "spend_nanos")
_COUNTED: Final = frozenset({*_TOKENS, "model"})
_ERRORS: Final = {word.value: word for word in ErrorClass}
_STATUSES: Final = {word.value: word for word in Status}
_EFFECTS: Final = {word.value: word for word in Effect}
RUNS_MAX: Final = 100_000
# A whole number above this is microseconds since 1973, and needs no other look.
MICROSECONDS_FROM: Final = 10**14
# Fields that make more of an outcome than its result.
_SPECIAL: Final = frozenset({"error", "status", "progress_version", "took_ms"})


def _sniff(source: Source) -> int:
    if source.shape not in ("lines", "document"):
        return 0
    found = [item for item in source.head_records if isinstance(item, dict)]
    calls = [item for item in found if isinstance(item.get("tool"), str)]
    telling = [item for item in calls if "args" in item or "result" in item or "error" in item]
    return 60 if telling else 25 if calls else 0


class _Lines:
    """What is kept between the lines of one source: the runs, and the round that each is in."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self._heads: dict[str, RunHead] = {}
        self._rounds: dict[str, str] = {}

    def head(self, given: object) -> RunHead:
        """The run that a line names."""
        run_id = given if isinstance(given, str) else self._source.stem if given is None else str(given)
        head = self._heads.get(run_id)
        if head is None:
            if len(self._heads) >= RUNS_MAX:
                self._heads.clear()
            head = self._heads[run_id] = RunHead(run_id=run_id, source=self._source.name, format=NAME)
        return head

    def begins_turn(self, line: Json, head: RunHead, round_id: str | None) -> bool:
        """Whether a line is the first of its round, or tells of a turn's tokens."""
        if round_id is None:
            return any(field in line for field in _TOKENS)
        if self._rounds.get(head.run_id) == round_id:
            return False
        if len(self._rounds) >= RUNS_MAX:
            self._rounds.clear()
        self._rounds[head.run_id] = round_id
        return True


def _outcome(line: Json, call_id: str, at_us: int | None) -> TraceResult | TraceLost:
    """A line's outcome that is more than a result: a time it took, an error, a status, a version, or none at all."""
    took_ms = integer(line.get("took_ms"))
    end_us = at_us + took_ms * 1_000 if at_us is not None and took_ms is not None and took_ms > 0 else at_us
    error = line.get("error")
    if "result" not in line and error is None and "status" not in line:
        return TraceLost(call_id=call_id)
    error_class, message = _error(error)
    wait_ms = integer(line.get("retry_after_ms"))
    return TraceResult(
        call_id=call_id, value=line.get("result"), status=_STATUSES.get(str(line.get("status")), Status.PROGRESS),
        error_class=error_class, message=message, progress_version=version(line.get("progress_version")),
        retry_after_ms=wait_ms if wait_ms is not None and wait_ms >= 0 else None, at_us=end_us, took_ms=took_ms,
    )  # fmt: skip


def _turn(line: Json, agent: str, at_us: int | None) -> TraceTurn:
    if _COUNTED.isdisjoint(line):
        return TraceTurn(agent=agent, at_us=at_us)
    nanos = integer(line.get("spend_nanos"))
    return TraceTurn(
        agent=agent, model=text(line.get("model")),
        usage=usage_of(input_tokens=line.get("input_tokens"), output_tokens=line.get("output_tokens")),
        spend_nanos=nanos if nanos is not None and nanos >= 0 else nanos_of_dollars(line.get("cost_usd")), at_us=at_us,
    )  # fmt: skip


def _error(error: object) -> tuple[ErrorClass | None, str | None]:
    if error is None or error is False:
        return None, None
    found = record(error)
    said = text(first_of(found, "message", "text")) if found else error if isinstance(error, str) else "error"
    return _ERRORS.get(text(first_of(found, "class", "type")), ErrorClass.TOOL_FAILED), said[:2_000]


def _read(source: Source, skips: Skips) -> Iterator[Item]:
    lines = _Lines(source)
    calls = 0
    head, last_run = lines.head(None), None
    for line in source.records(skips):
        get = line.get
        run = get("run")
        if run != last_run:
            head, last_run = lines.head(run), run
        at, tool = get("at"), get("tool")
        at_us = None if at is None else at if type(at) is int and at > MICROSECONDS_FROM else time_us(at)
        if type(tool) is not str or not tool:
            event = _without_tool(line, at_us)
            if event is None:
                skips.add("line without a tool")
            else:
                yield head, event
            continue
        given, agent = get("round"), get("agent")
        round_id = given if given is None or type(given) is str else str(given)
        if agent is None:
            agent = "main"
        elif type(agent) is not str or not agent or len(agent) > NAME_CHARS_MAX:
            agent = name(agent)
        if lines.begins_turn(line, head, round_id):
            yield head, _turn(line, agent, at_us)
        calls += 1
        call_id, effect, args = get("call_id"), get("effect"), get("args")
        if type(call_id) is not str or not call_id:
            call_id = f"call-{calls}"
        if type(args) is not dict:
            args = arguments(args)
        if len(tool) > NAME_CHARS_MAX:
            tool = name(tool)
        made = OPEN_CALL(tool=tool, args=args, call_id=call_id, round_id=round_id, agent=agent, at_us=at_us)
        if effect is not None:
            made = replace(made, effect=_EFFECTS.get(str(effect)))
        yield head, sealed(made, TraceCall)
        if "result" in line and _SPECIAL.isdisjoint(line):
            yield head, sealed(OPEN_RESULT(call_id=call_id, value=line["result"], at_us=at_us), TraceResult)
        else:
            yield head, _outcome(line, call_id, at_us)


def _without_tool(line: Json, at_us: int | None) -> Event | None:
    if line.get("type") == "user":
        return UserInput(at_us=at_us)
    if line.get("type") == "turn":
        return _turn(line, text(line.get("agent")) or "main", at_us)
    return None


FORMAT: Final = Format(name=NAME, title="plain JSON lines", tried=True, sniff=_sniff, read=_read)
