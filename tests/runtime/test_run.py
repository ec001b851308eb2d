"""One guarded call, from every side: keys, replays, failures, answers that cannot be kept, functions of all kinds."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import AsyncIterator, Callable, Iterator
from decimal import Decimal

import pytest

import endstop as es
from endstop.core.transitions import OperationState
from endstop.runtime.guard import Guard
from endstop.runtime.run import Run
from tests.runtime.scenes import READ, SPEC, WIDE, WRITE, Scene, counting, stops


def writing(scene: Scene, **more: object) -> Guard:
    return scene.open(es.Policy(limits=WIDE, tools={"save": WRITE, "look": READ}, **more))  # type: ignore[arg-type]  # tests


def states(guard: Guard) -> list[OperationState]:
    return [operation.state for operation in guard.operations()]


# -- A write that was committed


def test_a_committed_write_under_a_new_call_id_ends_the_run(scene: Scene) -> None:
    guard = writing(scene)
    save, saved = counting()
    with stops() as stopped, guard.run(SPEC) as run:
        run.call(save, {"key": "a"}, tool="save", call_id="c1")
        run.call(save, {"key": "a"}, tool="save", call_id="c2")
    assert len(saved) == 1
    envelope = stopped.value.envelope
    assert envelope.terminal_reason is es.Reason.ALREADY_COMMITTED
    assert envelope.blocked_call is not None
    assert envelope.blocked_call.tool == "save"
    assert envelope.blocked_call.args == (("key", "str[1]"),)
    assert [note.state for note in envelope.operations] == ["COMMITTED"]


VALUES = [
    None, False, 0, 0.0, "", [], {}, "text", "e\u0301 is not é", 10**30, -(2**63), 1.5, True,
    {"a": [1, 2.0, None, True, {"b": "ü"}]},
]  # fmt: skip


@pytest.mark.parametrize("value", VALUES, ids=repr)
def test_the_same_call_id_gets_the_same_answer_without_a_call(scene: Scene, value: object) -> None:
    guard = writing(scene)
    save, saved = counting(value)
    with guard.run(SPEC) as run:
        first = run.call(save, {"key": "a"}, tool="save", call_id="c1")
        again = run.call(save, {"key": "a"}, tool="save", call_id="c1")
        # An undeclared tool is known by its run and call id.
        once = run.call(save, {"x": 1}, tool="undeclared", call_id="c2")
        twice = run.call(save, {"x": 1}, tool="undeclared", call_id="c2")
    assert len(saved) == 2
    for answer in (first, again, once, twice):
        assert answer.value == value
        assert type(answer.value) is type(value)
    assert (first.replayed, again.replayed) == (False, True)
    assert first.operation_id == again.operation_id
    assert again.side_effect_committed is not False


def test_an_earlier_generation_and_another_run_are_answered_from_the_ledger(scene: Scene) -> None:
    guard = writing(scene)
    save, saved = counting({"version": 4})
    with guard.run(SPEC, run_id="r1") as run:
        run.call(save, {"key": "a"}, tool="save", call_id="c1")
    with guard.run(run_id="r1") as run:
        assert run.call(save, {"key": "a"}, tool="save", call_id="c9").value == {"version": 4}
    with guard.run(SPEC, run_id="r2") as run:
        assert run.call(save, {"key": "a"}, tool="save").replayed
    assert len(saved) == 1


def test_a_write_that_the_ledger_answered_once_in_this_generation_is_not_asked_for_again(scene: Scene) -> None:
    guard = writing(scene)
    save, saved = counting()
    with guard.run(SPEC) as run:
        run.call(save, {"key": "a"}, tool="save")
    with stops("already_committed"), guard.run(SPEC) as run:
        run.call(save, {"key": "a"}, tool="save")
        run.call(save, {"key": "a"}, tool="save")
    assert len(saved) == 1


def test_a_policy_may_answer_a_repeated_write_from_the_ledger(scene: Scene) -> None:
    tool = es.ToolPolicy(effect="write", idempotency_key="{key}", on_committed="replay")
    guard = scene.open(es.Policy(limits=WIDE, tools={"save": tool}))
    save, saved = counting(7)
    with guard.run(SPEC) as run:
        assert [run.call(save, {"key": "a"}, tool="save").value for _ in range(3)] == [7, 7, 7]
    assert len(saved) == 1


def test_keys_of_another_tenant_or_run_are_other_keys(scene: Scene) -> None:
    tools = {"save": WRITE, "note": es.ToolPolicy(effect="write", idempotency_key="{key}", scope="run")}
    guard = scene.open(es.Policy(limits=WIDE, tools=tools))
    save, saved = counting()
    for tenant in ("x", "y"):
        with guard.run(SPEC, labels={"tenant": tenant}) as run:
            run.call(save, {"key": "a"}, tool="save")
            run.call(save, {"key": "a"}, tool="note")
    assert len(saved) == 4
    # A worker that joins without labels has those of the run.
    with guard.run(SPEC, run_id="r1", labels={"tenant": "z"}) as run:
        run.call(save, {"key": "a"}, tool="save")
    with guard.run(run_id="r1") as run:
        assert run.call(save, {"key": "a"}, tool="save").replayed
    assert len(saved) == 5


def test_one_key_for_other_arguments_is_refused_and_nothing_is_sent(scene: Scene) -> None:
    guard = writing(scene)
    save, saved = counting()
    with guard.run(SPEC) as run:
        run.call(save, {"key": "a", "text": "one"}, tool="save")
        refused = run.call(save, {"key": "a", "text": "two"}, tool="save")
    assert len(saved) == 1
    assert refused.reason is es.Reason.KEY_MISMATCH
    assert refused.status is es.Status.POLICY_BLOCKED
    assert not refused.terminal


@pytest.mark.parametrize("args", [{}, {"key": ""}, {"key": None}, {"other": 1}], ids=repr)
def test_a_write_without_its_key_is_refused_and_the_fix_is_named(scene: Scene, args: dict[str, object]) -> None:
    guard = writing(scene)
    save, saved = counting()
    with guard.run(SPEC) as run:
        refused = run.call(save, args, tool="save")
    assert saved == []
    assert refused.reason is es.Reason.KEY_MISSING
    assert refused.message is not None
    assert "a value for key" in refused.message
    assert states(guard) == []


# -- A write that failed


def test_a_proof_that_nothing_happened_lets_the_same_call_run_again_as_a_retry(scene: Scene) -> None:
    guard = writing(scene)
    tries = []

    def save(key: str) -> str:
        tries.append(es.current().attempt)
        if len(tries) < 3:
            raise es.NotAppliedError("refused at the door" if len(tries) == 1 else "turned away, not at the door")
        return f"saved {key}"

    with guard.run(SPEC) as run:
        for call_id in ("c1", "c2"):
            with pytest.raises(es.NotAppliedError, match="at the door"):
                run.call(save, {"key": "a"}, call_id=call_id)
            assert states(guard) == [OperationState.FAILED_RETRYABLE]
        assert run.call(save, {"key": "a"}, call_id="c2").value == "saved a"
        assert run.counters.retries == 2
    assert tries == [1, 2, 3]
    assert states(guard) == [OperationState.COMMITTED]


def test_retries_of_a_write_have_their_cap(scene: Scene) -> None:
    limits = es.Limits(retries_max=2, same_call_max=9, error_streak_max=9, no_progress_max=9, wall_ms_max=600_000)
    tool = es.ToolPolicy(effect="write", idempotency_key="{key}", attempts_max=9)
    guard = scene.open(es.Policy(limits=limits, tools={"save": tool}))
    tries = []

    def save(key: str) -> str:
        tries.append(key)
        raise es.NotAppliedError("not yet")

    with stops() as stopped, guard.run(SPEC) as run:
        for number in range(9):
            with pytest.raises(es.NotAppliedError):
                run.call(save, {"key": "a"}, call_id=f"c{number}")
    assert stopped.value.envelope.terminal_reason is es.Reason.RETRY_CAP
    assert len(tries) == 3


@pytest.mark.parametrize(
    "error",
    [
        ConnectionResetError("reset"), BrokenPipeError("pipe"), OSError("disk"), EOFError("eof"), ValueError("parse"),
        RuntimeError("odd"), TimeoutError("late"), es.UsageError("misused"),
    ],
    ids=lambda error: type(error).__name__,
)  # fmt: skip
def test_any_other_exception_of_a_write_leaves_its_outcome_unknown(scene: Scene, error: Exception) -> None:
    guard = writing(scene)
    calls = []

    def save(key: str) -> str:
        calls.append(key)
        raise error

    with guard.run(SPEC) as run:
        with pytest.raises(es.OutcomeUnknownError) as raised:
            run.call(save, {"key": "a"}, call_id="c1")
        assert raised.value.__cause__ is error
        assert states(guard) == [OperationState.UNKNOWN]
        assert raised.value.operation_id == guard.operations()[0].operation_id
        # It blocks its key, under the same call id as under another.
        for call_id in ("c1",):
            refused = run.call(save, {"key": "a"}, call_id=call_id)
            assert refused.reason is es.Reason.OUTCOME_UNKNOWN
            assert refused.next_allowed_action == "human_review"
        run.call(counting()[0], {"key": "b"}, tool="look")
    assert calls == ["a"]
    # Without a probe nobody but a person can settle it.
    assert [operation.state for operation in guard.reconcile().in_doubt] == [OperationState.MANUAL]


def test_an_agent_that_insists_on_an_operation_in_doubt_is_stopped(scene: Scene) -> None:
    guard = writing(scene)

    def save(key: str) -> str:
        raise RuntimeError(key)

    with stops() as stopped, guard.run(SPEC) as run:
        with pytest.raises(es.OutcomeUnknownError):
            run.call(save, {"key": "a"})
        for _ in range(5):
            run.call(save, {"key": "a"})
    envelope = stopped.value.envelope
    assert envelope.terminal_reason is es.Reason.OUTCOME_UNKNOWN
    assert envelope.external_state == "in_doubt"
    assert envelope.in_doubt == (guard.operations()[0].operation_id,)
    assert envelope.next_allowed_action is es.NextAction.HUMAN_REVIEW


def test_a_permission_error_of_a_write_ends_the_run_and_leaves_it_in_doubt(scene: Scene) -> None:
    guard = writing(scene)

    def save(key: str) -> str:
        raise PermissionError(f"no right to save {key}")

    with stops() as stopped, guard.run(SPEC) as run:
        run.call(save, {"key": "planted-secret"})
    envelope = stopped.value.envelope
    assert envelope.terminal_reason is es.Reason.PERMISSION_DENIED
    assert len(envelope.in_doubt) == 1
    assert "planted-secret" not in str(envelope)


def test_a_reads_own_exception_comes_back_after_it_was_settled(scene: Scene) -> None:
    guard = writing(scene)

    def look(q: str) -> str:
        raise LookupError(q)

    with guard.run(SPEC) as run:
        with pytest.raises(LookupError, match="x"):
            run.call(look, {"q": "x"})
        assert run.counters.steps == 1
        assert guard.show(run.run_id).in_flight == ()


def test_three_equal_failures_of_a_tool_end_the_run_from_the_tools_own_exception(scene: Scene) -> None:
    guard = writing(scene)

    def look(q: int) -> str:
        raise LookupError("nothing there")

    with stops() as stopped, guard.run(SPEC) as run:
        for number in range(3):
            try:
                run.call(look, {"q": number})
            except LookupError:
                continue
    assert stopped.value.envelope.terminal_reason is es.Reason.ERROR_STREAK
    assert isinstance(stopped.value.__cause__, es.RunHalted)
    assert isinstance(stopped.value.__cause__.__cause__, LookupError)


def test_a_write_that_answers_with_its_failure_is_judged_by_what_it_says(scene: Scene) -> None:
    guard = writing(scene)
    answers: list[tuple[es.ToolResult[object], OperationState]] = [
        (es.ToolResult(status="retryable", side_effect_committed=True), OperationState.COMMITTED),
        (es.ToolResult(status="retryable", error_class="timeout"), OperationState.UNKNOWN),
        (es.ToolResult(status="retryable", error_class="outage"), OperationState.UNKNOWN),
        (es.ToolResult(status="retryable", error_class="rate_limit"), OperationState.FAILED_RETRYABLE),
        (es.ToolResult(status="retryable"), OperationState.FAILED_RETRYABLE),
        (es.ToolResult(error_class="outcome_unknown"), OperationState.UNKNOWN),
        (es.ToolResult(value=""), OperationState.COMMITTED),
    ]
    with guard.run(SPEC) as run:
        for number, (answer, _) in enumerate(answers):
            run.call(counting(answer)[0], {"key": f"a{number}"}, tool="save")
    assert states(guard) == [state for _, state in answers]


def test_a_write_that_owes_data_and_gives_none_has_failed_and_stays_committed(scene: Scene) -> None:
    tool = es.ToolPolicy(effect="write", idempotency_key="{key}", owes_data=True, result_schema='{"type":"object"}')
    guard = scene.open(es.Policy(limits=WIDE, tools={"save": tool}))
    with guard.run(SPEC) as run:
        blank = run.call(counting(" ")[0], {"key": "a"}, tool="save")
        broken = run.call(counting([1])[0], {"key": "b"}, tool="save")
    assert blank.side_effect_committed is broken.side_effect_committed is True
    assert blank.failed
    assert broken.error_class is es.ErrorClass.ANSWER_SCHEMA
    assert states(guard) == [OperationState.COMMITTED, OperationState.COMMITTED]


def test_a_write_that_completes_the_task_stands_as_committed_in_the_runs_end(scene: Scene) -> None:
    guard = writing(scene)
    with guard.run(SPEC) as run:
        run.call(counting(es.ToolResult(status="complete", value={"n": 1}))[0], {"key": "a"}, tool="save")
    record = guard.show(run.run_id)
    assert record.state is es.RunState.COMPLETE
    assert record.output == '{"n":1}'
    assert record.envelope is not None
    assert [note.state for note in record.envelope.operations] == ["COMMITTED"]
    assert record.envelope.in_doubt == ()
    assert record.envelope.external_state == "known"


# -- Answers that cannot be kept


class Unheard:
    """Not JSON, and no wish to become it."""


@pytest.mark.parametrize(
    "value",
    [Unheard(), b"bytes", {"deep": b"bytes"}, float("nan"), "\ud800", "x" * 70_000, {1: 2}],
    ids=lambda value: repr(value)[:20],
)
def test_an_answer_that_cannot_be_kept_is_given_once_and_never_asked_for_again(scene: Scene, value: object) -> None:
    guard = writing(scene)
    save, saved = counting(value)
    with guard.run(SPEC) as run:
        assert run.call(save, {"key": "a"}, tool="save", call_id="c1").value is value
        again = run.call(save, {"key": "a"}, tool="save", call_id="c1")
    assert len(saved) == 1
    assert again.value is None
    assert again.side_effect_committed is True
    assert again.message is not None
    assert "could not be kept" in again.message
    assert guard.operations()[0].result_kind == "applied_without_result"
    assert states(guard) == [OperationState.COMMITTED]


def test_an_answer_of_a_known_type_is_replayed_in_its_json_form(scene: Scene) -> None:
    guard = writing(scene)
    with guard.run(SPEC) as run:
        run.call(counting(Decimal("1.20"))[0], {"key": "a"}, tool="save", call_id="c1")
        again = run.call(counting()[0], {"key": "a"}, tool="save", call_id="c1")
    assert again.value == {"$endstop": "decimal", "text": "1.20"}


# -- Functions of all kinds


async def looks(q: int) -> int:
    return q


def looks_later(q: int) -> object:
    return looks(q)


class Looker:
    def __call__(self, q: int) -> int:
        return q

    def look(self, q: int) -> int:
        return q


class AsyncLooker:
    async def __call__(self, q: int) -> int:
        return q


KINDS: list[Callable[..., object]] = [
    lambda q: q, Looker(), Looker().look, functools.partial(Looker(), q=3), looks, functools.partial(looks),
    AsyncLooker(), looks_later, int,
]  # fmt: skip


@pytest.mark.parametrize("function", KINDS, ids=lambda function: getattr(function, "__name__", type(function).__name__))
def test_acall_takes_every_kind_of_function(scene: Scene, function: Callable[..., object]) -> None:
    guard = scene.open()
    args = {} if function is int else {"q": 3}

    async def main() -> object:
        async with guard.run(SPEC) as run:
            return (await run.acall(function, args, tool="t")).value

    assert asyncio.run(main()) == (0 if function is int else 3)


@pytest.mark.parametrize("function", [looks, functools.partial(looks), AsyncLooker()])
def test_call_refuses_an_async_function_before_anything_happens(scene: Scene, function: Callable[..., object]) -> None:
    guard = writing(scene)
    with guard.run(SPEC) as run:
        with pytest.raises(es.UsageError, match="acall"):
            run.call(function, {"q": 1}, tool="look")
        assert run.counters.steps == 0


def test_an_awaitable_that_a_sync_call_did_not_expect_is_never_kept_as_an_answer(scene: Scene) -> None:
    guard = writing(scene)
    with guard.run(SPEC) as run, pytest.raises(es.UsageError, match="acall"):
        run.call(looks_later, {"q": 1}, tool="look")


def yields(q: int) -> Iterator[int]:
    yield q


async def yields_later(q: int) -> AsyncIterator[int]:
    yield q


@pytest.mark.parametrize("function", [yields, yields_later, functools.partial(yields)])
def test_a_generator_is_no_tool(scene: Scene, function: Callable[..., object]) -> None:
    guard = scene.open()
    with guard.run(SPEC) as run:
        with pytest.raises(es.UsageError, match="generator"):
            run.call(function, {"q": 1})
        assert run.counters.steps == 0


@pytest.mark.parametrize("args", [{}, {"key": "a", "more": 1}, {"KEY": "a"}, '{"key": ', "[1]"], ids=repr)
def test_arguments_that_do_not_fit_are_a_malformed_call_and_no_effect_in_doubt(scene: Scene, args: object) -> None:
    guard = scene.open(es.Policy(limits=WIDE, tools={"save": es.ToolPolicy(effect="write", idempotency_key="{key}")}))
    saved = []

    def save(key: str) -> None:
        saved.append(key)

    with guard.run(SPEC) as run:
        result = run.call(save, args)  # type: ignore[arg-type]  # whatever a model may write
        assert (result.status, result.reason) == (es.Status.RETRYABLE, es.Reason.MALFORMED_CALL)
        assert result.error_class is es.ErrorClass.SCHEMA
    assert saved == []
    assert states(guard) == []


def test_a_declared_tool_of_a_run_binds_its_arguments_by_name(scene: Scene) -> None:
    guard = scene.open()
    with guard.run(SPEC) as run:

        @run.tool(effect="write", idempotency_key="{key}", on_committed="replay")
        def save(key: str, text: str = "none", **more: int) -> str:
            """Keeps a text."""
            return f"{key}:{text}:{sorted(more.items())}"

        assert save.__doc__ == "Keeps a text."
        assert save("a").value == "a:none:[]"
        assert save(key="a", text="none").replayed
        assert save("b", "x", n=1).value == "b:x:[('n', 1)]"


def test_an_unknown_change_is_the_callers_mistake(scene: Scene) -> None:
    with scene.open().run(SPEC) as run, pytest.raises(es.UsageError, match="unknown change"):
        run.call(counting()[0], {}, change="trying harder")


def test_a_retry_needs_its_wait_or_a_named_change(scene: Scene) -> None:
    guard = scene.open(es.Policy(limits=WIDE, tools={"look": READ}))
    answer: es.ToolResult[object] = es.ToolResult(status="retryable", retry_after_ms=600_000)
    look, looked = counting(answer)
    with guard.run(SPEC) as run:
        run.call(look, {"q": 1}, tool="look")
        told = run.call(look, {"q": 1}, tool="look")
        assert told.reason is es.Reason.NOT_BEFORE
        assert told.retry_after_ms is not None
        assert 0 < told.retry_after_ms <= 600_000
        run.call(look, {"q": 1}, tool="look", change="authorisation")
        assert run.counters.retries == 1
    assert len(looked) == 2


def test_a_twin_in_one_message_shares_the_first_answer(scene: Scene) -> None:
    guard = scene.open(es.Policy(limits=WIDE, tools={"look": READ}))
    look, looked = counting(lambda number: {"n": number})
    with guard.run(SPEC) as run:
        first = run.call(look, {"q": 1}, tool="look", call_id="c1", round_id="m1")
        second = run.call(look, {"q": 1}, tool="look", call_id="c2", round_id="m1")
    assert len(looked) == 1
    assert (first.value, second.value) == ({"n": 1}, {"n": 1})
    assert (first.replayed, second.replayed) == (False, True)


def test_a_tool_knows_the_call_that_it_is_in(scene: Scene) -> None:
    guard = writing(scene)
    seen: list[es.CallContext] = []

    def save(key: str) -> None:
        seen.append(es.current())

    async def look(q: int) -> None:
        await asyncio.sleep(0)
        seen.append(es.current())

    async def main(run: Run) -> None:
        await run.acall(look, {"q": 1}, call_id="c2")
        await run.acall(save, {"key": "b"}, call_id="c3")

    with guard.run(SPEC, run_id="r1") as run:
        run.call(save, {"key": "a"}, call_id="c1")
        asyncio.run(main(run))
    operation = guard.operations()[0]
    assert [context.call_id for context in seen] == ["c1", "c2", "c3"]
    assert {context.run_id for context in seen} == {"r1"}
    assert (seen[0].operation_id, seen[0].attempt) == (operation.operation_id, 1)
    assert seen[0].idempotency_key == operation.key_digest
    assert seen[0].deadline_us is not None
    assert (seen[1].operation_id, seen[1].idempotency_key) == (None, None)
    assert not any(context.cancelled for context in seen)
    with pytest.raises(es.UsageError, match="outside a guarded call"):
        es.current()


def test_children_share_what_the_run_has_used_and_its_end(scene: Scene) -> None:
    guard = scene.open(es.Policy(limits=es.Limits(steps_max=3, wall_ms_max=600_000)))
    tool, calls = counting(lambda number: number)
    with stops("step_cap"), guard.run(SPEC) as run:
        child = run.child(agent="a")
        grandchild = child.child(agent="b")
        for number, agent in enumerate((run, child, grandchild, child)):
            agent.call(tool, {"n": number}, tool="t")
    assert len(calls) == 3
    assert guard.show(grandchild.run_id).counters == guard.show(run.run_id).counters
    with pytest.raises(es.RunHalted):
        child.child(agent="c")


def test_depth_and_handoffs_have_their_caps(scene: Scene) -> None:
    limits = es.Limits(depth_max=2, handoffs_max=2, wall_ms_max=600_000)
    guard = scene.open(es.Policy(limits=limits))
    with stops("depth_cap"), guard.run(SPEC) as run:
        run.child(agent="a").child(agent="b").child(agent="c")
    with stops("handoff_cap"), guard.run(SPEC) as run:
        run.handoff("a").handoff("b").handoff("c")
    assert guard.show(run.run_id).counters.handoffs == 2


def test_two_agents_that_hand_over_to_each_other_are_a_cycle(scene: Scene) -> None:
    guard = scene.open(es.Policy(limits=WIDE))
    with stops("short_cycle"), guard.run(SPEC, agent="a") as run:
        agent = run
        for _ in range(4):
            agent = agent.handoff("b").handoff("a")
    assert guard.show(run.run_id).counters.handoffs == 3


def test_an_output_is_text_or_json_and_within_bounds(scene: Scene) -> None:
    guard = scene.open()
    for output, kept in (("ü \ud800", "ü ?"), ({"b": 1, "a": [True]}, '{"a":[true],"b":1}'), (None, None), ("", "")):
        with guard.run(SPEC) as run:
            run.complete(output=output)
        assert guard.show(run.run_id).output == kept
    with guard.run(SPEC) as run:
        for output in (Unheard(), "x" * (4 * 1024 * 1024 + 1)):
            with pytest.raises(es.UsageError, match="an output is"):
                run.complete(output=output)
        with pytest.raises(es.UsageError, match="checkpoint"):
            run.checkpoint("x" * 70_000)
        with pytest.raises(es.NotCanonicalError):
            run.checkpoint(Unheard())
    assert guard.show(run.run_id).state is es.RunState.RUNNING


def test_a_host_ends_a_run_for_reasons_of_its_own(scene: Scene) -> None:
    guard = scene.open()
    with stops() as stopped, guard.run(SPEC) as run:
        run.end("framework_cap", "ten turns", guard="max_iterations")
        run.call(counting()[0], {})
    assert stopped.value.envelope.terminal_reason is es.Reason.FRAMEWORK_CAP
    assert (stopped.value.envelope.guard, stopped.value.envelope.message) == ("max_iterations", "ten turns")
    with guard.run(SPEC) as run:
        for reason in ("crashed", "frozen"):
            with pytest.raises(es.UsageError):
                run.end(reason)


def test_the_words_of_an_end_are_bounded(scene: Scene) -> None:
    guard = scene.open()
    with stops() as stopped, guard.run(SPEC) as run:
        guard.stop(run.run_id, reason="x" * 100_000)
    assert len(stopped.value.envelope.message) == 2_000
