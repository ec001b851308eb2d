"""What a workspace keeps in hand, and the two makers of ledger rows."""

from __future__ import annotations

from pathlib import Path

import pytest

from endstop.errors import RunJoinError, StoreCorruptError, UsageError
from endstop.store import transact, workspace
from endstop.store.rows import bounded, controls_for, has_labels, ledger_row
from endstop.testing.store_contract_runs import check_ledger, order, raises
from endstop.testing.store_samples import AddStep, new_run, reserve, settle
from tests.store.kit import Held, memory_store, sqlite_store


def test_a_workspace_lets_go_of_runs_that_it_has_not_used_for_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also in the middle of a batch: what is not saved yet stays in hand until it is."""
    monkeypatch.setattr(workspace, "RUNS_HELD_MAX", 3)
    store = sqlite_store(tmp_path / "state.db")
    for number in range(6):
        store.open_run(new_run(f"r{number}")).result()
    assert len(store._writer._work._runs) == 3
    for _ in range(2):
        for number in range(6):
            store.transact_now(AddStep(run_id=f"r{number}", now_us=1))
    with Held(store):
        futures = [store.transact(AddStep(run_id=f"r{number % 6}", now_us=1)) for number in range(24)]
    assert [future.result() for future in futures] == [3 + number // 6 for number in range(24)]
    check_ledger(store)
    store.close()


def test_a_workspace_lets_go_of_operations_in_flight(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workspace, "OPERATIONS_HELD_MAX", 2)
    store = sqlite_store(tmp_path / "state.db")
    store.open_run(new_run("a")).result()
    asked = [reserve("a", row) for row in range(5)]
    reserved = [store.transact_now(step) for step in asked]
    assert len(store._writer._work._executing) == 2
    for step, answer in zip(asked, reserved, strict=True):
        assert store.transact_now(settle(step, answer)).accepted
    assert not store._writer._work._executing
    store.close()


def test_orders_have_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transact, "CONTROLS_MAX", 2)
    store = memory_store()
    store.add_control(order("o1")).result()
    store.add_control(order("o2")).result()
    assert "withdraw some first" in str(raises(UsageError, store.add_control(order("o3")).result))
    store.close()


def test_a_run_whose_key_was_destroyed_cannot_be_joined(tmp_path: Path) -> None:
    path = tmp_path / "state.db"
    store = sqlite_store(path)
    store.open_run(new_run("a")).result()
    store._writing.execute("UPDATE run SET run_key = NULL")
    store._writer._work.drop()
    assert store.run_key("a").result() is None
    assert "key of its digests was destroyed" in str(raises(RunJoinError, store.open_run(new_run("a")).result))
    assert store.transact_now(AddStep(run_id="a", now_us=1)) == 1
    store.close()


def test_an_order_needs_every_part_of_it_to_fit() -> None:
    both = order("o1", run_id="a", label="team=x")
    assert controls_for([both], "a", (("team", "x"),)).frozen is not None
    assert controls_for([both], "a", (("team", "y"),)).frozen is None
    assert controls_for([both], "b", (("team", "x"),)).frozen is None
    assert controls_for([order("o1", label="team=x=y")], "a", (("team", "x=y"),)).frozen is not None


def test_labels_are_pairs() -> None:
    assert has_labels((("a", "1"), ("b", "2")), (("b", "2"),))
    assert not has_labels((("a", "1"),), (("a", "2"),))
    assert has_labels((), ())


def test_reads_are_bounded() -> None:
    assert bounded(0) == 0
    assert "read on from the last position" in str(raises(UsageError, lambda: bounded(-1)))


@pytest.mark.parametrize("leaf", [b"no JSON", b"{}", b"[]", b'{"type":"result","run":"a","ts_us":"x"}'])
def test_a_leaf_that_is_no_entry_is_corrupt(leaf: bytes) -> None:
    with pytest.raises(StoreCorruptError):
        ledger_row(leaf, None)
