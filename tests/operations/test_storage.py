"""Storage that gives out in the middle of an operation: what was not recorded is not done, or it is in doubt."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import apsw
import pytest

import endstop as es
from endstop.core.transitions import OperationState
from tests.operations.scenes import SPEC, Bank, Place, bury, lost, only, states


@pytest.fixture
def here(tmp_path: Path) -> Iterator[Place]:
    place = Place("sqlite", tmp_path)
    yield place
    place.close()


class Quota:
    """The store's file may not grow, from `fill` until `lift`. Deleted pages are used up first."""

    def __init__(self, guard: es.Guard) -> None:
        self._connection: apsw.Connection = guard.store._writing  # type: ignore[attr-defined]  # the SQLite store's own

    def fill(self) -> None:
        pages = self._connection.execute("PRAGMA page_count").get
        self._connection.execute(f"PRAGMA max_page_count = {pages}")

    def lift(self) -> None:
        self._connection.execute("PRAGMA max_page_count = 1000000")


def fat(order: str) -> dict[str, object]:
    """Arguments that need a page of their own once they are kept for a probe."""
    return {"order": order, "note": "x" * 40_000}


def test_f11_a_disk_that_is_full_at_the_claim_means_that_the_tool_is_not_called(here: Place, bank: Bank) -> None:
    calls = []
    guard = here.open(bank.tool())
    quota = Quota(guard)
    with guard.run(SPEC, run_id="r") as run:
        quota.fill()
        with pytest.raises(es.StoreFullError):
            run.call(lambda **given: calls.append(given), fat("a"), tool="pay")
        assert (calls, states(guard)) == ([], [])
        quota.lift()
        run.call(lambda **given: calls.append(given), fat("a"), tool="pay")
    assert len(calls) == 1


def test_f11_a_disk_that_is_full_at_the_result_leaves_it_in_doubt_and_the_probe_settles_it(
    here: Place, bank: Bank, monkeypatch: pytest.MonkeyPatch
) -> None:
    guard = here.open(bank.tool())
    quota = Quota(guard)

    def pay(order: str) -> object:
        bank.pay(order)
        quota.fill()
        return {"big": "y" * 50_000}

    with guard.run(SPEC, run_id="r") as run, pytest.raises(es.OutcomeUnknownError):
        run.call(pay, {"order": "a"}, tool="pay")
    quota.lift()
    assert states(guard)[0] in (OperationState.EXECUTING, OperationState.UNKNOWN)
    bury(guard, monkeypatch)
    with guard.run(SPEC, run_id="second") as run:
        assert run.call(bank.pay, {"order": "a"}, tool="pay").value == {"paid": "a", "found": True}
    assert list(bank.effects.values()) == [1]


def test_f12_a_database_that_is_deleted_while_it_is_open_lets_nothing_through(
    here: Place, bank: Bank, tmp_path: Path
) -> None:
    guard = here.open(bank.tool())
    with pytest.raises(es.StoreError), guard.run(SPEC, run_id="r") as run:
        (tmp_path / "state.db").unlink()
        run.call(bank.pay, {"order": "a"}, tool="pay")
    assert bank.calls == []
    with pytest.raises(es.StoreError):
        here.open(bank.tool())


def test_f13_an_unknown_schema_lets_nothing_through(here: Place, bank: Bank, tmp_path: Path) -> None:
    here.open(bank.tool()).close()
    connection = apsw.Connection(str(tmp_path / "state.db"))
    connection.execute("UPDATE meta SET value = 1000 WHERE name = 'schema_version'")
    connection.close()
    with pytest.raises(es.SchemaVersionError):
        here.open(bank.tool())


def test_a_store_of_the_first_schema_is_brought_up_to_date_and_keeps_its_operations(
    here: Place, bank: Bank, tmp_path: Path
) -> None:
    guard = here.open(bank.tool(probe=None))
    lost(guard, bank, applied=True)
    guard.close()
    connection = apsw.Connection(str(tmp_path / "state.db"))
    for sql in (
        "DROP INDEX operation_in_doubt", "ALTER TABLE operation DROP COLUMN extra",
        "UPDATE meta SET value = 1 WHERE name = 'schema_version'",
    ):  # fmt: skip
        connection.execute(sql)
    connection.close()
    later = here.open(bank.tool())
    assert (only(later).state, only(later).args, only(later).probe_count) == (OperationState.UNKNOWN, None, 0)
    later.reconcile()
    assert (states(later), bank.asked[0].args) == ([OperationState.COMMITTED], None)


def test_c07_of_many_reconcilers_each_operation_is_asked_for_by_one(here: Place, bank: Bank) -> None:
    guard = here.open(bank.tool())
    for number in range(40):
        lost(guard, bank, applied=True, order=f"o{number}", run_id=f"r{number}")
    guards = [here.open(bank.tool()) for _ in range(4)]
    threads = [threading.Thread(target=item.reconcile) for item in guards]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert set(states(guard)) == {OperationState.COMMITTED}
    asked = [request.operation_id for request in bank.asked]
    assert len(asked) == len(set(asked)) == 40


def test_what_is_in_doubt_is_found_by_its_index_among_many(here: Place, bank: Bank, tmp_path: Path) -> None:
    guard = here.open(bank.tool())
    record = lost(guard, bank, applied=True)
    with guard.run(SPEC, run_id="many") as run:
        for number in range(20):
            run.call(bank.pay, {"order": f"o{number}"}, tool="pay")
    found = guard.operations(states=(OperationState.UNKNOWN, OperationState.MANUAL))
    assert [item.operation_id for item in found] == [record.operation_id]
    from endstop.store.migrations import queries

    connection = apsw.Connection(str(tmp_path / "state.db"))
    plan = connection.execute("EXPLAIN QUERY PLAN " + queries()["operations_in_doubt"], ("[]", 10)).fetchall()
    connection.close()
    assert "operation_in_doubt" in str(plan)
