"""The calls of one assistant message: side by side, each answered exactly once, also when the run ends among them."""

from __future__ import annotations

import asyncio
import datetime
import functools
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import endstop as es
from endstop.loop.rounds import Toolbox
from endstop.runtime.guard import Guard
from tests.loop.scenes import SPEC, WIDE, Model, answers_of, assert_every_call_is_answered_once, calls, says, told


@pytest.fixture
def guard() -> Iterator[Guard]:
    with es.open("memory:", policy=es.Policy(limits=WIDE)) as guard:
        yield guard


def run(
    guard: Guard, *turns: dict[str, object], tools: list[Callable[..., object]] | dict[str, Callable[..., object]],
    **more: Any,
) -> es.LoopResult:  # fmt: skip
    result = es.AgentLoop(guard, model=Model(*turns), tools=tools, **more).run("t", SPEC)
    assert_every_call_is_answered_once(result)
    return result


def test_tools_of_one_message_run_side_by_side(guard: Guard) -> None:
    together = threading.Barrier(3, timeout=10)
    inside: list[int] = []
    gate = asyncio.Event()

    def block(n: int) -> int:
        together.wait()
        return n

    async def meet(n: int) -> int:
        inside.append(n)
        if len(inside) == 3:
            gate.set()
        await asyncio.wait_for(gate.wait(), 10)
        return n

    wanted = [("block", {"n": n}) for n in range(3)] + [("meet", {"n": n}) for n in range(3)]
    result = run(guard, calls(*wanted), says("x"), tools=[block, meet])
    assert result.success
    assert [answer["value"] for answer in told(result)] == [0, 1, 2, 0, 1, 2]


def test_no_more_run_at_once_than_are_allowed(guard: Guard) -> None:
    now, most = 0, 0

    async def work(n: int) -> int:
        nonlocal now, most
        now += 1
        most = max(most, now)
        await asyncio.sleep(0.003)
        now -= 1
        return n

    result = run(guard, calls(*[("work", {"n": n}) for n in range(9)]), says("x"), tools=[work], parallel_tools_max=2)
    assert result.success
    assert most == 2


def test_an_unknown_tool_bad_arguments_and_a_tools_exception_are_structured_answers(guard: Guard) -> None:
    def look(n: int) -> int:
        raise LookupError("nothing there")

    wanted: list[tuple[str, object]] = [
        ("nothing_like_it", {"n": 1}), ("look", "{not json"), ("look", {"m": 1}), ("look", {"n": "many"}),
        ("look", {"n": 3}),
    ]  # fmt: skip
    result = run(guard, calls(*wanted), says("x"), tools=[look])
    said = told(result)
    assert [answer["status"] for answer in said] == ["retryable"] * 5
    assert [answer.get("reason") for answer in said] == [
        "unknown_tool", "malformed_call", "malformed_call", "malformed_call", None,
    ]  # fmt: skip
    assert said[4]["error_class"] == "tool_failed"
    assert "nothing there" in str(said[4]["message"])
    assert "'n' is missing" in str(said[2]["message"])
    assert "many" not in str(said[3]["message"])
    assert all(answer.failed for answer in answers_of(result))
    assert result.success


@pytest.mark.parametrize("name", ["", "x" * 500, "пример", "a b\n"])
def test_whatever_a_model_makes_up_for_a_name_is_counted(guard: Guard, name: str) -> None:
    turns = [{"tool_calls": [{"id": f"c{n}", "name": name or "x", "args": {"n": n}}]} for n in range(9)]
    if not name:
        pytest.importorskip("endstop.loop.conversation")
        from endstop.loop.rounds import NO_NAME

        assert Toolbox([], parallel_max=1).find("") == (NO_NAME, None)
        return
    result = run(guard, *turns, tools=[])
    assert result.terminal_reason is es.Reason.ERROR_STREAK


def test_a_model_that_cannot_write_arguments_is_stopped(guard: Guard) -> None:
    ran = []

    def save(n: int) -> None:
        ran.append(n)

    result = run(guard, *[calls(("save", f"{{broken {n}")) for n in range(9)], tools=[save])
    assert result.terminal_reason is es.Reason.ERROR_STREAK
    assert ran == []


