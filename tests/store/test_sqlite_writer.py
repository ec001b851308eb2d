"""The writer: batches, failures inside them, interrupts, and commits of which nobody knows."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, fields, replace
from pathlib import Path

import apsw
import pytest

from endstop.core.events import Proposal
from endstop.core.reasons import Effect
from endstop.core.records import OperationRecord, RunTransaction
from endstop.core.steps import Step
from endstop.core.steps_turn import ReserveChild
from endstop.core.transitions import OperationState
from endstop.errors import (
    CommitUnknownError,
    GuardClosedError,
    InvariantError,
    StoreCorruptError,
    StoreFullError,
    StoreUnavailableError,
    UsageError,
)
from endstop.store.futures import LoopFuture
from endstop.store.port import RunQuery
from endstop.store.sqlite import SqliteStore, reading, writer
from endstop.store.sqlite import store as store_module
from endstop.store.sqlite.encoding import is_settlement, outcome_values
from endstop.store.sqlite.faults import commit_fault, store_fault
from endstop.testing.store_contract_runs import check_ledger, entries_of
from endstop.testing.store_samples import POLICY, AddStep, BreakOff, WriteOperation, new_run, operation
from tests.store.kit import Break, Held, add, sqlite_store


@pytest.fixture
def store(tmp_path: Path) -> Iterator[SqliteStore]:
    opened = sqlite_store(tmp_path / "state.db")
    opened.open_run(new_run("a")).result()
    opened.open_run(new_run("b")).result()
    yield opened
    opened.close()


def test_what_gathers_is_committed_at_once(store: SqliteStore) -> None:
    before = store._writer.commits
    with Held(store):
        futures = [store.transact(add("ab"[number % 2])) for number in range(101)]
    assert [future.result() for future in futures] == [number // 2 + 1 for number in range(101)]
    assert store._writer.commits == before + 1
    check_ledger(store)


def test_a_batch_has_a_limit(store: SqliteStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer, "BATCH_MAX", 10)
    before = store._writer.commits
    with Held(store):
        futures = [store.transact(add()) for _ in range(25)]
    assert [future.result() for future in futures] == list(range(1, 26))
    assert store._writer.commits == before + 3


def test_a_step_that_fails_before_it_left_anything_does_not_undo_its_batch(store: SqliteStore) -> None:
    before = store._writer.commits
    with Held(store):
        first = store.transact(add("a"))
        lost = store.transact(AddStep(run_id="nobody", now_us=1))
        last = store.transact(add("b"))
    assert (first.result(), last.result()) == (1, 1)
    assert isinstance(lost.exception(), UsageError)
    assert store._writer.commits == before + 1


def test_a_step_that_fails_on_a_changed_run_undoes_the_batch_and_each_runs_alone(store: SqliteStore) -> None:
    """The failing step spoilt the working copy that an earlier one of the same transaction had changed."""
    before = store._writer.commits
    with Held(store):
        futures: list[Future[int] | Future[None]] = [
            store.transact(add("a")), store.transact(BreakOff(run_id="a", now_us=1)), store.transact(add("a")),
            store.transact(add("b")),
        ]  # fmt: skip
    assert [futures[0].result(), futures[2].result(), futures[3].result()] == [1, 2, 1]
    assert isinstance(futures[1].exception(), UsageError)
    assert store._writer.commits == before + 3
    check_ledger(store)


def test_a_stale_fence_in_a_batch_fails_its_own_step_alone(store: SqliteStore) -> None:
    record = operation("op", "a")
    with Held(store):
        futures: list[Future[int] | Future[None]] = [
            store.transact(WriteOperation(run_id="a", now_us=1, record=record, expected_fence=0)),
            store.transact(WriteOperation(run_id="b", now_us=1, record=record, expected_fence=0)),
            store.transact(add("b")),
        ]
    assert futures[0].exception() is None
    assert isinstance(futures[1].exception(), StoreUnavailableError)
    assert futures[2].result() == 1
    check_ledger(store)


def test_an_operation_that_a_batch_changes_twice_is_written_once(store: SqliteStore) -> None:
    with Held(store):
        futures = [
            store.transact(
                WriteOperation(
                    run_id="a", now_us=1, record=operation("op", "ab"[fence % 2], fence=fence), expected_fence=fence - 1
                )
            )
            for fence in (1, 2, 3)
        ]
        look = store.transact(Look(run_id="b", now_us=1))
        look_a = store.transact(Look(run_id="a", now_us=1))
    assert [future.exception() for future in futures] == [None, None, None]
    assert look.result() == ["op 3"]
    assert look_a.result() == []
    (found,) = store.operations().result()
    assert (found.fence, found.run_id) == (3, "b")


@dataclass(frozen=True, slots=True, kw_only=True)
class Look(Step[list[str]]):
    def apply(self, txn: RunTransaction) -> list[str]:
        return [f"{record.operation_id} {record.fence}" for record in txn.load_operations()]


def test_a_bug_in_a_step_reaches_its_caller_and_writes_nothing(store: SqliteStore) -> None:
    before = entries_of(store)
    with pytest.raises(InvariantError):
        store.transact_now(Break(run_id="a", now_us=1, error=InvariantError("a bug")))
    with pytest.raises(ZeroDivisionError):
        store.transact(Break(run_id="a", now_us=1, error=ZeroDivisionError())).result()
    assert entries_of(store) == before
    assert store.transact_now(add()) == 1


# -- Faults


class Failing:
    """A connection on which one statement fails, once or for good."""

    def __init__(self, store: SqliteStore, starts: str, error: Exception, *, times: int = 1) -> None:
        self._work = store._writer._work
        self._real = self._work._execute
        self._starts, self._error, self._times = starts, error, times

    def __enter__(self) -> None:
        def execute(sql: str, *values: object) -> object:
            if sql.startswith(self._starts) and self._times:
                self._times -= 1
                raise self._error
            return self._real(sql, *values)  # type: ignore[arg-type]  # passed on

        self._work._execute = execute  # type: ignore[assignment]  # a fake in its place

    def __exit__(self, *_: object) -> None:
        self._work._execute = self._real


def test_a_commit_that_failed_on_the_disk_is_unknown(store: SqliteStore) -> None:
    """After an I/O error in COMMIT nobody knows; a full disk or a lock is known to have written nothing."""
    with Failing(store, "COMMIT", apsw.IOError("disk")), pytest.raises(CommitUnknownError, match="read the records"):
        store.transact_now(add())
    with Failing(store, "COMMIT", apsw.FullError("full")), pytest.raises(StoreFullError):
        store.transact(add()).result()
    with Failing(store, "COMMIT", apsw.BusyError("busy")), pytest.raises(StoreUnavailableError):
        store.transact_now(add())
    assert store.transact_now(add()) == 1


def test_a_commit_that_failed_for_a_batch_fails_for_each(store: SqliteStore) -> None:
    with Failing(store, "COMMIT", apsw.IOError("disk")):
        with Held(store):
            futures = [store.transact(add()) for _ in range(3)]
        assert [type(future.exception()) for future in futures] == [CommitUnknownError] * 3
    assert store.transact_now(add()) == 1


def test_a_begin_that_is_busy_fails_in_time(store: SqliteStore) -> None:
    with Failing(store, "BEGIN", apsw.BusyError("busy")), pytest.raises(StoreUnavailableError, match="holds the store"):
        store.transact_now(add())
    with Failing(store, "BEGIN", apsw.BusyError("busy"), times=5):
        with Held(store):
            futures = [store.transact(add()) for _ in range(3)]
        assert {type(future.exception()) for future in futures} == {StoreUnavailableError}
    assert store.transact_now(add()) == 1


def test_a_write_that_fails_for_a_batch_is_tried_alone(store: SqliteStore) -> None:
    with Failing(store, "INSERT INTO entry", apsw.IOError("once")):
        with Held(store):
            futures = [store.transact(add("ab"[number % 2])) for number in range(4)]
        assert [future.result() for future in futures] == [1, 1, 2, 2]
    check_ledger(store)


def test_a_fence_that_went_back_behind_the_transaction_is_a_bug_that_writes_nothing(
    store: SqliteStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The table's own check stands behind that of the step."""
    step = WriteOperation(run_id="a", now_us=1, record=operation("op", "a", fence=5), expected_fence=0)
    store.transact_now(step)
    monkeypatch.setattr("endstop.store.transact._check_fences", lambda *_: None)
    before = entries_of(store)
    with pytest.raises(InvariantError, match="at their fence"):
        store.transact_now(WriteOperation(run_id="a", now_us=1, record=operation("op", "a", fence=3), expected_fence=2))
    assert entries_of(store) == before


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (apsw.FullError("x"), StoreFullError),
        (apsw.TooBigError("x"), StoreFullError),
        (apsw.CorruptError("x"), StoreCorruptError),
        (apsw.NotADBError("x"), StoreCorruptError),
        (apsw.ConstraintError("x"), StoreCorruptError),
        (apsw.BusyError("x"), StoreUnavailableError),
        (apsw.LockedError("x"), StoreUnavailableError),
        (apsw.ReadOnlyError("x"), StoreUnavailableError),
        (apsw.CantOpenError("x"), StoreUnavailableError),
        (apsw.IOError("x"), StoreUnavailableError),
        (OSError("x"), StoreUnavailableError),
    ],
)
def test_every_fault_has_its_name(error: Exception, kind: type[Exception]) -> None:
    found = store_fault(error, "do something")
    assert type(found) is kind
    assert str(found).startswith("do something: ")
    known = kind is not StoreUnavailableError or isinstance(error, apsw.BusyError | apsw.LockedError)
    if isinstance(error, apsw.CorruptError | apsw.NotADBError | OSError):
        known = False  # a commit that met these may have come through
    assert type(commit_fault(error)) is (kind if known else CommitUnknownError)


