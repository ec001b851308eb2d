"""One process at a time starts or goes on with a run of a given id: a lock that dies with its holder.

Rule: the store knows who is inside a run, but only once somebody has entered. Two starts with one key at the same
moment would both find nobody inside; this lock lets one of them go first. The file stays; only its lock means anything.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
from typing import TYPE_CHECKING

from endstop.errors import StoreUnavailableError

if TYPE_CHECKING:
    from pathlib import Path
    from types import TracebackType

__all__ = ["Claim"]


class Claim:
    """The right of this process to carry on the run `run_id`. `folder` None: nobody else can share the store."""

    def __init__(self, folder: Path | None, run_id: str) -> None:
        name = hashlib.sha256(run_id.encode()).hexdigest()[:32]
        self._path = None if folder is None else folder / f"run-{name}.claim"
        self._descriptor: int | None = None
        self.is_ours = self._path is None

    def __enter__(self) -> Claim:
        if self._path is not None:
            try:
                self._descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
                fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                self.is_ours = True
            except OSError as error:
                if error.errno not in (errno.EACCES, errno.EAGAIN):
                    msg = f"the lock of this run cannot be taken: {error.strerror}; nothing was started"
                    raise StoreUnavailableError(msg) from error
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            os.close(descriptor)
