"""The PostgreSQL store: many workers on many machines, every write one durable transaction.

Writes go through a few lanes (`lane`), each with group commit; entries get their positions from a sequencer
(`sequencer`); workers are alive by leases on the database's clock (`leases`). Reads are done on the caller's thread, so
their futures are done when they are given back.

A store is of one process: after a fork the child's copy raises GuardClosedError, and the child opens its own.
"""

from __future__ import annotations

import atexit
import os
import weakref
import zlib
from contextlib import suppress
from typing import TYPE_CHECKING, Final, TypeVar, cast

import psycopg

from endstop.errors import EndstopError, GuardClosedError
from endstop.store.futures import done_future
from endstop.store.port import LedgerRow, RunOpened, RunQuery, StoredSpec, StoreFacts
from endstop.store.postgres.faults import mapped
from endstop.store.postgres.lane import Lane
from endstop.store.postgres.leases import LEASE_MS, Leases
from endstop.store.postgres.link import Link
from endstop.store.postgres.plan import run_of
from endstop.store.postgres.reading import Reader
from endstop.store.postgres.schema import open_store, server_facts
from endstop.store.postgres.sequencer import Sequencer
from endstop.store.postgres.statements import sql
from endstop.store.postgres.tables import PostgresWorkspace
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

    from endstop.core.envelope import Envelope
    from endstop.core.records import ControlRecord, EntryRecord, OperationRecord, RunRecord
    from endstop.core.steps import Step
    from endstop.core.steps_life import NewRun
    from endstop.core.transitions import OperationState
    from endstop.store.postgres.plan import Plan
    from endstop.store.workspace import Workspace

__all__ = ["LANES", "PostgresStore"]

A = TypeVar("A")
R = TypeVar("R")
LANES: Final = 1
READERS_MAX: Final = 8
WRITERS_KEPT_DAYS: Final = 30


