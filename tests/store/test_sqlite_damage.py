"""Records that cannot be read, migrations, and files that open halfway."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import apsw
import pytest

from endstop.errors import (
    EndstopError,
    InvariantError,
    StoreCorruptError,
    StoreUnavailableError,
)
from endstop.store import migrations
from endstop.store.port import StoredSpec
from endstop.store.sqlite import SqliteStore, opening
from endstop.store.sqlite import store as store_module
from endstop.store.sqlite.turnstile import Turnstile
from endstop.testing.store_contract_runs import check_ledger
from endstop.testing.store_samples import SPEC, AddStep, new_run, reserve
from tests.store.kit import CLOCK, IDS, changed_by_hand, closed_with, raw, sqlite_store


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "folder" / "state.db"


@pytest.fixture
def store(path: Path) -> Iterator[SqliteStore]:
    opened = sqlite_store(path)
    opened.open_run(new_run("a")).result()
    yield opened
    opened.close()


# -- Corrupt records


@pytest.mark.parametrize(
    "statement",
    [
        "UPDATE run SET labels = 'no JSON'",
        "UPDATE run SET state = 'dreaming'",
        'UPDATE run SET limits = \'{"steps_max": "many"}\'',
        "UPDATE run SET spec = '{}'",
        "UPDATE run SET envelope = '{}'",
        "UPDATE run SET owners = 'x'",
        "UPDATE run_state SET evidence = x'00'",
    ],
)
def test_a_run_that_cannot_be_read_is_refused_and_never_taken_for_absent(path: Path, statement: str) -> None:
    closed_with(path, statement)
    opened = sqlite_store(path)
    for call in (
        lambda: opened.transact_now(AddStep(run_id="a", now_us=1)),
        lambda: opened.transact(AddStep(run_id="a", now_us=1)).result(),
        lambda: opened.open_run(new_run("a")).result(),
        lambda: opened.run("a").result(),
    ):
        with pytest.raises(StoreCorruptError):
            call()
    opened.close()


def test_an_operation_that_cannot_be_read_is_never_taken_for_absent(path: Path) -> None:
    opened = sqlite_store(path)
    opened.open_run(new_run("a")).result()
    opened.transact(reserve("a", 1)).result()
    opened.close()
    changed_by_hand(path, "UPDATE operation SET state = 'MAYBE'")
    opened = sqlite_store(path)
    with pytest.raises(StoreCorruptError):
        opened.transact_now(reserve("a", 1))
    with pytest.raises(StoreCorruptError):
        opened.operations().result()
    opened.close()


def test_orders_and_specs_that_cannot_be_read_are_refused(store: SqliteStore, path: Path) -> None:
    from endstop.testing.store_contract_runs import order

    store.save_spec(StoredSpec(run_id="later", spec=SPEC, created_at_us=1)).result()
    store.add_control(order("o1")).result()
    changed_by_hand(path, "UPDATE spec SET spec = '{}'")
    changed_by_hand(path, "UPDATE control SET args = '{'")
    with pytest.raises(StoreCorruptError):
        store.spec("later").result()
    with pytest.raises(StoreCorruptError):
        store.controls().result()
    with pytest.raises(StoreCorruptError):
        store.transact_now(AddStep(run_id="a", now_us=1))


def test_an_entry_that_was_forged_past_the_triggers_stops_the_run(store: SqliteStore, path: Path) -> None:
    """Whoever drops a trigger and takes an entry away leaves a gap that the next append runs into."""
    store.transact_now(AddStep(run_id="a", now_us=1))
    changed_by_hand(path, "DROP TRIGGER entry_never_goes")
    changed_by_hand(path, "DELETE FROM entry WHERE idx = 2")
    with pytest.raises(StoreCorruptError, match="append-only"):
        store.transact_now(AddStep(run_id="a", now_us=1))


def test_a_damaged_page_is_reported(path: Path) -> None:
    opened = sqlite_store(path)
    for number in range(40):
        opened.open_run(new_run(f"run-{number}")).result()
    opened.close()
    data = bytearray(path.read_bytes())
    data[4096:] = b"\xff" * (len(data) - 4096)
    path.write_bytes(bytes(data))

    def use() -> None:
        damaged = sqlite_store(path)
        try:
            damaged.transact_now(AddStep(run_id="run-1", now_us=1))
        finally:
            damaged.close()

    with pytest.raises(StoreCorruptError):
        use()


# -- Migrations


def test_a_gap_in_the_migrations_is_a_broken_installation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(migrations, "SCHEMA_VERSION", migrations.SCHEMA_VERSION + 1)
    with pytest.raises(InvariantError, match="this code needs 1 to"):
        migrations.migrations()


def test_a_store_of_the_first_schema_opens_with_todays(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every later migration runs on a store that the first version made."""
    opened = sqlite_store(path)
    opened.open_run(new_run("a")).result()
    opened.transact(reserve("a", 1)).result()
    before = (opened.run_key("a").result(), opened.operations().result())
    opened.close()
    old = path.with_name("old.db")
    with monkeypatch.context() as patch:
        patch.setattr(opening, "pending", lambda found: migrations.migrations()[:1] if found == 0 else ())
        made = Turnstile(old.with_name("old.db.turn"), old.with_name("old.db.lock"))
        found = opening.open_file(old, made, old.with_name("old.db.lock"), new_key=IDS.new_key, now_us=CLOCK.now_us)
        made.close()
    with raw(old) as other:
        assert other.execute("SELECT value FROM meta WHERE name = 'schema_version'").fetchone() == (1,)
    other.close()
    upgraded = sqlite_store(old)
    assert upgraded.ledger == found.ledger
    upgraded.open_run(new_run("a")).result()
    upgraded.transact(reserve("a", 1)).result()
    assert (upgraded.run_key("a").result(), upgraded.operations().result()) == before
    check_ledger(upgraded)
    upgraded.close()


