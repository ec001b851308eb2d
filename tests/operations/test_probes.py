"""What a probe may settle, and what it may not: sections 1.6 to 1.8 of the operations' design, at a real target."""

from __future__ import annotations

import asyncio
import threading

import pytest

import endstop as es
from endstop.core.operation_terms import terms_of
from endstop.core.steps_operations import BeginProbe
from endstop.core.transitions import OperationState
from tests.operations.scenes import SPEC, Bank, Place, bury, codes, entries_of, lost, only, states


def test_f03_an_effect_whose_answer_was_lost_is_found_by_the_probe_and_never_made_again(
    place: Place, bank: Bank
) -> None:
    guard = place.open(bank.tool())
    before = lost(guard, bank, applied=True)
    assert before.args == b'{"order":"a"}'
    with guard.run(SPEC, run_id="second") as run:
        result = run.call(bank.pay, {"order": "a"}, tool="pay")
    assert (result.value, result.replayed) == ({"paid": "a", "found": True}, True)
    assert result.operation_id == before.operation_id
    assert bank.effects == {bank.calls[0]: 1}
    after = only(guard)
    assert (after.state, after.settled_by, after.receipt, after.probe_count) == (
        OperationState.COMMITTED, "probe", "r-1", 1,
    )  # fmt: skip
    assert after.args is None
    assert codes(guard) == ["probe_begun", "probe_applied"]


def test_f02_an_attempt_that_a_dead_worker_never_sent_is_sent_once(
    place: Place, bank: Bank, monkeypatch: pytest.MonkeyPatch
) -> None:
    guard = place.open(bank.tool())
    lost(guard, bank, applied=False)
    bury(guard, monkeypatch)
    with guard.run(SPEC, run_id="second") as run:
        result = run.call(bank.pay, {"order": "a"}, tool="pay")
    assert result.value == {"paid": "a", "amount": 1}
    assert list(bank.effects.values()) == [1]
    assert len(set(bank.calls)) == 1, "the key is the same in every attempt"
    assert (only(guard).state, only(guard).attempt, only(guard).fence) == (OperationState.COMMITTED, 2, 2)
    assert codes(guard) == ["probe_begun", "probe_not_applied", "another_attempt"]
    assert entries_of(guard)[1]["exclusion"] == "owner_dead"


def test_z07_not_applied_is_not_enough_while_the_old_worker_could_still_send(place: Place, bank: Bank) -> None:
    guard = place.open(bank.tool())
    lost(guard, bank, applied=False)
    with guard.run(SPEC, run_id="second") as run:
        refused = run.call(bank.pay, {"order": "a"}, tool="pay")
    assert refused.reason is es.Reason.OUTCOME_UNKNOWN
    assert refused.operation_id == only(guard).operation_id
    assert (only(guard).state, bank.effects, len(bank.calls)) == (OperationState.UNKNOWN, {}, 1)
    assert codes(guard)[-1] == "probe_not_applied_but_not_excluded"


@pytest.mark.parametrize("exclusion", ["key_voided", "target_dedupes", "not_after"])
def test_a_target_that_keeps_a_late_send_out_re_arms_the_key(place: Place, bank: Bank, exclusion: str) -> None:
    guard = place.open(bank.tool())
    lost(guard, bank, applied=False)
    bank.answers.append(es.ProbeAnswer.not_applied(exclusion=exclusion))
    with guard.run(SPEC, run_id="second") as run:
        assert run.call(bank.pay, {"order": "a"}, tool="pay").value == {"paid": "a", "amount": 1}
    assert list(bank.effects.values()) == [1]


