"""From a store's URL to an open store. Each kind of store is loaded only when one of it is opened."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Final

from endstop.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable

    from endstop.store.port import Store

__all__ = ["open_store"]

URL_CHARS_MAX: Final = 4_096


def open_store(url: str, *, new_key: Callable[[], bytes], now_us: Callable[[], int]) -> Store:
    """Open the store that `url` names; a store that is not there yet is made.

    `sqlite:///relative/path`, `sqlite:////absolute/path` or a plain path; `postgresql://user@host:port/database`;
    `memory:` for one that ends with the process.
    `new_key` gives 32 random bytes, `now_us` the time in microseconds. Raises UsageError for anything else, and
    StoreError when the store cannot be used.
    """
    if not url or len(url) > URL_CHARS_MAX or "\0" in url:
        msg = f"a store is named by a URL of 1 to {URL_CHARS_MAX} characters, such as sqlite:///state.db or memory:"
        raise UsageError(msg)
    scheme, separator, rest = url.partition(":")
    if url == "memory:":
        from endstop.store.memory import MemoryStore

        return MemoryStore(new_key=new_key, now_us=now_us)
    if scheme in ("postgresql", "postgres"):
        return _postgres(url, new_key, now_us)
    if scheme == "sqlite":
        if not rest.startswith("///") or not rest.removeprefix("///"):
            msg = "a SQLite store is named sqlite:///relative/path or sqlite:////absolute/path"
            raise UsageError(msg)
        return _sqlite(Path(rest.removeprefix("///")), new_key, now_us)
    if separator and "/" not in scheme and rest.startswith("//"):
        msg = f"there is no store of kind {scheme[:40]!r}: use sqlite:///path, postgresql://… or memory:"
        raise UsageError(msg)
    if url == ":memory:":
        msg = "a store in SQLite's :memory: would lose its records: use memory: for tests, or a path"
        raise UsageError(msg)
    return _sqlite(Path(url), new_key, now_us)


def _sqlite(path: Path, new_key: Callable[[], bytes], now_us: Callable[[], int]) -> Store:
    from endstop.store.sqlite import SqliteStore

    return SqliteStore(path, new_key=new_key, now_us=now_us)


def _postgres(url: str, new_key: Callable[[], bytes], now_us: Callable[[], int]) -> Store:
    try:
        from endstop.store.postgres import PostgresStore
    except ModuleNotFoundError as error:
        if error.name not in ("psycopg", "psycopg_pool"):
            raise
        msg = "a PostgreSQL store needs the extra: python -m pip install 'endstop[postgres]'"
        raise UsageError(msg) from error
    return PostgresStore(url, new_key=new_key, now_us=now_us)