def test_two_statements_of_one_name_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    twice = "-- name: one\n-- A purpose.\nSELECT 1;\n\n" * 2
    monkeypatch.setattr(migrations, "_text", lambda name: twice)
    with pytest.raises(InvariantError, match="one name"):
        migrations.queries()


def test_a_migration_that_fails_leaves_the_file_as_it_was(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = migrations.migrations()
    broken = migrations.Migration(version=1, sql=whole[0].sql + "CREATE TABLE entry (again);")
    monkeypatch.setattr(opening, "pending", lambda version: (broken,))
    with pytest.raises(EndstopError):
        sqlite_store(path)
    monkeypatch.undo()
    opened = sqlite_store(path)
    check_ledger(opened)
    opened.close()


def test_an_older_store_is_brought_up_to_date_and_keeps_its_records(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = sqlite_store(path)
    opened.open_run(new_run("a")).result()
    ledger = opened.ledger
    opened.close()
    known = migrations.SCHEMA_VERSION
    version = migrations.SCHEMA_VERSION
    later = migrations.Migration(version=version + 1, sql="CREATE TABLE later (x TEXT) STRICT;")
    monkeypatch.setattr(opening, "pending", lambda found: (later,) if found == version else ())
    for _ in range(2):
        opened = sqlite_store(path)
        assert opened.ledger == ledger
        assert opened.run("a").result() is not None
        check_ledger(opened)
        opened.close()
    with raw(path) as other:
        assert other.execute("SELECT value FROM meta WHERE name = 'schema_version'").fetchone() == (known + 1,)
        assert other.execute("SELECT count(*) FROM later").fetchone() == (0,)
    other.close()


def test_a_migration_that_sqlite_has_undone_itself_is_not_undone_twice(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        opening, "pending", lambda version: (migrations.Migration(version=1, sql="ROLLBACK; SELECT * FROM nowhere;"),)
    )
    with pytest.raises(StoreUnavailableError, match="nowhere"):
        sqlite_store(path)


def test_a_store_that_opens_halfway_leaves_nothing_open(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sqlite_store(path).close()
    before = sorted(os.listdir("/proc/self/fd"))
    real, calls = store_module.connect, []

    def fails_the_second_time(at: Path) -> apsw.Connection:
        calls.append(at)
        if len(calls) == 2:
            raise StoreUnavailableError("no more files")
        return real(at)

    monkeypatch.setattr(store_module, "connect", fails_the_second_time)
    with pytest.raises(StoreUnavailableError, match="no more files"):
        sqlite_store(path)
    assert sorted(os.listdir("/proc/self/fd")) == before


def test_a_disk_that_is_not_durable_is_refused(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A journal mode that SQLite would not keep: what a network disk or a read-only folder does."""
    sqlite_store(path).close()
    real: Callable[..., apsw.Connection] = apsw.Connection

    class Weak:
        def __init__(self, *args: object, **kwargs: object) -> None:
            self._real = real(*args, **kwargs)

        def __getattr__(self, name: str) -> object:
            return getattr(self._real, name)

        def execute(self, sql: str, *args: object) -> object:
            return self._real.execute("SELECT 'delete'" if sql == "PRAGMA journal_mode" else sql, *args)  # type: ignore[arg-type]  # passed on

    monkeypatch.setattr(opening.apsw, "Connection", Weak)
    with pytest.raises(StoreUnavailableError, match="is not durable here"):
        opening.connect(path)
