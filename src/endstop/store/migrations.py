"""The SQL of the SQLite store: numbered migrations, and statements by name.

A store's schema is the sum of its migrations; `sql/schema.sql` shows that sum to readers, and a test holds them equal.
A migration that was released never changes.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from importlib import resources
from typing import Final

from endstop.errors import InvariantError, SchemaVersionError

__all__ = ["SCHEMA_VERSION", "Migration", "migrations", "pending", "queries"]

SCHEMA_VERSION: Final = 2
_FILE_NAME: Final = re.compile(r"(\d{4})_[a-z_]+\.sql")
_QUERY: Final = re.compile(r"^-- name: ([a-z_]+)\n-- [^\n]+\n", re.MULTILINE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Migration:
    """The statements that lead from schema version `version - 1` to `version`."""

    version: int
    sql: str


def _text(name: str) -> str:
    return resources.files("endstop.store").joinpath("sql", name).read_text("utf-8")


def migrations() -> tuple[Migration, ...]:
    """Every migration, in order. Raises InvariantError when the numbers have a gap: a broken installation."""
    names = (item.name for item in resources.files("endstop.store").joinpath("sql").iterdir())
    found = sorted((int(match[1]), match[0]) for name in names if (match := _FILE_NAME.fullmatch(name)))
    if [number for number, _ in found] != list(range(1, SCHEMA_VERSION + 1)):
        msg = f"the installed migrations are {[name for _, name in found]}; this code needs 1 to {SCHEMA_VERSION}"
        raise InvariantError(msg)
    return tuple(Migration(version=number, sql=_text(name)) for number, name in found)


def pending(version: object) -> tuple[Migration, ...]:
    """What is missing in a store of schema `version`. Raises SchemaVersionError for one that this code cannot know."""
    if type(version) is not int or not 0 <= version <= SCHEMA_VERSION:
        msg = (
            f"the store has schema version {version!r}, this code knows 1 to {SCHEMA_VERSION}: "
            "install the version of Endstop that wrote it, or a newer one"
        )
        raise SchemaVersionError(msg)
    return migrations()[version:]


def queries(name: str = "queries.sql") -> dict[str, str]:
    """Every named statement of a file, by its name. Raises InvariantError when a name stands twice."""
    parts = _QUERY.split(_text(name))[1:]
    # In one line: a statement's text is hashed at every use.
    found = {key: " ".join(sql.split()).rstrip(";") for key, sql in zip(parts[::2], parts[1::2], strict=True)}
    if len(found) != len(parts) // 2:
        msg = f"two statements of {name} have one name"
        raise InvariantError(msg)
    return found
