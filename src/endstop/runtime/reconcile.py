"""Clearing up after crashes, on demand: recover dead workers' runs, then ask the targets of operations in doubt.

Operations are taken oldest first and one tool after the other, so that one dead target cannot starve the rest. Nothing
here dispatches anything: an operation that is proven not applied waits for a caller.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from endstop.core.ending import IN_DOUBT_STATES
from endstop.core.policy import stricter
from endstop.core.probe_flow import ProbeJob, ProbeReport, probed
from endstop.core.reasons import RunState
from endstop.core.steps_life import RecoverRun
from endstop.core.steps_operations import ExpireResults
from endstop.core.transitions import OperationState
from endstop.runtime.drivers import adrive, drive
from endstop.runtime.toolface import declared_of
from endstop.store.port import ROWS_MAX

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from endstop.core.policy import Policy, ToolPolicy
    from endstop.core.records import OperationRecord
    from endstop.runtime.guard import Guard

__all__ = ["Reconciled", "areconcile", "expire_results", "reconcile"]

OPERATIONS_MAX: Final = 1_000
_KEPT: Final = (OperationState.COMMITTED, OperationState.FAILED_FINAL)


@dataclass(frozen=True, slots=True, kw_only=True)
class Reconciled:
    """What a reconciliation found and did: runs taken over after a crash, what each probe brought, and the operations
    that are in doubt afterwards."""

    interrupted: tuple[str, ...]
    probes: tuple[ProbeReport, ...] = ()
    in_doubt: tuple[OperationRecord, ...] = ()

    @property
    def settled(self) -> tuple[OperationRecord, ...]:
        """The operations that are in doubt no longer."""
        return tuple(report.operation for report in self.probes if report.operation.state not in IN_DOUBT_STATES)


def reconcile(
    guard: Guard, *, policy: Policy | None = None, tools: Iterable[Callable[..., object]] = (),
    limit: int = OPERATIONS_MAX, actor: str = "reconciler",
) -> Reconciled:  # fmt: skip
    """Recover and ask from a thread; see `Guard.reconcile`."""
    interrupted, jobs = _prepared(guard, policy, tools, limit, actor)
    world = guard.world
    reports = tuple(drive(probed(job), world, job.operation.run_id) for job in jobs)
    return _found(guard, interrupted, reports)


async def areconcile(
    guard: Guard, *, policy: Policy | None = None, tools: Iterable[Callable[..., object]] = (),
    limit: int = OPERATIONS_MAX, actor: str = "reconciler",
) -> Reconciled:  # fmt: skip
    """The same from an event loop, for async probes."""
    interrupted, jobs = await asyncio.to_thread(_prepared, guard, policy, tools, limit, actor)
    reports = [await adrive(probed(job), guard.world, job.operation.run_id) for job in jobs]
    return await asyncio.to_thread(_found, guard, interrupted, tuple(reports))


def expire_results(guard: Guard, *, older_than_ms: int, actor: str = "retention") -> int:
    """Remove the results of operations that were settled longer ago; gives how many. Records stay."""
    now_us = guard.world.clock.now_us()
    before_us = now_us - older_than_ms * 1_000
    kept = guard.store.operations(states=_KEPT, limit=ROWS_MAX).result()
    old = {item.run_id for item in kept if item.settled_at_us is not None and item.settled_at_us < before_us}
    count = 0
    for run_id in sorted(old):
        while expired := guard.store.transact(
            ExpireResults(run_id=run_id, now_us=now_us, before_us=before_us, actor=actor)
        ).result():
            count += expired
    return count


# -- Parts


def _prepared(
    guard: Guard, policy: Policy | None, tools: Iterable[Callable[..., object]], limit: int, actor: str
) -> tuple[tuple[str, ...], list[ProbeJob]]:
    interrupted = tuple(run.run_id for run in guard.runs(limit=ROWS_MAX) if run.state is RunState.INTERRUPTED)
    _recover_strays(guard)
    declared = _declared(policy or guard.policy, tools)
    unknown = guard.store.operations(states=(OperationState.UNKNOWN,), limit=limit).result()
    clock, key = guard.world.clock, guard.store.store_key
    jobs = [
        ProbeJob(
            operation=item, tool=declared(item.tool), now_us=clock.now_us, store_key=key, gives_up=True, actor=actor
        )
        for item in _fair(unknown)
    ]
    return interrupted, jobs


def _recover_strays(guard: Guard) -> None:
    """Operations that a dead worker left executing in a run that was not among those looked at."""
    world = guard.world
    for run_id, owners in sorted(guard.senders().items()):
        dead = world.board.dead_of(tuple(dict.fromkeys(owners)))
        if dead:
            step = RecoverRun(run_id=run_id, now_us=world.clock.now_us(), dead_owners=dead)
            guard.store.transact(step).result()


def _declared(policy: Policy, tools: Iterable[Callable[..., object]]) -> Callable[[str], ToolPolicy]:
    """What is declared of a tool by its name: in the policy, and on functions given."""
    functions = dict(declared_of(function) for function in tools)

    def of(name: str) -> ToolPolicy:
        own = functions.get(name)
        return policy.tool(name) if own is None else stricter(policy.tool(name), own)

    return of


def _fair(operations: Sequence[OperationRecord]) -> list[OperationRecord]:
    """Oldest first within a tool, and the tools in turn."""
    lanes: dict[str, list[OperationRecord]] = {}
    for item in operations:
        lanes.setdefault(item.tool, []).append(item)
    ordered: list[OperationRecord] = []
    for place in range(max((len(lane) for lane in lanes.values()), default=0)):
        ordered += [lane[place] for lane in lanes.values() if place < len(lane)]
    return ordered


def _found(guard: Guard, interrupted: tuple[str, ...], reports: tuple[ProbeReport, ...]) -> Reconciled:
    doubtful = guard.store.operations(states=tuple(sorted(IN_DOUBT_STATES)), limit=ROWS_MAX).result()
    return Reconciled(interrupted=interrupted, probes=reports, in_doubt=doubtful)
