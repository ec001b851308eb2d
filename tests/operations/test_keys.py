"""Keys: what names an operation, what is refused under one, and what a target gets of it."""

from __future__ import annotations

import orjson
import pytest

import endstop as es
from endstop.core.transitions import OperationState
from tests.operations.scenes import SPEC, Bank, Place, bury, entries_of, lost, only, states


def test_a_key_that_the_caller_gives_goes_before_the_declared_one(place: Place, bank: Bank) -> None:
    guard = place.open(bank.tool())
    with guard.run(SPEC, run_id="one") as run:
        first = run.call(bank.pay, {"order": "a"}, tool="pay", idempotency_key="order-1")
        other = run.call(bank.pay, {"order": "a"}, tool="pay", idempotency_key="order-2")
        declared = run.call(bank.pay, {"order": "a", "amount": 2}, tool="pay")
    assert len({first.operation_id, other.operation_id, declared.operation_id}) == 3
    with guard.run(SPEC, run_id="two") as run:
        assert run.call(bank.pay, {"order": "a"}, tool="pay", idempotency_key="order-1").replayed
    assert len(bank.calls) == 3


def test_a_given_key_makes_a_write_out_of_a_template_that_is_missing(place: Place, bank: Bank) -> None:
    guard = place.open(bank.tool(idempotency_key=None))
    with guard.run(SPEC) as run:
        assert run.call(bank.pay, {"order": "a"}, tool="pay").reason is es.Reason.KEY_MISSING
        assert run.call(bank.pay, {"order": "a"}, tool="pay", idempotency_key="k").value


def test_an_undeclared_tool_with_a_given_key_is_keyed_across_runs(place: Place, bank: Bank) -> None:
    guard = place.open(bank.tool())
    for run_id, replayed in (("one", False), ("two", True)):
        with guard.run(SPEC, run_id=run_id) as run:
            result = run.call(bank.pay, {"order": "a"}, tool="other", idempotency_key="k")
            assert result.replayed is replayed
    assert len(bank.calls) == 1


@pytest.mark.parametrize("key", ["", "  ", "k" * 256, "é" * 128, 7, b"bytes"], ids=repr)
@pytest.mark.parametrize("tool", ["pay", "undeclared"])
def test_a09_a_given_key_that_is_none_is_refused_with_the_fix_named(
    place: Place, bank: Bank, key: object, tool: str
) -> None:
    guard = place.open(bank.tool())
    with guard.run(SPEC) as run:
        refused = run.call(bank.pay, {"order": "a"}, tool=tool, idempotency_key=key)  # type: ignore[arg-type]  # on purpose
    assert refused.reason is es.Reason.KEY_MISSING
    assert "idempotency_key of 1 to 255 bytes" in (refused.message or "")
    assert bank.calls == []


@pytest.mark.parametrize("key", ["k" * 255, "é" * 127, "a:b"], ids=ascii)
def test_any_text_of_255_bytes_is_a_key(place: Place, bank: Bank, key: str) -> None:
    guard = place.open(bank.tool())
    with guard.run(SPEC) as run:
        assert run.call(bank.pay, {"order": "a"}, tool="pay", idempotency_key=key).operation_id


@pytest.mark.parametrize("args", [{}, {"order": None}, {"order": ""}, {"order": " "}], ids=repr)
def test_a09_a_field_without_a_value_is_refused(place: Place, args: dict[str, object]) -> None:
    called = []
    guard = place.open(es.ToolPolicy(effect="write", idempotency_key="{order}"))
    with guard.run(SPEC) as run:
        refused = run.call(lambda **given: called.append(given), args, tool="pay")
    assert (refused.reason, called) == (es.Reason.KEY_MISSING, [])
    assert "order" in (refused.message or "")


def test_a_key_is_never_stored_or_noted_as_it_was_given(place: Place, bank: Bank) -> None:
    guard = place.open(bank.tool())
    with guard.run(SPEC) as run:
        run.call(bank.pay, {"order": "a"}, tool="pay", idempotency_key="a-secret-key")
    leaves = b"".join(entry.leaf for entry in guard.store.entries(limit=10_000).result())
    assert b"a-secret-key" not in leaves
    assert "a-secret-key" not in repr(only(guard))


def mismatch(place: Place, bank: Bank, state: OperationState, monkeypatch: pytest.MonkeyPatch) -> es.ToolResult[object]:
    """Call the key of an operation in `state` with other arguments."""
    undone = es.ToolResult(error_class="conflict", side_effect_committed=False, message="m")
    policy = bank.tool(probe=None, attempts_max=1)
    guard = place.open(policy)
    answers: dict[OperationState, object] = {
        OperationState.COMMITTED: "paid", OperationState.TOMBSTONE: "paid", OperationState.FAILED_RETRYABLE: undone,
        OperationState.FAILED_FINAL: es.ToolResult(status="fatal"), OperationState.POISONED: undone,
    }  # fmt: skip
    inner: list[es.ToolResult[object]] = []

    def pay(order: str, amount: int = 1) -> object:
        if state is OperationState.EXECUTING:
            inner.append(run.call(bank.pay, {"order": "a", "amount": 2}, tool="pay", call_id="inner"))
        if state in (OperationState.UNKNOWN, OperationState.MANUAL):
            raise ConnectionResetError
        return answers.get(state, "paid")

    try:
        with guard.run(SPEC, run_id="one") as run:
            run.call(pay, {"order": "a", "amount": 1}, tool="pay")
    except (es.OutcomeUnknownError, es.RunStopped):
        pass
    if inner:
        return inner[0]
    if state is OperationState.MANUAL:
        guard.reconcile()
    if state is OperationState.TOMBSTONE:
        place.clock.pass_ms(10)
        assert guard.expire_results(older_than_ms=5) == 1
    if state is OperationState.POISONED:
        with guard.run(SPEC, run_id="poison") as run:
            run.call(pay, {"order": "a", "amount": 1}, tool="pay")
    assert states(guard) == [state]
    with guard.run(SPEC, run_id="other") as run:
        return run.call(bank.pay, {"order": "a", "amount": 2}, tool="pay")


