"""Canonical JSON and the digests made from it.

Rule: two values share their bytes exactly when they are the same JSON value with the same types.
Keys are sorted at every depth; `1`, `1.0` and `true` differ; text is compared in Unicode NFC;
NaN and infinity have no form; nothing is folded, cleaned or guessed. Python values beyond JSON
(bytes, dates, decimals, UUIDs, enums, dataclasses) have one declared form each; any other type is
refused, because a `repr` would put object addresses into digests.

The common case takes one pass of orjson. It writes NaN as `null` and does not normalise, so bytes that
hold a `null` are looked at again, and what is not in NFC is walked and normalised by hand first.
"""

from __future__ import annotations

import dataclasses
import datetime
import decimal
import enum
import hashlib
import hmac
import json
import math
import unicodedata
from functools import lru_cache
from typing import TYPE_CHECKING, Final

import orjson

from endstop.errors import NotCanonicalError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

__all__ = [
    "BYTES_MAX",
    "DEPTH_MAX",
    "DIGEST_HEX",
    "canonical_bytes",
    "digest",
    "digest_of",
    "drop_paths",
    "pick_paths",
    "plain_value",
    "value_at",
]

BYTES_MAX: Final = 4 * 1024 * 1024
DEPTH_MAX: Final = 64
DIGEST_HEX: Final = 32
_FLAT_BYTES: Final = 2 * DEPTH_MAX  # what is shorter cannot be too deep: every level opens and closes
_KEYS_HELD_MAX: Final = 64
_KEYED_TAG: Final = "$endstop"
_SIMPLE: Final = frozenset({str, int, bool, type(None)})
_OPTIONS: Final = (
    orjson.OPT_SORT_KEYS
    | orjson.OPT_PASSTHROUGH_DATACLASS
    | orjson.OPT_PASSTHROUGH_DATETIME
    | orjson.OPT_PASSTHROUGH_SUBCLASS
)


def canonical_bytes(value: object) -> bytes:
    """The canonical JSON bytes of `value` (UTF-8, at most `BYTES_MAX` bytes and `DEPTH_MAX` levels).

    Raises NotCanonicalError for NaN or infinity, a key that is no string, two keys equal in NFC,
    a lone surrogate, an unknown type, and what is too deep or too large.
    """
    try:
        data = orjson.dumps(value, option=_OPTIONS)
        settled = data.isascii() or unicodedata.is_normalized("NFC", data.decode())
    except orjson.JSONEncodeError:
        data, settled = b"", False
    if settled and (b"null" in data or (len(data) > _FLAT_BYTES and data.count(b"[") + data.count(b"{") > DEPTH_MAX)):
        settled = _is_plain(value)
    if not settled:
        data = _slow_bytes(value)
    if len(data) > BYTES_MAX:
        msg = f"the value has {len(data)} canonical bytes; at most {BYTES_MAX} are allowed: pass a reference instead"
        raise NotCanonicalError(msg)
    return data


def plain_value(value: object) -> object:
    """`value` as plain JSON values in NFC: records and models as objects, other known types in their declared form.

    Raises NotCanonicalError as `canonical_bytes` does.
    """
    return _walk(value, 0)


def digest(data: bytes, key: bytes = b"") -> str:
    """A 128-bit digest of `data` as 32 hex digits: HMAC-SHA-256 under `key`, or SHA-256 without one (both cut)."""
    if key:
        mac = _hmac_of(key).copy()
        mac.update(data)
        return mac.hexdigest()[:DIGEST_HEX]
    return hashlib.sha256(data).hexdigest()[:DIGEST_HEX]


@lru_cache(maxsize=_KEYS_HELD_MAX)
def _hmac_of(key: bytes) -> hmac.HMAC:
    """An HMAC under `key` that has read nothing: to set one up takes longer than to read a short text."""
    return hmac.new(key, digestmod="sha256")


def digest_of(domain: str, *parts: object, key: bytes = b"") -> str:
    """The digest of `parts` as one canonical array under a domain name, so that no two domains can collide."""
    return digest(domain.encode() + b"\0" + canonical_bytes(list(parts)), key)


def _is_plain(value: object) -> bool:
    """Whether `value` holds nothing but finite plain JSON values, at most `DEPTH_MAX` levels of them."""
    level = [value]
    for _ in range(DEPTH_MAX + 1):
        deeper: list[object] = []
        for item in level:
            if type(item) is dict:
                deeper += item.values()
            elif type(item) is list or type(item) is tuple:
                deeper += item
            elif type(item) not in _SIMPLE and not (type(item) is float and math.isfinite(item)):
                return False
        if not deeper:
            return True
        level = deeper
    return False


