"""What shadow mode saw: the decisions that a policy which only observes wrote down, summed up over runs."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from endstop.core.reasons import Reason
    from endstop.replay.report import RunReport

__all__ = ["ObservedGuard", "observed_guards"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ObservedGuard:
    """One guard: in how many runs it would have ended the run first, what that would have left out, and how often it
    spoke in all. `example` is the run in which the most calls came after."""

    guard: str
    reason: Reason
    runs: int
    trips: int
    calls_after: int
    example: str


def observed_guards(reports: Iterable[RunReport]) -> tuple[ObservedGuard, ...]:
    """The guards that would have acted, those that would have ended most runs first.

    The reports come from a replay under a policy with `on_trip = ["observe"]`, of the ledger that shadow mode wrote or
    of any other recording.
    """
    firsts: dict[tuple[str, Reason], list[tuple[int, str]]] = {}
    trips: dict[tuple[str, Reason], int] = {}
    for report in reports:
        seen = [
            (one.guard or one.reason.value, one.reason, one.call_index)
            for one in report.judgements
            if one.observed and one.reason is not None
        ]
        for guard, reason, _ in seen:
            trips[guard, reason] = trips.get((guard, reason), 0) + 1
        for guard, reason, index in seen[:1]:
            after = max(0, report.totals.calls - index)
            firsts.setdefault((guard, reason), []).append((after, report.run_id))
    found = [
        ObservedGuard(
            guard=guard, reason=reason, runs=len(firsts.get((guard, reason), ())), trips=count,
            calls_after=sum(after for after, _ in firsts.get((guard, reason), ())),
            example=max(firsts.get((guard, reason), ()), default=(0, ""))[1],
        )
        for (guard, reason), count in trips.items()
    ]  # fmt: skip
    return tuple(sorted(found, key=lambda one: (-one.runs, -one.trips, one.guard)))
