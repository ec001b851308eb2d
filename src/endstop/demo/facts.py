"""What the demonstration found: one record an act, its checks, and all of it as JSON."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from endstop.core.codec import envelope_json, operation_json

if TYPE_CHECKING:
    from endstop.core.envelope import Envelope
    from endstop.core.records import OperationRecord
    from endstop.demo.processes import Killed
    from endstop.store.port import LedgerRow

__all__ = ["Check", "Facts", "Guarded", "KilledRun", "Told", "Unguarded"]

SCHEMA = "endstop/1"
Json = dict[str, object]


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """A claim, what it expects, and what was found. Both are JSON values."""

    claim: str
    expected: object
    found: object

    @property
    def held(self) -> bool:
        """Whether the claim is true."""
        return self.expected == self.found


@dataclass(frozen=True, slots=True, kw_only=True)
class Unguarded:
    """The first act. `writes` was counted in the CRM's own table, here and below."""

    writes: int
    model_turns: int
    ended: str
    checks: tuple[Check, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Guarded:
    """The second act."""

    run_id: str
    writes: int
    model_turns: int
    ended: str
    envelope: Envelope | None
    operations: tuple[OperationRecord, ...]
    ledger: tuple[LedgerRow, ...]
    checks: tuple[Check, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Told:
    """The structured answer that a model got to a call."""

    status: str
    reason: str | None
    next_allowed_action: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class KilledRun:
    """The third act. `operations` are the run's after the kill, `answer` is what the next worker's model was told."""

    run_id: str
    writes: int
    model_turns: int
    ended: str
    killed: Killed
    state_after_kill: str
    operations: tuple[OperationRecord, ...]
    answer: Told | None
    envelope: Envelope | None
    checks: tuple[Check, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """All acts. `took_ms` is the time from the first process to the last check."""

    crm_url: str
    without_guard: Unguarded
    with_guard: Guarded
    after_kill: KilledRun
    took_ms: int

    @property
    def checks(self) -> tuple[Check, ...]:
        """Every check of every act."""
        return (*self.without_guard.checks, *self.with_guard.checks, *self.after_kill.checks)

    @property
    def held(self) -> bool:
        """Whether every check held."""
        return all(check.held for check in self.checks)

    def to_json(self) -> Json:
        """Everything, as JSON values."""
        first, second, third = self.without_guard, self.with_guard, self.after_kill
        return {
            "schema": SCHEMA,
            "held": self.held,
            "took_ms": self.took_ms,
            "crm_url": self.crm_url,
            "without_guard": _act(first),
            "with_guard": {
                **_act(second),
                "run_id": second.run_id,
                "envelope": _envelope(second.envelope),
                "operations": [operation_json(item) for item in second.operations],
                "ledger": [asdict(row) for row in second.ledger],
            },
            "after_kill": {
                **_act(third),
                "run_id": third.run_id,
                "killed": asdict(third.killed),
                "state_after_kill": third.state_after_kill,
                "operations": [operation_json(item) for item in third.operations],
                "answer": None if third.answer is None else asdict(third.answer),
                "envelope": _envelope(third.envelope),
            },
        }


def _act(act: Unguarded | Guarded | KilledRun) -> Json:
    return {
        "writes": act.writes,
        "model_turns": act.model_turns,
        "ended": act.ended,
        "checks": [{**asdict(check), "held": check.held} for check in act.checks],
    }


def _envelope(envelope: Envelope | None) -> Json | None:
    return None if envelope is None else envelope_json(envelope)
