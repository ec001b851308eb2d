"""The durable guard: wiring of a store, a policy, a clock and this process as a worker. Decisions live in the core."""

from __future__ import annotations

import itertools
import os
import threading
from typing import TYPE_CHECKING, Final

from endstop.core.policy import Policy
from endstop.core.reasons import Reason, RunState
from endstop.core.records import ControlRecord
from endstop.core.steps_life import EndRun, FreezeRun, NewRun, RecoverRun, ResumeRun
from endstop.core.transitions import OperationState
from endstop.errors import (
    GuardClosedError,
    RunNotFoundError,
    SpecInvalidError,
    StoreFullError,
    StoreUnavailableError,
    UsageError,
)
from endstop.runtime.checks import check_run_id, checked_labels, checked_version
from endstop.runtime.clock import SystemClock, SystemIds, environment
from endstop.runtime.drivers import World
from endstop.runtime.owners import Worker, WorkerBoard
from endstop.runtime.scope import RunScope
from endstop.runtime.stop_report import StopReport
from endstop.store.port import ROWS_MAX, RunQuery, StoredSpec

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from endstop.core.model import Spec, Version
    from endstop.core.records import OperationRecord, RunRecord
    from endstop.runtime.clock import Clock, Ids
    from endstop.runtime.reconcile import Reconciled
    from endstop.runtime.turn import Prices
    from endstop.store.port import Store

__all__ = ["DEFAULT_STORE", "Guard", "StopReport", "open_guard"]

DEFAULT_STORE: Final = "sqlite:///.endstop/endstop.db"
WAIT_POLL_MS: Final = 20
KILL_RUNS_MAX: Final = 10_000
_LIVE: Final = (RunState.RUNNING, RunState.FROZEN)
_EXECUTING: Final = (OperationState.EXECUTING,)


def open_guard(
    url: str | None = None,
    *,
    policy: Policy | None = None,
    clock: Clock | None = None,
    ids: Ids | None = None,
    prices: Prices | None = None,
) -> Guard:
    """Open the durable guard on a store.

    `url` is `sqlite:///path`, `memory:` or a path; default `$ENDSTOP_STORE`, else `.endstop/endstop.db` here. Raises
    StoreError when the store cannot be used; then nothing was changed.
    """
    from endstop.store.registry import open_store

    ids = ids or SystemIds()
    clock = clock or SystemClock()
    store = open_store(url or environment("ENDSTOP_STORE") or DEFAULT_STORE, new_key=ids.new_key, now_us=clock.now_us)
    return Guard(store, policy=policy or Policy(), clock=clock, ids=ids, prices=prices)


