"""The public contract suite, on every store of this package."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

import pytest

from endstop.store.port import Store
from endstop.testing.store_contract import StoreContract, run_contract
from tests.store.kit import NewFiles, memory_store, sqlite_store


class TestMemoryStore(StoreContract):
    def open_store(self) -> Store:
        return memory_store()


class TestSqliteStore(StoreContract):
    files: ClassVar[NewFiles]

    @pytest.fixture(autouse=True)
    def _folder(self, tmp_path: Path) -> None:
        type(self).files = NewFiles(tmp_path)

    def open_store(self) -> Store:
        return self.files()

    def open_again(self, store: Store) -> Store:
        return sqlite_store(Path(store.url.removeprefix("sqlite:///")))


def test_the_suite_runs_without_a_test_runner() -> None:
    passed, left_out = run_contract(memory_store)
    assert len(passed) > 20
    assert left_out == (
        "test_a_store_that_was_closed_opens_with_everything",
        "test_two_that_open_the_same_store_see_one_history",
    )


class Forgetful(StoreContract):
    """A store that loses what a step wrote: the suite must notice."""


def test_the_suite_notices_a_store_that_breaks_its_promise(monkeypatch: pytest.MonkeyPatch) -> None:
    from endstop.store.workspace import Workspace

    kept = Workspace.save

    def forgets_entries(self: Workspace, run: object, now_us: int) -> None:
        run.txn.entries.clear()  # type: ignore[attr-defined]  # a broken store
        kept(self, run, now_us)  # type: ignore[arg-type]  # the same

    monkeypatch.setattr(Workspace, "save", forgets_entries)
    with pytest.raises(AssertionError):
        run_contract(memory_store)
