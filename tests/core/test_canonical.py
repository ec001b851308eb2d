"""Canonical JSON and paths: one value, one form; two values, two forms."""

from __future__ import annotations

import datetime as dt
import decimal
import enum
import hashlib
import json
import math
import unicodedata
import uuid
from collections import OrderedDict
from dataclasses import dataclass
from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from endstop import NotCanonicalError
from endstop.core import canonical
from endstop.core.canonical import (
    BYTES_MAX,
    DEPTH_MAX,
    canonical_bytes,
    digest,
    digest_of,
    drop_paths,
    pick_paths,
    plain_value,
    value_at,
)

JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**80), 2**80)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(codec="utf-8"), max_size=12),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.text(st.characters(codec="utf-8"), max_size=4), inner, max_size=4)
    ),
    max_leaves=12,
)


def has_one_form(value: object) -> bool:
    """False for an object with two keys that are equal in NFC."""
    if isinstance(value, dict):
        keys = {unicodedata.normalize("NFC", key) for key in value}
        return len(keys) == len(value) and all(map(has_one_form, value.values()))
    return all(map(has_one_form, value)) if isinstance(value, list) else True


ONE_FORM = JSON.filter(has_one_form)


def shuffled(value: object) -> object:
    """The same value with the keys of every object in reverse order."""
    if isinstance(value, dict):
        return {key: shuffled(value[key]) for key in reversed(list(value))}
    return [shuffled(item) for item in value] if isinstance(value, list) else value


def typed(value: object) -> object:
    """A form that Python compares by type as well: 1, 1.0 and True stay apart, and so do -0.0 and 0.0."""
    if isinstance(value, dict):
        return {unicodedata.normalize("NFC", key): typed(item) for key, item in value.items()}
    if isinstance(value, list):
        return [typed(item) for item in value]
    if isinstance(value, str):
        return unicodedata.normalize("NFC", value)
    return (type(value).__name__, repr(value))


# -- One value, one form


@given(ONE_FORM)
def test_the_order_of_keys_makes_no_difference_at_any_depth(value: object) -> None:
    assert canonical_bytes(shuffled(value)) == canonical_bytes(value)


@given(ONE_FORM)
def test_unicode_is_compared_in_nfc(value: object) -> None:
    decomposed = json.loads(unicodedata.normalize("NFD", json.dumps(value, ensure_ascii=False)))
    if has_one_form(decomposed):
        assert canonical_bytes(decomposed) == canonical_bytes(value)


@given(ONE_FORM)
def test_the_fast_way_and_the_slow_way_write_the_same_bytes(value: object) -> None:
    assert canonical_bytes(value) == canonical._slow_bytes(value)


@given(ONE_FORM)
def test_what_is_written_reads_back_as_the_same_value(value: object) -> None:
    assert typed(json.loads(canonical_bytes(value))) == typed(value)


@given(ONE_FORM, ONE_FORM)
def test_two_values_share_their_bytes_exactly_when_they_are_equal_with_their_types(one: object, other: object) -> None:
    assert (canonical_bytes(one) == canonical_bytes(other)) is (typed(one) == typed(other))


@given(ONE_FORM)
def test_plain_value_keeps_a_json_value(value: object) -> None:
    assert canonical_bytes(plain_value(value)) == canonical_bytes(value)


def test_one_and_one_point_nought_and_true_and_their_texts_are_five_values() -> None:
    assert len({canonical_bytes([value]) for value in (1, 1.0, True, "1", "true")}) == 5


def test_a_text_is_one_text_however_it_is_composed() -> None:
    assert canonical_bytes("caf\u00e9") == canonical_bytes("cafe\u0301")
    assert canonical_bytes({"caf\u00e9": 1}) == canonical_bytes({"cafe\u0301": 1})
    assert canonical_bytes(["\n\u0301"]) != canonical_bytes(["\u0144"])


def test_case_and_blanks_and_paths_are_left_alone() -> None:
    assert len({canonical_bytes(text) for text in ("a/b", "a//b", "A/b", " a/b", "a/b/")}) == 5


