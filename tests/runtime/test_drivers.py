"""Interruptions in every window of a call: before it, in a commit, in the tool. None leaves it half-known."""

from __future__ import annotations

import asyncio
import random
import signal
import threading
from collections.abc import Callable
from contextvars import ContextVar
from types import FrameType
from typing import Any

import pytest

import endstop as es
from endstop.core.steps import LoseCall, ReserveCall, SettleCall, Step
from endstop.core.steps_life import LeaveRun
from endstop.core.steps_turn import ReserveTurn, SettleTurn
from endstop.core.transitions import OperationState
from endstop.errors import CommitUnknownError
from endstop.runtime.guard import Guard
from tests.runtime.scenes import READ, SPEC, WIDE, WRITE, Scene, counting, stops

POLICY = es.Policy(limits=WIDE, tools={"save": WRITE, "look": READ})
UNSENT, UNKNOWN, COMMITTED = OperationState.FAILED_RETRYABLE, OperationState.UNKNOWN, OperationState.COMMITTED


class Tapped:
    """The real store, with a hand on the steps that go in: `before` and `after` are called with each."""

    def __init__(self, store: Any) -> None:
        self._store = store
        self.before: Callable[[Step[Any]], None] = lambda step: None
        self.after: Callable[[Step[Any], list[BaseException] | None], None] = lambda step, held: None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def transact_now(self, step: Step[Any], held: list[BaseException] | None = None) -> object:
        self.before(step)
        answer = self._store.transact_now(step, held)
        self.after(step, held)
        return answer

    def transact_async(self, step: Step[Any]) -> object:
        self.before(step)
        future = self._store.transact_async(step)
        self.after(step, None)
        return future


def tapped(guard: Guard) -> Tapped:
    store = Tapped(guard.store)
    guard._store = guard.world.store = store  # type: ignore[assignment]  # it stands in for the store
    return store


def raising(kind: type, error: BaseException) -> Callable[..., None]:
    """A hand that raises `error` at the first step of a kind."""
    done = []

    def hand(step: Step[Any], *_: object) -> None:
        if isinstance(step, kind) and not done:
            done.append(step)
            raise error

    return hand


def is_settled(guard: Guard, run_id: str) -> bool:
    """Whether nothing of a run is half-known."""
    states = {operation.state for operation in guard.operations(run_id)}
    return guard.show(run_id).in_flight == () and OperationState.EXECUTING not in states


# -- Threads


@pytest.mark.parametrize("moment", ["before", "after", "held"])
def test_an_interrupt_around_the_reservation_sends_nothing_and_blocks_nothing(scene: Scene, moment: str) -> None:
    """Raised before the commit, after it with its answer lost, and held back by the store until it was over."""
    guard = scene.open(POLICY)
    store = tapped(guard)
    save, saved = counting()
    with guard.run(SPEC, run_id="r1") as run:
        if moment == "held":
            store.after = lambda step, held: held.append(KeyboardInterrupt()) if isinstance(step, ReserveCall) else None  # type: ignore[union-attr]  # given
        elif moment == "after":
            store.after = raising(ReserveCall, KeyboardInterrupt())
        else:
            store.before = raising(ReserveCall, KeyboardInterrupt())
        with pytest.raises(KeyboardInterrupt):
            run.call(save, {"key": "a"}, tool="save")
        store.after = lambda step, held: None
        assert saved == []
        assert is_settled(guard, "r1")
        assert [operation.state for operation in guard.operations()] == ([] if moment == "before" else [UNSENT])
        run.call(save, {"key": "a"}, tool="save")
    assert len(saved) == 1


def test_a_reservation_whose_commit_is_unknown_is_taken_back(scene: Scene) -> None:
    guard = scene.open(POLICY)
    store = tapped(guard)
    save, saved = counting()
    with guard.run(SPEC, run_id="r1") as run:
        store.after = raising(ReserveCall, CommitUnknownError("the line went dead"))
        with pytest.raises(CommitUnknownError):
            run.call(save, {"key": "a"}, tool="save")
        assert is_settled(guard, "r1")
        run.call(save, {"key": "a"}, tool="save")
    assert len(saved) == 1


