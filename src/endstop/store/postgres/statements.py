"""The statements of the PostgreSQL store by their name, and the numbers that all of them share."""

from __future__ import annotations

import functools
from importlib import resources
from typing import Final

from endstop.store.migrations import queries

__all__ = ["LOCK_SPACE", "settings", "sql", "text_of"]

# The first half of every advisory lock's name ("EndS"); the names of runs use the next number.
LOCK_SPACE: Final = 0x456E6453
LOCK_MS_MAX: Final = 8_000  # above IDLE_MS_MAX: a lock that a stopped process holds comes free in time
IDLE_MS_MAX: Final = 5_000
STATEMENT_MS_MAX: Final = 30_000


@functools.cache
def _all() -> dict[str, bytes]:
    return {name: text.encode() for name, text in queries("postgres/queries.sql").items()}


def sql(name: str) -> bytes:
    """One statement."""
    return _all()[name]


def settings() -> dict[str, object]:
    """What the statements that begin a transaction are given: how long it may wait, idle and work."""
    return {
        "space": LOCK_SPACE, "lock_ms": str(LOCK_MS_MAX), "statement_ms": str(STATEMENT_MS_MAX),
        "idle_ms": str(IDLE_MS_MAX),
    }  # fmt: skip


def text_of(name: str) -> bytes:
    """A whole file of statements."""
    return resources.files("endstop.store").joinpath("sql", "postgres", name).read_bytes()
