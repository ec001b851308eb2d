"""What the runtime's tests share: a spec, a clock that stands still, and ways to open one store more than once."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

import endstop as es
from endstop.runtime.guard import Guard

SPEC = es.Spec(what_it_does="tidies the list", what_it_does_not="deletes nothing", done_looks_like="the list is tidy")
WIDE = es.Limits(
    steps_max=10_000, turns_max=10_000, tokens_max=10**9, wall_ms_max=10**9, retries_max=1_000, handoffs_max=1_000
)
WRITE = es.ToolPolicy(effect="write", idempotency_key="{key}")
READ = es.ToolPolicy(effect="read")


class StillClock:
    """Time passes only when somebody sleeps or says so."""

    def __init__(self, now_us: int = 1_900_000_000_000_000) -> None:
        self._now_us = now_us
        self._lock = threading.Lock()

    def now_us(self) -> int:
        with self._lock:
            return self._now_us

    def sleep_ms(self, duration_ms: int) -> None:
        self.pass_ms(duration_ms)

    def pass_ms(self, duration_ms: int) -> None:
        with self._lock:
            self._now_us += duration_ms * 1_000


@dataclass(slots=True)
class Scene:
    """One store. `open` gives a guard on it; a store in memory has one guard only, which is given again."""

    kind: str
    folder: Path
    guards: list[Guard] = field(default_factory=list)

    @property
    def url(self) -> str:
        return "memory:" if self.kind == "memory" else f"sqlite:///{self.folder}/state.db"

    def open(self, policy: es.Policy | None = None, **more: Any) -> Guard:
        guard = es.open(self.url, policy=policy or es.Policy(limits=WIDE), **more)
        self.guards.append(guard)
        return guard

    def another(self, guard: Guard) -> Guard:
        """A second guard on the same store, as another process would have it."""
        if self.kind == "memory":
            second = Guard(guard.store, policy=guard.policy, clock=guard.world.clock, ids=guard.ids)
        else:
            second = es.open(self.url, policy=guard.policy, clock=guard.world.clock)
        self.guards.append(second)
        return second

    def close(self) -> None:
        for guard in self.guards:
            guard.close()


def counting(answer: object = "ok") -> tuple[Callable[..., object], list[dict[str, object]]]:
    """A tool that notes how it was called, and its notes. `answer` may be a function of the call's number."""
    calls: list[dict[str, object]] = []
    numbers = itertools.count(1)

    def tool(**args: object) -> object:
        calls.append(args)
        return answer(next(numbers)) if callable(answer) else answer

    return tool, calls


@dataclass(slots=True)
class Stopped:
    """What came out of a block that was stopped. `value` is there once the block was left."""

    error: es.RunStopped | None = None

    @property
    def value(self) -> es.RunStopped:
        assert self.error is not None
        return self.error

    @property
    def envelope(self) -> es.Envelope:
        return self.value.envelope


@contextmanager
def stops(reason: str | None = None) -> Iterator[Stopped]:
    """The block ends with RunStopped, for `reason` where one is given."""
    stopped = Stopped()
    try:
        yield stopped
    except es.RunStopped as error:
        stopped.error = error
    if stopped.error is None:
        pytest.fail("the run was not stopped")
    assert reason in (None, stopped.envelope.terminal_reason)
