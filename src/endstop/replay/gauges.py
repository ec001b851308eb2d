"""What each guard alone would have done, and how near a run came to each limit.

Both need the run to go on past its first stop, so they read the evidence of a replay that never latches. Each guard
is asked by itself, with every other one out of the way.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

from endstop.core import loops
from endstop.core.policy import LIMIT_VALUE_MAX, Limits, Policy
from endstop.core.reasons import Action, Effect, Reason
from endstop.replay.report import GuardTrip, Peaks

if TYPE_CHECKING:
    from endstop.core.events import Observation, Proposal, Verdict
    from endstop.core.evidence import Evidence
    from endstop.core.policy import ToolPolicy

__all__ = ["Gauges", "uncapped"]

_OFF: Final = LIMIT_VALUE_MAX
_ROW_OFF: Final = 64
# The caps: limits on sums, which stop any run that is long enough, loop or not.
_UNCAPPED: Final = {
    "steps_max": _OFF, "turns_max": _OFF, "tokens_max": _OFF, "wall_ms_max": _OFF, "retries_max": _OFF,
    "handoffs_max": _OFF, "depth_max": _OFF, "spend_nanos_max": None,
}  # fmt: skip


def uncapped(policy: Policy) -> Policy:
    """`policy` without its caps: what is left are the loop guards and the tools' own words."""
    return policy.under(replace(policy.limits, **_UNCAPPED))  # type: ignore[arg-type]  # names and kinds of Limits


@dataclass(slots=True)
class _Most:
    """The peaks so far."""

    same_call: int = 0
    cycle_laps: int = 0
    no_progress: int = 0
    same_answer: int = 0
    error_streak: int = 0
    refused_streak: int = 0
    poll_unchanged: int = 0


