"""The agent loop on both stores: it ends, it says how, and nothing is sent or called outside the guard."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import endstop as es
from endstop.errors import StoreUnavailableError
from endstop.loop.agent import CONTINUE, LoopEvent, system_prompt
from endstop.loop.conversation import UserText
from endstop.runtime.guard import Guard
from tests.loop.scenes import SPEC, WIDE, Model, answers_of, assert_every_call_is_answered_once, calls, says, told

WRITE = es.ToolPolicy(effect="write", idempotency_key="{contact_id}:{version}")


@pytest.fixture(params=["memory", "sqlite"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return "memory:" if request.param == "memory" else f"sqlite:///{tmp_path}/state.db"


@pytest.fixture
def guard(url: str) -> Iterator[Guard]:
    with es.open(url, policy=es.Policy(limits=WIDE)) as guard:
        yield guard


def looping(url: str, **more: Any) -> Guard:
    return es.open(url, policy=es.Policy(**{"limits": WIDE, **more}))


def search(q: str) -> list[str]:
    """Look something up."""
    return [f"found {q}"]


# -- How it ends


def test_it_stops_at_end_turn_with_the_models_words_as_output(guard: Guard) -> None:
    model = Model(calls(("search", {"q": "x"})), says("All is tidy."))
    result = es.AgentLoop(guard, model=model, tools=[search], system="Be brief.").run("Tidy up", SPEC)
    assert result.success
    assert (result.output, result.terminal_reason) == ("All is tidy.", es.Reason.COMPLETE)
    assert result.turns == 2
    assert guard.show(result.run_id).output == "All is tidy."
    assert guard.show(result.run_id).state is es.RunState.COMPLETE
    assert result.envelope is not None
    assert result.envelope.terminal_reason is es.Reason.COMPLETE
    first = model.asked[0]
    for words in (SPEC.what_it_does, SPEC.what_it_does_not, SPEC.done_looks_like, "Be brief."):
        assert words in first.system
    assert first.items == (UserText(text="Tidy up"),)
    assert first.tools == ("search",)
    operation_id = guard.operations()[0].operation_id
    assert told(result) == [{"status": "progress", "value": ["found x"], "operation_id": operation_id}]
    assert_every_call_is_answered_once(result)


def test_a_tool_that_completes_the_task_ends_the_loop_with_its_value(guard: Guard) -> None:
    def finish(grade: int) -> es.ToolResult[dict[str, int]]:
        return es.ToolResult(status="complete", value={"grade": grade})

    model = Model(calls(("finish", {"grade": 1})), says("not asked any more"))
    result = es.AgentLoop(guard, model=model, tools=[finish]).run("t", SPEC)
    assert result.success
    assert result.output == '{"grade":1}'
    assert len(model.asked) == 1
    assert_every_call_is_answered_once(result)


def test_a_turn_that_neither_ends_nor_calls_is_answered_with_continue(guard: Guard) -> None:
    model = Model(says("part one", stop_reason="max_tokens"), says("part two", stop_reason="other"), says("end"))
    result = es.AgentLoop(guard, model=model).run("t", SPEC)
    assert result.success
    assert result.output == "end"
    assert [item.text for item in model.asked[2].items if isinstance(item, UserText)] == ["t", CONTINUE, CONTINUE]


def test_three_equal_replies_without_an_end_are_no_progress(guard: Guard) -> None:
    for text in ("", "I am thinking."):
        model = Model(says(text, stop_reason="other"))
        result = es.AgentLoop(guard, model=model).run("t", SPEC)
        assert not result.success
        assert result.terminal_reason is es.Reason.NO_PROGRESS
        assert result.output is None
        assert len(model.asked) == 3


def test_an_empty_end_takes_the_last_words_before_it(guard: Guard) -> None:
    model = Model(says("Here it is.", stop_reason="max_tokens"), says(""), says("never asked"))
    result = es.AgentLoop(guard, model=model).run("t", SPEC)
    assert (result.success, result.output) == (True, "Here it is.")
    assert len(model.asked) == 2
    assert es.AgentLoop(guard, model=Model(says(""))).run("t", SPEC).output == ""


def test_a_refusal_of_the_model_is_no_success(guard: Guard) -> None:
    result = es.AgentLoop(guard, model=Model(says("I will not.", stop_reason="refusal"))).run("t", SPEC)
    assert not result.success
    assert result.terminal_reason is es.Reason.POLICY_BLOCKED


def test_the_turn_ceiling_ends_a_loop_that_never_ends(url: str) -> None:
    numbers = itertools.count()
    with looping(url, limits=es.Limits(turns_max=4, wall_ms_max=600_000)) as guard:

        def count() -> int:
            return next(numbers)

        model = Model(calls(("count", {})))
        result = es.AgentLoop(guard, model=model, tools=[count]).run("t", SPEC)
    assert not result.success
    assert result.terminal_reason is es.Reason.TURN_CEILING
    assert result.turns == len(model.asked) == 4
    assert_every_call_is_answered_once(result)


def test_the_output_cap_is_a_known_bound_of_the_token_ceiling(url: str) -> None:
    limits = es.Limits(tokens_max=1_000, turns_max=50, wall_ms_max=600_000)
    with looping(url, limits=limits) as guard:
        usage = {"input_tokens": 300, "output_tokens": 100}
        model = Model(calls(("search", {"q": "a"}), usage=usage), calls(("search", {"q": "b"}), usage=usage), says("x"))
        result = es.AgentLoop(guard, model=model, tools=[search], max_output_tokens=201).run("t", SPEC)
    assert result.terminal_reason is es.Reason.TOKEN_CEILING
    assert (len(model.asked), result.total_tokens) == (2, 800)
    assert model.asked[0].output_tokens_max == 201


def test_usage_that_a_model_does_not_report_is_charged_its_bound(guard: Guard) -> None:
    result = es.AgentLoop(guard, model=Model(says("x")), max_output_tokens=77).run("a task of some words", SPEC)
    assert result.counters.output_tokens == 77
    assert result.counters.input_tokens > len(system_prompt(SPEC))


def test_an_answer_that_nothing_capped_is_charged_its_own_size(guard: Guard) -> None:
    result = es.AgentLoop(guard, model=Model(says("x" * 1_000))).run("t", SPEC)
    assert 1_000 < result.counters.output_tokens < 1_200


def test_two_calls_in_turn_are_named_as_a_cycle_under_the_default_limits(url: str) -> None:
    """A script without usage is charged bounds, which must not end the run before the guard sees the loop."""
    with es.open(url) as guard:
        a, b = calls(("search", {"q": "a"})), calls(("search", {"q": "b"}))
        result = es.AgentLoop(guard, model=Model(a, b, a, b, a), tools=[search]).run("t", SPEC)
    assert result.terminal_reason is es.Reason.SHORT_CYCLE
    assert result.turns == 4


def test_with_a_budget_a_model_without_a_price_is_not_asked(url: str) -> None:
    class Unpriced:
        def price_nanos(self, model: str, usage: es.Usage) -> int | None:
            return None

        def worst_case_nanos(self, model: str, input_max: int | None, output_max: int | None) -> int | None:
            return None

    limits = es.Limits(spend_nanos_max=10**9, wall_ms_max=600_000)
    with es.open(url, policy=es.Policy(limits=limits), prices=Unpriced()) as guard:
        model = Model(says("x"))
        result = es.AgentLoop(guard, model=model).run("t", SPEC)
    assert result.terminal_reason is es.Reason.BUDGET_UNPRICED
    assert model.asked == []
    assert result.conversation == (UserText(text="t"),)


def test_a_stop_from_outside_while_the_model_thinks_ends_the_loop(guard: Guard) -> None:
    model = Model(says("x", delay_ms=30_000), before=lambda number: guard.stop("r1", reason="enough"))
    result = es.AgentLoop(guard, model=model).run("t", SPEC, run_id="r1")
    assert not result.success
    assert result.terminal_reason is es.Reason.OPERATOR_CANCELLED_LOOP
    assert result.envelope is not None
    assert result.envelope.message == "enough"


def test_a_loop_on_a_run_that_has_ended_raises(guard: Guard) -> None:
    loop = es.AgentLoop(guard, model=Model(says("x")))
    loop.run("t", SPEC, run_id="r1")
    with pytest.raises(es.RunStopped):
        loop.run("t", SPEC, run_id="r1")
    with pytest.raises(es.SpecInvalidError):
        loop.run("t")


def test_a_stored_spec_is_enough(guard: Guard) -> None:
    run_id = guard.save_spec(SPEC)
    model = Model(says("x"))
    assert es.AgentLoop(guard, model=model).run("t", run_id=run_id).success
    assert SPEC.done_looks_like in model.asked[0].system


# -- Providers


@pytest.fixture
def no_waiting(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Back-offs are noted, not waited out."""
    waits: list[int] = []

    async def noted(world: object, wait_ms: int, run_id: str) -> None:
        waits.append(wait_ms)

    monkeypatch.setattr("endstop.loop.turns.sleep_watched", noted)
    return waits


