"""Group commit: many requests, one transaction, one wait for the disk.

Whoever holds `_lead` writes. A lone synchronous caller takes it and commits on its own thread (`run_now`), which saves
two thread switches a step; everybody else queues, and the writer thread commits whatever has gathered. A request that
fails takes nothing with it: when it may have left something, the batch is undone and its requests run one by one.

A signal handler may raise at any line of a caller's thread. So `_lead` is only ever taken by `with`, the lock of the
processes is given back by one call that does no harm twice, and a transaction that was left open is undone by the
next one that begins.
"""

from __future__ import annotations

import asyncio
import os
import queue
import threading
from concurrent.futures import Future
from typing import TYPE_CHECKING, Final, NamedTuple, TypeVar, cast

import apsw

from endstop.errors import GuardClosedError, StoreError, StoreUnavailableError
from endstop.store.futures import LoopFuture, Outcome, tell, wait_held
from endstop.store.sqlite.faults import commit_fault, store_fault

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from endstop.store.sqlite.opening import OpenedFile
    from endstop.store.sqlite.tables import SqliteWorkspace
    from endstop.store.sqlite.turnstile import Turnstile
    from endstop.store.workspace import Workspace

__all__ = ["BATCH_MAX", "Writer"]

A = TypeVar("A")
R = TypeVar("R")
BATCH_MAX: Final = 256


class _Request(NamedTuple):
    """One piece of work that waits for its transaction, and who waits for it."""

    work: Callable[[Workspace], object]
    future: Future[object] | LoopFuture[object]

    def starts(self) -> bool:
        """Take the work for good; False when its waiter has cancelled it."""
        return not isinstance(self.future, Future) or self.future.set_running_or_notify_cancel()


