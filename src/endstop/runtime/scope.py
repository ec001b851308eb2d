"""Entering and leaving a run: the `with` block.

Leaving raises RunStopped (with the envelope) whenever the run was stopped, also when the halt was swallowed on the way
or when somebody stopped the run from outside. Groups are unwrapped; other exceptions are kept as the cause.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar, cast

from endstop.core.pipeline import halted
from endstop.core.reasons import Reason, RunState
from endstop.core.steps_life import LeaveRun, SeeOrders
from endstop.errors import EndstopError, InvariantError, RunHalted, RunNotFoundError, RunStopped
from endstop.runtime.drivers import await_commit, wait_commit
from endstop.runtime.run import Run, RunFacts

if TYPE_CHECKING:
    from collections.abc import Generator, Mapping
    from concurrent.futures import Future
    from types import TracebackType

    from endstop.core.envelope import Envelope
    from endstop.core.model import Spec, Version
    from endstop.runtime.guard import Guard

__all__ = ["RunScope"]

A = TypeVar("A")
_OVER = (RunState.STOPPED, RunState.COMPLETE, RunState.PAUSED)


class RunScope:
    """The context manager that `guard.run(...)` gives: `with` or `async with`, once."""

    def __init__(
        self,
        guard: Guard,
        *,
        spec: Spec | None,
        run_id: str,
        labels: Mapping[str, str],
        agent: str,
        initial_progress_version: Version | None,
    ) -> None:
        self._guard = guard
        self._spec = spec
        self._labels = labels
        self._agent = agent
        self._initial = initial_progress_version
        self._facts: RunFacts | None = None
        self._member = ""
        self.run_id = run_id

    # -- In

    def __enter__(self) -> Run:
        held: list[BaseException] = []
        flow = self._entering()
        answer: object = None
        try:
            while not held:
                answer = wait_commit(flow.send(answer), held)
        except StopIteration as done:
            return cast("Run", done.value)
        except BaseException as broken:
            held.append(broken)
        # Whoever does not get in does not stay in.
        try:
            wait_commit(self._leaving(), held)
        except EndstopError as fault:
            held[0].add_note(f"leaving the run could not be recorded: {fault}")
        raise held[0]

    async def __aenter__(self) -> Run:
        held: list[BaseException] = []
        flow = self._entering()
        answer: object = None
        try:
            while not held:
                answer = await await_commit(flow.send(answer), held)
        except StopIteration as done:
            return cast("Run", done.value)
        except BaseException as broken:
            held.append(broken)
        try:
            await await_commit(self._leaving(), held)
        except EndstopError as fault:
            held[0].add_note(f"leaving the run could not be recorded: {fault}")
        raise held[0]

    def _entering(self) -> Generator[Future[object], object, Run]:
        """What entering asks of the store, one future after the other."""
        guard, store = self._guard, self._guard.store
        # 1. A restart after a crash: what the dead worker left is marked before anything is asked.
        known = yield from _asked(store.run(self.run_id))
        if known is not None:
            recovery = guard.recovery(known)
            if recovery is not None:
                yield from _asked(store.transact(recovery))
        # 2. Create or join.
        self._member = guard.member_id()
        spec = self._spec
        if spec is None:
            stored = yield from _asked(store.spec(self.run_id))
            if stored is None:
                msg = f"run {self.run_id} has no spec: give one, or write one with `endstop spec`"
                raise RunNotFoundError(msg)
            spec = stored.spec
        prices = guard.prices
        opened = yield from _asked(
            store.open_run(
                guard.new_run(
                    spec=spec, run_id=self.run_id, labels=self._labels, agent=self._agent,
                    initial_progress_version=self._initial, owner_id=self._member,
                ),
                use_stored_spec=self._spec is None,
            )
        )  # fmt: skip
        joined = opened.joined
        # 3. A run that has ended, or that is under a kill order, is entered by nobody.
        if joined.envelope is not None and joined.state in _OVER:
            raise _stopped(joined.envelope)
        if (yield from _asked(store.controls())):
            envelope = yield from _asked(
                store.transact(SeeOrders(run_id=self.run_id, now_us=guard.world.clock.now_us()))
            )
            if envelope is not None:
                raise _stopped(envelope)
        # 4. A child that is entered by its id, and a run that others made, are what their records say.
        record = yield from _asked(store.run(self.run_id))
        if record is None:
            msg = f"run {self.run_id} was entered and is not in the store"
            raise InvariantError(msg)
        facts = RunFacts(
            root_run_id=record.root_run_id, world=guard.world, ids=guard.ids, policy=guard.policy,
            limits=joined.limits, spec=opened.spec, run_key=opened.run_key, owner_id=self._member,
            labels=dict(record.labels), prices=prices, resumed_checkpoint=joined.checkpoint,
            progress_version=joined.progress_version, generation=joined.generation,
        )  # fmt: skip
        self._facts = facts
        return Run(
            facts, run_id=self.run_id, root_run_id=record.root_run_id,
            agent=record.agent if record.parent_run_id is not None else self._agent, depth=record.depth,
        )  # fmt: skip

    # -- Out

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        held: list[BaseException] = []
        try:
            envelope = wait_commit(self._leaving(), held)
        except EndstopError as broken:
            self._raise(self._seen(broken), error)
            raise
        if held:
            raise held[0]
        self._raise(envelope, error)

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        held: list[BaseException] = []
        try:
            envelope = await await_commit(self._leaving(), held)
        except EndstopError as broken:
            self._raise(self._seen(broken), error)
            raise
        if held:
            raise held[0]
        self._raise(envelope, error)

    def _leaving(self) -> Future[Envelope | None]:
        """Take this worker out; gives the run's end if it has one by now."""
        if self._facts is not None:
            self._facts.has_left = True
        guard = self._guard
        return guard.store.transact(
            LeaveRun(run_id=self.run_id, now_us=guard.world.clock.now_us(), owner_id=self._member)
        )

    def _seen(self, broken: EndstopError) -> Envelope | None:
        """The end that this process saw, for when the store cannot be asked; the store's fault becomes a note on it."""
        signal = None if self._facts is None else self._facts.signal
        if signal is not None:
            signal.add_note(f"leaving the run could not be recorded: {broken}")
        return None if signal is None else signal.envelope

    def _raise(self, envelope: Envelope | None, error: BaseException | None) -> None:
        signals, others = _sorted_out(error, None if self._facts is None else self._facts.root_run_id)
        seen = None if self._facts is None else self._facts.signal
        # What this process saw goes first: a stop that somebody has lifted since by a resume is a stop all the same.
        if seen is not None and seen.envelope.terminal_reason is not Reason.COMPLETE:
            envelope = seen.envelope
        if envelope is None and signals:
            envelope = signals[0].envelope
        if envelope is None or (envelope.terminal_reason is Reason.COMPLETE and not signals):
            return
        if self._facts is not None and seen is None:
            self._facts.signal = halted(envelope)
        # A cancellation, an interrupt or an exit is the caller's own business and goes on as it is.
        if any(not isinstance(other, Exception) for other in others):
            return
        if not others:
            raise _stopped(envelope) from (signals[0] if signals else None)
        if len(others) == 1:
            raise _stopped(envelope) from others[0]
        kept = [other for other in others if isinstance(other, Exception)]
        raise _stopped(envelope) from ExceptionGroup("raised while the run was being stopped", kept)


def _asked(future: Future[A]) -> Generator[Future[object], object, A]:
    """Wait for a store's answer, in whichever way the block was entered."""
    answer = yield cast("Future[object]", future)
    return cast("A", answer)


def _stopped(envelope: Envelope) -> RunStopped:
    return RunStopped(f"run {envelope.run_id} was stopped: {envelope.terminal_reason}. {envelope.message}", envelope)


def _sorted_out(error: BaseException | None, run_id: str | None) -> tuple[list[RunHalted], list[BaseException]]:
    """The halts of this run and the other exceptions inside `error`, groups unwrapped."""
    if error is None:
        return [], []
    if isinstance(error, RunHalted) and run_id in (None, error.envelope.run_id):
        return [error], []
    if isinstance(error, BaseExceptionGroup):
        signals: list[RunHalted] = []
        others: list[BaseException] = []
        for part in error.exceptions:
            found, rest = _sorted_out(part, run_id)
            signals += found
            others += rest
        return signals, others
    return [], [error]