def test_every_call_is_answered_once_when_the_run_ends_in_the_middle(guard: Guard) -> None:
    """Three run, the fourth ends the run, the rest are told that they were not made."""
    ran = []

    @es.tool(effect="read")
    def look(n: int) -> es.ToolResult[int]:
        ran.append(n)
        return es.ToolResult(status="fatal" if n == 3 else "progress", value=n)

    wanted = [("look", {"n": n}) for n in range(8)]
    result = run(guard, calls(*wanted), says("x"), tools=[look], parallel_tools_max=1)
    assert ran == [0, 1, 2, 3]
    assert not result.success
    assert result.terminal_reason is es.Reason.FATAL
    said = told(result)
    assert [answer["status"] for answer in said] == ["progress"] * 3 + ["policy_blocked"] * 5
    assert {answer["reason"] for answer in said[3:]} == {"fatal"}
    assert "was not made" in str(said[7]["message"])


def test_a_stop_from_outside_in_a_parallel_batch_answers_every_call(guard: Guard) -> None:
    started: list[int] = []

    async def work(n: int) -> int:
        started.append(n)
        if len(started) == 4:
            guard.stop("r1")
        await asyncio.sleep(30)
        return n

    model = Model(calls(*[("work", {"n": n}) for n in range(9)]), says("x"))
    result = es.AgentLoop(guard, model=model, tools=[work], parallel_tools_max=4).run("t", SPEC, run_id="r1")
    assert_every_call_is_answered_once(result)
    assert result.terminal_reason is es.Reason.OPERATOR_CANCELLED_LOOP
    assert len(started) == 4
    assert len(answers_of(result)) == 9
    assert all(answer.failed for answer in answers_of(result))


def test_a_cap_in_a_parallel_batch_answers_every_call() -> None:
    ran = []

    async def work(n: int) -> int:
        ran.append(n)
        await asyncio.sleep(0.001)
        return n

    with es.open("memory:", policy=es.Policy(limits=es.Limits(steps_max=5, wall_ms_max=600_000))) as guard:
        result = run(guard, calls(*[("work", {"n": n}) for n in range(12)]), tools=[work])
    assert len(ran) <= 5
    assert result.terminal_reason is es.Reason.STEP_CAP
    assert len(answers_of(result)) == 12


def test_a_completion_in_a_batch_answers_the_rest(guard: Guard) -> None:
    @es.tool(effect="read")
    def work(n: int) -> es.ToolResult[int]:
        return es.ToolResult(status="complete" if n == 1 else "progress", value=n)

    result = run(guard, calls(*[("work", {"n": n}) for n in range(4)]), tools=[work], parallel_tools_max=1)
    assert result.success
    assert result.output == "1"
    assert [answer.get("reason") for answer in told(result)] == [None, None, "complete", "complete"]


def test_a_read_that_stands_in_a_message_twice_is_made_once_and_a_third_ends_the_run(guard: Guard) -> None:
    ran = []

    @es.tool(effect="read")
    def look(q: str) -> dict[str, str]:
        ran.append(q)
        return {"found": q}

    twice = calls(("look", {"q": "a"}), ("look", {"q": "b"}), ("look", {"q": "a"}), ids=("c1", "c2", "c3"))
    result = run(guard, twice, says("x"), tools=[look])
    assert result.success
    assert sorted(ran) == ["a", "b"]
    said = told(result)
    assert [answer["value"] for answer in said] == [{"found": "a"}, {"found": "b"}, {"found": "a"}]
    ran.clear()
    thrice = calls(*[("look", {"q": "a"})] * 3, ids=("c1", "c2", "c3"))
    result = run(guard, thrice, tools=[look])
    assert ran == ["a"]
    assert result.terminal_reason is es.Reason.SAME_CALL_REPEAT


def test_a_write_that_stands_in_a_message_twice_is_made_once(guard: Guard) -> None:
    ran = []

    @es.tool(effect="write", idempotency_key="{n}")
    def save(n: int) -> str:
        ran.append(n)
        return "saved"

    result = run(guard, calls(("save", {"n": 1}), ("save", {"n": 1}), ids=("c1", "c2")), says("x"), tools=[save])
    assert ran == [1]
    assert [answer.get("reason") for answer in told(result)] == [None, "round_duplicate"]
    assert result.success


