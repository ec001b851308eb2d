"""The second half of the store contract: orders, the ledger, evidence, sharing and the end.

See `endstop.testing.store_contract`.
"""

from __future__ import annotations

from concurrent.futures import wait
from dataclasses import replace
from typing import TYPE_CHECKING

import orjson

from endstop.core.events import NO_CONTROLS, DenyRule, Order
from endstop.core.evidence import PACKED_BYTES_MAX, Evidence
from endstop.core.reasons import Action
from endstop.errors import GuardClosedError, RunNotFoundError, UsageError
from endstop.store.port import ROWS_MAX, RunQuery, StoredSpec
from endstop.store.rows import ledger_row
from endstop.testing.store_contract_runs import (
    StoreTests,
    check_ledger,
    entries_of,
    in_threads,
    order,
    raises,
    stored_run,
)
from endstop.testing.store_samples import (
    SPEC,
    START_US,
    AddStep,
    BreakOff,
    SeeControls,
    new_run,
    reserve,
    settle,
)  # fmt: skip

if TYPE_CHECKING:
    from collections.abc import Callable

    from endstop.core.events import Controls
    from endstop.store.port import Store

__all__ = ["LedgerContract"]

LONG_RUN_STEPS = 300
WAIT_S_MAX = 60


def seen_by(store: Store, run_id: str) -> Controls:
    """The orders that a step of this run sees now."""
    return store.transact(SeeControls(run_id=run_id, now_us=START_US)).result()


def withdraw(store: Store, kind: str, **parts: str | None) -> int:
    """Withdraw the orders of a kind that fit `parts`."""
    whole: dict[str, str | None] = {"run_id": None, "label": None, "tool": None, "control_id": None, **parts}
    return store.withdraw_controls(
        kind=kind, actor="operator", reason="over", now_us=START_US + 1, run_id=whole["run_id"], label=whole["label"],
        tool=whole["tool"], control_id=whole["control_id"],
    ).result()  # fmt: skip


