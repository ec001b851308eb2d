"""The loop guards: cycles, the same call, streaks, stalls, rows of one answer and exhausted polls.

Each is a few comparisons on bounded evidence. Those named `_before` judge a proposed call against what was executed
since the last change; `after` judges a result that has been folded.

Cycles are found exactly and at constant cost: `runs[p - 1]` counts how many of the newest symbols equal the one `p`
places before them. The trail then ends in k repeats of a block of length p exactly when that count is at least
`p * (k - 1)`. A trail that is one symbol all along is a repeat, not a cycle.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final

from endstop.core.canonical import digest
from endstop.core.events import GO, Verdict
from endstop.core.evidence import call_symbol, short_name
from endstop.core.ladder import Trip, climb
from endstop.core.model import Detail
from endstop.core.reasons import Action, Effect, ErrorClass, Reason, Status

if TYPE_CHECKING:
    from endstop.core.events import Observation, Proposal
    from endstop.core.evidence import Evidence
    from endstop.core.policy import Limits, Policy, ToolPolicy

__all__ = [
    "ANY_TOOL",
    "LEDGER_GUARD",
    "REFUSED_CLASSES",
    "UNCOUNTED_CLASSES",
    "Trip",
    "after",
    "cycle_before",
    "refusal_keys",
    "refuse",
    "replay_key",
    "same_call_before",
    "streak_key",
    "streaks_of",
]

# Refused before it could run: two in a row are enough.
REFUSED_CLASSES: Final = frozenset({ErrorClass.UNKNOWN_TOOL, ErrorClass.SCHEMA, ErrorClass.DENIED})
# Not the agent's doing, so never a loop.
UNCOUNTED_CLASSES: Final = frozenset(
    {ErrorClass.TIMEOUT, ErrorClass.OUTAGE, ErrorClass.RATE_LIMIT, ErrorClass.OUTCOME_UNKNOWN}
)
_TERMINAL: Final = {
    Status.COMPLETE: Reason.COMPLETE,
    Status.FATAL: Reason.FATAL,
    Status.PERMISSION_DENIED: Reason.PERMISSION_DENIED,
    Status.POLICY_BLOCKED: Reason.POLICY_BLOCKED,
    Status.HUMAN_REQUIRED: Reason.HUMAN_REQUIRED,
}
_OWN_ENDINGS: Final = frozenset({Reason.DENY_RULE, Reason.OUTCOME_UNKNOWN})
# No tool has an empty name, and no name holds a unit separator that reaches this file unharmed.
ANY_TOOL: Final = ""
LEDGER_GUARD: Final = "ledger"
_SEPARATOR: Final = "\x1f"
_PROGRESS: Final = Status.PROGRESS
_UNWATCHED: Final = (Effect.POLL, Effect.WAIT)


def cycle_before(limits: Limits, evidence: Evidence, proposal: Proposal) -> Trip | None:
    """Would this call go on with a cycle of period 2 to `cycle_period_max`? The shortest period is named."""
    if proposal.effect in _UNWATCHED:
        return None
    trail, runs = evidence.trail, evidence.runs
    laps = limits.cycle_repeats_max
    if laps > 1 and not any(runs):
        return None  # nothing has repeated yet
    length = len(trail)
    for period in range(2, min(limits.cycle_period_max, length) + 1):
        # Period 2 closes its last lap with the refused call; longer ones have finished it.
        needed = max(0, period * (laps - 1) - (1 if period == 2 else 0))  # noqa: PLR2004
        if runs[period - 1] < needed or trail[length - period][0] != proposal.fingerprint:
            continue
        if runs[0] >= period + needed - 1:
            continue  # one symbol all along
        block = trail[length - period :]
        return Trip(
            reason=Reason.SHORT_CYCLE,
            guard="short_cycle",
            detail=Detail(limit_name="cycle_repeats_max", limit=laps, value=laps, period=period, repeats=laps),
            loop="cycle:" + _rotation(block),
        )
    return None


def _rotation(block: list[tuple[str, str]]) -> str:
    """One name for a cycle, wherever it is entered."""
    names = [fingerprint for fingerprint, _ in block]
    first = min(range(len(names)), key=lambda start: names[start:] + names[:start])
    return digest(",".join(names[first:] + names[:first]).encode())


def same_call_before(limits: Limits, evidence: Evidence, proposal: Proposal) -> Trip | None:
    """Did this call give one answer `same_call_max` times in the window, or as often back to back?"""
    if proposal.effect in _UNWATCHED:
        return None
    count = 0
    if proposal.fingerprint in evidence.calls:
        count = _repeats(limits, evidence, proposal.fingerprint)
    # Calls in flight have no answer yet; until they do, they count as the same.
    if evidence.pending:
        count += sum(
            call.fingerprint == proposal.fingerprint and call_id != proposal.call_id
            for call_id, call in evidence.pending.items()
        )
    if count < limits.same_call_max:
        return None
    return Trip(
        reason=Reason.SAME_CALL_REPEAT,
        guard="same_call",
        detail=Detail(limit_name="same_call_max", limit=limits.same_call_max, value=count, repeats=count),
        loop=f"same_call:{proposal.fingerprint}",
    )


def _repeats(limits: Limits, evidence: Evidence, fingerprint: str) -> int:
    counts: dict[str, int] = {}
    for executed, answer in evidence.trail[-limits.call_window :]:
        if executed == fingerprint:
            counts[answer] = counts.get(answer, 0) + 1
    last = evidence.last
    in_a_row = last.count if last is not None and last.fingerprint == fingerprint else 0
    return max(in_a_row, *counts.values(), 0)


def streak_key(tool: str, error_class: ErrorClass, symbol: str = "") -> str:
    """The name of one tool's streak of one class; plain tool failures are told apart by their message."""
    return f"{short_name(tool)}{_SEPARATOR}{error_class}{_SEPARATOR}{symbol}"


