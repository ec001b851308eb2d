"""Opening the database: the checks that stand before the first write, the schema, and its changes.

Rules. A migration is `pre` (code of the version before still works after it: it only adds) or `post` (it takes away
what only older code used). Opening a store makes what the code needs, up to the last `pre`; the trailing `post` ones
are made by `upgrade`, once no older worker is left. Code refuses a store whose floor lies above it. The schema is the
sum of the migrations; `sql/postgres/schema.sql` shows that sum to readers, and a test holds them equal. A migration
that was released never changes.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from importlib import resources
from typing import TYPE_CHECKING, Final, cast

import psycopg

from endstop.errors import InvariantError, SchemaVersionError, StoreCorruptError, StoreUnavailableError
from endstop.store.postgres.faults import mapped
from endstop.store.postgres.statements import LOCK_SPACE, sql, text_of
from endstop.store.transact import first_entry

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from endstop.store.postgres.link import Link

__all__ = ["Migration", "OpenedStore", "ServerFacts", "migrations", "open_store", "secure", "server_facts", "upgrade"]

SERVER_VERSION_MIN: Final = 130_000
_FILE_NAME: Final = re.compile(r"(\d{4})_[a-z_]+\.(pre|post)\.sql")


@dataclass(frozen=True, slots=True, kw_only=True)
class Migration:
    """What leads from schema version `version - 1` to `version`; a `post` one ends what older code needs."""

    version: int
    post: bool
    sql: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenedStore:
    """What a store's own records say about it."""

    ledger: str
    store_key: bytes = field(repr=False)
    version: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerFacts:
    """What the server says of itself."""

    version: str
    number: int
    fsync: str
    full_page_writes: str
    wal_level: str
    synchronous_commit: str
    standby: bool


def migrations() -> tuple[Migration, ...]:
    """Every migration, in order. Raises InvariantError when the numbers have a gap: a broken installation."""
    folder = resources.files("endstop.store").joinpath("sql", "postgres")
    names = [item.name for item in folder.iterdir()]
    found = sorted((match[1], match[2], name) for name in names if (match := _FILE_NAME.fullmatch(name)))
    made = tuple(Migration(version=int(number), post=kind == "post", sql=text_of(name)) for number, kind, name in found)
    if [migration.version for migration in made] != list(range(1, len(made) + 1)):
        msg = f"the installed PostgreSQL migrations are {[number for number, _, _ in found]}: install the package again"
        raise InvariantError(msg)
    return made


def open_store(
    link: Link, *, new_key: Callable[[], bytes], now_us: Callable[[], int], known: Sequence[Migration] | None = None
) -> OpenedStore:
    """Make the store or bring it up to what this code needs. Gives what it knows of itself.

    `known` are the migrations of this code, as installed unless a test gives others. Raises SchemaVersionError when
    this code is too old for the store, or its role may not make what is missing; nothing was changed then.
    """
    known = migrations() if known is None else known
    needed = max((migration.version for migration in known if not migration.post), default=0)

    def open_on(connection: psycopg.Connection) -> OpenedStore | None:
        _check_server(server_facts(connection))
        opened = _opened(connection, known)
        if opened is None or opened.version < needed:
            _migrate(connection, [item for item in known if item.version <= needed], new_key, now_us)
            opened = _opened(connection, known)
        return opened

    with mapped("open the store"):
        opened = link.ask(open_on)
    if opened is None:
        msg = "the store was made and is not there: is another program dropping it?"
        raise StoreCorruptError(msg)
    return opened


def upgrade(link: Link, *, now_us: Callable[[], int], known: Sequence[Migration] | None = None) -> int:
    """Make every migration, the `post` ones too: when no worker with older code is left. Gives the schema version."""
    known = migrations() if known is None else known
    with mapped("upgrade the store"), link.pooled() as connection:
        if _opened(connection, known) is None:
            msg = "there is no store in this database: open one first"
            raise StoreUnavailableError(msg)
        _migrate(connection, known, None, now_us)
    return known[-1].version


