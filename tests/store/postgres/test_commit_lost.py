"""The answer to a COMMIT that never arrives: the store reads back, on a fresh connection, before anything else."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from endstop.core.reasons import Action
from endstop.errors import CommitUnknownError
from endstop.store.postgres import PostgresStore, lane
from endstop.testing.store_contract_runs import check_ledger
from endstop.testing.store_samples import AddStep, new_run, reserve, settle
from tests.postgres_server import PostgresServer
from tests.store.postgres.kit import postgres_store
from tests.store.postgres.proxy import Loss, LossyProxy

pytestmark = pytest.mark.slow


@pytest.fixture
def proxy(postgres: PostgresServer) -> Iterator[LossyProxy]:
    made = LossyProxy(postgres.port)
    yield made
    made.close()


@pytest.fixture
def store(postgres: PostgresServer, database: str, proxy: LossyProxy) -> Iterator[PostgresStore]:
    opened = postgres_store(postgres.url(database.rpartition("/")[2], port=proxy.port), lanes=1)
    yield opened
    proxy.refusing = False
    opened.close()


@pytest.mark.parametrize("loss", [Loss.REPLY, Loss.REQUEST])
@pytest.mark.parametrize("warm", [False, True], ids=["read first", "assumed"])
def test_a_lost_commit_is_found_out_and_the_call_is_claimed_once(
    store: PostgresStore, proxy: LossyProxy, loss: Loss, warm: bool
) -> None:
    store.open_run(new_run("a")).result()
    if warm:
        store.transact(AddStep(run_id="a", now_us=1)).result()
    asked = reserve("a", 1)
    proxy.lose(loss)
    reserved = store.transact(asked).result()
    assert proxy.lost == 1
    assert reserved.verdict.action is Action.EXECUTE
    proxy.lose(loss)
    assert store.transact(settle(asked, reserved)).result().accepted
    assert proxy.lost == 2
    assert [record.state for record in store.operations().result()] == ["COMMITTED"]
    assert [record.attempt for record in store.operations().result()] == [1]
    check_ledger(store)


def test_a_whole_batch_is_read_back_at_once(store: PostgresStore, proxy: LossyProxy) -> None:
    runs = [f"run-{number}" for number in range(12)]
    for run_id in runs:
        store.open_run(new_run(run_id)).result()
    proxy.lose(Loss.REPLY)
    futures = [store.transact(AddStep(run_id=run_id, now_us=1)) for run_id in runs]
    assert [future.result() for future in futures] == [1] * len(runs)
    assert proxy.lost == 1
    check_ledger(store)


def test_a_commit_that_nobody_can_ask_about_is_said_to_be_unknown(
    store: PostgresStore, proxy: LossyProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lane, "READ_BACK_MS_MAX", 500)
    store.open_run(new_run("a")).result()
    asked = reserve("a", 1)
    proxy.lose(Loss.REPLY)
    proxy.refusing = True
    with pytest.raises(CommitUnknownError):
        store.transact(asked).result()
    # Whoever asks again finds the claim, and does not send a second time.
    proxy.refusing = False
    assert store.transact(asked).result().verdict.action is not Action.EXECUTE
    assert [record.attempt for record in store.operations().result()] == [1]
    check_ledger(store)


def test_a_connection_that_broke_while_it_lay_in_the_pool_is_not_noticed(
    store: PostgresStore, proxy: LossyProxy
) -> None:
    store.open_run(new_run("a")).result()
    for count in range(1, 4):
        proxy.cut()
        assert store.transact(AddStep(run_id="a", now_us=1)).result() == count
        proxy.cut()
        assert store.run("a").result() is not None
