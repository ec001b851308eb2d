"""Nothing crashes on any input: whatever a file holds is read, or counted and named."""

from __future__ import annotations

import contextlib
import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from endstop.replay.block_yaml import parse_blocks
from endstop.replay.fields import nanos_of_dollars, time_us, usage_of
from endstop.replay.format import Format
from endstop.replay.recognise import formats
from endstop.replay.replayer import ReplaySettings, replay_file
from endstop.replay.stream_parts import streamed_message
from tests.replay.recordings import OPEN
from tests.replay.samples import SAMPLES, Sample

# Words that the readers look for, so that random records come near to real ones.
WORDS: Final = (
    "type", "role", "content", "message", "messages", "id", "name", "input", "arguments", "function", "tool_calls",
    "tool_call_id", "payload", "user", "assistant", "tool", "tool_use", "tool_result", "tool_use_id", "function_call",
    "function_call_output", "call_id", "output", "usage", "timestamp", "response_item", "event_msg", "token_count",
    "info",
    "total_token_usage", "run", "args", "result", "error", "at", "round", "events", "parts", "kind", "trajectory",
    "action",
    "observation", "turn_history", "actions", "observations", "samples", "eval", "task", "event", "history",
    "Orchestrator", "WebSurfer", "interactions", "request", "response", "body", "spans", "attributes", "resourceSpans",
    "observations", "traceId", "TOOL", "run_type", "inputs", "outputs", "entry", "v", "seq", "ts_us", "call_intent",
    "fp",
    "ActionEvent", "ObservationEvent", "gemini", "toolCalls", "response", "request", "part_kind", "tool-call", "uuid",
)  # fmt: skip
TEXT: Final = st.sampled_from(WORDS) | st.text(max_size=12)
LEAF: Final = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | TEXT
    | st.sampled_from(["2026-01-01T00:00:00Z", "{}", "[", "-1"])
)
VALUE: Final = st.recursive(
    LEAF, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXT, inner, max_size=6), max_leaves=25
)
RECORD: Final = st.dictionaries(TEXT, VALUE, max_size=8)


@contextlib.contextmanager
def file_of(data: bytes) -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "recording"
        path.write_bytes(data)
        yield path


def reads(data: bytes, known: Format | None = None) -> None:
    """Replay `data`, as whatever it looks like or as one format, with every part of the report."""
    with file_of(data) as path:
        settings_of = ReplaySettings(
            policy=OPEN, all_guards=True, sampled=True, format_name=None if known is None else known.name
        )
        found = replay_file(path, settings_of)
        assert found.error is None
        assert all(skip.count > 0 and skip.reason for skip in found.skipped)
        for report in found.runs:
            assert report.story
            json.dumps(report.to_json())


@given(st.binary(max_size=400))
def test_bytes_are_taken_as_they_come(data: bytes) -> None:
    reads(data)


@given(st.lists(RECORD, min_size=1, max_size=6), st.booleans())
def test_records_are_taken_as_they_come(records: list[object], as_document: bool) -> None:
    data = json.dumps(records).encode() if as_document else b"\n".join(json.dumps(one).encode() for one in records)
    reads(data)


@pytest.mark.parametrize("known", formats(), ids=lambda known: known.name)
@pytest.mark.slow
@settings(max_examples=30)
@given(data=st.data())
def test_each_format_reads_whatever_it_is_told_to_read(known: Format, data: st.DataObject) -> None:
    value = data.draw(VALUE | st.lists(RECORD, max_size=4) | st.dictionaries(TEXT, RECORD, max_size=3))
    shape = data.draw(st.sampled_from(["document", "lines", "text"]))
    text = json.dumps(value)
    if shape == "lines":
        items = value if isinstance(value, list) else [value]
        text = "\n".join(json.dumps(item) for item in items)
    elif shape == "text":
        text = data.draw(st.text(max_size=200))
    reads(text.encode("utf-8", "surrogatepass"), known)


