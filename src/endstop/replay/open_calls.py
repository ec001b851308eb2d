"""The calls of a replayed run that have no outcome yet, and those that were given up on."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from endstop.core.events import Proposal
    from endstop.core.policy import ToolPolicy

__all__ = ["OpenCall", "OpenCalls"]

LEFT_MAX: Final = 256


# The proposal, the tool's policy, the call's place in its run, and whether it was let through (and not answered
# without running). A bare tuple: one is made on every call.
OpenCall = tuple["Proposal", "ToolPolicy", int, bool]


class OpenCalls:
    """Calls by their ids, the oldest first; one id may stand for several."""

    __slots__ = ("_left", "more", "now")

    def __init__(self) -> None:
        self.now: dict[str, OpenCall] = {}
        # Younger calls that share an id with an open one: rare, so that the common case is one look-up in `now`.
        self.more: dict[str, list[OpenCall]] = {}
        self._left: dict[str, list[OpenCall]] = {}

    def add(self, call: OpenCall) -> None:
        """Note a call."""
        call_id = call[0].call_id
        if call_id in self.now:
            self.more.setdefault(call_id, []).append(call)
        else:
            self.now[call_id] = call

    def answered(self, call_id: str) -> OpenCall | None:
        """Take the oldest open call of this id; None when there is none."""
        found = self.now.pop(call_id, None)
        if found is not None and self.more:
            self.move_up(call_id)
        return found

    def late(self, call_id: str) -> OpenCall | None:
        """Take the oldest call of this id that was given up on."""
        waiting = self._left.get(call_id)
        if not waiting:
            return None
        found = waiting.pop(0)
        if not waiting:
            del self._left[call_id]
        return found

    def give_up(self, call_id: str) -> OpenCall | None:
        """Give up on the oldest open call of this id, and give it when it had been let through."""
        found = self.answered(call_id)
        if found is None or not found[3]:
            return None
        self._left.setdefault(call_id, []).append(found)
        if len(self._left) > LEFT_MAX:
            del self._left[next(iter(self._left))]
        return found

    def of_agent(self, agent: str) -> list[str]:
        """The ids of the open calls of one agent, once for each call."""
        found = [call_id for call_id, call in self.now.items() if call[0].agent == agent]
        found += [call_id for call_id, calls in self.more.items() for call in calls if call[0].agent == agent]
        return found

    def unanswered(self) -> int:
        """How many calls that were let through are still open."""
        rest = sum(call[3] for calls in self.more.values() for call in calls)
        return sum(call[3] for call in self.now.values()) + rest

    def move_up(self, call_id: str) -> None:
        """The oldest call of an id was taken: the next one of that id takes its place."""
        waiting = self.more.get(call_id)
        if waiting:
            self.now[call_id] = waiting.pop(0)
            if not waiting:
                del self.more[call_id]
