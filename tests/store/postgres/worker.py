"""A process of its own: `python -m tests.store.postgres.worker MODE URL ARGUMENT…` says facts as JSON, line by line.

Its effects are lines in a file that it appends to, so that whoever reads the file knows how often each happened.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import orjson

import endstop as es
from endstop.store.postgres import PostgresStore
from tests.store.postgres.kit import CLOCK, IDS

SPEC = es.Spec(what_it_does="Sends letters.", what_it_does_not="Nothing else.", done_looks_like="All are sent.")
POLICY = es.Policy(
    limits=es.Limits(steps_max=10_000, wall_ms_max=10**9, no_progress_max=10_000, error_streak_max=10_000),
    tools={"letter.send": es.ToolPolicy(effect="write", idempotency_key="{letter}", scope="tenant")},
)
LEASE_MS = 1_500


def say(**facts: object) -> None:
    sys.stdout.write(orjson.dumps(facts).decode() + "\n")
    sys.stdout.flush()


def guard_on(url: str) -> es.Guard:
    from endstop.runtime.guard import Guard

    store = PostgresStore(url, new_key=IDS.new_key, now_us=CLOCK.now_us, lease_ms=LEASE_MS)
    return Guard(store, policy=POLICY, clock=CLOCK, ids=IDS)


def effect(path: Path, letter: str) -> None:
    """Do it, durably: one line a letter sent."""
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    os.write(descriptor, f"{letter}\n".encode())
    os.fsync(descriptor)
    os.close(descriptor)


def sends(url: str, run_id: str, effects: str, *letters: str) -> None:
    """Send each letter once under the guard; say what came of it."""
    with guard_on(url) as guard, guard.run(SPEC, run_id=run_id) as run:
        for number, letter in enumerate(letters):

            def send(letter: str) -> dict[str, str]:
                effect(Path(effects), letter)
                return {"sent": letter}

            try:
                answer = run.call(send, {"letter": letter}, tool="letter.send", call_id=f"{os.getpid()}-{number}")
                say(letter=letter, status=answer.status, replayed=answer.replayed, reason=answer.reason)
            except es.StoreError as error:
                say(letter=letter, status="store_error", error=type(error).__name__)


def hangs(url: str, run_id: str, effects: str, letter: str) -> None:
    """Send one letter, say so, and never come back from the tool: to be killed there."""

    def send(letter: str) -> dict[str, str]:
        effect(Path(effects), letter)
        say(sent=letter)
        time.sleep(600)
        return {}

    with guard_on(url) as guard, guard.run(SPEC, run_id=run_id) as run:
        run.call(send, {"letter": letter}, tool="letter.send", call_id="hangs")


def meets(url: str, run_id: str, effects: str, letter: str) -> None:
    """Be ready, wait for a line on standard input, then send one letter that another worker sends too."""
    with guard_on(url) as guard, guard.run(SPEC, run_id=run_id) as run:

        def send(letter: str) -> dict[str, str]:
            effect(Path(effects), letter)
            return {"sent": letter}

        say(ready=True)
        sys.stdin.readline()
        answer = run.call(send, {"letter": letter}, tool="letter.send", call_id="meets")
        say(status=answer.status, replayed=answer.replayed, reason=answer.reason)


MODES = {"sends": sends, "hangs": hangs, "meets": meets}

if __name__ == "__main__":
    MODES[sys.argv[1]](*sys.argv[2:])
