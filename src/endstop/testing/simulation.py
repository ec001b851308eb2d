"""A deterministic simulation: the whole world follows from one seed.

Many workers step the production pipelines (`endstop.core.pipeline`) over a real store, in an order that the dice
decide, while `endstop.testing.simulated_faults` strikes between any two of their commands. Everything that was durable
or real goes into a history, which `endstop.testing.history_check` judges event by event.

    outcome = simulate(17)
    assert outcome.violation is None, outcome.report()

Nothing in here reads a clock, draws from another source than the seed, or depends on the order of a set.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random
from typing import TYPE_CHECKING, Final

from endstop.core.commands import Transact, perform
from endstop.core.steps_life import RecoverRun, ResumeRun
from endstop.core.transitions import OperationState
from endstop.store.memory import MemoryStore
from endstop.testing.history import Rule, Violation, line_of
from endstop.testing.history_check import HistoryChecker
from endstop.testing.simulated_actors import Actor, Place
from endstop.testing.simulated_agents import Seat, Surroundings, live
from endstop.testing.simulated_driver import Driver
from endstop.testing.simulated_faults import Chance, Fault, FaultPlan, draw_plan
from endstop.testing.simulated_operators import order
from endstop.testing.simulated_scenario import draw_scenario
from endstop.testing.simulated_world import SimulatedClock, SimulatedIds

if TYPE_CHECKING:
    from endstop.core.commands import Flow
    from endstop.core.steps import Step
    from endstop.store.port import Store
    from endstop.testing.history import Event
    from endstop.testing.simulated_agents import RunPlan
    from endstop.testing.simulated_scenario import Scenario

__all__ = ["Outcome", "simulate"]

CALM_TICKS_MAX: Final = 6_000
RESTARTS_A_RUN_MAX: Final = 5
RESTART_TICKS_MAX: Final = 40
STALL_TICKS: Final = (5, 80)
SKEW_US_MAX: Final = 300_000_000
LAST_EVENTS: Final = 40
_ORDERS: Final = {
    Fault.ORDER_STOP: "stop",
    Fault.ORDER_KILL: "kill",
    Fault.ORDER_DENY: "deny",
    Fault.ORDER_FREEZE: "freeze",
    Fault.ORDER_RESUME: "resume",
    Fault.RECOVERY: "recover",
}

StoreMaker = Callable[[Callable[[], bytes], Callable[[], int]], "Store"]
Alteration = Callable[["Step[object]"], "Step[object]"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How one simulation went. `violation` None means that every rule held at every prefix."""

    seed: int
    plan: FaultPlan
    violation: Violation | None
    events: tuple[Event, ...] = field(repr=False)
    fired: Counter[Fault]
    ticks: int
    commits: int
    effects: int
    points: int
    states: tuple[tuple[str, str], ...]

    def trace(self) -> tuple[str, ...]:
        """Every event as a line; the same for the same seed in every process."""
        return tuple(line_of(event) for event in self.events)

    def digest(self) -> str:
        """A digest of the trace."""
        return hashlib.sha256("\n".join(self.trace()).encode()).hexdigest()

    def report(self, last: int = LAST_EVENTS) -> str:
        """What a person needs to see of a failure: the seed, the faults, the rule and the last events."""
        told = "every rule held" if self.violation is None else f"{self.violation.rule}: {self.violation.text}"
        faults = ", ".join(f"{name}={rate}" for name, rate in self.plan.to_json().items()) or "none"
        lines = [line_of(event) for event in self.events[-last:]]
        head = [
            f"seed {self.seed}: {told}",
            f"faults (per mille): {faults}",
            f"replay: endstop-sim --seed {self.seed} --trace",
        ]
        return "\n".join([*head, *lines])


def simulate(
    seed: int,
    *,
    plan: FaultPlan | None = None,
    scenario: Scenario | None = None,
    alter: Alteration | None = None,
    make_store: StoreMaker | None = None,
    folds: bool = True,
) -> Outcome:
    """Run the world of `seed` to its end, or to the first broken rule.

    `plan` and `scenario` replace what the seed would draw. `alter` replaces steps before the store runs them, to see
    that a broken step is found; `folds` False leaves out the rule that the entries tell all, which finds most of them
    first. `make_store` gives another store than the memory one; it must be empty.
    """
    world = _World(seed, plan, scenario, alter, make_store, folds=folds)
    try:
        return world.run()
    finally:
        world.close()