@pytest.mark.parametrize("ids", [("c", "c", "c"), ("", "", ""), ("c", "c", "c#2")])
def test_calls_keep_their_places_though_the_model_gave_them_one_id(guard: Guard, ids: tuple[str, ...]) -> None:
    def look(n: int) -> int:
        return n

    from endstop.loop.conversation import AssistantTurn, ToolRequest

    class Careless(Model):
        async def respond(self, **more: Any) -> AssistantTurn:
            turn = await super().respond(**more)
            requests = tuple(
                ToolRequest(call_id=call_id, name=request.name, args=request.args)
                for call_id, request in zip(ids, turn.tool_requests, strict=False)
            )
            return AssistantTurn(text=turn.text, tool_requests=requests, stop_reason=turn.stop_reason)

    model = Careless(calls(*[("look", {"n": n}) for n in range(3)]), says("x"))
    result = es.AgentLoop(guard, model=model, tools=[look]).run("t", SPEC)
    assert_every_call_is_answered_once(result)
    assert [answer["value"] for answer in told(result)] == [0, 1, 2]


def test_an_open_outcome_is_told_as_such_and_the_loop_goes_on(guard: Guard) -> None:
    @es.tool(effect="write", idempotency_key="{n}")
    def save(n: int) -> str:
        raise ConnectionResetError("planted")

    result = run(guard, calls(("save", {"n": 1})), says("I must ask a person."), tools=[save])
    said = told(result)[0]
    assert (said["status"], said["reason"]) == ("policy_blocked", "outcome_unknown")
    assert said["next_allowed_action"] == "human_review"
    assert said["operation_id"] == guard.operations()[0].operation_id
    assert result.success
    assert result.envelope is not None
    assert len(result.envelope.in_doubt) == 1


def test_a_tool_that_asks_for_a_wait_gets_it_from_the_loop(guard: Guard) -> None:
    tries = []

    @es.tool(effect="read")
    def look(q: str) -> es.ToolResult[str]:
        tries.append(q)
        if len(tries) == 1:
            return es.ToolResult(status="retryable", retry_after_ms=60)
        return es.ToolResult(value="ready")

    turn = calls(("look", {"q": "a"}), ids=("c1",))
    again = calls(("look", {"q": "a"}), ids=("c2",))
    events: list[Any] = []
    result = run(guard, turn, again, says("x"), tools=[look], observer=events.append)
    assert [answer["status"] for answer in told(result)] == ["retryable", "progress"]
    waits = [event.wait_ms for event in events if event.kind == "wait"]
    assert len(waits) >= 1
    assert 0 < waits[0] <= 60
    assert result.counters.retries == 1


def test_a_wait_that_is_longer_than_the_run_is_told_to_the_model() -> None:
    @es.tool(effect="read")
    def look(q: str) -> es.ToolResult[str]:
        return es.ToolResult(status="retryable", retry_after_ms=10**9)

    with es.open("memory:", policy=es.Policy(limits=es.Limits(wall_ms_max=600_000))) as guard:
        turns = [calls(("look", {"q": "a"}), ids=(call_id,)) for call_id in ("c1", "c2")]
        result = run(guard, *turns, says("x"), tools=[look])
    assert told(result)[1]["reason"] == "not_before"


def test_arguments_reach_the_tool_as_its_type_hints_say(guard: Guard) -> None:
    seen: list[object] = []

    def save(path: Path, tags: set[str], when: datetime.timedelta, n: int = 3) -> str:
        seen.append((path, tags, when, n))
        return "ok"

    async def later(path: Path) -> str:
        seen.append(path)
        return "ok"

    saves = calls(("save", {"path": "a/b", "tags": ["y", "x"], "when": "PT1M", "n": "4"}), ("later", {"path": "c"}))
    result = run(guard, saves, says("x"), tools=[save, later])
    assert [answer["value"] for answer in told(result)] == ["ok", "ok"]
    assert seen == [(Path("a/b"), {"x", "y"}, datetime.timedelta(minutes=1), 4), Path("c")]


