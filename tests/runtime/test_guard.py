"""The durable guard as the contract writes it: opening, running, joining, listing."""

from __future__ import annotations

import asyncio
import os
import threading
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import endstop as es
from endstop.runtime.guard import DEFAULT_STORE
from tests.runtime.scenes import READ, SPEC, WIDE, WRITE, Scene, StillClock, counting, stops


def test_the_contracts_durable_guard_works_as_it_is_written(scene: Scene) -> None:
    policy = es.Policy(
        limits=WIDE, tools={"crm.update": es.ToolPolicy(effect="write", idempotency_key="{contact_id}:{version}")}
    )
    guard = scene.open(policy)
    search, searched = counting(["INV-7"])
    with guard.run(SPEC, run_id=None, labels={}, agent="main") as run:
        result = run.call(search, {"q": "x"}, tool="search", call_id="c1")
        assert isinstance(result, es.ToolResult)
        assert (result.status, result.value) == (es.Status.PROGRESS, ["INV-7"])

        @run.tool(effect="write", idempotency_key="{contact_id}:{version}")
        def update_contact(contact_id: str, version: int) -> es.ToolResult[str]:
            return es.ToolResult(value=f"{contact_id} is at {version}", progress_version=version)

        assert update_contact("C-7", version=3).value == "C-7 is at 3"
        with run.model_call(model="openai:some", input_tokens_max=100, output_tokens_max=50) as turn:
            turn.record(input_tokens=90, output_tokens=40)
        child = run.child(agent="researcher")
        assert child.call(search, {"q": "y"}, tool="search").value == ["INV-7"]
        run.checkpoint({"cursor": 7})
        run.complete(output="all done")
    assert searched == [{"q": "x"}, {"q": "y"}]
    record = guard.show(run.run_id)
    assert record.state is es.RunState.COMPLETE
    assert record.output == "all done"
    assert record.checkpoint is not None
    assert record.checkpoint.data == '{"cursor":7}'
    assert record.progress_version == 3
    assert (record.counters.steps, record.counters.turns) == (3, 1)
    assert (record.counters.input_tokens, record.counters.output_tokens) == (90, 40)
    assert record.envelope is not None
    assert record.envelope.terminal_reason is es.Reason.COMPLETE
    assert record.envelope.next_allowed_action is es.NextAction.NONE
    assert {note.state for note in record.envelope.operations} == {"COMMITTED"}
    assert record.envelope.in_doubt == ()


def test_the_same_works_with_async_with_and_async_tools(scene: Scene) -> None:
    guard = scene.open()

    async def fetch(q: str) -> str:
        await asyncio.sleep(0)
        return f"found {q}"

    async def main() -> es.RunState:
        async with guard, guard.run(SPEC) as run:
            assert (await run.acall(fetch, {"q": "x"})).value == "found x"

            @run.tool(effect="write", idempotency_key="{name}")
            async def save(name: str) -> str:
                return f"saved {name}"

            result = await save("a")  # type: ignore[misc]  # an async function stays async; its type says ToolResult
            assert result.value == "saved a"
            async with run.model_call(model="m", output_tokens_max=5) as turn:
                turn.record(input_tokens=1, output_tokens=1)
            run.complete()
            return guard.show(run.run_id).state

    assert asyncio.run(main()) is es.RunState.COMPLETE


def test_leaving_without_complete_detaches_and_the_run_can_be_joined_by_its_id(scene: Scene) -> None:
    guard = scene.open()
    search, _ = counting()
    with guard.run(SPEC, run_id="r1", labels={"team": "seo"}) as run:
        run.call(search, {"q": 1}, tool="search")
    assert guard.show("r1").state is es.RunState.RUNNING
    with scene.another(guard).run(run_id="r1") as again:
        assert again.generation == 2
        assert again.spec == SPEC
        again.call(search, {"q": 2}, tool="search")
    assert guard.show("r1").counters.steps == 2
    assert [run.run_id for run in guard.runs(labels={"team": "seo"})] == ["r1"]
    assert guard.runs(labels={"team": "other"}) == ()


def test_a_run_is_joined_with_its_own_spec_and_policy_only(scene: Scene) -> None:
    guard = scene.open()
    with guard.run(SPEC, run_id="r1"):
        pass
    other = es.Spec(what_it_does="x", what_it_does_not="y", done_looks_like="z")
    with pytest.raises(es.RunJoinError, match="another spec"), guard.run(other, run_id="r1"):
        pass
    stricter = es.Guard(guard.store, policy=es.Policy(limits=es.Limits()), clock=guard.world.clock, ids=guard.ids)
    with pytest.raises(es.RunJoinError, match="another policy"), stricter.run(SPEC, run_id="r1"):
        pass
    assert guard.show("r1").owners == ()


