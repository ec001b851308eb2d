"""PostgreSQL's errors as the store's own. Rule: what is not understood means that nothing may go ahead.

`is_lost` is the line that matters: behind it the answer to a COMMIT may be missing, and only reading back tells.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

import psycopg
from psycopg_pool import PoolClosed, PoolTimeout, TooManyRequests

from endstop.errors import (
    EndstopError,
    GuardClosedError,
    SchemaVersionError,
    StoreCorruptError,
    StoreError,
    StoreFullError,
    StoreUnavailableError,
    UsageError,
)  # fmt: skip

__all__ = [
    "CONFLICT", "OTHER_ISOLATION", "UNKNOWN_WRITER", "StaleError", "is_lost", "is_stale", "mapped", "store_fault",
]  # fmt: skip

CONFLICT: Final = "ES001"  # raised by endstop.save_batch: a row was not as it had been read
_APPEND_ONLY: Final = "ES002"
UNKNOWN_WRITER: Final = "ES003"  # raised there too: the writer's row was cleared away
# Another transaction was first: the same work, done again on what stands now, may well succeed.
OTHER_ISOLATION: Final = "ES004"  # raised by endstop.commit_batch: a statement of its own sees one state here
_STALE: Final = frozenset({CONFLICT, OTHER_ISOLATION, "40001", "40P01", "23505"})
_LOCKED: Final = frozenset({"55P03", "57014", "25P03"})
_FULL: Final = frozenset({"53100", "53200", "53400"})
_UNFIT: Final = frozenset({"22021", "22P05", "22P02", "22003", "22001"})
_SCHEMA: Final = frozenset({"42P01", "42703", "42883", "3F000"})


class StaleError(Exception):
    """Inside the store only: nothing was written, and the same work may be tried again at once."""


def is_lost(error: psycopg.Error, connection: psycopg.Connection) -> bool:
    """Whether the connection is gone, so that nobody said what became of the last statement."""
    state = error.sqlstate or ""
    return connection.closed or state.startswith("57P") or (state.startswith("08") or (not state and _broke(error)))


def _broke(error: psycopg.Error) -> bool:
    return isinstance(error, psycopg.OperationalError)


def is_stale(error: psycopg.Error) -> bool:
    """Whether another transaction was first."""
    return error.sqlstate in _STALE


def store_fault(error: Exception, doing: str) -> EndstopError:
    """The error for what PostgreSQL or the network said while `doing` something; nothing was written."""
    state = getattr(error, "sqlstate", None) or ""
    said = f"{type(error).__name__}{f' {state}' if state else ''}"
    if isinstance(error, PoolClosed):
        return GuardClosedError("the store was closed: open it again")
    if isinstance(error, PoolTimeout | TooManyRequests):
        return StoreUnavailableError(f"{doing}: no connection to PostgreSQL in time ({said}); check the server")
    if state in _FULL:
        return StoreFullError(f"{doing}: the server has no room left ({said}); make room and try again")
    if state in _LOCKED:
        return StoreUnavailableError(f"{doing}: another worker held the records too long ({said}); try again")
    if state in _SCHEMA:
        return SchemaVersionError(f"{doing}: the database lacks tables that this code knows ({said}); upgrade it")
    if state in _UNFIT or isinstance(error, UnicodeEncodeError) or (not state and isinstance(error, psycopg.DataError)):
        return UsageError(f"{doing}: a name or text has characters or a size that PostgreSQL cannot keep ({said})")
    if state == _APPEND_ONLY or state.startswith(("XX", "22", "23")):
        return StoreCorruptError(
            f"{doing}: the store's records are unreadable or contradict each other ({said}); "
            "restore it from a backup, and let no agent write meanwhile"
        )
    if state == "42501":
        return StoreUnavailableError(f"{doing}: this role may not do that ({said}); grant it the role endstop_app")
    return StoreUnavailableError(f"{doing}: PostgreSQL cannot be used ({said}); check the server and the network")


@contextmanager
def mapped(doing: str) -> Iterator[None]:
    """Give the driver's and the network's errors inside the block their name here."""
    try:
        yield
    except StoreError:
        raise
    except (psycopg.Error, PoolTimeout, PoolClosed, TooManyRequests, OSError, UnicodeEncodeError) as error:
        raise store_fault(error, doing) from error
