"""What is allowed in a policy and still probably not meant: limits that can never fire, tools half declared."""

from __future__ import annotations

from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Final

from endstop.core.reasons import Effect, OutcomeClass

if TYPE_CHECKING:
    from collections.abc import Iterator

    from endstop.core.policy import Limits, Policy, ToolPolicy

__all__ = ["policy_warnings"]

PERIOD_MIN: Final = 2
_WILDCARDS: Final = frozenset("*?[")
# Each needs so many executed calls before it can fire, and the steps of a run never start again.
_NEED_STEPS: Final = ("same_call_max", "no_progress_max", "same_answer_max", "error_streak_max")


def policy_warnings(policy: Policy) -> tuple[str, ...]:
    """One sentence for everything in `policy` that can never take effect or is left to a default that surprises."""
    return (*_of_ladder(policy), *_of_limits(policy.limits), *_of_tools(policy))


def _of_ladder(policy: Policy) -> Iterator[str]:
    if policy.observes:
        yield "on_trip is ['observe']: loop guards and caps stop nothing, they only write down that they would have"
    if policy.strict_tools and not policy.tools:
        yield "strict_tools is set and no tool is declared here: only tools declared in code can run"


def _of_limits(limits: Limits) -> Iterator[str]:
    steps = limits.steps_max
    if steps == 0:
        yield "steps_max is 0: no tool call can run"
        return
    if limits.turns_max == 0:
        yield "turns_max is 0: no model call can run"
    if limits.tokens_max == 0:
        yield "tokens_max is 0: no model call can run"
    for name in _NEED_STEPS:
        value = getattr(limits, name)
        # The same call is refused before it runs, which needs one call more than its count.
        if value > steps or (name == "same_call_max" and value == steps):
            yield f"{name} = {value} can never fire: steps_max = {steps} ends the run first"
    if limits.same_call_max > limits.call_window:
        yield (
            f"same_call_max = {limits.same_call_max} is greater than call_window = {limits.call_window}: "
            "only repeats back to back are found"
        )
    if limits.cycle_period_max < PERIOD_MIN:
        yield f"cycle_period_max = {limits.cycle_period_max}: no cycle is looked for (the shortest has 2 calls)"
    elif limits.cycle_repeats_max * limits.cycle_period_max >= steps:
        longest = (steps - 1) // limits.cycle_repeats_max
        reach = f"periods beyond {longest}" if longest >= PERIOD_MIN else "most cycles"
        yield (
            f"cycle_period_max = {limits.cycle_period_max} with cycle_repeats_max = {limits.cycle_repeats_max} needs "
            f"{limits.cycle_repeats_max * limits.cycle_period_max} calls: steps_max = {steps} ends the run before "
            f"{reach} are found"
        )
    if limits.cycle_repeats_max == 1:
        yield "cycle_repeats_max = 1: a call that comes again after any other calls is taken for a cycle"


def _of_tools(policy: Policy) -> Iterator[str]:
    seen: list[str] = []
    for name, tool in policy.tools.items():
        shadow = next((earlier for earlier in seen if _hides(earlier, name)), None)
        if shadow is not None:
            yield f"tool {name!r} is never reached: the earlier pattern {shadow!r} takes every name that it fits"
        seen.append(name)
        for said in (*_of_effect(tool), *_of_write(tool), *_of_poll(policy.limits, tool), *_of_fields(policy, tool)):
            yield f"tool {name!r} {said}"


def _hides(earlier: str, later: str) -> bool:
    """Exact names are looked up first, so only a pattern can be hidden, and only by another."""
    return bool(_WILDCARDS & set(later)) and fnmatchcase(later, earlier)


def _of_effect(tool: ToolPolicy) -> Iterator[str]:
    if tool.effect is Effect.UNKNOWN:
        yield "declares no effect: it is never retried, and a crash leaves its calls in doubt"


def _of_write(tool: ToolPolicy) -> Iterator[str]:
    if tool.effect is not Effect.WRITE:
        for name in ("idempotency_key", "scope", "outcome_class", "probe", "on_committed"):
            if getattr(tool, name) is not None:
                yield f"sets {name}, which only a write uses: its effect is {tool.effect}"
        return
    if tool.idempotency_key is None:
        yield "is a write without idempotency_key: every call of it is refused (key_missing)"
    if tool.outcome_class is None and tool.probe is None:
        yield "is a write without outcome_class: at_most_once, so an unknown outcome waits for a person"
    if tool.outcome_class is OutcomeClass.PROBEABLE and tool.probe is None:
        yield "is probeable and names no probe: an unknown outcome waits for a person"
    if tool.probe is not None and tool.target_class is OutcomeClass.AT_MOST_ONCE:
        yield f"names a probe, and its outcome_class is {tool.target_class}: say probeable to have it asked"
    if tool.probe is None:
        for name in ("probes_max", "probe_settle_ms", "probe_backoff_ms"):
            if getattr(tool, name) is not None:
                yield f"sets {name} and names no probe"
    if tool.wait_ms is not None and tool.waiter != "wait":
        yield "sets wait_ms, which only waiter = 'wait' uses"


def _of_poll(limits: Limits, tool: ToolPolicy) -> Iterator[str]:
    if tool.effect is not Effect.POLL:
        for name in ("poll_unchanged_max", "poll_interval_ms_min"):
            if getattr(tool, name) is not None:
                yield f"sets {name}, which only a poll uses: its effect is {tool.effect}"
        return
    unchanged, steps = tool.poll_unchanged_max or limits.poll_unchanged_max, limits.steps_max
    # The first poll of a row has nothing before it that it could equal.
    if unchanged >= steps:
        yield f"polls: poll_unchanged_max = {unchanged} can never fire: steps_max = {steps} ends the run first"
    spent_ms = (tool.poll_interval_ms_min or 0) * unchanged
    if spent_ms > limits.wall_ms_max:
        yield (
            f"polls: {unchanged} polls of {tool.poll_interval_ms_min} ms never fit into "
            f"wall_ms_max = {limits.wall_ms_max}, which ends the run first"
        )


def _of_fields(policy: Policy, tool: ToolPolicy) -> Iterator[str]:
    both = sorted(set(tool.identity) & set(tool.volatile_args))
    if both:
        yield f"names {', '.join(both)} in identity and in volatile_args: it does not count"
    if tool.deadline_ms is not None and tool.deadline_ms > policy.limits.wall_ms_max:
        yield (
            f"has deadline_ms = {tool.deadline_ms}: one call may outlast the whole run's "
            f"wall_ms_max = {policy.limits.wall_ms_max}"
        )
