"""What an authorised person may settle, with which proof, and what is kept of it."""

from __future__ import annotations

import pytest

import endstop as es
from endstop.core.transitions import OperationState
from endstop.runtime.settling import operation_history
from tests.operations.scenes import SPEC, Bank, Place, bury, codes, entries_of, lost, only, states

SAID = {"reason": "asked the bank", "evidence": "statement 2026-05, line 4", "actor": "ann"}


def test_f04_a_person_who_found_it_applied_settles_it_for_good(place: Place, bank: Bank) -> None:
    guard = place.open(bank.tool(probe=None))
    record = lost(guard, bank, applied=True)
    guard.reconcile()
    settled = guard.settle_operation(record.operation_id, outcome="applied", receipt="tx-9", **SAID)
    assert (settled.state, settled.settled_by, settled.receipt) == (OperationState.COMMITTED, "person", "tx-9")
    with guard.run(SPEC, run_id="second") as run:
        result = run.call(bank.pay, {"order": "a"}, tool="pay")
    assert (result.replayed, result.side_effect_committed, len(bank.calls)) == (True, True, 1)


def test_not_applied_needs_the_old_worker_dead_or_a_reason_why_it_cannot_matter(place: Place, bank: Bank) -> None:
    guard = place.open(bank.tool(probe=None))
    record = lost(guard, bank, applied=False)
    with pytest.raises(es.UsageError, match="is not proven dead"):
        guard.settle_operation(record.operation_id, outcome="not_applied", **SAID)
    assert states(guard) == [OperationState.UNKNOWN]
    guard.settle_operation(record.operation_id, outcome="not_applied", exclusion="key_voided", **SAID)
    with guard.run(SPEC, run_id="second") as run:
        assert run.call(bank.pay, {"order": "a"}, tool="pay").value == {"paid": "a", "amount": 1}
    assert list(bank.effects.values()) == [1]


def test_a_dead_worker_is_such_a_reason(place: Place, bank: Bank, monkeypatch: pytest.MonkeyPatch) -> None:
    guard = place.open(bank.tool(probe=None))
    record = lost(guard, bank, applied=False)
    bury(guard, monkeypatch)
    guard.settle_operation(record.operation_id, outcome="not_applied", **SAID)
    assert (states(guard), entries_of(guard)[-1]["exclusion"]) == ([OperationState.FAILED_RETRYABLE], "owner_dead")


def test_the_ledger_keeps_who_and_digests_and_none_of_the_words(place: Place, bank: Bank) -> None:
    guard = place.open(bank.tool(probe=None))
    record = lost(guard, bank, applied=True)
    guard.settle_operation(record.operation_id, outcome="applied", **SAID)
    entry = entries_of(guard)[-1]
    assert (entry["actor"], entry["code"]) == ("ann", "hand_applied")
    assert (entry["from"], entry["to"]) == ("UNKNOWN", "COMMITTED")
    assert len(entry["why"]) == len(entry["proof"]) == 32
    leaves = b"".join(item.leaf for item in guard.store.entries(limit=1_000).result())
    assert b"asked the bank" not in leaves
    assert b"statement" not in leaves


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"outcome": "maybe"}, "one of applied, not_applied"), ({"reason": " "}, "needs a reason"),
        ({"evidence": ""}, "needs evidence"), ({"exclusion": "sure"}, "an exclusion is one of"),
        ({"receipt": "r" * 256}, "a receipt has 255"), ({"reason": "r" * 10_001}, "needs a reason"),
    ],
)  # fmt: skip
def test_what_is_missing_is_named_and_nothing_changes(
    place: Place, bank: Bank, wrong: dict[str, str], says: str
) -> None:
    guard = place.open(bank.tool(probe=None))
    record = lost(guard, bank, applied=True)
    with pytest.raises(es.UsageError, match=says):
        guard.settle_operation(record.operation_id, **{"outcome": "applied", **SAID, **wrong})
    assert (states(guard), codes(guard)) == ([OperationState.UNKNOWN], [])


def test_an_operation_that_is_not_in_doubt_or_not_there_is_refused(place: Place, bank: Bank) -> None:
    guard = place.open(bank.tool())
    with pytest.raises(es.RunNotFoundError):
        guard.settle_operation("op_none", outcome="applied", **SAID)
    with guard.run(SPEC, run_id="r") as run:
        run.call(bank.pay, {"order": "a"}, tool="pay")
    with pytest.raises(es.UsageError, match="is COMMITTED in attempt 1"):
        guard.settle_operation(only(guard).operation_id, outcome="not_applied", **SAID)


def test_an_executing_operation_of_a_dead_worker_is_settled_too(
    place: Place, bank: Bank, monkeypatch: pytest.MonkeyPatch
) -> None:
    guard = place.open(bank.tool(probe=None))
    scope = guard.run(SPEC, run_id="r")
    run = scope.__enter__()
    seen = []

    def pay(order: str) -> str:
        monkeypatch.setattr(guard.world.board, "is_alive", lambda owner_id: False)
        seen.append(guard.settle_operation(only(guard).operation_id, outcome="applied", **SAID).state)
        return "late"

    result = run.call(pay, {"order": "a"}, tool="pay")
    assert (seen, result.value) == ([OperationState.COMMITTED], "late")


def test_the_history_follows_an_operation_through_all_its_runs(
    place: Place, bank: Bank, monkeypatch: pytest.MonkeyPatch
) -> None:
    guard = place.open(bank.tool())
    lost(guard, bank, applied=False, run_id="one")
    bury(guard, monkeypatch)
    with guard.run(SPEC, run_id="two") as run:
        run.call(bank.pay, {"order": "a"}, tool="pay")
        run.call(bank.pay, {"order": "b"}, tool="pay")
    record = next(item for item in guard.operations() if item.attempt == 2)
    kinds = [(entry.index, entry.leaf) for entry in operation_history(guard, record)]
    types = [leaf.split(b'"type":"')[1].split(b'"')[0].decode() for _, leaf in kinds]
    assert types == [
        "call_intent", "result", "call_refused", "operation", "operation", "operation", "call_intent", "result",
    ]  # fmt: skip