@pytest.mark.parametrize("sample", SAMPLES, ids=lambda sample: sample.make.__name__.strip("_"))
@pytest.mark.slow
@settings(max_examples=20)
@given(data=st.data())
def test_a_real_recording_may_be_cut_and_broken_anywhere(sample: Sample, data: st.DataObject) -> None:
    """Cut at any byte, then one byte changed."""
    with file_of(b"") as path:
        whole = sample.make(path).read_bytes()
    cut = bytearray(whole[: data.draw(st.integers(0, len(whole)))])
    if cut:
        cut[data.draw(st.integers(0, len(cut) - 1))] = data.draw(st.integers(0, 255))
    reads(bytes(cut))


@given(st.text(max_size=300))
def test_blocks_of_text_are_read_or_refused(text: str) -> None:
    with contextlib.suppress(ValueError):
        parse_blocks(text.splitlines())


@given(st.binary(max_size=200), st.sampled_from(["chat", "anthropic", "responses"]))
def test_streams_are_put_together_or_give_nothing(data: bytes, kind: str) -> None:
    assert isinstance(streamed_message(kind, data), dict)


@given(LEAF)
def test_fields_give_sound_values_or_none(value: object) -> None:
    for found in (time_us(value), nanos_of_dollars(value)):
        assert found is None or (isinstance(found, int) and found >= 0)
    usage = usage_of(input_tokens=value, output_tokens=value)
    assert usage is None or usage.total_tokens > 0


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("2026-01-01T00:00:00Z", 1_767_225_600_000_000),
        ("2026-01-01T01:00:00+01:00", 1_767_225_600_000_000),
        ("2026-01-01T00:00:00", 1_767_225_600_000_000),
        (1_767_225_600, 1_767_225_600_000_000),
        (1_767_225_600.25, 1_767_225_600_250_000),
        (1_767_225_600_000, 1_767_225_600_000_000),
        (1_767_225_600_000_000, 1_767_225_600_000_000),
        ("1767225600000000000", 1_767_225_600_000_000),
        ("yesterday", None),
        (True, None),
    ],
)
def test_times_in_all_their_spellings_are_microseconds(value: object, expected: int | None) -> None:
    assert time_us(value) == expected


@pytest.mark.parametrize(
    ("value", "expected"),
    [(0.53839, 538_390_000), ("1.5", 1_500_000_000), (0, 0), (-1, None), ("free", None), (1e300, None)],
)
def test_prices_are_whole_nano_dollars(value: object, expected: int | None) -> None:
    assert nanos_of_dollars(value) == expected


def test_blocks_in_the_style_of_cassettes_are_values() -> None:
    text = """\
interactions:
- request:
    body: '{"a": "it''s
      one line", "b":

      "two"}'
    headers:
      accept:
      - application/json
    uri: https://example.test/v1?x=1
    empty: {}
    nothing: null
  response:
    body:
      string: "a\\tb \\
        c\\nd"
    literal: |
      first
        second
    status:
      code: 200
version: 1
"""
    found = parse_blocks(text.splitlines())
    assert found == {
        "interactions": [
            {
                "request": {
                    "body": '{"a": "it\'s one line", "b":\n"two"}', "headers": {"accept": ["application/json"]},
                    "uri": "https://example.test/v1?x=1", "empty": {}, "nothing": None,
                },
                "response": {
                    "body": {"string": "a\tb c\nd"}, "literal": "first\n  second\n", "status": {"code": 200},
                },
            }
        ],
        "version": 1,
    }  # fmt: skip


@pytest.mark.parametrize("text", ["a: &x 1", "a: {b: 1}", "a: 'open", "a: !!python/object:x {}", "? a\n: b"])
def test_blocks_outside_the_style_are_refused(text: str) -> None:
    try:
        found = parse_blocks(text.splitlines())
    except ValueError:
        return
    assert not isinstance(found, dict) or found == {}
