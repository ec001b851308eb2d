"""What a verdict rests on: a bounded log of settled calls beside the guards' own memory."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from endstop.core.loops import streak_key
from endstop.core.reasons import Reason
from endstop.replay.report import CallMark

if TYPE_CHECKING:
    from endstop.core.events import Observation, Verdict

__all__ = ["MARKS_MAX", "Grounds", "Logged", "failure_of", "grounds_of", "new_log", "reads_as_failure"]

LOG_MAX: Final = 256
MARKS_MAX: Final = 64
BETWEEN_MAX: Final = 8

# One settled or refused call: its place in the run, tool, fingerprint, answer, whether it was news, the streak that its
# failure advanced, its key, and whether its answer reads as a failure. A bare tuple: one is made on every call.
Logged = tuple[int, str, str, str, bool, str, str | None, bool]
_TOOL, _FINGERPRINT, _ANSWER, _NEWS, _FAILURE, _KEY, _FAILING = range(1, 8)
_FAILING_HEADS: Final = frozenset({"Error", "error", "ERROR", "Could", "Trace", "Faile", "FAILE", "Excep", "Inval"})
_TWO: Final = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Grounds:
    """What a verdict rests on: the calls, the tools called between them, and whether their answers read as failures."""

    marks: tuple[CallMark, ...] = ()
    between: tuple[str, ...] = ()
    failing: bool = False


def new_log() -> deque[Logged]:
    """An empty log, bounded to `LOG_MAX` calls."""
    return deque(maxlen=LOG_MAX)


def failure_of(seen: Observation) -> str:
    """The streak that a failed result advances; empty for one that did not fail."""
    return "" if seen.error_class is None else streak_key(seen.tool, seen.error_class, seen.error_symbol)


def reads_as_failure(value: object) -> bool:
    """Whether an answer begins as failures do. For the story alone: no decision ever reads an answer's text."""
    return type(value) is str and value[:5] in _FAILING_HEADS


def grounds_of(log: deque[Logged], verdict: Verdict, fingerprint: str, key_digest: str | None) -> Grounds:
    """What `verdict` rests on, oldest call first; `fingerprint` and `key_digest` are the judged call's."""
    found = _calls(log, verdict, fingerprint, key_digest)[-MARKS_MAX:]
    if not found:
        return Grounds()
    places = {place for place, *_ in found}
    first, last = min(places), max(places)
    between = [tool for place, tool, *_ in log if first < place < last and place not in places]
    return Grounds(
        marks=tuple(CallMark(index=place, tool=tool, fingerprint=called) for place, tool, called, *_ in found),
        between=tuple(dict.fromkeys(between))[:BETWEEN_MAX],
        failing=all(call[_FAILING] for call in found),
    )


def _calls(log: deque[Logged], verdict: Verdict, fingerprint: str, key_digest: str | None) -> list[Logged]:
    detail = verdict.detail
    value = detail.value or 0
    match verdict.reason:
        case Reason.SHORT_CYCLE:
            # The last lap of period 2 is closed by the refused call itself: see core.loops.
            period, laps = detail.period or 0, detail.repeats or 0
            return list(log)[-(period * laps - (1 if period == _TWO else 0)) :]
        case Reason.SAME_CALL_REPEAT:
            return _newest(log, value, lambda call: call[_FINGERPRINT] == fingerprint)
        case Reason.POLL_EXHAUSTED:
            return _newest(log, value + 1, lambda call: call[_FINGERPRINT] == fingerprint)
        case Reason.NO_PROGRESS:
            found: list[Logged] = []
            for call in reversed(log):
                if call[_NEWS]:
                    break
                found.insert(0, call)
            return found
        case Reason.SAME_ANSWER if log:
            tool, answer = log[-1][_TOOL], log[-1][_ANSWER]
            return _newest(log, value, lambda call: (call[_TOOL], call[_ANSWER]) == (tool, answer))
        case Reason.ERROR_STREAK:
            failure = next((call[_FAILURE] for call in reversed(log) if call[_FAILURE]), "")
            return _newest(log, value, lambda call: bool(failure) and call[_FAILURE] == failure)
        case Reason.ALREADY_COMMITTED | Reason.OUTCOME_UNKNOWN:
            return _newest(log, 1, lambda call: key_digest is not None and call[_KEY] == key_digest)
        case _:
            return list(log)[-1:] if verdict.guard == "result" else []


def _newest(log: deque[Logged], wanted: int, fits: Callable[[Logged], bool]) -> list[Logged]:
    return [call for call in log if fits(call)][-wanted:] if wanted > 0 else []
