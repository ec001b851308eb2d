"""The public contract suite on a real PostgreSQL: directly, and through a pooler in transaction mode."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from typing import ClassVar

import pytest

from endstop.store.port import Store
from endstop.testing.store_contract import StoreContract
from tests.postgres_server import Pooler, PostgresServer
from tests.store.postgres.kit import postgres_store


class Databases(StoreContract):
    """A new database for each store; `port` is where it is reached."""

    server: ClassVar[PostgresServer]
    stack: ClassVar[ExitStack]
    port: ClassVar[int]
    urls: ClassVar[dict[str, str]]

    def open_store(self) -> Store:
        name = self.stack.enter_context(self.server.database()).rpartition("/")[2]
        url = self.server.url(name, port=self.port)
        store = postgres_store(url)
        self.urls[store.ledger] = url
        return store

    def open_again(self, store: Store) -> Store:
        return postgres_store(self.urls[store.ledger])


@pytest.mark.slow
class TestPostgresStore(Databases):
    @pytest.fixture(autouse=True)
    def _databases(self, postgres: PostgresServer) -> Iterator[None]:
        kind = type(self)
        kind.server, kind.port, kind.urls = postgres, postgres.port, {}
        with ExitStack() as kind.stack:
            yield


@pytest.mark.slow
class TestPostgresStoreBehindAPooler(Databases):
    @pytest.fixture(autouse=True)
    def _databases(self, postgres: PostgresServer, pooler: Pooler) -> Iterator[None]:
        kind = type(self)
        kind.server, kind.port, kind.urls = postgres, pooler.port, {}
        with ExitStack() as kind.stack:
            yield
