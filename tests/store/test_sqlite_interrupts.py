"""Signals that arrive in the middle of a commit: nothing is undone that was done, and nothing is left half done."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from endstop.store.futures import done_future, wait_held
from endstop.store.sqlite import SqliteStore
from endstop.testing.store_contract_runs import check_ledger, entries_of
from endstop.testing.store_samples import BreakOff, new_run
from tests.store.kit import Break, add, sqlite_store


@pytest.fixture
def store(tmp_path: Path) -> Iterator[SqliteStore]:
    opened = sqlite_store(tmp_path / "state.db")
    opened.open_run(new_run("a")).result()
    opened.open_run(new_run("b")).result()
    yield opened
    opened.close()


# -- Interrupts


def test_an_interrupt_in_a_step_writes_nothing_and_is_raised(store: SqliteStore) -> None:
    before = entries_of(store)
    held: list[BaseException] = []
    with pytest.raises(KeyboardInterrupt):
        store.transact_now(Break(run_id="a", now_us=1, error=KeyboardInterrupt()), held)
    assert held == []
    assert entries_of(store) == before
    assert store.transact_now(add()) == 1


class Interrupted:
    """A connection whose next COMMIT is interrupted just before, or just after, it is done."""

    def __init__(self, store: SqliteStore, *, after: bool) -> None:
        self._work = store._writer._work
        self._real = self._work._execute
        self._after = after

    def __enter__(self) -> None:
        def execute(sql: str, *values: object) -> object:
            if sql != "COMMIT":
                return self._real(sql, *values)  # type: ignore[arg-type]  # passed on
            if self._after:
                self._real(sql)
            raise KeyboardInterrupt

        self._work._execute = execute  # type: ignore[assignment]  # a fake in its place

    def __exit__(self, *_: object) -> None:
        self._work._execute = self._real


def test_an_interrupt_after_the_commit_gives_the_answer_and_is_held(store: SqliteStore) -> None:
    held: list[BaseException] = []
    with Interrupted(store, after=True):
        assert store.transact_now(add(), held) == 1
    assert [type(signal) for signal in held] == [KeyboardInterrupt]
    with Interrupted(store, after=True), pytest.raises(KeyboardInterrupt):
        store.transact_now(add())
    assert store.transact_now(add()) == 3


def test_an_interrupt_before_the_commit_undoes_the_transaction(store: SqliteStore) -> None:
    held: list[BaseException] = []
    with Interrupted(store, after=False), pytest.raises(KeyboardInterrupt):
        store.transact_now(add(), held)
    assert held == []
    assert store.transact_now(add()) == 1


def test_a_transaction_that_an_interrupt_left_open_is_undone_by_the_next(
    store: SqliteStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second interrupt falls into the undoing of the first."""
    work = store._writer._work
    with monkeypatch.context() as patch:
        patch.setattr(type(work), "rollback", lambda self: (_ for _ in ()).throw(KeyboardInterrupt()))
        with pytest.raises(KeyboardInterrupt):
            store.transact_now(BreakOff(run_id="a", now_us=1))
    assert work.in_transaction
    assert store.transact_now(add()) == 1
    check_ledger(store)


def test_an_interrupt_while_waiting_is_held_until_the_commit(store: SqliteStore) -> None:
    """A real signal reaches the thread that waits for another's batch: the answer comes, then the interrupt."""
    held: list[BaseException] = []
    lead = store._writer._lead
    lead.acquire()
    threading.Timer(0.1, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
    threading.Timer(0.3, lead.release).start()
    assert store.transact_now(add(), held) == 1
    assert [type(found) for found in held] == [KeyboardInterrupt]


def test_an_interrupt_that_nobody_holds_is_raised_after_the_commit(store: SqliteStore) -> None:
    lead = store._writer._lead
    lead.acquire()
    threading.Timer(0.1, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
    threading.Timer(0.3, lead.release).start()
    with pytest.raises(KeyboardInterrupt):
        store.transact_now(add())
    assert store.transact_now(add()) == 2


def test_a_done_future_is_told_at_once() -> None:
    assert wait_held(done_future(lambda: 3), None) == 3
    with pytest.raises(ZeroDivisionError):
        wait_held(done_future(lambda: 1 // 0), [])