class Guard:
    """A store, a policy and this process as a worker. Safe to share between threads; use it as a context manager."""

    def __init__(self, store: Store, *, policy: Policy, clock: Clock, ids: Ids, prices: Prices | None = None) -> None:
        self._store = store
        self._policy = policy
        self._clock = clock
        self._ids = ids
        self._prices = prices
        self._board = WorkerBoard(store.owners_dir, store.is_owner_alive)
        self._world = World(store, clock, self._board)
        self._worker: Worker | None = None
        self._lock = threading.Lock()
        self._closed = False
        self._members = itertools.count(1)

    # -- What it is

    @property
    def policy(self) -> Policy:
        """What calls are judged against."""
        return self._policy

    @property
    def store(self) -> Store:
        """The store."""
        return self._store

    @property
    def world(self) -> World:
        """What the drivers act on."""
        return self._world

    @property
    def ids(self) -> Ids:
        """Where new ids come from."""
        return self._ids

    @property
    def prices(self) -> Prices:
        """What models cost: as given, else the table of the `prices` extra."""
        if self._prices is None:
            from endstop.runtime.prices import InstalledPrices

            self._prices = InstalledPrices()
        return self._prices

    def owner_id(self) -> str:
        """This process as a worker: made at the first use, and anew in a forked child."""
        with self._lock:
            if self._closed:
                msg = "this guard was closed"
                raise GuardClosedError(msg)
            if self._worker is None or self._worker.pid != os.getpid():
                self._worker = Worker(self._board, self._ids)
            return self._worker.owner_id

    def member_id(self) -> str:
        """This process as a member of one more run: it may be in several, and in one run more than once."""
        return f"{self.owner_id()}.{next(self._members)}"

    # -- Runs

    def run(
        self,
        spec: Spec | None = None,
        *,
        run_id: str | None = None,
        labels: Mapping[str, str] | None = None,
        agent: str = "main",
        initial_progress_version: Version | None = None,
    ) -> RunScope:
        """Start a run, or join the one called `run_id` (same spec and policy). Use with `with` or `async with`.

        `spec` None takes the spec that was stored for `run_id`. Entering raises RunJoinError for another spec or
        policy, RunStopped for a run that has ended, SpecInvalidError without any spec.
        """
        check_run_id(run_id)
        if spec is None and run_id is None:
            msg = "a run needs a spec: what it does, what it does not, what done looks like"
            raise SpecInvalidError(msg)
        return RunScope(
            self,
            spec=spec,
            run_id=run_id or self._ids.new_id(),
            labels=checked_labels(labels or {}),
            agent=agent,
            initial_progress_version=checked_version(initial_progress_version),
        )

    def new_run(self, *, spec: Spec, run_id: str, labels: Mapping[str, str], agent: str,
                initial_progress_version: Version | None, owner_id: str) -> NewRun:  # fmt: skip
        """What a run called `run_id` would start with under this guard."""
        return NewRun(
            run_id=run_id, spec=spec, policy_digest=self._policy.digest(), limits=self._policy.limits, agent=agent,
            labels=tuple(sorted(labels.items())), owner_id=owner_id, now_us=self._clock.now_us(),
            run_key=self._ids.new_key(), initial_progress_version=initial_progress_version,
        )  # fmt: skip

    def save_spec(self, spec: Spec, *, run_id: str | None = None) -> str:
        """Write a spec down before its run starts; gives the run's id."""
        check_run_id(run_id)
        named = run_id or self._ids.new_id()
        self._store.save_spec(StoredSpec(run_id=named, spec=spec, created_at_us=self._clock.now_us())).result()
        return named

    def spec(self, run_id: str) -> Spec:
        """The spec of a run, started or not. Raises RunNotFoundError."""
        stored = self._store.spec(run_id).result()
        if stored is None:
            msg = f"no spec is stored for run {run_id}: write one with `endstop spec`"
            raise RunNotFoundError(msg)
        return stored.spec

    def runs(
        self, *, states: Sequence[RunState] = (), labels: Mapping[str, str] | None = None, limit: int = 100
    ) -> tuple[RunRecord, ...]:
        """Runs, newest first, each judged as it stands: one whose workers are all dead is interrupted, and what a dead
        worker had sent, in whatever run, is in doubt."""
        wanted = tuple(RunState(state) for state in states)
        chosen = tuple(sorted((labels or {}).items()))
        if RunState.INTERRUPTED in wanted:
            # What looks alive may be interrupted by now, and then belongs into the answer.
            for run in self._store.runs(RunQuery(states=_LIVE, labels=chosen, limit=KILL_RUNS_MAX)).result():
                self.recover(run, {})
        found = self._store.runs(RunQuery(states=wanted, labels=chosen, limit=limit)).result()
        senders = self.senders()
        judged = (self._looked_at(run, senders) for run in found)
        return tuple(run for run in judged if not wanted or run.state in wanted)

    def show(self, run_id: str) -> RunRecord:
        """One run as it stands. Raises RunNotFoundError."""
        record = self._store.run(run_id).result()
        if record is None:
            msg = f"there is no run {run_id} in this store"
            raise RunNotFoundError(msg)
        return self._looked_at(record, self.senders(record.root_run_id))

    def operations(
        self, run_id: str | None = None, *, states: Sequence[OperationState] = (), limit: int = 1_000
    ) -> tuple[OperationRecord, ...]:
        """Operations, oldest first: of one run, or of all."""
        return self._store.operations(run_id=run_id, states=states, limit=limit).result()

    # -- Controls. From the commit of an order on, no call that it forbids is reserved, in any process.

    def stop(self, run_id: str, *, reason: str = "", actor: str = "operator", wait_ms: int = 0) -> StopReport:
        """End a run now. Async calls in flight are cancelled, sync tools see `current().cancelled`.

        `wait_ms` waits until the calls in flight have settled. Stopping a run that has ended changes nothing.
        """
        before = self.show(run_id)
        already = before.envelope is not None and before.state not in (RunState.INTERRUPTED, *_LIVE)
        envelope = self._store.transact(
            EndRun(
                run_id=before.root_run_id, now_us=self._clock.now_us(), reason=Reason.OPERATOR_CANCELLED_LOOP,
                guard="stop", message=reason, actor=actor,
            )
        ).result()  # fmt: skip
        in_flight = self.show(before.root_run_id).in_flight
        self._wait_settled(before.root_run_id, wait_ms)
        return StopReport(envelope=envelope, in_flight=in_flight, already=already)

    def freeze(self, run_id: str | None = None, *, reason: str = "", actor: str = "operator") -> ControlRecord:
        """Refuse retries, sub-agents and handoffs of one run, or of all; ordinary calls go on."""
        root = None if run_id is None else self.show(run_id).root_run_id
        order = self._order("freeze", run_id=root, reason=reason, actor=actor)
        for found in self._live(root):
            self._store.transact(
                FreezeRun(run_id=found, now_us=self._clock.now_us(), frozen=True, actor=actor)
            ).result()
        return order

    def unfreeze(self, run_id: str | None = None, *, reason: str = "", actor: str = "operator") -> int:
        """Withdraw the freeze of one run, or every freeze; gives how many orders there were."""
        root = None if run_id is None else self.show(run_id).root_run_id
        count = self._withdraw("freeze", run_id=root, reason=reason, actor=actor)
        for found in self._live(root):
            self._store.transact(
                FreezeRun(run_id=found, now_us=self._clock.now_us(), frozen=False, actor=actor)
            ).result()
        return count

    def deny(
        self,
        *,
        tool: str | None = None,
        run_id: str | None = None,
        effect: str | None = None,
        args: Mapping[str, str] | None = None,
        reason: str = "",
        actor: str = "operator",
    ) -> ControlRecord:
        """Refuse calls that match: a tool's name or pattern, an effect, argument patterns; in one run, or in all."""
        if tool is None and effect is None and not args:
            msg = "a deny rule names a tool, an effect or an argument pattern"
            raise UsageError(msg)
        root = None if run_id is None else self.show(run_id).root_run_id
        return self._order(
            "deny", run_id=root, tool=tool, effect=effect, args=tuple(sorted((args or {}).items())), reason=reason,
            actor=actor,
        )  # fmt: skip

    def undeny(
        self,
        *,
        tool: str | None = None,
        run_id: str | None = None,
        rule_id: str | None = None,
        reason: str = "",
        actor: str = "operator",
    ) -> int:
        """Withdraw the deny rules that fit every part given, or all of them; gives how many there were."""
        return self._withdraw("deny", run_id=run_id, tool=tool, control_id=rule_id, reason=reason, actor=actor)

    def kill(
        self,
        *,
        label: str | None = None,
        all: bool = False,  # noqa: A002  # the contract's word
        reason: str = "",
        actor: str = "operator",
    ) -> tuple[str, ...]:
        """End every run (`all`), or every run with a label (`name` or `name=value`), and refuse new ones, until
        `unkill`. Gives the runs that were ended."""
        if (label is None) is not all:
            msg = "kill names a label, or says all=True"
            raise UsageError(msg)
        # 1. The order first: from its commit on nothing more is reserved.
        self._order("kill", label=label, reason=reason, actor=actor)
        # 2. Then every live run gets its end.
        ended = []
        for record in self._store.runs(RunQuery(states=_LIVE, limit=KILL_RUNS_MAX)).result():
            if label is not None and not _has_label(record, label):
                continue
            self._store.transact(
                EndRun(
                    run_id=record.run_id, now_us=self._clock.now_us(), reason=Reason.KILL_SWITCH, guard="kill",
                    message=reason, actor=actor,
                )
            ).result()  # fmt: skip
            ended.append(record.run_id)
        return tuple(ended)

    def unkill(
        self,
        *,
        label: str | None = None,
        all: bool = False,  # noqa: A002  # the contract's word
        reason: str = "",
        actor: str = "operator",
    ) -> int:
        """Withdraw the kill orders of this label, or every kill order (`all`, or nothing named); gives how many."""
        if all and label is not None:
            msg = "unkill names a label, or says all=True"
            raise UsageError(msg)
        return self._withdraw("kill", label=label, reason=reason, actor=actor)

    def resume(self, run_id: str, *, change: str, reason: str, actor: str = "operator") -> int:
        """Let a stopped, paused or interrupted run go on in a new generation with the same totals.

        `change` is `cursor`, `args`, `authorisation`, `strategy`, `retry_after` or `limit:NAME=VALUE`; a run ended by
        a cap needs that limit raised. Gives the generation; a worker then joins the run by its id. Raises
        ResumeRefusedError, and changes nothing, when the change does not fit.
        """
        record = self.show(run_id)
        return self._store.transact(
            ResumeRun(run_id=record.root_run_id, now_us=self._clock.now_us(), change=change, reason=reason, actor=actor)
        ).result()

    def reconcile(
        self, *, policy: Policy | None = None, tools: Iterable[Callable[..., object]] = (), actor: str = "reconciler"
    ) -> Reconciled:
        """Take over every run whose workers are all dead, then ask the targets of operations in doubt. Sends nothing.

        Probes are those of `policy` (default: the guard's) and of the declared functions in `tools`. An operation of a
        declared tool without a probe, or whose probes are spent, becomes a person's (MANUAL).
        """
        from endstop.runtime.reconcile import reconcile

        return reconcile(self, policy=policy, tools=tools, actor=actor)

    async def areconcile(
        self, *, policy: Policy | None = None, tools: Iterable[Callable[..., object]] = (), actor: str = "reconciler"
    ) -> Reconciled:
        """The same from an event loop."""
        from endstop.runtime.reconcile import areconcile

        return await areconcile(self, policy=policy, tools=tools, actor=actor)

    def settle_operation(
        self, operation_id: str, *, outcome: str, reason: str, evidence: str, actor: str = "operator",
        exclusion: str | None = None, receipt: str | None = None,
    ) -> OperationRecord:  # fmt: skip
        """Settle an operation in doubt as a person found it at the target: `applied` or `not_applied`.

        `not_applied` lets it be sent again, so it needs its worker to be dead, or an `exclusion` (`target_dedupes`,
        `key_voided`, `not_after`). Raises UsageError, and changes nothing, otherwise.
        """
        from endstop.runtime.settling import settle_operation

        return settle_operation(
            self, operation_id, outcome=outcome, reason=reason, evidence=evidence, actor=actor, exclusion=exclusion,
            receipt=receipt,
        )  # fmt: skip

    def expire_results(self, *, older_than_ms: int, actor: str = "retention") -> int:
        """Remove the results of operations that were settled longer ago than that; gives how many. Their records stay,
        so they are never run again."""
        from endstop.runtime.reconcile import expire_results

        return expire_results(self, older_than_ms=older_than_ms, actor=actor)

    # -- End

    def close(self) -> None:
        """Finish what the store has taken and give the worker's lock back. Closing twice is harmless."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            worker, self._worker = self._worker, None
        self._store.close()
        # A tool that still runs in a thread may still send: its worker then lives until the process ends.
        if worker is not None and not self._world.sending.any():
            worker.close()

    def __enter__(self) -> Guard:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    async def __aenter__(self) -> Guard:
        return self

    async def __aexit__(self, *_: object) -> None:
        import asyncio

        await asyncio.to_thread(self.close)

    # -- Parts

    def recovery(self, record: RunRecord, others: Iterable[str] = ()) -> RecoverRun | None:
        """The step that takes over what dead workers left in a run, or None when all of them live: those inside, and
        `others` that may have left it."""
        dead = self._board.dead_of(tuple(dict.fromkeys((*record.owners, *others))))
        if not dead:
            return None
        return RecoverRun(run_id=record.root_run_id, now_us=self._clock.now_us(), dead_owners=dead)

    def senders(self, run_id: str | None = None) -> dict[str, list[str]]:
        """By run, the workers whose operations are executing: of one run, or of all. A worker may have left its run, or
        the run may have ended, before the outcome came."""
        found = self._store.operations(run_id=run_id, states=_EXECUTING, limit=ROWS_MAX).result()
        senders: dict[str, list[str]] = {}
        for operation in found:
            senders.setdefault(operation.run_id, []).append(operation.owner_id)
        return senders

    def recover(self, record: RunRecord, senders: Mapping[str, list[str]]) -> RunRecord:
        """Take over what dead workers left in a run; the run as it stands afterwards."""
        step = self.recovery(record, senders.get(record.root_run_id, ()))
        if step is None:
            return record
        self._store.transact(step).result()
        found = self._store.run(record.run_id).result()
        return record if found is None else found

    def _looked_at(self, record: RunRecord, senders: Mapping[str, list[str]]) -> RunRecord:
        """The run after its recovery, or as it is stored when a full or read-only store cannot record one: whoever
        looks in an emergency sees what there is."""
        try:
            return self.recover(record, senders)
        except (StoreFullError, StoreUnavailableError):
            return record

    def _live(self, run_id: str | None) -> tuple[str, ...]:
        if run_id is not None:
            return (run_id,)
        found = self._store.runs(RunQuery(states=_LIVE, limit=KILL_RUNS_MAX)).result()
        return tuple(record.run_id for record in found)

    def _order(
        self,
        kind: str,
        *,
        run_id: str | None = None,
        label: str | None = None,
        tool: str | None = None,
        effect: str | None = None,
        args: tuple[tuple[str, str], ...] = (),
        reason: str,
        actor: str,
    ) -> ControlRecord:
        return self._store.add_control(
            ControlRecord(
                control_id=self._ids.new_id(), kind=kind, run_id=run_id, label=label, tool=tool, effect=effect,
                args=args, reason=reason, actor=actor, created_at_us=self._clock.now_us(),
            )
        ).result()  # fmt: skip

    def _withdraw(
        self,
        kind: str,
        *,
        run_id: str | None = None,
        label: str | None = None,
        tool: str | None = None,
        control_id: str | None = None,
        reason: str,
        actor: str,
    ) -> int:
        return self._store.withdraw_controls(
            kind=kind, run_id=run_id, label=label, tool=tool, control_id=control_id, actor=actor, reason=reason,
            now_us=self._clock.now_us(),
        ).result()  # fmt: skip

    def _wait_settled(self, run_id: str, wait_ms: int) -> None:
        until_us = self._clock.now_us() + wait_ms * 1_000
        while wait_ms and self._clock.now_us() < until_us and self.show(run_id).in_flight:
            self._clock.sleep_ms(WAIT_POLL_MS)


def _has_label(record: RunRecord, label: str) -> bool:
    name, has_value, value = label.partition("=")
    found = dict(record.labels)
    return name in found and (not has_value or found[name] == value)