@pytest.mark.parametrize("interrupt", [KeyboardInterrupt, SystemExit, asyncio.CancelledError, GeneratorExit])
def test_an_interrupt_in_the_tool_leaves_a_write_unknown_and_goes_on(
    scene: Scene, interrupt: type[BaseException]
) -> None:
    guard = scene.open(POLICY)
    with guard.run(SPEC, run_id="r1") as run:

        def save(key: str) -> None:
            raise interrupt

        with pytest.raises(interrupt):
            run.call(save, {"key": "a"})
        with pytest.raises(interrupt):
            run.call(save, {"key": "b"}, tool="look")
        assert is_settled(guard, "r1")
        operation = guard.operations()[0]
        assert (operation.state, operation.reason) == (UNKNOWN, interrupt.__name__)


@pytest.mark.parametrize(("moment", "state"), [("before", UNKNOWN), ("after", COMMITTED), ("held", COMMITTED)])
def test_an_interrupt_around_the_settlement_keeps_what_is_known(
    scene: Scene, moment: str, state: OperationState
) -> None:
    guard = scene.open(POLICY)
    store = tapped(guard)
    save, saved = counting()
    with guard.run(SPEC, run_id="r1") as run:
        if moment == "held":
            store.after = lambda step, held: held.append(KeyboardInterrupt()) if isinstance(step, SettleCall) else None  # type: ignore[union-attr]  # given
        elif moment == "after":
            store.after = raising(SettleCall, KeyboardInterrupt())
        else:
            store.before = raising(SettleCall, KeyboardInterrupt())
        with pytest.raises(KeyboardInterrupt):
            run.call(save, {"key": "a"}, tool="save", call_id="c1")
        store.after = lambda step, held: None
        assert is_settled(guard, "r1")
        assert [operation.state for operation in guard.operations()] == [state]
        assert guard.show("r1").counters.steps == 1
    assert len(saved) == 1


@pytest.mark.parametrize(("moment", "state"), [("before", UNKNOWN), ("after", COMMITTED)])
def test_a_settlement_whose_commit_is_unknown_is_told_as_an_unknown_outcome(
    scene: Scene, moment: str, state: OperationState
) -> None:
    guard = scene.open(POLICY)
    store = tapped(guard)
    with guard.run(SPEC, run_id="r1") as run:
        setattr(store, moment, raising(SettleCall, CommitUnknownError("the line went dead")))
        with pytest.raises(es.OutcomeUnknownError):
            run.call(counting()[0], {"key": "a"}, tool="save")
        assert is_settled(guard, "r1")
        assert [operation.state for operation in guard.operations()] == [state]


def test_a_store_that_was_busy_once_still_gets_the_outcome(scene: Scene) -> None:
    guard = scene.open(POLICY)
    store = tapped(guard)
    with guard.run(SPEC) as run:
        store.before = raising(SettleCall, es.StoreUnavailableError("busy"))
        assert run.call(counting(5)[0], {"key": "a"}, tool="save").value == 5
    assert [operation.state for operation in guard.operations()] == [COMMITTED]


