"""Crashes, zombies and races of real processes: every order is paid exactly once, and none is lost."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import endstop as es
from endstop.core.transitions import OperationState
from tests.operations.scenes import STORES, states
from tests.operations.worker import Folder
from tests.runtime.scenes import SPEC

REPOSITORY = Path(__file__).resolve().parents[2]
WAIT_S = 120
SHARED = sorted(name for name in STORES if name != "memory")
pytestmark = pytest.mark.slow


class World:
    """One store that processes share, one target, and the processes that were started."""

    def __init__(self, kind: str, folder: Path) -> None:
        self.url = STORES[kind](folder)
        self.target = Folder(folder / "target")
        self.target.place.mkdir()
        self.processes: list[subprocess.Popen[str]] = []

    def start(self, mode: str, *arguments: str) -> subprocess.Popen[str]:
        package = str(Path(es.__file__).resolve().parents[1])
        command = [sys.executable, "-m", "tests.operations.worker", mode, self.url, str(self.target.place), *arguments]
        process = subprocess.Popen(
            command, cwd=REPOSITORY, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            env={**os.environ, "PYTHONPATH": package, "PYTHONDONTWRITEBYTECODE": "1"},
        )  # fmt: skip
        self.processes.append(process)
        return process

    def open(self, **more: object) -> es.Guard:
        return es.open(self.url, policy=self.target.policy(**more))

    def pay(self, guard: es.Guard, order: str, run_id: str) -> es.ToolResult[object]:
        with guard.run(SPEC, run_id=run_id) as run:
            return run.call(self.target.pay, {"order": order}, tool="pay")

    def close(self) -> None:
        for process in self.processes:
            if process.poll() is None:
                process.send_signal(signal.SIGCONT)
                process.kill()
            process.communicate(timeout=WAIT_S)


def heard(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def tell(process: subprocess.Popen[str]) -> None:
    assert process.stdin is not None
    process.stdin.write("go on\n")
    process.stdin.flush()


@pytest.fixture(params=SHARED)
def world(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[World]:
    found = World(request.param, tmp_path)
    yield found
    found.close()


# -- One crash, at each point where it may fall

POINTS = {
    "F01 before the claim": ("before ReserveCall", None, False),
    "F02 between claim and dispatch": ("after ReserveCall", OperationState.EXECUTING, False),
    "F02 in the tool, before the effect": ("before the effect", OperationState.EXECUTING, False),
    "F03 between effect and result": ("after the effect", OperationState.EXECUTING, True),
    "F03 before the result's commit": ("before SettleCall", OperationState.EXECUTING, True),
    "F06 after the commit, before the return": ("after SettleCall", OperationState.COMMITTED, True),
    "F06 after the return": ("after the call", OperationState.COMMITTED, True),
}


@pytest.mark.parametrize("name", POINTS)
def test_a_crash_leaves_one_effect_wherever_it_falls(world: World, name: str) -> None:
    point, left, applied = POINTS[name]
    victim = world.start("dies", point)
    assert victim.wait(WAIT_S) == -signal.SIGKILL
    assert world.target.effects("a") == int(applied)
    with world.open() as guard:
        assert states(guard) == ([] if left is None else [left])
        result = world.pay(guard, "a", "next")
        assert (result.value, result.replayed) == ("paid a", applied)
        assert states(guard) == [OperationState.COMMITTED]
        assert world.pay(guard, "a", "later").replayed
    assert world.target.effects("a") == 1


@pytest.mark.parametrize("name", ["F02 between claim and dispatch", "F03 between effect and result"])
def test_f04_without_a_probe_a_crash_blocks_its_key_and_no_other(world: World, name: str) -> None:
    point, _, applied = POINTS[name]
    assert world.start("dies", point).wait(WAIT_S) == -signal.SIGKILL
    with world.open(probe=None) as guard:
        assert world.pay(guard, "a", "next").reason is es.Reason.OUTCOME_UNKNOWN
        guard.reconcile()
        assert states(guard) == [OperationState.MANUAL]
        assert world.pay(guard, "a", "again").reason is es.Reason.OUTCOME_UNKNOWN
        assert world.pay(guard, "b", "other").value == "paid b"
        # A person looks at the target; the dead worker is proof enough that nothing comes after.
        operation = next(item for item in guard.operations() if item.state is OperationState.MANUAL)
        guard.settle_operation(
            operation.operation_id, outcome="applied" if applied else "not_applied", reason="looked", evidence="file"
        )
        assert world.pay(guard, "a", "last").replayed is applied
    assert (world.target.effects("a"), world.target.effects("b")) == (1, 1)


# -- The field's own acceptance tests


def test_after_a_restart_the_same_key_gives_the_stored_result_and_the_tool_is_not_called(world: World) -> None:
    for number, expected in enumerate(("executed", "replayed", "replayed")):
        process = world.start("pays", "a", f"run-{number}")
        assert heard(process) == "ready"
        tell(process)
        assert heard(process) == expected
        assert process.wait(WAIT_S) == 0
    assert world.target.effects("a") == 1


@pytest.mark.parametrize("count", [2, 8])
def test_c01_workers_that_get_one_key_at_the_same_moment_execute_it_once(world: World, count: int) -> None:
    with world.open():
        pass
    workers = [world.start("pays", "a", f"run-{number}") for number in range(count)]
    assert [heard(worker) for worker in workers] == ["ready"] * count
    for worker in workers:
        tell(worker)
    said = sorted(heard(worker) for worker in workers)
    assert said.count("executed") == 1
    assert set(said) <= {"executed", "replayed", "in_progress"}
    assert world.target.effects("a") == 1


# -- Zombies


def test_z01_a_stopped_worker_keeps_its_key_and_its_effect_comes_once(world: World) -> None:
    sleeper = world.start("sleeps", "a")
    assert heard(sleeper) == "in the tool"
    sleeper.send_signal(signal.SIGSTOP)
    with world.open() as guard:
        assert world.pay(guard, "a", "second").reason is es.Reason.IN_PROGRESS
        assert guard.reconcile().probes == ()
        assert states(guard) == [OperationState.EXECUTING]
        assert world.target.effects("a") == 0
        sleeper.send_signal(signal.SIGCONT)
        tell(sleeper)
        assert heard(sleeper) == "paid a"
        assert sleeper.wait(WAIT_S) == 0
        assert world.pay(guard, "a", "third").replayed
    assert world.target.effects("a") == 1


def test_a_stopped_worker_that_is_killed_gives_its_key_up(world: World) -> None:
    sleeper = world.start("sleeps", "a")
    assert heard(sleeper) == "in the tool"
    sleeper.send_signal(signal.SIGSTOP)
    sleeper.kill()
    sleeper.wait(WAIT_S)
    with world.open() as guard:
        assert world.pay(guard, "a", "second").value == "paid a"
    assert world.target.effects("a") == 1


# -- Storms


class Storm:
    """Workers that are killed after a few calls each and started again, until enough were killed."""

    def __init__(self, world: World, *, keys: int, kills: int, workers: int, pause_ms: int, calls_max: int) -> None:
        self.world, self.keys, self.kills_wanted = world, keys, kills
        self.pause_ms, self.calls_max = pause_ms, calls_max
        self.kills = self.done = 0
        self.failed: list[int] = []
        self._lock = threading.Lock()
        self._threads = [threading.Thread(target=self._keep_going, args=(number,)) for number in range(workers)]

    def run(self) -> None:
        for thread in self._threads:
            thread.start()
        for thread in self._threads:
            thread.join()

    def _keep_going(self, number: int) -> None:
        chance = random.Random(number)
        while True:
            process = self.world.start("storm", str(self.keys), str(self.pause_ms))
            calls = chance.randint(1, self.calls_max)
            while calls and heard(process) == "call":
                calls -= 1
            with self._lock:
                spared = self.kills >= self.kills_wanted
            if not calls and not spared:
                time.sleep(chance.random() * self.pause_ms * 2 / 1_000)  # somewhere in its call
                process.kill()
            process.communicate(timeout=10 * WAIT_S)
            with self._lock:
                if process.returncode == -signal.SIGKILL:
                    self.kills += 1
                    continue
                self.done += 1
                if process.returncode:
                    self.failed.append(process.returncode)
                return


def check_storm(world: World, storm: Storm) -> None:
    storm.run()
    assert storm.failed == []
    assert storm.done
    wrong = {}
    for number in range(storm.keys):
        effects = world.target.effects(f"order-{number}")
        if effects != 1:
            wrong[number] = effects
    assert wrong == {}, f"orders with another number of effects than one, after {storm.kills} kills"
    with world.open() as guard:
        found = guard.operations(limit=10_000)
        assert len(found) == storm.keys
        assert {item.state for item in found} == {OperationState.COMMITTED}
        assert guard.reconcile().in_doubt == ()
    assert storm.kills >= storm.kills_wanted


def test_f07_a_small_storm_of_kills_leaves_exactly_one_effect_a_key(world: World) -> None:
    check_storm(world, Storm(world, keys=60, kills=12, workers=3, pause_ms=4, calls_max=8))


@pytest.mark.storm
def test_f07_a_storm_of_two_hundred_kills_over_a_thousand_keys(world: World) -> None:
    check_storm(world, Storm(world, keys=1_000, kills=200, workers=4, pause_ms=6, calls_max=12))
