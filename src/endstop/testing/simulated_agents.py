"""Who acts in a simulation: workers that run an agent's plan through the guard, and operators who interfere.

Each is a generator of commands, like the pipeline that it runs: the scheduler steps them all in an order of its own.
What `endstop.runtime` does around a pipeline (entering and leaving a run, a model call's two steps, an operator's order
followed by its effect on each run) is done here step by step, so that a fault may fall between any two of them.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, TypeVar

from endstop.core.canonical import digest_of
from endstop.core.commands import Command, Flow, Transact, perform
from endstop.core.events import TurnProposal
from endstop.core.model import Spec, ToolCall, Usage
from endstop.core.pipeline import CallRequest, guarded_call
from endstop.core.policy import Policy, ToolPolicy
from endstop.core.propose import propose
from endstop.core.reasons import LIMIT_OF_REASON, Action, Effect, Reason, RunState
from endstop.core.records import ControlRecord
from endstop.core.steps_life import (
    CompleteRun,
    EndRun,
    FreezeRun,
    LeaveRun,
    NewRun,
    NoteUserInput,
    RecoverRun,
    ResumeRun,
    SaveCheckpoint,
)  # fmt: skip
from endstop.core.steps_turn import ReserveTurn, SettleTurn, StepAnswer
from endstop.errors import (
    NotAppliedError,
    OutcomeUnknownError,
    ProviderError,
    ResumeRefusedError,
    RunHalted,
    RunJoinError,
    StoreError,
)
from endstop.runtime.run import _operation_id
from endstop.testing.simulated_faults import Chance, Fault
from endstop.testing.simulated_world import SimulatedCancel, SimulatedToolError

if TYPE_CHECKING:
    from endstop.core.model import ToolResult
    from endstop.core.records import RunRecord
    from endstop.store.port import RunOpened

__all__ = [
    "CallModel", "Item", "LiftOrders", "LookAt", "Nap", "OpenRun", "PutOrder", "RunPlan", "Seat", "Surroundings",
    "Told", "live", "order", "recover",
]  # fmt: skip

A = TypeVar("A")
TRIES_MAX: Final = 3
ENTRIES_MAX: Final = 6
NAP_TICKS: Final = 6
NANOS_A_TOKEN: Final = 3
SPEC: Final = Spec(what_it_does="Pays orders.", what_it_does_not="Pays twice.", done_looks_like="All are paid.")


# -- What a worker may ask of the simulated world, beyond what a pipeline asks


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenRun(Command["RunOpened"]):
    """Create or join a run, in one transaction."""

    new: NewRun


@dataclass(frozen=True, slots=True, kw_only=True)
class LookAt(Command["RunRecord | None"]):
    """Read one run."""

    run_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PutOrder(Command[ControlRecord]):
    """Put a standing order in force."""

    control: ControlRecord


@dataclass(frozen=True, slots=True, kw_only=True)
class LiftOrders(Command[int]):
    """Withdraw the orders of one kind."""

    kind: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CallModel(Command[Usage]):
    """Ask the provider; raises ProviderError or a cancellation."""

    run_id: str
    call_id: str
    tokens_bound: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Nap(Command[None]):
    """Do nothing for some ticks."""

    ticks: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Told(Command[None]):
    """Note what a caller was answered from the ledger."""

    operation_id: str
    value: object


# -- Plans


@dataclass(frozen=True, slots=True, kw_only=True)
class Item:
    """One thing that an agent does: `kind` is call, turn, checkpoint or user_input."""

    kind: str
    tool: str = ""
    args: dict[str, object] = field(default_factory=dict)
    round_id: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RunPlan:
    """One run and what its agents do, in order. Every worker that enters it proposes all of it."""

    run_id: str
    labels: tuple[tuple[str, str], ...]
    items: tuple[Item, ...]
    completes: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Surroundings:
    """What all actors of a world share."""

    chance: Chance
    policy: Policy
    store_key: bytes
    new_id: Callable[[], str]
    new_key: Callable[[], bytes]
    is_dead: Callable[[str], bool]
    tool: Callable[[ToolPolicy, str], Callable[[], object]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Seat:
    """One worker's place: who it is, its own clock, and the head of its call ids (parallel workers may share one)."""

    owner_id: str
    now_us: Callable[[], int]
    call_head: str


