"""Who is stepped: the threads of the workers, and the operators."""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING, Final

from endstop.errors import InvariantError

if TYPE_CHECKING:
    from endstop.core.commands import Command, Flow
    from endstop.core.model import ToolResult, Usage
    from endstop.testing.simulated_agents import RunPlan
    from endstop.testing.simulated_world import ToolRun

__all__ = ["Actor", "Place", "dispose_of"]

DISPOSALS_MAX: Final = 50


class _Died(BaseException):
    """Thrown into what is left of a dead worker, so that it ends; what it still asks for is not done."""


class Place(StrEnum):
    """Where an actor is."""

    ACTIVE = "active"
    DEAD = "dead"
    DONE = "done"


class Actor:
    """One thread of a worker, or an operator: its flow, and the command that it waits for.

    `owner` is its process: the threads of one process live, stall and die together.
    """

    def __init__(self, *, name: str, flow: Flow[None], plan: RunPlan | None, owner: str = "") -> None:
        self.name = name
        self.owner = owner or name
        self.flow = flow
        self.plan = plan
        self.place = Place.ACTIVE
        self.command: Command[object] | None = None
        self.started = False
        self.waits_until = 0
        self.stalled_until = 0
        self.dies_at: int | None = None
        self.declared_dead = False
        self.tool_run: ToolRun | None = None
        self.model_answer: Usage | BaseException | None = None
        self.twins: dict[tuple[str, str], ToolResult[object]] = {}

    def works_on(self, run_id: str) -> bool:
        """Whether this is a worker of that run that has not ended."""
        return self.plan is not None and self.plan.run_id == run_id and self.place is Place.ACTIVE

    def is_up(self, tick: int) -> bool:
        """Whether its process runs now."""
        return self.place is Place.ACTIVE and self.stalled_until <= tick


def dispose_of(flow: Flow[None]) -> None:
    """End a flow that stands somewhere; what it still asks for is not done."""
    for _ in range(DISPOSALS_MAX):
        try:
            flow.throw(_Died())
        except BaseException:  # it ended, in whatever way: its process is gone
            return
    msg = "a flow does not end"
    raise InvariantError(msg)
