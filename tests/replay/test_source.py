"""What a file is and how it is read: by content, streamed, bounded, and never with an exception."""

from __future__ import annotations

import io
import json
from pathlib import Path

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from endstop.errors import UsageError
from endstop.replay import source as source_module
from endstop.replay.source import Source, split_array
from endstop.replay.trace import Skips
from tests.replay.recordings import lines

JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=20,
)


def records(path: Path) -> tuple[list[dict[str, object]], dict[str, int]]:
    skips = Skips()
    found = list(Source(path).records(skips))
    return found, {skip.reason: skip.count for skip in skips.found()}


def test_lines_are_records_and_everything_else_is_counted(tmp_path: Path) -> None:
    path = lines(
        tmp_path / "a.jsonl", [{"a": 1}, "// a comment", "", "# another", {"b": 2}, "no json", "[1]", "7", {"c": 3}]
    )
    found, skipped = records(path)
    assert found == [{"a": 1}, {"b": 2}, {"c": 3}]
    assert skipped == {"comment line": 2, "line that is no JSON object": 2, "line that is no JSON": 1}


def test_a_cut_last_line_is_named_and_the_rest_is_read(tmp_path: Path) -> None:
    path = lines(tmp_path / "a.jsonl", [{"a": 1}, {"b": 2}], end=b'{"c": {"d":')
    found, skipped = records(path)
    assert found == [{"a": 1}, {"b": 2}]
    assert skipped == {"last line is cut off": 1}


def test_a_byte_order_mark_and_carriage_returns_are_no_trouble(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"a": 1}\r\n{"b": 2}\r\n')
    assert records(path) == ([{"a": 1}, {"b": 2}], {})


def test_a_line_beyond_the_limit_is_left_out_and_the_next_one_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(source_module, "LINE_BYTES_MAX", 100)
    path = lines(tmp_path / "a.jsonl", [{"a": 1}, {"long": "x" * 500}, {"b": 2}])
    found, skipped = records(path)
    assert found == [{"a": 1}, {"b": 2}]
    assert sum(skipped.values()) == 1
    assert "longer than" in next(iter(skipped))


def test_what_one_reader_refuses_the_other_may_read(tmp_path: Path) -> None:
    path = lines(tmp_path / "a.jsonl", [{"a": 1}, b'{"n": NaN, "half": "\\ud800"}'])
    found, skipped = records(path)
    assert skipped == {}
    assert found[1]["half"] == "\ud800"


def test_a_document_is_told_from_lines(tmp_path: Path) -> None:
    pretty, flat = tmp_path / "a.json", tmp_path / "b.json"
    pretty.write_text(json.dumps([{"a": 1}, {"b": 2}], indent=1))
    flat.write_text(json.dumps({"a": [1, 2]}))
    assert Source(pretty).shape == Source(flat).shape == "document"
    assert Source(flat).document == {"a": [1, 2]}
    assert records(pretty)[0] == [{"a": 1}, {"b": 2}]
    assert Source(lines(tmp_path / "c", [{"a": 1}, {"a": 2}])).shape == "lines"


def test_a_document_that_breaks_off_is_read_up_to_there(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_bytes(json.dumps([{"a": 1}, {"b": [1, 2]}, {"c": 'text, with ] and " in it'}], indent=1).encode()[:-8])
    found, skipped = records(path)
    assert found == [{"a": 1}, {"b": [1, 2]}]
    assert skipped == {"document breaks off: read up to there": 1}


def test_a_long_array_is_streamed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source_module, "DOCUMENT_BYTES_MAX", 4_000)
    path = tmp_path / "a.json"
    path.write_text(json.dumps([{"n": n, "text": 'a \\ b " ]'} for n in range(500)], indent=1))
    source = Source(path)
    assert source.document is None
    found = list(source.records(Skips()))
    assert [item["n"] for item in found] == list(range(500))


@given(st.lists(JSON, max_size=8), st.integers(0, 3))
def test_splitting_an_array_gives_its_elements(values: list[object], indent: int) -> None:
    text = json.dumps(values, indent=indent or None).encode()
    assert [orjson.loads(part) for part in split_array(io.BytesIO(text))] == values


@pytest.mark.parametrize("chunk", [1, 2, 3, 7, 64])
def test_splitting_does_not_depend_on_where_the_chunks_end(chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source_module, "CHUNK_BYTES", chunk)
    values = [{"a": 'x\\"y, ]'}, [1, [2, {}]], "s", 4, {"deep": [[["]"]]]}]
    assert [json.loads(part) for part in split_array(io.BytesIO(json.dumps(values).encode()))] == values


@given(st.binary(max_size=200))
def test_no_bytes_make_the_splitter_raise(data: bytes) -> None:
    assert all(isinstance(part, bytes) for part in split_array(io.BytesIO(data)))


def test_a_store_file_is_known_by_its_first_bytes(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(b"SQLite format 3\x00" + b"\0" * 100)
    assert Source(path).shape == "store"


def test_a_file_that_cannot_be_opened_is_a_usage_error(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot be read"):
        Source(tmp_path / "nothing.json")