def _slow_bytes(value: object) -> bytes:
    """Walk, normalise, then encode: for text that is not in NFC, large integers and types beyond JSON."""
    walked = _walk(value, 0)
    try:
        # The same encoder as in the fast case, so that both write a number alike; it cannot write large integers.
        return orjson.dumps(walked, option=_OPTIONS)
    except orjson.JSONEncodeError:
        pass
    try:
        text = json.dumps(walked, ensure_ascii=False, sort_keys=True, separators=(",", ":"), allow_nan=False)
        return text.encode("utf-8")
    except ValueError as error:
        msg = "the value has no canonical form: it holds a lone surrogate or a number that JSON cannot carry"
        raise NotCanonicalError(msg) from error


def _walk(value: object, depth: int) -> object:
    if depth > DEPTH_MAX:
        msg = f"the value is nested deeper than {DEPTH_MAX} levels"
        raise NotCanonicalError(msg)
    if value is None or value is True or value is False or type(value) is int:
        return value
    if type(value) is str:
        return unicodedata.normalize("NFC", value)
    if type(value) is float:
        if not math.isfinite(value):
            msg = "NaN and infinity have no canonical form"
            raise NotCanonicalError(msg)
        return value
    if type(value) is list or type(value) is tuple:
        return [_walk(item, depth + 1) for item in value]
    if type(value) is dict:
        return _walk_mapping(value, depth)
    return _walk(_tagged(value), depth + 1)


def _walk_mapping(value: Mapping[object, object], depth: int) -> dict[str, object]:
    walked: dict[str, object] = {}
    for name, item in value.items():
        if not isinstance(name, str):
            msg = f"an object key is of type {type(name).__name__}; only strings are allowed"
            raise NotCanonicalError(msg)
        key = unicodedata.normalize("NFC", str.__str__(name))
        if key in walked:
            msg = "two keys of one object are equal in Unicode NFC"
            raise NotCanonicalError(msg)
        walked[key] = _walk(item, depth + 1)
    return walked


def _tagged(value: object) -> object:
    """One declared form for each known type beyond JSON, with a tag where it has no text of its own."""
    if isinstance(value, enum.Enum):
        return value.value
    if isinstance(value, bytes | bytearray | memoryview):
        return {_KEYED_TAG: "bytes", "sha256": hashlib.sha256(bytes(value)).hexdigest()}
    if isinstance(value, datetime.datetime | datetime.date | datetime.time):
        return {_KEYED_TAG: type(value).__name__, "iso": value.isoformat()}
    if isinstance(value, decimal.Decimal):
        return {_KEYED_TAG: "decimal", "text": str(value)}
    # A subclass of a JSON type counts as that type itself.
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return float(value)
    if isinstance(value, list | tuple):
        return list(value)
    if isinstance(value, dict):
        return dict(value)
    return _record(value)


def _record(value: object) -> object:
    """A dataclass or a model with `model_dump` as an object."""
    dump = getattr(value, "model_dump", None)
    try:
        if isinstance(value, type):
            pass
        elif dataclasses.is_dataclass(value):
            return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
        elif callable(dump):
            return dump(mode="json")
    except Exception as error:
        msg = f"a value of type {type(value).__name__} could not be read: {type(error).__name__}"
        raise NotCanonicalError(msg) from error
    try:
        # What the encoder of the fast case writes of itself (a UUID, as text).
        return orjson.loads(orjson.dumps(value, option=_OPTIONS))
    except orjson.JSONEncodeError as error:
        kind = type(value).__name__
        msg = f"a value of type {kind} has no canonical form: pass JSON values, or declare how to encode it"
        raise NotCanonicalError(msg) from error


# -- Paths. A path is dotted: `a.b`, with `*` for every element of a list or every key of an object.


def value_at(value: object, path: str) -> object:
    """The value at dotted `path`, or None where the path leads nowhere. List positions are numbers."""
    found = value
    for name in path.split("."):
        if isinstance(found, dict):
            found = found.get(name)
        elif isinstance(found, list | tuple) and name.isdigit() and int(name) < len(found):
            found = found[int(name)]
        else:
            return None
    return found


def drop_paths(value: object, paths: Sequence[str]) -> object:
    """A copy of `value` without what stands at `paths`; `value` itself is unchanged."""
    for path in paths:
        value = _drop(value, path.split("."))
    return value


def _drop(value: object, names: list[str]) -> object:
    head, rest = names[0], names[1:]
    if isinstance(value, dict):
        if head != "*" and head not in value:
            return value
        hit = value if head == "*" else {head}
        return {
            name: _drop(item, rest) if name in hit else item for name, item in value.items() if rest or name not in hit
        }
    if isinstance(value, list | tuple):
        return [
            _drop(item, rest) if head in ("*", str(place)) else item
            for place, item in enumerate(value)
            if rest or head not in ("*", str(place))
        ]
    return value


def pick_paths(value: Mapping[str, object], paths: Sequence[str]) -> dict[str, object]:
    """Only what stands at `paths`, by path; paths that lead nowhere are left out."""
    found = {path: value_at(value, path) for path in paths}
    return {path: item for path, item in found.items() if item is not None}
