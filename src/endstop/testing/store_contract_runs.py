"""The first half of the store contract: runs, steps and operations. See `endstop.testing.store_contract`."""

from __future__ import annotations

import asyncio
import threading
import unittest
from collections import Counter
from concurrent.futures import CancelledError, Future, wait
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Final

import orjson

from endstop.core.events import Proposal
from endstop.core.model import Spec
from endstop.core.reasons import Action, Effect, Reason, RunState
from endstop.core.records import ControlRecord
from endstop.core.steps_life import CompleteRun, EndRun, LeaveRun, ResumeRun, SaveCheckpoint
from endstop.core.steps_turn import ReserveChild
from endstop.core.transitions import OperationState
from endstop.errors import RunJoinError, RunNotFoundError, StoreUnavailableError, UsageError
from endstop.store.port import ROWS_MAX, RunQuery, StoredSpec
from endstop.testing.store_samples import (
    OWNER,
    POLICY,
    RUN_KEY,
    SPEC,
    START_US,
    AddStep,
    BreakOff,
    SeeControls,
    SeeOperation,
    WriteOperation,
    new_run,
    operation,
    reserve,
    sample_policy,
    settle,
)  # fmt: skip

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from endstop.core.records import EntryRecord, RunRecord
    from endstop.store.port import Store

__all__ = ["RunContract", "StoreTests", "check_ledger", "entries_of", "in_threads", "order", "raises", "stored_run"]

OTHER_SPEC: Final = Spec(what_it_does="Something else.", what_it_does_not="Nothing else.", done_looks_like="Done.")
WAIT_S_MAX: Final = 60
THREADS: Final = 100
STEPS_MAX: Final = 20


def raises(kind: type[BaseException], call: Callable[[], object]) -> BaseException:
    """The exception of `kind` that `call` raises; AssertionError when it raises none."""
    try:
        call()
    except kind as error:
        return error
    msg = f"{kind.__name__} was not raised"
    raise AssertionError(msg)


def in_threads(count: int, work: Callable[[int], None]) -> None:
    """Run `work(0)` … `work(count - 1)`, each in a thread of its own, all at once; raise the first error."""
    barrier, errors = threading.Barrier(count), []

    def run(number: int) -> None:
        try:
            barrier.wait(WAIT_S_MAX)
            work(number)
        except BaseException as error:  # raised again below
            errors.append(error)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S_MAX)
    if errors:
        raise errors[0]


def entries_of(store: Store, run_id: str | None = None) -> tuple[EntryRecord, ...]:
    """All entries, or those of a run."""
    return store.entries(run_id=run_id, limit=ROWS_MAX).result()


def check_ledger(store: Store) -> None:
    """Positions are 0, 1, 2, …, and so are the numbers of each run."""
    entries = entries_of(store)
    assert [entry.index for entry in entries] == list(range(len(entries)))
    numbers: Counter[str] = Counter()
    for entry in entries:
        body = orjson.loads(entry.leaf)
        assert body["ledger"] == store.ledger
        assert body["seq"] == numbers[body["run"]], f"run {body['run']} has a gap"
        numbers[body["run"]] += 1


def stored_run(store: Store, run_id: str) -> RunRecord:
    """A run that must be there, less its running time, which goes on between two reads."""
    run = store.run(run_id).result()
    assert run is not None, f"no run {run_id}"
    return replace(run, counters=replace(run.counters, elapsed_ms=0))


def order(
    control_id: str, kind: str = "freeze", *, run_id: str | None = None, label: str | None = None,
    tool: str | None = None, effect: str | None = None,
) -> ControlRecord:  # fmt: skip
    """An order to all runs, unless its parts say otherwise."""
    return ControlRecord(
        control_id=control_id, kind=kind, run_id=run_id, label=label, tool=tool, effect=effect, reason="a reason",
        created_at_us=START_US,
    )  # fmt: skip


