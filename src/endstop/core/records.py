"""What a store keeps of runs and operations, and the working copy that one transaction changes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from endstop.core.entries import entry_bytes, safe_name
from endstop.core.envelope import Envelope
from endstop.core.evidence import Evidence
from endstop.core.model import Counters, Spec, Version
from endstop.core.policy import Limits, Policy
from endstop.core.reasons import RunState
from endstop.core.transitions import OperationState

if TYPE_CHECKING:
    from endstop.core.events import Controls

__all__ = [
    "CheckpointRecord", "ChildRecord", "ControlKind", "ControlRecord", "EntryRecord", "OperationRecord",
    "RunRecord", "RunTransaction",
]  # fmt: skip

LABELS_MAX: Final = 32
ControlKind = str  # "stop" | "kill" | "freeze" | "deny"


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointRecord:
    """The last safe state of a run: JSON text, the entry it was written with, and when."""

    data: str
    seq: int
    at_us: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRecord:
    """One run as readers see it. `entries` counts its ledger entries; `owners` are the worker instances inside it."""

    run_id: str
    root_run_id: str
    parent_run_id: str | None = None
    depth: int = 0
    generation: int = 1
    state: RunState = RunState.RUNNING
    agent: str = "main"
    labels: tuple[tuple[str, str], ...] = ()
    spec: Spec
    policy_digest: str
    limits: Limits
    counters: Counters = Counters()
    progress_version: Version | None = None
    checkpoint: CheckpointRecord | None = None
    envelope: Envelope | None = None
    output: str | None = None
    owners: tuple[str, ...] = ()
    in_flight: tuple[tuple[str, str], ...] = ()
    entries: int = 0
    created_at_us: int = 0
    updated_at_us: int = 0

    def to_json(self) -> dict[str, object]:
        """This run as the contract publishes it (JSON values; times are RFC 3339)."""
        from endstop.core.codec import run_json

        return run_json(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class OperationRecord:
    """One side effect under its key. `fence` grows with every change of owner; a write names the fence it read.

    `probe_count` counts questions to the target; one is under way until `probe_until_us`, the next may start at
    `probe_not_before_us`. `settled_by` is empty, `probe` or `person`. `args` are the canonical arguments as JSON, kept
    only while a probe may need them; `receipt` is the target's own name for the effect. `attempt_id` names the one
    delivery of the call, among all of its owner's, that dispatched the attempt.
    """

    operation_id: str
    tool: str
    key_digest: str | None
    fingerprint: str
    state: OperationState
    run_id: str
    generation: int
    call_id: str
    owner_id: str
    attempt: int = 1
    fence: int = 1
    effect: str = "write"
    created_at_us: int = 0
    dispatched_at_us: int | None = None
    settled_at_us: int | None = None
    not_before_us: int = 0
    outcome: str | None = None
    result_kind: str | None = None
    result: bytes | None = field(default=None, repr=False)
    result_digest: str | None = None
    reason: str = ""
    probe_count: int = 0
    probe_not_before_us: int = 0
    probe_until_us: int = 0
    settled_by: str = ""
    receipt: str | None = None
    args: bytes | None = field(default=None, repr=False)
    attempt_id: str = ""

    def to_json(self) -> dict[str, object]:
        """This operation as the contract publishes it; its result's value is never in it."""
        from endstop.core.codec import operation_json

        return operation_json(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class ControlRecord:
    """One standing order of an operator. Parts that are None apply to everything."""

    control_id: str
    kind: ControlKind
    run_id: str | None = None
    label: str | None = None
    tool: str | None = None
    effect: str | None = None
    args: tuple[tuple[str, str], ...] = ()
    reason: str = ""
    actor: str = "operator"
    created_at_us: int = 0
    withdrawn_at_us: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class EntryRecord:
    """One leaf of the ledger: its position and its exact stored bytes."""

    index: int
    leaf: bytes = field(repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class ChildRecord:
    """A child run: a label inside its root's run, with a depth."""

    run_id: str
    root_run_id: str
    parent_run_id: str
    depth: int
    agent: str
    created_at_us: int


def _no_spec() -> Spec | None:
    return None


@dataclass(slots=True)
class RunTransaction:
    """The working copy of one run inside one transaction. Steps change it; the store saves what changed.

    `entries` collects the leaves to append, `operations` the operation records to write with the fence that each
    was read at (0 = it must not exist yet). `load_operations` reads every operation of the run, for the envelope.
    """

    run_id: str
    ledger: str
    state: RunState
    generation: int
    limits: Limits
    policy_digest: str
    evidence: Evidence
    controls: Controls
    next_seq: int
    first_seq: int
    agent: str = "main"
    owners: tuple[str, ...] = ()
    checkpoint: CheckpointRecord | None = None
    envelope: Envelope | None = None
    output: str | None = None
    operation: OperationRecord | None = None
    load_operations: Callable[[], tuple[OperationRecord, ...]] = tuple
    load_spec: Callable[[], Spec | None] = _no_spec
    updated_at_us: int = 0
    # -- what the step leaves for the store to save
    entries: list[bytes] = field(default_factory=list)
    input_digests: list[tuple[int, str]] = field(default_factory=list)
    operations: list[tuple[OperationRecord, int]] = field(default_factory=list)
    children: list[ChildRecord] = field(default_factory=list)
    row_changed: bool = False
    evidence_changed: bool = False

    def append(self, kind: str, now_us: int, fields: dict[str, object], *, actor: str = "agent") -> int:
        """Add one entry of type `kind` and return its number within the run."""
        seq = self.next_seq
        leaf = entry_bytes(
            kind, ledger=self.ledger, run_id=self.run_id, seq=seq, ts_us=now_us, actor=safe_name(actor),
            policy=self.policy_digest, generation=self.generation, fields=fields,
        )  # fmt: skip
        self.entries.append(leaf)
        self.next_seq = seq + 1
        return seq

    def put_operation(self, record: OperationRecord, expected_fence: int) -> None:
        """Write `record`, but only while the stored one still has `expected_fence` (0: none stored)."""
        self.operations.append((record, expected_fence))
        self.operation = record

    def effective(self, policy: Policy) -> Policy:
        """`policy` under this run's own limits, which a resume may have raised."""
        if policy.limits == self.limits:
            return policy
        return policy.under(self.limits)