# -- Event loops, closing


def test_a_loop_that_is_gone_disturbs_nobody(store: SqliteStore) -> None:
    """A batch with a coroutine whose loop was closed meanwhile still tells the others."""
    lead = store._writer._lead
    lead.acquire()

    async def ask() -> LoopFuture[int]:
        future = store.transact_async(add())
        assert isinstance(future, LoopFuture)
        return future

    left = asyncio.run(_given(ask))
    other = store.transact(add())
    lead.release()
    assert other.result() == 2
    assert not left[0].done()


async def _given(ask: Callable[[], object]) -> list[LoopFuture[int]]:
    return [await ask()]  # type: ignore[misc]  # a coroutine function


def test_a_busy_synchronous_caller_does_not_starve_the_queue(store: SqliteStore) -> None:
    """One that leads again and again joins the queue as soon as the writer's thread wants the lead."""
    done = threading.Event()
    led = []

    def hurry() -> None:
        while not done.is_set():
            led.append(store.transact_now(add("b")))

    thread = threading.Thread(target=hurry)
    thread.start()
    try:
        for number in range(1, 21):
            before = len(led)
            assert store.transact(add("a")).result(30) == number
            assert len(led) - before < 200
    finally:
        done.set()
        thread.join()


def test_whoever_could_lead_queues_behind_the_waiting_thread(store: SqliteStore) -> None:
    store._writer._next = True
    before = store._writer._thread
    assert store.transact_now(add()) == 1
    assert store._writer._thread is not None
    assert before in (None, store._writer._thread)
    assert store._writer._next is False


