"""The work of one transaction, the same for every store: a step, a run's start, an order, a spec.

Each function takes an open `Workspace` and one request. It raises before it has collected anything, or the store that
called it undoes the transaction: nothing of a failed request is ever written.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final, TypeVar

from endstop.core import steps_life
from endstop.core.canonical import digest
from endstop.core.entries import entry_bytes, safe_name
from endstop.core.steps_life import Joined, JoinRun, NewRun
from endstop.errors import RunJoinError, RunNotFoundError, StoreUnavailableError, UsageError
from endstop.store.port import RunOpened, StoredSpec
from endstop.store.rows import CONTROL_KINDS, control_fields
from endstop.store.workspace import GLOBAL_RUN, LiveRun

if TYPE_CHECKING:
    from endstop.core.records import ControlRecord, OperationRecord, RunTransaction
    from endstop.core.steps import Step
    from endstop.store.workspace import Workspace

__all__ = [
    "LEDGER_FORMAT", "OpenRequest", "Withdrawal", "add_control", "first_entry", "open_run", "run_step", "save_spec",
    "withdraw_controls",
]  # fmt: skip

A = TypeVar("A")
LEDGER_FORMAT: Final = 1
CONTROLS_MAX: Final = 1_000


def first_entry(ledger: str, now_us: int) -> bytes:
    """The entry that opens a ledger, at position 0."""
    return entry_bytes(
        "ledger_open", ledger=ledger, run_id="", seq=0, ts_us=now_us, actor="endstop", policy="", generation=0,
        fields={"format": LEDGER_FORMAT, "created": now_us},
    )  # fmt: skip


def run_step(work: Workspace, step: Step[A]) -> A:
    """Apply `step` to its run. Raises RunNotFoundError, StoreUnavailableError, or the step's own error."""
    # 1. The run: its own, or the root of a child.
    run = _run_of(work, step.run_id)
    txn = run.txn
    # 2. What stands now: orders, and the operation that the step names.
    work.see_controls(run)
    operation_key = step.operation_key
    operation = txn.operation = None if operation_key is None else work.operation(operation_key)
    # 3. The step, on a working copy that nobody keeps when it fails.
    try:
        answer = step.apply(txn)
        if txn.operations:
            _check_fences(work, txn, operation_key, operation)
        if txn.children:
            _check_children(work, txn)
    except BaseException:
        work.forget(run)
        raise
    # 4. What it left.
    work.save(run, step.now_us)
    return answer


def _run_of(work: Workspace, run_id: str) -> LiveRun:
    run = work.live(run_id)
    if run is None:
        child = work.child(run_id)
        if child is not None:
            run = work.live(child.root_run_id)
    if run is None:
        msg = f"no run {run_id[:80]} in this store"
        raise RunNotFoundError(msg)
    return run


def _check_fences(work: Workspace, txn: RunTransaction, known_id: str | None, known: OperationRecord | None) -> None:
    """Every operation is written over exactly the version that was read; `known` is what the step was given."""
    fences: dict[str, int] = {}
    for record, expected in txn.operations:
        fence = fences.get(record.operation_id)
        if fence is None:
            stored = known if record.operation_id == known_id else work.operation(record.operation_id)
            fence = 0 if stored is None else stored.fence
        if fence != expected:
            msg = (
                f"operation {record.operation_id} of run {txn.run_id} has another owner by now "
                f"(fence {fence}, not {expected}): nothing was written, read it again"
            )
            raise StoreUnavailableError(msg)
        fences[record.operation_id] = record.fence


def _check_children(work: Workspace, txn: RunTransaction) -> None:
    fresh = []
    for child in txn.children:
        known = work.child(child.run_id)
        if known is not None and known.root_run_id == child.root_run_id:
            continue  # started again after a crash: it keeps its first record
        if known is not None or work.live(child.run_id) is not None:
            msg = f"child run {child.run_id[:80]} cannot start: the id is taken by another run"
            raise UsageError(msg)
        fresh.append(child)
    txn.children = fresh


# -- Runs


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenRequest:
    """What `open_run` is asked for."""

    new: NewRun
    use_stored_spec: bool


