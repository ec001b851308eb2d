"""Attempts, late outcomes and contradictions: the compare-and-set of every write, at the level of steps."""

from __future__ import annotations

from dataclasses import replace

import pytest

import endstop as es
from endstop.core.events import Proposal
from endstop.core.observe import as_result, measure
from endstop.core.operation_terms import OperationTerms
from endstop.core.policy import Policy
from endstop.core.probing import Exclusion, Found
from endstop.core.propose import propose
from endstop.core.records import OperationRecord
from endstop.core.steps import CallReserved, CallSettled, LoseCall, ReserveCall, SettleCall
from endstop.core.steps_operations import BeginProbe, GiveUp, SettleByHand, SettleProbe
from endstop.core.transitions import OperationState
from endstop.runtime.guard import Guard
from tests.operations.scenes import SPEC, WIDE, Bank, Place, codes, entries_of, only

TERMS = OperationTerms(asks_probe=True)
TOOL = es.ToolPolicy(effect="write", idempotency_key="{order}")
POLICY = Policy(limits=WIDE, tools={"pay": TOOL})
NOT_APPLIED = es.ToolResult(error_class="conflict", side_effect_committed=False, message="busy")
REFUSED = es.ToolResult(status="fatal", side_effect_committed=None)


class Table:
    """One operation, stepped by hand by as many workers as a test needs."""

    def __init__(self, place: Place) -> None:
        self.guard: Guard = place.open(TOOL)
        self.clock = place.clock
        for run_id in ("one", "two"):
            self.guard.run(SPEC, run_id=run_id).__enter__()

    def reserve(self, run_id: str, owner: str, *, terms: OperationTerms = TERMS, call_id: str = "") -> CallReserved:
        return self.guard.store.transact(
            ReserveCall(
                run_id=run_id, now_us=self.clock.now_us(), policy=POLICY, proposal=self.proposal(call_id or owner),
                operation_id="op_1", owner_id=owner, terms=terms,
            )
        ).result()  # fmt: skip

    def proposal(self, call_id: str) -> Proposal:
        call = es.ToolCall(tool="pay", args={"order": "a"}, call_id=call_id)
        return propose(call, TOOL, store_key=self.guard.store.store_key)

    def settle(self, owned: OperationRecord, value: object, *, lost: bool = False) -> CallSettled:
        result, proposal = as_result(value), self.proposal(owned.call_id)
        return self.guard.store.transact(
            SettleCall(
                run_id=owned.run_id, now_us=self.clock.now_us(), policy=POLICY, tool=TOOL, proposal=proposal,
                measured=measure(result, proposal, TOOL), result=result, operation=owned, lost=lost,
            )
        ).result()  # fmt: skip

    def lose(self, owned: OperationRecord, *, sent: bool = True) -> None:
        self.guard.store.transact(
            LoseCall(
                run_id=owned.run_id, now_us=self.clock.now_us(), proposal=self.proposal(owned.call_id),
                operation=owned, owner_id=owned.owner_id, sent=sent,
            )
        ).result()  # fmt: skip

    def probe(
        self, owned: OperationRecord, found: Found, exclusion: Exclusion | None = None, *, number: int = 0
    ) -> str:
        now_us = self.clock.now_us()
        place = {"run_id": owned.run_id, "now_us": now_us, "operation_id": "op_1"}
        place |= {"attempt": owned.attempt, "fence": owned.fence, "terms": TERMS}
        if not number:
            begun = self.guard.store.transact(BeginProbe(**place, until_us=now_us + 1)).result()  # type: ignore[arg-type]  # by name
            number = begun.number
        settle = SettleProbe(**place, number=number, found=found, began_us=now_us, exclusion=exclusion)  # type: ignore[arg-type]  # by name
        return self.guard.store.transact(settle).result().code

    def executing(self, run_id: str = "one", owner: str = "w1") -> OperationRecord:
        reserved = self.reserve(run_id, owner)
        assert reserved.operation is not None
        return reserved.operation

    def newer(self) -> tuple[OperationRecord, OperationRecord]:
        """An old attempt that a probe found not applied, and the newer one of another run."""
        old = self.executing()
        self.lose(old)
        assert self.probe(old, Found.NOT_APPLIED, Exclusion.OWNER_DEAD) == "probe_not_applied"
        new = self.executing("two", "w2")
        assert (new.attempt, new.fence, new.run_id) == (2, 2, "two")
        return old, new

    def stored(self) -> OperationRecord:
        return only(self.guard)

    def incidents(self) -> list[str]:
        return [entry["code"] for entry in entries_of(self.guard) if entry.get("incident")]


