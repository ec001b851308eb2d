"""What an actor of a simulation may ask of its world, beyond the commands of a pipeline."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from endstop.core.commands import Command, Flow
from endstop.core.model import Usage
from endstop.core.records import ControlRecord, RunRecord
from endstop.store.port import RunOpened

if TYPE_CHECKING:
    from endstop.core.steps_life import NewRun

__all__ = [
    "CallModel", "Fork", "HasEnded", "LiftOrders", "LookAt", "Nap", "OpenRun", "PutOrder", "Told",
]  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenRun(Command[RunOpened]):
    """Create or join a run, in one transaction."""

    new: NewRun


@dataclass(frozen=True, slots=True, kw_only=True)
class LookAt(Command[RunRecord | None]):
    """Read one run."""

    run_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PutOrder(Command[ControlRecord]):
    """Put a standing order in force."""

    control: ControlRecord


@dataclass(frozen=True, slots=True, kw_only=True)
class LiftOrders(Command[int]):
    """Withdraw the orders of one kind."""

    kind: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CallModel(Command[Usage]):
    """Ask the provider; raises ProviderError or a cancellation."""

    run_id: str
    call_id: str
    tokens_bound: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Nap(Command[None]):
    """Do nothing for some ticks."""

    ticks: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Fork(Command[str]):
    """Start another thread in the same process; gives its name."""

    flow: Flow[None]


@dataclass(frozen=True, slots=True, kw_only=True)
class HasEnded(Command[bool]):
    """Whether a thread of the same process has ended."""

    name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Told(Command[None]):
    """Note what a caller was answered from the ledger."""

    operation_id: str
    value: object
