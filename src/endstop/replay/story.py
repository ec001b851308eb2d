"""A stop in one line of words: which tool, what it did, how often, and where it would have been refused.

Words only, from names and counts: no argument and no answer is ever quoted.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from endstop.core.reasons import CAP_REASONS, LIMIT_OF_REASON, Reason

if TYPE_CHECKING:
    from endstop.replay.report import RunReport, StopPoint

__all__ = ["story_of"]

NAMES_MAX: Final = 4


def story_of(report: RunReport) -> str:
    """The story of `report`'s stop, or of its passing."""
    stop = report.stop
    calls = _count(report.totals.calls, "call")
    if stop is None:
        observed = next((one for one in report.judgements if one.observed), None)
        if observed is not None:
            return f"{observed.reason} was observed at call {observed.call_index}; nothing was stopped in {calls}"
        return f"passed: {calls}, nothing to stop"
    told = _what(stop)
    where = f"call {stop.call_index}" if stop.call_index < report.totals.calls else "the call after the last"
    if stop.at_turn:
        where = f"model turn {stop.turn + 1}"
    return f"{told}; stopped before {where}{_rest(report)}"


def _rest(report: RunReport) -> str:
    """What the recording went on to do."""
    after = report.after
    if after is None or after.calls <= 0:
        return ""
    if report.repeated_after > 1:
        return (
            f"; the recording made {_count(after.calls, 'more call')}, {report.repeated_after} of them this one again"
        )
    return f"; the recording made {_count(after.calls, 'more call')}"


def _what(stop: StopPoint) -> str:
    detail, tool = stop.detail, stop.tool or "a tool"
    match stop.reason:
        case Reason.SAME_CALL_REPEAT:
            how = "failed the same way" if stop.failing else "gave the same answer to the same call"
            return f"{tool} {how} {_times(detail.value)}{_between(stop)}"
        case Reason.SHORT_CYCLE:
            return _cycle(stop)
        case Reason.NO_PROGRESS:
            return f"the last {detail.value} results brought nothing new ({', '.join(_tools(stop))})"
        case Reason.SAME_ANSWER:
            return f"{tool} gave one answer to {detail.value} different requests"
        case Reason.ERROR_STREAK:
            how = "was refused" if stop.guard == "host" else "failed the same way"
            return f"{tool} {how} {_times(detail.value)}{_between(stop)}"
        case Reason.POLL_EXHAUSTED:
            return f"{tool} was polled {_times(detail.value)} without a change"
        case Reason.ALREADY_COMMITTED:
            return f"{tool} had already been committed and was proposed again"
        case Reason.OUTCOME_UNKNOWN:
            return f"{tool} was proposed again while its outcome was unknown"
        case reason if reason in CAP_REASONS:
            return f"the run met {LIMIT_OF_REASON[reason]} = {detail.limit}"
        case Reason.COMPLETE:
            return f"{tool} reported that the task is complete"
        case _:
            return f"{tool} ended the run: {stop.reason.value.replace('_', ' ')}"


def _cycle(stop: StopPoint) -> str:
    period = stop.detail.period or 0
    names = _names([mark.tool for mark in stop.evidence][-period:])
    answers = "the same failures" if stop.failing else "the same answers"
    if len(names) <= 1:
        return f"{(names or [stop.tool])[0]} went round {period} calls with {answers}"
    if period == 2:  # noqa: PLR2004  # two calls alternate, more go round
        return f"{names[0]} and {names[1]} alternated with {answers}"
    return f"{', '.join(names[:-1])} and {names[-1]} went round a cycle of {period} calls with {answers}"


def _between(stop: StopPoint) -> str:
    """What was called between the repeats, as far as it was other tools."""
    names = [name for name in _names(list(stop.between)) if name != stop.tool]
    if names:
        return f", alternating with {' and '.join(names)}"
    if len(stop.evidence) < 2:  # noqa: PLR2004  # one call has nothing between
        return ""
    apart = stop.evidence[-1].index - stop.evidence[0].index >= len(stop.evidence)
    return ", with other calls between" if apart else " in a row"


def _tools(stop: StopPoint) -> list[str]:
    return _names([mark.tool for mark in stop.evidence]) or [stop.tool]


def _names(tools: list[str]) -> list[str]:
    found = list(dict.fromkeys(tools))
    return found if len(found) <= NAMES_MAX else [*found[:NAMES_MAX], f"{len(found) - NAMES_MAX} more"]


def _times(count: int | None) -> str:
    return "once" if count == 1 else f"{count} times"


def _count(count: int, noun: str) -> str:
    return f"{count} {noun}{'' if count == 1 else 's'}"
