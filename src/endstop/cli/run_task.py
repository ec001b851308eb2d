"""What `endstop run` does: read the task, settle which run it is, let the loop work, report the end."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from contextlib import redirect_stdout
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from endstop.cli.claim import Claim
from endstop.cli.codes import ExitCode
from endstop.cli.ending import ending_facts, exit_code_of_run
from endstop.cli.figures import usage
from endstop.cli.frozen import refuse_frozen
from endstop.cli.run_names import find_run
from endstop.cli.session import can_ask, needs_terminal
from endstop.cli.spec import SpecWords, ask_spec, run_id_fault
from endstop.core.codec import envelope_json, run_json
from endstop.core.reasons import ENDINGS, Reason, RunState
from endstop.errors import InvariantError, ModelNotFoundError, RunStopped, TaskInvalidError

if TYPE_CHECKING:
    from pathlib import Path

    from endstop.cli.operator_stop import Cause
    from endstop.cli.session import Session
    from endstop.core.envelope import Envelope
    from endstop.core.model import Spec
    from endstop.core.records import RunRecord
    from endstop.loop.agent import AgentLoop, LoopEvent, LoopResult
    from endstop.loop.model import ModelClient
    from endstop.runtime.guard import Guard
    from endstop.runtime.task_file import ModelChoice, TaskFile

__all__ = ["RunOptions", "carry_out"]

_ENDED: Final = (RunState.STOPPED, RunState.COMPLETE, RunState.PAUSED)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOptions:
    """How a task is carried out, beside what its file says."""

    spec_of: str | None = None
    run_id: str | None = None
    timeout_s: int | None = None
    model: str | None = None
    labels: Mapping[str, str] = field(default_factory=dict)
    quiet: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class _Plan:
    """Which run it is, and with which spec; `spec` None takes the stored one."""

    run_id: str
    spec: Spec | None
    known: RunRecord | None


def carry_out(session: Session, path: Path, options: RunOptions) -> int:
    """Carry out the task in `path`; gives the exit code."""
    from endstop.runtime.task_file import load_task

    # 1. Everything that can be wrong with the files, before a store is made.
    task = load_task(path, environ=os.environ)
    with redirect_stdout(sys.stderr):
        tools = {name: tool.resolve() for name, tool in task.tools.items()}
    client = _open_model(task.model, options.model)
    guard = session.guard(task.policy, makes_store=True)
    # 2. Which run it is. From here on no other process starts it.
    run_id, spec = _named(session, guard, task, options)
    with Claim(guard.store.owners_dir, run_id) as claim:
        plan = _plan(guard, run_id, spec, task, options)
        if plan.known is not None and (not claim.is_ours or _is_taken(plan.known)):
            return _not_started(session, plan.known)
        if not claim.is_ours:
            return _elsewhere(session, run_id)
        if plan.known is not None:
            refuse_frozen(guard, plan.known)
            session.output.note(f"endstop: run {run_id} goes on ({plan.known.state})")
        # 3. The loop, with this process's signals as operator stops.
        from endstop.loop.agent import AgentLoop

        loop = AgentLoop(
            guard, model=client, tools=tools, max_output_tokens=task.model.max_output_tokens,
            observer=_observer(session, options),
        )  # fmt: skip
        return _work(session, guard, loop, task, plan, options)


# -- Before


def _open_model(choice: ModelChoice, other: str | None) -> ModelClient:
    """The task's model, or `other` in its place. Raises ModelNotFoundError or TaskInvalidError."""
    from pathlib import Path

    from endstop.loop.model import TIMEOUT_MS, open_model

    if choice.options:
        msg = "the task's [model] options are not used by this version: take them out, or wrap the model in code"
        raise TaskInvalidError(msg)
    key = None
    if choice.api_key_env is not None and other is None:
        key = os.environ.get(choice.api_key_env)
        if not key:
            msg = f"the task takes the model's key from {choice.api_key_env}, which is not set"
            raise ModelNotFoundError(msg)
    return open_model(
        other or choice.name, base_dir=Path.cwd(), base_url=None if other else choice.base_url, api_key=key,
        max_output_tokens=choice.max_output_tokens, timeout_ms=choice.timeout_ms or TIMEOUT_MS,
    )  # fmt: skip


def _named(session: Session, guard: Guard, task: TaskFile, options: RunOptions) -> tuple[str, Spec | None]:
    """The run's id, and the spec that --spec names."""
    from endstop.runtime.task_file import expand_run_key

    spec, stored_for = None, None
    if options.spec_of is not None:
        stored_for = options.spec_of
        if guard.store.spec(stored_for).result() is None:
            stored_for = find_run(guard, stored_for).root_run_id
        spec = guard.spec(stored_for)
    if options.run_id is not None:
        return options.run_id, spec
    if task.run_key is not None:
        run_id = expand_run_key(task.run_key, session.clock.now_us())
        fault = run_id_fault(run_id)
        if fault is not None:
            msg = f"{task.path}: run.key gives {run_id!r}: {fault}"
            raise TaskInvalidError(msg)
        return run_id, spec
    if stored_for is not None:
        # The spec was written down for a run: it is that run. One that has ended lends its spec to a new run.
        known = guard.store.run(stored_for).result()
        if known is None or known.state not in (RunState.STOPPED, RunState.COMPLETE):
            return stored_for, spec
        session.output.note(f"endstop: run {stored_for} has ended; a new run takes its spec")
    return guard.ids.new_id(), spec


