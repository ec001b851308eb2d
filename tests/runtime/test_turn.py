"""Model calls: bounds that are held, usage that is posted, budgets that hold under many calls at once."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

import endstop as es
from endstop.core.evidence import TURNS_OPEN_MAX
from tests.runtime.scenes import SPEC, Scene, StillClock, stops


class FlatPrices:
    """Two nano-dollars a token of input, three a token of output; one model is unknown."""

    def price_nanos(self, model: str, usage: es.Usage) -> int | None:
        return None if model == "unknown" else 2 * usage.input_tokens + 3 * usage.output_tokens

    def worst_case_nanos(self, model: str, input_tokens_max: int | None, output_tokens_max: int | None) -> int | None:
        if model == "unknown" or input_tokens_max is None or output_tokens_max is None:
            return None
        return 2 * input_tokens_max + 3 * output_tokens_max


def budget(nanos: int, **more: int) -> es.Policy:
    values = {"turns_max": 10_000, "tokens_max": 10**9, "wall_ms_max": 10**9, **more}
    return es.Policy(limits=es.Limits(spend_nanos_max=nanos, **values))


def test_the_limit_th_turn_is_allowed_and_the_next_refused(scene: Scene) -> None:
    guard = scene.open(es.Policy(limits=es.Limits(turns_max=3, wall_ms_max=600_000)))
    sent = 0
    with stops("turn_ceiling"), guard.run(SPEC) as run:
        for _ in range(9):
            with run.model_call() as turn:
                sent += 1
                turn.record(input_tokens=1)
    assert sent == 3


def test_a_known_bound_that_does_not_fit_is_refused_before_it_leaves(scene: Scene) -> None:
    guard = scene.open(es.Policy(limits=es.Limits(tokens_max=100, wall_ms_max=600_000)))
    with stops("token_ceiling") as stopped, guard.run(SPEC) as run:
        with run.model_call(input_tokens_max=60, output_tokens_max=40) as turn:
            turn.record(input_tokens=50, output_tokens=20)
        with run.model_call(output_tokens_max=31):
            pytest.fail("sent")
    assert stopped.envelope.detail.value == 101
    assert stopped.envelope.counters.turns == 1


def test_without_a_bound_a_call_leaves_until_the_ceiling_is_passed(scene: Scene) -> None:
    guard = scene.open(es.Policy(limits=es.Limits(tokens_max=100, wall_ms_max=600_000)))
    used = []
    with stops("token_ceiling"), guard.run(SPEC) as run:
        for _ in range(5):
            with run.model_call() as turn:
                turn.record(input_tokens=100, output_tokens=1)
                used.append(1)
    assert len(used) == 1


@pytest.mark.parametrize("told", [None, {"input_tokens": 0, "output_tokens": 0}])
def test_usage_that_is_missing_or_all_zero_is_charged_the_bound(scene: Scene, told: dict[str, int] | None) -> None:
    guard = scene.open(budget(10_000), prices=FlatPrices())
    with guard.run(SPEC) as run:
        with run.model_call(model="m", input_tokens_max=60, output_tokens_max=40) as turn:
            if told is not None:
                turn.record(input_tokens=9)
                turn.record(**told)
        counters = run.counters
    assert (counters.input_tokens, counters.output_tokens, counters.spend_nanos) == (60, 40, 240)


def test_the_worst_case_of_a_host_is_priced_and_charged_but_not_held_against_the_ceiling(scene: Scene) -> None:
    guard = scene.open(budget(10_000, tokens_max=50), prices=FlatPrices())
    with guard.run(SPEC) as run:
        with run.model_call(model="m", output_tokens_max=40, worst_case=(1_000, 40)):
            pass
        assert run.counters.spend_nanos == 2_120
        assert run.counters.input_tokens == 1_000


def test_recorded_totals_replace_each_other_and_carry_their_details(scene: Scene) -> None:
    guard = scene.open(budget(10_000), prices=FlatPrices())
    with guard.run(SPEC) as run:
        with run.model_call(model="m", input_tokens_max=90, output_tokens_max=90) as turn:
            turn.record(input_tokens=10, output_tokens=1)
            turn.record(
                input_tokens=20, output_tokens=2, cache_read_tokens=15, cache_write_tokens=3, reasoning_tokens=1,
                spend_nanos=17,
            )  # fmt: skip
        counters = run.counters
    assert (counters.input_tokens, counters.output_tokens, counters.spend_nanos) == (20, 2, 17)
    assert (counters.cache_read_tokens, counters.cache_write_tokens, counters.reasoning_tokens) == (15, 3, 1)


@pytest.mark.parametrize(
    ("fault", "charged"), [("rate_limit", 0), ("auth", 0), ("invalid_request", 0), ("outage", 40), ("timeout", 40)]
)
def test_a_providers_fault_is_charged_when_it_may_have_worked_on_the_call(
    scene: Scene, fault: str, charged: int
) -> None:
    guard = scene.open()
    with guard.run(SPEC) as run:
        with pytest.raises(ConnectionError), run.model_call(output_tokens_max=40) as turn:
            turn.fail(fault)
            raise ConnectionError
        assert run.counters.output_tokens == charged
        assert run.counters.turns == 1


def test_a_call_that_broke_is_charged_its_bound_unless_it_said_what_it_used(scene: Scene) -> None:
    guard = scene.open()
    with guard.run(SPEC) as run:
        with pytest.raises(ValueError, match="a"), run.model_call(output_tokens_max=40):
            raise ValueError("a")
        with pytest.raises(ValueError, match="b"), run.model_call(output_tokens_max=40) as turn:
            turn.record(output_tokens=3)
            raise ValueError("b")
        assert run.counters.output_tokens == 43


def test_a_call_whose_worst_case_does_not_fit_the_budget_is_refused(scene: Scene) -> None:
    guard = scene.open(budget(1_000), prices=FlatPrices())
    with stops("spend_cap") as stopped, guard.run(SPEC) as run:
        with run.model_call(model="m", input_tokens_max=100, output_tokens_max=100) as turn:
            turn.record(input_tokens=100, output_tokens=100)
        with run.model_call(model="m", input_tokens_max=100, output_tokens_max=101):
            pytest.fail("sent")
    assert stopped.envelope.counters.spend_nanos == 500
    assert stopped.envelope.detail.limit_name == "spend_nanos_max"


@pytest.mark.parametrize(
    "more",
    [{"model": "unknown", "input_tokens_max": 1, "output_tokens_max": 1}, {"model": "m", "output_tokens_max": 1}],
)
def test_with_a_budget_a_call_without_a_price_is_refused(scene: Scene, more: dict[str, object]) -> None:
    guard = scene.open(budget(10**12), prices=FlatPrices())
    with stops("budget_unpriced"), guard.run(SPEC) as run:
        turn = run.model_call(**more)  # type: ignore[arg-type]  # parts of a call
        with turn:
            pytest.fail("sent")


def test_without_a_budget_prices_are_told_but_never_asked_for(scene: Scene) -> None:
    guard = scene.open(prices=FlatPrices())
    with guard.run(SPEC) as run:
        for model in ("m", "unknown"):
            with run.model_call(model=model) as turn:
                turn.record(input_tokens=5, output_tokens=10)
        assert run.counters.spend_nanos == 40


def test_the_budget_holds_under_a_hundred_threads(scene: Scene) -> None:
    guard = scene.open(budget(2_000), prices=FlatPrices())
    sent, most = [], 0
    open_now: list[int] = []
    lock = threading.Lock()
    gate = threading.Barrier(100)
    with stops("spend_cap"), guard.run(SPEC) as run:

        def work(number: int) -> None:
            nonlocal most
            gate.wait()
            try:
                with run.model_call(model="m", input_tokens_max=50, output_tokens_max=100) as turn:
                    with lock:
                        sent.append(number)
                        open_now.append(number)
                        most = max(most, len(open_now))
                    with lock:
                        open_now.remove(number)
                    turn.record(input_tokens=50, output_tokens=100)
            except es.RunHalted:
                pass

        with ThreadPoolExecutor(100) as pool:
            list(pool.map(work, range(100)))
    assert len(sent) == 5
    assert guard.show(run.run_id).counters.spend_nanos == 2_000


def test_the_budget_holds_under_a_hundred_tasks(scene: Scene) -> None:
    guard = scene.open(budget(2_000), prices=FlatPrices())
    sent = []

    async def main() -> None:
        async with guard.run(SPEC) as run:

            async def work(number: int) -> None:
                async with run.model_call(model="m", input_tokens_max=50, output_tokens_max=100) as turn:
                    sent.append(number)
                    await asyncio.sleep(0.001)
                    turn.record(input_tokens=10, output_tokens=10)

            await asyncio.gather(*(work(number) for number in range(100)), return_exceptions=True)

    with stops("spend_cap"):
        asyncio.run(main())
    assert len(sent) == 5


def test_more_calls_at_once_than_are_kept_track_of_are_refused_by_name(scene: Scene) -> None:
    guard = scene.open()
    with guard.run(SPEC) as run:
        turns = [run.model_call() for _ in range(TURNS_OPEN_MAX + 1)]
        for turn in turns[:-1]:
            turn.__enter__()
        with pytest.raises(es.UsageError, match="TURNS_OPEN_MAX"):
            turns[-1].__enter__()
        for turn in turns[:-1]:
            turn.record(input_tokens=1)
            turn.__exit__(None, None, None)
        assert run.counters.turns == TURNS_OPEN_MAX
        with run.model_call() as turn:
            turn.record(input_tokens=1)


def test_a_run_that_ends_during_a_model_call_halts_at_its_end(scene: Scene) -> None:
    guard = scene.open()
    with stops("operator_cancelled_loop"), guard.run(SPEC) as run:
        with pytest.raises(es.RunHalted), run.model_call() as turn:
            guard.stop(run.run_id)
            turn.record(input_tokens=4)
        assert guard.show(run.run_id).counters.input_tokens == 4


def test_a_model_call_is_entered_once(scene: Scene) -> None:
    with scene.open().run(SPEC) as run:
        turn = run.model_call()
        with turn:
            turn.record(input_tokens=1)
        with pytest.raises(es.UsageError, match="once"):
            turn.__enter__()


@pytest.mark.parametrize("more", [{"input_tokens_max": -1}, {"output_tokens_max": True}, {"output_tokens_max": 1.5}])
def test_bounds_are_whole_numbers(scene: Scene, more: dict[str, int]) -> None:
    with scene.open().run(SPEC) as run, pytest.raises(es.UsageError, match="whole number"):
        run.model_call(**more)


def test_the_wall_clock_stops_model_calls_as_well(scene: Scene) -> None:
    clock = StillClock()
    guard = scene.open(es.Policy(limits=es.Limits(wall_ms_max=500)), clock=clock)
    with stops("wall_clock_cap"), guard.run(SPEC) as run:
        clock.pass_ms(500)
        with run.model_call():
            pytest.fail("sent")


def test_retries_of_model_calls_share_the_runs_cap(scene: Scene) -> None:
    guard = scene.open(es.Policy(limits=es.Limits(retries_max=2, turns_max=50, wall_ms_max=600_000)))
    with stops("retry_cap"), guard.run(SPEC) as run:
        for _ in range(9):
            with run.model_call(is_retry=True) as turn:
                turn.record(input_tokens=1)
    assert guard.show(run.run_id).counters.retries == 2
