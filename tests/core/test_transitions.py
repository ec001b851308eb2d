"""The state machines, every row of state and event."""

from __future__ import annotations

import itertools

import pytest

import endstop as es
from endstop.core.transitions import (
    FINAL_OPERATION_STATES,
    OPERATION_TABLE,
    RUN_TABLE,
    OperationEvent,
    OperationState,
    RunEvent,
    operation_next,
    run_next,
)
from endstop.errors import InvariantError

S, V = OperationState, OperationEvent


@pytest.mark.parametrize(("state", "event"), list(itertools.product(es.RunState, RunEvent)))
def test_a_run_goes_where_the_table_says_and_nowhere_else(state: es.RunState, event: RunEvent) -> None:
    following = RUN_TABLE[state].get(event)
    if following is None:
        with pytest.raises(InvariantError, match=f"{state} cannot {event}"):
            run_next(state, event)
    else:
        assert run_next(state, event) is following


@pytest.mark.parametrize(("state", "event"), list(itertools.product([None, *S], V)))
def test_an_operation_goes_where_the_table_says_and_nowhere_else(state: S | None, event: V) -> None:
    following = OPERATION_TABLE[state].get(event)
    if following is None:
        with pytest.raises(InvariantError):
            operation_next(state, event)
    else:
        assert operation_next(state, event) is following


def test_every_state_has_its_row() -> None:
    assert set(RUN_TABLE) == set(es.RunState)
    assert set(OPERATION_TABLE) == {None, *S}


def test_nothing_leads_from_sent_to_sent_again_but_proof_that_it_was_not_applied() -> None:
    assert V.DISPATCH not in OPERATION_TABLE[S.EXECUTING]
    assert V.DISPATCH not in OPERATION_TABLE[S.UNKNOWN]
    assert V.DISPATCH not in OPERATION_TABLE[S.MANUAL]
    sends = {state for state, row in OPERATION_TABLE.items() if V.DISPATCH in row}
    assert sends == {None, S.RESERVED, S.FAILED_RETRYABLE}
    reaches = {state for state, row in OPERATION_TABLE.items() if S.FAILED_RETRYABLE in row.values()}
    assert reaches <= {S.EXECUTING, S.UNKNOWN, S.MANUAL, S.POISONED}
    for state in reaches - {S.POISONED}:
        events = {event for event, to in OPERATION_TABLE[state].items() if to is S.FAILED_RETRYABLE}
        assert events == {V.NOT_APPLIED}


def test_a_final_operation_only_loses_its_payload() -> None:
    for state in FINAL_OPERATION_STATES - {S.POISONED}:
        assert set(OPERATION_TABLE[state].values()) <= {S.TOMBSTONE}
    assert S.COMMITTED in FINAL_OPERATION_STATES


def test_a_run_that_is_complete_stays_complete() -> None:
    assert RUN_TABLE[es.RunState.COMPLETE] == {}


def test_every_live_run_may_be_stopped_and_only_runs_that_are_not_live_resumed() -> None:
    for state, row in RUN_TABLE.items():
        if state not in (es.RunState.COMPLETE, es.RunState.STOPPED):
            assert row[RunEvent.STOP] is es.RunState.STOPPED
        is_live = state in (es.RunState.RUNNING, es.RunState.FROZEN)
        assert (RunEvent.RESUME in row) is (not is_live and state is not es.RunState.COMPLETE)