class Writer:
    """The only writer of one store in this process."""

    def __init__(self, path: Path, file: OpenedFile, work: SqliteWorkspace, turnstile: Turnstile) -> None:
        self._path = os.fspath(path)
        self._identity = (file.device, file.inode)
        self._work = work
        self._turnstile = turnstile
        self._lead = threading.Lock()
        self._queue: queue.SimpleQueue[_Request | None] = queue.SimpleQueue()
        self._gate = threading.Lock()  # between taking requests and closing
        self._thread: threading.Thread | None = None
        self._next = False  # whether the thread waits for the lead
        self._closed = False
        self.commits = 0

    # -- taking requests

    def submit(self, function: Callable[[Workspace, A], R], argument: A) -> Future[R]:
        """Queue a request. Raises GuardClosedError when the writer was closed."""
        future: Future[R] = Future()
        self._take(_Request(lambda work: function(work, argument), cast("Future[object]", future)))
        return future

    def submit_on_loop(self, function: Callable[[Workspace, A], R], argument: A) -> LoopFuture[R]:
        """Queue a request of the running event loop, which is woken once a batch."""
        future: LoopFuture[R] = LoopFuture(loop=asyncio.get_running_loop())
        self._take(_Request(lambda work: function(work, argument), cast("LoopFuture[object]", future)))
        return future

    def _take(self, request: _Request) -> None:
        with self._gate:
            self._check_open()
            self._queue.put(request)
            if self._thread is None:
                self._thread = threading.Thread(target=self._loop, name="endstop-writer", daemon=True)
                self._thread.start()

    def run_now(self, function: Callable[[Workspace, A], R], argument: A, held: list[BaseException] | None = None) -> R:
        """Run a request and give its answer: on this thread when nobody writes, else through the queue.

        An interrupt of this thread that comes too late to stop the commit goes to `held`, or is raised after it.
        """
        if self._lead.locked() or self._next:
            return wait_held(self.submit(function, argument), held)
        with self._lead:
            self._check_open()
            try:
                self._enter()
                return self._one(lambda work: function(work, argument), held)
            finally:
                self._turnstile.leave()

    def _check_open(self) -> None:
        if self._closed:
            msg = "the store was closed: open it again"
            raise GuardClosedError(msg)

    def close(self) -> None:
        """Finish what was taken; whoever leads at this moment finishes first."""
        with self._gate:
            self._closed = True
            self._queue.put(None)
        if self._thread is not None:
            self._thread.join()
        with self._lead:
            self._work.release()

    # -- the thread

    def _loop(self) -> None:
        last = False
        while not last:
            request = self._queue.get()
            # The lead first: what comes while we wait for it goes into the same transaction. Whoever would lead a lone
            # request meanwhile must not overtake us for ever.
            self._next = True
            with self._lead:
                self._next = False
                batch, last = self._gather(request)
                outcomes = self._commit_batch(batch)
            tell((request.future, outcome) for request, outcome in zip(batch, outcomes, strict=True))

    def _gather(self, request: _Request | None) -> tuple[list[_Request], bool]:
        """What waits now, up to `BATCH_MAX`, without what its waiter has cancelled; and whether the end was in it."""
        batch: list[_Request] = []
        while request is not None:
            if request.starts():
                batch.append(request)
            if len(batch) >= BATCH_MAX:
                break
            try:
                request = self._queue.get_nowait()
            except queue.Empty:
                break
        return batch, request is None

    def _commit_batch(self, batch: list[_Request]) -> list[Outcome]:
        """What became of each request of a batch. Never raises: somebody waits for every one of them."""
        if not batch:
            return []
        try:
            self._enter()
            outcomes = self._together(batch) if len(batch) > 1 else None
            if outcomes is None:
                outcomes = [self._alone(request) for request in batch]
        except Exception as error:  # the same for all: nothing was begun, or the commit itself failed
            return [Outcome(None, error) for _ in batch]
        finally:
            self._turnstile.leave()
        return outcomes

    # -- transactions; the lead is held, and the lock of the processes

    def _together(self, batch: list[_Request]) -> list[Outcome] | None:
        """All requests in one transaction; None when it was undone because one of them may have left something."""
        work = self._work
        outcomes: list[Outcome] = []
        try:
            work.begin()
            for request in batch:
                before = work.writes
                try:
                    outcomes.append(Outcome(request.work(work), None))
                except StoreError:
                    raise
                except Exception as error:
                    if work.writes != before or work.tainted:
                        raise
                    outcomes.append(Outcome(None, error))  # it belongs to its own waiter alone
            work.flush()
        except Exception:  # its waiter hears of it when the requests run one by one
            work.rollback()
            return None
        self._commit(None)
        return outcomes

    def _alone(self, request: _Request) -> Outcome:
        try:
            return Outcome(self._one(request.work, None), None)
        except Exception as error:  # it belongs to its own waiter alone
            return Outcome(None, error)

    def _one(self, request: Callable[[Workspace], R], held: list[BaseException] | None) -> R:
        """One request in a transaction of its own."""
        work = self._work
        try:
            work.begin()
            answer = request(work)
            work.flush()
        except BaseException as error:
            work.rollback()
            if isinstance(error, apsw.Error | OSError):
                raise store_fault(error, "transaction") from error
            raise
        self._commit(held)
        return answer

    def _commit(self, held: list[BaseException] | None) -> None:
        """Commit. An interrupt that finds the commit done goes to `held` when there is one."""
        work = self._work
        try:
            work.commit()
        except apsw.Error as error:
            work.rollback()
            raise commit_fault(error) from error
        except BaseException as signal:
            done = not work.in_transaction
            work.rollback()
            if not done or held is None:
                raise
            held.append(signal)
        self.commits += 1

    def _enter(self) -> None:
        """Stand in the queue of processes, and make sure that the file is still the one that was opened."""
        self._turnstile.enter()
        try:
            found = os.stat(self._path)
            same = (found.st_dev, found.st_ino) == self._identity
        except OSError:
            same = False
        if not same:
            msg = "the store's file is gone or was replaced while it was open: nothing was written, restore it"
            raise StoreUnavailableError(msg)


# -- telling
