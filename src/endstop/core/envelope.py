"""The terminal envelope: the machine-readable end of a run, written once a generation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from endstop.core.model import NO_DETAIL, Counters, Detail, Version

if TYPE_CHECKING:
    from endstop.core.reasons import NextAction, Reason

__all__ = ["CallNote", "Envelope", "LedgerSpan", "OperationNote"]


@dataclass(frozen=True, slots=True, kw_only=True)
class CallNote:
    """The call that was refused, or after which the run ended: its tool, fingerprint and redacted arguments.

    `args` maps each argument's name to its type and size, never to its value.
    """

    tool: str
    fingerprint: str
    args: tuple[tuple[str, str], ...] = ()
    call_id: str = ""
    agent: str = "main"


@dataclass(frozen=True, slots=True, kw_only=True)
class OperationNote:
    """One operation of the run as the envelope lists it."""

    operation_id: str
    tool: str
    key_digest: str | None
    state: str


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerSpan:
    """The run's first and last entry (positions in the ledger) and the tree head, where one was signed."""

    first: int
    last: int
    tree_head: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Envelope:
    """Why and where a run ended. `blocked_call` is None when a result or an operator ended it: then `after_call`."""

    run_id: str
    generation: int
    terminal_reason: Reason
    guard: str | None = None
    message: str = ""
    detail: Detail = NO_DETAIL
    blocked_call: CallNote | None = None
    after_call: CallNote | None = None
    last_safe_checkpoint: str | None = None
    progress_version: Version | None = None
    external_state: str = "unknown"
    operations: tuple[OperationNote, ...] = ()
    in_doubt: tuple[str, ...] = ()
    counters: Counters = Counters()
    spend_nanos: int = 0
    next_allowed_action: NextAction
    ledger: LedgerSpan | None = None
    occurred_at_us: int = 0

    def to_json(self) -> dict[str, object]:
        """This envelope as people and machines read it (JSON values; times are RFC 3339)."""
        from endstop.core.codec import envelope_json

        return envelope_json(self)