def secure(link: Link, *, login: str | None = None) -> None:
    """As an administrator: give the ledger's tables an owner of their own, and `login` the right to append only."""
    with mapped("set up the roles"), link.pooled() as connection:
        connection.execute("BEGIN")
        try:
            connection.execute(text_of("roles.sql"))
            if login is not None:
                connection.execute(psycopg.sql.SQL("GRANT endstop_app TO {}").format(psycopg.sql.Identifier(login)))
            connection.execute("COMMIT")
        except BaseException:
            _rolled_back(connection)
            raise


def server_facts(connection: psycopg.Connection) -> ServerFacts:
    """Ask the server."""
    row = connection.execute(sql("server")).fetchone()
    version, number, fsync, full_page_writes, wal_level, synchronous_commit, standby = cast("tuple[str, ...]", row)
    return ServerFacts(
        version=version, number=int(number), fsync=fsync, full_page_writes=full_page_writes, wal_level=wal_level,
        synchronous_commit=synchronous_commit, standby=bool(standby),
    )  # fmt: skip


def _check_server(server: ServerFacts) -> None:
    if server.number < SERVER_VERSION_MIN:
        msg = f"PostgreSQL {server.version} is too old: use {SERVER_VERSION_MIN // 10_000} or later"
        raise StoreUnavailableError(msg)
    if server.standby:
        msg = "this server is a standby and takes no writes: name the primary, or add target_session_attrs=read-write"
        raise StoreUnavailableError(msg)
    if server.fsync != "on" or server.full_page_writes != "on":
        msg = (
            f"this server forgets commits when it crashes (fsync {server.fsync}, full_page_writes "
            f"{server.full_page_writes}): turn both on, a ledger must be durable"
        )
        raise StoreUnavailableError(msg)


def _opened(connection: psycopg.Connection, known: Sequence[Migration]) -> OpenedStore | None:
    """What is there, None when there is no store. Raises SchemaVersionError when this code is too old for it."""
    if not cast("tuple[bool]", connection.execute(sql("has_store")).fetchone())[0]:
        return None
    row = connection.execute(sql("store")).fetchone()
    if row is None:
        msg = "the store has lost its name and its key: restore the database from a backup"
        raise StoreCorruptError(msg)
    ledger, store_key, version, floor = cast("tuple[str, bytes, int, int]", row)
    newest = known[-1].version if known else 0
    if floor > newest:
        msg = (
            f"the store has schema version {version} and is for code of version {floor} or later, this code knows "
            f"{newest}: install a newer Endstop"
        )
        raise SchemaVersionError(msg)
    return OpenedStore(ledger=ledger, store_key=store_key, version=version)


def _migrate(
    connection: psycopg.Connection, known: Sequence[Migration], new_key: Callable[[], bytes] | None,
    now_us: Callable[[], int],
) -> None:  # fmt: skip
    """Make what is missing of `known`, all of it or nothing; one process at a time."""
    connection.execute(sql("begin"))
    try:
        connection.execute(sql("hold_schema"), {"space": LOCK_SPACE})
        opened = _opened(connection, known)
        for migration in known[0 if opened is None else opened.version :]:
            connection.execute(migration.sql)
            if opened is not None or migration.version > 1:
                floor = migration.version if migration.post else 1
                connection.execute(sql("set_version"), {"version": migration.version, "floor": floor})
            elif new_key is not None:
                _name(connection, new_key, now_us())
        connection.execute("COMMIT")
    except psycopg.errors.InsufficientPrivilege as error:
        _rolled_back(connection)
        msg = "this role may not make the store's tables: open it once as the role endstop_owner or an administrator"
        raise SchemaVersionError(msg) from error
    except BaseException:
        _rolled_back(connection)
        raise


def _name(connection: psycopg.Connection, new_key: Callable[[], bytes], made_at_us: int) -> None:
    """A new store's name, key and first entry."""
    ledger = f"endstop/{new_key()[:10].hex()}"
    values = {"ledger": ledger, "store_key": new_key(), "created_at_us": made_at_us, "version": 1}
    connection.execute(sql("insert_store"), values)
    leaf = first_entry(ledger, made_at_us).decode("ascii")
    connection.execute(sql("first_entry"), {"leaf": leaf})


def _rolled_back(connection: psycopg.Connection) -> None:
    if not connection.closed:
        connection.execute("ROLLBACK")
