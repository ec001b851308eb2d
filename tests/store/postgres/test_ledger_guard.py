"""The ledger on the server: append-only for everybody, also for its owner, and positions without a gap."""

from __future__ import annotations

from collections.abc import Iterator

import psycopg
import pytest

from endstop.core.reasons import Action
from endstop.errors import SchemaVersionError
from endstop.store.postgres import PostgresStore, schema
from endstop.store.postgres.link import Link
from endstop.store.postgres.statements import LOCK_SPACE
from endstop.testing.store_contract_runs import check_ledger, in_threads
from endstop.testing.store_samples import AddStep, new_run, reserve, settle
from tests.postgres_server import PostgresServer
from tests.store.postgres.kit import postgres_store

pytestmark = pytest.mark.slow

CHANGES = [
    "UPDATE endstop.entry SET leaf = leaf",
    "DELETE FROM endstop.entry",
    "TRUNCATE endstop.entry",
    "UPDATE endstop.place SET idx = idx",
    "DELETE FROM endstop.place WHERE idx > 10",
    "TRUNCATE endstop.place",
]
WORKER = "endstop_test_worker"


@pytest.fixture
def store(database: str) -> Iterator[PostgresStore]:
    opened = postgres_store(database)
    opened.open_run(new_run("a")).result()
    yield opened
    opened.close()


@pytest.fixture
def worker(postgres: PostgresServer) -> Iterator[str]:
    """A login role with no rights of its own."""
    if not postgres.execute(f"SELECT FROM pg_roles WHERE rolname = '{WORKER}'"):
        postgres.execute(f"CREATE ROLE {WORKER} LOGIN")
    yield WORKER
    if postgres.execute("SELECT FROM pg_roles WHERE rolname = 'endstop_app'"):
        postgres.execute(f"REVOKE endstop_app FROM {WORKER}")


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("setting", ["session_replication_role = origin", "session_replication_role = replica"])
def test_not_even_the_administrator_changes_what_is_written(
    store: PostgresStore, database: str, change: str, setting: str
) -> None:
    store.entries().result()
    with psycopg.connect(database, autocommit=True) as connection:
        connection.execute(f"SET {setting}".encode())
        with pytest.raises(psycopg.Error, match="append-only"):
            connection.execute(change.encode())
    assert len(store.entries().result()) == 2


@pytest.mark.parametrize(
    "insert",
    [
        """INSERT INTO endstop.entry (leaf) VALUES ('{"run":"a","seq":7}')""",
        """INSERT INTO endstop.entry (leaf) VALUES ('{"run":"b","seq":1}')""",
        "INSERT INTO endstop.place (idx, entry_id) VALUES (9, 9)",
        "INSERT INTO endstop.place (idx, entry_id) VALUES (-1, 9)",
        "INSERT INTO endstop.place (idx, entry_id) VALUES (2, 9), (4, 10)",
    ],
)
def test_numbers_and_positions_must_follow_the_last_one(store: PostgresStore, database: str, insert: str) -> None:
    store.entries().result()
    with psycopg.connect(database, autocommit=True) as connection, pytest.raises(psycopg.Error, match="append-only"):
        connection.execute(insert.encode())
    assert len(store.entries().result()) == 2


def test_a_guard_that_is_off_is_a_finding(store: PostgresStore, database: str) -> None:
    assert store.facts().result().integrity == "ok"
    with psycopg.connect(database, autocommit=True) as connection:
        connection.execute(b"ALTER TABLE endstop.entry DISABLE TRIGGER entry_never_changes")
        assert "1 of the ledger's triggers are off" in store.facts().result().integrity
        connection.execute(b"ALTER TABLE endstop.entry ENABLE TRIGGER entry_never_changes")
        assert "triggers are off" in store.facts().result().integrity  # on, but not in every session
        connection.execute(b"ALTER TABLE endstop.entry ENABLE ALWAYS TRIGGER entry_never_changes")
        assert store.facts().result().integrity == "ok"


