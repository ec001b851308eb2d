"""The SQLite store: one file, shared by several processes; every write is one durable transaction.

Through `apsw`, whose own SQLite is free of the write-ahead-log reset fault; journal WAL, synchronous FULL. Writes go
through one writer per process (`writer`) and one fair queue per file (`turnstile`); reads have a connection of their
own and are answered at once, so their futures are done when they are given back.

A store is of one process: after a fork the child's copy raises GuardClosedError, and the child opens its own.
"""

from __future__ import annotations

import atexit
import os
from typing import TYPE_CHECKING, Final, TypeVar

import apsw

from endstop.errors import GuardClosedError
from endstop.store.migrations import SCHEMA_VERSION, queries
from endstop.store.port import LedgerRow, RunOpened, RunQuery, StoredSpec, StoreFacts
from endstop.store.sqlite.faults import mapped
from endstop.store.sqlite.incarnation import Incarnation
from endstop.store.sqlite.opening import check_library, connect, open_file
from endstop.store.sqlite.reading import Reader
from endstop.store.sqlite.tables import SqliteWorkspace
from endstop.store.sqlite.turnstile import WAIT_MS_MAX, Turnstile
from endstop.store.sqlite.writer import Writer
from endstop.store.transact import (
    OpenRequest,
    Withdrawal,
    add_control,
    open_run,
    run_step,
    save_spec,
    withdraw_controls,
)

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable, Collection, Sequence
    from concurrent.futures import Future
    from pathlib import Path

    from endstop.core.envelope import Envelope
    from endstop.core.records import ControlRecord, EntryRecord, OperationRecord, RunRecord
    from endstop.core.steps import Step
    from endstop.core.steps_life import NewRun
    from endstop.core.transitions import OperationState
    from endstop.store.workspace import Workspace

__all__ = ["SqliteStore"]

A = TypeVar("A")
R = TypeVar("R")
SQLITE_NUMBERS: Final = {"2": "full"}


