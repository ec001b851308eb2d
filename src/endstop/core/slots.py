"""A faster way to fill frozen records that are made on every call.

A frozen dataclass sets each field through `object.__setattr__`, which looks the field up by name every time; for the
records of one guarded call that is a fifth of the whole decision. `filled_by_slot` gives a record the same `__init__`,
with the same keywords and defaults, that calls the slots' own setters instead. Nothing else about the record changes.
"""

from __future__ import annotations

from dataclasses import MISSING, fields
from typing import Final, TypeVar

__all__ = ["filled_by_slot"]

R = TypeVar("R")
_UNSET: Final = object()


def filled_by_slot(record: type[R]) -> type[R]:
    """Decorator above `@dataclass(frozen=True, slots=True, kw_only=True)`, for records without `__post_init__`."""
    names: dict[str, object] = {"_unset": _UNSET}
    takes: list[str] = []
    lines: list[str] = []
    for item in fields(record):  # type: ignore[arg-type]  # any dataclass; the type of a class cannot say so
        names[f"_set_{item.name}"] = getattr(record, item.name).__set__
        value = item.name
        if item.default_factory is not MISSING:
            names[f"_make_{item.name}"] = item.default_factory
            takes.append(f"{item.name}=_unset")
            value = f"_make_{item.name}() if {item.name} is _unset else {item.name}"
        elif item.default is not MISSING:
            names[f"_default_{item.name}"] = item.default
            takes.append(f"{item.name}=_default_{item.name}")
        else:
            takes.append(item.name)
        lines.append(f"    _set_{item.name}(self, {value})")
    source = f"def __init__(self, *, {', '.join(takes)}):\n" + "\n".join(lines)
    exec(source, names)  # noqa: S102  made of field names alone, as `dataclasses` itself does
    made = names["__init__"]
    made.__qualname__ = f"{record.__qualname__}.__init__"  # type: ignore[attr-defined]  # a function made by exec
    record.__init__ = made  # type: ignore[assignment]  # the same signature, checked by test
    return record
