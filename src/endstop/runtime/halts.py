"""Whether a run was stopped from outside while one of its calls is under way.

Before a call the reserve transaction sees every order. During a call somebody has to look: `HaltBoard` asks the store
only when its change counter has moved, and `AsyncWatch` looks every `WATCH_MS` for all calls of one event loop.
"""

from __future__ import annotations

import threading
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from endstop.errors import EndstopError

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Collection

    from endstop.core.envelope import Envelope
    from endstop.runtime.clock import Clock
    from endstop.store.port import Store

__all__ = ["WATCH_MS", "AsyncWatch", "HaltBoard", "Watched"]

WATCH_MS: Final = 50
RUNS_KEPT_MAX: Final = 1_024


class HaltBoard:
    """Remembers, per run, what the store said at its last change."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._lock = threading.Lock()
        self._seen: dict[str, tuple[int, Envelope | None]] = {}

    def envelope_of(self, run_id: str) -> Envelope | None:
        """The envelope of a run that is over, else None."""
        return self.endings((run_id,)).get(run_id)

    def endings(self, run_ids: Collection[str]) -> dict[str, Envelope]:
        """Of these runs, those that are over, by id. One read for all of which the store may have news."""
        counter, seen = self._store.change_counter(), self._seen
        with self._lock:
            known = {run_id: seen[run_id][1] for run_id in run_ids if run_id in seen and seen[run_id][0] == counter}
        asked = [run_id for run_id in run_ids if run_id not in known]
        if asked:
            found = self._store.endings(asked).result()
            with self._lock:
                for run_id in asked:
                    known[run_id] = found.get(run_id)
                    seen.pop(run_id, None)
                    seen[run_id] = (counter, known[run_id])
                while len(seen) > RUNS_KEPT_MAX:
                    del seen[next(iter(seen))]
        return {run_id: envelope for run_id, envelope in known.items() if envelope is not None}


@dataclass(slots=True, eq=False)
class Watched:
    """One watched call in its task: `halted` when its run was stopped, `late` when its deadline passed.

    A call that `finishes` runs in a thread, which nobody can cancel: the tool sees the stop in `current().cancelled`,
    and its outcome is waited for until the deadline.
    """

    task: asyncio.Task[Any]
    run_id: str
    deadline_us: int | None
    finishes: bool = False
    halted: Envelope | None = None
    late: bool = False

    @property
    def cut(self) -> bool:
        """Whether its task was cancelled for it."""
        return self.late or self.halted is not None


class AsyncWatch:
    """Cancels the tasks of calls whose run was stopped or whose deadline has passed, in one event loop."""

    def __init__(self, halts: HaltBoard, clock: Clock) -> None:
        self._halts = halts
        self._clock = clock
        self._calls: set[Watched] = set()
        self._watcher: asyncio.Task[None] | None = None

    def add(self, call: Watched) -> None:
        """Watch `call` until `remove`."""
        self._calls.add(call)
        if self._watcher is None or self._watcher.done():
            import asyncio

            self._watcher = asyncio.get_running_loop().create_task(self._watch(), name="endstop-watch")

    def remove(self, call: Watched) -> None:
        """Watch `call` no longer."""
        self._calls.discard(call)

    async def _watch(self) -> None:
        import asyncio

        while self._calls:
            await asyncio.sleep(WATCH_MS / 1_000)  # noqa: TID251  # the event loop's own timer, not a clock to decide by
            now_us = self._clock.now_us()
            open_calls = [call for call in self._calls if not call.cut]
            with suppress(EndstopError):  # a store that does not answer now is asked again at the next look
                endings = self._halts.endings({call.run_id for call in open_calls})
                for call in open_calls:
                    call.halted = None if call.finishes else endings.get(call.run_id)
            for call in open_calls:
                call.late = call.deadline_us is not None and now_us >= call.deadline_us
                if call.cut:
                    call.task.cancel()