def _plan(guard: Guard, run_id: str, spec: Spec | None, task: TaskFile, options: RunOptions) -> _Plan:
    """Look whether the run exists; settle its spec. Raises UsageError when there is none and nobody to ask."""
    known = None if guard.store.run(run_id).result() is None else guard.show(run_id)
    if spec is None and task.spec is not None:
        spec = task.spec
    if spec is None and known is None and guard.store.spec(run_id).result() is None:
        if not can_ask():
            raise needs_terminal("--spec RUN", f"the task {options.run_id or task.path.name} has no spec")
        spec = ask_spec(SpecWords())
    return _Plan(run_id=run_id, spec=spec, known=known)


def _is_taken(known: RunRecord) -> bool:
    """Whether a run has ended, or somebody alive is inside. (`guard.show` has taken dead workers out.)"""
    ended = known.state in _ENDED
    return ended or (known.state in (RunState.RUNNING, RunState.FROZEN) and bool(known.owners))


def _not_started(session: Session, known: RunRecord) -> int:
    """Say what the run is; gives its exit code, 0 for one that is at work."""
    code = exit_code_of_run(known) if known.state in _ENDED else None
    if known.state in _ENDED:
        session.output.note(f"endstop: run {known.run_id} has ended before; nothing was started")
    else:
        session.output.note(f"endstop: run {known.run_id} is at work elsewhere ({known.state}); nothing was started")
    _report(session, known, known.envelope, known.output, code or 0, started=False)
    return code or ExitCode.DONE


def _elsewhere(session: Session, run_id: str) -> int:
    """Another process is about to start this run, and has not written it yet."""
    session.output.note(f"endstop: run {run_id} is being started by another process; nothing was started")
    if session.output.as_json:
        body = {"run_id": run_id, "success": False, "started": False, "state": None, "exit_code": 0, "run": None}
        session.output.json(body)
    return ExitCode.DONE


# -- During


def _observer(session: Session, options: RunOptions) -> Callable[[LoopEvent], None] | None:
    def tell(event: LoopEvent) -> None:
        # What the ledger does not hold: that the loop waits for a provider or for a tool's own back-off.
        if event.kind == "wait" and event.wait_ms is not None:
            session.output.note(f"endstop: waits {event.wait_ms} ms{f' for {event.tool}' if event.tool else ''}")
        elif event.kind == "fault" and event.text:
            session.output.note(f"endstop: the model failed: {event.text[:300]}")

    return None if options.quiet else tell


def _work(session: Session, guard: Guard, loop: AgentLoop, task: TaskFile, plan: _Plan, options: RunOptions) -> int:
    from endstop.cli.operator_stop import Supervisor
    from endstop.cli.progress import progress_on_stderr

    def work() -> LoopResult:
        return loop.run(task.task, plan.spec, run_id=plan.run_id, labels={**task.labels, **options.labels})

    progress = progress_on_stderr(session.output, guard.store, plan.run_id, quiet=options.quiet)
    supervisor = Supervisor(session, guard, plan.run_id, timeout_s=options.timeout_s)
    try:
        # Stdout is for the report alone: what tools print is none of it.
        with progress, redirect_stdout(sys.stderr):
            result = supervisor.supervise(work, progress.look)
    except RunStopped as stopped:
        # It ended between the look and the start, or an order forbids it.
        return _ended(session, guard, stopped.envelope, None, supervisor.cause)
    if result.terminal_reason is Reason.LEDGER_UNAVAILABLE and result.envelope is not None:
        return _unrecorded(session, result.envelope)
    return _ended(session, guard, result.envelope, result, supervisor.cause)


# -- After


def _ended(
    session: Session, guard: Guard, envelope: Envelope | None, result: LoopResult | None, cause: Cause | None
) -> int:
    """Report the end and give the exit code: that of the signal or time-out where it ended the run, else the run's."""
    if envelope is None:
        msg = "the loop came back without an end"
        raise InvariantError(msg)
    record = guard.show(envelope.run_id)
    code = ENDINGS[envelope.terminal_reason].exit_code
    if cause is not None and envelope.terminal_reason is Reason.OPERATOR_CANCELLED_LOOP:
        code = cause.exit_code
    text = record.output if result is None else result.output
    _report(session, record, envelope, text, code, started=True)
    return code


def _unrecorded(session: Session, envelope: Envelope) -> int:
    """The store failed in mid-run: the envelope exists only here."""
    code = ENDINGS[envelope.terminal_reason].exit_code
    session.output.note(f"endstop: {envelope.terminal_reason}: {envelope.message}")
    if session.output.as_json:
        session.output.json(
            {
                "run_id": envelope.run_id, "success": False, "started": True,
                "terminal_reason": envelope.terminal_reason.value, "exit_code": code,
                "envelope": envelope_json(envelope), "run": None,
            }
        )  # fmt: skip
    return code


def _report(
    session: Session, run: RunRecord, envelope: Envelope | None, text: str | None, code: int, *, started: bool
) -> None:
    output, counters = session.output, run.counters
    reason = None if envelope is None else envelope.terminal_reason
    if output.as_json:
        output.json(
            {
                "run_id": run.run_id, "success": reason is Reason.COMPLETE, "started": started,
                "state": run.state.value, "terminal_reason": None if reason is None else reason.value,
                "exit_code": int(code), "output": text, "turns": counters.turns,
                "total_tokens": counters.input_tokens + counters.output_tokens, "spend_nanos": counters.spend_nanos,
                "envelope": None if envelope is None else envelope_json(envelope), "run": run_json(run),
            }
        )  # fmt: skip
        return
    facts = [("run", run.run_id), ("state", run.state.value)]
    facts += [(name, shown) for name, _, _, shown in usage(counters, run.limits)]
    if envelope is not None:
        facts += [fact for fact in ending_facts(run, envelope) if fact[0] != "had run"]
    if text:
        facts.append(("output", text))
    output.facts(facts)
