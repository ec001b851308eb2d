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
    after = report.after
    saved = (
        "" if after is None or after.calls <= 0 else f"; {_count(after.calls, 'more call')} followed in the recording"
    )
    return f"{told}; stopped before {where}{saved}"


def _what(stop: StopPoint) -> str:
    detail, tool = stop.detail, stop.tool or "a tool"
    match stop.reason:
        case Reason.SAME_CALL_REPEAT:
            return f"{tool} gave the same answer to the same call {_times(detail.value)}{_between(stop)}"
        case Reason.SHORT_CYCLE:
            names = _names([mark.tool for mark in stop.evidence][-(detail.period or 0) :])
            if len(set(names)) == 1:
                names = [f"{detail.period} calls of {names[0]}"]
            return f"{' and '.join(names)} went round in a cycle of {detail.period} with the same answers"
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


def _between(stop: StopPoint) -> str:
    """What was called between the repeats, as far as it was other tools."""
    marks = stop.evidence
    if len(marks) < 2 or marks[-1].index - marks[0].index == len(marks) - 1:  # noqa: PLR2004  # two make a gap
        return ", one after the other" if len(marks) > 1 else ""
    return ", with other calls between"


def _tools(stop: StopPoint) -> list[str]:
    return _names([mark.tool for mark in stop.evidence]) or [stop.tool]


def _names(tools: list[str]) -> list[str]:
    found = list(dict.fromkeys(tools))
    return found if len(found) <= NAMES_MAX else [*found[:NAMES_MAX], f"{len(found) - NAMES_MAX} more"]


def _times(count: int | None) -> str:
    return "once" if count == 1 else f"{count} times"


def _count(count: int, noun: str) -> str:
    return f"{count} {noun}{'' if count == 1 else 's'}"
