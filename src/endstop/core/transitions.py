"""The state machines of runs and operations, as two literal tables.

Rule: every state change of a run or an operation goes through `run_next` or `operation_next`. What does not stand in
a table is refused with InvariantError and changes nothing.

Operations (`docs/guarantees.md` explains the windows between the rows): the dispatch intent (EXECUTING) is durable
before a tool is called. From there only proof leads to COMMITTED or FAILED_*; everything else is UNKNOWN, which blocks
its key. A lease that runs out never leads from EXECUTING to another dispatch. COMMITTED is final but for retention.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Final

from endstop.core.reasons import RunState
from endstop.errors import InvariantError

__all__ = [
    "FINAL_OPERATION_STATES",
    "OPERATION_TABLE",
    "OVER_RUN_STATES",
    "RUN_TABLE",
    "OperationEvent",
    "OperationState",
    "RunEvent",
    "operation_next",
    "run_next",
]


class RunEvent(StrEnum):
    """What may happen to a run."""

    COMPLETE = "complete"
    STOP = "stop"
    PAUSE = "pause"
    FREEZE = "freeze"
    UNFREEZE = "unfreeze"
    INTERRUPT = "interrupt"
    REJOIN = "rejoin"
    RESUME = "resume"


_R: Final = RunState
_E: Final = RunEvent

RUN_TABLE: Final[dict[RunState, dict[RunEvent, RunState]]] = {
    _R.RUNNING: {
        _E.COMPLETE: _R.COMPLETE,
        _E.STOP: _R.STOPPED,
        _E.PAUSE: _R.PAUSED,
        _E.FREEZE: _R.FROZEN,
        _E.INTERRUPT: _R.INTERRUPTED,
        _E.REJOIN: _R.RUNNING,
    },
    _R.FROZEN: {
        _E.COMPLETE: _R.COMPLETE,
        _E.STOP: _R.STOPPED,
        _E.PAUSE: _R.PAUSED,
        _E.UNFREEZE: _R.RUNNING,
        _E.INTERRUPT: _R.INTERRUPTED,
        _E.REJOIN: _R.FROZEN,
    },
    _R.PAUSED: {_E.STOP: _R.STOPPED, _E.RESUME: _R.RUNNING},
    # Nobody is inside: a worker that was taken for dead joins again before it can end anything.
    _R.INTERRUPTED: {_E.STOP: _R.STOPPED, _E.RESUME: _R.RUNNING, _E.REJOIN: _R.RUNNING},
    _R.STOPPED: {_E.RESUME: _R.RUNNING},
    _R.COMPLETE: {},
}


class OperationState(StrEnum):
    """Where an operation is in its life."""

    RESERVED = "RESERVED"
    EXECUTING = "EXECUTING"
    COMMITTED = "COMMITTED"
    FAILED_RETRYABLE = "FAILED_RETRYABLE"
    FAILED_FINAL = "FAILED_FINAL"
    UNKNOWN = "UNKNOWN"
    MANUAL = "MANUAL"
    POISONED = "POISONED"
    CANCELLED = "CANCELLED"
    TOMBSTONE = "TOMBSTONE"


class OperationEvent(StrEnum):
    """What may happen to an operation."""

    RESERVE = "reserve"  # own the key, nothing sent
    DISPATCH = "dispatch"  # the intent to call the tool is durable
    TAKE_OVER = "take_over"  # another worker owns a reserved key
    CANCEL = "cancel"  # withdrawn before dispatch
    APPLIED = "applied"  # proof that the effect happened
    NOT_APPLIED = "not_applied"  # proof that it did not; another attempt is allowed
    REFUSED = "refused"  # proof that it did not; the same answer for ever
    LOST = "lost"  # dispatched, and no proof either way
    GIVE_UP = "give_up"  # automation may not settle it
    EXHAUSTED = "exhausted"  # every attempt was proven not applied
    EXPIRE = "expire"  # retention removed the payload
    CONTRADICT = "contradict"  # proven not applied, and then its own attempt says that it was


_S: Final = OperationState
_V: Final = OperationEvent

OPERATION_TABLE: Final[dict[OperationState | None, dict[OperationEvent, OperationState]]] = {
    None: {_V.RESERVE: _S.RESERVED, _V.DISPATCH: _S.EXECUTING},
    _S.RESERVED: {_V.DISPATCH: _S.EXECUTING, _V.TAKE_OVER: _S.RESERVED, _V.CANCEL: _S.CANCELLED},
    _S.EXECUTING: {
        _V.APPLIED: _S.COMMITTED,
        _V.NOT_APPLIED: _S.FAILED_RETRYABLE,
        _V.REFUSED: _S.FAILED_FINAL,
        _V.LOST: _S.UNKNOWN,
    },
    _S.UNKNOWN: {
        _V.APPLIED: _S.COMMITTED,
        _V.NOT_APPLIED: _S.FAILED_RETRYABLE,
        _V.REFUSED: _S.FAILED_FINAL,
        _V.GIVE_UP: _S.MANUAL,
    },
    _S.MANUAL: {
        _V.APPLIED: _S.COMMITTED,
        _V.NOT_APPLIED: _S.FAILED_RETRYABLE,
        _V.REFUSED: _S.FAILED_FINAL,
    },
    _S.FAILED_RETRYABLE: {_V.DISPATCH: _S.EXECUTING, _V.EXHAUSTED: _S.POISONED, _V.CONTRADICT: _S.MANUAL},
    _S.COMMITTED: {_V.EXPIRE: _S.TOMBSTONE},
    _S.FAILED_FINAL: {_V.EXPIRE: _S.TOMBSTONE},
    _S.POISONED: {},
    _S.CANCELLED: {},
    _S.TOMBSTONE: {},
}
# In these a run's envelope says how it ended, for now or for good.
OVER_RUN_STATES: Final = frozenset({_R.STOPPED, _R.COMPLETE, _R.PAUSED})

FINAL_OPERATION_STATES: Final = frozenset(
    {_S.COMMITTED, _S.FAILED_FINAL, _S.POISONED, _S.CANCELLED, _S.TOMBSTONE}
)  # fmt: skip


def run_next(state: RunState, event: RunEvent) -> RunState:
    """The state after `event`. Raises InvariantError when the table has no such row."""
    following = RUN_TABLE[state].get(event)
    if following is None:
        msg = f"a run that is {state} cannot {event}"
        raise InvariantError(msg)
    return following


def operation_next(state: OperationState | None, event: OperationEvent) -> OperationState:
    """The state after `event`; `state` None is a key nobody has used. Raises InvariantError for a missing row."""
    following = OPERATION_TABLE[state].get(event)
    if following is None:
        msg = f"an operation in state {state} cannot take the event {event}"
        raise InvariantError(msg)
    return following