class LedgerContract(StoreTests):
    """What a store promises of orders, of the ledger, of its own end, and of being shared."""

    # -- Orders

    def test_an_order_is_seen_by_every_later_step_that_it_concerns(self) -> None:
        """By run, by label (`name` or `name=value`), or as one to all; and by no other."""
        with self.opened() as store:
            store.open_run(new_run("a", labels=(("team", "x"), ("env", "live")))).result()
            store.open_run(new_run("b", labels=(("team", "y"),))).result()
            assert seen_by(store, "a") is seen_by(store, "b") is NO_CONTROLS
            store.add_control(order("o1", "stop", run_id="a")).result()
            store.add_control(order("o2", "kill", label="team=y")).result()
            store.add_control(order("o3", "freeze", label="env")).result()
            store.add_control(order("o4", "deny", tool="row.*", effect="write")).result()
            said = Order(reason="a reason", actor="operator")
            a, b = seen_by(store, "a"), seen_by(store, "b")
            assert (a.stop, a.kill, a.frozen) == (said, None, said)
            assert (b.stop, b.kill, b.frozen) == (None, said, None)
            rule = DenyRule(rule_id="o4", tool="row.*", effect="write", reason="a reason")
            assert a.denies == b.denies == (rule,)
            assert [control.control_id for control in store.controls().result()] == ["o1", "o2", "o3", "o4"]

    def test_an_order_stands_before_the_next_call(self) -> None:
        """The call that is reserved after a deny rule's commit is refused."""
        with self.opened() as store:
            store.open_run(new_run("a")).result()
            assert store.transact(reserve("a", 1)).result().verdict.action is Action.EXECUTE
            store.add_control(replace(order("o1", "deny", tool="row.update"), args=(("row", "2*"),))).result()
            assert store.transact(reserve("a", 2)).result().verdict.action is not Action.EXECUTE
            assert store.transact(reserve("a", 3)).result().verdict.action is Action.EXECUTE

    def test_a_withdrawn_order_is_seen_no_more_and_stays_on_record(self) -> None:
        """Every part that is given chooses; the answer is how many were withdrawn."""
        with self.opened() as store:
            store.open_run(new_run("a", labels=(("team", "x"),))).result()
            store.add_control(order("o1", run_id="a")).result()
            store.add_control(order("o2", label="team")).result()
            store.add_control(order("o3", "deny", tool="t1")).result()
            store.add_control(order("o4", "deny", tool="t2")).result()
            assert withdraw(store, "deny", tool="t3") == 0
            assert withdraw(store, "deny", tool="t1") == 1
            assert [rule.rule_id for rule in seen_by(store, "a").denies] == ["o4"]
            assert withdraw(store, "deny", control_id="o4") == 1
            assert withdraw(store, "freeze", run_id="a") == 1
            assert seen_by(store, "a").frozen is not None
            assert withdraw(store, "freeze", label="team") == 1
            assert seen_by(store, "a") is NO_CONTROLS
            assert withdraw(store, "freeze") == 0
            assert store.controls().result() == ()
            kept = store.controls(active_only=False).result()
            assert [control.control_id for control in kept] == ["o1", "o2", "o3", "o4"]
            assert {control.withdrawn_at_us for control in kept} == {START_US + 1}
            raises(UsageError, store.add_control(order("o1")).result)

    def test_every_order_has_its_entry(self) -> None:
        """In its run's own sequence, or, about no single run, in one of their own; and no word of a person in it."""
        with self.opened() as store:
            store.open_run(new_run("a")).result()
            store.add_control(order("o1", run_id="a")).result()
            store.add_control(order("o2", "deny", tool="t", label="café")).result()
            store.add_control(order("o3", "kill")).result()
            withdraw(store, "kill")
            withdraw(store, "freeze", run_id="a")
            found = [orjson.loads(entry.leaf) for entry in entries_of(store)]
            notes = [(body["run"], body["seq"], body["order"]) for body in found if body["type"] == "control"]
            assert notes == [
                ("a", 1, "freeze"), ("-", 0, "deny"), ("-", 1, "kill"), ("-", 2, "unkill"), ("a", 2, "unfreeze"),
            ]  # fmt: skip
            assert not any(b"a reason" in entry.leaf for entry in entries_of(store))

    def test_an_order_that_makes_no_sense_is_refused(self) -> None:
        """An unknown kind, an id that was given before, a run that is not here: and nothing is written."""
        with self.opened() as store:
            store.add_control(order("o1")).result()
            before = entries_of(store)
            raises(UsageError, store.add_control(order("o2", "pause")).result)
            raises(UsageError, store.add_control(order("o1")).result)
            raises(RunNotFoundError, store.add_control(order("o3", run_id="nobody")).result)
            raises(RunNotFoundError, lambda: withdraw(store, "freeze", run_id="nobody"))
            assert entries_of(store) == before
            assert len(store.controls(active_only=False).result()) == 1

    # -- The ledger

    def test_entries_are_read_by_position(self) -> None:
        """Forwards and backwards, of one run or of all, a page at a time."""
        with self.opened() as store:
            for run_id in ("a", "b"):
                store.open_run(new_run(run_id)).result()
            for number in range(6):
                store.transact(AddStep(run_id="ab"[number % 2], now_us=START_US)).result()

            def positions(**parts: object) -> list[int]:
                return [entry.index for entry in store.entries(**parts).result()]  # type: ignore[arg-type]  # parts

            assert positions() == list(range(9))
            assert positions(limit=2) == [0, 1]
            assert positions(after_index=6) == [7, 8]
            assert positions(newest_first=True, limit=2) == [8, 7]
            assert positions(newest_first=True, after_index=7) == [8]
            assert positions(run_id="a") == [1, 3, 5, 7]
            assert positions(run_id="a", after_index=3, limit=1) == [5]
            assert positions(run_id="a", newest_first=True, limit=2) == [7, 5]
            assert positions(run_id="a", newest_first=True, after_index=5) == [7]
            assert positions(run_id="") == [0]
            raises(UsageError, lambda: positions(limit=ROWS_MAX + 1))
            raises(UsageError, lambda: positions(limit=-1))

    def test_entries_have_no_gap_whoever_writes(self) -> None:
        """Many threads and many runs: positions are dense, and so is every run's own numbering."""
        with self.opened() as store:
            runs = [f"run-{number}" for number in range(8)]

            def work(number: int) -> None:
                run_id = runs[number % len(runs)]
                store.open_run(new_run(run_id, owner_id=f"owner-{number}")).result()
                for row in range(5):
                    asked = reserve(run_id, f"{number}-{row}")
                    store.transact(settle(asked, store.transact_now(asked))).result()
                    if row % 2:
                        raises(UsageError, store.transact(BreakOff(run_id=run_id, now_us=START_US)).result)
                store.add_control(order(f"o{number}", "deny", tool="other.*")).result()

            in_threads(16, work)
            check_ledger(store)
            assert len(store.operations(limit=ROWS_MAX).result()) == 80  # noqa: PLR2004  # 16 threads of 5 rows
            listed = store.runs(RunQuery()).result()
            assert {run.run_id: run.entries for run in listed} == {run: len(entries_of(store, run)) for run in runs}

    def test_ledger_rows_say_what_the_entries_say(self) -> None:
        """The nine columns, with the input's digest beside the entry that it belongs to."""
        with self.opened() as store:
            store.open_run(new_run("a")).result()
            asked = reserve("a", 1, now_us=START_US + 1)
            store.transact(settle(asked, store.transact(asked).result(), now_us=START_US + 1_500_002)).result()
            store.add_control(order("o1", "deny", tool="row.update")).result()
            refused = reserve("a", 2, now_us=START_US + 3)
            store.transact(refused).result()
            rows = store.ledger_rows().result()
            mine = store.ledger_rows(run_id="a").result()
            assert [row.input_hash for row in mine[:4]] == [None, asked.input_digest, None, refused.input_digest]
            assert {row.input_hash for row in rows} == {None, asked.input_digest, refused.input_digest}
            for row, entry in zip(rows, entries_of(store), strict=True):
                assert row == ledger_row(entry.leaf, row.input_hash)
            intent, result = mine[1], mine[2]
            assert (intent.state_origin, intent.pass_fail) == ("call_intent:row.update", "pass")
            assert (result.state_origin, result.pass_fail, result.execution_time_ms) == ("result:row.update", "pass", 1)
            assert result.created_at == "2023-11-14T22:13:21.500002Z"
            assert (mine[3].pass_fail, mine[3].breach_reason) == ("fail", "deny_rule")
            assert store.ledger_rows(limit=2).result() == rows[:2]
            raises(UsageError, lambda: store.ledger_rows(limit=ROWS_MAX + 1).result())

    def test_evidence_stays_small_however_long_a_run_is(self) -> None:
        """What is read back is what was folded, and it is bounded."""
        with self.opened() as store:
            store.open_run(new_run("a")).result()
            for row in range(LONG_RUN_STEPS):
                asked = reserve("a", row)
                store.transact_now(settle(asked, store.transact_now(asked)))
            packed = store.evidence_of("a").result()
            assert packed is not None
            assert len(packed) <= PACKED_BYTES_MAX
            evidence = Evidence.unpack(packed)
            assert evidence.steps == LONG_RUN_STEPS
            assert stored_run(store, "a").counters.steps == LONG_RUN_STEPS

    # -- Sharing

    def test_two_that_open_the_same_store_see_one_history(self) -> None:
        """Steps of one run through two stores never interleave; an order through one is seen through the other."""
        with self.opened() as one:
            two = self.open_again(one)
            try:
                one.open_run(new_run("a")).result()
                counts = [
                    store.transact_now(AddStep(run_id="a", now_us=START_US)) for _ in range(10) for store in (one, two)
                ]
                assert counts == list(range(1, 21))
                before = two.change_counter()
                one.add_control(order("o1")).result()
                assert seen_by(two, "a").frozen is not None
                assert two.change_counter() != before
                withdraw(two, "freeze")
                assert seen_by(one, "a") is NO_CONTROLS
                asked = reserve("a", 1)
                reserved = one.transact_now(asked)
                assert two.transact_now(settle(asked, reserved)).accepted
                assert one.transact_now(reserve("a", 1)).verdict.action is not Action.EXECUTE
                assert (one.ledger, one.store_key) == (two.ledger, two.store_key)
                in_threads(8, lambda number: _add_many((one, two)[number % 2]))
                assert one.transact_now(AddStep(run_id="a", now_us=START_US)) > 80  # noqa: PLR2004
                check_ledger(two)
            finally:
                two.close()

    def test_a_store_that_was_closed_opens_with_everything(self) -> None:
        """Runs, keys, operations, orders, specs and entries are what they were."""

        def everything(store: Store) -> tuple[object, ...]:
            reads: list[Callable[[], object]] = [
                lambda: stored_run(store, "a"),
                lambda: store.run_key("a").result(),
                lambda: store.operations().result(),
                lambda: store.controls(active_only=False).result(),
                lambda: store.spec("later").result(),
                lambda: entries_of(store),
                lambda: store.ledger_rows().result(),
                lambda: store.evidence_of("a").result(),
                lambda: (store.ledger, store.store_key),
            ]
            return tuple(read() for read in reads)

        store = self.open_store()
        try:
            store.open_run(new_run("a", labels=(("team", "x"),))).result()
            asked = reserve("a", 1)
            store.transact(settle(asked, store.transact(asked).result())).result()
            store.transact(reserve("a", 2)).result()
            store.add_control(order("o1", run_id="a")).result()
            store.save_spec(StoredSpec(run_id="later", spec=SPEC, created_at_us=3)).result()
            before = everything(store)
        finally:
            store.close()
        again = self.open_again(store)
        try:
            assert everything(again) == before
            assert again.transact_now(AddStep(run_id="a", now_us=START_US)) == 3  # noqa: PLR2004  # after two calls
            check_ledger(again)
        finally:
            again.close()

    # -- The end

    def test_the_change_counter_moves_with_commits_and_stands_still_for_reads(self) -> None:
        """So that a watcher may ask often and read seldom."""
        with self.opened() as store:
            store.open_run(new_run("a")).result()
            first = store.change_counter()
            store.run("a").result()
            entries_of(store)
            assert store.change_counter() == first
            store.transact(AddStep(run_id="a", now_us=START_US)).result()
            assert store.change_counter() != first

    def test_facts_tell_a_doctor_what_there_is(self) -> None:
        """Sizes, name and health."""
        with self.opened() as store:
            store.open_run(new_run("a")).result()
            facts = store.facts().result()
            assert (facts.entries, facts.runs) == (2, 1)
            assert facts.ledger == store.ledger
            assert facts.integrity == "ok"
            assert facts.kind

    def test_a_closed_store_finishes_what_it_took_and_takes_no_more(self) -> None:
        """Whatever was asked for before `close` is written; whatever is asked for after it raises."""
        store = self.open_store()
        store.open_run(new_run("a")).result()
        futures = [store.transact(AddStep(run_id="a", now_us=START_US)) for _ in range(40)]
        store.close()
        store.close()
        assert not wait(futures, WAIT_S_MAX).not_done
        assert sorted(future.result() for future in futures) == list(range(1, 41))
        step = AddStep(run_id="a", now_us=START_US)
        late: list[Callable[[], object]] = [
            lambda: store.transact(step),
            lambda: store.transact_now(step),
            lambda: store.open_run(new_run("b")),
            lambda: store.add_control(order("o1")),
            lambda: withdraw(store, "freeze"),
            lambda: store.save_spec(StoredSpec(run_id="b", spec=SPEC, created_at_us=1)),
            lambda: store.run("a"),
            store.entries,
            store.change_counter,
            store.facts,
        ]
        for call in late:
            raises(GuardClosedError, call)


def _add_many(store: Store) -> None:
    for _ in range(8):
        store.transact(AddStep(run_id="a", now_us=START_US)).result()
