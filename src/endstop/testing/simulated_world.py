"""What stands outside Endstop in a simulation: clocks, ids, who is alive, the tools' target and the model's provider.

The target is the judge: it knows which effects happened, whatever any store says.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from endstop.core.model import ToolResult
from endstop.core.reasons import Status
from endstop.errors import NotAppliedError
from endstop.testing.simulated_faults import Chance, Fault

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["EPOCH_US", "SimulatedCancel", "SimulatedClock", "SimulatedIds", "SimulatedToolError", "Target", "ToolRun"]

EPOCH_US: Final = 1_800_000_000_000_000
JUMP_US_MAX: Final = 3_600_000_000
TICK_US_MAX: Final = 20_000
SLOW_TICKS_MAX: Final = 30
LATE_TICKS_MAX: Final = 40
VALUE_MAX: Final = 1_000


class SimulatedToolError(RuntimeError):
    """A tool's own failure, which proves nothing."""


class SimulatedCancel(BaseException):
    """The caller of a tool was cancelled."""


class SimulatedClock:
    """The world's time, in microseconds since 1970. It jumps when the plan says so."""

    def __init__(self) -> None:
        self._now_us = EPOCH_US

    def now_us(self) -> int:
        """The time now."""
        return self._now_us

    def sleep_ms(self, duration_ms: int) -> None:
        """Let time pass."""
        self._now_us += duration_ms * 1_000

    def tick(self, chance: Chance) -> int:
        """Let one tick pass; gives the jump in microseconds, 0 for none."""
        self._now_us += chance.between(1, TICK_US_MAX)
        jump_us = 0
        if chance.fires(Fault.CLOCK_FORWARDS):
            jump_us = chance.between(1_000, JUMP_US_MAX)
        elif chance.fires(Fault.CLOCK_BACKWARDS):
            jump_us = -chance.between(1_000, JUMP_US_MAX)
        self._now_us += jump_us
        return jump_us


class SimulatedIds:
    """Ids in their order, and keys from the dice."""

    def __init__(self, chance: Chance) -> None:
        self._chance = chance
        self._serial = 0

    def new_id(self) -> str:
        """The next id."""
        self._serial += 1
        return f"id{self._serial}"

    def new_key(self) -> bytes:
        """32 bytes."""
        return self._chance.key()


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolScript:
    """How one call of a tool goes: how many ticks it takes, when its effect happens, and how it ends.

    `effect_after` counts ticks from the start, None for never; it may be later than `ticks` (a request that is still
    on the wire when its caller has given up). `error` None means that `result` comes back.
    """

    ticks: int
    effect_after: int | None
    result: ToolResult[object]
    error: BaseException | None = None


class ToolRun:
    """One call of a tool, from its start to its end."""

    def __init__(
        self, *, serial: int, operation_id: str | None, attempt: int, tool: str, tick: int, script: ToolScript
    ) -> None:
        self.serial = serial
        self.operation_id = operation_id
        self.attempt = attempt
        self.tool = tool
        self.script = script
        self.ends_at = tick + script.ticks
        self.effect_at = None if script.effect_after is None else tick + script.effect_after
        self.has_applied = False


class Target:
    """Where the tools' effects happen. `applied` is told of each effect, once, in the tick in which it happens."""

    def __init__(self, chance: Chance, applied: Callable[[ToolRun], None]) -> None:
        self._chance = chance
        self._applied = applied
        self._serial = 0
        self._wire: list[ToolRun] = []

    def send(
        self, *, tool: str, operation_id: str | None, attempt: int, tick: int, writes: bool, value: str | None
    ) -> ToolRun:
        """A tool starts. `value` None draws a value that nobody has seen."""
        self._serial += 1
        answer: dict[str, object] = {"n": self._serial} if value is None else {"v": value}
        script = _write_script(self._chance, answer) if writes else _read_script(self._chance, answer)
        run = ToolRun(
            serial=self._serial, operation_id=operation_id, attempt=attempt, tool=tool, tick=tick, script=script
        )
        if run.effect_at is not None:
            self._wire.append(run)
        return run

    def tick(self, tick: int) -> None:
        """Let every effect happen that is due."""
        due = [run for run in self._wire if run.effect_at is not None and run.effect_at <= tick]
        self._wire = [run for run in self._wire if run not in due]
        for run in due:
            self._apply(run)

    def finish(self, run: ToolRun) -> None:
        """A tool that comes back with its effect behind it has had it by now."""
        if run in self._wire and run.effect_at is not None and run.effect_at <= run.ends_at:
            self._wire.remove(run)
            self._apply(run)

    def drop(self, run: ToolRun) -> None:
        """The process died before its request left."""
        if run in self._wire:
            self._wire.remove(run)

    @property
    def on_the_wire(self) -> int:
        """How many effects are still to come."""
        return len(self._wire)

    def _apply(self, run: ToolRun) -> None:
        run.has_applied = True
        self._applied(run)


