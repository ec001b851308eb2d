"""What a guarded write costs on PostgreSQL, beside a bare loop on the same server.

    python benchmarks/bench_postgres.py [--url URL] [--rounds N] [--seconds S] [--json FILE]

The yardstick is the least that any durable guard must do: two commits an operation (an insert before, an update after)
of one 300-byte row, with psycopg as it comes, from 32 threads with a connection each. Beside it 32 workers do guarded
writes through one guard, in runs of 20 steps, the default cap, that were opened before: `threads` with `run.call`,
`tasks` with `await run.acall` on one event loop. Rounds are interleaved and medians compared. Without --url a server of
its own is started on loopback.

* `threads`, `tasks`: guarded writes a second over bare operations a second; higher is better.
* `alone`: one worker beside one connection, milliseconds each; no target, it tells what a single call waits.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import psycopg

import endstop as es

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

WORKERS = 32
STEPS_A_RUN = 20
OPERATIONS_A_SECOND_MAX = 6_000
ROW_BYTES = 300
TARGETS = {"threads": 0.5, "tasks": 0.5}
SPEC = es.Spec(what_it_does="Updates rows.", what_it_does_not="Deletes none.", done_looks_like="All are ready.")
POLICY = es.Policy(
    limits=es.Limits(steps_max=10**9, wall_ms_max=10**12, tokens_max=10**12, turns_max=10**6),
    tools={"row.update": es.ToolPolicy(effect="write", idempotency_key="{row}")},
)


def update(row: str, value: str) -> dict[str, object]:
    return {"row": row, "ok": True, "value": value}


class Bare:
    """Two commits an operation, and nothing else."""

    def __init__(self, url: str) -> None:
        self._connections = [psycopg.connect(url, autocommit=True) for _ in range(WORKERS)]
        self._connections[0].execute("DROP TABLE IF EXISTS bare")
        self._connections[0].execute("CREATE TABLE bare (id text PRIMARY KEY, state text, body text)")
        self._rounds = 0

    def many(self, seconds: float) -> float:
        """Operations a second, all connections together."""
        self._rounds += 1
        return in_threads(WORKERS, seconds, self._work)

    def alone(self, seconds: float) -> float:
        """Operations a second on one connection."""
        self._rounds += 1
        return in_threads(1, seconds, self._work)

    def _work(self, number: int, over: threading.Event) -> int:
        connection, done = self._connections[number], 0
        before, after = "x" * ROW_BYTES, "y" * ROW_BYTES
        while not over.is_set():
            name = f"{self._rounds}-{number}-{done}"
            connection.execute("INSERT INTO bare VALUES (%s, %s, %s)", (name, "EXECUTING", before))
            connection.execute("UPDATE bare SET state = %s, body = %s WHERE id = %s", ("COMMITTED", after, name))
            done += 1
        return done

    def close(self) -> None:
        for connection in self._connections:
            connection.close()


class Guarded:
    """The same work under the guard. A worker's runs are opened before the clock starts, and left after it stopped."""

    def __init__(self, url: str) -> None:
        self._guard = es.open(url, policy=POLICY)
        self._rounds = 0

    def many(self, seconds: float) -> float:
        """Guarded writes a second, all threads together."""
        return self._threads(WORKERS, seconds)

    def alone(self, seconds: float) -> float:
        """Guarded writes a second in one thread."""
        return self._threads(1, seconds)

    def tasks(self, seconds: float) -> float:
        """Guarded writes a second, all tasks of one event loop together."""
        self._rounds += 1
        with self._opened(WORKERS, seconds) as runs:
            return asyncio.run(self._tasks(runs, seconds))

    @contextmanager
    def _opened(self, workers: int, seconds: float) -> Iterator[list[list[es.Run]]]:
        """More runs than each worker can use up."""
        count = max(2, int(OPERATIONS_A_SECOND_MAX * seconds / workers / STEPS_A_RUN))
        with ExitStack() as stack:
            yield [[stack.enter_context(self._guard.run(SPEC)) for _ in range(count)] for _ in range(workers)]

    def _threads(self, workers: int, seconds: float) -> float:
        self._rounds += 1
        with self._opened(workers, seconds) as runs:

            def work(number: int, over: threading.Event) -> int:
                done = 0
                for run in runs[number]:
                    for _ in range(STEPS_A_RUN):
                        if over.is_set():
                            return done
                        row = f"{self._rounds}-{number}-{done}"
                        run.call(update, {"row": row, "value": "ready"}, tool="row.update", call_id=row)
                        done += 1
                raise RuntimeError("too few runs were opened")

            return in_threads(workers, seconds, work)

    async def _tasks(self, runs: list[list[es.Run]], seconds: float) -> float:
        started = time.perf_counter()
        done = await asyncio.gather(*(self._task(number, runs[number], started + seconds) for number in range(WORKERS)))
        return sum(done) / (time.perf_counter() - started)

    async def _task(self, number: int, runs: list[es.Run], until: float) -> int:
        done = 0

        async def aupdate(row: str, value: str) -> dict[str, object]:
            return update(row, value)

        for run in runs:
            for _ in range(STEPS_A_RUN):
                if time.perf_counter() >= until:
                    return done
                row = f"{self._rounds}-{number}-{done}"
                await run.acall(aupdate, {"row": row, "value": "ready"}, tool="row.update", call_id=row)
                done += 1
        raise RuntimeError("too few runs were opened")

    def close(self) -> None:
        self._guard.close()


