"""Stored results: what is replayed, what is checked, what retention leaves, and what is never run again."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import apsw
import pytest

import endstop as es
from endstop.core.operation_extra import extra_text, same_extra, with_extra
from endstop.core.transitions import OperationState
from tests.operations.scenes import SPEC, Bank, Place, codes, lost, only, states


def again(guard: es.Guard, bank: Bank, run_id: str = "again") -> es.ToolResult[object]:
    with guard.run(SPEC, run_id=run_id) as run:
        return run.call(bank.pay, {"order": "a"}, tool="pay")


def paid(place: Place, bank: Bank, **more: object) -> es.Guard:
    guard = place.open(bank.tool(**more))
    with guard.run(SPEC, run_id="first") as run:
        run.call(bank.pay, {"order": "a"}, tool="pay")
    return guard


@pytest.mark.parametrize("value", [None, 0, False, "", [], {}], ids=repr)
def test_a10_a_falsy_result_is_a_result(place: Place, value: object) -> None:
    calls = []
    guard = place.open(es.ToolPolicy(effect="write", idempotency_key="{order}"))

    def pay(order: str) -> object:
        calls.append(order)
        return value

    for run_id in ("one", "two"):
        with guard.run(SPEC, run_id=run_id) as run:
            result = run.call(pay, {"order": "a"}, tool="pay")
            assert (result.value, type(result.value)) == (value, type(value))
    assert (calls, result.replayed) == (["a"], True)


def test_a_result_has_a_digest_and_two_equal_results_of_two_stores_have_two(tmp_path: Path, bank: Bank) -> None:
    digests = set()
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        place = Place("sqlite", tmp_path / name)
        digests.add(only(paid(place, bank)).result_digest)
        place.close()
    assert len(digests) == 2
    assert None not in digests


@pytest.mark.parametrize(
    "change",
    [
        "result = CAST('{\"value\":\"another\"}' AS BLOB)", "result = NULL", "result_digest = 'another'",
        "result = x'00'",
    ],
)  # fmt: skip
def test_f13_a_result_that_does_not_fit_its_digest_is_corrupt_and_never_run_again(
    tmp_path: Path, bank: Bank, change: str
) -> None:
    place = Place("sqlite", tmp_path)
    paid(place, bank)
    place.close()
    damage(tmp_path / "state.db", f"UPDATE operation SET {change}")
    guard = place.open(bank.tool())
    with pytest.raises(es.StoreCorruptError, match="does not fit its digest"):
        again(guard, bank)
    assert len(bank.calls) == 1
    place.close()


@pytest.mark.parametrize(
    "change",
    [
        "state = 'DONE'", "extra = 'no json'", "extra = '[]'", "extra = '{\"later\":1}'", "extra = '{\"receipt\":1}'",
        "extra = '{\"probe_count\":\"1\"}'",
    ],
)  # fmt: skip
def test_f13_a_row_that_cannot_be_read_is_never_taken_for_an_absent_one(
    tmp_path: Path, bank: Bank, change: str
) -> None:
    place = Place("sqlite", tmp_path)
    paid(place, bank)
    place.close()
    damage(tmp_path / "state.db", f"UPDATE operation SET {change}")
    guard = place.open(bank.tool())
    with pytest.raises(es.StoreCorruptError):
        again(guard, bank)
    assert len(bank.calls) == 1
    place.close()


def damage(path: Path, sql: str) -> None:
    connection = apsw.Connection(str(path))
    connection.execute(sql)
    connection.close()


def test_z09_after_retention_the_answer_says_that_it_was_applied_and_nothing_runs(place: Place, bank: Bank) -> None:
    guard = paid(place, bank)
    before = only(guard)
    place.clock.pass_ms(1_000)
    assert guard.expire_results(older_than_ms=2_000) == 0
    assert guard.expire_results(older_than_ms=500) == 1
    assert guard.expire_results(older_than_ms=500) == 0
    after = only(guard)
    assert (after.state, after.result, after.outcome) == (OperationState.TOMBSTONE, None, "applied")
    assert (after.key_digest, after.fingerprint, after.result_digest) == (
        before.key_digest, before.fingerprint, before.result_digest,
    )  # fmt: skip
    result = again(guard, bank)
    assert (result.value, result.replayed, result.side_effect_committed, result.failed) == (None, True, True, False)
    assert "no longer kept" in (result.message or "")
    assert len(bank.calls) == 1
    assert codes(guard) == ["result_expired"]


def test_a_refusal_of_which_the_words_are_gone_is_still_a_refusal(place: Place) -> None:
    calls = []
    guard = place.open(es.ToolPolicy(effect="write", idempotency_key="{order}"))

    def pay(order: str) -> es.ToolResult[object]:
        calls.append(order)
        return es.ToolResult(status="fatal", message="no such account")

    with pytest.raises(es.RunStopped), guard.run(SPEC, run_id="one") as run:
        run.call(pay, {"order": "a"}, tool="pay")
    assert states(guard) == [OperationState.FAILED_FINAL]
    place.clock.pass_ms(10)
    guard.expire_results(older_than_ms=1)
    assert states(guard) == [OperationState.TOMBSTONE]
    with guard.run(SPEC, run_id="two") as run:
        result = run.call(pay, {"order": "a"}, tool="pay")
    assert (result.status, result.side_effect_committed, result.replayed) == (es.Status.FATAL, False, True)
    assert calls == ["a"]


def test_z10_an_operation_in_doubt_never_expires(place: Place, bank: Bank) -> None:
    guard = place.open(bank.tool())
    lost(guard, bank, applied=True)
    place.clock.pass_ms(10**9)
    assert guard.expire_results(older_than_ms=1) == 0
    assert states(guard) == [OperationState.UNKNOWN]


def test_the_extra_text_is_read_back_as_it_was_written(place: Place, bank: Bank) -> None:
    guard = place.open(bank.tool())
    record = lost(guard, bank, applied=True)
    bare = replace(record, args=None, attempt_id="")
    assert extra_text(bare) is None
    named = replace(bare, attempt_id="7")
    assert with_extra(bare, extra_text(named)) == named
    assert with_extra(bare, None) is bare
    full = replace(
        named, probe_count=3, probe_not_before_us=9, probe_until_us=8, settled_by="person", receipt="\u00e9",
        args='{"a":"\u00e9"}'.encode(),
    )  # fmt: skip
    assert with_extra(bare, extra_text(full)) == full
    assert same_extra(full, full)
    assert not same_extra(full, bare)
