"""A run's end in words: why, at which figure, what had run, and what may follow."""

from __future__ import annotations

import shlex
from dataclasses import asdict
from typing import TYPE_CHECKING, Final

from endstop.cli.figures import duration, money, seconds_time, usage
from endstop.core.reasons import ENDINGS, LIMIT_OF_REASON, NextAction, Reason, RunState

if TYPE_CHECKING:
    from endstop.core.envelope import CallNote, Envelope
    from endstop.core.model import Detail
    from endstop.core.policy import Limits
    from endstop.core.records import RunRecord

__all__ = ["ending_facts", "exit_code_of_run", "next_steps", "run_facts"]

OPERATIONS_SHOWN_MAX: Final = 20
_RESUME: Final = "endstop resume {run} --change {change} --reason {reason}"
_CHANGE_OF: Final[dict[Reason, str]] = {
    Reason.PERMISSION_DENIED: "authorisation",
    Reason.POLICY_BLOCKED: "authorisation",
    Reason.HUMAN_REQUIRED: "authorisation",
    Reason.PROVIDER_FAULT: "retry_after",
    Reason.CRASHED: "cursor",
    Reason.LEDGER_UNAVAILABLE: "retry_after",
}


def exit_code_of_run(run: RunRecord) -> int | None:
    """The exit code of a run's end, None while it has none."""
    return None if run.envelope is None else ENDINGS[run.envelope.terminal_reason].exit_code


def run_facts(run: RunRecord) -> list[tuple[str, str]]:
    """What a run is and has used."""
    facts = [
        ("run", run.run_id),
        ("state", f"{run.state} (generation {run.generation})" if run.generation > 1 else str(run.state)),
        ("agent", run.agent),
    ]
    if run.run_id != run.root_run_id:
        facts.append(("root run", run.root_run_id))
    if run.labels:
        facts.append(("labels", ", ".join(f"{name}={value}" for name, value in run.labels)))
    facts += [
        ("does", run.spec.what_it_does),
        ("does not", run.spec.what_it_does_not),
        ("done is", run.spec.done_looks_like),
        ("started", seconds_time(run.created_at_us)),
    ]
    facts += [(name, text) for name, _, _, text in usage(run.counters, run.limits)]
    if run.counters.blocked:
        facts.append(("blocked", f"{run.counters.blocked} calls"))
    if run.progress_version is not None:
        facts.append(("progress", str(run.progress_version)))
    if run.in_flight:
        facts.append(("in flight", "\n".join(f"{tool} ({call_id})" for call_id, tool in run.in_flight)))
    return facts


def ending_facts(run: RunRecord, envelope: Envelope) -> list[tuple[str, str]]:
    """A terminal envelope in words."""
    facts = [
        ("ended", f"{envelope.terminal_reason}, {seconds_time(envelope.occurred_at_us)}"),
        ("why", envelope.message or "no more is known"),
    ]
    if envelope.guard is not None and envelope.terminal_reason is not Reason.COMPLETE:
        facts.append(("guard", envelope.guard))
    met = _limit_text(envelope.detail)
    if met:
        facts.append(("limit", met))
    if envelope.blocked_call is not None:
        facts.append(("refused call", _call_text(envelope.blocked_call)))
    if envelope.after_call is not None:
        facts.append(("after call", _call_text(envelope.after_call)))
    counters = envelope.counters
    tokens = counters.input_tokens + counters.output_tokens
    used = f"{counters.turns} turns, {counters.steps} steps, {tokens} tokens"
    facts.append(("had run", f"{used}, {money(envelope.spend_nanos)}, {duration(counters.elapsed_ms)}"))
    if envelope.operations:
        shown = [f"{item.tool}: {item.state} ({item.operation_id})" for item in envelope.operations]
        more = len(shown) - OPERATIONS_SHOWN_MAX
        del shown[OPERATIONS_SHOWN_MAX:]
        if more > 0:
            shown.append(f"and {more} more: endstop ops {run.run_id}")
        facts.append(("side effects", "\n".join(shown)))
    if envelope.in_doubt:
        facts.append(("in doubt", "\n".join(envelope.in_doubt[:OPERATIONS_SHOWN_MAX])))
    if envelope.last_safe_checkpoint is not None:
        facts.append(("checkpoint", envelope.last_safe_checkpoint))
    following = next_steps(run, envelope)
    if following:
        facts.append(("next", "\n".join(following)))
    return facts


def next_steps(run: RunRecord, envelope: Envelope) -> list[str]:
    """What may follow, as commands."""
    reason = envelope.terminal_reason
    if envelope.next_allowed_action is NextAction.NONE or run.state is RunState.COMPLETE:
        return []
    steps = []
    if envelope.in_doubt:
        steps.append("find out whether each operation in doubt took effect: endstop reconcile")
    elif envelope.next_allowed_action is NextAction.HUMAN_REVIEW:
        steps.append("a person looks at it first, then:")
    if reason is Reason.KILL_SWITCH:
        steps.append("the kill order stays in force until: endstop unkill")
    change = _CHANGE_OF.get(reason, "strategy")
    limit = LIMIT_OF_REASON.get(reason)
    if limit is not None:
        change = f"limit:{limit}={_raised(run.limits, limit)}"
    steps.append(_RESUME.format(run=shlex.quote(run.root_run_id), change=change, reason="'WHAT CHANGED'"))
    steps.append(f"endstop run TASK.toml --run-id {shlex.quote(run.root_run_id)}")
    return steps


def _raised(limits: Limits, name: str) -> int:
    now = asdict(limits).get(name)
    return max(1, now * 2) if isinstance(now, int) else 1


def _limit_text(detail: Detail) -> str:
    parts = []
    if detail.limit_name is not None:
        parts.append(f"{detail.limit_name} = {detail.limit}" if detail.limit is not None else detail.limit_name)
    elif detail.limit is not None:
        parts.append(str(detail.limit))
    if detail.value is not None:
        parts.append(f"met by {detail.value}")
    if detail.period is not None:
        parts.append(f"a cycle of {detail.period} calls")
    if detail.repeats is not None:
        parts.append(f"{detail.repeats} times")
    if detail.error_class is not None:
        parts.append(f"class {detail.error_class}")
    if detail.rule is not None:
        parts.append(f"rule {detail.rule}")
    return ", ".join(parts)


def _call_text(call: CallNote) -> str:
    args = ", ".join(f"{name}: {note}" for name, note in call.args)
    by = "" if call.agent == "main" else f" by {call.agent}"
    return f"{call.tool}({args}){by}, {call.fingerprint}"
