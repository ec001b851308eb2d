"""Group commit: many requests of different runs, one transaction, one wait for the disk.

A lane is a queue, a thread and a workspace; a run always goes through the same lane, so that a process does not wait
for itself. A caller who finds his lane idle does the work on his own thread, which saves two changes of thread.

When the answer to a COMMIT is lost, nothing else happens before the lane has read back, on a fresh connection, how
many transactions it has committed: the row it reads is locked by the lost transaction for as long as that is open, so
the answer is final. Written: its waiters are told so. Not written: the same work is done again on what stands now.
Nobody can say: CommitUnknownError.
"""

from __future__ import annotations

import asyncio
import functools
import queue
import threading
from concurrent.futures import Future
from typing import TYPE_CHECKING, Final, NamedTuple, TypeVar, cast

import psycopg

from endstop.errors import CommitUnknownError, GuardClosedError, StoreError, StoreUnavailableError
from endstop.store.futures import LoopFuture, Outcome, tell
from endstop.store.postgres.faults import (
    OTHER_ISOLATION,
    UNKNOWN_WRITER,
    StaleError,
    is_lost,
    is_stale,
    mapped,
    store_fault,
)  # fmt: skip
from endstop.store.postgres.plan import plan_of
from endstop.store.postgres.statements import settings, sql

if TYPE_CHECKING:
    from collections.abc import Callable

    from endstop.store.postgres.link import Link
    from endstop.store.postgres.plan import Plan
    from endstop.store.postgres.tables import PostgresWorkspace
    from endstop.store.workspace import Workspace

__all__ = ["BATCH_MAX", "Lane"]

A = TypeVar("A")
R = TypeVar("R")
BATCH_MAX: Final = 128
TRIES_MAX: Final = 8
COMPANY: Final = 16  # batches of one after which a caller is taken to be alone
DOUBTS: Final = 8  # batches that are read first after one whose assumptions were wrong
READ_BACK_MS_MAX: Final = 15_000
READ_BACK_STEP_MS: Final = 250


class _Ticket:
    """What a thread waits for that does nothing else meanwhile: a tenth of the cost of a future."""

    __slots__ = ("_done", "_outcome")

    def __init__(self) -> None:
        self._done = threading.Lock()
        self._done.acquire()
        self._outcome = Outcome(None, None)

    def tell(self, outcome: Outcome) -> None:
        """Let the thread go on."""
        self._outcome = outcome
        self._done.release()

    def wait(self, held: list[BaseException] | None) -> object:
        """The answer. Interrupts of this thread meanwhile go to `held`, or are raised once it is there."""
        kept: list[BaseException] = [] if held is None else held
        while True:
            try:
                self._done.acquire()
                break
            except (KeyboardInterrupt, SystemExit) as signal:
                kept.append(signal)
        if held is None and kept:
            raise kept[0]
        if self._outcome.error is not None:
            raise self._outcome.error
        return self._outcome.answer


class _Request(NamedTuple):
    """One piece of work that waits for its transaction; `argument` says what it will touch."""

    work: Callable[[Workspace], object]
    argument: object
    future: Future[object] | LoopFuture[object] | _Ticket

    def starts(self) -> bool:
        """Take it, unless its waiter has cancelled it; from here on he cannot."""
        return not isinstance(self.future, Future) or self.future.set_running_or_notify_cancel()


