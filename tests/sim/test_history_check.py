"""The judge alone: small histories written by hand, sound ones and each one with a single thing wrong."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

import orjson
import pytest

from endstop.core.records import EntryRecord, OperationRecord
from endstop.core.transitions import OperationState
from endstop.testing.history import (
    Applied,
    Committed,
    Event,
    Happened,
    Replayed,
    Returned,
    Rule,
    Sent,
    Violation,
    line_of,
)
from endstop.testing.history_check import HistoryChecker

S: Final = OperationState
OPERATION: Final = OperationRecord(
    operation_id="op_1", tool="pay", key_digest="k", fingerprint="f", state=S.EXECUTING, run_id="run1", generation=1,
    call_id="c1", owner_id="w1",
)  # fmt: skip


def _judge(*events: Event) -> Violation | None:
    """What a checker that does not read entries says of these events."""
    checker = HistoryChecker(folds=False)
    for event in events:
        found = checker.see(event)
        if found is not None:
            return found
    return None


def _moved(before: OperationRecord | None, after: OperationRecord, claimed: OperationRecord | None = None) -> Committed:
    return Committed(
        number=0, tick=0, at_us=0, who="w1", step="Step", run_id="run1", operations=((before, after),), claimed=claimed
    )


def _sent(attempt: int = 1, who: str = "w1") -> Sent:
    return Sent(
        number=0, tick=0, at_us=0, who=who, run_id="run1", call_id="c1", tool="pay", operation_id="op_1",
        attempt=attempt, fence=attempt,
    )  # fmt: skip


def _applied(attempt: int = 1) -> Applied:
    return Applied(number=0, tick=0, at_us=0, who="target", tool="pay", operation_id="op_1", attempt=attempt)


def _as(state: OperationState, **changed: int) -> OperationRecord:
    return replace(OPERATION, state=state, **changed)  # type: ignore[arg-type]  # attempt and fence


INTENT: Final = _moved(None, OPERATION)
COMMITTED: Final = _as(S.COMMITTED)
RETRYABLE: Final = _as(S.FAILED_RETRYABLE)
SECOND: Final = _as(S.EXECUTING, attempt=2, fence=2)
RETURNED: Final = Returned(number=0, tick=0, at_us=0, who="w1", operation_id="op_1", attempt=1, value="7")

SOUND: Final[dict[str, tuple[Event, ...]]] = {
    "sent, applied, committed": (INTENT, _sent(), _applied(), _moved(OPERATION, COMMITTED, OPERATION)),
    "lost, and a late result": (
        INTENT, _sent(), _moved(OPERATION, _as(S.UNKNOWN)), _applied(),
        _moved(_as(S.UNKNOWN), COMMITTED, OPERATION),
    ),
    "not applied, and another attempt": (
        INTENT, _sent(), _moved(OPERATION, RETRYABLE, OPERATION), _moved(RETRYABLE, SECOND), _sent(2), _applied(2),
    ),
    "replayed with its value": (
        INTENT, _sent(), _applied(), RETURNED, _moved(OPERATION, COMMITTED, OPERATION),
        Replayed(number=0, tick=0, at_us=0, who="w2", operation_id="op_1", value="7"),
    ),
}  # fmt: skip

WRONG: Final[dict[str, tuple[Rule, tuple[Event, ...]]]] = {
    "sent without an intent": (Rule.INTENT_FIRST, (_sent(),)),
    "sent by another worker than the intent's": (Rule.INTENT_FIRST, (INTENT, _sent(who="w2"))),
    "an effect without a call": (Rule.INTENT_FIRST, (INTENT, _applied())),
    "sent twice under one attempt": (Rule.ONE_EFFECT, (INTENT, _sent(), _sent())),
    "two effects of one call": (Rule.ONE_EFFECT, (INTENT, _sent(), _applied(), _applied())),
    "dispatched again while it executes": (
        Rule.ONE_EFFECT, (INTENT, _moved(OPERATION, replace(SECOND, owner_id="w2"))),
    ),
    "dispatched again while its outcome is open": (
        Rule.ONE_EFFECT, (INTENT, _moved(OPERATION, _as(S.UNKNOWN)), _moved(_as(S.UNKNOWN), SECOND)),
    ),
    "settled by an owner of an older fence": (
        Rule.SETTLED_ONCE,
        (
            INTENT, _sent(), _moved(OPERATION, RETRYABLE, OPERATION), _moved(RETRYABLE, SECOND), _sent(2), _applied(2),
            _moved(SECOND, replace(SECOND, state=S.COMMITTED), OPERATION),
        ),
    ),
    "a fence that goes back": (Rule.SETTLED_ONCE, (INTENT, _moved(OPERATION, _as(S.UNKNOWN, fence=0)))),
    "a step that no state has": (Rule.SETTLED_ONCE, (INTENT, _moved(OPERATION, _as(S.CANCELLED)))),
    "a new attempt that is not fenced": (
        Rule.SETTLED_ONCE,
        (INTENT, _moved(OPERATION, RETRYABLE, OPERATION), _moved(RETRYABLE, _as(S.EXECUTING, attempt=2))),
    ),
    "committed without an effect": (Rule.TRUE_OUTCOME, (INTENT, _sent(), _moved(OPERATION, COMMITTED, OPERATION))),
    "not applied after its effect": (
        Rule.TRUE_OUTCOME, (INTENT, _sent(), _applied(), _moved(OPERATION, RETRYABLE, OPERATION)),
    ),
    "not applied, and then its effect": (
        Rule.TRUE_OUTCOME, (INTENT, _sent(), _moved(OPERATION, RETRYABLE, OPERATION), _applied()),
    ),
    "written again after it was committed": (
        Rule.FINAL,
        (INTENT, _sent(), _applied(), _moved(OPERATION, COMMITTED, OPERATION), _moved(COMMITTED, _as(S.UNKNOWN))),
    ),
    "replayed while it executes": (
        Rule.FINAL, (INTENT, Replayed(number=0, tick=0, at_us=0, who="w2", operation_id="op_1", value="7")),
    ),
    "replayed with another value": (
        Rule.FINAL,
        (*SOUND["replayed with its value"],
         Replayed(number=0, tick=0, at_us=0, who="w2", operation_id="op_1", value="8")),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", SOUND)
def test_a_sound_history_passes(name: str) -> None:
    assert _judge(*SOUND[name]) is None


@pytest.mark.parametrize("name", WRONG)
def test_a_history_with_one_thing_wrong_does_not(name: str) -> None:
    rule, events = WRONG[name]
    found = _judge(*events)
    assert found is not None, "it passed"
    assert found.rule is rule, found.text


def _entry(index: int, seq: int) -> EntryRecord:
    body = {"type": "checkpoint", "run": "run1", "seq": seq, "gen": 1, "ts_us": 1}
    return EntryRecord(index=index, leaf=orjson.dumps(body))


def _wrote(*entries: EntryRecord) -> Committed:
    return Committed(number=0, tick=0, at_us=0, who="w1", step="Step", run_id=None, entries=entries)


def test_positions_and_numbers_without_gaps_pass() -> None:
    assert _judge(_wrote(_entry(0, 0), _entry(1, 1)), _wrote(_entry(2, 2))) is None


@pytest.mark.parametrize("second", [_entry(2, 1), _entry(0, 1), _entry(1, 2), _entry(1, 0)])
def test_a_gap_or_a_repetition_in_positions_or_numbers_does_not(second: EntryRecord) -> None:
    found = _judge(_wrote(_entry(0, 0)), _wrote(second))
    assert found is not None
    assert found.rule is Rule.NO_GAPS


def test_an_entry_that_changed_after_it_was_written_is_seen_at_the_end() -> None:
    checker = HistoryChecker(folds=False)
    checker.see(_wrote(_entry(0, 0)))
    assert checker.unchanged((_entry(0, 0).leaf,), 1) is None
    changed = checker.unchanged((_entry(0, 5).leaf,), 1)
    assert changed is not None
    assert changed.rule is Rule.NO_GAPS


def test_every_kind_of_event_has_its_line() -> None:
    events: list[Event] = [
        INTENT, _sent(), _applied(), RETURNED, Happened(number=0, tick=0, at_us=0, who="w1", text="dies"),
        Replayed(number=0, tick=0, at_us=0, who="w1", operation_id="op_1", value="7"),
    ]  # fmt: skip
    for event, word in zip(events, ("commit", "call pay", "EFFECT", "returned", "dies", "replayed"), strict=True):
        assert word in line_of(event)