def fault(name: str, **more: object) -> dict[str, object]:
    return {"fault": {"class": name, **more}}


@pytest.mark.parametrize("name", ["rate_limit", "outage", "timeout"])
def test_a_passing_fault_is_waited_out_as_a_guarded_retry(url: str, name: str, no_waiting: list[int]) -> None:
    with looping(url, limits=es.Limits(turns_max=9, wall_ms_max=600_000)) as guard:
        result = es.AgentLoop(guard, model=Model(fault(name), fault(name), says("x"))).run("t", SPEC)
    assert result.success
    assert (result.turns, result.counters.retries) == (3, 2)
    assert no_waiting == [500, 1_000]


def test_the_provider_says_how_long_to_wait(guard: Guard, no_waiting: list[int]) -> None:
    result = es.AgentLoop(guard, model=Model(fault("rate_limit", retry_after_ms=7), says("x"))).run("t", SPEC)
    assert result.success
    assert no_waiting == [7]


@pytest.mark.parametrize("name", ["auth", "invalid_request", "other"])
def test_a_fault_that_no_wait_helps_ends_the_run_at_once(guard: Guard, name: str, no_waiting: list[int]) -> None:
    model = Model(fault(name), says("x"))
    result = es.AgentLoop(guard, model=model).run("t", SPEC)
    assert not result.success
    assert result.terminal_reason is es.Reason.PROVIDER_FAULT
    assert result.envelope is not None
    assert result.envelope.guard == name
    assert no_waiting == []
    assert len(model.asked) == 1


