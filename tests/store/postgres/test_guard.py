"""The guard on PostgreSQL, in real processes: nothing is sent twice, whoever dies when."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import orjson
import pytest

import endstop as es
from endstop.core.reasons import RunState
from endstop.core.transitions import OperationState
from endstop.testing.store_contract_runs import check_ledger
from tests.postgres_server import PostgresServer
from tests.store.postgres.worker import LEASE_MS, POLICY, SPEC, guard_on

pytestmark = pytest.mark.slow

REPOSITORY = Path(__file__).resolve().parents[3]
WAIT_S = 120


class Workers:
    """Processes of `tests.store.postgres.worker`; none outlives the test."""

    def __init__(self, effects: Path) -> None:
        self.effects = effects
        self._started: list[subprocess.Popen[str]] = []

    def start(self, mode: str, url: str, run_id: str, *letters: str) -> subprocess.Popen[str]:
        package = str(Path(es.__file__).resolve().parents[1])
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.store.postgres.worker", mode, url, run_id, str(self.effects), *letters],
            cwd=REPOSITORY, env={**os.environ, "PYTHONPATH": package}, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            text=True,
        )  # fmt: skip
        self._started.append(process)
        return process

    def sent(self) -> list[str]:
        """Every effect that happened."""
        return self.effects.read_text().split() if self.effects.exists() else []

    def end(self) -> None:
        for process in self._started:
            if process.poll() is None:
                process.kill()
            process.communicate()


@pytest.fixture
def workers(tmp_path: Path) -> Iterator[Workers]:
    made = Workers(tmp_path / "effects")
    yield made
    made.end()


def heard(process: subprocess.Popen[str]) -> dict[str, object]:
    """The next thing that a worker says."""
    assert process.stdout is not None
    line = process.stdout.readline()
    assert line, f"the worker ended with {process.wait(WAIT_S)}"
    return dict(orjson.loads(line))


def ended(process: subprocess.Popen[str]) -> list[dict[str, object]]:
    """All that a worker still says before it ends well."""
    out, _ = process.communicate(timeout=WAIT_S)
    assert process.returncode == 0
    return [dict(orjson.loads(line)) for line in out.splitlines()]


def test_a_guard_opens_on_a_url_and_tells_it_without_the_password(database: str) -> None:
    with es.open(database.replace("@", ":secret@"), policy=POLICY) as guard:
        assert guard.store.url == database
        with guard.run(SPEC, run_id="r1") as run:
            answer = run.call(lambda letter: {"sent": letter}, {"letter": "x"}, tool="letter.send", call_id="c1")
            assert answer.value == {"sent": "x"}
            run.complete(output="null \0 and « ü »")
        shown = guard.show("r1")
        assert (shown.state, shown.output) == (RunState.COMPLETE, "null \0 and « ü »")
        check_ledger(guard.store)


def test_an_async_run_is_guarded_the_same(database: str) -> None:
    import asyncio

    async def main() -> None:
        async with es.open(database, policy=POLICY) as guard:

            async def one(number: int) -> None:
                async def send(letter: str) -> dict[str, str]:
                    return {"sent": letter}

                async with guard.run(SPEC, run_id=f"r{number}") as run:
                    for letter in range(4):
                        answer = await run.acall(
                            send, {"letter": f"{number}-{letter}"}, tool="letter.send", call_id=f"c{letter}"
                        )
                        assert answer.side_effect_committed

            await asyncio.gather(*(one(number) for number in range(8)))
            assert len(guard.store.operations().result()) == 32
            check_ledger(guard.store)

    asyncio.run(main())


def test_after_a_restart_the_same_key_is_answered_from_the_ledger(database: str, workers: Workers) -> None:
    first = ended(workers.start("sends", database, "r1", "a", "b"))
    again = ended(workers.start("sends", database, "r1", "a", "b", "c"))
    assert [said["replayed"] for said in first] == [False, False]
    assert [said["replayed"] for said in again] == [True, True, False]
    assert workers.sent() == ["a", "b", "c"]


def test_of_two_workers_that_meet_on_one_key_one_executes(database: str, workers: Workers) -> None:
    pair = [workers.start("meets", database, f"r{number}", "same") for number in range(2)]
    for process in pair:
        assert heard(process) == {"ready": True}
    for process in pair:
        assert process.stdin is not None
        process.stdin.write("go\n")
        process.stdin.flush()
    told = [ended(process)[-1] for process in pair]
    assert workers.sent() == ["same"]
    assert [said["replayed"] or said["reason"] is not None for said in told].count(False) == 1


def test_a_worker_killed_in_the_middle_of_a_call_leaves_it_in_doubt_for_ever(database: str, workers: Workers) -> None:
    """Its lease runs out on the database's clock; that leads to UNKNOWN, and never to a second sending."""
    process = workers.start("hangs", database, "r1", "a")
    assert heard(process) == {"sent": "a"}
    with guard_on(database) as guard:
        assert guard.store.is_owner_alive(guard.show("r1").owners[0])  # type: ignore[attr-defined]  # not in the port yet
        process.kill()
        process.wait()
        until = time.monotonic() + WAIT_S
        owner = guard.store.operations().result()[0].owner_id
        while guard.store.is_owner_alive(owner):  # type: ignore[attr-defined]  # not in the port yet
            assert time.monotonic() < until
            time.sleep(LEASE_MS / 5_000)
        guard.reconcile()
        (operation,) = guard.store.operations().result()
        assert operation.state in (OperationState.UNKNOWN, OperationState.MANUAL)
        assert guard.show("r1").state is RunState.INTERRUPTED
    told = ended(workers.start("sends", database, "r2", "a"))
    assert told[0]["replayed"] is False
    assert told[0]["reason"] == "outcome_unknown"
    assert workers.sent() == ["a"]