def test_the_owners_death_must_stand_before_the_question_is_put(
    place: Place, bank: Bank, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker that dies between the question and its answer may have sent in between."""
    guard = place.open(bank.tool())
    lost(guard, bank, applied=False)
    answer = bank.probe

    def dies_meanwhile(request: es.ProbeRequest) -> es.ProbeAnswer:
        bury(guard, monkeypatch)
        return answer(request)

    guard.reconcile(policy=es.Policy(tools={"pay": bank.tool(probe=dies_meanwhile)}))
    assert states(guard) == [OperationState.UNKNOWN]


def test_f04_without_a_probe_it_is_a_persons_and_only_its_own_key_is_blocked(place: Place, bank: Bank) -> None:
    guard = place.open(bank.tool(probe=None))
    lost(guard, bank, applied=True)
    assert guard.reconcile().in_doubt[0].state is OperationState.MANUAL
    with guard.run(SPEC, run_id="second") as run:
        assert run.call(bank.pay, {"order": "a"}, tool="pay").reason is es.Reason.OUTCOME_UNKNOWN
        assert run.call(bank.pay, {"order": "b"}, tool="pay").value == {"paid": "b", "amount": 1}
    assert sorted(bank.effects.values()) == [1, 1]
    assert codes(guard) == ["no_probe"]


def test_a_tool_that_this_policy_does_not_know_is_left_alone(place: Place, bank: Bank) -> None:
    guard = place.open(bank.tool())
    lost(guard, bank, applied=True)
    other = place.another(guard, es.Policy(tools={"else": es.ToolPolicy(effect="read")}))
    assert [item.state for item in other.reconcile().in_doubt] == [OperationState.UNKNOWN]
    assert bank.asked == []


def test_z08_a_late_index_may_not_say_not_applied_before_its_settle_time(
    place: Place, bank: Bank, monkeypatch: pytest.MonkeyPatch
) -> None:
    guard = place.open(bank.tool(probe_settle_ms=5_000))
    lost(guard, bank, applied=False)
    bury(guard, monkeypatch)
    guard.reconcile()
    assert (states(guard), codes(guard)[-1]) == ([OperationState.UNKNOWN], "probe_too_early")
    place.clock.pass_ms(4_999)
    assert guard.reconcile().probes[0].code == "not_before"
    place.clock.pass_ms(1)
    guard.reconcile()
    assert states(guard) == [OperationState.FAILED_RETRYABLE]


def test_a_late_index_may_say_applied_at_once(place: Place, bank: Bank) -> None:
    guard = place.open(bank.tool(probe_settle_ms=5_000))
    lost(guard, bank, applied=True)
    assert guard.reconcile().settled[0].state is OperationState.COMMITTED


def test_a_budget_that_is_spent_makes_it_a_persons(place: Place, bank: Bank) -> None:
    guard = place.open(bank.tool(probes_max=2, probe_backoff_ms=100))
    lost(guard, bank, applied=True)
    bank.answers += [es.ProbeAnswer.in_flight(), es.ProbeAnswer.inconclusive(cause="busy"), es.ProbeAnswer.applied(1)]
    guard.reconcile()
    assert (states(guard), only(guard).probe_not_before_us) == (
        [OperationState.UNKNOWN], place.clock.now_us() + 100_000,
    )  # fmt: skip
    place.clock.pass_ms(100)
    guard.reconcile()
    assert states(guard) == [OperationState.MANUAL]
    place.clock.pass_ms(10_000)
    guard.reconcile()
    assert len(bank.asked) == 2
    assert codes(guard)[-1] == "probes_spent"


def test_the_back_off_doubles_and_the_targets_own_wait_goes_before_a_shorter_one(place: Place, bank: Bank) -> None:
    guard = place.open(bank.tool(probe_backoff_ms=100))
    lost(guard, bank, applied=True)
    bank.answers += [es.ProbeAnswer.in_flight() for _ in range(3)]
    bank.answers += [es.ProbeAnswer.in_flight(retry_after_ms=60_000)]
    waits = []
    for _ in range(4):
        guard.reconcile()
        waits.append((only(guard).probe_not_before_us - place.clock.now_us()) // 1_000)
        place.clock.pass_ms(waits[-1])
    assert waits == [100, 200, 400, 60_000]


def test_a_caller_that_comes_too_soon_does_not_ask_again(place: Place, bank: Bank) -> None:
    guard = place.open(bank.tool())
    lost(guard, bank, applied=True)
    bank.answers.append(es.ProbeAnswer.in_flight())
    for run_id in ("second", "third"):
        with guard.run(SPEC, run_id=run_id) as run:
            assert run.call(bank.pay, {"order": "a"}, tool="pay").reason is es.Reason.OUTCOME_UNKNOWN
    assert len(bank.asked) == 1


@pytest.mark.parametrize("answer", [RuntimeError("secret words"), None, True, "applied", es.ToolResult(value=1)])
def test_a_probe_that_breaks_or_answers_with_something_else_says_nothing(
    place: Place, bank: Bank, answer: object
) -> None:
    def broken(request: es.ProbeRequest) -> object:
        if isinstance(answer, Exception):
            raise answer
        return answer

    guard = place.open(bank.tool(probe=broken))
    lost(guard, bank, applied=True)
    guard.reconcile()
    assert (states(guard), only(guard).probe_count) == ([OperationState.UNKNOWN], 1)
    assert "secret" not in str(entries_of(guard)) + only(guard).reason
    assert guard.reconcile().probes[0].code == "not_before"


def test_a_probe_that_hangs_is_left_behind_at_its_deadline(place: Place, bank: Bank) -> None:
    free = threading.Event()

    def hangs(request: es.ProbeRequest) -> es.ProbeAnswer:
        free.wait(60)
        return es.ProbeAnswer.applied(1)

    guard = place.open(bank.tool(probe=hangs, deadline_ms=30))
    bank.fails_after.append(ConnectionResetError("reset"))
    with guard.run(SPEC, run_id="r") as run, pytest.raises(es.OutcomeUnknownError):
        run.call(bank.pay, {"order": "a"}, tool="pay")
    try:
        guard.reconcile()
        assert (states(guard), only(guard).reason) == ([OperationState.UNKNOWN], "deadline")
    finally:
        free.set()


def test_a_crashed_probe_counts_and_the_next_one_waits_for_its_deadline(place: Place, bank: Bank) -> None:
    guard = place.open(bank.tool(probes_max=2))
    record = lost(guard, bank, applied=True)
    begin = BeginProbe(
        run_id=record.run_id, now_us=place.clock.now_us(), operation_id=record.operation_id, attempt=1, fence=1,
        terms=terms_of(bank.tool(probes_max=2)), until_us=place.clock.now_us() + 10_000_000,
    )  # fmt: skip
    assert guard.store.transact(begin).result().number == 1
    assert guard.reconcile().probes[0].code == "asked_elsewhere"
    place.clock.pass_ms(10_000)
    guard.reconcile()
    assert (states(guard), len(bank.asked)) == ([OperationState.COMMITTED], 1)
    assert only(guard).probe_count == 2


def test_an_async_probe_is_asked_from_a_thread_and_from_an_event_loop(place: Place, bank: Bank) -> None:
    async def probe(request: es.ProbeRequest) -> es.ProbeAnswer:
        await asyncio.sleep(0)
        return bank.probe(request)

    guard = place.open(bank.tool(probe=probe))
    lost(guard, bank, applied=True, order="a")
    lost(guard, bank, applied=True, order="b", run_id="r2")
    with guard.run(SPEC, run_id="second") as run:
        assert run.call(bank.pay, {"order": "a"}, tool="pay").replayed

    async def main() -> None:
        async with guard.run(SPEC, run_id="third") as run:
            assert (await run.acall(bank.pay, {"order": "b"}, tool="pay")).replayed
        lost_again = await asyncio.to_thread(lost, guard, bank, applied=True, order="c", run_id="r3")
        found = await guard.areconcile()
        assert [item.operation_id for item in found.settled] == [lost_again.operation_id]

    asyncio.run(main())
    assert sorted(bank.effects.values()) == [1, 1, 1]


def test_the_agent_that_met_the_doubt_gets_what_the_probe_found_once_and_a_loop_is_still_a_loop(
    place: Place, bank: Bank
) -> None:
    """Nobody told it the result, so asking again is no second proposal of a committed write; the third is."""
    guard = place.open(bank.tool())
    bank.fails_after.append(ConnectionResetError("reset"))
    with pytest.raises(es.RunStopped) as stopped, guard.run(SPEC) as run:
        with pytest.raises(es.OutcomeUnknownError):
            run.call(bank.pay, {"order": "a"}, tool="pay", call_id="c1")
        assert run.call(bank.pay, {"order": "a"}, tool="pay", call_id="c2").value == {"paid": "a", "found": True}
        assert run.call(bank.pay, {"order": "a"}, tool="pay", call_id="c1").replayed
        run.call(bank.pay, {"order": "a"}, tool="pay", call_id="c3")
    assert stopped.value.envelope.terminal_reason is es.Reason.ALREADY_COMMITTED
    assert list(bank.effects.values()) == [1]


@pytest.mark.parametrize(
    ("answer", "value"),
    [
        (es.ProbeAnswer.applied(0), 0), (es.ProbeAnswer.applied(None), None), (es.ProbeAnswer.applied(""), ""),
        (es.ProbeAnswer.applied([]), []), (es.ProbeAnswer.applied(es.ToolResult(value=7)), 7),
        (es.ProbeAnswer.applied(has_value=False), None), (es.ProbeAnswer.applied(b"bytes"), None),
    ],
)  # fmt: skip
def test_what_a_probe_gives_is_replayed_also_when_it_is_falsy(
    place: Place, bank: Bank, answer: es.ProbeAnswer, value: object
) -> None:
    guard = place.open(bank.tool())
    lost(guard, bank, applied=True)
    bank.answers.append(answer)
    guard.reconcile()
    with guard.run(SPEC, run_id="second") as run:
        result = run.call(bank.pay, {"order": "a"}, tool="pay")
    assert (result.value, result.replayed, result.failed) == (value, True, False)
    assert len(bank.calls) == 1


def test_one_dead_target_does_not_starve_the_others(place: Place, bank: Bank) -> None:
    guard = place.open(bank.tool())
    asked = []

    def noting(request: es.ProbeRequest) -> es.ProbeAnswer:
        asked.append(request.tool)
        return es.ProbeAnswer.inconclusive()

    for number in range(3):
        lost(guard, bank, applied=True, order=f"a{number}", run_id=f"r{number}")
        place.clock.pass_ms(1)
    bank.fails_after.append(ConnectionResetError("reset"))
    tool = bank.tool(probe=noting)
    late = place.another(guard, es.Policy(limits=guard.policy.limits, tools={"pay": tool, "mail": tool}))
    with late.run(SPEC, run_id="mails") as run, pytest.raises(es.OutcomeUnknownError):
        run.call(bank.pay, {"order": "m"}, tool="mail")
    late.reconcile()
    assert asked == ["pay", "mail", "pay", "pay"]


def test_a_probe_of_a_declared_function_is_used_where_the_policy_has_none(place: Place, bank: Bank) -> None:
    @es.tool(name="pay", effect="write", idempotency_key="{order}", probe=bank.probe)
    def pay(order: str) -> object:
        return bank.pay(order)

    guard = place.open(es.ToolPolicy(effect="read"), name="else")
    bank.fails_after.append(ConnectionResetError("reset"))
    with guard.run(SPEC, run_id="r") as run, pytest.raises(es.OutcomeUnknownError):
        run.call(pay, {"order": "a"})
    assert guard.reconcile().settled == ()
    assert guard.reconcile(tools=[pay]).settled[0].state is OperationState.COMMITTED


def test_at_most_once_never_asks_whatever_else_is_declared(place: Place, bank: Bank) -> None:
    guard = place.open(bank.tool(outcome_class="at_most_once"))
    lost(guard, bank, applied=True)
    guard.reconcile()
    assert (states(guard), bank.asked) == ([OperationState.MANUAL], [])
