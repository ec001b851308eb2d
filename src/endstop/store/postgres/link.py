"""Connections: how they are made, handed out and kept free of session state.

Nothing here lives in a session: no prepared statement by name, no session lock, no LISTEN, no SET outside a
transaction. So a connection may be another one at every transaction, as it is behind a pooler in transaction mode.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final, TypeVar

import psycopg
from psycopg import conninfo
from psycopg_pool import ConnectionPool, PoolTimeout

from endstop.errors import UsageError

__all__ = ["CONNECT_WAIT_S_MAX", "Link"]

R = TypeVar("R")
CONNECT_WAIT_S_MAX: Final = 10
TRIES_MAX: Final = 4
CLOSING_WAIT_S_MAX: Final = 2
IDLE_S_MAX: Final = 300
# A dead peer is noticed after about 30 s, in place of the operating system's hours.
_DEFAULTS: Final[dict[str, str | int | None]] = {
    "application_name": "endstop", "connect_timeout": CONNECT_WAIT_S_MAX, "keepalives": 1, "keepalives_idle": 10,
    "keepalives_interval": 5, "keepalives_count": 4,
}  # fmt: skip

# What the pool has to say goes to the application's logging, where it has any, and never straight to the terminal.
logging.getLogger("psycopg.pool").addHandler(logging.NullHandler())


class Link:
    """The way to one database. Safe to share between threads. `url` is shown without its password."""

    def __init__(self, url: str, *, connections_max: int) -> None:
        try:
            parts = conninfo.conninfo_to_dict(url)
        except psycopg.ProgrammingError as error:
            msg = "a PostgreSQL store is named postgresql://user@host:port/database"
            raise UsageError(msg) from error
        self.url = _shown(parts)
        self._conninfo = conninfo.make_conninfo("", **{**_DEFAULTS, **parts})
        self._pool: ConnectionPool[psycopg.Connection] = ConnectionPool(
            self._conninfo, min_size=0, max_size=connections_max, open=False, name="endstop",
            timeout=CONNECT_WAIT_S_MAX, reconnect_timeout=CONNECT_WAIT_S_MAX, max_idle=IDLE_S_MAX,
            kwargs={"autocommit": True, "prepare_threshold": None},
        )  # fmt: skip

        self._wait_s = CONNECT_WAIT_S_MAX

    def open(self) -> None:
        """Start handing out connections."""
        self._pool.open()

    def hurry(self) -> None:
        """From now on, wait for a connection no longer than it takes when the server is there."""
        self._wait_s = CLOSING_WAIT_S_MAX

    @contextmanager
    def pooled(self) -> Iterator[psycopg.Connection]:
        """A connection for one piece of work. One that broke is thrown away afterwards."""
        with self._pool.connection(self._wait_s) as connection:
            yield connection

    def ask(self, work: Callable[[psycopg.Connection], R]) -> R:
        """What `work` gives on a connection: done again on another one when it breaks, so it must be safe to repeat."""
        for _ in range(TRIES_MAX - 1):
            try:
                with self.pooled() as connection:
                    return work(connection)
            except psycopg.OperationalError as error:  # mostly one that broke while it lay in the pool
                if isinstance(error, PoolTimeout) or not (error.sqlstate or "08").startswith(("57P", "08")):
                    raise
            self.sweep()
        with self.pooled() as connection:
            return work(connection)

    def sweep(self) -> None:
        """Throw away what broke while it lay in the pool: what broke one connection mostly broke them all."""
        self._pool.check()

    @contextmanager
    def fresh(self) -> Iterator[psycopg.Connection]:
        """A connection that nobody used before, closed afterwards."""
        with psycopg.connect(self._conninfo, autocommit=True, prepare_threshold=None) as connection:
            yield connection

    def close(self) -> None:
        """Close every connection once its work is done."""
        self._pool.close()


def _shown(parts: dict[str, str | int | None]) -> str:
    """A URL that names the database and nobody's secrets."""
    user, host, port = parts.get("user"), parts.get("host") or parts.get("hostaddr") or "", parts.get("port")
    address = f"{f'{user}@' if user else ''}{host}{f':{port}' if port else ''}"
    return f"postgresql://{address}/{parts.get('dbname') or ''}"
