"""How the two kinds of callers wait for a commit: threads, and coroutines.

Rule: a transaction that was taken is never abandoned. Whoever is interrupted while he waits still gets the answer, and
the interruption goes to `held` for him to raise later.
"""

from __future__ import annotations

import asyncio
from concurrent.futures import Future, wait
from typing import TYPE_CHECKING, NamedTuple, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

__all__ = ["LoopFuture", "Outcome", "done_future", "tell", "wait_held"]

A = TypeVar("A")


class LoopFuture(asyncio.Future[A]):
    """What a coroutine awaits for a commit. It refuses to be cancelled.

    A task that is cancelled while it awaits one gets its CancelledError only when the commit is over, and the answer
    still stands in the future.
    """

    def cancel(self, msg: object = None) -> bool:  # noqa: ARG002  # the signature of asyncio
        """Never."""
        return False


class Outcome(NamedTuple):
    """What became of one request."""

    answer: object
    error: BaseException | None


def tell(told: Iterable[tuple[Future[object] | LoopFuture[object], Outcome]]) -> None:
    """Let everybody know who waits; an event loop once for all its coroutines."""
    loops: dict[asyncio.AbstractEventLoop, list[tuple[LoopFuture[object], Outcome]]] = {}
    for future, outcome in told:
        if isinstance(future, LoopFuture):
            loops.setdefault(future.get_loop(), []).append((future, outcome))
        else:
            _settle([(future, outcome)])
    for loop, waiting in loops.items():
        try:
            loop.call_soon_threadsafe(_settle, waiting)
        except RuntimeError:
            continue  # the loop was closed: nobody waits there any more


def _settle(told: Sequence[tuple[Future[object] | LoopFuture[object], Outcome]]) -> None:
    for future, (answer, error) in told:
        if error is None:
            future.set_result(answer)
        else:
            future.set_exception(error)


def wait_held(future: Future[A], held: list[BaseException] | None) -> A:
    """The future's answer. Interrupts of this thread meanwhile go to `held`, or are raised once the future is done."""
    kept: list[BaseException] = [] if held is None else held
    while not future.done():
        try:
            wait((future,))
        except (KeyboardInterrupt, SystemExit) as signal:
            kept.append(signal)
    if held is None and kept:
        raise kept[0]
    return future.result()


def done_future(work: Callable[[], A]) -> Future[A]:
    """A future that is done: with what `work` gives, or with the error it raises."""
    future: Future[A] = Future()
    try:
        future.set_result(work())
    except Exception as error:  # whatever failed belongs to whoever waits
        future.set_exception(error)
    return future