def test_facts_tell_who_could_change_the_ledger(
    postgres: PostgresServer, store: PostgresStore, database: str, worker: str
) -> None:
    assert "may change the ledger" in store.facts().result().file_mode
    name = database.rpartition("/")[2]
    link = Link(database, connections_max=2)
    link.open()
    schema.secure(link, login=worker)
    schema.secure(link, login=worker)  # doing it twice changes nothing
    link.close()
    limited = postgres_store(postgres.url(name, user=worker))
    try:
        facts = limited.facts().result()
        assert facts.file_mode == f"owner endstop_owner, role {worker} may only append, append-only in every session"
        # That role can do all that a worker does, and take nothing back.
        limited.open_run(new_run("b")).result()
        asked = reserve("b", 1)
        reserved = limited.transact(asked).result()
        assert reserved.verdict.action is Action.EXECUTE
        limited.transact(settle(asked, reserved)).result()
        assert limited.is_owner_alive("owner-1")
        check_ledger(limited)
        with psycopg.connect(postgres.url(name, user=worker), autocommit=True) as connection:
            for change in (*CHANGES, "ALTER TABLE endstop.entry DISABLE TRIGGER ALL", "DROP TABLE endstop.place"):
                with pytest.raises(psycopg.errors.InsufficientPrivilege):
                    connection.execute(change.encode())
    finally:
        limited.close()


def test_a_role_that_may_not_make_the_store_is_told_so(postgres: PostgresServer, database: str, worker: str) -> None:
    with pytest.raises(SchemaVersionError, match="endstop_owner or an administrator"):
        postgres_store(postgres.url(database.rpartition("/")[2], user=worker))


def test_whoever_reads_sees_all_that_was_acknowledged_to_him(database: str) -> None:
    """Also what other processes wrote, and with no sequencer of their own at work any more."""
    one, two = postgres_store(database), postgres_store(database)
    try:
        one.open_run(new_run("a")).result()
        two.open_run(new_run("b")).result()
        for number in range(1, 11):
            one.transact(AddStep(run_id="a", now_us=1)).result()
            assert len(one.entries(run_id="a").result()) == number + 1
            assert len(two.entries(run_id="a").result()) == number + 1
        in_threads(8, lambda n: [(one, two)[n % 2].transact_now(AddStep(run_id="ab"[n % 2], now_us=1)) for _ in "xyz"])
        check_ledger(two)
        assert len(two.entries().result()) == len(two.ledger_rows().result()) == 1 + 2 + 10 + 24
    finally:
        one.close()
        two.close()


def test_the_next_sequencer_takes_over_when_one_is_killed(postgres: PostgresServer, database: str) -> None:
    """The lock is the transaction's: it falls with the session, and nothing of a half-made move is left."""
    store = postgres_store(database)
    try:
        store.open_run(new_run("a")).result()
        store.entries().result()
        other = psycopg.connect(database)
        other.execute(b"SELECT pg_advisory_xact_lock(%s, 2)", (LOCK_SPACE,))
        store.transact(AddStep(run_id="a", now_us=1)).result()
        assert postgres.execute("SELECT count(*) FROM endstop.outbox", database.rpartition("/")[2]) == [(1,)]
        postgres.execute(f"SELECT pg_terminate_backend({other.info.backend_pid})")
        assert len(store.entries().result()) == 3
        other.close()
    finally:
        store.close()


def test_the_view_for_people_says_what_the_store_says(postgres: PostgresServer, store: PostgresStore) -> None:
    asked = reserve("a", 1, now_us=1_700_000_000_000_001)
    store.transact(settle(asked, store.transact(asked).result())).result()
    rows = store.ledger_rows().result()
    seen = postgres.execute("SELECT * FROM endstop.ledger", store.url.rpartition("/")[2])
    assert len(rows) == 4
    assert seen == [
        (
            row.session_id, row.turn_count, row.state_origin, row.input_hash, row.token_delta, row.execution_time_ms,
            row.pass_fail, row.breach_reason, row.created_at,
        )
        for row in rows
    ]  # fmt: skip


def test_the_ledger_is_named_once_for_all_who_open_it_at_the_same_moment(database: str) -> None:
    opened: list[PostgresStore] = []
    in_threads(8, lambda _: opened.append(postgres_store(database)))
    assert len({(store.ledger, store.store_key) for store in opened}) == 1
    assert len(opened[0].entries().result()) == 1
    for store in opened:
        store.close()
