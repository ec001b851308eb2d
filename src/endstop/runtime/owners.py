"""Who is alive: each worker instance holds a record lock on its own file for as long as it lives.

A lock that another process can take proves that its owner is dead, without clocks and without heartbeats. POSIX record
locks are not inherited by forked children, and a process loses them when it opens and closes the file again; so the
file is private, opened once, never reopened, and a forked child makes a new worker of its own.
"""

from __future__ import annotations

import errno
import fcntl
import os
import threading
from pathlib import Path
from typing import TYPE_CHECKING

from endstop.errors import StoreUnavailableError

if TYPE_CHECKING:
    from collections.abc import Callable

    from endstop.runtime.clock import Ids

__all__ = ["Worker", "WorkerBoard"]

_local_lock = threading.Lock()
_local_owners: set[str] = set()


def _after_fork() -> None:
    """A forked child is no owner, whatever its parent was; the parent's threads may have held the lock."""
    global _local_lock  # noqa: PLW0603  # a lock that was taken at the fork is never given back in the child
    _local_lock = threading.Lock()
    _local_owners.clear()


os.register_at_fork(after_in_child=_after_fork)


class Worker:
    """This process as one owner of calls. `close` gives the lock back; so does the end of the process."""

    def __init__(self, board: WorkerBoard, ids: Ids) -> None:
        self.owner_id = ids.new_id()
        self.pid = os.getpid()
        self._path = board.path_of(self.owner_id)
        self._descriptor: int | None = None
        if self._path is not None:
            try:
                self._descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
                fcntl.lockf(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                msg = f"this worker's lock file cannot be made: {error.strerror}; nothing was started"
                raise StoreUnavailableError(msg) from error
        with _local_lock:
            _local_owners.add(self.owner_id)

    def close(self) -> None:
        """Stop being an owner. The file goes too, unless this is a forked child of its maker."""
        with _local_lock:
            _local_owners.discard(self.owner_id)
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None and os.getpid() == self.pid:
            if self._path is not None:
                self._path.unlink(missing_ok=True)
            os.close(descriptor)


class WorkerBoard:
    """Tells living owners from dead ones. `folder` None means that only this process can be an owner.

    `ask` is for stores that many machines share: it says whether an owner of another process lives, None when the lock
    files know better.
    """

    def __init__(self, folder: Path | None, ask: Callable[[str], bool | None] | None = None) -> None:
        self._folder = folder
        self._ask = ask
        if folder is not None:
            try:
                folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            except OSError as error:
                msg = f"the workers' lock folder {folder.name} cannot be made: {error.strerror}"
                raise StoreUnavailableError(msg) from error

    def path_of(self, owner_id: str) -> Path | None:
        """The owner's lock file."""
        return None if self._folder is None else self._folder / f"{owner_id}.lock"

    def is_alive(self, owner_id: str) -> bool:
        """Whether the owner's process still holds its lock. An owner without a file is dead.

        A member of a worker (`WORKER.N`, one a run that it entered) lives as long as its worker.
        """
        owner_id = owner_id.partition(".")[0]
        with _local_lock:
            if owner_id in _local_owners:
                return True
        leased = None if self._ask is None else self._ask(owner_id)
        if leased is not None:
            return leased
        path = self.path_of(owner_id)
        if path is None:
            return False
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except FileNotFoundError:
            return False
        except OSError as error:
            msg = f"the lock file of worker {owner_id} cannot be opened: {error.strerror}; its calls stay in progress"
            raise StoreUnavailableError(msg) from error
        try:
            fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # Ids are never used again, so a dead owner's file says no more than a missing one.
            path.unlink(missing_ok=True)
        except OSError as error:
            if error.errno in (errno.EACCES, errno.EAGAIN):
                return True
            msg = f"the lock file of worker {owner_id} cannot be asked: {error.strerror}; its calls stay in progress"
            raise StoreUnavailableError(msg) from error
        finally:
            os.close(descriptor)
        return False

    def dead_of(self, owners: tuple[str, ...]) -> frozenset[str]:
        """Those of `owners` that are dead."""
        return frozenset(owner for owner in owners if not self.is_alive(owner))
