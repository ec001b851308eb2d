"""Several processes on one SQLite file, and what is left when one of them is killed."""

from __future__ import annotations

import statistics
import time
from pathlib import Path

import pytest

from endstop.core.evidence import Evidence
from endstop.core.reasons import Action, Reason, RunState
from endstop.core.refold import refold
from endstop.core.steps_life import RecoverRun
from endstop.core.transitions import OperationState
from endstop.errors import StoreUnavailableError
from endstop.store.port import RunQuery
from endstop.testing.store_contract_runs import check_ledger, entries_of
from endstop.testing.store_samples import OWNER, AddStep, new_run, reserve, settle
from tests.store.kit import sqlite_store
from tests.store.processes import ended, heard, killed_at_the_end, start, tell
from tests.store.worker import SHARED_STEPS

pytestmark = pytest.mark.slow


def test_eight_processes_that_open_a_new_database_at_once_all_succeed(tmp_path: Path) -> None:
    """The first makes it, the others find it; nobody sees a locked or half-made file."""
    path = tmp_path / "fresh.db"
    workers = [start("opens", path) for _ in range(8)]
    with killed_at_the_end(*workers):
        ledgers = {str(ended(worker)["ledger"]) for worker in workers}
    store = sqlite_store(path)
    assert ledgers == {store.ledger}
    assert len(store.runs(RunQuery()).result()) == 8
    check_ledger(store)
    store.close()


@pytest.mark.parametrize("count", [2, 8])
def test_processes_that_share_a_run_never_read_the_same_count(tmp_path: Path, count: int) -> None:
    """Read, add, write: every number once, whoever asked; the ledger has no gap; no writer starves."""
    path = tmp_path / "shared.db"
    sqlite_store(path).close()
    workers = [start("adds", path, "run", "60") for _ in range(count)]
    with killed_at_the_end(*workers):
        said = [ended(worker) for worker in workers]
    answers = sorted(number for facts in said for number in facts["answers"])  # type: ignore[attr-defined]  # JSON
    assert answers == list(range(1, 60 * count + 1))
    waits_us = [wait for facts in said for wait in facts["waits_us"]]  # type: ignore[attr-defined]  # JSON
    assert max(waits_us) < 5_000_000, f"median {statistics.median(waits_us)} us"
    store = sqlite_store(path)
    check_ledger(store)
    store.close()


def test_processes_of_one_run_share_its_cap_exactly(tmp_path: Path) -> None:
    """`steps_max` calls are let through in all, whoever asked for them."""
    path = tmp_path / "shared.db"
    sqlite_store(path).close()
    workers = [start("asks", path, "run", f"owner-{number}") for number in range(3)]
    with killed_at_the_end(*workers):
        executed = [ended(worker)["executed"] for worker in workers]
    assert sum(executed) == SHARED_STEPS  # type: ignore[arg-type]  # JSON
    store = sqlite_store(path)
    (run,) = store.runs(RunQuery()).result()
    assert (run.state, run.counters.steps) == (RunState.STOPPED, SHARED_STEPS)
    assert run.envelope is not None
    assert run.envelope.terminal_reason is Reason.STEP_CAP
    check_ledger(store)
    store.close()


def test_two_processes_on_one_run_get_one_decision(tmp_path: Path) -> None:
    """B5: both propose the same write at the same moment; one executes it, the other is told that it is under way."""
    path = tmp_path / "shared.db"
    store = sqlite_store(path)
    store.open_run(new_run("run")).result()
    workers = [start("decides", path, "run", f"owner-{number}") for number in range(2)]
    with killed_at_the_end(*workers):
        for worker in workers:
            assert heard(worker) == {"ready": True}
        for worker in workers:
            tell(worker)
        said = sorted(str(heard(worker)["action"]) for worker in workers)
    assert said[1] == Action.EXECUTE
    assert said[0] != Action.EXECUTE
    assert len(store.operations().result()) == 1
    store.close()


def test_a_kill_between_attempt_and_outcome_leaves_the_same_counts(tmp_path: Path) -> None:
    """B4: after kill -9 the counters are those that were acknowledged, folding the ledger gives the stored state, and
    the open write is in doubt for whoever takes over; it is not sent again."""
    path = tmp_path / "killed.db"
    worker = start("reserves", path, "run")
    with killed_at_the_end(worker):
        assert heard(worker) == {"reserved": True}
        worker.kill()
        worker.wait()
    store = sqlite_store(path)
    run = store.run("run").result()
    assert run is not None
    assert run.counters.steps == 2
    assert [call for call, _ in run.in_flight] == ["call-open"]
    packed = store.evidence_of("run").result()
    assert packed is not None
    folded = refold((entry.leaf for entry in entries_of(store, "run")), run.limits)
    assert folded.pack() == Evidence.unpack(packed).pack()
    step = RecoverRun(run_id="run", now_us=run.updated_at_us + 1, dead_owners=frozenset({OWNER}))
    recovered = store.transact_now(step)
    assert recovered.lost_calls == ("call-open",)
    (doubt,) = store.operations(states=(OperationState.UNKNOWN,)).result()
    assert (doubt.operation_id,) == recovered.in_doubt
    store.open_run(new_run("next")).result()
    assert store.transact_now(reserve("next", "open")).verdict.action is not Action.EXECUTE
    assert store.transact_now(reserve("next", "done")).verdict.action is Action.REPLAY
    check_ledger(store)
    store.close()


