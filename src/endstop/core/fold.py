"""How each event of a run changes its evidence. The only code that does, with `fold_turns` for model calls.

Every function here takes the evidence and one event and returns nothing. The same functions run when a live call
passes and when a ledger is folded back, so that folding the entries gives the stored state. Rule: an event carries
everything that its fold needs; no fold looks at a policy's opinion of the past.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, TypeVar

from endstop.core import loops
from endstop.core.evidence import (
    ANSWER_CHARS_KEPT,
    ANSWERED_MAX,
    ANSWERS_MAX,
    CALLS_MAX,
    ENDED_CHARS_MAX,
    OPAQUE_VALUES_MAX,
    PENDING_MAX,
    POLLS_MAX,
    ROUND_CALLS_MAX,
    ROUNDS_MAX,
    RUNGS_MAX,
    SOURCES_MAX,
    STREAKS_MAX,
    VERSIONS_MAX,
    WAITS_MAX,
    LastAnswer,
    Pending,
    call_symbol,
    kept_version,
    short_name,
)
from endstop.core.fold_turns import turn_charged, turn_excess, turn_let_through, turn_settled, turns_charged
from endstop.core.reasons import Action, Effect, Reason
from endstop.errors import InvariantError

if TYPE_CHECKING:
    from endstop.core.events import Observation, Proposal, Verdict
    from endstop.core.evidence import Evidence
    from endstop.core.model import Version
    from endstop.core.policy import Limits

__all__ = [
    "abandoned",
    "child_started",
    "climbed_after",
    "continued",
    "ended",
    "handed_off",
    "let_through",
    "new_epoch",
    "note_version",
    "paused",
    "reentered",
    "refused",
    "replayed",
    "resumed",
    "seed_version",
    "settled",
    "started",
    "turn_charged",
    "turn_excess",
    "turn_let_through",
    "turn_settled",
    "turns_charged",
    "user_input",
]

V = TypeVar("V")
# On CPython 3.11 reading a member through its enum costs more than the comparison it is for.
_POLL: Final = Effect.POLL
_READ: Final = Effect.READ
_UNWATCHED: Final = (Effect.POLL, Effect.WAIT)
_HANDED_OFF: Final = "handoff"
_COUNTED_REFUSALS: Final = frozenset({"deny", "host", "strict_tools", "key", "operation", "retry"})


# -- Calls


def let_through(
    evidence: Evidence, proposal: Proposal, verdict: Verdict, now_us: int, operation_id: str | None
) -> None:
    """A tool call may run: it counts as a step from now on, settled or not."""
    if len(evidence.pending) >= PENDING_MAX and proposal.call_id not in evidence.pending:
        msg = f"more than {PENDING_MAX} calls of one run are in flight"
        raise InvariantError(msg)
    evidence.steps += 1
    if verdict.is_retry:
        evidence.retries += 1
        evidence.waits.pop(proposal.fingerprint, None)
    _climbed(evidence, verdict)
    _count_in_round(evidence, proposal)
    evidence.pending[proposal.call_id] = Pending(
        tool=short_name(proposal.tool),
        fingerprint=proposal.fingerprint,
        since_us=now_us,
        operation_id=operation_id,
    )


def refused(evidence: Evidence, proposal: Proposal, verdict: Verdict) -> None:
    """A tool call was blocked: evidence of what the agent keeps asking for. One that was only put off is none."""
    if verdict.action is Action.WAIT:
        return
    evidence.blocked += 1
    _climbed(evidence, verdict)
    _count_in_round(evidence, proposal)
    if verdict.guard in _COUNTED_REFUSALS and verdict.reason is not None and verdict.reason is not Reason.IN_PROGRESS:
        for key in loops.refusal_keys(proposal.tool, verdict.reason, verdict.detail):
            _advance_streak(evidence, key, proposal.round_id)


def replayed(evidence: Evidence, proposal: Proposal, verdict: Verdict) -> None:
    """A tool call was answered from the ledger or shared its twin's answer; nothing ran."""
    _climbed(evidence, verdict)
    _count_in_round(evidence, proposal)
    if verdict.guard == loops.LEDGER_GUARD:
        _advance_streak(evidence, loops.replay_key(proposal), proposal.round_id)
    if proposal.key_digest is not None and verdict.reason is None:
        if proposal.key_digest in evidence.answered:
            evidence.answered.remove(proposal.key_digest)
        evidence.answered.append(proposal.key_digest)
        del evidence.answered[:-ANSWERED_MAX]