def streaks_of(evidence: Evidence, tool: str) -> list[str]:
    """The streaks that a success of `tool` ends: its own, and those that count across tools."""
    prefixes = (f"{short_name(tool)}{_SEPARATOR}", f"{ANY_TOOL}{_SEPARATOR}")
    return [key for key in evidence.streaks if key.startswith(prefixes)]


def refuse(
    policy: Policy, evidence: Evidence, proposal: Proposal, reason: Reason, guard: str, detail: Detail
) -> Verdict:
    """Block this call, or stop the run when the agent has been refused like this too often.

    Host refusals, deny rules and open outcomes end the run at `refused_streak_max`, the guard's other refusals at
    `error_streak_max`. Refusals of one class across tools count as well, up to `error_streak_max`, so that going from
    tool to tool is no way out. Identical news within one round counts once.
    """
    limits = policy.limits
    key, anywhere = refusal_keys(proposal.tool, reason, detail)
    if policy.observes and reason is not Reason.DENY_RULE:
        return Verdict(action=Action.BLOCK, reason=reason, guard=guard, detail=detail)
    strict = detail.error_class in REFUSED_CLASSES or reason in _OWN_ENDINGS
    limit = limits.refused_streak_max if strict else limits.error_streak_max
    own = evidence.streaks.get(key, 0) + _advance(evidence, key, proposal.round_id)
    total = evidence.streaks.get(anywhere, 0) + _advance(evidence, anywhere, proposal.round_id)
    if own < limit and total < max(limit, limits.error_streak_max):
        return Verdict(action=Action.BLOCK, reason=reason, guard=guard, detail=detail)
    found = Detail(
        limit_name="refused_streak_max" if strict else "error_streak_max",
        limit=limit,
        value=max(own, total),
        tool=proposal.tool,
        error_class=detail.error_class or ErrorClass.GUARD_BLOCKED,
        rule=detail.rule,
    )
    ending = reason if reason in _OWN_ENDINGS else Reason.ERROR_STREAK
    return Verdict(action=Action.STOP, reason=ending, guard=guard, detail=found)


def replay_key(proposal: Proposal) -> str:
    """The streak of one committed write that is asked for again and answered from the ledger."""
    return streak_key(proposal.tool, ErrorClass.GUARD_BLOCKED, f"replay {proposal.key_digest or ''}"[:24])


