"""A process of its own: `python -m tests.operations.worker MODE STORE_URL TARGET_FOLDER ARGUMENT…`.

The target is a folder: one file a key, one line an effect. Only a line is evidence; a file without one is none.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import endstop as es
from endstop.core.steps import Step
from tests.runtime.scenes import SPEC

LIMITS = es.Limits(
    steps_max=10**6, turns_max=10, wall_ms_max=10**9, retries_max=10**6, refused_streak_max=10**6, same_call_max=10**6,
    error_streak_max=10**6, no_progress_max=10**6, cycle_period_max=0,
)  # fmt: skip


class Folder:
    """The target, and what a tool and a probe do with it."""

    def __init__(self, place: Path, pause_ms: int = 0) -> None:
        self.place = place
        self._pause_ms = pause_ms
        self._chance = random.Random(os.getpid() * 1_000_003 + time.time_ns())

    def _pause(self) -> None:
        if self._pause_ms:
            time.sleep(self._chance.random() * self._pause_ms / 1_000)

    def pay(self, order: str) -> str:
        descriptor = os.open(self.place / order, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        try:
            self._pause()
            os.write(descriptor, f"{os.getpid()}\n".encode())
        finally:
            os.close(descriptor)
        self._pause()
        return f"paid {order}"

    def probe(self, request: es.ProbeRequest) -> es.ProbeAnswer:
        order = str((request.args or {})["order"])
        if self.effects(order):
            return es.ProbeAnswer.applied(f"paid {order}")
        return es.ProbeAnswer.not_applied()

    def effects(self, order: str) -> int:
        file = self.place / order
        return len(file.read_text().splitlines()) if file.exists() else 0

    def policy(self, **more: object) -> es.Policy:
        tool = es.ToolPolicy(
            **{
                "effect": "write", "idempotency_key": "{order}", "probe": self.probe, "probe_backoff_ms": 1,
                "probes_max": 1_000, "attempts_max": 1_000, **more,
            }  # type: ignore[arg-type]  # fields by name
        )  # fmt: skip
        return es.Policy(limits=LIMITS, tools={"pay": tool})


def say(word: str) -> None:
    sys.stdout.write(word + "\n")
    sys.stdout.flush()


def storm(url: str, target: Folder, count: str, pause_ms: str) -> None:
    """Pay every order, in an order of its own, until each is paid; to be killed at any moment."""
    target = Folder(target.place, int(pause_ms))
    chance = random.Random(os.getpid())
    left = [f"order-{number}" for number in range(int(count))]
    run_id = f"worker-{os.getpid()}-{time.time_ns()}"
    with es.open(url, policy=target.policy()) as guard, guard.run(SPEC, run_id=run_id) as run:
        while left:
            chance.shuffle(left)
            for order in list(left):
                say("call")
                result = run.call(target.pay, {"order": order}, tool="pay")
                if result.value == f"paid {order}":
                    left.remove(order)
        say("done")


def dies(url: str, target: Folder, point: str) -> None:
    """Die by SIGKILL at a named point of one call."""
    with es.open(url, policy=target.policy()) as guard, guard.run(SPEC, run_id="victim") as run:
        real: Callable[..., object] = guard.store.transact_now

        def watched(step: Step[object], held: list[BaseException] | None = None) -> object:
            _die_at(point, f"before {type(step).__name__}")
            answer = real(step, held)
            _die_at(point, f"after {type(step).__name__}")
            return answer

        guard.store.transact_now = watched  # type: ignore[assignment]  # a process that dies in it

        def pay(order: str) -> str:
            _die_at(point, "before the effect")
            answer = target.pay(order)
            _die_at(point, "after the effect")
            return answer

        run.call(pay, {"order": "a"}, tool="pay")
        _die_at(point, "after the call")
    say("lived")


def _die_at(point: str, here: str) -> None:
    if point == here:
        os.kill(os.getpid(), signal.SIGKILL)


def pays(url: str, target: Folder, order: str, run_id: str) -> None:
    """Wait for the word, then pay one order; say what became of it."""
    with es.open(url, policy=target.policy()) as guard, guard.run(SPEC, run_id=run_id) as run:
        say("ready")
        sys.stdin.readline()
        result = run.call(target.pay, {"order": order}, tool="pay")
        say("replayed" if result.replayed else str(result.reason or "executed"))


def sleeps(url: str, target: Folder, order: str) -> None:
    """Stop in the tool, before the effect, until somebody says to go on."""
    with es.open(url, policy=target.policy()) as guard, guard.run(SPEC, run_id="sleeper") as run:

        def pay(order: str) -> str:
            say("in the tool")
            sys.stdin.readline()
            return target.pay(order)

        say(str(run.call(pay, {"order": order}, tool="pay").value))


def main() -> None:
    mode, url, place, *rest = sys.argv[1:]
    target = Folder(Path(place))
    modes: dict[str, Callable[..., None]] = {"storm": storm, "dies": dies, "pays": pays, "sleeps": sleeps}
    modes[mode](url, target, *rest)


if __name__ == "__main__":
    main()
