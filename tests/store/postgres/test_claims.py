"""Many workers and one key: one claims it, whatever the role's isolation is and whoever commits first."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import ExitStack

import psycopg
import pytest

from endstop.core.reasons import Action, Reason
from endstop.store.postgres import PostgresStore
from endstop.testing.store_contract_runs import check_ledger, in_threads, order
from endstop.testing.store_samples import START_US, AddStep, new_run, reserve, settle
from tests.postgres_server import Pooler, PostgresServer
from tests.store.postgres.kit import postgres_store

pytestmark = pytest.mark.slow

CLAIMS = 64
STORES = 8


def claim_all(open_store: Callable[[], PostgresStore]) -> list[Action]:
    """64 runs of 8 stores ask for the same key at the same moment; what each was told."""
    told: list[Action] = []
    with ExitStack() as stack:
        stores = [open_store() for _ in range(STORES)]
        for store in stores:
            stack.callback(store.close)
        for number in range(CLAIMS):
            stores[number % STORES].open_run(new_run(f"run-{number}")).result()
        together = threading.Barrier(CLAIMS)

        def work(number: int) -> None:
            asked = reserve(f"run-{number}", "the same")
            together.wait()
            told.append(stores[number % STORES].transact_now(asked).verdict.action)

        in_threads(CLAIMS, work)
        check_ledger(stores[0])
        assert len(stores[0].operations().result()) == 1
    return told


def test_of_64_simultaneous_claims_of_one_key_one_wins(database: str) -> None:
    told = claim_all(lambda: postgres_store(database))
    assert len(told) == CLAIMS
    assert told.count(Action.EXECUTE) == 1
    assert set(told) == {Action.EXECUTE, Action.BLOCK}


@pytest.mark.parametrize("level", ["repeatable read", "serializable"])
def test_one_wins_whatever_the_isolation_of_the_role_is(postgres: PostgresServer, database: str, level: str) -> None:
    name = database.rpartition("/")[2]
    postgres.execute(f"ALTER DATABASE {name} SET default_transaction_isolation = '{level}'")
    try:
        assert claim_all(lambda: postgres_store(database)).count(Action.EXECUTE) == 1
    finally:
        postgres.execute(f"ALTER DATABASE {name} RESET default_transaction_isolation")


def test_one_wins_behind_a_pooler(postgres: PostgresServer, pooler: Pooler, database: str) -> None:
    url = postgres.url(database.rpartition("/")[2], port=pooler.port)
    assert claim_all(lambda: postgres_store(url)).count(Action.EXECUTE) == 1


def test_whoever_waits_for_an_uncommitted_twin_sees_it_in_progress(database: str) -> None:
    """The twin has written the key and not committed: a reader sees nothing, and must not take that for an answer."""
    store, twin = postgres_store(database), postgres_store(database)
    try:
        store.open_run(new_run("a")).result()
        twin.open_run(new_run("b")).result()
        with psycopg.connect(database) as holder:
            # The twin is made to wait between its write and its commit by a lock on its own row of writers.
            holder.execute(b"LOCK TABLE endstop.writer IN SHARE MODE")
            mine = twin.transact(reserve("b", 1))
            theirs = store.transact(reserve("a", 1))
            holder.commit()
        answers = [mine.result(), theirs.result()]
        assert sorted(answer.verdict.action for answer in answers) == [Action.BLOCK, Action.EXECUTE]
        blocked = next(answer for answer in answers if answer.verdict.action is Action.BLOCK)
        assert blocked.verdict.reason is Reason.IN_PROGRESS
    finally:
        store.close()
        twin.close()


def test_two_stores_on_one_run_count_exactly(database: str) -> None:
    """What each has in hand is old after every step of the other."""
    stores = [postgres_store(database) for _ in range(3)]
    try:
        stores[0].open_run(new_run("a")).result()
        counts: list[int] = []
        in_threads(
            6, lambda n: counts.extend(stores[n % 3].transact_now(AddStep(run_id="a", now_us=1)) for _ in range(20))
        )
        assert sorted(counts) == list(range(1, 121))
        check_ledger(stores[2])
    finally:
        for store in stores:
            store.close()


def test_no_call_is_reserved_after_the_commit_of_a_stop(database: str) -> None:
    """Workers reserve as fast as they can; what was reserved when the order is acknowledged is all there will be."""
    workers = [postgres_store(database) for _ in range(2)]
    operator = postgres_store(database)
    try:
        for number in range(6):
            workers[number % 2].open_run(new_run(f"run-{number}")).result()
        let_through = [0] * 6
        going = threading.Event()

        def work(number: int) -> None:
            store = workers[number % 2]
            while True:
                asked = reserve(f"run-{number}", f"{number}-{let_through[number]}")
                reserved = store.transact_now(asked)
                if reserved.verdict.action is not Action.EXECUTE:
                    return
                let_through[number] += 1
                store.transact_now(settle(asked, reserved))
                if sum(let_through) > 40:
                    going.set()

        threads = [threading.Thread(target=work, args=(number,)) for number in range(6)]
        for thread in threads:
            thread.start()
        assert going.wait(60)
        operator.add_control(order("o1", "kill")).result()
        stored = len(operator.operations(limit=10_000).result())
        for thread in threads:
            thread.join(60)
        assert len(operator.operations(limit=10_000).result()) == stored == sum(let_through)
        check_ledger(operator)
    finally:
        for store in (*workers, operator):
            store.close()


def test_an_order_is_not_starved_by_steps(database: str) -> None:
    """Orders queue for the gate like everybody else; none is passed by for ever."""
    store = postgres_store(database)
    done = threading.Event()
    try:
        store.open_run(new_run("a")).result()

        def busy(_: int) -> None:
            while not done.is_set():
                store.transact_now(AddStep(run_id="a", now_us=START_US))

        threads = [threading.Thread(target=busy, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        for number in range(5):
            store.add_control(order(f"o{number}", "freeze")).result(timeout=30)
    finally:
        done.set()
        for thread in threads:
            thread.join(30)
        store.close()
