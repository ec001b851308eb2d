"""The memory store: for tests and for trying things out. It keeps the whole contract but durability.

What SQLite keeps in tables stands here in dictionaries; every request runs under one lock, so a future is done when it
is given back.
"""

from __future__ import annotations

import asyncio
import threading
from dataclasses import replace
from typing import TYPE_CHECKING, TypeVar

from endstop.core.records import EntryRecord, OperationRecord
from endstop.core.transitions import OVER_RUN_STATES
from endstop.errors import GuardClosedError
from endstop.store.futures import LoopFuture, done_future
from endstop.store.port import LedgerRow, RunOpened, RunQuery, StoredSpec, StoreFacts
from endstop.store.rows import RunRow, bounded, child_view, has_labels, ledger_row, run_view
from endstop.store.transact import (
    OpenRequest,
    Withdrawal,
    add_control,
    first_entry,
    open_run,
    run_step,
    save_spec,
    withdraw_controls,
)  # fmt: skip
from endstop.store.workspace import Workspace

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence
    from concurrent.futures import Future

    from endstop.core.envelope import Envelope
    from endstop.core.records import ChildRecord, ControlRecord, RunRecord
    from endstop.core.steps import Step
    from endstop.core.steps_life import NewRun
    from endstop.core.transitions import OperationState

__all__ = ["MemoryStore"]

A = TypeVar("A")
R = TypeVar("R")


class MemoryWorkspace(Workspace):
    """The dictionaries, and what stands to be put into them."""

    def __init__(self, ledger: str, now_us: int) -> None:
        super().__init__(ledger)
        self.leaves: list[bytes] = [first_entry(ledger, now_us)]
        self.leaves_of: dict[str, list[int]] = {"": [0]}
        self.hashes: dict[int, str] = {}
        self.rows: dict[str, RunRow] = {}
        self.stored_children: dict[str, ChildRecord] = {}
        self.stored_operations: dict[str, OperationRecord] = {}
        self.stored_specs: dict[str, StoredSpec] = {}
        self.controls: dict[str, ControlRecord] = {}

    def _load_run(self, run_id: str) -> RunRow | None:
        return self.rows.get(run_id)

    def _load_child(self, run_id: str) -> ChildRecord | None:
        return self.stored_children.get(run_id)

    def _load_operation(self, operation_id: str) -> OperationRecord | None:
        return self.stored_operations.get(operation_id)

    def _load_operations(self, run_id: str) -> tuple[OperationRecord, ...]:
        found = (record for record in self.stored_operations.values() if record.run_id == run_id)
        return tuple(sorted(found, key=_age))

    def _load_standing(self) -> list[ControlRecord]:
        return [control for control in self.controls.values() if control.withdrawn_at_us is None]

    def _load_spec(self, run_id: str) -> StoredSpec | None:
        return self.stored_specs.get(run_id)

    def _load_next_index(self) -> int:
        return len(self.leaves)

    def _load_next_seq(self, run_id: str) -> int:
        return len(self.leaves_of.get(run_id, ()))

    def has_control(self, control_id: str) -> bool:
        """Whether an order of that id was ever given."""
        return control_id in self.controls

    def _write(self) -> None:
        rows = {run_id: run.row() for run_id, run in self.run_states.items()}
        for run_id, row in rows.items():
            self.rows[run_id] = row
        for index, leaf in self.entries:
            self.leaves.append(leaf.encode("ascii"))
            self.leaves_of.setdefault(_run_id_of(leaf), []).append(index)
        self.hashes.update(self.input_digests)
        self.stored_children.update(self.children)
        self.stored_operations.update((key, record) for key, (record, _) in self.operations.items())
        self.stored_specs.update(self.specs)
        for control in self.controls_added:
            self.controls[control.control_id] = control
        for at_us, control_id in self.controls_withdrawn:
            self.controls[control_id] = replace(self.controls[control_id], withdrawn_at_us=at_us)


def _run_id_of(leaf: str) -> str:
    return ledger_row(leaf.encode("ascii"), None).session_id


def _age(record: OperationRecord) -> tuple[int, str]:
    return record.created_at_us, record.operation_id


