"""How a run ends: once, with everything that was so at that moment, and without a word that is not ours to keep."""

from __future__ import annotations

import pytest

import endstop as es
from endstop.core.ending import end_run, sound_text
from endstop.core.events import Verdict
from endstop.core.messages import TEXTS
from endstop.core.reasons import ENDINGS, TERMINAL_REASONS
from endstop.core.transitions import OperationState
from endstop.errors import InvariantError
from tests.core.stage import Stage

STOP = es.Action.STOP


def test_an_end_is_written_once() -> None:
    stage = Stage()
    first = end_run(stage.txn, Verdict(action=STOP, reason=es.Reason.FATAL), 5_000_000)
    second = end_run(stage.txn, Verdict(action=STOP, reason=es.Reason.STEP_CAP), 6_000_000)
    assert second is first
    assert len(stage.txn.entries) == 1


@pytest.mark.parametrize("reason", sorted(TERMINAL_REASONS))
def test_every_terminal_reason_ends_a_run_with_its_table_row(reason: es.Reason) -> None:
    stage = Stage()
    envelope = end_run(stage.txn, Verdict(action=STOP, reason=reason, guard="g"), stage.at())
    assert envelope.terminal_reason is reason
    assert envelope.next_allowed_action is ENDINGS[reason].next_action
    assert envelope.message
    expected = {
        es.Reason.COMPLETE: es.RunState.COMPLETE,
        es.Reason.HUMAN_REQUIRED: es.RunState.PAUSED,
        es.Reason.CRASHED: es.RunState.INTERRUPTED,
    }.get(reason, es.RunState.STOPPED)
    assert stage.txn.state is expected
    # A crash has no latch: the next worker goes on.
    assert (stage.txn.evidence.ended is None) is (reason is es.Reason.CRASHED)


def test_a_verdict_that_stops_nothing_ends_nothing() -> None:
    stage = Stage()
    for verdict in (Verdict(), Verdict(action=es.Action.BLOCK, reason=es.Reason.FROZEN), Verdict(action=STOP)):
        with pytest.raises(InvariantError):
            end_run(stage.txn, verdict, stage.at())
    assert stage.txn.envelope is None


def test_the_envelope_has_the_operations_as_this_very_transaction_leaves_them() -> None:
    stage = Stage()
    proposal, reserved = stage.reserve(n="a")
    other, doubtful = stage.reserve(n="b", call_id="c2")
    settled = stage.settle(proposal, reserved.operation, es.ToolResult(status="complete", value=1))
    envelope = settled.envelope
    assert envelope is not None
    assert reserved.operation is not None
    assert doubtful.operation is not None
    found = {note.operation_id: note.state for note in envelope.operations}
    assert found == {
        reserved.operation.operation_id: OperationState.COMMITTED.value,
        doubtful.operation.operation_id: OperationState.EXECUTING.value,
    }
    assert envelope.in_doubt == (doubtful.operation.operation_id,)
    assert envelope.external_state == "in_doubt"
    # What is in doubt stands first.
    assert envelope.operations[0].operation_id == doubtful.operation.operation_id
    del other


def test_only_words_for_a_person_are_a_tools_own() -> None:
    for status, kept in (("human_required", True), ("fatal", False), ("permission_denied", False)):
        stage = Stage()
        proposal, reserved = stage.reserve("look", q=1)
        settled = stage.settle(proposal, reserved.operation, es.ToolResult(status=status, message="planted words"))
        assert settled.envelope is not None
        assert (settled.envelope.message == "planted words") is kept
        assert kept or settled.envelope.message == TEXTS[es.Reason(status)]


def test_words_are_cut_and_made_sound() -> None:
    stage = Stage()
    verdict = Verdict(action=STOP, reason=es.Reason.FATAL, guard="wächter\n")
    envelope = end_run(stage.txn, verdict, stage.at(), message="\udc80" + "x" * 9_000, actor="Zoë")
    assert envelope.message == "?" + "x" * 1_999
    assert envelope.guard is not None
    assert envelope.guard.isascii()
    assert all(leaf.isascii() for leaf in stage.txn.entries)
    assert sound_text("grün") == "grün"


def test_the_arguments_of_a_blocked_call_are_shown_by_type_and_size() -> None:
    stage = Stage()
    for number in range(3):
        proposal, reserved = stage.reserve("look", f"c{number}", q="planted", deep={"a": [1]})
        if reserved.envelope is None:
            stage.settle(proposal, None, [])
    envelope = stage.txn.envelope
    assert envelope is not None
    assert envelope.terminal_reason is es.Reason.SAME_CALL_REPEAT
    assert envelope.blocked_call is not None
    assert envelope.blocked_call.args == (("deep", "dict[1]"), ("q", "str[7]"))
    assert envelope.after_call is None
    assert envelope.ledger is not None
    assert envelope.ledger.last == stage.txn.next_seq - 1


def test_an_end_by_a_result_names_the_call_before_it() -> None:
    stage = Stage()
    proposal, reserved = stage.reserve("look", q=1)
    envelope = stage.settle(proposal, reserved.operation, es.ToolResult(status="fatal")).envelope
    assert envelope is not None
    assert envelope.blocked_call is None
    assert envelope.after_call is not None
    assert envelope.after_call.call_id == "c1"
