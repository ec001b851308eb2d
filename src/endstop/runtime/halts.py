"""Whether a run was stopped from outside while one of its calls is under way.

Before a call the reserve transaction sees every order. During a call somebody has to look: `HaltBoard` asks the store
only when its change counter has moved, and `AsyncWatch` looks every `WATCH_MS` for all calls of one event loop.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from endstop.core.reasons import RunState
from endstop.errors import EndstopError

if TYPE_CHECKING:
    import asyncio

    from endstop.core.envelope import Envelope
    from endstop.runtime.clock import Clock
    from endstop.store.port import Store

__all__ = ["WATCH_MS", "AsyncWatch", "HaltBoard", "Watched"]

WATCH_MS: Final = 50
RUNS_KEPT_MAX: Final = 1_024
_OVER: Final = (RunState.STOPPED, RunState.COMPLETE, RunState.PAUSED)


class HaltBoard:
    """Remembers, per run, what the store said at its last change."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._lock = threading.Lock()
        self._seen: dict[str, tuple[int, Envelope | None]] = {}

    def envelope_of(self, run_id: str) -> Envelope | None:
        """The envelope of a run that is over, else None."""
        counter = self._store.change_counter()
        with self._lock:
            known = self._seen.get(run_id)
        if known is not None and known[0] == counter:
            return known[1]
        record = self._store.run(run_id).result()
        envelope = record.envelope if record is not None and record.state in _OVER else None
        with self._lock:
            self._seen.pop(run_id, None)
            self._seen[run_id] = (counter, envelope)
            if len(self._seen) > RUNS_KEPT_MAX:
                del self._seen[next(iter(self._seen))]
        return envelope


@dataclass(slots=True)
class Watched:
    """One watched task: `halted` when its run was stopped, `late` when its deadline passed."""

    run_id: str
    deadline_us: int | None
    halted: Envelope | None = None
    late: bool = False


class AsyncWatch:
    """Cancels the tasks of calls whose run was stopped or whose deadline has passed, in one event loop."""

    def __init__(self, halts: HaltBoard, clock: Clock) -> None:
        self._halts = halts
        self._clock = clock
        self._tasks: dict[asyncio.Future[Any], Watched] = {}
        self._watcher: asyncio.Task[None] | None = None

    def add(self, task: asyncio.Future[Any], run_id: str, deadline_us: int | None) -> None:
        """Watch `task` until `remove`."""
        self._tasks[task] = Watched(run_id, deadline_us)
        if self._watcher is None or self._watcher.done():
            import asyncio

            self._watcher = asyncio.get_running_loop().create_task(self._watch(), name="endstop-watch")

    def look(self, task: asyncio.Future[Any]) -> Watched:
        """Whether and why `task` was cancelled."""
        return self._tasks[task]

    def remove(self, task: asyncio.Future[Any]) -> None:
        """Watch `task` no longer."""
        del self._tasks[task]

    async def _watch(self) -> None:
        import asyncio

        while self._tasks:
            await asyncio.sleep(WATCH_MS / 1_000)  # noqa: TID251  # the event loop's own timer, not a clock to decide by
            now_us = self._clock.now_us()
            for task, watched in list(self._tasks.items()):
                if task.done() or watched.halted is not None or watched.late:
                    continue
                if watched.deadline_us is not None and now_us >= watched.deadline_us:
                    watched.late = True
                    task.cancel()
                    continue
                try:
                    watched.halted = self._halts.envelope_of(watched.run_id)
                except EndstopError:
                    # The store does not answer now. Deadlines hold all the same, and the next look asks again.
                    continue
                if watched.halted is not None:
                    task.cancel()
