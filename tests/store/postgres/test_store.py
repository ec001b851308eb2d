"""What is the PostgreSQL store's own: its name, its faults, forks, interrupts, and sessions that vanish."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import threading
import time

import psycopg
import pytest

from endstop.errors import (
    GuardClosedError,
    RunNotFoundError,
    StoreUnavailableError,
    UsageError,
)  # fmt: skip
from endstop.runtime.clock import SystemClock, SystemIds
from endstop.store import registry
from endstop.store.postgres import lane, link, statements
from endstop.testing.store_contract_runs import check_ledger
from endstop.testing.store_samples import AddStep, BreakOff, new_run, reserve, settle
from tests.postgres_server import PostgresServer, free_port
from tests.store.postgres.kit import postgres_store

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("scheme", ["postgresql", "postgres"])
def test_a_url_opens_the_store_of_its_database(database: str, scheme: str) -> None:
    url = scheme + database.removeprefix("postgresql").replace("@", ":secret@")
    store = registry.open_store(url, new_key=SystemIds().new_key, now_us=SystemClock().now_us)
    try:
        assert store.url == database
        assert "secret" not in repr(store)
        assert store.owners_dir is None
        assert store.facts().result().kind == "postgresql"
    finally:
        store.close()


def test_a_url_that_is_none_is_refused() -> None:
    with pytest.raises(UsageError, match="postgresql://user@host"):
        postgres_store("postgresql://127.0.0.1:port/x?nonsense=1")


def test_the_extra_that_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.startswith(("endstop.store.postgres", "psycopg"))]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "psycopg", None)
    with pytest.raises(UsageError, match="endstop\\[postgres\\]"):
        registry.open_store("postgresql://x/y", new_key=SystemIds().new_key, now_us=SystemClock().now_us)


def test_a_server_that_is_not_there_is_said_to_be_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link, "CONNECT_WAIT_S_MAX", 1)
    with pytest.raises(StoreUnavailableError, match="no connection to PostgreSQL in time"):
        postgres_store(f"postgresql://nobody:secret@127.0.0.1:{free_port()}/x")


def test_a_database_that_is_not_there_is_said_to_be_so(
    postgres: PostgresServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(link, "CONNECT_WAIT_S_MAX", 1)
    with pytest.raises(StoreUnavailableError):
        postgres_store(postgres.url("no_such_database"))


def test_text_that_postgresql_cannot_keep_fails_alone(database: str) -> None:
    store = postgres_store(database, lanes=1)
    try:
        store.open_run(new_run("a")).result()
        futures = [
            store.transact(AddStep(run_id="a", now_us=1)),
            store.open_run(new_run("nul \0")),
            store.open_run(new_run("surrogate \ud800")),
            store.transact(BreakOff(run_id="a", now_us=1)),
            store.transact(AddStep(run_id="a", now_us=1)),
        ]
        assert [futures[0].result(), futures[4].result()] == [1, 2]
        for future in futures[1:4]:
            with pytest.raises(UsageError):
                future.result()
        check_ledger(store)
    finally:
        store.close()


def test_a_forked_child_leaves_its_parents_connections_alone(database: str) -> None:
    store = postgres_store(database)
    store.open_run(new_run("a")).result()
    child = os.fork()
    if not child:
        try:
            store.run("a")
        except GuardClosedError:
            again = postgres_store(database)
            count = again.transact(AddStep(run_id="a", now_us=1)).result()
            again.close()
            os._exit(40 + count)
        os._exit(1)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 41
    assert store.transact(AddStep(run_id="a", now_us=1)).result() == 2
    check_ledger(store)
    store.close()


def test_an_interrupt_while_a_commit_is_waited_for_comes_after_it(database: str) -> None:
    store = postgres_store(database)
    try:
        store.open_run(new_run("a")).result()
        held: list[BaseException] = []
        with psycopg.connect(database) as holder:
            holder.execute(b"SELECT FROM endstop.run_state FOR UPDATE")
            threading.Timer(0.2, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
            threading.Timer(0.4, holder.commit).start()
            assert store.transact_now(AddStep(run_id="a", now_us=1), held) == 1
            time.sleep(0.1)
        assert [type(signal) for signal in held] == [KeyboardInterrupt]
    finally:
        store.close()


def test_a_cancelled_task_does_not_stop_its_commit(database: str) -> None:
    store = postgres_store(database)

    async def main() -> None:
        future = store.transact_async(AddStep(run_id="a", now_us=1))
        assert not future.cancel()
        assert await future == 1

    try:
        store.open_run(new_run("a")).result()
        asyncio.run(main())
    finally:
        store.close()


def test_a_stopped_session_gives_its_locks_back_in_time(database: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker that hangs between its two exchanges loses its transaction, and the next one goes on."""
    monkeypatch.setattr(statements, "IDLE_MS_MAX", 700)
    slow, quick = postgres_store(database, lanes=1), postgres_store(database)
    try:
        slow.open_run(new_run("a")).result()
        let_go = threading.Event()
        kept = lane.Lane._apply

        def hangs(self: lane.Lane, batch: list[lane._Request], *, together: bool) -> list[lane._Outcome]:
            if self is slow._lanes[0] and not let_go.is_set():
                let_go.wait(10)
            return kept(self, batch, together=together)

        monkeypatch.setattr(lane.Lane, "_apply", hangs)
        slow._lanes[0]._assumes = False
        hanging = slow.transact(AddStep(run_id="a", now_us=1))
        time.sleep(0.1)
        started = time.monotonic()
        assert quick.transact(AddStep(run_id="a", now_us=1)).result() == 1
        assert time.monotonic() - started < 5
        let_go.set()
        assert hanging.result() == 2, "what was done on the lost transaction counted"
        check_ledger(quick)
    finally:
        slow.close()
        quick.close()


def test_a_writer_that_was_cleared_away_makes_itself_known_again(postgres: PostgresServer, database: str) -> None:
    store = postgres_store(database)
    try:
        store.open_run(new_run("a")).result()
        postgres.execute("DELETE FROM endstop.writer WHERE writer_id <> ''", database.rpartition("/")[2])
        assert store.transact(AddStep(run_id="a", now_us=1)).result() == 1
        asked = reserve("a", 1)
        assert store.transact(settle(asked, store.transact(asked).result())).result().accepted
        check_ledger(store)
    finally:
        store.close()


def test_a_table_that_was_dropped_is_no_empty_store(postgres: PostgresServer, database: str) -> None:
    store = postgres_store(database)
    try:
        store.open_run(new_run("a")).result()
        with pytest.raises(RunNotFoundError):
            store.transact(AddStep(run_id="b", now_us=1)).result()
        postgres.execute("DROP TABLE endstop.operation", database.rpartition("/")[2])
        with pytest.raises(Exception, match="the database lacks tables"):
            store.transact(reserve("a", 1)).result()
    finally:
        store.close()
