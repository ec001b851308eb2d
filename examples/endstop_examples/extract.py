"""The document extraction's tools: `list_documents`, `read_document` (reads), `save_record` (write).

Documents are text files below ENDSTOP_EXTRACT_ROOT (default: the working folder); records are JSON files below
ENDSTOP_EXTRACT_OUT (default out/records), one a document.
"""

from __future__ import annotations

import datetime
import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from decimal import Decimal, InvalidOperation

from endstop_examples.confined_files import folder_from_environment, inside, locked, read_limited, replace_file
from endstop_examples.refusals import InputRefusedError, WriteRefusedError, shown

ROOT_VARIABLE = "ENDSTOP_EXTRACT_ROOT"
OUT_VARIABLE = "ENDSTOP_EXTRACT_OUT"
SUFFIXES = (".txt", ".md")
DOCUMENTS_MAX = 500
DOCUMENT_BYTES_MAX = 256 * 1024
FIELD_CHARS_MAX = 200
TOTAL_MAX = Decimal(1_000_000_000)

_DOCUMENT_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}")
_CURRENCY = re.compile(r"[A-Z]{3}")
_FIELDS = ("supplier", "invoice_number", "issued_on", "currency", "total")


class FieldInvalidError(WriteRefusedError):
    """A field of the record is missing, unknown or malformed; the message names it. Nothing was saved."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InvoiceRecord:
    """What is extracted from one invoice. `total_cents` is the total in hundredths of the currency's unit."""

    document_id: str
    supplier: str
    invoice_number: str
    issued_on: str
    currency: str
    total_cents: int


def list_documents(folder: str) -> dict[str, object]:
    """The text documents of a folder, by name: document_id, path (for read_document) and size in bytes."""
    root = folder_from_environment(ROOT_VARIABLE, ".")
    place = inside(root, folder)
    if not place.is_dir():
        msg = f"folder {shown(folder)!r} refused: there is no such folder"
        raise InputRefusedError(msg)
    found = sorted(entry for entry in place.iterdir() if entry.suffix in SUFFIXES and entry.is_file())
    documents = [
        {"document_id": entry.stem, "path": f"{folder.rstrip('/')}/{entry.name}", "bytes": entry.stat().st_size}
        for entry in found[:DOCUMENTS_MAX]
    ]
    return {"documents": documents, "documents_count": len(found)}


def read_document(path: str) -> dict[str, object]:
    """The text of one document. Bytes that are not UTF-8 are read as Windows-1252."""
    root = folder_from_environment(ROOT_VARIABLE, ".")
    source = inside(root, path)
    if source.suffix not in SUFFIXES:
        msg = f"document {shown(path)!r} refused: its name must end in {' or '.join(SUFFIXES)}"
        raise InputRefusedError(msg)
    data = read_limited(source, name=path, bytes_max=DOCUMENT_BYTES_MAX)
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError:
        text = data.decode("cp1252", "replace")
    return {"document_id": source.stem, "path": path, "text": text, "bytes": len(data)}


def save_record(document_id: str, fields: dict[str, str]) -> dict[str, object]:
    """Check and save the record of one document.

    `fields` has exactly: supplier, invoice_number, issued_on (YYYY-MM-DD), currency (three capital letters) and total
    (a decimal number such as 1249.50). Saving the same record again changes nothing (`changed` is then false); other
    fields replace it as a whole. Raises FieldInvalidError or WriteRefusedError; the record is unchanged then.
    """
    if not _DOCUMENT_ID.fullmatch(document_id):
        msg = f"record {shown(document_id)!r} refused: a document_id is 1 to 64 letters, digits, '-' and '_'"
        raise WriteRefusedError(msg)
    record = _checked(document_id, fields)
    target = inside(folder_from_environment(OUT_VARIABLE, "out/records"), f"{document_id}.json")
    data = (json.dumps(asdict(record), indent=2, ensure_ascii=False) + "\n").encode()
    with locked(target):
        changed = not target.is_file() or target.read_bytes() != data
        if changed:
            replace_file(target, data)
    return {"document_id": document_id, "total_cents": record.total_cents, "changed": changed}


def _checked(document_id: str, fields: dict[str, str]) -> InvoiceRecord:
    for name in sorted(set(fields) ^ set(_FIELDS)):
        problem = "is missing" if name in _FIELDS else "is unknown"
        msg = f"field {shown(name)!r} {problem}; a record has exactly: {', '.join(_FIELDS)}"
        raise FieldInvalidError(msg)
    given: Mapping[str, object] = fields  # a model may send anything, whatever the schema says
    for name in _FIELDS:
        value = given[name]
        if not isinstance(value, str) or not value.strip() or len(value) > FIELD_CHARS_MAX:
            msg = f"field {name!r} refused: it must be text of 1 to {FIELD_CHARS_MAX} characters"
            raise FieldInvalidError(msg)
    if not _CURRENCY.fullmatch(fields["currency"]):
        msg = "field 'currency' refused: it must be three capital letters, such as EUR"
        raise FieldInvalidError(msg)
    return InvoiceRecord(
        document_id=document_id,
        supplier=fields["supplier"].strip(),
        invoice_number=fields["invoice_number"].strip(),
        issued_on=_date(fields["issued_on"]),
        currency=fields["currency"],
        total_cents=_cents(fields["total"]),
    )


def _date(text: str) -> str:
    try:
        return datetime.datetime.strptime(text.strip(), "%Y-%m-%d").replace(tzinfo=datetime.UTC).date().isoformat()
    except ValueError:
        msg = "field 'issued_on' refused: it must be a date as YYYY-MM-DD"
        raise FieldInvalidError(msg) from None


def _cents(text: str) -> int:
    try:
        total = Decimal(text.strip())
    except InvalidOperation:
        total = Decimal("NaN")
    if not total.is_finite() or abs(total) > TOTAL_MAX or total != total.quantize(Decimal("0.01")):
        msg = "field 'total' refused: it must be a decimal number with at most two decimals, such as 1249.50"
        raise FieldInvalidError(msg)
    return int(total * 100)
