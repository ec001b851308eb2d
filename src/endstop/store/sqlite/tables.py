"""The workspace of the SQLite store: its reads and writes inside one BEGIN IMMEDIATE."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final, cast

from endstop.errors import InvariantError
from endstop.store.sqlite.encoding import (
    child_from,
    child_values,
    control_from,
    control_values,
    is_settlement,
    new_run_values,
    operation_from,
    operation_values,
    outcome_values,
    run_from,
    run_values,
    spec_values,
    stored_spec_from,
)  # fmt: skip
from endstop.store.workspace import Workspace

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import apsw

    from endstop.core.records import ChildRecord, ControlRecord, OperationRecord
    from endstop.store.port import StoredSpec
    from endstop.store.rows import RunRow

__all__ = ["SqliteWorkspace"]

Row = tuple["apsw.SQLiteValue", ...]
_CHUNKS: Final = (64, 16, 4, 1)
_PLACES: Final = re.compile(r"VALUES (\([?, ]+\))")


class SqliteWorkspace(Workspace):
    """The tables behind one connection, and what stands to be written into them."""

    def __init__(self, ledger: str, connection: apsw.Connection, sql: dict[str, str]) -> None:
        super().__init__(ledger)
        self._connection = connection
        self._execute = connection.cursor().execute  # one for all: every result is read before the next statement
        self._sql = sql
        self._operation = sql["operation"]
        self._many: dict[tuple[str, int], str] = {}
        self._version = -1  # the data's version at our last commit
        self._open = False
        self.after_commit: Callable[[int], None] | None = None  # hears how many entries there are

    # -- the transaction

    @property
    def in_transaction(self) -> bool:
        """Whether SQLite has a transaction open."""
        return self._connection.in_transaction

    def begin(self) -> None:
        """Open the transaction; what others committed meanwhile makes everything in hand worthless."""
        if self._open:
            self.rollback()  # an interrupt left it
        self._open = True
        self._execute("BEGIN IMMEDIATE")
        if self._connection.data_version() != self._version:
            self.drop()

    def commit(self) -> None:
        """Make it durable."""
        self._execute("COMMIT")
        self._version = self._connection.data_version()  # it counts our own commits too
        self._open = False
        if self.after_commit is not None and self._next_index is not None:
            self.after_commit(self._next_index)

    def rollback(self) -> None:
        """Undo it, unless SQLite has undone it already (a full disk does), and forget what was in hand."""
        self.drop()
        if self._connection.in_transaction:
            self._execute("ROLLBACK")
        self._open = False

    def release(self) -> None:
        """Close the connection."""
        self._connection.close()

    # -- reads

    def _load_run(self, run_id: str) -> RunRow | None:
        row = self._execute(self._sql["run_by_id"], (run_id,)).fetchone()
        return None if row is None else run_from(row)

    def _load_child(self, run_id: str) -> ChildRecord | None:
        row = self._execute(self._sql["child"], (run_id,)).fetchone()
        return None if row is None else child_from(row)

    def _load_operation(self, operation_id: str) -> OperationRecord | None:
        row = self._execute(self._operation, (operation_id,)).fetchone()
        return None if row is None else operation_from(row)

    def _load_operations(self, run_id: str) -> tuple[OperationRecord, ...]:
        rows = self._execute(self._sql["operations_of_run"], (None, -1, run_id))
        return tuple(operation_from(row) for row in rows)

    def _load_standing(self) -> list[ControlRecord]:
        return [control_from(row) for row in self._execute(self._sql["controls_in_force"])]

    def _load_spec(self, run_id: str) -> StoredSpec | None:
        row = self._execute(self._sql["spec"], (run_id,)).fetchone()
        return None if row is None else stored_spec_from(row)

    def _load_next_index(self) -> int:
        return cast("int", self._execute(self._sql["next_index"]).get)

    def _load_next_seq(self, run_id: str) -> int:
        return cast("int", self._execute(self._sql["next_seq"], (run_id,)).get)

    def has_control(self, control_id: str) -> bool:
        """Whether an order of that id was ever given."""
        return self._execute(self._sql["control"], (control_id,)).fetchone() is not None

    # -- writes

    def _write(self) -> None:
        put = self._put
        # 1. The ledger.
        put("insert_entry", self.entries)
        put("insert_input_digest", self.input_digests)
        # 2. The runs, and their children, which name them.
        self._write_runs()
        if self.children:
            put("insert_child", [child_values(child) for child in self.children.values()])
        # 3. The operations.
        if self.operations:
            self._write_operations()
        # 4. What an operator wrote.
        if self.specs:
            put("insert_spec", [spec_values(stored) for stored in self.specs.values()])
        if self.controls_added:
            put("insert_control", [control_values(control) for control in self.controls_added])
        if self.controls_withdrawn:
            self._connection.executemany(self._sql["withdraw_control"], self.controls_withdrawn)

    def _write_runs(self) -> None:
        for run in self.run_rows.values():
            if run.key is None:
                run.key = cast("int", self._execute(self._sql["insert_run"], new_run_values(run)).get)
            else:
                self._execute(self._sql["update_run"], (*run_values(run), run.key))
        states: list[Row] = []
        for run in self.run_states.values():
            txn = run.txn
            states.append((run.key, txn.next_seq, txn.updated_at_us, txn.evidence.pack()))
        self._put("update_run_state", states)

    def _write_operations(self) -> None:
        fresh: list[Row] = []
        known: list[Row] = []
        settled: list[Row] = []
        for record, fence in self.operations.values():
            before = self.settled_from.get(record.operation_id)
            if not fence:
                fresh.append(operation_values(record))
            elif before is not None and is_settlement(before, record):
                settled.append(outcome_values(record))
            else:
                known.append(operation_values(record))
        self._put("insert_operation", fresh)
        changed = self._put("update_operation", known) + self._put(
            "settle_operation", settled, several="settle_operations"
        )
        if changed != len(known) + len(settled):
            msg = f"{len(known) + len(settled)} operations were to be written at their fence, {changed} were"
            raise InvariantError(msg)

    def _put(self, name: str, rows: Sequence[Row], *, several: str = "") -> int:
        """Write `rows` with few statements: each gives up the interpreter, and getting it back may take long."""
        count = len(rows)
        if not count:
            return 0
        if count == 1:
            self._execute(self._sql[name], rows[0])
            return self._connection.changes()
        changed = start = 0
        for size in _CHUNKS:
            while count - start >= size:
                values = [value for row in rows[start : start + size] for value in row]
                self._execute(self._sized(several or name, size), values)
                changed += self._connection.changes()
                start += size
        return changed

    def _sized(self, name: str, size: int) -> str:
        """The statement `name` for `size` rows at once."""
        found = self._many.get((name, size))
        if found is None:
            sql = self._sql[name]
            places = cast("re.Match[str]", _PLACES.search(sql))  # every statement given to `_put` writes such a row
            found = f"{sql[: places.start(1)]}{', '.join([places[1]] * size)}{sql[places.end(1) :]}"
            self._many[name, size] = found
        return found