class PostgresStore:
    """A store in the schema `endstop` of one database. See `endstop.store.port.Store` for what each method promises."""

    owners_dir = None

    def __init__(
        self, url: str, *, new_key: Callable[[], bytes], now_us: Callable[[], int], lanes: int = LANES,
        lease_ms: int = LEASE_MS,
    ) -> None:  # fmt: skip
        self._now_us = now_us
        self._pid = os.getpid()
        self._closed = False
        self._link = Link(url, connections_max=lanes + READERS_MAX)
        self._link.open()
        try:
            self._opened = open_store(self._link, new_key=new_key, now_us=now_us)
        except BaseException:
            self._link.close()
            raise
        self._sequencer = Sequencer(self._link)
        self._leases = Leases(self._link, new_key=new_key, lease_ms=lease_ms)
        self._lanes = tuple(
            Lane(
                self._link, PostgresWorkspace(self._opened.ledger, new_key=new_key, lease_ms=lease_ms),
                name=str(number), new_key=new_key, written=self._written,
            )
            for number in range(lanes)
        )  # fmt: skip
        _OPEN.add(self)

    @property
    def url(self) -> str:
        """How this store was opened, without the password."""
        return self._link.url

    @property
    def ledger(self) -> str:
        """The ledger's own name."""
        return self._opened.ledger

    @property
    def store_key(self) -> bytes:
        """The key of operation keys and input digests."""
        return self._opened.store_key

    def is_owner_alive(self, owner_id: str) -> bool | None:
        """Whether that worker's lease runs, by the database's clock; lock files say nothing about other machines."""
        self._check_process()
        return self._leases.is_alive(owner_id)

    # -- writing

    def open_run(self, new: NewRun, *, use_stored_spec: bool = False) -> Future[RunOpened]:
        """Create the run, or join it."""
        return self._submit(open_run, OpenRequest(new=new, use_stored_spec=use_stored_spec))

    def transact(self, step: Step[A]) -> Future[A]:
        """Apply `step` to its run."""
        self._check_process()
        return self._lane(step).submit(run_step, step)

    def transact_now(self, step: Step[A], held: list[BaseException] | None = None) -> A:
        """The same as waiting for `transact(step)`, without a change of thread when nobody else writes."""
        self._check_process()
        return self._lane(step).run_now(run_step, step, held)

    def transact_async(self, step: Step[A]) -> asyncio.Future[A]:
        """The same as `transact(step)`, for the running event loop."""
        self._check_process()
        return self._lane(step).submit_on_loop(run_step, step)

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
        """Ledger entries by position; all that was acknowledged by now has one."""
        return self._read(
            lambda reader: reader.entries(run_id, after_index, limit, newest_first=newest_first), sequenced=True
        )

    def ledger_rows(self, *, run_id: str | None = None, limit: int = 1_000) -> Future[tuple[LedgerRow, ...]]:
        """Rows of the view `ledger`, oldest first; all that was acknowledged by now is in it."""
        return self._read(lambda reader: reader.ledger_rows(run_id, limit), sequenced=True)

    def evidence_of(self, run_id: str) -> Future[bytes | None]:
        """The packed evidence of a run."""
        return self._read(lambda reader: reader.evidence(run_id))

    def change_counter(self) -> int:
        """A number that changes with every commit by any process: one exchange with the server."""
        self._check_process()
        with mapped("read"):
            row = self._link.ask(lambda connection: connection.execute(sql("change_counter")).fetchone())
        return cast("tuple[int]", row)[0]

    def facts(self) -> Future[StoreFacts]:
        """What a doctor wants to know. `file_mode` tells who may change the ledger, there being no file."""
        return self._read(self._facts, sequenced=True)

    def _facts(self, reader: Reader) -> StoreFacts:
        entries, runs = reader.sizes()
        protection, integrity = reader.protection()
        server = self._link.ask(server_facts)
        return StoreFacts(
            kind="postgresql", engine_version=server.version, schema_version=reader.schema_version(),
            journal_mode=f"wal_level {server.wal_level}", synchronous="on" if server.fsync == "on" else "off",
            file_mode=protection, ledger=self.ledger, entries=entries, runs=runs, integrity=integrity,
        )  # fmt: skip

    # -- the end

    def close(self) -> None:
        """Finish what was taken, then close. Later calls raise GuardClosedError."""
        if self._closed or os.getpid() != self._pid:
            return
        self._closed = True
        _OPEN.discard(self)
        for lane in self._lanes:
            lane.close()
        self._link.hurry()
        self._sequencer.close()
        self._leases.close()
        names = [name for lane in self._lanes for name in lane.writer_ids]
        if names:
            # Tidiness alone: rows of writers that were killed are cleared by whoever closes later.
            with suppress(EndstopError), mapped("close"):
                values = {"writer_ids": names, "kept_days": WRITERS_KEPT_DAYS}
                self._link.ask(lambda connection: connection.execute(sql("retire_writers"), values))
        self._link.close()

    # -- parts

    def _check_process(self) -> None:
        if os.getpid() != self._pid:
            msg = "this store was opened before a fork: open it again in the child process"
            raise GuardClosedError(msg)
        if self._closed:
            msg = "the store was closed: open it again"
            raise GuardClosedError(msg)

    def _lane(self, request: object) -> Lane:
        return self._lanes[zlib.crc32(run_of(request).encode("utf-8", "replace")) % len(self._lanes)]

    def _submit(self, function: Callable[[Workspace, A], R], argument: A) -> Future[R]:
        self._check_process()
        return self._lane(argument).submit(function, argument)

    def _written(self, plan: Plan) -> None:
        """After a commit: its entries want their positions, its workers their leases kept."""
        self._sequencer.wake()
        if plan.owners:
            self._leases.entered(plan.owners)

    def _read(self, read: Callable[[Reader], R], *, sequenced: bool = False) -> Future[R]:
        self._check_process()

        def ask(connection: psycopg.Connection) -> R:
            connection.execute(sql("begin_read"))
            try:
                return read(Reader(connection))
            finally:
                if not connection.closed:
                    connection.execute(b"ROLLBACK")

        def work() -> R:
            if sequenced:
                self._sequencer.catch_up()
            with mapped("read"):
                return self._link.ask(ask)

        return done_future(work)


_OPEN: Final[weakref.WeakSet[PostgresStore]] = weakref.WeakSet()
_LEFT: Final[list[PostgresStore]] = []


def _close_all() -> None:
    """At the interpreter's end: what was taken is written, then the connections are closed."""
    for store in list(_OPEN):
        store.close()


def _leave_all() -> None:
    """In a forked child: the parent's connections are its own. They are kept, for closing them would be using them."""
    _LEFT.extend(_OPEN)
    _OPEN.clear()


atexit.register(_close_all)
os.register_at_fork(after_in_child=_leave_all)