class SqliteStore:
    """A store in one SQLite file. See `endstop.store.port.Store` for what each method promises.

    Beside `PATH` stand SQLite's own `PATH-wal` and `PATH-shm`, the queue of writers (`PATH.turn`, `PATH.lock`; the
    latter names the ledger, so that a lost database is noticed) and the folder of workers' locks (`PATH.owners`).
    """

    def __init__(
        self, path: Path, *, new_key: Callable[[], bytes], now_us: Callable[[], int], wait_ms_max: int = WAIT_MS_MAX
    ) -> None:
        check_library(apsw.SQLITE_VERSION_NUMBER)
        self._now_us = now_us
        self._pid = os.getpid()
        self._closed = False
        # 1. The files beside it. The path is fixed now: a later change of folder must not lead to another file.
        with mapped(f"open {path.name}"):
            path = path.absolute()
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._path = path
            self._owners = path.with_name(path.name + ".owners")
            self._owners.mkdir(mode=0o700, exist_ok=True)
            marker = path.with_name(path.name + ".lock")
            self._turnstile = Turnstile(path.with_name(path.name + ".turn"), marker, wait_ms_max=wait_ms_max)
        # 2. The file itself, then one connection that writes and one that reads.
        try:
            self._file = open_file(path, self._turnstile, marker, new_key=new_key, now_us=now_us)
            sql = queries()
            self._writing = connect(path)
            try:
                self._reader = Reader(connect(path), sql)
            except BaseException:
                self._writing.close()
                raise
        except BaseException:
            self._turnstile.close()
            raise
        try:
            self._incarnation = Incarnation(self._owners, self._file.ledger)
            self._new_key = new_key
            self._turnstile.enter()
            try:
                self._incarnation.enter(self._writing)
            finally:
                self._turnstile.leave()
        except BaseException:
            self._reader.close()
            self._writing.close()
            self._turnstile.close()
            raise
        work = SqliteWorkspace(self._file.ledger, self._writing, sql)
        work.after_commit = self._incarnation.note
        self._writer = Writer(path, self._file, work, self._turnstile)
        _OPEN.add(self)

    @property
    def url(self) -> str:
        """How this store was opened."""
        return f"sqlite:///{self._path}"

    @property
    def ledger(self) -> str:
        """The ledger's own name."""
        return self._file.ledger

    @property
    def store_key(self) -> bytes:
        """The key of operation keys and input digests."""
        return self._file.store_key

    @property
    def owners_dir(self) -> Path | None:
        """The folder of workers' lock files."""
        return self._owners

    @property
    def quarantine(self) -> str | None:
        """Why side effects are refused: the file is not the one that was written last. None when it is."""
        return self._incarnation.quarantine

    def accept_restore(self, *, actor: str, reason: str) -> None:
        """Take a restored file as it is, in a new incarnation; see `endstop.store.sqlite.incarnation`."""
        self._check_process()
        connection = connect(self._path)
        try:
            self._turnstile.enter()
            try:
                self._incarnation.accept(connection, self._new_key, actor=actor, reason=reason, now_us=self._now_us())
            finally:
                self._turnstile.leave()
        finally:
            connection.close()

    # -- writing

    def open_run(self, new: NewRun, *, use_stored_spec: bool = False) -> Future[RunOpened]:
        """Create the run, or join it."""
        return self._submit(open_run, OpenRequest(new=new, use_stored_spec=use_stored_spec))

    def transact(self, step: Step[A]) -> Future[A]:
        """Apply `step` to its run."""
        if os.getpid() != self._pid:
            self._check_process()
        return self._writer.submit(run_step, step)

    def transact_now(self, step: Step[A], held: list[BaseException] | None = None) -> A:
        """The same as waiting for `transact(step)`, without a change of thread when nobody else writes."""
        if os.getpid() != self._pid:
            self._check_process()
        return self._writer.run_now(run_step, step, held)

    def transact_async(self, step: Step[A]) -> asyncio.Future[A]:
        """The same as `transact(step)`, for the running event loop."""
        if os.getpid() != self._pid:
            self._check_process()
        return self._writer.submit_on_loop(run_step, step)

    def add_control(self, control: ControlRecord) -> Future[ControlRecord]:
        """Put a standing order in force."""
        return self._submit(add_control, control)

    def withdraw_controls(
        self, *, kind: str, run_id: str | None, label: str | None, tool: str | None, control_id: str | None,
        actor: str, reason: str, now_us: int,
    ) -> Future[int]:  # fmt: skip
        """Withdraw the orders that match every part given."""
        asked = Withdrawal(
            kind=kind, run_id=run_id, label=label, tool=tool, control_id=control_id, actor=actor, reason=reason,
            now_us=now_us,
        )  # fmt: skip
        return self._submit(withdraw_controls, asked)

    def save_spec(self, stored: StoredSpec) -> Future[None]:
        """Keep a spec for a run that has not started."""
        return self._submit(save_spec, stored)

    # -- reading

    def spec(self, run_id: str) -> Future[StoredSpec | None]:
        """The spec written down for `run_id`."""
        return self._read(lambda reader: reader.spec(run_id))

    def run(self, run_id: str) -> Future[RunRecord | None]:
        """One run (or child) as it stands."""
        return self._read(lambda reader: reader.run(run_id, self._now_us()))

    def endings(self, run_ids: Collection[str]) -> Future[dict[str, Envelope]]:
        """Of these root runs, those that are over now."""
        return self._read(lambda reader: reader.endings(run_ids))

    def run_key(self, run_id: str) -> Future[bytes | None]:
        """The key of a run's digests."""
        return self._read(lambda reader: reader.run_key(run_id))

    def runs(self, query: RunQuery) -> Future[tuple[RunRecord, ...]]:
        """Runs, newest first."""
        return self._read(lambda reader: reader.runs(query, self._now_us()))

    def operations(
        self, *, run_id: str | None = None, states: Sequence[OperationState] = (), operation_id: str | None = None,
        limit: int = 1_000,
    ) -> Future[tuple[OperationRecord, ...]]:  # fmt: skip
        """Operations, oldest first."""
        return self._read(lambda reader: reader.operations(run_id, states, operation_id, limit))

    def controls(self, *, active_only: bool = True) -> Future[tuple[ControlRecord, ...]]:
        """Orders, oldest first."""
        return self._read(lambda reader: reader.controls(active_only=active_only))

    def entries(
        self, *, run_id: str | None = None, after_index: int = -1, limit: int = 1_000, newest_first: bool = False
    ) -> Future[tuple[EntryRecord, ...]]:
        """Ledger entries by position."""
        return self._read(lambda reader: reader.entries(run_id, after_index, limit, newest_first=newest_first))

    def ledger_rows(self, *, run_id: str | None = None, limit: int = 1_000) -> Future[tuple[LedgerRow, ...]]:
        """Rows of the view `ledger`, oldest first."""
        return self._read(lambda reader: reader.ledger_rows(run_id, limit))

    def evidence_of(self, run_id: str) -> Future[bytes | None]:
        """The packed evidence of a run."""
        return self._read(lambda reader: reader.evidence(run_id))

    def change_counter(self) -> int:
        """A number that changes with every commit by any process."""
        self._check_process()
        with mapped("read"):
            return self._reader.change_counter()

    def is_owner_alive(self, owner_id: str) -> bool | None:  # noqa: ARG002  # the lock files know
        """None: no leases here."""
        return None

    def facts(self) -> Future[StoreFacts]:
        """What a doctor wants to know."""
        return self._read(self._facts)

    def _facts(self, reader: Reader) -> StoreFacts:
        entries, runs = reader.sizes()
        synchronous = reader.pragma("synchronous")
        return StoreFacts(
            kind="sqlite", engine_version=apsw.sqlite_lib_version(), schema_version=SCHEMA_VERSION,
            journal_mode=reader.pragma("journal_mode"),
            synchronous=SQLITE_NUMBERS.get(synchronous, synchronous),
            file_mode=f"{self._path.stat().st_mode & 0o777:04o}", ledger=self.ledger, entries=entries, runs=runs,
            integrity=reader.pragma("quick_check(1)"),
        )  # fmt: skip

    # -- the end

    def close(self) -> None:
        """Finish what was taken, then close. Later calls raise GuardClosedError."""
        if self._closed or os.getpid() != self._pid:
            return
        self._closed = True
        _OPEN.discard(self)
        self._writer.close()
        self._reader.close()
        self._incarnation.close()
        self._turnstile.close()

    # -- parts

    def _check_process(self) -> None:
        if os.getpid() != self._pid:
            msg = "this store was opened before a fork: open it again in the child process"
            raise GuardClosedError(msg)
        if self._closed:
            msg = f"the store {self._path.name} was closed: open it again"
            raise GuardClosedError(msg)

    def _submit(self, function: Callable[[Workspace, A], R], argument: A) -> Future[R]:
        self._check_process()
        return self._writer.submit(function, argument)

    def _read(self, read: Callable[[Reader], R]) -> Future[R]:
        self._check_process()
        return self._reader.answer(lambda: read(self._reader))

    def after_fork(self) -> None:
        """In a forked child: close the copies of the lock files, and touch nothing else."""
        self._turnstile.after_fork()


# An open store lives until it is closed or the interpreter ends, so that nothing that it took is forgotten.
_OPEN: Final[set[SqliteStore]] = set()
_LEFT: Final[list[SqliteStore]] = []


def _close_all() -> None:
    """At the interpreter's end: what was taken is written, then the files are closed."""
    for store in list(_OPEN):
        store.close()


def _leave_all() -> None:
    """In a forked child: the parent's connections are its own. They are kept, for closing them would be using them."""
    for store in list(_OPEN):
        store.after_fork()
        _LEFT.append(store)
    _OPEN.clear()


atexit.register(_close_all)
os.register_at_fork(after_in_child=_leave_all)
