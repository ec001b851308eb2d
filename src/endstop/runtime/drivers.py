"""The drivers: they answer a pipeline's commands, one for threads and one for event loops.

Both keep one promise: a transaction that was begun is waited for, whatever interrupts the caller; the interruption is
raised afterwards, and a call that was let through meanwhile is settled as lost instead of executed.

Event loops are imported where one is used: a synchronous host that only imports the package does not pay for them.
"""

from __future__ import annotations

import inspect
import threading
from collections import OrderedDict
from typing import TYPE_CHECKING, Final, TypeVar, cast

from endstop.core.commands import (
    AskTarget,
    AwaitOutcome,
    CallCut,
    Command,
    Execute,
    Flow,
    IsOwnerGone,
    Recall,
    RecoverOwner,
    Remember,
    Returned,
    Transact,
)  # fmt: skip
from endstop.core.pipeline import halted
from endstop.core.steps_life import RecoverRun
from endstop.errors import GuardClosedError, InvariantError, StoreError, UsageError
from endstop.runtime.asking import (
    Sending,
    Waiters,
    aask_target,
    ask_target,
    await_outcome,
    is_owner_gone,
    wait_outcome,
)  # fmt: skip
from endstop.runtime.context import CallContext, entered
from endstop.runtime.halts import AsyncWatch, HaltBoard, Watched

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Awaitable, Coroutine, Generator
    from concurrent.futures import Future

    from endstop.core.model import ToolResult
    from endstop.runtime.clock import Clock
    from endstop.runtime.owners import WorkerBoard
    from endstop.store.port import Store

__all__ = ["DeadlinePassedError", "ThreadedCall", "World", "adrive", "await_commit", "drive", "wait_commit", "watched"]

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
        self.waiters = Waiters()
        self.sending = Sending()
        self._twins: OrderedDict[tuple[str, str], ToolResult[object]] = OrderedDict()
        self._watches: dict[int, tuple[asyncio.AbstractEventLoop, AsyncWatch]] = {}
        self._lock = threading.Lock()

    def watch(self) -> AsyncWatch:
        """The watch of the running event loop."""
        import asyncio

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
            if deadline_us is not None and self.clock.now_us() >= deadline_us:
                return True
            try:
                return self.halts.envelope_of(run_id) is not None
            except GuardClosedError:
                return True  # nobody is left to record what the tool does
            except StoreError:
                return False  # the store does not answer now; the settlement will tell

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
    """Run `flow` to its end in this thread. An interruption that falls into a commit is raised after it."""
    held: list[BaseException] = []
    error: BaseException | None = None
    while True:
        try:
            return _ended(_drive(flow, world, run_id, held, error), held)
        except BaseException as broken:
            if inspect.getgeneratorstate(flow) != inspect.GEN_SUSPENDED:
                raise _foremost(broken, held) from broken.__cause__
            # It fell between two commands: the flow must hear of it, or its call would stay half-known.
            error = broken


def _drive(flow: Flow[R], world: World, run_id: str, held: list[BaseException], error: BaseException | None) -> R:
    answer: object = None
    try:
        while True:
            command = flow.send(answer) if error is None else flow.throw(error)
            answer, error = None, None
            try:
                if held and isinstance(command, Execute):
                    raise CallCut(held[0], sent=False)
                answer = _answer(command, world, run_id, held)
            except GeneratorExit as broken:
                error = CallCut(broken, sent=True)
            except BaseException as broken:
                error = broken
    except StopIteration as done:
        return cast("R", done.value)


def _ended(value: R, held: list[BaseException]) -> R:
    if held:
        raise held[0]
    return value


def _foremost(error: BaseException, held: list[BaseException]) -> BaseException:
    """What the caller must hear of: an interruption that was held back goes before what the flow says."""
    if not held or error is held[0]:
        return error
    held[0].add_note(f"while it was held back: {type(error).__name__}: {error}")
    return held[0]


def _answer(command: Command[object], world: World, run_id: str, held: list[BaseException]) -> object:
    match command:
        case Transact(step=step):
            return world.store.transact_now(step, held)
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
            world.store.transact_now(recovery, held)
            return True
        case IsOwnerGone():
            return is_owner_gone(world, command.operation)
        case AskTarget():
            return ask_target(world, command)
        case AwaitOutcome():
            return wait_outcome(world, command, run_id)
        case _:
            msg = f"no driver answers the command {type(command).__name__}"
            raise InvariantError(msg)


def wait_commit(future: Future[A], held: list[BaseException]) -> A:
    """Wait for a store's future to its end; whatever interrupts this thread meanwhile goes to `held`."""
    while True:
        try:
            return future.result()
        except BaseException as signal:
            if future.done() and future.exception() is signal:
                raise
            held.append(signal)