def test_a_backend_that_is_terminated_while_a_tool_runs_costs_nothing(postgres: PostgresServer, database: str) -> None:
    """The result comes late, through another connection, and is that of the same attempt."""
    calls: list[str] = []
    with guard_on(database) as guard, guard.run(SPEC, run_id="r1") as run:

        def send(letter: str) -> str:
            calls.append(letter)
            assert postgres.disconnect(database.rpartition("/")[2]) > 0
            return "sent"

        for letter in ("a", "b", "c"):
            assert run.call(send, {"letter": letter}, tool="letter.send", call_id=letter).value == "sent"
        assert calls == ["a", "b", "c"]
        assert {record.state for record in guard.store.operations().result()} == {OperationState.COMMITTED}
        check_ledger(guard.store)


def test_a_server_that_is_killed_and_restarted_in_mid_run_loses_and_doubles_nothing(
    own_server: PostgresServer, tmp_path: Path
) -> None:
    """kill -9 on the server and all its processes while 4 runs write; what was acknowledged stands, once each."""
    effects: list[str] = []
    acknowledged: list[str] = []
    over = threading.Event()
    with own_server.database() as url, guard_on(url) as guard:

        def send(letter: str) -> str:
            effects.append(letter)
            return "sent"

        def work(number: int) -> None:
            with guard.run(SPEC, run_id=f"r{number}") as run:
                count = 0
                while not over.is_set():
                    letter = f"{number}-{count}"
                    count += 1
                    try:
                        answer = run.call(send, {"letter": letter}, tool="letter.send", call_id=letter)
                    except (es.StoreError, es.OutcomeUnknownError):
                        continue
                    if answer.side_effect_committed:
                        acknowledged.append(letter)

        threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        for _ in range(2):
            before = len(acknowledged)
            _until(lambda before=before: len(acknowledged) > before + 20)
            own_server.kill()
            own_server.start()
        before = len(acknowledged)
        _until(lambda: len(acknowledged) > before + 20)
        over.set()
        for thread in threads:
            thread.join(WAIT_S)
        assert len(effects) == len(set(effects)), "a letter was sent twice"
        stored = {record.operation_id: record for record in guard.store.operations(limit=10_000).result()}
        committed = [record for record in stored.values() if record.state is OperationState.COMMITTED]
        assert len(committed) >= len(acknowledged)
        assert len(stored) >= len(effects), "a letter was sent without a durable intent"
        check_ledger(guard.store)


def _until(condition: object) -> None:
    assert callable(condition)
    until = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.01)
