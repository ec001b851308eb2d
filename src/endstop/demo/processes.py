"""The demonstration's processes: started here, and ended here whatever happens."""

from __future__ import annotations

import select
import signal
import subprocess
import sys
import threading
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from endstop.demo.crm import recorded_writes
from endstop.errors import EndstopError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path
    from types import FrameType

    from endstop.runtime.clock import Clock

__all__ = [
    "DemoFailedError", "Killed", "Place", "crm_process", "ends_on_sigterm", "kill", "wait_for_write", "worker_process",
]  # fmt: skip

START_MS_MAX: Final = 10_000
END_MS_MAX: Final = 5_000
LOOK_EVERY_MS: Final = 5
# Nothing of the demonstration outlives it by more than this, also when it is killed itself.
CRM_LIFETIME_MS: Final = 60_000
# The worker waits for its answer when it is killed. The CRM gives up waiting when it is ended.
ANSWER_DELAY_MS: Final = 8_000
LOG_BYTES_SHOWN: Final = 2_000
SIGTERM_EXIT: Final = 128 + signal.SIGTERM


class DemoFailedError(EndstopError):
    """The demonstration could not be played to its end, so it shows nothing either way."""

    code = "demo_failed"


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """The folder of one demonstration and the files in it."""

    folder: Path

    @property
    def crm_db(self) -> Path:
        """The CRM's own SQLite file."""
        return self.folder / "crm.db"

    @property
    def policy(self) -> Path:
        """The guard's policy file."""
        return self.folder / "endstop.toml"

    @property
    def store_url(self) -> str:
        """The guard's store."""
        return f"sqlite:///{(self.folder / 'endstop.db').resolve()}"

    @property
    def log(self) -> Path:
        """What the processes say on stderr."""
        return self.folder / "processes.log"


@dataclass(frozen=True, slots=True, kw_only=True)
class Killed:
    """A worker that was killed, and the signal that its end reports."""

    pid: int
    signal: str


@contextmanager
def ends_on_sigterm() -> Iterator[None]:
    """Let a SIGTERM unwind this thread, so that everything started here is ended. Only the main thread may ask."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def leave(_number: int, _frame: FrameType | None) -> None:
        raise SystemExit(SIGTERM_EXIT)

    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextmanager
def crm_process(place: Place) -> Iterator[str]:
    """The CRM as a process of its own, with its own SQLite file; gives its URL. Raises DemoFailedError."""
    arguments = ("--db", str(place.crm_db), "--lifetime-ms", str(CRM_LIFETIME_MS), "--until-eof")
    with _process("endstop.demo.crm", arguments, place) as process:
        url = _first_line(process)
        if not url.startswith("http://127.0.0.1:"):
            msg = f"the CRM did not start within {START_MS_MAX} ms: {_last_words(place)}"
            raise DemoFailedError(msg)
        yield url


@contextmanager
def worker_process(place: Place, crm_url: str, contact_id: str, run_id: str) -> Iterator[subprocess.Popen[bytes]]:
    """The guarded agent as a process. The CRM applies its write at once and answers late."""
    arguments = (
        "--store", place.store_url, "--policy", str(place.policy), "--crm", crm_url, "--contact", contact_id,
        "--run-id", run_id, "--delay-ms", str(ANSWER_DELAY_MS),
    )  # fmt: skip
    with _process("endstop.demo.worker", arguments, place) as process:
        yield process


def wait_for_write(place: Place, contact_id: str, worker: subprocess.Popen[bytes], clock: Clock) -> None:
    """Wait until the CRM's own table holds the worker's write. Raises DemoFailedError when that does not happen."""
    until_us = clock.now_us() + START_MS_MAX * 1_000
    while not recorded_writes(place.crm_db, contact_id):
        if worker.poll() is not None or clock.now_us() >= until_us:
            msg = f"the agent's process wrote nothing within {START_MS_MAX} ms: {_last_words(place)}"
            raise DemoFailedError(msg)
        clock.sleep_ms(LOOK_EVERY_MS)


def kill(worker: subprocess.Popen[bytes]) -> Killed:
    """Kill the worker with SIGKILL, which no process can catch, and wait until it is gone."""
    worker.send_signal(signal.SIGKILL)
    code = worker.wait(END_MS_MAX / 1_000)
    return Killed(pid=worker.pid, signal=signal.Signals(-code).name if code < 0 else f"none (exit code {code})")


@contextmanager
def _process(module: str, arguments: Sequence[str], place: Place) -> Iterator[subprocess.Popen[bytes]]:
    # -P: no file of the working folder is imported by mistake. A session of its own: a Ctrl-C in the terminal reaches
    # the demonstration alone, which then ends its processes in order.
    with place.log.open("ab") as log:
        process = subprocess.Popen(  # noqa: S603  # this interpreter and a module of this package
            [sys.executable, "-P", "-m", module, *arguments],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, start_new_session=True,
        )  # fmt: skip
    with process:
        try:
            yield process
        finally:
            _end(process)


def _end(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is not None:
        return
    process.terminate()
    try:
        process.wait(END_MS_MAX / 1_000)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _first_line(process: subprocess.Popen[bytes]) -> str:
    """What the process says first; empty when it ends, or says nothing in time."""
    if process.stdout is None or not select.select([process.stdout], [], [], START_MS_MAX / 1_000)[0]:
        return ""
    return process.stdout.readline().decode("utf-8", "replace").strip()


def _last_words(place: Place) -> str:
    said = place.log.read_bytes()[-LOG_BYTES_SHOWN:].decode("utf-8", "replace").strip()
    return said.rpartition("\n")[2] or "it said nothing"
