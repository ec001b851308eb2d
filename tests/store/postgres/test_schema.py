"""The schema: the sum of its migrations, changed under workers with old and new code, refused where it cannot work."""

from __future__ import annotations

import re
from collections.abc import Iterator

import psycopg
import pytest

from endstop.errors import InvariantError, SchemaVersionError, StoreCorruptError, StoreUnavailableError
from endstop.store.postgres import schema
from endstop.store.postgres.link import Link
from endstop.store.postgres.schema import Migration, migrations, open_store, upgrade
from endstop.store.postgres.statements import text_of
from endstop.testing.store_contract_runs import check_ledger, in_threads
from endstop.testing.store_samples import AddStep, new_run
from tests.postgres_server import PostgresServer
from tests.store.postgres.kit import CLOCK, IDS, postgres_store

pytestmark = pytest.mark.slow

OURS = "'endstop'::regnamespace"
CATALOGUE = [
    """
    SELECT table_name, column_name, data_type, collation_name, is_nullable, column_default, is_identity,
        generation_expression
    FROM information_schema.columns WHERE table_schema = 'endstop' ORDER BY 1, ordinal_position
    """,
    f"SELECT relname, relkind, reloptions FROM pg_class WHERE relnamespace = {OURS} ORDER BY 1",
    f"""
    SELECT conrelid::regclass::text, conname, pg_get_constraintdef(oid) FROM pg_constraint
    WHERE connamespace = {OURS} ORDER BY 1, 2
    """,
    "SELECT indexname, indexdef FROM pg_indexes WHERE schemaname = 'endstop' ORDER BY 1",
    "SELECT tgname, tgenabled, pg_get_triggerdef(oid) FROM pg_trigger WHERE NOT tgisinternal ORDER BY 1",
    f"SELECT proname, pg_get_functiondef(oid) FROM pg_proc WHERE pronamespace = {OURS} ORDER BY 1",
    "SELECT viewname, definition FROM pg_views WHERE schemaname = 'endstop' ORDER BY 1",
    f"""
    SELECT attrelid::regclass::text, attname, attstorage FROM pg_attribute
    WHERE attnum > 0 AND attrelid IN (SELECT oid FROM pg_class WHERE relnamespace = {OURS}) ORDER BY 1, 2
    """,
]


@pytest.fixture
def link(database: str) -> Iterator[Link]:
    made = Link(database, connections_max=4)
    made.open()
    yield made
    made.close()


def opened(link: Link, known: list[Migration]) -> schema.OpenedStore:
    return open_store(link, new_key=IDS.new_key, now_us=CLOCK.now_us, known=known)


def catalogue(url: str) -> list[object]:
    with psycopg.connect(url, autocommit=True) as connection:
        return [connection.execute(question.encode()).fetchall() for question in CATALOGUE]


def test_the_schema_is_the_sum_of_its_migrations(postgres: PostgresServer) -> None:
    with postgres.database() as migrated, postgres.database() as written:
        postgres_store(migrated).close()
        with psycopg.connect(written, autocommit=True) as connection:
            connection.execute(text_of("schema.sql"))
        found, shown = catalogue(migrated), catalogue(written)
        assert all(found), "the catalogue was asked for nothing"
        assert found == shown


def test_the_migrations_are_numbered_without_a_gap(monkeypatch: pytest.MonkeyPatch) -> None:
    assert [migration.version for migration in migrations()] == list(range(1, len(migrations()) + 1))
    monkeypatch.setattr(schema, "_FILE_NAME", re.compile(r"(000)1_first\.(pre)\.sql"))  # the first one counts as 0
    with pytest.raises(InvariantError, match="install the package again"):
        migrations()


