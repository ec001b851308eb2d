"""Entering and leaving a run: the `with` block.

Leaving raises RunStopped (with the envelope) whenever the run was stopped, also when the halt was swallowed on the way
or when somebody stopped the run from outside. Groups are unwrapped; other exceptions are kept as the cause.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from endstop.core.pipeline import halted
from endstop.core.reasons import Reason, RunState
from endstop.core.steps_life import LeaveRun
from endstop.errors import RunHalted, RunNotFoundError, RunStopped
from endstop.runtime.run import Run, RunFacts

if TYPE_CHECKING:
    from collections.abc import Mapping
    from types import TracebackType

    from endstop.core.envelope import Envelope
    from endstop.core.model import Spec, Version
    from endstop.runtime.guard import Guard

__all__ = ["RunScope"]

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
        self._run: Run | None = None
        self._facts: RunFacts | None = None
        self._member = ""
        self.run_id = run_id

    # -- In

    def __enter__(self) -> Run:
        guard, store = self._guard, self._guard.store
        # 1. A restart after a crash: what the dead worker left is marked before anything is asked.
        known = store.run(self.run_id).result()
        if known is not None:
            known = guard.recover(known)
        # 2. Create or join.
        self._member = guard.member_id()
        spec = self._spec
        if spec is None:
            stored = store.spec(self.run_id).result()
            if stored is None:
                msg = f"run {self.run_id} has no spec: give one, or write one with `endstop spec`"
                raise RunNotFoundError(msg)
            spec = stored.spec
        opened = store.open_run(
            guard.new_run(
                spec=spec, run_id=self.run_id, labels=self._labels, agent=self._agent,
                initial_progress_version=self._initial, owner_id=self._member,
            ),
            use_stored_spec=self._spec is None,
        ).result()  # fmt: skip
        joined = opened.joined
        # 3. A run that has ended is entered by nobody.
        if joined.envelope is not None and joined.state in _OVER:
            raise _stopped(joined.envelope)
        facts = RunFacts(
            world=guard.world, ids=guard.ids, policy=guard.policy, limits=joined.limits, spec=opened.spec,
            run_key=opened.run_key, owner_id=self._member, labels=self._labels or dict(known.labels if known else ()),
            prices=guard.prices, resumed_checkpoint=joined.checkpoint, progress_version=joined.progress_version,
            generation=joined.generation,
        )  # fmt: skip
        self._facts = facts
        self._run = Run(facts, run_id=self.run_id, root_run_id=self.run_id, agent=self._agent)
        return self._run

    async def __aenter__(self) -> Run:
        return await asyncio.to_thread(self.__enter__)

    # -- Out

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._raise(self._leave(), error)

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        leaving = asyncio.ensure_future(asyncio.to_thread(self._leave))
        try:
            envelope = await asyncio.shield(leaving)
        except asyncio.CancelledError:
            await leaving
            raise
        self._raise(envelope, error)

    def _leave(self) -> Envelope | None:
        """Take this worker out; gives the run's end if it has one by now."""
        guard = self._guard
        return guard.store.transact(
            LeaveRun(run_id=self.run_id, now_us=guard.world.clock.now_us(), owner_id=self._member)
        ).result()

    def _raise(self, envelope: Envelope | None, error: BaseException | None) -> None:
        signals, others = _sorted_out(error)
        if envelope is None and signals:
            envelope = signals[0].envelope
        if envelope is None or (envelope.terminal_reason is Reason.COMPLETE and not signals):
            return
        if self._facts is not None and self._facts.signal is None:
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


def _stopped(envelope: Envelope) -> RunStopped:
    return RunStopped(
        f"run {envelope.run_id} was stopped: {envelope.terminal_reason}. {envelope.message}", envelope
    )


def _sorted_out(error: BaseException | None) -> tuple[list[RunHalted], list[BaseException]]:
    """The halts and the other exceptions inside `error`, groups unwrapped."""
    if error is None:
        return [], []
    if isinstance(error, RunHalted):
        return [error], []
    if isinstance(error, BaseExceptionGroup):
        signals: list[RunHalted] = []
        others: list[BaseException] = []
        for part in error.exceptions:
            found, rest = _sorted_out(part)
            signals += found
            others += rest
        return signals, others
    return [], [error]
