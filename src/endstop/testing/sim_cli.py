"""`endstop-sim`: long runs of the simulator, and the replay of one seed.

    endstop-sim --seeds 10000 --jobs 2      simulate seeds 0 … 9999; stdout names every seed that breaks a rule
    endstop-sim --seed 17 --trace           replay one seed and print all of its events

Ends with 0 when every rule held and every fault fired, 1 when not, 2 for wrong usage.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

import click

from endstop.testing.simulated_faults import Fault
from endstop.testing.simulation import simulate

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

__all__ = ["Tally", "main", "simulate_range"]

CHUNK_SEEDS: Final = 25
FAILURES_SHOWN_MAX: Final = 20
SEEDS_FOR_EVERY_FAULT: Final = 300  # with fewer, a rare fault may stay away by chance
JOBS_MAX: Final = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """One seed that broke a rule: what a report needs."""

    seed: int
    rule: str
    text: str
    report: str = field(repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Tally:
    """What many simulations came to."""

    seeds: int = 0
    ticks: int = 0
    commits: int = 0
    effects: int = 0
    fired: tuple[tuple[str, int], ...] = ()
    failures: tuple[Failure, ...] = ()

    def plus(self, other: Tally) -> Tally:
        """Both together."""
        fired = Counter(dict(self.fired))
        fired.update(dict(other.fired))
        return Tally(
            seeds=self.seeds + other.seeds, ticks=self.ticks + other.ticks, commits=self.commits + other.commits,
            effects=self.effects + other.effects, fired=tuple(sorted(fired.items())),
            failures=(*self.failures, *other.failures),
        )  # fmt: skip

    def silent_faults(self) -> tuple[str, ...]:
        """Faults that never fired: a simulator that injects nothing passes everything."""
        fired = dict(self.fired)
        return tuple(fault.value for fault in Fault if not fired.get(fault.value))

    def to_json(self) -> dict[str, object]:
        """This tally as JSON values."""
        return {
            "seeds": self.seeds, "ticks": self.ticks, "commits": self.commits, "effects": self.effects,
            "fired": dict(self.fired), "silent": list(self.silent_faults()),
            "failures": [{"seed": item.seed, "rule": item.rule, "text": item.text} for item in self.failures],
        }  # fmt: skip


def simulate_range(start: int, count: int) -> Tally:
    """Simulate `count` seeds from `start` on, whatever they break."""
    tally = Tally()
    for seed in range(start, start + count):
        outcome = simulate(seed)
        failures: tuple[Failure, ...] = ()
        if outcome.violation is not None:
            broken = outcome.violation
            failures = (Failure(seed=seed, rule=broken.rule.value, text=broken.text, report=outcome.report()),)
        tally = tally.plus(
            Tally(
                seeds=1, ticks=outcome.ticks, commits=outcome.commits, effects=outcome.effects, failures=failures,
                fired=tuple((fault.value, times) for fault, times in outcome.fired.items()),
            )
        )  # fmt: skip
    return tally


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--seed", type=click.IntRange(min=0), help="Replay this one seed.")
@click.option("--trace", is_flag=True, help="With --seed: print every event, not the last ones alone.")
@click.option("--seeds", type=click.IntRange(min=1), help="Simulate so many seeds.")
@click.option("--start", type=click.IntRange(min=0), default=0, show_default=True, help="The first of --seeds.")
@click.option("--jobs", type=click.IntRange(1, JOBS_MAX), default=1, show_default=True, help="Processes for --seeds.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object on stdout.")
def main(seed: int | None, trace: bool, seeds: int | None, start: int, jobs: int, as_json: bool) -> None:
    """Simulate worlds of many workers under faults, and check their histories."""
    if (seed is None) is (seeds is None):
        msg = "say --seed N to replay one seed, or --seeds N to simulate many"
        raise click.UsageError(msg)
    if seed is not None:
        raise SystemExit(_replay(seed, trace=trace, as_json=as_json))
    raise SystemExit(_survey(start, seeds or 0, jobs, as_json=as_json))


def _replay(seed: int, *, trace: bool, as_json: bool) -> int:
    outcome = simulate(seed)
    failed = outcome.violation is not None
    if as_json:
        body: dict[str, object] = {
            "seed": seed, "faults": outcome.plan.to_json(), "digest": outcome.digest(), "ticks": outcome.ticks,
            "violation": None if outcome.violation is None else outcome.violation.to_json(),
        }  # fmt: skip
        if trace:
            body["trace"] = list(outcome.trace())
        click.echo(json.dumps(body))
    else:
        click.echo(outcome.report(len(outcome.events)) if trace else outcome.report())
    return int(failed)


def _survey(start: int, seeds: int, jobs: int, *, as_json: bool) -> int:
    tally = Tally()
    with _progress(seeds) as advance:
        for part in _parts(start, seeds, jobs):
            tally = tally.plus(part)
            advance(part.seeds)
            if not as_json:
                for failure in part.failures:
                    click.echo(f"seed {failure.seed}: {failure.rule}: {failure.text}")
    silent = tally.silent_faults() if seeds >= SEEDS_FOR_EVERY_FAULT else ()
    if as_json:
        click.echo(json.dumps(tally.to_json()))
    else:
        _tell(tally, silent)
    return int(bool(tally.failures or silent))


def _tell(tally: Tally, silent: tuple[str, ...]) -> None:
    for failure in tally.failures[:1]:
        click.echo(failure.report)
    if len(tally.failures) > FAILURES_SHOWN_MAX:
        click.echo(f"{len(tally.failures)} seeds broke a rule", err=True)
    if silent:
        click.echo(f"faults that never fired: {', '.join(silent)}")
    strikes = sum(times for _, times in tally.fired)
    click.echo(
        f"{tally.seeds} seeds, {tally.commits} commits, {tally.effects} effects, {strikes} faults fired, "
        f"{len(tally.failures)} seeds broke a rule"
    )


def _parts(start: int, seeds: int, jobs: int) -> Iterator[Tally]:
    """The tallies of all chunks, in the order of their seeds."""
    chunks = [(first, min(CHUNK_SEEDS, start + seeds - first)) for first in range(start, start + seeds, CHUNK_SEEDS)]
    if jobs == 1:
        for first, count in chunks:
            yield simulate_range(first, count)
        return
    from concurrent.futures import ProcessPoolExecutor
    from multiprocessing import get_context

    # Fresh interpreters: a forked one would share what this one has loaded and opened.
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
        yield from pool.map(simulate_range, *zip(*chunks, strict=True))


@contextmanager
def _progress(seeds: int) -> Iterator[Callable[[int], None]]:
    """A progress bar on stderr, where that is a terminal."""
    if not sys.stderr.isatty():
        yield lambda _count: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeRemainingColumn

    with Progress(BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), console=Console(stderr=True)) as bar:
        task = bar.add_task("seeds", total=seeds)
        yield lambda count: bar.advance(task, count)
