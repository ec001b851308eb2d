"""A stop from outside while calls are under way: in this process, and from another one."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import pytest

import endstop as es
from endstop.core.transitions import OperationState
from endstop.errors import StoreUnavailableError
from endstop.runtime.drivers import DeadlinePassedError
from endstop.runtime.halts import WATCH_MS, HaltBoard
from tests.runtime.scenes import READ, SPEC, WIDE, WRITE, Scene, StillClock, counting, stops

CANCELLED_WITHIN_S = 0.25


def python(source: str, *arguments: str) -> subprocess.Popen[str]:
    """Run a little program that has the package at hand."""
    return subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(source), *arguments],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env={"PYTHONPATH": str(Path(es.__file__).parents[1])},
    )  # fmt: skip


def tell(process: subprocess.Popen[str]) -> None:
    """Let the program go on."""
    assert process.stdin is not None
    process.stdin.write("now\n")
    process.stdin.flush()


STOPPER = """
    import sys
    import endstop as es
    with es.open(sys.argv[1]) as guard:
        print("ready", flush=True)
        sys.stdin.readline()
        report = guard.stop(sys.argv[2], reason="from outside")
        print(",".join(tool for _, tool in report.in_flight), flush=True)
"""


def test_a_waiting_async_call_is_cancelled_within_its_time_by_another_process(file_scene: Scene) -> None:
    guard = file_scene.open(es.Policy(limits=WIDE, tools={"save": WRITE}))
    seen: dict[str, float] = {}

    async def save(key: str) -> None:
        try:
            await asyncio.sleep(30)
        except asyncio.CancelledError:
            seen["cancelled"] = time.monotonic()
            raise

    async def main() -> None:
        async with guard.run(SPEC, run_id="r1") as run:
            call = asyncio.create_task(run.acall(save, {"key": "a"}))
            while not guard.show("r1").in_flight:
                await asyncio.sleep(0.01)
            tell(stopper)
            while guard.show("r1").envelope is None:
                await asyncio.sleep(0.001)
            seen["stopped"] = time.monotonic()
            await call

    with python(STOPPER, file_scene.url, "r1") as stopper:
        assert stopper.stdout is not None
        assert stopper.stdout.readline() == "ready\n"
        with pytest.raises(es.RunStopped) as stopped:
            asyncio.run(main())
        assert stopper.stdout.readline() == "save\n"
    assert seen["cancelled"] - seen["stopped"] < CANCELLED_WITHIN_S
    assert stopped.value.envelope.message == "from outside"
    assert [operation.state for operation in guard.operations()] == [OperationState.UNKNOWN]


def test_after_another_processs_stop_no_call_is_reserved(file_scene: Scene) -> None:
    guard = file_scene.open(es.Policy(limits=WIDE, tools={"look": READ}))
    tool, calls = counting(lambda number: number)
    with pytest.raises(es.RunStopped):  # noqa: SIM117  # the run is left while the other process still lives
        with python(STOPPER, file_scene.url, "r1") as stopper, guard.run(SPEC, run_id="r1") as run:
            assert stopper.stdout is not None
            stopper.stdout.readline()
            for number in range(20):
                run.call(tool, {"n": number}, tool="look")
            tell(stopper)
            for number in range(20, 5_000):
                run.call(tool, {"n": number}, tool="look")
    # The ledger's order is the order of commits: no intent after the stop, and each call ran under an intent.
    kinds = [b'"type":"call_intent"' in entry.leaf for entry in guard.store.entries(run_id="r1", limit=10_000).result()]
    stops = [b'"type":"stop"' in entry.leaf for entry in guard.store.entries(run_id="r1", limit=10_000).result()]
    assert sum(kinds) == len(calls)
    assert not any(kinds[stops.index(True) :])


def test_two_processes_share_one_exact_cap(file_scene: Scene) -> None:
    worker = """
        import sys
        import endstop as es
        spec = es.Spec(what_it_does="a", what_it_does_not="b", done_looks_like="c")
        policy = es.Policy(limits=es.Limits(steps_max=60, turns_max=10, wall_ms_max=600_000),
                           tools={"look": es.ToolPolicy(effect="read")})
        ran = turns = 0
        with es.open(sys.argv[1], policy=policy) as guard:
            print("ready", flush=True)
            sys.stdin.readline()
            try:
                with guard.run(spec, run_id="r1") as run:
                    def look(n: str) -> str:
                        global ran
                        ran += 1
                        return n
                    for number in range(500):
                        run.call(look, {"n": f"{sys.argv[2]}-{number}"})
            except es.RunStopped as stop:
                print(ran, stop.envelope.terminal_reason, flush=True)
    """
    workers = [python(worker, file_scene.url, name) for name in ("a", "b")]
    said = []
    for process in workers:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
    for process in workers:
        tell(process)
    for process in workers:
        out, _ = process.communicate(timeout=60)
        said.append(out.split())
    assert sum(int(ran) for ran, _ in said) == 60
    assert {reason for _, reason in said} == {"step_cap"}
    with es.open(file_scene.url) as guard:
        assert guard.show("r1").counters.steps == 60


def test_a_sync_tool_sees_that_its_run_was_stopped(scene: Scene) -> None:
    guard = scene.open()
    started = threading.Event()
    seen = []

    def tool() -> str:
        started.set()
        until = time.monotonic() + 20
        while not es.current().cancelled and time.monotonic() < until:
            time.sleep(0.002)
        seen.append(es.current().cancelled)
        return "gave up"

    def work() -> None:
        with stops(), guard.run(SPEC, run_id="r1") as run:
            run.call(tool)

    thread = threading.Thread(target=work)
    thread.start()
    assert started.wait(10)
    report = scene.another(guard).stop("r1", reason="enough", wait_ms=10_000)
    assert [tool for _, tool in report.in_flight] == ["tool"]
    assert not report.already
    # The wait is over when what was in flight has settled.
    assert guard.show("r1").in_flight == ()
    thread.join()
    assert seen == [True]
    assert guard.stop("r1").already


def test_a_wait_for_calls_in_flight_has_its_end(scene: Scene) -> None:
    clock = StillClock()
    guard = scene.open(clock=clock)
    started, go = threading.Event(), threading.Event()

    def tool() -> None:
        started.set()
        go.wait(20)

    def work() -> None:
        with stops(), guard.run(SPEC, run_id="r1") as run:
            run.call(tool)

    thread = threading.Thread(target=work)
    thread.start()
    assert started.wait(10)
    before_us = clock.now_us()
    report = guard.stop("r1", wait_ms=500)
    assert clock.now_us() - before_us == 500_000
    assert len(report.in_flight) == 1
    go.set()
    thread.join()


def test_a_sync_tool_in_an_async_call_is_not_waited_for_and_stays_in_doubt(scene: Scene) -> None:
    guard = scene.open(es.Policy(limits=WIDE, tools={"save": WRITE}))
    go = threading.Event()

    def save(key: str) -> None:
        go.wait(20)

    async def main() -> None:
        async with guard.run(SPEC, run_id="r1") as run:
            call = asyncio.create_task(run.acall(save, {"key": "a"}))
            while not guard.show("r1").in_flight:
                await asyncio.sleep(0.01)
            guard.stop("r1")
            try:
                await asyncio.wait_for(call, 5)
            finally:
                go.set()

    with pytest.raises(es.RunStopped):
        asyncio.run(main())
    assert [operation.state for operation in guard.operations()] == [OperationState.UNKNOWN]


def test_a_model_call_in_flight_is_cancelled_too(scene: Scene) -> None:
    from endstop.runtime.drivers import watched

    guard = scene.open()

    async def main() -> None:
        async with guard.run(SPEC, run_id="r1") as run, run.model_call(output_tokens_max=7) as turn:
            asyncio.get_running_loop().call_later(0.05, guard.stop, "r1")
            await watched(run.world, asyncio.sleep(30), run.root_run_id, None)
            turn.record(input_tokens=1)

    with pytest.raises(es.RunStopped):
        asyncio.run(main())
    # Nobody knows what the cancelled call used, so it is charged what was held for it.
    assert guard.show("r1").counters.output_tokens == 7


def test_a_tool_past_its_deadline_is_cancelled_and_a_write_is_then_in_doubt(scene: Scene) -> None:
    tools = {
        "save": es.ToolPolicy(effect="write", idempotency_key="{key}", deadline_ms=30),
        "look": es.ToolPolicy(effect="read", deadline_ms=30),
    }
    guard = scene.open(es.Policy(limits=WIDE, tools=tools))

    async def slow(key: str) -> None:
        await asyncio.sleep(30)

    async def main() -> None:
        async with guard.run(SPEC) as run:
            with pytest.raises(DeadlinePassedError):
                await run.acall(slow, {"key": "a"}, tool="look")
            with pytest.raises(es.OutcomeUnknownError):
                await run.acall(slow, {"key": "a"}, tool="save")

    asyncio.run(main())
    assert [operation.state for operation in guard.operations()] == [OperationState.UNKNOWN]


def test_a_sync_tool_sees_its_deadline_pass(scene: Scene) -> None:
    clock = StillClock()
    tools = {"look": es.ToolPolicy(effect="read", deadline_ms=30)}
    guard = scene.open(es.Policy(limits=WIDE, tools=tools), clock=clock)
    seen = []

    def look() -> str:
        for _ in range(2):
            seen.append(es.current().cancelled)
            clock.pass_ms(30)
        return "late"

    with guard.run(SPEC) as run:
        run.call(look)
    assert seen == [False, True]


def test_the_runs_own_time_is_every_calls_deadline(scene: Scene) -> None:
    clock = StillClock()
    guard = scene.open(es.Policy(limits=es.Limits(wall_ms_max=1_000)), clock=clock)
    deadlines = []
    with stops("wall_clock_cap"), guard.run(SPEC) as run:
        start_us = clock.now_us()
        clock.pass_ms(400)
        run.call(lambda: deadlines.append(es.current().deadline_us))
        clock.pass_ms(600)
        run.call(lambda: deadlines.append(0))
    assert deadlines == [start_us + 1_000_000]


def test_a_cancellation_goes_before_the_stop_that_came_with_it(scene: Scene) -> None:
    guard = scene.open()
    halted = asyncio.Event()

    async def tool() -> None:
        try:
            await asyncio.sleep(30)
        except asyncio.CancelledError:
            # The watch has cancelled the call; before it is through, so does its caller.
            halted.set()
            await asyncio.sleep(0)
            raise

    async def body() -> None:
        async with guard.run(SPEC, run_id="r1") as run:
            await run.acall(tool)

    async def main() -> None:
        task = asyncio.create_task(body())
        while guard.store.run("r1").result() is None or not guard.show("r1").in_flight:
            await asyncio.sleep(0.005)
        guard.stop("r1")
        await halted.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(main())


def test_the_watch_outlives_a_store_that_does_not_answer_for_a_while(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    guard = scene.open()
    asked = []
    real = HaltBoard.endings

    def flaky(board: HaltBoard, run_ids: set[str]) -> object:
        asked.append(run_ids)
        if len(asked) < 3:
            raise StoreUnavailableError("busy")
        return real(board, run_ids)

    monkeypatch.setattr(HaltBoard, "endings", flaky)

    async def main() -> None:
        async with guard.run(SPEC, run_id="r1") as run:
            asyncio.get_running_loop().call_later(0.02, guard.stop, "r1")
            await run.acall(lambda: asyncio.sleep(30), tool="t")

    with pytest.raises(es.RunStopped):
        asyncio.run(asyncio.wait_for(main(), 10))
    assert len(asked) >= 3
    assert WATCH_MS <= 250


def test_the_board_asks_the_store_only_after_a_change(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    guard = scene.open()
    with guard.run(SPEC, run_id="r1"):
        reads = []
        real = guard.store.endings
        monkeypatch.setattr(guard.store, "endings", lambda run_ids: reads.append(run_ids) or real(run_ids))
        board = HaltBoard(guard.store)
        for _ in range(5):
            assert board.envelope_of("r1") is None
        assert len(reads) == 1
        with guard.run(SPEC, run_id="r2"):
            pass
        reads.clear()
        board.envelope_of("r1")
        assert reads == [["r1"]]
