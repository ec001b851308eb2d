"""The sequencer: it gives each committed entry its position, 0, 1, 2, ... without a gap.

Entries are written with the change they record, and wait in the outbox. Whoever holds one advisory lock of a
transaction moves them on; the lock falls when that transaction ends, however it ends, and the next one takes over.
Every process tries after its commits, and a reader does it before it reads, so that he sees all that was acknowledged.
Two entries of one run keep their order: the second one's outbox row is made while its run is held, after the first
one's commit.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Final, cast

import psycopg

from endstop.errors import EndstopError
from endstop.store.postgres.faults import mapped
from endstop.store.postgres.statements import LOCK_SPACE, settings, sql

if TYPE_CHECKING:
    from endstop.store.postgres.link import Link

__all__ = ["Sequencer"]

OUTBOX_ROWS_MAX: Final = 500  # a transaction's worth
GATHER_MS: Final = 50  # what comes meanwhile is moved together
AGAIN_MS: Final = 1_000  # when another process is the sequencer, or the database is away


class Sequencer:
    """One thread that moves this process's entries on soon after they were written."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self._wanted = threading.Event()
        self._closing = threading.Event()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    def wake(self) -> None:
        """Entries were written."""
        self._wanted.set()
        if self._thread is None:
            self._start()

    def _start(self) -> None:
        with self._lock:
            if self._thread is None and not self._closing.is_set():
                self._thread = threading.Thread(target=self._loop, name="endstop-sequencer", daemon=True)
                self._thread.start()

    def catch_up(self) -> None:
        """Give every entry that is committed now its position; wait for another sequencer. Raises StoreError."""
        with mapped("sequence the ledger"):
            self._link.ask(_move_all)

    def close(self) -> None:
        """End the thread, then move what is left, if nobody else does it."""
        self._closing.set()
        self._wanted.set()
        with self._lock:
            thread = self._thread
        if thread is None:
            return
        thread.join()
        self._try()

    def _loop(self) -> None:
        while True:
            self._wanted.wait()
            self._closing.wait(GATHER_MS / 1_000)
            # Cleared before it is asked: whoever closes sets `closing` first, so one of the two is seen.
            self._wanted.clear()
            if self._closing.is_set():
                return
            if not self._try():
                self._wanted.set()
                self._closing.wait(AGAIN_MS / 1_000)

    def _try(self) -> bool:
        """Move what there is; False when somebody else is at it or the database is away: nothing is lost by that."""
        try:
            with mapped("sequence the ledger"), self._link.pooled() as connection:
                moved = OUTBOX_ROWS_MAX
                while moved == OUTBOX_ROWS_MAX:
                    moved = _move(connection, wait=False)
        except EndstopError:
            return False
        return moved >= 0


def _move_all(connection: psycopg.Connection) -> None:
    while _true(connection, "has_outbox"):
        if _move(connection, wait=True) < OUTBOX_ROWS_MAX:
            return


def _true(connection: psycopg.Connection, name: str) -> bool:
    return cast("tuple[bool]", connection.execute(sql(name), settings()).fetchone())[0]


def _move(connection: psycopg.Connection, *, wait: bool) -> int:
    """One transaction of the sequencer: how many outbox rows it took, -1 when another one is at work."""
    connection.execute(sql("begin"))
    try:
        connection.execute(sql("bound"), settings())
        if wait:
            connection.execute(sql("gate_sequencer"), {"space": LOCK_SPACE})
        elif not _true(connection, "try_gate_sequencer"):
            connection.execute(b"ROLLBACK")
            return -1
        moved = cast("tuple[int]", connection.execute(sql("sequence"), {"many": OUTBOX_ROWS_MAX}).fetchone())[0]
        connection.execute(b"COMMIT")
    except BaseException:
        if not connection.closed:
            connection.execute(b"ROLLBACK")
        raise
    return moved