class MemoryStore:
    """A store that is gone with its process. See `endstop.store.port.Store` for what each method promises."""

    owners_dir = None

    def __init__(self, *, new_key: Callable[[], bytes], now_us: Callable[[], int]) -> None:
        self.url = "memory:"
        self.ledger = f"endstop/{new_key()[:10].hex()}"
        self.store_key = new_key()
        self._now_us = now_us
        self._work = MemoryWorkspace(self.ledger, now_us())
        self._lock = threading.Lock()
        self._commits = 0
        self._closed = False

    # -- writing

    def open_run(self, new: NewRun, *, use_stored_spec: bool = False) -> Future[RunOpened]:
        """Create the run, or join it."""
        return self._done(open_run, OpenRequest(new=new, use_stored_spec=use_stored_spec))

    def transact(self, step: Step[A]) -> Future[A]:
        """Apply `step` to its run."""
        return self._done(_step, step)

    def transact_now(self, step: Step[A], held: list[BaseException] | None = None) -> A:  # noqa: ARG002  # the port's
        """The same as waiting for `transact(step)`."""
        return self._write(_step, step)

    def transact_async(self, step: Step[A]) -> asyncio.Future[A]:
        """The same as `transact(step)`, for the running event loop."""
        self._check_open()
        future: LoopFuture[A] = LoopFuture(loop=asyncio.get_running_loop())
        try:
            future.set_result(self._write(_step, step))
        except Exception as error:  # whatever failed belongs to whoever waits
            future.set_exception(error)
        return future

    def add_control(self, control: ControlRecord) -> Future[ControlRecord]:
        """Put a standing order in force."""
        return self._done(add_control, control)

    def withdraw_controls(
        self, *, kind: str, run_id: str | None, label: str | None, tool: str | None, control_id: str | None,
        actor: str, reason: str, now_us: int,
    ) -> Future[int]:  # fmt: skip
        """Withdraw the orders that match every part given."""
        asked = Withdrawal(
            kind=kind, run_id=run_id, label=label, tool=tool, control_id=control_id, actor=actor, reason=reason,
            now_us=now_us,
        )  # fmt: skip
        return self._done(withdraw_controls, asked)

    def save_spec(self, stored: StoredSpec) -> Future[None]:
        """Keep a spec for a run that has not started."""
        return self._done(save_spec, stored)

    # -- reading

    def spec(self, run_id: str) -> Future[StoredSpec | None]:
        """The spec written down for `run_id`."""
        return self._read(lambda work: _spec_of(work, run_id))

    def run(self, run_id: str) -> Future[RunRecord | None]:
        """One run (or child) as it stands."""
        return self._read(lambda work: _view_of(work, run_id, self._now_us()))

    def endings(self, run_ids: Collection[str]) -> Future[dict[str, Envelope]]:
        """Of these root runs, those that are over now."""

        def read(work: MemoryWorkspace) -> dict[str, Envelope]:
            rows = (work.rows.get(run_id) for run_id in run_ids)
            return {row.run_id: row.envelope for row in rows if row and row.envelope and row.state in OVER_RUN_STATES}

        return self._read(read)

    def run_key(self, run_id: str) -> Future[bytes | None]:
        """The key of a run's digests."""
        return self._read(lambda work: None if (row := work.rows.get(_root(work, run_id))) is None else row.run_key)

    def runs(self, query: RunQuery) -> Future[tuple[RunRecord, ...]]:
        """Runs, newest first."""
        return self._read(lambda work: _list(work, query, self._now_us()))

    def operations(
        self, *, run_id: str | None = None, states: Sequence[OperationState] = (), operation_id: str | None = None,
        limit: int = 1_000,
    ) -> Future[tuple[OperationRecord, ...]]:  # fmt: skip
        """Operations, oldest first."""

        def read(work: MemoryWorkspace) -> tuple[OperationRecord, ...]:
            root = None if run_id is None else _root(work, run_id)
            found = (
                record
                for record in work.stored_operations.values()
                if root in (None, record.run_id)
                and operation_id in (None, record.operation_id)
                and (not states or record.state in states)
            )
            return tuple(sorted(found, key=_age)[: bounded(limit)])

        return self._read(read)

    def controls(self, *, active_only: bool = True) -> Future[tuple[ControlRecord, ...]]:
        """Orders, oldest first."""
        return self._read(lambda work: tuple(work._load_standing() if active_only else work.controls.values()))

    def entries(
        self, *, run_id: str | None = None, after_index: int = -1, limit: int = 1_000, newest_first: bool = False
    ) -> Future[tuple[EntryRecord, ...]]:
        """Ledger entries by position."""

        def read(work: MemoryWorkspace) -> tuple[EntryRecord, ...]:
            found = [index for index in _positions(work, run_id) if index > after_index]
            if newest_first:
                found.reverse()
            return tuple(EntryRecord(index=index, leaf=work.leaves[index]) for index in found[: bounded(limit)])

        return self._read(read)

    def ledger_rows(self, *, run_id: str | None = None, limit: int = 1_000) -> Future[tuple[LedgerRow, ...]]:
        """Rows of the view `ledger`, oldest first."""
        return self._read(
            lambda work: tuple(
                ledger_row(work.leaves[index], work.hashes.get(index))
                for index in _positions(work, run_id)[: bounded(limit)]
            )
        )

    def evidence_of(self, run_id: str) -> Future[bytes | None]:
        """The packed evidence of a run."""
        return self._read(lambda work: None if (row := work.rows.get(_root(work, run_id))) is None else row.evidence)

    def change_counter(self) -> int:
        """How many transactions changed something."""
        self._check_open()
        return self._commits

    def is_owner_alive(self, owner_id: str) -> bool | None:  # noqa: ARG002  # the lock files know
        """None: no leases here."""
        return None

    def facts(self) -> Future[StoreFacts]:
        """What a doctor wants to know."""
        return self._read(
            lambda work: StoreFacts(
                kind="memory", engine_version="", schema_version=0, journal_mode="none", synchronous="none",
                file_mode="", ledger=self.ledger, entries=len(work.leaves), runs=len(work.rows), integrity="ok",
            )
        )  # fmt: skip

    def close(self) -> None:
        """Close. Later calls raise GuardClosedError."""
        with self._lock:
            self._closed = True

    # -- parts

    def _check_open(self) -> None:
        if self._closed:
            msg = "the memory store was closed: open another one"
            raise GuardClosedError(msg)

    def _write(self, function: Callable[[Workspace, A], R], request: A) -> R:
        with self._lock:
            self._check_open()
            try:
                answer = function(self._work, request)
            except BaseException:
                self._work.drop()
                raise
            if self._work.writes:
                self._work.flush()
                self._commits += 1
            return answer

    def _done(self, function: Callable[[Workspace, A], R], request: A) -> Future[R]:
        self._check_open()
        return done_future(lambda: self._write(function, request))

    def _read(self, read: Callable[[MemoryWorkspace], R]) -> Future[R]:
        self._check_open()
        with self._lock:
            return done_future(lambda: read(self._work))