# -- What has no form


class Opaque:
    pass


class BrokenModel:
    def model_dump(self, mode: str) -> object:
        raise RuntimeError(mode)


@dataclass
class BrokenRecord:
    gone: int

    def __getattribute__(self, name: str) -> object:
        if name == "gone":
            raise AttributeError(name)
        return super().__getattribute__(name)


@pytest.mark.parametrize(
    "value",
    [
        math.nan,
        math.inf,
        -math.inf,
        [None, math.nan],
        {"a": {"b": math.inf}},
        {1: "a"},
        {None: "a"},
        {"a": None, 1: "b"},
        "\ud800",
        ["\udfff"],
        {"\ud800": 1},
        Opaque(),
        Opaque,
        BrokenModel(),
        BrokenRecord(gone=1),
        {1, 2},
        10**5_000,
        {"\u00e9": 1, "e\u0301": 2},
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_has_no_canonical_form_is_refused(value: object) -> None:
    with pytest.raises(NotCanonicalError):
        canonical_bytes(value)


def nested(levels: int, leaf: object) -> object:
    value = leaf
    for _ in range(levels):
        value = [value]
    return value


@pytest.mark.parametrize("leaf", [1, None, "\u00e9", "e\u0301", 2**70])
def test_depth_is_limited_alike_on_every_way(leaf: object) -> None:
    canonical_bytes(nested(DEPTH_MAX, leaf))
    with pytest.raises(NotCanonicalError):
        canonical_bytes(nested(DEPTH_MAX + 1, leaf))


def test_a_value_that_holds_itself_is_too_deep() -> None:
    ring: list[object] = []
    ring.append(ring)
    with pytest.raises(NotCanonicalError):
        canonical_bytes(ring)


def test_wide_values_are_not_deep() -> None:
    rows = [{"id": number, "name": None} for number in range(500)]
    assert canonical_bytes(rows) == canonical._slow_bytes(rows)


def test_size_is_limited() -> None:
    canonical_bytes("x" * (BYTES_MAX - 2))
    with pytest.raises(NotCanonicalError, match="pass a reference"):
        canonical_bytes("x" * (BYTES_MAX - 1))


# -- Beyond JSON


class Colour(enum.Enum):
    RED = "red"


class Level(enum.IntEnum):
    LOW = 1


class Name(enum.StrEnum):
    ANN = "ann"


class Mixed(str, enum.Enum):  # noqa: UP042  the older spelling, whose str() is not its value
    BOB = "bob"


class Text(str):
    def __str__(self) -> str:
        return "something else"


class Number(int):
    pass


class Ratio(float):
    pass


class Point(NamedTuple):
    x: int
    y: int


@dataclass
class Record:
    x: int
    names: tuple[str, ...]


class Model:
    """A stand-in for a model of pydantic's shape."""

    def model_dump(self, mode: str) -> dict[str, object]:
        return {"x": 1, "mode": mode}


@pytest.mark.parametrize(
    ("value", "plain"),
    [
        (Colour.RED, "red"),
        (Level.LOW, 1),
        (Name.ANN, "ann"),
        (Mixed.BOB, "bob"),
        (Text("own"), "own"),
        (Number(7), 7),
        (Ratio(0.5), 0.5),
        (Point(1, 2), [1, 2]),
        ((1, 2), [1, 2]),
        (OrderedDict(b=1, a=2), {"a": 2, "b": 1}),
        (Record(1, ("a",)), {"x": 1, "names": ["a"]}),
        (Model(), {"x": 1, "mode": "json"}),
        (uuid.UUID(int=7), str(uuid.UUID(int=7))),
        (b"ab", {"$endstop": "bytes", "sha256": hashlib.sha256(b"ab").hexdigest()}),
        (decimal.Decimal("1.50"), {"$endstop": "decimal", "text": "1.50"}),
        (dt.date(2031, 5, 4), {"$endstop": "date", "iso": "2031-05-04"}),
        (dt.datetime(2031, 5, 4, tzinfo=dt.UTC), {"$endstop": "datetime", "iso": "2031-05-04T00:00:00+00:00"}),
        (dt.time(1, 2), {"$endstop": "time", "iso": "01:02:00"}),
    ],
    ids=lambda value: type(value).__name__,
)
def test_each_known_type_has_one_declared_form_wherever_it_stands(value: object, plain: object) -> None:
    assert canonical_bytes(value) == canonical_bytes(plain)
    for more in ({"k": value}, [value, None], ["e\u0301", value]):
        expected = {"k": plain} if isinstance(more, dict) else [plain if item is value else item for item in more]
        assert canonical_bytes(more) == canonical_bytes(expected)


def test_keys_that_are_subclasses_of_text_count_as_their_text() -> None:
    assert canonical_bytes({Text("k"): 1}) == canonical_bytes({"k": 1})
    assert canonical_bytes({Mixed.BOB: 1, Name.ANN: 2}) == canonical_bytes({"bob": 1, "ann": 2})


def test_bytes_of_every_kind_are_one_value() -> None:
    assert canonical_bytes(bytearray(b"ab")) == canonical_bytes(b"ab") == canonical_bytes(memoryview(b"ab"))


# -- Digests


def test_a_digest_has_128_bits_and_depends_on_its_key() -> None:
    assert len({digest(b"x"), digest(b"x", b"k"), digest(b"x", b"l"), digest(b"y", b"k")}) == 4
    assert {len(digest(b"x")), len(digest(b"x", b"k"))} == {32}


def test_parts_and_domains_of_a_digest_do_not_run_together() -> None:
    assert digest_of("d", "ab", "c") != digest_of("d", "a", "bc")
    assert digest_of("d", "x") != digest_of("e", "x")
    assert digest_of("d", "x") != digest_of("d", ["x"])


# -- Paths

TREE = {"a": {"b": [1, {"c": 2}], "n": None}, "d": 3}


@pytest.mark.parametrize(
    ("path", "found"),
    [
        ("d", 3),
        ("a.b.0", 1),
        ("a.b.1.c", 2),
        ("a.n", None),
        ("x", None),
        ("a.b.9", None),
        ("a.b.-1", None),
        ("d.x", None),
        ("a.b.c", None),
    ],
)
def test_a_path_leads_to_a_value_or_to_none(path: str, found: object) -> None:
    assert value_at(TREE, path) == found


@pytest.mark.parametrize(
    ("paths", "left"),
    [
        ((), TREE),
        (("d",), {"a": {"b": [1, {"c": 2}], "n": None}}),
        (("a.b.1.c",), {"a": {"b": [1, {}], "n": None}, "d": 3}),
        (("a.b.0",), {"a": {"b": [{"c": 2}], "n": None}, "d": 3}),
        (("a.b.*",), {"a": {"b": [], "n": None}, "d": 3}),
        (("a.b.*.c",), {"a": {"b": [1, {}], "n": None}, "d": 3}),
        (("a.*",), {"a": {}, "d": 3}),
        (("*.b",), {"a": {"n": None}, "d": 3}),
        (("*",), {}),
        (("x", "a.x", "d.x", "a.b.9"), TREE),
        (("a", "d"), {}),
    ],
)
def test_what_stands_at_a_path_is_dropped_from_a_copy(paths: tuple[str, ...], left: object) -> None:
    before = json.dumps(TREE)
    assert drop_paths(TREE, paths) == left
    assert json.dumps(TREE) == before


def test_dropping_from_a_plain_value_changes_nothing() -> None:
    assert drop_paths("text", ("a",)) == "text"
    assert drop_paths((1, {"a": 2}), ("*.a",)) == [1, {}]


def test_only_what_stands_at_the_paths_is_picked() -> None:
    assert pick_paths(TREE, ("d", "a.b.0", "a.n", "x")) == {"d": 3, "a.b.0": 1}
