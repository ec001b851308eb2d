"""The file of the SQLite store: how it is made, what is refused, and what its tables refuse."""

from __future__ import annotations

import shutil
import sqlite3
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import cast

import apsw
import pytest

from endstop.errors import (
    SchemaVersionError,
    StoreCorruptError,
    StoreFullError,
    StoreUnavailableError,
)
from endstop.store import migrations
from endstop.store.rows import ledger_row
from endstop.store.sqlite import SqliteStore, opening
from endstop.testing.store_contract_runs import check_ledger, entries_of
from endstop.testing.store_samples import AddStep, new_run, reserve, settle
from tests.store.kit import changed_by_hand, closed_with, raw, sqlite_store
from tests.store.processes import ended, killed_at_the_end, start


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "folder" / "state.db"


@pytest.fixture
def store(path: Path) -> Iterator[SqliteStore]:
    opened = sqlite_store(path)
    opened.open_run(new_run("a")).result()
    yield opened
    opened.close()


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


# -- Made


def test_every_file_of_a_store_is_for_its_owner_alone(store: SqliteStore, path: Path) -> None:
    names = {item.name: mode(item) for item in path.parent.iterdir()}
    assert names == {
        "state.db": 0o600,
        "state.db-wal": 0o600,
        "state.db-shm": 0o600,
        "state.db.turn": 0o600,
        "state.db.lock": 0o600,
        "state.db.owners": 0o700,
    }
    assert mode(path.parent) == 0o700
    assert store.owners_dir == path.with_name("state.db.owners")
    facts = store.facts().result()
    assert (facts.kind, facts.file_mode, facts.journal_mode, facts.synchronous) == ("sqlite", "0600", "wal", "full")
    assert facts.schema_version == migrations.SCHEMA_VERSION
    assert store.url == f"sqlite:///{path}"


def test_a_store_stays_where_it_is_when_the_folder_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    opened = sqlite_store(Path("here.db"))
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    opened.open_run(new_run("a")).result()
    opened.close()
    assert list((tmp_path / "elsewhere").iterdir()) == []


def test_the_schema_is_the_sum_of_its_migrations() -> None:
    """`schema.sql` is what people read; the migrations are what runs."""

    def made_by(*scripts: str) -> list[tuple[object, ...]]:
        connection = apsw.Connection(":memory:")
        for script in scripts:
            connection.execute(script)
        found = connection.execute("SELECT type, name, tbl_name, sql FROM sqlite_schema ORDER BY name").fetchall()
        return cast("list[tuple[object, ...]]", found)

    read = made_by(migrations._text("schema.sql"))
    assert read == made_by(*(migration.sql for migration in migrations.migrations()))
    assert len(read) > 10


def test_every_statement_has_a_purpose_and_is_one_that_sqlite_takes(store: SqliteStore, path: Path) -> None:
    found = migrations.queries()
    text = migrations._text("queries.sql")
    assert text.count("-- name:") == len(found)
    connection = apsw.Connection(str(path), flags=apsw.SQLITE_OPEN_READONLY)
    for sql in found.values():
        connection.execute("EXPLAIN " + sql, (None,) * sql_places(sql)).fetchall()
    connection.close()


def sql_places(sql: str) -> int:
    numbered = [int(part) for number in sql.split("?")[1:] if (part := number[:2].strip(" ,);\n")).isdigit()]
    return max(numbered) if numbered else sql.count("?")


def test_the_view_ledger_has_exactly_the_nine_columns(store: SqliteStore, path: Path) -> None:
    with raw(path) as other:
        names = [row[1] for row in other.execute("PRAGMA table_info(ledger)")]
    other.close()
    assert names == [
        "session_id", "turn_count", "state_origin", "input_hash", "token_delta", "execution_time_ms", "pass_fail",
        "breach_reason", "created_at",
    ]  # fmt: skip


def test_input_digests_can_be_erased_and_the_ledger_stays(store: SqliteStore, path: Path) -> None:
    store.transact(reserve("a", 1)).result()
    before = entries_of(store)
    with raw(path) as other:
        other.execute("DELETE FROM input_digest")
    other.close()
    assert entries_of(store) == before
    assert {row.input_hash for row in store.ledger_rows().result()} == {None}


