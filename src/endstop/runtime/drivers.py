"""The drivers: they answer a pipeline's commands, one for threads and one for event loops.

Both keep one promise: a transaction that was begun is waited for, whatever interrupts the caller; the interruption is
raised afterwards, and a call that was let through meanwhile is settled as lost instead of executed.
"""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections import OrderedDict
from concurrent.futures import Future
from typing import TYPE_CHECKING, Final, TypeVar, cast

from endstop.core.commands import Command, Execute, Flow, Recall, RecoverOwner, Remember, Returned, Transact
from endstop.core.pipeline import halted
from endstop.core.steps_life import RecoverRun
from endstop.errors import InvariantError, UsageError
from endstop.runtime.context import CallContext, entered
from endstop.runtime.halts import AsyncWatch, HaltBoard

if TYPE_CHECKING:
    from collections.abc import Awaitable

    from endstop.core.model import ToolResult
    from endstop.runtime.clock import Clock
    from endstop.runtime.owners import WorkerBoard
    from endstop.store.port import Store

__all__ = ["DeadlinePassedError", "World", "adrive", "await_commit", "drive", "watched"]

R = TypeVar("R")
A = TypeVar("A")
TWINS_KEPT_MAX: Final = 256


class World:
    """What the drivers act on: the store, the clock, the workers, and the answers of the rounds under way."""

    def __init__(self, store: Store, clock: Clock, board: WorkerBoard) -> None:
        self.store = store
        self.clock = clock
        self.board = board
        self.halts = HaltBoard(store)
        self._twins: OrderedDict[tuple[str, str], ToolResult[object]] = OrderedDict()
        self._watches: dict[int, tuple[asyncio.AbstractEventLoop, AsyncWatch]] = {}
        self._lock = threading.Lock()

    def watch(self) -> AsyncWatch:
        """The watch of the running event loop."""
        loop = asyncio.get_running_loop()
        with self._lock:
            known = self._watches.get(id(loop))
            if known is not None and known[0] is loop:
                return known[1]
            self._watches = {name: pair for name, pair in self._watches.items() if not pair[0].is_closed()}
            watch = AsyncWatch(self.halts, self.clock)
            self._watches[id(loop)] = (loop, watch)
            return watch

    def recall(self, command: Recall) -> ToolResult[object] | None:
        """The twin's answer, when it is known."""
        with self._lock:
            return self._twins.get((command.round_id, command.fingerprint))

    def remember(self, command: Remember) -> None:
        """Keep an answer for its twins."""
        with self._lock:
            self._twins[command.round_id, command.fingerprint] = command.result
            if len(self._twins) > TWINS_KEPT_MAX:
                self._twins.popitem(last=False)

    def recovery(self, command: RecoverOwner) -> RecoverRun | None:
        """The step that recovers a dead owner's run; None while the owner lives."""
        operation = command.operation
        if self.board.is_alive(operation.owner_id):
            return None
        return RecoverRun(
            run_id=operation.run_id, now_us=self.clock.now_us(), dead_owners=frozenset({operation.owner_id})
        )

    def context(self, command: Execute, run_id: str) -> CallContext:
        """What the tool may know of its call."""
        operation, deadline_us = command.operation, command.deadline_us

        def is_cancelled() -> bool:
            late = deadline_us is not None and self.clock.now_us() >= deadline_us
            return late or self.halts.envelope_of(run_id) is not None

        return CallContext(
            run_id=run_id,
            tool=command.proposal.tool,
            call_id=command.proposal.call_id,
            idempotency_key=command.proposal.key_digest,
            operation_id=None if operation is None else operation.operation_id,
            attempt=1 if operation is None else operation.attempt,
            deadline_us=deadline_us,
            is_cancelled=is_cancelled,
        )


# -- In a thread


def drive(flow: Flow[R], world: World, run_id: str) -> R:
    """Run `flow` to its end in this thread. A KeyboardInterrupt that falls into a commit is raised after it."""
    held: list[BaseException] = []
    try:
        command = next(flow)
        while True:
            try:
                if held and isinstance(command, Execute):
                    raise held[0]
                answer = _answer(command, world, run_id, held)
            except BaseException as error:
                command = flow.throw(error)
            else:
                command = flow.send(answer)
    except StopIteration as done:
        if held:
            raise held[0] from None
        return cast("R", done.value)


