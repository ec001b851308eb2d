"""Errors become exit codes in one place."""

from __future__ import annotations

import inspect

import pytest

from endstop import errors
from endstop.cli.codes import ExitCode, Refused, exit_code_of
from endstop.core.envelope import Envelope
from endstop.core.reasons import ENDINGS, Reason

EXCEPTIONS = {
    errors.RunNotFoundError: 8,
    errors.NotAuthorisedError: 9,
    errors.OutcomeUnknownError: 10,
    errors.ModelNotFoundError: 2,
}
PLAIN = [
    found
    for _, found in inspect.getmembers(errors, inspect.isclass)
    if issubclass(found, errors.EndstopError) and found is not errors.RunStopped
]


@pytest.mark.parametrize("error", PLAIN, ids=lambda error: error.__name__)
def test_every_error_has_its_code(error: type[errors.EndstopError]) -> None:
    expected = EXCEPTIONS.get(error, 2 if issubclass(error, errors.UsageError) else 1)
    assert exit_code_of(error("x")) == expected


@pytest.mark.parametrize("reason", list(ENDINGS))
def test_a_stopped_run_gives_the_code_of_its_reason(reason: Reason) -> None:
    ending = ENDINGS[reason]
    envelope = Envelope(run_id="r", generation=1, terminal_reason=reason, next_allowed_action=ending.next_action)
    assert exit_code_of(errors.RunStopped("x", envelope)) == ending.exit_code
    assert exit_code_of(errors.RunHalted("x", envelope)) == ending.exit_code


def test_what_is_no_error_of_this_package_is_internal() -> None:
    assert exit_code_of(ValueError("x")) == ExitCode.INTERNAL
    assert exit_code_of(errors.InvariantError("x")) == ExitCode.INTERNAL
    assert exit_code_of(KeyboardInterrupt()) == ExitCode.INTERRUPTED
    assert exit_code_of(Refused("x", ExitCode.FROZEN)) == ExitCode.FROZEN


def test_every_ending_uses_a_code_that_exists() -> None:
    assert {ending.exit_code for ending in ENDINGS.values()} <= {int(code) for code in ExitCode}
