"""The store port: what every store promises.

Contract, method by method (the suite in `endstop.testing.store_contract` holds every store to it):

* Every method that writes is ONE durable transaction; its future is done only after the commit is on disk.
* A future fails with a StoreError, or with the step's own UsageError, and then nothing of that call was written.
* Steps of one run never interleave, in whatever threads and processes they start: each sees all that was committed.
* An operation is written only at the fence it was read at; else the step fails with StoreUnavailableError.
* Entries of a run are numbered without gaps, and entries of the ledger are positions 0, 1, 2, …; both in one
  transaction with the change they record. A stored entry is never changed.
* Controls committed before a step's transaction are seen by it.
* A cancelled waiter does not undo a transaction: futures refuse cancellation once their work was taken.
"""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Protocol, TypeVar, runtime_checkable

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Collection, Sequence
    from pathlib import Path

    from endstop.core.envelope import Envelope
    from endstop.core.model import Spec
    from endstop.core.reasons import RunState
    from endstop.core.records import ControlRecord, EntryRecord, OperationRecord, RunRecord
    from endstop.core.steps import Step
    from endstop.core.steps_life import Joined, NewRun
    from endstop.core.transitions import OperationState

__all__ = [
    "ROWS_MAX", "LedgerRow", "RestorableStore", "RunOpened", "RunQuery", "Store", "StoreFacts", "StoredSpec",
    "quarantine_of",
]  # fmt: skip

A = TypeVar("A")
ROWS_MAX: Final = 10_000


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOpened:
    """The answer to `open_run`. `created` is False when the run existed and was joined; `run_key` keys its digests."""

    created: bool
    run_key: bytes
    spec: Spec
    joined: Joined


@dataclass(frozen=True, slots=True, kw_only=True)
class RunQuery:
    """Which runs to list, newest first. Parts that are None or empty do not filter."""

    states: tuple[RunState, ...] = ()
    labels: tuple[tuple[str, str], ...] = ()
    roots_only: bool = True
    limit: int = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredSpec:
    """A spec that was written down before its run started."""

    run_id: str
    spec: Spec
    created_at_us: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerRow:
    """One row of the view `ledger`: the nine columns that people read first."""

    session_id: str
    turn_count: int
    state_origin: str
    input_hash: str | None
    token_delta: int
    execution_time_ms: int
    pass_fail: str
    breach_reason: str | None
    created_at: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreFacts:
    """What `endstop doctor` checks: engine and version, durability, file mode, schema version, sizes."""

    kind: str
    engine_version: str
    schema_version: int
    journal_mode: str
    synchronous: str
    file_mode: str
    ledger: str
    entries: int
    runs: int
    integrity: str


@runtime_checkable
class RestorableStore(Protocol):
    """A store that sees when it was restored from a backup. Such a one is in quarantine until somebody accepts it."""

    @property
    def quarantine(self) -> str | None:
        """Why side effects are refused, or None."""
        ...

    def accept_restore(self, *, actor: str, reason: str) -> None:
        """Take the records as they are, with an entry that says who and a digest of why."""
        ...


def quarantine_of(store: object) -> str | None:
    """Why a store's records are not trusted for side effects, or None."""
    wrong: str | None = getattr(store, "quarantine", None)
    return wrong