def settled(evidence: Evidence, seen: Observation, limits: Limits, now_us: int) -> None:
    """A tool call has an outcome. The order matters: the epoch opens before the result is recorded."""
    evidence.pending.pop(seen.call_id, None)
    # 1. What the result says of a retry.
    if seen.not_before_us is not None:
        _put(evidence, evidence.waits, seen.fingerprint, seen.not_before_us, WAITS_MAX)
    elif evidence.waits:
        evidence.waits.pop(seen.fingerprint, None)
    # 2. Progress: a version that grew to a value not seen before. A failure's version proves nothing.
    if seen.version is not None and seen.version_source is not None and not seen.failed:
        if seen.progress:
            new_epoch(evidence)
            evidence.progress_version = seen.version
        note_version(evidence, seen.version_source, seen.version)
    # 3. Polls count apart, waits nowhere, transport failures are no evidence.
    if seen.effect is _POLL:
        _fold_poll(evidence, seen, now_us)
    if not seen.evidence or seen.effect in _UNWATCHED:
        if seen.evidence and not seen.failed:
            _clear_streaks(evidence, seen.tool)
        return
    # 4. The window, the memory, the stall, the row, the streak.
    if seen.changed:
        _clear_window(evidence)
    _fold_trail(evidence, seen, limits)
    _remember(evidence, seen.fingerprint, seen.answer)
    _fold_stall(evidence, seen)
    _fold_row(evidence, seen, limits)
    _fold_streak(evidence, seen)


def abandoned(evidence: Evidence, call_id: str) -> None:
    """A call that was let through ended without an outcome (a crash, a cancellation)."""
    evidence.pending.pop(call_id, None)


# -- Handoffs, children


def handed_off(evidence: Evidence, proposal: Proposal, verdict: Verdict, limits: Limits) -> None:
    """One agent handed the run to another: counted, and a symbol of the window with a constant answer."""
    evidence.handoffs += 1
    _climbed(evidence, verdict)
    _push(evidence, (proposal.fingerprint, _HANDED_OFF), limits)
    _remember(evidence, proposal.fingerprint, _HANDED_OFF)
    evidence.last = None


def child_started(evidence: Evidence, verdict: Verdict) -> None:
    """A child run started; it shares this evidence."""
    _climbed(evidence, verdict)


# -- Life


def started(evidence: Evidence, now_us: int) -> None:
    """The run began, or went on after a pause: its time counts from now."""
    if not evidence.running_since_us:
        # A clock may start at zero, and zero marks "not running".
        evidence.running_since_us = max(now_us, 1)


continued = started


def paused(evidence: Evidence, now_us: int) -> None:
    """The run's time stands still from now."""
    evidence.elapsed_us = evidence.elapsed_us_at(now_us)
    evidence.running_since_us = 0


def ended(evidence: Evidence, reason: Reason, message: str, now_us: int) -> None:
    """The latch: every later call of this generation is refused."""
    paused(evidence, now_us)
    evidence.ended = reason.value
    evidence.ended_message = message[:ENDED_CHARS_MAX]


def resumed(evidence: Evidence, now_us: int) -> None:
    """A new generation goes on from the same totals in a new epoch. The change that it names answers every wait."""
    evidence.generation += 1
    evidence.ended = None
    evidence.ended_message = ""
    evidence.pending.clear()
    turns_charged(evidence)
    evidence.rounds.clear()
    evidence.answered.clear()
    evidence.waits.clear()
    new_epoch(evidence)
    evidence.running_since_us = 0
    started(evidence, now_us)


def reentered(evidence: Evidence) -> None:
    """A worker came back to a run that nobody was in: a new generation, with windows and counts as they were."""
    evidence.generation += 1
    evidence.answered.clear()
    evidence.pending.clear()
    turns_charged(evidence)


def user_input(evidence: Evidence) -> None:
    """A real person spoke: a new epoch. Text that a host injects must never come here."""
    new_epoch(evidence)


def new_epoch(evidence: Evidence) -> None:
    """Windows and counts start empty; totals, versions, waits and calls in flight stay."""
    evidence.epoch += 1
    _clear_window(evidence)
    evidence.calls.clear()
    evidence.last = None
    evidence.stall = 0
    evidence.stall_round = None
    evidence.streaks.clear()
    evidence.streak_rounds.clear()
    evidence.polls.clear()
    evidence.rungs.clear()
    evidence.warned = 0


