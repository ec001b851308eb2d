"""The extraction tools read documents of one folder and save checked records only."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from endstop_examples import extract
from endstop_examples.refusals import InputRefusedError, WriteRefusedError

FIELDS = {
    "supplier": "Quay Electric",
    "invoice_number": "QE/7781",
    "issued_on": "2026-01-30",
    "currency": "USD",
    "total": "251.25",
}


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "documents").mkdir()
    (tmp_path / "documents" / "b.md").write_bytes(b"caf\xe9")
    (tmp_path / "documents" / "a.txt").write_bytes(b"\xef\xbb\xbfcaf\xc3\xa9")
    (tmp_path / "documents" / "c.pdf").write_bytes(b"%PDF")
    monkeypatch.setenv("ENDSTOP_EXTRACT_ROOT", str(tmp_path))
    monkeypatch.setenv("ENDSTOP_EXTRACT_OUT", str(tmp_path / "records"))
    return tmp_path


def test_text_documents_are_listed_by_name() -> None:
    assert extract.list_documents("documents/") == {
        "documents": [
            {"document_id": "a", "path": "documents/a.txt", "bytes": 8},
            {"document_id": "b", "path": "documents/b.md", "bytes": 4},
        ],
        "documents_count": 2,
    }


@pytest.mark.parametrize("path", ["documents/a.txt", "documents/b.md"])
def test_a_document_is_read_as_utf_8_or_as_windows_1252(path: str) -> None:
    assert extract.read_document(path)["text"] == "café"


@pytest.mark.parametrize("path", ["documents/c.pdf", "documents/none.txt", "../a.txt", "documents"])
def test_a_document_of_another_kind_or_place_is_refused(path: str) -> None:
    with pytest.raises(InputRefusedError):
        extract.read_document(path)


@pytest.mark.parametrize("place", ["none", "..", "documents/a.txt"])
def test_a_folder_that_is_none_is_refused(place: str) -> None:
    with pytest.raises(InputRefusedError):
        extract.list_documents(place)


def test_a_record_is_saved_with_its_total_in_cents(folder: Path) -> None:
    assert extract.save_record("qe", FIELDS) == {"document_id": "qe", "total_cents": 25_125, "changed": True}
    assert json.loads((folder / "records" / "qe.json").read_text()) == {
        "document_id": "qe",
        "supplier": "Quay Electric",
        "invoice_number": "QE/7781",
        "issued_on": "2026-01-30",
        "currency": "USD",
        "total_cents": 25_125,
    }


def test_saving_the_same_record_again_changes_nothing_and_another_replaces_it(folder: Path) -> None:
    extract.save_record("qe", FIELDS)
    assert extract.save_record("qe", FIELDS)["changed"] is False
    assert extract.save_record("qe", FIELDS | {"total": "-1"})["changed"] is True
    assert json.loads((folder / "records" / "qe.json").read_text())["total_cents"] == -100


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("supplier", " "),
        ("supplier", "x" * 201),
        ("supplier", 7),
        ("issued_on", "30.01.2026"),
        ("issued_on", "2026-02-30"),
        ("currency", "usd"),
        ("currency", "US"),
        ("total", "1,000.00"),
        ("total", "1.005"),
        ("total", "NaN"),
        ("total", "Infinity"),
        ("total", "1e999999"),
        ("total", "1e30"),
        ("total", "1000000000.01"),
        ("colour", "red"),
    ],
)
def test_a_field_that_is_malformed_or_unknown_is_named_and_nothing_is_saved(
    folder: Path, name: str, value: str
) -> None:
    with pytest.raises(extract.FieldInvalidError, match=f"'{name}'"):
        extract.save_record("qe", FIELDS | {name: value})
    assert not (folder / "records").exists()


@pytest.mark.parametrize("name", sorted(FIELDS))
def test_a_missing_field_is_named(name: str) -> None:
    with pytest.raises(extract.FieldInvalidError, match=f"'{name}' is missing"):
        extract.save_record("qe", {key: value for key, value in FIELDS.items() if key != name})


@pytest.mark.parametrize("document_id", ["", "../x", "a/b", "-a", "x" * 65, "a.b"])
def test_a_document_id_that_could_be_a_path_is_refused(document_id: str) -> None:
    with pytest.raises(WriteRefusedError):
        extract.save_record(document_id, FIELDS)


@given(st.integers(-100_000_000_000, 100_000_000_000))
def test_every_amount_of_cents_comes_back_exactly(cents: int) -> None:
    sign = "-" if cents < 0 else ""
    assert extract._cents(f"{sign}{abs(cents) // 100}.{abs(cents) % 100:02d}") == cents


@given(st.text(max_size=30))
def test_any_total_is_an_amount_or_a_refusal(text: str) -> None:
    try:
        cents = extract._cents(text)
    except extract.FieldInvalidError:
        return
    assert isinstance(cents, int)