class _World:
    """One simulation under way."""

    def __init__(
        self,
        seed: int,
        plan: FaultPlan | None,
        scenario: Scenario | None,
        alter: Alteration | None,
        make_store: StoreMaker | None,
        *,
        folds: bool,
    ) -> None:
        # The plan has dice of its own, so that a given plan leaves the rest of the world as the seed draws it.
        self.seed = seed
        self.plan = draw_plan(_dice(f"plan-{seed}")) if plan is None else plan
        self.chance = Chance(_dice(f"world-{seed}"), self.plan)
        self.clock = SimulatedClock()
        self.ids = SimulatedIds(self.chance)
        self.scenario = draw_scenario(self.chance) if scenario is None else scenario
        maker = make_store or (lambda new_key, now_us: MemoryStore(new_key=new_key, now_us=now_us))
        # A store's keys come from dice of their own: how many it draws must not change the world.
        store_ids = SimulatedIds(Chance(_dice(f"store-{seed}"), FaultPlan()))
        self.store = maker(store_ids.new_key, self.clock.now_us)
        checker = HistoryChecker(enforces=not self.scenario.policy.observes, folds=folds)
        self.driver = Driver(self.store, self.clock, self.chance, checker, alter)
        self.around = Surroundings(
            chance=self.chance, policy=self.scenario.policy, store_key=self.store.store_key, new_id=self.ids.new_id,
            new_key=self.ids.new_key, is_dead=self.driver.is_dead, tool=self.driver.tool,
        )  # fmt: skip
        self.restarts: Counter[str] = Counter()
        self.due: list[tuple[int, RunPlan]] = []
        self.serial = 0
        self.calm_since: int | None = None

    def close(self) -> None:
        """Let go of everything that still stands in the middle of something."""
        self.driver.dispose()
        self.store.close()

    # -- The course of a simulation

    def run(self) -> Outcome:
        """Storm, calm, and the last look."""
        driver = self.driver
        for plan, count in zip(self.scenario.plans, self.scenario.workers, strict=True):
            for _ in range(count):
                self._start(plan)
        while driver.violation is None and self._goes_on():
            self._tick()
        if driver.violation is None:
            self._last_look()
        return self._outcome()

    def _goes_on(self) -> bool:
        driver = self.driver
        busy = any(actor.place not in (Place.DEAD, Place.DONE) for actor in driver.actors) or self.due
        if self.calm_since is None and (driver.tick_number >= self.scenario.storm_ticks or not busy):
            self._calm_down()
        if self.calm_since is None or busy or driver.target.on_the_wire:
            if self.calm_since is not None and driver.tick_number - self.calm_since > CALM_TICKS_MAX:
                left = ", ".join(
                    f"{actor.name} ({actor.place}, {type(actor.command).__name__})"
                    for actor in driver.actors
                    if actor.place not in (Place.DEAD, Place.DONE)
                )
                driver.break_rule(Rule.LIVENESS, f"{CALM_TICKS_MAX} ticks after the last fault still at work: {left}")
                return False
            return True
        return False

    def _calm_down(self) -> None:
        """Faults end: what was stalled goes on, orders are lifted, and a run that nobody is left in gets a worker."""
        driver = self.driver
        self.calm_since = driver.tick_number
        self.chance.calm()
        driver.note("world", "calm")
        for actor in driver.actors:
            actor.stalled_until = 0
        driver.lift_all_orders()
        for plan in self.scenario.plans:
            if not any(actor.works_on(plan.run_id) and not driver.is_dead(actor.owner) for actor in driver.actors):
                self.due.append((driver.tick_number, plan))

    def _tick(self) -> None:
        driver, chance = self.driver, self.chance
        driver.advance()
        # 1. Workers that come back, or come after a resume.
        ripe = [plan for tick, plan in self.due if tick <= driver.tick_number]
        self.due = [(tick, plan) for tick, plan in self.due if tick > driver.tick_number]
        for plan in ripe:
            self._start(plan)
        # 2. People and stalls.
        for fault, kind in _ORDERS.items():
            if chance.fires(fault):
                self._interfere(kind)
        self._stall()
        # 3. One step of one actor.
        ready = driver.ready()
        if ready:
            actor = chance.pick(ready)
            driver.step(actor)
            if actor.place is Place.DEAD:
                self._restart(actor)
            step = driver.last_step
            if isinstance(step, ResumeRun):
                self._again(step.run_id)

    def _stall(self) -> None:
        chance, driver = self.chance, self.driver
        workers = [actor for actor in driver.actors if actor.plan is not None and actor.is_up(driver.tick_number)]
        if not workers:
            return
        if chance.fires(Fault.STALL):
            self._stop_for_a_while(chance.pick(workers).owner)
        if chance.fires(Fault.ZOMBIE):
            actor = chance.pick(workers)
            self._stop_for_a_while(actor.owner)
            driver.note(actor.owner, "is declared dead")
            for thread in driver.threads_of(actor.owner):
                thread.declared_dead = True
            self._restart(actor)

    def _stop_for_a_while(self, owner: str) -> None:
        until = self.driver.tick_number + self.chance.between(*STALL_TICKS)
        self.driver.note(owner, f"stalls until t{until}")
        for thread in self.driver.threads_of(owner):
            thread.stalled_until = until

    # -- Actors

    def _start(self, plan: RunPlan) -> None:
        self.serial += 1
        name = f"w{self.serial}"
        head = "shared" if self.scenario.same_ids and self.serial <= sum(self.scenario.workers) else name
        skew_us = 0
        if self.chance.fires(Fault.CLOCK_SKEW):
            skew_us = self.chance.between(-SKEW_US_MAX, SKEW_US_MAX)
        seat = Seat(owner_id=name, now_us=lambda: self.clock.now_us() + skew_us, call_head=f"{head}-{plan.run_id}")
        self.driver.add(Actor(name=name, flow=live(seat, plan, self.around), plan=plan))

    def _interfere(self, kind: str) -> None:
        self.serial += 1
        run_ids = tuple(plan.run_id for plan in self.scenario.plans)
        flow = order(kind, run_ids, self.clock.now_us, self.around)
        self.driver.add(Actor(name=f"op{self.serial}-{kind}", flow=flow, plan=None))

    def _restart(self, actor: Actor) -> None:
        if actor.plan is not None:
            self._again(actor.plan.run_id)

    def _again(self, run_id: str) -> None:
        """Another worker will enter the run, unless there were enough."""
        if self.restarts[run_id] >= RESTARTS_A_RUN_MAX:
            return
        self.restarts[run_id] += 1
        plan = next(plan for plan in self.scenario.plans if plan.run_id == run_id)
        self.due.append((self.driver.tick_number + self.chance.between(1, RESTART_TICKS_MAX), plan))

    # -- The end

    def _last_look(self) -> None:
        """Every process is gone by now: recovery, and then nothing may be left half done."""
        driver, store = self.driver, self.store
        open_states = (OperationState.EXECUTING, OperationState.RESERVED)
        for plan in self.scenario.plans:
            if store.run(plan.run_id).result() is None:
                continue
            names = frozenset(actor.owner for actor in driver.actors)
            step = RecoverRun(run_id=plan.run_id, now_us=self.clock.now_us(), dead_owners=names)
            driver.add(Actor(name="recovery", flow=_one(step), plan=None))
            while driver.violation is None and (ready := driver.ready()):
                driver.step(ready[0])
        for record in store.operations(states=open_states, limit=10_000).result():
            driver.break_rule(Rule.NOTHING_LEFT, f"{record.operation_id} is {record.state} under {record.owner_id}")
        for plan in self.scenario.plans:
            run = store.run(plan.run_id).result()
            if run is not None and run.in_flight:
                driver.break_rule(Rule.NOTHING_LEFT, f"{plan.run_id} has calls in flight: {run.in_flight}")
        driver.compare_leaves()

    def _outcome(self) -> Outcome:
        driver = self.driver
        states = []
        for plan in self.scenario.plans:
            run = self.store.run(plan.run_id).result()
            states.append((plan.run_id, "absent" if run is None else run.state.value))
        return Outcome(
            seed=self.seed, plan=self.plan, violation=driver.violation, events=tuple(driver.events),
            fired=self.chance.fired, ticks=driver.tick_number, commits=driver.commits, effects=driver.effects,
            points=self.chance.points, states=tuple(states),
        )  # fmt: skip


def _dice(seed: str) -> Random:
    return Random(seed)  # noqa: S311  # it must be foreseeable, and guards nothing


def _one(step: RecoverRun) -> Flow[None]:
    yield from perform(Transact(step=step))
