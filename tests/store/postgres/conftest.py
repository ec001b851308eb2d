"""A real PostgreSQL for these tests, one for the whole session; without one they are left out, and said to be."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.postgres_server import Pooler, PostgresServer, PostgresUnavailableError, skip_or_fail

_left_out: list[str] = []


@pytest.fixture(scope="session")
def postgres() -> Iterator[PostgresServer]:
    """The server that all tests share; each takes a database of its own."""
    try:
        server = PostgresServer.make()
    except PostgresUnavailableError as error:
        _left_out.append(str(error))
        skip_or_fail(str(error))
        raise
    try:
        yield server
    finally:
        server.remove()


@pytest.fixture
def own_server() -> Iterator[PostgresServer]:
    """A server of the test's own, to be crashed."""
    try:
        server = PostgresServer.make()
    except PostgresUnavailableError as error:
        _left_out.append(str(error))
        skip_or_fail(str(error))
        raise
    try:
        yield server
    finally:
        server.remove()


@pytest.fixture
def database(postgres: PostgresServer) -> Iterator[str]:
    """The URL of a new, empty database."""
    with postgres.database() as url:
        yield url


@pytest.fixture(scope="session")
def pooler(postgres: PostgresServer) -> Iterator[Pooler]:
    """pgbouncer in transaction mode before the shared server."""
    try:
        made = Pooler.make(postgres)
    except PostgresUnavailableError as error:
        _left_out.append(str(error))
        skip_or_fail(str(error))
        raise
    try:
        yield made
    finally:
        made.remove()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say it once more at the end, where nobody overlooks it."""
    for reason in dict.fromkeys(_left_out):
        terminalreporter.write_line(f"POSTGRESQL TESTS LEFT OUT: {reason}", red=True, bold=True)
