"""Which recorded calls are the evidence of a stop: a bounded log of settled calls beside the guards' own memory."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Final, NamedTuple

from endstop.core.reasons import Reason
from endstop.replay.report import CallMark

if TYPE_CHECKING:
    from endstop.core.events import Verdict

__all__ = ["MARKS_MAX", "Logged", "marks_of"]

LOG_MAX: Final = 256
MARKS_MAX: Final = 64


class Logged(NamedTuple):
    """One settled or refused call: enough to say which calls a verdict rests on."""

    index: int
    tool: str
    fingerprint: str
    answer: str
    news: bool
    failure: str
    key_digest: str | None


def new_log() -> deque[Logged]:
    """An empty log, bounded to `LOG_MAX` calls."""
    return deque(maxlen=LOG_MAX)


def marks_of(log: deque[Logged], verdict: Verdict, fingerprint: str, key_digest: str | None) -> tuple[CallMark, ...]:
    """The calls that `verdict` rests on, oldest first; `fingerprint` and `key_digest` are the judged call's."""
    detail = verdict.detail
    match verdict.reason:
        case Reason.SHORT_CYCLE:
            period, laps = detail.period or 0, detail.repeats or 0
            found = list(log)[-(period * laps - (1 if period == 2 else 0)) :]  # noqa: PLR2004  # see core.loops
        case Reason.SAME_CALL_REPEAT | Reason.POLL_EXHAUSTED:
            wanted = (detail.value or 0) + (1 if verdict.reason is Reason.POLL_EXHAUSTED else 0)
            found = _newest(log, wanted, lambda call: call.fingerprint == fingerprint)
        case Reason.NO_PROGRESS:
            found = []
            for call in reversed(log):
                if call.news:
                    break
                found.insert(0, call)
        case Reason.SAME_ANSWER:
            last = log[-1] if log else None
            found = _newest(
                log,
                detail.value or 0,
                lambda call: last is not None and (call.tool, call.answer) == (last.tool, last.answer),
            )
        case Reason.ERROR_STREAK:
            failures = [call.failure for call in log if call.failure]
            found = _newest(log, detail.value or 0, lambda call: call.failure == failures[-1]) if failures else []
        case Reason.ALREADY_COMMITTED | Reason.OUTCOME_UNKNOWN:
            found = _newest(log, 1, lambda call: key_digest is not None and call.key_digest == key_digest)
        case _:
            found = list(log)[-1:] if verdict.guard == "result" else []
    return tuple(
        CallMark(index=call.index, tool=call.tool, fingerprint=call.fingerprint) for call in found[-MARKS_MAX:]
    )


def _newest(log: deque[Logged], wanted: int, fits: Callable[[Logged], bool]) -> list[Logged]:
    return [call for call in log if fits(call)][-wanted:] if wanted > 0 else []