@pytest.fixture
def table(place: Place) -> Table:
    return Table(place)


def test_c03_a_late_result_of_the_same_attempt_is_taken(table: Table) -> None:
    owned = table.executing()
    table.lose(owned)
    assert table.stored().state is OperationState.UNKNOWN
    assert table.settle(owned, "paid").accepted
    assert (table.stored().state, table.stored().outcome) == (OperationState.COMMITTED, "applied")
    assert (codes(table.guard), table.incidents()) == (["late_result"], [])


def test_a_late_result_is_taken_out_of_a_persons_hands_too(table: Table) -> None:
    owned = table.executing()
    table.lose(owned)
    give_up = GiveUp(run_id="one", now_us=1, operation_id="op_1", attempt=1, fence=1)
    assert table.guard.store.transact(give_up).result().code == "no_probe"
    assert table.settle(owned, NOT_APPLIED).accepted
    assert table.stored().state is OperationState.FAILED_RETRYABLE


def test_c04_a_late_result_of_an_older_attempt_is_refused_and_noted(table: Table) -> None:
    old, new = table.newer()
    settled = table.settle(old, "paid late")
    assert not settled.accepted
    assert (table.stored().state, table.stored().attempt) == (OperationState.EXECUTING, 2)
    assert table.settle(new, "paid").accepted
    assert not table.settle(old, "paid later still").accepted
    assert b"paid" in (table.stored().result or b"")
    assert b"late" not in (table.stored().result or b"")
    assert table.incidents() == ["late_applied", "late_applied"]


def test_c05_a_stale_owners_failure_does_not_touch_what_the_new_owner_committed(table: Table) -> None:
    old, new = table.newer()
    table.settle(new, "paid")
    before = table.stored()
    for value in (NOT_APPLIED, REFUSED):
        assert not table.settle(old, value).accepted
    table.lose(old)
    assert table.stored() == before


@pytest.mark.parametrize("late", [NOT_APPLIED, REFUSED])
def test_what_is_committed_stays_so_against_its_own_attempts_word(table: Table, late: object) -> None:
    owned = table.executing()
    table.lose(owned)
    table.probe(owned, Found.APPLIED)
    before = table.stored()
    assert not table.settle(owned, late).accepted
    assert table.stored() == before
    assert table.incidents() == ["contradiction_not_applied"]


def test_an_attempt_that_was_found_not_applied_and_says_it_was_blocks_its_key(table: Table) -> None:
    owned = table.executing()
    table.lose(owned)
    table.probe(owned, Found.NOT_APPLIED, Exclusion.OWNER_DEAD)
    assert not table.settle(owned, "paid").accepted
    assert (table.stored().state, table.stored().outcome) == (OperationState.MANUAL, "unknown")
    assert table.incidents() == ["contradiction_applied"]
    assert table.reserve("two", "w2").verdict.reason is es.Reason.OUTCOME_UNKNOWN


def test_a_slow_probe_that_finds_it_after_all_blocks_the_key_too(table: Table) -> None:
    owned = table.executing()
    table.lose(owned)
    table.probe(owned, Found.NOT_APPLIED, Exclusion.OWNER_DEAD)
    assert table.probe(owned, Found.APPLIED, number=1) == "contradiction"
    assert table.stored().state is OperationState.MANUAL
    assert table.incidents() == ["contradiction_applied"]


def test_agreement_is_no_incident(table: Table) -> None:
    owned = table.executing()
    table.lose(owned)
    table.probe(owned, Found.APPLIED)
    assert table.settle(owned, "paid").accepted
    assert table.settle(owned, "paid", lost=True).accepted
    assert table.incidents() == []


def test_a_probe_of_an_older_attempt_or_an_older_question_changes_nothing(table: Table) -> None:
    old, _ = table.newer()
    before = table.stored()
    assert table.probe(old, Found.APPLIED, number=1) == "moved_on"
    assert table.probe(old, Found.NOT_APPLIED, Exclusion.OWNER_DEAD, number=9) == "moved_on"
    assert table.stored() == before


def test_two_questions_at_once_are_never_put(table: Table) -> None:
    owned = table.executing()
    table.lose(owned)
    begin = BeginProbe(
        run_id="one", now_us=table.clock.now_us(), operation_id="op_1", attempt=1, fence=1, terms=TERMS,
        until_us=table.clock.now_us() + 1_000,
    )  # fmt: skip
    answers = [table.guard.store.transact(begin).result().code for _ in range(3)]
    assert answers == ["probe_begun", "asked_elsewhere", "asked_elsewhere"]


