"""Runs as people name them: the whole id, the first letters of it, or `last`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from endstop.errors import RunNotFoundError, UsageError
from endstop.store.port import ROWS_MAX, RunQuery

if TYPE_CHECKING:
    from endstop.core.records import RunRecord
    from endstop.runtime.guard import Guard

__all__ = ["LAST", "find_run", "root_id"]

LAST: Final = "last"
PREFIX_CHARS_MIN: Final = 6
SHOWN_MAX: Final = 5


def find_run(guard: Guard, named: str) -> RunRecord:
    """The run called `named`, as it stands. Raises RunNotFoundError, and UsageError when several fit."""
    store = guard.store
    # 1. A whole id wins, whatever it looks like.
    if store.run(named).result() is not None:
        return guard.show(named)
    if named == LAST:
        newest = store.runs(RunQuery(limit=1)).result()
        if not newest:
            msg = "there is no run in this store yet"
            raise RunNotFoundError(msg)
        return guard.show(newest[0].run_id)
    if store.spec(named).result() is not None:
        msg = f"run {named} has not started: its spec is stored; start it with `endstop run TASK.toml --spec {named}`"
        raise RunNotFoundError(msg)
    # 2. The first letters, when they name one.
    if len(named) >= PREFIX_CHARS_MIN:
        query = RunQuery(roots_only=False, limit=ROWS_MAX)
        found = [record.run_id for record in store.runs(query).result() if record.run_id.startswith(named)]
        if len(found) == 1:
            return guard.show(found[0])
        if found:
            more = "" if len(found) <= SHOWN_MAX else f" and {len(found) - SHOWN_MAX} more"
            msg = f"{named!r} fits {len(found)} runs: {', '.join(found[:SHOWN_MAX])}{more}; write more of the id"
            raise UsageError(msg)
    msg = f"there is no run {named!r} in this store; `endstop ps --all` lists the runs"
    raise RunNotFoundError(msg)


def root_id(guard: Guard, named: str) -> str:
    """The id of the root of the run called `named`."""
    return find_run(guard, named).root_run_id
