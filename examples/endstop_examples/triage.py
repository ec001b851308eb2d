"""The support triage's tools over a small SQLite store: `next_ticket`, `search_kb` (reads), `assign_ticket` (write).

The store stands at ENDSTOP_TRIAGE_DB (default out/tickets.db). If it does not exist it is made, in one transaction,
from the JSON file at ENDSTOP_TRIAGE_SEED (default tickets.json).
"""

from __future__ import annotations

import json
import re
import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Literal, get_args

from endstop import NotAppliedError
from endstop_examples.confined_files import folder_from_environment, locked
from endstop_examples.refusals import ExampleError, InputRefusedError, WriteRefusedError, shown

DB_VARIABLE = "ENDSTOP_TRIAGE_DB"
SEED_VARIABLE = "ENDSTOP_TRIAGE_SEED"
# As a type, so that a model sees which teams there are, and a wrong one is refused before it becomes an operation.
Team = Literal["billing", "hardware", "logins", "shipping"]
TEAMS = get_args(Team)
BUSY_MS_MAX = 5_000
QUERY_CHARS_MAX = 200
SEED_BYTES_MAX = 4 * 1024 * 1024
ARTICLES_FOUND_MAX = 3
WORD_CHARS_MIN = 3

_SCHEMA = """
CREATE TABLE tickets (
    seq INTEGER PRIMARY KEY,
    ticket_id TEXT NOT NULL UNIQUE,
    subject TEXT NOT NULL,
    body TEXT NOT NULL,
    team TEXT,
    version INTEGER NOT NULL
);
CREATE TABLE articles (
    article_id TEXT PRIMARY KEY,
    title TEXT NOT NULL,
    body TEXT NOT NULL
);
"""


class TicketStoreError(ExampleError):
    """The ticket store cannot be opened or made, or it failed. An assignment under way may have been made."""


class TicketStoreMissingError(TicketStoreError, NotAppliedError):
    """There is no ticket store and none can be made. Nothing was read or written."""


class TicketUnknownError(InputRefusedError):
    """There is no such ticket."""


class VersionConflictError(WriteRefusedError):
    """Someone else changed the ticket since it was read. Nothing was written; read it again."""


def next_ticket(cursor: int) -> dict[str, object]:
    """The first unassigned ticket after `cursor` (0 to begin), and the cursor to go on from.

    `ticket` is None when there is none left; the cursor is then unchanged. Raises InputRefusedError for a negative
    cursor.
    """
    if cursor < 0:
        msg = f"cursor {cursor} refused: begin with 0, then pass on the cursor of the last answer"
        raise InputRefusedError(msg)
    with _store() as store:
        row = store.execute(
            "SELECT seq, ticket_id, subject, body, version FROM tickets"
            " WHERE seq > ? AND team IS NULL ORDER BY seq LIMIT 1",
            (cursor,),
        ).fetchone()
        (unassigned,) = store.execute("SELECT count(*) FROM tickets WHERE team IS NULL").fetchone()
    if row is None:
        return {"ticket": None, "cursor": cursor, "unassigned": unassigned}
    seq, ticket_id, subject, body, version = row
    ticket = {"ticket_id": ticket_id, "subject": subject, "body": body, "version": version}
    return {"ticket": ticket, "cursor": seq, "unassigned": unassigned}


def search_kb(query: str) -> dict[str, object]:
    """The knowledge base articles that share most words with `query`, the best first, at most three."""
    if not query.strip() or len(query) > QUERY_CHARS_MAX:
        msg = f"query refused: it must have 1 to {QUERY_CHARS_MAX} characters"
        raise InputRefusedError(msg)
    wanted = _words(query)
    with _store() as store:
        articles = store.execute("SELECT article_id, title, body FROM articles ORDER BY article_id").fetchall()
    scored = [(len(wanted & _words(f"{row[1]} {row[2]}")), *row) for row in articles]
    best = sorted((entry for entry in scored if entry[0] > 0), key=lambda entry: (-entry[0], entry[1]))
    found = [
        {"article_id": article_id, "title": title, "body": body, "words_shared": score}
        for score, article_id, title, body in best[:ARTICLES_FOUND_MAX]
    ]
    return {"articles": found, "matches": len(best)}


def assign_ticket(ticket_id: str, team: Team, version: int) -> dict[str, object]:
    """Assign a ticket to a team, provided it still has the `version` that was read.

    Raises TicketUnknownError, VersionConflictError, or WriteRefusedError for a team that does not exist; the ticket is
    unchanged then.
    """
    if team not in TEAMS:
        msg = f"team {shown(team)!r} refused: it must be one of {', '.join(TEAMS)}"
        raise WriteRefusedError(msg)
    with _store() as store, store:
        changed = store.execute(
            "UPDATE tickets SET team = ?, version = version + 1 WHERE ticket_id = ? AND version = ?",
            (team, ticket_id, version),
        ).rowcount
        row = store.execute("SELECT version FROM tickets WHERE ticket_id = ?", (ticket_id,)).fetchone()
    if row is None:
        msg = f"ticket {shown(ticket_id)!r} is unknown: take the ticket_id that next_ticket gave"
        raise TicketUnknownError(msg)
    if changed == 0:
        msg = f"ticket {shown(ticket_id)!r} not assigned: it has version {row[0]}, not {version}; read it again"
        raise VersionConflictError(msg)
    return {"ticket_id": ticket_id, "team": team, "version": row[0]}


def _words(text: str) -> frozenset[str]:
    return frozenset(word for word in re.findall(r"\w+", text.lower()) if len(word) >= WORD_CHARS_MIN)


@contextmanager
def _store() -> Iterator[sqlite3.Connection]:
    path = folder_from_environment(DB_VARIABLE, "out/tickets.db")
    if not path.exists():
        _make_store(path)
    try:
        with closing(sqlite3.connect(path, timeout=BUSY_MS_MAX / 1000)) as store:
            yield store
    except sqlite3.DatabaseError as error:
        msg = f"ticket store {path.name!r} failed: {type(error).__name__}; check that it is a ticket store"
        raise TicketStoreError(msg) from error


def _make_store(path: Path) -> None:
    seed = folder_from_environment(SEED_VARIABLE, "tickets.json")
    try:
        with seed.open("rb") as stream:
            data = json.loads(stream.read(SEED_BYTES_MAX))
        tickets = [(seq, t["ticket_id"], t["subject"], t["body"]) for seq, t in enumerate(data["tickets"], start=1)]
        articles = [(a["article_id"], a["title"], a["body"]) for a in data["articles"]]
    except (OSError, ValueError, KeyError, TypeError) as error:
        msg = (
            f"ticket store {path.name!r} does not exist and the seed file {seed.name!r} cannot be read; "
            f"set {DB_VARIABLE} or {SEED_VARIABLE}"
        )
        raise TicketStoreMissingError(msg) from error
    # Made under another name and renamed, so that nobody ever opens a store without its tickets.
    with locked(path):
        if path.exists():
            return
        unfinished = path.with_name(path.name + ".new")
        unfinished.unlink(missing_ok=True)
        with closing(sqlite3.connect(unfinished)) as store:
            store.executescript(_SCHEMA)
            with store:
                store.executemany("INSERT INTO tickets VALUES (?, ?, ?, ?, NULL, 1)", tickets)
                store.executemany("INSERT INTO articles VALUES (?, ?, ?)", articles)
        unfinished.replace(path)