def test_an_answer_that_cannot_be_judged_leaves_its_write_unknown(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    guard = scene.open(POLICY)

    def broken(*_: object, **__: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr("endstop.core.pipeline.measure", broken)
    with guard.run(SPEC, run_id="r1") as run:
        with pytest.raises(es.OutcomeUnknownError) as raised:
            run.call(counting()[0], {"key": "a"}, tool="save")
        assert isinstance(raised.value.__cause__, ZeroDivisionError)
        with pytest.raises(ZeroDivisionError):
            run.call(counting()[0], {"key": "a"}, tool="look")
        assert is_settled(guard, "r1")


@pytest.mark.storm  # an interrupt may land in the test runner's own hooks, so it runs on demand
@pytest.mark.skipif(threading.current_thread() is not threading.main_thread(), reason="signals reach the main thread")
def test_real_interrupts_at_random_moments_leave_nothing_half_known(scene: Scene) -> None:
    guard = scene.open(POLICY)
    dice = random.Random(20260730)
    effects: list[str] = []
    interrupted = finished = 0

    def save(key: str) -> str:
        effects.append(key)
        return key

    def on_alarm(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, on_alarm)
    try:
        with guard.run(SPEC, run_id="r1") as run:
            for number in range(150):
                try:
                    try:
                        # Every fourth call is left alone, so that some finish on a busy machine too.
                        if number % 4:
                            signal.setitimer(signal.ITIMER_REAL, dice.uniform(0.000_02, 0.002))
                        run.call(save, {"key": f"a{number}"})
                        finished += 1
                    finally:
                        signal.setitimer(signal.ITIMER_REAL, 0)
                except KeyboardInterrupt:
                    interrupted += 1
            assert is_settled(guard, "r1")
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert interrupted > 0
    assert finished > 0
    assert len(effects) == len(set(effects))
    states = [operation.state for operation in guard.operations("r1")]
    assert states.count(COMMITTED) + states.count(UNKNOWN) >= len(effects)
    assert states.count(COMMITTED) <= len(effects)


# -- Event loops


def cancelling(kind: type) -> Callable[..., None]:
    """A hand that cancels the running task at the first step of a kind."""
    done = []

    def hand(step: Step[Any], *_: object) -> None:
        if isinstance(step, kind) and not done:
            done.append(step)
            task = asyncio.current_task()
            assert task is not None
            task.cancel()

    return hand


@pytest.mark.parametrize(
    ("kind", "state", "ran"),
    [(ReserveCall, UNSENT, 0), (SettleCall, COMMITTED, 1)],
    ids=["in the reservation", "in the settlement"],
)
def test_a_cancellation_in_a_commit_is_raised_after_it(
    file_scene: Scene, kind: type, state: OperationState, ran: int
) -> None:
    guard = file_scene.open(POLICY)
    store = tapped(guard)
    saved = []

    async def save(key: str) -> str:
        saved.append(key)
        return key

    async def body() -> None:
        async with guard.run(SPEC, run_id="r1") as run:
            store.after = cancelling(kind)
            await run.acall(save, {"key": "a"})

    async def main() -> None:
        task = asyncio.create_task(body())
        with pytest.raises(asyncio.CancelledError):
            await task
        assert task.cancelled()

    asyncio.run(main())
    assert len(saved) == ran
    assert [operation.state for operation in guard.operations()] == [state]
    assert is_settled(guard, "r1")
    assert guard.show("r1").owners == ()


def test_a_cancellation_in_the_tool_is_recorded_even_when_it_comes_twice(file_scene: Scene) -> None:
    guard = file_scene.open(POLICY)
    store = tapped(guard)
    started = asyncio.Event()

    async def save(key: str) -> None:
        started.set()
        await asyncio.sleep(30)

    async def body() -> None:
        async with guard.run(SPEC, run_id="r1") as run:
            # The second cancellation falls into the recording of the first, and a third into the leaving.
            store.after = cancelling(LoseCall)
            await run.acall(save, {"key": "a"})

    async def main() -> None:
        task = asyncio.create_task(body())
        await started.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(main())
    assert [operation.state for operation in guard.operations()] == [UNKNOWN]
    assert is_settled(guard, "r1")
    assert guard.show("r1").owners == ()


def test_a_cancellation_before_the_call_reserves_nothing(scene: Scene) -> None:
    guard = scene.open(POLICY)

    async def main() -> None:
        async with guard.run(SPEC) as run:
            task = asyncio.create_task(run.acall(lambda: asyncio.sleep(0), tool="t"))
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert run.counters.steps == 0

    asyncio.run(main())


def test_a_timeout_around_a_guarded_call_is_a_timeout(scene: Scene) -> None:
    guard = scene.open(POLICY)

    async def save(key: str) -> None:
        await asyncio.sleep(30)

    async def main() -> None:
        async with guard.run(SPEC, run_id="r1") as run:
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.02):
                    await run.acall(save, {"key": "a"})
            assert is_settled(guard, "r1")
            # The task is as good as new.
            await run.acall(counting()[0], {"q": 1}, tool="look")

    asyncio.run(main())
    assert [operation.state for operation in guard.operations()] == [UNKNOWN]


def test_a_hundred_cancelled_calls_leave_nothing_half_known(scene: Scene) -> None:
    guard = scene.open(POLICY)
    dice = random.Random(7)
    effects: list[str] = []

    async def save(key: str) -> str:
        await asyncio.sleep(dice.choice([0, 0, 0.001]))
        effects.append(key)
        await asyncio.sleep(0)
        return key

    async def main() -> None:
        async with guard.run(SPEC, run_id="r1") as run:
            for number in range(100):
                task = asyncio.create_task(run.acall(save, {"key": f"a{number}"}))
                for _ in range(dice.randrange(6)):
                    await asyncio.sleep(0)
                await asyncio.sleep(dice.choice([0, 0.000_5, 0.001]))
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
            assert is_settled(guard, "r1")

    asyncio.run(main())
    states = [operation.state for operation in guard.operations("r1", limit=1_000)]
    assert len(effects) == len(set(effects))
    assert states.count(COMMITTED) + states.count(UNKNOWN) >= len(effects)


def test_context_variables_reach_tools_of_every_kind(scene: Scene) -> None:
    guard = scene.open(POLICY)
    who: ContextVar[str] = ContextVar("who", default="nobody")

    def plain() -> str:
        return f"{who.get()} {es.current().tool}"

    async def later() -> str:
        await asyncio.sleep(0)
        return f"{who.get()} {es.current().tool}"

    async def main() -> None:
        who.set("somebody")
        async with guard.run(SPEC) as run:
            assert (await run.acall(plain)).value == "somebody plain"
            assert (await run.acall(later)).value == "somebody later"
            both = await asyncio.gather(run.acall(plain, tool="a"), run.acall(later, tool="b"))
            assert [answer.value for answer in both] == ["somebody a", "somebody b"]

    asyncio.run(main())


def test_a_tool_may_make_guarded_calls_of_its_own(scene: Scene) -> None:
    guard = scene.open(POLICY)
    with guard.run(SPEC) as run:

        def outer(n: int) -> list[object]:
            before = es.current().call_id
            inner = run.call(lambda q: es.current().call_id, {"q": n}, tool="inner", call_id="inside")
            return [before, inner.value, es.current().call_id]

        assert run.call(outer, {"n": 1}, call_id="outside").value == ["outside", "inside", "outside"]


def test_a_halt_inside_a_tool_ends_the_tool_and_leaves_its_write_unknown(scene: Scene) -> None:
    guard = scene.open(es.Policy(limits=es.Limits(steps_max=1, wall_ms_max=600_000), tools={"save": WRITE}))
    with stops("step_cap"), guard.run(SPEC) as run:

        def save(key: str) -> object:
            return run.call(counting()[0], {"q": 1}, tool="inner")

        run.call(save, {"key": "a"})
    assert [operation.state for operation in guard.operations()] == [UNKNOWN]


# -- Model calls


def test_an_interrupted_reservation_of_a_model_call_gives_its_hold_back(file_scene: Scene) -> None:
    guard = file_scene.open(POLICY)
    store = tapped(guard)

    async def body() -> None:
        async with guard.run(SPEC, run_id="r1") as run:
            store.after = cancelling(ReserveTurn)
            async with run.model_call(output_tokens_max=100):
                pytest.fail("sent")

    async def main() -> None:
        with pytest.raises(asyncio.CancelledError):
            await asyncio.create_task(body())

    asyncio.run(main())
    counters = guard.show("r1").counters
    assert (counters.turns, counters.output_tokens) == (1, 0)
    with guard.run(run_id="r1") as run:
        store.after = lambda step, held: held.append(KeyboardInterrupt()) if isinstance(step, ReserveTurn) else None  # type: ignore[union-attr]  # given
        with pytest.raises(KeyboardInterrupt), run.model_call(output_tokens_max=100):
            pytest.fail("sent")
        store.after = lambda step, held: None
        assert run.counters.output_tokens == 0


def test_a_cancellation_while_a_model_call_settles_is_raised_after_it(file_scene: Scene) -> None:
    guard = file_scene.open(POLICY)
    store = tapped(guard)

    async def body() -> None:
        async with guard.run(SPEC, run_id="r1") as run:
            store.after = cancelling(SettleTurn)
            async with run.model_call() as turn:
                turn.record(input_tokens=3, output_tokens=4)

    async def main() -> None:
        with pytest.raises(asyncio.CancelledError):
            await asyncio.create_task(body())

    asyncio.run(main())
    assert guard.show("r1").counters.output_tokens == 4


def test_the_steps_that_these_tests_tap_are_the_ones_that_are_taken(scene: Scene) -> None:
    guard = scene.open(POLICY)
    store = tapped(guard)
    taken: list[str] = []
    store.before = lambda step: taken.append(type(step).__name__)
    with guard.run(SPEC) as run:
        run.call(counting()[0], {"key": "a"}, tool="save")
        with run.model_call():
            pass
    assert taken == ["ReserveCall", "SettleCall", "ReserveTurn", "SettleTurn"]
    assert LeaveRun.__name__ not in taken  # the block waits for that in its own way
