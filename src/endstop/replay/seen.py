"""Ids that were seen already, in bounded memory: recordings repeat lines after a resume or a restart."""

from __future__ import annotations

from typing import Final

__all__ = ["SEEN_MAX", "Seen"]

SEEN_MAX: Final = 50_000


class Seen:
    """The ids seen last, at most `SEEN_MAX`; an id that was evicted counts as new again."""

    __slots__ = ("_ids", "_size_max")

    def __init__(self, size_max: int = SEEN_MAX) -> None:
        self._ids: dict[object, None] = {}
        self._size_max = size_max

    def add(self, key: object) -> bool:
        """Note `key`; True when it is new."""
        if key in self._ids:
            return False
        self._ids[key] = None
        if len(self._ids) > self._size_max:
            del self._ids[next(iter(self._ids))]
        return True

    def __contains__(self, key: object) -> bool:
        return key in self._ids
