"""What the store tests share: stores that are made in a folder of the test."""

from __future__ import annotations

import itertools
from pathlib import Path

from endstop.runtime.clock import SystemClock, SystemIds
from endstop.store.memory import MemoryStore
from endstop.store.sqlite import SqliteStore

CLOCK = SystemClock()
IDS = SystemIds()


def memory_store() -> MemoryStore:
    """A new memory store."""
    return MemoryStore(new_key=IDS.new_key, now_us=CLOCK.now_us)


def sqlite_store(path: Path, *, wait_ms_max: int = 10_000) -> SqliteStore:
    """The SQLite store at `path`."""
    return SqliteStore(path, new_key=IDS.new_key, now_us=CLOCK.now_us, wait_ms_max=wait_ms_max)


class NewFiles:
    """A new SQLite store each time, in one folder."""

    def __init__(self, folder: Path) -> None:
        self._paths = (folder / f"store-{number}.db" for number in itertools.count())

    def __call__(self) -> SqliteStore:
        return sqlite_store(next(self._paths))
