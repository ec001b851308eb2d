"""The PostgreSQL store: many workers on many machines, one database."""

from __future__ import annotations

from endstop.store.postgres.store import PostgresStore

__all__ = ["PostgresStore"]