def _execute(command: Execute, world: World, run_id: str) -> Returned:
    started_us = world.clock.now_us()
    try:
        with entered(world.context(command, run_id)):
            value = command.call()
        if inspect.isawaitable(value):
            _discard(value)
            msg = "the tool gave an awaitable: an async tool needs `await run.acall(...)`"
            raise UsageError(msg)
    except Exception as error:  # every exception of a tool is an outcome, settled and raised again
        return Returned(error=error, took_us=world.clock.now_us() - started_us)
    return Returned(value=value, took_us=world.clock.now_us() - started_us)


def _discard(value: Awaitable[object]) -> None:
    close = getattr(value, "close", None)
    if callable(close):
        close()


# -- In an event loop


async def adrive(flow: Flow[R], world: World, run_id: str) -> R:
    """Run `flow` to its end in this task. A cancellation that falls into a commit is raised after it."""
    held: list[BaseException] = []
    answer: object = None
    error: BaseException | None = None
    try:
        while True:
            command = flow.send(answer) if error is None else flow.throw(error)
            answer, error = None, None
            try:
                if held and isinstance(command, Execute):
                    raise CallCut(held[0], sent=False)
                answer = await _aanswer(command, world, run_id, held)
            except GeneratorExit as broken:
                error = CallCut(broken, sent=True)
            except BaseException as broken:
                error = broken
    except StopIteration as done:
        return _ended(cast("R", done.value), held)
    except BaseException as broken:
        raise _foremost(broken, held) from broken.__cause__


async def _aanswer(command: Command[object], world: World, run_id: str, held: list[BaseException]) -> object:
    match command:
        case Transact(step=step):
            return await await_commit(world.store.transact_async(step), held)
        case Execute():
            return await _aexecute(command, world, run_id)
        case RecoverOwner():
            recovery = world.recovery(command)
            if recovery is None:
                return False
            await await_commit(world.store.transact_async(recovery), held)
            return True
        case AskTarget():
            return await aask_target(world, command)
        case AwaitOutcome():
            return await await_outcome(world, command, run_id)
        case _:
            return _answer(command, world, run_id, held)


async def await_commit(future: Future[A] | asyncio.Future[A], held: list[BaseException]) -> A:
    """Wait for a store's future to its end; cancellations meanwhile go to `held`."""
    import asyncio

    waiter = asyncio.wrap_future(future)
    while True:
        try:
            # What a store makes for a loop refuses cancellation by itself; what it makes for threads is shielded.
            return await (waiter if waiter is future else asyncio.shield(waiter))
        except asyncio.CancelledError as signal:
            held.append(signal)


class DeadlinePassedError(TimeoutError):
    """A watched call ran past its deadline and was cancelled."""


class ThreadedCall:
    """A plain function at work in a thread of its own, as something to await."""

    def __init__(self, work: Coroutine[object, object, object]) -> None:
        self._work = work

    def __await__(self) -> Generator[object, object, object]:
        return self._work.__await__()


async def watched(
    world: World, work: Awaitable[A], run_id: str, deadline_us: int | None, *, finishes: bool = False
) -> A:
    """Await `work`, but no longer than the run lives and the deadline (microseconds) allows.

    Work that `finishes` cannot be cancelled, so it is awaited beyond the run's end, up to the deadline.

    Raises RunHalted when the run was stopped meanwhile, DeadlinePassedError past the deadline. Both
    cancel `work`, as `asyncio.timeout` does: through the task that awaits it.
    """
    import asyncio

    watch, task = world.watch(), asyncio.current_task()
    if task is None:
        msg = "a guarded call can only be awaited in a task"
        raise UsageError(msg)
    cancels = task.cancelling()
    call = Watched(task, run_id, deadline_us, finishes)
    watch.add(call)
    try:
        return await work
    except asyncio.CancelledError:
        # The caller's own cancellation goes before what the watch saw.
        if not call.cut or task.cancelling() > cancels + 1:
            raise
        if call.halted is not None:
            raise halted(call.halted) from None
        msg = "the call's deadline passed and it was cancelled"
        raise DeadlinePassedError(msg) from None
    finally:
        watch.remove(call)
        if call.cut:
            task.uncancel()  # the one of the watch, whatever the work made of it


async def _aexecute(command: Execute, world: World, run_id: str) -> Returned:
    started_us = world.clock.now_us()
    try:
        with entered(world.context(command, run_id)):
            value = command.call()
            # A plain function that was run in a thread may give an awaitable of its own.
            while inspect.isawaitable(value):
                in_thread = isinstance(value, ThreadedCall)
                value = await watched(world, value, run_id, command.deadline_us, finishes=in_thread)
    except Exception as error:  # every exception of a tool is an outcome, settled and raised again
        return Returned(error=error, took_us=world.clock.now_us() - started_us)
    return Returned(value=value, took_us=world.clock.now_us() - started_us)