def test_two_workers_inside_one_run_share_one_generation(scene: Scene) -> None:
    guard = scene.open()
    with guard.run(SPEC, run_id="r1") as first, scene.another(guard).run(run_id="r1") as second:
        assert first.generation == second.generation == 1
        first.call(counting()[0], {"a": 1}, tool="t")
        second.call(counting()[0], {"a": 2}, tool="t")
        assert first.counters.steps == second.counters.steps == 2


def test_a_stored_spec_starts_a_run_without_another_word(scene: Scene) -> None:
    guard = scene.open()
    run_id = guard.save_spec(SPEC)
    assert guard.spec(run_id) == SPEC
    with guard.run(run_id=run_id) as run:
        assert run.spec == SPEC
    with pytest.raises(es.SpecInvalidError):
        guard.run()
    with pytest.raises(es.RunNotFoundError), guard.run(run_id="nobody-knows-it"):
        pass


def test_time_counts_only_while_somebody_is_inside(scene: Scene) -> None:
    clock = StillClock()
    guard = scene.open(clock=clock)
    with guard.run(SPEC, run_id="r1"):
        clock.pass_ms(300)
    clock.pass_ms(10_000)
    with guard.run(run_id="r1"):
        clock.pass_ms(200)
        assert guard.show("r1").counters.elapsed_ms == 500
    assert guard.show("r1").counters.elapsed_ms == 500


def test_names_in_any_script_reach_the_ledger_as_plain_ones(scene: Scene) -> None:
    guard = scene.open()
    with stops(), guard.run(SPEC, run_id="r1", agent="Prüferin", labels={"größe": "klein"}) as run:
        run.call(counting()[0], {"ä": "ö"}, tool="wörterbuch", call_id="aufruf-ß", round_id="runde ∞")
        with run.model_call(model="anbieter:größer") as turn:
            turn.record(input_tokens=1)
        child = run.child(agent="子", brief="看")
        child.handoff("следующий")
        guard.deny(tool="löschen*", run_id="r1", reason="weil", actor="Jürgen")
        guard.stop("r1", reason="genug \udcff", actor="Zoë")
        run.call(counting()[0], {})
    leaves = [entry.leaf for entry in guard.store.entries(run_id="r1").result()]
    assert all(leaf.isascii() for leaf in leaves)
    envelope = guard.show("r1").envelope
    assert envelope is not None
    assert envelope.message == "genug ?"


def test_a_closed_guard_refuses_everything_and_closing_twice_is_harmless(scene: Scene) -> None:
    guard = scene.open()
    guard.close()
    guard.close()
    with pytest.raises(es.GuardClosedError), guard.run(SPEC):
        pass
    with pytest.raises(es.GuardClosedError):
        guard.runs()


@pytest.mark.parametrize(
    "labels", [{"": "x"}, {"a=b": "x"}, {"a": 1}, {"a" * 201: "x"}, {f"n{number}": "x" for number in range(33)}]
)
def test_labels_are_names_and_text_within_bounds(scene: Scene, labels: dict[str, str]) -> None:
    with pytest.raises(es.UsageError):
        scene.open().run(SPEC, labels=labels)


@pytest.mark.parametrize("version", [True, 2**53, 1.5, "x" * 201])
def test_an_initial_progress_version_is_one_that_can_be_kept(scene: Scene, version: int) -> None:
    with pytest.raises(es.UsageError, match="initial_progress_version"):
        scene.open().run(SPEC, initial_progress_version=version)


