"""Signals and time-outs as operator stops: the run ends with its envelope before the process does.

The loop works in a thread of its own; the main thread waits, shows progress and answers signals. A stop is committed to
the store first, which cancels async calls in flight; then the loop is waited for: after Ctrl-C as long as the person
likes, after anything else for `GRACE_MS`. A second Ctrl-C ends the wait. Leaving early writes
the envelope and leaves calls that are still in flight in doubt. A third Ctrl-C leaves even when the store is mute.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Generic, TypeVar

from endstop.cli.codes import ExitCode
from endstop.errors import InvariantError, RunNotFoundError, StoreError

if TYPE_CHECKING:
    from types import FrameType

    from endstop.cli.session import Session
    from endstop.runtime.guard import Guard

__all__ = ["Cause", "Supervisor"]

T = TypeVar("T")
LOOK_MS: Final = 50
GRACE_MS: Final = 5_000
MICROS: Final = 1_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Cause:
    """Why this process stopped the run, who that was, and the exit code that follows."""

    reason: str
    actor: str
    exit_code: int


_SIGNALS: Final = {
    signal.SIGINT: Cause(reason="interrupted (SIGINT)", actor="operator", exit_code=ExitCode.INTERRUPTED),
    signal.SIGTERM: Cause(reason="terminated (SIGTERM)", actor="operator", exit_code=ExitCode.OPERATOR),
    signal.SIGHUP: Cause(reason="hung up (SIGHUP)", actor="operator", exit_code=ExitCode.OPERATOR),
}


class _Work(threading.Thread, Generic[T]):
    """The loop in its own thread, and what came of it."""

    def __init__(self, work: Callable[[], T]) -> None:
        super().__init__(name="endstop-run", daemon=True)
        self._work = work
        self.result: T | None = None
        self.error: BaseException | None = None

    def run(self) -> None:
        """Work, and keep what comes of it for the main thread."""
        try:
            self.result = self._work()
        except BaseException as error:  # raised again in the main thread
            self.error = error


class Supervisor:
    """Lets one loop work while signals and a time-out may stop its run. `cause` says what did, or None."""

    def __init__(self, session: Session, guard: Guard, run_id: str, *, timeout_s: int | None) -> None:
        self._session = session
        self._guard = guard
        self._run_id = run_id
        self._timeout_s = timeout_s
        self._wake = threading.Event()
        self._asked: Cause | None = None
        self._was_told = False
        self._leaves_now = False
        self._give_up_us: int | None = None
        self.cause: Cause | None = None

    def supervise(self, work: Callable[[], T], look: Callable[[], None]) -> T:
        """Run `work` in a thread to its end, calling `look` now and then; gives its result, or raises what it raised.

        Told to leave at once, it ends the process.
        """
        thread = _Work(work)
        clock = self._session.clock
        until_us = None if self._timeout_s is None else clock.now_us() + self._timeout_s * 1_000 * MICROS
        with self._signals():
            thread.start()
            while thread.is_alive():
                thread.join(LOOK_MS / 1_000)
                if until_us is not None and clock.now_us() >= until_us:
                    until_us = None
                    self._ask(Cause(reason=f"--timeout of {self._timeout_s} s ran out", actor="operator",
                                    exit_code=ExitCode.TIMEOUT))  # fmt: skip
                if self._asked is not None and self.cause is None:
                    self._stop(self._asked)
                if self._leaves_now:
                    self._leave(ExitCode.INTERRUPTED)
                if self._give_up_us is not None and clock.now_us() >= self._give_up_us:
                    self._leave(self.cause.exit_code if self.cause is not None else ExitCode.INTERNAL)
                look()
        look()
        if thread.error is not None:
            raise thread.error
        if thread.result is None:
            msg = "the loop came back without a result"
            raise InvariantError(msg)
        return thread.result

    # -- Parts

    @contextmanager
    def _signals(self) -> Iterator[None]:
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {number: signal.getsignal(number) for number in _SIGNALS}
        for number in _SIGNALS:
            # A hang-up that was ignored from the start (nohup) stays ignored.
            if number != signal.SIGHUP or before[number] is not signal.SIG_IGN:
                signal.signal(number, self._on_signal)
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _on_signal(self, number: int, _: FrameType | None) -> None:
        again, self._was_told = self._was_told, True
        if again and number == signal.SIGINT:
            if self._leaves_now:
                os._exit(ExitCode.INTERRUPTED)
            self._leaves_now = True
        self._ask(_SIGNALS[signal.Signals(number)])

    def _ask(self, cause: Cause) -> None:
        if self._asked is None:
            self._asked = cause

    def _stop(self, cause: Cause) -> None:
        """Commit the stop. A run that is not there yet is stopped a moment later."""
        try:
            report = self._guard.stop(self._run_id, reason=cause.reason, actor=cause.actor)
        except RunNotFoundError:
            return
        except StoreError as error:
            # Without its record nothing more is sent anyway; the loop ends by itself.
            self._session.output.note(f"endstop: the stop could not be recorded: {error}")
        else:
            calls = ", ".join(tool for _, tool in report.in_flight)
            hint = ", press Ctrl-C again to leave at once" if cause.exit_code == ExitCode.INTERRUPTED else ""
            waits = f"; waiting for {calls}{hint}" if calls else ""
            self._session.output.note(f"endstop: {cause.reason}: the run is stopped{waits}")
        if cause.exit_code != ExitCode.INTERRUPTED:
            self._give_up_us = self._session.clock.now_us() + GRACE_MS * MICROS
        self.cause = cause

    def _leave(self, code: int) -> None:
        """End the process with the envelope on stdout, without waiting for any thread."""
        from endstop.core.codec import envelope_json

        output = self._session.output
        record = self._guard.store.run(self._run_id).result()
        envelope = None if record is None else record.envelope
        if output.as_json:
            output.json(
                {
                    "run_id": self._run_id, "success": False, "started": True,
                    "state": None if record is None else record.state.value,
                    "terminal_reason": None if envelope is None else envelope.terminal_reason.value,
                    "exit_code": int(code), "envelope": None if envelope is None else envelope_json(envelope),
                }
            )  # fmt: skip
        elif envelope is not None:
            output.facts([("run", envelope.run_id), ("ended", envelope.terminal_reason.value)])
        output.note("endstop: left with calls in flight; they are in doubt, see `endstop reconcile`")
        os._exit(code)
