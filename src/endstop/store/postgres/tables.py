"""The workspace of the PostgreSQL store: what one transaction reads, holds and writes.

Order of locks, the same for everybody, so that no two transactions wait for each other: the gate (shared for steps,
exclusive for an operator's order), the names of runs that may be made, the rows of runs by their id, then operations by
theirs. A run's row stays held until the commit; whoever holds it is the only one who works on that run. Operations are
written over exactly the version that was read, for they may belong to several runs.

A process is mostly the only one that works on its runs, and then has the newest version of them in hand. So a batch is
first done on what is in hand (`assume`) and sent in one exchange that takes the same locks, checks that all of it is
the newest, and writes (`commit_assumed`). Steps are pure: when something is another by now, nothing has happened, and
the batch is done again on what was read under the locks (`begin`, `commit`).
"""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING, Final, cast

import orjson
import psycopg

from endstop.core.transitions import OperationState
from endstop.errors import InvariantError, UsageError
from endstop.store.postgres.encoding import (
    child_from,
    child_values,
    control_from,
    control_values,
    new_run_values,
    operation_from,
    operation_values,
    run_from,
    run_values,
    spec_values,
    state_values,
    stored_spec_from,
)  # fmt: skip
from endstop.store.postgres.faults import StaleError
from endstop.store.postgres.statements import settings, sql
from endstop.store.workspace import OPERATIONS_HELD_MAX, RUNS_HELD_MAX, LiveRun, Workspace

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from endstop.core.records import ChildRecord, ControlRecord, OperationRecord
    from endstop.store.port import StoredSpec
    from endstop.store.postgres.encoding import Values
    from endstop.store.postgres.plan import Plan
    from endstop.store.rows import RunRow

__all__ = ["PostgresWorkspace", "UnreadError"]

CHILDREN_KNOWN_MAX: Final = 4_096
STAMP_BYTES: Final = 16
OPERATIONS_OF_RUN_MAX: Final = 1_000_000

_Begun = tuple[dict[str, str] | None, int, int, list[list[object]] | None]


class UnreadError(Exception):
    """Inside the store only: what was assumed is not enough, something must be read. Nothing was sent."""


