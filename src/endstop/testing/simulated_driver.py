"""The third driver of the pipelines: it answers the commands of many actors, one at a time, and lets faults strike.

What `endstop.runtime.drivers` does for one thread, this does for all workers of a simulated world. A command that it
does not know is an error, so that a new command of the pipeline cannot pass unsimulated.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Final, TypedDict, TypeVar, cast

import orjson

from endstop.core.commands import CallCut, Execute, Recall, RecoverOwner, Remember, Returned, Transact
from endstop.core.model import Usage
from endstop.core.steps import LoseCall, SettleCall
from endstop.core.steps_life import RecoverRun
from endstop.errors import CommitUnknownError, InvariantError, ProviderError, StoreUnavailableError
from endstop.testing import history
from endstop.testing.history import Rule, Violation
from endstop.testing.simulated_actors import Actor, Place, dispose_of
from endstop.testing.simulated_agents import NANOS_A_TOKEN, tool_effects
from endstop.testing.simulated_commands import (
    CallModel,
    Fork,
    HasEnded,
    LiftOrders,
    LookAt,
    Nap,
    OpenRun,
    PutOrder,
    Told,
)  # fmt: skip
from endstop.testing.simulated_faults import Fault
from endstop.testing.simulated_world import SimulatedCancel, SimulatedClock, Target, ToolRun

if TYPE_CHECKING:
    from concurrent.futures import Future

    from endstop.core.policy import ToolPolicy
    from endstop.core.records import OperationRecord
    from endstop.core.steps import Step
    from endstop.store.port import Store
    from endstop.testing.history import Event
    from endstop.testing.history_check import HistoryChecker
    from endstop.testing.simulated_faults import Chance

__all__ = ["Driver"]

A = TypeVar("A")
MODEL_TICKS_MAX: Final = 12
ROWS: Final = 10_000
_ORDER_KINDS: Final = ("stop", "kill", "freeze", "deny")
_DURABLE: Final = (Transact, OpenRun, PutOrder, LiftOrders, RecoverOwner)
_WAITS: Final = object()


class Driver:
    """Answers commands over one store, and writes the history."""

    def __init__(
        self,
        store: Store,
        clock: SimulatedClock,
        chance: Chance,
        checker: HistoryChecker,
        alter: Callable[[Step[object]], Step[object]] | None,
    ) -> None:
        self.actors: list[Actor] = []
        self.events: list[Event] = []
        self.violation: Violation | None = None
        self.tick_number = 0
        self.commits = 0
        self.effects = 0
        self.last_step: Step[object] | None = None
        self.target = Target(chance, self._effect)
        self._store = store
        self._clock = clock
        self._chance = chance
        self._checker = checker
        self._alter = alter
        self._last_index = -1
        self._operations: dict[str, OperationRecord] = {}
        self._executing: tuple[Actor, Execute] | None = None
        self._record("store", "opened", None)

    # -- What the world does with it

    def add(self, actor: Actor) -> None:
        """One more actor."""
        self.actors.append(actor)

    def advance(self) -> None:
        """One tick passes: time, and effects that are due."""
        self.tick_number += 1
        jump_us = self._clock.tick(self._chance)
        if jump_us:
            self.note("clock", f"jumps by {jump_us} us")
        self.target.tick(self.tick_number)

    def ready(self) -> list[Actor]:
        """The actors that can go on in this tick."""
        tick = self.tick_number
        return [actor for actor in self.actors if actor.is_up(tick) and actor.waits_until <= tick]

    def is_dead(self, owner_id: str) -> bool:
        """What the workers' board says: ended processes are dead, and so is who was declared dead."""
        threads = self.threads_of(owner_id)
        return all(actor.declared_dead or actor.place is not Place.ACTIVE for actor in threads)

    def threads_of(self, owner_id: str) -> list[Actor]:
        """The threads of one process, ended ones too."""
        return [actor for actor in self.actors if actor.owner == owner_id]

    def step(self, actor: Actor) -> None:
        """Answer what `actor` waits for, and let it go on to its next command."""
        self.last_step = None
        if not actor.started:
            actor.started = True
            self._go_on(actor, None)
            return
        command = actor.command
        if actor.dies_at is not None and self.tick_number >= actor.dies_at:
            self._die(actor, "in the middle of a call")
            return
        in_call = actor.tool_run is not None or actor.model_answer is not None
        if not in_call and self._strikes(actor, command, Fault.CRASH_BEFORE_COMMAND):
            self._die(actor, f"before {_name_of(command)}")
            return
        try:
            answer = self._answer(actor, command)
        except InvariantError as error:
            self.break_rule(Rule.NO_FAULT, f"{_name_of(command)} of {actor.name}: {error}")
        except BaseException as error:  # whatever the world does to a caller goes to that caller
            self._go_on(actor, error)
        else:
            if answer is _WAITS:
                return
            if self._strikes(actor, command, Fault.CRASH_AFTER_COMMIT):
                self._die(actor, f"after {_name_of(command)}")
                return
            self._go_on(actor, answer)

    def dispose(self) -> None:
        """End every flow that still stands somewhere."""
        for actor in self.actors:
            dispose_of(actor.flow)

    def note(self, who: str, text: str) -> None:
        """A line in the history."""
        self._see(history.Happened(text=text, **self._head(who)))

    def break_rule(self, rule: Rule, text: str) -> None:
        """The simulator itself saw a rule broken."""
        if self.violation is None:
            self.violation = Violation(rule=rule, number=len(self.events), text=text)

    def lift_all_orders(self) -> None:
        """The operators go home: nothing stands in force any more."""
        for kind in _ORDER_KINDS:
            self._lift(kind).result()
            self._record("world", f"lift {kind}", None, orders=True)

    def compare_leaves(self) -> None:
        """At the end: no stored entry has changed since it was written."""
        leaves: list[bytes] = []
        while found := self._store.entries(after_index=len(leaves) - 1, limit=ROWS).result():
            leaves += [record.leaf for record in found]
        self.violation = self.violation or self._checker.unchanged(tuple(leaves), len(self.events))

    # -- Going on

    def _go_on(self, actor: Actor, answer: object) -> None:
        try:
            if isinstance(answer, BaseException):
                actor.command = actor.flow.throw(answer)
            else:
                actor.command = actor.flow.send(answer)
        except StopIteration:
            actor.place = Place.DONE
            self.note(actor.name, "is done")
        except BaseException as error:  # an actor handles all that may happen to it; the rest is a bug
            actor.place = Place.DONE
            self.break_rule(Rule.NO_FAULT, f"{actor.name} ended with {type(error).__name__}: {error}")

    def _strikes(self, actor: Actor, command: object, fault: Fault) -> bool:
        """Whether this durable point kills the actor."""
        if not isinstance(command, (*_DURABLE, Execute)):
            return False
        planned = actor.plan is not None and self._chance.crash_point()
        return self._chance.fires(fault) or planned

    def _die(self, actor: Actor, where: str) -> None:
        self.note(actor.name, f"dies {where}")
        for thread in self.threads_of(actor.owner):
            run = thread.tool_run
            if run is not None and not run.has_applied and self._chance.below(2):
                self.target.drop(run)
            if thread.place is Place.ACTIVE:
                thread.place = Place.DEAD
                dispose_of(thread.flow)

    # -- Answers

    def _answer(self, actor: Actor, command: object) -> object:
        match command:
            case Transact(step=step):
                return self._transact(actor, step)
            case RecoverOwner(operation=operation):
                # Nobody takes itself for dead, whatever others say.
                if operation.owner_id == actor.owner or not self.is_dead(operation.owner_id):
                    return False
                self._transact(
                    actor,
                    RecoverRun(
                        run_id=operation.run_id, now_us=self._clock.now_us(),
                        dead_owners=frozenset({operation.owner_id}),
                    ),
                )  # fmt: skip
                return True
            case Execute():
                return self._execute(actor, command)
            case CallModel():
                return self._call_model(actor, command)
            case Recall():
                return actor.twins.get((command.round_id, command.fingerprint))
            case Remember():
                actor.twins[command.round_id, command.fingerprint] = command.result
                return None
            case _:
                return self._answer_of_world(actor, command)

    def _answer_of_world(self, actor: Actor, command: object) -> object:
        match command:
            case OpenRun(new=new):
                return self._commit(actor, "OpenRun", new.run_id, lambda: self._store.open_run(new))
            case LookAt(run_id=run_id):
                self._reach()
                return self._store.run(run_id).result()
            case PutOrder(control=control):
                put = lambda: self._store.add_control(control)  # noqa: E731  # a request, like the others
                return self._commit(actor, f"order {control.kind}", control.run_id, put, orders=True)
            case LiftOrders(kind=kind):
                return self._commit(actor, f"lift {kind}", None, lambda: self._lift(kind), orders=True)
            case Fork(flow=flow):
                name = f"{actor.owner}.t{len(self.threads_of(actor.owner))}"
                thread = Actor(name=name, flow=flow, plan=actor.plan, owner=actor.owner)
                thread.declared_dead = actor.declared_dead
                self.add(thread)
                return name
            case HasEnded(name=name):
                return all(thread.place is not Place.ACTIVE for thread in self.actors if thread.name == name)
            case Nap(ticks=ticks):
                actor.waits_until = self.tick_number + ticks
                return None
            case Told(operation_id=operation_id, value=value):
                text = orjson.dumps(value).decode()
                self._see(history.Replayed(operation_id=operation_id, value=text, **self._head(actor.name)))
                return None
            case _:
                msg = f"the simulator answers no command {type(command).__name__}: teach it"
                raise InvariantError(msg)

    # -- Transactions

    def _transact(self, actor: Actor, step: Step[A]) -> A:
        self.last_step = None
        given = cast("Step[object]", step)
        altered = given if self._alter is None else self._alter(given)
        claimed = step.operation if isinstance(step, SettleCall | LoseCall) else None
        answer = self._commit(
            actor, type(step).__name__, step.run_id, lambda: self._store.transact(altered), claimed=claimed
        )
        self.last_step = given
        return cast("A", answer)

    def _reach(self) -> None:
        if self._chance.fires(Fault.STORE_UNAVAILABLE):
            msg = "the simulated store cannot be reached; try again"
            raise StoreUnavailableError(msg)

    def _commit(
        self,
        actor: Actor,
        name: str,
        run_id: str | None,
        request: Callable[[], Future[A]],
        *,
        claimed: OperationRecord | None = None,
        orders: bool = False,
    ) -> A:
        try:
            self._reach()
            answer = request().result()
        except Exception as error:
            self.note(actor.name, f"{name} {run_id or '-'} fails: {type(error).__name__}")
            raise
        self._record(actor.name, name, run_id, claimed=claimed, orders=orders)
        if self._chance.fires(Fault.COMMIT_REPLY_LOST):
            self.note(actor.name, f"the reply to {name} is lost")
            msg = "the simulated store may or may not have committed"
            raise CommitUnknownError(msg)
        return answer

    def _record(
        self,
        who: str,
        name: str,
        run_id: str | None,
        *,
        claimed: OperationRecord | None = None,
        orders: bool = False,
    ) -> None:
        """What the transaction that just committed has changed, as any reader of the store sees it."""
        store = self._store
        self.commits += 1
        entries = store.entries(after_index=self._last_index, limit=ROWS).result()
        if entries:
            self._last_index = entries[-1].index
        changed = []
        for record in store.operations(limit=ROWS).result():
            known = self._operations.get(record.operation_id)
            if known is not record and known != record:
                changed.append((known, record))
                self._operations[record.operation_id] = record
        run = None if run_id is None else store.run(run_id).result()
        self._see(
            history.Committed(
                step=name, run_id=run_id, entries=entries, operations=tuple(changed), claimed=claimed, run=run,
                evidence=None if run is None else store.evidence_of(run.run_id).result(),
                orders=store.controls().result() if orders else None, **self._head(who),
            )
        )  # fmt: skip

    def _lift(self, kind: str) -> Future[int]:
        return self._store.withdraw_controls(
            kind=kind, run_id=None, label=None, tool=None, control_id=None, actor="operator", reason="drill is over",
            now_us=self._clock.now_us(),
        )  # fmt: skip

    # -- Tools and models

    def tool(self, policy: ToolPolicy, name: str) -> Callable[[], object]:
        """The tool of that name, to be called by the driver for the pipeline's Execute."""

        def start() -> ToolRun:
            if self._executing is None:
                msg = f"tool {name} was called outside a guarded call"
                raise InvariantError(msg)
            actor, command = self._executing
            operation = command.operation
            writes = tool_effects(policy)
            value = "same" if not writes and self._chance.below(3) == 0 else None
            attempt = 0 if operation is None else operation.attempt
            self._see(
                history.Sent(
                    run_id="" if actor.plan is None else actor.plan.run_id, call_id=command.proposal.call_id,
                    tool=name, operation_id=None if operation is None else operation.operation_id, attempt=attempt,
                    fence=0 if operation is None else operation.fence, **self._head(actor.owner),
                )
            )  # fmt: skip
            return self.target.send(
                tool=name, operation_id=None if operation is None else operation.operation_id, attempt=attempt,
                tick=self.tick_number, writes=writes, value=value,
            )  # fmt: skip

        return start

    def _execute(self, actor: Actor, command: Execute) -> object:
        run = actor.tool_run
        # 1. The call leaves.
        if run is None:
            if self._chance.fires(Fault.CANCEL_BEFORE_CALL):
                self.note(actor.name, "is cancelled before its call")
                raise CallCut(SimulatedCancel(), sent=False)
            self._executing = (actor, command)
            started = command.call()
            self._executing = None
            if not isinstance(started, ToolRun):
                msg = "a simulated tool gives its run"
                raise InvariantError(msg)
            actor.tool_run = started
            actor.waits_until = started.ends_at
            self._may_die(actor, started.ends_at)
            return _WAITS
        # 2. It comes back.
        self.target.finish(run)
        actor.tool_run = None
        error = run.script.error
        if run.operation_id is not None and error is None:
            text = orjson.dumps(run.script.result.value).decode()
            self._see(
                history.Returned(
                    operation_id=run.operation_id, attempt=run.attempt, value=text, **self._head(actor.name)
                )
            )
        if error is not None and not isinstance(error, Exception):
            self.note(actor.name, "is cancelled while its tool runs")
            raise error
        return Returned(value=run.script.result, error=error, took_us=0)

    def _call_model(self, actor: Actor, command: CallModel) -> object:
        answer = actor.model_answer
        if answer is None:
            actor.model_answer, spent = self._model_answer(command)
            actor.waits_until = self.tick_number + self._chance.below(MODEL_TICKS_MAX)
            self._may_die(actor, actor.waits_until)
            if spent:
                self._see(
                    history.Spent(
                        run_id=command.run_id, call_id=command.call_id, tokens=spent, nanos=spent * NANOS_A_TOKEN,
                        **self._head(actor.name),
                    )
                )  # fmt: skip
            return _WAITS
        actor.model_answer = None
        if isinstance(answer, BaseException):
            raise answer
        return answer

    def _model_answer(self, command: CallModel) -> tuple[Usage | BaseException, int]:
        """What comes back, and the tokens that are billed."""
        chance, bound = self._chance, command.tokens_bound
        if chance.fires(Fault.MODEL_FAILS):
            if chance.below(2):
                return ProviderError("too many requests", "rate_limit"), 0
            return ProviderError("broke off", "outage"), chance.between(0, bound)
        used = chance.between(1, bound)
        if chance.fires(Fault.CANCEL_IN_TOOL):
            return SimulatedCancel(), used
        read = chance.between(0, used)
        return Usage(input_tokens=read, output_tokens=used - read), used

    def _may_die(self, actor: Actor, ends_at: int) -> None:
        if self._chance.fires(Fault.CRASH_IN_TOOL):
            actor.dies_at = self._chance.between(self.tick_number + 1, max(ends_at, self.tick_number + 1))
            actor.waits_until = min(actor.waits_until, actor.dies_at)

    def _effect(self, run: ToolRun) -> None:
        self.effects += 1
        self._see(
            history.Applied(
                tool=run.tool, operation_id=run.operation_id or "", attempt=run.attempt, **self._head("target")
            )
        )

    # -- History

    def _head(self, who: str) -> _Head:
        return _Head(number=len(self.events), tick=self.tick_number, at_us=self._clock.now_us(), who=who)

    def _see(self, event: Event) -> None:
        self.events.append(event)
        if self.violation is None:
            self.violation = self._checker.see(event)


class _Head(TypedDict):
    number: int
    tick: int
    at_us: int
    who: str


def _name_of(command: object) -> str:
    return type(command.step).__name__ if isinstance(command, Transact) else type(command).__name__
