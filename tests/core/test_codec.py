"""Records to JSON and back."""

from __future__ import annotations

import dataclasses
import enum
import uuid
from datetime import UTC, datetime

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

import endstop as es
from endstop.core.codec import (
    decision_json,
    envelope_data,
    envelope_from,
    envelope_json,
    limits_from,
    output_text,
    result_data,
    result_from,
    result_json,
    rfc3339,
    spec_from,
)
from endstop.core.envelope import CallNote, LedgerSpan, OperationNote
from endstop.core.model import Detail
from endstop.errors import StoreCorruptError

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(
        st.characters(exclude_categories=["Cs"])
    ),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(
        st.text(st.characters(exclude_categories=["Cs"]), max_size=5), inner, max_size=4
    ),
    max_leaves=12,
)  # fmt: skip


def same(one: object, other: object) -> bool:
    """Equal in value and in type at every depth."""
    if type(one) is not type(other):
        return False
    if isinstance(one, dict) and isinstance(other, dict):
        return list(map(str, sorted(one))) == list(map(str, sorted(other))) and all(same(one[k], other[k]) for k in one)
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(same(a, b) for a, b in zip(one, other, strict=True))
    return one == other and str(one) == str(other)


@given(JSON)
def test_a_json_value_comes_back_as_it_was(value: object) -> None:
    data, kind = result_data(es.ToolResult(value=value))
    if data is None:
        # Two keys that are equal in Unicode NFC have no canonical form, and only large numbers lead there.
        assert kind == "applied_without_result"
        return
    assert same(result_from(data).value, value)


def test_every_field_of_a_result_comes_back() -> None:
    result: es.ToolResult[object] = es.ToolResult(
        status="retryable", value={"a": None}, progress_version="v7", operation_id="op_1",
        next_allowed_action="wait", retry_after_ms=0, side_effect_committed=False, error_class="rate_limit",
        reason=es.Reason.NOT_BEFORE, message="mé", warning="careful",
    )  # fmt: skip
    data, kind = result_data(result)
    assert kind == "inline"
    assert result_from(data) == dataclasses.replace(result, replayed=True)


class Colour(enum.Enum):
    RED = "red"


@dataclasses.dataclass
class Point:
    x: int
    y: int


@pytest.mark.parametrize(
    ("value", "kept"),
    [
        ((1, 2), [1, 2]), (Point(1, 2), {"x": 1, "y": 2}), (Colour.RED, "red"),
        (uuid.UUID(int=1), str(uuid.UUID(int=1))),
        (datetime(2026, 1, 2, tzinfo=UTC), {"$endstop": "datetime", "iso": "2026-01-02T00:00:00+00:00"}),
    ],
)  # fmt: skip
def test_known_types_come_back_in_their_json_form(value: object, kept: object) -> None:
    data, _ = result_data(es.ToolResult(value=value))
    assert result_from(data).value == kept


@pytest.mark.parametrize(
    "value", [b"x", [b"x"], {"a": {"b": bytearray(b"x")}}, float("inf"), "\ud800", object(), {1: 2}]
)
def test_what_would_not_come_back_is_not_kept(value: object) -> None:
    assert result_data(es.ToolResult(value=value)) == (None, "applied_without_result")


def test_a_result_has_its_room() -> None:
    assert result_data(es.ToolResult(value="x" * 60_000))[1] == "inline"
    assert result_data(es.ToolResult(value="x" * 66_000))[1] == "applied_without_result"


@pytest.mark.parametrize(
    "data", [b"", b"[]", b'{"status":"odd"}', b'{"status":"progress","more":1}', b'{"reason":"odd"}']
)
def test_a_stored_result_that_cannot_be_read_is_a_corrupt_store(data: bytes) -> None:
    with pytest.raises(StoreCorruptError):
        result_from(data)


def test_the_model_reads_what_is_set_and_the_warning_first() -> None:
    body = result_json(es.ToolResult(value=False, warning="careful", side_effect_committed=False))
    assert list(body) == ["warning", "status", "value", "side_effect_committed"]
    assert body["value"] is False
    assert result_json(es.ToolResult()) == {"status": "progress"}


def test_an_output_is_text_or_json_or_nothing() -> None:
    assert output_text(None) is None
    assert output_text("") == ""
    assert output_text("a\ud800") == "a?"
    assert output_text({"b": 1, "a": (2,)}) == '{"a":[2],"b":1}'
    assert output_text(object()) is None
    assert output_text("ü" * (2 * 1024 * 1024 + 1)) is None


ENVELOPE = es.Envelope(
    run_id="r1", generation=3, terminal_reason=es.Reason.ERROR_STREAK, guard="error_streak", message="mé",
    detail=Detail(limit_name="error_streak_max", limit=3, error_class=es.ErrorClass.TOOL_FAILED),
    blocked_call=CallNote(tool="t", fingerprint="f", args=(("q", "str[1]"),), call_id="c1"),
    last_safe_checkpoint='{"a":1}', progress_version="v", external_state="in_doubt",
    operations=(OperationNote(operation_id="o", tool="t", key_digest=None, state="UNKNOWN"),), in_doubt=("o",),
    counters=es.Counters(steps=4), spend_nanos=5, next_allowed_action=es.NextAction.HUMAN_REVIEW,
    ledger=LedgerSpan(first=1, last=9), occurred_at_us=1_700_000_000_000_001,
)  # fmt: skip


def test_an_envelope_comes_back_as_it_was() -> None:
    assert envelope_from(envelope_data(ENVELOPE)) == ENVELOPE
    bare = es.Envelope(
        run_id="r", generation=1, terminal_reason=es.Reason.COMPLETE, next_allowed_action=es.NextAction.NONE
    )
    assert envelope_from(envelope_data(bare)) == bare


def test_a_stored_envelope_that_cannot_be_read_is_a_corrupt_store() -> None:
    body = orjson.loads(envelope_data(ENVELOPE))
    for broken in (b"", b"{}", orjson.dumps({**body, "terminal_reason": "odd"}), orjson.dumps({**body, "more": 1})):
        with pytest.raises(StoreCorruptError):
            envelope_from(broken)


def test_an_envelope_is_published_with_readable_times_and_figures() -> None:
    body = envelope_json(ENVELOPE)
    assert body["occurred_at"] == "2023-11-14T22:13:20.000001Z"
    assert body["detail"] == {"limit_name": "error_streak_max", "limit": 3, "error_class": "tool_failed"}
    assert body["spend"] == {"spend_nanos": 5}
    assert orjson.loads(orjson.dumps(body))["blocked_call"]["args"] == {"q": "str[1]"}


def test_times_are_rfc_3339_in_utc() -> None:
    assert rfc3339(None) is None
    assert rfc3339(0) == "1970-01-01T00:00:00.000000Z"


def test_limits_and_specs_come_back() -> None:
    limits = es.Limits(steps_max=3, spend_nanos_max=5)
    assert limits_from(orjson.dumps(dataclasses.asdict(limits))) == limits
    spec = es.Spec(what_it_does="ä", what_it_does_not="b", done_looks_like="c")
    assert spec_from(orjson.dumps(dataclasses.asdict(spec))) == spec


def test_a_decision_is_published_with_what_it_knows() -> None:
    guard = es.LoopGuard(es.Policy(limits=es.Limits(steps_max=0)))
    body = decision_json(guard.before(es.ToolCall(tool="t")))
    assert (body["action"], body["reason"]) == ("stop", "step_cap")
    assert body["detail"] == {"limit_name": "steps_max", "limit": 0, "value": 0}