def _step(work: Workspace, step: Step[A]) -> A:
    return run_step(work, step)


def _root(work: MemoryWorkspace, run_id: str) -> str:
    child = work.stored_children.get(run_id)
    return run_id if child is None else child.root_run_id


def _positions(work: MemoryWorkspace, run_id: str | None) -> Sequence[int]:
    return range(len(work.leaves)) if run_id is None else work.leaves_of.get(_root(work, run_id), [])


def _spec_of(work: MemoryWorkspace, run_id: str) -> StoredSpec | None:
    stored = work.stored_specs.get(run_id)
    row = work.rows.get(_root(work, run_id))
    if stored is not None or row is None:
        return stored
    return StoredSpec(run_id=run_id, spec=row.spec, created_at_us=row.created_at_us)


def _view_of(work: MemoryWorkspace, run_id: str, now_us: int) -> RunRecord | None:
    child = work.stored_children.get(run_id)
    row = work.rows.get(run_id if child is None else child.root_run_id)
    if row is None:
        return None
    root = run_view(row, now_us)
    return root if child is None else child_view(child, root)


def _list(work: MemoryWorkspace, query: RunQuery, now_us: int) -> tuple[RunRecord, ...]:
    ids = list(work.rows) if query.roots_only else [*work.rows, *work.stored_children]
    views = [view for run_id in ids if (view := _view_of(work, run_id, now_us)) is not None]
    chosen = [
        view
        for view in views
        if (not query.states or view.state in query.states) and has_labels(view.labels, query.labels)
    ]
    chosen.sort(key=lambda view: (view.created_at_us, view.run_id), reverse=True)
    return tuple(chosen[: bounded(query.limit)])
