"""Short ways to make what the core's functions take, for tests that look below the guard."""

from __future__ import annotations

from typing import Final

from endstop import Effect, Limits, LoopGuard, Policy, ToolCall, ToolPolicy
from endstop.core.events import Proposal, TurnProposal
from endstop.core.propose import propose

NO_CAPS: Final = Limits(steps_max=100_000, turns_max=100_000, tokens_max=10**9, wall_ms_max=10**9)


class Clock:
    """Microseconds that move only when told to."""

    def __init__(self, now_us: int = 1_000_000) -> None:
        self.now_us = now_us

    def __call__(self) -> int:
        return self.now_us

    def pass_ms(self, duration_ms: int) -> None:
        self.now_us += duration_ms * 1_000


def guard_of(
    limits: Limits = NO_CAPS,
    *,
    tools: dict[str, ToolPolicy] | None = None,
    on_trip: tuple[str, ...] = ("stop",),
    strict_tools: bool = False,
    clock: Clock | None = None,
) -> LoopGuard:
    policy = Policy(limits=limits, tools=tools or {}, on_trip=on_trip, strict_tools=strict_tools)
    return LoopGuard(policy, clock=clock or Clock())


def proposal_of(tool: str = "look", call_id: str = "c1", **more: object) -> Proposal:
    """A proposal of an undeclared tool; `more` are its arguments."""
    return propose(ToolCall(tool=tool, args=dict(more), call_id=call_id), Policy().tool(tool))


def write_of(tool: str = "crm.update", call_id: str = "c1", **more: object) -> Proposal:
    declared = ToolPolicy(effect=Effect.WRITE, idempotency_key="{id}")
    return propose(ToolCall(tool=tool, args={"id": 1, **more}, call_id=call_id), declared)


def turn_of(
    call_id: str = "t1", *, tokens: int | None = None, nanos: int | None = None, retry: bool = False
) -> TurnProposal:
    return TurnProposal(call_id=call_id, tokens_bound=tokens, nanos_bound=nanos, is_retry=retry)
