"""kill -9 in mid-call, in a real process on a real file: nothing is sent twice, and what was used is not forgotten."""

from __future__ import annotations

import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

import endstop as es
from endstop.core.propose import propose
from endstop.core.steps import ReserveCall
from endstop.core.steps_life import EndRun
from endstop.core.transitions import OperationState
from endstop.runtime.guard import Guard
from tests.runtime.scenes import SPEC, WRITE, Scene, counting, stops

POLICY = es.Policy(
    limits=es.Limits(steps_max=50, turns_max=50, tokens_max=10_000, wall_ms_max=600_000),
    tools={"save": WRITE, "look": es.ToolPolicy(effect="read")},
)

VICTIM = """
    import os, sys, time
    import endstop as es
    spec = es.Spec(
        what_it_does="tidies the list", what_it_does_not="deletes nothing", done_looks_like="the list is tidy"
    )
    policy = es.Policy(
        limits=es.Limits(steps_max=50, turns_max=50, tokens_max=10_000, wall_ms_max=600_000),
        tools={"save": es.ToolPolicy(effect="write", idempotency_key="{key}"), "look": es.ToolPolicy(effect="read")},
    )
    effects = sys.argv[2]

    def save(key: str) -> str:
        with open(effects, "a") as file:
            file.write(key + "\\n")
        if key == "deadly":
            print("in the tool", flush=True)
            time.sleep(60)
        return "saved " + key

    with es.open(sys.argv[1], policy=policy) as guard, guard.run(spec, run_id="r1") as run:
        run.call(lambda n: n, {"n": 1}, tool="look")
        run.call(save, {"key": "a"}, call_id="c1")
        run.checkpoint({"done": ["a"]})
        with run.model_call(output_tokens_max=100) as turn:
            turn.record(input_tokens=10, output_tokens=20)
        if sys.argv[3] == "model":
            with run.model_call(output_tokens_max=300):
                print("in the model", flush=True)
                time.sleep(60)
        run.call(save, {"key": "deadly"}, call_id="c2")
"""


def crash(scene: Scene, where: str = "tool") -> Path:
    """A process that dies in mid-call; gives the file that its tool writes to."""
    effects = scene.folder / "effects"
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(VICTIM), scene.url, str(effects), where], stdout=subprocess.PIPE,
        text=True, env={"PYTHONPATH": str(Path(es.__file__).parents[1])},
    )  # fmt: skip
    with process:
        assert process.stdout is not None
        assert process.stdout.readline() == f"in the {where}\n"
        process.send_signal(signal.SIGKILL)
    return effects


def states(guard: Guard) -> dict[str, OperationState]:
    return {operation.call_id: operation.state for operation in guard.operations()}


def test_a_killed_process_leaves_an_interrupted_run_and_an_unknown_write(file_scene: Scene) -> None:
    crash(file_scene)
    guard = file_scene.open(POLICY)
    record = guard.show("r1")
    assert record.state is es.RunState.INTERRUPTED
    assert record.in_flight == ()
    assert record.owners == ()
    assert states(guard) == {"c1": OperationState.COMMITTED, "c2": OperationState.UNKNOWN}
    envelope = record.envelope
    assert envelope is not None
    assert envelope.terminal_reason is es.Reason.CRASHED
    assert envelope.next_allowed_action is es.NextAction.RESUME_AFTER_CHANGE
    assert envelope.last_safe_checkpoint == '{"done":["a"]}'
    assert envelope.in_doubt == tuple(o.operation_id for o in guard.operations() if o.call_id == "c2")
    # Looking twice changes nothing more.
    entries = record.entries
    assert guard.show("r1").entries == entries
    assert guard.reconcile().interrupted == ("r1",)
    assert [operation.call_id for operation in guard.reconcile().in_doubt] == ["c2"]
    assert [run.run_id for run in guard.runs(states=["interrupted"])] == ["r1"]


@pytest.mark.parametrize("way", ["join", "resume"])
def test_the_run_goes_on_with_its_counters_and_sends_nothing_again(file_scene: Scene, way: str) -> None:
    effects = crash(file_scene)
    guard = file_scene.open(POLICY)
    if way == "resume":
        guard.show("r1")
        generation = guard.resume("r1", change="strategy", reason="the machine is back")
    else:
        generation = 2
    save, saved = counting()
    with guard.run(run_id="r1") as run:
        assert run.generation == generation == 2
        assert run.resumed_from == {"done": ["a"]}
        counters = run.counters
        assert (counters.steps, counters.turns, counters.input_tokens, counters.output_tokens) == (3, 1, 10, 20)
        # Committed before: answered from the ledger, under its own call id and under a new one.
        assert run.call(save, {"key": "a"}, tool="save", call_id="c9").value == "saved a"
        # In doubt: refused, whatever it is called.
        for call_id in ("c2",):
            refused = run.call(save, {"key": "deadly"}, tool="save", call_id=call_id)
            assert refused.reason is es.Reason.OUTCOME_UNKNOWN
        run.call(save, {"key": "b"}, tool="save")
        run.complete()
    assert saved == [{"key": "b"}]
    assert effects.read_text().split() == ["a", "deadly"]
    assert guard.show("r1").counters.steps == 4