def test_a_read_that_was_interrupted_leaves_no_transaction(store: SqliteStore) -> None:
    store._reader._connection.execute("BEGIN")
    store.transact_now(add())
    run = store.run("a").result()
    assert run is not None
    assert run.counters.steps == 1
    assert not store._reader._connection.in_transaction


def test_a_settlement_changes_only_what_its_statement_writes() -> None:
    """A new field of the record must be put on one side or the other."""
    before = operation("op", "a")
    written = {"state", "settled_at_us", "not_before_us", "outcome", "result_kind", "result", "result_digest", "reason"}
    for item in fields(OperationRecord):
        if item.name in written or item.name == "operation_id":
            continue
        other = replace(before, **{item.name: "other" if isinstance(getattr(before, item.name), str) else 77})
        assert not is_settlement(before, other), item.name
    after = replace(before, state=OperationState.COMMITTED, settled_at_us=1, not_before_us=2, outcome="applied",
                    result_kind="inline", result=b"x", result_digest="y", reason="z")  # fmt: skip
    assert is_settlement(before, after)
    assert len(outcome_values(after)) == len(written) + 2


def test_an_owner_that_changed_at_the_same_fence_is_written_in_full(store: SqliteStore) -> None:
    """The short way of a settlement is taken only for what it writes."""
    first = operation("op", "a")
    second = replace(first, owner_id="owner-2", reason="moved")
    store.transact_now(WriteOperation(run_id="a", now_us=1, record=first, expected_fence=0))
    store.transact_now(WriteOperation(run_id="a", now_us=1, record=second, expected_fence=1))
    assert store.operations().result() == (second,)
    third = replace(second, state=OperationState.COMMITTED, outcome="applied", settled_at_us=5)
    store.transact_now(WriteOperation(run_id="a", now_us=1, record=third, expected_fence=1))
    assert store.operations().result() == (third,)


