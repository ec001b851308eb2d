"""A process of its own for the store tests: `python -m tests.store.worker MODE PATH ARGUMENT…` says facts as JSON."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import orjson

from endstop.core.reasons import Action
from endstop.testing.store_samples import AddStep, new_run, reserve, sample_policy, settle
from tests.store.kit import sqlite_store

SHARED_STEPS = 40
NOBODY = 65_534


def say(**facts: object) -> None:
    sys.stdout.write(orjson.dumps(facts).decode() + "\n")
    sys.stdout.flush()


def opens(path: Path) -> None:
    """Open a store that may not be there yet, and write one run."""
    store = sqlite_store(path)
    store.open_run(new_run(f"run-{os.getpid()}")).result()
    say(ledger=store.ledger)
    store.close()


def adds(path: Path, run_id: str, count: int) -> None:
    """Count `count` steps more in a shared run, saying each answer and how long it took."""
    store = sqlite_store(path)
    store.open_run(new_run(run_id, owner_id=f"owner-{os.getpid()}")).result()
    answers, waits_us = [], []
    for _ in range(count):
        started = time.perf_counter_ns()
        answers.append(store.transact_now(AddStep(run_id=run_id, now_us=1)))
        waits_us.append((time.perf_counter_ns() - started) // 1_000)
    say(answers=answers, waits_us=waits_us)
    store.close()


def asks(path: Path, run_id: str, owner: str) -> None:
    """Ask for calls under one shared cap until the run is over; say how many were let through."""
    policy = sample_policy(SHARED_STEPS)
    store = sqlite_store(path)
    store.open_run(new_run(run_id, policy=policy, owner_id=owner)).result()
    executed = stopped = 0
    while not stopped:
        asked = reserve(run_id, f"{owner}-{executed}", policy=policy)
        reserved = store.transact_now(asked)
        if reserved.verdict.action is Action.STOP:
            stopped += 1
        elif reserved.verdict.action is Action.EXECUTE:
            executed += 1
            store.transact_now(settle(asked, reserved))
    say(executed=executed)
    store.close()


def decides(path: Path, run_id: str, owner: str) -> None:
    """Wait for the word, then propose the very same write as everybody else."""
    store = sqlite_store(path)
    store.open_run(new_run(run_id, owner_id=owner)).result()
    say(ready=True)
    sys.stdin.readline()
    reserved = store.transact_now(reserve(run_id, "the-row"))
    say(action=reserved.verdict.action, reason=reserved.verdict.reason)
    store.close()


def streams(path: Path, run_id: str) -> None:
    """Write for ever, through the queue and at once, and say what was acknowledged; to be killed."""
    store = sqlite_store(path)
    store.open_run(new_run(run_id)).result()
    number = 0
    while True:
        futures = []
        for _ in range(8):
            number += 1
            futures.append((number, store.transact(AddStep(run_id=run_id, now_us=number))))
        done = [future.result() for _, future in futures]
        number += 1
        done.append(store.transact_now(AddStep(run_id=run_id, now_us=number)))
        say(acknowledged=done[-1])


def reserves(path: Path, run_id: str) -> None:
    """Let one call through, then hang in the middle of it; to be killed."""
    store = sqlite_store(path)
    store.open_run(new_run(run_id)).result()
    first = reserve(run_id, "done")
    store.transact_now(settle(first, store.transact_now(first)))
    store.transact_now(reserve(run_id, "open"))
    say(reserved=True)
    sys.stdin.readline()


def holds(path: Path) -> None:
    """Take the write lock of the processes and keep it; to be killed."""
    store = sqlite_store(path)
    store._turnstile.enter()
    say(held=True)
    sys.stdin.readline()
    store._turnstile.leave()
    say(held=False)
    sys.stdin.readline()


def leaves_at_exit(path: Path) -> None:
    """Queue steps and end without waiting for them or closing."""
    store = sqlite_store(path)
    store.open_run(new_run("a")).result()
    for number in range(50):
        store.transact(AddStep(run_id="a", now_us=number))
    say(queued=True)


def reads_only(path: Path) -> None:
    """Try to write into a store that this process may only read; a superuser gives up his rights first."""
    if os.geteuid() == 0:
        os.setuid(NOBODY)
    try:
        sqlite_store(path)
    except Exception as error:
        say(error=type(error).__name__, message=str(error))
    else:
        say(error=None)


def forks(path: Path) -> None:
    """Fork with an open store: the child must not use it, and may open its own."""
    from endstop.errors import GuardClosedError

    store = sqlite_store(path)
    store.open_run(new_run("a")).result()
    store.transact(AddStep(run_id="a", now_us=1)).result()
    child = os.fork()
    if child == 0:
        refused = []
        for call in (
            lambda: store.transact(AddStep(run_id="a", now_us=1)),
            lambda: store.transact_now(AddStep(run_id="a", now_us=1)),
            lambda: store.transact_async(AddStep(run_id="a", now_us=1)),
            lambda: store.run("a"),
            store.change_counter,
        ):
            try:
                call()
            except GuardClosedError:
                refused.append(True)
        store.close()
        own = sqlite_store(path)
        say(refused=len(refused), count=own.transact_now(AddStep(run_id="a", now_us=1)))
        own.close()
        return
    os.waitpid(child, 0)
    say(count=store.transact_now(AddStep(run_id="a", now_us=1)))
    store.close()


def main() -> None:
    mode, path, *rest = sys.argv[1:]
    match mode:
        case "adds":
            adds(Path(path), rest[0], int(rest[1]))
        case _:
            globals()[mode](Path(path), *rest)


if __name__ == "__main__":
    main()