def test_a_provider_that_stays_down_is_not_asked_for_ever(url: str, no_waiting: list[int]) -> None:
    for more, asked in (({"retries_max": 3, "turns_max": 99}, 4), ({"retries_max": 99, "turns_max": 3}, 3)):
        for trip in (("stop",), ("observe",)):
            policy = es.Policy(limits=es.Limits(**more, wall_ms_max=600_000), on_trip=trip)
            with es.open("memory:" if url == "memory:" else f"{url}-{asked}-{trip[0]}", policy=policy) as guard:
                model = Model(fault("outage"))
                result = es.AgentLoop(guard, model=model).run("t", SPEC)
            assert result.terminal_reason is es.Reason.PROVIDER_FAULT
            assert len(model.asked) == asked


def test_a_wait_beyond_the_runs_time_is_not_begun(url: str, no_waiting: list[int]) -> None:
    with looping(url, limits=es.Limits(wall_ms_max=60_000)) as guard:
        result = es.AgentLoop(guard, model=Model(fault("rate_limit", retry_after_ms=60_001))).run("t", SPEC)
    assert result.terminal_reason is es.Reason.PROVIDER_FAULT
    assert no_waiting == []


def test_a_model_that_answers_too_late_ends_by_the_wall_clock(url: str) -> None:
    with looping(url, limits=es.Limits(wall_ms_max=200)) as guard:
        model = Model(says("x", delay_ms=30_000))
        result = es.AgentLoop(guard, model=model).run("t", SPEC)
    assert result.terminal_reason is es.Reason.WALL_CLOCK_CAP
    assert len(model.asked) == 1
    assert result.counters.retries == 0


