"""A restored or rolled-back store: it says so, and no side effect goes ahead until a person accepts it."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import apsw
import orjson
import pytest

import endstop as es
from endstop.store.port import quarantine_of
from endstop.store.sqlite.incarnation import MARK_NAME
from tests.operations.scenes import SPEC, Bank, Place


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "state.db"


@pytest.fixture
def here(tmp_path: Path) -> Place:
    return Place("sqlite", tmp_path)


def pays(place: Place, bank: Bank, order: str, run_id: str) -> es.ToolResult[object]:
    guard = place.open(bank.tool())
    try:
        with guard.run(SPEC, run_id=run_id) as run:
            return run.call(bank.pay, {"order": order}, tool="pay")
    finally:
        guard.close()


def copy(file: Path, to: Path) -> None:
    """What a backup takes: the database alone, at rest."""
    connection = apsw.Connection(str(file))
    connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    connection.close()
    shutil.copyfile(file, to)


def restored(here: Place, bank: Bank, file: Path) -> Path:
    """A store that was restored to before its last payment."""
    pays(here, bank, "a", "one")
    copy(file, file.with_name("backup"))
    pays(here, bank, "b", "two")
    for name in (f"{file.name}-wal", f"{file.name}-shm"):
        file.with_name(name).unlink(missing_ok=True)
    shutil.copyfile(file.with_name("backup"), file)
    return file


def test_f14_an_older_copy_refuses_every_side_effect_and_names_the_next_step(
    here: Place, bank: Bank, file: Path
) -> None:
    restored(here, bank, file)
    guard = here.open(bank.tool())
    assert "an older copy was restored" in str(quarantine_of(guard.store))
    with guard.run(SPEC, run_id="three") as run:
        for tool in ("pay", "undeclared"):
            with pytest.raises(es.StoreQuarantinedError, match="doctor --accept-restore"):
                run.call(bank.pay, {"order": "b"}, tool=tool)
    assert len(bank.calls) == 2, "payment b was made before the restore; the restored store does not know of it"
    here.close()


def test_reads_and_orders_go_on_in_quarantine(here: Place, bank: Bank, file: Path) -> None:
    restored(here, bank, file)
    guard = here.open(es.ToolPolicy(effect="read"), name="look")
    with guard.run(SPEC, run_id="three") as run:
        assert run.call(lambda: {"seen": 1}, {}, tool="look").value == {"seen": 1}
    assert guard.freeze(reason="restored").kind == "freeze"
    here.close()


def test_a_quarantine_stays_over_restarts_and_new_entries(here: Place, bank: Bank, file: Path) -> None:
    restored(here, bank, file)
    for number in range(4):
        guard = here.open(es.ToolPolicy(effect="read"), name="look")
        for step in range(3):
            with guard.run(SPEC, run_id=f"more-{number}-{step}"):
                pass
        guard.close()
    with pytest.raises(es.StoreQuarantinedError):
        pays(here, bank, "b", "four")


def test_once_accepted_it_goes_on_as_a_new_incarnation_with_an_entry(here: Place, bank: Bank, file: Path) -> None:
    restored(here, bank, file)
    guard = here.open(bank.tool())
    assert guard.store.accept_restore(actor="ann", reason="compared with the bank") is None  # type: ignore[attr-defined]  # SQLite's
    assert quarantine_of(guard.store) is None
    last = orjson.loads(guard.store.entries(limit=1, newest_first=True).result()[0].leaf)
    assert (last["type"], last["order"], last["actor"]) == ("control", "accept_restore", "ann")
    assert b"compared" not in orjson.dumps(last)
    guard.close()
    assert pays(here, bank, "c", "five").value
    assert pays(here, bank, "a", "six").replayed
    # What was written before the restore is of an older incarnation now, however long it is.
    assert quarantine_of(here.open(bank.tool()).store) is None
    here.close()


def test_a_file_that_was_copied_elsewhere_is_in_quarantine(here: Place, bank: Bank, file: Path, tmp_path: Path) -> None:
    pays(here, bank, "a", "one")
    (tmp_path / "elsewhere").mkdir()
    copy(file, tmp_path / "elsewhere" / "state.db")
    with pytest.raises(es.StoreQuarantinedError, match="its mark is gone"):
        pays(Place("sqlite", tmp_path / "elsewhere"), bank, "b", "two")


def test_another_incarnation_is_seen_although_it_is_longer(here: Place, bank: Bank, file: Path) -> None:
    pays(here, bank, "a", "one")
    copy(file, file.with_name("backup"))
    mark = file.with_name("state.db.owners") / MARK_NAME
    body = orjson.loads(mark.read_bytes())
    mark.write_bytes(orjson.dumps({**body, "incarnation": "0" * 20}, option=orjson.OPT_APPEND_NEWLINE))
    with pytest.raises(es.StoreQuarantinedError, match="another incarnation"):
        pays(here, bank, "b", "two")


@pytest.mark.parametrize("content", [b"no json", b"[]", b'{"ledger":"endstop/other"}', b"\xff"])
def test_a_mark_that_cannot_be_read_is_no_good_sign(here: Place, bank: Bank, file: Path, content: bytes) -> None:
    pays(here, bank, "a", "one")
    (file.with_name("state.db.owners") / MARK_NAME).write_bytes(content)
    with pytest.raises(es.StoreQuarantinedError, match="cannot be read"):
        pays(here, bank, "b", "two")


def test_a_crash_never_looks_like_a_restore(here: Place, bank: Bank, file: Path) -> None:
    """The mark lags behind the file and never goes before it."""
    guard = here.open(bank.tool())
    mark = file.with_name("state.db.owners") / MARK_NAME
    early = mark.read_bytes()
    with guard.run(SPEC, run_id="one") as run:
        run.call(bank.pay, {"order": "a"}, tool="pay")
    entries = len(guard.store.entries(limit=1_000).result())
    assert int(orjson.loads(mark.read_bytes())["entries"]) == entries
    guard.close()
    mark.write_bytes(early)  # the power failed before the mark was on the disk
    assert pays(here, bank, "b", "two").value


def test_a_store_from_before_there_were_marks_gets_one(here: Place, bank: Bank, file: Path) -> None:
    pays(here, bank, "a", "one")
    connection = apsw.Connection(str(file))
    connection.execute("DELETE FROM meta WHERE name = 'incarnation'")
    connection.close()
    (file.with_name("state.db.owners") / MARK_NAME).unlink()
    assert pays(here, bank, "b", "two").value
    assert pays(here, bank, "c", "three").value


def test_several_guards_on_one_file_keep_one_mark(here: Place, bank: Bank, file: Path) -> None:
    one, two = here.open(bank.tool()), here.open(bank.tool())
    for number, guard in enumerate((one, two, one, two)):
        with guard.run(SPEC, run_id=f"r{number}") as run:
            run.call(bank.pay, {"order": f"o{number}"}, tool="pay")
    here.close()
    assert pays(here, bank, "last", "last").value


def test_the_mark_is_private(here: Place, bank: Bank, file: Path) -> None:
    pays(here, bank, "a", "one")
    assert os.stat(file.with_name("state.db.owners") / MARK_NAME).st_mode & 0o777 == 0o600
