"""Limits by measurement: the policy under which healthy recordings pass, with the figures behind each number.

A limit is set so that the run that went furthest passes with the margin on top. Limits that healthy runs stay below
are not touched: nothing is gained by making a loop guard slacker than it has to be. Caps are suggested both ways,
because a cap far above all need protects nobody.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

from endstop.core.policy import LIMIT_VALUE_MAX
from endstop.errors import UsageError

if TYPE_CHECKING:
    from endstop.core.policy import Limits, Policy
    from endstop.replay.report import RunReport

__all__ = ["MARGIN_PERCENT", "SuggestedLimit", "Suggestion", "measuring", "suggest_limits"]

MARGIN_PERCENT: Final = 25
MARGIN_PERCENT_MAX: Final = 1_000
ROW_MAX: Final = 64  # what a run's memory holds of a row of equal answers

# Each limit, the peak that it bounds, what must be added to the peak for a run to pass, and whether it is a cap.
_BOUNDS: Final = (
    ("steps_max", "steps", 0, True),
    ("turns_max", "turns", 0, True),
    ("tokens_max", "tokens", 0, True),
    ("wall_ms_max", "wall_ms", 1, True),
    ("spend_nanos_max", "spend_nanos", 0, True),
    ("retries_max", "retries", 0, False),
    ("handoffs_max", "handoffs", 0, False),
    ("same_call_max", "same_call", 1, False),
    ("cycle_repeats_max", "cycle_laps", 1, False),
    ("no_progress_max", "no_progress", 1, False),
    ("same_answer_max", "same_answer", 1, False),
    ("error_streak_max", "error_streak", 1, False),
    ("refused_streak_max", "refused_streak", 1, False),
    ("poll_unchanged_max", "poll_unchanged", 1, False),
)
_ROUND_TO: Final = {"tokens_max": 1_000, "wall_ms_max": 1_000, "spend_nanos_max": 1_000_000}


@dataclass(frozen=True, slots=True, kw_only=True)
class SuggestedLimit:
    """One limit: what is suggested, what the policy has now, and the figures behind it over all measured runs.

    `changed` is False where the present value already lets every run pass (a loop guard is then left alone).
    `impossible` is True where no value that a run's memory allows would let the furthest run pass.
    """

    name: str
    value: int
    current: int | None
    changed: bool
    median: int
    percentile_95: int
    peak: int
    peak_run: str
    impossible: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Suggestion:
    """All limits that could be measured, and the TOML fragment that sets those that should change."""

    runs: int
    calls: int
    margin_percent: int
    limits: tuple[SuggestedLimit, ...]
    toml: str


def measuring(policy: Policy) -> Policy:
    """`policy` for measuring: its memory for rows of equal answers at its widest, so that a peak is seen whole."""
    return policy.under(replace(policy.limits, same_answer_max=ROW_MAX))


def suggest_limits(reports: Sequence[RunReport], policy: Policy, *, margin_percent: int = MARGIN_PERCENT) -> Suggestion:
    """The limits under which every run of `reports` passes with `margin_percent` on top of the furthest one.

    The reports must come from a replay with `all_guards` under `measuring(policy)`. Raises UsageError without any
    measured run, and for a margin that is no whole number from 0 to 1 000.
    """
    if type(margin_percent) is not int or not 0 <= margin_percent <= MARGIN_PERCENT_MAX:
        msg = f"the margin is a whole number of percent from 0 to {MARGIN_PERCENT_MAX}"
        raise UsageError(msg)
    measured = [(report, report.peaks) for report in reports if report.peaks is not None and report.totals.calls]
    if not measured:
        msg = "no run was measured: replay healthy recordings with every guard asked (all_guards)"
        raise UsageError(msg)
    found = []
    for name, peak_name, needed, is_cap in _BOUNDS:
        values = sorted((getattr(peaks, peak_name), report.run_id) for report, peaks in measured)
        peak, run_id = values[-1]
        if is_cap and peak == 0:
            # The recordings do not say: no tokens, no times, no prices.
            continue
        found.append(
            _suggested(name, [value for value, _ in values], run_id, needed, is_cap, policy.limits, margin_percent)
        )
    calls = sum(report.totals.calls for report, _ in measured)
    return Suggestion(
        runs=len(measured), calls=calls, margin_percent=margin_percent, limits=tuple(found),
        toml=_toml(found, len(measured), calls, margin_percent),
    )  # fmt: skip


def _suggested(
    name: str, values: list[int], run_id: str, needed: int, is_cap: bool, limits: Limits, margin_percent: int
) -> SuggestedLimit:
    peak = values[-1]
    current: int | None = getattr(limits, name)
    least = peak + needed
    value = max(least, -(-peak * (100 + margin_percent) // 100))
    step = _ROUND_TO.get(name, 1)
    value = min(-(-value // step) * step, LIMIT_VALUE_MAX)
    impossible = False
    if name == "same_answer_max":
        impossible, value = least > ROW_MAX, min(value, ROW_MAX)
    changed = current != value if is_cap else current is not None and current < least
    return SuggestedLimit(
        name=name, value=value if changed else current or value, current=current, changed=changed,
        median=values[len(values) // 2], percentile_95=values[min(len(values) - 1, len(values) * 95 // 100)], peak=peak,
        peak_run=run_id, impossible=impossible,
    )  # fmt: skip


def _toml(found: Sequence[SuggestedLimit], runs: int, calls: int, margin_percent: int) -> str:
    lines = [
        f"# From {runs} run{'' if runs == 1 else 's'} with {calls} calls: {margin_percent} % above the furthest.",
        "[limits]",
    ]
    for limit in found:
        where = f" ({_plain(limit.peak_run)})" if limit.peak else ""
        figures = f"median {limit.median}, 95 % {limit.percentile_95}, most {limit.peak}{where}"
        if limit.impossible:
            lines.append(f"# {limit.name}: {figures}: no value lets this pass; declare what changes in its answers")
        elif limit.changed:
            was = "none" if limit.current is None else str(limit.current)
            lines.append(f"{limit.name} = {limit.value}  # {figures}; was {was}")
        else:
            lines.append(f"# {limit.name} = {limit.value} is enough: {figures}")
    return "\n".join(lines) + "\n"


def _plain(run_id: str) -> str:
    """A run's id as a comment may hold it."""
    return "".join(sign if sign.isprintable() else "?" for sign in run_id)[:80]
