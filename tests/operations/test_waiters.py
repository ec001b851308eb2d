"""A second caller of a key in flight: refused, waiting with a bound, or given the operation's id."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import endstop as es
from endstop.core.transitions import OperationState
from endstop.runtime.asking import WAITERS_MAX, Waiters
from tests.operations.scenes import SPEC, STORES, only
from tests.runtime.scenes import WIDE

MS = 1_000


class Desk:
    """A tool that is under way until it is told to end; real time, because callers really wait."""

    def __init__(self, kind: str, folder: Path, **more: object) -> None:
        tool = es.ToolPolicy(**{"effect": "write", "idempotency_key": "{order}", **more})  # type: ignore[arg-type]  # by name
        self.guard = es.open(STORES[kind](folder), policy=es.Policy(limits=WIDE, tools={"pay": tool}))
        self.began = threading.Event()
        self.ends = threading.Event()
        self.calls: list[str] = []
        self.answer: object = "paid"

    def pay(self, order: str) -> object:
        self.calls.append(order)
        self.began.set()
        assert self.ends.wait(30)
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer

    def call(self, run_id: str) -> es.ToolResult[object]:
        with self.guard.run(SPEC, run_id=run_id) as run:
            return run.call(self.pay, {"order": "a"}, tool="pay")


@pytest.fixture(params=sorted(STORES))
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def test_c01_without_a_word_a_second_caller_is_refused_at_once_with_the_operations_id(
    kind: str, tmp_path: Path
) -> None:
    desk = Desk(kind, tmp_path)
    with desk.guard, ThreadPoolExecutor() as pool:
        first = pool.submit(desk.call, "one")
        assert desk.began.wait(30)
        refused = desk.call("two")
        desk.ends.set()
        assert first.result().value == "paid"
        assert (refused.reason, refused.operation_id) == (es.Reason.IN_PROGRESS, only(desk.guard).operation_id)
        assert (refused.retry_after_ms, refused.next_allowed_action) == (1_000, "wait")
    assert desk.calls == ["a"]


def test_a_waiter_gets_the_others_answer_and_never_runs(kind: str, tmp_path: Path) -> None:
    desk = Desk(kind, tmp_path, waiter="wait", wait_ms=30_000)
    with desk.guard, ThreadPoolExecutor() as pool:
        first = pool.submit(desk.call, "one")
        assert desk.began.wait(30)
        waiting = [pool.submit(desk.call, f"w{number}") for number in range(3)]
        desk.ends.set()
        assert first.result().value == "paid"
        assert [(item.result().value, item.result().replayed) for item in waiting] == [("paid", True)] * 3
    assert desk.calls == ["a"]


def test_a_waiter_in_an_event_loop_waits_too_and_leaves_the_loop_free(kind: str, tmp_path: Path) -> None:
    desk = Desk(kind, tmp_path, waiter="wait", wait_ms=30_000)

    async def call(run_id: str) -> es.ToolResult[object]:
        async with desk.guard.run(SPEC, run_id=run_id) as run:
            return await run.acall(desk.pay, {"order": "a"}, tool="pay")

    async def main() -> list[es.ToolResult[object]]:
        first = asyncio.create_task(call("one"))
        while not desk.began.is_set():
            await asyncio.sleep(0.001)
        second = asyncio.create_task(call("two"))
        await asyncio.sleep(0.05)
        assert not second.done()
        desk.ends.set()
        return [await first, await second]

    with desk.guard:
        assert [item.value for item in asyncio.run(main())] == ["paid", "paid"]
    assert desk.calls == ["a"]


def test_c08_a_waiter_whose_time_is_up_is_told_so_and_never_runs(kind: str, tmp_path: Path) -> None:
    desk = Desk(kind, tmp_path, waiter="wait", wait_ms=50)
    with desk.guard, ThreadPoolExecutor() as pool:
        first = pool.submit(desk.call, "one")
        assert desk.began.wait(30)
        assert desk.call("two").reason is es.Reason.IN_PROGRESS
        desk.ends.set()
        first.result()
    assert desk.calls == ["a"]


def test_c08_a_waiter_whose_owner_fails_gets_a_typed_answer(kind: str, tmp_path: Path) -> None:
    desk = Desk(kind, tmp_path, waiter="wait", wait_ms=30_000)
    desk.answer = ConnectionResetError("reset")
    with desk.guard, ThreadPoolExecutor() as pool:
        first = pool.submit(desk.call, "one")
        assert desk.began.wait(30)
        second = pool.submit(desk.call, "two")
        desk.ends.set()
        with pytest.raises(es.OutcomeUnknownError):
            first.result()
        assert second.result().reason is es.Reason.OUTCOME_UNKNOWN
        assert only(desk.guard).state is OperationState.UNKNOWN
    assert desk.calls == ["a"]


def test_c08_a_waiter_whose_owner_dies_hears_of_it(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    desk = Desk(kind, tmp_path, waiter="wait", wait_ms=30_000)
    with desk.guard, ThreadPoolExecutor() as pool:
        first = pool.submit(desk.call, "one")
        assert desk.began.wait(30)
        owner = only(desk.guard).owner_id
        second = pool.submit(desk.call, "two")
        monkeypatch.setattr(desk.guard.world.board, "is_alive", lambda owner_id: owner_id != owner)
        assert second.result().reason is es.Reason.OUTCOME_UNKNOWN
        desk.ends.set()
        first.result()  # it was alive after all: its late result is taken
        assert only(desk.guard).state is OperationState.COMMITTED
    assert desk.calls == ["a"]


def test_c08_a_cancelled_waiter_leaves_nothing_behind(kind: str, tmp_path: Path) -> None:
    desk = Desk(kind, tmp_path, waiter="wait", wait_ms=30_000)

    async def main() -> None:
        async def call(run_id: str) -> es.ToolResult[object]:
            async with desk.guard.run(SPEC, run_id=run_id) as run:
                return await run.acall(desk.pay, {"order": "a"}, tool="pay")

        first = asyncio.create_task(call("one"))
        while not desk.began.is_set():
            await asyncio.sleep(0.001)
        second = asyncio.create_task(call("two"))
        await asyncio.sleep(0.05)
        second.cancel()
        with pytest.raises(asyncio.CancelledError):
            await second
        assert only(desk.guard).state is OperationState.EXECUTING
        desk.ends.set()
        assert (await first).value == "paid"

    with desk.guard:
        asyncio.run(main())
    assert desk.calls == ["a"]


def test_a_waiter_of_a_run_that_is_stopped_is_halted(kind: str, tmp_path: Path) -> None:
    desk = Desk(kind, tmp_path, waiter="wait", wait_ms=30_000)
    with desk.guard, ThreadPoolExecutor() as pool:
        first = pool.submit(desk.call, "one")
        assert desk.began.wait(30)
        second = pool.submit(desk.call, "two")
        while not any(run.run_id == "two" for run in desk.guard.runs()):
            pass
        desk.guard.stop("two")
        with pytest.raises(es.RunStopped):
            second.result()
        desk.ends.set()
        first.result()


def test_a_handle_is_the_operations_id_to_ask_for_later(kind: str, tmp_path: Path) -> None:
    desk = Desk(kind, tmp_path, waiter="handle")
    with desk.guard, ThreadPoolExecutor() as pool:
        first = pool.submit(desk.call, "one")
        assert desk.began.wait(30)
        with desk.guard.run(SPEC, run_id="two") as run:
            handed = run.call(desk.pay, {"order": "a"}, tool="pay")
            assert (handed.next_allowed_action, handed.retry_after_ms) == ("ask_for_the_operation", None)
            assert handed.operation_id is not None
            found = run.operation(handed.operation_id)
            assert found is not None
            assert found.state is OperationState.EXECUTING
            desk.ends.set()
            first.result()
            found = run.operation(handed.operation_id)
            assert found is not None
            assert found.state is OperationState.COMMITTED
            assert run.operation("op_none") is None
    assert desk.calls == ["a"]


def test_so_many_wait_for_one_operation_and_no_more() -> None:
    waiters = Waiters()
    places = [waiters.one_more("op") for _ in range(WAITERS_MAX + 1)]
    admitted = [place.__enter__() for place in places]
    assert admitted == [True] * WAITERS_MAX + [False]
    with waiters.one_more("another") as other:
        assert other
    for place in places:
        place.__exit__(None, None, None)
    with waiters.one_more("op") as free:
        assert free
