"""What the PostgreSQL tests share."""

from __future__ import annotations

from endstop.runtime.clock import SystemClock, SystemIds
from endstop.store.postgres import PostgresStore

CLOCK = SystemClock()
IDS = SystemIds()


def postgres_store(url: str, *, lanes: int = 2, lease_ms: int = 30_000) -> PostgresStore:
    """The store in the database `url`."""
    return PostgresStore(url, new_key=IDS.new_key, now_us=CLOCK.now_us, lanes=lanes, lease_ms=lease_ms)
