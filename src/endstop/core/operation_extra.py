"""What operations have beside their columns, as one small JSON text: the delivery that owns them, and of few of them
probes, kept arguments, a receipt.

A store keeps the text in one nullable column. A text that cannot be read is a corrupt record, never an absent one.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final, cast

import orjson

if TYPE_CHECKING:
    from endstop.core.records import OperationRecord

__all__ = ["EXTRA_FIELDS", "extra_text", "same_extra", "with_extra"]

# The record's field and its type in JSON. Text fields that are None or empty, and zeros, are left out.
EXTRA_FIELDS: Final[dict[str, type]] = {
    "probe_count": int,
    "probe_not_before_us": int,
    "probe_until_us": int,
    "settled_by": str,
    "receipt": str,
    "attempt_id": str,
}
_ARGS: Final = "args"


def extra_text(record: OperationRecord) -> str | None:
    """The extra text of `record`, or None when it has nothing of the kind."""
    if not (record.probe_count or record.args or record.settled_by or record.receipt):
        return orjson.dumps({"attempt_id": record.attempt_id}).decode() if record.attempt_id else None
    body: dict[str, object] = {name: value for name in EXTRA_FIELDS if (value := getattr(record, name))}
    if record.args:
        body[_ARGS] = record.args.decode()
    return orjson.dumps(body, option=orjson.OPT_SORT_KEYS).decode()


def with_extra(record: OperationRecord, text: object) -> OperationRecord:
    """`record` with what `extra_text` gave. Raises ValueError or TypeError when `text` is none of its making."""
    if text is None:
        return record
    body = orjson.loads(cast("str", text))
    if type(body) is not dict:
        msg = "the extra text is no object"
        raise ValueError(msg)
    args = body.pop(_ARGS, None)
    for name, value in body.items():
        if type(value) is not EXTRA_FIELDS.get(name):
            msg = f"the extra text has an unknown field or type at {name!r}"
            raise ValueError(msg)
    return replace(record, args=None if args is None else cast("str", args).encode(), **body)


def same_extra(one: OperationRecord, other: OperationRecord) -> bool:
    """Whether two versions of an operation have the same extra text."""
    return one.args == other.args and all(getattr(one, name) == getattr(other, name) for name in EXTRA_FIELDS)