def seed_version(evidence: Evidence, version: Version) -> None:
    """The progress version that every source starts from, so that an unchanged first result is no progress."""
    evidence.progress_version = version
    if isinstance(version, int):
        floor = evidence.version_floor
        evidence.version_floor = version if floor is None else max(floor, version)
    else:
        evidence.seeded = kept_version(version)


def note_version(evidence: Evidence, source: str, version: Version) -> None:
    """Keep the highest number, or the last opaque values, of one source; what is evicted becomes the floor.

    A source that mixes numbers and text is opaque from then on, so that going back and forth is no growth.
    """
    known = evidence.versions.pop(source, None)
    floor = evidence.version_floor
    if isinstance(version, int) and not isinstance(known, list):
        start = known if known is not None else floor
        evidence.versions[source] = version if start is None else max(start, version)
    else:
        values = known if isinstance(known, list) else [] if known is None else [str(known)]
        symbol = kept_version(version)
        if symbol in values:
            values.remove(symbol)
        values.append(symbol)
        del values[:-VERSIONS_MAX]
        evidence.versions[source] = values
        _bound_opaque_values(evidence)
    while len(evidence.versions) > SOURCES_MAX:
        oldest = evidence.versions.pop(next(iter(evidence.versions)))
        evidence.evictions += 1
        if isinstance(oldest, int):
            evidence.version_floor = oldest if floor is None else max(floor, oldest)


def _bound_opaque_values(evidence: Evidence) -> None:
    """Drop the oldest opaque values of the source used longest ago while all sources hold too many."""
    lists = [values for values in evidence.versions.values() if isinstance(values, list)]
    excess = sum(map(len, lists)) - OPAQUE_VALUES_MAX
    for values in lists:
        dropped = max(0, min(excess, len(values)))
        del values[:dropped]
        evidence.evictions += dropped
        excess -= dropped


# -- Parts


def _climbed(evidence: Evidence, verdict: Verdict) -> None:
    if verdict.loop is None or verdict.observed:
        return
    climbed = evidence.rungs_climbed(verdict.loop) + 1
    _put(evidence, evidence.rungs, verdict.loop, (climbed, evidence.steps), RUNGS_MAX)
    if verdict.warn:
        evidence.warned += 1


def climbed_after(evidence: Evidence, verdict: Verdict) -> None:
    """A verdict on a result climbed a rung of its loop's ladder."""
    if verdict.action is not Action.STOP:
        _climbed(evidence, verdict)


def _count_in_round(evidence: Evidence, proposal: Proposal) -> None:
    """A call was proposed in its message. Calls beyond the room for rounds are judged one by one, like any other."""
    if proposal.round_id is None:
        return
    calls = evidence.rounds.setdefault(proposal.round_id, {})
    if len(evidence.rounds) > ROUNDS_MAX:
        del evidence.rounds[next(iter(evidence.rounds))]
    symbol = call_symbol(proposal.call_id)
    count, first = calls.get(proposal.fingerprint, (0, symbol))
    if count == 0:
        if len(calls) >= ROUND_CALLS_MAX:
            return
        while sum(map(len, evidence.rounds.values())) >= ROUND_CALLS_MAX:
            del evidence.rounds[next(name for name in evidence.rounds if name != proposal.round_id)]
    if count != 1 or first != symbol:
        calls[proposal.fingerprint] = (count + 1, first)


def _clear_window(evidence: Evidence) -> None:
    evidence.trail.clear()
    evidence.runs.clear()
    evidence.row_tool = ""
    evidence.row_answer = ""
    evidence.row_calls = []
    evidence.row_round = None


def _push(evidence: Evidence, symbol: tuple[str, str], limits: Limits) -> None:
    """Append one symbol and count, for each period, how long the trail has been repeating itself."""
    trail, runs = evidence.trail, evidence.runs
    period_max = max(limits.cycle_period_max, 1)
    if len(runs) != period_max:
        evidence.runs = runs = (runs + [0] * period_max)[:period_max]
    if symbol in trail:
        length = len(trail)
        for period in range(1, period_max + 1):
            if period <= length and trail[length - period] == symbol:
                runs[period - 1] += 1
            else:
                runs[period - 1] = 0
    else:
        evidence.runs = [0] * period_max
    trail.append(symbol)
    kept = max(period_max, limits.call_window)
    if len(trail) > kept:
        del trail[0]


