"""Which faults a simulated world has, and how often: drawn from its seed.

Rule (swarm testing): for each seed some faults are off altogether and the rest are weighted wildly. A mixture of
everything, always, would hide what needs one fault often and another one never.

The faults that every run must survive:

* store     unreachable before a commit; the reply to a commit lost after it
* worker    killed before or after a commit, or in the middle of a tool; stalled; declared dead while it goes on
* caller    cancelled between the reservation and the call, or while a tool runs
* clock     jumps forwards and backwards; one worker's clock ahead of another's
* tool      slow; fails before or after its effect; times out while its request is still on the wire
* agent     delivers a call id twice, repeats a finished call, reuses a key with other arguments; runs share keys
* model     a provider that fails, with or without a bill
* people    stop, kill, deny, freeze, resume and recover at any moment
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from random import Random
from typing import Final, TypeVar

__all__ = ["Chance", "Fault", "FaultPlan", "draw_plan"]

T = TypeVar("T")
PER_MILLE: Final = 1_000


class Fault(StrEnum):
    """One way in which the world misbehaves."""

    STORE_UNAVAILABLE = "store_unavailable"
    COMMIT_REPLY_LOST = "commit_reply_lost"
    CRASH_BEFORE_COMMAND = "crash_before_command"
    CRASH_AFTER_COMMIT = "crash_after_commit"
    CRASH_IN_TOOL = "crash_in_tool"
    STALL = "stall"
    ZOMBIE = "zombie"
    CANCEL_BEFORE_CALL = "cancel_before_call"
    CANCEL_IN_TOOL = "cancel_in_tool"
    CLOCK_FORWARDS = "clock_forwards"
    CLOCK_BACKWARDS = "clock_backwards"
    CLOCK_SKEW = "clock_skew"
    TOOL_SLOW = "tool_slow"
    TOOL_NOT_APPLIED = "tool_not_applied"
    TOOL_FAILS_BEFORE = "tool_fails_before"
    TOOL_FAILS_AFTER = "tool_fails_after"
    TOOL_TIMES_OUT = "tool_times_out"
    TOOL_STATUS = "tool_status"
    DUPLICATE_DELIVERY = "duplicate_delivery"
    REPEATED_CALL = "repeated_call"
    KEY_REUSED = "key_reused"
    SHARED_KEY = "shared_key"
    PARALLEL_WORKERS = "parallel_workers"
    PARALLEL_THREADS = "parallel_threads"
    MODEL_FAILS = "model_fails"
    ORDER_STOP = "order_stop"
    ORDER_KILL = "order_kill"
    ORDER_DENY = "order_deny"
    ORDER_FREEZE = "order_freeze"
    ORDER_RESUME = "order_resume"
    RECOVERY = "recovery"


# How often an enabled fault may fire, per mille of its occasions: the plan draws one of its row.
_COMMIT_RATES: Final = (5, 20, 60, 200)
_TOOL_RATES: Final = (50, 150, 400)
_TICK_RATES: Final = (2, 6, 20)
_PLAN_RATES: Final = (100, 300, 700)
_RATES: Final[Mapping[Fault, tuple[int, ...]]] = {
    Fault.STORE_UNAVAILABLE: _COMMIT_RATES,
    Fault.COMMIT_REPLY_LOST: _COMMIT_RATES,
    Fault.CRASH_BEFORE_COMMAND: (5, 20, 60),
    Fault.CRASH_AFTER_COMMIT: (5, 20, 60),
    Fault.CRASH_IN_TOOL: (20, 60, 200),
    Fault.STALL: _TICK_RATES,
    Fault.ZOMBIE: _TICK_RATES,
    Fault.CANCEL_BEFORE_CALL: (20, 60, 200),
    Fault.CANCEL_IN_TOOL: (20, 60, 200),
    Fault.CLOCK_FORWARDS: _TICK_RATES,
    Fault.CLOCK_BACKWARDS: _TICK_RATES,
    Fault.CLOCK_SKEW: _PLAN_RATES,
    Fault.TOOL_SLOW: _TOOL_RATES,
    Fault.TOOL_NOT_APPLIED: _TOOL_RATES,
    Fault.TOOL_FAILS_BEFORE: _TOOL_RATES,
    Fault.TOOL_FAILS_AFTER: _TOOL_RATES,
    Fault.TOOL_TIMES_OUT: _TOOL_RATES,
    Fault.TOOL_STATUS: (20, 60, 200),
    Fault.DUPLICATE_DELIVERY: _PLAN_RATES,
    Fault.REPEATED_CALL: _PLAN_RATES,
    Fault.KEY_REUSED: (50, 150),
    Fault.SHARED_KEY: _PLAN_RATES,
    Fault.PARALLEL_WORKERS: _PLAN_RATES,
    Fault.PARALLEL_THREADS: (50, 200, 500),
    Fault.MODEL_FAILS: _TOOL_RATES,
    Fault.ORDER_STOP: _TICK_RATES,
    Fault.ORDER_KILL: _TICK_RATES,
    Fault.ORDER_DENY: _TICK_RATES,
    Fault.ORDER_FREEZE: _TICK_RATES,
    Fault.ORDER_RESUME: (6, 20, 60),
    Fault.RECOVERY: (6, 20, 60),
}
_ENABLED_PER_MILLE: Final = 500


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultPlan:
    """The faults of one seed with their rates (per mille of their occasions); a fault that is not in it never fires.

    `crash_point` kills the worker that reaches that durable point (1, 2, 3, …), once.
    """

    rates: Mapping[Fault, int] = field(default_factory=dict)
    crash_point: int | None = None

    def to_json(self) -> dict[str, object]:
        """This plan as a report shows it."""
        shown: dict[str, object] = {fault.value: rate for fault, rate in self.rates.items()}
        return shown if self.crash_point is None else {**shown, "crash_point": self.crash_point}


def draw_plan(random: Random) -> FaultPlan:
    """A plan: each fault is on for about half of all seeds, at a rate of its own."""
    rates: dict[Fault, int] = {}
    for fault in Fault:
        rate = random.choice(_RATES[fault])
        if random.randrange(PER_MILLE) < _ENABLED_PER_MILLE:
            rates[fault] = rate
    return FaultPlan(rates=rates)


class Chance:
    """The world's dice. Every random decision of a simulation is drawn here, and faults that fire are counted.

    `calm` ends all faults; the counters stay.
    """

    def __init__(self, random: Random, plan: FaultPlan) -> None:
        self.plan = plan
        self.fired: Counter[Fault] = Counter()
        self.points = 0
        self._random = random
        self._calm = False

    def calm(self) -> None:
        """From now on no fault fires."""
        self._calm = True

    @property
    def is_calm(self) -> bool:
        """Whether faults have ended."""
        return self._calm

    def fires(self, fault: Fault) -> bool:
        """Whether `fault` strikes on this occasion. Says yes only where the caller lets it strike."""
        rate = 0 if self._calm else self.plan.rates.get(fault, 0)
        if not rate or self._random.randrange(PER_MILLE) >= rate:
            return False
        self.fired[fault] += 1
        return True

    def crash_point(self) -> bool:
        """One durable point was reached; whether the plan kills its worker there."""
        self.points += 1
        return self.points == self.plan.crash_point

    def below(self, bound: int) -> int:
        """A whole number from 0 up to, but not, `bound`."""
        return self._random.randrange(bound)

    def between(self, low: int, high: int) -> int:
        """A whole number from `low` to `high`, both included."""
        return self._random.randint(low, high)

    def pick(self, things: tuple[T, ...] | list[T]) -> T:
        """One of `things`."""
        return self._random.choice(things)

    def key(self) -> bytes:
        """32 bytes."""
        return self._random.randbytes(32)
