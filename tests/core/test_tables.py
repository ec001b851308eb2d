"""The closed sets are closed: every reason has its text and its ending, and nothing else has one."""

from __future__ import annotations

from dataclasses import fields
from string import Formatter
from typing import Final

import pytest

from endstop import Action, Limits, Reason, Status
from endstop.core.events import Verdict
from endstop.core.loops import _TERMINAL
from endstop.core.messages import TEXTS, message_of
from endstop.core.model import Block, Counters, Decision, Detail, Execute, Replay, Stop, Wait
from endstop.core.reasons import (
    BLOCK_REASONS,
    CAP_REASONS,
    ENDINGS,
    LIMIT_OF_REASON,
    OPERATOR_REASONS,
    TERMINAL_REASONS,
    NextAction,
)

FULL: Final = Detail(limit=3, value=4, period=5, repeats=6, rule="a value for id")


def test_every_reason_has_a_text_and_nothing_else_has() -> None:
    assert set(TEXTS) == set(Reason)


@pytest.mark.parametrize("reason", list(Reason))
def test_a_text_can_be_written_with_and_without_figures(reason: Reason) -> None:
    for detail in (FULL, Detail()):
        text = message_of(Verdict(action=Action.STOP, reason=reason, detail=detail))
        assert text
        assert "{" not in text
        assert "None" not in text
    names = {name for _, name, _, _ in Formatter().parse(TEXTS[reason]) if name}
    assert names <= {"limit", "value", "period", "repeats", "rule"}


def test_every_terminal_reason_has_an_ending_and_no_block_reason_has() -> None:
    assert set(ENDINGS) == TERMINAL_REASONS
    assert not TERMINAL_REASONS & BLOCK_REASONS
    assert set(Reason) == TERMINAL_REASONS | BLOCK_REASONS


def test_only_a_complete_run_exits_with_success_and_the_exit_codes_are_the_documented_ones() -> None:
    codes = {reason: ending.exit_code for reason, ending in ENDINGS.items()}
    assert [reason for reason, code in codes.items() if code == 0] == [Reason.COMPLETE]
    assert set(codes.values()) == {0, 1, 3, 4, 5, 10}
    assert {reason for reason, code in codes.items() if code == 4} == OPERATOR_REASONS
    assert {reason for reason, code in codes.items() if code == 5} == {Reason.HUMAN_REQUIRED}
    assert {reason for reason, code in codes.items() if code == 10} == {Reason.OUTCOME_UNKNOWN}
    assert codes[Reason.WALL_CLOCK_CAP] == 3


def test_only_a_complete_run_leaves_nothing_to_do() -> None:
    none = [reason for reason, ending in ENDINGS.items() if ending.next_action is NextAction.NONE]
    assert none == [Reason.COMPLETE]


def test_every_cap_names_a_limit_that_exists() -> None:
    assert set(LIMIT_OF_REASON) == CAP_REASONS
    assert set(LIMIT_OF_REASON.values()) <= {item.name for item in fields(Limits)}


def test_every_terminal_status_has_the_reason_of_its_name() -> None:
    assert set(_TERMINAL) == set(Status) - {Status.PROGRESS, Status.RETRYABLE}
    assert all(status.value == reason.value for status, reason in _TERMINAL.items())


@pytest.mark.parametrize(
    ("kind", "action"),
    [
        (Execute, Action.EXECUTE),
        (Replay, Action.REPLAY),
        (Wait, Action.WAIT),
        (Block, Action.BLOCK),
        (Stop, Action.STOP),
    ],
)
def test_each_decision_names_its_action(kind: type[Decision], action: Action) -> None:
    assert kind().action is action
    assert kind().action == action.value


def test_a_decision_of_no_kind_has_no_action() -> None:
    with pytest.raises(NotImplementedError):
        _ = Decision().action


def test_counters_start_at_nothing() -> None:
    assert {getattr(Counters(), item.name) for item in fields(Counters)} == {0}
