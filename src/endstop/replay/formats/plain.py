"""Plain JSON lines, for everything that has no format of its own: one tool call a line.

    {"run": "r1", "tool": "search", "args": {"q": "x"}, "result": ["a"], "round": 3, "agent": "main", "at": "2026-…Z"}

`tool` is needed, the rest is not: `args` (object or text), `result` (null is an answer; without it there was none),
`error` (text, or `{"class": …, "message": …}`), `status`, `progress_version`, `retry_after_ms`, `call_id`, `round`,
`agent`, `effect`, `at`, `took_ms`, and the turn's `model`, `input_tokens`, `output_tokens`, `cost_usd` or
`spend_nanos`. A line with `"type": "user"` is a person's input; one with `"type": "turn"` a model call by itself.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

from endstop.core.reasons import Effect, ErrorClass, Status
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
_ERRORS: Final = {word.value: word for word in ErrorClass}
_STATUSES: Final = {word.value: word for word in Status}
_EFFECTS: Final = {word.value: word for word in Effect}
RUNS_MAX: Final = 100_000


def _sniff(source: Source) -> int:
    if source.shape not in ("lines", "document"):
        return 0
    found = [item for item in source.head_records if isinstance(item, dict)]
    calls = [item for item in found if isinstance(item.get("tool"), str)]
    telling = [item for item in calls if "args" in item or "result" in item or "error" in item]
    return 60 if telling else 25 if calls else 0


class _Lines:
    """The events of the lines of one source."""

    def __init__(self, source: Source, skips: Skips) -> None:
        self._source = source
        self._skips = skips
        self._heads: dict[str, RunHead] = {}
        self._rounds: dict[str, str] = {}
        self._calls = 0

    def head(self, line: Json) -> RunHead:
        """The run that a line belongs to."""
        given = line.get("run")
        run_id = given if isinstance(given, str) else self._source.stem if given is None else str(given)
        head = self._heads.get(run_id)
        if head is None:
            if len(self._heads) >= RUNS_MAX:
                self._heads.clear()
            head = self._heads[run_id] = RunHead(run_id=run_id, source=self._source.name, format=NAME)
        return head

    def events(self, line: Json, head: RunHead) -> Iterator[Event]:
        """The events of one line."""
        at = line.get("at")
        at_us = None if at is None else time_us(at)
        tool = line.get("tool")
        if type(tool) is not str or not tool:
            yield from self._other(line, at_us)
            return
        given = line.get("round")
        round_id = None if given is None else given if type(given) is str else str(given)
        agent = line.get("agent")
        agent = name(agent) if agent is not None else "main"
        if self._begins_turn(line, head, round_id):
            yield _turn(line, agent, at_us)
        self._calls += 1
        call_id = line.get("call_id")
        if type(call_id) is not str or not call_id:
            call_id = f"call-{self._calls}"
        effect = line.get("effect")
        args = line.get("args")
        yield TraceCall(
            tool=name(tool), args=args if type(args) is dict else arguments(args), call_id=call_id, round_id=round_id,
            agent=agent, effect=None if effect is None else _EFFECTS.get(str(effect)), at_us=at_us,
        )  # fmt: skip
        yield self._outcome(line, call_id, at_us)

    def _begins_turn(self, line: Json, head: RunHead, round_id: str | None) -> bool:
        if round_id is None:
            return any(field in line for field in _TOKENS)
        if self._rounds.get(head.run_id) == round_id:
            return False
        if len(self._rounds) >= RUNS_MAX:
            self._rounds.clear()
        self._rounds[head.run_id] = round_id
        return True

    def _outcome(self, line: Json, call_id: str, at_us: int | None) -> Event:
        took_ms = integer(line.get("took_ms"))
        end_us = at_us + took_ms * 1_000 if at_us is not None and took_ms is not None and took_ms > 0 else at_us
        error = line.get("error")
        if "result" not in line and error is None and "status" not in line:
            return TraceLost(call_id=call_id)
        if error is None and "status" not in line and "progress_version" not in line:
            return TraceResult(call_id=call_id, value=line["result"], at_us=end_us, took_ms=took_ms)
        error_class, message = _error(error)
        wait_ms = integer(line.get("retry_after_ms"))
        return TraceResult(
            call_id=call_id, value=line.get("result"), status=_STATUSES.get(str(line.get("status")), Status.PROGRESS),
            error_class=error_class, message=message, progress_version=version(line.get("progress_version")),
            retry_after_ms=wait_ms if wait_ms is not None and wait_ms >= 0 else None, at_us=end_us, took_ms=took_ms,
        )  # fmt: skip

    def _other(self, line: Json, at_us: int | None) -> Iterator[Event]:
        if line.get("type") == "user":
            yield UserInput(at_us=at_us)
        elif line.get("type") == "turn":
            yield _turn(line, text(line.get("agent")) or "main", at_us)
        else:
            self._skips.add("line without a tool")


def _turn(line: Json, agent: str, at_us: int | None) -> TraceTurn:
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
    lines = _Lines(source, skips)
    for line in source.records(skips):
        head = lines.head(line)
        for event in lines.events(line, head):
            yield head, event


FORMAT: Final = Format(name=NAME, title="plain JSON lines", tried=True, sniff=_sniff, read=_read)
