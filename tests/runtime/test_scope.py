"""The latch and the block: a stop that was swallowed is still a stop, and other exceptions are kept."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import pytest

import endstop as es
from endstop.errors import StoreUnavailableError
from endstop.runtime.guard import Guard
from tests.runtime.scenes import SPEC, Scene, counting, stops

ONE_STEP = es.Policy(limits=es.Limits(steps_max=1, wall_ms_max=600_000))


def used_up(scene: Scene) -> Guard:
    return scene.open(ONE_STEP)


def spend(run: es.Run, number: int = 1) -> None:
    run.call(counting(number)[0], {"n": number}, tool="t")


def test_a_swallowed_halt_still_ends_in_run_stopped(scene: Scene) -> None:
    tool, calls = counting()
    with stops() as stopped, used_up(scene).run(SPEC) as run:
        for number in range(50):
            try:
                run.call(tool, {"n": number})
            except BaseException:
                continue
    assert len(calls) == 1
    assert stopped.value.envelope.terminal_reason is es.Reason.STEP_CAP
    assert run.stop_reason is es.Reason.STEP_CAP
    assert run.envelope == stopped.value.envelope


def test_an_agents_except_exception_cannot_swallow_a_halt(scene: Scene) -> None:
    reached = []
    with stops(), used_up(scene).run(SPEC) as run:
        try:
            spend(run, 1)
            spend(run, 2)
        except Exception:
            reached.append("swallowed")
        reached.append("went on")
    assert reached == []


def every_kind_of_call(agent: es.Run) -> list[Callable[[], object]]:
    return [
        lambda: spend(agent, 4),
        lambda: agent.model_call().__enter__(),
        lambda: agent.child(agent="b"),
        lambda: agent.handoff("b"),
        lambda: agent.checkpoint({}),
        agent.user_input,
        lambda: agent.complete(output="done after all"),
    ]


def test_after_a_stop_every_kind_of_call_halts_everywhere(scene: Scene) -> None:
    guard = used_up(scene)
    halts: list[str] = []
    with stops(), guard.run(SPEC, run_id="r1") as run:
        child = run.child(agent="a")
        other = scene.another(guard)
        with stops(), other.run(run_id="r1") as elsewhere:
            spend(run)
            with pytest.raises(es.RunHalted):
                spend(run, 2)

            async def later() -> None:
                async def tool(n: int) -> int:
                    return n

                for agent in (run, child, elsewhere):
                    with pytest.raises(es.RunHalted):
                        await agent.acall(tool, {"n": 3})
                    halts.append("task")
                    with pytest.raises(es.RunHalted):
                        async with agent.model_call():
                            pass

            def in_thread() -> None:
                for agent in (run, child, elsewhere):
                    for call in every_kind_of_call(agent):
                        with pytest.raises(es.RunHalted):
                            call()
                        halts.append("thread")

            asyncio.run(later())
            thread = threading.Thread(target=in_thread)
            thread.start()
            thread.join()
    assert halts.count("thread") == 21
    assert halts.count("task") == 3
    record = guard.show("r1")
    assert (record.state, record.output) == (es.RunState.STOPPED, None)
    assert record.counters.steps == 1
    assert record.counters.turns == 0


def test_the_first_refusal_is_written_down_and_the_ones_after_the_latch_are_not(scene: Scene) -> None:
    guard = used_up(scene)
    with stops(), guard.run(SPEC, run_id="r1") as run:
        spend(run)
        for _ in range(20):
            try:
                spend(run, 2)
            except es.RunHalted:
                run._facts.signal = None  # as in a process that has not seen the stop
            try:
                with run.model_call():
                    pass
            except es.RunHalted:
                run._facts.signal = None
            try:
                run.handoff("b")
            except es.RunHalted:
                run._facts.signal = None
    kinds = [entry.leaf for entry in guard.store.entries(run_id="r1").result()]
    assert len(kinds) == 5  # opened, intent, result, refused, stopped


def test_a_stop_from_outside_is_told_at_the_end_of_the_block_at_the_latest(scene: Scene) -> None:
    guard = scene.open()
    with stops() as stopped, guard.run(SPEC) as run:
        scene.another(guard).stop(run.run_id, reason="enough", actor="ops")
    assert stopped.value.envelope.terminal_reason is es.Reason.OPERATOR_CANCELLED_LOOP
    assert stopped.value.envelope.message == "enough"


def test_a_stop_that_this_worker_saw_stays_one_when_somebody_resumes_the_run_meanwhile(scene: Scene) -> None:
    guard = scene.open()
    with stops() as stopped, guard.run(SPEC, run_id="r1") as run:
        guard.stop("r1")
        with pytest.raises(es.RunHalted):
            spend(run)
        guard.resume("r1", change="strategy", reason="another way")
        with pytest.raises(es.RunHalted):
            spend(run)
    assert stopped.value.envelope.generation == 1
    assert guard.show("r1").state is es.RunState.RUNNING


def test_a_worker_that_slept_through_a_stop_and_a_resume_is_halted(scene: Scene) -> None:
    """It never saw the stop, and acts on what it knew before."""
    guard = scene.open()
    tool, calls = counting()
    with stops() as stopped, guard.run(SPEC, run_id="r1") as run:
        guard.stop("r1")
        generation = guard.resume("r1", change="strategy", reason="another way")
        with scene.another(guard).run(run_id="r1") as again:
            assert again.generation == generation == 2
            for call in (
                lambda: run.call(tool, {"n": 1}),
                lambda: run.model_call().__enter__(),
                lambda: run.child(agent="a"),
                lambda: run.handoff("a"),
                run.complete,
                lambda: run.end("fatal") and run.check_open(),
            ):
                with pytest.raises(es.RunHalted, match="generation 2"):
                    call()
                run._facts.signal = None
            with pytest.raises(es.RunHalted):
                run.call(tool, {"n": 1})
            again.call(tool, {"n": 2})
    assert len(calls) == 1
    assert stopped.value.envelope.guard == "generation"
    assert guard.show("r1").state is es.RunState.RUNNING


def test_other_exceptions_are_kept_as_the_cause(scene: Scene) -> None:
    with stops() as stopped, used_up(scene).run(SPEC) as run:
        spend(run)
        try:
            spend(run, 2)
        except es.RunHalted:
            raise ValueError("the framework's own") from None
    assert isinstance(stopped.value.__cause__, ValueError)


def test_an_exception_of_a_run_that_goes_on_is_left_alone(scene: Scene) -> None:
    guard = scene.open()
    with pytest.raises(ValueError, match="mine"), guard.run(SPEC, run_id="r1"):
        raise ValueError("mine")
    assert guard.show("r1").state is es.RunState.RUNNING


def test_a_halt_of_another_run_passes_through(scene: Scene) -> None:
    guard = used_up(scene)
    with stops(), guard.run(SPEC, run_id="inner") as inner:
        spend(inner)
        with pytest.raises(es.RunHalted) as halted, guard.run(SPEC, run_id="outer"):
            spend(inner, 2)
        assert halted.value.envelope.run_id == "inner"
    assert guard.show("outer").state is es.RunState.RUNNING


def test_exception_groups_are_unwrapped(scene: Scene) -> None:
    guard = scene.open()

    async def one(run: es.Run, number: int) -> None:
        if number == 1:
            raise ValueError("one")
        if number == 2:
            raise KeyError("two")
        await run.acall(counting()[0], {"n": number})

    async def main() -> None:
        async with guard.run(SPEC) as run:
            guard.stop(run.run_id)
            async with asyncio.TaskGroup() as group:
                for number in range(4):
                    group.create_task(one(run, number))

    with pytest.raises(es.RunStopped) as stopped:
        asyncio.run(main())
    assert isinstance(stopped.value.__cause__, ExceptionGroup)
    assert {type(error) for error in stopped.value.__cause__.exceptions} == {ValueError, KeyError}


def test_a_task_group_of_calls_stops_as_a_whole(scene: Scene) -> None:
    guard = scene.open(es.Policy(limits=es.Limits(steps_max=3, wall_ms_max=600_000)))
    ended = []

    async def tool(n: int) -> int:
        await asyncio.sleep(0.01)
        ended.append(n)
        return n

    async def main() -> None:
        async with guard.run(SPEC) as run, asyncio.TaskGroup() as group:
            for number in range(8):
                group.create_task(run.acall(tool, {"n": number}))

    with pytest.raises(es.RunStopped) as stopped:
        asyncio.run(main())
    assert stopped.value.envelope.terminal_reason is es.Reason.STEP_CAP
    assert len(ended) <= 3


def test_a_cancellation_is_not_swallowed_by_a_stop(scene: Scene) -> None:
    guard = scene.open()
    order = []

    async def body() -> None:
        async with guard.run(SPEC, run_id="r1"):
            guard.stop("r1")
            order.append("inside")
            await asyncio.sleep(60)

    async def main() -> None:
        task = asyncio.create_task(body())
        while not order:
            await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert task.cancelled()

    asyncio.run(main())
    assert guard.show("r1").owners == ()


@pytest.mark.parametrize("signal", [KeyboardInterrupt, SystemExit, GeneratorExit])
def test_an_interrupt_goes_on_as_it_is(scene: Scene, signal: type[BaseException]) -> None:
    guard = scene.open()
    scope = guard.run(SPEC, run_id="r1")
    with pytest.raises(signal), scope:
        raise_after(lambda: guard.stop("r1"), signal())
    assert guard.show("r1").owners == ()


def test_a_task_that_is_cancelled_while_it_enters_does_not_stay_inside(scene: Scene) -> None:
    guard = scene.open()

    async def enter(number: int) -> None:
        async with guard.run(SPEC, run_id=f"r{number}"):
            await asyncio.sleep(60)

    async def main() -> None:
        for number in range(12):
            task = asyncio.create_task(enter(number))
            for _ in range(number):
                await asyncio.sleep(0)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task

    asyncio.run(main())
    assert all(run.owners == () for run in guard.runs())


def test_a_run_that_has_ended_is_entered_by_nobody(scene: Scene) -> None:
    guard = scene.open()
    with guard.run(SPEC, run_id="r1") as run:
        run.complete(output=1)
    with stops() as stopped, guard.run(run_id="r1"):
        pytest.fail("entered")
    assert stopped.value.envelope.terminal_reason is es.Reason.COMPLETE

    async def later() -> None:
        async with guard.run(run_id="r1"):
            pytest.fail("entered")

    with pytest.raises(es.RunStopped):
        asyncio.run(later())
    assert guard.show("r1").owners == ()


def test_a_complete_run_is_left_in_silence_unless_somebody_goes_on_calling(scene: Scene) -> None:
    guard = scene.open()
    with guard.run(SPEC) as run:
        assert run.complete().terminal_reason is es.Reason.COMPLETE
        assert run.complete(output="again").terminal_reason is es.Reason.COMPLETE
    assert guard.show(run.run_id).output is None
    with stops() as stopped, guard.run(SPEC) as run:
        run.complete()
        spend(run)
    assert stopped.value.envelope.terminal_reason is es.Reason.COMPLETE


def test_a_run_is_of_no_use_after_its_block(scene: Scene) -> None:
    guard = scene.open()
    with guard.run(SPEC) as run:
        turn = run.model_call()
    for call in (lambda: spend(run), turn.__enter__, lambda: run.child(agent="a"), run.complete):
        with pytest.raises(es.GuardClosedError, match="block"):
            call()
    assert guard.show(run.run_id).counters.steps == 0


def raise_after(work: Callable[[], object], error: BaseException) -> None:
    work()
    raise error


class Deaf:
    """A store that answers until somebody says that it no longer does."""

    def __init__(self, store: Any) -> None:
        self._store = store
        self.is_deaf = False

    def __getattr__(self, name: str) -> Any:
        if self.is_deaf and name.startswith("transact"):
            return self._fail
        return getattr(self._store, name)

    def _fail(self, *_: object) -> Future[object]:
        raise StoreUnavailableError("the disk is gone")


def deaf(guard: Guard) -> Deaf:
    store = Deaf(guard.store)
    guard._store = guard.world.store = store  # type: ignore[assignment]  # it stands in for the store
    return store


def test_without_the_ledger_nothing_runs(scene: Scene) -> None:
    guard = scene.open()
    store = deaf(guard)
    tool, calls = counting()
    with guard.run(SPEC, run_id="r1") as run:
        store.is_deaf = True
        with pytest.raises(StoreUnavailableError, match="disk"):
            run.call(tool, {})
        store.is_deaf = False
    assert calls == []


def test_a_stop_that_was_seen_is_told_also_when_leaving_cannot_be_recorded(scene: Scene) -> None:
    guard = used_up(scene)
    store = deaf(guard)
    with stops("step_cap"), guard.run(SPEC) as run:
        spend(run)
        try:
            spend(run, 2)
        finally:
            store.is_deaf = True
    store.is_deaf = False


def test_a_write_whose_outcome_cannot_be_recorded_is_in_doubt_for_its_caller(scene: Scene) -> None:
    guard = scene.open(es.Policy(tools={"save": es.ToolPolicy(effect="write", idempotency_key="{key}")}))
    store = deaf(guard)
    with guard.run(SPEC) as run:

        def save(key: str) -> str:
            store.is_deaf = True
            return key

        with pytest.raises(es.OutcomeUnknownError, match="was sent") as raised:
            run.call(save, {"key": "a"})
        assert isinstance(raised.value.__cause__, StoreUnavailableError)
        store.is_deaf = False
        tool, calls = counting()
        assert run.call(tool, {"key": "a"}, tool="save").reason is es.Reason.IN_PROGRESS
    assert calls == []


def test_a_cancellation_that_cannot_be_recorded_stays_a_cancellation(scene: Scene) -> None:
    guard = scene.open()
    store = deaf(guard)

    def interrupted() -> None:
        store.is_deaf = True
        raise KeyboardInterrupt

    with guard.run(SPEC) as run:
        with pytest.raises(KeyboardInterrupt) as raised:
            run.call(interrupted)
        store.is_deaf = False
    assert any("could not record" in note for note in raised.value.__notes__)