class Gauges:
    """Asks every guard of `policy` about every event of one run."""

    def __init__(self, policy: Policy) -> None:
        self._policy = replace(policy, on_trip=("stop",))
        limits = policy.limits
        self._limits = limits
        self._any_repeat = replace(limits, same_call_max=1)
        quiet = replace(
            limits, error_streak_max=_OFF, refused_streak_max=_OFF, no_progress_max=_OFF, same_answer_max=_ROW_OFF
        )
        self._after = {
            Reason.ERROR_STREAK: self._under(
                replace(quiet, error_streak_max=limits.error_streak_max, refused_streak_max=limits.refused_streak_max)
            ),
            Reason.NO_PROGRESS: self._under(replace(quiet, no_progress_max=limits.no_progress_max)),
            Reason.SAME_ANSWER: self._under(replace(quiet, same_answer_max=limits.same_answer_max)),
        }
        self._trips: dict[str, GuardTrip] = {}
        self._most = _Most()

    def _under(self, limits: Limits) -> Policy:
        return self._policy.under(limits)

    def before(self, evidence: Evidence, proposal: Proposal, index: int, now_us: int) -> None:
        """Ask the guards that judge a proposed call."""
        limits = self._limits
        if evidence.steps >= limits.steps_max:
            self._trip("steps_max", Reason.STEP_CAP, index, value=evidence.steps)
        self._clock(evidence, index, now_us)
        trip = loops.cycle_before(limits, evidence, proposal)
        if trip is not None:
            self._trip("short_cycle", trip.reason, index, value=trip.detail.period)
        self._most.cycle_laps = max(self._most.cycle_laps, _laps(limits, evidence, proposal))
        seen = loops.same_call_before(self._any_repeat, evidence, proposal)
        if seen is not None:
            count = seen.detail.value or 0
            self._most.same_call = max(self._most.same_call, count)
            if count >= limits.same_call_max:
                self._trip("same_call", seen.reason, index, value=count)

    def after(self, evidence: Evidence, seen: Observation, tool: ToolPolicy, index: int, next_index: int) -> None:
        """Ask the guards that judge a result: of call `index`, when the next call is `next_index`."""
        most = self._most
        most.no_progress = max(most.no_progress, evidence.stall)
        most.same_answer = max(most.same_answer, len(evidence.row_calls))
        if seen.effect is Effect.POLL:
            most.poll_unchanged = max(most.poll_unchanged, evidence.polls.get(seen.fingerprint, ("", 0, 0))[1])
        if evidence.streaks:
            self._streaks(evidence)
        for reason, policy in self._after.items():
            verdict = loops.after(policy, evidence, seen, tool)
            if verdict.action is not Action.STOP or verdict.reason is None:
                continue
            if verdict.reason is reason or verdict.guard in ("poll", "result"):
                self._trip(
                    verdict.guard or reason.value,
                    verdict.reason,
                    next_index,
                    after_call=index,
                    value=verdict.detail.value,
                )

    def stopped(self, verdict: Verdict, index: int, after_call: int | None) -> None:
        """The whole guard stopped here; keep it for guards that are asked nowhere else (keys, hosts, retries)."""
        if verdict.reason is not None:
            guard = verdict.guard or verdict.reason.value
            self._trip(guard, verdict.reason, index, after_call=after_call, value=verdict.detail.value)

    def turn(self, evidence: Evidence, next_index: int, now_us: int) -> None:
        """Ask the caps that judge a model call."""
        limits = self._limits
        self._clock(evidence, next_index, now_us)
        tokens = evidence.input_tokens + evidence.output_tokens
        if evidence.turns >= limits.turns_max:
            self._trip("turns_max", Reason.TURN_CEILING, next_index, value=evidence.turns)
        if tokens > limits.tokens_max:
            self._trip("tokens_max", Reason.TOKEN_CEILING, next_index, value=tokens)
        if limits.spend_nanos_max is not None and evidence.spend_nanos > limits.spend_nanos_max:
            self._trip("spend_nanos_max", Reason.SPEND_CAP, next_index, value=evidence.spend_nanos)

    def _clock(self, evidence: Evidence, index: int, now_us: int) -> None:
        elapsed_ms = evidence.elapsed_us_at(now_us) // 1_000
        if elapsed_ms >= self._limits.wall_ms_max:
            self._trip("wall_ms_max", Reason.WALL_CLOCK_CAP, index, value=elapsed_ms)

    def _streaks(self, evidence: Evidence) -> None:
        most = self._most
        for key, count in evidence.streaks.items():
            # The class stands between the tool and the symbol.
            strict = key.split("\x1f")[1:2] and key.split("\x1f")[1] in loops.REFUSED_CLASSES
            if strict:
                most.refused_streak = max(most.refused_streak, count)
            else:
                most.error_streak = max(most.error_streak, count)

    def _trip(
        self, guard: str, reason: Reason, index: int, *, after_call: int | None = None, value: int | None = None
    ) -> None:
        if guard not in self._trips:
            self._trips[guard] = GuardTrip(
                guard=guard, reason=reason, call_index=index, after_call=after_call, value=value
            )

    def trips(self) -> tuple[GuardTrip, ...]:
        """Where each guard that would have ended the run would first have done so, in the order of the calls."""
        return tuple(sorted(self._trips.values(), key=lambda trip: (trip.call_index, trip.guard)))

    def peaks(self, evidence: Evidence, now_us: int) -> Peaks:
        """How far the whole run went."""
        most = self._most
        return Peaks(
            steps=evidence.steps, turns=evidence.turns, tokens=evidence.input_tokens + evidence.output_tokens,
            wall_ms=evidence.elapsed_us_at(now_us) // 1_000, retries=evidence.retries, handoffs=evidence.handoffs,
            spend_nanos=evidence.spend_nanos, same_call=most.same_call, cycle_laps=most.cycle_laps,
            no_progress=most.no_progress, same_answer=most.same_answer, error_streak=most.error_streak,
            refused_streak=most.refused_streak, poll_unchanged=most.poll_unchanged,
        )  # fmt: skip


def _laps(limits: Limits, evidence: Evidence, proposal: Proposal) -> int:
    """How many laps of a cycle this call goes on with (the last one of period 2 closed by the call itself)."""
    trail, runs = evidence.trail, evidence.runs
    found = 0
    for period in range(2, min(limits.cycle_period_max, len(trail), len(runs)) + 1):
        run = runs[period - 1]
        if run == 0 or trail[-period][0] != proposal.fingerprint or runs[0] >= run + period - 1:
            continue
        found = max(found, (run + (1 if period == 2 else 0)) // period + 1)  # noqa: PLR2004  # see core.loops
    return found
