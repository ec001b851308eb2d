"""A fair queue of processes before the write lock.

SQLite's own waiting starves writers: each sleeps and tries again, and whoever comes by at the right moment wins. Here a
process first stands at the `turn` file, one at a time goes on to wait for the `lock` file, and only from there into
BEGIN IMMEDIATE. The kernel wakes the one who waits, and drops the locks of a process that died.

Locks are those of `flock`: they belong to the open file, so two stores of one process exclude each other too. A child
process that was forked inherits them; it closes its copies at once (`after_fork`), so that its parent's death frees
them.
"""

from __future__ import annotations

import fcntl
import os
import queue
import threading
from typing import TYPE_CHECKING, Final

from endstop.errors import StoreUnavailableError

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["WAIT_MS_MAX", "Turnstile"]

WAIT_MS_MAX: Final = 10_000
_TRY: Final = fcntl.LOCK_EX | fcntl.LOCK_NB


class Turnstile:
    """Both locks of one store in this process. One thread at a time goes through; raises OSError when it cannot."""

    def __init__(self, turn: Path, lock: Path, *, wait_ms_max: int = WAIT_MS_MAX) -> None:
        self._wait_ms_max = wait_ms_max
        self._turn = _opened(turn)
        try:
            self._lock = _opened(lock)
        except OSError:
            os.close(self._turn)
            raise
        self._open = True
        # -- the thread that waits where waiting cannot be given up, and what it is asked for
        self._waiter: threading.Thread | None = None
        self._asked: queue.SimpleQueue[threading.Event | None] = queue.SimpleQueue()
        self._mutex = threading.Lock()
        self._wanted: threading.Event | None = None
        self._standing = False  # whether the waiter is in the queue now

    def enter(self) -> None:
        """Take the write lock. Raises StoreUnavailableError after `wait_ms_max` milliseconds in the queue."""
        try:
            if self._standing or not self._try_enter():
                self._enter_slowly()
        except BaseException:
            # An interrupt must not leave this process at the turn.
            if not self._standing:
                fcntl.flock(self._turn, fcntl.LOCK_UN)
            raise

    def _try_enter(self) -> bool:
        """Go through when nobody is there. The turn is kept when somebody is inside: the waiter goes on from there."""
        if not _taken(self._turn) or not _taken(self._lock):
            return False
        fcntl.flock(self._turn, fcntl.LOCK_UN)
        return True

    def leave(self) -> None:
        """Give the write lock to the next. Does nothing when it was not taken."""
        fcntl.flock(self._lock, fcntl.LOCK_UN)

    def _enter_slowly(self) -> None:
        granted = threading.Event()
        try:
            with self._mutex:
                self._wanted = granted
                if not self._standing:
                    self._standing = True
                    self._asked.put(granted)
                if self._waiter is None:
                    self._waiter = threading.Thread(target=self._stand, name="endstop-turnstile", daemon=True)
                    self._waiter.start()
            granted.wait(self._wait_ms_max / 1_000)
        finally:
            with self._mutex:
                self._wanted = None
        if granted.is_set():
            return
        msg = (
            f"the store's write lock was held by other processes for {self._wait_ms_max} ms; nothing was written: "
            "try again, or end the process that holds it"
        )
        raise StoreUnavailableError(msg)

    def _stand(self) -> None:
        """Wait in the queue for whoever asked, and let the lock go when he gave up meanwhile."""
        while self._asked.get() is not None:
            fcntl.flock(self._turn, fcntl.LOCK_EX)
            fcntl.flock(self._lock, fcntl.LOCK_EX)
            fcntl.flock(self._turn, fcntl.LOCK_UN)
            with self._mutex:
                self._standing = False
                granted, self._wanted = self._wanted, None
                if granted is None:
                    fcntl.flock(self._lock, fcntl.LOCK_UN)
                else:
                    granted.set()

    def close(self) -> None:
        """Give up both locks."""
        self._asked.put(None)
        waiter, self._waiter = self._waiter, None
        if waiter is not None:
            waiter.join(self._wait_ms_max / 1_000)
            if waiter.is_alive():
                return  # it stands in the queue: its files go with the process
        self.after_fork()

    def after_fork(self) -> None:
        """Close this process's copies of the files."""
        if self._open:
            self._open = False
            os.close(self._turn)
            os.close(self._lock)


def _opened(path: Path) -> int:
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)


def _taken(fd: int) -> bool:
    try:
        fcntl.flock(fd, _TRY)
    except BlockingIOError:
        return False
    return True
