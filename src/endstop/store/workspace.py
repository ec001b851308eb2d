"""What a store keeps in hand while a transaction is open: the runs it works on, and what is still to be written.

A workspace reads through to its store, remembers what it read for as long as nobody else commits, and collects what
the work of `endstop.store.transact` changes until `flush` writes it at once: so a batch of many steps costs few
statements. One thread at a time uses a workspace.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import OrderedDict
from typing import TYPE_CHECKING, Final

from endstop.core.entries import entry_bytes
from endstop.core.events import NO_CONTROLS
from endstop.core.evidence import Evidence
from endstop.core.records import RunTransaction
from endstop.core.transitions import OperationState
from endstop.store.rows import RunRow, controls_for

if TYPE_CHECKING:
    from endstop.core.model import Spec
    from endstop.core.records import ChildRecord, ControlRecord, OperationRecord
    from endstop.store.port import StoredSpec

__all__ = ["GLOBAL_RUN", "RUNS_HELD_MAX", "LiveRun", "Workspace"]

RUNS_HELD_MAX: Final = 512
OPERATIONS_HELD_MAX: Final = 4_096
GLOBAL_RUN: Final = "-"  # what entries that concern no single run give as their run


class LiveRun:
    """A root run in hand: its working copy and what steps never change."""

    __slots__ = ("controls_seen", "created_at_us", "key", "labels", "run_key", "saved_seq", "spec", "txn", "unsaved")

    def __init__(
        self, txn: RunTransaction, *, key: int | None, labels: tuple[tuple[str, str], ...], spec: Spec,
        run_key: bytes | None, created_at_us: int, saved_seq: int,
    ) -> None:  # fmt: skip
        self.txn = txn
        self.key = key  # None until its row was written
        self.labels = labels
        self.spec = spec
        self.run_key = run_key
        self.created_at_us = created_at_us
        self.saved_seq = saved_seq  # entries below it have their position
        self.controls_seen = -1
        self.unsaved = False

    def row(self) -> RunRow:
        """This run as a store keeps it."""
        txn = self.txn
        return RunRow(
            key=self.key or 0, run_id=txn.run_id, agent=txn.agent, labels=self.labels, spec=self.spec,
            policy_digest=txn.policy_digest, run_key=self.run_key, created_at_us=self.created_at_us, state=txn.state,
            generation=txn.generation, limits=txn.limits, owners=txn.owners, first_seq=txn.first_seq,
            checkpoint=txn.checkpoint, envelope=txn.envelope, output=txn.output, next_seq=txn.next_seq,
            updated_at_us=txn.updated_at_us, evidence=txn.evidence.pack(),
        )  # fmt: skip


class Workspace(ABC):
    """The open transaction of a store, as the shared work sees it. A store fills in the reads and `_write`."""

    def __init__(self, ledger: str) -> None:
        self.ledger = ledger
        # -- what was read, valid until somebody else commits or a transaction is undone
        self._runs: OrderedDict[str, LiveRun] = OrderedDict()
        self._executing: OrderedDict[str, OperationRecord] = OrderedDict()
        self._standing: list[ControlRecord] | None = None
        self._standing_version = 0
        self._next_index: int | None = None
        self._next_global_seq: int | None = None
        # -- what is still to be written
        self.writes = 0
        self.tainted = False  # a failed step may have spoilt what an earlier one of the same transaction collected
        self.entries: list[tuple[int, str]] = []
        self.input_digests: list[tuple[int, str]] = []
        self.operations: dict[str, tuple[OperationRecord, int]] = {}
        self.settled_from: dict[str, OperationRecord] = {}  # what is stored of those that were in flight
        self.children: dict[str, ChildRecord] = {}
        self.specs: dict[str, StoredSpec] = {}
        self.controls_added: list[ControlRecord] = []
        self.controls_withdrawn: list[tuple[int, str]] = []
        self.run_rows: dict[str, LiveRun] = {}
        self.run_states: dict[str, LiveRun] = {}

    # -- what a store fills in

    @abstractmethod
    def _load_run(self, run_id: str) -> RunRow | None:
        """The stored root run."""

    @abstractmethod
    def _load_child(self, run_id: str) -> ChildRecord | None:
        """The stored child run."""

    @abstractmethod
    def _load_operation(self, operation_id: str) -> OperationRecord | None:
        """The stored operation."""

    @abstractmethod
    def _load_operations(self, run_id: str) -> tuple[OperationRecord, ...]:
        """Every stored operation of a root run."""

    @abstractmethod
    def _load_standing(self) -> list[ControlRecord]:
        """Every stored order in force, oldest first."""

    @abstractmethod
    def _load_spec(self, run_id: str) -> StoredSpec | None:
        """The spec that was written down for a run."""

    @abstractmethod
    def _load_next_index(self) -> int:
        """The position of the next entry."""

    @abstractmethod
    def _load_next_seq(self, run_id: str) -> int:
        """The number of the next entry under `run_id`."""

    @abstractmethod
    def has_control(self, control_id: str) -> bool:
        """Whether an order of that id was ever given."""

    @abstractmethod
    def _write(self) -> None:
        """Write everything collected, and give new runs their key."""

    # -- reading

    def live(self, run_id: str) -> LiveRun | None:
        """The root run of that id, in hand."""
        found = self._runs.get(run_id)
        if found is not None:
            return found
        row = self._load_run(run_id)
        if row is None:
            return None
        txn = RunTransaction(
            run_id=row.run_id, ledger=self.ledger, state=row.state, generation=row.generation, limits=row.limits,
            policy_digest=row.policy_digest, evidence=Evidence.unpack(row.evidence), controls=NO_CONTROLS,
            next_seq=row.next_seq, first_seq=row.first_seq, agent=row.agent, owners=row.owners,
            checkpoint=row.checkpoint, envelope=row.envelope, output=row.output, updated_at_us=row.updated_at_us,
        )  # fmt: skip
        found = LiveRun(
            txn, key=row.key, labels=row.labels, spec=row.spec, run_key=row.run_key, created_at_us=row.created_at_us,
            saved_seq=row.next_seq,
        )  # fmt: skip
        self.hold(found)
        return found

    def hold(self, run: LiveRun) -> None:
        """Keep a run in hand, and let go of one that was used long ago and has nothing to save."""
        txn = run.txn
        run_id = txn.run_id
        txn.load_spec = lambda: run.spec
        txn.load_operations = lambda: self.operations_of(run_id)
        self._runs[run_id] = run
        if len(self._runs) > RUNS_HELD_MAX:
            oldest = next(iter(self._runs))
            if not self._runs[oldest].unsaved:
                del self._runs[oldest]

    def forget(self, run: LiveRun) -> None:
        """Let go of a run whose working copy may be half changed."""
        self._runs.pop(run.txn.run_id, None)
        self.tainted = self.tainted or run.unsaved

    def child(self, run_id: str) -> ChildRecord | None:
        """The child run of that id."""
        return self.children.get(run_id) or self._load_child(run_id)

    def operation(self, operation_id: str) -> OperationRecord | None:
        """The operation of that id."""
        unsaved = self.operations.get(operation_id)
        if unsaved is not None:
            return unsaved[0]
        found = self._executing.get(operation_id)
        return found if found is not None else self._load_operation(operation_id)

    def operations_of(self, run_id: str) -> tuple[OperationRecord, ...]:
        """Every operation of a root run."""
        stored = self._load_operations(run_id)
        if not self.operations:
            return stored
        found = {record.operation_id: record for record in stored}
        for operation_id, (record, _) in self.operations.items():
            found.pop(operation_id, None)
            if record.run_id == run_id:
                found[operation_id] = record
        return tuple(sorted(found.values(), key=lambda record: (record.created_at_us, record.operation_id)))

    def spec(self, run_id: str) -> StoredSpec | None:
        """The spec that was written down for a run."""
        return self.specs.get(run_id) or self._load_spec(run_id)

    def standing(self) -> list[ControlRecord]:
        """Every order in force, oldest first."""
        if self._standing is None:
            self._standing = self._load_standing()
            self._standing_version += 1
        return self._standing

    def see_controls(self, run: LiveRun) -> None:
        """Give a run's working copy the orders that concern it."""
        standing = self.standing()
        if run.controls_seen != self._standing_version:
            run.txn.controls = controls_for(standing, run.txn.run_id, run.labels)
            run.controls_seen = self._standing_version

    # -- collecting

    def save(self, run: LiveRun, now_us: int) -> None:
        """Collect what a step left in the working copy of `run`."""
        txn = run.txn
        if txn.entries:
            first = self._take_positions(len(txn.entries))
            for offset, leaf in enumerate(txn.entries):
                self.entries.append((first + offset, leaf.decode("ascii")))
            for seq, value in txn.input_digests:
                self.input_digests.append((first + seq - run.saved_seq, value))
            run.saved_seq = txn.next_seq
            txn.entries = []
            txn.input_digests = []
        elif not (txn.row_changed or txn.evidence_changed or txn.operations or txn.children):
            return
        self.writes += 1
        for record, fence in txn.operations:
            self._save_operation(record, fence)
        for child in txn.children:
            self.children[child.run_id] = child
        txn.operations = []
        txn.children = []
        if txn.row_changed:
            self.run_rows[txn.run_id] = run
        self.run_states[txn.run_id] = run
        run.unsaved = True
        txn.updated_at_us = now_us
        txn.row_changed = txn.evidence_changed = False

    def _save_operation(self, record: OperationRecord, fence: int) -> None:
        unsaved = self.operations.get(record.operation_id)
        if unsaved is None and record.operation_id in self._executing:
            self.settled_from[record.operation_id] = self._executing[record.operation_id]
        # The fence to compare with is the stored one, not that of a version that was never written.
        self.operations[record.operation_id] = (record, fence if unsaved is None else unsaved[1])
        if record.state is OperationState.EXECUTING:
            self._executing[record.operation_id] = record
            if len(self._executing) > OPERATIONS_HELD_MAX:
                self._executing.popitem(last=False)
        else:
            self._executing.pop(record.operation_id, None)

    def append(self, kind: str, now_us: int, fields: dict[str, object], *, actor: str) -> None:
        """Collect an entry that concerns no single run."""
        seq = self._load_next_seq(GLOBAL_RUN) if self._next_global_seq is None else self._next_global_seq
        self._next_global_seq = seq + 1
        leaf = entry_bytes(
            kind, ledger=self.ledger, run_id=GLOBAL_RUN, seq=seq, ts_us=now_us, actor=actor, policy="", generation=0,
            fields=fields,
        )  # fmt: skip
        self.entries.append((self._take_positions(1), leaf.decode("ascii")))
        self.writes += 1

    def add_control(self, control: ControlRecord) -> None:
        """Collect a new order."""
        self.standing().append(control)
        self._standing_version += 1
        self.controls_added.append(control)
        self.writes += 1

    def withdraw_control(self, control: ControlRecord, now_us: int) -> None:
        """Collect the end of an order."""
        self.standing().remove(control)
        self._standing_version += 1
        self.controls_withdrawn.append((now_us, control.control_id))
        self.writes += 1

    def save_spec(self, stored: StoredSpec) -> None:
        """Collect a spec."""
        self.specs[stored.run_id] = stored
        self.writes += 1

    def _take_positions(self, count: int) -> int:
        first = self._load_next_index() if self._next_index is None else self._next_index
        self._next_index = first + count
        return first

    # -- writing and undoing

    def flush(self) -> None:
        """Write what was collected."""
        if not self.writes:
            return
        self._write()
        for run in self.run_states.values():
            run.unsaved = False
        self._clear()

    def drop(self) -> None:
        """Forget everything, read or collected: a transaction was undone, or somebody else committed."""
        self._runs.clear()
        self._executing.clear()
        self._standing = None
        self._next_index = None
        self._next_global_seq = None
        self._clear()

    def _clear(self) -> None:
        self.writes = 0
        self.tainted = False
        self.entries = []
        self.input_digests = []
        self.operations = {}
        self.settled_from = {}
        self.children = {}
        self.specs = {}
        self.controls_added = []
        self.controls_withdrawn = []
        self.run_rows = {}
        self.run_states = {}
