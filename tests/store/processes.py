"""Starting `tests.store.worker` in real processes, and reading what they say."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import orjson

import endstop

REPOSITORY = Path(__file__).resolve().parents[2]
WAIT_S = 120

Worker = subprocess.Popen[str]


def start(mode: str, path: Path, *arguments: str) -> Worker:
    """Start one worker."""
    package = str(Path(endstop.__file__).resolve().parents[1])
    return subprocess.Popen(
        [sys.executable, "-m", "tests.store.worker", mode, str(path), *arguments],
        cwd=REPOSITORY,
        env={**os.environ, "PYTHONPATH": package, "PYTHONDONTWRITEBYTECODE": "1"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def heard(worker: Worker) -> dict[str, object]:
    """The next thing that a worker says."""
    assert worker.stdout is not None
    line = worker.stdout.readline()
    assert line, f"the worker ended with {worker.wait(WAIT_S)}"
    return dict(orjson.loads(line))


def tell(worker: Worker) -> None:
    """Let a worker go on."""
    assert worker.stdin is not None
    worker.stdin.write("go on\n")
    worker.stdin.flush()


def ended(worker: Worker) -> dict[str, object]:
    """The last thing that a worker says before it ends well."""
    out, _ = worker.communicate(timeout=WAIT_S)
    assert worker.returncode == 0
    return dict(orjson.loads(out.splitlines()[-1]))


@contextmanager
def killed_at_the_end(*workers: Worker) -> Iterator[None]:
    """Whatever happens in the block, no worker outlives it."""
    try:
        yield
    finally:
        for worker in workers:
            if worker.poll() is None:
                worker.kill()
            worker.communicate(timeout=WAIT_S)
