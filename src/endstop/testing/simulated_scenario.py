"""What is to be done in a simulated world: the policy, the runs and their plans, drawn from the seed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from endstop.core.policy import Limits, Policy, ToolPolicy
from endstop.core.reasons import Effect
from endstop.testing.simulated_agents import Item, RunPlan
from endstop.testing.simulated_faults import Fault

if TYPE_CHECKING:
    from endstop.testing.simulated_faults import Chance

__all__ = ["Scenario", "draw_scenario", "small_scenario"]

RUNS_MAX: Final = 3
ITEMS_MAX: Final = 10
ORDERS: Final = 6
SHARED_ORDERS: Final = 3
WORKERS_A_RUN_MAX: Final = 3
STORM_TICKS: Final = (60, 360)
HUGE: Final = 10**9


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """The work of one world. `workers` says how many start in each run, and whether they share call ids."""

    policy: Policy
    plans: tuple[RunPlan, ...]
    workers: tuple[int, ...]
    same_ids: bool
    storm_ticks: int


def draw_scenario(chance: Chance) -> Scenario:
    """A policy, one to three runs, and how many workers each has."""
    shared = chance.fires(Fault.SHARED_KEY)
    plans, workers = [], []
    for number in range(1, chance.between(1, RUNS_MAX) + 1):
        plans.append(_plan(chance, number, shared=shared))
        workers.append(chance.between(2, WORKERS_A_RUN_MAX) if chance.fires(Fault.PARALLEL_WORKERS) else 1)
    return Scenario(
        policy=_policy(chance), plans=tuple(plans), workers=tuple(workers), same_ids=bool(chance.below(2)),
        storm_ticks=chance.between(*STORM_TICKS),
    )  # fmt: skip


def small_scenario(*, workers: int = 1) -> Scenario:
    """One run that reads, writes, asks a model, writes again and is complete: small enough to crash everywhere."""
    items = (
        Item(kind="call", tool="look", args={"q": "a"}),
        Item(kind="call", tool="pay", args={"order": "o1", "amount": 7}),
        Item(kind="turn"),
        Item(kind="call", tool="mail", args={"to": "p1"}),
        Item(kind="checkpoint"),
    )
    return Scenario(
        policy=Policy(limits=_GENEROUS, tools=_tools("replay")),
        plans=(RunPlan(run_id="run1", labels=(), items=items, completes=True),),
        workers=(workers,),
        same_ids=False,
        storm_ticks=HUGE,
    )


_GENEROUS: Final = Limits(
    steps_max=200, turns_max=100, tokens_max=200_000, wall_ms_max=HUGE, retries_max=50, same_call_max=30,
    call_window=32, cycle_repeats_max=50, no_progress_max=200, error_streak_max=50, refused_streak_max=50,
)  # fmt: skip


def _tools(on_committed: str) -> dict[str, ToolPolicy]:
    """Two writes of different scopes, a read and a poll; `shell` is declared by nobody."""
    write = Effect.WRITE
    return {
        "pay": ToolPolicy(effect=write, idempotency_key="{order}", scope="tenant", on_committed=on_committed),
        "mail": ToolPolicy(effect=write, idempotency_key="{to}", scope="run", on_committed=on_committed),
        "look": ToolPolicy(effect=Effect.READ),
        "watch": ToolPolicy(effect=Effect.POLL),
    }


def _policy(chance: Chance) -> Policy:
    limits = _GENEROUS
    if chance.below(2):
        limits = Limits(
            steps_max=chance.pick([6, 20, 60]), turns_max=chance.pick([2, 5, 20]),
            tokens_max=chance.pick([1_500, 4_000, 15_000]), wall_ms_max=chance.pick([1_000, 60_000, HUGE]),
            retries_max=chance.pick([1, 3, 8]), spend_nanos_max=chance.pick([None, 4_000, 40_000]),
            error_streak_max=chance.pick([3, 30]), no_progress_max=chance.pick([3, 30]),
        )  # fmt: skip
    ladder = chance.pick([("stop",), ("stop",), ("warn", "block", "stop"), ("observe",)])
    return Policy(limits=limits, tools=_tools(chance.pick(["stop", "replay"])), on_trip=ladder)


def _plan(chance: Chance, number: int, *, shared: bool) -> RunPlan:
    items = tuple(_item(chance, number, shared=shared) for _ in range(chance.between(3, ITEMS_MAX)))
    return RunPlan(
        run_id=f"run{number}", labels=(("team", chance.pick(["red", "blue"])),), items=items,
        completes=bool(chance.below(3)),
    )  # fmt: skip


def _item(chance: Chance, number: int, *, shared: bool) -> Item:
    draw = chance.between(-3, 6)
    round_id = f"round{chance.below(2)}" if chance.below(4) == 0 else None
    if draw <= 0:
        wanted = f"s{chance.below(SHARED_ORDERS)}" if shared else f"r{number}o{chance.below(ORDERS)}"
        return Item(kind="call", tool="pay", args={"order": wanted, "amount": 7}, round_id=round_id)
    match draw:
        case 1:
            return Item(kind="call", tool="mail", args={"to": f"p{chance.below(ORDERS)}"}, round_id=round_id)
        case 2:
            return Item(kind="call", tool="look", args={"q": f"q{chance.below(2)}"}, round_id=round_id)
        case 3:
            return Item(kind="call", tool="shell", args={"line": f"l{chance.below(ORDERS)}"}, round_id=round_id)
        case 4:
            return Item(kind="call", tool="watch", args={"job": "j"})
        case 5:
            return Item(kind=chance.pick(["checkpoint", "user_input", "handoff", "child"]))
        case _:
            return Item(kind="turn")
