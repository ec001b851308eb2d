"""What the drivers do for an operation in doubt or in flight elsewhere: ask its target, wait for its outcome.

Both happen outside any transaction and hold no lock. What a probe raises, and an answer that is none, count as
"inconclusive"; one that does not answer by its deadline is left behind.
"""

from __future__ import annotations

import contextvars
import inspect
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

from endstop.core.pipeline import halted
from endstop.core.probing import ProbeAnswer
from endstop.core.transitions import OperationState
from endstop.errors import EndstopError
from endstop.runtime.function_reference import resolve_function

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator, Mapping

    from endstop.core.commands import AskTarget, AwaitOutcome
    from endstop.core.records import OperationRecord
    from endstop.runtime.drivers import World

__all__ = ["Sending", "Waiters", "aask_target", "ask_target", "await_outcome", "is_owner_gone", "wait_outcome"]

POLL_MS: Final = 20
LOOKS_A_LIFE_SIGN: Final = 25  # looks at the store's counter for one at the owner's lock
WAITERS_MAX: Final = 64
_IN_FLIGHT: Final = (OperationState.RESERVED, OperationState.EXECUTING)


def is_owner_gone(world: World, operation: OperationRecord) -> bool:
    """Whether it is proven that the operation's worker sends nothing more. A lease that ran out is no proof, and where
    the store keeps leases there is no other."""
    leased = getattr(world.store, "is_owner_alive", None)
    if leased is not None and leased(operation.owner_id) is not None:
        return False
    return not world.board.is_alive(operation.owner_id)


# -- Asking


def ask_target(world: World, command: AskTarget) -> ProbeAnswer:
    """Put the question from a thread, and give up at its deadline."""
    found: list[object] = []
    context = contextvars.copy_context()

    def work() -> None:
        try:
            found.append(context.run(lambda: _plain(_probe_of(command)(command.request))))
        except Exception as error:  # whatever a probe raises says nothing about the target
            found.append(error)

    # A thread of its own, so that a probe that hangs holds nobody up: neither the caller nor the end of the process.
    thread = threading.Thread(target=work, name="endstop-probe", daemon=True)
    thread.start()
    thread.join(_left_ms(world, command) / 1_000)
    return _answer_of(found[0]) if found else ProbeAnswer.inconclusive(cause="deadline")


async def aask_target(world: World, command: AskTarget) -> ProbeAnswer:
    """Put the question from an event loop; a probe that is not async runs in a thread."""
    import asyncio

    try:
        probe = _probe_of(command)
        answer: Awaitable[object]
        if _is_async(probe):
            answer = _awaited(probe, command)
        else:
            answer = asyncio.to_thread(lambda: _plain(probe(command.request)))
        return _answer_of(await asyncio.wait_for(answer, _left_ms(world, command) / 1_000))
    except TimeoutError:
        return ProbeAnswer.inconclusive(cause="deadline")
    except Exception as error:  # the same
        return _answer_of(error)


def _probe_of(command: AskTarget) -> Callable[..., object]:
    probe = command.probe
    if isinstance(probe, str):
        return resolve_function(probe)
    resolve = getattr(probe, "resolve", None)
    return resolve() if callable(resolve) else probe


def _is_async(probe: Callable[..., object]) -> bool:
    called = probe if inspect.isroutine(probe) else getattr(probe, "__call__", probe)  # noqa: B004  # to look at it
    return inspect.iscoroutinefunction(called)


async def _awaited(probe: Callable[..., object], command: AskTarget) -> object:
    value = probe(command.request)
    return await value if inspect.isawaitable(value) else value


def _plain(value: object) -> object:
    """What an async probe gives when there is no event loop to await it in: it gets one of its own."""
    if not inspect.isawaitable(value):
        return value

    import asyncio

    async def wait() -> object:
        return await value

    return asyncio.run(wait())


def _left_ms(world: World, command: AskTarget) -> int:
    return max(1, (command.request.deadline_us - world.clock.now_us()) // 1_000)


def _answer_of(value: object) -> ProbeAnswer:
    if isinstance(value, ProbeAnswer):
        return value
    cause = type(value).__name__ if isinstance(value, BaseException) else f"a probe gave {type(value).__name__}"
    return ProbeAnswer.inconclusive(cause=cause)


# -- Waiting


class Sending:
    """How many tool functions run in threads of this process. A worker with one of them may still send, whatever
    became of the call; so it stays alive for the others."""

    def __init__(self) -> None:
        self._count = 0
        self._lock = threading.Lock()

    def run(self, function: Callable[..., object], args: Mapping[str, object]) -> object:
        """Call `function(**args)` and count it meanwhile."""
        with self._lock:
            self._count += 1
        try:
            return function(**args)
        finally:
            with self._lock:
                self._count -= 1

    def any(self) -> bool:
        """Whether one is under way."""
        return self._count > 0


class Waiters:
    """How many callers of this process wait for each operation: `WAITERS_MAX` at most."""

    def __init__(self) -> None:
        self._counts: dict[str, int] = {}
        self._lock = threading.Lock()

    @contextmanager
    def one_more(self, operation_id: str) -> Iterator[bool]:
        """Count a waiter for the block; False when there are too many already."""
        with self._lock:
            count = self._counts.get(operation_id, 0)
            if count < WAITERS_MAX:
                self._counts[operation_id] = count + 1
        try:
            yield count < WAITERS_MAX
        finally:
            if count < WAITERS_MAX:
                with self._lock:
                    self._counts[operation_id] -= 1
                    if not self._counts[operation_id]:
                        del self._counts[operation_id]


def wait_outcome(world: World, command: AwaitOutcome, run_id: str) -> bool:
    """Wait in a thread. Raises RunHalted when the waiting run is stopped meanwhile."""
    with world.waiters.one_more(command.operation.operation_id) as admitted:
        if admitted:
            for verdict in _looks(world, command, run_id):
                if verdict is not None:
                    return verdict
                world.clock.sleep_ms(POLL_MS)
    return False


async def await_outcome(world: World, command: AwaitOutcome, run_id: str) -> bool:
    """The same in an event loop."""
    import asyncio

    with world.waiters.one_more(command.operation.operation_id) as admitted:
        if admitted:
            for verdict in _looks(world, command, run_id):
                if verdict is not None:
                    return verdict
                await asyncio.sleep(POLL_MS / 1_000)  # noqa: TID251  # bounded by the clock that `_looks` asks
    return False


def _looks(world: World, command: AwaitOutcome, run_id: str) -> Iterator[bool | None]:
    """One look after the other: True when asking again may help, False when the time is up, None to wait on."""
    store, seen, look = world.store, None, 0
    while True:
        counter = store.change_counter()
        if counter != seen:
            seen = counter
            if _has_moved(world, command.operation):
                yield True
            envelope = world.halts.envelope_of(run_id)
            if envelope is not None:
                raise halted(envelope)
        if look % LOOKS_A_LIFE_SIGN == LOOKS_A_LIFE_SIGN - 1 and _is_dead(world, command.operation):
            yield True
        yield False if world.clock.now_us() >= command.until_us else None
        look += 1


def _has_moved(world: World, operation: OperationRecord) -> bool:
    found = world.store.operations(operation_id=operation.operation_id).result()
    return not found or found[0].attempt != operation.attempt or found[0].state not in _IN_FLIGHT


def _is_dead(world: World, operation: OperationRecord) -> bool:
    try:
        return not world.board.is_alive(operation.owner_id)
    except EndstopError:
        return False  # it cannot be told now; the next look asks again
