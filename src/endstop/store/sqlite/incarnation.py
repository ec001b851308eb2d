"""Whether a store file is the one that was written last: a restored or rolled-back copy is a machine for duplicates.

Beside the database, in its folder of workers' locks, stands a mark: the ledger's name, the incarnation that the file
had, and how many entries it had when somebody last committed. A file with fewer entries, of another incarnation, or
without the mark that it once had, was restored: side effects that it does not know of may have happened. Such a store
is in quarantine, which is written into it: reads and orders go on, side effects do not, until a person accepts it.

The mark is written after each commit and not forced to the disk, so it is never ahead of the file. A restore that
brings the folder back too cannot be seen.
"""

from __future__ import annotations

import os
from contextlib import suppress
from typing import TYPE_CHECKING, Final

import apsw
import orjson

from endstop.core.canonical import digest
from endstop.core.entries import entry_bytes, safe_name
from endstop.store.migrations import queries
from endstop.store.sqlite.faults import mapped
from endstop.store.workspace import GLOBAL_RUN

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

__all__ = ["MARK_NAME", "Incarnation"]

MARK_NAME: Final = "incarnation"
MARK_BYTES_MAX: Final = 1_024
COUNT_DIGITS: Final = 16
ID_CHARS: Final = 20


class Incarnation:
    """The mark of one store in this process. `quarantine` says what is wrong, or is None."""

    def __init__(self, folder: Path, ledger: str) -> None:
        self._ledger = ledger
        self._pid = os.getpid()
        with mapped(f"open {MARK_NAME}"):
            self._descriptor = os.open(folder / MARK_NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self._id = ""
        self._noted = 0
        self.quarantine: str | None = None

    # -- opening; the lock of the processes is held

    def enter(self, connection: apsw.Connection) -> None:
        """Compare file and mark, and put what was restored into quarantine."""
        with mapped("compare the store with its mark"):
            facts = {row[0]: row[1] for row in connection.execute(queries()["meta"])}
            entries = _entries(connection)
            mark = self._read()
            known = facts.get("incarnation")
            wrong = facts.get("quarantine") or _difference(self._ledger, known, entries, mark)
            if isinstance(wrong, str):
                if not facts.get("quarantine"):
                    connection.execute(queries()["set_meta"], ("quarantine", wrong))
                self.quarantine = wrong
                return
            if isinstance(known, str):
                self._id = known
            else:
                # A new file, or one from before there were marks. The mark first: a file without one is suspect.
                self._id = str(mark["incarnation"]) if mark else digest(self._ledger.encode())[:ID_CHARS]
                self._write(entries)
                connection.execute(queries()["set_meta"], ("incarnation", self._id))
            self._write(entries)

    def accept(
        self, connection: apsw.Connection, new_key: Callable[[], bytes], *, actor: str, reason: str, now_us: int
    ) -> None:
        """Take the restored file as what it is: a new incarnation, with an entry that says who and a digest of why."""
        sql, made = queries(), new_key()[:10].hex()
        with mapped("accept a restored store"):
            execute = connection.execute
            execute("BEGIN IMMEDIATE")
            try:
                leaf = entry_bytes(
                    "control", ledger=self._ledger, run_id=GLOBAL_RUN,
                    seq=_number(execute(sql["next_seq"], (GLOBAL_RUN,)).get), ts_us=now_us, actor=safe_name(actor),
                    policy="", generation=0,
                    fields={
                        "order": "accept_restore", "control": made,
                        "why": digest(reason.encode("utf-8", "replace")),
                    },
                )  # fmt: skip
                index = _number(execute(sql["next_index"]).get)
                execute(sql["insert_entry"], (index, leaf.decode("ascii")))
                execute(sql["set_meta"], ("incarnation", made))
                execute("DELETE FROM meta WHERE name = 'quarantine'")
                execute("COMMIT")
            except BaseException:
                with suppress(apsw.SQLError):  # a full disk has undone it already
                    execute("ROLLBACK")
                raise
        self._id, self.quarantine = made, None
        self._write(index + 1)

    # -- every commit; the lock of the processes is held

    def note(self, entries: int) -> None:
        """The file has so many entries now. A mark that cannot be written lags, and what is committed stays so."""
        if entries != self._noted and self.quarantine is None and os.getpid() == self._pid:
            with suppress(OSError):
                self._write(entries)

    def close(self) -> None:
        """Close the mark."""
        os.close(self._descriptor)

    # -- the file; one write of one length, so that no reader sees half of it

    def _read(self) -> dict[str, object] | None:
        data = os.pread(self._descriptor, MARK_BYTES_MAX, 0)
        if not data.strip():
            return None
        try:
            body = orjson.loads(data)
        except orjson.JSONDecodeError:
            return {}
        return body if isinstance(body, dict) else {}

    def _write(self, entries: int) -> None:
        body = {"ledger": self._ledger, "incarnation": self._id, "entries": f"{entries:0{COUNT_DIGITS}d}"}
        data = orjson.dumps(body, option=orjson.OPT_APPEND_NEWLINE)
        os.pwrite(self._descriptor, data, 0)
        self._noted = entries


def _entries(connection: apsw.Connection) -> int:
    return _number(connection.execute(queries()["next_index"]).get)


def _number(value: object) -> int:
    return value if isinstance(value, int) else 0


def _difference(ledger: str, known: object, entries: int, mark: dict[str, object] | None) -> str | None:
    """What speaks against the file being the one that was written last."""
    if mark is None:
        # A file of an incarnation had a mark beside it once.
        return "its mark is gone: the file was copied here, or its folder of locks was removed" if known else None
    if not mark or mark.get("ledger") != ledger:
        return "its mark cannot be read, or is that of another ledger"
    count = str(mark.get("entries", ""))
    if not count.isdigit() or entries < int(count):
        return f"it has {entries} entries where {count.lstrip('0') or 'some'} were written: an older copy was restored"
    if known is not None and known != mark.get("incarnation"):
        return "it is of another incarnation than the file that was written last"
    return None
