"""A model that answers from a script: one JSON object a line, one assistant turn a line.

    {"after": "end"}                                                     settings, only as the first line
    {"tool_calls": [{"id": "c1", "name": "search", "args": {}}], "usage": {"input_tokens": 90, "output_tokens": 7}}
    {"fault": {"class": "rate_limit", "retry_after_ms": 5}}              the provider fails this once
    {"text": "Done."}

Blank lines and lines that start with `//` are skipped. After the last line the last one repeats; with
`"after": "end"` an empty `end_turn` follows instead.

Where a script stands follows from the conversation alone (how many assistant turns it holds), so one script serves
any number of conversations, and each starts at the first line. Only scripted faults are remembered: a conversation
does not show them.
"""

from __future__ import annotations

import asyncio
import difflib
import threading
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal

import orjson

from endstop.errors import ProviderError, TaskInvalidError
from endstop.loop.conversation import STOP_REASONS, AssistantTurn, ToolRequest, reported_usage
from endstop.loop.faults import FAULTS

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from endstop.core.model import Usage
    from endstop.loop.conversation import Item, StopReason, ToolOffer
    from endstop.loop.faults import Fault

__all__ = ["ScriptedFault", "ScriptedModel", "ScriptedTurn", "load_script", "parse_script"]

SCRIPT_BYTES_MAX: Final = 16 * 1024 * 1024
DELAY_MS_MAX: Final = 600_000

After = Literal["repeat", "end"]

_SETTINGS: Final = ("after",)
_TURN: Final = ("text", "tool_calls", "usage", "stop_reason", "delay_ms", "fault")
_CALL: Final = ("id", "name", "args")
_USAGE: Final = ("input_tokens", "output_tokens", "cache_read_tokens", "cache_write_tokens", "reasoning_tokens")
_FAULT: Final = ("class", "retry_after_ms")


@dataclass(frozen=True, slots=True, kw_only=True)
class ScriptedFault:
    """A failure of the provider, on cue."""

    fault: Fault
    retry_after_ms: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ScriptedTurn:
    """One line of a script. `fault` stands alone; `delay_ms` passes before the answer, for a demo to be watched."""

    text: str = ""
    tool_calls: tuple[ToolRequest, ...] = ()
    usage: Usage | None = None
    stop_reason: StopReason | None = None
    delay_ms: int = 0
    fault: ScriptedFault | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Answer:
    """An assistant turn and the failures that come before it."""

    turn: ScriptedTurn
    faults: tuple[ScriptedTurn, ...] = ()


