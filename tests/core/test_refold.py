"""Folding entries back, entry by entry; the long random histories are in tests/runtime/test_refold.py."""

from __future__ import annotations

import orjson
import pytest

import endstop as es
from endstop.core.entries import ENTRY_TYPES, entry_bytes
from endstop.core.evidence import Evidence
from endstop.core.refold import fold_entry, refold
from endstop.core.steps_life import JoinRun, LeaveRun, RecoverRun
from endstop.errors import StoreCorruptError
from tests.core.stage import POLICY, SPEC, Stage


def test_a_gap_is_a_corrupt_ledger() -> None:
    stage = Stage()
    stage.reserve()
    with pytest.raises(StoreCorruptError, match="entry 0 of the run is missing"):
        refold(stage.leaves[1:], POLICY.limits)
    with pytest.raises(StoreCorruptError, match="gap"):
        refold([stage.leaves[0], stage.leaves[0]], POLICY.limits)


def test_an_entry_of_an_unknown_type_is_refused() -> None:
    with pytest.raises(StoreCorruptError, match="unknown to this version"):
        fold_entry(Evidence(), {"type": "novelty", "seq": 0}, POLICY.limits, set())


@pytest.mark.parametrize("kind", ENTRY_TYPES)
def test_every_type_of_entry_has_its_fold(kind: str) -> None:
    """Fields as thin as they may be; what is asked here is that no type is forgotten."""
    leaf = entry_bytes(
        kind, ledger="l", run_id="r", seq=0, ts_us=5, actor="a", policy="p", generation=1,
        fields={
            "tool": "t", "effect": "read", "fp": "f", "call": "c", "status": "progress", "answer": "x",
            "reason": "fatal" if kind in ("stop", "complete") else None, "action": "block", "owner": "w",
        },
    )  # fmt: skip
    refold([leaf], es.Limits())


def test_time_stands_still_only_when_the_last_worker_has_gone() -> None:
    stage = Stage()
    for owner in ("w2", "w3"):
        stage.apply(JoinRun(run_id="r1", now_us=stage.at(), spec=SPEC, policy_digest=POLICY.digest(), owner_id=owner))
    stage.apply(RecoverRun(run_id="r1", now_us=stage.at(), dead_owners=frozenset({"w2"})))
    stage.apply(LeaveRun(run_id="r1", now_us=stage.at(), owner_id="w1"))
    assert refold(stage.leaves, POLICY.limits).running_since_us == stage.txn.evidence.running_since_us > 0
    stage.apply(LeaveRun(run_id="r1", now_us=stage.at(), owner_id="w3"))
    folded = refold(stage.leaves, POLICY.limits)
    assert folded.running_since_us == stage.txn.evidence.running_since_us == 0
    assert folded.elapsed_us == stage.txn.evidence.elapsed_us


def test_an_operators_order_alone_changes_no_evidence() -> None:
    """The store notes the order in the run's own sequence; whether the run shows it is an entry of its own."""
    stage = Stage()
    order = {"order": "freeze", "control": "id1"}
    shown = {"order": "freeze"}
    for fields, frozen in ((order, False), (shown, True)):
        leaf = entry_bytes(
            "control", ledger="l", run_id="r1", seq=1, ts_us=5, actor="a", policy="p", generation=1, fields=dict(fields)
        )
        assert refold([*stage.leaves, leaf], POLICY.limits).frozen is frozen
    assert orjson.loads(stage.leaves[0])["type"] == "run_open"


def test_a_warning_on_a_result_is_counted_as_one() -> None:
    policy = es.Policy(
        limits=POLICY.limits, tools={"look": es.ToolPolicy(effect="read")}, on_trip=("warn", "block", "stop")
    )
    stage = Stage(policy)
    for number in range(4):
        proposal, reserved = stage.reserve("look", f"c{number}", q=number)
        stage.settle(proposal, reserved.operation, es.ToolResult(error_class="not_found", message="none"))
    assert stage.txn.evidence.warned == 1
    assert refold(stage.leaves, policy.limits).warned == 1
