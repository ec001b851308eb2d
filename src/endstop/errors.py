"""Every error that Endstop raises, in one tree.

    EndstopError (Exception)
    |-- UsageError                 the caller asked for something that cannot be; nothing happened
    |   |-- SpecInvalidError       a spec field is blank or missing
    |   |-- PolicyInvalidError     a policy does not parse or contradicts itself
    |   |-- TaskInvalidError       a task file or scripted model does not parse
    |   |-- NotCanonicalError      a value has no canonical JSON form
    |   |-- RunJoinError           the run exists with another spec or policy
    |   |-- RunNotFoundError       no run of that id in this store
    |   |-- ResumeRefusedError     the resume names no change, or not the one that is needed
    |   `-- GuardClosedError       the guard or its store was closed
    |-- NotAuthorisedError         the actor may not do this
    |-- NotAppliedError            raised BY a tool: proof that its side effect did not happen
    |-- OperationError             about one operation
    |   |-- OutcomeUnknownError    a side effect may have happened; never retried by itself
    |   `-- OutputWithheldError    the run has no output that may be handed on
    |-- StoreError                 the store failed; unless `effect` says otherwise nothing was written
    |   |-- StoreUnavailableError  locked, unreachable, read-only or gone
    |   |-- StoreFullError         no room left, or a named limit reached
    |   |-- StoreCorruptError      unreadable or contradictory records
    |   |-- StoreQuarantinedError  restored from a backup; no side effect until a person accepts it
    |   |-- SchemaVersionError     another schema version than this code knows
    |   `-- CommitUnknownError     the store may or may not have committed
    |-- ModelError                 about a model call
    |   |-- ModelNotFoundError     the model's name or client cannot be used here
    |   `-- ProviderError          the provider failed; carries the fault's class
    `-- RunStopped                 leaving a stopped run's `with` block; carries the envelope
    InvariantError (AssertionError)    a bug in Endstop
    RunHalted (BaseException)      a signal, not an error: an agent's `except Exception` cannot eat it

Each class answers three questions as class attributes: who must act (`acts`), may a side effect have
happened (`effect`: "none" or "possible"), and may the same call be tried again (`retryable`).
`code` is stable and never reused.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

if TYPE_CHECKING:
    from endstop.core.envelope import Envelope

__all__ = [
    "CommitUnknownError",
    "EndstopError",
    "GuardClosedError",
    "InvariantError",
    "ModelError",
    "ModelNotFoundError",
    "NotAppliedError",
    "NotAuthorisedError",
    "NotCanonicalError",
    "OperationError",
    "OutcomeUnknownError",
    "OutputWithheldError",
    "PolicyInvalidError",
    "ProviderError",
    "ResumeRefusedError",
    "RunHalted",
    "RunJoinError",
    "RunNotFoundError",
    "RunStopped",
    "SchemaVersionError",
    "SpecInvalidError",
    "StoreCorruptError",
    "StoreError",
    "StoreFullError",
    "StoreQuarantinedError",
    "StoreUnavailableError",
    "TaskInvalidError",
    "UsageError",
]


class EndstopError(Exception):
    """Base of every error of this package."""

    code: ClassVar[str] = "endstop"
    acts: ClassVar[str] = "caller"
    effect: ClassVar[str] = "none"
    retryable: ClassVar[bool] = False


class UsageError(EndstopError):
    """The caller asked for something that cannot be; nothing happened."""

    code = "usage"


class SpecInvalidError(UsageError):
    """A spec field is blank or missing."""

    code = "spec_invalid"


class PolicyInvalidError(UsageError):
    """A policy does not parse or contradicts itself."""

    code = "policy_invalid"


class TaskInvalidError(UsageError):
    """A task file or a scripted model does not parse."""

    code = "task_invalid"


class NotCanonicalError(UsageError):
    """A value has no canonical JSON form (NaN, a non-string key, too deep, too large, an unknown type)."""

    code = "not_canonical"


class RunJoinError(UsageError):
    """The run exists with another spec or policy than the one given."""

    code = "run_join"


class RunNotFoundError(UsageError):
    """No run of that id in this store."""

    code = "run_not_found"


class ResumeRefusedError(UsageError):
    """The resume names no change, or not the one that the run's end needs."""

    code = "resume_refused"