@dataclass(slots=True)
class _Cue:
    """How many of the failures before each answer were raised already."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    raised: dict[int, int] = field(default_factory=dict)


class ScriptedModel:
    """A `ModelClient` that answers from `turns`, each a `ScriptedTurn` or a mapping like a line of a script.

    `after` says what follows the last one. Raises TaskInvalidError when a turn does not parse or there is none.
    """

    def __init__(
        self,
        turns: Sequence[ScriptedTurn | Mapping[str, object]],
        *,
        after: After = "repeat",
        name: str = "scripted:turns",
    ) -> None:
        if after not in ("repeat", "end"):
            msg = f"{name}: `after` must be 'repeat' or 'end'"
            raise TaskInvalidError(msg)
        self._name = name
        self._after = after
        self._answers: list[_Answer] = []
        self._tail: tuple[ScriptedTurn, ...] = ()
        self._cue = _Cue()
        faults: list[ScriptedTurn] = []
        for number, given in enumerate(turns, 1):
            turn = given if isinstance(given, ScriptedTurn) else _turn(given, where=f"{name}, turn {number}")
            if turn.fault is not None:
                faults.append(turn)
            else:
                self._answers.append(_Answer(turn=_with_ids(turn, number), faults=tuple(faults)))
                faults = []
        self._tail = tuple(faults)
        if not self._answers and not self._tail:
            msg = f'{name} holds no turn: write one JSON object a line, such as {{"text": "Done."}}'
            raise TaskInvalidError(msg)

    @property
    def name(self) -> str:
        """The name it is recorded under."""
        return self._name

    async def respond(
        self,
        *,
        system: str,  # noqa: ARG002  # a script does not listen
        items: Sequence[Item],
        tools: Sequence[ToolOffer],  # noqa: ARG002  # a script may ask for tools that nobody offers
        output_tokens_max: int | None,  # noqa: ARG002  # a script is as long as it is
        on_text: Callable[[str], None] | None,
    ) -> AssistantTurn:
        """The next turn of the script. Raises ProviderError where the script says so."""
        spoken = sum(1 for item in items if isinstance(item, AssistantTurn))
        turn = self._next(spoken)
        if turn.delay_ms:
            # A future that nobody resolves: the wait ends with the time, or at once when the task is cancelled.
            await asyncio.wait({asyncio.get_running_loop().create_future()}, timeout=turn.delay_ms / 1_000)
        if turn.fault is not None:
            msg = f"{self._name}: scripted provider fault {turn.fault.fault!r} on this model call"
            raise ProviderError(msg, turn.fault.fault, turn.fault.retry_after_ms)
        if turn.text and on_text is not None:
            on_text(turn.text)
        return AssistantTurn(
            text=turn.text,
            tool_requests=turn.tool_calls,
            stop_reason=turn.stop_reason or ("tool_use" if turn.tool_calls else "end_turn"),
            usage=turn.usage,
            model=self._name,
        )

    async def aclose(self) -> None:
        """Nothing is held."""

    def _next(self, spoken: int) -> ScriptedTurn:
        """The line after `spoken` assistant turns, or the failure that is due before it."""
        past = spoken - len(self._answers)
        faults = self._tail if past >= 0 else self._answers[spoken].faults
        with self._cue.lock:
            raised = self._cue.raised.get(spoken, 0)
            if raised < len(faults):
                self._cue.raised[spoken] = raised + 1
                return faults[raised]
            if past >= 0 and faults and self._after == "repeat":
                return faults[-1]
            # The next conversation meets the same failures again.
            self._cue.raised.pop(spoken, None)
        if past < 0:
            return self._answers[spoken].turn
        if self._after == "end":
            return ScriptedTurn()
        last = self._answers[-1].turn
        # A provider never gives one id to two calls of a conversation, so a repeated turn gets its own.
        repeated = tuple(replace(call, call_id=f"{call.call_id}-r{past + 1}") for call in last.tool_calls)
        return replace(last, tool_calls=repeated)


def load_script(path: str | Path, *, base_dir: Path | None = None, name: str | None = None) -> ScriptedModel:
    """Read a script; `path` is relative to `base_dir`. Raises TaskInvalidError naming file and line."""
    full = (base_dir or Path()) / path
    try:
        if full.stat().st_size > SCRIPT_BYTES_MAX:
            msg = f"scripted model {full}: the file is larger than {SCRIPT_BYTES_MAX} bytes"
            raise TaskInvalidError(msg)
        text = full.read_text(encoding="utf-8")
    except OSError as error:
        msg = f"scripted model {full}: the file cannot be read ({error.strerror}); check the path"
        raise TaskInvalidError(msg) from error
    except UnicodeDecodeError as error:
        msg = f"scripted model {full}: the file is no UTF-8 text"
        raise TaskInvalidError(msg) from error
    return parse_script(text, source=str(full), name=name or f"scripted:{path}")


def parse_script(text: str, *, source: str, name: str) -> ScriptedModel:
    """Parse a script's text; `source` stands in errors. Raises TaskInvalidError naming the line."""
    after: After = "repeat"
    turns: list[ScriptedTurn] = []
    first = True
    for number, line in enumerate(text.split("\n"), 1):
        stripped = line.strip()
        if not stripped or stripped.startswith("//"):
            continue
        where = f"{source}, line {number}"
        value = _loaded(stripped, where)
        if "after" in value:
            if not first:
                raise TaskInvalidError(f"{where}: settings stand in the first line only")
            after = _settings(value, where)
        else:
            turns.append(_turn(value, where=where))
        first = False
    if not turns:
        raise TaskInvalidError(f'{source} holds no turn: write one JSON object a line, such as {{"text": "Done."}}')
    return ScriptedModel(turns, after=after, name=name)


def _loaded(line: str, where: str) -> Mapping[str, object]:
    try:
        value = orjson.loads(line)
    except ValueError as error:
        raise TaskInvalidError(f"{where}: no JSON ({error})") from error
    if not isinstance(value, dict):
        raise TaskInvalidError(f"{where}: a line is one JSON object, not {type(value).__name__}")
    return value


def _settings(value: Mapping[str, object], where: str) -> After:
    _known(value, _SETTINGS, where)
    after = value["after"]
    if after == "repeat":
        return "repeat"
    if after == "end":
        return "end"
    raise TaskInvalidError(f"{where}: `after` must be 'repeat' or 'end'")


