"""SQLite's errors as the store's own. Rule: what is not understood means that nothing may go ahead."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

import apsw

from endstop.errors import (
    CommitUnknownError,
    StoreCorruptError,
    StoreError,
    StoreFullError,
    StoreUnavailableError,
)  # fmt: skip

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["commit_fault", "mapped", "store_fault"]

_FULL = (apsw.FullError, apsw.TooBigError)
_CORRUPT = (apsw.CorruptError, apsw.NotADBError, apsw.FormatError, apsw.ConstraintError, apsw.MismatchError)


def store_fault(error: Exception, doing: str) -> StoreError:
    """The store error for what SQLite or the file system said while `doing` something; nothing was written."""
    said = f"{type(error).__name__.removesuffix('Error')}: {error}"
    if isinstance(error, _FULL):
        return StoreFullError(f"{doing}: the disk or the store's quota is full ({said}); make room and try again")
    if isinstance(error, _CORRUPT):
        return StoreCorruptError(
            f"{doing}: the store's records are unreadable or contradict each other ({said}); "
            "restore it from a backup, and let no agent write meanwhile"
        )
    if isinstance(error, apsw.BusyError | apsw.LockedError):
        return StoreUnavailableError(f"{doing}: another process holds the store ({said}); try again, or end it")
    return StoreUnavailableError(f"{doing}: the store cannot be used ({said}); check its file, folder and disk")


def commit_fault(error: Exception) -> StoreError:
    """The store error for a failed COMMIT: only a full disk and a lock are known to have written nothing."""
    if isinstance(error, (*_FULL, apsw.BusyError, apsw.LockedError, apsw.ConstraintError)):
        return store_fault(error, "commit")
    said = f"{type(error).__name__.removesuffix('Error')}: {error}"
    return CommitUnknownError(f"commit: it may or may not be on the disk ({said}); read the records before going on")


@contextmanager
def mapped(doing: str) -> Iterator[None]:
    """Give SQLite's and the file system's errors inside the block their name here."""
    try:
        yield
    except (apsw.Error, OSError) as error:
        raise store_fault(error, doing) from error
