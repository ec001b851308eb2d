"""What a trace format is: a name, how sure it is of a source, and how it reads it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from endstop.replay.source import Source
    from endstop.replay.trace import Item, Skips

__all__ = ["CallIds", "Format"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Format:
    """One format of recordings.

    `sniff` says from 0 (no) to 100 (certain) how much a source looks like it, by content alone. `read` yields the
    events of every run in it and raises nothing for what a file holds. `tried` is whether it was tried on real files;
    the others follow their published schemas.
    """

    name: str
    title: str
    tried: bool
    sniff: Callable[[Source], int]
    read: Callable[[Source, Skips], Iterator[Item]]


class CallIds:
    """The open calls of one run, for formats that pair a result with its call by order."""

    def __init__(self) -> None:
        self._count = 0
        self._open: dict[str, str] = {}

    def opened(self, call_id: str, tool: str) -> str:
        """Note a call; gives its id, made up where the recording has none."""
        self._count += 1
        call_id = call_id or f"call-{self._count}"
        self._open[call_id] = tool
        return call_id

    def answered(self, call_id: str = "", tool: str = "") -> str:
        """The call that a result belongs to: the one named, else the oldest open one (of that tool); "" for none."""
        if call_id:
            self._open.pop(call_id, None)
            return call_id
        for found, opened in self._open.items():
            if not tool or opened == tool:
                del self._open[found]
                return found
        return ""

    def forget(self) -> int:
        """Give up on what is open, and say how many that were."""
        left = len(self._open)
        self._open.clear()
        return left
