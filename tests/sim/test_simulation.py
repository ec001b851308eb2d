"""Hundreds of worlds, each from one seed: every rule at every prefix, and the simulator itself under suspicion."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path
from random import Random
from typing import Final

import pytest

import endstop
from endstop.core.commands import Command, Flow, perform
from endstop.store.memory import MemoryStore
from endstop.testing import simulation
from endstop.testing.history import Committed, Rule
from endstop.testing.history_check import HistoryChecker
from endstop.testing.simulated_actors import Actor
from endstop.testing.simulated_driver import Driver
from endstop.testing.simulated_faults import Chance, Fault, FaultPlan
from endstop.testing.simulated_scenario import small_scenario
from endstop.testing.simulated_world import SimulatedClock
from endstop.testing.simulation import Outcome, simulate
from tests.sim.broken_steps import BROKEN, Broken

SEEDS: Final = 300
SEEDS_STORM: Final = 700
SEEDS_FOR_A_BROKEN_STEP: Final = 40
SEEDS_TRACED: Final = 12
STORE_SEEDS: Final = 4


@pytest.fixture(scope="module")
def outcomes() -> list[Outcome]:
    """One survey for all the tests that look at it."""
    return [simulate(seed) for seed in range(SEEDS)]


def test_every_rule_holds_at_every_prefix_of_every_history(outcomes: list[Outcome]) -> None:
    broken = [found for found in outcomes if found.violation is not None]
    assert not broken, "\n\n".join(found.report() for found in broken[:3])


@pytest.mark.storm
def test_every_rule_holds_in_more_worlds_than_the_default_ones() -> None:
    broken = []
    for seed in range(SEEDS, SEEDS + SEEDS_STORM):
        found = simulate(seed)
        if found.violation is not None:
            broken.append(found)
    assert not broken, "\n\n".join(found.report() for found in broken[:3])


@pytest.mark.parametrize("fault", Fault)
def test_every_fault_fires_in_many_of_the_worlds_that_have_it(outcomes: list[Outcome], fault: Fault) -> None:
    """A simulator that injects nothing passes everything."""
    having = [found for found in outcomes if fault in found.plan.rates]
    struck = [found for found in having if found.fired[fault]]
    assert len(having) > SEEDS // 4
    assert len(struck) * 20 >= len(having), f"{fault} fired in {len(struck)} of {len(having)} worlds"


def test_no_fault_fires_in_a_world_that_does_not_have_it(outcomes: list[Outcome]) -> None:
    for found in outcomes:
        assert set(found.fired) <= set(found.plan.rates), found.seed


def test_the_worlds_reach_every_kind_of_end_and_of_operation(outcomes: list[Outcome]) -> None:
    """What the simulation never reaches it cannot judge."""
    ends = Counter(state for found in outcomes for _, state in found.states)
    assert {"complete", "stopped", "running", "paused"} <= set(ends)
    moves = {
        (None if before is None else before.state.value, after.state.value)
        for found in outcomes
        for event in found.events
        if isinstance(event, Committed)
        for before, after in event.operations
    }
    assert {
        (None, "EXECUTING"),
        ("EXECUTING", "COMMITTED"),
        ("EXECUTING", "FAILED_RETRYABLE"),
        ("EXECUTING", "UNKNOWN"),
        ("UNKNOWN", "COMMITTED"),
        ("FAILED_RETRYABLE", "EXECUTING"),
    } <= moves
    assert sum(found.effects for found in outcomes) > SEEDS


@pytest.mark.parametrize("name", BROKEN)
def test_a_step_that_is_broken_on_purpose_is_found(name: str) -> None:
    broken: Broken = BROKEN[name]
    for seed in range(SEEDS_FOR_A_BROKEN_STEP):
        violation = simulate(seed, alter=broken.alter, folds=broken.folds).violation
        if violation is not None and violation.rule in broken.found_by:
            return
    pytest.fail(f"{name}: {SEEDS_FOR_A_BROKEN_STEP} seeds did not find it")


def test_a_world_that_does_not_come_to_rest_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(simulation, "CALM_TICKS_MAX", 0)
    rules = {found.violation.rule for seed in range(10) if (found := simulate(seed)).violation is not None}
    assert Rule.LIVENESS in rules


def test_without_faults_a_small_world_does_all_of_its_work_once() -> None:
    found = simulate(1, plan=FaultPlan(), scenario=small_scenario())
    assert found.violation is None, found.report()
    assert found.states == (("run1", "complete"),)
    assert found.effects == 2
    assert not found.fired


def test_the_same_seed_gives_the_same_trace() -> None:
    assert simulate(5).trace() == simulate(5).trace()


def test_another_seed_gives_another_trace() -> None:
    assert simulate(5).digest() != simulate(6).digest()


def test_the_trace_does_not_depend_on_the_order_of_hashes() -> None:
    """Two interpreters with different hash seeds see the same worlds."""
    program = (
        "from endstop.testing.simulation import simulate\n"
        f"print([simulate(seed).digest() for seed in range({SEEDS_TRACED})])\n"
    )
    home = str(Path(endstop.__file__).resolve().parents[1])
    seen = []
    for hash_seed in ("1", "77"):
        environment = {**os.environ, "PYTHONHASHSEED": hash_seed, "PYTHONPATH": home}
        ended = subprocess.run(
            [sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True, timeout=120
        )
        seen.append(ended.stdout)
    assert seen[0] == seen[1]
    assert seen[0].count("'") == 2 * SEEDS_TRACED


def test_the_same_worlds_pass_over_sqlite(tmp_path: Path) -> None:
    """The store is no part of the world: memory and SQLite give one trace."""
    from endstop.store.sqlite import SqliteStore

    for seed in range(STORE_SEEDS):
        path = tmp_path / f"{seed}.db"
        there = simulate(seed, make_store=lambda key, now, at=path: SqliteStore(at, new_key=key, now_us=now))  # type: ignore[misc]  # bound early
        assert there.trace() == simulate(seed).trace()


def test_a_command_that_the_simulator_does_not_know_is_an_error() -> None:
    """A new command of the pipeline must be simulated before it can pass."""
    chance, clock = Chance(Random(1), FaultPlan()), SimulatedClock()
    store = MemoryStore(new_key=chance.key, now_us=clock.now_us)
    driver = Driver(store, clock, chance, HistoryChecker(), None)
    actor = Actor(name="w1", flow=_asks_for_something_new(), plan=None)
    driver.add(actor)
    driver.step(actor)
    driver.step(actor)
    driver.dispose()
    assert driver.violation is not None
    assert driver.violation.rule is Rule.NO_FAULT
    assert "teach it" in driver.violation.text


def _asks_for_something_new() -> Flow[None]:
    command: Command[object] = Command()
    yield from perform(command)


def test_a_report_names_the_seed_the_faults_the_rule_and_the_way_to_replay_it() -> None:
    broken = BROKEN["a reservation forgets the intent"]
    found = simulate(0, alter=broken.alter, folds=False)
    report = found.report()
    assert found.violation is not None
    assert found.violation.rule is Rule.INTENT_FIRST
    assert "seed 0: intent_first" in report
    assert "endstop-sim --seed 0" in report
    assert all(f"{fault.value}={rate}" in report for fault, rate in found.plan.rates.items())
    assert re.search(r"commit ReserveCall run\d", report)
