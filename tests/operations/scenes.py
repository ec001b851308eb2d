"""What the operations' tests share: a target that remembers what it did, and stores to run against.

`STORES` names the stores; another one joins by a line here that gives the URL of an empty store in a folder.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import orjson
import pytest

import endstop as es
from endstop.core.records import OperationRecord
from endstop.core.transitions import OperationState
from endstop.runtime.guard import Guard
from tests.runtime.scenes import SPEC, WIDE, StillClock

__all__ = ["SPEC", "STORES", "WIDE", "Bank", "Pay", "Place", "codes", "entries_of", "only", "states"]

STORES: Final[dict[str, Callable[[Path], str]]] = {
    "memory": lambda folder: "memory:",
    "sqlite": lambda folder: f"sqlite:///{folder}/state.db",
}
Pay = Callable[..., object]


@dataclass(slots=True)
class Place:
    """One store, and the guards that were opened on it. Time stands still unless a test lets it pass."""

    kind: str
    folder: Path
    clock: StillClock = field(default_factory=StillClock)
    guards: list[Guard] = field(default_factory=list)

    def open(self, tool: es.ToolPolicy, *, limits: es.Limits = WIDE, name: str = "pay", **more: Any) -> Guard:
        policy = es.Policy(limits=limits, tools={name: tool}, **more)
        guard = es.open(STORES[self.kind](self.folder), policy=policy, clock=self.clock)
        self.guards.append(guard)
        return guard

    def another(self, guard: Guard, policy: es.Policy | None = None) -> Guard:
        """A second guard on the same records, as another worker of this process would have it."""
        second = Guard(guard.store, policy=policy or guard.policy, clock=self.clock, ids=guard.ids)
        self.guards.append(second)
        return second

    def close(self) -> None:
        for guard in self.guards:
            guard.close()


class Bank:
    """A target: it applies each payment once more whenever it is told to, and can be asked by key."""

    def __init__(self) -> None:
        self.effects: dict[str, int] = {}
        self.calls: list[str] = []
        self.asked: list[es.ProbeRequest] = []
        self.fails_before: list[Exception] = []
        self.fails_after: list[Exception] = []
        self.answers: list[es.ProbeAnswer] = []

    def pay(self, order: str, amount: int = 1) -> object:
        key = es.current().idempotency_key or ""
        self.calls.append(key)
        if self.fails_before:
            raise self.fails_before.pop(0)
        self.effects[key] = self.effects.get(key, 0) + 1
        if self.fails_after:
            raise self.fails_after.pop(0)
        return {"paid": order, "amount": amount}

    def probe(self, request: es.ProbeRequest) -> es.ProbeAnswer:
        self.asked.append(request)
        if self.answers:
            return self.answers.pop(0)
        if self.effects.get(request.idempotency_key or ""):
            return es.ProbeAnswer.applied({"paid": (request.args or {}).get("order"), "found": True}, receipt="r-1")
        return es.ProbeAnswer.not_applied()

    def tool(self, **more: Any) -> es.ToolPolicy:
        return es.ToolPolicy(**{"effect": "write", "idempotency_key": "{order}", "probe": self.probe, **more})


def lost(guard: Guard, bank: Bank, *, applied: bool, order: str = "a", run_id: str = "r") -> OperationRecord:
    """One operation of unknown outcome, applied at the target or not."""
    (bank.fails_after if applied else bank.fails_before).append(ConnectionResetError("reset"))
    with guard.run(SPEC, run_id=run_id) as run, pytest.raises(es.OutcomeUnknownError) as raised:
        run.call(bank.pay, {"order": order}, tool="pay", call_id=f"first-{order}")
    found = guard.store.operations(operation_id=raised.value.operation_id).result()
    assert found[0].state is OperationState.UNKNOWN
    return found[0]


def bury(guard: Guard, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel says of every worker that its process is gone."""
    monkeypatch.setattr(guard.world.board, "is_alive", lambda owner_id: False)


def only(guard: Guard) -> OperationRecord:
    """The one operation of the store."""
    (found,) = guard.operations()
    return found


def states(guard: Guard) -> list[OperationState]:
    return [operation.state for operation in guard.operations()]


def entries_of(guard: Guard, kind: str = "operation") -> list[dict[str, Any]]:
    found = [orjson.loads(entry.leaf) for entry in guard.store.entries(limit=10_000).result()]
    return [entry for entry in found if entry["type"] == kind]


def codes(guard: Guard) -> list[str]:
    return [entry["code"] for entry in entries_of(guard)]
