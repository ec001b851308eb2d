"""Where a recording is read from: its shape is found by content, its lines are streamed, its documents are bounded.

Four shapes: `lines` (a JSON record a line, streamed), `document` (one JSON value, read whole up to
`DOCUMENT_BYTES_MAX`; a longer array is streamed element by element), `text`, and `store` (a SQLite file). A document
that breaks off is read up to where it breaks. Nothing here raises on what a file holds; what was not read is counted.
"""

from __future__ import annotations

import io
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, Final

import orjson

from endstop.errors import UsageError

if TYPE_CHECKING:
    from endstop.replay.trace import Skips

__all__ = ["DOCUMENT_BYTES_MAX", "LINE_BYTES_MAX", "Source", "parse_json", "split_array"]

HEAD_BYTES: Final = 64 * 1024
LINE_BYTES_MAX: Final = 32 * 1024 * 1024
DOCUMENT_BYTES_MAX: Final = 256 * 1024 * 1024
ELEMENT_BYTES_MAX: Final = 64 * 1024 * 1024
HEAD_RECORDS_MAX: Final = 40
HEAD_READ_MAX: Final = 4 * 1024 * 1024
CHUNK_BYTES: Final = 256 * 1024

NO_JSON: Final = "line that is no JSON"
COMMENT: Final = "comment line"
TOO_LONG: Final = f"line longer than {LINE_BYTES_MAX} bytes"
CUT_LINE: Final = "last line is cut off"
NO_RECORD: Final = "line that is no JSON object"
CUT_DOCUMENT: Final = "document breaks off: read up to there"

_SQLITE_MAGIC: Final = b"SQLite format 3\x00"
_COMMENTS: Final = (b"//", b"#")
_BOM: Final = b"\xef\xbb\xbf"
_SIGNS: Final = re.compile(rb'[\[\]{},"]')
_STRING_END: Final = re.compile(rb'[^"\\]*(?:\\.[^"\\]*)*"', re.DOTALL)
# What is no JSON has no value, not even null.
NO_JSON_VALUE: Final = object()


def parse_json(data: bytes) -> object:
    """`data` as JSON, or `NO_JSON_VALUE`. NaN and lone surrogates are read as Python's own reader does."""
    try:
        return orjson.loads(data)
    except ValueError:
        pass
    try:
        return json.loads(data)
    except (ValueError, RecursionError):
        return NO_JSON_VALUE


class Source:
    """One file to read. `records` gives its JSON records whatever the shape, `document` the one value of a document."""

    def __init__(self, path: Path, *, name: str | None = None) -> None:
        self.path = path
        self.name = name or str(path)
        self.shape = "text"
        self.document: object = None
        self.head_records: tuple[object, ...] = ()
        self.head_text = ""
        self._cut = False
        self._streamed = False
        try:
            self._look()
        except OSError as error:
            msg = f"{self.name} cannot be read: {error.strerror or type(error).__name__}"
            raise UsageError(msg) from error

    @property
    def stem(self) -> str:
        """The file's name without its folder and ending: what a run is called that has no name of its own."""
        return Path(self.name).name.split(".")[0] or self.name

    def _look(self) -> None:
        with self.path.open("rb") as stream:
            head = stream.read(HEAD_BYTES)
        self.head_text = head.removeprefix(_BOM).decode("utf-8", "replace")
        if head.startswith(_SQLITE_MAGIC):
            self.shape = "store"
            return
        records, whole, broken = self._first_records()
        if records and not broken:
            if whole and len(records) == 1:
                self._hold(records[0])
            else:
                self.shape, self.head_records = "lines", tuple(records)
            return
        if head.removeprefix(_BOM).lstrip()[:1] in (b"{", b"[") and self._take_document():
            return
        if records:
            self.head_records = tuple(records)
            self.shape = "lines"

    def _hold(self, value: object) -> None:
        self.shape, self.document = "document", value
        self.head_records = tuple(value[:HEAD_RECORDS_MAX]) if isinstance(value, list) else (value,)

    def _first_records(self) -> tuple[list[object], bool, bool]:
        """The first records of a file of lines, whether they are all of it, and whether its first line is no record."""
        records: list[object] = []
        broken = False
        read = 0
        with self.path.open("rb") as stream:
            for line, ended in _raw_lines(stream):
                read += len(line)
                value = parse_json(line) if ended or len(line) < LINE_BYTES_MAX else NO_JSON_VALUE
                if isinstance(value, dict | list):
                    records.append(value)
                elif not records:
                    broken = True
                if len(records) >= HEAD_RECORDS_MAX or read > HEAD_READ_MAX:
                    return records, False, broken
        return records, True, broken

    def _take_document(self) -> bool:
        size = self.path.stat().st_size
        if size <= DOCUMENT_BYTES_MAX:
            value = parse_json(self.path.read_bytes().removeprefix(_BOM))
            if isinstance(value, dict | list):
                self._hold(value)
                return True
        first = []
        with self.path.open("rb") as stream:
            for part in split_array(stream):
                value = parse_json(part)
                if value is not NO_JSON_VALUE:
                    first.append(value)
                if len(first) >= HEAD_RECORDS_MAX:
                    break
        if not any(isinstance(value, dict) for value in first):
            return False
        self.shape, self._streamed = "document", True
        self._cut = size <= DOCUMENT_BYTES_MAX
        self.document = None
        self.head_records = tuple(first)
        return True

    def lines(self) -> Iterator[str]:
        """The lines of a text, without their ends; bytes that are no UTF-8 are replaced."""
        with self.path.open("rb") as stream:
            first = True
            while True:
                line = stream.readline(LINE_BYTES_MAX)
                if not line:
                    return
                yield line.removeprefix(_BOM if first else b"").decode("utf-8", "replace").rstrip("\r\n")
                first = False

    def records(self, skips: Skips) -> Iterator[dict[str, object]]:
        """The JSON objects of this source, in order; whatever is none is counted in `skips`."""
        if self.shape == "document" and not self._streamed:
            values = self.document if isinstance(self.document, list) else [self.document]
            for value in values:
                if isinstance(value, dict):
                    yield value
                else:
                    skips.add("element that is no JSON object")
            return
        if self.shape == "document":
            yield from self._streamed_elements(skips)
            return
        with self.path.open("rb") as stream:
            yield from _record_lines(stream, skips)

    def _streamed_elements(self, skips: Skips) -> Iterator[dict[str, object]]:
        if self._cut:
            skips.add(CUT_DOCUMENT)
        with self.path.open("rb") as stream:
            for part in split_array(stream):
                value = parse_json(part)
                if isinstance(value, dict):
                    yield value
                else:
                    skips.add("element that is no JSON object")