def test_a_stop_ends_the_wait_for_a_provider(guard: Guard) -> None:
    events: list[LoopEvent] = []

    def observe(event: LoopEvent) -> None:
        events.append(event)
        if event.kind == "wait":
            guard.stop("r1")

    loop = es.AgentLoop(guard, model=Model(fault("outage", retry_after_ms=60_000)), observer=observe)
    result = loop.run("t", SPEC, run_id="r1")
    assert result.terminal_reason is es.Reason.OPERATOR_CANCELLED_LOOP
    assert [event.kind for event in events] == ["turn", "fault", "wait", "stop"]


def test_a_frozen_run_is_left_as_it_is_when_only_a_retry_would_be_left(guard: Guard, no_waiting: list[int]) -> None:
    model = Model(fault("outage"), says("x"), before=lambda number: guard.freeze("r1"))
    result = es.AgentLoop(guard, model=model).run("t", SPEC, run_id="r1")
    assert not result.success
    assert (result.terminal_reason, result.envelope) == (es.Reason.FROZEN, None)
    assert guard.show("r1").state is es.RunState.FROZEN
    guard.unfreeze("r1")
    assert es.AgentLoop(guard, model=Model(says("x"))).run("t", SPEC, run_id="r1").success


class Deaf:
    """A store that stops answering at a given step."""

    def __init__(self, store: Any, step: str, times: int) -> None:
        self._store, self._step, self._left = store, step, times

    def __getattr__(self, name: str) -> Any:
        real = getattr(self._store, name)
        if not name.startswith("transact"):
            return real

        def transact(step: object, *more: object) -> object:
            if self._left and type(step).__name__ in self._step.split("+"):
                self._left -= 1
                raise StoreUnavailableError("the disk is gone")
            return real(step, *more)

        return transact


@pytest.mark.parametrize(("step", "ran"), [("ReserveCall", 0), ("ReserveTurn", 0)])
def test_without_the_ledger_no_tool_and_no_model_is_called(guard: Guard, step: str, ran: int) -> None:
    tried = []
    guard._store = guard.world.store = Deaf(guard.store, step, 1)  # type: ignore[assignment]  # it stands in

    def save(n: int) -> None:
        tried.append(n)

    model = Model(calls(("save", {"n": 1}), ("save", {"n": 2})), says("x"))
    result = es.AgentLoop(guard, model=model, tools=[save], parallel_tools_max=1).run("t", SPEC)
    assert not result.success
    assert result.terminal_reason is es.Reason.LEDGER_UNAVAILABLE
    assert len(model.asked) == (1 if step == "ReserveCall" else 0)
    assert_every_call_is_answered_once(result)
    # The ledger answered again by the end, so the end is in it.
    record = guard.show(result.run_id)
    assert record.envelope is not None
    assert record.envelope.terminal_reason is es.Reason.LEDGER_UNAVAILABLE
    if step == "ReserveCall":
        assert 1 not in tried


def test_a_ledger_that_stays_away_is_told_in_the_result_alone(guard: Guard) -> None:
    steps = "ReserveCall+EndRun+LeaveRun+LoseCall+SettleTurn+CompleteRun"
    guard._store = guard.world.store = Deaf(guard.store, steps, 99)  # type: ignore[assignment]  # it stands in
    ran = []

    def save(n: int) -> None:
        ran.append(n)

    result = es.AgentLoop(guard, model=Model(calls(("save", {"n": 1}))), tools=[save]).run("t", SPEC)
    assert not result.success
    assert result.terminal_reason is es.Reason.LEDGER_UNAVAILABLE
    assert result.envelope is not None
    assert "disk" in result.envelope.message
    assert ran == []


# -- Where it runs


def test_it_works_inside_a_running_event_loop(guard: Guard) -> None:
    async def main() -> tuple[es.LoopResult, es.LoopResult]:
        loop = es.AgentLoop(guard, model=Model(calls(("search", {"q": "x"})), says("x")), tools=[search])
        return loop.run("t", SPEC), await loop.arun("t", SPEC)

    here, there = asyncio.run(main())
    assert here.success
    assert there.success
    assert here.run_id != there.run_id


def test_one_loop_works_on_several_tasks_at_once(guard: Guard) -> None:
    loop = es.AgentLoop(guard, model=Model(calls(("search", {"q": "x"})), says("x", delay_ms=5)), tools=[search])

    async def main() -> list[es.LoopResult]:
        return await asyncio.gather(*(loop.arun(f"task {number}", SPEC) for number in range(10)))

    assert all(result.success for result in asyncio.run(main()))