def test_generated_columns_say_what_the_leaf_says(store: SqliteStore, path: Path) -> None:
    asked = reserve("a", 1)
    store.transact(settle(asked, store.transact(asked).result())).result()
    with raw(path) as other:
        rows = other.execute("SELECT leaf, run_id, run_seq, type, ts_us, actor FROM entry ORDER BY idx").fetchall()
    other.close()
    for leaf, run_id, run_seq, kind, ts_us, actor in rows:
        row = ledger_row(leaf.encode(), None)
        assert row.session_id == run_id
        assert f'"seq":{run_seq}' in leaf
        assert f'"type":"{kind}"' in leaf
        assert f'"ts_us":{ts_us}' in leaf
        assert f'"actor":"{actor}"' in leaf


# -- Append-only, for other programs too


@pytest.mark.parametrize(
    "statement",
    [
        "UPDATE entry SET leaf = '{}'",
        "UPDATE entry SET idx = 99 WHERE idx = 1",
        "DELETE FROM entry WHERE idx = 1",
        "DELETE FROM entry",
        'INSERT OR REPLACE INTO entry (idx, leaf) VALUES (1, \'{"run":"a","seq":0}\')',
        'INSERT OR REPLACE INTO entry (idx, leaf) VALUES (2, \'{"run":"a","seq":0}\')',
        'INSERT INTO entry (idx, leaf) VALUES (9, \'{"run":"a","seq":1}\')',
        'INSERT INTO entry (idx, leaf) VALUES (2, \'{"run":"a","seq":7}\')',
        'INSERT OR IGNORE INTO entry (idx, leaf) VALUES (-1, \'{"run":"a","seq":1}\')',
        "INSERT INTO entry (idx, leaf) VALUES (2, '{}')",
        "INSERT INTO entry (idx, leaf) VALUES (2, 'no JSON')",
        'INSERT INTO entry (leaf) VALUES (\'{"run":"a","seq":1}\') ON CONFLICT DO UPDATE SET leaf = \'{}\'',
    ],
)
def test_the_tables_refuse_to_rewrite_history(store: SqliteStore, path: Path, statement: str) -> None:
    """UPDATE, DELETE and every INSERT that is no append fail, also from a program that sets no pragma."""
    before = entries_of(store)
    with raw(path) as other, pytest.raises(sqlite3.Error):
        other.execute(statement)
    other.close()
    assert entries_of(store) == before


# -- Refused


