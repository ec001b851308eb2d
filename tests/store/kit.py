"""What the store tests share: stores that are made in a folder of the test."""

from __future__ import annotations

import itertools
import sqlite3
from dataclasses import dataclass
from pathlib import Path

from endstop.core.records import RunTransaction
from endstop.core.steps import Step
from endstop.runtime.clock import SystemClock, SystemIds
from endstop.store.memory import MemoryStore
from endstop.store.sqlite import SqliteStore
from endstop.testing.store_samples import AddStep, new_run

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


def raw(path: Path) -> sqlite3.Connection:
    """Another program at the file, which knows nothing of the house rules."""
    return sqlite3.connect(path, isolation_level=None)


def changed_by_hand(path: Path, statement: str) -> None:
    """Another program changes the file."""
    with raw(path) as other:
        other.execute(statement)
    other.close()


def closed_with(path: Path, statement: str) -> None:
    """A closed store with one run, whose file another program has changed."""
    opened = sqlite_store(path)
    opened.open_run(new_run("a")).result()
    opened.close()
    changed_by_hand(path, statement)


def add(run_id: str = "a") -> AddStep:
    """One step more."""
    return AddStep(run_id=run_id, now_us=1)


class Held:
    """The lead of a writer, taken: what is asked for meanwhile gathers into one batch."""

    def __init__(self, store: SqliteStore) -> None:
        self._lead = store._writer._lead

    def __enter__(self) -> None:
        self._lead.acquire()

    def __exit__(self, *_: object) -> None:
        self._lead.release()


@dataclass(frozen=True, slots=True, kw_only=True)
class Break(Step[None]):
    """A step with a fault of its own: any exception, after it has changed something."""

    error: BaseException

    def apply(self, txn: RunTransaction) -> None:
        txn.append("user_input", 1, {})
        raise self.error
