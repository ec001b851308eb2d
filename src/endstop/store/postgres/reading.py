"""The reads of the PostgreSQL store, each in one read-only transaction that sees one state."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, cast

from endstop.core.codec import envelope_from
from endstop.core.records import EntryRecord
from endstop.core.transitions import FINAL_OPERATION_STATES
from endstop.store.port import LedgerRow, RunQuery, StoredSpec
from endstop.store.postgres.encoding import child_from, control_from, operation_from, run_from, stored_spec_from
from endstop.store.postgres.statements import sql
from endstop.store.rows import bounded, child_view, has_labels, ledger_row, run_view

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Sequence

    import psycopg

    from endstop.core.envelope import Envelope
    from endstop.core.records import ChildRecord, ControlRecord, OperationRecord, RunRecord
    from endstop.core.transitions import OperationState

__all__ = ["Protection", "Reader"]

Row = tuple[object, ...]
Protection = tuple[str, str]
PAGE_ROWS: Final = 200
TRIGGERS: Final = 4
_END_US: Final = 2**63 - 1


class Reader:
    """One read-only transaction on `connection`."""

    def __init__(self, connection: psycopg.Connection) -> None:
        self._connection = connection

    def _rows(self, name: str, **values: object) -> Iterator[Row]:
        return iter(self._connection.execute(sql(name), values))

    def _row(self, name: str, **values: object) -> Row | None:
        return self._connection.execute(sql(name), values).fetchone()

    def _child(self, run_id: str) -> ChildRecord | None:
        row = self._row("child", run_id=run_id)
        return None if row is None else child_from(row)

    def _root(self, run_id: str) -> str:
        child = self._child(run_id)
        return run_id if child is None else child.root_run_id

    # -- runs

    def spec(self, run_id: str) -> StoredSpec | None:
        """The spec written down for a run, or that of a run that has started."""
        row = self._row("spec", run_id=run_id)
        if row is not None:
            return stored_spec_from(row)
        row = self._row("runs_by_id", ids=[self._root(run_id)])
        if row is None:
            return None
        run = run_from(row)
        return StoredSpec(run_id=run_id, spec=run.spec, created_at_us=run.created_at_us)

    def run(self, run_id: str, now_us: int) -> RunRecord | None:
        """One run or child."""
        row = self._row("runs_by_id", ids=[run_id])
        if row is not None:
            return run_view(run_from(row), now_us)
        child = self._child(run_id)
        row = None if child is None else self._row("runs_by_id", ids=[child.root_run_id])
        if child is None or row is None:
            return None
        return child_view(child, run_view(run_from(row), now_us))

    def endings(self, run_ids: Collection[str]) -> dict[str, Envelope]:
        """Of these root runs, those that are over."""
        rows = self._rows("endings", ids=list(run_ids))
        return {str(run_id): envelope_from(str(envelope).encode()) for run_id, envelope in rows}

    def run_key(self, run_id: str) -> bytes | None:
        """The key of a run's digests."""
        row = self._row("run_key", run_id=self._root(run_id))
        return None if row is None else cast("bytes | None", row[0])

    def evidence(self, run_id: str) -> bytes | None:
        """The packed evidence of a run."""
        row = self._row("evidence", run_id=self._root(run_id))
        return None if row is None else cast("str", row[0]).encode()

    def runs(self, query: RunQuery, now_us: int) -> tuple[RunRecord, ...]:
        """Runs, newest first."""
        limit = bounded(query.limit)
        found: list[RunRecord] = []
        for view in self._all(query, now_us):
            if len(found) >= limit:
                break
            if (not query.states or view.state in query.states) and has_labels(view.labels, query.labels):
                found.append(view)
        return tuple(found)

    def _all(self, query: RunQuery, now_us: int) -> Iterator[RunRecord]:
        """Roots, and between them their children where they are asked for, newest first."""
        roots = self._roots(query, now_us)
        if query.roots_only:
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

    def _roots(self, query: RunQuery, now_us: int) -> Iterator[RunRecord]:
        states = [state.value for state in query.states] or None
        before_us, before_id = _END_US, ""
        while True:
            rows = self._rows(
                "runs_newest_first", before_us=before_us, before_id=before_id, states=states, many=PAGE_ROWS
            )
            page = [run_from(row) for row in rows]
            for row in page:
                yield run_view(row, now_us)
            if len(page) < PAGE_ROWS:
                return
            before_us, before_id = page[-1].created_at_us, page[-1].run_id

    def _children(self, now_us: int) -> Iterator[RunRecord]:
        before_us, before_id = _END_US, ""
        while True:
            rows = self._rows("children_newest_first", before_us=before_us, before_id=before_id, many=PAGE_ROWS)
            page = [child_from(row) for row in rows]
            for child in page:
                view = self.run(child.run_id, now_us)
                if view is not None:
                    yield view
            if len(page) < PAGE_ROWS:
                return
            before_us, before_id = page[-1].created_at_us, page[-1].run_id

    # -- operations and orders

    def operations(
        self, run_id: str | None, states: Sequence[OperationState], operation_id: str | None, limit: int
    ) -> tuple[OperationRecord, ...]:
        """Operations, oldest first."""
        bounded(limit)
        chosen = [state.value for state in states] or None
        root = None if run_id is None else self._root(run_id)
        if operation_id is not None:
            found = (operation_from(row) for row in self._rows("operations_by_id", ids=[operation_id]))
            return tuple(
                record for record in found if root in (None, record.run_id) and (not states or record.state in states)
            )[:limit]
        if root is not None:
            rows = self._rows("operations_of_run", run_id=root, states=chosen, many=limit)
        elif chosen is not None and FINAL_OPERATION_STATES.isdisjoint(states):
            rows = self._rows("operations_open", states=chosen, many=limit)
        else:
            rows = self._rows("operations", states=chosen, many=limit)
        return tuple(operation_from(row) for row in rows)

    def controls(self, *, active_only: bool) -> tuple[ControlRecord, ...]:
        """Orders, oldest first."""
        return tuple(control_from(row) for row in self._rows("controls_in_force" if active_only else "controls"))

    # -- the ledger

    def entries(
        self, run_id: str | None, after_index: int, limit: int, *, newest_first: bool
    ) -> tuple[EntryRecord, ...]:
        """Ledger entries by position."""
        values: dict[str, object] = {"after": after_index, "many": bounded(limit)}
        name = "entries"
        if run_id is not None:
            name, values["run_id"] = "entries_of_run", self._root(run_id)
        rows = self._connection.execute(sql(f"{name}_newest_first" if newest_first else name), values)
        return tuple(EntryRecord(index=cast("int", index), leaf=cast("str", leaf).encode()) for index, leaf in rows)

    def ledger_rows(self, run_id: str | None, limit: int) -> tuple[LedgerRow, ...]:
        """Rows of the view, oldest first."""
        bounded(limit)
        if run_id is None:
            rows = self._rows("ledger_rows", many=limit)
        else:
            rows = self._rows("ledger_rows_of_run", run_id=self._root(run_id), many=limit)
        return tuple(ledger_row(cast("str", leaf).encode(), cast("str | None", digest)) for leaf, digest in rows)

    # -- the store itself

    def sizes(self) -> tuple[int, int]:
        """How many entries and root runs there are."""
        return cast("tuple[int, int]", self._row("sizes"))

    def schema_version(self) -> int:
        """The version of the schema as it stands."""
        return cast("int", cast("Row", self._row("store"))[2])

    def protection(self) -> Protection:
        """How the ledger is kept from change, in words, and "ok" or what is wrong with it."""
        always, _ = cast("tuple[int, int]", self._row("triggers"))
        owner, role, owns, may_change = cast("tuple[str, str, bool, bool]", self._row("rights"))
        (misplaced,) = cast("tuple[int]", self._row("misplaced"))
        guards = "append-only in every session" if always == TRIGGERS else f"{TRIGGERS - always} triggers off"
        rights = "may change the ledger" if owns or may_change else "may only append"
        if misplaced:
            verdict = f"{misplaced} of the last positions have a gap or no leaf"
        else:
            verdict = "ok" if always == TRIGGERS else f"{TRIGGERS - always} of the ledger's triggers are off"
        return f"owner {owner}, role {role} {rights}, {guards}", verdict


def _age(view: RunRecord) -> tuple[int, str]:
    return view.created_at_us, view.run_id