# -- A worker's life


def live(seat: Seat, plan: RunPlan, around: Surroundings) -> Flow[None]:
    """Enter the run, propose the whole plan, complete or leave. Ends early when the run is over."""
    for _ in range(ENTRIES_MAX):
        try:
            opened = yield from _enter(seat, plan, around)
        except StoreError:
            yield from perform(Nap(ticks=NAP_TICKS))
            continue
        except RunJoinError:
            return
        break
    else:
        return
    if opened.joined.envelope is not None and opened.joined.state in (RunState.STOPPED, RunState.COMPLETE, RunState.PAUSED):
        return
    try:
        yield from _work(_Desk(seat=seat, plan=plan, around=around, opened=opened))
    except (RunHalted, SimulatedCancel):
        pass
    yield from _leave(seat, plan)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Desk:
    seat: Seat
    plan: RunPlan
    around: Surroundings
    opened: RunOpened

    @property
    def policy(self) -> Policy:
        return self.around.policy.under(self.opened.joined.limits)


def _enter(seat: Seat, plan: RunPlan, around: Surroundings) -> Flow[RunOpened]:
    known = yield from perform(LookAt(run_id=plan.run_id))
    if known is not None:
        dead = frozenset(owner for owner in known.owners if around.is_dead(owner))
        if dead:
            yield from perform(Transact(step=RecoverRun(run_id=plan.run_id, now_us=seat.now_us(), dead_owners=dead)))
    return (
        yield from perform(
            OpenRun(
                new=NewRun(
                    run_id=plan.run_id, spec=SPEC, policy_digest=around.policy.digest(), limits=around.policy.limits,
                    agent="main", labels=plan.labels, owner_id=seat.owner_id, now_us=seat.now_us(),
                    run_key=around.new_key(),
                )
            )
        )
    )  # fmt: skip


def _leave(seat: Seat, plan: RunPlan) -> Flow[None]:
    for _ in range(TRIES_MAX):
        try:
            yield from perform(
                Transact(step=LeaveRun(run_id=plan.run_id, now_us=seat.now_us(), owner_id=seat.owner_id))
            )
        except StoreError:
            continue
        return


def _work(desk: _Desk) -> Flow[None]:
    seat, plan = desk.seat, desk.plan
    for number, item in enumerate(plan.items):
        call_id = f"{seat.call_head}-{number}"
        match item.kind:
            case "call":
                yield from _propose(desk, item, call_id)
            case "turn":
                yield from _turn(desk, call_id)
            case "user_input":
                yield from _tried(lambda: NoteUserInput(run_id=plan.run_id, now_us=seat.now_us()))
            case _:
                data = f'{{"at":{number}}}'
                yield from _tried(lambda: SaveCheckpoint(run_id=plan.run_id, now_us=seat.now_us(), data=data))  # noqa: B023  # called at once
    if plan.completes:
        yield from _tried(lambda: CompleteRun(run_id=plan.run_id, now_us=seat.now_us(), output="done"))


def _tried(make: Callable[[], object]) -> Flow[None]:
    """One step that is given up when the store fails."""
    try:
        yield from perform(Transact(step=make()))  # type: ignore[arg-type]  # any step
    except StoreError:
        yield from perform(Nap(ticks=NAP_TICKS))


def _propose(desk: _Desk, item: Item, call_id: str) -> Flow[None]:
    """One tool call, tried again where an agent would; sometimes delivered twice, or repeated under a new id."""
    chance = desk.around.chance
    if item.tool == "pay" and chance.fires(Fault.KEY_REUSED):
        item = Item(kind="call", tool="pay", args={**item.args, "amount": 1 + chance.below(5)}, round_id=item.round_id)
    for attempt in range(TRIES_MAX):
        over = yield from _once(desk, item, call_id if attempt < TRIES_MAX - 1 else f"{call_id}-again")
        if over:
            break
        yield from perform(Nap(ticks=1 + chance.below(NAP_TICKS)))
    if chance.fires(Fault.DUPLICATE_DELIVERY):
        yield from _once(desk, item, call_id)
    if chance.fires(Fault.REPEATED_CALL):
        yield from _once(desk, item, f"{call_id}-more")