def test_old_and_new_code_work_together_until_the_post_migration(database: str, link: Link) -> None:
    """New code adds (pre) and both work; with the old workers gone, `upgrade` takes away (post), and old code stops."""
    now = list(migrations())
    newest = now[-1].version
    added = Migration(
        version=newest + 1, post=False, sql=b"ALTER TABLE endstop.operation ADD COLUMN colour text DEFAULT 'grey'"
    )
    taken = Migration(version=newest + 2, post=True, sql=b"ALTER TABLE endstop.operation DROP COLUMN reason")
    old = postgres_store(database)
    try:
        old.open_run(new_run("a")).result()
        # 1. New code opens: what it adds is there, what it takes away is not gone yet.
        assert opened(link, [*now, added, taken]).version == newest + 1
        # 2. Old code goes on, and may still be started.
        assert old.transact(AddStep(run_id="a", now_us=1)).result() == 1
        again = postgres_store(database)
        assert again.transact(AddStep(run_id="a", now_us=1)).result() == 2
        assert again.facts().result().schema_version == newest + 1
        check_ledger(again)
        again.close()
        # 3. No old worker is left: the rest.
        assert upgrade(link, now_us=CLOCK.now_us, known=[*now, added, taken]) == newest + 2
        assert opened(link, [*now, added, taken]).version == newest + 2
        with pytest.raises(SchemaVersionError, match="install a newer Endstop"):
            postgres_store(database)
    finally:
        old.close()


def test_a_migration_that_fails_changes_nothing(database: str, link: Link) -> None:
    now = list(migrations())
    postgres_store(database).close()
    before = catalogue(database)
    broken = Migration(
        version=now[-1].version + 1, post=False,
        sql=b"ALTER TABLE endstop.run ADD COLUMN colour text; SELECT nothing()",
    )  # fmt: skip
    with pytest.raises(SchemaVersionError):
        opened(link, [*now, broken])
    assert catalogue(database) == before
    postgres_store(database).close()


def test_many_who_migrate_at_once_do_it_once(database: str, link: Link) -> None:
    now = list(migrations())
    added = Migration(version=now[-1].version + 1, post=False, sql=b"CREATE TABLE endstop.once (id integer)")
    postgres_store(database).close()
    versions: list[int] = []
    in_threads(4, lambda _: versions.append(opened(link, [*now, added]).version))
    assert versions == [now[-1].version + 1] * 4


def test_upgrade_needs_a_store(link: Link) -> None:
    with pytest.raises(StoreUnavailableError, match="open one first"):
        upgrade(link, now_us=CLOCK.now_us)


def test_a_store_that_lost_its_name_is_not_named_again(postgres: PostgresServer, database: str) -> None:
    postgres_store(database).close()
    postgres.execute("DELETE FROM endstop.store", database.rpartition("/")[2])
    with pytest.raises(StoreCorruptError, match="restore the database"):
        postgres_store(database)


@pytest.mark.parametrize("setting", ["fsync=off", "full_page_writes=off"])
def test_a_server_that_forgets_commits_is_refused(own_server: PostgresServer, setting: str) -> None:
    own_server.stop()
    own_server.start(setting)
    with pytest.raises(StoreUnavailableError, match="must be durable"):
        postgres_store(own_server.url())


def test_commits_are_durable_though_the_role_says_otherwise(own_server: PostgresServer) -> None:
    """kill -9 on the server loses what was committed without waiting for the disk; none of that is ours."""
    own_server.stop()
    own_server.start("synchronous_commit=off", "wal_writer_delay=10s")
    url = own_server.url()
    store = postgres_store(url)
    store.open_run(new_run("a")).result()
    for count in range(1, 31):
        assert store.transact(AddStep(run_id="a", now_us=1)).result() == count
    own_server.kill()
    own_server.start("synchronous_commit=off", "wal_writer_delay=10s")
    assert store.transact(AddStep(run_id="a", now_us=1)).result() == 31
    store.close()
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute(b"CREATE TABLE careless (id integer)")
    own_server.kill()
    own_server.start()
    assert own_server.execute("SELECT to_regclass('careless')") == [(None,)], "this server loses nothing: no test"
