"""Reading fields out of records that other programs wrote: whatever stands there, these give a sound value or None."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from datetime import UTC, datetime
from decimal import Decimal, InvalidOperation
from typing import Final

import orjson

from endstop.core.model import COUNT_MAX, NAME_CHARS_MAX, Usage, Version

__all__ = [
    "Json",
    "arguments",
    "blocks_value",
    "count",
    "first_of",
    "integer",
    "items",
    "name",
    "nanos_of_dollars",
    "record",
    "records_in",
    "text",
    "time_us",
    "usage_of",
    "version",
]

Json = dict[str, object]
_EMPTY: Final[Json] = {}
UNNAMED: Final = "(unnamed)"
# Text longer than this in an image block is kept as its digest.
IMAGE_TEXT_MAX: Final = 1_000
_MS_FROM: Final = 10**11
_US_FROM: Final = 10**14
_NS_FROM: Final = 10**17
_TIME_MAX_US: Final = 2**52


def record(value: object) -> Json:
    """`value` when it is an object, else an empty one."""
    return value if isinstance(value, dict) else _EMPTY


def items(value: object) -> list[object]:
    """`value` when it is an array, else an empty one."""
    return value if isinstance(value, list) else []


def records_in(value: object) -> list[Json]:
    """The objects of an array."""
    return [item for item in value if isinstance(item, dict)] if isinstance(value, list) else []


def text(value: object) -> str:
    """`value` when it is text, else empty text."""
    return value if isinstance(value, str) else ""


def name(value: object) -> str:
    """The name of a tool, an agent or a model as a call may carry it."""
    if not isinstance(value, str) or not value:
        return UNNAMED
    return value if len(value) <= NAME_CHARS_MAX else value[: NAME_CHARS_MAX - 1] + "…"


def first_of(found: Mapping[str, object], *names: str) -> object:
    """The first of these fields that is there and not null."""
    for field in names:
        value = found.get(field)
        if value is not None:
            return value
    return None


def integer(value: object) -> int | None:
    """A whole number, also when it was written as text or with a zero fraction."""
    if isinstance(value, bool):
        return None
    if isinstance(value, int):
        return value
    if isinstance(value, float):
        return int(value) if value.is_integer() and abs(value) <= COUNT_MAX else None
    if isinstance(value, str) and value.strip().isdecimal() and len(value) < 20:  # noqa: PLR2004  # digits of 64 bits
        return int(value)
    return None


def count(value: object) -> int:
    """A count that a run's totals can take: a whole number from 0 to 2⁵³-1; anything else is 0."""
    if type(value) is int and 0 <= value <= COUNT_MAX:
        return value
    found = integer(value)
    return 0 if found is None else min(max(found, 0), COUNT_MAX)


def usage_of(
    *, input_tokens: object = 0, output_tokens: object = 0, cache_read: object = 0, cache_write: object = 0,
    reasoning: object = 0,
) -> Usage | None:  # fmt: skip
    """Usage from raw fields, or None when there is nothing in them."""
    found = Usage(
        input_tokens=count(input_tokens), output_tokens=count(output_tokens), cache_read_tokens=count(cache_read),
        cache_write_tokens=count(cache_write), reasoning_tokens=count(reasoning),
    )  # fmt: skip
    return found if found.total_tokens else None


def nanos_of_dollars(value: object) -> int | None:
    """Dollars, as a number or as text, in nano-dollars rounded to the nearest; None for what is no price."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    try:
        nanos = Decimal(str(value)) * 1_000_000_000
        found = int(nanos.to_integral_value())
    except (InvalidOperation, ValueError, OverflowError):
        return None
    return found if 0 <= found <= COUNT_MAX else None


def time_us(value: object) -> int | None:
    """A time as microseconds since the epoch: ISO 8601 text (without a zone: UTC), or a number of s, ms, µs or ns."""
    if isinstance(value, str):
        try:
            moment = datetime.fromisoformat(value)
        except ValueError:
            found = integer(value)
            return None if found is None else time_us(found)
        if moment.tzinfo is None:
            moment = moment.replace(tzinfo=UTC)
        try:
            return int((moment - _EPOCH).total_seconds() * 1_000_000)
        except OverflowError:
            return None
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    size = abs(value)
    if size != size or size > 2**63:  # noqa: PLR0124  # NaN
        return None
    scale = (
        (1_000_000, 1)
        if size < _MS_FROM
        else (1_000, 1)
        if size < _US_FROM
        else (1, 1)
        if size < _NS_FROM
        else (1, 1_000)
    )
    found_us = int(value * scale[0]) // scale[1]
    return found_us if 0 < found_us <= _TIME_MAX_US else None


_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)


def version(value: object) -> Version | None:
    """A progress version: a whole number or text."""
    if isinstance(value, bool) or not isinstance(value, int | str):
        return None
    return value


def arguments(value: object) -> Mapping[str, object] | str:
    """Arguments as a call carries them: an object, or text (which the core parses); anything else under one name."""
    if isinstance(value, dict | str):
        return value
    return {} if value is None else {"value": value}


def blocks_value(content: object) -> object:
    """Content as an answer: text as it is, blocks of text joined, images and documents by their digests."""
    if not isinstance(content, list):
        return content
    if all(isinstance(block, dict) and isinstance(block.get("text"), str) for block in content):
        return "\n".join(block["text"] for block in content)
    return [_small(block) for block in content]


def _small(block: object) -> object:
    """A block whose long base64 parts are replaced by digests, so that a page of images stays small."""
    if not isinstance(block, dict) or block.get("type") == "text":
        return block
    return {field: _shrunk(value) for field, value in block.items()}


def _shrunk(value: object) -> object:
    if isinstance(value, str) and len(value) > IMAGE_TEXT_MAX:
        return {"chars": len(value), "sha256": hashlib.sha256(value.encode("utf-8", "replace")).hexdigest()}
    if isinstance(value, dict):
        return {field: _shrunk(item) for field, item in value.items()}
    return value


def json_value(value: str) -> object:
    """Text as the JSON value it holds, else the text itself."""
    try:
        return orjson.loads(value)
    except ValueError:
        return value