def _once(desk: _Desk, item: Item, call_id: str) -> Flow[bool]:
    """Propose a call once; gives whether it needs no other try."""
    try:
        result = yield from guarded_call(_request(desk, item, call_id))
    except OutcomeUnknownError:
        return bool(desk.around.chance.below(2))
    except NotAppliedError:
        return bool(desk.around.chance.below(2))
    except (StoreError, SimulatedToolError, OSError, ValueError):
        return False
    if result.replayed and result.operation_id is not None:
        yield from perform(Told(operation_id=result.operation_id, value=result.value))
    return not _is_put_off(result)


def _is_put_off(result: ToolResult[object]) -> bool:
    return result.reason in (Reason.IN_PROGRESS, Reason.NOT_BEFORE)


def _request(desk: _Desk, item: Item, call_id: str) -> CallRequest:
    seat, plan, around = desk.seat, desk.plan, desk.around
    tool = desk.policy.tool(item.tool)
    run_key = desk.opened.run_key
    proposal = propose(
        ToolCall(tool=item.tool, args=item.args, call_id=call_id, round_id=item.round_id), tool, run_key=run_key,
        store_key=around.store_key, scope_value=plan.run_id if tool.key_scope == "run" else "",
    )  # fmt: skip
    return CallRequest(
        run_id=plan.run_id, policy=desk.policy, tool=tool, proposal=proposal,
        operation_id=_operation_id(proposal, plan.run_id, around.store_key), owner_id=seat.owner_id,
        run_key=run_key, call=around.tool(tool, item.tool), now_us=seat.now_us,
    )  # fmt: skip


def _turn(desk: _Desk, call_id: str) -> Flow[None]:
    """One model call: hold the worst case, ask, post what it used."""
    seat, plan, chance = desk.seat, desk.plan, desk.around.chance
    call_id = f"turn-{seat.owner_id}-{call_id}"
    bound = chance.between(100, 900)
    proposal = TurnProposal(
        call_id=call_id, model="simulated", tokens_bound=bound, nanos_bound=bound * NANOS_A_TOKEN
    )
    try:
        reserved: StepAnswer = yield from perform(
            Transact(step=ReserveTurn(run_id=plan.run_id, now_us=seat.now_us(), policy=desk.policy, proposal=proposal))
        )
    except StoreError:
        return
    if reserved.verdict.action is not Action.EXECUTE:
        return
    fault: str | None = None
    cancelled: SimulatedCancel | None = None
    try:
        usage = yield from perform(CallModel(run_id=plan.run_id, call_id=call_id, tokens_bound=bound))
    except ProviderError as error:
        fault = error.fault
        usage = Usage() if error.fault == "rate_limit" else Usage(input_tokens=bound)
    except SimulatedCancel as signal:
        cancelled, fault, usage = signal, "cancelled", Usage(input_tokens=bound)
    try:
        yield from perform(
            Transact(
                step=SettleTurn(
                    run_id=plan.run_id, now_us=seat.now_us(), call_id=call_id, usage=usage,
                    spend_nanos=usage.total_tokens * NANOS_A_TOKEN, model="simulated", fault=fault,
                )
            )
        )  # fmt: skip
    except StoreError:
        if cancelled is None:
            return
    if cancelled is not None:
        raise cancelled


# -- Operators


def recover(run_id: str, now_us: Callable[[], int], around: Surroundings) -> Flow[None]:
    """What looking at a run does: its dead workers' work is marked."""
    known = yield from perform(LookAt(run_id=run_id))
    if known is None:
        return
    dead = frozenset(owner for owner in known.owners if around.is_dead(owner))
    if dead and known.state in (RunState.RUNNING, RunState.FROZEN):
        yield from perform(Transact(step=RecoverRun(run_id=run_id, now_us=now_us(), dead_owners=dead)))