def _turn(value: Mapping[str, object], *, where: str) -> ScriptedTurn:
    _known(value, _TURN, where)
    delay_ms = _count(value, "delay_ms", where) or 0
    if delay_ms > DELAY_MS_MAX:
        raise TaskInvalidError(f"{where}: `delay_ms` is at most {DELAY_MS_MAX}")
    if "fault" in value:
        if "text" in value or "tool_calls" in value:
            raise TaskInvalidError(f"{where}: a fault line holds no text and no tool calls")
        return ScriptedTurn(fault=_fault(value["fault"], where), delay_ms=delay_ms)
    if "text" not in value and "tool_calls" not in value:
        raise TaskInvalidError(f"{where}: a turn needs `text`, `tool_calls` or `fault`")
    text = value.get("text", "")
    if not isinstance(text, str):
        raise TaskInvalidError(f"{where}: `text` must be text")
    calls = value.get("tool_calls", [])
    if not isinstance(calls, list | tuple):
        raise TaskInvalidError(f"{where}: `tool_calls` must be a list")
    return ScriptedTurn(
        text=text,
        tool_calls=tuple(_call(call, f"{where}, tool call {number}") for number, call in enumerate(calls, 1)),
        usage=_usage(value.get("usage"), where),
        stop_reason=_stop_reason(value.get("stop_reason"), where),
        delay_ms=delay_ms,
    )


def _call(value: object, where: str) -> ToolRequest:
    if not isinstance(value, dict):
        raise TaskInvalidError(f"{where}: a tool call is an object with `id`, `name` and `args`")
    _known(value, _CALL, where)
    name = value.get("name")
    if not isinstance(name, str) or not name:
        raise TaskInvalidError(f"{where}: `name` must name a tool")
    call_id = value.get("id", "")
    if not isinstance(call_id, str):
        raise TaskInvalidError(f"{where}: `id` must be text")
    args = value.get("args", {})
    if not isinstance(args, dict | str):
        raise TaskInvalidError(f"{where}: `args` must be an object, or text to play arguments that do not parse")
    return ToolRequest(call_id=call_id, name=name, args=args)


def _usage(value: object, where: str) -> Usage | None:
    if value is None:
        return None
    if not isinstance(value, dict):
        raise TaskInvalidError(f"{where}: `usage` is an object with `input_tokens` and `output_tokens`")
    _known(value, _USAGE, where)
    counts = {key: _count(value, key, where) or 0 for key in _USAGE}
    return reported_usage(**counts)


def _stop_reason(value: object, where: str) -> StopReason | None:
    if value is None:
        return None
    for known in STOP_REASONS:
        if value == known:
            return known
    raise TaskInvalidError(f"{where}: `stop_reason` must be one of {', '.join(STOP_REASONS)}")


def _fault(value: object, where: str) -> ScriptedFault:
    if not isinstance(value, dict):
        raise TaskInvalidError(f"{where}: `fault` is an object with `class` and perhaps `retry_after_ms`")
    _known(value, _FAULT, where)
    for known in FAULTS:
        if value.get("class") == known:
            return ScriptedFault(fault=known, retry_after_ms=_count(value, "retry_after_ms", where))
    raise TaskInvalidError(f"{where}: the fault's `class` must be one of {', '.join(FAULTS)}")


def _count(value: Mapping[str, object], key: str, where: str) -> int | None:
    count = value.get(key)
    if count is None:
        return None
    if isinstance(count, bool) or not isinstance(count, int) or count < 0:
        raise TaskInvalidError(f"{where}: `{key}` must be a whole number, 0 or more")
    return count


def _known(value: Mapping[str, object], names: Sequence[str], where: str) -> None:
    for key in value:
        if key not in names:
            close = difflib.get_close_matches(str(key), names, n=1)
            hint = f"did you mean `{close[0]}`?" if close else f"known are {', '.join(names)}"
            raise TaskInvalidError(f"{where}: unknown member `{key}`; {hint}")


def _with_ids(turn: ScriptedTurn, number: int) -> ScriptedTurn:
    """The turn with an id for each call that the script left without one."""
    calls = tuple(
        call if call.call_id else replace(call, call_id=f"call-{number}-{index}")
        for index, call in enumerate(turn.tool_calls, 1)
    )
    return replace(turn, tool_calls=calls)
