"""How the two kinds of callers wait for a commit: threads, and coroutines.

Rule: a transaction that was taken is never abandoned. Whoever is interrupted while he waits still gets the answer, and
the interruption goes to `held` for him to raise later.
"""

from __future__ import annotations

import asyncio
from concurrent.futures import Future, wait
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["LoopFuture", "done_future", "wait_held"]

A = TypeVar("A")


class LoopFuture(asyncio.Future[A]):
    """What a coroutine awaits for a commit. It refuses to be cancelled.

    A task that is cancelled while it awaits one gets its CancelledError only when the commit is over, and the answer
    still stands in the future.
    """

    def cancel(self, msg: object = None) -> bool:  # noqa: ARG002  # the signature of asyncio
        """Never."""
        return False


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