def _raw_lines(stream: BinaryIO) -> Iterator[tuple[bytes, bool]]:
    """The lines that may hold a record, and whether each was ended; comments and blank lines are left out."""
    first = True
    while True:
        line = stream.readline(LINE_BYTES_MAX)
        if not line:
            return
        bare = line.removeprefix(_BOM).strip() if first else line.strip()
        first = False
        if bare and not bare.startswith(_COMMENTS):
            yield bare, line.endswith(b"\n")


def _record_lines(stream: BinaryIO, skips: Skips) -> Iterator[dict[str, object]]:
    readline, loads = stream.readline, orjson.loads
    first = True
    while True:
        line = readline(LINE_BYTES_MAX)
        if not line:
            return
        if first:
            line, first = line.removeprefix(_BOM), False
        try:
            value: object = loads(line)
        except ValueError:
            value = _odd_line(line, stream, skips)
        if type(value) is dict:
            yield value
        elif value is not NO_JSON_VALUE:
            skips.add(NO_RECORD)


def _odd_line(line: bytes, stream: BinaryIO, skips: Skips) -> object:
    """A line that the fast reader refused: read another way, or counted for what it is."""
    bare = line.strip()
    if not bare:
        return NO_JSON_VALUE
    ended = line.endswith(b"\n")
    if not ended and len(line) >= LINE_BYTES_MAX:
        while True:
            rest = stream.readline(CHUNK_BYTES)
            if not rest or rest.endswith(b"\n"):
                break
        skips.add(TOO_LONG)
        return NO_JSON_VALUE
    value = parse_json(bare)
    if value is NO_JSON_VALUE:
        if bare.startswith(_COMMENTS):
            skips.add(COMMENT)
        else:
            skips.add(NO_JSON if ended else CUT_LINE)
    return value


def split_array(stream: BinaryIO | io.BufferedIOBase) -> Iterator[bytes]:
    """The elements of a JSON array as bytes, one by one, holding one element and one chunk at a time.

    An element longer than `ELEMENT_BYTES_MAX` ends the stream, and so does the end of a broken array.
    """
    buffer = b""
    position = start = depth = 0
    while True:
        sign = _SIGNS.search(buffer, position)
        if sign is None:
            position = len(buffer)
            buffer, position, start, more = _refill(stream, buffer, position, start)
            if not more:
                return
            continue
        found = buffer[sign.start()]
        if found == 0x22:  # noqa: PLR2004  # a quotation mark
            end = _STRING_END.match(buffer, sign.end())
            if end is None:
                buffer, position, start, more = _refill(stream, buffer, sign.start(), start)
                if not more:
                    return
                continue
            position = end.end()
            continue
        position = sign.end()
        if found in b"[{":
            if depth == 0 and found != 0x5B:  # noqa: PLR2004  # an array opens with [
                return
            depth += 1
            if depth == 1:
                start = position
            continue
        if found in b"]}":
            depth -= 1
        if depth == 0 or (depth == 1 and found == 0x2C):  # noqa: PLR2004  # a comma
            element = buffer[start : sign.start()].strip()
            start = position
            if element:
                yield element
            if depth == 0:
                return


def _refill(
    stream: BinaryIO | io.BufferedIOBase, buffer: bytes, position: int, start: int
) -> tuple[bytes, int, int, bool]:
    """Drop what was yielded, append a chunk; the last word says whether there was one."""
    kept = buffer[start:]
    # An open string is searched again from its start, so the chunks grow with what is kept.
    chunk = stream.read(max(CHUNK_BYTES, len(kept)))
    more = bool(chunk) and len(kept) <= ELEMENT_BYTES_MAX
    return kept + chunk, position - start, 0, more