def _ticks(chance: Chance) -> int:
    return chance.between(2, SLOW_TICKS_MAX) if chance.fires(Fault.TOOL_SLOW) else chance.below(2)


def _lost_effect(chance: Chance, ticks: int) -> int | None:
    """When the effect of a request without an answer happens: before, after, or never."""
    match chance.below(3):
        case 0:
            return chance.between(0, ticks)
        case 1:
            return ticks + chance.between(1, LATE_TICKS_MAX)
        case _:
            return None


def _write_script(chance: Chance, answer: dict[str, object]) -> ToolScript:
    ticks = _ticks(chance)
    done: ToolResult[object] = ToolResult(value=answer)
    if chance.fires(Fault.CANCEL_IN_TOOL):
        return ToolScript(ticks=ticks, effect_after=_lost_effect(chance, ticks), result=done, error=SimulatedCancel())
    if chance.fires(Fault.TOOL_NOT_APPLIED):
        return ToolScript(ticks=ticks, effect_after=None, result=done, error=NotAppliedError("refused unread"))
    if chance.fires(Fault.TOOL_FAILS_BEFORE):
        error = chance.pick([SimulatedToolError("broke early"), ConnectionResetError("reset"), ValueError("bad")])
        return ToolScript(ticks=ticks, effect_after=None, result=done, error=error)
    if chance.fires(Fault.TOOL_FAILS_AFTER):
        error = chance.pick([SimulatedToolError("broke late"), BrokenPipeError("pipe"), PermissionError("denied")])
        return ToolScript(ticks=ticks, effect_after=chance.between(0, ticks), result=done, error=error)
    if chance.fires(Fault.TOOL_TIMES_OUT):
        error = TimeoutError("no answer")
        return ToolScript(ticks=ticks, effect_after=_lost_effect(chance, ticks), result=done, error=error)
    if chance.fires(Fault.TOOL_STATUS):
        return _told(chance, answer, ticks)
    return ToolScript(ticks=ticks, effect_after=chance.between(0, ticks), result=done)


def _told(chance: Chance, answer: dict[str, object], ticks: int) -> ToolScript:
    """A tool that says what became of its effect, truthfully."""
    status = chance.pick([Status.COMPLETE, Status.RETRYABLE, Status.FATAL, Status.HUMAN_REQUIRED])
    applied = status is Status.COMPLETE or bool(chance.below(2))
    wait_ms = chance.between(0, 200) if status is Status.RETRYABLE else None
    return ToolScript(
        ticks=ticks,
        effect_after=chance.between(0, ticks) if applied else None,
        result=ToolResult(status=status, value=answer, side_effect_committed=applied, retry_after_ms=wait_ms),
    )


def _read_script(chance: Chance, answer: dict[str, object]) -> ToolScript:
    ticks = _ticks(chance)
    done: ToolResult[object] = ToolResult(value=answer)
    if chance.fires(Fault.CANCEL_IN_TOOL):
        return ToolScript(ticks=ticks, effect_after=None, result=done, error=SimulatedCancel())
    if chance.fires(Fault.TOOL_FAILS_BEFORE):
        error = chance.pick([SimulatedToolError("broke"), ConnectionResetError("reset")])
        return ToolScript(ticks=ticks, effect_after=None, result=done, error=error)
    if chance.fires(Fault.TOOL_TIMES_OUT):
        return ToolScript(ticks=ticks, effect_after=None, result=done, error=TimeoutError("no answer"))
    if chance.fires(Fault.TOOL_STATUS):
        told: ToolResult[object] = ToolResult(status=Status.RETRYABLE, value=answer, retry_after_ms=chance.below(200))
        return ToolScript(ticks=ticks, effect_after=None, result=told)
    version = chance.below(VALUE_MAX) if chance.below(2) else None
    return ToolScript(ticks=ticks, effect_after=None, result=ToolResult(value=answer, progress_version=version))
