"""Crash at durable point 1, 2, 3, … until a run gets through: every window between two writes, not a sample of them."""

from __future__ import annotations

from typing import Final

import pytest

from endstop.testing.history import Applied
from endstop.testing.simulated_faults import FaultPlan
from endstop.testing.simulated_scenario import small_scenario
from endstop.testing.simulation import Outcome, simulate

POINTS_MAX: Final = 500
ORDERS: Final = (1, 2, 3)


def _crash_everywhere(seed: int, workers: int) -> list[Outcome]:
    """The world of one seed with a crash at each of its points in turn, and last without any."""
    found: list[Outcome] = []
    for point in range(1, POINTS_MAX):
        outcome = simulate(seed, plan=FaultPlan(crash_point=point), scenario=small_scenario(workers=workers))
        found.append(outcome)
        if outcome.points < point:
            return found
    pytest.fail(f"{POINTS_MAX} crash points and no end")


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("seed", ORDERS)
def test_a_crash_at_any_durable_point_breaks_no_rule_and_the_run_completes(seed: int, workers: int) -> None:
    everywhere = _crash_everywhere(seed, workers)
    assert len(everywhere) > 20
    for outcome in everywhere:
        assert outcome.violation is None, outcome.report()
        assert outcome.states == (("run1", "complete"),), outcome.report()


def test_whatever_point_it_crashes_at_no_write_is_sent_twice_and_most_are_sent() -> None:
    """At most once is easily had by never sending; so it is counted how often nothing was sent."""
    missing = 0
    everywhere = _crash_everywhere(1, 1)
    for outcome in everywhere:
        effects = [event.operation_id for event in outcome.events if isinstance(event, Applied)]
        assert len(effects) == len(set(effects))
        missing += 2 - len(effects)
    assert missing * 5 < len(everywhere)


def test_the_last_of_them_did_not_crash() -> None:
    last = _crash_everywhere(1, 1)[-1]
    assert not any("dies" in line for line in last.trace())
    assert all("dies" in " ".join(outcome.trace()) for outcome in _crash_everywhere(1, 1)[:-1])