def test_a_declaration_holds_for_converted_arguments_too(guard: Guard) -> None:
    written = []

    @es.tool(effect="write", idempotency_key="{path}")
    def save(path: Path) -> str:
        written.append(path)
        return "ok"

    turns = [calls(("save", {"path": "a"}), ids=(f"c{number}",)) for number in range(4)]
    result = run(guard, *turns, tools={"save": functools.partial(save)})
    assert written == [Path("a")]
    assert result.terminal_reason is es.Reason.ALREADY_COMMITTED


def test_two_spellings_of_one_argument_are_one_operation(guard: Guard) -> None:
    written = []

    @es.tool(effect="write", idempotency_key="{n}")
    def save(n: int) -> str:
        written.append(n)
        return "ok"

    result = run(guard, calls(("save", {"n": 3})), calls(("save", {"n": "3"})), says("x"), tools=[save])
    assert written == [3]
    assert result.terminal_reason is es.Reason.ALREADY_COMMITTED


def test_answers_that_are_no_json_are_told_in_print(guard: Guard) -> None:
    class Odd:
        def __repr__(self) -> str:
            return "an odd thing"

    def odd() -> object:
        return Odd()

    def nan() -> float:
        return float("nan")

    result = run(guard, calls(("odd", {}), ("nan", {})), says("x"), tools=[odd, nan])
    assert [answer["value"] for answer in told(result)] == ["an odd thing", "nan"]


def test_falsy_answers_are_told(guard: Guard) -> None:
    tools: dict[str, Callable[..., object]] = {
        "f": lambda: False, "z": lambda: 0, "l": list, "d": dict, "n": lambda: None, "s": lambda: ""
    }  # fmt: skip
    result = run(guard, calls(*[(name, {}) for name in "fzns"]), says("x"), tools={k: tools[k] for k in "fzns"})
    assert [answer.get("value", "nothing") for answer in told(result)] == [False, 0, "nothing", ""]


def test_names_that_a_provider_cannot_write_are_offered_in_another_spelling(guard: Guard) -> None:
    ran = []

    @es.tool(name="crm.update contact", effect="read")
    def update(n: int) -> int:
        ran.append(n)
        return n

    model = Model(calls(("crm_update_contact", {"n": 1}), ("crm.update contact", {"n": 2})), says("x"))
    result = es.AgentLoop(guard, model=model, tools=[update]).run("t", SPEC)
    assert result.success
    assert sorted(ran) == [1, 2]
    assert model.asked[0].tools == ("crm_update_contact",)
    assert answers_of(result)[0].name == "crm_update_contact"


def test_two_tools_of_one_name_are_the_hosts_mistake() -> None:
    def one() -> None: ...

    two = es.tool(name="one")(lambda: None)
    with pytest.raises(es.UsageError, match="one name"):
        Toolbox([one, two], parallel_max=1)
    with pytest.raises(es.UsageError, match="tell apart"):
        Toolbox({"a.b": one, "a_b": one}, parallel_max=1)


def test_a_warning_of_the_guard_stands_first_in_the_answer() -> None:
    @es.tool(effect="read")
    def look(q: str) -> list[str]:
        return []

    policy = es.Policy(limits=WIDE, on_trip=("warn", "block", "stop"))
    with es.open("memory:", policy=policy) as guard:
        turns = [calls(("look", {"q": "a"}), ids=(f"c{number}",)) for number in range(6)]
        result = run(guard, *turns, tools=[look])
    contents = [answer.content for answer in answers_of(result)]
    assert contents[2].startswith('{"warning":"Note before this answer')
    assert told(result)[3]["reason"] == "same_call_repeat"
    assert result.terminal_reason is es.Reason.SAME_CALL_REPEAT
    assert len(contents) == 5


def test_a_cancelled_round_waits_until_each_of_its_calls_is_settled(guard: Guard) -> None:
    started = []

    @es.tool(effect="write", idempotency_key="{n}")
    async def save(n: int) -> None:
        started.append(n)
        await asyncio.sleep(30)

    async def main() -> None:
        model = Model(calls(*[("save", {"n": n}) for n in range(4)]))
        task = asyncio.create_task(es.AgentLoop(guard, model=model, tools=[save]).arun("t", SPEC, run_id="r1"))
        while len(started) < 4:
            await asyncio.sleep(0.002)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(main())
    assert {operation.state.value for operation in guard.operations()} == {"UNKNOWN"}
    assert guard.show("r1").in_flight == ()