def open_run(work: Workspace, request: OpenRequest) -> RunOpened:
    """Start the run or join it. Raises RunJoinError when the run has another spec or policy."""
    new = request.new
    if work.live(new.run_id) is not None or work.child(new.run_id) is not None:
        return _join(work, request)
    stored = work.spec(new.run_id)
    if request.use_stored_spec:
        if stored is None:
            msg = f"no spec was written down for run {new.run_id[:80]}: write one first, or pass one"
            raise RunNotFoundError(msg)
        new = replace(new, spec=stored.spec)
    elif stored is not None and stored.spec != new.spec:
        msg = f"run {new.run_id} has another spec written down: start it with that one, or start another run"
        raise RunJoinError(msg)
    if not new.run_id or new.run_id == GLOBAL_RUN:
        msg = "a run needs an id of its own"
        raise UsageError(msg)
    txn = steps_life.open_run(new, ledger=work.ledger)
    run = LiveRun(
        txn, key=None, labels=new.labels, spec=new.spec, run_key=new.run_key, created_at_us=new.now_us, saved_seq=0
    )
    work.hold(run)
    work.save(run, new.now_us)
    joined = Joined(
        state=txn.state, generation=txn.generation, envelope=None, limits=txn.limits,
        progress_version=txn.evidence.progress_version, checkpoint=None,
    )  # fmt: skip
    return RunOpened(created=True, run_key=new.run_key, spec=new.spec, joined=joined)


def _join(work: Workspace, request: OpenRequest) -> RunOpened:
    new = request.new
    run = _run_of(work, new.run_id)
    if run.run_key is None:
        msg = f"run {run.txn.run_id} cannot be joined: the key of its digests was destroyed"
        raise RunJoinError(msg)
    joined = run_step(
        work,
        JoinRun(
            run_id=new.run_id, now_us=new.now_us, spec=None if request.use_stored_spec else new.spec,
            policy_digest=new.policy_digest, owner_id=new.owner_id,
        ),
    )  # fmt: skip
    return RunOpened(created=False, run_key=run.run_key, spec=run.spec, joined=joined)


def save_spec(work: Workspace, stored: StoredSpec) -> None:
    """Keep a spec. Raises UsageError when the id has another one; the same one again changes nothing."""
    run = work.live(stored.run_id)
    known = run.spec if run is not None else None
    if known is None:
        earlier = work.spec(stored.run_id)
        known = None if earlier is None else earlier.spec
    if known is None and work.child(stored.run_id) is None:
        work.save_spec(stored)
    elif known != stored.spec:
        msg = f"run {stored.run_id[:80]} has another spec already: a spec never changes, take another run id"
        raise UsageError(msg)


# -- Orders


def add_control(work: Workspace, control: ControlRecord) -> ControlRecord:
    """Put an order in force and note it: in its run's own sequence, or among those that concern no single run.

    Raises RunNotFoundError for an order about a run that is not here, UsageError for an unknown kind, a taken id, or
    one order too many.
    """
    if control.kind not in CONTROL_KINDS:
        msg = f"an order is one of {', '.join(CONTROL_KINDS)}, not {control.kind[:40]!r}"
        raise UsageError(msg)
    standing = work.standing()
    if len(standing) >= CONTROLS_MAX:
        msg = f"{CONTROLS_MAX} orders are in force already: withdraw some first"
        raise UsageError(msg)
    if any(item.control_id == control.control_id for item in standing) or work.has_control(control.control_id):
        msg = f"an order with the id {control.control_id[:80]} was given before: take another id"
        raise UsageError(msg)
    if control.run_id is not None:
        # A child has no state of its own: an order about it is one about its root.
        control = replace(control, run_id=_run_of(work, control.run_id).txn.run_id)
    _note_order(work, control, control.kind, control.reason, control.actor, control.created_at_us)
    work.add_control(control)
    return control


@dataclass(frozen=True, slots=True, kw_only=True)
class Withdrawal:
    """Which orders are withdrawn, by whom and why. Parts that are None do not choose."""

    kind: str
    run_id: str | None
    label: str | None
    tool: str | None
    control_id: str | None
    actor: str
    reason: str
    now_us: int


def withdraw_controls(work: Workspace, asked: Withdrawal) -> int:
    """Withdraw every order in force that fits; each gets its entry. Gives how many there were."""
    run_id = asked.run_id if asked.run_id is None else _run_of(work, asked.run_id).txn.run_id
    chosen = [
        control
        for control in work.standing()
        if control.kind == asked.kind
        and (run_id is None or control.run_id == run_id)
        and (asked.label is None or control.label == asked.label)
        and (asked.tool is None or control.tool == asked.tool)
        and (asked.control_id is None or control.control_id == asked.control_id)
    ]
    for control in chosen:
        _note_order(work, control, f"un{control.kind}", asked.reason, asked.actor, asked.now_us)
        work.withdraw_control(control, asked.now_us)
    return len(chosen)


def _note_order(work: Workspace, control: ControlRecord, order: str, reason: str, actor: str, now_us: int) -> None:
    why = digest(reason.encode("utf-8", "replace")) if reason else ""
    fields = control_fields(control, order=order, why=why)
    run = None if control.run_id is None else work.live(control.run_id)
    if run is None:
        work.append("control", now_us, fields, actor=safe_name(actor))
    else:
        run.txn.append("control", now_us, fields, actor=safe_name(actor))
        work.save(run, now_us)