class GuardClosedError(UsageError):
    """The guard or its store was closed before this call."""

    code = "guard_closed"


class NotAuthorisedError(EndstopError):
    """The actor may not do this; nothing happened."""

    code = "not_authorised"
    acts = "operator"


class NotAppliedError(EndstopError):
    """Raised by a tool as proof that its side effect did not happen, so that another attempt is safe.

    `final` says that the target would refuse every other attempt too: this one's answer is kept for ever. Without it,
    `retry_after_ms` is the target's own wait before the next attempt, or None.
    """

    code = "not_applied"
    acts = "agent"
    retryable = True

    def __init__(self, message: str = "", *, final: bool = False, retry_after_ms: int | None = None) -> None:
        super().__init__(message)
        self.final = final
        self.retry_after_ms = retry_after_ms


class OperationError(EndstopError):
    """About one operation; names its id and state, never its payload."""

    code = "operation"


class OutcomeUnknownError(OperationError):
    """A side effect may have happened and its outcome is not known.

    `operation_id` names the record to settle; the tool's own exception is the `__cause__`.
    """

    code = "outcome_unknown"
    acts = "operator"
    effect = "possible"

    def __init__(self, message: str, operation_id: str = "") -> None:
        super().__init__(message, operation_id)
        self.operation_id = operation_id

    def __str__(self) -> str:
        return str(self.args[0])


class OutputWithheldError(OperationError):
    """The run has no output that may be handed on."""

    code = "output_withheld"
    acts = "reviewer"


class StoreError(EndstopError):
    """The store failed. No side effect was let through."""

    code = "store"
    acts = "operator"


class StoreUnavailableError(StoreError):
    """The store is locked, unreachable, read-only or gone."""

    code = "store_unavailable"
    retryable = True


class StoreFullError(StoreError):
    """The store has no room left, or a named limit of it was reached."""

    code = "store_full"


class StoreCorruptError(StoreError):
    """Records are unreadable or contradict each other."""

    code = "store_corrupt"


class StoreQuarantinedError(StoreError):
    """The store was restored or rolled back, so side effects may have happened that it does not know of."""

    code = "store_quarantined"


class SchemaVersionError(StoreError):
    """The store's schema version is not one that this code knows."""

    code = "schema_version"


class CommitUnknownError(StoreError):
    """The store may or may not have committed; read back before doing anything."""

    code = "commit_unknown"
    effect = "possible"


class ModelError(EndstopError):
    """About a model call."""

    code = "model"


class ModelNotFoundError(ModelError):
    """The model's name or client cannot be used here; the message names what to install or to set."""

    code = "model_not_found"


class ProviderError(ModelError):
    """The provider of a model failed.

    `fault` is one of `rate_limit | outage | timeout | auth | invalid_request | unreachable | other`;
    `retry_after_ms` is the provider's own wait, or None.
    """

    code = "provider_fault"
    acts = "operator"
    retryable = True

    def __init__(self, message: str, fault: str = "other", retry_after_ms: int | None = None) -> None:
        super().__init__(message, fault, retry_after_ms)
        self.fault = fault
        self.retry_after_ms = retry_after_ms

    def __str__(self) -> str:
        return str(self.args[0])


class RunStopped(EndstopError):
    """Leaving the `with` block of a run that was stopped. `envelope` says why, as the record does."""

    code = "run_stopped"
    acts = "operator"

    def __init__(self, message: str, envelope: Envelope) -> None:
        super().__init__(message, envelope)
        self.envelope = envelope

    def __str__(self) -> str:
        return str(self.args[0])


class InvariantError(AssertionError):
    """A bug in Endstop: a state that the design rules out."""


class RunHalted(BaseException):
    """The run may not make its next call. Raised where the call was proposed, and again at every later call.

    A `BaseException`, so that an agent's `except Exception` cannot swallow it. `envelope` is the run's end.
    """

    def __init__(self, message: str, envelope: Envelope) -> None:
        super().__init__(message, envelope)
        self.envelope = envelope

    def __str__(self) -> str:
        return str(self.args[0])
