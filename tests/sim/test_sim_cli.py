"""`endstop-sim`: what it prints, and how it ends."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from click.testing import CliRunner

from endstop.testing import sim_cli
from endstop.testing.history import Rule, Violation
from endstop.testing.sim_cli import Failure, Tally, main
from endstop.testing.simulated_faults import Fault
from endstop.testing.simulation import Outcome, simulate


def _clean_seed() -> int:
    return next(seed for seed in range(100) if simulate(seed).violation is None)


def _broken(seed: int) -> Outcome:
    return replace(simulate(_clean_seed()), seed=seed, violation=Violation(rule=Rule.BUDGET, number=3, text="too much"))


def test_one_seed_is_replayed_with_its_whole_trace() -> None:
    seed = _clean_seed()
    ended = CliRunner().invoke(main, ["--seed", str(seed), "--trace"])
    assert ended.exit_code == 0, ended.output
    assert f"seed {seed}: every rule held" in ended.stdout
    assert simulate(seed).trace()[-1] in ended.stdout


def test_one_seed_as_json_says_its_faults_and_the_digest_of_its_trace() -> None:
    seed = _clean_seed()
    ended = CliRunner().invoke(main, ["--seed", str(seed), "--json"])
    body = json.loads(ended.stdout)
    assert body["digest"] == simulate(seed).digest()
    assert body["violation"] is None
    assert set(body["faults"]) <= {fault.value for fault in Fault}


def test_many_seeds_are_counted() -> None:
    ended = CliRunner().invoke(main, ["--seeds", "6", "--start", "3", "--json"])
    body = json.loads(ended.stdout)
    assert body["seeds"] == 6
    assert body["commits"] > 6
    assert body["failures"] == []


@pytest.mark.slow
def test_two_processes_find_what_one_finds() -> None:
    alone = CliRunner().invoke(main, ["--seeds", "30", "--json"])
    together = CliRunner().invoke(main, ["--seeds", "30", "--jobs", "2", "--json"])
    assert json.loads(together.stdout) == json.loads(alone.stdout)


def test_a_seed_that_breaks_a_rule_is_printed_and_ends_with_1(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sim_cli, "simulate", _broken)
    for arguments in (["--seed", "4"], ["--seeds", "2", "--start", "4"]):
        ended = CliRunner().invoke(main, arguments)
        assert ended.exit_code == 1
        assert "seed 4: budget: too much" in ended.stdout
        assert "replay: endstop-sim --seed 4" in ended.stdout


def test_a_survey_in_which_a_fault_never_fires_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    fired = tuple((fault.value, 1) for fault in Fault if fault is not Fault.ZOMBIE)
    quiet = Tally(seeds=sim_cli.CHUNK_SEEDS, fired=fired)
    monkeypatch.setattr(sim_cli, "simulate_range", lambda start, count: quiet)
    ended = CliRunner().invoke(main, ["--seeds", str(sim_cli.SEEDS_FOR_EVERY_FAULT)])
    assert ended.exit_code == 1
    assert "never fired: zombie" in ended.stdout


def test_neither_or_both_ways_to_choose_seeds_is_wrong_usage() -> None:
    assert CliRunner().invoke(main, []).exit_code == 2
    assert CliRunner().invoke(main, ["--seed", "1", "--seeds", "2"]).exit_code == 2


def test_tallies_add_up() -> None:
    failure = Failure(seed=1, rule="budget", text="t", report="r")
    one = Tally(seeds=1, ticks=2, commits=3, effects=4, fired=(("zombie", 1),), failures=(failure,))
    both = one.plus(Tally(seeds=1, fired=(("stall", 2), ("zombie", 2))))
    assert (both.seeds, both.ticks, both.commits, both.effects) == (2, 2, 3, 4)
    assert both.fired == (("stall", 2), ("zombie", 3))
    assert both.failures == (failure,)
