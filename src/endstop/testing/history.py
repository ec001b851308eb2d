"""What happened in a simulated world, event by event, and what a broken rule looks like.

A history is written by the simulator and read by `endstop.testing.history_check`. It holds what was durable (commits)
and what was real (calls that left, effects, tokens used), in the one order in which it happened.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from endstop.core.records import ControlRecord, EntryRecord, OperationRecord, RunRecord

__all__ = [
    "Applied", "Committed", "Event", "Happened", "Replayed", "Returned", "Rule", "Sent", "Spent", "Violation",
    "line_of",
]  # fmt: skip


class Rule(StrEnum):
    """What must hold at every prefix of a history, and (the last two) at its end."""

    INTENT_FIRST = "intent_first"  # an effect has an earlier durable intent, by its own worker
    ONE_EFFECT = "one_effect"  # at most one effect an operation; an open outcome is never sent again
    SETTLED_ONCE = "settled_once"  # by the attempt and fence that own it
    TRUE_OUTCOME = "true_outcome"  # "applied" and "not applied" are what the target says
    BUDGET = "budget"  # posted + held never exceeds the budget, covers what was used, and has no call twice
    FOLD = "fold"  # folding the entries gives the evidence and the tables
    NO_GAPS = "no_gaps"  # of positions, and of each run's numbers; stored entries never change
    ONE_END = "one_end"  # one terminal reason and envelope a generation, and no call reserved after it
    ORDERS = "orders"  # no call reserved against an order in force
    FINAL = "final"  # committed is final, and replays answer with it
    NO_FAULT = "no_fault"  # no step meets a state that the design rules out
    LIVENESS = "liveness"  # once faults stop, every worker comes to its end
    NOTHING_LEFT = "nothing_left"  # after recovery nothing is executing or pending under a dead worker


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """One thing that happened: its number, the tick, the world's time and who did it."""

    number: int
    tick: int
    at_us: int
    who: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Committed(Event):
    """One durable transaction: the step, and what it changed.

    `claimed` is the operation as the worker owned it when it settled; `run` and `evidence` are the run afterwards.
    """

    step: str
    run_id: str | None
    entries: tuple[EntryRecord, ...] = ()
    operations: tuple[tuple[OperationRecord | None, OperationRecord], ...] = ()
    claimed: OperationRecord | None = None
    run: RunRecord | None = None
    evidence: bytes | None = field(default=None, repr=False)
    orders: tuple[ControlRecord, ...] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Sent(Event):
    """A tool was called. `attempt` 0 and no operation id for tools without side effects."""

    run_id: str
    call_id: str
    tool: str
    operation_id: str | None
    attempt: int
    fence: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Applied(Event):
    """The target had the effect of a call."""

    tool: str
    operation_id: str
    attempt: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Returned(Event):
    """A tool came back with `value` (its JSON text)."""

    operation_id: str
    attempt: int
    value: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Replayed(Event):
    """A caller was answered from the ledger with `value` (its JSON text)."""

    operation_id: str
    value: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Spent(Event):
    """A provider worked on a model call and bills it, whatever becomes of its answer."""

    run_id: str
    call_id: str
    tokens: int
    nanos: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Happened(Event):
    """Anything else worth a line in the trace: a crash, a jump of the clock, a refused transaction."""

    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Violation:
    """A rule that a history breaks, at which event, and how."""

    rule: Rule
    number: int
    text: str

    def to_json(self) -> dict[str, object]:
        """This violation as a report shows it."""
        return {"rule": self.rule.value, "event": self.number, "text": self.text}


def line_of(event: Event) -> str:
    """One line of the trace. Made of what is the same in every process for one seed."""
    head = f"{event.number:>5} t{event.tick:<5} {event.who:<10} "
    match event:
        case Committed():
            kinds = ",".join(_kind(entry.leaf) for entry in event.entries)
            moves = " ".join(
                f"{_short(after.operation_id)}:{'-' if before is None else before.state}>{after.state}#{after.attempt}"
                for before, after in event.operations
            )
            state = "" if event.run is None else f" {event.run.state} g{event.run.generation}"
            return f"{head}commit {event.step} {event.run_id or '-'}{state} [{kinds}] {moves}".rstrip()
        case Sent():
            named = _short(event.operation_id or "-")
            return f"{head}call {event.tool} {event.call_id} {named}#{event.attempt} of {event.run_id}"
        case Applied():
            return f"{head}EFFECT {event.tool} {_short(event.operation_id)}#{event.attempt}"
        case Returned():
            return f"{head}returned {_short(event.operation_id)}#{event.attempt} {event.value}"
        case Replayed():
            return f"{head}replayed {_short(event.operation_id)} {event.value}"
        case Spent():
            return f"{head}spent {event.tokens} tokens {event.nanos} nanos, {event.call_id} of {event.run_id}"
        case Happened():
            return f"{head}{event.text}"
        case _:
            return f"{head}{type(event).__name__}"


def _kind(leaf: bytes) -> str:
    import orjson

    return str(orjson.loads(leaf).get("type"))


def _short(operation_id: str) -> str:
    return operation_id[:11]
