"""Who is alive, when workers are on many machines: each holds a lease on the database's own clock.

A lease says nothing about calls that are under way. When it runs out, the calls of that worker become UNKNOWN, which
blocks their keys; nothing is ever sent again because of a lease.
"""

from __future__ import annotations

import threading
from contextlib import suppress
from typing import TYPE_CHECKING, Final, cast

from endstop.errors import EndstopError
from endstop.store.postgres.faults import mapped
from endstop.store.postgres.plan import worker_of
from endstop.store.postgres.statements import sql

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from endstop.store.postgres.link import Link

__all__ = ["LEASE_MS", "Leases"]

LEASE_MS: Final = 30_000
KEPT_DAYS: Final = 30
JITTER_PERCENT: Final = 20


class Leases:
    """The leases of this process's workers, renewed at a third of their length, and the question about any other's."""

    def __init__(self, link: Link, *, new_key: Callable[[], bytes], lease_ms: int) -> None:
        self._link = link
        self._new_key = new_key
        self._lease_ms = lease_ms
        self._owners: set[str] = set()
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None

    def entered(self, owner_ids: Iterable[str]) -> None:
        """These workers have a lease, written with the transaction that let them into a run: keep it."""
        with self._lock:
            self._owners.update(owner_ids)
            if self._thread is None and not self._closing.is_set():
                self._thread = threading.Thread(target=self._loop, name="endstop-leases", daemon=True)
                self._thread.start()

    def is_alive(self, owner_id: str) -> bool:
        """Whether that worker's lease runs, by the database's clock. One without a lease is dead. Raises StoreError."""
        values = {"owner_id": worker_of(owner_id)}
        with mapped("ask for a worker"):
            row = self._link.ask(lambda connection: connection.execute(sql("worker_alive"), values).fetchone())
        return row is not None and cast("bool", row[0])

    def close(self) -> None:
        """End every lease of this process. A database that is away lets them run out."""
        self._closing.set()
        with self._lock:
            thread, owners = self._thread, sorted(self._owners)
        if thread is None:
            return
        thread.join()
        self._write("leave_workers", {"owner_ids": owners, "kept_days": KEPT_DAYS})

    def _loop(self) -> None:
        while not self._closing.wait(self._pause_ms() / 1_000):
            with self._lock:
                owners = sorted(self._owners)
            self._write("enter_workers", {"owner_ids": owners, "lease_ms": self._lease_ms})

    def _pause_ms(self) -> int:
        """A third of the lease, less up to `JITTER_PERCENT`, so that many workers do not come at one moment."""
        third = self._lease_ms // 3
        return third - third * (self._new_key()[0] * JITTER_PERCENT) // 25_500

    def _write(self, name: str, values: dict[str, object]) -> None:
        """Try, and leave it at that when the database is away: a lease that runs out makes noise, never a duplicate."""
        with suppress(EndstopError), mapped("renew a lease"):
            self._link.ask(lambda connection: connection.execute(sql(name), values))