def _fold_trail(evidence: Evidence, seen: Observation, limits: Limits) -> None:
    _push(evidence, (seen.fingerprint, seen.answer), limits)
    last = evidence.last
    if last is not None and last.fingerprint == seen.fingerprint and last.answer == seen.answer:
        last.count += 1
        last.sketch, last.text = seen.sketch, seen.text
        return
    evidence.last = LastAnswer(seen.fingerprint, seen.answer, 1, seen.sketch, seen.text)


def _remember(evidence: Evidence, fingerprint: str, answer: str) -> None:
    """The calls used last, with their answers used last. Every call in the trail stands in this memory too."""
    answer = answer[:ANSWER_CHARS_KEPT]
    answers = evidence.calls.pop(fingerprint, None)
    if answers is None:
        evidence.calls[fingerprint] = {answer: 1}
    else:
        answers[answer] = answers.pop(answer, 0) + 1
        if len(answers) > ANSWERS_MAX:
            del answers[next(iter(answers))]
            evidence.evictions += 1
        evidence.calls[fingerprint] = answers
    if len(evidence.calls) > CALLS_MAX:
        del evidence.calls[next(iter(evidence.calls))]
        evidence.evictions += 1


def _fold_stall(evidence: Evidence, seen: Observation) -> None:
    if seen.news:
        evidence.stall = 0
        evidence.stall_round = None
    elif seen.round_id is None or seen.round_id != evidence.stall_round:
        evidence.stall += 1
        evidence.stall_round = seen.round_id


def _fold_row(evidence: Evidence, seen: Observation, limits: Limits) -> None:
    if seen.tool != evidence.row_tool:
        if not seen.news:
            return
        evidence.row_tool, evidence.row_answer, evidence.row_calls = "", "", []
    if seen.effect is not _READ or seen.failed or not seen.declared:
        return
    if seen.tool == evidence.row_tool and seen.answer == evidence.row_answer:
        fresh = seen.fingerprint not in evidence.row_calls
        once = seen.round_id is None or seen.round_id != evidence.row_round
        if fresh and once and len(evidence.row_calls) < limits.same_answer_max:
            evidence.row_calls.append(seen.fingerprint)
    else:
        evidence.row_tool, evidence.row_answer = seen.tool, seen.answer
        evidence.row_calls = [seen.fingerprint]
    evidence.row_round = seen.round_id


def _fold_streak(evidence: Evidence, seen: Observation) -> None:
    if seen.error_class is None:
        if not seen.failed:
            _clear_streaks(evidence, seen.tool)
        return
    # The classes that do not count are no evidence, and never come here.
    _advance_streak(evidence, loops.streak_key(seen.tool, seen.error_class, seen.error_symbol), seen.round_id)


def _advance_streak(evidence: Evidence, key: str, round_id: str | None) -> None:
    if round_id is not None and evidence.streak_rounds.get(key) == call_symbol(round_id):
        return
    _put(evidence, evidence.streaks, key, evidence.streaks.get(key, 0) + 1, STREAKS_MAX)
    if round_id is not None:
        _put(evidence, evidence.streak_rounds, key, call_symbol(round_id), STREAKS_MAX)


def _clear_streaks(evidence: Evidence, tool: str) -> None:
    if not evidence.streaks:
        return
    for key in loops.streaks_of(evidence, tool):
        del evidence.streaks[key]
        evidence.streak_rounds.pop(key, None)


def _fold_poll(evidence: Evidence, seen: Observation, now_us: int) -> None:
    answer, unchanged, _ = evidence.polls.get(seen.fingerprint, ("", 0, 0))
    if seen.evidence:
        unchanged = unchanged + 1 if answer == seen.answer else 0
        answer = seen.answer
    _put(evidence, evidence.polls, seen.fingerprint, (answer, unchanged, now_us), POLLS_MAX)


def _put(evidence: Evidence, mapping: dict[str, V], name: str, value: V, size_max: int) -> None:
    """Set `name` as the entry used last, dropping the one used longest ago when the mapping is full (and counting)."""
    mapping.pop(name, None)
    mapping[name] = value
    if len(mapping) > size_max:
        del mapping[next(iter(mapping))]
        evidence.evictions += 1
