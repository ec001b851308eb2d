"""The people in a simulation: operators who stop, kill, deny, freeze, resume and recover, at any moment.

An order and what it does to each run are separate transactions, as they are in `endstop.runtime.guard`, so a fault may
fall between them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from endstop.core.commands import Flow, Transact, perform
from endstop.core.reasons import LIMIT_OF_REASON, Reason, RunState
from endstop.core.records import ControlRecord
from endstop.core.steps_life import EndRun, FreezeRun, RecoverRun, ResumeRun
from endstop.errors import ResumeRefusedError, StoreError
from endstop.testing.simulated_commands import LiftOrders, LookAt, Nap, PutOrder

if TYPE_CHECKING:
    from endstop.testing.simulated_agents import Surroundings

__all__ = ["order", "recover"]


def recover(run_id: str, now_us: Callable[[], int], around: Surroundings) -> Flow[None]:
    """What looking at a run does: its dead workers' work is marked."""
    known = yield from perform(LookAt(run_id=run_id))
    if known is None:
        return
    dead = frozenset(owner for owner in known.owners if around.is_dead(owner))
    if dead and known.state in (RunState.RUNNING, RunState.FROZEN):
        yield from perform(Transact(step=RecoverRun(run_id=run_id, now_us=now_us(), dead_owners=dead)))


def order(kind: str, run_ids: tuple[str, ...], now_us: Callable[[], int], around: Surroundings) -> Flow[None]:
    """One operator's order to its end. A store that fails leaves it half done, as it would a real operator."""
    chance = around.chance
    run_id = chance.pick(list(run_ids))
    try:
        match kind:
            case "stop":
                yield from _end(run_id, now_us, Reason.OPERATOR_CANCELLED_LOOP, "stop")
            case "kill":
                yield from _kill(run_ids, now_us, around)
            case "deny":
                tool = chance.pick(["pay", "mail", "look", "sh*"])
                yield from perform(PutOrder(control=_control(around, "deny", now_us, tool=tool)))
                yield from perform(Nap(ticks=chance.between(10, 80)))
                yield from perform(LiftOrders(kind="deny"))
            case "freeze":
                yield from _freeze(run_id if chance.below(2) else None, run_ids, now_us, around)
            case "resume":
                yield from _resume(run_id, now_us)
            case _:
                yield from recover(run_id, now_us, around)
    except StoreError:
        return


def _control(
    around: Surroundings, kind: str, now_us: Callable[[], int], *, run_id: str | None = None, tool: str | None = None,
    label: str | None = None,
) -> ControlRecord:  # fmt: skip
    return ControlRecord(
        control_id=around.new_id(),
        kind=kind,
        run_id=run_id,
        tool=tool,
        label=label,
        reason="drill",
        created_at_us=now_us(),
    )


def _end(run_id: str, now_us: Callable[[], int], reason: Reason, guard: str) -> Flow[None]:
    known = yield from perform(LookAt(run_id=run_id))
    if known is not None:
        yield from perform(Transact(step=EndRun(run_id=run_id, now_us=now_us(), reason=reason, guard=guard)))


def _kill(run_ids: tuple[str, ...], now_us: Callable[[], int], around: Surroundings) -> Flow[None]:
    label = around.chance.pick([None, "team=red"])
    yield from perform(PutOrder(control=_control(around, "kill", now_us, label=label)))
    for run_id in run_ids:
        known = yield from perform(LookAt(run_id=run_id))
        if known is None or known.state not in (RunState.RUNNING, RunState.FROZEN):
            continue
        if label is None or ("team", "red") in known.labels:
            yield from perform(
                Transact(step=EndRun(run_id=run_id, now_us=now_us(), reason=Reason.KILL_SWITCH, guard="kill"))
            )
    yield from perform(Nap(ticks=around.chance.between(5, 60)))
    yield from perform(LiftOrders(kind="kill"))


def _freeze(
    run_id: str | None, run_ids: tuple[str, ...], now_us: Callable[[], int], around: Surroundings
) -> Flow[None]:
    chosen = run_ids if run_id is None else (run_id,)
    if run_id is not None and (yield from perform(LookAt(run_id=run_id))) is None:
        return
    yield from perform(PutOrder(control=_control(around, "freeze", now_us, run_id=run_id)))
    for frozen in (True, False):
        for found in chosen:
            known = yield from perform(LookAt(run_id=found))
            if known is not None and known.state in (RunState.RUNNING, RunState.FROZEN):
                yield from perform(Transact(step=FreezeRun(run_id=found, now_us=now_us(), frozen=frozen)))
        if frozen:
            yield from perform(Nap(ticks=around.chance.between(10, 80)))
            yield from perform(LiftOrders(kind="freeze"))


def _resume(run_id: str, now_us: Callable[[], int]) -> Flow[None]:
    known = yield from perform(LookAt(run_id=run_id))
    if known is None or known.envelope is None:
        return
    change = "strategy"
    limit = LIMIT_OF_REASON.get(known.envelope.terminal_reason)
    if limit is not None:
        change = f"limit:{limit}={2 * (getattr(known.limits, limit) or 0) + 1}"
    try:
        yield from perform(Transact(step=ResumeRun(run_id=run_id, now_us=now_us(), change=change, reason="drill")))
    except ResumeRefusedError:
        return