def test_the_store_is_named_by_the_environment_else_by_the_house(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ENDSTOP_STORE", "sqlite:///named.db")
    with es.open() as guard, guard.run(SPEC):
        pass
    assert (tmp_path / "named.db").exists()
    monkeypatch.setenv("ENDSTOP_STORE", "")
    with es.open() as guard, guard.run(SPEC):
        pass
    assert DEFAULT_STORE == "sqlite:///.endstop/endstop.db"
    assert (tmp_path / ".endstop" / "endstop.db").exists()


def test_the_steps_cap_is_exact_with_a_hundred_threads(scene: Scene) -> None:
    guard = scene.open(es.Policy(limits=es.Limits(steps_max=27, wall_ms_max=600_000), tools={"look": READ}))
    tool, calls = counting(lambda number: number)
    halted = []
    with stops() as stopped, guard.run(SPEC) as run:
        gate = threading.Barrier(100)

        def work(number: int) -> None:
            gate.wait()
            try:
                run.call(tool, {"n": number}, tool="look")
            except es.RunHalted:
                halted.append(number)

        with ThreadPoolExecutor(100) as pool:
            list(pool.map(work, range(100)))
    assert len(calls) == 27
    # Calls that were let through and settle after the stop are told of it as well.
    assert len(halted) >= 73
    assert stopped.value.envelope.terminal_reason is es.Reason.STEP_CAP
    assert guard.show(run.run_id).counters.steps == 27


def test_the_steps_and_turns_caps_are_exact_with_a_hundred_tasks(scene: Scene) -> None:
    limits = es.Limits(steps_max=25, turns_max=25, wall_ms_max=600_000, tokens_max=10**6)
    guard = scene.open(es.Policy(limits=limits, tools={"look": READ}))
    ran = []

    async def look(n: int) -> int:
        ran.append(n)
        await asyncio.sleep(0)
        return n

    async def main(what: str) -> None:
        async with guard.run(SPEC, run_id=what) as run:

            async def one(number: int) -> None:
                if what == "steps":
                    await run.acall(look, {"n": number}, tool="look")
                else:
                    async with run.model_call(output_tokens_max=1) as turn:
                        ran.append(number)
                        turn.record(input_tokens=1, output_tokens=1)

            await asyncio.gather(*(one(number) for number in range(100)), return_exceptions=True)

    for what, reason in (("steps", es.Reason.STEP_CAP), ("turns", es.Reason.TURN_CEILING)):
        ran.clear()
        with pytest.raises(es.RunStopped) as stopped:
            asyncio.run(main(what))
        assert stopped.value.envelope.terminal_reason is reason
        assert len(ran) == 25


def test_the_policys_tools_and_a_declaration_are_judged_by_the_stricter(scene: Scene) -> None:
    guard = scene.open(es.Policy(limits=WIDE, tools={"save": WRITE}))

    @es.tool(effect="read")
    def save(key: str) -> str:
        return key

    with stops() as stopped, guard.run(SPEC) as run:
        run.call(save, {"key": "a"})
        run.call(save, {"key": "a"})
    assert stopped.value.envelope.terminal_reason is es.Reason.ALREADY_COMMITTED


def test_a_child_is_entered_by_its_id_as_what_it_is(scene: Scene) -> None:
    guard = scene.open()
    with guard.run(SPEC, run_id="root") as run:
        child = run.child(agent="researcher")
        with scene.another(guard).run(run_id=child.run_id) as again:
            assert (again.root_run_id, again.depth, again.agent) == ("root", 1, "researcher")
            again.call(counting()[0], {"a": 1}, tool="t")
        assert run.counters.steps == 1
    assert guard.show(child.run_id).parent_run_id == "root"


def test_a_forked_child_may_not_go_on_with_its_parents_run(file_scene: Scene) -> None:
    """It has its parent's memory, but neither its store nor its place among the workers."""
    guard = file_scene.open()
    with guard.run(SPEC) as run:
        run.call(counting()[0], {"a": 1}, tool="t")
        reading, writing = os.pipe()
        with warnings.catch_warnings():
            # Newer Pythons warn of a fork beside threads, which is the very thing that is tried here.
            warnings.simplefilter("ignore", DeprecationWarning)
            pid = os.fork()
        if pid == 0:
            try:
                run.call(counting()[0], {"a": 2}, tool="t")
                said = b"called"
            except es.GuardClosedError:
                said = b"refused"
            except BaseException as error:
                said = type(error).__name__.encode()
            os.write(writing, said)
            os._exit(0)
        os.close(writing)
        with os.fdopen(reading, "rb") as pipe:
            assert pipe.read() == b"refused"
        os.waitpid(pid, 0)
        run.call(counting()[0], {"a": 3}, tool="t")
    assert guard.show(run.run_id).counters.steps == 2


@pytest.mark.parametrize("run_id", ["läuft", "", "-", "x" * 81, "a\nb"])
def test_a_runs_id_is_a_plain_name(scene: Scene, run_id: str) -> None:
    guard = scene.open()
    with pytest.raises(es.UsageError, match="plain name"):
        guard.run(SPEC, run_id=run_id)
    with pytest.raises(es.UsageError, match="plain name"):
        guard.save_spec(SPEC, run_id=run_id)