def test_a_dead_owners_write_seen_from_another_run_becomes_unknown(file_scene: Scene) -> None:
    """Nobody has looked at the dead run; the key alone leads to it."""
    effects = crash(file_scene)
    guard = file_scene.open(POLICY)
    assert states(guard)["c2"] is OperationState.EXECUTING
    save, saved = counting()
    with guard.run(SPEC, run_id="r2") as run:
        refused = run.call(save, {"key": "deadly"}, tool="save")
        assert refused.reason is es.Reason.OUTCOME_UNKNOWN
        assert run.call(save, {"key": "a"}, tool="save").value == "saved a"
    assert saved == []
    assert states(guard)["c2"] is OperationState.UNKNOWN
    assert guard.show("r1").state is es.RunState.INTERRUPTED
    assert effects.read_text().split() == ["a", "deadly"]


def test_a_living_owners_write_seen_from_another_run_is_in_progress(scene: Scene) -> None:
    guard = scene.open(POLICY)
    second = scene.another(guard)
    inner: list[es.ToolResult[object]] = []
    save, saved = counting()
    with guard.run(SPEC, run_id="r1") as run, second.run(SPEC, run_id="r2") as other:

        def slow(key: str) -> str:
            inner.append(other.call(save, {"key": key}, tool="save"))
            return key

        assert run.call(slow, {"key": "a"}, tool="save").value == "a"
        assert inner[0].reason is es.Reason.IN_PROGRESS
        assert inner[0].retry_after_ms is not None
        assert other.call(save, {"key": "a"}, tool="save").value == "a"
    assert saved == []


def test_a_model_call_that_died_is_charged_what_was_held_for_it(file_scene: Scene) -> None:
    crash(file_scene, "model")
    guard = file_scene.open(POLICY)
    with guard.run(run_id="r1") as run:
        counters = run.counters
    assert (counters.turns, counters.output_tokens) == (2, 320)


def test_an_operator_may_stop_a_crashed_run_for_good(file_scene: Scene) -> None:
    crash(file_scene)
    guard = file_scene.open(POLICY)
    report = guard.stop("r1", reason="not again")
    assert report.envelope.terminal_reason is es.Reason.OPERATOR_CANCELLED_LOOP
    assert guard.show("r1").state is es.RunState.STOPPED
    with pytest.raises(es.RunStopped), guard.run(run_id="r1"):
        pytest.fail("entered")


def test_a_worker_that_dies_in_a_run_that_was_stopped_leaves_no_call_in_flight(file_scene: Scene) -> None:
    guard = file_scene.open(POLICY)
    effects = file_scene.folder / "effects"
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(VICTIM), file_scene.url, str(effects), "tool"], stdout=subprocess.PIPE,
        text=True, env={"PYTHONPATH": str(Path(es.__file__).parents[1])},
    )  # fmt: skip
    with process:
        assert process.stdout is not None
        process.stdout.readline()
        report = guard.stop("r1")
        assert [tool for _, tool in report.in_flight] == ["save"]
        process.kill()
    record = guard.show("r1")
    assert (record.state, record.in_flight, record.owners) == (es.RunState.STOPPED, (), ())
    assert states(guard)["c2"] is OperationState.UNKNOWN