def in_threads(workers: int, seconds: float, work: Callable[[int, threading.Event], int]) -> float:
    """What all threads together get done a second. Raises what a worker raised."""
    over = threading.Event()
    done: list[int] = []
    failed: list[BaseException] = []

    def run(number: int) -> None:
        try:
            done.append(work(number, over))
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(workers)]
    started = time.perf_counter()
    for thread in threads:
        thread.start()
    time.sleep(seconds)
    over.set()
    for thread in threads:
        thread.join()
    took = time.perf_counter() - started
    if failed:
        raise failed[0]
    return sum(done) / took


@contextmanager
def database(url: str | None) -> Iterator[str]:
    """The database to measure on: the one given, or one of a server that is gone afterwards."""
    if url is not None:
        yield url
        return
    from tests.postgres_server import PostgresServer

    server = PostgresServer.make()
    try:
        with server.database() as made:
            yield made
    finally:
        server.remove()


def measure(url: str, rounds: int, seconds: float) -> dict[str, float]:
    bare, guarded = Bare(url), Guarded(url)
    jobs: dict[str, Callable[[float], float]] = {
        "bare": bare.many,
        "threads": guarded.many,
        "tasks": guarded.tasks,
        "bare_alone": bare.alone,
        "alone": guarded.alone,
    }
    found: dict[str, list[float]] = {name: [] for name in jobs}
    try:
        for job in jobs.values():
            job(min(seconds, 0.5))  # the first connections and plans are nobody's figure
        for _ in range(rounds):
            for name, job in jobs.items():
                found[name].append(job(seconds))
    finally:
        guarded.close()
        bare.close()
    figures = {f"{name}_per_s": statistics.median(rates) for name, rates in found.items()}
    for name in TARGETS:
        figures[f"{name}_ratio"] = statistics.median(
            rate / base for rate, base in zip(found[name], found["bare"], strict=True)
        )
    figures["alone_ms"] = 1_000 / figures["alone_per_s"]
    figures["bare_alone_ms"] = 1_000 / figures["bare_alone_per_s"]
    return figures


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--url")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    with database(asked.url) as url:
        figures = measure(url, asked.rounds, asked.seconds)
    for name, value in figures.items():
        print(f"{name:20} {value:10.2f}")
    missed = [name for name, target in TARGETS.items() if figures[f"{name}_ratio"] < target]
    report = {
        "figures": {name: round(value, 3) for name, value in figures.items()},
        "targets": TARGETS,
        "missed": missed,
        "workers": WORKERS,
        "python": sys.version.split()[0],
    }
    if asked.json:
        asked.json.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    print("missed: " + ", ".join(missed) if missed else "all targets reached")
    return bool(missed)


if __name__ == "__main__":
    sys.exit(main())