def refusal_keys(tool: str, reason: Reason | None, detail: Detail) -> tuple[str, str]:
    """The two streaks that a refusal advances: of this tool, and of any tool."""
    error_class = detail.error_class or ErrorClass.GUARD_BLOCKED
    symbol = "" if error_class in REFUSED_CLASSES else str(reason)
    return streak_key(tool, error_class, symbol), streak_key(ANY_TOOL, error_class, symbol)


def _advance(evidence: Evidence, key: str, round_id: str | None) -> int:
    return 0 if round_id is not None and evidence.streak_rounds.get(key) == call_symbol(round_id) else 1


def after(policy: Policy, evidence: Evidence, seen: Observation, tool: ToolPolicy) -> Verdict:
    """What follows from a result that has been folded: go on, or stop."""
    # 1. The tool's own word on the run.
    terminal = None if seen.status is _PROGRESS else _TERMINAL.get(seen.status)
    if terminal is not None:
        return Verdict(action=Action.STOP, reason=terminal, guard="result", detail=Detail(tool=seen.tool))
    # 2. Polls have their own count, and nothing else.
    if seen.effect in _UNWATCHED:
        return _poll_after(policy, evidence, seen, tool) if seen.effect is Effect.POLL else GO
    if not seen.evidence:
        return GO
    # 3. The streak, the stall, the row of one answer. A quiet ladder costs nothing.
    limits = policy.limits
    trip: Trip | None = None
    if seen.error_class is not None:
        trip = _streak_after(limits, evidence, seen, seen.error_class)
    if trip is None and evidence.stall >= limits.no_progress_max:
        trip = _stall_trip(limits, evidence)
    if trip is None and len(evidence.row_calls) >= limits.same_answer_max and seen.tool == evidence.row_tool:
        trip = _row_trip(limits, evidence, seen)
    return GO if trip is None else _climb_after(policy, evidence, trip)


def _climb_after(policy: Policy, evidence: Evidence, trip: Trip) -> Verdict:
    """The rung for a loop seen in a result: what has run cannot be blocked, so that rung is a stop."""
    verdict = climb(policy, evidence, trip)
    return replace(verdict, action=Action.STOP) if verdict.action is Action.BLOCK else verdict


def _poll_after(policy: Policy, evidence: Evidence, seen: Observation, tool: ToolPolicy) -> Verdict:
    unchanged = evidence.polls.get(seen.fingerprint, ("", 0, 0))[1]
    limit = tool.poll_unchanged_max or policy.limits.poll_unchanged_max
    if unchanged < limit:
        return GO
    trip = Trip(
        reason=Reason.POLL_EXHAUSTED,
        guard="poll",
        detail=Detail(limit_name="poll_unchanged_max", limit=limit, value=unchanged, tool=seen.tool),
        loop=f"poll:{seen.fingerprint}",
    )
    return _climb_after(policy, evidence, trip)


def _streak_after(limits: Limits, evidence: Evidence, seen: Observation, error_class: ErrorClass) -> Trip | None:
    key = streak_key(seen.tool, error_class, seen.error_symbol)
    count = evidence.streaks.get(key, 0)
    strict = error_class in REFUSED_CLASSES
    limit = limits.refused_streak_max if strict else limits.error_streak_max
    if count < limit:
        return None
    detail = Detail(
        limit_name="refused_streak_max" if strict else "error_streak_max",
        limit=limit,
        value=count,
        tool=seen.tool,
        error_class=error_class,
    )
    return Trip(reason=Reason.ERROR_STREAK, guard="error_streak", detail=detail, loop=f"streak:{key}")


def _stall_trip(limits: Limits, evidence: Evidence) -> Trip:
    detail = Detail(limit_name="no_progress_max", limit=limits.no_progress_max, value=evidence.stall)
    return Trip(reason=Reason.NO_PROGRESS, guard="no_progress", detail=detail, loop=f"stall:{evidence.epoch}")


def _row_trip(limits: Limits, evidence: Evidence, seen: Observation) -> Trip:
    detail = Detail(
        limit_name="same_answer_max", limit=limits.same_answer_max, value=len(evidence.row_calls), tool=seen.tool
    )
    loop = f"row:{short_name(seen.tool)}:{seen.answer[:8]}"
    return Trip(reason=Reason.SAME_ANSWER, guard="same_answer", detail=detail, loop=loop)
