"""Files that a model may name: always inside one folder, read with a size limit, replaced whole or not at all."""

from __future__ import annotations

import os
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from endstop_examples.refusals import InputRefusedError, shown

if sys.platform != "win32":
    import fcntl

NAME_CHARS_MAX = 240

# flock belongs to an open file, not to a thread, but two threads each opening the file still exclude each other.
# The lock below does the same where flock does not exist.
_IN_PROCESS = threading.Lock()


def folder_from_environment(variable: str, default: str) -> Path:
    """The folder that the environment variable names, or `default`; a relative one starts at the working folder."""
    return Path(os.environ.get(variable) or default)


def inside(root: Path, name: str) -> Path:
    """The file that `name` means below `root`, symbolic links followed.

    Raises InputRefusedError for an absolute name, an empty or overlong one, and any name whose real place is not
    below `root`. The file need not exist.
    """
    if not name.strip() or len(name) > NAME_CHARS_MAX or not name.isprintable():
        msg = f"file name refused: it must be 1 to {NAME_CHARS_MAX} printable characters"
        raise InputRefusedError(msg)
    base = root.resolve()
    candidate = (base / name).resolve()
    if Path(name).is_absolute() or candidate == base or not candidate.is_relative_to(base):
        msg = f"file {shown(name)!r} refused: it is outside the allowed folder; give a relative name inside it"
        raise InputRefusedError(msg)
    return candidate


def read_limited(path: Path, *, name: str, bytes_max: int) -> bytes:
    """The bytes of a regular file. Raises InputRefusedError if it is missing, no regular file, or above the limit."""
    if not path.is_file():
        msg = f"file {shown(name)!r} refused: there is no such regular file"
        raise InputRefusedError(msg)
    with path.open("rb") as stream:
        data = stream.read(bytes_max + 1)
    if len(data) > bytes_max:
        msg = f"file {shown(name)!r} refused: it is larger than {bytes_max} bytes"
        raise InputRefusedError(msg)
    return data


def replace_file(path: Path, data: bytes) -> None:
    """Put `data` at `path`: a reader sees the old file or the new one, never a part. Parent folders are made."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=".part-")
    try:
        with os.fdopen(handle, "wb") as stream:
            stream.write(data)
            stream.flush()
            os.fsync(stream.fileno())
        Path(temporary).replace(path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold the lock that belongs to `path` (a file `<name>.lock` beside it): one writer at a time, in any process."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with _IN_PROCESS, path.with_name(path.name + ".lock").open("ab") as stream:
        if sys.platform != "win32":
            fcntl.flock(stream.fileno(), fcntl.LOCK_EX)
        yield