class PostgresWorkspace(Workspace):
    """The tables behind the connection of one transaction, and what stands to be written into them."""

    def __init__(self, ledger: str, *, new_key: Callable[[], bytes], lease_ms: int) -> None:
        super().__init__(ledger)
        self._new_key = new_key
        self._lease_ms = lease_ms
        self._open: psycopg.Connection | None = None
        self._stamp = ""
        self._owners: frozenset[str] = frozenset()
        # -- valid across transactions: versions of the runs in hand, calls of theirs that are under way, the orders
        # -- in force, children (they never change)
        self._stamps: dict[str, str] = {}
        self._under_way: OrderedDict[str, OperationRecord] = OrderedDict()
        self._controls_version: tuple[int, int] | None = None
        self._known_children: OrderedDict[str, ChildRecord] = OrderedDict()
        # -- of this transaction alone
        self._held: set[str] = set()  # runs whose row is held, and ids that are no run
        self._stored: set[str] = set()  # runs whose row is held
        self._rows: dict[str, RunRow] = {}
        self._read: dict[str, OperationRecord | None] = {}

    # -- the transaction, in two exchanges

    def begin(self, connection: psycopg.Connection, plan: Plan) -> None:
        """Open the transaction, take its locks and read what it needs, in one exchange with the server."""
        self._start(plan)
        self._open = connection
        self._read = dict.fromkeys(plan.operation_ids)
        asked = {"names": plan.names, "runs": plan.run_ids, "operations": plan.operation_ids}
        begun = psycopg.ClientCursor(connection)
        begun.execute(sql("begin_batch"), {**settings(), "alone": plan.alone, "asked": _json(asked)})
        begun.nextset()
        held, last, many, operations = cast("_Begun", begun.fetchone())
        if (last, many) != self._controls_version:
            self._standing = None
            self._controls_version = (last, many)
        for row in operations or ():
            record = operation_from(row)
            self._read[record.operation_id] = record
        self._take(plan.run_ids, held or {})

    def commit(self, writer_id: str, batch_no: int) -> None:
        """Write what was collected, if anything was, and make it durable, in one exchange.

        Raises what the server said, or the driver's error when nobody said anything: then it may have been committed.
        """
        if not self.writes:
            self._connection.execute(b"COMMIT")
            self._open = None
            return
        saved = psycopg.ClientCursor(self._connection)
        saved.execute(sql("save_batch"), self._values(writer_id, batch_no))
        saved.nextset()
        if saved.statusmessage != "COMMIT":
            msg = f"the server answered {saved.statusmessage} to COMMIT"
            raise StaleError(msg)
        self.flush()

    # -- the transaction, in one exchange

    def assume(self, plan: Plan) -> bool:
        """Begin on what is in hand; False when that cannot be enough. `commit_assumed` checks it all."""
        if plan.alone or plan.names or plan.owners or self._controls_version is None or self._standing is None:
            return False
        children = self._known_children
        roots = {children[run_id].root_run_id if run_id in children else run_id for run_id in plan.run_ids}
        if not all(run_id in self._runs and run_id in self._stamps for run_id in roots):
            return False
        self._start(plan)
        self._open = None
        self._held.update(plan.run_ids, roots)
        self._stored.update(roots)
        self._read = {name: self._under_way.get(name) for name in plan.operation_ids}
        for run_id in roots:
            self._runs.move_to_end(run_id)
        return True

    @property
    def checks_itself(self) -> bool:
        """Whether the write of what was collected checks all that was assumed."""
        return self.writes > 0 and all(name in self.operations for name in self._read)

    def commit_assumed(self, connection: psycopg.Connection, writer_id: str, batch_no: int) -> None:
        """Check and write in one exchange."""
        last, many = cast("tuple[int, int]", self._controls_version)
        # A run that is written is locked and checked by its own write.
        stamps = {run_id: self._stamps[run_id] for run_id in self._stored if run_id not in self.run_states}
        asked = {"runs": list(stamps), "stamps": stamps, "controls_last": last, "controls_many": many}
        values = {**self._values(writer_id, batch_no, read=self._stamps), **settings(), "asked": _json(asked)}
        connection.execute(sql("commit_batch"), values)
        self.flush()

    # -- parts of both

    def _start(self, plan: Plan) -> None:
        self._stamp = self._new_key()[:STAMP_BYTES].hex()
        self._owners = plan.owners
        self._next_index = self._next_global_seq = None
        self._executing.clear()
        self._held.clear()
        self._stored.clear()
        self._rows.clear()

    def _write(self) -> None:
        """What was collected is in the database: keep what the next transaction may build on."""
        for run_id, run in self.run_states.items():
            run.key = 1
            self._stamps[run_id] = self._stamp
        for operation_id, (record, _) in self.operations.items():
            if record.state is OperationState.EXECUTING:
                self._under_way[operation_id] = record
            else:
                self._under_way.pop(operation_id, None)
        while len(self._under_way) > OPERATIONS_HELD_MAX:
            self._under_way.popitem(last=False)
        self._open = None

    def revert(self) -> None:
        """Forget what this transaction collected, and the runs that it touched: it was undone."""
        if self.controls_added or self.controls_withdrawn:
            self._standing = self._controls_version = None
        for operation_id in self._read:
            self._under_way.pop(operation_id, None)
        for run_id in (*self._held, *self.run_states):
            self._runs.pop(run_id, None)
            self._stamps.pop(run_id, None)
        self._clear()
        self._open = None

    def drop(self) -> None:
        """Forget everything: nobody knows what became of the transaction."""
        super().drop()
        self._stamps.clear()
        self._under_way.clear()
        self._controls_version = None
        self._open = None

    @property
    def _connection(self) -> psycopg.Connection:
        if self._open is None:
            raise UnreadError
        return self._open

    # -- runs

    def live(self, run_id: str) -> LiveRun | None:
        """The root run of that id, held until the transaction ends."""
        if run_id not in self._held and run_id not in self.run_states:
            rows = self._connection.execute(sql("hold_runs"), {"ids": [run_id]}).fetchall()
            self._take((run_id,), dict(cast("list[tuple[str, str]]", rows)))
        return super().live(run_id)

    def _take(self, asked: Sequence[str], held: Mapping[str, str]) -> None:
        """Sort the runs whose rows are held now: the copy in hand is the newest one, or the row is read."""
        self._held.update(asked)
        old = []
        for run_id, stamp in held.items():
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

    # -- what is sent

    def _values(self, writer_id: str, batch_no: int, *, read: Mapping[str, str] | None = None) -> Values:
        """The batch as a statement takes it; `read` are the versions of runs that are to be checked, by their ids."""
        batch: dict[str, object] = {name: rows for name, rows in self._collected(read).items() if rows}
        if self._owners:
            batch["workers"], batch["lease_ms"] = sorted(self._owners), self._lease_ms
        return {"writer_id": writer_id, "batch_no": batch_no, "stamp": self._stamp, "batch": _json(batch)}

    def _collected(self, read: Mapping[str, str] | None) -> dict[str, list[Values]]:
        """What stands to be written, by the names that `endstop.save_batch` knows."""
        states, operations = self.run_states, self.operations.values()
        known = [states[run_id] for run_id in sorted(states) if states[run_id].key is not None]
        return {
            "new_runs": [new_run_values(run) for run in states.values() if run.key is None],
            "runs": [run_values(run) for run in self.run_rows.values() if run.key is not None],
            "states": [state_values(run, None if read is None else read[run.txn.run_id]) for run in known],
            "children": [child_values(child) for child in self.children.values()],
            "new_operations": [operation_values(record, None) for record, fence in operations if not fence],
            "operations": [operation_values(record, self._version_of(record)) for record, fence in operations if fence],
            "leaves": self._leaves(),
            "specs": [spec_values(stored) for stored in self.specs.values()],
            "new_controls": [control_values(control) for control in self.controls_added],
            "withdrawn": [{"control_id": name, "at_us": at_us} for at_us, name in self.controls_withdrawn],
        }

    def _leaves(self) -> list[Values]:
        leaves: list[Values] = [{"leaf": leaf} for _, leaf in self.entries]
        for index, value in self.input_digests:
            leaves[index]["hash"] = value
        return leaves

    def _version_of(self, record: OperationRecord) -> OperationRecord:
        read = self._read.get(record.operation_id)
        if read is None:
            msg = f"operation {record.operation_id} was to be written over a version that this transaction had not read"
            raise InvariantError(msg)
        return read


def _json(value: object) -> str:
    """Text for a statement. Raises UsageError for text that is none."""
    try:
        return orjson.dumps(value).decode()
    except orjson.JSONEncodeError as error:
        msg = "a name or text has characters that cannot be kept: nothing was written"
        raise UsageError(msg) from error