@pytest.mark.parametrize("state", ["EXECUTING", "COMMITTED", "FAILED_RETRYABLE", "FAILED_FINAL"])
def test_only_what_is_in_doubt_is_asked_for_given_up_or_settled_by_hand(table: Table, state: str) -> None:
    owned = table.executing()
    if state != "EXECUTING":
        table.settle(owned, {"COMMITTED": "paid", "FAILED_RETRYABLE": NOT_APPLIED, "FAILED_FINAL": REFUSED}[state])
    assert table.stored().state == state
    before = table.stored()
    assert table.probe(owned, Found.APPLIED, number=1) in ("moved_on", "contradiction")
    if state != "FAILED_RETRYABLE":
        assert table.stored() == before
    give_up = GiveUp(run_id="one", now_us=1, operation_id="op_1", attempt=1, fence=1)
    if state != "FAILED_RETRYABLE":
        assert table.guard.store.transact(give_up).result().code == "moved_on"
        hand = SettleByHand(
            run_id="one", now_us=1, operation_id="op_1", attempt=1, fence=1, applied=True, why="w", proof="p"
        )
        with pytest.raises(es.UsageError, match=f"is {state} in attempt 1"):
            table.guard.store.transact(hand).result()


def test_a14_attempts_that_were_all_not_applied_close_the_operation_once(table: Table) -> None:
    terms = replace(TERMS, attempts_max=2)
    for number in (1, 2):
        reserved = table.reserve("one", "w1", terms=terms, call_id=f"c{number}")
        assert reserved.operation is not None
        table.settle(reserved.operation, NOT_APPLIED)
    for number in (3, 4):
        refused = table.reserve("two", "w2", terms=terms, call_id=f"c{number}")
        assert refused.verdict.action is not es.Action.EXECUTE
    assert (table.stored().state, table.stored().attempt, table.stored().fence) == (OperationState.POISONED, 2, 3)
    assert codes(table.guard).count("attempts_exhausted") == 1


def test_another_fingerprint_closes_nothing(table: Table) -> None:
    terms = replace(TERMS, attempts_max=1)
    table.settle(table.executing(), NOT_APPLIED)
    other = replace(table.proposal("c9"), operation_fingerprint="another")
    refused = table.guard.store.transact(
        ReserveCall(
            run_id="two", now_us=1, policy=POLICY, proposal=other, operation_id="op_1", owner_id="w2", terms=terms
        )
    ).result()
    assert refused.verdict.reason is es.Reason.KEY_MISMATCH
    assert table.stored().state is OperationState.FAILED_RETRYABLE


def test_an_unsent_attempt_is_not_applied(table: Table) -> None:
    owned = table.executing()
    table.lose(owned, sent=False)
    assert table.stored().state is OperationState.FAILED_RETRYABLE


def test_a_target_that_dedupes_gets_the_same_key_again_up_to_the_cap(place: Place, bank: Bank) -> None:
    guard = place.open(bank.tool(probe=None, outcome_class="idempotent_by_target", attempts_max=3))
    bank.fails_after += [ConnectionResetError("reset"), ConnectionResetError("reset")]
    for number in range(2):
        with guard.run(SPEC, run_id=f"r{number}") as run, pytest.raises(es.OutcomeUnknownError):
            run.call(bank.pay, {"order": "a"}, tool="pay")
    with guard.run(SPEC, run_id="last") as run:
        assert run.call(bank.pay, {"order": "a"}, tool="pay").value == {"paid": "a", "amount": 1}
    assert len(set(bank.calls)) == 1
    assert (only(guard).state, only(guard).attempt) == (OperationState.COMMITTED, 3)
    assert codes(guard) == ["sent_again", "another_attempt"] * 2


def test_a_target_that_dedupes_is_not_sent_to_beyond_its_attempts(place: Place, bank: Bank) -> None:
    guard = place.open(bank.tool(probe=None, outcome_class="idempotent_by_target", attempts_max=1))
    bank.fails_after.append(ConnectionResetError("reset"))
    with guard.run(SPEC, run_id="r") as run, pytest.raises(es.OutcomeUnknownError):
        run.call(bank.pay, {"order": "a"}, tool="pay")
    with guard.run(SPEC, run_id="last") as run:
        assert run.call(bank.pay, {"order": "a"}, tool="pay").reason is es.Reason.OUTCOME_UNKNOWN
    guard.reconcile()
    assert (only(guard).state, len(bank.calls)) == (OperationState.UNKNOWN, 1)