class Store(Protocol):
    """Durable state of runs, operations, controls and the ledger. See the module's contract."""

    @property
    def url(self) -> str:
        """How this store was opened, without secrets."""
        ...

    @property
    def ledger(self) -> str:
        """The ledger's own name, made when the store was made."""
        ...

    @property
    def store_key(self) -> bytes:
        """The key of operation keys and input digests: 32 bytes, made when the store was made."""
        ...

    @property
    def owners_dir(self) -> Path | None:
        """The folder of workers' lock files, or None where no other process can share this store."""
        ...

    # -- writing

    def open_run(self, new: NewRun, *, use_stored_spec: bool = False) -> Future[RunOpened]:
        """Create the run, or join it when it exists (same spec unless `use_stored_spec`, same policy digest).

        Joining takes `JoinRun`: RunJoinError when spec or policy differ.
        """
        ...

    def transact(self, step: Step[A]) -> Future[A]:
        """Apply `step` to its run. RunNotFoundError when there is no such run. A child's id means its root."""
        ...

    def transact_now(self, step: Step[A], held: list[BaseException] | None = None) -> A:
        """The same as waiting for `transact(step)`, for threads: no change of thread when nobody else writes.

        A KeyboardInterrupt or SystemExit of this thread that comes too late to stop the commit goes to `held`, and the
        answer is given; without `held` it is raised after the commit. One that is raised although there is a `held`
        means that nothing was written.
        """
        ...

    def transact_async(self, step: Step[A]) -> asyncio.Future[A]:
        """The same as `transact(step)`, for the running event loop, which is woken once for a whole batch.

        The future refuses cancellation: a cancelled task gets its CancelledError when the commit is over, and the
        answer stands in the future.
        """
        ...

    def add_control(self, control: ControlRecord) -> Future[ControlRecord]:
        """Put a standing order in force, with a `control` entry; every later step sees it."""
        ...

    def withdraw_controls(
        self,
        *,
        kind: str,
        run_id: str | None,
        label: str | None,
        tool: str | None,
        control_id: str | None,
        actor: str,
        reason: str,
        now_us: int,
    ) -> Future[int]:
        """Withdraw the orders of `kind` that match every part given; gives how many there were."""
        ...

    def save_spec(self, stored: StoredSpec) -> Future[None]:
        """Keep a spec for a run that has not started. UsageError when the id is taken by another spec."""
        ...

    # -- reading

    def spec(self, run_id: str) -> Future[StoredSpec | None]:
        """The spec written down for `run_id`, also of a run that has started."""
        ...

    def run(self, run_id: str) -> Future[RunRecord | None]:
        """One run (or child) as it stands."""
        ...

    def endings(self, run_ids: Collection[str]) -> Future[dict[str, Envelope]]:
        """Of these root runs, those that are over now (stopped, complete, paused), by id."""
        ...

    def run_key(self, run_id: str) -> Future[bytes | None]:
        """The key of a run's digests, None when there is no such run or the key was destroyed."""
        ...

    def runs(self, query: RunQuery) -> Future[tuple[RunRecord, ...]]:
        """Runs, newest first."""
        ...

    def operations(
        self,
        *,
        run_id: str | None = None,
        states: Sequence[OperationState] = (),
        operation_id: str | None = None,
        limit: int = 1_000,
    ) -> Future[tuple[OperationRecord, ...]]:
        """Operations, oldest first."""
        ...

    def controls(self, *, active_only: bool = True) -> Future[tuple[ControlRecord, ...]]:
        """Orders, oldest first."""
        ...

    def entries(
        self, *, run_id: str | None = None, after_index: int = -1, limit: int = 1_000, newest_first: bool = False
    ) -> Future[tuple[EntryRecord, ...]]:
        """Ledger entries by position."""
        ...

    def ledger_rows(self, *, run_id: str | None = None, limit: int = 1_000) -> Future[tuple[LedgerRow, ...]]:
        """Rows of the view `ledger`, oldest first."""
        ...

    def evidence_of(self, run_id: str) -> Future[bytes | None]:
        """The packed evidence of a run, for checks that folding the ledger gives the stored state."""
        ...

    def change_counter(self) -> int:
        """A number that changes with every commit by any process; cheap enough to ask a hundred times a second."""
        ...

    def is_owner_alive(self, owner_id: str) -> bool | None:
        """Whether a worker of another process lives, where the store itself keeps leases; None: ask the lock files."""
        ...

    def facts(self) -> Future[StoreFacts]:
        """What a doctor wants to know."""
        ...

    def close(self) -> None:
        """Finish what was taken, then close. Later calls raise GuardClosedError."""
        ...
