"""Opening the file: the checks that stand before the first write, the first schema, and later ones.

Rules: a database that is not ours is left as it is; one that another version wrote is refused; one that is gone is
never replaced by an empty one.
"""

from __future__ import annotations

import os
import stat
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Final

import apsw

from endstop.errors import StoreCorruptError, StoreUnavailableError
from endstop.store.migrations import pending, queries
from endstop.store.sqlite.faults import mapped
from endstop.store.transact import first_entry

if TYPE_CHECKING:
    from collections.abc import Callable

    from endstop.store.sqlite.turnstile import Turnstile

__all__ = ["APPLICATION_ID", "BUSY_MS_MAX", "OpenedFile", "check_library", "connect", "open_file"]

APPLICATION_ID: Final = 0x456E6453  # "EndS"
BUSY_MS_MAX: Final = 5_000
PAGE_BYTES: Final = 2_048  # a commit writes whole pages, and a step's records are small
WAL_PAGES_MAX: Final = 8_000  # checkpoint when the log has as many
WAL_BYTES_KEPT_MAX: Final = 64 * 1024 * 1024
_FAULT_FIRST, _FAULT_LAST = 3_007_000, 3_051_002
_MENDED: Final = ((3_044_006, 3_045_000), (3_050_007, 3_051_000))


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenedFile:
    """What stands in a store's own records about itself, and the file that they were read from."""

    ledger: str
    store_key: bytes = field(repr=False)
    device: int
    inode: int


def check_library(version: int) -> None:
    """Refuse a SQLite (as a number, 3051003 for 3.51.3) that can lose commits when two connections share a log.

    https://sqlite.org/wal.html#walresetbug: 3.7.0 to 3.51.2, mended in 3.51.3, 3.50.7 and 3.44.6.
    """
    mended = any(first <= version < end for first, end in _MENDED)
    if version < _FAULT_FIRST or (version <= _FAULT_LAST and not mended):
        name = f"{version // 1_000_000}.{version // 1_000 % 1_000}.{version % 1_000}"
        msg = f"SQLite {name} can lose committed records: install an apsw that carries 3.51.3 or later"
        raise StoreUnavailableError(msg)


def connect(path: Path) -> apsw.Connection:
    """A connection to a store that is there, set up and checked. Raises StoreError when it is not durable."""
    with mapped(f"open {path.name}"):
        connection = apsw.Connection(str(path), flags=apsw.SQLITE_OPEN_READWRITE, statementcachesize=100)
    try:
        with mapped(f"open {path.name}"):
            connection.set_busy_timeout(BUSY_MS_MAX)
            for pragma in (
                "synchronous = FULL", "foreign_keys = ON", "recursive_triggers = ON", "trusted_schema = OFF",
                "cell_size_check = ON", f"wal_autocheckpoint = {WAL_PAGES_MAX}",
                f"journal_size_limit = {WAL_BYTES_KEPT_MAX}",
            ):  # fmt: skip
                connection.execute(f"PRAGMA {pragma}")
            journal = connection.execute("PRAGMA journal_mode").get
            durable = connection.execute("PRAGMA synchronous").get
        if journal != "wal" or durable != 2:  # noqa: PLR2004  # SQLite's own number for FULL
            msg = f"{path.name} is not durable here (journal {journal}, synchronous {durable}): use a local disk"
            raise StoreUnavailableError(msg)
    except BaseException:
        connection.close()
        raise
    return connection


def open_file(
    path: Path, turnstile: Turnstile, marker: Path, *, new_key: Callable[[], bytes], now_us: Callable[[], int]
) -> OpenedFile:
    """Make the store or bring it up to date, under the write lock. Gives what it knows of itself.

    `marker` is a file beside the database that names its ledger. Raises StoreCorruptError when the database is gone,
    or was never a store; SchemaVersionError when this code does not know its schema.
    """
    turnstile.enter()
    try:
        _touch(path, marker)
        with mapped(f"open {path.name}"):
            connection = apsw.Connection(str(path), flags=apsw.SQLITE_OPEN_READWRITE)
        try:
            with mapped(f"open {path.name}"):
                connection.set_busy_timeout(BUSY_MS_MAX)
                _check_ours(connection, path)
                connection.execute(f"PRAGMA page_size = {PAGE_BYTES}")  # of a new file; others stay as they are
                connection.execute("PRAGMA journal_mode = WAL").fetchall()
                connection.execute("PRAGMA synchronous = FULL")
                _migrate(connection, new_key, now_us)
                facts = {row[0]: row[1] for row in connection.execute(queries()["meta"])}
        finally:
            connection.close()
        ledger, store_key = facts.get("ledger"), facts.get("store_key")
        if not isinstance(ledger, str) or not isinstance(store_key, bytes):
            msg = f"the store {path.name} has lost its name or its key: restore it from a backup"
            raise StoreCorruptError(msg)
        with mapped(f"mark {path.name}"):
            if not marker.stat().st_size:
                marker.write_text(ledger + "\n", encoding="ascii")
            found = path.stat()
        return OpenedFile(ledger=ledger, store_key=store_key, device=found.st_dev, inode=found.st_ino)
    finally:
        turnstile.leave()


def _touch(path: Path, marker: Path) -> None:
    """Make an empty file of mode 0600 for a new store, and for no other."""
    with mapped(f"make {path.name}"):
        missing = not path.exists() or not path.stat().st_size
        if missing and marker.stat().st_size:
            msg = (
                f"the database {path.name} is gone, but {marker.name} says that it was here: restore it from a backup, "
                f"or remove {marker.name} to start a new, empty ledger"
            )
            raise StoreCorruptError(msg)
        if not path.exists():
            os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o600))
            folder = os.open(path.parent, os.O_RDONLY | os.O_CLOEXEC)
            try:
                os.fsync(folder)
            finally:
                os.close(folder)
        elif not stat.S_ISREG(path.stat().st_mode):
            msg = f"{path.name} is no file: a store is one file on a local disk"
            raise StoreUnavailableError(msg)


def _check_ours(connection: apsw.Connection, path: Path) -> None:
    application_id = connection.execute("PRAGMA application_id").get
    tables = connection.execute("SELECT count(*) FROM sqlite_schema").get
    if application_id != APPLICATION_ID and (application_id or tables):
        msg = f"{path.name} is a database of something else: it was left as it is, name another file"
        raise StoreCorruptError(msg)


def _migrate(connection: apsw.Connection, new_key: Callable[[], bytes], now_us: Callable[[], int]) -> None:
    """Bring the schema up to date in one transaction: a crash leaves the file as it was, never between two versions."""
    execute, sql = connection.execute, queries()
    fresh = execute("PRAGMA application_id").get != APPLICATION_ID
    missing = pending(0 if fresh else execute("SELECT value FROM meta WHERE name = 'schema_version'").get)
    if not missing:
        return
    execute("BEGIN IMMEDIATE")
    try:
        for migration in missing:
            execute(migration.sql)
        execute(sql["set_meta"], ("schema_version", missing[-1].version))
        if fresh:
            made_at_us, ledger = now_us(), f"endstop/{new_key()[:10].hex()}"
            facts = {"ledger": ledger, "store_key": new_key(), "created_at_us": made_at_us}
            for name, value in facts.items():
                execute(sql["set_meta"], (name, value))
            execute(sql["insert_entry"], (0, first_entry(ledger, made_at_us).decode("ascii")))
            execute(f"PRAGMA application_id = {APPLICATION_ID}")
        execute("COMMIT")
    except BaseException:
        if connection.in_transaction:
            execute("ROLLBACK")
        raise