def order(kind: str, run_ids: tuple[str, ...], now_us: Callable[[], int], around: Surroundings) -> Flow[None]:
    """One operator's order to its end. A store that fails leaves it half done, as it would a real operator."""
    chance = around.chance
    run_id = chance.pick(list(run_ids))
    try:
        match kind:
            case "stop":
                yield from _end(run_id, now_us, Reason.OPERATOR_CANCELLED_LOOP, "stop")
            case "kill":
                yield from _kill(run_ids, now_us, around)
            case "deny":
                tool = chance.pick(["pay", "mail", "look", "sh*"])
                yield from perform(PutOrder(control=_control(around, "deny", now_us, tool=tool)))
                yield from perform(Nap(ticks=chance.between(10, 80)))
                yield from perform(LiftOrders(kind="deny"))
            case "freeze":
                yield from _freeze(run_id if chance.below(2) else None, run_ids, now_us, around)
            case "resume":
                yield from _resume(run_id, now_us)
            case _:
                yield from recover(run_id, now_us, around)
    except StoreError:
        return


def _control(
    around: Surroundings, kind: str, now_us: Callable[[], int], *, run_id: str | None = None, tool: str | None = None,
    label: str | None = None,
) -> ControlRecord:  # fmt: skip
    return ControlRecord(
        control_id=around.new_id(), kind=kind, run_id=run_id, tool=tool, label=label, reason="drill",
        created_at_us=now_us(),
    )


def _end(run_id: str, now_us: Callable[[], int], reason: Reason, guard: str) -> Flow[None]:
    known = yield from perform(LookAt(run_id=run_id))
    if known is not None:
        yield from perform(Transact(step=EndRun(run_id=run_id, now_us=now_us(), reason=reason, guard=guard)))


def _kill(run_ids: tuple[str, ...], now_us: Callable[[], int], around: Surroundings) -> Flow[None]:
    label = around.chance.pick([None, "team=red"])
    yield from perform(PutOrder(control=_control(around, "kill", now_us, label=label)))
    for run_id in run_ids:
        known = yield from perform(LookAt(run_id=run_id))
        if known is None or known.state not in (RunState.RUNNING, RunState.FROZEN):
            continue
        if label is None or ("team", "red") in known.labels:
            yield from perform(
                Transact(step=EndRun(run_id=run_id, now_us=now_us(), reason=Reason.KILL_SWITCH, guard="kill"))
            )
    yield from perform(Nap(ticks=around.chance.between(5, 60)))
    yield from perform(LiftOrders(kind="kill"))


def _freeze(
    run_id: str | None, run_ids: tuple[str, ...], now_us: Callable[[], int], around: Surroundings
) -> Flow[None]:
    chosen = run_ids if run_id is None else (run_id,)
    if run_id is not None and (yield from perform(LookAt(run_id=run_id))) is None:
        return
    yield from perform(PutOrder(control=_control(around, "freeze", now_us, run_id=run_id)))
    for frozen in (True, False):
        for found in chosen:
            known = yield from perform(LookAt(run_id=found))
            if known is not None and known.state in (RunState.RUNNING, RunState.FROZEN):
                yield from perform(Transact(step=FreezeRun(run_id=found, now_us=now_us(), frozen=frozen)))
        if frozen:
            yield from perform(Nap(ticks=around.chance.between(10, 80)))
            yield from perform(LiftOrders(kind="freeze"))


def _resume(run_id: str, now_us: Callable[[], int]) -> Flow[None]:
    known = yield from perform(LookAt(run_id=run_id))
    if known is None or known.envelope is None:
        return
    change = "strategy"
    limit = LIMIT_OF_REASON.get(known.envelope.terminal_reason)
    if limit is not None:
        change = f"limit:{limit}={2 * (getattr(known.limits, limit) or 0) + 1}"
    try:
        yield from perform(Transact(step=ResumeRun(run_id=run_id, now_us=now_us(), change=change, reason="drill")))
    except ResumeRefusedError:
        return


def tool_effects(tool: ToolPolicy) -> bool:
    """Whether a tool may have an effect on its target."""
    return tool.effect in (Effect.WRITE, Effect.UNKNOWN)