@pytest.mark.parametrize("after", [1, 4, 9])
def test_a_kill_in_mid_stream_loses_nothing_that_was_acknowledged(tmp_path: Path, after: int) -> None:
    """kill -9 of a writer: every acknowledged step is there, the ledger has no gap, and another writer goes on."""
    path = tmp_path / "killed.db"
    worker = start("streams", path, "run")
    acknowledged = 0
    with killed_at_the_end(worker):
        for _ in range(after):
            acknowledged = int(str(heard(worker)["acknowledged"]))
        worker.kill()
        rest, _ = worker.communicate()
        for line in rest.splitlines():
            if line.endswith("}"):
                acknowledged = int(line.split(":")[1].rstrip("}"))
    store = sqlite_store(path)
    check_ledger(store)
    run = store.run("run").result()
    assert run is not None
    assert run.counters.steps >= acknowledged > 0
    assert run.entries == run.counters.steps + 1
    assert store.transact_now(AddStep(run_id="run", now_us=1)) == run.counters.steps + 1
    assert store.facts().result().integrity == "ok"
    store.close()


def test_a_lock_that_another_process_keeps_gives_a_bounded_error(tmp_path: Path) -> None:
    """The step fails with StoreUnavailableError in time and writes nothing; when the holder dies, all goes on."""
    path = tmp_path / "held.db"
    store = sqlite_store(path, wait_ms_max=150)
    store.open_run(new_run("a")).result()
    worker = start("holds", path)
    with killed_at_the_end(worker):
        assert heard(worker) == {"held": True}
        started = time.monotonic()
        with pytest.raises(StoreUnavailableError, match="held by other processes for 150 ms"):
            store.transact_now(AddStep(run_id="a", now_us=1))
        with pytest.raises(StoreUnavailableError):
            store.transact(AddStep(run_id="a", now_us=1)).result()
        assert time.monotonic() - started < 5
        tell(worker)
        assert heard(worker) == {"held": False}
        assert store.transact_now(AddStep(run_id="a", now_us=1)) == 1
    store.close()


def test_the_death_of_a_holder_frees_the_lock(tmp_path: Path) -> None:
    path = tmp_path / "held.db"
    store = sqlite_store(path)
    store.open_run(new_run("a")).result()
    worker = start("holds", path)
    with killed_at_the_end(worker):
        assert heard(worker) == {"held": True}
        waiting = store.transact(AddStep(run_id="a", now_us=1))
        worker.kill()
        assert waiting.result(30) == 1
    store.close()


def test_what_was_queued_is_written_when_the_interpreter_ends(tmp_path: Path) -> None:
    path = tmp_path / "exit.db"
    worker = start("leaves_at_exit", path)
    with killed_at_the_end(worker):
        assert ended(worker) == {"queued": True}
    store = sqlite_store(path)
    assert store.transact_now(AddStep(run_id="a", now_us=1)) == 51
    store.close()


def test_a_forked_child_must_open_the_store_again(tmp_path: Path) -> None:
    """The inherited store refuses every use; one that the child opens shares the file; the parent's goes on."""
    worker = start("forks", tmp_path / "forked.db")
    with killed_at_the_end(worker):
        child = heard(worker)
        assert child == {"refused": 5, "count": 2}
        assert ended(worker) == {"count": 3}


def test_a_call_settled_by_another_process_is_answered_from_the_ledger(tmp_path: Path) -> None:
    """What this process holds in memory is dropped as soon as somebody else commits."""
    path = tmp_path / "shared.db"
    store = sqlite_store(path)
    store.open_run(new_run("run")).result()
    store.transact_now(AddStep(run_id="run", now_us=1))
    worker = start("adds", path, "run", "3")
    with killed_at_the_end(worker):
        assert ended(worker)["answers"] == [2, 3, 4]
    assert store.transact_now(AddStep(run_id="run", now_us=1)) == 5
    asked = reserve("run", 1)
    assert store.transact_now(settle(asked, store.transact_now(asked))).accepted
    store.close()
