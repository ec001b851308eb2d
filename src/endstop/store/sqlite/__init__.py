"""The SQLite store: one file, several processes, one writer at a time."""

from __future__ import annotations

from endstop.store.sqlite.store import SqliteStore

__all__ = ["SqliteStore"]