class Lane:
    """One of the writers of a store. `written` is called after every commit that changed something, with its plan."""

    def __init__(
        self, link: Link, work: PostgresWorkspace, *, name: str, new_key: Callable[[], bytes],
        written: Callable[[Plan], None],
    ) -> None:  # fmt: skip
        self._link = link
        self._work = work
        self._name = name
        self._new_key = new_key
        self._written = written
        self._writer_id = ""
        self._batch_no = 0
        self._company = 0  # above 0: others came at the same time, not long ago
        self._doubts = 0
        self._assumes = True
        self.writer_ids: list[str] = []  # every name that this lane has had in the database
        self._lead = threading.Lock()
        self._queue: queue.SimpleQueue[_Request | None] = queue.SimpleQueue()
        self._gate = threading.Lock()  # between taking requests and closing
        self._thread: threading.Thread | None = None
        self._closed = False

    # -- taking requests

    def submit(self, function: Callable[[Workspace, A], R], argument: A) -> Future[R]:
        """Queue a request. Raises GuardClosedError when the lane was closed."""
        future: Future[R] = Future()
        self._take(_Request(lambda work: function(work, argument), argument, cast("Future[object]", future)))
        return future

    def submit_on_loop(self, function: Callable[[Workspace, A], R], argument: A) -> LoopFuture[R]:
        """Queue a request of the running event loop, which is woken once a batch."""
        future: LoopFuture[R] = LoopFuture(loop=asyncio.get_running_loop())
        self._take(_Request(lambda work: function(work, argument), argument, cast("LoopFuture[object]", future)))
        return future

    def run_now(self, function: Callable[[Workspace, A], R], argument: A, held: list[BaseException] | None = None) -> R:
        """Run a request and give its answer: on this thread when the lane is idle, else through its queue.

        Never on the main thread: an interrupt there would break into the exchange with the server, and nobody could
        say what became of it. Waiting for the lane's thread can be interrupted at no cost.
        """
        request = _Request(lambda work: function(work, argument), argument, _Ticket())
        # In company, whoever goes alone makes all others wait for a commit that could have been theirs too.
        queues = self._company > 0 or threading.current_thread() is threading.main_thread()
        if queues or not self._lead.acquire(blocking=False):
            self._take(request)
            return cast("R", cast("_Ticket", request.future).wait(held))
        try:
            self._check_open()
            answer, error = self._one(request)
        finally:
            self._lead.release()
        if error is not None:
            raise error
        return cast("R", answer)

    def _take(self, request: _Request) -> None:
        with self._gate:
            self._check_open()
            self._queue.put(request)
            if self._thread is None:
                self._thread = threading.Thread(target=self._loop, name=f"endstop-writer-{self._name}", daemon=True)
                self._thread.start()

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
            self._work.drop()

    # -- the thread

    def _loop(self) -> None:
        last = False
        while not last:
            request = self._queue.get()
            # The lead first: what comes while we wait for it goes into the same transaction.
            with self._lead:
                batch, last = self._gather(request)
                self._company = COMPANY if len(batch) > 1 else max(0, self._company - 1)
                outcomes = self._commit_batch(batch)
            _tell(batch, outcomes)

    def _gather(self, request: _Request | None) -> tuple[list[_Request], bool]:
        """What waits now, up to `BATCH_MAX`, without what its waiter has cancelled; and whether the end was in it."""
        batch: list[_Request] = []
        while request is not None:
            if request.starts():
                batch.append(request)
            if len(batch) >= BATCH_MAX:
                return batch, False
            try:
                request = self._queue.get_nowait()
            except queue.Empty:
                return batch, False
        return batch, True

    # -- transactions; the lead is held

    def _commit_batch(self, batch: list[_Request]) -> list[Outcome]:
        """What became of each request of a batch. Never raises: somebody waits for every one of them."""
        if len(batch) > 1:
            try:
                return self._try(batch, together=True)
            except CommitUnknownError as error:
                return [Outcome(None, error) for _ in batch]
            except Exception:  # noqa: S110  # undone: its waiter hears of it when the requests run one by one
                pass
        return [self._one(request) for request in batch]

    def _one(self, request: _Request) -> Outcome:
        """One request in a transaction of its own, again while others come first."""
        for _ in range(TRIES_MAX):
            try:
                return self._try([request], together=False)[0]
            except StaleError:
                continue
            except Exception as error:  # it belongs to its own waiter alone
                return Outcome(None, error)
        msg = f"the records changed or the connection broke {TRIES_MAX} times in a row; nothing was written: try again"
        return Outcome(None, StoreUnavailableError(msg))

    def _try(self, batch: list[_Request], *, together: bool) -> list[Outcome]:
        """One transaction. Raises StaleError when nothing was written and the same may be tried again."""
        plan = plan_of(request.argument for request in batch)
        if self._doubts:
            self._doubts -= 1
        elif self._assumes and self._work.assume(plan):
            outcomes = self._try_assumed(batch, plan)
            if outcomes is not None:
                return outcomes
        work = self._work
        with mapped("transaction"), self._link.pooled() as connection:
            # 1. Up to the COMMIT, whatever fails has written nothing.
            try:
                self._enter(connection)
                work.begin(connection, plan)
                outcomes = self._apply(batch, together=together)
            except BaseException as error:
                raise self._undone(connection, error) from error
            # 2. From here on the answer may be lost.
            self._commit(connection, plan, work.commit)
        return outcomes

    def _try_assumed(self, batch: list[_Request], plan: Plan) -> list[Outcome] | None:
        """One transaction on what is in hand; None when that was not the newest, or not enough: nothing was written."""
        work = self._work
        try:
            outcomes = self._apply(batch, together=False)
        except Exception:  # it goes to nobody yet: what it stands on may be old, or is not in hand
            work.revert()
            return None
        if not work.checks_itself:
            work.revert()
            return None
        try:
            with mapped("transaction"), self._link.pooled() as connection:
                self._commit(connection, plan, functools.partial(work.commit_assumed, connection))
        except StaleError:
            self._doubts = DOUBTS
            return None
        return outcomes

    def _commit(self, connection: psycopg.Connection, plan: Plan, commit: Callable[[str, int], None]) -> None:
        """Commit; when the answer is lost, find out what became of it."""
        written = self._work.writes > 0
        try:
            commit(self._writer_id, self._batch_no + 1)
        except BaseException as error:
            if not isinstance(error, psycopg.Error) or not is_lost(error, connection):
                raise self._undone(connection, error) from error
            self._work.drop()
            if not written or not self._reads_back():
                self._link.sweep()
                raise StaleError from error
        if written:
            self._batch_no += 1
            self._written(plan)

    def _apply(self, batch: list[_Request], *, together: bool) -> list[Outcome]:
        """Do the work of each request. A failure that can have left something undoes them all."""
        work = self._work
        outcomes: list[Outcome] = []
        for request in batch:
            before = work.writes
            try:
                outcomes.append(Outcome(request.work(work), None))
            except (StoreError, psycopg.Error):
                raise
            except Exception as error:  # it belongs to its own waiter alone
                if not together or work.writes != before or work.tainted:
                    raise
                outcomes.append(Outcome(None, error))
        return outcomes

    def _undone(self, connection: psycopg.Connection, error: BaseException) -> BaseException:
        """Undo the transaction; gives what to raise."""
        self._work.revert()
        if isinstance(error, psycopg.Error) and is_lost(error, connection):
            self._link.sweep()
            return StaleError("the connection broke before the COMMIT")
        if not connection.closed:
            connection.execute(b"ROLLBACK")
        if not isinstance(error, psycopg.Error):
            return error
        if error.sqlstate == OTHER_ISOLATION:
            self._assumes = False
        if error.sqlstate == UNKNOWN_WRITER:
            self._writer_id = ""
            return StaleError("this writer was cleared away, for it had written nothing for long")
        if is_stale(error):
            return StaleError("another transaction was first")
        return store_fault(error, "transaction")

    def _enter(self, connection: psycopg.Connection) -> None:
        """Make this lane known in the database, before its first transaction and after a lost one."""
        if not self._writer_id:
            name = self._new_key()[:16].hex()
            self.writer_ids.append(name)
            connection.execute(sql("enter_writer"), {"writer_id": name})
            self._writer_id, self._batch_no = name, 0

    def _reads_back(self) -> bool:
        """Whether the transaction whose answer was lost is committed. Raises CommitUnknownError when nobody can say."""
        pause = threading.Event()
        for _ in range(READ_BACK_MS_MAX // READ_BACK_STEP_MS):
            try:
                with self._link.fresh() as connection:
                    connection.execute(sql("begin"))
                    connection.execute(sql("bound"), settings())
                    row = connection.execute(sql("committed_batch"), {"writer_id": self._writer_id}).fetchone()
                    connection.execute(b"ROLLBACK")
            except psycopg.Error:
                pause.wait(READ_BACK_STEP_MS / 1_000)
                continue
            if row is not None:
                return cast("int", row[0]) > self._batch_no
            break
        self._writer_id = ""
        msg = "commit: it may or may not be in the database, which cannot be asked; read the records before going on"
        raise CommitUnknownError(msg)


# -- telling


def _tell(batch: list[_Request], outcomes: list[Outcome]) -> None:
    """Let everybody know who waits: threads by their tickets, the others through their futures."""
    others: list[tuple[Future[object] | LoopFuture[object], Outcome]] = []
    for request, outcome in zip(batch, outcomes, strict=True):
        if isinstance(request.future, _Ticket):
            request.future.tell(outcome)
        else:
            others.append((request.future, outcome))
    tell(others)
