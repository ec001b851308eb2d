"""Who is alive: by leases on the database's clock, whatever any worker's own clock says."""

from __future__ import annotations

import time

import psycopg
import pytest

from endstop.core.steps_life import JoinRun
from endstop.store.postgres import PostgresStore
from endstop.testing.store_samples import POLICY, new_run
from tests.postgres_server import PostgresServer
from tests.store.postgres.kit import CLOCK, IDS, postgres_store

pytestmark = pytest.mark.slow

LEASE_MS = 600
WAIT_S = 30


def until_dead(store: PostgresStore, owner_id: str) -> None:
    until = time.monotonic() + WAIT_S
    while store.is_owner_alive(owner_id):
        assert time.monotonic() < until
        time.sleep(0.05)


def test_a_worker_lives_from_the_commit_that_lets_it_in_to_the_end_of_its_store(database: str) -> None:
    one, two = postgres_store(database, lease_ms=LEASE_MS), postgres_store(database)
    try:
        assert not two.is_owner_alive("worker-1.1")
        one.open_run(new_run("a", owner_id="worker-1.1")).result()
        one.transact(JoinRun(run_id="a", now_us=1, spec=None, policy_digest=POLICY.digest(), owner_id="w2.7")).result()
        assert two.is_owner_alive("worker-1.1")
        assert two.is_owner_alive("worker-1.99"), "a member lives as long as its worker"
        assert two.is_owner_alive("w2.7")
        time.sleep(3 * LEASE_MS / 1_000)
        assert two.is_owner_alive("worker-1"), "the lease was not renewed"
        one.close()
        assert not two.is_owner_alive("worker-1.1")
        assert not two.is_owner_alive("w2")
    finally:
        one.close()
        two.close()


def test_a_lease_that_nobody_renews_runs_out(postgres: PostgresServer, database: str) -> None:
    """Its process is gone, or stopped, or cut off: nobody can tell, and nobody needs to."""
    one, two = postgres_store(database, lease_ms=LEASE_MS), postgres_store(database)
    try:
        one.open_run(new_run("a", owner_id="worker-1.1")).result()
        assert two.is_owner_alive("worker-1")
        one._leases._closing.set()  # what kill -9 does to the thread
        until_dead(two, "worker-1")
    finally:
        one.close()
        two.close()


@pytest.mark.parametrize("minutes", [-300, 300])
def test_a_worker_with_a_wrong_clock_is_judged_by_the_right_one(database: str, minutes: int) -> None:
    def wrong() -> int:
        return CLOCK.now_us() + minutes * 60_000_000

    off = PostgresStore(database, new_key=IDS.new_key, now_us=wrong, lease_ms=60_000)
    right = postgres_store(database)
    try:
        off.open_run(new_run("a", owner_id="off.1", now_us=wrong())).result()
        right.open_run(new_run("b", owner_id="right.1")).result()
        assert off.is_owner_alive("right.1")
        assert right.is_owner_alive("off.1")
    finally:
        off.close()
        right.close()


def test_a_lost_connection_does_not_cost_the_lease(postgres: PostgresServer, database: str) -> None:
    """A lease is a row and not a session: the next connection renews it."""
    one, two = postgres_store(database, lease_ms=3 * LEASE_MS), postgres_store(database)
    try:
        one.open_run(new_run("a", owner_id="worker-1.1")).result()
        for _ in range(6):
            postgres.disconnect(database.rpartition("/")[2])
            assert two.is_owner_alive("worker-1.1")
            time.sleep(LEASE_MS / 1_000)
    finally:
        one.close()
        two.close()


def test_a_store_that_closes_leaves_no_row_of_its_own_but_its_count(database: str) -> None:
    store = postgres_store(database)
    store.open_run(new_run("a")).result()
    before = store.change_counter()
    store.close()
    again = postgres_store(database)
    try:
        assert again.change_counter() == before, "the number went back, or moved, without a commit"
        with psycopg.connect(database, autocommit=True) as connection:
            assert connection.execute(b"SELECT writer_id FROM endstop.writer").fetchall() == [("",)]
            assert connection.execute(b"SELECT count(*) FROM endstop.worker").fetchone() == (0,)
            assert connection.execute(b"SELECT count(*) FROM endstop.outbox").fetchone() == (0,)
    finally:
        again.close()