@pytest.mark.parametrize(
    "state", [state for state in OperationState if state not in (OperationState.RESERVED, OperationState.CANCELLED)]
)
def test_a05_other_arguments_under_one_key_are_refused_in_every_state(
    place: Place, bank: Bank, state: OperationState, monkeypatch: pytest.MonkeyPatch
) -> None:
    refused = mismatch(place, bank, state, monkeypatch)
    assert (refused.reason, refused.failed) == (es.Reason.KEY_MISMATCH, True)
    assert bank.calls == []


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ({"b": 1, "a": 2}, {"a": 2, "b": 1}, True),
        ({"a": "e\u0301"}, {"a": "\u00e9"}, True),
        ({"a": 1}, {"a": 1.0}, False),
        ({"a": 0.0}, {"a": -0.0}, False),
        ({"a": 1}, {"a": True}, False),
        ({"a": 1}, {}, False),
        ({"a": [1, 2]}, {"a": [2, 1]}, False),
    ],
    ids=repr,
)
def test_a06_equal_arguments_are_equal_by_the_canonical_rule_alone(
    place: Place, one: dict[str, object], other: dict[str, object], same: bool
) -> None:
    calls = []
    guard = place.open(es.ToolPolicy(effect="write", idempotency_key="{order}"))
    for run_id, args in (("one", one), ("two", other)):
        with guard.run(SPEC, run_id=run_id) as run:
            result = run.call(lambda **given: calls.append(given), {"order": "x", **args}, tool="pay")
    assert (result.replayed, result.reason) == ((True, None) if same else (False, es.Reason.KEY_MISMATCH))
    assert len(calls) == 1


def test_a07_the_same_write_with_a_reworded_argument_after_a_resume_is_refused(place: Place, bank: Bank) -> None:
    guard = place.open(bank.tool(probe=None))
    with guard.run(SPEC, run_id="r") as run:
        run.call(bank.pay, {"order": "a", "amount": 1}, tool="pay", call_id="c1")
    with guard.run(SPEC, run_id="r") as run:
        assert run.generation == 2
        refused = run.call(bank.pay, {"order": "a", "amount": 2}, tool="pay", call_id="c1")
    assert (refused.reason, len(bank.calls)) == (es.Reason.KEY_MISMATCH, 1)


def test_a08_two_equal_writes_of_one_turn_are_made_once(place: Place, bank: Bank) -> None:
    guard = place.open(bank.tool())
    with guard.run(SPEC) as run:
        run.call(bank.pay, {"order": "a"}, tool="pay", round_id="t1")
        second = run.call(bank.pay, {"order": "a"}, tool="pay", round_id="t1")
    assert (second.reason, len(bank.calls)) == (es.Reason.ROUND_DUPLICATE, 1)


@pytest.mark.parametrize(
    ("scope", "labels", "replayed"),
    [
        ("tenant", ({"tenant": "x"}, {"tenant": "y"}), False), ("tenant", ({"tenant": "x"}, {"tenant": "x"}), True),
        ("tenant", ({}, {}), True), ("run", ({}, {}), False),
        ("conversation", ({"conversation": "1"}, {"conversation": "1"}), True),
        ("conversation", ({"conversation": "1"}, {"conversation": "2"}), False),
    ],
)  # fmt: skip
def test_a12_a_key_is_one_operation_within_its_scope_and_another_outside(
    place: Place, bank: Bank, scope: str, labels: tuple[dict[str, str], dict[str, str]], replayed: bool
) -> None:
    guard = place.open(bank.tool(scope=scope))
    for run_id, label in zip(("one", "two"), labels, strict=True):
        with guard.run(SPEC, run_id=run_id, labels=label) as run:
            result = run.call(bank.pay, {"order": "a"}, tool="pay")
    assert result.replayed is replayed
    assert len(set(bank.calls)) == (1 if replayed else 2)


def test_a15_a_tool_that_calls_itself_under_its_own_key_is_refused_and_does_not_hang(place: Place) -> None:
    guard = place.open(es.ToolPolicy(effect="write", idempotency_key="{order}", waiter="wait", wait_ms=40))
    inner = []

    def pay(order: str) -> str:
        inner.append(run.call(pay, {"order": order}, tool="pay"))
        return "outer"

    with guard.run(SPEC) as run:
        assert run.call(pay, {"order": "a"}, tool="pay").value == "outer"
    assert [item.reason for item in inner] == [es.Reason.IN_PROGRESS]


def test_the_key_that_a_target_gets_is_one_in_every_attempt_and_says_nothing(
    place: Place, bank: Bank, monkeypatch: pytest.MonkeyPatch
) -> None:
    guard = place.open(bank.tool())
    lost(guard, bank, applied=False)
    bury(guard, monkeypatch)
    with guard.run(SPEC, run_id="second") as run:
        run.call(bank.pay, {"order": "a"}, tool="pay")
    assert bank.calls == [bank.calls[0]] * 2
    assert bank.calls[0] == only(guard).key_digest
    assert len(bank.calls[0]) == 32
    assert orjson.dumps(entries_of(guard)).count(b'"order"') == 0
