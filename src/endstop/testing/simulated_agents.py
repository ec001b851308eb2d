"""The workers of a simulation: each runs an agent's plan through the guard.

A worker is a generator of commands, like the pipeline that it runs; the scheduler steps them all, in an order of its
own. What `endstop.runtime` does around a pipeline (entering and leaving a run, the two steps of a model call) is done
here step by step, so that a fault may fall between any two of them.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from endstop.core.canonical import digest_of
from endstop.core.commands import Flow, Transact, perform
from endstop.core.events import Proposal, TurnProposal
from endstop.core.model import Spec, ToolCall, Usage
from endstop.core.pipeline import CallRequest, guarded_call, halted
from endstop.core.policy import Policy, ToolPolicy
from endstop.core.propose import propose
from endstop.core.reasons import Action, Change, Effect, Reason, RunState
from endstop.core.steps_life import (
    CompleteRun,
    LeaveRun,
    NewRun,
    NoteUserInput,
    RecoverRun,
    SaveCheckpoint,
    SeeOrders,
)  # fmt: skip
from endstop.core.steps_turn import ReserveChild, ReserveHandoff, ReserveTurn, SettleTurn, StepAnswer
from endstop.errors import (
    NotAppliedError,
    OutcomeUnknownError,
    ProviderError,
    RunHalted,
    RunJoinError,
    StoreError,
)
from endstop.runtime.run import operation_id_of
from endstop.testing.simulated_commands import CallModel, Fork, HasEnded, LookAt, Nap, OpenRun, Told
from endstop.testing.simulated_faults import Chance, Fault
from endstop.testing.simulated_world import SimulatedCancel, SimulatedToolError

if TYPE_CHECKING:
    from endstop.core.model import ToolResult
    from endstop.store.port import RunOpened

__all__ = ["NANOS_A_TOKEN", "Item", "RunPlan", "Seat", "Surroundings", "live", "tool_effects"]

TRIES_MAX: Final = 3
ENTRIES_MAX: Final = 6
_OVER: Final = (RunState.STOPPED, RunState.COMPLETE, RunState.PAUSED)
NAP_TICKS: Final = 6
NANOS_A_TOKEN: Final = 3
DEPTH_TRIED_MAX: Final = 5
SPEC: Final = Spec(what_it_does="Pays orders.", what_it_does_not="Pays twice.", done_looks_like="All are paid.")


# -- Plans


@dataclass(frozen=True, slots=True, kw_only=True)
class Item:
    """One thing that an agent does: `kind` is call, turn, handoff, child, checkpoint or user_input."""

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
    if opened.joined.envelope is not None and opened.joined.state in _OVER:
        return
    desk = _Desk(seat=seat, plan=plan, around=around, opened=opened)
    helper: str | None = None
    if around.chance.fires(Fault.PARALLEL_THREADS):
        helper = yield from perform(Fork(flow=_help(desk)))
    try:
        yield from _work(desk)
        yield from _joined(helper)
        if plan.completes:
            yield from _complete(desk)
    except (RunHalted, SimulatedCancel):
        yield from _joined(helper)
    yield from _leave(seat, plan)


def _help(desk: _Desk) -> Flow[None]:
    """A second thread of the same worker: the same calls under the same ids."""
    try:
        yield from _work(desk)
    except (RunHalted, SimulatedCancel):
        return


def _joined(helper: str | None) -> Flow[None]:
    while helper is not None and not (yield from perform(HasEnded(name=helper))):
        yield from perform(Nap(ticks=NAP_TICKS))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Desk:
    seat: Seat
    plan: RunPlan
    around: Surroundings
    opened: RunOpened
    attempts: Iterator[int] = field(default_factory=lambda: itertools.count(1))

    @property
    def policy(self) -> Policy:
        return self.around.policy.under(self.opened.joined.limits)


def _enter(seat: Seat, plan: RunPlan, around: Surroundings) -> Flow[RunOpened]:
    known = yield from perform(LookAt(run_id=plan.run_id))
    if known is not None:
        dead = frozenset(owner for owner in known.owners if around.is_dead(owner))
        if dead:
            yield from perform(Transact(step=RecoverRun(run_id=plan.run_id, now_us=seat.now_us(), dead_owners=dead)))
    opened = yield from perform(
        OpenRun(
            new=NewRun(
                run_id=plan.run_id, spec=SPEC, policy_digest=around.policy.digest(), limits=around.policy.limits,
                agent="main", labels=plan.labels, owner_id=seat.owner_id, now_us=seat.now_us(),
                run_key=around.new_key(),
            )
        )
    )  # fmt: skip
    yield from perform(Transact(step=SeeOrders(run_id=plan.run_id, now_us=seat.now_us())))
    return opened


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
                yield from _turn(desk)
            case "handoff" | "child":
                yield from _pass_on(desk, item.kind)
            case "user_input":
                yield from _tried(lambda: NoteUserInput(run_id=plan.run_id, now_us=seat.now_us()))
            case _:
                data = f'{{"at":{number}}}'
                yield from _tried(lambda: SaveCheckpoint(run_id=plan.run_id, now_us=seat.now_us(), data=data))  # noqa: B023  # called at once


def _complete(desk: _Desk) -> Flow[None]:
    seat, run_id, generation = desk.seat, desk.plan.run_id, desk.opened.joined.generation
    yield from _tried(lambda: CompleteRun(run_id=run_id, now_us=seat.now_us(), output="done", generation=generation))


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
        change = Change.ARGS if attempt and chance.below(2) else None
        named = call_id if attempt < TRIES_MAX - 1 else f"{call_id}-again"
        over = yield from _once(desk, item, named, change)
        if over:
            break
        yield from perform(Nap(ticks=1 + chance.below(NAP_TICKS)))
    if chance.fires(Fault.DUPLICATE_DELIVERY):
        yield from _once(desk, item, call_id)
    if chance.fires(Fault.REPEATED_CALL):
        yield from _once(desk, item, f"{call_id}-more")


def _once(desk: _Desk, item: Item, call_id: str, change: Change | None = None) -> Flow[bool]:
    """Propose a call once; gives whether it needs no other try."""
    try:
        result = yield from guarded_call(_request(desk, item, call_id, change))
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


def _request(desk: _Desk, item: Item, call_id: str, change: Change | None) -> CallRequest:
    seat, plan, around = desk.seat, desk.plan, desk.around
    tool = desk.policy.tool(item.tool)
    run_key = desk.opened.run_key
    proposal = propose(
        ToolCall(tool=item.tool, args=item.args, call_id=call_id, round_id=item.round_id, change=change), tool,
        run_key=run_key, store_key=around.store_key, scope_value=plan.run_id if tool.key_scope == "run" else "",
    )  # fmt: skip
    return CallRequest(
        run_id=plan.run_id, policy=desk.policy, tool=tool, proposal=proposal,
        operation_id=operation_id_of(proposal, plan.run_id, around.store_key), owner_id=seat.owner_id,
        attempt_id=str(next(desk.attempts)), run_key=run_key, call=around.tool(tool, item.tool), now_us=seat.now_us,
        generation=desk.opened.joined.generation,
    )  # fmt: skip


def _turn(desk: _Desk) -> Flow[None]:
    """One model call: hold the worst case, ask, post what it used."""
    seat, plan, around, chance = desk.seat, desk.plan, desk.around, desk.around.chance
    call_id = f"turn-{around.new_id()}"
    bound = chance.between(100, 900)
    proposal = TurnProposal(call_id=call_id, model="simulated", tokens_bound=bound, nanos_bound=bound * NANOS_A_TOKEN)
    try:
        reserved: StepAnswer = yield from perform(
            Transact(
                step=ReserveTurn(
                    run_id=plan.run_id, now_us=seat.now_us(), policy=desk.policy, proposal=proposal,
                    generation=desk.opened.joined.generation,
                )
            )
        )  # fmt: skip
    except StoreError:
        return
    if reserved.verdict.action is Action.STOP:
        raise halted(reserved.envelope)
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


def _pass_on(desk: _Desk, kind: str) -> Flow[None]:
    """Hand the run to another agent, or start one below."""
    seat, plan, around, policy = desk.seat, desk.plan, desk.around, desk.policy
    generation = desk.opened.joined.generation
    proposal = Proposal(
        tool=f"{kind}:helper", effect=Effect.UNKNOWN, fingerprint=digest_of(kind, plan.run_id, around.new_id()),
        call_id=f"{kind}-{around.new_id()}",
    )  # fmt: skip
    step: ReserveHandoff | ReserveChild = ReserveHandoff(
        run_id=plan.run_id, now_us=seat.now_us(), policy=policy, proposal=proposal, generation=generation
    )
    if kind == "child":
        step = ReserveChild(
            run_id=plan.run_id, now_us=seat.now_us(), policy=policy, proposal=proposal, generation=generation,
            child_run_id=around.new_id(), parent_run_id=plan.run_id, depth=around.chance.between(1, DEPTH_TRIED_MAX),
        )  # fmt: skip
    try:
        answer: StepAnswer = yield from perform(Transact(step=step))
    except StoreError:
        return
    if answer.verdict.action is Action.STOP:
        raise halted(answer.envelope)


def tool_effects(tool: ToolPolicy) -> bool:
    """Whether a tool may have an effect on its target."""
    return tool.effect in (Effect.WRITE, Effect.UNKNOWN)
