"""The workspace of the PostgreSQL store: what one transaction reads, holds and writes.

Order of locks, the same for everybody, so that no two transactions wait for each other: the gate (shared for steps,
exclusive for an operator's order), the names of runs that may be made, the rows of runs by their id, then operations by
theirs. A run's row stays held until the commit; whoever holds it is the only one who works on that run. Operations are
written over exactly the version that was read, for they may belong to several runs.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING, Final, cast

from endstop.errors import InvariantError
from endstop.store.postgres.encoding import (
    child_from,
    child_values,
    control_from,
    control_values,
    new_run_values,
    operation_arrays,
    operation_from,
    run_from,
    run_values,
    spec_values,
    stored_spec_from,
)  # fmt: skip
from endstop.store.postgres.faults import StaleError
from endstop.store.postgres.statements import LOCK_SPACE, settings, sql
from endstop.store.workspace import RUNS_HELD_MAX, LiveRun, Workspace

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import psycopg

    from endstop.core.records import ChildRecord, ControlRecord, OperationRecord
    from endstop.store.port import StoredSpec
    from endstop.store.postgres.plan import Plan
    from endstop.store.rows import RunRow

__all__ = ["PostgresWorkspace"]

CHILDREN_KNOWN_MAX: Final = 4_096
STAMP_BYTES: Final = 16
OPERATIONS_OF_RUN_MAX: Final = 1_000_000


class PostgresWorkspace(Workspace):
    """The tables behind the connection of one transaction, and what stands to be written into them."""

    def __init__(self, ledger: str, *, new_key: Callable[[], bytes], lease_ms: int) -> None:
        super().__init__(ledger)
        self._new_key = new_key
        self._lease_ms = lease_ms
        self._open: psycopg.Connection | None = None
        self._stamp = b""
        self._owners: frozenset[str] = frozenset()
        # -- valid across transactions: versions of the runs in hand, the orders in force, children (they never change)
        self._stamps: dict[str, bytes] = {}
        self._controls_version: tuple[int, int] | None = None
        self._known_children: OrderedDict[str, ChildRecord] = OrderedDict()
        # -- of this transaction alone
        self._held: set[str] = set()  # runs whose row is held, and ids that are no run
        self._stored: set[str] = set()  # runs whose row is held
        self._rows: dict[str, RunRow] = {}
        self._read: dict[str, OperationRecord | None] = {}

    # -- the transaction

    def begin(self, connection: psycopg.Connection, plan: Plan) -> None:
        """Open the transaction, take its locks and read what it needs, in one exchange with the server."""
        self._open = connection
        self._stamp = self._new_key()[:STAMP_BYTES]
        self._owners = plan.owners
        self._next_index = self._next_global_seq = None
        self._executing.clear()
        self._held.clear()
        self._stored.clear()
        self._rows.clear()
        self._read = dict.fromkeys(plan.operation_ids)
        with connection.pipeline():
            connection.execute(sql("begin"))
            connection.execute(sql("bound"), settings())
            connection.execute(sql("gate_alone" if plan.alone else "gate"), {"space": LOCK_SPACE})
            if plan.names:
                connection.execute(sql("hold_names"), {"space": LOCK_SPACE, "ids": list(plan.names)})
            runs = connection.execute(sql("hold_runs"), {"ids": list(plan.run_ids)}) if plan.run_ids else None
            version = connection.execute(sql("controls_version"))
            operations = (
                connection.execute(sql("operations_by_id"), {"ids": list(plan.operation_ids)})
                if plan.operation_ids
                else None
            )
            held = [] if runs is None else runs.fetchall()
            found = cast("tuple[int, int]", version.fetchone())
            read = [] if operations is None else operations.fetchall()
        if found != self._controls_version:
            self._standing = None
            self._controls_version = found
        for row in read:
            record = operation_from(row)
            self._read[record.operation_id] = record
        self._take(plan.run_ids, cast("list[tuple[str, bytes]]", held))

    def commit(self, writer_id: str, batch_no: int) -> bool:
        """Write what was collected and make it durable, in one exchange; gives whether there was anything to write.

        Raises what the server said, or the driver's error when nobody said anything: then it may have been committed.
        """
        connection, written = self._connection, self.writes > 0
        saved = dict.fromkeys(self.run_states, self._stamp)
        with connection.pipeline():
            if written:
                self.flush()
                connection.execute(sql("count_batch"), {"writer_id": writer_id, "batch_no": batch_no})
            done = connection.execute(b"COMMIT")
        if done.statusmessage != "COMMIT":
            msg = f"the server answered {done.statusmessage} to COMMIT"
            raise StaleError(msg)
        self._stamps.update(saved)
        self._open = None
        return written

    def drop(self) -> None:
        """Forget everything: the transaction was undone, or nobody knows."""
        super().drop()
        self._stamps.clear()
        self._controls_version = None
        self._open = None

    @property
    def _connection(self) -> psycopg.Connection:
        if self._open is None:
            msg = "the PostgreSQL workspace was used outside a transaction"
            raise InvariantError(msg)
        return self._open

    # -- runs

    def live(self, run_id: str) -> LiveRun | None:
        """The root run of that id, held until the transaction ends."""
        if run_id not in self._held and run_id not in self.run_states:
            rows = self._connection.execute(sql("hold_runs"), {"ids": [run_id]}).fetchall()
            self._take((run_id,), cast("list[tuple[str, bytes]]", rows))
        return super().live(run_id)

    def _take(self, asked: Sequence[str], held: list[tuple[str, bytes]]) -> None:
        """Sort the runs whose rows are held now: the copy in hand is the newest one, or the row is read."""
        self._held.update(asked)
        old = []
        for run_id, stamp in held:
            self._held.add(run_id)
            self._stored.add(run_id)
            if run_id in self._runs and self._stamps.get(run_id) == stamp:
                self._runs.move_to_end(run_id)
                continue
            self._runs.pop(run_id, None)
            self._stamps[run_id] = stamp
            old.append(run_id)
        if old:
            self._fetch(old)
        if len(self._stamps) > 2 * RUNS_HELD_MAX:
            kept = self._held.union(self._runs)
            self._stamps = {run_id: stamp for run_id, stamp in self._stamps.items() if run_id in kept}

    def _fetch(self, run_ids: list[str]) -> None:
        for row in self._connection.execute(sql("runs_by_id"), {"ids": run_ids}):
            run = run_from(row)
            self._rows[run.run_id] = run

    def _load_run(self, run_id: str) -> RunRow | None:
        if run_id in self._stored and run_id not in self._rows:
            self._fetch([run_id])  # its copy was given up with a failed step
        return self._rows.pop(run_id, None)

    def _load_child(self, run_id: str) -> ChildRecord | None:
        known = self._known_children.get(run_id)
        if known is not None:
            return known
        row = self._connection.execute(sql("child"), {"run_id": run_id}).fetchone()
        if row is None:
            return None
        child = child_from(row)
        self._known_children[run_id] = child
        if len(self._known_children) > CHILDREN_KNOWN_MAX:
            self._known_children.popitem(last=False)
        return child

    # -- other reads

    def _load_operation(self, operation_id: str) -> OperationRecord | None:
        if operation_id not in self._read:
            row = self._connection.execute(sql("operations_by_id"), {"ids": [operation_id]}).fetchone()
            self._read[operation_id] = None if row is None else operation_from(row)
        return self._read[operation_id]

    def _load_operations(self, run_id: str) -> tuple[OperationRecord, ...]:
        values = {"run_id": run_id, "states": None, "many": OPERATIONS_OF_RUN_MAX}
        found = tuple(operation_from(row) for row in self._connection.execute(sql("operations_of_run"), values))
        for record in found:
            # What was read first is what a write is compared with.
            self._read.setdefault(record.operation_id, record)
        return tuple(self._read[record.operation_id] or record for record in found)

    def _load_standing(self) -> list[ControlRecord]:
        return [control_from(row) for row in self._connection.execute(sql("controls_in_force"))]

    def _load_spec(self, run_id: str) -> StoredSpec | None:
        row = self._connection.execute(sql("spec"), {"run_id": run_id}).fetchone()
        return None if row is None else stored_spec_from(row)

    def _load_next_index(self) -> int:
        return 0  # the sequencer gives positions: here they are those within the transaction

    def _load_next_seq(self, run_id: str) -> int:
        row = self._connection.execute(sql("next_seq"), {"run_id": run_id}).fetchone()
        return cast("tuple[int]", row)[0]

    def has_control(self, control_id: str) -> bool:
        """Whether an order of that id was ever given."""
        return self._connection.execute(sql("control"), {"control_id": control_id}).fetchone() is not None

    # -- writes; inside the exchange that `commit` opened

    def _write(self) -> None:
        execute = self._connection.execute
        # 1. The runs, and the workers that enter one.
        self._write_runs()
        if self._owners:
            execute(sql("enter_workers"), {"owner_ids": list(self._owners), "lease_ms": self._lease_ms})
        for child in self.children.values():
            execute(sql("insert_child"), child_values(child))
        # 2. The operations.
        self._write_operations()
        # 3. The ledger.
        if self.entries:
            hashes: list[str | None] = [None] * len(self.entries)
            for index, value in self.input_digests:
                hashes[index] = value
            execute(sql("add_entries"), {"leaves": [leaf for _, leaf in self.entries], "hashes": hashes})
        # 4. What an operator wrote.
        for stored in self.specs.values():
            execute(sql("insert_spec"), spec_values(stored))
        for control in self.controls_added:
            execute(sql("insert_control"), control_values(control))
        for at_us, control_id in self.controls_withdrawn:
            execute(sql("withdraw_control"), {"at_us": at_us, "control_id": control_id})

    def _write_runs(self) -> None:
        execute = self._connection.execute
        known = [run for run in self.run_states.values() if run.key is not None]
        for run_id in sorted(self.run_rows):
            run = self.run_rows[run_id]
            if run.key is not None:
                execute(sql("update_run"), run_values(run))
        for run_id in sorted(self.run_states):
            run = self.run_states[run_id]
            if run.key is None:
                execute(sql("insert_run"), new_run_values(run, self._stamp))
                run.key = 1
        if known:
            execute(
                sql("update_run_states"),
                {
                    "stamp": self._stamp, "many": len(known), "run_ids": [run.txn.run_id for run in known],
                    "next_seqs": [run.txn.next_seq for run in known],
                    "updates_at_us": [run.txn.updated_at_us for run in known],
                    "evidences": [run.txn.evidence.pack() for run in known],
                },
            )  # fmt: skip

    def _write_operations(self) -> None:
        fresh = [record for record, fence in self.operations.values() if not fence]
        known = [record for record, fence in self.operations.values() if fence]
        if fresh:
            self._connection.execute(sql("insert_operations"), operation_arrays(fresh))
        if not known:
            return
        read = [self._read.get(record.operation_id) for record in known]
        versions = [version for version in read if version is not None]
        if len(versions) != len(known):
            msg = "an operation was to be written that this transaction had not read"
            raise InvariantError(msg)
        self._connection.execute(
            sql("update_operations"),
            {
                **operation_arrays(known), "read_attempts": [version.attempt for version in versions],
                "read_fences": [version.fence for version in versions],
                "read_states": [version.state.value for version in versions],
            },
        )  # fmt: skip