def test_a_cancelled_loop_is_cancelled_and_leaves_its_run(guard: Guard) -> None:
    async def main() -> None:
        loop = es.AgentLoop(guard, model=Model(says("x", delay_ms=30_000)))
        task = asyncio.create_task(loop.arun("t", SPEC, run_id="r1"))
        while guard.store.run("r1").result() is None:
            await asyncio.sleep(0.005)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(main())
    assert guard.show("r1").owners == ()
    assert guard.show("r1").state is es.RunState.RUNNING


def test_text_is_streamed_when_asked_for(guard: Guard) -> None:
    events: list[LoopEvent] = []
    es.AgentLoop(guard, model=Model(says("Hello.")), observer=events.append, stream=True).run("t", SPEC)
    assert [event.text for event in events if event.kind == "text"] == ["Hello."]
    events.clear()
    es.AgentLoop(guard, model=Model(says("Hello.")), observer=events.append).run("t", SPEC)
    assert [event for event in events if event.kind == "text"] == []


# -- The incidents of the field, durably


def fields(url: str, *turns: dict[str, object], tools: list[Any]) -> tuple[es.LoopResult, Model]:
    model = Model(*turns)
    with looping(url) as guard:
        result = es.AgentLoop(guard, model=model, tools=tools).run("t", SPEC)
        # What the result says is what the record says.
        record = guard.show(result.run_id)
        assert record.envelope is not None
        assert record.envelope.terminal_reason is result.terminal_reason
        assert result.success is (record.state is es.RunState.COMPLETE)
    assert_every_call_is_answered_once(result)
    return result, model


def test_the_same_call_is_stopped_before_its_third_execution(url: str) -> None:
    ran = []

    @es.tool(effect="read")
    def look(q: str) -> list[str]:
        ran.append(q)
        return []

    result, _ = fields(url, calls(("look", {"q": "refund"})), tools=[look])
    assert (len(ran), result.terminal_reason) == (2, es.Reason.SAME_CALL_REPEAT)


def test_two_calls_in_turn_are_stopped_at_the_fourth(url: str) -> None:
    ran = []

    @es.tool(effect="read")
    def look(q: str) -> str:
        ran.append(q)
        return f"answer {q}"

    a, b = calls(("look", {"q": "a"})), calls(("look", {"q": "b"}))
    result, _ = fields(url, a, b, a, b, a, b, tools=[look])
    assert (ran, result.terminal_reason) == (["a", "b", "a"], es.Reason.SHORT_CYCLE)


def test_three_calls_in_turn_are_stopped_at_the_seventh(url: str) -> None:
    ran = []

    @es.tool(effect="read")
    def look(q: str) -> str:
        ran.append(q)
        return f"answer {q}"

    lap = [calls(("look", {"q": name})) for name in "abc"]
    result, _ = fields(url, *lap, *lap, *lap, tools=[look])
    assert ("".join(ran), result.terminal_reason) == ("abcabc", es.Reason.SHORT_CYCLE)


def test_polling_whose_cursor_moves_goes_on_until_the_task_is_done(url: str) -> None:
    cursor = itertools.count(1)

    @es.tool(effect="read", progress="cursor")
    def next_page() -> es.ToolResult[dict[str, object]]:
        place = next(cursor)
        status = "complete" if place == 40 else "progress"
        return es.ToolResult(status=status, value={"text": "batch imported", "cursor": place})

    result, model = fields(url, calls(("next_page", {})), tools=[next_page])
    assert result.success
    assert len(model.asked) == 40


def test_a_denied_permission_is_not_tried_again(url: str) -> None:
    ran = []

    def send(to: str) -> None:
        ran.append(to)
        raise PermissionError("no right to send")

    result, model = fields(url, calls(("send", {"to": "a"})), tools=[send])
    assert (len(ran), len(model.asked)) == (1, 1)
    assert result.terminal_reason is es.Reason.PERMISSION_DENIED