@pytest.mark.parametrize(
    "version", [3_006_999, 3_007_000, 3_044_005, 3_045_000, 3_049_001, 3_050_006, 3_051_000, 3_051_002]
)
def test_a_sqlite_that_can_lose_commits_is_refused(version: int, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(StoreUnavailableError, match=r"can lose committed records: install an apsw"):
        opening.check_library(version)
    monkeypatch.setattr(apsw, "SQLITE_VERSION_NUMBER", version)
    with pytest.raises(StoreUnavailableError):
        sqlite_store(path)
    assert not path.parent.exists()


@pytest.mark.parametrize("version", [3_044_006, 3_044_009, 3_050_007, 3_051_003, 3_052_000, 4_000_000])
def test_a_mended_sqlite_is_taken(version: int) -> None:
    opening.check_library(version)


def test_a_newer_schema_is_refused_and_left_as_it_is(path: Path) -> None:
    closed_with(path, "UPDATE meta SET value = 99 WHERE name = 'schema_version'")
    with pytest.raises(SchemaVersionError, match="schema version 99, this code knows 1 to"):
        sqlite_store(path)
    changed_by_hand(path, f"UPDATE meta SET value = {migrations.SCHEMA_VERSION} WHERE name = 'schema_version'")
    sqlite_store(path).close()


@pytest.mark.parametrize("value", ["'1'", "-1", "x'01'"])
def test_a_schema_version_that_is_none_is_refused(path: Path, value: str) -> None:
    closed_with(path, f"UPDATE meta SET value = {value} WHERE name = 'schema_version'")
    with pytest.raises(SchemaVersionError):
        sqlite_store(path)


def test_a_store_that_lost_its_key_is_refused(path: Path) -> None:
    closed_with(path, "DELETE FROM meta WHERE name = 'store_key'")
    with pytest.raises(StoreCorruptError, match="lost its name or its key"):
        sqlite_store(path)


def test_a_database_of_something_else_is_left_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "theirs.db"
    with raw(path) as other:
        other.execute("CREATE TABLE theirs (x)")
    other.close()
    before = path.read_bytes()
    with pytest.raises(StoreCorruptError, match="of something else"):
        sqlite_store(path)
    assert path.read_bytes() == before


def test_what_is_no_database_is_left_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "notes.txt"
    path.write_text("These are notes, and no database. " * 100)
    before = path.read_bytes()
    with pytest.raises(StoreCorruptError):
        sqlite_store(path)
    assert path.read_bytes() == before
    with pytest.raises(StoreUnavailableError, match="is no file"):
        sqlite_store(tmp_path)


def test_a_file_that_was_emptied_or_removed_is_never_replaced_by_an_empty_ledger(path: Path) -> None:
    opened = sqlite_store(path)
    opened.close()
    path.write_bytes(b"")
    with pytest.raises(StoreCorruptError, match=r"is gone, but state\.db\.lock says that it was here"):
        sqlite_store(path)
    path.unlink()
    with pytest.raises(StoreCorruptError, match="restore it from a backup"):
        sqlite_store(path)
    assert not path.exists()
    path.with_name("state.db.lock").unlink()
    sqlite_store(path).close()


def test_an_interrupted_first_opening_is_finished_by_the_next(path: Path) -> None:
    """A crash between making the file and making its tables leaves an empty file and no mark."""
    path.parent.mkdir()
    path.touch(0o600)
    opened = sqlite_store(path)
    check_ledger(opened)
    opened.close()


@pytest.mark.parametrize("replaced", [False, True])
def test_a_file_that_vanishes_while_it_is_open_stops_every_write(
    store: SqliteStore, path: Path, replaced: bool
) -> None:
    """SQLite would go on writing into the removed file, and nobody would ever read it."""
    path.rename(path.with_name("moved.db"))
    if replaced:
        shutil.copy(path.with_name("moved.db"), path)
    with pytest.raises(StoreUnavailableError, match="gone or was replaced"):
        store.transact_now(AddStep(run_id="a", now_us=1))
    with pytest.raises(StoreUnavailableError):
        store.transact(AddStep(run_id="a", now_us=1)).result()
    path.unlink(missing_ok=True)
    path.with_name("moved.db").rename(path)
    assert store.transact_now(AddStep(run_id="a", now_us=1)) == 1


def test_a_store_that_may_only_be_read_is_unavailable() -> None:
    """In a process without the right to write; the superuser's rights are given up for it."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "read-only.db"
        sqlite_store(path).close()
        for item in Path(folder).iterdir():
            item.chmod(0o444 if item.is_file() else 0o555)
        Path(folder).chmod(0o555)
        worker = start("reads_only", path)
        with killed_at_the_end(worker):
            said = ended(worker)
        Path(folder).chmod(0o755)
    assert said["error"] == "StoreUnavailableError"
    assert "Permission" in str(said["message"])


def test_a_full_store_takes_no_step_and_recovers(store: SqliteStore) -> None:
    """SQLITE_FULL becomes StoreFullError; nothing of the step is left; with room again the run goes on."""
    connection = store._writing
    pages = connection.execute("PRAGMA page_count").get
    connection.execute(f"PRAGMA max_page_count = {pages}")
    count = 0

    def fill() -> None:
        nonlocal count
        for row in range(2_000):
            store.transact_now(reserve("a", f"row-{row}"))
            count = row + 1

    with pytest.raises(StoreFullError, match="make room and try again"):
        fill()
    with pytest.raises(StoreFullError):
        store.transact(reserve("a", "one more")).result()
    connection.execute("PRAGMA max_page_count = 1000000")
    check_ledger(store)
    run = store.run("a").result()
    assert run is not None
    assert run.counters.steps == count == len(store.operations(limit=10_000).result())
    assert store.transact_now(AddStep(run_id="a", now_us=1)) == count + 1