def _answer(command: Command[object], world: World, run_id: str, held: list[BaseException]) -> object:
    match command:
        case Transact(step=step):
            return _wait(world.store.transact(step), held)
        case Execute():
            return _execute(command, world, run_id)
        case Recall():
            return world.recall(command)
        case Remember():
            world.remember(command)
            return None
        case RecoverOwner():
            recovery = world.recovery(command)
            if recovery is None:
                return False
            _wait(world.store.transact(recovery), held)
            return True
        case _:
            msg = f"no driver answers the command {type(command).__name__}"
            raise InvariantError(msg)


def _wait(future: Future[A], held: list[BaseException]) -> A:
    while True:
        try:
            return future.result()
        except (KeyboardInterrupt, SystemExit) as signal:
            if future.done() and future.exception() is signal:
                raise
            held.append(signal)


def _execute(command: Execute, world: World, run_id: str) -> Returned:
    started_us = world.clock.now_us()
    try:
        with entered(world.context(command, run_id)):
            value = command.call()
    except Exception as error:  # noqa: BLE001  # every exception of a tool is an outcome, settled and raised again
        return Returned(error=error, took_us=world.clock.now_us() - started_us)
    if inspect.isawaitable(value):
        _discard(value)
        return Returned(error=UsageError("an async tool needs `await run.acall(...)`"))
    return Returned(value=value, took_us=world.clock.now_us() - started_us)


def _discard(value: Awaitable[object]) -> None:
    close = getattr(value, "close", None)
    if callable(close):
        close()


# -- In an event loop


async def adrive(flow: Flow[R], world: World, run_id: str) -> R:
    """Run `flow` to its end in this task. A cancellation that falls into a commit is raised after it."""
    held: list[BaseException] = []
    try:
        command = next(flow)
        while True:
            try:
                if held and isinstance(command, Execute):
                    raise held[0]
                answer = await _aanswer(command, world, run_id, held)
            except BaseException as error:
                command = flow.throw(error)
            else:
                command = flow.send(answer)
    except StopIteration as done:
        if held:
            raise held[0] from None
        return cast("R", done.value)


async def _aanswer(command: Command[object], world: World, run_id: str, held: list[BaseException]) -> object:
    match command:
        case Transact(step=step):
            return await await_commit(world.store.transact(step), held)
        case Execute():
            return await _aexecute(command, world, run_id)
        case RecoverOwner():
            recovery = world.recovery(command)
            if recovery is None:
                return False
            await await_commit(world.store.transact(recovery), held)
            return True
        case _:
            return _answer(command, world, run_id, held)


async def await_commit(future: Future[A], held: list[BaseException]) -> A:
    """Wait for a store's future to its end; cancellations meanwhile go to `held`."""
    waiter = asyncio.wrap_future(future)
    while not waiter.done():
        try:
            await asyncio.shield(waiter)
        except asyncio.CancelledError as signal:
            if waiter.done():
                break
            held.append(signal)
        except Exception:  # noqa: S110, BLE001  # the waiter's own error is raised by result() below
            pass
    return waiter.result()


class DeadlinePassedError(TimeoutError):
    """A watched call ran past its deadline and was cancelled."""


async def watched(world: World, work: Awaitable[A], run_id: str, deadline_us: int | None) -> A:
    """Await `work`, but no longer than the run lives and the deadline (microseconds) allows.

    Raises RunHalted when the run was stopped meanwhile, DeadlinePassedError past the deadline; `work` is cancelled then.
    """
    watch = world.watch()
    task = asyncio.ensure_future(work)
    watch.add(task, run_id, deadline_us)
    try:
        return await task
    except asyncio.CancelledError:
        seen = watch.look(task)
        if seen.halted is not None:
            raise halted(seen.halted) from None
        if seen.late:
            msg = "the call's deadline passed and it was cancelled"
            raise DeadlinePassedError(msg) from None
        raise
    finally:
        watch.remove(task)


async def _aexecute(command: Execute, world: World, run_id: str) -> Returned:
    started_us = world.clock.now_us()
    try:
        with entered(world.context(command, run_id)):
            value = command.call()
            if inspect.isawaitable(value):
                value = await watched(world, value, run_id, command.deadline_us)
    except Exception as error:  # noqa: BLE001  # every exception of a tool is an outcome, settled and raised again
        return Returned(error=error, took_us=world.clock.now_us() - started_us)
    return Returned(value=value, took_us=world.clock.now_us() - started_us)
