"""The corners of the core that no story reaches: what cannot be, what is refused, what stays as it is."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest

import endstop as es
from endstop.core import ending
from endstop.core.entries import entry_bytes
from endstop.core.events import TurnProposal, Verdict
from endstop.core.operation_answers import replayed
from endstop.core.operation_rules import settle_attempt
from endstop.core.operation_terms import DEFAULT_TERMS, OperationTerms, terms_of
from endstop.core.pipeline import CallRequest, guarded_call
from endstop.core.probe_flow import ProbeJob, probed
from endstop.core.propose import given_key_of, propose
from endstop.core.reasons import Action, Reason
from endstop.core.records import OperationRecord
from endstop.core.steps import CallReserved
from endstop.core.steps_life import NewRun, ResumeRun, open_run
from endstop.core.steps_operations import EXPIRED_MAX, BeginProbe, ExpireResults
from endstop.core.steps_turn import ReserveTurn
from endstop.core.transitions import OperationEvent, OperationState
from endstop.store.registry import open_store
from endstop.store.sqlite import SqliteStore
from endstop.store.sqlite.incarnation import Incarnation
from tests.core.stage import KEY, POLICY, SPEC, STORE_KEY, Stage

WRITE = es.ToolPolicy(effect="write", idempotency_key="{n}")


def an_operation(state: OperationState = OperationState.UNKNOWN, **changes: object) -> OperationRecord:
    record = OperationRecord(
        operation_id="op_1", tool="save", key_digest="k", fingerprint="f", state=state, run_id="r1", generation=1,
        call_id="c1", owner_id="w1", settled_at_us=5,
    )  # fmt: skip
    return replace(record, **changes)  # type: ignore[arg-type]  # fields by name


# -- What cannot be is a bug, and says so


def test_an_end_without_an_envelope_is_a_bug() -> None:
    stage = Stage()
    stage.txn.evidence.ended = "fatal"
    with pytest.raises(es.InvariantError, match="without an envelope"):
        ending.end_run(stage.txn, Verdict(action=Action.STOP, reason=Reason.FATAL), 1)


def test_an_entry_outside_the_profile_is_a_bug() -> None:
    with pytest.raises(es.InvariantError, match="profile"):
        entry_bytes(
            "control", ledger="l", run_id="r", seq=0, ts_us=1, actor="a", policy="p", generation=1,
            fields={"why": "ü"},
        )  # fmt: skip


def test_an_outcome_of_an_operation_that_is_not_stored_is_a_bug() -> None:
    stage = Stage()
    stage.txn.operation = None
    with pytest.raises(es.InvariantError, match="not stored"):
        settle_attempt(
            stage.txn, an_operation(), es.ToolResult(), OperationEvent.APPLIED, 1, key=STORE_KEY, actor="agent"
        )


def test_a_replay_without_its_operation_is_a_bug() -> None:
    proposal = propose(es.ToolCall(tool="save", args={"n": 1}, call_id="c1"), WRITE, run_key=KEY, store_key=STORE_KEY)
    flow = guarded_call(
        CallRequest(
            run_id="r1", policy=POLICY, tool=WRITE, proposal=proposal, operation_id="op_1", owner_id="w1", run_key=KEY,
            call=lambda: None, now_us=lambda: 1,
        )
    )  # fmt: skip
    next(flow)
    with pytest.raises(es.InvariantError, match="replay"):
        flow.send(CallReserved(verdict=Verdict(action=Action.REPLAY)))


def test_a_working_copy_that_no_store_filled_knows_no_spec() -> None:
    new = NewRun(
        run_id="r1", spec=SPEC, policy_digest="p", limits=POLICY.limits, agent="main", labels=(), owner_id="w1",
        now_us=1, run_key=KEY,
    )  # fmt: skip
    assert open_run(new, ledger="l").load_spec() is None


# -- What is refused, and what stays as it is


def test_an_outcome_that_says_nothing_new_changes_nothing() -> None:
    stage = Stage()
    stage.txn.operation = an_operation(OperationState.UNKNOWN)
    lost = settle_attempt(
        stage.txn, an_operation(), es.ToolResult(), OperationEvent.LOST, 1, key=STORE_KEY, actor="agent"
    )
    assert lost
    assert stage.txn.operations == []


def test_a_withdrawn_operation_answers_that_it_was_never_sent() -> None:
    answer = replayed(an_operation(OperationState.CANCELLED), STORE_KEY)
    assert (answer.side_effect_committed, answer.operation_id) == (False, "op_1")


def test_arguments_that_cannot_be_kept_are_not_kept_for_a_probe() -> None:
    tool = es.ToolPolicy(effect="write", idempotency_key="{n}", probe="a:b", outcome_class="probeable")
    assert terms_of(tool, {"n": float("nan")}).kept_args is None
    assert terms_of(tool, "{").kept_args is None


def test_an_unknown_waiter_is_refused() -> None:
    with pytest.raises(es.PolicyInvalidError, match="waiter"):
        es.ToolPolicy(waiter="queue")


def test_only_unknown_operations_are_asked_for() -> None:
    job = ProbeJob(operation=an_operation(OperationState.COMMITTED), tool=WRITE, now_us=lambda: 1, store_key=STORE_KEY)
    with pytest.raises(StopIteration) as done:
        next(probed(job))
    assert done.value.value.code == "not_unknown"


def test_a_probes_answer_is_checked() -> None:
    with pytest.raises(es.UsageError, match="retry_after_ms"):
        es.ProbeAnswer.in_flight(retry_after_ms=-1)
    with pytest.raises(es.UsageError, match="receipt"):
        es.ProbeAnswer.applied(receipt="x" * 10_000)


def test_a_key_that_is_no_text_is_missing() -> None:
    digest, missing = given_key_of("save", "\ud800", WRITE, key=STORE_KEY)
    assert digest is None
    assert missing is not None


def test_a_limit_that_cannot_be_raised_so_is_refused() -> None:
    stage = Stage()
    stage.txn.state = es.RunState.STOPPED
    with pytest.raises(es.ResumeRefusedError, match="cannot be resumed"):
        stage.apply(ResumeRun(run_id="r1", now_us=stage.at(), change="limit:no_such=3", reason="try"))


def test_a_spent_budget_of_probes_makes_it_a_persons() -> None:
    stage = Stage()
    stage.operations["op_1"] = an_operation(probe_count=DEFAULT_TERMS.probes_max)
    begun = stage.apply(
        BeginProbe(
            run_id="r1", now_us=stage.at(), operation_id="op_1", attempt=1, fence=1, terms=OperationTerms(),
            until_us=stage.now_us + 1,
        )
    )  # fmt: skip
    assert begun.code == "probes_spent"
    assert begun.operation is not None
    assert begun.operation.state is OperationState.MANUAL


def test_retention_works_in_portions() -> None:
    stage = Stage()
    for number in range(EXPIRED_MAX + 5):
        name = f"op_{number}"
        stage.operations[name] = an_operation(OperationState.COMMITTED, operation_id=name)
    assert stage.apply(ExpireResults(run_id="r1", now_us=stage.at(), before_us=10)) == EXPIRED_MAX


def test_the_input_of_a_model_call_leaves_its_digest() -> None:
    stage = Stage()
    stage.apply(
        ReserveTurn(
            run_id="r1", now_us=stage.at(), policy=POLICY, proposal=TurnProposal(call_id="t1"), input_digest="d" * 32
        )
    )
    assert [digest for _, digest in stage.txn.input_digests] == ["d" * 32]


def test_operations_of_another_run_stay_out_of_the_envelope() -> None:
    stage = Stage()
    foreign = an_operation(OperationState.COMMITTED, operation_id="op_2", run_id="r2")
    stage.txn.operations.append((foreign, 1))
    envelope = ending.end_run(stage.txn, Verdict(action=Action.STOP, reason=Reason.FATAL), 1)
    assert envelope.operations == ()


def test_records_publish_themselves() -> None:
    with es.open("memory:", policy=POLICY) as guard, guard.run(es.Spec(
        what_it_does="a", what_it_does_not="b", done_looks_like="c"
    )) as run:  # fmt: skip
        run.call(lambda n: n, {"n": 1}, tool="save")
        assert run.record().to_json()["run_id"] == run.run_id
        assert guard.operations()[0].to_json()["state"] == "COMMITTED"


# -- Opening a store


def test_a_postgresql_store_without_its_extra_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.startswith(("endstop.store.postgres", "psycopg"))]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "psycopg", None)
    with pytest.raises(es.UsageError, match="extra"):
        open_store("postgresql://127.0.0.1:9/none", new_key=lambda: b"k" * 32, now_us=lambda: 1)


def test_another_missing_module_is_no_missing_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "endstop.store.postgres", None)
    with pytest.raises(ModuleNotFoundError):
        open_store("postgresql://127.0.0.1:9/none", new_key=lambda: b"k" * 32, now_us=lambda: 1)


def test_a_postgresql_server_that_is_not_there_is_unavailable() -> None:
    pytest.importorskip("psycopg")
    with pytest.raises(es.StoreError):
        open_store("postgresql://127.0.0.1:9/none?connect_timeout=1", new_key=lambda: b"k" * 32, now_us=lambda: 1)


def test_a_store_whose_mark_cannot_be_read_is_not_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> None:
        msg = "the mark is gone"
        raise es.StoreUnavailableError(msg)

    monkeypatch.setattr(Incarnation, "enter", fails)
    with pytest.raises(es.StoreUnavailableError):
        SqliteStore(tmp_path / "s.db", new_key=lambda: b"k" * 32, now_us=lambda: 1)
    monkeypatch.undo()
    SqliteStore(tmp_path / "s.db", new_key=lambda: b"k" * 32, now_us=lambda: 1).close()


def test_an_acceptance_that_fails_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = SqliteStore(tmp_path / "s.db", new_key=lambda: b"k" * 32, now_us=lambda: 1)
    monkeypatch.setattr("endstop.store.sqlite.incarnation.entry_bytes", lambda *_, **__: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        store.accept_restore(actor="operator", reason="try")
    monkeypatch.undo()
    assert len(store.entries().result()) == 1
    store.close()