class StoreTests:
    """What both halves of the contract stand on. A subclass gives `open_store`, and `open_again` where it can."""

    def open_store(self) -> Store:
        """A new, empty store."""
        raise NotImplementedError

    def open_again(self, store: Store) -> Store:
        """The records of `store`, opened once more, while it is open or after it was closed."""
        msg = f"the store {store.url} cannot be shared"
        raise unittest.SkipTest(msg)

    @contextmanager
    def opened(self) -> Iterator[Store]:
        """A new store that is closed afterwards; its ledger must be sound by then."""
        store = self.open_store()
        try:
            yield store
            check_ledger(store)
        finally:
            store.close()


class RunContract(StoreTests):
    """What a store promises of runs, steps and operations."""

    # -- A new store

    def test_a_new_store_has_a_name_a_key_and_an_opened_ledger(self) -> None:
        """The first entry of a ledger is `ledger_open`, at position 0."""
        with self.opened() as store, self.opened() as other:
            assert store.ledger
            assert store.ledger != other.ledger
            assert len(store.store_key) == len(RUN_KEY)
            assert store.store_key != other.store_key
            (first,) = entries_of(store)
            assert orjson.loads(first.leaf)["type"] == "ledger_open"
            assert store.store_key.hex() not in repr(store.url)

    def test_what_is_not_there_reads_as_nothing(self) -> None:
        """Absent runs, specs, keys, operations and orders are None or empty, never an error."""
        with self.opened() as store:
            assert store.run("nobody").result() is None
            assert store.spec("nobody").result() is None
            assert store.run_key("nobody").result() is None
            assert store.endings(["nobody"]).result() == {}
            assert store.endings([]).result() == {}
            assert store.evidence_of("nobody").result() is None
            assert store.runs(RunQuery()).result() == ()
            assert store.operations(run_id="nobody").result() == ()
            assert store.operations(operation_id="nothing").result() == ()
            assert store.controls().result() == ()
            assert store.entries(run_id="nobody").result() == ()
            assert store.ledger_rows(run_id="nobody").result() == ()

    # -- Runs

    def test_a_run_is_created_once_and_joined_afterwards(self) -> None:
        """`created` tells the two apart; a joiner gets the run's own key and spec."""
        with self.opened() as store:
            first = store.open_run(new_run("a", labels=(("team", "x"),))).result()
            second = store.open_run(replace(new_run("a", owner_id="owner-2"), run_key=b"z" * 32)).result()
            assert (first.created, second.created) == (True, False)
            assert second.run_key == first.run_key == RUN_KEY == store.run_key("a").result()
            assert second.spec == SPEC
            assert second.joined.state is RunState.RUNNING
            run = stored_run(store, "a")
            assert run.owners == (OWNER, "owner-2")
            assert run.labels == (("team", "x"),)
            assert run.spec == SPEC
            assert run.limits == POLICY.limits
            assert run.created_at_us == START_US
            assert run.entries == len(entries_of(store, "a")) == 2  # noqa: PLR2004  # run_open and run_join

    def test_a_run_cannot_be_joined_with_another_spec_or_policy(self) -> None:
        """RunJoinError, and nothing is written."""
        with self.opened() as store:
            store.open_run(new_run("a")).result()
            before = entries_of(store)
            raises(RunJoinError, store.open_run(new_run("a", spec=OTHER_SPEC)).result)
            raises(RunJoinError, store.open_run(new_run("a", policy=sample_policy(3))).result)
            assert entries_of(store) == before
            joined = store.open_run(new_run("a", spec=OTHER_SPEC), use_stored_spec=True).result()
            assert joined.spec == SPEC

    def test_a_stored_spec_starts_its_run(self) -> None:
        """With `use_stored_spec` it counts alone; without, the given one must be equal."""
        with self.opened() as store:
            stored = StoredSpec(run_id="a", spec=SPEC, created_at_us=5)
            store.save_spec(stored).result()
            store.save_spec(replace(stored, created_at_us=6)).result()
            assert store.spec("a").result() == stored
            raises(UsageError, store.save_spec(replace(stored, spec=OTHER_SPEC)).result)
            raises(RunJoinError, store.open_run(new_run("a", spec=OTHER_SPEC)).result)
            raises(RunNotFoundError, store.open_run(new_run("b"), use_stored_spec=True).result)
            assert store.runs(RunQuery()).result() == ()
            opened = store.open_run(new_run("a", spec=OTHER_SPEC), use_stored_spec=True).result()
            assert (opened.created, opened.spec) == (True, SPEC)
            store.open_run(new_run("c")).result()
            of_run = store.spec("c").result()
            assert of_run is not None
            assert of_run.spec == SPEC
            store.save_spec(StoredSpec(run_id="c", spec=SPEC, created_at_us=7)).result()
            raises(UsageError, store.save_spec(StoredSpec(run_id="c", spec=OTHER_SPEC, created_at_us=7)).result)

    def test_a_run_needs_an_id_of_its_own(self) -> None:
        """Neither nothing nor the name of entries without a run."""
        with self.opened() as store:
            raises(UsageError, store.open_run(new_run("")).result)
            raises(UsageError, store.open_run(new_run("-")).result)

    def test_runs_are_listed_newest_first_and_filtered(self) -> None:
        """By state and by labels; a limit is a limit."""
        with self.opened() as store:
            for number in range(5):
                labels = (("team", "x" if number % 2 else "y"), ("n", str(number)))
                store.open_run(new_run(f"r{number}", labels=labels, now_us=START_US + number)).result()
            store.transact(CompleteRun(run_id="r3", now_us=START_US + 9, output="out")).result()

            def listed(**parts: object) -> list[str]:
                return [run.run_id for run in store.runs(RunQuery(**parts)).result()]  # type: ignore[arg-type]  # parts

            assert listed() == ["r4", "r3", "r2", "r1", "r0"]
            assert listed(limit=2) == ["r4", "r3"]
            assert listed(limit=0) == []
            assert listed(states=(RunState.COMPLETE,)) == ["r3"]
            assert listed(labels=(("team", "x"),)) == ["r3", "r1"]
            assert listed(labels=(("team", "x"), ("n", "1"))) == ["r1"]
            assert listed(states=(RunState.RUNNING,), labels=(("team", "x"),)) == ["r1"]
            raises(UsageError, lambda: store.runs(RunQuery(limit=ROWS_MAX + 1)).result())

    def test_a_childs_id_means_its_root(self) -> None:
        """A child is a label inside its root's run: state, counters and orders are the root's."""
        with self.opened() as store:
            store.open_run(new_run("root")).result()
            proposal = Proposal(tool="child", effect=Effect.UNKNOWN, fingerprint="f", call_id="c", agent="helper")
            step = ReserveChild(
                run_id="root", now_us=START_US + 1, policy=POLICY, proposal=proposal, child_run_id="kid",
                parent_run_id="root", depth=1,
            )  # fmt: skip
            store.transact(step).result()
            store.transact(step).result()  # started again after a crash: the same child
            store.open_run(new_run("other")).result()
            raises(UsageError, store.transact(replace(step, run_id="other")).result)
            raises(UsageError, store.transact(replace(step, child_run_id="other")).result)
            assert store.transact(AddStep(run_id="kid", now_us=START_US)).result() == 1
            kid, root = stored_run(store, "kid"), stored_run(store, "root")
            assert (kid.root_run_id, kid.parent_run_id, kid.depth, kid.agent) == ("root", "root", 1, "helper")
            assert kid.counters.steps == root.counters.steps == 1
            assert store.run_key("kid").result() == RUN_KEY
            assert store.evidence_of("kid").result() == store.evidence_of("root").result()
            assert store.entries(run_id="kid").result() == store.entries(run_id="root").result()
            assert store.add_control(order("o1", run_id="kid")).result().run_id == "root"
            assert store.transact(SeeControls(run_id="root", now_us=START_US)).result().frozen is not None
            assert store.open_run(new_run("kid")).result().created is False
            everybody = [run.run_id for run in store.runs(RunQuery(roots_only=False)).result()]
            assert sorted(everybody) == ["kid", "other", "root"]
            assert [run.run_id for run in store.runs(RunQuery()).result()] == ["root", "other"]
            raises(UsageError, store.save_spec(StoredSpec(run_id="kid", spec=SPEC, created_at_us=1)).result)

    def test_a_run_keeps_its_checkpoint_its_end_and_its_output(self) -> None:
        """The stored envelope is the one that was answered; a resume opens a generation with raised limits."""
        with self.opened() as store:
            store.open_run(new_run("a", policy=sample_policy(3))).result()
            asked = reserve("a", 1, policy=sample_policy(3))
            reserved = store.transact(asked).result()
            run = stored_run(store, "a")
            assert run.in_flight == (("call-1", "row.update"),)
            store.transact(settle(asked, reserved)).result()
            seq = store.transact(SaveCheckpoint(run_id="a", now_us=START_US + 5, data='{"at":7}')).result()
            envelope = store.transact(
                EndRun(run_id="a", now_us=START_US + 6, reason=Reason.STEP_CAP, guard="step_cap", message="enough")
            ).result()
            run = stored_run(store, "a")
            assert run.envelope == envelope
            assert run.state is RunState.STOPPED
            assert store.endings(["nobody", "a"]).result() == {"a": envelope}
            assert run.checkpoint is not None
            assert (run.checkpoint.data, run.checkpoint.seq, run.checkpoint.at_us) == ('{"at":7}', seq, START_US + 5)
            assert run.updated_at_us == START_US + 6
            assert run.in_flight == ()
            generation = store.transact(
                ResumeRun(run_id="a", now_us=START_US + 7, change="limit:steps_max=9", reason="more is needed")
            ).result()
            store.transact(LeaveRun(run_id="a", now_us=START_US + 8, owner_id=OWNER)).result()
            run = stored_run(store, "a")
            assert (run.generation, run.limits.steps_max, run.envelope, run.owners) == (generation, 9, None, ())
            assert store.endings(["a"]).result() == {}
            store.transact(CompleteRun(run_id="a", now_us=START_US + 9, output="the answer")).result()
            run = stored_run(store, "a")
            assert (run.output, run.state) == ("the answer", RunState.COMPLETE)

    # -- Steps

    def test_a_step_of_an_unknown_run_finds_no_run(self) -> None:
        """RunNotFoundError, however it was asked for."""
        with self.opened() as store:
            step = AddStep(run_id="nobody", now_us=START_US)
            raises(RunNotFoundError, store.transact(step).result)
            raises(RunNotFoundError, lambda: store.transact_now(step))
            assert len(entries_of(store)) == 1

    def test_a_step_that_fails_writes_nothing(self) -> None:
        """Neither entry, evidence, row nor operation; and the next step sees none of it."""
        with self.opened() as store:
            store.open_run(new_run("a")).result()
            before, entries = stored_run(store, "a"), entries_of(store)
            error = raises(UsageError, store.transact(BreakOff(run_id="a", now_us=START_US)).result)
            assert str(error) == "broken off on purpose"
            raises(UsageError, lambda: store.transact_now(BreakOff(run_id="a", now_us=START_US)))
            assert stored_run(store, "a") == before
            assert entries_of(store) == entries
            assert store.operations().result() == ()
            assert store.transact(AddStep(run_id="a", now_us=START_US)).result() == 1

    def test_a_step_that_fails_takes_no_other_with_it(self) -> None:
        """Of steps asked for at the same moment each has its own outcome, also those of the same run."""
        with self.opened() as store:
            for run_id in ("a", "b"):
                store.open_run(new_run(run_id)).result()
            futures: list[tuple[str, Future[object]]] = []
            for number in range(60):
                run_id = "ab"[number % 2]
                kind = "broken" if number % 3 == 0 else "added"
                step = (BreakOff if kind == "broken" else AddStep)(run_id=run_id, now_us=START_US)
                futures.append((kind, store.transact(step)))  # type: ignore[arg-type]  # a step of either answer
            wait([future for _, future in futures], WAIT_S_MAX)
            for kind, future in futures:
                assert isinstance(future.exception(), UsageError) is (kind == "broken")
            counts = [store.transact(AddStep(run_id=run_id, now_us=START_US)).result() for run_id in ("a", "b")]
            assert counts == [21, 21]
            assert store.operations().result() == ()

    def test_all_ways_to_ask_for_a_step_are_one(self) -> None:
        """In a thread, at once or by a future, and on an event loop."""
        with self.opened() as store:
            store.open_run(new_run("a")).result()
            held: list[BaseException] = []
            assert store.transact(AddStep(run_id="a", now_us=START_US)).result() == 1
            assert store.transact_now(AddStep(run_id="a", now_us=START_US), held) == 2  # noqa: PLR2004

            async def ask() -> list[int]:
                steps = [store.transact_async(AddStep(run_id="a", now_us=START_US)) for _ in range(3)]
                failing = store.transact_async(BreakOff(run_id="a", now_us=START_US))
                answers = [await step for step in steps]
                assert isinstance((await asyncio.gather(failing, return_exceptions=True))[0], UsageError)
                return answers

            assert asyncio.run(ask()) == [3, 4, 5]
            assert held == []

    def test_a_cancelled_waiter_undoes_nothing(self) -> None:
        """A future is either cancelled before its work was taken, or done; a task waits its commit out."""
        with self.opened() as store:
            store.open_run(new_run("a")).result()
            futures = [store.transact(AddStep(run_id="a", now_us=START_US)) for _ in range(50)]
            cancelled = sum(future.cancel() for future in futures)
            wait(futures, WAIT_S_MAX)
            for future in futures:
                if future.cancelled():
                    raises(CancelledError, future.result)
            assert store.transact(AddStep(run_id="a", now_us=START_US)).result() == 51 - cancelled

            async def ask() -> int:
                future = store.transact_async(AddStep(run_id="a", now_us=START_US))
                assert future.cancel() is False
                task = asyncio.ensure_future(_awaited(future))
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
                return await future

            assert asyncio.run(ask()) == 52 - cancelled

    def test_steps_of_one_run_never_interleave(self) -> None:
        """Every thread reads what the one before it wrote: no count is given twice, none is lost."""
        with self.opened() as store:
            store.open_run(new_run("a")).result()
            counts: list[int] = []

            def add(number: int) -> None:
                for turn in range(5):
                    step = AddStep(run_id="a", now_us=START_US)
                    now = (number + turn) % 2
                    counts.append(store.transact_now(step) if now else store.transact(step).result())

            in_threads(20, add)
            assert sorted(counts) == list(range(1, 101))

    def test_a_hundred_threads_of_one_run_share_its_cap_exactly(self) -> None:
        """Of a hundred calls exactly `steps_max` are let through, and the run has one end."""
        with self.opened() as store:
            policy = sample_policy(STEPS_MAX)
            store.open_run(new_run("a", policy=policy)).result()
            actions: list[Action] = []

            def ask(number: int) -> None:
                actions.append(store.transact_now(reserve("a", number, policy=policy)).verdict.action)

            in_threads(THREADS, ask)
            assert Counter(actions) == {Action.EXECUTE: STEPS_MAX, Action.STOP: THREADS - STEPS_MAX}
            run = stored_run(store, "a")
            assert run.counters.steps == STEPS_MAX
            assert len(store.operations(run_id="a").result()) == STEPS_MAX
            kinds = Counter(orjson.loads(entry.leaf)["type"] for entry in entries_of(store, "a"))
            assert (kinds["call_intent"], kinds["stop"]) == (STEPS_MAX, 1)

    # -- Operations

    def test_an_operation_is_written_only_at_the_fence_it_was_read_at(self) -> None:
        """A stale fence fails the whole step with StoreUnavailableError: no entry is left either."""
        with self.opened() as store:
            store.open_run(new_run("a")).result()

            def write(fence: int, expected: int) -> None:
                record = operation("op", "a", fence=fence)
                store.transact(
                    WriteOperation(run_id="a", now_us=START_US, record=record, expected_fence=expected)
                ).result()

            raises(StoreUnavailableError, lambda: write(2, 1))
            write(1, 0)
            before = entries_of(store)
            raises(StoreUnavailableError, lambda: write(1, 0))
            raises(StoreUnavailableError, lambda: write(3, 2))
            assert entries_of(store) == before
            write(2, 1)
            raises(StoreUnavailableError, lambda: write(2, 1))
            (found,) = store.operations().result()
            assert found == operation("op", "a", fence=2)

    def test_an_operation_is_known_to_every_run_and_keeps_its_result(self) -> None:
        """A key that one run committed is answered to another from the ledger."""
        with self.opened() as store:
            store.open_run(new_run("a")).result()
            store.open_run(new_run("b")).result()
            asked = reserve("a", 1)
            settled = store.transact(settle(asked, store.transact(asked).result())).result()
            again = store.transact(replace(asked, run_id="b")).result()
            assert again.verdict.action is Action.REPLAY
            assert again.stored == settled.operation == store.operations(operation_id=asked.operation_id).result()[0]
            seen, of_run = store.transact(
                SeeOperation(run_id="b", now_us=START_US, operation_id=asked.operation_id or "")
            ).result()
            assert (seen, of_run) == (settled.operation, ())

    def test_operations_are_listed_oldest_first_and_filtered(self) -> None:
        """By run, by state and by id; a limit is a limit."""
        with self.opened() as store:
            for run_id in ("a", "b"):
                store.open_run(new_run(run_id)).result()
            for number, run_id in enumerate("abab"):
                record = operation(f"op-{9 - number}", run_id, created_at_us=START_US + number)
                if number == 2:  # noqa: PLR2004
                    record = replace(record, state=OperationState.COMMITTED, result=b"{}", result_kind="inline")
                store.transact(WriteOperation(run_id=run_id, now_us=START_US, record=record, expected_fence=0)).result()

            def listed(**parts: object) -> list[str]:
                return [found.operation_id for found in store.operations(**parts).result()]  # type: ignore[arg-type]  # parts

            assert listed() == ["op-9", "op-8", "op-7", "op-6"]
            assert listed(limit=3) == ["op-9", "op-8", "op-7"]
            assert listed(run_id="a") == ["op-9", "op-7"]
            assert listed(run_id="a", limit=1) == ["op-9"]
            assert listed(states=(OperationState.COMMITTED,)) == ["op-7"]
            assert listed(run_id="a", states=(OperationState.EXECUTING, OperationState.UNKNOWN)) == ["op-9"]
            assert listed(operation_id="op-8", run_id="b") == ["op-8"]
            assert listed(operation_id="op-8", run_id="a") == []
            assert listed(operation_id="op-8", states=(OperationState.COMMITTED,)) == []
            raises(UsageError, lambda: listed(limit=ROWS_MAX + 1))
            mine = store.transact(SeeOperation(run_id="a", now_us=START_US, operation_id="op-8")).result()
            assert [record.operation_id for record in mine[1]] == ["op-9", "op-7"]


async def _awaited(future: asyncio.Future[int]) -> int:
    return await future
