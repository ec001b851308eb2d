"""Figures as people read them: money, durations, ages, and a counter beside its limit."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from endstop.core.codec import rfc3339

if TYPE_CHECKING:
    from endstop.core.model import Counters
    from endstop.core.policy import Limits

__all__ = ["age", "clock_time", "duration", "money", "seconds_time", "usage"]

NANOS_PER_CENT: Final = 10_000_000
CENTS: Final = 100
_UNITS: Final = ((86_400_000, "d"), (3_600_000, "h"), (60_000, "min"), (1_000, "s"))


def money(nanos: int) -> str:
    """Nano-dollars as dollars, to the hundredth of a cent."""
    tenths_of_mill = -(-nanos // 100_000)
    whole, rest = divmod(tenths_of_mill, 10_000)
    return f"${whole}.{rest:04d}"


def duration(span_ms: int) -> str:
    """Milliseconds in the largest unit that fits."""
    for size_ms, unit in _UNITS:
        if span_ms >= size_ms:
            whole, rest = divmod(span_ms * 10 // size_ms, 10)
            return f"{whole} {unit}" if rest == 0 or whole >= 10 else f"{whole}.{rest} {unit}"  # noqa: PLR2004
    return f"{span_ms} ms"


def age(at_us: int, now_us: int) -> str:
    """How long ago something was."""
    return duration(max(0, now_us - at_us) // 1_000)


def seconds_time(at_us: int) -> str:
    """A time in UTC to the second."""
    return (rfc3339(at_us) or "")[:19] + "Z"


def clock_time(at_us: int) -> str:
    """The time of day in UTC to the millisecond."""
    return (rfc3339(at_us) or "")[11:23] + "Z"


def usage(counters: Counters, limits: Limits) -> tuple[tuple[str, int, int | None, str], ...]:
    """What a run has used: name, value, limit (None: no limit), and both as text."""
    tokens = counters.input_tokens + counters.output_tokens
    budget = limits.spend_nanos_max
    return (
        ("turns", counters.turns, limits.turns_max, f"{counters.turns} of {limits.turns_max}"),
        ("steps", counters.steps, limits.steps_max, f"{counters.steps} of {limits.steps_max}"),
        ("tokens", tokens, limits.tokens_max, f"{tokens} of {limits.tokens_max}"),
        (
            "spend", counters.spend_nanos, budget,
            f"{money(counters.spend_nanos)}{'' if budget is None else f' of {money(budget)}'}",
        ),
        (
            "time", counters.elapsed_ms, limits.wall_ms_max,
            f"{duration(counters.elapsed_ms)} of {duration(limits.wall_ms_max)}",
        ),
    )  # fmt: skip
