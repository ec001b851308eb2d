"""The entries of a ledger folded a second time, for the checker: to a run's evidence and state, and to operations."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Final

from endstop.core.evidence import Evidence
from endstop.core.policy import Limits
from endstop.core.reasons import RunState
from endstop.core.refold import fold_entry
from endstop.core.transitions import OperationState

if TYPE_CHECKING:
    from endstop.core.envelope import Envelope

__all__ = ["OperationFold", "RunFold"]

_END_STATES: Final = {"crashed": RunState.INTERRUPTED, "human_required": RunState.PAUSED, "complete": RunState.COMPLETE}
_GLOBAL_RUN: Final = "-"


class RunFold:
    """One run as its entries tell it. `ends` maps a generation to its terminal reason, `envelopes` to its envelope."""

    def __init__(self) -> None:
        self.next_seq = 0
        self.generation = 1
        self.state = RunState.RUNNING
        self.ends: dict[int, str] = {}
        self.envelopes: dict[int, Envelope] = {}
        self._evidence = Evidence()
        self._owners: set[str] = set()
        self._limits = Limits()

    def add(self, entry: Mapping[str, object], limits: Limits | None) -> None:
        """Fold one more entry; `limits` are the run's own, where they are known."""
        self.next_seq += 1
        self._limits = limits or self._limits
        if entry["run"] != _GLOBAL_RUN:
            fold_entry(self._evidence, entry, self._limits, self._owners)
        kind = str(entry["type"])
        match kind:
            case "run_join":
                self.generation = _number(entry, "generation", self.generation)
                self.state = self._live_state()
            case "resume":
                self.generation = _number(entry, "generation", self.generation)
                self.state = self._live_state()
            case "stop" | "complete":
                reason = str(entry["reason"])
                self.ends[self.generation] = reason
                self.state = _END_STATES.get(reason, RunState.STOPPED)
            case "control" if self.state in (RunState.RUNNING, RunState.FROZEN):
                self.state = self._live_state()
            case _:
                pass

    def _live_state(self) -> RunState:
        return RunState.FROZEN if self._evidence.frozen else RunState.RUNNING

    def difference(self, stored: Evidence) -> str | None:
        """How the stored evidence differs from what the entries give, or None."""
        here, there = _plain(self._evidence), _plain(stored)
        if here.pack() == there.pack():
            return None
        for item in fields(Evidence):
            told, kept = getattr(here, item.name), getattr(there, item.name)
            if told != kept or (isinstance(told, dict) and list(told) != list(kept)):
                return f"evidence field {item.name}: the entries give {told!r}, stored is {kept!r}"
        return "the entries give another evidence than the stored one"


class OperationFold:
    """Operations as the entries tell them, across all runs."""

    def __init__(self) -> None:
        self._states: dict[str, OperationState] = {}
        self._calls: dict[str, tuple[str, str]] = {}
        self._moved: list[str] = []

    def add(self, entry: Mapping[str, object]) -> None:
        """Fold one more entry."""
        named = entry.get("op")
        match entry["type"]:
            case "call_intent" if named is not None:
                self._put(str(named), OperationState.EXECUTING)
                self._calls[str(named)] = (str(entry["run"]), str(entry["call"]))
            case "lost" if named is not None:
                own = self._calls.get(str(named)) == (str(entry["run"]), str(entry["call"]))
                if own and self._states.get(str(named)) is OperationState.EXECUTING:
                    unsent = "unsent" in entry
                    self._put(str(named), OperationState.FAILED_RETRYABLE if unsent else OperationState.UNKNOWN)
            case "recover":
                listed = entry.get("ops")
                for operation_id in listed if isinstance(listed, list) else ():
                    self._put(str(operation_id), OperationState.UNKNOWN)
            case "operation" if named is not None and entry.get("from") != entry.get("to"):
                self._put(str(named), OperationState(str(entry["to"])))
            case "call_refused" | "call_replayed":
                pass
            case _ if named is not None and "op_state" in entry and "late" not in entry:
                self._put(str(named), OperationState(str(entry["op_state"])))
            case _:
                pass

    def moved(self) -> tuple[str, ...]:
        """The operations that entries moved since the last question."""
        found = tuple(self._moved)
        self._moved.clear()
        return found

    def state_of(self, operation_id: str) -> OperationState | None:
        """Where the entries leave an operation."""
        return self._states.get(operation_id)

    def _put(self, operation_id: str, state: OperationState) -> None:
        self._states[operation_id] = state
        self._moved.append(operation_id)


def _plain(evidence: Evidence) -> Evidence:
    """What of an evidence entries can give back: not the sketch of the last answer, nor the words of an ending."""
    last = evidence.last
    return replace(evidence, last=None if last is None else replace(last, sketch=None, text=None), ended_message="")


def _number(entry: Mapping[str, object], name: str, default: int) -> int:
    value = entry.get(name)
    return value if isinstance(value, int) else default
