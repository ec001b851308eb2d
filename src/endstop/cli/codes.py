"""Exit codes, and the one place where an error becomes one. What ended a run stands in `core.reasons.ENDINGS`."""

from __future__ import annotations

from enum import IntEnum

from endstop.core.reasons import ENDINGS
from endstop.errors import (
    EndstopError,
    ModelNotFoundError,
    NotAuthorisedError,
    OutcomeUnknownError,
    RunHalted,
    RunNotFoundError,
    RunStopped,
    UsageError,
)

__all__ = ["ExitCode", "Refused", "exit_code_of"]


class ExitCode(IntEnum):
    """What the process ends with. Documented, stable, never reused."""

    DONE = 0
    INTERNAL = 1
    USAGE = 2
    GUARD = 3
    OPERATOR = 4
    PERSON = 5
    VERIFICATION = 6
    FROZEN = 7
    NOT_FOUND = 8
    NOT_AUTHORISED = 9
    IN_DOUBT = 10
    TIMEOUT = 124
    INTERRUPTED = 130


class Refused(EndstopError):
    """A verb that cannot go on for a reason that has an exit code of its own."""

    code = "cli"

    def __init__(self, message: str, exit_code: ExitCode) -> None:
        super().__init__(message, exit_code)
        self.exit_code = exit_code

    def __str__(self) -> str:
        return str(self.args[0])


def exit_code_of(error: BaseException) -> int:
    """The exit code of an error that ended a verb. What is not an error of this package is internal."""
    match error:
        case Refused():
            return error.exit_code
        case RunStopped() | RunHalted():
            return ENDINGS[error.envelope.terminal_reason].exit_code
        case RunNotFoundError():
            return ExitCode.NOT_FOUND
        case NotAuthorisedError():
            return ExitCode.NOT_AUTHORISED
        case OutcomeUnknownError():
            return ExitCode.IN_DOUBT
        case UsageError() | ModelNotFoundError():
            return ExitCode.USAGE
        case KeyboardInterrupt():
            return ExitCode.INTERRUPTED
        case _:
            return ExitCode.INTERNAL
