"""What the SQLite store costs, beside a bare loop on the same disk.

    python benchmarks/bench_store.py [--folder DIR] [--rounds N] [--json FILE]

The yardstick is the least that any durable guard must do: two commits an operation (an insert before, an update after)
of one 300-byte row, through the same SQLite, with the same pragmas, in the same folder. Rounds of both are interleaved
and medians compared, because a disk's speed wanders by more than any difference worth measuring.

* `alone`: one synchronous caller, one `run.call` after the other; runs of 20 steps, the default cap.
* `many`: 64 runs at once on one event loop, through `run.acall`. Also beside a thread that never stops computing.
* `alone_store`, `many_store`: the same steps put to the store directly, without the guard around them.
* `processes`: 8 processes on one file; the longest wait of any writer beside the median.

A run is entered and left outside the measured time; what is measured is its calls.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import AsyncExitStack, contextmanager
from pathlib import Path

import apsw

import endstop as es
from endstop.runtime.clock import SystemClock, SystemIds
from endstop.store.sqlite import SqliteStore
from endstop.testing.store_samples import AddStep, new_run, reserve, settle

STEPS_A_RUN = 20
RUNS_AT_ONCE = 64
PROCESSES = 8
STEPS_A_PROCESS = 150
ROW_BYTES = 300
BARE_WAL_PAGES = 4_000
SPEC = es.Spec(what_it_does="saves", what_it_does_not="deletes", done_looks_like="all is saved")
POLICY = es.Policy(tools={"save": es.ToolPolicy(effect="write", idempotency_key="{key}")})
TARGETS = {"alone": 0.8, "many": 2.5, "processes": 20.0}

Figures = dict[str, float]


def store_in(folder: Path, name: str) -> SqliteStore:
    return SqliteStore(folder / name, new_key=SystemIds().new_key, now_us=SystemClock().now_us)


class BareLoop:
    """Two commits an operation, and nothing else."""

    def __init__(self, folder: Path) -> None:
        self._connection = apsw.Connection(str(folder / "bare.db"))
        self._row = 0
        for pragma in ("journal_mode = WAL", "synchronous = FULL", f"wal_autocheckpoint = {BARE_WAL_PAGES}"):
            self._connection.execute(f"PRAGMA {pragma}")
        self._connection.execute("CREATE TABLE operation (id INTEGER PRIMARY KEY, state TEXT, body BLOB)")

    def run(self, count: int) -> float:
        """Microseconds an operation."""
        execute = self._connection.execute
        before, after = b"x" * ROW_BYTES, b"y" * ROW_BYTES
        started = time.perf_counter()
        for row in range(self._row, self._row + count):
            execute("BEGIN IMMEDIATE")
            execute("INSERT INTO operation VALUES (?, ?, ?)", (row, "EXECUTING", before))
            execute("COMMIT")
            execute("BEGIN IMMEDIATE")
            execute("UPDATE operation SET state = ?, body = ? WHERE id = ?", ("COMMITTED", after, row))
            execute("COMMIT")
        self._row += count
        return (time.perf_counter() - started) / count * 1e6


def save(key: int, text: str) -> str:
    """The tool: nothing but its own call."""
    return f"{key}: {text}"


async def save_async(key: int, text: str) -> str:
    """The same for an event loop."""
    return f"{key}: {text}"


class Alone:
    """One caller of one guard."""

    def __init__(self, folder: Path) -> None:
        self._guard = es.open(f"sqlite:///{(folder / 'alone.db').absolute()}", policy=POLICY)
        self._key = 0

    def run(self, count: int) -> float:
        """Microseconds a guarded write."""
        taken = 0.0
        for _ in range(count // STEPS_A_RUN):
            with self._guard.run(SPEC) as run:
                started = time.perf_counter()
                for _ in range(STEPS_A_RUN):
                    self._key += 1
                    run.call(save, {"key": self._key, "text": "new"}, tool="save")
                taken += time.perf_counter() - started
        return taken / (count // STEPS_A_RUN * STEPS_A_RUN) * 1e6


class Many:
    """Many runs of one guard on one event loop."""

    def __init__(self, folder: Path) -> None:
        self._guard = es.open(f"sqlite:///{(folder / 'many.db').absolute()}", policy=POLICY)
        self._key = 0

    def run(self) -> float:
        """Microseconds a guarded write, all runs taken together."""
        return asyncio.run(self._all())

    async def _all(self) -> float:
        async with AsyncExitStack() as stack:
            runs = [await stack.enter_async_context(self._guard.run(SPEC)) for _ in range(RUNS_AT_ONCE)]
            started = time.perf_counter()
            await asyncio.gather(*(self._one(run) for run in runs))
            return (time.perf_counter() - started) / (RUNS_AT_ONCE * STEPS_A_RUN) * 1e6

    async def _one(self, run: es.Run) -> None:
        for _ in range(STEPS_A_RUN):
            self._key += 1
            await run.acall(save_async, {"key": self._key, "text": "new"}, tool="save")


class AloneStore:
    """One caller of the store."""

    def __init__(self, folder: Path) -> None:
        self._store = store_in(folder, "alone-store.db")
        self._runs = 0

    def run(self, count: int) -> tuple[float, float]:
        """Microseconds a guarded write: in the store, and with the making of its digests and records."""
        inside = whole = 0.0
        for _ in range(count // STEPS_A_RUN):
            self._runs += 1
            run_id = f"{self._runs:08d}-0000-7000-8000-000000000000"
            self._store.open_run(new_run(run_id)).result()
            for step in range(STEPS_A_RUN):
                first = time.perf_counter()
                asked = reserve(run_id, f"{run_id}-{step}")
                second = time.perf_counter()
                reserved = self._store.transact_now(asked)
                third = time.perf_counter()
                settling = settle(asked, reserved)
                fourth = time.perf_counter()
                self._store.transact_now(settling)
                fifth = time.perf_counter()
                whole += fifth - first
                inside += third - second + fifth - fourth
        done = count // STEPS_A_RUN * STEPS_A_RUN
        return inside / done * 1e6, whole / done * 1e6


class ManyStore:
    """Many runs on one event loop, in the store alone."""

    def __init__(self, folder: Path) -> None:
        self._store = store_in(folder, "many-store.db")
        self._runs = 0

    def run(self) -> float:
        """Microseconds a guarded write, all runs taken together."""
        return asyncio.run(self._all())

    async def _all(self) -> float:
        ids = []
        for _ in range(RUNS_AT_ONCE):
            self._runs += 1
            ids.append(f"{self._runs:08d}-0000-7000-8000-000000000000")
        for run_id in ids:
            self._store.open_run(new_run(run_id)).result()
        started = time.perf_counter()
        await asyncio.gather(*(self._one(run_id) for run_id in ids))
        return (time.perf_counter() - started) / (RUNS_AT_ONCE * STEPS_A_RUN) * 1e6

    async def _one(self, run_id: str) -> None:
        for step in range(STEPS_A_RUN):
            asked = reserve(run_id, f"{run_id}-{step}")
            reserved = await self._store.transact_async(asked)
            await self._store.transact_async(settle(asked, reserved))


@contextmanager
def computing() -> Iterator[None]:
    """A thread that never stops computing."""
    done = threading.Event()

    def compute() -> None:
        value = 1
        while not done.is_set():
            for _ in range(1_000):
                value = value * 1_103_515_245 % 2_147_483_647

    thread = threading.Thread(target=compute)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def interleaved(folder: Path, rounds: int) -> dict[str, Figures]:
    """Every way of writing beside the bare loop, one round of each after the other."""
    bare, alone, many = BareLoop(folder), Alone(folder), Many(folder)
    alone_store, many_store = AloneStore(folder), ManyStore(folder)
    count = STEPS_A_RUN * 10
    taken: dict[str, list[float]] = {
        name: [] for name in ("bare", "alone", "many", "alone_store", "whole", "many_store")
    }
    for number in range(rounds + 1):
        inside, whole = alone_store.run(count)
        found = {
            "bare": bare.run(count), "alone": alone.run(count), "many": many.run(),
            "alone_store": inside, "whole": whole, "many_store": many_store.run(),
        }  # fmt: skip
        for name, value in found.items():
            if number:  # the first round warms up
                taken[name].append(value)
    busy_bares, busy_manies = [], []
    with computing():
        for _ in range(max(rounds // 4, 2)):
            busy_bares.append(bare.run(STEPS_A_RUN))
            busy_manies.append(many.run())
    medians = {name: statistics.median(values) for name, values in taken.items()}
    base, whole = medians.pop("bare"), medians.pop("whole")
    figures = {"bare": {"us": base}} | {name: {"us": us, "ratio": base / us} for name, us in medians.items()}
    figures["alone_store"] |= {"us_with_digests": whole, "ratio_with_digests": base / whole}
    figures["many_beside_a_computing_thread"] = {
        "us": statistics.median(busy_manies),
        "bare_us": statistics.median(busy_bares),
        "ratio": statistics.median(busy_bares) / statistics.median(busy_manies),
    }
    return figures


def in_processes(folder: Path) -> Figures:
    """How long each writer of 8 processes waits."""
    path = folder / "shared.db"
    store_in(folder, "shared.db").close()
    command = [sys.executable, __file__, "--worker", str(path)]
    workers = [
        subprocess.Popen([*command, str(number)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for number in range(PROCESSES)
    ]
    for worker in workers:
        worker.stdout.readline()  # it is ready
    for worker in workers:
        worker.stdin.write("go\n")
        worker.stdin.flush()
    waits = [wait for worker in workers for wait in json.loads(worker.communicate()[0])]
    median = statistics.median(waits)
    return {
        "median_us": median,
        "p99_us": statistics.quantiles(waits, n=100)[98],
        "max_us": max(waits),
        "max_by_median": max(waits) / median,
    }


def work(path: Path, number: str) -> None:
    """One of the processes."""
    store = SqliteStore(path, new_key=SystemIds().new_key, now_us=SystemClock().now_us)
    store.open_run(new_run(f"run-{number}")).result()
    print("ready", flush=True)
    sys.stdin.readline()
    waits = []
    for step in range(STEPS_A_PROCESS):
        started = time.perf_counter()
        store.transact_now(AddStep(run_id=f"run-{number}", now_us=step))
        waits.append((time.perf_counter() - started) * 1e6)
    print(json.dumps(waits))
    store.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, default=Path(), help="a folder on the disk to measure")
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--json", type=Path, help="write the figures there too")
    parser.add_argument("--worker", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        work(Path(options.worker[0]), options.worker[1])
        return
    with tempfile.TemporaryDirectory(dir=options.folder, prefix=".bench-store-") as name:
        figures = interleaved(Path(name), options.rounds)
        figures["processes"] = in_processes(Path(name))
    reached = {
        "alone": figures["alone"]["ratio"] >= TARGETS["alone"],
        "many": figures["many"]["ratio"] >= TARGETS["many"],
        "processes": figures["processes"]["max_by_median"] <= TARGETS["processes"],
    }
    rounded = {name: {key: round(value, 2) for key, value in part.items()} for name, part in figures.items()}
    load = [round(value, 2) for value in os.getloadavg()]
    text = json.dumps({"figures": rounded, "targets": TARGETS, "reached": reached, "load_average": load}, indent=2)
    print(text)
    if options.json:
        options.json.write_text(text + "\n")


if __name__ == "__main__":
    main()
