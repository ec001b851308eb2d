"""What a batch of requests will touch, known before its transaction starts: so that locks are taken in one order."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from endstop.core.records import ControlRecord
from endstop.core.steps import Step
from endstop.core.steps_life import JoinRun
from endstop.core.steps_turn import ReserveChild
from endstop.store.port import StoredSpec
from endstop.store.transact import OpenRequest, Withdrawal

__all__ = ["Plan", "plan_of", "run_of", "worker_of"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Runs and operations to read, names of runs that may be made, workers that enter a run; `alone` for an order."""

    run_ids: tuple[str, ...]
    operation_ids: tuple[str, ...]
    names: tuple[str, ...]
    owners: frozenset[str]
    alone: bool


def worker_of(owner_id: str) -> str:
    """The worker behind a member of it (`WORKER.N`, one a run that it entered)."""
    return owner_id.partition(".")[0]


def run_of(request: object) -> str:
    """The run that a request is about, "" for none."""
    if isinstance(request, OpenRequest):
        return request.new.run_id
    if isinstance(request, Step | StoredSpec | ControlRecord | Withdrawal):
        return request.run_id or ""
    return ""


def plan_of(requests: Iterable[object]) -> Plan:
    """The plan of one transaction."""
    run_ids: dict[str, None] = {}
    operation_ids: dict[str, None] = {}
    names: dict[str, None] = {}
    owners: set[str] = set()
    alone = False
    for request in requests:
        run_id = run_of(request)
        if run_id:
            run_ids[run_id] = None
        match request:
            case Step():
                key = request.operation_key
                if key is not None:
                    operation_ids[key] = None
                if isinstance(request, JoinRun):
                    owners.add(worker_of(request.owner_id))
                elif isinstance(request, ReserveChild):
                    names[request.child_run_id] = None
            case OpenRequest():
                names[run_id] = None
                owners.add(worker_of(request.new.owner_id))
            case StoredSpec():
                names[run_id] = None
            case ControlRecord() | Withdrawal():
                alone = True
            case _:
                pass
    return Plan(
        run_ids=tuple(run_ids), operation_ids=tuple(operation_ids), names=tuple(names), owners=frozenset(owners),
        alone=alone,
    )  # fmt: skip