def test_a_cancelled_request_is_left_out_of_its_batch(store: SqliteStore) -> None:
    with Held(store):
        futures = [store.transact(add()) for _ in range(3)]
        assert futures[1].cancel()
    assert (futures[0].result(), futures[2].result()) == (1, 2)
    with Held(store):
        only = store.transact(add())
        assert only.cancel() or only.running()
    assert store.transact_now(add()) in (3, 4)


def test_closing_waits_for_whoever_leads(store: SqliteStore) -> None:
    with Held(store):
        future = store.transact(add())
        closer = threading.Thread(target=store.close)
        closer.start()
    closer.join(30)
    assert future.result() == 1
    with pytest.raises(GuardClosedError):
        store._writer.submit(lambda work, argument: None, None)
    with pytest.raises(GuardClosedError):
        store._writer.run_now(lambda work, argument: None, None)


# -- Another process's copy, and the interpreter's end


def test_a_copy_of_a_store_in_another_process_is_refused(store: SqliteStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a fork leaves: the same object under another process id."""
    with monkeypatch.context() as patch:
        patch.setattr(os, "getpid", lambda: -1)
        calls: list[Callable[[], object]] = [
            lambda: store.transact(add()), lambda: store.transact_now(add()), lambda: store.transact_async(add()),
            lambda: store.open_run(new_run("c")), lambda: store.run("a"), store.change_counter,
        ]  # fmt: skip
        for call in calls:
            with pytest.raises(GuardClosedError, match="open it again in the child"):
                call()
        store.close()  # does nothing: the files are the parent's
    assert store.transact_now(add()) == 1


def test_a_forked_child_closes_its_copies_of_the_lock_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_module, "_OPEN", set())
    monkeypatch.setattr(store_module, "_LEFT", [])
    path = tmp_path / "state.db"
    parent, other = sqlite_store(path), sqlite_store(path, wait_ms_max=100)
    store_module._OPEN.discard(other)
    parent._turnstile.enter()
    store_module._leave_all()
    assert [parent] == store_module._LEFT
    other._turnstile.enter()
    other._turnstile.leave()
    parent.close()
    other.close()


def test_every_open_store_is_closed_at_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_module, "_OPEN", set())
    left = sqlite_store(tmp_path / "state.db")
    left.open_run(new_run("a")).result()
    futures = [left.transact(add()) for _ in range(5)]
    store_module._close_all()
    assert [future.result(0) for future in futures] == [1, 2, 3, 4, 5]
    with pytest.raises(GuardClosedError):
        left.transact(add())


@dataclass(frozen=True, slots=True, kw_only=True)
class WriteTwice(Step[None]):
    def apply(self, txn: RunTransaction) -> None:
        txn.put_operation(operation("op", txn.run_id, fence=1), 0)
        txn.put_operation(operation("op", txn.run_id, fence=2), 1)


def test_a_step_may_write_an_operation_twice(store: SqliteStore) -> None:
    store.transact_now(WriteTwice(run_id="a", now_us=1))
    (found,) = store.operations().result()
    assert found.fence == 2


def test_long_lists_are_read_in_pages(store: SqliteStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "PAGE_ROWS", 2)
    for number in range(5):
        store.open_run(new_run(f"root-{number}", now_us=number)).result()
    for number in range(5):
        proposal = Proposal(tool="child", effect=Effect.UNKNOWN, fingerprint="f", call_id="c", agent="helper")
        store.transact(
            ReserveChild(
                run_id="root-0", now_us=number, policy=POLICY, proposal=proposal, child_run_id=f"kid-{number}",
                parent_run_id="root-0", depth=1,
            )
        ).result()  # fmt: skip
    found = store.runs(RunQuery(roots_only=False)).result()
    listed = [run.run_id for run in found if run.run_id not in "ab"]
    assert listed == [name for number in range(4, -1, -1) for name in (f"root-{number}", f"kid-{number}")]
    assert len(store.runs(RunQuery(roots_only=False, limit=6)).result()) == 6
