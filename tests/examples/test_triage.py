"""The triage tools walk the tickets by cursor and assign each version once."""

from __future__ import annotations

import json
import sqlite3
import threading
from pathlib import Path

import pytest

from endstop_examples import triage
from endstop_examples.refusals import InputRefusedError, WriteRefusedError

SEED = {
    "tickets": [
        {"ticket_id": "T-1", "subject": "Twice", "body": "Charged twice."},
        {"ticket_id": "T-2", "subject": "Locked", "body": "Password lost."},
    ],
    "articles": [
        {"article_id": "KB-2", "title": "Password lost", "body": "The logins team resets it."},
        {"article_id": "KB-1", "title": "Charged twice", "body": "Billing checks the charge."},
        {"article_id": "KB-3", "title": "Lost parcel", "body": "Shipping asks."},
    ],
}


@pytest.fixture(autouse=True)
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "tickets.json").write_text(json.dumps(SEED))
    monkeypatch.setenv("ENDSTOP_TRIAGE_DB", str(tmp_path / "out" / "tickets.db"))
    monkeypatch.setenv("ENDSTOP_TRIAGE_SEED", str(tmp_path / "tickets.json"))
    return tmp_path / "out" / "tickets.db"


def test_the_cursor_walks_the_unassigned_tickets_to_their_end() -> None:
    first = triage.next_ticket(0)
    assert (first["ticket"], first["cursor"], first["unassigned"]) == (
        {"ticket_id": "T-1", "subject": "Twice", "body": "Charged twice.", "version": 1},
        1,
        2,
    )
    assert triage.next_ticket(1)["cursor"] == 2
    assert triage.next_ticket(2) == {"ticket": None, "cursor": 2, "unassigned": 2}


def test_an_assigned_ticket_is_passed_over() -> None:
    assert triage.assign_ticket("T-1", "billing", 1) == {"ticket_id": "T-1", "team": "billing", "version": 2}
    answer = triage.next_ticket(0)
    assert (answer["cursor"], answer["unassigned"]) == (2, 1)


def test_an_old_version_is_refused_and_changes_nothing() -> None:
    triage.assign_ticket("T-1", "billing", 1)
    with pytest.raises(triage.VersionConflictError, match="version 2, not 1"):
        triage.assign_ticket("T-1", "shipping", 1)
    assert triage.assign_ticket("T-1", "logins", 2)["version"] == 3


def test_of_many_who_assign_one_version_at_once_exactly_one_succeeds() -> None:
    outcomes: list[str] = []

    def assign() -> None:
        try:
            triage.assign_ticket("T-2", "logins", 1)
        except triage.VersionConflictError:
            outcomes.append("conflict")
        else:
            outcomes.append("assigned")

    threads = [threading.Thread(target=assign) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(outcomes) == ["assigned", *["conflict"] * 7]


def test_an_unknown_ticket_and_an_unknown_team_are_refused() -> None:
    with pytest.raises(triage.TicketUnknownError):
        triage.assign_ticket("T-9", "billing", 1)
    with pytest.raises(WriteRefusedError, match="billing, hardware"):
        triage.assign_ticket("T-1", "sales", 1)


def test_articles_come_by_the_number_of_words_they_share() -> None:
    answer = triage.search_kb("I lost my password")
    assert [(a["article_id"], a["words_shared"]) for a in answer["articles"]] == [  # type: ignore[attr-defined] # JSON
        ("KB-2", 2),
        ("KB-3", 1),
    ]
    assert triage.search_kb("nothing like it") == {"articles": [], "matches": 0}


@pytest.mark.parametrize("query", ["", " ", "x" * 201])
def test_a_blank_or_overlong_query_is_refused(query: str) -> None:
    with pytest.raises(InputRefusedError):
        triage.search_kb(query)


def test_a_negative_cursor_is_refused() -> None:
    with pytest.raises(InputRefusedError, match="begin with 0"):
        triage.next_ticket(-1)


def test_a_store_is_made_once_and_kept(store: Path) -> None:
    triage.assign_ticket("T-1", "billing", 1)
    (store.parent.parent / "tickets.json").unlink()
    assert triage.next_ticket(0)["cursor"] == 2


@pytest.mark.parametrize("seed", [None, "no json", "[]", '{"tickets": [{}], "articles": []}'])
def test_without_a_usable_seed_no_store_is_made(store: Path, seed: str | None) -> None:
    place = store.parent.parent / "tickets.json"
    place.unlink() if seed is None else place.write_text(seed)
    with pytest.raises(triage.TicketStoreError, match="ENDSTOP_TRIAGE_SEED"):
        triage.next_ticket(0)
    assert not store.exists()


def test_a_file_that_is_no_ticket_store_is_named(store: Path) -> None:
    store.parent.mkdir()
    sqlite3.connect(store).close()
    store.write_bytes(b"something else" * 100)
    with pytest.raises(triage.TicketStoreError, match=r"tickets\.db"):
        triage.next_ticket(0)