def test_an_empty_string_is_an_explicit_failure(url: str) -> None:
    @es.tool(effect="read")
    def look(q: str) -> str:
        return ""

    turns = [calls(("look", {"q": f"wording {number}"})) for number in range(9)]
    result, _ = fields(url, *turns, tools=[look])
    assert result.terminal_reason is es.Reason.ERROR_STREAK
    assert told(result)[0]["error_class"] == "empty_answer"
    assert answers_of(result)[0].failed


@pytest.mark.parametrize("ids", [(), ("call_0",)], ids=["new ids", "one id for ever"])
def test_a_committed_write_is_made_once_whatever_ids_the_model_writes(url: str, ids: tuple[str, ...]) -> None:
    written = []

    @es.tool(effect="write", idempotency_key="{contact_id}:{version}")
    def update(contact_id: str, version: int) -> str:
        written.append(contact_id)
        return "updated"

    turn = calls(("update", {"contact_id": "C-7", "version": 3}), ids=ids)
    result, model = fields(url, *[turn] * 5, tools=[update])
    assert written == ["C-7"]
    assert result.terminal_reason is es.Reason.ALREADY_COMMITTED
    assert len(model.asked) == 2


def test_an_undeclared_tool_is_called_again_though_the_model_repeats_its_id(url: str) -> None:
    """It is another call: what the tool answers now, not what it answered then."""
    numbers = itertools.count(1)

    def status() -> str:
        return f"run {next(numbers)} of the nightly import is at work on its batch"

    turn = calls(("status", {}), ids=("call_0",))
    result, _ = fields(url, turn, turn, says("x"), tools=[status])
    assert [str(answer["value"])[:5] for answer in told(result)] == ["run 1", "run 2"]


def test_a_resumed_run_knows_its_progress_version(url: str) -> None:
    looked = []

    @es.tool(effect="read", progress="version")
    def look(n: int) -> dict[str, int]:
        looked.append(n)
        return {"version": 41}

    turns = [calls(("look", {"n": number})) for number in range(9)]
    with looping(url) as guard:
        first = es.AgentLoop(guard, model=Model(*turns), tools=[look]).run("t", SPEC, run_id="r1")
        assert (len(looked), first.terminal_reason) == (4, es.Reason.NO_PROGRESS)
        guard.resume("r1", change="strategy", reason="another way")
        looked.clear()
        # The same version is no progress: three looks, not four.
        second = es.AgentLoop(guard, model=Model(*turns), tools=[look]).run("t", SPEC, run_id="r1")
        assert (len(looked), second.terminal_reason) == (3, es.Reason.NO_PROGRESS)
    assert second.turns == 7


def test_a_run_that_waits_for_a_person_is_no_success_and_goes_on_after_the_resume(url: str) -> None:
    def approve(n: int) -> es.ToolResult[str]:
        return es.ToolResult(status="human_required", message="sign here")

    with looping(url) as guard:
        loop = es.AgentLoop(guard, model=Model(calls(("approve", {"n": 1}))), tools=[approve])
        result = loop.run("t", SPEC, run_id="r1")
        assert not result.success
        assert result.terminal_reason is es.Reason.HUMAN_REQUIRED
        guard.resume("r1", change="authorisation", reason="signed")
        assert es.AgentLoop(guard, model=Model(says("x"))).run("t", SPEC, run_id="r1").success


def test_a_write_that_completed_another_run_completes_this_one_from_the_ledger(url: str) -> None:
    written = []

    @es.tool(effect="write", idempotency_key="{n}")
    def publish(n: int) -> es.ToolResult[str]:
        written.append(n)
        return es.ToolResult(status="complete", value="published")

    with looping(url) as guard:
        for _ in range(2):
            result = es.AgentLoop(guard, model=Model(calls(("publish", {"n": 1}))), tools=[publish]).run("t", SPEC)
            assert (result.success, result.output) == (True, "published")
            assert guard.show(result.run_id).state is es.RunState.COMPLETE
    assert written == [1]


def test_parallel_tools_is_a_number_of_at_least_one(guard: Guard) -> None:
    with pytest.raises(es.UsageError, match="parallel_tools_max"):
        es.AgentLoop(guard, model=Model(says("x")), parallel_tools_max=0)