def test_a_worker_that_was_taken_for_dead_is_stopped_at_its_next_call_and_joins_again(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    guard = scene.open(POLICY)
    save, saved = counting()

    def slow(key: str) -> es.ToolResult[str]:
        with monkeypatch.context() as patch:
            patch.setattr(guard.world.board, "is_alive", lambda owner_id: False)
            assert guard.show("r1").state is es.RunState.INTERRUPTED
        return es.ToolResult(status="complete", value=key)

    with stops("crashed"), guard.run(SPEC, run_id="r1") as run:
        # What it was doing is taken; that it says it is done is not.
        assert run.call(slow, {"key": "a"}, tool="save").value == "a"
        assert guard.show("r1").state is es.RunState.INTERRUPTED
        with pytest.raises(es.RunHalted):
            run.call(save, {"key": "b"}, tool="save")
        with pytest.raises(es.RunHalted):
            run.complete()
    assert [operation.state for operation in guard.operations()] == [OperationState.COMMITTED]
    with guard.run(run_id="r1") as run:
        assert run.generation == 2
        run.call(save, {"key": "b"}, tool="save")
        run.complete()
    assert saved == [{"key": "b"}]
    assert guard.show("r1").state is es.RunState.COMPLETE


def test_each_delivery_of_a_call_has_a_name_of_its_own_in_the_record(scene: Scene) -> None:
    guard = scene.open(POLICY)
    refused = iter([es.NotAppliedError("not yet"), None])

    def save(key: str) -> str:
        error = next(refused)
        if error is not None:
            raise error
        return key

    with guard.run(SPEC, run_id="r1") as run:
        seen = []
        with pytest.raises(es.NotAppliedError):
            run.call(save, {"key": "a"}, call_id="c1")
        seen += [operation.attempt_id for operation in guard.operations()]
        run.call(save, {"key": "a"}, call_id="c1", change="cursor")
        seen += [operation.attempt_id for operation in guard.operations()]
    assert len(seen) == len(set(seen)) == 2
    assert all(seen)


def sent_by_one_who_left(guard: Guard, *, ended: bool) -> None:
    """A worker that is in no run any more, and dead by now, has a write under way in `r1`."""
    store = guard.store
    with guard.run(SPEC, run_id="r1"):
        pass
    call = es.ToolCall(tool="save", args={"key": "a"}, call_id="c1")
    proposal = propose(call, WRITE, run_key=b"k" * 32, store_key=store.store_key)
    reserved = store.transact_now(
        ReserveCall(
            run_id="r1", now_us=guard.world.clock.now_us(), policy=guard.policy, proposal=proposal,
            operation_id="op_1", owner_id="ghost.1", attempt_id="1",
        )
    )  # fmt: skip
    assert reserved.operation is not None
    if ended:
        now_us, reason = guard.world.clock.now_us(), es.Reason.OPERATOR_CANCELLED_LOOP
        guard.store.transact_now(EndRun(run_id="r1", now_us=now_us, reason=reason, guard="stop"))
    assert states(guard) == {"c1": OperationState.EXECUTING}


@pytest.mark.parametrize("ended", [False, True])
@pytest.mark.parametrize("look", ["show", "runs", "stop", "reconcile"])
def test_what_a_dead_worker_had_sent_is_in_doubt_also_when_it_had_left_the_run(
    scene: Scene, look: str, ended: bool
) -> None:
    guard = scene.open(POLICY)
    sent_by_one_who_left(guard, ended=ended)
    match look:
        case "show":
            assert guard.show("r1").in_flight == ()
        case "runs":
            assert [run.in_flight for run in guard.runs()] == [()]
        case "stop":
            guard.stop("r1")
        case _:
            assert [operation.operation_id for operation in guard.reconcile().in_doubt] == ["op_1"]
    (operation,) = guard.operations()
    assert operation.state in (OperationState.UNKNOWN, OperationState.MANUAL)
    assert operation.outcome == "unknown"
    record = guard.show("r1")
    assert record.state is (es.RunState.STOPPED if ended or look == "stop" else es.RunState.RUNNING)
    assert guard.show("r1").entries == record.entries


def test_what_a_living_worker_has_under_way_is_left_alone_when_it_has_left_the_run(scene: Scene) -> None:
    guard = scene.open(POLICY)
    owner = f"{guard.owner_id()}.9"
    sent_by_one_who_left(guard, ended=False)
    guard.show("r1")
    call = es.ToolCall(tool="save", args={"key": "b"}, call_id="c2")
    proposal = propose(call, WRITE, run_key=b"k" * 32, store_key=guard.store.store_key)
    guard.store.transact_now(
        ReserveCall(
            run_id="r1", now_us=guard.world.clock.now_us(), policy=guard.policy, proposal=proposal,
            operation_id="op_2", owner_id=owner,
        )
    )  # fmt: skip
    guard.show("r1")
    guard.runs()
    assert states(guard)["c2"] is OperationState.EXECUTING


@pytest.mark.storm
def test_kills_at_random_moments_never_send_twice(file_scene: Scene) -> None:
    """Twelve workers, one after the other, each killed somewhere; every key has at most one effect."""
    import random
    import time

    worker = """
        import sys, endstop as es
        spec = es.Spec(
            what_it_does="tidies the list", what_it_does_not="deletes nothing", done_looks_like="the list is tidy"
        )
        policy = es.Policy(limits=es.Limits(steps_max=10_000, wall_ms_max=600_000, error_streak_max=500,
                                            refused_streak_max=500, no_progress_max=500),
                           tools={"save": es.ToolPolicy(effect="write", idempotency_key="{key}")})
        def save(key: str) -> str:
            with open(sys.argv[2], "a") as file:
                file.write(key + "\\n")
            return key
        with es.open(sys.argv[1], policy=policy) as guard, guard.run(spec, run_id="r1") as run:
            print("ready", flush=True)
            for number in range(400):
                run.call(save, {"key": f"k{number}"})
    """
    dice = random.Random(11)
    effects = file_scene.folder / "effects"
    for _ in range(12):
        process = subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(worker), file_scene.url, str(effects)], stdout=subprocess.PIPE,
            text=True, env={"PYTHONPATH": str(Path(es.__file__).parents[1])},
        )  # fmt: skip
        with process:
            assert process.stdout is not None
            if process.stdout.readline() == "ready\n":
                time.sleep(dice.uniform(0.005, 0.12))
            process.kill()
    lines = effects.read_text().split()
    assert len(lines) > 12
    assert len(lines) == len(set(lines))
    with es.open(file_scene.url) as guard:
        guard.show("r1")
        known = {operation.state for operation in guard.operations("r1", limit=5_000)}
        assert OperationState.EXECUTING not in known
        assert len(guard.operations("r1", limit=5_000)) >= len(lines)
