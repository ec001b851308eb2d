"""The reads of the SQLite store, on a connection that never writes."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Final, TypeVar, cast

import orjson

from endstop.core.codec import envelope_from
from endstop.core.records import EntryRecord
from endstop.core.transitions import OperationState
from endstop.store.futures import done_future
from endstop.store.port import LedgerRow, RunQuery, StoredSpec
from endstop.store.rows import bounded, child_view, has_labels, run_view
from endstop.store.sqlite.encoding import (
    child_from,
    control_from,
    ledger_row_from,
    operation_from,
    run_from,
    stored_spec_from,
)  # fmt: skip
from endstop.store.sqlite.faults import mapped

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Sequence
    from concurrent.futures import Future

    import apsw

    from endstop.core.envelope import Envelope
    from endstop.core.records import ChildRecord, ControlRecord, OperationRecord, RunRecord

__all__ = ["Reader"]

R = TypeVar("R")
PAGE_ROWS: Final = 200
_END_US: Final = 2**63 - 1
_IN_DOUBT: Final = {OperationState.UNKNOWN, OperationState.MANUAL}


class Reader:
    """One connection for reads, for one thread at a time."""

    def __init__(self, connection: apsw.Connection, sql: dict[str, str]) -> None:
        self._connection = connection
        self._sql = sql
        self._lock = threading.Lock()

    def answer(self, read: Callable[[], R]) -> Future[R]:
        """A future that is done: with what `read` gives, or with what went wrong."""
        with self._lock:
            return done_future(lambda: self._consistent(read))

    def _consistent(self, read: Callable[[], R]) -> R:
        """All statements of `read` see one state of the store."""
        with mapped("read"):
            if self._connection.in_transaction:
                self._connection.execute("COMMIT")  # an interrupt left it
            self._connection.execute("BEGIN")
            try:
                return read()
            finally:
                self._connection.execute("COMMIT")

    def change_counter(self) -> int:
        """A number that changes with every commit of another connection: of any process, and of our writer."""
        with self._lock:
            return cast("int", self._connection.execute("PRAGMA data_version").get)

    def close(self) -> None:
        """Close the connection once the read under way is done."""
        with self._lock:
            self._connection.close()

    # -- reads; called inside `answer`

    def _rows(self, name: str, *values: object) -> Iterator[tuple[apsw.SQLiteValue, ...]]:
        return iter(self._connection.execute(self._sql[name], cast("tuple[apsw.SQLiteValue, ...]", values)))

    def _row(self, name: str, *values: object) -> tuple[apsw.SQLiteValue, ...] | None:
        return next(self._rows(name, *values), None)

    def _child(self, run_id: str) -> ChildRecord | None:
        row = self._row("child", run_id)
        return None if row is None else child_from(row)

    def _root(self, run_id: str) -> str:
        child = self._child(run_id)
        return run_id if child is None else child.root_run_id

    def spec(self, run_id: str) -> StoredSpec | None:
        """The spec written down for a run, or that of a run that has started."""
        row = self._row("spec", run_id)
        if row is not None:
            return stored_spec_from(row)
        row = self._row("run_by_id", self._root(run_id))
        if row is None:
            return None
        run = run_from(row)
        return StoredSpec(run_id=run_id, spec=run.spec, created_at_us=run.created_at_us)

    def run(self, run_id: str, now_us: int) -> RunRecord | None:
        """One run or child."""
        child = self._child(run_id)
        row = self._row("run_by_id", run_id if child is None else child.root_run_id)
        if row is None:
            return None
        root = run_view(run_from(row), now_us)
        return root if child is None else child_view(child, root)

    def endings(self, run_ids: Collection[str]) -> dict[str, Envelope]:
        """Of these root runs, those that are over."""
        rows = self._rows("endings", orjson.dumps(list(run_ids)).decode())
        return {str(run_id): envelope_from(str(envelope).encode()) for run_id, envelope in rows}

    def run_key(self, run_id: str) -> bytes | None:
        """The key of a run's digests."""
        row = self._row("run_key", self._root(run_id))
        return None if row is None else cast("bytes | None", row[0])

    def evidence(self, run_id: str) -> bytes | None:
        """The packed evidence of a run."""
        row = self._row("evidence", self._root(run_id))
        return None if row is None else cast("bytes", row[0])

    def runs(self, query: RunQuery, now_us: int) -> tuple[RunRecord, ...]:
        """Runs, newest first."""
        limit = bounded(query.limit)
        states = None if not query.states else orjson.dumps(query.states).decode()
        found: list[RunRecord] = []
        for view in self._all(states, now_us, roots_only=query.roots_only):
            if len(found) >= limit:
                break
            if (not query.states or view.state in query.states) and has_labels(view.labels, query.labels):
                found.append(view)
        return tuple(found)

    def _all(self, states: str | None, now_us: int, *, roots_only: bool) -> Iterator[RunRecord]:
        """Roots, and between them their children where they are asked for, newest first."""
        roots = self._roots(states, now_us)
        if roots_only:
            yield from roots
            return
        children = self._children(now_us)
        root, child = next(roots, None), next(children, None)
        while root is not None or child is not None:
            if child is None or (root is not None and _age(root) > _age(child)):
                yield cast("RunRecord", root)
                root = next(roots, None)
            else:
                yield child
                child = next(children, None)

    def _roots(self, states: str | None, now_us: int) -> Iterator[RunRecord]:
        before: tuple[int, str] = (_END_US, "")
        while True:
            page = [run_from(row) for row in self._rows("runs_newest_first", *before, states, PAGE_ROWS)]
            for row in page:
                yield run_view(row, now_us)
            if len(page) < PAGE_ROWS:
                return
            before = (page[-1].created_at_us, page[-1].run_id)

    def _children(self, now_us: int) -> Iterator[RunRecord]:
        before: tuple[int, str] = (_END_US, "")
        while True:
            page = [child_from(row) for row in self._rows("children_newest_first", *before, PAGE_ROWS)]
            for child in page:
                root = cast("RunRecord", self.run(child.root_run_id, now_us))  # the table's foreign key
                yield child_view(child, root)
            if len(page) < PAGE_ROWS:
                return
            before = (page[-1].created_at_us, page[-1].run_id)

    def operations(
        self, run_id: str | None, states: Sequence[OperationState], operation_id: str | None, limit: int
    ) -> tuple[OperationRecord, ...]:
        """Operations, oldest first."""
        bounded(limit)
        chosen = None if not states else orjson.dumps(list(states)).decode()
        root = None if run_id is None else self._root(run_id)
        if operation_id is not None:
            rows = self._rows("operation", operation_id)
            found = (operation_from(row) for row in rows)
            return tuple(
                record for record in found if root in (None, record.run_id) and (not states or record.state in states)
            )[:limit]
        if root is not None:
            rows = self._rows("operations_of_run", chosen, limit, root)
        elif states and set(states) <= _IN_DOUBT:
            rows = self._rows("operations_in_doubt", chosen, limit)
        else:
            rows = self._rows("operations", chosen, limit)
        return tuple(operation_from(row) for row in rows)

    def controls(self, *, active_only: bool) -> tuple[ControlRecord, ...]:
        """Orders, oldest first."""
        return tuple(control_from(row) for row in self._rows("controls_in_force" if active_only else "controls"))

    def entries(
        self, run_id: str | None, after_index: int, limit: int, *, newest_first: bool
    ) -> tuple[EntryRecord, ...]:
        """Ledger entries by position."""
        bounded(limit)
        name = "entries" if run_id is None else "entries_of_run"
        values = (after_index, limit) if run_id is None else (after_index, limit, self._root(run_id))
        rows = self._rows(f"{name}_newest_first" if newest_first else name, *values)
        return tuple(EntryRecord(index=cast("int", index), leaf=cast("str", leaf).encode()) for index, leaf in rows)

    def ledger_rows(self, run_id: str | None, limit: int) -> tuple[LedgerRow, ...]:
        """Rows of the view, oldest first."""
        bounded(limit)
        if run_id is None:
            rows = self._rows("ledger_rows", limit)
        else:
            rows = self._rows("ledger_rows_of_run", limit, self._root(run_id))
        return tuple(ledger_row_from(row) for row in rows)

    def sizes(self) -> tuple[int, int]:
        """How many entries and root runs there are."""
        return cast("tuple[int, int]", self._row("sizes"))

    def pragma(self, name: str) -> str:
        """What a pragma says."""
        return str(self._connection.execute(f"PRAGMA {name}").get)


def _age(view: RunRecord) -> tuple[int, str]:
    return view.created_at_us, view.run_id
